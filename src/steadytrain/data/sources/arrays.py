"""Images as bare pixels, one behind the other: MNIST's idx files, CIFAR-10 and CIFAR-100 in their binary form.

idx: images and labels in two files of bytes; Fashion-MNIST, EMNIST and others use it too. ``00 00 08`` and the number
of dimensions, three (grey) or four (colour), then their sizes, big-endian, then the pixels; one dimension for the
labels (http://yann.lecun.com/exdb/mnist/). EMNIST's images are stored turned over, and are taken as they are.

CIFAR: a folder of ``.bin`` files, or the archive as it is handed out. A record is the label (CIFAR-100: the coarse and
the fine one, of which the fine one counts), then 32 x 32 pixels, all of red, then of green, then of blue
(https://www.cs.toronto.edu/~kriz/cifar.html).
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.filenames import order_splits
from steadytrain.data.names import Names
from steadytrain.data.sources.archives import SourceFile, open_source
from steadytrain.data.sources.labels import classes_from_numbers
from steadytrain.data.sources.listing import FileList, Listing, Pieces, PixelShape
from steadytrain.data.sources.source import Request, SourceKind
from steadytrain.data.storage.local_files import open_patiently
from steadytrain.errors import DataError
from steadytrain.format import few

CIFAR_PIXELS = PixelShape(32, 32, 3, planar=True)

_IDX_NAME = re.compile(
    r"(?P<set>.*?)[-_.]?(?P<what>images|labels)[-_.]idx(?P<dims>[134])[-_.]ubyte(?:\.gz|\.bz2|\.xz|\.zst)?"
)
_COMPRESSED = (".gz", ".bz2", ".xz", ".zst")
_UNSIGNED_BYTES = 8
_OTHER_TYPES = {9: "signed bytes", 11: "16-bit numbers", 12: "32-bit numbers", 13: "floats", 14: "doubles"}
_IDX_SPLITS = {"train": "train", "t10k": "test", "test": "test", "val": "val"}
_CIFAR_BYTES = 32 * 32 * 3
_CIFAR_BATCH = re.compile(r"(?:data_batch_\d+|test_batch)(\.bin)?")
_CIFAR_FILES = frozenset(
    ("train", "test", "meta", "train.bin", "test.bin", "fine_label_names.txt", "train_X.bin", "train_y.bin")
)
_CIFAR_SPLITS = {
    10: {"train": r"data_batch_\d+\.bin", "test": r"test_batch\.bin"},
    100: {"train": r"train\.bin", "test": r"test\.bin"},
}
_MOST_NAMES_BYTES = 1 << 16


class _Array(NamedTuple):
    """A run of images of one shape."""

    name: str
    path: str
    start: int  # byte of the first image's pixels
    stride: int  # bytes from one image to the next
    num_images: int
    time: int  # ns, when the file was last changed


def _list_arrays(
    arrays: Sequence[_Array],
    pixels: PixelShape,
    labels: NDArray[np.int64],
    *,
    root: Path,
    classes: tuple[str, ...],
    split: str,
) -> Listing:
    """Arrays of one shape as one listing, in their order."""
    counts = np.array([array.num_images for array in arrays], np.int64)
    file = np.repeat(np.arange(len(arrays), dtype=np.int32), counts)
    within = np.arange(len(file)) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = np.array([(array.start, array.stride, array.time) for array in arrays], np.int64)[file]
    offsets: NDArray[np.int64] = columns[:, 0] + within * columns[:, 1]
    sizes = np.full(len(file), pixels.height * pixels.width * pixels.channels, np.int64)
    return Listing(
        split=split,
        root=root,
        classes=classes,
        names=Names(f"{array.name}[{number}]" for array in arrays for number in range(array.num_images)),
        labels=labels,
        sizes=sizes,
        times=columns[:, 2].copy(),
        ids=np.arange(len(file)),
        pieces=Pieces(tuple(array.path for array in arrays), file, offsets, sizes, pixels=pixels),
    )


def list_idx_pair(request: Request) -> list[Listing]:
    """List the images of one pair, by either file; without classes they are "0" to the largest label.

    Raises:
        DataError: the other file is missing, counts disagree, or a file is damaged.
    """
    [file] = request.files
    pair = [file, open_source(_idx_partner(file.path), request.scratch, request.say)]
    images, labels = pair if len(_idx_header(file)[0]) > 1 else pair[::-1]
    return [_list_idx(request, images, labels, split="")]


def list_idx_folder(request: Request) -> list[Listing]:
    """List a folder with ``train-images-idx3-ubyte`` and the like, by split; ``t10k-*`` is the test set.

    Raises:
        DataError: as for a pair, or more than one set of them.
    """
    folder, sets = request.where, dict[str, Path]()
    paths = (folder / name for name in request.entries)
    for path in sorted(paths, key=lambda path: (path.suffix not in _COMPRESSED, path)):
        if match := _IDX_NAME.fullmatch(path.name):
            partner = _idx_partner(path)  # of every file: half a pair would be a split that vanishes
            # Of a file that lies there compressed as well, the plain one is taken.
            sets[match["set"]] = path if match["what"] == "images" else partner
    if len(sets) == 1:
        splits = {"": next(iter(sets.values()))}
    else:
        splits = {_IDX_SPLITS.get(re.split(r"[-_.]", name)[-1], ""): path for name, path in sets.items()}
        is_one_set = len(splits) == len(sets) and len({name.rpartition("-")[0] for name in sets}) == 1
        if not is_one_set or "train" not in splits or "" in splits:
            raise DataError(
                f"{folder} holds several sets ({few([p.name for p in sets.values()])}): give one of these files"
            )
    listings: list[Listing] = []
    for split, path in order_splits(splits).items():
        images, labels = (open_source(file, request.scratch, request.say) for file in (path, _idx_partner(path)))
        listings.append(_list_idx(request.part(folder, after=listings), images, labels, split=split))
    return listings


def _list_idx(request: Request, images: SourceFile, labels: SourceFile, *, split: str) -> Listing:
    (shape, start), (num_labels, labels_start) = _idx_header(images), _idx_header(labels)
    if not 3 <= len(shape) <= 4 or len(num_labels) != 1:
        raise DataError(
            f"{images.path} and {labels.path} are {len(shape)}- and {len(num_labels)}-dimensional: images have"
            " three or four dimensions, labels one"
        )
    count, height, width = shape[:3]
    channels = shape[3] if len(shape) == 4 else 1
    if channels not in (1, 3):
        raise DataError(f"{images.path} has {channels} channels; only 1 or 3 can be read")
    if count != num_labels[0]:
        raise DataError(
            f"{images.path} has {count:,} images, {labels.path} has {num_labels[0]:,} labels: they do not belong"
            " together"
        )
    numbers = np.fromfile(labels.stored_at, np.uint8, count=count, offset=labels_start).astype(np.int64)
    known: dict[str, Any] = {"classes": request.classes, "where": str(labels.path), "say": request.say}
    names, numbers = classes_from_numbers(numbers, names=None, **known)
    size, time = height * width * channels, max(images.time, labels.time)
    pixels = PixelShape(height, width, channels)
    array = _Array(images.path.name, str(images.stored_at), start, size, count, time)
    return _list_arrays([array], pixels, numbers, root=request.where, classes=names, split=split)


def _idx_header(file: SourceFile) -> tuple[tuple[int, ...], int]:
    """The shape of an idx file's array, and the byte where it begins."""
    if file.kind != "idx":
        raise DataError(f"{file.path} is not an idx file: it must begin with the bytes 00 00 08")
    with open_patiently(file.stored_at) as opened:
        head = opened.read(4 + 4 * 8)
        length = opened.seek(0, 2)
    if head[2] != _UNSIGNED_BYTES:
        kind = _OTHER_TYPES.get(head[2], f"type {head[2]:#04x}")
        raise DataError(f"{file.path} holds {kind}; only unsigned bytes can be read")
    start = 4 + 4 * head[3]
    if len(head) < start:
        raise DataError(f"{file.path} is truncated within its header: download it again")
    shape = struct.unpack_from(f">{head[3]}I", head, 4)
    total = prod(shape)
    if not total or total != length - start:
        sizes = " x ".join(f"{size:,}" for size in shape)
        raise DataError(
            f"{file.path} declares {sizes} = {total:,} bytes but holds {length - start:,}: it is truncated or"
            " damaged; download it again"
        )
    return shape, start


