"""Plans: the files and commands that a job is rendered to, as plain data that can be shown, kept and tested."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from steadytrain.format import count
from steadytrain.launch.job import Job, is_python


@dataclass(frozen=True, kw_only=True)
class File:
    """A file to be written, by its name in the folder of the plan."""

    name: str
    text: str
    mode: int = 0o644


@dataclass(frozen=True, kw_only=True)
class Command:
    """A program to run on this machine.

    Args:
        argv: program and arguments; ``@NAME`` stands for the path of a file of the plan.
        label: the machine that it connects to; empty if the stage has a single command.
        stdin: its standard input.
        variables: environment of the program, or, with ``hands_over``, of the ranks: then they are written to its
            standard input as one line of JSON, which no list of processes shows. None: the value that the variable
            has on this machine.
        hands_over: its standard input stays open until it has to end, so that it also ends when this process dies.
        stops_by: the signal that asks it to save and end, if the end of standard input does not.
    """

    argv: tuple[str, ...]
    label: str = ""
    stdin: str = ""
    variables: Mapping[str, str | None] = field(default_factory=dict)
    hands_over: bool = False
    stops_by: Literal["SIGTERM", "SIGUSR1"] = "SIGTERM"

    def to_text(self) -> str:
        """Return the command as one would type it, without secrets and long texts.

        >>> Command(argv=("srun", "a b"), variables={"TOKEN": None, "X": "1"}).to_text()
        "TOKEN=... X=1 srun 'a b'"
        """
        pairs = sorted(self.variables.items())
        variables = " ".join(f"{name}={'...' if value is None else shlex.quote(value)}" for name, value in pairs)
        if self.hands_over:
            return shlex.join(self.argv) + (f"  # standard input: {variables}" if variables else "")
        return f"{variables} {shlex.join(self.argv)}".strip()


@dataclass(frozen=True, kw_only=True)
class PlanStage:
    """Commands that run at the same time; the next stage begins when all of them have succeeded.

    Args:
        kind: ``check`` (that the machines can run the job), ``copy`` (the working directory), ``run`` (the ranks, which
            end together), ``submit`` (the job, to a scheduler).
        may_fail: how many commands of ``run`` may fail before the others are stopped.
        restarts: how often all commands of ``run`` are started again after a failure.
    """

    kind: Literal["check", "copy", "run", "submit"]
    commands: tuple[Command, ...]
    may_fail: int = 0
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Files to write, then stages to run; ``notes`` are for the user to know."""

    stages: tuple[PlanStage, ...]
    files: tuple[File, ...] = ()
    notes: tuple[str, ...] = ()

    def with_paths(self, argv: tuple[str, ...], folder: Path) -> tuple[str, ...]:
        """Replace ``@NAME`` in a command by the path of that file of the plan."""
        names = {f"@{file.name}" for file in self.files}
        return tuple(str(folder / word[1:]) if word in names else word for word in argv)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON."""
        stages = []
        for stage in self.stages:
            commands = []
            for command in stage.commands:
                plain: dict[str, Any] = {"argv": list(command.argv), "label": command.label}
                plain |= {"stdin": command.stdin} if command.stdin else {}
                plain |= {"variables": dict(sorted(command.variables.items()))} if command.variables else {}
                commands.append(plain | {"hands_over": command.hands_over})
            stages.append({"what": stage.kind, "commands": commands})
        files = [{"name": file.name, "mode": f"{file.mode:o}", "text": file.text} for file in self.files]
        return {"files": files, "stages": stages, "notes": list(self.notes)}


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """A way to start jobs: a row of :data:`.LAUNCHERS`, or what an entry point of ``steadytrain.launchers`` names.

    Args:
        render: renders a job; raises InputError if the job cannot be started in this way. It is pure: the same job
            always gives the same plan.
        takes: fields of a job that it uses, apart from those that all launchers use.
        options: kinds of options that it uses, its own first: frozen dataclasses, whose fields ``--set`` sets by the
            name of the class in lower case (``--set slurm.partition=gpu``).
        names: other names for it.
        counts_machines: ``-n`` of the programs that it replaces counts machines, not processes.
        gpus: the key of ``--set`` by which a job asks for GPUs, and an example of its value.
        asks_for_gpus: returns whether a job asks for GPUs by its options.
    """

    render: Callable[[Job], Plan]
    takes: Set[str]
    options: tuple[type[Any], ...] = ()
    names: tuple[str, ...] = ()
    counts_machines: bool = False
    gpus: tuple[str, str] = ("gpus", "8")
    asks_for_gpus: Callable[[Job], bool] = lambda job: False


_TITLES = {
    "check": "check each machine",
    "copy": "copy the working directory",
    "run": "run; all stop together",
    "submit": "submit",
}


def plan_text(on: str, job: Job, plan: Plan, folder: Path) -> str:
    """Return a plan as text, without secrets; lines that begin with ``#`` are comments between files and commands."""
    lines = [f"# {on}: {count(job.size, 'rank')}"]
    for file in plan.files:
        lines += ["", f"# file {folder / file.name}", *file.text.rstrip("\n").splitlines()]
    for stage in plan.stages:
        limits = f"; restarted up to {stage.restarts} times" if stage.restarts else ""
        limits += f"; up to {stage.may_fail} may fail" if stage.may_fail else ""
        lines += ["", f"# {_TITLES[stage.kind]}{limits}"]
        for command in stage.commands:
            note = "  # standard input: a program that reports Python, torch, folder and port" if command.stdin else ""
            lines.append(replace(command, argv=plan.with_paths(command.argv, folder)).to_text() + note)
    if plan.notes:
        lines += ["", *(f"# note: {note}" for note in plan.notes)]
    return "\n".join(lines)


ELASTIC: Mapping[str, str] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
SAFE_PATH: Mapping[str, str] = {"PYTHONSAFEPATH": "1"}
"""Environment of our ranks under torchrun, which gives them no -P; a user's own program imports what lies beside it."""
_NODE = ("-P", "-m", "steadytrain.launch.node")
_RANK = ("-P", "-m", "steadytrain.launch.rank")


def node_command(job: Job, *flags: str, procs: int, address: str, port: int | None = None) -> tuple[str, ...]:
    """Return the interpreter's arguments that start ``procs`` ranks of a job by :mod:`.node`, with its ``flags``."""
    shape = ("--size", str(job.size), "--procs", str(procs), *flags)
    meeting = ("--address", address, "--port", str(port or job.meeting_port), "--grace", str(job.grace_seconds))
    independent = ("--independent",) if job.is_independent else ()
    return (*_NODE, *shape, *meeting, *independent, "--", *job.program)


def rank_command(job: Job) -> tuple[str, ...]:
    """Return the interpreter's arguments of one rank, where MPI or a scheduler starts each rank by itself.

    Verbs of steady read the variables that these set; for the user's own program they are turned into torchrun's.
    """
    return (*_RANK, "--", *job.program) if is_python(job.words[0]) else job.program


def torchrun_command(job: Job, *flags: str, procs: int, meeting: Sequence[str]) -> tuple[str, ...]:
    """Return the interpreter's arguments that start torchrun's agent; ``meeting``: its options for the rendezvous."""
    options = (*meeting, f"--nproc-per-node={procs}", f"--max-restarts={job.num_restarts}")
    agent = ("-P", "-m", "torch.distributed.run", *options)
    # After two dashes: torchrun would take --run for the beginning of its own --run-path.
    program = ("--", *job.program) if is_python(job.words[0]) else ("-m", "--", "steadytrain", *job.words)
    return (*_NODE, "--alone", *flags, "--grace", str(job.grace_seconds), "--", *agent, *program)
