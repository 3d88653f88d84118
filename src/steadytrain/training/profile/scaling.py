"""Measurements for predicting several devices: one device's passes, the order of its gradients, ranks together.

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

import torch

from steadytrain.config import Recipe
from steadytrain.distributed.process_group import init_group
from steadytrain.distributed.world import World, world_from_environment
from steadytrain.errors import RankLostError, SteadyError
from steadytrain.intervals import quantiles
from steadytrain.training.compute.timing import Pass, wait_for
from steadytrain.training.data import DeviceBatch, random_batch
from steadytrain.training.device import prepare_device, seconds_between, tick
from steadytrain.training.profile.bench import BenchSetup, set_up, time_updates

SMALLER = 4
"""The other batch is a quarter of the first: two sizes tell which seconds do not shrink with the batch."""
P90 = 1.2816
"""Standard deviations from the median to the 90th percentile of normal numbers: what is rare and late counts little."""
ROUNDS = 3
"""Passes in which the order of gradients is watched."""


def measure_alone(recipe: Recipe, request: Mapping[str, Any]) -> dict[str, Any]:
    """Measure one device by itself: its passes with the recipe's batch and with a smaller one, and its gradients.

    Args:
        request: ``size``, ``channels``, ``num_classes`` and ``seconds``, as :func:`.bench.measure` takes them.

    Returns:
        ``model``, ``device``, ``threads``, ``size``, ``parameters``, ``notes``; seconds of an update (the median one)
        as ``forward_seconds``, ``backward_seconds`` and ``update_seconds``; ``fixed_seconds`` of the passes;
        ``spread``: the standard deviation of an update over the median, by its 90th percentile; ``gradients``: bytes
        and readiness of each, in the order in which they are ready.
    """
    device = prepare_device(recipe)
    notes: list[str] = []
    trained = _set_up(recipe, device, notes, request)
    batch = random_batch(recipe.batch_size, trained.update.image_shape, device, num_classes=int(request["num_classes"]))
    forward, backward, update, spread = _parts(trained, batch, float(request["seconds"]) / 2)
    few = max(2, recipe.batch_size // SMALLER)  # batch norms refuse a single value a channel
    fixed = 0.0
    if few < recipe.batch_size:
        smaller = DeviceBatch(batch.images[:few], batch.labels[:few], 0.0)
        other = sum(_parts(trained, smaller, float(request["seconds"]) / 4)[:2])
        # Where the straight line through two sizes meets zero images.
        fixed = (other * recipe.batch_size - (forward + backward) * few) / (recipe.batch_size - few)
        fixed = min(max(fixed, 0.0), forward + backward)
    else:
        notes.append(f"with {recipe.batch_size} images a device, nothing tells what does not shrink with the batch")
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
        "update_seconds": update,
        "fixed_seconds": fixed,
        "spread": spread,
        "gradients": gradient_times(trained, batch),
        "notes": notes,
    }


def measure_together(recipe: Recipe, request: Mapping[str, Any], world: World) -> dict[str, Any]:
    """Measure updates of all ranks together; each has ``recipe.batch_size / ranks`` images.

    Returns:
        ``devices``, ``batch_size``, and of the median update ``step_seconds`` (on the slowest rank) and
        ``images_per_second``.
    """
    with init_group(world) as group:
        device = prepare_device(recipe, world)
        notes: list[str] = []
        with group.all_or_none():
            trained = _set_up(recipe, device, notes, request, group=group)
        images = trained.update.share.images
        batch = random_batch(images, trained.update.image_shape, device, num_classes=int(request["num_classes"]))
        try:
            steps, _ = time_updates(trained.update, trained.state, batch, float(request["seconds"]), group)
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


def gradient_times(trained: BenchSetup, batch: DeviceBatch) -> list[tuple[int, float]]:
    """Watch when each parameter's gradient is ready: its bytes, and the share of the backward pass that is over then.

    In the order in which they are ready; medians over some passes.
    """
    state, device = trained.state, trained.state.engine.device
    named = [parameter for parameter in state.module.parameters() if parameter.requires_grad]
    ready: dict[int, list[float]] = {number: [] for number in range(len(named))}
    once = Pass(trained.update.call, trained.update.forward, batch, state.engine)
    for _ in range(ROUNDS):
        ticks: list[tuple[int, Any]] = []

        def note(number: int, ticks: list[tuple[int, Any]] = ticks) -> None:
            ticks.append((number, tick(device)))

        handles = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                lambda _, number=number, note=note: note(number)
            )
            for number, parameter in enumerate(named)
        ]
        try:
            once.module.zero_grad(set_to_none=True)
            images, labels = next(once.parts)
            with state.engine.micro_batch(last=False):  # nothing is exchanged
                loss, _ = once.forward(once.module, images, labels)
                began = tick(device)
                state.engine.backward(loss, last=False)
                ended = tick(device)
            wait_for(device)
        finally:
            for handle in handles:
                handle.remove()
        backward_seconds = seconds_between(began, ended)
        for number, reached in ticks:
            share = seconds_between(began, reached) / backward_seconds if backward_seconds > 0 else 1.0
            ready[number].append(min(1.0, share))
    seen = [(named[number], median(shares)) for number, shares in ready.items() if shares]
    seen.sort(key=lambda pair: pair[1])
    return [(parameter.numel() * parameter.element_size(), share) for parameter, share in seen]


def _set_up(
    recipe: Recipe, device: torch.device, notes: list[str], request: Mapping[str, Any], **options: Any
) -> BenchSetup:
    return set_up(
        recipe,
        device,
        notes,
        size=request["size"],
        channels=int(request["channels"]),
        num_classes=int(request["num_classes"]),
        allow_import=bool(request["allow_import"]),
        **options,
    )


def _parts(trained: BenchSetup, batch: DeviceBatch, seconds: float) -> tuple[float, float, float, float]:
    """Seconds of the median update: forward, backward, all else; and their spread."""
    steps, parts = time_updates(trained.update, trained.state, batch, seconds)
    middle, late = quantiles(steps, 0.5, 0.9)
    times = middle * len(steps) / sum(steps)
    forward, backward = times * parts["forward"], times * parts["backward"]
    return forward, backward, middle - forward - backward, (late / middle - 1) / P90


def main(argv: Sequence[str]) -> int:
    """Answer a request: the paths of two JSON files. Errors are said on standard error, by the first rank."""
    request, answer = map(Path, argv)
    world = World()
    try:
        options = json.loads(request.read_text(encoding="utf-8"))
        world = world_from_environment(os.environ)
        recipe = Recipe.from_dict(options["recipe"])
        result = measure_alone(recipe, options) if world.size == 1 else measure_together(recipe, options, world)
    except SteadyError as error:
        if world.is_first or not isinstance(error, RankLostError):
            print(f"steady: {error}", file=sys.stderr)
        return error.exit_code
    if world.is_first:
        answer.write_text(json.dumps(result), encoding="utf-8")
    return 0
