"""Measurements for predicting several devices: one device's passes and gradients, and ranks together.

A program of its own, so that nobody who only asks loads torch, and so that ranks can be started like any others.
Alone it measures one device; as one of several ranks, all of them together, and the first writes the answer.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from steadytrain.config import Recipe
from steadytrain.distributed.process_group import init_group
from steadytrain.distributed.world import World, world_from_environment
from steadytrain.errors import RankLostError, SteadyError
from steadytrain.intervals import quantiles
from steadytrain.training.data import random_batch
from steadytrain.training.device import prepare_device
from steadytrain.training.profile.bench import set_up, time_updates

P90 = 1.2816
"""Standard deviations from the median to the 90th percentile of normal numbers: what is rare and late counts little."""


def measure_alone(recipe: Recipe, seconds: float, images: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one device by itself.

    Args:
        seconds: how long, about.
        images: ``size``, ``channels``, ``num_classes`` and ``allow_import``, as :func:`.bench.set_up` takes them.

    Returns:
        ``model``, ``device``, ``threads``, ``size``, ``parameters``, ``notes``; seconds of an update (the median one)
        as ``forward_seconds``, ``backward_seconds`` and ``update_seconds``; ``spread``: the standard deviation of an
        update over the median, by its 90th percentile; ``gradient_bytes``: of each, in the network's order.
    """
    device, notes = prepare_device(recipe), list[str]()
    trained = set_up(recipe, device, notes, **images)
    batch = random_batch(recipe.batch_size, trained.update.image_shape, device, num_classes=images["num_classes"])
    steps, parts = time_updates(trained.update, trained.state, batch, seconds)
    middle, late = quantiles(steps, 0.5, 0.9)
    times = middle * len(steps) / sum(steps)
    forward, backward = times * parts["forward"], times * parts["backward"]
    trainable = [parameter for parameter in trained.built.module.parameters() if parameter.requires_grad]
    return {
        "model": trained.built.name,
        "device": trained.machine["device"],
        "threads": trained.machine["compute_threads"],
        "size": trained.size,
        "parameters": sum(parameter.numel() for parameter in trained.built.module.parameters()),
        "batch_size": recipe.batch_size,
        "precision": recipe.precision.name,
        "forward_seconds": forward,
        "backward_seconds": backward,
        "update_seconds": middle - forward - backward,
        "spread": (late / middle - 1) / P90,
        "gradient_bytes": [parameter.numel() * parameter.element_size() for parameter in trainable],
        "notes": notes,
    }


def measure_together(recipe: Recipe, seconds: float, images: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Measure updates of all ranks together, as :func:`measure_alone`; each has ``recipe.batch_size / ranks`` images.

    Returns:
        ``devices``, ``batch_size``, and of the median update ``step_seconds`` (on the slowest rank) and
        ``images_per_second``.
    """
    with init_group(world) as group:
        device, notes = prepare_device(recipe, world), list[str]()
        with group.all_or_none():
            trained = set_up(recipe, device, notes, **images, group=group)
        update = trained.update
        batch = random_batch(update.share.images, update.image_shape, device, num_classes=images["num_classes"])
        try:
            steps, _ = time_updates(update, trained.state, batch, seconds, group)
            slowest = max(map(float, group.all_gather_json(median(steps))))
        except RuntimeError as error:
            raise group.blame(error) from error
        return {
            "devices": world.size,
            "batch_size": recipe.batch_size,
            "step_seconds": slowest,
            "images_per_second": recipe.batch_size / slowest,
            "updates": len(steps),
            "hosts": list(dict.fromkeys(group.hosts)),
            "notes": notes,
        }


def main(argv: Sequence[str]) -> int:
    """Answer a request: the paths of two JSON files. Errors are said on standard error, by the first rank."""
    request, answer = map(Path, argv)
    world = World()
    try:
        options = json.loads(request.read_text(encoding="utf-8"))
        world = world_from_environment(os.environ)
        recipe, seconds = Recipe.from_dict(options.pop("recipe")), float(options.pop("seconds"))
        if world.size == 1:
            result = measure_alone(recipe, seconds, options)
        else:
            result = measure_together(recipe, seconds, options, world)
    except SteadyError as error:
        if world.is_first or not isinstance(error, RankLostError):
            print(f"steady: {error}", file=sys.stderr)
        return error.exit_code
    if world.is_first:
        answer.write_text(json.dumps(result), encoding="utf-8")
    return 0
