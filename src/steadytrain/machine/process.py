"""Set this process up for speed; called when training starts, never by an import.

glibc's default ``malloc`` maps and unmaps every large tensor: a training step on a CPU takes hundreds of thousands of
page faults. :func:`keep_memory` keeps freed memory in the heap and asks the kernel to back it with huge pages, as
``GLIBC_TUNABLES=glibc.malloc.hugetlb=1:...`` does from outside.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import math
import os
import platform
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from steadytrain.machine import cgroups
from steadytrain.machine.platform import (
    IS_LINUX,
    call_after_fork,
    open_descriptor,
    seconds_since_boot,
    set_blocking,
    usage,
)
from steadytrain.machine.process_tree import read_schedstat, read_stat
from steadytrain.machine.procfs import TICKS, processor_seconds, read_counters

# glibc's <malloc.h>, <sys/mman.h>
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -2, -3, -4, -8
_MADV_HUGEPAGE = 14
_HUGE_PAGE = 2 << 20
_LARGEST_HEAP = 64 << 30

ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Variables by which users tell torch how to hand out a GPU's memory."""

_FEW_SPINS, _MORE_SPINS = "1000", "20000"
_WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
_IDLE, _WINDOW = 0.3, 0.1
"""Cores in use by others that still count as none; seconds to look at least."""

_REQUESTS = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")
_SAME_SIGNAL, _GRACE = 0.3, 2.0
"""Seconds within which a launcher may pass on the same Ctrl-C, and those to end in after a second one."""
ASKED_TWICE_SECONDS = 1.0
"""Signals that follow the first within this time ask for nothing new."""
SIGINT_ALONE = ("SIGINT",)
TO_END = (*SIGINT_ALONE, "SIGTERM", "SIGHUP", "SIGUSR1")
"""Signals that ask a process to end."""

_NEVER = 2**31 - 1
"""Searches of younger objects before one of the oldest: more than there will be."""

_GROWING = "expandable_segments:True"

_SET_HERE = {
    _WAITING[0]: (_FEW_SPINS, _MORE_SPINS),
    ALLOCATOR_VARIABLES[0]: (_GROWING,),
}
"""Variables that a process sets for itself, and the values that it gives them."""


class _Command(NamedTuple):
    """This process as a command: when it started, and the core seconds of others until a time, both of perf_counter."""

    started: float
    looked: float
    used_by_others: float


_COMMAND: ContextVar[_Command] = ContextVar("_COMMAND")
"""Set by :func:`share_cores`; what Python programs run of ours is no command."""


@dataclass(frozen=True, kw_only=True)
class StartPart:
    """A part of a start: since when (``time.perf_counter()``), its seconds, and what this thread did in them.

    ``waited``: seconds in which the thread neither ran nor was ready to run; ``disk_bytes``: that the process read from
    a disk and not from memory; None where the system does not tell.
    """

    began: float
    seconds: float
    waited: float | None
    disk_bytes: int | None


class StartTimer:
    """Measures one part of a start after another, each from where the last one ended."""

    def __init__(self) -> None:
        self._before = _start_figures()

    def part(self) -> StartPart:
        """Return the part that ends now."""
        (began, at_work, read), now = self._before, _start_figures()
        self._before = now
        waited = None if at_work is None or now[1] is None else max(0.0, now[0] - began - (now[1] - at_work))
        disk = None if read is None or now[2] is None else now[2] - read
        return StartPart(began=began, seconds=now[0] - began, waited=waited, disk_bytes=disk)


def _start_figures() -> tuple[float, float | None, int | None]:
    """The time, this thread's seconds on a processor or ready for one, and bytes that the process read from disks."""
    times = read_schedstat(f"/proc/self/task/{threading.get_native_id()}")
    return time.perf_counter(), times and times[0] + times[1], read_counters("/proc/self/io").get("read_bytes")


def keep_no_large_blocks() -> None:
    """Have ``malloc`` give each block of a megabyte or more back to the system when it is freed.

    glibc else keeps them once some were freed, in a heap for each of several threads: of 24 requests for 4 MiB at a
    time 60 MB stayed.
    """
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 1 << 20)


