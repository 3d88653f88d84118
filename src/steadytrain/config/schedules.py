"""The learning rate of each update, as a share of its peak: pure functions of the update's number, in any order.

Updates count from 0. No update is spent at rate 0: the warm-up begins one update above it, and the falling laws
begin at the peak and would reach ``final`` at the update after the last. MXNet's schedulers see ``num_update = k + 1``
at update k; the laws ``mxnet/...`` do the same. What they do not take over of MXNet's: that a scheduler remembers the
largest number it was ever asked for, so that a run resumed past its end trains at full rate.

>>> from steadytrain.config import Optim
>>> rate = schedule(Optim(schedule="cosine", warmup_epochs=0.5), steps=10, steps_per_epoch=4)
>>> [round(rate(k), 3) for k in range(10)]
[0.5, 1.0, 1.0, 0.962, 0.854, 0.691, 0.5, 0.309, 0.146, 0.038]
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace

from steadytrain.config.parts import ADAMS, Optim
from steadytrain.config.stages import Stage, parse_schedule, parse_warmup
from steadytrain.errors import RecipeError

Schedule = Callable[[float], float]
"""A function from an update's number, 0 or more, to the share of the peak rate, or to the momentum. Where batches grow,
the number is that of batches of the first size before the update.
"""


@dataclass(frozen=True)
class StageSpan:
    """A stage in its place: updates ``begin`` to ``end``, and the ``level`` at which the stage before it ended.

    ``level`` and all that a law computes are shares of the peak; ``per_epoch`` updates are an epoch.
    """

    stage: Stage
    optim: Optim
    begin: float
    end: float
    level: float
    per_epoch: float

    def number(self, name: str) -> float:
        """Return a parameter of the law: as it is written, else the recipe's key of that name."""
        usual = {"to": self.optim.final, "factor": self.optim.factor, "power": self.optim.power}
        return self.stage.numbers[name] if name in self.stage.numbers else usual[name]

    def passed(self, step: float) -> float:
        """Return the share of the stage that is done before an update, 0 to 1."""
        return min(max(step - self.begin, 0.0) / max(self.end - self.begin, 1.0), 1.0)

    def lowered(self, drops: int) -> float:
        """Return the share of the rate that is left of a ``plateau`` after so many drops."""
        return max(float(self.number("factor") ** drops), self.number("to"))

    def epochs(self, step: float) -> float:
        """Return the epochs of the stage that are done before an update."""
        return min(max(step - self.begin, 0.0), self.end - self.begin) / self.per_epoch


def _constant(span: StageSpan, step: float) -> float:
    return span.level


def _falling(shape: Callable[[StageSpan, float], float]) -> Callable[[StageSpan, float], float]:
    """Fall to ``to`` as ``shape`` does from 1 to 0, a function of the share of the stage that has passed."""

    def law(span: StageSpan, step: float) -> float:
        to = span.number("to")
        return to + (span.level - to) * shape(span, span.passed(step))

    return law


def _exponential(span: StageSpan, step: float) -> float:
    """Fall by the same ratio at each update: ``factor`` an epoch, if that is written, else to ``to`` at the end."""
    to = span.number("to")
    if "factor" in span.stage.numbers:
        return max(float(span.level * span.number("factor") ** span.epochs(step)), to)
    return float(span.level * (to / span.level) ** span.passed(step))


def _inverse_sqrt(span: StageSpan, step: float) -> float:
    """Fall as 1 / sqrt(updates) (Vaswani et al. 2017; with a cool-down: Zhai et al. 2022, "Scaling ViT").

    ``scale`` is the time T of sqrt(T / (T + t)): the warm-up's, if there is one, else one epoch.
    """
    scale = span.stage.numbers.get("scale", span.optim.warmup_epochs or 1.0)
    return span.level * math.sqrt(scale / (scale + span.epochs(step)))


def _step(span: StageSpan, step: float) -> float:
    """Multiply by ``factor`` once each of ``milestones`` is done; those before an earlier stage's end do not count."""
    drops = [epoch * span.per_epoch for epoch in span.optim.milestones]
    is_first = span.begin == span.optim.warmup_epochs * span.per_epoch
    before = 0 if is_first else bisect_left(drops, span.begin)
    return float(span.level * span.number("factor") ** max(0, bisect_right(drops, min(step, span.end)) - before))


