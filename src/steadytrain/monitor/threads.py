"""A sampling profiler of this process: what the loop's thread does, and whose code it is in.

Time of the loop's thread is one of these: it runs, it is queued for a processor, or it waits. The kernel counts the
first two. What it waits for, and in whose code, is seen at the moment of a look: by the innermost frame of Python, the
system call that it sleeps in, and whether the threads that compute with it are at work. Looks come at irregular times,
so that none keeps step with the updates.

A look takes 50 us of processor time or so. The pauses grow with that, to keep looking below :data:`COST` of a core.
"""

from __future__ import annotations

import dis
import os
import random
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import CodeType, FrameType, ModuleType
from typing import Any

from steadytrain.errors import SteadyError
from steadytrain.events import UPDATING, EventLog, Noticed, ThreadStats
from steadytrain.machine.platform import usage
from steadytrain.machine.process_tree import CALLS_ON_FILES, ThreadFiles, read_schedstat, thread_ids, waits_in
from steadytrain.monitor import stacks
from steadytrain.monitor.watchdog import LoopProgress

COST = 0.003  # share of a core that looking may take
SHORTEST_PAUSE, LONGEST_PAUSE = 0.03, 0.2
SURVEY_SECONDS = 1.0  # seconds between two readings of all threads
ACTIVE = 0.05  # share of a core: a thread that uses less does not matter
MAX_COMPUTING = 4  # computing threads that each look reads
MAX_KEPT, MAX_TOLD = 256, 16  # places
SLEEPS = frozenset({"nanosleep", "clock_nanosleep", "poll", "ppoll", "select", "pselect6", "pause", "epoll_wait"})
LOCKS = frozenset({"futex", "futex_waitv", ""})
LIBRARIES = frozenset({"steadytrain", "torch", "torchvision", "timm", "functorch"})
"""Packages in which a training loop is at home: their code is not what slows it down."""
NEUTRAL = frozenset({"builtins", "math", "typing", "functools", "itertools", "operator", "collections", "einops"})
"""Packages of which lines that compute on tensors make use."""
STOPPED_SECONDS = 0.5
"""A look that is so late, was not queued for a processor and did not wait for Python's lock was stopped."""
WAKES = 0.25  # share of the switch intervals that pass: who waits for Python's lock wakes up in more of them
HELD_SECONDS = 0.0005  # a look that waits longer for Python's lock found a thread that runs Python code


@contextmanager
def looking(log: EventLog, progress: LoopProgress) -> Iterator[LoopWatch]:
    """Sample this process's threads while the body runs in the loop's thread; write ``ThreadStats``.

    ``progress``: of the start. None is written until a loop is attached to what is given; then one after a second,
    whenever the time has grown by a twentieth (1 to 300 s), and at the end. What fails is told in the log, once, and
    never in the body.
    """
    watch, ended = LoopWatch(progress), threading.Event()
    thread = threading.Thread(target=_look, args=(watch, log, ended), name="steady-look", daemon=True)
    thread.start()
    try:
        yield watch
    finally:
        ended.set()
        thread.join(10.0)


def _look(watch: LoopWatch, log: EventLog, ended: threading.Event) -> None:
    try:
        chance = random.Random(os.getpid())
        watch.begin()
        while True:
            pause, asked = watch.pause * chance.uniform(0.5, 1.5), time.perf_counter()
            is_last = ended.wait(pause)
            watch.look(0.0 if is_last else pause, asked)
            if watch.is_attached and (is_last or watch.seconds >= watch.due):
                log.append(watch.stats())
                watch.due = watch.seconds + min(300.0, max(1.0, watch.seconds / 20))
            if is_last:
                return
    except SteadyError:
        return  # the log cannot be written: whoever trains meets that too
    except Exception as error:  # noqa: BLE001 - a thread's edge: no run ends because it cannot be watched
        with suppress(SteadyError):
            log.append(Noticed(message=f"the threads are no longer looked at: {error!r}", step=0))
    finally:
        watch.close()


