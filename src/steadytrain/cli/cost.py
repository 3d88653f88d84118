"""``steady cost``: what runs cost, so far and at their end, on spot and on other machines; the table of prices."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number

from steadytrain.cli.console import note, print_json, print_text, status
from steadytrain.cli.options import Json, refuse_flags
from steadytrain.config.plain import plain
from steadytrain.errors import InputError
from steadytrain.format import count
from steadytrain.run import Run


def cost(
    *runs: Annotated[str, Parameter(show=True)],
    price: str | None = None,
    instance: str | None = None,
    cloud: str | None = None,
    region: str | None = None,
    target: Annotated[float | None, Parameter(validator=Number(gte=0, lte=1))] = None,
    what_if: bool = False,
    interruptions: Annotated[float | None, Parameter(validator=Number(gte=0, lte=3600))] = None,
    refresh: str | None = None,
    json: Json = False,
) -> None:
    """Find what a run costs, finished, running or killed: so far, at its end, per attempt, epoch and accuracy.

    Every attempt counts from the start of its process to its last event. Checkpoints hold the same sum, so neither a
    kill nor a lost event log loses the bill. The price is that which the run recorded (steady train --price), or the
    one given here; without any, the hours are shown. It only reads, and needs neither torch nor
    a GPU.

    steady cost prices lists what instances cost, with the date of each price; words after it select.

    Args:
        runs: Folders of runs, folders that hold runs, or logs of other programs; or prices, and words to select some.
        price: Price of an hour of each machine: 2.40, 2.40 EUR, 0.30 EUR/kWh@450W, or an instance, such as
            p3.2xlarge@us-east-1:spot. [default: what the run recorded, else $STEADYTRAIN_PRICE]
        instance: An instance, by name: compare spot with on-demand prices there.
        cloud: Only machines of this cloud.
        region: Only machines of this region or zone.
        target: Also show the cost until this top-1 or mAP was reached, such as 0.9.
        what_if: Also estimate the run on other GPUs, by the ratios of their peaks.
        interruptions: Interruptions an hour to expect on spot. [default: as in the run's own events]
        refresh: With prices: keep a catalogue of prices, a CSV file as SkyPilot publishes them.
        json: Print one JSON document.

    Examples:
        steady cost runs/a
        steady cost runs/a --price 2.40
        steady cost runs/a --instance p3.2xlarge --target 0.9 --what-if
        steady cost train.log --instance p2.16xlarge
        steady cost prices V100
        steady cost prices --refresh aws/vms.csv
    """
    from steadytrain.reports.costs import Question, costs_of, total_text

    if runs[:1] == ("prices",):
        about_run = {"price": price, "instance": instance, "target": target, "what_if": what_if}
        about_run |= {"interruptions": interruptions}
        refuse_flags("{} asks about a run, and steady cost prices lists prices: leave one of them out", **about_run)
        _prices(runs[1:], refresh=refresh, cloud=cloud, region=region, json=json)
        return
    if refresh is not None:
        raise InputError("--refresh belongs to the table of prices: steady cost prices --refresh FILE")
    if not runs:
        raise InputError("no run named: steady cost runs/a; or steady cost prices, which lists prices")
    place = {"instance": instance, "cloud": cloud, "region": region}
    question = Question(price=price, **place, target=target, what_if=what_if, interruptions=interruptions)
    with status("reading"):
        costs = costs_of(runs, question, say=note)
    if json:
        documents = [run.to_dict() for run in costs]
        is_single = len(runs) == 1 and Run.is_run(runs[0])
        print_json(documents[0] if is_single else {"runs": documents})
    else:
        width = min(100, shutil.get_terminal_size().columns)
        print_text("\n\n".join([*(run.to_text(width) for run in costs), *total_text(costs)]))


def _prices(words: Sequence[str], *, refresh: str | None, cloud: str | None, region: str | None, json: bool) -> None:
    """Print the table of prices, or keep a catalogue."""
    from steadytrain.cost.prices import matching
    from steadytrain.cost.prices import refresh as keep
    from steadytrain.reports.costs import price_table

    if refresh is None:
        offers = matching(words, cloud=cloud, region=region)
        if json:
            print_json({"format": "steadytrain-prices", "version": 1, "prices": [plain(offer) for offer in offers]})
        else:
            print_text(price_table(offers, min(100, shutil.get_terminal_size().columns)))
        return
    if words:
        raise InputError(f"--refresh takes one catalogue; {' '.join(words)} selects rows, for which leave it out")
    stored = keep(refresh, cloud=cloud)
    left_out = f"; {count(stored.left_out, 'line')} without a whole price left out" if stored.left_out else ""
    if json:
        print_json({**plain(stored), "path": str(stored.path)})
    else:
        print_text(
            f"kept {count(stored.rows, 'price')} of {stored.cloud}, of {stored.date}, in {stored.path}{left_out}"
        )
