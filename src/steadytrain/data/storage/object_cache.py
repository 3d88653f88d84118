"""The cache of objects: a folder of this machine's disk, bounded, shared by all processes.

An object that is opened becomes a folder of the cache, with a file of the object's name and size, in which only what
was fetched takes room (:mod:`~steadytrain.data.storage.pages`). Every process that opens the same content of the same
object reads the same file; new content has a new folder.

- What is in the cache stays below a limit: folders that nobody uses go first, then pages of the others, whose room is
  given back to the file system.
- Each start of a machine has a cache of its own: after it went down pages are not trusted, since the system may not
  have written them; and of a disk that several machines share, none sees pages that another one is writing.
"""

from __future__ import annotations

import contextlib
import fnmatch
import glob
import hashlib
import json
import math
import os
import platform
import re
import shutil
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, fields
from functools import cache, lru_cache
from pathlib import Path

import numpy as np
import psutil

from steadytrain.data.filenames import braces, names_beside
from steadytrain.data.storage.pages import PAGE_BYTES, PagedFile, origin_path, paged_files
from steadytrain.data.storage.store import MOST_REQUESTS, NoObjectError, ObjectFacts, ObjectPlace, Store
from steadytrain.errors import DataError, storage_errors
from steadytrain.files import create, lock_surely, locked, read_table
from steadytrain.machine.facts import require_cache_folder
from steadytrain.machine.platform import allocated_bytes, allow_open_files

LEAST_LIMIT = 256 * 2**20
OPENING_SECONDS = 30.0
"""Patience where nothing has begun yet that a break could cost."""
GRACE_SECONDS = 600.0
"""Seconds after somebody opened it in which a folder is not removed, though nobody has it open."""
FETCHED = ".fetched"
"""The file in a folder of many objects that is complete. It holds their bytes, so that nobody counts them again."""
COMPANIONS = (".idx", ".json")
"""Endings of the files that are fetched whole beside a ``.rec``."""


