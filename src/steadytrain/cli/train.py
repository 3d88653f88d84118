"""``steady train``, ``steady finetune`` and ``steady resume``."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    ExitStack,
    contextmanager,
    nullcontext,
    redirect_stderr,
    redirect_stdout,
    suppress,
)
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from cyclopts.validators import Number

from steadytrain.cli.console import Console, TerminalStream, confirmed, note, print_text, progress_once_known, status
from steadytrain.cli.explain import brief_lines, head_lines, print_explained
from steadytrain.cli.options import HEADINGS, TrainingOptions, require_trackers
from steadytrain.config import Model, Parallel, Recipe
from steadytrain.config.defaults import usual_recipe
from steadytrain.config.parts import listed_gpus
from steadytrain.config.plain import leaves
from steadytrain.config.recipe import recipe_settings
from steadytrain.config.settings import OUTPUT
from steadytrain.config.strangers import ADDRESS_KEYS, outside_notice
from steadytrain.cost.prices import known_price
from steadytrain.distributed.world import World, world_from_environment
from steadytrain.errors import InputError, RankLostError, RecipeError, RunError, SteadyError, StorageError
from steadytrain.events import Ended, Evaluated, Noticed, Started
from steadytrain.files import Closing, near_name, remove_left
from steadytrain.format import Say, count
from steadytrain.interop.mxnet.speedometer import Speedometer
from steadytrain.machine.facts import accelerators, cores
from steadytrain.machine.process import grow_segments, own_start, spin_where_alone, stop_requests
from steadytrain.run import REPEAT, Run

if TYPE_CHECKING:
    from steadytrain.distributed.peers import Peers
    from steadytrain.training import Group
    from steadytrain.training.data import OpenedData
    from steadytrain.training.finetuning.plan import FinetunePlan

AUTO_SECONDS = 60.0
"""Seconds that ``--batch-size auto`` and its like may take."""

_COUNTS = 0.1
"""Seconds after a run's end that are added to its account."""

MOST_RANKS_A_CORE = 4
"""Ranks for each core that a file may ask for: each takes some hundred megabytes before it has read an image."""
EXIT_CODES = {"finished": 0, "interrupted": 130, "preempted": 75}
Until = Annotated[
    float | None,
    Parameter(
        help="Stop after the evaluation at this epoch, saved (exit code 75); the same command without it continues.",
        validator=Number(gt=0),
    ),
    HEADINGS[OUTPUT],
]
TrainingData = Annotated[
    str | None,
    Parameter(
        help="A .rec file, a folder of classes, or any other source that steady pack reads. "
        "[required, unless --recipe or --run has it]"
    ),
]


def train(
    data: TrainingData = None,
    /,
    *,
    until: Until = None,
    options: TrainingOptions = TrainingOptions(),  # noqa: B008
) -> int:
    """Train a classifier from scratch; the same command again resumes it.

    Every value of the recipe can be set with --set: steady train --help-recipe explains all of them, and steady train
    --help-recipe optim those of one part (data, model, optim, precision, budget, parallel, every).

    Examples:
        steady train photos/
        steady train cifar10-train.rec --val cifar10-test.rec --model resnet20 --epochs 3
        steady train photos/ --procs auto
    """
    return _begin(data, options, finetune=False, until=until)


def finetune(
    data: TrainingData = None,
    /,
    *,
    until: Until = None,
    options: TrainingOptions = TrainingOptions(),  # noqa: B008
) -> int:
    """Adapt a pretrained model to your classes; the same command again resumes it.

    Every value of the recipe can be set with --set: steady finetune --help-recipe explains all of them.

    Examples:
        steady finetune photos/
        steady finetune photos/ --model timm/mobilenetv3_large_100 --epochs 6
        steady finetune photos/ --model timm/resnet50 --weights resnet50.safetensors --train head
        steady finetune photos/ --train probe
    """
    return _begin(data, options, finetune=True, until=until)


def resume(run: str, /, *, until: Until = None, options: TrainingOptions = TrainingOptions()) -> int:  # noqa: B008
    """Resume a run from its newest checkpoint, as the command that began it would.

    A flag left out keeps the run's value.

    Args:
        run: The run's folder, or the URI that it is kept at (docs: storage).

    Examples:
        steady resume runs/a
        steady resume runs/a --device cpu
        steady resume s3://bucket/runs/a
    """
    from steadytrain.data.storage.store import is_uri

    if not is_uri(run):
        Run.open(run).require_trainable()
    if options.run is not None:
        raise InputError(f"steady resume {run} continues in that folder: leave out --run {options.run}")
    return _begin(None, replace(options, run=run), finetune=False, until=until, exists=True)


