"""Speed-up and efficiency of several devices, from runs that were measured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from steadytrain.errors import InputError
from steadytrain.format import NONE, count, percent, rate, text_table
from steadytrain.reports import accounts
from steadytrain.reports.files import find_all
from steadytrain.reports.summary import Summary


def compare_runs(places: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Compare the rates of runs and logs, each a path, with ``@8`` behind it where it does not say its devices.

    Returns:
        Plain data, ready for JSON, with ``runs`` by their number of devices: ``name``, ``model``, ``devices``,
        ``batch_size`` (None: unknown), ``images_per_second``, ``speedup`` over one device of the first, and
        ``efficiency``, which is that per device; and what is worth knowing about the comparison, a line each.

    Raises:
        InputError: a run has no rate, or does not say how many devices it had; all have as many.
        RunError, DataError: one cannot be read.
    """
    measured = sorted((run for place in places for run in _measured(place)), key=lambda run: run[0])
    fewest, its_rate, _ = measured[0]
    if fewest == measured[-1][0]:
        raise InputError(f"all runs have {count(fewest, 'device')}: name runs with different numbers of them")
    rows = [
        {
            "name": summary.name,
            "model": summary.setup.model,
            "devices": devices,
            "batch_size": summary.setup.batch_size,
            "images_per_second": rate,
            "speedup": rate / (its_rate / fewest),
            "efficiency": rate / (its_rate / fewest) / devices,
        }
        for devices, rate, summary in measured
    ]
    return {"format": "steadytrain-scaling", "version": 1, "runs": rows}, _remarks(rows)


def _measured(place: str) -> list[tuple[int, float, Summary]]:
    """Return the devices, the rate and the summary of each run at a place. Raises InputError."""
    path, stated, rows = place, None, []
    if not Path(place).exists() and (match := re.fullmatch(r"(.+)@([1-9]\d{0,5})", place)):
        path, stated = match[1], int(match[2])
    for account in accounts(find_all([path]).runs):
        summary = account.summary
        devices, rate = summary.setup.devices if stated is None else stated, summary.speed.images_per_second
        if devices is None:
            raise InputError(
                f"{path} does not say how many devices it is of: write it behind the name, such as {path}@8"
            )
        if rate is None:
            raise InputError(f"{summary.directory} says nothing of images/s: there is nothing to compare")
        rows.append((devices, rate, summary))
    return rows


def _remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    remarks = []
    models = dict.fromkeys(row["model"] for row in rows)
    if len(models) > 1:
        remarks.append(f"the runs are of different models: {', '.join(models)}")
    shares = {row["batch_size"] / row["devices"] for row in rows if row["batch_size"]}
    if len(shares) > 1:
        remarks.append(
            f"a device had batches of {min(shares):g} to {max(shares):g} images: small ones are slower by themselves"
        )
    if rows[0]["devices"] > 1:
        name, devices = rows[0]["name"], rows[0]["devices"]
        remarks.append(f"the speed-up is over one device as {name} has it, which is of {devices}")
    return remarks


def to_text(document: Mapping[str, Any]) -> str:
    """Format a line for each run."""
    rows = [["run", "devices", "batch", "images/s", "speed-up", "efficiency"]]
    for run in document["runs"]:
        batch = NONE if run["batch_size"] is None else f"{run['batch_size']:,}"
        speedup = f"{run['speedup']:.3g} of {run['devices']}"
        figures = [str(run["devices"]), batch, rate(run["images_per_second"]), speedup, percent(run["efficiency"], 0)]
        rows.append([run["name"], *figures])
    return text_table(rows, right=(1, 2, 3, 4, 5))
