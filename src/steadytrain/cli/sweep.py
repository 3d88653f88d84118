"""``steady sweep``."""

from __future__ import annotations

import io
import json as json_module
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, redirect_stderr
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
from steadytrain.config.factories import FACTORY
from steadytrain.config.plain import leaves
from steadytrain.config.strangers import GATES
from steadytrain.errors import InputError
from steadytrain.events import refuse_link
from steadytrain.format import count
from steadytrain.machine.facts import accelerators
from steadytrain.run import MAX_REPEATS

if TYPE_CHECKING:
    from steadytrain.config import Recipe
    from steadytrain.launch import Job
    from steadytrain.tuning.sweep import Case, Point, Space, SweepSpec
    from steadytrain.tuning.sweep_runs import ArrayTrainer, ProcessTrainer, Searched

CODE = ("model.name", "optim.name", "optim.loss", "data.transforms")
"""Keys that may name code of the user's own, which is imported where the command line names it."""


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
        halving: Stop the worst cases early: the best third continues, for three times as long. In a search: stop those
            below the median, at a ninth and at a third of their epochs.
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
    from steadytrain.tuning import sweep_runs

    _require_sensible(options, seeds=seeds, search=search, parallel=parallel, target=target)
    require_trackers(options)
    texts = dict(_split_over(text) for text in over)
    named = recipe.stem or "data"
    file = None if data is None and recipe.suffix not in RECIPES else recipe
    data = str(recipe) if file is None else data
    spec, space = _read_space(file, texts, seeds=seeds, halving=halving, search=search, target=target)
    folder = Path(options.run or f"runs/{named}-sweep")
    for name in (sweeps.TABLE_FILE, sweeps.PAGE_FILE, sweep_runs.SEARCH_FILE, sweep_runs.ARRAY_FILE):
        refuse_link(folder / name)
    place = _job(on, hosts, job, replace(options, recipe=file).value("parallel.procs"))
    if place is not None and place[0] == "slurm":
        _require_array(place[1], data, folder, is_search=spec.search is not None)
    shared = _of_all_runs(options, file, is_elsewhere=place is not None)
    make_recipe = _recipe_maker(data, shared, place and place[1], finetune=finetune)

    def create(points: Sequence[Point]) -> list[Case]:
        return sweeps.create_cases(folder, points, make_recipe, spec.seeds, writes=not dry_run)

    cases = [] if spec.search is not None else create(sweeps.points(space.over, space.cases))
    first = cases[0].runs[0].recipe if cases else make_recipe({})
    in_file = {key for key, _ in _of_file(space, texts)}
    allowed = [key for key in (*CODE, "every.track") if key in texts or (key in shared.changes and key not in in_file)]
    trainer = _trainer(first, place, job, folder, parallel, allowed)
    if dry_run:
        print_text(_dry_run(trainer, cases, folder))
        return 0
    try:
        outcome = _train(spec, space, cases, trainer, folder, seed=first.seed, create=create)
    except sweep_runs.InterruptedSweep as interrupted:
        note(str(interrupted))
        return interrupted.exit_code
    return _print_outcome(outcome, trainer.failures, folder, target=spec.target, json=options.json)


def _require_array(job: Job, data: str | None, folder: Path, *, is_search: bool) -> None:
    """Refuse a search by an array of jobs, and warn of folders that other machines may not see. Raises InputError."""
    if is_search:
        raise InputError("a search waits for its runs, and an array is only submitted: use --hosts, or drop --on")
    inputs = () if data is None or "://" in data else (data,)
    warn_of_local_folders(replace(job, inputs=inputs, outputs=(str(folder),)))


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
    is_first = True

    def make_recipe(changes: Mapping[str, Any]) -> Recipe:
        nonlocal is_first
        settings = (f"{key}={json_module.dumps(value)}" for key, value in changes.items())
        of_case = replace(options, set=(*options.set, *settings))
        with nullcontext() if is_first else redirect_stderr(io.StringIO()):  # its messages are the same for each case
            if job is None:
                ranks, on_gpus = ranks_of_batch(data, of_case), None
            else:
                ranks, on_gpus = job.procs or job.ranks or 1, None if job.gpus is None else job.gpus > 0
            recipe = recipe_for(data, of_case, finetune=finetune, ranks=ranks, on_gpus=on_gpus)
        is_first = False
        return recipe

    return make_recipe


