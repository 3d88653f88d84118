"""Reading from an object store against reading the same files from the local disk, in turns.

The images of DATA, again and again until there are ``--mib`` of them, are packed into shards, which are put into a
moto server on this machine (an S3 server in Python; it serves a range by copying the whole object: shards are small).
``--server nginx`` (a Debian package) gives the same answers to a list and to a range, for hardly any processor time: as
if the store were another machine.
Each measurement is a process of its own that takes the training batches of one pass, cut to 224 pixels: ``local``
from the disk, ``cold`` by URI with an empty cache, ``warm`` by URI with the cache that ``cold`` left. The page cache
of the files is dropped before. The work ``bytes`` does the same without decoding, so that reading is the limit.

The server takes its processor time from the same cores (``server_cpu_share``), so two more measurements say what a
cold pass could reach: ``raw`` gets all objects with obstore and does nothing with them, and ``beside`` reads from the
local disk while another process does that. ``of_possible`` is ``cold`` against the smaller of ``beside`` and the images
of ``raw``. What ``cold`` is compared with counts from the opening on (``with_opening``), since that fetches, too.

``--peers-python`` is of an environment with mosaicml-streaming and litdata: the same encoded images in their shards,
from the local disk and from the store, by a DataLoader of as many worker processes. With ``--link 1gbit,20ms`` the
server is in a network namespace of its own, behind a link of that rate and round trip (``slow_link.py``; root).
``--order blocks`` is a recipe's ``data.order=blocks``: long stretches instead of single images.

usage: python benchmarks/storage.py DATA [--mib 256] [--rounds 3] [--threads 2] [--order blocks] [--server nginx]
       [--link RATE,DELAY] [--at FOLDER] [--peers-python PATH] [--save]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

import machine
from compression import NETWORK
from slow_link import far_cable
from steadytrain.data.images.encode import to_ppm
from steadytrain.data.loader import BlockShuffle, Crop, ImageLoader
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.reader import Records

SHARD_MIB = 8
SOURCES = {"bytes": ("local", "raw", "beside", "cold", "warm"), "train": ("local", "beside", "cold", "warm")}
PEERS = ("streaming", "litdata")
READERS = Path(__file__).resolve().parent / "peers" / "storage_readers.py"
PLAIN = {"Content-Type": "application/octet-stream"}
DOT = to_ppm(np.zeros((8, 8, 3), np.uint8))
NGINX = """daemon off; error_log stderr; pid {folder}/nginx.pid; events {{}}
http {{ access_log off; sendfile on; server {{ listen {address}:5555;
location ~ ^/bench/?$ {{ root {folder}; default_type application/xml; try_files /list.xml =404; }}
location /bench/ {{ alias {folder}/bucket/; }} }} }}"""
"""A bucket as nginx serves it: objects are files, and the answer to a list is a file, too."""
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_REGION": "us-east-1",
}


class Undecoded(Records):
    """The bytes of records, read and forgotten."""

    def image(self, number: int) -> memoryview:
        np.array(super().image(number))
        return memoryview(DOT)


def measure(source: str, *, decode: bool, threads: int, blocks: BlockShuffle | None) -> dict[str, Any]:
    """Take one pass; images a second from the first batch asked for to the last, opening apart."""
    began = time.perf_counter()
    records = Records.open(source)
    if not decode:
        records = Undecoded(records.path, records._files)
    opened, cpu = time.perf_counter(), time.process_time()
    crop = Crop(kind="resized-crop", size=224 if decode else 8, flip=decode)
    n = len(records) // 64 * 64
    options: dict[str, Any] = {"batch_size": 64, "stop": n, "threads": threads, "blocks": blocks, "keep_bytes": 0}
    with records, ImageLoader(records, crop, **options) as loader:
        images = sum(len(batch) for batch in loader)
        seconds = time.perf_counter() - opened
        stats, traffic = loader.stats(), records.traffic()
    values = {"images": images, "opening_seconds": opened - began, "images_per_second": images / seconds}
    values |= {"with_opening": images / (seconds + opened - began), "bytes": stats.bytes}
    values["cpu_ms_an_image"] = 1000 * (time.process_time() - cpu) / images  # less disturbed by what else runs
    return values | {"fetched_bytes": 0 if traffic is None else traffic.bytes}


def fetch(names: Sequence[str]) -> dict[str, float]:
    """Get objects whole, many at a time, and forget them: what the store and the link can give."""
    from obstore.store import S3Store

    endpoint = os.environ["AWS_ENDPOINT_URL"]
    store = S3Store("bench", endpoint=endpoint, client_options={"allow_http": True})
    since = time.perf_counter()
    with ThreadPoolExecutor(24) as pool:
        fetched = sum(pool.map(lambda name: len(store.get(name).bytes()), names))
    return {"bytes_per_second": fetched / (time.perf_counter() - since)}


def put(url: str, data: bytes | None = None) -> None:
    urllib.request.urlopen(urllib.request.Request(url, data, PLAIN, method="PUT"), timeout=600).close()


def fill(bucket: str, folder: Path) -> None:
    """Make a bucket of the files in a folder."""
    put(bucket)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        put(f"{bucket}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def write_list(folder: Path) -> None:
    """Write the answer to a list of the bucket without its folders, with the entity tags that nginx gives to files."""
    rows = [
        f"<Contents><Key>{path.relative_to(folder / 'bucket')}</Key><Size>{stat.st_size}</Size>"
        f"<LastModified>{datetime.fromtimestamp(int(stat.st_mtime), UTC).isoformat()}</LastModified>"
        f"<ETag>&quot;{int(stat.st_mtime):x}-{stat.st_size:x}&quot;</ETag></Contents>"
        for path in sorted((folder / "bucket").iterdir())
        if path.is_file() and (stat := path.stat())
    ]
    head = "<ListBucketResult><Name>bench</Name><IsTruncated>false</IsTruncated>"
    (folder / "list.xml").write_text(f"{head}{''.join(rows)}</ListBucketResult>")


@contextlib.contextmanager
def served(name: str, link: str, folder: Path) -> Iterator[tuple[str, psutil.Process, list[str]]]:
    """Start the server, behind a link where one is given: its address and process, and how a client is to be run."""
    address, before, client = "127.0.0.1", list[str](), list[str]()
    with contextlib.ExitStack() as stack:
        if link:
            rate, _, trip = link.partition(",")
            near_end, there = stack.enter_context(far_cable(rate, float(trip.removesuffix("ms")) / 1000))
            address, (before, client) = f"{NETWORK}.2", (["ip", "netns", "exec", name] for name in (there, near_end))
        command = [sys.executable, "-m", "moto.server", "-H", address, "-p", "5555"]
        if name == "nginx":
            write_list(folder)
            (folder / "nginx.conf").write_text(NGINX.format(folder=folder, address=address))
            folder.chmod(0o755)  # its worker is another user
            command = ["nginx", "-c", str(folder / "nginx.conf")]
        with (folder / "server.log").open("wb") as log:
            server = subprocess.Popen([*before, *command], stdout=log, stderr=log)
        stack.callback(server.wait)
        stack.callback(server.terminate)
        url = f"http://{address}:5555"
        for _ in range(200):
            if not subprocess.run([*client, sys.executable, "-c", REACH, url], check=False).returncode:
                break
            time.sleep(0.1)
        yield url, psutil.Process(server.pid), client


REACH = (
    "import socket, sys, urllib.parse as p; u = p.urlsplit(sys.argv[1]); socket.create_connection((u.hostname, u.port))"
)


def packed(data: Path, mib: int, folder: Path) -> list[Path]:
    """Pack the images again and again, in shards; ``folder/images`` holds them as they are in the shards."""
    images = sorted(path for path in data.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    total, copies = sum(path.stat().st_size for path in images), 0
    copies = max(1, round(mib * 2**20 / total))
    for number, path in enumerate(images):
        for copy in range(copies):
            place = folder / "images" / f"class-{number % 2}" / f"{number}-{copy}{path.suffix}"
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    shards = max(1, copies * total // 2**20 // SHARD_MIB)
    paths = [file.path for file in pack(folder / "images", folder / "bucket" / "x", shards=shards)]
    shutil.rmtree(folder / "images")
    with Records.open(folder / "bucket" / f"x-*-of-{len(paths):05}.rec") as records:
        for number, label in enumerate(records.labels.tolist()):
            place = folder / "images" / str(label) / f"{number}.jpg"
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(records.image(number))
    return paths


def drop_from_memory(paths: list[Path]) -> None:
    os.sync()
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Bench:
    """The files, the store and the commands of one run.

    Args:
        args: of the command line.
        folder: of all files.
    """

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.folder = folder
        self.shards = packed(Path(args.data), args.mib, folder)
        self.pattern = f"x-*-of-{len(self.shards):05}.rec"
        self.rows: list[dict[str, Any]] = []
        self.peers = PEERS if args.peers_python else ()
        for name in self.peers:
            self.peer("write", name, str(folder / "images"), str(folder / "bucket" / name), SHARD_MIB * 2**20)
        self.image_bytes = sum(path.stat().st_size for path in self.shards) / len(list(folder.glob("images/*/*")))

    def peer(self, *words: object) -> str:
        command = [self.args.peers_python, str(READERS), *map(str, words)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def measure(self, number: int, work: str, source: str) -> None:
        """Make one measurement, and keep it."""
        drop_from_memory([path for path in self.folder.rglob("*") if path.is_file()])
        system, _, place = source.rpartition(" ")
        if system:
            where = str(self.folder / "bucket" / system) if place == "local" else f"s3://bench/{system}"
            command = [self.args.peers_python, str(READERS), "read", system, where, str(self.folder / "cache" / system)]
            command.append(str(self.args.threads))
        else:
            what = (
                f"s3://bench/{self.pattern}" if place in ("cold", "warm") else str(self.shards[0].parent / self.pattern)
            )
            command = [sys.executable, __file__, what, "--one", "raw" if place == "raw" else work]
            command += ["--threads", str(self.args.threads), "--order", self.args.order]
        raw = None
        if place == "beside":
            fetching = [sys.executable, __file__, str(self.shards[0].parent / self.pattern), "--one", "raw"]
            raw = subprocess.Popen([*self.client, *fetching], env=self.environment, stdout=subprocess.DEVNULL)
        before, began = self.server_seconds(), time.perf_counter()
        process = subprocess.run(
            [*self.client, *command], env=self.environment, check=True, stdout=subprocess.PIPE, text=True
        )
        share = (self.server_seconds() - before) / (time.perf_counter() - began)
        if raw is not None:
            raw.wait()
        row = {"round": number, "work": work, "source": source, "server_cpu_share": share}
        self.rows.append(row | json.loads(process.stdout.splitlines()[-1]))
        machine.say(json.dumps(self.rows[-1]))

    def server_seconds(self) -> float:
        processes = [self.server, *self.server.children()]
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    def run(self) -> None:
        """Measure everything in turns."""
        with served(self.args.server, self.args.link, self.folder) as (url, self.server, self.client):
            self.environment = {**os.environ, **ENVIRONMENT, "AWS_ENDPOINT_URL": url}
            self.environment["STEADYTRAIN_CACHE"] = str(self.folder / "cache")
            if self.args.server == "moto":
                sending = [sys.executable, __file__, str(self.folder / "bucket"), "--one", "put"]
                subprocess.run([*self.client, *sending], env=self.environment, check=True)
            for number in range(self.args.rounds):
                for work, sources in SOURCES.items():
                    shutil.rmtree(self.folder / "cache", ignore_errors=True)
                    for source in sources:
                        self.measure(number, work, source)
                for name in self.peers:
                    for place in ("local", "cold", "warm"):
                        self.measure(number, "train", f"{name} {place}")

    def medians(self, work: str, key: str) -> dict[str, float]:
        """Return images a second by source: ``images_per_second`` or ``with_opening``."""
        speeds: dict[str, list[float]] = {}
        for row in self.rows:
            if row["work"] == work:
                speed = row.get(key) or row["bytes_per_second"] / self.image_bytes
                speeds.setdefault(row["source"], []).append(speed)
        return {source: median(values) for source, values in speeds.items()}


def main() -> None:
    assert __doc__
    parser = machine.parser(__doc__, rounds=3)
    parser.add_argument("data")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--order", choices=("global", "blocks"), default="global")
    parser.add_argument("--server", choices=("moto", "nginx"), default="moto")
    parser.add_argument("--link", default="")
    parser.add_argument("--at")
    parser.add_argument("--peers-python")
    parser.add_argument("--one", choices=("bytes", "train", "raw", "put"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one == "put":
        fill(f"{os.environ['AWS_ENDPOINT_URL']}/bench", Path(args.data))
        return
    if args.one == "raw":
        print(json.dumps(fetch([path.name for path in Path(args.data).parent.glob(Path(args.data).name)])))
        return
    if args.one:
        blocks = BlockShuffle() if args.order == "blocks" else None
        print(json.dumps(measure(args.data, decode=args.one == "train", threads=args.threads, blocks=blocks)))
        return
    with tempfile.TemporaryDirectory(dir=args.at) as name:
        bench = Bench(args, Path(name))
        bench.run()
    speeds = {work: bench.medians(work, "images_per_second") for work in SOURCES}
    opening = {work: bench.medians(work, "with_opening") for work in SOURCES}
    ratios = {work: {"warm of local": speeds[work]["warm"] / speeds[work]["local"]} for work in SOURCES}
    for work, cold in opening.items():
        ratios[work]["cold of local"] = cold["cold"] / cold["local"]
        ratios[work]["cold of_possible"] = cold["cold"] / min(cold["beside"], opening["bytes"]["raw"])
    for name in bench.peers:
        ratios["train"][f"{name} warm of local"] = speeds["train"][f"{name} warm"] / speeds["train"][f"{name} local"]
        ratios["train"][f"{name} cold of local"] = opening["train"][f"{name} cold"] / opening["train"][f"{name} local"]
    link, server, order, threads = args.link or "loopback", args.server, args.order, args.threads
    unusual = f"{'_nginx' * (server == 'nginx')}{'_blocks' * (order == 'blocks')}{'_one_thread' * (threads == 1)}"
    document = {"link": link, "server": server, "order": order, "threads": threads, "shards": len(bench.shards)}
    figures = {"images_per_second": speeds, "with_opening": opening, "ratios": ratios, "rows": bench.rows}
    machine.record(
        f"storage_{link.replace(',', '_')}{unusual}",
        document | {"mean_image_bytes": bench.image_bytes} | figures,
        save=args.save,
    )


if __name__ == "__main__":
    main()