def _kept_at_uri(options: TrainingOptions, *, exists: bool) -> TrainingOptions:
    """Replace a ``--run`` that is a URI by a folder on this machine, fetched if missing and uploaded during training.

    Raises:
        RunError: ``exists``, and there is none.
    """
    from steadytrain.data.storage.runs import local_run

    uri = str(options.run)
    if options.repeats is not None:
        raise InputError(f"--repeats has several runs, and --run {uri} keeps one: give --run FOLDER")
    folder = local_run(uri, note)
    if exists and not folder.exists():
        raise RunError(f"there is no run at {uri}: check the URI, or begin one with steady train DATA --run {uri}")
    return replace(options, run=str(folder), set=(*options.set, f"every.upload={uri}"))


def _begin(
    data: str | None, options: TrainingOptions, *, finetune: bool, until: float | None, exists: bool = False
) -> int:
    """Train as the command line says: as a rank that a launcher started, by starting ranks, or in this process.

    ``exists``: raise an error if ``--run`` is a URI without a run.
    """
    if options.run is not None:
        from steadytrain.data.storage.store import local_name

        local_name(options.run)  # refuses a URI with a mistake
        if "://" in options.run:
            options = _kept_at_uri(options, exists=exists)
    if options.budget_minutes is not None and not finetune:
        minutes = f"{options.budget_minutes:g}"
        raise InputError(
            f"--budget-minutes belongs to steady finetune; --set budget.minutes={minutes} ends any run by the clock"
        )
    if options.fetch_models and options.budget_minutes is None:
        raise InputError("--fetch-models is for the comparison of networks: give --budget-minutes N with it")
    require_trackers(options)
    world = world_from_environment(os.environ)
    if options.explain:
        ranks = ranks_of_batch(data, options, world)
        with open_draft(data, options, finetune=finetune, ranks=ranks) as draft:
            recipe = draft.recipe
        recipe, plan = _fit_minutes(_tuned(recipe, options), options)
        print_explained(recipe, options, plan, ranks=ranks)
        return 0
    if accelerators():  # before torch is loaded, and asks the GPU what it can do
        records_itself = options.value("precision.compile") in ("reduce-overhead", "max-autotune")
        grow_segments(recorded=records_itself or bool(options.value("parallel.graph")))
    if _parallel(data, options, "engine") == "async":
        return _train_with_server(world, data, options, finetune=finetune, until=until)
    if world.size > 1:
        # Where a network has no names for its addresses, torch says so for each connection.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        with _only_first_rank_prints(world):
            return _train_as_rank(world, data, options, finetune=finetune, until=until)
    procs = num_procs(data, options, world)
    if procs > 1:
        from steadytrain.launch.supervise import keep_ranks

        require_cores(procs, options)
        restarts = options.value("parallel.restarts")
        restarts = restarts if isinstance(restarts, int) else Parallel().restarts
        note(f"starting {procs} ranks, which load torch")
        return keep_ranks(sys.orig_argv, procs, restarts=restarts, say=note)
    spin_where_alone()
    require_device(options)
    with open_draft(data, options, finetune=finetune) as drafted:
        return _train_alone(drafted, options, until=until)


def _train_alone(drafted: DraftRun, options: TrainingOptions, *, until: float | None) -> int:
    """Train in this process."""
    draft, folder = drafted.recipe, drafted.folder
    if options.measured:
        draft = _tuned(draft, options)
        folder = folder if options.measured == {"parallel.threads"} else _folder(draft, options)
    if options.budget_minutes is not None:  # the folder's name does not depend on what is measured
        draft = draft.with_({"budget.minutes": options.budget_minutes})
        folder = _folder(draft, options)
    # What is planned for the first of several repeats holds for all.
    recipe, plan = _fit_minutes(draft, options, folder if options.repeats is None else folder / f"{REPEAT}{draft.seed}")
    runs = _create_runs(folder, recipe, options)
    _note_fewer_ranks(runs[0], options)
    if plan is not None:
        with runs[0].log_beside() as log:
            for event in (*plan.tried, Noticed(message=plan.words)):
                log.append(event)
    return _train_all(runs, options, opened=drafted.opened, until=until)


def _is_fresh(path: Path, weights: Path) -> bool:
    """Return whether a file that was made of weights is at least as new as these are."""
    with suppress(OSError):  # not made yet
        return path.stat().st_mtime >= weights.stat().st_mtime
    return False


