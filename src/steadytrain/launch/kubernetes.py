"""Kubernetes: an Indexed Job and the service by which its pods find the first, or a JobSet; for ``kubectl create``.

Not ``apply``, which would leave a job that has ended as it is and say that all is well.

Exit code 75 (saved, asked to stop) is no failure: the pod is started again. In a Job each pod that ends is replaced by
itself; the others, which have lost a rank, end with code 4 and are replaced as well, so that one failure is as many as
there are pods. A JobSet starts all pods anew together.
"""

from __future__ import annotations

from typing import Any

import yaml

from steadytrain.errors import InputError
from steadytrain.launch.job import Job
from steadytrain.launch.plan import Command, File, Plan, Stage, node_command, rank_command

TAKES = frozenset(
    {"folder", "restarts", "grace_seconds", "minutes", "cpus", "memory_gb", "gpus", "image", "kubernetes"}
)
_PORT = 29500
_RANKS = "ranks"
_LABEL = "steadytrain/job"
_PREEMPTED = 75
_USAGE = 2


def render(job: Job) -> Plan:
    """A file of manifests, and ``kubectl create`` for it."""
    if job.least:
        raise InputError("a Job has a fixed number of pods: use a single number for --nodes")
    if job.image is None:
        raise InputError("--on kubernetes needs an image that has steadytrain: --set image=registry/name:tag")
    secret = [name for name, value in job.env.items() if value is None]
    if secret and job.kubernetes.secret is None:
        raise InputError(
            f"--env {secret[0]} has no value, and pods cannot read variables of this machine: put it into a"
            " Secret and use --set kubernetes.secret=NAME"
        )
    text = "---\n".join(yaml.safe_dump(manifest, sort_keys=False, width=200) for manifest in _manifests(job))
    where = ["-n", job.kubernetes.namespace] if job.kubernetes.namespace else []
    submit = Command(argv=("kubectl", "create", *where, "-f", f"@{job.name}.yaml"))
    shown = " ".join(["kubectl", *where])
    notes = [f"{shown} logs -f -l {_LABEL}={job.name} --prefix --max-log-requests={job.shape[0]} shows its output"]
    notes += [f"{shown} delete -f FILE stops and removes it; the same command then resumes the run"]
    if not job.kubernetes.claim:
        notes += ["files that the pods write are lost when they end: --set kubernetes.claim=NAME gives them a volume"]
    file = File(name=f"{job.name}.yaml", text=text)
    return Plan(stages=(Stage(what="submit", commands=(submit,)),), files=(file,), notes=tuple(notes))


def _manifests(job: Job) -> list[dict[str, Any]]:
    space = {"namespace": job.kubernetes.namespace} if job.kubernetes.namespace else {}
    meta = {"name": job.name, **space, "labels": {_LABEL: job.name}}
    nodes, _ = job.shape
    indexed: dict[str, Any] = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes}
    if job.minutes:
        indexed["activeDeadlineSeconds"] = job.minutes * 60
    if job.kubernetes.kind == "jobset":
        # Fails and starts as one; what the pods' policy lets fail at once is started again without being counted.
        rules: list[dict[str, Any]] = [
            {"action": "FailJob", "onExitCodes": _ended_with(_PREEMPTED)},
            {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
        ]
        limits: dict[str, Any] = {"backoffLimit": 0, "podFailurePolicy": {"rules": rules}}
        template = {"spec": {**indexed, **limits, "template": _pod(job, f"{job.name}-{_RANKS}-0-0.{job.name}")}}
        uncounted = {
            "name": "preempted",
            "action": "RestartJobSetAndIgnoreMaxRestarts",
            "onJobFailureReasons": ["PodFailurePolicy"],
        }
        spec: dict[str, Any] = {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": job.name},
            "failurePolicy": {"maxRestarts": job.restarts, "rules": [uncounted]},
            "replicatedJobs": [{"name": _RANKS, "replicas": 1, "template": template}],
        }
        return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": meta, "spec": spec}]
    service = {  # gives each pod a name, whether it is ready or not
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {_LABEL: job.name},
        "ports": [{"name": "ranks", "port": _PORT}],
    }
    rules = [
        {"action": "Ignore", "onExitCodes": _ended_with(_PREEMPTED)},
        {"action": "FailJob", "onExitCodes": _ended_with(_USAGE)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    limits = {"backoffLimit": job.restarts * nodes, "podFailurePolicy": {"rules": rules}}
    spec = {**indexed, **limits, "template": _pod(job, f"{job.name}-0.{job.name}")}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec},
    ]


def _ended_with(code: int) -> dict[str, Any]:
    return {"containerName": _RANKS, "operator": "In", "values": [code]}


def _pod(job: Job, address: str) -> dict[str, Any]:
    """``address``: of the first pod."""
    claim = job.kubernetes.claim
    shared = {"name": "shared", "persistentVolumeClaim": {"claimName": claim}}
    volumes = [{"name": "memory", "emptyDir": {"medium": "Memory"}}, *([shared] if claim else [])]
    spec: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": job.grace_seconds}
    if job.kubernetes.kind == "job":
        spec["subdomain"] = job.name
    if job.kubernetes.selector:
        spec["nodeSelector"] = dict(job.kubernetes.selector)
    spec |= {"containers": [_container(job, address)], "volumes": volumes}
    return {"metadata": {"labels": {_LABEL: job.name}}, "spec": spec}


def _container(job: Job, address: str) -> dict[str, Any]:
    nodes, procs = job.shape
    variables: list[dict[str, Any]] = []
    # Kubernetes takes $(NAME) for a variable everywhere; in the user's own words it is to stay what it is.
    for name, value in sorted(job.env.items()):
        secret = {"secretKeyRef": {"name": job.kubernetes.secret, "key": name}}
        variables.append(
            {"name": name, **({"valueFrom": secret} if value is None else {"value": value.replace("$(", "$$(")})}
        )
    if procs == 1:
        words = rank_command(job)
        world = {"WORLD_SIZE": nodes, "MASTER_ADDR": address, "MASTER_PORT": _PORT}  # the index: the controller's
        variables += [{"name": name, "value": str(value)} for name, value in world.items()] if nodes > 1 else []
    else:
        words = node_command(job, "--node", "$(JOB_COMPLETION_INDEX)", procs=procs, address=address, port=_PORT)
    begins = len(words) - len(job.program)
    args = [word.replace("$(", "$$(") if place >= begins else word for place, word in enumerate(words)]
    container: dict[str, Any] = {"name": _RANKS, "image": job.image, "command": [job.python], "args": args}
    if job.folder:
        container["workingDir"] = job.folder
    if variables:
        container["env"] = variables
    memory = {"memory": f"{job.memory_gb}G"} if job.memory_gb else {}
    requests = ({"cpu": str(job.cpus)} if job.cpus else {}) | memory
    limits = ({"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}) | memory
    if requests or limits:
        amounts = {"requests": requests, "limits": limits}
        container["resources"] = {name: amount for name, amount in amounts.items() if amount}
    # What processes share would else be 64 MB; NCCL wants more.
    mounts = [{"name": "memory", "mountPath": "/dev/shm"}]
    mounts += [{"name": "shared", "mountPath": job.kubernetes.mount}] if job.kubernetes.claim else []
    return container | {"volumeMounts": mounts}
