"""``steady replay``, and what becomes of a run whose numbers are not finite any more."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, print_text
from steadytrain.cli.options import Json
from steadytrain.errors import DivergedError, SteadyError
from steadytrain.run import Run

LONGEST_SECONDS = 600.0
"""Of training since the newest checkpoint that is done again by itself, to find what was not finite."""


def replay(
    run: Path,
    /,
    *,
    step: int | None = None,
    model: str | None = None,
    output: Annotated[Path | None, Parameter(name=("--output", "-o"))] = None,
    json: Json = False,
) -> int:
    """Compute an update of a run again, to the last bit, and save its images and what was not finite.

    The run is only read; it may go on meanwhile. A copy is trained from the newest checkpoint before that update, or
    from the beginning, in this process.

    Args:
        run: The run's folder.
        step: The update, counted from 1. [default: the first after the newest checkpoint whose loss is not finite]
        model: The run's pkg.mod:factory; it is imported only if you name it.
        output: Folder for the images and batch.json. [default: RUN/replay/step-N]

    Examples:
        steady replay runs/a
        steady replay runs/a --step 120 -o batch
    """
    from steadytrain.training.loop.replay import replay as replay_run

    opened = Run.open(run)
    allow_import = model is not None and model == opened.recipe.model.name
    found = replay_run(opened, step, output=output, allow_import=allow_import, say=note)
    folder = output or opened.directory / "replay" / f"step-{found.step:08d}"
    if json:
        print_json({**asdict(found), "folder": str(folder)})
        return 0
    print_text(found.words)
    print_text(f"learning rate {found.lr:g}; {len(found.ids)} images and batch.json are in {folder}")
    return 0


MOST_REMEDIES = 5
"""Updates of a run that are left out, or from which on its rate is halved, by itself."""


def remedied(run: Run, error: DivergedError, stop: Callable[[], str | None]) -> Run:
    """Return a run that is not finite any more with the remedy of its recipe, to go on from its newest checkpoint.

    Raises:
        DivergedError: it is to stop, or has no remedy left; with the update, the layer and the images, which are saved.
    """
    step, why = _explained(run, error, stop)
    every = run.recipe.every
    name = every.nonfinite
    command = f"steady resume {shlex.quote(str(run.directory))}"
    if name == "stop" or step is None:
        updates = ",".join(map(str, (*every.skip, step)))
        advice = "" if step is None else f"; {command} --set every.skip=[{updates}] leaves that update out"
        raise DivergedError(f"{why}{advice}")
    before: tuple[int, ...] = getattr(every, name)
    if step in before or len(before) >= MOST_REMEDIES:
        raise DivergedError(f"{why}; every.nonfinite={name} has done what it can (every.{name} is {list(before)})")
    does = "leaving that update out" if name == "skip" else "halving the learning rate from there on"
    note(f"{why}; going on from the newest checkpoint, {does} (every.{name})")
    return Run.create(run.directory, run.recipe.with_({f"every.{name}": (*before, step)}))


def _explained(run: Run, error: DivergedError, stop: Callable[[], str | None]) -> tuple[int | None, str]:
    """Return the update that was not finite first, and a line with its layer and images, which are saved.

    None where it is not known; the line says how to find it.
    """
    from steadytrain.training.loop.replay import replay as replay_run

    command = f"steady replay {shlex.quote(str(run.directory))}"
    error.with_traceback(None)  # which holds the session, and so the memory of its device
    newest = max((path.stat().st_mtime for path in run.checkpoints.glob("step-*")), default=None)
    progress = run.progress()
    began = newest or (progress.started.time if progress.started else 0.0)
    if time.time() - began > LONGEST_SECONDS:
        return None, f"{error}; {command} finds the update, the layer and the images"
    try:
        found = replay_run(run, say=note, stop=stop)
    except SteadyError as other:
        return None, f"{error}; which images it was is not known ({other})"
    return found.step, f"{error}; {found.words}; its images: {run.directory}/replay/step-{found.step:08d}"
