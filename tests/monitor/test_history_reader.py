"""A long log is read once: what it came to is taken up again where its bytes are the same, and only there."""

from __future__ import annotations

import json
import pickle
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadytrain.config import Recipe
from steadytrain.events import read, repair
from steadytrain.monitor import diagnose
from steadytrain.monitor import history_reader as reading
from steadytrain.monitor.history import RunHistory
from steadytrain.monitor.history_reader import LogHistory, read_any
from steadytrain.reports import accounts
from steadytrain.reports.page import page
from steadytrain.reports.tables import markdown, to_json
from steadytrain.reports.watch import Watch, snapshot
from steadytrain.run import Run

GOLDEN = Path(__file__).parents[1] / "golden" / "run-2026-11" / "run"
LINES = (GOLDEN / "events.jsonl").read_bytes().splitlines(keepends=True)
EVENTS = list(read(GOLDEN / "events.jsonl"))


@contextmanager
def storing(cache: Path, least: int = 1) -> Iterator[Path]:
    """Store the history of every log of so many bytes; yield the folder."""
    with mock.patch.dict("os.environ", STEADYTRAIN_CACHE=str(cache)), mock.patch.object(reading, "LEAST_BYTES", least):
        yield cache / "histories"


def copied(folder: Path) -> Run:
    """A copy of the kept run, of two attempts and two ranks."""
    shutil.copytree(GOLDEN, folder / "run")
    return Run.open(folder / "run")


def state_of(history: RunHistory) -> str:
    """All that a history holds, of its own log."""

    def values(of: Any) -> Any:
        if is_dataclass(of) and not isinstance(of, Recipe):
            names = [field.name for field in fields(of) if field.name not in ("recipe", "_joined")]
            return {name: values(getattr(of, name)) for name in names}
        if isinstance(of, dict):
            return [(key, values(value)) for key, value in of.items()]
        return [values(value) for value in of] if isinstance(of, list | tuple | deque) else of

    return repr(values(history))


def whole_state(run: Run) -> str:
    """The same of a history that is folded from every event."""
    history = RunHistory(run.recipe)
    for event in read(run.log_path()):
        history.take(event)
    return state_of(history)


def views(run: Run) -> list[str]:
    """What commands show of a run, without the time of day."""
    seen = accounts([run])
    watched = Watch(run)
    watched.read()
    moment = {key: value for key, value in snapshot(watched).to_dict().items() if key != "moment"}
    points = [repr(point) for point in watched.history.points]
    return [
        *(markdown(seen), to_json(seen), page(seen, now=1.8e9), str(diagnose(run)), json.dumps(moment)),
        *points,
    ]


changes = st.one_of(
    st.tuples(st.just("append"), st.integers(1, 150)),
    st.tuples(st.just("tear"), st.integers(1, 40)),
    st.tuples(st.just("cut"), st.integers(1, 30_000)),
    st.tuples(st.just("edit"), st.integers(0, 60_000)),
    st.tuples(st.just("begin anew"), st.integers(1, 60)),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(changes, min_size=1, max_size=6))
def test_whatever_happened_to_the_log_a_stored_history_changes_nothing(happened: list[tuple[str, int]]) -> None:
    with tempfile.TemporaryDirectory() as name, storing(Path(name) / "cache"):
        run = Run.create(Path(name) / "run", Run.open(GOLDEN).recipe)
        log, lines = run.log_path(), iter(LINES)
        for kind, number in [("append", 30), *happened]:
            data = log.read_bytes() if log.exists() else b""
            if kind == "append":  # as a restart does
                repair(log)
                with log.open("ab") as file:
                    file.writelines(line for line, _ in zip(lines, range(number), strict=False))
            elif kind == "tear":
                log.write_bytes(data[:-number])
            elif kind == "cut":
                log.write_bytes(data[: max(0, len(data) - number)])
            elif kind == "edit" and data:
                at = number % len(data)
                log.write_bytes(data[:at] + b"7" + data[at + 1 :])
            else:
                log.write_bytes(b"".join(LINES[:number]))
            assert state_of(LogHistory(run).read()) == whole_state(run)


