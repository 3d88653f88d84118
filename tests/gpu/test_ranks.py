"""A rank that is alone in its group: what several would exchange goes through NCCL, on the one GPU."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from steadytrain.config import Recipe
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.process_group import Group, init_group
from steadytrain.distributed.world import World
from steadytrain.events import Noticed, Started
from steadytrain.launch.supervise import free_port
from steadytrain.run import Run
from steadytrain.training import steps

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)


@pytest.fixture
def group() -> Iterator[Group]:
    with init_group(World(port=free_port())) as group:
        yield group


def test_nccl_is_bound_to_the_gpu_before_the_first_exchange(group: Group) -> None:
    engine = Engine(GPU, group)
    assert engine._ranks is not None and engine._ranks.bound_device_id == GPU
    assert engine.sum(torch.ones(3, device=GPU)).tolist() == [1.0] * 3
    assert engine.broadcast(torch.ones(3, device=GPU)).tolist() == [1.0] * 3


def test_a_rank_records_its_update_with_the_exchange_and_trains_the_same_weights(
    recipe: Recipe, tmp_path: Path, group: Group
) -> None:
    weights: dict[bool, dict[str, torch.Tensor]] = {}
    for graph in (False, True):
        settings = {"parallel.device": "cuda", "parallel.deterministic": True, "parallel.graph": graph}
        run = Run.create(tmp_path / str(graph), recipe.with_(settings))
        notices = [event.message for event in steps(run, group=group) if isinstance(event, Noticed)]
        assert any("as one CUDA graph" in notice for notice in notices) == graph, notices
        weights[graph] = load_file(run.directory / "model.safetensors")
    assert all(torch.equal(weights[False][name], weights[True][name]) for name in weights[True])


def test_a_run_says_on_which_gpu_it_computes(recipe: Recipe, tmp_path: Path) -> None:
    for event in steps(Run.create(tmp_path / "run", recipe.with_({"parallel.device": "cuda"}))):
        if isinstance(event, Started):
            assert event.machine["gpus"] == [{"index": 0, "uuid": str(torch.cuda.get_device_properties(GPU).uuid)}]
            return
