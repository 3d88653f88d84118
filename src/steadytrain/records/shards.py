"""Record files named by one pattern: ``OUT-{00000..00003}-of-00004.rec``, ``OUT-*.rec``, ``{a,b}.rec``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from steadytrain.errors import DataError, did_you_mean
from steadytrain.records.sources import patterns
from steadytrain.records.sources.splits import by_split


def record_files(path: str | Path) -> list[Path]:
    """The record files that a name stands for, in their order: one, or several by braces and wildcards.

    Raises:
        DataError: there is none of that name.
    """
    named = Path(path)
    if named.exists() or not patterns.is_pattern(str(path)):
        return [named]
    return patterns.expand(str(path))


def record_sets(source: str) -> dict[str, Path]:
    """The record files of a source by split: ``OUT-{train,val}.rec`` has two, all others are one set, named "".

    Raises:
        DataError: there is none of that name.
    """
    files = record_files(source)
    if not files[0].exists():
        beside = [one.name for one in files[0].parent.glob("*.rec")]
        raise DataError(f"there is no file {source}.{did_you_mean(files[0].name, beside)}")
    groups = by_split(files, [one.name for one in files], source)
    if len(groups) == 1:
        return {"": Path(source)}
    return {split: _together(group) for split, group in groups.items()}


def _together(files: Sequence[Path]) -> Path:
    """One name for several files."""
    return files[0] if len(files) == 1 else Path("{" + ",".join(map(str, files)) + "}")
