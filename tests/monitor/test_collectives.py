"""Which collective hangs, and who is missing in it, by the records of the ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from steadytrain.monitor.collectives import (
    RankPosition,
    RecordedCollective,
    find_hangs,
    position,
    read_hangs,
    record_path,
    remove_records,
)


def _entry(number: int, *, group: str = "0", over: bool = False, began: float = 0.0) -> dict[str, Any]:
    return {
        "collective_seq_id": number,
        "profiling_name": "nccl:all_reduce",
        "time_created_ns": int(began * 1e9),
        "process_group": [group, "default_pg"],
        "input_sizes": [[64, 3, 7, 7]],
        "retired": over,
        "state": "scheduled",
        "is_p2p": False,
        "what_a_later_torch_adds": {"a": 1},
    }


def _position(
    *entries: dict[str, Any], now: float = 60.0, subgroups: dict[str, list[int]] | None = None
) -> RankPosition:
    kept = RecordedCollective.__struct_fields__
    return position(
        [RecordedCollective(**{name: entry[name] for name in kept}) for entry in entries], now, subgroups or {}
    )


def test_the_oldest_collective_that_is_not_over_counts() -> None:
    at = _position(_entry(1, over=True), _entry(2, began=10.0), _entry(3, began=20.0), _entry(8, group="1", over=True))
    assert (at.group, at.number, at.values, at.seconds, at.last) == ("0", 2, 9408, 50.0, {"0": 3, "1": 8})
    assert _position().number == 0


@pytest.mark.parametrize(
    ("third", "missing"),
    [(_position(_entry(1, over=True)), [2]), (None, [2]), (_position(_entry(2)), []), (_position(_entry(3)), [])],
)
def test_missing_is_who_has_not_begun_it(third: RankPosition | None, missing: list[int]) -> None:
    waiting = _position(_entry(2))
    hang = find_hangs({0: waiting, 1: waiting, 2: third})[0]
    assert hang.at.number == 2 and hang.missing == missing and hang.waiting[:2] == [0, 1]
    late = "nothing is known of rank 2" if third is None else "not begun by rank 2"
    assert hang.words.endswith(f"; {late}" if missing else "the network does not carry it")


def test_ranks_outside_a_group_are_not_missing_in_it() -> None:
    """Ranks 0 and 1, and 2 and 3, exchange apart; rank 1 is late, and what it exchanged before is forgotten."""
    own = _entry(5, group="2", over=True)
    waiting = _position(_entry(9, group="1"), subgroups={"1": [0, 1]})
    (hang,) = find_hangs({0: waiting, 1: _position(own), 2: _position(own), 3: None})
    assert hang.waiting == [0] and hang.missing == [1] and hang.words.endswith("; not begun by rank 1")
    (hang,) = find_hangs({0: _position(_entry(9, group="1")), 1: None, 2: _position(own), 3: None})
    assert hang.words.endswith("; not begun by rank 2; nothing is known of rank 1, rank 3")


def test_ranks_in_different_collectives_are_missing_in_each_others() -> None:
    hangs = find_hangs({0: _position(_entry(2)), 1: _position(_entry(1, group="1"))})
    assert [(hang.at.group, hang.missing) for hang in hangs] == [("0", [1]), ("1", [0])]


def test_what_has_just_begun_is_no_hang() -> None:
    assert find_hangs({0: _position(_entry(2, began=58.0)), 1: None}) == []


def test_records_are_read_from_the_folder_and_strangers_files_are_not(tmp_path: Path) -> None:
    about = {"ranks": 3, "time": 60.0}
    for rank, entries in ((0, [_entry(2)]), (1, [_entry(1, over=True)])):  # the third was killed
        record_path(tmp_path, rank).write_text(
            json.dumps({**about, "rank": rank, "entries": entries, "place": f"f (a.py:{rank})"})
        )
    for name, text in (("8", "[]"), ("9", '{"rank": 9, "ranks": 9, "time": "x"}'), ("10", "\x80")):
        (tmp_path / f"collectives-{name}.json").write_bytes(text.encode("latin-1"))
    (words,) = read_hangs(tmp_path)
    assert words == (
        "nccl:all_reduce, number 2 of group 0, 9,408 values: rank 0 has waited in it for 60 s;"
        " not begun by rank 1; nothing is known of rank 2; rank 1 is in f (a.py:1)"
    )
    for name in ("traceback-1.txt", "torch-collectives-1", "events.jsonl"):
        (tmp_path / name).touch()
    remove_records(tmp_path)
    assert read_hangs(tmp_path) == [] and [path.name for path in tmp_path.iterdir()] == ["events.jsonl"]
