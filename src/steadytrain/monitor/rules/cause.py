"""A rule of the verdict, and the causes of lost time that it returns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from steadytrain.format import percent
from steadytrain.monitor.evidence import Evidence

LEAST = 0.03  # a cause that takes a smaller share of the wall time is not worth a person's time
LEAST_SAVED = 0.005  # share of the time: less rounds to nothing
NAMED = 0.2  # share of what others take: a process that takes so much is named in the sentence
LEAST_SECONDS = 1.0  # nor is one that takes less in all: equal runs differ by as much
STOP_OTHERS = "stop the other processes, wait until they end, or move this run to another machine"
REDUCE_THREAD = "reduce its work, let it sleep in between, or move it to another process"
TRUSTED = 0.07  # two measured passes count as different where they differ by more than this part


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One cause of lost time.

    Args:
        name: a stable word, such as ``decode``.
        share: of the wall time that it takes, 0 to 1.
        sentence: what it is, in one plain sentence.
        evidence: the figures behind it.
        change: the one flag or command that helps; empty where nothing can be done.
        saves: share of the wall time that the change saves: afterwards the same work takes ``wall * (1 - saves)``.
        because: the name of another cause that this one follows from; empty where it stands for itself.
        is_usual: every run has it, and it weighs in this one only because the run is short.
    """

    name: str
    share: float
    sentence: str
    evidence: tuple[str, ...] = ()
    change: str = ""
    saves: float = 0.0
    because: str = ""
    is_usual: bool = False

    @property
    def saving(self) -> str:
        """Return the saving of the change, in words; empty if that is not known."""
        return f"saves about {percent(self.saves)} of the time" if self.saves >= LEAST_SAVED else ""

    @property
    def advice(self) -> str:
        """The change, with what it saves."""
        return f"{self.change} ({self.saving})" if self.saving else self.change

    def __post_init__(self) -> None:
        assert 0 <= self.share <= 1, f"{self.name}: a share of {self.share}"
        assert 0 <= self.saves <= 1, f"{self.name}: saves {self.saves}"


OF_FEED = ("threads", "decode", "augment", "gather", "waiting", "epoch_gap")
"""Causes in the loader."""
OF_UPDATES = ("launch", "batch_size", "optimizer", "allocator")
"""Causes in what calls the parts of an update."""


@dataclass(frozen=True)
class VerdictRule:
    """A rule of the verdict: a row of the table in its file.

    Args:
        find: finds its causes in the evidence, by nothing else.
        explains: of its causes, those that others may follow from: the names of these others.
        slows: of its causes, those by which ``updates`` take longer than computing alone would, or ``all``: the
            loader's threads do as well, so that they do not show what it would do alone.
    """

    name: str
    find: Callable[[Evidence], Iterator[Cause]]
    explains: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    slows: Mapping[str, Literal["updates", "all"]] = field(default_factory=dict)


def name_process(process: Mapping[str, Any]) -> str:
    """Describe a process of a sample: its name, number and user.

    >>> name_process({"pid": 4242, "name": "python3", "user": "ann", "cores": 1.6})
    'python3 (pid 4242, user ann)'
    """
    user = f", user {process['user']}" if process.get("user") else ""
    return f"{process.get('name') or 'a process'} (pid {process.get('pid')}{user})"


def clip(share: float) -> float:
    """Clip a computed share to 0 to 1."""
    return min(1.0, max(0.0, share))
