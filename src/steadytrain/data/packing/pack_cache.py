"""Packed copies in a cache: found again without listing their source, and removed when nobody needs them any more."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from stat import S_ISDIR

from steadytrain.data.sources import filenames
from steadytrain.errors import DataError

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

UNUSED_SECONDS = 3600.0
"""How long a copy of an earlier state stays after somebody asked for it."""

_MOST_FILES = 10_000
_STATES = "states.txt"


def state_of(source: str, labels: Path | None) -> str:
    """Names, sizes and times of the files that a source is, and of those beside it, as a digest.

    Empty for folders of folders: nothing short of listing them says whether they have changed.
    """
    path = Path(source)
    try:
        folder = path if path.is_dir() else path.parent
        named = filenames.expand(source) if not path.exists() and filenames.is_pattern(source) else []
        files = sorted({*named, *folder.iterdir(), *([] if labels is None else [labels])})
        if len(files) > _MOST_FILES or (path.is_dir() and any(one.is_dir() for one in files)):
            return ""
        about = [
            (str(one), told.st_size, told.st_mtime_ns) for one in files if not S_ISDIR((told := one.stat()).st_mode)
        ]
    except (OSError, DataError):  # told when it is listed
        return ""
    return hashlib.sha256(repr(about).encode("utf-8", "surrogateescape")).hexdigest()


def noted(place: Path, family: str, state: str) -> Path | None:
    """The copy that was made of a source in this state; None where it has to be listed."""
    for folder in place.glob(f"{family}-*") if state else ():
        with contextlib.suppress(OSError):
            if state in (folder / _STATES).read_text(encoding="utf-8").split():
                return folder
    return None


def note(folder: Path, state: str) -> None:
    """Remember that a copy is in use, and what state of its source it is of, if that is known."""
    with contextlib.suppress(OSError):  # a cache may be there to be read only
        if state and noted(folder.parent, folder.name.rpartition("-")[0], state) is None:
            with (folder / _STATES).open("a", encoding="utf-8") as file:
                file.write(state + "\n")
        os.utime(folder)


def remove_older(folder: Path, family: str, say: Callable[[str], None]) -> None:
    """Remove copies of earlier states of a source, those apart that a process has open or asked for within the hour."""
    for other in folder.parent.glob(f"{family}-*"):
        if other != folder and not _is_in_use(other):
            say(f"removing {other}: the copy of an earlier state")
            shutil.rmtree(other, ignore_errors=True)


def _is_in_use(folder: Path) -> bool:
    try:
        if time.time() - folder.stat().st_mtime < UNUSED_SECONDS:
            return True
        return any(_is_open(path) for path in folder.glob("*.rec"))
    except OSError:
        return False


def _is_open(path: Path) -> bool:
    """Whether a process holds a record file: readers lock it, each together with all the others."""
    if fcntl is None:
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