def _idx_partner(path: Path) -> Path:
    """The file of labels of one of images, or the other way round: its name differs in two places."""
    match = _IDX_NAME.fullmatch(path.name)
    if match is None:
        raise DataError(
            f"{path} is an idx file whose name does not say whether it holds images or labels: name the pair"
            " NAME-images-idx3-ubyte and NAME-labels-idx1-ubyte"
        )
    kind = "labels" if match["what"] == "images" else "images"
    for other in sorted(path.parent.iterdir()):
        partner = _IDX_NAME.fullmatch(other.name)
        if partner and partner["what"] == kind and partner["set"] == match["set"]:
            return other
    dims = "3" if kind == "images" else "1"
    other_name = f"{path.name[: match.start('what')]}{kind}{path.name[match.end('what') : match.start('dims')]}{dims}"
    raise DataError(
        f"{path} has no {kind} next to it: put {other_name}{path.name[match.end('dims') :]} into {path.parent} as"
        f" well, or remove {path.name}"
    )


def is_cifar(names: Iterable[str]) -> bool:
    """Return whether these files are CIFAR-10 or CIFAR-100, or STL-10, whichever form they have."""
    bases: set[str] = set()  # of all names, of which there may be a million, only those that count
    for name in names:
        base = name.rpartition("/")[2]
        if _CIFAR_BATCH.fullmatch(base):
            return True
        if base in _CIFAR_FILES:
            bases.add(base)
    hundred = "train.bin" in bases and ("fine_label_names.txt" in bases or "test.bin" in bases)
    return hundred or {"train", "test", "meta"} <= bases or {"train_X.bin", "train_y.bin"} <= bases


