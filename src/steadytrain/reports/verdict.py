"""The verdict in words: all of it, a few lines, or one line. Pure text.

>>> print(verdict_line(Cause(name="threads", share=0.43, sentence="The loop waits.", change="--threads 2", saves=0.4)))
verdict cause=threads share=0.430 saves=0.400 change="--threads 2" sentence="The loop waits."
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace

from steadytrain.errors import RunError
from steadytrain.format import clean, number, pairs, percent, rate, wrap
from steadytrain.monitor import Cause, Diagnosis, Ledger, diagnose
from steadytrain.monitor.ledger import INPUT
from steadytrain.monitor.rules import LEAST
from steadytrain.monitor.rules.cause import LEAST_SAVED
from steadytrain.monitor.rules.diagnose import Ceiling
from steadytrain.reports.summary import Account

MAX_CAUSES, MAX_COLUMNS, MAX_BUCKETS = 3, 100, 6
_SHORT = {name: name.replace("input_", "waiting for ") for name in INPUT} | {
    "input_storage": "waiting for storage",
    "input_batch": "waiting for gathering",
    "input_other": "waiting for batches",
    "epoch_gap": "epoch gaps",
    "measuring": "measuring itself",
}


def verdict_line(cause: Cause) -> str:
    """Format a cause as a ``key=value`` line."""
    values: dict[str, object] = {"cause": cause.name, "share": f"{cause.share:.3f}"}
    if cause.change:
        values |= {"saves": f"{cause.saves:.3f}", "change": clean(cause.change)}
    return "verdict " + pairs(values | {"sentence": clean(cause.sentence)})


def verdict_brief(cause: Cause, *, width: int | None = None) -> list[str]:
    """Format a cause for a terminal, in lines of ``width`` columns at most: what it is, what to change."""
    width = _columns(width)
    lines = wrap(f"verdict: {cause.sentence}", width, "", "  ")
    if cause.change:
        lines += wrap(f"change: {cause.advice}", width, "  ", "    ")
    return lines if cause.name == "nothing" else [*lines, f"  more: steady help {cause.name}"]


def verdict_sentences(diagnosis: Diagnosis) -> list[str]:
    """Return the verdict's few lines, with nothing in them that steers a terminal."""
    return [clean(line) for line in str(diagnosis).split("\n")]


def held_back(account: Account) -> list[str]:
    """Say what slowed a run down and what to change, a sentence each; nothing of another program's log."""
    if account.summary.log:
        return []
    warnings = [*dict.fromkeys(clean(event.message) for event in account.history.noticed if event.is_warning)]
    try:
        is_alone = account.run.ranks() == [0]
        sentences = verdict_sentences(diagnose(account.history.evidence() if is_alone else account.run))
        return [*warnings, *sentences[:2]]
    except RunError:
        return warnings


def verdict_text(diagnosis: Diagnosis, name: str, *, width: int | None = None, is_short: bool = False) -> str:
    """Format a verdict in lines of at most ``width`` columns, by default the terminal's; commands stay whole.

    ``is_short``: of the first cause without its evidence and the names of the others, in about ten lines.
    """
    width = _columns(width)
    gap, named = ([], 1) if is_short else ([""], MAX_CAUSES)
    lines = [clean(name), *gap]
    for hang in diagnosis.hangs:
        lines += [*wrap(f"hang: {clean(hang)}", width, "", "  "), *gap]
    for index, cause in enumerate(diagnosis.causes[:named], 1):
        lines += [*_cause(index, replace(cause, evidence=()) if is_short else cause, width), *gap]
    if more := diagnosis.causes[named:]:
        names = ", ".join(f"{_called(cause.name)} {percent(cause.share)}" for cause in more)
        lines += [*wrap(f"also: {names}", width, "", "  "), *gap]
    time = wrap(f"time: {_ledger(diagnosis.ledger)}", width, "", "  ")
    if is_short:
        return "\n".join([*lines, *time])
    ledger, ceiling = diagnosis.ledger, diagnosis.ceiling
    overall, steady = number(ledger.images_per_second), number(ledger.steady_images_per_second)
    if ledger.images:
        lines += wrap(f"pace: {overall} images/s overall, {steady} in the steady state", width, "", "  ")
    if ceiling is not None:
        how = "measured alone" if ceiling.probed else f"{_estimated(ceiling)}; --probe measures it"
        rates = (("computing", ceiling.compute), ("the data loader", ceiling.feed))
        both = ", ".join(f"{name} {number(value)}" for name, value in rates if value)
        reaches = f"{number(ceiling.most)} images/s, of which it reaches {percent(ceiling.near)}"
        lines += wrap(f"ceiling: {reaches} ({both}; {how})", width, "", "  ")
        if ceiling.mfu is not None:
            lines.append(f"model FLOPs utilisation (MFU): {percent(ceiling.mfu)} of what the device can compute")
    lines += time
    if diagnosis.not_measurable:
        lines.append("not measurable here:")
        lines += [line for reason in diagnosis.not_measurable for line in wrap(reason, width, "  ", "    ")]
    return "\n".join(lines)


def ceiling_line(diagnosis: Diagnosis) -> str:
    """Describe how close the run is to its ceiling; empty if that is not known."""
    ceiling = diagnosis.ceiling
    if ceiling is None or ceiling.most == float("inf"):
        return ""
    part = "computing" if ceiling.limit == "compute" else "the data loader"
    how = "measured" if ceiling.probed else _estimated(ceiling)
    return f"{percent(ceiling.near)} of the {rate(ceiling.most)} images/s that {part} alone would allow ({how})"


def _estimated(ceiling: Ceiling) -> str:
    """Say that a ceiling is estimated, and what it leaves out."""
    return f"estimated from the run{f', without the {_called(ceiling.without)}' if ceiling.without else ''}"


def _columns(width: int | None) -> int:
    return min(shutil.get_terminal_size().columns, MAX_COLUMNS) if width is None else width


def _cause(index: int, cause: Cause, width: int) -> Iterator[str]:
    share = f": {percent(cause.share)} of the time" if cause.share >= LEAST_SAVED else ""
    because = f", which follows from {_called(cause.because)}" if cause.because else ""
    yield from wrap(f"{index}. {_called(cause.name)}{share}{because}", width, "", "   ")
    yield from wrap(cause.sentence, width, "   ")
    for figure in cause.evidence:
        yield from wrap(f"- {figure}", width, "   ", "     ")
    if cause.change:
        faster = f", {1 / (1 - cause.saves):.1f} times as fast" if cause.saves < 0.99 else ""
        saves = f"saves: about {percent(cause.saves)} of the time{faster}"
        yield from wrap(f"change: {cause.change}", width, "   ", "     ")
        yield from wrap(saves if cause.saving else "saves: not known before it is tried", width, "   ", "     ")
    if index == 1 and cause.name != "nothing":
        yield f"   more: steady help {cause.name}"


def _ledger(ledger: Ledger) -> str:
    """Describe the largest buckets, and the rest."""
    shares = sorted(ledger.shares.items(), key=lambda item: -item[1])
    shown = [(name, share) for name, share in shares[:MAX_BUCKETS] if share >= LEAST / 3]
    parts = [f"{_called(name)} {percent(share)}" for name, share in shown]
    remainder = 1 - sum(share for _, share in shown)
    return ", ".join(parts + ([f"the rest {percent(remainder)}"] if remainder >= LEAST / 6 and parts else []))


def _called(name: str) -> str:
    return _SHORT.get(name, name.replace("_", " "))