def _measure_limits(run: Run) -> bool:
    """Measure which images are unlike the training images, where that costs little; return whether it was tried."""
    best = run.directory / "best.safetensors"
    if _is_fresh(best.with_name("best.limits.safetensors"), best):
        return False
    from steadytrain.training.features.held_out import is_cheap, make_limits

    if not is_cheap(run):
        return False
    try:
        with status("limits"), progress_once_known("features", resumes=True) as advance:
            make_limits(run, progress=advance, say=note)
    except SteadyError as error:  # the run is whole without
        note(f"it is not known which images are unlike the training images: {error}")
    else:
        note("predict and serve mark images that are unlike the training images")
    return True


def _map_mistakes(run: Run) -> bool:
    """Draw which places of a run's worst mistakes spoke for the class, where that costs little; return as above."""
    if _is_fresh(run.maps, run.directory / "best.safetensors"):
        return False
    from steadytrain.training.features.held_out import CHEAP_SECONDS, CHEAP_SHARE
    from steadytrain.training.inference.heat_maps import MOST_MISTAKES, PASSES, map_mistakes

    progress = run.progress()
    if (evaluated := progress.evaluated) is None or (ended := progress.ended) is None or not evaluated.n:
        return False
    allowed = max(CHEAP_SECONDS, CHEAP_SHARE * ended.seconds)
    if MOST_MISTAKES * PASSES * evaluated.seconds / evaluated.n > allowed:
        return False
    with suppress(SteadyError), status("drawing what spoke for the mistakes"):  # the run is whole without
        map_mistakes(run, seconds=allowed)
    return True


def require_device(options: TrainingOptions, world: World = World()) -> None:  # noqa: B008 - frozen
    """Refuse a GPU that is not here before data are read. Raises RecipeError."""
    if (device := options.value("parallel.device")) not in (None, "auto", "cpu"):
        from steadytrain.training.device import choose_device

        choose_device(str(device), world)


def num_procs(data: str | None, options: TrainingOptions, world: World = World()) -> int:  # noqa: B008 - frozen
    """Return how many ranks to start: by the flags, else as many as the run that is resumed was begun with."""
    procs, device = options.value("parallel.procs"), options.value("parallel.device")
    if isinstance(procs, int):  # before so many are started
        recipe_settings()["parallel.procs"].refuse_beyond_limit("parallel.procs", procs)
    begun = options.begun_run() if data is None else None
    is_the_same = begun is not None and options.value("data.train") is None and not world.launcher
    recorded = begun.recipe.parallel if begun is not None and is_the_same else Parallel()
    device = device if isinstance(device, str) else recorded.device
    if procs is None and device == recorded.device:
        procs = recorded.procs
    if procs is None or procs == "auto":
        procs = len(listed_gpus(device)) or (1 if procs is None else len(accelerators()))
    if begun is not None and procs > 1 and options.value("parallel.procs") is None:
        note(f"{options.run}: {procs} ranks, as it was started with (--procs changes that)")
    return int(procs)


def require_cores(procs: int, options: TrainingOptions) -> None:
    """Refuse to start more ranks than this machine has room for, where only a file asks for them. Raises InputError."""
    if procs <= MOST_RANKS_A_CORE * max(cores(), len(accelerators())):
        return
    if not options.changes.keys() & {"parallel.procs", "parallel.device"}:
        raise InputError(
            f"{options.recipe or options.run} asks for {procs} ranks, and this machine has {count(cores(), 'core')}:"
            f" at most {MOST_RANKS_A_CORE} for each are started for a file; --procs N says how many (--procs {procs}"
            " starts them all)"
        )


def ranks_of_batch(data: str | None, options: TrainingOptions, world: World = World()) -> int:  # noqa: B008 - frozen
    """Return how many ranks a command shares each batch among: asynchronous workers have batches of their own."""
    if _parallel(data, options, "engine") == "async":
        return 1
    return world.size if world.size > 1 else max(1, num_procs(data, options, world))


def _num_workers(data: str | None, options: TrainingOptions, world: World) -> int:
    """Return how many workers of the asynchronous engine to start: two, where neither flags nor the run say."""
    has_count = _parallel(data, options, "procs") is not None or listed_gpus(_parallel(data, options, "device"))
    return num_procs(data, options, world) if has_count else 2


def _parallel(data: str | None, options: TrainingOptions, name: str) -> Any:
    """Return a value of the recipe's ``parallel`` before there is a recipe: of the flags, the run, or the default."""
    begun, value = options.begun_run() if data is None else None, options.value(f"parallel.{name}")
    return getattr(begun.recipe.parallel if begun else Parallel(), name) if value is None else value


