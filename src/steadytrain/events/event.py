"""What every event has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Event:
    """When, in which attempt (1 for the first start, 2 after one restart, ...) and on which rank.

    Attempt 0 is none: what was measured while nobody trained the run.
    """

    time: float = 0.0
    attempt: int = 0
    rank: int = 0

    @property
    def kind(self) -> str:
        """The name of the event's type, as in the file."""
        return type(self).__name__

    def to_dict(self) -> dict[str, Any]:
        """The JSON object of this event's line."""
        return {"v": VERSION, "kind": self.kind, **vars(self)}


@dataclass(frozen=True, kw_only=True)
class Unknown(Event):
    """A kind that this version does not know, kept whole."""

    name: str
    told: Mapping[str, Any]

    @property
    def kind(self) -> str:
        return self.name

    def to_dict(self) -> dict[str, Any]:
        return dict(self.told)
