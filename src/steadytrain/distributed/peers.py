"""The other processes that train a run with this one: ranks that wait for each other, or workers of servers."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

from steadytrain.distributed.world import World

T = TypeVar("T")


class Peers(Protocol):
    """The connection of a process to the others: :class:`.Group`, or :class:`.Cluster` of the asynchronous engine."""

    world: World

    @property
    def local_pids(self) -> list[int]:
        """Processes on this machine that train the same run."""
        ...

    @property
    def joined_attempt(self) -> int | None:
        """Number of the attempt that this process joins without locking the run; None: it opens one with the others."""
        ...

    @property
    def facts(self) -> dict[str, Any]:
        """Description of the processes for the events: how many, and where."""
        ...

    def first_value(self, value: T) -> T:
        """Return the first rank's value of a decision that all share; its own where nobody waits for another."""
        ...
