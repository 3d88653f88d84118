"""The parts of a run, each made from the recipe and what the data and the machine say."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from steadytrain import models, optim
from steadytrain.config import Recipe
from steadytrain.config.batches import parse_sizes
from steadytrain.config.defaults import MAX_BATCH_SHARE, MIN_BATCH
from steadytrain.config.factories import is_own_model
from steadytrain.config.parts import listed_gpus
from steadytrain.config.phases import parse_train
from steadytrain.config.plain import plain
from steadytrain.config.schedules import usual_momentum
from steadytrain.config.timeline import Timeline
from steadytrain.config.transforms import parse_transforms
from steadytrain.data.loader import (
    SMALL,
    BlockShuffle,
    Crop,
    ImageLoader,
    Placement,
    crop_for,
    default_threads,
)
from steadytrain.data.transforms import Augmentation, make_own
from steadytrain.distributed.async_engine import AsyncEngine
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.local import LocalEngine, Outer
from steadytrain.distributed.process_group import Group
from steadytrain.distributed.ray_cluster import Cluster
from steadytrain.distributed.world import World
from steadytrain.errors import ModelError, RecipeError
from steadytrain.events import Started
from steadytrain.format import count, few
from steadytrain.machine import cgroups, facts, process
from steadytrain.machine.nvml import read_driver
from steadytrain.models import Built, Input
from steadytrain.training import precision
from steadytrain.training.clock import Clock, DeviceClock
from steadytrain.training.data import DataSets
from steadytrain.training.device import require_usable, tick, what_there_is, why_hidden
from steadytrain.training.ema import Ema
from steadytrain.training.kernels import mend_kernels
from steadytrain.training.memory import PassLimit
from steadytrain.training.precision import Policy
from steadytrain.training.state import Cursor, Meters, State
from steadytrain.training.step import Objective, Share, Update, share_of
from steadytrain.training.usage import Usage, find_usage, refusal_of_one_image

ALONE = World()
RARE_SHARE = 0.2
"""Of the median class's images: a class with fewer is called rare."""
DEFAULT_MEAN, DEFAULT_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet: for files without a card, as the field does."""


def choose_device(name: str, world: World = ALONE) -> torch.device:
    """Choose the device: ``auto`` is a GPU if torch sees one, of several ranks on a machine each its own; else the CPU.

    Of a list (``cuda:0,2``) each rank of a machine takes the one in its place.
    A rank that sees one GPU takes it: schedulers give each rank its own, or all the same, which
    :func:`gpus_of_ranks` tells apart.

    Raises:
        RecipeError: it is not there, or no device that torch can train on here.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if gpus := listed_gpus(name):
        if world.local_size > len(gpus):
            raise RecipeError(
                f"parallel.device is {name!r}: {len(gpus)} GPUs for {world.local_size} ranks of a machine; list as"
                f" many, or start {len(gpus)}"
            )
        name = f"cuda:{gpus[world.local_rank]}"
    if name == "cuda" and world.local_size > 1 and torch.cuda.device_count() > 1:
        name = f"cuda:{world.local_rank}"
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise RecipeError(f"parallel.device is {name!r}; it must be auto, cpu, cuda or cuda:<number>")
    if device.type == "cpu":
        return device
    count = torch.cuda.device_count()
    if (device.index or 0) >= count:
        raise RecipeError(f"parallel.device is {name!r} but torch {torch.__version__} {what_there_is(count, world)}")
    return torch.device("cuda", device.index or 0)


def gpus_of_ranks(group: Group | None, device: torch.device) -> list[dict[str, Any]]:
    """Return the GPU on which each rank computes: its ``index`` in its process, and ``uuid``; nothing on CPUs.

    Raises:
        InputError: some ranks compute on GPUs and some do not, or several on the same GPU.
    """
    if group is not None:
        group.require_same("another kind of device (parallel.device)", device.type)
    if device.type != "cuda":
        return []
    gpu = {"index": device.index, "uuid": str(torch.cuda.get_device_properties(device).uuid)}
    if group is None:
        return [gpu]
    gpus: list[dict[str, Any]] = group.all_gather_json(gpu)
    uuids = [gpu["uuid"] for gpu in gpus]
    for rank, uuid in enumerate(uuids):
        if (other := uuids.index(uuid)) != rank:
            raise RecipeError(
                f"ranks {other} and {rank} on {group.hosts[rank]} have the same GPU ({uuid}): each needs one of its"
                " own; start as many ranks a machine as it has GPUs, and give --device cuda or auto"
            )
    return gpus


