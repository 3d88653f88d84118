"""The event log: whole lines from any thread, through any kill, for any reader."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.reports.runs import course, finished, started

from steadytrain.errors import RunError, StorageError
from steadytrain.events import (
    KINDS,
    Ended,
    Evaluated,
    Event,
    EventLog,
    LogReader,
    Noticed,
    Saved,
    Score,
    Started,
    Step,
    Unknown,
    Unreadable,
    from_json,
    read,
    repair,
)
from steadytrain.events import log as event_log
from steadytrain.events.log import encode


def _step(number: int) -> Step:
    return Step(step=number, position=number * 32, n=32, seconds=0.25, wait_seconds=0.0, lr=0.1)


def _numbers(path: Path) -> list[int]:
    return [event.step for event in read(path) if isinstance(event, Step)]


def test_a_full_disk_leaves_no_half_of_a_line_before_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, parts = tmp_path / "events.jsonl", list[bytes]()
    with EventLog(path, attempt=1) as log:
        log.append(Noticed(message="before"))
        file = log._file

        class Full:
            """A file on a disk with room for half of a line."""

            def write(self, line: bytes) -> int:
                if parts:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                parts.append(line[: len(line) // 2])
                return file.write(parts[0])

            def __getattr__(self, name: str) -> object:
                return getattr(file, name)

        with monkeypatch.context() as full:
            full.setattr(log, "_file", Full())
            with pytest.raises(StorageError, match="the disk is full at"):
                log.append(Noticed(message="lost"))
        log.append(Noticed(message="after"))
    assert parts and [event.message for event in read(path)] == ["before", "after"]  # type: ignore[attr-defined]


def test_an_event_comes_back_as_it_was_written(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", attempt=3, rank=2) as log:
        written = [log.append(_step(1)), log.append(Ended(status="finished", step=1, seconds=2.5, images=32))]
    assert list(read(tmp_path / "events.jsonl")) == written
    assert {(event.attempt, event.rank) for event in written} == {(3, 2)}
    assert 0 < written[0].time <= written[1].time


def test_a_line_says_its_version_and_kind_in_json(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", attempt=1) as log:
        log.append(_step(7))
    document = json.loads((tmp_path / "events.jsonl").read_text())
    assert document["v"] == 1
    assert document["kind"] == "Step"
    assert document.keys() - {"v", "kind"} == {*Step.__struct_fields__}


@given(st.text() | st.binary(max_size=40).map(lambda name: name.decode("utf-8", "surrogateescape")))
def test_any_text_survives_file_names_that_are_no_utf8_included(text: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        with EventLog(path, attempt=1) as log:
            log.append(Noticed(message=text))
        assert [event.message for event in read(path) if isinstance(event, Noticed)] == [text]


@pytest.mark.parametrize("kept", [0, 1, 40, 4000])
def test_a_torn_reader_is_cut_off_and_writing_goes_on(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, attempt=1) as log:
        for number in range(kept):
            log.append(_step(number))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"v":1,"kind":"Step","step":' + b"9" * 70_000)
    assert _numbers(path) == list(range(kept))
    with EventLog(path, attempt=2) as log:
        assert path.read_bytes() == whole
        log.append(_step(kept))
    assert _numbers(path) == list(range(kept + 1))


def test_wherever_the_last_line_is_torn_the_lines_before_stay(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, attempt=1) as log:
        log.append(_step(1))
        log.append(Noticed(message="an accent: \u00e9"))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        assert _numbers(path) == [1]
        assert repair(path) == cut - first
        assert path.read_bytes() == whole[:first]
    assert repair(path) == 0


def test_lines_in_the_middle_that_are_no_json_are_counted_and_left_out(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    lines = [json.dumps(_step(number).to_dict()).encode() for number in (1, 2)]
    path.write_bytes(lines[0] + b"\n\xff\xfe\n[]\n\n3\n" + b"[" * 100_000 + b"\n" + lines[1] + b"\n")
    assert [event.kind for event in read(path)] == ["Step", *["Unreadable"] * 4, "Step"]


def test_a_kind_of_a_later_version_is_kept_whole() -> None:
    line = '{"v": 9, "kind": "Teleported", "time": 5.5, "attempt": 2, "rank": 1, "to": ["a", {"b": 1}]}'
    event = from_json(line)
    assert isinstance(event, Unknown)
    assert (event.kind, event.time, event.attempt, event.rank) == ("Teleported", 5.5, 2, 1)
    assert event.to_dict() == json.loads(line)


def test_a_known_kind_with_fields_missing_or_more_is_still_read() -> None:
    less = from_json('{"v": 1, "kind": "Saved", "step": 3}')
    assert isinstance(less, Unknown)
    assert less.kind == "Saved"
    more = from_json('{"v": 2, "kind": "Saved", "step": 3, "path": "a", "bytes": 4, "seconds": 0.5, "colour": "red"}')
    assert more == Saved(step=3, path="a", bytes=4, seconds=0.5)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("Step", {"step": "x"}),
        ("Step", {"seconds": float("nan")}),
        ("Step", {"attempt": "x"}),
        ("Step", {"attempt": {}}),
        ("Step", {"time": "yesterday"}),
        ("Step", {"time": 1e308}),
        ("Step", {"rank": -1}),
        ("Step", {"n": 10**400}),
        ("Noticed", {"message": [[["x"]]]}),
        ("Accounted", {"wall_seconds": float("inf")}),
        ("Accounted", {"seconds": [1.0]}),
        ("Accounted", {"seconds": {"forward": "x"}}),
        ("MachineStats", {"seconds": None}),
        ("MachineStats", {"cpu": "x"}),
        ("MachineStats", {"other_processes": [{"cores": "many"}]}),
        ("ThreadStats", {"places": [{"what": "python", "seconds": 1.0, "place": ""}]}),
        ("ThreadStats", {"compute": {"ran": float("inf"), "queued": 0.0}}),
        ("StepMeasured", {"passes": {"full": float("inf")}}),
        ("Started", {"batch_size": 0}),
        ("Started", {"growth": [[1, 2]]}),
        ("Started", {"price": {"currency": "USD"}}),
        ("Started", {"model": {"input": json.loads("[" * 500 + "]" * 500)}}),
        ("Teleported", {"attempt": "x"}),
        ("Teleported", {"to": json.loads("[" * 500 + "]" * 500)}),
    ],
)
def test_a_value_of_another_type_makes_a_line_damaged(kind: str, values: dict[str, object]) -> None:
    line = {"v": 1, "kind": kind, "time": 3.0, "attempt": 1, "rank": 0, **WHOLE.get(kind, {})}
    assert from_json(json.dumps(line)) is not None
    assert from_json(json.dumps(line | values)) is None


WHOLE: dict[str, dict[str, object]] = {
    "Step": {"step": 1, "position": 32, "n": 32, "seconds": 0.5, "wait_seconds": 0.0, "lr": 0.1},
    "Noticed": {"message": "x"},
    "Accounted": {"step": 1, "images": 32, "wall_seconds": 3.0, "seconds": {"forward": 1.0}},
    "MachineStats": {"seconds": 3.0, "cores": 2, "machine_cores": 2},
    "ThreadStats": {"step": 1, "seconds": 3.0, "looks": 9, "cost_seconds": 0.1, "lock_seconds": 0.0},
    "StepMeasured": {"step": 1, "batch_size": 32, "other_batch_size": 8, "passes": {"full": 1}, "fixed_seconds": 0.1},
    "Started": {"digest": "a", "step": 0, "steps": 9, "steps_per_epoch": 3.0, "batch_size": 32},
}


def test_what_a_diverged_run_measured_is_no_damage() -> None:
    line = b'{"v":1,"kind":"Evaluated","step":3,"epoch":1.0,"n":5,"loss":NaN,"top1":0.1,"top5":null,"seconds":1.0}'
    assert isinstance(from_json(line), Evaluated)


def test_a_folder_in_place_of_the_log_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").mkdir()
    with pytest.raises(RunError, match=r"^cannot read .*events\.jsonl: Is a directory; a run's log is a file$"):
        list(read(tmp_path / "events.jsonl"))


def test_a_line_without_end_is_passed_over_in_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "_CHUNK_BYTES", 50)
    monkeypatch.setattr(event_log, "_MOST_LINE_BYTES", 300)
    path, line = tmp_path / "events.jsonl", json.dumps(_step(1).to_dict()).encode() + b"\n"
    reader = LogReader(path)
    path.write_bytes(line + b"x" * 1000)
    assert [event.kind for event in reader.read()] == ["Step"]
    with path.open("ab") as file:
        file.write(b"x" * 1000 + b"\n" + line)
    assert [event.kind for event in reader.read()][-1] == "Step"
    assert [event.kind for event in read(path)] == ["Step", "Unreadable", "Step"]


def test_every_kind_is_in_the_table_of_kinds() -> None:
    kinds = [*Event.__subclasses__(), *(kind for parent in Event.__subclasses__() for kind in parent.__subclasses__())]
    assert {kind.__name__: kind for kind in kinds if kind not in (Score, Unknown, Unreadable)} == KINDS


@given(st.integers(0, 2**53), st.tuples(st.floats(), st.floats(), st.floats()))
def test_the_line_of_a_step_is_the_json_of_its_fields(number: int, values: tuple[float, float, float]) -> None:
    seconds, waited, lr = values
    event = Step(step=number, position=64 * number, n=64, seconds=seconds, wait_seconds=waited, lr=lr)
    line = encode(event).decode()
    assert line.startswith('{"v":1,"kind":"Step","time":') and line.endswith("}\n")
    assert repr(json.loads(line)) == repr(event.to_dict())


def test_threads_write_whole_lines_in_their_own_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, attempt=1) as log:

        def write(thread: int) -> None:
            for number in range(500):
                log.append(Noticed(message=f"{thread} " + "x" * (number * 37 % 9000), step=number))

        threads = [threading.Thread(target=write, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    notices = [event for event in read(path) if isinstance(event, Noticed)]
    assert len(notices) == len(path.read_bytes().splitlines()) == 2000
    for thread_number in range(4):
        mine = [event.step for event in notices if event.message.startswith(f"{thread_number} ")]
        assert mine == list(range(500))


WRITER = """
import sys
from pathlib import Path
from steadytrain.events import EventLog, Noticed, Step
with EventLog(Path(sys.argv[1]), attempt=1) as log:
    for number in range(4000):
        log.append(Step(step=number, position=0, n=1, seconds=0.0, wait_seconds=0.0, lr=0.1))
        log.append(Noticed(message="x" * (number * 997 % 10_000)))
        if number == 100:
            print("under way", flush=True)
