"""Read a ``.rec``, or several as one set: images by number, and columns for labels and ids.

Reads need no lock and no file position, so any number of threads may share one :class:`Records`.
Whoever truncates the file meanwhile
makes the system kill this process (SIGBUS): replace record files, never rewrite them in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import struct
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.packing.images import BadImageError, read_header
from steadytrain.data.recordio.card import Card, card_of, digest_of_spots, merge_cards, record_files
from steadytrain.data.recordio.framing import HEADER_BYTES, MAGIC, MAX_PAYLOAD, index_path, read_payload, unpack
from steadytrain.data.recordio.index import Columns, Offsets, read_columns, read_index, require_records, scan
from steadytrain.errors import DataError, StorageError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MOST_CLASSES = 1_000_000

_GREY = ("1", "L", "LA", "I", "I;16", "I;16B", "F")
_START = struct.Struct("<III")
_SAMPLE = 256
_HEAD_BYTES = 8 + HEADER_BYTES


Ints = NDArray[np.int64]


class Extents(NamedTuple):
    """Where the bytes of N images lie on disk, so that they can be asked for before they are needed.

    Args:
        paths: files.
        file: int64[N], a number into ``paths``.
        offset, size: int64[N] bytes.
    """

    paths: Sequence[str]
    file: Ints
    offset: Ints
    size: Ints

    def stretches(self, *, gap: int) -> list[tuple[str, int, int]]:
        """List path, first and end byte of each stretch to read, in file order; gaps up to ``gap`` bytes are read.

        >>> two = Extents(["a"], np.zeros(3, np.int64), np.array([90, 0, 40]), np.array([10, 30, 40]))
        >>> two.stretches(gap=10)
        [('a', 0, 100)]
        >>> two.stretches(gap=0)
        [('a', 0, 30), ('a', 40, 80), ('a', 90, 100)]
        """
        if not len(self.file):
            return []
        order = np.lexsort((self.offset, self.file))
        file, first, end = self.file[order], self.offset[order], self.offset[order] + self.size[order]
        begins = np.ones(len(order), dtype=np.bool_)
        begins[1:] = (file[1:] != file[:-1]) | (first[1:] > end[:-1] + gap)
        starts = np.flatnonzero(begins)
        ends = np.maximum.reduceat(end, starts)
        return [
            (self.paths[which], at, to)
            for which, at, to in zip(file[starts].tolist(), first[starts].tolist(), ends.tolist(), strict=True)
        ]


class RecordFile:
    """The images of one file, by number from 0 on.

    Args:
        path: of the file.
        file: its map.
        offsets: where its records begin.
        card: what lies beside it; None where nothing does.
    """

    def __init__(self, path: Path, file: mmap.mmap, offsets: Offsets, card: Card | None) -> None:
        self.path = path
        self.card = card
        self._map = file
        self._view = memoryview(file)
        self._offsets = offsets
        self._closed = False

    @staticmethod
    def open(path: Path) -> RecordFile:
        """Open a file by its ``.idx``, or by scanning where there is none.

        Raises:
            DataError: no such file, not a record file, cut short, or an index or a card of another file.
        """
        file = _map(path)
        try:
            card = card_of(path)
            offsets = _find_records(path, memoryview(file))
            if card is not None and card.num_images != len(offsets):
                raise DataError(f"it holds {len(offsets)} records, its card tells of {card.num_images}: pack again")
            records = RecordFile(path, file, offsets, card)
            view = records._view
            if card is not None and card.spots and card.spots != digest_of_spots(lambda a, b: view[a:b], len(view)):
                raise DataError("it is not the file that its card tells of: copy both again, or remove the card")
            if card is not None and card.by_class:
                records._require_by_class(card)
        except DataError as error:
            raise error if str(path) in str(error) else DataError(f"{path}: {error}") from None
        return records

    def __len__(self) -> int:
        return len(self._offsets)

    def image(self, number: int) -> memoryview:
        """Return the encoded image of record ``number``, from 0 on: a view, not a copy, unless it lies in parts.

        Raises:
            IndexError: there is no such record.
            DataError: the file is damaged there, or closed.
            StorageError: the file has been cut short since it was opened.
        """
        if not 0 <= number < len(self._offsets):
            raise IndexError(f"record {number} of {self.path}, which has {len(self._offsets)}")
        offset = int(self._offsets[number])
        try:
            if self._map.size() < len(self._view):  # what lies behind its end now would end this process
                raise StorageError(
                    f"{self.path} has been cut short while it is read, from {len(self._view):,} to"
                    f" {self._map.size():,} bytes: put the whole file back and run the same command again"
                )
            magic, word, flag = _START.unpack_from(self._view, offset)
            start, end = offset + 8 + HEADER_BYTES + 4 * flag, offset + 8 + (word & MAX_PAYLOAD)
            if magic == MAGIC and word >> 29 == 0 and start <= end <= len(self._view):
                return self._view[start:end]
            return unpack(read_payload(self._view, offset)).image
        except (DataError, ValueError, struct.error) as error:
            if self._closed:
                raise DataError(f"{self.path} is closed") from None
            raise DataError(f"record {number} of {self.path} is damaged: {error}") from error

    def scatter(self) -> None:
        """Tell the system that records are read in no order: it then reads what is needed, and nothing around it."""
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no such call here, or the file is closed
            self._map.madvise(mmap.MADV_RANDOM)

    def settle(self, numbers: NDArray[np.int64]) -> None:
        """Wait until the beginnings of some records, int64[n], are in memory, without holding the interpreter's lock.

        :meth:`image` looks at them with the lock held: on a slow disk, no other thread could go on meanwhile.
        """
        with contextlib.suppress(ValueError):  # the file is closed
            if self._map.size() < len(self._view):
                return  # image() raises
            begins = self._offsets[numbers]
            ends = np.minimum(begins + _HEAD_BYTES, len(self._view) - 1)
            np.frombuffer(self._map, np.uint8).take(np.concatenate((begins, ends)))

    @cached_property
    def extents(self) -> tuple[Offsets, Offsets]:
        """Where each record begins, and its bytes up to the next one: int64[N], int64[N]."""
        begins = np.sort(self._offsets)
        ends = np.append(begins[1:], len(self._view))
        return self._offsets, ends[np.searchsorted(begins, self._offsets)] - self._offsets

    @cached_property
    def labels(self) -> NDArray[np.int64] | NDArray[np.float32]:
        """int64[N] class numbers; float32[N, L] where a record has several labels, or one that is no class number.

        Raises:
            DataError: records differ in how many labels they have, one is beyond the card's classes, or a header is
                damaged.
        """
        if self.card is not None and self.card.by_class:
            return np.repeat(np.arange(len(self.card.classes)), self.card.counts)
        labels = self._columns.labels
        single = labels[:, 0]
        if labels.shape[1] > 1 or not np.all((single >= 0) & (single == np.floor(single)) & (single < 2**62)):
            return labels
        largest = int(single.max(initial=0))
        if self.card is not None and self.card.classes and largest >= len(self.card.classes):
            raise DataError(
                f"{self.path} has label {largest}, its card lists {len(self.card.classes)} classes:"
                " pack again, or remove the card"
            )
        return single.astype(np.int64)

    @cached_property
    def record_ids(self) -> NDArray[np.int64]:
        """int64[N]: the id in each record's header."""
        if self.card is not None and self.card.by_class:
            return np.arange(len(self))
        return self._columns.ids

    @cached_property
    def sampled_headers(self) -> list[tuple[str, int]]:
        """Mode and longest side of images spread over the file, by their headers; those that have none are left out."""
        numbers = np.unique(np.linspace(0, len(self) - 1, num=min(len(self), 16), dtype=np.int64))
        headers = []
        for number in numbers.tolist():
            with contextlib.suppress(BadImageError, DataError):
                image = read_header(self.image(number))
                headers.append((image.mode, max(image.size)))
        return headers

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of the file: the card's, or computed when it is first asked for."""
        if self.card is not None and self.card.digest:
            return self.card.digest
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def close(self) -> None:
        """Let go of the file; closing twice is fine."""
        self._closed = True
        self._view.release()
        with contextlib.suppress(BufferError):  # views are still out: the map goes with the last of them
            self._map.close()

    @cached_property
    def _columns(self) -> Columns:
        try:
            return read_columns(self._view, self._offsets)
        except DataError as error:
            raise DataError(f"{self.path}: {error}") from None

    def _require_by_class(self, card: Card) -> None:
        # The first and the last record of every class: cheap, and no other file would pass.
        ends = np.cumsum(card.counts)
        rows = np.unique(np.concatenate([ends[ends > 0] - 1, (ends - card.counts)[np.array(card.counts) > 0]]))
        labels = np.repeat(np.arange(len(card.classes)), card.counts)
        if not np.array_equal(read_columns(self._view, self._offsets[rows]).labels[:, 0], labels[rows]):
            raise DataError("its labels are not those that its card tells of: pack again, or remove the card")


