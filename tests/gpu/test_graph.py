"""Updates as one CUDA graph: the same weights as by single operations, resumed too; what no graph may hold is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from steadytrain.config import Recipe
from steadytrain.events import Noticed, Step
from steadytrain.run import Run
from steadytrain.training import steps, train

pytestmark = pytest.mark.gpu


def _trained(folder: Path, recipe: Recipe, **changes: object) -> tuple[dict[str, torch.Tensor], list[str]]:
    """Weights, and what was noticed."""
    values = {"parallel.device": "cuda", "parallel.deterministic": True, **changes}
    run = Run.create(folder, recipe.with_(values))
    train(run, allow_import=True)
    notices = [event.message for event in run.events() if isinstance(event, Noticed)]
    return load_file(folder / "model.safetensors"), notices


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optim.name": "adamw", "optim.clip_norm": 1.0},
        {"optim.ema": 0.9, "optim.accumulate": 2},
        {"precision.name": "bf16"},
        {"precision.name": "fp16", "optim.clip_norm": 1.0},
        {"precision.name": "pure-bf16"},
        {"precision.compile": "default"},
    ],
    ids=["sgd", "adamw-clipped", "ema-accumulated", "bf16", "fp16-clipped", "pure-bf16", "compiled"],
)
def test_a_graph_trains_the_same_weights(recipe: Recipe, tmp_path: Path, changes: dict[str, object]) -> None:
    plain, _ = _trained(tmp_path / "plain", recipe, **changes)
    replayed, notices = _trained(tmp_path / "graph", recipe, **changes, **{"parallel.graph": True})
    assert any("as one CUDA graph" in notice for notice in notices), notices
    assert all(torch.equal(plain[name], replayed[name]) for name in plain)


def test_a_stopped_run_goes_on_with_or_without_its_graph(recipe: Recipe, tmp_path: Path) -> None:
    graphed = {"parallel.graph": True, "parallel.device": "cuda", "parallel.deterministic": True}
    whole, _ = _trained(tmp_path / "whole", recipe, **graphed)
    run = Run.create(tmp_path / "stopped", recipe.with_(graphed))
    seen: list[Step] = []
    for event in steps(run, stop=lambda: "SIGTERM" if len(seen) == 7 else None):
        seen.extend([event] if isinstance(event, Step) else [])
    train(run)
    gone_on = load_file(tmp_path / "stopped" / "model.safetensors")
    assert all(torch.equal(whole[name], gone_on[name]) for name in whole)


NETS = """
import torch

class Net(torch.nn.Module):
    def __init__(self, pixels, num_classes):
        super().__init__()
        self.head = torch.nn.Linear(pixels, num_classes)
        self.register_buffer("last", torch.zeros(()))
        self.register_buffer("changes", torch.zeros(()))

    def forward(self, images):
        dropped = torch.nn.functional.dropout(images.flatten(1), 0.5, self.training)
        if self.training:
            kept = (dropped != 0).sum()
            self.changes += kept != self.last
            self.last.copy_(kept)
        return self.head(dropped)

class Asking(Net):
    def forward(self, images):
        return super().forward(images) * (1.0 if images.sum().item() > 1e30 else 2.0)

def drops(num_classes, channels, size):
    return Net(channels * size * size, num_classes)

def asks(num_classes, channels, size):
    return Asking(channels * size * size, num_classes)
"""


@pytest.fixture
def nets(write_module: Callable[[str, str], Path]) -> str:
    return write_module("graphed_nets", NETS).stem


def test_dropout_draws_anew_in_each_update(recipe: Recipe, tmp_path: Path, nets: str) -> None:
    weights, notices = _trained(tmp_path / "run", recipe, **{"model.name": f"{nets}:drops", "parallel.graph": True})
    assert any("as one CUDA graph" in notice for notice in notices), notices
    assert weights["changes"] >= 15  # of 20: the same count may come twice by chance


def test_what_waits_for_the_device_is_told_and_trained_without(recipe: Recipe, tmp_path: Path, nets: str) -> None:
    weights, notices = _trained(tmp_path / "run", recipe, **{"model.name": f"{nets}:asks", "parallel.graph": True})
    assert any("cannot be recorded as a graph" in notice for notice in notices), notices
    assert weights["head.weight"].isfinite().all()
