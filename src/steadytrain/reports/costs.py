"""The cost of a run, in words and as plain data: its bill, spot offers, other machines; and the table of prices."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from steadytrain.config.plain import plain
from steadytrain.cost.bill import (
    Bill,
    BillPart,
    Energy,
    Habits,
    SpotRow,
    WhatIf,
    bill_of,
    energy,
    habits,
    make_bill,
    merge_parts,
    parts_of,
    saved_parts,
    shares,
    spot_rows,
    what_if,
)
from steadytrain.cost.prices import Offer, Price, all_offers, known_price, parse_price
from steadytrain.errors import InputError, RunError
from steadytrain.format import NONE, clean, count, duration, epoch, money, percent, score_name, text_table, when, wrap
from steadytrain.interop.logs import LogRun
from steadytrain.monitor import RunHistory, read_history
from steadytrain.reports.status import current_bill, signs, time_left
from steadytrain.reports.summary import Reached, reached
from steadytrain.reports.tables import finite
from steadytrain.run import Run

HOW_TO_PRICE = (
    "--price 2.40 (an hour), 0.30 EUR/kWh@450W, or --instance p3.2xlarge; or train with --price, or set"
    " STEADYTRAIN_PRICE (steady cost prices lists instances)"
)

MOST_ROWS = 60
"""Of a table of prices on a terminal: a fetched catalogue has tens of thousands."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The options of ``steady cost``.

    Args:
        price: of an hour of each machine; None: what the run recorded.
        instance, cloud, region: whose spot offers are compared, and whose other machines.
        before: compare by prices of this day, ``YYYY-MM-DD``, or older ones; None: by the newest.
        target: an accuracy, a fraction: what it cost to reach it.
        what_if: estimate the run on other machines.
        interruptions: an hour, on spot; None: as in the run.
        wait_minutes: until there is capacity again after one; None: as in the run.
    """

    price: Price | None = None
    instance: str | None = None
    cloud: str | None = None
    region: str | None = None
    before: str | None = None
    target: float | None = None
    what_if: bool = False
    interruptions: float | None = None
    wait_minutes: float | None = None

    def offers(self) -> list[Offer]:
        """Return the newest row of each instance in each place that was asked about."""
        newest: dict[tuple[str, str, str, str], Offer] = {}
        for offer in all_offers():
            key = (offer.cloud, offer.region, offer.zone, offer.instance)
            matches = self.cloud is None or offer.cloud == self.cloud.lower()
            matches = matches and (self.region is None or self.region in (offer.region, offer.zone))
            matches = matches and (self.before is None or offer.date <= self.before)
            if matches and (key not in newest or newest[key].date <= offer.date):
                newest[key] = offer
        return list(newest.values())


@dataclass(frozen=True)
class RunCost:
    """The cost of one run, and what was asked besides; ``history`` is None where its event log is lost.

    ``left``: seconds that it still takes; None: unknown, or it is over. ``log``: the other program's that it was read
    from; None for a run of ours.
    """

    run: Run
    bill: Bill
    status: str
    history: RunHistory | None
    left: float | None
    question: Question
    log: LogRun | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the cost as plain data, ready for JSON."""
        document: dict[str, Any] = {"format": "steadytrain-cost", "version": 1, "run": str(self.run.directory)}
        document |= {"status": self.status, **self.bill.to_dict(), "remaining_seconds": self.left}
        document["attempts"] = [
            {**part.to_dict(), "money": part.money, "source": part.source, "ended": part.ended}
            for part in self.bill.parts
        ]
        if self.history is None:
            return document
        document["shares"] = plain(shares(self.bill, self.history))
        if self.question.target is not None:
            hit, best = self.target(self.history), self.best(self.history)
            score = {"score": self.question.target, "money": None, "epoch": None, "best": best}
            document["target"] = score if hit is None else {**score, "money": hit.cost, "epoch": hit.epoch}
        used = energy(self.history)
        document["energy"] = (
            None if used is None else {**plain(used), "kwh": used.kwh, "money": self.energy_money(used)}
        )
        document["habits"] = plain(habits(self.history))
        document["spot"] = [plain(row) for row in self.spot(self.history)]
        document["what_if"] = [plain(row) for row in self.others(self.history)]
        result: dict[str, Any] = finite(document)
        return result

    def target(self, history: RunHistory) -> Reached | None:
        """Return when the target was reached and what had been spent by then; None if it was not, or there is none."""
        return None if self.question.target is None else reached(history, self.question.target, self.bill)

    def best(self, history: RunHistory) -> float | None:
        """Return the highest accuracy of all evaluations."""
        return max((event.score for event in history.evaluated), default=None)

    def work(self, history: RunHistory) -> float:
        """Return the seconds of the whole run without lost work: what another machine would have to do."""
        ledger = history.ledger()
        return max(0.0, ledger.wall_seconds - ledger.seconds["lost"]) + (self.left or 0.0)

    def rates(self, measured: Habits) -> tuple[float, float]:
        """Return the interruptions per hour and the seconds of waiting to assume: as asked for, else as measured."""
        per_hour, wait = self.question.interruptions, self.question.wait_minutes
        return (
            (measured.per_hour or 0.0) if per_hour is None else per_hour,
            (measured.away or 0.0) if wait is None else 60 * wait,
        )

    def spot(self, history: RunHistory) -> list[SpotRow]:
        """Return the spot offers of the instance that was named."""
        instance = self.question.instance
        if instance is None:
            return []
        measured = habits(history)
        per_hour, wait = self.rates(measured)
        offers = [offer for offer in self.question.offers() if offer.instance.lower() == instance.lower()]
        machines = self.bill.parts[-1].machines
        return spot_rows(offers, self.work(history), measured, per_hour=per_hour, wait=wait, machines=machines)

    def others(self, history: RunHistory) -> list[WhatIf]:
        """Return the run on other machines, if that was asked: of each instance the cheapest region."""
        if not self.question.what_if:
            return []
        cheapest: dict[str, WhatIf] = {}
        for row in what_if(history, self.question.offers(), self.work(history)):
            cheapest.setdefault(f"{row.offer.cloud}/{row.offer.instance}", row)
        return list(cheapest.values())

    def energy_money(self, used: Energy) -> float | None:
        """Return what the measured energy costs; None where the price is not one per kWh."""
        per_kwh = self.bill.price.per_kwh
        return None if per_kwh is None else used.kwh * per_kwh

    def to_text(self, width: int) -> str:
        """Format the cost in lines of at most ``width`` columns."""
        lines = list(self._bill_lines(width))
        if self.history is not None:
            lines += ["", *self._purposes(self.history)]
            lines += [*self._spot_lines(self.history, width), *self._what_if_lines(self.history, width)]
        return "\n".join(lines)

    def _bill_lines(self, width: int) -> Iterator[str]:
        bill, started = self.bill, None if self.history is None else self.history.started
        model = "" if started is None else f"{started.model.get('name', NONE)}, "
        yield clean(f"{self.run.directory}: {model}{self.status}")
        yield f"{bill}"
        yield f"for {duration(bill.seconds)} of wall time, {bill.device_seconds:,.0f} device-seconds"
        yield from wrap(f"price: {bill.price}", width, "", "  ")
        for label, text in (("source", bill.price.source), ("estimate", bill.price.estimate)):
            if text:
                yield from wrap(f"{label}: {text}", width, "  ", "    ")
        if bill.unpriced_seconds:
            yield f"{duration(bill.unpriced_seconds)} have no price and are not in it: give --price"
        yield ""
        rows = [["attempt", "began", "wall time", "devices", bill.currency, "ended"]]
        for number, part in enumerate(bill.parts, 1):
            began = when(part.began) if self.log is None or math.isfinite(self.log.began) else NONE
            cells = [
                str(number),
                began,
                duration(part.seconds),
                str(part.devices),
                money(part.money),
            ]
            rows.append([*cells, part.ended or "(by its checkpoint)"])
        yield text_table(rows, right=(0, 2, 3, 4))
        if (machines := max(part.machines for part in bill.parts)) > 1:
            yield f"on {machines} machines, each at that price"
        if self.log is not None and self.log.num_workers > 1:
            yield f"{self.log.num_workers} workers wrote the log: the price is that of one machine, which all share"

    def _purposes(self, history: RunHistory) -> Iterator[str]:
        """Yield the purposes of the spending, a line each."""
        bill, split = self.bill, shares(self.bill, history)
        total = bill.so_far or 1.0
        rows: list[tuple[str, float | None, str]] = [
            ("set-up and warm-up", split.setup, percent(split.setup / total)),
            *([("work done again", split.lost, percent(split.lost / total))] if split.lost else []),
            ("evaluations", split.evaluations, percent(split.evaluations / total)),
            ("checkpoints", split.checkpoints, percent(split.checkpoints / total)),
            ("an epoch", split.per_epoch, "evaluations in it, set-up not"),
        ]
        if self.question.target is not None:
            hit, best = self.target(history), self.best(history)
            at = "not reached; no evaluation yet" if best is None else f"not reached; best so far: {percent(best, 2)}"
            at = at if hit is None else f"at epoch {epoch(hit.epoch)}"
            label = f"to {score_name(history.is_multi_label)} {percent(self.question.target, 2)}"
            rows.append((label, None if hit is None else hit.cost, at))
        cells = [
            [label, NONE if amount is None else f"{money(amount)} {bill.currency}", more]
            for label, amount, more in rows
        ]
        yield text_table(cells, right=(1,))
        if self.log is None:
            used = energy(history)
            paid = None if used is None else self.energy_money(used)
            yield energy_words(used, "" if paid is None else f", {money(paid)} {bill.currency}")

    def _spot_lines(self, history: RunHistory, width: int) -> Iterator[str]:
        rows, question = self.spot(history), self.question
        if question.instance is None:
            return
        yield ""
        if not rows:
            yield f"spot: no spot price of {question.instance} is known: steady cost prices --refresh URL|FILE"
            return
        measured = habits(history)
        per_hour, wait = self.rates(measured)
        origin = "as in this run" if question.interruptions is None else "as given"
        source = "measured here" if self.log is None else "assumed: the log does not say it"
        yield f"spot against on demand, for {duration(self.work(history))} of work"
        words = f"interruptions an hour: {per_hour:.3g} ({origin}); a checkpoint every {duration(measured.interval)},"
        words += f" a restart in {duration(measured.restart)} ({source}), {duration(wait)} until there is capacity"
        yield from wrap(f"{words} again", width, "  ")
        cells = [["where", "spot/h", "time", "USD", "on demand", "price of"]]
        for row in rows[:MOST_ROWS]:
            ends = math.isfinite(row.expected.seconds)
            paid, took = (money(row.money), duration(row.expected.seconds)) if ends else (NONE, "never")
            other = NONE if row.on_demand_money is None else money(row.on_demand_money)
            place = (row.offer.zone or row.offer.region)[:21]
            cells.append([place, f"{row.offer.spot:.4g}", took, paid, other, row.offer.date])
        yield _indented(text_table(cells, right=(1, 2, 3, 4)))
        best = rows[0]
        if best.break_even_per_hour is not None and math.isfinite(best.break_even_per_hour):
            place = best.offer.zone or best.offer.region
            words = f"in {place} spot costs less up to {best.break_even_per_hour:.3g} interruptions an hour"
            yield from wrap(words, width, "  ")

    def _what_if_lines(self, history: RunHistory, width: int) -> Iterator[str]:
        if not self.question.what_if:
            return
        rows = self.others(history)
        yield ""
        device = history.started.machine.get("device") if history.started else None
        if not rows:
            words = f"what if: nothing to scale from: the table lacks the peaks of {device!r}, and this run did not"
            yield from wrap(f"{words} measure its own", width, "", "  ")
            return
        yield "on other machines: an ESTIMATE by ratios of peak FLOP/s and memory bandwidth"
        cells = [["instance", "GPUs", "time", "USD", "price of"]]
        for row in rows[:12]:
            offer, name = row.offer, f"{row.offer.cloud} {row.offer.instance}"
            gpus = f"{offer.count:g} x {offer.accelerator}"
            cells.append([name[:27], gpus, duration(row.seconds), money(row.money), offer.date])
        yield _indented(text_table(cells, right=(1, 2, 3)))
        low, high = rows[0].low, rows[0].high
        spread = "" if low == high else f"; by either ratio alone, the first takes {duration(low)} to {duration(high)}"
        error = (
            f"Several GPUs are taken to add up without loss{spread}. Of two published pairs, H100 over A100 comes out"
            " 9 % too fast and V100 over K80 41 % too slow; from a processor to a GPU the error is not known."
        )
        yield from wrap(error, width, "  ")