def objects_folder() -> Path:
    """Return where objects lie: ``objects/BOOT`` in the cache. Raises StorageError: this user has no home."""
    return require_cache_folder() / "objects" / _boot()


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
    return max(LEAST_LIMIT, _half_of_room(objects, int(time.monotonic() // 60)))


@lru_cache(maxsize=1)
def _half_of_room(objects: Path, minute: int) -> int:
    """Return half of the bytes that objects take and could take, computed once a minute."""
    return (shutil.disk_usage(objects).free + used_bytes(objects)) // 2


def used_bytes(folder: Path) -> int:
    """Return what files in a folder take on the disk; of a folder with a note of that, what it says."""
    with contextlib.suppress(OSError, ValueError):
        return int((folder / FETCHED).read_text(encoding="ascii"))
    used = 0
    with contextlib.suppress(OSError):  # removed meanwhile
        for entry in os.scandir(folder):
            is_folder = entry.is_dir(follow_symlinks=False)
            used += used_bytes(Path(entry.path)) if is_folder else allocated_bytes(entry.stat(follow_symlinks=False))
    return used


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
        with contextlib.suppress(FileNotFoundError):  # another process removes it as well
            if other == objects or not other.is_dir():
                continue
            folders = (folder for folder in other.iterdir() if folder.is_dir())  # the first that is used says enough
            if all(time.time() - folder.stat().st_mtime > GRACE_SECONDS and not _is_open(folder) for folder in folders):
                shutil.rmtree(other, ignore_errors=True)


def open_object(uri: str, siblings: Mapping[str, ObjectFacts] | None = None) -> Path:
    """Make the file of an object in the cache, or find it; :func:`.remote_file_of` reads it.

    Beside a ``.rec`` its index and its card are fetched, as far as there are some.

    ``siblings``: what the store says of the objects beside it, itself among them, by name; None: not known.

    Raises:
        DataError: no such object, no credentials, refused.
        StorageError: the store does not answer, or the cache cannot be written.
    """
    place = ObjectPlace.parse(uri)
    store = Store(place, patience_seconds=OPENING_SECONDS)
    facts = store.stat(place) if siblings is None or place.name not in siblings else siblings[place.name]
    content = facts.etag.strip('"') or facts.modified
    named = hashlib.sha256(f"{place}\n{content}\n{facts.size}".encode()).hexdigest()[:16]
    objects = objects_folder()
    folder = objects / f"{re.sub(r'[^A-Za-z0-9._-]+', '_', place.name)[-60:]}-{named}"
    file = folder / place.name
    with storage_errors(folder):
        objects.mkdir(parents=True, exist_ok=True)
        with locked(objects / ".lock"):
            if not file.exists():
                shutil.rmtree(folder, ignore_errors=True)  # a kill left it unfinished
                folder.mkdir()
                PagedFile.create(file, str(place), facts)
            os.utime(folder)
            _remove_other_boots(objects)
        if file.suffix == ".rec":
            with locked(folder / ".lock"), ThreadPoolExecutor(len(COMPANIONS), "storage") as pool:
                list(pool.map(lambda suffix: _fetch_companion(store, place, file, suffix, siblings), COMPANIONS))
    return file


def open_objects(uri: str) -> list[Path]:
    """Make or find the files of all objects that a URI with braces and wildcards stands for, in their order.

    Errors as of :func:`open_object`; DataError where a wildcard fits nothing. Removes from the cache what is above its
    limit, once a minute: opening an object takes no room, and reading looks again as it fetches.
    """
    places: dict[ObjectPlace, None] = {}
    siblings: dict[ObjectPlace, Mapping[str, ObjectFacts]] = {}  # by folder, of those that were listed
    for name in braces(uri):
        place = ObjectPlace.parse(name)
        if not glob.has_magic(name):
            places[place] = None
            continue
        folder = place.sibling("")
        if glob.has_magic(folder.key):
            raise DataError(f"{name} has a wildcard in the name of a folder: wildcards go in the last part of a URI")
        siblings[folder] = siblings.get(folder) or Store(place).list_folder(folder)
        matches = fnmatch.filter(siblings[folder], place.name)
        if not matches:
            raise NoObjectError(f"there is no object {name}")
        places |= dict.fromkeys(place.sibling(match) for match in matches)

    def open_one(place: ObjectPlace) -> Path:
        # Elsewhere than in S3, what a listing says of an object may be spelled otherwise than in an answer for it.
        return open_object(str(place), siblings.get(place.sibling("")) if place.scheme == "s3" else None)

    allow_open_files(0)  # more than usual are open while so many answers are awaited
    with ThreadPoolExecutor(max_workers=min(MOST_REQUESTS, len(places))) as pool:
        files = list(pool.map(open_one, places))
    objects = objects_folder()
    with storage_errors(objects):
        _make_room_at_times(objects, limit_bytes(objects), int(time.monotonic() // 60))
    return files


def fetch_list(file: Path, uri: str, suffix: str = ".lst") -> Path | None:
    """Fetch the list, or what else is beside the record file at ``uri``, unless it lies beside its copy ``file``.

    Returns:
        Its path; None where there is none.

    Raises:
        StorageError: the store does not answer, or the cache cannot be written.
    """
    path = file.with_suffix(suffix)
    if not path.exists():
        place = ObjectPlace.parse(uri)
        with storage_errors(path), locked(file.parent / ".lock"):
            _fetch_companion(Store(place, patience_seconds=OPENING_SECONDS), place, file, suffix, None)
    return path if path.exists() else None


def find_object_beside(uri: str, split: str) -> str | None:
    """Find ``X-val.rec``, or ``X-test.rec``, beside ``X-train.rec``, by its URI; None where there is none.

    Errors as of :func:`open_object`.
    """
    place = ObjectPlace.parse(uri)
    store = Store(place, patience_seconds=OPENING_SECONDS)
    for name in names_beside(place.name, split):
        with contextlib.suppress(DataError):
            store.stat(place.sibling(name))
            return str(place.sibling(name))
    return None


def _fetch_companion(
    store: Store, place: ObjectPlace, file: Path, suffix: str, siblings: Mapping[str, ObjectFacts] | None
) -> None:
    """Fetch the index or the card of a record file, unless the cache has it and it has not changed."""
    companion, copy = place.sibling(Path(place.name).with_suffix(suffix).name), file.with_suffix(suffix)
    origin = origin_path(copy)
    try:
        if siblings is not None and companion.name not in siblings:
            raise NoObjectError(f"there is no object {companion}")
        known = read_table(origin) if copy.exists() else {}
        if known.keys() == {each.name for each in fields(ObjectFacts)} and ObjectFacts(**known).is_same(
            store.stat(companion) if siblings is None else siblings[companion.name]
        ):
            return
        data, facts = store.read(companion)
    except DataError as error:  # who may not list a bucket is refused what it does not hold
        if not isinstance(error, NoObjectError) and "(status 403)" not in str(error):
            raise
        copy.unlink(missing_ok=True)
        return
    part = copy.with_name(f".{copy.name}.new")
    with create(part) as new:
        new.write(data)
    origin.unlink(missing_ok=True)
    part.replace(copy)
    origin.write_text(json.dumps(asdict(facts)), encoding="utf-8")


@lru_cache(maxsize=1)
def _make_room_at_times(objects: Path, limit: int, minute: int) -> None:
    """Make room unless that was done in this minute: thousands of objects may be opened one by one."""
    make_room(objects, limit)


def make_room(objects: Path, limit: int) -> None:
    """Shrink the cache of objects to seven eighths of a limit, if it is above the limit."""
    with locked(objects / ".lock"):
        folders = [path for path in objects.iterdir() if path.is_dir()]
        used = {folder: used_bytes(folder) for folder in folders}
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
        _drop_pages([path for folder in used for path in paged_files(folder)], total - goal)


def _is_open(folder: Path) -> bool:
    """Return whether a process reads files of a folder: it holds a shared lock of them."""
    for file in (folder / ".hold", *paged_files(folder)):
        try:
            with file.open("r+b") as opened:
                if not lock_surely(opened):
                    return True
        except FileNotFoundError:
            continue
        except OSError:  # another user's
            return True
    return False


def _drop_pages(paths: Sequence[Path], excess: int) -> None:
    """Remove about so many bytes of pages, of files that nobody keeps whole: any, as in training none is used sooner.

    Of data that are read again and again in one order, what was used least recently would be needed next.
    """
    counts = dict.fromkeys(paths, 0)
    for path in paths:  # one at a time: there may be more than a process can open
        with (
            contextlib.suppress(DataError),
            contextlib.closing(PagedFile(path)) as file,
            file.unless_kept() as may_drop,
        ):
            counts[path] = int(file.present.sum()) if may_drop else 0
    share = excess / max(1, sum(counts.values()) * PAGE_BYTES)
    for path in filter(counts.__getitem__, paths):
        with contextlib.suppress(DataError), contextlib.closing(PagedFile(path)) as file:
            pages = np.flatnonzero(file.present)
            file.drop(np.sort(np.random.default_rng().permutation(pages)[: math.ceil(share * len(pages))]))
