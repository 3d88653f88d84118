"""``steady serve`` and ``steady watch --web`` under hostile clients: do they still answer, and in how much memory?

Each fault is injected for some seconds into a fresh server on this machine, while another client asks twenty times a
second for ``/health`` (the page of a run: for ``/``) on a new connection:

``idle``      connections that send nothing, all at once (``--connections``); those that are closed are not opened again
``halves``    as many that send half a head
``bodies``    as many that send a whole head, and nothing of the body
``health``    as many that each ask for ``/health`` and stay open
``slow``      600 clients that send a whole head and then a byte of body a second; one that is closed comes again
``slow_512``  512 of them
``both``      slow ones beside idle ones
``head``      300 halves of a head; how many are still open after 12 s
``large``     24 images at the limit of pixels, some kB each, while small photographs ask for their classes as well
``gone``      24 such images whose clients go away at once: how long until no image of theirs is left
``framing``   a request with Content-Length and Transfer-Encoding, and another behind it on the same connection
``streams``   1,500 streams of the page's events that nobody reads

A row has the answers of ``/health`` (n, failed, median, 99th percentile and longest seconds), the most files that the
server had open, its processor seconds, and its memory before, at most, and 10 s after the last client is gone. It holds
where 99 % of the asks are answered within 0.3 s, and no more files are open than the server allows, and few more.

usage: python benchmarks/server_limits.py [FAULT ...] [--connections 10000] [--seconds 20] [--pixels 24900000] [--save]
"""

from __future__ import annotations

import argparse
import io
import os
import re
import socket
import sys
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from struct import pack
from typing import Any

import numpy as np
import psutil
from PIL import Image

import machine
from serve import Contender, cpu_seconds, running
from steadytrain.machine.platform import allow_open_files

HEAD = b"POST /predict HTTP/1.1\r\nhost: localhost\r\ncontent-type: image/png\r\n"
HALF = b"GET / HTTP/1.1\r\nhost: local"
BODY = HEAD + b"content-length: 90000\r\n\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
PORT, STREAMS, SLOW, HALVES, LARGE = 18500, 1500, 600, 300, 24
PAUSE_SECONDS = 0.05
BAR_SHARE, BAR_SECONDS, BAR_FILES = 0.99, 0.3, 1100


def asked(port: int, request: bytes, seconds: float = 15) -> tuple[int, bytes, float]:
    """Send a request on a connection of its own; return the status (0: none), the answer and the seconds it took."""
    since = time.perf_counter()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=seconds) as connection:
            connection.sendall(request)
            answer = b""
            while piece := connection.recv(65536):
                answer += piece
        status = int(answer.split(b" ", 2)[1]) if answer else 0
    except (OSError, ValueError, IndexError):
        return 0, b"", time.perf_counter() - since
    return status, answer, time.perf_counter() - since


def get(path: str) -> bytes:
    """Return the request for a path."""
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode()


def post(image: bytes) -> bytes:
    """Return the request for an image's classes."""
    return HEAD + b"content-length: %d\r\nconnection: close\r\n\r\n" % len(image) + image


def flat_png(pixels: int) -> bytes:
    """Encode a square PNG of zeros, which is a few kB: row by row, for Pillow would hold all of it."""
    side = int(pixels**0.5)
    packer, body = zlib.compressobj(9), bytearray()
    for _ in range(side):
        body += packer.compress(bytes(1 + 3 * side))
    body += packer.flush()
    parts = ((b"IHDR", pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)), (b"IDAT", bytes(body)), (b"IEND", b""))
    chunks = (pack(">I", len(data)) + name + data + pack(">I", zlib.crc32(name + data)) for name, data in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def photograph() -> bytes:
    """Encode a small JPEG."""
    stream = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (240, 320, 3), np.uint8)).save(stream, "JPEG")
    return stream.getvalue()


class Prober(threading.Thread):
    """Asks again and again, and keeps how long the answers took."""

    def __init__(self, port: int, request: bytes, pause: float = PAUSE_SECONDS) -> None:
        super().__init__()
        self._port, self._request, self._pause, self._is_over = port, request, pause, threading.Event()
        self.answers: list[tuple[int, float]] = []

    def run(self) -> None:
        while not (self.answers and self._is_over.wait(self._pause)):
            status, _, seconds = asked(self._port, self._request)
            self.answers.append((status, seconds))

    def __enter__(self) -> Prober:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self.join()

    def row(self) -> dict[str, Any]:
        """Return the figures of all answers."""
        seconds = sorted(seconds for _, seconds in self.answers)
        failed = sum(status != 200 for status, _ in self.answers)
        within = sum(status == 200 and seconds <= BAR_SECONDS for status, seconds in self.answers) / len(seconds)
        row = {"n": len(seconds), "failed": failed, "share_within_0.3_seconds": within, "p50_seconds": median(seconds)}
        return row | {"p99_seconds": seconds[int(0.99 * (len(seconds) - 1))], "longest_seconds": seconds[-1]}