def _map(path: Path) -> mmap.mmap:
    try:
        with path.open("rb") as file:
            # The map keeps the lock: as long as it lives, nobody takes the file for one that nobody needs.
            with contextlib.suppress(OSError):
                if fcntl is not None:
                    fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except ValueError:
        raise DataError(f"{path} is empty: pack or copy it again") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _find_records(path: Path, view: memoryview) -> Offsets:
    start = bytes(view[:64])
    if start.startswith(b"version https://git-lfs"):
        raise DataError("this is a Git LFS pointer, not the data: fetch it with git lfs pull")
    if int.from_bytes(start[:4], "little") != MAGIC:
        raise DataError("this is no record file: it does not begin as MXNet's RecordIO does")
    index = index_path(path)
    offsets = read_index(index) if index.exists() and index.stat().st_size else np.empty(0, np.int64)
    if not len(offsets):
        return scan(view)
    rows = np.unique(np.linspace(0, len(offsets) - 1, num=min(len(offsets), _SAMPLE), dtype=np.int64))
    if len(offsets) > 1 and not np.diff(offsets).all():
        raise DataError(f"{index.name} names a record twice: delete the index, the records are then found without it")
    try:
        require_records(view, offsets[rows])
    except DataError as error:
        remedy = "copy both again, or delete the index: the records are then found without it"
        raise DataError(f"{index.name} does not fit {path.name}, or that is cut short ({error}): {remedy}") from None
    return offsets


