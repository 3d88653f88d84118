"""The runs of a folder, a row each: found, summarised, chosen and sorted.

Only regular files of a run's own folder are read, no links, so a stranger's folder cannot lead elsewhere.
"""

from __future__ import annotations

import fnmatch
import json
import math
import operator
import re
import stat
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from steadytrain.config.figures import figure_words
from steadytrain.config.plain import finite, leaves
from steadytrain.config.recipe import recipe_settings
from steadytrain.errors import InputError, RunError, SteadyError, did_you_mean, first_line
from steadytrain.files import MOST_TEXT_BYTES, read_text, replace_file
from steadytrain.format import RowTable, clean, count, duration, epoch, money, percent, rate
from steadytrain.intervals import Interval
from steadytrain.monitor.history_reader import read_any
from steadytrain.reports.charts import Trace, score_trace
from steadytrain.reports.files import open_run, run_folders
from steadytrain.reports.status import other_host, signs
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
    finish. ``best``: top-1 of the best weights, or mAP where images may have several labels, and its 95 % interval;
    ``chosen``: the figure that chose them. ``curve``: of its evaluations, for a chart. ``host``:
    another machine, of the newest attempt; ``process``: its holder.
    """

    name: str
    directory: str
    status: str
    why: str = ""
    data: str = ""
    model: str = ""
    metric: Literal["top1", "mean_ap"] = "top1"
    best: float | None = None
    chosen: str = ""
    low: float | None = None
    high: float | None = None
    macro_recall: float | None = None
    test: float | None = None
    test_low: float | None = None
    test_high: float | None = None
    class_ratio: float | None = None
    loss: float | None = None
    images_per_second: float | None = None
    cost: float | None = None
    currency: str = ""
    seconds: float | None = None
    epochs_done: float | None = None
    epochs: float | None = None
    began: float | None = None
    last: float | None = None
    host: str | None = None
    process: int | None = None
    tags: tuple[str, ...] = ()
    note: str = ""
    recipe: dict[str, Any] = field(default_factory=dict)
    curve: Trace | None = field(default=None, repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it, without its curve."""
        return {name: value for name, value in vars(self).items() if name != "curve"}


@dataclass(frozen=True)
class RunNotes:
    """Tags and a note that a user wrote on a run."""

    tags: tuple[str, ...] = ()
    note: str = ""


def read_notes(folder: Path) -> RunNotes:
    """Read a run's tags and note; none where there are none, or none that can be read."""
    with suppress(RunError, OSError, ValueError, RecursionError, msgspec.MsgspecError):
        if _size(folder / NOTES):
            return msgspec.json.decode(read_text(folder / NOTES), type=RunNotes)
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
    _size(folder / NOTES)
    for tag in add:
        if not tag or re.search(r"[\s,]", tag):
            raise InputError(f"--tag is {tag!r}; a tag is one word without commas, such as baseline")
    before = read_notes(folder)
    tags = dict.fromkeys((*before.tags, *add))
    after = RunNotes(tuple(tag for tag in tags if tag not in remove), before.note if note is None else note)
    if after != before:
        replace_file(folder / NOTES, json.dumps(asdict(after), indent=1, ensure_ascii=False) + "\n")


def runs(folder: str | Path = "runs") -> RowTable:
    """Return what ``steady runs`` lists, the newest first: a dictionary for each run, as of its ``--json``.

    Args:
        folder: that holds runs, or folders of them.

    Raises:
        RunError: there is no such folder, or no run in it.
    """
    return RowTable(row.to_dict() for row in list_runs(folder))


def list_runs(folder: str | Path) -> list[RunRow]:
    """Return a row for each run in a folder, the newest first.

    Raises:
        RunError: there is no such folder, or no run in it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        open_run(folder)  # which says what is wrong with it
    paths = run_folders(folder)
    rows = [_row(path, str(path.relative_to(folder)) if path != folder else path.resolve().name) for path in paths]
    if not rows:
        others = f"; logs of other programs: steady report {folder}" if any(folder.iterdir()) else ""
        raise RunError(f"{folder} is no run (no recipe.json) and holds none yet{others}")
    return sorted(rows, key=lambda row: (-(row.began or 0.0), row.name))


def _row(path: Path, name: str) -> RunRow:
    """Return a run's row."""
    try:
        _refuse_odd_files(path)
        return replace(_summarised(path, name), **vars(read_notes(path)))
    except ODD_LOG as error:
        return RunRow(name=name, directory=str(path), status=DAMAGED, why=first_line(error))


