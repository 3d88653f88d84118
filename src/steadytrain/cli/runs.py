"""``steady runs``, ``steady report`` and ``steady diagnose``: what runs have written of themselves."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter, convert

from steadytrain.cli.console import confirmed, note, print_json, print_text, status
from steadytrain.cli.options import Json, refuse_flags, require_run_model
from steadytrain.cli.watch import serve_page
from steadytrain.config.plain import plain
from steadytrain.errors import FailedError, InputError, SteadyError
from steadytrain.format import NONE, clean, count, hide_columns, size, text_table
from steadytrain.run import Run

if TYPE_CHECKING:
    from steadytrain.monitor import Diagnosis
    from steadytrain.reports.run_list import RunRow

RUNS = "runs"
SHORT_SECONDS = 600.0
"""Runs up to this long are diagnosed in about ten lines: there is little to gain."""


def runs(
    *folders: str,
    where: str | None = None,
    sort: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None,
    tag: str | None = None,
    untag: str | None = None,
    remark: Annotated[str | None, Parameter(name="--note", converter=convert)] = None,
    compare: bool = False,
    clean: bool = False,
    yes: bool = False,
    json: bool = False,
) -> None:
    """List runs, the newest first: status, data, model, best score with its 95 % interval, images/s, cost, age, notes.

    Fields for --where and --sort: name, status, data, model, tag, note, best, top1, mean_ap, loss, images_per_second,
    cost, age, seconds, epochs, and the keys of the recipe, such as optim.lr. Tags and notes are kept in the run's
    folder (notes.json).

    Args:
        folders: Runs, or folders that hold runs, those of sweeps and repeats included (default: runs).
        where: Only runs that meet these conditions, separated by spaces: "model=resnet50 top1>0.9", "tag=good",
            "age<7d". Operators: = != > < >= <=. A * matches any text.
        sort: Sort by a field, the best first: --sort top1, --sort cost; --sort -top1: the worst first.
        tag: Add one tag or several (a,b) to these runs. Runs tagged keep are never cleaned up.
        untag: Remove one tag or several (a,b) from these runs.
        remark: Write a note on these runs, replacing the old one; an empty note removes it.
        compare: Add a column for each setting in which the runs differ.
        clean: Remove checkpoints and weights of failed runs, and folders of runs that never started; log, recipe, notes
            and reports stay. With --where: of the runs that it chooses; of finished ones only checkpoints. It lists
            what it would remove, and asks.
        yes: With --clean: do not ask.
        json: Print one JSON document.

    Examples:
        steady runs
        steady runs runs/ --where "model=resnet50 top1>0.9" --sort top1
        steady runs runs/a runs/b --tag baseline --note "before the new labels"
        steady runs runs/rates --compare
        steady runs --clean
    """
    from steadytrain.reports.run_list import list_runs, parse_where, sort_rows, with_notes, write_notes

    chosen = parse_where(where or "")
    writes = tag is not None or untag is not None or remark is not None
    if clean and (writes or compare):
        raise InputError("--clean cannot be combined with tags, notes or --compare: use two commands")
    if yes and not clean:
        raise InputError("--yes needs --clean: steady runs --clean")
    if not folders and not Path(RUNS).is_dir():
        raise InputError(f"there is no folder {RUNS} here: name the folder of your runs: steady runs DIR")
    folders = folders or (RUNS,)
    with status("reading"):
        rows = list({row.directory: row for folder in folders for row in list_runs(folder)}.values())
    found = sort_rows([row for row in rows if chosen(row)], sort or "age")
    if writes:
        are_named = all(Run.is_run(folder) for folder in folders)
        if len(rows) > 1 and where is None and not are_named:
            raise InputError(
                f"--tag, --untag and --note would change all {len(rows):,} runs: name the runs, or choose by --where"
            )
        for row in found:
            tags = (tuple(part.strip() for part in text.split(",")) if text else () for text in (tag, untag))
            write_notes(Path(row.directory), add=next(tags), remove=next(tags), note=remark)
        found = [with_notes(row) for row in found]
    if clean:
        _clean(found, is_chosen=bool(where), yes=yes, json=json)
        return
    if json:
        print_json({"runs": [row.to_dict() for row in found]})
        return
    if not found:
        note(f"none of {count(len(rows), 'run')} meets {where!r}")
        return
    _print_rows(found, with_settings=compare)


def _print_rows(rows: Sequence[RunRow], *, with_settings: bool) -> None:
    """Print the table of runs; on a terminal, columns that have no room are left out and named."""
    from steadytrain.reports.run_list import differing_settings, row_cells

    words = [row_cells(row, time.time()) for row in rows]
    columns = {head: [line[head] or NONE for line in words] for head in words[0] if any(line[head] for line in words)}
    settings = [key for key in differing_settings(rows) if key not in SHOWN_SETTINGS] if with_settings else []
    for key in settings:
        columns[key] = [clean(str(row.recipe.get(key, NONE))) for row in rows]
    hidden = list[str]()
    if sys.stdout.isatty():
        scores = ("best", "test", "macro recall")
        others = ("note", "images/s", "epochs", "model", "age", "data", "cost")
        optional = [head for head in (*scores, *settings, *others) if head in columns]
        hidden = hide_columns(columns, optional, shutil.get_terminal_size().columns)
        if set(hidden) & set(scores):  # an interval goes before the score itself
            columns |= {head: [cell.partition(" (")[0] for cell in columns[head]] for head in scores if head in columns}
            hidden = hide_columns(columns, optional, shutil.get_terminal_size().columns)
    shown = {head: cells for head, cells in columns.items() if head not in hidden}
    right = [index for index, head in enumerate(shown) if head in ("images/s", "cost", "age")]
    print_text(text_table([list(shown), *zip(*shown.values(), strict=True)], right=right))
    if hidden:
        note(f"no room for {', '.join(hidden)}: a wider terminal, or --json, shows them")


SHOWN_SETTINGS = ("data.train", "model.name")


def _clean(rows: Sequence[RunRow], *, is_chosen: bool, yes: bool, json: bool) -> None:
    """List what goes of runs, ask, and remove it. Raises InputError where nobody can be asked."""
    from steadytrain.reports.removal import plan_removals, remove

    removals, reasons = plan_removals(rows, is_chosen=is_chosen)
    for reason in reasons:
        note(clean(reason))
    total = size(sum(removal.num_bytes for removal in removals))
    lines = [[clean(item.row.directory), item.row.status, size(item.num_bytes), item.words] for item in removals]
    listed = [{"run": item.row.directory, "removes": item.words, "bytes": item.num_bytes} for item in removals]
    if not removals:
        if json:
            print_json({"removed": [], "bytes": 0})
        why = "" if is_chosen or reasons else ": no run failed or never started; --where chooses others"
        note(f"nothing to clean up{why}")
        return
    table = text_table([["run", "status", "bytes", "what goes"], *lines])
    note(table) if json else print_text(table)
    question = f"remove {total} of {count(len(removals), 'run')}, for good?"
    if not (answer := yes or confirmed(question)):
        if answer is None:
            raise InputError(f"nothing was removed ({total} of {count(len(removals), 'run')}): add --yes to remove it")
        note("nothing was removed")
        return
    failures = list[str]()
    for removal in removals:
        try:
            remove(removal)
        except SteadyError as error:
            failures.append(str(error))
    if json:
        print_json({"removed": listed, "bytes": sum(item.num_bytes for item in removals), "failures": failures})
    if failures:
        raise FailedError("; ".join(failures))
    note(f"removed {total} of {count(len(removals), 'run')}")


def report(
    *runs: str,
    output: Annotated[str | None, Parameter(name=["--output", "-o"], allow_leading_hyphen=True)] = None,
    json: bool = False,
    force: bool = False,
    compare: bool = False,
    to: str | None = None,
    follow: bool = False,
    serve: bool = False,
    port: int | None = None,
    seconds: float | None = None,
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
        compare: Instead test whether two runs, or two files of steady evaluate --per-image, differ in accuracy on the
            same images.
        to: Instead send the runs to trackers: tensorboard, mlflow, wandb or trackio; several: tensorboard,mlflow.
        follow: With --to: keep sending until the run has ended.
        serve: Instead serve a live page of all runs in a folder (default: runs) to browsers on this machine, until
            Ctrl-C. Each run links to its page.
        port: With --serve: port of the page (default: 8321, or a free port if that is taken).
        seconds: With --serve: stop after this many seconds.

    Examples:
        steady report runs/a runs/b --compare
        steady report runs/a --to tensorboard
        steady report runs/a runs/b -o both.html
        steady report runs/a old.log metrics.csv
        steady report runs/a -o -
        steady report --serve runs/
    """
    from steadytrain.reports import accounts
    from steadytrain.reports.files import KINDS, find_all, kind_of, open_run, write
    from steadytrain.reports.tables import markdown, to_json, to_text

    if serve or port is not None:
        if len(runs) > 1 or compare or json or follow or force or to is not None or output is not None:
            raise InputError("--serve takes one folder of runs, --port and --seconds: steady report --serve runs/")
        folder = Path(runs[0] if runs else RUNS)
        if not folder.is_dir():
            open_run(folder)  # which says what is wrong with it
        serve_page(folder, f"showing the runs of {folder}", port=port, seconds=seconds)
        return
    if seconds is not None:
        raise InputError("--seconds needs --serve: steady report --serve runs/ --seconds 60")
    if not runs:
        raise InputError("no run named: steady report RUN..., or a folder of runs: steady report runs/")
    if compare:
        from steadytrain.reports.comparison import compare as compare_two

        if len(runs) != 2 or follow or force or to is not None or output is not None:
            raise InputError("--compare takes two runs and writes no file: steady report runs/a runs/b --compare")
        compared = compare_two(*runs)
        document = {**plain(compared), "verdict": compared.verdict}
        print_json(document) if json else print_text(f"{compared.verdict}\n{compared.details}")
        return
    if follow and to is None:
        raise InputError("--follow needs --to: steady report RUN --to tensorboard --follow")
    if to is not None:
        refuse_flags("--to sends runs, and prints nothing: leave {} out", output=output, json=json, force=force)
        _send(runs, to, follow)
        return
    path = None if output == "-" or (json and output is None) else Path(output or "report.html")
    kind = kind_of(path) if path else ""
    with status("reading"):
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
    from steadytrain.reports.trackers import find_trackers, send

    for load in find_trackers(to).values():
        load()  # before the runs are read
    selection = find(names)
    for reason in selection.notes:
        note(reason)
    failures = list[str]()
    for run in selection.runs:
        try:
            send(run, to, follow=follow)
        except FailedError as error:
            failures.append(str(error))
        else:
            note(f"sent {run.directory} to {to}")
    if failures:
        raise FailedError("; ".join(failures))


