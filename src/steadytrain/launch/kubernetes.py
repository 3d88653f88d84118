"""Kubernetes: an Indexed Job and the service by which its pods find the first, or a JobSet; for ``kubectl create``.

Not ``apply``, which would leave a job that has ended as it is and say that all is well.

Exit code 75 (saved, asked to stop) is no failure: the pod is started again. In a Job each pod that ends is replaced by
itself; the others, which have lost a rank, end with code 4 and are replaced as well, so that one failure is as many as
there are pods. A JobSet starts all pods anew together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from steadytrain.config.plain import check_types
from steadytrain.errors import InputError
from steadytrain.launch.job import Job, require
from steadytrain.launch.plan import Command, File, Launcher, Plan, PlanStage, node_command, rank_command
from steadytrain.launch.shared import require_shared

_PORT = 29500
_RANKS = "ranks"


_LABEL = "steadytrain/job"
_PREEMPTED = 75
_USAGE = 2


@dataclass(frozen=True, kw_only=True)
class Kubernetes:
    """Options of ``--on kubernetes``.

    Args:
        kind: an Indexed ``job``, whose pods are replaced one by one; or a ``jobset``, whose pods start anew together
            (that needs JobSet's controller in the cluster).
        namespace: None: the one that kubectl is set to.
        claim: a PersistentVolumeClaim for data and runs, seen by all pods under ``mount``.
        secret: a Secret that holds the variables given without a value.
        selector: labels of the machines to take.
    """

    kind: Literal["job", "jobset"] = "job"
    namespace: str | None = None
    claim: str | None = None
    mount: str = "/data"
    secret: str | None = None
    selector: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self, "kubernetes")
        require(self.mount.startswith("/"), "kubernetes.mount", self.mount, "a path that starts with /")


def render(job: Job) -> Plan:
    """Render a file of manifests, and ``kubectl create`` for it."""
    kubernetes = job.options_of(Kubernetes)
    if job.least:
        raise InputError("a Job has a fixed number of pods: use a single number for --nodes")
    if job.image is None:
        raise InputError("--on kubernetes needs an image that has steadytrain: --set image=registry/name:tag")
    secret = [name for name, value in job.env.items() if value is None]
    if secret and kubernetes.secret is None:
        raise InputError(
            f"--env {secret[0]} has no value, and pods cannot read variables of this machine: put it into a"
            " Secret and use --set kubernetes.secret=NAME"
        )
    require_shared(
        job,
        [kubernetes.mount] if kubernetes.claim else [],
        machines="pods",
        remedy=f"mount one (--set kubernetes.claim=NAME, seen at {kubernetes.mount})",
        folder=job.folder,
    )
    text = "---\n".join(yaml.safe_dump(manifest, sort_keys=False, width=200) for manifest in _manifests(job))
    namespace = ["-n", kubernetes.namespace] if kubernetes.namespace else []
    submit = Command(argv=("kubectl", "create", *namespace, "-f", f"@{job.name}.yaml"))
    kubectl = " ".join(["kubectl", *namespace])
    notes = [f"{kubectl} logs -f -l {_LABEL}={job.name} --prefix --max-log-requests={job.shape[0]} shows its output"]
    notes += [f"{kubectl} delete -f FILE stops and removes it; the same command then resumes the run"]
    if not kubernetes.claim:
        notes += ["files that the pods write are lost when they end: --set kubernetes.claim=NAME gives them a volume"]
    file = File(name=f"{job.name}.yaml", text=text)
    return Plan(stages=(PlanStage(kind="submit", commands=(submit,)),), files=(file,), notes=tuple(notes))


def _manifests(job: Job) -> list[dict[str, Any]]:
    kubernetes = job.options_of(Kubernetes)
    space = {"namespace": kubernetes.namespace} if kubernetes.namespace else {}
    meta = {"name": job.name, **space, "labels": {_LABEL: job.name}}
    nodes, _ = job.shape
    indexed: dict[str, Any] = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes}
    if job.minutes:
        indexed["activeDeadlineSeconds"] = job.minutes * 60
    if kubernetes.kind == "jobset":
        # Fails and starts as one; what the pods' policy lets fail at once is started again without being counted.
        rules: list[dict[str, Any]] = [
            {"action": "FailJob", "onExitCodes": _exited_with(_PREEMPTED)},
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
        {"action": "Ignore", "onExitCodes": _exited_with(_PREEMPTED)},
        {"action": "FailJob", "onExitCodes": _exited_with(_USAGE)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    limits = {"backoffLimit": job.restarts * nodes, "podFailurePolicy": {"rules": rules}}
    spec = {**indexed, **limits, "template": _pod(job, f"{job.name}-0.{job.name}")}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": meta, "spec": spec},
    ]


def _exited_with(code: int) -> dict[str, Any]:
    return {"containerName": _RANKS, "operator": "In", "values": [code]}


def _pod(job: Job, address: str) -> dict[str, Any]:
    """Return the template of a pod of ranks; ``address``: of the first pod."""
    kubernetes = job.options_of(Kubernetes)
    spec: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": job.grace_seconds}
    spec |= {"nodeSelector": dict(kubernetes.selector)} if kubernetes.selector else {}
    spec |= {"subdomain": job.name} if kubernetes.kind == "job" else {}
    nodes, procs = job.shape
    variables = _variables(job)
    if procs == 1:
        words = rank_command(job)
        world = {"WORLD_SIZE": nodes, "MASTER_ADDR": address, "MASTER_PORT": _PORT}  # the index: the controller's
        variables += [{"name": name, "value": str(value)} for name, value in world.items()] if nodes > 1 else []
    else:
        words = node_command(job, "--node", "$(JOB_COMPLETION_INDEX)", procs=procs, address=address, port=_PORT)
    container: dict[str, Any] = {"name": _RANKS, "image": job.image, "command": [job.python], "args": _args(job, words)}
    if job.folder:
        container["workingDir"] = job.folder
    if variables:
        container["env"] = variables
    if resources := _resources(job):
        container["resources"] = resources
    spec |= {"containers": [container | {"volumeMounts": _mounts(job)}], "volumes": _volumes(job)}
    return {"metadata": {"labels": {_LABEL: job.name}}, "spec": spec}


# Kubernetes replaces $(NAME) by a variable everywhere; in the user's arguments and values it has to stay as it is.


def _args(job: Job, words: tuple[str, ...]) -> list[str]:
    begin = len(words) - len(job.program)
    return [*words[:begin], *(word.replace("$(", "$$(") for word in words[begin:])]


def _variables(job: Job) -> list[dict[str, Any]]:
    variables = []
    for name, value in sorted(job.env.items()):
        secret = {"valueFrom": {"secretKeyRef": {"name": job.options_of(Kubernetes).secret, "key": name}}}
        variables.append({"name": name, **(secret if value is None else {"value": value.replace("$(", "$$(")})})
    return variables


def _resources(job: Job) -> dict[str, Any]:
    memory = {"memory": f"{job.memory_gb}G"} if job.memory_gb else {}
    requests = ({"cpu": str(job.cores)} if job.cores else {}) | memory
    limits = ({"nvidia.com/gpu": str(job.gpus)} if job.gpus else {}) | memory
    return {name: amount for name, amount in {"requests": requests, "limits": limits}.items() if amount}


def _volumes(job: Job) -> list[dict[str, Any]]:
    # What processes share would else be 64 MB; NCCL wants more.
    kubernetes = job.options_of(Kubernetes)
    memory = {"name": "memory", "emptyDir": {"medium": "Memory"}}
    shared = {"name": "shared", "persistentVolumeClaim": {"claimName": kubernetes.claim}}
    return [memory, shared] if kubernetes.claim else [memory]


def _mounts(job: Job) -> list[dict[str, Any]]:
    kubernetes = job.options_of(Kubernetes)
    mounts = [{"name": "memory", "mountPath": "/dev/shm"}]
    return mounts + ([{"name": "shared", "mountPath": kubernetes.mount}] if kubernetes.claim else [])


LAUNCHER = Launcher(
    render=render,
    takes=frozenset({"folder", "restarts", "keep", "grace_seconds", "minutes", "cpus", "memory_gb", "gpus", "image"}),
    options=(Kubernetes,),
    names=("k8s", "kube", "kubectl"),
    counts_machines=True,
)
