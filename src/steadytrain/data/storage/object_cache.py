"""A copy on disk of as much of an object as was read: sparse, bounded, shared by all processes of a machine.

An object that is opened becomes a folder of the cache: a file of the object's name and size, in which only what was
fetched takes room, and beside it what the store said of it (``.NAME.origin``) and which pages are there
(``.NAME.pages``). Every process that opens the same content of the same object maps the same file.

- A page counts as there only when its bytes are: a kill in between costs that page. What a reader copies is checked
  against a count of removals before and after, so that it never has a page that was removed meanwhile.
- Each request asks for the content that was opened (ETag). A changed object is told; new content has a new folder.
- What is in the cache stays below a limit: folders that nobody uses go first, then the pages read least recently, whose
  room is given back to the file system.
- Each start of a machine has a cache of its own: after it went down pages are not trusted, since the system may not
  have written them; and of a disk that several machines share, none sees pages that another one is writing.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fnmatch
import glob
import hashlib
import json
import mmap
import os
import platform
import re
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import overload

import numpy as np
import psutil
from numpy.typing import NDArray

from steadytrain.data.sources.filenames import braces, validation_names
from steadytrain.data.storage.store import FAULTS, Fault, NoObjectError, ObjectFacts, Place, Store, faults_words
from steadytrain.errors import DataError, SteadyError, StorageError, storage_error
from steadytrain.format import size as size_words
from steadytrain.machine.facts import cache_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

PAGE_BYTES = 32 * 2**10
"""Of these a file consists: what is asked for is rounded to them."""
REQUEST_BYTES = 4 * 2**20
"""One request brings no more."""
GAP_BYTES = 512 * 2**10
"""Two pages nearer than this are fetched by one request, where the cache has room for all of the object."""
THREADS = 24
"""Requests on their way for one object: on a link of 1 Gbit/s and 20 ms, images of 110 kB need as many."""
LEAST_LIMIT = 256 * 2**20
OPENING_SECONDS = 30.0
"""Patience where nothing has begun yet that a break could cost."""
GRACE_SECONDS = 600.0
"""So long after somebody opened it a folder is not removed, though nobody has it open."""
FETCHED = ".fetched"
"""In a folder of many files that is complete: their bytes, which are not to be counted each time."""
COMPANIONS = (".idx", ".json")
"""What is fetched whole beside a ``.rec``."""

_HEADER_BYTES = 4096
# Numbers in the header; of each kind of fault one from the last on.
_REMOVALS, _WHOLE, _REQUESTS, _BYTES, _FAULTS = 0, 1, 2, 3, 4
_PUNCH = 0x03  # FALLOC_FL_KEEP_SIZE | FALLOC_FL_PUNCH_HOLE
_EPOCH = 1_767_225_600  # 2026: times of use are tenths of seconds since then, which fit into 32 bits
_IDLE_SECONDS = 2.0

Ints = NDArray[np.int64]


# -- the cache -------------------------------------------------------------------------------------------------------


def objects_folder() -> Path:
    """Return where mirrors lie: ``objects/BOOT`` in the cache. Raises StorageError: this user has no home."""
    folder = cache_folder()
    if folder is None:
        raise StorageError("this user has no home folder for a cache: set STEADYTRAIN_CACHE to a folder")
    return folder / "objects" / _boot()


def limit_bytes(objects: Path) -> int:
    """Return how many bytes of objects may be kept: ``$STEADYTRAIN_OBJECT_BYTES``, else half of the disk's room.

    Raises:
        DataError: the variable is no number of bytes, or too small to read with.
    """
    text = os.environ.get("STEADYTRAIN_OBJECT_BYTES", "")
    if text:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kKMGT])i?B?)?", text)
        limit = int(float(match[1]) * 1000 ** " kMGT".index((match[2] or " ").replace("K", "k"))) if match else 0
        if limit < LEAST_LIMIT:
            raise DataError(
                f"STEADYTRAIN_OBJECT_BYTES is {text}: give a number of bytes, at least {LEAST_LIMIT:,}, such as 200GB"
            )
        return limit
    return max(LEAST_LIMIT, (shutil.disk_usage(objects).free + _used_bytes(objects)) // 2)


def _used_bytes(folder: Path) -> int:
    """Return what files in a folder take on the disk; of a folder with a note of that, what it says."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / FETCHED).read_text(encoding="ascii"))
    used = 0
    with contextlib.suppress(OSError):  # removed meanwhile
        for entry in os.scandir(folder):
            is_folder = entry.is_dir(follow_symlinks=False)
            used += _used_bytes(Path(entry.path)) if is_folder else entry.stat(follow_symlinks=False).st_blocks * 512
    return used


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that a file stands for, which is made if need be, against all other processes."""
    with path.open("ab") as file:
        if fcntl is not None:
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@cache
def _boot() -> str:
    """Name this start of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:13]
    except OSError:
        return f"{platform.node()}-{psutil.boot_time():.0f}"


