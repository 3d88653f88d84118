"""Folders of classes, folders of splits and tables of labels, told apart by their names alone.

Folders of splits are called ``train``, ``test1``, ``X_train``, ``seg_test`` or ``validation_set``; some hold one more
folder of the same name, and test images often have no labels. Images of a split lie in folders of classes, or have
their labels in a table (``metadata.csv`` of Hugging Face's tools, ``_classes.csv`` of Roboflow's, ``labels.csv`` and
``train.csv`` of Kaggle's contests) or in their own names (``cat.0.jpg``). Names of splits never become classes.
"""

from __future__ import annotations

import os
import re
import shlex
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from steadytrain.data.filenames import (
    SPLITS,
    SUFFIXES,
    folder_splits,
    holds_no_labels,
    is_ignored,
    is_image,
    is_leftover,
    is_wrapper,
    leftovers,
    split_words,
)
from steadytrain.data.names import Names
from steadytrain.data.recordio.card import RunClasses
from steadytrain.data.storage.local_files import is_of_the_system, read_patiently
from steadytrain.errors import DataError
from steadytrain.format import Say, few

TABLES = (".csv", ".tsv", ".lst", ".jsonl", ".ndjson", ".manifest")
TOOLS_TABLES = ("metadata.csv", "metadata.jsonl", "metadata.parquet", "_classes.csv")
"""Tables that Hugging Face's and Roboflow's tools put into the folder of the images, the best first."""

_MOST_LEVELS = 8  # that images are looked for below a folder
_SAMPLE = 1000
_NUMBERED = re.compile(r"(.*?)[-_ ]*\d+")
_ANNOTATIONS = frozenset(["annotations", "annotation", "masks", "mask", "trimaps", "segmentations", "labels", "xmls"])
NO_CLASSES = frozenset(["figures", "docs", "assets", "examples", "screenshots", "demo", "static", "results", "logs"])
_PARTS = frozenset(
    "part chunk batch shard fold set subset data dataset image images img imgs photos pictures files".split()  # noqa: SIM905
)
_LABELLED = re.compile(r"(.*[^\W\d_])[ ._(-]*\d+\)?\.\w+")  # cat.0.jpg, great_pyrenees_12.jpg, dog (3).png
_SED = r"sed -nE 's#^(.*/)?([^/]*[^/ ._(0-9-])[ ._(-]*[0-9]+\)?\.[A-Za-z]+$#&,\2#p'"


class Entries(NamedTuple):
    """The contents of a folder: names of the folders, of the images and of the other files in it."""

    folders: Sequence[str]
    images: Sequence[str]
    others: Sequence[str]


FolderLook = Callable[[str], Entries]
"""Returns what lies in a folder, which is named by its path below the source; empty for the source itself."""


def without_leftovers(folders: Sequence[str]) -> list[str]:
    """Leave out recycle bins and caches."""
    odd = leftovers(dict.fromkeys(folders, 1))
    return [name for name in folders if name not in odd]


def kept_inside(folders: Collection[str]) -> list[str]:
    """Leave out, of folders inside a class, recycle bins, caches, and masks beside images."""
    return [name for name in _without_annotations([*folders]) if not is_leftover(name)]


def look_on_disk(source: Path) -> FolderLook:
    """Return what tells the entries of a folder on a disk and of those below it."""

    @cache
    def look(path: str) -> Entries:
        folders, files = read_entries(source / path)
        images = Names(filter(is_image, files))
        return Entries(without_leftovers(folders), images, [name for name in files if not is_image(name)])

    return look


def read_entries(folder: Path | str) -> tuple[list[str], list[str]]:
    """Names of the folders and of the files in a folder, sorted, without what is ignored."""
    try:
        return read_patiently(partial(_scan_entries, folder), str(folder))
    except FileNotFoundError:
        raise DataError(f"there is no folder {folder}") from None
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror}") from error