def _train_with_server(
    world: World, data: str | None, options: TrainingOptions, *, finetune: bool, until: float | None
) -> int:
    """Train by the asynchronous engine: start Ray and workers, or be one of the workers."""
    from steadytrain.distributed.asynchronous.cluster import VARIABLE, connect

    for name in ("budget_minutes", "repeats"):
        if getattr(options, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} does not go with --engine async: use --engine ddp")
    if options.probe or options.measured:
        flag = "--probe measures" if options.probe else f"auto ({', '.join(sorted(options.measured))}) measures"
        raise InputError(f"{flag} one process, which --engine async has not: leave it out")
    from steadytrain.launch.workers import keep_worker, keep_workers

    if VARIABLE in os.environ:
        with _only_first_rank_prints(world), connect(world) as cluster:
            cluster.join()
            with open_draft(data, options, finetune=finetune, ranks=1) as draft:
                runs = _create_runs(draft.folder, draft.recipe, options)
                code = _train_all(runs, options, cluster, opened=draft.opened, until=until)
            cluster.leave()
            return code
    if world.size > 1 and options.value("parallel.procs") is not None:
        raise InputError(
            f"{world.launcher} has started {world.size} ranks, each of which is a worker: leave out --workers"
        )
    restarts = _parallel(data, options, "restarts")
    if world.size == 1:
        num_workers = _num_workers(data, options, world)
        require_cores(num_workers, options)
        return keep_workers(sys.orig_argv, num_workers, restarts=restarts, say=note)
    return keep_worker(sys.orig_argv, world, restarts=restarts, say=note)


_LAUNCH_OPTIONS = {  # by launcher: what steady launch needs to start the same again
    "Slurm": "--on slurm",
    "Kubernetes": "--on kubernetes --set image=NAME --set kubernetes.claim=NAME",
    **dict.fromkeys(("Open MPI", "MPI"), "--on mpi --hosts FILE"),
}


def _note_fewer_ranks(run: Run, options: TrainingOptions) -> None:
    """Print how to resume a run with its earlier number of ranks, if this process is to train it alone."""
    progress = run.progress()
    ranks = progress.started.machine.get("ranks", 1) if progress.started else 1
    if progress.started and ranks > 1 and not progress.finished and options.value("parallel.procs") is None:
        resume, machine = f"resume {shlex.quote(str(run.directory))}", progress.started.machine
        nodes, launcher = len({*machine.get("hosts", ())}) or 1, machine.get("launcher") or "a launcher"
        on = _LAUNCH_OPTIONS.get(launcher, "--hosts FILE")
        again = f"steady launch {on} --nodes {nodes} --procs {ranks // nodes} -- {resume} starts as many, "
        is_elsewhere = (nodes > 1 or launcher in _LAUNCH_OPTIONS) and ranks % nodes == 0
        note(
            f"{run.directory} had {ranks} ranks on {count(nodes, 'machine')}, started by {launcher}, and resumes with"
            f" one: {again * is_elsewhere}steady {resume} --procs {ranks} starts as many on this machine"
        )


def _folder(recipe: Recipe, options: TrainingOptions) -> Path:
    """Return the folder of the run, or of the repeats."""
    from steadytrain.training.loop.defaults import default_folder

    return Path(options.run or f"{default_folder(recipe)}{'-repeats' if options.repeats is not None else ''}")


def _create_runs(folder: Path, recipe: Recipe, options: TrainingOptions) -> tuple[Run, ...]:
    if options.repeats is not None:
        return Run.create_repeats(folder, recipe, options.repeats)
    return (Run.create(folder, recipe),)


def _train_all(
    runs: Sequence[Run],
    options: TrainingOptions,
    group: Peers | None = None,
    *,
    opened: OpenedData | None,
    until: float | None,
) -> int:
    """Train runs one after another until one does not finish; print their results; return the exit code."""
    code, trained = 0, list[Run]()
    world = World() if group is None else group.world
    with ExitStack() as stack:
        for run in runs if world.is_first else ():
            stack.enter_context(run.gone_if_refused())
        for run in runs:
            if options.repeats is not None:
                note(f"repeat {len(trained) + 1} of {len(runs)}: {run.directory}")
            began = None if trained else own_start()
            code = _train_visibly(
                run,
                probe=options.probe,
                group=group,
                opened=opened,
                began=began,
                until=until,
                mxnet_log=options.mxnet_log,
            )
            trained.append(run.as_decided() if group is None else run)
            if code:
                break
    if world.is_first:
        _print_outcome(trained, json=options.json)
        for run in runs if group is None and not code else ():
            ended, is_tuned = time.perf_counter(), bool(run.recipe.model.pretrained or run.recipe.model.weights)
            is_measured = is_tuned and _measure_limits(run)
            is_measured |= _map_mistakes(run)
            if is_measured and (seconds := time.perf_counter() - ended) >= _COUNTS:
                with suppress(StorageError):  # the run is whole without
                    run.add_to_account(seconds)
        print_next_commands(trained[-1], code, repeats=options.repeats is not None)
    return code


