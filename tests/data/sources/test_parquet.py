"""Hugging Face's Parquet folders and saved sets: the same images, labels, names and splits as a folder of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.packing.pictures import write_folder
from tests.data.sources.samples import content, encoded, found, write_tar

from steadytrain.data.packing.pack import pack
from steadytrain.data.packing.prepare import prepare
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.columns import ColumnNames
from steadytrain.data.sources.find import source_name
from steadytrain.data.sources.listing import Listing
from steadytrain.data.sources.unpacked import Unpacked
from steadytrain.errors import DataError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
NAMES = ["zebra", "ant", "cow"]  # in an order of their own, as the hub's are


def _label(names: Sequence[str] = NAMES) -> dict[str, Any]:
    return {"names": list(names), "_type": "ClassLabel"}


def _table(
    columns: Mapping[str, Any], features: Mapping[str, Any] | None = None, types: Mapping[str, Any] | None = None
) -> Any:
    """A table with the metadata that ``datasets`` writes: the features of its columns."""
    types = {"image": IMAGE, "img": IMAGE, "label": pa.int64()} | dict(types or {})
    schema = pa.schema([(name, types.get(name, pa.int64())) for name in columns])
    if features is not None:
        info = {"info": {"features": {"image": {"_type": "Image"}, **features}}}
        schema = schema.with_metadata({"huggingface": json.dumps(info)})
    return pa.table(dict(columns), schema=schema)


def _images(count: int, first: int = 0, *, named: bool = True) -> list[dict[str, Any]]:
    return [{"bytes": encoded(first + n), "path": f"{first + n:04}.png" if named else None} for n in range(count)]


def _write(path: Path, table: Any, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path


def _part(path: Path, count: int, first: int = 0, **options: Any) -> Path:
    labels = [(first + n) % 3 for n in range(count)]
    return _write(path, _table({"image": _images(count, first), "label": labels}, {"label": _label()}), **options)


def test_files_of_the_hub_are_packed_as_a_folder_of_the_same_images(tmp_path: Path) -> None:
    folder, hub = tmp_path / "folder", tmp_path / "hub"
    for split in ("train", "validation", "test"):
        write_folder(folder / split, {"ant": 3, "cow": 2, "zebra": 4})
        files = [*sorted((folder / split).rglob("*.png"))]
        rows = [{"bytes": file.read_bytes(), "path": file.name} for file in files]
        labels = [NAMES.index(file.parent.name) for file in files]
        for shard, part in enumerate((slice(0, 5), slice(5, None))):
            table = _table({"image": rows[part], "label": labels[part]}, {"label": _label()})
            _write(hub / "data" / f"{split}-0000{shard}-of-00002.parquet", table, row_group_size=2)
    packed = {}
    for source in (folder, hub):
        pack(source, tmp_path / f"{source.name}.rec", say=lambda _: None)
        for split in ("train", "val", "test"):
            with Records.open(tmp_path / f"{source.name}-{split}.rec") as records:
                names = [records.card.classes[int(label)] for label in records.labels]  # type: ignore[union-attr]
                packed[source.name, split] = [
                    (int(records.record_ids[n]), names[n], bytes(records.image(n))) for n in range(len(records))
                ]
    for split in ("train", "val", "test"):
        assert packed["hub", split] == packed["folder", split]
        assert len(packed["hub", split]) == 9


@pytest.mark.parametrize(
    ("names", "split"),
    [
        (["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"], "test"),
        (["data/train-00000-of-00001-b42526cd3b3e.parquet", "data/valid-00000-of-00001-1b42526cd3b3.parquet"], "val"),
        (["default/train/0000.parquet", "default/validation/0000.parquet"], "val"),
        (["plain_text/train/0000.parquet", "plain_text/test/0000.parquet"], "test"),
        (["plain_text/cifar10-train.parquet", "plain_text/cifar10-test.parquet"], "test"),
        (["train.parquet", "dev.parquet"], "val"),
        (["data/partial-train/0000.parquet", "data/partial-test/0000.parquet"], "test"),
    ],
)
def test_names_of_files_and_folders_say_the_split(tmp_path: Path, names: list[str], split: str) -> None:
    hub = tmp_path / "hub"
    for number, name in enumerate(names):
        _part(hub / name, 4 + number, 10 * number)
    (hub / "README.md").write_text("# a card without a head\n")
    (hub / "assets").mkdir()
    (hub / "assets" / "banner.png").write_bytes(encoded(99))
    (hub / "logo.png").write_bytes(encoded(98))
    train, other = found(hub, tmp_path / "scratch")
    assert [(part.split, len(part), part.classes) for part in (train, other)] == [
        ("train", 4, ("zebra", "ant", "cow")),
        (split, 5, ("zebra", "ant", "cow")),
    ]
    assert train.labels.tolist() == [0, 1, 2, 0]
    assert list(other.names) == ["0010.png", "0011.png", "0012.png", "0013.png", "0014.png"]
    assert [content(other, number) for number in range(5)] == [encoded(10 + number) for number in range(5)]
    [alone] = found(hub / names[0], tmp_path / "other")
    assert (alone.split, alone.labels.tolist()) == ("", train.labels.tolist())


def test_a_pattern_names_shards(tmp_path: Path) -> None:
    for shard in range(3):
        _part(tmp_path / f"data/train-0000{shard}-of-00003.parquet", 3, 3 * shard)
    [listing] = found(tmp_path / "data/train-*.parquet", tmp_path / "scratch")
    assert list(listing.names) == [f"{n:04}.png" for n in range(9)]


def test_what_is_of_no_split_is_left_out_and_a_missing_shard_is_told(tmp_path: Path) -> None:
    hub, messages = tmp_path / "hub", list[str]()
    for name in ("train-00000-of-00002", "test-00000-of-00001", "extra-00000-of-00001"):
        _part(hub / "cropped_digits" / f"{name}.parquet", 6)
    train, val = found(hub, tmp_path / "scratch", messages)
    assert (len(train), len(val)) == (6, 6)
    assert any("train-00001-of-00002.parquet" in line and "missing" in line for line in messages)
    assert any("left out: extra-00000-of-00001.parquet" in line for line in messages)


@pytest.mark.parametrize("names", [["a/train.parquet", "b/train.parquet"], ["validation.parquet", "test.parquet"]])
def test_several_sets_are_refused(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        _part(tmp_path / "hub" / name, 3)
    with pytest.raises(DataError, match="holds several sets, or splits and none to train with"):
        found(tmp_path / "hub", tmp_path / "scratch")


def test_images_without_names_are_called_by_file_and_row(tmp_path: Path) -> None:
    rows = [*_images(2, named=False), {"bytes": encoded(2), "path": "a.png"}, {"bytes": encoded(3), "path": "a.png"}]
    table = _table({"img": rows, "label": [0, 1, 2, 0]}, {"label": _label()})
    [listing] = found(_write(tmp_path / "x-train.parquet", table), tmp_path / "scratch")
    assert list(listing.names) == ["x-train.parquet:0", "x-train.parquet:1", "a.png", "x-train.parquet:3"]


@pytest.mark.parametrize(
    ("column", "kind", "labels", "classes"),
    [
        ("label", pa.string(), ["dog", "cat", "dog"], ("cat", "dog")),
        ("label", pa.large_string(), ["dog", "cat", "dog"], ("cat", "dog")),
        ("species", pa.dictionary(pa.int32(), pa.string()), ["dog", "cat", "dog"], ("cat", "dog")),
        ("label", pa.int32(), [1, 0, 1], ("0", "1")),
        ("label", pa.float64(), [1.0, 0.0, 1.0], ("0", "1")),
        ("is_cat", pa.bool_(), [True, False, True], ("False", "True")),
    ],
)
def test_labels_without_names_are_words_or_numbers(
    tmp_path: Path, column: str, kind: Any, labels: list[Any], classes: tuple[str, ...]
) -> None:
    images = [encoded(number) for number in range(3)]  # pandas and polars write plain bytes
    table = _table({"image": images, column: labels}, types={"image": pa.binary(), column: kind})
    [listing] = found(_write(tmp_path / "a.parquet", table), tmp_path / "scratch")
    assert (listing.classes, listing.labels.tolist()) == (classes, [1, 0, 1])
    assert [content(listing, number) for number in range(3)] == images


CARD = """---
license: mit
dataset_info:
{}
---
# The set
"""
FEATURES = """{0}features:
{0}- name: image
{0}  dtype: image
{0}- name: label
{0}  dtype:
{0}    class_label:
{0}      names:
{0}        '0': {1}
{0}        '1': ant
{0}        '2': cow
"""


@pytest.mark.parametrize(
    "infos",
    [
        FEATURES.format("  ", "zebra"),
        "- config_name: other\n"
        + FEATURES.format("  ", "gnu")
        + "- config_name: plain\n"
        + FEATURES.format("  ", "zebra"),
        "- config_name: plain\n"
        + FEATURES.format("  ", "zebra")
        + "- config_name: other\n"
        + FEATURES.format("  ", "gnu"),
    ],
)
def test_the_card_names_the_classes_where_the_files_do_not(tmp_path: Path, infos: str) -> None:
    table = _table({"image": _images(3), "label": [2, 0, 1]})
    path = _write(tmp_path / "hub" / "plain" / "train-00000-of-00001.parquet", table)
    (tmp_path / "hub" / "README.md").write_text(CARD.format(infos))
    for source in (tmp_path / "hub", path):
        [listing] = found(source, tmp_path / "scratch")
        assert (listing.classes, listing.labels.tolist()) == (("zebra", "ant", "cow"), [2, 0, 1])


def test_label_column_chooses_among_several(tmp_path: Path) -> None:
    features = {"fine_label": _label(["oak", "elm", "cod"]), "coarse_label": _label(["tree", "fish"])}
    table = _table({"img": _images(3), "fine_label": [0, 1, 2], "coarse_label": [0, 0, 1]}, features)
    path = _write(tmp_path / "cifar100" / "train-00000-of-00001.parquet", table)
    with pytest.raises(DataError, match="fine_label, coarse_label for labels: give one by --label-column"):
        found(path, tmp_path / "scratch")
    with Unpacked.open(path.parent, label_column="coarse_label", say=lambda _: None) as images:
        assert (images.classes, images.labels.tolist(), images.image(2)) == (("tree", "fish"), [0, 0, 1], encoded(2))
        assert images.listing.label_column == "coarse_label"
    prepared = prepare(path.parent, label_column="fine_label", cache=tmp_path / "cache", workers=1, say=lambda _: None)
    with Records.open(prepared.train) as records:
        assert records.card is not None and records.card.classes == ("oak", "elm", "cod")


def test_several_labels_of_an_image_are_vectors(tmp_path: Path) -> None:
    table = _table(
        {"image": _images(3), "labels": [[0, 2], [], [1]]},
        {"labels": {"feature": _label(), "_type": "List"}},
        {"labels": pa.list_(pa.int64())},
    )
    [listing] = found(_write(tmp_path / "a.parquet", table), tmp_path / "scratch")
    assert listing.label_names == ("zebra", "ant", "cow")
    assert listing.labels.tolist() == [[1, 0, 1], [0, 0, 0], [0, 1, 0]]


def test_a_test_set_without_labels_is_skipped(tmp_path: Path) -> None:
    hub, messages = tmp_path / "hub", list[str]()
    for split in ("train", "validation"):
        _part(hub / f"{split}-00000-of-00001.parquet", 6)
    table = _table({"image": _images(3), "label": [-1, -1, -1]}, {"label": _label()})
    _write(hub / "test-00000-of-00001.parquet", table)
    assert [part.split for part in found(hub, tmp_path / "scratch", messages)] == ["train", "val"]
    assert any("skipped: " in line and "has no label" in line for line in messages)
    _write(hub / "test-00000-of-00001.parquet", _table({"image": _images(3)}))
    assert [part.split for part in found(hub, tmp_path / "scratch", messages)] == ["train", "val"]


def test_validation_data_have_the_classes_of_the_training_data(tmp_path: Path) -> None:
    _part(tmp_path / "a" / "train.parquet", 6)
    labels = {"label": _label(["cow", "zebra"])}
    val = _write(tmp_path / "b" / "val.parquet", _table({"image": _images(2, 50), "label": [0, 1]}, labels))
    [listing] = found(val, tmp_path / "scratch", classes=("zebra", "ant", "cow"))
    assert (listing.classes, listing.labels.tolist()) == (("zebra", "ant", "cow"), [2, 0])


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_what_datasets_saved_to_disk_is_read(tmp_path: Path, size: int) -> None:
    for split, count in (("train", 70), ("test", 5)):
        folder = tmp_path / "saved" / split
        folder.mkdir(parents=True)
        table = _table({"image": _images(count), "label": [n % 3 for n in range(count)]}, {"label": _label()})
        with (
            pa.OSFile(str(folder / "data-00000-of-00001.arrow"), "wb") as file,
            pa.ipc.new_stream(file, table.schema) as to,
        ):
            to.write_table(table, max_chunksize=size)
        (folder / "state.json").write_text('{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
        (folder / "dataset_info.json").write_text("{}")
        (folder / "cache-0123.arrow").write_bytes(b"what a map kept")
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    train, val = found(tmp_path / "saved", tmp_path / "scratch")
    assert (len(train), len(val), train.classes) == (70, 5, ("zebra", "ant", "cow"))
    assert [content(train, number) for number in (0, 33, 69)] == [encoded(number) for number in (0, 33, 69)]


def _bad_rows(rows: list[Any], labels: list[Any], features: Any = None) -> Any:
    return _table({"image": rows, "label": labels}, features)


WRONG: dict[str, tuple[Any, str]] = {
    "no label": (
        _bad_rows(_images(3), [0, None, 1], {"label": _label()}),
        r"a\.parquet:1, in the column label, has no label",
    ),
    "minus one": (
        _bad_rows(_images(3), [0, 1, -1], {"label": _label()}),
        r"a\.parquet:2, in the column label, has no label",
    ),
    "too large": (
        _bad_rows(_images(3), [0, 1, 7], {"label": _label()}),
        r"a\.parquet:2.* has label 7, beyond its 3 classes",
    ),
    "paths": (_bad_rows([{"bytes": None, "path": "/a/1.png"}] * 2, [0, 1]), r"a\.parquet:0 has an image's path"),
    "no rows": (_bad_rows([], []), "has no rows"),
    "no label column": (
        _table({"image": _images(3)}),
        r"no column for labels: give one by --label-column \(the columns: image",
    ),
    "two images": (
        _table({"image": _images(2), "mask": _images(2), "label": [0, 1]}, types={"mask": IMAGE}),
        "image, mask for images, .*: give one by --path-column",
    ),
    "numbers": (
        _table({"image": [[1, 2]] * 2, "label": [0, 1]}, types={"image": pa.list_(pa.uint8())}),
        "no column for images, bytes or a struct of bytes and a path: .*image list<",
    ),
    "paths as texts": (
        _table({"file_name": ["a.png", "b.png"], "label": [0, 1]}, types={"file_name": pa.string()}),
        "none of the 2 paths in .* exists",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_mistakes_are_told_by_file_row_and_column(tmp_path: Path, case: str) -> None:
    table, message = WRONG[case]
    with pytest.raises(DataError, match=message):
        found(_write(tmp_path / "a.parquet", table), tmp_path / "scratch")


@pytest.mark.parametrize("place", ["beside them", "as labels", "in an archive"])
def test_a_table_of_paths_and_labels_is_read_as_a_csv_would_be(tmp_path: Path, place: str) -> None:
    images = tmp_path / "images"
    images.mkdir()
    for number in range(6):
        (images / f"{number}.png").write_bytes(encoded(number))
    columns = {"file_name": [f"{number}.png" for number in range(6)], "label": [number % 3 for number in range(6)]}
    table = _table(columns, {"label": _label()}, types={"file_name": pa.string()})
    inside = place in ("beside them", "in an archive")
    path = _write(images / "metadata.parquet" if inside else tmp_path / "labels.parquet", table)
    options: dict[str, Any] = {}
    source: Path = images
    if place == "as labels":
        options = {"labels": path}
    elif place == "in an archive":
        source = write_tar(
            tmp_path / "images.tar", {f"images/{file.name}": file.read_bytes() for file in sorted(images.iterdir())}
        )
    [listing] = found(source, tmp_path / "scratch", **options)
    assert listing.classes == ("ant", "cow", "zebra")
    assert [listing.classes[label] for label in listing.labels] == [NAMES[number % 3] for number in range(6)]


def test_a_column_of_images_can_be_named(tmp_path: Path) -> None:
    columns = {"image": _images(2), "mask": _images(2, 40), "label": [0, 1]}
    path = _write(tmp_path / "a.parquet", _table(columns, types={"mask": IMAGE}))
    with Unpacked.open(path, path_column="mask", say=lambda _: None) as images:
        assert images.image(0) == encoded(40)


def test_rows_without_an_image_are_left_out_as_they_are_packed(tmp_path: Path) -> None:
    rows = [*_images(3), None, {"bytes": None, "path": None}]
    path = _write(tmp_path / "a.parquet", _bad_rows(rows, [0, 1, 2, 0, 1], {"label": _label()}))
    [file] = pack(path, tmp_path / "out.rec", workers=1, say=lambda _: None)
    assert len(file.card.rejected) == 2 and file.card.rejected[0].name == "a.parquet:3"
    assert "empty" in file.card.rejected[0].reason


@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_files_that_were_cut_short_or_were_never_fetched_are_refused(tmp_path: Path, share: float) -> None:
    path = _part(tmp_path / "train-00000-of-00001.parquet", 9)
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    with pytest.raises(DataError, match=r"is damaged or cut short .*: copy or download it again"):
        found(path, tmp_path / "scratch")
    path.write_bytes(data[: len(data) // 2] + bytes(64) + data[len(data) // 2 + 64 :])  # a page
    with pytest.raises(DataError, match=r"damaged|cannot"):
        listing = found(path, tmp_path / "scratch")[0]
        assert [content(listing, n) for n in range(9)] != [encoded(n) for n in range(9)]
        raise DataError("damaged pixels are for whoever decodes them")
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 120\n")
    with pytest.raises(DataError, match="a Git LFS pointer, not the data: fetch the data with git lfs pull"):
        found(tmp_path, tmp_path / "scratch")


def test_without_pyarrow_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _part(tmp_path / "train-00000-of-00001.parquet", 3)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"pip install 'steadytrain\[parquet\]'"):
        found(path, tmp_path / "scratch")


def test_the_copy_of_a_folder_is_used_again(tmp_path: Path) -> None:
    _part(tmp_path / "hub" / "data" / "train-00000-of-00001.parquet", 9)
    _part(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet", 3)
    options: dict[str, Any] = {"cache": tmp_path / "cache", "workers": 1}
    first = prepare(tmp_path / "hub", **options, say=lambda _: None)
    messages: list[str] = []
    assert prepare(tmp_path / "hub", **options, say=messages.append) == first
    assert [line for line in messages if "decompressing" in line] == []
    _part(tmp_path / "hub" / "data" / "test-00000-of-00001.parquet", 6)
    assert prepare(tmp_path / "hub", **options, say=messages.append) != first


def test_photographs_in_folders_of_classes_stay_classes(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos", {"cat": 2, "dog": 2})
    _part(tmp_path / "photos" / "features.parquet", 3)
    [listing] = found(tmp_path / "photos", tmp_path / "scratch")
    assert listing.classes == ("cat", "dog") and listing.pieces is None


def test_images_beside_their_table_and_shards_beside_what_tells_of_them_stay_so(tmp_path: Path) -> None:
    images, shards = tmp_path / "images", tmp_path / "shards"
    features = pa.table({"key": ["a"], "value": [0.5]})
    _write(images / "features.parquet", features)
    for number in range(2):
        (images / f"{number}.png").write_bytes(encoded(number))
    (images / "metadata.csv").write_text("file_name,label\n0.png,cat\n1.png,dog\n")
    [listing] = found(images, tmp_path / "scratch")
    assert (listing.classes, listing.names) == (("cat", "dog"), ["0.png", "1.png"])
    for number in range(2):  # as img2dataset writes them
        _write(shards / f"0000{number}.parquet", features)
        samples = {
            f"{number}{n}.{end}": data for n in range(2) for end, data in (("png", encoded(n)), ("cls", b"%d" % n))
        }
        write_tar(shards / f"0000{number}.tar", samples)
    [listing] = found(shards, tmp_path / "scratch")
    assert (listing.classes, len(listing)) == (("0", "1"), 4)


def test_order_and_memory_do_not_depend_on_groups_of_rows(tmp_path: Path) -> None:
    labels = [n % 3 for n in range(90)]
    table = _table({"image": _images(90), "label": labels}, {"label": _label()})
    listings: list[Listing] = []
    for options in ({"row_group_size": 7}, {"row_group_size": 90, "compression": "zstd"}, {"use_dictionary": False}):
        path = _write(tmp_path / f"{len(listings)}" / "train.parquet", table, **options)
        listings += found(path, tmp_path / "scratch" / f"{len(listings)}")
    for listing in listings:
        assert listing.ids is not None and listing.ids.tolist() == list(range(90))
        assert np.array_equal(listing.labels, labels)
        assert [content(listing, n) for n in range(90)] == [encoded(n) for n in range(90)]


def test_a_data_set_in_memory_is_told_how_to_be_saved() -> None:
    with pytest.raises(
        DataError, match=r"the data are a dict, and this takes the name of a folder or a file: save images"
    ):
        source_name({})


def test_a_column_of_splits_beside_images_is_honoured(tmp_path: Path) -> None:
    usage = ["Training", "Training", "PublicTest", "Other"]
    columns = {"image": _images(4), "label": [0, 1, 0, 1], "Usage": usage, "patient": ["p", "p", "q", "r"]}
    path = _write(tmp_path / "a.parquet", _table(columns, types={"Usage": pa.string(), "patient": pa.string()}))
    with pytest.raises(DataError, match="--split-column Usage:Other=none,PublicTest=test"):
        found(path, tmp_path / "s")
    named = ColumnNames(split="Usage:Other=none,PublicTest=test")
    train, test = found(path, tmp_path / "s", columns=named, group="patient")
    assert (train.split, train.names, list(train.groups or ())) == ("train", ["0000.png", "0001.png"], ["p", "p"])
    assert (test.split, test.names, test.labels.tolist()) == ("test", ["0002.png"], [0])


def test_a_table_of_paths_is_read_as_any_table(tmp_path: Path) -> None:
    names = [f"im/{number}.png" for number in range(6)]
    (tmp_path / "im").mkdir()
    for number, name in enumerate(names):
        (tmp_path / name).write_bytes(encoded(number))
    columns = {"path": names, "label": ["x", "y"] * 3, "split": ["train"] * 4 + ["test"] * 2}
    path = _write(tmp_path / "a.parquet", pa.table(columns))
    train, test = found(path, tmp_path / "s")
    assert (train.names, train.classes, train.labels.tolist()) == (names[:4], ("x", "y"), [0, 1, 0, 1])
    assert (test.split, test.names) == ("test", names[4:])
    moved = path.rename(tmp_path / "im" / "a.parquet")
    assert found(moved, tmp_path / "s", root=tmp_path)[0].names == names[:4]


def test_a_column_of_texts_that_is_named_for_the_images_is_refused(tmp_path: Path) -> None:
    columns = {"image": _images(2), "file_name": ["a.png", "b.png"], "label": [0, 1]}
    path = _write(tmp_path / "a.parquet", _table(columns, types={"file_name": pa.string()}))
    with pytest.raises(DataError, match=r"no column for images, .*: give one by --path-column"):
        found(path, tmp_path / "scratch", columns=ColumnNames(path="file_name"))


def test_texts_that_are_not_utf8_are_damage(tmp_path: Path) -> None:
    offsets = np.array([0, 1, 2], np.int32)
    names = pa.StringArray.from_buffers(2, pa.py_buffer(offsets), pa.py_buffer(b"a\xff"))
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"image": pa.array(_images(2), IMAGE), "label": names}), path)
    with pytest.raises(DataError, match="is damaged or cut short"):
        found(path, tmp_path / "scratch")
