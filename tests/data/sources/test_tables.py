"""Tables of paths and labels as people write them: headers, separators, splits, several labels, and what goes wrong."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.sources.samples import content, encoded, found, told, write_tar

from steadytrain.data.recordio.card import LabelNames
from steadytrain.data.sources.columns import ColumnNames
from steadytrain.data.sources.listing import Listing
from steadytrain.data.sources.tables import read_list
from steadytrain.errors import DataError


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., list[Listing]]:
    """``read(text, *images, name="a.csv")``: a table beside these images, listed."""

    def write_and_list(text: str | bytes, *images: str, name: str = "a.csv", **options: Any) -> list[Listing]:
        for number, image in enumerate(images or ("a.jpg", "b.jpg", "c.jpg")):
            (tmp_path / image).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / image).write_bytes(encoded(number))
        (tmp_path / name).write_bytes(text.encode() if isinstance(text, str) else text)
        messages: list[str] | None = options.pop("said", None)
        return found(tmp_path / name, tmp_path / "scratch", messages, **options)

    return write_and_list


Read = Callable[..., list[Listing]]


@pytest.mark.parametrize(
    ("text", "name", "why"),
    [
        ('{"path": "\\ud800.png", "label": 0}\n', "a.jsonl", r"line 1 holds \\ud800, half of a character: fix"),
        ('{"path": "a.jpg", "label": "\\udc00x"}\n', "a.jsonl", r"line 1 holds \\udc00, half of a character"),
        ('{"path": "\\u0000.png", "label": 0}\n', "a.jsonl", "zero byte"),
        ('{"of": {}}\n{"of": {}}\n', "a.jsonl", "no column of image paths"),
        (b"\0/a.png,0\nb.jpg,1\n", "a.csv", "not a kind of file"),
        (b"0\t1\ta\xa9.jpg\n1\t0\tb.jpg\n", "a.txt", "not UTF-8"),
        ("\n\n", "a.csv", "lists no images"),
    ],
)
def test_what_no_table_can_hold_is_told_in_a_line(read: Read, text: str | bytes, name: str, why: str) -> None:
    with pytest.raises(DataError, match=why) as refused:
        read(text, name=name)
    assert "\n" not in str(refused.value)


def test_the_list_that_im2rec_wrote_says_the_same_as_a_table(data_folder: Path, tmp_path: Path) -> None:
    lst = read_list(data_folder / "mxnet-rec" / "im2rec" / "cifar120.lst")
    write_tar(tmp_path / "images.tar", dict.fromkeys(lst.names, b"x"))
    shutil.unpack_archive(tmp_path / "images.tar", tmp_path, filter="data")
    lines = [f"{name},{lst.classes[label]}" for name, label in zip(lst.names, lst.labels.tolist(), strict=True)]
    (tmp_path / "a.csv").write_text("path,label\n" + "\n".join(lines))
    [listing] = found(tmp_path / "a.csv", tmp_path / "scratch")
    assert (listing.names, listing.labels.tolist(), listing.classes) == (lst.names, lst.labels.tolist(), lst.classes)
    assert listing.classes == ("airplane", "automobile", "cat") or len(listing.classes) == 3


FORMS = {
    "header": "path,label\na.jpg,dog\nb.jpg,cat\n",
    "no header": "a.jpg,dog\nb.jpg,cat\n",
    "tabs": "label\tfile\ndog\ta.jpg\ncat\tb.jpg\n",
    "semicolons": "Image;Class\na.jpg;dog\nb.jpg;cat\n",
    "blanks": "a.jpg dog\nb.jpg  cat\n",
    "byte order mark, returns and blank lines": "\ufeffFileName,Category\r\n\r\na.jpg,dog\r\n,\r\nb.jpg,cat\r\n",
    "old Macintosh": "path,label\ra.jpg,dog\rb.jpg,cat\r",
    "quotes": '"path","label"\n"a.jpg","dog"\n"b.jpg",cat\n',
    "blanks around": "path , label\n a.jpg , dog \nb.jpg,cat\n",
    "index and more": ",filename,width,label\n0,a.jpg,40,dog\n1,b.jpg,30,cat\n",
    "ids": "id,breed\na,dog\nb,cat\n",
    "label first": "labels,filepaths,class id\ndog,a.jpg,7\ncat,b.jpg,8\n",
    "backslashes": "path,label\n.\\a.jpg,dog\n.\\b.jpg,cat\n",
    "trailing commas": "path,label,\na.jpg,dog,\nb.jpg,cat,,\n",
    "unknown names": "photo of it,what it shows\na.jpg,dog\nb.jpg,cat\n",
}


@pytest.mark.parametrize("form", FORMS)
def test_paths_and_labels_in_every_form(read: Read, form: str) -> None:
    [listing] = read(FORMS[form])
    assert [name.replace("./", "") for name in listing.names] == ["a.jpg", "b.jpg"]
    assert listing.classes == ("cat", "dog")
    assert listing.labels.tolist() == [1, 0]
    assert listing.sizes.tolist() == [len(encoded(0)), len(encoded(1))]
    assert listing.ids is not None and listing.ids.tolist() == [0, 1]


def test_quoted_cells_may_hold_separators_and_ends_of_lines(read: Read) -> None:
    [listing] = read('path,label\n"a, b.jpg","cat, ""grey"""\n"c\nd.jpg",dog\n', "a, b.jpg", "c\nd.jpg")
    assert listing.names == ["a, b.jpg", "c\nd.jpg"]
    assert listing.classes == ('cat, "grey"', "dog")


