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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import PIL
import simplejpeg

from steadytrain.data.packing.encode import Done, Encoding, Packed, Settings, Task, encode_all
from steadytrain.data.packing.images import PixelCount, mean_and_std
from steadytrain.data.packing.scratch import scratch_beside
from steadytrain.data.recordio.card import Card, Rejected, digest_of_spots, read_classes
from steadytrain.data.recordio.framing import pack_header
from steadytrain.data.recordio.writer import RecordWriter, packed, unpacked
from steadytrain.data.sources.filenames import printable
from steadytrain.data.sources.find import find_all
from steadytrain.data.sources.listing import PORTION_FILES, Listing, Names, Pieces
from steadytrain.data.sources.select import Selection, shard
from steadytrain.errors import DataError, TooManyBadError
from steadytrain.machine.cgroups import cores

MARK_SECONDS = 5.0  # of work that a kill may cost; sooner nothing is marked, and a failure leaves nothing

_FEW_FILES = 64  # done here before children have started


class Advance(Protocol):
    """Is told how many images are done so far, and how many there are."""

    def __call__(self, done: int, total: int, /) -> object: ...


class PackedFile(NamedTuple):
    """A record file that was written, and its card."""

    path: Path
    card: Card


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
    shards: int | None = None,
    shorter_side: int | None = None,
    quality: int = 95,
    encoding: Encoding = "auto",
    grey: bool = False,
    restart: int = 4,
    mark_kept: bool = False,
    max_bad: int | None = None,
    workers: int | None = None,
    force: bool = False,
    progress: Advance | None = None,
    say: Callable[[str], None] | None = None,
) -> list[PackedFile]:
    """Write ``OUT.rec``, ``OUT.idx`` and ``OUT.json``; for a source that is split ``OUT-train.rec`` and so on.

    After a kill, Ctrl-C or a full disk the same call goes on from what was done, to the same bytes.

    Args:
        source: a folder of classes or of splits, a ``.lst``, a table, an archive, shards, idx or CIFAR files, a
            ``.rec``; several are merged.
        out: where to, with or without ``.rec``.
        root: the folder that a list's or a table's paths start from; None: its own.
        labels: a file of labels, for images that lie in no folders of classes.
        classes: a card whose class list, in its order, is to be used.
        only, exclude: classes to keep, and to leave out; empty keeps all.
        val_fraction: of each class to hold out for validation, above 0 and below 1.
        train_per_class: instead, how many images of each class to train with; the rest validates.
        seed: chooses which.
        shards: files to write for each split, ``OUT-00000-of-00004.rec`` and so on; None: one, by its plain name.
        shorter_side, quality, encoding, grey, restart, mark_kept: see ``Settings``.
        max_bad: files that may be left out; None: the larger of 1 % and 5.
        workers: processes to encode with; None: one for each core that this process may use.
        force: replace what is there.
        progress: called with the number of images done so far, and of all: before the first one, then a few times a
            second or more.
        say: takes remarks, a line each.

    Returns:
        What was written, training set first.

    Raises:
        DataError: the source, the class list or a setting cannot be used, or something would be overwritten.
        TooManyBadError: more files than ``max_bad`` cannot be used; nothing is left behind.
        StorageError: the disk is full or not writable; what was marked until then stays hidden, to go on from.
    """
    settings = Settings(
        shorter_side=shorter_side,
        quality=quality,
        encoding=encoding,
        grey=grey,
        restart=restart,
        mark_kept=mark_kept,
    )
    selection = Selection(
        tuple(only), tuple(exclude), val_fraction=val_fraction, train_per_class=train_per_class, seed=seed
    )
    sources = [str(one) for one in ([source] if isinstance(source, str | Path) else source)]
    if not sources:
        raise DataError("name at least one source")
    path = record_path(Path(out), Path(sources[0]))
    given = read_classes(classes) if classes is not None else None
    with scratch_beside(path) as scratch:
        listings = find_all(
            sources,
            root=root,
            labels=labels,
            classes=given,
            scratch=scratch,
            say=say or mute,
        )
        return pack_listings(
            in_files(selection.of(listings, say or mute), path, shards),
            settings,
            source=" ".join(sources),
            scratch=scratch,
            max_bad=max_bad,
            workers=workers,
            force=force,
            progress=progress or mute,
            say=say or mute,
        )


