"""The figures of a run, against sums done by hand."""

from __future__ import annotations

import math
import os
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.reports.runs import BATCH, BEGAN, Clock, evaluated, finished, logged, recipe, restarted, started, step, write

from steadytrain.cli.render import describe_event, event_line
from steadytrain.events import Ended, EpochTrained, Failed
from steadytrain.intervals import spread, wilson
from steadytrain.monitor import read_history
from steadytrain.reports.summary import epochs, find_repeats, summarise
from steadytrain.run import Run


def new(folder: Path) -> Run:
    return Run.create(folder / "run", recipe())


def test_wilson_agrees_with_published_values() -> None:
    # R. G. Newcombe, Statistics in Medicine 17 (1998) 857-872, table I, method 3.
    for k, n, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        interval = wilson(k / n, n)
        assert (round(interval.low, 4), round(interval.high, 4)) == (low, high)


@given(st.integers(1, 10**7).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_share_and_stays_within_zero_and_one(counts: tuple[int, int]) -> None:
    right, n = counts
    interval = wilson(right / n, n)
    assert 0 <= interval.low <= right / n + 1e-12
    assert right / n - 1e-12 <= interval.high <= 1


@pytest.mark.parametrize(("fraction", "n"), [(0.5, 0), (math.nan, 100)])
def test_without_knowledge_the_interval_is_everything(fraction: float, n: int) -> None:
    assert (wilson(fraction, n).low, wilson(fraction, n).high) == (0.0, 1.0)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 11, 30, 101, 1000])
def test_the_spread_of_repeats_is_students_interval(n: int) -> None:
    from scipy import stats

    values = [0.9 + 0.01 * math.sin(i) for i in range(n)]
    statistics = spread(values)
    assert statistics is not None
    deviation = stats.tstd(values)
    low, high = stats.t.interval(0.95, n - 1, loc=stats.tmean(values), scale=deviation / math.sqrt(n))
    figures = [statistics.mean, statistics.std, statistics.mean_95.low, statistics.mean_95.high]
    assert figures == pytest.approx([stats.tmean(values), deviation, low, high], abs=1e-12)


def test_single_or_infinite_values_have_no_spread() -> None:
    assert spread([]) is None and spread([0.9]) is None and spread([0.9, math.nan]) is None


def test_runs_are_repeats_if_they_differ_in_the_seed_alone(tmp_path: Path) -> None:
    ends = []
    for name, value in {
        "a/seed-0": recipe(seed=0),
        "a/seed-1": recipe(seed=1),
        "a/seed-2": recipe(seed=2),
        "hotter": recipe(lr=0.2, seed=3),
    }.items():
        run = Run.create(tmp_path / name, value)
        best = 0.8 + 0.01 * value.seed
        ends.append(run)
        write(run, [started(), *map(step, range(1, 1056)), evaluated(1055, best)], Clock(), end=value.seed != 2)
    (group,) = find_repeats([summarise(run) for run in ends])
    assert (group.name, group.seeds, group.finished) == ("a", (0, 1, 2), 2)
    assert group.last_top1 == spread([0.8, 0.81]), "what was not finished does not count"
    assert group.title == "a: 2 of 3 seeds"


def test_a_seed_that_ran_twice_counts_once(tmp_path: Path) -> None:
    ends = []
    for name, seed, ended in (("a/seed-0", 0, True), ("a/seed-1", 1, False), ("b/seed-0", 0, True), ("c", 1, True)):
        ends.append(run := Run.create(tmp_path / name, recipe(seed=seed)))
        write(run, [started(), *map(step, range(1, 1056)), evaluated(1055, 0.8 + 0.01 * seed)], Clock(), end=ended)
    (group,) = find_repeats([summarise(run) for run in ends])
    assert (group.seeds, group.finished, group.last_top1) == ((0, 1), 2, spread([0.8, 0.81]))
    assert group.runs == ("seed-0", "c"), "of two runs of a seed, the one that finished"


def test_best_is_the_highest_top1_and_last_the_newest(tmp_path: Path) -> None:
    run = new(tmp_path)
    scores = [evaluated(10, 0.5), evaluated(20, math.nan), evaluated(30, 0.8), evaluated(40, 0.8), evaluated(50, 0.7)]
    write(run, [started(), *map(step, range(1, 51)), *scores], Clock())
    summary = summarise(run)
    assert summary.quality.best is not None
    assert summary.quality.last is not None
    assert (summary.quality.best.step, summary.quality.best.top1, summary.quality.best.n) == (30, 0.8, 5000)
    assert summary.quality.best.top1_95 == wilson(0.8, 5000)
    assert summary.quality.last.step == 50