@dataclass(frozen=True)
class RunUsage:
    """The hours and the energy of one run of which no price is known; the fields are those of :class:`RunCost`."""

    run: Run
    parts: tuple[BillPart, ...]
    status: str
    history: RunHistory | None
    left: float | None

    def to_dict(self) -> dict[str, Any]:
        """Return the usage as plain data, ready for JSON: as a cost has it, whose amounts are null."""
        used = None if self.history is None else energy(self.history)
        document: dict[str, Any] = {"format": "steadytrain-cost", "version": 1, "run": str(self.run.directory)}
        document |= {"status": self.status, "so_far": None, "at_end": None, "currency": None, "price": None}
        document |= {"seconds": sum(part.seconds for part in self.parts), "remaining_seconds": self.left}
        document["device_seconds"] = sum(part.device_seconds for part in self.parts)
        document["attempts"] = [
            {**part.to_dict(), "money": None, "source": part.source, "ended": part.ended} for part in self.parts
        ]
        document["energy"] = None if used is None else {**plain(used), "kwh": used.kwh, "money": None}
        result: dict[str, Any] = finite(document)
        return result

    def to_text(self, width: int) -> str:
        """Format the usage in lines of at most ``width`` columns, with what gives it a price."""
        seconds, devices = sum(part.seconds for part in self.parts), sum(part.device_seconds for part in self.parts)
        left = "" if self.left is None else f", about {duration(self.left)} until the end"
        lines = [
            clean(f"{self.run.directory}: {self.status}"),
            f"{duration(seconds)} of wall time in {count(len(self.parts), 'attempt')}{left}",
            f"{devices / 3600:,.3g} hours of devices, {max(part.devices for part in self.parts)} at a time",
            energy_words(None if self.history is None else energy(self.history)),
            *wrap(f"no price is known: {HOW_TO_PRICE}", width, "", "  "),
        ]
        return "\n".join(lines)


