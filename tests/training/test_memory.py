"""Memory that runs out: the run goes on with smaller passes, and comes out as the same accumulation by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from steadytrain.config import Recipe
from steadytrain.errors import FailedError
from steadytrain.events import Compiled, Evaluated, Event, Failed, Halved, Logged, Noticed, Resumed, Started
from steadytrain.monitor import read_history
from steadytrain.reports.status import milestones
from steadytrain.run import Run
from steadytrain.training import checkpoints, compute, steps, train
from steadytrain.training.memory import is_out_of_memory

WriteModule = Callable[[str, str], Path]
Weights = Callable[[Path], bytes]

NET = """
import os, torch
from torch import nn

def require(n, room):
    if n > room:
        raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {n}.00 MiB.")

class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, room):
        ctx.room = room
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        require(len(gradient), ctx.room)
        return gradient, None

class Narrow(nn.Module):
    '''Has room for so many images; ``late``: only after so many passes; ``rank``: only that one is so narrow.'''
    def __init__(self, room, evaluated, late, rank, back):
        super().__init__()
        self.room, self.evaluated, self.late, self.back, self.calls = room, evaluated, late, back, 0
        self.is_narrow = rank < 0 or os.environ.get("RANK") == str(rank)
    def forward(self, x):
        self.calls += self.training
        if not self.is_narrow or (self.training and self.calls <= self.late):
            return x
        if self.training and self.back:
            return Back.apply(x, self.room)
        require(len(x), self.room if self.training else self.evaluated)
        return x

def make(num_classes, channels, room=10**6, evaluated=10**6, late=0, rank=-1, back=False, norm=True, **told):
    return nn.Sequential(
        nn.Conv2d(channels, 8, 3, padding=1), nn.BatchNorm2d(8) if norm else nn.Identity(), nn.ReLU(),
        nn.Dropout(0.1) if norm else nn.Identity(),
        Narrow(room, evaluated, late, rank, back),
        nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.BatchNorm1d(8) if norm else nn.Identity(), nn.Linear(8, num_classes),
    )
