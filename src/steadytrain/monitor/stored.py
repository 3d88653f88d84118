"""Histories as plain data, to be stored as JSON, and back: values are checked by their annotations.

Fields of events are not: whoever reads them knows by a digest that they are those which were stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from steadytrain.events import KINDS, Event, Unknown
from steadytrain.monitor.history import MAX_RECENT
from steadytrain.monitor.samples import STORED

T = TypeVar("T")
Unpack = Callable[[Any], Any]

_KINDS: Mapping[str, type[Event]] = {**KINDS, "Unknown": Unknown}
_NAMES = {kind: tuple(f.name for f in fields(kind)) for kind in _KINDS.values()}
_LEAVES: Mapping[Any, frozenset[type]] = {
    float: frozenset({float, int}),
    float | None: frozenset({float, int, NoneType}),
    int: frozenset({int}),
    str: frozenset({str}),
    bool: frozenset({bool}),
}


def pack(value: Any) -> Any:
    """Turn a history, and all that is in it, into lists, texts and numbers."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Event):
        return [type(value).__name__, *(getattr(value, name) for name in _NAMES[type(value)])]
    if isinstance(value, type):
        return value.__name__
    if is_dataclass(value):
        return [pack(getattr(value, name)) for name in _stored(type(value))]
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: pack(item) for key, item in value.items()}
        return [[pack(key), pack(item)] for key, item in value.items()]
    return [pack(item) for item in value]


def unpack(kind: type[T], values: Any) -> T:
    """Return what :func:`pack` was given; what is not stored has its default, or is missing.

    Raises:
        ValueError, TypeError, LookupError: it is something else.
    """
    return cast("T", _unpacker(kind)(values))  # type: ignore[arg-type]  # a class can be hashed


@cache
def _unpacker(hint: Any) -> Unpack:
    origin, args = get_origin(hint), get_args(hint)
    kind = origin or hint
    if hint is Any:
        return lambda value: value
    if hint in _LEAVES:
        return _leaf(_LEAVES[hint])
    if kind in (Union, UnionType):
        return _of_choice(tuple(arg for arg in args if arg is not NoneType), NoneType in args)
    if isinstance(hint, TypeVar):
        return _event_of(hint.__constraints__)
    if kind is type:
        return lambda name: _KINDS[name]
    if issubclass(kind, Event):
        return _event_of((kind,))
    if is_dataclass(kind):
        return _object_of(kind)
    if kind is tuple and args[-1] is not Ellipsis:
        inner = [_unpacker(arg) for arg in args]
        return lambda items: tuple(unpacked(item) for unpacked, item in zip(inner, items, strict=True))
    if issubclass(kind, Mapping):
        return _mapping_of(*args)
    of_all = _all_of(args[0])
    if kind is deque:
        return lambda items: deque(of_all(items), maxlen=MAX_RECENT)
    return (lambda items: tuple(of_all(items))) if kind is tuple else (lambda items: list(of_all(items)))


def _leaf(kinds: Collection[type]) -> Unpack:
    def unpacked(value: Any) -> Any:
        if type(value) not in kinds:
            raise TypeError(value)
        return value

    return unpacked


def _all_of(hint: Any) -> Callable[[Collection[Any]], Iterable[Any]]:
    """Unpack items of one type; numbers and texts are checked all at once."""
    of_item, kinds = _unpacker(hint), _LEAVES.get(hint)

    def unpacked(items: Collection[Any]) -> Iterable[Any]:
        if kinds is None:
            return map(of_item, items)
        if not kinds.issuperset(map(type, items)):
            raise TypeError(items)
        return items

    return unpacked


def _mapping_of(key: Any, value: Any) -> Unpack:
    """Unpack an object of JSON where keys are texts, else pairs."""
    of_key, of_value, of_all = _unpacker(key), _unpacker(value), _all_of(value)

    def unpacked(items: Any) -> Any:
        if type(items) is not dict:
            raise TypeError(items)
        return dict(zip(items, of_all(items.values()), strict=True))

    return unpacked if key is str else lambda pairs: {of_key(name): of_value(item) for name, item in pairs}


def _of_choice(kinds: Sequence[Any], may_be_none: bool) -> Unpack:
    """Unpack an event of one of several kinds, or a value of one kind, or None."""
    is_event = all(isinstance(kind, type) and issubclass(kind, Event) for kind in kinds)
    of_value = _event_of(tuple(kinds)) if is_event else _unpacker(*kinds)
    return (lambda value: None if value is None else of_value(value)) if may_be_none else of_value


def _event_of(kinds: tuple[type, ...]) -> Unpack:
    known = {name: (kind, ("", *_NAMES[kind])) for name, kind in _KINDS.items() if issubclass(kind, kinds)}

    def unpacked(values: Any) -> Event:
        kind, names = known[values[0]]
        event = object.__new__(kind)
        state = dict(zip(names, values, strict=True))
        del state[""]
        object.__setattr__(event, "__dict__", state)
        return event

    return unpacked


def _stored(kind: Any) -> list[str]:
    return [f.name for f in fields(kind) if f.metadata.get(STORED, True)]


def _object_of(kind: Any) -> Unpack:
    names, hints, inner = _stored(kind), get_type_hints(kind), list[Unpack]()
    others = {f.name: f.default_factory for f in fields(kind) if f.name not in names and f.default_factory != MISSING}

    def unpacked(values: Any) -> Any:
        if not inner:  # only now: an object may hold others of its kind
            inner.extend(_unpacker(hints[name]) for name in names)
        made = object.__new__(kind)
        items = zip(names, inner, values, strict=True)
        state = {name: of_item(value) for name, of_item, value in items} | {name: new() for name, new in others.items()}
        getattr(made, "__setstate__", vars(made).update)(state)
        return made

    return unpacked
