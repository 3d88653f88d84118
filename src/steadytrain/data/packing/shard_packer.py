"""Pack one source by several processes, on one machine or many, which know each other by files alone.

Each process lists the source itself: listing is cheap beside packing, and gives the same shards everywhere. Shard i
belongs to process i mod n. Its files appear whole, the records last, and so mark it as done; its card says of which
images and settings it is. On one machine a process locks a shard before it packs it, and the system lets go of the lock
however the process ends: whoever is done with its own shards takes those that are left. Shards of other machines, whose
locks may not be seen, are packed again only where none has appeared for long; one that is packed twice is the same.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import time
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import BinaryIO

from steadytrain.data.packing.pack import (
    PackedFile,
    PackRequest,
    Rejections,
    Tally,
    assign_files,
    describes,
    mute,
    record_path,
    remark_on_split,
    require_images,
)
from steadytrain.data.packing.portions import EncodedPortion, Portion, encode_all
from steadytrain.data.packing.store_images import THREADS, fetch_images, folder_in_store, list_in_store
from steadytrain.data.recordio.card import Card
from steadytrain.data.recordio.hashes import SUFFIX
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.data.sources.listing import Listing
from steadytrain.data.storage.scratch import scratch_beside, temporary_scratch
from steadytrain.data.storage.sources import local_sources
from steadytrain.data.storage.store import NoObjectError, ObjectPlace, Store, abort_uploads, is_uri, local_name
from steadytrain.errors import DataError, SteadyError, StorageError, storage_error, storage_errors
from steadytrain.files import lock_at_once, locked, open_lock
from steadytrain.format import OnProgress, Say
from steadytrain.machine.facts import require_cache_folder
from steadytrain.machine.process import keep_no_large_blocks, return_free_memory

SHARD_BYTES = 256 << 20  # bytes of the source that go into a shard, where no number of shards is asked for
SHARD_IMAGES = 16_384  # images that go into a shard at most, where no number of shards is asked for
POLL_SECONDS = 1.0  # seconds between two looks of a process that waits for others
SILENT_SECONDS = 30.0  # seconds without a new shard after which shards of other machines are packed here

_SUFFIXES = (".json", ".idx", ".lst", ".rec")
"""Endings of the files of a shard, in the order in which they appear."""
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst")


@dataclass(kw_only=True)
class ShardPacker:
    """One of the processes that pack ``OUT-00000-of-00064.rec`` and so on together: all make the same call.

    The files are those that :func:`~steadytrain.data.packing.pack.pack` writes with as many shards. After a kill the
    same call goes on, with any number of processes.

    Args:
        request: what to pack, the same for all.
        out: where to, with or without ``.rec``; a URI for a store.
        shards: files for each split; None: one for each 256 MB of the source, or 16,384 images.
        max_bad: images that may be left out, by all; None: the larger of 1 % and 5.
        rank, size: which of how many processes this is.
        local_ranks: those on this machine; None: all.
        workers: children of this process to encode with.
        progress: called with the number of images that are done, by all, and of all there are.

    ``packed``: the cards of the shards that this process has packed, by their numbers.

    Raises:
        DataError: the source or a setting cannot be used, or a file is in the way, or of other images or settings.
        TooManyBadError: more images than ``max_bad`` cannot be used.
        StorageError: a disk is full or not writable, or a store does not answer.
    """

    request: PackRequest
    out: str | Path
    shards: int | None = None
    max_bad: int | None = None
    rank: int = 0
    size: int = 1
    local_ranks: range | None = None
    workers: int = 1
    progress: OnProgress = mute
    say: Say = mute

    def __post_init__(self) -> None:
        if is_uri(self.out):
            place = ObjectPlace.parse(f"{str(self.out).removesuffix('.rec')}.rec")
            self.folder: DiskFolder | StoreFolder = StoreFolder(str(place.sibling("")))
            self.path = Path(place.name)
            digest = hashlib.sha256(str(place).encode()).hexdigest()[:12]
            self.hidden = require_cache_folder() / "packing" / f"{self.path.stem}-{digest}"
        else:
            self.path = record_path(Path(local_name(str(self.out))), Path(self.request.sources[0]))
            self.folder = DiskFolder(self.path.parent)
            self.hidden = self.path.with_name(f".{self.path.stem}.plan")  # for locks, and shards that are written
        self.done: set[int] = set()
        self.packed: dict[int, Card] = {}  # by this process
        self.changed_at, self.longest = 0.0, 0.0  # when a shard was seen to be done; seconds that one took here
        self.locks: dict[int, BinaryIO] = {}

    def run(self) -> list[PackedFile]:
        """Pack until all shards are done, by whomever; return the files with their cards."""
        keep_no_large_blocks()
        with ExitStack() as self.stack:
            self.files = self._list()
            self.total = sum(len(listing) for _, listing in self.files)
            self.rejections, self.changed_at = Rejections(self.max_bad, self.total), time.monotonic()
            is_resumed = self._look_at_what_is_there()
            try:
                self._pack_all()
            except SteadyError:  # others may have come to the end, and removed the images that this process works on
                self._look_for_done()
                if not self._is_complete():
                    raise
            finally:
                for file in self.locks.values():
                    file.close()
            packed = self._verify()
        self._remove_left(may_be_there=is_resumed and self.rank == 0)
        return packed

    def _pack_all(self) -> None:
        if self._is_complete():
            self.say(f"all {len(self.files):,} shards are packed already; to pack again, remove them first")
            return
        if self.done:
            self.say(f"{len(self.done):,} of {len(self.files):,} shards are packed already")
        # The machine stands in the name: a disk that machines share may not show the locks of one to another.
        scratch = self.stack.enter_context(scratch_beside(self.hidden / f"work-{platform.node()}"))
        while not self._is_complete():
            self.progress(self._num_done(), self.total)
            if not self._pack_some(scratch) and not self._is_complete():
                time.sleep(POLL_SECONDS)
        self.progress(self.total, self.total)

    def _list(self) -> list[tuple[Path, Listing]]:
        """List the source and divide it into record files, as all other processes do."""
        request, shards = self.request, self.shards
        if packed := [source for source in request.sources if source.lower().endswith(_COMPRESSED)]:
            raise _compressed(packed[0])
        scratch = self.stack.enter_context(temporary_scratch())
        self.source = folder_in_store(request)
        if self.source:
            listings = list_in_store(request, self.source, self.say)
        else:
            listings = request.listings(self.stack.enter_context(self._fetched_sources()), scratch, self.say)
        for path in (path for listing in listings if listing.pieces for path in listing.pieces.paths):
            if Path(path).is_relative_to(scratch):
                raise _compressed(Path(path).name)
        files: list[tuple[Path, Listing]] = []
        for listing in listings:
            parts = assign_files([listing], self.path, shards or _default_shards(listing))
            remark_on_split([part for _, part in parts], self.say)
            files += parts
        return_free_memory()
        return files

    @contextmanager
    def _fetched_sources(self) -> Iterator[list[str]]:
        """Fetch sources that lie in a store into the cache, one process of a machine after the other."""
        with ExitStack() as turn, ExitStack() as stack:
            if any(map(is_uri, self.request.sources)):
                cache = require_cache_folder()
                with storage_errors(cache):
                    cache.mkdir(parents=True, exist_ok=True)
                    turn.enter_context(locked(cache / ".packing.lock"))
            places = stack.enter_context(local_sources(self.request.sources, self.say))
            turn.close()
            yield places

    def _look_at_what_is_there(self) -> bool:
        """Return whether such a command began these shards before. Raises DataError for files that it did not write."""
        sizes = self.folder.sizes()
        # A store may show a part of the files that another process is sending just now.
        suffixes = (".rec",) if isinstance(self.folder, StoreFolder) else _SUFFIXES
        expected = (f"{path.stem}{suffix}" for path, _ in self.files for suffix in suffixes)
        existing = [name for name in expected if name in sizes]
        cards = self._read_cards([n for n, (path, _) in enumerate(self.files) if f"{path.stem}.json" in sizes])
        if existing and not cards and not self.hidden.exists():
            raise DataError(
                f"{', '.join(existing[:5])} exist{'s' * (len(existing) == 1)} already, and no such command began"
                f" {self.path.stem}: remove them, or choose another name than OUT"
            )
        self._look_for_done()
        return bool(existing or cards)

    def _look_for_done(self) -> None:
        """See which shards are done: all of their files are there."""
        names = self.folder.sizes().keys()
        complete = [n for n, (path, _) in enumerate(self.files) if n not in self.done and names >= {*_files_of(path)}]
        new = {n for n in complete if n in self.packed or not self._is_outdated(n)}
        self.done |= new
        self.changed_at = time.monotonic() if new else self.changed_at

    def _is_outdated(self, number: int) -> bool:
        """Return whether an image of a shard was written after it: then it is packed anew."""
        path, listing = self.files[number]
        times = listing.times[listing.times <= time.time_ns()]  # one in the future says nothing
        return bool(len(times)) and self.folder.is_older(path.name, int(times.max()))

    def _read_cards(self, numbers: Sequence[int]) -> dict[int, Card]:
        """Read the cards of some shards. Raises DataError where one is of other images or settings."""
        names = [f"{self.files[number][0].stem}.json" for number in numbers]
        with ThreadPoolExecutor(THREADS, "storage") as pool:
            contents = list(pool.map(self.folder.read, names))
        return {
            number: self._card_of(number, content or b"") for number, content in zip(numbers, contents, strict=True)
        }

    def _card_of(self, number: int, content: bytes) -> Card:
        path, listing = self.files[number]
        try:
            card = Card.from_json(content.decode(errors="replace"))
        except DataError as error:
            raise DataError(f"{path.stem}.json: {error}: remove it, or choose another name than OUT") from error
        settings = self.request.settings.to_dict()
        if card.settings != settings:
            names = [name for name in {**settings, **card.settings} if card.settings.get(name) != settings.get(name)]
            given = " and ".join(
                f"--{name.replace('_', '-')} was {card.settings.get(name, 'not given')}" for name in names
            )
            raise self._other(path, given or "by other settings")
        if card.source != self.request.source:
            raise self._other(path, f"of {card.source}")
        if self.packed.get(number) != card and not describes(card, listing):
            raise self._other(path, "of other images")
        return card

    def _other(self, path: Path, difference: str) -> DataError:
        return DataError(
            f"{path.stem} was packed before, {difference}: give the same source and options, remove the shards of"
            f" {self.path.stem}, or choose another name than OUT"
        )

    def _is_complete(self) -> bool:
        return len(self.done) == len(self.files)

    def _num_done(self) -> int:
        return sum(len(self.files[number][1]) for number in self.done)

    def _verify(self) -> list[PackedFile]:
        """Require of all shards what :func:`pack` requires; return them."""
        sizes, cards = self.folder.sizes(), self._read_cards(range(len(self.files)))
        rejections = Rejections(self.max_bad, self.total)
        for (path, listing), card in zip(self.files, cards.values(), strict=True):
            if sizes.get(path.name, -1) != card.bytes or card.num_images + len(card.rejected) != len(listing):
                raise StorageError(
                    f"{path.name} was packed of {len(listing):,} images; now it has {sizes.get(path.name, 0):,} bytes,"
                    f" and its card states {card.bytes:,} bytes, {card.num_images:,} images and"
                    f" {len(card.rejected):,} left out: remove it, and run the same command again"
                )
            for rejected in card.rejected:
                rejections.add(rejected)
        require_images((listing, cards[number]) for number, (_, listing) in enumerate(self.files))
        return [PackedFile(path, cards[number]) for number, (path, _) in enumerate(self.files)]

    def _remove_left(self, *, may_be_there: bool) -> None:
        """Remove what this command needed, and what processes that were killed have left."""
        shutil.rmtree(self.hidden, ignore_errors=True)
        if may_be_there and isinstance(self.folder, StoreFolder):
            names = [n for path, _ in self.files for n in (path.with_suffix(SUFFIX).name, *_files_of(path))]
            abort_uploads(self.folder.place.inside("any"), names, self.say)

    def _take(self, number: int) -> bool:
        """Lock a shard against other processes of this machine; return whether none has it."""
        with storage_errors(self.hidden):
            self.hidden.mkdir(parents=True, exist_ok=True)
            file = open_lock(self.hidden / f"{number:05}.lock")
        if number in self.locks or not lock_at_once(file):
            file.close()
            return False
        self.locks[number] = file
        return True

    def _candidates(self) -> list[int]:
        """List the shards that this process may pack, in the order in which it tries: its own, then those of others.

        Each machine begins at another place, so that two commands on one output meet late. Of the part of another
        process the end is taken first, to which that one comes last.
        """
        total = len(self.files)
        first = zlib.crc32(platform.node().encode()) % total
        left = [n % total for n in range(first, first + total) if n % total not in self.done]
        is_silent = time.monotonic() - self.changed_at > max(SILENT_SECONDS, 2 * self.longest)
        taken_over = range(self.size) if is_silent or self.local_ranks is None else self.local_ranks
        own = [n for n in left if n % self.size == self.rank]
        return own + [n for n in reversed(left) if n % self.size != self.rank and n % self.size in taken_over]

    def _claim(self) -> int | None:
        """Lock a shard that is to be packed; None where there is none to take now."""
        self._look_for_done()
        for number in self._candidates():
            if self._take(number):
                self._look_for_done()  # whoever had the lock may have done it
                if number not in self.done:
                    return number
                self.locks.pop(number).close()
        return None

    def _pack_some(self, scratch: Path) -> bool:
        """Pack shards until there are none to take; return whether there was one."""
        waiting: deque[tuple[int, Tally]] = deque()  # whose images are on their way through the children
        before = len(self.packed)

        def portions() -> Iterator[Portion]:
            while (number := self._claim()) is not None:
                listing = self.files[number][1]
                if self.source:
                    listing = fetch_images(listing, self.source, scratch / f"{number}.images")
                tally = Tally(listing)
                waiting.append((number, tally))
                yield from tally.portions()

        with closing(encode_all(portions(), self.request.settings, workers=self.workers)) as encoded:
            began = time.monotonic()
            for part in encoded:
                number, tally = waiting.popleft()
                self._pack_shard(number, tally, chain([part], encoded), scratch)
                self.locks.pop(number).close()
                self.longest, began = max(self.longest, time.monotonic() - began), time.monotonic()
        return len(self.packed) > before

    def _pack_shard(self, number: int, tally: Tally, encoded: Iterator[EncodedPortion], scratch: Path) -> None:
        """Write a shard in the scratch folder, and put its files in place, the records last."""
        path, settings = self.files[number][0], self.request.settings.to_dict()
        with RecordWriter(scratch / path.name, force=True) as writer:
            while not tally.is_complete:
                for rejected in tally.write(next(encoded), writer):
                    self.rejections.add(rejected)
                self.progress(self._num_done() + tally.num_seen, self.total)
            card = tally.card(writer, settings, source=self.request.source)
            for remark in tally.deep.remarks():
                self.say(f"{path.name}: {remark}")
            hashes = {SUFFIX: tally.hashes(card.digest)}
            writer.companions |= {".json": card.to_json(), ".lst": tally.list_lines(), **hashes}
        *companions, records = [path.with_suffix(SUFFIX).name, *_files_of(path)]
        with ThreadPoolExecutor(len(companions), "storage") as pool:
            list(pool.map(lambda name: self.folder.write(name, scratch / name), companions))
        self.folder.write(records, scratch / records)
        (scratch / f"{number}.images").unlink(missing_ok=True)
        self.packed[number] = card
        self.done.add(number)
        self.changed_at = time.monotonic()


def _files_of(path: Path) -> list[str]:
    """Return the names of a shard's files, in the order in which they appear."""
    return [f"{path.stem}{suffix}" for suffix in _SUFFIXES]


