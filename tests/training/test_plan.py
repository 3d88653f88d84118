"""Fine-tuning within so many minutes: the rule by itself, and a run that follows it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from steadytrain import events
from steadytrain.cli import main
from steadytrain.errors import RecipeError
from steadytrain.run import Run
from steadytrain.training.finetuning.plan import PLANNED, RESERVE, Rates, choose

Steady = Callable[..., tuple[str, str]]
RATES = Rates(features=200, full=25, startup=4)
DATA: dict[str, Any] = {"spent": 20, "num_train": 640, "num_val": 250, "epochs": 8}


@pytest.mark.parametrize(
    ("minutes", "train", "epochs"),
    [
        (0.7, "probe", 0),
        (2, "probe", 0),
        (3, "probe+discriminative", 4),
        (60, "probe+discriminative", 8),
    ],
)
def test_as_many_epochs_as_fit_and_else_the_probe(minutes: float, train: str, epochs: int) -> None:
    options = choose(RATES, minutes=minutes, **DATA)
    (chosen,) = (option for option in options if option.verdict == "chosen")
    assert (chosen.train, chosen.epochs) == (train, epochs)
    taken = DATA["spent"] + RATES.startup + chosen.pass_seconds + chosen.epochs * chosen.epoch_seconds
    assert taken <= 60 * minutes * (1 - RESERVE)
    assert options[0].train == "probe"


def test_a_probe_comes_first_where_it_takes_under_a_tenth_of_the_time() -> None:
    quick, slow = (choose(replace(RATES, features=features), minutes=60, **DATA)[-1] for features in (50, 20))
    assert (quick.train, slow.train) == ("probe+discriminative", "discriminative")
    assert quick.pass_seconds == (640 + 250) / 50 and slow.pass_seconds == 0.0
    whole = quick.pass_seconds + quick.epochs * quick.epoch_seconds
    assert quick.pass_seconds <= 0.1 * whole < (640 + 250) / 20


def test_a_slower_machine_gets_fewer_epochs() -> None:
    fitting = [choose(replace(RATES, full=full), minutes=4, **DATA)[-1].epochs for full in (100, 25, 12, 3)]
    assert fitting == sorted(fitting, reverse=True) and fitting[0] == 8 and fitting[-1] == 0


def test_a_method_of_the_users_keeps_its_word() -> None:
    (option,) = choose(RATES, minutes=3, train="gradual", **DATA)
    assert (option.train, option.epochs, option.pass_seconds) == ("gradual", 4, 0.0)
    (option,) = choose(replace(RATES, full=90), minutes=3, train="head", **DATA)
    assert option.epochs == 8


@pytest.mark.parametrize(("minutes", "train"), [(0.1, None), (0.6, "full")])
def test_too_few_minutes_are_refused_with_how_many_it_takes(minutes: float, train: str | None) -> None:
    with pytest.raises(RecipeError, match=r"is too short: .* give at least (\d+\.\d)") as refused:
        choose(RATES, minutes=minutes, train=train, **DATA)
    enough = float(str(refused.value).partition("at least ")[2].partition(",")[0]) + 0.05
    assert any(o.verdict == "chosen" for o in choose(RATES, minutes=enough, train=train, **DATA))


@pytest.fixture
def steady(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Steady:
    """``steady("train", folder)`` in an empty working directory: what was printed, and said beside it."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> tuple[str, str]:
        main([str(word) for word in words])
        return capfd.readouterr()

    return run


QUICK = ["--device", "cpu", "--set", "parallel.compute_threads=1", "--size", "8", "--precision", "fp32"]


@pytest.fixture(scope="module")
def start(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of digits."""
    run = tmp_path_factory.mktemp("start") / "run"
    assert main(["train", str(digits), "--model", "digits", "--epochs", "1", "--run", str(run), *QUICK]) == 0
    return run / "model.safetensors"


@pytest.fixture
def command(steady: Steady, digits: Path, start: Path) -> list[object]:
    """Digits, fine-tuned from digits."""
    return ["finetune", digits, "--model", "digits", "--weights", start, *QUICK]


def test_the_same_command_goes_on_with_the_run_as_it_was_planned(
    steady: Steady, command: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    steady(*command, "--budget-minutes", "60", "--run", run)
    planned = Run.open(run)
    assert planned.finished() is not None
    assert planned.recipe.model.train == "probe+discriminative"
    assert (planned.recipe.optim.warmup, planned.recipe.optim.warmup_epochs) == ("power:3", 2.0)
    assert (planned.recipe.budget.epochs, planned.recipe.budget.minutes) == (8, 60)
    (words,) = (e.message for e in planned.events() if isinstance(e, events.Noticed) and "measured here" in e.message)
    assert words.startswith("60 minutes: probe+discriminative, 8 epochs of ")
    _, again = steady(*command, "--budget-minutes", "60", "--run", run)
    assert "was planned before: probe+discriminative, 8 epochs" in again
    assert Run.open(run).recipe == planned.recipe


def test_the_evidence_is_explained(steady: Steady, command: list[object]) -> None:
    printed, _ = steady(*command, "--budget-minutes", "60", "--explain", "--json")
    plan = json.loads(printed)["plan"]
    assert [option["verdict"] for option in plan["options"]] == ["fits", "chosen"]
    assert min(plan["rates"].values()) > 0 and "measured here" in plan["why"]


def test_epochs_and_a_budget_of_minutes_exclude_each_other(steady: Steady, command: list[object]) -> None:
    _, output = steady(*command, "--budget-minutes", "60", "--epochs", "3")
    assert "--budget-minutes chooses the epochs" in output
    _, output = steady("train", *command[1:], "--budget-minutes", "60")
    assert "--budget-minutes belongs to steady finetune" in output
    assert "budget.minutes" in PLANNED
