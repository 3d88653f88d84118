"""A row for each epoch: log lines do not end where epochs do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.reports.runs import Clock, evaluated, finished, logged, recipe, started, step, write

from steadytrain.reports.epochs import epochs
from steadytrain.reports.history import history
from steadytrain.run import Run


def new(folder: Path) -> Run:
    return Run.create(folder / "run", recipe())


def test_epochs_share_log_lines_by_their_steps(tmp_path: Path) -> None:
    """Ten steps an epoch, a line every eight: the second line stands for two steps of one epoch and six of the next."""
    run = new(tmp_path)
    begun = replace(started(steps=16), steps_per_epoch=10.0)
    lines = [logged(8, loss=2.0, rate=128.0), logged(16, loss=1.0, rate=256.0)]
    write(run, [begun, *map(step, range(1, 17)), *lines, evaluated(10, 0.5), evaluated(16, 0.6)], Clock(), end=True)
    first, second = epochs(history(run))
    assert first.train_loss == pytest.approx((8 * 2.0 + 2 * 1.0) / 10)
    assert first.seconds == pytest.approx(8 * 1.0 + 2 * 0.5)
    assert first.images_per_second == pytest.approx(10 * 128 / 9.0)
    assert second.train_loss == pytest.approx(1.0)
    assert second.seconds == pytest.approx(3.0)
    assert (first.val_top1, second.val_top1) == (0.5, 0.6)
    assert (first.step, second.step) == (10, 16)


def test_every_evaluation_at_the_end_of_an_epoch_is_in_its_row(tmp_path: Path) -> None:
    run = finished(tmp_path, epochs=4)
    told = history(run)
    rows = epochs(told)
    assert [row.epoch for row in rows] == [1, 2, 3, 4]
    assert [row.val_top1 for row in rows] == [score.top1 for score in told.evaluated]


def test_an_epoch_that_was_only_begun_has_a_row(tmp_path: Path) -> None:
    run = new(tmp_path)
    begun = replace(started(steps=30), steps_per_epoch=10.0)
    write(run, [begun, *map(step, range(1, 14)), logged(8), evaluated(10, 0.5)], Clock())
    first, second = epochs(history(run))
    assert (first.val_top1, first.step, first.train_top1) == (0.5, 10, 0.5)
    assert (second.val_top1, second.step, second.train_top1, second.seconds) == (None, 13, None, None)


def test_epochs_of_a_fraction_of_a_step_do_not_divide_by_zero(tmp_path: Path) -> None:
    run = new(tmp_path)
    write(run, [replace(started(steps=3), steps_per_epoch=0.25), step(1), logged(1), evaluated(1)], Clock())
    assert epochs(history(run))[-1].train_loss is not None


def test_a_run_of_no_epochs_has_no_rows(tmp_path: Path) -> None:
    run = new(tmp_path)
    write(run, [started()], Clock())
    assert epochs(history(run)) == ()
