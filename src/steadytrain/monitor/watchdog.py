"""A watchdog: a thread that notices when a run stalls, names the culprit, and ends the run if it stays stalled.

A run stands still when its loop neither changes its bucket nor its step. How long that may be:

- in an update: 60 s, or 20 times the median of the recent updates where that is more;
- while it measures its steps: 60 s, or 60 times that median;
- while it starts, in its first updates (up to 20: compilation), in an evaluation and in a checkpoint: 30 minutes, or
  three times the longest before. Where it tells its batches there (``since`` is renewed): 60 s, or 20 times the longest
  of them.

Then the stacks of all threads go to ``stacks-1.txt`` in the run's folder, a ``Stalled`` event to its log and a line to
whoever watches. If it still stands after ``end_seconds`` more, it is ended with :class:`StalledError`: through the loop
where that can still raise, else by force, with the same exit code. A run that was asked to stop (SIGTERM) is ended when
the update at hand stands for 20 s, or 20 times the median of the recent updates. Nothing is ended while the loop's
caller has the generator, or a debugger has the loop; time in which this whole process did not run does not count.

A collective that all ranks have begun and that does not end is a hang of the network: it ends the run after 100 s or 20
updates, while it starts after 5 minutes. A rank that is missing in it is waited for 5 minutes or 20 updates, once there
is a pace; one that waits for data, starts, evaluates, saves, or whose events are read, for as long as it may do that.

Native code that never releases the GIL stops this thread as well: two minutes later faulthandler's, which needs no
lock, writes all stacks to standard error. It ends nothing.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Protocol, Self, TypeVar

from msgspec.structs import replace

from steadytrain.errors import RankLostError, StalledError, SteadyError
from steadytrain.events import Event, EventLog, Failed, Noticed, Stalled
from steadytrain.format import duration
from steadytrain.monitor import stacks
from steadytrain.monitor.collectives import Hang

T = TypeVar("T")

SLOW = ("startup", "warmup", "probe", "evaluation", "checkpoint", "measuring")  # where a loop may stand for long
_EXCUSED = ("input", "epoch_gap", "logging", *SLOW)  # what only a rank's own watchdog ends
_MOST_STALLS = 20  # stalls of one attempt that are written: one that stands still now and then fills no disk
ENOUGH_UPDATES = 20  # whose pace is known, however fast they were
_PASSES = 3  # measuring makes some twenty passes, a few of them with four times the images
_RENEWED = 3  # renewals within a bucket: then its pauses are known
_CLEAR = "\r\x1b[K\x1b[?25h"  # what is drawn on the line goes, the cursor comes back


class LoopProgress(Protocol):
    """Progress of the loop, readable from another thread at any time."""

    @property
    def bucket(self) -> str:
        """The loop's activity, one of :data:`steadytrain.events.BUCKETS`."""

    @property
    def since(self) -> float:
        """The time when the activity began, by ``time.perf_counter()``."""

    @property
    def step(self) -> int:
        """Updates done."""


@dataclass(frozen=True, kw_only=True)
class StallLimits:
    """Seconds that the loop may stall before it is reported or ended."""

    update: float = 60.0  # in an update, at least
    updates: float = 20.0  # the same, in medians of the recent updates
    slow: float = 1800.0  # while it starts, evaluates or saves, at least
    after_request: float = 20.0  # in an update, at least, where the run was asked to stop
    end: float | None = 900.0  # after that was noticed, until the run is ended; None: never, not even where ranks hang
    hang: float = 100.0  # in a collective that all ranks have begun, at least
    exchange: float = 300.0  # the same while it starts, and where a rank is missing
    grace: float = 10.0  # for the loop to end by itself, before it is ended by force
    look: float = 1.0  # between two looks
    lock: float = 120.0  # until the stacks are written without the GIL, more than it may stand


