"""Lists of the images of a folder, split and shuffled as ``im2rec.py --list`` of MXNet 1.9.1 does it."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from steadytrain.data.recordio.lst import format_line
from steadytrain.errors import DataError, InputError

SHUFFLE_SEED = 100
"""The seed of ``im2rec.py``: the same folder gives the same lists there and here."""


@dataclass(frozen=True, kw_only=True)
class ImageLists:
    """Lists that were written, and the classes of their labels.

    Args:
        counts: path of each list -> its number of images.
        folders: folder of each label, from 0 on, relative to the root; empty where the root alone was listed.
    """

    counts: dict[Path, int]
    folders: tuple[str, ...]


def write_image_lists(
    prefix: Path,
    root: Path,
    *,
    recursive: bool,
    extensions: Sequence[str],
    chunks: int = 1,
    train_ratio: float = 1.0,
    test_ratio: float = 0.0,
    shuffle: bool = True,
) -> ImageLists:
    """Write ``PREFIX.lst``, or ``PREFIX_train.lst``, ``PREFIX_val.lst`` and ``PREFIX_test.lst``, of a folder's images.

    Args:
        prefix: path of the lists, without the ending.
        root: the folder, which the paths in the lists start from.
        recursive: go into folders, each of which is a class; else all images of the root itself have the label 0.
        extensions: endings of names that are images, in lower case with their dot.
        chunks: parts that the images are cut into, each with lists of its own: ``PREFIX_0.lst`` and so on.
        train_ratio: share of training images; 1 writes one list.
        test_ratio: share of test images, which come first; what neither share takes is validation data.
        shuffle: draw the order (by a fixed seed); else it is that of the names.

    Raises:
        InputError: no images, or shares that cannot be.
    """
    if not (0 < train_ratio <= 1 and 0 <= test_ratio < 1 and train_ratio + test_ratio <= 1 + 1e-9):
        shares = f"--train-ratio {train_ratio:g} and --test-ratio {test_ratio:g}"
        raise InputError(f"{shares} must lie from 0 to 1 and come to 1 at most, such as 0.8 and 0.1")
    if chunks < 1:
        raise InputError(f"--chunks is {chunks}; it must be 1 or more")
    if not root.is_dir():
        raise DataError(f"there is no folder {root}: name the folder of the images after the prefix")
    folders: dict[str, int] = {}
    images = list(_find_images(root, recursive, extensions, folders))
    if not images:
        hint = "" if recursive else "; --recursive goes into its folders, each of which is a class"
        raise DataError(f"{root} holds no images that end in {' '.join(extensions)}{hint}")
    if shuffle:
        random.Random(SHUFFLE_SEED).shuffle(images)
    size, counts = -(-len(images) // chunks), dict[Path, int]()
    for part in range(chunks):
        chunk = images[part * size : (part + 1) * size]
        name = f"{prefix}_{part}" if chunks > 1 else str(prefix)
        num_test, num_train = int(size * test_ratio), int(size * train_ratio)
        if train_ratio == 1:
            lists = {".lst": chunk}
        else:
            lists = {"_train.lst": chunk[num_test : num_test + num_train]}
            if train_ratio + test_ratio < 1:
                lists["_val.lst"] = chunk[num_test + num_train :]
            if test_ratio:
                lists["_test.lst"] = chunk[:num_test]
        for ending, lines in lists.items():
            path = Path(name + ending)
            try:
                path.write_text("".join(format_line(*line) for line in lines), encoding="utf-8")
            except OSError as error:
                raise DataError(f"cannot write {path}: {error.strerror or error}") from error
            counts[path] = len(lines)
    return ImageLists(counts=counts, folders=tuple(os.path.relpath(folder, root) for folder in folders))


def _find_images(
    root: Path, recursive: bool, extensions: Sequence[str], folders: dict[str, int]
) -> Iterator[tuple[int, int, str]]:
    """Yield number, label and path of each image; ``folders`` gets the label of each folder that has one."""
    number = 0
    for folder, inner, files in os.walk(root, followlinks=True):
        inner.sort()
        if not recursive:
            inner.clear()
        for name in sorted(files):
            path = os.path.join(folder, name)  # noqa: PTH118
            if os.path.splitext(name)[1].lower() in extensions and os.path.isfile(path):  # noqa: PTH113, PTH122
                label = folders.setdefault(folder, len(folders)) if recursive else 0
                yield number, label, os.path.relpath(path, root)
                number += 1
