"""Names of files: of images, of splits, and patterns such as ``shards-{000..010}.tar``."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from pathlib import Path
from typing import TypeVar

from steadytrain.errors import DataError

T = TypeVar("T")

SUFFIXES = frozenset(
    ".jpg .jpeg .jpe .jfif .png .bmp .gif .webp .tif .tiff .ppm .pgm .pbm .pnm .avif".split()  # noqa: SIM905
)
SPLITS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation", "dev"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}
MOST_NAMES = 100_000

_IGNORED = frozenset(
    ["thumbs.db", "desktop.ini", "__macosx", "@eadir", "$recycle.bin", "lost+found", "system volume information"]
)
_MARKED = re.compile(r"(?:[^\w\s'\"(\[{<\xab\u2018\u201c\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]|_)+[^\W\d_]{2}")
_LEFTOVER = re.compile(r"recycl|trash|snapshot|thumb|cache", re.IGNORECASE)
_BRACES = re.compile(r"\{([^{}]*)\}")
_BACK = re.compile(r"[*?[].*/\.\.(/|$)", re.DOTALL)
_NUMBERED = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})(\.[^/]*)", re.DOTALL)
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")
_WORD = re.compile(r"[a-z]+")
_SHARD = re.compile(r"-\d+-of-\d+$")
_CASED_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_]+")
_HELD_OUT = re.compile(r"(hold|held)[-_ ]?out", re.IGNORECASE)
# Words that name a split in the name of a folder or of a table, where others stand beside them.
_SPLIT_WORDS = {
    **SPLITS,
    **dict.fromkeys(("trn", "trainset", "trainval"), "train"),
    **dict.fromkeys(("eval", "evaluation", "validate", "valset"), "val"),
    **dict.fromkeys(("tst", "testset", "holdout", "heldout"), "test"),
}
# Words that say nothing of what the images show: "train_images" is a split, "train_station" is a class.
_WORDS_OF_NO_CLASS = frozenset(
    "set subset data dataset images image imgs img pics pictures photos files split folder dir samples sample"  # noqa: SIM905
    " small tiny mini full part all raw jpg jpeg jpgs png pngs stage resized cropped clean final new labels label"
    " labeled labelled kaggle original orig hq lq px x unknown".split()
)
_UNLABELLED_WORDS = frozenset(
    "pred predict prediction predictions unlabeled unlabelled unsup unsupervised"  # noqa: SIM905
    " additional inference submission".split()
)


def is_image(name: str) -> bool:
    """Return whether a file's name ends as an image's does."""
    stem, dot, suffix = name.rpartition(".")  # called a million times
    return bool(stem) and (dot + suffix).lower() in SUFFIXES


def is_ignored(name: str) -> bool:
    """Return whether a file or folder belongs to no data set: hidden, or left by a file manager."""
    return name.startswith(".") or name.casefold() in _IGNORED


def leftovers(counts: Mapping[str, int]) -> list[str]:
    """Folders that are recycle bins, snapshots and caches, among folders of classes with their numbers of images.

    Their names begin with a sign before a word that says so; or before any word, if they have at most half the images
    of the smallest of two or more classes whose names begin otherwise.

    >>> leftovers({"cat": 9, "dog": 8, "#recycle": 9, "@sharebin": 1, "@home": 8, "#1": 8, "_other": 7})
    ['#recycle', '@sharebin']
    """
    marked = [name for name in counts if _MARKED.match(name)]
    plain = sorted(counts[name] for name in counts.keys() - marked if counts[name])
    most = plain[0] / 2 if len(plain) > 1 else -1
    return [name for name in marked if plain and (is_leftover(name) or counts[name] <= most)]


def is_leftover(name: str) -> bool:
    """Return whether a folder's name says that it is a recycle bin or a cache: ``#recycle``, ``_thumbs``."""
    return bool(_MARKED.match(name) and _LEFTOVER.search(name))


def repeated(names: Sequence[str], key: Callable[[str], str]) -> Iterator[tuple[int, int]]:
    """Pairs of a row and the last row before it whose name has the same key, in the order of the rows.

    >>> list(repeated(["a", "b", "A"], str.lower))
    [(2, 0)]
    """
    # By numbers first: a million names and their keys would weigh more than the images in flight.
    import numpy as np  # light commands ask for names, and no arrays

    hashes = np.fromiter((hash(key(name)) for name in names), np.int64, len(names))
    order = np.argsort(hashes, kind="stable")
    again = np.flatnonzero(np.diff(hashes[order]) == 0)
    for place in again[np.argsort(order[again + 1])].tolist():  # hashes differ from run to run
        row, before = int(order[place + 1]), int(order[place])
        if key(names[row]) == key(names[before]):
            yield row, before


