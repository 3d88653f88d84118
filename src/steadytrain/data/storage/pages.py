"""A file of an object's size on disk, in which only the pages that were fetched take room. Processes share it.

Beside the file lie what the store said of the object (``.NAME.origin``) and which pages are there (``.NAME.pages``).

- A page counts as there only when its bytes are: a kill in between costs that page. A reader that copies bytes compares
  a count of removals before and after, so that it never has a page that was removed meanwhile.
- A shared lock of the file, which each reader has, keeps the file. One of ``.NAME.origin`` keeps all of its pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import mmap
import os
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import numpy as np

from steadytrain.data.arrays import Ints
from steadytrain.data.storage.store import ObjectFacts
from steadytrain.errors import DataError, StorageError
from steadytrain.files import lock, lock_at_once, lock_surely, unlock
from steadytrain.machine.platform import pread, pwrite

PAGE_BYTES = 32 * 2**10
"""Bytes of a page. Ranges that are asked for are rounded to pages."""

_HEADER_BYTES = 4096
# Numbers in the header. The second was used by an earlier format.
_REMOVALS, _REQUESTS, _BYTES = 0, 2, 3
_NUMBER = struct.Struct("<Q")
_PUNCH = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE


@dataclass(frozen=True)
class Traffic:
    """Requests for objects, and their bytes, since they are in the cache, by all processes."""

    requests: int = 0
    bytes: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.requests + other.requests, self.bytes + other.bytes)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.requests - other.requests, self.bytes - other.bytes)


def origin_path(file: Path) -> Path:
    """Return the path of the file beside a copy that holds what the store said of its object."""
    return file.with_name(f".{file.name}.origin")


def pages_path(file: Path) -> Path:
    """Return the path of the file beside a copy that says which of its pages are on disk."""
    return file.with_name(f".{file.name}.pages")


def paged_files(folder: Path) -> Iterator[Path]:
    """Yield the paged files in a folder."""
    for pages in folder.glob(".*.pages"):
        yield folder / pages.name[1 : -len(".pages")]


class PagedFile:
    """The bytes of an object that are on disk. Threads and processes may share it.

    ``file``: as :meth:`create` made it.

    Raises:
        DataError: it is damaged, or gone.
        StorageError: the system cannot open it.
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        try:
            origin = json.loads(origin_path(file).read_text(encoding="utf-8"))
            self.uri, self.page_bytes = str(origin.pop("uri")), int(origin.pop("page_bytes"))
            self.facts = ObjectFacts(**origin)
            self._file = file.open("r+b", buffering=0)
            lock_at_once(self._file, shared=True)
            self._pages = pages_path(file).open("r+b")
            self._map = mmap.mmap(self._pages.fileno(), 0)
        except (FileNotFoundError, ValueError, TypeError) as error:
            raise DataError(f"the copy of an object at {file} is damaged ({error}): remove {file.parent}") from error
        except OSError as error:
            raise StorageError(
                f"the copy of an object at {file} cannot be opened ({error.strerror or error})"
            ) from error
        count = -(-self.facts.size // self.page_bytes)
        self._present_at = _HEADER_BYTES + 4 * count  # what is between the two was used by an earlier format
        self._header = np.frombuffer(self._map, np.uint64, _HEADER_BYTES // 8)
        self.present = np.frombuffer(self._map, np.uint8, count, self._present_at)
        """1 for each page that is on disk, else 0."""
        self._exclusive_lock = threading.Lock()

    @staticmethod
    def create(file: Path, uri: str, facts: ObjectFacts) -> None:
        """Make the file of an object, of which nothing is there yet. Raises OSError."""
        origin = {"uri": uri, "page_bytes": PAGE_BYTES, **asdict(facts)}
        origin_path(file).write_text(json.dumps(origin), encoding="utf-8")
        with pages_path(file).open("wb") as pages:
            pages.truncate(_HEADER_BYTES + 5 * -(-facts.size // PAGE_BYTES))
        new = file.with_name(f".{file.name}.new")
        with new.open("wb") as empty:
            empty.truncate(facts.size)
        new.replace(file)

    def __len__(self) -> int:
        return self.facts.size

    def has(self, first: int, end: int) -> bool:
        """Return whether pages ``first`` to ``end - 1`` are there. Raises ValueError: it is closed."""
        return self._map.find(b"\0", self._present_at + first, self._present_at + end) < 0

    def copy(self, start: int, end: int) -> bytes | None:
        """Copy bytes ``start`` to ``end``; None where not all of them are there.

        Raises:
            StorageError: the disk cannot be read.
            ValueError: it is closed.
        """
        first, last = start // self.page_bytes, -(-end // self.page_bytes)
        removals = self._map[: _NUMBER.size]
        if not self.has(first, last):
            return None
        try:
            data = pread(self._file.fileno(), end - start, start)
            if len(data) < end - start:
                raise OSError(errno.EIO, f"only {len(data):,} of {end - start:,} bytes came")
        except OSError as error:
            reason = f"cannot read {self.file} ({error.strerror or error})"
            raise StorageError(f"{reason}: remove {self.file.parent}, and run the same command again") from error
        # Whoever removes a page clears its mark, then counts, then frees it: if nobody counted, all was there.
        return data if self._map[: _NUMBER.size] == removals else None

    def write(self, first: int, end: int, data: memoryview) -> None:
        """Write pages ``first`` to ``end - 1``, which one request brought. Raises OSError."""
        with self._exclusive():
            view, at = data, first * self.page_bytes
            while view:
                written = pwrite(self._file.fileno(), view, at)
                view, at = view[written:], at + written
            self.present[first:end] = 1
            self._header[_REQUESTS] += np.uint64(1)
            self._header[_BYTES] += np.uint64(len(data))

    def drop(self, pages: Ints) -> None:
        """Remove some pages, and give their room back; nothing, where somebody keeps them.

        Raises:
            StorageError: the file system cannot do that.
        """
        with self.unless_kept() as may_drop:
            if not may_drop:
                return
            with self._exclusive():
                self.present[pages] = 0
                self._header[_REMOVALS] += np.uint64(1)  # see copy()
                for first, end in runs(np.unique(pages), gap=0):
                    _punch(self._file.fileno(), first * self.page_bytes, (end - first) * self.page_bytes, self.file)

    def traffic(self) -> Traffic:
        """Return what was fetched of it so far."""
        return Traffic(int(self._header[_REQUESTS]), int(self._header[_BYTES]))

    def close(self) -> None:
        """Let go of the files; what is on disk stays. Closing twice is fine."""
        if self._file.closed:
            return
        self._file.close()
        self._pages.close()
        self._header, self.present = self._header.copy(), self.present.copy()
        with contextlib.suppress(BufferError):
            self._map.close()

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold off all other threads and processes that change which pages are there."""
        with self._exclusive_lock:
            lock(self._pages)
            try:
                yield
            finally:
                unlock(self._pages)

    @contextlib.contextmanager
    def unless_kept(self) -> Iterator[bool]:
        """Yield whether nobody keeps the pages; nobody can begin to until the context ends."""
        with origin_path(self.file).open("r+b") as file:
            yield lock_surely(file)


def runs(pages: Ints, *, gap: int) -> Iterable[tuple[int, int]]:
    """Return first and end of each stretch that some rising pages form; gaps up to ``gap`` pages count as theirs.

    >>> list(runs(np.array([1, 2, 4, 9]), gap=0)), list(runs(np.array([1, 2, 4, 9]), gap=1))
    ([(1, 3), (4, 5), (9, 10)], [(1, 5), (9, 10)])
    """
    if not len(pages):
        return []
    breaks = np.flatnonzero(np.diff(pages) > gap + 1)
    firsts = pages[np.append(0, breaks + 1)]
    ends = pages[np.append(breaks, len(pages) - 1)] + 1
    return list(zip(firsts.tolist(), ends.tolist(), strict=True))


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None)
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]


def _punch(file: int, start: int, size: int, path: Path) -> None:
    """Free the disk blocks of a part of a file; it reads as zeros then."""
    fallocate = _fallocate()
    if fallocate is None or fallocate(file, _PUNCH, start, size):
        why = os.strerror(ctypes.get_errno()) if fallocate is not None else "this system has no such call"
        raise StorageError(
            f"the cache of objects is full, and the file system of {path.parent.parent} cannot free a part of a file"
            f" ({why}): set STEADYTRAIN_CACHE to a folder on ext4, xfs, btrfs or tmpfs, or allow more by"
            " STEADYTRAIN_OBJECT_BYTES"
        )
