"""The cost of a run: the sum over its attempts, so far and at its end, by purpose, on spot and on other machines.

An attempt is paid from the start of its process to its end, or to its last sign of life if it was killed: set-up,
evaluations, checkpoints and work that a kill took back are in it. What a cloud charges for before the process starts
and after it ends (booting, packing in another process, an idle machine) is not known here.

The events tell every attempt to its last second. Each checkpoint holds the same sum up to itself, so a lost
``events.jsonl`` loses at most what a killed attempt did after its last checkpoint.
"""

from __future__ import annotations

import json
import math
import re
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, Literal

import msgspec

from steadytrain.cost.prices import Offer, Price, known_price, peaks, to_dict
from steadytrain.errors import InputError
from steadytrain.events import Failed, Started, StepMeasured
from steadytrain.files import read_text
from steadytrain.format import money
from steadytrain.monitor import RunHistory
from steadytrain.run import Run

COMPUTING = ("forward", "backward", "optimizer", "update", "evaluation")
"""Buckets of the ledger that another GPU would do faster; the rest is taken as it is."""


@dataclass(frozen=True, kw_only=True)
class BillPart:
    """The usage of one attempt: ``seconds`` of so many machines, with so many devices in all, at its price.

    ``began``: when its process started, seconds since 1970, which tells attempts apart; ``source``: who tells of it.
    """

    began: Annotated[float, msgspec.Meta(gt=-1e18, lt=1e18)]
    seconds: Annotated[float, msgspec.Meta(gt=-1e18, lt=1e18)]
    attempt: int = 0
    machines: int = 1
    devices: int = 1
    price: Price | None = None
    source: Literal["events", "checkpoint"] = "events"
    ended: str = ""

    @property
    def device_seconds(self) -> float:
        """The seconds of all its devices together."""
        return self.seconds * self.devices

    @property
    def money(self) -> float:
        """The cost of this attempt; 0 where no price is known."""
        return 0.0 if self.price is None else self.machines * self.price.money(self.seconds)

    @property
    def per_hour(self) -> float:
        """The cost of an hour of all its machines."""
        return 0.0 if self.price is None else self.machines * self.price.per_hour

    def to_dict(self) -> dict[str, Any]:
        """Return it as a checkpoint holds it."""
        values = {"began": self.began, "seconds": self.seconds, "attempt": self.attempt}
        values |= {"machines": self.machines, "devices": self.devices}
        return values if self.price is None else {**values, "price": to_dict(self.price)}


def part_of(started: Started, *, seconds: float, began: float | None = None, ended: str = "") -> BillPart:
    """Return what an attempt used, by its first event; ``began``: of an event of an older version, which lacks it."""
    machine = started.machine
    hosts, ranks = machine.get("hosts"), machine.get("ranks", 1)
    return BillPart(
        began=started.began or began or started.time,
        seconds=seconds,
        attempt=started.attempt,
        machines=len(set(hosts)) if isinstance(hosts, list | tuple) and hosts else 1,
        devices=ranks if isinstance(ranks, int) else 1,
        price=Price.from_dict(started.price),
        ended=ended,
    )


def parts_of(history: RunHistory, now: float | None = None) -> list[BillPart]:
    """Return what each attempt used, as the events tell; ``now``: the newest goes on, and is paid up to this moment."""
    parts, endings = [], {event.attempt: event for event in history.endings}
    for attempt in history.attempts:
        if attempt.started is None:
            continue
        is_newest = attempt is history.attempts[-1]
        running = max(0.0, now - attempt.last_time) if is_newest and now is not None else 0.0
        end = endings.get(attempt.number)
        word: str = "failed" if isinstance(end, Failed) else "" if end is None else end.status
        word = word or ("running" if is_newest and now is not None else "killed")
        parts.append(part_of(attempt.started, seconds=attempt.wall + running, began=attempt.process_began, ended=word))
    return parts


