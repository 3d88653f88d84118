"""Pack whatever holds images and their labels into record files with cards.

The bytes that come out depend on the images and the settings alone, never on the number of workers, and not on whether
the work was cut short and gone on with. A file that cannot be used is left out, with its reason; only when there are
too many of those does packing fail, and then it leaves nothing behind.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import NamedTuple, Protocol

from steadytrain.data.packing import identity
from steadytrain.data.packing.encode import Encoding, Settings
from steadytrain.data.packing.scratch import scratch_beside
from steadytrain.data.packing.tally import Tally, most_left_out, require_images
from steadytrain.data.packing.workers import Done, Task, encode_all
from steadytrain.data.recordio.card import Card, Rejected, read_classes
from steadytrain.data.recordio.framing import pack_header
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.data.sources.filenames import printable
from steadytrain.data.sources.find import find_all
from steadytrain.data.sources.listing import PORTION_FILES, Listing
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
            stack.enter_context(RecordWriter(path, force=force, work=identity.work(listing, settings, scratch=scratch)))
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