def _remove_other_boots(objects: Path) -> None:
    """Remove what earlier starts left, and other machines that share the disk, as far as nobody has it open."""
    for other in objects.parent.iterdir():
        if other != objects and other.is_dir():
            folders = [folder for folder in other.iterdir() if folder.is_dir()]
            if all(time.time() - folder.stat().st_mtime > GRACE_SECONDS and not _is_open(folder) for folder in folders):
                shutil.rmtree(other, ignore_errors=True)


def _origin_path(file: Path) -> Path:
    return file.with_name(f".{file.name}.origin")


def _pages_path(file: Path) -> Path:
    return file.with_name(f".{file.name}.pages")


def open_object(uri: str, say: Callable[[str], None] = lambda message: None) -> Path:
    """Make the mirror of an object, or find it, and return its file, which :func:`mirror_of` reads.

    Beside a ``.rec`` its index and its card are fetched, as far as there are some. ``say`` is told of requests that
    had to be repeated for that.

    Raises:
        DataError: no such object, no credentials, refused.
        StorageError: the store does not answer, or the cache cannot be written.
    """
    place = Place.parse(uri)
    faults: Counter[Fault] = Counter()
    store = Store(place, lambda fault: faults.update([fault]), patience_seconds=OPENING_SECONDS)
    facts = store.stat(place)
    named = hashlib.sha256(f"{place}\n{facts.etag or facts.modified}\n{facts.size}".encode()).hexdigest()[:16]
    objects = objects_folder()
    folder = objects / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', place.name)[-60:]}-{named}"
    file = folder / place.name
    try:
        objects.mkdir(parents=True, exist_ok=True)
        with locked(objects / ".lock"):
            if not file.exists():
                shutil.rmtree(folder, ignore_errors=True)  # a kill left it unfinished
                folder.mkdir()
                origin = {"uri": str(place), "page_bytes": PAGE_BYTES, **asdict(facts)}
                _origin_path(file).write_text(json.dumps(origin), encoding="utf-8")
                with _pages_path(file).open("wb") as pages:
                    pages.truncate(_HEADER_BYTES + 5 * -(-facts.size // PAGE_BYTES))
                with file.with_name(f".{file.name}.new").open("wb") as new:
                    new.truncate(facts.size)
                file.with_name(f".{file.name}.new").replace(file)
            os.utime(folder)
            _remove_other_boots(objects)
        if file.suffix == ".rec":
            with locked(folder / ".lock"):
                for suffix in COMPANIONS:
                    _fetch_companion(store, place, file, suffix)
        make_room(objects, limit_bytes(objects))
    except OSError as error:
        raise storage_error(error, folder) from error
    if faults:
        say(f"{place}: {faults_words(faults)}")
    return file


def open_objects(uri: str, say: Callable[[str], None] = lambda message: None) -> list[Path]:
    """Make or find the mirrors of all objects that a URI with braces and wildcards stands for, in their order.

    ``say`` and errors as of :func:`open_object`; DataError where a wildcard fits nothing.
    """
    uris: list[str] = []
    for name in braces(uri):
        if glob.has_magic(name):
            place = Place.parse(name)
            folder, _, pattern = place.key.rpartition("/")
            if glob.has_magic(folder):
                raise DataError(
                    f"{name} has a wildcard in the name of a folder: wildcards go in the last part of a URI"
                )
            names = Store(place).list_names(Place(place.base, folder + "/" if folder else ""))
            matches = fnmatch.filter(names, pattern)
            if not matches:
                raise NoObjectError(f"there is no object {name}")
            uris += [str(place.sibling(match)) for match in matches]
        else:
            uris.append(name)
    with ThreadPoolExecutor(max_workers=min(8, len(uris))) as pool:
        return list(pool.map(partial(open_object, say=say), dict.fromkeys(uris)))


def find_validation_object(uri: str) -> str | None:
    """Find ``X-val.rec`` beside ``X-train.rec``, by its URI; None where there is none.

    Errors as of :func:`open_object`.
    """
    place = Place.parse(uri)
    store = Store(place, patience_seconds=OPENING_SECONDS)
    for name in validation_names(place.name):
        with contextlib.suppress(DataError):
            store.stat(place.sibling(name))
            return str(place.sibling(name))
    return None


def _fetch_companion(store: Store, place: Place, file: Path, suffix: str) -> None:
    """Fetch the index or the card of a record file, unless it is here as it is there."""
    there, here = place.sibling(Path(place.name).with_suffix(suffix).name), file.with_suffix(suffix)
    try:
        facts = store.stat(there)
    except DataError as error:  # who may not list a bucket is refused what it does not hold
        if not isinstance(error, NoObjectError) and "(status 403)" not in str(error):
            raise
        here.unlink(missing_ok=True)
        return
    origin = _origin_path(here)
    stated = json.dumps({"uri": str(there), **asdict(facts)})
    if here.exists() and origin.exists() and origin.read_text(encoding="utf-8") == stated:
        return
    data, _ = store.read(there, expected=facts)
    part = here.with_name(f".{here.name}.new")
    part.write_bytes(data)
    origin.unlink(missing_ok=True)
    part.replace(here)
    origin.write_text(stated, encoding="utf-8")


def make_room(objects: Path, limit: int) -> None:
    """Bring what the cache of objects takes below a limit, if it is above: to seven eighths of it."""
    with locked(objects / ".lock"):
        folders = [path for path in objects.iterdir() if path.is_dir()]
        used = {folder: _used_bytes(folder) for folder in folders}
        total, goal = sum(used.values()), limit - limit // 8
        if total <= limit:
            return
        ages = {folder: folder.stat().st_mtime for folder in folders}
        for folder in sorted(folders, key=ages.__getitem__):
            if total <= goal:
                return
            if time.time() - ages[folder] > GRACE_SECONDS and not _is_open(folder):
                shutil.rmtree(folder, ignore_errors=True)
                total -= used.pop(folder)
        mirrors = [mirror for folder in used for mirror in _mirrors_in(folder, limit)]
        try:
            _drop_oldest([mirror for mirror in mirrors if not mirror.is_needed_whole], total - goal)
        finally:
            for mirror in mirrors:
                mirror.close()


def _is_open(folder: Path) -> bool:
    """Tell whether a process has a mirror open: it holds a shared lock of the file."""
    for file in (folder / ".hold", *(folder / origin.name[1 : -len(".origin")] for origin in folder.glob(".*.origin"))):
        with contextlib.suppress(OSError), file.open("rb") as opened:
            if fcntl is None:
                return True
            try:
                fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
    return False


def _mirrors_in(folder: Path, limit: int) -> Iterator[Mirror]:
    for pages in folder.glob(".*.pages"):
        with contextlib.suppress(DataError):
            yield Mirror(folder / pages.name[1 : -len(".pages")], limit)


def _drop_oldest(mirrors: list[Mirror], excess: int) -> None:
    """Remove the pages of some mirrors that were used least recently, of at least so many bytes."""
    there = [np.flatnonzero(mirror.present) for mirror in mirrors]
    ages = [mirror.used[pages] for mirror, pages in zip(mirrors, there, strict=True)]
    count = -(-excess // min((mirror.page_bytes for mirror in mirrors), default=1))
    every = np.concatenate(ages) if ages else np.empty(0, np.uint32)
    if not len(every) or count <= 0:
        return
    latest = np.partition(every, min(count, len(every)) - 1)[min(count, len(every)) - 1]
    for mirror, pages, age in zip(mirrors, there, ages, strict=True):
        mirror.drop(pages[age <= latest])


# -- one object ------------------------------------------------------------------------------------------------------


def mirror_of(file: Path) -> Mirror | None:
    """Open the mirror whose file this is; None where it is an ordinary file."""
    pages = _pages_path(file)
    return Mirror(file) if pages.exists() and _origin_path(file).exists() else None


@dataclass(frozen=True)
class Traffic:
    """What was fetched of objects since they are in the cache, by all processes: requests, bytes, repeated requests."""

    requests: int = 0
    bytes: int = 0
    faults: Counter[Fault] = field(default_factory=Counter)

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.requests + other.requests, self.bytes + other.bytes, self.faults + other.faults)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.requests - other.requests, self.bytes - other.bytes, self.faults - other.faults)


class Mirror:
    """The bytes of an object, by ranges: those that are on disk, and the others from its store. Threads may share it.

    ``len(mirror)`` is the object's size; a slice is a copy of its bytes.

    Args:
        file: as of :func:`open_object`.
        limit: bytes that all objects may take; None: :func:`limit_bytes`.
    """

    def __init__(self, file: Path, limit: int | None = None) -> None:
        self.file = file
        try:
            origin = json.loads(_origin_path(file).read_text(encoding="utf-8"))
            self.uri, self.page_bytes = str(origin.pop("uri")), int(origin.pop("page_bytes"))
            self.facts = ObjectFacts(**origin)
            self._file = file.open("r+b", buffering=0)
            self._pages = _pages_path(file).open("r+b")
            self._map = mmap.mmap(self._pages.fileno(), 0)
        except (OSError, ValueError, TypeError) as error:
            raise DataError(f"the copy of an object at {file} is damaged ({error}): remove {file.parent}") from error
        count = -(-self.facts.size // self.page_bytes)
        self._header = np.frombuffer(self._map, np.uint64, _HEADER_BYTES // 8)
        self.used = np.frombuffer(self._map, np.uint32, count, _HEADER_BYTES)
        """When each page was last asked for, in tenths of seconds."""
        self.present = np.frombuffer(self._map, np.uint8, count, _HEADER_BYTES + 4 * count)
        """Whether each page is on disk."""
        self._place = Place.parse(self.uri)
        self._store = Store(self._place, self._count_fault)
        self.limit = limit_bytes(file.parent.parent) if limit is None else limit
        self._gap = GAP_BYTES // self.page_bytes if self.stays else 1
        self._fetched = 0  # bytes since room was last looked at
        self.began = self.traffic()
        """What had been fetched when it was opened here."""
        self._forget_threads()

    def _forget_threads(self) -> None:
        """Begin without threads: as new, or in a fork of the process that had them."""
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._flying = np.zeros(len(self.present), np.bool_)  # asked for, by this process, and not yet there
        self._urgent: deque[tuple[int, int]] = deque()
        self._ahead: deque[tuple[int, int]] = deque()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._error: SteadyError | None = None
        self._closed = False

    def __len__(self) -> int:
        return self.facts.size

    @overload
    def __getitem__(self, key: int) -> int: ...

    @overload
    def __getitem__(self, key: slice) -> memoryview: ...

    def __getitem__(self, key: int | slice) -> int | memoryview:
        if isinstance(key, int):
            return self.read(key, key + 1)[0]
        start, end, _ = key.indices(len(self))
        return self.read(start, max(start, end))

    def read(self, start: int, end: int) -> memoryview:
        """Return a copy of bytes ``start`` to ``end``, fetched if need be.

        Raises:
            StorageError: the store does not give them, or the object has changed.
        """
        if end - start > (most := self.limit // 4):  # what is read together has to be there together
            return memoryview(b"".join(self.read(at, min(at + most, end)) for at in range(start, end, most)))
        first, last = start // self.page_bytes, -(-end // self.page_bytes)
        while True:
            removals = self._header[_REMOVALS]
            if not self.present[first:last].all():
                self._wait_for(np.arange(first, last))
            self.used[first:last] = _now()
            try:
                data = os.pread(self._file.fileno(), end - start, start)
            except OSError as error:
                raise storage_error(error, self.file) from error
            except ValueError:
                raise self._closed_error() from None
            if self._header[_REMOVALS] == removals and self.present[first:last].all():
                return memoryview(data)

    def gather(self, offsets: Ints, width: int) -> NDArray[np.uint8]:
        """Return the ``width`` bytes from each offset on, uint8[n, width]; errors as of :meth:`read`."""
        rows, step = b"", max(1, self.limit // 8 // (self.page_bytes + width))
        for start in range(0, len(offsets), step):
            some = offsets[start : start + step]
            self.require(some, some + width)
            rows += b"".join(self.read(at, at + width) for at in some.tolist())
        return np.frombuffer(rows, np.uint8).reshape(len(offsets), width).copy()

    @property
    def is_needed_whole(self) -> bool:
        """Whether its file is read by its name, so that no page of it may be removed alone."""
        return bool(self._header[_WHOLE])

    def need_whole(self) -> None:
        """Have no page of it removed alone from now on."""
        with self._exclusive():
            self._header[_WHOLE] = 1

    def whole(self) -> memoryview:
        """Fetch all of it, to stay, and return it as a map of the file; errors as of :meth:`read`."""
        if not self.stays:
            raise StorageError(
                f"{self.uri} has {size_words(len(self))} and is needed whole; the cache may keep"
                f" {size_words(self.limit // 2)} of one object: set STEADYTRAIN_OBJECT_BYTES to more, or"
                " STEADYTRAIN_CACHE to another disk"
            )
        self.need_whole()
        self.require(np.array([0]), np.array([len(self)]))
        return memoryview(mmap.mmap(self._file.fileno(), 0, access=mmap.ACCESS_READ))

    def require(self, starts: Ints, ends: Ints) -> None:
        """Wait until some ranges are on disk; errors as of :meth:`read`."""
        pages = self._pages_of(starts, ends)
        self.used[pages] = _now()
        if not self.present[pages].all():
            self._wait_for(pages)

    def ask(self, starts: Ints, ends: Ints) -> None:
        """Begin to fetch some ranges, and return."""
        pages = self._pages_of(starts, ends)
        with self._own_lock():
            self.used[pages] = _now()
            self._queue(pages, self._ahead)

    @property
    def stays(self) -> bool:
        """Whether the cache has room for all of it."""
        return len(self) <= self.limit // 2

    def traffic(self) -> Traffic:
        """Return what was fetched of it so far."""
        faults = +Counter({fault: int(self._header[_FAULTS + i]) for i, fault in enumerate(FAULTS)})
        return Traffic(int(self._header[_REQUESTS]), int(self._header[_BYTES]), faults)

    def close(self) -> None:
        """End its threads, as soon as their requests do; closing twice is fine. What is on disk stays."""
        with self._own_lock():
            if self._closed:
                return
            self._closed = True
            self._urgent.clear()
            self._ahead.clear()
            self._changed.notify_all()
            threads = list(self._threads)
        for thread in threads:
            thread.join(timeout=1.0)
        if any(thread.is_alive() for thread in threads):
            return  # a request that hangs; what it brings is still written
        self._file.close()
        self._pages.close()
        self._header, self.used, self.present = self._header.copy(), self.used.copy(), self.present.copy()
        with contextlib.suppress(BufferError):
            self._map.close()

    def drop(self, pages: Ints) -> None:
        """Remove some pages, and give their room back. Raises StorageError where the file system cannot."""
        with self._exclusive():
            self._header[_REMOVALS] += np.uint64(1)
            self.present[pages] = 0
            for first, last in _runs(np.unique(pages), gap=0):
                _punch(self._file.fileno(), first * self.page_bytes, (last - first) * self.page_bytes, self.file)

    def _pages_of(self, starts: Ints, ends: Ints) -> Ints:
        """Return the pages that some ranges touch, rising, each once."""
        first, last = np.maximum(starts, 0) // self.page_bytes, -(-np.minimum(ends, len(self)) // self.page_bytes)
        counts = np.maximum(last - first, 0)
        within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.unique(np.repeat(first, counts) + within)

    # -- fetching ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _own_lock(self) -> Iterator[None]:
        if self._process != os.getpid():
            self._forget_threads()
        with self._lock:
            yield

    @contextlib.contextmanager
    def _exclusive(self) -> Iterator[None]:
        """Hold off all other threads and processes that change which pages are there."""
        with self._own_lock():
            if fcntl is not None:
                fcntl.flock(self._pages, fcntl.LOCK_EX)
            try:
                yield
            finally:
                if fcntl is not None:
                    fcntl.flock(self._pages, fcntl.LOCK_UN)

    def _closed_error(self) -> StorageError:
        return StorageError(f"{self.uri} was closed while it was being read")

    def _wait_for(self, pages: Ints) -> None:
        """Fetch what is missing of some pages before anything else, and wait for it."""
        with self._own_lock():
            while True:
                missing = pages[self.present[pages] == 0]
                if not len(missing):
                    return
                if self._closed:
                    raise self._closed_error()
                if self._error is not None:
                    raise self._error
                self._queue(missing, self._urgent)
                self._changed.wait(timeout=1.0)  # another process may bring them

    def _queue(self, pages: Ints, queue: deque[tuple[int, int]]) -> None:
        """Have those of some pages fetched that are neither there nor on their way."""
        if self._closed or self._error is not None:
            return
        missing = pages[(self.present[pages] == 0) & ~self._flying[pages]]
        most = max(1, REQUEST_BYTES // self.page_bytes)
        for first, last in _runs(missing, gap=self._gap):
            for at in range(first, last, most):
                queue.append((at, min(at + most, last)))
            self._flying[first:last] = True
        for _ in range(min(THREADS - len(self._threads), len(queue) - self._idle)):
            thread = threading.Thread(target=self._work, name="storage", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._changed.notify_all()

    def _work(self) -> None:
        """Fetch what is asked for, what somebody waits for first, until nothing was for some time."""
        me = threading.current_thread()
        while True:
            with self._lock:
                self._idle += 1
                self._changed.wait_for(lambda: self._urgent or self._ahead or self._closed, timeout=_IDLE_SECONDS)
                self._idle -= 1
                queue = self._urgent or self._ahead
                if not queue or self._closed:
                    self._threads.remove(me)
                    return
                first, last = queue.popleft()
            error: SteadyError | None = None
            try:
                self._fetch(first, last)
            except SteadyError as failed:
                error = failed
            except OSError as failed:
                error = storage_error(failed, self.file)
            except BaseException as failed:  # noqa: BLE001 - whoever waits has to hear of it
                error = StorageError(f"{self.uri} cannot be read: {type(failed).__name__}")
            with self._lock:
                self._flying[first:last] = False
                if error is not None and self._error is None:
                    # Where a loader reads, a DataError would be one bad image; this is the end of all of them.
                    self._error = error if isinstance(error, StorageError) else StorageError(str(error))
                self._changed.notify_all()

    def _fetch(self, first: int, last: int) -> None:
        start, end = first * self.page_bytes, min(last * self.page_bytes, len(self))
        if self.present[first:last].all():  # another process was faster
            return
        data, _ = self._store.read(self._place, start, end, expected=self.facts)
        try:
            self._write(first, last, data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            objects = self.file.parent.parent
            self.limit = max(LEAST_LIMIT, _used_bytes(objects) * 7 // 8)  # the disk has less room than it had
            make_room(objects, self.limit)
            self._write(first, last, data)
        with self._lock:
            self._fetched += len(data)
            is_time = self._fetched >= self.limit // 32
            self._fetched = 0 if is_time else self._fetched
        if is_time:
            make_room(self.file.parent.parent, self.limit)

    def _write(self, first: int, last: int, data: memoryview) -> None:
        with self._exclusive():
            view, at = data, first * self.page_bytes
            while view:
                written = os.pwrite(self._file.fileno(), view, at)
                view, at = view[written:], at + written
            self.used[first:last] = np.maximum(self.used[first:last], _now())
            self.present[first:last] = 1
            self._header[_REQUESTS] += np.uint64(1)
            self._header[_BYTES] += np.uint64(len(data))

    def _count_fault(self, fault: Fault) -> None:
        with self._exclusive():
            self._header[_FAULTS + FAULTS.index(fault)] += np.uint64(1)


def _now() -> int:
    return int((time.time() - _EPOCH) * 10)


def _runs(pages: Ints, *, gap: int) -> Iterable[tuple[int, int]]:
    """Return first and end of each stretch that some rising pages form; gaps up to ``gap`` pages count as theirs.

    >>> list(_runs(np.array([1, 2, 4, 9]), gap=0)), list(_runs(np.array([1, 2, 4, 9]), gap=1))
    ([(1, 3), (4, 5), (9, 10)], [(1, 5), (9, 10)])
    """
    if not len(pages):
        return []
    breaks = np.flatnonzero(np.diff(pages) > gap + 1)
    firsts = pages[np.append(0, breaks + 1)]
    lasts = pages[np.append(breaks, len(pages) - 1)] + 1
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))


@cache
def _fallocate() -> Callable[[int, int, int, int], int] | None:
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate", None) if os.name == "posix" else None
    if function is None:
        return None
    function.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    function.restype = ctypes.c_int
    return function  # type: ignore[no-any-return]


def _punch(file: int, start: int, size: int, path: Path) -> None:
    """Give the room of a part of a file back; it reads as zeros then."""
    fallocate = _fallocate()
    if fallocate is None or fallocate(file, _PUNCH, start, size):
        why = os.strerror(ctypes.get_errno()) if fallocate is not None else "this system has no such call"
        raise StorageError(
            f"the cache of objects is full, and the file system of {path.parent.parent} cannot free a part of a file"
            f" ({why}): set STEADYTRAIN_CACHE to a folder on ext4, xfs, btrfs or tmpfs, or allow more by"
            " STEADYTRAIN_OBJECT_BYTES"
        )
