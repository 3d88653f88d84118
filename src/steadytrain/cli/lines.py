"""Events and progress as plain ``key=value`` lines, and numbers as people read them. Pure text, ASCII where we word it.

>>> line(Logged(step=120, epoch=0.31, loss=1.8321, top1=0.343, lr=0.1, images_per_second=412.31, wait_share=0.0123))
'step=120 epoch=0.31 loss=1.8321 top1=0.3430 lr=0.1 images_per_second=412.3 wait=0.012'
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import PurePath

from steadytrain.events import (
    Ceilings,
    Compiled,
    Ended,
    Evaluated,
    Event,
    Failed,
    Logged,
    Noticed,
    Resumed,
    Saved,
    Started,
)


def line(event: Event, *, best: bool = False) -> str | None:
    """One line for an event; None for the kinds that are not told one by one (``Step``, ``FeedStats``, unknown ones).

    Args:
        event: any event of a run.
        best: mark an :class:`Evaluated` as the best so far.
    """
    match event:
        case Logged():
            return pairs(_logged(event))
        case Evaluated():
            return "evaluated " + pairs({**_evaluated(event), **({"best": "yes"} if best else {})})
        case Started():
            return "started " + pairs(_started(event))
        case Saved():
            name = PurePath(event.path).name
            told = {"step": event.step, "name": name, "bytes": event.bytes, "seconds": f"{event.seconds:.2f}"}
            return "saved " + pairs(told)
        case Ceilings():
            return "probed " + pairs(_ceilings(event))
        case Compiled():
            return "compiled " + pairs(_compiled(event))
        case Resumed():
            told = {"step": event.step, "images_repeated": event.images_repeated}
            told |= {"seconds_away": f"{event.seconds_away:.1f}", "ranks": event.ranks}
            return "resumed " + pairs(told)
        case Noticed():
            return "notice " + pairs({"step": event.step, "message": event.message})
        case Failed():
            return "failed " + pairs({"step": event.step, "error": event.error, "message": event.message})
        case Ended():
            rate = event.images / event.seconds if event.seconds > 0 else 0.0
            told = {"step": event.step, "seconds": f"{event.seconds:.1f}", "images_per_second": f"{rate:.1f}"}
            return f"{event.status} " + pairs(told)
    return None


def words(event: Event, *, best: bool = False, so_far: Evaluated | None = None) -> list[str]:
    """What a person at a terminal is told of an event, in parts that belong on a line each or together; often nothing.

    Args:
        event: any event of a run.
        best: mark an :class:`Evaluated` as the best so far.
        so_far: the best evaluation, told when the run ends.
    """
    match event:
        case Started():
            return _opening(event)
        case Evaluated():
            return _evaluation(event, best=best)
        case Ceilings():
            return _headroom(event)
        case Compiled():
            return _gain(event)
        case Resumed():
            return _price(event)
        case Noticed():
            return [f"notice: {clean(event.message)}"]
        case Failed():
            return [f"failed{f' at step {event.step:,}' if event.step else ''}: {clean(event.error)}"]
        case Ended():
            return _closing(event, so_far)
    return []


def pairs(told: Mapping[str, object]) -> str:
    """``key=value`` with spaces between; a value with anything odd in it is quoted as JSON, so a line stays a line.

    >>> pairs({"a": 1, "b": "two words"})
    'a=1 b="two words"'
    """
    return " ".join(f"{key}={_value(value)}" for key, value in told.items())


def clean(text: str) -> str:
    """Text without control characters: a file name must not be able to steer the reader's terminal.

    >>> clean("a\\x1b[2Jb\\nc")
    'a?[2Jb c'
    """
    return "".join(c if c.isprintable() else " " if c.isspace() else "?" for c in text)


def clock(seconds: float) -> str:
    """A duration as on a clock.

    >>> clock(130), clock(3725), clock(90000)
    ('2:10', '1:02:05', '25:00:00')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def size_of(num_bytes: int) -> str:
    """Bytes as people read them.

    >>> size_of(999), size_of(22_243_816), size_of(140_840_960_000)
    ('999 bytes', '22.2 MB', '140.8 GB')
    """
    if num_bytes < 1000:
        return f"{num_bytes} bytes"
    power, unit = next((p, u) for p, u in ((3, "GB"), (2, "MB"), (1, "kB")) if num_bytes >= 1000**p)
    return f"{num_bytes / 1000**power:.1f} {unit}"


def wrap(parts: Iterable[str], width: int) -> list[str]:
    """Parts joined by two spaces into as few lines of ``width`` columns as will hold them, none of them broken.

    >>> wrap(["step 1/9", "loss 2.1", "top1 0.5"], 20)
    ['step 1/9  loss 2.1', 'top1 0.5']
    """
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += "  " + part
        else:
            lines.append(part)
    return lines


def _value(value: object) -> str:
    text = str(value)
    plain = text.isprintable() and not any(c in ' "=\\' for c in text) and text
    return text if plain else json.dumps(text)


def _logged(event: Logged) -> dict[str, object]:
    told: dict[str, object] = {
        "step": event.step,
        "epoch": f"{event.epoch:.2f}",
        "loss": f"{event.loss:.4f}",
        "top1": f"{event.top1:.4f}",
        "lr": f"{event.lr:.6g}",
        "images_per_second": f"{event.images_per_second:.1f}",
        "wait": f"{event.wait_share:.3f}",
    }
    if event.grad_norm is not None:
        told["grad_norm"] = f"{event.grad_norm:.4g}"
    return told