def connect(port: int, sent: bytes = b"", *, buffer: int = 0) -> socket.socket:
    """Begin to open a connection; what is to be sent is sent as soon as it stands."""
    connection = socket.socket()
    if buffer:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
    connection.setblocking(False)
    connection.connect_ex(("127.0.0.1", port))
    if sent:
        with suppress(OSError):
            connection.send(sent)
    return connection


def is_open(connection: socket.socket) -> bool:
    """Return whether the server has not ended the connection; drop what it sent."""
    try:
        while connection.recv(65536):
            pass
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def idle(port: int, args: argparse.Namespace, sent: bytes = b"") -> dict[str, Any]:
    """Hold connections that send nothing, or no more than this."""
    connections = [connect(port, sent) for _ in range(args.connections)]
    time.sleep(args.seconds)
    still = sum(map(is_open, connections))
    for connection in connections:
        connection.close()
    return {"connections": len(connections), "open_at_the_end": still}


def slow(port: int, args: argparse.Namespace, clients: int = SLOW) -> dict[str, Any]:
    """Send bodies of a byte a second."""
    bodies = [connect(port, BODY) for _ in range(clients)]
    end, num_closed = time.monotonic() + args.seconds, 0
    while time.monotonic() < end:
        time.sleep(1)
        for place, body in enumerate(bodies):
            if is_open(body):
                with suppress(OSError):
                    body.send(b"x")
            else:
                body.close()
                num_closed += 1
                bodies[place] = connect(port, BODY)
    for body in bodies:
        body.close()
    return {"clients": clients, "closed_and_opened_again": num_closed}


def both(port: int, args: argparse.Namespace) -> dict[str, Any]:
    """Hold idle connections beside slow bodies."""
    beside = threading.Thread(target=idle, args=(port, args))
    beside.start()
    row = slow(port, args)
    beside.join()
    return row | {"connections": args.connections}


def head(port: int, args: argparse.Namespace) -> dict[str, Any]:
    """Send halves of a head."""
    halves = [connect(port, HALF) for _ in range(HALVES)]
    time.sleep(12)
    still = sum(map(is_open, halves))
    for half in halves:
        half.close()
    return {"clients": HALVES, "open_after_12_seconds": still}


def large(port: int, args: argparse.Namespace) -> dict[str, Any]:
    """Send images of very many pixels, and small ones beside them."""
    request, statuses = post(flat_png(args.pixels)), list[int]()
    threads = [threading.Thread(target=lambda: statuses.append(asked(port, request, 60)[0])) for _ in range(LARGE)]
    since = time.perf_counter()
    with Prober(port, post(photograph())) as small:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - since
    counts = {str(status): statuses.count(status) for status in sorted(set(statuses))}
    row = {"images": LARGE, "pixels": args.pixels, "bytes": len(request), "seconds": seconds, "statuses": counts}
    return row | {"photographs": small.row()}


def gone(port: int, args: argparse.Namespace) -> dict[str, Any]:
    """Send images from clients that go away."""
    request = post(flat_png(args.pixels))
    connections = [socket.create_connection(("127.0.0.1", port)) for _ in range(LARGE)]
    for connection in connections:
        connection.sendall(request)
    time.sleep(0.5)
    for connection in connections:
        connection.close()
    since = time.perf_counter()
    while time.perf_counter() - since < 60:
        match = re.search(rb"^steady_queue_images ([\d.]+)", asked(port, get("/metrics"))[1], re.MULTILINE)
        if match is not None and float(match[1]) == 0:
            break
        time.sleep(0.05)
    return {"images": LARGE, "pixels": args.pixels, "seconds_until_none_is_left": time.perf_counter() - since}


def framing(port: int, args: argparse.Namespace) -> dict[str, Any]:
    """Send two lengths for one request."""
    twice = HEAD + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n"
    status, answer, _ = asked(port, twice + get("/health"))
    return {"status": status, "replies": answer.count(b"HTTP/1.1 ")}


def streams(port: int, args: argparse.Namespace) -> dict[str, Any]:
    """Open streams of events and do not read them."""
    request = b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n"
    clients = [connect(port, request, buffer=4096) for _ in range(STREAMS)]
    time.sleep(args.seconds + 15)  # a stream that is not read is to be dropped meanwhile
    for client in clients:
        client.close()
    return {"clients": STREAMS}


