"""Numbers, durations, names and tables as people read them: the one place that words them."""

from __future__ import annotations

import json
import math
import os
import re
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import zip_longest
from typing import Any
from unicodedata import combining, east_asian_width

from steadytrain.errors import InputError

NONE = "\N{EN DASH}"

Say = Callable[[str], None]
"""Takes a remark for the user, one line."""
OnProgress = Callable[[int, int], object]
"""Takes the amount of work done so far, and the total."""


def whole_number(text: str, below: int = 2**63) -> int | None:
    """Read a whole number of ASCII digits; None for anything else, however long it is.

    >>> whole_number("007"), whole_number("\u00b2"), whole_number("9" * 5000), whole_number("-1")
    (7, None, None, None)
    """
    digits = text.lstrip("0") or text[-1:]
    if not digits.isascii() or not digits.isdigit() or len(digits) > len(str(below)):
        return None
    value = int(digits)
    return value if value < below else None


def percent(fraction: float | None, digits: int | None = None) -> str:
    """Format a fraction in percent: whole, with one decimal where rounding would say 0 or 100 %, or with ``digits``.

    >>> percent(0.433), percent(0.004), percent(0.0), percent(0.92314, 2), percent(None), percent(float("nan"))
    ('43 %', '0.4 %', '0 %', '92.31 %', '–', 'not a number')
    >>> percent(0.994), percent(0.9995), percent(1.0)
    ('99 %', '99.9 %', '100 %')
    """
    if digits is None and fraction is not None and 0.995 <= fraction < 1:
        fraction, digits = math.floor(1000 * fraction) / 1000, 1
    if digits is None:
        digits = 1 if fraction is not None and 0 < fraction < 0.0095 else 0
    return number(None if fraction is None else 100 * fraction, digits, " %")


def number(value: float | None, digits: int = 0, unit: str = "") -> str:
    """Format a number with thousands separated and so many decimals.

    >>> number(12345.678), number(1.5, 4), number(12, unit=" s")
    ('12,346', '1.5000', '12 s')
    """
    if value is None:
        return NONE
    if not math.isfinite(value):
        return "not a number" if math.isnan(value) else "infinite"
    return f"{value:,.{digits}f}{unit}"


def count(amount: float, noun: str, plural: str = "") -> str:
    """Format an amount with its noun; ``plural`` where that is not the noun with an s.

    >>> count(1, "core"), count(1.25, "core"), count(12000, "image")
    ('1 core', '1.2 cores', '12,000 images')
    """
    words = f"{amount:,.0f}" if float(amount).is_integer() or amount >= 100 else f"{amount:.1f}"
    return f"{words} {noun if words == '1' else plural or noun + 's'}"


def count_images(n: int, effective_n: float | None = None) -> str:
    """Say of how many images a figure is, and how many independent ones those in groups are worth, where it is fewer.

    >>> count_images(200, 13.0), count_images(200, 199.0)
    ('200 images in groups, worth 13 independent ones', '200 images')
    """
    if effective_n is None or effective_n >= 0.98 * n:
        return count(n, "image")
    return f"{count(n, 'image')} in groups, worth {effective_n:,.0f} independent ones"


def per_rank(images: Sequence[int]) -> str:
    """Say how many images of a batch each rank computes, in the order of the ranks.

    >>> per_rank([128, 128]), per_rank([32, 32, 64])
    ('128 on each of 2 ranks', '32 to 64 on each of 3 ranks')
    """
    least, most = min(images), max(images)
    return f"{least:,}{f' to {most:,}' * (most > least)} on each of {len(images)} ranks"


def rate(value: float | None) -> str:
    """Format images per second, or seconds that stand in a column, with three digits at least.

    >>> rate(4.518), rate(98.76), rate(12345.6), rate(0.0431)
    ('4.52', '98.8', '12,346', '0.0431')
    """
    if value is None:
        return NONE
    if 1e-6 < value < 0.9995:
        return number(value, 2 - math.floor(math.log10(value)))
    return number(value, 0 if value >= 999.5 else 1 if value >= 9.995 else 2)


def duration(seconds: float | None) -> str:
    """Format a duration in the two largest units that matter; a whole number of seconds has no decimals.

    >>> duration(0.0004), duration(0.0431), duration(3.21), duration(59.4), duration(61), duration(3725)
    ('0.40 ms', '43.1 ms', '3.21 s', '59.4 s', '1 min 01 s', '1 h 02 min')
    >>> duration(200000), duration(0), duration(9), duration(None)
    ('2 d 07 h', '0 s', '9 s', '–')
    """
    if seconds is None or not math.isfinite(seconds):
        return NONE
    if seconds < 0.9995:
        return f"{seconds * 1000:.{2 if seconds < 0.001 else 1}f} ms" if seconds else "0 s"
    if seconds < 59.95:
        return f"{seconds:.{0 if isinstance(seconds, int) else 2 if seconds < 9.995 else 1}f} s"
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days} d {hours:02} h"
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {seconds_left:02} s"


