"""Cores, memory and processor: as this process may use them, whatever the container says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.machine import facts

MACHINE = psutil.virtual_memory().total
ALLOWED = len(os.sched_getaffinity(0))


def tree(root: Path, files: dict[str, str]) -> Path:
    """A root with these files in it."""
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_without_control_groups_affinity_and_the_machine_count(tmp_path: Path) -> None:
    assert facts.cores(tmp_path) == ALLOWED
    assert facts.memory_bytes(tmp_path) == MACHINE


@pytest.mark.skipif(ALLOWED < 2, reason="needs two processors")
def test_affinity_is_obeyed() -> None:
    code = "import os; os.sched_setaffinity(0, {0}); from steadytrain.machine.facts import cores; print(cores())"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "1"


@pytest.mark.parametrize(("quota", "expected"), [("50000 100000", 1), ("100000 100000", 1), ("max 100000", ALLOWED)])
def test_quota_of_version_2(tmp_path: Path, quota: str, expected: int) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": quota})
    assert facts.cores(root) == expected


def test_a_quota_is_told_with_its_fraction(tmp_path: Path) -> None:
    root = tree(tmp_path, {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": "150000 100000"})
    assert facts.quota(root) == 1.5
    assert facts.quota(tmp_path / "elsewhere") is None


def test_a_quota_further_up_counts_as_well(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/slice/job",
        "sys/fs/cgroup/slice/cpu.max": "100000 100000",
        "sys/fs/cgroup/slice/job/cpu.max": "max 100000",
        "sys/fs/cgroup/slice/memory.max": "1000000",
        "sys/fs/cgroup/slice/job/memory.max": "max",
    }
    root = tree(tmp_path, files)
    assert facts.cores(root) == 1
    assert facts.memory_bytes(root) == 1_000_000


def test_limits_of_version_1_in_a_container(tmp_path: Path) -> None:
    # The path is the host's; the mount is the container's own group.
    files = {
        "proc/self/cgroup": "9:memory:/docker/abc\n4:cpu,cpuacct:/docker/abc\n1:name=systemd:/docker/abc",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "90000",
        "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "2000000",
    }
    root = tree(tmp_path, files)
    assert facts.cores(root) == 1
    assert facts.memory_bytes(root) == 2_000_000


def test_no_limit_in_version_1_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "9:memory:/\n4:cpu,cpuacct:/",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
    }
    root = tree(tmp_path, files)
    assert facts.cores(root) == ALLOWED
    assert facts.memory_bytes(root) == MACHINE


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("flags\t\t: fpu sse2 sse4_2 avx fma avx2", "avx2"),
        ("flags\t\t: sse2 sse4_2 avx fma avx2 avx512f avx512bw avx512vl avx512dq", "avx512"),
        ("Features\t: fp asimd crc32 sve", "sve"),
        ("Features\t: fp asimd", "neon"),
    ],
)
def test_instruction_set(tmp_path: Path, line: str, expected: str) -> None:
    root = tree(tmp_path, {"proc/cpuinfo": f"processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\n{line}\n\nprocessor\t: 1"})
    assert facts.isa(root) == expected
    assert facts.cpu_model(root) == "Some CPU @ 2 GHz"


def test_facts_are_json_and_true_here() -> None:
    document = json.loads(json.dumps(facts.facts()))
    assert document["cores"] == facts.cores() <= ALLOWED
    assert document["memory_bytes"] <= MACHINE
    assert document["cpu"] and document["isa"]


def test_a_machine_without_a_driver_has_no_accelerators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert facts.accelerators() == ()


def test_where_nvml_cannot_be_used_the_kernels_module_counts_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    module = {"proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27"}
    for number in range(4):
        information = f"Model: \t\t NVIDIA L4\nGPU UUID: \t GPU-{number}a\nDevice Minor: \t {number}"
        module[f"proc/driver/nvidia/gpus/0000:0{number}:00.0/information"] = information
    root = tree(tmp_path, module)
    (first, *more) = facts.accelerators({}, root)
    assert (first, len(more)) == (facts.Accelerator(name="NVIDIA L4", memory_bytes=None, driver="580.65.06"), 3)
    for asked, num_visible in (("0,2", 2), ("GPU-3a", 1), ("", 0), ("7", 0)):
        assert len(facts.accelerators({"CUDA_VISIBLE_DEVICES": asked}, root)) == num_visible


def test_no_torch_is_imported() -> None:
    code = "import sys; from steadytrain.machine import facts; facts.facts(); print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0:/job"},
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "100000 0"},
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": "x y"},
        {
            "proc/self/cgroup": "1:cpu:/",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "1",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "-",
        },
    ],
)
def test_a_quota_that_makes_no_sense_is_none(tmp_path: Path, files: dict[str, str]) -> None:
    assert facts.quota(tree(tmp_path, files)) is None
    assert facts.cores(tmp_path) == ALLOWED


@pytest.mark.parametrize(
    ("tasks", "node", "number"), [("2(x3)", 2, 2), ("2,1", 0, 2), ("2,1", 1, 1), ("4(x2),3,1(x2)", 4, 1), ("1", 7, 1)]
)
def test_the_tasks_of_each_node_are_counted(tasks: str, node: int, number: int) -> None:
    assert facts.tasks_on(node, tasks) == number


@given(st.lists(st.integers(1, 8), min_size=1, max_size=6), st.lists(st.integers(1, 3), min_size=6, max_size=6))
def test_any_shorthand_of_tasks_is_read_as_written(counts: list[int], times: list[int]) -> None:
    runs = list(zip(counts, times, strict=False))
    text = ",".join(str(count) if many == 1 else f"{count}(x{many})" for count, many in runs)
    flat = [count for count, many in runs for _ in range(many)]
    assert [facts.tasks_on(node, text) for node in range(len(flat))] == flat
