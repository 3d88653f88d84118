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
SUBMITS = True
_PORT = 29500
_RANKS = "ranks"
_PREEMPTED = 75
_USAGE = 2


def render(job: Job) -> Plan:
    """A file of manifests, and ``kubectl create`` for it."""
    if job.least:
        raise InputError("a Job has as many pods as it says: give one number of --nodes")
    if job.image is None:
        raise InputError("--on kubernetes needs an image that has steadytrain: --set image=registry/name:tag")
    secret = [name for name, value in job.env.items() if value is None]
    if secret and job.kubernetes.secret is None:
        raise InputError(
            f"--env {secret[0]} has no value, and pods do not see yours: put it into a Secret and give"
            " --set kubernetes.secret=NAME"
        )
    manifests = [_jobset(job)] if job.kubernetes.kind == "jobset" else [_service(job), _job(job)]
    text = "---\n".join(yaml.safe_dump(manifest, sort_keys=False, width=200) for manifest in manifests)
    where = ["-n", job.kubernetes.namespace] if job.kubernetes.namespace else []
    submit = Command(argv=("kubectl", "create", *where, "-f", f"@{job.name}.yaml"))
    shown = " ".join(["kubectl", *where])
    notes = [f"{shown} logs -f -l {_LABEL}={job.name} --prefix --max-log-requests={job.shape[0]} shows its output"]
    notes += [f"{shown} delete -f the file stops and removes it; then the same command goes on from where it was"]
    if not job.kubernetes.claim:
        notes += ["nothing that the pods write outlives them: --set kubernetes.claim=NAME gives them a volume"]
    file = File(name=f"{job.name}.yaml", text=text)
    return Plan(stages=(Stage(what="submit", commands=(submit,)),), files=(file,), notes=tuple(notes))


_LABEL = "steadytrain/job"


def _meta(job: Job) -> dict[str, Any]:
    space = {"namespace": job.kubernetes.namespace} if job.kubernetes.namespace else {}
    return {"name": job.name, **space, "labels": {_LABEL: job.name}}


def _service(job: Job) -> dict[str, Any]:
    """Gives each pod a name, whether it is ready or not."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {_LABEL: job.name},
        "ports": [{"name": "ranks", "port": _PORT}],
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _meta(job), "spec": spec}


def _job(job: Job) -> dict[str, Any]:
    rules = [
        {"action": "Ignore", "onExitCodes": {"containerName": _RANKS, "operator": "In", "values": [_PREEMPTED]}},
        {"action": "FailJob", "onExitCodes": {"containerName": _RANKS, "operator": "In", "values": [_USAGE]}},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    limits = {"backoffLimit": job.restarts * job.shape[0], "podFailurePolicy": {"rules": rules}}
    spec = {**_indexed(job), **limits, "template": _pod(job, f"{job.name}-0.{job.name}")}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": _meta(job), "spec": spec}


def _jobset(job: Job) -> dict[str, Any]:
    """Fails as one and starts as one; what the pods' policy let fail at once is started again without being counted."""
    rule = {"action": "FailJob", "onExitCodes": {"containerName": _RANKS, "operator": "In", "values": [_PREEMPTED]}}
    disrupted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    limits = {"backoffLimit": 0, "podFailurePolicy": {"rules": [rule, disrupted]}}
    pod = _pod(job, f"{job.name}-{_RANKS}-0-0.{job.name}")
    uncounted = {
        "name": "preempted",
        "action": "RestartJobSetAndIgnoreMaxRestarts",
        "onJobFailureReasons": ["PodFailurePolicy"],
    }
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": job.name},
        "failurePolicy": {"maxRestarts": job.restarts, "rules": [uncounted]},
        "replicatedJobs": [
            {"name": _RANKS, "replicas": 1, "template": {"spec": {**_indexed(job), **limits, "template": pod}}}
        ],
    }
    return {"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": _meta(job), "spec": spec}


def _indexed(job: Job) -> dict[str, Any]:
    nodes, _ = job.shape
    spec: dict[str, Any] = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes}
    return spec | ({"activeDeadlineSeconds": job.minutes * 60} if job.minutes else {})


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
    variables = [_variable(job, name, value) for name, value in sorted(job.env.items())]
    if procs == 1:
        words = rank_command(job)
        world = {"WORLD_SIZE": nodes, "MASTER_ADDR": address, "MASTER_PORT": _PORT}  # the index: the controller's
        variables += [{"name": name, "value": str(value)} for name, value in world.items()] if nodes > 1 else []
    else:
        words = node_command(job, "--node", "$(JOB_COMPLETION_INDEX)", procs=procs, address=address, port=_PORT)
    begins = len(words) - len(job.program)
    # Kubernetes takes $(NAME) for a variable everywhere; in the user's own words it is to stay what it is.
    args = [word.replace("$(", "$$(") if place >= begins else word for place, word in enumerate(words)]
    container: dict[str, Any] = {"name": _RANKS, "image": job.image, "command": [job.python], "args": args}
    if job.folder:
        container["workingDir"] = job.folder
    if variables:
        container["env"] = variables
    if resources := _resources(job):
        container["resources"] = resources
    # What processes share would else be 64 MB; NCCL wants more.
    mounts = [{"name": "memory", "mountPath": "/dev/shm"}]
    mounts += [{"name": "shared", "mountPath": job.kubernetes.mount}] if job.kubernetes.claim else []
    return container | {"volumeMounts": mounts}


def _variable(job: Job, name: str, value: str | None) -> dict[str, Any]:
    if value is not None:
        return {"name": name, "value": value.replace("$(", "$$(")}
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": job.kubernetes.secret, "key": name}}}


def _resources(job: Job) -> dict[str, dict[str, str]]:
    requests = {"cpu": str(job.cpus)} if job.cpus else {}
    requests |= {"memory": f"{job.memory_gb}G"} if job.memory_gb else {}
    limits = {"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}
    limits |= {"memory": requests["memory"]} if "memory" in requests else {}
    return {name: amounts for name, amounts in (("requests", requests), ("limits", limits)) if amounts}