def _fit_minutes(
    draft: Recipe, options: TrainingOptions, folder: Path | None = None
) -> tuple[Recipe, FinetunePlan | None]:
    """Fit a recipe into ``--budget-minutes``, if given; a run that exists in ``folder`` keeps its plan."""
    minutes = options.budget_minutes
    if minutes is None:
        return draft, None
    from steadytrain.training.finetuning.plan import PLANNED, plan_finetune

    if folder is not None and Run.is_run(folder):
        planned = Run.open(folder).recipe
        values = dict(leaves(draft.to_dict()))
        if planned.with_({key: values[key] for key in PLANNED if key not in options.chosen}).digest == draft.digest:
            note(f"{folder} was planned before: {planned.model.train}, {planned.budget.epochs:g} epochs")
            return planned, None
    note(f"measuring this machine on the data, to fit the run into {count(minutes, 'minute')}")
    with status("measuring"):
        plan = plan_finetune(
            draft,
            minutes,
            chosen=options.chosen,
            began=own_start() or time.perf_counter(),
            allow_import=options.names_model,
            fetches=options.fetch_models,
            say=note,
        )
    note(plan.words)
    return plan.recipe, plan


def _train_as_rank(
    world: World, data: str | None, options: TrainingOptions, *, finetune: bool, until: float | None
) -> int:
    """Train as one of several ranks, of which the first one prints."""
    if options.budget_minutes is not None or options.probe:
        if options.probe:
            raise InputError("--probe measures one process: use it with one (--procs 1, and no launcher)")
        minutes = f"--set budget.minutes={options.budget_minutes:g}"
        raise InputError(
            f"--budget-minutes compares and tries in one process, and these are {count(world.size, 'rank')}: use"
            f" --procs 1, or end a run of so many epochs by the clock with --epochs N {minutes}"
        )
    from steadytrain.training import init_group

    require_device(options, world)
    with ExitStack() as stack:
        group = stack.enter_context(init_group(world))
        draft = group.run_first_then_rest(
            lambda: stack.enter_context(open_draft(data, options, finetune=finetune, ranks=world.size)),
            is_first=world.is_local_first,
        )
        recipe, folder = draft.recipe, draft.folder
        if "batch_size" not in options.chosen:  # a run that exists may be on the first rank's disk alone
            batch, warmup = group.all_gather_json([recipe.batch_size, recipe.optim.warmup_epochs])[0]
            if (batch, warmup) != (recipe.batch_size, recipe.optim.warmup_epochs):
                recipe = recipe.with_({"batch_size": batch, "optim.warmup_epochs": warmup})
        if options.measured:
            recipe = _tuned(recipe, options, group)
            folder = folder if options.measured == {"parallel.threads"} else _folder(recipe, options)
        # All but what says on which machine each of them computes, and with how many threads.
        local = {f"parallel.{name}" for name in ("device", "threads", "compute_threads", "procs", "restarts")}
        common = {key: value for key, value in leaves(recipe.to_dict()) if key not in local}
        group.require_same("another recipe", common)
        runs = group.run_first_then_rest(lambda: _create_runs(folder, recipe, options), is_first=world.is_first)
        return _train_all(runs, options, group, opened=draft.opened, until=until)


def _tuned(recipe: Recipe, options: TrainingOptions, group: Group | None = None) -> Recipe:
    """Choose the values of flags that are ``auto`` by measuring; a run that exists keeps its values.

    Several ranks measure at the same time, each on its device, and agree on values that suit all of them.
    """
    if not options.measured:
        return recipe
    if (begun := options.begun_run()) is not None:
        recorded, keys = begun.recipe, {*options.measured, "optim.lr"}
        tuned = {key: value for key, value in leaves(recorded.to_dict()) if key in keys}
        return recipe.with_(tuned if "batch_size" in options.measured else {k: tuned[k] for k in options.measured})
    if group is None:
        return recipe.with_(_choose_automatically(recipe, options))
    from steadytrain.training.device import choose_device
    from steadytrain.tuning.rules import agree

    device = str(choose_device(recipe.parallel.device, group.world))
    changes = _choose_automatically(recipe.with_({"parallel.device": device}), options, group.world)
    return recipe.with_(agree(group.all_gather_json(changes)))


