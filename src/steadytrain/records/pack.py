"""Pack a folder of classes, or what a ``.lst`` names, into record files with cards.

The bytes that come out depend on the files and the settings alone, never on the number of workers. A file that cannot
be used is left out, with its reason; only when there are too many of those does packing fail, and then it leaves
nothing behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from steadytrain.errors import DataError, TooManyBadError, did_you_mean
from steadytrain.records.card import Card, Rejected, read_classes
from steadytrain.records.encode import Encoding, Settings
from steadytrain.records.listing import Listing, list_folder, shown
from steadytrain.records.lists import read_list
from steadytrain.records.recordio import pack_header
from steadytrain.records.tally import Tally
from steadytrain.records.workers import Done, Task, encode_all
from steadytrain.records.writer import RecordWriter

_TASK_FILES = 32
_TASK_BYTES = 2 << 20
_FEW_FILES = 64  # done here before children have started


class Advance(Protocol):
    """Is told how many images are done so far, and how many there are."""

    def __call__(self, done: int, total: int, /) -> object: ...


class PackedFile(NamedTuple):
    """A record file that was written, and its card."""

    path: Path
    card: Card


def pack(
    source: str | Path,
    out: str | Path,
    *,
    root: str | Path | None = None,
    shorter_side: int | None = None,
    quality: int = 95,
    encoding: Encoding = "auto",
    grey: bool = False,
    classes: str | Path | None = None,
    max_bad: int | None = None,
    workers: int | None = None,
    force: bool = False,
    progress: Advance | None = None,
    say: Callable[[str], None] | None = None,
) -> list[PackedFile]:
    """Write ``OUT.rec``, ``OUT.idx`` and ``OUT.json``; for a source that is split ``OUT-train.rec`` and so on.

    Args:
        source: a folder of classes, a folder of splits, or a ``.lst``.
        out: where to, with or without ``.rec``.
        root: the folder that a ``.lst``'s paths start from; None: the list's own.
        shorter_side, quality, encoding, grey: see :class:`~steadytrain.records.encode.Settings`.
        classes: a card whose class list, in its order, is to be used.
        max_bad: files that may be left out; None: the larger of 1 % and 5.
        workers: processes to encode with; None: one for each core.
        force: replace what is there.
        progress: called with the number of images done so far, and of all, a few times a second or more.
        say: takes remarks, a line each.

    Returns:
        What was written, training set first.

    Raises:
        DataError: the source, the class list or a setting cannot be used, or something would be overwritten.
        TooManyBadError: more files than ``max_bad`` cannot be used; nothing is left behind.
        StorageError: the disk is full or not writable; nothing is left behind.
    """
    settings = Settings(shorter_side=shorter_side, quality=quality, encoding=encoding, grey=grey)
    path = record_path(Path(out), Path(source))
    given = read_classes(classes) if classes is not None else None
    listings = list_source(Path(source), root=None if root is None else Path(root), classes=given)
    return pack_listings(
        listings,
        path,
        settings,
        source=str(source),
        max_bad=max_bad,
        workers=workers,
        force=force,
        progress=progress or mute,
        say=say or mute,
    )


def pack_listings(
    listings: Sequence[Listing],
    path: Path,
    settings: Settings,
    *,
    source: str,
    max_bad: int | None = None,
    workers: int | None = None,
    force: bool = False,
    progress: Advance,
    say: Callable[[str], None],
) -> list[PackedFile]:
    """Pack what has been listed already; ``path`` ends in ``.rec``, and the rest is as for :func:`pack`."""
    for listing in listings:
        _remark(listing, say)
    total = sum(len(listing) for listing in listings)
    limit = _limit(max_bad, total)
    children = _num_workers(workers, total)
    paths = [path.with_name(f"{path.stem}-{one.split}.rec") if one.split else path for one in listings]
    with ExitStack() as files:
        writers = [files.enter_context(RecordWriter(one, force=force)) for one in paths]
        tallies = [Tally(listing) for listing in listings]
        tasks = (
            task for listing, tally in zip(listings, tallies, strict=True) for task in _tasks(listing, tally.every)
        )
        done = files.enter_context(closing(encode_all(tasks, settings, workers=children)))
        for tally, writer in zip(tallies, writers, strict=True):
            _write(tally, writer, done, limit, lambda: progress(sum(tally.num_seen for tally in tallies), total))
        cards = [tally.card(w, settings, source=source) for tally, w in zip(tallies, writers, strict=True)]
        for writer, card in zip(writers, cards, strict=True):
            writer.beside[".json"] = card.to_json()
        for writer in writers:
            writer.complete()  # all of them, before the first appears
    return [PackedFile(one, card) for one, card in zip(paths, cards, strict=True)]


def list_source(source: Path, *, root: Path | None = None, classes: Sequence[str] | None = None) -> list[Listing]:
    """List a folder or a ``.lst``. Raises DataError for what is neither, or holds nothing that can be packed."""
    if source.suffix.lower() == ".lst":
        return [read_list(source, root=root, classes=classes)]
    if root is not None:
        raise DataError(f"--root goes with a .lst, and {source} is none: drop it")
    if source.is_file():
        raise DataError(f"{source} is a file: give a folder with one folder of images for each class, or a .lst")
    if not source.exists():
        near = did_you_mean(source.name, [p.name for p in source.parent.iterdir()]) if source.parent.is_dir() else ""
        raise DataError(f"there is no folder {source}.{near}")
    return list_folder(source, classes=classes)


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


def _limit(max_bad: int | None, total: int) -> _Limit:
    if max_bad is not None and max_bad < 0:
        raise DataError(f"--max-bad is {max_bad}; it must be 0 or more")
    if max_bad is not None:
        return _Limit(max_bad, total, f"--max-bad {max_bad}")
    most = max(total // 100, 5)
    return _Limit(most, total, f"{most} (the larger of 1 % and 5)")


def _write(
    tally: Tally, writer: RecordWriter, done: Iterator[Done], limit: _Limit, advance: Callable[[], object]
) -> None:
    """Write the records of one listing."""
    while not tally.is_complete:
        part = next(done)
        for result in part.results:
            name, id_, label = tally.next_record()
            if isinstance(result, str):
                limit.add(tally.reject(name, result))
            else:
                writer.write(pack_header(label, id=id_) + result.data, id_)
                tally.keep(result)
        tally.counts += part.counts
        advance()
    tally.require_images()


def _tasks(listing: Listing, every: int) -> Iterator[Task]:
    """Files in portions of a few megabytes, so that neither many small nor a few large ones stall a worker."""
    start, size = 0, 0
    for number, num_bytes in enumerate(listing.sizes.tolist()):
        size += num_bytes
        if number + 1 == len(listing) or number + 1 - start == _TASK_FILES or size >= _TASK_BYTES:
            numbers = range(start, number + 1)
            paths = tuple(os.path.join(listing.root, listing.names[n]) for n in numbers)  # noqa: PTH118
            yield Task(paths, tuple(n % every == 0 for n in numbers))
            start, size = number + 1, 0


def _num_workers(workers: int | None, total: int) -> int:
    if workers is not None and not 1 <= workers <= 1024:
        raise DataError(f"--workers is {workers}; it must be from 1 to 1024")
    if total < _FEW_FILES:
        return 1
    return min(workers or _cores(), -(-total // _TASK_FILES))


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # macOS
        return os.cpu_count() or 1


def _remark(listing: Listing, say: Callable[[str], None]) -> None:
    where = f"{listing.split}: " if listing.split else ""
    if listing.split == "val" and listing.names[0].casefold().startswith("test"):
        say("val: there is no val folder, so test is packed as the validation set")
    if others := listing.passed_over:
        names = ", ".join(shown(name) for name in others[:3]) + ", ..." * (len(others) > 3)
        say(f"{where}{len(others)} file{'s' * (len(others) > 1)} without an image's suffix passed over ({names})")
    absent = [name for name, count in zip(listing.classes, listing.counts(), strict=True) if not count]
    if absent:
        names = ", ".join(absent[:5]) + ", ..." * (len(absent) > 5)
        say(f"{where}{len(absent)} of {len(listing.classes)} classes have no image here ({names})")


def mute(*_: object) -> None:
    """Takes remarks and progress that nobody asked for."""
