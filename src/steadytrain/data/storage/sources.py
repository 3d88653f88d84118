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
    limit_bytes,
    make_room,
    objects_folder,
    open_objects,
)
from steadytrain.data.storage.pages import locked, origin_path
from steadytrain.data.storage.remote_file import remote_file_of
from steadytrain.data.storage.store import (
    MOST_REQUESTS,
    Fault,
    NoObjectError,
    ObjectFacts,
    Place,
    Store,
    faults_words,
    is_uri,
    local_name,
)
from steadytrain.errors import StorageError, storage_error
from steadytrain.format import count
from steadytrain.format import size as size_words

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
    stack.enter_context(locked(file, shared=True))
    stack.enter_context(locked(origin_path(file), shared=True))
    remote = remote_file_of(file)
    assert remote is not None
    with contextlib.closing(remote):
        if remote.disk.present.all():
            return
        say(f"fetching {remote.uri} ({size_words(len(remote))}) into {file.parent}")
        remote.whole().release()
        modified = int(datetime.fromisoformat(remote.facts.modified).timestamp())
        os.utime(file, (modified, modified))  # what a copy is known by: the same whenever it is fetched
        if faults := faults_words((remote.disk.traffic() - remote.began).faults):
            say(f"{remote.uri}: {faults}")


def _fetch_folder(uri: str, stack: contextlib.ExitStack, say: Say) -> Path:
    """Fetch all objects below a prefix. Raises DataError where there are none."""
    place = Place.folder(uri)
    store = Store(place, patience_seconds=OPENING_SECONDS)
    found, digest = store.list_all(place), hashlib.sha256(str(place).encode())
    for name, facts in found:
        digest.update(f"\n{name}\n{facts}".encode())
    if not found:
        raise NoObjectError(f"there is no object {place}, and nothing below it")
    objects, total = objects_folder(), sum(facts.size for _, facts in found)
    title = re.sub(r"[^A-Za-z0-9._-]+", "_", place.name or place.base.rpartition("/")[2])[-60:]
    folder = objects / f"{title}-{digest.hexdigest()[:16]}"
    path, done = folder / title, folder / FETCHED
    try:
        objects.mkdir(parents=True, exist_ok=True)
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
        stack.enter_context(locked(folder / ".hold", shared=True))
        with locked(folder / ".lock"):
            if not done.exists():
                say(f"fetching {count(len(found), 'object')} ({size_words(total)}) from {place} into {folder}")
                faults: Counter[Fault] = Counter()
                patient = Store(place, lambda fault: faults.update([fault]))
                make_room(objects, limit)
                _fetch_files(patient, place, path, found)
                done.write_text(str(total), encoding="ascii")
                if faults:
                    say(f"{place}: {faults_words(faults)}")
    except OSError as error:
        raise storage_error(error, folder) from error
    return path


def _fetch_files(store: Store, place: Place, folder: Path, found: Sequence[tuple[str, ObjectFacts]]) -> None:
    """Fetch objects that are not here yet, many at a time; a file appears when it is whole."""

    def fetch(name: str, facts: ObjectFacts) -> None:
        path = folder / name
        if path.exists() and path.stat().st_size == facts.size:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{path.name}.part")
        data, _ = store.read(Place(place.base, place.key + name), expected=facts)
        part.write_bytes(data)
        part.replace(path)

    total = sum(facts.size for _, facts in found)
    if shutil.disk_usage(folder).free < total:
        raise StorageError(f"{folder} has no room for {size_words(total)}: set STEADYTRAIN_CACHE to another disk")
    with ThreadPoolExecutor(MOST_REQUESTS, "storage") as pool:
        try:
            for _ in pool.map(lambda entry: fetch(*entry), found):
                pass
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