def test_steady_rate_is_that_of_the_ledger_and_overall_rate_counts_everything(tmp_path: Path) -> None:
    run = new(tmp_path)
    lines = [replace(logged(10 * i), images_per_second=rate) for i, rate in enumerate((100.0, 500.0, 510.0), 1)]
    write(run, [started(), *(step(i, seconds=0.5) for i in range(1, 31)), *lines, evaluated(30)], Clock(), end=True)
    summary = summarise(run)
    assert (
        summary.speed.images_per_second
        == pytest.approx(BATCH / 0.5)
        == read_history(run).ledger().steady_images_per_second
    )
    assert summary.speed.seconds == pytest.approx(30 * 0.5 + 2.0)
    assert summary.speed.images_per_second_overall == pytest.approx(30 * BATCH / 17.0)


def test_wait_share_is_weighted_by_time(tmp_path: Path) -> None:
    run = new(tmp_path)
    lines = [
        replace(logged(10, rate=128.0), wait_share=0.4),
        replace(logged(20, rate=1280.0), wait_share=0.0),
    ]
    write(run, [started(), *map(step, range(1, 21)), *lines], Clock())
    assert summarise(run).speed.wait_share == pytest.approx(0.4 * 10 / 11)


def test_a_run_without_validation_has_no_score(tmp_path: Path) -> None:
    run = new(tmp_path)
    write(run, [started(num_val=0), *map(step, range(1, 21)), logged(20)], Clock(), end=True)
    summary = summarise(run)
    assert (summary.quality.best, summary.quality.last, summary.setup.num_val) == (None, None, 0)
    assert summary.quality.train_top1 == 0.5


def test_losses_that_are_no_numbers_are_counted(tmp_path: Path) -> None:
    run = new(tmp_path)
    lines = [logged(20), logged(40, loss=math.nan), logged(60, loss=math.inf)]
    write(run, [started(), *map(step, range(1, 61)), *lines], Clock())
    assert summarise(run).quality.not_finite == 2


def test_restarts_and_repeated_steps_are_counted(tmp_path: Path) -> None:
    summary = summarise(restarted(tmp_path))
    course = summary.course
    assert (course.status, course.attempts, course.restarts, course.repeated_steps) == ("finished", 2, 1, 96)
    assert summary.course.notices == ("checkpoint step-00000800 is corrupt: passed over",)
    assert summary.course.began == BEGAN


def test_a_failed_run_says_why_and_at_which_step(tmp_path: Path) -> None:
    run = new(tmp_path)
    write(run, [started(), *map(step, range(1, 8)), Failed(error="StorageError", message="the disk is full")], Clock())
    summary = summarise(run)
    assert (summary.course.status, summary.course.why) == ("failed", "StorageError at step 7: the disk is full")


def test_a_run_that_a_signal_or_until_stopped_is_not_called_preempted(tmp_path: Path) -> None:
    ended = Ended(status="preempted", step=7, seconds=3, images=128, time=0, attempt=1)
    shown = [*describe_event(ended), str(event_line(ended))]
    assert shown[0].startswith("saved and stopped at step 7") and shown[-1].startswith("stopped step=7")
    assert "preempted" not in " ".join(shown)


def test_a_stopped_run_says_how(tmp_path: Path) -> None:
    run = new(tmp_path)
    write(run, [started(), step(1), Ended(status="preempted", step=1, seconds=1, images=128)], Clock())
    assert (summarise(run).course.status, summarise(run).course.why) == (
        "interrupted",
        "stopped by a signal or --until, saved at step 1: the same command resumes it",
    )


def test_a_run_that_finished_after_failing_is_finished(tmp_path: Path) -> None:
    run, clock = new(tmp_path), Clock()
    write(run, [started(), step(1), Failed(error="StorageError", message="full")], clock)
    write(run, [started(0), step(1)], clock, end=True)
    assert (summarise(run).course.status, summarise(run).course.why) == ("finished", "")


def here(run: Run, pid: int) -> None:
    """The run is going on, or was, on this machine, in that process."""
    begun = replace(started(), machine={"host": platform.node()})
    write(run, [begun, step(1)], Clock(time.time()))
    (run.directory / "lock").write_text(str(pid))


def test_a_run_whose_process_lives_is_running(tmp_path: Path) -> None:
    run = new(tmp_path)
    here(run, os.getpid())
    assert summarise(run).course.status == "running"


