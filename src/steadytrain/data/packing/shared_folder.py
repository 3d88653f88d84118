"""A folder that processes of many machines share, on a disk or in a store, and leases of the work that is noted in it.

A lease is a small file that one process alone can make, and writes anew every few seconds as long as it lives. Clocks
are not compared: whoever wants work that another has watches its lease, and takes the work over where nothing was
written for :data:`LEASE_SECONDS` of his own clock, by making the next one: ``plan.lease-0``, ``plan.lease-1``. A
process that was only slow then does work that is done twice, so what it makes must be the same both times. The lease of
a process of this very machine that has ended is free at once.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import psutil

from steadytrain.data.storage.store import NoObjectError, ObjectPlace, Store, TakenError, abort_uploads, is_uri
from steadytrain.errors import SteadyError, storage_error, storage_errors

LEASE_SECONDS = 30.0
"""A lease that is not written for so long is of a process that is gone."""
BEATS = 5
"""How often a lease is written in that time."""
THREADS = 24
"""Requests to a store that are made at a time."""


class SharedFolder(Protocol):
    """Files by their names. Raises StorageError (or DataError, where a store refuses) for what cannot be done."""

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None where there is none."""

    def size(self, name: str) -> int | None:
        """Return a file's bytes; None where there is none."""

    def make(self) -> None:
        """Make the folder, if it is not there."""

    def create(self, name: str, content: bytes) -> bool:
        """Make a file that does not exist; return whether this process made it. Nothing is made without a folder."""

    def write(self, name: str, content: bytes | Path) -> None:
        """Write a file, or move one there; whole or not at all, in place of what is there."""

    def names(self) -> set[str]:
        """Return the names of all files; none where there is no folder."""

    def delete(self, name: str) -> None:
        """Remove a file, if it is there."""

    def remove(self) -> None:
        """Remove the folder, with all that is in it."""

    def remove_parts(self, names: Collection[str], say: Callable[[str], None], *, may_be_there: bool) -> None:
        """Remove what there is of files that were not written or sent whole.

        ``say`` and ``may_be_there``: as of abort_uploads.
        """


def open_folder(where: str) -> SharedFolder:
    """Open a folder by its path or its URI; it need not exist."""
    return _StoreFolder(where) if is_uri(where) else _DiskFolder(where)


