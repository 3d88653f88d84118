"""``steady train``, ``steady finetune`` and ``steady demo``."""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from steadytrain.cli.console import Console, Stream, note, print_json, print_text, progress, progress_once_known
from steadytrain.cli.options import Json, TrainingOptions
from steadytrain.config import Budget, Data, Model, Optim, Parallel, Recipe, schedules
from steadytrain.config.losses import parse_loss
from steadytrain.config.phases import parse_train
from steadytrain.config.plain import leaves, plain
from steadytrain.config.recipe import ADAMS
from steadytrain.distributed.world import World, world_from_environment
from steadytrain.errors import InputError, RankLostError, SteadyError, did_you_mean, storage_error
from steadytrain.events import Ended, Noticed, Started
from steadytrain.format import clean, count, duration, percent
from steadytrain.machine.facts import accelerators
from steadytrain.machine.process import grow_segments, own_start, spin_where_alone, stop_requests
from steadytrain.run import Run

if TYPE_CHECKING:
    from steadytrain.training import Group
    from steadytrain.training.finetuning.plan import Plan
    from steadytrain.training.profile.explain import Explained

EXIT_CODES = {"finished": 0, "interrupted": 130, "preempted": 75}
TrainingData = Annotated[
    str | None, Parameter(help="A .rec file, a folder of classes, or any other source that steady pack reads.")
]


def train(data: TrainingData = None, /, *, options: TrainingOptions = TrainingOptions()) -> int:  # noqa: B008
    """Train a classifier from scratch; the same command again resumes it.

    Every value of the recipe can be set with --set: steady train --help-recipe explains all of them, and steady train
    --help-recipe optim those of one part (data, model, optim, precision, budget, parallel, every).

    Examples:
        steady train photos/
        steady train cifar10-train.rec --val cifar10-val.rec --model resnet20 --epochs 3
        steady train photos/ --procs auto
    """
    return _begin(data, options, finetune=False)


def finetune(data: TrainingData = None, /, *, options: TrainingOptions = TrainingOptions()) -> int:  # noqa: B008
    """Adapt a pretrained model to your classes; the same command again resumes it.

    Every value of the recipe can be set with --set: steady finetune --help-recipe explains all of them.

    Examples:
        steady finetune photos/
        steady finetune photos/ --model timm/mobilenetv3_large_100 --epochs 6
        steady finetune photos/ --model timm/resnet50 --weights resnet50.safetensors --train head
        steady finetune photos/ --train probe
    """
    return _begin(data, options, finetune=True)


def resume(run: Path, /, *, options: TrainingOptions = TrainingOptions()) -> int:  # noqa: B008
    """Resume a run from its newest checkpoint, as the command that began it would; what no flag names stays as it is.

    Args:
        run: The run's folder.

    Examples:
        steady resume runs/a
        steady resume runs/a --device cpu
    """
    Run.open(run)
    return _begin(None, replace(options, run=str(run)), finetune=False)


def _begin(data: str | None, options: TrainingOptions, *, finetune: bool) -> int:
    """Train as a command line says: as the rank that a launcher made this process, by ranks of its own, or alone."""
    if options.budget_minutes is not None and not finetune:
        minutes = f"{options.budget_minutes:g}"
        raise InputError(
            f"--budget-minutes belongs to steady finetune; --set budget.minutes={minutes} ends any run by the clock"
        )
    if options.explain:
        recipe, plan = _fit_minutes(recipe_for(data, options, finetune=finetune), options)
        _explain(recipe, options, plan)
        return 0
    if accelerators():  # before torch is loaded, and asks the GPU what it can do
        records_itself = options.value("precision.compile") in ("reduce-overhead", "max-autotune")
        grow_segments(recorded=records_itself or bool(options.value("parallel.graph")))
    world = world_from_environment(os.environ)
    if world.size > 1:
        # Where a network has no names for its addresses, torch says so for each connection.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        with _only_first_rank_prints(world):
            return _train_as_rank(world, data, options, finetune=finetune)
    procs = options.value("parallel.procs")
    procs = len(accelerators()) if procs == "auto" else procs
    if isinstance(procs, int) and procs > 1:
        from steadytrain.launch.supervise import keep_ranks

        restarts = options.value("parallel.restarts")
        restarts = restarts if isinstance(restarts, int) else Parallel().restarts
        return keep_ranks(sys.orig_argv, procs, restarts=restarts, say=note)
    spin_where_alone()
    draft = recipe_for(data, options, finetune=finetune)
    from steadytrain.training.defaults import default_folder  # after the data were found: it loads torch

    if options.budget_minutes is not None:  # the folder's name does not depend on what is measured
        draft = draft.with_({"budget.minutes": options.budget_minutes})
    folder = Path(options.run or default_folder(draft))
    recipe, plan = _fit_minutes(draft, options, folder)
    run = Run.create(folder, recipe)
    if plan is not None:
        with run.log_beside() as log:
            log.append(Noticed(message=plan.words))
    code = train_visibly(run, json=options.json, probe=options.probe)
    print_next_commands(run, code)
    return code


