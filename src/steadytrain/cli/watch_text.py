"""A watched run in plain text: ``key=value`` lines for a log, and the figures that are left when the watch ends."""

from __future__ import annotations

from steadytrain.format import clean, clock, duration, number, pairs, percent, rate
from steadytrain.monitor.ledger import INPUT
from steadytrain.reports.time_spent import largest_buckets
from steadytrain.reports.verdict import verdict_sentences
from steadytrain.reports.watch import Snapshot


def state_line(now: Snapshot) -> str:
    """Where the run stands.

    >>> from steadytrain.reports.status import Signs
    >>> state_line(Snapshot(moment=0.0, name="a", directory="a", model="mlp", signs=Signs(status="waiting")))
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


def closing(now: Snapshot, width: int) -> list[str]:
    """The figures that stay on the terminal, in lines of at most ``width`` columns but for the verdict's own words."""
    name = clean(f"{now.name}: {now.model}, {now.signs}")
    told = [name, *_figures(now), *map(clean, now.alarms())]
    if now.ledger is not None and now.ledger.wall_seconds > 0:
        told += ["", "where the time went", *_ledger(now)]
    if now.diagnosis is not None:
        told += ["", *verdict_sentences(now.diagnosis)]
    return [line[: max(20, width)] if line.startswith("  ") else line for line in told]


def _figures(now: Snapshot) -> list[str]:
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
        lines.append(f"best top-1 {percent(now.best.top1, 2)} ({within}) at epoch {now.best.epoch:.3g}")
    if now.train_loss is not None:
        lines.append(f"train loss {number(now.train_loss, 4)}, train top-1 {percent(now.train_top1, 2)}")
    if now.remaining_seconds is not None:
        lines.append(f"about {clock(now.remaining_seconds)} left")
    if now.cost is not None:
        in_all = "" if now.cost.in_all is None else f", about {now.cost.in_all:,.2f} in all"
        lines.append(f"cost {now.cost.so_far:,.2f} so far at {now.cost.per_hour:g} an hour{in_all}")
    return lines


def _ledger(now: Snapshot) -> list[str]:
    assert now.ledger is not None
    ledger = now.ledger
    return [
        f"  {now.label(name):24}{percent(ledger.share(name), 1):>8}  {duration(ledger.seconds[name])}"
        for name in largest_buckets(ledger)
    ]


def _beside(now: Snapshot) -> dict[str, object]:
    told: dict[str, object] = {}
    if now.ledger is not None and now.ledger.wall_seconds > 0:
        told["input"] = f"{now.ledger.share(*INPUT, 'epoch_gap'):.3f}"
    if now.feed is not None:
        told["ready"] = f"{now.feed.ready:.1f}/{now.feed.depth:.0f}"
        told["starved"] = f"{now.feed.starved:.2f}"
    if now.machine is not None and now.machine.cpu is not None:
        told["cpu"] = f"{now.machine.cpu:.2f}/{now.machine.cores}"
    for device in now.devices:
        if device.utilisation is not None:
            told[f"gpu{device.index}"] = f"{device.utilisation:.2f}"
    return told