def _files_in(folder: Path) -> FileList:
    """The files in a folder, each as a piece of itself."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    status = [path.stat() for path in paths]
    sizes = np.array([file.st_size for file in status], np.int64)
    times = np.array([file.st_mtime_ns for file in status], np.int64)
    numbers = np.arange(len(paths), dtype=np.int32)
    pieces = Pieces([str(path) for path in paths], numbers, np.zeros_like(sizes), sizes)
    return FileList(Names(path.name for path in paths), sizes, times, pieces)


def list_cifar(request: Request) -> list[Listing]:
    """List the training batches and the test batch, as splits.

    Raises:
        DataError: the form for Python (a pickle), a file of the wrong length, or a label beyond the classes.
    """
    root, files = request.where, _files_in(request.where) if request.is_folder else request.members
    rows = {name.rpartition("/")[2]: row for row, name in enumerate(files.names)}
    if "train_X.bin" in rows:
        raise DataError(
            f"{root} is STL-10 in binary form, which stores images column by column: convert it to a folder of classes"
        )
    if not any(base.endswith(".bin") for base in rows):
        which = "cifar-100-binary.tar.gz" if "train" in rows else "cifar-10-binary.tar.gz"
        raise DataError(
            f"{root} is CIFAR as Python pickles, which can run code when they are read: use the binary"
            f" version instead (https://www.cs.toronto.edu/~kriz/{which})"
        )
    assert files.pieces is not None
    hundred = "train.bin" in rows or ("test.bin" in rows and "test_batch.bin" not in rows)
    names = None  # one a line, in the order of the labels
    row = rows.get("fine_label_names.txt" if hundred else "batches.meta.txt")
    if row is not None and files.sizes[row] <= _MOST_NAMES_BYTES:
        lines = files.read(row).decode("utf-8", "replace").splitlines()
        names = [line.strip() for line in lines if line.strip()]
    splits = {
        split: batches
        for split, form in _CIFAR_SPLITS[100 if hundred else 10].items()
        if (batches := sorted(base for base in rows if re.fullmatch(form, base)))
    }
    if list(splits) == ["test"]:
        splits = {"": splits["test"]}
    num_labels = 1 + hundred
    stride = num_labels + _CIFAR_BYTES
    listings = []
    for split, batches in order_splits(splits).items():
        arrays: list[_Array] = []
        columns: list[NDArray[np.uint8]] = []
        for base in batches:
            piece = files.pieces[rows[base]]
            count = piece.size // stride
            if piece.deflated:
                raise DataError(f"{root} packs {base} deflated: unzip it and give the folder")
            if not count or piece.size % stride:
                raise DataError(
                    f"{base} in {root} has {piece.size:,} bytes, not a multiple of {stride:,} ({num_labels} and"
                    " 32 x 32 x 3): it is truncated, or not a CIFAR file"
                )
            records = np.memmap(piece.path, np.uint8, "r", offset=piece.offset, shape=(count, stride))
            columns.append(records[:, num_labels - 1])
            time = int(files.times[rows[base]])
            arrays.append(_Array(base, piece.path, piece.offset + num_labels, stride, count, time))
        numbers = np.concatenate(columns).astype(np.int64)
        where = f"{root} ({batches[0]})"
        listed, labels = classes_from_numbers(numbers, names=names, classes=request.classes, where=where)
        if names is None and int(numbers.max(initial=0)) >= 100:
            raise DataError(
                f"{root} has label {int(numbers.max())}; CIFAR has 10 or 100 classes: this is not a CIFAR file"
            )
        listings.append(_list_arrays(arrays, CIFAR_PIXELS, labels, root=root, classes=listed, split=split))
    return listings


def _is_idx(request: Request) -> bool:
    return any(map(_IDX_NAME.fullmatch, request.entries)) if request.is_folder else request.kinds == {"idx"}


def _list_idx_files(request: Request) -> list[Listing]:
    return list_idx_folder(request) if request.is_folder else list_idx_pair(request)


def _is_cifar(request: Request) -> bool:
    if not is_cifar(request.entries):
        return False
    return not request.is_folder or is_cifar(_files_in(request.where).names)  # "train", "test", "meta" may be folders


CIFAR = SourceKind("CIFAR in binary form", _is_cifar, list_cifar)
IDX = SourceKind("idx files (MNIST)", _is_idx, _list_idx_files, is_one_file=True)
