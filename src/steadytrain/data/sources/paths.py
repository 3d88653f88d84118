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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import chain, islice
from pathlib import Path
from stat import S_ISDIR
from typing import NamedTuple
from urllib.parse import unquote

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.filenames import is_image, split_words
from steadytrain.data.names import Names
from steadytrain.data.sources.listing import FileList, Labels, Listing
from steadytrain.errors import DataError
from steadytrain.format import Say, count, few, printable

_AMBIGUOUS = -1
_SAMPLE = 50
_MOST_NAMES = 200_000  # names of a folder that are held in memory
_MOST_FOLDERS = 1000  # that are looked into for a hint
_MOST_LEVELS = 20  # folders of another machine


class FileStatus(NamedTuple):
    """A file's name below its folder, bytes, last change (ns), number (0: not known); -1, 0 and 0 for a missing one."""

    name: str
    size: int
    time: int
    file: int = 0


def spellings(name: str) -> Iterator[str]:
    """Other ways to write a path, each once."""
    known = {name}
    stem, suffix = os.path.splitext(name)  # noqa: PTH122
    texts = [name, stem + suffix.swapcase()]
    if name[:2] in ("~/", "~\\"):
        texts.append(os.path.expanduser(name.replace("\\", "/")))  # noqa: PTH111
    if "%" in name:
        texts.append(unquote(name))
    if "?" in name:
        texts += [name.partition("?")[0], unquote(name.partition("?")[0])]
    for spelling in texts:
        for turned in (spelling, spelling.replace("\\", "/")):
            for form in (turned, unicodedata.normalize("NFC", turned), unicodedata.normalize("NFD", turned)):
                if form not in known:
                    known.add(form)
                    yield form


