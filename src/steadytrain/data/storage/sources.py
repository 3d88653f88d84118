"""Sources at URIs that are fetched whole into the cache, and then read like local ones.

Shards, archives, tables and lists are files; what ends with ``/``, or is no object, is a folder: all objects below it.
They stay in the cache for the next time, as long as there is room, and are fetched anew only where they changed.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import numpy as np

from steadytrain.data.filenames import is_pattern
from steadytrain.data.storage.object_cache import (
    FETCHED,
    OPENING_SECONDS,
    limit_bytes,
    make_room,
    objects_folder,
    open_objects,
)
from steadytrain.data.storage.pages import PagedFile, origin_path
from steadytrain.data.storage.remote_file import RemoteFile
from steadytrain.data.storage.store import (
    MOST_REQUESTS,
    NoObjectError,
    ObjectFacts,
    ObjectPlace,
    Store,
    is_uri,
    local_name,
)
from steadytrain.errors import StorageError, storage_errors
from steadytrain.files import create, locked
from steadytrain.format import Say, count
from steadytrain.format import size as size_words
from steadytrain.machine.platform import allow_open_files

_OBJECTS_AT_ONCE = 4
"""Objects that are fetched whole at a time: small ones share the time that answers take, large ones the requests."""


@contextlib.contextmanager
def local_sources(sources: Sequence[str], say: Say) -> Iterator[list[str]]:
    """Fetch the sources that are URIs; yield the local paths of all, which stay until the context ends.

    Raises:
        DataError: there is none of that name, or the store refuses it.
        StorageError: the store does not answer, or the disk has no room.
    """
    with contextlib.ExitStack() as stack:
        yield [_fetch(source, stack, say) if is_uri(source) else local_name(source) for source in sources]


def _fetch(uri: str, stack: contextlib.ExitStack, say: Say) -> str:
    if not uri.endswith("/"):
        try:
            files = open_objects(uri)
        except NoObjectError as error:
            if is_pattern(uri):
                raise
            try:
                return str(_fetch_folder(uri + "/", stack, say))
            except NoObjectError:
                raise error from None
        _complete(uri, files, stack, say)
        return str(files[0]) if len(files) == 1 else "{" + ",".join(map(str, files)) + "}"
    return str(_fetch_folder(uri, stack, say))


def _complete(uri: str, files: Sequence[Path], stack: contextlib.ExitStack, say: Say) -> None:
    """Fetch what is missing of the objects that a URI stands for, and keep them from being removed."""
    allow_open_files(2 * len(files))
    for file in files:
        stack.enter_context(locked(file, shared=True))
        stack.enter_context(locked(origin_path(file), shared=True))
    missing: list[Path] = []
    modified: list[float] = []
    for file in files:
        with contextlib.closing(PagedFile(file)) as disk:
            modified.append(datetime.fromisoformat(disk.facts.modified).timestamp())
            if not disk.present.all():
                missing.append(file)
    if missing:
        _fetch_whole(uri, files, missing, say)
    for file, seconds in zip(files, modified, strict=True):
        os.utime(file, (int(seconds), int(seconds)))  # what a copy is known by: the same whenever it is fetched


def _fetch_whole(uri: str, files: Sequence[Path], missing: Sequence[Path], say: Say) -> None:
    """Fetch the objects that are not whole in the cache."""
    objects = objects_folder()
    _require_room(uri, sum(file.stat().st_size for file in files), limit_bytes(objects))
    total = size_words(sum(file.stat().st_size for file in missing))
    many = f"{count(len(missing), 'object')} of " if len(files) > 1 else ""
    say(f"fetching {many}{uri} ({total}) into {objects if many else files[0].parent}")

    def fetch(file: Path) -> None:
        with contextlib.closing(RemoteFile(file)) as remote:
            remote.require(np.array([0]), np.array([len(remote)]))

    with ThreadPoolExecutor(_OBJECTS_AT_ONCE, "storage") as pool:
        list(pool.map(fetch, missing))  # one that fails cancels those that have not begun


def _require_room(uri: object, num_bytes: int, limit: int) -> None:
    """Raise StorageError where the cache cannot keep so many bytes that are needed together."""
    if num_bytes > limit // 2:
        raise StorageError(
            f"{uri} has {size_words(num_bytes)}, of which {size_words(limit // 2)} can be in the cache at once: set"
            " STEADYTRAIN_OBJECT_BYTES to more, or STEADYTRAIN_CACHE to another disk"
        )


def _fetch_folder(uri: str, stack: contextlib.ExitStack, say: Say) -> Path:
    """Fetch all objects below a prefix. Raises DataError where there are none."""
    place = ObjectPlace.folder(uri)
    store = Store(place, patience_seconds=OPENING_SECONDS)
    listed, digest = store.list_all(place, sorted), hashlib.sha256(str(place).encode())
    for name, facts in listed:
        digest.update(f"\n{name}\n{facts}".encode())
    if not listed:
        raise NoObjectError(f"there is no object {place}, and nothing below it")
    objects, total = objects_folder(), sum(facts.size for _, facts in listed)
    title = re.sub(r"[^A-Za-z0-9._-]+", "_", place.name or place.base.rpartition("/")[2])[-60:]
    folder = objects / f"{title}-{digest.hexdigest()[:16]}"
    path, done = folder / title, folder / FETCHED
    with storage_errors(folder):
        objects.mkdir(parents=True, exist_ok=True)
        limit = limit_bytes(objects)
        _require_room(place, total, limit)
        with locked(objects / ".lock"):
            path.mkdir(parents=True, exist_ok=True)
            (folder / ".hold").touch()
            os.utime(folder)
        stack.enter_context(locked(folder / ".hold", shared=True))
        with locked(folder / ".lock"):
            if not done.exists():
                say(f"fetching {count(len(listed), 'object')} ({size_words(total)}) from {place} into {folder}")
                make_room(objects, limit)
                _fetch_files(Store(place), place, path, listed)
                done.write_text(str(total), encoding="ascii")
    return path


def _fetch_files(store: Store, place: ObjectPlace, folder: Path, objects: Sequence[tuple[str, ObjectFacts]]) -> None:
    """Fetch objects that are not here yet, many at a time; a file appears when it is whole."""

    def fetch(name: str, facts: ObjectFacts) -> None:
        path = folder / name
        if path.exists() and path.stat().st_size == facts.size:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        data, _ = store.read(place.inside(name), expected=facts)
        with create(part) as file:
            file.write(data)
        part.replace(path)

    total = sum(facts.size for _, facts in objects)
    if shutil.disk_usage(folder).free < total:
        raise StorageError(f"{folder} has no room for {size_words(total)}: set STEADYTRAIN_CACHE to another disk")
    with ThreadPoolExecutor(MOST_REQUESTS, "storage") as pool:
        list(pool.map(lambda entry: fetch(*entry), objects))
