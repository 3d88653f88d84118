"""Read a ``.rec``, or several as one set: images by number, and columns for labels and ids.

Reads need no lock and no file position, so any number of threads may share one :class:`Records`. Images are read by
calls that can fail, and are tried again: a disk or a file server that does not give a mapped page ends the process
(SIGBUS). Replace record files, never rewrite them in place.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.arrays import Ints
from steadytrain.data.images.decode import BadImageError, read_header
from steadytrain.data.images.file_types import LOOK_AT, NO_IMAGE, PACK_IMAGES, UNKNOWN, recognise
from steadytrain.data.images.look import is_wide
from steadytrain.data.recordio.card import (
    Card,
    LabelNames,
    card_of,
    companion_fault,
    digest_of_spots,
    join_paths,
    merge_cards,
    record_files,
    spots_of,
)
from steadytrain.data.recordio.framing import (
    HEADER_BYTES,
    MAGIC,
    MAX_PAYLOAD,
    ImageRecord,
    find_parts,
    index_path,
    read_payload,
    unpack,
)
from steadytrain.data.recordio.hashes import SUFFIX, ImageHashes, cached_path, read_hashes
from steadytrain.data.recordio.index import (
    Offsets,
    RecordColumns,
    read_columns,
    read_heads,
    read_index,
    require_complete,
    scan,
)
from steadytrain.data.recordio.lst import RecordList, describe_record, list_path, name_by_folders, read_list_columns
from steadytrain.data.storage.array_cache import ArrayCache, file_state
from steadytrain.data.storage.local_files import ByteRanges, read_patiently
from steadytrain.data.storage.object_cache import open_objects
from steadytrain.data.storage.pages import Traffic
from steadytrain.data.storage.remote_file import open_ranges
from steadytrain.data.storage.store import MOST_REQUESTS, is_uri
from steadytrain.errors import DataError, StorageError
from steadytrain.files import Closing
from steadytrain.format import count, printable
from steadytrain.format import size as size_words
from steadytrain.machine.platform import allow_open_files

MOST_CLASSES = 1_000_000

FILES_EACH = 6  # files that this process has open for each record file, at most

_GREY = ("1", "L", "LA", "I", "I;16", "I;16B", "F")
_START = struct.Struct("<III")
_MOST_COMPARED = 4  # objects of a set, of which blocks are fetched to compare them with their cards
_SHORT = 256  # bytes; a record that holds labels alone, and not many, has no more
_SHORT_AT_ONCE = 16384
_AT_ONCE = 4 * 2**20  # bytes read before it is known how long a record is
_LEAST_KEPT = 2**20  # bytes of a set from which on the cache keeps what was read of it: less is soon read again
_LEAST_KEPT_EACH = 2**26  # of each file, where that reads its index or a few heads: each array costs a lock and a sync


class Extents(NamedTuple):
    """Places of the bytes of N images on disk, so that they can be asked for before they are needed.

    Args:
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


