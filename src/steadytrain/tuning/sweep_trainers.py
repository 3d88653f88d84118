"""Train the runs of a sweep: in processes on this machine, or as a Slurm array.

Each run is trained by ``steady resume`` in a process of its own, and its results are read from its log: a sweep that
was interrupted continues where it was.
"""

from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Protocol

from steadytrain.config import Recipe
from steadytrain.config.plain import leaves
from steadytrain.errors import FailedError, InputError
from steadytrain.events import open_no_follow
from steadytrain.files import read_table, read_text, replace_file
from steadytrain.format import Say, count, epoch, percent
from steadytrain.launch import Job, Plan, render
from steadytrain.launch.plan import plan_text
from steadytrain.launch.submit import submit
from steadytrain.launch.supervise import FORWARDED
from steadytrain.machine.cgroups import allowed
from steadytrain.machine.children import POLL_SECONDS, forward, kill_at_last, python, run_program, start
from steadytrain.machine.facts import accelerators
from steadytrain.machine.process import given_environment, take_signals
from steadytrain.run import Run
from steadytrain.tuning.sweep import is_diverged

LOG = "output.log"
"""File in the folder of a run: the output of its process."""
ARRAY_FILE = "slurm.json"
"""File in the folder of the sweep: the number of the array job that trains runs."""


