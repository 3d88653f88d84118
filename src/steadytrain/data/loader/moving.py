"""One iteration of a feed that finds out, as it goes, where its threads should live, and moves there.

It begins with threads, measures what they cost whoever iterates, and may go on in a process, or come back from there.
What stands at a position depends on the position alone, so a move changes nothing of it: threads that are to be left
make the batches that they have begun, and the process those that follow.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator
from statistics import median
from typing import Protocol

from steadytrain.data.loader.batch_worker import LoadedBatch
from steadytrain.data.loader.child import Child
from steadytrain.data.loader.choice import LONGEST_SECONDS, Choice, Gauge, judge, stay, worth_trying
from steadytrain.data.loader.pipeline import Stream
from steadytrain.data.loader.subprocess_loader import Apart
from steadytrain.data.loader.worker_scratch import WorkerScratch
from steadytrain.errors import SteadyError

SETTLE_BATCHES, SETTLE_SECONDS = 64, 2.0
LEAST_BATCHES = 10_000  # a shorter iteration would not earn back what a trial costs

Here = Stream[WorkerScratch, LoadedBatch]
Seconds = list[float]


class Home(Protocol):
    """What a feed does for its iteration."""

    def here(self, number: int) -> Here:
        """Its batches from ``number`` on, made by threads of this process."""

    def there(self, child: Child, number: int) -> Apart:
        """The same by those of a child."""

    def child(self) -> Child:
        """A child, which is being started. Raises FeedError."""

    def is_steady(self) -> bool:
        """Whether it works as it will from now on: images that are to be kept are kept."""

    def chosen(self, choice: Choice) -> None:
        """Told once, unless the iteration ends before."""


def moving(home: Home) -> Iterator[LoadedBatch]:
    """The batches of a feed."""
    # Nowhere is an iteration closed here: the end of its last reference ends it, also in a garbage collector's run,
    # which must not wait for threads.
    here = home.here(0)
    threads, choice = yield from _look(home, here)
    child = None
    if choice is None:
        child, choice = yield from _started(home, here, threads)
    if child is None or choice is not None:
        home.chosen(choice or stay("the iteration was too short"))
        yield from _all(here)
        return
    number = here.stop_beginning()
    there = home.there(child, number)
    there.begin()
    yield from _all(here)
    del here
    process = Gauge(there.depth)
    yield from _settled(there, lambda: there.is_steady)
    yield from _measured(there, process)
    if not process.done:
        return
    choice = judge(threads, process)
    home.chosen(choice)
    if choice.place == "process":
        yield from _all(there)
        return
    number += there.taken
    there.close()
    yield from _all(home.here(number))


def _look(home: Home, here: Here) -> Generator[LoadedBatch, None, tuple[Gauge, Choice | None]]:
    """Measure threads; a choice only where nothing else need be tried."""
    seconds = yield from _settled(here, home.is_steady)
    threads = Gauge(here.depth)
    if seconds > LONGEST_SECONDS:
        return threads, stay(f"a batch takes the loop {1000 * seconds:.0f} ms")
    yield from _measured(here, threads)
    why = worth_trying(threads, made_here=here.is_made_here) if threads.done else "the iteration was too short"
    return threads, None if why is None else stay(why, threads)


def _started(
    home: Home, here: Here, threads: Gauge
) -> Generator[LoadedBatch, None, tuple[Child | None, Choice | None]]:
    """A child that has started, while batches go on coming from here."""
    try:
        child = home.child()
        yield from _all(here, until=lambda: child.is_ready)
        child.wait()
    except SteadyError as error:
        return None, stay(str(error), threads)
    return child, None


def _all(batches: Here | Apart, until: Callable[[], bool] = lambda: False) -> Iterator[LoadedBatch]:
    for made in batches:
        yield made
        if until():
            return


def _settled(batches: Here | Apart, is_steady: Callable[[], bool]) -> Generator[LoadedBatch, None, float]:
    """Go on until all is as it will be; the time that the loop takes for a batch."""
    end, own = time.perf_counter() + SETTLE_SECONDS, Seconds()
    for made in batches:
        since = time.perf_counter()
        yield made
        now = time.perf_counter()
        own.append(now - since)
        if len(own) == SETTLE_BATCHES and median(own) > LONGEST_SECONDS:
            break
        if len(own) >= SETTLE_BATCHES and now >= end and is_steady():
            break
    return median(own[:SETTLE_BATCHES]) if own else 0.0


def _measured(batches: Here | Apart, gauge: Gauge) -> Iterator[LoadedBatch]:
    """Go on until the gauge has what it needs."""
    while not gauge.done:
        if gauge.place == 0:
            batches.fill()
            batches.holds = True
        elif gauge.place == gauge.depth:
            batches.holds = False
            batches.release(gauge.depth)
        asked = time.perf_counter()
        made = next(batches, None)
        if made is None:
            return
        given = time.perf_counter()
        yield made
        gauge.add(own=time.perf_counter() - given, called=given - asked)
