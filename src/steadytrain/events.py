"""What happens in a run, as small frozen facts; a run's truth is its ``events.jsonl``.

One JSON object a line: ``{"v": 1, "kind": "Step", "time": ..., "attempt": 1, "rank": 0, ...}``. Times are seconds
since 1970, durations seconds, sizes bytes, rates per second, accuracies fractions. A line is written (not fsynced)
before the event is yielded to anyone, so a killed process loses at most the line it was writing; the torn
tail is cut off when the file is next opened for writing, and never shown to a reader. Kinds that this version
does not know are kept as :class:`Unknown`.

>>> import tempfile, pathlib
>>> path = pathlib.Path(tempfile.mkdtemp()) / "events.jsonl"
>>> with EventLog(path, attempt=1) as log:
...     _ = log.append(Step(step=1, position=128, n=128, seconds=0.25, wait_seconds=0.01, lr=0.1))
>>> [event.kind for event in read(path)]
['Step']
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

from steadytrain.errors import storage_error

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Event:
    """When, in which attempt (1 for the first start, 2 after one restart, ...) and on which rank."""

    time: float = 0.0
    attempt: int = 0
    rank: int = 0

    @property
    def kind(self) -> str:
        """The name of the event's type, as in the file."""
        return type(self).__name__

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of this event's line."""
        return {"v": VERSION, "kind": self.kind, **vars(self)}


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """An attempt begins. ``steps`` is the run's total; ``step`` where this attempt goes on from (0 at first).

    ``data``: ``train``, ``val`` (paths), their digests, ``num_train``, ``num_val``, ``classes`` (names), ``held_out``.
    ``model``: ``name``, ``parameters``, ``trainable``, ``licence``, ``weights`` (it began with), ``size`` (pixels).
    ``machine``: what bits and speed depend on: ``device``, ``compute_threads``, ``feed_threads``, ``isa``, ``torch``,
    ``python``, ``host``, ``cores``, ``precision``.
    """

    digest: str
    step: int
    steps: int
    steps_per_epoch: float
    batch_size: int
    data: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Step(Event):
    """One update, host facts only (no device value, which would have to be waited for).

    ``step`` counts from 1; ``position`` samples were consumed so far; ``n`` of them in this update;
    ``seconds`` since the end of the step before; ``wait_seconds`` of those spent waiting for the feed.
    """

    step: int
    position: int
    n: int
    seconds: float
    wait_seconds: float
    lr: float


@dataclass(frozen=True, kw_only=True)
class Logged(Event):
    """Device values averaged since the line before, and rates.

    ``images_per_second`` counts only the seconds of steps since the line before (the steady state).
    """

    step: int
    epoch: float
    loss: float
    top1: float
    lr: float
    images_per_second: float
    wait_share: float
    grad_norm: float | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """One pass over a whole data set: ``n`` is its exact size. ``weights``: ``model`` or ``ema``."""

    step: int
    epoch: float
    n: int
    loss: float
    top1: float
    top5: float
    seconds: float
    weights: str = "model"


@dataclass(frozen=True, kw_only=True)
class FeedStats(Event):
    """Busy seconds of each stage and waiting seconds, summed over the feed's threads since it started.

    Of the ``kept_bytes`` of decoded images ``shared_bytes`` are kept once for several processes of the machine, and
    ``device_bytes`` are on the device as well.
    """

    step: int
    images: int
    bytes: int
    kept_bytes: int = 0
    shared_bytes: int = 0
    device_bytes: int = 0
    read_seconds: float
    decode_seconds: float
    batch_seconds: float
    blocked_seconds: float
    threads: int


@dataclass(frozen=True, kw_only=True)
class FeedPlaced(Event):
    """Where the feed's threads live from here on, ``threads`` (of the training process) or ``process``, and why.

    ``batch_seconds``: the loop's time for a batch beside an idle feed; the costs: what a working feed adds to it in
    either place, as a share; None where it was not measured. ``batches`` were measured.
    """

    step: int
    place: str
    reason: str
    batch_seconds: float | None = None
    threads_cost: float | None = None
    process_cost: float | None = None
    batches: int = 0


@dataclass(frozen=True, kw_only=True)
class Saved(Event):
    """A checkpoint is on disk, whole and checksummed."""

    step: int
    path: str
    bytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Noticed(Event):
    """A warning that belongs to the run, such as a corrupt checkpoint that was passed over."""

    message: str
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Failed(Event):
    """The attempt ended by an error."""

    error: str
    message: str
    step: int = 0


