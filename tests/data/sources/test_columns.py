"""Which column is the path, the label, the split: of tables as they are handed out, and as a user names them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tests.data.sources.samples import encoded, found

import steadytrain as st
from steadytrain.config import Data, Recipe
from steadytrain.data.checking.sources import examine_source
from steadytrain.data.packing.pack import pack
from steadytrain.data.packing.prepare import prepare
from steadytrain.data.recordio.card import card_of
from steadytrain.data.sources.columns import ColumnNames
from steadytrain.data.sources.listing import Listing
from steadytrain.data.sources.rows import is_json_lines
from steadytrain.data.sources.unpacked import Unpacked
from steadytrain.errors import DataError, RecipeError
from steadytrain.training.data import open_named

Read = Callable[..., list[Listing]]

NAMES = ("a", "b", "c", "d")


@pytest.fixture
def read(tmp_path: Path) -> Read:
    """``read(text)``: a table beside the images a.png to d.png, listed."""
    for number, name in enumerate(NAMES):
        (tmp_path / f"{name}.png").write_bytes(encoded(number))

    def write_and_list(
        text: str, said: list[str] | None = None, name: str = "a.csv", **options: object
    ) -> list[Listing]:
        (tmp_path / name).write_text(text)
        return found(tmp_path / name, tmp_path / "scratch", said, **options)

    return write_and_list


def labelled(listing: Listing) -> dict[str, str]:
    """The name of the class of each image."""
    return {name: listing.classes[int(label)] for name, label in zip(listing.names, listing.labels, strict=True)}


def table(head: str, *rows: str) -> str:
    """A table with a row for each image."""
    return "\n".join([head, *rows]) + "\n"


KNOWN = {
    "road signs": table(
        "Width,Height,Roi.X1,Roi.Y1,Roi.X2,Roi.Y2,ClassId,Path",
        *(f"48,40,5,5,43,35,{label},{name}.png" for name, label in zip(NAMES, "0102", strict=True)),
    ),
    "road signs with semicolons": table(
        "Filename;Width;Height;Roi.X1;ClassId",
        *(f"{name}.png;48;40;5;{label}" for name, label in zip(NAMES, "0102", strict=True)),
    ),
    "skin lesions": table(
        "lesion_id,image_id,dx,dx_type,age,sex",
        *(f"L{n},{name},{label},histo,40.0,male" for n, (name, label) in enumerate(zip(NAMES, "0102", strict=True))),
    ),
    "whales": table("Image,Id", *(f"{name}.png,{label}" for name, label in zip(NAMES, "0102", strict=True))),
    "sizes beside an unknown name": table(
        "img,width,height,kind of it", *(f"{name}.png,40,40,{label}" for name, label in zip(NAMES, "0102", strict=True))
    ),
    "eyes": table("id_code,diagnosis", *(f"{name},{label}" for name, label in zip(NAMES, "0102", strict=True))),
    "boxes": table(
        "fname,bbox_x1,bbox_y1,class", *(f"{name}.png,3,4,{label}" for name, label in zip(NAMES, "0102", strict=True))
    ),
    "first word and label": "a 0\nb 1\nc 0\nd 2\n",
    "JSON lines": "".join(
        json.dumps({"file_name": f"{name}.png", "label": label, "box": {"x": 1}}) + "\n"
        for name, label in zip(NAMES, "0102", strict=True)
    ),
    "a manifest": "".join(
        json.dumps({"source-ref": f"s3://bucket/{name}.png", "class": 7, "class-metadata": {"class-name": label}})
        + "\n"
        for name, label in zip(NAMES, "0102", strict=True)
    ),
    "an import file": "".join(
        f"TRAIN,gs://bucket/{name}.png,{label}\n" for name, label in zip(NAMES, "0102", strict=True)
    ),
}


@pytest.mark.parametrize("kind", KNOWN)
def test_well_known_tables_are_read_right(read: Read, kind: str) -> None:
    [listing] = read(KNOWN[kind], name="a.txt")
    assert labelled(listing) == {"a.png": "0", "b.png": "1", "c.png": "0", "d.png": "2"}


def test_labels_of_several_words_behind_a_path_without_blanks(read: Read) -> None:
    [listing] = read("a Boeing 737-200\nb A320\nc Boeing 737-200\nd DC-10\n", name="images_variant_train.txt")
    assert labelled(listing)["a.png"] == "Boeing 737-200"
    [suffixed] = read("a.png golden retriever\nb.png pug\nc.png golden retriever\n", name="a.txt")
    assert suffixed.classes == ("golden retriever", "pug")


def test_lists_of_attributes_are_labels_of_zeros_and_ones(read: Read) -> None:
    said: list[str] = []
    attributes = "4\nSmiling Male\na.png -1  1\nb.png  1  1\nc.png -1 -1\nd.png  1 -1\n"
    [listing] = read(attributes, said, name="list_attr.txt")
    assert (listing.label_names, listing.labels.tolist()) == (("Smiling", "Male"), [[0, 1], [1, 1], [0, 0], [1, 0]])
    assert any("-1 is read as 0" in line for line in said)
    [table] = read("image_id,Smiling,Male\na.png,-1,1\nb.png,1,1\nc.png,-1,-1\n")
    assert table.labels.tolist() == [[0, 1], [1, 1], [0, 0]]
    [truths] = read("path,wet,dry\na.png,True,False\nb.png,False,False\n")
    assert truths.labels.tolist() == [[1, 0], [0, 0]]


def test_findings_joined_by_bars_are_several(read: Read) -> None:
    head = "Image Index,Finding Labels,Follow-up #,Patient ID\n"
    [listing] = read(head + "a.png,No Finding,0,7\nb.png,Mass|Nodule,1,7\nc.png,Mass,2,8\n")
    assert listing.label_names == ("Mass", "No Finding", "Nodule")


def test_one_hot_columns_follow_a_class_list(read: Read) -> None:
    text = "image,MEL,NV\na,1.0,0.0\nb,0.0,1.0\n"
    [listing] = read(text, classes=("BCC", "MEL", "NV"))
    assert labelled(listing) == {"a.png": "MEL", "b.png": "NV"}
    with pytest.raises(DataError, match="the class list lacks: NV"):
        read(text, classes=("BCC", "MEL"))


ASKED = {
    "numbers without names": (
        "a.png,7,3\nb.png,8,9\n",
        r"which column is the label\? .* name it with --label-column \(the columns: they have no names: 1 to 3\)",
    ),
    "x-rays": (
        "Path,Sex,Age,No Finding,Edema\na.png,Female,40,1.0,\nb.png,Male,41,,1.0\n",
        r"which column is the label\? .* several times for several columns of zeros and ones",
    ),
    "pets": (
        "#Image CLASS-ID SPECIES BREED ID\n#ID: 1:37 Class ids\na 1 1 1\nb 2 1 2\nc 3 1 3\nd 1 2 1\n",
        r"which column is the label\? .*they have no names: 1 to 4",
    ),
    "pixels in a column": (
        "emotion,pixels,Usage\n0,70 70 70,Training\n1,3 4 5,Training\n",
        r"no column of image paths: .* Images that are numbers in a table are not read: write each as a file",
    ),
    "pixels in columns": ("label,pixel0,pixel1\n0,7,7\n1,8,8\n", "Images that are numbers in a table are not read"),
    "sizes alone": ("path,width,height\na.png,1,0\nb.png,0,1\n", r"which column is the label\? .* --label-column"),
    "no path": ("what,where\nx,y\n", "no column of image paths: .* give the folder of the images with --root"),
}


@pytest.mark.parametrize("kind", ASKED)
def test_what_can_be_read_in_two_ways_is_asked_about(read: Read, kind: str) -> None:
    text, message = ASKED[kind]
    with pytest.raises(DataError, match=message):
        read(text, name="a.txt")


def test_training_asks_for_the_column_where_labels_are_other_numbers(tmp_path: Path, read: Read) -> None:
    said: list[str] = []
    [listing] = read("path,age,weight\na.png,7,3\nb.png,8,9\n", said)
    assert listing.labels.tolist() == [[7, 3], [8, 9]]
    assert any("several labels per image, in this order: age, weight" in line for line in said)
    with pytest.raises(DataError, match=r"\(7 in image 0\): training needs one class for each image \(--label-column"):
        prepare(tmp_path / "a.csv", trainable=True, cache=tmp_path / "cache")


PETS = ASKED["pets"][0]
WIDE = table(
    "file,alt,kind,colour,fold",
    "a.png,b.png,x,red,train",
    "b.png,a.png,y,blue,val",
    "c.png,d.png,x,red,train",
    "d.png,c.png,y,blue,val",
)


def test_columns_are_those_that_are_named(read: Read) -> None:
    def columns(*, path: str | None = None, label: str | None = None, split: str | None = None) -> ColumnNames:
        return ColumnNames.of(path, label, split)

    one, _ = read(WIDE, columns=columns(label="colour"))
    assert labelled(one)["a.png"] == "red"
    [other] = read(WIDE, columns=columns(label="kind", path="alt", split="none"))
    assert labelled(other)["b.png"] == "x"
    train, val = read(WIDE, columns=columns(label="kind", split="fold"))
    assert (train.split, train.names, val.split, val.names) == ("train", ["a.png", "c.png"], "val", ["b.png", "d.png"])
    spelled, _ = read(WIDE.replace("colour", " Co Lour"), columns=columns(label="co_lour"))
    assert labelled(spelled)["a.png"] == "red"
    [by_number] = read(PETS, name="list.txt", columns=columns(label="2"))
    assert labelled(by_number) == {"a.png": "1", "b.png": "2", "c.png": "3", "d.png": "1"}


def test_several_columns_that_are_named_are_labels(read: Read) -> None:
    said: list[str] = []
    text = "Path,Sex,No Finding,Edema\na.png,F,1.0,\nb.png,M,,1.0\nc.png,M,,\n"
    [listing] = read(text, said, columns=ColumnNames(labels=("Edema", "No Finding")))
    assert (listing.label_names, listing.labels.tolist()) == (("Edema", "No Finding"), [[0, 1], [1, 0], [0, 0]])
    assert any("4 empty cells among the labels are read as 0" in line for line in said)
    [boxes] = read("path,x,y\na.png,3,4\nb.png,5,6\n", columns=ColumnNames(labels=("x", "y")))
    assert boxes.labels.tolist() == [[3, 4], [5, 6]]


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no such column": (
        {"label": "color"},
        r"--label-column is 'color', and there is no such column \(the columns: file, alt, kind, colour, fold\)\. Did"
        r" you mean colour\?",
    ),
    "no such number": ({"label": "6"}, "--label-column is '6', and there is no such column"),
    "no path": ({"label": "kind", "path": "where"}, "--path-column is 'where', and there is no such column"),
    "no splits": ({"label": "kind", "split": "colour"}, "--split-column colour holds 'blue'; it must be train, val"),
    "the same twice": ({"label": "file", "path": "file"}, "name the same column: name each column once"),
    "words in several": ({"label": ("kind", "colour")}, "line 2: the label 'x' is not a number"),
}


@pytest.mark.parametrize("case", WRONG)
def test_missing_columns_are_named_with_the_existing_ones(read: Read, case: str) -> None:
    names, message = WRONG[case]
    columns = ColumnNames.of(names.get("path"), names.get("label"), names.get("split"))
    with pytest.raises(DataError, match=message):
        read(WIDE, columns=columns)


def test_columns_with_equal_names_are_numbered(read: Read) -> None:
    text = "path,kind,kind\na.png,x,u\nb.png,y,v\n"
    with pytest.raises(DataError, match=r"2 columns are called so: give its number \(2, 3\)"):
        read(text, columns=ColumnNames(labels=("kind",)))
    [listing] = read(text, columns=ColumnNames(labels=("3",)))
    assert listing.classes == ("u", "v")


def test_column_options_without_a_table_are_refused(tmp_path: Path, read: Read) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "folder" / name).mkdir(parents=True)
        (tmp_path / "folder" / name / "1.png").write_bytes(encoded(1))
    with pytest.raises(DataError, match=r"--label-column kind names a column of a table .* drop --label-column"):
        found(tmp_path / "folder", tmp_path, columns=ColumnNames(labels=("kind",)))
    pack(tmp_path / "folder", tmp_path / "out")
    with pytest.raises(DataError, match="has its labels in it: drop --label-column"):
        prepare(tmp_path / "out.rec", label_column="kind")


def test_columns_are_named_in_python_and_in_the_recipe(tmp_path: Path, read: Read) -> None:
    read(WIDE, columns=ColumnNames(labels=("kind",)))
    path = tmp_path / "a.csv"
    named: dict[str, Any] = {"path_column": "alt", "label_column": "colour"}
    named["split_column"] = "fold:val=train"
    [packed] = st.pack(path, tmp_path / "packed", **named)
    assert packed.card.classes == ("blue", "red")
    with Unpacked.open(path, **named) as opened:
        assert (opened.classes, opened.name(0)) == (("blue", "red"), "b.png")
    assert examine_source(path, **named).classes == {"blue": 2, "red": 2}
    first = prepare(path, **named, cache=tmp_path / "cache")
    other = {"path_column": "alt", "label_column": ["kind"], "split_column": "none"}
    second = prepare(path, **other, cache=tmp_path / "cache")  # type: ignore[arg-type]
    cards = [card_of(prepared.train) for prepared in (first, second)]
    assert [card.classes for card in cards if card] == [("blue", "red"), ("x", "y")]
    data = Data(train=path, label_column="colour")  # type: ignore[arg-type]
    assert data.label_column == ("colour",)
    recipe = Recipe.from_dict({"data": {"train": "a.csv", "label_column": ["x", "y"]}, "model": {"name": "mlp"}})
    assert Recipe.from_dict(recipe.to_dict()) == recipe
    with pytest.raises(RecipeError, match=r"data\.split_column is 7"):
        Data(train=path, split_column=7)  # type: ignore[arg-type]


def test_json_of_another_kind_is_no_table(tmp_path: Path) -> None:
    assert is_json_lines(b'{"image": "' + b"x" * 1000)
    assert not is_json_lines(b'{\n "kind": "steadytrain.card"')
    (tmp_path / "a.jsonl").write_text('{"image": "a.jpg", "label": "x"}\n[1]\n')
    with pytest.raises(DataError, match="line 2 is not a JSON object"):
        found(tmp_path / "a.jsonl", tmp_path)


@pytest.mark.parametrize("head", ["image_a,image_b,animal\n", "left,right,same\n", ""])
def test_error_asks_which_of_two_image_columns_is_the_path(read: Read, head: str) -> None:
    text = head + "a.png,b.png,cat\nc.png,d.png,dog\n"
    with pytest.raises(DataError, match=r"2 columns hold names of images: say which one .* --path-column"):
        read(text)
    [listing] = read(text, columns=ColumnNames(path="2"))
    assert labelled(listing) == {"b.png": "cat", "d.png": "dog"}


def test_a_table_of_test_images_beside_folders_of_classes_is_named(tmp_path: Path) -> None:
    for number, place in enumerate(("Train/0/1.png", "Train/1/1.png", "Test/1.png")):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_bytes(encoded(number))
    (tmp_path / "Test.csv").write_text("Path,ClassId\nTest/1.png,1\n")
    said: list[str] = []
    [listing] = found(tmp_path, tmp_path / ".scratch", said)
    assert len(listing) == 2
    file = tmp_path / "Test.csv"
    assert f"{file} is not trained on: steady evaluate RUN {file} measures on its images" in said


def with_column(name: str, *values: str, label: str = "label") -> str:
    """A table of the four images, with a column of its own for the label and for these values."""
    rows = zip(NAMES, ("cat", "dog", "cat", "dog"), values, strict=True)
    return table(f"path,{label},{name}", *(f"{image}.png,{kind},{value}" for image, kind, value in rows))


@pytest.mark.parametrize("name", ["split", "Usage", "tvt", "data type", "in which"])
def test_words_for_splits_alone_are_read_whatever_the_column_is_called(read: Read, name: str) -> None:
    parts = read(with_column(name, "train", "Validation", "TEST", "train"))
    assert {part.split: part.names for part in parts} == {
        "train": ["a.png", "d.png"],
        "val": ["b.png"],
        "test": ["c.png"],
    }


UNCLEAR = {
    "FER2013": ("Usage", ("Training", "Training", "PublicTest", "PrivateTest"), 5, "PrivateTest=test,PublicTest=test"),
    "words under any name": ("purpose", ("training", "training", "testing1", "eval"), 5, "eval=val,testing1=test"),
    "a flag": ("is_train", ("1", "1", "1", "0"), 5, "0=test,1=train"),
    "a flag in one word": ("isTraining", ("yes", "yes", "no", "yes"), 4, "no=test,yes=train"),
    "fastai": ("is_valid", ("False", "True", "False", "True"), 2, "False=train,True=val"),
    "the name of a split": ("test", ("0", "0", "1", "1"), 2, "0=train,1=test"),
    "two names of splits": ("train_test", ("0", "0", "1", "1"), 2, "0=train,1=val"),
    "CelebA": ("partition", ("0", "0", "1", "2"), 2, "0=train,1=val,2=test"),
    "numbers that pandas wrote": ("partition", ("0.0", "0.0", "1.0", ""), 5, "=train,0.0=val,1.0=test"),
    "folds called splits": ("cv_split", ("0", "1", "2", "3"), 2, "0=train,1=val,2=test,3=none"),
    "abbreviations": ("split", ("tr", "tr", "te", "va"), 4, "te=test,tr=train,va=val"),
    "abbreviations under any name": ("side", ("tr", "tr", "te", "te"), 4, "te=test,tr=train"),
    "one word more": ("subset", ("train", "val", "test", "extra"), 5, "extra=none"),
    "one word for a split": ("set", ("train", "train", "extra", "extra"), 4, "extra=none"),
    "an empty cell": ("set", ("train", "val", "test", ""), 5, "=none"),
    "years": ("split", ("train2017", "train2017", "val2017", "val2017"), 2, "train2017=train,val2017=val"),
}


@pytest.mark.parametrize("case", UNCLEAR)
def test_a_column_that_may_tell_the_splits_is_refused_and_read_as_the_message_says(read: Read, case: str) -> None:
    name, values, line, meanings = UNCLEAR[case]
    text = with_column(name, *values)
    with pytest.raises(DataError) as error:
        read(text)
    message = str(error.value)
    assert (
        f"a.csv: line {line}: the column '{name}' holds '{values[line - 2]}'; it must be train, val or test" in message
    )
    assert f"--split-column {name}:{meanings} (none: not used), or --split-column none if" in message
    parts = read(text, columns=ColumnNames(split=f"{name}:{meanings}"))
    assert (parts[0].split, sum(map(len, parts))) == ("train", 4 - meanings.count("none") * values.count(values[-1]))
    [listing] = read(text, columns=ColumnNames(split="none"))
    assert (listing.split, len(listing)) == ("", 4)


SOUND = {
    "a class that is called like a split": ("scene", ("bus", "train", "plane", "train")),
    "groups of a trial": ("group", ("control", "test", "control", "test")),
    "sets of images": ("dataset", ("ISIC", "PH2", "ISIC", "PH2")),
    "folds": ("fold", ("0", "1", "2", "3")),
    "a flag of something else": ("male", ("0", "1", "0", "1")),
    "a word for a split and one for what is seen": ("train_station", ("0", "1", "0", "1")),
    "languages": ("lang", ("tr", "te", "hi", "tr")),
    "states, Delaware and Virginia": ("state", ("DE", "VA", "DE", "VA")),
    "one value": ("vehicle", ("train", "train", "train", "train")),
    "nothing": ("split", ("", "", "", "")),
}


@pytest.mark.parametrize("case", SOUND)
def test_other_columns_are_left_alone(read: Read, case: str) -> None:
    said: list[str] = []
    [listing] = read(with_column(SOUND[case][0], *SOUND[case][1]), said)
    assert (listing.split, listing.classes, len(listing)) == ("", ("cat", "dog"), 4)
    assert any(f"not from {SOUND[case][0]}" in line for line in said)


@pytest.mark.parametrize(
    ("text", "classes"),
    [
        ("path,set\na.png,one\nb.png,two\nc.png,one\n", ("one", "two")),
        ("path,dataset\na.png,bus\nb.png,train\nc.png,plane\n", ("bus", "plane", "train")),
        ("path,type\na.png,bus\nb.png,train\nc.png,bus\n", ("bus", "train")),
        ("path,is_train\na.png,0\nb.png,1\nc.png,0\n", ("0", "1")),
        ("path,label,set\na.png,train,1\nb.png,test,1\nc.png,train,1\n", ("test", "train")),
    ],
)
def test_the_only_column_is_the_label_whatever_it_is_called(read: Read, text: str, classes: tuple[str, ...]) -> None:
    [listing] = read(text)
    assert (listing.split, listing.classes) == ("", classes)


def test_a_split_among_columns_of_zeros_and_ones_is_asked_about(read: Read) -> None:
    [vehicles] = read("path,car,bus,train\na.png,0,1,0\nb.png,1,0,0\nc.png,0,0,1\n")
    assert vehicles.label_names == ("car", "bus", "train")
    flags = "path,cat,dog,is_valid\na.png,0,1,0\nb.png,1,0,0\nc.png,1,0,1\n"
    with pytest.raises(DataError, match=r"the column 'is_valid' holds '0'.* --split-column is_valid:0=train,1=val"):
        read(flags)
    train, val = read(flags, columns=ColumnNames(split="is_valid:0=train,1=val"))
    assert (train.label_names, train.names, val.names) == (("cat", "dog"), ["a.png", "b.png"], ["c.png"])


def test_splits_far_down_a_sorted_table_are_found(read: Read, tmp_path: Path) -> None:
    rows = [f"a.png?{number},cat,{{}}\nb.png?{number},dog,{{}}\n" for number in range(200)]
    for name, word in (("Usage", "PublicTest"), ("purpose", "PublicTest"), ("tvt", "test?")):
        body = "".join(row.format("Training", "Training") for row in rows)
        with pytest.raises(DataError, match=rf"line 402: the column '{name}' holds .* --split-column .*=test") as error:
            read(f"path,label,{name}\n{body}c.png,dog,{word}\n")
        assert word in str(error.value)
    train, val = read(f"path,label,tvt\n{body}c.png,dog,test\n")
    assert (len(train), val.names) == (400, ["c.png"])


@pytest.mark.parametrize("values", ["train val extra", "Training PublicTest PrivateTest", "tr tr te"])
def test_a_column_of_splits_beside_folders_of_classes_is_asked_about(tmp_path: Path, values: str) -> None:
    rows = zip(("cat/1.png", "dog/1.png", "cat/2.png"), values.split(), strict=True)
    for number, name in enumerate(("cat/1.png", "dog/1.png", "cat/2.png")):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(encoded(number))
    (tmp_path / "a.csv").write_text("".join(f"{a},{b}\n" for a, b in [("path", "Split"), *rows]))
    with pytest.raises(DataError, match=r"the column 'Split' holds .* it must be train, val or test"):
        found(tmp_path / "a.csv", tmp_path / "scratch")


def test_numbers_of_folds_are_no_label_beside_another(read: Read) -> None:
    [listing] = read("path,fold,cat,dog\na.png,0,0,1\nb.png,1,1,0\nc.png,2,1,1\nd.png,0,0,1\n")
    assert listing.label_names == ("cat", "dog")
    train, val = read("path,fold,cat,dog\na.png,train,0,1\nb.png,train,1,0\nc.png,val,1,1\n")
    assert (train.label_names, val.names) == (("cat", "dog"), ["c.png"])
    [listing] = read("id,path,kfold,kind\n7,a.png,0,cat\n8,b.png,1,dog\n9,c.png,0,dog\n")
    assert listing.classes == ("cat", "dog")
    [listing] = read("id,path,fold\n7,a.png,crease\n8,b.png,flat\n9,c.png,flat\n")
    assert listing.classes == ("crease", "flat")


def test_an_index_without_a_name_is_no_label(read: Read) -> None:
    [listing] = read(",path,car,train\n0,a.png,0,1\n1,b.png,1,0\n2,c.png,1,1\n3,d.png,0,1\n")
    assert listing.label_names == ("car", "train")


def test_two_columns_of_splits_are_named(read: Read) -> None:
    text = table(
        "path,label,first,second", *(f"{n}.png,{n},{s},{s}" for n, s in zip(NAMES, ["train", "val"] * 2, strict=True))
    )
    with pytest.raises(DataError, match="columns first, second each tell the splits: choose with --split-column"):
        read(text)
    assert [part.split for part in read(text, columns=ColumnNames(split="second"))] == ["train", "val"]
    [train, *_] = read(text.replace("first", "split"))
    assert train.split == "train"


@pytest.mark.parametrize("values", [("train, small", "val, small"), ("train=full", "val=full"), ("train", "val's")])
@pytest.mark.parametrize("name", ["purpose", "a=b"])
def test_values_with_commas_and_other_signs_are_read_as_the_message_says(
    read: Read, name: str, values: tuple[str, str]
) -> None:
    text = with_column(name, *(f'"{value}"' for value in values * 2))
    with pytest.raises(DataError) as error:
        read(text)
    _, option = shlex.split(str(error.value).split("as ")[1].split(" (none:")[0])
    train, val = read(text, columns=ColumnNames(split=option))
    assert (train.split, len(train), len(val)) == ("train", 2, 2)
    named = text.replace(f'"{values[0]}"', "train").replace(f'"{values[1]}"', "val")
    assert [part.split for part in read(named, columns=ColumnNames(split=name))] == ["train", "val"]


def test_meanings_that_are_no_splits_are_refused(read: Read) -> None:
    text = with_column("Usage", "Training", "Training", "PublicTest", "PrivateTest")
    with pytest.raises(
        DataError, match="--split-column Usage:PublicTest=dev2 means 'dev2'; it must be train, val, test or"
    ):
        read(text, columns=ColumnNames(split="Usage:PublicTest=dev2"))
    with pytest.raises(
        DataError, match=r"--split-column Usage holds 'PrivateTest'.* Usage:PrivateTest=test,PublicTest=val "
    ):
        read(text, columns=ColumnNames(split="Usage:PublicTest=val"))
    parts = read(text, columns=ColumnNames(split="3:PublicTest=Validation, PrivateTest=none"))
    assert [(part.split, part.names) for part in parts] == [("train", ["a.png", "b.png"]), ("val", ["c.png"])]


@pytest.mark.parametrize("name", ["part: of what", "a:b:c", "Part:"])
def test_the_name_of_a_column_with_meanings_may_hold_colons(read: Read, name: str) -> None:
    text = with_column(name, "A", "A", "A", "B")
    train, val = read(text, columns=ColumnNames(split=f"{name}:A=train,B=val"))
    assert (train.split, len(train), val.split, len(val)) == ("train", 3, "val", 1)


def test_meanings_of_splits_work_wherever_data_are_named(tmp_path: Path, read: Read) -> None:
    meanings = "Usage:PublicTest=val,PrivateTest=test"
    read(with_column("Usage", "Training", "Training", "PublicTest", "PrivateTest"), columns=ColumnNames(split=meanings))
    path = tmp_path / "a.csv"
    packed = st.pack(path, tmp_path / "packed", split_column=meanings)
    assert [(file.path.name, file.card.num_images) for file in packed] == [
        ("packed-train.rec", 2),
        ("packed-val.rec", 1),
        ("packed-test.rec", 1),
    ]
    assert examine_source(path, split_column=meanings).is_usable
    assert not examine_source(path).is_usable
    prepared = prepare(path, split_column=meanings, cache=tmp_path / "cache")
    assert prepared.val is not None and prepared.val != prepared.train
    recipe = Recipe.from_dict({"data": {"train": str(path), "split_column": meanings}, "model": {"name": "mlp"}})
    with closing(open_named(Recipe.from_json(recipe.to_json()).data)) as opened:
        assert (len(opened.train), opened.val and len(opened.val)) == (2, 1)
    with Unpacked.open(path, split="test", split_column=meanings) as unpacked:
        assert unpacked.name(0) == "d.png"


@pytest.mark.parametrize(
    ("values", "option"),
    [
        (("fit", "fit", "validation", "test"), "3:fit=train"),
        (("UNASSIGNED", "", "TEST", "TEST"), "3:=val,UNASSIGNED=train"),
    ],
)
def test_words_for_two_splits_or_one_without_a_header_are_asked_about(
    read: Read, values: tuple[str, ...], option: str
) -> None:
    rows = "".join(f"{name}.png,{'xy'[n % 2]},{values[n]}\n" for n, name in enumerate(NAMES))
    with pytest.raises(DataError, match=f"--split-column {option}") as refused:
        read(rows, columns=ColumnNames(labels=("2",)))
    typed = shlex.split(str(refused.value).partition("--split-column ")[2])[0]
    train, *_ = read(rows, columns=ColumnNames(labels=("2",), split=typed))
    assert train.split == "train"
    if "fit" in values:
        with pytest.raises(DataError, match="--split-column stage:fit=train"):
            read(f"path,label,stage\n{rows}")


def test_splits_in_another_language_are_guessed_by_their_order_and_shown(read: Read) -> None:
    values = ("entrenamiento", "entrenamiento", "validacion", "prueba")
    rows = "".join(
        f"{name}.png,{'xy'[n % 2]},{value}\n" for n, (name, value) in enumerate(zip(NAMES, values, strict=True))
    )
    with pytest.raises(DataError, match="split:entrenamiento=train,prueba=test,validacion=val"):
        read(f"path,label,split\n{rows}")
    said: list[str] = []
    read(f"path,label,conjunto\n{rows}", said)
    assert said[0].endswith("not from conjunto (entrenamiento, prueba, validacion)")


def test_values_in_objects_of_json_lines_are_columns(read: Read) -> None:
    rows = [{"image": f"{name}.png", "label": {"id": n, "name": "xy"[n % 2]}} for n, name in enumerate(NAMES)]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    with pytest.raises(DataError, match=r"columns: image, label\.id, label\.name"):
        read(text, name="a.jsonl")
    [listing] = read(text, name="a.jsonl", columns=ColumnNames(labels=("label.name",)))
    assert (listing.classes, listing.labels.tolist()) == (("x", "y"), [0, 1, 0, 1])


def test_a_key_that_the_first_object_lacks_is_a_column(read: Read) -> None:
    rows = [{"image": f"{name}.png"} | ({"label": "x"} if n else {}) for n, name in enumerate(NAMES)]
    with pytest.raises(DataError, match="line 1: the label is empty"):
        read("".join(f"{json.dumps(row)}\n" for row in rows), name="a.jsonl")


def test_values_in_objects_of_json_lines_are_no_labels_beside_others(read: Read) -> None:
    for flat in ({"kind": "x"}, {"cat": 1, "dog": 0}):
        rows = [
            {"photo": f"{name}.png", **flat, "raw": {"file": f"{n}.png", "score": n}} for n, name in enumerate(NAMES)
        ]
        rows[0] |= {"kind": "y"} if "kind" in flat else {"cat": 0}
        [listing] = read("".join(f"{json.dumps(row)}\n" for row in rows), name="a.jsonl")
        assert listing.labels.tolist() == ([1, 0, 0, 0] if "kind" in flat else [[0, 0], [1, 0], [1, 0], [1, 0]])
