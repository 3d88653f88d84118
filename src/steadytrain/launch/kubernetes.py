"""Kubernetes: an Indexed Job and the service by which its pods find the first, or a JobSet; for ``kubectl create``.

Not ``apply``, which would leave a job that has ended as it is and say that all is well.

Exit codes 75 (saved, asked to stop) and 4 (another rank was lost) are no failure of a pod's own: it is replaced, and not
counted. In a Job each pod that fails is replaced as well. A JobSet starts all pods anew together when one has failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from steadytrain.config.plain import check_types
from steadytrain.errors import InputError
from steadytrain.launch.job import Job, require
from steadytrain.launch.patch import merge_patch
from steadytrain.launch.plan import Command, File, Launcher, Plan, PlanStage, node_command, rank_command
from steadytrain.launch.shared import require_shared
from steadytrain.launch.supervise import PREEMPTED, RANK_LOST, USAGE

_PORT = 29500
_RANKS = "ranks"
_LABEL = "steadytrain/job"
_GPU = "nvidia.com/gpu"
_CACHE = "/cache"

_OWN_POD = (
    f"metadata labels {_LABEL}",
    "spec restartPolicy",
    "spec subdomain",
    *(f"spec containers {_RANKS} {part}" for part in ("command", "args")),
    *(f"spec containers {_RANKS} env {name}" for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")),
)
_OWN_JOB = ("completionMode", "completions", "parallelism", "podFailurePolicy")
_JOB_OF_SET = f"spec replicatedJobs {_RANKS} template "
_OWN_MANIFEST = ("apiVersion", "kind", "metadata name")
_OWN = {
    "Service": (*_OWN_MANIFEST, "spec clusterIP", "spec selector", "spec publishNotReadyAddresses"),
    "Job": (*_OWN_MANIFEST, *(f"spec {key}" for key in _OWN_JOB), *(f"spec template {key}" for key in _OWN_POD)),
    "JobSet": (
        *(*_OWN_MANIFEST, "spec network", f"{_JOB_OF_SET}spec backoffLimit"),
        *(f"{_JOB_OF_SET}spec {key}" for key in _OWN_JOB),
        *(f"{_JOB_OF_SET}spec template {key}" for key in _OWN_POD),
    ),
}
"""What no patch may change, of each kind of manifest: how ranks find each other, and how often pods start again."""


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
        tolerations: taints that pods put up with: ``KEY``, ``KEY=VALUE`` or either with ``:EFFECT``; that of GPUs is
            always one where GPUs are asked for.
        resources: more that each pod needs: ``{"rdma/ib": 8}``, ``{"vpc.amazonaws.com/efa": 32, "hugepages-2Mi":
            "5Gi"}``.
        capabilities: that the container gets beside the usual ones: ``("IPC_LOCK",)``; Kubernetes gives them to root
            alone.
        user: the number of the user as whom ranks run; None: the image's.
        group: a group of the pods, to which volumes that support it belong; None: none.
        pull_secrets: names of Secrets for the registry of the image.
        queue: the local queue of Kueue that admits the job as a whole.
        cache: where caches lie: ``emptyDir``, or a folder of each node (its NVMe disk) that ``user`` may write to;
            None: in the container, and lost with it.
        patch: tables that are merged over what is rendered (:func:`.patch.merge_patch`): over the manifest of their
            ``kind``, without one over the pods' template.
    """

    kind: Literal["job", "jobset"] = "job"
    namespace: str | None = None
    claim: str | None = None
    mount: str = "/data"
    secret: str | None = None
    selector: Mapping[str, str] = field(default_factory=dict)
    tolerations: tuple[str, ...] = ()
    resources: Mapping[str, str | int] = field(default_factory=dict)
    capabilities: tuple[str, ...] = ()
    user: int | None = None
    group: int | None = 1000
    pull_secrets: tuple[str, ...] = ()
    queue: str | None = None
    cache: str | None = None
    patch: Mapping[str, Any] | tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "kubernetes")
        require(self.mount.startswith("/"), "kubernetes.mount", self.mount, "a path that starts with /")
        is_place = self.cache in (None, "emptyDir") or str(self.cache).startswith("/")
        require(is_place, "kubernetes.cache", self.cache, "emptyDir, or a folder of the nodes, such as /mnt/nvme")
        for name, number in (("user", self.user), ("group", self.group)):
            require(number is None or 0 <= number < 2**31, f"kubernetes.{name}", number, "0 to 2147483647")


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
    manifests = _patched(_manifests(job), kubernetes)
    text = "---\n".join(yaml.safe_dump(manifest, sort_keys=False, width=200) for manifest in manifests)
    namespace = ["-n", kubernetes.namespace] if kubernetes.namespace else []
    submit = Command(argv=("kubectl", "create", *namespace, "-f", f"@{job.name}.yaml"))
    kubectl = " ".join(["kubectl", *namespace])
    notes = [f"{kubectl} logs -f -l {_LABEL}={job.name} --prefix --max-log-requests={job.shape[0]} shows its output"]
    notes += [f"{kubectl} delete -f FILE stops and removes it; the same command then resumes the run"]
    if not kubernetes.claim:
        notes += ["files that the pods write are lost when they end: --set kubernetes.claim=NAME gives them a volume"]
    if kubernetes.capabilities and kubernetes.user != 0:
        names = ", ".join(kubernetes.capabilities)
        notes += [f"Kubernetes gives {names} to root alone: --set kubernetes.user=0, unless the image's user is root"]
    file = File(name=f"{job.name}.yaml", text=text)
    return Plan(stages=(PlanStage(kind="submit", commands=(submit,)),), files=(file,), notes=tuple(notes))


