"""The feed in a process of its own: the threads that decode and the loop that trains share no interpreter.

Beside a loop that mostly launches small pieces of work, threads of the same interpreter take its lock from it again and
again. Here a child makes the same batches, byte for byte, in memory that both share. For most batches the loop calls
neither the system nor numpy: it looks at a board in that memory, and takes arrays that were made at the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from steadytrain.data.loader.batch import Batch, Buffers
from steadytrain.data.loader.batch_worker import LoadedBatch
from steadytrain.data.loader.child import Child
from steadytrain.data.loader.messages import BATCH, ERROR, meaning
from steadytrain.data.loader.shared_memory import fits
from steadytrain.data.loader.task import Task
from steadytrain.data.loader.times import Asked
from steadytrain.errors import FeedError


class Apart(Iterator[LoadedBatch]):
    """One iteration over the batches of a child. Not for several threads at once.

    Args:
        child: made for such a task, and of use to nobody else while this lasts.
        task: what is to be made, from its ``start`` to its ``stop``.
        pin: what of the batches has to be copied is put into page-locked memory as well.
        finished: given the child when the last batch was taken.
        asked: grows as batches are taken.

    An error in the child is raised in its turn, of the same type and in the same words.
    """

    def __init__(
        self,
        child: Child,
        task: Task,
        *,
        pin: bool,
        finished: Callable[[Child], object],
        asked: Asked | None = None,
    ) -> None:
        self.holds = False
        self.asked = asked or Asked()
        self.depth = child.depth
        self.taken = 0
        self._child = child
        self._task = task
        self._labels = None if fits(task.source.labels) else task.source.labels
        self._buffers = Buffers(task.shape, keep=1, pinned=pin)
        self._finished: Callable[[Child], object] | None = finished
        self._total = task.total
        self._first = 0  # of the child's entries
        self._released = 0
        self._told = 0  # of those released, the child knows of so many
        self._began = False

    def __next__(self) -> LoadedBatch:
        child = self._child
        if child.is_foreign:
            raise FeedError("the feed was begun in the process that this one was forked from: iterate it anew here")
        if self.taken == self._total:
            self._finish()
            raise StopIteration
        try:
            if not self._began:
                self.begin()
            self.asked.note(child.ready)
            kind, slot = meaning(child.take())
            more: Any = [] if kind == BATCH else child.message()
            if kind == ERROR:
                raise more
            batch = self._batch(slot)
        except BaseException:
            self.close()
            raise
        if not self.holds:
            self.release()
        return LoadedBatch(batch, more)

    @property
    def is_steady(self) -> bool:
        """Whether the child works as it will from now on: images that are to be kept are kept there."""
        return self._child.is_steady

    def begin(self) -> None:
        """Let the child begin, as soon as it has started."""
        if not self._began:
            self._child.wait()
            self._first = self._child.heard
            self._child.begin(self._task.start, self._task.stop)
            self._began = True

    def release(self, count: int = 1) -> None:
        """Make room for as many batches as were taken while this ``holds``."""
        self._released += count
        if self._released - self._told >= max(1, self.depth // 2):  # a few at a time: it costs as much as all else
            self._child.note(self._released - self._told)
            self._told = self._released

    def fill(self) -> None:
        """Wait until the child has made all that there is room for, or can make no more."""
        self.begin()
        self._child.note(self._released - self._told, wake=True)
        self._told = self._released
        end = self._released + self.depth
        self._child.wait_for(self._first + (end if self._total is None else min(end, self._total)))

    def close(self) -> None:
        """End the child; closing twice is fine."""
        if not self._child.is_foreign:
            self._child.end()

    def _batch(self, slot: int) -> Batch:
        batch = self._child.slots.each[slot]
        self.taken += 1
        lends = self._child.lends(slot)
        if lends and self._labels is None and self.taken != self._total:
            return batch
        n = self._task.span(self.taken - 1)[1]
        images, labels, ids, positions = batch.images[:n], batch.labels[:n], batch.ids[:n], batch.positions[:n]
        if not lends:  # somebody keeps batches: the child must not wait for him
            images, seen = self._buffers.take()[:n], images
            images[...] = seen
            labels, ids, positions = labels.copy(), ids.copy(), positions.copy()
        return Batch(images, labels if self._labels is None else self._labels[ids], ids, positions)

    def _finish(self) -> None:
        if self._finished is not None:
            self._finished(self._child)
            self._finished = None