def _factor(span: StageSpan, step: float) -> float:
    drops = math.floor(span.epochs(step) / span.number("every") + 1e-9)
    return float(max(span.level * span.number("factor") ** drops, span.number("to")))


def _restarts(span: StageSpan, step: float) -> float:
    """Cosines one after another (Loshchilov & Hutter 2017, "SGDR").

    The first takes ``every`` epochs, each next one ``times`` as long, from a peak that is ``shrink`` of the last.
    """
    cycle, into = _cycle(span.epochs(step), span.number("every"), span.stage.numbers.get("times", 1.0))
    to = span.number("to")
    peak = max(span.level * span.stage.numbers.get("shrink", 1.0) ** cycle, to)
    if step >= span.end and into < 1e-9 and cycle:  # a stage ends where its last cycle ended
        return to
    return to + (peak - to) * (1 + math.cos(math.pi * into)) / 2


def _cycle(epochs: float, every: float, times: float) -> tuple[int, float]:
    """Return which cycle it is, from 0, and the share of it that is done."""
    if times == 1:
        cycle = math.floor(epochs / every + 1e-9)
        return cycle, max(0.0, epochs / every - cycle)
    cycle = math.floor(math.log1p(epochs / every * (times - 1)) / math.log(times) + 1e-9)
    begin = every * (times**cycle - 1) / (times - 1)
    return cycle, max(0.0, (epochs - begin) / (every * times**cycle))


def _one_cycle(span: StageSpan, step: float) -> float:
    """Rise along a cosine from ``from`` to the peak in the share ``up`` of the stage, then fall to ``to``.

    Smith & Topin 2018, "Super-Convergence", with the cosines and the constants of torch's OneCycleLR.
    """
    numbers, passed = span.stage.numbers, span.passed(step)
    up, low, to = numbers.get("up", 0.3), numbers.get("from", 0.04), span.number("to")
    if passed < up:
        return low + (1 - low) * (1 - math.cos(math.pi * passed / up)) / 2
    return to + (1 - to) * (1 + math.cos(math.pi * (passed - up) / (1 - up))) / 2


def _triangular(span: StageSpan, step: float) -> float:
    """Rise and fall linearly between ``from`` and the peak, once in ``every`` epochs (Smith 2017, "Cyclical Learning
    Rates"); each cycle's height is ``shrink`` of the last (0.5: his triangular2).
    """
    low = span.stage.numbers.get("from", 0.25)
    cycle, into = _cycle(span.epochs(step), span.number("every"), 1.0)
    height = (1 - low) * span.stage.numbers.get("shrink", 1.0) ** cycle
    return low + height * (1 - abs(2 * into - 1))


def _mxnet_factor(span: StageSpan, step: float) -> float:
    """MXNet's FactorScheduler: a drop is seen at ``num_update = i * step + 1``."""
    drops = int(step) // span.stage.updates[0]
    return float(max(span.number("factor") ** drops, span.number("to")))


def _mxnet_multi_factor(span: StageSpan, step: float) -> float:
    """MXNet's MultiFactorScheduler, by updates (``step``) or by milestones in epochs, rounded to updates."""
    drops = span.stage.updates or [round(epoch * span.per_epoch) for epoch in span.optim.milestones]
    return float(span.number("factor") ** bisect_right(drops, step))


def _mxnet_falling(shape: Callable[[StageSpan, float], float]) -> Callable[[StageSpan, float], float]:
    """MXNet's Poly and Cosine: ``shape`` of the share of updates that are left; 1 if the warm-up takes all of them."""

    def law(span: StageSpan, step: float) -> float:
        most, begin, to = span.stage.numbers.get("max_update", span.end), round(span.begin), span.number("to")
        if begin >= most:
            return 1.0
        return to + (1 - to) * shape(span, 1 - (min(step + 1, most) - begin) / (most - begin))

    return law


