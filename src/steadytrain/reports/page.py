"""The report as one HTML file: it needs no network, and only its own script may run in it.

The curves are drawn by plotly.js, taken from the installed ``plotly`` package and carried in the page compressed
(2 MB instead of 4.8). The content security policy names the page's two scripts by their digests: nothing that a run's
name, a class or an error message might hold can ever be run.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from steadytrain import __version__
from steadytrain.config.plain import leaves
from steadytrain.config.recipe import Recipe
from steadytrain.events import FeedStats, ProbeProgress
from steadytrain.format import (
    NONE,
    compact,
    count,
    count_images,
    duration,
    epoch,
    money,
    number,
    percent,
    rate,
    score_name,
    size,
    when,
)
from steadytrain.monitor.history import RunScore, UnseenScore
from steadytrain.reports.charts import MAX_CURVES, TEMPLATES, charts, coverage_chart, has_line, style
from steadytrain.reports.mistakes import SuspectImage, sections, suspect_rows
from steadytrain.reports.status import milestones
from steadytrain.reports.summary import Account, Repeats, Summary, all_reached, find_repeats
from steadytrain.reports.tables import MARK, best_epoch, epoch_table, is_probe, known_facts, shown_epochs, speed_table
from steadytrain.reports.time_spent import bar, rates_text, rows, sentence
from steadytrain.reports.verdict import held_back

if TYPE_CHECKING:
    import jinja2

MAX_CLASSES = 12
SHOWN_ROWS = 12
"""Rows that are shown of the summary of a run, and of the table of several; the rest opens on demand."""
SHOWN_PAIRS = 6
SHOWN_DIFFERENCES = 4
LESS_WANTED = ("digest", "split", "classes", "counts", "multi_label", "channels")
"""Facts of the data that are folded away: other parts of the page show them, or only programs compare them."""
TIME_FIGURES = ("rate", "wait")
"""Curves that belong to where the time went."""
HEROES = ("best top-1", "best mAP", "images/s, steady", "wall time", "epochs")


def render(template: str, data: object, **values: Any) -> str:
    """Fill a template; ``data`` as JSON that can stand in a script element whatever is in it."""
    from markupsafe import Markup

    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    text = text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    return _environment().get_template(template).render(data=Markup(text), version=__version__, **values)


@cache
def _environment() -> jinja2.Environment:
    """Return what compiles a template once a process."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number_of": count, "unbroken": _unbroken}
    return environment


def _unbroken(text: str) -> str:
    """Mark flags within a text, which no browser may break between their dashes, as at a line's end."""
    from markupsafe import Markup, escape

    span = r'<span style="white-space: nowrap">\g<0></span>'
    return Markup(re.sub(r"(?<![\w-])--\w[\w-]*", span, str(escape(text))))


@cache
def packed_plotly() -> bytes:
    """Compress plotly.js, once a process."""
    from plotly.offline import get_plotlyjs

    return gzip.compress(get_plotlyjs().encode(), 4, mtime=0)


def script(*names: str) -> str:
    """Return a page's script: what all curves and figures have in common, then its own."""
    return "".join((TEMPLATES / part).read_text(encoding="utf-8") for part in ("curves.js", *names))


def suspects_page(title: str, lede: str, images: Sequence[SuspectImage], pairs: Sequence[tuple[str, str, int]]) -> str:
    """Return a page of images whose label may be wrong; ``pairs``: label, suggested class and number of images."""
    from markupsafe import Markup

    style = Markup((TEMPLATES / "page.css").read_text(encoding="utf-8"))
    photos = (TEMPLATES / "photos.js").read_text(encoding="utf-8")
    words = {"title": title, "lede": lede, "rows": suspect_rows(images), "pairs": pairs, "policy": _policy(photos)}
    return render("suspects.html.j2", None, **words, mark=MARK, style=style, photos=Markup(photos))