class NamedImages:
    """The images that a table names, in a folder or inside archives.

    A path is relative to the folder or absolute, and may lack its suffix; a member of an archive may also be named by
    the end of its path. Where none of a table's paths leads to a file, they may be those of another machine:
    ``/kaggle/input/set/1.jpg`` is then ``1.jpg`` or ``set/1.jpg``, whichever is there for most of them.

    Args:
        root: the folder that paths start from, or what the user calls the archives.
        members: of the archives; None for a folder.
        prefixes: of paths below ``root``, in the order in which they are tried; None: none, then that of a folder
            beside the table that has its name (``train/`` of ``train.csv``).
        is_source: ``root`` is what the user named as data, and not the table.
        say: takes a line about paths that are read in another way than they are written.
    """

    def __init__(
        self,
        root: Path,
        *,
        table: Path,
        members: FileList | None = None,
        prefixes: Sequence[str] | None = None,
        is_source: bool = False,
        say: Say = lambda _: None,
    ) -> None:
        if members is None and not root.is_dir():
            raise DataError(
                f"there is no folder {root}: name the folder that the paths in {table.name} are relative to with --root"
            )
        if prefixes is None:
            beside = root / table.stem
            has_own = table.suffix and beside.is_dir() and beside == table.with_suffix("")
            prefixes = ("", f"{table.stem}/") if has_own else ("",)
        self.root = root
        self.located: list[NDArray[np.int64]] = []  # of each call that located images: their files
        self._table, self._members, self._prefixes, self._is_source = table, members, prefixes, is_source
        self._say = say
        self._several: dict[str, list[str]] = {}
        self._suffixes_in = lru_cache(1024)(_suffixes_in)
        self._rows: dict[str, int] = {}  # of members, by their paths
        self._ends: dict[str, list[str]] = {}  # of these paths, by their last parts without a suffix
        for row, name in enumerate(members.names if members is not None else ()):
            if members is not None and is_image(name):
                path = _plain(name)
                # Of one name in one archive the later member counts, as when it is unpacked.
                before = self._rows.get(path, row)
                same = before >= 0 and members.archive(before) == members.archive(row)
                self._rows[path] = row if same else _AMBIGUOUS
                self._ends.setdefault(_base_stem(path), []).append(path)

    def listing(self, names: Sequence[str], labels: Labels, *, classes: tuple[str, ...], split: str) -> Listing:
        """List the images of these names. One that is missing in a folder stays, with the size -1.

        Raises:
            DataError: none of the names leads to a file (says where the first one is, if it is near), some to no member
                of an archive, or some to several.
        """
        located, sizes, times = self.locate(names)
        if self._members is None:
            if np.all(sizes < 0):
                raise none_found(self._table, self.root, names, is_source=self._is_source)
            return Listing(split, self.root, classes, located, labels, sizes, times, ids=np.arange(len(located)))
        if missing := [names[row] for row in np.flatnonzero(sizes < 0).tolist()]:
            raise DataError(
                f"{self._table} names {count(len(missing), 'image')} missing in {self.root} ({few(missing)})"
            )
        return self._members.listing(self.located[-1] - 1, labels, root=self.root, classes=classes, split=split)

    def locate(self, names: Sequence[str]) -> tuple[Names, NDArray[np.int64], NDArray[np.int64]]:
        """Find files: their names in the folder, bytes (-1 where one is missing), and times of their last change.

        Raises:
            DataError: a name leads to several files.
        """
        located, statuses = self._locate(names)
        if np.all(statuses[0] < 0) and (lead := _foreign_lead(names, self.find, self.root)):
            self._several.clear()
            self._say(f"{self._table}: paths are read from {self.root} on, without {lead!r}")
            located, statuses = self._locate([name.replace("\\", "/").removeprefix(lead) for name in names])
        if self._several:
            listed = [f"{name}: {' and '.join(files)}" for name, files in self._several.items()]
            raise DataError(
                f"{self._table} names {count(len(listed), 'image')}, each of which may be one of several files in"
                f" {self.root} ({few(listed, 3)}): write their paths in it, with suffixes, into the table"
            )
        self.located.append(statuses[2])
        return located, statuses[0], statuses[1]

    def _locate(self, names: Sequence[str]) -> tuple[Names, NDArray[np.int64]]:
        located = Names()
        statuses = np.empty((len(FileStatus._fields) - 1, len(names)), np.int64)
        for number, name in enumerate(names):
            file = self._find(name) or FileStatus(name, -1, 0)
            located.append(file.name)
            statuses[:, number] = file[1:]
        missing = np.flatnonzero(statuses[0] < 0).tolist()
        others = {number: status for number in missing if (status := self._find_in_any_case(names[number]))}
        if others:  # unless it is the file that another path means
            used = Counter([*(name for name, size in zip(located, statuses[0], strict=True) if size >= 0)])
            used.update(status.name for status in others.values())
            others = {number: status for number, status in others.items() if used[status.name] == 1}
            located = Names(others[number].name if number in others else name for number, name in enumerate(located))
        for number, status in others.items():
            statuses[:, number] = status[1:]
        return located, statuses

    def find(self, name: str) -> FileStatus | None:
        """Find the file that a path means, in any case; None where it is missing."""
        return self._find(name) or self._find_in_any_case(name)

    def holds_any(self, names: Sequence[str]) -> bool:
        """Return whether some of these names lead to a file, as they are or without a beginning."""
        return any(map(self.find, names)) or bool(_foreign_lead(names, self.find, self.root))

    def _find(self, name: str) -> FileStatus | None:
        """Find the file that a path means, in another spelling if need be."""
        for spelling in chain([name], spellings(name)):
            for prefix in self._prefixes:
                if status := self._status(prefix + spelling):
                    return status
            path = _plain(spelling)
            if ends := {entry for entry in self._ends.get(_base_stem(path), ()) if _ends_with(entry, path)}:
                return self._first(name, sorted(ends))
        return None

    def _find_in_any_case(self, name: str) -> FileStatus | None:
        paths = (prefix + spelling for spelling in chain([name], spellings(name)) for prefix in self._prefixes)
        forms = (self._in_any_case.get(os.path.normpath(path).casefold()) for path in paths)
        return next(filter(None, map(self._status, filter(None, forms))), None)

    def _status(self, name: str) -> FileStatus | None:
        """The file of exactly this name, or the one that has a suffix behind it."""
        if status := self._stat(name):
            return status
        if is_image(name):
            return None
        if self._members is None:
            folder = os.path.join(self.root, os.path.dirname(name))  # noqa: PTH118, PTH120
            return self._first(name, (name + suffix for suffix in self._suffixes_in(folder)))
        path = _plain(name)
        return self._first(name, (entry for entry in self._ends.get(_base_stem(path), ()) if _stem(entry) == path))

    def _first(self, name: str, paths: Iterable[str]) -> FileStatus | None:
        """Return the first of the files that a name may mean; where they are several, this is refused later."""
        files = list(filter(None, map(self._stat, paths)))
        if len(files) > 1:
            self._several[name] = [os.path.basename(file.name) for file in files]  # noqa: PTH119
        return files[0] if files else None

    def _stat(self, name: str) -> FileStatus | None:
        if self._members is None:
            return _stat_file(self.root, name)
        row = self._rows.get(_plain(name))
        if row is None:
            return None
        if row == _AMBIGUOUS:
            self._several[name] = ["archives that have one each"]
        return FileStatus(name, int(self._members.sizes[row]), int(self._members.times[row]), row + 1)

    @cached_property
    def _in_any_case(self) -> dict[str, str]:
        """The files by what no other one is called in lower case; none of a huge folder."""
        folders = islice(os.walk(self.root, followlinks=True), _MOST_NAMES)  # links may lead in a circle
        pairs = ((place, name) for place, _, names in folders for name in names)
        files = (os.path.relpath(os.path.join(*pair), self.root) for pair in pairs)  # noqa: PTH118
        paths = list(islice(files if self._members is None else self._rows, _MOST_NAMES + 1))
        if len(paths) > _MOST_NAMES:
            return {}
        forms = Counter(form for path in paths for form in _forms(path))
        return {form: path for path in paths for form in _forms(path) if forms[form] == 1}


