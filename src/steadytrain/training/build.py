"""The parts of a run, each made from the recipe and what the data and the machine say."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from steadytrain import models, optim
from steadytrain.config import Recipe
from steadytrain.data.loader import SMALL, BadImage, BlockShuffle, Choice, Crop, ImageLoader, crop_for, default_threads
from steadytrain.distributed.ddp import DDPEngine
from steadytrain.distributed.engine import Engine, SingleEngine
from steadytrain.distributed.process_group import Group
from steadytrain.distributed.world import World
from steadytrain.errors import RecipeError
from steadytrain.machine import facts, process
from steadytrain.models import Built, Input
from steadytrain.training import precision
from steadytrain.training.clock import Clock
from steadytrain.training.data import DataSets
from steadytrain.training.loss import Objective
from steadytrain.training.rank_share import Share, share
from steadytrain.training.state import Cursor, Meters, State
from steadytrain.training.step import Update
from steadytrain.training.timeline import DeviceClock

ALONE = World()
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
GROWING = "expandable_segments:True"
DEFAULT_MEAN, DEFAULT_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet: for files without a card, as the field does."""


def num_steps(recipe: Recipe, num_train: int) -> int:
    """Updates in the whole run: enough for every epoch of the budget to be complete."""
    if recipe.budget.steps is not None:
        return recipe.budget.steps
    samples = round((recipe.budget.epochs or 0) * num_train)
    return max(1, -(-samples // recipe.batch_size))


def choose_device(name: str, world: World = ALONE) -> torch.device:
    """``auto`` is a GPU if torch sees one, of several ranks on a machine each its own; else the CPU.

    A rank that sees one GPU takes it: schedulers give each its own, or all the same, which
    :func:`require_own_devices` tells apart.

    Raises:
        RecipeError: it is not there.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and world.local_size > 1 and torch.cuda.device_count() > 1:
        name = f"cuda:{world.local_rank}"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RecipeError(f"parallel.device is {name!r}; it must be auto, cpu, cuda or cuda:<number>") from None
    if device.type not in ("cpu", "cuda"):
        raise RecipeError(f"parallel.device is {name!r}; it must be auto, cpu, cuda or cuda:<number>")
    if device.type == "cuda":
        seen = torch.cuda.device_count()
        if (device.index or 0) >= seen:
            remedy = f"start {seen} ranks a machine" if 0 < seen < world.local_size else "mend the driver"
            raise RecipeError(
                f"parallel.device is {name!r} but torch {torch.__version__} sees {seen} GPUs: use --device cpu,"
                f" or {remedy}"
            )
        return torch.device("cuda", device.index or 0)
    return device


def require_own_devices(group: Group, device: torch.device) -> None:
    """Refuse ranks of which some compute on GPUs and some do not, or several on the same one.

    Raises:
        InputError: with ranks and hosts.
    """
    group.require_same("another kind of device (parallel.device)", device.type)
    if device.type != "cuda":
        return
    told = group.all_gather_json(str(torch.cuda.get_device_properties(device).uuid))
    for rank, own in enumerate(told):
        if (other := told.index(own)) != rank:
            raise RecipeError(
                f"ranks {other} and {rank} on {group.hosts[rank]} have the same GPU ({own}): each needs one of its own;"
                " start as many ranks a machine as it has GPUs, and give --device cuda or auto"
            )


def require_determinism(recipe: Recipe) -> None:
    """Let this process use nothing that may give other bits another time, where the recipe asks for that.

    To be called before anything is computed on a GPU: cuBLAS reads its part once, when it is first used.
    """
    if recipe.parallel.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def set_up_machine(
    recipe: Recipe,
    device: torch.device,
    before: dict[str, Any] | None,
    notice: Callable[[str], None],
    *,
    ranks: int = 1,
    sharing: int = 1,
) -> dict[str, Any]:
    """Threads and allocator for this process; returns what bits and speed depend on.

    A resumed run with as many ranks gets the number of compute threads that it had, unless the recipe says otherwise;
    ``notice`` is told where the bits may differ from an uninterrupted run's. ``sharing``: ranks that use the same
    cores, this one with them.
    """
    pieces = None
    if device.type == "cpu":
        process.keep_memory(facts.memory_bytes() // sharing)
    else:
        pieces = grow_segments(recipe)
        # Shapes never change in a run: what cuDNN finds fastest for them is found once.
        torch.backends.cudnn.benchmark = not recipe.parallel.deterministic
    precision.set_products(recipe.precision, device)
    had = before.get("compute_threads") if before and before.get("ranks", 1) == ranks else None
    threads = recipe.parallel.compute_threads or had or _own_threads(sharing)
    torch.set_num_threads(threads)
    machine = {
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "compute_threads": threads,
        "spins": os.environ.get("GOMP_SPINCOUNT"),
        "segments": pieces,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "cpu": facts.cpu_model(),
        "cores": facts.cores(),
        "memory_bytes": facts.memory_bytes(),
        "precision": recipe.precision.name,
    }
    tell_changes(before, machine, ("device", "compute_threads", "isa", "torch"), notice)
    return machine


def grow_segments(recipe: Recipe) -> str:
    """Let torch's segments of GPU memory grow, so that what is free between tensors is found again.

    To be called before the GPU is used: torch reads the variable once. A setting of the user's stays. Segments stay
    fixed where updates are recorded as CUDA graphs, whose memory must not move.

    Returns:
        ``growing``, ``fixed``, or the variable by which the user has decided.
    """
    for name in ALLOCATOR_VARIABLES:
        if os.environ.get(name) not in (None, "", GROWING):
            return name
    is_recorded = recipe.parallel.graph or recipe.precision.compile in ("reduce-overhead", "max-autotune")
    if is_recorded or sys.platform != "linux" or torch.version.cuda is None:
        return "fixed"
    os.environ[ALLOCATOR_VARIABLES[0]] = GROWING
    return "growing"


def tell_changes(
    before: dict[str, Any] | None, machine: dict[str, Any], names: Sequence[str], notice: Callable[[str], None]
) -> None:
    """Say which of these facts are others than in the attempt that is gone on with; ``before``: None without one."""
    for name in names:
        if before is not None and before.get(name) != machine.get(name):
            notice(f"{name} was {before.get(name)} and is {machine.get(name)}: from here on the bits may differ")


def _own_threads(sharing: int = 1) -> int:
    """What OMP_NUM_THREADS asks for, else one for each core; never more than that: they would wait for each other."""
    asked, most = os.environ.get("OMP_NUM_THREADS", ""), max(1, facts.cores() // sharing)
    return min(int(asked), most) if asked.isdigit() and int(asked) else most


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


def state(recipe: Recipe, built: Built, engine: Engine) -> State:
    """Model on its device, optimizer, average, meters: at step 0."""
    device = engine.device
    policy = precision.policy(recipe.precision, device)
    module = policy.prepare(built.module)
    groups = models.parameter_groups(
        built, train=recipe.model.train, decay=recipe.model.decay, weight_decay=recipe.optim.weight_decay
    )
    groups = [{**group, "params": [policy.master(one) for one in group["params"]]} for group in groups]
    optimizer = optim.build(recipe.optim, groups, lr=recipe.optim.scaled_lr(recipe.batch_size), device=device)
    followed = [policy.master(one) if one.requires_grad else one for one in module.parameters()]
    ema = None if recipe.optim.ema is None else precision.ema(module, recipe.optim.ema, followed)
    models.set_train_mode(built, recipe.model.train, batch_norm=recipe.model.batch_norm)
    return State(module, optimizer, policy, engine, ema, Meters(device), Cursor())


def engine(recipe: Recipe, device: torch.device, group: Group | None) -> Engine:
    """What spreads the work of an update over ranks, if there are several."""
    if group is None:
        return SingleEngine(device)
    parallel, norms = recipe.parallel, recipe.model.batch_norm == "synchronous"
    threshold = parallel.threshold * group.world.size / recipe.batch_size  # what is exchanged is a mean
    return DDPEngine(group, device, compress=parallel.compress, threshold=threshold, synchronise_norms=norms)


def own_share(recipe: Recipe, world: World, before: dict[str, Any] | None, notice: Callable[[str], None]) -> Share:
    """The part of each batch that is this rank's; ``before``: facts of the machine in the checkpoint, if any."""
    count, is_even = (before or {}).get("micro_batches"), recipe.model.batch_norm == "synchronous"
    own = share(world, recipe.batch_size, recipe.optim.accumulate, count, is_even=is_even)
    if count not in (None, own.micro_batches):
        notice(
            f"an update had {count} micro-batches, fewer than there are ranks, and has {own.micro_batches}:"
            " batch norms see smaller ones from here on"
        )
    return own


def update(recipe: Recipe, built: Built, told: Input, state: State, clock: Clock, own: Share) -> Update:
    """The function of one update."""
    state.engine.on_exposed = lambda: clock.to("communication")
    objective = Objective(state.policy, told.mean, told.std, recipe.optim.label_smoothing)
    return Update(
        call=state.engine.prepare(state.module),
        parameters=tuple(state.policy.master(p) for p in built.module.parameters() if p.requires_grad),
        objective=objective,
        forward=objective,
        clip_norm=recipe.optim.clip_norm,
        share=own,
        clock=clock,
    )


def feeds(
    recipe: Recipe,
    data: DataSets,
    told: Input,
    state: State,
    own: Share,
    notice: Callable[[str], None],
    on_choice: Callable[[Choice], None],
    *,
    sharing: int = 1,
) -> tuple[ImageLoader, ImageLoader | None]:
    """The training stream from where the run stands, whose threads find their place, and the pass for evaluation.

    Of both this rank's part; ``sharing``: ranks that use the same cores.
    """
    device, world, cursor = state.engine.device, state.engine.world, state.cursor
    pin, there = device.type == "cuda", None if device.type == "cpu" else device
    threads = recipe.parallel.threads
    if threads is None and sharing > 1:
        threads = max(1, default_threads(pin=pin) // sharing)

    def on_bad(bad: BadImage) -> None:
        notice(f"record {bad.id} of {data.train.path} cannot be decoded ({bad.reason}): {bad.instead} is used instead")

    feed = ImageLoader(
        data.train,
        training_cut(recipe, told, data),
        batch_size=own.images,
        seed=recipe.seed,
        ids=data.train_ids,
        start=cursor.position,
        stop=num_steps(recipe, data.num_train) * recipe.batch_size,
        share=(own.offset, recipe.batch_size),
        threads=threads,
        pin=pin,
        device=there,
        on_bad=on_bad,
        blocks=BlockShuffle() if recipe.data.order == "blocks" else None,
        place="auto",
        on_choice=on_choice,
    )
    if data.val is None:
        return feed, None
    val_feed = ImageLoader(
        data.val,
        evaluation_cut(told),
        batch_size=max(1, recipe.batch_size // world.size),
        ids=data.val_ids,
        train=False,
        shard=(world.rank, world.size),
        threads=threads,
        pin=pin,
        device=there,
    )
    return feed, val_feed


def image_shape(told: Input) -> tuple[int, int, int]:
    """Height, width and channels of what the feed gives."""
    assert told.size is not None
    return told.size, told.size, _channels(told)


def training_cut(recipe: Recipe, told: Input, data: DataSets) -> Crop:
    """How a training sample is cut from its image."""
    assert told.size is not None
    return crop_for(
        recipe.data,
        size=told.size,
        channels=_channels(told),
        largest=data.train.largest_side,
        crop=told.crop,
        interpolation=_interpolation(told),
    )


def evaluation_cut(told: Input) -> Crop:
    """How an evaluated image is cut: resized, then its centre."""
    assert told.size is not None and told.crop is not None
    return Crop(
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
