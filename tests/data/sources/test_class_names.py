"""Names of classes that look like numbers, codes, or like nothing at all: what was written is the name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.data.sources.samples import encoded, found, write_tar

from steadytrain.data.recordio.framing import pack_header
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.data.sources.labels import class_name, classes_from_texts
from steadytrain.data.sources.listing import Listing
from steadytrain.data.sources.select import remark
from steadytrain.errors import DataError

NUMBERS = [str(number) for number in range(12)]
"""Classes whose names folders sort as 0, 1, 10, 11, 2, ..."""


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., list[str]]:
    """``read(labels, ...)``: a table of an image for each label, listed; the name of each image's class comes back."""

    def write_and_list(labels: list[str], said: list[str] | None = None, **options: object) -> list[str]:
        lines = ["path,label"]
        for number, label in enumerate(labels):
            (tmp_path / f"{number}.png").write_bytes(encoded(number))
            lines.append(f'{number}.png,"{label}"')
        (tmp_path / "a.csv").write_text("\n".join(lines))
        [listing] = found(tmp_path / "a.csv", tmp_path / "scratch", said, **options)
        return named(listing)

    return write_and_list


def named(listing: Listing) -> list[str]:
    """The name of each image's class."""
    assert listing.labels.ndim == 1
    return [listing.classes[int(label)] for label in listing.labels]


def folder_of(path: Path, classes: list[str]) -> Path:
    """Two images for each class, in a folder for each."""
    for number, name in enumerate(classes):
        (path / name).mkdir(parents=True)
        for copy in range(2):
            (path / name / f"{copy}.png").write_bytes(encoded(2 * number + copy))
    return path


def records_of(path: Path, labels: list[int], paths: list[str] | None = None) -> Path:
    """Records without a card, as im2rec leaves them, and the list beside them if there are ``paths``."""
    with RecordWriter(path) as writer:
        for number, label in enumerate(labels):
            writer.write(pack_header(label, id=number) + encoded(number), number)
    if paths is not None:
        lines = [f"{n}\t{label}.000000\t{name}\n" for n, (label, name) in enumerate(zip(labels, paths, strict=True))]
        path.with_suffix(".lst").write_text("".join(lines))
    return path


def test_padded_codes_keep_their_zeros(read: Callable[..., list[str]], tmp_path: Path) -> None:
    codes = ["001", "002", "010", "001"]
    assert read(codes) == codes
    classes = found(folder_of(tmp_path / "train", ["001", "002", "010"]), tmp_path)[0].classes
    assert read(codes, classes=classes) == codes
    assert read(["010", "002", "010"], classes=classes) == ["010", "002", "010"]  # also where some do not occur


def test_a_number_is_the_class_of_its_value_before_it_is_a_place(read: Callable[..., list[str]]) -> None:
    said: list[str] = []
    assert read(["1", "2", "1"], said, classes=("001", "002", "003")) == ["001", "002", "001"]
    assert any("read as the classes of the same value: 1 as 001, 2 as 002" in line for line in said)
    assert read(["01", "2.0"], classes=("1", "2", "3")) == ["1", "2"]
    with pytest.raises(DataError, match="holds classes that the class list lacks: 0"):
        read(["0", "1", "2"], classes=("1", "2", "3"))  # no place: 1 and 2 are names
    with pytest.raises(DataError, match="holds classes that the class list lacks: 0"):
        read(["0", "0"], classes=("cat", "7"))


def test_numbers_in_a_list_of_words_are_positions_and_a_notice_says_so(read: Callable[..., list[str]]) -> None:
    said: list[str] = []
    assert read(["1", "0"], said, classes=("cat", "dog")) == ["dog", "cat"]
    assert any("taken for places in the class list: 0 is cat, 1 is dog" in line for line in said)


def test_a_table_and_a_folder_of_numbers_name_the_same_classes(tmp_path: Path) -> None:
    [listing] = found(folder_of(tmp_path / "train", NUMBERS), tmp_path)
    assert listing.classes == tuple(sorted(NUMBERS))
    lines = "".join(f"{name}/0.png,{name}\n" for name in NUMBERS)
    (tmp_path / "train" / "val.csv").write_text("path,label\n" + lines)
    [table] = found(tmp_path / "train" / "val.csv", tmp_path, classes=listing.classes)
    assert named(table) == NUMBERS


