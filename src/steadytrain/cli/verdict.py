"""A report of ``steady check`` as text: the verdict, what was found, what to do."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from steadytrain.cli.lines import clean, size_of
from steadytrain.data.checking.findings import KINDS, Finding, Report

MOST = 20
_INDENT = "  "
_CLASSES = 8


def verdict(report: Report) -> str:
    """The first line: whether all is well, and else how much is not."""
    what, n = report.what, report.num_images
    if n:
        what = f"{what}, {n:,} image{'s' * (n != 1)}" if report.of_files else f"{n:,} {what}"
    where = clean(report.path)
    errors, warnings = report.findings.num("error"), report.findings.num("warning")
    if not errors + warnings:
        return f"fine: {where}: {what}"
    told = ", ".join(f"{n:,} {word}{'s' * (n != 1)}" for n, word in ((errors, "error"), (warnings, "warning")) if n)
    both = errors + warnings
    return f"{both:,} finding{'s' * (both != 1)} ({told}): {where}: {what}"


def text(report: Report, *, width: int = 80) -> str:
    """All of a report, in lines of at most ``width`` columns (paths and commands are not broken)."""
    lines = [verdict(report), *_about(report, width)]
    for kind, count, kept in report.findings.by_kind():
        lines += ["", *_kind(kind, count, kept[:MOST], width, files=report.of_files)]
    if report.remedies:
        lines += ["", "to do"]
    for do, why in report.remedies:
        lines += [f"{_INDENT}{clean(do)}", *_wrapped(why, width, 2 * _INDENT)]
    return "\n".join(lines)


def _about(report: Report, width: int) -> list[str]:
    """What is in it."""
    told = [size_of(report.bytes)] if report.bytes else []
    if report.num_sound < report.num_images:
        told.append(f"{report.num_sound:,} of {report.num_images:,} can be used")
    if report.formats:
        told.append(", ".join(f"{count:,} {name}" for name, count in report.formats.items()))
    if report.width and report.height:
        told.append(f"{_range(report.width)} wide, {_range(report.height)} high")
    lines = _wrapped("; ".join(told), width, _INDENT)
    if report.classes:
        lines += _wrapped(_classes(report.classes, report.split), width, _INDENT)
    for fact in report.facts:
        lines += _wrapped(clean(fact), width, _INDENT)
    return lines


def _classes(classes: dict[str, int], split: str) -> str:
    n = len(classes)
    head = f"{n:,} class{'es' * (n != 1)}{f' of {split}' if split else ''}"
    if n > _CLASSES:
        return f"{head}, {_range((min(classes.values()), max(classes.values())))} images each"
    return f"{head}: " + ", ".join(f"{clean(name)} {count:,}" for name, count in classes.items())


def _kind(kind: str, count: int, kept: list[Finding], width: int, *, files: bool) -> Iterator[str]:
    """One kind of finding: a heading, what becomes of it, and a line for each."""
    told = KINDS[kind]
    times = f" ({count:,})" if count > 1 else ""
    yield from _wrapped(f"{told.severity}: {told.title}{times}", width, "", "    ")
    yield from _wrapped(told.packed if files and told.packed else told.then, width, _INDENT)
    if any(one.offset is not None for one in kept):
        yield from _table(kept, width)
    else:
        for one in kept:
            words = ": ".join(clean(part) for part in (one.name or "", one.detail) if part)
            yield from _wrapped(words, width, 2 * _INDENT, 3 * _INDENT)
    if count > len(kept):
        yield f"{2 * _INDENT}and {count - len(kept):,} more; --json names them all"


def _table(kept: list[Finding], width: int) -> Iterator[str]:
    """Findings by byte, record and id, right-aligned, with what is known of each behind."""
    rows = [("byte", "record", "id", "")]
    rows += [(_number(one.offset), _number(one.record), _id(one.id), clean(one.detail)) for one in kept]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        start = 2 * _INDENT + "  ".join(cell.rjust(size) for cell, size in zip(row, widths, strict=False))
        yield from _wrapped(row[3], width, f"{start}  ", " " * (len(start) + 2)) or [start]


def _number(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"


def _id(value: int | None) -> str:
    return "-" if value is None else str(value)


def _wrapped(words: str, width: int, first: str, rest: str | None = None) -> list[str]:
    rest = first if rest is None else rest
    room = max(width - 1, len(rest) + 16)
    return textwrap.wrap(
        words, room, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _range(pair: tuple[int, int]) -> str:
    return f"{pair[0]:,}" if pair[0] == pair[1] else f"{pair[0]:,} to {pair[1]:,}"
