"""``steady launch``: the same training on several processes and machines."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, convert

from steadytrain.cli import TRAINING_VERBS, parse
from steadytrain.cli.console import note, note_on_terminal, print_json, print_text
from steadytrain.cli.options import RepeatedFlag, TrainingOptions, parse_setting, read_table
from steadytrain.config import Data, Model, Recipe
from steadytrain.config.strangers import PATH_KEYS
from steadytrain.doctor.collect import places
from steadytrain.errors import InputError
from steadytrain.files import read_text
from steadytrain.format import count, whole_number

if TYPE_CHECKING:
    from steadytrain.launch import Job

_RUNS = "runs"
"""The folder in which runs lie by default."""


def launch(
    *command: Annotated[str, Parameter(name="COMMAND", allow_leading_hyphen=True, converter=convert)],
    on: str | None = None,
    nodes: str | None = None,
    procs: int | None = None,
    hosts: Path | None = None,
    sync: str | None = None,
    exclude: RepeatedFlag = (),
    env: RepeatedFlag = (),
    keep: bool = False,
    job: Path | None = None,
    set: RepeatedFlag = (),
    dry_run: bool = False,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    json: bool = False,
) -> int:
    """Start one training run on several processes and machines.

    Each rank runs the command after the two dashes. The ranks find each other, and only rank 0 prints. On Ctrl-C, or
    when one rank fails, all ranks save and stop; the same command resumes the run. Exit codes are those of the command.
    The options of MXNet's launch.py are accepted as well.

    Args:
        command: After two dashes, the command to start: train, finetune, resume, bandwidth or pack with their options,
            or python and your program, which reads RANK, WORLD_SIZE and torchrun's other variables.
        on: The launcher: local (this machine, the default), ssh (the default with --hosts), mpi, slurm, kubernetes,
            sky, or that of another package (docs: launch).
        nodes: Machines; MIN:MAX if machines may join and leave (ssh; torchrun's agents). Default: all of --hosts, or 1.
        procs: Processes on each machine, usually one for each GPU. Default: the host's slots, or 1.
        hosts: A file with one machine per line: name, user@name:port, name slots=2. The first has rank 0.
        sync: ssh: first copy the working directory into this folder on each machine, and run there. Nothing is deleted
            there; .git, runs and files that look like secrets are not copied. Default: it is there already.
        exclude: Files not to copy: --exclude '*.tmp'.
        env: A variable for all ranks: NAME=VALUE; NAME alone passes its value from here, without showing it.
        keep: Start the ranks again whenever they have saved and stopped (exit code 75), as after a notice that their
            machine is taken away (docs: spot).
        job: A job file, .toml, .json or .yaml, with the values of these flags and of --set.
        set: Any other value of the job: --set restarts=3 --set slurm.partition=gpu.
        dry_run: Start nothing: print the files and the commands.
        output: The folder for the files of the job (default: launch/NAME, if there are any).
        json: Print the plan, or the scheduler's answer, as one JSON document.

    Examples:
        steady launch --procs 2 -- train cats.rec --run runs/a
        steady launch --hosts hosts --sync cats -- train cats.rec --run runs/a
        steady launch --on slurm --nodes 4 --procs 8 --set minutes=240 -- train cats.rec --run runs/a
        steady launch --on kubernetes --set image=me/x:1 --set kubernetes.claim=c -- train /data/a.rec --run /data/r
    """
    from steadytrain.launch import render
    from steadytrain.launch.plan import plan_text
    from steadytrain.launch.submit import submit, write_files

    values: dict[str, Any] = {"procs": procs, "keep": keep or None, "ssh.sync": sync, "ssh.exclude": exclude or None}
    values = {key: value for key, value in values.items() if value is not None}
    if nodes is not None:
        least, colon, most = nodes.partition(":")
        numbers = [whole_number(part) for part in (least, most if colon else least)]
        if None in numbers:
            raise InputError(f"--nodes is {nodes!r}; it must be a number, or two with a colon: --nodes 2:4")
        values |= {"nodes": numbers[1], "least": numbers[0] if colon else None}
    if hosts is not None:
        values["hosts"] = read_hosts_file(hosts)
    for assignment in env:
        name, equals, value = assignment.partition("=")
        values[f"env.{name}"] = value if equals else None
    values |= dict(parse_setting(text, example="slurm.partition=gpu") for text in set)
    place, described = job_for(command, on, job, values)
    arguments = _arguments(described)  # before anything is written or submitted
    if arguments is not None:
        described = _with_password(place, _with_paths(described, arguments), arguments)
    plan = render(place, described)
    folder = output or Path("launch") / described.name
    about = {"on": place, "name": described.name, "ranks": described.size}
    if place == "slurm" or (place == "mpi" and described.hosts):
        warn_of_local_folders(described)
    if dry_run:
        written = write_files(plan, folder) if output else []
        if json:
            print_json({**about, **plan.to_dict()})
        else:
            print_text(plan_text(place, described, plan, folder))
        for path in written:
            note(f"written: {path}")
        return 0
    _set_password(described)
    is_submitted = plan.stages[-1].kind == "submit"
    if json and not is_submitted:
        raise InputError(
            f"--json with --on {place}: standard output belongs to rank 0; put --json after the two dashes, or use "
            "--dry-run"
        )
    if not is_submitted:
        for remark in plan.notes:
            note(remark)
    if arguments is None and not is_submitted:  # a program: nothing is heard of it before it prints
        note_on_terminal(f"starting {count(described.size, 'rank')} of {described.words[0]}")
    code, answer = submit(described, plan, folder, note)
    if is_submitted and json:
        files = [str(folder / file.name) for file in plan.files]
        print_json({**about, "files": files, "answer": answer})
    elif is_submitted:
        print_text(answer)
    if is_submitted:  # they are about a job that there now is
        for remark in plan.notes:
            note(remark.replace("NUMBER", answer.partition(";")[0] or "NUMBER") if place == "slurm" else remark)
    return code


def _arguments(job: Job) -> dict[str, Any] | None:
    """Parse the words of a verb of ours; None for a program. Raises InputError for what every rank would refuse."""
    from steadytrain.launch.job import is_python

    if is_python(job.words[0]):
        return None
    arguments = parse(job.words)
    options = arguments.get("options")
    if job.keep and arguments.get("until") is not None:
        raise InputError(
            f"--until {arguments['until']:g} ends with exit code 75, after which --keep starts again: leave one out"
        )
    if isinstance(options, TrainingOptions) and (options.recipe is None or options.recipe.exists()):
        options.recipe_over(Recipe(data=Data(train="data"), model=Model("model")))
    return arguments


def _with_password(place: str, job: Job, arguments: Mapping[str, Any]) -> Job:
    """Give ranks of the asynchronous engine on several machines a password, by which only they use their servers."""
    options = arguments.get("options")
    if (
        place == "local"
        or job.size == 1
        or not isinstance(options, TrainingOptions)
        or options.value("parallel.engine") != "async"
    ):
        return job
    from steadytrain.distributed.asynchronous.cluster import PASSWORD, has_password

    if has_password(job.env):
        return job
    return replace(job, env={**job.env, PASSWORD: None})


def _set_password(job: Job) -> None:
    """Make the password that a job's ranks are to get from this process, unless it is set."""
    if None in job.env.values():
        from steadytrain.distributed.asynchronous.cluster import PASSWORD, make_password

        if PASSWORD in job.env:
            os.environ.setdefault(PASSWORD, make_password())


def _with_paths(job: Job, arguments: Mapping[str, Any]) -> Job:
    """Add the paths that a verb of ours reads and writes to a job, unless it names its own."""
    from steadytrain.launch.shared import is_path

    if job.inputs or job.outputs:
        return job
    options = arguments.get("options")
    inputs, outputs = [], []
    if job.words[0] == "pack":
        *inputs, output = arguments["places"]
        outputs = [output]
    elif job.words[0] == "resume":
        outputs = [arguments["run"]]
    elif job.words[0] in TRAINING_VERBS:
        options = options or TrainingOptions()
        file = options.recipe if options.recipe is not None and not options.recipe.exists() else None
        inputs = [arguments.get("data"), options.recipe, *([] if file else map(options.value, PATH_KEYS))]
        outputs = [options.run or _RUNS]
    return replace(
        job,
        inputs=tuple(str(path) for path in inputs if path and is_path(str(path))),
        outputs=tuple(path for path in outputs if is_path(path)),
    )


def warn_of_local_folders(job: Job) -> None:
    """Say which paths of a job lie on a disk of this machine, which its other machines do not see."""
    own = job.python if job.image is None and sys.prefix != sys.base_prefix and job.python == sys.executable else ""
    paths = dict.fromkeys(filter(None, (*job.inputs, *job.outputs, own)))
    for path, place in places(Path("/"), os.environ, *paths).items():
        if path not in paths or place.network is not False:
            continue
        is_output = path in job.outputs
        if not (Path(path).exists() or (is_output and (Path(path).parent.exists() or not Path(path).is_absolute()))):
            continue  # what is not here at all may well be there
        is_default = is_output and path == _RUNS and not any(word.startswith("--run") for word in job.words)
        named = f"--run is not set, and {Path(path).absolute()}" if is_default else path
        remedy = "set --run to" if is_output and job.words[0] not in ("pack", "resume") else "move it to"
        if path == own:
            named, remedy = f"this Python, {own},", "make its environment in"
        note(
            f"warning: {named} is on {place.kind}, a disk of this machine: unless the job's machines share it,"
            f" {remedy} a folder on shared storage"
        )


def read_hosts_file(path: Path) -> tuple[str, ...]:
    """Read the machines of a hosts file. Raises InputError."""
    from steadytrain.launch.job import read_hosts

    try:
        return read_hosts(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read --hosts {path} ({getattr(error, 'strerror', None) or error})") from error


def job_for(command: tuple[str, ...], on: str | None, file: Path | None, values: dict[str, Any]) -> tuple[str, Job]:
    """Return the launcher and the job: defaults for the place, under the file's values, flags, and ``--set``."""
    from steadytrain.launch import build_job, launcher_name

    table = read_table(file, "a job file") if file else {}
    in_file = table.pop("on", None)
    if not isinstance(in_file, str | None):
        raise InputError(f"on is {in_file!r}; it must be the name of a launcher, such as on = 'slurm'")
    place = launcher_name(on or in_file or ("ssh" if "hosts" in table or "hosts" in values else "local"))
    if command or "words" not in table:
        table["words"] = command
    for key, value in values.items():
        *outer, last = key.split(".", 1 if key.startswith("env.") else -1)  # no variable's name has a dot
        inner = table
        for name in outer:
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise InputError(f"{key} cannot be set: {name} is {inner!r}")
        inner[last] = value
    if place in ("local", "ssh", "mpi", "slurm"):  # one and the same environment and folder, as a rule
        folder = {} if place == "local" else {"folder": os.getcwd()}  # noqa: PTH109
        python = {} if place == "slurm" and "image" in table else {"python": sys.executable}
        table = {**python, **folder, **table}
    for options in table.values():
        if isinstance(options, dict) and isinstance(options.get("patch"), str):
            options["patch"] = _read_patch(Path(options["patch"]))
    return place, build_job(table)


def _read_patch(path: Path) -> Any:
    """Read a file of patches by YAML 1.1, as kubectl and SkyPilot read theirs. Raises InputError."""
    import yaml

    try:
        tables = [table for table in yaml.safe_load_all(read_text(path)) if table is not None]
        json_module.dumps(tables, default=str)  # refuses what holds itself, and keys that are no names
    except (OSError, ValueError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise InputError(f"cannot read the patch {path}: {' '.join(str(error).split())}") from error
    if not tables or not all(isinstance(table, dict) for table in tables):
        raise InputError(f"the patch {path} holds {tables or 'nothing'}; it must hold tables, such as spec: {{...}}")
    return tables[0] if len(tables) == 1 else tables
