"""Pack whatever holds images and their labels into record files with cards.

The bytes that come out depend on the images and the settings alone, never on the number of workers, and not on whether
the work was cut short and gone on with. A file that cannot be used is left out, with its reason; only when there are
too many of those does packing fail, and then it leaves nothing behind.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import time
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import PIL
import simplejpeg
from numpy.typing import NDArray

from steadytrain.data.images.encode import Encoding, PackedImage, PackSettings, Subsampling
from steadytrain.data.images.statistics import DeepImages, PixelCount, mean_and_std
from steadytrain.data.names import Names
from steadytrain.data.packing.portions import EncodedPortion, Portion, encode_all
from steadytrain.data.recordio.card import (
    Card,
    Rejected,
    card_of,
    card_path,
    companion_fault,
    digest_of_spots,
    read_classes,
)
from steadytrain.data.recordio.framing import pack_header
from steadytrain.data.recordio.hashes import HASHES, SUFFIX, hashes_file
from steadytrain.data.recordio.lst import format_line, list_path
from steadytrain.data.recordio.writer import RecordWriter, append_numbers, encode_numbers, remove_left
from steadytrain.data.sources.columns import ColumnNames
from steadytrain.data.sources.find import find_all, source_name
from steadytrain.data.sources.groups import decided_classes, is_column
from steadytrain.data.sources.listing import PORTION_FILES, Listing
from steadytrain.data.sources.select import Identical, Selection, shard
from steadytrain.data.storage.outgoing import Outgoing
from steadytrain.data.storage.scratch import scratch_beside
from steadytrain.data.storage.sources import local_sources
from steadytrain.data.storage.store import is_uri, local_name
from steadytrain.errors import DataError, TooManyBadError
from steadytrain.files import read_text
from steadytrain.format import OnProgress, Say, printable
from steadytrain.machine.cgroups import cores

MARK_SECONDS = 5.0  # seconds of work that a kill may cost; sooner nothing is marked, and a failure leaves nothing

COUNTED_IMAGES = 50_000  # up to so many, the pixels of every image are counted
LAYOUT = 6  # raised when the same source and settings would be packed into other bytes
_FEW_FILES = 64  # done here before children have started


class PackedFile(NamedTuple):
    """A record file that was written, and its card."""

    path: Path
    card: Card


def mute(*_: object) -> None:
    """Ignore remarks and progress."""


@dataclass(frozen=True, kw_only=True)
class PackRequest:
    """A source to be packed, and the form of its images; arguments as for :func:`pack`."""

    sources: tuple[str, ...]
    root: str | Path | None = None
    labels: str | Path | None = None
    classes: tuple[str, ...] | None = None
    group: str | None = None
    columns: ColumnNames = field(default_factory=ColumnNames)
    selection: Selection = field(default_factory=Selection)
    settings: PackSettings = field(default_factory=PackSettings)

    def __post_init__(self) -> None:
        if not self.sources:
            raise DataError("name at least one source")
        if self.group is not None and self.selection.val_fraction is None and self.selection.train_per_class is None:
            raise DataError(
                f"--group-by {self.group} keeps groups together where a source is split: give --val-fraction, or drop"
                " it"
            )

    @property
    def source(self) -> str:
        """Return the source's name for a card."""
        return " ".join(self.sources)

    def listings(self, places: Sequence[str], scratch: Path, say: Say) -> list[Listing]:
        """List the sources, which lie at ``places`` on this disk; one listing, or one for each split."""
        classes = decided_classes(self.classes, self.group)
        lookup: dict[str, Any] = {"root": self.root, "labels": self.labels, "classes": classes}
        group = self.group if self.group is not None and is_column(self.group) else None
        lookup |= {"group": group, "columns": self.columns}
        selection = replace(self.selection, group_by=None if group else self.group)
        return selection.of(find_all(places, **lookup, scratch=scratch, say=say), say)


