"""Images in no folders of classes, which a table beside them or a file of labels names.

They lie in folders of splits or in one folder, on a disk or inside archives; :mod:`steadytrain.data.sources.layout`
tells which folders and which tables. Images of a contest's ``test``, which have no labels, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from posixpath import normpath
from typing import Any

import numpy as np

from steadytrain.data.filenames import is_wrapper
from steadytrain.data.sources import folder, imagenet, parquet
from steadytrain.data.sources.archives import open_source
from steadytrain.data.sources.layout import (
    TOOLS_TABLES,
    FolderLook,
    find_tables,
    flat_splits,
    labels_in_names,
    no_labels,
)
from steadytrain.data.sources.listing import FileList, Listing
from steadytrain.data.sources.paths import NamedImages
from steadytrain.data.sources.rows import is_of_paths
from steadytrain.data.sources.select import take
from steadytrain.data.sources.source import COLUMNS, LABELS, Request, SourceKind, refuse_columns
from steadytrain.data.sources.tables import list_lst, read_table
from steadytrain.data.storage.scratch import new_path
from steadytrain.errors import DataError
from steadytrain.format import few


@dataclass(frozen=True)
class FlatImages:
    """Folders of images without classes by split, and the tables with their labels, as :mod:`.layout` finds them."""

    parts: Mapping[str, Sequence[str]]
    tables: Mapping[str, str]

    @property
    def folders(self) -> list[str]:
        return [folder for paths in self.parts.values() for folder in paths]


def find_flat(look: FolderLook, where: Path, *, is_archive: bool = False) -> FlatImages | None:
    """Find images without folders of classes, and their tables; None where there are none, or a single folder's alone.

    Raises:
        DataError: no table for folders of splits, or several that it could be.
    """
    parts = flat_splits(look)
    if not parts:
        return None
    flat = FlatImages(parts, find_tables(look, parts, str(where)))
    first = flat.folders[0]
    if parts == {"": ("",)} and not is_archive and Path(flat.tables.get("", "")).name.casefold() not in TOOLS_TABLES:
        return None  # any other table among single images is for the user to name
    if "" in flat.tables or "train" in flat.tables:
        return flat
    if flat.tables:
        raise DataError(f"{where} has no training set among {few(flat.folders)}: give one of these folders")
    name = first.partition("/")[0]
    is_no_class = bool(name) and is_wrapper(name, "")
    if len(flat.folders) == 1 and not is_no_class and not labels_in_names(look(first).images):
        return None
    raise no_labels(look, parts, where)


def list_flat(
    request: Request, look: FolderLook, flat: FlatImages, files: FileList | None = None, base: str = ""
) -> list[Listing]:
    """List such images by their tables; ``files`` are the members of archives, in which paths start from ``base``.

    Raises:
        DataError: a table that cannot be read.
    """
    where = request.where
    listings: list[Listing] = []
    for split in (split for split in ("", "train", "val", "test") if split in flat.tables):
        table = flat.tables[split]
        around = (path.rpartition("/")[0] for path in flat.folders)
        places = [table.rpartition("/")[0], *flat.parts.get(split, flat.folders), *around]
        prefixes = list(dict.fromkeys(f"{base}{place}/" if place else base for place in places))
        try:
            part = request.part(where, request.paths, after=listings)
            listed = _list_table(part, table, prefixes, files, base)
        except DataError as error:
            if split != "test":
                raise
            request.say(f"skipped: {error}")  # of a contest: its images have no labels
            continue
        if len(flat.tables) == 1 and len(listed) > 1:
            return listed
        if len(listed) > 1:
            raise DataError(f"{where / table} is named after one split but holds several: use it alone")
        listings += [replace(listed[0], split=split)] if split else _by_folder(listed[0], flat.parts, base)
    splits = {*flat.tables, *(listing.split for listing in listings)}
    if left := [path for split in flat.parts if split and split not in splits for path in flat.parts[split]]:
        request.say(f"{where}: no labels for the images in {few(left)}; they are left out")
    tops = {path.partition("/")[0] for path in flat.folders}
    others = [name for name in look("").folders if {name, ""}.isdisjoint(tops) and look(name).images]
    named = (normpath(name) for part in (listings if others else ()) for name in part.names)
    if others := sorted({*others} - {name.removeprefix(base).partition("/")[0] for name in named}):
        request.say(f"{where}: {few(others)} hold{'s' * (len(others) == 1)} images of no split; they are left out")
    return request.in_order(listings)


def _list_table(
    request: Request, name: str, prefixes: Sequence[str], files: FileList | None, base: str
) -> list[Listing]:
    """Read the table ``name`` that lies in the folder of a request, or in archives as their images do."""
    table = stored_at = request.where / name
    is_list = table.suffix.lower() == ".lst"
    if files is not None:
        if is_list:
            raise DataError(f"{table} is a .lst in an archive: unpack it, and give the .lst with --root FOLDER")
        row = next(row for row, other in enumerate(files.names) if normpath(other) == normpath(f"{base}{name}"))
        stored_at = new_path(request.scratch, table.name)
        stored_at.write_bytes(files.read(row))
    elif is_list and not is_of_paths(table):
        return list_lst(request, table, request.where, prefixes=prefixes, is_source=True)
    return _read_table(request, table, prefixes, files, stored_at)


def _read_table(
    request: Request, table: Path, prefixes: Sequence[str], files: FileList | None, stored_at: Path
) -> list[Listing]:
    places: dict[str, Any] = {"table": table, "prefixes": prefixes, "say": request.say}
    images = NamedImages(request.where, members=files, is_source=True, **places)
    return read_table(request, table, images, parquet.as_text(stored_at, request.scratch))


def label(request: Request, labels: Path, files: FileList | None = None) -> list[Listing]:
    """List images that lie in a folder, or are ``files``, with their labels in a file of their own."""
    source = open_source(labels, request.scratch, request.say)
    truth = imagenet.read_truth(source)
    if truth is None:
        top = None if files is None else folder.build_tree(files)
        look = request.look if files is None or top is None else top.look(files)
        base = f"{top.name}/" if top is not None and top.name else ""
        parts = flat_splits(look)
        prefixes = ["", *(f"{base}{path}/" for paths in parts.values() for path in paths if path)]
        listed = _read_table(request, labels, prefixes, files, source.stored_at)
        return listed if len(listed) > 1 or len(parts) < 2 else request.in_order(_by_folder(listed[0], parts, base))
    refuse_columns(request)
    if files is None:
        top, files = folder.scan_folder(request.where)
        rows = top.images
    else:
        rows = folder.rows_in_order(folder.build_tree(files, strip=False), files)
    if not rows:
        raise DataError(f"{request.where} holds no images")
    classes, numbers = truth.label([files.names[row] for row in rows], classes=request.classes)
    return [files.listing(rows, numbers, root=request.where, classes=classes)]


def _by_folder(listing: Listing, parts: Mapping[str, Sequence[str]], base: str) -> list[Listing]:
    """Split a listing by the folders of splits that its images lie in; what lies in none of them is trained on."""
    folders = {f"{base}{path}/": split for split, paths in parts.items() for path in paths}
    names = map(normpath, listing.names)
    tops = (next((folders[path] for path in folders if name.startswith(path)), "") for name in names)
    splits = np.array([split or "train" for split in tops])
    if "train" not in splits:
        return [listing]
    rows = {split: np.flatnonzero(splits == split) for split in ("train", "val", "test")}
    return [replace(take(listing, rows[split]), split=split) for split in rows if len(rows[split])]


def _is_labelled(request: Request) -> bool:
    return request.labels is not None and (request.is_folder or request.is_archive)


def _list_labelled(request: Request) -> list[Listing]:
    labels = request.labels
    assert labels is not None
    if not labels.is_file():
        raise DataError(f"there is no file of labels {labels}")
    return label(request, labels, None if request.is_folder else request.members)


def _is_flat(request: Request) -> bool:
    return request.is_folder and find_flat(request.look, request.where) is not None


def _list_folder(request: Request) -> list[Listing]:
    flat = find_flat(request.look, request.where)
    assert flat is not None
    return list_flat(request, request.look, flat)


LABELLED = SourceKind("images and a file of labels", _is_labelled, _list_labelled, (LABELS, COLUMNS))
FLAT = SourceKind("images and a table beside them", _is_flat, _list_folder, (COLUMNS,))