def page(
    accounts: Sequence[Account], *, now: float | None = None, target: float | None = None, folder: Path | None = None
) -> str:
    """Return the report's page.

    Args:
        now: when it is made, seconds since 1970; None: the present.
        target: accuracy, a fraction: the table of several runs says when each came to it.
        folder: where the page will be, from which its links start; None: not known, and the page has no links.
    """
    from markupsafe import Markup

    drawn, library = charts([account.history for account in accounts]), ""
    words = _words(accounts, target, folder)
    coverage = coverage_chart([part.get("coverage", ((), ())) for part in words["mistakes"]])
    figures = [f for f in [*drawn, coverage] if (f["traces"] if len(accounts) > 1 else has_line(f))]
    if not {"top1", "loss"} & {figure["id"] for figure in figures}:  # a learning rate says nothing alone
        figures = [figure for figure in figures if figure["id"] != "lr"]
    if figures:
        from plotly.offline import get_plotlyjs

        library = str(get_plotlyjs())
    code = script("page.js", *([] if len(accounts) == 1 else ["sort.js"]))
    has_photos = any(part.get("worst") for part in words["mistakes"])
    photos = (TEMPLATES / "photos.js").read_text(encoding="utf-8") if has_photos else ""
    runs = [{"name": account.summary.name, **style(words["best"].index(i))} for i, account in enumerate(accounts)]
    return render(
        "page.html.j2",
        {"runs": runs, "figures": figures},
        **words,
        mark=MARK,
        made=when(time.time() if now is None else now),
        figures=[figure for figure in figures if figure["id"] not in (*TIME_FIGURES, "coverage")],
        has_charts=bool(figures),
        coverage=[figure for figure in figures if figure["id"] == "coverage"],
        time_figures=[figure for figure in figures if figure["id"] in TIME_FIGURES],
        policy=_policy(*([library, code] if figures else []), photos, images="data: blob:"),
        style=Markup((TEMPLATES / "page.css").read_text(encoding="utf-8")),
        script=Markup(code),
        photos=Markup(photos),
        library=base64.b64encode(packed_plotly() if figures else gzip.compress(b"", 5, mtime=0)).decode(),
    )


def _policy(*scripts: str, images: str = "data:") -> str:
    """Return a content security policy, by which a page runs these scripts alone, and fetches nothing."""
    digests = [hashlib.sha256(script.encode()).digest() for script in scripts if script]
    known = " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests) or "'none'"
    rest = "base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {known}; style-src 'unsafe-inline'; img-src {images}; {rest}"


