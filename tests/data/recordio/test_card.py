"""The card, as JSON and as what it refuses."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadytrain.data.recordio.card import Card, Rejected, card_of, read_classes, refuse_other_classes
from steadytrain.errors import DataError

CARD = Card(
    classes=("été", "dog"),
    counts=(2, 1),
    num_images=3,
    height=(30, 32, 40),
    width=(30, 32, 48),
    mean=(0.5, 0.25, 0.1),
    std=(0.2, 0.2, 0.2),
    encodings={"png": 3},
    settings={"shorter_side": None, "quality": 95},
    rejected=(Rejected("dog/a.jpg", "cut short"),),
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.text(max_size=9), st.integers(0, 2**40)), max_size=5),
    st.lists(st.tuples(st.text(max_size=9), st.text(max_size=9)), max_size=3),
)
def test_every_card_comes_back_from_json(classes: list[tuple[str, int]], rejected: list[tuple[str, str]]) -> None:
    card = Card(
        classes=tuple(name for name, _ in classes),
        counts=tuple(count for _, count in classes),
        num_images=sum(count for _, count in classes),
        rejected=tuple(Rejected(*file) for file in rejected),
    )
    assert Card.from_json(card.to_json()) == card


def test_what_a_program_finds_in_it() -> None:
    document = json.loads(CARD.to_json())
    assert document["kind"] == "steadytrain.card"
    assert document["classes"] == ["été", "dog"]
    assert document["rejected"] == [{"name": "dog/a.jpg", "reason": "cut short"}]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"counts": [1]}, "2 classes and 1 counts"),
        ({"counts": [4, -1]}, "do not add up to its 3 images"),
        ({"counts": [2, 2]}, "do not add up to its 3 images"),
        ({"counts": "many"}, "card.counts is 'many'"),
        ({"chanels": 3}, "'chanels'. Did you mean channels"),
        ({"channels": 2}, "2 channels"),
        ({"version": 2}, "a card of version 2"),
        ({"rejected": [{"nom": 1}]}, "damaged card"),
    ],
)
def test_a_wrong_card_is_refused_with_what_is_wrong(change: dict[str, object], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Card.from_json(json.dumps({**_edited(CARD), **change}))


def _edited(card: Card) -> dict[str, object]:
    """What somebody who edits a card begins with."""
    members: dict[str, object] = json.loads(card.to_json())
    del members["checksum"]
    return members


def test_no_bit_of_a_card_can_change_unseen(tmp_path: Path) -> None:
    card = replace(CARD, bytes=1)
    text = card.to_json().encode()
    (tmp_path / "a.rec").write_bytes(b"1")
    for at, bit in itertools.product(range(0, len(text), 7), (0, 3, 7)):
        damaged = bytearray(text)
        damaged[at] ^= 1 << bit
        (tmp_path / "a.json").write_bytes(damaged)
        try:
            assert card_of(tmp_path / "a.rec") == card, "white space"
        except DataError as error:
            assert "card" in str(error)


def test_a_card_that_was_edited_is_read_without_its_checksum() -> None:
    edited = json.dumps({**_edited(CARD), "classes": ["cat", "dog"]})
    assert Card.from_json(edited).classes == ("cat", "dog")
    with pytest.raises(DataError, match="its checksum is another"):
        Card.from_json(CARD.to_json().replace("dog", "fog"))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "[]", '{"labels": [1]}', '{"kind": "other"}'])
def test_json_of_something_else_is_no_card(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.rec").write_bytes(b"")
    (tmp_path / "a.json").write_text(text)
    assert card_of(tmp_path / "a.rec") is None
    with pytest.raises(DataError, match="this JSON file is not a card"):
        read_classes(tmp_path / "a.json")


def test_a_card_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.rec").write_bytes(b"")
    (tmp_path / "a.json").write_text(CARD.to_json()[:-20])
    with pytest.raises(DataError, match=r"a\.json: a damaged card.*pack again, or remove it"):
        card_of(tmp_path / "a.rec")


def test_the_class_list_is_read_by_either_name(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(CARD.to_json())
    assert read_classes(tmp_path / "a.json") == read_classes(str(tmp_path / "a.rec")) == ("été", "dog")
    with pytest.raises(DataError, match=r"cannot read the card .*b\.json: No such file"):
        read_classes(tmp_path / "b.rec")


def test_class_lists_that_differ_are_refused_with_the_difference() -> None:
    refuse_other_classes(("a", "b"), ("a", "b"), of="v.rec", card="t.json")
    with pytest.raises(
        DataError, match=r"v\.rec has other classes \(the same in another order\): pack it with --classes t"
    ):
        refuse_other_classes(("b", "a"), ("a", "b"), of="v.rec", card="t.json")
    with pytest.raises(DataError, match=r"with c0, c1, c2, c3, c4 and 4 more"):
        refuse_other_classes(("a", "b", *(f"c{i}" for i in range(9))), ("a", "b"), of="v.rec", card="t.json")
