"""Patches of a process before it trains: each replaces a function of steadytrain by a worse one.

The functions stand where the real work is done, so whatever measures them from outside measures the fault as well. A
patch is given the value that the fault names, and the process's own folder.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from faults import counted

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4  # glibc's <malloc.h>


def slow_decoder(seconds: float) -> None:
    """Make decoding of each image of about 500 x 375 pixels cost so much more CPU time; of smaller ones less."""
    from steadytrain.data.loader import batch_worker

    def more(encoded: Any) -> None:
        counted.burn(seconds * getattr(encoded, "height", 0) * getattr(encoded, "width", 0) / (500 * 375))

    _after(batch_worker, "probe", more)


def waiting_decoder(seconds: float) -> None:
    """Make decoding of an image wait, as for a device or another process."""
    from steadytrain.data.loader import batch_worker

    _after(batch_worker, "probe", lambda encoded: counted.sleep(seconds))


def slow_augmentation(seconds: float) -> None:
    """Make each image that is cut after decoding cost so much more CPU time."""
    from steadytrain.data.images import jpeg
    from steadytrain.data.loader import decode

    jpeg.parts = None  # all squares are cut in Python's sight
    _after(decode, "_place", lambda _: counted.burn(seconds))


def waiting_gather(seconds: float) -> None:
    """Make the gather of each piece of a batch from cached images wait."""
    from steadytrain.data.loader import batch_worker

    for name in ("gather", "gather_shifted"):  # for the latter, several batches are made together
        _after(batch_worker, name, lambda _: counted.sleep(seconds))


def far_source(seconds: float) -> None:
    """Delay each image, as from an object store: the bytes are copied to where they are read from."""
    from steadytrain.data.recordio.reader import Records

    _after(Records, "image", lambda _: counted.sleep(seconds))


def forgets(path: str) -> None:
    """Drop this file's pages from memory when an epoch begins, as where memory is too small for the data."""
    _at_new_epochs(lambda _: drop_pages(Path(path)))


def epoch_gap(seconds: float) -> None:
    """Delay the order of a new epoch, as where a list of files is read and shuffled anew."""
    from steadytrain.data.loader.batch_worker import PIECE
    from steadytrain.data.loader.sampler import GlobalOrder

    real, seen, lock = GlobalOrder.ids, {0}, threading.Lock()

    def ids(self: Any, positions: Any) -> Any:
        epoch = int(positions[-1]) // self.n
        with lock:
            if len(positions) <= PIECE and epoch not in seen:  # for a batch, and not to read ahead
                seen.add(epoch)
                counted.sleep(seconds)
        return real(self, positions)

    GlobalOrder.ids = ids  # type: ignore[method-assign]


def slowed(settings: Mapping[str, Any]) -> None:
    """Make a function (``of``) take ``seconds`` more by ``how``, in the updates from the share ``begin`` to ``end``."""
    from steadytrain.data.images import jpeg
    from steadytrain.data.loader import batch_worker, decode
    from steadytrain.data.recordio.reader import Records
    from steadytrain.training.precision import Policy

    if settings["of"] == "augment":
        jpeg.parts = None  # all squares are cut in Python's sight
    targets = {
        "decode": (batch_worker, ("probe",)),
        "augment": (decode, ("_place",)),
        "gather": (batch_worker, ("gather", "gather_shifted")),
        "read": (Records, ("image",)),
        "optimizer": (Policy, ("step",)),
    }

    def more(_: Any) -> None:
        if counted.is_between(settings["begin"], settings["end"]):
            counted.WAYS[settings["how"]](settings["seconds"])

    place, names = targets[settings["of"]]
    for name in names:
        _after(place, name, more)


def thread(settings: Mapping[str, Any]) -> None:
    """Start a thread that uses a ``duty`` of its time by ``how``, in the updates from ``begin`` to ``end``."""

    def act() -> None:
        while True:
            if counted.is_between(settings["begin"], settings["end"]) and settings["duty"] > 0:
                counted.WAYS[settings["how"]](0.05 * settings["duty"])
                time.sleep(0.05 * (1 - settings["duty"]))
            else:
                time.sleep(0.05)

    threading.Thread(target=act, name="reporter", daemon=True).start()


def hang(settings: Mapping[str, Any]) -> None:
    """Hang the forward pass of update ``step`` for ever; write the time when it began to ``file``."""
    from steadytrain.training import step

    calls = [0]

    def more(_: Any) -> None:
        calls[0] += 1
        if calls[0] == settings["step"]:
            Path(settings["file"]).write_text(str(time.time()))
            threading.Event().wait()

    _after(step.Objective, "__call__", more)


def expect_updates(number: int) -> None:
    """Count the updates, of which the run makes so many."""
    from steadytrain.training.clock import Clock

    counted.expect_updates(number)
    real = Clock.updated

    def updated(self: Any, step: int, images: int) -> None:
        real(self, step, images)
        counted.updated()

    Clock.updated = updated  # type: ignore[method-assign]


def slow_disk(seconds: float) -> None:
    """Delay each flush to the disk."""
    real = os.fsync

    def flush(descriptor: int) -> None:
        real(descriptor)
        counted.sleep(seconds)

    os.fsync = flush  # type: ignore[assignment]


