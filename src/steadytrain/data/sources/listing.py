"""What a folder of classes holds: names, labels, sizes and times, in an order that never varies.

A class is a folder; all images below it, at any depth, are its own. A folder that holds ``train`` (or ``training``) and
perhaps ``val`` (also ``valid``, ``validation``, ``dev``) and ``test`` (or ``testing``), each with class folders, is
taken apart into those; without a ``val``, ``test`` is the validation set. Classes and files are sorted by code point,
as ``torchvision.datasets.ImageFolder`` does, so that labels agree with it. Links are followed, but never in a circle,
and never up to a folder that the class lies in. Hidden files and the droppings of file managers are ignored; other
files are passed over and told.
"""

from __future__ import annotations

import os
import unicodedata
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.data.sources.names import Names
from steadytrain.data.sources.pieces import Piece, Pieces
from steadytrain.errors import DataError, did_you_mean

SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .bmp .gif .webp .tif .tiff .ppm .pgm .pbm .pnm .avif".split()  # noqa: SIM905
)
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}

PORTION_FILES = 32

_PORTION_BYTES = 1 << 19
_IGNORED = frozenset(["thumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin", "lost+found"])


@dataclass(frozen=True, eq=False)
class Listing:
    """The files of one record file to be.

    Args:
        split: ``train``, ``val``, ``test``, or empty when the source is not split.
        root: the folder that ``names`` are relative to.
        classes: names in the order of their labels; empty for label vectors.
        names: of the files, as they are below ``root``.
        labels: int64[N], or float32[N, L] for label vectors.
        sizes: int64[N] bytes; -1 where the file could not be looked at.
        times: int64[N] nanoseconds, when the file was last changed.
        ids: int64[N] for the records' headers; None numbers them from 0 as they are written.
        passed_over: names of files without the suffix of an image.
        pieces: where the bytes lie, for images that are no files of their own; ``names`` then only name them, and
            ``times`` are those of the files that hold them.
        label_names: of the columns of label vectors, where the source tells.
    """

    split: str
    root: Path
    classes: tuple[str, ...]
    names: Sequence[str]
    labels: NDArray[np.int64] | NDArray[np.float32]
    sizes: NDArray[np.int64]
    times: NDArray[np.int64]
    ids: NDArray[np.int64] | None = None
    passed_over: Sequence[str] = ()
    pieces: Pieces | None = None
    label_names: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.names)

    def portions(self, start: int = 0) -> Iterator[tuple[int, int]]:
        """The images from ``start`` on as pairs of a first and an end, each for one worker to do at a time.

        A portion has half a megabyte: neither many small images nor a few large ones then stall anybody.
        """
        size = 0
        for end in range(start + 1, len(self) + 1):
            size += int(self.sizes[end - 1])
            if end == len(self) or end - start == PORTION_FILES or size >= _PORTION_BYTES:
                yield start, end
                start, size = end, 0

    def places(self, start: int, stop: int) -> list[str | Piece]:
        """Where the bytes of the images ``start`` to ``stop - 1`` lie: in files of their own, or inside others."""
        if self.pieces is not None:
            return [self.pieces[number] for number in range(start, stop)]
        root = os.path.join(self.root, "")  # noqa: PTH118 - a million names
        return [name if os.path.isabs(name) else root + name for name in self.names[start:stop]]  # noqa: PTH117

    def counts(self) -> tuple[int, ...]:
        """Files of each class."""
        if not self.classes:
            return ()
        return tuple(np.bincount(self.labels.astype(np.int64), minlength=len(self.classes)).tolist())


def list_folder(source: Path, *, classes: Sequence[str] | None = None) -> list[Listing]:
    """List a folder of classes, or one of splits.

    Args:
        source: the folder.
        classes: the class list and its order; None takes the folders found (those of ``train`` where there are splits).

    Raises:
        DataError: not a folder, no images, a class without images, one class only, or a class not in the list.
    """
    splits = _splits(source)
    if not splits:
        return [_list(source, "", source, classes)]
    listings: list[Listing] = []
    for split, folder in splits.items():
        # The others follow the training set's list, in which a class may well be absent from them.
        listings.append(_list(folder, split, source, classes or (listings[0].classes if listings else None)))
    return listings


def shown(name: str) -> str:
    r"""A file's name as it can be printed and stored: bytes that are no UTF-8 are spelt out.

    >>> print(shown("caf\udce9.jpg"))
    caf\xe9.jpg
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def is_ignored(name: str) -> bool:
    """Whether a file or a folder is no part of anybody's data: hidden, or left by a file manager."""
    return name.startswith(".") or name.casefold() in _IGNORED


def is_image(name: str) -> bool:
    """Whether a file's name ends as an image's does."""
    stem, dot, suffix = name.rpartition(".")  # called a million times
    return bool(stem) and (dot + suffix).lower() in SUFFIXES


@dataclass
class _Found:
    """What lies below folders, in columns: of a million files no object is kept."""

    names: Names = field(default_factory=Names)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    times: array[int] = field(default_factory=lambda: array("q"))
    others: Names = field(default_factory=Names)

    def add(self, path: str, name: str) -> None:
        """Take in one file, which lies at ``path``."""
        self.names.append(name)
        try:
            about = os.stat(path)  # noqa: PTH116 - a million times
        except OSError:  # a link that leads nowhere: told when it is read
            self.sizes.append(-1)
            self.times.append(0)
            return
        self.sizes.append(about.st_size)
        self.times.append(about.st_mtime_ns)


