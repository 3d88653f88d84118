"""A folder that processes of several machines share, on a disk or in a store, whose files appear whole."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from steadytrain.data.storage.store import NoObjectError, ObjectPlace, Store, abort_uploads, is_uri
from steadytrain.errors import storage_error, storage_errors
from steadytrain.files import replacing

THREADS = 24
"""Requests to a store that are made at a time."""


class DiskFolder:
    """Files by their names; the folder need not exist. Raises StorageError for what cannot be done."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None where there is none."""
        with storage_errors(self.path / name), suppress(FileNotFoundError):
            return (self.path / name).read_bytes()
        return None

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file by its name."""
        sizes = {}
        with storage_errors(self.path), suppress(FileNotFoundError):
            for entry in os.scandir(self.path):
                with suppress(FileNotFoundError):
                    sizes[entry.name] = entry.stat().st_size
        return sizes

    def write(self, name: str, content: bytes | Path) -> None:
        """Write a file, or move one there, in place of what is there."""
        with storage_errors(self.path / name):
            self.path.mkdir(parents=True, exist_ok=True)
            if isinstance(content, Path):
                content.replace(self.path / name)
                return
        with replacing(self.path / name) as part:
            part.write_bytes(content)

    def remove(self) -> None:
        """Remove the folder, with all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)


class StoreFolder:
    """Objects below a prefix by their names; methods as of :class:`DiskFolder`. Raises what the store does."""

    def __init__(self, uri: str) -> None:
        self.place = ObjectPlace.folder(uri)
        self._store = Store(self.place)

    def _at(self, name: str) -> ObjectPlace:
        return ObjectPlace(self.place.base, self.place.key + name)

    def read(self, name: str) -> bytes | None:
        try:
            return bytes(self._store.read(self._at(name))[0])
        except NoObjectError:
            return None

    def sizes(self) -> dict[str, int]:
        return {name: facts.size for name, facts in self._store.list_folder(self.place).items()}

    def write(self, name: str, content: bytes | Path) -> None:
        try:
            self._store.write(self._at(name), content)
        except KeyboardInterrupt:
            abort_uploads(self._at(name), [name], lambda line: None, may_be_there=False)
            raise
        except OSError as error:
            raise storage_error(error, content if isinstance(content, Path) else Path(name)) from error

    def remove(self) -> None:
        with ThreadPoolExecutor(THREADS, "storage") as pool:
            list(pool.map(lambda name: self._store.remove(self._at(name)), self.sizes()))


SharedFolder = DiskFolder | StoreFolder


def open_folder(where: str) -> SharedFolder:
    """Open a folder by its path or its URI."""
    return StoreFolder(where) if is_uri(where) else DiskFolder(Path(where))
