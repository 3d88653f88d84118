"""``steady sweep``."""

from __future__ import annotations

import json as json_module
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from steadytrain.cli.console import note, print_json, print_text, status
from steadytrain.cli.launch import job_for, warn_of_local_folders
from steadytrain.cli.options import (
    RECIPES,
    TrainingOptions,
    key_of,
    parse_setting,
    read_table,
    refuse_flags,
    require_trackers,
)
from steadytrain.cli.train import TrainingData, ranks_of_batch, recipe_for, require_device
from steadytrain.errors import InputError
from steadytrain.events import refuse_link
from steadytrain.run import MAX_REPEATS
from steadytrain.tuning import sweep as sweeps
from steadytrain.tuning import sweep_runs, sweep_trainers
from steadytrain.tuning.sweep import MOST_RUNS, Case, Point

if TYPE_CHECKING:
    from steadytrain.config import Recipe
    from steadytrain.launch import Job


def sweep(
    recipe: Path,
    data: TrainingData = None,
    /,
    *,
    over: Annotated[tuple[str, ...], Parameter(consume_multiple=1)] = (),
    seeds: Annotated[int | None, Parameter(validator=Number(gte=1, lte=MAX_REPEATS))] = None,
    halving: bool = False,
    search: Annotated[int | None, Parameter(validator=Number(gte=1, lte=MOST_RUNS))] = None,
    parallel: Annotated[int | None, Parameter(validator=Number(gte=1, lte=256))] = None,
    target: Annotated[float | None, Parameter(validator=Number(gt=0, lte=1))] = None,
    on: Literal["slurm"] | None = None,
    job: Path | None = None,
    dry_run: bool = False,
    finetune: bool = False,
    options: TrainingOptions = TrainingOptions(),  # noqa: B008
) -> int:
    """Train a recipe with every combination of some values, each with several seeds, and compare the results.

    Each run is an ordinary one, in RUN/CASE/seed-N, trained in its own process: one on each GPU, or one at a time on
    the CPU; or as an array of Slurm. The same command resumes an interrupted sweep and keeps finished runs. The table,
    best first, is printed, and written as sweep.json and report.html.

    The sweep can be described in the recipe file, in a table [sweep] with over, cases, seeds, halving, search and
    target (docs: sweep). It takes the flags of steady train for what all runs have in common.

    Args:
        recipe: A recipe file: .toml, .json or .yaml; or only the data, with the defaults of steady train.
        over: KEY=VALUE,VALUE for each key of the recipe that takes several values (with ; between values that hold
            commas); for a search also KEY=1e-3..1e-1, or "KEY=1e-3..1e-1 log".
        seeds: Runs of each case, which differ in their seed. [default: 1]
        halving: Stop the worst cases early: the best third continues, for three times as long. In a search: stop those
            below the median, at a ninth and at a third of their epochs.
        search: Number of cases, each chosen by the results so far, instead of all combinations (needs Optuna).
        parallel: Runs at a time. [default: one for each GPU, or 1; with --on slurm: no limit]
        target: Top-1 (or mAP) as a fraction, such as 0.9: show when each case reached it.
        on: slurm: train as an array of jobs, with RUN on a disk that all machines share; the same command reads the
            results later. [default: here]
        job: A job file with more about each run's job, as of steady launch.
        dry_run: Train nothing: print the commands, or the script of the array.
        finetune: Begin with the defaults of steady finetune instead of those of steady train.

    Examples:
        steady sweep recipe.toml photos/ --over batch_size=64,256 optim.lr=0.1,0.2 --seeds 3 --run runs/sizes
        steady sweep photos/ --over lr=0.05,0.1 --seeds 3 --epochs 10
        steady sweep recipe.toml photos/ --over "lr=1e-3..1 log" model=resnet20,mlp --search 20
        steady sweep recipes/cifar10-batches.toml small-train.rec --val test.rec --target 0.5
        steady sweep recipe.toml photos/ --over lr=0.1,0.2 --on slurm --job gpu.toml --run /shared/sizes
    """
    _require_sensible(options)
    require_trackers(options)
    texts = dict(_split_over(text) for text in over)
    named = recipe.stem or "data"
    file = None if data is None and recipe.suffix not in RECIPES else recipe
    data = str(recipe) if file is None else data
    flags = {"seeds": seeds, "halving": halving or None, "search": search, "target": target}
    spec = sweeps.read_spec({} if file is None else read_table(file).get("sweep", {}), flags)
    space = sweeps.space_of(spec, texts, lambda key, text: parse_setting(f"{key}={text}")[1], source=file)
    folder = Path(options.run or f"runs/{named}-sweep")
    for name in (sweeps.TABLE_FILE, sweeps.PAGE_FILE, sweep_runs.SEARCH_FILE, sweep_trainers.ARRAY_FILE):
        refuse_link(folder / name)
    described = _array_job(on, job, replace(options, recipe=file).value("parallel.procs"))
    if described is None:
        require_device(options)
    else:
        if spec.search is not None:
            raise InputError("a search waits for its runs, and an array is only submitted: drop --on, or --search")
        inputs = () if data is None or "://" in data else (data,)
        warn_of_local_folders(replace(described, inputs=inputs, outputs=(str(folder),)))
    if dry_run and spec.search is not None:
        raise InputError("--dry-run shows runs that are known beforehand, and those of a search are not: leave one out")
    shared = _of_all_runs(options, file, is_elsewhere=described is not None)
    make_recipe = _recipe_maker(data, shared, described, finetune=finetune)

    def create(points: Sequence[Point]) -> list[Case]:
        return sweeps.create_cases(folder, points, make_recipe, spec.seeds, writes=not dry_run)

    if spec.search is None:
        cases = create(sweeps.points(space.over, space.cases))
        first = cases[0].runs[0].recipe
    else:
        sweep_runs.import_optuna()  # before the data are read
        sweeps.require_values(space.over, make_recipe)
        cases, first = [], make_recipe({})
    in_file = {key for key, _ in sweeps.values_of_file(space, texts)}
    keys = (*sweeps.CODE, "every.track")
    allowed = [key for key in keys if key in texts or (key in shared.changes and key not in in_file)]
    trainer: sweep_trainers.Trainer
    if described is None:
        trainer = sweep_trainers.ProcessTrainer(sweep_trainers.slots_for(first, parallel), allowed, note)
    else:
        trainer = sweep_trainers.ArrayTrainer(described, folder, allowed, parallel, note)
    if dry_run:
        print_text(trainer.describe([run for case in cases for run in case.runs]))
        return 0
    shown = f"training; steady report --serve {shlex.quote(str(folder))} shows how far each run is"
    try:
        with status(shown):
            outcome = sweep_runs.run_sweep(
                spec, space, cases, trainer, folder, seed=first.seed, create=create, say=note
            )
    except sweep_trainers.InterruptedSweep as interrupted:
        note(str(interrupted))
        return interrupted.exit_code
    rows = sweeps.rows(
        outcome.cases, target=spec.target, stopped=outcome.stopped, failures=trainer.failures, not_made=outcome.failed
    )
    page = sweeps.write(folder, outcome.cases, rows, target=spec.target)
    width, target = shutil.get_terminal_size().columns, spec.target
    document = sweeps.document(rows, target=target)
    print_json(document) if options.json else print_text(sweeps.to_text(rows, target=target, width=width))
    if page is not None:
        note(f"wrote {page}")
    return 1 if trainer.failures or outcome.failed else 0


