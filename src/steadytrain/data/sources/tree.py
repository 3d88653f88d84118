"""Folders of classes inside an archive: the listings that the unpacked folder would give, from names alone.

The rules are those of ``listing``; folders that everything lies in are stripped first. Names are
taken apart and shown, never used as paths, so one with ``..`` or a leading ``/`` leads nowhere.
"""

from __future__ import annotations

import unicodedata
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from steadytrain.data.sources.listing import SPLITS, Listing, is_ignored, is_image, shown
from steadytrain.data.sources.members import Members, few
from steadytrain.errors import DataError, did_you_mean

MOST_LEVELS = 100


@dataclass
class Folder:
    """One folder of an archive: the rows of its images and of its other files, and the folders in it."""

    name: str = ""
    folders: dict[str, Folder] = field(default_factory=dict)
    images: array[int] = field(default_factory=lambda: array("q"))
    others: array[int] = field(default_factory=lambda: array("q"))

    def all(self) -> Iterator[Folder]:
        """This folder and all below it, each before those in it, by code point."""
        waiting = [self]
        while waiting:
            folder = waiting.pop()
            yield folder
            waiting += (folder.folders[name] for name in sorted(folder.folders, reverse=True))

    @property
    def has_images(self) -> bool:
        return any(folder.images for folder in self.all())


def grow(members: Members) -> Folder:
    """The folders that the members' names tell of; hidden ones and the droppings of file managers are left out.

    Raises:
        DataError: folders more than 100 deep.
    """
    top = Folder()
    known: dict[str, Folder | None] = {"": top}
    for name in sorted(members.folders):
        _place(name.rstrip("/"), top, known)
    for row, name in enumerate(members.names):
        at, _, base = name.rpartition("/")
        folder = known[at] if at in known else _place(at, top, known)
        if folder is not None and not is_ignored(base):
            (folder.images if is_image(base) else folder.others).append(row)
    return top


