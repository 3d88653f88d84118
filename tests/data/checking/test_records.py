"""What is wrong with a record file, at which byte: MXNet's own files, damaged in every way at known places."""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.packing.pictures import picture, write_folder
from tests.data.recordio.damage import Original, labelled, made_of, read_original

from steadytrain.config import Data
from steadytrain.data.checking.findings import KINDS
from steadytrain.data.checking.records import Examined, examine_records
from steadytrain.data.images.file_types import PACK_IMAGES
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.card import Card
from steadytrain.data.recordio.framing import pack_header
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.errors import DataError
from steadytrain.training.data import open_data, open_records

Place = tuple[str, int | None, int | None]


def _png(number: int, mode: str = "RGB") -> bytes:
    file = io.BytesIO()
    picture(number, (12, 10), mode).save(file, "PNG")
    return file.getvalue()


PNGS = [_png(number) for number in range(24)]


def _examine(path: Path, data: bytes, **options: object) -> Examined:
    path.write_bytes(data)
    return examine_records(path, workers=0, **options)  # type: ignore[arg-type]


def _errors(examined: Examined) -> list[Place]:
    """Kind, byte and record of every error."""
    kinds = examined.report.findings.by_kind()
    return [
        (finding.kind, finding.offset, finding.record)
        for _, _, kept in kinds
        for finding in kept
        if finding.severity == "error"
    ]


def _told(examined: Examined, kind: str) -> list[str]:
    return [finding.detail for finding in examined.report.findings.of(kind)]


@pytest.fixture(scope="module")
def folder(data_folder: Path) -> Path:
    return data_folder / "mxnet-rec"


@pytest.fixture(scope="module")
def photos(folder: Path) -> Original:
    return read_original(folder / "im2rec" / "photos40.rec")


@pytest.mark.usefixtures("in_children")
def test_mxnets_records_are_fine_and_named_as_mxnets(folder: Path) -> None:
    report = examine_records(folder / "im2rec" / "cifar120.rec", workers=2).report
    assert report.is_fine
    assert (report.what, report.num_images, report.num_sound) == ("image records", 120, 120)
    assert report.classes == {"0": 40, "1": 40, "2": 40}
    assert (report.formats, report.width, report.height) == ({"png": 120}, (32, 32), (32, 32))
    assert dict(report.findings.counts) == {"card-missing": 1}


