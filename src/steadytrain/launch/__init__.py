"""Start the same training on one machine or many: a :class:`Job` becomes a :class:`Plan` before anything is touched.

>>> plan = render("slurm", Job(words=("train", "a.rec"), nodes=2))
>>> [file.name for file in plan.files], plan.stages[0].commands[0].argv
(['steadytrain.sbatch'], ('sbatch', '--parsable', '@steadytrain.sbatch'))
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from importlib.metadata import entry_points
from typing import Any

from steadytrain.config.factories import load_entry_point
from steadytrain.config.plain import build, hints_of, leaves
from steadytrain.errors import InputError, did_you_mean
from steadytrain.launch import kubernetes, local, mpi, sky, slurm, ssh
from steadytrain.launch.job import Job, is_python, options_name
from steadytrain.launch.plan import Command, File, Launcher, Plan, PlanStage

__all__ = [
    "LAUNCHERS",
    "Command",
    "File",
    "Job",
    "Launcher",
    "Plan",
    "PlanStage",
    "build_job",
    "launcher_name",
    "launchers",
    "render",
]

LAUNCHERS: dict[str, Launcher] = {
    "local": local.LAUNCHER,
    "ssh": ssh.LAUNCHER,
    "mpi": mpi.LAUNCHER,
    "slurm": slurm.LAUNCHER,
    "kubernetes": kubernetes.LAUNCHER,
    "sky": sky.LAUNCHER,
}
GROUP = "steadytrain.launchers"
"""The group of entry points by which other packages add launchers: ``NAME = "package.module:LAUNCHER"``."""
_ALWAYS = {"words", "nodes", "procs", "env", "name", "python", "inputs", "outputs", "mounted"}


def render(on: str, job: Job) -> Plan:
    """Render what a launcher would write and run for a job, without writing or running anything.

    Raises:
        InputError: no such launcher, or a job that it cannot start.
    """
    on = launcher_name(on)
    launcher = launchers()[on]
    if job.tasks and "tasks" not in launcher.takes:
        raise InputError(f"--on {on} takes no array of jobs: use slurm")
    plan = launcher.render(job)
    plain = Job(words=("train",))
    set_fields = {field.name for field in fields(job) if getattr(job, field.name) != getattr(plain, field.name)}
    unused = set_fields - launcher.takes - _ALWAYS - {"options"}
    unused |= {options_name(type(options)) for options in job.options if type(options) not in launcher.options}
    notes = (f"{', '.join(sorted(unused))}: not used by {on}",) if unused else ()
    return replace(plan, notes=plan.notes + notes + _notes_on_gpus(job, launcher))


def launchers() -> dict[str, Launcher]:
    """Return all launchers by name: ours, and those of other packages' entry points that can be loaded."""
    added: dict[str, Launcher] = {}
    for point in entry_points(group=GROUP):
        with suppress(InputError):  # whoever asks for it is told
            added[point.name] = load_entry_point(point, Launcher)
    return added | LAUNCHERS


def launcher_name(name: str) -> str:
    """Return the launcher that a name stands for. Raises InputError, with the names that there are.

    >>> launcher_name("k8s")
    'kubernetes'
    """
    known = launchers()
    others = {other: kind for kind, launcher in known.items() for other in launcher.names}
    called = others.get(name.lower(), name.lower())
    if called not in known:
        for point in entry_points(group=GROUP, name=called):
            try:
                load_entry_point(point, Launcher)
            except InputError as error:
                raise InputError(f"the launcher {called} cannot be used: {error}") from error
        raise InputError(f"unknown launcher {name!r}: choose {', '.join(known)}.{did_you_mean(called, known)}")
    return called


def build_job(table: Mapping[str, Any]) -> Job:
    """Build a job of plain data, as of a job file: fields of :class:`.Job`, and a table for each kind of options.

    Raises:
        RecipeError: an unknown key, or a value of the wrong type.
        InputError: a value that a job cannot have.
    """
    kinds = {options_name(kind): kind for launcher in launchers().values() for kind in launcher.options}
    tables = {name: _joined_names(kind, table[name]) for name, kind in kinds.items() if name in table}
    options = tuple(build(kinds[name], values, name) for name, values in tables.items())
    plain = {name: value for name, value in table.items() if name not in kinds}
    return replace(build(Job, plain, hint=lambda name, known: did_you_mean(name, [*known, *kinds])), options=options)


def _joined_names(kind: type[Any], table: Any) -> Any:
    """Join names that ``--set`` has split at their dots, such as ``kubernetes.resources.vpc.amazonaws.com/efa=4``."""
    nested = [name for name, hint in hints_of(kind).items() if "Any" in str(hint)]  # tables in tables
    entries = table.items() if isinstance(table, Mapping) else ()
    flat = {name: dict(leaves(value)) for name, value in entries if isinstance(value, dict) and name not in nested}
    return {**table, **flat} if flat else table


def _notes_on_gpus(job: Job, launcher: Launcher) -> tuple[str, ...]:
    """Say where ranks would train without a GPU, or leave some unused, since nobody asked for them."""
    if "gpus" not in launcher.takes or job.words[0] == "pack" or launcher.asks_for_gpus(job):
        return ()
    if job.gpus is None and "cpu" not in job.words and "--device=cpu" not in job.words:
        key, value = launcher.gpus
        return (f"{key} is not set: the job asks for no GPU; --set {key}={value} asks for some on each machine",)
    _, procs = job.shape
    if job.gpus and procs < job.gpus and not is_python(job.words[0]):
        return (f"{procs} of the {job.gpus} GPUs of each machine is used, one for each rank: --procs {job.gpus}",)
    return ()
