"""Train the runs of a sweep: here, on machines that ssh reaches, or as an array of a scheduler's jobs; stop the worse.

Each run is trained by ``steady resume`` in a process of its own, and what it came to is read from its log: a sweep that
was interrupted goes on where it was.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, Protocol

from steadytrain.config import Recipe
from steadytrain.config.plain import leaves
from steadytrain.errors import FailedError, InputError, RunError, storage_error
from steadytrain.format import count, percent
from steadytrain.launch import Job, Plan, render
from steadytrain.launch.job import parse_host
from steadytrain.launch.submit import submit
from steadytrain.launch.supervise import POLL_SECONDS, die_with_parent, in_foreground, kill_at_last, take_signals
from steadytrain.machine.process import given_environment
from steadytrain.monitor import read_history
from steadytrain.run import Run
from steadytrain.tuning.sweep import Case, Point, Range, Values, is_diverged, points

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

FACTOR = 3
"""One case of so many goes on after each rung of successive halving, and trains so many times as long."""
LEAST_COMPLETE = 4
"""Trials of a search that have to be complete before one is stopped because it is worse than their median."""
LOG = "output.log"
"""In the folder of a run: what its process printed."""
SEARCH_FILE, ARRAY_FILE = "search.journal", "slurm.json"
"""In the folder of the sweep: the trials of a search; the number of the array job that trains runs."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class Slot:
    """Where one run at a time is trained.

    Args:
        cores: of this machine; None: all.
        gpu: by its number; None: all.
        host: that ssh reaches, as a line of a hosts file; None: this machine.
    """

    cores: tuple[int, ...] | None = None
    gpu: int | None = None
    host: str | None = None


class InterruptedSweep(Exception):
    """A signal has ended a sweep; its runs are saved. ``exit_code``: of the command."""

    def __init__(self, exit_code: int) -> None:
        super().__init__("the sweep was interrupted: its runs are saved, and the same command goes on")
        self.exit_code = exit_code


class PendingSweep(Exception):
    """Runs are a scheduler's jobs now, or were only to be shown; the message says which, and how to go on."""


class Trainer(Protocol):
    """Trains runs, somewhere."""

    def train(self, runs: Sequence[Run], until: float | None = None) -> None:
        """Train runs to their ends, or up to the evaluation at an epoch; those that came so far are left alone."""

    @property
    def failures(self) -> Mapping[Path, str]:
        """The folders of runs that failed otherwise than by diverging, and what they said."""


