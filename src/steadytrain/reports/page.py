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
from pathlib import Path
from typing import Any

from steadytrain import __version__
from steadytrain.config.plain import leaves
from steadytrain.reports.curves import charts, style
from steadytrain.reports.format import NONE, compact, duration, epoch, number, percent, rate, size, when
from steadytrain.reports.milestones import happened
from steadytrain.reports.tables import COLUMNS, MARK, Account, epoch_cells, facts
from steadytrain.reports.time_spent import bar, rows, sentence, to_words

TEMPLATES = Path(__file__).parent / "templates"
MAX_CLASSES = 12
HEROES = ("best top-1", "images/s, steady", "wall time", "epochs")


def page(accounts: Sequence[Account], *, now: float | None = None) -> str:
    """The whole page.

    Args:
        accounts: one run or several to compare.
        now: when it is made, seconds since 1970; None: the present.
    """
    import jinja2
    from markupsafe import Markup

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    drawn = charts([account.history for account in accounts])
    script = (TEMPLATES / "page.js").read_text(encoding="utf-8")
    library = _plotly() if drawn else ""
    return environment.get_template("page.html.j2").render(
        **_words(accounts),
        mark=MARK,
        version=__version__,
        made=when(time.time() if now is None else now),
        figures=drawn,
        columns=list(COLUMNS),
        policy=_policy(library, script),
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        library=base64.b64encode(gzip.compress(library.encode(), 5, mtime=0)).decode(),
        data=Markup(_data(accounts, drawn)),
    )


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def _policy(*scripts: str) -> str:
    """What the page may do: run these scripts, be styled, show the images that it draws itself, and nothing else."""
    digests = (base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts)
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:;"
        " base-uri 'none'; form-action 'none'"
    )


