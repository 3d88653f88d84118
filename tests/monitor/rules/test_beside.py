from __future__ import annotations

import pytest
from tests.monitor.rules.made import evidence, ledger, recipe

from steadytrain.monitor.rules.beside import checkpoint, evaluation, logging


def test_evaluations_every_twentieth_of_an_epoch_are_too_frequent() -> None:
    told = evidence(ledger=ledger(evaluation=65.0), evaluations=(50, 65.0), recipe=recipe(every__evaluate_epochs=0.05))
    cause = evaluation(told)
    assert cause is not None and cause.share == pytest.approx(0.5)
    assert cause.change == "--set every.evaluate_epochs=1" and cause.saves == pytest.approx(0.5 * 0.96, abs=0.01)


def test_one_evaluation_an_epoch_may_take_a_tenth_of_the_time() -> None:
    assert evaluation(evidence(ledger=ledger(evaluation=6.0), evaluations=(3, 6.0))) is None
    cause = evaluation(evidence(ledger=ledger(evaluation=15.0), evaluations=(3, 15.0)))
    assert cause is not None and cause.change == "--set every.evaluate_epochs=5"


def test_the_one_evaluation_at_the_end_cannot_be_spared() -> None:
    cause = evaluation(evidence(ledger=ledger(evaluation=30.0), evaluations=(1, 30.0)))
    assert cause is not None and cause.change == "" and cause.saves == 0 and cause.is_usual


def test_checkpoints_by_steps_are_left_to_the_minutes() -> None:
    told = evidence(ledger=ledger(checkpoint=35.0), checkpoints=(100, 35.0), recipe=recipe(every__save_steps=10))
    cause = checkpoint(told)
    assert cause is not None and cause.change == "--set every.save_steps=none"
    assert cause.saves == pytest.approx(0.35 * 0.99) and "every 10 updates" in cause.sentence


def test_checkpoints_that_take_a_minute_each_are_written_seldom() -> None:
    held = ledger(forward=2000.0, backward=4000.0, checkpoint=600.0)
    told = evidence(ledger=held, checkpoints=(10, 600.0), recipe=recipe(every__save_minutes=10.0))
    cause = checkpoint(told)
    assert cause is not None and cause.change == "--set every.save_minutes=40"


def test_the_last_checkpoint_stays() -> None:
    cause = checkpoint(evidence(ledger=ledger(checkpoint=5.0), checkpoints=(1, 5.0)))
    assert cause is not None and cause.change == "" and cause.is_usual
    assert checkpoint(evidence(ledger=ledger(checkpoint=1.0), checkpoints=(100, 1.0))) is None


def test_lines_each_step_are_too_many() -> None:
    told = evidence(ledger=ledger(logging=35.0), recipe=recipe(every__log_steps=1))
    cause = logging(told)
    assert cause is not None and cause.change == "--set every.log_steps=64"
    assert cause.saves == pytest.approx(0.35 * 63 / 64)


def test_a_slow_folder_is_told_from_slow_lines_by_what_one_line_would_have_to_take() -> None:
    parts = {"forward": 0.02, "backward": 0.04, "optimizer": 0.005}
    cause = logging(evidence(ledger=ledger(logging=50.0), step_parts=parts))  # a line of 20 updates: a second
    assert cause is not None and "--run FOLDER" in cause.change and cause.saves == cause.share
    cause = logging(evidence(ledger=ledger(logging=4.0), step_parts=parts))  # 80 ms
    assert cause is not None and "every.log_steps" in cause.change