def _scan_entries(folder: Path | str) -> tuple[list[str], list[str]]:
    folders: list[str] = []
    files: list[str] = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if is_ignored(entry.name):
                continue
            try:
                is_folder = entry.is_dir()
            except OSError as error:
                if is_of_the_system(error):
                    raise
                is_folder = False  # a link to itself
            (folders if is_folder else files).append(entry.name)
    return sorted(folders), sorted(files)


def class_splits(look: FolderLook, where: Path, classes: Sequence[str] | None = None, base: str = "") -> dict[str, str]:
    """Find the folders of classes by split, training set first; none where the source's folders are its classes.

    A folder that does no more than wrap another is passed through: ``seg_train/seg_train``, ``train/images``. Folders
    that ``classes`` has all are classes. In an archive, ``look`` starts from the folder ``base``.

    Raises:
        DataError: two folders for one split, no training set, or folders that may be splits, parts of a set or classes.
    """
    folders = look("").folders
    named = folder_splits(folders)
    splits: dict[str, str] = {}
    twice = ""
    for name in sorted(named, key=lambda name: (name.casefold() not in SPLITS, name)):
        if (first := splits.setdefault(named[name], name)) != name:
            parts = shlex.join(str(where / part) for part in folders if named.get(part) == named[name])
            twice = f"{where} holds both {first} and {name}: keep one of them"
            twice += f", or, if they are parts of one set, give all: steady pack {parts} OUT" * where.is_dir()
    inner: dict[str, str] = {
        split: _unwrap(look, splits[split]) for split in ("train", "val", "test") if split in splits
    }
    inside = {split: look(path).folders for split, path in inner.items()}
    hold_folders = {split for split, held in inside.items() if held and len(_without_annotations(held)) == len(held)}
    if "train" not in splits and len(splits) > 1 and len(named) == len(folders) and len(hold_folders) == len(splits):
        raise DataError(
            f"{where} holds {' and '.join(splits.values())}, but no folder train: give one of them, or rename the one"
            " to train with"
        )
    # A class may be called "train": splits hold folders, and "train" stands beside another split or alone.
    if "train" not in hold_folders or (len(splits) == 1 and len(named) < len(folders)):
        inner, twice = {}, ""
    # of train/A the classes may be alike, too
    for part, taken in {"": inner, inner.get("train", ""): {}}.items():
        is_told = not taken and classes is not None and {*look(part).folders} <= {*classes}
        is_told = is_told or isinstance(classes, RunClasses)
        if alike := [] if is_told else _alike_folders(_below(look, part), taken):
            raise DataError(_words_for_alike(look, where, [f"{part}/{path}".lstrip("/") for path in alike], base))
    if twice:
        raise DataError(twice)
    return inner


def _below(look: FolderLook, folder: str) -> FolderLook:
    return lambda path: look(f"{folder}/{path}".strip("/"))


