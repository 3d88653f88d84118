"""What is drawn is what was logged, and no spike is lost where there is too much of it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.reports.runs import Clock, evaluated, finished, logged, recipe, restarted, started, step, write

from steadytrain.events import DeviceStats, EpochTrained, Event, FeedStats, MachineStats
from steadytrain.intervals import wilson
from steadytrain.monitor import Slice, read_history
from steadytrain.monitor.series import COLUMNS, MAX_POINTS, points_of, thin
from steadytrain.reports.charts import COLOURS, LIVE_CHARTS, TEMPLATES, charts, style
from steadytrain.reports.summary import Account
from steadytrain.reports.time_spent import stacked
from steadytrain.run import Run

values = st.lists(st.none() | st.floats(-1e6, 1e6), max_size=300)


@given(values, st.integers(4, 60))
def test_thinning_keeps_order_ends_and_extremes(numbers: list[float | None], limit: int) -> None:
    kept = thin(numbers, limit)
    assert kept == sorted(set(kept))
    assert len(kept) <= limit
    known = [value for value in numbers if value is not None]
    if known:
        drawn = [numbers[i] for i in kept if numbers[i] is not None]
        assert max(known) in drawn
        assert min(known) in drawn
    if numbers:
        assert (kept[0], kept[-1]) == (0, len(numbers) - 1)


def test_ten_thousand_log_lines_are_thinned_and_their_spike_is_drawn(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe(epochs=30))
    lines = [logged(i, loss=99.0 if i == 7777 else 1.0 + i % 7 / 10) for i in range(1, 10_001)]
    write(run, [started(steps=10_547), *lines], Clock())
    (train, _) = next(f for f in charts([read_history(run)]) if f["id"] == "loss")["traces"]
    assert MAX_POINTS * 0.9 < len(train["y"]) <= MAX_POINTS
    assert train["y"][train["step"].index(7777)] == 99.0


def test_the_curve_of_the_newest_attempt_is_drawn_over_its_own_time(tmp_path: Path) -> None:
    history = read_history(restarted(tmp_path))
    for figure in charts([history]):
        for trace in figure["traces"]:
            assert trace["step"] == sorted(trace["step"])
            assert trace["seconds"] == sorted(trace["seconds"])
            assert trace["epoch"] == sorted(trace["epoch"])
    assert max(charts([history])[0]["traces"][0]["seconds"]) < 400, "the hour's pause is left out"


def test_the_learning_rate_is_that_of_every_step_and_short_runs_have_a_training_point_an_epoch(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    rates = [0.01 * k for k in range(1, 11)] + [0.1] * 10
    means = [EpochTrained(step=10 * k, epoch=k, n=1280, loss=k, top1=0.5, images_per_second=1.0) for k in (1, 2)]
    write(run, [started(), *(step(k, lr=lr) for k, lr in enumerate(rates, 1)), *means, logged(20)], Clock())
    traces = {figure["id"]: figure["traces"] for figure in charts([Account.of(run).history])}
    assert [round(rate, 6) for rate in traces["lr"][0]["y"]] == [round(rate, 6) for rate in rates]
    assert traces["lr"][0]["step"] == list(range(1, 21))
    assert (traces["loss"][0]["step"], traces["loss"][0]["y"]) == ([10, 20], [1, 2])


def test_nan_is_a_gap_in_the_curve(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    write(run, [started(), logged(20), logged(40, loss=math.nan), logged(60, loss=math.inf), logged(80)], Clock())
    figure = charts([read_history(run)])
    (train, _) = next(f for f in figure if f["id"] == "loss")["traces"]
    assert train["y"] == [1.5, None, None, 1.5]
    json.dumps(figure, allow_nan=False)


def test_an_evaluation_carries_its_interval(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    write(run, [started(), evaluated(352, 0.9)], Clock())
    (_, scores) = charts([read_history(run)])[0]["traces"]
    assert math.isclose(scores["low"][0], wilson(0.9, 5000).low, rel_tol=1e-5)


def test_figures_for_which_nothing_was_logged_are_left_out(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe())
    write(run, [started()], Clock())
    assert charts([read_history(run)]) == []
    write(run, [started(), step(1)], Clock())
    assert [figure["id"] for figure in charts([read_history(run)])] == ["lr"]


def test_runs_keep_their_place_in_every_figure(tmp_path: Path) -> None:
    histories = [read_history(finished(tmp_path, "a")), read_history(finished(tmp_path, "b", lr=0.2))]
    assert [{trace["run"] for trace in figure["traces"]} for figure in charts(histories)] == [{0, 1}] * 5


def test_many_runs_differ_in_colour_and_dash() -> None:
    styles = [tuple(style(i).values()) for i in range(4 * len(COLOURS))]
    assert len(set(styles)) == len(styles)


def feed(asked: int, starved: int, ready: float, attempt: int = 1) -> FeedStats:
    busy = {"read_seconds": 0.0, "decode_seconds": 0.0, "batch_seconds": 0.0, "blocked_seconds": 0.0}
    sizes = {"step": asked, "images": asked, "bytes": 0, "threads": 2, "depth": 4, "attempt": attempt}
    return FeedStats(**sizes, **busy, asked=asked, starved=starved, ready=ready)  # type: ignore[arg-type]


def rows_of(event: Event, before: FeedStats | None = None) -> list[dict[str, float | None]]:
    """The rows that an event adds, a second after its run began, by their columns."""
    rows = points_of(event, 1.0, images=0, is_multi_label=False, feed_before=before)
    return [dict(zip(COLUMNS[point.series.partition("-")[0]], point.row, strict=True)) for point in rows]


def test_feed_points_lie_between_two_feed_events() -> None:
    first, second = feed(100, 10, 3.0), feed(200, 60, 2.0)
    assert rows_of(second, first) == [{"seconds": 1.0, "ready": 1.0, "depth": 4, "starved": 0.5}]
    assert rows_of(second, second) == [], "nothing was asked for since"
    (anew,) = rows_of(feed(50, 5, 1.5, attempt=2), second)
    assert (anew["ready"], anew["depth"], anew["starved"]) == (1.5, 4, 0.1), "a restart counts anew"


def test_unknown_or_infinite_values_have_no_point() -> None:
    (machine,) = rows_of(MachineStats(seconds=1.0, cores=2, machine_cores=2, pressure={"cpu": 0.5}))
    assert [machine[name] for name in ("cpu", "ranks", "pressure_cpu", "pressure_io")] == [None, 0.0, 0.5, None]
    assert rows_of(logged(20, loss=float("nan")))[0]["loss"] is None
    (device,) = rows_of(DeviceStats(seconds=1.0, index=3, name="x", memory_bytes=5, memory_total_bytes=10))
    assert device["memory"] == 0.5


def test_a_point_of_an_evaluation_carries_its_confidence_interval() -> None:
    (row,) = rows_of(replace(evaluated(20), top1=0.9, n=100))
    assert (row["low"], row["high"]) == pytest.approx((0.825634, 0.944771), abs=1e-6)


def test_the_stack_over_time_has_the_edges_of_its_slices_and_adds_up() -> None:
    slices = [
        Slice(began=100.0, ended=104.0, attempt=1, seconds={"startup": 3.0, "forward": 1.0}),
        Slice(began=900.0, ended=902.0, attempt=2, seconds={"input_decode": 0.5, "forward": 1.5}),
    ]
    traces = stacked(slices)
    assert traces["edges"] == [0.0, 4.0, 6.0], "the pause between attempts is not in it"
    assert [bucket["name"] for bucket in traces["buckets"]] == ["forward", "input_decode", "startup"]
    assert [sum(bucket["shares"][k] for bucket in traces["buckets"]) for k in range(2)] == [1.0, 1.0]
    assert stacked([]) == {"edges": [0.0], "buckets": []}


def test_every_curve_of_the_live_page_has_a_column_a_colour_and_in_a_key_its_name() -> None:
    css = (TEMPLATES / "live.css").read_text(encoding="utf-8")
    for chart in LIVE_CHARTS:
        assert {curve.column for curve in chart.curves} <= set(COLUMNS[chart.series])
        assert all(f"--{curve.colour}: #" in css for curve in chart.curves), chart.id
        assert len(chart.curves) == 1 or all(curve.label for curve in chart.curves), chart.id


def test_a_probe_beside_another_run_is_a_point_among_its_curves(tmp_path: Path) -> None:
    probe = Run.create(tmp_path / "probe", recipe())
    write(probe, [started(steps=0), evaluated(0)], Clock(), end=True)
    figures = charts([read_history(probe), read_history(finished(tmp_path))])
    of_probe = [trace for figure in figures if figure["id"] == "top1" for trace in figure["traces"] if not trace["run"]]
    assert [trace["y"] for trace in of_probe if trace["role"] == "val"] == [[0.5]]