def parts_from(values: object) -> list[BillPart]:
    """Build the parts that a checkpoint holds; what is no such list has none."""
    parts = []
    for value in values if isinstance(values, list) else ():
        is_table = isinstance(value, dict)
        for readable in (value, {**value, "price": None}) if is_table else ():  # of an odd price the time still counts
            with suppress(msgspec.ValidationError):
                parts.append(replace(msgspec.convert(readable, BillPart), source="checkpoint"))
                break
    return parts


def merge_parts(saved: Iterable[BillPart], logged: Iterable[BillPart]) -> list[BillPart]:
    """Join the parts of a checkpoint and of the events, oldest first: of an attempt in both, the longer time."""
    parts = {part.began: part for part in saved}
    for part in logged:
        before = parts.get(part.began)
        parts[part.began] = part if before is None else replace(part, seconds=max(part.seconds, before.seconds))
    return sorted(parts.values(), key=lambda part: part.began)


def saved_parts(run: Run) -> list[BillPart]:
    """Return what the newest readable checkpoint of a run tells of its attempts; nothing where none does."""
    for place in sorted(run.checkpoints.glob("step-*"), reverse=True):
        path = place / "state.json"
        try:
            about = path.lstat()
            if not stat.S_ISREG(about.st_mode):  # a link leads elsewhere, and a pipe never ends
                continue
            parts = _parts_in(path, about.st_mtime_ns)
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
        if parts:
            return list(parts)
    return []


@lru_cache(maxsize=8)
def _parts_in(path: Path, changed: int) -> tuple[BillPart, ...]:
    """Read one checkpoint's plain half, without torch: ``about.spent`` is a text of JSON in it."""
    about = json.loads(read_text(path, most=None))["state"]["map"]["about"]["map"]
    return tuple(parts_from(json.loads(about["spent"]["value"]))) if "spent" in about else ()


@dataclass(frozen=True, kw_only=True)
class Bill:
    """The cost of a run; ``at_end``: the cost when it ends, None where that is not known or it is over.

    ``parts``, and what was spent before them, add up to ``so_far``; ``unpriced_seconds``: of attempts of which no price
    is known, which are not in it.
    ``price``: of the newest attempt. ``seconds``: of all attempts.
    """

    parts: tuple[BillPart, ...]
    price: Price
    so_far: float
    at_end: float | None
    unpriced_seconds: float = 0.0

    @property
    def currency(self) -> str:
        """The currency of every amount."""
        return self.price.currency

    @property
    def seconds(self) -> float:
        """Wall time of all attempts, without the pauses between them."""
        return sum(part.seconds for part in self.parts)

    @property
    def device_seconds(self) -> float:
        """Return the seconds of all devices."""
        return sum(part.device_seconds for part in self.parts)

    @property
    def per_hour(self) -> float:
        """The cost of an hour at the newest attempt's price, all machines together."""
        return self.parts[-1].per_hour

    def to_dict(self) -> dict[str, Any]:
        """Return its amounts as JSON has them, without the parts."""
        amounts = {"so_far": self.so_far, "at_end": self.at_end, "per_hour": self.per_hour, "currency": self.currency}
        times = {"seconds": self.seconds, "device_seconds": self.device_seconds}
        return {**amounts, "price": to_dict(self.price), **times, "unpriced_seconds": self.unpriced_seconds}

    def until(self, time: float) -> float:
        """Return what was spent up to a moment, seconds since 1970."""
        return sum(
            part.money * min(1.0, max(0.0, time - part.began) / part.seconds) for part in self.parts if part.seconds > 0
        )

    def __str__(self) -> str:
        """Describe the bill.

        >>> price = Price(name="", per_hour=3.6)
        >>> part = BillPart(began=0.0, seconds=420.0, price=price)
        >>> str(Bill(parts=(part,), price=price, so_far=part.money, at_end=3.1))
        'so far 0.42 USD, about 3.10 at the end'
        >>> str(Bill(parts=(part,), price=price, so_far=part.money, at_end=None))
        '0.42 USD'
        """
        so_far = f"{money(self.so_far)} {self.currency}"
        return so_far if self.at_end is None else f"so far {so_far}, about {money(self.at_end)} at the end"