def _manifests(job: Job) -> list[dict[str, Any]]:
    kubernetes = job.options_of(Kubernetes)
    space = {"namespace": kubernetes.namespace} if kubernetes.namespace else {}
    meta = {"name": job.name, **space, "labels": {_LABEL: job.name}}
    queued = {"kueue.x-k8s.io/queue-name": kubernetes.queue} if kubernetes.queue else {}
    job_meta = {**meta, "labels": {**meta["labels"], **queued}}
    nodes, _ = job.shape
    indexed: dict[str, Any] = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes}
    if job.minutes:
        indexed["activeDeadlineSeconds"] = job.minutes * 60
    if kubernetes.kind == "jobset":
        # Fails and starts as one; what the pods' policy lets fail at once is started again without being counted.
        rules: list[dict[str, Any]] = [
            {"action": "FailJob", "onExitCodes": _exited_with(PREEMPTED)},
            {"action": "Ignore", "onExitCodes": _exited_with(RANK_LOST)},  # the pod that failed decides, not its others
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
            "failurePolicy": {"maxRestarts": job.num_restarts, "rules": [uncounted]},
            "replicatedJobs": [{"name": _RANKS, "replicas": 1, "template": template}],
        }
        return [{"apiVersion": "jobset.x-k8s.io/v1alpha2", "kind": "JobSet", "metadata": job_meta, "spec": spec}]
    service = {  # gives each pod a name, whether it is ready or not
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": {_LABEL: job.name},
        "ports": [{"name": "ranks", "port": _PORT}],
    }
    rules = [
        {"action": "Ignore", "onExitCodes": _exited_with(RANK_LOST, PREEMPTED)},
        {"action": "FailJob", "onExitCodes": _exited_with(USAGE)},
        {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
    ]
    limits = {"backoffLimit": job.num_restarts, "podFailurePolicy": {"rules": rules}}
    spec = {**indexed, **limits, "template": _pod(job, f"{job.name}-0.{job.name}")}
    return [
        {"apiVersion": "v1", "kind": "Service", "metadata": meta, "spec": service},
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": job_meta, "spec": spec},
    ]


def _exited_with(*codes: int) -> dict[str, Any]:
    return {"containerName": _RANKS, "operator": "In", "values": sorted(codes)}  # in another order they are refused


def _patched(manifests: Sequence[dict[str, Any]], kubernetes: Kubernetes) -> list[dict[str, Any]]:
    """Merge the patches over the manifests of their kind. Raises InputError where there is none."""
    patched = {str(manifest["kind"]): manifest for manifest in manifests}
    for patch in [kubernetes.patch] if isinstance(kubernetes.patch, Mapping) else kubernetes.patch:
        kind, table = patch.get("kind"), patch
        if kind is None:
            if others := [name for name in patch if name not in ("metadata", "spec")]:
                raise InputError(
                    f"kubernetes.patch has {others[0]!r}: without kind it is of the pods, and holds metadata and spec,"
                    f" such as spec: {{{others[0]}: ...}}"
                )
            spec = patch.get("spec") or {}
            if spec.get("hostNetwork"):  # by the machine's own names pods would not find each other
                patch = {**patch, "spec": {"dnsPolicy": "ClusterFirstWithHostNet", **spec}}
            kind, table = next(reversed(patched)), {"spec": {"template": patch}}
            if kind == "JobSet":
                table = {"spec": {"replicatedJobs": [{"name": _RANKS, "template": table}]}}
        if kind not in patched:
            raise InputError(f"kubernetes.patch is of kind {kind!r}; the manifests are {' and '.join(patched)}")
        patched[kind] = merge_patch(patched[kind], table, own=_OWN[kind], where="kubernetes.patch")
    return list(patched.values())


def _pod(job: Job, address: str) -> dict[str, Any]:
    """Return the template of a pod of ranks; ``address``: of the first pod."""
    kubernetes = job.options_of(Kubernetes)
    spec: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": job.grace_seconds}
    spec |= {"nodeSelector": dict(kubernetes.selector)} if kubernetes.selector else {}
    spec |= {"tolerations": tolerations} if (tolerations := _tolerations(job)) else {}
    spec |= {"imagePullSecrets": [{"name": name} for name in kubernetes.pull_secrets]} if kubernetes.pull_secrets else {}
    # Else a new volume belongs to root; a volume of many files is not gone through at each start.
    group = {"fsGroup": kubernetes.group, "fsGroupChangePolicy": "OnRootMismatch"}
    security = (group if kubernetes.group is not None else {}) | (
        {"runAsUser": kubernetes.user} if kubernetes.user is not None else {}
    )
    spec |= {"securityContext": security} if security else {}
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
    if kubernetes.cache:
        variables.append({"name": "XDG_CACHE_HOME", "value": _CACHE})
    if variables:
        container["env"] = variables
    if kubernetes.capabilities:
        container["securityContext"] = {"capabilities": {"add": list(kubernetes.capabilities)}}
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
    more = {name: str(amount) for name, amount in job.options_of(Kubernetes).resources.items()}
    limits = ({_GPU: str(job.gpus)} if job.gpus else {}) | memory | more
    return {name: amount for name, amount in {"requests": requests, "limits": limits}.items() if amount}


def _tolerations(job: Job) -> list[dict[str, Any]]:
    """Return what pods put up with: clouds taint nodes with GPUs, so that nothing else takes their room."""
    taints = [f"{_GPU}:NoSchedule"] * bool(job.gpus) + list(job.options_of(Kubernetes).tolerations)
    tolerations = []
    for taint in dict.fromkeys(taints):
        key_and_value, _, effect = taint.partition(":")
        key, equals, value = key_and_value.partition("=")
        matches = {"operator": "Equal", "value": value} if equals else {"operator": "Exists"}
        tolerations.append({"key": key, **matches} | ({"effect": effect} if effect else {}))
    return tolerations


def _volumes(job: Job) -> list[dict[str, Any]]:
    # What processes share would else be 64 MB; NCCL wants more.
    kubernetes = job.options_of(Kubernetes)
    volumes: list[dict[str, Any]] = [{"name": "memory", "emptyDir": {"medium": "Memory"}}]
    if kubernetes.claim:
        volumes.append({"name": "shared", "persistentVolumeClaim": {"claimName": kubernetes.claim}})
    if kubernetes.cache:
        is_empty = kubernetes.cache == "emptyDir"
        source = {"emptyDir": {}} if is_empty else {"hostPath": {"path": kubernetes.cache, "type": "Directory"}}
        volumes.append({"name": "cache", **source})
    return volumes


def _mounts(job: Job) -> list[dict[str, Any]]:
    kubernetes = job.options_of(Kubernetes)
    places = {"memory": "/dev/shm", "shared": kubernetes.mount, "cache": _CACHE}
    return [{"name": volume["name"], "mountPath": places[volume["name"]]} for volume in _volumes(job)]


LAUNCHER = Launcher(
    render=render,
    takes=frozenset({"folder", "restarts", "keep", "grace_seconds", "minutes", "cpus", "memory_gb", "gpus", "image"}),
    options=(Kubernetes,),
    names=("k8s", "kube", "kubectl"),
    counts_machines=True,
)
