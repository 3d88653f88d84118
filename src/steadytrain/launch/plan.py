"""A plan: the files and commands that a job comes down to. Plain data, which can be shown, kept and tested."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from steadytrain.launch.job import Job


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
        """The command as one would type it, without what is secret or long.

        >>> Command(argv=("srun", "a b"), variables={"TOKEN": None, "X": "1"}).shown()
        "TOKEN=... X=1 srun 'a b'"
        """
        told = " ".join(f"{name}={'...' if value is None else shlex.quote(value)}" for name, value in self.named())
        if self.hands_over:
            return shlex.join(self.argv) + (f"  # standard input: {told}" if told else "")
        return f"{told} {shlex.join(self.argv)}".strip()

    def named(self) -> list[tuple[str, str | None]]:
        """The variables, by name."""
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
        """Words of a command, with the plan's files by their paths."""
        names = {f"@{file.name}" for file in self.files}
        return tuple(str(folder / word[1:]) if word in names else word for word in argv)

    def to_dict(self) -> dict[str, Any]:
        """As JSON takes it."""
        return {
            "files": [{"name": one.name, "mode": f"{one.mode:o}", "text": one.text} for one in self.files],
            "stages": [{"what": one.what, "commands": [_plain(each) for each in one.commands]} for one in self.stages],
            "notes": list(self.notes),
        }


def _plain(command: Command) -> dict[str, Any]:
    told: dict[str, Any] = {"argv": list(command.argv), "label": command.label}
    if command.stdin:
        told["stdin"] = command.stdin
    if command.variables:
        told["variables"] = dict(command.named())
    return told | {"hands_over": command.hands_over}


class Launcher(Protocol):
    """What starts jobs in one kind of place. Rendering is pure: the same job gives the same plan, anywhere."""

    @property
    def TAKES(self) -> Set[str]:
        """The fields of a job, beside those that all take, that make a difference here."""

    @property
    def SUBMITS(self) -> bool:
        """Whether a scheduler takes the job and runs it later."""

    def render(self, job: Job) -> Plan:
        """The plan of a job. Raises InputError where the place cannot do it."""