def test_each_view_is_the_same_to_the_byte_with_and_without_it(tmp_path: Path) -> None:
    run = copied(tmp_path)
    with storing(tmp_path / "cache", least=1 << 40) as folder:
        without = views(run)
        assert not folder.exists()
    with storing(tmp_path / "cache") as folder:
        assert views(run) == without
        assert len(list(folder.iterdir())) == 2, "one for each rank's log"
        with mock.patch.object(RunHistory, "take", side_effect=AssertionError("an event was read again")):
            assert views(run) == without


def test_only_what_was_written_since_is_read(tmp_path: Path) -> None:
    run = copied(tmp_path)
    run.log_path().write_bytes(b"".join(LINES[:-1]))
    with storing(tmp_path / "cache"):
        read_any(run)
        run.log_path().write_bytes(b"".join(LINES))
        with mock.patch.object(RunHistory, "take", autospec=True, side_effect=RunHistory.take) as take:
            again = read_any(run)
    assert take.call_count == 1
    assert state_of(again) == whole_state(run)


@pytest.mark.parametrize(
    "damage", ["cut short", "one digit", "no JSON", "a list", "offset", "other code", "of another log"]
)
def test_a_stored_history_that_is_damaged_or_of_something_else_is_left_aside(tmp_path: Path, damage: str) -> None:
    run = copied(tmp_path)
    with storing(tmp_path / "cache") as folder:
        read_any(run)
        [path] = folder.iterdir()
        head, _, state = path.read_bytes().partition(b"\n")
        [code, offset, stamp, digest], seal = json.loads(head)
        others = {"offset": [code, offset - 1, stamp, digest], "other code": ["0" * 64, offset, stamp, digest]}
        others["of another log"] = [code, offset, None, "0" * 64]
        text = {
            "cut short": head + b"\n" + state[: len(state) // 2],
            "one digit": head + b"\n" + state[:-99] + b"\0" + state[-98:],
            "no JSON": b"\xff\xfe" + head,
            "a list": b"[]\n[]",
            "offset": json.dumps([others["offset"], seal]).encode() + b"\n" + state,
            **{
                name: json.dumps([about, reading._seal(about, state)]).encode() + b"\n" + state
                for name, about in others.items()
                if name != "offset"
            },
        }[damage]
        path.write_bytes(text)
        assert state_of(read_any(run)) == whole_state(run)
        assert path.read_bytes() != text, "it is stored anew"


def test_a_stored_history_of_other_types_is_refused_and_runs_nothing(tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> tuple[Any, ...]:
            return Path.touch, (tmp_path / "ran",)

    run = copied(tmp_path)
    with storing(tmp_path / "cache") as folder:
        read_any(run)
        [path] = folder.iterdir()
        about, _ = json.loads(path.read_bytes().partition(b"\n")[0])
        for state in (pickle.dumps(Hostile()), msgspec.msgpack.encode({"attempts": [{"number": "one"}]})):
            head = json.dumps([about, reading._seal(about, state)])
            path.write_bytes(head.encode() + b"\n" + state)
            assert state_of(read_any(run)) == whole_state(run)
    assert not (tmp_path / "ran").exists()


def test_nothing_is_written_where_there_is_no_cache_or_into_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copied(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in run.directory.rglob("*")}
    (tmp_path / "file").write_text("")
    for cache in (tmp_path / "file" / "cache", tmp_path / "cache"):
        with storing(cache):
            assert state_of(read_any(run)) == whole_state(run)
    with mock.patch.object(reading, "cache_folder", lambda: None), storing(tmp_path / "cache"):
        assert state_of(read_any(run)) == whole_state(run)
    assert {path: path.stat().st_mtime_ns for path in run.directory.rglob("*")} == before


def test_few_histories_stay_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_STORED", 3)
    with storing(tmp_path / "cache") as folder:
        for number in range(5):
            run = Run.create(tmp_path / f"run-{number}", Run.open(GOLDEN).recipe)
            run.log_path().write_bytes(b"".join(LINES[:40]))
            read_any(run)
        assert len(list(folder.iterdir())) == 3
