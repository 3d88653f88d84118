"""What a stream's threads do: jobs, in pieces."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from steadytrain.data.loader.times import Times

R = TypeVar("R")
W = TypeVar("W", bound="Workspace")


class Workspace(Protocol):
    """What one thread has for itself: memory to work in, and what it did in the piece that it is at.

    ``closed`` is given to it: from then on nobody wants what it makes, and a piece may raise.
    """

    times: Times
    closed: threading.Event


@dataclass(slots=True, eq=False)
class Job(Generic[W, R]):
    """Something made in pieces, each by one thread, in any order; ``finish`` runs once after the last of them.

    It gives ``count`` results, of as many numbers that follow each other.
    """

    pieces: list[Callable[[W], None]]
    finish: Callable[[], Sequence[R]]
    count: int = 1
    left: int = field(init=False)
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self.left = len(self.pieces)
        self.pieces.reverse()  # they are popped from the end


@dataclass(frozen=True, eq=False)
class Failure:
    """What a job has raised, for whoever takes its results."""

    error: BaseException


def attempt(make: Callable[[], R]) -> R | Failure:
    """What something makes, or that it cannot."""
    try:
        return make()
    except BaseException as error:  # noqa: BLE001 - a thread's edge: it reaches the consumer
        return Failure(error)
