"""``steady sweep``."""

from __future__ import annotations

import json as json_module
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, print_text
from steadytrain.cli.launch import job_for, read_hosts_file, warn_of_local_folders
from steadytrain.cli.options import (
    RECIPES,
    TrainingOptions,
    key_of,
    parse_setting,
    read_table,
    require_range,
    require_trackers,
)
from steadytrain.cli.train import TrainingData, ranks_of_batch, recipe_for
from steadytrain.errors import InputError
from steadytrain.events import refuse_link
from steadytrain.run import MAX_REPEATS

if TYPE_CHECKING:
    from steadytrain.config import Recipe
    from steadytrain.launch import Job
    from steadytrain.tuning.sweep import Case, Point
    from steadytrain.tuning.sweep_trainers import Trainer


def sweep(
    recipe: Path,
    data: TrainingData = None,
    /,
    *,
    over: Annotated[tuple[str, ...], Parameter(consume_multiple=1)] = (),
    seeds: int | None = None,
    halving: bool = False,
    search: int | None = None,
    parallel: int | None = None,
    target: float | None = None,
    on: Literal["ssh", "slurm"] | None = None,
    hosts: Path | None = None,
    job: Path | None = None,
    dry_run: bool = False,
    finetune: bool = False,
    options: TrainingOptions = TrainingOptions(),  # noqa: B008
) -> int:
    """Train a recipe with every combination of some values, each with several seeds, and compare the results.

    Each run is an ordinary one, in RUN/CASE/seed-N, trained in its own process: one on each GPU, or one at a time on
    the CPU; or on other machines. The same command resumes an interrupted sweep and keeps finished runs. The table,
    best first, is printed, and written as sweep.json and report.html.

    The sweep can be described in the recipe file, in a table [sweep] with over, cases, seeds, halving, search and
    target (docs: sweep). It takes the flags of steady train for what all runs have in common.

    Args:
        recipe: A recipe file: .toml, .json or .yaml; or only the data, with the defaults of steady train.
        over: KEY=VALUE,VALUE for each key of the recipe that takes several values (with ; between values that hold
            commas); for a search also KEY=1e-3..1e-1, or "KEY=1e-3..1e-1 log".
        seeds: Runs of each case, which differ in their seed. [default: 1]
        halving: Stop the worst cases early: the best third continues, for three times as long (needs Optuna). In a
            search: stop those below the median, at a ninth and at a third of their epochs.
        search: Number of cases, each chosen by the results so far, instead of all combinations (needs Optuna).
        parallel: Runs at a time. [default: one for each GPU, or 1; with --on slurm: no limit]
        target: Top-1 (or mAP) as a fraction, such as 0.9: show when each case reached it.
        on: Train elsewhere, with RUN on a disk that all share: ssh, on the machines of --hosts; or slurm, as an array
            of jobs, which the same command reads later. [default: here, or ssh with --hosts]
        hosts: A file with one machine per line: name, user@name:port, name slots=2 (runs at a time, each with a GPU).
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
    from steadytrain.tuning import sweep as sweeps
    from steadytrain.tuning import sweep_runs, sweep_trainers

    _require_sensible(options, seeds=seeds, search=search, parallel=parallel, target=target)
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
    place, described = _job(on, hosts, job, replace(options, recipe=file).value("parallel.procs"))
    if place == "slurm" and described is not None:
        if spec.search is not None:
            raise InputError("a search waits for its runs, and an array is only submitted: use --hosts, or drop --on")
        inputs = () if data is None or "://" in data else (data,)
        warn_of_local_folders(replace(described, inputs=inputs, outputs=(str(folder),)))
    shared = _of_all_runs(options, file, is_elsewhere=described is not None)
    make_recipe = _recipe_maker(data, shared, described, finetune=finetune)

    def create(points: Sequence[Point]) -> list[Case]:
        return sweeps.create_cases(folder, points, make_recipe, spec.seeds, writes=not dry_run)

    cases = [] if spec.search is not None else create(sweeps.points(space.over, space.cases))
    first = cases[0].runs[0].recipe if cases else make_recipe({})
    in_file = {key for key, _ in sweeps.values_of_file(space, texts)}
    keys = (*sweeps.CODE, "every.track")
    allowed = [key for key in keys if key in texts or (key in shared.changes and key not in in_file)]
    trainer: Trainer
    if described is None:
        trainer = sweep_trainers.ProcessTrainer(sweep_trainers.slots_for(first, parallel), allowed, note)
    elif place == "slurm":
        trainer = sweep_trainers.ArrayTrainer(described, folder, allowed, parallel, note)
    else:
        launch = [*(["--job", str(job)] if job else []), "--procs", str(described.procs or 1)]
        trainer = sweep_trainers.ProcessTrainer(sweep_trainers.host_slots(described)[:parallel], allowed, note, launch)
    if dry_run:
        if not cases:
            raise InputError(
                "--dry-run shows runs that are known beforehand, and those of a search are not: leave one out"
            )
        print_text(trainer.describe([run for case in cases for run in case.runs]))
        return 0
    try:
        outcome = sweep_runs.run_sweep(spec, space, cases, trainer, folder, seed=first.seed, create=create, say=note)
    except sweep_trainers.InterruptedSweep as interrupted:
        note(str(interrupted))
        return interrupted.exit_code
    rows = sweeps.rows(
        outcome.cases,
        target=spec.target,
        stopped=outcome.stopped,
        failures=trainer.failures,
        not_made=outcome.failed,
    )
    page = sweeps.write(folder, outcome.cases, rows, target=spec.target)
    if options.json:
        print_json(sweeps.document(rows, target=spec.target))
    else:
        print_text(sweeps.to_text(rows, target=spec.target, width=shutil.get_terminal_size().columns))
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


def _require_sensible(
    options: TrainingOptions, *, seeds: int | None, search: int | None, parallel: int | None, target: float | None
) -> None:
    """Refuse flags that make no sense in a sweep, and values out of their range. Raises InputError."""
    from steadytrain.tuning.sweep import MOST_RUNS

    remedies = {"recipe": "name the file first", "repeats": "use --seeds", "budget_minutes": "use steady finetune"}
    remedies |= dict.fromkeys(("probe", "explain"), "use steady train for it")
    for name, remedy in remedies.items():
        if getattr(options, name) not in (None, False):
            raise InputError(f"steady sweep takes no --{name.replace('_', '-')}: {remedy}")
    require_range("--seeds", seeds, MAX_REPEATS)
    require_range("--search", search, MOST_RUNS)
    require_range("--parallel", parallel, 256)
    if target is not None and not 0 < target <= 1:
        raise InputError(f"--target is {target:g}; it must be above 0, up to 1: a fraction, such as 0.9")
    if measured := options.measured:
        raise InputError(f"{min(measured)} cannot be auto in a sweep: steady tune chooses it; give its value")


def _split_over(text: str) -> tuple[str, str]:
    """Split ``batch_size=64,256``; a flag's name stands for the key that it sets. Raises InputError."""
    name, equals, values = text.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise InputError(f"--over {text!r} must be KEY=VALUE,VALUE, such as --over batch_size=64,256")
    return key_of(name.strip()) or name.strip(), values


def _job(
    on: Literal["ssh", "slurm"] | None, hosts: Path | None, file: Path | None, procs: object
) -> tuple[str, Job] | tuple[None, None]:
    """Return the launcher and the job of each run, of ``procs`` ranks; None: runs are trained on this machine."""
    if on is None and hosts is None:
        if file is not None:
            raise InputError("--job describes jobs elsewhere: add --on slurm, or --hosts FILE")
        return None, None
    values: dict[str, Any] = {} if hosts is None else {"hosts": read_hosts_file(hosts)}
    if isinstance(procs, int):
        values["procs"] = procs
    elif procs is not None:
        raise InputError("--procs auto counts the GPUs of this machine: give the ranks of each run as a number")
    place, described = job_for(("resume", "RUN"), on or "ssh", file, values)
    if described.least or described.nodes not in (None, 1):
        raise InputError("a run of a sweep has one machine: leave nodes out of the job file")
    return place, described
