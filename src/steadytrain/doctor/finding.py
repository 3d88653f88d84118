"""What a rule says of the facts, and sizes and shares in words."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["bad", "warn", "note"]
SEVERITIES: tuple[Severity, ...] = ("bad", "warn", "note")


@dataclass(frozen=True)
class Finding:
    """Something that is wrong or worth knowing.

    Args:
        rule: its name, the same on every machine; of several alike the last part says which: ``gpu-busy.1``.
        severity: ``bad`` (it does not work, or at a fraction of the speed), ``warn`` (it costs), ``note``.
        what: the fact.
        why: what it costs.
        remedy: what to do.
    """

    rule: str
    severity: Severity
    what: str
    why: str
    remedy: str


def size(amount: float) -> str:
    """Bytes in the decimal unit that fits.

    >>> size(67108864), size(25276514304), size(512)
    ('67.1 MB', '25.3 GB', '512 B')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(amount) >= factor:
            return f"{amount / factor:.1f} {unit}"
    return f"{amount:.0f} B"


def percent(share: float) -> str:
    """A share in percent.

    >>> percent(0.123), percent(0.004)
    ('12 %', '0.4 %')
    """
    return f"{share:.0%}".replace("%", " %") if share >= 0.0995 or share == 0 else f"{share * 100:.1f} %"


def some(count: float, what: str, many: str = "") -> str:
    """A number and its noun; ``many`` is its plural where that does not end in a mere s.

    >>> some(1, "core"), some(2, "core"), some(1.5, "core"), some(3, "process", "processes")
    ('1 core', '2 cores', '1.5 cores', '3 processes')
    """
    return f"{count:g} {what if count == 1 else many or what + 's'}"
