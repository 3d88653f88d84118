"""Images inside tars and zips: folders of classes, an archive for each class, tables, or the splits of these."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from posixpath import splitext

from steadytrain.data.filenames import folder_splits, group_by_split, is_image, order_splits, split_of, split_words
from steadytrain.data.sources import folder, imagenet
from steadytrain.data.sources.archives import SourceFile, holds_only_tars, read_archives, read_inner_tars
from steadytrain.data.sources.labelled import find_flat, label, list_flat
from steadytrain.data.sources.layout import TABLES, parts_of_one
from steadytrain.data.sources.listing import FileList, Listing
from steadytrain.data.sources.source import COLUMNS, LABELS, Request, SourceKind, refuse_columns
from steadytrain.data.sources.webdataset import is_webdataset
from steadytrain.errors import DataError
from steadytrain.format import few

_GOOGLE_DRIVE = re.compile(r"-\d{8}T\d{6}Z(-\d+)+$")
_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip")


def _archives_in(request: Request) -> list[Path]:
    paths = (request.where / name for name in request.entries if name.lower().endswith(_ENDINGS))
    return [path for path in paths if not path.is_dir()]


def _is_folder(request: Request) -> bool:
    if not request.is_folder or not _archives_in(request):
        return False
    return request.labels is None or not (request.has_folders or any(map(is_image, request.entries)))


def _list_folder(request: Request) -> list[Listing]:
    """List the archives in a folder as one set."""
    where, archives = request.where, _archives_in(request)
    if others := [n for n in request.entries if (where / n).is_dir() or n.lower().endswith(".rec")]:
        raise DataError(
            f"{where} holds archives ({archives[0].name}) next to other data ({few(others, 3)}): choose one of them"
        )
    if packed := [archive.name for archive in archives if archive.stem.lower().endswith(TABLES)]:
        raise DataError(
            f"{where} holds a table in an archive of its own ({packed[0]}): unpack it beside the others"
            f" (unzip {shlex.quote(str(where / packed[0]))} -d {shlex.quote(str(where))}), and remove the archive"
        )
    return request.list_part(request.part(_place_of(request, archives), archives))


def _place_of(request: Request, archives: list[Path]) -> Path:
    """Return what messages call some archives of a request."""
    return archives[0] if len(archives) == 1 else request.where


def _groups(request: Request) -> dict[str, list[Path]]:
    """Return the archives by the split that their names mention."""
    if len(request.paths) < 2 or not request.is_archive or (request.labels is None and _are_classes(request.files)):
        return {"": list(request.paths)}
    return group_by_split(request.paths, [path.name for path in request.paths], str(request.where))


def _are_classes(archives: list[SourceFile]) -> bool:
    """Return whether archives some of whose names sound like splits (``train.tar``, ``train_station.tar``) are classes.

    They are if other names do not sound so, and each holds images in one folder, without labels.
    """
    stems = [archive.path.name.partition(".")[0] for archive in archives]
    splits = folder_splits(stems)  # of cat-train and cat-val there are two
    if len(splits) == len(stems) or len({*splits.values()}) > 1 or not any(map(split_of, stems)):
        return False
    members = (read_archives([archive], lambda _: None) for archive in archives)
    return all(not is_webdataset(files) and _are_in_one_folder(files) for files in members)


def _are_in_one_folder(files: FileList) -> bool:
    return folder.build_tree(files).is_flat(files)


def _are_parts(archives: list[SourceFile]) -> bool:
    """Return whether archives are parts of one set by their names: ``images_001.zip``, ``train_2.tar``, Google's."""
    stems = [archive.path.name.partition(".")[0] for archive in archives]
    are_splits = all(split and not others for split, others in map(split_words, stems))
    return bool(parts_of_one(stems)) or are_splits or all(map(_GOOGLE_DRIVE.search, stems))


def _list_splits(request: Request) -> list[Listing]:
    listings: list[Listing] = []
    for split, paths in order_splits(_groups(request)).items():
        part = request.part(_place_of(request, paths), paths, after=listings)
        try:
            parts = request.list_part(part)
        except DataError as error:
            if split != "test" or (request.labels is None and not _are_in_one_folder(part.members)):
                raise
            request.say(f"skipped: {error}")  # of a contest: its images have no labels
            continue
        if len(parts) > 1:
            raise DataError(f"{paths[0]} is named after one split but holds several: use it alone")
        listings.append(replace(parts[0], split=split))
    return listings


def _holds_tars(request: Request) -> bool:
    return len(request.paths) == 1 and request.kinds == {"tar"} and holds_only_tars(request.members)


def _list_tars(request: Request) -> list[Listing]:
    files = read_inner_tars(request.files[0], request.say)
    return _list_tree(request, folder.build_tree(files), files)


def _hold_images(request: Request) -> bool:
    return request.is_archive and any(map(is_image, request.members.names))


def _list_members(request: Request) -> list[Listing]:
    """List archives of one split: folders of classes, images with a table, or an archive for each class."""
    files = request.members
    if not files.names:
        raise DataError(f"{request.where} holds no files: give an archive with one folder of images for each class")
    _refuse_arrays(files.names, request.where)
    top = folder.build_tree(files)
    if top.is_flat(files) and len(request.paths) > 1 and not _are_parts(request.files):  # one archive for each class
        files = read_archives(request.files, lambda _: None, by_stem=True)
        refuse_columns(request)
        top = folder.build_tree(files, strip=False)
        return folder.list_tree(top, files, root=request.where, classes=request.classes, say=request.say)
    if top.is_flat(files) and (truth := imagenet.truth_beside(request.where, files.names)) is not None:
        return label(request, truth, files)
    return _list_tree(request, top, files)


def _list_tree(request: Request, top: folder.Folder, files: FileList) -> list[Listing]:
    look = top.look(files)
    if (flat := find_flat(look, request.where, is_archive=True)) is not None:
        return list_flat(request, look, flat, files, f"{top.name}/" if top.name else "")
    refuse_columns(request)
    return folder.list_tree(top, files, root=request.where, classes=request.classes, say=request.say)


def _refuse_arrays(names: Iterable[str], where: Path) -> None:
    if any(is_image(name) for name in names):
        return
    if {splitext(name)[1].lower() for name in names} <= {".npy", ".npz"}:
        raise DataError(f"{where} holds NumPy arrays: convert them to a folder of classes or to idx files")
    if any("-ubyte" in name for name in names):
        raise DataError(f"{where} holds idx files: unpack it and give the folder")
    if inside := [name for name in names if name.lower().endswith((*TABLES, ".rec", ".parquet", ".arrow"))]:
        raise DataError(f"{where} holds {few(inside, 3)} and no images: unpack it, and give the file")
    if inside := [name for name in names if name.lower().endswith(_ENDINGS)]:
        raise DataError(
            f"{where} holds archives ({few(inside, 3)}) and no images beside them: unpack it and give the folder, or"
            " give a tar of tars, each of them one class"
        )


_TAKES = (LABELS, COLUMNS)
FOLDER = SourceKind("a folder of archives", _is_folder, _list_folder, _TAKES)
LABELLED_FOLDER = SourceKind(
    "a folder of archives and a file of labels",
    lambda request: request.labels is not None and _is_folder(request),
    _list_folder,
    _TAKES,
)
SPLITS = SourceKind("archives named after splits", lambda request: len(_groups(request)) > 1, _list_splits, _TAKES)
TARS = SourceKind("a tar of tars", _holds_tars, _list_tars, _TAKES)
ARCHIVES = SourceKind("archives", _hold_images, _list_members, _TAKES)