def diagnose(
    *runs: str,
    probe: bool = False,
    seconds: float | None = None,
    force: bool = False,
    model: str | None = None,
    all: bool = False,
    json: Json = False,
) -> None:
    """Find what slows a run down, finished or running: its cost, what to change, and what the change saves.

    The largest cause comes first, with its share of the wall time, the evidence and the change to make; then the next
    two. Only --probe needs the data, the model and torch.

    Args:
        runs: Folders of runs, or folders that hold runs.
        probe: First measure the data loader alone and the updates alone, on the run's data and model; the run's state
            does not change.
        seconds: How long to measure with --probe (default: 15).
        force: Probe a run even while it is training; both become slower.
        model: With --probe: the run's pkg.mod:factory; it is imported only if you name it.
        all: Also of a short run, print the evidence of all causes, rates, and what could not be measured.

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
    for reason in selection.notes:
        note(reason)
    if probe:
        from steadytrain.machine.process import spin_where_alone

        require_run_model(model, [run.recipe.model.name for run in selection.runs])
        spin_where_alone()
        from steadytrain.cli.render import describe_event
        from steadytrain.training.profile.probe import SECONDS, probe_run

        for run in selection.runs:
            allow_import = model is not None and model == run.recipe.model.name
            span = SECONDS if seconds is None else seconds
            probed = probe_run(run, seconds=span, force=force, allow_import=allow_import, say=note)
            for part in describe_event(probed.ceilings):  # at once: a run that has not begun has no verdict
                note(part)
    with status("reading"):
        diagnoses = [(str(run.directory), diagnose_run(run)) for run in selection.runs]
    if json:
        documents = [{"run": name, **diagnosis.to_dict()} for name, diagnosis in diagnoses]
        is_single = len(runs) == 1 and Run.is_run(runs[0])
        print_json(documents[0] if is_single else {"runs": documents})
    else:
        texts = [verdict_text(found, name, is_short=not all and _is_short(found)) for name, found in diagnoses]
        print_text("\n\n".join(texts))
        if not (all or probe) and any(_is_short(diagnosis) for _, diagnosis in diagnoses):
            note("a short run: --all shows the evidence and the other causes")


def _is_short(diagnosis: Diagnosis) -> bool:
    """Return whether a run was too short for its causes to be worth a page."""
    return diagnosis.ledger.wall_seconds < SHORT_SECONDS and not diagnosis.hangs
