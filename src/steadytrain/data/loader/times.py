"""What a feed's threads did, and what whoever takes their batches has met: counted as it happens."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Times:
    """What threads did: images made, encoded bytes read, busy seconds by stage, seconds blocked on a full queue.

    ``cpu_seconds``: of the busy ones, those on a processor.
    """

    images: int = 0
    bytes: int = 0
    read_seconds: float = 0.0
    decode_seconds: float = 0.0
    augment_seconds: float = 0.0
    batch_seconds: float = 0.0
    blocked_seconds: float = 0.0
    cpu_seconds: float = 0.0

    def __add__(self, other: Times) -> Times:
        return Times(*(getattr(self, count.name) + getattr(other, count.name) for count in fields(self)))

    def add(self, other: Times) -> None:
        """Add another's counts."""
        self.images += other.images  # one by one: this runs for each piece
        self.bytes += other.bytes
        self.read_seconds += other.read_seconds
        self.decode_seconds += other.decode_seconds
        self.augment_seconds += other.augment_seconds
        self.batch_seconds += other.batch_seconds
        self.blocked_seconds += other.blocked_seconds
        self.cpu_seconds += other.cpu_seconds


@dataclass(slots=True)
class Asked:
    """What whoever takes results has met: requests, those that found nothing ready, and how many were, in all."""

    results: int = 0
    starved: int = 0
    ready: int = 0

    def note(self, ready: int) -> None:
        """One more request, when so many results were ready."""
        self.results += 1
        self.ready += ready
        if not ready:
            self.starved += 1
