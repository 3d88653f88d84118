"""The parts of a run, each made from the recipe and what the data and the machine say."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from steadytrain import models, optim
from steadytrain.config import Data, Optim, Recipe
from steadytrain.config.batches import parse_sizes
from steadytrain.config.parts import ImageFit
from steadytrain.config.phases import parse_train
from steadytrain.config.plain import plain
from steadytrain.config.schedules import usual_momentum
from steadytrain.config.timeline import Timeline
from steadytrain.config.transforms import parse_transforms
from steadytrain.data.loader import SMALL, BlockShuffle, Crop, ImageLoader, Placement, crop_for, default_threads
from steadytrain.data.recordio.reader import Records
from steadytrain.data.transforms import Augmentation, make_own
from steadytrain.distributed.asynchronous.cluster import Cluster
from steadytrain.distributed.asynchronous.engine import AsyncEngine
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.local import LocalEngine, Outer
from steadytrain.distributed.peers import Peers
from steadytrain.distributed.process_group import ranks_of
from steadytrain.distributed.world import World
from steadytrain.errors import ModelError, RecipeError
from steadytrain.events import Started
from steadytrain.format import count
from steadytrain.models import Built, Input
from steadytrain.training.clock import Clock, DeviceClock
from steadytrain.training.data import DataSets
from steadytrain.training.device import tick
from steadytrain.training.ema import Ema
from steadytrain.training.kernels import mend_kernels
from steadytrain.training.memory import PassLimit
from steadytrain.training.precision import Policy
from steadytrain.training.state import Cursor, Meters, State, preserve_process
from steadytrain.training.step import Objective, Share, Update, share_of
from steadytrain.training.usage import Usage, find_usage, refusal_of_one_image

DEFAULT_MEAN, DEFAULT_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Mean and standard deviation of ImageNet: for files without a card, as the field does."""


def model(recipe: Recipe, data: DataSets, *, allow_import: bool) -> tuple[Built, Input]:
    """Build the model for the data's classes, and its input: size, mean, standard deviation, crop and channels.

    Each value of the input is what the recipe says, else the weights' own configuration, else what the data measure.

    Raises:
        RecipeError: the recipe asks for what does not go with several labels for each image.
    """
    _require_suits_labels(recipe, data)
    has_weights = recipe.model.pretrained or recipe.model.weights is not None
    channels = 3 if has_weights and recipe.model.name not in models.BUILT_IN else data.train.channels
    size = recipe.data.size
    if size is None and not has_weights and data.train.largest_side <= SMALL:
        size = data.train.largest_side
    built = models.build(
        recipe.model,
        num_classes=len(data.classes),
        channels=channels,
        size=size,
        classes=data.classes,
        allow_import=allow_import,
    )
    spec, card, default = recipe.data, data.train.card, built.input
    mean, std = (default.mean, default.std) if has_weights else (None, None)
    if mean is None and card is not None and len(card.mean) == channels:
        mean, std = card.mean, tuple(max(s, 1e-3) for s in card.std)
    size = size or default.size or 224
    fit = spec.fit or data.train.usual_fit
    for side, _ in parse_sizes(recipe.data.grow_size):
        try:
            models.try_forward(
                built.module, name=built.name, channels=channels, size=side, num_classes=len(data.classes)
            )
        except ModelError as error:
            sizes = ",".join(recipe.data.grow_size)
            raise RecipeError(f"data.grow_size={sizes} does not suit {built.name}: {error}; leave it out") from error
    return built, replace(
        default,
        size=size,
        mean=spec.mean or mean or DEFAULT_MEAN[:channels],
        std=spec.std or std or DEFAULT_STD[:channels],
        crop=crop_share(recipe, default, size, fit),
        interpolation=spec.interpolation or default.interpolation or "bilinear",
        channels=channels,
        fit=fit,
    )


def model_on_meta(recipe: Recipe, data: DataSets, *, allow_import: bool) -> tuple[Built, Input] | None:
    """Build as :func:`model` does, without memory for the values; None where the network's code needs them."""
    try:
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that values which are loaded go nowhere
            built, input = model(recipe, data, allow_import=allow_import)
    except Exception:  # noqa: BLE001 - whatever code does that reads a value
        return None
    parts = list(built.module.modules())
    values = [value for part in parts for values in (part._parameters, part._buffers) for value in values.values()]
    has_others = any(isinstance(value, Tensor) for part in parts for value in vars(part).values())
    return None if has_others or any(value is not None and not value.is_meta for value in values) else (built, input)


