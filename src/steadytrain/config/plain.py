"""Frozen dataclasses to plain data and back, with their types checked.

What recipes, cards and run files have in common: a value that does not fit its annotation is refused
with its name, and an unknown key with the nearest known one. JSON's lists become tuples.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from steadytrain.errors import InputError, RecipeError, did_you_mean

T = TypeVar("T")
PLAIN = "plain"
"""Metadata of a field: False keeps it out of plain data, which then has no such key."""

MOST_SHOWN = 120
MOST_WHOLE = 2**63 - 1
"""Whole numbers beyond it are no count of anything, and their products no floats."""
_WORDS = {
    float: "a number",
    int: "a whole number",
    str: "a string",
    bool: "true or false",
    NoneType: "nothing",
    Path: "a path",
    object: "anything",
}


def plain(value: Any) -> Any:
    """Turn dataclasses, structs and mappings into dictionaries and tuples into lists, all the way down."""
    if is_dataclass(value) and not isinstance(value, type):
        return {name: plain(getattr(value, name)) for name in _plain_names(type(value))}
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, tuple | list) else value


def finite(value: Any) -> Any:
    """Replace what is no finite number by None: JSON has none."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shorten(value: object) -> str:
    """Format a value for a message, at a length that fits there; a file's may be of any size and depth."""
    try:
        text = repr(value)
    except (RecursionError, ValueError):  # nested without end, or a number of thousands of digits
        return f"a {type(value).__name__}"
    return text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}..."


def parse_json(text: str | bytes | bytearray) -> Any:
    """Read JSON. Raises ValueError where it is none, or where one of its tables has a key twice."""
    return json.loads(text, object_pairs_hook=table_of)


def table_of(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """Make a table of keys and values. Raises ValueError where a key comes twice."""
    if len(values := dict(pairs)) < len(pairs):
        twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise ValueError(f"the key {shorten(twice)} comes twice")
    return values


def leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted names and values of nested dictionaries.

    >>> dict(leaves({"a": {"b": 1}, "c": [2]}))
    {'a.b': 1, 'c': [2]}
    """
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def to_toml(value: object) -> str:
    """Write a value as TOML, which has no word for nothing: that is left out of tables and lists.

    >>> to_toml({"width": 64, "name": "a", "depth": None}), to_toml([0.5, True]), to_toml(1e-05)
    ('{ width = 64, name = "a" }', '[0.5, true]', '1e-05')
    """
    if isinstance(value, Mapping):
        entries = [f"{_toml_key(key)} = {to_toml(item)}" for key, item in value.items() if item is not None]
        return f"{{ {', '.join(entries)} }}" if entries else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(to_toml(item) for item in value if item is not None)}]"
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def _toml_key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else json.dumps(key)


def build(
    kind: type[T], values: object, where: str = "", *, hint: Callable[[str, Iterable[str]], str] = did_you_mean
) -> T:
    """Build the dataclass ``kind`` from plain data, nested ones included.

    Args:
        kind: a dataclass.
        values: what :func:`plain` gives, or a part of it.
        where: name of the place, for messages: ``optim`` or empty.
        hint: ends the message about an unknown key, from the key and the known ones.

    Raises:
        RecipeError: an unknown key, a missing one, or a value of the wrong type.
    """
    if not isinstance(values, Mapping):
        raise RecipeError(
            f"{where or kind.__name__.lower()} is {shorten(values)}; it must be a table of keys and values"
        )
    hints = hints_of(kind)
    known = fields(kind)  # type: ignore[arg-type]
    prefix = f"{where}." if where else ""
    for name in values:
        if name not in hints:
            raise RecipeError(f"unknown key {shorten(prefix + str(name))}.{hint(str(name)[:MOST_SHOWN], hints)}")
    missing = [f.name for f in known if f.name not in values and f.default is MISSING and f.default_factory is MISSING]
    if missing:
        raise RecipeError(f"{', '.join(prefix + name for name in missing)} must be given")
    arguments = {}
    for name, value in values.items():
        annotation = hints[name]
        if isinstance(annotation, type) and is_dataclass(annotation):
            value = build(annotation, value, prefix + name, hint=hint)
        arguments[name] = value
    return kind(**arguments)


def check_types(part: Any, where: str) -> None:
    """Refuse a dataclass instance whose values do not fit their annotations (for ``__post_init__``).

    A whole number given for a float becomes one, a path a string, a list a tuple, and a number of NumPy or torch one of
    Python, so that what is equal is also written alike.

    Raises:
        RecipeError: names the field, its value and what it must be.
    """
    for name, hint in hints_of(type(part)).items():
        value = getattr(part, name)
        value = os.fspath(value) if isinstance(value, os.PathLike) and str in (hint, *get_args(hint)) else value
        value = fitted(f"{where}.{name}".lstrip("."), value, hint, RecipeError)
        object.__setattr__(part, name, _as_float(value, hint))


def is_plain(hint: Any) -> bool:
    """Return whether an annotation is of numbers, texts, paths and lists of these alone."""
    is_of = get_origin(hint) in (Union, UnionType, tuple, Sequence, Mapping) and all(map(is_plain, get_args(hint)))
    return is_of or get_origin(hint) is Literal or hint is Ellipsis or hint in _WORDS


def _plainer(value: Any) -> Any:
    """Return what a value is without NumPy, torch, lists and other paths' types."""
    value = value.tolist() if hasattr(value, "tolist") else value
    value = os.fspath(value) if isinstance(value, os.PathLike) else value
    is_list = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    return tuple(map(_plainer, sorted(value, key=str) if isinstance(value, Set) else value)) if is_list else value


def fitted(name: str, value: object, hint: Any, error: type[InputError], remedy: str = "") -> Any:
    """Return a value as its annotation has it. Raises ``error`` with name and ``remedy`` where it does not fit."""
    plainer = value if fits(value, hint) else _plainer(value)
    if fits(plainer, hint):
        return plainer
    choices = [a for a in get_args(hint) if isinstance(a, str)]
    near = did_you_mean(value, choices) if isinstance(value, str) else ""
    near = f".{near}" if near else ""
    if isinstance(value, int) and abs(value) > MOST_WHOLE:
        near = f", and a number of at most {MOST_WHOLE:,}"
    if callable(value) and (word := getattr(value, "__name__", "")).isidentifier():
        near = f": give a name, such as {word.lower()!r} or 'module:{word}'"
    raise error(f"{name} is {shorten(value)}; it must be {describe_type(hint)}{remedy or near}")


def fits(value: object, hint: Any) -> bool:
    """Return whether a value fits an annotation: an int fits float, a bool neither, NaN and infinity nothing."""
    return _fitting(hint)(value)


@cache
def _fitting(hint: Any) -> Callable[[object], bool]:
    """Return what tells whether a value fits a class, a union, a literal, or a tuple or mapping of such.

    msgspec would take numbers that are not finite, and refuses unions with two kinds of texts or lists.
    """
    if hint in _LEAVES:
        return _LEAVES[hint]
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return lambda value: isinstance(value, Hashable) and value in args
    inner = [_fitting(arg) for arg in args if arg is not Ellipsis]
    if origin in (Union, UnionType):
        return lambda value: any(check(value) for check in inner)
    if origin is tuple and args[-1] is not Ellipsis:
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(inner)
            and all(check(item) for check, item in zip(inner, value, strict=True))
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        of_key, of_value = inner
        return lambda value: (
            isinstance(value, Mapping) and all(map(of_key, value)) and all(map(of_value, value.values()))
        )
    if isinstance(origin, type) and issubclass(origin, Sequence):
        return lambda value: isinstance(value, tuple) and all(map(inner[0], value))
    return lambda value: isinstance(value, origin or hint)


_LEAVES: Mapping[Any, Callable[[object], bool]] = {
    float: lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    ),
    int: lambda value: isinstance(value, int) and not isinstance(value, bool) and -MOST_WHOLE <= value <= MOST_WHOLE,
    Any: lambda value: True,
}