def _fit_minutes(draft: Recipe, options: TrainingOptions, folder: Path | None = None) -> tuple[Recipe, Plan | None]:
    """Fit a recipe into ``--budget-minutes``, if it was given: as the run in ``folder`` was, if there is one."""
    minutes = options.budget_minutes
    if minutes is None:
        return draft, None
    from steadytrain.training.finetuning.plan import PLANNED, plan_finetune

    chosen = {**dict(leaves(options.file_values())), **options.changes()}
    if folder is not None and (folder / "recipe.json").exists():
        before = Run.open(folder).recipe
        values = dict(leaves(draft.to_dict()))
        if before.with_({key: values[key] for key in PLANNED}).digest == draft.digest:
            note(f"{folder} was planned before: {before.model.train}, {before.budget.epochs:g} epochs")
            return before, None
    note(f"measuring this machine on the data, to fit the run into {count(minutes, 'minute')}")
    plan = plan_finetune(
        draft, minutes, chosen=chosen, began=own_start() or time.perf_counter(), allow_import=options.names_model
    )
    note(plan.words)
    return plan.recipe, plan


def _train_as_rank(world: World, data: str | None, options: TrainingOptions, *, finetune: bool) -> int:
    """Do this rank's part of a run that several train; the first one speaks."""
    if options.budget_minutes is not None:
        raise InputError("--budget-minutes measures one process: use it with one (--procs 1, and no launcher)")
    if options.probe:
        raise InputError("--probe measures one process: use it with one (--procs 1, and no launcher)")
    from steadytrain.training import init_group
    from steadytrain.training.defaults import default_folder

    with init_group(world) as group:
        recipe = group.run_first_then_rest(
            lambda: recipe_for(data, options, finetune=finetune, ranks=world.size), is_first=world.is_local_first
        )
        # All but what says on which machine each of them computes, and with how many threads.
        local = {f"parallel.{name}" for name in ("device", "threads", "compute_threads", "procs", "restarts")}
        common = {key: value for key, value in leaves(recipe.to_dict()) if key not in local}
        group.require_same("another recipe", common)
        run = group.run_first_then_rest(
            lambda: Run.create(options.run or default_folder(recipe), recipe), is_first=world.is_first
        )
        code = train_visibly(run, json=options.json, group=group)
        print_next_commands(run, code)
    return code


@contextmanager
def _only_first_rank_prints(world: World) -> Iterator[None]:
    """Silence every rank but the first. Another one says what it failed at, unless that is what they all fail at."""
    if world.is_first:
        yield
        return
    try:
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):  # noqa: PTH123
            yield
    except (InputError, RankLostError) as error:
        raise SystemExit(error.exit_code) from error
    except SteadyError as error:
        raise type(error)(f"rank {world.rank}: {error}") from error


