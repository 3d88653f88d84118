"""Events of a run as text: a ``key=value`` line for a log, or the words that a person at a terminal reads.

>>> event_line(
...     Logged(step=120, epoch=0.31, loss=1.8321, top1=0.343, lr=0.1, images_per_second=412.31, wait_share=0.0123)
... )
'step=120 epoch=0.31 loss=1.8321 top1=0.3430 lr=0.1 images_per_second=412.3 wait=0.012'
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePath

from msgspec.structs import replace

from steadytrain.config.figures import figure_words
from steadytrain.events import (
    Ceilings,
    Compiled,
    Ended,
    Evaluated,
    Event,
    Failed,
    Logged,
    Noticed,
    ProbeProgress,
    Resumed,
    Saved,
    Started,
    StepMeasured,
    Tested,
)
from steadytrain.format import (
    clean,
    clock,
    count,
    count_images,
    duration,
    money,
    pairs,
    percent,
    rate,
    score_name,
    tells_top5,
)
from steadytrain.monitor.history import RunScore


def event_line(event: Event, *, best: bool = False, is_multi_label: bool = False) -> str | None:
    """Format an event as one line; None for kinds that are not shown singly (``Step``, ``FeedStats``, unknown ones).

    Args:
        event: any event of a run.
        best: mark an :class:`Evaluated` as the best so far.
        is_multi_label: an image of the run may have several labels.
    """
    values: dict[str, object]
    match event:
        case Logged():
            top1 = "exact_match=top1:.4f" if is_multi_label else "top1:.4f"
            speed = "lr:.6g images_per_second:.1f wait=wait_share:.3f grad_norm:.4g"
            return _line("", event, f"step epoch:.2f loss:.4f {top1} {speed}")
        case Evaluated():
            scores = "top1:.4f top5:.4f" if event.mean_ap is None else "mean_ap:.4f exact_match=top1:.4f"
            chosen = figure_words(event.figure, event.figure_value, event.mean_ap)
            scores += f" {event.figure}=figure_value:.4f" if chosen else ""
            text = _line("evaluated", event, f"step epoch:.2f n loss:.4f {scores} seconds:.2f weights")
            return f"{text} best=yes" if best else text
        case Tested():
            scores = "top1:.4f top5:.4f" if event.mean_ap is None else "mean_ap:.4f exact_match=top1:.4f"
            return _line("tested", event, f"step epoch:.2f n loss:.4f {scores} seconds:.2f weights before")
        case Started():
            data, machine = event.data, event.machine
            values = {"attempt": event.attempt, "model": event.model.get("name", "?")}
            values |= {name: data[name] for name in ("num_train", "num_val") if name in data}
            if "classes" in data:
                values["labels" if data.get("multi_label") else "classes"] = len(data["classes"])
            values |= {"step": event.step, "steps": event.steps, "batch_size": event.batch_size} if event.steps else {}
            values |= {name: machine[name] for name in ("device", "precision", "ranks") if name in machine}
            if event.price is not None:
                values |= {"price_per_hour": f"{event.price['per_hour']:.6g}", "currency": event.price["currency"]}
                values["spent"] = money(event.price["spent"])
            return "started " + pairs(values)
        case Saved():
            return _line("saved", replace(event, path=PurePath(event.path).name), "step name=path bytes seconds:.2f")
        case Ceilings():
            feed, compute, both = _rates(event)
            text = f"probed step={event.step} feed_images_per_second={feed:.1f} compute_images_per_second={compute:.1f}"
            text += f" both_images_per_second={both:.1f} ceiling={'feed' if feed < compute else 'compute'}"
            return f"{text} of_ceiling={both / min(feed, compute):.3f} feed_headroom={feed / compute:.2f}"
        case ProbeProgress():
            return _line("features", event, "images total seconds:.1f eta_seconds=seconds_left:.0f fit_seconds:.1f")
        case StepMeasured(seconds=float()):
            return _line("measured", event, "step seconds:.2f")
        case Compiled():
            values = {
                "breaks": len(event.breaks),
                "pass_milliseconds": f"{event.compiled_seconds * 1000:.4g}",
                "eager_pass_milliseconds": f"{event.eager_seconds * 1000:.4g}",
                "images_until_paid": "never" if event.images_until_paid is None else event.images_until_paid,
            }
            return f"{_line('compiled', event, 'mode seconds:.1f graphs')} {pairs(values)}"
        case Resumed():
            return _line("resumed", event, "step images_repeated seconds_away:.1f ranks")
        case Noticed():
            return _line("notice", event, "step message")
        case Failed():
            return _line("failed", event, "step error message")
        case Ended():
            ending = "stopped" if event.status == "preempted" else event.status
            at = f" step={event.step}" if event.step else ""
            rate = f" images_per_second={_overall(event):.1f}" if event.images else ""
            return f"{ending}{at} seconds={event.seconds:.1f}{rate}"
    return None


def _line(word: str, event: Event, fields: str) -> str:
    """Format fields of an event, those that have a value: ``NAME``, ``NAME:FORMAT`` or ``SHOWN=NAME:FORMAT``."""
    values = {}
    for field in fields.split():
        shown, _, name = field.rpartition("=")
        name, _, form = name.partition(":")
        if (value := getattr(event, name)) is not None:
            values[shown or name] = format(value, form)
    return f"{word} {pairs(values)}".lstrip()


def describe_event(
    event: Event, *, best: bool = False, best_before: Evaluated | None = None, num_classes: int | None = None
) -> list[str]:
    """Describe an event for a person, in parts that belong on a line each or together; often there is nothing to say.

    Args:
        event: any event of a run.
        best: mark an :class:`Evaluated` as the best so far.
        best_before: the best evaluation, named when the run ends.
    """
    match event:
        case Started(step=step, attempt=attempt):  # the head of the command says the rest
            return [f"attempt {attempt}: on from step {step:,}"] if step or attempt > 1 else []
        case Evaluated():
            parts = [f"epoch {round(event.epoch, 1):g}" if event.step else "probe"]
            if event.mean_ap is not None:
                parts += [f"val mAP {percent(event.mean_ap, 1)}", f"exact match {percent(event.top1, 1)}"]
            else:
                parts.append(f"val top-1 {percent(event.top1, 1)}")
                parts += (
                    [f"top-5 {percent(event.top5, 1)}"] if event.top5 is not None and tells_top5(num_classes) else []
                )
            parts.append(figure_words(event.figure, event.figure_value, event.mean_ap))
            parts += [f"loss {event.loss:.4f}", *([] if event.weights == "model" else [f"({clean(event.weights)})"])]
            return list(filter(None, [*parts, "best" if best else ""]))
        case Tested():
            name, figures = score_name(event.mean_ap is not None), RunScore.of(event).words
            return [f"test, {event.seen}: {name} {figures}", count_images(event.n, event.effective_n)]
        case Ceilings():
            feed, compute, both = _rates(event)
            limit, other = (
                ("data loader allows", "updates have") if feed < compute else ("updates allow", "data loader has")
            )
            lower, higher = sorted((feed, compute))
            return [
                f"probe, images/s: loading alone {rate(feed)}, updates alone {rate(compute)}",
                f"both {rate(both)}: {percent(both / lower, 0)} of what the {limit}",
                f"the {other} room for {rate(higher / lower)} times as many",
            ]
        case Compiled():
            paid = event.images_until_paid
            return [
                f"compiled ({event.mode}) in {duration(event.seconds)}: {count(event.graphs, 'graph')}",
                f"a pass takes {duration(event.compiled_seconds)}, {duration(event.eager_seconds)} without",
                "never pays back" if paid is None else f"pays back after {paid:,} images",
            ]
        case Resumed():
            parts = [f"going on after {clock(event.seconds_away)}"]
            parts.append(f"{count(event.images_repeated, 'image')} trained on again")
            if event.ranks != event.ranks_before:
                parts.append(f"{event.ranks} ranks, {event.ranks_before} before")
            return parts
        case Noticed():
            return [f"{'' if event.is_warning else 'notice: '}{clean(event.message)}"]
        case Failed():
            return [f"failed{f' at step {event.step:,}' if event.step else ''}: {clean(event.error)}"]
        case Ended():
            parts = [f"{event.words}{f' at step {event.step:,}' if event.step else ''} after {clock(event.seconds)}"]
            if event.images:
                parts.append(f"{rate(_overall(event))} images/s overall")
            if best_before is not None:
                when = f"at epoch {round(best_before.epoch, 1):g}" if best_before.step else "by the probe"
                name = score_name(best_before.mean_ap is not None)
                parts.append(f"best {name} {percent(best_before.score, 1)} {when}")
            return parts
    return []


def join_parts(parts: Iterable[str], width: int) -> list[str]:
    """Join parts by two spaces into as few lines of ``width`` columns as will hold them; no part is broken.

    >>> join_parts(["step 1/9", "loss 2.1", "top1 0.5"], 20)
    ['step 1/9  loss 2.1', 'top1 0.5']
    """
    lines: list[str] = []
    for part in parts:
        if lines and len(lines[-1]) + 2 + len(part) <= width:
            lines[-1] += "  " + part
        else:
            lines.append(part)
    return lines


def shorten_name(name: str, columns: int) -> str:
    """Shorten a process's name to so many columns, or hardly more.

    >>> shorten_name("7 (python train.py --lr 0.1)", 20)
    '7 (python train....)'
    """
    text = clean(name)
    return text if len(text) <= columns else text[: max(8, columns - 4)] + "...)"


def _rates(event: Ceilings) -> tuple[float, float, float]:
    least = 1e-9  # a log that was edited by hand divides nothing by zero
    feed, compute = max(event.feed_images_per_second, least), max(event.compute_images_per_second, least)
    return feed, compute, event.both_images_per_second


def _overall(event: Ended) -> float:
    return event.images / event.seconds if event.seconds > 0 else 0.0
