"""Give back the room of runs that nobody needs: what would go, and its removal. Links are never followed."""

from __future__ import annotations

import os
import shutil
import stat
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from steadytrain.errors import storage_errors
from steadytrain.reports.run_list import DAMAGED, RunRow
from steadytrain.reports.status import is_held
from steadytrain.run import UNSTARTED, Run

KEEP_TAG = "keep"
"""A run with this tag is never cleaned up."""
BEGIN_SECONDS = 600.0
"""Seconds after which a run that never started may be removed: until then another machine may be about to begin it."""
OURS = {*UNSTARTED, "notes.json"}
"""Entries of a run that never started; where there are others, the folder stays."""
WEIGHTS = ("best.safetensors", "model.safetensors")


@dataclass(frozen=True)
class Removal:
    """The files of one run that go; ``is_whole``: its folder too. ``num_bytes``: of the files, each once."""

    row: RunRow
    paths: tuple[Path, ...]
    num_bytes: int
    is_whole: bool

    @property
    def words(self) -> str:
        """Say what goes."""
        return "the whole folder" if self.is_whole else ", ".join(path.name for path in self.paths)


def plan_removals(rows: Sequence[RunRow], *, is_chosen: bool) -> tuple[list[Removal], list[str]]:
    """Return what goes of each run, and why others keep all.

    Of a run that failed, or was interrupted, the checkpoints and weights go, of a finished one the checkpoints; of one
    that never started, or failed before it had, the whole folder. Event log, recipe, notes and reports stay.

    ``is_chosen``: the user chose these runs; else only those that failed or never started are taken.
    """
    removals = list[Removal]()
    reasons = list[str]()
    for row in rows:
        if not is_chosen and row.status not in ("failed", "waiting"):
            continue
        folder = Path(row.directory)
        if reason := _reason_to_stay(row, folder):
            reasons.append(f"{folder} stays: {reason}")
            continue
        never_started = row.status == "waiting" or (row.status == "failed" and not Run.open(folder).progress().started)
        is_whole = never_started and {path.name for path in folder.iterdir()} <= OURS
        names = ["checkpoints"] if row.status == "finished" else ["checkpoints", *WEIGHTS]
        existing = (path for path in map(folder.joinpath, names) if os.path.lexists(path) and not path.is_symlink())
        paths = (folder,) if is_whole else tuple(existing)
        num_bytes = sum(_sizes(paths))
        if is_whole or num_bytes:
            removals.append(Removal(row, paths, num_bytes, is_whole))
        else:
            reasons.append(f"{folder} ({row.status}) has no weights: rm -r removes all of it")
    return removals, reasons


def remove(removal: Removal) -> None:
    """Remove what was planned, while this process holds the run.

    Raises:
        RunError: the run is in use, or no run any more, or a checkpoint is a link.
        StorageError: something cannot be removed.
    """
    run = Run.open(removal.row.directory)
    with run.lock(), storage_errors(run.directory):
        entries = list(run.directory.iterdir()) if removal.is_whole else removal.paths
        for path in entries:
            if path.name not in ("recipe.json", "lock"):  # until the end it is a run
                _remove(path)
        if removal.is_whole:
            shutil.rmtree(run.directory)


def _reason_to_stay(row: RunRow, folder: Path) -> str:
    if row.status == DAMAGED:
        return f"it cannot be read as a run ({row.why})"
    if folder.is_symlink():
        return "it is a link"
    if KEEP_TAG in row.tags:
        return f"it has the tag {KEEP_TAG}"
    if row.status == "running" or is_held(Run.open(folder)):
        return "it is running"
    is_new = row.status == "waiting" and time.time() - (row.began or 0.0) < BEGIN_SECONDS
    return "it was made less than 10 minutes ago and may be about to begin" if is_new else ""


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)  # which follows no link
    else:
        path.unlink(missing_ok=True)


def _sizes(paths: Sequence[Path]) -> Iterator[int]:
    seen = set[tuple[int, int]]()
    for path in paths:
        inside = [path] if not path.is_dir() else [Path(at) / name for at, _, names in os.walk(path) for name in names]
        for file in inside:
            with suppress(OSError):
                status = file.lstat()
                if stat.S_ISREG(status.st_mode) and (status.st_dev, status.st_ino) not in seen:
                    seen.add((status.st_dev, status.st_ino))
                    yield status.st_size
