"""Following an event log: whatever is written, however it comes, is read once."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.reports.runs import course, finished, started

from steadytrain.events import Event, EventLog, Noticed, Started, read
from steadytrain.events.follow import Tail


def written(path: Path, steps: int = 40) -> bytes:
    """A log with all kinds of lines in it: of training, of another version, and one that is no JSON."""
    with EventLog(path, attempt=1) as log:
        for event in (started(), *course(0, steps, total=steps), Noticed(message="größer\nals <gedacht>")):
            log.append(event)
    with path.open("ab") as file:
        file.write(b'{"v":9,"kind":"FromTheFuture","time":3,"what":[1]}\nno json at all\n\n[1,2]\n')
        file.write(b'{"v":1,"kind":"Step"}\n')
    return path.read_bytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log that nobody writes to any more."""
    path = tmp_path_factory.mktemp("follow") / "whole.jsonl"
    written(path)
    return path


@given(st.lists(st.integers(0, 8_000), max_size=12))
def test_any_split_of_the_bytes_gives_the_same_events(whole: Path, cuts: list[int]) -> None:
    data, path = whole.read_bytes(), whole.with_name("events.jsonl")
    assert len(data) > 7_000
    path.unlink(missing_ok=True)
    tail, told = Tail(path), list[Event]()
    for first, last in pairwise([0, *sorted(cuts), len(data)]):
        with path.open("ab") as file:
            file.write(data[first:last])
        told += tail.read()
    assert told == list(read(whole))
    assert tail.generation == 0
    assert list(tail.read()) == []


def test_a_log_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    tail = Tail(tmp_path / "runs" / "a" / "events.jsonl")
    assert list(tail.read()) == []
    run = finished(tmp_path / "runs", "a", epochs=1)
    assert list(tail.read()) == list(run.events())
    assert tail.generation == 0


def test_a_restart_that_cuts_the_torn_line_off_loses_and_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, attempt=1) as log:
        log.append(started())
    with path.open("ab") as file:
        file.write(b'{"v":1,"kind":"Step","time":17, "a half line that is longer than the next one": 1')
    tail = Tail(path)
    assert [event.attempt for event in tail.read()] == [1]
    with EventLog(path, attempt=2) as log:
        log.append(Noticed(message="on"))
    assert [(event.kind, event.attempt) for event in tail.read()] == [("Noticed", 2)]
    assert tail.generation == 0


def test_a_log_that_was_replaced_or_truncated_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    written(path)
    tail = Tail(path)
    before = list(tail.read())
    path.write_bytes(path.read_bytes()[:1000])
    assert list(tail.read()) == before[: len(list(read(path)))]
    assert tail.generation == 1
    with EventLog(tmp_path / "other.jsonl", attempt=7) as log:
        for _ in range(500):
            log.append(started())
    (tmp_path / "other.jsonl").replace(path)  # longer than the one before: only its first bytes tell
    told = list(tail.read())
    assert len(told) == 500
    assert isinstance(told[0], Started)
    assert told[0].attempt == 7
    assert tail.generation == 2
    path.unlink()
    assert list(tail.read()) == []
    assert tail.generation == 3


def test_a_long_log_comes_in_pieces_and_it_is_known_how_far_reading_is(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    line = written(path)
    path.write_bytes(line * (3_000_000 // len(line)))
    tail = Tail(path)
    shares = [tail.offset / tail.size for _ in tail.chunks()]
    assert len(shares) >= 3
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
