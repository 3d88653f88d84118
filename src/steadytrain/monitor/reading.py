"""A run's ledger and its evidence, read from its folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from steadytrain.errors import RunError
from steadytrain.events import Event, from_json
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.history import RunHistory
from steadytrain.monitor.ledger import Ledger
from steadytrain.run import Run

MAX_HELD = 20_000
# As an event log has them.
STARTED, STEP, ACCOUNTED = (f'{{"v":1,"kind":"{kind}",'.encode() for kind in ("Started", "Step", "Accounted"))


def ledger(run: Run) -> Ledger:
    """Where the seconds of a run went, also while it goes on: of its first rank.

    Raises:
        RunError: nothing was started in it yet.
    """
    book = RunHistory(run.recipe)
    path = run.directory / "events.jsonl"
    for event in settled(path) if path.exists() else ():
        book.take(event)
    _require_started(book, run)
    return book.ledger()


def evidence(run: Run) -> Evidence:
    """What is known of a run, of all of its ranks, also while it goes on.

    Raises:
        RunError: nothing was started in it yet.
    """
    book = read(run)
    _require_started(book, run)
    return book.evidence()


def read(run: Run) -> RunHistory:
    """The book of a run with all events that there are."""
    book = RunHistory(run.recipe)
    numbers = (path.stem.partition("-")[2] for path in run.directory.glob("events-*.jsonl"))
    for rank in [0, *sorted(int(number) for number in numbers if number.isdecimal())]:
        for event in run.events(rank):
            book.take(event)
    return book


def settled(path: Path) -> Iterator[Event]:
    """The events of a file without the steps that an ``Accounted`` has summed up: the same ledger, read faster.

    Args:
        path: the ``.jsonl`` file.
    """
    for line in _without_settled(path):
        if (event := from_json(line)) is not None:
            yield event


def _without_settled(path: Path) -> Iterator[bytes]:
    held: list[bytes] = []
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                break  # still being written
            if line.startswith(ACCOUNTED):
                held = [one for one in held if not one.startswith(STEP)]
            # No account sums up what an attempt before it did, nor anything in a log that has none.
            if line.startswith(STARTED) or len(held) >= MAX_HELD:
                yield from held
                held = []
            held.append(line)
    yield from held


def _require_started(book: RunHistory, run: Run) -> None:
    if book.started is None:
        raise RunError(f"{run.directory} has no events yet: nothing was trained in it; start it, then look at it again")
