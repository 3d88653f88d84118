"""The listing of a data set: names, labels, sizes and times of its images, and where their bytes lie.

A listing is a few columns, not an object for each of a million images. Images may be files of their own, or lie inside
archives, shards and arrays; whoever reads them reads those files in place, so nothing is unpacked to a disk.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.images.decode import BadImageError
from steadytrain.data.images.look import FINGERPRINT_BYTES, Look, fingerprint, look_at
from steadytrain.data.images.near import perceptual_hash
from steadytrain.data.names import Names
from steadytrain.data.storage.local_files import read_patiently, read_range, require_all
from steadytrain.errors import DataError
from steadytrain.files import kind_of_file

Labels = NDArray[np.int64] | NDArray[np.float32]
"""int64[N] class numbers, or float32[N, L] label vectors."""

PORTION_FILES = 32
MOST_INFLATED = 1 << 29  # bytes of a deflated image; unpacking takes twice as much memory
MOST_RATIO = 200  # bytes out for each byte in, above which compressed data are taken for a bomb

_FREE_OF_RATIO = 64 << 20  # bytes out that any deflated image may have

_PORTION_BYTES = 1 << 19
_LARGEST_FILE = 1 << 30


class PixelShape(NamedTuple):
    """The shape of images stored as bare pixels. ``planar``: one plane after another (CIFAR), not pixel by pixel."""

    height: int
    width: int
    channels: int
    planar: bool = False

    def of(self, data: bytes) -> NDArray[np.uint8]:
        """The pixels in ``data``: uint8[height, width, 3], or uint8[height, width] of one channel."""
        values = np.frombuffer(data, np.uint8)
        if self.channels == 1:
            return values.reshape(self.height, self.width)
        if self.planar:
            return np.ascontiguousarray(values.reshape(self.channels, self.height, self.width).transpose(1, 2, 0))
        return values.reshape(self.height, self.width, self.channels)


class Piece(NamedTuple):
    """One image inside a file: ``size`` bytes from ``offset`` on, perhaps deflated (zip), perhaps bare pixels.

    ``crc`` is the CRC-32 that the image must have, ``inflated`` its bytes once inflated; -1 where they are not known.
    """

    path: str
    offset: int
    size: int
    deflated: bool = False
    pixels: PixelShape | None = None
    crc: int = -1
    inflated: int = -1

    def read(self) -> bytes:
        """Read the image's bytes.

        Raises:
            OSError: the file cannot be read or ends too early, or the image's checksum differs.
            StorageError: the system cannot read it.
            zlib.error: deflated bytes are damaged, or inflate to more than 512 MiB, or to more than 64 MiB and 200
                times their number; where the archive says so, nothing is read.
        """
        most = min(MOST_INFLATED, max(_FREE_OF_RATIO, MOST_RATIO * self.size))
        if self.deflated and self.inflated > most:
            raise zlib.error(f"it decompresses to {self.inflated:,} bytes, more than {most:,}: unzip it yourself")
        data = read_patiently(partial(read_range, self.path, self.offset, self.size), self.path)
        if len(data) < self.size:
            raise OSError(f"cut short: {os.path.basename(self.path)} ends within it")  # noqa: PTH119
        if self.deflated:
            inflater = zlib.decompressobj(-zlib.MAX_WBITS)
            most = most if self.inflated < 0 else self.inflated
            data = inflater.decompress(data, most + 1)  # a limit of 0 would be none
            if len(data) > most:
                raise zlib.error(f"it decompresses to more than {most:,} bytes")
            if not inflater.eof:
                raise zlib.error("it ends too early")
        self.check(data)
        return data

    def check(self, data: bytes) -> None:
        """Compare the image's bytes, inflated, with its checksum. Raises OSError where they differ."""
        if self.crc >= 0 and zlib.crc32(data) != self.crc:
            raise OSError(f"damaged: its checksum differs from the one in {os.path.basename(self.path)}")  # noqa: PTH119


