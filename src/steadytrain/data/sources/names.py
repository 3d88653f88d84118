"""Names of perhaps a million files without an object for each: their bytes one behind the other, and where each ends.

>>> names = Names(["cat/1.jpg", "cat/2.jpg", "dog/1.jpg"])
>>> names[-1], len(names), list(names.take([2, 0]))
('dog/1.jpg', 3, ['dog/1.jpg', 'cat/1.jpg'])
>>> names == ["cat/1.jpg", "cat/2.jpg", "dog/1.jpg"]
True
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import overload

import numpy as np
from numpy.typing import NDArray

_BLOCK = 1 << 16


class Names(Sequence[str]):
    """A sequence of texts that takes their bytes and eight more each; it grows at its end. Bytes of file names that are
    no UTF-8 stay what they are.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._bytes = bytearray()
        self._ends = array("q", [0])
        self.extend(names)

    def append(self, name: str) -> None:
        """Add one at the end."""
        self._bytes += name.encode("utf-8", "surrogateescape")
        self._ends.append(len(self._bytes))

    def extend(self, names: Iterable[str]) -> None:
        """Add several at the end."""
        for name in names:
            self.append(name)

    def take(self, rows: Sequence[int] | NDArray[np.int64]) -> Names:
        """Those of some numbers, from 0 on, in that order."""
        taken = Names()
        data, ends = np.frombuffer(self._bytes, np.uint8), np.frombuffer(self._ends, np.int64)
        for at in range(0, len(rows), _BLOCK):
            part = np.asarray(rows[at : at + _BLOCK], np.int64)
            sizes = ends[part + 1] - ends[part]
            stops = np.cumsum(sizes)
            within = np.arange(int(stops[-1])) - np.repeat(stops - sizes, sizes)
            before = len(taken._bytes)
            taken._bytes += data[np.repeat(ends[part], sizes) + within].tobytes()
            taken._ends.frombytes((stops + before).tobytes())
        return taken

    def parts(self) -> Iterator[bytes | bytearray]:
        """All that there is, to be hashed."""
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
            start, stop, step = number.indices(len(self))
            if step != 1:
                return [self[one] for one in range(start, stop, step)]
            ends = pairwise(self._ends[start : stop + 1])
            return [self._bytes[one:other].decode("utf-8", "surrogateescape") for one, other in ends]
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
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Names({self[:3]}{'...' * (len(self) > 3)}, {len(self):,} of them)"