def _train(
    spec: SweepSpec,
    space: Space,
    cases: list[Case],
    trainer: ArrayTrainer | ProcessTrainer,
    folder: Path,
    *,
    seed: int,
    create: Callable[[Sequence[Point]], list[Case]],
) -> Searched:
    """Train the cases, or those that a search chooses; what an array has not trained yet is left as it is."""
    from steadytrain.tuning import sweep_runs

    if spec.search is not None:
        folder.mkdir(parents=True, exist_ok=True)
        return sweep_runs.search(
            folder / sweep_runs.SEARCH_FILE,
            space.over,
            spec.search,
            trainer,
            seed=seed,
            at_once=trainer.num_slots if isinstance(trainer, sweep_runs.ProcessTrainer) else 1,
            create=create,
            prunes=spec.halving,
            say=note,
        )
    method = ", by successive halving" if spec.halving else ""
    note(f"{count(len(cases), 'case')}, {count(len(cases) * spec.seeds, 'run')}{method}")
    stopped: dict[str, float] = {}
    try:
        if spec.halving:
            stopped = sweep_runs.halve(cases, trainer, note)
        else:
            trainer.train([run for case in cases for run in case.runs])
    except sweep_runs.PendingSweep as pending:
        note(str(pending))
    return sweep_runs.Searched(cases, stopped, [])


def _print_outcome(
    outcome: Searched, failures: Mapping[Path, str], folder: Path, *, target: float | None, json: bool
) -> int:
    """Write and print the table of a sweep; return the exit code."""
    from steadytrain.tuning import sweep as sweeps

    rows = sweeps.rows(
        outcome.cases, target=target, stopped=outcome.stopped, failures=failures, not_made=outcome.failed
    )
    page = sweeps.write(folder, outcome.cases, rows, target=target)
    if json:
        print_json(sweeps.document(rows, target=target))
    else:
        print_text(sweeps.to_text(rows, target=target, width=shutil.get_terminal_size().columns))
    if page is not None:
        note(f"wrote {page}")
    return 1 if failures or outcome.failed else 0


def _require_sensible(
    options: TrainingOptions, *, seeds: int | None, search: int | None, parallel: int | None, target: float | None
) -> None:
    """Refuse flags that make no sense in a sweep, and values out of their range. Raises InputError."""
    from steadytrain.tuning.sweep import MOST_RUNS

    for name in ("recipe", "repeats", "budget_minutes"):
        if getattr(options, name) is not None:
            remedy = {"recipe": "name the file first", "repeats": "use --seeds"}.get(name, "use steady finetune")
            raise InputError(f"steady sweep takes no --{name.replace('_', '-')}: {remedy}")
    if options.probe or options.explain:
        raise InputError(f"steady sweep takes no --{'probe' if options.probe else 'explain'}: use steady train for it")
    require_range("--seeds", seeds, MAX_REPEATS)
    require_range("--search", search, MOST_RUNS)
    require_range("--parallel", parallel, 256)
    if target is not None and not 0 < target <= 1:
        raise InputError(f"--target is {target:g}; it must be above 0, up to 1: a fraction, such as 0.9")
    if measured := options.measured:
        raise InputError(f"{min(measured)} cannot be auto in a sweep: steady tune chooses it; give its value")


def _read_space(
    recipe: Path | None,
    texts: Mapping[str, str],
    *,
    seeds: int | None,
    halving: bool,
    search: int | None,
    target: float | None,
) -> tuple[SweepSpec, Space]:
    """Read what is swept, and how, from the recipe file and the flags. Raises InputError."""
    from steadytrain.tuning.sweep import read_spec, space_of

    table = {} if recipe is None else read_table(recipe).get("sweep", {})
    flags = {"seeds": seeds, "halving": halving or None, "search": search, "target": target}
    if isinstance(table, Mapping):
        table = {**table, **{name: value for name, value in flags.items() if value is not None}}
    spec = read_spec(table)
    space = space_of(spec, texts, lambda key, text: parse_setting(f"{key}={text}")[1])
    for key, value in _of_file(space, texts):
        _refuse_what_leads_out(key, value, recipe)
    if not space.over and not space.cases:
        raise InputError(
            f"nothing is to be swept: give --over KEY=VALUE,VALUE, or a table [sweep] in {recipe or 'a recipe file'}"
        )
    return spec, space


