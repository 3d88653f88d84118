"""A run is read as it was lived: however often it was stopped, each step counts once, and its time always."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.reports.runs import BATCH, Clock, evaluated, logged, recipe, restarted, started, step, write

from steadytrain.errors import RunError
from steadytrain.events import Failed, Saved, Step
from steadytrain.reports.history import history, images
from steadytrain.run import Run


def new(folder: Path) -> Run:
    return Run.create(folder / "run", recipe())


def test_figures_of_steps_that_a_restart_repeats_are_those_of_the_newest_attempt(tmp_path: Path) -> None:
    run, clock = new(tmp_path), Clock()
    write(run, [started(), *map(step, range(1, 41)), logged(20, loss=2.0), logged(40, loss=9.0)], clock)
    write(run, [started(30), *map(step, range(31, 61)), logged(40, loss=1.5), logged(60, loss=1.0)], clock)
    told = history(run)
    assert [(line.step, line.loss) for line in told.logged] == [(20, 2.0), (40, 1.5), (60, 1.0)]
    assert told.repeated_steps == 10
    assert told.step == 60


def test_an_evaluation_of_lost_weights_does_not_count(tmp_path: Path) -> None:
    run, clock = new(tmp_path), Clock()
    write(run, [started(), *map(step, range(1, 41)), evaluated(40, 0.99)], clock)
    write(run, [started(30), *map(step, range(31, 41)), evaluated(40, 0.6)], clock)
    assert [score.top1 for score in history(run).evaluated] == [0.6]


def test_time_and_images_of_lost_steps_count_and_pauses_do_not(tmp_path: Path) -> None:
    run, clock = new(tmp_path), Clock()
    write(run, [started(), *(step(i, seconds=1.0) for i in range(1, 41))], clock)
    clock.now += 86_400
    write(run, [started(30), *(step(i, seconds=1.0) for i in range(31, 61)), logged(60)], clock)
    told = history(run)
    assert sum(attempt.seconds for attempt in told.attempts) == pytest.approx(40 + 30)
    assert images(told.attempts) == (40 + 30) * BATCH
    assert told.elapsed(told.logged[-1]) == pytest.approx(70)


def test_a_torn_line_and_unknown_kinds_are_passed_over(tmp_path: Path) -> None:
    run, clock = new(tmp_path), Clock()
    write(run, [started(), step(1), logged(1)], clock)
    with (run.directory / "events.jsonl").open("a") as file:
        file.write('{"v":9,"kind":"Weather","time":1,"attempt":1,"rank":0,"sun":true}\n')
        file.write('{"v":1,"kind":"Logged","time":1,"attempt":1,"rank":0,"step":2,"epoch":null,"loss":null,"top1":0,')
        file.write('"lr":0.1,"images_per_second":1,"wait_share":0}\nnonsense\n{"v":1,"kind":"Step","st')
    assert [line.step for line in history(run).logged] == [1]


def test_reading_sparsely_leaves_out_nothing_but_steps_between_steps(tmp_path: Path) -> None:
    run = restarted(tmp_path)
    full, sparse = list(run.events()), list(run.events(sparse=True))
    following = [*full[1:], None]
    kept = [a for a, b in zip(full, following, strict=True) if not (isinstance(a, Step) and isinstance(b, Step))]
    assert sparse == kept
    assert len(sparse) < len(full) / 5


def test_a_run_without_events_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no events yet"):
        history(new(tmp_path))


def test_a_run_that_failed_before_it_started_says_why(tmp_path: Path) -> None:
    run = new(tmp_path)
    write(run, [Failed(error="ModelError", message="no model resnet2O")], Clock())
    with pytest.raises(RunError, match="never started: ModelError: no model resnet2O"):
        history(run)


def test_checkpoints_of_every_attempt_are_told(tmp_path: Path) -> None:
    run, clock = new(tmp_path), Clock()
    for first in (0, 10):
        saved = Saved(step=first + 10, path="checkpoints/x", bytes=1, seconds=0.1)
        write(run, [started(first), *map(step, range(first + 1, first + 11)), saved], clock)
    assert [event.step for event in history(run).saved] == [10, 20]
