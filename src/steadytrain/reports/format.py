"""Numbers as people read them."""

from __future__ import annotations

import math
from datetime import UTC, datetime

NONE = "\N{EN DASH}"
LAYOUTS = {"channels-last": "NHWC", "channels-first": "NCHW"}
"""Of images in memory, in short."""


def percent(fraction: float | None, digits: int = 2) -> str:
    """A fraction in percent; a dash where there is none.

    >>> percent(0.92314), percent(None), percent(float("nan"))
    ('92.31 %', '–', 'not a number')
    """
    return number(None if fraction is None else 100 * fraction, digits, " %")


def number(value: float | None, digits: int = 0, unit: str = "") -> str:
    """A number with thousands separated and so many decimals.

    >>> number(12345.678), number(1.5, 4), number(12, unit=" s")
    ('12,346', '1.5000', '12 s')
    """
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    return f"{value:,.{digits}f}{unit}"


def rate(images_per_second: float | None) -> str:
    """Images a second, three digits at least.

    >>> rate(4.518), rate(98.76), rate(12345.6)
    ('4.52', '98.8', '12,346')
    """
    if images_per_second is None:
        return NONE
    return number(images_per_second, 0 if images_per_second >= 999.5 else 1 if images_per_second >= 9.995 else 2)


def duration(seconds: float | None) -> str:
    """A duration in the two largest units that say something.

    >>> duration(0.412), duration(59.4), duration(61), duration(3725), duration(200000)
    ('0.41 s', '59.4 s', '1 min 01 s', '1 h 02 min', '2 d 07 h')
    """
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 59.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def size(num_bytes: float) -> str:
    """Bytes in decimal units.

    >>> size(950), size(1234567), size(98.5e6)
    ('950 B', '1.2 MB', '98 MB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} {unit}" if unit == "B" or num_bytes >= 9.95 else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:,.1f} TB"


def compact(value: float) -> str:
    """A number as short as it is exact to six digits.

    >>> compact(3.0), compact(0.1), compact(1e-05)
    ('3', '0.1', '1e-05')
    """
    return f"{value:.6g}"


def epoch(value: float) -> str:
    """A number of epochs; the last update of one may reach a little into the next.

    >>> epoch(12.0237), epoch(2.5), epoch(0.012)
    ('12', '2.5', '0.01')
    """
    return compact(round(value, 1 if value >= 1 else 2))


def when(time: float) -> str:
    """A moment, in UTC, so that reports made in different places agree.

    >>> when(0)
    '1970-01-01 00:00:00 UTC'
    """
    return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"
