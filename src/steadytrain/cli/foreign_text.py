"""The verdict on a foreign process in words, as a plain line and as a document. Pure text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from steadytrain.cli.lines import clean, clock, pairs
from steadytrain.config.plain import plain
from steadytrain.monitor.process_watch import Cause, Reading

_LEAST_SHARE = 0.03


def verdict(
    reading: Reading, name: str, seconds: float, how: str, by_cause: Mapping[str, float], width: int
) -> list[str]:
    """The verdict as lines of at most ``width`` columns: the likeliest cause, its evidence, the change, the others.

    Args:
        reading: of the whole watch, or of its end.
        name: of the process.
        seconds: how long it was watched.
        how: what became of it, such as ``still running``.
        by_cause: seconds in which each cause came first.
        width: columns.
    """
    first, *others = reading.causes
    ending = f": {how}, watched for {clock(seconds)}"
    found = [f"process {shortened(name, width - 8 - len(ending))}{ending}", ""]
    found += _wrapped(_sentence(first), width)
    found += [line for one in first.evidence for line in _wrapped(clean(one), width, "  - ", "    ")]
    if reading.rhythm is not None:
        told = reading.rhythm
        text = f"it swings between {told.low:.0%} and {told.high:.0%}; {told.cycles:.0f} periods were seen"
        found += _wrapped(text, width, "  - ", "    ")
    if first.change:
        found += _wrapped(first.change, width, "  change: ", "          ")
    if others:
        found += ["", "then:"]
        found += [line for one in others for line in _wrapped(_sentence(one), width, "  - ", "    ")]
    if len(by_cause) > 1:
        spent = ", ".join(f"{cause} {clock(time)}" for cause, time in sorted(by_cause.items(), key=lambda one: -one[1]))
        found += ["", *_wrapped(f"over the whole watch: {spent}", width)]
    found += ["", *_wrapped("not measurable here: " + "; ".join(reading.not_measurable), width, "", "  ")]
    return found


def shortened(name: str, columns: int) -> str:
    """A process's name in so many columns, or hardly more.

    >>> shortened("7 (python train.py --lr 0.1)", 20)
    '7 (python train....)'
    """
    told = clean(name)
    return told if len(told) <= columns else told[: max(8, columns - 4)] + "...)"


def _sentence(cause: Cause) -> str:
    share = f" ({cause.share:.0%} of the time)" if cause.share >= _LEAST_SHARE else ""
    return f"{cause.name}{share}: {clean(cause.sentence)}"


def _wrapped(text: str, width: int, first: str = "", rest: str = "") -> list[str]:
    return textwrap.wrap(text, max(20, width), initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)


def plain_line(seconds: float, reading: Reading) -> str:
    """What is seen now as one ``key=value`` line."""
    return "watch " + pairs(dict(_figures(seconds, reading)))


def _figures(seconds: float, reading: Reading) -> Iterator[tuple[str, object]]:
    yield "seconds", f"{seconds:.0f}"
    yield "cause", reading.causes[0].name
    if (seen := reading.seen) is None:
        return
    yield "working", f"{seen.working:.2f}"
    for gpu in seen.gpus:
        yield f"gpu{gpu.index}", f"{gpu.utilisation or 0.0:.2f}"
    yield "cpu", f"{seen.cpu:.2f}"
    yield "cores", seen.machine.cores
    for name in ("idle", "iowait", "others"):
        if (value := getattr(seen.machine, name)) is not None:
            yield name, f"{value:.2f}"
    if seen.disk_read_bytes is not None:
        yield "disk_read_bytes", f"{seen.disk_read_bytes:.0f}"
    if seen.rhythm is not None:
        yield "period_seconds", f"{seen.rhythm.period_seconds:.2f}"
        yield "duty", f"{seen.rhythm.duty:.2f}"


def document(
    reading: Reading, name: str, seconds: float, how: str, exit_code: int | None, by_cause: Mapping[str, float]
) -> dict[str, Any]:
    """The same for JSON."""
    told: dict[str, Any] = {"process": name, "state": how, "exit_code": exit_code, "seconds": round(seconds, 3)}
    keys = ("name", "share", "sentence", "evidence", "change")  # what a change saves is not known from outside
    told["causes"] = [{key: plain(getattr(cause, key)) for key in keys} for cause in reading.causes]
    told["rhythm"] = plain(reading.rhythm)
    told["seconds_by_cause"] = {cause: round(time, 3) for cause, time in by_cause.items()}
    told["seen"] = plain(reading.seen)
    told["not_measurable"] = list(reading.not_measurable)
    return told
