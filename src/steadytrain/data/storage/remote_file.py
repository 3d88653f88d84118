"""Objects that are read by ranges: what is on disk from there, the rest from the store, ahead of its use or at once."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import itertools
import os
import threading
import time
from collections.abc import Iterator
from functools import lru_cache, partial
from pathlib import Path
from weakref import WeakSet

import numpy as np

from steadytrain.data.arrays import Ints, Pixels
from steadytrain.data.storage.local_files import ByteRanges, LocalFile, read_patiently
from steadytrain.data.storage.object_cache import (
    LEAST_LIMIT,
    fetch_list,
    limit_bytes,
    make_room,
    objects_folder,
    used_bytes,
)
from steadytrain.data.storage.pages import PagedFile, Traffic, origin_path, pages_path, runs
from steadytrain.data.storage.store import MOST_REQUESTS, ObjectPlace, Store
from steadytrain.errors import DataError, SteadyError, StorageError, storage_error
from steadytrain.files import lock_at_once, open_regular

REQUEST_BYTES = 4 * 2**20
"""One request brings no more."""
GAP_BYTES = 512 * 2**10
"""Two pages nearer than this are fetched by one request, where the cache has room for all of the data."""
NUM_FILLING = 4
"""The most requests at once for data that are not needed soon."""
NUM_COMPARED = 3
"""Records that are compared with an index, where each is a request."""
_IDLE_SECONDS = 2.0

_NOW, _AHEAD = 0, 1
"""Ranks in the queue: somebody waits, or will soon."""
_QUEUED, _FETCHING = 1, 2
"""States of a page that is on its way."""


def is_remote_file(file: Path) -> bool:
    """Return whether a file of the cache stands for an object, of which not all bytes may be there.

    Elsewhere it is an ordinary file, whatever lies beside it: a stranger's folder could name any object, and a link in
    it any file to put the object's bytes into.
    """
    if not (pages_path(file).exists() and origin_path(file).exists()):
        return False
    return os.path.realpath(file.parent.parent) == os.path.realpath(objects_folder()) and not file.is_symlink()


def open_ranges(path: Path, *, compares: bool = True) -> ByteRanges:
    """Open a file of this machine, or the object that a file of the cache stands for; nobody removes it meanwhile.

    ``compares``: of an object, compare some records with its index.

    Raises:
        DataError: it cannot be read.
        StorageError: the system cannot read it.
    """
    if is_remote_file(path):
        return RemoteFile(path, num_compared=NUM_COMPARED if compares else 0)
    try:
        with read_patiently(partial(open_regular, path), str(path)) as file:
            with contextlib.suppress(OSError):
                lock_at_once(file, shared=True)  # it stays with the number
            return LocalFile(path, file.fileno())
    except FileNotFoundError:
        raise DataError(f"there is no file {path}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


class RemoteFile(ByteRanges):
    """The bytes of an object, by ranges. Threads may share it; a forked process has what is on disk already.

    ``len(remote)`` is the object's size; a slice is a copy of its bytes.

    Args:
        file: as of :func:`~steadytrain.data.storage.object_cache.open_object`.
        num_compared: records that are compared with an index.
    """

    can_be_mended = False

    def __init__(self, file: Path, *, num_compared: int = NUM_COMPARED) -> None:
        self.disk = PagedFile(file)
        self.file = file
        self.name = self.disk.uri
        self.num_compared = num_compared
        self.limit = limit_bytes(file.parent.parent)
        self.share_room(len(self))
        self._began = self.disk.traffic()
        self._place = ObjectPlace.parse(self.name)
        self._store = Store(self._place)
        self._closed = False
        self._state = np.zeros(len(self.disk.present), np.uint8)  # of what this process has asked for
        self._filled = 0  # the first page that was not looked at yet to fetch all of the object
        self._error: SteadyError | None = None
        self.num_fetching = 0
        """Requests on their way; under the lock of the pool."""
        self._pool = _pool_of(os.getpid())
        self._pool.add(self)

    def __len__(self) -> int:
        return self.disk.facts.size

    def share_room(self, total: int) -> None:
        self.stays = total <= self.limit // 2

    def read(self, start: int, end: int) -> memoryview:
        """Return a copy of bytes ``start`` to ``end``, fetched if need be.

        Raises:
            DataError: it is closed.
            StorageError: the store does not give them, or the object has changed.
        """
        try:
            if (data := self.disk.copy(start, end)) is not None:
                return memoryview(data)
            if end - start > (most := self.limit // 4):  # what is read together has to be there together
                return memoryview(b"".join(self.read(at, min(at + most, end)) for at in range(start, end, most)))
            while (data := self.disk.copy(start, end)) is None:
                self.require(np.array([start]), np.array([end]))
        except ValueError:
            raise DataError("closed") from None
        return memoryview(data)

    def gather(self, offsets: Ints, width: int) -> Pixels:
        rows, step = b"", max(1, self.limit // 8 // (self.disk.page_bytes + width))
        for start in range(0, len(offsets), step):
            block = offsets[start : start + step]
            self.require(block, block + width)
            rows += b"".join(self.read(at, at + width) for at in block.tolist())
        return np.frombuffer(rows, np.uint8).reshape(len(offsets), width).copy()

    def expect(self, starts: Ints, ends: Ints) -> None:
        self._ask(starts, ends, _AHEAD)

    def request(self, starts: Ints, ends: Ints) -> Ints:
        return self._ask(starts, ends, _NOW)

    def wait(self, pages: Ints) -> None:
        if not len(pages):
            return
        with self._lock() as pool:
            while len(pages := pages[self.disk.present[pages] == 0]):
                if self._closed:
                    raise StorageError(f"{self.name} was closed while it was being read")
                if self._error is not None:
                    raise self._error
                self._queue(pool, pages[self._state[pages] == 0], _NOW)  # those that were removed since
                pool.done.wait(timeout=1.0)  # another process may bring them

    def fill(self) -> None:
        with self._lock() as pool:
            if self.stays and not self._closed:
                self._filled = 0
                pool.fill(self)

    def list_beside(self, suffix: str = ".lst") -> Path | None:
        return fetch_list(self.file, self.name, suffix)

    def digest(self) -> str:
        """Return what its store tells contents apart by; it is not read whole for that."""
        return hashlib.sha256(repr(self.disk.facts).encode()).hexdigest()

    def identity(self) -> object:
        return self.name, self.digest()

    def traffic(self) -> Traffic:
        return self.disk.traffic() - self._began

    def close(self) -> None:
        """Fetch nothing more; closing twice is fine. What is on disk stays.

        A request that hangs is not waited for; what it brings is still written.
        """
        if self._pool.process != os.getpid():
            self.disk.close()
            return
        with self._pool.lock:
            is_open, self._closed = not self._closed, True
        if is_open:
            self._pool.remove(self)

    def _ask(self, starts: Ints, ends: Ints, rank: int) -> Ints:
        """Start fetching some ranges; return their missing pages."""
        if self._closed:
            raise DataError("closed")
        size = self.disk.page_bytes
        first, end = np.maximum(starts, 0) // size, -(-np.minimum(ends, len(self)) // size)
        counts = np.maximum(end - first, 0)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        pages = np.unique(np.repeat(first, counts) + within)  # that the ranges touch, rising
        missing: Ints = pages[self.disk.present[pages] == 0]
        if len(missing):
            with self._lock() as pool:
                self._queue(pool, missing, rank)
        return missing

    @contextlib.contextmanager
    def _lock(self) -> Iterator[FetchPool]:
        """Hold the lock of this process's pool."""
        if self._pool.process != os.getpid():
            raise StorageError(
                f"this process was forked from one that reads {self.name}, and cannot fetch from it: start processes"
                " by spawn or forkserver"
            )
        with self._pool.lock:
            yield self._pool

    def _queue(self, pool: FetchPool, pages: Ints, rank: int) -> None:
        """Queue requests for missing pages: those that nobody asked for, and before all else also waiting ones."""
        if self._closed or self._error is not None:
            return
        most = max(1, REQUEST_BYTES // self.disk.page_bytes)
        gap = GAP_BYTES // self.disk.page_bytes if self.stays else 1
        latest = _QUEUED if rank == _NOW else 0
        for start, stop in runs(pages[self._state[pages] <= latest], gap=gap):
            near = np.arange(start, stop)
            near = near[(self.disk.present[near] == 0) & (self._state[near] <= latest)]  # or else it would come twice
            for first, end in runs(near, gap=0):
                self._state[first:end] = _QUEUED
                for at in range(first, end, most):
                    pool.put(rank, self, at, min(at + most, end))

    def claim(self, first: int, end: int) -> list[tuple[int, int]]:
        """Claim those of some pages that are still queued, as stretches; the caller holds the lock of the pool."""
        pages = first + np.flatnonzero(self._state[first:end] == _QUEUED)
        self._state[pages] = _FETCHING
        return list(runs(pages, gap=0))

    def claim_missing(self) -> list[tuple[int, int]]:
        """Claim the next pages that are neither here nor on their way, at most those of one request, as stretches.

        The caller holds the lock of the pool.
        """
        most = max(1, REQUEST_BYTES // self.disk.page_bytes)
        for start in range(self._filled, len(self._state), most):
            self._filled = start + most
            missing = (self.disk.present[start : start + most] == 0) & (self._state[start : start + most] == 0)
            if missing.any():
                pages = start + np.flatnonzero(missing)
                self._state[pages] = _FETCHING
                return list(runs(pages, gap=0))
        return []

    def fetch(self, first: int, end: int) -> None:
        """Fetch some pages and note an error for whoever waits for them; called by the pool's threads."""
        error: SteadyError | None = None
        try:
            self._fetch(first, end)
        except SteadyError as failed:
            error = failed
        except OSError as failed:
            error = storage_error(failed, self.file)
        except BaseException as failed:  # noqa: BLE001 - whoever waits has to hear of it
            error = StorageError(f"{self.name} cannot be read: {type(failed).__name__}")
        with self._pool.lock:
            self._state[first:end] = 0
            if error is not None and self._error is None:
                # Where a loader reads, a DataError would be one bad image; this is the end of all of them.
                self._error = error if isinstance(error, StorageError) else StorageError(str(error))
            self._pool.done.notify_all()

    def _fetch(self, first: int, end: int) -> None:
        if self.disk.has(first, end):  # another process was faster
            return
        size = self.disk.page_bytes
        data, _ = self._store.read(self._place, first * size, min(end * size, len(self)), expected=self.disk.facts)
        objects = self.file.parent.parent
        try:
            self.disk.write(first, end, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self.limit = max(LEAST_LIMIT, used_bytes(objects) * 7 // 8)  # the disk has less room than it had
            make_room(objects, self.limit)
            self.disk.write(first, end, data)
        if self._pool.count_fetched(len(data), most=self.limit // 32):
            make_room(objects, self.limit)


class FetchPool:
    """The threads of one process that fetch pages of all its objects, those first that somebody waits for.

    Its lock guards what is on its way, here and in each file; ``done`` is notified whenever something came.
    """

    def __init__(self, process: int) -> None:
        self.process = process
        self.lock = threading.RLock()
        self.done = threading.Condition(self.lock)
        self._asked = threading.Condition(self.lock)
        self._numbers = itertools.count()
        self._queue: list[tuple[int, int, RemoteFile, int, int]] = []  # by rank and number; first page and end
        self._to_fill: list[RemoteFile] = []
        self._num_filling = 0
        self._threads: list[threading.Thread] = []
        self._num_fetched = 0  # bytes of all objects since room was last made
        self._files: WeakSet[RemoteFile] = WeakSet()  # those that are open

    def add(self, remote: RemoteFile) -> None:
        """Serve an object; threads live as long as there is one."""
        with self.lock:
            self._files.add(remote)

    def count_fetched(self, num_bytes: int, *, most: int) -> bool:
        """Count bytes that came, of any object; return whether there were ``most`` since this last returned True."""
        with self.lock:
            self._num_fetched += num_bytes
            is_time = self._num_fetched >= most
            self._num_fetched = 0 if is_time else self._num_fetched
        return is_time

    def put(self, rank: int, remote: RemoteFile, first: int, end: int) -> None:
        """Queue a request for some pages; the caller holds the lock."""
        heapq.heappush(self._queue, (rank, next(self._numbers), remote, first, end))
        self._asked.notify()
        self._start_threads()

    def fill(self, remote: RemoteFile) -> None:
        """Fetch all of an object when there is nothing else to fetch; the caller holds the lock."""
        if remote not in self._to_fill:
            self._to_fill.append(remote)
        self._asked.notify(NUM_FILLING)
        self._start_threads()

    def _start_threads(self) -> None:
        while len(self._threads) < MOST_REQUESTS:
            thread = threading.Thread(target=self._work, name="storage", daemon=True)
            self._threads.append(thread)
            thread.start()

    def remove(self, remote: RemoteFile) -> None:
        """Drop an object's requests and close it after those on their way; the last one ends the threads.

        Waits for a second or two at most.
        """
        with self.lock:
            self._files.discard(remote)
            self._to_fill = [other for other in self._to_fill if other is not remote]
            self._queue = [entry for entry in self._queue if entry[2] is not remote]
            heapq.heapify(self._queue)
            self.done.notify_all()
            self.done.wait_for(lambda: not remote.num_fetching, timeout=1.0)
            if not remote.num_fetching:
                remote.disk.close()
            threads = [] if self._files else list(self._threads)
            if threads:
                self._asked.notify_all()
        until = time.monotonic() + 1.0
        for thread in threads:
            thread.join(timeout=max(0.0, until - time.monotonic()))

    def _work(self) -> None:
        """Make requests until there were none for some time."""
        while True:
            with self.lock:
                self._asked.wait_for(lambda: self._has_work() or not self._files, timeout=_IDLE_SECONDS)
                if not self._has_work():
                    self._threads.remove(threading.current_thread())
                    return
                is_filling = not self._queue
                if is_filling:
                    remote = self._to_fill[0]
                    stretches = remote.claim_missing()
                    if not stretches:
                        self._to_fill.remove(remote)
                else:
                    _, _, remote, first, end = heapq.heappop(self._queue)
                    stretches = remote.claim(first, end)
                remote.num_fetching += 1
                self._num_filling += is_filling
            for first, end in stretches:
                remote.fetch(first, end)
            with self.lock:
                remote.num_fetching -= 1
                self._num_filling -= is_filling
                if remote not in self._files and not remote.num_fetching:
                    remote.disk.close()
                self.done.notify_all()

    def _has_work(self) -> bool:
        return bool(self._queue) or (bool(self._to_fill) and self._num_filling < NUM_FILLING)


_pool_of = lru_cache(maxsize=1)(FetchPool)
