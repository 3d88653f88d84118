"""Which processors are near a rank's GPU, on machines as makers describe them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.machine.trees import tree

from steadytrain.machine.cgroups import near_processors


def machine(root: Path, packages: int, nodes_each: int, cores: int, gpu_nodes: list[int]) -> list[str]:
    """Write a machine with two threads a core, numbered as Linux does it; return its GPUs.

    Args:
        packages, nodes_each, cores: sockets, NUMA nodes of each, cores of a node.
        gpu_nodes: the node of each GPU.
    """
    num_nodes, files = packages * nodes_each, dict[str, str]()
    for node in range(num_nodes):
        first, second = node * cores, (num_nodes + node) * cores
        files[f"sys/devices/system/node/node{node}/cpulist"] = (
            f"{first}-{first + cores - 1},{second}-{second + cores - 1}"
        )
        for processor in (*range(first, first + cores), *range(second, second + cores)):
            name = f"sys/devices/system/cpu/cpu{processor}/topology/physical_package_id"
            files[name] = str(node // nodes_each)
    gpus = [f"0000:{16 * number + 1:02x}:00.0" for number in range(len(gpu_nodes))]
    files |= {f"sys/bus/pci/devices/{gpu}/numa_node": str(node) for gpu, node in zip(gpus, gpu_nodes, strict=True)}
    tree(root, files)
    return gpus


def near(root: Path, gpus: list[str], allowed: frozenset[int]) -> list[tuple[int, int]]:
    """For each GPU: how many processors are near it, and the lowest of them."""
    return [(len(processors), min(processors)) for processors in near_processors(gpus, allowed, root)]


def test_where_nodes_are_large_enough_ranks_stay_on_them(tmp_path: Path) -> None:
    """DGX H100: two sockets of 56 cores, a node each, with four GPUs each."""
    gpus = machine(tmp_path, 2, 1, 56, [0, 0, 0, 0, 1, 1, 1, 1])
    assert near(tmp_path, gpus, frozenset(range(224))) == [(112, 0)] * 4 + [(112, 56)] * 4


def test_where_nodes_are_too_small_ranks_stay_on_sockets(tmp_path: Path) -> None:
    """DGX A100 as delivered (NPS4): eight nodes of 16 cores, and two GPUs at each of four of them."""
    gpus = machine(tmp_path, 2, 4, 16, [3, 3, 1, 1, 7, 7, 5, 5])
    everything = frozenset(range(256))
    assert near(tmp_path, gpus, everything) == [(128, 0)] * 4 + [(128, 64)] * 4
    first = near_processors(gpus, everything, tmp_path)[0]
    assert first == frozenset((*range(64), *range(128, 192))), "both threads of each core"


def test_ranks_of_a_few_gpus_keep_to_a_socket_only_where_that_costs_no_processors(tmp_path: Path) -> None:
    gpus = machine(tmp_path, 2, 4, 16, [3, 3, 1, 1, 7, 7, 5, 5])
    everything = frozenset(range(256))
    assert near_processors(gpus[:2], everything, tmp_path) == [everything] * 2, "the other socket would do nothing"
    assert near(tmp_path, [gpus[0], gpus[4]], everything) == [(128, 0), (128, 64)]


def test_one_socket_leaves_ranks_where_they_are(tmp_path: Path) -> None:
    gpus = machine(tmp_path, 1, 1, 32, [0, 0, 0, 0])
    everything = frozenset(range(64))
    assert near_processors(gpus, everything, tmp_path) == [everything] * 4


def test_inside_an_affinity_the_near_part_of_it_is_taken(tmp_path: Path) -> None:
    """A container, or a job of Slurm, with half of the cores of each socket."""
    gpus = machine(tmp_path, 2, 1, 56, [0, 0, 1, 1])
    allowed = frozenset((*range(28), *range(56, 84)))
    assert near_processors(gpus, allowed, tmp_path) == [frozenset(range(28))] * 2 + [frozenset(range(56, 84))] * 2


@pytest.mark.parametrize("allowed", [frozenset(range(28)), frozenset(range(50, 62)), frozenset({3})])
def test_an_affinity_that_leaves_no_even_share_near_each_gpu_stays_whole(
    tmp_path: Path, allowed: frozenset[int]
) -> None:
    gpus = machine(tmp_path, 2, 1, 56, [0, 0, 0, 1])
    assert near_processors(gpus, allowed, tmp_path) == [allowed] * 4


def test_a_rank_with_processors_of_its_own_keeps_them_all(tmp_path: Path) -> None:
    """Slurm gives each task its own: those on the far socket are no reason to go without."""
    gpus = machine(tmp_path, 2, 1, 56, [0, 1])
    assert near_processors(gpus[:1], frozenset(range(7)), tmp_path) == [frozenset(range(7))]
    assert near_processors(gpus[1:], frozenset(range(52, 60)), tmp_path) == [frozenset(range(52, 60))]


@pytest.mark.parametrize("place", ["-1", "7", ""])
def test_where_the_system_does_not_tell_ranks_stay_where_they_are(tmp_path: Path, place: str) -> None:
    """As in most virtual machines."""
    gpus = machine(tmp_path, 2, 1, 4, [0, 1])
    tree(tmp_path, {f"sys/bus/pci/devices/{gpus[1]}/numa_node": place})
    everything = frozenset(range(16))
    assert near_processors(gpus, everything, tmp_path) == [everything] * 2
    assert near_processors(["0000:99:00.0"], everything, tmp_path) == [everything], "no such device"
    assert near_processors(gpus, everything, tmp_path / "nothing") == [everything] * 2


def test_a_node_of_memory_alone_takes_no_rank(tmp_path: Path) -> None:
    """As the GPUs' own memory on a Grace Hopper."""
    gpus = machine(tmp_path, 2, 1, 4, [0, 1])
    tree(tmp_path, {"sys/devices/system/node/node2/cpulist": ""})
    assert near(tmp_path, gpus, frozenset(range(16))) == [(8, 0), (8, 4)]