def split_of(name: str) -> str:
    """The split that a file is named for, by a word at the beginning or the end of its stem; empty where there is none.

    >>> split_of("train-0001.tar"), split_of("photos-val.rec"), split_of("Test.tar"), split_of("trains.tar")
    ('train', 'val', 'test', '')
    >>> split_of("photos-val-00000-of-00004.rec")
    'val'
    """
    words = _WORD.findall(_SHARD.sub("", name.partition(".")[0].casefold()))
    splits = {SPLITS[word] for word in (words[0], words[-1]) if word in SPLITS} if words else set()
    return splits.pop() if len(splits) == 1 else ""


def split_words(name: str) -> tuple[str, tuple[str, ...]]:
    """The split that a word in a name of a folder or of a table names, and the name's other words.

    The split is empty where no word names one, or two name different ones.

    >>> split_words("seg_train"), split_words("TestImages2"), split_words("hold-out"), split_words("trains")
    (('train', ('seg',)), ('test', ('images',)), ('test', ()), ('', ('trains',)))
    """
    words = [word.casefold() for word in _CASED_WORD.findall(_HELD_OUT.sub("holdout", name))]
    splits = {_SPLIT_WORDS[word] for word in words if word in _SPLIT_WORDS}
    others = tuple(word for word in words if word not in _SPLIT_WORDS)
    return (splits.pop(), others) if len(splits) == 1 else ("", others)


def folder_splits(names: Sequence[str]) -> dict[str, str]:
    """Choose, of folders beside each other, those that are named after splits, with the split of each.

    What else stands in such a name says nothing of the images, or stands in the names of two splits.

    >>> folder_splits(["train", "test1", "docs"]), folder_splits(["dogs-train", "dogs-val"])
    ({'train': 'train', 'test1': 'test'}, {'dogs-train': 'train', 'dogs-val': 'val'})
    >>> folder_splits(["train", "train_station", "test_tube"])
    {'train': 'train'}
    """
    parsed = {name: split_words(name) for name in names}
    splits_of: dict[tuple[str, ...], set[str]] = {}
    for split, others in parsed.values():
        if split:
            splits_of.setdefault(others, set()).add(split)
    return {
        name: split
        for name, (split, others) in parsed.items()
        if split and (_WORDS_OF_NO_CLASS.issuperset(others) or len(splits_of[others]) > 1)
    }


def is_wrapper(name: str, within: str) -> bool:
    """Return whether a folder inside ``within`` is no class, but one more folder around the images.

    >>> is_wrapper("images", "train"), is_wrapper("seg_train", "seg_train"), is_wrapper("cat", "train")
    (True, True, False)
    """
    split, others = split_words(name)
    return name.casefold() == within.casefold() or (bool(split or others) and _WORDS_OF_NO_CLASS.issuperset(others))


def holds_no_labels(name: str) -> bool:
    """Return whether a folder's or a table's name says that it has no labels: ``seg_pred``, ``sample_submission.csv``.

    >>> holds_no_labels("seg_pred"), holds_no_labels("sampleSubmission.csv"), holds_no_labels("labels.csv")
    (True, True, False)
    """
    return not _UNLABELLED_WORDS.isdisjoint(split_words(name)[1])


def find_records_beside(train: str, split: str) -> Path | None:
    """Find ``X-val.rec``, or ``X-test.rec``, beside ``X-train.rec`` (``X_train.rec``, ``train.rec``); None: none."""
    path = Path(train)
    if not path.is_file():
        return None
    return next(filter(Path.is_file, map(path.with_name, names_beside(path.name, split))), None)


def names_beside(train: str, split: str) -> list[str]:
    """Return the names that another split of a record file may have; none where its own names no training set.

    >>> names_beside("photos-train.rec", "val")[:2], names_beside("photos.rec", "val")
    (['photos-val.rec', 'photos-valid.rec'], [])
    """
    match = re.fullmatch(r"((?:.*[-_.])?)(train|training)\.rec", train, re.IGNORECASE)
    return [f"{match[1]}{word}.rec" for word, of in SPLITS.items() if of == split] if match else []


def is_shard(name: str) -> bool:
    """Return whether a file is numbered among several, as ``photos-00000-of-00004.rec``."""
    return _SHARD.search(name.partition(".")[0]) is not None


