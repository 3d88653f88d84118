"""Reports as text: Markdown, CSV, JSON and a table for the terminal. Pure functions of what was read."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Any

from steadytrain.config.figures import figure_words
from steadytrain.config.plain import finite, plain
from steadytrain.format import (
    NONE,
    clean,
    compact,
    count,
    duration,
    epoch,
    fit_table,
    money,
    number,
    per_rank,
    percent,
    rate,
    score_name,
    tells_top5,
    text_table,
)
from steadytrain.intervals import Spread
from steadytrain.monitor.history import RunScore, UnseenScore
from steadytrain.reports.mistakes import class_figures, class_rows, image_worth, label_rows
from steadytrain.reports.summary import Account, Epoch, Repeats, Summary, find_repeats, median_known
from steadytrain.reports.time_spent import rows, to_dict
from steadytrain.reports.verdict import held_back

MARK = "steadytrain-report"


def facts(summary: Summary) -> dict[str, str]:
    """Format a summary, the most wanted figures first; there is no top-5 of five classes or fewer."""
    setup, course, progress = summary.setup, summary.course, summary.progress
    quality, speed = summary.quality, summary.speed
    best, last, shares = quality.best, quality.last, setup.machine.get("images_per_rank")
    if summary.log and (share := setup.batch_per_device) and share < (setup.batch_size or 0) and share == int(share):
        shares = [int(share)] * (setup.devices or 1)
    name = score_name(quality.is_multi_label)
    scores: dict[str, str] = {}
    makes_updates, probe = not is_probe(summary), summary.probe
    batch = f" ({per_rank(shares)})" if shares else ""
    for when, score in (("best", best), ("last", last if makes_updates else None), ("test", quality.test)):
        label = best.best_label if best and score is best else f"{when} {name}"
        scores[label] = f"{score.words}, {score.seen}" if isinstance(score, UnseenScore) else _score(score)
        if when == "last" and _is_above_at_higher_loss(score, best):
            scores[label] += ", of a higher loss"  # else the best would look wrong
        if setup.class_ratio is not None:
            scores[f"{when} macro recall"] = percent(score.macro_recall if score else None, 1)
        if quality.is_multi_label:
            scores[f"{when} exact match"] = percent(score.top1 if score else None, 1)
        elif tells_top5(setup.num_classes) and when != "last":
            scores[f"{when} top-5"] = percent(score.top5 if score else None, 1)
        scores[f"{when} loss"] = number(score.loss if score else None, 4)
        if when == "best" and probe is not None and probe.series:
            scores["series"] = probe.series
    return {
        "model": setup.model,
        "status": f"{course.status}: {course.why}" if course.why else course.status,
        "epochs": f"{epoch(progress.epoch)} of {epoch(progress.epochs)}" if progress.epochs else NONE,
        "probe": probe.words if probe and (probe.fit_seconds is not None or not progress.step) else NONE,
        **{f"tried {k}": tried.words for k, tried in enumerate(summary.tried, 1)},
        **scores,
        "validation images": number((last.n or None) if last else setup.num_val),
        "test images": number(quality.test.n if quality.test else None),
        f"train {'exact match' if quality.is_multi_label else name}": percent(quality.train_top1, 1),
        "train loss": number(quality.train_loss, 4),
        "time per epoch": duration(speed.seconds_per_epoch),
        "images/s, steady": rate(speed.images_per_second),
        "images/s, overall": rate(speed.images_per_second_overall),
        **({} if speed.device_use is None else {"GPU use": _use(speed.device_use)}),
        "waiting for images": percent(speed.wait_share, 1),
        "wall time": duration(speed.seconds),
        **({} if summary.cost is None else {"cost": f"{summary.cost}, at {summary.cost.price}"}),
        "restarts": f"{course.restarts} ({count(course.repeated_steps, 'step')} repeated)" if course.restarts else "0",
        **interruption_rows(summary),
        "steps": f"{progress.step:,} of {progress.steps:,}" if makes_updates and summary.tells_steps else NONE,
        "batch size": number(setup.batch_size) + batch if makes_updates else NONE,
        "learning rate": NONE if setup.lr is None or not makes_updates else compact(setup.lr),
        "parameters": number(setup.parameters),
        "training images": number(setup.num_train),
        "labels" if quality.is_multi_label else "classes": number(setup.num_classes),
        "device": " ".join(str(setup.machine[key]) for key in ("device", "precision") if key in setup.machine)
        or (NONE if setup.devices is None else count(setup.devices, "device")),
        **({"read from": summary.log} if summary.log else {}),
    }


def known_facts(summaries: Sequence[Summary]) -> list[dict[str, str]]:
    """Format summaries, without the figures that none of them has."""
    words = [facts(summary) for summary in summaries]
    known = {key for run in words for key, text in run.items() if text != NONE}
    return [{key: text for key, text in run.items() if key in known} for run in words]


def is_probe(summary: Summary) -> bool:
    """Return whether a run of ours makes no updates: all that it does is a probe."""
    return not summary.log and not summary.progress.steps


SHOWN_INTERRUPTIONS = 5


def interruption_rows(summary: Summary) -> dict[str, str]:
    """Word the goodput of a run that was interrupted, and what the newest interruptions cost, a row each."""
    costs = summary.course.interruptions
    if not costs:
        return {}
    paid = {part.attempt: part.per_hour for part in summary.cost.parts} if summary.cost else {}
    amounts = [paid.get(cost.attempt, 0.0) * cost.paid_seconds / 3600 for cost in costs]

    def worth(amount: float) -> str:
        return f", {money(amount)} {summary.cost.currency}" if summary.cost else ""

    seconds, each = sum(cost.seconds for cost in costs), len(costs)
    mean = "" if each == 1 else f"; each {duration(seconds / each)}{worth(sum(amounts) / each)} in the mean"
    lost = f"{count(each, 'interruption')}: {duration(seconds)} lost{worth(sum(amounts))}{mean}"
    rows = {"goodput": f"{percent(summary.course.goodput, 1)} ({lost})"}
    for cost, amount in list(zip(costs, amounts, strict=True))[-SHOWN_INTERRUPTIONS:]:
        rows[f"interruption {cost.attempt}"] = (
            f"{cost.how} at step {cost.step:,}: {duration(cost.again_seconds)} done again,"
            f" {duration(cost.start_seconds)} to start, {duration(cost.away_seconds)} away{worth(amount)}"
        )
    return rows


_SCORES: tuple[dict[str, Callable[[Epoch], str]], dict[str, Callable[[Epoch], str]]] = (
    {
        "train top-1": lambda row: percent(row.train_top1, 1),
        "val top-1": lambda row: percent(row.val_top1, 1),
        "val top-5": lambda row: percent(row.val_top5, 1),
    },
    {
        "train exact match": lambda row: percent(row.train_top1, 1),
        "val exact match": lambda row: percent(row.val_top1, 1),
        "val mAP": lambda row: percent(row.val_mean_ap, 1),
    },
)
_FIGURES: dict[str, Callable[[Epoch], str]] = {
    "train loss": lambda row: number(row.train_loss, 4),
    "val loss": lambda row: number(row.val_loss, 4),
    "seconds": lambda row: rate(row.seconds),
    "images/s": lambda row: rate(row.images_per_second),
}


SPREADS: dict[str, Callable[[Repeats], str]] = {
    "best top-1": lambda group: spread_text(None if group.best_mean_ap else group.best_top1, percents=True),
    "last top-1": lambda group: spread_text(None if group.last_mean_ap else group.last_top1, percents=True),
    "best mAP": lambda group: spread_text(group.best_mean_ap, percents=True),
    "last mAP": lambda group: spread_text(group.last_mean_ap, percents=True),
    "last loss": lambda group: spread_text(group.last_loss),
    "wall time": lambda group: duration(group.seconds.mean if group.seconds else None),
}
"""Figures of repeats: mean and sample standard deviation, and in brackets the 95 % interval of the mean."""


def spread_rows(groups: Sequence[Repeats]) -> list[list[str]]:
    """Format repeats: the heads, then a line a group, without figures that no group has; empty if none is left."""
    cells = {head: [cell(group) for group in groups] for head, cell in SPREADS.items()}
    kept = {head: column for head, column in cells.items() if any(text != NONE for text in column)}
    titles = [group.title for group in groups]
    return [["repeats", *kept], *map(list, zip(titles, *kept.values(), strict=True))] if kept else []


def spread_text(value: Spread | None, *, percents: bool = False) -> str:
    """Format a spread, as percents with one digit or as a number with four.

    >>> from steadytrain.intervals import spread
    >>> spread_text(spread([0.90, 0.92, 0.91]), percents=True)
    '91.0 % ± 1.0 (88.5 to 93.5)'
    """
    if value is None:
        return NONE
    scale, digits, unit = (100, 1, " %") if percents else (1, 4, "")
    figures = (value.mean, value.std, value.mean_95.low, value.mean_95.high)
    mean, std, low, high = (f"{scale * figure:.{digits}f}" for figure in figures)
    return f"{mean}{unit} ± {std} ({low} to {high})"


def _use(use: Mapping[str, float]) -> str:
    return f"{percent(use['mean'])} ({100 * use['least']:.0f} to {100 * use['most']:.0f})"


def _outcome(run: Summary) -> str:
    has_no_memory = re.search(r"out of memory|memory.* is not enough", run.course.why)
    return "out of memory" if has_no_memory else "" if run.course.status == "finished" else run.course.status


def _best(runs: Sequence[Summary]) -> str:
    if len(runs) == 1:
        return percent(runs[0].quality.best.value if runs[0].quality.best else None, 1)
    [group] = find_repeats(runs, same_devices=True)
    return spread_text(group.best_mean_ap or group.best_top1, percents=True)


COMPARED: dict[str, Callable[[Sequence[Summary]], str]] = {
    "outcome": lambda runs: ", ".join(dict.fromkeys(filter(None, map(_outcome, runs)))) or NONE,
    "device": lambda runs: runs[0].setup.device or NONE,
    "devices": lambda runs: number(runs[0].setup.devices),
    "model": lambda runs: runs[0].setup.model,
    "batch/device": lambda runs: NONE if (share := runs[0].setup.batch_per_device) is None else compact(share),
    "batch": lambda runs: number(runs[0].setup.batch_size),
    "s/epoch": lambda runs: rate(median_known(run.speed.median_seconds_per_epoch for run in runs)),
    "images/s": lambda runs: rate(median_known(run.speed.images_per_second for run in runs)),
    "GPU use": lambda runs: next((_use(use) for run in runs if (use := run.speed.device_use)), NONE),
    "best": _best,
}


def speed_table(runs: Sequence[Summary]) -> list[list[str]]:
    """Compare several runs by devices, speed and accuracy: heads, and a line a recipe. Empty columns are left out."""
    groups = {name: group for group in find_repeats(runs, same_devices=True) for name in group.runs}
    lines: dict[str, list[Summary]] = {}
    for run in runs if len(runs) > 1 else ():
        lines.setdefault(groups[run.name].runs[0] if run.name in groups else run.name, []).append(run)
    titles = [groups[name].title if name in groups else name for name in lines]
    shares, parts = efficiencies(runs), lines.values()
    cells = {head: [cell(part) for part in parts] for head, cell in COMPARED.items()}
    cells["efficiency"] = [percent(median_known(shares.get(run.name) for run in part)) for part in parts]
    cells["batch/device"] *= cells["batch/device"] != cells["batch"]  # nothing new where each run has one device
    kept = {head: column for head, column in cells.items() if any(cell != NONE for cell in column)}
    return [["run", *kept], *map(list, zip(titles, *kept.values(), strict=True))] if lines else []


def efficiencies(runs: Sequence[Summary]) -> dict[str, float]:
    """Return images/s of each device, as a share of those of the comparable run with the fewest devices.

    Comparable are runs of one model and image size whose batches are the same, on each device or in all.
    """
    rates: dict[tuple[object, ...], list[tuple[int, float, str]]] = {}
    for run in runs:
        setup = run.setup
        if setup.devices and setup.batch_size and (rate := run.speed.images_per_second):
            for batch in (("all", setup.batch_size), ("device", setup.batch_per_device)):
                group = rates.setdefault((setup.model, setup.size, batch), [])
                group.append((setup.devices, rate / setup.devices, run.name))
    several = [group for group in rates.values() if min(group)[0] < max(group)[0]]
    several.sort(key=lambda group: -min(group)[0])  # of two groups that hold a run, that with the fewest devices counts
    return {name: each / min(group)[1] for group in several for _, each, name in group}


SHOWN_EPOCHS = 2000
"""Rows of epochs for people to read; files of numbers have all."""


def shown_epochs(account: Account) -> tuple[Sequence[Epoch], str]:
    """Return the epochs with figures that a table for people has, and of very many a sentence about which they are."""
    rows = [row for row in account.epochs if row != Epoch(epoch=row.epoch, step=row.step)]
    step = -(-len(rows) // SHOWN_EPOCHS)
    if step < 2:
        return rows, ""
    of_best = len(rows) - 1 if (best := best_epoch(account)) is None else rows.index(account.epochs[best])
    kept = sorted({*range(0, len(rows), step), of_best, len(rows) - 1})
    few = f"One epoch in {step} of {len(rows):,}, with the best and the last; .csv and .json have all."
    return [rows[index] for index in kept], few


def best_epoch(account: Account) -> int | None:
    """Return the index of the row with the evaluation of the best weights; None where there is none."""
    best = account.summary.quality.best
    rows = enumerate(account.epochs) if best is not None and best.step and math.isfinite(best.value) else ()
    return next((at for at, row in rows if row.val_top1 is not None and best and row.step >= best.step), None)


def epoch_table(account: Account) -> tuple[list[str], list[list[str]]]:
    """Format the per-epoch table: its heads, and a list of cells for each row that is shown."""
    columns = {"epoch": lambda row: str(row.epoch), **_SCORES[account.summary.quality.is_multi_label], **_FIGURES}
    if not tells_top5(account.summary.setup.num_classes):
        columns.pop("val top-5", None)
    cells = {head: [cell(row) for row in shown_epochs(account)[0]] for head, cell in columns.items()}
    known = {head: column for head, column in cells.items() if set(column) != {NONE}}
    return list(known), [list(row) for row in zip(*known.values(), strict=True)]


def markdown(accounts: Sequence[Account]) -> str:
    """Return each run's verdict, a summary and where the time went, a column a run, then each run's epochs."""

    def escape(text: str) -> str:  # a name as itself in a cell: no markup, no second line
        line = "".join(c if c.isprintable() else " " for c in text)
        return "".join(f"\\{c}" if c in "\\`*_{}[]<>|#~" else c for c in line).replace("&", "&amp;")

    def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
        rule = ["---", *["--:"] * (len(heads) - 1)]
        return "\n".join("| " + " | ".join(row) + " |" for row in (heads, rule, *rows))

    names = [escape(account.summary.name) for account in accounts]
    words = known_facts([account.summary for account in accounts])
    spent = [
        [row["label"], *(NONE if seconds == NONE else f"{seconds} ({share})" for seconds, share in row["cells"])]
        for row in rows([account.ledger for account in accounts])
    ]
    parts = [f"<!-- {MARK} -->", f"# {', '.join(names)}"]
    for name, account in zip(names, accounts, strict=True):
        if verdict := held_back(account):
            of = f" {name}" if len(names) > 1 else ""
            parts.append(f"**What held{of or ' it'} back:** " + " ".join(escape(_sentence(line)) for line in verdict))
    keys = dict.fromkeys(key for run in words for key in run)
    parts.append(table(["", *names], [[key, *(escape(run.get(key, NONE)) for run in words)] for key in keys]))
    groups = find_repeats([account.summary for account in accounts])
    if table_of_repeats := spread_rows(groups):
        heads, *lines = table_of_repeats
        lines = [[escape(line[0]), *line[1:]] for line in lines]
        parts += ["## Repeats", table(heads, lines)]
    if lines := speed_table([account.summary for account in accounts]):
        heads, *lines = [list(map(escape, line)) for line in lines]
        parts += ["## Devices and speed", table(heads, lines)]
    parts += ["## Where the time went", table(["", *names], spent)]
    for name, account in zip(names, accounts, strict=True):
        if shown_epochs(account)[0]:
            parts += [f"## Epochs of {name}", *filter(None, [shown_epochs(account)[1]]), table(*epoch_table(account))]
        if account.summary.quality.is_multi_label and (labels := label_rows(class_figures(account))):
            heads = ["label", "images", "predicted", "right", "AP", "precision", "recall", "F1"]
            keys = dict.fromkeys(("name", "images", "predicted", "right", "ap", "precision", "recall", "f1"))
            parts += [f"## Labels of {name}", table(heads, [[escape(row[key]) for key in keys] for row in labels])]
        elif classes := class_rows(class_figures(account), image_worth(account)):
            heads = ["class", "images", "right", "top-1", "95 % interval", "most often taken for"]
            for row in classes:
                row["interval"] += f", {row['few']}" * bool(row["few"])
            cells = ("name", "images", "right", "top1", "interval", "other")
            lines = [[escape(row[key]) or NONE for key in cells] for row in classes]
            parts += [f"## Classes of {name}", table(heads, lines)]
    of_repeats = "; of repeats: of their mean (Student)" if groups else ""
    parts.append(f"In brackets: the 95 % confidence interval (Wilson 1927){of_repeats}.\n")
    return "\n\n".join(parts)


def _sentence(line: str) -> str:
    return line[:1].upper() + line[1:] + ("" if line.endswith(".") else ".")


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
    """Return one indented JSON document: ``runs``, each the figures of a :class:`Summary`, and groups of ``repeats``.

    An account has ``per_epoch``, ``per_class`` and ``ledger``, too. What is not a finite number is null.
    """
    summaries = [run.summary if isinstance(run, Account) else run for run in runs]
    groups, shares, documents = find_repeats(summaries), efficiencies(summaries), list[dict[str, Any]]()
    for run, summary in zip(runs, summaries, strict=True):
        share = {"batch_per_device": summary.setup.batch_per_device, "efficiency": shares.get(summary.name)}
        documents.append(summary.to_dict() | share)
        if isinstance(run, Account):
            parts = {"per_epoch": plain(run.epochs), "per_class": class_figures(run), "ledger": to_dict(run.ledger)}
            documents[-1] |= parts
    document = {"format": MARK, "version": 1, "runs": documents, "repeats": plain(groups)}
    return json.dumps(finite(document), indent=2, allow_nan=False) + "\n"


def to_text(runs: Sequence[Summary], width: int = 80) -> str:
    """Return a table for a terminal: a line for each figure of one run, or a line for each of several runs.

    Runs on the same images stand together; below them stand the means of repeats. Where names leave no room for the
    figures in ``width`` columns, each stands on a line above them.
    """
    if len(runs) == 1:
        run, (words,) = runs[0], known_facts(runs)
        name, score = score_name(run.quality.is_multi_label), run.quality.best
        labels = {"best": score.best_label if score else f"best {name}", "last": f"last {name}", "test": f"test {name}"}
        scores = (key for when, label in labels.items() for key in (label, f"{when} macro recall"))
        keys = ("epochs", "probe", *scores, "series", "images/s, steady", "wall time")
        lines = [["run", clean(run.name)], ["status", run.course.status]]
        lines += [[key, words[key]] for key in words if key in keys or key.startswith("tried ")]
        lines += [] if run.cost is None else [["cost", str(run.cost)]]
        return text_table(lines)
    kinds = {run.quality.is_multi_label for run in runs}
    head_of_best = f"best {score_name(True in kinds)}" if len(kinds) < 2 else "best"
    lines = [["run", "status", "epochs", head_of_best, "images/s", "wall time"]]
    data_sets = dict.fromkeys(run.setup.data_set for run in runs)
    for run in (run for data_set in data_sets for run in runs if run.setup.data_set == data_set):
        of = "" if run.progress.step == run.progress.steps else f" of {epoch(run.progress.epochs)}"
        epochs = "probe" if is_probe(run) else epoch(run.progress.epoch) + of
        metric, best = "mAP " * (run.quality.is_multi_label and len(kinds) > 1), run.quality.best
        figures = [rate(run.speed.images_per_second), duration(run.speed.seconds)]
        lines.append([clean(run.name), run.course.status, epochs, metric + (best.words if best else NONE), *figures])
    means = []
    for group in find_repeats(runs):
        if figures_of := list(zip(*spread_rows([group]), strict=True))[1:]:
            means += ["", f"{group.title}, mean ± standard deviation (95 % interval of the mean)"]
            means += [f"  {line}" for line in text_table(figures_of).splitlines()]
    return "\n".join([fit_table(lines, width), *means, "", fit_table(speed_table(runs), width)])


def _score(score: RunScore | None) -> str:
    if score is None or math.isnan(score.value):
        return NONE
    weights = "" if score.weights == "model" else f", {score.weights}"
    chosen = figure_words(score.figure, score.figure_value, score.mean_ap)
    return ", ".join(filter(None, (f"{score.words} {score.when}{weights}", chosen)))


def _is_above_at_higher_loss(score: RunScore | None, best: RunScore | None) -> bool:
    if score is None or best is None or score.loss is None or best.loss is None:
        return False
    return score.value > best.value and score.loss > best.loss