def pack(
    source: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    root: str | Path | None = None,
    labels: str | Path | None = None,
    classes: str | Path | None = None,
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
    val_fraction: float | None = None,
    train_per_class: int | None = None,
    seed: int = 0,
    group: str | None = None,
    path_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    split_column: str | None = None,
    zip_names: str | None = None,
    identical: Identical = "near",
    shards: int | None = None,
    shorter_side: int | None = None,
    quality: int = 95,
    encoding: Encoding = "auto",
    grey: bool = False,
    restart: int = 4,
    mark_kept: bool = False,
    subsampling: Subsampling = "420",
    max_bad: int | None = None,
    workers: int | None = None,
    force: bool = False,
    progress: OnProgress | None = None,
    say: Say | None = None,
) -> list[PackedFile]:
    """Write ``OUT.rec``, ``.idx``, ``.json`` and ``.lst``; for a source that is split ``OUT-train.rec`` and so on.

    After a kill, Ctrl-C or a full disk the same call goes on from what was done, to the same bytes.

    Args:
        source: a folder of classes or of splits, a ``.lst``, a table, an archive, shards, idx or CIFAR files, a
            ``.rec``; several are merged.
        out: where to, with or without ``.rec``; a URI (``s3://bucket/photos.rec``) sends the files to a store when all
            of them are complete.
        root: the folder that a list's or a table's paths start from; None: its own.
        labels: a file of labels, for images that lie in no folders of classes.
        classes: a card whose class list, in its order, is to be used.
        only, exclude: classes to keep, and to leave out; empty keeps all.
        val_fraction: of each class to hold out for validation, above 0 and below 1.
        train_per_class: instead, how many images of each class to train with; the rest validates.
        seed: chooses which.
        group: what stays on one side of the split beside copies (a patient, a video): ``folder``, images of one folder
            below that of their class; a table's column; or a regular expression, whose first group is the same in their
            names.
        path_column, label_column, split_column: the table's columns of paths, labels (several make label vectors) and
            splits, by their names or by their numbers from 1 on; None finds them.
        zip_names: the code page of the names in a zip that tells none, such as ``gbk``.
        identical: what copies are, which stay on one side of it: ``near``, images that look alike (scaled, mirrored,
            encoded again), or ``pixels``, for both of which each is decoded once more; or ``bytes``.
        shards: files to write for each split, ``OUT-00000-of-00004.rec`` and so on; None: one, by its plain name.
        shorter_side, quality, encoding, grey, restart, mark_kept, subsampling: see ``PackSettings``.
        max_bad: files that may be left out; None: the larger of 1 % and 5.
        workers: processes to encode with; None: one for each core that this process may use.
        force: replace what is there.
        progress: called with the number of images done so far, and of all: before the first one, then a few times a
            second or more.
        say: takes remarks, a line each.

    Returns:
        What was written, training set first; of what was sent to a store, the paths that it had before.

    Raises:
        DataError: the source, the class list or a setting cannot be used, or something would be overwritten.
        TooManyBadError: more files than ``max_bad`` cannot be used; nothing is left behind.
        StorageError: the disk is full or not writable; what was marked until then stays hidden, to go on from.
    """
    settings = PackSettings(
        shorter_side=shorter_side,
        quality=quality,
        encoding=encoding,
        grey=grey,
        restart=restart,
        mark_kept=mark_kept,
        subsampling=subsampling,
    )
    selection = Selection(
        tuple(only),
        tuple(exclude),
        val_fraction=val_fraction,
        train_per_class=train_per_class,
        seed=seed,
        identical=identical,
    )
    request = PackRequest(
        sources=tuple(map(source_name, source if isinstance(source, list | tuple) else [source])),
        root=root,
        labels=labels,
        classes=None if classes is None else read_classes(classes),
        group=group,
        columns=ColumnNames.of(path_column, label_column, split_column, zip_names),
        selection=selection,
        settings=settings,
    )
    return pack_request(
        request, out, shards=shards, max_bad=max_bad, workers=workers, force=force, progress=progress, say=say
    )


