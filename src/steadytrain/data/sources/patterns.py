"""Names with braces and wildcards: ``shards-{000..010}.tar``, ``{train,val}.rec``, ``shards-*.tar``."""

from __future__ import annotations

import glob
import os
import re
from itertools import product
from math import prod
from pathlib import Path

from steadytrain.errors import DataError

MOST_NAMES = 100_000

_BRACES = re.compile(r"\{([^{}]*)\}")
_NUMBERED = re.compile(r"(.*)-(\d{1,9})-of-(\d{1,9})(\.[^/]*)", re.DOTALL)
_RANGE = re.compile(r"(\d{1,9})\.\.(\d{1,9})")


def is_pattern(text: str) -> bool:
    """Whether a name stands for several.

    >>> is_pattern("a-{0..3}.tar"), is_pattern("a-*.tar"), is_pattern("a{b}.tar")
    (True, True, False)
    """
    return glob.has_magic(text) or any(_options(part) is not None for part in _BRACES.findall(text))


def braces(text: str) -> list[str]:
    """All names that one with braces stands for, as a shell would write them out.

    Raises:
        DataError: more than 100,000.

    >>> braces("a-{08..10}.{tar,tgz}")
    ['a-08.tar', 'a-08.tgz', 'a-09.tar', 'a-09.tgz', 'a-10.tar', 'a-10.tgz']
    """
    pieces = _BRACES.split(text)  # text, what stood in braces, text, ...
    choices: list[list[str]] = []
    for number, piece in enumerate(pieces):
        options = _options(piece) if number % 2 else [piece]
        choices.append([f"{{{piece}}}"] if options is None else options)
    count = prod(len(options) for options in choices)
    if count > MOST_NAMES:
        raise DataError(f"{text} stands for {count:,} names; {MOST_NAMES:,} are the most")
    return ["".join(parts) for parts in product(*choices)]


def expand(text: str) -> list[Path]:
    """The files that a name with braces and wildcards stands for, in the order written, those of a wildcard sorted.

    Raises:
        DataError: one of them does not exist, a wildcard fits nothing, or not every one of files numbered
            ``-00000-of-00004`` and so on.
    """
    paths: list[Path] = []
    missing: list[str] = []
    for name in braces(text):
        magic = glob.has_magic(name) and not os.path.lexists(name)
        found = sorted(glob.glob(name)) if magic else [name] if os.path.exists(name) else []  # noqa: PTH110, PTH207
        missing += _absent(found) if found else [name]
        paths += map(Path, found)
    if missing:
        plural = "s" if len(missing) > 1 else ""
        named = ", ".join(missing[:5]) + ", ..." * (len(missing) > 5)
        raise DataError(f"{text}: there is no file for {len(missing)} name{plural} of it ({named})")
    return list(dict.fromkeys(paths))


def _absent(found: list[str]) -> list[str]:
    """Names that are lacking among files that tell how many they are.

    >>> _absent(["a-0-of-3.rec", "a-2-of-3.rec", "b.rec"])
    ['a-1-of-3.rec']
    """
    told = [match for match in map(_NUMBERED.fullmatch, found) if match and len(found) > 1]
    wanted = {
        f"{one[1]}-{number:0{len(one[2])}}-of-{one[3]}{one[4]}": None
        for one in told
        for number in range(min(int(one[3]), MOST_NAMES))
    }
    return [name for name in wanted if name not in set(found)] if told else []


def _options(inside: str) -> list[str] | None:
    """What a pair of braces stands for; None where it is no more than a pair of braces."""
    told = _RANGE.fullmatch(inside)
    if told is None:
        return inside.split(",") if "," in inside else None
    first, last = int(told[1]), int(told[2])
    if abs(last - first) >= MOST_NAMES:
        raise DataError(f"{{{inside}}} stands for {abs(last - first) + 1:,} names; {MOST_NAMES:,} are the most")
    width = max(len(told[1]), len(told[2])) if told[1].startswith("0") or told[2].startswith("0") else 0
    return [f"{n:0{width}}" for n in range(first, last + (1 if last >= first else -1), 1 if last >= first else -1)]
