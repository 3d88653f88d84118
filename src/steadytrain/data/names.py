"""Names of a million files, in the memory of their bytes."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 16


class Names(Sequence[str]):
    """A sequence of texts that takes their bytes and eight more each; it grows at its end.

    File names that are not UTF-8 keep their bytes.

    >>> names = Names(["cat/1.jpg", "cat/2.jpg", "dog/1.jpg"])
    >>> names[-1], len(names), list(names.take([2, 0]))
    ('dog/1.jpg', 3, ['dog/1.jpg', 'cat/1.jpg'])
    >>> names == ["cat/1.jpg", "cat/2.jpg", "dog/1.jpg"]
    True
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._bytes = bytearray()
        self._ends = array("q", [0])
        self.extend(names)

    @staticmethod
    def of(content: bytes | bytearray, ends: NDArray[np.int64]) -> Names:
        """Make names of what :meth:`parts` gave: where each ends, from 0 on, and their bytes."""
        names = Names()
        names._bytes, names._ends = bytearray(content), array("q", ends.tobytes())
        return names

    def append(self, name: str) -> None:
        """Add a name at the end."""
        self._bytes += name.encode("utf-8", "surrogateescape")
        self._ends.append(len(self._bytes))

    def extend(self, names: Iterable[str]) -> None:
        """Add several names at the end."""
        for name in names:
            self.append(name)

    def take(self, rows: Sequence[int] | NDArray[np.int64] | slice) -> Names:
        """Return the names at these places, counted from 0, in that order; of a slice without steps in one copy."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(len(self))
            first, last = self._ends[start], self._ends[stop]
            return Names.of(self._bytes[first:last], np.asarray(self._ends[start : stop + 1]) - first)
        names = Names()
        data, ends = np.frombuffer(self._bytes, np.uint8), np.frombuffer(self._ends, np.int64)
        for start in range(0, len(rows), _BLOCK):
            part = np.asarray(rows[start : start + _BLOCK], np.int64)
            sizes = ends[part + 1] - ends[part]
            stops = np.cumsum(sizes)
            within = np.arange(int(stops[-1])) - np.repeat(stops - sizes, sizes)
            before = len(names._bytes)
            names._bytes += data[np.repeat(ends[part], sizes) + within].tobytes()
            names._ends.frombytes((stops + before).tobytes())
        return names

    def parts(self) -> Iterator[bytes | bytearray]:
        """Yield the whole content as bytes, to be hashed."""
        yield self._ends.tobytes()
        yield self._bytes

    def __len__(self) -> int:
        return len(self._ends) - 1

    @overload
    def __getitem__(self, number: int) -> str: ...
    @overload
    def __getitem__(self, number: slice) -> list[str]: ...
    def __getitem__(self, number: int | slice) -> str | list[str]:
        if isinstance(number, slice):
            return [self[row] for row in range(*number.indices(len(self)))]
        if number < 0:
            number += len(self)
        if not 0 <= number < len(self):
            raise IndexError(f"name {number} of {len(self)}")
        return self._bytes[self._ends[number] : self._ends[number + 1]].decode("utf-8", "surrogateescape")

    def __iter__(self) -> Iterator[str]:
        for start, end in pairwise(self._ends):
            yield self._bytes[start:end].decode("utf-8", "surrogateescape")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str):
            return NotImplemented
        return len(self) == len(other) and all(name == other_name for name, other_name in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Names({self[:3]}{'...' * (len(self) > 3)}, {len(self):,} of them)"