def _data(accounts: Sequence[Account], drawn: Sequence[Mapping[str, Any]]) -> str:
    """JSON that can stand in a script element whatever is in it."""
    runs = [{"name": account.summary.name, **style(i)} for i, account in enumerate(accounts)]
    text = json.dumps({"runs": runs, "figures": drawn}, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _words(accounts: Sequence[Account]) -> dict[str, Any]:
    first = accounts[0].summary
    recipes = [dict(leaves(account.history.run.recipe.to_dict())) for account in accounts]
    alone = len(accounts) == 1
    return {
        "title": first.name if alone else f"{len(accounts)} runs",
        "lede": _lede(accounts),
        "sources": "its event log" if alone else "their event logs",
        "runs": [_run(i, account) for i, account in enumerate(accounts)],
        "heroes": _heroes(accounts[0]) if alone else [],
        "summary": _summary(accounts),
        "spent": rows([account.ledger for account in accounts]),
        "recipe": _parted([{key: _value(value) for key, value in told.items()} for told in recipes]),
        "places": _parted([_places(account) for account in accounts]),
    }


def _summary(accounts: Sequence[Account]) -> list[dict[str, Any]]:
    # Why a run was stopped stands at the head of the page.
    rows = _rows([{**facts(account.summary), "status": account.summary.status} for account in accounts])
    if len(accounts) == 1:
        return [row for row in rows if row["key"] not in HEROES]
    scores = [account.summary.best.top1 if account.summary.best else -1.0 for account in accounts]
    most = scores.index(max(scores)) if max(scores) >= 0 else None
    return [{**row, "most": most if row["key"] == "best top-1" else None} for row in rows]


def _run(index: int, account: Account) -> dict[str, Any]:
    told = account.summary
    scores = [
        row.val_top1 if row.val_top1 is not None and math.isfinite(row.val_top1) else -1 for row in account.epochs
    ]
    return {
        "index": index,
        "name": told.name,
        "status": told.status,
        "why": told.why,
        "bar": bar(account.ledger.seconds),
        "spent": sentence(account.ledger),
        "rates": to_words(account.ledger),
        "epochs": epoch_cells(account.epochs),
        "best_epoch": scores.index(max(scores)) + 1 if scores and max(scores) >= 0 else 0,
        "happened": happened(account.history),
        **_rejected(account.history.started.data),
    }


def _lede(accounts: Sequence[Account]) -> str:
    models = sorted({account.summary.model for account in accounts})
    if len(accounts) > 1:
        return f"{', '.join(account.summary.name for account in accounts)} · {', '.join(models)}"
    told = accounts[0].summary
    return f"{told.model} · {told.status} · begun {when(told.began)}"


def _heroes(account: Account) -> list[dict[str, str]]:
    told = account.summary
    best = told.best
    within = f"{percent(best.top1_95.low)} to {percent(best.top1_95.high)}" if best else "no evaluation yet"
    return [
        {
            "label": "Best top-1 accuracy",
            "value": percent(best.top1 if best else None),
            "more": f"{within}, epoch {epoch(best.epoch)}" if best else within,
        },
        {
            "label": "Images per second",
            "value": rate(told.images_per_second),
            "more": f"steady; {rate(told.images_per_second_overall)} overall",
        },
        {
            "label": "Wall time",
            "value": duration(told.seconds),
            "more": f"{duration(told.seconds_per_epoch)} an epoch" if told.seconds_per_epoch else "",
        },
        {
            "label": "Epochs",
            "value": epoch(told.epochs_done),
            "more": f"of {epoch(told.epochs)}",
        },
    ]


def _places(account: Account) -> dict[str, str]:
    started, feed = account.history.started, account.history.feed
    told = {f"data: {key}": _counted(key, value) for key, value in started.data.items() if key != "rejected"}
    told |= {f"model: {key}": _counted(key, value) for key, value in started.model.items()}
    told |= {f"machine: {key}": _counted(key, value) for key, value in started.machine.items()}
    if feed is not None:
        busy = f"read {duration(feed.read_seconds)}, decode {duration(feed.decode_seconds)}"
        told["feed: busy"] = f"{busy}, batch {duration(feed.batch_seconds)}"
        told["feed: waiting for the model"] = duration(feed.blocked_seconds)
        told["feed: images"] = f"{number(feed.images)} by {feed.threads} thread{'' if feed.threads == 1 else 's'}"
    return told


def _rows(told: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """One row for each key that any run has, with a cell for each run."""
    keys = dict.fromkeys(key for one in told for key in one)
    rows = [{"key": key, "cells": [one.get(key, NONE) for one in told]} for key in keys]
    return [{**row, "differs": False, "most": None} for row in rows]


def _parted(told: Sequence[Mapping[str, str]]) -> dict[str, list[dict[str, Any]]]:
    """The rows in which runs differ, and those that they share; what is set nowhere is left out."""
    rows = _rows(told)
    return {
        "differing": [{**row, "differs": True} for row in rows if len(set(row["cells"])) > 1],
        "common": [row for row in rows if set(row["cells"]) not in ({NONE}, set()) and len(set(row["cells"])) == 1],
    }


def _rejected(data: Mapping[str, Any]) -> dict[str, Any]:
    """The files that packing passed over: as many as were told of, and how many there are."""
    told = data.get("rejected")
    pairs = [one for one in told if isinstance(one, list) and len(one) == 2] if isinstance(told, list) else []
    return {
        "rejected": [f"{name}: {reason}" for name, reason in pairs],
        "num_rejected": number(data.get("num_rejected", len(pairs))),
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
        return ", ".join(f"{key}: {_value(one)}" for key, one in value.items()) or NONE
    if isinstance(value, Iterable) and not isinstance(value, str):
        parts = [_value(one) for one in value]
        more = f" and {len(parts) - MAX_CLASSES:,} more" if len(parts) > MAX_CLASSES else ""
        return ", ".join(parts[:MAX_CLASSES]) + more or NONE
    return str(value)
