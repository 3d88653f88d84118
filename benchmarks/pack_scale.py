"""Packing by several processes: images per second by their number, up to what the store gives, and a million images.

``latency``: a folder of small images in a bucket (moto, an S3 server in Python, in a network namespace of its own)
behind a link of ``--round-trip`` seconds, so that requests are slow and cores are not what limits: ``steady pack
s3://... s3://... --procs N`` for N of ``--procs``. Beside it what the same store gives to bare GET requests,
``--requests`` at a time: its limit. moto closes each connection, so a request takes two round trips. Needs root.

``million``: tars of PNGs of 8 x 8 pixels in a bucket, packed into the bucket by two processes. Memory is the
proportional set size (PSS) of all of them, children included, twice a second.

A command's seconds hold its start, so each is also run on a hundredth of the images, and ``images_per_second`` is of
the rest of both.

usage: python benchmarks/pack_scale.py [--parts latency million] [--images 3200] [--round-trip 0.2]
       [--procs 1 2 4 8] [--million 1000000] [--at FOLDER] [--save]
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil

import machine
from compression import NETWORK
from slow_link import far_cable
from storage import ENVIRONMENT, put, served

PACK = (*machine.STEADY, "pack")
CLASSES = 10
TAR_IMAGES = 10_000
SHARDS = 16


def png(lines: bytes, side: int) -> bytes:
    """Encode a PNG of RGB pixels: of each row a byte of zero, then the pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(lines, 1)) + chunk(b"IEND", b"")


def members(start: int, count: int, side: int) -> Iterator[tuple[str, bytes]]:
    """Yield names and contents of images of random pixels, which no other start has."""
    lines = np.random.default_rng(start).integers(0, 256, (count, side, 1 + 3 * side), np.uint8)
    lines[:, :, 0] = 0
    for number in range(start, start + count):
        yield f"class-{number % CLASSES}/{number:07}.png", png(lines[number - start].tobytes(), side)