def _foreign_lead(names: Sequence[str], find: Callable[[str], object], folder: Path) -> str:
    """The beginning, ending in a slash, without which most of some paths lead to a file; empty where there is none.

    Of a path of this machine's own the last folder stays, unless it is ``folder`` itself, or that of all paths; and
    images of one split are not looked for in the folder of another.
    """
    sample = [name.replace("\\", "/") for name in names[:: 1 + len(names) // _SAMPLE]]
    are_in_one = len({name.rpartition("/")[0] for name in sample}) == 1
    hits: Counter[str] = Counter()
    for name in sample:
        parts = name.split("/")
        for number in range(1, min(len(parts), _MOST_LEVELS)):
            lead, last = "/".join(parts[:number]) + "/", parts[number - 1]
            splits = {split_words(last)[0], split_words(folder.name)[0]} - {""}
            is_foreign = (
                parts[0] in ("", "~", "..") or parts[0].endswith(":") or last.casefold() == folder.name.casefold()
            )
            may_end = is_foreign or are_in_one or number < len(parts) - 1
            if len(splits) < 2 and may_end and find("/".join(parts[number:])):
                hits[lead] += 1
    best = max(hits, key=lambda lead: (hits[lead], -lead.count("/")), default="")
    return best if 2 * hits[best] > len(sample) else ""


def _stat_file(folder: Path, name: str) -> FileStatus | None:
    try:
        status = os.stat(os.path.join(folder, name))  # noqa: PTH116, PTH118 - a million times
    except (OSError, ValueError):  # reported when it is read
        return None
    file = status.st_ino and hash((status.st_dev, status.st_ino))
    return None if S_ISDIR(status.st_mode) else FileStatus(name, status.st_size, status.st_mtime_ns, file)


def _suffixes_in(folder: str) -> tuple[str, ...]:
    """The different suffixes of the images in a folder."""
    try:
        with os.scandir(folder) as entries:
            return tuple(sorted({os.path.splitext(entry.name)[1] for entry in entries if is_image(entry.name)}))  # noqa: PTH122
    except (OSError, ValueError):  # then there is nothing in it
        return ()


def _forms(path: str) -> set[str]:
    """A path in lower case, with its suffix and without."""
    return {path.casefold(), _stem(path).casefold()}


def none_found(table: Path, folder: Path, names: Sequence[str], *, is_source: bool = False) -> DataError:
    """The error for a list or a table of which no path leads to a file; names the folder that they may start from.

    ``is_source``: ``folder`` is what the user named as data, and not the table, for which ``--root`` exists.
    """
    name = names[0]
    text = f"none of the {len(names):,} paths in {table} exists ({printable(name)} from {folder} on)"
    inner = islice(filter(Path.is_dir, sorted(folder.iterdir())), _MOST_FOLDERS)
    some = names[:: 1 + len(names) // 4]
    holding = [shlex.quote(str(path)) for path in inner if NamedImages(path, table=table).holds_any(some)]
    by = f"in place of {folder}" if is_source else "with --root"
    if len(holding) == 1:
        return DataError(f"{text}: give {f'{holding[0]} {by}' if is_source else f'--root {holding[0]}'}")
    if holding:
        return DataError(
            f"{text}, and {len(holding):,} folders hold such names ({few(holding)}): write the folder of each image"
            f" into the table, or give the one that is meant {by}"
        )
    base = name.replace("\\", "/").rpartition("/")[2]
    return DataError(
        f"{text}, nor an end of one: name the folder that holds {printable(base)}, or the end of its path, {by}, or"
        " correct the paths in the table"
    )


def _ends_with(entry: str, path: str) -> bool:
    """Return whether a member's name ends with a path, which may lack its suffix."""
    return f"/{entry}".endswith(f"/{path}") or (not is_image(path) and f"/{_stem(entry)}".endswith(f"/{path}"))


def _plain(name: str) -> str:
    """A path without what says "here", in one Unicode form."""
    return unicodedata.normalize("NFC", posixpath.normpath(name).lstrip("/"))


def _base_stem(path: str) -> str:
    """The last part of a path, without the suffix of an image."""
    return _stem(path.rpartition("/")[2])


def _stem(path: str) -> str:
    return path.rpartition(".")[0] if is_image(path) else path
