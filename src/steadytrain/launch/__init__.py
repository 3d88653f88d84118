"""Start the same training on one machine or many: a :class:`Job` becomes a :class:`Plan` before anything is touched.

>>> plan = render("slurm", Job(words=("train", "a.rec"), nodes=2))
>>> [file.name for file in plan.files], plan.stages[0].commands[0].argv
(['steadytrain.sbatch'], ('sbatch', '--parsable', '@steadytrain.sbatch'))
"""

from __future__ import annotations

from dataclasses import fields, replace

from steadytrain.errors import InputError, did_you_mean
from steadytrain.launch import kubernetes, local, mpi, sky, slurm, ssh, yarn
from steadytrain.launch.job import Job
from steadytrain.launch.plan import Command, File, Launcher, Plan, Stage

__all__ = ["LAUNCHERS", "Command", "File", "Job", "Launcher", "Plan", "Stage", "render"]

LAUNCHERS: dict[str, Launcher] = {
    "local": local,
    "ssh": ssh,
    "mpi": mpi,
    "slurm": slurm,
    "kubernetes": kubernetes,
    "yarn": yarn,
    "sky": sky,
}
_ALWAYS = {"words", "nodes", "procs", "env", "name", "python"}


def render(on: str, job: Job) -> Plan:
    """Render what a launcher would write and run for a job, without writing or running anything.

    Raises:
        InputError: no such launcher, or a job that it cannot start.
    """
    if on not in LAUNCHERS:
        raise InputError(f"unknown launcher {on!r}: choose {', '.join(LAUNCHERS)}.{did_you_mean(on, LAUNCHERS)}")
    launcher = LAUNCHERS[on]
    if job.tasks and "tasks" not in launcher.TAKES:
        raise InputError(f"--on {on} takes no array of jobs: use slurm")
    plan = launcher.render(job)
    plain = Job(words=("train",))
    set_fields = {field.name for field in fields(job) if getattr(job, field.name) != getattr(plain, field.name)}
    unused = sorted(set_fields - launcher.TAKES - _ALWAYS)
    notes = (f"{', '.join(unused)}: not used by {on}",) if unused else ()
    return replace(plan, notes=plan.notes + notes)
