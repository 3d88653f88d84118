"""``steady train``, ``steady finetune`` and ``steady demo``."""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from steadytrain.cli.console import Console, Stream, note, print_json, progress, progress_once_known
from steadytrain.cli.options import Json, TrainingOptions
from steadytrain.config import Budget, Data, Model, Optim, Parallel, Recipe
from steadytrain.config.plain import leaves, plain
from steadytrain.distributed.world import World, world_from_environment
from steadytrain.errors import InputError, RankLostError, SteadyError, did_you_mean, storage_error
from steadytrain.events import Ended, Started
from steadytrain.format import clean
from steadytrain.machine.facts import accelerators
from steadytrain.machine.process import grow_segments, own_start, spin_where_alone, stop_requests
from steadytrain.run import Run

if TYPE_CHECKING:
    from steadytrain.training import Group
    from steadytrain.training.data import Facts
    from steadytrain.training.profile.explain import Explained

EXIT_CODES = {"finished": 0, "interrupted": 130, "preempted": 75}
TrainingData = Annotated[str | None, Parameter(help="A .rec, or whatever steady pack takes.")]


def train(data: TrainingData = None, /, *, options: TrainingOptions = TrainingOptions()) -> int:  # noqa: B008
    """Train a classifier from scratch; the same command again resumes it.

    Examples:
        steady train photos/
        steady train cifar10-train.rec --val cifar10-val.rec --model resnet20 --epochs 3
        steady train photos/ --procs auto
    """
    return _begin(data, options, finetune=False)


def finetune(data: TrainingData = None, /, *, options: TrainingOptions = TrainingOptions()) -> int:  # noqa: B008
    """Adapt a pretrained model to your classes; the same command again resumes it.

    Examples:
        steady finetune photos/ --model timm/mobilenetv3_large_100 --epochs 6
        steady finetune photos/ --model timm/resnet50 --weights resnet50.safetensors --set model.train=head
    """
    return _begin(data, options, finetune=True)


def resume(run: Path, /, *, options: TrainingOptions = TrainingOptions()) -> int:  # noqa: B008
    """Go on with a run from its newest checkpoint, as the command that began it would.

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
    if options.explain:
        _explain(recipe_for(data, options, finetune=finetune), options)
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
    recipe = recipe_for(data, options, finetune=finetune)
    run = Run.create(_run_folder(recipe, options.run), recipe)
    code = train_visibly(run, json=options.json, allow_import=options.names_model, probe=options.probe)
    print_next_commands(run, code)
    return code


def _train_as_rank(world: World, data: str | None, options: TrainingOptions, *, finetune: bool) -> int:
    """Do this rank's part of a run that several train; the first one speaks."""
    if options.probe:
        raise InputError("--probe measures one process: use it with one (--procs 1, and no launcher)")
    from steadytrain.training import init_group

    with init_group(world) as group:
        recipe = group.run_first_then_rest(
            lambda: recipe_for(data, options, finetune=finetune, ranks=world.size), is_first=world.is_local_first
        )
        # All but what says on which machine each of them computes, and with how many threads.
        local = {f"parallel.{name}" for name in ("device", "threads", "compute_threads", "procs", "restarts")}
        common = {key: value for key, value in leaves(recipe.to_dict()) if key not in local}
        group.require_same("another recipe", common)
        run = group.run_first_then_rest(
            lambda: Run.create(_run_folder(recipe, options.run), recipe), is_first=world.is_first
        )
        code = train_visibly(run, json=options.json, allow_import=options.names_model, group=group)
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
    """Make the recipe of a command line, with defaults that suit the data: a folder is packed for that.

    What can be wrong without the data is found before they are packed, which may take an hour.

    Raises:
        InputError: nothing to train on, or a value that cannot be.
    """
    from steadytrain.data.sources.filenames import is_pattern
    from steadytrain.data.sources.find import require_there

    train = data or options.value("data.train")
    if train is None and options.run is not None and (Path(options.run) / "recipe.json").exists():
        return Run.open(options.run).recipe.with_(options.changes())
    if isinstance(train, str) and (Path(train) / "recipe.json").exists() and (Path(train) / "events.jsonl").exists():
        raise InputError(f"{train} is a run, not data: steady resume {train} (or steady train --run {train}) goes on")
    if not isinstance(train, str):
        raise InputError("name the data to train on: a folder of classes, a .rec, or whatever else steady pack takes")
    # photos/ and ./photos are photos, and give the same run
    train = train if "://" in train else str(Path(train))
    require_there(train)  # what takes seconds to import comes after
    for flag, key in (("--val", "data.val"), ("--weights", "model.weights")):
        file = options.value(key)
        if isinstance(file, str) and not Path(file).exists() and not is_pattern(file):
            folder = Path(file).parent
            siblings = [path.name for path in folder.iterdir()] if folder.is_dir() else []
            near = did_you_mean(Path(file).name, siblings)
            raise InputError(f"{flag} is {file}: there is nothing of that name.{near}")

    from steadytrain.models.registry import find
    from steadytrain.training.data import Facts, default_recipe, fit_defaults, look

    def recipe(facts: Facts) -> Recipe:
        defaults = default_recipe(train, facts, model=options.value("model.name"), finetune=finetune)
        whole = options.recipe_over(defaults).with_({"data.train": train})
        chosen = {key for key in ("batch_size", "optim.warmup_epochs") if options.value(key) is not None}
        return fit_defaults(whole, facts, chosen=chosen, ranks=ranks)

    draft = recipe(Facts(num_images=10**6, num_classes=2, channels=3, largest_side=1))
    find(draft.model.name, allow_import=options.names_model)
    _require_licence(draft, accepted=options.accept_licence)
    with progress_once_known("packing images", resumes=True) as advance:
        return recipe(look(draft.data, say=note, progress=advance))