"""


@pytest.fixture
def narrow(recipe: Recipe, write_module: WriteModule) -> Callable[..., Recipe]:
    """The recipe with a network that has room for so many images."""
    write_module("narrow_net", NET)

    def make(changes: dict[str, object] | None = None, **options: object) -> Recipe:
        return recipe.with_({"model.name": "narrow_net:make", "model.options": options, **(changes or {})})

    return make


@pytest.mark.parametrize(
    ("message", "is_memory"),
    [
        ("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.18 GiB", True),
        ("CUDA driver error: CUDA_ERROR_OUT_OF_MEMORY", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED", True),
        ("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED", True),
        ("Unable to find a valid cuDNN algorithm to run convolution", True),
        ("FIND was unable to find an engine to execute this computation after trying 12 plans.", True),
        ("NCCL error in: ProcessGroupNCCL.cpp:3690, unhandled cuda error\nCuda failure 2 'out of memory'", True),
        ("NCCL error, unhandled cuda error\nLast error:\nFailed to CUDA calloc async 608 bytes", True),
        ("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("cuDNN error: CUDNN_STATUS_BAD_PARAM", False),
        ("CUDA error: CUBLAS_STATUS_INVALID_VALUE when calling `cublasGemmEx`", False),
        ("NCCL error in: ProcessGroupNCCL.cpp:3690, remote process exited or there was a network error", False),
        ("out of resource: shared memory, Required: 245760, Hardware limit: 232448", False),
        ("mat1 and mat2 shapes cannot be multiplied (32x64 and 32x10)", False),
    ],
)
def test_memory_that_ran_out_is_told_in_the_words_of_each_library(message: str, is_memory: bool) -> None:
    assert is_out_of_memory(RuntimeError(message)) is is_memory


def halved(events: list[Event]) -> list[tuple[str, int]]:
    return [(event.during, event.images) for event in events if isinstance(event, Halved)]


def of_weights(path: Path, weights: Weights) -> bytes:
    return weights(path)


@pytest.mark.parametrize("back", [False, True])
def test_an_update_out_of_memory_is_the_accumulation_by_hand_to_the_last_bit(
    narrow: Callable[..., Recipe], tmp_path: Path, weights: Weights, back: bool
) -> None:
    """Batch norms, dropout and running statistics included: what the failed pass had changed is taken back."""
    ours = list(steps(Run.create(tmp_path / "ours", narrow(room=10, back=back)), allow_import=True))
    hand = list(steps(Run.create(tmp_path / "hand", narrow({"optim.accumulate": 4})), allow_import=True))
    assert halved(ours) == [("update", 16), ("update", 8)] and halved(hand) == []
    assert weights(tmp_path / "ours") == weights(tmp_path / "hand")
    lines = [[event.loss for event in name if isinstance(event, Logged)] for name in (ours, hand)]
    assert len(lines[0]) == 4 and lines[0] == lines[1]


@pytest.fixture
def modes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A device whose compiled code is recorded as graphs: the mode of each pass, which is computed as it is written."""

    def compile_(function: Callable[..., object], *, mode: str, dynamic: bool) -> Callable[..., object]:
        def run(*args: object) -> object:
            used.append(mode)
            return function(*args)

        return run

    used: list[str] = []
    monkeypatch.setattr(torch, "compile", compile_)
    monkeypatch.setattr(compute.compile, "records_graphs", lambda mode, device: mode in compute.compile.WITHOUT_GRAPHS)
    return used


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_no_gradients_are_added_up_in_a_graphs_memory(
    narrow: Callable[..., Recipe], tmp_path: Path, modes: list[str], mode: str
) -> None:
    """Gradients of a graph are written over by its next launch: where memory runs out, code without one goes on."""
    recipe = narrow({"precision.compile": mode, "budget.epochs": None, "budget.steps": 6}, room=16, late=12)
    events = list(steps(Run.create(tmp_path / "graphs", recipe), allow_import=True))
    assert halved(events) == [("update", 16)]
    without = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}[mode]
    first = modes.index(without)
    assert set(modes[:first]) == {mode} and set(modes[first:]) == {without}
    assert [event.message for event in events if isinstance(event, Noticed) and without in event.message] == [
        f"from here on compiled as {without}, not {mode}: its CUDA graphs reuse the memory of gradients that several"
        " passes add up"
    ]


def test_an_update_of_several_passes_is_compiled_without_graphs(
    narrow: Callable[..., Recipe], tmp_path: Path, modes: list[str]
) -> None:
    changes = {"precision.compile": "max-autotune", "optim.accumulate": 2, "budget.epochs": None, "budget.steps": 2}
    events = list(steps(Run.create(tmp_path / "run", narrow(changes)), allow_import=True))
    assert set(modes) == {"max-autotune-no-cudagraphs"}
    assert any("compiled as max-autotune-no-cudagraphs" in e.message for e in events if isinstance(e, Noticed))
    assert [event.mode for event in events if isinstance(event, Compiled)] == ["max-autotune-no-cudagraphs"]


