"""Find out what a source is, by what is there, and list it."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from importlib import resources
from itertools import islice
from pathlib import Path
from posixpath import normpath, splitext
from typing import Any

import numpy as np

from steadytrain.data.filenames import (
    braces,
    expand,
    folder_splits,
    group_by_split,
    is_ignored,
    is_image,
    is_pattern,
    is_wrapper,
    order_splits,
    repeated,
    split_of,
    split_words,
)
from steadytrain.data.recordio.card import LabelNames
from steadytrain.data.sources import arrays, folder, imagenet, parquet
from steadytrain.data.sources.archives import (
    SourceFile,
    holds_only_tars,
    is_compressed,
    open_source,
    open_sources,
    read_archives,
    read_inner_tars,
)
from steadytrain.data.sources.columns import ColumnNames
from steadytrain.data.sources.labels import require_two_classes
from steadytrain.data.sources.layout import (
    TABLES,
    TOOLS_TABLES,
    Entries,
    FolderLook,
    find_tables,
    flat_splits,
    labels_from_names,
    labels_in_names,
    no_labels,
)
from steadytrain.data.sources.listing import FileList, Listing
from steadytrain.data.sources.paths import ImagesInArchives, ImagesInFolder, none_found
from steadytrain.data.sources.records import list_records
from steadytrain.data.sources.select import merge_sources, take
from steadytrain.data.sources.tables import is_of_paths, read_list, read_table
from steadytrain.data.sources.webdataset import is_webdataset, list_samples
from steadytrain.data.storage.scratch import new_path
from steadytrain.data.storage.store import ObjectPlace, is_uri, local_name
from steadytrain.errors import DataError, SteadyError, describe_type, did_you_mean
from steadytrain.files import other_spelling
from steadytrain.format import Say, count, few

Parts = Mapping[str, Sequence[str]]
"""Folders of images by split, as :func:`~steadytrain.data.sources.layout.flat_splits` returns them."""

_MOST_SCANNED, _MOST_TRIED, _HEAD, _REMEDIES = 10_000, 20, 1 << 16, {"table", "arrays", "remedy"}

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
        columns: the columns of a table that hold paths, labels and splits, and the code page of a zip's names, where
            the user has named them.
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
        place, folder = scratch.absolute().parent, Path(os.path.realpath(source))
        named = ""
        with suppress(SteadyError, OSError):
            named = _name_format(Path(local_name(source))) if labels is root is None and not asked.tables else ""
        if named:
            raise DataError(named) from error
        inside = folder.is_dir() and folder in place.parents
        if inside and not any(is_ignored(part) for part in place.relative_to(folder).parts):
            raise DataError(f"{error} (the output is inside {source}: write it somewhere else)") from error
        raise
    of_tables = replace(asked.columns, zip_names="")  # of which nothing is said where no zip needs it
    for flag, name in of_tables.options() if not asked.tables else ():
        raise DataError(
            f"{flag} {name} names a column of a table (CSV, TSV), and the labels of {source} do not come from one: drop"
            f" {flag}"
        )
    for listing in listings:
        if odd := [n for n in listing.passed_over if n.endswith("/") and n.count("/") > bool(listing.split)]:
            say(f"{source}: {few(odd)} left out, named like recycle bins and caches: rename what is a class")
        if group is not None and listing.groups is None:
            raise DataError(
                f"--group {group} names a column of a CSV or TSV file, and the labels of {source} do not come"
                " from one: drop --group"
            )
        if not source.lower().endswith(".lst"):  # MXNet packs such a part of a set; training refuses it
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
    paths = [Path(os.path.realpath(source)) for source in sources]
    if twice := [source for number, source in enumerate(sources) if paths[number] in paths[:number]]:
        raise DataError(f"{twice[0]} is listed twice, so that each of its images would be used twice: list it once")
    root, labels = (None if path is None else Path(path) for path in (root, labels))
    lookup: dict[str, Any] = {"root": root, "labels": labels, "classes": classes, "group": group, "columns": columns}
    listed = [find(source, **lookup, scratch=scratch, say=say) for source in sources]
    return listed[0] if len(listed) == 1 else merge_sources(listed)


def source_name(data: object) -> str:
    """Return the name of a source as text.

    Raises:
        DataError: an object of Python's memory, with how it becomes one.

    >>> source_name(Path("photos"))
    'photos'
    """
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    remedy = "save its images into a folder for each class; your own loop takes any loader (docs: own-loop)"
    if isinstance(folder := getattr(data, "root", None), str | Path):  # torchvision's data sets
        remedy = f"name its folder, {folder}"
    elif hasattr(data, "save_to_disk"):  # Hugging Face's
        remedy = "data.save_to_disk('photos'), and name that folder, photos"
    elif hasattr(data, "to_csv"):
        remedy = "write it, df.to_csv('photos.csv', index=False), and name that file; it needs paths and labels"
    elif isinstance(data, list | tuple) and all(isinstance(item, str | Path) for item in data):
        remedy = "put them into one folder, or pack them: st.pack([...], 'all.rec')"
    elif isinstance(data, list) and all(isinstance(item, tuple) for item in data):
        remedy = "write a file photos.csv with a header, image,label, and name it"
    raise DataError(f"the data are {describe_type(data)}; they must be the name of a folder or a file: {remedy}")


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
            ObjectPlace.folder(name)
        return
    if source.startswith("pipe:"):
        raise DataError(f"{source} is a command: run it, and name the file that it writes")
    if is_pattern(source) or path.exists():
        return
    if path.is_symlink():
        raise DataError(f"{source} is a broken link (to {path.readlink()}): fix it")
    if other := other_spelling(source):
        raise DataError(f"there is no file or folder {source}. Did you mean {other}?")
    names = {p.name for p in path.parent.iterdir()} if path.parent.is_dir() else set()
    packed = {name.removesuffix(".rec") for name in names if name.endswith(".rec")}
    companions = {f"{name}{ending}" for name in packed for ending in (".idx", ".lst", ".json")}  # no sources themselves
    near = did_you_mean(path.name, sorted(names - companions))
    raise DataError(f"there is no file or folder {source}.{near}")


@dataclass(frozen=True)
class _Members:
    """Members of archives, the folder in them that paths start from, and tables beside the archives."""

    files: FileList
    top: str
    beside: Sequence[str] = ()

    @property
    def base(self) -> str:
        return f"{self.top}/" if self.top else ""


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
        files = self._open(paths)
        kinds = {file.kind for file in files}
        if kinds <= {"tar", "zip"}:
            return self._list_archives(files, path.parent)
        if kinds == {"rec"}:
            return self._list_records(files, self.source)
        if kinds <= {"parquet", "arrow"}:
            return self._list_parquet(paths, Path(os.path.commonpath([path.parent for path in paths])))
        raise DataError(
            f"{self.source} names files of several kinds ({few([path.name for path in paths])}): give each alone"
        )

    def _open(self, paths: Sequence[Path]) -> list[SourceFile]:
        return open_sources(paths, self.scratch, self.say, self.columns.zip_names)

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
            file = self._open([path])[0]
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
            images = ImagesInFolder(self.root or path.parent, table=path, say=self.say)
            return self._read_table(path, images, file.stored_at)
        if file.kind == "rec":
            return self._list_records([file], path)
        if file.kind in ("parquet", "arrow"):
            return self._list_parquet([path], path.parent)
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
        stored_at = parquet.as_text(stored_at or path, self.scratch)
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
        if columnar := parquet.find_files(path):
            return self._list_parquet(columnar, path)
        if archives := [path / name for name in entries if name.lower().endswith(ARCHIVES)]:
            others = [name for name in entries if (path / name).is_dir() or name.lower().endswith(".rec")]
            if others:
                raise DataError(
                    f"{path} holds archives ({archives[0].name}) next to other data ({few(others, 3)}): choose"
                    " one of them"
                )
            if packed := [archive.name for archive in archives if archive.stem.lower().endswith(TABLES)]:
                raise DataError(
                    f"{path} holds a table in an archive of its own ({packed[0]}): unpack it beside the others"
                    f" (unzip {shlex.quote(str(path / packed[0]))} -d {shlex.quote(str(path))}), and remove the archive"
                )
            beside = [name for name in entries if name.lower().endswith(TABLES) and not name.lower().endswith(".lst")]
            return self._list_archives(self._open(archives), path, beside=beside)
        records = [name for name in entries if name.lower().endswith(".rec")]
        if records and not has_folders:
            raise DataError(f"{path} holds record files: give {path / records[0]}, or all of them as '{path}/*.rec'")
        if (truth := imagenet.truth_beside(path, entries)) is not None:
            return self._label(path, truth)
        look = folder.look_on_disk(path)
        if (listed := self._list_flat(look, path)) is not None:
            return listed
        if any(is_image(name) for name in entries) and not has_folders:
            tables = [name for name in entries if name.lower().endswith(TABLES)]
            remedy = (
                f"put the images of each class into a folder ({path.name}/cat/1.jpg), or give their labels with"
                " --labels FILE"
            )
            if tables:
                remedy = f"give {' or '.join(str(path / name) for name in tables[:3])}, if it holds their labels"
            elif words := labels_in_names(look("").images):
                remedy = labels_from_names(path, words, [])
            raise DataError(f"the images in {path} have no classes: {remedy}")
        listings = folder.list_folder(path, classes=self.classes)
        for name in look("").others if len(listings) == 1 else ():
            split, rest = split_words(Path(name).stem)
            if split in ("val", "test") and not rest and name.lower().endswith(TABLES):  # as road signs' Test.csv
                self.say(f"{path / name} is not trained on: steady evaluate RUN {path / name} measures on its images")
        return listings

    def _list_flat(self, look: FolderLook, path: Path, members: _Members | None = None) -> list[Listing] | None:
        """List images without folders of classes, in folders of splits or in one folder, by the tables beside them.

        Args:
            look: tells what lies in the folder, or in the archives.
            path: of the folder, or what the archives are called.
            members: of archives; None for a folder on a disk.

        Returns:
            None where folders are classes, or there is one folder without a table.

        Raises:
            DataError: no table for folders of splits, several that it could be, or one that cannot be read.
        """
        parts = flat_splits(look)
        if not parts:
            return None
        folders = [folder for paths in parts.values() for folder in paths]
        tables = find_tables(look, parts, str(path))
        if parts == {"": ("",)} and members is None and Path(tables.get("", "")).name.casefold() not in TOOLS_TABLES:
            return None  # any other table among single images is for the user to name
        if "" not in tables and "train" not in tables:
            if tables:
                raise DataError(f"{path} has no training set among {few(folders)}: give one of these folders")
            name = folders[0].partition("/")[0]
            is_split = bool(split_words(name)[0]) if members else is_wrapper(name, "")
            if len(folders) == 1 and not is_split and not labels_in_names(look(folders[0]).images):
                return None
            raise no_labels(look, parts, path)
        base = members.base if members else ""
        listings: list[Listing] = []
        for split in ("", "train", "val", "test"):
            if split not in tables:
                continue
            table = tables[split]
            around = table.rpartition("/")[0]
            places = [around, *parts.get(split, folders), *(folder.rpartition("/")[0] for folder in folders)]
            prefixes = [f"{base}{folder}/" if folder else base for folder in places]
            part = self._after(listings)
            try:
                listed = part._list_table(table, path, list(dict.fromkeys(prefixes)), members)
            except DataError as error:
                if split != "test":
                    raise
                self.say(f"skipped: {error}")  # of a contest: its images have no labels
                continue
            if len(tables) == 1 and len(listed) > 1:
                return listed
            if len(listed) > 1:
                raise DataError(f"{path / table} is named after one split but holds several: use it alone")
            listings += [replace(listed[0], split=split)] if split else _by_folder(listed[0], parts, base)
        splits = {*tables, *(listing.split for listing in listings)}
        if left := [folder for split in parts if split and split not in splits for folder in parts[split]]:
            self.say(f"{path}: no labels for the images in {few(left)}; they are left out")
        tops = {folder.partition("/")[0] for folder in folders}
        if others := [name for name in look("").folders if name not in tops and look(name).images and "" not in tops]:
            self.say(f"{path}: {few(others)} hold{'s' * (len(others) == 1)} images of no split; they are left out")
        return self._in_order(listings, path)

    def _after(self, listings: Sequence[Listing]) -> _Source:
        """Return this for another split: with the class list of the training set, which comes first, and its column."""
        if not listings:
            return self
        first = listings[0]
        names = first.classes or (LabelNames(first.label_names) if first.label_names else None)
        return replace(self, classes=self.classes or names, columns=replace(self.columns, trained=first.label_column))

    def _in_order(self, listings: Sequence[Listing], path: Path) -> list[Listing]:
        """Order the listings of splits; one alone is no split."""
        splits = {listing.split: listing for listing in listings}
        # Packing says it of images whose names begin so.
        is_said = "test" in splits and splits["test"].names[0].casefold().startswith("test")
        ordered = order_splits(splits, (lambda _: None) if is_said else self.say, str(path))
        if len(ordered) == 1:
            return [replace(listings[0], split="")]
        return [replace(listing, split=split) for split, listing in ordered.items()]

    def _list_table(self, name: str, path: Path, prefixes: Sequence[str], members: _Members | None) -> list[Listing]:
        """Read the table ``name`` that lies in the folder ``path``, or in archives as their images do."""
        table = path / name
        if members is not None and table.suffix.lower() == ".lst":
            raise DataError(f"{table} is a .lst in an archive: unpack it, and give the .lst with --root FOLDER")
        if table.suffix.lower() == ".lst" and not is_of_paths(table):
            listing = read_list(table, root=path, prefixes=prefixes, classes=self.classes, say=self.say)
            if np.all(listing.sizes < 0):
                raise none_found(table, path, listing.names, is_source=True)
            return [listing]
        if members is None:
            places: dict[str, Any] = {"table": table, "prefixes": prefixes, "say": self.say}
            return self._read_table(table, ImagesInFolder(path, is_source=True, **places))
        images = ImagesInArchives(members.files, path, table=table, prefixes=prefixes, say=self.say)
        if name in members.beside:
            return self._read_table(table, images)
        member = normpath(f"{members.base}{name}")
        row = next(row for row, other in enumerate(members.files.names) if normpath(other) == member)
        stored_at = new_path(self.scratch, table.name)
        stored_at.write_bytes(members.files.read(row))
        return self._read_table(table, images, stored_at)

    def _label(self, path: Path, labels: Path, files: FileList | None = None) -> list[Listing]:
        """List images that lie in a folder, or are ``files``, with their labels in a file of their own."""
        truth = imagenet.read_truth(labels, self.scratch, self.say)
        if truth is None:
            top = None if files is None else folder.build_tree(files)
            look = folder.look_on_disk(path) if files is None or top is None else top.look(files)
            base = f"{top.name}/" if top is not None and top.name else ""
            parts = flat_splits(look)
            prefixes = ["", *(f"{base}{folder}/" for paths in parts.values() for folder in paths if folder)]
            places: dict[str, Any] = {"table": labels, "prefixes": prefixes, "say": self.say}
            listed = self._read_table(
                labels,
                ImagesInFolder(path, is_source=True, **places)
                if files is None
                else ImagesInArchives(files, path, **places),
            )
            if len(listed) > 1 or len(parts) < 2:
                return listed
            return self._in_order(_by_folder(listed[0], parts, base), path)
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
                listing = part._list_archives(self._open([path]), path)[0]
            elif truth is not None:
                listing = part._label(path, truth)[0]
            else:
                listing = folder.list_folder(path, classes=classes)[0]
            listings.append(replace(listing, split=split if len(parts) > 1 else ""))
        return listings

    def _list_archives(self, archives: Sequence[SourceFile], root: Path, beside: Sequence[str] = ()) -> list[Listing]:
        """List one archive, or several that belong together; messages call them ``root``.

        ``beside`` are the names of tables in the same folder.
        """
        if beside and self.labels is None:
            files = read_archives(archives, lambda _: None, by_stem=True)
            look = folder.build_tree(files, strip=False).look(files)
            if flat_splits(look) and not is_webdataset(files):

                def look_beside(path: str) -> Entries:
                    return look(path) if path else look(path)._replace(others=beside)

                if (listed := self._list_flat(look_beside, root, _Members(files, "", beside))) is not None:
                    return listed
        groups = {"": list(archives)}
        names = [archive.path.name for archive in archives]
        if len(archives) > 1 and not (self.labels is None and _are_classes(archives)):
            groups = group_by_split(archives, names, str(root))
        if len(groups) == 1:
            return self._list_members(archives, root)
        listings: list[Listing] = []
        for split, group in order_splits(groups, self.say, str(root)).items():
            parts = self._after(listings)._list_members(group, root)
            if len(parts) > 1:
                raise DataError(f"{group[0].path} is named after one split but holds several: use it alone")
            listings.append(replace(parts[0], split=split))
        return listings

    def _list_parquet(self, paths: Sequence[Path], root: Path) -> list[Listing]:
        """List Parquet or Arrow files, by the splits that their names and folders mention."""
        self._refuse("--labels", root)
        listings: list[Listing] = []
        for split, group in parquet.group_files(paths, root, self.say).items():
            part = self._after(listings)
            known: dict[str, Any] = {"classes": part.classes, "named": part.columns}
            try:
                listings.append(
                    parquet.list_files(group, split, root=root, **known, scratch=self.scratch, say=self.say)
                )
            except DataError as error:
                if split != "test":
                    raise
                self.say(f"skipped: {error}")  # of a contest: its images have no labels
        self.tables.extend(paths)
        return self._in_order(listings, root)

    def _list_members(self, archives: Sequence[SourceFile], root: Path) -> list[Listing]:
        """List archives of one split: folders of classes, samples, arrays, or a tar for each class."""
        files = read_archives(archives, self.say)
        if not files.names:
            raise DataError(f"{root} holds no files: give an archive with one folder of images for each class")
        if len(archives) == 1 and archives[0].kind == "tar" and holds_only_tars(files):
            files = read_inner_tars(archives[0], self.say)
            _say_repeated(files, root, self.say)
            top = folder.build_tree(files)
            return self._list_flat(top.look(files), root, _Members(files, top.name)) or folder.list_tree(
                top, files, root=root, classes=self.classes
            )
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
        if top.is_flat(files) and len(archives) > 1:  # one archive for each class
            files = read_archives(archives, lambda _: None, by_stem=True)
            top = folder.build_tree(files, strip=False)
        elif top.is_flat(files) and (truth := imagenet.truth_beside(root, files.names)) is not None:
            return self._label(root, truth, files)
        elif (listed := self._list_flat(top.look(files), root, _Members(files, top.name))) is not None:
            return listed
        return folder.list_tree(top, files, root=root, classes=self.classes)


def _name_format(where: Path) -> str:
    """Say what a folder, a file or an archive holds that is no source, and the way on; empty where it is not known."""
    names, top, files = [where.name] * where.is_file(), where.parent, None
    if where.name.lower().endswith((".zip", ".tar")) and where.is_file() and not is_compressed(where):
        files = read_archives([open_source(where, top, lambda _: None)], lambda _: None)
        names = list(files.names)
    elif where.is_dir():
        walk = (Path(place, name).relative_to(where) for place, _, names in os.walk(where) for name in sorted(names))
        names, top = [name.as_posix() for name in islice(walk, _MOST_SCANNED) if not is_ignored(name.name)], where

    def start(name: str) -> str:
        with nullcontext(None) if files else (top / name).open("rb") as file:
            return (file.read(_HEAD) if file else files.read(names.index(name))).decode("latin-1")  # type: ignore

    folders = {name.rpartition("/")[0].rpartition("/")[2] for name in names if is_image(name)}
    classes = [folder for folder in folders if folder and not split_words(folder)[0] and not is_wrapper(folder, "")]
    table = tomllib.loads(resources.files("steadytrain.data.sources").joinpath("formats.toml").read_text("utf-8"))
    for row in table["formats"]:
        if ("alone" in row and folders) or ("table" in row and len(classes) > 1):
            continue
        fit = [name for name in names if re.search(row["file"], name)][:_MOST_TRIED]
        fit = [name for name in fit if re.search(row.get("holds", ""), start(name), re.DOTALL)]
        if fit and files:
            return f"{where} holds {row['name']}: unpack it, and give the folder, of which a message gives the command"
        if fit:
            [remedy] = [table.get(key, "PAIRS").replace("PAIRS", row[key]) for key in row.keys() & _REMEDIES]
            places = {"FILES": fit, "FILE": fit[:1], "FOLDER": ["."], "BESIDE": [fit[0].rpartition("/")[0]]}
            for word, paths in places.items():
                remedy = remedy.replace(word, " ".join(shlex.quote(str(top / path)) for path in paths))
            return f"{where} {'holds' if where.is_dir() else 'is'} {row['name']}: {remedy}"
    return ""


def _are_classes(archives: Sequence[SourceFile]) -> bool:
    """Return whether archives some of whose names sound like splits (``train.tar``, ``train_station.tar``) are classes.

    They are if other names do not sound so, and each holds images in one folder, without labels.
    """
    stems = [archive.path.name.partition(".")[0] for archive in archives]
    if len(folder_splits(stems)) == len(stems) or not any(map(split_of, stems)):
        return False
    for archive in archives:
        files = read_archives([archive], lambda _: None)
        if is_webdataset(files) or not folder.build_tree(files).is_flat(files):
            return False
    return True


def _say_repeated(files: FileList, root: Path, say: Say) -> None:
    """Return the members that an archive holds more than once; the last one counts, as when unpacking."""
    again = [
        files.names[row]
        for row, before in repeated(files.names, normpath)
        if is_image(files.names[row]) and files.archive(row) == files.archive(before)
    ]
    if again:
        say(f"{root} holds {count(len(again), 'image')} more than once; the last copy counts ({few(again, 3)})")


def _by_folder(listing: Listing, parts: Parts, base: str) -> list[Listing]:
    """Split a listing by the folders of splits that its images lie in; what lies in none of them is trained on."""
    folders = {f"{base}{folder}/": split for split, paths in parts.items() for folder in paths}
    names = map(normpath, listing.names)
    splits = np.array([next((folders[folder] for folder in folders if name.startswith(folder)), "") for name in names])
    splits[splits == ""] = "train"
    if "train" not in splits:
        return [listing]
    rows = {split: np.flatnonzero(splits == split) for split in ("train", "val", "test")}
    return [replace(take(listing, rows[split]), split=split) for split in rows if len(rows[split])]


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
