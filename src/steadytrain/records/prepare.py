"""Whatever a user names as data, as record files: a ``.rec`` is taken as it is, a folder is packed once into a cache.

The copy is named by the files' names, sizes and times and by the settings, so a change in the folder makes a new one
(and the old one goes). Any number of processes may ask for the same folder at once: one packs, the others wait. A kill
leaves nothing that would be taken for a copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from steadytrain.errors import DataError, StorageError, TooManyBadError, storage_error
from steadytrain.records.card import card_of, read_classes, refuse_other_classes
from steadytrain.records.encode import Settings
from steadytrain.records.listing import Listing
from steadytrain.records.pack import Advance, list_source, mute, pack_listings

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

LAYOUT = 1  # raised when the same folder and settings would be packed into other bytes

Say = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """Record files to train on and to validate with; ``val`` is None where the source has no such part."""

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
    classes: str | Path | Sequence[str] | None = None,
    cache: str | Path | None = None,
    shorter_side: int | None = 256,
    workers: int | None = None,
    say: Say = print_note,
    progress: Advance | None = None,
    say_reused: bool = True,
) -> Prepared:
    """Make data ready to be read.

    Args:
        source: a ``.rec``, a folder of classes, a folder of splits (its ``train`` and ``val`` are used), or a ``.lst``.
        classes: the class list to use, in its order: names, or the path of a card that has them.
        cache: where packed copies lie; None: ``$STEADYTRAIN_CACHE``, else ``steadytrain`` in the user's cache folder.
        shorter_side: larger images are scaled down to it in the copy; None keeps every size.
        workers: processes to pack with; None: one for each core.
        say: takes a line each for what a user should know.
        progress: as for :func:`~steadytrain.records.pack.pack`; not called where nothing is packed.
        say_reused: whether it is worth a line that an earlier copy is used.

    Raises:
        DataError: the data cannot be used, or have other classes than ``classes``.
        TooManyBadError, StorageError: a folder could not be packed.
    """
    card_name = str(classes) if isinstance(classes, str | Path) else "CARD (that of the training set)"
    if classes is None:
        given = None
    else:
        given = read_classes(classes) if isinstance(classes, str | Path) else tuple(classes)
    copies = _Copies(
        Path(cache) if cache is not None else _default_cache(),
        Settings(shorter_side=shorter_side),
        workers,
        say,
        progress or mute,
        say_reused,
    )
    prepared = copies.of(Path(source), given)
    card = card_of(prepared.train)
    if given and card is not None:
        refuse_other_classes(card.classes, given, of=prepared.train, card=card_name)
    return prepared


def _default_cache() -> Path:
    told = os.environ.get("STEADYTRAIN_CACHE")
    if told:
        return Path(told)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steadytrain"


@dataclass(frozen=True)
class _Copies:
    """The packed copies of folders, in one cache."""

    cache: Path
    settings: Settings
    workers: int | None
    say: Say
    progress: Advance
    say_reused: bool

    def of(self, source: Path, classes: tuple[str, ...] | None) -> Prepared:
        """The copy of one source, made if need be; a ``.rec`` is its own."""
        if source.suffix == ".rec" and not source.is_dir():
            if not source.is_file():
                raise DataError(f"there is no file {source}")
            return Prepared(source, None)
        listings = [one for one in list_source(source, classes=classes) if one.split != "test"]
        place = source.resolve()
        asked = self._digest(str(place), json.dumps(classes))
        family = f"{re.sub(r'[^A-Za-z0-9._-]+', '_', place.name)}-{asked[:8]}"
        folder = self.cache / "packed" / f"{family}-{self._digest(*_identity(listings))[:12]}"
        if folder.is_dir():
            if self.say_reused:
                self.say(f"using the packed copy of {source} in {folder}")
        else:
            self._make(source, listings, folder, family)
        files = {one.split: folder / f"data{'-' * bool(one.split)}{one.split}.rec" for one in listings}
        return Prepared(files.get("train") or files[""], files.get("val"))

    def _make(self, source: Path, listings: list[Listing], folder: Path, family: str) -> None:
        part = folder.with_name(f".{family}.part")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with self._alone(folder.with_name(f".{family}.lock"), source):
                if folder.is_dir():
                    return
                # Under the lock, what lies there was left by a kill.
                shutil.rmtree(part, ignore_errors=True)
                self.say(f"packing {source} once into {folder}; later runs reuse it")
                self._pack(source, listings, part)
                part.replace(folder)
                self._remove_older(folder, family)
        except OSError as error:
            raise StorageError(
                f"{storage_error(error, folder)} (the cache: set STEADYTRAIN_CACHE to a folder that can be written,"
                f" or pack it yourself: steady pack {source} OUT)"
            ) from error

    def _pack(self, source: Path, listings: list[Listing], part: Path) -> None:
        try:
            packed = pack_listings(
                listings,
                part / "data.rec",
                self.settings,
                source=str(source.resolve()),
                workers=self.workers,
                progress=self.progress,
                say=self.say,
            )
        except TooManyBadError as error:
            shutil.rmtree(part, ignore_errors=True)
            raise TooManyBadError(f"{error} (steady pack {source} OUT --max-bad N, then use OUT.rec)") from None
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        for file in packed:
            if bad := file.card.rejected:
                told = "; ".join(f"{one.name} ({one.reason})" for one in bad[:3]) + "; ..." * (len(bad) > 3)
                self.say(f"left out {len(bad)} file{'s' * (len(bad) > 1)} that cannot be used: {told}")

    @contextlib.contextmanager
    def _alone(self, lock: Path, source: Path) -> Iterator[None]:
        """Hold the copies of one source; the system lets go of them however this process ends."""
        with lock.open("w") as file:
            if fcntl is not None:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    self.say(f"another process is packing {source}: waiting for it")
                    fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _remove_older(self, folder: Path, family: str) -> None:
        for other in folder.parent.glob(f"{family}-*"):
            if other != folder:
                self.say(f"removing {other}: the copy of an earlier state")
                shutil.rmtree(other, ignore_errors=True)

    def _digest(self, *parts: bytes | str) -> str:
        settings = json.dumps([LAYOUT, self.settings.to_dict()], sort_keys=True)
        digest = hashlib.sha256(settings.encode())
        for part in parts:
            digest.update(b"\0" + (part.encode("utf-8", "surrogateescape") if isinstance(part, str) else part))
        return digest.hexdigest()


def _identity(listings: list[Listing]) -> Iterator[bytes]:
    """All that says what would be packed."""
    for one in listings:
        yield json.dumps([one.split, one.classes]).encode()
        yield "\0".join(one.names).encode("utf-8", "surrogateescape")
        for column in (one.labels, one.sizes, one.times, one.ids):
            yield b"" if column is None else column.tobytes()
