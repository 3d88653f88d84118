"""Train the runs of a sweep on this machine, on others by ssh, or as a Slurm array; stop the worst cases early.

Each run is trained by ``steady resume`` in a process of its own, and its results are read from its log: a sweep that
was interrupted continues where it was.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
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
from steadytrain.machine.process import given_environment, take_signals
from steadytrain.monitor import read_history
from steadytrain.run import Run
from steadytrain.tuning.sweep import Case, Point, Range, Values, is_diverged, points

if TYPE_CHECKING:
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
    """Protocol of what trains runs: processes, or a scheduler."""

    def train(self, runs: Sequence[Run], until: float | None = None) -> None:
        """Train runs to their ends, or up to the evaluation at epoch ``until``; skip those that are over."""

    @property
    def failures(self) -> Mapping[Path, str]:
        """Folders of runs that failed, other than by diverging -> their messages."""


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
        self._failures: dict[Path, str] = {}

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
            self._failures.pop(run.directory, None)
            score = f", {percent(now.evaluated.score, 2)}" if now.evaluated else ""
            return f"{'finished' if now.finished else f'epoch {now.evaluated.epoch:g}' if now.evaluated else ''}{score}"
        if code == 75:
            return "stopped and saved: the same command continues"
        if not code and slot.host is not None:
            message = f"its events did not come here: {run.directory} must lie on a disk that {slot.host} shares"
            self._failures[run.directory] = message
            return f"failed: {message}"
        log = run.directory / LOG
        lines = read_text(log, most=None, errors="replace").splitlines()
        lines = [line for line in lines if line and not line.startswith(" ")]  # of a traceback its end
        last = f"exited with code {code}: {lines[-1] if lines else 'it said nothing'} ({log})"
        message = next((line for line in reversed(lines) if line.startswith("steady: ")), last)
        if not is_diverged(run):
            self._failures[run.directory] = message.removeprefix("steady: ")
        return f"failed: {message.removeprefix('steady: ')}"

    @property
    def num_slots(self) -> int:
        """The number of runs that are trained at the same time."""
        return len(self._slots)

    def commands(self, runs: Sequence[Run]) -> list[list[str]]:
        """Return the arguments of ``steady`` that train each run, in the slots by turns."""
        return [self.command(run, self._slots[k % len(self._slots)]) for k, run in enumerate(runs)]

    @property
    def failures(self) -> Mapping[Path, str]:
        """Folders of runs that failed, other than by diverging -> their messages."""
        return self._failures


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
        at_once: tasks that may run at the same time; None: as Slurm decides.
        say: is called with a line about each step.
    """

    def __init__(self, job: Job, folder: Path, allowed: Sequence[str], at_once: int | None, say: Say) -> None:
        self.job = replace(job, at_once=at_once)
        self._folder, self._allowed, self._say = folder, list(allowed), say
        self._failures: dict[Path, str] = {}

    def plan(self, runs: Sequence[Run], until: float | None = None) -> Plan:
        """Render the array job of some runs."""
        tasks = tuple(tuple(resume_command(run, self._allowed, until)) for run in runs)
        return render("slurm", replace(self.job, words=tasks[0], tasks=tasks))

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
                self._failures[run.directory] = failed.message
        if not unfinished:
            return
        path, over = self._folder / ARRAY_FILE, f"{len(runs) - len(unfinished)} of {count(len(runs), 'run')} over"
        again = "the same command shows their results, and continues"
        if (number := self._submitted(path)) and _is_queued(number):
            raise PendingSweep(f"array job {number} is not finished, {over}: {again}")
        plan = self.plan(unfinished, until)
        _, answer = submit(self.job, plan, self._folder, self._say)
        number = answer.partition(";")[0]
        with storage_errors(path):
            path.write_text(json.dumps({"job": number}), encoding="utf-8")
        for remark in plan.notes:
            self._say(remark)
        raise PendingSweep(f"submitted {count(len(unfinished), 'run')} as array job {number}: {again}")

    def _submitted(self, path: Path) -> str:
        """Return the number of the newest array job; empty if there is none."""
        try:
            return str(json.loads(read_text(path))["job"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return ""

    @property
    def failures(self) -> Mapping[Path, str]:
        """Folders of runs that failed, other than by diverging -> their messages."""
        return self._failures


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


def halve(cases: Sequence[Case], trainer: Trainer, say: Say) -> dict[str, float]:
    """Train all cases to the first rung, the best of them to the next, and the last ones to their ends.

    Returns:
        Names of the cases that were stopped -> the epoch.

    Raises:
        InputError: the cases are not of one length, there is no evaluation before the end, or there are too few.
    """
    levels = _rungs_of([case.runs[0].recipe for case in cases], len(cases))
    alive, stopped = list(cases), dict[str, float]()
    for rung in levels:
        trainer.train([run for case in alive for run in case.runs], until=rung)
        num_kept = -(-len(alive) // FACTOR)
        ranked = sorted(alive, key=lambda case: -score_at(case, rung))  # of equals the first
        if score_at(ranked[0], rung) < 0:
            say(f"epoch {rung:g}: no case has an evaluation: all have failed")
            return stopped
        names = {case.point.name for case in ranked[:num_kept]}
        stopped |= {case.point.name: rung for case in alive if case.point.name not in names}
        alive = [case for case in alive if case.point.name in names]
        best = percent(score_at(ranked[0], rung), 2)
        say(f"epoch {rung:g}: {count(num_kept, 'case goes', 'cases go')} on, the best at {best}")
    trainer.train([run for case in alive for run in case.runs])
    return stopped


@dataclass(frozen=True)
class Searched:
    """The outcome of a search: its cases, the names of those that were stopped early -> the epoch, and the points that
    have no valid recipe, each with the reason."""

    cases: list[Case]
    stopped: dict[str, float]
    failed: list[tuple[Point, str]]


def search(
    journal: Path,
    over: Mapping[str, Values],
    number: int,
    trainer: Trainer,
    *,
    seed: int,
    at_once: int,
    create: Callable[[Sequence[Point]], list[Case]],
    prunes: bool = False,
    say: Say = lambda message: None,
) -> Searched:
    """Try ``number`` cases, each chosen by the results of those before (Optuna's TPE sampler).

    Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization". Each trial's numbers are drawn by its own
    number, so an interrupted search goes on as if it had not been. A trial whose recipe cannot be made has failed, and
    counts. A run that fails gives its trial the best score it had come to, -1 without any, and the sampler keeps that;
    the run itself is trained again when the search is repeated.

    Args:
        journal: the file of the trials; created if missing.
        over: a key of the recipe -> its values or its range.
        number: of trials, those of the journal included.
        trainer: of their runs.
        seed: of all draws.
        at_once: trials that are chosen together, before the result of any of them.
        create: creates the cases of some points; raises InputError if a recipe is invalid.
        prunes: stop a trial that at a ninth or a third of its epochs is worse than the median of the complete ones.
        say: is called with a line after each round.

    Raises:
        InputError: Optuna is not installed, or the journal is of a search over other values.
    """
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage
        from optuna.trial import TrialState
    except ImportError:
        raise InputError("--search needs Optuna, which is missing: pip install 'steadytrain[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {
        key: [values.low, values.high, values.is_log] if isinstance(values, Range) else {"values": values}
        for key, values in over.items()
    }
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(journal))),
        study_name="sweep",
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=LEAST_COMPLETE),
        load_if_exists=True,
    )
    journal_space = study.user_attrs.get("space", space)
    if journal_space != space:
        raise InputError(
            f"{journal} is of a search over other values ({json.dumps(journal_space)}): repeat that command, or name"
            " another folder with --run"
        )
    study.set_user_attr("space", space)
    distributions = {key: _distribution(values) for key, values in over.items()}
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    trainer.train([run for case in create([_point_of(trial, over) for trial in complete]) for run in case.runs])

    def prune(trials: Sequence[FrozenTrial], cases: Sequence[Case]) -> list[int]:
        """Train trials to each rung, stop those that are worse than the median, and return the others."""
        alive = list(range(len(trials)))
        for rung in _rungs_of([case.runs[0].recipe for case in cases], FACTOR**2):
            trainer.train([run for k in alive for run in cases[k].runs], until=rung)
            for k in list(alive):
                trial = optuna.trial.Trial(study, trials[k]._trial_id)
                # In thousandths of epochs, as Optuna counts steps in integers.
                trial.report(score_at(cases[k], rung), step=round(1000 * rung))
                if trial.should_prune():
                    study.tell(trials[k].number, state=TrialState.PRUNED)
                    alive.remove(k)
        return alive

    while True:
        trials = study.get_trials(deepcopy=False)
        running = [trial for trial in trials if trial.state == TrialState.RUNNING]
        while len(trials) < number and (not running or len(trials) % at_once):
            study.sampler = optuna.samplers.TPESampler(seed=seed + len(trials))
            study.ask(dict(distributions))
            trials = study.get_trials(deepcopy=False)
            running = [trial for trial in trials if trial.state == TrialState.RUNNING]
        if not running:
            tried = [(trial, _point_of(trial, over)) for trial in trials[:number]]
            stopped = {p.name: (t.last_step or 0) / 1000 for t, p in tried if t.state == TrialState.PRUNED}
            failed = [(p, str(t.user_attrs.get("why", ""))) for t, p in tried if t.state == TrialState.FAIL]
            return Searched(create([p for t, p in tried if t.state != TrialState.FAIL]), stopped, failed)
        built: list[FrozenTrial] = []
        cases: list[Case] = []
        for trial in running:
            try:
                cases += create([_point_of(trial, over)])
                built.append(trial)
            except RunError:  # of the folder, whatever the recipe
                raise
            except InputError as error:
                optuna.trial.Trial(study, trial._trial_id).set_user_attr("why", str(error))
                study.tell(trial.number, state=TrialState.FAIL)
                say(f"failed: {error}")
        if not built:
            continue
        alive = prune(built, cases) if prunes else range(len(built))
        trainer.train([run for k in alive for run in cases[k].runs])
        for k in alive:
            study.tell(built[k].number, best_score(cases[k]))
        is_known = any(trial.state == TrialState.COMPLETE for trial in study.get_trials(deepcopy=False))
        best = f"; the best so far: {_point_of(study.best_trial, over).name}" if is_known else ""
        say(f"{len(trials)} of {number} trials{best}")


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
