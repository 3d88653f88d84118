"""Reports as text: Markdown, CSV, JSON and a table for the terminal. Pure functions of what was read."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from steadytrain.config.plain import plain
from steadytrain.monitor import Ledger, ledger
from steadytrain.reports.epochs import Epoch, epochs
from steadytrain.reports.figures import Interval as Interval
from steadytrain.reports.figures import Score, Summary, summary
from steadytrain.reports.figures import wilson as wilson
from steadytrain.reports.format import NONE, compact, duration, epoch, number, percent, rate
from steadytrain.reports.history import History, history
from steadytrain.reports.time_spent import rows, to_dict
from steadytrain.run import Run

MARK = "steadytrain-report"


@dataclass(frozen=True)
class Account:
    """A run as reports tell it."""

    history: History
    summary: Summary
    epochs: tuple[Epoch, ...]
    ledger: Ledger

    @staticmethod
    def of(run: Run, name: str | None = None) -> Account:
        """Read a run and call it ``name`` (None: as its folder). Raises RunError where nothing was started in it."""
        told, seconds = history(run), ledger(run)
        told_summary = summary(told, seconds)
        return Account(told, replace(told_summary, name=name) if name else told_summary, epochs(told), seconds)


def summarise(run: Run) -> Summary:
    """A run in figures, also while it goes on.

    Raises:
        RunError: nothing was started in it yet.
    """
    return summary(history(run), ledger(run))


def facts(told: Summary) -> dict[str, str]:
    """A summary in words, the most asked-for first; every summary has the same keys."""
    best, last = told.best, told.last
    return {
        "model": told.model,
        "status": f"{told.status}: {told.why}" if told.why else told.status,
        "epochs": f"{epoch(told.epochs_done)} of {epoch(told.epochs)}",
        "best top-1": _top1(best),
        "best top-5": percent(best.top5 if best else None),
        "best loss": number(best.loss if best else None, 4),
        "last top-1": _top1(last),
        "last top-5": percent(last.top5 if last else None),
        "last loss": number(last.loss if last else None, 4),
        "validation images": number(last.n if last else told.num_val),
        "train top-1": percent(told.train_top1),
        "train loss": number(told.train_loss, 4),
        "time per epoch": duration(told.seconds_per_epoch),
        "images/s, steady": rate(told.images_per_second),
        "images/s, overall": rate(told.images_per_second_overall),
        "waiting for images": percent(told.wait_share, 1),
        "wall time": duration(told.seconds),
        "restarts": f"{told.restarts} ({told.repeated_steps:,} steps repeated)" if told.restarts else "0",
        "steps": f"{told.steps_done:,} of {told.steps:,}",
        "batch size": f"{told.batch_size:,}",
        "learning rate": compact(told.lr),
        "parameters": number(told.parameters),
        "training images": number(told.num_train),
        "classes": number(told.num_classes),
        "device": " ".join(str(told.machine[key]) for key in ("device", "precision") if key in told.machine) or NONE,
    }


COLUMNS: dict[str, Callable[[Epoch], str]] = {
    "epoch": lambda row: str(row.epoch),
    "train top-1": lambda row: percent(row.train_top1),
    "val top-1": lambda row: percent(row.val_top1),
    "val top-5": lambda row: percent(row.val_top5),
    "train loss": lambda row: number(row.train_loss, 4),
    "val loss": lambda row: number(row.val_loss, 4),
    "seconds": lambda row: number(row.seconds, 2 if row.seconds is not None and row.seconds < 10 else 1),
    "images/s": lambda row: rate(row.images_per_second),
}


def epoch_cells(rows: Sequence[Epoch]) -> list[list[str]]:
    """The per-epoch table in words, a list for each row, in the order of ``COLUMNS``."""
    return [[cell(row) for cell in COLUMNS.values()] for row in rows]


def markdown(accounts: Sequence[Account]) -> str:
    """A summary and where the time went, with a column for each run, then each run's epochs."""
    names = [_escape(account.summary.name) for account in accounts]
    told = [facts(account.summary) for account in accounts]
    parts = [f"<!-- {MARK} -->", f"# {', '.join(names)}"]
    parts.append(_table(["", *names], [[key, *(_escape(one[key]) for one in told)] for key in told[0]]))
    parts.append("## Where the time went")
    spent = rows([account.ledger for account in accounts])
    parts.append(_table(["", *names], [[row["label"], *map(_took, row["cells"])] for row in spent]))
    for name, account in zip(names, accounts, strict=True):
        parts.append(f"## Epochs of {name}")
        parts.append(_table(list(COLUMNS), epoch_cells(account.epochs)))
    parts.append("In brackets: the 95 % confidence interval (Wilson 1927).\n")
    return "\n\n".join(parts)