def _place(path: str, top: Folder, known: dict[str, Folder | None]) -> Folder | None:
    """The folder that a path names, made if need be; None where it is ignored."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if len(parts) > MOST_LEVELS:
        raise DataError(f"{shown(path[:60])}... is {len(parts):,} folders deep; {MOST_LEVELS} are the most")
    folder: Folder | None = top
    if any(is_ignored(part) for part in parts):
        folder = None
    for part in parts if folder else ():
        assert folder is not None
        folder = folder.folders.setdefault(part, Folder(f"{folder.name}/{part}".lstrip("/")))
    known[path] = folder
    return folder


def strip(top: Folder) -> Folder:
    """Go down through folders that hold nothing but one more folder: ``images/`` around the classes."""
    while len(top.folders) == 1 and not top.images and not _splits(top, top.name):
        inner = next(iter(top.folders.values()))
        if inner.images or not inner.folders:
            break
        top = inner
    return top


def is_flat(top: Folder) -> bool:
    """Whether images lie in one folder without classes: at the top, or in the only folder that has any."""
    holding = [folder for folder in top.all() if folder.images]
    return len(holding) == 1 and len(top.folders) <= 1 and not _splits(top, "")


def list_tree(top: Folder, members: Members, *, root: Path, classes: Sequence[str] | None) -> list[Listing]:
    """List what :func:`strip` gave, as ``listing.list_folder`` lists a folder.

    Args:
        top: the folder that holds the classes, or the splits.
        members: where the images lie.
        root: the archive, for names in messages.
        classes: the class list and its order; None takes the folders found.

    Raises:
        DataError: as for a folder.
    """
    splits = _splits(top, str(root))
    if not splits:
        return [_list(top, "", top, members, root, classes)]
    listings: list[Listing] = []
    for split, folder in splits.items():
        given = classes or (listings[0].classes if listings else None)
        listings.append(_list(folder, split, top, members, root, given))
    return listings


def rows_in_order(folder: Folder, members: Members) -> array[int]:
    """Images of a folder and of all below it, as a walk over the disk would meet them.

    Of two members of one name the later one counts, as it does when they are unpacked; images of several archives are
    several images, whatever their names.
    """
    return array("q", (row for one in folder.all() for row in _sorted(one.images, members)))


def _sorted(rows: Sequence[int], members: Members) -> list[int]:
    last = {(members.names[row].rpartition("/")[2], members.archive(row)): row for row in rows}
    return [last[key] for key in sorted(last)]


def _splits(top: Folder, where: str) -> dict[str, Folder]:
    found: dict[str, Folder] = {}
    names: dict[str, str] = {}
    for name in sorted(top.folders):
        split = SPLITS.get(name.casefold())
        if split in found:
            raise DataError(f"{where} holds both {names[split]} and {name}: keep one of them")
        if split:
            found[split], names[split] = top.folders[name], name
    if "train" not in found or (len(found) == 1 < len(top.folders)) or not found["train"].folders:
        return {}
    if "val" not in found and "test" in found:
        found["val"] = found.pop("test")
    return {split: found[split] for split in ("train", "val", "test") if split in found}


def _list(
    folder: Folder, split: str, top: Folder, members: Members, root: Path, given: Sequence[str] | None
) -> Listing:
    where = f"{root}, in {shown(folder.name)}/," if folder.name else str(root)
    found = _classes(folder, where)
    _require_images(folder, found, where)
    names = tuple(given) if given is not None else tuple(sorted(found))
    _require_classes(found, names, where, given=given is not None)
    parts = [rows_in_order(found[name], members) if name in found else array("q") for name in names]
    rows = np.concatenate([np.frombuffer(part, np.int64) for part in parts if part])
    cut = len(top.name) + bool(top.name)
    return members.listing(
        rows,
        (_path(members.names[row])[cut:] for row in rows),
        np.repeat(np.arange(len(names)), [len(part) for part in parts]),
        root=root,
        classes=names,
        split=split,
        in_order_of_classes=True,
        passed_over=(_path(members.names[row])[cut:] for row in _others(folder, found, members)),
    )


def _classes(folder: Folder, where: str) -> dict[str, Folder]:
    found: dict[str, Folder] = {}
    for name in sorted(folder.folders):
        composed = unicodedata.normalize("NFC", shown(name))
        if composed in found:
            raise DataError(f"{where} holds two folders that are both named {composed}: merge them")
        found[composed] = folder.folders[name]
    return found


def _others(folder: Folder, found: dict[str, Folder], members: Members) -> Iterator[int]:
    yield from _sorted([*folder.images, *folder.others], members)
    for part in found.values():
        for one in part.all():
            yield from _sorted(one.others, members)


def _path(name: str) -> str:
    """A member's name without what says "here": ``./a//b`` is ``a/b``."""
    if "//" not in name and "./" not in name and name[:1] != "/":
        return name
    return "/".join(part for part in name.split("/") if part not in ("", "."))


def _require_images(folder: Folder, found: dict[str, Folder], where: str) -> None:
    if any(part.has_images for part in found.values()):
        return
    if folder.images:
        raise DataError(
            f"the images in {where} are in no class: give their labels in a file with --labels, or an archive with one"
            " folder of images for each class"
        )
    raise DataError(f"{where} holds no images: give an archive with one folder of images for each class")


def _require_classes(found: dict[str, Folder], names: tuple[str, ...], where: str, *, given: bool) -> None:
    unknown = sorted(name for name, part in found.items() if name not in names and part.has_images)
    if unknown:
        raise DataError(
            f"{where} holds classes that the class list lacks: {few(unknown)}.{did_you_mean(unknown[0], names)}"
            f" Remove them, or use the list of a set that has them (the list: {few(names)})"
        )
    if given:
        return
    empty = sorted(name for name, part in found.items() if not part.has_images)
    if empty:
        what = "class folders hold" if len(empty) > 1 else "class folder holds"
        raise DataError(f"{len(empty)} {what} no image in {where} ({few(empty)}): add images, or remove the folder")
    if len(names) < 2:
        raise DataError(f"{where} holds only one class, {names[0]}: a classifier needs two or more")
