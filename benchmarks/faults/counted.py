"""Seconds that were injected into this process, counted by whoever injects them."""

from __future__ import annotations

import threading
import time
import zlib

_lock = threading.Lock()
_counts = {"seconds": 0.0, "training": 0.0}
_FUEL = bytes(range(256)) * 2048  # half a megabyte: the lock is let go of for 0.2 ms at a time


def sleep(seconds: float) -> None:
    """Sleep, and count it."""
    began = time.perf_counter()
    time.sleep(seconds)
    add(time.perf_counter() - began)


def burn(seconds: float) -> None:
    """Keep a core busy, without the interpreter's lock, as a decoder does."""
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        zlib.crc32(_FUEL)
    add(seconds)


def add(seconds: float) -> None:
    """Count seconds; of the training thread by themselves: nothing can hide those."""
    with _lock:
        _counts["seconds"] += seconds
        if threading.current_thread() is threading.main_thread():
            _counts["training"] += seconds


def so_far() -> dict[str, float]:
    """In all threads, and in the training thread."""
    with _lock:
        return dict(_counts)
