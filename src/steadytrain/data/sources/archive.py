"""Tars and zips, one or several, as one table of members."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from steadytrain.data.sources import tar, zip
from steadytrain.data.sources.container import Plain
from steadytrain.data.sources.listing import is_ignored
from steadytrain.data.sources.members import Member, Members
from steadytrain.errors import DataError

_ENDING = re.compile(r"(\.tar(\.\w+)?|\.tgz|\.zip)$", re.IGNORECASE)


def read(archives: Sequence[Plain], *, by_stem: bool = False) -> Members:
    """What archives hold, in their order and in that of their members.

    Args:
        archives: each a tar or a zip.
        by_stem: put each archive's members into a folder named as the archive is: one archive for each class.

    Raises:
        DataError: one is damaged, or no archive; by stem, two have one name.
    """
    members = Members()
    if by_stem:
        _require_apart([str(one.path) for one in archives])
    for one in archives:
        if one.kind not in ("tar", "zip"):
            raise DataError(f"{one.path} is no archive: give tars or zips alone")
        with one.at.open("rb", buffering=0) as file:
            found = _walk(file, one)
            if by_stem:
                found = _under(_stem(one.path.name), found)
            members.add_archive(one.path, at=one.at, time=one.time, found=found)
    return members


def holds_archives(members: Members) -> bool:
    """Whether archives are all that an archive holds, hidden files and texts aside."""
    suffixes = {Path(name).suffix.lower() for name in members.names if not Path(name).name.startswith(".")}
    return ".tar" in suffixes and suffixes <= {".tar", ".txt", ".md", ".csv", ""}


def read_inner(outer: Plain) -> Members:
    """What the tars inside a tar hold: each one's members in a folder named as that tar is.

    Raises:
        DataError: the outer or an inner one is damaged, or two have one name.
    """
    members = Members()
    with outer.at.open("rb", buffering=0) as file:
        inner = [member for member in tar.walk(file, of=str(outer.path)) if _is_tar(member)]
        _require_apart([member.name for member in inner], of=f" in {outer.path}")
        members.add_archive(outer.path, at=outer.at, time=outer.time, found=_all_inner(file, inner, outer.path))
    return members


def _walk(file: BinaryIO, one: Plain) -> Iterator[Member]:
    walk = tar.walk if one.kind == "tar" else zip.walk
    return walk(file, of=str(one.path))


def _all_inner(file: BinaryIO, inner: Iterable[Member], path: Path) -> Iterator[Member]:
    for one in inner:
        end = one.offset + one.size
        found = tar.walk(file, start=one.offset, end=end, of=f"{one.name} in {path}")
        yield from _under(_stem(one.name), found)


def _is_tar(member: Member) -> bool:
    base = member.name.rpartition("/")[2]
    return member.kind == "file" and base.lower().endswith(".tar") and not is_ignored(base)


def _under(folder: str, found: Iterable[Member]) -> Iterator[Member]:
    for one in found:
        target = f"{folder}/{one.target}" if one.target else ""
        yield one._replace(name=f"{folder}/{one.name}", target=target)


def _require_apart(names: Sequence[str], *, of: str = "") -> None:
    """Refuse archives whose images would come into one class, perhaps under one name."""
    known: dict[str, str] = {}
    for name in names:
        if (other := known.setdefault(_stem(name), name)) != name:
            raise DataError(f"{other} and {name}{of} have one name, and each is a class of that name: rename one")


def _stem(name: str) -> str:
    """The name of an archive without what says that it is one."""
    base = Path(name).name
    return _ENDING.sub("", base) or base