def energy_words(used: Energy | None, worth: str = "") -> str:
    """Say how much energy was measured; ``worth``: what it costs, with a comma before it."""
    if used is None:
        return "energy: nothing could be read (RAPL: /sys/class/powercap; GPUs: NVML)"
    parts = [] if used.cpu_joules is None else [f"processors {used.cpu_joules / 3.6e6:.3g} kWh"]
    parts += [] if used.gpu_joules is None else [f"GPUs {used.gpu_joules / 3.6e6:.3g} kWh"]
    return f"energy: {used.kwh:.3g} kWh{worth} ({', '.join(parts)}; {used.watts:.0f} W in the mean)"


def bill(run: Run | str | Path, *, price: Price | str | float | None = None) -> Bill:
    """Return the bill of a run, finished, running or killed: its attempts, their sum, and an estimate for the end.

    Args:
        run: it, or its folder.
        price: of an hour of each machine, as of ``steady cost --price``: ``2.40``, ``2.40 EUR``, ``0.30 EUR/kWh@450W``
            or an instance; None: what each attempt recorded, else what the recipe or ``STEADYTRAIN_PRICE`` names.

    Raises:
        RunError: no run, or one without events and checkpoints.
        InputError: no price is known, or it cannot be used.

    >>> bill("nowhere")
    Traceback (most recent call last):
    ...
    steadytrain.errors.RunError: nowhere does not exist
    """
    parsed = parse_price(str(price), name="price") if isinstance(price, str | int | float) else price
    cost = run_cost(Run.open(run), Question(price=parsed))
    if isinstance(cost, RunUsage):
        raise _no_price(cost.run)
    return cost.bill


