"""Make record files of whatever a user names as data: a ``.rec`` stays as it is, all else is packed into a cache.

The copy is named by what is packed (names, sizes and times of the files, or of those that hold them) and by the
settings, so a change makes a new one. Any number of processes may ask for the same data at once: one packs, the others
wait. A kill leaves nothing that would be taken for a copy, and what was done until then is gone on from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from stat import S_ISDIR
from typing import Any, Literal

from steadytrain.data import filenames
from steadytrain.data.filenames import group_by_split
from steadytrain.data.images.encode import PackSettings
from steadytrain.data.packing.pack import assign_files, digest, identity, mute, pack_listings
from steadytrain.data.recordio.card import (
    LabelNames,
    card_for,
    damage_of,
    join_paths,
    read_classes,
    record_files,
    refuse_other_classes,
)
from steadytrain.data.sources.columns import ColumnNames
from steadytrain.data.sources.find import find
from steadytrain.data.sources.labels import require_zero_or_one
from steadytrain.data.sources.listing import Listing
from steadytrain.data.sources.select import Selection
from steadytrain.data.storage.object_cache import open_objects
from steadytrain.data.storage.scratch import scratch_beside, temporary_scratch
from steadytrain.data.storage.sources import local_sources
from steadytrain.data.storage.store import is_uri, local_name
from steadytrain.errors import DataError, StorageError, TooManyBadError, did_you_mean, storage_error
from steadytrain.files import lock, lock_at_once, lock_surely, open_lock
from steadytrain.format import OnProgress, Say, print_note
from steadytrain.machine.facts import require_cache_folder

UNUSED_SECONDS = 3600.0  # that a copy of an earlier state stays after somebody asked for it

_MOST_FILES = 10_000
_STATES = "listed.txt"
"""States of the source that a copy is of. Copies of 0.2, whose "states.txt" it is not, took a test part to validate."""


_INSTEAD = {"train": ("train",), "val": ("val", "test"), "test": ("test", "val")}
"""The parts that do for a purpose, the best first."""


@dataclass(frozen=True)
class Prepared:
    """Record files to train on, to validate and to test with; None where the source has no such part.

    Each may name several files, as ``OUT-{00000..00003}-of-00004.rec`` does; :class:`Records` opens those as one.
    ``is_new``: they were packed just now, and what there is to say of the images has been said.
    """

    train: Path
    val: Path | None
    test: Path | None = None
    is_new: bool = field(default=False, compare=False)

    def only(self, split: Literal["train", "val", "test"]) -> Path:
        """Return the file for a purpose: of ``val`` and ``test`` the other will do, else all there is."""
        parts = {"train": self.train, "val": self.val, "test": self.test}
        return next((path for name in _INSTEAD[split] if (path := parts[name]) is not None), self.train)


def prepare(
    source: str | Path,
    *,
    root: str | Path | None = None,
    labels: str | Path | None = None,
    classes: str | Path | Sequence[str] | None = None,
    path_column: str | None = None,
    label_column: str | Sequence[str] | None = None,
    split_column: str | None = None,
    zip_names: str | None = None,
    trained_column: str = "",
    trainable: bool = False,
    only: Literal["val", "test"] | None = None,
    cache: str | Path | None = None,
    shorter_side: int | None = 256,
    workers: int | None = None,
    say: Say = print_note,
    remark: Say | None = None,
    progress: OnProgress | None = None,
    say_reused: bool = True,
    check: Callable[[Listing], None] | None = None,
) -> Prepared:
    """Make data ready to be read.

    Args:
        source: a ``.rec`` or several by braces and wildcards, or whatever else ``pack`` takes.
        root, labels: as for :func:`~steadytrain.data.packing.pack.pack`.
        classes: the class list to use, in its order: names, or the path of a card that has them.
        path_column, label_column, split_column, zip_names: as for :func:`~steadytrain.data.packing.pack.pack`.
        trained_column: of the training set's table, for a table that validates: its labels are in this one.
        trainable: refuse labels that nothing can be trained on, before anything is packed.
        only: of a source that is split, pack no more than this part, unless a copy of all is there already.
        cache: where packed copies lie; None: ``$STEADYTRAIN_CACHE``, else ``steadytrain`` in the user's cache folder.
        shorter_side: larger images are scaled down to it in the copy; None keeps every size.
        workers: processes to pack with; None: one for each core.
        say: takes a line each for what a user should know.
        remark: takes those about the source itself, where it is listed; None: ``say`` does.
        progress: as for :func:`~steadytrain.data.packing.pack.pack`; not called where nothing is packed.
        say_reused: whether it is worth a line that an earlier copy is used.
        check: called with what would be packed for ``only``, before anything is; it may raise.

    Raises:
        DataError: the data cannot be used, or have other classes than ``classes``.
        TooManyBadError, StorageError: a source could not be packed.
    """
    card_name = str(classes) if isinstance(classes, str | Path) else "CARD (that of the training set)"
    if isinstance(classes, str | Path):
        class_list: tuple[str, ...] | None = read_classes(classes)
    else:
        class_list = classes if classes is None or isinstance(classes, tuple) else tuple(classes)
    source = local_name(str(source))
    columns = replace(ColumnNames.of(path_column, label_column, split_column, zip_names), trained=trained_column)
    with contextlib.ExitStack() as stack:
        asked = {"--root": root, "--labels": labels, **dict(replace(columns, zip_names="").options())}
        prepared = _as_records(source, asked, say)
        if prepared is None:
            [source] = stack.enter_context(local_sources([source], say))
            prepared = _Request(
                source=source,
                root=None if root is None else Path(root),
                labels=None if labels is None else Path(labels),
                classes=class_list,
                columns=columns,
                trainable=trainable,
                only=only,
                settings=PackSettings(shorter_side=shorter_side),
                place=(Path(cache) if cache is not None else require_cache_folder()) / "packed",
                workers=workers,
                say=say,
                remark=remark or say,
                progress=progress or mute,
                say_reused=say_reused,
                check=check,
            ).get()
    parts = {"val": ("validation", prepared.val), "test": ("test", prepared.test)}
    for split, (word, path) in parts.items():
        if only is not None and split != only and path is not None and prepared.only(only) == path:
            say(f"{source} has no {parts[only][0]} part: its {word} part is used")
    card = card_for(prepared.train)
    for line in () if card is None or prepared.is_new else card.remarks:
        (remark or say)(line)
    if class_list and card is not None:
        refuse_other_classes(card.class_list, class_list, of=prepared.train, card=card_name)
    return prepared


def _as_records(source: str, options: Mapping[str, object], say: Say) -> Prepared | None:
    """Return record files as they are; None for whatever has to be packed. ``options`` are for other sources."""
    if Path(source).suffix != ".rec" or Path(source).is_dir():
        return None
    if option := next((option for option, value in options.items() if value is not None), None):
        raise DataError(f"{source} has its labels in it: drop {option}")
    files = open_objects(source) if is_uri(source) else record_files(source)
    if not files[0].exists():
        siblings = [file.name for file in files[0].parent.glob("*.rec")]
        made = " It was packed from data in memory: the same call, with these data, packs them again."
        near = made if files[0].parent.name == "memory" else did_you_mean(files[0].name, siblings)
        raise DataError(f"there is no file {source}.{near}")
    groups = group_by_split(files, [file.name for file in files], source)
    if len(groups) == 1:
        return Prepared(join_paths(files) if is_uri(source) else Path(source), None)
    # ``OUT-{train,val}.rec`` has two sets, each of which may be several files.
    sets = {split: join_paths(group) for split, group in groups.items()}
    return Prepared(sets.get("train") or next(iter(sets.values())), sets.get("val"), sets.get("test"))


@dataclass(frozen=True, kw_only=True)
class _Request:
    """A source to be packed, and the cache that keeps the copy."""

    source: str
    root: Path | None
    labels: Path | None
    classes: tuple[str, ...] | None
    columns: ColumnNames
    trainable: bool
    only: str | None
    settings: PackSettings
    place: Path
    workers: int | None
    say: Say
    remark: Say
    progress: OnProgress
    say_reused: bool
    check: Callable[[Listing], None] | None

    @cached_property
    def family(self) -> str:
        """The name that all copies of this source by these settings share, whatever state it was in."""
        place = Path(os.path.realpath(self.source))  # of links in a circle too
        options = [None if path is None else os.path.realpath(path) for path in (self.root, self.labels)]
        kind = [
            *self.columns.options(),
            *filter(None, [self.columns.trained]),
            *(["labels"] if isinstance(self.classes, LabelNames) else []),
        ]
        request = json.dumps([str(place), *options, self.classes, *kind]).encode()
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", place.name)[-40:]
        return f"{stem}-{digest(self.settings, [request])[:8]}"

    def get(self) -> Prepared:
        """Return the copy, made if need be."""
        state = _state_of(self.source, self.labels)
        folder = _folder_of_state(self.place, self.family, state)
        if folder is not None and self._is_damaged(folder):
            folder = None
        if folder is None:
            with self._scratch() as scratch:
                listings = self._list(scratch)
                if not all(listing.pieces is not None for listing in listings):
                    state = ""  # images lie outside of the files that were named: their state does not say all
                folder = self._folder(listings, scratch)
                parts = {listing.split: [listing] for listing in listings}
                part = next((parts[name] for name in _INSTEAD.get(self.only or "", ()) if name in parts), [])
                if self.check is not None:
                    self.check((part or listings)[0])
                if part and not folder.is_dir():
                    listings, state = part, ""  # a copy of this part alone says nothing of the rest
                    folder = self._folder(listings, scratch)
                if not folder.is_dir() or self._is_damaged(folder):
                    self._make(listings, folder, scratch)
                    return replace(_use(folder, state), is_new=True)
        if self.say_reused:
            self.say(f"using the packed copy of {self.source}")
        return _use(folder, state)

    def _is_damaged(self, folder: Path) -> bool:
        """Return whether files of a copy are not as they were written: it is then removed, to be made again."""
        if not (fault := _damage_of_copy(folder)):
            return False
        try:
            with open_lock(folder.with_name(f".{self.family}.lock")) as file:
                lock(file)
                if _damage_of_copy(folder):  # else another process has just made it again
                    damaged = folder.with_name(f".{self.family}-damaged.part")
                    shutil.rmtree(damaged, ignore_errors=True)
                    folder.rename(damaged)
                    shutil.rmtree(damaged, ignore_errors=True)
                    self.say(f"{fault}: the packed copy of {self.source} is made again")
        except OSError:  # a cache that is there to be read only: what cannot be used is told where it is opened
            return False
        return not folder.is_dir()

    def _folder(self, listings: list[Listing], scratch: Path) -> Path:
        return self.place / f"{self.family}-{digest(self.settings, identity(listings, scratch=scratch))[:12]}"

    def _list(self, scratch: Path) -> list[Listing]:
        try:
            lookup: dict[str, Any] = {"root": self.root, "labels": self.labels, "classes": self.classes}
            listings = find(self.source, **lookup, columns=self.columns, scratch=scratch, say=self.remark)
        except DataError as error:
            # Every command that takes data has --root and --labels.
            has_option = "--classes" in str(error)
            raise DataError(f"{error}{f' (steady pack {self.source} OUT has it)' * has_option}") from error
        for listing in listings if self.trainable else ():
            require_zero_or_one(listing.labels, where=self.source)
        return Selection().of(listings, self.remark)

    @contextlib.contextmanager
    def _scratch(self) -> Iterator[Path]:
        """Make room to decompress: in the cache, or elsewhere if that is read-only (there may be a copy in it)."""
        with contextlib.ExitStack() as stack:
            try:
                scratch = stack.enter_context(scratch_beside(self.place / self.family))
            except StorageError as error:
                if not self.place.is_dir():
                    raise self._no_cache(error) from error
                scratch = stack.enter_context(temporary_scratch())
            yield scratch

    def _make(self, listings: list[Listing], folder: Path, scratch: Path) -> None:
        """Pack into ``folder``, while the system's lock on this source is held; it falls however this process ends."""
        part = folder.with_name(f".{folder.name}.part")
        try:
            with open_lock(folder.with_name(f".{self.family}.lock")) as file:
                if not lock_at_once(file):
                    self.say(f"another process is packing {self.source}: waiting for it")
                    lock(file)
                if folder.is_dir():
                    return
                for other in self.place.glob(f".{self.family}-*.part"):
                    if other.is_symlink():  # not ours: records would be written where it leads
                        other.unlink()
                    elif other != part:  # the source has changed since a kill
                        shutil.rmtree(other, ignore_errors=True)
                self.say(f"packing {self.source} once into {folder}; later runs reuse it")
                self._pack(listings, part, scratch)
                part.replace(folder)
                for other in self.place.glob(f"{self.family}-*"):
                    if other != folder and not _is_in_use(other):
                        self.say(f"removing {other}: the copy of an earlier state")
                        shutil.rmtree(other, ignore_errors=True)
        except OSError as error:
            raise self._no_cache(storage_error(error, folder)) from error

    def _pack(self, listings: list[Listing], part: Path, scratch: Path) -> None:
        try:
            packed = pack_listings(
                assign_files(listings, part / "data.rec"),
                self.settings,
                source=str(Path(self.source).resolve()),
                scratch=scratch,
                workers=self.workers,
                force=True,
                progress=self.progress,
                say=self.say,
            )
        except TooManyBadError as error:
            raise TooManyBadError(f"{error} (steady pack {self.source} OUT --max-bad N, then use OUT.rec)") from None
        finally:
            with contextlib.suppress(OSError):  # nothing in it, or what the next one goes on from
                part.rmdir()
        for rejected in (file.card.rejected for file in packed if file.card.rejected):
            examples = "; ".join(f"{file.name} ({file.reason})" for file in rejected[:3])
            examples += "; ..." * (len(rejected) > 3)
            self.say(f"left out {len(rejected)} file{'s' * (len(rejected) > 1)} that cannot be used: {examples}")

    def _no_cache(self, error: StorageError) -> StorageError:
        return StorageError(
            f"{error} (the cache: set STEADYTRAIN_CACHE to a folder that can be written, or pack it yourself: steady"
            f" pack {self.source} OUT)"
        )