def recipe_for(data: str | None, options: TrainingOptions, *, finetune: bool, ranks: int = 1) -> Recipe:
    """Make the recipe of a command line, with defaults that suit the data.

    Raises:
        InputError: nothing to train on, or a value that cannot be.
    """
    from steadytrain.data.sources.filenames import is_pattern
    from steadytrain.data.sources.find import require_there

    train = data or options.value("data.train")
    if train is None and options.run is not None and (Path(options.run) / "recipe.json").exists():
        return Run.open(options.run).recipe.with_(options.changes())
    if isinstance(train, str) and (Path(train) / "recipe.json").exists() and (Path(train) / "events.jsonl").exists():
        raise InputError(
            f"{train} is a run, not data: steady resume {train} (or steady train --run {train}) resumes it"
        )
    if not isinstance(train, str):
        raise InputError("name the data to train on: a folder of classes, a .rec, or whatever else steady pack takes")
    require_there(train)
    for flag, key in (("--val", "data.val"), ("--weights", "model.weights")):
        file = options.value(key)
        if isinstance(file, str) and not Path(file).exists() and not is_pattern(file):
            folder = Path(file).parent
            siblings = [path.name for path in folder.iterdir()] if folder.is_dir() else []
            near = did_you_mean(Path(file).name, siblings)
            raise InputError(f"{flag} is {file}: there is no such file or folder.{near}")
    note(f"reading {train}{_size_words(Path(train))}")  # before torch and timm are imported, which takes seconds
    from steadytrain.training.defaults import choose_recipe

    with progress_once_known("packing images", resumes=True) as advance:
        return choose_recipe(
            train,
            options.file_values(),
            options.changes(),
            finetune=finetune,
            ranks=ranks,
            require_licence=lambda recipe: require_licence(recipe.model, accepted=options.accept_licence),
            say=note,
            progress=advance,
        )


def _size_words(data: Path) -> str:
    """Word how many images and classes there are, where that is known at once; else nothing."""
    from steadytrain.data.recordio.card import card_of
    from steadytrain.data.sources.folder import count_images

    if data.is_dir():
        images, classes = count_images(data)
    elif data.suffix == ".rec" and (card := card_of(data)) is not None:
        images, classes = card.num_images, len(card.classes)
    else:
        return ""
    return f": {count(images, 'image')} in {count(classes, 'class', 'classes')}" if images and classes > 1 else ""