class Records:
    """The images of one ``.rec`` or of several, by number. Make one with :meth:`open`; close it, or use it as a context
    manager.

    ``len(records)`` is the number of images; number i is the i-th in the file, and the files follow each other. Views
    that :meth:`image` gave stay good after :meth:`close`: the map lives as long as the last of them.

    >>> import tempfile
    >>> from steadytrain.data.recordio.framing import pack_header
    >>> from steadytrain.data.recordio.writer import RecordWriter
    >>> path = Path(tempfile.mkdtemp()) / "two.rec"
    >>> with RecordWriter(path) as writer:
    ...     for i in range(2):
    ...         writer.write(pack_header(i, id=10 + i) + b"not an image", key=10 + i)
    >>> with Records.open(path) as records:
    ...     print(len(records), bytes(records.image(1)), records.labels, records.record_ids, records.classes)
    2 b'not an image' [0 1] [10 11] ('0', '1')
    """

    def __init__(self, path: Path, files: Sequence[RecordFile]) -> None:
        self.path = path
        self._place = path.absolute()  # whoever opens it again may stand elsewhere
        self.card = _merged_card(files)
        self._files = tuple(files)
        self._starts = [0, *accumulate(map(len, files))]

    @staticmethod
    def open(path: str | Path) -> Records:
        """Open a ``.rec`` by its ``.idx``, or by scanning where there is none.

        Args:
            path: of the file; or of several, as ``OUT-{00000..00003}-of-00004.rec`` or ``OUT-*.rec``.

        Raises:
            DataError: no such file, not a record file, cut short, an index or a card of another file, or several files
                with different classes.
        """
        files: list[RecordFile] = []
        try:
            for file_path in record_files(path):
                files.append(RecordFile.open(file_path))
            return Records(Path(path), files)
        except BaseException:
            for file in files:
                file.close()
            raise

    def __reduce__(self) -> tuple[Callable[[Path], Records], tuple[Path]]:
        """Pickled, it is opened anew where it arrives."""
        return Records.open, (self._place,)

    def __len__(self) -> int:
        return self._starts[-1]

    def image(self, number: int) -> memoryview:
        """Return the encoded image of record ``number``, from 0 on: a view, not a copy, unless it lies in parts.

        Raises:
            IndexError: there is no such record.
            DataError: the file is damaged there, or closed.
        """
        if len(self._files) == 1:
            return self._files[0].image(number)
        if not 0 <= number < len(self):
            raise IndexError(f"record {number} of {self.path}, which has {len(self)}")
        at = bisect_right(self._starts, number) - 1
        return self._files[at].image(number - self._starts[at])

    def scatter(self) -> None:
        """Tell the system that records are read in no order, and asked for by whoever reads them."""
        _ = self.labels  # they may lie all over the file, and are read in its order
        for file in self._files:
            file.scatter()

    def settle(self, numbers: NDArray[np.int64]) -> None:
        """Wait for what :meth:`image` looks at of some records, int64[n], without holding the interpreter's lock."""
        if len(self._files) == 1:
            self._files[0].settle(numbers)
            return
        files = np.searchsorted(self._starts, numbers, side="right") - 1
        for at in np.unique(files).tolist():
            self._files[at].settle(numbers[files == at] - self._starts[at])

    def extents(self, numbers: NDArray[np.int64]) -> Extents:
        """Return where the records ``numbers``, int64[n], lie on disk."""
        file_numbers = np.searchsorted(self._starts, numbers, side="right") - 1
        offset, size = np.empty_like(numbers), np.empty_like(numbers)
        for file_number in np.unique(file_numbers).tolist():
            rows = file_numbers == file_number
            offsets, sizes = self._files[file_number].extents
            within = numbers[rows] - self._starts[file_number]
            offset[rows], size[rows] = offsets[within], sizes[within]
        return Extents([str(file.path) for file in self._files], file_numbers, offset, size)

    @cached_property
    def labels(self) -> NDArray[np.int64] | NDArray[np.float32]:
        """int64[N] class numbers; float32[N, L] where a record has several labels, or one that is no class number.

        Raises:
            DataError: records differ in how many labels they have, one is beyond the card's classes, or a header is
                damaged.
        """
        parts = [file.labels for file in self._files]
        if len({part.shape[1:] for part in parts}) > 1:
            raise DataError(f"{self.path}: some of its files have labels of another kind: give them one by one")
        labels: NDArray[np.int64] | NDArray[np.float32] = parts[0]
        if len(parts) > 1:
            labels = np.concatenate(parts)  # type: ignore[assignment]
        labels.setflags(write=False)  # one array serves every reader
        return labels

    @cached_property
    def record_ids(self) -> NDArray[np.int64]:
        """int64[N]: the id in each record's header; of several files whose ids meet, the images' numbers."""
        parts = [file.record_ids for file in self._files]
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if len(parts) > 1 and len(np.unique(ids)) < len(ids):
            ids = np.arange(len(ids))
        ids.setflags(write=False)
        return ids

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """The card's class names; without a card "0" to the largest label; nothing for label vectors."""
        if self.card is not None:
            return self.card.classes
        if self.labels.ndim > 1:
            return ()
        largest = int(self.labels.max(initial=0))
        if largest >= MOST_CLASSES:
            raise DataError(f"{self.path}: labels run up to {largest:,}; {MOST_CLASSES:,} classes are the most")
        return tuple(str(number) for number in range(largest + 1))

    @cached_property
    def channels(self) -> int:
        """1 when the images are grey, else 3: the card's word, or that of a few images spread over the file."""
        if self.card is not None:
            return self.card.channels
        modes = [mode for file in self._files for mode, _ in file.sampled_headers]
        return 1 if modes and all(mode in _GREY for mode in modes) else 3

    @cached_property
    def largest_side(self) -> int:
        """Pixels of the longest side: the card's word, or that of a few images spread over the file."""
        if self.card is not None:
            return max(self.card.height[2], self.card.width[2])
        return max((side for file in self._files for _, side in file.sampled_headers), default=0)

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of the file: the card's, or computed when it is first asked for; of several, that of theirs."""
        digests = [file.digest for file in self._files]
        return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()

    def close(self) -> None:
        """Let go of the files; closing twice is fine."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def _merged_card(files: Sequence[RecordFile]) -> Card | None:
    """Merge the cards of all files. Raises DataError where their classes differ."""
    cards = [file.card for file in files if file.card is not None]
    if not cards:
        return None
    if len(cards) < len(files):
        without = next(file.path for file in files if file.card is None)
        raise DataError(f"{without} has no card, and others have: pack it again, or read it alone")
    first = files[0]
    for file, card in zip(files, cards, strict=True):
        if card.classes != cards[0].classes:
            raise DataError(
                f"{file.path} has other classes than {first.path}: pack it again with --classes"
                f" {first.path.with_suffix('.json')}, or pack both into one: steady pack {first.path} {file.path} OUT"
            )
    return merge_cards(cards)