def test_paths_start_from_a_root_or_are_absolute(read: Read, tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "z.jpg").write_bytes(b"zz")
    [listing] = read(f"path,label\nx.jpg,a\n{tmp_path}/far/z.jpg,b\ngone.jpg,a\n", "in/x.jpg", root=tmp_path / "in")
    assert listing.sizes.tolist() == [len(encoded(0)), 2, -1]  # the packer names what is missing
    assert content(listing, 1) == b"zz"


def test_ids_are_completed_by_the_suffix_that_is_there(read: Read, tmp_path: Path) -> None:
    [listing] = read(
        "Id,Breed\n0a.1,boxer\n0b,pug\n0c,pug\n",
        "train/0a.1.JPEG",
        "train/0b.png",
        "train/0c.jpg",
        root=tmp_path / "train",
    )
    assert listing.names == ["0a.1.JPEG", "0b.png", "0c.jpg"]
    with pytest.raises(DataError, match=r"none of the 3 paths .* \(0a\.1 from .*\): give --root .*/train$"):
        found(tmp_path / "a.csv", tmp_path)


def test_whole_numbers_are_classes_in_the_order_of_numbers(read: Read) -> None:
    [listing] = read("a.jpg,10\nb.jpg,9\nc.jpg,10.0\n")
    assert listing.classes == ("9", "10")
    assert listing.labels.tolist() == [1, 0, 1]
    [named] = read("a.jpg,1\nb.jpg,0.0\n", classes=("cat", "dog"))
    assert (named.classes, named.labels.tolist()) == (("cat", "dog"), [1, 0])
    with pytest.raises(DataError, match=r"has label 10; the class list ends at 1 \(dog\)"):
        read("a.jpg,1\nb.jpg,10\n", classes=("cat", "dog"))


def test_several_columns_of_numbers_are_label_vectors(read: Read) -> None:
    [listing] = read("image,sea,sunset\na.jpg,1,0\nb.jpg,0.5,1\n")
    assert listing.labels.tolist() == [[1, 0], [0.5, 1]]
    assert listing.labels.dtype == np.float32
    assert listing.classes == ()
    with pytest.raises(DataError, match="--classes does not apply"):
        read("image,sea,sunset\na.jpg,1,0\nb.jpg,0.5,1\n", classes=("sea", "sunset"))
    [single] = read("a.jpg,0.5\nb.jpg,2\n")
    assert single.labels.tolist() == [[0.5], [2]]


