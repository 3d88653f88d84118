"""A comparison as lines for a terminal, and as one JSON document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from steadytrain.config.plain import plain
from steadytrain.doctor.compare import Comparison, Difference, ratio, said
from steadytrain.doctor.document import VERSION
from steadytrain.doctor.finding import Finding
from steadytrain.doctor.text import Line, finding_lines, title_line, wrapped

KIND = "steadytrain doctor comparison"
MOST = 3  # differences in the line that tells what matters most


def comparison_document(old: Mapping[str, Any], new: Mapping[str, Any], made: Comparison) -> dict[str, Any]:
    """Kind, version, which two, the findings of one only, and the facts that differ, what matters first."""
    return {
        "kind": KIND,
        "version": VERSION,
        "old": _who(old),
        "new": _who(new),
        "findings": {"only_old": plain(made.only_old), "only_new": plain(made.only_new)},
        "differences": [{**plain(one), "matters": bool(one.meaning)} for one in made.facts],
    }


def told_comparison(old: Mapping[str, Any], new: Mapping[str, Any], made: Comparison, *, width: int) -> list[Line]:
    """What differs, old -> new: what matters most, findings, what matters for speed and what it means, the rest.

    Args:
        old: the other document.
        new: this machine's.
        made: their comparison.
        width: columns.
    """
    lines = [Line(f"{word} {_named(_who(told))}") for word, told in (("old:", old), ("new:", new))]
    lines += _told_most(_most(made), width)
    lines += _findings("Found only in the new", made.only_new, width)
    lines += _findings("Found only in the old", made.only_old, width)
    lines += _differences("Matters for speed", [one for one in made.facts if one.meaning], width)
    lines += _differences("Other differences", [one for one in made.facts if not one.meaning], width)
    if not any(one.meaning for one in made.facts) and not made.only_new and not made.only_old:
        lines[2:2] = [Line(), Line("nothing differs that is known to matter for speed")]
    return lines


def _most(made: Comparison) -> list[str]:
    """What is likeliest to say why one of the two is slower: what is bad with one, the first fact of each part."""
    sides = (("new", made.only_new), ("old", made.only_old))
    bad = [f"{side}: {one.what}" for side, found in sides for one in found if one.severity == "bad"]
    parts: dict[str, Difference] = {}
    for one in made.facts:
        if one.meaning:
            parts.setdefault(one.key.partition(".")[0], one)
    return [*bad[:1], *map(_change, parts.values())][:MOST]


def _told_most(most: list[str], width: int) -> Iterator[Line]:
    if most:
        yield from title_line("Matters most")
    for one in most:
        yield from _hanging(wrapped(one, width - 6))


def _change(one: Difference) -> str:
    times = ratio(one)
    return f"{one.key}: {said(one.key, one.old)} -> {said(one.key, one.new)}{f' ({times})' if times else ''}"


def _who(told: Mapping[str, Any]) -> dict[str, str | None]:
    system, made = told.get("system"), told.get("made")
    host = system.get("host") if isinstance(system, dict) else None
    return {"host": host if isinstance(host, str) else None, "made": made if isinstance(made, str) else None}


def _named(who: Mapping[str, str | None]) -> str:
    return f"{who['host'] or 'unknown'}, {(who['made'] or 'at an unknown time').replace('+00:00', ' UTC')}"


def _findings(title: str, found: tuple[Finding, ...], width: int) -> Iterator[Line]:
    if found:
        yield from title_line(title)
    for finding in found:
        yield from finding_lines(finding.severity, finding, width)


def _differences(title: str, facts: list[Difference], width: int) -> Iterator[Line]:
    if facts:
        yield from title_line(title)
    for one in facts:
        yield from _hanging([*wrapped(_change(one), width - 6), *wrapped(one.meaning, width - 6)])


def _hanging(texts: list[str]) -> Iterator[Line]:
    """Lines of which all but the first are set in."""
    yield from (Line(f"{' ' * (6 if number else 2)}{text}") for number, text in enumerate(texts))