def test_parts_of_unequal_size_give_the_mean_over_the_batch(narrow: Callable[..., Recipe], tmp_path: Path) -> None:
    losses = []
    for name, options in (("ours", {"room": 20}), ("whole", {})):
        recipe = narrow({"batch_size": 50, "every.log_steps": 1}, norm=False, **options)
        events = list(steps(Run.create(tmp_path / name, recipe), allow_import=True))
        losses.append([event.loss for event in events if isinstance(event, Logged)])
        assert halved(events) == ([("update", 25), ("update", 13)] if options else [])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_mixed_images_have_the_same_partners_in_smaller_passes(narrow: Callable[..., Recipe], tmp_path: Path) -> None:
    losses = []
    for name, options in (("ours", {"room": 8}), ("whole", {})):
        recipe = narrow({"data.transforms": ["mixup:0.4"], "every.log_steps": 1}, norm=False, **options)
        events = list(steps(Run.create(tmp_path / name, recipe), allow_import=True))
        losses.append([event.loss for event in events if isinstance(event, Logged)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_resumed_run_keeps_the_smaller_passes(
    narrow: Callable[..., Recipe], tmp_path: Path, weights: Weights
) -> None:
    recipe = narrow(room=8)
    train(Run.create(tmp_path / "whole", recipe), allow_import=True)
    run, seen = Run.create(tmp_path / "parts", recipe), list[Event]()
    for event in steps(run, allow_import=True, stop=lambda: "SIGINT" if len(seen) > 6 else None):
        seen.append(event)
    again = list(steps(Run.open(run.directory), allow_import=True))
    assert halved(seen) == [("update", 16), ("update", 8)] and halved(again) == []
    assert weights(tmp_path / "whole") == weights(tmp_path / "parts")


def test_an_evaluation_out_of_memory_counts_every_image_once(narrow: Callable[..., Recipe], tmp_path: Path) -> None:
    scores = []
    for name, options in (("ours", {"evaluated": 9}), ("whole", {})):
        events = list(steps(Run.create(tmp_path / name, narrow(**options)), allow_import=True))
        scores.append([(e.n, e.top1, e.loss) for e in events if isinstance(e, Evaluated)])
        assert halved(events) == ([("evaluation", 16), ("evaluation", 8)] if options else [])
    assert [score[:2] for score in scores[0]] == [score[:2] for score in scores[1]] and scores[0][0][0] == 80
    assert [loss for *_, loss in scores[0]] == pytest.approx([loss for *_, loss in scores[1]], rel=1e-5)


def test_what_happened_is_in_the_log_and_in_the_report(narrow: Callable[..., Recipe], tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", narrow(room=16))
    train(run, allow_import=True)
    [event] = [event for event in run.events() if isinstance(event, Halved)]
    assert event.message.startswith(
        "memory ran out in an update (CUDA out of memory. Tried to allocate 32.00 MiB): 16 in"
    )
    assert any(event.message == line["what"] for line in milestones(read_history(run)))


def test_below_one_image_the_error_says_what_to_do(narrow: Callable[..., Recipe], tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", narrow(room=0, norm=False))
    with pytest.raises(
        FailedError, match=r"^the memory is not enough for one image at a time \(CUDA.*: choose smaller"
    ):
        train(run, allow_import=True)
    events = list(run.events())
    assert [images for _, images in halved(events)] == [16, 8, 4, 2, 1]
    assert [event.error for event in events if isinstance(event, Failed)] == ["FailedError"]


def test_batch_norms_that_refuse_one_image_are_named(narrow: Callable[..., Recipe], tmp_path: Path) -> None:
    with pytest.raises(FailedError, match=r"not enough for more than one image at a time, as batch norms need"):
        train(Run.create(tmp_path / "run", narrow(room=1)), allow_import=True)


def test_the_average_settles_in_passes_that_fit(narrow: Callable[..., Recipe], tmp_path: Path) -> None:
    events = list(
        steps(Run.create(tmp_path / "run", narrow({"optim.ema": 0.9}, room=8, evaluated=8)), allow_import=True)
    )
    assert ("evaluation", 8) in halved(events) or halved(events) == [("update", 16), ("update", 8)]
    assert len([event for event in events if isinstance(event, Evaluated)]) == 2


LIMITED = """
import resource, sys
import torch
from steadytrain.events import Started
from steadytrain.machine.process import keep_memory
from steadytrain.run import Run
from steadytrain.training import steps

keep_memory(1 << 21)  # or the heap would have reserved most of the machine's memory before
for event in steps(Run.open(sys.argv[1]), allow_import=True):
    if isinstance(event, Started):
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        limit = used + int(sys.argv[2])
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""

WIDE = """
from torch import nn

def make(num_classes, channels, **told):
    '''Some megabytes of activations for each image.'''
    layers = [nn.Upsample(scale_factor=8), nn.Conv2d(channels, 32, 1), nn.ReLU()]
    for _ in range(3):
        layers += [nn.Conv2d(32, 32, 1), nn.Tanh()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, num_classes))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space are Linux's")
def test_a_run_whose_address_space_is_too_small_finishes_as_by_hand(
    recipe: Recipe, write_module: WriteModule, tmp_path: Path, weights: Weights
) -> None:
    """A real limit of this system, met by torch's own allocator: where in the run, and how often, is its affair."""
    write_module("wide_net", WIDE)
    recipe = recipe.with_({"model.name": "wide_net:make", "batch_size": 64, "budget.epochs": 1, "data.pad": 0})
    run = Run.create(tmp_path / "ours", recipe)
    command = [sys.executable, "-c", LIMITED, str(run.directory), str(192 << 20)]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    ended = [event for event in run.events() if isinstance(event, Halved)]
    sizes = [event.images for event in ended if event.during == "update"]
    assert sizes and all("memory ran out" in event.message for event in ended)
    train(Run.create(tmp_path / "hand", recipe.with_({"optim.accumulate": 64 // sizes[-1]})), allow_import=True)
    ours, by_hand = (np.frombuffer(weights(tmp_path / name), np.float32) for name in ("ours", "hand"))
    assert ours == pytest.approx(by_hand, rel=1e-3, abs=1e-4)  # updates before the last halving took larger parts


def ranks(digits: Path, write_module: WriteModule, run: Path, *words: str) -> str:
    module = write_module("narrow_net", NET)
    command = [sys.executable, "-m", "steadytrain", "train", str(digits), "--run", str(run), "--procs", "2"]
    command += ["--model", "narrow_net:make", "--epochs", "2", "--batch-size", "32", "--lr", "0.05", "--device", "cpu"]
    command += ["--set", "parallel.compute_threads=1", "--set", "every.save_steps=7", "--holdout", "0.2", *words]
    environment = {**os.environ, "PYTHONPATH": f"{module.parent}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.slow
def test_two_ranks_agree_on_what_the_narrower_one_has_room_for(
    digits: Path, write_module: WriteModule, tmp_path: Path, weights: Weights
) -> None:
    ranks(digits, write_module, tmp_path / "ours", "--set", 'model.options={"room": 4, "rank": 1, "norm": false}')
    ranks(
        digits, write_module, tmp_path / "hand", "--set", 'model.options={"norm": false}', "--set", "optim.accumulate=4"
    )
    for rank, expected in ((0, [4]), (1, [8, 4])):
        events = list(Run.open(tmp_path / "ours").events(rank))
        assert [images for _, images in halved(events)] == expected
        assert {event.attempt for event in events if isinstance(event, Started)} == {1}, "nobody started again"
    assert weights(tmp_path / "ours") == weights(tmp_path / "hand")


@pytest.mark.slow
def test_ranks_start_again_where_one_runs_out_of_memory_in_an_update(
    digits: Path, write_module: WriteModule, tmp_path: Path
) -> None:
    """After ten passes of rank 1: no collective is left hanging, and the next attempt takes what it has room for."""
    words = ranks(digits, write_module, tmp_path / "run", "--set", 'model.options={"room": 8, "rank": 1, "late": 10}')
    assert "restarting all 2 ranks" in words
    run = Run.open(tmp_path / "run")
    assert halved(list(run.events(1))) == [("update", 8)]
    assert [event.step for event in run.events() if isinstance(event, Resumed)] == [7]
    assert run.finished() is not None and checkpoints.newest(run.checkpoints) is not None
