"""A loop that a watchdog watches, in a process of its own: ``python standstill.py FOLDER HANG``; see ``HANGS``.

It reads real batches with the real feed from records beside FOLDER, and counts updates that compute nothing.
"""

from __future__ import annotations

import ctypes
import queue
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path

from steadytrain.data.loader import Crop, ImageLoader
from steadytrain.data.recordio.reader import Records
from steadytrain.errors import StalledError
from steadytrain.events import EventLog
from steadytrain.monitor.collectives import Hang, RankPosition
from steadytrain.monitor.watchdog import StallLimits, Watchdog

FOLDER, HANG = Path(sys.argv[1]), sys.argv[2]
IS_FAST = HANG == "fast"  # all its updates are over before the watchdog looks for the first time
UPDATES, AT, SECONDS = (60, 51, 0.0) if IS_FAST else (12, 6, 0.03)
PATIENCE = StallLimits(update=0.5, slow=100.0, end=0.5, grace=1.0, look=0.5 if IS_FAST else 0.02, lock=0.5)
if HANG == "none":
    UPDATES, SECONDS, PATIENCE = 6, 0.5, replace(PATIENCE, update=2.0, end=2.0)
if HANG in ("exchange", "late"):
    PATIENCE = replace(PATIENCE, end=100.0, hang=0.3, exchange=0.4, lock=100.0)
if HANG == "asked":
    PATIENCE = replace(PATIENCE, update=100.0, after_request=0.5, lock=100.0)


class Progress:
    """What the loop is at."""

    def __init__(self) -> None:
        self.bucket, self.since, self.step = "startup", time.perf_counter(), 0

    def to(self, bucket: str) -> None:
        self.bucket, self.since = bucket, time.perf_counter()


class Blocked:
    """Records of which one does not come until somebody writes to a pipe."""

    def __init__(self, records: Records, pipe: Path) -> None:
        self.labels, self._records, self._pipe, self._asked = records.labels, records, pipe, 0

    def __len__(self) -> int:
        return len(self._records)

    def image(self, number: int) -> memoryview:
        self._asked += 1
        if self._asked == 8 * (AT + 2):
            self._pipe.read_bytes()
        return self._records.image(number)


def updates(progress: Progress, feed: ImageLoader) -> Iterator[int]:
    """The loop."""
    batches = iter(feed)
    while progress.step < UPDATES:
        progress.to("input")
        next(batches)
        progress.to("forward")
        time.sleep(SECONDS)
        if progress.step == AT:
            hang_in_forward(progress)
        progress.step += 1
        progress.to("logging")
        yield progress.step


def hang_in_forward(progress: Progress) -> None:
    """What the loop's own thread does in its middle."""
    if HANG in ("native", "fast", "asked", "exchange", "late"):
        ctypes.CDLL(None).pause()
    elif HANG == "lock":
        ctypes.PyDLL(None).usleep(3_000_000)  # as native code that never lets go of the GIL
    elif HANG == "raises":
        raise ABANDONED.get()
    elif HANG == "measuring":
        progress.to("measuring")
        ctypes.CDLL(None).pause()
    elif HANG == "evaluation":
        for _ in range(6):
            progress.to("evaluation")
            time.sleep(0.05)
        ctypes.CDLL(None).pause()


def caller(step: int) -> None:
    """What whoever reads the events does."""
    if HANG == "caller" and step == AT:
        time.sleep(3)


HANGS = {"feed", "native", "fast", "asked", "lock", "raises", "caller", "evaluation", "measuring", "none", "exchange"}
HANGS |= {"late"}  # as exchange, but this rank has not begun it
ABANDONED: queue.Queue[StalledError] = queue.Queue()


def main() -> int:
    assert HANG in HANGS
    loop = import_module(
        Path(__file__).stem
    )  # the same once more: the loop is another module than its caller, as usual
    progress = Progress()
    with Records.open(FOLDER.parent / "digits.rec") as records, EventLog(FOLDER / "events.jsonl", attempt=1) as log:
        source = Blocked(records, FOLDER / "pipe") if HANG in ("feed", "raises") else records
        feed = ImageLoader(
            source, Crop(kind="none", size=8), batch_size=8, threads=1, depth=1, keep_bytes=0, read_ahead=False
        )
        watchdog = Watchdog(progress, log=log, folder=FOLDER, patience=PATIENCE, package=loop.__name__)
        if HANG == "asked":
            watchdog.stop_signal = lambda: "SIGTERM" if progress.step == AT else None
        if HANG in ("exchange", "late"):
            at = RankPosition(group="0", number=7, name="nccl:all_reduce", values=9, seconds=1.0)
            watchdog.hang = lambda: Hang(at, [0, 1], [0] * (HANG == "late"), []) if progress.step == AT else None
            watchdog.speaks = lambda missing: False
            watchdog.record = lambda: print("recorded", file=sys.stderr)
            watchdog.leave = lambda error: print(f"told others of a {type(error).__name__}", file=sys.stderr)
        if HANG == "raises":
            watchdog.abandon = loop.ABANDONED.put
        try:
            with watchdog:
                for step in loop.updates(progress, feed):
                    caller(step)
        except StalledError as error:
            print(error, file=sys.stderr)
            return error.exit_code
        feed.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
