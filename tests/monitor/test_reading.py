"""A ledger read from a folder: whole, torn, of several ranks, and from a run that was never begun."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from tests.monitor.recorder import RECIPE, Recorder

import steadytrain
from steadytrain.errors import RunError
from steadytrain.events import Event, from_json
from steadytrain.monitor.reading import evidence, ledger, read, settled
from steadytrain.run import Run


def written(folder: Path, events: Iterable[Event], rank: int = 0) -> Run:
    """A run's folder with these events, as an event log has them."""
    run = Run.create(folder, RECIPE)
    text = "".join(json.dumps(event.to_dict(), separators=(",", ":")) + "\n" for event in events)
    (folder / (f"events-{rank}.jsonl" if rank else "events.jsonl")).write_text(text)
    return run


def eventful(*, accounts: bool = True) -> Recorder:
    """Two attempts, the first of them killed in the middle of its account."""
    run = Recorder(accounts=accounts)
    for _ in range(2):
        run.start(startup=1.0)
        for index in range(45):
            run.update(input=0.03, forward=0.02, backward=0.05)
            run.feed(decode=0.05)
            if index % 10 == 9:
                run.account()
            if index == 30:
                run.evaluate(0.4)
                run.save(0.2)
    return run


@pytest.mark.parametrize("accounts", [True, False])
def test_the_quick_reading_tells_the_same_ledger(tmp_path: Path, accounts: bool) -> None:
    run = written(tmp_path / "run", eventful(accounts=accounts).events)
    quick, whole = ledger(run), read(run).ledger()
    assert quick.seconds == pytest.approx(whole.seconds)
    assert (quick.steps, quick.images, quick.away_seconds) == (whole.steps, whole.images, whole.away_seconds)


def test_steps_that_are_summed_up_are_not_read(tmp_path: Path) -> None:
    run = written(tmp_path / "run", eventful().events)
    steps = [event for event in settled(run.directory / "events.jsonl") if event.kind == "Step"]
    assert len(steps) <= 2 * 5 + 2


def test_a_torn_line_is_left_out_and_the_rest_is_told(tmp_path: Path) -> None:
    run = written(tmp_path / "run", eventful().events)
    whole = ledger(run)
    with (run.directory / "events.jsonl").open("a") as file:
        file.write('{"v":1,"kind":"Accounted","time":1')
    assert ledger(run) == whole
    assert read(run).ledger().wall_seconds == pytest.approx(whole.wall_seconds)


def test_a_line_that_is_no_json_is_passed_over(tmp_path: Path) -> None:
    run = written(tmp_path / "run", eventful().events)
    path = run.directory / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:20], "@@@\n", "[1,2]\n", *lines[20:]]))
    assert from_json("@@@") is None
    assert ledger(run).wall_seconds > 0


def test_all_ranks_are_read_and_the_first_ones_ledger_is_told(tmp_path: Path) -> None:
    run = written(tmp_path / "run", eventful().events)
    other = Recorder(rank=1)
    other.start()
    other.update(communication=5.0)
    other.account()
    written(tmp_path / "run", other.events, rank=1)
    told = evidence(run)
    assert set(told.ranks) == {0, 1}
    assert told.ranks[1]["communication"] == pytest.approx(5 / 7)
    assert told.ledger.seconds == pytest.approx(ledger(run).seconds)


def test_a_run_in_which_nothing_was_started_has_no_ledger(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", RECIPE)
    for ask in (ledger, evidence):
        with pytest.raises(RunError, match="has no events yet"):
            ask(run)


def test_the_ledger_is_public(tmp_path: Path) -> None:
    run = written(tmp_path / "run", eventful().events)
    assert steadytrain.ledger(run) == ledger(run)
