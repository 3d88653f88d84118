"""Find out what a source is, by what is there, and list it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from steadytrain.data.sources import cifar, idx, imagenet, naming, patterns, places, recfile, table, truth
from steadytrain.data.sources.container import Plain, open_all, open_plain
from steadytrain.data.sources.contents import ARCHIVES, Asked, list_archives
from steadytrain.data.sources.listing import Listing, is_ignored, is_image, list_folder
from steadytrain.data.sources.located import none_found
from steadytrain.data.sources.lst import read_list
from steadytrain.data.sources.members import few
from steadytrain.data.sources.select import merge_sources
from steadytrain.errors import DataError, did_you_mean

_ADDRESSES = ("http://", "https://", "s3://", "gs://", "az://", "hf://", "pipe:", "file://")


def find(
    source: str,
    *,
    root: Path | None = None,
    labels: Path | None = None,
    classes: Sequence[str] | None = None,
    scratch: Path,
    say: Callable[[str], None],
) -> list[Listing]:
    """List whatever a user names as data.

    Args:
        source: a folder, a file, or several by braces and wildcards: ``shards-{000..010}.tar``.
        root: the folder that a list's or a table's paths start from; None: its own.
        labels: a file of labels, for images that lie in no folders of classes.
        classes: the class list and its order; None takes what is found.
        scratch: a folder to decompress into. It may not exist yet; whoever gave it removes it when nothing is read from
            the listings any more.
        say: takes remarks, a line each.

    Returns:
        Training set first; one listing, or one for each split. All have one class list.

    Raises:
        DataError: nothing there, of a kind that is not read, damaged, or not fit to train on; says the remedy.
        StorageError: no room to decompress.
    """
    asked = Asked(labels, classes, scratch, say)
    try:
        found = _find(source, root, asked)
    except OSError as error:
        raise DataError(f"cannot read {error.filename or source}: {error.strerror or error}") from error
    except DataError as error:
        if _lies_in(scratch.absolute().parent, Path(source)):
            raise DataError(f"{error} (what is written lies in {source} itself: write outside it)") from error
        raise
    for listing in found:
        naming.require_two(listing.classes, listing.labels, source)
    return found


def find_all(
    sources: Sequence[str],
    *,
    root: str | Path | None = None,
    labels: str | Path | None = None,
    classes: Sequence[str] | None = None,
    scratch: Path,
    say: Callable[[str], None],
) -> list[Listing]:
    """List several sources as one, split by split; arguments and errors as for :func:`find`."""
    places = [Path(one).resolve() for one in sources]
    if twice := [one for number, one in enumerate(sources) if places[number] in places[:number]]:
        raise DataError(f"{twice[0]} is given twice, and each of its images would be in the set twice: give it once")
    at, told = (None if one is None else Path(one) for one in (root, labels))
    found = [find(one, root=at, labels=told, classes=classes, scratch=scratch, say=say) for one in sources]
    return found[0] if len(found) == 1 else merge_sources(found)


def require_there(source: str) -> None:
    """Refuse what leads nowhere, before anything is done with it; a pattern's files are for :func:`find` to look at.

    Raises:
        DataError: nothing of that name, with what is like it; an address; no name.
    """
    path = Path(source)
    if not source.strip():
        raise DataError("the name of the source is empty (a variable that is not set?): give a folder or a file")
    if source.startswith(_ADDRESSES):
        raise DataError(f"{source} is an address: download it and give the file")
    if path.exists() or patterns.is_pattern(source):
        return
    if path.is_symlink():
        raise DataError(f"{source} is a link that leads nowhere (to {path.readlink()}): mend it")
    near = did_you_mean(path.name, [p.name for p in path.parent.iterdir()]) if path.parent.is_dir() else ""
    raise DataError(f"there is no file or folder {source}.{near}")


def _find(source: str, root: Path | None, asked: Asked) -> list[Listing]:
    require_there(source)
    path = Path(source)
    if not path.exists():
        return _several(source, patterns.expand(source), root, asked)
    if asked.labels is not None and not asked.labels.is_file():
        raise DataError(f"there is no file of labels {asked.labels}")
    return _folder(path, root, asked) if path.is_dir() else _file(path, root, asked)


def _file(path: Path, root: Path | None, asked: Asked) -> list[Listing]:
    if not path.is_file():
        raise DataError(f"{path} is neither a file nor a folder: give one of the two")
    is_list = path.suffix.lower() == ".lst"
    plain = Plain(path, path, "list", 0) if is_list else open_plain(path, asked.scratch, asked.say)
    if plain.kind == "list":
        _refuse(asked.labels, "--labels", path)
        listing = read_list(plain.at, root=root or path.parent, classes=asked.classes)
        if np.all(listing.sizes < 0):
            raise none_found(path, listing.root, listing.names)
        return [listing]
    if plain.kind == "text":
        _refuse(asked.labels, "--labels", path)
        folder = places.InFolder(root or path.parent, table=path)
        return table.read_table(path, folder, classes=asked.classes, say=asked.say, at=plain.at)
    _refuse(root, "--root", path)
    if plain.kind in ("tar", "zip"):
        return list_archives([plain], asked, root=path)
    _refuse(asked.labels, "--labels", path)
    if plain.kind == "rec":
        return _records([plain], asked)
    if plain.kind == "idx":
        return [idx.list_pair(plain, classes=asked.classes, scratch=asked.scratch, say=asked.say)]
    raise DataError(
        f"{path} is no kind of file that is read here: give a folder of classes, a .lst, a table (CSV), an archive"
        " (tar, zip), WebDataset shards, idx or CIFAR binary files, or a .rec"
    )


def _several(source: str, paths: Sequence[Path], root: Path | None, asked: Asked) -> list[Listing]:
    _refuse(root, "--root", Path(source))
    folders = [path for path in paths if path.is_dir()]
    if folders or all(is_image(path.name) for path in paths):
        what = f"{folders[0]}, a folder" if folders else f"{len(paths):,} images without labels"
        raise DataError(f"{source} names {what}: give one folder with a folder of images for each class")
    if len(paths) == 1:
        return _file(paths[0], None, asked)
    plain = open_all(paths, asked.scratch, asked.say)
    kinds = {one.kind for one in plain}
    if kinds <= {"tar", "zip"}:
        return list_archives(plain, asked, root=Path(source).parent)
    if kinds == {"rec"}:
        _refuse(asked.labels, "--labels", Path(source))
        return _records(plain, asked)
    raise DataError(f"{source} names files of several kinds ({few([path.name for path in paths])}): give each alone")


def _records(files: Sequence[Plain], asked: Asked) -> list[Listing]:
    if packed := [one.path for one in files if one.at != one.path]:
        raise DataError(f"{packed[0]} is a compressed record file: decompress it, with its .idx and .json beside it")
    return recfile.list_files([one.path for one in files], classes=asked.classes, scratch=asked.scratch, say=asked.say)


def _lies_in(place: Path, source: Path) -> bool:
    """Whether a place is in a source, where the source's folders are looked at."""
    whole = source.resolve()
    if not whole.is_dir() or whole not in place.parents:
        return False
    return not any(is_ignored(part) for part in place.relative_to(whole).parts)


