"""Files of schedulers against the schemas of their own projects, where packages that hold them are installed.

``pip install kubernetes-validate kubeflow-trainer-api`` (the extra ``test``); ``pip install skypilot``, which is large.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.launch.test_plans import POD, SET, SKY

from steadytrain.launch import Job, render
from steadytrain.launch.kubernetes import Kubernetes
from steadytrain.launch.sky import Sky

BARE = Job(words=("train", "/data/a.rec"), image="a")
PATCH: dict[str, Any] = {
    "metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "ib0"}},
    "spec": {
        "hostNetwork": True,
        "priorityClassName": "high",
        "volumes": [{"name": "memory", "emptyDir": {"sizeLimit": "64Gi"}}, {"name": "logs", "emptyDir": {}}],
        "containers": [
            {"name": "ranks", "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}], "imagePullPolicy": "Always"},
            {"name": "logs", "image": "fluent-bit"},
        ],
    },
}
FULL: dict[str, Any] = {
    "claim": "photos",
    "secret": "keys",
    "tolerations": ("spot=true:NoSchedule", "dedicated"),
    "resources": {"rdma/ib": 8, "hugepages-2Mi": "5Gi", "vpc.amazonaws.com/efa": 4},
    "capabilities": ("IPC_LOCK",),
    "user": 0,
    "group": 2000,
    "pull_secrets": ("registry",),
    "queue": "vision",
    "patch": (PATCH, {"kind": "Service", "metadata": {"annotations": {"a": "b"}}}),
}
JOBS = [POD, BARE, Job(words=("python", "x.py"), nodes=2, image="a", options=(Kubernetes(claim="b"),))]
JOBS += [replace(POD, options=(Kubernetes(**FULL, cache=cache),)) for cache in ("emptyDir", "/mnt/nvme")]
SETS = [SET, replace(SET, gpus=8, procs=8, options=(Kubernetes(kind="jobset", **FULL | {"patch": PATCH}, cache="/a"),))]
SKIES = [SKY, Job(words=("python", "x.py"), options=(Sky(setup="pip install steadytrain"),))]
SKY_PATCH = {"resources": {"disk_size": 512, "labels": {"team": "vision"}}, "envs": {"NCCL_DEBUG": "WARN"}}
SKIES += [replace(SKY, options=(replace(SKY.options_of(Sky), patch=SKY_PATCH, network_tier="best"),))]


def _manifests(job: Job) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(render("kubernetes", job).files[0].text))


@pytest.mark.parametrize("job", JOBS)
def test_jobs_and_services(job: Job) -> None:
    checked = pytest.importorskip("kubernetes_validate")
    for manifest in _manifests(job):
        checked.validate(manifest, checked.latest_version(), strict=True)
    assert [manifest["kind"] for manifest in _manifests(job)] == ["Service", "Job"]


@pytest.mark.parametrize("job", SETS)
def test_jobsets(job: Job) -> None:
    models = pytest.importorskip("kubeflow_trainer_api.models")
    (manifest,) = _manifests(job)
    back = json.loads(models.JobsetV1alpha2JobSet.from_dict(manifest).to_json())
    assert not list(_unknown(manifest, back))
    checked = pytest.importorskip("kubernetes_validate")
    template = manifest["spec"]["replicatedJobs"][0]["template"]
    inner = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **template}
    checked.validate(inner, checked.latest_version(), strict=True)


@pytest.mark.parametrize("job", SKIES)
def test_tasks_of_skypilot(job: Job) -> None:
    schemas = pytest.importorskip("sky.utils.schemas")
    checked = pytest.importorskip("jsonschema")
    task = yaml.safe_load(render("sky", job).files[0].text)
    checked.validate(task, schemas.get_task_schema())
    checked.validate(task["resources"], schemas.get_resources_schema())
    for mount in task.get("file_mounts", {}).values():
        checked.validate(mount, schemas.get_storage_schema())


def test_the_job_of_sagemakers_page_is_what_its_api_takes_and_finds_its_machine(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs/guides/sagemaker.md").read_text()
    script, _, text = re.findall(r"```text\n(.*?)```", page, re.DOTALL)
    job = json.loads(text)
    container = job["AlgorithmSpecification"]
    words = [*container["ContainerEntrypoint"], *container["ContainerArguments"]]
    assert all(len(word) <= 256 for word in words), "the API's limit"
    config = tmp_path / "resourceconfig.json"
    config.write_text('{"current_host": "algo-2", "hosts": ["algo-2", "algo-1"]}')
    (tmp_path / "train.sh").write_text(script.replace(f"/opt/ml/input/config/{config.name}", str(config)))
    (tmp_path / "torchrun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "torchrun").chmod(0o755)
    command = [word.replace("/train.sh", str(tmp_path / "train.sh")) for word in words]
    path = f"{tmp_path}:{Path(sys.executable).parent}:/usr/bin:/bin"
    said = subprocess.run(command, env={"PATH": path}, text=True, capture_output=True, check=True).stdout
    assert said.startswith("--nnodes=2 --node-rank=1 --nproc-per-node=8 --master-addr=algo-1 ")
    assert said.endswith(f" --no-python -- {' '.join(container['ContainerArguments'])}\n")
    model = pytest.importorskip("botocore.session").get_session().get_service_model("sagemaker")
    shape = model.operation_model("CreateTrainingJob").input_shape
    assert not pytest.importorskip("botocore.validate").ParamValidator().validate(job, shape).has_errors()


def _unknown(sent: object, back: object, path: str = "") -> Iterator[str]:
    """What a model has dropped, which it does silently with what it does not know."""
    if isinstance(sent, dict):
        for name, value in sent.items():
            if isinstance(back, dict) and name in back:
                yield from _unknown(value, back[name], f"{path}.{name}")
            else:
                yield f"{path}.{name}"
    elif isinstance(sent, list) and isinstance(back, list):
        for place, (inner, other) in enumerate(zip(sent, back, strict=True)):
            yield from _unknown(inner, other, f"{path}[{place}]")