class LoopWatch:
    """Samples of this process's threads, summed up; the thread that creates it is the loop's.

    Attributes:
        seconds: covered so far.
        is_attached: whether the start is over.
        due: when to write the next event, by ``seconds``.
    """

    def __init__(self, progress: LoopProgress) -> None:
        self.progress = progress
        self.seconds = 0.0
        self.is_attached, self.due = False, 0.0
        self._loop, self._tid = threading.get_ident(), threading.get_native_id()
        self._looks, self._cost, self._lock_seconds = 0, 0.0, 0.0
        self._buckets: defaultdict[str, dict[str, float]] = defaultdict(lambda: {"seconds": 0.0})
        self._places: defaultdict[tuple[str, str, str], float] = defaultdict(float)
        self._files = ThreadFiles(self._tid)
        self._compute: dict[int, ThreadFiles] = {}  # active computing threads
        self._computing: dict[int, tuple[float, float]] = {}  # seconds that they ran, and were queued
        self._computed = [0.0, 0.0]
        self._fed: list[float] | None = None
        self._survey: dict[int, tuple[float, float]] = {}
        self._surveyed = 0.0
        self._others: dict[str, dict[str, Any]] = {}
        self._active: dict[int, tuple[int, str]] = {}  # native id of other Python threads at work: ident, name

    @property
    def pause(self) -> float:
        """Seconds to the next sample: a thousandth of the time so far, and enough to cost little."""
        cost = self._cost / self._looks if self._looks else 0.0
        return max(min(LONGEST_PAUSE, max(SHORTEST_PAUSE, self.seconds / 1000)), cost / COST)

    def attach(self, progress: LoopProgress) -> None:
        """Follow the loop itself from here on."""
        self.progress, self.due = progress, self.seconds + 1.0
        self.is_attached = True

    def begin(self) -> None:
        """Start, in the thread that samples."""
        self._own = threading.get_native_id()
        self._own_files = ThreadFiles(self._own)
        self._last = self._surveyed = time.perf_counter()
        self._times = self._files.times()
        self._own_queued = (self._own_files.times() or (0.0, 0.0))[1]
        self._own_wakes = usage("THREAD", "ru_nvcsw")
        read = {tid: read_schedstat(f"/proc/self/task/{tid}") for tid in thread_ids(os.getpid())}
        self._survey = {tid: times[:2] for tid, times in read.items() if times is not None}

    def close(self) -> None:
        """Close the files of the threads."""
        for files in (self._files, self._own_files, *self._compute.values()):
            files.close()

    def look(self, slept: float, asked: float) -> None:
        """Sample the threads, after this one had meant to sleep for ``slept`` seconds (0: it was woken).

        ``asked``: when it went to sleep, by ``time.perf_counter()``.
        """
        began = time.thread_time()
        frames = sys._current_frames()
        now, bucket = time.perf_counter(), self.progress.bucket
        seconds, self._last = now - self._last, now
        self.seconds += seconds
        self._looks += 1
        times, lock_seconds, wakes = self._own_files.times(), 0.0, usage("THREAD", "ru_nvcsw")
        if times is not None and slept:  # what it is late and was not queued for a processor, it waited for the lock
            lock_seconds = max(0.0, now - asked - slept - (times[1] - self._own_queued))
            fewest = WAKES * lock_seconds / sys.getswitchinterval()  # wakes of one that waits for the lock
            if lock_seconds >= STOPPED_SECONDS and wakes - self._own_wakes < fewest:
                totals = self._buckets[bucket]
                totals["stopped"] = totals.get("stopped", 0.0) + lock_seconds
                seconds, lock_seconds = seconds - lock_seconds, 0.0
        self._own_wakes = wakes
        self._count_processors(bucket, seconds)
        self._lock_seconds += lock_seconds
        self._own_queued = 0.0 if times is None else times[1]
        activity, place = self._classify(frames.get(self._loop), is_held=lock_seconds > HELD_SECONDS)
        if len(self._places) < MAX_KEPT or (bucket, activity, place) in self._places:
            self._places[bucket, activity, place] += seconds
        for ident, name in self._active.values():
            if (frame := frames.get(ident)) is not None:
                places = self._others[name]["places"]
                at = stacks.word_frame(foreign_frame(frame) or frame)
                places[at] = places.get(at, 0.0) + seconds
        del frames
        if now - self._surveyed >= SURVEY_SECONDS:
            self._read_all(now - self._surveyed)
            self._surveyed = now
        self._cost += time.thread_time() - began

    def _count_processors(self, bucket: str, seconds: float) -> None:
        """Add what the kernel counted since the last sample to the bucket of this one."""
        totals = self._buckets[bucket]
        totals["seconds"] += seconds
        times, before = self._files.times(), self._times
        if times is not None and before is not None:
            for name, later, earlier in zip(("ran", "queued"), times, before, strict=False):
                totals[name] = totals.get(name, 0.0) + max(0.0, later - earlier)
        self._times = times
        most = [0.0, 0.0]
        for tid, files in self._compute.items():
            ran, queued = self._computing[tid]
            self._computing[tid] = files.times() or (ran, queued)
            most = [max(a, b - c) for a, b, c in zip(most, self._computing[tid], (ran, queued), strict=True)]
        if bucket in UPDATING:
            self._computed = [a + b for a, b in zip(self._computed, most, strict=True)]

    def _classify(self, frame: FrameType | None, *, is_held: bool) -> tuple[str, str]:
        """Return what the loop's thread does now, one of ``ThreadStats``' words, and in whose code.

        Whoever looks has Python's lock. So a thread that runs Python code has just let go of it: since it was asked to,
        after some milliseconds, or where it called the next operation of torch. Then the look had to wait
        (``is_held``), and finds it a little later. A thread that runs nevertheless is in native code.
        """
        foreign = None if frame is None else foreign_frame(frame)
        place = "" if foreign is None else stacks.word_frame(foreign)
        state = self._files.state()
        if state == "D":
            return "disk", place
        if state in ("R", None):  # None: this system does not tell
            if is_held and frame is not None:
                return ("holds", _caller_place(frame)) if foreign is None else ("python", place)
            return ("runs", place) if foreign is not None and calls_others(foreign) else ("computes", "")
        call = (waits_in(os.getpid(), self._tid) or "").partition(" ")[0]
        if call in SLEEPS or call in LOCKS:
            if call in SLEEPS:
                return "sleeps", place
            if is_held and frame is not None:
                return ("holds", _caller_place(frame)) if foreign is None else ("python", place)
            is_computed = any(files.state() == "R" for files in self._compute.values())
            return ("computing threads", "") if is_computed else ("python", place)
        return ("disk" if call in CALLS_ON_FILES else "waits"), place

    def _read_all(self, seconds: float) -> None:
        """Find the threads that use a processor: computing threads, and foreign Python threads."""
        python = {thread.native_id: thread for thread in threading.enumerate()}
        before, self._survey = self._survey, {}
        computing: dict[int, float] = {}
        self._active = {}
        for tid in thread_ids(os.getpid()):
            if tid in (self._tid, self._own) or (times := read_schedstat(f"/proc/self/task/{tid}")) is None:
                continue
            now = self._survey[tid] = times[:2]
            ran, queued = (later - earlier for later, earlier in zip(now, before.get(tid, (0.0, 0.0)), strict=True))
            thread = python.get(tid)
            if thread is not None and thread.name.startswith("feed-"):
                self._fed = [a + b for a, b in zip(self._fed or (0.0, 0.0), (ran, queued), strict=True)]
            elif ran < ACTIVE * seconds:
                continue
            elif thread is None:
                computing[tid] = ran
            elif not thread.name.startswith("steady-") and thread.ident is not None:
                known = self._others.setdefault(thread.name, {"ran": 0.0, "places": {}})
                known["ran"] += ran
                self._active[tid] = thread.ident, thread.name
        busiest = sorted(computing, key=lambda tid: -computing[tid])[:MAX_COMPUTING]
        for tid in self._compute.keys() - set(busiest):
            self._compute.pop(tid).close()
        for tid in set(busiest) - self._compute.keys():
            self._compute[tid] = ThreadFiles(tid)
            self._computing[tid] = self._compute[tid].times() or (0.0, 0.0)

    def stats(self) -> ThreadStats:
        """Return all samples so far, as an event."""
        ranked = sorted(self._places.items(), key=lambda item: -item[1])[:MAX_TOLD]
        others = sorted(self._others.items(), key=lambda item: -item[1]["ran"])[:3]
        loop: Any = {name: {key: round(total, 3) for key, total in at.items()} for name, at in self._buckets.items()}
        return ThreadStats(
            step=self.progress.step,
            seconds=round(self.seconds, 3),
            looks=self._looks,
            cost_seconds=round(self._cost, 4),
            lock_seconds=round(self._lock_seconds, 4),
            loop=loop,
            places=tuple(
                {"bucket": bucket, "what": activity, "place": place, "seconds": round(seconds, 3)}
                for (bucket, activity, place), seconds in ranked
            ),
            compute={"ran": round(self._computed[0], 3), "queued": round(self._computed[1], 3)}
            if any(self._computed)
            else None,
            feed=None if self._fed is None else {"ran": round(self._fed[0], 3), "queued": round(self._fed[1], 3)},
            others=tuple(
                {
                    "name": name,
                    "ran": round(known["ran"], 3),
                    "place": max(known["places"], key=known["places"].__getitem__, default=""),
                }
                for name, known in others
            ),
        )