def _folder(path: Path, root: Path | None, asked: Asked) -> list[Listing]:
    _refuse(root, "--root", path)
    entries = sorted(one.name for one in path.iterdir() if not is_ignored(one.name))
    if asked.labels is not None:
        return _labelled(path, asked.labels, asked)
    if found := imagenet.parts(path):
        return _imagenet(path, found, asked)
    if cifar.is_cifar(entries):
        return cifar.list_folder(path, classes=asked.classes, say=asked.say)
    if idx.is_idx_folder(entries):
        return idx.list_folder(path, classes=asked.classes, scratch=asked.scratch, say=asked.say)
    if archives := [path / name for name in entries if name.lower().endswith(ARCHIVES)]:
        return _archives(path, entries, archives, asked)
    if (records := [name for name in entries if name.lower().endswith(".rec")]) and not _has_folders(path, entries):
        raise DataError(f"{path} holds record files: give {path / records[0]}, or all of them as '{path}/*.rec'")
    beside = imagenet.truth_beside(path, entries)
    if beside is not None:
        return _labelled(path, beside, asked)
    if any(is_image(name) for name in entries) and not _has_folders(path, entries):
        raise _unlabelled(path, entries)
    return list_folder(path, classes=asked.classes)


def _labelled(folder: Path, labels: Path, asked: Asked) -> list[Listing]:
    known = truth.read_truth(labels, asked.scratch, asked.say)
    if known is not None:
        return [imagenet.list_flat(folder, known, classes=asked.classes)]
    where = places.InFolder(folder, table=labels)
    return table.read_table(labels, where, classes=asked.classes, say=asked.say)


def _archives(folder: Path, entries: Sequence[str], archives: Sequence[Path], asked: Asked) -> list[Listing]:
    """A folder of shards, or of archives named for splits or classes."""
    others = [name for name in entries if (folder / name).is_dir() or name.lower().endswith(".rec")]
    if others:
        raise DataError(f"{folder} holds archives ({archives[0].name}) beside other data ({few(others, 3)}): give one")
    plain = open_all(archives, asked.scratch, asked.say)
    return list_archives(plain, asked, root=folder)


def _imagenet(folder: Path, found: dict[str, Path], asked: Asked) -> list[Listing]:
    listings: list[Listing] = []
    for split, path in found.items():
        given = asked.classes or (listings[0].classes if listings else None)
        wanted = replace(asked, classes=given)
        beside = imagenet.truth_beside(path, ["ILSVRC2012_val_00000001.JPEG"]) if split == "val" else None
        if split == "val" and beside is None:
            raise imagenet.without_truth(path)
        if path.is_dir():
            one = _labelled(path, beside, wanted) if beside else list_folder(path, classes=given)
        else:
            plain = open_plain(path, asked.scratch, asked.say)
            one = list_archives([plain], replace(wanted, labels=beside), root=path)
        listings.append(replace(one[0], split=split if len(found) > 1 else ""))
    return listings


def _has_folders(folder: Path, entries: Sequence[str]) -> bool:
    return any((folder / name).is_dir() for name in entries)


def _unlabelled(folder: Path, entries: Sequence[str]) -> DataError:
    tables = [name for name in entries if name.lower().endswith((".csv", ".tsv", ".lst"))]
    remedy = (
        f"give {folder / tables[0]}, if it holds their labels"
        if tables
        else f"put those of each class into a folder of its own ({folder.name}/cat/1.jpg), or give their labels with"
        " --labels FILE"
    )
    return DataError(f"the images in {folder} are in no class: {remedy}")


def _refuse(given: Path | None, option: str, path: Path) -> None:
    goes_with = "a .lst or a table" if option == "--root" else "a folder or an archive of images"
    if given is not None:
        raise DataError(f"{option} goes with {goes_with}, and {path} is none: drop it")
