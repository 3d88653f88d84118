"""What a folder of classes holds: names, labels, sizes and times, in an order that never varies.

A class is a folder; all images below it, at any depth, are its own. A folder that holds ``train`` and perhaps ``val``
(also ``valid``, ``validation``) and ``test``, each with class folders, is taken apart into those; without a ``val``,
``test`` is the validation set. Classes and files are sorted by code point, as ``torchvision.datasets.ImageFolder``
does, so that labels agree with it. Links are followed, never in a circle. Hidden files and the droppings of file
managers are ignored; other files are passed over and told.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from steadytrain.errors import DataError, did_you_mean
from steadytrain.records.pieces import Pieces

SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .bmp .gif .webp .tif .tiff .ppm .pgm .pbm .pnm .avif".split()  # noqa: SIM905
)
SPLITS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}

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
    """

    split: str
    root: Path
    classes: tuple[str, ...]
    names: list[str]
    labels: NDArray[np.int64] | NDArray[np.float32]
    sizes: NDArray[np.int64]
    times: NDArray[np.int64]
    ids: NDArray[np.int64] | None = None
    passed_over: list[str] = field(default_factory=list)
    pieces: Pieces | None = None

    def __len__(self) -> int:
        return len(self.names)

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
    return os.path.splitext(name)[1].lower() in SUFFIXES  # noqa: PTH122 - called a million times


@dataclass
class _Found:
    """What lies below one folder."""

    files: list[tuple[str, int, int]] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


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
    loose = _Found()
    found: dict[str, _Found] = {}
    for entry in _entries(folder):
        if _is_folder(entry):
            name = unicodedata.normalize("NFC", shown(entry.name))
            if name in found:
                raise DataError(f"{folder} holds two folders that are both named {name}: merge them")
            found[name] = _walk(folder / entry.name, source)
        else:
            loose.others.append(os.path.relpath(entry.path, source))
    _require_images(folder, found, loose)
    names = tuple(classes) if classes is not None else tuple(sorted(found))
    _require_classes(folder, found, names, given=classes is not None)
    files = [file for name in names if name in found for file in found[name].files]
    per_class = [len(found[name].files) if name in found else 0 for name in names]
    return Listing(
        split=split,
        root=source,
        classes=names,
        names=[name for name, _, _ in files],
        labels=np.repeat(np.arange(len(names)), per_class),
        sizes=np.array([size for _, size, _ in files], np.int64),
        times=np.array([time for _, _, time in files], np.int64),
        passed_over=[*loose.others, *(name for part in found.values() for name in part.others)],
    )


def _require_images(folder: Path, found: dict[str, _Found], loose: _Found) -> None:
    if any(part.files for part in found.values()):
        return
    if any(is_image(name) for name in loose.others):
        raise DataError(
            f"the images in {folder} are in no class: put those of each class into a folder of its own"
            f" ({folder.name}/cat/1.jpg), or give a .lst with their labels"
        )
    raise DataError(f"{folder} holds no images: give a folder with one folder of images for each class, or a .lst")


def _require_classes(folder: Path, found: dict[str, _Found], names: tuple[str, ...], *, given: bool) -> None:
    unknown = sorted(name for name, part in found.items() if name not in names and part.files)
    if unknown:
        hint = did_you_mean(unknown[0], names)
        raise DataError(
            f"{folder} holds classes that the class list lacks: {_few(unknown)}.{hint}"
            f" Remove them, or use the list of a set that has them (the list: {_few(names)})"
        )
    if given:
        return
    empty = sorted(name for name, part in found.items() if not part.files)
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
    return [entry.name for entry in _entries(folder) if _is_folder(entry)]


def _entries(folder: Path | str) -> list[os.DirEntry[str]]:
    """What a folder holds, sorted, without what is ignored."""
    try:
        with os.scandir(folder) as entries:
            return sorted((e for e in entries if not is_ignored(e.name)), key=lambda entry: entry.name)
    except FileNotFoundError:
        raise DataError(f"there is no folder {folder}") from None
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror}") from error


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _walk(top: Path, source: Path) -> _Found:
    """Every file below ``top``; a folder that is reached twice, by links, counts once."""
    found = _Found()
    cut = len(os.path.join(source, ""))  # noqa: PTH118
    seen: set[tuple[int, int]] = set()
    waiting = [str(top)]
    while waiting:
        folder = waiting.pop()
        about = os.stat(folder)  # noqa: PTH116
        if (about.st_dev, about.st_ino) in seen:
            continue
        seen.add((about.st_dev, about.st_ino))
        inner = []
        for entry in _entries(folder):
            if _is_folder(entry):
                inner.append(entry.path)
            elif is_image(entry.name):
                found.files.append((entry.path[cut:], *_size_and_time(entry)))
            else:
                found.others.append(entry.path[cut:])
        waiting += reversed(inner)
    return found


def _size_and_time(entry: os.DirEntry[str]) -> tuple[int, int]:
    try:
        about = entry.stat()
    except OSError:  # a link that leads nowhere: told when it is read
        return -1, 0
    return about.st_size, about.st_mtime_ns