def foreign_frame(frame: FrameType) -> FrameType | None:
    """Return the innermost frame that is neither the standard library's nor of :data:`LIBRARIES`, if it is at work.

    It is not where it has called one of those libraries, whose frames then lie inside of it. Of installed packages the
    code that called them counts, if there is any.
    """
    installed: FrameType | None = None
    at: FrameType | None = frame
    while at is not None:
        name = stacks.package(at).partition(".")[0]
        if name in LIBRARIES:
            return installed
        if name not in sys.stdlib_module_names and not at.f_code.co_filename.startswith("<"):
            if "site-packages" not in at.f_code.co_filename:
                return at
            installed = installed or at
        at = at.f_back
    return installed


def _caller_place(frame: FrameType) -> str:
    """Describe the innermost frame outside :data:`LIBRARIES` that our loop has called; empty where there is none."""
    at: FrameType | None = frame
    while at is not None and not stacks.package(at).startswith("steadytrain."):
        name = stacks.package(at).partition(".")[0]
        if name not in LIBRARIES and name not in sys.stdlib_module_names and not at.f_code.co_filename.startswith("<"):
            return stacks.word_frame(at)
        at = at.f_back
    return ""


_names: dict[CodeType, dict[int, set[str]]] = {}


def calls_others(frame: FrameType) -> bool:
    """Return whether the native code that a frame calls belongs to a package outside :data:`LIBRARIES`.

    It is where the line, or else the whole function, names a module or function of another package (``time``,
    ``numpy``) and none of those. Operators between tensors are named nowhere.
    """
    code = frame.f_code
    if code not in _names:
        if len(_names) >= MAX_KEPT:
            _names.clear()
        lines = _names[code] = defaultdict(set)
        for instruction in dis.get_instructions(code):
            line = instruction.positions.lineno if instruction.positions else None
            if line is not None and instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                lines[line].add(str(instruction.argval))
    names = _names[code]
    at_line = _owners(frame, names.get(frame.f_lineno or 0, set()))
    owners = at_line or _owners(frame, set().union(*names.values()))
    return bool(owners) and not owners & LIBRARIES


def _owners(frame: FrameType, names: set[str]) -> set[str]:
    """Return the packages that define these global names, without neutral ones and the frame's own."""
    owners = set[str]()
    for value in (frame.f_globals.get(name) for name in names):
        owner = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
        if isinstance(owner, str):
            owners.add(owner.partition(".")[0])
    return owners - NEUTRAL - {stacks.package(frame).partition(".")[0]}
