"""MNIST's pairs of files: pixels and labels as they were written, counts that disagree, and files that are no pair."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from tests.data.sources.samples import content, found

from steadytrain.data.sources.listing import PixelShape
from steadytrain.errors import DataError


def idx(array: NDArray[np.uint8], kind: int = 8) -> bytes:
    """An array as the format has it."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape) + array.tobytes()


@pytest.fixture(scope="module")
def digits() -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Real scans: uint8[60, 8, 8], and which digit each is."""
    digits = load_digits()
    return (digits.images[:60] * 15).astype(np.uint8), digits.target[:60].astype(np.uint8)


def write_idx(
    folder: Path, name: str, images: NDArray[np.uint8], labels: NDArray[np.uint8], *, pack: bool = False
) -> Path:
    """A pair of files as MNIST's are named; returns the path of the images."""
    folder.mkdir(exist_ok=True)
    end, change = (".gz", gzip.compress) if pack else ("", bytes)
    (folder / f"{name}-labels-idx1-ubyte{end}").write_bytes(change(idx(labels)))
    path = folder / f"{name}-images-idx{images.ndim}-ubyte{end}"
    path.write_bytes(change(idx(images)))
    return path


@pytest.mark.parametrize("pack", [False, True])
def test_a_folder_gives_training_and_test_sets(
    tmp_path: Path, digits: tuple[NDArray[np.uint8], NDArray[np.uint8]], pack: bool
) -> None:
    images, labels = digits
    write_idx(tmp_path / "mnist", "train", images[:40], labels[:40], pack=pack)
    write_idx(tmp_path / "mnist", "t10k", images[40:], labels[40:], pack=pack)
    train, test = found(tmp_path / "mnist", tmp_path / "scratch")
    assert [(value.split, len(value), value.classes) for value in (train, test)] == [
        ("train", 40, tuple("0123456789")),
        ("test", 20, tuple("0123456789")),
    ]
    assert [content(test, number) for number in range(20)] == [image.tobytes() for image in images[40:]]
    assert train.labels.tolist() == labels[:40].tolist()
    assert train.pieces is not None and train.pieces.pixels == PixelShape(8, 8, 1)
    assert np.all(train.sizes == 64)


@pytest.mark.parametrize("text", ["images", "labels"])
@pytest.mark.parametrize("style", ["{}-idx{}-ubyte", "{}.idx{}-ubyte"])
def test_either_file_of_a_pair_will_do(
    tmp_path: Path, digits: tuple[NDArray[np.uint8], NDArray[np.uint8]], text: str, style: str
) -> None:
    paths = {
        "images": tmp_path / f"emnist-letters-train-{style.format('images', 3)}",
        "labels": tmp_path / f"emnist-letters-train-{style.format('labels', 1)}",
    }
    paths["images"].write_bytes(idx(digits[0]))
    paths["labels"].write_bytes(idx(digits[1]))
    write_idx(tmp_path, "emnist-letters-test", digits[0][:5], digits[1][:5])
    [listing] = found(paths[text], tmp_path)
    assert (listing.split, len(listing)) == ("", 60)
    assert listing.names[59] == f"{paths['images'].name}[59]"


def test_colour_has_four_dimensions(tmp_path: Path) -> None:
    images = np.random.default_rng(1).integers(0, 256, (4, 5, 6, 3), np.uint8)
    [listing] = found(write_idx(tmp_path, "train", images, np.array([0, 1, 2, 1], np.uint8)), tmp_path)
    assert listing.pieces is not None and listing.pieces.pixels == PixelShape(5, 6, 3)
    assert content(listing, 3) == images[3].tobytes()


def test_labels_from_one_on_leave_class_zero_empty(tmp_path: Path) -> None:
    images = np.zeros((3, 2, 2), np.uint8)
    [listing] = found(write_idx(tmp_path, "letters", images, np.array([1, 2, 2], np.uint8)), tmp_path)
    assert listing.counts() == (0, 1, 2)


def test_a_class_list_names_the_numbers(tmp_path: Path) -> None:
    path = write_idx(tmp_path, "fashion", np.zeros((3, 2, 2), np.uint8), np.array([1, 0, 1], np.uint8))
    [listing] = found(path, tmp_path, classes=("shirt", "shoe"))
    assert (listing.classes, listing.labels.tolist()) == (("shirt", "shoe"), [1, 0, 1])
    with pytest.raises(DataError, match=r"has label 1; the class list ends at 0 \(shirt\)"):
        found(path, tmp_path, classes=("shirt",))