def slots(parallel: int | None, gpus: int, cores: Sequence[int], *, runs_use_all: bool = False) -> list[Slot]:
    """Say where runs are trained at the same time.

    Args:
        parallel: how many; None: one for each GPU, or one.
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
    """Say how many runs at a time each host of a job trains: one for each of its slots, or as many ranks as a run has.

    >>> job = Job(words=("resume", "a"), hosts=("gpu1 slots=2", "me@gpu2:22"))
    >>> [(slot.host, slot.gpu) for slot in host_slots(job)]
    [('gpu1 slots=1', 0), ('gpu1 slots=1', 1), ('me@gpu2:22 slots=1', None)]
    """
    places, procs = [], job.procs or 1
    for line in job.hosts:
        name, num_slots = line.split()[0], parse_host(line).slots or procs
        if num_slots < procs:
            raise InputError(f"{line}: a run has {procs} ranks, and there are slots for {num_slots}: lower --procs")
        number = num_slots // procs
        gpus = range(number) if number > 1 and procs == 1 else [None] * number
        places += [Slot(host=f"{name} slots={procs}", gpu=gpu) for gpu in gpus]
    if not places:
        raise InputError("--on ssh needs the list of machines: --hosts FILE, one name per line")
    return places


def resume_words(run: Run, allowed: Iterable[str], until: float | None) -> list[str]:
    """Return the words after ``steady`` that train a run.

    Args:
        run: it.
        allowed: keys whose values the command line names, so that what they name may be imported.
        until: stop after the evaluation at this epoch.
    """
    values = dict(leaves(run.recipe.to_dict()))
    words = ["resume", str(run.directory)]
    words += [word for key in allowed for word in ("--set", f"{key}={json.dumps(values[key])}")]
    return words if until is None else [*words, "--until", f"{until:.12g}"]


class ProcessTrainer:
    """Trains runs in processes of this machine, as many at a time as there are slots.

    A run on another machine is trained by ``steady launch`` in such a process, which ends with it.

    Args:
        places: where.
        allowed: as of :func:`resume_words`.
        say: takes a line about each run that ends.
        launch: words of ``steady launch`` for runs on other machines; none: all runs are trained here.
    """

    def __init__(self, places: Sequence[Slot], allowed: Sequence[str], say: Say, launch: Sequence[str] = ()) -> None:
        self._slots, self._allowed, self._say, self._launch = list(places), list(allowed), say, list(launch)
        self._failures: dict[Path, str] = {}

    def train(self, runs: Sequence[Run], until: float | None = None) -> None:
        """Train runs to their ends, or up to the evaluation at an epoch; those that came so far are left alone.

        One that fails is left as it is, and said; the others go on.

        Raises:
            InterruptedSweep: SIGINT, SIGTERM, SIGUSR1 or SIGHUP came; the runs have saved.
        """
        waiting = deque(run for run in runs if not is_over(run, until))
        done, total = len(runs) - len(waiting), len(runs)
        active: list[tuple[Slot, Run, subprocess.Popen[bytes]]] = []
        free, processes = deque(self._slots), list[subprocess.Popen[bytes]]()

        def forward(number: int) -> None:
            # A terminal has sent Ctrl-C to all processes already; kill -INT has not.
            for process in processes:
                if process.poll() is None and (number != signal.SIGINT or not in_foreground()):
                    with suppress(ProcessLookupError):
                        process.send_signal(signal.SIGTERM if self._launch else number)  # launch takes no SIGUSR1

        names = ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP")
        with take_signals(names, forward) as received, kill_at_last(processes):
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
        command = [sys.executable, "-m", "steadytrain", *self.words(run, slot, until)]
        environment = given_environment()
        if slot.gpu is not None and slot.host is None:
            environment["CUDA_VISIBLE_DEVICES"] = _visible(slot.gpu, environment)

        def prepare() -> None:
            die_with_parent()
            if slot.cores is not None and hasattr(os, "sched_setaffinity"):
                os.sched_setaffinity(0, slot.cores)

        with (run.directory / LOG).open("ab") as log:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=prepare
            )

    def words(self, run: Run, slot: Slot, until: float | None = None) -> list[str]:
        """Return the words after ``steady`` that train a run there."""
        words = resume_words(run, self._allowed, until)
        if slot.host is None:
            return words
        place = [*self._launch, "--set", f"hosts={json.dumps([slot.host])}"]
        place += [] if slot.gpu is None else ["--env", f"CUDA_VISIBLE_DEVICES={slot.gpu}"]
        return ["launch", "--on", "ssh", *place, "--", *words]

    def _outcome(self, run: Run, slot: Slot, code: int, until: float | None) -> str:
        now = run.progress()
        if is_over(run, until) and not is_diverged(run):
            self._failures.pop(run.directory, None)
            score = f", {percent(now.evaluated.score, 2)}" if now.evaluated else ""
            return f"{'finished' if now.finished else f'epoch {now.evaluated.epoch:g}' if now.evaluated else ''}{score}"
        if code == 75:
            return "stopped and saved: the same command goes on"
        if not code and slot.host is not None:
            message = f"its events did not come here: {run.directory} must lie on a disk that {slot.host} shares"
            self._failures[run.directory] = message
            return f"failed: {message}"
        log = run.directory / LOG
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        lines = [line for line in lines if line and not line.startswith(" ")]  # of a traceback its end
        last = f"exited with code {code}: {lines[-1] if lines else 'it said nothing'} ({log})"
        message = next((line for line in reversed(lines) if line.startswith("steady: ")), last)
        if not is_diverged(run):
            self._failures[run.directory] = message.removeprefix("steady: ")
        return f"failed: {message.removeprefix('steady: ')}"

    @property
    def num_slots(self) -> int:
        """How many runs are trained at a time."""
        return len(self._slots)

    def shown(self, runs: Sequence[Run]) -> list[list[str]]:
        """Return the words after ``steady`` that train each run, in the first places that are free."""
        return [self.words(run, self._slots[k % len(self._slots)]) for k, run in enumerate(runs)]

    @property
    def failures(self) -> Mapping[Path, str]:
        """The folders of runs that failed otherwise than by diverging, and what they said."""
        return self._failures


def _visible(index: int, environment: Mapping[str, str]) -> str:
    """Name a GPU as a process sees it: of those that this one may use.

    >>> _visible(1, {}), _visible(1, {"CUDA_VISIBLE_DEVICES": "4,6"})
    ('1', '6')
    """
    names = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    return names[index] if index < len(names) else str(index)


class ArrayTrainer:
    """Trains runs as an array job of Slurm, each a task of its own; the same command later reads what came of them.

    Args:
        job: what each run's job is like; its words are of no concern.
        folder: of the sweep: the script and the job's number are kept there.
        allowed: as of :func:`resume_words`.
        at_once: tasks that may run at a time; None: as Slurm likes.
        say: takes a line about what is done.
    """

    def __init__(self, job: Job, folder: Path, allowed: Sequence[str], at_once: int | None, say: Say) -> None:
        self.job = replace(job, at_once=at_once)
        self._folder, self._allowed, self._say = folder, list(allowed), say
        self._failures: dict[Path, str] = {}

    def plan(self, runs: Sequence[Run], until: float | None = None) -> Plan:
        """Render the array of some runs: pure."""
        tasks = tuple(tuple(resume_words(run, self._allowed, until)) for run in runs)
        return render("slurm", replace(self.job, words=tasks[0], tasks=tasks))

    def train(self, runs: Sequence[Run], until: float | None = None) -> None:
        """Submit the runs that are not over, unless an earlier array still goes on.

        Raises:
            PendingSweep: they have been submitted, or go on.
            InputError: Slurm's programs are not here.
            FailedError: Slurm refused.
        """
        left = [run for run in runs if not is_over(run, until)]
        for run in left:
            if (failed := run.progress().failed) is not None:
                self._failures[run.directory] = failed.message
        if not left:
            return
        path, over = self._folder / ARRAY_FILE, f"{len(runs) - len(left)} of {count(len(runs), 'run')} over"
        again = "the same command shows what came of them, and goes on"
        if (number := self._submitted(path)) and _is_queued(number):
            raise PendingSweep(f"array job {number} goes on, {over}: {again}")
        plan = self.plan(left, until)
        _, answer = submit(self.job, plan, self._folder, self._say)
        number = answer.partition(";")[0]
        try:
            path.write_text(json.dumps({"job": number}), encoding="utf-8")
        except OSError as error:
            raise storage_error(error, path) from error
        for remark in plan.notes:
            self._say(remark)
        raise PendingSweep(f"submitted {count(len(left), 'run')} as array job {number}: {again}")

    def _submitted(self, path: Path) -> str:
        """Return the number of the newest array job; empty where there is none."""
        try:
            return str(json.loads(path.read_text(encoding="utf-8"))["job"])
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    @property
    def failures(self) -> Mapping[Path, str]:
        """The folders of runs that failed otherwise than by diverging, and what they said."""
        return self._failures


def _is_queued(number: str) -> bool:
    """Ask Slurm whether a job still waits or runs. Raises InputError, FailedError."""
    try:
        done = subprocess.run(
            ["squeue", "--noheader", "--jobs", number, "--format", "%i"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        raise InputError("squeue is not installed here: run this on a machine that submits to Slurm") from None
    if done.returncode and "Invalid job id" not in done.stderr:
        raise FailedError(f"squeue ended with {done.returncode}: {' '.join(done.stderr.split())}")
    return bool(done.stdout.strip())


def run_name(run: Run) -> str:
    """Name a run of a sweep by its case and its seed."""
    return f"{run.directory.parent.name}/{run.directory.name}"


def is_over(run: Run, until: float | None = None) -> bool:
    """Whether nothing is left to train: the run has finished, has diverged, or was evaluated at this epoch."""
    now = run.progress()
    is_there = until is not None and now.evaluated is not None and now.evaluated.epoch >= until - 1e-9
    return now.finished is not None or is_there or is_diverged(run)


def score_at(case: Case, at: float | None = None) -> float:
    """Return the mean over seeds of the first evaluation from an epoch on, else the last; -1 where one has diverged."""
    scores = []
    for run in case.runs:
        try:
            evaluated = read_history(run, condensed=True, all_ranks=False).evaluated
        except RunError:
            return -1.0
        later = [event for event in evaluated if at is not None and event.epoch >= at - 1e-9]
        if not evaluated or (not later and is_diverged(run)):
            return -1.0
        score = (later or evaluated[-1:])[0].score
        scores.append(score if math.isfinite(score) else -1.0)
    return fmean(scores)


def best_score(case: Case) -> float:
    """Return the mean over seeds of the best evaluation; -1 where a run has none."""
    best = [run.progress().best for run in case.runs]
    return fmean(-1.0 if event is None else event.score for event in best)


def rungs(epochs: float, period: float, cases: int, factor: int = FACTOR) -> list[float]:
    """Return the epochs at which the worse cases are stopped: multiples of the period between two evaluations.

    Jamieson and Talwalkar 2016, "Non-stochastic Best Arm Identification and Hyperparameter Optimization": of n cases,
    the n / factor best go on, for factor times as long.

    >>> rungs(27, 1, 9), rungs(10, 1, 5), rungs(10, 1, 2), rungs(2, 1, 27)
    ([3.0, 9.0], [3.0], [], [1.0])
    """
    levels = 0
    while factor ** (levels + 1) <= cases:
        levels += 1
    levels_up = (max(1, math.floor(epochs / factor**level / period + 1e-9)) * period for level in range(levels, 0, -1))
    return [float(rung) for rung in dict.fromkeys(levels_up) if rung < epochs - 1e-9]


def _rungs_of(recipes: Sequence[Recipe], cases: int) -> list[float]:
    """Return the rungs of recipes. Raises InputError where they are not of one length, or there is nothing to stop."""
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
        The names of cases that were stopped -> the epoch.

    Raises:
        InputError: the cases are not of one length, there is no evaluation before the end, or there are too few.
    """
    levels = _rungs_of([case.runs[0].recipe for case in cases], len(cases))
    alive, stopped = list(cases), dict[str, float]()
    for rung in levels:
        trainer.train([run for case in alive for run in case.runs], until=rung)
        kept = -(-len(alive) // FACTOR)
        ranked = sorted(alive, key=lambda case: -score_at(case, rung))  # of equals the first
        if score_at(ranked[0], rung) < 0:
            say(f"epoch {rung:g}: no case has an evaluation: all have failed")
            return stopped
        names = {case.point.name for case in ranked[:kept]}
        stopped |= {case.point.name: rung for case in alive if case.point.name not in names}
        alive = [case for case in alive if case.point.name in names]
        best = percent(score_at(ranked[0], rung), 2)
        say(f"epoch {rung:g}: {count(kept, 'case goes', 'cases go')} on, the best at {best}")
    trainer.train([run for case in alive for run in case.runs])
    return stopped


@dataclass(frozen=True)
class Searched:
    """What a search tried: the cases with runs, the names of those that were stopped early -> the epoch, and the
    points of which no recipe could be made, each with the reason."""

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
    """Try ``number`` cases, each chosen by what came of those before (Optuna's TPE sampler).

    Bergstra et al. 2011, "Algorithms for Hyper-Parameter Optimization". Each trial's numbers are drawn by its own
    number, so an interrupted search goes on as if it had not been. A trial whose recipe cannot be made has failed, and
    counts. A run that fails gives its trial the best score it had come to, -1 without any, and the sampler keeps that;
    the run itself is trained again when the search is repeated.

    Args:
        journal: the file of the trials; made if need be.
        over: a key of the recipe -> its values or its range.
        number: of trials, those of the journal included.
        trainer: trains their runs.
        seed: of all draws.
        at_once: trials that are chosen together, before any of them is known.
        create: makes the cases of some points; InputError where a recipe cannot be.
        prunes: stop a trial that is worse at a ninth or at a third of its epochs than the median of those complete.
        say: takes a line after each round.

    Raises:
        InputError: Optuna is not there, or the journal is of a search among other values.
    """
    try:
        import optuna
        from optuna.storages.journal import JournalFileBackend, JournalStorage
        from optuna.trial import TrialState
    except ImportError:
        raise InputError("--search needs Optuna, which is missing: pip install 'steadytrain[sweep]'") from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    space = {key: _described(values) for key, values in over.items()}
    study = optuna.create_study(
        storage=JournalStorage(JournalFileBackend(str(journal))),
        study_name="sweep",
        direction="maximize",
        pruner=optuna.pruners.MedianPruner(n_startup_trials=LEAST_COMPLETE),
        load_if_exists=True,
    )
    before = study.user_attrs.get("space", space)
    if before != space:
        raise InputError(
            f"{journal} is of a search among other values ({json.dumps(before)}): repeat that command, or name another"
            " folder with --run"
        )
    study.set_user_attr("space", space)
    distributions = {key: _distribution(values) for key, values in over.items()}
    complete = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    trainer.train([run for case in create([_point_of(trial, over) for trial in complete]) for run in case.runs])

    def prune(trials: Sequence[FrozenTrial], cases: Sequence[Case]) -> list[int]:
        """Train trials to each rung, and tell the study of those that are worse than the median; which go on."""
        alive = list(range(len(trials)))
        for rung in _rungs_of([case.runs[0].recipe for case in cases], FACTOR**2):
            trainer.train([run for k in alive for run in cases[k].runs], until=rung)
            for k in list(alive):
                trial = optuna.trial.Trial(study, trials[k]._trial_id)
                trial.report(score_at(cases[k], rung), step=_millis(rung))
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


def _millis(epochs: float) -> int:
    """Count thousandths of epochs: steps of a trial are whole numbers."""
    return round(1000 * epochs)


def _point_of(trial: FrozenTrial, over: Mapping[str, Values]) -> Point:
    values: dict[str, Any] = {
        key: value if isinstance(over[key], Range) else json.loads(value) for key, value in trial.params.items()
    }
    [point] = points({key: [values[key]] for key in over})
    return Point(f"{trial.number:03d},{point.name}", values)


def _described(values: Values) -> Any:
    return [values.low, values.high, values.is_log] if isinstance(values, Range) else {"values": values}


def _distribution(values: Values) -> BaseDistribution:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Range):
        return CategoricalDistribution([json.dumps(value) for value in values])
    if values.is_whole:
        return IntDistribution(int(values.low), int(values.high), log=values.is_log)
    return FloatDistribution(values.low, values.high, log=values.is_log)