@dataclass(frozen=True, kw_only=True)
class Ended(Event):
    """The attempt ended well: ``finished``, or ``interrupted`` or ``preempted`` after saving.

    ``seconds`` is this attempt's wall time and ``images`` what it trained on: their ratio is the overall rate.
    """

    status: Literal["finished", "interrupted", "preempted"]
    step: int
    seconds: float
    images: int


@dataclass(frozen=True, kw_only=True)
class Unknown(Event):
    """A kind that this version does not know, kept whole."""

    name: str
    told: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return self.name

    def to_dict(self) -> dict[str, Any]:
        return dict(self.told)


KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (Started, Step, Logged, Evaluated, FeedStats, FeedPlaced, Saved, Noticed, Failed, Ended)
}
_FIELDS = {name: frozenset(f.name for f in fields(kind)) for name, kind in KINDS.items()}
_STEP_LINE = b'{"v":1,"kind":"Step",'  # as EventLog writes it

E = TypeVar("E", bound=Event)


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # made once: a step writes a line


class EventLog:
    """Appends events to one file, stamping time, attempt and rank. Safe from several threads.

    Args:
        path: the ``.jsonl`` file; a torn last line, left by a kill, is cut off.
        attempt: number of this start of the run.
        rank: of the writing process.

    Raises:
        StorageError: the file cannot be written.
    """

    def __init__(self, path: Path, attempt: int, rank: int = 0) -> None:
        self.path = path
        self.attempt = attempt
        self.rank = rank
        self._lock = threading.Lock()
        try:
            repair(path)
            # A file name that is no UTF-8 holds lone surrogates: escaped, they are JSON and come back as they were.
            self._file = path.open("a", encoding="utf-8", errors="backslashreplace", buffering=1)
        except OSError as error:
            raise storage_error(error, path) from error

    def append(self, event: E) -> E:
        """Write one line and return the event as written. Raises StorageError."""
        stamped = replace(event, time=time.time(), attempt=self.attempt, rank=self.rank)
        line = _encode(stamped.to_dict()) + "\n"
        try:
            with self._lock:
                self._file.write(line)
        except OSError as error:
            raise storage_error(error, self.path) from error
        return stamped

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        try:
            self._file.close()
        except OSError as error:
            raise storage_error(error, self.path) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def repair(path: Path) -> int:
    """Cut off what follows the last newline, if anything; returns the number of bytes cut."""
    if not path.exists():
        return 0
    with path.open("r+b") as file:
        size = file.seek(0, os.SEEK_END)
        kept = size
        while kept:
            start = max(0, kept - 65536)
            file.seek(start)
            at = file.read(kept - start).rfind(b"\n")
            if at >= 0:
                kept = start + at + 1
                break
            kept = start
        if kept < size:
            file.truncate(kept)
    return size - kept


def read(path: Path, *, sparse: bool = False) -> Iterator[Event]:
    """The events of a file, oldest first; also while another process writes it.

    A torn last line is left out, a line in the middle that is no JSON is passed over.

    Args:
        path: the ``.jsonl`` file.
        sparse: of the ``Step`` lines that follow each other give only the last: all else is there, and a long run,
            which has little but steps in it, is read many times faster.
    """
    with path.open("rb") as file:
        for line in _sparse(file) if sparse else file:
            if not line.endswith(b"\n"):
                return  # still being written: going on would take its other half for a line
            if (event := from_json(line)) is not None:
                yield event


def _sparse(lines: Iterable[bytes]) -> Iterator[bytes]:
    held = b""
    for line in lines:
        if held and not (line.startswith(_STEP_LINE) and line.endswith(b"\n")):
            yield held
            held = b""
        if line.startswith(_STEP_LINE):
            held = line
        else:
            yield line
    if held:
        yield held


def from_json(line: str | bytes) -> Event | None:
    """One line as an event; None where it is no JSON object."""
    try:
        told = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(told, dict):
        return None
    kind = KINDS.get(str(told.get("kind")))
    if kind is None:
        stamp = {name: told[name] for name in ("time", "attempt", "rank") if name in told}
        return Unknown(name=str(told.get("kind")), told=told, **stamp)
    known = _FIELDS[kind.__name__]
    try:
        return kind(**{name: value for name, value in told.items() if name in known})
    except TypeError:
        return Unknown(name=kind.__name__, told=told)
