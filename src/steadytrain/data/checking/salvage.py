"""Write what can still be used of a damaged record file: its index anew, its sound records as a file of their own."""

from __future__ import annotations

import os
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from steadytrain.data.checking.findings import KINDS
from steadytrain.data.checking.images import Progress, format_of
from steadytrain.data.checking.records import Examined, Span, image_in, payload_in
from steadytrain.data.packing.images import BadImageError, Counts, PixelCount, flatten, load, mean_and_std, read_header
from steadytrain.data.packing.pack import COUNTED_IMAGES, min_median_max
from steadytrain.data.packing.worker_pool import map_in_children
from steadytrain.data.recordio.card import Card, Rejected, digest_of_spots
from steadytrain.data.recordio.damaged import ByteSource
from steadytrain.data.recordio.framing import index_path
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.errors import DataError, storage_error

_PORTION = 32


@dataclass(frozen=True)
class Salvaged:
    """What was written, and what was not.

    Args:
        path: of the new record file.
        card: of the same.
        lost: what of the old file is not in it, and why.
    """

    path: Path
    card: Card
    lost: tuple[Rejected, ...]


def write_index(examined: Examined, *, force: bool = False) -> Path | None:
    """Write the ``.idx`` of a record file, in one go: a reader finds the old one or the new one.

    Its keys are the records' ids, as MXNet's ``im2rec`` has it, or numbers from 0 where ids are not unique (as
    ``rec2idx`` has it). Records without a header are left out.

    Args:
        examined: the record file.
        force: write it also where the index that is there is good.

    Returns:
        Its path; None where there is a good one already.

    Raises:
        DataError: there is nothing to index.
        StorageError: the disk is full or not writable.
    """
    path = index_path(examined.path)
    if examined.has_good_index and examined.index is not None and not force:
        return None
    rows = np.flatnonzero(examined.headers.readable)
    if not len(rows):
        raise DataError(f"{examined.path} holds no image records: there is nothing to index")
    ids, offsets = examined.headers.ids[rows], examined.headers.offsets[rows]
    keys = ids.tolist() if len(np.unique(ids)) == len(ids) else range(len(ids))
    text = "".join(f"{key}\t{offset}\n" for key, offset in zip(keys, offsets.tolist(), strict=True))
    part = path.with_name(f".{path.name}.part")
    try:
        with part.open("w", encoding="ascii", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except OSError as error:
        with suppress(OSError):
            part.unlink()
        raise storage_error(error, path) from error
    return path


def salvage(
    examined: Examined, out: Path, *, force: bool = False, workers: int = 1, progress: Progress | None = None
) -> Salvaged:
    """Write the sound records into a file of their own, with keys, labels, ids and order as they were.

    Args:
        examined: the damaged file; keep all of its findings (``most=None``), so that the card can name what was lost.
        out: the new file; ends in ``.rec``.
        force: replace what is there.
        workers: processes to measure images with; 0: here.
        progress: called with the records done so far, and all there are.

    Raises:
        DataError: nothing can be salvaged, ``out`` is the damaged file itself, or it is there already.
        StorageError: the disk is full or not writable.
    """
    if out.resolve() == examined.path.resolve():
        raise DataError(f"{out} is the damaged file itself: give another name to --salvage")
    rows = np.flatnonzero(examined.sound)
    if not len(rows):
        raise DataError(f"nothing of {examined.path} can be salvaged: it has no sound record")
    headers, keys = examined.headers, examined.index.key_of() if examined.index else {}
    spans: list[Span] = list(zip(headers.offsets[rows].tolist(), headers.ends[rows].tolist(), strict=True))
    every = max(1, -(-len(spans) // COUNTED_IMAGES))

    def portions() -> Iterator[list[tuple[Span, bool]]]:
        for start in range(0, len(spans), _PORTION):
            part = spans[start : start + _PORTION]
            yield [(span, number % every == 0) for number, span in enumerate(part, start)]

    measured = Measures()
    measure = partial(measure_records, path=str(examined.path))
    with ByteSource(examined.path) as source, RecordWriter(out, force=force) as writer:
        ids = iter(headers.ids[rows].tolist())
        with closing(map_in_children(portions(), measure, _unmeasured, workers=workers)) as answers:
            for part in answers:
                for span in part.spans:
                    id_ = next(ids)
                    writer.write(payload_in(source, span), keys.get(span[0], id_))
                measured.add(part)
                if progress is not None:
                    progress(len(writer), len(spans))
        card = _card(examined, measured, writer)
        writer.companions[".json"] = card.to_json()
    return Salvaged(out, card, card.rejected)


@dataclass
class Measures:
    """Of some records: where they are, height and width of each that can be read, formats, colour, pixels."""

    spans: list[Span] = field(default_factory=list)
    heights: array[int] = field(default_factory=lambda: array("i"))
    widths: array[int] = field(default_factory=lambda: array("i"))
    colour: bool = False
    formats: Counter[str] = field(default_factory=Counter)
    num_counted: int = 0
    counts: Counts = field(default_factory=lambda: PixelCount().totals())

    def add(self, part: Measures) -> None:
        """Take in the measures of more records, but not where they are."""
        self.heights += part.heights
        self.widths += part.widths
        self.colour |= part.colour
        self.formats += part.formats
        self.num_counted += part.num_counted
        self.counts = self.counts + part.counts


def measure_records(portion: Sequence[tuple[Span, bool]], path: str) -> Measures:
    """Measure the images of some records; pixels are counted where that is asked for."""
    count, measures = PixelCount(), Measures([span for span, _ in portion])
    with ByteSource(Path(path)) as source:
        for span, counted in portion:
            try:
                image = read_header(image_in(source, span))
                pixels = flatten(load(image)) if counted or image.mode not in ("L", "RGB") else image
            except (BadImageError, DataError):  # reported already, or nobody wanted to know; or the file has changed
                continue
            if counted:
                count.add(pixels)
                measures.num_counted += 1
            measures.heights.append(image.height)
            measures.widths.append(image.width)
            measures.colour |= pixels.mode != "L"
            measures.formats[format_of(image)] += 1
    measures.counts = count.totals()
    return measures


def _unmeasured(item: tuple[Span, bool], _: str) -> Measures:
    return Measures([item[0]])


def _card(examined: Examined, measured: Measures, writer: RecordWriter) -> Card:
    headers, rows = examined.headers, np.flatnonzero(examined.sound)
    labels, widths = headers.labels[rows], headers.widths[rows]
    channels = 3 if measured.colour or not measured.heights else 1
    mean, std = mean_and_std(measured.counts, channels=channels)
    counts = np.bincount(labels.astype(np.int64), minlength=len(examined.classes)) if examined.classes else np.empty(0)
    in_order = np.array_equal(headers.ids[rows], np.arange(len(rows))) and np.all(np.diff(labels) >= 0)
    old = examined.card
    return Card(
        classes=examined.classes,
        counts=tuple(int(count) for count in counts),
        num_images=len(rows),
        height=min_median_max(measured.heights),
        width=min_median_max(measured.widths),
        channels=channels,
        mean=mean,
        std=std,
        stats_images=measured.num_counted,
        label_width=int(widths.max()),
        label_names=old.label_names if old and len(old.label_names) == widths.max() else (),
        by_class=bool(examined.classes and in_order),
        kept=len(rows),
        encodings=dict(sorted(measured.formats.items())),
        settings=dict(old.settings) if old else {},
        bytes=writer.num_bytes,
        digest=writer.digest,
        spots=digest_of_spots(writer.read, writer.num_bytes),
        source=f"salvaged from {examined.path}",
        rejected=_lost(examined),
    )


def _lost(examined: Examined) -> tuple[Rejected, ...]:
    """Whatever is not salvaged, each with its reason: damaged places first, then records."""
    places: list[Rejected] = []
    records: dict[int, str] = {}
    for kind, _, kept in examined.report.findings.by_kind():
        for finding in kept:
            reason = f"{KINDS[kind].title}{f': {finding.detail}' if finding.detail else ''}"
            if finding.record is not None and not examined.sound[finding.record] and finding.severity == "error":
                records.setdefault(finding.record, reason)
            elif finding.record is None and finding.offset is not None and not kind.startswith("index-"):
                id_ = "" if finding.id is None else f" (id {finding.id})"
                places.append(Rejected(f"byte {finding.offset:,}{id_}", reason))
    ids = examined.headers.ids
    return (*places, *(Rejected(f"record {row} (id {ids[row]})", why) for row, why in sorted(records.items())))
