"""The feed in a process of its own: the threads that decode and the loop that trains share no interpreter.

Beside a loop that mostly launches small pieces of work, threads of the same interpreter take its lock from it again and
again. Here a child makes the same batches, byte for byte; their images are views of memory that both share, and what
crosses a pipe for a batch is a few dozen bytes.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator

import numpy as np

from steadytrain.errors import FeedError
from steadytrain.feed.batch import Batch, Buffers
from steadytrain.feed.child import Child
from steadytrain.feed.fill import Made
from steadytrain.feed.shared import SPARE
from steadytrain.feed.task import Task
from steadytrain.feed.tickets import BATCH, ERROR, Ticket


class Apart(Iterator[Made]):
    """One iteration over the batches of a child. Not for several threads at once.

    Args:
        child: made for such a task, and of use to nobody else while this lasts.
        task: what is to be made, from its ``start`` to its ``stop``.
        pin: what of the batches has to be copied is put into page-locked memory as well.
        finished: given the child when the last batch was taken.

    An error in the child is raised in its turn, of the same type and in the same words.
    """

    def __init__(self, child: Child, task: Task, *, pin: bool, finished: Callable[[Child], object]) -> None:
        self.holds = False
        self.depth = child.depth
        self.taken = 0
        self._child = child
        self._task = task
        self._labels = task.source.labels
        self._buffers = Buffers(task.shape, keep=1, pinned=pin)
        self._finished: Callable[[Child], object] | None = finished
        self._total = task.total
        self._ready: deque[Made | BaseException] = deque()
        self._made = 0
        self._released = 0
        self._told = 0  # of those released, the child knows of so many
        self._began = False

    def __next__(self) -> Made:
        child = self._child
        if child.is_foreign:
            raise FeedError("the feed was begun in the process that this one was forked from: iterate it anew here")
        if not self._ready:
            self._hear()
        made = self._ready.popleft()
        if isinstance(made, BaseException):
            child.end()
            raise made
        self.taken += 1
        child.lent += 1
        if child.lent - len(child.returned) > SPARE:  # somebody keeps batches: the child must not wait for him
            made = self._copied(made)
        if not self.holds:
            self.release()
        return made

    @property
    def is_steady(self) -> bool:
        """Whether the child works as it will from now on: images that are to be kept are kept there."""
        return self._child.is_steady

    def begin(self) -> None:
        """Let the child begin, as soon as it has started."""
        if not self._began:
            self._child.wait()
            self._child.begin(self._task.start, self._task.stop)
            self._began = True

    def release(self, count: int = 1) -> None:
        """Make room for as many batches as were taken while this ``holds``."""
        self._released += count
        if self._released - self._told >= max(1, self.depth // 2):  # waking the child costs as much as a small batch
            self._child.note(self._released - self._told)
            self._told = self._released

    def fill(self) -> None:
        """Wait until the child has made all that there is room for, or can make no more."""
        self.begin()
        self._child.note(self._released - self._told, wake=True)
        self._told = self._released
        end = self._released + self.depth
        end = end if self._total is None else min(end, self._total)
        while self._made < end and not any(isinstance(made, BaseException) for made in self._ready):
            self._hear()

    def close(self) -> None:
        """End the child; closing twice is fine."""
        if not self._child.is_foreign:
            self._child.end()

    def _hear(self) -> None:
        """Wait for batches: all that are there are looked at together, while that is still in the core's cache."""
        try:
            self.begin()
            if self._made == self._total:
                self._finish()
                raise StopIteration
            for ticket, more in self._child.tickets():
                self._ready.append(pickle.loads(more) if ticket.kind == ERROR else self._batch(ticket, more))
        except StopIteration:
            raise
        except BaseException:
            self.close()
            raise

    def _batch(self, ticket: Ticket, more: bytes) -> Made:
        first, n = self._task.span(self._made)
        self._made += 1
        slots = self._child.slots
        ids = slots.ids[ticket.slot][:n].copy()
        images = slots.lend(ticket.slot, self._child.returned)
        if n < len(images):
            images = images[:n]
        batch = Batch(images, self._labels[ids], ids, np.arange(first, first + n))
        return Made(batch, [] if ticket.kind == BATCH else pickle.loads(more))  # from our own child

    def _copied(self, made: Made) -> Made:
        batch = made.batch
        images = self._buffers.take()[: len(batch)]
        images[...] = batch.images
        return Made(Batch(images, batch.labels, batch.ids, batch.positions), made.bad)

    def _finish(self) -> None:
        if self._finished is not None:
            self._finished(self._child)
            self._finished = None
