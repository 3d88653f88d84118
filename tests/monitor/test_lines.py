"""A run of any length takes little memory, and its figures and spikes are those of all its events."""

from __future__ import annotations

import math
from copy import deepcopy
from itertools import pairwise

import pytest
from msgspec.structs import replace
from tests.reports.runs import BEGAN, logged, recipe, started, step

from steadytrain.events import Accounted, Event, Logged, MachineStats
from steadytrain.monitor.history import RunHistory
from steadytrain.monitor.lines import MAX_LINES
from steadytrain.monitor.samples import MAX_KEPT
from steadytrain.monitor.series import MAX_POINTS

NUM_LINES = 24_000


def folded(events: list[Event], steps: int) -> RunHistory:
    """A history of these events, a second each."""
    history = RunHistory(recipe(epochs=max(1, steps // 50)))
    for number, event in enumerate([started(steps=steps), *events]):
        history.take(replace(event, time=BEGAN + number, attempt=1))
    return history


def line(number: int) -> Logged:
    """A log line whose loss has one spike and one gap, and whose rate has one dip."""
    loss = {7_777: 99.0, 9_000: math.nan}.get(number, 1.0 + number % 7 / 10)
    return replace(logged(number, loss=loss), images_per_second=3.0 if number == 11_111 else 1000.0 + number % 5)


@pytest.fixture(scope="module")
def long() -> RunHistory:
    return folded([line(number) for number in range(1, NUM_LINES + 1)], NUM_LINES)


def test_of_many_log_lines_the_extremes_of_each_stretch_are_kept(long: RunHistory) -> None:
    steps = [kept.step for kept in long.logged]
    assert len(steps) <= MAX_LINES and steps == sorted(steps)
    assert {1, 7_777, 9_000, 11_111} <= set(steps)
    assert steps[-1000:] == list(range(NUM_LINES - 999, NUM_LINES + 1)), "the newest are all there"
    gaps = [after - before for before, after in pairwise(steps)]
    assert max(gaps) < 128, "old and new are drawn as finely"


def test_means_and_counts_are_those_of_all_lines(long: RunHistory) -> None:
    lines = [line(number) for number in range(1, NUM_LINES + 1)]
    spans = long.lines.spans
    assert sum(span.steps for span in spans) == NUM_LINES and len(spans) <= MAX_LINES
    assert sum(span.seconds for span in spans) == pytest.approx(sum(128 / one.images_per_second for one in lines))
    assert long.lines.not_finite == 1
    of_epoch = [one.loss for one in lines if long.epoch_of(one.step) == 3]
    spans = [span for span in spans if long.epoch_of(span.step) == 3]
    mean = sum(span.loss * span.steps for span in spans) / sum(span.steps for span in spans)
    assert mean == pytest.approx(sum(of_epoch) / len(of_epoch))


def test_a_restart_takes_lines_back_that_were_thinned(long: RunHistory) -> None:
    lines, at = long.lines, 20_000
    whole = [kept.step for kept in lines.kept]
    copy = deepcopy(lines)
    copy.take_back(at)
    assert [kept.step for kept in copy.kept] == [number for number in whole if number <= at]
    assert at - 128 <= sum(span.steps for span in copy.spans) <= at
    copy.take_back(8_000)
    assert copy.not_finite == 0


def test_the_curves_of_the_page_keep_their_spikes_and_are_few(long: RunHistory) -> None:
    train = [point.row for point in long.points if point.series == "train"]
    assert len(train) <= MAX_POINTS and 99.0 in [row[3] for row in train]
    assert long.redrawn > 0


def test_accounts_and_samples_are_bounded_and_their_sums_are_whole() -> None:
    events: list[Event] = []
    for number in range(1, 10_001):
        seconds = {"update": 1.0 * number}
        events.append(step(number))
        events.append(Accounted(step=number, images=128 * number, wall_seconds=1.0 * number, seconds=seconds))
        events.append(MachineStats(seconds=1.0, cores=2, machine_cores=2, cpu=number % 2))
    history = folded(events, 10_000)
    [attempt] = history.attempts
    assert len(attempt.marks) <= MAX_KEPT + 1
    assert history.ledger().seconds["update"] == pytest.approx(10_000)
    assert attempt.at_images(128 * 5_000).wall == pytest.approx(5_000, abs=8)
    assert sum(piece.seconds["update"] for piece in history.timeline(240)) == pytest.approx(10_000)
