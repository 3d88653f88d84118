"""Settings in logs, by the recipe's keys, and numbers as logs write them."""

from __future__ import annotations

import ast
import json
import math
import re
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any

from steadytrain.config.recipe import synonym
from steadytrain.interop.logs.run import NAN, LogRun

KEYS = {
    **dict.fromkeys(("network", "model", "arch"), "model.name"),
    **dict.fromkeys(("num_epochs", "num_epoch", "epochs", "max_epochs"), "budget.epochs"),
    **dict.fromkeys(("batch_size", "batch-size"), "batch_size"),
    "lr": "optim.lr",
    "weight_decay": "optim.weight_decay",
    **dict.fromkeys(("data_train", "train_dir", "data_path", "data_dir", "data"), "data.train"),
    **dict.fromkeys(("data_val", "val_dir"), "data.val"),
    "seed": "seed",
}
"""Words of other trainers for values of a recipe, besides those that the command line takes for flags."""
LARGEST = 1e15
MAX_SETTINGS = 300
STAMP = re.compile(r"(\d{4})-(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,9}))?")


def parse_json(text: str) -> Any:
    """Parse a JSON document; what is none is the text itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def number(text: str) -> float:
    """Parse a number of a log; NaN for anything else, and for what is not finite.

    >>> number("1e-05"), number("0.5,"), number("nan"), number("inf"), number("abc")
    (1e-05, 0.5, nan, nan, nan)
    """
    try:
        value = float(text.rstrip(",;%"))
    except ValueError:
        return NAN
    return value if abs(value) <= LARGEST else NAN


def plain_number(value: object) -> float:
    """Return a number of a JSON document, also one that is a text; NaN for anything else.

    >>> plain_number(2), plain_number("0.5"), plain_number(True), plain_number(None)
    (2.0, 0.5, nan, nan)
    """
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return NAN
    return number(value) if isinstance(value, str) else float(value) if abs(value) <= LARGEST else NAN


def first_number(values: object, names: tuple[str, ...]) -> float:
    """Return the first of some numbers that a JSON object has; NaN where there is none."""
    found = (plain_number(values.get(name)) for name in names) if isinstance(values, dict) else ()
    return next((value for value in found if math.isfinite(value)), NAN)


def fraction(value: float, *, percents: bool = False) -> float:
    """Return an accuracy as a fraction; NaN for what is none.

    >>> fraction(76.5, percents=True), fraction(0.5), fraction(3.0)
    (0.765, 0.5, nan)
    """
    value = value / 100 if percents else value
    return value if 0 <= value <= 1 + 1e-9 else NAN


def whole(value: object, limit: int = 2**40) -> int | None:
    """Return a whole number from 1 to a limit; None for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= limit else None


def add_setting(run: LogRun, name: str, value: object) -> None:
    """Add a setting that a log names, by the recipe's key if it means exactly the same."""
    if not isinstance(value, str | int | float | bool) or len(run.settings) >= MAX_SETTINGS:
        return
    if isinstance(value, float) and not math.isfinite(value):
        return
    key = KEYS.get(name) or synonym(name) or name
    run.settings.setdefault(key, value[:300] if isinstance(value, str) else value)
    if key == "budget.epochs":
        run.num_epochs = whole(value, 100_000)


def add_namespace(run: LogRun, line: str) -> bool:
    """Add the arguments of a program as argparse prints them; return False if a line has none.

    >>> run = LogRun("MXNet")
    >>> add_namespace(run, "start with arguments Namespace(batch_size=4, network='resnext', lr_step_epochs='200,250')")
    True
    >>> run.settings
    {'batch_size': 4, 'model.name': 'resnext', 'lr_step_epochs': '200,250'}
    """
    _, start, text = line.partition("Namespace(")
    text, end, _ = text.rpartition(")")
    if not start or not end:
        return False
    try:
        call = ast.parse(f"f({text})", mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    for keyword in call.keywords if isinstance(call, ast.Call) else ():
        if keyword.arg is None:
            continue
        try:
            value = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
        add_setting(run, keyword.arg, value if not isinstance(value, list | tuple) else str(value))
    return True


def stamp(line: str, end: int = 64) -> float:
    """Return the moment at the beginning of a line, seconds since 1970 if its clock was UTC; NaN without one.

    >>> stamp("2017-10-28 08:45:29,624 Epoch[0]") - stamp("2017-10-28T08:45:29")
    0.624000072479248
    """
    match = STAMP.search(line, 0, end)
    if match is None:
        return NAN
    day = _day(match[1], match[2], match[3])
    seconds = int(match[4]) * 3600 + int(match[5]) * 60 + int(match[6])
    return day + seconds + (float(f"0.{match[7]}") if match[7] else 0.0)


@lru_cache(maxsize=64)
def _day(year: str, month: str, day: str) -> float:
    try:
        return max(0.0, datetime(int(year), int(month), int(day), tzinfo=UTC).timestamp())
    except ValueError:
        return NAN


def clock_seconds(text: str) -> float:
    """Return the seconds of a duration as ``datetime.timedelta`` is printed; NaN for anything else.

    >>> clock_seconds("0:12:44"), clock_seconds("1 day, 2:03:04"), clock_seconds("x")
    (764.0, 93784.0, nan)
    """
    match = re.match(r"(?:(\d{1,5}) days?, )?(\d{1,5}):(\d\d):(\d\d)(?:\.\d+)?(?!\d)", text.strip())
    if match is None:
        return NAN
    return float(int(match[1] or 0) * 86400 + int(match[2]) * 3600 + int(match[3]) * 60 + int(match[4]))
