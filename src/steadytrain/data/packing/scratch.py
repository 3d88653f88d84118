"""A hidden folder of this process's own, for what has to be decompressed; what a kill left of earlier ones goes."""

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
    missing = [one for one in (folder, *folder.parents) if not one.exists()]
    prefix = f".{path.stem}.scratch-"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_left(folder, prefix)
        own = Path(tempfile.mkdtemp(prefix=prefix, dir=folder))
        held = _hold(own)
    except OSError as error:
        raise storage_error(error, path) from error
    try:
        yield own
    finally:
        shutil.rmtree(own, ignore_errors=True)
        _let_go(held)
        with suppress(OSError):
            for one in missing:
                one.rmdir()


def _remove_left(folder: Path, prefix: str) -> None:
    """Remove the folders that nobody holds any more."""
    for one in folder.glob(f"{glob.escape(prefix)}*") if fcntl is not None else ():
        with suppress(OSError):
            held = _hold(one)
            shutil.rmtree(one, ignore_errors=True)
            _let_go(held)


def _let_go(held: int | None) -> None:
    if held is not None:
        os.close(held)


def _hold(folder: Path) -> int | None:
    """Lock a folder until the number that is returned is closed. Raises OSError where another process holds it."""
    if fcntl is None:
        return None
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise
    return held
