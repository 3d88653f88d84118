"""The coordinator of asynchronous workers: who trains on which batch, and which update is next.

A :class:`Coordinator` is one process (an actor of Ray) that all workers ask; it holds no tensors and imports no torch.

- **Batches.** Workers train on whole batches of the run's order, and batch ``b`` is at the positions ``b * batch_size``
  on. A number is assigned to one worker at a time, and counts as done when its update was made. What a worker had when
  it died goes to others. The last batch is worker 0's, when all others are done: it ends with the final weights.
- **Updates.** A push is numbered when it begins: that number is the step that the learning rate follows. The staleness
  of a push is how many updates were made since its worker pulled the weights that it was computed with.
- **The bound.** Where staleness is bounded, a push waits as long as it would make another worker's push exceed the
  bound: workers in flight are like jobs with deadlines (the version pulled plus the bound), and a push may go ahead if
  the others can still meet theirs, one by one. With bound 0 every worker computes its share of the same batch, and an
  update is made of all shares: the synchronous engine. Ho et al. 2013, "More Effective Distributed ML via a Stale
  Synchronous Parallel Parameter Server".
"""

from __future__ import annotations

import asyncio
import bisect
from collections.abc import Awaitable, Callable
from typing import Any


class Coordinator:
    """Assigns batches and numbers updates.

    Args:
        size: workers that the run has.
        staleness: the bound; None: there is none; 0: all workers make each update together.
    """

    def __init__(self, size: int, staleness: int | None = None) -> None:
        self.size, self.staleness = size, staleness
        self.description: dict[str, Any] | None = None  # None: worker 0 has not opened the run yet
        self._steps = 0
        self._begun = self._ended = 0  # updates
        self._next = 0  # the lowest batch that was never assigned
        self._returned: list[int] = []  # batches that were assigned in vain, in order
        self._assigned: dict[int, set[int]] = {}  # by worker
        self._pulled: dict[int, int] = {}  # of workers in flight: updates in the weights that they compute with
        self._pushing: dict[int, int] = {}  # by worker: the batch whose update has begun and not ended
        self._arrived: set[int] = set()  # workers whose share of the next update is there, with bound 0
        self._wishes: list[str] = []
        self._decided: dict[int, str | None] = {}
        self._is_paused = self._is_closed = False
        self._num_servers = 0
        self._keepers: set[int] = set()  # ranks of a launcher that keep a worker each, beside the first
        self._is_dismissed = False
        self._changed = asyncio.Condition()
        self._was_applied: Callable[[int], Awaitable[bool]] | None = None

    async def open(
        self, description: dict[str, Any], *, steps: int, step: int, unfinished: list[int], after: int
    ) -> None:
        """Open the run, after ``step`` updates of the batches below ``after`` without the ``unfinished``."""
        self.description, self._steps = description, steps
        self._begun = self._ended = step
        self._returned, self._next = sorted(unfinished), after
        await self._notify()

    async def join(self, rank: int, seconds: float) -> dict[str, Any] | None:
        """Admit a worker, in place of one of the same number; None while the run is not open, after ``seconds``."""
        await self.lose(rank)
        await self._wait(lambda: self.description is not None, seconds)
        return None if self.description is None else {**self.description, "step": self._ended}

    async def lose(self, rank: int) -> list[int]:
        """Give the batches of a lost worker back to the others; return their numbers.

        An update that it had begun counts as made where any server has it: nobody makes it twice.
        """
        batches = self._assigned.pop(rank, set())
        self._pulled.pop(rank, None)
        self._arrived.discard(rank)
        if rank == 0:
            self._is_paused = False
        if (batch := self._pushing.pop(rank, None)) is not None:
            if self._was_applied is None or await self._was_applied(batch):
                batches.discard(batch)
                self._ended += 1
            else:
                self._begun -= 1
        for returned in batches:
            bisect.insort(self._returned, returned)
        await self._notify()
        return sorted(batches)

    async def assign(self, rank: int, count: int = 1, seconds: float = 0.0) -> list[int] | None:
        """Assign up to ``count`` batches to a worker; None: the run is over.

        Where there are none it waits for one, at most ``seconds``: another worker may be lost.
        """
        await self._wait(lambda: self._is_over or self._has_batch(rank), seconds)
        if self._is_over:
            return None
        batches: list[int] = []
        while len(batches) < count and self._has_batch(rank):
            if self._returned:
                batches.append(self._returned.pop(0))
            else:
                batches.append(self._next)
                self._next += 1
            self._assigned.setdefault(rank, set()).add(batches[-1])
        return batches

    async def begin(self, rank: int, batch: int) -> tuple[int, int, list[int] | None]:
        """Begin an update with a worker's gradient of a batch, when it may be pushed.

        Returns:
            Its number, from 0; the updates that were begun since the worker pulled; and another batch for it, as of
            :meth:`assign`.
        """
        bound = self.staleness

        def may_push() -> bool:
            return not self._is_paused and (bound is None or self._leaves_room(rank, bound))

        await self._wait(may_push)
        update = self._begun
        staleness = update - self._pulled.get(rank, update)
        self._begun += 1
        self._pulled[rank] = self._begun - len(self._pushing)  # at least so many will be in what it pulls with this
        self._pushing[rank] = batch
        return update, staleness, await self.assign(rank)

    async def end(self, rank: int, batch: int, pulled: int) -> None:
        """End a worker's update, with which it pulled weights of ``pulled`` updates."""
        self._pushing.pop(rank, None)
        self._assigned.get(rank, set()).discard(batch)
        self._ended += 1
        self._pulled[rank] = pulled
        await self._notify()

    async def pull(self, rank: int, pulled: int) -> None:
        """Note that a worker begins to compute with weights of so many updates."""
        self._pulled[rank] = pulled

    async def rest(self, rank: int) -> None:
        """Note that a worker computes nothing: it pulls before it does again, and nobody waits for it meanwhile."""
        self._pulled.pop(rank, None)
        await self._notify()

    async def arrive(self, rank: int, step: int, wish: str | None = None) -> str | None:
        """Wait until all shares of update number ``step``, from 0, are there; with bound 0.

        Args:
            wish: the signal by which this worker was asked to end.

        Returns:
            That of any worker: all of them end after this update. ``closed``: the update is not made.
        """
        if step == self._ended:
            self._arrived.add(rank)
            if wish:
                self._wishes.append(wish)
            if len(self._arrived) == self.size:
                self._decided = {step: self._wishes[0] if self._wishes else None}
                self._arrived.clear()
                self._begun = self._ended = step + 1
                await self._notify()
        await self._wait(lambda: self._ended > step or self._is_closed)
        return self._decided.get(step) if self._ended > step else "closed"

    async def pause(self) -> dict[str, Any]:
        """Let no update begin until :meth:`resume`; return what is needed to go on from the servers' weights."""
        self._is_paused = True
        await self._notify()
        await self._wait(lambda: not self._pushing)
        if self.staleness == 0:
            return {"step": self._ended, "unfinished": [], "after": self._ended}
        unfinished = sorted([*self._returned, *(batch for batches in self._assigned.values() for batch in batches)])
        return {"step": self._ended, "unfinished": unfinished, "after": self._next}

    async def resume(self) -> None:
        """Let updates begin again."""
        self._is_paused = False
        await self._notify()

    async def close(self) -> None:
        """End the run: nothing more is assigned."""
        self._is_closed = True
        await self._notify()

    async def leave(self, rank: int) -> None:
        """Sign off a worker that ends well; the run ends with the first one, and with any if the bound is 0."""
        await self.lose(rank)
        if rank == 0 or self.staleness == 0:
            await self.close()

    async def enlist(self, count: int) -> tuple[int, int] | None:
        """Register more workers.

        Returns:
            The number of the first of them, and that of the servers; None: the bound is too narrow for so many.
        """
        first = self.size
        if self.staleness is not None and (self.staleness == 0 or self.staleness < first + count - 1):
            return None
        self.size += count
        return first, self._num_servers

    async def enter(self, rank: int, seconds: float) -> int:
        """Note that a rank of a launcher is there; wait for the servers, and return how many there are."""
        self._keepers.add(rank)
        await self._notify()
        await self._wait(lambda: self._num_servers > 0, seconds)
        return self._num_servers

    async def missing(self, seconds: float) -> list[int]:
        """Wait for all ranks of a launcher beside the first; return which are not there."""
        await self._wait(lambda: len(self._keepers) == self.size - 1, seconds)
        return sorted({*range(1, self.size)} - self._keepers)

    async def depart(self, rank: int, seconds: float) -> bool:
        """Note that a rank's worker has ended; wait for :meth:`dismiss`, and return whether it came."""
        self._keepers.discard(rank)
        await self._notify()
        await self._wait(lambda: self._is_dismissed, seconds)
        return self._is_dismissed

    async def dismiss(self, seconds: float) -> None:
        """Wait until the other ranks' workers have ended, then let all ranks end."""
        await self._wait(lambda: not self._keepers, seconds)
        self._is_dismissed = True
        await self._notify()

    async def watch_servers(self, servers: list[Any]) -> None:
        """Keep handles of the servers, to ask them whether a lost worker's update was made."""
        self._num_servers = len(servers)

        async def was_applied(batch: int) -> bool:
            has = await asyncio.gather(*(server.call.remote("has_applied", batch) for server in servers))
            if any(has):  # the others never get it, and count it all the same
                missing = [server for server, is_there in zip(servers, has, strict=True) if not is_there]
                await asyncio.gather(*(server.call.remote("skip", batch) for server in missing))
            return any(has)

        self._was_applied = was_applied

    @property
    def _is_over(self) -> bool:
        return self._is_closed or self._ended >= self._steps

    def _has_batch(self, rank: int) -> bool:
        """Return whether there is a batch for this worker now."""
        if self._returned and self._returned[0] < self._steps - 1:
            return True
        is_last = self._ended == self._steps - 1  # all others are done
        if self._returned or self._next == self._steps - 1:
            return rank == 0 and is_last
        return self._next < self._steps

    def _leaves_room(self, rank: int, bound: int) -> bool:
        """Return whether all workers in flight can still keep the bound after an update of this one."""
        begun = self._begun + 1
        pulled = {**self._pulled, rank: begun - len(self._pushing)}
        return all(begun + k <= version + bound for k, version in enumerate(sorted(pulled.values())))

    async def _wait(self, condition: Callable[[], bool], seconds: float | None = None) -> None:
        """Wait until a condition holds, at most ``seconds``."""
        if condition() or seconds == 0:
            return
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(condition), seconds)
            except TimeoutError:
                return

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()
