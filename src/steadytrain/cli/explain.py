"""Describe what a run trains, and how: the head of its output, and ``--explain``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadytrain.cli.console import print_json, print_text
from steadytrain.cli.options import TrainingOptions
from steadytrain.config import Parallel, Recipe, schedules
from steadytrain.config.batches import parse_growth, parse_sizes
from steadytrain.config.defaults import MUCH_UNSEEN
from steadytrain.config.losses import parse_loss
from steadytrain.config.parts import ADAMS
from steadytrain.config.phases import parse_train
from steadytrain.config.plain import plain
from steadytrain.config.timeline import Timeline
from steadytrain.cost.prices import Price
from steadytrain.events import Started
from steadytrain.format import clean, count, duration, money, per_rank, percent

if TYPE_CHECKING:
    from steadytrain.data.loader import Crop
    from steadytrain.training.finetuning.plan import FinetunePlan
    from steadytrain.training.profile.explain import Explained


def print_explained(
    recipe: Recipe, options: TrainingOptions, plan: FinetunePlan | None = None, *, ranks: int = 1
) -> None:
    """Print what the recipe comes down to with so many ranks; nothing is trained, and no run is made."""
    from steadytrain.training.profile.explain import explain

    explained = explain(recipe, ranks=ranks, allow_import=options.names_model)
    if options.json:
        values = {name: value for name, value in plain(explained).items() if name != "started"}
        planned = {} if plan is None else {"plan": {**plain(plan), "recipe": None, "why": plan.words}}
        print_json({"recipe": recipe.to_dict(), **values, **planned})
    else:
        lines = [] if plan is None else [line for row in _plan_rows(plan) for line in _row(*row)]
        print_text("\n".join([*lines, *_explained_lines(recipe, explained)]))


def _plan_rows(plan: FinetunePlan) -> Iterator[tuple[str, str]]:
    """Describe what was chosen, and each option with what it takes."""
    yield "budget", plan.words
    for tried in plan.tried:
        yield "", tried.words
    for option in plan.options:
        passes = f"{duration(option.pass_seconds)} for the probe" if option.pass_seconds else ""
        epochs = f"{duration(option.epoch_seconds)} an epoch" if option.epoch_seconds else ""
        fitting = f", {option.epochs} fit" if option.epochs else ""
        yield "", f"{option.verdict:<9} {option.train}: {', '.join(filter(None, (passes, epochs)))}{fitting}"


def _explained_lines(recipe: Recipe, explained: Explained) -> Iterator[str]:
    """Yield all that was chosen, then remarks, then counts of parameters."""
    yield from head_lines(recipe, explained.started)
    if explained.recomputed is not None:
        yield from _row("recomputed", clean(str(explained.recomputed)))
    if parse_train(recipe.model.train).probe_passes and explained.started.steps:
        words = "first a probe: the classifier is fitted to the features of the frozen network, and evaluated"
        yield from _row("note", f"{words}; best.safetensors holds the best of it and of all epochs")
    for remark in explained.notes:
        yield from _row("note", clean(remark))
    stored = ", ".join(f"{numbers} {count:,}" for numbers, count in explained.stored.items())
    twins = f"; {explained.masters:,} parameters with fp32 masters for the optimizer" if explained.masters else ""
    yield from _row("stored as", f"{stored}{twins}")


LINE, LABEL = 80, 14
"""Columns of a line of a run's head, and of its label."""


def _row(label: str, words: str) -> list[str]:
    return textwrap.wrap(
        words, LINE, initial_indent=f"{label:<{LABEL}}", subsequent_indent=" " * LABEL, break_long_words=False
    )


def validation_name(recipe: Recipe, data: Mapping[str, Any]) -> str:
    """Name the validation data as the user did, rather than by a packed copy in the cache."""
    if recipe.data.val is not None or not data["val"]:
        return Path(recipe.data.val or "").name
    is_copy = str(recipe.data.train) != str(data["train"])
    return f"those of {Path(recipe.data.train).name or 'this folder'}" if is_copy else Path(data["val"]).name