def _alike_folders(look: FolderLook, splits: Mapping[str, str]) -> list[str]:
    """Find the folders beside each other that hold folders of the same names: all of them, or all but one in a hundred.

    Beside ``splits``, one that holds the training set's classes is enough.
    """
    passed = NO_CLASSES | {path.partition("/")[0].casefold() for path in splits.values()}
    others = [n for n in look("").folders if n.casefold() not in passed and not (splits and holds_no_labels(n))]
    divided = {} if splits else splits_in_classes(look).get("train", {})  # of cat/train, what this holds may be alike
    num_needed = 1 if splits else max(2, len(others) - max(1, len(others) // 100))
    inside: dict[str, set[str]] = {}
    for number, name in enumerate(others, 1):
        path, names = _class_names(look, divided.get(name, name))
        if names:
            inside[path] = names
        elif len(inside) + len(others) - number < num_needed:
            return []  # spares a look into each of a thousand classes
    by_size = sorted(inside, key=lambda path: -len(inside[path]))
    # A folder of another kind may hold the most, and one of the same may lack some.
    for largest in [_class_names(look, splits["train"])[1]] if splits else map(inside.__getitem__, by_size[:2]):
        alike = [path for path in by_size if 3 * len(inside[path] - largest) < len(inside[path])]
        num_holding = [sum(holds_images(look, f"{path}/{name}") for name in look(path).folders) for path in alike[:2]]
        if len(alike) >= num_needed and min(num_holding) > 1:
            return [*splits.values(), *alike]
    return []


def _class_names(look: FolderLook, path: str) -> tuple[str, set[str]]:
    """Go down to where folders lie; return their names in one spelling: none if images do, or they are no classes."""
    for _ in range(_MOST_LEVELS):
        entries = look(path)
        if len(entries.folders) != 1 or entries.images:
            break
        path = f"{path}/{entries.folders[0]}"
    folders = _without_annotations(entries.folders)
    are_wrappers = all(is_wrapper(name, "") and not split_words(name)[0] for name in folders)
    if len(entries.images) >= len(folders) or are_wrappers or parts_of_one(folders):
        return path, set()
    return path, {name.strip().casefold() for name in folders}


def _words_for_alike(look: FolderLook, where: Path, paths: Sequence[str], base: str) -> str:
    """The error for folders that may be splits, parts of one set or classes, with the command for each of these."""
    folder, unpack = where / base, ""
    if not (folder / paths[0]).is_dir():
        folder, shown, into = Path(f"{where}-unpacked", base), shlex.quote(str(where)), shlex.quote(f"{where}-unpacked")
        command = f"mkdir {into} && tar -xf {shown} -C {into}" if where.is_file() else f"all archives, into {into}"
        unpack = f"Unpack it ({command if where.suffix.lower() != '.zip' else f'unzip -q {shown} -d {into}'}). "
    splits = {path: split_words(path.partition("/")[0])[0] for path in paths}
    is_divided = not any(splits.values()) and all(split_words("".join(path.split("/")[1:2]))[0] for path in paths)
    sizes = {path: sum(len(look(f"{path}/{name}").images) for name in look(path).folders) for path in paths}
    ordered = sorted(paths, key=lambda path: (("train", "", "val", "test").index(splits[path]), -sizes[path]))
    num_parts = sum(split in ("train", "") for split in splits.values())
    places = [shlex.quote(str(folder / (path.partition("/")[0] if is_divided else path))) for path in ordered]
    other = num_parts % len(places) or 1
    flag = "--test" if splits[ordered[other]] == "test" else "--val"
    groups = ""
    if not any(splits.values()) and not any("/" in path for path in paths):
        groups = f"groups (patients, series) in each class: steady train {shlex.quote(str(folder))} --group-by folder; "
    several = f"parts of one set: steady pack {' '.join(places[:num_parts])} OUT; " * (num_parts > 1)
    sed = r's#^\./([^/]+)/.*#"&","\1"#'
    if is_divided or len({path.partition("/")[0] for path in paths}) == 1:  # or the classes may be those of train
        sed = r's#^\./([^/]+)/([^/]+)/.*#"&",' + (r'"\1","\2"#' if is_divided else r'"\2","\1"#')
    suffixes = "|".join(sorted(suffix[1:] for suffix in SUFFIXES))
    find = rf"find ./*/ -type f -not -path '*/.*' | grep -iE '\.({suffixes})$' | sort | sed -E '{sed}' > classes.csv"
    return (
        f"{where} holds {few(paths)}, each with folders of the same names ({few(look(paths[0]).folders)}), so these may"
        f" be splits, parts of one set, or classes. {unpack}Splits: steady train {places[0]} {flag} {places[other]};"
        f" {groups}{several}classes: (cd {shlex.quote(str(folder))} && {find}), and"
        f" give {shlex.quote(str(folder / 'classes.csv'))}"
    )


def splits_in_classes(look: FolderLook) -> dict[str, dict[str, str]]:
    """Find the folders of splits that lie in the folders of classes: ``cat/train``, ``cat/test``, ``dog/train``, ...

    Returns:
        The folder of each class, by split and by the class's folder; none where not all classes have one to train with.
    """
    folders_of: dict[str, dict[str, str]] = {}
    folders = look("").folders
    for name in folders:
        entries = look(name)
        splits = folder_splits(entries.folders)
        if entries.images or len(splits) < len(entries.folders) or "train" not in splits.values():
            return {}
        for inner, split in splits.items():
            if name in folders_of.setdefault(split, {}):
                return {}
            folders_of[split][name] = f"{name}/{inner}"
    if len(folders) < 2 or len(folders_of) < 2:
        return {}
    return {split: folders_of[split] for split in ("train", "val", "test") if split in folders_of}


def splits_beside_classes(
    look: FolderLook, where: Path, inside: Mapping[str, Sequence[str]], classes: Collection[str], say: Say
) -> dict[str, str]:
    """Find the folders of splits that lie beside the folders of classes: ``cat``, ``dog`` and ``test/cat``.

    Most folders in such a one have names of those beside it: of most of these, where its own name is no split's.
    ``inside`` has the folders in each folder; of ``classes`` one is a class. Raises DataError for two folders of one
    split, and where no word tells which split it is.
    """
    names = {name.strip().casefold() for name in inside}
    splits = folder_splits([name for name in inside if name not in classes])
    beside: dict[str, str] = {}
    for name in sorted(inside.keys() - classes) if len(inside) > 1 else ():
        split = splits.get(name, "")
        held = look(path := _unwrap(look, name)).folders if split else inside[path := name]
        others = names - {name.strip().casefold()}
        least = len(held) if split else max(2, len(held), len(others))  # groups in classes 0 to 9 have numbers, too
        if 2 * sum(inner.strip().casefold() in others for inner in held) <= least:
            if split in ("val", "test") and not held and name.casefold() not in ("valid", "dev"):
                say(f"warning: {where}: {name} is read as a class: if it holds images of all classes, move it out")
        elif split in ("", "train") or beside.setdefault(split, path) != path:
            other = beside.get(split, "folders of the same names beside it").partition("/")[0]
            raise DataError(
                f"{where} holds {name} ({few(held)}) and {other}: keep one of them, or move {name} out of {where} and"
                " give it with --val or --test"
            )
    return {split: beside[split] for split in ("val", "test") if split in beside}


def _unwrap(look: FolderLook, path: str) -> str:
    """Go down through folders that hold no more than one folder, of folders, which says nothing by its name."""
    while len((entries := look(path)).folders) == 1 and not entries.images:
        inner = f"{path}/{entries.folders[0]}"
        if not is_wrapper(entries.folders[0], path.rpartition("/")[2]) or not look(inner).folders:
            break
        path = inner
    return path


def flat_splits(look: FolderLook) -> dict[str, tuple[str, ...]]:
    """Find the folders of images without classes, by split; the split is empty where images are not split.

    There are none where folders are classes. Folders without images, or with a name that says that they have no
    labels, do not count. A split may have several folders: ``images_part_1`` and ``images_part_2``.
    """
    top = look("")
    folders = _without_annotations(top.folders)
    named = folder_splits(folders) or parts_of_one(folders)
    if not named and len(folders) > 1 and not top.images and not any(is_wrapper(name, "") for name in folders):
        return {}  # spares a look into each of a thousand classes
    holding = [name for name in folders if not holds_no_labels(name) and holds_images(look, name)]
    if top.images and not holding:
        return {"": ("",)}
    if len(holding) == 1:
        alone = flat_folder(look, holding[0])
        if alone is not None:
            return {} if top.images else {named.get(holding[0], ""): (alone,)}
        inside = flat_splits(_below(look, holding[0]))
        if len(inside) < 2:
            return {}
        return {split: tuple(f"{holding[0]}/{path}" for path in paths) for split, paths in inside.items()}
    flat: dict[str, tuple[str, ...]] = {}
    for name in sorted(named, key=lambda name: (name.casefold() not in SPLITS, name)):
        inner = flat_folder(look, name) if name in holding else None
        if inner is None and name in holding and named[name] in ("", "train"):
            return {}
        if inner is not None:
            flat[named[name]] = (*flat.get(named[name], ()), inner)
    parts: dict[str, tuple[str, ...]] = {split: flat[split] for split in ("", "train", "val", "test") if split in flat}
    others = [name for name in holding if name not in named and name.casefold() not in NO_CLASSES]
    if not others or (len(parts) > 1 and find_tables(look, parts, "")):
        return parts
    return {}


def _without_annotations(folders: Sequence[str]) -> Sequence[str]:
    """Folders without those that only belong to images in another one: ``masks`` beside ``images``."""
    images = [name for name in folders if name.casefold() not in _ANNOTATIONS]
    return images if images and all(is_wrapper(name, "") for name in images) else folders


def parts_of_one(folders: Sequence[str]) -> dict[str, str]:
    """Folders whose names differ in a number behind a word for a part: they are parts of one set, which has no splits.

    >>> parts_of_one(["images_001", "images_002"]), parts_of_one(["cat1", "cat2"])
    ({'images_001': '', 'images_002': ''}, {})
    """
    matches = [_NUMBERED.fullmatch(name) for name in folders]
    stems = {match[1].casefold() for match in matches if match}
    words = split_words(stems.pop())[1] if len(stems) == 1 and None not in matches else ()
    return dict.fromkeys(folders, "") if len(folders) > 1 and words and words[-1] in _PARTS else {}


def flat_folder(look: FolderLook, path: str) -> str | None:
    """Find the one folder that all images at or below ``path`` lie in, without classes; None if there is none."""
    while True:
        entries = look(path)
        folders = _without_annotations(entries.folders)
        holding = [name for name in folders if holds_images(look, f"{path}/{name}")]
        if entries.images:
            return None if holding else path
        if len(holding) != 1 or not is_wrapper(holding[0], path.rpartition("/")[2]):
            return None
        path = f"{path}/{holding[0]}"


def holds_images(look: FolderLook, path: str, levels: int = _MOST_LEVELS) -> bool:
    """Return whether images lie in a folder, or not too deep below it."""
    entries = look(path)
    return bool(entries.images) or (
        levels > 0 and any(holds_images(look, f"{path}/{name}".lstrip("/"), levels - 1) for name in entries.folders)
    )


def find_tables(look: FolderLook, parts: Mapping[str, Sequence[str]], where: str) -> dict[str, str]:
    """Find the tables with the labels of flat folders: by split; the split is empty where one table is for all.

    A table lies in the folder of its split's images or around it, or beside the folders; then its name tells the split
    (``train.csv``, ``trainLabels.csv``), or it is for all (``labels.csv``).

    Raises:
        DataError: several could be it.
    """
    tables: dict[str, str] = {}

    def add(folder: str, split: str, splits: Sequence[str]) -> None:
        """Take the best table of a folder for a split that has none yet, of those that are named for ``splits``."""
        names = [name for name in look(folder).others if split_words(Path(name).stem)[0] in splits]
        if split not in tables and (name := _best(names, split, f"{where}/{folder}" if folder else where)):
            tables[split] = f"{folder}/{name}" if folder else name

    around = Counter(path.rpartition("/")[0] for paths in parts.values() for path in paths)
    for split, paths in parts.items():
        for folder in (paths[0], paths[0].rpartition("/")[0]) if len(paths) == 1 else ():
            if folder and (folder == paths[0] or around[folder] == 1):
                add(folder, split, ("", split))
    for folder in [*around, ""] if len(around) == 1 and len(parts) > 1 else [""]:
        for split in ("train", "val", "test", ""):
            add(folder, split, (split,))
    if "train" in tables:
        tables.pop("", None)
    if len(parts) == 1 and "" not in parts:  # whatever it is called, it is all
        tables = {"": table} if (table := tables.get(next(iter(parts))) or tables.get("")) else {}
    return {"": tables[""]} if "" in tables else tables


def _best(names: Sequence[str], split: str, where: str) -> str:
    """The table that most likely holds labels, of files in a folder; empty where none is a table."""
    ranks: dict[str, int] = {}
    for name in names:
        path = Path(name)
        if (name.casefold() in TOOLS_TABLES or path.suffix.casefold() in TABLES) and not holds_no_labels(path.stem):
            words = split_words(path.stem)[1]
            if name.casefold() in TOOLS_TABLES:
                ranks[name] = TOOLS_TABLES.index(name.casefold()) - len(TOOLS_TABLES)
            elif not {"label", "labels", "groundtruth", "truth"}.isdisjoint(words) or (split and not words):
                ranks[name] = 0
            else:
                ranks[name] = 1
    best = [name for name in sorted(ranks) if ranks[name] == min(ranks.values())]
    if len(best) > 1:
        raise DataError(
            f"{where} holds several tables, each of which may hold the labels ({few(best)}): give one with --labels"
        )
    return best[0] if best else ""


def no_labels(look: FolderLook, parts: Mapping[str, Sequence[str]], where: Path) -> DataError:
    """The error for images in folders that are no classes, without a table; gives the command that helps.

    Args:
        parts: as :func:`flat_splits` returns them.
        where: the folder or the archive that the user named.
    """
    folders = [path for paths in parts.values() for path in paths if path]
    what = "parts of one set" if "" in parts else "splits"
    listed = " and ".join(folders) if len(folders) < 4 else few(folders)
    splits = f"{listed} are {what}, and " if len(folders) > 1 else ""
    aside = [f"{name}/{file}" for name in look("").folders if name not in folders for file in look(name).others]
    tables = [name for name in aside if Path(name).suffix.casefold() in TABLES]
    are_few = 0 < len(tables) < 4  # or each image has a file of its own, as boxes have
    text = f"the images in {where} have no classes ({splits}no table {'beside them' if are_few else 'holds labels'})"
    is_unpacked = all((where / path).is_dir() for path in folders)
    labels = labels_in_names(look(parts.get("train", next(iter(parts.values())))[0]).images)
    if labels and (is_unpacked or where.is_file()):  # neither: several archives
        return DataError(f"{text}: {labels_from_names(where, labels, folders)}")
    if are_few:
        them = f"--labels {shlex.quote(str(where / tables[0]))}" if is_unpacked else "--labels once it is unpacked"
        one = few(tables) if len(tables) == 1 else f"one of {few(tables)}"
        return DataError(f"{text}: if {one} has their labels, give it with {them}")
    remedy = "give their labels with --labels FILE, a table of names and labels"
    if len(folders) > 1 and is_unpacked:
        shown, listed = shlex.quote(str(where)), " ".join(shlex.quote(f"{name}/") for name in folders)
        remedy += (
            f" (if these folders are classes: (cd {shown} && find {listed} -type f | sort > list.txt), then give"
            f" {shown}/list.txt)"
        )
    return DataError(f"{text}: {remedy}")


def labels_from_names(where: Path, labels: Sequence[str], folders: Sequence[str]) -> str:
    """The remedy for images whose names begin with their classes, in ``folders`` of the folder or archive ``where``."""
    shown, table = shlex.quote(str(where)), "labels.csv"
    if not where.is_dir():
        command = f"{'unzip -Z1' if where.suffix.lower() == '.zip' else 'tar -tf'} {shown} | {_SED} > {table}"
    elif folders:
        paths = " ".join(shlex.quote(f"{name}/") for name in folders)
        command = f"(cd {shown} && find {paths} -type f | sort | {_SED} > {table})"
    else:
        command, table = f"(cd {shown} && ls | {_SED} > {table})", shlex.quote(str(where / table))
    again = "" if folders and where.is_dir() else f" with --labels {table}"
    return (
        f"file names seem to begin with the class ({few(labels, 3)}); make a table of them, and run the same command"
        f" again{again}: {command}"
    )


def labels_in_names(images: Sequence[str]) -> list[str]:
    """Classes that the names of images begin with, sorted; none where names do not look so.

    >>> labels_in_names(["cat.0.jpg", "cat.1.jpg", "dog.0.jpg", "dog.12.jpg"]), labels_in_names(["a1.jpg", "b1.jpg"])
    (['cat', 'dog'], [])
    """
    names = [name.rpartition("/")[2] for name in islice(images, _SAMPLE)]
    counts = Counter(match[1] for name in names if (match := _LABELLED.fullmatch(name)))
    is_told = counts.total() == len(names) and 2 <= len(counts) <= len(names) // 2
    return sorted(counts) if is_told else []
