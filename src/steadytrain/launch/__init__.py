"""Start the same training on one machine or many: a :class:`Job` becomes a :class:`Plan` before anything is touched.

>>> plan = render("slurm", Job(words=("train", "a.rec"), nodes=2))
>>> [file.name for file in plan.files], plan.stages[0].commands[0].argv
(['steadytrain.sbatch'], ('sbatch', '--parsable', '@steadytrain.sbatch'))
"""

from __future__ import annotations

from dataclasses import fields, replace

from steadytrain.errors import InputError, did_you_mean
from steadytrain.launch import kubernetes, local, mpi, sky, slurm, ssh, yarn
from steadytrain.launch.job import Job, is_python
from steadytrain.launch.plan import Command, File, Launcher, Plan, PlanStage

__all__ = ["LAUNCHERS", "Command", "File", "Job", "Launcher", "Plan", "PlanStage", "launcher_name", "render"]

LAUNCHERS: dict[str, Launcher] = {
    "local": local,
    "ssh": ssh,
    "mpi": mpi,
    "slurm": slurm,
    "kubernetes": kubernetes,
    "yarn": yarn,
    "sky": sky,
}
OTHER_NAMES = {
    **dict.fromkeys(("k8s", "kube", "kubectl"), "kubernetes"),
    **dict.fromkeys(("sbatch", "srun"), "slurm"),
    **dict.fromkeys(("mpirun", "mpiexec", "openmpi"), "mpi"),
    "skypilot": "sky",
    "hadoop": "yarn",
}
"""Other names of the launchers."""
_ALWAYS = {"words", "nodes", "procs", "env", "name", "python", "inputs", "outputs", "mounted"}


def render(on: str, job: Job) -> Plan:
    """Render what a launcher would write and run for a job, without writing or running anything.

    Raises:
        InputError: no such launcher, or a job that it cannot start.
    """
    on = launcher_name(on)
    launcher = LAUNCHERS[on]
    if job.tasks and "tasks" not in launcher.TAKES:
        raise InputError(f"--on {on} takes no array of jobs: use slurm")
    plan = launcher.render(job)
    plain = Job(words=("train",))
    set_fields = {field.name for field in fields(job) if getattr(job, field.name) != getattr(plain, field.name)}
    unused = sorted(set_fields - launcher.TAKES - _ALWAYS)
    notes = (f"{', '.join(unused)}: not used by {on}",) if unused else ()
    return replace(plan, notes=plan.notes + notes + _notes_on_gpus(job, launcher))


def launcher_name(name: str) -> str:
    """Return the launcher that a name stands for. Raises InputError, with the names that there are.

    >>> launcher_name("k8s")
    'kubernetes'
    """
    known = OTHER_NAMES.get(name.lower(), name.lower())
    if known not in LAUNCHERS:
        near = did_you_mean(known, LAUNCHERS)
        raise InputError(f"unknown launcher {name!r}: choose {', '.join(LAUNCHERS)}.{near}")
    return known


def _notes_on_gpus(job: Job, launcher: Launcher) -> tuple[str, ...]:
    """Say where ranks would train without a GPU, or leave some unused, since nobody asked for them."""
    asks_by_options = any("gpu" in option or "gres" in option for option in job.slurm.options)
    if "gpus" not in launcher.TAKES or job.words[0] == "pack" or job.sky.accelerators or asks_by_options:
        return ()
    if job.gpus is None and "cpu" not in job.words and "--device=cpu" not in job.words:
        key, value = ("sky.accelerators", "H100:8") if "sky" in launcher.TAKES else ("gpus", "8")
        return (f"{key} is not set: the job asks for no GPU; --set {key}={value} asks for some on each machine",)
    _, procs = job.shape
    if job.gpus and procs < job.gpus and not is_python(job.words[0]):
        return (f"{procs} of the {job.gpus} GPUs of each machine is used, one for each rank: --procs {job.gpus}",)
    return ()
