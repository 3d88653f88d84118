"""The runs of a folder, a row each: found, summarised, chosen and sorted.

Only regular files of a run's own folder are read, no links, so a stranger's folder cannot lead elsewhere. A summary is
computed from the run's events and kept in the user's cache until its files change; the index can be lost at any time.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import os
import re
import shlex
import stat
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

from steadytrain import __version__
from steadytrain.config.plain import build, check_types, leaves
from steadytrain.config.recipe import recipe_settings
from steadytrain.errors import InputError, RecipeError, RunError, SteadyError, did_you_mean, first_line
from steadytrain.files import MOST_TEXT_BYTES, read_text, replace_file
from steadytrain.format import clean, count, duration, epoch, few, money, percent, rate
from steadytrain.machine.facts import cache_folder
from steadytrain.monitor.history_reader import read_any
from steadytrain.reports.files import open_run, run_folders
from steadytrain.reports.status import may_go_on, other_host, signs
from steadytrain.reports.summary import summarise_history
from steadytrain.run import Run

NOTES = "notes.json"
"""File of a run with its tags and its note; nothing else reads it."""
NOTE_COLUMNS = 48
"""Characters of a note that a table shows; JSON has the whole."""
ODD_LOG = (SteadyError, ArithmeticError, AttributeError, LookupError, OSError, TypeError, ValueError)
"""Errors that one run's damaged files may cause; they must not hide the other runs."""
DAMAGED = "damaged"


@dataclass(frozen=True, kw_only=True)
class RunRow:
    """A run in a list. Scores are fractions, durations seconds, moments seconds since 1970; None where unknown.

    ``status``: as of :class:`~steadytrain.reports.status.Signs`, or ``damaged``. ``why``: for those that did not
    finish. ``best``: the highest top-1, or mAP where images may have several labels, with its 95 % interval.
    ``open_since``: of a run whose log has no end, when its newest attempt began; ``host``: the other machine that this
    was on; ``process``: that held the run last.
    """

    name: str
    directory: str
    status: str
    why: str = ""
    data: str = ""
    model: str = ""
    metric: Literal["top1", "mean_ap"] = "top1"
    best: float | None = None
    low: float | None = None
    high: float | None = None
    loss: float | None = None
    images_per_second: float | None = None
    cost: float | None = None
    currency: str = ""
    seconds: float | None = None
    epochs_done: float | None = None
    epochs: float | None = None
    began: float | None = None
    last: float | None = None
    open_since: float | None = None
    host: str | None = None
    process: int | None = None
    tags: tuple[str, ...] = ()
    note: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it."""
        return {name: value for name, value in vars(self).items() if name != "open_since"}


@dataclass(frozen=True)
class RunNotes:
    """Tags and a note that a user wrote on a run."""

    tags: tuple[str, ...] = ()
    note: str = ""

    def __post_init__(self) -> None:
        check_types(self, "notes")


def read_notes(folder: Path) -> RunNotes:
    """Read a run's tags and note; none where there are none, or none that can be read."""
    with suppress(RunError, RecipeError, OSError, ValueError, RecursionError):
        if _stamp(folder / NOTES):
            return build(RunNotes, json.loads(read_text(folder / NOTES)))
    return RunNotes()


def with_notes(row: RunRow) -> RunRow:
    """Return a row with the tags and the note that its run has now."""
    return replace(row, **vars(read_notes(Path(row.directory))))


def write_notes(folder: Path, *, add: Sequence[str] = (), remove: Sequence[str] = (), note: str | None = None) -> None:
    """Add and remove tags, and replace the note, if any is given, in the run's own folder.

    Raises:
        InputError: a tag that is empty or holds a comma or a space.
        RunError: the file is a link, or no file.
        StorageError: it cannot be written.
    """
    _stamp(folder / NOTES)
    for tag in add:
        if not tag or re.search(r"[\s,]", tag):
            raise InputError(f"--tag is {tag!r}; a tag is one word without commas, such as baseline")
    before = read_notes(folder)
    tags = dict.fromkeys((*before.tags, *add))
    after = RunNotes(tuple(tag for tag in tags if tag not in remove), before.note if note is None else note)
    if after != before:
        replace_file(folder / NOTES, json.dumps(asdict(after), indent=1, ensure_ascii=False) + "\n")