def describe_type(hint: Any) -> str:
    """Format an annotation for a user.

    >>> describe_type(int | None), describe_type(tuple[float, float])
    ('a whole number or nothing', 'a list of 2 numbers')
    """
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return " or ".join(describe_type(option) for option in args)
    if origin is Literal:
        return " or ".join(repr(option) for option in args)
    if origin in (tuple, Sequence):
        number = "" if {origin, args[-1]} & {Sequence, Ellipsis} else f"{len(args)} "
        return f"a list of {number}{describe_type(args[0]).removeprefix('a ')}s"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a table" if args[1] in (object, Any) else f"a table whose values are {describe_type(args[1])}"
    return _WORDS.get(hint, getattr(hint, "__name__", str(hint)))


def _as_float(value: Any, hint: Any) -> Any:
    hints = {hint, *get_args(hint)}
    if isinstance(value, tuple):
        inner = next((h for h in hints if get_origin(h) is tuple), None)
        return tuple(_as_float(v, get_args(inner)[0]) for v in value) if inner else value
    if float in hints and int not in hints and isinstance(value, int | float):
        return float(value) + 0.0  # -0.0 becomes 0.0
    return value


def _plain_names(kind: type) -> list[str]:
    return [field.name for field in fields(kind) if field.metadata.get(PLAIN, True)]


def hints_of(kind: Any) -> Mapping[str, Any]:
    """Return the annotations of a dataclass's fields that are plain data."""
    return _hints(kind)


@cache  # annotations are strings: their evaluation takes more than all the checks
def _hints(kind: type) -> Mapping[str, Any]:
    names = _plain_names(kind)
    return {name: hint for name, hint in get_type_hints(kind).items() if name in names}
