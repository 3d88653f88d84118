"""Laws of the learning rate: pure functions of an update's number, each a row with its parameters and their limits.

A package adds a law by an entry point of the group ``steadytrain.schedules``: its name is the law's, its object a
:class:`Law`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

from steadytrain.config import factories
from steadytrain.config.settings import BELOW_1, UP_TO_1
from steadytrain.config.words import number

PATIENCE = 5
"""Evaluations in a row without a better value, after which ``plateau`` lowers the rate, by default."""


class LawParameter(NamedTuple):
    """A parameter of a law: what ``read`` makes of a text ``holds``, or it must be what ``words`` say."""

    holds: Callable[[Any], bool]
    words: str
    read: Callable[[str], Any] = number


def _updates(text: str) -> tuple[float, ...]:
    return tuple(map(number, text.split("/")))


SHARE = LawParameter(lambda value: 0 <= value <= 1, "a share of the peak, 0 to 1")
INSIDE = LawParameter(lambda value: 0 < value < 1, "a share above 0, below 1")
ABOVE_0 = LawParameter(lambda value: 0 < value < math.inf, "above 0")
EPOCHS = LawParameter(lambda value: 0 < value < math.inf, "epochs above 0")
WHOLE = LawParameter(lambda value: value >= 1 and value % 1 == 0, "a whole number, 1 or more")
FACTOR = LawParameter(*UP_TO_1)
UPDATES = LawParameter(
    lambda values: all(map(WHOLE.holds, values)) and all(a < b for a, b in pairwise(values)),
    "whole numbers of updates, 1 or more, rising, such as 30/60/80",
    _updates,
)
UPDATE = LawParameter(lambda values: len(values) == 1 and UPDATES.holds(values), WHOLE.words, _updates)


@dataclass(frozen=True)
class Stage:
    """One law of a schedule.

    Args:
        law: its name.
        epochs: how long it lasts; None: what the others leave of the run.
        values: of its parameters, as they are written.
    """

    law: str
    epochs: float | None = None
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def updates(self) -> tuple[int, ...]:
        """The updates of ``step``, at which a law that counts them falls."""
        return tuple(map(int, self.values.get("step", ())))

    @property
    def on(self) -> str:
        """The figure of ``plateau``: ``top1`` (of several labels mAP), ``loss``, or ``one``: that of ``every.best``."""
        return str(self.values.get("on", "one"))


class LawDefaults(Protocol):
    """The recipe's keys that laws take where a stage does not write its own: those of ``optim``."""

    @property
    def final(self) -> float: ...
    @property
    def factor(self) -> float: ...
    @property
    def power(self) -> float: ...
    @property
    def warmup_epochs(self) -> float: ...
    @property
    def milestones(self) -> tuple[float, ...]: ...


@dataclass(frozen=True)
class StageSpan:
    """A stage in its place: updates ``begin`` to ``end``, and the ``level`` at which the stage before it ended.

    ``level`` and all that a law computes are shares of the peak; ``per_epoch`` updates are an epoch.
    """

    stage: Stage
    optim: LawDefaults
    begin: float
    end: float
    level: float
    per_epoch: float

    def number(self, name: str) -> float:
        """Return a parameter of the law: as it is written, else the recipe's key of that name."""
        usual = {"to": self.optim.final, "factor": self.optim.factor, "power": self.optim.power}
        return float(self.stage.values[name] if name in self.stage.values else usual[name])

    def passed(self, step: float) -> float:
        """Return the share of the stage that is done before an update, 0 to 1."""
        return min(max(step - self.begin, 0.0) / max(self.end - self.begin, 1.0), 1.0)

    def lowered(self, drops: int) -> float:
        """Return the share of the rate that is left of a ``plateau`` after so many drops."""
        return max(float(self.number("factor") ** drops), self.number("to"))

    def epochs(self, step: float) -> float:
        """Return the epochs of the stage that are done before an update."""
        return min(max(step - self.begin, 0.0), self.end - self.begin) / self.per_epoch


@dataclass(frozen=True, kw_only=True)
class Law:
    """A law of the learning rate.

    Args:
        share: computes the share of the peak, of a stage's place and an update.
        takes: its parameters, by name.
        needs: the one of them that has to be written; empty: none.
        rises: it begins low and rises by itself, so that it stands first and without a warm-up.
        reaches: it comes to ``to`` from every level, from 0 too.
        counts_updates: it counts updates from the first one, whatever their size, so that it stands alone.
        at_milestones: it falls at ``optim.milestones``, unless updates are written.
        words: describes a stage at a peak rate; None: its name and what is written.
    """

    share: Callable[[StageSpan, float], float]
    takes: Mapping[str, LawParameter] = field(default_factory=dict)
    needs: str = ""
    rises: bool = False
    reaches: bool = False
    counts_updates: bool = False
    at_milestones: bool = False
    words: Callable[[StageSpan, float], str] | None = None


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
    if "factor" in span.stage.values:
        return max(float(span.level * span.number("factor") ** span.epochs(step)), to)
    return float(span.level * (to / span.level) ** span.passed(step))


