"""What is drawn is what was logged, and no spike is lost where there is too much of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.reports.runs import Clock, evaluated, finished, logged, recipe, restarted, started, step, write

from steadytrain.reports.curves import COLOURS, MAX_POINTS, charts, style, thin
from steadytrain.reports.figures import wilson
from steadytrain.reports.history import history
from steadytrain.run import Run

values = st.lists(st.none() | st.floats(-1e6, 1e6), max_size=300)


@given(values, st.integers(4, 60))
def test_thinning_keeps_order_ends_and_extremes(told: list[float | None], limit: int) -> None:
    kept = thin(told, limit)
    assert kept == sorted(set(kept))
    assert len(kept) <= limit
    known = [value for value in told if value is not None]
    if known:
        drawn = [told[i] for i in kept if told[i] is not None]
        assert max(known) in drawn
        assert min(known) in drawn
    if told:
        assert (kept[0], kept[-1]) == (0, len(told) - 1)


def test_ten_thousand_log_lines_are_thinned_and_their_spike_is_drawn(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe(epochs=30))
    lines = [logged(i, loss=99.0 if i == 7777 else 1.0 + i % 7 / 10) for i in range(1, 10_001)]
    write(run, [started(steps=10_547), *lines], Clock())
    (train, _) = next(f for f in charts([history(run)]) if f["id"] == "loss")["traces"]
    assert MAX_POINTS * 0.9 < len(train["y"]) <= MAX_POINTS
    assert train["y"][train["step"].index(7777)] == 99.0


def test_the_curve_of_the_newest_attempt_is_drawn_over_its_own_time(tmp_path: Path) -> None:
    told = history(restarted(tmp_path))
    for figure in charts([told]):
        for trace in figure["traces"]:
            assert trace["step"] == sorted(trace["step"])
            assert trace["seconds"] == sorted(trace["seconds"])
            assert trace["epoch"] == sorted(trace["epoch"])
    assert max(charts([told])[0]["traces"][0]["seconds"]) < 400, "the hour's pause is left out"


def test_what_is_not_a_number_is_a_gap(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    write(run, [started(), logged(20), logged(40, loss=math.nan), logged(60, loss=math.inf), logged(80)], Clock())
    told = charts([history(run)])
    (train, _) = next(f for f in told if f["id"] == "loss")["traces"]
    assert train["y"] == [1.5, None, None, 1.5]
    json.dumps(told, allow_nan=False)


def test_an_evaluation_carries_its_interval(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    write(run, [started(), evaluated(352, 0.9)], Clock())
    (_, scores) = charts([history(run)])[0]["traces"]
    assert math.isclose(scores["low"][0], wilson(0.9, 5000).low, rel_tol=1e-5)


def test_figures_for_which_nothing_was_logged_are_left_out(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    write(run, [started(), step(1)], Clock())
    assert charts([history(run)]) == []


def test_runs_keep_their_place_in_every_figure(tmp_path: Path) -> None:
    told = [history(finished(tmp_path, "a")), history(finished(tmp_path, "b", lr=0.2))]
    assert [{trace["run"] for trace in figure["traces"]} for figure in charts(told)] == [{0, 1}] * 5


def test_many_runs_are_told_apart_by_colour_and_dash() -> None:
    styles = [tuple(style(i).values()) for i in range(4 * len(COLOURS))]
    assert len(set(styles)) == len(styles)
