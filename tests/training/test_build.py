"""What a run is set up with on this machine, also after it began on another one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steadytrain.config import Recipe
from steadytrain.distributed.world import World
from steadytrain.errors import RecipeError
from steadytrain.machine import facts
from steadytrain.training.device import choose_device, near_gpu, set_up_machine

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def threads() -> Iterator[int]:
    """Torch's number of threads, put back."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def test_a_resumed_run_computes_with_as_many_threads_as_before(recipe: Recipe) -> None:
    recipe = recipe.with_({"parallel.compute_threads": None})
    messages: list[str] = []
    machine = set_up_machine(recipe, CPU, {"compute_threads": 7}, messages.append)
    assert machine["compute_threads"] == torch.get_num_threads() == 7


def test_with_another_number_of_ranks_cores_are_shared_out_anew(
    recipe: Recipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    recipe = recipe.with_({"parallel.compute_threads": None})
    messages: list[str] = []
    machine = set_up_machine(recipe, CPU, {"compute_threads": 64, "ranks": 8}, messages.append)
    assert machine["compute_threads"] == facts.cores()
    assert any(f"compute_threads was 64 and is now {facts.cores()}" in line for line in messages)
    again = set_up_machine(recipe, CPU, {"compute_threads": 3, "ranks": 2}, messages.append, ranks=2, sharing=2)
    assert again["compute_threads"] == 3


@pytest.mark.parametrize(
    ("seen", "name", "rank", "expected"),
    [
        (4, "auto", 2, "cuda:2"),
        (1, "auto", 2, "cuda:0"),
        (1, "cuda", 0, "cuda:0"),
        (4, "cuda:3", 1, "cuda:3"),
        (8, "cuda:1,0,6,7", 2, "cuda:6"),
    ],
)
def test_a_rank_takes_the_gpu_of_its_number_or_the_only_one_that_it_sees(
    monkeypatch: pytest.MonkeyPatch, seen: int, name: str, rank: int, expected: str
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    world = World(rank=rank, size=4, local_rank=rank, local_size=4)
    assert choose_device(name, world) == torch.device(expected)


def test_more_ranks_than_gpus_are_refused_with_the_number_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(RecipeError, match=r"'cuda:0,1': 2 GPUs for 4 ranks of a machine; list as many, or start 2"):
        choose_device("cuda:0,1", World(rank=3, size=4, local_rank=3, local_size=4))
    with pytest.raises(RecipeError, match=r"'cuda:3' but torch .* sees 2 GPUs: start 2 ranks a machine, or"):
        choose_device("auto", World(rank=3, size=4, local_rank=3, local_size=4))


@pytest.mark.parametrize("rank", [0, 3])
def test_ranks_on_gpus_stay_near_them_for_the_run_and_share_what_is_there(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """By pretended GPUs, of four ranks on a machine of two nodes."""
    places = [f"0000:{bus:02x}:00.0" for bus in (23, 101, 202, 227)]
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=[23, 101, 202, 227][rank], pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    chosen: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, processors: chosen.append(set(processors)))
    monkeypatch.setattr("steadytrain.machine.cgroups.allowed", lambda: frozenset(range(8)))
    nodes = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}
    near = lambda devices, own: (own // 2, nodes[own // 2]) if devices == places else None  # noqa: E731
    monkeypatch.setattr("steadytrain.machine.cgroups.near_processors", near)
    answers = iter([places, [0, 0, 1, 1]])
    world = SimpleNamespace(rank=rank, is_first=rank == 0)
    group: Any = SimpleNamespace(world=world, hosts=["a"] * 4, sharing=4, all_gather_json=lambda value: next(answers))
    said: list[str] = []
    with near_gpu(group, torch.device("cuda", rank), said.append) as sharing:
        assert sharing == 2 and chosen == [nodes[rank // 2]]
    assert chosen[1:] == [set(range(8))]
    expected = "each rank stays on the processors of its GPU's NUMA node (rank 0: node 0, 4 of 8 processors)"
    assert said == ([expected] if rank == 0 else [])
    with near_gpu(group, torch.device("cpu"), said.append) as sharing:
        assert sharing == 4 and len(chosen) == 2