def _default_shards(listing: Listing) -> int:
    """Return the number of shards where none is asked for: by bytes and images alone, not by who packs."""
    num_bytes = int(listing.sizes.clip(0).sum())
    return max(1, -(-num_bytes // SHARD_BYTES), -(-len(listing) // SHARD_IMAGES))


def _compressed(name: str) -> DataError:
    return DataError(
        f"{name} is compressed as a whole, and each of several processes would decompress it: decompress it first"
        " (gunzip, unzstd), or pack it with one process"
    )


class DiskFolder:
    """Files by their names; the folder need not exist. Raises StorageError for what cannot be done."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None where there is none."""
        with storage_errors(self.path / name), suppress(FileNotFoundError):
            return (self.path / name).read_bytes()
        return None

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file by its name."""
        sizes = {}
        with storage_errors(self.path), suppress(FileNotFoundError):
            for entry in os.scandir(self.path):
                with suppress(FileNotFoundError):
                    sizes[entry.name] = entry.stat().st_size
        return sizes

    def is_older(self, name: str, nanoseconds: int) -> bool:
        """Return whether a file is there that was written before this time of the system's clock."""
        try:
            return (self.path / name).stat().st_mtime_ns < nanoseconds
        except OSError:
            return False

    def write(self, name: str, file: Path) -> None:
        """Move a file there, in place of what is there; it appears whole."""
        with storage_errors(self.path / name):
            self.path.mkdir(parents=True, exist_ok=True)
            file.replace(self.path / name)


class StoreFolder:
    """Objects below a prefix by their names; methods as of :class:`DiskFolder`. Raises what the store does."""

    def __init__(self, uri: str) -> None:
        self.place = ObjectPlace.folder(uri)
        self._store = Store(self.place)

    def read(self, name: str) -> bytes | None:
        with suppress(NoObjectError):
            return bytes(self._store.read(self.place.inside(name))[0])
        return None

    def sizes(self) -> dict[str, int]:
        return {name: facts.size for name, facts in self._store.list_folder(self.place).items()}

    def is_older(self, name: str, nanoseconds: int) -> bool:
        return False

    def write(self, name: str, file: Path) -> None:
        try:
            self._store.write(self.place.inside(name), file)
        except KeyboardInterrupt:
            abort_uploads(self.place.inside(name), [name], lambda line: None, may_be_there=False)
            raise
        except OSError as error:
            raise storage_error(error, file) from error
        file.unlink(missing_ok=True)  # others may have come to the end, and removed it