def head_lines(recipe: Recipe, started: Started) -> list[str]:
    """Describe all that was chosen for a run, by the user or by default, in lines of :data:`LINE` columns."""
    rows = [*_model_rows(recipe, started), *_update_rows(recipe, started), *_image_rows(recipe, started)]
    rows += [*_target_rows(recipe, started), *_machine_rows(recipe, started)]
    if not started.steps:  # a probe alone
        passes = parse_train(recipe.model.train).probe_passes
        unused = ("updates", "optimizer", "learning rate", "targets", *("augmentation",) * (passes == 1))
        rows = [row for row in rows if row[0] not in unused]
    return [line for label, words in rows for line in _row(label, words)]


def brief_lines(recipe: Recipe, started: Started) -> list[str]:
    """Describe a run in the lines that a terminal shows before it begins: data, network, updates."""
    data, optim = started.data, recipe.optim
    test = f", {data['num_test']:,} to test at the end" if data.get("num_test") else ""
    val = f"{data['num_val']:,} to evaluate" if data["num_val"] else "none to evaluate"
    noun = ("label", "labels") if data.get("multi_label") is True else ("class", "classes")
    rows = {"data": f"{data['num_train']:,} to train on, {val}{test}, {count(len(data['classes']), *noun)}"}
    rows |= {label: words for label, words in _model_rows(recipe, started) if label == "model"}
    device = clean(str(started.machine["device"]))
    if started.steps:
        [updates] = [words for label, words in _update_rows(recipe, started) if label == "updates"]
        rows["updates"] = updates
        scaled = _scaled_rate(recipe) if recipe.batch_size != optim.base_batch_size else ""
        rate = f"{Timeline(recipe, 0).peak:.3g}{scaled}"
        rows["by"] = f"{optim.name}, rate {rate}, {recipe.precision.name} on {device}"
    if started.price is not None:
        rows |= {label: words for label, words in _machine_rows(recipe, started) if label == "price"}
    return [line for label, words in rows.items() for line in _row(label, words)]


def _model_rows(recipe: Recipe, started: Started) -> Iterator[tuple[str, str]]:
    """Describe the data, the network, and what of it is trained."""
    data, model = started.data, started.model
    source = "held out" if data["held_out"] else validation_name(recipe, data)
    val = f"{data['num_val']:,} to evaluate ({clean(source)})" if data["num_val"] else "no validation data"
    several = "labels, several for each image"
    noun = (several, several) if data.get("multi_label") is True else ("class", "classes")
    test = f"{data['num_test']:,} to test once, at the end, " if data.get("num_test") else ""
    yield "data", f"{data['num_train']:,} to train on, {val}, {test}{count(len(data['classes']), *noun)}"
    frozen = model["parameters"] - model["trainable"]
    pretrained = ", pretrained" if recipe.model.pretrained else ", from a weights file" if recipe.model.weights else ""
    yield (
        "model",
        f"{clean(str(model['name']))}{pretrained}: {_rounded(model['parameters'])} parameters"
        f"{f', {_rounded(frozen)} of them frozen' if frozen else ''}",
    )
    plan = parse_train(recipe.model.train)
    train = plan.words
    if plan.main in ("discriminative", "gradual"):
        train += f", rate x {recipe.model.decay:g} a layer downwards"
    if recipe.model.freeze:
        train += f"; frozen: {clean(', '.join(recipe.model.freeze))}"
    norms = {"train": "", "synchronous": ", batch norms synchronous", "frozen": ", batch norms frozen"}
    yield "trained", f"{train}{norms[recipe.model.batch_norm]}"


def _scaled_rate(recipe: Recipe) -> str:
    """Say how the peak rate follows from the recipe's rate and batch; empty where it is not scaled."""
    base = recipe.optim.base_batch_size
    return f" = {recipe.optim.lr:g} x {recipe.batch_size}/{base}" if base else ""


def _update_rows(recipe: Recipe, started: Started) -> Iterator[tuple[str, str]]:
    """Describe the updates and the optimizer."""
    optim = recipe.optim
    shares = started.machine.get("images_per_rank")
    parts = f" ({per_rank(shares)})" if shares else ""
    parts += "" if optim.accumulate == 1 else f" in {optim.accumulate} micro-batches"
    passes = recipe.budget.epochs or started.steps / started.steps_per_epoch
    epochs = f"{passes:.4g} epoch{'s' * (passes != 1)}"
    per_epoch, grown = f" of {started.steps_per_epoch:.4g} updates", ""
    if started.growth:
        growths = zip(parse_growth(optim.grow_batch), started.batches.stages[1:], strict=False)
        stages = [f", {stage.images:,} from epoch {growth.epoch:g}" for growth, stage in growths]
        per_epoch, grown = "", f"{''.join(stages)} (in micro-batches of the first size)"
    images = count(started.batch_size, "image")
    yield "updates", f"{started.steps:,} of {images}{parts}{grown}: {epochs}{per_epoch}"
    parallel = recipe.parallel
    is_stale = parallel.engine == "async"
    momentum = f"momentum {optim.momentum:g}{' of each worker' * is_stale}"
    constants = {
        "sgd": f"{'Nesterov ' * bool(optim.nesterov)}{momentum}",
        "nag": momentum,
        **dict.fromkeys(ADAMS, f"betas {optim.betas[0]:g} and {optim.betas[1]:g}"),
    }.get(optim.name, "")
    options = ", ".join(f"{name} {value}" for name, value in optim.options.items())
    optimizer = ", ".join(filter(None, (optim.name, constants, options)))
    clipped = "no clipping" if optim.clip_norm is None else f"gradients clipped at norm {optim.clip_norm:g}"
    yield "optimizer", f"{optimizer}, weight decay {optim.weight_decay:g}, {clipped}"
    peak = Timeline(recipe, 0).peak
    power = "" if parallel.staleness_power == 1 else f" to the power {parallel.staleness_power:g}"
    stale = (
        f", divided by 1 + the updates that a push has missed{power}" if is_stale and parallel.staleness_power else ""
    )
    yield "learning rate", f"{peak:.4g}{_scaled_rate(recipe)}, {schedules.words(optim, peak)}{stale}"


def _image_rows(recipe: Recipe, started: Started) -> Iterator[tuple[str, str]]:
    """Describe how images are ordered, augmented and cut."""
    from steadytrain.data.loader.crop import crop_for

    data, input = started.data, started.model["input"]
    crop = crop_for(
        recipe.data,
        largest=data["largest_side"],
        size=input["size"],
        crop=input["crop"],
        interpolation=input["interpolation"],
        channels=input["channels"],
        fit=input.get("fit"),
    )
    cuts = {
        "resized-crop": f"resized-crop (area {_range(crop.area)}, ratio {_range(crop.ratio)})",
        "pad-crop": f"pad-crop ({count(crop.pad, 'pixel')})",
        "none": "no random crop",
    }[crop.kind]
    flips = "alternating flips" if crop.flip == "alternating" else "flips" if crop.flip else "no flips"
    transforms = "".join(f", {transform}" for transform in recipe.data.transforms)
    if recipe.data.balance != "none":
        yield "order", "all classes equally often: images of rare ones several times an epoch"
    repeats = f", each image {recipe.data.repeats} times in a row" if recipe.data.repeats > 1 else ""
    yield "augmentation", f"{cuts}, {flips}{transforms}{repeats}"
    shape = f"{crop.size}x{crop.size} pixels, {'grey' if crop.channels == 1 else 'colour'}, {crop.interpolation}"
    sizes = [f"{size} from epoch {epoch:g}" for size, epoch in parse_sizes(recipe.data.grow_size)]
    grown = f"; trained on at {', '.join(sizes)}" if sizes else ""
    yield "images", f"{shape}{grown}; evaluated: {_describe_fit(crop, recipe, started.model.get('unseen', 0.0))}"


