"""The cost of a run, in words and as plain data: its bill, spot offers, other machines; and the table of prices."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from steadytrain.config.plain import finite, plain
from steadytrain.cost.bill import (
    Bill,
    BillPart,
    SpotRow,
    WhatIf,
    bill_of,
    habits,
    make_bill,
    merge_parts,
    parts_of,
    saved_parts,
    shares,
    spot_rows,
    what_if,
)
from steadytrain.cost.prices import Offer, Price, all_offers, find_offer, known_price, parse_price, select
from steadytrain.errors import InputError, RunError
from steadytrain.format import NONE, clean, count, duration, epoch, money, percent, score_name, text_table, when, wrap
from steadytrain.monitor import RunHistory, read_history
from steadytrain.reports.files import find_all
from steadytrain.reports.logs import ForeignRun
from steadytrain.reports.status import current_bill, signs, time_left
from steadytrain.reports.summary import reached
from steadytrain.run import Run

HOW_TO_PRICE = (
    "--price 2.40 (an hour), 0.30 EUR/kWh@450W, or --instance p3.2xlarge; or train with --price, or set"
    " STEADYTRAIN_PRICE (steady cost prices lists instances)"
)

MOST_ROWS = 60
"""The most rows of a table of prices on a terminal: a fetched catalogue has tens of thousands."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """The options of ``steady cost``.

    Args:
        price: of an hour of each machine, as :func:`~steadytrain.cost.prices.parse_price` reads it; None: what the run
            recorded, or that of ``instance``.
        instance, cloud, region: whose spot offers are compared, and whose other machines.
        target: an accuracy, a fraction: what it cost to reach it.
        what_if: estimate the run on other machines.
        interruptions: an hour, on spot; None: as in the run.

    Raises:
        InputError: options that exclude or need each other.
    """

    price: str | Price | None = None
    instance: str | None = None
    cloud: str | None = None
    region: str | None = None
    target: float | None = None
    what_if: bool = False
    interruptions: float | None = None

    def __post_init__(self) -> None:
        if self.price is not None and self.instance is not None:
            raise InputError(f"--price {self.price} and --instance {self.instance} exclude each other: give one")
        if self.instance is None and not self.what_if and (self.cloud or self.region):
            raise InputError("--cloud and --region need --instance NAME, or --what-if")

    @cached_property
    def chosen(self) -> Price | None:
        """The price that was asked for. Raises InputError."""
        if isinstance(self.price, str):
            return parse_price(self.price)
        if self.price is None and self.instance is not None:
            return find_offer(self.instance, cloud=self.cloud, region=self.region).price()
        return self.price

    def offers(self) -> list[Offer]:
        """Return the newest row of each instance in each place that was asked about."""
        offers = sorted(select(all_offers(), self.cloud, self.region), key=lambda offer: offer.date)
        return list({(offer.cloud, offer.region, offer.zone, offer.instance): offer for offer in offers}.values())


@dataclass(frozen=True)
class RunCost:
    """The cost of one run, and what was asked besides.

    Args:
        parts: the usage of its attempts.
        bill: None where no price is known.
        status: in words.
        history: None where its event log is lost.
        left: seconds that it still takes; None: unknown, or it is over.
        log: the other program's that it was read from; None for a run of ours.
    """

    run: Run
    parts: Sequence[BillPart]
    bill: Bill | None
    status: str
    history: RunHistory | None
    left: float | None
    question: Question
    log: ForeignRun | None = None

    def __post_init__(self) -> None:
        if self.bill is None and (self.question.target is not None or self.question.what_if):
            raise self.no_price()

    def no_price(self) -> InputError:
        """Return the error that says how to give a price."""
        return InputError(f"no price is known of {self.run.directory}: give {HOW_TO_PRICE}")

    def to_dict(self) -> dict[str, Any]:
        """Return the cost as plain data, ready for JSON; amounts are null where no price is known."""
        bill = self.bill
        document: dict[str, Any] = {"format": "steadytrain-cost", "version": 1, "run": str(self.run.directory)}
        document |= {"status": self.status, "so_far": None, "at_end": None, "currency": None, "price": None}
        document |= {"seconds": sum(part.seconds for part in self.parts)}
        document |= {"device_seconds": sum(part.device_seconds for part in self.parts)}
        document |= {} if bill is None else bill.to_dict()
        document["remaining_seconds"] = self.left
        document["attempts"] = [
            {
                **part.to_dict(),
                "money": None if bill is None else part.money,
                "source": part.source,
                "ended": part.ended,
            }
            for part in self.parts
        ]
        if self.history is not None and bill is not None:
            document |= self._measured(self.history, bill)
        result: dict[str, Any] = finite(document)
        return result

    def _measured(self, history: RunHistory, bill: Bill) -> dict[str, Any]:
        """Return what the events of a run with a price add to its document."""
        document: dict[str, Any] = {"shares": plain(shares(bill, history)), "habits": plain(habits(history))}
        if self.question.target is not None:
            hit = reached(history, self.question.target, self.bill)
            document["target"] = {
                "score": self.question.target,
                "money": hit and hit.cost,
                "epoch": hit and hit.epoch,
                "best": _best(history),
            }
        document["spot"] = [plain(row) for row in self.spot(history)]
        document["what_if"] = [plain(row) for row in self.others(history)]
        return document

    def work(self, history: RunHistory) -> float:
        """Return the seconds of the whole run without lost work: what another machine would have to do."""
        ledger = history.ledger()
        return max(0.0, ledger.wall_seconds - ledger.seconds["lost"]) + (self.left or 0.0)

    def interruptions(self, history: RunHistory) -> float:
        """Return the interruptions an hour to assume on spot: as asked for, else as measured."""
        asked = self.question.interruptions
        return (habits(history).per_hour or 0.0) if asked is None else asked

    def spot(self, history: RunHistory) -> list[SpotRow]:
        """Return the spot offers of the instance that was named."""
        instance = self.question.instance
        if instance is None:
            return []
        measured, per_hour = habits(history), self.interruptions(history)
        offers = [offer for offer in self.question.offers() if offer.instance.lower() == instance.lower()]
        return spot_rows(offers, self.work(history), measured, per_hour=per_hour, machines=self.parts[-1].machines)

    def others(self, history: RunHistory) -> list[WhatIf]:
        """Return the run on other machines, if that was asked: of each instance the cheapest region."""
        if not self.question.what_if:
            return []
        cheapest: dict[str, WhatIf] = {}
        for row in what_if(history, self.question.offers(), self.work(history)):
            cheapest.setdefault(f"{row.offer.cloud}/{row.offer.instance}", row)
        return list(cheapest.values())

    def to_text(self, width: int) -> str:
        """Format the cost in lines of at most ``width`` columns; without a price the usage, and how to give one."""
        if self.bill is None:
            return "\n".join(self._usage_lines(width))
        lines = list(self._bill_lines(self.bill, width))
        if self.history is not None:
            lines += ["", *self._purposes(self.history, self.bill)]
            lines += [*self._spot_lines(self.history, width), *self._what_if_lines(self.history, width)]
        return "\n".join(lines)

    def _usage_lines(self, width: int) -> Iterator[str]:
        seconds, devices = sum(part.seconds for part in self.parts), sum(part.device_seconds for part in self.parts)
        left = "" if self.left is None else f", about {duration(self.left)} until the end"
        yield clean(f"{self.run.directory}: {self.status}")
        yield f"{duration(seconds)} of wall time in {count(len(self.parts), 'attempt')}{left}"
        yield f"{devices / 3600:,.3g} hours of devices, {max(part.devices for part in self.parts)} at a time"
        yield from wrap(f"no price is known: {HOW_TO_PRICE}", width, "", "  ")

    def _bill_lines(self, bill: Bill, width: int) -> Iterator[str]:
        started = None if self.history is None else self.history.started
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
            cells = [str(number), began, duration(part.seconds), str(part.devices), money(part.money)]
            rows.append([*cells, part.ended or "(by its checkpoint)"])
        yield text_table(rows, right=(0, 2, 3, 4))
        if (machines := max(part.machines for part in bill.parts)) > 1:
            yield f"on {machines} machines, each at that price"
        if self.log is not None and self.log.num_workers > 1:
            yield f"{self.log.num_workers} workers wrote the log: the price is that of one machine, which all share"

    def _purposes(self, history: RunHistory, bill: Bill) -> Iterator[str]:
        """Yield the purposes of the spending, a line each."""
        split = shares(bill, history)
        total = bill.so_far or 1.0
        rows: list[tuple[str, float | None, str]] = [
            ("set-up and warm-up", split.setup, percent(split.setup / total)),
            *([("work done again", split.lost, percent(split.lost / total))] if split.lost else []),
            ("evaluations", split.evaluations, percent(split.evaluations / total)),
            ("checkpoints", split.checkpoints, percent(split.checkpoints / total)),
            ("an epoch", split.per_epoch, "evaluations in it, set-up not"),
        ]
        if self.question.target is not None:
            hit, best = reached(history, self.question.target, self.bill), _best(history)
            at = "not reached; no evaluation yet" if best is None else f"not reached; best so far: {percent(best, 1)}"
            at = at if hit is None else f"at epoch {epoch(hit.epoch)}"
            label = f"to {score_name(history.is_multi_label)} {percent(self.question.target, 1)}"
            rows.append((label, None if hit is None else hit.cost, at))
        cells = [
            [label, NONE if amount is None else f"{money(amount)} {bill.currency}", more]
            for label, amount, more in rows
        ]
        yield text_table(cells, right=(1,))

    def _spot_lines(self, history: RunHistory, width: int) -> Iterator[str]:
        rows, question = self.spot(history), self.question
        if question.instance is None:
            return
        yield ""
        if not rows:
            yield f"spot: no spot price of {question.instance} is known: steady cost prices --refresh FILE"
            return
        measured, per_hour = habits(history), self.interruptions(history)
        origin = "as in this run" if question.interruptions is None else "as given"
        source = "measured here" if self.log is None else "assumed: the log does not say it"
        yield f"spot against on demand, for {duration(self.work(history))} of work"
        words = f"interruptions an hour: {per_hour:.3g} ({origin}); a checkpoint every {duration(measured.interval)},"
        words += f" a restart in {duration(measured.restart)} ({source}),"
        words += f" {duration(measured.away or 0.0)} until there is capacity"
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


def bill(run: Run | str | Path, *, price: Price | str | float | None = None) -> Bill:
    """Return the bill of a run, finished, running or killed: its attempts, their sum, and an estimate for the end.

    ``price``: of an hour of each machine, as of ``steady cost --price``: ``2.40``, ``2.40 EUR``, ``0.30 EUR/kWh@450W``
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
    if cost.bill is None:
        raise cost.no_price()
    return cost.bill