def crop_share(recipe: Recipe, default: Input, size: int, fit: ImageFit) -> float:
    """Return the share of each side that evaluation keeps: the user's, all, or with ``crop`` that of the weights."""
    return recipe.data.crop or (1.0 if size <= SMALL or fit != "crop" else default.crop or 0.875)


def training_input(recipe: Recipe, input: Input, num_train: int, position: int = 0) -> Input:
    """Return the input with the size that training images have at a position."""
    assert input.size is not None
    stages = recipe.sizes(num_train, usual=input.size)
    return replace(input, size=next(stage.size for stage in reversed(stages) if stage.position <= position))


def _require_suits_labels(recipe: Recipe, data: DataSets) -> None:
    """Refuse what needs one class for each image, where an image may have several labels. Raises RecipeError."""
    if data.num_labels is None:
        return
    if recipe.data.balance != "none":
        raise RecipeError(
            f"data.balance={recipe.data.balance!r} shows classes equally often, and these images may have several"
            " labels: leave --balance out; --class-weights balanced weighs rare labels in the loss"
        )
    if parse_train(recipe.model.train).probe_passes:
        raise RecipeError(
            f"model.train={recipe.model.train!r} fits one class for each image, and these may have several labels: use"
            " --train head, head:1+full or discriminative"
        )


def require_schedule(recipe: Recipe, num_train: int) -> None:
    """Refuse a warm-up or stages that are longer than the run, and a momentum that a graph cannot follow.

    Raises:
        RecipeError: says which, and what to change.
    """
    timeline = Timeline(recipe, num_train)
    recipe.sizes(num_train, usual=1)  # none is due after the end
    if timeline.epochs and recipe.optim.warmup_epochs > timeline.epochs:
        planned = recipe.budget.epochs or round(timeline.epochs, 2)
        raise RecipeError(
            f"the warm-up of {recipe.optim.warmup_epochs:g} epochs is longer than the run of {planned:g}: the learning"
            " rate would never reach its peak; shorten it (--warmup-epochs), or train longer (--epochs)"
        )
    if timeline.steps and timeline.moves_momentum and recipe.parallel.graph:
        raise RecipeError(
            f"optim.schedule={recipe.optim.schedule!r} moves the momentum, which a recorded graph cannot follow: leave"
            f" --graph out, or keep it as it is with one-cycle,momentum={usual_momentum(recipe.optim):g}"
        )


def started(recipe: Recipe, data: DataSets, built: Built, input: Input, machine: dict[str, Any]) -> Started:
    """Make a run's first event: what is trained, on what, and where."""
    parameters, timeline = list(built.module.parameters()), Timeline(recipe, data.num_train)
    return Started(
        digest=recipe.digest,
        step=0,
        steps=timeline.steps,
        steps_per_epoch=timeline.steps_per_epoch,
        batch_size=recipe.batch_size,
        growth=list(timeline.batches.stages[1:]),
        data=data.about(),
        model={
            "name": built.name,
            "parameters": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "licence": built.licence,
            "weights": built.weights,
            "size": input.size,
            "input": plain(vars(input)),
            "unseen": _unseen_share(data.val or data.train, input),
        },
        machine=machine,
    )


def _unseen_share(records: Records, input: Input) -> float:
    """Return the share of the pixels of images, in the mean, that evaluation never sees."""
    sizes = records.sampled_sizes
    return 1 - float(evaluation_crop(input).seen(sizes).mean()) if len(sizes) else 0.0


def clock(device: torch.device, began: float) -> Clock:
    """Make the clock of an attempt; on a GPU by the device's own events."""
    if device.type != "cuda":
        return Clock(began)

    def hold(cycles: int) -> None:
        with torch.cuda.device(device):
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]

    return DeviceClock(began, partial(tick, device), hold)


