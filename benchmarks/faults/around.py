"""Surroundings of a run's process: limits of control groups, and other programs beside it.

Each is a context manager that gives a :class:`Surroundings`; whatever it made is gone when it ends: groups are removed,
programs are ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GROUPS = Path("/sys/fs/cgroup")
NAME = f"steadytrain-verdict-{os.getpid()}"
NETWORKS = Path("/run/netns")
_CLONE_NEWNET = 0x40000000  # <sched.h>


@dataclass(frozen=True)
class Surroundings:
    """The control groups and the network namespace that a run's process enters.

    Args:
        joins: files of control groups that it writes its process id to.
        joins_late: the same, when it begins its first batch.
        network: the namespace that it enters; None: it stays in this one.
    """

    joins: tuple[Path, ...] = ()
    joins_late: tuple[Path, ...] = ()
    network: Path | None = None


@contextlib.contextmanager
def quota(cores: float) -> Iterator[Surroundings]:
    """Limit the process to so many cores' time, by a control group."""
    with _group("cpu", {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": str(int(cores * 100_000))}) as joins:
        yield Surroundings(joins)


@contextlib.contextmanager
def slow_storage(bytes_per_second: float, folder: Path) -> Iterator[Surroundings]:
    """Limit the disk that holds ``folder`` to so many bytes a second, from the first batch on.

    Before that, opening a file looks at records all over it, and the system reads so much around each of them that
    nothing of a file as small as ours would be left to be read.
    """
    device = folder.stat().st_dev
    line = f"{os.major(device)}:{os.minor(device)} {int(bytes_per_second)}"
    with _group("blkio", {"blkio.throttle.read_bps_device": line}) as joins:
        yield Surroundings(joins_late=joins)


@contextlib.contextmanager
def slow_from_start(bytes_per_second: float, folder: Path) -> Iterator[Surroundings]:
    """Limit the disk that holds ``folder`` to so many bytes a second, from the start of the process."""
    with slow_storage(bytes_per_second, folder) as slow:
        yield Surroundings(joins=slow.joins_late)


@contextlib.contextmanager
def neighbours(settings: Mapping[str, Any]) -> Iterator[Surroundings]:
    """Run ``number`` programs of some ``nice`` level that compute for ``seconds``, after ``delay`` seconds."""
    code = f"import os, time; os.nice({settings['nice']}); time.sleep({settings['delay']}); end = time.time() + "
    code += f"{settings['seconds']}\nwhile time.time() < end: {settings.get('work', 'pass')}"
    programs = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(settings["number"])]
    try:
        yield Surroundings()
    finally:
        for program in programs:
            program.kill()
            program.wait()


def hogs(number: int) -> contextlib.AbstractContextManager[Surroundings]:
    """Run so many other programs that never rest."""
    return neighbours({"number": number, "nice": 0, "delay": 0, "seconds": "float('inf')"})


@contextlib.contextmanager
def slow_link(bits_per_second: float) -> Iterator[Surroundings]:
    """Make a network namespace for the ranks whose loopback carries so many bits a second."""
    _system("ip", "netns", "add", NAME)
    try:
        _system("ip", "-n", NAME, "link", "set", "lo", "up")
        limits = ("rate", f"{int(bits_per_second)}bit", "burst", "512kb", "latency", "400ms")
        _system("tc", "-n", NAME, "qdisc", "add", "dev", "lo", "root", "tbf", *limits)
        yield Surroundings(network=NETWORKS / NAME)
    finally:
        _system("ip", "netns", "del", NAME)


def _system(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def enter(network: Path) -> None:
    """Let this process live in a network namespace."""
    with network.open("rb") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), str(network))


AROUND: dict[str, Callable[..., contextlib.AbstractContextManager[Surroundings]]] = {
    maker.__name__: maker for maker in (quota, slow_storage, slow_from_start, hogs, neighbours, slow_link)
}
_NEEDS = {"quota": "cpu", "slow_storage": "blkio", "slow_from_start": "blkio"}


@contextlib.contextmanager
def surroundings(around: dict[str, Any], folder: Path) -> Iterator[Surroundings]:
    """Set up all of these at a time; the runner sees to ``kill_at``, which is not among them."""
    with contextlib.ExitStack() as stack:
        all_: list[Surroundings] = []
        for name, value in around.items():
            if name in AROUND:
                arguments = (value, folder) if name in ("slow_storage", "slow_from_start") else (value,)
                all_.append(stack.enter_context(AROUND[name](*arguments)))
        yield Surroundings(
            joins=tuple(path for part in all_ for path in part.joins),
            joins_late=tuple(path for part in all_ for path in part.joins_late),
            network=next((part.network for part in all_ if part.network is not None), None),
        )


def missing(around: Mapping[str, Any]) -> str:
    """Return why this machine cannot do it; empty where it can."""
    if "slow_link" in around and not (shutil.which("ip") and shutil.which("tc") and os.geteuid() == 0):
        return "needs root, and ip and tc (iproute2)"
    for name in around:
        controller = _NEEDS.get(name)
        if controller is not None and not os.access(GROUPS / controller / "cgroup.procs", os.W_OK):
            return f"no writable control group of version 1 for {controller}"
    return ""


@contextlib.contextmanager
def _group(controller: str, values: dict[str, str]) -> Iterator[tuple[Path, ...]]:
    """Make a control group beside this process's own, below the same limits, as long as it is needed."""
    place = GROUPS / controller / NAME
    place.mkdir()
    try:
        for name, value in values.items():
            (place / name).write_text(value)
        yield (place / "cgroup.procs",)
    finally:
        for _ in range(100):  # its processes have ended, and the system may still be about to know it
            with contextlib.suppress(OSError):
                place.rmdir()
                break
            time.sleep(0.05)