SERVE: dict[str, Callable[[int, argparse.Namespace], dict[str, Any]]] = {
    "idle": idle,
    "halves": partial(idle, sent=HALF),
    "bodies": partial(idle, sent=BODY),
    "health": partial(idle, sent=HEALTH),
    "slow": slow,
    "slow_512": partial(slow, clients=512),
    "both": both,
    "head": head,
    "large": large,
    "gone": gone,
    "framing": framing,
}
WATCH: dict[str, Callable[[int, argparse.Namespace], dict[str, Any]]] = {
    "watch_idle": idle,
    "watch_halves": partial(idle, sent=HALF),
    "watch_head": head,
    "watch_streams": streams,
}
LIST = {"list_idle": idle}
"""Of the page of all runs of a folder."""
FAULTS = {**SERVE, **WATCH, **LIST}


@contextmanager
def looked_at(process: psutil.Process) -> Iterator[dict[str, Any]]:
    """Record the most files and memory of a process while the body runs, and its memory 10 s later."""
    is_over, figures = threading.Event(), dict[str, Any]()
    figures |= {"rss_bytes": {"before": process.memory_info().rss, "largest": 0}, "largest_open_files": 0}

    def look() -> None:
        while not is_over.wait(0.1):
            figures["largest_open_files"] = max(figures["largest_open_files"], process.num_fds())
            figures["rss_bytes"]["largest"] = max(figures["rss_bytes"]["largest"], process.memory_info().rss)

    looker, before = threading.Thread(target=look), cpu_seconds(process)
    looker.start()
    try:
        yield figures
    finally:
        is_over.set()
        looker.join()
    figures["cpu_seconds"] = cpu_seconds(process) - before
    time.sleep(10)
    figures["rss_bytes"]["after_10_seconds"] = process.memory_info().rss
    figures["open_files_after"] = process.num_fds()


def injected(name: str, server: Contender, port: int, probe: str, args: argparse.Namespace) -> dict[str, Any]:
    """Inject one fault into a server of its own."""
    with running(server, port) as process:
        asked(port, get(probe))
        with looked_at(process) as figures, Prober(port, get(probe)) as prober:
            row = FAULTS[name](port, args)
        answers = prober.row()
    row = {**row, "asked": probe, "answers": answers, **figures}
    is_bounded = row["largest_open_files"] <= BAR_FILES
    row["holds"] = is_bounded and answers["share_within_0.3_seconds"] >= BAR_SHARE
    machine.say(name, row)
    return row


def a_run(folder: Path) -> Path:
    """Write a run of 20,000 updates with a line of figures for every fifth."""
    from steadytrain.config import Budget, Data, Model, Recipe
    from steadytrain.events import EventLog, Logged
    from steadytrain.run import Run

    recipe = Recipe(data=Data(train="a.rec", val="b.rec"), model=Model("resnet20"), budget=Budget(epochs=3))
    run = Run.create(folder / "run", recipe)
    with EventLog(run.log_path(), 1) as log:
        for step in range(0, 20_000, 5):
            loss, epoch = 2.3 / (1 + step / 1000), step / 350
            row = Logged(step=step, epoch=epoch, loss=loss, top1=0.5, lr=0.1, images_per_second=500.0, wait_share=0.01)
            log.append(row)
    return run.directory


def main() -> int:
    """Inject, record, and return 1 where a server did not answer in time."""
    parser = machine.parser(__doc__)
    parser.add_argument("faults", nargs="*", choices=[*FAULTS, []], help="default: all")
    parser.add_argument("--connections", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--pixels", type=int, default=24_900_000)
    args = parser.parse_args()
    allow_open_files(args.connections + 2 * SLOW)
    os.environ.pop("STEADYTRAIN_TOKEN", None)
    rows = dict[str, Any]()
    with tempfile.TemporaryDirectory() as name:
        import timm
        import torch

        folder = Path(name)
        torch.save(timm.create_model("test_resnet").state_dict(), folder / "w.pth")
        command = [*machine.STEADY, "serve", str(folder / "w.pth"), "--model", "timm/test_resnet", "--device", "cpu"]
        serve = Contender([*command, "--port", "PORT", "--max-batch", "8"], "/ready", "image/png")
        watch = Contender([*machine.STEADY, "watch", str(a_run(folder)), "--web", "--port", "PORT"], "/", "")
        runs = Contender([*machine.STEADY, "report", str(folder), "--serve", "--port", "PORT"], "/", "")
        for place, fault in enumerate(args.faults or FAULTS):
            server = serve if fault in SERVE else watch if fault in WATCH else runs
            rows[fault] = injected(fault, server, PORT + place, "/health" if fault in SERVE else "/", args)
    name = machine.of_cases("server_limits", args.faults or [*FAULTS], FAULTS)
    machine.record(name, {"faults": rows}, save=args.save)
    return 0 if all(row["holds"] for row in rows.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
