"""``steady cost``: what runs cost, so far and at their end, on spot and on other machines; the table of prices."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, print_text
from steadytrain.cli.options import Json
from steadytrain.config.plain import plain
from steadytrain.errors import InputError
from steadytrain.format import count, money

if TYPE_CHECKING:
    from steadytrain.cost.prices import Price


def cost(
    *runs: Annotated[str, Parameter(show=True)],
    price: str | None = None,
    instance: str | None = None,
    cloud: str | None = None,
    region: str | None = None,
    spot: bool = False,
    before: str | None = None,
    target: float | None = None,
    what_if: bool = False,
    interruptions: float | None = None,
    wait_minutes: float | None = None,
    refresh: str | None = None,
    json: Json = False,
) -> None:
    """Find what a run costs, finished, running or killed: so far, at its end, per attempt, epoch and accuracy.

    Every attempt counts from the start of its process to its last event. Checkpoints hold the same sum, so neither a
    kill nor a lost event log loses the bill. The price is that which the run recorded (steady train --price), or the
    one given here; without any, the hours and the measured energy are shown. It only reads, and needs neither torch nor
    a GPU.

    steady cost prices lists what instances cost, with the date of each price; words after it select.

    Args:
        runs: Folders of runs, folders that hold runs, or logs of other programs; or prices, and words to select some.
        price: Price of an hour of each machine: 2.40, 2.40 EUR, 0.30 EUR/kWh@450W, or an instance, such as
            p3.2xlarge@us-east-1:spot. [default: what the run recorded, else $STEADYTRAIN_PRICE]
        instance: An instance, by name: compare spot with on-demand prices there.
        cloud: Only machines of this cloud.
        region: Only machines of this region or zone.
        spot: Take the spot price of --instance.
        before: Use the prices of this day, such as `2018-12-31`, or the newest before it.
        target: Also show the cost until this top-1 or mAP was reached, such as 0.9.
        what_if: Also estimate the run on other GPUs, by the ratios of their peaks.
        interruptions: Interruptions an hour to expect on spot. [default: as in the run's own events]
        wait_minutes: Minutes until there is capacity again after one. [default: as in the run's own events]
        refresh: With prices: keep a catalogue of prices, a CSV as SkyPilot publishes them, from an https address or a
            file.
        json: Print one JSON document.

    Examples:
        steady cost runs/a
        steady cost runs/a --price 2.40
        steady cost runs/a --instance p3.2xlarge --target 0.9 --what-if
        steady cost train.log --instance p2.16xlarge
        steady cost prices V100
        steady cost prices --refresh aws/vms.csv
    """
    if runs[:1] == ("prices",):
        run_options = {"--price": price, "--instance": instance, "--target": target, "--what-if": what_if or None}
        if about_run := [name for name, value in run_options.items() if value is not None]:
            raise InputError(
                f"{about_run[0]} asks about a run, and steady cost prices lists prices: leave one of them out"
            )
        _prices(runs[1:], refresh=refresh, cloud=cloud, region=region, json=json)
        return
    if refresh is not None:
        raise InputError("--refresh belongs to the table of prices: steady cost prices --refresh URL|FILE")
    if not runs:
        raise InputError("no run named: steady cost runs/a; or steady cost prices, which lists prices")
    if price is not None and instance is not None:
        raise InputError(f"--price {price} and --instance {instance} exclude each other: give one of them")
    if instance is None and spot:
        raise InputError("--spot needs --instance NAME")
    if instance is None and not what_if and (before or cloud or region):
        raise InputError("--cloud, --region and --before need --instance NAME, or --what-if")
    if before is not None:
        try:
            before = date.fromisoformat(before).isoformat()
        except ValueError:
            raise InputError(f"--before is {before!r}; it must be a day, such as 2018-12-31") from None
    for name, value, most in (("--target", target, 1.0), ("--interruptions", interruptions, 3600.0)):
        if value is not None and not 0 <= value <= most:
            raise InputError(f"{name} is {value:g}; it must be from 0 to {most:g}")
    if wait_minutes is not None and not 0 <= wait_minutes <= 1e6:
        raise InputError(f"--wait-minutes is {wait_minutes:g}; it must be 0 or more")
    from steadytrain.cost.prices import find_offer, parse_price
    from steadytrain.interop.logs import LogRun
    from steadytrain.reports.costs import Question, RunCost, log_cost, run_cost
    from steadytrain.reports.files import find_all

    chosen: Price | None = None
    if price is not None:
        chosen = parse_price(price)
    elif instance is not None:
        chosen = find_offer(instance, cloud=cloud, region=region, spot=spot, before=before).price(spot=spot)
    selection = find_all(runs, skip_unreadable=True)
    for line in selection.notes:
        note(line)
    question = Question(
        price=chosen,
        instance=instance,
        cloud=cloud,
        region=region,
        before=before,
        target=target,
        what_if=what_if,
        interruptions=interruptions,
        wait_minutes=wait_minutes,
    )
    costs = [log_cost(run, question) if isinstance(run, LogRun) else run_cost(run, question) for run in selection.runs]
    if json:
        documents = [run.to_dict() for run in costs]
        is_single = len(runs) == 1 and (Path(runs[0]) / "recipe.json").exists()
        print_json(documents[0] if is_single else {"runs": documents})
        return
    width = min(100, shutil.get_terminal_size().columns)
    print_text("\n\n".join(run.to_text(width) for run in costs))
    bills = [run.bill for run in costs if isinstance(run, RunCost)]
    if len(bills) > 1 and len({bill.currency for bill in bills}) == 1:
        total = sum(bill.so_far for bill in bills)
        print_text(f"\n{count(len(bills), 'run')}: {money(total)} {bills[0].currency}")


def _prices(words: Sequence[str], *, refresh: str | None, cloud: str | None, region: str | None, json: bool) -> None:
    """Print the table of prices, or keep a catalogue."""
    from steadytrain.cost.prices import all_offers, matching
    from steadytrain.cost.prices import refresh as keep
    from steadytrain.reports.costs import price_table

    if refresh is not None:
        if words:
            raise InputError(f"--refresh takes one catalogue; {' '.join(words)} selects rows, for which leave it out")
        stored = keep(refresh, cloud=cloud)
        left_out = f"; {count(stored.left_out, 'line')} without a whole price left out" if stored.left_out else ""
        if json:
            print_json({**plain(stored), "path": str(stored.path)})
        else:
            prices = count(stored.rows, "price")
            print_text(f"kept {prices} of {stored.cloud}, of {stored.date}, in {stored.path}{left_out}")
        return
    offers = [offer for offer in all_offers() if cloud is None or offer.cloud == cloud.lower()]
    offers = [offer for offer in offers if region in (None, offer.region, offer.zone)]
    offers = matching(offers, words)
    if json:
        print_json({"format": "steadytrain-prices", "version": 1, "prices": [plain(offer) for offer in offers]})
    elif offers:
        print_text(price_table(offers, min(100, shutil.get_terminal_size().columns)))
    else:
        filters = " ".join(filter(None, (*words, cloud, region)))
        raise InputError(f"no price matches {filters!r}; steady cost prices lists all")