def run(words: list[str], folder: Path, *, at: str = "", watch: bool = False) -> dict[str, Any]:
    """Run a command in a namespace; its seconds, and the memory of all its processes where that is asked for."""
    environment = {**os.environ, "STEADYTRAIN_CACHE": str(folder / "cache")}
    began = time.perf_counter()
    command = [*within(at), *PACK, *words, "--json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    memory: list[int] = []
    is_done = threading.Event()

    def look() -> None:
        while not is_done.wait(0.5):
            memory.append(pss(process.pid))

    watcher = threading.Thread(target=look)
    if watch:
        watcher.start()
    output = process.communicate()[0]
    seconds = time.perf_counter() - began
    is_done.set()
    if watch:
        watcher.join()
    if process.returncode:
        raise SystemExit(f"{words} ended with exit code {process.returncode}")
    shards = json.loads(output)
    images = sum(shard["num_images"] for shard in shards)
    document: dict[str, Any] = {
        "images": images,
        "seconds": round(seconds, 2),
        "digests": [s["digest"] for s in shards],
    }
    if memory:
        tenths = [memory[len(memory) * tenth // 10] for tenth in range(10)]
        document |= {"peak_pss_mb": round(max(memory) / 1e6), "pss_mb_by_tenths": [round(v / 1e6) for v in tenths]}
    shutil.rmtree(folder / "cache", ignore_errors=True)
    return document


def pss(pid: int) -> int:
    total = 0
    try:
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            total += process.memory_full_info().pss
    except psutil.Error:
        pass
    return total


def rate(whole: dict[str, Any], start: dict[str, Any]) -> float:
    return round(float((whole["images"] - start["images"]) / (whole["seconds"] - start["seconds"])), 1)


def within(namespace: str) -> list[str]:
    return ["ip", "netns", "exec", namespace] if namespace else []


def fill(url: str, images: int) -> None:
    """Put the images, and a hundredth of them, into the bucket."""
    put(f"{url}/bench")
    for count, prefix in ((images, "raw"), (images // 100, "few")):
        for name, data in members(0, count, 16):
            put(f"{url}/bench/{prefix}/{name}", data)


def limit(url: str, images: int, requests: int) -> float:
    """Return bare GET requests a second."""
    from obstore.store import S3Store

    store = S3Store("bench", endpoint=url, client_options={"allow_http": True}, virtual_hosted_style_request=False)
    keys = [f"raw/class-{number % CLASSES}/{number:07}.png" for number in range(images)]
    with ThreadPoolExecutor(requests) as pool:
        list(pool.map(lambda key: store.get(key).bytes(), keys[:requests]))
        began = time.perf_counter()
        list(pool.map(lambda key: store.get(key).bytes(), keys))
    return round(len(keys) / (time.perf_counter() - began), 1)


def latency(at: Path, images: int, round_trip: float, procs: list[int], requests: int) -> dict[str, Any]:
    """Measure workers in front of a slow store."""
    url = f"http://{NETWORK}.1:5555"
    os.environ |= {**ENVIRONMENT, "AWS_ENDPOINT_URL": url}
    me = [sys.executable, __file__, "--images", str(images), "--requests", str(requests)]
    with far_cable("1gbit", round_trip) as (there, near_end), (at / "server.log").open("wb") as log:
        command = [*within(there), sys.executable, "-m", "moto.server", "-H", "0.0.0.0", "-p", "5555"]
        server = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            time.sleep(5)
            subprocess.run([*within(there), *me, "--fill", url], check=True)
            asked = subprocess.run([*within(near_end), *me, "--ask", url], check=True, capture_output=True, text=True)
            document: dict[str, Any] = {"round_trip_seconds": round_trip, "images": images}
            document |= {"limit": float(asked.stdout), "requests_at_a_time": requests, "procs": []}
            machine.say(f"the store's limit: {document['limit']} GET requests a second")
            digests: list[str] = []
            for count in procs:
                shape = ["--procs", str(count), "--workers", "1"]
                few = ["s3://bench/few/", f"s3://bench/few-{count}/x", *shape, "--shards", "1"]
                start = run(few, at, at=near_end)
                before = psutil.Process(server.pid).cpu_times().user
                whole = run(
                    ["s3://bench/raw/", f"s3://bench/out-{count}/x", *shape, "--shards", str(SHARDS)], at, at=near_end
                )
                share = (psutil.Process(server.pid).cpu_times().user - before) / whole["seconds"]
                digests = digests or whole["digests"]
                row = {"procs": count, "images_per_second": rate(whole, start), "seconds": whole["seconds"]}
                row |= {"same_bytes": whole["digests"] == digests, "server_cores": round(share, 2)}
                document["procs"].append(row)
                machine.say(row)
        finally:
            server.terminate()
            server.wait()
    return document


def million(at: Path, images: int) -> dict[str, Any]:
    """Pack many small images in a bucket."""
    with served("moto", "", at) as (url, _, _):
        os.environ |= {**ENVIRONMENT, "AWS_ENDPOINT_URL": url}
        put(f"{url}/bench")
        began = time.perf_counter()
        number = max(1, images // TAR_IMAGES)
        for tar_number in range(number):
            content = io.BytesIO()
            with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as tar:
                for name, data in members(tar_number * TAR_IMAGES, TAR_IMAGES, 8):
                    member = tarfile.TarInfo(name)
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
            put(f"{url}/bench/raw-{tar_number:05}.tar", content.getvalue())
        machine.say(f"{images:,} images generated in {time.perf_counter() - began:.0f} s")
        source = f"s3://bench/raw-{{00000..{number - 1:05}}}.tar"
        row = run([source, "s3://bench/million", "--procs", "2"], at, watch=True)
    shards = len(row.pop("digests"))
    row |= {"tars": number, "shards": shards, "images_per_second": round(row["images"] / row["seconds"])}
    machine.say(row)
    return row


def main() -> None:
    """Measure what the command line asks for."""
    parser = machine.parser(__doc__)
    parser.add_argument("--parts", nargs="+", default=["latency", "million"], choices=["latency", "million"])
    parser.add_argument("--images", type=int, default=3200)
    parser.add_argument("--round-trip", type=float, default=0.2)
    parser.add_argument("--procs", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--million", type=int, default=1_000_000)
    parser.add_argument("--at", type=Path)
    parser.add_argument("--fill", help=argparse.SUPPRESS)
    parser.add_argument("--ask", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.fill:
        fill(asked.fill, asked.images)
        return
    if asked.ask:
        print(limit(asked.ask, asked.images, asked.requests))
        return
    document: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=asked.at) as folder:
        at = Path(folder)
        if "latency" in asked.parts:
            document["latency"] = latency(at, asked.images, asked.round_trip, asked.procs, asked.requests)
        if "million" in asked.parts:
            document["million"] = million(at, asked.million)
    machine.record("pack_scale", document, save=asked.save)


if __name__ == "__main__":
    main()
