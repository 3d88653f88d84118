"""What a step is made of, and that finding out changes nothing of the run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from steadytrain.config import Recipe
from steadytrain.events import Noticed
from steadytrain.machine import facts
from steadytrain.run import Run
from steadytrain.training.data import DeviceBatch, load
from steadytrain.training.profile import step_cost
from steadytrain.training.profile.step_cost import measure_step
from steadytrain.training.session.opening import open_session
from steadytrain.training.session.session import Session

Write = Callable[[str], ModuleType]

COUNTING = """
import random
import numpy
import torch

done = 0.0

class Net(torch.nn.Module):
    def __init__(self, outputs):
        super().__init__()
        self.norm = torch.nn.BatchNorm2d(1)
        self.head = torch.nn.Linear(64, outputs)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.calls = 0

    def forward(self, images):
        global done
        done += 8 + len(images)  # in place of seconds: some for each call, and one for each image
        self.calls += 1
        self.seen += 1
        self.head.register_forward_hook(lambda *told: None)
        images = images * (1 + 0.01 * random.random() * numpy.random.rand())
        return self.head(torch.nn.functional.dropout(self.norm(images).flatten(1)))

def make(num_classes, **told):
    return Net(num_classes)
"""


@contextmanager
def session_of(recipe: Recipe, folder: Path) -> Iterator[tuple[Session, DeviceBatch]]:
    """A run about to take its second batch, after one update."""
    run = Run.create(folder / "run", recipe)
    with run.lock(), run.log() as log, open_session(run, log, allow_import=True) as session:
        batches = load(session.feed, session.state.engine.device)
        session.update(session.state, next(batches), 0.1)
        yield session, next(batches)


def bits(tree: Any) -> Any:
    """Nested state with its tensors as bytes, so that equal means equal to the last bit."""
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tree.shape, tree.detach().numpy().tobytes()
    if isinstance(tree, Mapping):
        return {key: bits(value) for key, value in tree.items()}
    return [bits(part) for part in tree] if isinstance(tree, list | tuple) else tree


def test_measuring_changes_not_a_bit_of_the_run(
    recipe: Recipe, tmp_path: Path, write_module: Callable[[str, str], Path]
) -> None:
    write_module("passes_counting", COUNTING)
    recipe = recipe.with_({"model.name": "passes_counting:make", "optim.name": "adamw", "optim.ema": 0.9})
    with session_of(recipe, tmp_path) as (session, batch):
        module: Any = session.state.module
        before = bits(session.state.state_dict()), bits(dict(module.named_buffers())), module.calls
        hooks = len(module.head._forward_hooks)
        drawn, threads = (random.getstate(), str(np.random.get_state())), torch.get_num_threads()
        pixels = bits([batch.images, batch.labels])
        assert measure_step(session, batch) is not None
        assert (bits(session.state.state_dict()), bits(dict(module.named_buffers())), module.calls) == before
        assert (random.getstate(), str(np.random.get_state())) == drawn
        assert bits([batch.images, batch.labels]) == pixels
        assert torch.get_num_threads() == threads
        assert all(parameter.grad is None for parameter in module.parameters())
        assert all(part.training for part in module.modules())
        assert len(module.head._forward_hooks) == hooks


def test_what_does_not_shrink_with_the_batch_is_told_apart(
    recipe: Recipe, tmp_path: Path, write_module: Callable[[str, str], Path]
) -> None:
    write_module("passes_fixed", COUNTING)
    with session_of(recipe.with_({"model.name": "passes_fixed:make"}), tmp_path) as (session, batch):
        import passes_fixed  # type: ignore[import-not-found]

        measured = measure_step(session, batch, clock=lambda: float(passes_fixed.done))
        assert measured is not None
        assert (measured.batch_size, measured.other_batch_size, measured.step) == (32, 8, 1)
        assert (measured.passes["full"], measured.passes["other"], measured.fixed_seconds) == (40.0, 16.0, 8.0)


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "other"), [(1, 1, 4), (3, 1, 12), (4, 1, 16), (64, 2, 16), (32, 4, 128)]
)
def test_any_batch_has_another_size_to_compare_with(
    recipe: Recipe,
    tmp_path: Path,
    write_module: Callable[[str, str], Path],
    batch_size: int,
    accumulate: int,
    other: int,
) -> None:
    name = f"passes_sizes_{batch_size}_{accumulate}"
    write_module(name, COUNTING)
    changes = {"model.name": f"{name}:make", "optim.accumulate": accumulate, "budget.epochs": None, "budget.steps": 9}
    with session_of(recipe.with_(changes, batch_size=batch_size), tmp_path) as (session, batch):
        net = __import__(name)
        measured = measure_step(session, batch, clock=lambda: float(net.done))
        assert measured is not None and measured.other_batch_size == other
        assert measured.passes["full"] == 8 * accumulate + batch_size
        assert measured.fixed_seconds == pytest.approx(8 * accumulate)


def test_multiplications_are_counted_of_one_image(recipe: Recipe, tmp_path: Path) -> None:
    changed = recipe.with_({"model.name": "mlp", "model.options": {}})
    with session_of(changed, tmp_path) as (session, batch):
        measured = measure_step(session, batch)
        assert measured is not None and measured.operations is not None and measured.peak_flops is not None
        linear = [part for part in session.state.module.modules() if isinstance(part, torch.nn.Linear)]
        assert measured.forward_flops == sum(2 * part.in_features * part.out_features for part in linear)
        assert measured.operations > 3 * len(linear)  # each forward, and twice backward
        assert measured.peak_flops > 1e8
        assert measured.syncs == ()


WAITING = """
import torch