def _inverse_sqrt(span: StageSpan, step: float) -> float:
    """Fall as 1 / sqrt(updates) (Vaswani et al. 2017; with a cool-down: Zhai et al. 2022, "Scaling ViT").

    ``scale`` is the time T of sqrt(T / (T + t)): the warm-up's, if there is one, else one epoch.
    """
    scale = span.stage.values.get("scale", span.optim.warmup_epochs or 1.0)
    return float(span.level * math.sqrt(scale / (scale + span.epochs(step))))


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
    cycle, into = _cycle(span.epochs(step), span.number("every"), span.stage.values.get("times", 1.0))
    to = span.number("to")
    peak = max(span.level * span.stage.values.get("shrink", 1.0) ** cycle, to)
    if step >= span.end and into < 1e-9 and cycle:  # a stage ends where its last cycle ended
        return to
    return float(to + (peak - to) * (1 + math.cos(math.pi * into)) / 2)


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
    values, passed = span.stage.values, span.passed(step)
    up, low, to = values.get("up", 0.3), values.get("from", 0.04), span.number("to")
    if passed < up:
        return float(low + (1 - low) * (1 - math.cos(math.pi * passed / up)) / 2)
    return float(to + (1 - to) * (1 + math.cos(math.pi * (passed - up) / (1 - up))) / 2)


def _triangular(span: StageSpan, step: float) -> float:
    """Rise and fall linearly between ``from`` and the peak, once in ``every`` epochs (Smith 2017, "Cyclical Learning
    Rates"); each cycle's height is ``shrink`` of the last (0.5: his triangular2).
    """
    low = span.stage.values.get("from", 0.25)
    cycle, into = _cycle(span.epochs(step), span.number("every"), 1.0)
    height = (1 - low) * span.stage.values.get("shrink", 1.0) ** cycle
    return float(low + height * (1 - abs(2 * into - 1)))


def _to(span: StageSpan, peak: float) -> str:
    return f"{span.stage.law} to {span.number('to') * peak:.3g}"


def _poly_words(span: StageSpan, peak: float) -> str:
    return f"polynomial (power {span.number('power'):g}) to {span.number('to') * peak:.3g}"


def _step_words(span: StageSpan, peak: float) -> str:
    return f"x {span.number('factor'):g} at epochs {', '.join(f'{epoch:g}' for epoch in span.optim.milestones)}"


def _factor_words(span: StageSpan, peak: float) -> str:
    least = f", to {span.number('to') * peak:.3g}" if span.number("to") else ""
    every = span.number("every")
    return f"x {span.number('factor'):g} every {every:g} epoch{'s' * (every != 1)}{least}"


def _plateau_words(span: StageSpan, peak: float) -> str:
    patience = span.stage.values.get("patience", PATIENCE)
    evaluations = f"{patience:g} evaluation{'s' * (patience != 1)}"
    return f"x {span.number('factor'):g} after {evaluations} without a better {span.stage.on}"


LAWS: dict[str, Law] = {
    "constant": Law(share=_constant),
    "linear": Law(share=_falling(lambda span, passed: 1 - passed), takes={"to": SHARE}, reaches=True, words=_to),
    "cosine": Law(  # half a cosine (Loshchilov & Hutter 2017, "SGDR", without restarts)
        share=_falling(lambda span, passed: (1 + math.cos(math.pi * passed)) / 2),
        takes={"to": SHARE},
        reaches=True,
        words=_to,
    ),
    "restarts": Law(
        share=_restarts,
        takes={
            "every": EPOCHS,
            "times": LawParameter(lambda value: 1 <= value < math.inf, "1 or more"),
            "shrink": FACTOR,
            "to": SHARE,
        },
        needs="every",
    ),
    "poly": Law(
        share=_falling(lambda span, passed: float((1 - passed) ** span.number("power"))),
        takes={"power": ABOVE_0, "to": SHARE},
        reaches=True,
        words=_poly_words,
    ),
    "exponential": Law(share=_exponential, takes={"factor": FACTOR, "to": SHARE}),
    "inverse-sqrt": Law(share=_inverse_sqrt, takes={"scale": EPOCHS}),
    "step": Law(share=_step, takes={"factor": FACTOR}, at_milestones=True, words=_step_words),
    "factor": Law(
        share=_factor, takes={"every": EPOCHS, "factor": FACTOR, "to": SHARE}, needs="every", words=_factor_words
    ),
    "one-cycle": Law(
        share=_one_cycle,
        takes={"up": INSIDE, "from": INSIDE, "to": SHARE, "momentum": LawParameter(*BELOW_1)},
        rises=True,
    ),
    "triangular": Law(
        share=_triangular, takes={"every": EPOCHS, "from": INSIDE, "shrink": FACTOR}, needs="every", rises=True
    ),
    "plateau": Law(
        share=_constant,
        takes={
            "on": LawParameter(lambda value: value in ("top1", "loss"), "top1 or loss", str),
            "patience": WHOLE,
            "factor": FACTOR,
            "to": SHARE,
        },
        words=_plateau_words,
    ),
}
"""The laws of steadytrain by name; MXNet's, and other packages', are rows of a group (:func:`find_law`)."""


def law_names() -> tuple[str, ...]:
    """Return the names of all laws."""
    return (*LAWS, *(name for name in factories.row_names(factories.SCHEDULES) if name not in LAWS))


def find_law(name: str) -> Law | None:
    """Return a law by its name; None where there is none. Raises InputError: another package's cannot be loaded."""
    return LAWS.get(name) or factories.find_row(factories.SCHEDULES, name, Law)


def law_of(stage: Stage) -> Law:
    """Return the law of a stage that was parsed."""
    law = find_law(stage.law)
    assert law is not None, stage.law
    return law