@dataclass(eq=False)
class _File:
    """One of the files: where its records begin, and the card beside it, if there is one.

    ``starts`` are the offsets of all records; ``numbers`` are those that hold a picture, and ``offsets`` theirs.
    ``is_of_faces``: it is laid out as InsightFace's, and of several labels the first is the class.
    """

    path: Path
    view: ByteRanges
    card: Card | None
    starts: Offsets = field(init=False)
    numbers: Ints | range = field(init=False)
    offsets: Offsets = field(init=False)
    is_of_faces: bool = False

    def state(self) -> object:
        """Return what tells the file, and what lies beside it, from any other state of them."""
        beside = [index_path(self.path), *([list_path(self.path)] if self.view.traffic() is None else [])]
        return self.view.identity(), [file_state(path) for path in beside], self.card

    @cached_property
    def cache(self) -> ArrayCache:
        return ArrayCache(self.path.stem, self.state)

    def keep(self, name: str, make: Callable[[], NDArray[Any]], least: int) -> NDArray[Any]:
        """Return what ``make`` reads of the file, of one that has ``least`` bytes once a machine."""
        cache = self.cache  # of the state that is read from here on
        return make() if len(self.view) < least else cache.get(name, make)

    @property
    def num_skipped(self) -> int:
        """Records that hold no picture."""
        return len(self.starts) - len(self.offsets)

    def ranges(self, rows: Ints) -> tuple[Ints, Ints]:
        """Return first bytes of some records, int64[n], and where the next ones begin."""
        numbers = rows if isinstance(self.numbers, range) else self.numbers[rows]
        is_last = numbers + 1 == len(self.starts)
        return self.starts[numbers], np.where(is_last, len(self.view), self.starts[numbers + 1 - is_last])

    @cached_property
    def columns(self) -> RecordColumns:
        return self.read_columns()

    def read_columns(self) -> RecordColumns:
        """Read ids and labels: of an object from its list, if it has one that fits, else from the records' headers."""
        if (columns := self._columns_of_list()) is not None:
            return columns
        try:
            columns = read_columns(self.view, self.offsets)
        except DataError as error:
            remedy = f": steady check {shlex.quote(str(self.path))} names them" if self.view.can_be_mended else ""
            raise DataError(f"{self.view.name}: {error}{remedy}") from None
        try:
            require_complete(self.view, self.starts)
        except DataError as error:
            raise DataError(
                f"{self.view.name}: {error}, and would be missed: {_index_remedy(self.path, self.view)}"
            ) from None
        return columns

    def _columns_of_list(self) -> RecordColumns | None:
        """Return what the list of an object says, if its card and its first and last record agree with it."""
        if self.card is None or not len(self.offsets):
            return None
        path = self.view.list_beside()
        columns = None if path is None else read_list_columns(path, len(self.offsets), self.card.label_width)
        if columns is None:
            return None
        if self.card.classes:
            counts = np.bincount(columns.labels[:, 0].clip(0, len(self.card.classes)).astype(np.int64))
            if not np.array_equal(np.trim_zeros(counts, "b"), np.trim_zeros(self.card.counts, "b")):
                return None
        rows = _spread(len(self.offsets), 2)
        heads = read_columns(self.view, self.offsets[rows])
        is_same = np.array_equal(heads.ids, columns.ids[rows]) and np.array_equal(heads.labels, columns.labels[rows])
        return columns if is_same else None

    def labels(self) -> NDArray[np.int64] | NDArray[np.float32]:
        if self.card is not None and self.card.by_class:
            return np.repeat(np.arange(len(self.card.classes)), self.card.counts)
        labels = self.columns.labels
        if self.is_of_faces:
            labels = labels[:, :1]
        single = nearest_whole(labels[:, 0])
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
    def listed(self) -> RecordList | None:
        """The list beside it, read when a record is first named; None where there is none that can be read."""
        try:
            return RecordList.read(list_path(self.path))
        except DataError:
            return None

    def ids(self) -> NDArray[np.int64]:
        if self.card is not None and self.card.by_class:
            return self.card.first_id + np.arange(len(self.offsets))
        return self.columns.ids

    @cached_property
    def lines(self) -> NDArray[np.int64]:
        """The line of the list for each record, int64[N], by its id and its labels; -1 where it has none."""
        with contextlib.suppress(DataError):  # headers may be damaged
            if self.listed is not None:
                labels = self.labels().reshape(len(self.offsets), -1).astype(np.float32)
                return self.listed.lines_of(self.ids(), labels)
        return np.full(len(self.offsets), -1)

    def name(self, row: int) -> str:
        """Return the file that a record was made of; empty where the list does not say."""
        line = int(self.lines[row])
        return "" if self.listed is None or line < 0 else printable(self.listed.names[line])

    def fault_of_list(self) -> str:
        """Say what is wrong with the list beside it, which names the files; empty: nothing, or there is none.

        Of a list that packing wrote each byte is compared, of another one the number of lines.
        """
        path = list_path(self.path)
        if not path.is_file():
            return ""
        if self.card is not None and (checksum := self.card.checksums.get(".lst")):
            return companion_fault(path, checksum)
        try:
            with path.open("rb") as file:
                num_lines = sum(not line.isspace() for line in file)
        except OSError as error:
            return f"cannot read {path}: {error.strerror or error}"
        is_short = num_lines < len(self.offsets)
        return f"{path} has {count(num_lines, 'line')} for {count(len(self.offsets), 'image')}" if is_short else ""

    def digest(self) -> str:
        if self.card is not None and self.card.digest:
            return self.card.digest
        return self.view.digest()  # of an object, which is not read for it, the store's word

    def count_images(self) -> int:
        """Return how many of some records, spread over the file, hold one. Raises DataError: none of them."""
        rows = _spread(len(self.offsets), 16)
        reasons = [why_no_image(read_payload(self.view, int(offset))) for offset in self.offsets[rows]]
        if reasons and all(reasons):
            raise DataError(f"{self.path}: {none_is_an_image(len(rows), reasons[0])}: {PACK_IMAGES}")
        return reasons.count("")

    def hashes(self) -> ImageHashes | None:
        """Map the hashes beside it; None where there are none of these records."""
        if self.card is None or not self.card.digest:
            return None
        path = self.view.list_beside(SUFFIX) or self.path.with_suffix(SUFFIX)
        return read_hashes(path, self.card.digest, len(self.offsets))