def money(amount: float) -> str:
    """Format an amount of money with two decimals, and a small one with two digits.

    >>> money(1234.5), money(0.42), money(0.0376), money(0.00042), money(0.0), money(float("inf"))
    ('1,234.50', '0.42', '0.038', '0.00042', '0', 'infinite')
    """
    if not amount or not math.isfinite(amount):
        return number(amount)
    digits = 2 if abs(amount) >= 0.0995 else 1 - math.floor(math.log10(abs(amount)))
    return number(amount, min(digits, 9))


def score_name(is_multi_label: bool) -> str:
    """Return the name of the score that ranks evaluations."""
    return "mAP" if is_multi_label else "top-1"


def tells_top5(num_classes: int | None) -> bool:
    """Return whether top-5 accuracy means anything: among five classes or fewer it is always 1."""
    return num_classes is None or num_classes > 5


def clock(seconds: float) -> str:
    """Format a duration as on a clock.

    >>> clock(130), clock(3725), clock(90000)
    ('2:10', '1:02:05', '25:00:00')
    """
    minutes, seconds_left = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds_left:02}" if hours else f"{minutes}:{seconds_left:02}"


def size(num_bytes: float) -> str:
    """Format bytes in the decimal unit that fits.

    >>> size(12), size(2300), size(67108864), size(2.5e15)
    ('12 B', '2.3 kB', '67.1 MB', '2,500.0 TB')
    """
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= factor:
            return f"{num_bytes / factor:,.1f} {unit}"
    return f"{num_bytes:.0f} B"


def compact(value: float) -> str:
    """Format a number as short as it is exact to six digits.

    >>> compact(3.0), compact(0.1), compact(1e-05)
    ('3', '0.1', '1e-05')
    """
    return f"{value:.6g}"


def epoch(value: float) -> str:
    """Format a number of epochs; the last update of one may reach a little into the next.

    >>> epoch(12.0237), epoch(2.5), epoch(0.012)
    ('12', '2.5', '0.01')
    """
    return compact(round(value, 1 if value >= 1 else 2))


NO_DATE = "at no date"


def when(time: float) -> str:
    """Format a moment in UTC, so that reports made in different places agree.

    >>> when(0), when(-1e17)
    ('1970-01-01 00:00:00 UTC', 'at no date')
    """
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (OSError, OverflowError, ValueError):  # computed from durations that nobody can have waited
        return NO_DATE


def time_of_day(time: float) -> str:
    """Format a moment as the time of day here, with the date where that is not today's."""
    try:
        moment = datetime.fromtimestamp(time)
    except (OSError, OverflowError, ValueError):
        return NO_DATE
    return f"{moment:%H:%M:%S}" if moment.date() == datetime.now().date() else f"{moment:%Y-%m-%d %H:%M:%S}"


def clean(text: str) -> str:
    """Replace control characters, which could steer the reader's terminal, and passwords in addresses.

    >>> clean("a\\x1b[2Jb\\nc"), clean("https://me:s3cr3t@example.org/a")
    ('a?[2Jb c', 'https://...@example.org/a')
    """
    text = re.sub(r"(https?://|://(?=[^/?#\s@]*:))[^/?#\s]*@", r"\1...@", text)
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def print_note(text: str) -> None:
    """Print one line on standard error."""
    print(clean(text), file=sys.stderr, flush=True)


