"""The parts of a run, each made from the recipe and what the data and the machine say."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch

from steadytrain import devices, models, optim, precision, process
from steadytrain.engines import Single
from steadytrain.errors import RecipeError
from steadytrain.feed import SMALL, BadImage, Blocks, Choice, Cut, Feed, cut_for
from steadytrain.models import Built, Input
from steadytrain.recipe import Recipe
from steadytrain.training.clock import Clock
from steadytrain.training.data import DataSets
from steadytrain.training.state import Cursor, Meters, State
from steadytrain.training.step import Update
from steadytrain.training.timeline import DeviceClock

DEFAULT_MEAN, DEFAULT_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet: for files without a card, as the field does."""


def num_steps(recipe: Recipe, num_train: int) -> int:
    """Updates in the whole run: enough for every epoch of the budget to be complete."""
    if recipe.budget.steps is not None:
        return recipe.budget.steps
    samples = round((recipe.budget.epochs or 0) * num_train)
    return max(1, -(-samples // recipe.batch_size))


def choose_device(name: str) -> torch.device:
    """``auto`` is the first GPU if torch sees one, else the CPU. Raises RecipeError for what is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RecipeError(f"parallel.device is {name!r}; it must be auto, cpu, cuda or cuda:<number>") from None
    if device.type not in ("cpu", "cuda"):
        raise RecipeError(f"parallel.device is {name!r}; it must be auto, cpu, cuda or cuda:<number>")
    if device.type == "cuda":
        seen = torch.cuda.device_count()
        if (device.index or 0) >= seen:
            raise RecipeError(
                f"parallel.device is {name!r} but torch {torch.__version__} sees {seen} GPUs: use --device cpu,"
                " or mend the driver"
            )
        return torch.device("cuda", device.index or 0)
    return device


def set_up_machine(
    recipe: Recipe, device: torch.device, before: dict[str, Any] | None, notice: Callable[[str], None]
) -> dict[str, Any]:
    """Threads and allocator for this process; returns what bits and speed depend on.

    A resumed run gets the number of compute threads that it had, unless the recipe says otherwise; ``notice`` is
    told where the bits may differ from an uninterrupted run's.
    """
    if device.type == "cpu":
        process.keep_memory(devices.memory_bytes())
    threads = recipe.parallel.compute_threads or (before or {}).get("compute_threads") or _own_threads()
    torch.set_num_threads(threads)
    machine = {
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "compute_threads": threads,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "cpu": devices.cpu_model(),
        "cores": devices.cores(),
        "memory_bytes": devices.memory_bytes(),
        "precision": recipe.precision.name,
    }
    for name in ("device", "compute_threads", "isa", "torch"):
        if before is not None and before.get(name) != machine[name]:
            notice(f"{name} was {before.get(name)} and is {machine[name]}: from here on the bits may differ")
    return machine


def _own_threads() -> int:
    """What OMP_NUM_THREADS asks for, else one for each core; never more than that: they would wait for each other."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return min(int(asked), devices.cores()) if asked.isdigit() and int(asked) else devices.cores()


def model(recipe: Recipe, data: DataSets, *, allow_import: bool) -> tuple[Built, Input]:
    """The model for the data's classes, and the size, mean and so on that its images are to have."""
    has_weights = recipe.model.pretrained or recipe.model.weights is not None
    channels = 3 if has_weights and recipe.model.name not in models.BUILT_IN else data.train.channels
    size = recipe.data.size
    if size is None and not has_weights and data.train.largest_side <= SMALL:
        size = data.train.largest_side
    built = models.build(
        recipe.model, num_classes=len(data.classes), channels=channels, size=size, allow_import=allow_import
    )
    return built, resolve_input(recipe, built.input, data, channels, size, has_weights=has_weights)


def resolve_input(
    recipe: Recipe, told: Input, data: DataSets, channels: int, size: int | None, *, has_weights: bool
) -> Input:
    """What the recipe says, else the weights' own configuration, else what the data measure."""
    card = data.train.card
    wanted = recipe.data
    mean, std = (told.mean, told.std) if has_weights else (None, None)
    if mean is None and card is not None and len(card.mean) == channels:
        mean, std = card.mean, tuple(max(s, 1e-3) for s in card.std)
    size = size or told.size or 224
    crop = wanted.crop or (1.0 if size <= SMALL else told.crop or 0.875)
    return replace(
        told,
        size=size,
        mean=wanted.mean or mean or DEFAULT_MEAN[:channels],
        std=wanted.std or std or DEFAULT_STD[:channels],
        crop=crop,
        interpolation=wanted.interpolation or told.interpolation or "bilinear",
        channels=channels,
    )


def remarks(recipe: Recipe, built: Built, told: Input, data: DataSets) -> Iterator[str]:
    """What a user should know of weights, images and schedule before hours are spent on them."""
    epochs = num_steps(recipe, data.num_train) * recipe.batch_size / data.num_train
    if recipe.optim.warmup_epochs > epochs:
        yield (
            f"the warm-up of {recipe.optim.warmup_epochs:g} epochs is longer than the run of {epochs:.3g}: the learning"
            " rate never comes to its peak (--set optim.warmup_epochs=... shortens it)"
        )
    if built.licence:
        yield f"licence of the weights of {built.name}: {built.licence}"
    packed = None if data.train.card is None else data.train.card.settings.get("shorter_side")
    if packed is not None and told.size is not None and told.size > packed:
        yield (
            f"the images were packed at {packed} pixels and are enlarged to {told.size}, which {built.name} sees:"
            f" --size {told.size} (or steady pack without --shorter-side) keeps more of them"
        )


def clock(device: torch.device, began: float) -> Clock:
    """What gives each second to a bucket; where the device works by itself, by the device's own events."""
    if device.type != "cuda":
        return Clock(began)
    return DeviceClock(began, lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]


def state(recipe: Recipe, built: Built, device: torch.device) -> State:
    """Model on its device, optimizer, average, meters: at step 0."""
    policy = precision.policy(recipe.precision, device)
    module = policy.prepare(built.module)
    groups = models.parameter_groups(
        built, train=recipe.model.train, decay=recipe.model.decay, weight_decay=recipe.optim.weight_decay
    )
    optimizer = optim.build(recipe.optim, groups, lr=recipe.optim.scaled_lr(recipe.batch_size), device=device)
    ema = None if recipe.optim.ema is None else precision.ema(module, recipe.optim.ema)
    models.set_train_mode(built, recipe.model.train, batch_norm=recipe.model.batch_norm)
    return State(module, optimizer, policy, Single(device), ema, Meters(device), Cursor())


def update(recipe: Recipe, built: Built, told: Input, state: State, clock: Clock) -> Update:
    """The function of one update."""
    return Update(
        call=state.engine.prepare(state.module),
        parameters=tuple(p for p in built.module.parameters() if p.requires_grad),
        input=told,
        label_smoothing=recipe.optim.label_smoothing,
        clip_norm=recipe.optim.clip_norm,
        accumulate=recipe.optim.accumulate,
        clock=clock,
    )


def feeds(
    recipe: Recipe,
    data: DataSets,
    told: Input,
    cursor: Cursor,
    device: torch.device,
    notice: Callable[[str], None],
    on_choice: Callable[[Choice], None],
) -> tuple[Feed, Feed | None]:
    """The training stream from where the run stands, whose threads find their place, and the pass for evaluation."""
    pin, there = device.type == "cuda", None if device.type == "cpu" else device

    def on_bad(bad: BadImage) -> None:
        notice(f"record {bad.id} of {data.train.path} cannot be decoded ({bad.reason}): {bad.instead} is used instead")

    feed = Feed(
        data.train,
        training_cut(recipe, told, data),
        batch_size=recipe.batch_size,
        seed=recipe.seed,
        ids=data.train_ids,
        start=cursor.position,
        stop=num_steps(recipe, data.num_train) * recipe.batch_size,
        threads=recipe.parallel.threads,
        pin=pin,
        device=there,
        on_bad=on_bad,
        blocks=Blocks() if recipe.data.order == "blocks" else None,
        place="auto",
        on_choice=on_choice,
    )
    if data.val is None:
        return feed, None
    threads = recipe.parallel.threads
    cut = evaluation_cut(told)
    batch_size, ids = recipe.batch_size, data.val_ids
    val_feed = Feed(data.val, cut, batch_size=batch_size, ids=ids, train=False, threads=threads, pin=pin, device=there)
    return feed, val_feed


def training_cut(recipe: Recipe, told: Input, data: DataSets) -> Cut:
    """How a training sample is cut from its image."""
    assert told.size is not None
    return cut_for(
        recipe.data,
        size=told.size,
        channels=_channels(told),
        largest=data.train.largest_side,
        crop=told.crop,
        interpolation=_interpolation(told),
    )


def evaluation_cut(told: Input) -> Cut:
    """How an evaluated image is cut: resized, then its centre."""
    assert told.size is not None and told.crop is not None
    return Cut(
        kind="none",
        size=told.size,
        crop=told.crop,
        interpolation=_interpolation(told),
        channels=_channels(told),
    )


def _channels(told: Input) -> Literal[1, 3]:
    return 1 if told.channels == 1 else 3


def _interpolation(told: Input) -> Literal["bilinear", "bicubic"]:
    return "bicubic" if told.interpolation == "bicubic" else "bilinear"