def _open_files(paths: Sequence[Path]) -> list[_File]:
    """Open files, many at a time: those of objects are asked for."""
    step = -(-len(paths) // _MOST_COMPARED)
    with ThreadPoolExecutor(min(MOST_REQUESTS, len(paths)), "storage") as pool:
        opening = [pool.submit(_open_file, path, compares=number % step == 0) for number, path in enumerate(paths)]
    if error := next(filter(None, (future.exception() for future in opening)), None):
        for future in opening:
            if future.exception() is None:
                future.result().view.close()
        raise error
    return [future.result() for future in opening]


def _open_file(path: Path, *, compares: bool) -> _File:
    """Open a file, and compare it with its index and its card.

    ``compares``: of an object with a card, whose size is compared in any case, fetch blocks to compare them as well.
    """
    try:
        card = card_of(path)
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    with contextlib.ExitStack() as stack:
        view = open_ranges(path, compares=compares or card is None or not card.bytes)
        stack.enter_context(contextlib.closing(view))
        try:
            if not len(view):
                raise DataError("it is empty: pack or copy it again")
            file = _File(path, view, card)
            file.starts = file.offsets = offsets = _find_records(file)
            file.numbers = range(len(offsets))
            if card is not None:
                _require_card_fits(card, view, offsets)
            elif len(numbers := file.keep("pictures", lambda: _find_pictures(view, offsets), _LEAST_KEPT_EACH)):
                file.numbers, file.offsets = numbers, offsets[numbers]
                file.is_of_faces = bool(numbers[0]) and names_identities(unpack(read_payload(view, int(offsets[0]))))
        except DataError as error:
            if str(path) in str(error):
                raise
            raise DataError(f"{path}: {error}") from None
        stack.pop_all()
    return file


def _find_records(file: _File) -> Offsets:
    """Find where records begin, by the index or, where there is none, by scanning.

    All that is compared with the index and the card is asked for together.
    """
    path, view, card, index = file.path, file.view, file.card, index_path(file.path)
    wrong_index: DataError | None = None
    offsets = np.empty(0, np.int64)
    try:
        with contextlib.suppress(FileNotFoundError):
            if read_patiently(partial(os.stat, index), str(index)).st_size:
                offsets = file.keep("starts", partial(_read_unique, index), _LEAST_KEPT_EACH)
    except DataError as error:
        wrong_index = error
    rows = _spread(len(offsets), view.num_compared)
    if view.num_compared or not len(offsets):
        starts, ends = np.append(offsets[rows], 0), np.append(offsets[rows] + 8, 64)
        if card is not None:
            starts, ends = (np.concatenate(pair) for pair in zip((starts, ends), spots_of(len(view)), strict=True))
        view.require(starts, ends)
        _require_begins_like_records(view)
    if wrong_index is not None:
        raise DataError(f"{wrong_index}: {_index_remedy(path, view)}") from wrong_index
    if not len(offsets):
        if not view.stays:
            raise DataError(
                f"{index.name} is missing, and without it all {size_words(len(view))} are read, more than the cache may"
                " keep of an object: write the index (steady mxnet rec2idx) and put it beside the file, or set"
                " STEADYTRAIN_OBJECT_BYTES to more"
            )
        view.fill()
        return file.keep("scanned", partial(scan, view), _LEAST_KEPT)
    try:
        if offsets[0] < 0 or offsets[-1] >= len(view):
            raise DataError(f"the file ends at byte {len(view):,}")
        for offset in offsets[rows].tolist():
            find_parts(view, offset)
    except DataError as error:
        raise DataError(f"{index.name} does not fit {path.name} ({error}): {_index_remedy(path, view)}") from None
    return offsets


def _read_unique(index: Path) -> Offsets:
    offsets = read_index(index)
    if not np.diff(offsets).all():
        raise DataError(f"{index.name} names a record twice")
    return offsets


def _require_begins_like_records(view: ByteRanges) -> None:
    """Raise DataError where a file is of another type."""
    start = bytes(view[:64])
    if start.startswith(b"version https://git-lfs"):
        raise DataError("this is a Git LFS pointer, not the data: fetch it with git lfs pull")
    if int.from_bytes(start[:4], "little") != MAGIC:
        file_type = recognise(bytes(view[:LOOK_AT]), len(view))
        if file_type is not None and file_type.name != "text":
            raise DataError(f"this is {file_type.name}, not a record file: {file_type.advice}")
        raise DataError("this is not a record file: it does not begin like MXNet's RecordIO")


def _find_pictures(view: ByteRanges, offsets: Offsets) -> Ints:
    """Return the numbers of the records that hold more than labels; empty where all do, or none does.

    Sets of faces, as InsightFace writes them, begin with a record of two labels, between which records about identities
    lie, at the end, each with the two labels between which its images lie. No image is read for it: such a record is
    short, and so only the heads of short ones are.
    """
    short, bare = np.flatnonzero(np.diff(offsets, append=len(view)) <= _SHORT), list[Ints]()
    for start in range(0, len(short), _SHORT_AT_ONCE):
        rows = short[start : start + _SHORT_AT_ONCE]
        try:
            magics, words, flags = read_heads(view, offsets[rows]).T.astype(np.int64)
        except DataError:  # beyond the end: told where it is read
            continue
        is_bare = (
            (magics == MAGIC) & (words >> 29 == 0) & (flags > 0) & (words & MAX_PAYLOAD == HEADER_BYTES + 4 * flags)
        )
        bare.append(rows[is_bare])
    skipped = np.concatenate(bare) if bare else short
    if not len(skipped) or len(skipped) == len(offsets):
        return np.empty(0, np.int64)
    return np.delete(np.arange(len(offsets)), skipped)


def names_identities(record: ImageRecord) -> bool:
    """Return whether a record that holds no picture is the first one of a set of faces.

    Its two labels are the id behind the last image's, from which on records are about identities, and where they end.
    """
    labels = record.labels
    return len(labels) == 2 and 2 <= labels[0] <= labels[1] and all(float(label).is_integer() for label in labels)


def nearest_whole(labels: NDArray[np.float32]) -> NDArray[np.float32]:
    """Round labels that are whole numbers but for the noise of computing with floats; others stay as they are.

    >>> nearest_whole(np.array([1.0000001, 2.5, 6.999999, -1], np.float32)).tolist()
    [1.0, 2.5, 7.0, -1.0]
    """
    whole = np.rint(labels)
    if np.array_equal(whole, labels):
        return labels
    noise = np.maximum(1e-5, 2 * np.finfo(np.float32).eps * np.abs(labels))
    with np.errstate(invalid="ignore"):  # infinities
        return np.where(np.abs(labels - whole) <= noise, whole, labels)


def _index_remedy(path: Path, view: ByteRanges) -> str:
    """Say how to mend a wrong index: by writing it anew, where the records themselves are whole."""
    if not view.can_be_mended:
        return "upload both again"
    file = shlex.quote(str(path))
    try:
        scan(view)
    except DataError as error:
        return f"the records themselves are damaged ({error}): copy both again, or try steady check {file}"
    return f"steady check {file} --index writes it again"


def why_no_image(payload: memoryview | bytes) -> str:
    """Return what a record holds instead of an image, in a few words; empty where it holds one, even a damaged one."""
    try:
        read_header(unpack(payload).image)
    except DataError as error:  # no image's header, or not all of it
        file_type = recognise(bytes(payload[:LOOK_AT]), len(payload))
        return str(error) if file_type is None else file_type.name
    except BadImageError as error:
        text = str(error)
        return text.removesuffix(NO_IMAGE) if text.endswith((NO_IMAGE, UNKNOWN)) or text.startswith("empty") else ""
    return ""


def none_is_an_image(count: int, reason: str) -> str:
    """Say that none of so many records holds an image, and why the first one does not.

    >>> none_is_an_image(16, "text")
    'none of 16 records holds an image (the first: text)'
    """
    return f"none of {count:,} records holds an image (the first: {reason})"


def _require_card_fits(card: Card, view: ByteRanges, offsets: Offsets) -> None:
    if card.num_images != len(offsets):
        raise DataError(f"it holds {len(offsets)} records, its card states {card.num_images}: pack again")
    if not view.num_compared:
        return
    if card.spots:
        if card.spots != digest_of_spots(view.read, len(view)):
            raise DataError("it is not the file that its card describes: copy both again, or remove the card")
    elif card.by_class:
        # The first and the last record of every class: cheap, and no other file would pass.
        ends = np.cumsum(card.counts)
        rows = np.unique(np.concatenate([ends[ends > 0] - 1, (ends - card.counts)[np.array(card.counts) > 0]]))
        labels = np.repeat(np.arange(len(card.classes)), card.counts)
        if not np.array_equal(read_columns(view, offsets[rows]).labels[:, 0], labels[rows]):
            raise DataError("its labels are not those of its card: pack again, or remove the card")


def _spread(count: int, most: int) -> Ints:
    """Choose up to ``most`` of ``count`` numbers, evenly."""
    return np.unique(np.linspace(0, count - 1, num=min(count, most), dtype=np.int64))


class Records(Closing):
    """The images of one ``.rec`` or of several, by number. Make one with :meth:`open`; close it, or use it as a context
    manager.

    ``len(records)`` is the number of images; number i is the i-th in the file, and the files follow each other. What
    :meth:`image` gave stays good after :meth:`close`.

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

    def __init__(self, path: Path, files: Sequence[_File]) -> None:
        self.path = path
        self._place = path.absolute()  # whoever opens it again may stand elsewhere
        cards = [file.card for file in files if file.card is not None]
        if cards and len(cards) < len(files):
            without = next(file.path for file in files if file.card is None)
            raise DataError(f"{without} has no card, and others have: pack it again, or read it alone")
        self.card = merge_cards(cards, [file.path for file in files]) if cards else None
        self._files = tuple(files)
        self._starts = [0, *accumulate(len(file.offsets) for file in files)]
        self.num_bytes = sum(len(file.view) for file in files)
        """Bytes of all files."""
        for file in files:
            file.view.share_room(self.num_bytes)
        self._closed = False

    @staticmethod
    def open(path: str | Path) -> Records:
        """Open a ``.rec`` by its ``.idx``, or by scanning where there is none.

        ``path``: of the file; or of several, as ``OUT-{00000..00003}-of-00004.rec`` or ``OUT-*.rec``. A URI
        (``s3://bucket/train.rec``) is of an object, which is fetched as it is read.

        Raises:
            DataError: no such file, not a record file, cut short, an index or a card of another file, or several files
                with different classes.
            StorageError: the store of an object does not answer.
        """
        if isinstance(path, str) and is_uri(path):
            path = join_paths(open_objects(path))
        paths = record_files(path)
        allow_open_files(FILES_EACH * len(paths))
        files = _open_files(paths)
        try:
            return Records(Path(path), files)
        except BaseException:
            for file in files:
                file.view.close()
            raise

    def __reduce__(self) -> tuple[Callable[[Path], Records], tuple[Path]]:
        """Pickled, it is opened anew where it arrives."""
        return Records.open, (self._place,)

    def __len__(self) -> int:
        return self._starts[-1]

    def image(self, number: int) -> memoryview:
        """Return the encoded image of record ``number``, from 0 on.

        Raises:
            IndexError: there is no such record.
            DataError: the file is damaged there, or closed.
            StorageError: the system cannot read it, or it has been cut short or replaced since it was opened.
        """
        file, row = self._at(number)
        view, starts, at = file.view, file.starts, int(file.numbers[row])
        offset = int(starts[at])
        size = (int(starts[at + 1]) if at + 1 < len(starts) else len(view)) - offset
        try:
            data = view.read(offset, offset + min(size, _AT_ONCE))
            magic, word, flag = _START.unpack_from(data)
            start, end = 8 + HEADER_BYTES + 4 * flag, 8 + (word & MAX_PAYLOAD)
            if magic == MAGIC and word >> 29 == 0 and start <= end <= size:
                if end > len(data):
                    data = view.read(offset, offset + end)
                return data[start:end]
            return unpack(read_payload(view, offset)).image
        except (DataError, ValueError, struct.error) as error:
            if self._closed:
                raise DataError(f"{file.path} is closed") from None
            name = describe_record(int(file.numbers[row]), file.path, file.name(row))
            raise DataError(f"{name} is damaged: {error}") from error

    def require_images(self, say: Callable[[str], object] = lambda remark: None) -> None:
        """Look at some records of each file that has no card, and at the lists beside files.

        ``say``: takes a line about records that hold no picture, and are skipped, and about a damaged list.

        Raises:
            DataError: none of them holds an image.
        """
        if without_card := [file for file in self._files if file.card is None]:
            self._keep("images", lambda: np.array([file.count_images() for file in without_card]))
        faults = self._keep("list", lambda: np.array([file.fault_of_list() for file in self._files]))
        for file, fault in zip(self._files, faults.tolist(), strict=True):
            if fault:
                say(f"{fault}: names of files may be missing or wrong; pack again, or copy the list again")
            if file.num_skipped:
                remark = count(file.num_skipped, "record has", "records have") + " labels and no picture"
                if file.is_of_faces:
                    remark += " (as in sets of faces, whose record 0 and last ones are about identities)"
                remark += ": skipped"
                first = unpack(read_payload(file.view, int(file.offsets[0])))
                if file.is_of_faces and (width := len(first.labels)) > 1:
                    remark += f"; the first of {width} labels is the class"
                say(f"{file.view.name}: {remark}")

    def say_unkept(self, say: Callable[[str], object]) -> None:
        """Say why the cache does not keep what was read so far, the labels among it, if it does not."""
        faults = [cache.fault for cache in (self._cache, *(file.cache for file in self._files)) if cache.fault]
        remark = "the cache keeps nothing of these records, which each process reads anew at each start"
        if faults:
            say(f"{remark}: {faults[0]}; set STEADYTRAIN_CACHE to a folder with room")

    def describe(self, number: int) -> str:
        """Name a record in a message: its number in its file, and the image that it was made of, by the ``.lst``.

        Raises:
            IndexError: there is no such record.
        """
        file, row = self._at(number)
        return describe_record(int(file.numbers[row]), file.path, file.name(row))

    def names(self) -> Iterator[str]:
        """Yield the file that each record was made of; its number, as ``x.rec[17]``, where the ``.lst`` has none."""
        for file in self._files:
            for row in range(len(file.offsets)):
                yield file.name(row) or f"{file.path.name}[{file.numbers[row]}]"

    def _at(self, number: int) -> tuple[_File, int]:
        """Return the file that holds a record, and its number there."""
        if not 0 <= number < len(self):
            raise IndexError(f"record {number} of {self.path}, which has {len(self)}")
        at = bisect_right(self._starts, number) - 1 if len(self._files) > 1 else 0
        return self._files[at], number - self._starts[at]

    def scatter(self) -> None:
        """Tell the system that records are read in no order: it then reads what is needed, and nothing around it."""
        _ = self.labels  # they may lie all over the file, and are read in its order
        for file in self._files:
            file.view.expect_no_order()

    def settle(self, numbers: Ints) -> None:
        """Wait until some records, int64[n], are on this machine's disk; StorageError where that cannot be."""
        with contextlib.suppress(DataError):  # a file is closed
            requests = [
                (file.view, file.view.request(*file.ranges(within))) for file, _, within in self._by_file(numbers)
            ]
            for view, pages in requests:
                view.wait(pages)

    def expect(self, stretches: Sequence[tuple[str, int, int]]) -> None:
        """Begin to read stretches, as of :meth:`Extents.stretches`."""
        bounds: dict[str, list[tuple[int, int]]] = {}
        for path, start, end in stretches:
            bounds.setdefault(path, []).append((start, end))
        for file in self._files:
            if ranges := bounds.get(str(file.path)):
                with contextlib.suppress(DataError):  # it was closed meanwhile
                    file.view.expect(*np.array(ranges, np.int64).T)

    @property
    def stays(self) -> bool:
        """Return whether data that were read once stay here: False for objects that the cache has no room for."""
        return all(file.view.stays for file in self._files)

    def fill(self, needed: int) -> None:
        """Begin to fetch all objects whole, if images of ``needed`` bytes are most of them."""
        if 2 * needed < self.num_bytes:
            return
        start = os.getpid() * 2_654_435_761 % len(self._files)  # processes that share the cache begin at different ones
        for file in self._files[start:] + self._files[:start]:
            file.view.fill()

    def traffic(self) -> Traffic | None:
        """Return what was fetched of these files since they were opened, also by others; None: they are in no store."""
        each = list(filter(None, (file.view.traffic() for file in self._files)))
        return sum(each, start=Traffic()) if each else None

    @property
    def name(self) -> str:
        """Return its name for people: the path, or the URI of an object."""
        return self._files[0].view.name if len(self._files) == 1 else str(self.path)

    def extents(self, numbers: Ints) -> Extents:
        """Return where the records ``numbers``, int64[n], lie on disk."""
        which, offset, size = np.zeros_like(numbers), np.empty_like(numbers), np.empty_like(numbers)
        for file, rows, within in self._by_file(numbers):
            starts, ends = file.ranges(within)
            which[rows], offset[rows], size[rows] = self._files.index(file), starts, ends - starts
        return Extents([str(file.path) for file in self._files], which, offset, size)

    def places(self, numbers: Ints) -> list[tuple[str, str, int]]:
        """Return of each record, int64[n], its image's name (empty: unknown), its file and its number there."""
        places = [("", "", 0)] * len(numbers)
        for file, rows, within in self._by_file(numbers):
            for at, row in zip(np.arange(len(numbers))[rows].tolist(), within.tolist(), strict=True):
                places[at] = (file.name(row), file.path.name, int(file.numbers[row]))
        return places

    def number(self, file: str, record: int) -> int:
        """Return the number of a record by its file's name and its number there. Raises IndexError: there is none."""
        for opened, start in zip(self._files, self._starts, strict=False):
            row = int(np.searchsorted(opened.numbers, record))
            if opened.path.name == file and row < len(opened.numbers) and opened.numbers[row] == record:
                return start + row
        raise IndexError(f"record {record} of {file} is not in {self.path}")

    def _by_file(self, numbers: Ints) -> Iterator[tuple[_File, NDArray[np.bool_] | slice, Ints]]:
        """Yield each file that holds some of the records, which of ``numbers`` those are, and their numbers in it."""
        if len(self._files) == 1:
            yield self._files[0], slice(None), numbers
            return
        files = np.searchsorted(self._starts, numbers, side="right") - 1
        for at in np.unique(files).tolist():
            yield self._files[at], files == at, numbers[files == at] - self._starts[at]

    @cached_property
    def labels(self) -> NDArray[np.int64] | NDArray[np.float32]:
        """int64[N] class numbers; float32[N, L] where a record has several labels, or one that is no class number.

        Raises:
            DataError: records differ in how many labels they have, one is beyond the card's classes, or a header is
                damaged.
        """
        labels = self._keep("labels", self._read_labels)
        labels.setflags(write=False)  # one array serves every reader
        return labels

    def _keep(self, name: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Return what ``make`` reads of the files, of large ones once a machine."""
        return make() if self.num_bytes < _LEAST_KEPT else self._cache.get(name, make)

    @cached_property
    def _cache(self) -> ArrayCache:
        if len(self._files) == 1:
            return self._files[0].cache
        return ArrayCache(self._place.stem, lambda: [(file.cache.state, file.state()) for file in self._files])

    def _read_labels(self) -> NDArray[np.int64] | NDArray[np.float32]:
        self._fetch_columns()
        parts = [file.labels() for file in self._files]
        if len({part.shape[1:] for part in parts}) > 1:
            raise DataError(f"{self.path}: some of its files have labels of another kind: give them one by one")
        labels: NDArray[np.int64] | NDArray[np.float32] = parts[0]
        if len(parts) > 1:
            labels = np.concatenate(parts)  # type: ignore[assignment]
        return labels

    def _fetch_columns(self) -> None:
        """Read ids and labels of files that have to be asked for them, many at a time."""
        unread = [file for file in self._files if "columns" not in vars(file)]
        if len(files := [file for file in unread if file.card is None or not file.card.by_class]) > 1:
            with ThreadPoolExecutor(min(MOST_REQUESTS, len(files)), "storage") as pool:
                for file, columns in zip(files, pool.map(_File.read_columns, files), strict=True):
                    file.columns = columns

    @cached_property
    def label_counts(self) -> Ints:
        """int64[K], images of each class number, or with each of several labels."""

        def add_up() -> Ints:
            labels = self.labels
            return np.asarray((labels > 0).sum(0) if labels.ndim > 1 else np.bincount(np.asarray(labels, np.int64)))

        return self._keep("counts", add_up)

    @cached_property
    def record_ids(self) -> NDArray[np.int64]:
        """int64[N]: the id in each record's header; of several files whose ids meet, the images' numbers."""
        ids = self._keep("ids", self._read_ids)
        ids.setflags(write=False)
        return ids

    def _read_ids(self) -> NDArray[np.int64]:
        self._fetch_columns()
        parts = [file.ids() for file in self._files]
        ids = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return np.arange(len(ids)) if len(parts) > 1 and len(np.unique(ids)) < len(ids) else ids

    @cached_property
    def named_classes(self) -> tuple[str, ...]:
        """The card's class names; without one those of the images' folders in the lists beside the files.

        Nothing where neither names them: labels are then places in a class list that is not known.
        """
        if self.card is not None:
            return self.card.classes
        return tuple(self._keep("classes", lambda: np.array(self._name_by_lists(), np.str_)).tolist())

    def _name_by_lists(self) -> tuple[str, ...]:
        if self.labels.ndim > 1 or any(file.listed is None or bool((file.lines < 0).any()) for file in self._files):
            return ()
        return name_by_folders(self.labels.astype(np.int64), self.names())

    def names_among(self, classes: Sequence[str]) -> tuple[str, ...]:
        """Return :attr:`named_classes`, if by a card; by a list's folders, if some of these are among ``classes``."""
        return self.named_classes if self.card is not None or set(self.named_classes) & set(classes) else ()

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """Their names, as :attr:`named_classes`; else "0" to the largest label; nothing for label vectors."""
        if self.card is not None:
            return self.card.classes
        if self.labels.ndim > 1:
            return ()
        if self.named_classes:
            return self.named_classes
        largest = int(self.labels.max(initial=0))
        if largest >= MOST_CLASSES:
            raise DataError(f"{self.path}: labels run up to {largest:,}; at most {MOST_CLASSES:,} classes are possible")
        return tuple(str(number) for number in range(largest + 1))

    @cached_property
    def class_list(self) -> tuple[str, ...]:
        """Return the names of a model's outputs: the classes; of label vectors the names of their columns."""
        if self.card is not None:
            return self.card.class_list
        if self.labels.ndim == 1 or self.labels.shape[1] == 1:
            return self.classes
        return LabelNames(map(str, range(self.labels.shape[1])))

    @cached_property
    def channels(self) -> int:
        """1 when the images are grey, else 3: the card's word, or that of a few images spread over the file."""
        if self.card is not None:
            return self.card.channels
        is_grey = self._sampled[:, 0]
        return 1 if len(is_grey) and is_grey.all() else 3

    @cached_property
    def largest_side(self) -> int:
        """Pixels of the longest side: the card's word, or that of a few images spread over the file."""
        if self.card is not None:
            return max(self.card.height[2], self.card.width[2])
        return int(self._sampled[:, 1:].max(initial=0))

    @cached_property
    def _sampled(self) -> Ints:
        """Of images spread over the files whether it is grey, height and width, int64[k, 3]; no header: left out."""

        def read() -> Ints:
            numbers, headers = _spread(len(self), 128), list[tuple[int, int, int]]()
            self.settle(numbers)
            for number in numbers.tolist():
                with contextlib.suppress(BadImageError, DataError):
                    image = read_header(self.image(number))
                    headers.append((image.mode in _GREY, image.height, image.width))
            return np.array(headers, np.int64).reshape(-1, 3)

        return self._keep("sampled", read)

    @cached_property
    def sampled_sizes(self) -> Ints:
        """Height and width of some images spread over the files, int64[k, 2], or of one where all are of one size."""
        if self.card is not None and all(low == high > 0 for low, _, high in (self.card.height, self.card.width)):
            return np.array([[self.card.height[0], self.card.width[0]]])
        return self._sampled[:, 1:]

    @property
    def usual_fit(self) -> Literal["crop", "squash"]:
        """Return how these images become square where nobody has chosen: whole, if most of them are long."""
        return "squash" if is_wide(self.sampled_sizes) else "crop"

    @cached_property
    def digest(self) -> str:
        """sha256 (hex) of the file: the card's, or computed when it is first asked for; of several, that of theirs."""
        if all(file.card is not None and file.card.digest for file in self._files):
            return self._read_digest()
        return str(self._keep("digest", lambda: np.array([self._read_digest()]))[0])

    def _read_digest(self) -> str:
        digests = [file.digest() for file in self._files]
        return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()

    @cached_property
    def hashes(self) -> ImageHashes | None:
        """[N], hashes of the images, by which copies are found; None where neither files nor cache have them."""
        parts = [part for file in self._files if (part := file.hashes()) is not None]
        if len(parts) < len(self._files):
            with contextlib.suppress(StorageError):  # there may be no cache
                return read_hashes(cached_path(self.digest), self.digest, len(self))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def close(self) -> None:
        """Let go of the files; closing twice is fine."""
        self._closed = True
        for file in self._files:
            file.view.close()
