"""Folders of classes, on a disk or inside an archive, as listings whose order never varies.

A class is a folder; all images below it, at any depth, belong to it. A folder that holds ``train`` (or ``training``)
and perhaps ``val`` (also ``valid``, ``validation``, ``dev``) and ``test`` (or ``testing``), each with class folders, is
split into those; without a ``val``, ``test`` is the validation set. Classes and files are sorted by code point, as
``torchvision.datasets.ImageFolder`` does, so that labels agree with it. Links are followed, but never in a circle, and
never up to a folder that the class lies in. Hidden files and the leftovers of file managers are ignored; other files
are passed over and listed as such.

Inside an archive, folders that everything lies in are stripped first. Names are taken apart and shown, never used as
paths, so one with ``..`` or a leading ``/`` leads nowhere.
"""

from __future__ import annotations

import os
import unicodedata
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from steadytrain.data.sources.archives import Members
from steadytrain.data.sources.filenames import SPLITS, few, is_ignored, is_image, printable
from steadytrain.data.sources.listing import Listing, Names, stat_file
from steadytrain.errors import DataError, did_you_mean

MOST_LEVELS = 100


def list_folder(source: Path, *, classes: Sequence[str] | None = None) -> list[Listing]:
    """List a folder of classes, or one of splits.

    Args:
        source: the folder.
        classes: the class list and its order; None takes the folders found (those of ``train`` where there are splits).

    Raises:
        DataError: not a folder, no images, a class without images, one class only, or a class not in the list.
    """
    splits = _find_splits(read_entries(source)[0], lambda name: bool(read_entries(source / name)[0]), str(source))
    listings: list[Listing] = []
    for split, name in (splits or {"": ""}).items():
        # The others follow the training set's list, in which a class may well be absent from them.
        given = classes or (listings[0].classes if listings else None)
        listings.append(_list_classes(source / name, split, source, given))
    return listings


def read_entries(folder: Path | str) -> tuple[list[str], list[str]]:
    """Names of the folders and of the files in a folder, sorted, without what is ignored."""
    folders: list[str] = []
    files: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if is_ignored(entry.name):
                    continue
                try:
                    is_folder = entry.is_dir()
                except OSError:  # a link to itself
                    is_folder = False
                (folders if is_folder else files).append(entry.name)
    except FileNotFoundError:
        raise DataError(f"there is no folder {folder}") from None
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror}") from error
    return sorted(folders), sorted(files)


def _find_splits(folders: Sequence[str], holds_folders: Callable[[str], bool], where: str) -> dict[str, str]:
    """The folders that are splits, training set first; none where the folders are classes."""
    splits: dict[str, str] = {}
    for name in sorted(folders):
        split = SPLITS.get(name.casefold())
        if split in splits:
            raise DataError(f"{where} holds both {splits[split]} and {name}: keep one of them")
        if split:
            splits[split] = name
    # A class may be called "train": splits hold folders, and "train" stands beside another split or alone.
    if "train" not in splits or len(splits) == 1 < len(folders) or not holds_folders(splits["train"]):
        return {}
    if "val" not in splits and "test" in splits:
        splits["val"] = splits.pop("test")  # as CIFAR and MNIST are handed out: what is not trained on validates
    return {split: splits[split] for split in ("train", "val", "test") if split in splits}


def _by_class_name(folders: Sequence[str], where: str) -> dict[str, str]:
    """Folder names by the names of their classes, which are composed Unicode."""
    named: dict[str, str] = {}
    for folder in folders:
        name = unicodedata.normalize("NFC", printable(folder))
        if name in named:
            raise DataError(f"{where} holds two folders that are both named {name}: merge them")
        named[name] = folder
    return named


def _check_classes(
    counts: Mapping[str, int],
    names: Sequence[str],
    where: str,
    *,
    given: bool,
    loose: bool,
    in_archive: bool,
    inner: Sequence[str] = (),
) -> None:
    """Refuse folders that make no data set.

    Args:
        counts: images of each class, also of those that the class list lacks.
        names: the class list.
        where: the folders are, for messages.
        given: whether the class list was given, and not found.
        loose: whether images lie beside the folders.
        in_archive: whether this is inside an archive.
        inner: folders in the only class, which may be the classes meant.
    """
    if not any(counts.values()):
        wanted = f"{'an archive' if in_archive else 'a folder'} with one folder of images for each class"
        if not loose:
            raise DataError(f"{where} holds no images: give {wanted}{'' if in_archive else ', or a .lst'}")
        remedy = (
            f"give their labels in a file with --labels, or {wanted}"
            if in_archive
            else f"put those of each class into a folder of its own ({Path(where).name}/cat/1.jpg), or give a .lst with"
            " their labels"
        )
        raise DataError(f"the images in {where} are in no class: {remedy}")
    if unlisted := sorted(name for name, count in counts.items() if count and name not in names):
        raise DataError(
            f"{where} holds classes that the class list lacks: {few(unlisted)}.{did_you_mean(unlisted[0], names)}"
            f" Remove them, or use the list of a set that has them (the list: {few(names)})"
        )
    if given:
        return
    if empty := [name for name in names if not counts[name]]:
        what = "class folders hold" if len(empty) > 1 else "class folder holds"
        raise DataError(f"{len(empty)} {what} no image in {where} ({few(empty)}): add images, or remove the folder")
    if len(names) < 2:
        hint = f" (did you mean {Path(where) / names[0]}? It holds {few(inner)})" if len(inner) > 1 else ""
        raise DataError(f"{where} holds only one class, {names[0]}: a classifier needs two or more{hint}")