def _words(accounts: Sequence[Account], target: float | None, folder: Path | None) -> dict[str, Any]:
    first, is_alone = accounts[0].summary, len(accounts) == 1
    models = sorted({account.summary.setup.model for account in accounts} - {NONE})
    lede = f"{_value([account.summary.name for account in accounts])} · {_value(models)}"
    recipes = [account.settings for account in accounts]
    data = "" if first.log else Path(accounts[0].run.recipe.data.train).name
    start = "" if first.course.began is None else f"begun {when(first.course.began)}"
    alone = " · ".join(filter(None, (data, first.log or first.setup.model, first.course.status, start)))
    logs = {bool(account.summary.log) for account in accounts}
    # Why a run was stopped stands at the head of the page.
    words = known_facts([account.summary for account in accounts])
    table = _rows([{**run, "status": a.summary.course.status} for run, a in zip(words, accounts, strict=True)])
    return {
        "title": first.name if is_alone else f"{len(accounts)} runs",
        "lede": alone if is_alone else lede,
        "sources": "its log" if logs == {True} and is_alone else "its event log" if is_alone else "their logs",
        "runs": [_run(i, account, folder) for i, account in enumerate(accounts)],
        "has_log": True in logs,
        "heroes": _heroes(accounts[0]) if is_alone else [],
        "ranking": [] if is_alone else _ranking(accounts, target),
        "best": (best := _best_first(accounts)),
        "drawn": best[:MAX_CURVES],
        "compared": speed_table([account.summary for account in accounts]),
        "target": "" if target is None else percent(target, 1),
        "has_repeats": bool(find_repeats([account.summary for account in accounts])),
        "summary": [row for row in table if row["key"] not in HEROES] if is_alone else table,
        "shown": SHOWN_ROWS,
        "shown_pairs": SHOWN_PAIRS,
        "shown_runs": max(1, SHOWN_ROWS // max(1, len({account.summary.setup.data_set for account in accounts}))),
        "mistakes": sections(accounts),
        "spent": rows([account.ledger for account in accounts]),
        "changed": _changed(accounts[0]),
        "recipe": _split([{key: _value(value) for key, value in recipe.items()} for recipe in recipes]),
        "places": _split([_places(account) for account in accounts]),
    }


def _changed(account: Account) -> list[dict[str, Any]]:
    """Return the rows of a recipe's settings that differ from the defaults; of a log all that are known."""
    recipe = {} if account.summary.log else Recipe.from_dict({"data": {"train": "-"}, "model": {"name": "-"}}).to_dict()
    usual = dict(leaves(recipe))
    settings = {key: _value(value) for key, value in account.settings.items() if value != usual.get(key)}
    return _rows([settings])


def _best_first(accounts: Sequence[Account]) -> list[int]:
    """Return the indices of the runs, the best first."""
    best = [account.summary.quality.best for account in accounts]
    scores = [-1.0 if score is None or not math.isfinite(score.value) else score.value for score in best]
    return sorted(range(len(accounts)), key=lambda run: -scores[run])


def _ranking(accounts: Sequence[Account], target: float | None = None) -> list[dict[str, Any]]:
    """Rank runs, separately for each data set that they were trained and validated on."""
    by_name = {account.summary.name: account for account in accounts}
    groups: dict[str, list[int]] = {}
    ours = {account.summary.setup.data_set for account in accounts if not account.summary.log}
    for i, account in enumerate(accounts):  # logs of other programs, beside runs on one data set, are taken to be on it
        key = next(iter(ours)) if account.summary.log and len(ours) == 1 else account.summary.setup.data_set
        groups.setdefault(key, []).append(i)
    tables: list[dict[str, Any]] = []
    for members in groups.values():
        recipes = [accounts[i].settings for i in members]
        settings = [{key: _value(value) for key, value in recipe.items()} for recipe in recipes]
        keys = [key for key in dict.fromkeys(key for values in settings for key in values) if _differs(key, settings)]
        keys = [key for key in keys if key not in ("model.name", "data.train", "data.val", "data.test")]
        of_repeats = {
            name: group for group in find_repeats([accounts[i].summary for i in members]) for name in group.runs
        }
        rows = []
        for i, recipe in zip(members, recipes, strict=True):
            group = of_repeats.get(accounts[i].summary.name)
            if group is None:
                rows.append(_ranked(i, accounts[i], recipe, keys) | _to_target([accounts[i]], target))
            elif accounts[i].summary.name == group.runs[0]:  # one row for all of them
                others = [key for key in keys if key != "seed"]
                to_target = _to_target([by_name[name] for name in group.runs], target)
                rows.append(_ranked(i, accounts[i], recipe, others) | _spread_cells(group) | to_target)
        rows.sort(key=lambda row: -row["score"])
        quality = accounts[members[0]].summary.quality
        name = quality.best.best_label if quality.best else f"best {score_name(quality.is_multi_label)}"
        first = next((i for i in members if not accounts[i].summary.log), members[0])
        has_log = any(accounts[i].summary.log for i in members)
        tables.append({"title": _data_words(accounts[first]), "rows": rows, "score": name, "has_log": has_log})
    titles = [table["title"] for table in tables]
    for table, data_set in zip(tables, groups, strict=True):
        if titles.count(table["title"]) > 1:  # of one name, and yet not the same images
            table["title"] += f" ({', '.join(str(name)[:12] for name in json.loads(data_set)[:2] if name)})"
    return tables


def _differs(key: str, runs: Sequence[Mapping[str, str]]) -> bool:
    """Return whether the runs that have a key differ in its value."""
    return len({run[key] for run in runs if key in run}) > 1


def _to_target(accounts: Sequence[Account], target: float | None) -> dict[str, Any]:
    """Describe when runs reached an accuracy: the mean of those that did."""
    hits = all_reached(accounts, target)
    if not hits:
        return {"to_target": NONE, "to_target_epochs": "", "to_target_seconds": ""}
    of = f", {len(hits)} of {len(accounts)}" if len(hits) < len(accounts) else ""
    epochs = f"epoch {epoch(fmean(hit.epoch for hit in hits))}{of}"
    seconds = fmean(hit.seconds for hit in hits)
    return {"to_target": duration(seconds), "to_target_epochs": epochs, "to_target_seconds": seconds}


def _data_words(account: Account) -> str:
    data, summary, setup = account.run.recipe.data, account.summary, account.summary.setup
    if summary.log:
        named = account.settings.get("data.train")
        return f"{named}, as the log says" if named else "data that the logs do not name"
    words = [f"{data.train}{f' and {data.val}' if data.val else ''}: {number(setup.num_train)} images to train on"]
    kind = ("label", "labels") if summary.quality.is_multi_label else ("class", "classes")
    words.append(f"{number(setup.num_val)} to validate with" if setup.num_val else "none to validate with")
    return ", ".join([*words, *([count(setup.num_classes, *kind)] if setup.num_classes else [])])


def _ranked(index: int, account: Account, recipe: Mapping[str, Any], keys: Sequence[str]) -> dict[str, Any]:
    summary, best = account.summary, account.summary.quality.best
    is_known = best is not None and math.isfinite(best.value)
    of = "" if summary.progress.step == summary.progress.steps else f" of {epoch(summary.progress.epochs)}"
    keys = [key for key in keys if key in recipe]
    differences = [f"{key.removeprefix('optim.')} {_short_value(recipe[key])}" for key in keys]
    more = f", {len(keys) - SHOWN_DIFFERENCES} more" if len(keys) > SHOWN_DIFFERENCES else ""
    return {
        "index": index,
        "repeats": "",
        "score": best.value if best and is_known else -1.0,
        "status": summary.course.status,
        "model": summary.setup.model,
        "best": percent(best.value, 1) if best and is_known else NONE,
        "interval": best.interval.words if best and best.interval else "",
        "epochs": "probe" if is_probe(summary) else epoch(summary.progress.epoch) + of,
        "rate": rate(summary.speed.images_per_second),
        "seconds": duration(summary.speed.seconds),
        "wall": summary.speed.seconds,
        "differences": ", ".join(differences[:SHOWN_DIFFERENCES]) + more,
    }


def _short_value(value: Any) -> str:
    """Format a value of the recipe within a list: of a path the last part, a list in brackets.

    >>> _short_value("/data/weights/a.safetensors"), _short_value([0.4, 1.0])
    ('a.safetensors', '(0.4, 1)')
    """
    words = _value(value)
    if isinstance(value, str) and "/" in value and value.endswith((".safetensors", ".pth", ".pt", ".rec", ".json")):
        return value.rpartition("/")[2]
    return f"({words})" if isinstance(value, list | tuple) and len(value) > 1 else words


def _spread_cells(group: Repeats) -> dict[str, Any]:
    """Format the cells of repeats in the row of the first; no accuracy unless two or more have finished."""
    cells: dict[str, Any] = {"repeats": group.title}
    if (best := group.best_mean_ap or group.best_top1) is not None:
        interval = f"± {100 * best.std:.1f}, {best.mean_95.words}"
        cells |= {"score": best.mean, "best": percent(best.mean, 1), "interval": interval}
    return cells | ({"seconds": duration(group.seconds.mean), "wall": group.seconds.mean} if group.seconds else {})


def _run(index: int, account: Account, folder: Path | None) -> dict[str, Any]:
    summary, started = account.summary, account.history.started
    assert started is not None
    columns, cells = epoch_table(account)
    best, (shown, few) = best_epoch(account), shown_epochs(account)
    rejected = started.data.get("rejected")
    pairs = (
        [pair for pair in rejected if isinstance(pair, list) and len(pair) == 2] if isinstance(rejected, list) else []
    )
    return {
        "index": index,
        "name": summary.name,
        "status": summary.course.status,
        "why": summary.course.why,
        "has_figures": bool(account.history.logged or account.history.evaluated),
        "bar": bar(account.ledger.seconds),
        "spent": sentence(account.ledger),
        "verdict": [line[:1].upper() + line[1:] for line in held_back(account)],
        "rates": rates_text(account.ledger),
        "columns": columns,
        "epochs": cells,
        "is_probe": is_probe(summary),
        "best_epoch": 0 if best is None else shown.index(account.epochs[best]) + 1,
        "few": few,
        "happened": milestones(account.history),
        "traces": [
            (path.name, "" if folder is None else quote(os.path.relpath(path, folder.resolve())))
            for path in sorted(account.run.directory.resolve().glob("profile/*"))
        ],
        "rejected": [f"{name}: {reason}" for name, reason in pairs],  # as many as the log names
        "num_rejected": n if isinstance(n := started.data.get("num_rejected"), int) else len(pairs),
    }


def heroes_and_verdict(account: Account) -> tuple[list[dict[str, str]], list[str]]:
    """Return the figures at the head of a run (``label``, ``value``, ``more``), and the sentences of its verdict."""
    return _heroes(account), [line[:1].upper() + line[1:] for line in held_back(account)]


def best_hero(best: RunScore | None, is_multi_label: bool) -> tuple[str, str, str]:
    """Return the best score for the head of a page, with its interval and when it was made."""
    label = "Best mAP" if is_multi_label else "Best top-1 accuracy"
    if best is None:
        return label, NONE, "no evaluation yet"
    label = label if best.best_label.startswith("best") else f"{best.best_label[:1].upper()}{best.best_label[1:]}"
    interval = f"{percent(best.top1_95.low, 1)} to {percent(best.top1_95.high, 1)}, " if best.interval else ""
    return label, percent(best.value, 1), interval + best.when.removeprefix("at ")


def test_heroes(test: UnseenScore | None) -> list[tuple[str, str, str]]:
    """Return the score on test images for the head of a page; none before the end, and without such."""
    interval = f"{test.interval.words} %, " if test and test.interval else ""
    return (
        [(f"Test, {test.seen}", percent(test.value, 1), interval + count_images(test.n, test.effective_n))]
        if test
        else []
    )


def macro_heroes(summary: Summary) -> list[tuple[str, str, str]]:
    """Return macro recall for the head of a page where classes are uneven."""
    best, test = summary.quality.best, summary.quality.test
    heroes = []
    if summary.setup.class_ratio is not None and best is not None:
        of_test = f"{percent(test.macro_recall, 1)} on the test images; " if test is not None else ""
        more = f"{of_test}mean over classes, the largest {summary.setup.class_ratio:.3g} times the smallest"
        heroes.append(("Macro recall", percent(best.macro_recall, 1), more))
    return heroes


def probe_heroes(probe: ProbeProgress) -> list[tuple[str, str, str]]:
    """Return the speed of a probe for the head of a page: of the features, and of the fit."""
    features = f"through the frozen network: {probe.images:,} of {count(probe.total, 'image')}"
    fit = [("Classifier fitted in", duration(probe.fit_seconds), "")] if probe.fit_seconds else []
    folds = []
    if probe.by_fold:
        between = f"{percent(min(probe.by_fold), 1)} to {percent(max(probe.by_fold), 1)} by fold"
        folds = [(f"Top-1 of {len(probe.by_fold)} folds", percent(probe.fold_top1, 1), between)]
    return [*folds, ("Images per second", rate(probe.images_per_second), features), *fit]


def _heroes(account: Account) -> list[dict[str, str]]:
    summary, progress, speed = account.summary, account.summary.progress, account.summary.speed
    per_epoch = ""
    if progress.epoch >= 1:  # as the live page has it
        per_epoch = f"{duration(speed.seconds / progress.epoch)} an epoch"
        per_epoch += f"; its updates {duration(speed.seconds_per_epoch)}" if speed.seconds_per_epoch else ""
    steady, whole = speed.images_per_second, speed.images_per_second_overall
    pace = ("overall", whole) if steady is None else (f"steady; {rate(whole)} overall", steady)
    quality = summary.quality
    label, value, more = best_hero(quality.best, quality.is_multi_label)
    series = "; probably too high, as the notice on series says" * bool(summary.probe and summary.probe.series)
    scores = [(label, value, more + series), *test_heroes(quality.test), *macro_heroes(summary)]
    heroes = [
        *scores,
        ("Images per second", rate(pace[1]), pace[0]),
        ("Wall time", duration(speed.seconds), per_epoch),
        ("Epochs", epoch(progress.epoch), f"of {epoch(progress.epochs)}"),
    ]
    if is_probe(summary):
        heroes = [*scores, *(probe_heroes(summary.probe) if summary.probe else [])]
        heroes.append(("Wall time", duration(speed.seconds), "a probe: no updates"))
    if (bill := summary.cost) is not None:
        at_end = "" if bill.at_end is None else f"about {money(bill.at_end)} at the end; "
        heroes.append(("Cost", f"{money(bill.so_far)} {bill.currency}", f"{at_end}{bill.price}"))
    heroes = [hero for hero in heroes if hero[1] != NONE or hero is scores[0]]
    return [{"label": label, "value": value, "more": more} for label, value, more in heroes]


def _places(account: Account) -> dict[str, str]:
    """Describe where and with what the run was trained."""
    started, feed = account.history.started, account.history.newest(FeedStats)
    assert started is not None
    words = {f"data: {key}": _counted(key, value) for key, value in started.data.items() if key != "rejected"}
    data = account.run.recipe.data
    if not account.summary.log and started.data.get("train") not in (None, str(data.train)):  # a copy in the cache
        parts = [part for part in ("val", "test") if started.data.get(part)]
        words |= {f"data: {part}": str(getattr(data, part) or f"those of {data.train}") for part in parts}
        words |= {"data: train": str(data.train)}
        if started.data.get("held_out"):
            words["data: val"] = "held out"
    words |= {f"model: {key}": _counted(key, value) for key, value in started.model.items()}
    words |= {f"machine: {key}": _counted(key, value) for key, value in started.machine.items()}
    if feed is not None:
        busy = f"read {duration(feed.read_seconds)}, decode {duration(feed.decode_seconds)}"
        words["feed: busy"] = f"{busy}, batch {duration(feed.batch_seconds)}"
        words["feed: waiting for the model"] = duration(feed.blocked_seconds)
        words["feed: images"] = f"{number(feed.images)} by {count(feed.threads, 'thread')}"
    return dict(sorted(words.items(), key=lambda pair: pair[0].endswith(LESS_WANTED)))


def _rows(runs: Sequence[Mapping[str, str]]) -> list[dict[str, Any]]:
    """Return one row for each key that any run has, with a cell for each run."""
    keys = dict.fromkeys(key for run in runs for key in run)
    return [{"key": key, "cells": [run.get(key, NONE) for run in runs], "differs": False} for key in keys]


def _split(runs: Sequence[Mapping[str, str]]) -> dict[str, list[dict[str, Any]]]:
    """Split the rows into those in which runs differ and those that they share, without what is set nowhere.

    What a log of another program says nothing of is no difference.
    """
    table = _rows(runs)
    common = [next(run for run in runs if row["key"] in run)[row["key"]] for row in table]
    return {
        "differing": [{**row, "differs": True} for row in table if _differs(row["key"], runs)],
        "common": [
            {**row, "cells": [value]}
            for row, value in zip(table, common, strict=True)
            if value != NONE and not _differs(row["key"], runs)
        ],
    }


def _counted(key: str, value: Any) -> str:
    if key.endswith("digest") and isinstance(value, str):
        return value[:12]
    if key == "unseen":
        return f"{percent(value)} of the pixels"
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