"""


@contextlib.contextmanager
def _writer(path: Path) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "under way\n"
        try:
            yield child
        finally:
            child.kill()


def test_a_reader_beside_the_writer_sees_each_event_once_and_in_order(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    seen = [0]
    with _writer(path):
        while seen[-1] < 4000:
            numbers = _numbers(path)
            assert numbers == list(range(len(numbers)))
            seen.append(len(numbers))
    assert seen == sorted(seen)


def test_a_killed_writer_loses_at_most_the_line_it_was_writing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with _writer(path) as child:
        child.send_signal(signal.SIGKILL)
        child.wait()
    before = _numbers(path)
    assert before == list(range(len(before)))
    with EventLog(path, attempt=2) as log:
        log.append(_step(len(before)))
    assert _numbers(path) == [*before, len(before)]
    assert all(json.loads(line) for line in path.read_bytes().splitlines())


def test_a_log_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(StorageError, match=r"^cannot write .*taken/events\.jsonl \(Not a directory\)"):
        EventLog(tmp_path / "taken" / "events.jsonl", attempt=1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_told_in_one_line() -> None:
    log = EventLog(Path("/dev/full"), attempt=1)
    with pytest.raises(StorageError, match=r"^the disk is full at /dev/full: free some space"):
        log.append(_step(1))
    log.close()  # nothing was held back that would have to be written now


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
    reader, reading = LogReader(path), list[Event]()
    for first, last in pairwise([0, *sorted(cuts), len(data)]):
        with path.open("ab") as file:
            file.write(data[first:last])
        reading += reader.read()
    assert reading == list(read(whole))
    assert reader.generation == 0
    assert list(reader.read()) == []


def test_a_log_that_is_not_there_yet_is_waited_for(tmp_path: Path) -> None:
    reader = LogReader(tmp_path / "runs" / "a" / "events.jsonl")
    assert list(reader.read()) == []
    run = finished(tmp_path / "runs", "a", epochs=1)
    assert list(reader.read()) == list(run.events())
    assert reader.generation == 0


def test_a_restart_that_cuts_the_torn_line_off_loses_and_repeats_nothing(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path, attempt=1) as log:
        log.append(started())
    with path.open("ab") as file:
        file.write(b'{"v":1,"kind":"Step","time":17, "a half line that is longer than the next one": 1')
    reader = LogReader(path)
    assert [event.attempt for event in reader.read()] == [1]
    with EventLog(path, attempt=2) as log:
        log.append(Noticed(message="on"))
    assert [(event.kind, event.attempt) for event in reader.read()] == [("Noticed", 2)]
    assert reader.generation == 0


def test_a_log_that_was_replaced_or_truncated_is_read_from_its_beginning(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    written(path)
    reader = LogReader(path)
    before = list(reader.read())
    path.write_bytes(path.read_bytes()[:1000])
    assert list(reader.read()) == before[: len(list(read(path)))]
    assert reader.generation == 1
    with EventLog(tmp_path / "other.jsonl", attempt=7) as log:
        for _ in range(500):
            log.append(started())
    (tmp_path / "other.jsonl").replace(path)  # longer than the one before: only its first bytes tell
    events = list(reader.read())
    assert len(events) == 500
    assert isinstance(events[0], Started)
    assert events[0].attempt == 7
    assert reader.generation == 2
    path.unlink()
    assert list(reader.read()) == []
    assert reader.generation == 3


def test_a_long_log_comes_in_pieces_and_it_is_known_how_far_reading_is(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    line = written(path)
    path.write_bytes(line * (3_000_000 // len(line)))
    reader = LogReader(path)
    shares = [reader.offset / reader.size for _ in reader.chunks()]
    assert len(shares) >= 3
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


kept_lines = (Path(__file__).parent / "golden" / "run-2026-11" / "run" / "events.jsonl").read_bytes().splitlines()
odd_lines = [
    *(b"", b" \t", b"\xc2\xa0", b"null", b"[1]", b'"kind"', b"{}", b'{"kind":1}', b'{"v":1,"kind":["Step"]}', b"\xff"),
    *(b'{"v":1,"kind":"Step"}', b'{"v":1,"kind":"Noticed","time":1,"attempt":1,"rank":0,"message":"\xed\xa0\x80"}'),
    *(b'\xef\xbb\xbf{"v":1,"kind":"Noticed","message":"a"}', b'  {"kind":"Noticed","message":"a"}\r'),
    *(b'{"v":1,"kind":"Noticed","time":1.0,"attempt":1,"rank":0,"message":"a","step":0} x', b"[" * 9000, b"{" * 9000),
    b'{"kind":"Noticed","v":2,"time":1.0,"attempt":1,"rank":0,"message":"a","step":0,"more":[1]}',
    b'{"v":1,"kind":"Started","digest":"a","step":0,"steps":1,"steps_per_epoch":1,"batch_size":1,"data":'
    + b"[" * 99_999,
]
lines_of_a_log = st.one_of(
    st.sampled_from(kept_lines),
    st.sampled_from(odd_lines),
    st.tuples(st.sampled_from(kept_lines), st.integers(0, 200), st.binary(max_size=2)).map(
        lambda drawn: (drawn[0][: drawn[1]] + drawn[2] + drawn[0][drawn[1] + 1 :]).replace(b"\n", b"")
    ),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(lines_of_a_log, max_size=8))
def test_a_log_is_read_as_each_of_its_lines_is(lines: list[bytes]) -> None:
    expected = [from_json(line) or Unreadable() for line in lines if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "events.jsonl"
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        found = list(read(path))
    assert list(map(repr, found)) == list(map(repr, expected))  # a NaN is no equal of itself