def comma_separated(accounts: Sequence[Account]) -> str:
    """A row for each epoch of each run, as numbers: fractions, seconds; an empty cell where nothing was told."""
    names = [field.name for field in fields(Epoch)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *names])
    for account in accounts:
        for row in account.epochs:
            writer.writerow([account.summary.name, *(getattr(row, name) for name in names)])
    return text.getvalue()


def to_json(runs: Sequence[Summary | Account]) -> str:
    """One indented JSON document: ``runs``, each the fields of :class:`Summary`, of an account ``per_epoch`` and
    ``ledger``, too.

    What is not a finite number is null, so that every JSON reader takes it.
    """
    told = [
        {**plain(one.summary), "per_epoch": plain(one.epochs), "ledger": to_dict(one.ledger)}
        if isinstance(one, Account)
        else plain(one)
        for one in runs
    ]
    return json.dumps({"format": MARK, "version": 1, "runs": finite(told)}, indent=2, allow_nan=False) + "\n"


def to_text(runs: Sequence[Summary]) -> str:
    """For a terminal: one run with a line for each figure, several with a line for each run under a line of heads."""
    rows = _alone(runs[0]) if len(runs) == 1 else [["run", *_side_by_side(runs[0])], *map(_line, runs)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _alone(told: Summary) -> list[list[str]]:
    keys = ("epochs", "best top-1", "last top-1", "images/s, steady", "wall time")
    words = facts(told)
    return [["run", _printable(told.name)], ["status", told.status], *([key, words[key]] for key in keys)]


def _line(told: Summary) -> list[str]:
    return [_printable(told.name), *_side_by_side(told).values()]


def _side_by_side(told: Summary) -> dict[str, str]:
    """As short as it can be said: some 65 columns."""
    done = told.steps_done == told.steps
    return {
        "status": told.status,
        "epochs": epoch(told.epochs_done) if done else f"{epoch(told.epochs_done)} of {epoch(told.epochs)}",
        "best top-1": _interval(told.best),
        "images/s": rate(told.images_per_second),
        "wall time": duration(told.seconds),
    }


def _printable(name: str) -> str:
    return "".join(c if c.isprintable() else "?" for c in name)


def _took(cell: tuple[str, str]) -> str:
    seconds, share = cell
    return NONE if seconds == NONE else f"{seconds} ({share})"


def _top1(score: Score | None) -> str:
    if score is None or not math.isfinite(score.top1):
        return _interval(score)
    weights = "" if score.weights == "model" else f", {score.weights}"
    return f"{_interval(score)} at epoch {epoch(score.epoch)}{weights}"


def _interval(score: Score | None) -> str:
    if score is None or not math.isfinite(score.top1):
        return percent(score.top1 if score else None)
    return f"{percent(score.top1)} ({100 * score.top1_95.low:.2f} to {100 * score.top1_95.high:.2f})"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["--:"] * (len(heads) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (heads, rule, *rows))


def _escape(text: str) -> str:
    """A name as itself in a cell of a Markdown table: no markup, no second line."""
    line = "".join(c if c.isprintable() else " " for c in text)
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>|#~" else c for c in line).replace("&", "&amp;")


def finite(value: Any) -> Any:
    """With None for what is no finite number: JSON has none."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
