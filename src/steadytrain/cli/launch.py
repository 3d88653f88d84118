"""``steady launch``: the same training on several processes and machines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from steadytrain.launch import Job, Plan


def launch(
    *command: Annotated[
        str,
        Parameter(
            name="COMMAND",
            allow_leading_hyphen=True,
            help="After two dashes, what to start: train, finetune or bandwidth with all that follows them, or python "
            "and a program of your own, which reads RANK, WORLD_SIZE and the like.",
        ),
    ],
    on: Annotated[
        Literal["local", "ssh", "mpi", "slurm", "kubernetes", "yarn"] | None,
        Parameter(help="What starts it: local (this machine), or, with --hosts, ssh by default."),
    ] = None,
    nodes: Annotated[
        str | None,
        Parameter(
            help="Machines; MIN:MAX where they may come and go (ssh; torchrun's agents). Default: all of --hosts, or 1."
        ),
    ] = None,
    procs: Annotated[
        int | None,
        Parameter(help="Processes on each machine: one for each GPU. Default: the host's slots, or 1."),
    ] = None,
    hosts: Annotated[
        Path | None,
        Parameter(help="A file of machines, a line each: name, user@name:port, name slots=2. The first has rank 0."),
    ] = None,
    sync: Annotated[
        str | None,
        Parameter(
            help="ssh: copy the working directory into this folder of each machine first, and work there. Nothing is "
            "deleted there; history, runs and what looks like a secret stay here. Default: it is there already."
        ),
    ] = None,
    exclude: Annotated[
        tuple[str, ...],
        Parameter(negative="", show_default=False, consume_multiple=False, help="Not to be copied: --exclude '*.tmp'."),
    ] = (),
    env: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            consume_multiple=False,
            help="A variable of all ranks: NAME=VALUE; NAME alone takes the value it has here, and shows it nowhere.",
        ),
    ] = (),
    job: Annotated[
        Path | None, Parameter(help="A job file, .toml, .json or .yaml: what these flags and --set can say.")
    ] = None,
    set: Annotated[
        tuple[str, ...],
        Parameter(
            negative="",
            show_default=False,
            consume_multiple=False,
            help="Any other value of the job: --set restarts=3 --set slurm.partition=gpu.",
        ),
    ] = (),
    dry_run: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Start nothing: print the files and the commands."),
    ] = False,
    output: Annotated[
        Path | None,
        Parameter(
            name=("--output", "-o"),
            help="The folder for files that are written (default: launch/NAME, where there are any).",
        ),
    ] = None,
    json: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="The plan, or what a scheduler answered, as one JSON document.",
        ),
    ] = False,
) -> int:
    """Start the same training on several processes and machines.

    The ranks run the command as it stands after the two dashes; they find each other by themselves, and only rank 0
    prints. Ctrl-C, or the failure of one, stops all of them after they have saved; the same command goes on. Exit codes
    are those of the command. The words of MXNet's launch.py and of dmlc's trackers are understood as well.

    Examples
    --------
    steady launch --procs 2 -- train cats.rec --run runs/a
    steady launch --hosts hosts --sync cats -- train cats.rec --run runs/a
    steady launch --on slurm --nodes 4 --procs 8 --set minutes=240 -- train cats.rec --run runs/a
    steady launch --on kubernetes --nodes 4 --set image=me/steady:1 --dry-run -- train /data/cats.rec --run /data/a
    """
    from steadytrain.cli.console import note
    from steadytrain.launch import render
    from steadytrain.launch.submit import submit, write_files

    given = _given(nodes=nodes, procs=procs, hosts=hosts, sync=sync, exclude=exclude, env=env)
    where, made = _job(command, on, job, given, set)
    plan = render(where, made)
    folder = output or Path("launch") / made.name
    if dry_run:
        written = write_files(plan, folder) if output else []
        _show(where, made, plan, folder, json=json)
        for path in written:
            note(f"written: {path}")
        return 0
    if json and plan.stages[-1].what != "submit":
        _refuse_json(where)
    for told in plan.notes:
        note(told)
    code, answer = submit(made, plan, folder, note)
    if plan.stages[-1].what == "submit":
        _tell(where, made, folder, plan, answer, json=json)
    return code


def with_new_words(argv: Sequence[str]) -> list[str]:
    """The command line with the old trackers' words as ours; says what became of them. Raises InputError."""
    from steadytrain.cli.console import note
    from steadytrain.launch.trackers import translate

    told = translate(argv)
    for line in told.notes:
        note(line)
    return list(told.argv)


