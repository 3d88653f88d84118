"""Which run is meant by a folder: it may be one, or hold several of which one goes on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from steadytrain.errors import RunError
from steadytrain.reports.files import open_run
from steadytrain.reports.history import History, take
from steadytrain.reports.liveness import SILENT_SECONDS, is_held, signs
from steadytrain.run import Run


@dataclass(frozen=True)
class Picked:
    """The run that was meant; of a folder with several, ``others`` go on as well."""

    run: Run
    others: tuple[Run, ...] = ()


def pick(path: str | Path) -> Picked:
    """The run of a folder, or of a folder of runs the newest that goes on; if none does, the newest.

    Raises:
        RunError: there is no such folder, or no run in it.
    """
    folder = Path(path)
    if (folder / "recipe.json").exists() or not folder.is_dir():
        return Picked(open_run(folder))
    runs = [run for one in sorted(folder.iterdir()) if (run := _run(one)) is not None]
    if not runs:
        raise RunError(f"{folder} is not a run (no recipe.json), nor a folder with runs in it")
    going = sorted((run for run in runs if _goes_on(run)), key=_touched)
    if not going:
        return Picked(max(runs, key=_touched))
    return Picked(going[-1], tuple(going[:-1]))


def _run(folder: Path) -> Run | None:
    try:
        return Run.open(folder) if (folder / "recipe.json").exists() else None
    except RunError:
        return None


def _goes_on(run: Run) -> bool:
    """Whether its process lives, here or, having written lately, on another machine."""
    if not is_held(run) and time.time() - _touched(run) > SILENT_SECONDS:
        return False  # most of a folder's runs: their logs need not be read
    told = History(run)
    for event in run.events(sparse=True):
        take(told, event)
    seen = signs(told, time.time())
    return seen.status == "running" or (seen.status == "waiting" and seen.process is not None)


def _touched(run: Run) -> float:
    for name in ("events.jsonl", "recipe.json"):
        path = run.directory / name
        if path.exists():
            return path.stat().st_mtime
    return 0.0