def in_files(listings: Sequence[Listing], path: Path, shards: int | None = None) -> list[tuple[Path, Listing]]:
    """Which record file each image goes to: one for each split, or several.

    Args:
        listings: one for each split.
        path: ends in ``.rec``; the splits' files are named after it.
        shards: of each split; None: one file by its plain name.

    Raises:
        DataError: more shards than images, or fewer than one.
    """
    found: list[tuple[Path, Listing]] = []
    for listing in listings:
        stem = f"{path.stem}-{listing.split}" if listing.split else path.stem
        parts = [listing] if shards is None else shard(listing, shards)
        of = [""] if shards is None else [f"-{number:05}-of-{shards:05}" for number in range(shards)]
        found += [(path.with_name(f"{stem}{tail}.rec"), part) for tail, part in zip(of, parts, strict=True)]
    return found


def pack_listings(
    files: Sequence[tuple[Path, Listing]],
    settings: Settings,
    *,
    source: str,
    scratch: Path,
    max_bad: int | None = None,
    workers: int | None = None,
    force: bool = False,
    progress: Advance,
    say: Callable[[str], None],
) -> list[PackedFile]:
    """Pack what has been listed already, each listing into its file; the rest is as for :func:`pack`."""
    for _, parts in groupby((listing for _, listing in files), key=lambda listing: listing.split):
        _remark(list(parts), say)
    total = sum(len(listing) for _, listing in files)
    limit = _limit(max_bad, total)
    children = _num_workers(workers, total)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(RecordWriter(path, force=force, work=work(listing, settings, scratch=scratch)))
            for path, listing in files
        ]
        tallies = [Tally(listing) for _, listing in files]
        _go_on(tallies, writers, limit, total, say)
        progress(sum(tally.num_seen for tally in tallies), total)
        tasks = (task for tally in tallies for task in _tasks(tally))
        done = stack.enter_context(closing(encode_all(tasks, settings, workers=children)))
        marks = _Marks()
        for tally, writer in zip(tallies, writers, strict=True):
            _write(tally, writer, done, limit, marks, lambda: progress(sum(tally.num_seen for tally in tallies), total))
        for _, group in groupby(tallies, key=lambda tally: tally.listing.split):
            require_images(list(group))
        cards = [tally.card(w, settings, source=source) for tally, w in zip(tallies, writers, strict=True)]
        for writer, card in zip(writers, cards, strict=True):
            writer.beside[".json"] = card.to_json()
        for writer in writers:
            writer.complete()  # all of them, before the first appears
        for writer in writers:
            writer.place()
    return [PackedFile(path, card) for (path, _), card in zip(files, cards, strict=True)]


def record_path(out: Path, source: Path) -> Path:
    """``OUT`` as the path of a ``.rec``; the name of the source itself is fine, its record file lies beside it.

    Raises:
        DataError: it is another folder.

    >>> [record_path(Path(out), Path("photos")).name for out in ("a/photos", "photos", "photos.v2", "a.rec")]
    ['photos.rec', 'photos.rec', 'photos.v2.rec', 'a.rec']
    """
    if out.is_dir() and (out.name in ("", "..") or out.resolve() != source.resolve()):
        raise DataError(f"{out} is a folder: give a name in it, such as {out / 'photos'}")
    return out if out.suffix == ".rec" else out.with_name(f"{out.name}.rec")


@dataclass
class _Limit:
    """How many files have been left out, and how many may be."""

    most: int
    total: int
    told: str
    rejected: list[Rejected] = field(default_factory=list)

    def add(self, rejected: Rejected) -> None:
        """Raises TooManyBadError above the limit."""
        self.rejected.append(rejected)
        if len(self.rejected) > self.most:
            files = "; ".join(f"{one.name} ({one.reason})" for one in self.rejected[:5])
            raise TooManyBadError(
                f"too many of the {self.total:,} images cannot be used, more than {self.told}: {files}"
                f"{'; ...' if len(self.rejected) > 5 else ''}. Mend or remove them, or allow more with --max-bad"
            )