@dataclass(frozen=True)
class Slot:
    """A place that trains one run at a time.

    Args:
        cores: of this machine; None: all.
        gpu: by its number; None: all.
    """

    cores: tuple[int, ...] | None = None
    gpu: int | None = None


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
    """Divide a machine into slots, which train runs at the same time.

    Args:
        parallel: number of slots; None: one for each GPU, or one.
        cores: that this process may use.
        runs_use_all: each run has ranks of its own, and uses all GPUs.

    >>> [slot.gpu for slot in slots(None, 2, range(4))], [slot.cores for slot in slots(2, 0, range(4))]
    ([0, 1], [(0, 1), (2, 3)])
    """
    by_gpu = gpus > 0 and not runs_use_all
    number = parallel or (gpus if by_gpu else 1)
    if number == 1:
        return [Slot()]
    if by_gpu:
        return [Slot(gpu=index % gpus) for index in range(number)]
    width = max(1, len(cores) // number)
    return [Slot(cores=tuple(cores[k * width % len(cores) :][:width])) for k in range(number)]


def slots_for(recipe: Recipe, parallel: int | None) -> list[Slot]:
    """Return the slots of this machine for runs of a recipe; ``parallel``: as for :func:`slots`."""
    num_gpus = len(accelerators()) if recipe.parallel.device in ("auto", "cuda") else 0
    return slots(parallel, num_gpus, sorted(allowed()), runs_use_all=recipe.parallel.procs not in (None, 1))


def resume_command(run: Run, allowed: Iterable[str], until: float | None) -> list[str]:
    """Return the arguments of ``steady`` that train a run.

    Args:
        allowed: keys that the user set on the command line; their values may name code to import.
        until: stop after the evaluation at this epoch; None: train to the end.
    """
    values = dict(leaves(run.recipe.to_dict()))
    argv = ["resume", str(run.directory)]
    argv += [word for key in allowed for word in ("--set", f"{key}={json.dumps(values[key])}")]
    return argv if until is None else [*argv, "--until", f"{until:.12g}"]


class ProcessTrainer:
    """Trains runs in processes of this machine, as many at a time as there are slots.

    Args:
        slots: one for each run that is trained at the same time.
        allowed: as in :func:`resume_command`.
    """

    def __init__(self, slots: Sequence[Slot], allowed: Sequence[str], say: Say) -> None:
        self._slots, self._allowed, self._say = list(slots), list(allowed), say
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
        with take_signals(FORWARDED, partial(forward, processes)) as received, kill_at_last(processes):
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
                        outcome = self._outcome(run, process.returncode, until)
                        self._say(f"{done} of {total}: {run.directory.parent.name}/{run.directory.name}: {outcome}")
                time.sleep(POLL_SECONDS)
        if received:
            raise InterruptedSweep(130 if received[0] == signal.SIGINT else 75)

    def _start(self, run: Run, slot: Slot, until: float | None) -> subprocess.Popen[bytes]:
        command = python("-m", "steadytrain", *resume_command(run, self._allowed, until))
        environment = given_environment()
        if slot.gpu is not None:
            environment["CUDA_VISIBLE_DEVICES"] = _visible(slot.gpu, environment)

        with open_no_follow(run.directory / LOG, "ab") as log:
            null = subprocess.DEVNULL
            return start(
                command,
                variables=environment,
                ends_with_us=True,
                processors=slot.cores or (),
                stdin=null,
                stdout=log,
                stderr=log,
            )

    def _outcome(self, run: Run, code: int, until: float | None) -> str:
        """Describe how the process of a run ended, and keep its failure."""
        now, log = run.progress(), run.directory / LOG
        if is_over(run, until) and not is_diverged(run):
            self.failures.pop(run.directory, None)
            score = f", {percent(now.evaluated.score, 1)}" if now.evaluated else ""
            reached = f"epoch {epoch(now.evaluated.epoch)}" if now.evaluated else ""
            return f"{'finished' if now.finished else reached}{score}"
        if code in (75, 130):
            return f"stopped{' and saved' * (code == 75)}: the same command continues"
        lines = read_text(log, most=None, errors="replace").splitlines()
        lines = [line for line in lines if line and not line.startswith(" ")]  # of a traceback its end
        last = f"exited with code {code}: {lines[-1] if lines else 'it said nothing'} ({log})"
        message = next((line for line in reversed(lines) if line.startswith("steady: ")), last)
        message = message.removeprefix("steady: ")
        if not is_diverged(run):
            self.failures[run.directory] = message
        return f"failed: {message}"

    def describe(self, runs: Sequence[Run]) -> str:
        """Return the commands that train each run."""
        return "\n".join(shlex.join(["steady", *resume_command(run, self._allowed, None)]) for run in runs)


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
    """

    def __init__(self, job: Job, folder: Path, allowed: Sequence[str], limit: int | None, say: Say) -> None:
        self._job, self._folder, self._allowed, self._say = replace(job, at_once=limit), folder, list(allowed), say
        self.at_once = 1
        self.failures: dict[Path, str] = {}

    def describe(self, runs: Sequence[Run]) -> str:
        """Return the script of the array job of some runs."""
        return plan_text("slurm", self._job, self._plan(runs), self._folder)

    def _plan(self, runs: Sequence[Run], until: float | None = None) -> Plan:
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
        if (number := str(read_table(path).get("job", ""))) and _is_queued(number):
            raise PendingSweep(f"array job {number} is not finished, {over}: {again}")
        plan = self._plan(unfinished, until)
        _, answer = submit(self._job, plan, self._folder, self._say)
        number = answer.partition(";")[0]
        replace_file(path, json.dumps({"job": number}))
        for remark in plan.notes:
            self._say(remark)
        raise PendingSweep(f"submitted {count(len(unfinished), 'run')} as array job {number}: {again}")


def _is_queued(number: str) -> bool:
    """Ask Slurm whether a job is queued or running. Raises InputError, FailedError."""
    if shutil.which("squeue") is None:
        raise InputError("squeue is not installed here: run this on a machine that submits to Slurm")
    ended = run_program(["squeue", "--noheader", "--jobs", number, "--format", "%i"])
    if ended.code and "Invalid job id" not in ended.errors:
        raise FailedError(f"squeue exited with code {ended.code}: {' '.join(ended.errors.split())}")
    return bool(ended.output.strip())


def is_over(run: Run, until: float | None = None) -> bool:
    """Return whether a run has finished, has diverged, or was evaluated at epoch ``until``."""
    progress = run.progress()
    evaluated = progress.evaluated
    is_evaluated = until is not None and evaluated is not None and evaluated.epoch >= until - 1e-9
    return progress.finished is not None or is_evaluated or is_diverged(run)
