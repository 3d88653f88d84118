"""Files that a list or a table names: as they are written, else in another spelling of the same path.

A list made on another system may turn its slashes, compose its letters in another way or write ``.jpg`` for ``.JPG``.
Another spelling is tried only where there is no file by the first one.

>>> list(spellings("cat\\\\1.jpg"))
['cat/1.jpg', 'cat\\\\1.JPG', 'cat/1.JPG']
"""

from __future__ import annotations

import os
import shlex
import unicodedata
from collections.abc import Iterator, Sequence
from pathlib import Path
from stat import S_ISDIR
from typing import NamedTuple

from steadytrain.data.sources.listing import shown
from steadytrain.errors import DataError


class Located(NamedTuple):
    """A file's name below its folder, its bytes, when it was last changed (ns); -1 and 0 for one that is missing."""

    name: str
    size: int
    time: int


def locate(folder: Path, name: str, endings: Sequence[str] = ("",)) -> Located:
    """Find the file that a name means; one that is missing keeps its name.

    Args:
        folder: that names start from; an absolute one starts from nowhere.
        endings: to be tried behind the name, in their order.
    """
    for ending in endings:
        about = _about(os.path.join(folder, name + ending))  # noqa: PTH118 - a million times
        if about is not None:
            return Located(name + ending, *about)
    for other in spellings(name):
        for ending in endings:
            if (about := _about(os.path.join(folder, other + ending))) is not None:  # noqa: PTH118
                return Located(other + ending, *about)
    return Located(name, -1, 0)


def spellings(name: str) -> Iterator[str]:
    """Other ways to write a path, each once."""
    known = {name}
    stem, suffix = os.path.splitext(name)  # noqa: PTH122
    for whole in (name, stem + suffix.swapcase()):
        for turned in (whole, whole.replace("\\", "/")):
            for form in (turned, unicodedata.normalize("NFC", turned), unicodedata.normalize("NFD", turned)):
                if form not in known:
                    known.add(form)
                    yield form


def none_found(table: Path, folder: Path, names: Sequence[str], endings: Sequence[str] = ("",)) -> DataError:
    """The error for a list or a table of which no path leads to a file; names the folder that they may start from."""
    told = f"none of the {len(names):,} paths of {table} leads to a file ({shown(names[0])} from {folder} on)"
    for inner in sorted(folder.iterdir()):
        if inner.is_dir() and locate(inner, names[0], endings).size >= 0:
            return DataError(f"{told}: give --root {shlex.quote(str(inner))}")
    return DataError(f"{told}: give the folder that they start from as --root")


def _about(path: str) -> tuple[int, int] | None:
    try:
        told = os.stat(path)  # noqa: PTH116
    except (OSError, ValueError):  # told when it is read
        return None
    return None if S_ISDIR(told.st_mode) else (told.st_size, told.st_mtime_ns)
