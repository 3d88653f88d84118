"""What a run is set up with on this machine, also after it began on another one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from steadytrain import __version__
from steadytrain.config import Recipe
from steadytrain.distributed.world import World
from steadytrain.errors import RecipeError
from steadytrain.machine import facts
from steadytrain.training.device import choose_device, set_up_machine

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


def test_a_resume_by_another_version_is_said_and_a_run_of_before_versions_were_kept_says_nothing(
    recipe: Recipe,
) -> None:
    messages: list[str] = []
    machine = set_up_machine(recipe, CPU, {}, messages.append)
    set_up_machine(recipe, CPU, {**machine, "steadytrain": "0.1.7"}, messages.append)
    assert messages[-1] == f"steadytrain was 0.1.7 and is now {__version__}"
    messages.clear()
    set_up_machine(recipe, CPU, {name: machine[name] for name in machine if name != "steadytrain"}, messages.append)
    assert messages == []


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