LABELS = np.array([0, 1], np.uint8)
PLAIN = np.zeros((2, 3, 3), np.uint8)
REFUSED = {
    "counts": (idx(PLAIN), idx(np.zeros(3, np.uint8)), "has 2 images, .* has 3 labels: they do not belong together"),
    "cut short": (idx(PLAIN)[:-1], idx(LABELS), "declares 2 x 3 x 3 = 18 bytes but holds 17: it is truncated"),
    "too long": (idx(PLAIN) + b"x", idx(LABELS), "declares 2 x 3 x 3 = 18 bytes but holds 19"),
    "immense": (struct.pack(">4B3I", 0, 0, 8, 3, *[2**32 - 1] * 3), idx(LABELS), "declares 4,294,967,295 x"),
    "empty": (idx(PLAIN[:0]), idx(LABELS[:0]), "declares 0 x 3 x 3 = 0 bytes"),
    "floats": (idx(PLAIN, 13), idx(LABELS), "holds floats; only unsigned bytes can be read"),
    "dimensions": (idx(PLAIN[0]), idx(LABELS), "are 2- and 1-dimensional: images have three or four"),
    "channels": (idx(np.zeros((2, 3, 3, 2), np.uint8)), idx(LABELS), "has 2 channels; only 1 or 3 can be read"),
    "half a header": (b"\0\0\x08\x03\0\0\0", idx(LABELS), "is truncated within its header"),
    "no idx": (idx(PLAIN), b"0,1", "is not an idx file"),
    "one class": (idx(PLAIN), idx(np.zeros(2, np.uint8)), "has only one class, 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_pairs_end_in_one_line(tmp_path: Path, case: str) -> None:
    images, labels, message = REFUSED[case]
    (tmp_path / "a-images-idx3-ubyte").write_bytes(images)
    (tmp_path / "a-labels-idx1-ubyte").write_bytes(labels)
    with pytest.raises(DataError, match=message):
        found(tmp_path / "a-images-idx3-ubyte", tmp_path / "scratch")


@pytest.mark.parametrize("missing", ["train-images-idx3-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"])
@pytest.mark.parametrize("pack", [False, True])
def test_half_a_pair_is_refused_by_the_name_of_the_missing_file(tmp_path: Path, missing: str, pack: bool) -> None:
    for name in ("train", "t10k"):
        write_idx(tmp_path, name, PLAIN, LABELS, pack=pack)
    missing += ".gz" * pack
    (tmp_path / missing).unlink()
    with pytest.raises(DataError, match=f"next to it: put {missing} into"):
        found(tmp_path, tmp_path / "scratch")


def test_files_without_a_partner_or_with_several_say_so(tmp_path: Path) -> None:
    (tmp_path / "a-images-idx3-ubyte").write_bytes(idx(PLAIN))
    (tmp_path / "images").write_bytes(idx(PLAIN))
    with pytest.raises(DataError, match=r"has no labels next to it: put a-labels-idx1-ubyte into"):
        found(tmp_path / "a-images-idx3-ubyte", tmp_path)
    with pytest.raises(DataError, match="whose name does not say whether"):
        found(tmp_path / "images", tmp_path)
    for name in ("a", "b", "b-test"):
        write_idx(tmp_path / "several", name, PLAIN, LABELS)
    with pytest.raises(DataError, match=r"holds several sets .*: give one of these files"):
        found(tmp_path / "several", tmp_path)


def test_what_a_mac_leaves_beside_the_files_is_no_set(
    tmp_path: Path, digits: tuple[NDArray[np.uint8], NDArray[np.uint8]]
) -> None:
    for name in ("train", "t10k"):
        write_idx(tmp_path / "mnist", name, digits[0][:9], digits[1][:9])
        for kind in ("images-idx3", "labels-idx1"):
            (tmp_path / "mnist" / f"._{name}-{kind}-ubyte").write_bytes(b"\0\5\x16\7" + bytes(99))
    assert [listing.split for listing in found(tmp_path / "mnist", tmp_path / "scratch")] == ["train", "test"]
