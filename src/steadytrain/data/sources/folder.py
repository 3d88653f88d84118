"""Folders of classes, on a disk or inside an archive, as listings whose order never varies.

A class is a folder; all images below it, at any depth, belong to it. A folder that holds ``train`` and perhaps ``val``
and ``test``, each with class folders, is split into those; :mod:`steadytrain.data.sources.layout` knows their other
names. Classes and files are sorted by code point, as ``torchvision.datasets.ImageFolder`` does, so that labels agree
with it. Links are followed, but never in a circle, and never up to a folder that the class lies in. Hidden files and
the leftovers of file managers are ignored; other files are passed over and listed as such.

A validation set that is one folder of images with its classes in a text beside them (Tiny ImageNet's ``val/images`` and
``val_annotations.txt``) is taken apart by that text; images of such a set's ``test``, which have no labels, are passed
over.

Inside an archive, folders that everything lies in are stripped first. Names are taken apart and shown, never used as
paths, so one with ``..`` or a leading ``/`` leads nowhere.
"""

from __future__ import annotations

import os
import unicodedata
from array import array
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from steadytrain.data.filenames import folder_splits, is_ignored, is_image, is_leftover, leftovers, split_words
from steadytrain.data.names import Names
from steadytrain.data.sources.labels import require_known
from steadytrain.data.sources.layout import (
    TABLES,
    Entries,
    FolderLook,
    class_splits,
    flat_folder,
    flat_splits,
    holds_images,
    kept_inside,
    labels_from_names,
    labels_in_names,
    look_on_disk,
    read_entries,
    splits_beside_classes,
    splits_in_classes,
    without_leftovers,
)
from steadytrain.data.sources.listing import FileList, Listing, stat_file
from steadytrain.data.sources.source import Request, SourceKind
from steadytrain.errors import DataError
from steadytrain.format import Say, few, printable

MOST_LEVELS = 100
_MOST_ANNOTATIONS = 64 << 20  # bytes
ANNOTATIONS = "val_annotations.txt"


@dataclass
class Folder:
    """A folder on a disk or in an archive: the rows of its images and of its other files, and the folders in it."""

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
            waiting += (folder.folders[name] for name in sorted(kept_inside(folder.folders), reverse=True))

    def at(self, path: str) -> Folder:
        """Return the folder at a path below this one, made if need be."""
        folder = self
        for name in path.split("/") if path else ():
            folder = folder.folders.setdefault(name, Folder(f"{folder.name}/{name}".lstrip("/")))
        return folder

    def is_flat(self, files: FileList) -> bool:
        """Return whether images lie in one folder without classes: at the top, or in the only folder that has any."""
        holding = [folder for folder in self.walk() if folder.images]
        return len(holding) == 1 and len(self.folders) <= 1 and not self.may_be_splits(files)

    def may_be_splits(self, files: FileList) -> bool:
        """Return whether folders are splits, or may be; those are refused where the source's name is known."""
        try:
            return bool(class_splits(self.look(files), Path()))
        except DataError:
            return True

    def look(self, files: FileList) -> FolderLook:
        """Return what tells the entries of this folder and of those below it."""

        def look(path: str) -> Entries:
            folder = self.at(path)
            others = [files.names[row].rpartition("/")[2] for row in folder.others]
            return Entries(without_leftovers(sorted(folder.folders)), files.names.take(folder.images), sorted(others))

        return look


def list_folder(source: Path, *, classes: Sequence[str] | None = None, say: Say = lambda line: None) -> list[Listing]:
    """List a folder of classes, or one of splits.

    ``classes`` is the class list and its order; None takes the folders found (those of ``train`` where there are
    splits). ``say`` takes a line where splits lie beside classes.

    Raises:
        DataError: not a folder, no images, a class without images, one class only, or a class not in the list.
    """
    splits = class_splits(look_on_disk(source), source, classes)
    top, files = scan_folder(source, list(splits.values()) or [""])
    first, *more = list_tree(top, files, root=source, classes=classes, say=say)
    tops = {path.partition("/")[0] for path in splits.values()}
    loose = [f"{name}/" for name in read_entries(source)[0] if splits and name not in tops]
    return [replace(first, passed_over=Names([*first.passed_over, *loose])), *more] if loose else [first, *more]