def _of_all_runs(options: TrainingOptions, recipe: Path | None, *, is_elsewhere: bool) -> TrainingOptions:
    """Return the flags that all runs have in common; ``is_elsewhere``: a job says how many ranks there are."""
    shared = replace(options, recipe=recipe, run=None)
    if not is_elsewhere:
        return shared
    flags = {name: value for name, value in shared.flags.items() if name != "procs"}
    return replace(shared, flags=flags, set=(*shared.set, "parallel.procs=none"))


def _recipe_maker(
    data: str | None, options: TrainingOptions, job: Job | None, *, finetune: bool
) -> Callable[[Mapping[str, Any]], Recipe]:
    """Return what makes the recipe of a case from its changes; ``job``: of the runs that are trained elsewhere."""
    noted: set[str] = set()

    def note_once(message: str) -> None:
        if message not in noted:  # most are the same for each case
            noted.add(message)
            note(message)

    def make_recipe(changes: Mapping[str, Any]) -> Recipe:
        settings = (f"{key}={json_module.dumps(value)}" for key, value in changes.items())
        of_case = replace(options, set=(*options.set, *settings))
        if job is None:
            ranks, on_gpus = ranks_of_batch(data, of_case), None
        else:
            ranks, on_gpus = job.procs or job.ranks or 1, None if job.gpus is None else job.gpus > 0
        return recipe_for(data, of_case, finetune=finetune, ranks=ranks, on_gpus=on_gpus, say=note_once)

    return make_recipe


def _require_sensible(options: TrainingOptions) -> None:
    """Refuse flags of training that make no sense in a sweep. Raises InputError."""
    remedies = {"recipe": "name the file first", "repeats": "use --seeds"}
    remedies |= dict.fromkeys(("budget_minutes", "fetch_models"), "use steady finetune")
    remedies |= dict.fromkeys(("probe", "explain", "mxnet_log"), "use steady train for it")
    for name, remedy in remedies.items():
        refuse_flags(f"steady sweep takes no {{}}: {remedy}", **{name: getattr(options, name)})
    if options.run is not None and "://" in options.run:
        raise InputError(f"--run is {options.run}; a sweep is kept in a folder of this machine: --run runs/NAME")
    if measured := options.measured:
        raise InputError(f"{min(measured)} cannot be auto in a sweep: steady tune chooses it; give its value")


def _split_over(text: str) -> tuple[str, str]:
    """Split ``batch_size=64,256``; a flag's name stands for the key that it sets. Raises InputError."""
    name, equals, values = text.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise InputError(f"--over {text!r} must be KEY=VALUE,VALUE, such as --over batch_size=64,256")
    return key_of(name.strip()) or name.strip(), values


def _array_job(on: str | None, file: Path | None, procs: object) -> Job | None:
    """Return the job of each run, of ``procs`` ranks; None: runs are trained on this machine. Raises InputError."""
    if on is None:
        if file is not None:
            raise InputError("--job describes jobs elsewhere: add --on slurm")
        return None
    if not isinstance(procs, int | None):
        raise InputError("--procs auto counts the GPUs of this machine: give the ranks of each run as a number")
    _, described = job_for(("resume", "RUN"), on, file, {} if procs is None else {"procs": procs})
    if described.least or described.nodes not in (None, 1):
        raise InputError("a run of a sweep has one machine: leave nodes out of the job file")
    return described
