"""Reports as text: Markdown, CSV, JSON and a table for the terminal. Pure functions of what was read."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from steadytrain.config.plain import plain
from steadytrain.format import NONE, clean, compact, duration, epoch, number, percent, rate, tells_top5
from steadytrain.reports.mistakes import class_figures, class_rows
from steadytrain.reports.summary import Account, Epoch, Score, Summary
from steadytrain.reports.time_spent import rows, to_dict

MARK = "steadytrain-report"


def facts(summary: Summary) -> dict[str, str]:
    """Word a summary, the most asked-for first; every summary has the same keys."""
    best, last, has_top5 = summary.best, summary.last, tells_top5(summary.num_classes)
    return {
        "model": summary.model,
        "status": f"{summary.status}: {summary.why}" if summary.why else summary.status,
        "epochs": f"{epoch(summary.epochs_done)} of {epoch(summary.epochs)}",
        "best top-1": _top1(best),
        "best top-5": percent(best.top5 if best and has_top5 else None, 2),
        "best loss": number(best.loss if best else None, 4),
        "last top-1": _top1(last),
        "last top-5": percent(last.top5 if last and has_top5 else None, 2),
        "last loss": number(last.loss if last else None, 4),
        "validation images": number(last.n if last else summary.num_val),
        "train top-1": percent(summary.train_top1, 2),
        "train loss": number(summary.train_loss, 4),
        "time per epoch": duration(summary.seconds_per_epoch),
        "images/s, steady": rate(summary.images_per_second),
        "images/s, overall": rate(summary.images_per_second_overall),
        "waiting for images": percent(summary.wait_share, 1),
        "wall time": duration(summary.seconds),
        "restarts": f"{summary.restarts} ({summary.repeated_steps:,} steps repeated)" if summary.restarts else "0",
        "steps": f"{summary.steps_done:,} of {summary.steps:,}",
        "batch size": f"{summary.batch_size:,}",
        "learning rate": compact(summary.lr),
        "parameters": number(summary.parameters),
        "training images": number(summary.num_train),
        "classes": number(summary.num_classes),
        "device": " ".join(str(summary.machine[key]) for key in ("device", "precision") if key in summary.machine)
        or NONE,
    }


COLUMNS: dict[str, Callable[[Epoch], str]] = {
    "epoch": lambda row: str(row.epoch),
    "train top-1": lambda row: percent(row.train_top1, 2),
    "val top-1": lambda row: percent(row.val_top1, 2),
    "val top-5": lambda row: percent(row.val_top5, 2),
    "train loss": lambda row: number(row.train_loss, 4),
    "val loss": lambda row: number(row.val_loss, 4),
    "seconds": lambda row: number(row.seconds, 2 if row.seconds is not None and row.seconds < 10 else 1),
    "images/s": lambda row: rate(row.images_per_second),
}


def epoch_cells(rows: Sequence[Epoch]) -> list[list[str]]:
    """Word the per-epoch table, a list for each row, in the order of ``COLUMNS``."""
    return [[cell(row) for cell in COLUMNS.values()] for row in rows]


def markdown(accounts: Sequence[Account]) -> str:
    """Return a summary and where the time went, with a column for each run, then each run's epochs."""

    def escape(text: str) -> str:  # a name as itself in a cell: no markup, no second line
        line = "".join(c if c.isprintable() else " " for c in text)
        return "".join(f"\\{c}" if c in "\\`*_{}[]<>|#~" else c for c in line).replace("&", "&amp;")

    def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        rule = ["---", *["--:"] * (len(heads) - 1)]
        return "\n".join("| " + " | ".join(row) + " |" for row in (heads, rule, *rows))

    names = [escape(account.summary.name) for account in accounts]
    words = [facts(account.summary) for account in accounts]
    spent = [
        [row["label"], *(NONE if seconds == NONE else f"{seconds} ({share})" for seconds, share in row["cells"])]
        for row in rows([account.ledger for account in accounts])
    ]
    parts = [f"<!-- {MARK} -->", f"# {', '.join(names)}"]
    parts.append(table(["", *names], [[key, *(escape(run[key]) for run in words)] for key in words[0]]))
    parts += ["## Where the time went", table(["", *names], spent)]
    for name, account in zip(names, accounts, strict=True):
        parts += [f"## Epochs of {name}", table(list(COLUMNS), epoch_cells(account.epochs))]
        if classes := class_rows(class_figures(account)):
            heads = ["class", "images", "right", "top-1", "95 % interval", "most often taken for"]
            keys = ("name", "images", "right", "top1", "interval", "other")
            lines = [[escape(row[key]) or NONE for key in keys] for row in classes]
            parts += [f"## Classes of {name}", table(heads, lines)]
    parts.append("In brackets: the 95 % confidence interval (Wilson 1927).\n")
    return "\n\n".join(parts)


