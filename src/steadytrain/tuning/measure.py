"""Measure a recipe on the user's machine. A child process calls this, once: a measurement may crash it.

Model, updates and loader are built by the functions that build a run's; the learning rate is 0, and nothing is saved.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any

import torch

from steadytrain import __version__
from steadytrain.config import Recipe
from steadytrain.data.loader import default_threads
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.world import World
from steadytrain.events import Compiled
from steadytrain.machine import facts
from steadytrain.machine.platform import peak_resident_bytes
from steadytrain.models import Built, Input
from steadytrain.training import build
from steadytrain.training.compute.compile import compile_update
from steadytrain.training.compute.recompute import recompute_parts
from steadytrain.training.compute.timing import images_per_second, use_fastest_threads, wait_for
from steadytrain.training.data import DataSets, DeviceBatch, load, open_data, random_batch
from steadytrain.training.device import ALONE, prepare_device, set_up_machine
from steadytrain.training.precision import cpu_multiplies
from steadytrain.training.profile.probe import settle
from steadytrain.training.state import State
from steadytrain.training.step import Update

ROUNDS = 3
"""Rounds of a measurement. The result is their median, so that a disturbance of one of them does not count."""
LEAST_BATCHES = 4
"""The fewest batches in a round of the loader alone, which makes several at a time."""


def measure(
    what: str, recipe: Recipe, *, seconds: float, settle_seconds: float, world: World = ALONE
) -> dict[str, Any]:
    """Measure one property of a recipe; return the figures as plain data for JSON.

    Args:
        what: ``facts`` of data, model and device; ``updates`` alone, on random images in memory; the loader alone
            (``loading``); ``both`` together, as in a run.
        seconds: about how long to measure; at least one update, or some batches, are measured.
        settle_seconds: the longest wait for the loader to fill its cache of decoded images before.
        world: the rank that this process measures for: its device, and its part of the machine's cores and memory.

    Raises:
        SteadyError: a run of the recipe would fail.
    """
    with _open_parts(recipe, world, trains=what in ("updates", "both")) as parts:
        if what == "facts":
            return _facts(parts)
        return _updates(parts, seconds) if what == "updates" else _loading(parts, seconds, settle_seconds)


@dataclass
class _RunParts:
    """The parts of a run of the recipe; ``trained`` and ``compiled`` only if updates are measured."""

    recipe: Recipe
    world: World
    device: torch.device
    machine: Mapping[str, Any]
    data: DataSets
    built: Built
    input: Input
    trained: tuple[State, Update] | None = None
    compiled: Compiled | None = None


@contextmanager
def _open_parts(recipe: Recipe, world: World, *, trains: bool) -> Iterator[_RunParts]:
    device = prepare_device(recipe, world)
    with closing(open_data(recipe.data, recipe.model, seed=recipe.seed)) as data:
        machine = set_up_machine(recipe, device, None, _drop, ranks=world.size, sharing=world.local_size)
        torch.manual_seed(recipe.seed)
        built, input = build.model(recipe, data, allow_import="name" not in recipe.model.from_file)
        parts = _RunParts(recipe, world, device, machine, data, built, input)
        if trains:
            state = build.state(recipe, built, Engine(device), num_train=data.num_train, input=input)
            update = build.update(recipe, built, input, state, data=data, loss=build.loss(recipe, data, device))
            recompute_parts(recipe, update, state, _drop)
            use_fastest_threads(recipe, update, state, _drop)
            update, parts.compiled = compile_update(recipe, update, state, None, _drop)
            parts.trained = state, update
        yield parts


def _drop(message: str) -> None:
    """Drop a message: a run of the recipe will print it."""


def _facts(parts: _RunParts) -> dict[str, Any]:
    data, device, sharing = parts.data, parts.device, parts.world.local_size
    memory = facts.memory_bytes() // sharing
    if device.type == "cuda":  # what the driver and other processes leave
        memory = int(torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device))
    return {
        "data": [data.train.digest, data.num_train, data.num_val, len(data.classes)],
        "num_train": data.num_train,
        "size": parts.input.size,
        "largest_side": data.train.largest_side,
        "device": parts.machine["device"],
        "device_type": device.type,
        "memory_bytes": memory,
        "cores": max(1, facts.cores() // sharing),
        "usual_threads": default_threads(pin=device.type == "cuda", sharing=sharing),
        "precisions": _precisions(device),
        "versions": {"steadytrain": __version__, "torch": torch.__version__, "timm": version("timm")},
    }


def _precisions(device: torch.device) -> list[str]:
    """Return the number formats that the device multiplies natively, the most exact first."""
    if device.type == "cuda":
        return ["tf32", "bf16"] if torch.cuda.get_device_capability(device) >= (8, 0) else ["fp32", "fp16"]
    return ["fp32", *(["bf16"] if device.type == "cpu" and cpu_multiplies("bf16") else [])]


def _updates(parts: _RunParts, seconds: float) -> dict[str, Any]:
    assert parts.trained is not None
    batch = random_batch(
        parts.recipe.batch_size,
        parts.trained[1].image_shape,
        parts.device,
        num_classes=len(parts.data.classes),
        num_labels=parts.data.num_labels,
    )
    compiled = parts.compiled
    return {
        **_train(parts, lambda: batch, seconds),
        "compute_threads": torch.get_num_threads() if parts.device.type == "cpu" else None,
        "compile_seconds": None if compiled is None else compiled.seconds,
        "compile_speedup": None if compiled is None else compiled.eager_seconds / compiled.compiled_seconds,
    }


def _loading(parts: _RunParts, seconds: float, settle_seconds: float) -> dict[str, Any]:
    """Measure the loader: alone, or with updates where the parts have those."""
    recipe, threads = parts.recipe, parts.recipe.parallel.threads
    if threads is None:
        threads = default_threads(pin=parts.device.type == "cuda", sharing=parts.world.local_size)
    feeding: dict[str, Any] = {"batch_size": recipe.batch_size, "threads": threads, "on_bad": lambda bad: None}
    with build.training_feed(recipe, parts.data, parts.input, parts.device, **feeding) as loader:
        batches = load(loader, parts.device)
        if parts.trained is None:
            next(batches)
        else:
            state, update = parts.trained
            update(state, next(batches), 0.0)
        settle(loader, batches, _drop, seconds=settle_seconds)
        if parts.trained is not None:
            return _train(parts, lambda: next(batches), seconds)
        work: Callable[[], int] = lambda: len(next(batches).labels)  # noqa: E731
        rate = partial(images_per_second, parts.device, work, seconds=seconds / ROUNDS, least=LEAST_BATCHES)
        return {"images_per_second": median(rate()[0] for _ in range(ROUNDS))}


def _train(parts: _RunParts, next_batch: Callable[[], DeviceBatch], seconds: float) -> dict[str, Any]:
    """Measure updates, after one that is not counted, in fewer rounds where they take long.

    Returns:
        ``images_per_second``; ``memory_bytes``: the peak, that of evaluating a batch included.
    """
    assert parts.trained is not None
    (state, update), device, rates = parts.trained, parts.device, list[float]()

    def train() -> int:
        batch = next_batch()
        update(state, batch, 0.0)
        return len(batch.labels)

    train()
    wait_for(device)
    began = time.perf_counter()
    while len(rates) < ROUNDS and (not rates or time.perf_counter() - began < 2 * seconds):
        rates.append(images_per_second(device, train, seconds=seconds / ROUNDS, least=1)[0])
    module = state.module if state.ema is None else state.ema.module
    module.eval()
    with torch.no_grad(), state.policy.autocast():
        module(state.policy.images(next_batch().images, parts.input.mean, parts.input.std))
    wait_for(device)
    on_gpu = device.type == "cuda"
    return {
        "images_per_second": median(rates),
        "memory_bytes": int(torch.cuda.max_memory_reserved(device)) if on_gpu else peak_resident_bytes(),
    }
