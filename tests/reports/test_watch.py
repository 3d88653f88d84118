"""A watched run: what its events add up to, however it was stopped, replaced or copied."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.reports.measured_runs import line, measured
from tests.reports.runs import BEGAN, course, evaluated, logged, recipe, started, step

from steadytrain.cost.prices import parse_price
from steadytrain.events import Event, Noticed, Stalled
from steadytrain.monitor import RunHistory, ledger, read_history
from steadytrain.reports.status import remaining_seconds, seconds_per_step, signs
from steadytrain.reports.watch import Watch, snapshot
from steadytrain.run import Run


def at_times(run: Run, sequence: Sequence[tuple[float, Event]], attempt: int = 1) -> Run:
    """Write more events of a run, each at its time."""
    with (run.directory / "events.jsonl").open("a", encoding="utf-8") as file:
        file.writelines(line(event, when, attempt) for when, event in sequence)
    return run


def test_watch_shows_the_figures_of_a_report(tmp_path: Path) -> None:
    run = measured(tmp_path)
    watched = Watch(run)
    assert watched.read()
    assert not watched.read(), "nothing came since"
    moment = snapshot(watched)
    assert moment.ledger == ledger(run)
    assert moment.signs.status == "finished"
    assert (moment.progress.step, moment.progress.steps) == (1055, 1055)
    assert moment.best is not None
    assert moment.best.top1 == max(event.top1 for event in read_history(run).evaluated)
    assert moment.seconds == pytest.approx(moment.ledger.wall_seconds, rel=0.01), "one wall time, start-up included"


def test_followed_piece_by_piece_it_comes_to_the_same(tmp_path: Path) -> None:
    whole = measured(tmp_path, "whole", steps=400, began=BEGAN)
    run = Run.create(tmp_path / "pieces", recipe())
    data = (whole.directory / "events.jsonl").read_bytes()
    watched = Watch(run)
    for first in range(0, len(data), 9973):
        with (run.directory / "events.jsonl").open("ab") as file:
            file.write(data[first : first + 9973])
        watched.read()
    at_once = Watch(whole)
    at_once.read()
    assert watched.history.points == at_once.history.points
    assert watched.generation == at_once.generation
    assert watched.history.ledger() == at_once.history.ledger()


def test_copied_run_can_be_watched_and_is_not_written_to(tmp_path: Path) -> None:
    run = measured(tmp_path, steps=100)
    shutil.copytree(run.directory, tmp_path / "copy")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "copy").iterdir()}
    watched = Watch(Run.open(tmp_path / "copy"))
    watched.read()
    assert snapshot(watched).progress.step == 100
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "copy").iterdir()} == before


def test_replaced_log_is_read_from_its_start(tmp_path: Path) -> None:
    run = measured(tmp_path, "first", steps=400)
    other = measured(tmp_path, "second", steps=100)
    watched = Watch(run)
    watched.read()
    generation = watched.generation
    (other.directory / "events.jsonl").replace(run.directory / "events.jsonl")
    watched.read()
    assert watched.generation > generation
    assert snapshot(watched).progress.step == 100
    assert len([point for point in watched.history.points if point.series == "train"]) == 5


def test_after_a_restart_the_steps_taken_back_are_gone_and_the_pause_is_not_counted(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", recipe())
    first = [(BEGAN, started()), *((BEGAN + n, logged(n)) for n in range(20, 220, 20))]
    watched = Watch(at_times(run, first))
    watched.read()
    generation = watched.generation
    at_times(run, [(BEGAN + 9000, started(100)), (BEGAN + 9020, logged(120))], attempt=2)
    watched.read()
    assert watched.generation == generation + 1
    assert [point.row[2] for point in watched.history.points if point.series == "train"] == [20, 40, 60, 80, 100, 120]
    assert watched.history.elapsed() == pytest.approx(220)
    assert watched.history.away_seconds == pytest.approx(8800)


def test_current_images_per_second_are_of_the_last_seconds(tmp_path: Path) -> None:
    slow = [(BEGAN + n, step(n)) for n in range(1, 31)]
    fast = [(BEGAN + 30 + n / 4, step(30 + n)) for n in range(1, 81)]
    watched = Watch(at_times(Run.create(tmp_path / "a", recipe()), [(BEGAN, started()), *slow, *fast]))
    watched.read()
    assert watched.images_per_second == pytest.approx(4 * 128)


def test_a_standstill_is_over_with_the_next_update(tmp_path: Path) -> None:
    hung = Stalled(step=1, what="step", seconds=60, expected_seconds=1, culprit="a lock", stacks="s.txt")
    run = at_times(Run.create(tmp_path / "a", recipe()), [(BEGAN, started()), (BEGAN + 1, step(1)), (BEGAN + 61, hung)])
    watched = Watch(run)
    watched.read()
    assert watched.history.stalled is not None
    at_times(run, [(BEGAN + 62, step(2))])
    watched.read()
    assert watched.history.stalled is None


def test_signs_of_life(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", recipe())
    moment = time.time()
    changed = replace(started(), machine={"host": platform.node()})
    assert signs(run, RunHistory(run.recipe), moment).status == "waiting"
    run_history = RunHistory(run.recipe)
    run_history.take(replace(changed, time=moment, attempt=1))
    assert signs(run, run_history, moment).status == "interrupted", "nobody holds it"
    with run.lock():
        seen = signs(run, run_history, moment + 5)
        assert (seen.status, seen.process, seen.silent) == ("running", os.getpid(), False)
        assert signs(run, run_history, moment + 90).silent
    elsewhere = RunHistory(run.recipe)
    elsewhere.take(replace(started(), time=moment - 100, attempt=1))
    assert signs(run, elsewhere, moment).host == "another-machine"
    assert signs(run, elsewhere, moment).silent


def test_the_time_left_counts_evaluations_and_checkpoints_to_come(tmp_path: Path) -> None:
    run_history = RunHistory(recipe())
    for event in (started(steps=1055), *(event for event in course(0, 352, total=1055) if event.kind != "Saved")):
        run_history.take(replace(event, time=BEGAN, attempt=1))
    pace = seconds_per_step(run_history)
    assert pace is not None
    assert pace == pytest.approx(0.25, rel=0.1)
    assert remaining_seconds(run_history) == pytest.approx((1055 - 352) * pace + 2 * 2.0)


def test_before_the_first_evaluation_its_time_is_guessed(tmp_path: Path) -> None:
    run_history = RunHistory(recipe())
    assert remaining_after(run_history, [started(steps=1055)]) is None
    left = remaining_after(run_history, [step(20), logged(20, rate=128.0)])
    steps_alone = 1035 * 1.0
    assert left is not None
    assert left == pytest.approx(steps_alone + 3 * 5000 / 128 / 3, rel=0.01)
    assert remaining_after(run_history, [replace(evaluated(352), seconds=100.0)]) == pytest.approx(
        steps_alone + 200, rel=0.01
    )


def remaining_after(run_history: RunHistory, events: Sequence[Event]) -> float | None:
    """The time left after more events."""
    for event in events:
        run_history.take(replace(event, time=BEGAN, attempt=1))
    return remaining_seconds(run_history)


def test_as_json_it_is_a_document_of_finite_numbers(tmp_path: Path) -> None:
    run = at_times(
        Run.create(tmp_path / "a", recipe()), [(BEGAN, started()), (BEGAN + 1, logged(20, loss=float("nan")))]
    )
    watched = Watch(run)
    watched.read()
    document = snapshot(watched, price=parse_price("1")).to_dict()
    assert document["format"] == "steadytrain-watch"
    assert document["train_loss"] is None
    assert document["causes"]


def test_events_that_were_edited_by_hand_end_nothing(tmp_path: Path) -> None:
    run = measured(tmp_path, steps=100)
    text = (run.directory / "events.jsonl").read_text(encoding="utf-8")
    text = text.replace('"asked": ', '"asked": "many", "was": ')
    (run.directory / "events.jsonl").write_text(text, encoding="utf-8")
    watched = Watch(run)
    watched.read()
    assert snapshot(watched).progress.step == 100


def test_the_newest_warning_is_kept(tmp_path: Path) -> None:
    run = at_times(Run.create(tmp_path / "a", recipe()), [(BEGAN, started()), (BEGAN + 1, Noticed(message="look out"))])
    watched = Watch(run)
    watched.read()
    assert snapshot(watched).notice == "look out"


def test_attempts_of_all_kinds_fill_every_series(tmp_path: Path) -> None:
    watched = Watch(measured(tmp_path, steps=400, gpus=2))
    watched.read()
    assert {point.series for point in watched.history.points} == {
        "train",
        "val",
        "rate",
        "feed",
        "machine",
        "device-0",
        "device-1",
    }