def comma_separated(accounts: Sequence[Account]) -> str:
    """Return a row for each epoch of each run, as numbers: fractions, seconds; an empty cell where none is known."""
    names = [field.name for field in fields(Epoch)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run", *names])
    for account in accounts:
        writer.writerows([account.summary.name, *(getattr(row, name) for name in names)] for row in account.epochs)
    return text.getvalue()


def to_json(runs: Sequence[Summary | Account]) -> str:
    """Return one indented JSON document: ``runs``, each the fields of :class:`Summary`.

    An account has ``per_epoch``, ``per_class`` and ``ledger``, too. What is not a finite number is null.
    """
    documents = [
        {
            **plain(run.summary),
            "per_epoch": plain(run.epochs),
            "per_class": class_figures(run),
            "ledger": to_dict(run.ledger),
        }
        if isinstance(run, Account)
        else plain(run)
        for run in runs
    ]
    return json.dumps({"format": MARK, "version": 1, "runs": finite(documents)}, indent=2, allow_nan=False) + "\n"


def finite(value: Any) -> Any:
    """Replace what is no finite number by None: JSON has none."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def to_text(runs: Sequence[Summary], width: int = 80) -> str:
    """Return a table for a terminal: a line for each figure of one run, or a line for each of several runs.

    Runs on the same images stand together. Where names leave no room for the figures in ``width`` columns, each stands
    on a line above them.
    """
    if len(runs) == 1:
        run, words = runs[0], facts(runs[0])
        keys = ("epochs", "best top-1", "last top-1", "images/s, steady", "wall time")
        lines = [["run", clean(run.name)], ["status", run.status], *([key, words[key]] for key in keys)]
        return _aligned(lines)
    lines = [["run", "status", "epochs", "best top-1", "images/s", "wall time"]]
    data_sets = dict.fromkeys(run.data_set for run in runs)
    for run in (run for data_set in data_sets for run in runs if run.data_set == data_set):
        of = "" if run.steps_done == run.steps else f" of {epoch(run.epochs)}"
        figures = [_interval(run.best), rate(run.images_per_second), duration(run.seconds)]
        lines.append([clean(run.name), run.status, epoch(run.epochs_done) + of, *figures])
    text = _aligned(lines)
    if max(map(len, text.splitlines())) <= width:
        return text
    head, *figures_of_each = _aligned([line[1:] for line in lines]).splitlines()
    each = zip((line[0] for line in lines[1:]), figures_of_each, strict=True)
    return "\n".join([f"run\n  {head}", *(f"{name}\n  {figures}" for name, figures in each)])


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def _top1(score: Score | None) -> str:
    if score is None or not math.isfinite(score.top1):
        return _interval(score)
    weights = "" if score.weights == "model" else f", {score.weights}"
    return f"{_interval(score)} at epoch {epoch(score.epoch)}{weights}"


def _interval(score: Score | None) -> str:
    if score is None or not math.isfinite(score.top1):
        return percent(score.top1 if score else None, 2)
    return f"{percent(score.top1, 2)} ({100 * score.top1_95.low:.2f} to {100 * score.top1_95.high:.2f})"