def make_bill(
    parts: Sequence[BillPart], *, price: Price | None = None, left: float | None = None, spent: float = 0.0
) -> Bill | None:
    """Add up what a run's attempts cost; None where no price is known of any, or there is none.

    Args:
        parts: of :func:`merge_parts`.
        price: for all attempts, whatever they had; None: each its own.
        left: seconds that the run still takes; None: unknown, or it is over.
        spent: by earlier attempts, which are not among the parts.

    Raises:
        InputError: attempts have prices in several currencies.
    """
    priced = [part if price is None else replace(part, price=price) for part in parts]
    prices = [part.price for part in priced if part.price is not None]
    if not prices:
        return None
    currencies = dict.fromkeys(price.currency for price in prices)
    if len(currencies) > 1:
        raise InputError(f"the attempts have prices in {' and '.join(currencies)}: give one for all of them by --price")
    so_far = spent + sum(part.money for part in priced)
    rate = priced[-1].per_hour or prices[-1].per_hour * priced[-1].machines
    return Bill(
        parts=tuple(priced),
        price=prices[-1],
        so_far=so_far,
        at_end=None if left is None else so_far + rate * left / 3600,
        unpriced_seconds=sum(part.seconds for part in priced if part.price is None),
    )


def bill_of(
    run: Run, history: RunHistory, *, price: Price | None = None, now: float | None = None, left: float | None = None
) -> Bill | None:
    """Return the bill of a run by its events and its newest checkpoint; None where no price is known.

    Args:
        price: for all attempts; None: what each had, and if none had one, what recipe or environment name now.
        now: the newest attempt goes on, and is paid up to this moment, seconds since 1970.
        left: as of :func:`make_bill`.

    Raises:
        InputError: as of :func:`make_bill` and :func:`~steadytrain.cost.prices.known_price`.
    """
    parts = merge_parts(saved_parts(run), parts_of(history, now))
    if price is None and all(part.price is None for part in parts):
        price = known_price(run.recipe.parallel.price)
    return make_bill(parts, price=price, left=left)


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Shares of the cost, at the run's mean rate: ``setup`` (starts and warm-up), ``lost`` (done again), an epoch.

    ``evaluations`` and ``checkpoints`` are in ``per_epoch``, which is None before an epoch's worth of updates.
    """

    setup: float
    lost: float
    evaluations: float
    checkpoints: float
    per_epoch: float | None


def shares(bill: Bill, history: RunHistory) -> Shares:
    """Split a bill by purpose as the ledger splits the time."""
    ledger = history.ledger()
    rate = sum(part.money for part in bill.parts) / bill.seconds if bill.seconds > 0 else 0.0
    setup, lost = ledger.seconds["startup"] + ledger.seconds["warmup"], ledger.seconds["lost"]
    epochs = history.epoch(history.step)
    return Shares(
        setup=rate * setup,
        lost=rate * lost,
        evaluations=rate * ledger.seconds["evaluation"],
        checkpoints=rate * ledger.seconds["checkpoint"],
        per_epoch=rate * (ledger.wall_seconds - setup - lost) / epochs if epochs > 0 else None,
    )


@dataclass(frozen=True, kw_only=True)
class Habits:
    """Measured times of saving and starting, from a run's own events: they say what an interruption costs.

    ``interval``: seconds between two checkpoints; ``restart``: from the start of its process to the first update;
    ``interruptions``: attempts that ended before the run did, in ``hours``; ``away``: mean seconds until the next.
    """

    interval: float
    restart: float
    interruptions: int
    hours: float
    away: float | None

    @property
    def per_hour(self) -> float | None:
        """Interruptions an hour; None where there were none, which says little of a short run."""
        return self.interruptions / self.hours if self.interruptions and self.hours > 0 else None


def habits(history: RunHistory) -> Habits:
    """Measure how a run saves and starts."""
    gaps = [
        after.time - before.time
        for before, after in zip(history.saved, history.saved[1:], strict=False)
        if before.attempt == after.attempt and after.step > before.step
    ]
    cost = fmean(event.cost for event in history.saved) if history.saved else 0.0
    interval = median(gaps) if gaps else history.recipe.every.seconds_between_saves(cost)
    starts = [attempt.began - attempt.process_began for attempt in history.attempts if attempt.started]
    num = len(history.attempts) - 1
    return Habits(
        interval=interval,
        restart=fmean(starts) if starts else 0.0,
        interruptions=max(0, num),
        hours=sum(attempt.wall for attempt in history.attempts) / 3600,
        away=history.away_seconds / num if num > 0 else None,
    )


@dataclass(frozen=True, kw_only=True)
class Interrupted:
    """The expected time of a run, and what is paid of it, on a machine that is taken away now and then.

    ``paid_seconds``: of the machine, lost work and restarts included; ``seconds``: with the waits for capacity, which
    are not paid; both are infinite where more is lost than done.
    """

    paid_seconds: float
    seconds: float
    interruptions: float


def expect(work: float, *, per_hour: float, interval: float, restart: float, wait: float = 0.0) -> Interrupted:
    """Return what ``work`` seconds take where the machine is taken away ``per_hour`` times an hour, at any moment.

    Each interruption loses half an interval between checkpoints in the mean, and a restart (J. W. Young, A first order
    approximation to the optimum checkpoint interval, Comm. ACM 17, 1974, 530-531), and they come while work is done
    again as well: T = W + N (interval / 2 + restart) with N = T per_hour / 3600 interruptions, so
    T = W / (1 - per_hour (interval / 2 + restart) / 3600). After each, ``wait`` seconds pass until there is a machine.

    >>> spot = expect(36000.0, per_hour=0.5, interval=600.0, restart=60.0, wait=300.0)
    >>> round(spot.paid_seconds), round(spot.seconds), round(spot.interruptions, 2)
    (37895, 39474, 5.26)
    >>> expect(3600.0, per_hour=10.0, interval=600.0, restart=60.0).paid_seconds
    inf
    """
    rate = per_hour / 3600
    share = rate * (interval / 2 + restart)
    if share >= 1:
        return Interrupted(paid_seconds=math.inf, seconds=math.inf, interruptions=math.inf)
    paid = work / (1 - share)
    num = paid * rate
    return Interrupted(paid_seconds=paid, seconds=paid + num * wait, interruptions=num)


def break_even(spot: float, on_demand: float, *, interval: float, restart: float) -> float:
    """Return up to how many interruptions an hour spot costs less: where spot T = on_demand W, by :func:`expect`.

    >>> round(break_even(1.0, 4.0, interval=600.0, restart=60.0), 6)
    7.5
    """
    lost = interval / 2 + restart
    return math.inf if lost <= 0 else max(0.0, 1 - spot / on_demand) * 3600 / lost


@dataclass(frozen=True, kw_only=True)
class SpotRow:
    """An offer on spot against on demand, for the whole work of a run."""

    offer: Offer
    on_demand_money: float | None
    expected: Interrupted
    money: float
    break_even_per_hour: float | None


def spot_rows(
    offers: Iterable[Offer], work: float, measured: Habits, *, per_hour: float, machines: int = 1
) -> list[SpotRow]:
    """Return what a run's work costs on each offer that has a spot price, the cheapest first."""
    rows = []
    wait = measured.away or 0.0
    expected = expect(work, per_hour=per_hour, interval=measured.interval, restart=measured.restart, wait=wait)
    for offer in offers:
        if offer.spot is None:
            continue
        on_demand = offer.on_demand
        even = None
        if on_demand:
            even = break_even(offer.spot, on_demand, interval=measured.interval, restart=measured.restart)
        rows.append(
            SpotRow(
                offer=offer,
                on_demand_money=None if on_demand is None else machines * on_demand * work / 3600,
                expected=expected,
                money=machines * offer.spot * expected.paid_seconds / 3600,
                break_even_per_hour=even,
            )
        )
    return sorted(rows, key=lambda row: row.money)


