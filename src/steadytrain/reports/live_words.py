"""What the live page says, as plain data for its script: every text is made here, none of it is markup."""

from __future__ import annotations

from typing import Any

from steadytrain.monitor.rules import Cause
from steadytrain.reports.buckets import largest
from steadytrain.reports.format import NONE, duration, epoch, number, percent, rate, size
from steadytrain.reports.milestones import happened
from steadytrain.reports.run_state import alarms, label_of, standing
from steadytrain.reports.snapshot import Now
from steadytrain.reports.stacked import stacked
from steadytrain.reports.watched import Watched

SLICES = 240
MAX_HAPPENED = 40
TYPED = ("--", "steady ", "taskset ", "export ", "numactl ")  # a change that is typed as it stands


def state(now: Now) -> dict[str, Any]:
    """What changes from second to second: how far it is, how fast, how long it will take."""
    share = now.step / now.steps if now.steps else 0.0
    return {
        "status": now.signs.status,
        "silent": now.signs.silent or now.stalled is not None,
        "standing": standing(now),
        "alarms": list(alarms(now)),
        "share": round(share, 4),
        "percent": percent(share, 0) if now.steps else "",
        "epochs": f"epoch {now.epoch:.2f} of {epoch(now.epochs)}" if now.steps else "",
        "steps": f"step {now.step:,} of {now.steps:,}" if now.steps else "",
        "seconds": round(now.seconds, 1),
        "heroes": _heroes(now),
        "feed": "" if now.feed is None else f"{now.feed.ready:.1f} of {now.feed.depth:.0f}",
        "starved": "" if now.feed is None else percent(now.feed.starved, 0),
        "cores": _cores(now),
        "memory": _memory(now),
        "devices": [_device(one) for one in now.devices],
    }


def account(watched: Watched, now: Now) -> dict[str, Any]:
    """What changes when the run gives account: its ledger, as a table and over time, the verdict, what happened."""
    told: dict[str, Any] = {"rows": [], "timeline": None, "verdict": None, "happened": [], "missing": ""}
    if now.ledger is not None:
        held = now.ledger.seconds
        told["wall"] = duration(now.ledger.wall_seconds)
        told["rows"] = [
            {
                "name": name,
                "label": label_of(now, name),
                "seconds": duration(held[name]),
                "share": percent(now.ledger.share(name), 1),
            }
            for name in largest(held)
            if now.ledger.share(name) >= 0.0005
        ]
        told["timeline"] = stacked(watched.told.book.timeline(SLICES))
        told["happened"] = happened(watched.told.history)[-MAX_HAPPENED:][::-1]
    if now.diagnosis is not None:
        first, *more = now.diagnosis.causes
        told["verdict"] = {**_cause(first), "then": [_cause(one) for one in more[:2]], "ceiling": _ceiling(now)}
        told["missing"] = "; ".join(now.diagnosis.not_measurable)
    return told


def _cause(cause: Cause) -> dict[str, Any]:
    saves = f"saves about {percent(cause.saves, 0)} of the time" if cause.saves >= 0.005 else ""
    return {
        "sentence": cause.sentence,
        "share": percent(cause.share, 0) if cause.share >= 0.005 else "",
        "evidence": list(cause.evidence),
        "change": cause.change,
        "typed": cause.change.startswith(TYPED),
        "saves": saves,
    }


def _ceiling(now: Now) -> str:
    told = now.diagnosis.ceiling if now.diagnosis else None
    if now.diagnosis is None or told is None or told.most == float("inf") or now.diagnosis.causes[0].name == "nothing":
        return ""
    what = "computing" if told.limit == "compute" else "the feed"
    how = "measured" if told.probed else "reckoned from the run"
    return f"{percent(told.near, 0)} of the {rate(told.most)} images/s that {what} alone would allow ({how})"


def _heroes(now: Now) -> list[dict[str, str]]:
    rates = now.images_per_second
    return [*_accuracy(now), _speed(now, rates.now), *_time(now), *_cost(now)]


def _accuracy(now: Now) -> list[dict[str, str]]:
    best = now.best
    if best is None:
        more = "no evaluation yet" if now.train_loss is None else f"in training; loss {number(now.train_loss, 4)}"
        return [{"label": "Top-1 accuracy", "value": percent(now.train_top1), "more": more}]
    within = f"{percent(best.top1_95.low)} to {percent(best.top1_95.high)}, epoch {epoch(best.epoch)}"
    loss = "" if now.train_loss is None else f"; train loss {number(now.train_loss, 4)}"
    return [{"label": "Best top-1 accuracy", "value": percent(best.top1), "more": within + loss}]


def _speed(now: Now, lately: float | None) -> dict[str, str]:
    rates = now.images_per_second
    steady = f"{rate(rates.steady)} steady, {rate(rates.overall)} overall" if rates.overall else ""
    value = rate(lately if lately is not None else rates.steady)
    return {"label": "Images per second" + ("" if lately is None else ", now"), "value": value, "more": steady}


def _time(now: Now) -> list[dict[str, str]]:
    each = duration(now.seconds / now.epoch) + " an epoch" if now.epoch >= 1 else ""
    told = [{"label": "Wall time", "value": duration(now.seconds) if now.steps else NONE, "more": each}]
    if now.signs.status == "running":
        left = now.remaining_seconds
        more = "evaluations and checkpoints included" if left is not None else "known after the first log lines"
        told.append({"label": "Time left", "value": duration(left), "more": more})
    return told


def _cost(now: Now) -> list[dict[str, str]]:
    if now.cost is None:
        return []
    in_all = f"about {now.cost.in_all:,.2f} in all; " if now.cost.in_all is not None else ""
    more = f"{in_all}{now.cost.per_hour:g} an hour"
    return [{"label": "Cost so far", "value": f"{now.cost.so_far:,.2f}", "more": more}]


def _cores(now: Now) -> str:
    told = now.machine
    if told is None or told.cpu is None:
        return ""
    others = "" if told.others is None else f", others {told.others:.1f}"
    ranks = f", other ranks {told.ranks:.1f}" if told.ranks else ""
    return f"{told.cpu:.1f} of {told.cores}{ranks}{others}"


def _memory(now: Now) -> str:
    told = now.machine
    if told is None or told.memory_bytes is None:
        return ""
    return size(told.memory_bytes) + (f" of {size(told.memory_limit_bytes)}" if told.memory_limit_bytes else "")


def _device(told: Any) -> dict[str, Any]:
    parts = [] if told.utilisation is None else [f"{percent(told.utilisation, 0)} busy"]
    parts += [] if told.memory_bytes is None else [f"{size(told.memory_bytes)}"]
    parts += [] if told.power_watts is None else [f"{told.power_watts:.0f} W"]
    parts += [f"clock held down: {', '.join(told.throttled)}"] if told.throttled else []
    missing = f"not measurable here: {', '.join(told.missing)}" if told.missing else ""
    return {"index": told.index, "name": told.name, "now": ", ".join(parts), "missing": missing}
