"""Which split a name speaks of, and splits in the order in which they are packed."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

from steadytrain.data.sources.listing import SPLITS
from steadytrain.errors import DataError

T = TypeVar("T")

_WORD = re.compile(r"[a-z]+")
_SHARD = re.compile(r"-\d+-of-\d+$")


def split_of(name: str) -> str:
    """The split that a file is named for, by a word at the beginning or the end of its stem; empty where there is none.

    >>> split_of("train-0001.tar"), split_of("photos-val.rec"), split_of("Test.tar"), split_of("trains.tar")
    ('train', 'val', 'test', '')
    >>> split_of("photos-val-00000-of-00004.rec")
    'val'
    """
    words = _WORD.findall(_SHARD.sub("", name.partition(".")[0].casefold()))
    ends = {SPLITS[word] for word in (words[0], words[-1]) if word in SPLITS} if words else set()
    return ends.pop() if len(ends) == 1 else ""


def by_split(things: Sequence[T], names: Sequence[str], where: str) -> dict[str, list[T]]:
    """Things by the split that their file names speak of; all under the empty one where there are no two such parts.

    Raises:
        DataError: some names speak of one and others do not.
    """
    found: dict[str, list[T]] = {}
    for name, thing in zip(names, things, strict=True):
        found.setdefault(split_of(name), []).append(thing)
    if "" in found and "train" in found:
        plain = next(name for name in names if not split_of(name))
        raise DataError(
            f"{where}: some files are named for a split and some are not ({plain}): name all of them train..., val..."
            " or none"
        )
    return found if "train" in found and len(found) > 1 else {"": list(things)}


def in_order(found: dict[str, T], say: Callable[[str], None], where: str) -> dict[str, T]:
    """Training set first; without a validation set the test set is it, which is said."""
    if "val" not in found and "test" in found and "train" in found:
        say(f"{where} has no part for validation, so test is packed as the validation set")
        found = {("val" if split == "test" else split): part for split, part in found.items()}
    return {split: found[split] for split in ("", "train", "val", "test") if split in found}
