"""A folder, a list or an archive before it is packed: everything that packing would meet, and what it would not say."""

from __future__ import annotations

import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tests.data.packing.pictures import picture, write_folder
from tests.data.sources.samples import encoded, write_tar
from tests.data.sources.test_arrays_idx import write_idx

from steadytrain.cli.check import report_text
from steadytrain.config import Data
from steadytrain.data.checking.findings import Finding, Report
from steadytrain.data.checking.records import examine_records
from steadytrain.data.checking.sources import examine_source
from steadytrain.data.loader.crop import crop_for
from steadytrain.data.packing.pack import pack
from steadytrain.errors import DataError
from steadytrain.format import percent


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of twelve pictures each."""
    return write_folder(tmp_path / "data", {"cat": 12, "dog": 12})


def _examine(source: Path, **options: object) -> Report:
    return examine_source(source, workers=0, **options)  # type: ignore[arg-type]


def _found(report: Report) -> dict[str, list[str | None]]:
    """Names by kind."""
    return {kind: [finding.name for finding in kept] for kind, _, kept in report.findings.by_kind()}


def _only(report: Report, kind: str) -> Finding:
    [finding] = report.findings.of(kind)
    return finding


@pytest.mark.usefixtures("in_children")
def test_clean_folder_is_fine_and_described(folder: Path) -> None:
    report = examine_source(folder, workers=2)
    assert report.is_fine
    assert not report.findings.counts
    assert (report.what, report.num_images, report.num_sound) == ("a folder of classes", 24, 24)
    assert report.classes == {"cat": 12, "dog": 12}
    assert (report.formats, report.width, report.height) == ({"png": 24}, (40, 40), (30, 30))
    assert report.bytes == sum(path.stat().st_size for path in folder.glob("*/*"))


@pytest.mark.parametrize(
    ("size", "kind", "share"),
    [((60, 60), "", "0 %"), ((90, 60), "", "49 %"), ((112, 63), "cropped", "57 %"), ((40, 160), "wide", "81 %")],
    ids=str,
)
def test_the_share_that_evaluation_never_sees_is_a_note_where_it_is_large(
    tmp_path: Path, size: tuple[int, int], kind: str, share: str
) -> None:
    for number in range(24):
        place = tmp_path / "photos" / "ab"[number % 2]
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", size, (number, 90, 10 * number)).save(place / f"{number}.png")
    report = _examine(tmp_path / "photos")
    crop = crop_for(Data(train="photos"), size=224, channels=3, largest=max(size))
    assert share == percent(1 - float(crop.seen(np.array([size[::-1]]))[0])), "as the head of the training has it"
    part = "" if crop.crop == 1 else ", 0.875 of the shorter side"
    assert report.facts == (f"{share} of the pixels are never seen where evaluation takes the centre{part}",)
    assert report.is_fine and list(report.findings.counts) == [kind] * bool(kind)
    if kind:
        assert share in _only(report, kind).detail


def test_unusable_files_are_reported_with_their_reason(folder: Path) -> None:
    whole = (folder / "cat" / "0000.png").read_bytes()
    (folder / "cat" / "cut.png").write_bytes(whole[:-90])
    (folder / "cat" / "empty.png").touch()
    (folder / "cat" / "nowhere.png").symlink_to("gone.png")
    (folder / "dog" / "page.jpg").write_text("<html>404</html>")
    (folder / "dog" / "text.jpg").write_text("hello")
    report = _examine(folder)
    assert _found(report) == {
        "no-image": ["cat/empty.png", "dog/page.jpg", "dog/text.jpg"],
        "truncated-image": ["cat/cut.png"],
        "unreadable": ["cat/nowhere.png"],
    }
    assert _only(report, "unreadable").detail == "a broken link"
    assert [finding.detail for finding in report.findings.of("no-image")] == ["empty: 0 bytes", "an HTML page", "text"]
    assert report.num_sound == 24
    assert report.remedies[0][1] == "packing leaves them out and names them on the card"
    # Packing leaves out the same ones.
    [(_, card)] = pack(folder, folder.parent / "out")
    assert len(card.rejected) == 5


def test_more_bad_files_than_packing_allows_are_an_error(folder: Path) -> None:
    for number in range(6):
        (folder / "cat" / f"{number}.jpg").write_text("no image")
        said = "packing leaves it out and names it on the card"
        assert number or _examine(folder).remedies[0][1] == said
    assert "6 of 30; 5 may be left out" in _only(_examine(folder), "too-many-bad").detail


def test_files_that_packing_skips_are_reported(folder: Path) -> None:
    (folder / "notes.txt").touch()
    (folder / "cat" / "labels.csv").touch()
    (folder / "dog" / ".DS_Store").touch()
    (folder / ".git").mkdir()
    (folder / ".git" / "config").touch()
    report = _examine(folder)
    assert report.is_fine
    assert _found(report) == {"passed-over": ["notes.txt", "cat/labels.csv"]}


def test_folders_beside_those_of_splits_are_named(tmp_path: Path) -> None:
    for folder in ("train", "val"):
        write_folder(tmp_path / "photos" / folder, {"cat": 1, "dog": 1})
    write_folder(tmp_path / "photos" / "wild", {"elk": 1, "bee": 1})
    report = _examine(tmp_path / "photos")
    assert _found(report)["beside"] == ["wild/"]


def test_images_without_a_class_are_reported(folder: Path) -> None:
    (folder / "loose.jpg").touch()
    report = _examine(folder)
    assert not report.is_fine
    assert _found(report) == {"unclassed": ["loose.jpg"]}


def test_empty_small_and_uneven_classes_are_reported(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", {"ant": 0, "bee": 1, "cat": 9, "dog": 10, "elk": 90})
    report = _examine(folder)
    assert _found(report) == {
        "empty-class": ["ant"],
        "single-image": ["bee"],
        "small-class": ["cat"],
        "imbalance": [None],
    }
    assert _only(report, "imbalance").detail == "elk has 90 images, bee 1: 90 times as many"
    assert not report.is_usable


def test_duplicate_images_are_reported_by_class_and_split(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"cat": 12, "dog": 12})
    (tmp_path / "val" / "cat").mkdir(parents=True)
    (tmp_path / "val" / "dog").mkdir(parents=True)
    for number in range(12):
        picture(100 + number).save(tmp_path / "val" / "cat" / f"{number}.png")
        picture(200 + number).save(tmp_path / "val" / "dog" / f"{number}.png")
    first = tmp_path / "train" / "cat" / "0000.png"
    shutil.copy(first, tmp_path / "train" / "cat" / "again.png")
    shutil.copy(first, tmp_path / "train" / "dog" / "other.png")
    Image.open(tmp_path / "train" / "cat" / "0001.png").save(tmp_path / "val" / "cat" / "leak.bmp")
    (tmp_path / "val" / "dog" / "tail.png").write_bytes((tmp_path / "train" / "dog" / "0013.png").read_bytes() + b"xx")
    report = _examine(tmp_path)
    assert _found(report) == {
        "conflicting-labels": ["train/cat/0000.png"],
        "leak": ["val/cat/leak.bmp", "val/dog/tail.png"],
        "duplicate": ["train/cat/again.png", "train/dog/other.png"],
    }
    assert _only(report, "conflicting-labels").detail == "cat: train/cat/0000.png, dog: train/dog/other.png"
    assert [finding.detail for finding in report.findings.of("leak")] == [
        "as train/cat/0001.png",
        "as train/dog/0013.png",
    ]
    assert (report.what, report.facts[:2]) == ("a folder of train and val", ("train: 26 images", "val: 26 images"))
    assert report.facts[2] == "25 % of the pixels are never seen where evaluation takes the centre"


def test_another_folder_may_be_named_for_validation(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    for name in ("cat", "elk"):
        shutil.copytree(folder / "cat", other / name)
    report = _examine(folder, val=other)
    assert report.findings.counts["leak"] == 24
    assert (_only(report, "class-only-val").name, _only(report, "class-only-train").name) == ("elk", "dog")


def test_classes_missing_in_one_split_are_reported(tmp_path: Path) -> None:
    write_folder(tmp_path / "train", {"cat": 10, "dog": 10})
    write_folder(tmp_path / "val", {"cat": 10, "elk": 10})
    report = _examine(tmp_path)
    assert (_only(report, "class-only-train").name, _only(report, "class-only-val").name) == ("dog", "elk")
    assert not report.findings.of("refused")
    with pytest.raises(DataError, match="elk"):
        pack(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("classes", "text"),
    [({"cat": 3}, "only one class, cat"), ({".": 3}, "have no classes"), ({"a/b": 3, "a/c": 3}, "only one class, a")],
)
def test_source_that_packing_refuses_is_still_checked(tmp_path: Path, classes: dict[str, int], text: str) -> None:
    folder = write_folder(tmp_path / "data", classes)
    (folder / next(iter(classes)) / "bad.png").write_bytes(b"")
    report = _examine(folder)
    assert text in _only(report, "refused").detail
    assert report.findings.counts["no-image"] == 1
    assert report.num_images == sum(classes.values()) + 1


def test_an_empty_folder_ends_well(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    assert "holds no" in _only(_examine(tmp_path / "data"), "refused").detail


def test_a_list_is_looked_at_by_its_own_paths(folder: Path, tmp_path: Path) -> None:
    lines = [f"{n}\t{n % 2}\t{('cat', 'dog')[n % 2]}/{n:04d}.png" for n in (0, 13, 2, 15)]
    (tmp_path / "a.lst").write_text("\n".join([*lines, "9\t0\tcat/gone.png"]))
    report = _examine(tmp_path / "a.lst", root=folder)
    assert (report.what, report.num_images) == ("a list of images", 5)
    assert (_only(report, "unreadable").name, _only(report, "unreadable").detail) == (
        "cat/gone.png",
        "no such file or directory",
    )
    wrong = _examine(tmp_path / "a.lst")
    assert "none of the 5 paths" in _only(wrong, "refused").detail
    assert _only(wrong, "refused").detail.endswith(f"give --root {folder}")


def test_label_vectors_are_reported_before_and_after_packing(folder: Path, tmp_path: Path) -> None:
    lines = [f"{n}\t{n % 2}\t0.5\tcat/{n:04d}.png" for n in range(12)]
    (tmp_path / "a.lst").write_text("\n".join(lines))
    report = _examine(tmp_path / "a.lst", root=folder)
    [(path, _)] = pack(tmp_path / "a.lst", tmp_path / "out", root=folder)
    for examined, what in ((report, "images"), (examine_records(path, workers=0).report, "records")):
        assert _only(examined, "label-vectors").detail == f"2 labels for each image, not all 0 or 1 in 12 {what}"
        assert (examined.is_usable, examined.classes) == (True, {})


def test_several_labels_are_counted_and_are_no_finding(folder: Path, tmp_path: Path) -> None:
    labels = ["", "wet;dark", *["dark"] * 10]
    (tmp_path / "a.csv").write_text(
        "path,labels\n" + "".join(f"cat/{n:04d}.png,{label}\n" for n, label in enumerate(labels))
    )
    report = _examine(tmp_path / "a.csv", root=folder)
    assert report.findings.counts["label-vectors"] == 0
    assert report.classes == {"dark": 11, "wet": 1}
    assert "several labels for each image; 1 image has none" in report.facts
    assert "2 labels: dark 11, wet 1" in report_text(report)
    (folder / "cat" / "0005.png").write_bytes((folder / "cat" / "0001.png").read_bytes())
    twice = _examine(tmp_path / "a.csv", root=folder)
    assert _only(twice, "conflicting-labels").detail == "dark and wet: cat/0001.png, dark: cat/0005.png"
    [(path, _)] = pack(tmp_path / "a.csv", tmp_path / "out", root=folder)
    packed = examine_records(path, workers=0).report
    assert (packed.what, packed.findings.counts["label-vectors"]) == ("records with several of 2 labels each", 0)


def test_file_that_is_no_list_is_reported(tmp_path: Path) -> None:
    (tmp_path / "a.lst").write_text("cat.jpg\n")
    assert "only one column" in _only(_examine(tmp_path / "a.lst"), "refused").detail


def test_bare_pixels_are_compared_too(tmp_path: Path) -> None:
    images = np.random.default_rng(0).integers(0, 255, (30, 8, 8), np.uint8)
    images[5] = images[3]  # a digit twice, once as another one
    for name, these in (("train", images), ("t10k", np.concatenate([images[:2], 255 - images[:28]]))):
        write_idx(tmp_path / "mnist", name, these, np.arange(30, dtype=np.uint8) % 10)
    report = _examine(tmp_path / "mnist")
    assert (report.formats, report.width, report.height) == ({"raw": 60}, (8, 8), (8, 8))
    counts = report.findings.counts
    assert (counts["duplicate"], counts["leak"], counts["conflicting-labels"]) == (2, 2, 2)


def test_validation_images_of_a_split_source_are_compared(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "other" / "train")
    for number, name in enumerate(("cat", "dog")):
        (tmp_path / "other" / "val" / name).mkdir(parents=True)
        picture(99 + number).save(tmp_path / "other" / "val" / name / "0.png")
    report = _examine(folder, val=tmp_path / "other")
    assert report.facts[:2] == ("train: 24 images", "val: 2 images")
    assert not report.findings.counts["leak"]


def test_pipe_is_reported_as_neither_file_nor_folder(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.rec")
    report = _examine(tmp_path / "a.rec")
    assert report.what == "neither a file nor a folder"
    assert "neither a file nor a folder" in _only(report, "refused").detail


def test_several_files_are_named_in_the_report(folder: Path, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            tar.add(folder / name, name)
    report = examine_source(f"{tmp_path}/{{cat,dog}}.tar", workers=0)
    assert (report.what, report.num_images) == ("several files", 24)


def test_an_archive_is_looked_at_without_unpacking_it(folder: Path, tmp_path: Path) -> None:
    (folder / "cat" / "bad.png").write_text("<html>")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(folder, "data")
    report = _examine(tmp_path / "a.tar")
    assert (report.what, report.num_images) == ("a tar archive", 25)
    assert [finding.detail for finding in report.findings.of("no-image")] == ["an HTML page"]
    assert report.classes == {"cat": 13, "dog": 12}


def test_decompressed_files_are_removed_even_after_a_kill(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as tar:
        tar.add(folder, "data")
    place = tmp_path / "tmp"
    left = place / ".steady-check.scratch-of-a-kill"
    left.mkdir(parents=True)
    (left / "a.tar").write_bytes(bytes(1000))
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    seen: set[Path] = set()
    report = _examine(tmp_path / "a.tar.gz", progress=lambda done, total: seen.update(place.iterdir()))
    assert report.num_sound == 24
    assert len(seen) == 1 and left not in seen
    assert not list(place.iterdir())


@pytest.mark.parametrize(
    ("data", "what"),
    [(b"\x89HDF\r\n\x1a\n" + bytes(600), "an HDF5 file"), (b"%PDF-1.4" + bytes(600), "a PDF document")],
)
def test_a_file_that_is_no_source_is_named_for_what_it_is(tmp_path: Path, data: bytes, what: str) -> None:
    (tmp_path / "a.bin").write_bytes(data)
    report = _examine(tmp_path / "a.bin")
    assert report.what == what
    assert _only(report, "other-file").detail == what
    assert report.remedies


def test_missing_path_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    with pytest.raises(DataError, match=r"there is no .*photo. Did you mean photos\?"):
        _examine(tmp_path / "photo")


@pytest.mark.slow
def test_real_photographs_can_be_used(extracted: Callable[[str], Path]) -> None:
    report = examine_source(extracted("clothing-10.tar"), workers=2)
    assert (report.is_usable, report.num_sound) == (True, 1165)


def test_strange_images_are_told(data_folder: Path) -> None:
    report = examine_source(data_folder / "odd-images", workers=2)
    counts = report.findings.counts
    assert report.num_images == 234
    assert counts["orientation"] == 14
    assert counts["cmyk"] >= 3


def test_a_validation_set_that_cannot_be_listed_is_said(folder: Path, tmp_path: Path) -> None:
    val = write_tar(tmp_path / "val.tar", {"1.png": encoded(1), "2.png": encoded(2)})
    with pytest.raises(DataError, match=r"the images in .*val\.tar have no classes"):
        _examine(folder, val=val)
