"""A run whose training passes are in blocks of channels: the same training, bit for bit its own after a stop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from steadytrain.cli import main
from steadytrain.config import Recipe
from steadytrain.errors import ModelError, RecipeError
from steadytrain.events import Evaluated, Event, Logged, Started, Step, StepMeasured
from steadytrain.run import Run
from steadytrain.training import steps, train
from steadytrain.training.explain import explain

Own = Callable[[str, str], Path]
Weights = Callable[[Path], bytes]

NET = """
import random, torch
from torch import nn

def conv(n_in, n_out):
    return nn.Sequential(nn.Conv2d(n_in, n_out, 3, padding=1), nn.BatchNorm2d(n_out), nn.ReLU(inplace=True))

def make(num_classes, channels, **told):
    body = [conv(16, 16) for _ in range(9)]
    return nn.Sequential(
        conv(channels, 16), *body, nn.MaxPool2d(2), nn.Dropout(0.2), conv(16, 16), conv(16, 24),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, num_classes),
    )

class Around(nn.Module):
    def __init__(self, way, inner):
        super().__init__()
        self.way, self.inner, self.branch = way, inner, conv(1, 1)
        self.register_buffer("calls", torch.zeros(()))
        nn.init.zeros_(self.branch[1].weight)

    def forward(self, x):
        return self.inner(getattr(self, self.way)(x))

    def tossed(self, x):
        return x if random.random() < 0.1 else x + self.branch(x)

    def noisy(self, x):
        return x * (1 + 0.05 * torch.randn(1, 1, 1))

    def counted(self, x):
        self.calls += 1
        return x

    def kept(self, x):
        y = x * 1
        before = y
        y += self.branch(x)  # changes what was kept; traced, it does not
        return y + before

def around(num_classes, channels, way, **told):
    return Around(way, make(num_classes, channels))
"""


@pytest.fixture
def blocked(recipe: Recipe, own: Own) -> Recipe:
    own("plain_net", NET)
    changes = {"model.name": "plain_net:make", "optim.ema": 0.9, "optim.clip_norm": 5.0, "every.log_steps": 1}
    return recipe.with_(changes | {"precision.blocked": True})


def _events(run: Path, recipe: Recipe) -> list[Event]:
    return list(steps(Run.create(run, recipe), allow_import=True))


def test_it_is_the_same_training_but_for_rounding(blocked: Recipe, tmp_path: Path) -> None:
    short = blocked.with_({"budget.epochs": None, "budget.steps": 4})
    told, usual = (
        _events(tmp_path / name, short.with_({"precision.blocked": on})) for name, on in (("on", True), ("off", False))
    )
    losses, others = ([e.loss for e in events if isinstance(e, Logged)] for events in (told, usual))
    assert len(losses) == 4 and losses == pytest.approx(others, rel=1e-3)
    [one], [other] = ([e for e in events if isinstance(e, Evaluated)] for events in (told, usual))
    assert one.n == other.n and one.loss == pytest.approx(other.loss, rel=1e-3)
    [started] = [e for e in told if isinstance(e, Started)]
    assert "blocks" in started.startup


def test_a_stopped_run_goes_on_to_the_same_bits(blocked: Recipe, tmp_path: Path, weights: Weights) -> None:
    train(Run.create(tmp_path / "whole", blocked), allow_import=True)
    done: list[int] = []

    def stop() -> str | None:
        return "SIGTERM" if done[-1:] == [7] else None

    for event in steps(Run.create(tmp_path / "parts", blocked), stop=stop, allow_import=True):
        done.extend([event.step] if isinstance(event, Step) else [])
    train(Run.open(tmp_path / "parts"), allow_import=True)
    assert done[-1] == 7 and weights(tmp_path / "whole") == weights(tmp_path / "parts")


def test_another_layout_is_another_recipe_and_none_is_what_it_was(recipe: Recipe) -> None:
    told = recipe.with_({"precision.blocked": True})
    assert told.digest != recipe.digest and told.with_({"precision.blocked": False}).digest == recipe.digest
    assert (told.precision.layout, recipe.precision.layout) == ("blocked", "channels-last")


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"precision.name": "bf16"}, r"precision\.name='bf16' exclude each other: blocks are for fp32"),
        ({"precision.compile": "default"}, r"precision\.compile='default' exclude each other"),
        ({"parallel.recompute": True}, r"parallel\.recompute=True exclude each other"),
        ({"model.batch_norm": "synchronous"}, r"model\.batch_norm='synchronous' exclude each other"),
        ({"model.batch_norm": "frozen"}, r"model\.batch_norm='frozen' exclude each other"),
    ],
)
def test_what_excludes_it_is_named(recipe: Recipe, changes: dict[str, object], remedy: str) -> None:
    with pytest.raises(RecipeError, match=rf"precision\.blocked=True and {remedy}"):
        recipe.with_({"precision.blocked": True} | changes)


def test_a_network_that_gains_nothing_is_refused_before_anything_is_trained(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot be used with mlp: too few .*0 convolutions\); leave it out"):
        train(Run.create(tmp_path / "run", recipe.with_({"precision.blocked": True, "model.name": "mlp"})))


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("tossed", "it draws random numbers outside of its modules"),
        ("noisy", "it draws random numbers outside of its modules"),
        ("counted", "drawn images give another buffer calls there"),
        ("kept", "drawn images give another gradient of "),
    ],
)
def test_one_that_would_compute_something_else_there_is_refused(
    blocked: Recipe, tmp_path: Path, way: str, reason: str
) -> None:
    wrong = blocked.with_({"model.name": "plain_net:around", "model.options": {"way": way}})
    with pytest.raises(ModelError, match=f"cannot be used with plain_net:around: {reason}.*; leave it out"):
        train(Run.create(tmp_path / "run", wrong), allow_import=True)


def test_its_passes_can_be_measured(blocked: Recipe, tmp_path: Path) -> None:
    """By operations too, in the midst of the run, whose bits stay."""
    short = blocked.with_({"budget.epochs": None, "budget.steps": 8})
    told = list(steps(Run.create(tmp_path / "run", short), allow_import=True, probe=True))
    [measured] = [event for event in told if isinstance(event, StepMeasured)]
    assert measured.passes["full"] > 0 and (measured.forward_flops or 0) > 0


def test_it_is_explained(blocked: Recipe, capsys: pytest.CaptureFixture[str]) -> None:
    told = explain(blocked, allow_import=True)
    usual = explain(blocked.with_({"precision.blocked": False}), allow_import=True)
    assert told.operations.keys() == usual.operations.keys() == {"fp32"}
    assert told.operations["fp32"]["native_batch_norm"] == 12
    command = ["train", blocked.data.train, "--model", "resnet20", "--set", "precision.blocked=true", "--explain"]
    assert main([*command, "--precision", "fp32", "--device", "cpu"]) == 0
    assert "fp32 on cpu, blocks of channels" in capsys.readouterr().out


def test_a_row_of_the_table_is_in_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "train", "--model", "resnet20", "--size", "8", "--classes", "10", "--device", "cpu"]
    command += ["--seconds", "0.05", "--threads", "1", "--batch-size", "4", "--layout", "blocked"]
    assert main(command) == 0
    [row] = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("fp32 ")]
    assert row[1] == "blocked"
