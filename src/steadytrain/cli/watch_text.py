"""A watched run in plain text: ``key=value`` lines for a log, and the figures that are left when the watch ends."""

from __future__ import annotations

from steadytrain.cli.lines import clean, clock, pairs
from steadytrain.reports.buckets import largest
from steadytrain.reports.format import duration, number, percent, rate
from steadytrain.reports.run_state import alarms, label_of, standing
from steadytrain.reports.snapshot import Now

INPUT = ("input_storage", "input_decode", "input_augment", "input_batch", "input_other", "epoch_gap")


def state_line(now: Now) -> str:
    """Where the run stands.

    >>> from steadytrain.reports.liveness import Signs
    >>> state_line(Now(moment=0.0, name="a", directory="a", model="mlp", signs=Signs(status="waiting")))
    'status=waiting'
    """
    told: dict[str, object] = {"status": now.signs.status}
    if now.steps:
        told |= {"step": f"{now.step}/{now.steps}", "epoch": f"{now.epoch:.2f}"}
    if now.train_loss is not None:
        told |= {"loss": f"{now.train_loss:.4f}", "top1": f"{now.train_top1:.4f}"}
    if now.last is not None:
        told |= {"val_top1": f"{now.last.top1:.4f}"}
    rates = {"images_per_second": now.images_per_second.now}
    rates |= {"steady": now.images_per_second.steady, "overall": now.images_per_second.overall}
    told |= {name: f"{value:.1f}" for name, value in rates.items() if value is not None}
    told |= _beside(now)
    if now.diagnosis is not None:
        cause = now.diagnosis.causes[0]
        told |= {"cause": cause.name, "share": f"{cause.share:.2f}"}
    if now.remaining_seconds is not None:
        told |= {"eta_seconds": f"{now.remaining_seconds:.0f}"}
    if now.cost is not None:
        told |= {"cost": f"{now.cost.so_far:.2f}"}
    return pairs(told)


def closing(now: Now, width: int) -> list[str]:
    """The figures that stay on the terminal, in lines of at most ``width`` columns but for the verdict's own words."""
    name = clean(f"{now.name}: {now.model}, {standing(now)}")
    told = [name, *_figures(now), *map(clean, alarms(now))]
    if now.ledger is not None and now.ledger.wall_seconds > 0:
        told += ["", "where the time went", *_ledger(now)]
    if now.diagnosis is not None:
        told += ["", *verdict(now)]
    return [line[: max(20, width)] if line.startswith("  ") else line for line in told]


def verdict(now: Now, more: int = 2) -> list[str]:
    """The dominant cause, what to change, and the next causes, a sentence a line."""
    if now.diagnosis is None:
        return []
    first, *others = now.diagnosis.causes
    lines = [clean(first.sentence)]
    if first.change:
        saves = f" (saves about {percent(first.saves, 0)} of the time)" if first.saves >= 0.005 else ""
        lines.append(f"change: {clean(first.change)}{saves}")
    return lines + [f"then: {clean(cause.sentence)}" for cause in others[:more]]


def _figures(now: Now) -> list[str]:
    if not now.steps:
        return []
    lines = [
        f"step {now.step:,} of {now.steps:,}, epoch {now.epoch:.2f} of {now.epochs:.4g}, after {clock(now.seconds)}"
    ]
    rates = now.images_per_second
    if rates.overall is not None:
        lines.append(f"{rate(rates.overall)} images/s overall, {rate(rates.steady)} in the steady state")
    if now.best is not None:
        within = f"{100 * now.best.top1_95.low:.2f} to {100 * now.best.top1_95.high:.2f}"
        lines.append(f"best top-1 {percent(now.best.top1)} ({within}) at epoch {now.best.epoch:.3g}")
    if now.train_loss is not None:
        lines.append(f"train loss {number(now.train_loss, 4)}, train top-1 {percent(now.train_top1)}")
    if now.remaining_seconds is not None:
        lines.append(f"about {clock(now.remaining_seconds)} left")
    if now.cost is not None:
        in_all = "" if now.cost.in_all is None else f", about {now.cost.in_all:,.2f} in all"
        lines.append(f"cost {now.cost.so_far:,.2f} so far at {now.cost.per_hour:g} an hour{in_all}")
    return lines


def _ledger(now: Now) -> list[str]:
    assert now.ledger is not None
    ledger = now.ledger
    shown = [name for name in largest(ledger.seconds) if ledger.share(name) >= 0.0005]
    return [
        f"  {label_of(now, name):24}{percent(ledger.share(name), 1):>8}  {duration(ledger.seconds[name])}"
        for name in shown
    ]


def _beside(now: Now) -> dict[str, object]:
    told: dict[str, object] = {}
    if now.ledger is not None and now.ledger.wall_seconds > 0:
        told["input"] = f"{now.ledger.share(*INPUT):.3f}"
    if now.feed is not None:
        told["ready"] = f"{now.feed.ready:.1f}/{now.feed.depth:.0f}"
        told["starved"] = f"{now.feed.starved:.2f}"
    if now.machine is not None and now.machine.cpu is not None:
        told["cpu"] = f"{now.machine.cpu:.2f}/{now.machine.cores}"
    for device in now.devices:
        if device.utilisation is not None:
            told[f"gpu{device.index}"] = f"{device.utilisation:.2f}"
    return told
