"""Recomputed activations: less memory for the same bits, by any network with parts; else a reason why not."""

from __future__ import annotations

import copy
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from steadytrain import models
from steadytrain.config import Data, Model, Parallel, Recipe
from steadytrain.distributed.engine import Engine
from steadytrain.errors import ModelError
from steadytrain.events import Compiled, Event, Logged, Noticed, Step
from steadytrain.models import Input
from steadytrain.run import Run
from steadytrain.training import build, checkpoints, steps, train
from steadytrain.training.compute.recompute import Recomputed, recompute_parts
from steadytrain.training.data import DeviceBatch, random_batch
from steadytrain.training.state import State
from steadytrain.training.step import Update

WriteModule = Callable[[str, str], Path]
Weights = Callable[[Path], bytes]

NET = """
import random, torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

class Counting(nn.Module):
    '''Keeps statistics of its own: how often it was called, and what it saw then.'''
    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, x):
        self.calls += 1
        self.seen = self.seen * 0.9 + x.detach().mean()
        return x * (1 + self.calls) + self.seen

class Dense(nn.Module):
    '''Layers that are given a list, to which each one's outcome is added.'''
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer(16 * k) for k in (1, 2, 3))
    def forward(self, x):
        told = [x]
        for layer in self.layers:
            told.append(layer(told))
        return told[-1]

class Layer(nn.Module):
    def __init__(self, n_in):
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(n_in), conv(n_in, 16)
    def forward(self, told):
        return self.conv(nn.functional.silu(self.norm(torch.cat(told, 1))))

def conv(n_in, n_out):
    return nn.Conv2d(n_in, n_out, 3, padding=1)

def make(num_classes, channels, **told):
    return nn.Sequential(
        conv(channels, 16), nn.BatchNorm2d(16), nn.SiLU(inplace=True), nn.Dropout(0.2), Counting(),
        spectral_norm(conv(16, 16)), nn.BatchNorm2d(16, momentum=None), nn.Hardswish(inplace=True),
        Dense(), conv(16, 32), nn.BatchNorm2d(32), nn.SiLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(32, num_classes),
    )

class Tossed(nn.Module):
    def forward(self, x):
        return x * random.random()

def tossed(num_classes, channels, **told):
    return nn.Sequential(Tossed(), make(num_classes, channels))
"""

TRIED: dict[str, dict[str, object]] = {
    "resnet20": {"model.name": "resnet20", "batch_size": 8},
    "digits, micro-batches": {"optim.accumulate": 2},
    "inception": {"model.name": "inception-bn-28-small", "data.size": 8, "batch_size": 8},
    "bf16": {"precision.name": "bf16"},
    "timm, dropout and drop-path": {
        "model.name": "timm/mobilenetv3_small_050",
        "model.options": {"drop_rate": 0.2, "drop_path_rate": 0.2},
        "data.size": 32,
        "batch_size": 8,
        "optim.ema": 0.9,
    },
    "frozen norms": {
        "model.name": "resnet20",
        "model.batch_norm": "frozen",
        "batch_size": 8,
    },
}


def _trained(recipe: Recipe, run: Path, **changes: object) -> list[Event]:
    run_ = Run.create(run, recipe.with_({"budget.epochs": None, "budget.steps": 4, "every.log_steps": 1} | changes))
    return list(steps(run_))


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in ("inception", "frozen norms") else ()) for name in TRIED],
)
def test_no_bit_of_a_run_changes(recipe: Recipe, tmp_path: Path, weights: Weights, name: str) -> None:
    usual = _trained(recipe.with_(TRIED[name]), tmp_path / "usual")
    trained = _trained(recipe.with_(TRIED[name]), tmp_path / "again", **{"parallel.recompute": True})
    assert [e.loss for e in trained if isinstance(e, Logged)] == [e.loss for e in usual if isinstance(e, Logged)]
    assert weights(tmp_path / "again") == weights(tmp_path / "usual")
    assert len([e for e in trained if isinstance(e, Noticed) and "recomputed in each backward" in e.message]) == 1


def test_running_statistics_are_updated_once_an_update(recipe: Recipe, tmp_path: Path) -> None:
    _trained(recipe, tmp_path / "run", **{"model.name": "resnet20", "parallel.recompute": True})
    kept, _ = checkpoints.read_weights(tmp_path / "run" / "model.safetensors")
    assert {int(count) for name, count in kept.items() if name.endswith("num_batches_tracked")} == {4}


@pytest.mark.slow
def test_a_stopped_run_goes_on_with_it_to_the_same_bits(recipe: Recipe, tmp_path: Path, weights: Weights) -> None:
    """It says how and not what is trained, so a run that is short of memory may be given it later."""
    again = recipe.with_({"parallel.recompute": True})
    train(Run.create(tmp_path / "whole", recipe))
    done: list[int] = []

    def stop() -> str | None:
        return "SIGTERM" if done[-1:] == [7] else None

    for event in steps(Run.create(tmp_path / "parts", recipe), stop=stop):
        done.extend([event.step] if isinstance(event, Step) else [])
    train(Run.create(tmp_path / "parts", again))
    assert done[-1] == 7 and weights(tmp_path / "whole") == weights(tmp_path / "parts")


