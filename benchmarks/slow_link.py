"""Engines over a slow link: two ranks train on CIFAR-10 for the same wall time, joined by 100 Mbit/s and 20 ms.

Two network namespaces are joined by a cable whose rate ``tc`` limits. Not every kernel has ``netem``, so a relay of
this script, between a TUN device in each namespace, holds each packet back for half of the round trip. In each
namespace a rank trains with ResNet-20 on a core of its own. First ``steady bandwidth`` measures the link. Then each
contender makes some updates, whose rate says how many epochs fill the wall time, and trains so many, so that its
learning rate comes to its end: ``top1`` is that of the 10,000 test images after it. ``seconds`` are the updates',
without start and evaluation.

Needs root on Linux (``ip`` and ``tc`` of iproute2). Nothing but the two namespaces of its own is touched.

usage: python benchmarks/slow_link.py --data FOLDER --work FOLDER [--seconds 300] [--only NAME ...] [--save]
       FOLDER of the data holds cifar10-png.tar.zst
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import selectors
import shutil
import struct
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any

import machine
from cifar10_minutes import prepared
from compression import NETWORK, in_both, run
from steadytrain.events import Accounted, Ended, Evaluated, Logged
from steadytrain.run import Run

CONTENDERS = {
    "ddp": (),
    "ddp, fp16": ("--set", "parallel.compress=fp16"),
    "ddp, powersgd of rank 2": ("--set", "parallel.compress=powersgd"),
    "local, every 32 updates": ("--engine", "local", "--sync-every", "32"),
    "post-local": ("--engine", "local", "--sync-every", "32", "--local-from", "1"),
    "diloco": ("--engine", "local", "--sync-every", "32", "--set", "parallel.outer=diloco"),
    "async, 1 server": ("--engine", "async"),
}
"""Flags by name."""
BATCH, IMAGES, CORES = 128, 50_000, (0, 1)
MTU = 9000
_TUNSETIFF, _TUN, _NO_INFO = 0x400454CA, 0x0001, 0x1000


@contextmanager
def far_cable(rate: str, round_trip_seconds: float) -> Iterator[list[str]]:
    """Join two namespaces, with an address each, by a cable of this rate and delay; yields their names."""
    names = [f"steady{os.getpid()}{end}" for end in "ab"]
    ends, stop = [], threading.Event()
    try:
        for number, name in enumerate(names, 1):
            run("ip", "netns", "add", name)
            end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
            ends.append(end)
            device = f"far{os.getpid() % 10**6}{number}"
            fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", device.encode(), _TUN | _NO_INFO))
            run("ip", "link", "set", device, "netns", name)
            run("ip", "-n", name, "link", "set", device, "name", "eth0", "mtu", str(MTU))
            run("ip", "-n", name, "address", "add", f"{NETWORK}.{number}/24", "dev", "eth0")
            for each in ("lo", "eth0"):
                run("ip", "-n", name, "link", "set", each, "up")
            limit = ("rate", rate, "burst", "64kb", "latency", "200ms")
            run("tc", "-n", name, "qdisc", "add", "dev", "eth0", "root", "tbf", *limit)
        relay = threading.Thread(target=_relay, args=(ends, round_trip_seconds / 2, stop), daemon=True)
        relay.start()
        yield names
    finally:
        stop.set()
        if len(ends) == 2:
            relay.join()
        for end in ends:
            os.close(end)
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _relay(ends: list[int], delay: float, stop: threading.Event) -> None:
    """Pass packets from each end to the other, so many seconds later."""
    waiting: deque[tuple[float, int, bytes]] = deque()  # in the order of their time: the delay is the same for all
    with selectors.DefaultSelector() as ready:
        for place, end in enumerate(ends):
            ready.register(end, selectors.EVENT_READ, ends[1 - place])
        while not stop.is_set():
            left = waiting[0][0] - time.monotonic() if waiting else 0.1
            for key, _ in ready.select(max(0.0, min(left, 0.1))):
                with suppress(BlockingIOError):
                    while True:
                        waiting.append((time.monotonic() + delay, key.data, os.read(key.fd, 65536)))
            now = time.monotonic()
            while waiting and waiting[0][0] <= now:
                _, other, packet = waiting.popleft()
                with suppress(OSError):  # the other end is down or full: a link loses such packets
                    os.write(other, packet)


def trained(ends: list[str], start: Path, folder: Path, flags: tuple[str, ...], *words: str) -> Run:
    """Train with a rank in each namespace."""
    shutil.rmtree(folder, ignore_errors=True)
    command = ["train", f"{start}-train.rec", "--val", f"{start}-test.rec", "--model", "resnet20", "--run", str(folder)]
    command += ["--batch-size", str(BATCH), "--device", "cpu", "--set", "parallel.compute_threads=1", "--json"]
    in_both(ends, "steadytrain", *command, *flags, *words, cores=CORES)
    return Run.open(folder)


def speed(run: Run) -> float:
    """Return images per second of updates, evaluations left out."""
    return median(event.images_per_second for event in run.events() if isinstance(event, Logged))


def row_of(name: str, run: Run, epochs: float) -> dict[str, Any]:
    """Return the score of a contender, and where its seconds went."""
    events = list(run.events())
    last = [event for event in events if isinstance(event, Evaluated)][-1]
    spent = [event for event in events if isinstance(event, Accounted)][-1].seconds
    ended = [event for event in events if isinstance(event, Ended)][-1]
    training = {part: spent.get(part, 0.0) for part in ("forward", "backward", "optimizer", "communication")}
    return {
        "engine": name,
        "images_per_second": round(speed(run), 1),
        "epochs": round(epochs, 3),
        "updates": ended.step,
        "seconds": round(ended.images / speed(run), 1),
        "top1": round(last.top1, 4),
        "communication_share": round(training["communication"] / sum(training.values()), 3),
    }


def main() -> None:
    parser = machine.parser(__doc__, data="cifar10-png.tar.zst", work="records and runs")
    parser.add_argument("--seconds", type=float, default=300.0, help="wall time of each contender's updates")
    parser.add_argument("--updates", type=int, default=120, help="that tell a contender's rate")
    parser.add_argument("--rate", default="100mbit", help="of the link, as tc takes it")
    parser.add_argument("--round-trip", type=float, default=20.0, help="of the link, in milliseconds")
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS))
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # which the ranks' Ray asks for
    start, _ = prepared(arguments.data, arguments.work)
    rows = []
    with far_cable(arguments.rate, arguments.round_trip / 1000) as ends:
        words = ["bandwidth", "--model", "resnet20", "--json"]
        measured = json.loads(in_both(ends, "steadytrain", *words, cores=CORES))
        for name in arguments.only:
            flags, seed = CONTENDERS[name], ("--seed", str(arguments.seed))
            few = trained(
                ends, start, arguments.work / "few", flags, *seed, "--set", f"budget.steps={arguments.updates}"
            )
            epochs = speed(few) * arguments.seconds / IMAGES
            words = [*seed, "--epochs", f"{epochs:.4f}", "--set", f"every.evaluate_epochs={epochs + 1:.4f}"]
            rows.append(row_of(name, trained(ends, start, arguments.work / "run", flags, *words), epochs))
            machine.say(json.dumps(rows[-1]))
    document = {
        "rate": arguments.rate,
        "round_trip_ms": arguments.round_trip,
        "model": "resnet20",
        "batch_size": BATCH,
        "seconds_each": arguments.seconds,
        "bandwidth": {name: measured[name] for name in ("parameters", "backends")},
        "engines": rows,
    }
    machine.record("slow_link", document, save=arguments.save)


if __name__ == "__main__":
    main()