def _splits(source: Path) -> dict[str, Path]:
    """The folders of a source that is split, train first; nothing for a source of classes."""
    found: dict[str, Path] = {}
    folders = _folders(source)
    for name in folders:
        split = SPLITS.get(name.casefold())
        if split in found:
            raise DataError(f"{source} holds both {found[split].name} and {name}: keep one of them")
        if split:
            found[split] = source / name
    # A class may be called "train": splits hold folders, and "train" stands beside another split or alone.
    if "train" not in found or (len(found) == 1 < len(folders)) or not _folders(found["train"]):
        return {}
    if "val" not in found and "test" in found:
        found["val"] = found.pop("test")  # as CIFAR and MNIST are handed out: what is not trained on validates
    return {split: found[split] for split in ("train", "val", "test") if split in found}


def _list(folder: Path, split: str, source: Path, classes: Sequence[str] | None) -> Listing:
    inner, files = _entries(folder)
    folders = _named(folder, inner)
    found = _Found(others=Names(os.path.relpath(folder / name, source) for name in files))
    given = classes is not None
    names = tuple(classes) if classes is not None else tuple(sorted(folders))
    counts = np.array([_walk(folder / folders[name], source, found) if name in folders else 0 for name in names])
    unlisted = _Found()
    others = {name: _walk(folder / folders[name], source, unlisted) for name in sorted(folders.keys() - set(names))}
    if not len(found.names) and not len(unlisted.names):
        raise _without_images(folder, any(map(is_image, files)))
    _refuse_unlisted(folder, [name for name, count in others.items() if count], names)
    if not given:
        _require_classes(folder, names, counts)
    found.others.extend(unlisted.others)
    return Listing(
        split=split,
        root=source,
        classes=names,
        names=found.names,
        labels=np.repeat(np.arange(len(names)), counts),
        sizes=np.frombuffer(found.sizes, np.int64),
        times=np.frombuffer(found.times, np.int64),
        passed_over=found.others,
    )


def _named(folder: Path, inner: Sequence[str]) -> dict[str, str]:
    """Folders by the names of their classes."""
    found: dict[str, str] = {}
    for one in inner:
        name = unicodedata.normalize("NFC", shown(one))
        if name in found:
            raise DataError(f"{folder} holds two folders that are both named {name}: merge them")
        found[name] = one
    return found


def _without_images(folder: Path, loose: bool) -> DataError:
    if loose:
        return DataError(
            f"the images in {folder} are in no class: put those of each class into a folder of its own"
            f" ({folder.name}/cat/1.jpg), or give a .lst with their labels"
        )
    return DataError(f"{folder} holds no images: give a folder with one folder of images for each class, or a .lst")


def _refuse_unlisted(folder: Path, unlisted: Sequence[str], names: tuple[str, ...]) -> None:
    if unlisted:
        hint = did_you_mean(unlisted[0], names)
        raise DataError(
            f"{folder} holds classes that the class list lacks: {_few(unlisted)}.{hint}"
            f" Remove them, or use the list of a set that has them (the list: {_few(names)})"
        )


def _require_classes(folder: Path, names: tuple[str, ...], counts: NDArray[np.int64]) -> None:
    empty = [name for name, count in zip(names, counts.tolist(), strict=True) if not count]
    if empty:
        what = "class folders hold" if len(empty) > 1 else "class folder holds"
        raise DataError(f"{len(empty)} {what} no image in {folder} ({_few(empty)}): add images, or remove the folder")
    if len(names) < 2:
        inner = _folders(folder / names[0]) if (folder / names[0]).is_dir() else []
        hint = f" (did you mean {folder / names[0]}? It holds {_few(inner)})" if len(inner) > 1 else ""
        raise DataError(f"{folder} holds only one class, {names[0]}: a classifier needs two or more{hint}")


def _few(names: Sequence[str], most: int = 5) -> str:
    listed = ", ".join(names[:most])
    return f"{listed} and {len(names) - most} more" if len(names) > most else listed


def _folders(folder: Path) -> list[str]:
    return _entries(folder)[0]


def _entries(folder: Path | str) -> tuple[list[str], list[str]]:
    """Names of the folders and of the files in a folder, sorted, without what is ignored."""
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not is_ignored(entry.name):
                    (folders if _is_folder(entry) else files).append(entry.name)
    except FileNotFoundError:
        raise DataError(f"there is no folder {folder}") from None
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror}") from error
    return sorted(folders), sorted(files)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _walk(top: Path, source: Path, found: _Found) -> int:
    """Add every file below ``top`` to ``found``; a folder that is reached twice, by links, counts once.

    One that holds ``top`` itself is not entered: all other classes lie in it.

    Returns the number of images.
    """
    before = len(found.names)
    cut = len(str(top)) - len(os.path.relpath(top, source))  # of "." nothing stands before the names below it
    seen = _above(top, source)
    waiting = [str(top)]
    while waiting:
        folder = waiting.pop()
        about = os.stat(folder)  # noqa: PTH116
        if (about.st_dev, about.st_ino) in seen:
            continue
        seen.add((about.st_dev, about.st_ino))
        folders, files = _entries(folder)
        for name in files:
            path = os.path.join(folder, name)  # noqa: PTH118
            if is_image(name):
                found.add(path, path[cut:])
            else:
                found.others.append(path[cut:])
        waiting += (os.path.join(folder, name) for name in reversed(folders))  # noqa: PTH118
    return len(found.names) - before


def _above(top: Path, source: Path) -> set[tuple[int, int]]:
    """The folders that a class lies in, by device and number: those above it, and all from its source up."""
    inside = Path(os.path.realpath(source), "class")
    about = [os.stat(one) for path in (Path(os.path.realpath(top)), inside) for one in path.parents]  # noqa: PTH116
    return {(one.st_dev, one.st_ino) for one in about}
