"""Whatever a user names as data, as record files: a ``.rec`` is taken as it is, all else is packed once into a cache.

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
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISDIR
from typing import Literal

from steadytrain.data.packing.encode import Settings
from steadytrain.data.packing.pack import Advance, digest, identity, in_files, mute, pack_listings
from steadytrain.data.packing.scratch import scratch_beside
from steadytrain.data.recordio.card import card_for, read_classes, record_files, refuse_other_classes
from steadytrain.data.sources import filenames
from steadytrain.data.sources.filenames import group_by_split
from steadytrain.data.sources.find import find
from steadytrain.data.sources.listing import Listing
from steadytrain.data.sources.select import Selection
from steadytrain.errors import DataError, StorageError, TooManyBadError, did_you_mean, storage_error
from steadytrain.machine.facts import cache_folder

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

Say = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """Record files to train on and to validate with; ``val`` is None where the source has no such part.

    Either may name several files, as ``OUT-{00000..00003}-of-00004.rec`` does; :class:`Records` opens those as one.
    """

    train: Path
    val: Path | None

    def only(self, split: Literal["train", "val"]) -> Path:
        """The one file for a purpose: ``val`` is what there is for validation, else all there is."""
        return self.val if split == "val" and self.val is not None else self.train


def print_note(text: str) -> None:
    """One line on standard error."""
    print(text, file=sys.stderr, flush=True)


def prepare(
    source: str | Path,
    *,
    root: str | Path | None = None,
    labels: str | Path | None = None,
    classes: str | Path | Sequence[str] | None = None,
    one_class: bool = False,
    only: Literal["val"] | None = None,
    cache: str | Path | None = None,
    shorter_side: int | None = 256,
    workers: int | None = None,
    say: Say = print_note,
    progress: Advance | None = None,
    say_reused: bool = True,
) -> Prepared:
    """Make data ready to be read.

    Args:
        source: a ``.rec`` or several by braces and wildcards, or whatever else ``pack``
            takes; of a source that is split ``train`` and ``val`` are used.
        root, labels: as for :func:`~steadytrain.data.packing.pack.pack`.
        classes: the class list to use, in its order: names, or the path of a card that has them.
        one_class: refuse label vectors, before anything is packed.
        only: of a source that is split, pack no more than this part, unless a copy of all is there already.
        cache: where packed copies lie; None: ``$STEADYTRAIN_CACHE``, else ``steadytrain`` in the user's cache folder.
        shorter_side: larger images are scaled down to it in the copy; None keeps every size.
        workers: processes to pack with; None: one for each core.
        say: takes a line each for what a user should know.
        progress: as for :func:`~steadytrain.data.packing.pack.pack`; not called where nothing is packed.
        say_reused: whether it is worth a line that an earlier copy is used.

    Raises:
        DataError: the data cannot be used, or have other classes than ``classes``.
        TooManyBadError, StorageError: a source could not be packed.
    """
    card_name = str(classes) if isinstance(classes, str | Path) else "CARD (that of the training set)"
    if classes is None:
        given = None
    else:
        given = read_classes(classes) if isinstance(classes, str | Path) else tuple(classes)
    prepared = _as_records(str(source), root, labels)
    if prepared is None:
        asked = _Asked(
            str(source),
            None if root is None else Path(root),
            None if labels is None else Path(labels),
            given,
            one_class,
            only,
            Settings(shorter_side=shorter_side),
        )
        place = Path(cache) if cache is not None else default_cache()
        prepared = _Copies(place / "packed", workers, say, progress or mute, say_reused).of(asked)
    card = card_for(prepared.train)
    if given and card is not None:
        refuse_other_classes(card.classes, given, of=prepared.train, card=card_name)
    return prepared


def default_cache() -> Path:
    """``$STEADYTRAIN_CACHE``, else ``steadytrain`` in the user's cache folder.

    Raises:
        StorageError: this user has no home.
    """
    found = cache_folder()
    if found is None:
        raise StorageError("this user has no home folder for a cache: set STEADYTRAIN_CACHE to a folder")
    return found


def _as_records(source: str, root: object, labels: object) -> Prepared | None:
    """Record files as they are; None for whatever has to be packed."""
    if Path(source).suffix != ".rec" or Path(source).is_dir():
        return None
    if root is not None or labels is not None:
        option = "--root" if root is not None else "--labels"
        raise DataError(f"{source} has its labels in it: drop {option}")
    sets = _record_sets(source)
    return Prepared(sets.get("train") or next(iter(sets.values())), sets.get("val") if len(sets) > 1 else None)


def _record_sets(source: str) -> dict[str, Path]:
    """The record files of a source by split: ``OUT-{train,val}.rec`` has two, all others are one set, named ""."""
    files = record_files(source)
    if not files[0].exists():
        beside = [one.name for one in files[0].parent.glob("*.rec")]
        raise DataError(f"there is no file {source}.{did_you_mean(files[0].name, beside)}")
    groups = group_by_split(files, [one.name for one in files], source)
    if len(groups) == 1:
        return {"": Path(source)}
    return {split: _together(group) for split, group in groups.items()}


def _together(files: Sequence[Path]) -> Path:
    """One name for several files."""
    return files[0] if len(files) == 1 else Path("{" + ",".join(map(str, files)) + "}")


@dataclass(frozen=True)
class _Asked:
    """What is to be packed, and how."""

    source: str
    root: Path | None
    labels: Path | None
    classes: tuple[str, ...] | None
    one_class: bool
    only: str | None
    settings: Settings

    @property
    def family(self) -> str:
        """Names all copies of this source by these settings, whatever state it was in."""
        place = Path(self.source).resolve()
        options = [None if one is None else str(one.resolve()) for one in (self.root, self.labels)]
        told = json.dumps([str(place), *options, self.classes]).encode()
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", place.name)[-40:]
        return f"{stem}-{digest(self.settings, [told])[:8]}"


@dataclass(frozen=True)
class _Copies:
    """The packed copies in one cache."""

    place: Path
    workers: int | None
    say: Say
    progress: Advance
    say_reused: bool

    def of(self, asked: _Asked) -> Prepared:
        """The copy of one source, made if need be."""
        family = asked.family
        state = state_of(asked.source, asked.labels)
        folder = noted(self.place, family, state)
        if folder is None:
            with self._scratch(asked) as scratch:
                listings = self._list(asked, scratch)
                state = state if _in_containers(listings) else ""
                folder = self._folder(asked, listings, scratch)
                part = [one for one in listings if one.split == asked.only]
                if part and not folder.is_dir():
                    listings, state = part, ""  # a copy of this part alone says nothing of the rest
                    folder = self._folder(asked, listings, scratch)
                if not folder.is_dir():
                    self._make(asked, listings, folder, scratch)
                    return self._use(folder, state)
        if self.say_reused:
            self.say(f"using the packed copy of {asked.source} in {folder}")
        return self._use(folder, state)

    def _folder(self, asked: _Asked, listings: list[Listing], scratch: Path) -> Path:
        told = digest(asked.settings, identity(listings, scratch=scratch))
        return self.place / f"{asked.family}-{told[:12]}"

    def _use(self, folder: Path, state: str) -> Prepared:
        note(folder, state)
        files = {split: folder / f"data{'-' * bool(split)}{split}.rec" for split in ("", "train", "val")}
        there = {split: path for split, path in files.items() if path.is_file()}
        first = there.get("train") or there.get("") or there["val"]
        return Prepared(first, there.get("val"))

    def _list(self, asked: _Asked, scratch: Path) -> list[Listing]:
        try:
            listings = find(
                asked.source,
                root=asked.root,
                labels=asked.labels,
                classes=asked.classes,
                scratch=scratch,
                say=self.say,
            )
        except DataError as error:
            # Every command that takes data has --root and --labels.
            has_option = "--classes" in str(error)
            raise DataError(f"{error}{f' (steady pack {asked.source} OUT has it)' * has_option}") from error
        if asked.one_class and listings[0].labels.ndim > 1:
            raise DataError(
                f"{asked.source} has {listings[0].labels.shape[1]} labels for each image: training and evaluation need"
                " one class for each"
            )
        return [one for one in Selection().of(listings, self.say) if one.split != "test"]

    @contextlib.contextmanager
    def _scratch(self, asked: _Asked) -> Iterator[Path]:
        """Room to decompress: in the cache, or where that cannot be written (there may be a copy in it) elsewhere."""
        with contextlib.ExitStack() as stack:
            try:
                scratch = stack.enter_context(scratch_beside(self.place / asked.family))
            except StorageError as error:
                if not self.place.is_dir():
                    raise _no_cache(error, asked.source) from error
                scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="steadytrain-")))
            yield scratch

    def _make(self, asked: _Asked, listings: list[Listing], folder: Path, scratch: Path) -> None:
        source, family = asked.source, asked.family
        part = folder.with_name(f".{folder.name}.part")
        try:
            with self._alone(folder.with_name(f".{family}.lock"), source):
                if folder.is_dir():
                    return
                for other in self.place.glob(f".{family}-*.part"):
                    if other != part:  # the source has changed since a kill
                        shutil.rmtree(other, ignore_errors=True)
                self.say(f"packing {source} once into {folder}; later runs reuse it")
                self._pack(asked, listings, part, scratch)
                part.replace(folder)
                remove_older(folder, family, self.say)
        except OSError as error:
            raise _no_cache(storage_error(error, folder), source) from error

    def _pack(self, asked: _Asked, listings: list[Listing], part: Path, scratch: Path) -> None:
        try:
            packed = pack_listings(
                in_files(listings, part / "data.rec"),
                asked.settings,
                source=str(Path(asked.source).resolve()),
                scratch=scratch,
                workers=self.workers,
                force=True,
                progress=self.progress,
                say=self.say,
            )
        except TooManyBadError as error:
            raise TooManyBadError(f"{error} (steady pack {asked.source} OUT --max-bad N, then use OUT.rec)") from None
        finally:
            with contextlib.suppress(OSError):  # nothing in it, or what the next one goes on from
                part.rmdir()
        for file in packed:
            if bad := file.card.rejected:
                told = "; ".join(f"{one.name} ({one.reason})" for one in bad[:3]) + "; ..." * (len(bad) > 3)
                self.say(f"left out {len(bad)} file{'s' * (len(bad) > 1)} that cannot be used: {told}")

    @contextlib.contextmanager
    def _alone(self, lock: Path, source: str) -> Iterator[None]:
        """Hold the copies of one source; the system lets go of them however this process ends."""
        with lock.open("w") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.say(f"another process is packing {source}: waiting for it")
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _no_cache(error: StorageError, source: str) -> StorageError:
    return StorageError(
        f"{error} (the cache: set STEADYTRAIN_CACHE to a folder that can be written, or pack it yourself: steady pack"
        f" {source} OUT)"
    )


def _in_containers(listings: Sequence[Listing]) -> bool:
    """Whether all images lie inside the files that were named, so that those files' state says all."""
    return all(one.pieces is not None for one in listings)


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

