"""Find out what a source is, by what is there, and list it."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any

from steadytrain.data.filenames import braces, expand, is_ignored, is_image, is_pattern, is_wrapper, split_words
from steadytrain.data.sources import archived, arrays, folder, imagenet, labelled, parquet, records, tables, webdataset
from steadytrain.data.sources.columns import ColumnNames
from steadytrain.data.sources.labels import require_two_classes
from steadytrain.data.sources.listing import Listing
from steadytrain.data.sources.select import merge_sources
from steadytrain.data.sources.source import Request, SourceKind, find_added
from steadytrain.data.storage.store import ObjectPlace, is_uri, local_name
from steadytrain.errors import DataError, SteadyError, describe_type, did_you_mean
from steadytrain.files import other_spelling
from steadytrain.format import Say, few

SOURCES: tuple[SourceKind, ...] = (
    archived.SPLITS,
    archived.LABELLED_FOLDER,
    labelled.LABELLED,
    imagenet.IMAGENET,
    archived.TARS,
    arrays.CIFAR,
    arrays.IDX,
    parquet.PARQUET,
    archived.FOLDER,
    records.RECORDS,
    imagenet.VALIDATION,
    webdataset.WEBDATASET,
    archived.ARCHIVES,
    labelled.FLAT,
    folder.FOLDER,
    tables.LIST,
    tables.TABLE,
)
"""The kinds of sources, in the order in which they are asked; other packages' kinds come behind them."""

_MOST_SCANNED, _MOST_TRIED, _HEAD, _REMEDIES = 10_000, 20, 1 << 16, {"table", "arrays", "remedy"}
_DESCRIPTIONS = (".json", ".yaml", ".yml")  # texts that are no tables


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
    request = Request(
        source=source,
        where=Path(local_name(source)),
        paths=(),
        scratch=scratch,
        say=say,
        list_part=_list,
        root=root,
        labels=labels,
        classes=classes,
        group=group,
        columns=columns or ColumnNames(),
    )
    try:
        request = _with_paths(request)
        listings = _list(request)
    except OSError as error:
        raise DataError(f"cannot read {error.filename or source}: {error.strerror or error}") from error
    except DataError as error:
        is_of_table = any(
            file.kind == "text" and file.path.suffix not in _DESCRIPTIONS for file in request.opened.values()
        )
        named = ""
        with suppress(SteadyError, OSError):
            named = _name_format(request) if labels is root is None and not is_of_table else ""
        if named:
            raise DataError(named) from error
        place, around = scratch.absolute().parent, Path(os.path.realpath(source))
        inside = around.is_dir() and around in place.parents
        if inside and not any(is_ignored(part) for part in place.relative_to(around).parts):
            raise DataError(f"{error} (the output is inside {source}: write it somewhere else)") from error
        raise
    for listing in listings:
        if odd := [n for n in listing.passed_over if n.endswith("/") and n.count("/") > bool(listing.split)]:
            say(f"{source}: {few(odd)} left out, named like recycle bins, caches and masks: rename what is a class")
        if not source.lower().endswith(".lst"):  # MXNet packs such a part of a set; training refuses it
            require_two_classes(listing.classes, listing.labels, source)
    return listings


def _with_paths(request: Request) -> Request:
    """Add the files that a name stands for. Raises DataError where there is nothing, or what is no source."""
    source, path = request.source, request.where
    require_there(source)
    if is_uri(source):
        raise DataError(f"{source} is in a store: name a local copy")  # whoever reads URIs has made one
    if os.path.exists(path):  # noqa: PTH110 - the names of many files may be longer than a path may be
        if not path.is_dir() and not path.is_file():
            raise DataError(f"{path} is neither a file nor a folder")
        return request if path.is_dir() else request.part(path, [path])
    paths = expand(source)
    folders = [path for path in paths if path.is_dir()]
    if folders or all(is_image(path.name) for path in paths):
        listed = f"{folders[0]}, a folder" if folders else f"{len(paths):,} images without labels"
        raise DataError(f"{source} names {listed}: give one folder with a folder of images for each class")
    around = Path(os.path.commonpath([path.parent for path in paths]))
    return request.part(around if len(paths) > 1 else paths[0], paths)


