"""Pack one source by several processes, on one machine or many, which know each other by files beside the output alone.

Each takes shards of a plan, one at a time, and puts them in place whole; who joins late takes what is left, and the
work of one that dies is taken over. A shard's bytes follow from the plan, so one that is packed twice is the same.
What is noted lies in the hidden folder ``.OUT.plan``: listings (:mod:`.shard_plan`), leases (:mod:`.shared_folder`) and
the cards of shards that are done. Whoever finds all done verifies them and completes ``OUT.plan.json``.
"""

from __future__ import annotations

import os
import platform
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from steadytrain.data.packing.pack import PackRequest, Rejections, Tally, mute, record_path, require_images
from steadytrain.data.packing.portions import Portion, encode_all
from steadytrain.data.packing.shard_plan import ShardPlan, described, fetch_listing, make_plan, read_listing
from steadytrain.data.packing.shared_folder import BEATS, LEASE_SECONDS, THREADS, Leases, SharedFolder, open_folder
from steadytrain.data.recordio.card import Card
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.data.sources.listing import Listing
from steadytrain.data.storage.scratch import scratch_beside, temporary_scratch
from steadytrain.data.storage.sources import local_sources
from steadytrain.data.storage.store import ObjectPlace, is_uri, local_name
from steadytrain.errors import DataError, SteadyError, StorageError
from steadytrain.format import OnProgress, Say
from steadytrain.machine.facts import require_cache_folder
from steadytrain.machine.process import allow_open_files, keep_no_large_blocks, return_free_memory

COMPANIONS = (".idx", ".lst", ".json")
POLL_SECONDS = 1.0
"""How often a process that waits for others looks."""


def pack_shards(
    request: PackRequest,
    out: str | Path,
    *,
    shards: int | None = None,
    max_bad: int | None = None,
    rank: int = 0,
    size: int = 1,
    workers: int = 1,
    progress: OnProgress = mute,
    say: Say = mute,
    on_complete: Callable[[ShardPlan], object] = mute,
) -> ShardPlan:
    """Pack ``OUT-00000-of-00064.rec`` and so on together with all other processes that make the same call.

    The files are those that :func:`~steadytrain.data.packing.pack.pack` writes with as many shards. After a kill the
    same call goes on, with any number of processes.

    Args:
        request: what to pack, the same for all.
        out: where to, with or without ``.rec``; a URI for a store.
        shards: files for each split; None: one for each 256 MB of the source, or 16,384 images.
        max_bad: images that may be left out, by all; None: the larger of 1 % and 5.
        rank, size: which of how many processes this is, so that they begin with different shards; nothing else
            depends on it.
        workers: children of this process to encode with.
        progress: called with the number of images that are done, by all, and of all there are.
        say: takes remarks, a line each.
        on_complete: called with the complete plan in the one process that completes it.

    Returns:
        The plan, complete.

    Raises:
        DataError: the source or a setting cannot be used, it is not what was planned, or a file is in the way.
        TooManyBadError: more images than ``max_bad`` cannot be used.
        StorageError: a disk is full or not writable, or a store does not answer.
    """
    keep_no_large_blocks()
    folder, stem = _folder_and_stem(out, request)
    with ExitStack() as stack:
        notes = open_folder(f"{folder.rstrip('/')}/.{stem}.plan")
        worker = _Worker(
            request=request,
            shards=shards,
            stem=stem,
            plan_name=_plan_name(stem),
            on_disk=None if is_uri(folder) else Path(folder),
            out=open_folder(folder),
            notes=notes,
            leases=stack.enter_context(Leases(notes)),
            stack=stack,
            max_bad=max_bad,
            rank=rank,
            size=size,
            workers=workers,
            progress=progress,
            say=say,
            on_complete=on_complete,
        )
        return worker.run()


def read_plan(request: PackRequest, out: str | Path) -> ShardPlan | None:
    """Read the plan of what :func:`pack_shards` packs; None where there is none. Errors as there."""
    folder, stem = _folder_and_stem(out, request)
    content = open_folder(folder).read(_plan_name(stem))
    return None if content is None else ShardPlan.from_json(content, _plan_name(stem))