def test_a_run_whose_process_is_gone_was_killed(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    run = new(tmp_path)
    here(run, gone.pid)
    summary = summarise(run)
    assert summary.course.status == "interrupted"
    assert summary.course.why.startswith("killed (last event: step 1)")


def test_a_killed_process_that_its_parent_has_not_waited_for_is_not_running(tmp_path: Path) -> None:
    run = new(tmp_path)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        here(run, process.pid)
        assert summarise(run).course.status == "running"
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert summarise(run).course.status == "interrupted"


def test_a_process_that_was_given_the_same_number_later_is_not_the_run(tmp_path: Path) -> None:
    run = new(tmp_path)
    write(run, [replace(started(), machine={"host": platform.node()}), step(1)], Clock(BEGAN - 10**8))
    (run.directory / "lock").write_text(str(os.getpid()))
    assert summarise(run).course.status == "interrupted"


def test_a_run_on_another_machine_counts_as_running_while_it_is_heard_of(tmp_path: Path) -> None:
    run = new(tmp_path)
    write(run, [started(), step(1)], Clock(time.time() - 10))
    assert summarise(run).course.status == "running"


def test_epochs_share_log_lines_by_their_steps(tmp_path: Path) -> None:
    """Ten steps an epoch, a line every eight: the second line stands for two steps of one epoch and six of the next."""
    run = new(tmp_path)
    begun = replace(started(steps=16), steps_per_epoch=10.0)
    lines = [logged(8, loss=2.0, rate=128.0), logged(16, loss=1.0, rate=256.0)]
    write(run, [begun, *map(step, range(1, 17)), *lines, evaluated(10, 0.5), evaluated(16, 0.6)], Clock(), end=True)
    first, second = epochs(read_history(run))
    assert first.train_loss == pytest.approx((8 * 2.0 + 2 * 1.0) / 10)
    assert first.seconds == pytest.approx(8 * 1.0 + 2 * 0.5)
    assert first.images_per_second == pytest.approx(10 * 128 / 9.0)
    assert second.train_loss == pytest.approx(1.0)
    assert second.seconds == pytest.approx(3.0)
    assert (first.val_top1, second.val_top1) == (0.5, 0.6)
    assert (first.step, second.step) == (10, 16)


def test_epoch_has_its_own_training_figures_not_those_of_a_later_log_line(tmp_path: Path) -> None:
    """Ten steps an epoch and a log line after 25: the epoch at hand has none yet, and is known after the stop."""
    run, clock = new(tmp_path), Clock()
    begun = replace(started(steps=40), steps_per_epoch=10.0)
    means = [
        EpochTrained(step=10 * k, epoch=k, n=1280, loss=3.0 - k, top1=k / 10, images_per_second=128.0 * k)
        for k in (1, 2)
    ]
    write(run, [begun, *map(step, range(1, 26)), *means, logged(25, loss=9.0), evaluated(20, 0.5)], clock)
    rows = [(row.train_loss, row.train_top1, row.seconds, row.val_top1) for row in epochs(read_history(run))]
    assert rows == [(2.0, 0.1, 10.0, None), (1.0, 0.2, 5.0, 0.5), (None, None, None, None)]
    part = EpochTrained(step=25, epoch=3, n=640, loss=0.5, top1=0.3, images_per_second=640.0)
    write(run, [replace(begun, step=20), *map(step, range(21, 26)), part], clock)
    assert [row.train_loss for row in epochs(read_history(run))] == [2.0, 1.0, 0.5]
    quality = summarise(run).quality  # as in its row, not of a log line
    assert (quality.train_loss, quality.train_top1) == (0.5, 0.3)
    write(run, [replace(begun, step=19), *map(step, range(20, 22))], clock)
    assert [row.train_loss for row in epochs(read_history(run))] == [2.0, None]


def test_every_evaluation_at_the_end_of_an_epoch_is_in_its_row(tmp_path: Path) -> None:
    run = finished(tmp_path, epochs=4)
    history = read_history(run)
    rows = epochs(history)
    assert [row.epoch for row in rows] == [1, 2, 3, 4]
    assert [row.val_top1 for row in rows] == [score.top1 for score in history.evaluated]


def test_an_epoch_that_was_only_begun_has_a_row(tmp_path: Path) -> None:
    run = new(tmp_path)
    begun = replace(started(steps=30), steps_per_epoch=10.0)
    write(run, [begun, *map(step, range(1, 14)), logged(8), evaluated(10, 0.5)], Clock())
    first, second = epochs(read_history(run))
    assert (first.val_top1, first.step, first.train_top1) == (0.5, 10, 0.5)
    assert (second.val_top1, second.step, second.train_top1, second.seconds) == (None, 13, None, None)


def test_epochs_of_a_fraction_of_a_step_do_not_divide_by_zero(tmp_path: Path) -> None:
    run = new(tmp_path)
    write(run, [replace(started(steps=3), steps_per_epoch=0.25), step(1), logged(1), evaluated(1)], Clock())
    assert epochs(read_history(run))[-1].train_loss is not None


def test_a_run_of_no_epochs_has_no_rows(tmp_path: Path) -> None:
    run = new(tmp_path)
    write(run, [started()], Clock())
    assert epochs(read_history(run)) == ()