def _list(request: Request) -> list[Listing]:
    """List a source by the first kind that recognises it, of ours and then of other packages."""
    refusal: DataError | None = None
    kind: SourceKind | None = None
    try:
        kind = next((source for source in SOURCES if source.recognise(request)), None)
    except DataError as error:  # of what is damaged, or is known and not read
        refusal = error
    kind = kind or find_added(request)
    if kind is None and refusal is not None:
        raise refusal
    kind = kind or _nearest_kind(request)
    kind.refuse_unused(request)
    return kind.list(request)


def _nearest_kind(request: Request) -> SourceKind:
    """Return the kind that says best why nothing is read of a source that no kind recognises."""
    if request.is_folder:
        return folder.FOLDER
    if request.is_archive:
        return archived.ARCHIVES
    if request.kinds == {"text"}:
        return tables.TABLE
    if len(request.kinds) > 1:
        names = few([path.name for path in request.paths])
        raise DataError(f"{request.source} names files of several kinds ({names}): give each alone")
    raise DataError(
        f"{request.where} is not a kind of file that can be read: use a folder of classes, a .lst, a table (CSV), an"
        " archive (tar, zip), WebDataset shards, idx or CIFAR binary files, or a .rec"
    )


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
    """Return the name of a source as text. Raises DataError for an object of Python's memory.

    >>> source_name(Path("photos"))
    'photos'
    """
    if isinstance(data, str | os.PathLike):
        return os.fspath(data)
    raise DataError(
        f"the data are {describe_type(data)}, and this takes the name of a folder or a file: save images that are in"
        " memory, or train on them as they are"
    )


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
    packed = {name.removesuffix(".rec") for name in names if name.endswith(".rec")}  # what lies beside is no source
    near = did_you_mean(path.name, sorted(n for n in names if n.rpartition(".")[0] not in packed or n.endswith(".rec")))
    raise DataError(f"there is no file or folder {source}.{near}")


def _name_format(request: Request) -> str:
    """Say what a folder, a file or archives hold that is no source, and the way on; empty where it is not known."""
    where = request.where
    names, top, files = [where.name] * where.is_file(), where.parent, None
    with suppress(DataError):  # a file that is known and not read
        files = request.members if request.is_archive else None
    if files is not None:
        names = list(files.names)
    elif where.is_dir():
        walk = (Path(place, name).relative_to(where) for place, _, names in os.walk(where) for name in sorted(names))
        names, top = [name.as_posix() for name in islice(walk, _MOST_SCANNED) if not is_ignored(name.name)], where

    def start(name: str) -> str:
        if files is not None:
            return files.read(names.index(name))[:_HEAD].decode("latin-1")
        with (top / name).open("rb") as file:
            return file.read(_HEAD).decode("latin-1")

    folders = {name.rpartition("/")[0].rpartition("/")[2] for name in names if is_image(name)}
    classes = [folder for folder in folders if folder and not split_words(folder)[0] and not is_wrapper(folder, "")]
    table = tomllib.loads(resources.files("steadytrain.data.sources").joinpath("formats.toml").read_text("utf-8"))
    for row in table["formats"]:
        if ("alone" in row and folders) or ("table" in row and len(classes) > 1) or ("flat" in row and classes):
            continue
        fit = [name for name in names if re.search(row["file"], name)][:_MOST_TRIED]
        if "flat" in row and len(fit) == _MOST_TRIED:  # one beside each image
            continue
        fit = [name for name in fit if re.search(row.get("holds", ""), start(name), re.DOTALL)]
        if fit and files is not None:
            return f"{where} holds {row['name']}: unpack it, and give the folder, of which a message gives the command"
        if fit:
            [remedy] = [table.get(key, "PAIRS").replace("PAIRS", row[key]) for key in row.keys() & _REMEDIES]
            places = {"FILES": fit, "FILE": fit[:1], "FOLDER": ["."], "BESIDE": [fit[0].rpartition("/")[0]]}
            for word, paths in places.items():
                remedy = remedy.replace(word, " ".join(shlex.quote(str(top / path)) for path in paths))
            return f"{where} {'holds' if where.is_dir() else 'is'} {row['name']}: {remedy}"
    return ""
