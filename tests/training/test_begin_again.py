"""Updates that undo their probe begin again from it at a lower rate, in the same run, whatever ends it in between."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from steadytrain import SetRate, events
from steadytrain.config import Recipe
from steadytrain.reports import summarise
from steadytrain.run import Run
from steadytrain.training import evaluate, steps, train

Weights = Callable[[Path], bytes]


@pytest.fixture(scope="module")
def undone(recipe: Recipe, trained_weights: Path) -> Recipe:
    """Fine-tuning at a rate that undoes the probe, from weights of digits."""
    changes = {"model.weights": str(trained_weights), "model.train": "probe+full"}
    return recipe.with_({**changes, "budget.epochs": 4, "optim.lr": 0.03, "seed": 1})


def evaluations(run: Run) -> list[events.Evaluated]:
    return [event for event in run.events() if isinstance(event, events.Evaluated)]


def train_for(run: Run, updates: int) -> None:
    """Train, and stop after so many updates as Ctrl-C does."""
    made = 0

    def stop() -> str | None:
        return "SIGINT" if made >= updates else None

    for event in steps(run, stop=stop):
        made += isinstance(event, events.Step)


def test_updates_that_undo_the_probe_begin_again_from_it_at_a_lower_rate(undone: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", undone)
    seen = list(steps(run))
    updates = [event for event in seen if isinstance(event, events.Step)]
    planned = next(event.steps for event in seen if isinstance(event, events.Started))
    assert [event.step for event in updates] == list(range(1, planned + 1))  # as many as were asked for
    (first,) = (event for event in seen if isinstance(event, events.Tried))
    assert (first.verdict, first.lr, first.what) == ("undid the probe", 0.03, "updates")
    ((begin, lr),) = run.as_decided().recipe.every.tries
    assert begin == first.step and lr == pytest.approx(0.009)
    assert max(event.lr for event in updates if event.step > begin) <= lr
    probe, *others = evaluations(run)
    assert max(event.top1 for event in others) >= probe.top1 > others[0].top1
    assert evaluate(run).top1 == max(event.top1 for event in (probe, *others))
    told = [event.message for event in seen if isinstance(event, events.Noticed)]
    assert any("updates at 0.03 undid the probe" in message and "learning rate of 0.009" in message for message in told)
    assert not run.probe_weights.exists() and run.finished() is not None


@pytest.mark.parametrize("updates", [7, 13, 25])
def test_a_run_that_began_again_resumes_to_the_same_bits(
    undone: Recipe, tmp_path: Path, weights: Weights, updates: int
) -> None:
    whole, parts = Run.create(tmp_path / "whole", undone), Run.create(tmp_path / "parts", undone)
    train(whole)
    train_for(parts, updates)
    assert parts.finished() is None
    train(Run.create(tmp_path / "parts", undone))  # as the same command does
    assert weights(whole.directory) == weights(parts.directory)
    assert (
        load_file(whole.directory / "best.safetensors").keys() == load_file(parts.directory / "best.safetensors").keys()
    )
    assert [e.top1 for e in evaluations(whole)] == [e.top1 for e in evaluations(parts)]


def test_a_kill_between_the_decision_and_its_first_update_loses_nothing(
    undone: Recipe, tmp_path: Path, weights: Weights
) -> None:
    whole, killed = Run.create(tmp_path / "whole", undone), Run.create(tmp_path / "killed", undone)
    train(whole)
    going = steps(killed)
    for event in going:
        if isinstance(event, events.Ended):  # of the attempt before the lower rate
            break
    going.close()  # type: ignore[attr-defined]
    assert killed.as_decided().recipe.every.tries and killed.finished() is None
    train(killed)
    assert weights(whole.directory) == weights(killed.directory)


def test_a_run_whose_probe_is_not_undone_is_as_it_was(undone: Recipe, tmp_path: Path, weights: Weights) -> None:
    gentle = undone.with_({"optim.lr": 0.001})
    for name in ("restart", "continue"):
        train(Run.create(tmp_path / name, gentle.with_({"every.undone": name})))
    assert weights(tmp_path / "restart") == weights(tmp_path / "continue")
    assert not any(isinstance(event, events.Tried) for event in Run.open(tmp_path / "restart").events())


def test_the_rates_that_a_program_set_hold_where_updates_begin_again(undone: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", undone.with_({"every.rates": ((1, 0.99),)}))
    train(run, on_event=lambda event: SetRate(0.98) if isinstance(event, events.Step) and event.step == 3 else None)
    every = Run.open(run.directory).recipe.every
    assert every.tries and every.rates == ((1, 0.99), (4, 0.98))


def test_it_may_be_left_as_it_is(undone: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", undone.with_({"every.undone": "continue"}))
    train(run)
    assert not run.recipe.every.tries and not any(isinstance(event, events.Tried) for event in run.events())


@pytest.fixture(scope="module")
def filling(undone: Recipe) -> Recipe:
    """Updates that help for a while, within more minutes than they need."""
    changes = {"optim.lr": 0.003, "budget.epochs": 2, "budget.minutes": 60.0, "budget.fill": True}
    return undone.with_(changes)


def test_minutes_are_filled_until_two_tries_bring_nothing(filling: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", filling)
    seen = list(steps(run))
    tries = [event for event in seen if isinstance(event, events.Tried)]
    assert len(tries) >= 2 and run.finished() is not None
    assert [step for step, _ in run.as_decided().recipe.every.tries] == [event.step for event in tries[:-1]]
    told = [event.message for event in seen if isinstance(event, events.Noticed)]
    assert any("two tries in a row" in message and "of 60 minutes are left" in message for message in told)
    best = max(event.top1 for event in evaluations(run))
    assert evaluate(run).top1 == best == run.progress().best.top1  # type: ignore[union-attr]
    probe, updates = run.progress().probe, [event for event in seen if isinstance(event, events.Step)]
    assert probe is not None and probe.step == 0
    assert [event.step for event in updates] == list(range(1, updates[-1].step + 1))


def test_minutes_that_are_over_allow_one_evaluation_and_no_other_try(filling: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", filling.with_({"budget.minutes": 1e-6}))
    seen = list(steps(run))
    assert [event.step for event in seen if isinstance(event, events.Evaluated)] == [0, 1]
    assert run.finished() is not None and not run.as_decided().recipe.every.tries
    assert evaluate(run).n == 80


def test_a_run_that_fills_its_minutes_goes_on_after_a_kill_with_the_same_updates(
    filling: Recipe, tmp_path: Path, weights: Weights
) -> None:
    whole, killed = Run.create(tmp_path / "whole", filling), Run.create(tmp_path / "killed", filling)
    train(whole)
    going = steps(killed)
    for event in going:  # between the end of the first try and what is decided on it
        if isinstance(event, events.Tried):
            break
    going.close()  # type: ignore[attr-defined]
    assert not killed.as_decided().recipe.every.tries
    train(Run.create(tmp_path / "killed", filling))
    decided = [run.as_decided().recipe.every.tries for run in (whole, killed)]
    assert decided[0] == decided[1]
    assert weights(whole.directory) == weights(killed.directory)


def test_another_try_is_no_interruption(undone: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", undone)
    train_for(run, 15)
    train(run)
    summary = summarise(run)
    assert summary.course.restarts == 1 and len(summary.course.interruptions) == 1  # Ctrl-C, and not the lower rate
    assert [event.verdict for event in summary.tried] == ["undid the probe"]
    assert summary.quality.best is not None and summary.quality.best.top1 == max(e.top1 for e in evaluations(run))