def _choose_automatically(
    recipe: Recipe,
    options: TrainingOptions,
    world: World = World(),  # noqa: B008 - frozen
) -> dict[str, object]:
    """Measure on one rank the values of flags that are ``auto``; return them by their keys in the recipe."""
    from steadytrain.tuning.probes import Prober, load_choices, save_choices
    from steadytrain.tuning.report import trial_text
    from steadytrain.tuning.tune import tune

    names = {"batch_size": ("batch", "rate"), "parallel.threads": ("threads",), "precision.name": ("precision",)}
    free = {name for key in options.measured for name in names[key]}
    if (stored := load_choices(recipe, free, world.size)) is not None:
        note(f"as measured before: {', '.join(f'{key} = {value}' for key, value in stored.items())}")
        return stored
    note("measuring this machine on the data, for what is auto")
    with status("measuring"), Prober(world) as prober:
        tuned = tune(
            recipe,
            prober=prober,
            seconds=AUTO_SECONDS,
            chosen=options.chosen,
            free=free,
            ranks=world.size,
            say=lambda trial: note(trial_text(trial)),
        )
    for choice in tuned.choices:
        note(f"{choice.key} = {choice.value}: {choice.reason}")
    choices = {choice.key: choice.value for choice in tuned.choices}
    save_choices(recipe, free, world.size, choices)
    return choices


@contextmanager
def _only_first_rank_prints(world: World) -> Iterator[None]:
    """Silence every rank but the first, except for errors that not all have in common, and once a machine a loss."""
    if world.is_first:
        yield
        return
    try:
        with open(os.devnull, "w") as nothing, redirect_stdout(nothing), redirect_stderr(nothing):  # noqa: PTH123
            yield
    except RankLostError as error:  # of which the first rank may not know: it may be the one
        if error.says_so if error.says_so is not None else world.is_local_first:
            raise
        raise SystemExit(error.exit_code) from error
    except InputError as error:
        raise SystemExit(error.exit_code) from error
    except SteadyError as error:
        raise type(error)(f"rank {world.rank}: {error}") from error


def recipe_for(
    data: str | None,
    options: TrainingOptions,
    *,
    finetune: bool,
    ranks: int = 1,
    on_gpus: bool | None = None,
    say: Say = note,
) -> Recipe:
    """Make the recipe of a command line, as :func:`open_draft` does; no run's batch is kept."""
    draft = open_draft(data, options, finetune=finetune, ranks=ranks, on_gpus=on_gpus, keeps_batch=False, say=say)
    with draft:
        return draft.recipe


@dataclass(frozen=True)
class DraftRun(Closing):
    """A run to be made: its recipe, its folder and its data, which are open, but for those of a run that exists."""

    recipe: Recipe
    folder: Path
    opened: OpenedData | None

    def close(self) -> None:
        """Close the data."""
        if self.opened is not None:
            self.opened.close()


def open_draft(
    data: str | None,
    options: TrainingOptions,
    *,
    finetune: bool,
    ranks: int = 1,
    on_gpus: bool | None = None,
    keeps_batch: bool = True,
    say: Say = note,
) -> DraftRun:
    """Make the recipe of a command line, with defaults that suit the data, and choose the folder of its run.

    The folder's name does not depend on the number of ranks; a run that was begun with another number keeps its batch.

    Args:
        data: the training data; None: those of a recipe file, or of a run.
        options: flags.
        finetune: start from pretrained weights.
        ranks: that share a batch.
        on_gpus: each rank computes on a GPU of its own; None: by the device, and what torch sees here.
        keeps_batch: that of the run in this folder, if there is one.
        say: is called with what a user should know.

    Raises:
        InputError: nothing to train on, or an invalid value.
    """
    from steadytrain.data.filenames import is_pattern
    from steadytrain.data.sources.find import require_there
    from steadytrain.data.storage.store import is_uri, local_name, refuse_inner_addresses

    train = data or options.value("data.train")
    if train is None and (begun := options.begun_run()) is not None:
        run = Run(begun.directory, begun.recipe.with_(options.changes))
        if words := run.outside_notice():
            say(words)
        return DraftRun(run.recipe, run.directory, None)
    if isinstance(train, str) and Run.is_run(train) and (Path(train) / "events.jsonl").exists():
        raise InputError(
            f"{train} is a run, not data: steady resume {train} (or steady train --run {train}) resumes it"
        )
    if not isinstance(train, str):
        raise InputError("name the data to train on: a folder of classes, a .rec, or whatever else steady pack takes")
    require_there(train)
    _require_possible(options, finetune=finetune)
    files = {"--val": "data.val", "--test": "data.test", "--classes": "data.classes", "--labels": "data.labels"}
    files["--weights"] = "model.weights"
    for flag, key in files.items():
        file = options.value(key)
        if isinstance(file, str) and not Path(local_name(file)).exists() and not is_pattern(file) and not is_uri(file):
            is_name = flag == "--weights" and Path(file).name == file and not Path(file).suffix
            fetched = " Leave it out, and steady finetune fetches pretrained weights (--model NAME)." if is_name else ""
            raise InputError(f"{flag} is {file}: there is no such file or folder.{near_name(file) or fetched}")
    named = {*options.changes, *(["data.train"] if data else [])}
    of_file = {key: value for key, value in leaves(options.file_values) if key not in named}
    refuse_inner_addresses({key: of_file[key] for key in ADDRESS_KEYS if key in of_file})
    if isinstance(model := options.value("model.name"), str):
        from steadytrain.models import find

        find(model, allow_import=True)  # a factory is imported later, if the user named it
    if words := outside_notice("the recipe file", of_file):
        say(words)
    started = _started(options, train)
    say(f"reading {train}")
    from steadytrain.training.loop.defaults import choose_recipe

    def allow(recipe: Recipe) -> None:  # a run of another model is named before weights are fetched
        trains = finetune and options.budget_minutes is None and not options.explain  # a plan chooses its own model
        begun = options.begun_run() if trains and started is not None else None
        if begun is not None:
            keys = ("model.name", "model.pretrained", "model.weights")
            if any(line.startswith(keys) for line in begun.recipe.differences(recipe)):
                raise begun.refusal(recipe, keys=keys)
        require_licence(recipe.model, accepted=options.accept_licence)

    with status(f"reading {train}"), progress_once_known("packing images", resumes=True) as advance:
        choice = choose_recipe(
            train,
            options.file_values,
            options.changes,
            finetune=finetune,
            begun=started,
            require_licence=allow,
            say=say,
            progress=advance,
        )
    with ExitStack() as stack:
        stack.callback(choice.opened.close)
        folder = _folder(choice.recipe(), options)
        recipe = choice.recipe(ranks, on_gpus=on_gpus)
        recipe = _keep_batch(recipe, folder, options) if keeps_batch else recipe
        stack.pop_all()
    return DraftRun(recipe, folder, choice.opened)