def printable(name: str) -> str:
    r"""Spell out the bytes of a file's name that are not UTF-8, so that it can be printed and stored.

    >>> print(printable("caf\udce9.jpg"))
    caf\xe9.jpg
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def few(names: Sequence[str], most: int = 5) -> str:
    """List the first of some names, and say how many more there are.

    >>> few(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    listed = ", ".join(printable(name) for name in names[:most])
    return f"{listed} and {len(names) - most:,} more" if len(names) > most else listed


def pairs(values: Mapping[str, object]) -> str:
    """Format ``key=value`` with spaces between; a value with anything odd in it is quoted as JSON, so it stays a line.

    >>> pairs({"a": 1, "b": "two words"})
    'a=1 b="two words"'
    """

    def quoted(text: str) -> str:
        is_plain = text.isprintable() and not any(c in ' "=\\' for c in text) and text
        return text if is_plain else json.dumps(text)

    return " ".join(f"{key}={quoted(str(value))}" for key, value in values.items())


def text_table(
    rows: Sequence[Sequence[str]], *, right: Collection[int] = (), least: Sequence[int] = (), gap: int = 2
) -> str:
    """Lay out a table: a line for each row. Control characters in cells are replaced, so that none makes a line.

    Args:
        rows: of as many cells each.
        right: columns that are flush at their right.
        least: widths that the first columns have at least.
        gap: spaces between columns.

    >>> print(text_table([["images/s", "batch"], ["9", "1024"]], right=[0]))
    images/s  batch
           9  1024
    """
    rows = [list(map(clean, row)) for row in rows]
    widths = [max(map(num_columns, column)) for column in zip(*rows, strict=True)]
    widths = [max(pair) for pair in zip_longest(widths, least, fillvalue=0)]

    def padded(row: Sequence[str]) -> Iterator[str]:
        for column, (cell, wide) in enumerate(zip(row, widths, strict=True)):
            yield " " * (wide - num_columns(cell)) + cell if column in right else pad(cell, wide)

    return "\n".join((" " * gap).join(padded(row)).rstrip() for row in rows)


def pad(text: str, columns: int) -> str:
    """Fill a text up with spaces to so many columns of a terminal."""
    return text + " " * (columns - num_columns(text))


def num_columns(text: str) -> int:
    """Count the columns that a terminal gives a text: Chinese characters have two, accents that stand apart none.

    >>> num_columns("cat"), num_columns("\u732b"), num_columns("e\u0301")
    (3, 2, 1)
    """
    if text.isascii():
        return len(text)
    return sum(0 if combining(c) else 1 + (east_asian_width(c) in "WF") for c in text)


def hide_columns(
    columns: Mapping[str, Sequence[str]], optional: Sequence[str], width: int, *, in_order: bool = False
) -> list[str]:
    """Return which columns of a table are left out so that its lines have at most ``width`` columns of text.

    Args:
        columns: cells by their head.
        optional: heads of those that may be left out, the most important first.
        in_order: where one has no room, no less important one is shown, though it had.

    >>> hide_columns({"run": ["a"], "images/s": ["123"], "epochs": ["7"]}, ["images/s", "epochs"], 12)
    ['images/s']
    """
    needed = {head: max(map(num_columns, (head, *cells))) + 2 for head, cells in columns.items()}
    room = width + 2 - sum(wide for head, wide in needed.items() if head not in optional)
    hidden: list[str] = []
    for head in optional:
        if needed[head] <= room and not (in_order and hidden):
            room -= needed[head]
        else:
            hidden.append(head)
    return hidden


def fit_table(lines: Sequence[Sequence[str]], width: int) -> str:
    """Join the cells of a table, heads first, to lines of at most ``width`` columns as far as single cells allow.

    Where the whole is too wide, the first cell of each row stands on a line above the others; where those are still
    too wide, each follows its head.

    >>> print(fit_table([["case", "top-1", "epochs"], ["lr=0.1", "91.2 %", "12"]], 18))
    case
      top-1   epochs
    lr=0.1
      91.2 %  12
    >>> print(fit_table([["case", "top-1", "epochs"], ["lr=0.1", "91.2 %", "12"]], 15))
    lr=0.1
      top-1 91.2 %
      epochs 12
    """
    lines = [list(map(clean, line)) for line in lines]
    text = text_table(lines)
    if max(map(num_columns, text.splitlines())) <= width:
        return text
    each_line = text_table([line[1:] for line in lines]).splitlines()
    if max(map(num_columns, each_line)) <= width - 2:
        return "\n".join(f"{line[0]}\n  {others}" for line, others in zip(lines, each_line, strict=True))
    blocks = []
    for name, *cells in lines[1:]:
        block = [""]
        for head, cell in zip(lines[0][1:], cells, strict=True):
            if block[-1] and len(block[-1]) + len(head) + len(cell) + 4 > width - 2:
                block.append("")
            block[-1] += f"{', ' if block[-1] else ''}{head} {cell}"
        blocks.append("\n  ".join([name, *block]))
    return "\n".join(blocks)


def wrap(text: str, width: int, first: str, rest: str | None = None) -> list[str]:
    """Break text into lines of at most ``width`` columns, no word of it broken; ``first`` and ``rest`` indent them."""
    rest = first if rest is None else rest
    text = re.sub(r"(python3 -c|\(cd ).*|\d %", lambda whole: whole[0].replace(" ", "\0"), clean(text))  # to be copied
    lines = textwrap.wrap(
        text,
        max(width - 1, len(rest) + 16),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace("\0", " ") for line in lines]


def fold(text: str, columns: int | None) -> str:
    """Break one line at spaces so that a terminal need not break it within words; None: leave it whole.

    >>> fold("steady: there is no file a.rec", 20)
    'steady: there is no\\n  file a.rec'
    >>> fold("forward 21 %, the rest 4 %", 26)
    'forward 21 %, the rest\\n  4 %'
    """
    return clean(text) if columns is None else "\n".join(wrap(text, columns, "", "  "))


class RowTable(list[dict[str, Any]]):
    """Rows of a table, each a dictionary of its columns.

    >>> RowTable([{"epoch": 1.0, "top1": 0.5}])[-1]["top1"]
    0.5
    """

    def to_frame(self) -> Any:
        """Return a pandas DataFrame. Raises InputError where pandas is not installed."""
        try:
            import pandas  # type: ignore[import-untyped]
        except ImportError:
            raise InputError(
                "to_frame() makes a DataFrame of pandas, which is not installed: pip install pandas"
            ) from None
        return pandas.DataFrame.from_records(list(self))
