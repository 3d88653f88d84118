"""One HTML file that holds everything: it needs no network, and nothing but its own script may run in it.

The curves are drawn by plotly.js, taken from the installed ``plotly`` package and carried in the page compressed
(1.9 MB instead of 4.8). The content security policy names the page's two scripts by their digests: nothing that a run's
name, a class or an error message might hold can ever be run.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from steadytrain import __version__
from steadytrain.config.plain import leaves
from steadytrain.events import FeedStats
from steadytrain.format import NONE, compact, count, duration, epoch, number, percent, rate, size, when
from steadytrain.reports.charts import TEMPLATES, charts, style
from steadytrain.reports.mistakes import sections
from steadytrain.reports.status import milestones
from steadytrain.reports.summary import Account
from steadytrain.reports.tables import COLUMNS, MARK, epoch_cells, facts
from steadytrain.reports.time_spent import bar, rates_in_words, rows, sentence

MAX_CLASSES = 12
SHOWN_ROWS = 12
"""Of the summary of a run, and of the table of several; the rest opens on demand."""
SHOWN_DIFFERENCES = 4
TIME_FIGURES = ("rate", "wait")
"""Curves that belong to where the time went."""
HEROES = ("best top-1", "images/s, steady", "wall time", "epochs")


def render(template: str, data: object, **values: Any) -> str:
    """Fill a template; ``data`` as JSON that can stand in a script element whatever is in it."""
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return environment.get_template(template).render(data=Markup(text), version=__version__, **values)


def page(accounts: Sequence[Account], *, now: float | None = None) -> str:
    """Return the whole page.

    Args:
        accounts: one run or several to compare.
        now: when it is made, seconds since 1970; None: the present.
    """
    from markupsafe import Markup

    figures, library = charts([account.history for account in accounts]), ""
    if figures:
        from plotly.offline import get_plotlyjs

        library = str(get_plotlyjs())
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    digests = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (library, script))
    scripts = " ".join(f"'sha256-{digest}'" for digest in digests)
    runs = [{"name": account.summary.name, **style(i)} for i, account in enumerate(accounts)]
    return render(
        "page.html.j2",
        {"runs": runs, "figures": figures},
        **_words(accounts),
        mark=MARK,
        made=when(time.time() if now is None else now),
        figures=[figure for figure in figures if figure["id"] not in TIME_FIGURES],
        time_figures=[figure for figure in figures if figure["id"] in TIME_FIGURES],
        columns=list(COLUMNS),
        policy=(
            f"default-src 'none'; script-src {scripts}; style-src 'unsafe-inline'; img-src data: blob:;"
            " base-uri 'none'; form-action 'none'"
        ),
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        library=base64.b64encode(gzip.compress(library.encode(), 5, mtime=0)).decode(),
    )


def _words(accounts: Sequence[Account]) -> dict[str, Any]:
    first, is_alone = accounts[0].summary, len(accounts) == 1
    models = sorted({account.summary.model for account in accounts})
    lede = f"{_value([account.summary.name for account in accounts])} · {_value(models)}"
    recipes = [dict(leaves(account.run.recipe.to_dict())) for account in accounts]
    return {
        "title": first.name if is_alone else f"{len(accounts)} runs",
        "lede": f"{first.model} · {first.status} · begun {when(first.began)}" if is_alone else lede,
        "sources": "its event log" if is_alone else "their event logs",
        "runs": [_run(i, account) for i, account in enumerate(accounts)],
        "heroes": _heroes(accounts[0]) if is_alone else [],
        "ranking": [] if is_alone else _ranking(accounts),
        "summary": _summary(accounts),
        "shown": SHOWN_ROWS,
        "shown_runs": max(1, SHOWN_ROWS // max(1, len({account.summary.data_set for account in accounts}))),
        "mistakes": sections(accounts),
        "spent": rows([account.ledger for account in accounts]),
        "recipe": _split([{key: _value(value) for key, value in recipe.items()} for recipe in recipes]),
        "places": _split([_places(account) for account in accounts]),
    }


def _ranking(accounts: Sequence[Account]) -> list[dict[str, Any]]:
    """Group runs by the images that they were trained and validated on, and rank them within each group alone."""
    groups: dict[str, list[int]] = {}
    for i, account in enumerate(accounts):
        groups.setdefault(account.summary.data_set, []).append(i)
    tables: list[dict[str, Any]] = []
    for members in groups.values():
        recipes = [dict(leaves(accounts[i].run.recipe.to_dict())) for i in members]
        keys = [row["key"] for row in _split([{k: _value(v) for k, v in one.items()} for one in recipes])["differing"]]
        keys = [key for key in keys if key != "model.name" and not key.startswith(("data.train", "data.val"))]
        rows = [_ranked(i, accounts[i], recipe, keys) for i, recipe in zip(members, recipes, strict=True)]
        rows.sort(key=lambda row: -row["score"])
        tables.append({"title": _data_words(accounts[members[0]]), "rows": rows})
    titles = [table["title"] for table in tables]
    for table, data_set in zip(tables, groups, strict=True):
        if titles.count(table["title"]) > 1:  # of one name, and yet not the same images
            table["title"] += f" ({', '.join(str(name)[:12] for name in json.loads(data_set)[:2] if name)})"
    return tables


def _data_words(account: Account) -> str:
    data, summary = account.run.recipe.data, account.summary
    words = [f"{data.train}{f' and {data.val}' if data.val else ''}: {number(summary.num_train)} images to train on"]
    words.append(f"{number(summary.num_val)} to validate with" if summary.num_val else "none to validate with")
    return ", ".join([*words, *([count(summary.num_classes, "class", "classes")] if summary.num_classes else [])])


def _ranked(index: int, account: Account, recipe: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    summary, best = account.summary, account.summary.best
    is_known = best is not None and math.isfinite(best.top1)
    of = "" if summary.steps_done == summary.steps else f" of {epoch(summary.epochs)}"
    differences = [f"{key.removeprefix('optim.')} {_value(recipe.get(key))}" for key in keys]
    more = f", {len(keys) - SHOWN_DIFFERENCES} more" if len(keys) > SHOWN_DIFFERENCES else ""
    return {
        "index": index,
        "score": best.top1 if best and is_known else -1.0,
        "status": summary.status,
        "model": summary.model,
        "top1": percent(best.top1, 2) if best and is_known else NONE,
        "interval": f"{100 * best.top1_95.low:.2f} to {100 * best.top1_95.high:.2f}" if best and is_known else "",
        "epochs": epoch(summary.epochs_done) + of,
        "rate": rate(summary.images_per_second),
        "seconds": duration(summary.seconds),
        "differences": ", ".join(differences[:SHOWN_DIFFERENCES]) + more,
    }


def _summary(accounts: Sequence[Account]) -> list[dict[str, Any]]:
    # Why a run was stopped stands at the head of the page.
    table = _rows([{**facts(account.summary), "status": account.summary.status} for account in accounts])
    return [row for row in table if row["key"] not in HEROES] if len(accounts) == 1 else table


def _run(index: int, account: Account) -> dict[str, Any]:
    summary, started = account.summary, account.history.started
    assert started is not None
    scores = [
        row.val_top1 if row.val_top1 is not None and math.isfinite(row.val_top1) else -1 for row in account.epochs
    ]
    rejected = started.data.get("rejected")
    pairs = (
        [pair for pair in rejected if isinstance(pair, list) and len(pair) == 2] if isinstance(rejected, list) else []
    )
    return {
        "index": index,
        "name": summary.name,
        "status": summary.status,
        "why": summary.why,
        "bar": bar(account.ledger.seconds),
        "spent": sentence(account.ledger),
        "rates": rates_in_words(account.ledger),
        "epochs": epoch_cells(account.epochs),
        "best_epoch": scores.index(max(scores)) + 1 if scores and max(scores) >= 0 else 0,
        "happened": milestones(account.history),
        "rejected": [f"{name}: {reason}" for name, reason in pairs],  # as many as the log names
        "num_rejected": number(started.data.get("num_rejected", len(pairs))),
    }


def _heroes(account: Account) -> list[dict[str, str]]:
    summary, best = account.summary, account.summary.best
    accuracy, more = NONE, "no evaluation yet"
    if best is not None:
        interval = f"{percent(best.top1_95.low, 2)} to {percent(best.top1_95.high, 2)}"
        accuracy, more = percent(best.top1, 2), f"{interval}, epoch {epoch(best.epoch)}"
    each = f"{duration(summary.seconds_per_epoch)} an epoch" if summary.seconds_per_epoch else ""
    overall = f"steady; {rate(summary.images_per_second_overall)} overall"
    heroes = (
        ("Best top-1 accuracy", accuracy, more),
        ("Images per second", rate(summary.images_per_second), overall),
        ("Wall time", duration(summary.seconds), each),
        ("Epochs", epoch(summary.epochs_done), f"of {epoch(summary.epochs)}"),
    )
    return [{"label": label, "value": value, "more": more} for label, value, more in heroes]


def _places(account: Account) -> dict[str, str]:
    """Word where and with what the run was trained."""
    started, feed = account.history.started, account.history.newest.get("FeedStats")
    assert started is not None
    words = {f"data: {key}": _counted(key, value) for key, value in started.data.items() if key != "rejected"}
    words |= {f"model: {key}": _counted(key, value) for key, value in started.model.items()}
    words |= {f"machine: {key}": _counted(key, value) for key, value in started.machine.items()}
    if isinstance(feed, FeedStats):
        busy = f"read {duration(feed.read_seconds)}, decode {duration(feed.decode_seconds)}"
        words["feed: busy"] = f"{busy}, batch {duration(feed.batch_seconds)}"
        words["feed: waiting for the model"] = duration(feed.blocked_seconds)
        words["feed: images"] = f"{number(feed.images)} by {count(feed.threads, 'thread')}"
    return words


def _rows(runs: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return one row for each key that any run has, with a cell for each run."""
    keys = dict.fromkeys(key for run in runs for key in run)
    return [{"key": key, "cells": [run.get(key, NONE) for run in runs], "differs": False} for key in keys]


def _split(runs: Sequence[Mapping[str, str]]) -> dict[str, list[dict[str, Any]]]:
    """Split the rows into those in which runs differ and those that they share; what is set nowhere is left out."""
    table = _rows(runs)
    return {
        "differing": [{**row, "differs": True} for row in table if len(set(row["cells"])) > 1],
        "common": [row for row in table if set(row["cells"]) not in ({NONE}, set()) and len(set(row["cells"])) == 1],
    }


def _counted(key: str, value: Any) -> str:
    if key.endswith("digest") and isinstance(value, str):
        return value[:12]
    if not isinstance(value, int) or isinstance(value, bool):
        return _value(value)
    return size(value) if key.endswith("bytes") else number(value)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None or value == "":
        return NONE
    if isinstance(value, float):
        return compact(value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key}: {_value(item)}" for key, item in value.items()) or NONE
    if isinstance(value, Iterable) and not isinstance(value, str):
        parts = [_value(item) for item in value]
        more = f" and {len(parts) - MAX_CLASSES:,} more" if len(parts) > MAX_CLASSES else ""
        return ", ".join(parts[:MAX_CLASSES]) + more or NONE
    return str(value)
