"""Several labels in one cell: read as several, as one class where the cell is a name, or asked about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.data.sources.samples import encoded, found, write_tar

from steadytrain.data.recordio.card import LabelNames
from steadytrain.data.sources.listing import Listing
from steadytrain.data.sources.several import read_cells
from steadytrain.errors import DataError

SEVERAL = {
    "a list as pandas writes it": ["['cat']", "['cat', 'dog']", "['dog']", "[]"],
    "JSON": ['["cat"]', '["cat", "dog"]', '["dog"]', "[]"],
    "an array of NumPy": ["['cat']", "['cat' 'dog']", "['dog']", "[]"],
    "a tuple": ["('cat',)", "('cat', 'dog')", "('dog',)", "()"],
    "without quotes": ["[cat]", "[cat, dog]", "[dog]", "[]"],
    "words among lists": ["cat", "['cat', 'dog']", "['dog']", "[]"],
    "commas": ["cat", "cat, dog", "dog", ""],
    "commas without blanks": ["cat", "dog,cat", "dog", ""],
    "semicolons": ["cat", "cat; dog", "dog", ""],
}


def listed(folder: Path, cells: list[str], header: str = "labels", **options: Any) -> Listing:
    """A table of one image for each cell."""
    lines = [f"path\t{header}"]
    for number, cell in enumerate(cells):
        (folder / f"{number}.png").write_bytes(encoded(number))
        lines.append(f'{number}.png\t"{cell.replace(chr(34), chr(34) * 2)}"')
    (folder / "a.tsv").write_text("\n".join(lines))
    [listing] = found(folder / "a.tsv", folder / "scratch", **options)
    return listing


@pytest.mark.parametrize("form", SEVERAL)
@pytest.mark.parametrize("header", ["labels", "label"])
def test_several_labels_in_a_cell_are_several(tmp_path: Path, form: str, header: str) -> None:
    listing = listed(tmp_path, SEVERAL[form], header)
    assert (listing.classes, listing.label_names) == ((), ("cat", "dog"))
    assert listing.labels.tolist() == [[1, 0], [1, 1], [0, 1], [0, 0]]
    again = listed(tmp_path, SEVERAL[form], header, classes=LabelNames(("dog", "elk", "cat")))
    assert again.labels.tolist() == [[0, 0, 1], [1, 0, 1], [1, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(
    "cells", [["0,1,1", "1,0,1"], ["0 1 1", "1 0 1"], ["0|1|1", "1|0|1"], ["[0, 1, 1]", "[1, 0, 1]"]]
)
def test_zeros_and_ones_in_a_cell_are_a_vector(tmp_path: Path, cells: list[str]) -> None:
    listing = listed(tmp_path, cells)
    assert (listing.classes, listing.labels.tolist()) == ((), [[0, 1, 1], [1, 0, 1]])
    named = listed(tmp_path, cells, classes=LabelNames(("a", "b", "c")))
    assert (named.label_names, named.labels.tolist()) == (("a", "b", "c"), [[0, 1, 1], [1, 0, 1]])
    with pytest.raises(DataError, match="has 3 labels in a cell, and the class list has 2"):
        listed(tmp_path, cells, classes=LabelNames(("a", "b")))


def test_an_empty_cell_among_zeros_and_ones_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 3: the label is empty"):
        listed(tmp_path, ["0,1,1", "", "1,0,1"])


def test_a_vector_of_paddle_and_of_samples(tmp_path: Path) -> None:
    for number in range(2):
        (tmp_path / f"{number}.png").write_bytes(encoded(number))
    (tmp_path / "train_list.txt").write_text("0.png\t0,1,1\n1.png\t1,0,1\n")
    [paddle] = found(tmp_path / "train_list.txt", tmp_path / "scratch")
    assert paddle.labels.tolist() == [[0, 1, 1], [1, 0, 1]]
    bits = (b"0,1,1", b"1,0,1")
    files = {f"{n}.{end}": data for n in range(2) for end, data in (("jpg", encoded(n)), ("cls", bits[n]))}
    [samples] = found(write_tar(tmp_path / "a.tar", files), tmp_path)
    assert (samples.classes, samples.labels.tolist()) == ((), [[0, 1, 1], [1, 0, 1]])


ONE = {
    "names of people": ["Smith, J", "Lee, K", "Smith, J"],
    "names with their kind": ["crane", "crane, bird", "tench, Tinca tinca"],
    "names in brackets": ["(unknown)", "cat", "dog"],
    "names in square brackets": ["[unknown]", "cat", "dog"],
    "decimal commas": ["0,5", "1,5", "0,5"],
    "lists of one": ["cat", "dog", "dog"],
}


@pytest.mark.parametrize("kind", ONE)
def test_a_cell_that_is_one_name_is_one_class(tmp_path: Path, kind: str) -> None:
    listing = listed(tmp_path, ONE[kind], "label")
    assert [listing.classes[int(label)] for label in listing.labels] == ONE[kind]


def test_lists_with_a_single_label_each_are_classes(tmp_path: Path) -> None:
    listing = listed(tmp_path, ["['cat']", "['big dog']"])
    assert listing.classes == ("big dog", "cat")


def test_a_class_list_says_that_a_comma_belongs_to_a_name(tmp_path: Path) -> None:
    classes = ("cat", "dog", "cat, dog")
    assert listed(tmp_path, ["cat", "dog", "cat, dog"], classes=classes).labels.tolist() == [0, 1, 2]


def test_commas_that_can_mean_both_are_asked_about(tmp_path: Path) -> None:
    cells = ["fox, female", "fox, male", "lynx, male"]
    with pytest.raises(DataError, match="unclear whether commas separate several labels in the column 'tags'"):
        listed(tmp_path, cells, "tags")
    said: list[str] = []
    assert len(listed(tmp_path, cells, "label", messages=said).classes) == 3
    assert any("each cell is one class, also 'fox, female'" in line for line in said)


@pytest.mark.parametrize("cell", ["['cat', None]", "['cat'", "[['cat'], 'dog']"])
def test_a_broken_list_is_no_class(tmp_path: Path, cell: str) -> None:
    with pytest.raises(DataError, match="begins like a list and is none: write"):
        listed(tmp_path, [cell, "['dog', 'cat']"])


@given(st.lists(st.lists(st.text(min_size=1).filter(lambda text: text.strip() == text), max_size=4), min_size=1))
def test_what_python_writes_comes_back(lists: list[list[str]]) -> None:
    cells = read_cells([repr(items) for items in lists], header="labels", where="a.csv")
    assert cells is not None
    if not cells.is_multi_hot:
        assert [cells.parts[repr(items)] for items in lists] == [tuple(items) for items in lists]


def test_choices_of_label_studio_are_several_labels() -> None:
    cell = '{"choices":["cat","dog"]}'
    cells = read_cells(["cat", cell], header="choice", where="a.csv")
    assert cells is not None
    assert cells.parts == {"cat": ("cat",), cell: ("cat", "dog")}