class Watchdog:
    """Watch the loop of the thread that enters this context, until it leaves.

    ``package``: the loop's own code begins so; where none of it is on the thread's stack, its caller has it.

    Attributes:
        feed: gives what each thread of the feed is at, in words: ``{"feed-1": "reads record 1234 for 75 s"}``.
            By itself it knows the functions that they are in.
        ranks: gives what each other rank of the run was at when it last said so, and since how many seconds.
        hang, record, leave: give the collective that ranks wait in, if any; write this rank's last ones beside the
            stacks; tell the other ranks why this one is ended by force.
        speaks: gives whether this rank, of those of its machine that wait for the given ranks, says so.
        stop_signal: gives the name of the signal that has asked the run to stop; None while none has.
        abandon: asked to make the loop raise the error: closes what it waits for, say. None where nobody can.
    """

    def __init__(
        self,
        progress: LoopProgress,
        *,
        log: EventLog,
        folder: Path,
        patience: StallLimits | None = None,
        package: str = "steadytrain.training",
    ) -> None:
        self.feed: Callable[[], Mapping[str, str]] = lambda: stacks.busy("feed-")
        self.ranks: Callable[[], Mapping[int, tuple[str, float]]] = dict
        self.hang: Callable[[], Hang | None] = lambda: None
        self.record: Callable[[], None] = lambda: None
        self.leave: Callable[[SteadyError], None] = lambda error: None
        self.speaks: Callable[[Collection[int]], bool] = lambda missing: True
        self.stop_signal: Callable[[], str | None] = lambda: None
        self.abandon: Callable[[StalledError], None] | None = None
        self._progress, self._log, self._folder = progress, log, folder
        self._patience = patience or StallLimits()
        self._package = package
        self._loop = 0
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="steady-watchdog", daemon=True)
        self._pace = _Pace(self._patience)
        self._num_stalls = 0
        self._abandoned = False
        self._second: float | None = None

    def __enter__(self) -> Self:
        self._loop = threading.get_ident()
        self._pace.look(self._progress)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._left.set()
        if not self._abandoned:
            self._thread.join(self._patience.grace)

    def _watch(self) -> None:
        stalled: Stalled | None = None
        ending_since, exchange = 0.0, self._patience.exchange
        try:
            while not self._left.wait(self._patience.look):
                self._pace.look(self._progress)
                self._arm_second()
                standing, end, signal = self._pace.standing, self._patience.end, self.stop_signal()
                if signal and standing > self._pace.limit(self._patience.after_request) and not self._is_held():
                    self._end(f"asked to stop by {signal}, but there was ")
                    return
                if stalled is None:
                    if standing > self._pace.limit() or (standing > exchange and self._unexcused_hang() is not None):
                        stalled = self._stalled()
                        ending_since = stalled.seconds
                        self._tell(stalled)
                elif not standing:
                    message = f"training continues after {duration(stalled.seconds)} or more"
                    self._append(Noticed(message=message, step=stalled.step))
                    self._say("training continues")
                    self._in_time(self.record)  # what hung does no more
                    stalled = None
                elif self._is_held():
                    ending_since = standing  # its holder may let go just now: the time begins anew
                elif end is not None and (standing > ending_since + end or self._is_hang(standing)):
                    self._end()
                    return
        finally:
            if self._second is not None:
                faulthandler.cancel_dump_traceback_later()

    def _is_hang(self, standing: float) -> bool:
        """Return whether the ranks have waited in a collective for longer than that is worth."""
        limit, least, exchange = self._pace.limit(), self._patience.hang, self._patience.exchange
        if standing <= least or (hang := self._unexcused_hang()) is None:
            return False
        if not hang.missing:
            return hang.at.seconds > max(least, min(limit, exchange))
        return max(limit, exchange) < standing and limit < self._patience.slow

    def _unexcused_hang(self) -> Hang | None:
        """Return the collective that ranks wait in, unless a missing rank is where only its own watchdog ends it."""
        if (hang := self._in_time(self.hang)) is not None and hang.missing:
            places = self._in_time(self.ranks) or {}
            if any(places.get(rank, ("", 0.0))[0].startswith(_EXCUSED) for rank in hang.missing):
                return None
        return hang

    def _stalled(self) -> Stalled:
        bucket, place = self._progress.bucket, stacks.where(self._loop)
        waits = bucket in ("input", "epoch_gap")
        packages = [stacks.package(frame) for frame in stacks.frames(self._loop)]
        in_feed = waits or any(package.startswith("steadytrain.data.loader") for package in packages)
        stall = "feed" if in_feed else "rank" if bucket == "communication" else "step"
        culprit = f"the loop is at {bucket}, in {place}"
        if self._is_held():
            culprit = f"the code that reads the run's events has not asked for the next event: it is in {place}"
        elif stall == "feed":
            try:
                words = [f"{name} {doing}" for name, doing in self.feed().items()]
            except Exception as error:  # noqa: BLE001 - it may be broken by what broke the feed
                words = [f"the state of the data loader is not known: {error!r}"]
            more = f", and {len(words) - 4} more" if len(words) > 4 else ""
            at_work = ", ".join(words[:4]) + more or "no loader thread is working"
            culprit = f"{'the loop' if waits else bucket} waits for a batch; {at_work}"
        elif stall == "rank":
            ranks = self._in_time(self.ranks)  # what the ranks met at may be gone
            places = {} if ranks is None else {rank: at for rank, at in ranks.items() if "communication" not in at[0]}
            late = [f"rank {rank} is at {at} for {duration(seconds)}" for rank, (at, seconds) in places.items()]
            where = "their positions are not known" if ranks is None else ", ".join(late[:4])
            culprit = f"the loop waits for the other ranks, in {place}" + (f"; {where}" if where else "")
        if not waits and (hang := self._in_time(self.hang)) is not None:
            culprit = f"{culprit}; {hang.words}"
            stall = "step" if self._log.rank in hang.missing else "rank"
        return Stalled(
            step=self._progress.step,
            what=stall,
            seconds=round(self._pace.standing, 3),
            expected_seconds=round(self._pace.usual(), 3),
            culprit=culprit,
            stacks="",
        )

    def _is_held(self) -> bool:
        """Return whether the loop is suspended: by its caller, between two events, or by a debugger."""
        inside = any(stacks.package(frame).startswith(self._package) for frame in stacks.frames(self._loop))
        return not inside or stacks.is_debugged(self._loop)

    def _tell(self, stalled: Stalled) -> None:
        self._num_stalls += 1
        if self._num_stalls > _MOST_STALLS:
            return
        path = self._dump(stalled)
        self._append(replace(stalled, stacks=path.name if path else ""))
        shown = f" (stacks of all threads: {path})" if path else ""
        self._say(f"no progress for {duration(stalled.seconds)}: {stalled.culprit}{shown}")

    def _dump(self, stalled: Stalled) -> Path | None:
        """Write the stacks, and what was exchanged; None where that cannot be done."""
        self._in_time(self.record)
        head = f"no progress for {duration(stalled.seconds)} at step {stalled.step}: {stalled.culprit}"
        return self._in_time(lambda: stacks.dump(self._folder, head, self._log.rank))

    def _end(self, reason: str = "") -> None:
        """Make the loop raise the error; where it cannot, end the process."""
        stalled, hang = self._stalled(), self._in_time(self.hang)
        is_printed = hang is None or self._log.rank in hang.missing or self.speaks(hang.missing)
        path = self._dump(stalled)
        error = StalledError(
            f"{reason}no progress for {duration(stalled.seconds)} at step {stalled.step}: {stalled.culprit}"
            + (f" ({path} holds the stacks of all threads)" if path else "")
            + ": fix that and run the same command again; it resumes from the last checkpoint"
        )
        if (abandon := self.abandon) is not None:
            self._abandoned = True
            self._in_time(lambda: abandon(error))
            if self._left.wait(self._patience.grace):
                # The loop has raised the error: the interpreter, when it ends, is to wait for no stuck thread.
                while threading.main_thread().is_alive():
                    time.sleep(self._patience.look)
                time.sleep(self._patience.grace)
                os._exit(error.exit_code)
        self._force(error, is_printed=is_printed)

    def end_for_another(self, message: str, is_printed: bool = True) -> None:
        """End this process, which hangs in an exchange with a rank that is gone: from another thread."""
        if not self._left.is_set():
            self._force(RankLostError(message), is_printed=is_printed)

    def _force(self, error: SteadyError, *, is_printed: bool = True) -> None:
        self._append(Failed(error=type(error).__name__, message=str(error), step=self._progress.step))
        self._in_time(lambda: self.leave(error))
        if is_printed:
            os.write(2, f"{_CLEAR if os.isatty(2) else ''}steady: {error}\n".encode(errors="replace"))
        os._exit(error.exit_code)

    def _say(self, message: str) -> None:
        self._in_time(lambda: print(f"steady: {message}", file=sys.stderr, flush=True))

    def _append(self, event: Event) -> None:
        self._in_time(lambda: self._log.append(event))

    def _in_time(self, do: Callable[[], T]) -> T | None:
        """Call something that may itself hang (a write, a lock that a hanging thread holds), with a time limit.

        None where it hangs, or fails.
        """
        results: list[T] = []

        def try_it() -> None:
            with suppress(Exception):
                results.append(do())

        thread = threading.Thread(target=try_it, name="steady-watchdog-tells", daemon=True)
        thread.start()
        thread.join(self._patience.grace)
        return results[0] if results else None

    def _arm_second(self) -> None:
        """Arm ``faulthandler``, which needs no lock, for a time well after this thread would have noticed."""
        now = time.monotonic()
        if self._second is not None and now - self._second < self._patience.lock / 4:
            return
        self._second = now
        if self._is_held():  # its caller may hold the GIL as long as it likes
            faulthandler.cancel_dump_traceback_later()
        else:
            after = max(self._pace.limit(), self._pace.standing) + self._patience.lock
            faulthandler.dump_traceback_later(after, file=2)


