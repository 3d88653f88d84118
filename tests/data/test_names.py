"""Names in one run of bytes are the texts that went in."""

from __future__ import annotations

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.data.names import Names

# Texts as file systems give them: bytes that are no UTF-8 are escaped.
NAMES = st.lists(st.one_of(st.text(st.characters(exclude_categories=["Cs"])), st.binary().map(os.fsdecode)))


@given(NAMES)
def test_what_goes_in_comes_out(texts: list[str]) -> None:
    names = Names(texts)
    assert (len(names), list(names)) == (len(texts), texts)
    assert names == texts
    assert [names[number] for number in range(-len(texts), len(texts))] == texts * 2
    assert names[1:-1] == texts[1:-1]


@given(NAMES.filter(bool), st.data())
def test_some_of_them_in_another_order(texts: list[str], data: st.DataObject) -> None:
    rows = data.draw(st.lists(st.integers(0, len(texts) - 1)))
    taken = Names(texts).take(np.array(rows, np.int64))
    taken.append("last")
    assert taken == [*(texts[row] for row in rows), "last"]


def test_a_hundred_thousand_at_a_time() -> None:
    names = Names(str(number) for number in range(200_000))
    taken = names.take(np.arange(199_999, -1, -2))
    assert (len(taken), taken[0], taken[-1], taken[70_000]) == (100_000, "199999", "1", str(199_999 - 140_000))


def test_the_same_bytes_cut_elsewhere_are_others() -> None:
    one, two = Names(["ab", "c"]), Names(["a", "bc"])
    assert one != two
    assert b"".join(one.parts()) != b"".join(two.parts())


@pytest.mark.parametrize("number", [2, -3])
def test_there_are_no_more_than_there_are(number: int) -> None:
    with pytest.raises(IndexError, match=f"name {number if number > 0 else number + 2} of 2"):
        Names(["a", "b"])[number]
