"""The images that a list or a table names, in a folder or inside archives.

A path is taken as it is written, else in another spelling: a list made on another system may turn its slashes, compose
its letters in another way or write ``.jpg`` for ``.JPG``. It may also lack its suffix.

>>> list(spellings("cat\\\\1.jpg"))
['cat/1.jpg', 'cat\\\\1.JPG', 'cat/1.JPG']
"""

from __future__ import annotations

import os
import posixpath
import shlex
import unicodedata
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from stat import S_ISDIR
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.sources.filenames import SUFFIXES, few, is_image, printable
from steadytrain.data.sources.listing import Files, Labels, Listing, Names
from steadytrain.errors import DataError

_COMMON_FIRST = [".jpg", ".png", ".jpeg", ".JPG", ".JPEG", ".PNG"]
_ENDINGS = [*_COMMON_FIRST, *sorted(SUFFIXES - set(_COMMON_FIRST))]
_AMBIGUOUS = -1


class FileStatus(NamedTuple):
    """A file's name below its folder, its bytes, when it was last changed (ns); -1 and 0 for one that is missing."""

    name: str
    size: int
    time: int


def spellings(name: str) -> Iterator[str]:
    """Other ways to write a path, each once."""
    known = {name}
    stem, suffix = os.path.splitext(name)  # noqa: PTH122
    for spelling in (name, stem + suffix.swapcase()):
        for turned in (spelling, spelling.replace("\\", "/")):
            for form in (turned, unicodedata.normalize("NFC", turned), unicodedata.normalize("NFD", turned)):
                if form not in known:
                    known.add(form)
                    yield form


def locate(folder: Path, name: str, endings: Sequence[str] = ("",)) -> FileStatus:
    """Find the file that a path means, with one of ``endings`` behind it; one that is missing keeps its name."""
    for spelling in chain([name], spellings(name)):
        for ending in endings:
            try:
                status = os.stat(os.path.join(folder, spelling + ending))  # noqa: PTH116, PTH118 - a million times
            except (OSError, ValueError):  # reported when it is read
                continue
            if not S_ISDIR(status.st_mode):
                return FileStatus(spelling + ending, status.st_size, status.st_mtime_ns)
    return FileStatus(name, -1, 0)


def none_found(table: Path, folder: Path, names: Sequence[str], endings: Sequence[str] = ("",)) -> DataError:
    """The error for a list or a table of which no path leads to a file; names the folder that they may start from."""
    text = f"none of the {len(names):,} paths in {table} exists ({printable(names[0])} from {folder} on)"
    for inner in sorted(folder.iterdir()):
        if inner.is_dir() and locate(inner, names[0], endings).size >= 0:
            return DataError(f"{text}: give --root {shlex.quote(str(inner))}")
    return DataError(f"{text}: name the folder that they are relative to with --root")


class ImagesInFolder:
    """Images in a folder: a path is relative to it or absolute, and may lack its suffix.

    Of a table ``train.csv`` with a folder ``train`` beside it a path may start from that folder, too.
    """

    def __init__(self, folder: Path, *, table: Path) -> None:
        if not folder.is_dir():
            raise DataError(
                f"there is no folder {folder}: name the folder that the paths in {table.name} are relative to"
                " with --root"
            )
        self._folder = folder
        self._table = table
        self._endings = ["", *_ENDINGS]
        beside = folder / table.stem
        self._beside = f"{table.stem}/" if table.suffix and beside.is_dir() and beside == table.with_suffix("") else ""

    def listing(self, names: Sequence[str], labels: Labels, *, classes: tuple[str, ...], split: str) -> Listing:
        """List the images of these names. One that is missing stays, with the size -1; all missing is refused.

        Raises:
            DataError: none of the names leads to a file; says where the first one is, if it is near.
        """
        located, sizes, times = self.locate(names)
        if np.all(sizes < 0):
            raise none_found(self._table, self._folder, names, self._endings)
        return Listing(split, self._folder, classes, located, labels, sizes, times, ids=np.arange(len(located)))

    def locate(self, names: Sequence[str]) -> tuple[Names, NDArray[np.int64], NDArray[np.int64]]:
        """Find files: their names in the folder, bytes (-1 where one is missing), and times of their last change."""
        located = Names()
        sizes, times = np.empty(len(names), np.int64), np.empty(len(names), np.int64)
        for number, name in enumerate(names):
            endings = ("",) if is_image(name) else self._endings
            status = locate(self._folder, name, endings)
            if status.size < 0 and self._beside:
                inner = locate(self._folder, self._beside + name, endings)
                name, status = (self._beside + name, inner) if inner.size >= 0 else (name, status)
            located.append(status.name)
            sizes[number], times[number] = status.size, status.time
            ending = status.name[len(name) :]
            if ending in self._endings[2:]:  # the next one most likely ends alike
                self._endings.remove(ending)
                self._endings.insert(1, ending)
        return located, sizes, times


class ImagesInArchives:
    """Images inside archives: by the member's name or its end, with or without the suffix."""

    def __init__(self, files: Files, root: Path, *, table: Path) -> None:
        self._files = files
        self._root = root
        self._table = table
        self._rows: dict[str, int] = {}
        self._of_base: dict[str, list[int]] = {}
        for row, name in enumerate(files.names):
            if is_image(name):
                path = _plain(name)
                # Of one name in one archive the later member counts, as when it is unpacked.
                before = self._rows.get(path, row)
                same = before >= 0 and files.archive(before) == files.archive(row)
                self._rows[path] = row if same else _AMBIGUOUS
                self._of_base.setdefault(_stem(path.rpartition("/")[2]), []).append(row)

    def listing(self, names: Sequence[str], labels: Labels, *, classes: tuple[str, ...], split: str) -> Listing:
        """List the members of these names. Raises DataError where some fit no member, or several."""
        rows = [self._row(name) for name in names]
        if missing := [name for name, row in zip(names, rows, strict=True) if row is None]:
            raise DataError(f"{self._count_of(missing)} missing in {self._root} ({few(missing)})")
        if ambiguous := [name for name, row in zip(names, rows, strict=True) if row == _AMBIGUOUS]:
            raise DataError(
                f"{self._count_of(ambiguous)} found more than once in {self._root} ({few(ambiguous)}): give their paths"
                " in it"
            )
        chosen = [row for row in rows if row is not None]
        return self._files.listing(chosen, labels, root=self._root, classes=classes, split=split)

    def _count_of(self, names: Sequence[str]) -> str:
        return f"{self._table} names {len(names):,} image{'s' * (len(names) > 1)}"

    def _row(self, name: str) -> int | None:
        """The member that a path means: by the whole path, else by its end."""
        for path in dict.fromkeys(_plain(spelling) for spelling in (name, *spellings(name))):
            if path in self._rows:
                return self._rows[path]
            ends = set()
            for row in self._of_base.get(_stem(path.rpartition("/")[2]), ()):
                entry = _plain(self._files.names[row])
                if f"/{entry}".endswith(f"/{path}") or (not is_image(path) and f"/{_stem(entry)}".endswith(f"/{path}")):
                    ends.add(entry)
            if ends:
                return self._rows[ends.pop()] if len(ends) == 1 else _AMBIGUOUS
        return None


def _plain(name: str) -> str:
    """A path without what says "here", in one Unicode form."""
    return unicodedata.normalize("NFC", posixpath.normpath(name).lstrip("/"))


def _stem(path: str) -> str:
    return path.rpartition(".")[0] if is_image(path) else path
