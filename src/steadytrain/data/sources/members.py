"""What archives hold, in columns: a name and four numbers for each of perhaps a million members."""

from __future__ import annotations

import posixpath
from array import array
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.sources.listing import Listing, shown
from steadytrain.data.sources.names import Names
from steadytrain.data.sources.pieces import Piece, Pieces

Say = Callable[[str], None]

FEW = 3

_MOST_LINKS = 8  # one behind the other

Number = TypeVar("Number", np.int8, np.int32, np.int64)


class Member(NamedTuple):
    """One member, as a walk through an archive meets it.

    Args:
        name: as the archive spells it; bytes that are no UTF-8 are escaped as in file names.
        offset: byte of the archive where its content begins.
        stored: bytes it takes there.
        size: bytes it has once inflated.
        deflated: whether it has to be.
        kind: ``file``, ``folder``, or what else it is: ``a link``.
        target: of a link, the name of the member that it leads to, where that is known.
        crc: the CRC-32 that its bytes must have once inflated; -1 where the archive tells none.
    """

    name: str
    offset: int
    stored: int
    size: int
    deflated: bool = False
    kind: str = "file"
    target: str = ""
    crc: int = -1


class Members:
    """Files inside archives, in the order in which they were added.

    Attributes:
        paths: of the archives, as they are read.
        archives: what the user calls them.
        folders: names of the folders that are members themselves.
        names: of the files.
    """

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.archives: list[str] = []
        self.folders: set[str] = set()
        self.names = Names()
        self._times: list[int] = []
        self._odd: list[str] = []
        self._num_odd = 0
        self._file, self._deflated = array("i"), array("b")
        self._offset, self._stored, self._size, self._crc = array("q"), array("q"), array("q"), array("q")

    def __len__(self) -> int:
        return len(self.names)

    def add_archive(self, path: Path, *, at: Path, time: int, found: Iterable[Member]) -> None:
        """Add what a walk finds in one archive, which was last changed at ``time`` (ns) and whose bytes lie ``at``.

        A link to another member is that member once more, behind all others.
        """
        self.paths.append(str(at))
        self.archives.append(path.name)
        self._times.append(time)
        first, links = len(self), []
        for member in found:
            if member.target:
                links.append(member)
            else:
                self.add(member)
        if links:
            self._add_links(links, first)

    def _add_links(self, links: Sequence[Member], first: int) -> None:
        """Add the links among the members from number ``first`` on; links may lead to links."""
        rows = {posixpath.normpath(self.names[row]): row for row in range(first, len(self))}
        targets = {posixpath.normpath(link.name): posixpath.normpath(link.target) for link in links}
        for link in links:
            name = targets[posixpath.normpath(link.name)]
            for _ in range(_MOST_LINKS):
                name = name if name in rows else targets.get(name, name)
            row = rows.get(name)
            if row is None:
                self.add(link)
            else:
                _, offset, stored = self.place(row)
                self.add(Member(link.name, offset, stored, self.size(row), self.is_deflated(row)))

    def add(self, member: Member) -> None:
        """Add one member of the archive that was added last."""
        if member.kind == "folder":
            self.folders.add(member.name)
        elif member.kind != "file":
            self._num_odd += 1
            self._odd += [f"{shown(member.name)}, {member.kind}"] if len(self._odd) < FEW else []
        else:
            self.names.append(member.name)
            self._file.append(len(self.paths) - 1)
            self._offset.append(member.offset)
            self._stored.append(member.stored)
            self._size.append(member.size)
            self._deflated.append(member.deflated)
            self._crc.append(member.crc)

    def tell(self, say: Say) -> None:
        """Say what was met that is neither file nor folder."""
        if self._num_odd:
            told = "; ".join(self._odd) + "; ..." * (self._num_odd > FEW)
            plural = "s that are no files" if self._num_odd > 1 else " that is no file"
            say(f"{self._num_odd} member{plural} passed over ({told})")

    def size(self, row: int) -> int:
        """Bytes of one member once inflated."""
        return self._size[row]

    def is_deflated(self, row: int) -> bool:
        """Whether one member is stored deflated."""
        return bool(self._deflated[row])

    def time(self, row: int) -> int:
        """Nanoseconds, when the archive that holds one member was last changed."""
        return self._times[self._file[row]]

    def archive(self, row: int) -> int:
        """Which archive holds one member."""
        return self._file[row]

    def place(self, row: int) -> tuple[str, int, int]:
        """The archive that holds one member, where it begins there, and the bytes it takes."""
        return self.paths[self._file[row]], self._offset[row], self._stored[row]

    def piece(self, row: int) -> Piece:
        """Where one member lies."""
        return Piece(*self.place(row), self.is_deflated(row))

    def pieces(self, rows: Sequence[int] | NDArray[np.int64]) -> Pieces:
        """Where some members lie."""
        at = np.asarray(rows, np.int64)
        deflated, crc = _column(self._deflated, np.int8)[at].astype(np.bool_), _column(self._crc, np.int64)[at]
        return Pieces(
            paths=tuple(self.paths),
            file=_column(self._file, np.int32)[at],
            offset=_column(self._offset, np.int64)[at],
            size=_column(self._stored, np.int64)[at],
            deflated=deflated if deflated.any() else None,
            crc=crc if (crc >= 0).any() else None,
        )

    def listing(
        self,
        rows: Sequence[int] | NDArray[np.int64],
        names: Iterable[str],
        labels: NDArray[np.int64] | NDArray[np.float32],
        *,
        root: Path,
        classes: tuple[str, ...],
        split: str = "",
        in_order_of_classes: bool = False,
        passed_over: Iterable[str] = (),
    ) -> Listing:
        """Some members as a listing.

        Args:
            rows: their numbers here, in the order of the listing.
            names: what they are to be called there.
            labels, root, classes, split, passed_over: as for a listing.
            in_order_of_classes: they lie class by class; else each keeps its number as its id.
        """
        at = np.asarray(rows, np.int64)
        return Listing(
            split=split,
            root=root,
            classes=classes,
            names=names if isinstance(names, Names) else Names(names),
            labels=labels,
            sizes=_column(self._size, np.int64)[at],
            times=np.array(self._times, np.int64)[_column(self._file, np.int32)[at]],
            ids=None if in_order_of_classes else np.arange(len(at)),
            passed_over=Names(passed_over),
            pieces=self.pieces(at),
        )


def few(names: Sequence[str], most: int = 5) -> str:
    """The first of some names, and how many more there are.

    >>> few(["a", "b", "c"], 2)
    'a, b and 1 more'
    """
    told = ", ".join(shown(name) for name in names[:most])
    return f"{told} and {len(names) - most:,} more" if len(names) > most else told


def _column(values: array[int], kind: type[Number]) -> NDArray[Number]:
    """A view of an array; an empty one has no buffer to view."""
    return np.frombuffer(values, kind) if values else np.empty(0, kind)
