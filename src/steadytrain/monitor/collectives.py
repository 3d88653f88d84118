"""Collectives that hang: which it is, which ranks wait in it and which have not begun it.

torch's flight recorder keeps the last collectives of a process. Each rank writes its own as JSON into the run's folder
before it leaves, and sends where it stands with its heartbeat.

>>> entry = RecordedCollective(7, "gloo:all_reduce", 0, ["0"], input_sizes=[[5, 2]])
>>> print(find_hangs({0: position([entry], 60.0, {}), 1: position([], 60.0, {})})[0].words)
gloo:all_reduce, number 7 of group 0, 10 values: rank 0 has waited in it for 60 s; not begun by rank 1
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

import msgspec

from steadytrain.errors import InputError
from steadytrain.files import read_text
from steadytrain.format import count, few

LEAST_SECONDS = 5.0
"""Seconds after which a collective may hang; before, other ranks are on their way to it."""

_NAME, _MOST_BYTES = "collectives-{}.json", 32 << 20
_OF_AN_ATTEMPT = (_NAME.format("*"), "torch-collectives-*", "traceback-*.txt")


class RecordedCollective(msgspec.Struct):
    """A collective of a rank, as torch records it: its number in its group, and whether it is over (``retired``)."""

    collective_seq_id: int
    profiling_name: str
    time_created_ns: int
    process_group: list[str]
    input_sizes: list[list[int]] = []
    retired: bool = False
    state: str = ""
    is_p2p: bool = False


class _Record(msgspec.Struct):
    """The file of a rank, one of ``ranks``, written at ``time``, in seconds since 1970; ``place``: of its loop."""

    rank: int
    ranks: int
    time: float
    entries: list[RecordedCollective] = []
    subgroups: dict[str, list[int]] = {}
    place: str = ""


class RankPosition(msgspec.Struct):
    """The oldest collective that a rank waits in (``number`` 0: none), and the last that it has begun, by group."""

    last: dict[str, int] = {}
    group: str = ""
    number: int = 0
    name: str = ""
    values: int = 0
    seconds: float = 0.0
    ranks: list[int] = []  # of the group that it waits in; none: all


class Hang(NamedTuple):
    """A collective that ranks wait in; the ``missing`` have not begun it; of the ``unknown``, nothing is known."""

    at: RankPosition
    waiting: list[int]
    missing: list[int]
    unknown: list[int]

    @property
    def words(self) -> str:
        """Say what hangs, and who is missing."""
        at, late = self.at, [rank for rank in self.missing if rank not in self.unknown]
        listed = (few([f"rank {rank}" for rank in ranks]) for ranks in (self.waiting, late, self.unknown))
        waiting, missing, unknown = listed
        absent = [f"not begun by {missing}"] * bool(late) + [f"nothing is known of {unknown}"] * bool(self.unknown)
        return (
            f"{at.name}, number {at.number} of group {at.group}, {count(at.values, 'value')}: {waiting}"
            f" {'has' if len(self.waiting) == 1 else 'have'} waited in it for {at.seconds:.0f} s; "
            + ("; ".join(absent) or "all ranks have begun it, and the network does not carry it")
        )


def record_path(folder: Path, rank: int) -> Path:
    """Return the file in a run's folder that has the last collectives of a rank."""
    return folder / _NAME.format(rank)


def remove_records(folder: Path) -> None:
    """Remove what an earlier attempt has recorded, and the tracebacks of its ranks."""
    for path in [path for pattern in _OF_AN_ATTEMPT for path in folder.glob(pattern)]:
        path.unlink(missing_ok=True)


def position(entries: Iterable[RecordedCollective], now: float, subgroups: Mapping[str, list[int]]) -> RankPosition:
    """Find where a rank stands at ``now``, in seconds since 1970; ``subgroups``: the ranks of groups of some only."""
    at = RankPosition(last={})
    for entry in sorted(entries, key=lambda entry: -entry.time_created_ns):
        if entry.is_p2p:
            continue
        group, number = (entry.process_group or [""])[0], entry.collective_seq_id
        at.last[group] = max(number, at.last.get(group, 0))
        if not entry.retired and entry.state != "completed":
            at.group, at.number, at.name, at.ranks = group, number, entry.profiling_name, subgroups.get(group, [])
            at.values, at.seconds = sum(map(prod, entry.input_sizes)), now - entry.time_created_ns / 1e9
    return at


def find_hangs(positions: Mapping[int, RankPosition | None]) -> list[Hang]:
    """Find the collectives that ranks wait in; the longest wait first. None: nobody knows where that rank stands."""
    stands = {rank: at for rank, at in positions.items() if at is not None}
    hangs: dict[tuple[str, int], Hang] = {}
    for at in sorted(stands.values(), key=lambda at: -at.seconds):
        if at.number and at.seconds >= LEAST_SECONDS:
            waiting = [rank for rank, other in stands.items() if (other.group, other.number) == (at.group, at.number)]
            begun = [rank for rank, other in stands.items() if other.last.get(at.group, 0) >= at.number]
            missing = sorted({*positions}.intersection(at.ranks or positions).difference(begun))
            unknown = [rank for rank in missing if rank not in stands]
            hangs.setdefault((at.group, at.number), Hang(at, sorted(waiting), missing, unknown))
    return list(hangs.values())


def read_hangs(folder: Path) -> list[str]:
    """Say what hung when the ranks of a run wrote their records into its folder, if anything did."""
    positions: dict[int, RankPosition | None] = {}
    places: dict[int, str] = {}
    for path in folder.glob(_NAME.format("*")):
        try:
            record = msgspec.json.decode(read_text(path, most=_MOST_BYTES), type=_Record)
        except (OSError, ValueError, InputError, msgspec.MsgspecError):  # no record of ours
            continue
        positions = dict.fromkeys(range(min(record.ranks, 1 << 16))) | positions
        positions[record.rank] = position(record.entries, record.time, record.subgroups)
        places[record.rank] = record.place
    return [
        "; ".join((hang.words, *(f"rank {rank} is in {places[rank]}" for rank in hang.missing[:4] if places.get(rank))))
        for hang in find_hangs(positions)
    ]