@dataclass
class _Marks:
    """When it is time to make sure of what is done."""

    last: float = field(default_factory=time.monotonic)
    any: bool = False

    def is_due(self, *, at_end: bool) -> bool:
        """Every few seconds; and at the end of each file that is not the work of a moment."""
        due = time.monotonic() - self.last >= MARK_SECONDS
        self.any = self.any or due
        self.last = time.monotonic() if due else self.last
        return due or (at_end and self.any)


def _limit(max_bad: int | None, total: int) -> _Limit:
    if max_bad is not None and max_bad < 0:
        raise DataError(f"--max-bad is {max_bad}; it must be 0 or more")
    if max_bad is not None:
        return _Limit(max_bad, total, f"--max-bad {max_bad}")
    most = most_left_out(total)
    return _Limit(most, total, f"{most} (the larger of 1 % and 5)")


def _go_on(
    tallies: Sequence[Tally], writers: Sequence[RecordWriter], limit: _Limit, total: int, say: Callable[[str], None]
) -> None:
    """Take up what an earlier process has done."""
    for tally, writer in zip(tallies, writers, strict=True):
        tally.take_up(writer.done)
        writer.done.clear()
        for one in tally.rejected:
            limit.add(one)
    if seen := sum(tally.num_seen for tally in tallies):
        say(f"going on after {seen:,} of {total:,} images, which were packed before")


def _write(
    tally: Tally,
    writer: RecordWriter,
    done: Iterator[Done],
    limit: _Limit,
    marks: _Marks,
    advance: Callable[[], object],
) -> None:
    """Write the records of one listing."""
    while not tally.is_complete:
        part = next(done)
        for result in part.results:
            id_, label = tally.next_record()
            if isinstance(result, str):
                limit.add(tally.reject(result))
            else:
                writer.write(pack_header(label, id=id_) + result.data, id_)
                tally.keep(result)
        tally.counts += part.counts
        if marks.is_due(at_end=tally.is_complete):
            writer.mark(tally.note())
        advance()


def _tasks(tally: Tally) -> Iterator[Task]:
    listing, every = tally.listing, tally.every
    for start, stop in listing.portions(tally.num_seen):
        yield [(place, n % every == 0) for n, place in enumerate(listing.places(start, stop), start)]


