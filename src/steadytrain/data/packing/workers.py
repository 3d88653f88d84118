"""Encoding in this process or in children, results in order: what is done, and what becomes of a file that kills.

On small images, where Python's own lock ends what threads can give, two children are 1.9 times as fast as one thread,
and two threads slower than one.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from steadytrain.data.packing.encode import Packed, Settings, pack_file
from steadytrain.data.packing.pixel_stats import Counts, PixelCount
from steadytrain.data.packing.worker_pool import do_all
from steadytrain.data.sources.listing import Piece

Task = Sequence[tuple[str | Piece, bool]]
"""Images to be encoded, files or pieces of files, each with whether its pixels are counted."""


@dataclass(frozen=True, slots=True)
class Done:
    """For each image of a task what to store, or why not; and the counts of the pixels to be counted."""

    results: tuple[Packed | str, ...]
    counts: Counts


def encode(task: Task, settings: Settings) -> Done:
    """Do one task, here."""
    count = PixelCount()
    results = tuple(pack_file(place, settings, count if counted else None) for place, counted in task)
    return Done(results, count.totals())


def encode_all(tasks: Iterable[Task], settings: Settings, *, workers: int) -> Generator[Done]:
    """Do tasks in order, in this process (``workers`` 0 or 1) or in that many children.

    Whatever their number, results come in the order of the tasks; a task on which a child died comes in parts. A file
    on which two children have died is given up, with the reason. Close the iterator to end it early.

    Raises:
        FailedError: no child could be started.
    """
    yield from do_all(tasks, partial(encode, settings=settings), _died, workers=workers if workers > 1 else 0)


def _died(_: tuple[str | Piece, bool], ending: str) -> Done:
    return Done((f"the decoder died of it ({ending})",), PixelCount().totals())
