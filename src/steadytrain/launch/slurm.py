"""Slurm: a script for ``sbatch``, whose ``srun`` starts the ranks.

Before the time limit Slurm tells the script, which asks the ranks to save; when they have, it puts the job back into
the queue, where it goes on later under the same number. A job that is preempted, or loses a node, Slurm queues again by
itself.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from steadytrain.config.plain import check_types
from steadytrain.errors import InputError
from steadytrain.format import count
from steadytrain.launch.job import Job, require, require_lines
from steadytrain.launch.plan import Command, File, Launcher, Plan, PlanStage, rank_command
from steadytrain.launch.shared import require_shared

_BODY = """\
set -u
{exports}MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT

{task}asked='' cancelled=''
trap 'asked=yes; scancel --signal=USR1 "{job}"' USR1 # shortly before the time limit: the ranks save and end
trap 'cancelled=yes' TERM

srun {flags} {program} &
ranks=$!
while kill -0 "$ranks" 2> /dev/null; do wait "$ranks"; done # a signal ends the wait, not the ranks
wait "$ranks"
code=$?

again='' failures=".{name}-{job}.failures" # Slurm's own count has the ends of time in it
case "$code" in
    0 | 2) ;;             # done, or wrong use, which another start would not mend
    75) again={kept} ;;   # saved, because {saved}
    *)
        [ -n "$asked" ] || echo "$code" >> "$failures"
        if [ -n "$asked" ] || [ "$(wc -l < "$failures")" -le {restarts} ]; then again=yes; fi
        ;;
esac
[ -n "$again" ] || rm -f "$failures"
if [ -n "$again" ] && [ -z "$cancelled" ]; then
    echo "steady launch: the ranks ended with exit code $code: job {job} is queued again" >&2
    scontrol requeue "{job}" && sleep 60 # until Slurm ends this attempt