class _DiskFolder:
    def __init__(self, where: str) -> None:
        self._path = Path(where)

    def read(self, name: str) -> bytes | None:
        with storage_errors(self._path / name), suppress(FileNotFoundError):
            return (self._path / name).read_bytes()
        return None

    def size(self, name: str) -> int | None:
        with storage_errors(self._path / name), suppress(FileNotFoundError):
            return (self._path / name).stat().st_size
        return None

    def make(self) -> None:
        with storage_errors(self._path):
            self._path.mkdir(parents=True, exist_ok=True)

    def create(self, name: str, content: bytes) -> bool:
        with self._whole(name, content) as whole:
            try:
                os.link(whole, self._path / name)  # refused where there is one, on NFS as well
            except (FileExistsError, FileNotFoundError):
                return False
            return True

    def write(self, name: str, content: bytes | Path) -> None:
        with self._whole(name, content) as whole:
            whole.replace(self._path / name)

    @contextmanager
    def _whole(self, name: str, content: bytes | Path) -> Iterator[Path]:
        part = self._path / f".{name}.{secrets.token_hex(4)}"
        with storage_errors(self._path / name):
            if isinstance(content, Path):
                yield content
                return
            try:
                with suppress(FileNotFoundError), part.open("xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
                yield part
            finally:
                part.unlink(missing_ok=True)

    def names(self) -> set[str]:
        with storage_errors(self._path), suppress(FileNotFoundError):
            return {entry.name for entry in os.scandir(self._path) if not entry.name.startswith(".")}
        return set()

    def delete(self, name: str) -> None:
        with storage_errors(self._path / name):
            (self._path / name).unlink(missing_ok=True)

    def remove(self) -> None:
        shutil.rmtree(self._path, ignore_errors=True)

    def remove_parts(self, names: Collection[str], say: Callable[[str], None], *, may_be_there: bool) -> None:
        name = re.compile(rf"\.({'|'.join(map(re.escape, names))})\.[0-9a-f]{{8}}")  # as _whole has it
        for part in [each for each in self._path.glob(".*") if name.fullmatch(each.name)]:
            with suppress(OSError):
                part.unlink()


class _StoreFolder:
    def __init__(self, where: str) -> None:
        self._place = ObjectPlace.folder(where)
        self._store = Store(self._place)

    def _at(self, name: str) -> ObjectPlace:
        return ObjectPlace(self._place.base, self._place.key + name)

    def read(self, name: str) -> bytes | None:
        try:
            return bytes(self._store.read(self._at(name))[0])
        except NoObjectError:
            return None

    def size(self, name: str) -> int | None:
        try:
            return self._store.stat(self._at(name)).size
        except NoObjectError:
            return None

    def make(self) -> None:
        pass  # a store has no folders

    def create(self, name: str, content: bytes) -> bool:
        try:
            self._store.write(self._at(name), content, replaces="")
        except TakenError:
            return False
        return True

    def write(self, name: str, content: bytes | Path) -> None:
        try:
            self._store.write(self._at(name), content)
        except KeyboardInterrupt:
            self.remove_parts([name], lambda line: None, may_be_there=False)
            raise
        except OSError as error:
            raise storage_error(error, content if isinstance(content, Path) else Path(name)) from error

    def names(self) -> set[str]:
        return set(self._store.list_folder(self._place))

    def delete(self, name: str) -> None:
        self._store.remove(self._at(name))

    def remove(self) -> None:
        with ThreadPoolExecutor(THREADS, "storage") as pool:
            list(pool.map(self.delete, self.names()))

    def remove_parts(self, names: Collection[str], say: Callable[[str], None], *, may_be_there: bool) -> None:
        abort_uploads(self._at("any"), names, say, may_be_there=may_be_there)


class Leases:
    """The leases that this process holds in a folder, and those of others that it watches. A context manager."""

    def __init__(self, folder: SharedFolder) -> None:
        self._folder = folder
        self._owner = f"{platform.node()} {os.getpid()} {secrets.token_hex(4)}"
        self._held: dict[str, str] = {}  # task -> its lease
        self._watched: dict[str, tuple[bytes | None, float]] = {}  # lease -> its content, and since when it is that
        self._beats = 0
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="leases", daemon=True)

    def take(self, task: str, names: Collection[str]) -> bool:
        """Take a task that nobody has, or whose owner is gone; return whether it is this process's now.

        Args:
            names: of all files in the folder, as they were a moment ago.
        """
        prefix = f"{task}.lease-"
        number = max((int(name[len(prefix) :]) for name in names if name.startswith(prefix)), default=-1)
        if number >= 0:
            last, seconds = f"{prefix}{number}", time.monotonic()
            content = self._folder.read(last)
            known, since = self._watched.setdefault(last, (content, seconds))
            if content != known:
                self._watched[last] = content, seconds
            if (content != known or seconds - since < LEASE_SECONDS) and not _has_ended(content):
                return False
        lease = f"{prefix}{number + 1}"
        if not self._folder.create(lease, self._content()):
            return False
        self._held[task] = lease
        return True

    def drop(self, task: str) -> None:
        """Stop renewing the lease of a task that is done."""
        self._held.pop(task, None)

    def stop(self) -> None:
        """Write no lease any more: before the folder is removed, which would come back by one."""
        self._is_closed.set()
        self._thread.join()

    def _content(self) -> bytes:
        self._beats += 1
        return json.dumps(
            {"owner": self._owner, "beat": self._beats, "machine": _machine(), "pid": os.getpid()}
        ).encode()

    def _beat(self) -> None:
        while not self._is_closed.wait(LEASE_SECONDS / BEATS):
            for lease in list(self._held.values()):
                with suppress(SteadyError):  # a store that is away for a while costs no more than work done twice
                    self._folder.write(lease, self._content())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()
        for lease in self._held.values():  # of work that is not done: others need not wait
            with suppress(SteadyError):
                self._folder.delete(lease)


@cache
def _machine() -> str:
    """Name what process numbers are unique in: a start of this machine, and a container's namespace; empty: unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"  # noqa: PTH116
    except OSError:
        return ""


def _has_ended(lease: bytes | None) -> bool:
    """Return whether the process that wrote a lease is known to have ended: it was one of this machine."""
    try:
        owner = json.loads(lease or b"{}")
        if not _machine() or owner["machine"] != _machine():
            return False
        return psutil.Process(owner["pid"]).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
