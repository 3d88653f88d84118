"""The ledger of a run: each second of its wall time in exactly one bucket."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

INPUT = ("input_storage", "input_decode", "input_augment", "input_batch", "input_other")
"""Waiting for a batch, by what the feed's threads were busy with meanwhile; ``input_other``: with nothing of it."""

COMPUTE = ("forward", "backward", "optimizer", "update")
"""The update itself; ``update``: of updates that nothing tells the parts of."""

PASSES = ("forward", "backward", "update", "host")
"""Forward and backward passes, with what calls them: an update without its optimizer."""

BUCKETS = (
    "startup",
    "warmup",
    *INPUT,
    "epoch_gap",
    "transfer",
    "host",
    *COMPUTE,
    "communication",
    "evaluation",
    "checkpoint",
    "logging",
    "measuring",
    "lost",
    "other",
)
"""Where a second of a run can go. ``lost``: done again after a restart, or for nothing."""

STEADY = (*INPUT, "transfer", "host", *COMPUTE, "communication", "logging")
"""What is there in every update: the steady state."""


@dataclass(frozen=True, kw_only=True)
class Ledger:
    """Where the seconds of a run went, all of its attempts taken together.

    Args:
        wall_seconds: of all attempts, each from the start of its process; pauses between them are not in it.
        away_seconds: those pauses.
        seconds: of every bucket of :data:`BUCKETS`; they add up to ``wall_seconds``.
        steps: updates that count: those that a restart repeated are counted once.
        images: that those updates were made with.

    >>> told = Ledger(wall_seconds=10.0, away_seconds=0.0, seconds=empty() | {"forward": 6.0, "evaluation": 4.0},
    ...               steps=30, images=300)
    >>> told.images_per_second, told.steady_images_per_second, told.share("evaluation", "checkpoint")
    (30.0, 50.0, 0.4)
    """

    wall_seconds: float
    away_seconds: float
    seconds: Mapping[str, float]
    steps: int
    images: int

    @property
    def images_per_second(self) -> float:
        """Overall: images over the wall time; 0 where there is none."""
        return self.images / self.wall_seconds if self.wall_seconds > 0 else 0.0

    @property
    def steady_images_per_second(self) -> float:
        """Images over the seconds of :data:`STEADY`: without starts, evaluations, checkpoints; the wait is in it."""
        steady = sum(self.seconds[bucket] for bucket in STEADY)
        return self.images / steady if steady > 0 else 0.0

    def share(self, *buckets: str) -> float:
        """What these buckets have of the wall time, from 0 to 1. Raises KeyError for a name that is no bucket."""
        held = sum(self.seconds[bucket] for bucket in buckets)
        return held / self.wall_seconds if self.wall_seconds > 0 else 0.0

    @property
    def shares(self) -> dict[str, float]:
        """The share of each bucket."""
        return {bucket: self.share(bucket) for bucket in BUCKETS}


def empty() -> dict[str, float]:
    """Every bucket with nothing in it."""
    return dict.fromkeys(BUCKETS, 0.0)