def _no_price(run: Run) -> InputError:
    return InputError(f"no price is known of {run.directory}: give {HOW_TO_PRICE}")


def run_cost(run: Run, question: Question) -> RunCost | RunUsage:
    """Read a run and compute its cost, or what it used where no price is known.

    Raises:
        RunError: it has neither events nor a checkpoint.
        InputError: the prices cannot be used, or none is known and the question is one of money.
    """
    history: RunHistory | None
    try:
        history = read_history(run, all_ranks=False)
    except RunError:
        history = None  # its checkpoints may tell of it
    now = time.time()
    if history is None:
        status, left = "event log lost", None
        total = bill_of(run, RunHistory(run.recipe), price=question.price)
    else:
        seen = signs(run, history, now)
        status, left = seen.status, time_left(history, seen, now)
        total = current_bill(run, history, seen, now, price=question.price)
    if total is not None:
        return RunCost(run, total, status, history, left, question)
    parts = merge_parts(
        saved_parts(run), () if history is None else parts_of(history, now if status == "running" else None)
    )
    if not parts:
        raise RunError(f"{run.directory} has neither events nor a checkpoint: start the run, then try again")
    return _usage(RunUsage(run, tuple(parts), status, history, left), question)


def _usage(usage: RunUsage, question: Question) -> RunUsage:
    """Return a run's usage, unless money was asked for. Raises InputError."""
    if question.target is not None or question.what_if:
        raise _no_price(usage.run)
    return usage