def _of_file(space: Space, texts: Mapping[str, str]) -> list[tuple[str, Any]]:
    """List the keys of a space, with their values, that only the recipe file names."""
    named = [(key, value) for key, value in space.over.items() if key not in texts]
    named += [pair for changes in space.cases.values() for pair in changes.items()]
    tables = [(key, item) for key, value in named if isinstance(value, list) for item in value]
    return named + [leaf for key, item in tables if isinstance(item, Mapping) for leaf in leaves(item, f"{key}.")]


def _refuse_what_leads_out(key: str, value: Any, recipe: Path | None) -> None:
    """Refuse a value of a key that acts outside of the runs, where only a file names it. Raises InputError."""
    gate = next((gate for gate in GATES if f"{gate.part}.{gate.key}" == key), None)
    words = [word for word in _words(value) if word != "none"]
    if key in CODE and (code := next(filter(FACTORY.fullmatch, words), None)):
        raise InputError(f"{recipe} names the code {code}, which is not imported for a file: --over {key}=... does")
    if gate is None or key in CODE or not words:
        return
    if gate.part == "data":
        from steadytrain.data.storage.store import refuse_inner_addresses

        for word in words:
            refuse_inner_addresses({key: word})
    elif gate.part != "model":
        raise InputError(f"{recipe} varies {key} ({words[0]}): {gate.does}, which a file alone does not; leave it out")


def _words(value: Any) -> list[str]:
    """List the texts in a value, those of lists within it too."""
    if isinstance(value, list | tuple):
        return [word for item in value for word in _words(item)]
    return [value] if isinstance(value, str) else []


def _split_over(text: str) -> tuple[str, str]:
    """Split ``batch_size=64,256``; a flag's name stands for the key that it sets. Raises InputError."""
    name, equals, values = text.partition("=")
    if not equals or not name.strip() or not values.strip():
        raise InputError(f"--over {text!r} must be KEY=VALUE,VALUE, such as --over batch_size=64,256")
    return key_of(name.strip()) or name.strip(), values


def _job(
    on: Literal["ssh", "slurm"] | None, hosts: Path | None, file: Path | None, procs: object
) -> tuple[str, Job] | None:
    """Return the launcher and the job of each run, of ``procs`` ranks; None: runs are trained on this machine."""
    if on is None and hosts is None:
        if file is not None:
            raise InputError("--job describes jobs elsewhere: add --on slurm, or --hosts FILE")
        return None
    values: dict[str, Any] = {} if hosts is None else {"hosts": read_hosts_file(hosts)}
    if isinstance(procs, int):
        values["procs"] = procs
    elif procs is not None:
        raise InputError("--procs auto counts the GPUs of this machine: give the ranks of each run as a number")
    place, described = job_for(("resume", "RUN"), on or "ssh", file, values)
    if described.least or described.nodes not in (None, 1):
        raise InputError("a run of a sweep has one machine: leave nodes out of the job file")
    return place, described


def _trainer(
    first: Recipe,
    place: tuple[str, Job] | None,
    file: Path | None,
    folder: Path,
    parallel: int | None,
    allowed: Sequence[str],
) -> ArrayTrainer | ProcessTrainer:
    """Return the trainer of runs on this machine, on those that ssh reaches, or of an array of jobs."""
    from steadytrain.tuning.sweep_runs import ArrayTrainer, ProcessTrainer, host_slots, slots

    if place is not None:
        launcher, job = place
        if launcher == "slurm":
            return ArrayTrainer(job, folder, allowed, parallel, note)
        flags = [*(["--job", str(file)] if file else []), "--procs", str(job.procs or 1)]
        return ProcessTrainer(host_slots(job)[:parallel], allowed, note, flags)
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    has_ranks = first.parallel.procs not in (None, 1)
    num_gpus = len(accelerators()) if first.parallel.device in ("auto", "cuda") else 0
    return ProcessTrainer(slots(parallel, num_gpus, list(cores), runs_use_all=has_ranks), allowed, note)


def _dry_run(trainer: ArrayTrainer | ProcessTrainer, cases: Sequence[Case], folder: Path) -> str:
    """Describe what would be started. Raises InputError for a search, whose runs follow from each other."""
    from steadytrain.launch.plan import plan_text
    from steadytrain.tuning.sweep_runs import ArrayTrainer

    runs = [run for case in cases for run in case.runs]
    if not runs:
        raise InputError("--dry-run shows runs that are known beforehand, and those of a search are not: leave one out")
    if isinstance(trainer, ArrayTrainer):
        return plan_text("slurm", trainer.job, trainer.plan(runs), folder)
    return "\n".join(shlex.join(["steady", *command]) for command in trainer.commands(runs))