def pack_request(
    request: PackRequest,
    out: str | Path,
    *,
    shards: int | None = None,
    max_bad: int | None = None,
    workers: int | None = None,
    force: bool = False,
    progress: OnProgress | None = None,
    say: Say | None = None,
) -> list[PackedFile]:
    """Pack as :func:`pack` does what a request says."""
    settings, say = request.settings, say or mute
    outgoing = Outgoing(f"{str(out).removesuffix('.rec')}.rec") if is_uri(out) else None
    path = record_path(Path(local_name(str(out))), Path(request.sources[0])) if outgoing is None else outgoing.path
    with scratch_beside(path) as scratch, local_sources(request.sources, say) as places:
        files = assign_files(request.listings(places, scratch, say), path, shards)
        pack_files = partial(
            pack_listings,
            files,
            settings,
            source=request.source,
            sources=request.sources,
            scratch=scratch,
            max_bad=max_bad,
            workers=workers,
            progress=progress or mute,
            say=say,
        )
        if outgoing is None:
            if not force and (packed := _packed_before(files, request)):
                for file in packed:
                    remove_left(file.path)
                    say(f"{file.path} is packed already, from these images with these settings: it stays")
                return packed
            return pack_files(force=force)
        work = digest(settings, [request.source.encode(), *identity([part for _, part in files], scratch=scratch)])
        records = [file for file, _ in files]
        if not outgoing.is_made(work):  # else by an earlier process
            if not force:
                outgoing.require_free(records)
            pack_files(force=True)
            outgoing.mark_made(work)
        packed = [PackedFile(file, card) for file in records if (card := card_of(file)) is not None]
        beside = [file.with_suffix(suffix) for file in records for suffix in (".idx", ".lst", SUFFIX, ".json")]
        # Records last: see RecordWriter.
        outgoing.send(work, [[each for each in beside if each.exists()], records], say)
        return packed


def _packed_before(files: Sequence[tuple[Path, Listing]], request: PackRequest) -> list[PackedFile] | None:
    """Return what an earlier call, perhaps killed at its very end, made of the same images; None where it did not."""
    packed = []
    for path, listing in files:
        try:
            card = card_of(path) if path.exists() and path.with_suffix(".idx").exists() else None
            packed_at, listed_at = path.stat().st_mtime_ns, list_path(path).stat().st_mtime_ns
        except (OSError, DataError):
            return None
        if card is None or (card.source, card.settings) != (request.source, request.settings.to_dict()):
            return None
        if ".lst" in card.checksums:
            is_same = describes(card, listing)
        else:  # the list is what was packed
            is_same = listed_at <= packed_at and card.num_images + len(card.rejected) == len(listing)
        if not is_same or bool((listing.times > packed_at).any()):
            return None
        packed.append(PackedFile(path, card))
    return packed


def assign_files(listings: Sequence[Listing], path: Path, shards: int | None = None) -> list[tuple[Path, Listing]]:
    """Assign images to record files: one for each split, or several.

    Args:
        path: ends in ``.rec``; the splits' files are named after it.
        shards: of each split; None: one file by its plain name.

    Raises:
        DataError: more shards than images, or fewer than one.
    """
    files: list[tuple[Path, Listing]] = []
    for listing in listings:
        stem = f"{path.stem}-{listing.split}" if listing.split else path.stem
        parts = [listing] if shards is None else shard(listing, shards)
        tails = [""] if shards is None else [f"-{number:05}-of-{shards:05}" for number in range(shards)]
        files += [(path.with_name(f"{stem}{tail}.rec"), part) for tail, part in zip(tails, parts, strict=True)]
    return files


