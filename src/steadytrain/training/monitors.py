"""What watches the loop while it runs: the machine is sampled, a standstill is noticed, and ranks watch each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from steadytrain.distributed.heartbeat import Heartbeat
from steadytrain.distributed.process_group import Group
from steadytrain.errors import StalledError
from steadytrain.events import EventLog
from steadytrain.machine.sampler import sampling
from steadytrain.monitor import stacks
from steadytrain.monitor.watchdog import Patience, Watchdog
from steadytrain.run import Run
from steadytrain.training.session import Session

START_SECONDS = 600.0
"""After so long the user is told that a start takes long. It is never ended: a download may take its time."""


@dataclass(frozen=True)
class _Start:
    """The progress of a start, of which nothing is known."""

    bucket: str = "startup"
    since: float = field(default_factory=time.perf_counter)
    step: int = 0


@contextmanager
def watch_start(run: Run, log: EventLog) -> Iterator[Callable[[], None]]:
    """Watch this thread until it has started and calls what this yields, or has failed."""
    with ExitStack() as watch:
        patience = Patience(slow=START_SECONDS, end=None)
        watch.enter_context(Watchdog(_Start(), log=log, folder=run.directory, patience=patience))
        yield watch.close


@contextmanager
def start_monitors(session: Session, group: Group | None = None) -> Iterator[None]:
    """Sample the machine and watch the loop of this thread, and the other ranks, until it is left."""
    minutes = session.recipe.every.stall_minutes
    dog = Watchdog(
        session.clock,
        log=session.log,
        folder=session.run.directory,
        patience=Patience(end=60 * minutes if minutes else None),
    )
    feeds = [session.feed] if session.val_feed is None else [session.feed, session.val_feed]

    def doing() -> dict[str, str]:
        records = {name: words for feed in feeds for name, words in feed.doing().items()}
        places = stacks.busy("feed-") | stacks.children()
        return {name: f"{words}, {places[name]}" for name, words in records.items() if name in places} or records

    def abandon(error: StalledError) -> None:
        for feed in feeds:
            feed.abandon(error)

    dog.feed, dog.abandon = doing, abandon
    with ExitStack() as stack:
        if group is not None:
            stack.enter_context(_watch_ranks(session, group.heartbeat, dog))
        stack.enter_context(sampling(session.log, ranks=[] if group is None else group.local_pids))
        stack.enter_context(dog)
        yield


@contextmanager
def _watch_ranks(session: Session, pulse: Heartbeat, dog: Watchdog) -> Iterator[None]:
    """Tell the other ranks where this one is, know where they are, and end with them."""
    clock, cursor = session.clock, session.state.cursor

    def place() -> tuple[str, float]:
        return f"{clock.bucket} of update {cursor.step + 1}", time.perf_counter() - clock.since

    before = pulse.end
    pulse.at, dog.ranks, pulse.end = place, pulse.where, dog.end_for_another
    try:
        yield
    finally:
        pulse.at, pulse.end = None, before
