"""SkyPilot: a task file, and ``sky jobs launch`` for it: a managed job, which SkyPilot starts again elsewhere when its
machines are taken away.

SkyPilot numbers the machines (``SKYPILOT_NODE_RANK``) and lists their addresses, the first of which is rank 0's.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from steadytrain.config.plain import check_types
from steadytrain.errors import InputError
from steadytrain.launch.job import Job, require, require_lines
from steadytrain.launch.patch import merge_patch
from steadytrain.launch.plan import Command, File, Launcher, Plan, PlanStage, node_command
from steadytrain.launch.shared import require_shared
from steadytrain.launch.supervise import PREEMPTED

_NUMBER, _ADDRESS = "$SKYPILOT_NODE_RANK", "$address"
_FIRST = "address=$(printf '%s\\n' \"$SKYPILOT_NODE_IPS\" | head -n 1)"


class _Dumper(yaml.SafeDumper):
    """A YAML writer that keeps the lines of a script apart."""


_TEXT = "tag:yaml.org,2002:str"
_Dumper.add_representer(str, lambda to, text: to.represent_scalar(_TEXT, text, style="|" if "\n" in text else None))


@dataclass(frozen=True, kw_only=True)
class Sky:
    """Options of ``--on sky``.

    Args:
        infra: where: ``aws/us-east-1``, ``gcp``, ``k8s``; None: the cheapest place that SkyPilot has access to.
        accelerators: GPUs of each machine by name and number, such as ``H100:8``.
        spot: take machines that may be taken away.
        setup: a shell command that installs steadytrain on each machine, where the image does not have it.
        workdir: folder of this machine that is copied to each, which is then the working directory.
        mounts: a folder of the machines -> the bucket that is seen there, such as ``s3://photos``.
        network_tier: ``best``: with InfiniBand, EFA or GPUDirect, where a cloud has it; None: SkyPilot's default.
        patch: a table that is merged over the task (:func:`.patch.merge_patch`).
    """

    infra: str | None = None
    accelerators: str | None = None
    spot: bool = False
    setup: str | None = None
    workdir: str | None = None
    mounts: Mapping[str, str] = field(default_factory=dict)
    network_tier: Literal["best", "standard"] | None = None
    patch: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self, "sky")
        for place, bucket in self.mounts.items():
            require(place.startswith("/"), "sky.mounts", place, "a path that starts with /")
            require("://" in bucket, f"sky.mounts.{place}", bucket, "a bucket, such as s3://photos")
        require_lines("sky", infra=self.infra, accelerators=self.accelerators, workdir=self.workdir)


def render(job: Job) -> Plan:
    """Render a task file, and ``sky jobs launch`` for it."""
    sky = job.options_of(Sky)
    if job.least:
        raise InputError("a task has a fixed number of machines: use a single number for --nodes")
    if job.image is None and sky.setup is None:
        raise InputError(
            "--on sky needs an image that has steadytrain (--set image=registry/name:tag), or the command that installs"
            " it there: --set 'sky.setup=pip install steadytrain'"
        )
    if job.gpus and not sky.accelerators:
        raise InputError(
            f"gpus is {job.gpus}, and SkyPilot asks for their name, too: --set sky.accelerators=H100:{job.gpus}"
        )
    require_shared(
        job,
        sky.mounts,
        machines="machines",
        remedy="mount a bucket (--set 'sky.mounts./data=s3://NAME')",
        copied=sky.workdir is not None,
    )
    task = merge_patch(_task(job), sky.patch, own=("num_nodes", "run"), where="sky.patch")
    file = File(name=f"{job.name}.sky.yaml", text=yaml.dump(task, Dumper=_Dumper, sort_keys=False))
    secret_names = [name for name, value in sorted(job.env.items()) if value is None]
    secrets = [word for name in secret_names for word in ("--secret", name)]
    argv = ("sky", "jobs", "launch", "--yes", "--detach-run", *secrets, f"@{file.name}")
    submit = Command(argv=argv, variables=dict.fromkeys(secret_names))
    flag = f"--name {job.name}"
    notes = [f"sky jobs queue shows it; sky jobs logs {flag} its output; sky jobs cancel {flag} ends it"]
    if not sky.mounts:
        notes += [
            "files on the machines are lost with them: write the run to a bucket (--set 'sky.mounts./data=s3://NAME')"
        ]
    return Plan(stages=(PlanStage(kind="submit", commands=(submit,)),), files=(file,), notes=tuple(notes))


def _task(job: Job) -> dict[str, Any]:
    sky = job.options_of(Sky)
    nodes, procs = job.shape
    resources: dict[str, Any] = {
        "infra": sky.infra,
        "accelerators": sky.accelerators,
        "cpus": f"{job.cpus}+" if job.cpus else None,
        "memory": f"{job.memory_gb}+" if job.memory_gb else None,
        "image_id": f"docker:{job.image}" if job.image else None,
        "use_spot": sky.spot or None,
        "network_tier": sky.network_tier,
        # The end of a machine is no error, nor are ranks that have saved because they were asked to stop.
        "job_recovery": {"max_restarts_on_errors": job.num_restarts, "recover_on_exit_codes": [PREEMPTED]},
    }
    words = (job.python, *node_command(job, "--node", _NUMBER, procs=procs, address=_ADDRESS))
    begin = len(words) - len(job.program)  # the user's own arguments are all quoted
    quoted = [f'"{word}"' if word in (_NUMBER, _ADDRESS) else shlex.quote(word) for word in words[:begin]]
    quoted += map(shlex.quote, words[begin:])
    enter = f"cd {shlex.quote(job.folder)} && " if job.folder else ""
    mounts = {place: {"source": bucket, "mode": "MOUNT_CACHED"} for place, bucket in sky.mounts.items()}
    task = {
        "name": job.name,
        "num_nodes": nodes,
        "resources": {name: value for name, value in resources.items() if value is not None},
        "envs": {name: value for name, value in sorted(job.env.items()) if value is not None},
        "secrets": {name: None for name, value in sorted(job.env.items()) if value is None},
        "workdir": sky.workdir,
        "file_mounts": mounts,
        "setup": sky.setup,
        "run": f"{_FIRST}\n{enter}exec {' '.join(quoted)}\n",
    }
    return {name: value for name, value in task.items() if value}


LAUNCHER = Launcher(
    render=render,
    takes=frozenset({"folder", "port", "restarts", "keep", "grace_seconds", "cpus", "memory_gb", "gpus", "image"}),
    options=(Sky,),
    names=("skypilot",),
    gpus=("sky.accelerators", "H100:8"),
    asks_for_gpus=lambda job: job.options_of(Sky).accelerators is not None,
)