def pack_listings(
    files: Sequence[tuple[Path, Listing]],
    settings: PackSettings,
    *,
    source: str,
    sources: Collection[str] = (),
    scratch: Path,
    max_bad: int | None = None,
    workers: int | None = None,
    force: bool = False,
    progress: OnProgress,
    say: Say,
) -> list[PackedFile]:
    """Pack what has been listed already, each listing into its file; the rest is as for :func:`pack`."""
    for _, shards in groupby((listing for _, listing in files), key=lambda listing: listing.split):
        remark_on_split(list(shards), say)
    total = sum(len(listing) for _, listing in files)
    rejections = Rejections(max_bad, total)
    if workers is not None and not 1 <= workers <= 1024:
        raise DataError(f"--workers is {workers}; it must be from 1 to 1024")
    num_children = 1 if total < _FEW_FILES else min(workers or cores(), -(-total // PORTION_FILES))
    versions = json.dumps([PIL.__version__, simplejpeg.__version__, "hashes 2"]).encode()
    keeps_lists = [keeps_list(path, sources) for path, _ in files]
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                # Only the same work is gone on with: of one listing, these settings and these libraries.
                RecordWriter(
                    path, force=force, work=digest(settings, [versions, *identity([listing], scratch=scratch)])
                )
            )
            for path, listing in files
        ]
        tallies = [Tally(listing) for _, listing in files]
        for tally, writer in zip(tallies, writers, strict=True):
            tally.restore(writer.notes)
            writer.notes.clear()
            for rejected in tally.rejected:
                rejections.add(rejected)
            if writer.starts_over:
                say(
                    f"{writer.path.name} starts over: an interrupted command had begun it with other images or settings"
                    " or another version, or its bytes have changed since"
                )
        num_seen = sum(tally.num_seen for tally in tallies)
        if num_seen:
            say(f"continuing after {num_seen:,} of {total:,} images, which were packed before")
        progress(num_seen, total)
        portions = (portion for tally in tallies for portion in tally.portions())
        encoded = stack.enter_context(
            closing(encode_all(portions, settings, workers=num_children if num_children > 1 else 0))
        )
        marked_at, is_long = time.monotonic(), False
        for tally, writer in zip(tallies, writers, strict=True):
            while not tally.is_complete:
                part = next(encoded)
                for rejected in tally.write(part, writer):
                    rejections.add(rejected)
                # Every few seconds; and at the end of each file that is not the work of a moment.
                is_due = time.monotonic() - marked_at >= MARK_SECONDS
                is_long = is_long or is_due
                if is_due or (is_long and tally.is_complete):
                    writer.mark(tally.note())
                    marked_at = time.monotonic() if is_due else marked_at
                num_seen += len(part.results)
                progress(num_seen, total)
        cards = [
            tally.card(writer, settings.to_dict(), source=source, has_list=not keeps)
            for tally, writer, keeps in zip(tallies, writers, keeps_lists, strict=True)
        ]
        require_images(zip((listing for _, listing in files), cards, strict=True))
        for writer, card, tally, keeps in zip(writers, cards, tallies, keeps_lists, strict=True):
            writer.companions |= {".json": card.to_json(), SUFFIX: tally.hashes(card.digest)}
            if not keeps:  # last, so that a list that is there has its card beside it
                writer.companions[".lst"] = tally.list_lines()
        for remark in sum((tally.deep for tally in tallies), start=DeepImages()).remarks():
            say(remark)
        for writer in writers:
            writer.complete()  # all of them, before the first appears
        for writer in writers:
            writer.place()
    return [PackedFile(path, card) for (path, _), card in zip(files, cards, strict=True)]


def keeps_list(records: Path, sources: Collection[str] = ()) -> bool:
    """Return whether the list beside ``records`` stays, since it is what is packed.

    Raises:
        DataError: it is neither that, nor as packing wrote it.
    """
    path = list_path(records)
    if not path.exists():
        return False
    if path.resolve() in {Path(source).resolve() for source in sources}:
        return True
    with suppress(OSError, UnicodeDecodeError, DataError):
        checksum = Card.from_json(read_text(card_path(records), most=None)).checksums.get(".lst")
        if checksum and not companion_fault(path, checksum):
            return False
    raise DataError(f"{path} is in the way, and packing did not write it: rename it, or choose another name than OUT")


def record_path(out: Path, source: Path) -> Path:
    """Return ``OUT`` as the path of a ``.rec``; the name of the source is fine, its record file lies beside it.

    Raises:
        DataError: it is another folder.

    >>> [record_path(Path(out), Path("photos")).name for out in ("a/photos", "photos", "photos.v2", "a.rec")]
    ['photos.rec', 'photos.rec', 'photos.v2.rec', 'a.rec']
    """
    if out.is_dir() and (out.name in ("", "..") or out.resolve() != source.resolve()):
        raise DataError(f"{out} is a folder: give a name in it, such as {out / 'photos'}")
    return out if out.suffix == ".rec" else out.with_name(f"{out.name}.rec")