def _folder_and_stem(out: str | Path, request: PackRequest) -> tuple[str, str]:
    """Return the folder of ``out``, a path or a URI, and what the names of its files begin with."""
    if is_uri(out):
        place = ObjectPlace.parse(f"{str(out).removesuffix('.rec')}.rec")
        return str(place.sibling("")), Path(place.name).stem
    path = record_path(Path(local_name(str(out))), Path(request.sources[0]))
    return str(path.parent), path.stem


def _plan_name(stem: str) -> str:
    return f"{stem}.plan.json"


def pack_in_task(rank: int, size: int, *, folder: str, **arguments: Any) -> tuple[ShardPlan, list[str]]:
    """Call :func:`pack_shards` in a process that others have started elsewhere; return its plan and its remarks.

    Args:
        rank, size: which of how many this is.
        folder: that relative paths start from.
        arguments: the others.
    """
    try:
        os.chdir(folder)
    except OSError as error:
        raise DataError(f"{platform.node()} has no folder {folder}: all machines need the same folders") from error
    remarks: list[str] = []
    return pack_shards(**arguments, rank=rank, size=size, say=remarks.append), remarks


@dataclass
class _Worker:
    """One of the processes that pack shards; arguments as for :func:`pack_shards`."""

    request: PackRequest
    shards: int | None
    stem: str
    plan_name: str
    on_disk: Path | None
    out: SharedFolder
    notes: SharedFolder
    leases: Leases
    stack: ExitStack
    max_bad: int | None
    rank: int
    size: int
    workers: int
    progress: OnProgress
    say: Say
    on_complete: Callable[[ShardPlan], object]
    done: set[int] = field(default_factory=set)
    claimed: set[int] = field(default_factory=set)
    places: dict[str, str] = field(default_factory=dict)  # URI -> its file here

    def run(self) -> ShardPlan:
        self.plan = plan = self._join()
        self.name = plan.name  # of leases and marks: what an earlier plan has left counts for nothing
        if plan.is_complete:
            self.say(
                f"{self.plan_name}: all {len(plan.shards):,} shards have been packed; to pack again, remove it first"
            )
            if self.notes.names():  # the process that completed the plan was killed before it removed them
                self._remove_parts()
                self._remove_notes()
            return plan
        self.rejections = Rejections(self.max_bad, plan.num_listed)
        self.done = self._marked(self.notes.names())
        if self.done:
            self.say(f"{len(self.done):,} of {len(plan.shards):,} shards are packed already")
        self.progress(self._num_done(), plan.num_listed)
        beside = require_cache_folder() / "packing" / self.stem if self.on_disk is None else self._notes_path() / "work"
        # The machine stands in the name: a disk that machines share may not show the locks of one to another.
        scratch = self.stack.enter_context(scratch_beside(beside.with_name(f"{beside.name}-{platform.node()}")))
        try:
            while True:
                has_packed = self._pack_some(scratch)
                self.progress(self._num_done(), plan.num_listed)
                if len(self.done) == len(plan.shards):
                    return self._finish()
                if not has_packed:  # another may have come to the end, and have removed what was noted
                    latest = self._read_plan()
                    if latest is None or latest.is_complete:
                        return self._finish()
                    time.sleep(POLL_SECONDS)
        except SteadyError:
            complete = self._read_plan()  # by others, which did this one's work as well, as it was too slow
            if complete is None or not complete.is_complete:
                raise
            self._remove_notes()
            return complete

    def _notes_path(self) -> Path:
        assert self.on_disk is not None
        return self.on_disk / f".{self.stem}.plan"

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _read_plan(self) -> ShardPlan | None:
        content = self.out.read(self.plan_name)
        return None if content is None else ShardPlan.from_json(content, self.plan_name)

    def _join(self) -> ShardPlan:
        """Read the plan, or make it where no other process does."""
        asked, began, is_waiting = described(self.request, self.shards), time.monotonic(), False
        while (plan := self._read_plan()) is None:
            self.notes.make()
            names = self.notes.names()
            # The first one speaks, so it is best that it lists; but it may never come.
            is_due = self.rank == 0 or "plan.lease-0" in names or time.monotonic() - began > LEASE_SECONDS / BEATS
            if is_due and self.leases.take("plan", names):
                try:
                    with temporary_scratch() as scratch:
                        plan = make_plan(
                            self.request,
                            self.stem,
                            self.out,
                            self.notes,
                            shards=self.shards,
                            scratch=scratch,
                            on_disk=self.on_disk,
                            say=self.say,
                        )
                except SteadyError:
                    self.notes.remove()
                    raise
                self.out.create(self.plan_name, plan.to_json().encode())
                return_free_memory()  # the listing of all images, of which each shard reads its part again
                continue
            if not is_waiting:
                self.say("another process lists the source: waiting for it")
                is_waiting = True
            time.sleep(POLL_SECONDS)
        self.leases.drop("plan")
        plan.require_same(asked, self.plan_name)
        return plan

    def _finish(self) -> ShardPlan:
        """Verify all shards and complete the plan, where no other process does."""
        task, is_mine = f"{self.name}-finish", False
        while (plan := self._read_plan()) is not None and not plan.is_complete:
            if not is_mine:
                is_mine = self.leases.take(task, self.notes.names())
                if not is_mine:
                    time.sleep(POLL_SECONDS)
                continue  # the one before may have come to the end after all
            complete = self._verify()
            self.out.write(self.plan_name, complete.to_json().encode())
            self._remove_parts()  # whoever is sending a shard still finds the plan complete
            self.leases.drop(task)
            self.on_complete(complete)
        if plan is None:
            raise StorageError(f"{self.plan_name} was removed while shards were packed: run the same command again")
        self._remove_notes()  # again by one that was slow: it may have noted something since
        return plan

    def _remove_parts(self) -> None:
        """Remove what processes that were killed have left of the plan and of shards, whose work others then did."""
        stems = [Path(shard.file).stem for shard in self.plan.shards]
        names = [self.plan_name, *(f"{stem}{suffix}" for stem in stems for suffix in (".rec", *COMPANIONS))]
        is_second = [".lease-" in name and not name.endswith("-0") for name in self.notes.names()]
        self.out.remove_parts(names, self.say, may_be_there=any(is_second))

    def _remove_notes(self) -> None:
        self.leases.stop()
        self.notes.remove()

    def _verify(self) -> ShardPlan:
        """Require what :func:`~steadytrain.data.packing.pack.pack` requires, of all shards; return the whole plan."""
        plan = self.plan
        with ThreadPoolExecutor(THREADS, "storage") as pool:
            contents = list(pool.map(lambda n: self.notes.read(self._mark(n)), range(len(plan.shards))))
            sizes = list(pool.map(self.out.size, [shard.file for shard in plan.shards]))
        cards = []
        for shard, content, num_bytes in zip(plan.shards, contents, sizes, strict=True):
            card = Card.from_json((content or b"{}").decode())
            if num_bytes != card.bytes:
                there = "is not there any more" if num_bytes is None else f"has {num_bytes:,} bytes now"
                raise StorageError(
                    f"{shard.file} had {card.bytes:,} bytes when it was packed, and {there}: remove {self.plan_name}"
                    " and the shards, and pack anew"
                )
            if card.num_images + len(card.rejected) != shard.num_listed:
                raise StorageError(
                    f"{shard.file} has {card.num_images:,} images and {len(card.rejected):,} left out, of"
                    f" {shard.num_listed:,}: remove {self.plan_name} and the shards, and pack anew"
                )
            cards.append(card)
        rejections = Rejections(self.max_bad, plan.num_listed)
        for card in cards:
            for rejected in card.rejected:
                rejections.add(rejected)
        pairs = zip(plan.shards, cards, strict=True)
        for split, group in groupby(pairs, key=lambda pair: pair[0].split):
            parts = [card for _, card in group]
            require_images(
                split,
                plan.classes,
                before=[plan.counts[split]],
                after=[card.counts for card in parts],
                num_images=[card.num_images for card in parts],
                rejected=[rejected for card in parts for rejected in card.rejected],
            )
        packed = tuple(
            replace(shard, num_images=card.num_images, bytes=card.bytes, digest=card.digest)
            for shard, card in zip(plan.shards, cards, strict=True)
        )
        num_rejected = sum(len(card.rejected) for card in cards)
        return replace(plan, shards=packed, num_rejected=num_rejected, is_complete=True)

    # -- shards ------------------------------------------------------------------------------------------------------

    def _mark(self, number: int) -> str:
        """Return the name of the file that marks a shard as done."""
        return f"{self._task(number)}.done"

    def _task(self, number: int) -> str:
        return f"{self.name}-{number:05}"

    def _marked(self, names: set[str]) -> set[int]:
        return {number for number in range(len(self.plan.shards)) if self._mark(number) in names}

    def _claim(self) -> int | None:
        """Take a shard: first one of this rank's part, then any that nobody has, then those of processes that ended."""
        names = self.notes.names()
        total = len(self.plan.shards)
        self.done |= self._marked(names)
        left = [number for number in range(total) if number not in self.done and number not in self.claimed]
        left.sort(key=lambda number: (number % self.size != self.rank, (number - self.rank) % total))
        leased = {name.partition(".")[0] for name in names if ".lease-" in name}
        left.sort(key=lambda number: self._task(number) in leased)
        return next((number for number in left if self.leases.take(self._task(number), names)), None)

    def _pack_some(self, scratch: Path) -> bool:
        """Pack shards until there are none to take; return whether there was one."""
        waiting: deque[tuple[int, Tally]] = deque()  # whose images are on their way through the children
        self.claimed = set()

        def portions() -> Iterator[Portion]:
            while (number := self._claim()) is not None:
                self.claimed.add(number)
                tally = Tally(self._load(number, scratch))
                waiting.append((number, tally))
                yield from tally.portions()

        with closing(encode_all(portions(), self.request.settings, workers=self.workers)) as encoded:
            while (part := next(encoded, None)) is not None:
                number, tally = waiting.popleft()
                shard = self.plan.shards[number]
                with RecordWriter(scratch / shard.file, force=True) as writer:
                    while True:
                        for rejected in tally.write(part, writer):
                            self.rejections.add(rejected)
                        self.progress(self._num_done(tally.num_seen), self.plan.num_listed)
                        if tally.is_complete:
                            break
                        part = next(encoded)
                    card = tally.card(writer, self.request.settings.to_dict(), source=self.request.source)
                    if remark := tally.deep.remark():
                        self.say(f"{shard.file}: {remark}")
                    writer.companions |= {".json": card.to_json(), ".lst": tally.list_lines()}
                beside = [(scratch / shard.file).with_suffix(suffix) for suffix in COMPANIONS]
                with ThreadPoolExecutor(len(beside), "storage") as pool:
                    list(pool.map(self._put, beside))
                self._put(scratch / shard.file)  # last: without records nothing looks finished
                self._blob(number, scratch).unlink(missing_ok=True)
                self.notes.create(self._mark(number), card.to_json().encode())
                self.leases.drop(self._task(number))
                self.done.add(number)
        return bool(self.claimed)

    def _put(self, file: Path) -> None:
        self.out.write(file.name, file)
        file.unlink(missing_ok=True)

    def _num_done(self, num_seen: int = 0) -> int:
        return num_seen + sum(self.plan.shards[number].num_listed for number in self.done)

    def _load(self, number: int, scratch: Path) -> Listing:
        """Read what goes into a shard, and fetch it where it lies in a store."""
        shard = self.plan.shards[number]
        content = self.notes.read(shard.listing)
        if content is None:
            raise DataError(f"{shard.listing} of {self.plan_name} is gone: remove {self.plan_name} to list again")
        listing = read_listing(content, self.plan, shard, self._place, self.plan_name)
        if not self.plan.source:
            return listing
        return fetch_listing(listing, self.plan.source, self._blob(number, scratch), self.plan_name)

    def _blob(self, number: int, scratch: Path) -> Path:
        return scratch / f"{number:05}.images"

    def _place(self, name: str) -> str:
        """Return the local path of a file of images; one in a store is fetched whole, unless an earlier shard did."""
        if is_uri(name) and name not in self.places:
            allow_open_files(2 * len(self.places))  # each of which keeps its copy in the cache by two locks
            self.places[name] = self.stack.enter_context(local_sources([name], self.say))[0]
        return self.places.get(name, name)
