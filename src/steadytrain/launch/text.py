"""A plan as a person reads it: files as they are, commands to copy, and what to know."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from steadytrain.launch.job import Job
from steadytrain.launch.plan import Command, Plan, Stage

_TITLES = {
    "check": "look at each machine first",
    "copy": "copy the working directory",
    "run": "run, and stop together",
    "submit": "hand it over",
}


def text(on: str, job: Job, plan: Plan, folder: Path) -> str:
    """Nothing secret is in it. Lines that begin with ``#`` are no commands, nor part of a file."""
    lines = [f"# {on}: {job.size} rank{'s' * (job.size != 1)}"]
    for file in plan.files:
        lines += ["", f"# file {folder / file.name}", *file.text.rstrip("\n").splitlines()]
    for stage in plan.stages:
        lines += ["", f"# {_title(stage)}", *(_command(one, plan.placed(one.argv, folder)) for one in stage.commands)]
    return "\n".join([*lines, *(["", *(f"# note: {one}" for one in plan.notes)] if plan.notes else [])])


def _title(stage: Stage) -> str:
    more = [f"started anew up to {stage.restarts} times"] if stage.restarts else []
    more += [f"up to {stage.may_fail} may be lost"] if stage.may_fail else []
    return "; ".join([_TITLES[stage.what], *more])


def _command(command: Command, argv: tuple[str, ...]) -> str:
    asked = "  # standard input: a program that tells of Python, torch, folder and port" if command.stdin else ""
    return replace(command, argv=argv).shown() + asked
