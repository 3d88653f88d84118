"""Runs in which nothing is wrong, of several networks, batches and threads: does advice bring what it predicts?

Each draw is a function of a seed and a number. Its run is judged, and each cause that names a change by a flag is
followed: runs with and without it are made in turns, of equally many images, and the fastest of each are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

from faults.catalogue import PLAIN
from faults.fault import Base

NEAR = 0.08
"""A predicted share is right within so much of the actual one; a run that takes so much longer was made slower."""
SECONDS = 8.0
"""That a run is to train for, by a short one before it."""
ROUNDS = 2

_THREADED = "faults.nets:threaded"
_NETWORKS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (PLAIN, {"model.options.width": 8}),
    (PLAIN, {"model.options.width": 32}),
    (PLAIN, {"model.options.width": 96}),
    ("mlp", {}),
    ("lenet", {}),
    ("timm/test_efficientnet", {}),
    ("resnet20", {}),
    ("timm/test_resnet", {}),
    ("timm/test_vit", {}),
    ("timm/mobilenetv3_small_050", {}),
)
_BATCHES = (8, 32, 128, 256)
_FEEDS: Mapping[str, Mapping[str, Any]] = {
    "fed": {"data": "cifar"},
    "starved": {"data": "originals", "data.size": 64, "parallel.threads": 1},
}
_COMMON: Mapping[str, Any] = {
    "optim.lr": 0.001,
    "optim.warmup_epochs": 0.0,
    "precision.name": "fp32",
    "data.holdout": 0.0,
    "every.save_minutes": 60.0,
}


@dataclass(frozen=True)
class Advised:
    """One change that a verdict named: shares of the wall time that it was to save, and that it saved."""

    run: str
    cause: str
    change: str
    predicted: float
    actual: float
    seconds: tuple[float, float]

    @property
    def is_near(self) -> bool:
        """Return whether the run got faster by what was predicted."""
        return abs(self.predicted - self.actual) <= NEAR

    @property
    def is_harmful(self) -> bool:
        """Return whether the change made the run slower."""
        return self.actual < -NEAR


def draw(seed: int, number: int) -> Base:
    """Draw a sound run: all pairs of a network and a feed come before any comes twice."""
    pairs = list(product(_NETWORKS, _FEEDS))
    Random(seed).shuffle(pairs)
    (model, options), feed = pairs[number % len(pairs)]
    random = Random(f"{seed} {number}")
    batch, threads = random.choice(_BATCHES), random.choice((1, 2))
    settings = {**_COMMON, **options, **_FEEDS[feed], "batch_size": batch}
    by_code = model == PLAIN and threads == 1 and random.random() < 0.5
    if by_code:
        model, settings["model.options.threads"] = _THREADED, 1
    else:
        settings["parallel.compute_threads"] = threads
    data = str(settings.pop("data"))
    width = f" of width {options['model.options.width']}" if options else ""
    about = (
        f"{model.rpartition(':')[2]}{width}, batches of {batch}, {threads} threads{' by its code' * by_code}, {feed}"
    )
    return Base(name=about, about=about, data=data, val=None, model=model, images=20 * batch, settings=settings)


def summary(rows: Sequence[Advised], runs: int) -> dict[str, Any]:
    """Sum up: how many changes brought what was predicted, and which made a run slower."""
    near = sum(row.is_near for row in rows)
    return {
        "runs": runs,
        "advised": len(rows),
        "near": near,
        "near_share": round(near / len(rows), 3) if rows else None,
        "slower": [f"{row.run}: {row.change}" for row in rows if row.is_harmful],
    }


def lines(rows: Sequence[Advised]) -> Iterator[str]:
    """Format a line for each change."""
    for row in rows:
        word = "near" if row.is_near else "SLOWER" if row.is_harmful else "OFF"
        yield (
            f"{row.run:70} {row.cause:16} {row.change[:40]:40} predicted {row.predicted:4.0%}  actual {row.actual:4.0%}"
            f"  {word}"
        )