def _evaluated(event: Evaluated) -> dict[str, object]:
    return {
        "step": event.step,
        "epoch": f"{event.epoch:.2f}",
        "n": event.n,
        "loss": f"{event.loss:.4f}",
        "top1": f"{event.top1:.4f}",
        "top5": f"{event.top5:.4f}",
        "seconds": f"{event.seconds:.2f}",
        "weights": event.weights,
    }


def _started(event: Started) -> dict[str, object]:
    told: dict[str, object] = {"attempt": event.attempt, "model": event.model.get("name", "?")}
    for name in ("num_train", "num_val"):
        if name in event.data:
            told[name] = event.data[name]
    if "classes" in event.data:
        told["classes"] = len(event.data["classes"])
    told |= {"step": event.step, "steps": event.steps, "batch_size": event.batch_size}
    return told | {name: event.machine[name] for name in ("device", "precision", "ranks") if name in event.machine}


def _opening(event: Started) -> list[str]:
    told = event.model
    parts = [clean(str(told.get("name", "?")))]
    if "parameters" in told:
        parts.append(f"{told['parameters']:,} parameters")
    if "device" in event.machine:
        parts.append(f"on {event.machine['device']} {event.machine.get('precision', '')}".rstrip())
    if (ranks := event.machine.get("ranks", 1)) > 1:
        parts.append(f"{ranks} ranks")
    if "num_train" in event.data:
        val = f" + {event.data['num_val']:,}" if event.data.get("num_val") else ""
        parts.append(f"{event.data['num_train']:,}{val} images")
    if "classes" in event.data:
        parts.append(f"{len(event.data['classes']):,} classes")
    parts.append(f"{event.steps:,} steps of {event.batch_size}")
    if event.step or event.attempt > 1:
        parts.append(f"attempt {event.attempt}: on from step {event.step:,}")
    return parts


def _evaluation(event: Evaluated, *, best: bool) -> list[str]:
    parts = [f"epoch {round(event.epoch, 1):g}", f"val top1 {event.top1:.4f}", f"top5 {event.top5:.4f}"]
    parts.append(f"loss {event.loss:.4f}")
    if event.weights != "model":
        parts.append(f"({clean(event.weights)})")
    return [*parts, "best"] if best else parts


def _ceilings(event: Ceilings) -> dict[str, object]:
    feed, compute, both = _rates(event)
    return {
        "step": event.step,
        "feed_images_per_second": f"{feed:.1f}",
        "compute_images_per_second": f"{compute:.1f}",
        "both_images_per_second": f"{both:.1f}",
        "ceiling": "feed" if feed < compute else "compute",
        "of_ceiling": f"{both / min(feed, compute):.3f}",
        "feed_headroom": f"{feed / compute:.2f}",
    }


def _headroom(event: Ceilings) -> list[str]:
    feed, compute, both = _rates(event)
    allow, other = ("feed allows", "updates have") if feed < compute else ("updates allow", "feed has")
    least, most = sorted((feed, compute))
    return [
        f"probe, images/s: feed alone {_number(feed)}, updates alone {_number(compute)}",
        f"both {_number(both)}: {both / least:.0%} of what the {allow}",
        f"the {other} room for {_number(most / least)} times as many",
    ]


def _compiled(event: Compiled) -> dict[str, object]:
    return {
        "mode": event.mode,
        "seconds": f"{event.seconds:.1f}",
        "graphs": event.graphs,
        "breaks": len(event.breaks),
        "pass_milliseconds": f"{event.compiled_seconds * 1000:.4g}",
        "eager_pass_milliseconds": f"{event.eager_seconds * 1000:.4g}",
        "images_until_paid": "never" if event.images_until_paid is None else event.images_until_paid,
    }


def _gain(event: Compiled) -> list[str]:
    paid = event.images_until_paid
    return [
        f"compiled in {event.seconds:.3g} s",
        f"a pass takes {event.compiled_seconds * 1000:.3g} ms, {event.eager_seconds * 1000:.3g} ms without",
        "which gains nothing: leave --compile out" if paid is None else f"earned after {paid:,} images",
        *(f"Python comes between at {clean(place)}" for place in event.breaks),
    ]


def _price(event: Resumed) -> list[str]:
    parts = [f"going on after {clock(event.seconds_away)}", f"{event.images_repeated:,} images are trained on again"]
    if event.ranks != event.ranks_before:
        parts.append(f"{event.ranks} ranks, {event.ranks_before} before")
    return parts


def _number(value: float) -> str:
    """Three digits of it, or all before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _rates(event: Ceilings) -> tuple[float, float, float]:
    least = 1e-9  # a log that was edited by hand divides nothing by zero
    feed, compute = max(event.feed_images_per_second, least), max(event.compute_images_per_second, least)
    return feed, compute, event.both_images_per_second


def _closing(event: Ended, best: Evaluated | None) -> list[str]:
    rate = event.images / event.seconds if event.seconds > 0 else 0.0
    parts = [f"{event.status} at step {event.step:,} after {clock(event.seconds)}", f"{rate:,.0f} images/s overall"]
    return parts if best is None else [*parts, f"best top1 {best.top1:.4f} at epoch {round(best.epoch, 1):g}"]
