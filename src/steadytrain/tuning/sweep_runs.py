"""Train the runs of a sweep on this machine, on others by ssh, or as a Slurm array; stop the worst cases early.

Each run is trained by ``steady resume`` in a process of its own, and its results are read from its log: a sweep that
was interrupted continues where it was.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from steadytrain.config import Recipe
from steadytrain.config.plain import leaves
from steadytrain.errors import FailedError, InputError, RunError, storage_errors
from steadytrain.events import open_no_follow
from steadytrain.files import read_text
from steadytrain.format import Say, count, percent
from steadytrain.launch import Job, Plan, render
from steadytrain.launch.job import parse_host
from steadytrain.launch.plan import plan_text
from steadytrain.launch.submit import submit
from steadytrain.machine.children import (
    POLL_SECONDS,
    die_with_parent,
    in_foreground,
    kill_at_last,
    python,
    run_program,
    send,
    start,
)
from steadytrain.machine.facts import accelerators
from steadytrain.machine.process import given_environment, take_signals
from steadytrain.monitor import read_history
from steadytrain.run import Run
from steadytrain.tuning.sweep import Case, Point, Range, Space, SweepSpec, Values, is_diverged, points

if TYPE_CHECKING:
    from types import ModuleType

    from optuna import Study
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

FACTOR = 3
"""Successive halving: after each rung the best 1 / FACTOR of the cases go on, for FACTOR times as long."""
LEAST_COMPLETE = 4
"""Trials of a search that have to be complete before others are compared with their median and stopped."""
LOG = "output.log"
"""File in the folder of a run: the output of its process."""
SEARCH_FILE, ARRAY_FILE = "search.journal", "slurm.json"
"""Files in the folder of the sweep: the trials of a search; the number of the array job that trains runs."""


@dataclass(frozen=True)
class Slot:
    """A place that trains one run at a time.

    Args:
        cores: of this machine; None: all.
        gpu: by its number; None: all.
        host: that ssh reaches, as a line of a hosts file; None: this machine.
    """

    cores: tuple[int, ...] | None = None
    gpu: int | None = None
    host: str | None = None


class InterruptedSweep(Exception):
    """A signal has interrupted a sweep, whose runs have saved. ``exit_code``: of the command."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("the sweep was interrupted: its runs are saved, and the same command continues")
        self.exit_code = exit_code


class PendingSweep(Exception):
    """The runs were submitted to a scheduler, or only shown; the message says which, and how to continue."""


class Trainer(Protocol):
    """Protocol of what trains runs: processes, or a scheduler.

    ``at_once``: runs that are trained at the same time. ``failures``: folders of runs that failed, other than by
    diverging -> their messages.
    """

    at_once: int
    failures: dict[Path, str]

    def train(self, runs: Sequence[Run], until: float | None = None) -> None:
        """Train runs to their ends, or up to the evaluation at epoch ``until``; skip those that are over."""

    def describe(self, runs: Sequence[Run]) -> str:
        """Return what training these runs would start: commands, or a script."""


