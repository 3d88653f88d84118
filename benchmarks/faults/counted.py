"""Seconds that were injected into this process, counted by whoever injects them."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable

_lock = threading.Lock()
_counts = {"seconds": 0.0, "training": 0.0}
_updates = {"done": 0, "of": 1}
_FUEL = bytes(range(256)) * 2048  # half a megabyte: the lock is let go of for 0.2 ms at a time


def sleep(seconds: float) -> None:
    """Sleep, and add the seconds to the count."""
    began = time.perf_counter()
    time.sleep(seconds)
    add(time.perf_counter() - began)


def burn(seconds: float) -> None:
    """Keep a core busy, without the interpreter's lock, as a decoder does."""
    began, worked = time.perf_counter(), time.thread_time()
    while time.thread_time() - worked < seconds:
        zlib.crc32(_FUEL)
    add(time.perf_counter() - began)


def spin(seconds: float) -> None:
    """Run Python code, which keeps the interpreter's lock as far as it may."""
    began, worked = time.perf_counter(), time.thread_time()
    total = 0
    while time.thread_time() - worked < seconds:
        for number in range(1000):
            total += number * number
    add(time.perf_counter() - began)


WAYS = {"sleep": sleep, "burn": burn, "spin": spin}


def expect_updates(number: int) -> None:
    """Tell how many updates the run is going to make."""
    _updates["of"] = number


def updated() -> None:
    """Count an update."""
    _updates["done"] += 1


def is_between(begin: float, end: float) -> bool:
    """Return whether the share of updates that are done lies between these, from 0 to 1."""
    return begin <= progress() < end


def progress() -> float:
    """Return the share of updates that are done."""
    return _updates["done"] / _updates["of"]


def during(act: Callable[[], object]) -> None:
    """Do something, and count what it takes."""
    began = time.perf_counter()
    act()
    add(time.perf_counter() - began)


def add(seconds: float) -> None:
    """Count seconds; of the training thread by themselves: nothing can hide those."""
    with _lock:
        _counts["seconds"] += seconds
        if threading.current_thread() is threading.main_thread():
            _counts["training"] += seconds


def so_far() -> dict[str, float]:
    """Return the seconds counted in all threads, and in the training thread."""
    with _lock:
        return dict(_counts)
