"""Training speed of a network by itself: the run's own updates on random images that are already in memory.

speed = measure(Recipe(data=Data(train="drawn"), model=Model("resnet20"), batch_size=128), size=32, num_classes=10)
speed.images_per_second, speed.of_peak

Nothing is read, logged or saved, so this is the most that a run with such a recipe can reach on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, starmap
from typing import Any

import torch

from steadytrain import models
from steadytrain.config import Recipe
from steadytrain.distributed.process_group import Group
from steadytrain.distributed.world import World
from steadytrain.intervals import quantiles
from steadytrain.machine.platform import peak_resident_bytes
from steadytrain.models.build import Built
from steadytrain.training import build
from steadytrain.training.clock import COMPUTE
from steadytrain.training.compute.compile import compile_update, record_update
from steadytrain.training.compute.recompute import recompute_parts
from steadytrain.training.compute.timing import peak_flops, wait_for
from steadytrain.training.data import DeviceBatch, random_batch
from steadytrain.training.device import prepare_device, seconds_between, set_up_machine, tick
from steadytrain.training.profile.step_cost import Operations
from steadytrain.training.state import State, preserve_process
from steadytrain.training.step import Update, share_of

WARM_UPDATES = 3
LEAST_UPDATES = 5
COUNTED = 2
"""Images of which the multiplications are counted: as many for each, whatever the batch."""


@dataclass(frozen=True, kw_only=True)
class UpdateSpeed:
    """The speed of a recipe's updates.

    Args:
        device: as it calls itself.
        threads: that compute on a CPU.
        compile: the recipe's mode; ``none`` where the network cannot be compiled.
        updates: that were timed.
        images_per_second: of all of them.
        step_seconds: ``p50``, ``p90`` and ``p99`` of an update.
        parts: mean seconds of an update: ``forward``, ``backward``, ``optimizer``, ``update`` (of a graph, which has no
            parts), and ``host`` for what is left.
        flops_per_second: of convolutions and matrix products, three times those of a forward pass; None where the
            network's operations cannot be counted.
        peak_flops: the same of a large matrix product here, in these numbers.
        memory_bytes: at most: on a GPU of torch's tensors, else of the process.
        compile_seconds: until compiled code ran at its own speed; None without any.
        breaks: where Python comes between compiled pieces.
    """

    model: str
    parameters: int
    size: int
    channels: int
    device: str
    threads: int
    precision: str
    layout: str
    compile: str
    graph: bool
    recompute: bool
    batch_size: int
    accumulate: int
    updates: int
    images_per_second: float
    step_seconds: Mapping[str, float]
    parts: Mapping[str, float]
    flops_per_second: float | None
    peak_flops: float
    memory_bytes: int
    compile_seconds: float | None = None
    breaks: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def of_peak(self) -> float | None:
        """The share of ``peak_flops`` that is reached: on a GPU, its model FLOP/s utilisation (MFU)."""
        return None if self.flops_per_second is None else self.flops_per_second / self.peak_flops


@dataclass(frozen=True)
class BenchSetup:
    """A network that can be updated, on drawn images: what :func:`set_up` makes."""

    built: Built
    size: int
    state: State
    update: Update
    machine: Mapping[str, Any]


def set_up(
    recipe: Recipe,
    device: torch.device,
    notes: list[str],
    *,
    size: int | None = None,
    channels: int = 3,
    num_classes: int = 1000,
    allow_import: bool = False,
    group: Group | None = None,
) -> BenchSetup:
    """Make all that the updates of a recipe need; threads and random state of this process change.

    Args:
        recipe: of its data nothing is used.
        device: of :func:`.build.prepare_device`.
        notes: gets what a user should know.
        size, channels: of the drawn images; None: the model's own size, or 224.
        num_classes: of the network.
        allow_import: import the recipe's ``pkg.mod:factory`` model.
        group: the ranks that share the batch; None: this process is alone.
    """
    world, sharing = (World(), 1) if group is None else (group.world, group.sharing)
    machine = set_up_machine(recipe, device, None, notes.append, ranks=world.size, sharing=sharing)
    torch.manual_seed(recipe.seed)
    built = models.build(recipe.model, num_classes=num_classes, channels=channels, size=size, allow_import=allow_import)
    size = size or built.input.size or 224
    default = built.input.filled(size, (0.5,) * channels, (0.25,) * channels)
    input = replace(default, size=size, channels=channels)
    state = build.state(recipe, built, build.engine(recipe, device, group), input=input)
    notes += [*built.notes, *state.policy.notes]
    share = share_of(world, recipe.batch_size, recipe.optim.accumulate)
    update = build.update(recipe, built, input, state, build.clock(device, time.perf_counter()), share)
    return BenchSetup(built, size, state, update, machine)


def measure(
    recipe: Recipe,
    *,
    size: int | None = None,
    channels: int = 3,
    num_classes: int = 1000,
    seconds: float = 3.0,
    allow_import: bool = False,
) -> UpdateSpeed:
    """Time updates as a run with this recipe makes them, with a learning rate of 0.

    Args:
        recipe: of its data nothing is used.
        size, channels: of the drawn images; None: the model's own size, or 224.
        num_classes: of the network, and of the drawn labels.
        seconds: how long, at least; never less than :data:`LEAST_UPDATES` updates.
        allow_import: import the recipe's ``pkg.mod:factory`` model.

    Raises:
        ModelError: the network does not take such images.
        RecipeError: the device is not there, or does not have such numbers.
    """
    device = prepare_device(recipe)
    notes: list[str] = []
    with preserve_process(device):
        trained = set_up(
            recipe, device, notes, size=size, channels=channels, num_classes=num_classes, allow_import=allow_import
        )
        built, state, update, machine = trained.built, trained.state, trained.update, trained.machine
        flops = None
        try:
            few = random_batch(COUNTED, update.image_shape, device)
            with torch.no_grad(), Operations() as seen:
                update.objective(state.module, few.images, few.labels)
            flops = seen.flops / COUNTED
        except Exception as error:  # noqa: BLE001 - a network of the user's own may raise anything
            notes.append(f"its multiplications cannot be counted ({error})")
        recompute_parts(recipe, update, state, notes.append)
        update, compiled = compile_update(recipe, update, state, None, notes.append)
        update = record_update(recipe, update, state, None, notes.append)
        batch = random_batch(recipe.batch_size, update.image_shape, device, num_classes=num_classes)
        steps, parts = time_updates(update, state, batch, seconds)
        percentiles = quantiles(steps, 0.5, 0.9, 0.99)
        rate = recipe.batch_size * len(steps) / sum(steps)
        on_gpu = device.type == "cuda"
        return UpdateSpeed(
            model=built.name,
            parameters=sum(p.numel() for p in built.module.parameters()),
            size=trained.size,
            channels=channels,
            device=machine["device"],
            threads=machine["compute_threads"],
            precision=recipe.precision.name,
            layout=recipe.precision.layout,
            compile="none" if compiled is None else compiled.mode,
            graph=recipe.parallel.graph,
            recompute=recipe.parallel.recompute,
            batch_size=recipe.batch_size,
            accumulate=recipe.optim.accumulate,
            updates=len(steps),
            images_per_second=rate,
            step_seconds=dict(zip(("p50", "p90", "p99"), percentiles, strict=True)),
            parts=parts,
            flops_per_second=None if flops is None else 3 * flops * rate,
            peak_flops=peak_flops(device, recipe.precision.products),
            memory_bytes=int(torch.cuda.max_memory_allocated(device)) if on_gpu else peak_resident_bytes(),
            compile_seconds=None if compiled is None else compiled.seconds,
            breaks=() if compiled is None else tuple(compiled.breaks),
            notes=tuple(notes),
        )


def time_updates(
    update: Update, state: State, batch: DeviceBatch, seconds: float
) -> tuple[list[float], dict[str, float]]:
    """Time updates by a batch, with a learning rate of 0, for so long and at least :data:`LEAST_UPDATES` of them.

    Returns:
        Seconds of each update, and the mean ones of its parts.
    """
    device, clock = state.engine.device, update.clock
    for _ in range(WARM_UPDATES):
        update(state, batch, 0.0)
    wait_for(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    clock.settle()
    before = dict(clock.seconds())

    ticks = [tick(device)]
    end = time.perf_counter() + seconds
    while len(ticks) <= LEAST_UPDATES or time.perf_counter() < end:
        update(state, batch, 0.0)
        ticks.append(tick(device))
        if device.type == "cuda" and len(ticks) % 16 == 0:
            ticks[-1].synchronize()  # else the host would ask for minutes of work before the time is up
    clock.settle()
    wait_for(device)
    after = clock.seconds()
    steps = list(starmap(seconds_between, pairwise(ticks)))
    parts = {name: (after.get(name, 0.0) - before.get(name, 0.0)) / len(steps) for name in COMPUTE}
    if not parts["update"]:
        del parts["update"]
    return steps, parts | {"host": max(0.0, sum(steps) / len(steps) - sum(parts.values()))}