def run_cost(run: Run, question: Question) -> RunCost:
    """Read a run and compute its cost.

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
        bill = bill_of(run, RunHistory(run.recipe), price=question.chosen)
    else:
        seen = signs(run, history, now)
        status, left = seen.status, time_left(history, seen, now)
        bill = current_bill(run, history, seen, now, price=question.chosen)
    logged = () if history is None else parts_of(history, now if status == "running" else None)
    parts = merge_parts(saved_parts(run), logged) if bill is None else bill.parts
    if not parts:
        raise RunError(f"{run.directory} has neither events nor a checkpoint: start the run, then try again")
    return RunCost(run, parts, bill, status, history, left, question)


def costs_of(paths: Sequence[str], question: Question, *, say: Callable[[str], None]) -> list[RunCost]:
    """Compute the costs of runs, of folders of runs, and of other programs' logs; ``say`` takes what is left out.

    Raises:
        RunError, InputError: as of :func:`run_cost` and :func:`log_cost`.
    """
    question.chosen  # noqa: B018  # a price that cannot be used is told before runs that cannot be read
    selection = find_all(paths, skip_unreadable=True)
    for line in selection.notes:
        say(line)
    return [run_cost(run, question) if isinstance(run, Run) else log_cost(run, question) for run in selection.runs]


def total_text(costs: Sequence[RunCost]) -> list[str]:
    """Say what several runs cost together, where all that have prices have them in one currency."""
    bills = [cost.bill for cost in costs if cost.bill is not None]
    if len(bills) < 2 or len({bill.currency for bill in bills}) > 1:
        return []
    return [f"{count(len(bills), 'run')}: {money(sum(bill.so_far for bill in bills))} {bills[0].currency}"]


def log_cost(log: ForeignRun, question: Question) -> RunCost:
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
    bill = make_bill(parts, price=question.chosen or known_price(None), left=log.seconds_left)
    status = f"{log.title}, {'finished' if log.is_complete else log.ending}"
    run = Run(log.directory, log.recipe)
    return RunCost(run, parts if bill is None else bill.parts, bill, status, history, log.seconds_left, question, log)


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


def _best(history: RunHistory) -> float | None:
    """Return the highest accuracy of all evaluations."""
    return max((event.score for event in history.evaluated), default=None)


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
