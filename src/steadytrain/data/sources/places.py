"""Where the images are that a table names: in a folder, or inside archives."""

from __future__ import annotations

import posixpath
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.sources.listing import SUFFIXES, Listing, is_image
from steadytrain.data.sources.located import Located, locate, none_found, spellings
from steadytrain.data.sources.members import Members, few
from steadytrain.data.sources.names import Names
from steadytrain.errors import DataError

Labels = NDArray[np.int64] | NDArray[np.float32]

_COMMON_FIRST = [".jpg", ".png", ".jpeg", ".JPG", ".JPEG", ".PNG"]
_SEVERAL = -1
_ENDINGS = [*_COMMON_FIRST, *sorted(SUFFIXES - set(_COMMON_FIRST))]


class InFolder:
    """Images in a folder: a path is relative to it or absolute, and may lack its suffix."""

    def __init__(self, folder: Path, *, table: Path) -> None:
        if not folder.is_dir():
            raise DataError(
                f"there is no folder {folder}: give the folder that the paths of {table.name} start from as --root"
            )
        self._folder = folder
        self._table = table
        self._endings = list(_ENDINGS)

    def listing(self, names: Sequence[str], labels: Labels, *, classes: tuple[str, ...], split: str) -> Listing:
        """The images of these names. One that is missing stays, with the size -1; all of them missing is refused.

        Raises:
            DataError: none of the names leads to a file; says where the first one is, if it is near.
        """
        found = Names()
        sizes, times = np.empty(len(names), np.int64), np.empty(len(names), np.int64)
        for number, name in enumerate(names):
            told, sizes[number], times[number] = self._find(name)
            found.append(told)
        if np.all(sizes < 0):
            raise none_found(self._table, self._folder, names, ["", *_ENDINGS])
        return Listing(
            split=split,
            root=self._folder,
            classes=classes,
            names=found,
            labels=labels,
            sizes=sizes,
            times=times,
            ids=np.arange(len(found)),
        )

    def _find(self, name: str) -> Located:
        if is_image(name):
            return locate(self._folder, name)
        found = locate(self._folder, name, ["", *self._endings])
        ending = found.name[len(name) :]
        if found.size >= 0 and ending in self._endings:
            self._endings.remove(ending)  # the next one most likely ends alike
            self._endings.insert(0, ending)
        return found


class InArchives:
    """Images inside archives: by the member's name or its end, with or without the suffix."""

    def __init__(self, members: Members, root: Path, *, table: Path) -> None:
        self._members = members
        self._root = root
        self._table = table
        self._rows: dict[str, int] = {}
        self._of_base: dict[str, list[int]] = {}
        for row, name in enumerate(members.names):
            if is_image(name):
                path = _plain(name)
                self._rows[path] = row if self._is_later(row, path) else _SEVERAL
                self._of_base.setdefault(_stem(path.rpartition("/")[2]), []).append(row)

    def listing(self, names: Sequence[str], labels: Labels, *, classes: tuple[str, ...], split: str) -> Listing:
        """The members of these names.

        Raises:
            DataError: some names fit no member, or several.
        """
        rows = [self._find(name) for name in names]
        if missing := [name for name, row in zip(names, rows, strict=True) if row is None]:
            raise DataError(f"{self._of_images(missing)} that {self._root} does not hold ({few(missing)})")
        if twice := [name for name, row in zip(names, rows, strict=True) if row == _SEVERAL]:
            raise DataError(
                f"{self._of_images(twice)} of which {self._root} holds several ({few(twice)}): give their paths in it"
            )
        told_rows = [row for row in rows if row is not None]
        found = [self._members.names[row] for row in told_rows]
        return self._members.listing(told_rows, found, labels, root=self._root, classes=classes, split=split)

    def _of_images(self, names: Sequence[str]) -> str:
        return f"{self._table} names {len(names):,} image{'s' * (len(names) > 1)}"

    def _is_later(self, row: int, path: str) -> bool:
        """Whether a member is the only one of its path, or the later one in its archive, as when it is unpacked."""
        before = self._rows.get(path)
        return before is None or (before >= 0 and self._members.archive(before) == self._members.archive(row))

    def _find(self, name: str) -> int | None:
        """The number of the member that a name means: the whole path, else its end."""
        for path in dict.fromkeys(_plain(one) for one in (name, *spellings(name))):
            if path in self._rows:
                return self._rows[path]
            known, wanted = self._of_base.get(_stem(path.rpartition("/")[2]), ()), f"/{path}"
            ends = {whole for row in known if _ends(whole := _plain(self._members.names[row]), wanted)}
            if ends:
                return self._rows[ends.pop()] if len(ends) == 1 else _SEVERAL
        return None


def _ends(whole: str, wanted: str) -> bool:
    """Whether a member's path ends in what a table says, with or without its suffix."""
    return f"/{whole}".endswith(wanted) or (not is_image(wanted) and f"/{_stem(whole)}".endswith(wanted))


def _plain(name: str) -> str:
    """A path without what says "here", in one Unicode form."""
    return unicodedata.normalize("NFC", posixpath.normpath(name).lstrip("/"))


def _stem(path: str) -> str:
    return path.rpartition(".")[0] if is_image(path) else path
