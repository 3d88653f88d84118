"""Kubernetes: an Indexed Job and the service by which its pods find the first, or a JobSet; for ``kubectl create``.

Not ``apply``, which would leave a job that has ended as it is and say that all is well.

Exit codes 75 (saved, asked to stop) and 4 (another rank was lost) are no failure of a pod's own: it is replaced, and
not counted. A pod of a Job that fails is replaced as well. A JobSet starts all pods anew together when one has failed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import yaml

from steadytrain.config.plain import check_types
from steadytrain.errors import InputError
from steadytrain.format import count
from steadytrain.launch.job import Job, require
from steadytrain.launch.patch import merge_patch
from steadytrain.launch.plan import Command, File, Launcher, Plan, PlanStage, node_command, rank_command
from steadytrain.launch.shared import require_shared
from steadytrain.launch.supervise import PREEMPTED, RANK_LOST, USAGE, rank_variables

_PORT = 29500
_RANKS = "ranks"
_LABEL = "steadytrain/job"
_GPU = "nvidia.com/gpu"
_CACHE = "/cache"

_OWN_JOB = (
    *("completionMode", "completions", "parallelism", "podFailurePolicy", f"template metadata labels {_LABEL}"),
    *(f"template spec {key}" for key in ("restartPolicy", "subdomain", "hostname")),
    *(f"template spec containers {_RANKS} {key}" for key in ("command", "args")),
    *(f"template spec containers {_RANKS} env {name}" for name in (*rank_variables(0, 1, 0), "JOB_COMPLETION_INDEX")),
)
_OWN = (
    *("apiVersion", "kind", "metadata name", "spec clusterIP", "spec publishNotReadyAddresses", "spec selector"),
    *("spec network", *(f"spec {key}" for key in _OWN_JOB)),
    f"spec replicatedJobs {_RANKS} replicas",
    *(f"spec replicatedJobs {_RANKS} template spec {key}" for key in (*_OWN_JOB, "backoffLimit")),
)
"""What no patch may change, of any manifest."""


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
        tolerations: taints that pods put up with, whatever their effect, beside that of GPUs: ``KEY``, ``KEY=VALUE``.
        resources: more that each pod needs, such as ``{"rdma/ib": 8, "hugepages-2Mi": "5Gi"}``.
        capabilities: that the container gets beside the usual ones: ``("IPC_LOCK",)``.
        user: as whom ranks run, by number; None: the image's.
        group: to which the pods' volumes belong, where they support that; None: none.
        pull_secrets: for the registry of the image.
        queue: the local queue of Kueue that admits the job as a whole.
        cache: for caches, ``emptyDir`` or a folder of each node that ``user`` may write to; None: in the container.
        patch: tables to merge over the manifest of their ``kind``, without one over the pods' template
            (:func:`.patch.merge_patch`).
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
        for name, key in (("cpu", "cpus"), ("memory", "memory_gb")):
            value = self.resources.get(name)
            require(value is None, f"kubernetes.resources.{name}", value, f"set by --set {key}=N, for each pod")
        is_place = self.cache in (None, "emptyDir") or str(self.cache).startswith("/")
        require(is_place, "kubernetes.cache", self.cache, "emptyDir, or a folder of the nodes, such as /mnt/nvme")


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
        remedy="mount a claim there (--set kubernetes.claim=NAME --set kubernetes.mount=/FOLDER)",
    )
    manifests = _patched(_manifests(job), kubernetes)
    text = "---\n".join(yaml.safe_dump(manifest, sort_keys=False, width=200) for manifest in manifests)
    namespace = ["-n", kubernetes.namespace] if kubernetes.namespace else []
    submit = Command(argv=("kubectl", "create", *namespace, "-f", f"@{job.name}.yaml"))
    kubectl = " ".join(["kubectl", *namespace])
    notes = [f"{kubectl} logs -f -l {_LABEL}={job.name} --prefix --max-log-requests={job.shape[0]} shows its output"]
    notes += [f"{kubectl} delete -f FILE stops and removes it; the same command then resumes the run"]
    if job.cpus is None and job.cores is not None:
        notes += [f"each pod asks for {count(job.cores, 'core')} to decode images: --set cpus=N asks for N"]
    if not kubernetes.claim:
        notes += ["files that the pods write are lost when they end: --set kubernetes.claim=NAME gives them a volume"]
    if kubernetes.capabilities and kubernetes.user != 0:
        notes += ["Kubernetes gives capabilities to root alone: --set kubernetes.user=0, unless the image runs as root"]
    file = File(name=f"{job.name}.yaml", text=text)
    return Plan(stages=(PlanStage(kind="submit", commands=(submit,)),), files=(file,), notes=tuple(notes))


def _manifests(job: Job) -> list[dict[str, Any]]:
    kubernetes = job.options_of(Kubernetes)
    labels = {_LABEL: job.name}
    meta = {"name": job.name, **_given(namespace=kubernetes.namespace), "labels": labels}
    job_meta = {**meta, "labels": labels | _given(**{"kueue.x-k8s.io/queue-name": kubernetes.queue})}
    nodes, _ = job.shape
    indexed: dict[str, Any] = {"completionMode": "Indexed", "completions": nodes, "parallelism": nodes}
    indexed |= _given(activeDeadlineSeconds=job.minutes and job.minutes * 60)
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


def _given(**values: Any) -> dict[str, Any]:
    """Leave out what is None or empty."""
    return {name: value for name, value in values.items() if value not in (None, {}, [])}


def _patched(manifests: Sequence[dict[str, Any]], kubernetes: Kubernetes) -> list[dict[str, Any]]:
    """Merge the patches over the manifests of their kind. Raises InputError where there is none."""
    patched = {str(manifest["kind"]): manifest for manifest in manifests}
    for patch in [kubernetes.patch] if isinstance(kubernetes.patch, Mapping) else kubernetes.patch:
        kind, table, spec = patch.get("kind"), patch, patch.get("spec", {})
        require(isinstance(kind, str | None), "kubernetes.patch.kind", kind, "the name of a kind, such as Job")
        require(isinstance(spec, Mapping), "kubernetes.patch.spec", spec, "a table")
        if kind is None:
            if spec.get("hostNetwork"):  # else pods find no name of the cluster
                patch = {**patch, "spec": {"dnsPolicy": "ClusterFirstWithHostNet", **spec}}
            kind, table = "Job", {"spec": {"template": patch}}
            if kubernetes.kind == "jobset":
                kind, table = "JobSet", {"spec": {"replicatedJobs": [{"name": _RANKS, "template": table}]}}
        if kind not in patched:
            raise InputError(f"kubernetes.patch is of kind {kind!r}; the manifests are {' and '.join(patched)}")
        patched[kind] = merge_patch(patched[kind], table, own=_OWN, where="kubernetes.patch")
    return list(patched.values())


def _pod(job: Job, address: str) -> dict[str, Any]:
    """Return the template of a pod of ranks; ``address``: of the first pod."""
    kubernetes = job.options_of(Kubernetes)
    nodes, procs = job.shape
    variables = [{"name": "XDG_CACHE_HOME", "value": _CACHE}] if kubernetes.cache else []
    variables += _variables(job)
    if procs == 1:
        words = rank_command(job)
        world = {"WORLD_SIZE": nodes, "MASTER_ADDR": address, "MASTER_PORT": _PORT}  # the index: the controller's
        variables += [{"name": name, "value": str(value)} for name, value in world.items()] if nodes > 1 else []
    else:
        words = node_command(job, "--node", "$(JOB_COMPLETION_INDEX)", procs=procs, address=address, port=_PORT)
    begin = len(words) - len(job.program)
    # It replaces $(NAME) by a variable everywhere; in the user's arguments and values that has to stay as it is.
    args = [*words[:begin], *(word.replace("$(", "$$(") for word in words[begin:])]
    container: dict[str, Any] = {"name": _RANKS, "image": job.image, "command": [job.python], "args": args}
    container |= _given(
        workingDir=job.folder,
        env=variables,
        securityContext=_given(capabilities=_given(add=list(kubernetes.capabilities))),
        resources=_resources(job),
    )
    # A new volume belongs to root; one of many files is not gone through at each start.
    group = {} if kubernetes.group is None else {"fsGroup": kubernetes.group, "fsGroupChangePolicy": "OnRootMismatch"}
    spec: dict[str, Any] = {"restartPolicy": "Never", "terminationGracePeriodSeconds": job.grace_seconds}
    spec |= _given(
        nodeSelector=dict(kubernetes.selector),
        tolerations=_tolerations(job),
        imagePullSecrets=[{"name": name} for name in kubernetes.pull_secrets],
        securityContext=_given(runAsUser=kubernetes.user) | group,
        subdomain=job.name if kubernetes.kind == "job" else None,
    )
    places, volumes = {"memory": "/dev/shm", "shared": kubernetes.mount, "cache": _CACHE}, _volumes(job)
    mounts = [{"name": volume["name"], "mountPath": places[volume["name"]]} for volume in volumes]
    spec |= {"containers": [container | {"volumeMounts": mounts}], "volumes": volumes}
    return {"metadata": {"labels": {_LABEL: job.name}}, "spec": spec}


def _variables(job: Job) -> list[dict[str, Any]]:
    variables = []
    for name, value in sorted(job.env.items()):
        secret = {"valueFrom": {"secretKeyRef": {"name": job.options_of(Kubernetes).secret, "key": name}}}
        variables.append({"name": name, **(secret if value is None else {"value": value.replace("$(", "$$(")})})
    return variables


def _resources(job: Job) -> dict[str, Any]:
    memory = _given(memory=job.memory_gb and f"{job.memory_gb}G")
    more = {name: str(amount) for name, amount in job.options_of(Kubernetes).resources.items()}
    gpus = {_GPU: str(job.gpus)} if job.gpus else {}
    return _given(requests=_given(cpu=job.cores and str(job.cores)) | memory, limits=gpus | memory | more)


def _tolerations(job: Job) -> list[dict[str, str]]:
    """Return what pods put up with: clouds taint nodes with GPUs, so that nothing else takes their room."""
    taints = [*[_GPU] * bool(job.gpus), *job.options_of(Kubernetes).tolerations]
    parts = [taint.partition(":")[0].partition("=") for taint in dict.fromkeys(taints)]
    return [_given(key=key, operator="Equal" if value else "Exists", value=value or None) for key, _, value in parts]


def _volumes(job: Job) -> list[dict[str, Any]]:
    # What processes share would else be 64 MB; NCCL wants more.
    claim, cache = job.options_of(Kubernetes).claim, job.options_of(Kubernetes).cache
    place = {"emptyDir": {}} if cache == "emptyDir" else {"hostPath": {"path": cache, "type": "Directory"}}
    return [
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
        *([{"name": "shared", "persistentVolumeClaim": {"claimName": claim}}] if claim else []),
        *([{"name": "cache", **place}] if cache else []),
    ]


LAUNCHER = Launcher(
    render=render,
    takes=frozenset({"folder", "restarts", "keep", "grace_seconds", "minutes", "cpus", "memory_gb", "gpus", "image"}),
    options=(Kubernetes,),
    names=("k8s", "kube", "kubectl"),
    counts_machines=True,
)
