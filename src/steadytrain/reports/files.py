"""Find the runs that a path stands for, and write reports to disk."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from steadytrain.errors import DataError, InputError, RunError, did_you_mean
from steadytrain.files import near_name, replace_file
from steadytrain.monitor.history_reader import read_any
from steadytrain.reports.logs import ForeignRun, may_be_log, read_log
from steadytrain.reports.page import page
from steadytrain.reports.status import SILENT_SECONDS, is_held, signs
from steadytrain.reports.summary import Account
from steadytrain.reports.tables import MARK, comma_separated, markdown, to_json
from steadytrain.run import Run

R = TypeVar("R")
DEPTH = 3
"""Folders below the one that is listed: a sweep's runs are at sweep/case/seed-0."""
KINDS: dict[str, Callable[[Sequence[Account]], str]] = {
    ".html": page,
    ".md": markdown,
    ".csv": comma_separated,
    ".json": to_json,
}


@dataclass(frozen=True)
class Found(Generic[R]):
    """Runs, or other programs' logs too; ``notes``: a line for each log, and for each of a folder that was left out."""

    runs: tuple[R, ...]
    notes: tuple[str, ...]


def find(paths: Iterable[str | Path]) -> Found[Run]:
    """Open runs. A folder that is no run stands for the runs in it, in the order of their names.

    Raises:
        RunError: a path is neither a run nor a folder of runs, or nothing was started in a run that was named.
    """
    runs: dict[Path, Run] = {}
    notes: list[str] = []
    for path in map(Path, paths):
        if Run.is_run(path) or not path.is_dir():
            started = [open_run(path)]
        else:
            inside, reasons = runs_inside(path)
            started = [run for run in inside if run.progress().started]
            reasons += [f"left out {run.directory}: it has no events yet" for run in inside if run not in started]
            if not started:
                raise RunError(f"{path} holds no run that was started: {'; '.join(reasons)}")
            notes += reasons
        for run in started:
            runs.setdefault(run.directory.resolve(), run)
    return Found(tuple(runs.values()), tuple(notes))


def find_all(paths: Iterable[str | Path], *, skip_unreadable: bool = False) -> Found[Run | ForeignRun]:
    """Open runs, as :func:`find` does, and read logs of other programs: files, or the files of a folder without runs.

    ``skip_unreadable``: leave a path that cannot be read out with a note, as long as there are others.

    Raises:
        RunError: a path is neither a run nor a folder of runs, or nothing was started in a run that was named.
        DataError: a file is no log that can be read.
    """
    sources: dict[Path, Run | ForeignRun] = {}
    notes: list[str] = []
    errors: list[DataError | RunError] = []
    for path in map(Path, paths):
        try:
            inside = _find_in(path)
        except (DataError, RunError) as error:
            if not skip_unreadable:
                raise
            errors.append(error)
            notes.append(f"left out: {error}")
            continue
        notes += inside.notes
        for run in inside.runs:
            sources.setdefault(run.directory.resolve(), run)
    if errors and not sources:
        raise errors[0] if len(errors) == 1 else RunError("; ".join(map(str, errors)))
    return Found(tuple(sources.values()), tuple(notes))


def _find_in(path: Path) -> Found[Run] | Found[ForeignRun]:
    """Open the runs, or read the logs, that one path stands for."""
    notes: list[str] = []
    if path.is_file() and not Run.is_run(path.parent):
        logs = read_log(path)
    elif _holds_files_alone(path):
        logs, notes = _logs_inside(path)
    else:
        return find([path])
    notes += ["; ".join([f"{log.directory}: {log.title}", *log.remarks]) for log in logs]
    return Found(tuple(logs), tuple(notes))


def _holds_files_alone(folder: Path) -> bool:
    """Return whether a folder is no run, holds none, and has files that may be logs."""
    if not folder.is_dir() or Run.is_run(folder):
        return False
    inside = list(folder.iterdir())
    is_of_runs = any(path.is_dir() and any(path.glob("**/recipe.json")) for path in inside)
    return not is_of_runs and any(path.is_file() for path in inside)


def _logs_inside(folder: Path) -> tuple[list[ForeignRun], list[str]]:
    """Read the logs of a folder, in the order of their names, and say what was left out; RunError if there are none."""
    logs: list[ForeignRun] = []
    reasons: list[str] = []
    for path in sorted(path for path in folder.iterdir() if path.is_file()):
        try:
            if not may_be_log(path):
                raise DataError(f"{path} is no text")
            logs += read_log(path)
        except DataError:
            reasons.append(f"left out {path}: no training log that can be read")
    if not logs:
        raise RunError(f"{folder} is not a run (no recipe.json), and holds neither runs nor logs that can be read")
    return logs, reasons


@dataclass(frozen=True)
class Picked:
    """The run that a path stands for; of a folder with several, ``others`` are going on as well."""

    run: Run
    others: tuple[Run, ...] = ()


