"""One pass over a record file that may be damaged: frames and headers here, images in child processes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.checking.duplicates import Fingerprints
from steadytrain.data.checking.file_types import LOOK_AT
from steadytrain.data.checking.findings import Findings
from steadytrain.data.checking.look import FINGERPRINT_BYTES, Look, fingerprint, look_at
from steadytrain.data.packing.worker_pool import do_all
from steadytrain.data.recordio.card import digest_of_spots
from steadytrain.data.recordio.frames import ByteSource, Gap, payload_of, whole_records
from steadytrain.data.recordio.framing import unpack
from steadytrain.data.recordio.headers import Headers, read_headers
from steadytrain.errors import DataError

Progress = Callable[[int, int], object]
Span = tuple[int, int]
"""Where a record begins and ends."""

Depth = Literal["headers", "fingerprints", "images"]

_PORTION_RECORDS = 32
_PORTION_BYTES = 2 << 20
_BYTES_FOR_A_WORKER = 1 << 19


@dataclass(frozen=True)
class Seen:
    """What a pass saw.

    Args:
        size: of the file, in bytes.
        start: its first bytes.
        digest: its sha256.
        spots: that of a few blocks of it; see :func:`~steadytrain.data.recordio.card.digest_of_spots`.
        headers: of its whole records.
        gaps: int64[G, 2], bytes that belong to no record.
        sound: bool[N], records with a header, and with an image that can be decoded if that was tried.
        prints: uint8[N, 16]; zeros for a record without an image, or one that was not looked at.
        formats: images of each.
        width, height: smallest and largest.
    """

    size: int
    start: bytes
    digest: str
    spots: str
    headers: Headers
    gaps: NDArray[np.int64]
    sound: NDArray[np.bool_]
    prints: Fingerprints
    formats: dict[str, int]
    width: tuple[int, int] | None
    height: tuple[int, int] | None


def read_through(
    path: Path, found: Findings, *, depth: Depth, workers: int = 1, progress: Progress | None = None
) -> Seen:
    """Read a record file from front to back.

    Args:
        path: of the file.
        found: takes what is wrong with frames, headers and images.
        depth: how far to look: at frames and ``headers``; also at ``fingerprints``; or at whole ``images``.
        workers: processes for what is beyond headers; 0: here, where a decoder's crash is a crash.
        progress: called with the bytes done so far, and all there are.

    Raises:
        DataError: there is no such file.
        FailedError: the disk fails, or no process can be started.
    """
    with ByteSource(path, digested=True) as source:
        reading = _Reading(source, found)
        advance = progress or (lambda done, total: None)
        if depth == "headers":
            for portion in reading.portions():
                advance(portion[-1][1], source.size)
        else:
            look = partial(look_at_records, path=str(path), decode=depth == "images")
            reading.take_looks(look, min(workers, 1 + source.size // _BYTES_FOR_A_WORKER), advance)
        return reading.seen()


def look_at_records(spans: Sequence[Span], path: str, *, decode: bool) -> list[Look]:
    """Look at the images of some records; without ``decode`` at their fingerprints alone."""
    with ByteSource(Path(path)) as source:
        return [_look_at_record(source, span, decode) for span in spans]


def payload_in(source: ByteSource, span: Span) -> bytes:
    """The payload of a record. Raises DataError where the file has changed since its frames were read."""
    try:
        return bytes(payload_of(source.read(span[0], span[1] - span[0])))
    except DataError as error:
        raise DataError(f"{source.path} changes while it is read ({error}): wait until it is written") from error


def image_in(source: ByteSource, span: Span) -> bytes:
    """The encoded image of a record. Raises DataError as :func:`payload_in`."""
    return bytes(unpack(payload_in(source, span)).image)


def _look_at_record(source: ByteSource, span: Span, decode: bool) -> Look:
    try:
        image = image_in(source, span)
    except DataError:
        return Look("damaged-image", "the file changes while it is read", bytes(FINGERPRINT_BYTES))
    return look_at(image) if decode else Look("", "", fingerprint(image) if image else bytes(FINGERPRINT_BYTES))


def _died(_: Span, how: str) -> list[Look]:
    return [Look("damaged-image", f"the decoder died of it ({how})", bytes(FINGERPRINT_BYTES))]


@dataclass
class Extent:
    """The smallest and the largest of some numbers."""

    pair: tuple[int, int] | None = None

    def add(self, value: int) -> None:
        low, high = self.pair or (value, value)
        self.pair = min(low, value), max(high, value)


@dataclass
class _Reading:
    """What has been seen so far. Columns are bytes, not objects: a million records take tens of megabytes."""

    source: ByteSource
    found: Findings
    headers: list[Headers] = field(default_factory=list)
    gaps: list[Span] = field(default_factory=list)
    sound: bytearray = field(default_factory=bytearray)
    prints: bytearray = field(default_factory=bytearray)
    formats: Counter[str] = field(default_factory=Counter)
    width: Extent = field(default_factory=Extent)
    height: Extent = field(default_factory=Extent)
    sent: deque[tuple[int, int, int, int]] = field(default_factory=deque)

    def portions(self) -> Iterator[list[Span]]:
        """Records to look at, a few megabytes at a time; gaps and headers are dealt with on the way."""
        for step in whole_records(self.source):
            if isinstance(step, Gap):
                self.gaps.append((step.start, step.end))
                self.found.add(step.kind, step.detail, offset=step.start, id=step.id)
                continue
            first = len(self.sound)
            headers = read_headers(self.source, step, first, self.found)
            self.headers.append(headers)
            self.sound += headers.readable.tobytes()
            self.prints += bytes(FINGERPRINT_BYTES * len(headers))
            yield from self._spans(headers, first)

    def _spans(self, headers: Headers, first: int) -> Iterator[list[Span]]:
        rows = np.flatnonzero(headers.readable)
        columns = (rows + first, headers.offsets[rows], headers.ends[rows], headers.ids[rows])
        portion: list[Span] = []
        for number, offset, end, id_ in zip(*(column.tolist() for column in columns), strict=True):
            portion.append((offset, end))
            self.sent.append((number, offset, end, id_))
            if len(portion) == _PORTION_RECORDS or end - portion[0][0] >= _PORTION_BYTES:
                yield portion
                portion = []
        if portion:
            yield portion

    def take_looks(self, look: Callable[[Sequence[Span]], list[Look]], workers: int, progress: Progress) -> None:
        """Look at every image, in children."""
        with closing(do_all(self.portions(), look, _died, workers=workers)) as answers:
            for looks in answers:
                for one in looks:
                    number, offset, end, id_ = self.sent.popleft()
                    self._take(one, number, offset, id_)
                progress(end, self.source.size)

    def _take(self, look: Look, number: int, offset: int, id_: int) -> None:
        if look.fault:
            self.sound[number] = 0
            self.found.add(look.fault, look.detail, offset=offset, record=number, id=id_)
            return
        self.prints[number * FINGERPRINT_BYTES : (number + 1) * FINGERPRINT_BYTES] = look.fingerprint
        if look.format:
            self.formats[look.format] += 1
            self.width.add(look.width)
            self.height.add(look.height)
        for kind, detail in look.odd:
            kind = "lies-on-its-side" if kind == "orientation" else kind
            self.found.add(kind, detail, offset=offset, record=number, id=id_)

    def seen(self) -> Seen:
        digest = self.source.digest()
        if self.source.has_changed():
            self.found.add("changing", name=self.source.path.name)
        return Seen(
            size=self.source.size,
            start=self.source.read(0, LOOK_AT),
            digest=digest,
            spots=digest_of_spots(lambda start, end: self.source.read(start, end - start), self.source.size),
            headers=Headers.joined(self.headers),
            gaps=np.array(self.gaps, np.int64).reshape(-1, 2),
            sound=np.frombuffer(bytes(self.sound), np.bool_),
            prints=np.frombuffer(bytes(self.prints), np.uint8).reshape(-1, FINGERPRINT_BYTES),
            formats=dict(sorted(self.formats.items())),
            width=self.width.pair,
            height=self.height.pair,
        )
