"""``steady replay``: an update of a run, computed again."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, print_text
from steadytrain.cli.options import Json, require_run_model
from steadytrain.run import Run


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

    The run is not changed, and may keep training. A copy is trained from the newest checkpoint before that update, or
    from the beginning.

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
    require_run_model(model, [opened.recipe.model.name])
    found = replay_run(opened, step, output=output, allow_import=model is not None, say=note)
    folder = output or opened.directory / "replay" / f"step-{found.step:08d}"
    if json:
        print_json({**asdict(found), "folder": str(folder)})
        return 0
    print_text(found.words)
    print_text(f"learning rate {found.lr:g}; {len(found.ids)} images and batch.json are in {folder}")
    return 0