@pytest.mark.parametrize("sign", [";", "|"])
def test_several_labels_in_one_cell(read: Read, tmp_path: Path, sign: str) -> None:
    messages: list[str] = []
    read(f"path,label\na.jpg,sea{sign}sunset\nb.jpg,city\nc.jpg,city{sign} sea\n")
    [listing] = found(tmp_path / "a.csv", tmp_path, messages)
    assert listing.labels.tolist() == [[0, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert messages[-1].endswith("several labels per image, in this order: city, sea, sunset")


def test_an_empty_cell_among_several_labels_is_an_image_without_any(read: Read) -> None:
    [listing] = read("path,labels\na.jpg,sea;sunset\nb.jpg,\nc.jpg,sea\n")
    assert (listing.label_names, listing.labels.tolist()) == (("sea", "sunset"), [[1, 1], [0, 0], [1, 0]])
    with pytest.raises(DataError, match="line 3: the label is empty"):
        read("path,label\na.jpg,sea\nb.jpg,\nc.jpg,city\n")


def test_a_list_of_labels_decides_which_column_each_has(read: Read) -> None:
    names = LabelNames(("sunset", "city", "sea"))
    for table in (
        "path,label\na.jpg,sea\nb.jpg,city\nc.jpg,\n",
        "path,city,sea,sunset\na.jpg,0,1,0\nb.jpg,1,0,0\nc.jpg,0,0,0\n",
    ):
        [listing] = read(table, classes=names)
        assert (listing.label_names, listing.classes) == (names, ())
        assert listing.labels.tolist() == [[0, 0, 1], [0, 1, 0], [0, 0, 0]]
    with pytest.raises(DataError, match=r"the class list lacks: see\. Did you mean sea\?"):
        read("path,label\na.jpg,see\nb.jpg,city\n", classes=names)
    with pytest.raises(DataError, match=r"other labels than the class list \(sunset; the list"):
        read("path,city,sea\na.jpg,0,1\nb.jpg,1,0\n", classes=names)
    [bare] = read("a.jpg,0,1,1\nb.jpg,1,0,1\n", classes=names)
    assert (bare.label_names, bare.labels.tolist()) == (names, [[0, 1, 1], [1, 0, 1]])


def test_blanks_join_labels_only_where_they_can_mean_nothing_else(read: Read) -> None:
    words = ["clear", "haze", "road"]
    cells = [" ".join(word for bit, word in enumerate(words) if number & 1 << bit) for number in range(1, 8)]
    images = [f"{number}.jpg" for number in range(7)]
    rows = "".join(f"{image},{cell}\n" for image, cell in zip(images, cells, strict=True))
    [tags] = read(f"image_name,tags\n{rows}", *images)
    assert tags.labels.shape == (7, 3)
    [classes] = read(f"image_name,label\n{rows}", *images)
    assert len(classes.classes) == 7
    [birds] = read("filepaths,labels\na.jpg,ABBOTTS BABBLER\nb.jpg,ABBOTTS BOOBY\n")
    assert birds.classes == ("ABBOTTS BABBLER", "ABBOTTS BOOBY")
    with pytest.raises(DataError, match=r"is unclear whether spaces separate several labels in the column 'tags'"):
        read("image,tags\na.jpg,red car\nb.jpg,red\nc.jpg,car\n")


def test_a_column_of_splits_is_honoured(read: Read) -> None:
    text = "path,label,data set\na.jpg,cat,valid\nb.jpg,dog,train\nc.jpg,cat,Train\n"
    train, val = read(text)
    assert (train.split, train.names, train.labels.tolist()) == ("train", ["b.jpg", "c.jpg"], [1, 0])
    assert (val.split, val.names, val.classes) == ("val", ["a.jpg"], ("cat", "dog"))
    assert [listing.split for listing in read("a.jpg,cat,train\nb.jpg,dog,test\nc.jpg,dog,train\n")] == [
        "train",
        "test",
    ]
    assert [listing.split for listing in read("path,label,split\na.jpg,cat,test\nb.jpg,dog,test\n")] == [""]


def test_repeated_lines_count_once_and_contradictions_are_refused(read: Read, tmp_path: Path) -> None:
    messages: list[str] = []
    read("a.jpg,cat\nb.jpg,dog\na.jpg,cat\n")
    [listing] = found(tmp_path / "a.csv", tmp_path, messages)
    assert listing.names == ["a.jpg", "b.jpg"]
    assert "1 line repeats an earlier one and is used once" in messages[0]
    with pytest.raises(DataError, match=r"line 3: a\.jpg has label dog, and cat in line 1"):
        read("a.jpg,cat\nb.jpg,dog\na.jpg,dog\n")
    with pytest.raises(DataError, match=r"line 4: a\.jpg has label cat \(val\), and cat \(train\) in line 2"):
        read("path,label,split\na.jpg,cat,train\nb.jpg,dog,val\na.jpg,cat,val\n")


def test_unused_columns_are_reported(read: Read, tmp_path: Path) -> None:
    messages: list[str] = []
    read("path,label,label_id,photographer\na.jpg,cat,7,me\nb.jpg,dog,8,you\n")
    found(tmp_path / "a.csv", tmp_path, messages)
    words = "paths and labels are read from 'path', 'label', not from label_id, photographer (me, you)"
    assert messages[0].endswith(words)


REFUSED = {
    "short line": ("path,label,x\na.jpg,cat,1\nb.jpg\n", r"line 3: 1 cell, the first line has 3"),
    "many short lines": ("path,label\n" + "a.jpg\n" * 9, r"line 6: .* \(and 4 more\): fix the table"),
    "no label": ("path,label\na.jpg,cat\nb.jpg,\n", "line 3: the label is empty"),
    "no path": ("path,label\n,cat\nb.jpg,dog\n", "line 2: the path is empty"),
    "zero byte": ("path,label\na.jpg,cat\n" + "b.jpg,cat\n" * 600 + "\0b.jpg,dog\n", "line 603: the path holds a zero"),
    "address": ("path,label\na.jpg,cat\nhttps://x.org/b.jpg,dog\n", "line 3: https://x.org/b.jpg is a web address"),
    "not a number": ("image,p,q\na.jpg,1,0\n" + "b.jpg,1,1\n" * 250 + "c.jpg,x,1\n", "line 253: the label 'x' is not"),
    "infinite": ("image,p,q\na.jpg,1,0\n" + "b.jpg,1,1\n" * 250 + "c.jpg,1e99,1\n", "the label '1e99' is not a number"),
    "unknown split": ("path,label,split\na.jpg,cat,train\nb.jpg,dog,holdout\n", "the column 'split' holds 'holdout'"),
    "no train": ("path,label,split\na.jpg,cat,val\nb.jpg,dog,test\n", "has test and val in .* but no train"),
    "open quote": ('path,label\na.jpg,cat\n"b.jpg,dog\nc.jpg,dog\n', r"line 4: .*: fix its quotes"),
    "two joints": ("path,label\na.jpg,x;y\nb.jpg,x|y\n", "labels hold both ';' and '|'"),
    "one column": ("a.jpg\nb.jpg\n", "only one column: each line needs a path and a label"),
    "which label": (
        "path,colour,shape\na.jpg,red,cube\nb.jpg,blue,ball\n",
        r"which column is the label\? .*colour, shape",
    ),
    "no paths": ("pixel1,pixel2,label\n0,255,7\n0,3,8\n", r"no column of image paths: name one 'path'"),
    "nothing": ("\n\n", "lists no images"),
    "header alone": ("path,label\n", "lists no images"),
    "one class": ("a.jpg,cat\nb.jpg,cat\n", "has only one class, cat: a classifier needs at least two"),
    "no such files": ("x.jpg,cat\ny.jpg,dog\n", r"none of the 2 paths in .* exists \(x.jpg from"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_rows_are_reported_with_their_line(read: Read, case: str) -> None:
    text, message = REFUSED[case]
    with pytest.raises(DataError, match=message):
        read(text)


def test_other_encodings_are_named(read: Read) -> None:
    with pytest.raises(DataError, match=r"is not UTF-8 text \(0xe9 found;.*iconv -f cp1252 -t UTF-8 "):
        read("path,label\na.jpg,bébé\nb.jpg,chat\n".encode("latin-1"))
    with pytest.raises(DataError, match="iconv -f UTF-16"):
        read("path,label\na.jpg,cat\n".encode("utf-16"))


def test_a_line_without_an_end_costs_no_memory(read: Read) -> None:
    with pytest.raises(DataError, match=r"line 2 is longer than 1,048,576 characters|field larger than"):
        read("path,label\n" + "a" * (3 << 20))


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.text(min_size=1), st.sampled_from(["cat", "dög", 'a "b", c'])), min_size=2))
def test_any_names_come_back(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]]) -> None:
    folder = tmp_path_factory.mktemp("any")
    names = {"".join(c for c in f"{text}.jpg" if c.isprintable()).strip(): label for text, label in rows}
    names = {name: label for name, label in names.items() if "://" not in name and name not in ("a.jpg", "b.jpg")}
    quoted = "".join(
        '"' + name.replace('"', '""') + '","' + label.replace('"', '""') + '"\n' for name, label in names.items()
    )
    (folder / "a.csv").write_text('path,label\n"a.jpg",one\n"b.jpg",two\n' + quoted, newline="")
    (folder / "a.jpg").write_bytes(b"x")
    [listing] = found(folder / "a.csv", folder)
    assert listing.names[2:] == list(names)
    assert [listing.classes[label] for label in listing.labels.tolist()[2:]] == list(names.values())