class _Pace:
    """Seconds since the loop last moved, and how long its updates usually take."""

    def __init__(self, patience: StallLimits) -> None:
        self.standing = 0.0
        self._patience = patience
        self._seen: tuple[str, float, int] | None = None
        self._looked = time.perf_counter()
        self._stepped: tuple[float, int] | None = None
        self._updates: deque[float] = deque(maxlen=50)
        self._num_updates = 0
        self._longest: dict[str, float] = {}
        self._renewed = 0
        self._bucket = ""

    def look(self, progress: LoopProgress) -> None:
        """Record the loop's progress."""
        now = time.perf_counter()
        passed, self._looked = now - self._looked, now
        bucket, step = progress.bucket, progress.step
        seen = bucket, progress.since, step
        if seen != self._seen:
            self._longest[self._bucket] = max(self.standing, self._longest.get(self._bucket, 0.0))
            self._renewed = self._renewed + 1 if bucket == self._bucket else 0
            self._seen, self._bucket, self.standing = seen, bucket, 0.0
        else:
            self.standing += min(passed, 5 * self._patience.look)  # the process itself may have been stopped
        if self._stepped is None or step != self._stepped[1]:
            if self._stepped is not None and step > self._stepped[1]:
                self._updates.append((now - self._stepped[0]) / (step - self._stepped[1]))
                self._num_updates += step - self._stepped[1]
            self._stepped = now, step

    def limit(self, update: float | None = None) -> float:
        """Return the seconds that the loop may stall now; in an update at least ``update`` (None: the default)."""
        patience, longest = self._patience, self._longest.get(self._bucket, 0.0)
        if self._bucket in SLOW and self._renewed >= _RENEWED:
            return max(patience.update, patience.updates * longest)
        is_paced = len(self._updates) > 1 or self._num_updates >= ENOUGH_UPDATES
        if self._bucket == "measuring" and is_paced:
            return max(patience.update, _PASSES * patience.updates * median(self._updates))
        if self._bucket in SLOW or not is_paced:
            return max(patience.slow, 3 * longest)
        return max(update or patience.update, patience.updates * median(self._updates))

    def usual(self) -> float:
        """Return the usual seconds of what the loop does, or the limit while that is unknown."""
        if self._bucket in SLOW:
            return self._longest.get(self._bucket) or self._patience.slow
        return median(self._updates) if self._updates else self.limit()
