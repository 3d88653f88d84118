"""The learning rate of each update, as a share of its peak: pure functions of the update's number, in any order.

Updates count from 0. No update is spent at rate 0: the warm-up begins one update above it, and the falling laws
begin at the peak and would reach ``final`` at the update after the last.

>>> from steadytrain.config import Optim
>>> rate = schedule(Optim(schedule="cosine", warmup_epochs=0.5), steps=10, steps_per_epoch=4)
>>> [round(rate(k), 3) for k in range(10)]
[0.5, 1.0, 1.0, 0.962, 0.854, 0.691, 0.5, 0.309, 0.146, 0.038]
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from steadytrain.config.laws import PATIENCE, Stage, StageSpan, law_of
from steadytrain.config.parts import ADAMS, Optim
from steadytrain.config.stages import parse_schedule, parse_warmup
from steadytrain.errors import RecipeError

Schedule = Callable[[float], float]
"""A function from an update's number, 0 or more, to the share of the peak rate, or to the momentum. Where batches grow,
the number is that of batches of the first size before the update.
"""


def spans(spec: Optim, *, steps: float, steps_per_epoch: float) -> tuple[StageSpan, ...]:
    """Put the stages of a schedule in their places, after the warm-up; the one without epochs takes what is left.

    A stage begins at the level where the one before it ended, the first at the peak.

    Raises:
        RecipeError: the stages are longer than the run, or one begins at a rate of 0 and stays there.
    """
    stages = parse_schedule(spec.schedule)
    begin = spec.warmup_epochs * steps_per_epoch
    staged = sum(stage.epochs or 0.0 for stage in stages) * steps_per_epoch
    if staged and begin + staged > steps + steps_per_epoch * 1e-6 + 1:
        warmup = f" and the warm-up's {spec.warmup_epochs:g}" if begin else ""
        raise RecipeError(
            f"optim.schedule is {spec.schedule!r}, whose {staged / steps_per_epoch:g} epochs{warmup} are more than the"
            f" {steps / steps_per_epoch:.4g} of the run: shorten a stage, or train longer (--epochs)"
        )
    level, placed = 1.0, []
    for number, stage in enumerate(stages):
        length = stage.epochs * steps_per_epoch if stage.epochs else max(steps - begin - staged, 0.0)
        span = StageSpan(stage, spec, begin, begin + length, level, steps_per_epoch)
        law = law_of(stage)
        if level == 0 and (not law.reaches or span.number("to") == 0):
            raise RecipeError(
                f"optim.schedule is {spec.schedule!r}; {stages[number - 1].law} ends at 0, so {stage.law} would train"
                f" nothing: end it higher, such as {stages[number - 1].law}:{stages[number - 1].epochs or 1:g},to=0.01"
            )
        level, begin = law.share(span, span.end), span.end
        placed.append(span)
    return tuple(placed)


def schedule(spec: Optim, *, steps: float, steps_per_epoch: float) -> Schedule:
    """Make the recipe's schedule: the warm-up, then the stages of ``spec.schedule`` over the updates that are left.

    Args:
        spec: ``schedule``, ``warmup``, ``warmup_epochs`` and the laws' own constants. Milestones count from the run's
            start.
        steps: updates in the whole run; later numbers get the last value.
        steps_per_epoch: updates in one epoch, a fraction where the batches do not divide the data.

    Raises:
        RecipeError: as :func:`spans`.
    """
    placed = spans(spec, steps=steps, steps_per_epoch=steps_per_epoch)
    begins = [span.begin for span in placed]
    laws = [law_of(span.stage) for span in placed]
    rises, warmup = parse_warmup(spec.warmup), spec.warmup_epochs * steps_per_epoch
    if laws[0].counts_updates:
        warmup = round(warmup)

    def rate(step: float) -> float:
        if step + 1 < warmup:
            if rises.kind == "constant":
                return rises.share
            passed = (step + 1) / warmup
            return rises.share + (1 - rises.share) * float(passed**rises.power)
        number = max(0, bisect_right(begins, step) - 1)
        return laws[number].share(placed[number], step)

    return rate


def momentum(spec: Optim, *, steps: float, steps_per_epoch: float) -> Schedule | None:
    """Make the schedule of the momentum, or of Adam's first beta; None where it stays as it is.

    Only ``one-cycle`` moves it, against the rate: from the recipe's own down to its ``momentum`` (0.85) at the peak,
    and back (Smith & Topin 2018).
    """
    span = spans(spec, steps=steps, steps_per_epoch=steps_per_epoch)[0]
    high = usual_momentum(spec)
    if span.stage.law != "one-cycle" or high is None:
        return None
    low = min(span.stage.values.get("momentum", 0.85), high)
    if low == high:
        return None
    up = span.stage.values.get("up", 0.3)
    cycle = replace(span, stage=replace(span.stage, values={"up": up, "from": 1e-300, "to": 0.0}))
    share = law_of(span.stage).share
    return lambda step: high if step >= span.end else high - (high - low) * share(cycle, step)


def usual_momentum(spec: Optim) -> float | None:
    """Return the recipe's momentum, Adam's first beta, or None for an optimizer that takes neither from the recipe."""
    return spec.momentum if spec.name in ("sgd", "nag") else spec.betas[0] if spec.name in ADAMS else None


def words(spec: Optim, peak: float) -> str:
    """Describe a schedule's warm-up and laws for the head of a run; ``peak``: the highest learning rate.

    >>> words(Optim(schedule="cosine", warmup_epochs=1), 0.1)
    'warm-up of 1 epoch, cosine to 0'
    >>> words(Optim(schedule="cosine:8,to=0.1 constant"), 0.1)
    'no warm-up, cosine to 0.01 for 8 epochs, then constant'
    """
    epochs, kind = round(spec.warmup_epochs, 2), "" if spec.warmup == "linear" else f" ({spec.warmup})"
    warmup = f"warm-up of {epochs:g} epoch{'s' * (epochs != 1)}{kind}" if epochs else "no warm-up"
    texts = []
    for stage in parse_schedule(spec.schedule):
        span = StageSpan(stage, spec, 0, 1, 1, 1)
        describe = law_of(stage).words or _listed
        text = describe(span, peak)
        texts.append(text if stage.epochs is None else f"{text} for {stage.epochs:g} epoch{'s' * (stage.epochs != 1)}")
    return f"{warmup}, {', then '.join(texts)}"


def _listed(span: StageSpan, peak: float) -> str:
    """Describe a stage by its law's name and what is written of it."""

    def written(value: Any) -> str:
        if isinstance(value, tuple):
            return "/".join(f"{update:g}" for update in value)
        return value if isinstance(value, str) else f"{value:g}"

    listed = [f"{name} {written(value)}" for name, value in span.stage.values.items()]
    return f"{span.stage.law} ({', '.join(listed)})" if listed else span.stage.law


@dataclass(frozen=True)
class Plateau:
    """The memory of ``plateau``: part of the state of a run, and the same on all ranks.

    Args:
        best: the best value since the rate fell last; None: there was no evaluation.
        waited: evaluations since then that were no better.
        drops: how often the rate was lowered.
    """

    best: float | None = None
    waited: int = 0
    drops: int = 0

    def after(self, stage: Stage, value: float) -> Plateau:
        """Return what is remembered after an evaluation of a value, the highest being the best; NaN is never better.

        >>> seen = Plateau()
        >>> for top1 in (0.5, 0.6, 0.6, 0.6):
        ...     seen = seen.after(parse_schedule("plateau,patience=2")[0], top1)
        >>> seen
        Plateau(best=0.6, waited=0, drops=1)
        """
        if math.isfinite(value) and (self.best is None or value > self.best):
            return Plateau(value, 0, self.drops)
        if self.waited + 1 < stage.values.get("patience", PATIENCE):
            return replace(self, waited=self.waited + 1)
        return Plateau(self.best, 0, self.drops + 1)
