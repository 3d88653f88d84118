"""Patches are merged as Kubernetes merges them, by one rule for all tables, and cannot stop ranks from starting."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tests.launch.test_plans import POD, SET, SKY

from steadytrain.errors import InputError
from steadytrain.launch import Job, build_job, render
from steadytrain.launch.kubernetes import Kubernetes
from steadytrain.launch.patch import merge_patch
from steadytrain.launch.sky import Sky


def test_tables_are_merged_and_named_entries_of_lists_as_well() -> None:
    pod = {"env": [{"name": "A", "value": "1"}, {"name": "B", "value": "2"}], "args": ["a"], "dns": {"x": 1, "y": 2}}
    patch = {"env": [{"name": "B", "value": "3"}, {"name": "C", "value": "4"}], "args": ["b", "c"], "dns": {"x": None}}
    assert merge_patch(pod, patch) == {
        "env": [{"name": "A", "value": "1"}, {"name": "B", "value": "3"}, {"name": "C", "value": "4"}],
        "args": ["b", "c"],
        "dns": {"y": 2},
    }
    assert pod["dns"] == {"x": 1, "y": 2} and pod["args"] == ["a"], "neither is changed"


def test_mounts_are_told_apart_by_their_places_and_entries_can_be_removed() -> None:
    mounts = [{"name": "data", "mountPath": "/a"}, {"name": "data", "mountPath": "/b"}]
    assert merge_patch(mounts, [{"mountPath": "/b", "readOnly": True}]) == [
        {"name": "data", "mountPath": "/a"},
        {"name": "data", "mountPath": "/b", "readOnly": True},
    ]
    assert merge_patch(mounts, [{"mountPath": "/a", "$patch": "delete"}]) == mounts[1:]


def test_entries_without_names_take_the_place_of_the_list() -> None:
    before = [{"key": "gpu", "operator": "Exists"}]
    assert merge_patch(before, [{"key": "spot"}]) == [{"key": "spot"}]
    assert merge_patch([], [{"key": "spot"}, {"key": "spot"}]) == [{"key": "spot"}, {"key": "spot"}]


trees = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "a", "b"]), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=2), trees, max_size=3))
def test_an_empty_patch_changes_nothing(tree: dict[str, Any]) -> None:
    assert merge_patch(tree, {}) == tree


def _job(patch: Any, base: Job = POD, **more: Any) -> Job:
    options = Kubernetes(kind="jobset" if base is SET else "job", claim="photos", secret="keys", patch=patch, **more)
    return Job(words=base.words, nodes=2, procs=2, gpus=2, image="a", name="cats", options=(options,))


def _documents(job: Job) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all(render("kubernetes", job).files[0].text)}


@pytest.mark.parametrize("base", [POD, SET])
def test_a_patch_without_kind_is_of_the_pods(base: Job) -> None:
    patch: dict[str, Any] = {
        "metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "ib0"}},
        "spec": {"priorityClassName": "high", "hostNetwork": True, "containers": [{"name": "ranks", "tty": True}]},
    }
    before, after = _documents(_job((), base)), _documents(_job(patch, base))
    pods = []
    for documents in (before, after):
        kind = "JobSet" if base is SET else "Job"
        spec = documents[kind]["spec"]
        pods.append((spec["replicatedJobs"][0]["template"]["spec"] if base is SET else spec)["template"])
    assert pods[1]["metadata"] == {**pods[0]["metadata"], **patch["metadata"]}
    spec = pods[1]["spec"]
    assert (spec["priorityClassName"], spec["hostNetwork"]) == ("high", True)
    assert spec["dnsPolicy"] == "ClusterFirstWithHostNet", "without it no pod finds the first by its name"
    assert spec["containers"] == [{**pods[0]["spec"]["containers"][0], "tty": True}]


def test_patches_with_a_kind_are_of_that_manifest() -> None:
    patches = (
        {"kind": "Job", "spec": {"backoffLimit": 9}},
        {"kind": "Service", "metadata": {"annotations": {"a": "b"}}},
    )
    documents = _documents(_job(patches))
    assert documents["Job"]["spec"]["backoffLimit"] == 9
    assert documents["Service"]["metadata"]["annotations"] == {"a": "b"}
    with pytest.raises(InputError, match=r"of kind 'Deployment'; the manifests are Service and Job"):
        render("kubernetes", _job({"kind": "Deployment"}))


@pytest.mark.parametrize("base", [POD, SET])
@pytest.mark.parametrize(
    ("patch", "named"),
    [
        ({"spec": {"restartPolicy": "Always"}}, "template.spec.restartPolicy"),
        ({"spec": {"containers": [{"name": "ranks", "args": ["sleep"]}]}}, "containers.ranks.args"),
        ({"spec": {"containers": [{"name": "ranks", "$patch": "delete"}]}}, "containers.ranks.command"),
        ({"spec": {"containers": None}}, "containers.ranks.command"),
        ({"spec": None}, "kubernetes.patch.spec is None"),
        ({"spec": {"containers": [{"name": "ranks", "env": [{"name": "MASTER_ADDR", "value": "x"}]}]}}, "MASTER_ADDR"),
        ({"spec": {"containers": [{"name": "ranks", "env": [{"name": "RANK", "value": "0"}]}]}}, "env.RANK"),
        ({"spec": {"hostname": "a"}}, "template.spec.hostname"),
        ({"spec": "hello"}, "kubernetes.patch.spec is 'hello'; it must be a table"),
        ({"spec": ("a",)}, "kubernetes.patch.spec"),
        ({"kind": ("Job",)}, "kubernetes.patch.kind is .* the name of a kind"),
        ({"metadata": {"labels": {"steadytrain/job": None}}}, "labels.steadytrain/job"),
    ],
)
def test_what_ranks_need_to_start_is_refused_by_name(base: Job, patch: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        render("kubernetes", _job(patch, base))


@pytest.mark.parametrize(
    "patch",
    [
        {"kind": "Job", "spec": {"completions": 3}},
        {"kind": "Job", "metadata": {"name": "dogs"}},
        {"kind": "Job", "spec": {"podFailurePolicy": None}},
        {"kind": "Service", "spec": {"selector": {"app": "x"}}},
    ],
)
def test_what_holds_the_pods_together_is_refused_as_well(patch: Any) -> None:
    with pytest.raises(InputError, match="leave that out"):
        render("kubernetes", _job(patch))


def test_a_jobset_has_the_ranks_once() -> None:
    patch = {"kind": "JobSet", "spec": {"replicatedJobs": [{"name": "ranks", "replicas": 2}]}}
    with pytest.raises(InputError, match=r"replicatedJobs\.ranks\.replicas"):
        render("kubernetes", _job(patch, SET))


@pytest.mark.parametrize(("name", "remedy"), [("cpu", "cpus=N"), ("memory", "memory_gb=N")])
def test_cores_and_memory_are_no_further_resources(name: str, remedy: str) -> None:
    """As limits they would be below what is requested, which Kubernetes refuses."""
    with pytest.raises(InputError, match=rf"kubernetes\.resources\.{name} is '3'.*--set {remedy}"):
        Kubernetes(resources={name: "3"})


def test_a_patch_of_a_task_of_skypilot() -> None:
    patch = {"config": {"kubernetes": {"pod_config": {"spec": {}}}}, "resources": {"disk_size": 512, "infra": None}}
    options = Sky(accelerators="H100:2", infra="aws", mounts={"/data": "s3://b"}, patch=patch, network_tier="best")
    job = Job(words=("train", "/data/a", "--run", "/data/r"), image="a", options=(options,))
    task = yaml.safe_load(render("sky", job).files[0].text)
    assert task["config"] == patch["config"] and "infra" not in task["resources"]
    assert (task["resources"]["disk_size"], task["resources"]["network_tier"]) == (512, "best")
    with pytest.raises(InputError, match=r"sky\.patch changes run"):
        render("sky", Job(words=("train", "s3://b/a"), image="a", options=(Sky(patch={"run": "sleep"}),)))
    assert SKY.options, "the whole task is held by a text and by the schema"


def test_names_with_dots_stay_whole() -> None:
    """As ``--set kubernetes.resources.vpc.amazonaws.com/efa=4`` splits them."""
    table = {
        "words": ["train", "a"],
        "kubernetes": {
            "resources": {"vpc": {"amazonaws": {"com/efa": 4}}, "rdma/ib": 8},
            "selector": {"cloud": {"google": {"com/gke-accelerator": "h100"}}},
            "patch": {"spec": {"dnsConfig": {"options": []}}},
        },
    }
    options = build_job(table).options_of(Kubernetes)
    assert options.resources == {"vpc.amazonaws.com/efa": 4, "rdma/ib": 8}
    assert options.selector == {"cloud.google.com/gke-accelerator": "h100"}
    assert options.patch == table["kubernetes"]["patch"]  # type: ignore[index]