UNUSED_SECONDS = 3600.0
"""How long a copy of an earlier state stays after somebody asked for it."""

_MOST_FILES = 10_000
_STATES = "states.txt"


def state_of(source: str, labels: Path | None) -> str:
    """Names, sizes and times of the files that a source is, and of those beside it, as a digest.

    Empty for folders of folders: nothing short of listing them says whether they have changed.
    """
    path = Path(source)
    try:
        folder = path if path.is_dir() else path.parent
        named = filenames.expand(source) if not path.exists() and filenames.is_pattern(source) else []
        files = sorted({*named, *folder.iterdir(), *([] if labels is None else [labels])})
        if len(files) > _MOST_FILES or (path.is_dir() and any(one.is_dir() for one in files)):
            return ""
        about = [
            (str(one), told.st_size, told.st_mtime_ns) for one in files if not S_ISDIR((told := one.stat()).st_mode)
        ]
    except (OSError, DataError):  # told when it is listed
        return ""
    return hashlib.sha256(repr(about).encode("utf-8", "surrogateescape")).hexdigest()


def noted(place: Path, family: str, state: str) -> Path | None:
    """The copy that was made of a source in this state; None where it has to be listed."""
    for folder in place.glob(f"{family}-*") if state else ():
        with contextlib.suppress(OSError):
            if state in (folder / _STATES).read_text(encoding="utf-8").split():
                return folder
    return None


def note(folder: Path, state: str) -> None:
    """Remember that a copy is in use, and what state of its source it is of, if that is known."""
    with contextlib.suppress(OSError):  # a cache may be there to be read only
        if state and noted(folder.parent, folder.name.rpartition("-")[0], state) is None:
            with (folder / _STATES).open("a", encoding="utf-8") as file:
                file.write(state + "\n")
        os.utime(folder)


def remove_older(folder: Path, family: str, say: Callable[[str], None]) -> None:
    """Remove copies of earlier states of a source, those apart that a process has open or asked for within the hour."""
    for other in folder.parent.glob(f"{family}-*"):
        if other != folder and not _is_in_use(other):
            say(f"removing {other}: the copy of an earlier state")
            shutil.rmtree(other, ignore_errors=True)


def _is_in_use(folder: Path) -> bool:
    try:
        if time.time() - folder.stat().st_mtime < UNUSED_SECONDS:
            return True
        return any(_is_open(path) for path in folder.glob("*.rec"))
    except OSError:
        return False


def _is_open(path: Path) -> bool:
    """Whether a process holds a record file: readers lock it, each together with all the others."""
    if fcntl is None:
        return False
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