def slots(parallel: int | None, gpus: int, cores: Sequence[int], *, runs_use_all: bool = False) -> list[Slot]:
    """Divide this machine into slots, which train runs at the same time.

    Args:
        parallel: number of slots; None: one for each GPU, or one.
        gpus: of this machine.
        cores: that this process may use.
        runs_use_all: each run has ranks of its own, and uses all GPUs.

    >>> [slot.gpu for slot in slots(None, 2, range(4))], [slot.cores for slot in slots(2, 0, range(4))]
    ([0, 1], [(0, 1), (2, 3)])
    >>> slots(None, 0, range(4)) == [Slot()]
    True
    """
    number = parallel or (gpus if gpus and not runs_use_all else 1)
    if number == 1:
        return [Slot()]
    if gpus and not runs_use_all:
        return [Slot(gpu=index % gpus) for index in range(number)]
    width = max(1, len(cores) // number)
    shares = [tuple(cores[k * width % len(cores) :][:width]) for k in range(number)]
    return [Slot(cores=share) for share in shares]


def slots_for(recipe: Recipe, parallel: int | None) -> list[Slot]:
    """Return the slots of this machine for runs of a recipe; ``parallel``: as for :func:`slots`."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    num_gpus = len(accelerators()) if recipe.parallel.device in ("auto", "cuda") else 0
    return slots(parallel, num_gpus, list(cores), runs_use_all=recipe.parallel.procs not in (None, 1))


def host_slots(job: Job) -> list[Slot]:
    """Return the slots of a job's hosts: each has as many ranks as a run.

    >>> job = Job(words=("resume", "a"), hosts=("gpu1 slots=2", "me@gpu2:22"))
    >>> [(slot.host, slot.gpu) for slot in host_slots(job)]
    [('gpu1 slots=1', 0), ('gpu1 slots=1', 1), ('me@gpu2:22 slots=1', None)]
    """
    slots, procs = [], job.procs or 1
    for line in job.hosts:
        name, num_slots = line.split()[0], parse_host(line).slots or procs
        if num_slots < procs:
            raise InputError(f"{line}: a run has {procs} ranks, and there are slots for {num_slots}: lower --procs")
        number = num_slots // procs
        gpus = range(number) if number > 1 and procs == 1 else [None] * number
        slots += [Slot(host=f"{name} slots={procs}", gpu=gpu) for gpu in gpus]
    if not slots:
        raise InputError("--on ssh needs the list of machines: --hosts FILE, one name per line")
    return slots


def resume_command(run: Run, allowed: Iterable[str], until: float | None) -> list[str]:
    """Return the arguments of ``steady`` that train a run.

    Args:
        run: the run.
        allowed: keys that the user set on the command line; their values may name code to import.
        until: stop after the evaluation at this epoch; None: train to the end.
    """
    values = dict(leaves(run.recipe.to_dict()))
    argv = ["resume", str(run.directory)]
    argv += [word for key in allowed for word in ("--set", f"{key}={json.dumps(values[key])}")]
    return argv if until is None else [*argv, "--until", f"{until:.12g}"]


class ProcessTrainer:
    """Trains runs in processes of this machine, as many at a time as there are slots.

    A run on another machine is trained by ``steady launch`` in such a process, which ends with it.

    Args:
        slots: one for each run that is trained at the same time.
        allowed: as in :func:`resume_command`.
        say: is called with a line about each run that ends.
        launch: options of ``steady launch`` for runs on other machines; empty: all runs are trained on this one.
    """

    def __init__(self, slots: Sequence[Slot], allowed: Sequence[str], say: Say, launch: Sequence[str] = ()) -> None:
        self._slots, self._allowed, self._say, self._launch = list(slots), list(allowed), say, list(launch)
        self.at_once = len(self._slots)
        self.failures: dict[Path, str] = {}

    def train(self, runs: Sequence[Run], until: float | None = None) -> None:
        """Train runs to their ends, or up to the evaluation at epoch ``until``; skip those that are over.

        A run that fails is reported, and the others go on.

        Raises:
            InterruptedSweep: by SIGINT, SIGTERM, SIGUSR1, SIGUSR2 or SIGHUP; the runs have saved.
        """
        waiting = deque(run for run in runs if not is_over(run, until))
        done, total = len(runs) - len(waiting), len(runs)
        active: list[tuple[Slot, Run, subprocess.Popen[bytes]]] = []
        free, processes = deque(self._slots), list[subprocess.Popen[bytes]]()

        def pass_on(number: int) -> None:
            if number != signal.SIGINT or not in_foreground():
                send(processes, signal.SIGTERM if self._launch else number)  # launch takes no SIGUSR1

        names = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGUSR2", "SIGHUP")
        with take_signals(names, pass_on) as received, kill_at_last(processes):
            while active or (waiting and not received):
                while waiting and free and not received:
                    run, slot = waiting.popleft(), free.popleft()
                    processes.append(self._start(run, slot, until))
                    active.append((slot, run, processes[-1]))
                for slot, run, process in list(active):
                    if process.poll() is not None:
                        active.remove((slot, run, process))
                        free.append(slot)
                        done += 1
                        outcome = self._outcome(run, slot, process.returncode, until)
                        self._say(f"{done} of {total}: {run_name(run)}: {outcome}")
                time.sleep(POLL_SECONDS)
        if received:
            raise InterruptedSweep(130 if received[0] == signal.SIGINT else 75)

    def _start(self, run: Run, slot: Slot, until: float | None) -> subprocess.Popen[bytes]:
        command = python("-m", "steadytrain", *self.command(run, slot, until))
        environment = given_environment()
        if slot.gpu is not None and slot.host is None:
            environment["CUDA_VISIBLE_DEVICES"] = _visible(slot.gpu, environment)

        def prepare() -> None:
            die_with_parent()
            if slot.cores is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, slot.cores)

        with open_no_follow(run.directory / LOG, "ab") as log:
            return start(
                command, variables=environment, prepare=prepare, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def command(self, run: Run, slot: Slot, until: float | None = None) -> list[str]:
        """Return the arguments of ``steady`` that train a run in a slot."""
        resume = resume_command(run, self._allowed, until)
        if slot.host is None:
            return resume
        options = [*self._launch, "--set", f"hosts={json.dumps([slot.host])}"]
        options += [] if slot.gpu is None else ["--env", f"CUDA_VISIBLE_DEVICES={slot.gpu}"]
        return ["launch", "--on", "ssh", *options, "--", *resume]

    def _outcome(self, run: Run, slot: Slot, code: int, until: float | None) -> str:
        now = run.progress()
        if is_over(run, until) and not is_diverged(run):
            self.failures.pop(run.directory, None)
            score = f", {percent(now.evaluated.score, 2)}" if now.evaluated else ""
            return f"{'finished' if now.finished else f'epoch {now.evaluated.epoch:g}' if now.evaluated else ''}{score}"
        if code == 75:
            return "stopped and saved: the same command continues"
        if not code and slot.host is not None:
            message = f"its events did not come here: {run.directory} must lie on a disk that {slot.host} shares"
            self.failures[run.directory] = message
            return f"failed: {message}"
        log = run.directory / LOG
        lines = read_text(log, most=None, errors="replace").splitlines()
        lines = [line for line in lines if line and not line.startswith(" ")]  # of a traceback its end
        last = f"exited with code {code}: {lines[-1] if lines else 'it said nothing'} ({log})"
        message = next((line for line in reversed(lines) if line.startswith("steady: ")), last)
        if not is_diverged(run):
            self.failures[run.directory] = message.removeprefix("steady: ")
        return f"failed: {message.removeprefix('steady: ')}"

    def describe(self, runs: Sequence[Run]) -> str:
        """Return the commands that train each run, in the slots by turns."""
        commands = (self.command(run, slot) for run, slot in zip(runs, itertools.cycle(self._slots), strict=False))
        return "\n".join(shlex.join(["steady", *command]) for command in commands)


def _visible(index: int, environment: Mapping[str, str]) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES for one of the GPUs that this process may use.

    >>> _visible(1, {}), _visible(1, {"CUDA_VISIBLE_DEVICES": "4,6"})
    ('1', '6')
    """
    names = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[index] if index < len(names) else str(index)


class ArrayTrainer:
    """Trains runs as an array job of Slurm, each a task of its own; the same command later reads what came of them.

    Args:
        job: the job of each run; its command is replaced.
        folder: of the sweep, for the script and the number of the array job.
        allowed: as in :func:`resume_command`.
        limit: tasks that may run at the same time; None: as Slurm decides.
        say: is called with a line about each step.
    """

    def __init__(self, job: Job, folder: Path, allowed: Sequence[str], limit: int | None, say: Say) -> None:
        self._job, self._folder, self._allowed, self._say = replace(job, at_once=limit), folder, list(allowed), say
        self.at_once = 1
        self.failures: dict[Path, str] = {}

    def describe(self, runs: Sequence[Run]) -> str:
        """Return the script of the array job of some runs."""
        return plan_text("slurm", self._job, self._plan(runs), self._folder)

    def _plan(self, runs: Sequence[Run], until: float | None = None) -> Plan:
        """Render the array job of some runs."""
        tasks = tuple(tuple(resume_command(run, self._allowed, until)) for run in runs)
        return render("slurm", replace(self._job, words=tasks[0], tasks=tasks))

    def train(self, runs: Sequence[Run], until: float | None = None) -> None:
        """Submit the runs that are not over, unless an earlier array job is still queued or running.

        Raises:
            PendingSweep: they were submitted, now or earlier.
            InputError: Slurm's programs are not installed.
            FailedError: Slurm refused the job.
        """
        unfinished = [run for run in runs if not is_over(run, until)]
        for run in unfinished:
            if (failed := run.progress().failed) is not None:
                self.failures[run.directory] = failed.message
        if not unfinished:
            return
        path, over = self._folder / ARRAY_FILE, f"{len(runs) - len(unfinished)} of {count(len(runs), 'run')} over"
        again = "the same command shows their results, and continues"
        if (number := _submitted(path)) and _is_queued(number):
            raise PendingSweep(f"array job {number} is not finished, {over}: {again}")
        plan = self._plan(unfinished, until)
        _, answer = submit(self._job, plan, self._folder, self._say)
        number = answer.partition(";")[0]
        with storage_errors(path):
            path.write_text(json.dumps({"job": number}), encoding="utf-8")
        for remark in plan.notes:
            self._say(remark)
        raise PendingSweep(f"submitted {count(len(unfinished), 'run')} as array job {number}: {again}")


def _submitted(path: Path) -> str:
    """Return the number of the newest array job; empty if there is none."""
    try:
        return str(json.loads(read_text(path))["job"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""


def _is_queued(number: str) -> bool:
    """Ask Slurm whether a job is queued or running. Raises InputError, FailedError."""
    if shutil.which("squeue") is None:
        raise InputError("squeue is not installed here: run this on a machine that submits to Slurm")
    ended = run_program(["squeue", "--noheader", "--jobs", number, "--format", "%i"])
    if ended.code and "Invalid job id" not in ended.errors:
        raise FailedError(f"squeue exited with code {ended.code}: {' '.join(ended.errors.split())}")
    return bool(ended.output.strip())


def run_name(run: Run) -> str:
    """Return the name of a run of a sweep: its case and its seed."""
    return f"{run.directory.parent.name}/{run.directory.name}"


def is_over(run: Run, until: float | None = None) -> bool:
    """Return whether a run has finished, has diverged, or was evaluated at epoch ``until``."""
    progress = run.progress()
    evaluated = progress.evaluated
    is_evaluated = until is not None and evaluated is not None and evaluated.epoch >= until - 1e-9
    return progress.finished is not None or is_evaluated or is_diverged(run)


def score_at(case: Case, rung: float | None = None) -> float:
    """Return the mean over seeds of the first evaluation from epoch ``rung`` on, else the last; -1 if one diverged."""
    scores = []
    for run in case.runs:
        try:
            evaluated = read_history(run, all_ranks=False).evaluated
        except RunError:
            return -1.0
        later = [event for event in evaluated if rung is not None and event.epoch >= rung - 1e-9]
        if not evaluated or (not later and is_diverged(run)):
            return -1.0
        score = (later or evaluated[-1:])[0].score
        scores.append(score if math.isfinite(score) else -1.0)
    return fmean(scores)


def best_score(case: Case) -> float:
    """Return the mean over seeds of the best evaluation; a run without any counts as -1."""
    best = [run.progress().best for run in case.runs]
    return fmean(-1.0 if event is None else event.score for event in best)


def rungs(epochs: float, period: float, cases: int) -> list[float]:
    """Return the epochs at which the worst cases are stopped: multiples of the period between two evaluations.

    Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter Optimization": of n cases,
    the n / :data:`FACTOR` best go on, for as many times as long.

    >>> rungs(27, 1, 9), rungs(10, 1, 5), rungs(10, 1, 2), rungs(2, 1, 27)
    ([3.0, 9.0], [3.0], [], [1.0])
    """
    levels = 0
    while FACTOR ** (levels + 1) <= cases:
        levels += 1
    levels_up = (max(1, math.floor(epochs / FACTOR**level / period + 1e-9)) * period for level in range(levels, 0, -1))
    return [float(rung) for rung in dict.fromkeys(levels_up) if rung < epochs - 1e-9]


def _rungs_of(recipes: Sequence[Recipe], cases: int) -> list[float]:
    """Return the rungs of recipes. Raises InputError if their lengths differ, or no case could be stopped."""
    epochs = {recipe.budget.epochs for recipe in recipes}
    if len(epochs) > 1 or None in epochs:
        raise InputError("--halving compares cases at the same epoch: give all of them the same --epochs, and no steps")
    whole, period = recipes[0].budget.epochs or 0.0, max(recipe.every.evaluate_epochs for recipe in recipes)
    levels = rungs(whole, period, cases)
    if not levels:
        raise InputError(
            f"--halving has nothing to stop: {count(cases, 'case')} of {whole:g} epochs, evaluated every"
            f" {period:g}; give {FACTOR} cases or more, and --set every.evaluate_epochs={whole / FACTOR:.3g} or less"
        )
    return levels


@dataclass(frozen=True)
class SweepOutcome:
    """What a sweep has trained: its cases, the names of those that were stopped early -> the epoch, and the points that
    have no valid recipe, each with the reason."""

    cases: Sequence[Case]
    stopped: Mapping[str, float] = field(default_factory=dict)
    failed: Sequence[tuple[Point, str]] = ()


def run_sweep(
    spec: SweepSpec,
    space: Space,
    cases: Sequence[Case],
    trainer: Trainer,
    folder: Path,
    *,
    seed: int,
    create: Callable[[Sequence[Point]], list[Case]],
    say: Say,
) -> SweepOutcome:
    """Train the cases, or those that a search chooses; what an array has not trained yet is left as it is.

    ``seed`` and ``create``: as for :func:`search`. Raises InterruptedSweep, and whatever halving and searching do.
    """
    if spec.search is not None:
        folder.mkdir(parents=True, exist_ok=True)
        journal = folder / SEARCH_FILE
        return search(journal, space.over, spec.search, trainer, seed=seed, create=create, prunes=spec.halving, say=say)
    method = ", by successive halving" if spec.halving else ""
    say(f"{count(len(cases), 'case')}, {count(len(cases) * spec.seeds, 'run')}{method}")
    stopped: Mapping[str, float] = {}
    try:
        if spec.halving:
            stopped = halve(cases, trainer, say)
        else:
            trainer.train([run for case in cases for run in case.runs])
    except PendingSweep as pending:
        say(str(pending))
    return SweepOutcome(cases, stopped)


def halve(cases: Sequence[Case], trainer: Trainer, say: Say) -> dict[str, float]:
    """Train all cases to the first rung, the best of them to the next, and the last ones to their ends.

    Returns:
        Names of the cases that were stopped -> the epoch.

    Raises:
        InputError: the cases are not of one length, there is no evaluation before the end, or there are too few; or
            Optuna is not installed.
    """
    levels = _rungs_of([case.runs[0].recipe for case in cases], len(cases))
    optuna = import_optuna("--halving")

    def keep(rung: float, alive: Sequence[Case]) -> list[Case]:
        scores = [score_at(case, rung) for case in alive]
        if max(scores) < 0:
            say(f"epoch {rung:g}: no case has an evaluation: all have failed")
            return []
        kept = [case for case, is_kept in zip(alive, best_third(optuna, scores), strict=True) if is_kept]
        say(f"epoch {rung:g}: {count(len(kept), 'case goes', 'cases go')} on, the best at {percent(max(scores), 2)}")
        return kept

    return _train_in_rungs(cases, levels, trainer, keep)


def import_optuna(flag: str) -> ModuleType:
    """Import Optuna, for a flag that needs it. Raises InputError if it is not installed."""
    try:
        import optuna
    except ImportError:
        raise InputError(f"{flag} needs Optuna, which is missing: pip install 'steadytrain[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def best_third(optuna: ModuleType, scores: Sequence[float]) -> list[bool]:
    """Ask Optuna's pruner which of some cases at one rung go on: the best 1 / :data:`FACTOR`, equals together.

    The pruner compares a trial with those that it was asked about before (Li et al. 2020, "A System for Massively
    Parallel Hyperparameter Tuning"). Cases of a grid come to a rung together: it is asked about all of them, and once
    more, when it knows all.
    """
    pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=FACTOR)
    study = optuna.create_study(direction="maximize", pruner=pruner)
    trials = [study.ask() for _ in scores]
    for trial, score in zip(trials, scores, strict=True):
        trial.report(score, step=1)
    copies = study.get_trials()
    for trial in trials:
        trial.should_prune()
    return [not pruner.prune(study, trial) for trial in copies]


def _train_in_rungs(
    cases: Sequence[Case],
    levels: Sequence[float],
    trainer: Trainer,
    keep: Callable[[float, Sequence[Case]], Sequence[Case]],
) -> dict[str, float]:
    """Train cases up to each rung in turn, go on with those that ``keep`` returns, and train the last to their ends.

    Returns:
        Names of the cases that were stopped -> the epoch.
    """
    alive, stopped = list(cases), dict[str, float]()
    for rung in levels:
        trainer.train([run for case in alive for run in case.runs], until=rung)
        kept = list(keep(rung, alive))
        stopped |= {case.point.name: rung for case in alive if case not in kept}
        alive = kept
    trainer.train([run for case in alive for run in case.runs])
    return stopped


def search(
    journal: Path,
    over: Mapping[str, Values],
    number: int,
    trainer: Trainer,
    *,
    seed: int,
    create: Callable[[Sequence[Point]], list[Case]],
    prunes: bool = False,
    say: Say = lambda message: None,
) -> SweepOutcome:
    """Try ``number`` cases, each chosen by the results of those before (Optuna's TPE sampler).

    Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization". Each trial's numbers are drawn by its own
    number, so an interrupted search goes on as if it had not been. A trial whose recipe cannot be made has failed, and
    counts. A run that fails gives its trial the best score it had come to, -1 without any, and the sampler keeps that;
    the run itself is trained again when the search is repeated.

    Args:
        journal: the file of the trials; created if missing.
        over: a key of the recipe -> its values or its range.
        number: of trials, those of the journal included.
        trainer: of their runs; as many trials as it trains at once are chosen before the result of any of them.
        seed: of all draws.
        create: creates the cases of some points; raises InputError if a recipe is invalid.
        prunes: stop a trial that at a ninth or a third of its epochs is worse than the median of the complete ones.
        say: is called with a line after each round.

    Raises:
        InputError: Optuna is not installed, or the journal is of a search over other values.
    """
    optuna = import_optuna("--search")
    study = _open_study(optuna, journal, over)
    states = optuna.trial.TrialState
    complete = study.get_trials(deepcopy=False, states=(states.COMPLETE,))
    trainer.train([run for case in create([_point_of(trial, over) for trial in complete]) for run in case.runs])
    while running := _choose_trials(optuna, study, over, number, trainer.at_once, seed):
        cases: dict[str, Case] = {}
        numbers: dict[str, int] = {}
        for trial in running:
            point = _point_of(trial, over)
            try:
                [cases[point.name]] = create([point])
            except RunError:  # of the folder, whatever the recipe
                raise
            except InputError as error:
                optuna.trial.Trial(study, trial._trial_id).set_user_attr("why", str(error))
                study.tell(trial.number, state=states.FAIL)
                say(f"failed: {error}")
            numbers[point.name] = trial.number
        if not cases:
            continue

        def keep(rung: float, alive: Sequence[Case], numbers: Mapping[str, int] = numbers) -> list[Case]:
            return [case for case in alive if not _is_pruned(optuna, study, numbers[case.point.name], case, rung)]

        levels = _rungs_of([case.runs[0].recipe for case in cases.values()], FACTOR**2) if prunes else []
        stopped = _train_in_rungs(list(cases.values()), levels, trainer, keep)
        for name in cases.keys() - stopped.keys():
            study.tell(numbers[name], best_score(cases[name]))
        trials = study.get_trials(deepcopy=False)
        is_known = any(trial.state == states.COMPLETE for trial in trials)
        best = f"; the best so far: {_point_of(study.best_trial, over).name}" if is_known else ""
        say(f"{len(trials)} of {number} trials{best}")
    tried = [(trial, _point_of(trial, over)) for trial in study.get_trials(deepcopy=False)[:number]]
    return SweepOutcome(
        create([point for trial, point in tried if trial.state != states.FAIL]),
        {point.name: (trial.last_step or 0) / 1000 for trial, point in tried if trial.state == states.PRUNED},
        [(point, str(trial.user_attrs.get("why", ""))) for trial, point in tried if trial.state == states.FAIL],
    )


def _open_study(optuna: ModuleType, journal: Path, over: Mapping[str, Values]) -> Study:
    """Open the study of a journal, or begin it. Raises InputError if it is of a search over other values."""
    storages = optuna.storages.journal
    study: Study = optuna.create_study(
        storage=storages.JournalStorage(storages.JournalFileBackend(str(journal))),
        study_name="sweep",
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=LEAST_COMPLETE),
        load_if_exists=True,
    )
    space = {
        key: [values.low, values.high, values.is_log] if isinstance(values, Range) else {"values": values}
        for key, values in over.items()
    }
    journal_space = study.user_attrs.get("space", space)
    if journal_space != space:
        raise InputError(
            f"{journal} is of a search over other values ({json.dumps(journal_space)}): repeat that command, or name"
            " another folder with --run"
        )
    study.set_user_attr("space", space)
    return study


def _choose_trials(
    optuna: ModuleType, study: Study, over: Mapping[str, Values], number: int, at_once: int, seed: int
) -> list[FrozenTrial]:
    """Return the trials to train now: those that an earlier command has left, else the next; none at the end."""
    distributions = {key: _distribution(values) for key, values in over.items()}
    while True:
        trials = study.get_trials(deepcopy=False)
        running = [trial for trial in trials if trial.state == optuna.trial.TrialState.RUNNING]
        if len(trials) >= number or (running and len(trials) % at_once == 0):
            return running
        study.sampler = optuna.samplers.TPESampler(seed=seed + len(trials))
        study.ask(dict(distributions))


def _is_pruned(optuna: ModuleType, study: Study, number: int, case: Case, rung: float) -> bool:
    """Report the score of a trial at a rung, and stop it if it is worse there than the median."""
    trial = optuna.trial.Trial(study, study.get_trials(deepcopy=False)[number]._trial_id)
    trial.report(score_at(case, rung), step=round(1000 * rung))  # Optuna counts steps in integers
    is_worse: bool = trial.should_prune()
    if is_worse:
        study.tell(number, state=optuna.trial.TrialState.PRUNED)
    return is_worse


def _point_of(trial: FrozenTrial, over: Mapping[str, Values]) -> Point:
    values: dict[str, Any] = {
        key: json.loads(value) if isinstance(over.get(key), list) else value for key, value in trial.params.items()
    }
    for key in over.keys() | values.keys():  # the journal may be a stranger's: what it says becomes flags of a command
        if not _is_one_of(value := values.get(key), over.get(key, [])):
            raise RunError(
                f"the journal of the search has {key}={value!r} in trial {trial.number}, which is none of its values:"
                " it was edited, or is of another search; name another folder with --run"
            )
    [point] = points({key: [values[key]] for key in over})
    return Point(f"{trial.number:03d},{point.name}", values)


def _is_one_of(value: Any, values: Values) -> bool:
    if isinstance(values, Range):
        return isinstance(value, int | float) and values.low <= value <= values.high
    return value in values


def _distribution(values: Values) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Range):
        return CategoricalDistribution([json.dumps(value) for value in values])
    if values.is_whole:
        return IntDistribution(int(values.low), int(values.high), log=values.is_log)
    return FloatDistribution(values.low, values.high, log=values.is_log)
