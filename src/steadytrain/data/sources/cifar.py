"""CIFAR-10 and CIFAR-100 in their binary form: a folder of ``.bin`` files, or the archive as it is handed out.

A record is the label (CIFAR-100: the coarse and the fine one, of which the fine one counts), then 32 x 32 pixels, all
of red, then of green, then of blue (https://www.cs.toronto.edu/~kriz/cifar.html).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.sources import naming
from steadytrain.data.sources.arrays import Array, list_arrays
from steadytrain.data.sources.listing import Listing
from steadytrain.data.sources.members import Member, Members, Say
from steadytrain.data.sources.pieces import Pixels
from steadytrain.data.sources.splits import in_order
from steadytrain.errors import DataError

PIXELS = Pixels(32, 32, 3, planar=True)

_PIXEL_BYTES = 32 * 32 * 3
_BATCH = re.compile(r"(?:data_batch_\d+|test_batch)\.bin")
_PYTHON = re.compile(r"data_batch_\d+|test_batch")
_MOST_NAMES_BYTES = 1 << 16


def is_cifar(names: Iterable[str]) -> bool:
    """Whether these files are one of the two, whichever form they have."""
    bases = {name.rpartition("/")[2] for name in names}
    ten = any(_BATCH.fullmatch(base) or _PYTHON.fullmatch(base) for base in bases)
    hundred = "train.bin" in bases and ("fine_label_names.txt" in bases or "test.bin" in bases)
    return ten or hundred or {"train", "test", "meta"} <= bases or {"train_X.bin", "train_y.bin"} <= bases


def list_folder(folder: Path, *, classes: Sequence[str] | None, say: Say) -> list[Listing]:
    """List a folder that :func:`is_cifar` recognises. Raises DataError as :func:`list_batches` does."""
    members = Members()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            about = path.stat()
            found = Member(path.name, 0, about.st_size, about.st_size)
            members.add_archive(path, at=path, time=about.st_mtime_ns, found=[found])
    return list_batches(members, root=folder, classes=classes, say=say)


def list_batches(members: Members, *, root: Path, classes: Sequence[str] | None, say: Say) -> list[Listing]:
    """The training batches and the test batch as listings to train and to validate with.

    Args:
        members: the files, whether in a folder or in a tar.
        root: what the user named.
        classes: the class list; None takes that of the files.
        say: takes remarks.

    Raises:
        DataError: the form for Python (a pickle), a file of the wrong length, or a label beyond the classes.
    """
    rows = {name.rpartition("/")[2]: row for row, name in enumerate(members.names)}
    _refuse_other_forms(rows, root)
    hundred = "train.bin" in rows or ("test.bin" in rows and "test_batch.bin" not in rows)
    names = _names(members, rows.get("fine_label_names.txt" if hundred else "batches.meta.txt"), root)
    wanted = (
        {"train": r"train\.bin", "test": r"test\.bin"}
        if hundred
        else {
            "train": r"data_batch_\d+\.bin",
            "test": r"test_batch\.bin",
        }
    )
    batches = {split: sorted(base for base in rows if re.fullmatch(form, base)) for split, form in wanted.items()}
    found = {split: some for split, some in batches.items() if some}
    if list(found) == ["test"]:
        found = {"": found["test"]}
    listings = []
    for split, some in in_order(found, lambda _: None, str(root)).items():
        arrays = [_array(members, rows[base], base, 1 + hundred, root) for base in some]
        numbers = np.concatenate([_labels(array) for array in arrays])
        listed, labels = naming.from_numbers(numbers, names=names, classes=classes, where=f"{root} ({some[0]})")
        _require_names(listed, names, numbers, root)
        listings.append(list_arrays(arrays, PIXELS, labels, root=root, classes=listed, split=split))
    return listings


def _refuse_other_forms(rows: dict[str, int], root: Path) -> None:
    if "train_X.bin" in rows:
        raise DataError(
            f"{root} is STL-10's binary form, whose images lie column by column: write them as a folder of classes"
        )
    if not any(base.endswith(".bin") for base in rows):
        which = "cifar-100-binary.tar.gz" if "train" in rows else "cifar-10-binary.tar.gz"
        raise DataError(
            f"{root} is CIFAR's form for Python, pickles, which run what they hold when they are read: give the binary"
            f" form instead (https://www.cs.toronto.edu/~kriz/{which})"
        )


def _names(members: Members, row: int | None, root: Path) -> list[str] | None:
    """Class names, one a line, in the order of the labels; None without such a file."""
    if row is None or members.size(row) > _MOST_NAMES_BYTES or members.is_deflated(row):
        return None
    text = members.piece(row).read().decode("utf-8", "replace")
    return [line.strip() for line in text.splitlines() if line.strip()]


def _array(members: Members, row: int, base: str, num_labels: int, root: Path) -> Array:
    path, offset, size = members.place(row)
    stride = num_labels + _PIXEL_BYTES
    if members.is_deflated(row):
        raise DataError(f"{root} packs {base} deflated: unzip it and give the folder")
    if not size or size % stride:
        raise DataError(
            f"{base} in {root} has {size:,} bytes, not a multiple of {stride:,} ({num_labels} and 32 x 32 x 3):"
            " it is cut short, or no such file"
        )
    return Array(base, path, offset + num_labels, stride, size // stride, members.time(row))


def _labels(array: Array) -> NDArray[np.int64]:
    """The byte before each image."""
    shape = (array.num_images, array.stride)
    data = np.memmap(array.path, np.uint8, "r", offset=array.start - (array.stride - _PIXEL_BYTES), shape=shape)
    column: NDArray[np.int64] = data[:, array.stride - _PIXEL_BYTES - 1].astype(np.int64)
    return column


def _require_names(listed: tuple[str, ...], names: list[str] | None, numbers: NDArray[np.int64], root: Path) -> None:
    if names is None and int(numbers.max(initial=0)) >= 100:
        raise DataError(f"{root} has label {int(numbers.max())}; CIFAR's classes are 10 or 100: it is no such file")
    assert listed
