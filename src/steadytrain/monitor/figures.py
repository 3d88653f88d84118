"""Small records that the views of a run share: how far it has come, and how well it does."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steadytrain.events import Evaluated
from steadytrain.format import epoch
from steadytrain.intervals import Interval, wilson


@dataclass(frozen=True, kw_only=True)
class RunReach:
    """Progress of a run: updates that count, and passes over the data; ``steps`` and ``epochs`` are the whole run's.

    ``share``: of the run's images that it has come to. All are 0 where a log does not tell them.
    """

    step: int = 0
    steps: int = 0
    epoch: float = 0.0
    epochs: float = 0.0
    share: float = 0.0


@dataclass(frozen=True, kw_only=True)
class RunScore:
    """One evaluation; ``top1_95``: the 95 % confidence interval of ``top1`` over the ``n`` images.

    Where an image may have several labels, ``mean_ap`` is the main number, ``top1`` the images with every label right.
    """

    step: int
    epoch: float
    n: int
    loss: float | None
    top1: float
    top1_95: Interval
    top5: float | None
    seconds: float
    weights: str
    mean_ap: float | None = None

    @property
    def value(self) -> float:
        """The main number: top-1; of several labels, mAP."""
        return self.top1 if self.mean_ap is None else self.mean_ap

    @property
    def when(self) -> str:
        """Say when it was made: after a probe, or at which epoch."""
        return f"at epoch {epoch(self.epoch)}" if self.epoch else "by the probe"

    @property
    def interval(self) -> Interval | None:
        """The 95 % confidence interval of the main number; None for mAP, or where it or ``n`` is not known."""
        return self.top1_95 if self.mean_ap is None and math.isfinite(self.top1) and self.n > 0 else None

    @staticmethod
    def of(event: Evaluated) -> RunScore:
        """Return the score that an event holds."""
        values = {name: value for name, value in vars(event).items() if name in RunScore.__dataclass_fields__}
        return RunScore(**values, top1_95=wilson(event.top1, event.n))
