"""YARN: a service specification for its own services framework (Hadoop 3.2 or later), and ``yarn app -launch`` for it.

Each container is a machine of the job: YARN writes its number in place of ``${COMPONENT_ID}``, and its registry's DNS
gives the first one a name.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import Any

from steadytrain.errors import InputError
from steadytrain.launch.job import Job
from steadytrain.launch.plan import Command, File, Launcher, Plan, PlanStage, node_command
from steadytrain.launch.shared import unshared

_COMPONENT = "ranks"
_FIRST = f"{_COMPONENT}-0.${{SERVICE_NAME}}.${{USER}}.${{DOMAIN}}"
_NUMBER = "${COMPONENT_ID}"


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """Options of ``--on yarn``: the queue to submit to."""

    queue: str = "default"


def render(job: Job) -> Plan:
    """Render the specification, and ``yarn app -launch`` for it."""
    if job.least:
        raise InputError("a component has a fixed number of containers: use a single number for --nodes")
    if secret := [name for name, value in job.env.items() if value is None]:
        raise InputError(
            f"--env {secret[0]} has no value, and YARN's specification has no field for secrets: let the program read"
            " it from a file that only you can read"
        )
    if relative := unshared(job, ["/"], folder=job.folder):
        raise InputError(
            f"{' and '.join(relative)}: a relative path starts in a folder of each container's own, which is lost with"
            " it: name absolute paths on storage that all containers reach, or --set folder=/PATH"
        )
    nodes, procs = job.shape
    words = node_command(job, "--node", _NUMBER, procs=procs, address=_FIRST)
    # YARN's own ${...} stand unquoted: it puts the values in before a shell reads the line.
    quoted = [word if word in (_NUMBER, _FIRST) else shlex.quote(word) for word in (job.python, *words)]
    command = " ".join(["exec", *quoted])
    # YARN has no default of its own, and one core or 4 GB for all ranks of a machine would starve them.
    cores, memory_gb = job.cores or procs, job.memory_gb or 4 * procs
    resource: dict[str, Any] = {"cpus": cores, "memory": str(memory_gb * 1024)}
    if job.gpus:
        resource["additional"] = {"yarn.io/gpu": {"value": job.gpus, "unit": ""}}
    # By default YARN starts what fails for ever. Releases differ in whether they look at the service or its parts.
    retries = {"yarn.service.container-failure.retry.max": str(job.restarts)}
    artifact = {"artifact": {"id": job.image, "type": "DOCKER"}} if job.image else {}
    component = {
        "name": _COMPONENT,
        "number_of_containers": nodes,
        **artifact,
        "launch_command": f"cd {shlex.quote(job.folder)} && {command}" if job.folder else command,
        "resource": resource,
        "restart_policy": "ON_FAILURE" if job.restarts else "NEVER",
        "configuration": {"env": dict(job.env), "properties": retries},
    }
    lifetime = {"lifetime": job.minutes * 60} if job.minutes else {}
    service = {"name": job.name, "version": "1.0.0", "queue": job.options_of(Yarn).queue, **lifetime}
    service |= {"configuration": {"properties": retries}, "components": [component]}
    file = File(name=f"{job.name}.json", text=json.dumps(service, indent=2) + "\n")
    submit = Command(argv=("yarn", "app", "-launch", job.name, f"@{file.name}"))
    asked = [f"{cores} cores (--set cpus=N)"] if job.cpus is None else []
    asked += [f"{memory_gb} GB (--set memory_gb=N)"] if job.memory_gb is None else []
    notes = (
        *([f"each container asks for {' and '.join(asked)}"] if asked else []),
        f"yarn app -status {job.name} shows it; yarn app -destroy {job.name} stops and removes it",
        "YARN's registry DNS, which must run in the cluster, finds the first container",
        "data and runs must be on storage that all containers can reach",
    )
    return Plan(stages=(PlanStage(kind="submit", commands=(submit,)),), files=(file,), notes=notes)


LAUNCHER = Launcher(
    render=render,
    takes=frozenset({"folder", "port", "restarts", "grace_seconds", "minutes", "cpus", "memory_gb", "gpus", "image"}),
    options=(Yarn,),
    names=("hadoop",),
    counts_machines=True,
)