class Net(torch.nn.Linear):
    def forward(self, images):
        x = images.flatten(1)
        scale = x.abs().max().item()
        if (x > 3).any():
            scale = scale + 1.0
        return super().forward(x / (1.0 + scale))

def make(num_classes, **told):
    return Net(64, num_classes)
"""


def test_lines_that_wait_for_a_value_are_named(
    recipe: Recipe, tmp_path: Path, write_module: Callable[[str, str], Path]
) -> None:
    path = write_module("passes_waiting", WAITING)
    with session_of(recipe.with_({"model.name": "passes_waiting:make"}), tmp_path) as (session, batch):
        measured = measure_step(session, batch)
        assert measured is not None
        lines = WAITING.splitlines()
        item, bool_ = (next(n for n, text in enumerate(lines, 1) if what in text) for what in (".item()", ".any()"))
        assert measured.syncs == (f"{path}:{item}", f"{path}:{bool_}")


def test_a_network_that_takes_no_other_batch_is_trained_without_being_measured(
    recipe: Recipe, tmp_path: Path, write_module: Callable[[str, str], Path]
) -> None:
    write_module(
        "passes_picky",
        WAITING.replace("x = images", "assert not self.training or len(images) == 32, 'only 32'\n        x = images"),
    )
    with session_of(recipe.with_({"model.name": "passes_picky:make"}), tmp_path) as (session, batch):
        assert measure_step(session, batch) is None
        notices = [event.message for event in session.outbox if isinstance(event, Noticed)]
        assert "cannot be measured here (only 32)" in notices[-1]
        session.update(session.state, batch, 0.1)


@pytest.mark.parametrize("more", [1, -1])
def test_more_or_fewer_threads_than_cores_are_compared_with_as_many_as_there_are(
    recipe: Recipe, tmp_path: Path, more: int
) -> None:
    cores = facts.cores()
    if cores + more < 1:
        pytest.skip("one core has no fewer")
    changed = recipe.with_({"parallel.compute_threads": cores + more})
    with session_of(changed, tmp_path) as (session, batch):
        measured = measure_step(session, batch)
        assert measured is not None and f"threads={cores}" in measured.passes
        assert torch.get_num_threads() == cores + more


def test_sixteen_bits_are_compared_with_thirty_two(recipe: Recipe, tmp_path: Path) -> None:
    with session_of(recipe.with_({"precision.name": "bf16"}), tmp_path) as (session, batch):
        measured = measure_step(session, batch)
        assert measured is not None and "fp32" in measured.passes


@pytest.mark.gpu
def test_on_a_gpu_a_tiny_network_waits_for_the_host(recipe: Recipe, tmp_path: Path) -> None:
    with session_of(recipe.with_({"parallel.device": "cuda"}), tmp_path) as (session, batch):
        measured = measure_step(session, batch)
        assert measured is not None
        assert 0 < measured.fixed_seconds <= measured.passes["full"]


def test_threads_that_a_network_s_code_has_set_are_tried_though_others_were(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "cores", lambda: 2)
    alone = SimpleNamespace(engine=SimpleNamespace(world=SimpleNamespace(size=1)))
    machine = {"compute_threads": 1, "threads_seconds": {"1": 0.1, "2": 0.2}}
    session: Any = SimpleNamespace(state=alone, started=SimpleNamespace(machine=machine))
    assert not step_cost._tries_threads(session, 1), "one was found to be as fast"
    machine["compute_threads"] = 2
    assert step_cost._tries_threads(session, 1) and not step_cost._tries_threads(session, 2)
