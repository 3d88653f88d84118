"""``steady report`` and ``steady diagnose``: what runs that are over or go on have written of themselves."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, print_text
from steadytrain.cli.options import Json
from steadytrain.config.plain import plain
from steadytrain.errors import FailedError, InputError


def report(
    *runs: str,
    output: Annotated[str | None, Parameter(name=["--output", "-o"], allow_leading_hyphen=True)] = None,
    json: bool = False,
    force: bool = False,
    compare: bool = False,
    to: str | None = None,
    follow: bool = False,
) -> None:
    """Report on runs, finished or running: accuracy, epochs, time, images per second, curves, recipe, events.

    Several runs are compared, also with logs of other trainers. The page is one file that needs no network.

    Args:
        runs: Folders of runs, folders that hold runs, or log files of MXNet, timm, torchvision, NVIDIA's DLLogger,
            Lightning or Keras.
        output: The file to write; its suffix sets the format: .html (the default is report.html), .md, .csv (a row for
            each epoch) or .json. A dash prints Markdown instead.
        json: Print the figures as one JSON document; write a file only with -o.
        force: Replace the output even if it is not an older report.
        compare: Instead test whether two runs, or two files of steady evaluate --per-image, differ on the same images.
        to: Instead send the runs to trackers: tensorboard, mlflow, wandb, trackio, or several between commas.
        follow: With --to: go on until the run has ended.

    Examples:
        steady report runs/a runs/b --compare
        steady report runs/a --to tensorboard
        steady report runs/a runs/b -o both.html
        steady report runs/a old.log metrics.csv
        steady report runs/a -o -
    """
    from steadytrain.reports import accounts
    from steadytrain.reports.files import KINDS, find_all, kind_of, write
    from steadytrain.reports.tables import markdown, to_json, to_text

    if not runs:
        raise InputError("no run named: steady report RUN..., or a folder of runs: steady report runs/")
    if compare:
        from steadytrain.reports.comparison import compare as compare_two

        if len(runs) != 2 or output is not None:
            raise InputError("--compare takes two runs and writes no file: steady report runs/a runs/b --compare")
        compared = compare_two(*runs)
        if json:
            print_json({**plain(compared), "verdict": compared.verdict})
        else:
            print_text(f"{compared.verdict}\n{compared.details}")
        return
    if follow and to is None:
        raise InputError("--follow needs --to: steady report RUN --to tensorboard --follow")
    if to is not None:
        _send(runs, to, follow)
        return
    path = None if output == "-" or (json and output is None) else Path(output or "report.html")
    kind = kind_of(path) if path else ""
    sources = find_all(runs, skip_unreadable=True)
    for line in sources.notes:
        note(line)
    reported = accounts(sources.runs)
    if path:
        write(path, KINDS[kind](reported), force=force)
        note(f"wrote {path}")
    if json:
        print(to_json(reported), end="")
    elif path:
        print_text(to_text([account.summary for account in reported], shutil.get_terminal_size().columns))
    else:
        print(markdown(reported), end="")


def _send(names: tuple[str, ...], to: str, follow: bool) -> None:
    """Send runs to trackers. Raises InputError for an unknown tracker, FailedError where one failed."""
    from steadytrain.reports.files import find
    from steadytrain.reports.trackers import parse_trackers, send

    trackers = parse_trackers(to)
    selection = find(names)
    for reason in selection.left_out:
        note(reason)
    failures = list[str]()
    for run in selection.runs:
        try:
            send(run, trackers, follow=follow)
        except FailedError as error:
            failures.append(str(error))
        else:
            note(f"sent {run.directory} to {', '.join(trackers)}")
    if failures:
        raise FailedError("; ".join(failures))


def diagnose(
    *runs: str,
    probe: bool = False,
    seconds: float | None = None,
    force: bool = False,
    model: str | None = None,
    json: Json = False,
) -> None:
    """Find what slows a run down, finished or running: its cost, what to change, and what the change saves.

    The dominant cause comes first, with its share of the wall time, the figures behind it and the one change to make;
    then the next two. It reads the run's event log and needs neither torch nor a GPU; with --probe it needs the data
    and the model.

    Args:
        runs: Folders of runs, or folders that hold runs.
        probe: First measure the data loader alone and the updates alone, on the run's data and model; the run's state
            does not change.
        seconds: How long to measure with --probe (default: 15).
        force: Probe a run even while it is training; both become slower.
        model: With --probe: the run's pkg.mod:factory; it is imported only if you name it.

    Examples:
        steady diagnose runs/a
        steady diagnose runs/a --probe
        steady diagnose runs/ --json
    """
    from steadytrain.monitor import diagnose as diagnose_run
    from steadytrain.reports.files import find
    from steadytrain.reports.verdict import verdict_text

    if not runs:
        raise InputError("no run named: steady diagnose runs/a, or a folder of runs: steady diagnose runs/")
    if not probe and (seconds is not None or force or model is not None):
        raise InputError("--seconds, --force and --model need --probe")
    selection = find(runs)
    for reason in selection.left_out:
        note(reason)
    if probe:
        from steadytrain.machine.process import spin_where_alone

        spin_where_alone()
        from steadytrain.cli.render import event_words
        from steadytrain.training.profile.probe import SECONDS, probe_run

        for run in selection.runs:
            allow_import = model is not None and model == run.recipe.model.name
            span = SECONDS if seconds is None else seconds
            probed = probe_run(run, seconds=span, force=force, allow_import=allow_import, say=note)
            for part in event_words(probed.ceilings):  # at once: a run that has not begun has no verdict
                note(part)
    diagnoses = [(str(run.directory), diagnose_run(run)) for run in selection.runs]
    if json:
        documents = [{"run": name, **diagnosis.to_dict()} for name, diagnosis in diagnoses]
        is_single = len(runs) == 1 and (Path(runs[0]) / "recipe.json").exists()
        print_json(documents[0] if is_single else {"runs": documents})
    else:
        print_text("\n\n".join(verdict_text(diagnosis, name) for name, diagnosis in diagnoses))