def slow_log(seconds: float) -> None:
    """Delay the writing of each event, as on a network file system."""
    from steadytrain.events import EventLog

    def wait(event: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            counted.sleep(seconds)

    _after(EventLog, "append", wait)


def bare_malloc(_: Any) -> None:
    """Set the allocator as variables like MALLOC_MMAP_THRESHOLD_=65536 do."""
    import ctypes

    from steadytrain.machine import process

    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 65536)
    libc.mallopt(_M_MMAP_MAX, 65536)
    libc.mallopt(_M_TRIM_THRESHOLD, 65536)
    process.keep_memory = lambda available_bytes, *, all_threads=False: 0


def clocked_optimizer(_: Any) -> None:
    """Count the optimizer's seconds, without a fault."""
    from steadytrain.training.precision import Policy

    real = Policy.step

    def step(self: Any, optimizer: Any) -> Any:
        began = time.perf_counter()
        result = real(self, optimizer)
        counted.add(time.perf_counter() - began)
        return result

    Policy.step = step  # type: ignore[method-assign]


def stopped(settings: Mapping[str, Any]) -> None:
    """Let another process stop this one ``number`` times for ``seconds``, ``apart`` seconds apart, from then on."""
    code = (
        "import os, signal, sys, time; pid, number, seconds, apart = map(float, sys.argv[1:])\n"
        "for _ in range(int(number)):\n"
        "    time.sleep(apart); os.kill(int(pid), signal.SIGSTOP)\n"
        "    time.sleep(seconds); os.kill(int(pid), signal.SIGCONT)"
    )
    values = map(str, (os.getpid(), settings["number"], settings["seconds"], settings["apart"]))
    command = [sys.executable, "-c", code, *values]

    def begin() -> None:
        subprocess.Popen(command)

    at_first_batch(begin)


def affinity_late(settings: Mapping[str, Any]) -> None:
    """Let all threads use only so many ``cores`` from the share ``begin`` of the updates to ``end``."""
    everything = os.sched_getaffinity(0)
    few = set(sorted(everything)[: settings["cores"]])

    def act() -> None:
        while True:
            wanted = few if counted.is_between(settings["begin"], settings["end"]) else everything
            if os.sched_getaffinity(os.getpid()) != wanted:
                for thread in Path("/proc/self/task").iterdir():
                    with contextlib.suppress(OSError):
                        os.sched_setaffinity(int(thread.name), wanted)
            time.sleep(0.05)

    threading.Thread(target=act, name="steady-bench", daemon=True).start()


def affinity(cores: int) -> None:
    """Use only so many cores."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:cores]))


def cold(path: str) -> None:
    """Drop a file from memory before the first batch, and read far less ahead than usual."""
    from steadytrain.data.loader import readahead

    readahead.AHEAD_BYTES = 2**20  # beside our few megabytes what 64 are beside real data
    at_first_batch(lambda: drop_pages(Path(path)))


def cold_start(path: str) -> None:
    """Drop a file from memory before the run begins."""
    drop_pages(Path(path))


def at_first_batch(act: Callable[[], object]) -> None:
    """Call a function before the first batch of training is begun."""
    from steadytrain.data.loader.batch_worker import BatchWorker

    real = BatchWorker.job
    acts = [act]

    def job(self: Any, spans: Any) -> Any:
        if self.order is not None and acts:
            acts.pop()()
        return real(self, spans)

    BatchWorker.job = job  # type: ignore[method-assign]


def drop_pages(path: Path) -> None:
    """Let the system forget the pages of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)  # what is not written yet stays
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def slow_updates(seconds: float) -> None:
    """Make each update of this process wait once in its forward pass, as on a slower device."""
    from steadytrain.training import step

    _after(step.Objective, "passes", lambda _: counted.sleep(seconds))


def uneven_shares(first: int) -> None:
    """Give the first of two ranks so many of the micro-batches, and the other one all the others."""
    from dataclasses import replace

    from steadytrain.training.session import opening

    real = opening.own_share

    def own_share(*arguments: Any) -> Any:
        result = real(*arguments)
        return replace(result, end=first) if result.first == 0 else replace(result, first=first)

    opening.own_share = own_share  # type: ignore[assignment]


def of_last_rank(patches: Mapping[str, Any]) -> None:
    """Apply these patches to the last of the ranks alone."""
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        for name, value in patches.items():
            PATCHES[name](value)


PATCHES: dict[str, Callable[[Any], None]] = {
    maker.__name__: maker
    for maker in (
        slow_decoder,
        waiting_decoder,
        slow_augmentation,
        waiting_gather,
        far_source,
        forgets,
        epoch_gap,
        slowed,
        thread,
        expect_updates,
        hang,
        slow_disk,
        slow_log,
        bare_malloc,
        slow_updates,
        uneven_shares,
        of_last_rank,
        clocked_optimizer,
        affinity,
        affinity_late,
        stopped,
        cold,
        cold_start,
    )
}


def _after(place: Any, name: str, more: Callable[[Any], object]) -> None:
    """Let a function do something with its result before it returns it."""
    real = getattr(place, name)

    def both(*args: Any, **options: Any) -> Any:
        result = real(*args, **options)
        more(result)
        return result

    setattr(place, name, both)


def _at_new_epochs(more: Callable[[int], object]) -> None:
    """Call a function when the first batch of a later epoch is begun, while nothing else can be begun."""
    from steadytrain.data.loader.batch_worker import BatchWorker

    real = BatchWorker.job

    def job(self: Any, spans: Any) -> Any:
        for first, n in spans if self.order is not None else ():
            epoch, before = (first + n - 1) // len(self.ids), (first - 1) // len(self.ids)
            if epoch > before >= 0:
                more(epoch)
        return real(self, spans)

    BatchWorker.job = job  # type: ignore[method-assign]