@dataclass
class _Files:
    """Files below folders, in columns: of a million files no object is kept."""

    names: Names = field(default_factory=Names)
    sizes: array[int] = field(default_factory=lambda: array("q"))
    times: array[int] = field(default_factory=lambda: array("q"))
    others: Names = field(default_factory=Names)

    def walk(self, top: Path, source: Path) -> int:
        """Add every file below ``top``; return the number of images.

        A folder that is reached twice, by links, counts once. One that holds ``top`` itself is not entered: all other
        classes lie in it.
        """
        before = len(self.names)
        prefix = len(str(top)) - len(os.path.relpath(top, source))  # of "." nothing stands before the names below it
        above = (Path(os.path.realpath(top)), Path(os.path.realpath(source), "class"))
        seen = {(status.st_dev, status.st_ino) for path in above for status in map(os.stat, path.parents)}
        waiting = [str(top)]
        while waiting:
            folder = waiting.pop()
            status = os.stat(folder)  # noqa: PTH116
            if (status.st_dev, status.st_ino) in seen:
                continue
            seen.add((status.st_dev, status.st_ino))
            folders, files = read_entries(folder)
            for name in files:
                path = os.path.join(folder, name)  # noqa: PTH118
                if is_image(name):
                    self.names.append(path[prefix:])
                    size, time = stat_file(path)
                    self.sizes.append(size)
                    self.times.append(time)
                else:
                    self.others.append(path[prefix:])
            waiting += (os.path.join(folder, name) for name in reversed(folders))  # noqa: PTH118
        return len(self.names) - before


def _list_classes(folder: Path, split: str, source: Path, given: Sequence[str] | None) -> Listing:
    folders, loose = read_entries(folder)
    by_name = _by_class_name(folders, str(folder))
    names = tuple(given) if given is not None else tuple(sorted(by_name))
    files = _Files(others=Names(os.path.relpath(folder / name, source) for name in loose))
    counts = dict.fromkeys(names, 0)
    for name in (*names, *sorted(by_name.keys() - counts.keys())):
        if name in by_name:
            counts[name] = files.walk(folder / by_name[name], source)
    inner = read_entries(folder / names[0])[0] if len(names) == 1 and (folder / names[0]).is_dir() else []
    _check_classes(
        counts,
        names,
        str(folder),
        given=given is not None,
        loose=any(map(is_image, loose)),
        in_archive=False,
        inner=inner,
    )
    return Listing(
        split=split,
        root=source,
        classes=names,
        names=files.names,
        labels=np.repeat(np.arange(len(names)), [counts[name] for name in names]),
        sizes=np.frombuffer(files.sizes, np.int64),
        times=np.frombuffer(files.times, np.int64),
        passed_over=files.others,
    )


def list_images(folder: Path) -> Listing:
    """List all images below a folder, in no class."""
    names, others = Names(), Names()
    sizes = array("q")
    for top, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not is_ignored(name))
        for file in sorted(name for name in files if not is_ignored(name)):
            path = os.path.join(top, file)  # noqa: PTH118
            (names if is_image(file) else others).append(os.path.relpath(path, folder))
            if is_image(file):
                sizes.append(stat_file(path)[0])
    zeros = np.zeros(len(names), np.int64)
    return Listing("", folder, (), names, zeros, np.array(sizes, np.int64), zeros, passed_over=others)


@dataclass
class Folder:
    """One folder of an archive: the rows of its images and of its other files, and the folders in it."""

    name: str = ""
    folders: dict[str, Folder] = field(default_factory=dict)
    images: array[int] = field(default_factory=lambda: array("q"))
    others: array[int] = field(default_factory=lambda: array("q"))

    def walk(self) -> Iterator[Folder]:
        """This folder and all below it, each before those in it, by code point."""
        waiting = [self]
        while waiting:
            folder = waiting.pop()
            yield folder
            waiting += (folder.folders[name] for name in sorted(folder.folders, reverse=True))

    @property
    def is_flat(self) -> bool:
        """Whether images lie in one folder without classes: at the top, or in the only folder that has any."""
        holding = [folder for folder in self.walk() if folder.images]
        return len(holding) == 1 and len(self.folders) <= 1 and not self.splits("")

    def splits(self, where: str) -> dict[str, str]:
        """The folders that are splits, if they are."""
        return _find_splits(list(self.folders), lambda name: bool(self.folders[name].folders), where)


