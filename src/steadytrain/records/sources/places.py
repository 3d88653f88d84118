"""Where the images are that a table names: in a folder, or inside archives."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.errors import DataError
from steadytrain.records.listing import SUFFIXES, Listing, is_image
from steadytrain.records.names import Names
from steadytrain.records.sources.members import Members, few

Labels = NDArray[np.int64] | NDArray[np.float32]

_COMMON_FIRST = [".jpg", ".png", ".jpeg", ".JPG", ".JPEG", ".PNG"]
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
            raise DataError(f"none of the {len(names):,} paths of {self._table} leads to a file{self._hint(names[0])}")
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

    def _find(self, name: str) -> tuple[str, int, int]:
        """The file's name below the folder, its size and time."""
        path = os.path.join(self._folder, name)  # noqa: PTH118 - a million times
        about = _about(path)
        if about is None and not is_image(name):
            for ending in self._endings:
                about = _about(path + ending)
                if about is not None:
                    self._endings.remove(ending)  # the next one most likely ends alike
                    self._endings.insert(0, ending)
                    return name + ending, *about
        if about is None and "\\" in name:  # as Windows writes paths
            turned, size, time = self._find(name.replace("\\", "/"))
            return (turned, size, time) if size >= 0 else (name, -1, 0)
        return name, *(about or (-1, 0))

    def _hint(self, name: str) -> str:
        told = f" ({name} from {self._folder} on)"
        for folder in sorted(self._folder.iterdir()):
            if folder.is_dir() and any(_about(os.path.join(folder, name + ending)) for ending in ["", *_ENDINGS]):  # noqa: PTH118
                return f"{told}: give --root {folder}"
        return f"{told}: give the folder that they start from as --root"


class InArchives:
    """Images inside archives: by the member's name or its end, with or without the suffix."""

    def __init__(self, members: Members, root: Path, *, table: Path) -> None:
        self._members = members
        self._root = root
        self._table = table
        self._rows: dict[str, int] = {}
        for row, name in enumerate(members.names):
            base = name.rpartition("/")[2]
            for key in {name, base, os.path.splitext(name)[0], os.path.splitext(base)[0]} if is_image(name) else ():  # noqa: PTH122
                self._rows[key] = row if key not in self._rows else -1

    def listing(self, names: Sequence[str], labels: Labels, *, classes: tuple[str, ...], split: str) -> Listing:
        """The members of these names.

        Raises:
            DataError: some names fit no member, or several.
        """
        rows = [self._rows.get(name.removeprefix("./")) for name in names]
        if missing := [name for name, row in zip(names, rows, strict=True) if row is None]:
            raise DataError(
                f"{self._table} names {len(missing):,} images that {self._root} does not hold ({few(missing)})"
            )
        if twice := [name for name, row in zip(names, rows, strict=True) if row == -1]:
            raise DataError(
                f"{self._table} names {len(twice):,} images of which {self._root} holds several ({few(twice)}):"
                " give their paths in it"
            )
        told = [row for row in rows if row is not None]
        found = [self._members.names[row] for row in told]
        return self._members.listing(told, found, labels, root=self._root, classes=classes, split=split)


def _about(path: str) -> tuple[int, int] | None:
    try:
        told = os.stat(path)  # noqa: PTH116
    except OSError:  # told when it is read
        return None
    return told.st_size, told.st_mtime_ns
