"""CIFAR's binary files, built from the real pictures, give those pictures back."""

from __future__ import annotations

import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from tests.data.sources.samples import content, found, require_same, told

from steadytrain.data.sources.folder import list_folder
from steadytrain.errors import DataError

Pictures = list[tuple[int, NDArray[np.uint8]]]


@pytest.fixture(scope="module")
def pictures(some_cifar: Path) -> Callable[[str], Pictures]:
    """``pictures("train")``: 100 (or 40) of the real ones, each a class number and uint8[32, 32, 3]."""

    def read(split: str) -> Pictures:
        [listing] = [listing for listing in list_folder(some_cifar) if listing.split == split]
        rows = np.random.default_rng(0).permutation(len(listing))[: 100 if split == "train" else 40].tolist()
        return [(int(listing.labels[row]), np.asarray(Image.open(some_cifar / listing.names[row]))) for row in rows]

    return read


def _record(labels: list[int], pixels: NDArray[np.uint8]) -> bytes:
    return bytes(labels) + pixels.transpose(2, 0, 1).tobytes()


NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.fixture
def ten(tmp_path: Path, pictures: Callable[[str], Pictures]) -> Path:
    """CIFAR-10 as it is handed out, smaller."""
    folder = tmp_path / "cifar-10-batches-bin"
    folder.mkdir()
    records = [_record([label], pixels) for label, pixels in pictures("train")]
    for number in range(5):
        (folder / f"data_batch_{number + 1}.bin").write_bytes(b"".join(records[number * 20 : number * 20 + 20]))
    (folder / "test_batch.bin").write_bytes(b"".join(_record([k], p) for k, p in pictures("test")))
    (folder / "batches.meta.txt").write_text("\n".join(NAMES) + "\n\n")
    (folder / "readme.html").write_text("<html>")
    return folder


@pytest.mark.slow
def test_the_pictures_are_the_real_ones(ten: Path, tmp_path: Path, pictures: Callable[[str], Pictures]) -> None:
    train, test = found(ten, tmp_path)
    assert [(value.split, value.classes, len(value)) for value in (train, test)] == [
        ("train", tuple(NAMES), 100),
        ("test", tuple(NAMES), 40),
    ]
    for listing, wanted in ((train, pictures("train")), (test, pictures("test"))):
        assert listing.labels.tolist() == [label for label, _ in wanted]
        assert listing.pieces is not None and listing.pieces.pixels is not None and listing.pieces.pixels.planar
        for number, (_, pixels) in enumerate(wanted):
            planes = np.frombuffer(content(listing, number), np.uint8).reshape(3, 32, 32)
            assert np.array_equal(planes.transpose(1, 2, 0), pixels)
    assert train.names[20] == "data_batch_2.bin[0]"


@pytest.mark.parametrize("mode", ["w", "w:gz"])
def test_the_archive_as_it_is_handed_out_gives_the_same(ten: Path, tmp_path: Path, mode: str) -> None:
    with tarfile.open(tmp_path / "cifar-10-binary.tar.gz", mode) as tar:  # type: ignore[call-overload]
        tar.add(ten, arcname=ten.name)
    require_same(found(tmp_path / "cifar-10-binary.tar.gz", tmp_path / "scratch"), found(ten, tmp_path / "scratch"))


def test_cifar_100_uses_the_fine_label(tmp_path: Path, pictures: Callable[[str], Pictures]) -> None:
    for name in ("train", "test"):
        records = [_record([19 - n % 20, n % 100], pixels) for n, (_, pixels) in enumerate(pictures(name))]
        (tmp_path / f"{name}.bin").write_bytes(b"".join(records))
    (tmp_path / "fine_label_names.txt").write_text("\n".join(f"fine{n:02d}" for n in range(100)))
    (tmp_path / "coarse_label_names.txt").write_text("\n".join(f"coarse{n}" for n in range(20)))
    train, test = found(tmp_path, tmp_path / "scratch")
    assert train.labels.tolist() == list(range(100))
    assert (train.classes[99], test.split, test.classes == train.classes) == ("fine99", "test", True)
    planes = np.frombuffer(content(train, 99), np.uint8).reshape(3, 32, 32)
    assert np.array_equal(planes.transpose(1, 2, 0), pictures("train")[99][1])


def test_without_names_classes_are_numbers_and_a_list_may_reorder_them(ten: Path, tmp_path: Path) -> None:
    reordered = found(ten, tmp_path, classes=(*NAMES[::-1], "zebra"))[0]
    assert reordered.labels.tolist() == [9 - label for label in found(ten, tmp_path)[0].labels.tolist()]
    (ten / "batches.meta.txt").unlink()
    assert found(ten, tmp_path)[0].classes == tuple("0123456789")


def test_the_form_for_python_is_refused_and_the_other_one_named(tmp_path: Path) -> None:
    for name in ("data_batch_1", "test_batch", "batches.meta"):
        (tmp_path / name).write_bytes(pickle.dumps({}))
    with pytest.raises(DataError, match=r"pickles, which can run code .*cifar-10-binary\.tar\.gz"):
        found(tmp_path, tmp_path / "scratch")
    with tarfile.open(tmp_path / "cifar-100-python.tar.gz", "w:gz") as tar:
        for name in ("train", "test", "meta"):
            tar.add(tmp_path / "batches.meta", arcname=f"cifar-100-python/{name}")
    with pytest.raises(DataError, match=r"cifar-100-binary\.tar\.gz"):
        found(tmp_path / "cifar-100-python.tar.gz", tmp_path / "scratch")


def test_damaged_files_end_in_one_line(ten: Path, tmp_path: Path) -> None:
    whole = (ten / "data_batch_2.bin").read_bytes()
    (ten / "data_batch_2.bin").write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"data_batch_2\.bin .* has 61,459 bytes, not a multiple of 3,073"):
        found(ten, tmp_path)
    (ten / "data_batch_2.bin").write_bytes(b"\xff" + whole[1:])
    with pytest.raises(DataError, match=r"has label 255; the class list ends at 9 \(truck\)"):
        found(ten, tmp_path)
    (ten / "batches.meta.txt").unlink()
    with pytest.raises(DataError, match="has label 255; CIFAR has 10 or 100 classes"):
        found(ten, tmp_path)


def test_stl_10_is_named(tmp_path: Path) -> None:
    for name in ("train_X.bin", "train_y.bin"):
        (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match="STL-10 in binary form, which stores images column by column"):
        found(tmp_path, tmp_path / "scratch")


def test_the_test_batch_alone_is_a_set_of_its_own(ten: Path, tmp_path: Path) -> None:
    for path in ten.glob("data_batch_*"):
        path.unlink()
    [listing] = found(ten, tmp_path)
    assert told(listing)["split"] == ""
    assert len(listing) == 40


def test_duplicate_class_names_are_refused(ten: Path, tmp_path: Path) -> None:
    (ten / "batches.meta.txt").write_text("\n".join([*NAMES[:9], NAMES[0]]))
    with pytest.raises(DataError, match=f"has two classes called {NAMES[0]}: rename one"):
        found(ten, tmp_path)
