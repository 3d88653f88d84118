"""MXNet's lists, good and malformed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadytrain.data.recordio.card import LabelNames
from steadytrain.data.recordio.lst import ListLine, parse_line
from steadytrain.data.sources.tables import read_list
from steadytrain.errors import DataError

NAMES = st.text(st.characters(exclude_characters="\t\r\n", codec="utf-8"), min_size=1, max_size=9).filter(str.strip)
LABELS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=4)


def _list(folder: Path, text: str, name: str = "a.lst") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


@settings(deadline=None)
@given(st.integers(0, 2**63 - 1), LABELS, NAMES)
def test_every_line_comes_back(number: int, labels: list[float], name: str) -> None:
    text = "\t".join([str(number), *(repr(label) for label in labels), name]) + "\n"
    assert parse_line(text) == ListLine(number, tuple(labels), name.strip())


def test_lists_of_mxnet_are_read_with_their_order_and_ids(data_folder: Path) -> None:
    path = data_folder / "mxnet-rec" / "im2rec" / "cifar120.lst"
    listing = read_list(path)
    lines = [line.split("\t") for line in path.read_text().splitlines()]
    assert listing.ids is not None
    assert listing.ids.tolist() == [int(line[0]) for line in lines]
    assert listing.names == [line[2] for line in lines]
    assert listing.classes == ("airplane", "cat", "ship")  # each label has one folder there


def test_labels_without_folders_of_their_own_are_numbers(tmp_path: Path) -> None:
    listing = read_list(_list(tmp_path, "0\t0\ta.jpg\n1\t2.000000\tb.jpg\n"))
    assert listing.classes == ("0", "1", "2")
    assert listing.labels.tolist() == [0, 2]
    assert listing.labels.dtype == np.int64


def test_label_vectors_get_the_names_of_a_list_of_labels(tmp_path: Path) -> None:
    path = _list(tmp_path, "0\t1\t0\ta\n1\t0\t0\tb\n")
    listing = read_list(path, classes=LabelNames(("wet", "warm")))
    assert (listing.label_names, listing.classes) == (("wet", "warm"), ())
    assert listing.labels.tolist() == [[1, 0], [0, 0]]
    with pytest.raises(DataError, match=r"other labels than the class list \(2 without names; the list: a, b, c\)"):
        read_list(path, classes=LabelNames(("a", "b", "c")))


@pytest.mark.parametrize(
    ("text", "labels"), [("0\t1\t2.5\ta\n1\t0\t3\tb\n", [[1, 2.5], [0, 3]]), ("0\t0.5\ta\n", [[0.5]])]
)
def test_label_vectors_have_no_classes(tmp_path: Path, text: str, labels: list[list[float]]) -> None:
    listing = read_list(_list(tmp_path, text))
    assert listing.labels.tolist() == labels
    assert listing.labels.dtype == np.float32
    assert listing.classes == ()
    with pytest.raises(DataError, match="--classes does not apply"):
        read_list(tmp_path / "a.lst", classes=("cat", "dog"))


def test_blank_lines_byte_order_marks_and_carriage_returns_do_no_harm(tmp_path: Path) -> None:
    listing = read_list(_list(tmp_path, "\ufeff3\t0\tcat/été 1.jpg\r\n\r\n9\t1\tdog/2.jpg\r\n"))
    assert listing.names == ["cat/été 1.jpg", "dog/2.jpg"]
    assert listing.classes == ("cat", "dog")


def test_paths_start_from_the_list_or_from_a_root(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.jpg").write_bytes(b"abc")
    path = _list(tmp_path, "0\t0\ta.jpg\n1\t1\tgone.jpg\n")
    assert read_list(path, root=tmp_path / "images").sizes.tolist() == [3, -1]
    assert read_list(path).sizes.tolist() == [-1, -1]
    with pytest.raises(DataError, match=r"there is no folder .*nowhere: .*--root"):
        read_list(path, root=tmp_path / "nowhere")


def test_class_names_are_given_by_a_card(tmp_path: Path) -> None:
    path = _list(tmp_path, "0\t1\ta.jpg\n")
    assert read_list(path, classes=("cat", "dog")).classes == ("cat", "dog")
    with pytest.raises(DataError, match=r"has label 1; the class list ends at 0 \(cat\)"):
        read_list(path, classes=("cat",))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0\t0\ta.jpg\n1 1 b.jpg\n", "line 2: 1 field separated by tabs, at least 3"),
        ("0\t0\ta.jpg\nx\t1\tb.jpg\n", "line 2: the index 'x' is not a whole number"),
        ("-1\t0\ta.jpg\n", "line 1: the index '-1' is not a whole number"),
        ("0\tcat\ta.jpg\n", "line 1: the label 'cat' is not a number"),
        ("0\tnan\ta.jpg\n", "line 1: the label 'nan' is not a number"),
        ("0\t1e39\ta.jpg\n", "line 1: the label '1e39' is not a number that fits into a record"),
        ("0\t0\ta\n1\t16000000\tb\n", "has label 16,000,000; at most 1,000,000 classes are possible"),
        ("0\t0\t\n", "line 1: the path is empty"),
        ("0\t0\ta\n1\t0\t1\tb\n", "line 2: 2 labels, but the lines before have 1"),
        ("7\t0\ta\n\n7\t1\tb\n", "line 3: index 7 already appears in line 1"),
        ("a\n" * 9, r"line 5: .* \(and 4 more\): fix the list"),
        ("\n", "lists no images"),
    ],
)
def test_malformed_lines_are_named_by_number(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_list(_list(tmp_path, text))


def test_a_missing_list_says_so(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no list .*a\.lst"):
        read_list(tmp_path / "a.lst")


def test_image_with_two_labels_is_reported_with_both_lines(tmp_path: Path) -> None:
    (tmp_path / "a.lst").write_text("0\t0\tx/1.jpg\n1\t1\ty/1.jpg\n2\t0\tx/1.jpg\n3\t1\t./x/1.jpg\n")
    with pytest.raises(DataError, match=r"a\.lst: line 4: \./x/1\.jpg has label 1, and 0 in line 3: fix the list"):
        read_list(tmp_path / "a.lst")


def test_an_image_may_stand_in_several_lines(tmp_path: Path) -> None:
    (tmp_path / "a.lst").write_text("0\t0\tx/1.jpg\n1\t1\ty/1.jpg\n2\t0\tx/1.jpg\n")
    assert read_list(tmp_path / "a.lst").labels.tolist() == [0, 1, 0]


def test_paths_of_another_system_are_found(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "1.JPG").write_bytes(b"x")
    (tmp_path / "cat" / "cafe\u0301.jpg").write_bytes(b"yy")
    (tmp_path / "a.lst").write_text("0\t0\tcat\\1.jpg\n1\t1\tcat/caf\u00e9.jpg\n")
    listing = read_list(tmp_path / "a.lst")
    assert list(listing.names) == ["cat/1.JPG", "cat/cafe\u0301.jpg"]
    assert listing.sizes.tolist() == [1, 2]


def test_blanks_around_tabs_are_not_part_of_the_path(tmp_path: Path) -> None:
    for name in ("cat/1 a.jpg", "dog/1.jpg"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "a.lst").write_text("0 \t 0.0 \t cat/1 a.jpg \n1\t 1.0\t dog/1.jpg\n")
    listing = read_list(tmp_path / "a.lst")
    assert listing.names == ["cat/1 a.jpg", "dog/1.jpg"]
    assert (listing.classes, listing.sizes.tolist()) == (("cat", "dog"), [1, 1])


def _set(folder: Path, **lists: str) -> None:
    """Write lists whose lines are a label and a path, as ``0 bus/1.jpg``."""
    for name, lines in lists.items():
        texts = ["\t".join((str(number), *line.split())) for number, line in enumerate(lines.split("; "))]
        (folder / f"{name}.lst").write_text("\n".join(texts))


def test_classes_that_one_list_of_a_set_lacks_are_named_by_the_others(tmp_path: Path) -> None:
    _set(tmp_path, p_train="0 bus/1.jpg; 1 car/1.jpg", p_val="0 bus/2.jpg; 2 van/1.jpg", p_test="1 car/3.jpg")
    said: list[str] = []
    listings = [read_list(tmp_path / f"p_{split}.lst", say=said.append) for split in ("train", "val", "test")]
    assert [listing.classes for listing in listings] == [("bus", "car", "van")] * 3
    assert [listing.labels.tolist() for listing in listings] == [[0, 1], [0, 2], [1]]
    assert said[0].endswith("p_train.lst: p_val.lst beside it names the 3 classes too")


def test_chunks_of_a_list_have_one_class_list(tmp_path: Path) -> None:
    _set(tmp_path, p_0="0 bus/1.jpg; 2 van/1.jpg", p_1="1 car/1.jpg; 0 bus/2.jpg")
    assert [read_list(tmp_path / f"p_{chunk}.lst").classes for chunk in (0, 1)] == [("bus", "car", "van")] * 2


@pytest.mark.parametrize(
    "other",
    [
        {"p_train": "0 cat/1.jpg; 1 car/1.jpg; 2 van/1.jpg"},  # numbers that contradict its own
        {"q_train": "0 bus/1.jpg; 1 car/1.jpg; 2 van/1.jpg"},  # of another set
        {"p_train": "0 0 1 bus/1.jpg"},  # several labels
        {"p_train": "0 bus/1.jpg; x"},
        {"p_train": "0 bus/1.jpg; 1e20 van/1.jpg"},
        {"p10_train": "0 bus/1.jpg; 1 car/1.jpg; 2 van/1.jpg"},
    ],
)
def test_lists_of_other_sets_beside_it_name_nothing(tmp_path: Path, other: dict[str, str]) -> None:
    _set(tmp_path, p_val="0 bus/2.jpg; 1 car/2.jpg", **other)
    said: list[str] = []
    assert read_list(tmp_path / "p_val.lst", say=said.append).classes == ("bus", "car")
    assert not said


def test_a_list_of_one_class_is_packed_as_mxnet_does(tmp_path: Path) -> None:
    _set(tmp_path, a="0 bus/1.jpg; 0 bus/2.jpg", b="3 1.jpg; 3 2.jpg")
    assert read_list(tmp_path / "a.lst").classes == ("bus",)
    assert read_list(tmp_path / "b.lst").labels.tolist() == [3, 3]


@pytest.mark.parametrize("label", ["16777217", "-16777217", "16777217.000000", "100000001", "0\t16777217"])
def test_whole_numbers_that_a_record_would_change_are_refused(tmp_path: Path, label: str) -> None:
    first = "0\t" * (label.count("\t")) + "1"
    path = _list(tmp_path, f"0\t{first}\ta.jpg\n1\t{label}\tb.jpg\n")
    value = label.rpartition("\t")[2].partition(".")[0]
    with pytest.raises(DataError, match=f"line 2: the label {value} would be stored as .*number the labels from 0"):
        read_list(path)


def test_a_list_that_contradicts_the_folders_of_its_images_is_warned_about(tmp_path: Path) -> None:
    names = ["cat/0.jpg", "cat/1.jpg", "dog/2.jpg", "dog/3.jpg"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"x")

    def said(*labels: int) -> list[str]:
        lines: list[str] = []
        rows = (f"{n}\t{label}\t{name}\n" for n, (label, name) in enumerate(zip(labels, names, strict=True)))
        read_list(_list(tmp_path, "".join(rows)), classes=("cat", "dog"), say=lines.append)
        return [line for line in lines if "another class" in line]

    [warning] = said(1, 1, 0, 1)
    assert warning.startswith("warning: ") and "the folders of 3 of 4 images are named after another class" in warning
    assert not said(1, 1, 0, 0)  # each label has one folder, whose name counts
    assert not said(0, 0, 1, 1)


def test_labels_that_a_record_holds_stay_as_they_are(tmp_path: Path) -> None:
    values = ["16777216", "16777218", "0.1", "-3", "1e30"]
    (tmp_path / "a.jpg").write_bytes(b"x")
    path = _list(tmp_path, "".join(f"{n}\t{value}\t{n}.jpg\n" for n, value in enumerate(values[:-1])))
    assert read_list(path).labels[:, 0].tolist() == [np.float32(value) for value in values[:-1]]
