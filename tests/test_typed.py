"""Plain data to frozen dataclasses: what fits, what is refused, and in which words."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.config.plain import MOST_WHOLE, build, check_types, describe_type, fits, leaves, plain
from steadytrain.errors import RecipeError


@dataclass(frozen=True, kw_only=True)
class Inner:
    rate: float = 0.5
    sizes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "inner")


@dataclass(frozen=True, kw_only=True)
class Outer:
    name: str
    inner: Inner = field(default_factory=Inner)
    pair: tuple[float, float] | None = None
    mode: Literal["fast", "exact"] = "fast"
    extra: Mapping[str, str | int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_types(self, "")


numbers = st.floats(allow_nan=False, allow_infinity=False)
whole = st.integers(-MOST_WHOLE, MOST_WHOLE)
inners = st.builds(Inner, rate=numbers | st.integers(-100, 100), sizes=st.lists(whole).map(tuple))
outers = st.builds(
    Outer,
    name=st.text(),
    inner=inners,
    pair=st.none() | st.tuples(numbers, numbers),
    mode=st.sampled_from(["fast", "exact"]),
    extra=st.dictionaries(st.text(), st.text() | whole),
)


@given(outers)
def test_plain_data_builds_the_same_again(outer: Outer) -> None:
    assert build(Outer, plain(outer)) == outer


@given(outers, outers)
def test_what_is_equal_is_written_alike(outer: Outer, other: Outer) -> None:
    assert (outer == other) == (json.dumps(plain(outer), sort_keys=True) == json.dumps(plain(other), sort_keys=True))


@given(outers)
def test_leaves_name_every_value_once(outer: Outer) -> None:
    values = dict(leaves(plain(outer)))
    assert {"name", "inner.rate", "inner.sizes", "pair", "mode"} <= values.keys()
    assert values["inner.rate"] == outer.inner.rate


def test_a_whole_number_is_kept_as_a_float() -> None:
    outer = Outer(name="a", inner=Inner(rate=1), pair=(2, -0.0))
    assert repr(outer.inner.rate) == "1.0"
    assert repr(outer.pair) == "(2.0, 0.0)"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "name must be given"),
        ([1], "outer is [1]; it must be a table of keys and values"),
        ({"name": "a", "inner": 3}, "inner is 3; it must be a table of keys and values"),
        ({"name": "a", "inner": {"raet": 1}}, "unknown key 'inner.raet'. Did you mean rate?"),
        ({"name": "a", "qqq": 1}, "unknown key 'qqq'."),
        ({"name": 3}, "name is 3; it must be a string"),
        ({"name": "a", "inner": {"rate": "fast"}}, "inner.rate is 'fast'; it must be a number"),
        ({"name": "a", "inner": {"rate": True}}, "inner.rate is True; it must be a number"),
        ({"name": "a", "inner": {"sizes": [1, 2.5]}}, "inner.sizes is [1, 2.5]; it must be a list of whole numbers"),
        ({"name": "a", "pair": [1.0]}, "pair is [1.0]; it must be a list of 2 numbers or nothing"),
        ({"name": "a", "mode": "exat"}, "mode is 'exat'; it must be 'fast' or 'exact'. Did you mean exact?"),
        ({"name": "a", "extra": {"b": [1]}}, "extra is {'b': [1]}; it must be a table whose values are"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(RecipeError) as caught:
        build(Outer, value)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 10**400, True, "1", None])
def test_these_are_no_numbers(value: object) -> None:
    assert not fits(value, float)


@given(st.integers() | st.floats() | st.text() | st.booleans() | st.none() | st.lists(st.integers()))
def test_a_union_takes_what_either_takes(value: object) -> None:
    assert fits(value, int | str | None) == (fits(value, int) or fits(value, str) or value is None)


def test_types_are_said_in_words() -> None:
    assert describe_type(tuple[float, float]) == "a list of 2 numbers"
    assert describe_type(Literal["a", "b"] | None) == "'a' or 'b' or nothing"
    assert describe_type(bool) == "true or false"
