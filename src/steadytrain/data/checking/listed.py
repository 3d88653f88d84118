"""What a source holds, also where packing refuses it; and what of it goes unpacked, or has names that clash."""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from steadytrain.data.sources import archive, tree
from steadytrain.data.sources.container import is_compressed, open_plain
from steadytrain.data.sources.find import find_all
from steadytrain.data.sources.listing import SPLITS, Listing, is_ignored, is_image, list_folder, shown
from steadytrain.errors import DataError


@dataclass(frozen=True)
class Listed:
    """The listings of a source.

    Args:
        listings: training set first; none where nothing is known of it.
        refusal: why packing would not take it; empty where it would.
    """

    listings: list[Listing]
    refusal: str = ""


def list_anyway(
    sources: Sequence[str],
    *,
    root: Path | None = None,
    labels: Path | None = None,
    scratch: Path,
    say: Callable[[str], None],
) -> Listed:
    """List sources as one set; one that packing refuses by whatever classes there are, or without any.

    Of an archive that is refused all images are listed, without classes; a compressed one would have to be decompressed
    again for that, and is left.

    Args:
        sources, root, labels, scratch, say: as for :func:`~steadytrain.data.sources.find.find_all`.

    Raises:
        DataError: there is no such source.
    """
    path = Path(sources[0])
    try:
        return Listed(find_all(sources, root=root, labels=labels, scratch=scratch, say=say))
    except DataError as error:
        if not all(Path(one).exists() for one in sources):
            raise
        refusal = str(error)
    if len(sources) > 1:
        return Listed([], refusal)
    if not path.is_dir():
        return Listed(_in_archive(path, scratch), refusal)
    try:
        return Listed(list_folder(path, classes=_class_folders(path)), refusal)
    except DataError:
        return Listed([_unclassed(path)], refusal)


def _class_folders(source: Path) -> list[str]:
    """Names of the folders in ``source``, or in its splits."""
    inner = _folders(source)
    splits = [one for one in inner if one.name.casefold() in SPLITS]
    if any(SPLITS[one.name.casefold()] == "train" for one in splits):
        inner = [one for split in splits for one in _folders(split)]
    return sorted({unicodedata.normalize("NFC", shown(one.name)) for one in inner})


def _folders(folder: Path) -> list[Path]:
    try:
        return [one for one in folder.iterdir() if one.is_dir() and not is_ignored(one.name)]
    except OSError as error:
        raise DataError(f"cannot read the folder {folder}: {error.strerror}") from error


def _unclassed(source: Path) -> Listing:
    """All images below a folder, in no class."""
    names: list[str] = []
    others: list[str] = []
    for folder, folders, files in os.walk(source):
        folders[:] = sorted(name for name in folders if not is_ignored(name))
        for name in sorted(name for name in files if not is_ignored(name)):
            (names if is_image(name) else others).append(os.path.relpath(os.path.join(folder, name), source))  # noqa: PTH118
    sizes = np.array([_size(source, name) for name in names], np.int64)
    nothing = np.zeros(len(names), np.int64)
    return Listing("", source, (), names, nothing, sizes, nothing, passed_over=others)


def _in_archive(path: Path, scratch: Path) -> list[Listing]:
    """All images inside a tar or a zip, in no class; nothing for another file."""
    try:
        plain = None if not path.is_file() or is_compressed(path) else open_plain(path, scratch, lambda _: None)
        if plain is None or plain.kind not in ("tar", "zip"):
            return []
        members = archive.read([plain])
        rows = tree.rows_in_order(tree.grow(members), members)
    except DataError:  # told already: it is why packing refuses it
        return []
    names = [members.names[row] for row in rows]
    return [members.listing(rows, names, np.zeros(len(rows), np.int64), root=path, classes=())] if names else []


def _size(source: Path, name: str) -> int:
    try:
        return (source / name).stat().st_size
    except OSError:  # told when it is read
        return -1


def hidden(source: str) -> Iterator[str]:
    """What is ignored below a folder; what a hidden folder holds counts as one."""
    for folder, folders, files in os.walk(source):
        for name in sorted(name for name in (*folders, *files) if is_ignored(name)):
            yield os.path.relpath(os.path.join(folder, name), source)  # noqa: PTH118
        folders[:] = sorted(name for name in folders if not is_ignored(name))


def clashes(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs of names that some file systems hold for the same.

    >>> list(clashes(["a/1.jpg", "A/1.JPG", "a/2.jpg"]))
    [('a/1.jpg', 'A/1.JPG')]
    """
    # By numbers first: a million names and their keys would weigh more than the images in flight.
    hashes = np.fromiter((hash(_key(name)) for name in names), np.int64, len(names))
    order = np.argsort(hashes, kind="stable")
    again = np.flatnonzero(np.diff(hashes[order]) == 0)
    for place in again[np.argsort(order[again])].tolist():  # in the order of the names: hashes differ from run to run
        first, second = names[int(order[place])], names[int(order[place + 1])]
        if first != second and _key(first) == _key(second):
            yield first, second


def _key(name: str) -> str:
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())
