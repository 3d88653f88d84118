"""SkyPilot: a task file, and ``sky jobs launch`` for it: a managed job, which SkyPilot starts again elsewhere when its
machines are taken away.

SkyPilot numbers the machines (``SKYPILOT_NODE_RANK``) and lists their addresses, the first of which is rank 0's.
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from steadytrain.errors import InputError
from steadytrain.launch.job import Job
from steadytrain.launch.plan import Command, File, Plan, PlanStage, node_command
from steadytrain.launch.shared import require_shared

TAKES = frozenset({"folder", "port", "restarts", "keep", "grace_seconds", "cpus", "memory_gb", "gpus", "image", "sky"})
_NUMBER, _ADDRESS = "$SKYPILOT_NODE_RANK", "$address"
_FIRST = "address=$(printf '%s\\n' \"$SKYPILOT_NODE_IPS\" | head -n 1)"
_SAVED = 75


class _Dumper(yaml.SafeDumper):
    """A YAML writer that keeps the lines of a script apart."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        return self.represent_scalar("tag:yaml.org,2002:str", data, style="|" if "\n" in data else None)


_Dumper.add_representer(str, _Dumper.represent_str)


def render(job: Job) -> Plan:
    """Render a task file, and ``sky jobs launch`` for it."""
    if job.least:
        raise InputError("a task has a fixed number of machines: use a single number for --nodes")
    if job.image is None and job.sky.setup is None:
        raise InputError(
            "--on sky needs an image that has steadytrain (--set image=registry/name:tag), or the command that installs"
            " it there: --set 'sky.setup=pip install steadytrain'"
        )
    if job.gpus and not job.sky.accelerators:
        raise InputError(
            f"gpus is {job.gpus}, and SkyPilot asks for their name, too: --set sky.accelerators=H100:{job.gpus}"
        )
    require_shared(
        job,
        job.sky.mounts,
        machines="machines",
        remedy="mount a bucket (--set 'sky.mounts./data=s3://NAME')",
        folder=job.folder,
        copied=job.sky.workdir is not None,
    )
    file = File(name=f"{job.name}.sky.yaml", text=yaml.dump(_task(job), Dumper=_Dumper, sort_keys=False))
    secret_names = [name for name, value in sorted(job.env.items()) if value is None]
    secrets = [word for name in secret_names for word in ("--secret", name)]
    argv = ("sky", "jobs", "launch", "--yes", "--detach-run", *secrets, f"@{file.name}")
    submit = Command(argv=argv, variables=dict.fromkeys(secret_names))
    flag = f"--name {job.name}"
    notes = [f"sky jobs queue shows it; sky jobs logs {flag} its output; sky jobs cancel {flag} ends it"]
    if not job.sky.mounts:
        notes += [
            "files on the machines are lost with them: write the run to a bucket (--set 'sky.mounts./data=s3://NAME')"
        ]
    return Plan(stages=(PlanStage(kind="submit", commands=(submit,)),), files=(file,), notes=tuple(notes))


def _task(job: Job) -> dict[str, Any]:
    nodes, procs = job.shape
    resources: dict[str, Any] = {
        "infra": job.sky.infra,
        "accelerators": job.sky.accelerators,
        "cpus": f"{job.cpus}+" if job.cpus else None,
        "memory": f"{job.memory_gb}+" if job.memory_gb else None,
        "image_id": f"docker:{job.image}" if job.image else None,
        "use_spot": job.sky.spot or None,
        # The end of a machine is no error, nor are ranks that have saved because they were asked to stop.
        "job_recovery": {"max_restarts_on_errors": job.restarts, "recover_on_exit_codes": [_SAVED]},
    }
    words = (job.python, *node_command(job, "--node", _NUMBER, procs=procs, address=_ADDRESS))
    begin = len(words) - len(job.program)  # the user's own arguments are all quoted
    quoted = [f'"{word}"' if word in (_NUMBER, _ADDRESS) else shlex.quote(word) for word in words[:begin]]
    quoted += map(shlex.quote, words[begin:])
    enter = f"cd {shlex.quote(job.folder)} && " if job.folder else ""
    mounts = {place: {"source": bucket, "mode": "MOUNT_CACHED"} for place, bucket in job.sky.mounts.items()}
    task = {
        "name": job.name,
        "num_nodes": nodes,
        "resources": {name: value for name, value in resources.items() if value is not None},
        "envs": {name: value for name, value in sorted(job.env.items()) if value is not None},
        "secrets": {name: None for name, value in sorted(job.env.items()) if value is None},
        "workdir": job.sky.workdir,
        "file_mounts": mounts,
        "setup": job.sky.setup,
        "run": f"{_FIRST}\n{enter}exec {' '.join(quoted)}\n",
    }
    return {name: value for name, value in task.items() if value}