def _require_licence(recipe: Recipe, *, accepted: bool) -> None:
    """Ask before weights of a non-commercial licence are fetched. Raises InputError where the answer is not yes."""
    from steadytrain.models.registry import licence_kind, pretrained_licence

    licence = pretrained_licence(recipe.model.name) if recipe.model.pretrained else ""
    if accepted or not licence or licence_kind(licence) != "non-commercial":
        return
    about = f"the weights of {recipe.model.name} are for non-commercial use only (licence {licence})"
    if sys.stdin.isatty() and sys.stderr.isatty():
        print(f"{about}. Use them? [y/N] ", end="", file=sys.stderr, flush=True)
        if sys.stdin.readline().strip().lower() in ("y", "yes"):
            return
    raise InputError(f"{about}: add --accept-licence to use them, or choose another model (steady models)")


def _run_folder(recipe: Recipe, named: str | None) -> Path:
    """Return ``--run``, or a name made of the model, the data and the recipe's digest under ``runs/``."""
    if named is not None:
        return Path(named)
    model = recipe.model.name.rsplit("/", 1)[-1].rsplit(":", 1)[-1]
    data = Path(recipe.data.train)
    data = data.resolve() if data.name in ("", "..") else data
    stem = re.sub(r"[][*?{},]+", "_", data.stem)  # several files by one name
    return Path("runs") / f"{model}-{stem}-{recipe.digest[:8]}"