def list_runs(folder: str | Path) -> list[RunRow]:
    """Return a row for each run in a folder, the newest first.

    Raises:
        RunError: there is no such folder, or no run in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        open_run(folder)  # which says what is wrong with it
    index = _Index(folder)
    rows = [index.row(path) for path in run_folders(folder)]
    if not rows:
        others = f"; logs of other programs: steady report {folder}" if any(folder.iterdir()) else ""
        raise RunError(f"{folder} is no run (no recipe.json) and holds none yet{others}")
    index.save()
    return sorted(rows, key=lambda row: (-(row.began or 0.0), row.name))


class _Index:
    """Summaries of a folder's runs from the time before, by the size and time of their files."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        cache = cache_folder()
        digest = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()[:24]
        self._path = cache / "runs" / f"{digest}.json" if cache else None
        self._version = f"{__version__} {' '.join(f.name for f in fields(RunRow))}"
        self._before: dict[str, Any] = {}
        self._now: dict[str, Any] = {}
        with suppress(OSError, ValueError, RecursionError, LookupError, TypeError):
            document = json.loads(self._path.read_text(encoding="utf-8")) if self._path else {}
            if document["version"] == self._version and isinstance(document["rows"], dict):
                self._before = document["rows"]

    def row(self, path: Path) -> RunRow:
        """Return a run's row: the one from before if its files are the same, else a new one."""
        name = str(path.relative_to(self._folder)) if path != self._folder else path.resolve().name
        try:
            stamp = _stamps(path)
            if (row := self._known(name, stamp)) is None:
                row = _summarised(path, name)
                self._now[name] = {"stamp": stamp, "row": vars(row)}
            else:
                self._now[name] = self._before[name]
        except ODD_LOG as error:
            return RunRow(name=name, directory=str(path), status=DAMAGED, why=first_line(error))
        return replace(row, directory=str(path), **vars(read_notes(path)))

    def _known(self, name: str, stamp: object) -> RunRow | None:
        with suppress(SteadyError, LookupError, TypeError, AttributeError):
            entry = self._before[name]
            if entry["stamp"] == stamp and entry["row"]["name"] == name:
                row = build(RunRow, entry["row"])
                check_types(row, "run")
                if row.open_since is None:
                    return None if row.status in ("waiting", "running") else row
                is_alive = may_go_on(row.process, row.host, row.open_since, row.last or 0.0)
                return None if is_alive or row.status == "running" else row
        return None

    def save(self) -> None:
        """Write the index, if anything changed; without a place for it the next list takes longer."""
        if self._path is not None and self._now != self._before:
            with suppress(SteadyError, OSError):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                replace_file(self._path, json.dumps({"version": self._version, "rows": self._now}))


