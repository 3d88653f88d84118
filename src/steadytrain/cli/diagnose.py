"""``steady diagnose``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from steadytrain.run import Run


def diagnose(
    *runs: Annotated[str, Parameter(help="Folders of runs, or folders that hold runs.")],
    probe: Annotated[
        bool,
        Parameter(
            negative="",
            show_default=False,
            help="First measure, on the run's own data and model, what the feed alone and the updates alone can do; "
            "the state of the run stays as it is.",
        ),
    ] = False,
    seconds: Annotated[float | None, Parameter(help="How long to measure with --probe (default: 15).")] = None,
    force: Annotated[
        bool,
        Parameter(negative="", show_default=False, help="Probe a run that is being trained as well: both are slower."),
    ] = False,
    model: Annotated[
        str | None,
        Parameter(help="With --probe: the run's own pkg.mod:factory; it is imported only if you name it."),
    ] = None,
    json: Annotated[bool, Parameter(negative="", show_default=False, help="Print one JSON document.")] = False,
) -> None:
    """Say what holds a run back, finished or going on: what that costs, what to change, and what the change saves.

    The dominant cause comes first, with its share of the wall time, the figures behind it and the one change to make;
    then the next two. It reads what the run wrote down about itself and needs neither torch nor a GPU; with --probe it
    needs the data and the model.

    Examples
    --------
    steady diagnose runs/a
    steady diagnose runs/a --probe
    steady diagnose runs/ --json
    """
    import json as json_module
    from pathlib import Path

    from steadytrain.cli.console import note
    from steadytrain.errors import InputError
    from steadytrain.monitor import diagnose as judge
    from steadytrain.reports.files import find
    from steadytrain.reports.verdict import verdict_text

    if not runs:
        raise InputError("name a run, several, or a folder of runs: steady diagnose runs/a")
    if not probe and (seconds is not None or force or model is not None):
        raise InputError("--seconds, --force and --model are about measuring: add --probe")
    found = find(runs)
    for reason in found.left_out:
        note(reason)
    for run in found.runs if probe else ():
        _measure(run, seconds, force=force, model=model)
    told = [(str(run.directory), judge(run)) for run in found.runs]
    if json:
        documents = [{"run": name, **one.to_dict()} for name, one in told]
        single = len(runs) == 1 and (Path(runs[0]) / "recipe.json").exists()
        print(json_module.dumps(documents[0] if single else {"runs": documents}, indent=2))
        return
    print("\n\n".join(verdict_text(one, name) for name, one in told))


def _measure(run: Run, seconds: float | None, *, force: bool, model: str | None) -> None:
    """Probe a run and say at once what was found: one that has not begun has no verdict."""
    from steadytrain.cli.console import note
    from steadytrain.cli.lines import words
    from steadytrain.machine.process import spin_where_alone

    spin_where_alone()
    from steadytrain.training.profile.probe import SECONDS, probe_run

    named = model is not None and model == run.recipe.model.name
    measured = SECONDS if seconds is None else seconds
    for part in words(probe_run(run, seconds=measured, force=force, allow_import=named, say=note).ceilings):
        note(part)