def _made(name: str, size: int, *, again: bool) -> tuple[State, Update, DeviceBatch, Recomputed | None]:
    """What is updated, the function that does it, and a batch of eight."""
    recipe = Recipe(data=Data(train="-"), model=Model(name), parallel=Parallel(recompute=again), batch_size=8)
    torch.manual_seed(0)
    built = models.build(recipe.model, num_classes=10, channels=3, size=size, allow_import=True)
    changed = replace(Input().filled(size, (0.5,) * 3, (0.25,) * 3), size=size, channels=3)
    state = build.state(recipe, built, Engine(torch.device("cpu")))
    update = build.update(recipe, built, changed, state)
    parts = recompute_parts(recipe, update, state)
    return state, update, random_batch(8, update.image_shape, torch.device("cpu")), parts


def test_statistics_of_any_kind_are_those_without(write_module: WriteModule) -> None:
    """Spectral norms, cumulative averages, and what a user's module counts for itself, which a pass reads too."""
    write_module("counting_net", NET)
    states = []
    for again in (False, True):
        state, update, batch, notices = _made("counting_net:make", 16, again=again)
        torch.manual_seed(1)
        for _ in range(3):
            update(state, batch, 0.05)
        states.append(state.module.state_dict())
    assert notices is not None and "8.layers.2" in notices.parts
    plain, other = states
    assert list(plain) == list(other) and plain["4.calls"] == 3
    assert [name for name in plain if not torch.equal(plain[name], other[name])] == []


def _kept(module: nn.Module, images: torch.Tensor) -> int:
    """Bytes that autograd keeps of a forward pass, but for parameters and statistics."""
    constant = {value.data_ptr() for value in (*module.parameters(), *module.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if (storage := tensor.untyped_storage()).data_ptr() not in constant:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _ = module(images)
    return sum(tensor.nbytes() for tensor in kept.values())


@pytest.mark.parametrize(
    ("name", "size", "share_kept"),
    [("resnet20", 32, 0.5), ("timm/mobilenetv3_small_050", 64, 0.5), ("timm/vit_tiny_patch16_224", 224, 0.3)],
)
def test_fewer_activations_are_kept(name: str, size: int, share_kept: float) -> None:
    images = torch.rand(2, 3, size, size)
    usual = _kept(_made(name, size, again=False)[0].module, images)
    state, _, _, notices = _made(name, size, again=True)
    assert notices is not None and notices.usual_bytes == pytest.approx(usual / 2, rel=0.02)
    assert notices.kept_bytes < share_kept * notices.usual_bytes
    assert _kept(state.module, images) <= notices.kept_bytes * 2 * 1.02


def test_a_copy_of_the_network_computes_with_its_own_weights() -> None:
    state, _, batch, _ = _made("resnet20", 32, again=True)
    other = copy.deepcopy(state.module)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    images = batch.images.permute(0, 3, 1, 2).float()
    assert other(images).abs().max() == 0 < state.module(images).abs().max()
    other(images).sum().backward()
    assert all(parameter.grad is None for parameter in state.module.parameters())
    assert other.get_parameter("linear.bias").grad is not None


def test_names_in_files_and_evaluation_stay() -> None:
    usual, again = (_made("resnet20", 32, again=again)[0].module for again in (False, True))
    assert list(usual.state_dict()) == list(again.state_dict())
    images = torch.rand(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(usual.eval()(images), again.eval()(images))


@pytest.mark.parametrize("name", ["mlp", "lenet"])
def test_a_network_without_parts_is_refused_with_what_would_stay(name: str) -> None:
    with pytest.raises(ModelError, match=f"saves nothing worth its time in {name}: .*optim.accumulate"):
        _made(name, 28, again=True)


def test_what_cannot_be_drawn_again_is_refused(write_module: WriteModule) -> None:
    write_module("tossed_net", NET)
    with pytest.raises(ModelError, match="draws from Python's or NumPy's random numbers"):
        _made("tossed_net:tossed", 16, again=True)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here: nothing can be compiled")
def test_compiled_code_recomputes_too(digits: Path, tmp_path: Path) -> None:
    for name, words in (("usual", ["--compile"]), ("again", ["--compile", "--recompute"])):
        command = [sys.executable, "-m", "steadytrain", "train", str(digits), "--run", str(tmp_path / name)]
        command += ["--model", "digits", "--batch-size", "32", "--lr", "0.05", "--device", "cpu"]
        command += ["--set", "budget.steps=4", "--set", "parallel.compute_threads=1", *words]
        subprocess.run(command, check=True, timeout=300, stdout=subprocess.DEVNULL)
        [compiled] = [event for event in Run.open(tmp_path / name).events() if isinstance(event, Compiled)]
        assert list(compiled.breaks) == []
    usual, again = (checkpoints.read_weights(tmp_path / name / "model.safetensors")[0] for name in ("usual", "again"))
    for key, value in usual.items():
        torch.testing.assert_close(again[key], value, rtol=1e-3, atol=1e-4)
    assert {int(value) for key, value in again.items() if key.endswith("num_batches_tracked")} == {4}