def _stamp(path: Path) -> list[int] | None:
    """Return time and size of a regular file, None where there is none; RunError for a link or anything else."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        kind = "link" if stat.S_ISLNK(status.st_mode) else "no file"
        raise RunError(f"{path.name} is {'a ' * (kind == 'link')}{kind}: it is not followed")
    return [status.st_mtime_ns, status.st_size]


def _stamps(folder: Path) -> list[list[int] | None]:
    recipe, log, lock = (_stamp(folder / name) for name in ("recipe.json", "events.jsonl", "lock"))
    for other in folder.glob("events-*.jsonl"):
        _stamp(other)
    if recipe and recipe[1] > MOST_TEXT_BYTES:
        raise RunError(f"recipe.json has {recipe[1]:,} bytes; a recipe has at most {MOST_TEXT_BYTES:,}")
    return [recipe, log, lock]


def _summarised(path: Path, name: str) -> RunRow:
    """Fold a run's events to its row."""
    run = Run.open(path)
    history = read_any(run)
    recipe = dict(leaves(run.recipe.to_dict()))
    data = Path(str(run.recipe.data.train).rstrip("/")).name
    row = RunRow(
        name=name, directory=str(path), status="waiting", data=data, model=run.recipe.model.name, recipe=recipe
    )
    began = (path / "recipe.json").lstat().st_mtime
    if history.started is None:
        seen = signs(run, history, time.time())
        if history.unreadable and seen.status == "waiting":
            return replace(row, status=DAMAGED, why=f"no line of events.jsonl can be read ({history.unreadable:,})")
        why = seen.why or (f"starting, process {seen.process}" if seen.process else "")
        return replace(row, status=seen.status, why=why, began=began, last=seen.last or None)
    summary = summarise_history(run, history, history.ledger())
    best, course, attempt = summary.quality.best, summary.course, history.attempts[-1]
    interval, cost = best.interval if best else None, summary.cost
    damaged = f"{count(history.unreadable, 'damaged line')} of events.jsonl left out" if history.unreadable else ""
    return replace(
        row,
        status=course.status,
        why="; ".join(filter(None, (course.why, damaged))),
        model=summary.setup.model,
        metric="mean_ap" if summary.quality.is_multi_label else "top1",
        best=_finite(best.value) if best else None,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        loss=_finite(best.loss) if best else None,
        images_per_second=_finite(summary.speed.images_per_second),
        cost=_finite(cost.so_far) if cost else None,
        currency=cost.currency if cost else "",
        seconds=_finite(summary.speed.seconds),
        epochs_done=_finite(summary.progress.epoch),
        epochs=_finite(summary.progress.epochs),
        began=_finite(course.began) or began,
        last=history.last_time,
        open_since=None if history.ended is not None else attempt.began,
        host=other_host(history),
        process=run.holder(),
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def row_cells(row: RunRow, now: float) -> dict[str, str]:
    """Format a run for a table, by the heads of its columns; empty where there is nothing to say.

    >>> words = row_cells(RunRow(name="a", directory="a", status="finished", best=0.9231, low=0.91, high=0.93), 0.0)
    >>> words["best"], words["cost"]
    ('92.31 % (91.00 to 93.00)', '')
    """
    interval = "" if row.low is None or row.high is None else f" ({100 * row.low:.2f} to {100 * row.high:.2f})"
    metric = "mAP " if row.metric == "mean_ap" else ""
    remark = " ".join([*(f"#{tag}" for tag in row.tags), row.note]).strip()
    remark = remark or ("" if row.status == "running" else row.why)
    words = {
        "run": row.name,
        "status": row.status,
        "data": row.data,
        "model": row.model,
        "epochs": f"{epoch(row.epochs_done or 0)} of {epoch(row.epochs)}" if row.epochs else "",
        "best": "" if row.best is None else f"{metric}{percent(row.best, 2)}{interval}",
        "images/s": "" if row.images_per_second is None else rate(row.images_per_second),
        "cost": "" if row.cost is None else f"{money(row.cost)} {row.currency}",
        "age": "" if row.began is None else duration(max(0, round(now - row.began))),
        "note": textwrap.shorten(remark, NOTE_COLUMNS, placeholder=" ..."),
    }
    words |= {"epochs": "probe"} if row.epochs == 0 else {}
    return {head: clean(text) for head, text in words.items()}


# Choosing and sorting ------------------------------------------------------------------------------------------------

TEXTS: dict[str, Callable[[RunRow], str]] = {
    "name": lambda row: row.name,
    "status": lambda row: row.status,
    "data": lambda row: row.data,
    "model": lambda row: row.model,
    "tag": lambda row: " ".join(row.tags),
    "note": lambda row: row.note,
}
NUMBERS: dict[str, Callable[[RunRow], float | None]] = {
    "best": lambda row: row.best,
    "top1": lambda row: row.best if row.metric == "top1" else None,
    "mean_ap": lambda row: row.best if row.metric == "mean_ap" else None,
    "loss": lambda row: row.loss,
    "images_per_second": lambda row: row.images_per_second,
    "cost": lambda row: row.cost,
    "age": lambda row: None if row.began is None else max(0.0, time.time() - row.began),
    "seconds": lambda row: row.seconds,
    "epochs": lambda row: row.epochs_done,
}
HIGHEST_FIRST = ("best", "top1", "mean_ap", "images_per_second", "epochs")
SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800, "%": 0.01, "": 1}
_TERM = re.compile(r"([\w.]+)(==|!=|>=|<=|=|>|<|~)(.*)", re.DOTALL)
_NUMBER = re.compile(r"([-+]?[\d.]+(?:e[-+]?\d+)?) ?(s|min|h|d|w|%|)")
_ORDERS: Mapping[str, Callable[[float, float], bool]] = {
    "=": lambda a, b: math.isclose(a, b, rel_tol=1e-9),
    "!=": lambda a, b: not math.isclose(a, b, rel_tol=1e-9),
    ">": lambda a, b: a > b,
    "<": lambda a, b: a < b,
    ">=": lambda a, b: a >= b,
    "<=": lambda a, b: a <= b,
}


