"""Reading from an object store against reading the same files from the local disk, in turns.

The images of DATA, again and again until there are ``--mib`` of them, are packed into shards, which are put into a
moto server on this machine (an S3 server in Python; it serves a range by copying the whole object: shards are small).
Each measurement is a process of its own that takes the training batches of one pass, cut to 224 pixels: ``local``
from the disk, ``cold`` by URI with an empty cache, ``warm`` by URI with the cache that ``cold`` left. The page cache
of the local files is dropped before. ``bytes`` does the same without decoding, so that reading is the limit. The
server takes its processor time from the same cores: ``server_cpu_share`` says how much. With ``--link 1gbit,20ms``
the server is in a network namespace of its own behind a link of that rate and round trip (root).

usage: python benchmarks/storage.py DATA [--mib 256] [--rounds 3] [--threads 2] [--link RATE,DELAY] [--at FOLDER]
       [--save]
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
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

import machine
from steadytrain.data.loader import Crop, ImageLoader
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.framing import to_ppm
from steadytrain.data.recordio.reader import Records

SHARD_MIB = 8
PLAIN = {"Content-Type": "application/octet-stream"}
DOT = to_ppm(np.zeros((8, 8, 3), np.uint8))
ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}


class Undecoded(Records):
    """The bytes of records, read and forgotten."""

    def image(self, number: int) -> memoryview:
        np.array(super().image(number))
        return memoryview(DOT)


def measure(source: str, *, decode: bool, threads: int) -> dict[str, Any]:
    """Take one pass; images a second from the first batch asked for to the last, opening told apart."""
    began = time.perf_counter()
    records = Records.open(source)
    if not decode:
        records = Undecoded(records.path, records._files)
    opened = time.perf_counter()
    crop = Crop(kind="resized-crop", size=224 if decode else 8, flip=decode)
    n = len(records) // 64 * 64
    with records, ImageLoader(records, crop, batch_size=64, stop=n, threads=threads, keep_bytes=0) as loader:
        images = sum(len(batch) for batch in loader)
        seconds = time.perf_counter() - opened
        stats, traffic = loader.stats(), records.traffic()
    told = {"opening_seconds": opened - began, "images_per_second": images / seconds, "bytes": stats.bytes}
    return told | {"fetched_bytes": 0 if traffic is None else traffic.bytes}


@contextlib.contextmanager
def served(link: str, folder: Path) -> Iterator[tuple[str, psutil.Process]]:
    """Start the server, behind a link where one is given; its address and process."""
    address, before, name = "127.0.0.1", list[str](), f"sb{os.getpid()}"
    with contextlib.ExitStack() as stack:
        if link:
            rate, _, trip = link.partition(",")
            half = f"{float(trip.removesuffix('ms')) / 2}ms"
            for line in (
                f"ip netns add {name}",
                f"ip link add {name}a type veth peer name eth0 netns {name}",
                f"ip addr add 10.79.0.1/24 dev {name}a",
                f"ip link set {name}a up",
                f"ip -n {name} addr add 10.79.0.2/24 dev eth0",
                f"ip -n {name} link set eth0 up",
                f"tc qdisc add dev {name}a root netem delay {half} rate {rate} limit 20000",
                f"ip netns exec {name} tc qdisc add dev eth0 root netem delay {half} rate {rate} limit 20000",
            ):
                subprocess.run(line.split(), check=True)
                if line.startswith("ip netns add"):
                    stack.callback(subprocess.run, ["ip", "netns", "del", name], check=True)
            address, before = "10.79.0.2", ["ip", "netns", "exec", name]
        with (folder / "server.log").open("wb") as log:
            command = [*before, sys.executable, "-m", "moto.server", "-H", address, "-p", "5555"]
            server = subprocess.Popen(command, stdout=log, stderr=log)
        stack.callback(server.wait)
        stack.callback(server.terminate)
        url = f"http://{address}:5555"
        for _ in range(200):
            try:
                urllib.request.urlopen(url, timeout=1).close()
                break
            except urllib.error.HTTPError:
                break
            except OSError:
                time.sleep(0.1)
        yield url, psutil.Process(server.pid)


def put(url: str, data: bytes | None = None) -> None:
    urllib.request.urlopen(urllib.request.Request(url, data, PLAIN, method="PUT"), timeout=600).close()


def packed(data: Path, mib: int, folder: Path) -> list[Path]:
    """Pack the images again and again, in shards."""
    images = sorted(path for path in data.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg", ".png"))
    total, copies = sum(path.stat().st_size for path in images), 0
    copies = max(1, round(mib * 2**20 / total))
    for number, path in enumerate(images):
        for copy in range(copies):
            place = folder / "images" / f"class-{number % 2}" / f"{number}-{copy}{path.suffix}"
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, place)
    files = pack(folder / "images", folder / "x", shards=max(1, copies * total // 2**20 // SHARD_MIB))
    shutil.rmtree(folder / "images")
    return [file.path for file in files]


def drop_from_memory(paths: list[Path]) -> None:
    os.sync()
    for path in paths:
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main() -> None:
    assert __doc__
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data")
    parser.add_argument("--mib", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--link", default="")
    parser.add_argument("--at")
    parser.add_argument("--save", action="store_true")
    parser.add_argument("--one", choices=("bytes", "train"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(args.data, decode=args.one == "train", threads=args.threads)))
        return
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=args.at) as name:
        folder = Path(name)
        paths = packed(Path(args.data), args.mib, folder)
        with served(args.link, folder) as (url, server):
            put(f"{url}/bench")
            for path in paths:
                for suffix in (".rec", ".idx", ".json"):
                    put(f"{url}/bench/{path.with_suffix(suffix).name}", path.with_suffix(suffix).read_bytes())
            pattern = f"x-*-of-{len(paths):05}.rec"
            environment = {**os.environ, **ENVIRONMENT, "AWS_ENDPOINT_URL": url, "STEADYTRAIN_CACHE": f"{name}/cache"}
            for number in range(args.rounds):
                for work in ("bytes", "train"):
                    shutil.rmtree(folder / "cache", ignore_errors=True)
                    for source in ("local", "cold", "warm"):
                        drop_from_memory(paths)
                        drop_from_memory(list((folder / "cache").rglob("*.rec")))
                        what = str(folder / pattern) if source == "local" else f"s3://bench/{pattern}"
                        before, began = sum(server.cpu_times()[:2]), time.perf_counter()
                        command = [sys.executable, __file__, what, "--one", work, "--threads", str(args.threads)]
                        out = subprocess.run(
                            command, env=environment, check=True, capture_output=True, text=True
                        ).stdout
                        share = (sum(server.cpu_times()[:2]) - before) / (time.perf_counter() - began)
                        rows.append(
                            {
                                "round": number,
                                "work": work,
                                "source": source,
                                **json.loads(out),
                                "server_cpu_share": share,
                            }
                        )
                        print(json.dumps(rows[-1]), file=sys.stderr)
    medians = {
        work: {
            source: median(r["images_per_second"] for r in rows if (r["work"], r["source"]) == (work, source))
            for source in ("local", "cold", "warm")
        }
        for work in ("bytes", "train")
    }
    ratios = {w: {s: m[s] / m["local"] for s in ("cold", "warm")} for w, m in medians.items()}
    link = args.link or "loopback"
    machine.record(
        f"storage_{link.replace(',', '_')}",
        {"link": link, "shards": len(paths), "images_per_second": medians, "of_local": ratios, "rows": rows},
        save=args.save,
    )


if __name__ == "__main__":
    main()