def _size(path: Path) -> int | None:
    """Return the size of a regular file, None where there is none; RunError for a link or anything else."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(status.st_mode):
        kind = "link" if stat.S_ISLNK(status.st_mode) else "no file"
        raise RunError(f"{path.name} is {'a ' * (kind == 'link')}{kind}: it is not followed")
    return status.st_size


def _refuse_odd_files(folder: Path) -> None:
    """Raise RunError where a file of a run is a link, no file, or a recipe of a size that none has."""
    for path in (folder / "lock", folder / "events.jsonl", *folder.glob("events-*.jsonl")):
        _size(path)
    if (num_bytes := _size(folder / "recipe.json") or 0) > MOST_TEXT_BYTES:
        raise RunError(f"recipe.json has {num_bytes:,} bytes; a recipe has at most {MOST_TEXT_BYTES:,}")


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
    best, course = summary.quality.best, summary.course
    test, cost = summary.quality.test, summary.cost
    interval, of_test = best.interval if best else None, test.interval if test else None
    damaged = f"{count(history.unreadable, 'damaged line')} of events.jsonl left out" if history.unreadable else ""
    return replace(
        row,
        status=course.status,
        why="; ".join(filter(None, (course.why, damaged))),
        model=summary.setup.model,
        metric="mean_ap" if summary.quality.is_multi_label else "top1",
        best=finite(best.value) if best else None,
        chosen=figure_words(best.figure, best.figure_value, best.mean_ap) if best else "",
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        macro_recall=best.macro_recall if best else None,
        test=finite(test.value) if test else None,
        test_low=of_test.low if of_test else None,
        test_high=of_test.high if of_test else None,
        class_ratio=summary.setup.class_ratio,
        loss=finite(best.loss) if best else None,
        images_per_second=finite(summary.speed.images_per_second),
        cost=finite(cost.so_far) if cost else None,
        currency=cost.currency if cost else "",
        seconds=finite(summary.speed.seconds),
        epochs_done=finite(summary.progress.epoch),
        epochs=finite(summary.progress.epochs),
        began=finite(course.began) or began,
        last=history.last_time,
        host=other_host(history),
        process=run.holder(),
        curve=score_trace(history),
    )


def row_cells(row: RunRow, now: float) -> dict[str, str]:
    """Format a run for a table, by the heads of its columns; empty where there is nothing to say.

    >>> words = row_cells(RunRow(name="a", directory="a", status="finished", best=0.9231, low=0.91, high=0.93), 0.0)
    >>> words["best"], words["cost"]
    ('92.3 % (91.0 to 93.0)', '')
    """
    metric = "mAP " if row.metric == "mean_ap" else ""
    remark = " ".join([*(f"#{tag}" for tag in row.tags), row.note]).strip()
    remark = remark or ("" if row.status == "running" else row.why)
    words = {
        "run": row.name,
        "status": row.status,
        "data": row.data,
        "model": row.model,
        "epochs": f"{epoch(row.epochs_done or 0)} of {epoch(row.epochs)}" if row.epochs else "",
        "best": " ".join(filter(None, [_score_words(metric, row.best, row.low, row.high), row.chosen])),
        "macro recall": "" if row.macro_recall is None or not row.class_ratio else percent(row.macro_recall, 1),
        "test": _score_words(metric, row.test, row.test_low, row.test_high),
        "images/s": "" if row.images_per_second is None else rate(row.images_per_second),
        "cost": "" if row.cost is None else f"{money(row.cost)} {row.currency}",
        "age": "" if row.began is None else duration(max(0, round(now - row.began))),
        "note": textwrap.shorten(remark, NOTE_COLUMNS, placeholder=" ..."),
    }
    words |= {"epochs": "probe"} if row.epochs == 0 else {}
    return {head: clean(text) for head, text in words.items()}


def _score_words(metric: str, value: float | None, low: float | None, high: float | None) -> str:
    if value is None:
        return ""
    return f"{metric}{percent(value, 1)}" + ("" if low is None or high is None else f" ({Interval(low, high).words})")


# Choosing and sorting ------------------------------------------------------------------------------------------------

TEXTS = ("name", "status", "data", "model", "tag", "note")
SCORES = ("best", "top1", "mean_ap", "macro_recall", "test")
NUMBERS = (*SCORES, "loss", "images_per_second", "cost", "age", "seconds", "epochs")
HIGHEST_FIRST = (*SCORES, "images_per_second", "epochs")
UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800, "%": 0.01, "": 1}
_TERM = re.compile(
    r"""\s*(?:and\s+|&&?\s*)?([\w.-]+)\s*(==|!=|>=|<=|=|>|<)\s*("[^"]*"|'[^']*'|[^\s'"]*)(?=\s|$)""", re.IGNORECASE
)
_QUOTED = re.compile(r"""\s*(["'])(.*?)\1(?=\s|$)""")
_NUMBER = re.compile(r"([-+]?[\d.]+(?:e[-+]?\d+)?)(s|min|h|d|w|%|)")
_ORDERS: Mapping[str, Callable[[float, float], bool]] = {
    "=": lambda a, b: math.isclose(a, b, rel_tol=1e-9),
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
}


def parse_where(text: str) -> Callable[[RunRow], bool]:
    """Return what tells whether a run meets all conditions of a text: each compares a field with a value.

    A text is compared without regard to case and may hold ``*``. Where a run has no such value, only ``!=`` holds. A
    key may be given by its last part (``lr``).

    Raises:
        InputError: a term that is no condition, an unknown field, or a value of another type.

    >>> row = RunRow(name="a", directory="a", status="finished", model="resnet50", best=0.91, tags=("good",))
    >>> [parse_where(text)(row) for text in ("model=ResNet* and top1 > 90%", "'tag=good' name!=", "name=b*", "cost<1")]
    [True, True, False, False]
    >>> parse_where("top2>0.9")
    Traceback (most recent call last):
        ...
    steadytrain.errors.InputError: unknown field 'top2': name, status, data, model, tag, note, best, top1, mean_ap, \
macro_recall, test, loss, images_per_second, cost, age, seconds, epochs, or a key of the recipe, such as optim.lr. Did \
you mean top1?
    """
    conditions, at = list[Callable[[RunRow], bool]](), 0
    while text[at:].strip():
        if quoted := _QUOTED.match(text, at):
            conditions.append(parse_where(quoted[2]))
            at = quoted.end()
            continue
        match = _TERM.match(text, at)
        if match is None:
            raise InputError(
                f"{text[at:].strip()!r} in --where is no condition: FIELD=VALUE, with =, !=, >, <, >= or <=, such as"
                " top1>0.9"
            )
        conditions.append(_condition(match[1], match[2].replace("==", "="), match[3].strip("'\"")))
        at = match.end()
    return lambda row: all(holds(row) for holds in conditions)


def _condition(name: str, order: str, wanted: str) -> Callable[[RunRow], bool]:
    name, number, wanted = field_of(name), _parsed_number(wanted), wanted.lower()
    if name in NUMBERS and number is None:
        raise InputError(f"{wanted!r} in --where: {name} is a number; compare it with one by =, !=, >, <, >= or <=")
    if name in TEXTS and order not in ("=", "!="):
        raise InputError(f"{order!r} in --where: {name} is text; compare it by = or !=, a * in it stands for any text")
    is_negated, order = order == "!=", order.replace("!=", "=")

    def is_met(value: Any) -> bool:
        if number is not None and isinstance(value, int | float) and not isinstance(value, bool):
            return _ORDERS[order](value, number)
        text = str(value).lower()
        return order == "=" and (text == wanted or (value is not None and fnmatch.fnmatchcase(text, wanted)))

    return lambda row: is_negated != any(map(is_met, row.tags if name == "tag" else [value_of(row, name)]))


def _parsed_number(text: str) -> float | None:
    match = _NUMBER.fullmatch(text)
    with suppress(ValueError):
        return float(match[1]) * UNITS[match[2]] if match else None
    return None


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
    known = [*TEXTS, *NUMBERS]
    near = did_you_mean(name, [*known, *recipe_settings()])
    raise InputError(f"unknown field {name!r}: {', '.join(known)}, or a key of the recipe, such as optim.lr.{near}")


def value_of(row: RunRow, name: str) -> Any:
    """Return a field of a run, or a value of its recipe; None where it has none."""
    match name:
        case "tag":
            return " ".join(row.tags) or None
        case "top1" | "mean_ap":
            return row.best if row.metric == name else None
        case "age":
            return None if row.began is None else max(0.0, time.time() - row.began)
        case "epochs":
            return row.epochs_done
    value = getattr(row, name) if name in (*TEXTS, *NUMBERS) else row.recipe.get(name)
    return None if value == "" else value


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