@dataclass(frozen=True, eq=False)
class Pieces:
    """Places of N images inside files.

    Args:
        paths: of the files that hold them.
        file: int32[N], a number into ``paths``.
        offset, size: int64[N] bytes.
        deflated: bool[N]; None where none is.
        pixels: the shape of every image, where they are bare pixels.
        crc: int64[N], the CRC-32 of each image, -1 where it is not known; None where none is.
        inflated: int64[N] bytes of each image once inflated; None where none is deflated.

    >>> pieces = Pieces(("a.tar", "b.tar"), np.array([0, 1], np.int32), np.array([512, 1536]), np.array([70, 90]))
    >>> pieces[1]
    Piece(path='b.tar', offset=1536, size=90, deflated=False, pixels=None, crc=-1, inflated=-1)
    """

    paths: Sequence[str]
    file: NDArray[np.int32]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    deflated: NDArray[np.bool_] | None = None
    pixels: PixelShape | None = None
    crc: NDArray[np.int64] | None = None
    inflated: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.file)

    def __getitem__(self, number: int) -> Piece:
        return Piece(
            self.paths[self.file[number]],
            int(self.offset[number]),
            int(self.size[number]),
            self.deflated is not None and bool(self.deflated[number]),
            self.pixels,
            -1 if self.crc is None else int(self.crc[number]),
            -1 if self.inflated is None else int(self.inflated[number]),
        )

    def take(self, rows: NDArray[np.int64] | slice) -> Pieces:
        """Return the pieces of some images, in that order; of a slice without a copy."""
        deflated = None if self.deflated is None else self.deflated[rows]
        crc = None if self.crc is None else self.crc[rows]
        is_any_deflated = deflated is not None and deflated.any()
        return Pieces(
            self.paths,
            self.file[rows],
            self.offset[rows],
            self.size[rows],
            deflated if is_any_deflated else None,
            self.pixels,
            crc if crc is not None and (crc >= 0).any() else None,
            self.inflated[rows] if is_any_deflated and self.inflated is not None else None,
        )


@dataclass(frozen=True, eq=False)
class Listing:
    """The images of one record file to be.

    Args:
        split: ``train``, ``val``, ``test``, or empty when the source is not split.
        root: the folder that ``names`` are relative to.
        classes: names in the order of their labels; empty for label vectors.
        names: of the files, as they are below ``root``.
        labels: int64[N], or float32[N, L] for label vectors.
        sizes: int64[N] bytes; -1 where the file could not be looked at.
        times: int64[N] nanoseconds, when the file was last changed.
        ids: int64[N] for the records' headers; None: the images are listed class by class, and numbered so from 0 on.
        passed_over: names of files without the suffix of an image, and of folders beside splits (ending in a slash).
        pieces: where the bytes lie, for images inside other files; ``names`` then only name them, and ``times`` are
            those of the files that hold them.
        label_names: of the columns of label vectors, where the source has names for them.
        groups: what each image belongs to (a patient, a video), where a column of a table says so.
        label_column: name of the one column of a table that holds the labels, as it is compared: in lower case.
    """

    split: str
    root: Path
    classes: tuple[str, ...]
    names: Sequence[str]
    labels: Labels
    sizes: NDArray[np.int64]
    times: NDArray[np.int64]
    ids: NDArray[np.int64] | None = None
    passed_over: Sequence[str] = ()
    pieces: Pieces | None = None
    label_names: tuple[str, ...] = ()
    groups: Names | None = None
    label_column: str = ""

    def __len__(self) -> int:
        return len(self.names)

    def portions(self, start: int = 0) -> Iterator[tuple[int, int]]:
        """Cut the images from ``start`` on into portions for one worker each: pairs of a first and an end.

        A portion has half a megabyte: neither many small images nor a few large ones then stall a worker.
        """
        size = 0
        for end in range(start + 1, len(self) + 1):
            size += int(self.sizes[end - 1])
            if end == len(self) or end - start == PORTION_FILES or size >= _PORTION_BYTES:
                yield start, end
                start, size = end, 0

    def places(self, start: int, stop: int) -> list[str | Piece]:
        """List the places of the images ``start`` to ``stop - 1``: paths of files, or pieces of files."""
        if self.pieces is not None:
            return [self.pieces[number] for number in range(start, stop)]
        root = os.path.join(self.root, "")  # noqa: PTH118 - a million names
        return [name if os.path.isabs(name) else root + name for name in self.names[start:stop]]  # noqa: PTH117

    def counts(self, rows: NDArray[np.int64] | slice = slice(None)) -> tuple[int, ...]:
        """Images of each class, of all or of those ``rows``."""
        if not self.classes:
            return ()
        return tuple(np.bincount(self.labels[rows].astype(np.int64), minlength=len(self.classes)).tolist())