def train_visibly(
    run: Run,
    *,
    json: bool = False,
    allow_import: bool = False,
    probe: bool = False,
    group: Group | None = None,
) -> int:
    """Train a run, or find it finished, and print its table; the exit code. Of several ranks the first one prints.

    SIGINT saves and ends with 130 (before the first step there is nothing to save, and it ends at once), SIGTERM and
    SIGUSR1 save and end with 75: the same command goes on from there.
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
                allow_import=allow_import,
                began=own_start(),
                probe=probe,
                group=group,
            ):
                stop.saves = True
                if shown is not None:
                    shown.show(event)
                    if isinstance(event, Started):
                        for label, words in _chosen_rows(run.recipe):
                            note(f"  {label:<13}{words}")
                if isinstance(event, Ended):
                    code = EXIT_CODES[event.status]
    if not is_first:
        return code
    if is_finished:
        note(f"{run.directory} is finished: to train anew, change the recipe or the run folder")
    else:
        _print_verdict(run)
    summaries = [summarise(run)]
    print(tables.to_json(summaries) if json else tables.to_text(summaries))
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
        note(f"saved; to go on, run the same command again ({run.directory})")
        return
    note("next:")
    folder = shlex.quote(str(run.directory))
    images = "IMAGE..." if image is None else shlex.quote(str(image))
    for words in (f"evaluate {folder}", f"predict {folder} {images}", f"report {folder} -o report.html"):
        note(f"  steady {words}")


def _explain(recipe: Recipe, options: TrainingOptions) -> None:
    """Print what the recipe comes down to; nothing is trained, and no run is made."""
    from steadytrain.training.profile.explain import explain

    explained = explain(recipe, allow_import=options.names_model)
    if options.json:
        print_json({"recipe": recipe.to_dict(), **plain(explained)})
    else:
        for label, words in _explained_rows(recipe, explained):
            print(f"{label:<13}{words}")


def _explained_rows(recipe: Recipe, explained: Explained) -> Iterator[tuple[str, str]]:
    optim, precision = recipe.optim, recipe.precision
    num_train, num_val, classes = explained.num_train, explained.num_val, explained.classes
    yield "recipe", explained.digest
    yield "data", f"{num_train:,} images to train on, {num_val:,} to evaluate, {classes:,} classes"
    shape = f"{explained.channels}x{explained.size}x{explained.size}"
    is_whole = explained.trained == explained.parameters
    trained = "all of them trained" if is_whole else f"{explained.trained:,} trained"
    yield "model", f"{clean(explained.model)}: {explained.parameters:,} parameters, {trained}; images {shape}"
    parts = "" if optim.accumulate == 1 else f" in {optim.accumulate} micro-batches"
    yield "updates", f"{explained.steps:,} of {recipe.batch_size}{parts}, {explained.steps_per_epoch:.4g} an epoch"
    yield from _chosen_rows(recipe)
    compiled = "" if precision.compile == "none" else f", compiled ({precision.compile})"
    graph = ", as one graph an update" if recipe.parallel.graph else ""
    layout = precision.layout.replace("-", " ")
    yield "computed", f"{precision.name} on {clean(explained.device)}, {layout}{compiled}{graph}"
    if explained.recomputed is not None:
        yield "recomputed", clean(str(explained.recomputed))
    for remark in explained.notes:
        yield "note", clean(remark)
    stored = ", ".join(f"{numbers} {count:,}" for numbers, count in explained.stored.items())
    twins = f"; {explained.masters:,} parameters with fp32 twins for the optimizer" if explained.masters else ""
    yield "kept as", f"{stored}{twins}"
    for numbers, counts in sorted(explained.operations.items(), key=lambda item: -sum(item[1].values())):
        yield (
            f"in {numbers}",
            ", ".join(f"{name} x {n}" for name, n in sorted(counts.items(), key=lambda item: -item[1])),
        )
    if explained.conversions:
        yield "conversions", f"{explained.conversions} in a forward pass"


def _chosen_rows(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Yield how the weights are updated, from which images and towards what: defaults and choices alike."""
    optim, data, model = recipe.optim, recipe.data, recipe.model
    constants = (
        f"momentum {optim.momentum:g}" if optim.name == "sgd" else f"betas {optim.betas[0]:g} {optim.betas[1]:g}"
    )
    clipped = "" if optim.clip_norm is None else f", gradients clipped at {optim.clip_norm:g}"
    yield "optimizer", f"{optim.name}, {constants}, weight decay {optim.weight_decay:g}{clipped}"
    scaled = f" = {optim.lr:g} x {recipe.batch_size} / {optim.base_batch_size} (batch)" if optim.base_batch_size else ""
    shape = {
        "step": f"step: x {optim.factor:g} at epochs {', '.join(f'{epoch:g}' for epoch in optim.milestones)}",
        "poly": f"poly of power {optim.power:g} to {optim.final:g} of it",
        "cosine": f"cosine to {optim.final:g} of it",
    }.get(optim.schedule, optim.schedule)
    warm_up = f"warm-up of {optim.warmup_epochs:.3g} epochs" if optim.warmup_epochs else "no warm-up"
    peak = optim.scaled_lr(recipe.batch_size)
    yield "schedule", f"peak learning rate {peak:g}{scaled}, {warm_up}, {shape}"
    crops = {
        "auto": "pad-crop up to 64 pixels, else resized-crop",
        "resized-crop": f"resized-crop of {data.area[0]:g} to {data.area[1]:g} of the area",
        "pad-crop": f"pad-crop by {data.pad} pixels",
        "none": "no crop",
    }[data.augment]
    flip = {None: "flips of coloured images", True: "flips", False: "no flips"}[data.flip]
    smoothing = f"label smoothing {optim.label_smoothing:g}" if optim.label_smoothing else "no label smoothing"
    yield "augmentation", f"{crops}, {flip}, {smoothing}"
    trained = {"full": "all parameters", "head": "the classifier alone: all else is frozen"}
    layers = f"all parameters, at rates x {model.decay:g} a layer downwards"
    average = "no averaged weights" if optim.ema is None else f"averaged weights (EMA {optim.ema:g}) are evaluated"
    yield "trained", f"{trained.get(model.train, layers)}; batch norms: {model.batch_norm}; {average}"


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
