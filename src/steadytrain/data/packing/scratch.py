"""Hidden folders for what has to be decompressed; those that a killed process left are removed."""

from __future__ import annotations

import glob
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from steadytrain.errors import storage_error

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def scratch_beside(path: Path) -> Iterator[Path]:
    """Make ``.NAME.scratch-...`` beside ``path``, and remove it at the end, whatever that is.

    Folders that lead there are made if need be, and removed again where nothing else came into them.

    Raises:
        StorageError: it cannot be made.
    """
    folder = path.parent
    missing = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    prefix = f".{path.stem}.scratch-"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"{glob.escape(prefix)}*") if fcntl is not None else ():
            with suppress(OSError):  # another process holds it
                lock = _lock(left)
                shutil.rmtree(left, ignore_errors=True)
                _unlock(lock)
        scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        lock = _lock(scratch)
    except OSError as error:
        raise storage_error(error, path) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        _unlock(lock)
        with suppress(OSError):
            for parent in missing:
                parent.rmdir()


def _unlock(lock: int | None) -> None:
    if lock is not None:
        os.close(lock)


def _lock(folder: Path) -> int | None:
    """Lock a folder until the number that is returned is closed. Raises OSError where another process holds it."""
    if fcntl is None:
        return None
    lock = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock
