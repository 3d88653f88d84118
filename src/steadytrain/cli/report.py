"""``steady report``: tables, curves and one HTML page from runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from steadytrain.cli.console import note
from steadytrain.errors import InputError


def report(
    *runs: str,
    output: Annotated[str | None, Parameter(name=["--output", "-o"], allow_leading_hyphen=True)] = None,
    json: bool = False,
    force: bool = False,
) -> None:
    """Report on runs, finished or going on: accuracy, epochs, time, images per second, curves, recipe, what happened.

    Several runs are compared. The page is one file that needs no network.

    Args:
        runs: Folders of runs, or folders that hold runs.
        output: The file to write; its ending says what: .html (the default is report.html), .md, .csv (a row for each
            epoch) or .json. A dash prints Markdown instead.
        json: Print the figures as one JSON document; write a file only with -o.
        force: Replace the output even if it is not an older report.

    Examples:
        steady report runs/a runs/b -o both.html
        steady report runs/a -o -
    """
    from steadytrain.reports import accounts
    from steadytrain.reports.files import KINDS, find, kind_of, write
    from steadytrain.reports.tables import markdown, to_json, to_text

    if not runs:
        raise InputError("name a run, several, or a folder of runs: steady report runs/")
    path = None if output == "-" or (json and output is None) else Path(output or "report.html")
    kind = kind_of(path) if path else ""
    selection = find(runs)
    for reason in selection.left_out:
        note(reason)
    reported = accounts(selection.runs)
    if path:
        write(path, KINDS[kind](reported), force=force)
        note(f"wrote {path}")
    if json:
        print(to_json(reported), end="")
    elif path:
        print(to_text([account.summary for account in reported]))
    else:
        print(markdown(reported), end="")