def test_images_inside_an_archive_are_named_by_a_table(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", {f"jpg/{n}.jpg": encoded(n, "JPEG") for n in range(3)})
    (tmp_path / "labels.csv").write_text("id,label,split\n2,cat,train\njpg/0.jpg,dog,train\n1.jpg,dog,val\n")
    train, val = found(tmp_path / "a.tar", tmp_path, labels=tmp_path / "labels.csv")
    assert [told(train)["names"], val.names, train.labels.tolist()] == [
        ["jpg/2.jpg", "jpg/0.jpg"],
        ["jpg/1.jpg"],
        [0, 1],
    ]
    assert content(train, 0) == encoded(2, "JPEG")
    (tmp_path / "labels.csv").write_text("id,label\n7,cat\n0,dog\n")
    with pytest.raises(DataError, match=r"names 1 image missing in .*a\.tar \(7\)"):
        found(tmp_path / "a.tar", tmp_path, labels=tmp_path / "labels.csv")


def test_two_spellings_of_a_path_are_the_same_image(read: Read) -> None:
    messages: list[str] = []
    [listing] = read("path,label\nx/a.jpg,cat\n./x/a.jpg,cat\nx//b.jpg,dog\n", "x/a.jpg", "x/b.jpg", said=messages)
    assert list(listing.names) == ["x/a.jpg", "x/b.jpg"]
    for other in ("./x/a.jpg", "x/../x/a.jpg", "x\\a.jpg"):
        with pytest.raises(DataError, match=r"line 4: x.a\.jpg has label dog, and cat in line 2"):
            read(f"path,label\nx/a.jpg,cat\nx/b.jpg,dog\n{other},dog\n", "x/a.jpg", "x/b.jpg")


def test_numbers_that_pandas_calls_columns_by_are_no_image(read: Read) -> None:
    [listing] = read("0,1\na.jpg,cat\nb.jpg,dog\n")
    assert (list(listing.names), listing.classes) == (["a.jpg", "b.jpg"], ("cat", "dog"))
    [listing] = read("path,0,1,2\na.jpg,0,1,0\nb.jpg,1,0,1\n")
    assert listing.labels.tolist() == [[0, 1, 0], [1, 0, 1]]
    assert listing.label_names == ("0", "1", "2")


def test_first_line_taken_for_a_header_is_reported(read: Read) -> None:
    messages: list[str] = []
    [listing] = read("bild,klasse\na.jpg,cat\nb.jpg,dog\n", said=messages)
    assert len(listing) == 2
    assert any("the first line is read as column names (bild, klasse)" in line for line in messages)


def test_a_path_without_suffix_in_the_first_line_is_an_image(read: Read) -> None:
    [listing] = read("x/a,cat\nx/b.jpg,dog\nx/c.jpg,dog\n", "x/a.jpg", "x/b.jpg", "x/c.jpg")
    assert list(listing.names) == ["x/a.jpg", "x/b.jpg", "x/c.jpg"]


def test_names_of_label_columns_are_kept_and_reported(read: Read) -> None:
    messages: list[str] = []
    [listing] = read("path,beach,sun\na.jpg,0,1\nb.jpg,1,0\n", said=messages)
    assert listing.label_names == ("beach", "sun")
    assert any("several labels per image, in this order: beach, sun" in line for line in messages)
    [joined] = read("path,tags\na.jpg,sun;beach\nb.jpg,sun\n")
    assert joined.label_names == ("beach", "sun")
    with pytest.raises(DataError, match="two columns are called 'sun'"):
        read("path,sun,Sun\na.jpg,0,1\nb.jpg,1,0\n")


def test_the_line_that_excel_asks_for_is_no_row(read: Read) -> None:
    [listing] = read("sep=;\npath;label\na.jpg;cat\nb.jpg;dog\n")
    assert listing.classes == ("cat", "dog")


def test_members_of_an_archive_are_named_by_any_end_of_their_path(tmp_path: Path) -> None:
    files = {f"./data/{name}/{n}.jpg": f"{name}{n}".encode() for name in ("cat", "dog") for n in range(2)}
    archive = write_tar(tmp_path / "a.tar", {**files, "0.jpg": b"alone", "thumbs/0.jpg": b"small"})
    table = tmp_path / "a.csv"
    named = {
        "data/cat/0.jpg": b"cat0",
        "dog/1": b"dog1",
        "cat\\1.jpg": b"cat1",
        "./dog/0.JPG": b"dog0",
        "0.jpg": b"alone",
    }
    table.write_text("path,label\n" + "".join(f"{name},{n % 2}\n" for n, name in enumerate(named)))
    [listing] = found(archive, tmp_path, labels=table)
    assert [content(listing, number) for number in range(5)] == list(named.values())
    table.write_text("path,label\n1.jpg,cat\n0.jpg,dog\n")
    with pytest.raises(
        DataError,
        match=r"one of several files in .*a\.tar \(1\.jpg: .*\): write their paths in",
    ):
        found(archive, tmp_path, labels=table)


def test_table_refers_to_the_later_of_two_members_with_one_name(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "a.tar", [("1.jpg", b"old"), ("2.jpg", b"2"), ("./1.jpg", b"new")])
    (tmp_path / "a.csv").write_text("1.jpg,cat\n2.jpg,dog\n")
    [listing] = found(archive, tmp_path, labels=tmp_path / "a.csv")
    assert [content(listing, number) for number in range(2)] == [b"new", b"2"]


def test_paths_in_another_spelling_lead_to_their_files(read: Read) -> None:
    [listing] = read("path,label\ncaf\u00e9.jpg,cat\nx\\b.jpg,dog\n", "cafe\u0301.jpg", "x/b.JPG")
    assert list(listing.names) == ["cafe\u0301.jpg", "x/b.JPG"]
    assert listing.sizes.min() > 0


def test_a_folder_is_no_image(read: Read) -> None:
    [listing] = read("id,label\n1,cat\n2,dog\n", "1/x.txt", "1.png", "2.png")
    assert list(listing.names) == ["1.png", "2.png"]


@pytest.mark.parametrize(
    ("name", "header"),  # a .lst has no header
    [("a.txt", ""), ("a.txt", "path\n"), ("a.csv", ""), ("a.csv", "path\n"), ("a.lst", "")],
)
def test_table_of_paths_alone_takes_folders_as_classes(tmp_path: Path, name: str, header: str) -> None:
    for path in ("cat/1.jpg", "x/dog/2 b.jpg"):
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_bytes(b"x")
    (tmp_path / name).write_text(f"{header}cat/1.jpg\n./x/dog/2 b.jpg\n")
    messages: list[str] = []
    [listing] = found(tmp_path / name, tmp_path, messages)
    assert (listing.names, listing.classes) == (["cat/1.jpg", "x/dog/2 b.jpg"], ("cat", "dog"))
    assert listing.labels.tolist() == [0, 1]
    assert messages[-1] == f"{tmp_path / name} has no label column: the folder of an image is its class"


def test_a_list_of_paths_without_suffix_takes_folders_as_classes(tmp_path: Path) -> None:
    """As Food-101 has ``meta/train.txt`` beside ``images``."""
    (tmp_path / "meta").mkdir()
    for number, name in enumerate(("apple_pie", "waffles")):
        (tmp_path / "images" / name).mkdir(parents=True)
        for image in range(3):
            (tmp_path / "images" / name / f"{number}{image}.jpg").write_bytes(b"x")
    table = tmp_path / "meta/train.txt"
    table.write_text("apple_pie/00\napple_pie/02\nwaffles/10\n")
    names = ["apple_pie/00.jpg", "apple_pie/02.jpg", "waffles/10.jpg"]
    images = tmp_path / "images"
    for listing in (*found(table, tmp_path, root=images), *found(images, tmp_path, labels=table)):
        assert (listing.names, listing.classes) == (names, ("apple_pie", "waffles"))
    with pytest.raises(DataError, match="Of paths without a suffix, give the folder of the images with --root"):
        found(table, tmp_path)


def test_paths_without_folders_get_a_remedy_for_labels(read: Read) -> None:
    with pytest.raises(DataError, match="only one column: each line needs a path and a label"):
        read("image_0001.jpg\nimage_0002.jpg\n", "image_0001.jpg", "image_0002.jpg")
    with pytest.raises(DataError, match=r"line 2: b\.jpg is in no folder that could be its class"):
        read("cat/1.jpg\nb.jpg\n" + "dog/1.jpg\n" * 200)


def test_a_table_beside_the_folder_of_its_name(tmp_path: Path) -> None:
    """As contests hand data out: train.csv names what lies in train/; test has no labels."""
    for number, name in enumerate(("train/1.jpg", "train/2.jpg", "test/3.jpg")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encoded(number))
    (tmp_path / "train.csv").write_text("id,label\n1,cat\n2,dog\n")
    (tmp_path / "test.csv").write_text("id\n3\n")
    messages: list[str] = []
    [listing] = found(tmp_path, tmp_path / ".scratch", messages)
    assert (listing.split, listing.names, listing.classes) == ("", ["train/1.jpg", "train/2.jpg"], ("cat", "dog"))
    assert any(line.startswith(f"skipped: {tmp_path / 'test.csv'}: only one column") for line in messages)
    [alone] = found(tmp_path / "train.csv", tmp_path / ".scratch")
    assert alone.names == listing.names
    (tmp_path / "test.csv").write_text("id,label\n3,cat\n")
    assert [(part.split, len(part)) for part in found(tmp_path, tmp_path / ".scratch")] == [("train", 2), ("test", 1)]


def test_split_column_that_contradicts_the_folders_is_reported(read: Read) -> None:
    images = ("train/1.jpg", "train/2.jpg", "valid/3.jpg", "4.jpg")
    body = "train/1.jpg,cat,train\ntrain/2.jpg,dog,{}\nvalid/3.jpg,dog,val\n4.jpg,dog,train\n"
    said: list[str] = []
    parts = read("path,label,split\n" + body.format("test"), *images, said=said)
    assert {part.split: part.names for part in parts}["test"] == ["train/2.jpg"]
    [warning] = [line for line in said if "folder" in line]
    assert "1 of 4 images is in a folder of another split than the column 'split' says (train/2.jpg is test)" in warning
    said.clear()
    read("path,label,split\n" + body.format("train"), *images, said=said)
    assert not [line for line in said if "folder" in line]


@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
def test_quotation_marks_after_a_blank_are_no_part_of_a_name(read: Read, sign: str) -> None:
    rows = ['"path"', ' "label"', "\n", '"a.jpg"', ' "cat, black"', "\n", ' "b.jpg"', '  "dog"', "\n"]
    text = "".join(cell if cell == "\n" or rows[n + 1] == "\n" else cell + sign for n, cell in enumerate(rows))
    [listing] = read(text)
    assert (listing.names, listing.classes) == (["a.jpg", "b.jpg"], ("cat, black", "dog"))
    [behind] = read(text.replace('"\n', '" \n').replace('"a.jpg"', '"a.jpg" '))
    assert (behind.names, behind.classes) == (listing.names, listing.classes)


def test_marks_within_a_cell_stay(read: Read) -> None:
    [listing] = read('path, label, note\na.jpg, 5" disk, "so" she said\nb.jpg,"12"" disk, "" , new", "x"\n')
    assert listing.classes == ('12" disk, " , new', '5" disk')


@pytest.mark.parametrize(
    "text",
    ["path, label\na.jpg, 'cat'\nb.jpg, 'dog'\n", 'a.jpg "cat"\nb.jpg "dog"\n', 'a.jpg,"""cat"""\nb.jpg,"""dog"""\n'],
)
def test_marks_around_every_label_are_dropped_whichever_they_are(read: Read, text: str) -> None:
    assert read(text)[0].classes == ("cat", "dog")


def test_marks_around_some_labels_stay(read: Read) -> None:
    assert read("path,label\na.jpg,'n'\nb.jpg,rock\n")[0].classes == ("'n'", "rock")
    kept = read("path,label\na.jpg,'n'\nb.jpg,'m'\n", classes=("'m'", "'n'"))[0]
    assert (kept.classes, kept.labels.tolist()) == (("'m'", "'n'"), [1, 0])


@pytest.mark.parametrize("kind", ["absolute", "symbolic link", "hard link", "upwards", "linked folder"])
@pytest.mark.parametrize("form", ["a.csv", "a.lst"])
def test_one_file_under_two_labels_is_refused_however_it_is_named(
    read: Read, tmp_path: Path, kind: str, form: str
) -> None:
    (tmp_path / "im").mkdir()
    for number in range(2):
        (tmp_path / "im" / f"{number}.png").write_bytes(encoded(number))
    other = {
        "absolute": str(tmp_path / "im" / "0.png"),
        "symbolic link": "im/alias.png",
        "hard link": "im/hard.png",
        "upwards": f"../{tmp_path.name}/im/0.png",
        "linked folder": "linked/0.png",
    }[kind]
    (tmp_path / "im" / "alias.png").symlink_to("0.png")
    (tmp_path / "im" / "hard.png").hardlink_to(tmp_path / "im" / "0.png")
    (tmp_path / "linked").symlink_to("im")
    rows = {"im/0.png": 0, "im/1.png": 1, other: 1}
    if form == "a.csv":
        text = "path,label\n" + "".join(f"{name},{('cat', 'dog')[label]}\n" for name, label in rows.items())
    else:
        text = "".join(f"{number}\t{label}\t{name}\n" for number, (name, label) in enumerate(rows.items()))
    with pytest.raises(DataError, match=r"0\.png.*(cat|0\b)") as refused:
        read(text, "unused.jpg", name=form)
    assert "\n" not in str(refused.value) and other in str(refused.value)
    [once] = read(text.replace("dog", "cat").replace("\t1\t", "\t0\t").replace("1.png,cat", "1.png,dog"), name=form)
    assert len(once) == (2 if kind == "absolute" and form == "a.csv" else 3)


def test_a_table_that_contradicts_the_folders_of_its_images_is_warned_about(read: Read) -> None:
    def said(*rows: str) -> list[str]:
        lines: list[str] = []
        read("path,label\n" + "\n".join(rows) + "\n", *(row.partition(",")[0] for row in rows), said=lines)
        return [line for line in lines if "another class" in line]

    turned = said("cat/0.png,dog", "dog/1.png,cat", "Cat/2.png,dog", "x/dog/3.png,cat")
    assert len(turned) == 1 and turned[0].startswith("warning: ")
    assert "the folders of 4 of 4 images are named after another class (cat/0.png is dog)" in turned[0]
    [some] = said("cat/0.png,cat", "dog/1.png,dog", "cat/2.png,dog")
    assert "1 of 3 images" in some and "warning" not in some
    assert not said("cat/0.png,cat", "dog/1.png,dog")
    assert not said("cat/0.png,felis", "dog/1.png,canis")
    assert not said("dog/cat/0.png,cat", "dog/dog/1.png,dog")  # one around all
    assert not said("1/0.png,0", "2/1.png,1", "3/2.png,2")  # counted from 1
    assert not said("0/0.png,1", "1/1.png,0", "7/2.png,1")  # shards
    assert said("0/0.png,1", "1/1.png,0")


def test_columns_of_which_each_image_has_one_may_be_classes(read: Read) -> None:
    text = "image,MEL,NV,BCC\na,1.0,0.0,0.0\nb,0.0,0.0,1.0\nc,0.0,1.0,0.0\n"
    said: list[str] = []
    [vectors] = read(text, said=said)
    assert vectors.classes == () and vectors.label_names == ("MEL", "NV", "BCC")
    assert any(
        "each image has exactly one of these labels: --label-column one-hot makes them classes" in s for s in said
    )
    one_hot = ColumnNames(labels=("one-hot",))
    [listing] = read(text, columns=one_hot)
    assert (listing.classes, listing.labels.tolist()) == (("MEL", "NV", "BCC"), [0, 2, 1])
    [chosen] = read(text, columns=ColumnNames(labels=("BCC", "NV", "MEL", "one-hot")))
    assert [chosen.classes[label] for label in chosen.labels] == ["MEL", "BCC", "NV"]
    [bare] = read("a.jpg,1,0\nb.jpg,0,1\n", columns=one_hot)
    assert (bare.classes, bare.labels.tolist()) == (("0", "1"), [0, 1])
    with pytest.raises(DataError, match="b has not one 1 among zeros"):
        read("image,cat,dog\na,1,0\nb,1,1\n", columns=one_hot)
    with pytest.raises(DataError, match="one column of labels, which are classes: drop --label-column one-hot"):
        read("path,label\na.jpg,cat\nb.jpg,dog\n", columns=one_hot)
    [named] = read("path,one-hot,x\na.jpg,cat,1\nb.jpg,dog,2\n", columns=one_hot)
    assert named.classes == ("cat", "dog")
    quiet: list[str] = []
    read("image,cat,dog\na,1,0\nb,1,1\n", said=quiet)
    assert not any("one-hot" in line for line in quiet)


def test_values_beyond_what_records_hold_exactly_are_refused_by_line(read: Read) -> None:
    with pytest.raises(DataError, match=r"line 3: the label 16777217 would be stored as 16777216 .*up to 16,777,216"):
        read("path,a,b\na.jpg,16777216,3\nb.jpg,16777217,3\n")
    [classes] = read("path,label\na.jpg,16777216\nb.jpg,16777217\n")
    assert classes.classes == ("16777216", "16777217")


def test_the_code_page_of_a_table_is_asked_for_and_the_command_works(read: Read, tmp_path: Path) -> None:
    for text, code_page in [
        ("path,label\na.jpg,猫\nb.jpg,狗\n", "gbk"),
        ("path,label\na.jpg,Käfer\nb.jpg,dog\n", "cp1252"),
        ("path,label\n" + "a.jpg,dog\n" * 2000 + "b.jpg,Käfer\n", "cp1252"),
    ]:
        with pytest.raises(DataError, match=r"gbk: .*cp1252: ") as refused:
            read(text.encode(code_page))
        command = str(refused.value).partition("code page, ")[2]
        assert command.startswith(f"iconv -f {code_page} ")
        subprocess.run(["sh", "-c", command], check=True)
        assert (tmp_path / "a-utf8.csv").read_text("utf-8") == text


def test_printed_quotation_marks_are_no_part_of_a_name(read: Read) -> None:
    for marks in ("“”", "«»", "„“", "\u2018\u2019"):
        [listing] = read(f"path,label\na.jpg,{marks[0]}cat{marks[1]}\nb.jpg,{marks[0]}dog{marks[1]}\n")
        assert listing.classes == ("cat", "dog")
    assert read("path,label\na.jpg,(cat)\nb.jpg,(dog)\n")[0].classes == ("(cat)", "(dog)")


@pytest.mark.parametrize("row", [1, 300])
def test_images_in_the_cells_of_a_table_are_refused(tmp_path: Path, row: int) -> None:
    cells = ["a" * (200_000 if number == row else 9) for number in range(400)]
    (tmp_path / "a.csv").write_text("".join(f"{number}.png,cat,{cell}\n" for number, cell in enumerate(cells)))
    with pytest.raises(DataError, match=r"a\.csv: .*field limit.*: images in cells are not read, write each as a file"):
        found(tmp_path / "a.csv", tmp_path / "scratch")
