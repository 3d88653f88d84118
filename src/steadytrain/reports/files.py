"""Which runs a path means, and how a report is put on disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from steadytrain.errors import InputError, RunError, did_you_mean, storage_error
from steadytrain.events import Started
from steadytrain.reports.tables import MARK, Account, comma_separated, markdown, to_json
from steadytrain.run import Run


def _page(accounts: Sequence[Account]) -> str:
    from steadytrain.reports.page import page

    return page(accounts)


KINDS: dict[str, Callable[[Sequence[Account]], str]] = {
    ".html": _page,
    ".md": markdown,
    ".csv": comma_separated,
    ".json": to_json,
}


@dataclass(frozen=True)
class Found:
    """The runs that were meant, and why some of a folder of runs were left out (a line each)."""

    runs: tuple[Run, ...]
    left_out: tuple[str, ...]


def find(paths: Iterable[str | Path]) -> Found:
    """Open runs. A folder that is no run stands for the runs in it, in the order of their names.

    Raises:
        RunError: a path is neither a run nor a folder of runs, or nothing was started in a run that was named.
    """
    runs: dict[Path, Run] = {}
    left_out: list[str] = []
    for path in map(Path, paths):
        if (path / "recipe.json").exists() or not path.is_dir():
            named = [open_run(path)]
        else:
            named, reasons = _inside(path)
            left_out += reasons
        for run in named:
            runs.setdefault(run.directory.resolve(), run)
    return Found(tuple(runs.values()), tuple(left_out))


def names(runs: Sequence[Run]) -> list[str]:
    """What to call each run: its folder's name, with as many of the folders above as tell equal ones apart."""
    parts = [run.directory.resolve().parts for run in runs]
    told = [1] * len(runs)
    for _ in range(max(map(len, parts), default=0)):
        called = ["/".join(part[-count:]) for part, count in zip(parts, told, strict=True)]
        told = [count + (called.count(name) > 1) for count, name in zip(told, called, strict=True)]
    return ["/".join(part[-count:]) for part, count in zip(parts, told, strict=True)]


def kind_of(output: Path) -> str:
    """The format that a file's name asks for, such as ``.html``; raises InputError for one that is not known."""
    kind = output.suffix.lower()
    if kind in KINDS:
        return kind
    if output.is_dir():
        raise InputError(f"{output} is a folder: name a file, such as -o {output / 'report.html'}")
    raise InputError(
        f"{output} ends in {kind or 'nothing'}; a report ends in {', '.join(KINDS)}.{did_you_mean(kind, KINDS)}"
    )


def write(output: Path, text: str, *, force: bool = False) -> None:
    """Put a report on disk, whole or not at all. An older report is replaced, any other file only with ``force``.

    Raises:
        InputError: there is something else of that name, or no such folder.
        StorageError: it cannot be written.
    """
    target = output.resolve()
    if not target.parent.is_dir():
        raise InputError(f"the folder {output.parent} does not exist: make it, or choose another -o")
    if not force and not _is_replaceable(target):
        raise InputError(f"{output} exists and is not a report: choose another -o, or add --force to replace it")
    data = text.encode("utf-8", "replace")
    try:
        if target.exists() and not target.is_file():  # a pipe or a device: nothing to replace
            target.write_bytes(data)
            return
        part = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            part.write_bytes(data)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise storage_error(error, output) from error


def open_run(path: Path) -> Run:
    """The run of a folder. Raises RunError where there is none, with the nearest name that there is."""
    if not path.exists():
        beside = [one.name for one in path.parent.iterdir()] if path.parent.is_dir() else []
        raise RunError(f"{path} does not exist.{did_you_mean(path.name, beside)}")
    if path.is_file():
        raise RunError(f"{path} is a file: name the run's folder")
    return Run.open(path)


def _inside(folder: Path) -> tuple[list[Run], list[str]]:
    """The runs in a folder that something was started in, and why others were left out."""
    candidates = [one for one in sorted(folder.iterdir()) if (one / "recipe.json").exists()]
    if not candidates:
        raise RunError(f"{folder} is not a run (no recipe.json), nor a folder with runs in it")
    runs: list[Run] = []
    reasons: list[str] = []
    for one in candidates:
        try:
            run = Run.open(one)
        except RunError as error:
            reasons.append(f"left out {one}: {error}")
            continue
        if any(isinstance(event, Started) for event in run.events()):
            runs.append(run)
        else:
            reasons.append(f"left out {one}: it has no events yet")
    if not runs:
        raise RunError(f"{folder} holds no run that was started: {'; '.join(reasons)}")
    return runs, reasons


def _is_replaceable(target: Path) -> bool:
    if not target.is_file():
        return not target.is_dir()
    try:
        with target.open("rb") as file:
            start = file.read(4096)
    except OSError:
        return False
    return not start or MARK.encode() in start or start.startswith(b"run,epoch,step,")