def group_by_split(items: Sequence[T], names: Sequence[str], where: str) -> dict[str, list[T]]:
    """Group items by the split that their file names mention; all are under ``""`` where the names make no split.

    Raises:
        DataError: some names mention a split and others do not.
    """
    groups: dict[str, list[T]] = {}
    for name, item in zip(names, items, strict=True):
        groups.setdefault(split_of(name), []).append(item)
    if "" in groups and "train" in groups:
        plain = next(name for name in names if not split_of(name))
        raise DataError(
            f"{where}: some file names name a split and some do not ({plain}): start every name with train or val,"
            " or none"
        )
    return groups if "train" in groups and len(groups) > 1 else {"": list(items)}


def order_splits(parts: Mapping[str, T]) -> dict[str, T]:
    """Put the training set first, and the test set last."""
    return {split: parts[split] for split in ("", "train", "val", "test") if split in parts}


def is_pattern(text: str) -> bool:
    """Return whether a name stands for several.

    >>> is_pattern("a-{0..3}.tar"), is_pattern("a-*.tar"), is_pattern("a{b}.tar")
    (True, True, False)
    """
    return glob.has_magic(text) or any(_options(part) is not None for part in _BRACES.findall(text))


def braces(text: str) -> list[str]:
    """Write out all names that a name with braces stands for, as a shell would.

    Raises:
        DataError: more than 100,000.

    >>> braces("a-{08..10}.{tar,tgz}")
    ['a-08.tar', 'a-08.tgz', 'a-09.tar', 'a-09.tgz', 'a-10.tar', 'a-10.tgz']
    """
    choices: list[list[str]] = []
    for number, part in enumerate(_BRACES.split(text)):  # text, what stood in braces, text, ...
        options = _options(part) if number % 2 else [part]
        choices.append([f"{{{part}}}"] if options is None else options)
    count = prod(len(options) for options in choices)
    if count > MOST_NAMES:
        raise DataError(f"{text} stands for {count:,} names; at most {MOST_NAMES:,} are allowed")
    return ["".join(parts) for parts in product(*choices)]


def _options(inside: str) -> list[str] | None:
    """List the names that a pair of braces stands for; None where it is no more than a pair of braces."""
    match = _RANGE.fullmatch(inside)
    if match is None:
        return inside.split(",") if "," in inside else None
    first, last = int(match[1]), int(match[2])
    if abs(last - first) >= MOST_NAMES:
        raise DataError(f"{{{inside}}} stands for {abs(last - first) + 1:,} names; at most {MOST_NAMES:,} are allowed")
    width = max(len(match[1]), len(match[2])) if match[1].startswith("0") or match[2].startswith("0") else 0
    step = 1 if last >= first else -1
    return [f"{number:0{width}}" for number in range(first, last + step, step)]


def expand(text: str) -> list[Path]:
    """The files that a name with braces and wildcards stands for, in the order written, those of a wildcard sorted.

    Raises:
        DataError: one of them does not exist; a wildcard fits nothing, or has ``..`` behind it; or not every one is
            there of files numbered ``-00000-of-00004`` and so on.
    """
    paths: list[Path] = []
    missing: list[str] = []
    for name in braces(text):
        magic = glob.has_magic(name) and not os.path.lexists(name)
        if magic and _BACK.search(name):
            raise DataError(
                f"{text} goes back (..) behind a wildcard, which fits each name many times: name the folder"
            )
        matches = sorted(glob.glob(name)) if magic else [name] if os.path.exists(name) else []  # noqa: PTH110, PTH207
        missing += missing_shards(matches) if len(matches) > 1 else [] if matches else [name]
        paths += map(Path, matches)
    if missing:
        listed = ", ".join(missing[:5]) + ", ..." * (len(missing) > 5)
        raise DataError(f"{text}: no file for {len(missing)} of its names ({listed})")
    return list(dict.fromkeys(paths))


def missing_shards(names: list[str]) -> list[str]:
    """Names missing among files whose names tell how many they are.

    >>> missing_shards(["a-0-of-3.rec", "a-2-of-3.rec", "b.rec"])
    ['a-1-of-3.rec']
    """
    expected = {
        f"{match[1]}-{number:0{len(match[2])}}-of-{match[3]}{match[4]}": None
        for match in map(_NUMBERED.fullmatch, names)
        if match
        for number in range(min(int(match[3]), MOST_NAMES))
    }
    return [name for name in expected if name not in set(names)]