IMAGE = 8 + 24  # where in a record the image begins
DAMAGE: dict[str, tuple[Callable[[Original], bytes], list[str], str]] = {
    "magic": (lambda o: o.with_bytes(o.offsets[7], b"\0"), ["damaged-frame"], "up to byte"),
    "length": (lambda o: o.with_frame(7, lambda c, n: (c, n + 64)), ["damaged-frame"], "up to byte"),
    "parts": (lambda o: o.with_frame(7, lambda c, n: (1, n)), ["damaged-frame"], "up to byte"),
    "image cut": (
        lambda o: o.with_bytes(o.offsets[7] + IMAGE + 900, bytes(len(o.framed(7)) - IMAGE - 900)),
        ["truncated-image"],
        "",
    ),
    "image gone": (
        lambda o: o.with_bytes(o.offsets[7] + IMAGE, b"<html><body>404".ljust(len(o.framed(7)) - IMAGE)),
        ["no-image"],
        "an HTML page",
    ),
    "image zeroed": (
        lambda o: o.with_bytes(o.offsets[7] + IMAGE, bytes(len(o.framed(7)) - IMAGE)),
        ["no-image"],
        "zeros, nothing else",
    ),
    "labels beyond": (
        lambda o: o.with_bytes(o.offsets[7] + 8, b"\xff\xff\xff\0"),
        ["no-header"],
        "16,777,215 labels",
    ),
    "label NaN": (lambda o: o.with_bytes(o.offsets[7] + 12, b"\0\0\xc0\x7f"), ["label-not-class"], "label nan"),
    "label -1": (lambda o: o.with_bytes(o.offsets[7] + 12, b"\0\0\x80\xbf"), ["label-not-class"], "label -1"),
    "label 0.5": (lambda o: o.with_bytes(o.offsets[7] + 12, b"\0\0\0\x3f"), ["label-not-class"], "label 0.5"),
    "other width": (
        lambda o: o.with_bytes(o.offsets[7] + 8, b"\2"),
        ["label-width", "damaged-image"],
        "2; most have 1",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_reported_by_kind_byte_and_record_and_costs_one_record(
    photos: Original, tmp_path: Path, name: str
) -> None:
    change, kinds, where = DAMAGE[name]
    examined = _examine(tmp_path / "a.rec", change(photos))
    errors = _errors(examined)
    assert {kind for kind, _, _ in errors} <= {*kinds, "no-image"}
    assert kinds[0] in {kind for kind, _, _ in errors}
    assert {offset for _, offset, _ in errors} == {photos.offsets[7]}
    assert any(where in detail for detail in _told(examined, kinds[0]))
    assert examined.report.num_sound == 39
    assert not examined.report.is_usable


def test_a_record_shorter_than_its_header_and_an_empty_one(photos: Original, tmp_path: Path) -> None:
    short, empty = made_of(b"abc"), made_of(b"")
    at = photos.offsets[7]
    examined = _examine(tmp_path / "a.rec", photos.data[:at] + short.data + empty.data + photos.data[at:])
    assert _errors(examined) == [("no-header", at, 7), ("no-header", at + 12, 8)]
    assert _told(examined, "no-header") == ["3 of 24 bytes", "0 of 24 bytes"]
    assert examined.report.num_sound == 40


def test_check_without_decoding_reports_framing_and_headers_but_no_images(photos: Original, tmp_path: Path) -> None:
    wiped = photos.with_bytes(photos.offsets[3] + IMAGE, bytes(500))
    data = replace(photos, data=wiped).with_bytes(photos.offsets[7], b"\0")
    assert _errors(_examine(tmp_path / "a.rec", data, decode=False)) == [("damaged-frame", photos.offsets[7], None)]


@settings(max_examples=40)
@given(at=st.integers(0, 10**6), value=st.integers(0, 255), cut=st.integers(0, 3000))
def test_no_single_damage_crashes_it_and_untouched_records_stay_sound(
    tmp_path_factory: pytest.TempPathFactory, at: int, value: int, cut: int
) -> None:
    payloads = [labelled(n % 3, PNGS[n], id=n) for n in range(12)] + [labelled([1.0], PNGS[12], id=12)]
    original = made_of(*payloads)
    at %= len(original.data)
    data = original.without(at, at + cut) if cut else original.with_bytes(at, bytes([value]))
    examined = _examine(tmp_path_factory.getbasetemp() / "damaged.rec", data)
    spans = (examined.scan.span(row) for row in np.flatnonzero(examined.sound).tolist())
    sound = [data[a:b] for a, b in spans]
    assert all(record in sound for record in original.untouched(at, at + max(cut, 1)))


# Labels, ids and images of files made here: payloads, and what is told of them.


def test_labels_that_do_not_go_with_the_others(tmp_path: Path) -> None:
    labels: list[float | list[float]] = [0, 1, 0, 1, [0, 1, 1], math.inf, 0.5, -1, [1.0]]
    original = made_of(*(labelled(label, PNGS[n], id=n) for n, label in enumerate(labels)))
    examined = _examine(tmp_path / "a.rec", original.data)
    rows = [(kind, record) for kind, _, record in _errors(examined)]
    assert rows == [("label-not-class", 5), ("label-not-class", 6), ("label-not-class", 7), ("label-width", 4)]
    assert examined.sound.tolist() == [n not in (4, 5, 6, 7) for n in range(9)]


@pytest.mark.parametrize(
    ("labels", "what"),
    [
        ([[0.0, 1.0], [1.0, 1.0]], "records with several of 2 labels each"),
        ([[0.0, 1.0], [0.5, 1.0]], "records with label vectors"),
        ([1.5, 2.5, 0.25], "records with a number each"),
        ([[2, 5, 0, 0.1, 0.1, 0.5, 0.5], [2, 6, 0, 0, 0, 1, 1, 0, 1, 0.5, 0.5, 1, 1, 0]], "records with label vectors"),
        ([3.0, 4.0], "image records"),
    ],
)
def test_labels_of_other_kinds_are_named(tmp_path: Path, labels: list[float | list[float]], what: str) -> None:
    original = made_of(*(labelled(label, PNGS[n], id=n) for n, label in enumerate(labels)))
    report = _examine(tmp_path / "a.rec", original.data).report
    assert report.what == what
    assert report.is_usable


@pytest.mark.parametrize("width", [1, 2])
def test_sets_of_faces_are_fine(width: int, tmp_path: Path) -> None:
    images: list[float | list[float]] = [float(n % 2) if width == 1 else [float(n % 2), 7.5] for n in range(4)]
    records = [([5.0, 7.0], b""), *((label, PNGS[n]) for n, label in enumerate(images)), ([1.0, 3.0], b"")]
    original = made_of(*(labelled(label, image, id=n) for n, (label, image) in enumerate(records)))
    for decode in (True, False):
        examined = _examine(tmp_path / "a.rec", original.data, decode=decode)
        assert examined.report.is_usable and examined.report.what == "image records"
        assert examined.report.classes == {"0": 2, "1": 2} and examined.report.num_sound == 4
        assert [finding.record for finding in examined.report.findings.of("no-picture")] == [0, 5]


def test_a_label_that_is_refused_is_shown_with_all_its_digits(tmp_path: Path) -> None:
    original = made_of(*(labelled(label, PNGS[n], id=n) for n, label in enumerate([0.0, 1.0, 1.0000001, 2.0003])))
    examined = _examine(tmp_path / "a.rec", original.data)
    assert _told(examined, "label-not-class") == ["label 2.0003"]
    assert examined.report.classes == {"0": 1, "1": 2}


def test_duplicate_ids_are_reported(tmp_path: Path) -> None:
    original = made_of(*(labelled(n % 2, PNGS[n], id=n % 5) for n in range(7)))
    examined = _examine(tmp_path / "a.rec", original.data)
    assert [(finding.record, finding.id, finding.detail) for finding in examined.report.findings.of("same-id")] == [
        (5, 0, "as record 0"),
        (6, 1, "as record 1"),
    ]
    assert _told(_examine(tmp_path / "b.rec", made_of(*(labelled(0, png) for png in PNGS)).data), "same-id") == [
        "all 24 records have id 0"
    ]


def test_the_same_image_under_two_labels_is_a_warning_and_under_one_a_note(tmp_path: Path) -> None:
    images = [0, 1, 2, 1, 0, 3]
    original = made_of(*(labelled(n % 2, PNGS[image], id=n) for n, image in enumerate(images)))
    findings = _examine(tmp_path / "a.rec", original.data).report.findings
    assert [(finding.record, finding.detail) for finding in findings.of("duplicate")] == [
        (4, "as record 0"),
        (3, "as record 1"),
    ]
    original = made_of(*(labelled(n // 2, PNGS[image], id=n) for n, image in enumerate(images)))
    findings = _examine(tmp_path / "b.rec", original.data).report.findings
    assert [(finding.record, finding.detail) for finding in findings.of("conflicting-labels")] == [
        (0, "0: record 0, 2: record 4"),
        (1, "0: record 1, 1: record 3"),
    ]


def test_images_in_two_files_of_a_split_are_reported(tmp_path: Path) -> None:
    def file(*images: tuple[int, int]) -> bytes:
        return made_of(*(labelled(label, PNGS[image], id=n) for n, (image, label) in enumerate(images))).data

    first = _examine(tmp_path / "a.rec", file((0, 0), (1, 1), (2, 1), (1, 1)))
    findings = _examine(tmp_path / "b.rec", file((4, 0), (1, 1), (5, 1), (2, 0)), before=[first]).report.findings
    assert [(finding.record, finding.detail) for finding in findings.of("duplicate")] == [(1, "as record 1 of a.rec")]
    assert [(finding.record, finding.detail) for finding in findings.of("conflicting-labels")] == [
        (3, "0: record 3, 1: record 2 of a.rec")
    ]


def test_images_in_both_training_and_validation_are_reported(tmp_path: Path) -> None:
    val = tmp_path / "val.rec"
    val.write_bytes(made_of(*(labelled(0, PNGS[n]) for n in (9, 2, 3))).data)
    train = made_of(*(labelled(n % 2, PNGS[n], id=n) for n in range(5)))
    examined = _examine(tmp_path / "train.rec", train.data, others=[val])
    assert [(finding.record, finding.detail) for finding in examined.report.findings.of("leak")] == [
        (2, "record 1 of val.rec"),
        (3, "record 2 of val.rec, under another label"),
    ]
    assert "2 of the 3 images of val.rec are in it" in examined.report.facts


def test_odd_images_are_reported_by_the_rule_that_covers_them(tmp_path: Path) -> None:
    turned = io.BytesIO()
    exif = picture(1).getexif()
    exif[0x0112] = 6
    picture(1).save(turned, "JPEG", exif=exif)
    images = [_png(1, "RGBA"), _png(2, "P"), _png(3, "1"), turned.getvalue()]
    findings = _examine(
        tmp_path / "a.rec", made_of(*(labelled(n, i, id=n) for n, i in enumerate(images))).data
    ).report.findings
    records = {kind: findings.of(kind)[0].record for kind in ("transparency", "palette", "one-bit", "lies-on-its-side")}
    assert records == {"transparency": 0, "palette": 1, "one-bit": 2, "lies-on-its-side": 3}


# Files of other kinds.


def test_detection_records_found_in_the_wild_are_label_vectors(folder: Path) -> None:
    examined = examine_records(folder / "benz_det" / "train.rec", workers=0)
    assert examined.report.what == "records with label vectors"
    assert _told(examined, "label-vectors") == ["9 labels for each image, not all 0 or 1 in 12 records"]
    assert examined.report.num_sound == 12


def test_a_classification_set_found_in_the_wild_is_fine(folder: Path) -> None:
    report = examine_records(folder / "ai_fit" / "validation.rec", workers=0).report
    assert report.is_fine
    assert sum(report.classes.values()) == 98


def test_a_git_lfs_pointer_is_named_with_the_remedy(folder: Path) -> None:
    report = examine_records(folder / "empty" / "validation.rec", workers=0).report
    assert report.what == "a Git LFS pointer, not the data"
    assert report.remedies == (("fetch the data with git lfs pull", ""),)
    assert dict(report.findings.counts) == {"other-file": 1}


def test_records_that_hold_no_images_are_named_as_a_whole(folder: Path) -> None:
    examined = examine_records(folder / "im2rec" / "odd.rec", workers=0)
    assert examined.report.what == "records that are no image records"
    assert _told(examined, "not-images") == ["none of 9 records holds an image (the first: empty: 0 bytes)"]


@pytest.mark.parametrize("with_header", [False, True])
@pytest.mark.parametrize("text", ["hi", "not an image but a line of a corpus, longer than a header"])
def test_records_of_texts_are_refused_in_one_sentence(tmp_path: Path, text: str, with_header: bool) -> None:
    path = tmp_path / "a.rec"
    with RecordWriter(path) as writer:
        for number in range(16):
            writer.write(pack_header(number % 2, id=number) * with_header + text.encode(), number)
    report = examine_records(path, workers=0).report
    errors = [finding for _, _, kept in report.findings.by_kind() for finding in kept if finding.severity == "error"]
    sentence = "none of 16 records holds an image (the first: text)"
    assert [(error.kind, error.detail) for error in errors] == [("not-images", sentence)]
    assert [do for do, _ in report.remedies] == [PACK_IMAGES]
    for refuse in (lambda: open_records(path), lambda: pack(path, tmp_path / "b")):
        with pytest.raises(DataError) as refused:
            refuse()
        assert str(refused.value) == f"{path}: {sentence}: {PACK_IMAGES}"


@pytest.mark.parametrize("data", [b"", bytes(100), b"no record at all" * 10, b"\x0a\x23\xd7"])
def test_a_file_without_one_whole_record_ends_well(tmp_path: Path, data: bytes) -> None:
    report = _examine(tmp_path / "a.rec", data).report
    assert report.num_images == 0
    assert not report.is_usable


def test_a_file_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*a\.rec: No such file"):
        examine_records(tmp_path / "a.rec")


# What lies beside it.


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    """A record file of 24 images in two classes, with its index and card."""
    [(path, _)] = pack(write_folder(tmp_path / "data", {"cat": 12, "dog": 12}), tmp_path / "a")
    return path


def test_a_packed_file_is_fine_without_a_note(packed: Path) -> None:
    report = examine_records(packed, workers=0).report
    assert not report.findings.counts
    assert report.classes == {"cat": 12, "dog": 12}


def _with_index(path: Path, change: Callable[[list[str]], list[str]]) -> Examined:
    index = path.with_suffix(".idx")
    index.write_text("".join(change(index.read_text().splitlines(keepends=True))))
    return examine_records(path, workers=0)


INDEXES: dict[str, tuple[Callable[[list[str]], list[str]], dict[str, int]]] = {
    "empty": (lambda lines: [], {"index-missing": 1}),
    "no index": (lambda lines: ["<html>\n"], {"index-wrong": 1}),
    "a line torn": (lambda lines: [*lines[:-1], "23\t"], {"index-wrong": 1}),
    "two lines missing": (lambda lines: lines[2:], {"index-wrong": 1}),
    "a line twice": (lambda lines: [*lines, lines[3]], {"index-wrong": 1}),
    "an offset beside": (lambda lines: [*lines[:-1], "23\t99\n"], {"index-wrong": 2}),
    "of another file": (lambda lines: [f"{n}\t{n * 100 + 4}\n" for n in range(24)], {"index-wrong": 2}),
    "keys by number": (
        lambda lines: [f"{n + 1}\t{line.split()[1]}\n" for n, line in enumerate(lines)],
        {},
    ),
}


@pytest.mark.parametrize("name", INDEXES)
def test_wrong_index_is_reported(packed: Path, name: str) -> None:
    change, index = INDEXES[name]
    examined = _with_index(packed, change)
    assert dict(examined.report.findings.counts) == index


def test_entries_in_damaged_places_are_not_blamed_on_the_index(packed: Path) -> None:
    data = bytearray(packed.read_bytes())
    offset = int(packed.with_suffix(".idx").read_text().splitlines()[4].split("\t")[1])
    data[offset] ^= 1
    packed.write_bytes(data)
    examined = examine_records(packed, workers=0)
    assert {kind for kind, _, _ in _errors(examined)} == {"damaged-frame", "card-wrong"}


CARDS: dict[str, tuple[Callable[[Card], Card], str]] = {
    "size": (lambda card: replace(card, bytes=card.bytes + 4), "card-wrong"),
    "bytes": (lambda card: replace(card, digest="0" * 64), "card-wrong"),
    "count": (lambda card: replace(card, num_images=23, counts=(12, 11)), "card-wrong"),
    "fewer classes": (lambda card: replace(card, classes=("cat",), counts=(24,)), "label-not-class"),
}


@pytest.mark.parametrize("name", CARDS)
def test_card_of_other_records_is_reported(packed: Path, name: str) -> None:
    change, kind = CARDS[name]
    path = packed.with_suffix(".json")
    path.write_text(change(Card.from_json(path.read_text())).to_json())
    assert kind in examine_records(packed, workers=0).report.findings.counts


def test_damaged_card_is_reported_and_other_json_is_ignored(packed: Path) -> None:
    path = packed.with_suffix(".json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "channels": 7}))
    assert "card-wrong" in examine_records(packed, workers=0).report.findings.counts
    path.write_text("{}")
    assert dict(examine_records(packed, workers=0).report.findings.counts) == {"card-missing": 1}


def test_every_kind_that_is_found_is_in_the_table(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "im2rec" / "odd.rec", tmp_path / "odd.rec")
    report = examine_records(tmp_path / "odd.rec", workers=0, most=2).report
    document = report.to_dict()
    assert set(document["counts"]) <= set(KINDS)
    assert document["counts"]["not-images"] == 1
    assert document["errors"] == sum(n for kind, n in document["counts"].items() if KINDS[kind].severity == "error")


def test_a_header_that_holds_the_magic_is_read(tmp_path: Path) -> None:
    original = made_of(*(pack_header(1.0, id=0xCED7230A) + png for png in PNGS[:2]))
    examined = _examine(tmp_path / "a.rec", original.data)
    assert examined.headers["id"].tolist() == [0xCED7230A] * 2
    assert examined.report.num_sound == 2


def test_findings_name_the_files_of_records(tmp_path: Path) -> None:
    write_folder(tmp_path / "photos", {"cat": 12, "dog": 12})
    shutil.copyfile(tmp_path / "photos" / "cat" / "0000.png", tmp_path / "photos" / "dog" / "copy.png")
    [(path, _)] = pack(tmp_path / "photos", tmp_path / "a", workers=1)
    findings = examine_records(path, workers=0).report.findings
    [conflict] = findings.of("conflicting-labels")
    copy = [line.split("\t") for line in path.with_suffix(".lst").read_text().splitlines()][24]
    assert (conflict.name, copy[2]) == ("cat/0000.png", "dog/copy.png")
    assert conflict.detail == "cat: record 0 (cat/0000.png), dog: record 24 (dog/copy.png)"


def test_gaps_in_the_numbers_of_classes_are_named(tmp_path: Path) -> None:
    original = made_of(*(labelled((1, 3)[n % 2], png, id=n) for n, png in enumerate(PNGS)))
    findings = _examine(tmp_path / "a.rec", original.data).report.findings
    assert [(finding.name, finding.detail) for finding in findings.of("unused-class")] == [
        ("0", "label 0"),
        ("2", "label 2"),
    ]
    messages: list[str] = []
    open_data(Data(train=tmp_path / "a.rec"), seed=0, say=messages.append).close()
    assert messages[0] == "2 classes (0, 2) have no training images: the model cannot learn to name them"
    shard = _examine(tmp_path / "a-00000-of-00002.rec", original.data).report.findings
    assert not shard.counts["unused-class"]