ODD = {
    "an underscore": ["1_0", "2_1", "1_0", "2_1"],
    "full-width digits": ["\uff11", "\uff12", "\uff11", "\uff12"],
    "decimals": ["0.5", "1", "0.5", "1"],
    "exponents": ["1e3", "2e3", "1e3", "2e3"],
    "a sign": ["-1", "1", "-1", "1"],
    "no numbers": ["inf", "nan", "inf", "nan"],
    "versions": ["1.10", "1.1", "1.10", "1.1"],
    "dates": ["2019-01", "2019-02", "2019-01", "2019-02"],
    "truth": ["True", "False", "True", "False"],
    "Arabic digits": ["\u0661", "\u0662", "\u0661", "\u0662"],
    "hexadecimal": ["0x1", "0x2", "0x1", "0x2"],
    "thousands": ["1,000", "2,000", "1,000", "2,000"],
    "ages": ["0-2", "60+", "0-2", "60+"],
}


@pytest.mark.parametrize("kind", ODD)
def test_labels_that_look_like_numbers_are_classes_as_they_are_written(
    read: Callable[..., list[str]], kind: str
) -> None:
    assert read(ODD[kind]) == ODD[kind]


def test_numbers_that_hardly_repeat_are_values(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number}.png").write_bytes(encoded(number))
    (tmp_path / "a.csv").write_text("path,label\n0.png,3.5\n1.png,20.25\n2.png,-7\n3.png,3.5\n")
    [listing] = found(tmp_path / "a.csv", tmp_path / "scratch")
    assert (listing.classes, listing.labels.tolist()) == ((), [[3.5], [20.25], [-7], [3.5]])


INVISIBLE = ["cat\u200b", "\ufeffcat", "cat\u00a0", "c\u200bat", "cat\u200e", "cat\u2060", "ca\u00adt", " cat\u200d"]


@pytest.mark.parametrize("text", INVISIBLE, ids=ascii)
def test_invisible_characters_make_no_second_class(read: Callable[..., list[str]], text: str) -> None:
    assert read(["cat", text, "dog"]) == ["cat", "cat", "dog"]
    assert read(["dog", text], classes=("cat", "dog")) == ["dog", "cat"]