def require_licence(model: Model, *, accepted: bool) -> None:
    """Ask before pretrained weights of a non-commercial licence are fetched.

    Raises:
        InputError: the answer is not yes.
    """
    from steadytrain.models.registry import licence_kind, pretrained_licence

    licence = pretrained_licence(model.name) if model.pretrained else ""
    if accepted or not licence or licence_kind(licence) != "non-commercial":
        return
    about = f"the weights of {model.name} are for non-commercial use only (licence {licence})"
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(f"{about}. Use them? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise InputError(f"{about}: add --accept-licence to use them, or choose another model (steady models)")


def train_visibly(
    run: Run,
    *,
    json: bool = False,
    probe: bool = False,
    group: Group | None = None,
) -> int:
    """Train a run, or find it finished, and print its table; the exit code. Of several ranks the first one prints.

    SIGINT saves and ends with 130 (before the first step there is nothing to save, and it ends at once), SIGTERM,
    SIGUSR1 and SIGHUP save and end with 75: the same command goes on from there.
    """
    from steadytrain.reports import summarise, tables
    from steadytrain.training import steps

    before = run.progress()
    is_finished, is_first = before.finished is not None, group is None or group.world.is_first
    if group is not None:
        is_finished = group.all_gather_json(is_finished)[0]
    code = 0
    if not is_finished:
        console: AbstractContextManager[Console | None]
        console = Console(best=before.best, epochs=run.recipe.budget.epochs) if is_first else nullcontext()
        with console as shown, stop_requests(note) as stop:
            stop.saves = False  # while data and model are opened
            for event in steps(
                run,
                stop=stop,
                began=own_start(),
                probe=probe,
                group=group,
            ):
                stop.saves = True
                if shown is not None:
                    shown.show(event)
                    if isinstance(event, Started):
                        for line in head_lines(run.recipe, event):
                            note(line)
                if isinstance(event, Ended):
                    code = EXIT_CODES[event.status]
    if not is_first:
        return code
    if is_finished:
        note(f"{run.directory} is finished; to train again, change the recipe or name another --run folder")
    else:
        _print_verdict(run)
    summaries = [summarise(run)]
    print_text(tables.to_json(summaries) if json else tables.to_text(summaries))
    sys.stdout.flush()
    return code


def _print_verdict(run: Run) -> None:
    """Print what held a run back on standard error: in words on a terminal, else as a line."""
    from steadytrain.monitor import diagnose, read_history
    from steadytrain.monitor.evidence import gather_evidence
    from steadytrain.reports.verdict import verdict_brief, verdict_line

    try:
        first = diagnose(gather_evidence(read_history(run, condensed=True))).causes[0]
    except Exception as error:  # noqa: BLE001 - whatever a log holds, the run is well, and its end is told next
        note(f"no verdict: {error}")
        return
    for line in verdict_brief(first) if Stream(sys.stderr).isatty() else [verdict_line(first)]:
        note(line)


def print_next_commands(run: Run, code: int, *, image: Path | None = None) -> None:
    """Say what to type next: commands to copy, ``image`` in the one that wants some."""
    if code:
        note(f"saved; to resume: steady resume {shlex.quote(str(run.directory))}, or the same command again")
        return
    note("next:")
    folder = shlex.quote(str(run.directory))
    images = "IMAGE..." if image is None else shlex.quote(str(image))
    for words in (f"evaluate {folder}", f"predict {folder} {images}", f"report {folder} -o report.html"):
        note(f"  steady {words}")


def _explain(recipe: Recipe, options: TrainingOptions, plan: Plan | None = None) -> None:
    """Print what the recipe comes down to; nothing is trained, and no run is made."""
    from steadytrain.training.profile.explain import explain

    explained = explain(recipe, allow_import=options.names_model)
    if options.json:
        values = {name: value for name, value in plain(explained).items() if name != "started"}
        planned = {} if plan is None else {"plan": {**plain(plan), "recipe": None, "why": plan.words}}
        print_json({"recipe": recipe.to_dict(), **values, **planned})
    else:
        lines = [] if plan is None else [line for row in _plan_rows(plan) for line in _row(*row)]
        print_text("\n".join([*lines, *_explained_lines(recipe, explained)]))


def _plan_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """Word what was chosen, and each option with what it takes."""
    yield "budget", plan.words
    for option in plan.options:
        passes = f"{duration(option.pass_seconds)} for the probe" if option.pass_seconds else ""
        epochs = f"{duration(option.epoch_seconds)} an epoch" if option.epoch_seconds else ""
        fitting = f", {option.epochs} fit" if option.epochs else ""
        yield "", f"{option.verdict:<9} {option.train}: {', '.join(filter(None, (passes, epochs)))}{fitting}"


def _explained_lines(recipe: Recipe, explained: Explained) -> Iterator[str]:
    """Yield all that was chosen, then remarks, then counts of parameters and operations."""
    yield from head_lines(recipe, explained.started)
    if explained.recomputed is not None:
        yield from _row("recomputed", clean(str(explained.recomputed)))
    for remark in explained.notes:
        yield from _row("note", clean(remark))
    stored = ", ".join(f"{numbers} {count:,}" for numbers, count in explained.stored.items())
    twins = f"; {explained.masters:,} parameters with fp32 masters for the optimizer" if explained.masters else ""
    yield from _row("stored as", f"{stored}{twins}")
    for numbers, counts in sorted(explained.operations.items(), key=lambda item: -sum(item[1].values())):
        shown = ", ".join(f"{name} x {n}" for name, n in sorted(counts.items(), key=lambda item: -item[1]))
        yield from _row(f"in {numbers}", shown)
    if explained.conversions:
        yield from _row("conversions", f"{explained.conversions} in a forward pass")


LINE, LABEL = 80, 14
"""Columns of a line of a run's head, and of its label."""


def _row(label: str, words: str) -> list[str]:
    return textwrap.wrap(
        words, LINE, initial_indent=f"{label:<{LABEL}}", subsequent_indent=" " * LABEL, break_long_words=False
    )


def head_lines(recipe: Recipe, started: Started) -> list[str]:
    """Word all that was chosen for a run, by the user or by default, in lines of :data:`LINE` columns."""
    from steadytrain.data.loader.crop import crop_for

    optim, model, precision = recipe.optim, started.model, recipe.precision
    rows: list[tuple[str, str]] = []
    data, input = started.data, started.model["input"]
    source = "held out" if data["held_out"] else Path(data["val"] or "").name
    val = f"{data['num_val']:,} to evaluate ({clean(source)})" if data["num_val"] else "no validation data"
    rows.append(("data", f"{data['num_train']:,} to train on, {val}, {len(data['classes']):,} classes"))
    frozen = model["parameters"] - model["trainable"]
    pretrained = ", pretrained" if recipe.model.pretrained else ", from a weights file" if recipe.model.weights else ""
    rows.append(
        (
            "model",
            f"{clean(str(model['name']))}{pretrained}: {_rounded(model['parameters'])} parameters"
            f"{f', {_rounded(frozen)} of them frozen' if frozen else ''}",
        )
    )
    plan = parse_train(recipe.model.train)
    train = plan.words
    if plan.main in ("discriminative", "gradual"):
        train += f", rate x {recipe.model.decay:g} a layer downwards"
    if recipe.model.freeze:
        train += f"; frozen: {clean(', '.join(recipe.model.freeze))}"
    norms = {"train": "", "synchronous": ", batch norms synchronous", "frozen": ", batch norms frozen"}
    rows.append(("trained", f"{train}{norms[recipe.model.batch_norm]}"))
    parts = "" if optim.accumulate == 1 else f" in {optim.accumulate} micro-batches"
    passes = recipe.budget.epochs or started.steps / started.steps_per_epoch
    epochs = f"{passes:.4g} {'epoch' if passes == 1 else 'epochs'}"
    rows.append(
        (
            "updates",
            f"{started.steps:,} of {started.batch_size} images{parts}: {epochs} of"
            f" {started.steps_per_epoch:.4g} updates",
        )
    )
    constants = {
        "sgd": f"{'Nesterov ' * optim.nesterov}momentum {optim.momentum:g}",
        "nag": f"momentum {optim.momentum:g}",
        **dict.fromkeys(ADAMS, f"betas {optim.betas[0]:g} and {optim.betas[1]:g}"),
    }.get(optim.name, "")
    options = ", ".join(f"{name} {value}" for name, value in optim.options.items())
    optimizer = ", ".join(filter(None, (optim.name, constants, options)))
    clipped = "no clipping" if optim.clip_norm is None else f"gradients clipped at norm {optim.clip_norm:g}"
    rows.append(("optimizer", f"{optimizer}, weight decay {optim.weight_decay:g}, {clipped}"))
    scaled = f" = {optim.lr:g} x {recipe.batch_size}/{optim.base_batch_size}" if optim.base_batch_size else ""
    peak = optim.scaled_lr(recipe.batch_size)
    rows.append(("learning rate", f"{peak:.4g}{scaled}, {schedules.words(optim, peak)}"))
    crop = crop_for(
        recipe.data,
        largest=data["largest_side"],
        size=input["size"],
        crop=input["crop"],
        interpolation=input["interpolation"],
        channels=input["channels"],
    )
    cuts = {
        "resized-crop": f"resized-crop (area {_range(crop.area)}, ratio {_range(crop.ratio)})",
        "pad-crop": f"pad-crop ({count(crop.pad, 'pixel')})",
        "none": "no random crop",
    }[crop.kind]
    flips = "alternating flips" if crop.flip == "alternating" else "flips" if crop.flip else "no flips"
    transforms = "".join(f", {transform}" for transform in recipe.data.transforms)
    if recipe.data.balance != "none":
        rows.append(("order", "all classes equally often: images of rare ones several times an epoch"))
    rows.append(("augmentation", f"{cuts}, {flips}{transforms}"))
    shape = f"{crop.size}x{crop.size} pixels, {'grey' if crop.channels == 1 else 'colour'}, {crop.interpolation}"
    part = "" if crop.crop == 1 else f", {crop.crop:.3g} of the shorter side"
    rows.append(("images", f"{shape}; evaluated: the centre square{part}"))
    smoothing = f"label smoothing {optim.label_smoothing:g}" if optim.label_smoothing else "no label smoothing"
    average = "no averaged weights" if optim.ema is None else f"averaged weights (EMA {optim.ema:g}) are evaluated"
    if optim.swa is not None:
        average = f"weights averaged after {percent(optim.swa)} of the run (SWA) are evaluated"
    loss = "" if optim.loss == "auto" else f"loss {clean(str(parse_loss(optim.loss)))}, "
    weights = "" if optim.class_weights == "none" else "classes weighted by N / (K n), "
    rows.append(("targets", f"{loss}{weights}{smoothing}; {average}"))
    compiled = "" if precision.compile == "none" else f", compiled ({precision.compile})"
    graph = ", as one graph an update" if recipe.parallel.graph else ""
    layout = precision.layout.replace("-", " ")
    rows.append(("computed", f"{precision.name} on {clean(str(started.machine['device']))}, {layout}{compiled}{graph}"))
    if not started.steps:  # a probe alone
        unused = ("updates", "optimizer", "learning rate", "targets", *("augmentation",) * (plan.probe_passes == 1))
        rows = [row for row in rows if row[0] not in unused]
    return [line for label, words in rows for line in _row(label, words)]


def _range(pair: tuple[float, float]) -> str:
    return f"{pair[0]:.3g}-{pair[1]:.3g}"


def _rounded(number: int) -> str:
    return f"{number / 1e6:.3g} M" if number >= 1e6 else f"{number:,}"


def demo(
    folder: Path = Path("steady-demo"),
    /,
    *,
    seed: int = 0,
    json: Json = False,
) -> int:
    """Pack, train, evaluate and report 1,797 handwritten digits: no network, no data, half a minute.

    The scans come with scikit-learn (Alpaydin and Kaynak 1998, at 8 x 8 pixels).

    Args:
        folder: Where everything is written.
        seed: Of initialisation, order and augmentation.

    Examples:
        steady demo
        steady demo elsewhere/ --seed 1
    """
    from steadytrain.data.packing.pack import pack
    from steadytrain.reports import report

    ours = {"images", "digits.rec", "digits.idx", "digits.json", "digits.lst", "runs", "report.html"}
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: name a folder for the demo")
    others = [path.name for path in folder.iterdir() if path.name not in ours] if folder.is_dir() else []
    if others:  # do not write among somebody's photographs
        raise InputError(f"{folder} holds other files ({min(others)}): name a new folder for the demo")
    spin_where_alone()
    rec = folder / "digits.rec"
    if not rec.exists():
        images = _write_digits(folder / "images")
        with progress("packing", len(list(images.glob("*/*.png")))) as advance:
            pack(images, folder / "digits", progress=advance)
        note(f"packed {images} into {rec}")
    recipe = Recipe(
        data=Data(train=str(rec), pad=1, holdout=0.2),
        model=Model("digits"),
        optim=Optim("sgd", lr=0.1, weight_decay=5e-4, warmup_epochs=1),
        budget=Budget(epochs=20),
        batch_size=64,
        seed=seed,
    )
    run = Run.create(folder / "runs" / (f"digits-seed-{seed}" if seed else "digits"), recipe)
    code = train_visibly(run, json=json)
    if code == 0:
        note(f"wrote {report([run], folder / 'report.html')}")
    print_next_commands(run, code, image=folder / "images" / "3" / "0003.png")
    return code


def _write_digits(folder: Path) -> Path:
    """Write the scans as grey PNG files, a folder for each digit."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError(
            "steady demo takes its images from scikit-learn, which is missing: pip install scikit-learn"
        ) from None
    import numpy as np
    from PIL import Image

    digits = load_digits()
    try:
        for i, (pixels, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
            path = folder / str(digit) / f"{i:04d}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            grey = np.round(pixels * (255 / 16)).astype(np.uint8)  # the scans count ink from 0 to 16
            Image.fromarray(grey).save(path)
    except OSError as error:
        raise storage_error(error, folder) from error
    return folder