def return_free_memory() -> None:
    """Give what small blocks have left free back to the system, as far as ``malloc`` can."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def own_start() -> float | None:
    """Return when this command started, by ``time.perf_counter()``; None in a process that is no command of ours."""
    command = _COMMAND.get(None)
    return None if command is None else command.started


def share_cores() -> None:
    """Let compute threads that wait for each other sleep after some microseconds, not after milliseconds.

    GNU's OpenMP, which torch computes with, lets a waiting thread turn round and round 300,000 times by default. Where
    another process runs on the same cores, what it waits for cannot run meanwhile: a step then takes three to ten
    times as long. The library reads its settings once, when torch is imported: call this before. What the user has set
    stays. A process that finds itself alone may call :func:`spin_where_alone` next.
    """
    now, stat = time.perf_counter(), read_stat("/proc/self")
    age = 0.0 if stat is None else max(0.0, seconds_since_boot() - stat.started / TICKS)
    if usage("CHILDREN", "ru_maxrss"):  # a shell ran commands before it became this process: its age is not ours
        age = min(age, _start_figures()[1] or 0.0)
    _COMMAND.set(_Command(now - age, now, _used_by_others()))
    limit_spins(_FEW_SPINS)


def limit_spins(turns: str = _MORE_SPINS) -> None:
    """Let waiting compute threads turn so often at most before they sleep, unless the user has said how often.

    Call it before torch is imported. The default is about a millisecond, for a program that calls us from Python.
    """
    if not any(name in os.environ for name in _WAITING):
        os.environ["GOMP_SPINCOUNT"] = turns


def spin_where_alone() -> None:
    """Let compute threads wait about a millisecond before they sleep, if nobody else used these cores just now.

    To wake a thread takes tens of microseconds: as long as many an operation of a small network takes. Looks at what
    became of the cores since :func:`share_cores`, a tenth of a second at least. Call it where a process is about to
    import torch and trains alone on its cores; several ranks on one machine wait for each other's feeds as well.
    """
    command = _COMMAND.get(None)
    if command is None or "GOMP_SPINCOUNT" not in _set_here() or cgroups.quota() is not None:
        return  # the user's own; or turning round would be paid from the same quota as computing
    time.sleep(max(0.0, command.looked + _WINDOW - time.perf_counter()))
    others = (_used_by_others() - command.used_by_others) / (time.perf_counter() - command.looked)
    if others < _IDLE:  # nothing is known where the system does not tell: that is no reason to take what is others'
        os.environ["GOMP_SPINCOUNT"] = _MORE_SPINS


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Import large libraries in the body: where the process is a command's own, never search them for garbage.

    All of torch's objects stay to the end. Such searches take 0.25 s while it is imported, and as long at the end.
    Where torch is there already, this does nothing: what has been trained meanwhile is not to stay.
    """
    if own_start() is None or "torch" in sys.modules:
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
    gc.freeze()
    atexit.register(_search_where_leaks_are_told)


def _search_where_leaks_are_told() -> None:
    """Search all objects at the end where triton has compiled: it says of what is left that it leaked.

    That triton is imported says nothing: timm does so where it is installed, and such a search takes a second.
    """
    (gc.unfreeze if "torch._inductor.compile_fx" in sys.modules else gc.freeze)()


@contextmanager
def collecting_by_hand() -> Iterator[Callable[[], None]]:
    """Leave the search for garbage among old objects to the body, which calls what this yields.

    Python searches all of them when enough have been added, which takes 0.1 to 0.3 s where torch is there, and the
    other ranks wait. What exists when the body begins, and what the first search leaves, is not searched before its
    end, unless the user has frozen objects: then those alone are not. Young objects are searched as ever. Where the
    user has turned collection off, nothing changes, and nothing is collected.
    """
    thresholds, has_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    if not gc.isenabled() or not thresholds[0]:
        yield lambda: None
        return
    freezes = is_settling = own_start() is not None or not has_frozen

    def collect() -> None:
        nonlocal is_settling
        gc.collect()
        if is_settling:
            is_settling = False
            gc.freeze()

    if freezes:
        if has_frozen:  # lasting_imports has: few objects are left
            gc.collect()
        gc.freeze()
    gc.set_threshold(*thresholds[:2], _NEVER)
    by_hand = gc.get_threshold()  # from Python 3.14 on, the last one does not count: old objects are searched in pieces
    try:
        yield collect
    finally:
        if gc.get_threshold() == by_hand:
            gc.set_threshold(*thresholds)
        if freezes:
            gc.unfreeze()


def given_environment() -> dict[str, str]:
    """Return the environment without what this process has set for itself: for a program that is to run as alone."""
    set_here = _set_here()
    return {name: value for name, value in os.environ.items() if name not in set_here}


def _set_here() -> set[str]:
    """Return the variables that this process has set: it was not started with them, and they have values of ours."""
    ours = {name for name, values in _SET_HERE.items() if os.environ.get(name) in values}
    try:
        started_with = Path("/proc/self/environ").read_bytes()
    except OSError:  # a system that does not tell: they may be the user's
        return set()
    return ours - {entry.partition(b"=")[0].decode(errors="replace") for entry in started_with.split(b"\0")}