def _started(options: TrainingOptions, train: str) -> Started | None:
    """Return how the run in the options' folder began; None where there is none, or one on other data."""
    run = options.begun_run()
    return run.progress().started if run is not None and str(run.recipe.data.train) == train else None


def _keep_batch(recipe: Recipe, folder: Path, options: TrainingOptions) -> Recipe:
    """Return a recipe with the batch of the run in ``folder``, if it was begun so with another number of ranks."""
    folder = folder if options.repeats is None else folder / f"{REPEAT}{recipe.seed}"
    if "batch_size" in options.chosen or not Run.is_run(folder):
        return recipe
    begun = Run.open(folder).recipe
    kept = recipe.with_({"batch_size": begun.batch_size})
    if "optim.warmup_epochs" not in options.chosen:
        kept = kept.with_({"optim.warmup_epochs": begun.optim.warmup_epochs})
    if begun.batch_size == recipe.batch_size or kept.digest != begun.digest:
        return recipe
    note(f"{folder} keeps the batch of {count(begun.batch_size, 'image')} that it was started with")
    return kept


def _require_possible(options: TrainingOptions, *, finetune: bool) -> None:
    """Refuse values that no data make possible, before any are read. Raises InputError."""
    for small in (False, True):  # what suits neither the defaults of photographs nor those of small images
        try:
            recipe = options.recipe_over(usual_recipe("data", finetune=finetune, small=small))
        except RecipeError:
            if small:
                raise
        else:
            known_price(recipe.parallel.price)
            return


def require_licence(model: Model, *, accepted: bool) -> None:
    """Ask before pretrained weights of a non-commercial licence are fetched.

    Raises:
        InputError: the answer is not yes.
    """
    from steadytrain.models.registry import find, licence_kind

    licence = find(model.name, allow_import=True).licence if model.pretrained else ""
    if accepted or not licence or licence_kind(licence) != "non-commercial":
        return
    restriction = f"the weights of {model.name} are for non-commercial use only (licence {licence})"
    if not confirmed(f"{restriction}. Use them?"):
        raise InputError(f"{restriction}: add --accept-licence to use them, or choose another model (steady models)")


def train_visibly(run: Run, *, json: bool = False) -> int:
    """Train a run, unless it is finished, and print its table; return the exit code."""
    code = _train_visibly(run, began=own_start())
    _print_outcome([run], json=json)
    return code


