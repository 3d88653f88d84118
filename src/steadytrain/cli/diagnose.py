"""``steady diagnose``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from steadytrain.cli.console import note, print_json
from steadytrain.cli.options import Json
from steadytrain.errors import InputError

if TYPE_CHECKING:
    from steadytrain.run import Run


def diagnose(
    *runs: str,
    probe: bool = False,
    seconds: float | None = None,
    force: bool = False,
    model: str | None = None,
    json: Json = False,
) -> None:
    """Say what holds a run back, finished or going on: what that costs, what to change, and what the change saves.

    The dominant cause comes first, with its share of the wall time, the figures behind it and the one change to make;
    then the next two. It reads what the run wrote down about itself and needs neither torch nor a GPU; with --probe it
    needs the data and the model.

    Args:
        runs: Folders of runs, or folders that hold runs.
        probe: First measure, on the run's own data and model, what the feed alone and the updates alone can do; the
            state of the run stays as it is.
        seconds: How long to measure with --probe (default: 15).
        force: Probe a run that is being trained as well: both are slower.
        model: With --probe: the run's own pkg.mod:factory; it is imported only if you name it.

    Examples:
        steady diagnose runs/a
        steady diagnose runs/a --probe
        steady diagnose runs/ --json
    """
    from steadytrain.monitor import diagnose as diagnose_run
    from steadytrain.reports.files import find
    from steadytrain.reports.verdict import verdict_text

    if not runs:
        raise InputError("name a run, several, or a folder of runs: steady diagnose runs/a")
    if not probe and (seconds is not None or force or model is not None):
        raise InputError("--seconds, --force and --model are about measuring: add --probe")
    selection = find(runs)
    for reason in selection.left_out:
        note(reason)
    for run in selection.runs if probe else ():
        _probe(run, seconds, force=force, model=model)
    diagnoses = [(str(run.directory), diagnose_run(run)) for run in selection.runs]
    if json:
        documents = [{"run": name, **diagnosis.to_dict()} for name, diagnosis in diagnoses]
        is_single = len(runs) == 1 and (Path(runs[0]) / "recipe.json").exists()
        print_json(documents[0] if is_single else {"runs": documents})
    else:
        print("\n\n".join(verdict_text(diagnosis, name) for name, diagnosis in diagnoses))


def _probe(run: Run, seconds: float | None, *, force: bool, model: str | None) -> None:
    """Measure a run's ceilings and print them at once: a run that has not begun has no verdict."""
    from steadytrain.cli.render import event_words
    from steadytrain.machine.process import spin_where_alone

    spin_where_alone()
    from steadytrain.training.profile.probe import SECONDS, probe_run

    seconds = SECONDS if seconds is None else seconds
    allow_import = model is not None and model == run.recipe.model.name
    for part in event_words(probe_run(run, seconds=seconds, force=force, allow_import=allow_import, say=note).ceilings):
        note(part)
