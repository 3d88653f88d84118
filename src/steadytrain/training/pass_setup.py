"""How updates are computed, settled before the first one: what is kept of a pass, how many threads, which code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from steadytrain.config import Recipe
from steadytrain.distributed.process_group import Group
from steadytrain.events import Compiled
from steadytrain.models import Input
from steadytrain.training.compiling import compiled
from steadytrain.training.graphed import graphed
from steadytrain.training.recompute import recomputed
from steadytrain.training.state import State
from steadytrain.training.step import Update
from steadytrain.training.threads import use_fastest_threads


@dataclass(frozen=True)
class Ready:
    """An update; ``compiled``: what there is to tell of its code; ``facts``: what bits and speed depend on."""

    update: Update
    compiled: Compiled | None = None
    facts: dict[str, Any] = field(default_factory=dict)


def ready(
    recipe: Recipe,
    update: Update,
    state: State,
    told: Input,
    group: Group | None,
    notice: Callable[[str], None],
    *,
    chooses_threads: bool,
    passed: Callable[[str], None] = lambda part: None,
) -> Ready:
    """Make an update as the recipe says, and as measuring finds best. No number of the run changes.

    Args:
        recipe: as the run has it.
        update: as :func:`.build.update` makes it.
        state: of the run.
        told: the images.
        group: the ranks that train together; None: this process is alone.
        notice: is told what the user should know.
        chooses_threads: whether the number of compute threads is still to be found.
        passed: is told which part of the start is done: ``recompute``, ``threads``, ``compile``.

    Raises:
        ModelError: what is to be computed again cannot be, or would save nothing.
    """
    facts: dict[str, Any] = {}
    code: Compiled | None = None
    if recipe.parallel.recompute:
        notice(f"computed again in each backward pass: {recomputed(update, state, told, recipe.model.name)}")
        passed("recompute")
    with update.clock.within("warmup"):
        if chooses_threads:
            facts |= use_fastest_threads(recipe, update, state, told, notice)
            passed("threads")
        if recipe.precision.compile != "none":
            update, code = compiled(recipe, update, state, told, group, notice)
            facts |= {} if code is None else {"compile": code.mode}
            passed("compile")
    return Ready(graphed(recipe, update, state, group, notice), code, facts)
