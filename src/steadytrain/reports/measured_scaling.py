"""Speed-up and efficiency of several devices, from runs that were measured."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from steadytrain.errors import InputError
from steadytrain.format import NONE, count, percent, rate, text_table
from steadytrain.reports import accounts
from steadytrain.reports.files import find_all
from steadytrain.reports.summary import Summary


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """A run's rate with its devices; ``speedup``: over one device of the first; ``efficiency``: that per device."""

    name: str
    model: str
    devices: int
    batch_size: int | None
    images_per_second: float
    speedup: float
    efficiency: float


@dataclass(frozen=True)
class ScalingComparison:
    """Runs by their number of devices, and what is worth knowing about the comparison."""

    runs: tuple[MeasuredRun, ...]
    remarks: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, ready for JSON."""
        return {"format": "steadytrain-scaling", "version": 1, "runs": [asdict(run) for run in self.runs]}

    def to_text(self) -> str:
        """Format a line for each run."""
        rows = [["run", "devices", "batch", "images/s", "speed-up", "efficiency"]]
        for run in self.runs:
            batch = NONE if run.batch_size is None else f"{run.batch_size:,}"
            speedup = f"{run.speedup:.3g} of {run.devices}"
            figures = [str(run.devices), batch, rate(run.images_per_second), speedup, percent(run.efficiency, 0)]
            rows.append([run.name, *figures])
        return text_table(rows, right=(1, 2, 3, 4, 5))


def compare_runs(places: Sequence[str]) -> ScalingComparison:
    """Compare the rates of runs and logs, each a path, with ``@8`` behind it where it does not say its devices.

    Raises:
        InputError: a run has no rate, or does not say how many devices it had; all have as many.
        RunError, DataError: one cannot be read.
    """
    measured: list[tuple[int, float, Summary]] = []
    for place in places:
        path, stated = place, None
        if not Path(place).exists() and (match := re.fullmatch(r"(.+)@([1-9]\d{0,5})", place)):
            path, stated = match[1], int(match[2])
        for summary in (account.summary for account in accounts(find_all([path]).runs)):
            devices = summary.setup.devices if stated is None else stated
            if devices is None:
                problem = f"{path} does not say how many devices it is of"
                raise InputError(f"{problem}: write it behind the name, such as {path}@8")
            if summary.speed.images_per_second is None:
                raise InputError(f"{summary.directory} says nothing of images/s: there is nothing to compare")
            measured.append((devices, summary.speed.images_per_second, summary))
    measured.sort(key=lambda each: each[0])
    fewest, its_rate, _ = measured[0]
    if fewest == measured[-1][0]:
        raise InputError(f"all runs have {count(fewest, 'device')}: name runs with different numbers of them")
    rows = [
        MeasuredRun(
            name=summary.name,
            model=summary.setup.model,
            devices=devices,
            batch_size=summary.setup.batch_size,
            images_per_second=rate,
            speedup=rate / (its_rate / fewest),
            efficiency=rate / (its_rate / fewest) / devices,
        )
        for devices, rate, summary in measured
    ]
    return ScalingComparison(tuple(rows), tuple(_remarks(rows)))


def _remarks(rows: Sequence[MeasuredRun]) -> list[str]:
    remarks = []
    models = dict.fromkeys(row.model for row in rows)
    if len(models) > 1:
        remarks.append(f"the runs are of different models: {', '.join(models)}")
    shares = {row.batch_size / row.devices for row in rows if row.batch_size}
    if len(shares) > 1:
        remarks.append(
            f"a device had batches of {min(shares):g} to {max(shares):g} images: small ones are slower by themselves"
        )
    if rows[0].devices > 1:
        remarks.append(f"the speed-up is over one device as {rows[0].name} has it, which is of {rows[0].devices}")
    return remarks
