"""What happens in a run: starts, steps, evaluations, checkpoints, ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from steadytrain.events.event import Event


@dataclass(frozen=True, kw_only=True)
class Started(Event):
    """An attempt begins. ``steps`` is the run's total; ``step`` where this attempt goes on from (0 at first).

    ``startup``: what was done since the process started -> seconds: ``process`` (the interpreter, imports and what the
    command line did), ``data``, ``model``, ``state``, ``recompute``, ``blocks`` and ``threads`` (to find which parts,
    whether they can be, and how many), ``compile``.

    ``data``: ``train``, ``val`` (paths), their digests, ``num_train``, ``num_val``, ``classes`` (names), ``held_out``.
    ``model``: ``name``, ``parameters``, ``trainable``, ``licence``, ``weights`` (it began with), ``size`` (pixels).
    ``machine``: what bits and speed depend on: ``device``, ``compute_threads``, ``feed_threads``, ``isa``, ``torch``,
    ``python``, ``host``, ``cores``, ``precision``; ``spins``: turns of a waiting compute thread; ``threads_seconds``:
    seconds of a pass by numbers of threads, where they were measured.
    """

    digest: str
    step: int
    steps: int
    steps_per_epoch: float
    batch_size: int
    data: Mapping[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    startup: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """An attempt goes on where others ended, from the checkpoint of ``step``; what that costs.

    ``images_repeated`` were trained on after it and are trained on again; ``seconds_away`` passed since the last event
    before this attempt. ``ranks_before`` trained until then, ``ranks`` do now.
    """

    step: int
    images_repeated: int
    seconds_away: float
    ranks_before: int
    ranks: int


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
