"""Objects that are read by ranges: what is on disk from there, the rest from the store, ahead of its use or at once."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.arrays import Ints, Pixels
from steadytrain.data.storage.local_files import ByteRanges
from steadytrain.data.storage.object_cache import (
    LEAST_LIMIT,
    limit_bytes,
    make_room,
    objects_folder,
    used_bytes,
)
from steadytrain.data.storage.pages import PagedFile, origin_path, pages_path, runs
from steadytrain.data.storage.store import MOST_REQUESTS, ObjectPlace, Store
from steadytrain.errors import SteadyError, StorageError, storage_error
from steadytrain.format import size as size_words

REQUEST_BYTES = 4 * 2**20
"""One request brings no more."""
GAP_BYTES = 512 * 2**10
"""Two pages nearer than this are fetched by one request, where the cache has room for all of the data."""
NUM_FILLING = 4
"""The most requests at once for data that are not needed soon."""
_IDLE_SECONDS = 2.0


def is_remote_file(file: Path) -> bool:
    """Return whether a file of the cache stands for an object, of which not all bytes may be there.

    Elsewhere it is an ordinary file, whatever lies beside it: a stranger's folder could name any object, and a link in
    it any file to put the object's bytes into.
    """
    if not (pages_path(file).exists() and origin_path(file).exists()):
        return False
    return os.path.realpath(file.parent.parent) == os.path.realpath(objects_folder()) and not file.is_symlink()


def remote_file_of(file: Path) -> RemoteFile | None:
    """Open the object that a file of the cache stands for; None where it is an ordinary file."""
    return RemoteFile(file) if is_remote_file(file) else None


class RemoteFile(ByteRanges):
    """The bytes of an object, by ranges. Threads may share it.

    ``len(remote)`` is the object's size; a slice is a copy of its bytes.

    Args:
        file: as of :func:`~steadytrain.data.storage.object_cache.open_object`.
        limit: bytes that all objects in the cache may take; None: as of
            :func:`~steadytrain.data.storage.object_cache.limit_bytes`.
    """

    def __init__(self, file: Path, limit: int | None = None) -> None:
        self.disk = PagedFile(file)
        self.file = file
        self.uri = self.disk.uri
        self.facts = self.disk.facts
        self.limit = limit_bytes(file.parent.parent) if limit is None else limit
        self.stays = len(self) <= self.limit // 2
        """True where the cache has room for it, and for what is read with it."""
        self.began = self.disk.traffic()
        """The traffic of the object before it was opened here."""
        self._place = ObjectPlace.parse(self.uri)
        self._store = Store(self._place, self.disk.count_fault)
        self._closed = False
        self._begin(_pool_of(os.getpid()))

    def _begin(self, pool: FetchPool) -> None:
        """Start without requests in flight: as new, or in a fork of the process that had it open."""
        self._pool = pool
        self._flying: NDArray[np.bool_] = np.zeros(len(self.disk.present), np.bool_)  # asked for by this process
        self._error: SteadyError | None = None
        self.num_fetching = 0
        """Requests on their way; under the lock of the pool."""
        pool.add(self)

    def __len__(self) -> int:
        return self.facts.size

    def read(self, start: int, end: int) -> memoryview:
        """Return a copy of bytes ``start`` to ``end``, fetched if need be.

        Raises:
            StorageError: the store does not give them, or the object has changed.
        """
        if end - start > (most := self.limit // 4):  # what is read together has to be there together
            return memoryview(b"".join(self.read(at, min(at + most, end)) for at in range(start, end, most)))
        try:
            while (data := self.disk.copy(start, end)) is None:
                self.require(np.array([start]), np.array([end]))
        except ValueError:
            raise self._closed_error() from None
        return memoryview(data)

    def gather(self, offsets: Ints, width: int) -> Pixels:
        rows, step = b"", max(1, self.limit // 8 // (self.disk.page_bytes + width))
        for start in range(0, len(offsets), step):
            block = offsets[start : start + step]
            self.require(block, block + width)
            rows += b"".join(self.read(at, at + width) for at in block.tolist())
        return np.frombuffer(rows, np.uint8).reshape(len(offsets), width).copy()

    def whole(self) -> memoryview:
        """Fetch all of it, to stay until it is closed, and return a map of the file; errors as of :meth:`read`."""
        if not self.stays:
            raise StorageError(
                f"{self.uri} has {size_words(len(self))} and is needed whole; the cache may keep"
                f" {size_words(self.limit // 2)} of one object: set STEADYTRAIN_OBJECT_BYTES to more, or"
                " STEADYTRAIN_CACHE to another disk"
            )
        self.disk.keep()
        self.require(np.array([0]), np.array([len(self)]))
        with self.file.open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))

    def has(self, starts: Ints, ends: Ints) -> bool:
        """Return whether some ranges are on disk. Raises ValueError: it is closed."""
        size = self.disk.page_bytes
        return all(
            self.disk.has(start // size, -(-end // size))
            for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
        )

    def require(self, starts: Ints, ends: Ints) -> None:
        """Wait until some ranges are on disk; errors as of :meth:`read`."""
        self.wait(self.ask(starts, ends, at_once=True))

    def ask(self, starts: Ints, ends: Ints, *, at_once: bool = False) -> Ints:
        """Start fetching some ranges, before all else (``at_once``) or ahead of use; return their missing pages."""
        missing = self.disk.missing(self._pages_of(starts, ends))
        if len(missing):
            with self._own_pool() as pool:
                self._queue(pool, missing, at_once=at_once)
        return missing

    def fill(self) -> None:
        """Fetch all of it in large requests, while there is nothing that is needed sooner."""
        with self._own_pool() as pool:
            if not self._closed:
                pool.fill(self)

    def claim_missing(self, start: int) -> tuple[int, int]:
        """Claim the next pages, from ``start`` on, that are neither here nor on their way: those of one request.

        The caller holds the lock of the pool. Returns the first page and the end; they are equal where none is missing.
        """
        wanted = (self.disk.present[start:] == 0) & ~self._flying[start:]
        first = int(wanted.argmax()) if wanted.any() else len(wanted)
        stretch = wanted[first : first + max(1, REQUEST_BYTES // self.disk.page_bytes)]
        count = len(stretch) if stretch.all() else int(stretch.argmin())
        self._flying[start + first : start + first + count] = True
        return start + first, start + first + count

    def wait(self, pages: Ints) -> None:
        """Wait until some pages are on disk; errors as of :meth:`read`."""
        if not len(pages):
            return
        with self._own_pool() as pool:
            while len(pages := pages[self.disk.present[pages] == 0]):
                if self._closed:
                    raise self._closed_error()
                if self._error is not None:
                    raise self._error
                if not self._flying[pages].all():  # removed since they were asked for
                    self._queue(pool, pages, at_once=True)
                pool.done.wait(timeout=1.0)  # another process may bring them

    def close(self) -> None:
        """Fetch nothing more; closing twice is fine. What is on disk stays.

        A request that hangs is not waited for; what it brings is still written.
        """
        with self._own_pool() as pool:
            if self._closed:
                return
            self._closed = True
            pool.remove(self)
        pool.join(self)

    def _pages_of(self, starts: Ints, ends: Ints) -> Ints:
        """Return the pages that some ranges touch, rising, each once."""
        size = self.disk.page_bytes
        first, end = np.maximum(starts, 0) // size, -(-np.minimum(ends, len(self)) // size)
        counts = np.maximum(end - first, 0)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.unique(np.repeat(first, counts) + within)

    def _closed_error(self) -> StorageError:
        return StorageError(f"{self.uri} was closed while it was being read")

    @contextmanager
    def _own_pool(self) -> Iterator[FetchPool]:
        """Hold the lock of this process's pool."""
        if self._pool.process != os.getpid():
            self._begin(_pool_of(os.getpid()))
        with self._pool.lock:
            yield self._pool

    def _queue(self, pool: FetchPool, pages: Ints, *, at_once: bool) -> None:
        """Queue requests for the missing pages that are not being fetched yet."""
        if self._closed or self._error is not None:
            return
        if at_once:
            pool.hurry(self, pages)
        most = max(1, REQUEST_BYTES // self.disk.page_bytes)
        gap = GAP_BYTES // self.disk.page_bytes if self.stays else 1
        requests: list[_Request] = []
        for start, stop in runs(pages[~self._flying[pages]], gap=gap):
            near = np.arange(start, stop)
            near = near[(self.disk.present[near] == 0) & ~self._flying[near]]  # or else it would come twice
            for first, end in runs(near, gap=0):
                requests += [_Request(self, at, min(at + most, end)) for at in range(first, end, most)]
                self._flying[first:end] = True
        if requests:
            pool.put(requests, at_once=at_once)

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
            error = StorageError(f"{self.uri} cannot be read: {type(failed).__name__}")
        with self._pool.lock:
            self._flying[first:end] = False
            if error is not None and self._error is None:
                # Where a loader reads, a DataError would be one bad image; this is the end of all of them.
                self._error = error if isinstance(error, StorageError) else StorageError(str(error))

    def _fetch(self, first: int, end: int) -> None:
        if self.disk.has(first, end):  # another process was faster
            return
        size = self.disk.page_bytes
        data, _ = self._store.read(self._place, first * size, min(end * size, len(self)), expected=self.facts)
        try:
            self.disk.write(first, end, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            objects = self.file.parent.parent
            self.limit = max(LEAST_LIMIT, used_bytes(objects) * 7 // 8)  # the disk has less room than it had
            make_room(objects, self.limit)
            self.disk.write(first, end, data)
        if self._pool.count_fetched(len(data), most=self.limit // 32):
            make_room(self.file.parent.parent, self.limit)


class _Request(NamedTuple):
    """Pages ``first`` to ``end - 1`` of an object, to be fetched together."""

    remote: RemoteFile
    first: int
    end: int


class FetchPool:
    """The threads of one process that fetch pages of all its objects, those first that somebody waits for.

    Its lock guards what is on its way, here and in each file; ``done`` is notified whenever something came.
    """

    def __init__(self, process: int) -> None:
        self.process = process
        self.lock = threading.RLock()
        self.done = threading.Condition(self.lock)
        self._asked = threading.Condition(self.lock)
        self._at_once: deque[_Request] = deque()
        self._ahead: deque[_Request] = deque()
        self._to_fill: dict[RemoteFile, int] = {}  # and the page that is looked at next
        self._num_filling = 0
        self._threads: list[threading.Thread] = []
        self._num_idle = 0
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

    def remove(self, remote: RemoteFile) -> None:
        """Drop an object's queued requests and serve it no more; the caller holds the lock."""
        self._files.discard(remote)
        self._to_fill.pop(remote, None)
        self._at_once = deque(request for request in self._at_once if request.remote is not remote)
        self._ahead = deque(request for request in self._ahead if request.remote is not remote)
        self.done.notify_all()
        if not self._files:
            self._asked.notify_all()

    def join(self, remote: RemoteFile) -> None:
        """Close an object that is removed after its requests, and end the threads if it was the last; wait a second."""
        with self.lock:
            self.done.wait_for(lambda: not remote.num_fetching, timeout=1.0)
            if not remote.num_fetching:
                remote.disk.close()
            threads = [] if self._files else list(self._threads)
        until = time.monotonic() + 1.0
        for thread in threads:
            thread.join(timeout=max(0.0, until - time.monotonic()))

    def put(self, requests: list[_Request], *, at_once: bool) -> None:
        """Queue some requests; the caller holds the lock."""
        (self._at_once if at_once else self._ahead).extend(requests)
        self._start_threads(len(self._at_once) + len(self._ahead))
        self._asked.notify(len(requests))

    def fill(self, remote: RemoteFile) -> None:
        """Fetch all of an object when there is nothing else to fetch; the caller holds the lock."""
        self._to_fill[remote] = 0
        self._start_threads(NUM_FILLING)
        self._asked.notify(NUM_FILLING)

    def _start_threads(self, num_waiting: int) -> None:
        """Start threads for waiting requests, up to the limit; the caller holds the lock."""
        for _ in range(min(MOST_REQUESTS - len(self._threads), num_waiting - self._num_idle)):
            thread = threading.Thread(target=self._work, name="storage", daemon=True)
            self._threads.append(thread)
            thread.start()

    def hurry(self, remote: RemoteFile, pages: Ints) -> None:
        """Move requests for some pages before all others; the caller holds the lock."""
        waiting = [
            request
            for request in self._ahead
            if request.remote is remote and np.searchsorted(pages, request.first) < np.searchsorted(pages, request.end)
        ]
        if waiting:
            hurried = set(waiting)
            self._ahead = deque(request for request in self._ahead if request not in hurried)
            self._at_once.extend(waiting)

    def _work(self) -> None:
        """Make requests until there were none for some time."""
        me = threading.current_thread()
        while True:
            with self.lock:
                self._num_idle += 1
                self._asked.wait_for(self._is_awaited, timeout=_IDLE_SECONDS)
                self._num_idle -= 1
                queue = self._at_once or self._ahead
                is_filling = not queue
                request = self._next_to_fill() if is_filling else queue.popleft()
                if request is None:
                    self._threads.remove(me)
                    return
                remote, first, end = request
                remote.num_fetching += 1
                self._num_filling += is_filling
            remote.fetch(first, end)
            with self.lock:
                remote.num_fetching -= 1
                self._num_filling -= is_filling
                if remote not in self._files and not remote.num_fetching:
                    remote.disk.close()
                self.done.notify_all()

    def _is_awaited(self) -> bool:
        """Return whether a thread has something to do, or nothing ever again; the caller holds the lock."""
        can_fill = bool(self._to_fill) and self._num_filling < NUM_FILLING
        return bool(self._at_once or self._ahead) or can_fill or not self._files

    def _next_to_fill(self) -> _Request | None:
        """Take the next stretch of the objects that are fetched whole; the caller holds the lock."""
        while self._to_fill and self._num_filling < NUM_FILLING:
            remote, start = next(iter(self._to_fill.items()))
            first, end = remote.claim_missing(start)
            if first < end:
                self._to_fill[remote] = end
                return _Request(remote, first, end)
            del self._to_fill[remote]
        return None


@lru_cache(maxsize=1)
def _pool_of(process: int) -> FetchPool:
    return FetchPool(process)