def _use(folder: Path, state: str) -> Prepared:
    """Note that a copy is in use, and what state of its source it is of, if that is known; return its files."""
    with contextlib.suppress(OSError):  # a cache may be there to be read only
        if state and _folder_of_state(folder.parent, folder.name.rpartition("-")[0], state) is None:
            with (folder / _STATES).open("a", encoding="utf-8") as file:
                file.write(state + "\n")
        os.utime(folder)
    paths = {split: folder / f"data{'-' * bool(split)}{split}.rec" for split in ("train", "", "val", "test")}
    existing = {split: path for split, path in paths.items() if path.is_file()}
    return Prepared(next(iter(existing.values())), existing.get("val"), existing.get("test"))


def _damage_of_copy(folder: Path) -> str:
    """Say what is not as it was written in a copy; empty: nothing, or there is no copy."""
    files = sorted(folder.glob("*.rec"))
    if not files and folder.is_dir():
        return f"{folder} holds no records"
    return next(filter(None, map(damage_of, files)), "")


def _state_of(source: str, labels: Path | None) -> str:
    """Digest names, sizes and times of the files that a source is, and of their siblings.

    Empty for many files, and for links to folders: nothing short of listing them says whether they have changed.
    """
    path = Path(source)
    try:
        folder = path if path.is_dir() else path.parent
        named = filenames.expand(source) if not path.exists() and filenames.is_pattern(source) else []
        inside = islice(folder.rglob("*") if path.is_dir() else folder.iterdir(), _MOST_FILES + 1)
        files = sorted({*named, *inside, *([] if labels is None else [labels])})
        if len(files) > _MOST_FILES or (path.is_dir() and any(file.is_symlink() and file.is_dir() for file in files)):
            return ""
        stats = ((file, file.stat()) for file in files)
        facts = [(str(file), stat.st_size, stat.st_mtime_ns) for file, stat in stats if not S_ISDIR(stat.st_mode)]
    except (OSError, DataError):  # an error when it is listed
        return ""
    return hashlib.sha256(repr(facts).encode("utf-8", "surrogateescape")).hexdigest()


def _folder_of_state(place: Path, family: str, state: str) -> Path | None:
    """Find the copy that was made of a source in this state; None where it has to be listed."""
    for folder in place.glob(f"{family}-*") if state else ():
        with contextlib.suppress(OSError):
            if state in (folder / _STATES).read_text(encoding="utf-8").split():
                return folder
    return None


def _is_in_use(folder: Path) -> bool:
    """Return whether a process has a copy open, or used it within the hour."""
    try:
        if time.time() - folder.stat().st_mtime < UNUSED_SECONDS:
            return True
        for path in folder.glob("*.rec"):
            with path.open("r+b") as file:
                if not lock_surely(file):  # readers lock it, each together with all the others
                    return True
    except FileNotFoundError:  # another process has just removed it
        return False
    except OSError:  # another user's
        return True
    return False