def _num_workers(workers: int | None, total: int) -> int:
    if workers is not None and not 1 <= workers <= 1024:
        raise DataError(f"--workers is {workers}; it must be from 1 to 1024")
    if total < _FEW_FILES:
        return 1
    return min(workers or cores(), -(-total // PORTION_FILES))


def _remark(shards: Sequence[Listing], say: Callable[[str], None]) -> None:
    """Say what is odd about one split, whose first shard tells of the files passed over."""
    listing = shards[0]
    where = f"{listing.split}: " if listing.split else ""
    if listing.split == "val" and listing.names[0].casefold().startswith("test"):
        say("val: there is no val folder, so test is packed as the validation set")
    if others := listing.passed_over:
        names = ", ".join(printable(name) for name in others[:3]) + ", ..." * (len(others) > 3)
        say(f"{where}{len(others)} file{'s' * (len(others) > 1)} without an image's suffix passed over ({names})")
    counts = zip(*(one.counts() for one in shards), strict=True)
    absent = [name for name, of in zip(listing.classes, counts, strict=True) if not any(of)]
    if absent:
        names = ", ".join(absent[:5]) + ", ..." * (len(absent) > 5)
        verb = "has" if len(absent) == 1 else "have"
        say(f"{where}{len(absent)} of {len(listing.classes)} classes {verb} no image here ({names})")


def mute(*_: object) -> None:
    """Takes remarks and progress that nobody asked for."""


COUNTED_IMAGES = 50_000


class Tally:
    """Goes through a listing file by file: :meth:`next_record`, then :meth:`keep` or :meth:`reject`.

    What has been gone through can be noted, and taken up by the tally of another process.

    Attributes:
        listing: the files.
        num_seen: files gone through.
        every: the pixels of every ``every``-th file are counted: of all of them up to 50,000.
        counts: of pixel values; see :class:`~steadytrain.data.packing.images.PixelCount`.
        rejected: files left out.
    """

    def __init__(self, listing: Listing) -> None:
        self.num_seen = 0
        self.every = max(1, -(-len(listing) // COUNTED_IMAGES))
        self.counts = PixelCount().totals()
        self.listing = listing
        self.rejected: list[Rejected] = []
        self._encodings: Counter[str] = Counter()
        self._num_kept = 0
        self._num_counted = 0
        self._colour = False
        # One entry an image, in arrays: a million Python objects would weigh more than the images in flight.
        self._heights, self._widths, self._numbers = array("i"), array("i"), array("q")
        self._noted = (0, 0)  # images and rejected files that stand in notes

    @property
    def is_complete(self) -> bool:
        """Whether every file has been gone through."""
        return self.num_seen == len(self.listing)

    def next_record(self) -> tuple[int, float | list[float]]:
        """Id and label (or labels) of the next file."""
        number = self.num_seen
        self.num_seen += 1
        listing = self.listing
        id_ = len(self._numbers) if listing.ids is None else int(listing.ids[number])
        label = listing.labels[number].tolist()
        return id_, label[0] if isinstance(label, list) and len(label) == 1 else label

    def keep(self, packed: Packed) -> None:
        """Count in an image that was written."""
        self._numbers.append(self.num_seen - 1)
        self._heights.append(packed.height)
        self._widths.append(packed.width)
        self._encodings[packed.format] += 1
        self._num_kept += packed.kept
        self._num_counted += (self.num_seen - 1) % self.every == 0
        self._colour = self._colour or packed.channels == 3

    def reject(self, reason: str) -> Rejected:
        """Count in a file that was left out."""
        self.rejected.append(Rejected(printable(self.listing.names[self.num_seen - 1]), reason))
        return self.rejected[-1]

    def note(self) -> dict[str, Any]:
        """All that has come since the last note, and the totals, as plain data."""
        images, rejected = self._noted
        self._noted = len(self._numbers), len(self.rejected)
        columns = (self._numbers, self._heights, self._widths)
        return {
            "seen": self.num_seen,
            "columns": [packed(column[images:]) for column in columns],
            "rejected": self.rejected[rejected:],
            "encodings": self._encodings,
            "totals": [self._num_kept, self._num_counted, self._colour],
            "counts": base64.b64encode(self.counts.tobytes()).decode(),
        }

    def take_up(self, notes: Sequence[dict[str, Any]]) -> None:
        """Be where the tally was that wrote these notes, all of them and in this order."""
        for note in notes:
            for column, text in zip((self._numbers, self._heights, self._widths), note["columns"], strict=True):
                unpacked(text, column)
            self.rejected += (Rejected(*one) for one in note["rejected"])
        if notes:
            self.num_seen = notes[-1]["seen"]
            self._encodings = Counter(notes[-1]["encodings"])
            self._num_kept, self._num_counted, self._colour = notes[-1]["totals"]
            told = np.frombuffer(base64.b64decode(notes[-1]["counts"]), np.int64)
            self.counts = told.reshape(self.counts.shape).copy()
        self._noted = len(self._numbers), len(self.rejected)

    def card(self, writer: RecordWriter, settings: Settings, *, source: str) -> Card:
        """The card of what has been written."""
        listing = self.listing
        channels = 3 if self._colour else 1
        mean, std = mean_and_std(self.counts, channels=channels)
        return Card(
            classes=listing.classes,
            counts=self.class_counts(),
            num_images=len(self._numbers),
            height=spread(self._heights),
            width=spread(self._widths),
            channels=channels,
            mean=mean,
            std=std,
            stats_images=self._num_counted,
            label_width=1 if listing.labels.ndim == 1 else listing.labels.shape[1],
            label_names=listing.label_names,
            by_class=listing.ids is None,
            kept=self._num_kept,
            encodings=dict(sorted(self._encodings.items())),
            settings=settings.to_dict(),
            bytes=writer.num_bytes,
            digest=writer.digest,
            spots=digest_of_spots(writer.read, writer.num_bytes),
            source=source,
            rejected=tuple(self.rejected),
        )

    @property
    def num_images(self) -> int:
        """Images that were kept."""
        return len(self._numbers)

    def class_counts(self) -> tuple[int, ...]:
        """Images of each class that were kept."""
        if not self.listing.classes:
            return ()
        labels = self.listing.labels[np.frombuffer(self._numbers, np.int64)] if self._numbers else np.empty(0)
        counts = np.bincount(labels.astype(np.int64), minlength=len(self.listing.classes))
        return tuple(counts.tolist())


def require_images(tallies: Sequence[Tally]) -> None:
    """Raise DataError where nothing is left of one split, or a class has lost every image that it had.

    Args:
        tallies: of all that is packed of the split: its shards.
    """
    listing = tallies[0].listing
    where = f" in {listing.split}" if listing.split else ""
    rejected = [one for tally in tallies for one in tally.rejected]
    told = "; ".join(f"{one.name} ({one.reason})" for one in rejected[:5])
    if not all(tally.num_images for tally in tallies):
        raise DataError(f"no image{where} can be used: {told}")
    had = np.sum([tally.listing.counts() for tally in tallies], axis=0)
    has = np.sum([tally.class_counts() for tally in tallies], axis=0)
    lost = [name for name, before, after in zip(listing.classes, had, has, strict=True) if before and not after]
    if lost and listing.split in ("", "train"):
        raise DataError(
            f"no image of class {', '.join(lost[:5])}{where} can be used: {told}. Mend them, or remove the class"
        )


def most_left_out(total: int) -> int:
    """Files of so many that may be left out, where nobody says otherwise: the larger of 1 % and 5."""
    return max(total // 100, 5)


def spread(values: array[int]) -> tuple[int, int, int]:
    """Smallest, median (the lower one of two) and largest of int32 values; zeros where there are none."""
    if not values:
        return 0, 0, 0
    ordered = np.sort(np.frombuffer(values, np.int32))
    return int(ordered[0]), int(ordered[(len(ordered) - 1) // 2]), int(ordered[-1])


LAYOUT = 4  # raised when the same source and settings would be packed into other bytes


def digest(settings: Settings, parts: Iterable[bytes | bytearray]) -> str:
    """sha256 (hex) of settings and whatever else counts."""
    found = hashlib.sha256(json.dumps([LAYOUT, settings.to_dict()], sort_keys=True).encode())
    for part in parts:
        found.update(len(part).to_bytes(8, "little"))
        found.update(part)
    return found.hexdigest()


def work(listing: Listing, settings: Settings, *, scratch: Path) -> str:
    """Names the work of packing one listing with these libraries, so that only the same work is gone on with."""
    versions = json.dumps([PIL.__version__, simplejpeg.__version__]).encode()
    return digest(settings, [versions, *identity([listing], scratch=scratch)])


def identity(listings: Sequence[Listing], *, scratch: Path) -> Iterator[bytes | bytearray]:
    """All that says what would be packed: names, labels, sizes and times of the files, and of those that hold them.

    Args:
        listings: of one source.
        scratch: where some of it was decompressed to; that its name differs from time to time counts for nothing.
    """
    for one in listings:
        yield json.dumps([one.split, one.classes, *one.label_names]).encode()
        names = one.names if isinstance(one.names, Names) else Names(one.names)
        yield from names.parts()
        for column in (one.labels, one.sizes, one.times, one.ids):
            yield b"" if column is None else column.tobytes()
        if one.pieces is not None:
            yield from _places(one.pieces, scratch)


def _places(pieces: Pieces, scratch: Path) -> Iterator[bytes]:
    for path in pieces.paths:
        inside = Path(path).is_relative_to(scratch)
        told = os.path.basename(path) if inside else os.path.abspath(path)  # noqa: PTH100, PTH119
        yield f"{told}\0{_size(path)}".encode("utf-8", "surrogateescape")
    for column in (pieces.file, pieces.offset, pieces.size, pieces.deflated):
        yield b"" if column is None else column.tobytes()
    yield json.dumps(pieces.pixels).encode()


def _size(path: str) -> int:
    try:
        return os.stat(path).st_size  # noqa: PTH116 - perhaps a million times
    except OSError:  # told when it is read
        return -1