def log_cost(log: LogRun, question: Question) -> RunCost | RunUsage:
    """Compute the cost of another program's log: of the time that it tells of, and of the epochs that are missing.

    Raises:
        InputError: the log says nothing of its time, or no price is known and the question is one of money.
    """
    history = RunHistory(log.recipe)
    for event in log.events():
        history.take(event)
    if not history.ledger().wall_seconds > 0:
        raise InputError(
            f"{log.directory} says neither how long an epoch took nor when its lines were written: no cost"
        )
    ended, devices = "finished" if log.is_complete else "log ends", log.num_devices
    parts = [replace(part, devices=devices or part.devices, ended=ended) for part in parts_of(history)]
    total = make_bill(parts, price=question.price or known_price(None), left=log.seconds_left)
    status = f"{log.title}, {'finished' if log.is_complete else log.ending}"
    run = Run(log.directory, log.recipe)
    if total is None:
        return _usage(RunUsage(run, tuple(parts), status, history, log.seconds_left), question)
    return RunCost(run, total, status, history, log.seconds_left, question, log)


def price_table(offers: Sequence[Offer], width: int) -> str:
    """Format offers, under their clouds, with the sources of their prices."""
    shown = sorted(offers, key=lambda o: (o.cloud, o.accelerator, o.instance, o.region, o.zone, o.date))[:MOST_ROWS]
    cells, clouds = list[list[str]](), set[str]()
    for offer in shown:
        if offer.cloud not in clouds:
            clouds.add(offer.cloud)
            cells.append([offer.cloud, "GPUs", "region", "USD/h", "spot", " date"])
        gpus = f"{offer.count:g} {offer.accelerator}" if offer.accelerator else NONE
        amounts = [NONE if value is None else f"{value:.4g}" for value in (offer.on_demand, offer.spot)]
        place, mark = (offer.zone or offer.region)[:15], "*" if offer.estimate else " "
        cells.append([f"  {offer.instance[:24]}", gpus, place, *amounts, f"{mark}{offer.date}"])
    lines = [text_table(cells, right=(1, 3, 4))]
    if estimates := dict.fromkeys(f"  {offer.instance}: {offer.estimate}" for offer in shown if offer.estimate):
        lines += ["", "* in part an estimate", *estimates]
    sources = dict.fromkeys(f"{offer.date}: {offer.source}" for offer in shown)
    lines += ["", "sources", *(line for source in sources for line in wrap(source, width, "  ", "    "))]
    if (more := len(offers) - len(shown)) > 0:
        lines += ["", f"{count(more, 'more row')}: name a cloud, region, instance or GPU, or give --json"]
    return "\n".join(lines)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
