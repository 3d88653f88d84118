"""Record files to be damaged, and ways to damage them at known bytes."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from steadytrain.data.recordio.framing import frame, pack_header


@dataclass(frozen=True)
class Original:
    """A sound record file: all bytes, and where its records begin; the last offset is the file's end."""

    data: bytes
    offsets: list[int]

    @property
    def num(self) -> int:
        return len(self.offsets) - 1

    def framed(self, number: int) -> bytes:
        return self.data[self.offsets[number] : self.offsets[number + 1]]

    def untouched(self, start: int, end: int) -> list[bytes]:
        """The framed records that share no byte with ``start`` to ``end``."""
        spans = zip(self.offsets, self.offsets[1:], strict=False)
        return [self.framed(i) for i, (a, b) in enumerate(spans) if b <= start or a >= end]

    def with_bytes(self, at: int, new: bytes) -> bytes:
        """The file with other bytes at ``at``, as many as there are in ``new``."""
        return self.data[:at] + new + self.data[at + len(new) :]

    def without(self, start: int, end: int) -> bytes:
        return self.data[:start] + self.data[end:]

    def with_frame(self, number: int, change: Callable[[int, int], tuple[int, int]]) -> bytes:
        """The file with another cflag and length in the frame of a record; ``change`` is given the true ones."""
        (word,) = struct.unpack_from("<I", self.data, self.offsets[number] + 4)
        cflag, length = change(word >> 29, word & 2**29 - 1)
        return self.with_bytes(self.offsets[number] + 4, struct.pack("<I", cflag << 29 | length))


def read_original(path: Path) -> Original:
    """A file that MXNet wrote, by the index that MXNet wrote."""
    data = path.read_bytes()
    offsets = [int(line.split("\t")[1]) for line in path.with_suffix(".idx").read_text().splitlines()]
    return Original(data, [*sorted(offsets), len(data)])


def made_of(*payloads: bytes) -> Original:
    """A file of these payloads."""
    framed = [frame(payload) for payload in payloads]
    return Original(b"".join(framed), [0, *accumulate(map(len, framed))])


def labelled(label: float | list[float], image: bytes, *, id: int = 0) -> bytes:
    """The payload of an image record."""
    return pack_header(label, id=id) + image
