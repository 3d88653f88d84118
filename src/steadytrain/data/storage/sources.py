"""Whatever else is data, at URIs: fetched whole into the cache, and then a source like any on this disk.

Shards, archives, tables and lists are files; what ends with ``/``, or is no object, is a folder: all objects below it.
They stay in the cache for the next time, as long as there is room, and are fetched anew only where they changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

from steadytrain.data.sources.filenames import is_pattern
from steadytrain.data.storage.object_cache import (
    FETCHED,
    OPENING_SECONDS,
    THREADS,
    limit_bytes,
    locked,
    make_room,
    mirror_of,
    objects_folder,
    open_objects,
)
from steadytrain.data.storage.store import Fault, NoObjectError, Place, Store, faults_words, is_uri, local_name
from steadytrain.errors import StorageError, storage_error
from steadytrain.format import count
from steadytrain.format import size as size_words

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Say = Callable[[str], None]


@contextlib.contextmanager
def local_sources(sources: Sequence[str], say: Say) -> Iterator[list[str]]:
    """Fetch those of some sources that are URIs; yield where all of them are on this disk, while this is not left.

    Raises:
        DataError: there is none of that name, or the store refuses it.
        StorageError: the store does not answer, or the disk has no room.
    """
    with contextlib.ExitStack() as stack:
        yield [_fetch(source, stack, say) if is_uri(source) else local_name(source) for source in sources]


def _fetch(uri: str, stack: contextlib.ExitStack, say: Say) -> str:
    if not uri.endswith("/"):
        try:
            files = open_objects(uri, say)
        except NoObjectError as error:
            if is_pattern(uri):
                raise
            try:
                return str(_fetch_folder(uri + "/", stack, say))
            except NoObjectError:
                raise error from None
        for file in files:
            _complete(file, stack, say)
        return str(files[0]) if len(files) == 1 else "{" + ",".join(map(str, files)) + "}"
    return str(_fetch_folder(uri, stack, say))


def _complete(file: Path, stack: contextlib.ExitStack, say: Say) -> None:
    """Fetch what is missing of an object, and keep it from being removed."""
    mirror = mirror_of(file)
    assert mirror is not None
    with contextlib.closing(mirror):
        stack.enter_context(_held(file))
        mirror.need_whole()
        if mirror.present.all():
            return
        say(f"fetching {mirror.uri} ({size_words(len(mirror))}) into {file.parent}")
        mirror.whole().release()
        modified = int(datetime.fromisoformat(mirror.facts.modified).timestamp())
        os.utime(file, (modified, modified))  # what a copy is known by: the same whenever it is fetched
        if faults := faults_words((mirror.traffic() - mirror.began).faults):
            say(f"{mirror.uri}: {faults}")


@contextlib.contextmanager
def _held(file: Path) -> Iterator[None]:
    with file.open("rb") as opened:
        if fcntl is not None:
            fcntl.flock(opened, fcntl.LOCK_SH)
        yield


def _fetch_folder(uri: str, stack: contextlib.ExitStack, say: Say) -> Path:
    """Fetch all objects below a prefix. Raises DataError where there are none."""
    place = Place.folder(uri)
    store = Store(place, patience_seconds=OPENING_SECONDS)
    names, sizes, digest = list[str](), list[int](), hashlib.sha256(str(place).encode())
    for name, facts in store.list_all(place):
        names.append(name)
        sizes.append(facts.size)
        digest.update(f"\n{name}\n{facts}".encode())
    if not names:
        raise NoObjectError(f"there is no object {place}, and nothing below it")
    objects, total = objects_folder(), sum(sizes)
    title = re.sub(r"[^A-Za-z0-9._-]+", "_", place.name or place.base.rpartition("/")[2])[-60:]
    folder = objects / f"{title}-{digest.hexdigest()[:16]}"
    path, done = folder / title, folder / FETCHED
    try:
        (objects).mkdir(parents=True, exist_ok=True)
        limit = limit_bytes(objects)
        if total > limit // 2:
            raise StorageError(
                f"{place} has {size_words(total)}, of which {size_words(limit // 2)} can be in the cache at once: set"
                " STEADYTRAIN_OBJECT_BYTES to more, or STEADYTRAIN_CACHE to another disk"
            )
        with locked(objects / ".lock"):
            path.mkdir(parents=True, exist_ok=True)
            (folder / ".hold").touch()
            os.utime(folder)
        stack.enter_context(_held(folder / ".hold"))
        with locked(folder / ".lock"):
            if not done.exists():
                say(f"fetching {count(len(names), 'object')} ({size_words(total)}) from {place} into {folder}")
                faults: Counter[Fault] = Counter()
                patient = Store(place, lambda fault: faults.update([fault]))
                _fetch_files(patient, place, path, names, sizes, lambda: make_room(objects, limit))
                done.write_text(str(total), encoding="ascii")
                if faults:
                    say(f"{place}: {faults_words(faults)}")
    except OSError as error:
        raise storage_error(error, folder) from error
    return path


def _fetch_files(
    store: Store, place: Place, folder: Path, names: Sequence[str], sizes: Sequence[int], make: Callable[[], None]
) -> None:
    """Fetch objects that are not here yet, many at a time; a file appears when it is whole."""

    def fetch(name: str, size: int) -> None:
        path = folder / name
        if path.exists() and path.stat().st_size == size:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        data, _ = store.read(Place(place.base, place.key + name))
        part.write_bytes(data)
        part.replace(path)

    make()
    if shutil.disk_usage(folder).free < sum(sizes):
        raise StorageError(f"{folder} has no room for {size_words(sum(sizes))}: set STEADYTRAIN_CACHE to another disk")
    with ThreadPoolExecutor(THREADS, "storage") as pool:
        try:
            for _ in pool.map(fetch, names, sizes):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