def default_max_bad(total: int) -> int:
    """Return how many files of so many may be left out by default: the larger of 1 % and 5."""
    return max(total // 100, 5)


class Rejections:
    """Counts the files left out; :meth:`add` raises TooManyBadError above the limit."""

    def __init__(self, max_bad: int | None, total: int) -> None:
        if max_bad is not None and max_bad < 0:
            raise DataError(f"--max-bad is {max_bad}; it must be 0 or more")
        self._most = default_max_bad(total) if max_bad is None else max_bad
        self._limit = f"{self._most} (the larger of 1 % and 5)" if max_bad is None else f"--max-bad {max_bad}"
        self._total = total
        self._rejected: list[Rejected] = []

    def add(self, rejected: Rejected) -> None:
        self._rejected.append(rejected)
        if len(self._rejected) > self._most:
            raise TooManyBadError(
                f"too many of the {self._total:,} images cannot be used, more than {self._limit}:"
                f" {_examples(self._rejected)}{'; ...' if len(self._rejected) > 5 else ''}."
                " Fix or remove them, or allow more with --max-bad"
            )


def _examples(rejected: Sequence[Rejected]) -> str:
    return "; ".join(f"{file.name} ({file.reason})" for file in rejected[:5])


def require_images(files: Iterable[tuple[Listing, Card]]) -> None:
    """Require that each file has an image, and in training each class one of those that were listed.

    Raises:
        DataError: nothing is left.
    """
    for split, group in groupby(files, key=lambda file: file[0].split):
        listings, cards = zip(*group, strict=True)
        where, examples = f" in {split}" if split else "", _examples([file for card in cards for file in card.rejected])
        if not all(card.num_images for card in cards):
            raise DataError(f"no image{where} can be used: {examples}")
        counts = (np.sum(each, axis=0) for each in ([x.counts() for x in listings], [card.counts for card in cards]))
        lost = [name for name, had, has in zip(listings[0].classes, *counts, strict=True) if had and not has]
        if lost and split in ("", "train"):
            raise DataError(
                f"no image of class {', '.join(lost[:5])}{where} can be used: {examples}. Fix them, or remove the class"
            )


def remark_on_split(shards: Sequence[Listing], say: Say) -> None:
    """Say what is odd about one split, whose first shard names the files passed over."""
    listing = shards[0]
    where = f"{listing.split}: " if listing.split else ""
    folders = [printable(name) for name in listing.passed_over if name.endswith("/")]
    if beside := [name for name in folders if listing.split and name.count("/") == 1]:
        say(f"{where}{', '.join(beside)} beside the folders for training and validation: not read")
    if others := [name for name in listing.passed_over if not name.endswith("/")]:
        names = ", ".join(printable(name) for name in others[:3]) + ", ..." * (len(others) > 3)
        say(f"{where}{len(others)} file{'s' * (len(others) > 1)} without an image suffix skipped ({names})")
    counts = zip(*(part.counts() for part in shards), strict=True)
    absent = [name for name, class_counts in zip(listing.classes, counts, strict=True) if not any(class_counts)]
    if absent:
        names = ", ".join(absent[:5]) + ", ..." * (len(absent) > 5)
        verb = "has" if len(absent) == 1 else "have"
        say(f"{where}{len(absent)} of {len(listing.classes)} classes {verb} no image here ({names})")


class Tally:
    """A walk through a listing file by file: :meth:`next_record`, then :meth:`keep` or :meth:`reject`.

    Its state can be noted, and restored in another process. ``counts`` are those of
    :class:`~steadytrain.data.images.statistics.PixelCount`.
    """

    def __init__(self, listing: Listing) -> None:
        self.listing = listing
        self.num_seen = 0
        self.counts = PixelCount().totals()
        self.rejected: list[Rejected] = []
        self._every = max(1, -(-len(listing) // COUNTED_IMAGES))  # the pixels of every so many-th file are counted
        self._encodings: Counter[str] = Counter()
        self._num_kept = 0
        self._num_counted = 0
        self._colour = False
        self.deep = DeepImages()
        # One entry an image, in arrays: a million Python objects would weigh more than the images in flight.
        self._heights, self._widths, self._numbers = array("i"), array("i"), array("q")
        self._hashes = bytearray()
        self._num_noted = (0, 0)  # images and rejected files that stand in notes

    @property
    def is_complete(self) -> bool:
        """Return whether every file has been gone through."""
        return self.num_seen == len(self.listing)

    @property
    def num_images(self) -> int:
        """Images that were kept."""
        return len(self._numbers)

    def portions(self) -> Iterator[Portion]:
        """Yield the files that are left, as they go to :func:`~steadytrain.data.packing.portions.encode_all`."""
        for start, stop in self.listing.portions(self.num_seen):
            yield [(place, self.is_counted(n)) for n, place in enumerate(self.listing.places(start, stop), start)]

    def next_record(self) -> tuple[int, float | list[float]]:
        """Return id and label (or labels) of the next file."""
        number = self.num_seen
        self.num_seen += 1
        id_ = len(self._numbers) if self.listing.ids is None else int(self.listing.ids[number])
        label = self.listing.labels[number].tolist()
        return id_, label[0] if isinstance(label, list) and len(label) == 1 else label

    def is_counted(self, number: int) -> bool:
        """Return whether the pixels of a file are to be counted."""
        return number % self._every == 0

    def keep(self, image: PackedImage | str) -> None:
        """Count in an image that was written; of one that cannot be measured, a reason instead, no more than that."""
        self._numbers.append(self.num_seen - 1)
        if isinstance(image, str):
            self._num_kept += 1
            return
        self._hashes += image.hashes
        self._heights.append(image.height)
        self._widths.append(image.width)
        self._encodings[image.format] += 1
        self._num_kept += image.kept
        self._num_counted += self.is_counted(self.num_seen - 1)
        self._colour = self._colour or image.channels == 3
        self.deep.add(image.peak, image.lost)

    def reject(self, reason: str) -> Rejected:
        """Count in a file that was left out."""
        self.rejected.append(Rejected(printable(self.listing.names[self.num_seen - 1]), reason))
        return self.rejected[-1]

    def note(self) -> dict[str, Any]:
        """Return all that has come since the last note, and the totals, as plain data."""
        images, rejected = self._num_noted
        self._num_noted = len(self._numbers), len(self.rejected)
        columns = (self._numbers, self._heights, self._widths)
        return {
            "seen": self.num_seen,
            "columns": [encode_numbers(column[images:]) for column in columns],
            "hashes": base64.b64encode(self._hashes[HASHES.itemsize * images :]).decode(),
            "rejected": self.rejected[rejected:],
            "encodings": self._encodings,
            "totals": [self._num_kept, self._num_counted, self._colour],
            "deep": self.deep.note(),
            "counts": base64.b64encode(self.counts.tobytes()).decode(),
        }

    def restore(self, notes: Sequence[dict[str, Any]]) -> None:
        """Restore the state of the tally that wrote these notes, all of them and in this order."""
        for note in notes:
            for column, text in zip((self._numbers, self._heights, self._widths), note["columns"], strict=True):
                append_numbers(text, column)
            self._hashes += base64.b64decode(note["hashes"])
            self.rejected += (Rejected(*file) for file in note["rejected"])
        if notes:
            self.num_seen = notes[-1]["seen"]
            self._encodings = Counter(notes[-1]["encodings"])
            self._num_kept, self._num_counted, self._colour = notes[-1]["totals"]
            self.deep = DeepImages(*notes[-1]["deep"])
            counts = np.frombuffer(base64.b64decode(notes[-1]["counts"]), np.int64)
            self.counts = counts.reshape(self.counts.shape).copy()
        self._num_noted = len(self._numbers), len(self.rejected)

    def write(self, part: EncodedPortion, writer: RecordWriter) -> Iterator[Rejected]:
        """Write the next files, as they were encoded; yield those that are left out."""
        for result in part.results:
            id_, label = self.next_record()
            if isinstance(result, str):
                yield self.reject(result)
            else:
                writer.write(pack_header(label, id=id_) + result.data, id_)
                self.keep(result)
        self.counts += part.counts

    def list_lines(self) -> Iterator[str]:
        """Yield a line for each image that was kept, for the list beside the records."""
        return _list_lines(self.listing, self._numbers)

    def hashes(self, digest: str) -> bytes:
        """Return the content of the file of hashes beside records with this digest."""
        return hashes_file(self._hashes, digest)

    def _ids_by_class(self, rows: NDArray[np.int64]) -> NDArray[np.int64] | None:
        """Return the ids of the images ``rows``, which were kept, where they and the classes rise without a gap."""
        listing = self.listing
        if listing.ids is None:
            return np.arange(len(rows))
        ids, labels = listing.ids[rows], listing.labels[rows]
        is_by_class = bool(listing.classes) and (np.diff(ids) == 1).all() and (np.diff(labels) >= 0).all()
        return ids if is_by_class else None

    def card(self, writer: RecordWriter, settings: Mapping[str, Any], *, source: str, has_list: bool = True) -> Card:
        """Return the card of what has been written; ``has_list``: :meth:`list_lines` go beside it."""
        listing, rows = self.listing, np.array(self._numbers, np.int64)
        companions = {".idx": writer.index_lines(), **({".lst": self.list_lines()} if has_list else {})}
        ids = self._ids_by_class(rows)
        channels = 3 if self._colour or not self._heights else 1
        mean, std = mean_and_std(self.counts, channels=channels)
        return Card(
            classes=listing.classes,
            counts=listing.counts(rows),
            num_images=self.num_images,
            height=min_median_max(self._heights),
            width=min_median_max(self._widths),
            channels=channels,
            mean=mean,
            std=std,
            stats_images=self._num_counted,
            label_width=1 if listing.labels.ndim == 1 else listing.labels.shape[1],
            label_names=listing.label_names,
            by_class=ids is not None,
            first_id=int(ids[0]) if ids is not None and len(ids) else 0,
            kept=self._num_kept,
            encodings=dict(sorted(self._encodings.items())),
            settings=settings,
            bytes=writer.num_bytes,
            digest=writer.digest,
            spots=digest_of_spots(writer.read, writer.num_bytes),
            checksums={suffix: _digest_of_lines(lines) for suffix, lines in companions.items()},
            source=source,
            label_column=listing.label_column,
            rejected=tuple(self.rejected),
            remarks=tuple(self.deep.remarks()),
        )


def _list_lines(listing: Listing, numbers: Iterable[int]) -> Iterator[str]:
    ids, labels, names = listing.ids, listing.labels, listing.names
    for row, number in enumerate(numbers):
        yield format_line(row if ids is None else int(ids[number]), labels[number].tolist(), names[number])


def describes(card: Card, listing: Listing) -> bool:
    """Return whether a card is of a listing, less the images that it names as left out: names, ids and labels."""
    rejected = {file.name for file in card.rejected}
    kept = [n for n, name in enumerate(listing.names) if not rejected or printable(name) not in rejected]
    return card.classes == listing.classes and card.checksums.get(".lst") == _digest_of_lines(
        _list_lines(listing, kept)
    )


def _digest_of_lines(lines: Iterable[str]) -> str:
    sha256 = hashlib.sha256()
    for line in lines:
        sha256.update(line.encode())
    return sha256.hexdigest()


def min_median_max(values: array[int]) -> tuple[int, int, int]:
    """Return the smallest, median (the lower one of two) and largest of int32 values; zeros where there are none."""
    if not values:
        return 0, 0, 0
    ordered = np.sort(np.frombuffer(values, np.int32))
    return int(ordered[0]), int(ordered[(len(ordered) - 1) // 2]), int(ordered[-1])


def digest(settings: PackSettings, parts: Iterable[bytes | bytearray]) -> str:
    """Return the sha256 (hex) of settings and whatever else the packed bytes depend on."""
    sha256 = hashlib.sha256(json.dumps([LAYOUT, settings.to_dict()], sort_keys=True).encode())
    for part in parts:
        sha256.update(len(part).to_bytes(8, "little"))
        sha256.update(part)
    return sha256.hexdigest()


def identity(listings: Sequence[Listing], *, scratch: Path) -> Iterator[bytes | bytearray]:
    """Yield all that says what would be packed: names, labels, sizes and times of the files, and of their containers.

    That the name of ``scratch``, where some was decompressed to, differs from time to time counts for nothing.
    """
    for listing in listings:
        yield json.dumps([listing.split, listing.classes, *listing.label_names]).encode()
        names = listing.names if isinstance(listing.names, Names) else Names(listing.names)
        yield from names.parts()
        for column in (listing.labels, listing.sizes, listing.times, listing.ids):
            yield b"" if column is None else column.tobytes()
        pieces = listing.pieces
        if pieces is None:
            continue
        for path in pieces.paths:  # perhaps a million
            name = os.path.basename(path) if Path(path).is_relative_to(scratch) else os.path.abspath(path)  # noqa: PTH100, PTH119
            size = -1  # of a file that cannot be read: an error when it is
            with suppress(OSError):
                size = os.stat(path).st_size  # noqa: PTH116
            yield f"{name}\0{size}".encode("utf-8", "surrogateescape")
        for place in (pieces.file, pieces.offset, pieces.size, pieces.deflated):
            yield b"" if place is None else place.tobytes()
        yield json.dumps(pieces.pixels).encode()