def scan_folder(source: Path, parts: Sequence[str] = ("",)) -> tuple[Folder, FileList]:
    """The tree of a folder on a disk, and its files.

    Of each class, a folder that is reached twice, by links, counts once. One that holds the class itself is not
    entered: all other classes lie in it.

    ``parts``: the folders in it that hold the classes, and are all that is looked at; empty for ``source`` itself.
    """
    names, sizes, times = Names(), array("q"), array("q")

    def enter(folder: Folder) -> list[Folder]:
        """Add what lies in a folder; return the folders in it."""
        path = os.path.join(source, folder.name)  # noqa: PTH118 - a million times
        inner, files = read_entries(path)
        prefix = f"{folder.name}/" if folder.name else ""
        for name in files:
            is_wanted = is_image(name)
            (folder.images if is_wanted else folder.others).append(len(names))
            names.append(prefix + name)
            size, time = stat_file(os.path.join(path, name)) if is_wanted else (-1, 0)  # noqa: PTH118
            sizes.append(size)
            times.append(time)
        folder.folders = {name: Folder(prefix + name) for name in inner}
        return list(folder.folders.values())

    top = Folder()
    for part in parts:
        for class_folder in enter(top.at(part)):
            above = (Path(os.path.realpath(source / class_folder.name)), Path(os.path.realpath(source), "class"))
            seen = {(status.st_dev, status.st_ino) for path in above for status in map(os.stat, path.parents)}
            waiting = [class_folder]
            while waiting:
                folder = waiting.pop()
                status = os.stat(source / folder.name)  # noqa: PTH116
                if (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    waiting += reversed(enter(folder))
    return top, FileList(names, np.array(sizes, np.int64), np.array(times, np.int64))


def build_tree(files: FileList, *, strip: bool = True) -> Folder:
    """The folders that the members' names describe, without hidden ones and the leftovers of file managers.

    ``strip``: go down through folders that hold nothing but one more folder: ``images/`` around the classes.

    Raises:
        DataError: folders more than 100 deep.
    """
    top = Folder()
    known: dict[str, Folder | None] = {"": top}

    def folder_at(path: str) -> Folder | None:
        """The folder that a path names, made if need be; None where it is ignored."""
        if path in known:
            return known[path]
        parts = [part for part in path.split("/") if part not in ("", ".")]
        if len(parts) > MOST_LEVELS:
            raise DataError(f"{printable(path[:60])}... is {len(parts):,} folders deep; at most {MOST_LEVELS} are read")
        folder = None if any(map(is_ignored, parts)) else top
        if folder is not None:
            for part in parts:
                folder = folder.folders.setdefault(part, Folder(f"{folder.name}/{part}".lstrip("/")))
        known[path] = folder
        return folder

    for name in sorted(files.folders):
        folder_at(name.rstrip("/"))
    for row, name in enumerate(files.names):
        path, _, base = name.rpartition("/")
        folder = folder_at(path)
        if folder is not None and not is_ignored(base):
            (folder.images if is_image(base) else folder.others).append(row)
    while strip and len(top.folders) == 1 and not top.images and not top.may_be_splits(files):
        if top.others and len(flat_splits(top.look(files))) > 1:
            break  # their table may lie here
        inner = next(iter(top.folders.values()))
        if not inner.folders or (inner.images and len(flat_splits(inner.look(files))) < 2):
            break
        top = inner
    return top


def list_tree(
    top: Folder, files: FileList, *, root: Path, classes: Sequence[str] | None, say: Say = lambda line: None
) -> list[Listing]:
    """List the folders of classes, or of splits, in ``top``; ``root`` is what the user named.

    Raises:
        DataError: as :func:`list_folder`.
    """
    look = top.look(files)
    paths = class_splits(look, root, classes, base=top.name)
    splits = {split: top.at(path) for split, path in paths.items()}
    for split, class_paths in ({} if paths else splits_in_classes(look)).items():
        splits[split] = Folder(folders={name: top.at(path) for name, path in class_paths.items()})
    inside = {name: [*inner.folders] for name, inner in top.folders.items() if not is_leftover(name)}
    divided = [name for name, held in inside.items() if len({*folder_splits(held).values()}) > 1]
    if not splits and classes is None and 0 < len(divided) < len(inside):
        held_in = f"{divided[0]}: {few(sorted(inside[divided[0]]))}"
        raise DataError(
            f"{root}: some folders hold splits ({held_in}), and not every folder holds a train: put the images of each"
            " class into folders of splits, or into none"
        )
    if not splits and (beside := splits_beside_classes(look, root, inside, classes or (), say)):
        tops = [path.partition("/")[0] for path in beside.values()]
        held = {name: folder for name, folder in top.folders.items() if name not in tops}
        splits = {"train": replace(top, folders=held), **{split: top.at(path) for split, path in beside.items()}}
        for name, split in zip(tops, beside, strict=True):
            say(f"{root}: {name}, which holds folders of the classes' names, is no class, but the {split} set")
    if "val" in splits and _sort_by_annotations(splits["val"], files, root) and "test" in splits:
        splits["val"].others += rows_in_order(splits.pop("test"), files)
    if "test" in paths.keys() & splits and flat_folder(look, paths["test"]) is not None:  # a contest's: without labels
        splits["train"].others += rows_in_order(splits.pop("test"), files)
    listings: list[Listing] = []
    kept: set[str] = set()  # that are classes by one of the splits
    for folder in splits.values():
        sizes = {name: sum(len(below.images) for below in inner.walk()) for name, inner in folder.folders.items()}
        kept |= sizes.keys() - leftovers(sizes)
    for split, folder in (splits or {"": top}).items():
        # The others follow the training set's list, in which a class may well be absent from them.
        class_list = classes or (listings[0].classes if listings else None)
        listings.append(_list_classes(folder, split, top, files, root, class_list, kept))
    return listings


def _sort_by_annotations(folder: Folder, files: FileList, root: Path) -> bool:
    """Put images whose classes stand in a text beside their folder into folders of those, and tell whether one does.

    A line of the text is an image's name, its class, and perhaps a box, between tabs. An image that it does not name is
    in no class.
    """
    text = next((row for row in folder.others if files.names[row].rpartition("/")[2] == ANNOTATIONS), None)
    if text is None:
        return False
    name = files.names[text]
    if files.sizes[text] > _MOST_ANNOTATIONS:
        raise DataError(
            f"{root}: {printable(name)} has {files.sizes[text]:,} bytes, more than {_MOST_ANNOTATIONS:,}: it cannot be"
            " a list of names and classes"
        )
    data = (root / name).read_bytes() if files.pieces is None else files.read(text)
    lines = [line.split("\t") for line in data.decode("utf-8", "replace").splitlines() if line.strip()]
    if wrong := next((number for number, cells in enumerate(lines, 1) if len(cells) < 2), 0):
        raise DataError(
            f"{root}: line {wrong} of {printable(name)} is not an image name followed by its class: fix the line"
        )
    class_of = {cells[0].strip(): cells[1].strip() for cells in lines}
    rows = rows_in_order(folder, files)
    folder.images, folder.folders = array("q"), {}
    for row in rows:
        label = class_of.get(files.names[row].rpartition("/")[2])
        inner = folder if label is None else folder.folders.setdefault(label, Folder(f"{folder.name}/{label}"))
        inner.images.append(row)
    return True


def list_unclassed(top: Folder, files: FileList, root: Path) -> Listing:
    """List all images of a tree, in no class."""
    rows = rows_in_order(top, files)
    others = [files.names[row] for folder in top.walk() for row in folder.others]
    return files.listing(rows, np.zeros(len(rows), np.int64), root=root, classes=(), passed_over=others)


def rows_in_order(folder: Folder, files: FileList) -> array[int]:
    """Images of a folder and of all below it, as a walk over the disk would meet them.

    Of two members of one name the later one counts, as it does when they are unpacked; images of several archives are
    several images, whatever their names.
    """
    return array("q", (row for inner in folder.walk() for row in _sorted(inner.images, files)))


def _sorted(rows: Sequence[int], files: FileList) -> Sequence[int]:
    if files.pieces is None:  # as they were met on the disk
        return rows
    last = {(files.names[row].rpartition("/")[2], files.archive(row)): row for row in rows}
    return [last[key] for key in sorted(last)]


def _list_classes(
    folder: Folder,
    split: str,
    top: Folder,
    files: FileList,
    root: Path,
    class_list: Sequence[str] | None,
    kept: Collection[str],
) -> Listing:
    on_disk = files.pieces is None
    where = (
        str(root / folder.name) if on_disk else f"{root}, in {printable(folder.name)}/," if folder.name else str(root)
    )
    by_name: dict[str, Folder] = {}  # of a class, which is composed Unicode
    for name in sorted(folder.folders):
        class_name = unicodedata.normalize("NFC", printable(name))
        if class_name in by_name:
            raise DataError(f"{where} holds two folders that are both named {class_name}: merge them")
        by_name[class_name] = folder.folders[name]
    rows = {name: rows_in_order(inner, files) for name, inner in by_name.items()}
    odd = leftovers({name: len(images) for name, images in rows.items()})
    left_out = [by_name.pop(name).name for name in odd if name not in kept and name not in (class_list or ())]
    parts = [part for inner in by_name.values() for part in inner.walk()]
    for part in parts:
        left_out += [part.folders[name].name for name in sorted(part.folders.keys() - kept_inside(part.folders))]
    rows = {name: rows[name] for name in by_name}
    names = tuple(sorted(by_name)) if class_list is None else tuple(class_list)
    counts = [len(rows.get(name, ())) for name in names]
    if not any(rows.values()):
        raise _no_class(where, loose=bool(folder.images), on_disk=on_disk)
    require_known(sorted(name for name in rows.keys() - set(names) if rows[name]), names, where)
    empty = [name for name, count in zip(names, counts, strict=True) if not count]
    full = [name for name in names if rows.get(name)]
    inner_names = list(by_name[full[0]].folders) if len(full) == 1 else []
    meant = Path(where) / full[0] if on_disk else f"{printable(by_name[full[0]].name)}/ in it, once it is unpacked"
    hint = f" (did you mean {meant}? It holds {few(inner_names)})" * (len(inner_names) > 1)
    if class_list is None and empty:
        noun = "class folders hold" if len(empty) > 1 else "class folder holds"
        raise DataError(
            f"{len(empty)} {noun} no image in {where} ({few(empty)}): add images or remove the folder{hint}"
        )
    if class_list is None and len(names) < 2:
        raise DataError(f"{where} holds only one class, {names[0]}: a classifier needs at least two{hint}")
    others = (
        sorted([*folder.images, *folder.others]) if on_disk else list(_sorted([*folder.images, *folder.others], files))
    )
    for part in parts:
        others += _sorted(part.others, files)
    prefix = len(top.name) + bool(top.name)

    def below_top(row: int) -> str:
        name = files.names[row]
        if "//" in name or "./" in name or name[:1] == "/":  # "./a//b" is "a/b"
            name = "/".join(part for part in name.split("/") if part not in ("", "."))
        return name[prefix:]

    chosen = np.concatenate([np.frombuffer(rows[name], np.int64) for name in names if rows.get(name)])
    return files.listing(
        chosen,
        np.repeat(np.arange(len(names)), counts),
        names=(below_top(int(row)) for row in chosen),
        root=root,
        classes=names,
        split=split,
        by_class=True,
        passed_over=[*map(below_top, others), *(f"{name[prefix:]}/" for name in left_out)],
    )


def _no_class(where: str, *, loose: bool, on_disk: bool) -> DataError:
    """The error for no images in folders of classes; ``loose`` where some lie beside them."""
    remedy = f"{'a folder' if on_disk else 'an archive'} with one folder of images for each class"
    if not loose:
        return DataError(f"{where} holds no images: give {remedy}{', or a .lst' * on_disk}")
    if on_disk:
        example = f"{Path(where).name}/cat/1.jpg"
        remedy = f"put the images of each class into a folder ({example}), or give a .lst with their labels"
    else:
        remedy = f"give their labels in a file with --labels, or {remedy}"
    return DataError(f"the images in {where} have no classes: {remedy}")


def _list_request(request: Request) -> list[Listing]:
    where, entries = request.where, request.entries
    if any(map(is_image, entries)) and not request.has_folders:
        remedy = (
            f"put the images of each class into a folder ({where.name}/cat/1.jpg), or give their labels with"
            " --labels FILE"
        )
        if tables := [name for name in entries if name.lower().endswith(TABLES)]:
            remedy = f"give {' or '.join(str(where / name) for name in tables[:3])}, if it holds their labels"
        elif words := labels_in_names(request.look("").images):
            remedy = labels_from_names(where, words, [])
        raise DataError(f"the images in {where} have no classes: {remedy}")
    listings = list_folder(where, classes=request.classes, say=request.say)
    for name in request.look("").others if len(listings) == 1 else ():
        split, rest = split_words(Path(name).stem)
        if split in ("val", "test") and not rest and name.lower().endswith(TABLES):  # as road signs' Test.csv
            request.say(f"{where / name} is not trained on: steady evaluate RUN {where / name} measures on its images")
    return listings


FOLDER = SourceKind(
    "a folder of classes", lambda request: request.is_folder and holds_images(request.look, ""), _list_request
)