def pick(path: str | Path) -> Picked:
    """Return the run of a folder; of a folder of runs, the newest that is going on, else the newest.

    Raises:
        RunError: there is no such folder, or no run in it.
    """

    def touched(run: Run) -> float:
        paths = (path for path in (run.log_path(), run.directory / "recipe.json") if path.exists())
        return next((path.stat().st_mtime for path in paths), 0.0)

    def goes_on(run: Run) -> bool:
        if not is_held(run) and time.time() - touched(run) > SILENT_SECONDS:
            return False  # most of a folder's runs: their logs need not be read
        seen = signs(run, read_any(run), time.time())
        return seen.status == "running" or (seen.status == "waiting" and seen.process is not None)

    folder = Path(path)
    if Run.is_run(folder) or not folder.is_dir():
        return Picked(open_run(folder))
    runs, _ = runs_inside(folder)
    if not runs:
        raise RunError(f"{folder} is not a run (no recipe.json), nor a folder with runs in it")
    running = sorted((run for run in runs if goes_on(run)), key=touched)
    return Picked(running[-1], tuple(running[:-1])) if running else Picked(max(runs, key=touched))


def open_run(path: Path) -> Run:
    """Open the run of a folder. Raises RunError where there is none, with the nearest name that there is."""
    if not path.exists():
        raise RunError(f"{path} does not exist.{near_name(str(path))}")
    if path.is_file():
        raise RunError(f"{path} is a file: name the run's folder")
    return Run.open(path)


def run_folders(folder: Path, *, links: bool = False, depth: int = DEPTH) -> Iterator[Path]:
    """Yield the folders of runs in a folder, or itself, by name; hidden folders are passed over.

    ``links``: a link that leads to a run elsewhere is one of them, for those who only read: a folder of links is a
    choice of runs. None leads further, so that there is no loop.
    """
    if os.path.lexists(folder / "recipe.json"):
        yield folder
        return
    entries = list[os.DirEntry[str]]()
    with suppress(OSError):
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    for entry in entries:
        path = folder / entry.name
        if not entry.is_symlink() and entry.is_dir() and depth >= 0 and not entry.name.startswith("."):
            yield from run_folders(path, links=links, depth=depth - 1)
        elif links and entry.is_symlink() and os.access(path / "recipe.json", os.F_OK):
            yield path


def runs_inside(folder: Path) -> tuple[list[Run], list[str]]:
    """Open the runs in a folder, and say why others were left out; RunError if there are none."""
    inside = folder.resolve()
    folders = run_folders(folder, links=True)
    candidates = [path for path in folders if not path.is_symlink() or not path.resolve().is_relative_to(inside)]
    if not candidates:
        raise RunError(f"{folder} is not a run (no recipe.json), nor a folder with runs in it")
    runs: list[Run] = []
    reasons: list[str] = []
    for path in candidates:
        try:
            runs.append(Run.open(path))
        except RunError as error:
            reasons.append(f"left out {path}: {error}")
    return runs, reasons


def names(runs: Sequence[Run | ForeignRun]) -> list[str]:
    """Name each run by its folder, with as many parent folders as it takes to distinguish equal names."""
    parts = [run.directory.resolve().parts for run in runs]
    counts = [1] * len(runs)

    def named() -> list[str]:
        return ["/".join(part[-count:]) for part, count in zip(parts, counts, strict=True)]

    for _ in range(max(map(len, parts), default=0)):
        so_far = named()
        counts = [count + (so_far.count(name) > 1) for count, name in zip(counts, so_far, strict=True)]
    return named()


def kind_of(output: Path) -> str:
    """Return the format that a file's name asks for, such as ``.html``; raises InputError for one that is not known."""
    kind = output.suffix.lower()
    if kind in KINDS:
        return kind
    if output.is_dir():
        raise InputError(f"{output} is a folder: name a file, such as -o {output / 'report.html'}")
    raise InputError(
        f"{output} ends in {kind or 'no suffix'}; a report ends in {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}"
    )


def write(output: Path, text: str, *, force: bool = False) -> None:
    """Write a report atomically. An older report is replaced, any other file only with ``force``.

    Raises:
        InputError: there is something else of that name, or no such folder.
        StorageError: it cannot be written.
    """
    require_replaceable(output, force=force)
    replace_file(output, text)


def require_replaceable(output: Path, *, force: bool = False) -> None:
    """Check that :func:`write` may write there, before the work. Raises InputError as it does."""
    target = output.resolve()
    if not target.parent.is_dir():
        raise InputError(f"the folder {output.parent} does not exist: make it, or choose another -o")
    is_report = not target.is_dir()
    if target.is_file():
        try:
            with target.open("rb") as file:
                start = file.read(4096)
            is_report = not start or MARK.encode() in start or start.startswith(b"run,epoch,step,")
        except OSError:
            is_report = False
    if not force and not is_report:
        raise InputError(f"{output} exists and is not a report: choose another -o, or add --force to replace it")
