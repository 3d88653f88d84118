"""MNIST's format, idx: images and labels in two files of bytes; Fashion-MNIST, EMNIST and others use it too.

``00 00 08`` and the number of dimensions, three (grey) or four (colour), then their sizes, big-endian, then the pixels;
one dimension for the labels (http://yann.lecun.com/exdb/mnist/). EMNIST's images are stored turned over, and are taken
as they are.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.sources import naming
from steadytrain.data.sources.arrays import Array, list_arrays
from steadytrain.data.sources.container import Plain, open_plain
from steadytrain.data.sources.listing import Listing
from steadytrain.data.sources.members import Say, few
from steadytrain.data.sources.pieces import Pixels
from steadytrain.errors import DataError

_NAME = re.compile(
    r"(?P<set>.*?)[-_.]?(?P<what>images|labels)[-_.]idx(?P<dims>[134])[-_.]ubyte(?:\.gz|\.bz2|\.xz|\.zst)?"
)
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_BYTES = 8
_KINDS = {9: "signed bytes", 11: "16-bit numbers", 12: "32-bit numbers", 13: "floats", 14: "doubles"}
_SPLITS = {"train": "train", "t10k": "val", "test": "val", "val": "val"}


def is_idx_folder(names: Sequence[str]) -> bool:
    """Whether a folder's files are such pairs."""
    return any(_NAME.fullmatch(name) for name in names)


def list_pair(given: Plain, *, classes: Sequence[str] | None, scratch: Path, say: Say) -> Listing:
    """List the images of one pair, of which either file may be given.

    Args:
        given: the file of images or that of labels.
        classes: the class list; None: "0" to the largest label.
        scratch, say: for the other file, if that is compressed.

    Raises:
        DataError: the other file is missing, counts disagree, or a file is damaged.
    """
    other = _partner(given.path)
    pair = [given, open_plain(other, scratch, say)]
    first = _header(given)
    images, labels = pair if len(first.shape) > 1 else pair[::-1]
    return _list(images, labels, root=given.path, split="", classes=classes)


def list_folder(folder: Path, *, classes: Sequence[str] | None, scratch: Path, say: Say) -> list[Listing]:
    """List a folder with ``train-images-idx3-ubyte`` and the like: ``train-*`` to train, ``t10k-*`` or ``test-*`` to
    validate with.

    Raises:
        DataError: as for a pair, or more than one set of them.
    """
    splits = _splits(folder)
    listings: list[Listing] = []
    for split, path in splits.items():
        given = classes or (listings[0].classes if listings else None)
        images, labels = (open_plain(one, scratch, say) for one in (path, _partner(path)))
        listings.append(_list(images, labels, root=folder, split=split, classes=given))
    return listings


def _splits(folder: Path) -> dict[str, Path]:
    """The files of images by their split, training set first; a single file has none."""
    named = [
        path for path in sorted(folder.iterdir()) if (told := _NAME.fullmatch(path.name)) and told["what"] == "images"
    ]
    # Of a file that lies there compressed as well, the plain one is taken.
    found = {_set(path): path for path in sorted(named, key=lambda path: path.suffix not in _COMPRESSED)}
    if not found:
        raise DataError(f"{folder} holds labels without their images: put the files of images beside them")
    if len(found) == 1:
        return {"": next(iter(found.values()))}
    splits: dict[str, Path] = {}
    for name, path in found.items():
        splits[_SPLITS.get(re.split(r"[-_.]", name)[-1], "")] = path
    if sorted(splits) != ["train", "val"] or len(found) > 2 or len({name.rpartition("-")[0] for name in found}) > 1:
        raise DataError(
            f"{folder} holds several sets ({few([p.name for p in found.values()])}): give one of these files"
        )
    return {split: splits[split] for split in ("train", "val")}


@dataclass(frozen=True)
class _Header:
    shape: tuple[int, ...]
    start: int


def _list(images: Plain, labels: Plain, *, root: Path, split: str, classes: Sequence[str] | None) -> Listing:
    told, names = _header(images), _header(labels)
    if not 3 <= len(told.shape) <= 4 or len(names.shape) != 1:
        raise DataError(
            f"{images.path} and {labels.path} are {len(told.shape)}- and {len(names.shape)}-dimensional: images have"
            " three or four dimensions, labels one"
        )
    count, height, width = told.shape[:3]
    channels = told.shape[3] if len(told.shape) == 4 else 1
    if channels not in (1, 3):
        raise DataError(f"{images.path} has {channels} values for each pixel: 1 and 3 are read")
    if count != names.shape[0]:
        raise DataError(
            f"{images.path} has {count:,} images, {labels.path} has {names.shape[0]:,} labels: they are not a pair"
        )
    numbers = _read_labels(labels, names)
    listed, placed = naming.from_numbers(numbers, names=None, classes=classes, where=str(labels.path))
    size = height * width * channels
    array = Array(images.path.name, str(images.at), told.start, size, count, max(images.time, labels.time))
    return list_arrays([array], Pixels(height, width, channels), placed, root=root, classes=listed, split=split)


def _read_labels(labels: Plain, told: _Header) -> NDArray[np.int64]:
    return np.fromfile(labels.at, np.uint8, count=told.shape[0], offset=told.start).astype(np.int64)


def _header(plain: Plain) -> _Header:
    if plain.kind != "idx":
        raise DataError(f"{plain.path} is no idx file: it must begin with the bytes 00 00 08")
    with plain.at.open("rb") as file:
        head = file.read(4 + 4 * 8)
        length = file.seek(0, 2)
    if head[2] != _BYTES:
        raise DataError(f"{plain.path} holds {_KINDS.get(head[2], f'type {head[2]:#04x}')}; unsigned bytes are read")
    dims = head[3]
    if len(head) < 4 + 4 * dims:
        raise DataError(f"{plain.path} is cut short, within its header: download it again")
    shape = struct.unpack_from(f">{dims}I", head, 4)
    total = 1
    for size in shape:
        total *= size
    start = 4 + 4 * dims
    if not total or total != length - start:
        sizes = " x ".join(f"{size:,}" for size in shape)
        raise DataError(
            f"{plain.path} announces {sizes} = {total:,} bytes and holds {length - start:,}: it is cut short or"
            " damaged, download it again"
        )
    return _Header(shape, start)


def _set(path: Path) -> str:
    told = _NAME.fullmatch(path.name)
    return told["set"] if told else ""


def _partner(path: Path) -> Path:
    """The file of labels of one of images, or the other way round: its name differs in two places."""
    told = _NAME.fullmatch(path.name)
    if told is None:
        raise DataError(
            f"{path} is an idx file and its name does not say of what: call the pair NAME-images-idx3-ubyte and"
            " NAME-labels-idx1-ubyte"
        )
    wanted = "labels" if told["what"] == "images" else "images"
    for other in sorted(path.parent.iterdir()):
        found = _NAME.fullmatch(other.name)
        if found and found["what"] == wanted and found["set"] == told["set"]:
            return other
    raise DataError(f"{path} has no {wanted} beside it ({told['set']}-{wanted}-idx...): put both into one folder")
