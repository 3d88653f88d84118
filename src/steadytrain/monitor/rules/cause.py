"""What a cause is, and numbers in words."""

from __future__ import annotations

from dataclasses import dataclass

LEAST = 0.03
"""A cause that takes a smaller share of the wall time is not worth a person's time."""

TRUSTED = 0.07
"""Two passes that were measured differ indeed where it is by more than this part."""


@dataclass(frozen=True, kw_only=True)
class Cause:
    """One thing that a run's time goes into without need.

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

    def __post_init__(self) -> None:
        assert 0 <= self.share <= 1, f"{self.name}: a share of {self.share}"
        assert 0 <= self.saves <= 1, f"{self.name}: saves {self.saves}"


def percent(share: float) -> str:
    """A share in percent.

    >>> percent(0.433), percent(0.004), percent(0.0)
    ('43 %', '0.4 %', '0 %')
    """
    return f"{share * 100:.0f} %" if share >= 0.0095 or share == 0 else f"{share * 100:.1f} %"


def some(count: float, what: str, many: str = "") -> str:
    """A number and its noun; ``many`` is its plural where that does not end in a mere s.

    >>> some(1, "core"), some(1.25, "core"), some(12000, "image")
    ('1 core', '1.2 cores', '12,000 images')
    """
    told = f"{count:,.0f}" if float(count).is_integer() or count >= 100 else f"{count:.1f}"
    return f"{told} {what if told == '1' else many or what + 's'}"


def duration(seconds: float) -> str:
    """Seconds as people say them.

    >>> duration(0.0004), duration(0.0431), duration(3.21), duration(754)
    ('0.40 ms', '43.1 ms', '3.2 s', '12.6 min')
    """
    if seconds < 1:
        return f"{seconds * 1000:.{2 if seconds < 0.001 else 1}f} ms"
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds / 60:.1f} min"


def size(amount: float) -> str:
    """Bytes in the unit that fits.

    >>> size(67108864), size(2300), size(12)
    ('67.1 MB', '2.3 kB', '12 B')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= factor:
            return f"{amount / factor:.1f} {unit}"
    return f"{amount:.0f} B"


def within(share: float) -> float:
    """A share that a model gave, kept from 0 to 1."""
    return min(1.0, max(0.0, share))