def _describe_fit(crop: Crop, recipe: Recipe, unseen: float) -> str:
    """Describe what evaluation sees of an image, the share of the pixels that it never sees, and other choices."""
    sides = "the shorter side" if crop.fit == "crop" else "each side"
    share = "" if crop.crop == 1 else f", {crop.crop:.3g} of {sides}"
    is_much = crop.fit == "crop" and unseen > MUCH_UNSEEN
    never = f", {percent(unseen)}{' of the pixels are' * is_much} never seen" if round(unseen, 2) else ""
    is_part, is_open = bool(share or (never and crop.fit == "crop")), recipe.data.fit is None
    fitted = {"crop": "", "squash": ", squashed", "pad": ", padded"}[crop.fit]
    more = "; --fit squash or --fit pad shows all" if is_much and is_open else ""
    if crop.fit != "crop" and is_open:
        more = ", as most are longer than 2:1 (--fit pad keeps proportions, crop takes the centre)"
    return f"{'centre' if is_part else 'whole image'}{share}{fitted}{never}{more}"


def _target_rows(recipe: Recipe, started: Started) -> Iterator[tuple[str, str]]:
    """Describe the loss, and which weights are evaluated."""
    optim, is_multi_label = recipe.optim, started.data.get("multi_label") is True
    smoothing = f"label smoothing {optim.label_smoothing:g}" if optim.label_smoothing else "no label smoothing"
    average = "no averaged weights" if optim.ema is None else f"averaged weights (EMA {optim.ema:g}) are evaluated"
    if optim.swa is not None:
        average = f"weights averaged after {percent(optim.swa)} of the run (SWA) are evaluated"
    loss = "" if optim.loss == "auto" else f"loss {clean(str(parse_loss(optim.loss)))}, "
    loss = "loss binary (each label by itself), " if is_multi_label and not loss else loss
    weights = "" if optim.class_weights == "none" else "classes weighted by N / (K n), "
    weights = "images that have a label weighted by (N - n) / n, " if weights and is_multi_label else weights
    yield "targets", f"{loss}{weights}{smoothing}; {average}"


def _machine_rows(recipe: Recipe, started: Started) -> Iterator[tuple[str, str]]:
    """Describe the number formats, the device, and what they cost."""
    precision = recipe.precision
    compiled = "" if precision.compile == "none" else f", compiled ({precision.compile})"
    graph = ", as one graph an update" if recipe.parallel.graph else ""
    layout = precision.layout.replace("-", " ")
    yield "computed", f"{precision.name} on {clean(str(started.machine['device']))}, {layout}{compiled}{graph}"
    if recipe.parallel.engine == "local":
        yield "engine", describe_averaging(recipe.parallel)
    if started.price is not None:
        price, spent = Price.from_dict(started.price), started.price.get("spent")
        before = f"; so far {money(spent)} {started.price['currency']}" if spent else ""
        yield "price", f"{price}{before}"


def describe_averaging(parallel: Parallel) -> str:
    """Describe how ranks of the local engine are averaged.

    >>> describe_averaging(Parallel(engine="local", local_from=5))
    'local: weights averaged every 32 updates, from epoch 5 on'
    """
    outer = f", DiLoCo with rate {parallel.outer_lr:g} and momentum {parallel.outer_momentum:g}"
    begin = f", from epoch {parallel.local_from:g} on" if parallel.local_from else ""
    return (
        f"local: weights averaged every {count(parallel.sync_every, 'update')}{begin}"
        f"{outer if parallel.outer == 'diloco' else ''}"
    )


def _range(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.3g}-{pair[1]:.3g}"


def _rounded(number: int) -> str:
    return f"{number / 1e6:.3g} M" if number >= 1e6 else f"{number:,}"