@dataclass(frozen=True, kw_only=True)
class WhatIf:
    """An estimate of a whole run on another machine: between ``low`` and ``high`` by the ratios of the peaks alone."""

    offer: Offer
    seconds: float
    low: float
    high: float
    money: float


def accelerator_of(device: str) -> str | None:
    """Return the table's name of a GPU by what its driver calls it; None for one that it lacks, and for a processor.

    >>> accelerator_of("Tesla V100-SXM2-16GB"), accelerator_of("NVIDIA A100 80GB PCIe"), accelerator_of("cpu")
    ('V100', 'A100-80GB', None)
    """
    return next((name for name, peak in peaks().items() if re.search(peak["device"], device)), None)


def what_if(history: RunHistory, offers: Iterable[Offer], work: float) -> list[WhatIf]:
    """Estimate a run's time and money on other machines, the cheapest first.

    Only what the devices compute is scaled (:data:`COMPUTING`), by the square root of the product of two ratios: of the
    peak FLOP/s in the run's number format, and of the memory bandwidth; ``low`` and ``high`` are the ratios themselves.
    Several GPUs are taken to add up without loss. Where the run was on a processor, its measured FLOP/s stand for its
    peak, and nothing is known of its bandwidth. It is an estimate: of two published pairs of ResNet-50 and ResNet-152
    rates, H100 over A100 comes out 9 % too fast, V100 over K80 41 % too slow.

    Args:
        history: of the run, whose machine must be known.
        offers: with a price on demand; those of a GPU without peaks are left out.
        work: seconds of the whole run on its own machine, to its end.
    """
    started, ledger = history.started, history.ledger()
    if started is None or ledger.wall_seconds <= 0:
        return []
    numbers = str(started.machine.get("precision", "fp32")).removeprefix("pure-")
    kind = "half" if numbers in ("bf16", "fp16") else numbers
    ranks = started.machine.get("ranks", 1)
    accelerator = accelerator_of(str(started.machine.get("device", "")))
    if accelerator is not None:
        flops, bandwidth = ranks * _peak(accelerator, kind), ranks * peaks()[accelerator]["bandwidth"]
    elif (measured := history.newest(StepMeasured)) is not None and measured.peak_flops:
        flops, bandwidth = ranks * measured.peak_flops / 1e12, None
    else:
        return []
    computing = ledger.share(*COMPUTING)
    rows = []
    for offer in offers:
        if offer.on_demand is None or offer.accelerator not in peaks() or offer.count <= 0:
            continue
        by_flops = offer.count * _peak(offer.accelerator, kind) / flops
        by_bandwidth = by_flops
        if bandwidth is not None:
            by_bandwidth = offer.count * peaks()[offer.accelerator]["bandwidth"] / bandwidth
        times = [
            work * (1 - computing + computing / factor)
            for factor in (math.sqrt(by_flops * by_bandwidth), max(by_flops, by_bandwidth), min(by_flops, by_bandwidth))
        ]
        money = offer.on_demand * times[0] / 3600
        rows.append(WhatIf(offer=offer, seconds=times[0], low=times[1], high=times[2], money=money))
    return sorted(rows, key=lambda row: row.money)


def _peak(name: str, kind: str) -> float:
    peak = peaks()[name]
    return float(peak.get(kind, peak["fp32"]))