def sampled_gpus(group: Group | None, gpus: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the UUIDs of the GPUs that this process samples, of those that :func:`gpus_of_ranks` returned.

    One rank of each machine samples NVIDIA's for all: its first.
    """
    if torch.version.hip:
        return ()
    if group is None or not gpus:
        return tuple(gpu["uuid"] for gpu in gpus)
    host = group.hosts[group.world.rank]
    if group.hosts.index(host) != group.world.rank:
        return ()
    return tuple(gpu["uuid"] for gpu, place in zip(gpus, group.hosts, strict=True) if place == host)


@contextmanager
def near_gpu(group: Group | None, device: torch.device, notice: Callable[[str], None]) -> Iterator[int]:
    """Keep this thread, and those that it starts, on the processors of its GPU's NUMA node for the block.

    Only where several ranks on one machine compute on GPUs and lose no processors by it: see
    :func:`.cgroups.near_processors`.

    Yields:
        How many ranks use the same processors as this one, this one included.
    """
    if group is None or device.type != "cuda":
        yield 1 if group is None else group.sharing
        return
    properties: Any = torch.cuda.get_device_properties(device)
    pci = ""  # where a release of torch does not tell
    if hasattr(properties, "pci_domain_id"):
        pci = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    rank, everything = group.world.rank, cgroups.allowed()
    local = [other for other, host in enumerate(group.hosts) if host == group.hosts[rank]]
    places = group.all_gather_json(pci)
    near = cgroups.near_processors([places[other] for other in local], local.index(rank))
    nodes = group.all_gather_json(near and near[0])
    if near is None or any(nodes[other] is None for other in local):  # all, or none
        yield group.sharing
        return
    node, processors = near
    if group.world.is_first:
        notice(
            "each rank stays on the processors of its GPU's NUMA node"
            f" (rank 0: node {node}, {len(processors)} of {count(len(everything), 'processor')})"
        )
    os.sched_setaffinity(0, processors)
    try:
        yield sum(nodes[other] == node for other in local)
    finally:
        os.sched_setaffinity(0, everything)


def prepare_device(recipe: Recipe, world: World = ALONE) -> torch.device:
    """Choose the recipe's device, and set the variables that CUDA's libraries read once, before it computes anything.

    Raises:
        RecipeError: as :func:`choose_device` and :func:`require_usable`; or the recipe asks for a graph of the GPU's
            kernels, and it is no GPU.
    """
    device = choose_device(recipe.parallel.device, world)
    if recipe.parallel.graph and device.type != "cuda":
        raise RecipeError(
            f"parallel.graph=True wants a GPU, and this trains on the {device.type.upper()}: leave --graph out"
            " (--compile may help small networks here)"
        )
    if recipe.parallel.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device.type == "cuda":
        process.grow_segments(recorded=recipe.records_graphs)
        torch.cuda.set_device(device)  # what names no device, an event say, means this one
    usable = require_usable(device)
    if usable.type == "cuda":
        torch.empty(1, device=usable)  # starts CUDA in this process: seconds that are no other stage's
    return usable


def set_up_machine(
    recipe: Recipe,
    device: torch.device,
    before: dict[str, Any] | None,
    notice: Callable[[str], None],
    *,
    ranks: int = 1,
    sharing: int = 1,
) -> dict[str, Any]:
    """Set up threads and allocator of this process; return the facts that bits and speed depend on.

    A resumed run with as many ranks gets the number of compute threads that it had, unless the recipe names one.

    Args:
        before: the facts of the attempt that is resumed; None: there is none.
        notice: is called with a line where the bits may differ from those of an uninterrupted run.
        ranks: that train together; ``sharing`` of them, this one included, on the same cores.
    """
    segments = None
    if device.type == "cpu":
        process.keep_memory(facts.memory_bytes() // sharing)
        driver = read_driver() if recipe.parallel.device == "auto" else None
        if driver is not None and driver.gpus and (why := why_hidden(driver)).kind != "gpu-hidden":
            notice(f"trains on the CPU, as torch sees no GPU: {why.what}: {why.remedy}")
    else:
        segments = process.grow_segments(recorded=recipe.records_graphs)
        # Shapes never change in a run: what cuDNN finds fastest for them is found once.
        torch.backends.cudnn.benchmark = not recipe.parallel.deterministic
    if recipe.parallel.deterministic:
        torch.use_deterministic_algorithms(True)
    precision.set_products(recipe.precision, device)
    had = before.get("compute_threads") if before and before.get("ranks", 1) == ranks else None
    threads = recipe.parallel.compute_threads or had or default_compute_threads(sharing)
    torch.set_num_threads(threads)
    machine = {
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "compute_threads": threads,
        "spins": os.environ.get("GOMP_SPINCOUNT"),
        "segments": segments,
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "host": platform.node(),
        "cpu": facts.cpu_model(),
        "cores": facts.cores(),
        "memory_bytes": facts.memory_bytes(),
        "out_of_memory_kills": cgroups.out_of_memory_kills(),
        "precision": recipe.precision.name,
    }
    for name in ("device", "compute_threads", "isa", "torch"):
        notice_change(before, machine, name, notice)
    return machine


def notice_change(
    before: dict[str, Any] | None, machine: dict[str, Any], name: str, notice: Callable[[str], None]
) -> None:
    """Tell the user where a fact of the machine is not that of the attempt that is resumed."""
    if before is not None and before.get(name) != machine.get(name):
        notice(f"{name} was {before.get(name)} and is now {machine.get(name)}: the last bits of results may differ")


def default_compute_threads(sharing: int = 1) -> int:
    """Return the threads that OMP_NUM_THREADS asks for, else one for each core; never more than cores."""
    requested, most = os.environ.get("OMP_NUM_THREADS", ""), max(1, facts.cores() // sharing)
    return min(int(requested), most) if requested.isdigit() and int(requested) else most


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
        crop=spec.crop or (1.0 if size <= SMALL else default.crop or 0.875),
        interpolation=spec.interpolation or default.interpolation or "bilinear",
        channels=channels,
    )


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
            " rate would never come to its peak; shorten it (--warmup-epochs), or train longer (--epochs)"
        )
    if timeline.steps and timeline.moves_momentum and recipe.parallel.graph:
        raise RecipeError(
            f"optim.schedule={recipe.optim.schedule!r} moves the momentum, which a recorded graph cannot follow: leave"
            f" --graph out, or keep it as it is with one-cycle,momentum={usual_momentum(recipe.optim):g}"
        )


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
        yield from rare_class_remark(data)
    if recipe.optim.class_weights == "balanced" and recipe.data.balance == "classes":
        yield (
            "--balance classes shows all classes equally often, and --class-weights balanced weighs rare ones as if it"
            " did not, so that they count twice: leave one of them out"
        )
    if built.scaling_guessed:
        mean, std = ("the recipe's" if is_set else f"{built.name}'s" for is_set in (recipe.data.mean, recipe.data.std))
        yield f"{scaling_remark(built, input, mean, std)}; data.mean and data.std set others"
    yield from scaling_conflict(recipe, built)
    yield from _remark_on_random_parts(recipe, built)
    if built.licence:
        yield f"licence of the weights of {built.name}: {built.licence}"
    packed = None if data.train.card is None else data.train.card.settings.get("shorter_side")
    if packed is not None and input.size is not None and input.size > packed:
        yield (
            f"the images were packed at {packed} pixels and are scaled up to {input.size}, the input size of"
            f" {built.name}: --size {input.size} (or steady pack without --shorter-side) keeps more detail"
        )


def rare_class_remark(data: DataSets) -> Iterator[str]:
    """Describe the rare classes: those with less than :data:`RARE_SHARE` of the images of a median class."""
    counts = data.class_counts
    usual = float(np.median(counts[counts > 0]))
    rare = [k for k in np.argsort(counts, kind="stable").tolist() if 0 < counts[k] < RARE_SHARE * usual]
    if rare:
        named = few([f"{data.classes[k]} {counts[k]:,}" for k in rare])
        nouns = ("class is", "classes are") if data.num_labels is None else ("label is", "labels are")
        remedy = "--balance classes shows all classes equally often, " if data.num_labels is None else ""
        yield (
            f"{count(len(rare), *nouns)} rare ({named}; the median is {usual:,.0f} training images): {remedy}"
            "--class-weights balanced weighs their losses"
        )


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


def scaling_conflict(recipe: Recipe, built: Built) -> Iterator[str]:
    """Describe a mean or a standard deviation of the recipe that is not the one that the weights were trained with."""
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


def started(
    recipe: Recipe,
    data: DataSets,
    built: Built,
    input: Input,
    machine: dict[str, Any],
    *,
    step: int = 0,
    startup: Mapping[str, float] | None = None,
    startup_waits: Mapping[str, float] | None = None,
    startup_disk_bytes: int | None = None,
    began: float = 0.0,
    price: Mapping[str, Any] | None = None,
) -> Started:
    """Make an attempt's first event: what is trained, on what, and where."""
    parameters, timeline = list(built.module.parameters()), Timeline(recipe, data.num_train)
    return Started(
        digest=recipe.digest,
        step=step,
        steps=timeline.steps,
        steps_per_epoch=timeline.steps_per_epoch,
        batch_size=recipe.batch_size,
        growth=[list(stage) for stage in timeline.batches.stages[1:]],
        data=data.about(),
        model={
            "name": built.name,
            "parameters": sum(p.numel() for p in parameters),
            "trainable": sum(p.numel() for p in parameters if p.requires_grad),
            "licence": built.licence,
            "weights": built.weights,
            "size": input.size,
            "input": plain(vars(input)),
        },
        machine=machine,
        startup=startup or {},
        startup_waits=startup_waits or {},
        startup_disk_bytes=startup_disk_bytes,
        began=began,
        price=price,
    )


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
    module, usage, shapes = policy.prepare(built.module), Usage(), list[tuple[int, int, int]]()
    images = max(1, recipe.batch_size // (recipe.optim.accumulate * engine.world.size))  # of a micro-batch
    if input is not None and input.size is not None:
        stages = recipe.sizes(num_train, usual=input.size) if num_train else ()
        shapes = [(size, size, input.channels) for size in sorted({input.size, *(stage.size for stage in stages)})]
        policy.notes += tuple(mend_kernels(module, policy, shapes, images=images, sum_ranks=engine.sum))
        if engine.waits_for_gradients:
            usage = find_usage(module, policy, shapes[0])
            engine.finds_unused = bool(engine.sum(torch.tensor(float(usage.is_partial), device=device)) > 0)
            together = {"parallel.shard=True": engine.is_sharded}
            together["model.batch_norm=synchronous"] = recipe.model.batch_norm == "synchronous"
            if usage.varies and (key := next((key for key, waits in together.items() if waits), None)):
                raise RecipeError(
                    f"with {key} all ranks compute all parts of a network together, and {built.name} may leave out some"
                    f" ({usage.varies}): leave {key} out"
                )
    engine.shard(module)
    groups = models.parameter_groups(
        built,
        train=recipe.model.train,
        decay=recipe.model.decay,
        weight_decay=recipe.optim.weight_decay,
        freeze=recipe.model.freeze,
    )
    groups = [{**group, "params": [policy.master(parameter) for parameter in group["params"]]} for group in groups]
    lr = recipe.optim.scaled_lr(recipe.batch_size)
    allow_import = "name" not in recipe.optim.from_file if allow_import is None else allow_import
    make = partial(optim.build, recipe.optim, lr=lr, seed=recipe.seed, allow_import=allow_import)
    optimizer = engine.optimizer(make(groups, device=device), partial(make, device=torch.device("cpu")))
    policy.remark_on(optimizer, recipe.optim.name)
    sources = [policy.master(p) if p.requires_grad else p for p in module.parameters()]
    ema = None if recipe.optim.ema is None else Ema(module, recipe.optim.ema, sources)
    if recipe.optim.swa is not None:
        batches = recipe.batches(num_train)
        ema = Ema(module, None, sources, start=round(batches.step(recipe.optim.swa * batches.images)))
    models.set_train_mode(built, recipe.model.train, batch_norm=recipe.model.batch_norm, freeze=recipe.model.freeze)
    policy.notes += tuple(usage.notes(module))
    norms_wait = engine.world.size > 1 and recipe.model.batch_norm == "synchronous"
    if images == 1 and shapes and not (norms_wait or engine.is_sharded):
        _require_takes_one_image(recipe, built, policy, shapes[0], engine.world.size)
    return State(module, optimizer, policy, engine, ema, Meters(device), Cursor())


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


def engine(
    recipe: Recipe, device: torch.device, group: Group | None, cluster: Cluster | None = None, *, num_train: int = 0
) -> Engine:
    """Make what spreads the work of an update over ranks, if there are several, or over ``cluster``'s workers.

    ``num_train``: images, which say where ``local`` or ``powersgd`` begins; 0: it begins at once.

    Raises:
        RecipeError: the optimizer does not go with several servers.
    """
    if cluster is not None:
        return _async_engine(recipe, device, cluster, num_train)
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

        return ShardedEngine(device, group, synchronize_norms=norms)
    threshold = parallel.threshold * group.world.size / recipe.batch_size  # what is exchanged is a mean
    return Engine(
        device,
        group,
        compress=parallel.compress,
        threshold=threshold,
        power_rank=parallel.power_rank,
        power_from=update_of(parallel.power_from),
        synchronize_norms=norms,
        recorded=parallel.graph,
    )


def _async_engine(recipe: Recipe, device: torch.device, cluster: Cluster, num_train: int) -> AsyncEngine:
    kind, parallel = optim.OPTIMIZERS.get(recipe.optim.name), recipe.parallel
    sees = "all" if kind is None else kind.sees
    if sees == "all" and len(cluster.servers) > 1:
        raise RecipeError(
            f"optim.name={recipe.optim.name!r} may need all parameters in one place, and {len(cluster.servers)} servers"
            " divide them: use --servers 1, or an optimizer of the built-in table"
        )
    return AsyncEngine(
        device,
        cluster,
        steps=recipe.batches(num_train).steps,
        batch_size=recipe.batch_size,
        staleness=parallel.staleness,
        staleness_power=parallel.staleness_power,
        whole=sees != "element",
        keeps_gradients=sees == "element",
        compress=parallel.compress,
        threshold=parallel.threshold / recipe.batch_size,  # what is pushed is a mean
    )


def loss(recipe: Recipe, data: DataSets, device: torch.device, *, allow_import: bool | None = None) -> optim.Loss:
    """Make the recipe's loss for the training data: weights of classes, if it asks for them, are counted there.

    ``allow_import``: import the recipe's ``pkg.mod:factory``; None: if the user's code or command line named it.
    """
    weights = None
    if recipe.optim.class_weights == "balanced":
        counts = torch.from_numpy(data.class_counts)
        weights = optim.balanced_weights(counts, data.num_train, is_multi_label=data.num_labels is not None).to(device)
    named = "loss" not in recipe.optim.from_file
    return optim.make_loss(
        recipe.optim,
        weights=weights,
        is_multi_label=data.num_labels is not None,
        num_classes=len(data.classes),
        allow_import=named if allow_import is None else allow_import,
    )


def update(
    recipe: Recipe,
    built: Built,
    input: Input,
    state: State,
    clock: Clock | None = None,
    share: Share | None = None,
    *,
    num_classes: int | None = None,
    num_labels: int | None = None,
    loss: optim.Loss | None = None,
    allow_import: bool | None = None,
    limit: PassLimit | None = None,
) -> Update:
    """Make the function of one update: untimed, and of whole batches, where ``clock`` and ``share`` are left out.

    ``num_classes``: of the labels; None: the recipe's transforms are left out. ``num_labels``: of which an image may
    have several; None: it has one class. ``loss``: of :func:`loss`; None: the recipe's, without weights of classes.
    ``allow_import``: import the recipe's own transforms; None: if the user's code or command line named them.
    ``limit``: what is done where memory runs out; None: nothing.
    """
    share = share or share_of(ALONE, recipe.batch_size, recipe.optim.accumulate)
    clock = clock or Clock(time.perf_counter())
    state.engine.on_exposed = lambda: clock.to("communication")
    loss = loss or optim.make_loss(
        recipe.optim,
        is_multi_label=num_labels is not None,
        num_classes=num_labels or 2,
        allow_import="loss" not in recipe.optim.from_file,
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
        if num_classes is None
        else augmentation(recipe, input, num_classes, share.size, state.engine.device, allow_import=allow_import),
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
    transforms, named = parse_transforms(recipe.data.transforms), "transforms" not in recipe.data.from_file
    assert input.size is not None
    shape = (input.size, input.size, input.channels)
    imported = make_own(transforms, device, shape, allow_import=named if allow_import is None else allow_import)
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
) -> tuple[ImageLoader, ImageLoader | None]:
    """Open the loader of the training stream, from where the run stands, and the one of the validation data.

    Of both this rank's part; ``sharing``: ranks that use the same cores.
    """
    device, world, engine = state.engine.device, state.engine.world, state.engine
    queue = engine if isinstance(engine, AsyncEngine) and not engine.is_synchronous else None
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
    if data.val is None or not engine.takes_part:
        return feed, None
    val_feed = ImageLoader(
        data.val,
        evaluation_crop(input),
        batch_size=max(1, recipe.batch_size // world.size),
        ids=data.val_ids,
        train=False,
        shard=(world.rank, world.size),
        threads=threads,
        pin=on_gpu,
        device=device if on_gpu else None,
    )
    return feed, val_feed


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
    """How an evaluated image is cropped: resized, then its centre."""
    return Crop(kind="none", **_crop_options(input))


def _crop_options(input: Input) -> dict[str, Any]:
    return {
        "size": input.size,
        "crop": input.crop,
        "interpolation": "bicubic" if input.interpolation == "bicubic" else "bilinear",
        "channels": input.channels,
    }
