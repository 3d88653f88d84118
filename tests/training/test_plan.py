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
from steadytrain.cli.options import TrainingOptions
from steadytrain.cli.train import _train_as_rank
from steadytrain.distributed.world import World
from steadytrain.errors import InputError, RecipeError
from steadytrain.run import Run
from steadytrain.training.finetuning.compare import RESERVE, Rates
from steadytrain.training.finetuning.plan import PLANNED, choose
from steadytrain.training.finetuning.tries import UNDONE, next_try

Steady = Callable[..., tuple[str, str]]
RATES = Rates(features=200, full=25, startup=4)
DATA: dict[str, Any] = {"spent": 20, "num_train": 640, "num_val": 250}


@pytest.mark.parametrize(
    ("minutes", "train", "epochs"),
    [
        (0.7, "probe", 0),
        (2, "probe+discriminative", 2),
        (3, "probe+discriminative", 4),
        (60, "probe+discriminative", 119),
    ],
)
def test_as_many_epochs_as_fit_and_else_the_probe(minutes: float, train: str, epochs: int) -> None:
    options = choose(RATES, minutes=minutes, **DATA)
    (chosen,) = (option for option in options if option.verdict == "chosen")
    assert (chosen.train, chosen.epochs) == (train, epochs)
    taken = DATA["spent"] + RATES.startup + chosen.pass_seconds + chosen.epochs * chosen.epoch_seconds
    assert taken <= 60 * minutes * (1 - RESERVE)
    assert options[0].train == "probe"


def test_a_slower_machine_gets_fewer_epochs() -> None:
    fitting = [choose(replace(RATES, full=full), minutes=4, **DATA)[-1].epochs for full in (100, 25, 12, 3)]
    assert fitting == sorted(fitting, reverse=True) and fitting[-1] == 0


def test_a_method_of_the_users_keeps_its_word() -> None:
    (option,) = choose(RATES, minutes=3, train="gradual", **DATA)
    assert (option.train, option.epochs, option.pass_seconds) == ("gradual", 5, 0.0)


@pytest.mark.parametrize(("minutes", "train"), [(0.1, None), (0.6, "full")])
def test_too_few_minutes_are_refused_with_how_many_it_takes(minutes: float, train: str | None) -> None:
    with pytest.raises(RecipeError, match=r"is too short: .* give at least (\d+\.\d)") as refused:
        choose(RATES, minutes=minutes, train=train, **DATA)
    enough = float(str(refused.value).partition("at least ")[2].partition(",")[0]) + 0.05
    assert any(o.verdict == "chosen" for o in choose(RATES, minutes=enough, train=train, **DATA))


def test_minutes_that_a_comparison_has_used_up_still_train_a_probe() -> None:
    options = choose(RATES, minutes=0.1, refuses=False, **DATA)
    assert (options[0].train, options[0].verdict) == ("probe", "chosen")


def test_several_ranks_are_refused_with_the_flags_that_end_them_by_the_clock(steady: Steady) -> None:
    with pytest.raises(InputError, match=r"--epochs N --set budget\.minutes=5"):
        _train_as_rank(World(size=2), "photos", TrainingOptions(budget_minutes=5), finetune=True, until=None)
    assert "give --budget-minutes N with it" in steady("finetune", "photos", "--fetch-models")[1]


PROBE = events.Evaluated(step=0, epoch=0, n=100, loss=0.5, loss_error=0.05, top1=0.8, top5=1.0, seconds=1)


def tried(lr: float, epochs: float, loss: float, verdict: str = "best so far") -> events.Tried:
    """Updates that came to a loss, of a standard error of 0.05."""
    return events.Tried(
        step=9,
        what="updates",
        model="a",
        size=96,
        loss=loss,
        loss_error=0.05,
        top1=0.8,
        seconds=9,
        verdict=verdict,
        lr=lr,
        epochs=epochs,
    )


def test_the_best_updates_are_made_longer_and_others_at_a_lower_rate() -> None:
    helped, barely, not_helped = tried(1e-3, 8, 0.4), tried(1e-3, 8, 0.48), tried(1e-3, 8, 0.51)
    assert next_try([helped], PROBE, 100, fills=True)[:2] == (1e-3, 16)
    assert next_try([helped], PROBE, 30, fills=True)[:2] == (1e-3, 30)  # what were left would not do for longer ones
    assert next_try([barely], PROBE, 100, fills=True)[:2] == (1e-3, 16)  # longer ones often help where these did not
    assert next_try([not_helped], PROBE, 100, fills=True)[:2] == pytest.approx((3e-4, 8))
    assert next_try([helped], PROBE, 9, fills=True)[:2] == pytest.approx((3e-4, 9))


def test_it_ends_where_two_tries_brought_less_than_their_error_or_no_time_is_left() -> None:
    _, epochs, why = next_try([tried(1e-3, 8, 0.4), tried(1e-3, 16, 0.38), tried(3e-4, 8, 0.41)], PROBE, 99, fills=True)
    assert not epochs and "two tries in a row" in why
    assert next_try([tried(1e-3, 8, 0.4), tried(1e-3, 16, 0.42)], PROBE, 99, fills=True)[1] == 8
    _, epochs, why = next_try([tried(1e-3, 8, 0.4)], PROBE, 3.9, fills=True)
    assert not epochs and "too short" in why


def test_updates_that_undid_the_probe_begin_again_slower_for_what_is_left() -> None:
    undone = tried(1e-3, 1, 2.0, UNDONE)
    assert next_try([undone], PROBE, 100, fills=True)[:2] == pytest.approx((3e-4, 8))
    assert next_try([undone], PROBE, 6.5, fills=False)[:2] == pytest.approx((3e-4, 6.5))  # what is left of the run
    assert next_try([undone], PROBE, 0.5, fills=True)[1] == 0
    assert next_try([undone, tried(3e-4, 8, 0.48)], PROBE, 100, fills=True)[:2] == (3e-4, 16)


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


def test_the_minutes_are_used_by_updates_from_the_probe_and_a_table_says_for_what(
    steady: Steady, command: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    printed, _ = steady(*command, "--budget-minutes", "0.4", "--run", run, "--json")
    finished = Run.open(run)
    ended = finished.progress()
    assert ended.finished is not None and finished.recipe.budget.fill
    assert [event.what for event in ended.tried] == ["updates"] * len(ended.tried) and ended.tried
    (summary,) = json.loads(printed)["runs"]
    assert [row["lr"] for row in summary["tried"]] == [event.lr for event in ended.tried]
    told = [e.message for e in finished.events() if isinstance(e, events.Noticed)]
    assert any("of 0.4 minutes are left" in message for message in told)
    began = [0, *(step for step, _ in finished.recipe.every.tries)]
    assert began == [0, *(event.step for event in ended.tried[:-1])]


def test_the_same_command_goes_on_with_the_run_as_it_was_planned(
    steady: Steady, command: list[object], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    steady(*command, "--budget-minutes", "60", "--run", run, "--until", "1")
    planned = Run.open(run)
    assert planned.recipe.model.train == "probe+discriminative"
    assert (planned.recipe.optim.warmup, planned.recipe.optim.warmup_epochs) == ("power:3", 2.0)
    assert (planned.recipe.budget.epochs, planned.recipe.budget.minutes) == (8, 60)
    (words,) = (e.message for e in planned.events() if isinstance(e, events.Noticed) and "measured here" in e.message)
    assert words.startswith("60 minutes: probe+discriminative, 8 epochs of ")
    _, again = steady(*command, "--budget-minutes", "60", "--run", run, "--until", "1")
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