def parse_where(text: str) -> Callable[[RunRow], bool]:
    """Return what tells whether a run meets all conditions of a text, which spaces stand between.

    A text is compared without regard to case and may hold ``*``; ``~`` asks whether it holds a part. Where a run has
    no such value, only ``!=`` holds. A key may be given by its last part (``lr``); ``and`` between terms is left out.

    Raises:
        InputError: a term that is no condition, an unknown field, or a value of another type.

    >>> row = RunRow(name="a", directory="a", status="finished", model="resnet50", best=0.91, tags=("good",))
    >>> [parse_where(text)(row) for text in ("model=ResNet* and top1 > 90%", "tag=good", "name~b", "cost<1")]
    [True, True, False, False]
    >>> parse_where("acc>0.9")
    Traceback (most recent call last):
        ...
    steadytrain.errors.InputError: unknown field 'acc': name, status, data, model, tag, note, best, top1, mean_ap, \
loss, images_per_second, cost, age, seconds, epochs, or a key of the recipe, such as optim.lr. Did you mean top1?
    """
    conditions = [_condition(term) for term in _terms(text)]
    return lambda row: all(holds(row) for holds in conditions)


def known_values(text: str, rows: Sequence[RunRow]) -> str:
    """Say which values there are of the fields by which a condition finds no run.

    >>> known_values("status=done top1>0.5", [RunRow(name="a", directory="a", status="finished", best=0.25)])
    'status is finished; top1 is 0.25'
    """
    parts: list[str] = []
    for term in _terms(text):
        match = _TERM.fullmatch(term)
        if match is None or any(map(_condition(term), rows)):
            continue
        name = field_of(match[1])
        values = [value for row in rows for value in (row.tags if name == "tag" else [value_of(row, name)])]
        numbers = [value for value in values if isinstance(value, int | float)]
        texts = sorted({str(value) for value in values if value is not None})
        if numbers and len(texts) > 1:
            parts.append(f"{name} is {min(numbers):.6g} to {max(numbers):.6g}")
        else:
            parts.append(f"{name} is {few(texts)}" if texts else f"no run has a {name}")
    return "; ".join(parts)


def _terms(text: str) -> list[str]:
    if not set(text) & set("'\""):
        text = re.sub(r"\s*([=!<>~]+)\s*", r"\1", text)
    try:
        return [term for term in shlex.split(text) if term.lower() not in ("and", "&", "&&")]
    except ValueError as error:
        raise InputError(f"--where cannot be read ({error}): close the quotation marks") from error


