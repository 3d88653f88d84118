"""What goes on beside the loop while it runs: the machine is sampled, and a standstill does not stay unnoticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from steadytrain.errors import StalledError
from steadytrain.training.session import Session
from steadytrain.watch import stacks
from steadytrain.watch.sample import sampling
from steadytrain.watch.watchdog import Patience, Watchdog


@contextmanager
def watched(session: Session) -> Iterator[None]:
    """Sample the machine and watch the loop of this thread, until it is left."""
    minutes = session.recipe.every.stall_minutes
    dog = Watchdog(
        session.clock,
        log=session.log,
        folder=session.run.directory,
        patience=Patience(end=60 * minutes if minutes else None),
    )
    feeds = [session.feed] if session.val_feed is None else [session.feed, session.val_feed]

    def doing() -> dict[str, str]:
        at = {name: words for feed in feeds for name, words in feed.doing().items()}
        places = stacks.busy("feed-")
        return {name: f"{words}, {places[name]}" for name, words in at.items() if name in places} or at

    def abandon(error: StalledError) -> None:
        for feed in feeds:
            feed.abandon(error)

    dog.feed, dog.abandon = doing, abandon
    with sampling(session.log), dog:
        yield
