"""Record files as sources: labels, ids, classes and bytes come through, whole or in parts."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tests.data.packing.pictures import write_folder
from tests.data.sources.samples import content, encoded, found

from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.card import LabelNames, read_classes
from steadytrain.data.recordio.framing import MAGIC, pack_header
from steadytrain.data.recordio.reader import Records
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.errors import DataError

MAGIC_BYTES = MAGIC.to_bytes(4, "little")


def _write(path: Path, records: list[tuple[float | list[float], int, bytes]]) -> Path:
    with RecordWriter(path) as writer:
        for label, id_, image in records:
            writer.write(pack_header(label, id=id_) + image, id_)
    return path


@pytest.mark.parametrize("name", ["cifar120", "photos40"])
def test_what_mxnet_wrote_comes_through(data_folder: Path, tmp_path: Path, name: str) -> None:
    path = data_folder / "mxnet-rec" / "im2rec" / f"{name}.rec"
    [listing] = found(path, tmp_path)
    lines = [line.split("\t") for line in path.with_suffix(".lst").read_text().splitlines()]
    assert listing.ids is not None and listing.ids.tolist() == [int(index) for index, _, _ in lines]
    assert listing.labels.tolist() == [float(label) for _, label, _ in lines]
    with Records.open(path) as records:
        assert all(content(listing, n) == bytes(records.image(n)) for n in range(len(listing)))
        assert listing.sizes.tolist() == [len(records.image(n)) for n in range(len(listing))]


def test_images_in_parts_are_put_together(data_folder: Path, tmp_path: Path) -> None:
    payloads = [
        bytes.fromhex(payload)
        for payload in json.loads((data_folder / "mxnet-rec/im2rec/odd.json").read_text())["payloads_hex"]
    ]
    wanted = [encoded(1), *payloads, b"1234" + MAGIC_BYTES * 3, encoded(2)]
    records: list[tuple[float | list[float], int, bytes]] = [(n % 2, n, data) for n, data in enumerate(wanted)]
    records[3] = (records[3][0], int.from_bytes(MAGIC_BYTES * 2, "little"), wanted[3])  # a header cut by its own id
    path = _write(tmp_path / "odd.rec", [record for record in records if record[1] < 2**63])
    [listing] = found(path, tmp_path / "scratch")
    assert [content(listing, n) for n in range(len(listing))] == [record[2] for record in records if record[1] < 2**63]
    path.with_suffix(".idx").unlink()
    [scanned] = found(path, tmp_path / "scratch2")
    assert scanned.sizes.tolist() == listing.sizes.tolist()


def test_classes_are_those_of_the_card(tmp_path: Path) -> None:
    pack(write_folder(tmp_path / "data", {"cat": 3, "dog": 2}), tmp_path / "pets")
    [listing] = found(tmp_path / "pets.rec", tmp_path)
    assert (listing.classes, listing.labels.tolist(), listing.ids) == (("cat", "dog"), [0, 0, 0, 1, 1], None)
    [other] = found(tmp_path / "pets.rec", tmp_path, classes=("dog", "elk", "cat"))
    assert (other.classes, other.labels.tolist()) == (("dog", "elk", "cat"), [2, 2, 2, 0, 0])
    assert other.ids is not None and other.ids.tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(DataError, match="the class list lacks: cat"):
        found(tmp_path / "pets.rec", tmp_path, classes=("dog", "elk"))


def test_label_vectors_are_kept(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.rec", [([0, 1, 0.5], 3, encoded(1)), ([1, 1, 0], 9, encoded(2))])
    [listing] = found(path, tmp_path)
    assert (listing.labels.tolist(), listing.classes) == ([[0, 1, 0.5], [1, 1, 0]], ())
    assert listing.labels.dtype == np.float32
    assert content(listing, 1) == encoded(2)
    with pytest.raises(DataError, match="has label vectors: --classes does not apply"):
        found(path, tmp_path, classes=("a", "b"))


def test_packed_labels_keep_their_names_and_take_the_order_of_a_list(tmp_path: Path) -> None:
    images = write_folder(tmp_path / "images", {"cat": 2, "dog": 1})
    rows = [
        f"{path.relative_to(images)},{path.parent.name};{'old' if n else 'new'}"
        for n, path in enumerate(sorted(images.glob("*/*")))
    ]
    (images / "a.csv").write_text("path,labels\n" + "\n".join(rows))
    pack(images / "a.csv", tmp_path / "a")
    assert read_classes(tmp_path / "a.json") == ("cat", "dog", "new", "old")
    assert isinstance(read_classes(tmp_path / "a.rec"), LabelNames)
    with Records.open(tmp_path / "a.rec") as records:
        assert (records.class_list, records.classes) == (("cat", "dog", "new", "old"), ())
        assert records.labels.tolist() == [[1, 0, 1, 0], [1, 0, 0, 1], [0, 1, 0, 1]]
    [listing] = found(tmp_path / "a.rec", tmp_path, classes=LabelNames(("old", "new", "dog", "cat")))
    assert listing.label_names == ("old", "new", "dog", "cat")
    assert listing.labels.tolist() == [[0, 1, 0, 1], [1, 0, 0, 1], [1, 0, 1, 0]]


def test_several_files_are_joined_unless_they_are_named_after_splits(tmp_path: Path) -> None:
    for name, classes in {"a": {"cat": 2, "dog": 2}, "b": {"dog": 1, "elk": 2}}.items():
        pack(write_folder(tmp_path / name, classes), tmp_path / name)
    [listing] = found(tmp_path / "{a,b}.rec", tmp_path / "scratch")
    assert (listing.classes, listing.labels.tolist()) == (("cat", "dog", "elk"), [0, 0, 1, 1, 1, 2, 2])
    assert listing.ids is not None and listing.ids.tolist() == list(range(7))
    pack(write_folder(tmp_path / "c" / "train", {"cat": 2, "dog": 2}).parent, tmp_path / "c-all")
    pack(write_folder(tmp_path / "c" / "val", {"dog": 1, "cat": 2}), tmp_path / "c-val")
    listings = found(tmp_path / "c-*.rec", tmp_path / "scratch")
    assert [(listing.split, len(listing)) for listing in listings] == [("train", 4), ("val", 3)]


def test_a_folder_of_record_files_says_how_to_give_them(tmp_path: Path) -> None:
    _write(tmp_path / "a.rec", [(0, 0, encoded(1)), (1, 1, encoded(2))])
    with pytest.raises(DataError, match=r"holds record files: give .*a\.rec, or all of them as '.*/\*\.rec'"):
        found(tmp_path, tmp_path / "scratch")


def test_damaged_and_empty_files_end_in_one_line(data_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a Git LFS pointer"):
        found(data_folder / "mxnet-rec" / "empty" / "validation.rec", tmp_path)
    whole = (data_folder / "mxnet-rec" / "im2rec" / "cifar120.rec").read_bytes()
    for end in (20, 5000, len(whole) - 4):
        (tmp_path / "a.rec").write_bytes(whole[:end])
        with pytest.raises(DataError, match=r"a\.rec"):
            found(tmp_path / "a.rec", tmp_path / "scratch")
    damaged = bytearray(whole)
    damaged[2632] ^= 1
    (tmp_path / "a.rec").write_bytes(damaged)
    with pytest.raises(DataError, match=r"a\.rec: damaged at byte"):
        found(tmp_path / "a.rec", tmp_path / "scratch")
