"""A verdict as text: all of it for ``steady diagnose``, and a line or two for the end of a run. Pure text.

>>> print(line(Cause(name="threads", share=0.43, sentence="The loop waits.", change="--threads 2", saves=0.4)))
verdict cause=threads share=0.430 saves=0.400 change="--threads 2" sentence="The loop waits."
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator

from steadytrain.cli.console import note
from steadytrain.cli.lines import clean, pairs
from steadytrain.cli.stream import Stream
from steadytrain.monitor import Diagnosis, RunHistory, diagnose
from steadytrain.monitor.ledger import INPUT
from steadytrain.monitor.reading import settled
from steadytrain.monitor.rules import Cause
from steadytrain.monitor.rules.cause import LEAST, percent
from steadytrain.run import Run

MOST_CAUSES, MOST_COLUMNS = 3, 100
_INDENT = "   "
_BUCKETS = 6
_SHORT = {name: name.replace("input_", "waiting for ") for name in INPUT} | {
    "input_storage": "waiting for storage",
    "input_batch": "waiting for gathering",
    "input_other": "waiting for batches",
    "epoch_gap": "epoch gaps",
    "measuring": "measuring itself",
}


def tell(run: Run) -> None:
    """The verdict on a run that has just ended, on standard error: in words on a terminal, else as a line."""
    try:
        book = RunHistory(run.recipe)
        for path in sorted(run.directory.glob("events*.jsonl")):
            for event in settled(path):
                book.take(event)
        first = diagnose(book.evidence()).causes[0]
    except Exception as error:  # noqa: BLE001 - whatever a log holds, the run is well, and its end is told next
        note(f"no verdict: {error}")
        return
    for part in brief(first) if Stream(sys.stderr).isatty() else [line(first)]:
        note(part)


def line(cause: Cause) -> str:
    """The verdict as a ``key=value`` line."""
    told: dict[str, object] = {"cause": cause.name, "share": f"{cause.share:.3f}"}
    if cause.change:
        told |= {"saves": f"{cause.saves:.3f}", "change": clean(cause.change)}
    return "verdict " + pairs(told | {"sentence": clean(cause.sentence)})


def brief(cause: Cause, *, width: int | None = None) -> list[str]:
    """The verdict for a person at a terminal: a sentence, and what to change."""
    width = min(shutil.get_terminal_size().columns, MOST_COLUMNS) if width is None else width
    lines = _wrapped(f"verdict: {cause.sentence}", width, "", "  ")
    if cause.change:
        lines += _wrapped(f"change: {cause.change}{_saves(cause)}", width, "  ", "    ")
    return lines


def text(told: Diagnosis, name: str, *, width: int | None = None) -> str:
    """All of a verdict, in lines of at most ``width`` columns, the terminal's by default (commands are not broken)."""
    width = min(shutil.get_terminal_size().columns, MOST_COLUMNS) if width is None else width
    lines = [clean(name), ""]
    for number, cause in enumerate(told.causes[:MOST_CAUSES], 1):
        lines += [*_cause(number, cause, width), ""]
    if more := told.causes[MOST_CAUSES:]:
        names = ", ".join(f"{_called(cause.name)} {percent(cause.share)}" for cause in more)
        lines += [*_wrapped(f"besides: {names}", width, "", "  "), ""]
    lines += [*_pace(told, width), *_wrapped(f"time: {_ledger(told)}", width, "", "  ")]
    if told.not_measurable:
        lines.append("not measurable here:")
        lines += [part for one in told.not_measurable for part in _wrapped(clean(one), width, "  ", "    ")]
    return "\n".join(lines)


def _cause(number: int, cause: Cause, width: int) -> Iterator[str]:
    share = f": {percent(cause.share)} of the time" if cause.share >= 0.005 else ""
    because = f", which follows from {_called(cause.because)}" if cause.because else ""
    yield from _wrapped(f"{number}. {_called(cause.name)}{share}{because}", width, "", _INDENT)
    yield from _wrapped(cause.sentence, width, _INDENT)
    for one in cause.evidence:
        yield from _wrapped(f"- {one}", width, _INDENT, f"{_INDENT}  ")
    if cause.change:
        yield from _wrapped(f"change: {cause.change}", width, _INDENT, f"{_INDENT}  ")
        yield from _wrapped(_saving(cause), width, _INDENT, f"{_INDENT}  ")


def _saving(cause: Cause) -> str:
    if cause.saves < 0.005:
        return "saves: not known before it is tried"
    faster = f", {1 / (1 - cause.saves):.1f} times as fast" if cause.saves < 0.99 else ""
    return f"saves: about {percent(cause.saves)} of the time{faster}"


def _saves(cause: Cause) -> str:
    return f" (saves about {percent(cause.saves)} of the time)" if cause.saves >= 0.005 else ""


def _pace(told: Diagnosis, width: int) -> Iterator[str]:
    ledger, ceiling = told.ledger, told.ceiling
    rates = (
        f"{ledger.images_per_second:,.0f} images/s overall, {ledger.steady_images_per_second:,.0f} in the steady state"
    )
    yield from _wrapped(f"pace: {rates}", width, "", "  ")
    if ceiling is None:
        return
    how = "measured alone" if ceiling.probed else "reckoned from the run; --probe measures it"
    both = [
        f"{name} {rate:,.0f}" for name, rate in (("computing", ceiling.compute), ("the feed", ceiling.feed)) if rate
    ]
    words = (
        f"ceiling: {ceiling.most:,.0f} images/s, of which it reaches {percent(ceiling.near)} ({', '.join(both)}; {how})"
    )
    yield from _wrapped(words, width, "", "  ")
    if ceiling.mfu is not None:
        yield f"MFU: {percent(ceiling.mfu)}"


def _ledger(told: Diagnosis) -> str:
    """The largest buckets; what is left is told as the rest."""
    shares = sorted(told.ledger.shares.items(), key=lambda one: -one[1])
    shown = [(name, share) for name, share in shares[:_BUCKETS] if share >= LEAST / 3]
    parts = [f"{_called(name)} {percent(share)}" for name, share in shown]
    rest = 1 - sum(share for _, share in shown)
    return ", ".join(parts + ([f"the rest {percent(rest)}"] if rest >= LEAST / 6 and parts else []))


def _called(name: str) -> str:
    return _SHORT.get(name, name.replace("_", " "))


def _wrapped(words: str, width: int, first: str, rest: str | None = None) -> list[str]:
    rest = first if rest is None else rest
    return textwrap.wrap(
        clean(words),
        max(width - 1, len(rest) + 16),
        initial_indent=first,
        subsequent_indent=rest,
        break_long_words=False,
        break_on_hyphens=False,
    )