def _train_visibly(
    run: Run,
    *,
    probe: bool = False,
    group: Peers | None = None,
    opened: OpenedData | None = None,
    began: float | None,
    until: float | None = None,
    mxnet_log: bool = False,
) -> int:
    """Train a run, unless it is finished; return the exit code. Of several ranks the first one prints.

    SIGINT saves and ends with 130, SIGTERM, SIGUSR1, SIGUSR2, SIGHUP and a notice that the machine goes save and end
    with 75: the same command goes on. While data and model are opened there is nothing to save, and signals end it at
    once.

    Args:
        run: the run to train.
        probe: measure the ceilings first.
        group: the processes that train it.
        opened: the data, if they are open.
        began: as of :func:`steadytrain.training.steps`.
        until: save and end with 75 after the evaluation at this epoch, unless the run ends with it.
        mxnet_log: print the lines of MXNet's scripts instead of ours.
    """
    from steadytrain.data.storage.runs import upload_notice
    from steadytrain.training import steps

    progress = run.progress()
    is_finished, is_first = progress.finished is not None, group is None or group.world.is_first
    evaluated = progress.evaluated
    is_evaluated = until is not None and evaluated is not None and evaluated.epoch >= until - 1e-9
    if group is not None:
        is_finished, is_evaluated = group.first_value([is_finished, is_evaluated])
    if is_finished or is_evaluated:
        if is_first and is_finished:
            remove_left(run.directory)
            note(f"{run.directory} is finished; to train again, change the recipe or name another --run folder")
        elif is_first:
            note(f"{run.directory} was evaluated at epoch {until:g} already; leave out --until to continue")
        return 0 if is_finished else EXIT_CODES["preempted"]
    words = upload_notice(run.recipe) if is_first else ""
    code, num_steps = 0, 0
    console: AbstractContextManager[Console | None]
    speedometer = Speedometer() if mxnet_log and is_first else None
    is_ours = is_first and speedometer is None
    console = Console(best=progress.best, epochs=run.recipe.budget.epochs) if is_ours else nullcontext()
    with console as display, stop_requests(note) as stop:
        stop.saves = False  # while data and model are opened
        for event in steps(
            run, stop=stop, began=began, probe=probe, group=group, opened=opened, explains=True, say=note
        ):
            stop.saves = True
            if words:  # the address has been looked at
                note(words)
                words = ""
            if display is not None:
                display.show(event)
                if isinstance(event, Started):
                    head = brief_lines if display.is_live else head_lines  # --explain has all of it
                    for line in head((run if group else run.as_decided()).recipe.after(event.step), event):
                        note(line)
            if speedometer is not None:
                for line in speedometer.stamped(event):  # as it is: its tabs are what the old tools split at
                    print(line, file=sys.stderr, flush=True)
            match event:
                case Started():
                    num_steps = event.steps
                case Evaluated() if until is not None and event.epoch >= until - 1e-9 and event.step < num_steps:
                    stop.signal = stop.signal or "SIGTERM"
                case Ended():
                    code = EXIT_CODES[event.status]
    if stop and not stop.saves:
        if is_first:
            print_next_commands(run, EXIT_CODES["preempted"])
        raise SystemExit(EXIT_CODES["preempted"])
    if is_first:
        if not run.log_path().exists():
            raise StorageError(f"{run.log_path()} was removed while the run trained: run the same command again")
        _print_verdict(run)
    return code


def _print_outcome(runs: Sequence[Run], *, json: bool) -> None:
    """Print the figures of a run, or of each of several and of all of them."""
    from steadytrain.reports import summarise, tables

    summaries = [summarise(run) for run in runs]
    print_text(tables.to_json(summaries) if json else tables.to_text(summaries))
    sys.stdout.flush()


def _print_verdict(run: Run) -> None:
    """Print what held a run back on standard error: in words on a terminal, else as a line."""
    from steadytrain.monitor import diagnose, read_history
    from steadytrain.reports.verdict import verdict_brief, verdict_line

    try:
        first = diagnose(read_history(run).evidence()).causes[0]
    except Exception as error:  # noqa: BLE001 - whatever a log holds, the run is well, and its end is told next
        note(f"no verdict: {error}")
        return
    for line in verdict_brief(first) if TerminalStream(sys.stderr).isatty() else [verdict_line(first)]:
        note(line)


def print_next_commands(run: Run, code: int, *, image: Path | None = None, repeats: bool = False) -> None:
    """Suggest the next commands; ``image``: for ``steady predict``; ``repeats``: the run is one of several."""
    if code:
        resume = "" if repeats else f"steady resume {shlex.quote(str(run.directory))}, or "
        saved = f"saved; to resume: {resume}the same command again"
        note(saved if any(run.checkpoints.glob("step-*")) else "nothing was saved yet: the same command starts anew")
        return
    note("next:")
    folder = shlex.quote(str(run.directory))
    images = "IMAGE..." if image is None else shlex.quote(str(image))
    reported = shlex.quote(str(run.directory.parent)) if repeats else folder
    for command in (f"evaluate {folder}", f"predict {folder} {images}", f"report {reported} -o report.html"):
        note(f"  steady {command}")
