"""Plans: the files and commands that a job is rendered to, as plain data that can be shown, kept and tested."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol

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
    """A program to be run here.

    Args:
        argv: its words; ``@NAME`` stands for the path of a file of the plan.
        label: the machine that it speaks to; empty where there is but one command.
        stdin: what it reads.
        variables: environment of the program, or, where ``hands_over``, of the ranks: then they are written to its
            standard input as one line of JSON, which no list of processes shows. None: the value that the variable
            has here.
        hands_over: its standard input also stays open until it is to end: whatever ends this side, ends that one.
        stops_by: the signal that asks for an orderly end, where that is not the end of standard input.
    """

    argv: tuple[str, ...]
    label: str = ""
    stdin: str = ""
    variables: Mapping[str, str | None] = field(default_factory=dict)
    hands_over: bool = False
    stops_by: Literal["SIGTERM", "SIGUSR1"] = "SIGTERM"

    def shown(self) -> str:
        """Show the command as typed, without secrets and long texts.

        >>> Command(argv=("srun", "a b"), variables={"TOKEN": None, "X": "1"}).shown()
        "TOKEN=... X=1 srun 'a b'"
        """
        variables = " ".join(f"{name}={'...' if value is None else shlex.quote(value)}" for name, value in self.named())
        if self.hands_over:
            return shlex.join(self.argv) + (f"  # standard input: {variables}" if variables else "")
        return f"{variables} {shlex.join(self.argv)}".strip()

    def named(self) -> list[tuple[str, str | None]]:
        """Sort the variables by name."""
        return sorted(self.variables.items())


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Commands that run at the same time; the next stage begins when all have ended well.

    Args:
        what: ``check`` (whether machines can do it), ``copy`` (the working directory), ``run`` (the ranks, which end
            together), ``submit`` (hand the job to a scheduler).
        may_fail: so many commands of ``run`` may end badly before the others are stopped.
        restarts: so often the commands of ``run`` are all started again after a failure.
    """

    what: Literal["check", "copy", "run", "submit"]
    commands: tuple[Command, ...]
    may_fail: int = 0
    restarts: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Files to write, then stages to run; ``notes`` are for the user to know."""

    stages: tuple[Stage, ...]
    files: tuple[File, ...] = ()
    notes: tuple[str, ...] = ()

    def placed(self, argv: tuple[str, ...], folder: Path) -> tuple[str, ...]:
        """Put the paths of the plan's files into a command."""
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
                plain |= {"variables": dict(command.named())} if command.variables else {}
                commands.append(plain | {"hands_over": command.hands_over})
            stages.append({"what": stage.what, "commands": commands})
        files = [{"name": file.name, "mode": f"{file.mode:o}", "text": file.text} for file in self.files]
        return {"files": files, "stages": stages, "notes": list(self.notes)}


class Launcher(Protocol):
    """A place that starts jobs. Rendering is pure: the same job gives the same plan, anywhere."""

    @property
    def TAKES(self) -> Set[str]:
        """The fields of a job, beside those that all take, that make a difference here."""

    def render(self, job: Job) -> Plan:
        """The plan of a job. Raises InputError where the place cannot do it."""


_TITLES = {
    "check": "check each machine",
    "copy": "copy the working directory",
    "run": "run; all stop together",
    "submit": "submit",
}


def plan_text(on: str, job: Job, plan: Plan, folder: Path) -> str:
    """Word a plan, with nothing secret in it. Lines that begin with ``#`` are no commands, nor part of a file."""
    lines = [f"# {on}: {count(job.size, 'rank')}"]
    for file in plan.files:
        lines += ["", f"# file {folder / file.name}", *file.text.rstrip("\n").splitlines()]
    for stage in plan.stages:
        more = f"; restarted up to {stage.restarts} times" if stage.restarts else ""
        more += f"; up to {stage.may_fail} may fail" if stage.may_fail else ""
        lines += ["", f"# {_TITLES[stage.what]}{more}"]
        for command in stage.commands:
            asked = "  # standard input: a program that reports Python, torch, folder and port" if command.stdin else ""
            lines.append(replace(command, argv=plan.placed(command.argv, folder)).shown() + asked)
    if plan.notes:
        lines += ["", *(f"# note: {note}" for note in plan.notes)]
    return "\n".join(lines)


ELASTIC: Mapping[str, str] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "PYTHONSAFEPATH": "1"}
_NODE = ("-P", "-m", "steadytrain.launch.node")
_RANK = ("-P", "-m", "steadytrain.launch.rank")


def node_command(job: Job, *flags: str, procs: int, address: str, port: int | None = None) -> tuple[str, ...]:
    """What follows the interpreter to start ``procs`` ranks of a job; ``flags``: which, and how they are held."""
    shape = ("--size", str(job.size), "--procs", str(procs), *flags)
    meeting = ("--address", address, "--port", str(port or job.meeting_port), "--grace", str(job.grace_seconds))
    independent = ("--independent",) if job.is_independent else ()
    return (*_NODE, *shape, *meeting, *independent, "--", *job.program)


def rank_command(job: Job) -> tuple[str, ...]:
    """What follows the interpreter where MPI or a scheduler starts each rank by itself.

    Verbs of steady read what those say of it; a program of the user's own is told in torchrun's words.
    """
    return (*_RANK, "--", *job.program) if is_python(job.words[0]) else job.program


def torchrun_command(job: Job, *flags: str, procs: int, meeting: Sequence[str]) -> tuple[str, ...]:
    """What follows the interpreter to start torchrun's agent; ``meeting``: its options for how the agents meet."""
    agent = ("-m", "torch.distributed.run", *meeting, f"--nproc-per-node={procs}", f"--max-restarts={job.restarts}")
    # After two dashes: torchrun would take --run for the beginning of its own --run-path.
    program = ("--", *job.program) if is_python(job.words[0]) else ("-m", "--", "steadytrain", *job.words)
    return (*_NODE, "--alone", *flags, "--grace", str(job.grace_seconds), "--", *agent, *program)
