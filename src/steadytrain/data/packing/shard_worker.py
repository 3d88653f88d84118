"""Pack one source by several processes, on one machine or many, which know each other by files alone.

Shard i belongs to process i mod n. Its files appear whole, the records last, and so mark it as done. On one machine a
process locks a shard before it packs it, and the system lets go of the lock however the process ends: whoever is done
with its own shards takes those that are left. Shards of other machines, whose locks may not be seen, are packed again
only where none has appeared for long. A shard's bytes follow from the plan (:mod:`.shard_plan`), so one that is packed
twice is the same. Whoever finds all done verifies them and completes the plan.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby
from pathlib import Path
from typing import Any, BinaryIO

from steadytrain.data.packing.pack import PackRequest, Rejections, Tally, mute, record_path, require_images
from steadytrain.data.packing.portions import EncodedPortion, Portion, encode_all
from steadytrain.data.packing.shard_plan import ShardPlan, changed, described, make_plan, read_listing
from steadytrain.data.packing.shared_folder import THREADS, DiskFolder, open_folder
from steadytrain.data.packing.store_images import fetch_images
from steadytrain.data.recordio.card import Card
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.data.sources.listing import Listing
from steadytrain.data.storage.scratch import scratch_beside
from steadytrain.data.storage.sources import local_sources
from steadytrain.data.storage.store import ObjectPlace, abort_uploads, is_uri, local_name
from steadytrain.errors import DataError, SteadyError, StorageError, storage_errors
from steadytrain.files import lock_at_once, open_lock, remove_left
from steadytrain.format import OnProgress, Say
from steadytrain.machine.facts import require_cache_folder
from steadytrain.machine.process import allow_open_files, keep_no_large_blocks, return_free_memory

POLL_SECONDS = 1.0
"""Seconds between two looks of a process that waits for others."""
SILENT_SECONDS = 30.0
"""Seconds without a new shard, at least, after which shards of other machines are packed here."""
PLAN_SECONDS, FAR_PLAN_SECONDS = 6.0, 600.0
"""Seconds after which another process than rank 0 makes the plan: on its machine, and elsewhere."""


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
        say: takes remarks, a line each.
        on_complete: called with the complete plan in a process that completes it.

    Raises:
        DataError: the source or a setting cannot be used, it is not what was planned, or a file is in the way.
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
    on_complete: Callable[[ShardPlan], object] = mute

    def __post_init__(self) -> None:
        if is_uri(self.out):
            place = ObjectPlace.parse(f"{str(self.out).removesuffix('.rec')}.rec")
            folder, self.stem = str(place.sibling("")), Path(place.name).stem
            digest = hashlib.sha256(str(place).encode()).hexdigest()[:12]
            self.hidden = require_cache_folder() / "packing" / f"{self.stem}-{digest}"
        else:
            path = record_path(Path(local_name(str(self.out))), Path(self.request.sources[0]))
            folder, self.stem = str(path.parent), path.stem
            self.hidden = path.parent / f".{self.stem}.plan"  # for locks, and shards that are being written
        self.plan_name = f"{self.stem}.plan.json"
        self.folder, self.notes = open_folder(folder), open_folder(f"{folder.rstrip('/')}/.{self.stem}.plan")
        self.done: set[int] = set()
        self.changed_at, self.longest = 0.0, 0.0  # when a shard was seen to be done; seconds that one took here
        self.locks: dict[str, BinaryIO] = {}
        self.places: dict[str, str] = {}  # URI -> its file here

    def run(self) -> ShardPlan:
        """Pack until all shards are done, by whomever; return the complete plan."""
        keep_no_large_blocks()
        has_joined = False
        try:
            with ExitStack() as self.stack:
                is_resumed = self.rank == 0 and self.read_plan() is not None
                self.plan = self._join()
                has_joined = True
                plan = self._run(is_resumed=is_resumed)
        except SteadyError:
            newest = self.read_plan()
            if newest is None and "plan" in self.locks:  # the source cannot be used
                self._remove_notes()
            if not has_joined or newest is None or not newest.is_complete:
                raise
            plan = newest  # others have come to the end meanwhile, and have removed what was noted
        finally:
            for file in self.locks.values():
                file.close()
        self._remove_notes()  # by each process: one that was slow may have noted something since
        return plan

    def _run(self, *, is_resumed: bool) -> ShardPlan:
        plan = self.plan
        if plan.is_complete:
            self.say(
                f"{self.plan_name}: all {len(plan.shards):,} shards have been packed; to pack again, remove it first"
            )
            if self.notes.sizes():  # the process that completed the plan was killed before it removed them
                self._remove_parts(may_be_there=True)
            return plan
        self.rejections, self.changed_at = Rejections(self.max_bad, plan.num_listed), time.monotonic()
        self._look_for_done()
        if self.done:
            self.say(f"{len(self.done):,} of {len(plan.shards):,} shards are packed already")
        # The machine stands in the name: a disk that machines share may not show the locks of one to another.
        scratch = self.stack.enter_context(scratch_beside(self.hidden / f"work-{platform.node()}"))
        while True:
            self.progress(self._num_done(), plan.num_listed)
            has_packed = self._pack_some(scratch)
            if len(self.done) == len(plan.shards) or self._require_plan().is_complete:
                self.progress(plan.num_listed, plan.num_listed)
                return self._finish(is_resumed)
            if not has_packed:
                time.sleep(POLL_SECONDS)

    def _take(self, name: str) -> bool:
        """Take a lock against other processes of this machine; return whether none has it. It falls with this one."""
        with storage_errors(self.hidden):
            self.hidden.mkdir(parents=True, exist_ok=True)
            file = open_lock(self.hidden / f"{name}.lock")
        if name in self.locks or not lock_at_once(file):
            file.close()
            return False
        self.locks[name] = file
        return True

    def _drop(self, name: str) -> None:
        self.locks.pop(name).close()

    def _remove_notes(self) -> None:
        self.notes.remove()
        shutil.rmtree(self.hidden, ignore_errors=True)

    # -- the plan ----------------------------------------------------------------------------------------------------

    def read_plan(self) -> ShardPlan | None:
        """Read the plan; None where there is none."""
        content = self.folder.read(self.plan_name)
        return None if content is None else ShardPlan.from_json(content, self.plan_name)

    def _require_plan(self) -> ShardPlan:
        plan = self.read_plan()
        if plan is None or [shard.listing for shard in plan.shards] != [shard.listing for shard in self.plan.shards]:
            raise StorageError(f"{self.plan_name} was replaced while shards were packed: run the same command again")
        return plan

    def _join(self) -> ShardPlan:
        """Read the plan, or make it where no other process does."""
        asked, began, is_waiting = described(self.request, self.shards), time.monotonic(), False
        # The first one speaks, so it is best that it lists; but it may never come.
        is_near = self.local_ranks is None or 0 in self.local_ranks
        patience = 0.0 if self.rank == 0 else PLAN_SECONDS if is_near else FAR_PLAN_SECONDS
        while (plan := self.read_plan()) is None:
            if time.monotonic() - began >= patience and self._take("plan"):
                self._make_plan()
                self._drop("plan")
            elif not is_waiting:
                self.say("another process lists the source: waiting for it")
                is_waiting = True
            else:
                time.sleep(POLL_SECONDS)
        plan.require_same(asked, self.plan_name)
        return plan

    def _make_plan(self) -> None:
        """Make the plan, unless another process does meanwhile, whose shards are then in the way."""
        try:
            if self.read_plan() is None:
                plan = make_plan(self.request, self.stem, self.folder, self.notes, shards=self.shards, say=self.say)
                if self.read_plan() is None:
                    self.folder.write(self.plan_name, plan.to_json().encode())
        except DataError:
            if self.read_plan() is None:
                raise
        return_free_memory()  # the listing of all images, of which each shard reads its part again

    def _finish(self, is_resumed: bool) -> ShardPlan:
        """Verify all shards and complete the plan, where no other process does."""
        while not (plan := self._require_plan()).is_complete:
            if not self._take("finish"):
                time.sleep(POLL_SECONDS)
            elif not self._require_plan().is_complete:
                plan = self._verify()
                self.folder.write(self.plan_name, plan.to_json().encode())
                self._remove_parts(may_be_there=is_resumed)  # whoever sends a shard still finds the plan complete
                self.on_complete(plan)
        return plan

    def _remove_parts(self, *, may_be_there: bool) -> None:
        """Remove what processes that were killed have left of the plan, and of shards in a store."""
        if isinstance(self.folder, DiskFolder):
            remove_left(self.folder.path)
        else:
            names = [self.plan_name, *(name for shard in self.plan.shards for name in shard.files)]
            abort_uploads(self.folder.place.sibling("any"), names, self.say, may_be_there=may_be_there)

    def _verify(self) -> ShardPlan:
        """Require what :func:`~steadytrain.data.packing.pack.pack` requires, of all shards; return the whole plan."""
        plan, sizes = self.plan, self.folder.sizes()
        with ThreadPoolExecutor(THREADS, "storage") as pool:
            contents = pool.map(self.folder.read, [f"{Path(shard.file).stem}.json" for shard in plan.shards])
            cards = [Card.from_json((content or b"{}").decode()) for content in contents]
        rejections = Rejections(self.max_bad, plan.num_listed)
        for shard, card in zip(plan.shards, cards, strict=True):
            if sizes.get(shard.file, -1) != card.bytes or card.num_images + len(card.rejected) != shard.num_listed:
                raise StorageError(
                    f"{shard.file} was packed of {shard.num_listed:,} images; now it has {sizes.get(shard.file, 0):,}"
                    f" bytes, and its card states {card.bytes:,} bytes, {card.num_images:,} images and"
                    f" {len(card.rejected):,} left out: remove {self.plan_name} and the shards, and pack anew"
                )
            for rejected in card.rejected:
                rejections.add(rejected)
        packed = [
            replace(shard, num_images=card.num_images, bytes=card.bytes, digest=card.digest)
            for shard, card in zip(plan.shards, cards, strict=True)
        ]
        for split, group in groupby(zip(packed, cards, strict=True), key=lambda pair: pair[0].split):
            parts = [card for _, card in group]
            require_images(
                split,
                plan.classes,
                before=[plan.counts[split]],
                after=[card.counts for card in parts],
                num_images=[card.num_images for card in parts],
                rejected=[rejected for card in parts for rejected in card.rejected],
            )
        num_rejected = sum(len(card.rejected) for card in cards)
        return replace(plan, shards=tuple(packed), num_rejected=num_rejected, is_complete=True)

    # -- shards ------------------------------------------------------------------------------------------------------

    def _look_for_done(self) -> None:
        """See which shards are done: all of their files are there."""
        names = self.folder.sizes().keys()
        for number, shard in enumerate(self.plan.shards):
            if number not in self.done and names >= {*shard.files}:
                self.done.add(number)
                self.changed_at = time.monotonic()

    def _num_done(self) -> int:
        return sum(self.plan.shards[number].num_listed for number in self.done)

    def _candidates(self) -> list[int]:
        """List the shards that this process may pack, in the order in which it tries: its own, then those of others.

        Each machine begins at another place, so that two commands on one output meet late. Of the part of another
        process the end is taken first, to which that one comes last.
        """
        total = len(self.plan.shards)
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
            if self._take(f"{number:05}"):
                self._look_for_done()  # whoever had the lock may have done it
                if number not in self.done:
                    return number
                self._drop(f"{number:05}")
        return None

    def _pack_some(self, scratch: Path) -> bool:
        """Pack shards until there are none to take; return whether there was one."""
        waiting: deque[tuple[int, Tally]] = deque()  # whose images are on their way through the children
        num_packed = 0

        def portions() -> Iterator[Portion]:
            while (number := self._claim()) is not None:
                tally = Tally(self._load(number, scratch))
                waiting.append((number, tally))
                yield from tally.portions()

        with closing(encode_all(portions(), self.request.settings, workers=self.workers)) as encoded:
            began = time.monotonic()
            for part in encoded:
                number, tally = waiting.popleft()
                self._pack_shard(number, tally, chain([part], encoded), scratch)
                self._drop(f"{number:05}")
                num_packed += 1
                self.longest, began = max(self.longest, time.monotonic() - began), time.monotonic()
        return num_packed > 0

    def _pack_shard(self, number: int, tally: Tally, encoded: Iterator[EncodedPortion], scratch: Path) -> None:
        """Write a shard in the scratch folder, and put its files in place, the records last."""
        shard, settings = self.plan.shards[number], self.request.settings.to_dict()
        with RecordWriter(scratch / shard.file, force=True) as writer:
            while not tally.is_complete:
                for rejected in tally.write(next(encoded), writer):
                    self.rejections.add(rejected)
                self.progress(self._num_done() + tally.num_seen, self.plan.num_listed)
            card = tally.card(writer, settings, source=self.request.source)
            if remark := tally.deep.remark():
                self.say(f"{shard.file}: {remark}")
            writer.companions |= {".json": card.to_json(), ".lst": tally.list_lines()}
        *companions, records = shard.files
        with ThreadPoolExecutor(len(companions), "storage") as pool:
            list(pool.map(lambda name: self.folder.write(name, scratch / name), companions))
        self.folder.write(records, scratch / records)
        for name in (*shard.files, f"{number}.images"):
            (scratch / name).unlink(missing_ok=True)
        self.done.add(number)
        self.changed_at = time.monotonic()

    def _load(self, number: int, scratch: Path) -> Listing:
        """Read what goes into a shard, and fetch it where it lies in a store."""
        shard = self.plan.shards[number]
        content = self.notes.read(shard.listing)
        if content is None:
            raise DataError(f"{shard.listing} of {self.plan_name} is gone: remove {self.plan_name} to list again")
        listing = read_listing(content, self.plan, shard, self._place, self.plan_name)
        if not self.plan.source:
            return listing
        is_other = partial(changed, plan_name=self.plan_name)
        return fetch_images(listing, self.plan.source, scratch / f"{number}.images", is_other)

    def _place(self, name: str) -> str:
        """Return the local path of a file of images; one in a store is fetched whole, unless an earlier shard did."""
        if is_uri(name) and name not in self.places:
            allow_open_files(2 * len(self.places))  # each of which keeps its copy in the cache by two locks
            self.places[name] = self.stack.enter_context(local_sources([name], self.say))[0]
        return self.places.get(name, name)


def pack_in_task(rank: int, size: int, *, folder: str, **arguments: Any) -> tuple[ShardPlan, list[str]]:
    """Pack as a :class:`ShardPacker` in a process that others have started; return its plan and its remarks.

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
    local_ranks = range(rank, rank + 1)  # as far as is known here
    plan = ShardPacker(**arguments, rank=rank, size=size, local_ranks=local_ranks, say=remarks.append).run()
    return plan, remarks