def build_tree(members: Members, *, strip: bool = True) -> Folder:
    """The folders that the members' names describe, without hidden ones and the leftovers of file managers.

    Args:
        members: of archives.
        strip: go down through folders that hold nothing but one more folder: ``images/`` around the classes.

    Raises:
        DataError: folders more than 100 deep.
    """
    top = Folder()
    known: dict[str, Folder | None] = {"": top}
    for name in sorted(members.folders):
        _make_folder(name.rstrip("/"), top, known)
    for row, name in enumerate(members.names):
        path, _, base = name.rpartition("/")
        folder = known[path] if path in known else _make_folder(path, top, known)
        if folder is not None and not is_ignored(base):
            (folder.images if is_image(base) else folder.others).append(row)
    while strip and len(top.folders) == 1 and not top.images and not top.splits(top.name):
        inner = next(iter(top.folders.values()))
        if inner.images or not inner.folders:
            break
        top = inner
    return top


def _make_folder(path: str, top: Folder, known: dict[str, Folder | None]) -> Folder | None:
    """The folder that a path names, made if need be; None where it is ignored."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if len(parts) > MOST_LEVELS:
        raise DataError(f"{printable(path[:60])}... is {len(parts):,} folders deep; {MOST_LEVELS} are the most")
    if any(is_ignored(part) for part in parts):
        known[path] = None
        return None
    folder = top
    for part in parts:
        folder = folder.folders.setdefault(part, Folder(f"{folder.name}/{part}".lstrip("/")))
    known[path] = folder
    return folder


def list_tree(top: Folder, members: Members, *, root: Path, classes: Sequence[str] | None) -> list[Listing]:
    """List the folders of an archive as :func:`list_folder` lists those on a disk.

    Args:
        top: the folder that holds the classes, or the splits.
        members: where the images lie.
        root: the archive, for names in messages.
        classes: the class list and its order; None takes the folders found.

    Raises:
        DataError: as for a folder.
    """
    splits = {split: top.folders[name] for split, name in top.splits(str(root)).items()}
    listings: list[Listing] = []
    for split, folder in (splits or {"": top}).items():
        given = classes or (listings[0].classes if listings else None)
        listings.append(_list_tree_classes(folder, split, top, members, root, given))
    return listings


def rows_in_order(folder: Folder, members: Members) -> array[int]:
    """Images of a folder and of all below it, as a walk over the disk would meet them.

    Of two members of one name the later one counts, as it does when they are unpacked; images of several archives are
    several images, whatever their names.
    """
    return array("q", (row for inner in folder.walk() for row in _sorted(inner.images, members)))


def _sorted(rows: Sequence[int], members: Members) -> list[int]:
    last = {(members.names[row].rpartition("/")[2], members.archive(row)): row for row in rows}
    return [last[key] for key in sorted(last)]


def _list_tree_classes(
    folder: Folder, split: str, top: Folder, members: Members, root: Path, given: Sequence[str] | None
) -> Listing:
    where = f"{root}, in {printable(folder.name)}/," if folder.name else str(root)
    by_name = _by_class_name(sorted(folder.folders), where)
    names = tuple(given) if given is not None else tuple(sorted(by_name))
    rows = {name: rows_in_order(folder.folders[inner], members) for name, inner in by_name.items()}
    counts = {name: len(part) for name, part in rows.items()}
    _check_classes(counts, names, where, given=given is not None, loose=bool(folder.images), in_archive=True)
    others = _sorted([*folder.images, *folder.others], members)
    for inner in by_name.values():
        for part in folder.folders[inner].walk():
            others += _sorted(part.others, members)
    prefix = len(top.name) + bool(top.name)

    def below_top(row: int) -> str:
        name = members.names[row]
        if "//" in name or "./" in name or name[:1] == "/":  # "./a//b" is "a/b"
            name = "/".join(part for part in name.split("/") if part not in ("", "."))
        return name[prefix:]

    chosen = np.concatenate([np.frombuffer(rows[name], np.int64) for name in names if rows.get(name)])
    return members.listing(
        chosen,
        (below_top(row) for row in chosen.tolist()),
        np.repeat(np.arange(len(names)), [counts.get(name, 0) for name in names]),
        root=root,
        classes=names,
        split=split,
        in_order_of_classes=True,
        passed_over=map(below_top, others),
    )
