"""Find out what a source is, by what is there, and list it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from posixpath import normpath, splitext
from typing import Any

import numpy as np

from steadytrain.data.sources import arrays, folder, imagenet
from steadytrain.data.sources.archives import (
    SourceFile,
    holds_only_tars,
    open_source,
    open_sources,
    read_archives,
    read_inner_tars,
)
from steadytrain.data.sources.columns import ColumnNames
from steadytrain.data.sources.filenames import (
    SPLITS,
    braces,
    expand,
    few,
    group_by_split,
    is_ignored,
    is_image,
    is_pattern,
    order_splits,
    repeated,
)
from steadytrain.data.sources.labels import require_two_classes
from steadytrain.data.sources.listing import Files, Listing, Say
from steadytrain.data.sources.paths import ImagesInArchives, ImagesInFolder, none_found
from steadytrain.data.sources.records import list_records
from steadytrain.data.sources.select import merge_sources
from steadytrain.data.sources.tables import is_of_paths, read_list, read_table
from steadytrain.data.sources.webdataset import is_webdataset, list_samples
from steadytrain.data.storage.store import Place, is_uri, local_name
from steadytrain.errors import DataError, did_you_mean
from steadytrain.format import count

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip")


def find(
    source: str,
    *,
    root: Path | None = None,
    labels: Path | None = None,
    classes: Sequence[str] | None = None,
    group: str | None = None,
    columns: ColumnNames | None = None,
    scratch: Path,
    say: Say,
) -> list[Listing]:
    """List whatever a user names as data.

    Args:
        source: a folder, a file, or several by braces and wildcards: ``shards-{000..010}.tar``.
        root: the folder that a list's or a table's paths start from; None: its own.
        labels: a file of labels, for images that lie in no folders of classes.
        classes: the class list and its order; None takes what is found.
        group: the name of a table's column that says what each image belongs to.
        columns: the columns of a table that hold paths, labels and splits, where the user has named them.
        scratch: a folder to decompress into. It may not exist yet; whoever gave it removes it when nothing is read from
            the listings any more.
        say: takes remarks, a line each.

    Returns:
        Training set first; one listing, or one for each split. All have one class list.

    Raises:
        DataError: nothing there, of a kind that is not read, damaged, or not fit to train on; says the remedy.
        StorageError: no room to decompress.
    """
    try:
        asked = _Source(source, root, labels, classes, group, columns or ColumnNames(), scratch, say)
        listings = asked.listings()
    except OSError as error:
        raise DataError(f"cannot read {error.filename or source}: {error.strerror or error}") from error
    except DataError as error:
        place, folder = scratch.absolute().parent, Path(source).resolve()
        inside = folder.is_dir() and folder in place.parents
        if inside and not any(is_ignored(part) for part in place.relative_to(folder).parts):
            raise DataError(f"{error} (the output is inside {source}: write it somewhere else)") from error
        raise
    for flag, name in asked.columns.options() if not asked.tables else ():
        raise DataError(
            f"{flag} {name} names a column of a table (CSV, TSV), and the labels of {source} do not come from one: drop"
            f" {flag}"
        )
    for listing in listings:
        if group is not None and listing.groups is None:
            raise DataError(
                f"--group {group} names a column of a CSV or TSV file, and the labels of {source} do not come"
                " from one: drop --group"
            )
        require_two_classes(listing.classes, listing.labels, source)
    return listings


def find_all(
    sources: Sequence[str],
    *,
    root: str | Path | None = None,
    labels: str | Path | None = None,
    classes: Sequence[str] | None = None,
    group: str | None = None,
    columns: ColumnNames | None = None,
    scratch: Path,
    say: Say,
) -> list[Listing]:
    """List several sources as one, split by split; arguments and errors as for :func:`find`."""
    paths = [Path(source).resolve() for source in sources]
    if twice := [source for number, source in enumerate(sources) if paths[number] in paths[:number]]:
        raise DataError(f"{twice[0]} is listed twice, so that each of its images would be used twice: list it once")
    root, labels = (None if path is None else Path(path) for path in (root, labels))
    lookup: dict[str, Any] = {"root": root, "labels": labels, "classes": classes, "group": group, "columns": columns}
    listed = [find(source, **lookup, scratch=scratch, say=say) for source in sources]
    return listed[0] if len(listed) == 1 else merge_sources(listed)


def require_there(source: str) -> None:
    """Refuse what leads nowhere, before anything is done with it; a pattern's files are for :func:`find` to look at.

    Raises:
        DataError: nothing of that name, with what is like it; an address; no name.
    """
    path = Path(local_name(source))
    if not source.strip():
        raise DataError("the name of the source is empty (an unset variable?): name a folder or a file")
    if is_uri(source):
        for name in braces(source):
            Place.folder(name)
        return
    if source.startswith("pipe:"):
        raise DataError(f"{source} is a command: run it, and name the file that it writes")
    if is_pattern(source) or path.exists():
        return
    if path.is_symlink():
        raise DataError(f"{source} is a broken link (to {path.readlink()}): fix it")
    names = {p.name for p in path.parent.iterdir()} if path.parent.is_dir() else set()
    packed = {name.removesuffix(".rec") for name in names if name.endswith(".rec")}
    companions = {f"{name}{ending}" for name in packed for ending in (".idx", ".lst", ".json")}  # no sources themselves
    near = did_you_mean(path.name, sorted(names - companions))
    raise DataError(f"there is no file or folder {source}.{near}")


@dataclass(frozen=True)
class _Source:
    """A source and what goes with it; arguments as for :func:`find`."""

    source: str
    root: Path | None
    labels: Path | None
    classes: Sequence[str] | None
    group: str | None
    columns: ColumnNames
    scratch: Path
    say: Say
    tables: list[Path] = field(default_factory=list)  # that were read

    def listings(self) -> list[Listing]:
        """List it."""
        require_there(self.source)
        if is_uri(self.source):
            raise DataError(f"{self.source} is in a store: name a local copy")  # whoever reads URIs has made one
        path = Path(local_name(self.source))
        if os.path.exists(path):  # noqa: PTH110 - the names of many files may be longer than a path may be
            if self.labels is not None and not self.labels.is_file():
                raise DataError(f"there is no file of labels {self.labels}")
            return self._list_folder(path) if path.is_dir() else self._list_file(path)
        paths = expand(self.source)
        self._refuse("--root", self.source)
        folders = [path for path in paths if path.is_dir()]
        if folders or all(is_image(path.name) for path in paths):
            listed = f"{folders[0]}, a folder" if folders else f"{len(paths):,} images without labels"
            raise DataError(f"{self.source} names {listed}: give one folder with a folder of images for each class")
        if len(paths) == 1:
            return self._list_file(paths[0])
        files = open_sources(paths, self.scratch, self.say)
        kinds = {file.kind for file in files}
        if kinds <= {"tar", "zip"}:
            return self._list_archives(files, path.parent)
        if kinds == {"rec"}:
            return self._list_records(files, self.source)
        raise DataError(
            f"{self.source} names files of several kinds ({few([path.name for path in paths])}): give each alone"
        )

    def _refuse(self, option: str, path: Path | str) -> None:
        if (self.root if option == "--root" else self.labels) is not None:
            goes_with = "a .lst or a table" if option == "--root" else "a folder or an archive of images"
            raise DataError(f"{option} goes with {goes_with}, and {path} is none: drop it")

    def _list_file(self, path: Path) -> list[Listing]:
        if not path.is_file():
            raise DataError(f"{path} is neither a file nor a folder")
        if path.suffix.lower() == ".lst" and not is_of_paths(path):
            file = SourceFile(path, path, "list", 0)
        else:
            file = open_source(path, self.scratch, self.say)
        if file.kind not in ("list", "text"):
            self._refuse("--root", path)
        if file.kind in ("tar", "zip"):
            return self._list_archives([file], path)
        self._refuse("--labels", path)
        if file.kind == "list":
            listing = read_list(file.stored_at, root=self.root or path.parent, classes=self.classes, say=self.say)
            if np.all(listing.sizes < 0):
                raise none_found(path, listing.root, listing.names)
            return [listing]
        if file.kind == "text":
            images = ImagesInFolder(self.root or path.parent, table=path)
            return self._read_table(path, images, file.stored_at)
        if file.kind == "rec":
            return self._list_records([file], path)
        if file.kind == "idx":
            return [arrays.list_idx_pair(file, classes=self.classes, scratch=self.scratch, say=self.say)]
        raise DataError(
            f"{path} is not a kind of file that can be read: use a folder of classes, a .lst, a table (CSV), an archive"
            " (tar, zip), WebDataset shards, idx or CIFAR binary files, or a .rec"
        )

    def _read_table(
        self, path: Path, images: ImagesInFolder | ImagesInArchives, stored_at: Path | None = None
    ) -> list[Listing]:
        """Read a table of images; its bytes lie ``stored_at``, if not at ``path``."""
        self.tables.append(path)
        options: dict[str, Any] = {"classes": self.classes, "say": self.say, "group": self.group}
        return read_table(path, images, **options, stored_at=stored_at, named=self.columns)

    def _list_records(self, files: Sequence[SourceFile], source: Path | str) -> list[Listing]:
        self._refuse("--labels", source)
        for file in files:
            if file.stored_at != file.path:
                raise DataError(
                    f"{file.path} is a compressed record file: decompress it, with its .idx and .json beside it"
                )
        paths = [file.path for file in files]
        return list_records(paths, classes=self.classes, scratch=self.scratch, say=self.say)

    def _list_folder(self, path: Path) -> list[Listing]:
        self._refuse("--root", path)
        entries = sorted(entry.name for entry in path.iterdir() if not is_ignored(entry.name))
        has_folders = any((path / name).is_dir() for name in entries)
        if self.labels is not None:
            return self._label(path, self.labels)
        if parts := imagenet.find_parts(path):
            return self._list_imagenet(parts)
        if arrays.is_cifar(entries):
            return arrays.list_cifar_folder(path, classes=self.classes)
        if arrays.is_idx_folder(entries):
            return arrays.list_idx_folder(path, classes=self.classes, scratch=self.scratch, say=self.say)
        if archives := [path / name for name in entries if name.lower().endswith(ARCHIVES)]:
            others = [name for name in entries if (path / name).is_dir() or name.lower().endswith(".rec")]
            if others:
                raise DataError(
                    f"{path} holds archives ({archives[0].name}) next to other data ({few(others, 3)}): choose"
                    " one of them"
                )
            return self._list_archives(open_sources(archives, self.scratch, self.say), path)
        records = [name for name in entries if name.lower().endswith(".rec")]
        if records and not has_folders:
            raise DataError(f"{path} holds record files: give {path / records[0]}, or all of them as '{path}/*.rec'")
        if (truth := imagenet.truth_beside(path, entries)) is not None:
            return self._label(path, truth)
        if any(is_image(name) for name in entries) and not has_folders:
            tables = [name for name in entries if name.lower().endswith((".csv", ".tsv", ".lst"))]
            remedy = (
                f"give {path / tables[0]}, if it holds their labels"
                if tables
                else f"put the images of each class into a folder ({path.name}/cat/1.jpg), or give their labels"
                " with --labels FILE"
            )
            raise DataError(f"the images in {path} have no classes: {remedy}")
        if split_tables := _tables_of_splits(path, entries):
            return self._list_tables(path, split_tables)
        return folder.list_folder(path, classes=self.classes)

    def _list_tables(self, path: Path, tables: dict[str, Path]) -> list[Listing]:
        """List a folder in which the images of each split lie in one folder, with its table beside it."""
        listings: list[Listing] = []
        for split, table in order_splits(tables, self.say, str(path)).items():
            part = replace(self, classes=self.classes or (listings[0].classes if listings else None))
            try:
                listed = part._list_file(table)
            except DataError as error:
                if split == "train" or SPLITS[table.stem.casefold()] != "test":
                    raise
                self.say(f"skipped: {error}")  # of a contest: its images have no labels
                continue
            if len(tables) == 1:
                return listed
            if len(listed) > 1:
                raise DataError(f"{table} is named after one split but holds several: use it alone")
            listings.append(replace(listed[0], split=split))
        return listings if len(listings) > 1 else [replace(listings[0], split="")]

    def _label(self, path: Path, labels: Path, files: Files | None = None) -> list[Listing]:
        """List images that lie in a folder, or are ``files``, with their labels in a file of their own."""
        truth = imagenet.read_truth(labels, self.scratch, self.say)
        if truth is None:
            images = (
                ImagesInFolder(path, table=labels) if files is None else ImagesInArchives(files, path, table=labels)
            )
            return self._read_table(labels, images)
        if files is None:
            top, files = folder.scan_folder(path)
            rows = top.images
        else:
            rows = folder.rows_in_order(folder.build_tree(files, strip=False), files)
        if not rows:
            raise DataError(f"{path} holds no images")
        classes, numbers = truth.label([files.names[row] for row in rows], classes=self.classes)
        return [files.listing(rows, numbers, root=path, classes=classes)]

    def _list_imagenet(self, parts: dict[str, Path]) -> list[Listing]:
        listings: list[Listing] = []
        for split, path in parts.items():
            truth = imagenet.truth_beside(path) if split == "val" else None
            if split == "val" and truth is None:
                raise DataError(
                    f"{path} has images without labels: put {imagenet.TRUTHS[0]} or LOC_val_solution.csv beside it, or"
                    " give the ground truth with --labels FILE"
                )
            classes = self.classes or (listings[0].classes if listings else None)
            part = replace(self, classes=classes, labels=truth)
            if not path.is_dir():
                listing = part._list_archives([open_source(path, self.scratch, self.say)], path)[0]
            elif truth is not None:
                listing = part._label(path, truth)[0]
            else:
                listing = folder.list_folder(path, classes=classes)[0]
            listings.append(replace(listing, split=split if len(parts) > 1 else ""))
        return listings

    def _list_archives(self, archives: Sequence[SourceFile], root: Path) -> list[Listing]:
        """List one archive, or several that belong together; messages call them ``root``."""
        groups = {"": list(archives)}
        if len(archives) > 1:
            groups = group_by_split(archives, [archive.path.name for archive in archives], str(root))
        if len(groups) == 1:
            return self._list_members(archives, root)
        listings: list[Listing] = []
        for split, group in order_splits(groups, self.say, str(root)).items():
            classes = self.classes or (listings[0].classes if listings else None)
            parts = replace(self, classes=classes)._list_members(group, root)
            if len(parts) > 1:
                raise DataError(f"{group[0].path} is named after one split but holds several: use it alone")
            listings.append(replace(parts[0], split=split))
        return listings

    def _list_members(self, archives: Sequence[SourceFile], root: Path) -> list[Listing]:
        """List archives of one split: folders of classes, samples, arrays, or a tar for each class."""
        files = read_archives(archives, self.say)
        if not files.names:
            raise DataError(f"{root} holds no files: give an archive with one folder of images for each class")
        if len(archives) == 1 and archives[0].kind == "tar" and holds_only_tars(files):
            files = read_inner_tars(archives[0], self.say)
            _say_repeated(files, root, self.say)
            return folder.list_tree(folder.build_tree(files), files, root=root, classes=self.classes)
        is_samples = self.labels is None and is_webdataset(files)
        if not is_samples:
            _say_repeated(files, root, self.say)
        if self.labels is not None:
            return self._label(root, self.labels, files)
        if arrays.is_cifar(files.names):
            return arrays.list_cifar(files, root=root, classes=self.classes)
        _refuse_arrays(files.names, root)
        if is_samples:
            return [list_samples(files, root=root, classes=self.classes, say=self.say)]
        top = folder.build_tree(files)
        if top.is_flat and len(archives) > 1:  # one archive for each class
            files = read_archives(archives, lambda _: None, by_stem=True)
            top = folder.build_tree(files, strip=False)
        elif top.is_flat and (truth := imagenet.truth_beside(root, files.names)) is not None:
            return self._label(root, truth, files)
        return folder.list_tree(top, files, root=root, classes=self.classes)


def _say_repeated(files: Files, root: Path, say: Say) -> None:
    """Return the members that an archive holds more than once; the last one counts, as when unpacking."""
    again = [
        files.names[row]
        for row, before in repeated(files.names, normpath)
        if is_image(files.names[row]) and files.archive(row) == files.archive(before)
    ]
    if again:
        say(f"{root} holds {count(len(again), 'image')} more than once; the last copy counts ({few(again, 3)})")


def _tables_of_splits(path: Path, entries: Sequence[str]) -> dict[str, Path]:
    """The tables (``train.csv``) beside folders of their names that hold images and no folders; by split.

    Empty where there is none for training.
    """
    tables: dict[str, Path] = {}
    for name in entries:
        table = path / name
        split = SPLITS.get(table.stem.casefold(), "")
        if split and table.suffix.lower() in (".csv", ".tsv", ".lst") and table.with_suffix("").is_dir():
            folders, files = folder.read_entries(table.with_suffix(""))
            if not folders and any(map(is_image, files)):
                tables[split] = table
    return tables if "train" in tables else {}


def _refuse_arrays(names: Iterable[str], root: Path) -> None:
    if any(is_image(name) for name in names):
        return
    if {splitext(name)[1].lower() for name in names} <= {".npy", ".npz"}:
        raise DataError(f"{root} holds NumPy arrays: convert them to a folder of classes or to idx files")
    if any("-ubyte" in name for name in names):
        raise DataError(f"{root} holds idx files: unpack it and give the folder")
    if inside := [name for name in names if name.lower().endswith(ARCHIVES)]:
        raise DataError(
            f"{root} holds archives ({few(inside, 3)}) and no images beside them: unpack it and give the folder, or"
            " give a tar of tars, each of them one class"
        )