@dataclass(frozen=True, eq=False)
class FileList:
    """Files of any kind, in a folder or inside archives, in columns: of a million files no object is kept.

    Args:
        names: below their folder, or as their archive spells them.
        sizes: int64[N] bytes, once inflated; -1 where a file could not be looked at.
        times: int64[N] nanoseconds, when the file or its archive was last changed.
        pieces: where the bytes of members lie; None for files in a folder.
        archives: what the user calls the archives, in the order of ``pieces.paths``.
        folders: names of the folders that are members themselves.
    """

    names: Names
    sizes: NDArray[np.int64]
    times: NDArray[np.int64]
    pieces: Pieces | None = None
    archives: tuple[str, ...] = ()
    folders: frozenset[str] = frozenset()

    def archive(self, row: int) -> int:
        """The number of the archive that holds a member; 0 for a file in a folder."""
        return 0 if self.pieces is None else int(self.pieces.file[row])

    def read(self, row: int) -> bytes:
        """Read a member. Raises DataError where it is damaged."""
        assert self.pieces is not None
        piece = self.pieces[row]
        try:
            return piece.read()
        except (OSError, zlib.error) as error:
            raise DataError(
                f"{piece.path} is damaged ({self.names[row]}: {error}): copy or download it again"
            ) from error

    def listing(
        self,
        rows: Sequence[int] | NDArray[np.int64],
        labels: Labels,
        *,
        root: Path,
        classes: tuple[str, ...],
        names: Iterable[str] | None = None,
        split: str = "",
        by_class: bool = False,
        passed_over: Iterable[str] = (),
    ) -> Listing:
        """Make a listing of the files ``rows``, in that order, called ``names`` if they are not to keep their own.

        Those that are not listed ``by_class``, class by class, have their places as ids.
        """
        rows = np.asarray(rows, np.int64)
        return Listing(
            split=split,
            root=root,
            classes=classes,
            names=self.names.take(rows) if names is None else Names(names),
            labels=labels,
            sizes=self.sizes[rows],
            times=self.times[rows],
            ids=None if by_class else np.arange(len(rows)),
            passed_over=Names(passed_over),
            pieces=None if self.pieces is None else self.pieces.take(rows),
        )


def stat_file(path: str) -> tuple[int, int]:
    """The bytes of a file and when it was last changed (ns); -1 and 0 for a broken link.

    Raises:
        StorageError: the system cannot say.
    """
    try:
        status = read_patiently(partial(os.stat, path), path)
    except (OSError, ValueError):  # reported when it is read
        return -1, 0
    return status.st_size, status.st_mtime_ns


def read_file(path: str) -> bytes:
    """Read an image file.

    Raises:
        BadImageError: this image cannot be read; says why.
        StorageError: the system cannot read it, which is not the image's fault.
    """
    try:
        return read_patiently(partial(_read_whole, path), path)
    except OSError as error:
        raise unreadable(error, path) from None


def _read_whole(path: str) -> bytes:
    # Looked at before it is opened: a pipe would keep us waiting.
    try:
        status = os.stat(path)  # noqa: PTH116
    except ValueError as error:  # a byte of zero, or half a surrogate pair
        raise BadImageError(f"no file can have this name: {error}") from None
    if kind := kind_of_file(status.st_mode):
        raise BadImageError(f"{kind}, not a file")
    if status.st_size > _LARGEST_FILE:
        raise BadImageError(f"{status.st_size:,} bytes, more than {_LARGEST_FILE:,}")
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - called a million times
        return require_all(file.read(), status.st_size)


def read_piece(piece: Piece) -> bytes:
    """Read an image inside a file. Raises BadImageError and StorageError as :func:`read_file`."""
    if piece.size > _LARGEST_FILE:
        raise BadImageError(f"{piece.size:,} bytes, more than {_LARGEST_FILE:,}")
    try:
        return piece.read()
    except OSError as error:
        raise unreadable(error, piece.path) from None
    except zlib.error as error:
        raise BadImageError(f"damaged in the archive: {error}") from None


def unreadable(error: OSError, path: str) -> BadImageError:
    """Turn an error about the file itself into a bad image."""
    if isinstance(error, FileNotFoundError) and os.path.islink(path):  # noqa: PTH114
        return BadImageError("a broken link")
    return BadImageError((error.strerror or str(error)).lower())


def look_at_files(places: Sequence[str | Piece], *, near: bool = False) -> list[Look]:
    """Read and decode some images; ``near``: with their perceptual hashes."""
    looks = []
    for place in places:
        try:
            data = read_file(place) if isinstance(place, str) else read_piece(place)
        except BadImageError as error:
            looks.append(Look("unreadable", str(error)))
            continue
        if isinstance(place, Piece) and place.pixels is not None:
            pixels = place.pixels.of(data)
            look = perceptual_hash(pixels) if near else bytes(FINGERPRINT_BYTES)
            looks.append(Look("", "", fingerprint(pixels), "raw", place.pixels.width, place.pixels.height, near=look))
        else:
            looks.append(look_at(data, near=near))
    return looks