fi
exit "$code"
"""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """Options of ``--on slurm``.

    Args:
        partition, account, qos: as sbatch calls them.
        signal_seconds: how long before the time limit the ranks are asked to save; the job is then queued again.
        options: further options for sbatch, each a line ``#SBATCH`` of the script.
        srun: further words for srun.
        mounts: folders that containers of ``image`` see beside the working directory: ``/data``, ``/mnt/photos:/data``.
    """

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    signal_seconds: int = 120
    options: tuple[str, ...] = ()
    srun: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "slurm")
        seconds = self.signal_seconds
        require(1 <= seconds <= 65535, "slurm.signal_seconds", seconds, "1 to 65535")
        require(all("\n" not in word for word in self.options), "slurm.options", self.options, "a single line")
        for mount in self.mounts:
            require(mount.startswith("/") and "," not in mount, "slurm.mounts", mount, "/FOLDER or /FOLDER:/SEEN-AS")
        require_lines("slurm", partition=self.partition, account=self.account, qos=self.qos)


def render(job: Job) -> Plan:
    """Render one script, and ``sbatch`` for it."""
    if job.least:
        raise InputError("Slurm starts all machines of a job or none: use a single number for --nodes")
    if job.image:
        seen = [mount.split(":")[:2][-1] for mount in _mounts(job)]
        remedy = "mount their folder (--set 'slurm.mounts=[\"/data\"]')"
        require_shared(job, seen, machines="containers", remedy=remedy)
    file = File(name=f"{job.name}.sbatch", text=_script(job), mode=0o755)
    secret_names = [name for name, value in sorted(job.env.items()) if value is None]
    submit = Command(argv=("sbatch", "--parsable", f"@{file.name}"), variables=dict.fromkeys(secret_names))
    number = "NUMBER_TASK" if job.tasks else "NUMBER"
    log = f"{job.name}-{number}.log in {job.folder or 'the working directory'}"
    notes = (f"its output: {log}", "squeue --me shows it; scancel NUMBER makes it save and stop", *_note_on_cores(job))
    return Plan(stages=(PlanStage(kind="submit", commands=(submit,)),), files=(file,), notes=notes)


def _script(job: Job) -> str:
    slurm = job.options_of(Slurm)
    nodes, procs = job.shape
    cpus_per_rank = _cores_per_rank(job)
    options = {
        "job-name": job.name,
        "array": f"0-{len(job.tasks) - 1}" + f"%{job.at_once}" * bool(job.at_once) if job.tasks else None,
        "nodes": nodes,
        "ntasks-per-node": procs,
        "cpus-per-task": cpus_per_rank,
        # A machine's, not a task's: a task that is given one GPU of its own knows it as the first, whatever its rank.
        "gpus-per-node": job.gpus,
        "mem": f"{job.memory_gb}G" if job.memory_gb else None,
        "time": job.minutes,
        "partition": slurm.partition,
        "account": slurm.account,
        "qos": slurm.qos,
        "chdir": job.folder,
        "output": "%x-%A_%a.log" if job.tasks else "%x-%j.log",
        "open-mode": "append",
    }
    lines = [f"--{name}={shlex.quote(str(value))}" for name, value in options.items() if value is not None]
    lines += ["--requeue", f"--signal=B:USR1@{slurm.signal_seconds}", *slurm.options]
    directives = "".join(f"#SBATCH {line}\n" for line in lines)
    exports = [f"export {name}={shlex.quote(value)}\n" for name, value in sorted(job.env.items()) if value is not None]
    mounts = ",".join(mount if ":" in mount else f"{mount}:{mount}" for mount in _mounts(job))
    container = {"image": job.image, "mounts": mounts, "workdir": job.folder}  # for pyxis, NVIDIA's plugin
    flags = [
        f"--kill-on-bad-exit={int(not job.is_independent)}",
        *([f"--cpus-per-task={cpus_per_rank}"] if cpus_per_rank else []),
        *(f"--container-{name}={value}" for name, value in container.items() if job.image and value),
        *slurm.srun,
    ]
    body = _BODY.format(
        exports="".join(exports),
        task=_choose_task(job) if job.tasks else "",
        # The number of an array stands for all of its tasks.
        job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID" if job.tasks else "$SLURM_JOB_ID",
        flags=shlex.join(flags),
        program=f'{shlex.quote(job.python)} "$@"' if job.tasks else shlex.join((job.python, *rank_command(job))),
        restarts=job.num_restarts,
        kept="yes" if job.keep else "$asked",
        saved="it was asked to" if job.keep else "the time was up",
        name=job.name,
    )
    return f"#!/bin/bash\n{directives}\n{body}"


def _mounts(job: Job) -> list[str]:
    return [*([job.folder] if job.folder else []), *job.options_of(Slurm).mounts]


def _cores_per_rank(job: Job) -> int | None:
    """Return the cores to ask for each rank; None leaves it to the options of the user's own, or to Slurm."""
    if job.cores is None or (job.cpus is None and _asks_for_cores(job)):
        return None
    return max(1, job.cores // job.shape[1])


def _asks_for_cores(job: Job) -> bool:
    return any(option.startswith(("-c", "--cpus-per-")) for option in job.options_of(Slurm).options)


def _note_on_cores(job: Job) -> tuple[str, ...]:
    """Say how many cores the ranks get where the user has not: Slurm's own default is one for each."""
    if job.cpus is not None or _asks_for_cores(job):
        return ()
    if (cores := _cores_per_rank(job)) is not None:
        return (f"each rank asks for {count(cores, 'core')} to decode images: --set cpus=N is for all of a machine",)
    return ("cpus is not set: by Slurm's own default a rank gets one core; --set cpus=N asks for N on each machine",)


def _choose_task(job: Job) -> str:
    """Render the lines that set the script's arguments to those of its task."""
    commands = (rank_command(replace(job, words=task, tasks=())) for task in job.tasks)
    cases = [f"    {number}) set -- {shlex.join(command)} ;;" for number, command in enumerate(commands)]
    return "\n".join(['case "$SLURM_ARRAY_TASK_ID" in', *cases, "esac", "", ""])


LAUNCHER = Launcher(
    render=render,
    takes=frozenset(
        {"tasks", "at_once", "ranks", "folder", "restarts", "keep", "minutes", "cpus", "memory_gb", "gpus", "image"}
    ),
    options=(Slurm,),
    names=("sbatch", "srun"),
    counts_machines=True,
    asks_for_gpus=lambda job: any("gpu" in option or "gres" in option for option in job.options_of(Slurm).options),
)