def _given(**flags: Any) -> dict[str, Any]:
    """What the flags say, by the job's keys. Raises InputError."""
    from steadytrain.errors import InputError
    from steadytrain.launch.job import read_hosts

    told: dict[str, Any] = {}
    if (nodes := flags["nodes"]) is not None:
        least, colon, most = nodes.partition(":")
        if not all(part.isdigit() for part in (least, most if colon else least)):
            raise InputError(f"--nodes is {nodes!r}; it must be a number, or two with a colon: --nodes 2:4")
        told |= {"nodes": int(most or least), "least": int(least) if colon else None}
    if flags["procs"] is not None:
        told["procs"] = flags["procs"]
    if (hosts := flags["hosts"]) is not None:
        try:
            told["hosts"] = read_hosts(hosts.read_text(encoding="utf-8"), str(hosts))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"cannot read --hosts {hosts} ({getattr(error, 'strerror', None) or error})") from error
    if flags["sync"] is not None:
        told["ssh.sync"] = flags["sync"]
    if flags["exclude"]:
        told["ssh.exclude"] = flags["exclude"]
    for assignment in flags["env"]:
        name, equals, value = assignment.partition("=")
        told[f"env.{name}"] = value if equals else None
    return told


def _job(
    command: tuple[str, ...], on: str | None, file: Path | None, given: dict[str, Any], settings: tuple[str, ...]
) -> tuple[str, Job]:
    """The launcher and the job: defaults for the place, under the file's values, flags, and ``--set``."""
    import os
    import sys

    from steadytrain.cli.choices import parse_setting, read_recipe
    from steadytrain.config.plain import build
    from steadytrain.launch import Job

    told = read_recipe(file, "a job file") if file else {}
    where = on or told.pop("on", None) or ("ssh" if {"hosts"} & (told.keys() | given.keys()) else "local")
    told.pop("on", None)
    if command or "words" not in told:
        told["words"] = command
    for key, value in [*given.items(), *map(parse_setting, settings)]:
        _put(told, key, value)
    if where in ("local", "ssh", "mpi", "slurm"):  # one and the same environment and folder, as a rule
        told = {"python": sys.executable, **({} if where == "local" else {"folder": os.getcwd()}), **told}  # noqa: PTH109
    return where, build(Job, told)


def _put(told: dict[str, Any], key: str, value: Any) -> None:
    """``ssh.sync`` into the table of ``ssh``. Raises InputError where something else stands there."""
    from steadytrain.errors import InputError

    *outer, last = key.split(".")
    for name in outer:
        inner = told.setdefault(name, {})
        if not isinstance(inner, dict):
            raise InputError(f"{key} cannot be set: {name} is {inner!r}")
        told = inner
    told[last] = value


def _refuse_json(on: str) -> None:
    from steadytrain.errors import InputError

    raise InputError(
        f"--json with --on {on}: standard output is rank 0's; give --json after the two dashes, or --dry-run"
    )


def _show(on: str, job: Job, plan: Plan, folder: Path, *, json: bool) -> None:
    """The plan, for a person, with commands that can be copied, or as JSON."""
    import json as json_module

    from steadytrain.launch.plan import plan_text

    if json:
        print(json_module.dumps({"on": on, "name": job.name, "ranks": job.size, **plan.to_dict()}, indent=2))
    else:
        print(plan_text(on, job, plan, folder))


def _tell(on: str, job: Job, folder: Path, plan: Plan, answer: str, *, json: bool) -> None:
    """What the scheduler answered."""
    import json as json_module

    paths = [str(folder / file.name) for file in plan.files]
    if json:
        print(json_module.dumps({"on": on, "name": job.name, "ranks": job.size, "files": paths, "answer": answer}))
    else:
        print(answer)
