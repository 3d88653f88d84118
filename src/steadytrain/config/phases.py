"""The words of ``model.train``: what is trained, and what comes before it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from steadytrain.config.words import number, refused
from steadytrain.errors import RecipeError, did_you_mean
from steadytrain.format import whole_number

MAIN = ("full", "head", "discriminative", "gradual")
"""The parts of the network that a run trains. ``gradual`` has the learning rates of ``discriminative``."""

FORMS = "full, head, discriminative, gradual[:EPOCHS], probe[:PASSES], probe[:PASSES]+MAIN or head:EPOCHS+MAIN"


@dataclass(frozen=True)
class TrainPlan:
    """The parsed ``model.train``.

    Args:
        main: one of :data:`MAIN`; ``probe`` where the classifier is fitted and nothing is updated.
        probe_passes: passes over the training images whose features the classifier is fitted to; 0: it is not fitted.
        head_epochs: epochs in which the classifier alone is trained, before ``main``.
        gradual_epochs: epochs between two layers that ``gradual`` begins to train; None: it takes half of the run for
            all of them.

    >>> parse_train("probe+discriminative").probe_passes, parse_train("head:1+full").head_epochs
    (1, 1.0)
    """

    main: str
    probe_passes: int = 0
    head_epochs: float = 0.0
    gradual_epochs: float | None = None

    @property
    def trains_body(self) -> bool:
        """Return whether anything but the classifier is trained."""
        return self.main not in ("head", "probe")

    @property
    def has_phases(self) -> bool:
        """Return whether some parameters are trained only from a later update on."""
        return self.head_epochs > 0 or self.main == "gradual"

    @property
    def words(self) -> str:
        """Describe it for the head of a run, without the factor between two layers.

        >>> parse_train("head:1+full").words, parse_train("probe+full").words
        ('the classifier alone for 1 epoch, then all parameters', 'probe, then all')
        """
        main = {"head": "the classifier alone", "probe": "the classifier alone, without updates"}.get(
            self.main, "all parameters"
        )
        if self.main == "gradual":
            each = self.gradual_epochs
            pace = "over half of the run" if each is None else f"each {each:g} epoch{'s' * (each != 1)}"
            main = f"the classifier, then one layer more {pace}, from the top down"
        if self.head_epochs:
            main = f"the classifier alone for {self.head_epochs:g} epoch{'s' * (self.head_epochs != 1)}, then {main}"
        passes = "" if self.probe_passes == 1 else f" of {self.probe_passes} passes"
        if self.main == "probe":
            main = f"{main}: a probe{passes}"
        elif self.probe_passes:
            main = f"probe{passes}, then {'all' if main == 'all parameters' else main}"  # a line of a run's head
        return main


def parse_train(text: str) -> TrainPlan:
    """Parse ``model.train``. Raises RecipeError, with all forms, for anything else.

    >>> parse_train("gradual:0.5")
    TrainPlan(main='gradual', probe_passes=0, head_epochs=0.0, gradual_epochs=0.5)
    """
    first, plus, main = text.partition("+")
    if not plus:
        name, colon, value = first.partition(":")
        if name == "probe":
            return TrainPlan("probe", probe_passes=_passes(text, value) if colon else 1)
        return _main(text, first)
    name, colon, value = first.partition(":")
    plan = _main(text, main)
    if name == "probe":
        return TrainPlan(plan.main, _passes(text, value) if colon else 1, gradual_epochs=plan.gradual_epochs)
    if name == "head" and plan.trains_body:
        return TrainPlan(plan.main, head_epochs=_epochs(text, value), gradual_epochs=plan.gradual_epochs)
    raise _refused(text)


def _main(text: str, main: str) -> TrainPlan:
    name, colon, value = main.partition(":")
    if name not in MAIN or (colon and name != "gradual"):
        raise _refused(text)
    return TrainPlan(name, gradual_epochs=_epochs(text, value) if colon else None)


def _passes(text: str, count: str) -> int:
    if not 1 <= (whole_number(count) or 0) <= 100:
        raise refused("model.train", text, "probe:PASSES takes 1 to 100 passes, such as probe:3")
    return int(count)


def _epochs(text: str, value: str) -> float:
    epochs = number(value)
    if not 0 < epochs < math.inf:
        raise refused("model.train", text, "it takes epochs above 0, such as head:1+full or gradual:0.5")
    return epochs


def _refused(text: str) -> RecipeError:
    near = did_you_mean(text, (*MAIN, "probe", "probe+discriminative", "head:1+full"))
    return refused("model.train", text, f"it must be {FORMS}, where MAIN is {', '.join(MAIN)}.{near}")