def test_joiners_within_a_word_stay() -> None:
    assert (
        class_name("\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645")
        == "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    )
    assert class_name("big\u00a0cat") == "big cat"


def test_names_that_differ_in_zeros_or_width_are_reported() -> None:
    def said(*classes: str) -> list[str]:
        texts = [name for name in classes for _ in range(2)]
        names, labels = classes_from_texts(texts, classes=None, where="a.csv")
        sizes = np.ones(len(texts), np.int64)
        lines: list[str] = []
        remark([Listing("", Path(), names, texts, labels, sizes, sizes)], lines.append)
        return lines

    assert any(
        "'01' and '1' are two classes that differ only in leading zeros" in line for line in said("01", "1", "2")
    )
    assert any("differ only in leading zeros or forms of letters" in line for line in said("A", "\uff21", "b"))
    assert not said("0.5", "1", "2")  # all are numbers


def test_codes_in_samples_keep_their_zeros(tmp_path: Path) -> None:
    files = {
        f"{n}.{end}": data for n in range(4) for end, data in (("jpg", encoded(n)), ("cls", b"00%d" % (n % 2 + 1)))
    }
    [listing] = found(write_tar(tmp_path / "a.tar", files), tmp_path)
    assert listing.classes == ("001", "002")
    plain = {name: data.replace(b"00", b"") if name.endswith("cls") else data for name, data in files.items()}
    [numbers] = found(write_tar(tmp_path / "b.tar", plain), tmp_path, classes=("001", "002"))
    assert named(numbers) == ["001", "002", "001", "002"]


def test_records_without_names_are_places_in_a_class_list(tmp_path: Path) -> None:
    said: list[str] = []
    path = records_of(tmp_path / "a.rec", list(range(12)))
    classes = tuple(sorted(NUMBERS))
    [listing] = found(path, tmp_path, said, classes=classes)
    assert listing.labels.tolist() == list(range(12))
    assert any("taken for places in the class list: 0 is 0, 1 is 1, 2 is 10" in line for line in said)
    with pytest.raises(DataError, match=r"has label 11; the class list ends at 10"):
        found(path, tmp_path, classes=classes[:11])


def test_a_list_beside_records_names_their_classes(tmp_path: Path) -> None:
    path = records_of(tmp_path / "a.rec", list(range(12)), [f"{name}/1.jpg" for name in sorted(NUMBERS)])
    [listing] = found(path, tmp_path)
    assert listing.classes == tuple(sorted(NUMBERS))
    [other] = found(path, tmp_path, classes=tuple(NUMBERS))  # by these names, not by place
    assert named(other) == sorted(NUMBERS)
    path.with_suffix(".lst").write_text("".join(f"{n}\t{n}\tflat/{n}.jpg\n" for n in range(12)))
    [flat] = found(path, tmp_path)  # one folder is no name of twelve classes
    assert flat.classes == tuple(NUMBERS)


def test_a_list_follows_the_names_of_a_class_list(tmp_path: Path) -> None:
    folder_of(tmp_path / "train", NUMBERS)
    rows = [(label, f"{name}/0.png") for label, name in enumerate(NUMBERS)]  # as a list written by hand may count
    (tmp_path / "train" / "a.lst").write_text(
        "".join(f"{n}\t{label}\t{name}\n" for n, (label, name) in enumerate(rows))
    )
    classes = tuple(sorted(NUMBERS))
    [listing] = found(tmp_path / "train" / "a.lst", tmp_path, classes=classes)
    assert named(listing) == NUMBERS
    said: list[str] = []
    [places] = found(tmp_path / "train" / "a.lst", tmp_path, said, classes=[f"class {n}" for n in range(12)])
    assert places.labels.tolist() == list(range(12))
    assert any("taken for places in the class list" in line for line in said)


@pytest.mark.parametrize(
    ("labels", "classes", "message"),
    [
        (
            ["1", "2"],
            ("class1", "class2", "class3"),
            "label 1 is class2 by its place .*, and class1 by its name: write",
        ),
        (["1", "2"], ("01_cat", "02_dog", "03_elk"), "label 1 is 02_dog by its place"),
        (["2", "3"], ("001.Auk", "002.Bee", "003.Cat", "004.Dog"), "label 2 is 003.Cat by its place .*002.Bee by"),
        (["1", "3"], ("cat", "dog", "elk"), "label 3; the class list ends at 2 .elk.: subtract 1 from each label"),
    ],
)
def test_numbers_that_names_contradict_are_refused(labels: list[str], classes: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        classes_from_texts(labels, classes=classes, where="a.csv")


@pytest.mark.parametrize(
    ("labels", "classes", "is_doubtful"),
    [
        (["1", "2"], ("c0", "c1", "c2"), False),  # the names say the same
        (["0", "1"], ("class1", "class2", "class3"), False),  # 0 is in none of the names
        (["0", "2"], ("n01440764", "n02102040", "n02979186"), False),
        (["1", "2"], ("7 up", "A 320", "elk"), True),  # no label is 0
        (["2", "1"], ("cat", "dog", "elk"), True),
        (["2"], ("cat", "dog", "elk"), False),
        (["1", "3"], ("cat", "dog", "elk", "owl"), False),
    ],
)
def test_places_are_doubted_only_where_labels_seem_to_count_from_one(
    labels: list[str], classes: tuple[str, ...], is_doubtful: bool
) -> None:
    said: list[str] = []
    _, numbers = classes_from_texts(labels, classes=classes, where="a.csv", say=said.append)
    assert numbers.tolist() == list(map(int, labels))
    assert any(line.startswith("warning: a.csv: no label is 0") for line in said) == is_doubtful


def test_a_label_that_may_be_none_is_said() -> None:
    said: list[str] = []
    names, _ = classes_from_texts(["cat", "nan", "dog"], classes=None, where="a.csv", say=said.append)
    assert names == ("cat", "dog", "nan")
    assert said == ["warning: a.csv: nan is read as a class: take these lines out if their images have no label"]
