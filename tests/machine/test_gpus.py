"""Which GPUs a process may use, whose the processes on them are, and why torch cannot use one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from steadytrain.machine.gpus import other_processes, visible_gpus, why_unseen


@dataclass(frozen=True, eq=False)
class Device:
    """A GPU, or a slice of one."""

    names: tuple[str, ...]
    slices: tuple[Device, ...] | None = None


MACHINE = [Device((f"GPU-{name}",)) for name in ("aa00", "aa11", "bb22", "cc33")]


@pytest.mark.parametrize(
    ("asked", "shown"),
    [
        ("2,0", ["bb22", "aa00"]),
        (" 1 , 3", ["aa11", "cc33"]),
        ("1gpu,2", ["aa11", "bb22"]),  # as C reads numbers
        ("GPU-bb,GPU-aa11", ["bb22", "aa11"]),  # ids by their beginning
        ("1,9,0", ["aa11"]),  # CUDA stops at the first that it does not know
        ("GPU-bb,GPU-xx,GPU-cc", ["bb22"]),
        ("GPU-aa", []),  # two begin so
        ("GPU-cc,0", ["cc33"]),  # numbers and ids do not mix
        ("0,0", []),  # twice the same hides all
        ("-1", []),
        ("0,-1,1", ["aa00"]),
        ("", []),
        ("NoDevFiles", []),  # of Slurm
        ("MIG-aa", []),
    ],
)
def test_cuda_shows_the_gpus_that_its_variable_names(asked: str, shown: list[str]) -> None:
    chosen = visible_gpus(MACHINE, {"CUDA_VISIBLE_DEVICES": asked})
    assert [gpu.names[0] for gpu in chosen] == [f"GPU-{name}" for name in shown]


def test_without_the_variable_cuda_shows_all() -> None:
    assert visible_gpus(MACHINE, {}) == MACHINE
    assert visible_gpus(MACHINE, {"NVIDIA_VISIBLE_DEVICES": "0"}) == MACHINE, "that one is for who starts a container"


def test_of_a_partitioned_gpu_cuda_shows_one_slice_and_nothing_else() -> None:
    slices = (Device(("MIG-s1", "MIG-GPU-p/1/0")), Device(("MIG-s2", "MIG-GPU-p/2/0")))
    machine = [Device(("GPU-w",)), Device(("GPU-p",), slices), Device(("GPU-empty",), ())]

    def shown(asked: str) -> list[str]:
        return [gpu.names[0] for gpu in visible_gpus(machine, {"CUDA_VISIBLE_DEVICES": asked})]

    assert visible_gpus(machine, {}) == [slices[0]]
    assert shown("0") == ["GPU-w"] and shown("1") == shown("0,1") == ["MIG-s1"]
    assert shown("MIG-s2") == shown("MIG-GPU-p/2/0") == shown("MIG-s2,MIG-s1") == ["MIG-s2"]
    assert shown("2") == [], "partitioned, and no slice was made"


def processes(root: Path, namespace: str, *pids: int) -> Path:
    """A system with these processes."""
    (root / "proc/self/ns").mkdir(parents=True)
    (root / "proc/self/ns/pid").symlink_to(f"pid:[{namespace}]")
    for pid in pids:
        (root / "proc" / str(pid)).mkdir()
    return root


def test_strangers_are_those_that_are_not_ours(tmp_path: Path) -> None:
    host = processes(tmp_path, "4026531836")
    assert other_processes({7, 9}, {7, 8}, root=host) == {9}  # 9 is another user's, and hidden from /proc
    assert other_processes({7}, {7}, root=host) == set()


def test_where_ours_is_not_on_the_list_nobody_is_a_stranger(tmp_path: Path) -> None:
    host = processes(tmp_path, "4026531836")
    assert other_processes({9}, {7}, root=host) is None
    assert other_processes(set(), {7}, root=host) is None


def test_a_container_trusts_numbers_only_where_all_of_them_run_in_it(tmp_path: Path) -> None:
    container = processes(tmp_path, "4026532999", 7, 9)
    assert other_processes({7, 9}, {7}, root=container) == {9}
    assert other_processes({7, 31337}, {7}, root=container) is None, "7 is somebody's on the host"


def test_a_system_that_does_not_tell_its_namespace_blames_nobody(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    assert other_processes({7, 9}, {7}, root=tmp_path) is None
    assert other_processes({7, 9}, {7}, root=tmp_path / "without") == {9}


def test_a_variable_that_names_no_gpu_of_the_machine_hides_all() -> None:
    why = why_unseen("2 x A100", torch="2.14", cuda="13.0", driver="580.1", asked="7", num_visible=0)
    assert (why.kind, why.remedy) == ("gpu-hidden", "unset CUDA_VISIBLE_DEVICES")