def _condition(term: str) -> Callable[[RunRow], bool]:
    match = _TERM.fullmatch(term)
    if match is None:
        raise InputError(
            f"{term!r} in --where is no condition: FIELD=VALUE, with =, !=, >, <, >=, <= or ~ (holds), without spaces,"
            " such as top1>0.9"
        )
    name, order, wanted = match[1], match[2].replace("==", "="), match[3]
    name = field_of(name)
    number = _parsed_number(wanted)
    if name in NUMBERS and (number is None or order == "~"):
        raise InputError(f"{term!r} in --where: {name} is a number; compare it with one by =, !=, >, <, >= or <=")
    if name in TEXTS and order not in ("=", "!=", "~"):
        raise InputError(f"{term!r} in --where: {name} is text; compare it by =, != or ~ (holds)")

    def holds(row: RunRow) -> bool:
        value = value_of(row, name)
        if number is not None and order != "~" and isinstance(value, int | float) and not isinstance(value, bool):
            return _ORDERS[order](value, number)
        if name == "tag":
            is_met = any(_is_like(tag, order, wanted) for tag in row.tags)
        elif value is None and wanted.lower() != "none":
            is_met = False
        else:
            is_met = order in ("=", "!=", "~") and _is_like(str(value), order, wanted)
        return is_met != (order == "!=")

    return holds


def _is_like(value: str, order: str, wanted: str) -> bool:
    value, wanted = value.lower(), wanted.lower()
    return wanted in value if order == "~" else value == wanted or fnmatch.fnmatchcase(value, wanted)


def _parsed_number(text: str) -> float | None:
    match = _NUMBER.fullmatch(text)
    with suppress(ValueError):
        return float(match[1]) * SECONDS[match[2]] if match else None
    return None


OTHER_FIELDS = {
    **dict.fromkeys(("acc", "accuracy", "val_acc", "top-1"), "top1"),
    **dict.fromkeys(("date", "created", "started"), "age"),
    **dict.fromkeys(("speed", "throughput"), "images_per_second"),
    **dict.fromkeys(("time", "duration"), "seconds"),
}
"""Other tools' word -> the field that it may mean."""


def field_of(name: str) -> str:
    """Return the field of a word: itself, or the recipe's key that ends so.

    Raises:
        InputError: no run has such a field; with the list of those there are.

    >>> field_of("top1"), field_of("lr"), field_of("batch-size")
    ('top1', 'optim.lr', 'batch_size')
    """
    if name in TEXTS or name in NUMBERS or name in recipe_settings():
        return name
    keys = [key for key in recipe_settings() if key.rpartition(".")[2] == name.replace("-", "_")]
    if len(keys) == 1:
        return keys[0]
    known, meant = [*TEXTS, *NUMBERS], OTHER_FIELDS.get(name.lower())
    near = f" Did you mean {meant}?" if meant else did_you_mean(name, [*known, *recipe_settings()])
    raise InputError(f"unknown field {name!r}: {', '.join(known)}, or a key of the recipe, such as optim.lr.{near}")


def value_of(row: RunRow, name: str) -> Any:
    """Return a field of a run, or a value of its recipe; None where it has none."""
    if name in TEXTS:
        return TEXTS[name](row) or None
    return NUMBERS[name](row) if name in NUMBERS else row.recipe.get(name)


def sort_rows(rows: Sequence[RunRow], text: str) -> list[RunRow]:
    """Sort runs by a field, the best first: high scores and rates, low costs and ages, names by the alphabet.

    A ``-`` before the field turns that round. Runs without a value come last.

    Raises:
        InputError: an unknown field.
    """
    name = field_of(text.removeprefix("-"))
    known = [row for row in rows if value_of(row, name) is not None]
    values = [value_of(row, name) for row in known]
    are_numbers = all(isinstance(value, int | float) for value in values)

    def key(row: RunRow) -> Any:
        value = value_of(row, name)
        return value if are_numbers else str(value).lower()

    known.sort(key=key, reverse=(name in HIGHEST_FIRST) != text.startswith("-"))
    return [*known, *(row for row in rows if value_of(row, name) is None)]


def differing_settings(rows: Sequence[RunRow]) -> list[str]:
    """Return the keys of the recipe in which runs differ, in the recipe's order."""
    keys = dict.fromkeys(key for row in rows for key in row.recipe)
    return [key for key in keys if len({json.dumps(row.recipe.get(key), sort_keys=True) for row in rows}) > 1]
