"""Remarks on weights, images and schedule that a user should know before training."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from steadytrain import models
from steadytrain.config import Recipe
from steadytrain.config.defaults import MAX_BATCH_SHARE, MIN_BATCH
from steadytrain.config.factories import is_own_model
from steadytrain.config.phases import parse_train
from steadytrain.format import count, few
from steadytrain.models import Built, Input
from steadytrain.training.data import DataSets

RARE_SHARE = 0.2
"""The share of the median class's images below which a class is called rare."""


def remarks(recipe: Recipe, built: Built, input: Input, data: DataSets, *, parts: int = 1) -> Iterator[str]:
    """Yield remarks on weights, images and schedule that a user should know before training; ``parts``: of a batch."""
    steps = recipe.batches(data.num_train).steps
    fitting = parts * max(MIN_BATCH, int(data.num_train * MAX_BATCH_SHARE) // parts)
    if recipe.batch_size > fitting and steps:
        yield (
            f"a batch of {recipe.batch_size:,} is more than a tenth of the {data.num_train:,} training images, so the"
            f" run has only {count(steps, 'update')} (--batch-size {fitting} gives more)"
        )
    if recipe.optim.class_weights == "none" and recipe.data.balance == "none":
        yield from rare_class_remark(recipe, data)
    if recipe.optim.class_weights == "balanced" and recipe.data.balance == "classes":
        yield (
            "--balance classes shows all classes equally often, and --class-weights balanced weighs rare ones as if it"
            " did not, so that they count twice: leave one of them out"
        )
    yield from scaling_remarks(recipe, built, input)
    yield from _remark_on_random_parts(recipe, built)
    if built.licence:
        yield f"licence of the weights of {built.name}: {built.licence}"
    packed = None if data.train.card is None else data.train.card.settings.get("shorter_side")
    if packed is not None and input.size is not None and input.size > packed:
        yield (
            f"the images were packed at {packed} pixels and are scaled up to {input.size}, the input size of"
            f" {built.name}: --size {input.size} (or steady pack without --shorter-side) keeps more detail"
        )


def rare_class_remark(recipe: Recipe, data: DataSets) -> Iterator[str]:
    """Describe classes with less than :data:`RARE_SHARE` of a median class's images, and what the recipe can do."""
    counts = data.class_counts
    usual = float(np.median(counts[counts > 0]))
    rare = [k for k in np.argsort(counts, kind="stable").tolist() if 0 < counts[k] < RARE_SHARE * usual]
    if rare:
        named = few([f"{data.classes[k]} {counts[k]:,}" for k in rare])
        nouns = ("class is", "classes are") if data.num_labels is None else ("label is", "labels are")
        phases, is_single = parse_train(recipe.model.train), data.num_labels is None
        remedies = (
            "--balance classes shows all classes equally often" * (is_single and not phases.probe_passes),
            "--class-weights balanced weighs their losses" * (phases.main != "probe"),
            "steady evaluate or predict with --prior uniform answers as if classes were equal" * is_single,
        )
        words = f"{count(len(rare), *nouns)} rare ({named}; the median is {usual:,.0f} training images)"
        yield f"{words}: {'; '.join(filter(None, remedies))}"


def _remark_on_random_parts(recipe: Recipe, built: Built) -> Iterator[str]:
    """Describe what the recipe keeps as it starts, where it starts without weights."""
    if recipe.model.batch_norm == "frozen" and models.lacks_statistics(built.module):
        yield (
            f"model.batch_norm='frozen' keeps the statistics that {built.name} starts with, and it starts with none"
            " (mean 0 and variance 1 in every batch norm), so that it hardly learns: use --set model.batch_norm=train,"
            " or start from weights (--weights FILE)"
        )
    keeps_body = not parse_train(recipe.model.train).trains_body
    if (keeps_body or recipe.model.freeze) and not built.weights and not is_own_model(built.name):
        kept = f"train={recipe.model.train}" if keeps_body else f"freeze={','.join(recipe.model.freeze)}"
        yield (
            f"model.{kept} keeps parts of {built.name} as they start, at random, since there are no weights: use"
            " --train full, or start from weights (--weights FILE, or steady finetune)"
        )


def scaling_remarks(recipe: Recipe, built: Built, input: Input) -> Iterator[str]:
    """Describe a mean or a standard deviation that is a guess, or not the one that the weights were trained with."""
    if built.scaling_guessed:
        mean, std = ("the recipe's" if is_set else f"{built.name}'s" for is_set in (recipe.data.mean, recipe.data.std))
        yield f"{scaling_remark(built, input, mean, std)}; data.mean and data.std set others"
    has_weights = recipe.model.pretrained or recipe.model.weights is not None
    for key in ("mean", "std"):
        chosen, trained = getattr(recipe.data, key), getattr(built.input, key)
        if not has_weights or built.scaling_guessed or chosen is None or trained is None:
            continue
        if not np.allclose(chosen, trained, atol=5e-3):
            of_recipe, of_weights = (" ".join(f"{value:g}" for value in values) for values in (chosen, trained))
            yield (
                f"data.{key} is {of_recipe}, and the weights of {built.weights} were trained with {of_weights}: their"
                f" features are worse on images that are scaled otherwise; leave data.{key} out, unless you mean it"
            )


def scaling_remark(built: Built, input: Input, mean: str, std: str) -> str:
    """Return a remark on weights without mean and standard deviation; ``mean``, ``std``: whose are used instead."""
    values = [" ".join(f"{value:g}" for value in values) for values in (input.mean or (), input.std or ())]
    return (
        f"{built.weights} does not say how its images were scaled: {mean} mean ({values[0]}) and {std} std"
        f" ({values[1]}) are used"
    )
