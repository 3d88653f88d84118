"""Which processors a rank had better stay on, by the machine's own files."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.machine.trees import tree

from steadytrain.machine import cgroups

GPUS = ["0000:17:00.0", "0000:65:00.0", "0000:ca:00.0", "0000:e3:00.0"]
# Two nodes of four processors and two GPUs, as the kernel numbers them: a core's second thread comes after all cores.
TWO_NODES = {
    "sys/devices/system/node/node0/cpulist": "0-1,4-5",
    "sys/devices/system/node/node1/cpulist": "2-3,6-7",
    **{f"sys/bus/pci/devices/{gpu}/numa_node": str(number // 2) for number, gpu in enumerate(GPUS)},
}


@pytest.fixture(autouse=True)
def all_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "allowed", lambda: frozenset(range(8)))


def test_a_rank_stays_on_the_processors_of_its_gpus_node(tmp_path: Path) -> None:
    root = tree(tmp_path, TWO_NODES)
    near = [cgroups.near_processors(GPUS, own, root) for own in range(4)]
    assert near == 2 * [(0, frozenset({0, 1, 4, 5}))] + 2 * [(1, frozenset({2, 3, 6, 7}))]
    assert cgroups.near_processors(GPUS[1:3], 1, root) == (1, frozenset({2, 3, 6, 7}))


def test_a_node_of_memory_alone_takes_no_rank(tmp_path: Path) -> None:
    root = tree(tmp_path, TWO_NODES, {"sys/devices/system/node/node2/cpulist": ""})
    assert cgroups.nodes(root).keys() == {0, 1}


@pytest.mark.parametrize(
    "changes",
    [
        {"sys/devices/system/node/node1/cpulist": ""},  # one node
        {f"sys/bus/pci/devices/{GPUS[3]}/numa_node": "-1"},  # a virtual machine that tells of no place
        {f"sys/bus/pci/devices/{GPUS[3]}/numa_node": "7"},
        {f"sys/bus/pci/devices/{gpu}/numa_node": "1" for gpu in GPUS},  # half of the processors would do nothing
        {"proc/self/cgroup": "0::/job", "sys/fs/cgroup/job/cpu.max": "400000 100000"},  # a container of four
        {"sys/devices/system/node/node1/cpulist": "2-3,6-15"},  # more than this process may use: somebody chose
    ],
)
def test_a_rank_stays_where_it_is_where_that_would_cost_processors_or_nothing_is_known(
    tmp_path: Path, changes: dict[str, str]
) -> None:
    root = tree(tmp_path, TWO_NODES, changes)
    assert [cgroups.near_processors(GPUS, own, root) for own in range(4)] == [None] * 4
    assert cgroups.near_processors(["0000:99:00.0"], 0, root) is None, "no such device"