LAW: dict[str, Callable[[StageSpan, float], float]] = {
    "constant": _constant,
    "linear": _falling(lambda span, passed: 1 - passed),
    # Half a cosine (Loshchilov & Hutter 2017, "SGDR", without restarts).
    "cosine": _falling(lambda span, passed: (1 + math.cos(math.pi * passed)) / 2),
    "poly": _falling(lambda span, passed: float((1 - passed) ** span.number("power"))),
    "exponential": _exponential,
    "inverse-sqrt": _inverse_sqrt,
    "step": _step,
    "factor": _factor,
    "restarts": _restarts,
    "one-cycle": _one_cycle,
    "triangular": _triangular,
    "plateau": _constant,
    "mxnet/factor": _mxnet_factor,
    "mxnet/multi-factor": _mxnet_multi_factor,
    "mxnet/poly": _mxnet_falling(lambda span, left: float(left ** span.number("power"))),
    "mxnet/cosine": _mxnet_falling(lambda span, left: (1 + math.cos(math.pi * (1 - left))) / 2),
}
"""The laws of :data:`steadytrain.config.stages.LAWS`: from a stage's place and an update to the share of the peak."""


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
        if level == 0 and (stage.law not in ("linear", "cosine", "poly") or span.number("to") == 0):
            raise RecipeError(
                f"optim.schedule is {spec.schedule!r}; {stages[number - 1].law} ends at 0, so {stage.law} would train"
                f" nothing: end it higher, such as {stages[number - 1].law}:{stages[number - 1].epochs or 1:g},to=0.01"
            )
        level, begin = LAW[stage.law](span, span.end), span.end
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
    rises, warmup = parse_warmup(spec.warmup), spec.warmup_epochs * steps_per_epoch
    if placed[0].stage.law.startswith("mxnet/"):
        warmup = round(warmup)

    def rate(step: float) -> float:
        if step + 1 < warmup:
            if rises.kind == "constant":
                return rises.share
            passed = (step + 1) / warmup
            return rises.share + (1 - rises.share) * float(passed**rises.power)
        span = placed[max(0, bisect_right(begins, step) - 1)]
        return LAW[span.stage.law](span, step)

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
    low = min(span.stage.numbers.get("momentum", 0.85), high)
    if low == high:
        return None
    up = span.stage.numbers.get("up", 0.3)
    begin = replace(span.stage, numbers={"up": up, "from": 1e-300, "to": 0.0})
    cycle = replace(span, stage=begin)
    return lambda step: high if step >= span.end else high - (high - low) * _one_cycle(cycle, step)


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
        listed = [f"{name} {value:g}" for name, value in stage.numbers.items()]
        listed += [f"step {'/'.join(map(str, stage.updates))}"] if stage.updates else []
        text = f"{stage.law} ({', '.join(listed)})" if listed else stage.law
        if stage.law in ("cosine", "linear"):
            text = f"{stage.law} to {span.number('to') * peak:.3g}"
        elif stage.law == "poly":
            text = f"polynomial (power {span.number('power'):g}) to {span.number('to') * peak:.3g}"
        elif stage.law == "step":
            text = f"x {span.number('factor'):g} at epochs {', '.join(f'{epoch:g}' for epoch in spec.milestones)}"
        elif stage.law == "plateau":
            patience = stage.numbers.get("patience", PATIENCE)
            text = f"x {span.number('factor'):g} after {patience:g} evaluations without a better {stage.on}"
        texts.append(text if stage.epochs is None else f"{text} for {stage.epochs:g} epoch{'s' * (stage.epochs != 1)}")
    return f"{warmup}, {', then '.join(texts)}"


PATIENCE = 5
"""Evaluations in a row without a better value, after which ``plateau`` lowers the rate, by default."""


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

    def after(self, stage: Stage, *, top1: float, loss: float) -> Plateau:
        """Return what is remembered after an evaluation; a value that is not finite is never better.

        >>> seen = Plateau()
        >>> for top1 in (0.5, 0.6, 0.6, 0.6):
        ...     seen = seen.after(parse_schedule("plateau,patience=2")[0], top1=top1, loss=1.0)
        >>> seen
        Plateau(best=0.6, waited=0, drops=1)
        """
        value = top1 if stage.on == "top1" else -loss
        if math.isfinite(value) and (self.best is None or value > self.best):
            return Plateau(value, 0, self.drops)
        if self.waited + 1 < stage.numbers.get("patience", PATIENCE):
            return replace(self, waited=self.waited + 1)
        return Plateau(self.best, 0, self.drops + 1)