def grow_segments(*, recorded: bool) -> str:
    """Let torch's segments of GPU memory grow, so that what is free between tensors is found again.

    Call it before the GPU is used: torch reads its variable once. A setting of the user's stays. Segments stay fixed
    where CUDA graphs are ``recorded``, whose memory must not move.

    Returns:
        ``growing``, ``fixed``, or the variable by which the user has decided.
    """
    for name in ALLOCATOR_VARIABLES:
        if os.environ.get(name) and name not in _set_here():
            return name
    if recorded or not IS_LINUX:
        return "fixed"
    os.environ[ALLOCATOR_VARIABLES[0]] = _GROWING
    return "growing"


def _used_by_others() -> float:
    """Seconds of this process's cores that others have had until now; never-ending where the system does not tell."""
    seconds = processor_seconds(usable=cgroups.allowed()).values()
    return sum(core.busy + core.steal for core in seconds) - time.process_time() if seconds else math.inf


def keep_memory(available_bytes: int, *, all_threads: bool = False) -> int:
    """Let ``malloc`` keep what is freed, on huge pages; returns the bytes of address space prepared (0: not glibc).

    Reserves address space (no memory) for up to three quarters of what is available; to call it again is harmless.

    Args:
        available_bytes: memory that this process may use.
        all_threads: let threads that start from now on use the same heap. ``malloc`` gives each thread a heap of
            its own, of 64 MiB, and keeps no larger block: too little where the network computes on such a thread.
    """
    if platform.libc_ver()[0] != "glibc":
        return 0
    libc = ctypes.CDLL(None)
    if all_threads:
        libc.mallopt(_M_ARENA_MAX, 1)
    libc.malloc.restype = ctypes.c_void_p
    libc.malloc.argtypes = [ctypes.c_size_t]
    libc.free.argtypes = [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # Older releases refuse a threshold above 32 MB: there nothing at all may be mapped.
    most_mapped = 65536 if libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30) else 0
    libc.mallopt(_M_TRIM_THRESHOLD, -1)
    libc.mallopt(_M_TOP_PAD, 64 << 20)
    size = min(int(available_bytes * 0.75), _LARGEST_HEAP) // _HUGE_PAGE * _HUGE_PAGE
    # One block as large as the heap may become, taken from the heap's end and given back at once: the end
    # stays where it is (trimming is off), and the pages behind it can be marked before anyone touches them.
    libc.mallopt(_M_MMAP_MAX, 0)
    block = libc.malloc(size)
    if block:
        start = -(-block // _HUGE_PAGE) * _HUGE_PAGE
        libc.madvise(start, size - (start - block) - _HUGE_PAGE, _MADV_HUGEPAGE)
        libc.free(block)
    libc.mallopt(_M_MMAP_MAX, most_mapped)
    return size if block else 0


@contextmanager
def take_signals(names: Iterable[str], on_signal: Callable[[int], None] = lambda number: None) -> Iterator[list[int]]:
    """Take those of these signals that the system has, in the main thread; yield a list that gets each one's number.

    SIGHUP stays ignored where it was ignored before: ``nohup`` starts a program like that.
    """
    received: list[int] = []

    def take(number: int, frame: FrameType | None) -> None:
        received.append(number)
        on_signal(number)

    is_main = threading.current_thread() is threading.main_thread()
    known = {name: getattr(signal, name) for name in names if is_main and hasattr(signal, name)}
    if "SIGHUP" in known and signal.getsignal(known["SIGHUP"]) is signal.SIG_IGN:
        del known["SIGHUP"]
    before = {number: signal.signal(number, take) for number in known.values()}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def interrupted_once(names: Iterable[str] = TO_END) -> Iterator[list[int]]:
    """Let signals that ask to end interrupt a block as Ctrl-C does, so that it cleans up; yield as take_signals does.

    SIGUSR1 is what mpirun and Slurm ask ranks by. A process is often asked twice, by whoever signals all of a group and
    by its parent: what follows the first within ``ASKED_TWICE_SECONDS`` does not interrupt the cleaning up.
    """
    interrupt, asked_at = signal.getsignal(signal.SIGINT), -math.inf

    def ask(number: int) -> None:
        nonlocal asked_at
        if time.monotonic() > asked_at + ASKED_TWICE_SECONDS:
            asked_at = time.monotonic()
            if callable(interrupt):
                interrupt(number, None)
            raise KeyboardInterrupt

    # Not those that a shell has ignored.
    numbers = {name: number for name in names if (number := getattr(signal, name, None))}
    heard = [name for name, number in numbers.items() if signal.getsignal(number) not in (signal.SIG_IGN, None)]
    with take_signals(heard, ask) as received:
        yield received


class StopRequest:
    """The request to end this process, true once a signal asked for it.

    Attributes:
        signal: the name of the signal, or None.
        heard: the same, known at once, while one operation of the main thread takes long.
        saves: whether there is something to save: until there is, a request interrupts at once.
        is_probing: returns whether the work of now ends without being saved, as that of a probe does.
        last_words: called before the process is ended from outside of the main thread.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self.heard: str | None = None
        self.saves = True
        self.is_probing: Callable[[], bool] = lambda: False
        self.last_words: Callable[[], object] = lambda: None

    def __call__(self) -> str | None:
        return self.signal

    def __bool__(self) -> bool:
        return self.signal is not None


@contextmanager
def stop_requests(say: Callable[[str], None] = lambda text: None) -> Iterator[StopRequest]:
    """Turn the first SIGINT, SIGTERM, SIGUSR1, SIGUSR2 or SIGHUP into a request that the loop sees at its next step.

    Until ``saves`` a request ends the block, without an error unless it was SIGINT.
    SIGHUP says that the terminal is gone: what is printed afterwards goes nowhere. It stays ignored where it was,
    as ``nohup`` has it. A second SIGINT interrupts at once. Outside the main thread no handler can be set and none is.
    Children do not inherit it: the handler acts only in the process that set it.

    Python's own handlers run between two operations of the main thread, and one operation may take many seconds. So a
    thread hears of each signal when it comes: it answers the first by ``say``, and ends the process some time after a
    second SIGINT, if that has not ended the main thread by then.
    """
    stop = StopRequest()
    owner = os.getpid()
    terminals = [number for number in (0, 1, 2) if os.isatty(number)]
    interrupt, asked_at = signal.getsignal(signal.SIGINT), -math.inf

    def ask(number: int) -> None:
        nonlocal asked_at
        if os.getpid() != owner:
            os._exit(128 + number)
        is_same, asked_at = time.monotonic() - asked_at < _SAME_SIGNAL, time.monotonic()
        if number == signal.SIGINT and (not stop.saves or (stop and not is_same)):
            if callable(interrupt):
                interrupt(number, None)
            raise KeyboardInterrupt
        is_first, stop.signal = stop.signal is None, signal.Signals(number).name
        if stop.signal == "SIGHUP":
            null = open_descriptor(os.devnull, os.O_RDWR)  # writing to a terminal that is gone raises an error
            for terminal in terminals:
                os.dup2(null, terminal)
            os.close(null)
        if not stop.saves and is_first:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    heard, tell = os.pipe()
    set_blocking(tell, False)
    is_over = threading.Event()
    listener = threading.Thread(target=_listen, args=(heard, stop, say, is_over), name="steady-signals", daemon=True)
    _forget_wakeups_in_children()
    wakeup = signal.set_wakeup_fd(tell, warn_on_full_buffer=False)
    listener.start()
    try:
        with take_signals(_REQUESTS, ask):
            try:
                yield stop
            except KeyboardInterrupt:
                if stop.saves or not stop:
                    raise
            finally:
                is_over.set()
    finally:
        signal.set_wakeup_fd(wakeup)
        os.write(tell, b"\0")
        listener.join()
        os.close(tell)
        os.close(heard)


@cache
def _forget_wakeups_in_children() -> None:
    """Keep children that are forked from writing to the pipe of this process's signals; once is enough."""
    call_after_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


def _listen(heard: int, stop: StopRequest, say: Callable[[str], None], is_over: threading.Event) -> None:
    """Answer the signals whose numbers come from a pipe, until it says 0."""
    requested_at: float | None = None
    while number := os.read(heard, 1)[0]:
        name, now = signal.Signals(number).name, time.monotonic()
        if is_over.is_set() or not stop.saves or name not in _REQUESTS:
            continue
        if requested_at is None:
            stop.heard = name
            doing, ending = "finishing this update, then saving and stopping", ", without saving"
            if stop.is_probing():
                doing, ending = "ending the probe, of which nothing is saved, and stopping", ""
            with contextlib.suppress(OSError):  # the terminal may be gone
                called = "Ctrl-C" if name == "SIGINT" else name
                say(f"{called}: {doing}" + f"; a second Ctrl-C stops at once{ending}" * (name == "SIGINT"))
        elif name == "SIGINT" and now - requested_at > _SAME_SIGNAL:
            say("Ctrl-C again: stopping now, without saving")
            if not is_over.wait(_GRACE):
                with contextlib.suppress(Exception):
                    stop.last_words()
                if sys.stderr.isatty():
                    os.write(2, b"\x1b[?25h")  # the cursor, which whoever draws may have hidden
                os._exit(130)
        requested_at = now