def state(
    recipe: Recipe,
    built: Built,
    engine: Engine,
    *,
    num_train: int = 0,
    allow_import: bool | None = None,
    input: Input | None = None,
) -> State:
    """Build model on its device, optimizer, average, meters: at step 0.

    ``allow_import``: import the recipe's ``pkg.mod:factory``; None: if the user's code or command line named it.

    ``num_train``: images, of which a uniform average needs to know where it starts; 0 where nothing is trained with it.

    ``input``: of the images that it is trained on, by which kernels and parameters are tried (:mod:`.kernels`,
    :mod:`.usage`); None: not now.

    Raises:
        RecipeError: the network may leave out parts that ranks can only compute together.
    """
    device = engine.device
    policy = Policy(recipe.precision, device)
    module, usage = policy.prepare(built.module, moves=not engine.is_sharded), Usage()
    shapes = list[tuple[int, int, int]]()
    engine.shard(module)
    images = max(1, recipe.batch_size // (recipe.optim.accumulate * engine.world.size))  # of a micro-batch
    if input is not None and input.size is not None:
        stages = recipe.sizes(num_train, usual=input.size) if num_train else ()
        shapes = [(size, size, input.channels) for size in sorted({input.size, *(stage.size for stage in stages)})]
        with _same_passes(recipe, engine, module):
            policy.notes += tuple(mend_kernels(module, policy, shapes, images=images, sum_ranks=engine.sum))
            usage = find_usage(module, policy, shapes[0]) if engine.waits_for_gradients else usage
        if engine.waits_for_gradients:
            engine.finds_unused = bool(engine.sum(torch.tensor(float(usage.is_partial), device=device)) > 0)
            together = {"parallel.shard=True": engine.is_sharded}
            together["model.batch_norm=synchronous"] = recipe.model.batch_norm == "synchronous"
            if usage.varies and (key := next((key for key, waits in together.items() if waits), None)):
                raise RecipeError(
                    f"with {key} all ranks compute all parts of a network together, and {built.name} may leave out some"
                    f" ({usage.varies}): leave {key} out"
                )
    groups = models.parameter_groups(
        built,
        train=recipe.model.train,
        decay=recipe.model.decay,
        weight_decay=recipe.optim.weight_decay,
        freeze=recipe.model.freeze,
    )
    groups = [{**group, "params": [policy.master(parameter) for parameter in group["params"]]} for group in groups]
    lr = Timeline(recipe, num_train).peak
    may_import = _may_import(allow_import, recipe.optim, "name")
    make = partial(optim.build, recipe.optim, lr=lr, seed=recipe.seed, allow_import=may_import)
    optimizer = engine.optimizer(make(groups, device=device), partial(make, device=torch.device("cpu")))
    policy.remark_on(optimizer, recipe.optim.name)
    sources = [policy.master(p) if p.requires_grad else p for p in module.parameters()]
    ema, average = None, partial(Ema, module, sources=sources, own_values=engine.own_values)
    if recipe.optim.swa is not None:
        batches = recipe.batches(num_train) if num_train else None
        start = 0 if batches is None else round(batches.step(recipe.optim.swa * batches.images))
        ema = average(None, start=start, copied=engine.copy(module))
    elif recipe.optim.ema is not None:
        ema = average(recipe.optim.ema, copied=engine.copy(module))
    models.set_train_mode(built, recipe.model.train, batch_norm=recipe.model.batch_norm, freeze=recipe.model.freeze)
    policy.notes += tuple(usage.notes(module))
    norms_wait = engine.world.size > 1 and recipe.model.batch_norm == "synchronous"
    if images == 1 and shapes and not (norms_wait or engine.is_sharded):
        _require_takes_one_image(recipe, built, policy, shapes[0], engine.world.size)
    return State(module, optimizer, policy, engine, ema, Meters(device), Cursor())


@contextmanager
def _same_passes(recipe: Recipe, engine: Engine, module: nn.Module) -> Iterator[None]:
    """Let ranks that can only compute together draw the same random numbers, so that all compute the same parts."""
    if not engine.is_sharded:
        yield
        return
    with preserve_process(engine.device), engine.settled(module):
        torch.manual_seed(recipe.seed)
        random.seed(recipe.seed)
        np.random.seed(recipe.seed % 2**32)
        yield


def _require_takes_one_image(
    recipe: Recipe, built: Built, policy: Policy, shape: tuple[int, int, int], ranks: int
) -> None:
    """Refuse passes of a single image through a network that cannot take one in training. Raises RecipeError."""
    reason = refusal_of_one_image(built.module, policy, shape)
    if not reason:
        return
    parts = [count(ranks, "rank")] if ranks > 1 else []
    parts += [f"optim.accumulate={recipe.optim.accumulate}"] if recipe.optim.accumulate > 1 else []
    among = f" for {' with '.join(parts)}" if parts else ""
    raise RecipeError(
        f"batch_size={recipe.batch_size}{among} gives passes of one image, which {built.name} cannot take in training"
        f" ({reason}): use --batch-size {2 * ranks * recipe.optim.accumulate} or more, larger images (--size), or"
        " --set model.batch_norm=frozen"
    )


def engine(recipe: Recipe, device: torch.device, peers: Peers | None, *, num_train: int = 0) -> Engine:
    """Make what spreads the work of an update over ranks, if there are several, or over the workers of a server.

    ``num_train``: images, which say where ``local`` or ``powersgd`` begins; 0: it begins at once.
    """
    if isinstance(peers, Cluster):
        return _async_engine(recipe, device, peers, num_train)
    group = ranks_of(peers)
    parallel, norms = recipe.parallel, recipe.model.batch_norm == "synchronous"

    def update_of(epoch: float) -> int:
        return Timeline(recipe, num_train).update_at(epoch) if num_train else 0

    if parallel.engine == "local":
        return LocalEngine(
            device,
            group,
            every=parallel.sync_every,
            first=update_of(parallel.local_from),
            outer=Outer(parallel.outer_lr, parallel.outer_momentum) if parallel.outer == "diloco" else None,
        )
    if group is None:
        return Engine(device)
    if parallel.shard:
        from steadytrain.distributed.sharding import ShardedEngine  # it loads a great part of torch

        size, copy_ranks = group.world.size, parallel.shard_ranks
        if copy_ranks is not None and size % copy_ranks:
            raise RecipeError(
                f"parallel.shard_ranks={copy_ranks} does not divide the {size} ranks: give a divisor, such as the ranks"
                " of a machine, or leave it out"
            )
        bf16 = parallel.shard_gather == "bf16"
        return ShardedEngine(device, group, synchronize_norms=norms, copy_ranks=copy_ranks, gathers_16_bits=bf16)
    return Engine(
        device,
        group,
        compress=parallel.compress,
        power_rank=parallel.power_rank,
        power_from=update_of(parallel.power_from),
        synchronize_norms=norms,
        recorded=parallel.graph,
    )


def _async_engine(recipe: Recipe, device: torch.device, cluster: Cluster, num_train: int) -> AsyncEngine:
    timeline = Timeline(recipe, num_train)
    return AsyncEngine(
        device,
        cluster,
        steps=timeline.steps,
        batch_size=recipe.batch_size,
        set_rates=partial(_set_rates, timeline),
        staleness_power=recipe.parallel.staleness_power,
        compress=recipe.parallel.compress,
    )


def _set_rates(timeline: Timeline, optimizer: Optimizer, step: int) -> None:
    """Set an optimizer's learning rate and momentum to those of the update after ``step`` of them."""
    optim.set_lr(optimizer, timeline.lr(step))
    if (momentum := timeline.momentum(step)) is not None:
        optim.set_momentum(optimizer, momentum)


def loss(recipe: Recipe, data: DataSets, device: torch.device, *, allow_import: bool | None = None) -> optim.Loss:
    """Make the recipe's loss for the training data: weights of classes, if it asks for them, are counted there.

    ``allow_import``: import the recipe's ``pkg.mod:factory``; None: if the user's code or command line named it.
    """
    weights = None
    if recipe.optim.class_weights == "balanced":
        counts = torch.from_numpy(data.class_counts)
        weights = optim.balanced_weights(counts, data.num_train, is_multi_label=data.num_labels is not None).to(device)
    return optim.make_loss(
        recipe.optim,
        weights=weights,
        is_multi_label=data.num_labels is not None,
        num_classes=len(data.classes),
        allow_import=_may_import(allow_import, recipe.optim, "loss"),
    )


def _may_import(allowed: bool | None, part: Data | Optim, key: str) -> bool:
    """Return whether code that a value names may be imported; None allows what no file has named."""
    return key not in part.from_file if allowed is None else allowed


def update(
    recipe: Recipe,
    built: Built,
    input: Input,
    state: State,
    clock: Clock | None = None,
    share: Share | None = None,
    *,
    data: DataSets | None = None,
    num_labels: int | None = None,
    loss: optim.Loss | None = None,
    allow_import: bool | None = None,
    limit: PassLimit | None = None,
) -> Update:
    """Make the function of one update: untimed, and of whole batches, where ``clock`` and ``share`` are left out.

    ``data``: whose labels they are; None: the recipe's transforms are left out, and ``num_labels`` says of how many
    labels an image may have several (None: it has one class). ``loss``: of :func:`loss`; None: the recipe's, without
    weights of classes. ``allow_import``: import the recipe's own transforms; None: if the user's code or command line
    named them. ``limit``: what is done where memory runs out; None: nothing.
    """
    num_labels = num_labels if data is None else data.num_labels
    share = share or share_of(World(), recipe.batch_size, recipe.optim.accumulate)
    clock = clock or Clock(time.perf_counter())
    state.engine.on_exposed = lambda: clock.to("communication")
    loss = loss or optim.make_loss(
        recipe.optim,
        is_multi_label=num_labels is not None,
        num_classes=num_labels or 2,
        allow_import=_may_import(None, recipe.optim, "loss"),
    )
    objective = Objective(state.policy, input.mean, input.std, loss, num_labels)
    assert input.size is not None
    updated = {id(p) for group in state.optimizer.param_groups for p in group["params"]}  # some may wait
    return Update(
        call=state.engine.prepare(state.module, state.cursor.step),
        parameters=tuple(m for m in map(state.policy.master, built.module.parameters()) if id(m) in updated),
        objective=objective,
        forward=objective,
        clip_norm=recipe.optim.clip_norm,
        share=share,
        clock=clock,
        image_shape=(input.size, input.size, input.channels),
        augmentation=None
        if data is None
        else augmentation(recipe, input, len(data.classes), share.size, state.engine.device, allow_import=allow_import),
        limit=limit,
    )


def augmentation(
    recipe: Recipe,
    input: Input,
    num_classes: int,
    group: int,
    device: torch.device,
    *,
    allow_import: bool | None = None,
) -> Augmentation | None:
    """Make the recipe's transforms of micro-batches of ``group`` images; None where it has none."""
    if not recipe.data.transforms:
        return None
    fill = input.mean or (0.5,) * input.channels  # what becomes 0 for the network
    transforms = parse_transforms(recipe.data.transforms)
    assert input.size is not None
    shape = (input.size, input.size, input.channels)
    imported = make_own(transforms, device, shape, allow_import=_may_import(allow_import, recipe.data, "transforms"))
    return Augmentation(transforms, recipe.seed, fill, num_classes, group, imported)


def feeds(
    recipe: Recipe,
    data: DataSets,
    input: Input,
    state: State,
    share: Share,
    notice: Callable[[str], None],
    on_choice: Callable[[Placement], None],
    *,
    sharing: int = 1,
) -> tuple[ImageLoader, ImageLoader | None, ImageLoader | None]:
    """Open the loader of the training stream, from where the run stands, and those of the validation and test data.

    Of each this rank's part; ``sharing``: ranks that use the same cores.
    """
    device, world, engine = state.engine.device, state.engine.world, state.engine
    queue = engine if isinstance(engine, AsyncEngine) else None
    on_gpu, threads = device.type == "cuda", recipe.parallel.threads
    if threads is None and sharing > 1:
        threads = default_threads(pin=on_gpu, sharing=sharing)

    feed = training_feed(
        recipe,
        data,
        input,
        device,
        batch_size=share.images,
        start=0 if queue else state.cursor.position,
        stop=recipe.batches(data.num_train).images,
        share=(share.offset, recipe.batch_size),
        sizes=recipe.sizes(data.num_train, usual=input.size or 0) if recipe.data.grow_size else (),
        threads=threads,
        on_bad=lambda bad: notice(str(bad)),
        place="auto",
        on_placed=on_choice,
        queue=queue,
    )

    def evaluation_feed(records: Records | None, **options: Any) -> ImageLoader | None:
        if records is None or not engine.takes_part:
            return None
        size, shard = max(1, recipe.batch_size // world.size), (world.rank, world.size)
        crop = evaluation_crop(input)
        return ImageLoader(
            records, crop, batch_size=size, train=False, shard=shard, threads=threads, pin=on_gpu, **options
        )

    val_feed = evaluation_feed(data.val, ids=data.val_ids, device=device if on_gpu else None)
    return feed, val_feed, evaluation_feed(data.test, keep_bytes=0)  # each of which is read once


def training_feed(
    recipe: Recipe, data: DataSets, input: Input, device: torch.device, *, crop: Crop | None = None, **options: Any
) -> ImageLoader:
    """Open a loader of the training images, in the recipe's order and crop, or ``crop``; ``options`` as of it."""
    return ImageLoader(
        data.train,
        crop or crop_for(recipe.data, largest=data.train.largest_side, **_crop_options(input)),
        seed=recipe.seed,
        ids=data.train_ids,
        blocks=BlockShuffle() if recipe.data.order == "blocks" else None,
        balance=recipe.data.balance == "classes",
        repeats=recipe.data.repeats,
        pin=device.type == "cuda",
        device=device if device.type == "cuda" else None,
        **options,
    )


def evaluation_crop(input: Input) -> Crop:
    """Return the crop of an evaluated image: resized, then its centre, or all of it."""
    return Crop(kind="none", **_crop_options(input))


def _crop_options(input: Input) -> dict[str, Any]:
    return {
        "size": input.size,
        "crop": input.crop,
        "interpolation": "bicubic" if input.interpolation == "bicubic" else "bilinear",
        "channels": input.channels,
        "fit": input.fit,
        "fill": tuple(round(255 * mean) for mean in input.mean or ()) if input.fit == "pad" else (),
    }
