"""``--explain``: what a command line would train, and how."""

from __future__ import annotations

import json as json_module
from collections.abc import Iterator
from typing import TYPE_CHECKING

from steadytrain.cli.lines import clean
from steadytrain.config import Recipe

if TYPE_CHECKING:
    from steadytrain.training.profile.explain import Explained


def explain_recipe(recipe: Recipe, *, allow_import: bool, json: bool) -> int:
    """Print what the recipe comes down to; nothing is trained, and no run is made."""
    from steadytrain.training.profile.explain import explain

    told = explain(recipe, allow_import=allow_import)
    if json:
        print(json_module.dumps({"recipe": recipe.to_dict(), **vars(told)}, indent=2, default=vars))
    else:
        print("\n".join(_lines(recipe, told)))
    return 0


def _lines(recipe: Recipe, told: Explained) -> Iterator[str]:
    optim, precision = recipe.optim, recipe.precision
    yield f"{'recipe':<13}{told.digest}"
    yield f"{'data':<13}{told.num_train:,} images to train on, {told.num_val:,} to evaluate, {told.classes:,} classes"
    shape = f"{told.channels}x{told.size}x{told.size}"
    some = "all of them trained" if told.trained == told.parameters else f"{told.trained:,} trained"
    yield f"{'model':<13}{clean(told.model)}: {told.parameters:,} parameters, {some}; images {shape}"
    parts = "" if optim.accumulate == 1 else f" in {optim.accumulate} micro-batches"
    yield f"{'updates':<13}{told.steps:,} of {recipe.batch_size}{parts}, {told.steps_per_epoch:.4g} an epoch"
    peak = optim.scaled_lr(recipe.batch_size)
    yield f"{'optimizer':<13}{optim.name}, peak learning rate {peak:g}, weight decay {optim.weight_decay:g}"
    layout = precision.layout.replace("-", " ")
    code = "" if precision.compile == "none" else f", compiled ({precision.compile})"
    graph = ", as one graph an update" if recipe.parallel.graph else ""
    yield f"{'computed':<13}{precision.name} on {clean(told.device)}, {layout}{code}{graph}"
    kept = ", ".join(f"{numbers} {count:,}" for numbers, count in told.stored.items())
    twins = f"; {told.masters:,} parameters with fp32 twins for the optimizer" if told.masters else ""
    yield f"{'kept as':<13}{kept}{twins}"
    for numbers, counts in sorted(told.operations.items(), key=lambda pair: -sum(pair[1].values())):
        each = ", ".join(f"{name} x {n}" for name, n in sorted(counts.items(), key=lambda pair: -pair[1]))
        yield f"{'in ' + numbers:<13}{each}"
    if told.conversions:
        yield f"{'conversions':<13}{told.conversions} in a forward pass"
    if told.recomputed is not None:
        yield f"{'recomputed':<13}{clean(str(told.recomputed))}"
    for note in told.notes:
        yield f"{'note':<13}{clean(note)}"
