"""Write what can still be used of a damaged record file: its index anew, its sound records as a file of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.checking.findings import KINDS
from steadytrain.data.checking.record_scan import Bounds, image_in, payload_in
from steadytrain.data.checking.records import Examined
from steadytrain.data.images.decode import BadImageError, flatten, format_of, load, read_header
from steadytrain.data.images.encode import PackedImage
from steadytrain.data.images.statistics import PixelCount
from steadytrain.data.names import Names
from steadytrain.data.packing.pack import PackedFile, Tally, keeps_list
from steadytrain.data.packing.portions import EncodedPortion
from steadytrain.data.recordio.card import Rejected
from steadytrain.data.recordio.damaged import ByteSource
from steadytrain.data.recordio.framing import index_path, unpack
from steadytrain.data.recordio.lst import format_line
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.data.sources.listing import Listing
from steadytrain.errors import DataError
from steadytrain.files import replace_file
from steadytrain.format import OnProgress
from steadytrain.machine.worker_pool import map_in_children

_PORTION = 32


def write_index(examined: Examined, *, force: bool = False) -> Path | None:
    """Write the ``.idx`` of a record file, in one go: a reader finds the old one or the new one.

    Its keys are those of :func:`_keys_of`. Records without a header are left out. Return its path; None where there is
    a good one already.

    ``force``: write it also where the index that is there is good.

    Raises:
        DataError: there is nothing to index.
        StorageError: the disk is full or not writable.
    """
    path = index_path(examined.path)
    rows = np.flatnonzero(examined.scan.readable)
    if not len(rows):
        raise DataError(f"{examined.path} holds no image records: there is nothing to index")
    if not examined.report.findings.has("index-missing", "index-wrong") and not force:
        return None
    keys, offsets = _keys_of(examined.headers["id"][rows]), examined.headers["start"][rows].tolist()
    replace_file(path, "".join(f"{key}\t{offset}\n" for key, offset in zip(keys, offsets, strict=True)))
    return path


def _keys_of(ids: NDArray[np.uint64]) -> Sequence[int]:
    """Return ids as the keys of an index, as ``im2rec`` has it; numbers from 0 where they are not unique."""
    return ids.tolist() if len(np.unique(ids)) == len(ids) else range(len(ids))


def salvage(
    examined: Examined, out: Path, *, force: bool = False, workers: int = 1, progress: OnProgress | None = None
) -> PackedFile:
    """Write the sound records into a file of their own, with labels, ids and order as they were.

    What of the old file is not in it stands on its card, as rejected.

    Args:
        examined: the damaged file; keep all of its findings (``most=None``), so that the card can name what was lost.
        out: the new file; ends in ``.rec``.
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
    headers = examined.headers
    ids, keys = headers["id"][rows].tolist(), _keys_of(headers["id"][rows])
    spans: list[Bounds] = headers[["start", "end"]][rows].tolist()
    tally = Tally(_list_records(examined, rows))
    tally.rejected += _lost(examined)
    keeps, lines = keeps_list(out), Names()

    def portions() -> Iterator[list[tuple[Bounds, bool]]]:
        for start in range(0, len(spans), _PORTION):
            part = spans[start : start + _PORTION]
            yield [(span, tally.is_counted(number)) for number, span in enumerate(part, start)]

    measure = partial(measure_records, path=str(examined.path))
    settings = dict(examined.card.settings) if examined.card else {}
    with ByteSource(examined.path) as source, RecordWriter(out, force=force) as writer:
        with closing(map_in_children(portions(), measure, _unmeasured, workers=workers)) as answers:
            for part in answers:
                for result in part.results:
                    number = tally.num_seen
                    payload = payload_in(source, spans[number])
                    writer.write(payload, keys[number])
                    lines.append(format_line(ids[number], unpack(payload).labels, tally.listing.names[number]))
                    tally.next_record()
                    tally.keep(result)
                tally.counts += part.counts
                if progress is not None:
                    progress(len(writer), len(spans))
        card = tally.card(writer, settings, source=f"salvaged from {examined.path}")
        writer.companions[".json"] = card.to_json()
        if not keeps:
            writer.companions[".lst"] = lines
    return PackedFile(out, card)


def _list_records(examined: Examined, rows: NDArray[np.int64]) -> Listing:
    """List some records as images to be packed."""
    headers, old = examined.headers[rows], examined.card
    labels, ids, width = headers["label"], headers["id"], int(headers["width"].max())
    by_class = examined.classes and np.array_equal(ids, np.arange(len(rows))) and np.all(np.diff(labels) >= 0)
    return Listing(
        split="",
        root=examined.path,
        classes=examined.classes,
        names=Names(examined.scan.name(row) or f"{examined.path.name}[{row}]" for row in rows.tolist()),
        labels=labels if width == 1 else np.broadcast_to(labels[:, None], (len(rows), width)),
        sizes=headers["end"] - headers["start"],
        times=np.zeros(len(rows), np.int64),
        ids=None if by_class else ids.astype(np.int64),
        label_names=old.label_names if old and len(old.label_names) == width else (),
    )


def measure_records(portion: Sequence[tuple[Bounds, bool]], path: str) -> EncodedPortion:
    """Measure the images of some records, which stay as they are; pixels are counted where that is asked for."""
    count = PixelCount()
    results: list[PackedImage | str] = []
    with ByteSource(Path(path)) as source:
        for span, is_counted in portion:
            try:
                image = read_header(image_in(source, span))
                pixels = flatten(load(image)) if is_counted or image.mode not in ("L", "RGB") else image
            except (BadImageError, DataError) as error:  # reported already, or not asked for; or the file has changed
                results.append(str(error))
                continue
            if is_counted:
                count.add(pixels)
            channels = 1 if pixels.mode == "L" else 3
            results.append(PackedImage(b"", image.height, image.width, channels, format_of(image), kept=True))
    return EncodedPortion(tuple(results), count.totals())


def _unmeasured(_: tuple[Bounds, bool], ending: str) -> EncodedPortion:
    return EncodedPortion((ending,), PixelCount().totals())


def _lost(examined: Examined) -> list[Rejected]:
    """List everything that is not salvaged, with reasons: damaged places first, then records."""
    places: list[Rejected] = []
    records: dict[int, str] = {}
    for kind, _, findings in examined.report.findings.by_kind():
        for finding in findings:
            reason = f"{KINDS[kind].title}{f': {finding.detail}' if finding.detail else ''}"
            if finding.record is not None and not examined.sound[finding.record] and finding.severity == "error":
                records.setdefault(finding.record, reason)
            elif finding.record is None and finding.offset is not None and not kind.startswith("index-"):
                id_ = "" if finding.id is None else f" (id {finding.id})"
                places.append(Rejected(f"byte {finding.offset:,}{id_}", reason))
    for row, why in sorted(records.items()):
        name = examined.scan.name(row)
        places.append(Rejected(f"record {row} (id {examined.headers['id'][row]}{f', {name}' if name else ''})", why))
    return places
