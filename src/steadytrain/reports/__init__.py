"""Tables, curves and pages from the event logs of runs. Needs neither torch nor a GPU.

>>> from steadytrain.reports import wilson
>>> round(wilson(0.91, 1000).low, 3)
0.891
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from steadytrain.errors import InputError, describe_type
from steadytrain.intervals import spread as spread
from steadytrain.intervals import wilson as wilson
from steadytrain.reports.files import KINDS, find_all, kind_of, names, write
from steadytrain.reports.logs import ForeignRun
from steadytrain.reports.page import page
from steadytrain.reports.summary import Account
from steadytrain.reports.summary import summarise as summarise
from steadytrain.run import Run


def report(
    runs: Run | str | Path | Sequence[Run | str | Path],
    output: str | Path,
    *,
    force: bool = False,
    target: float | None = None,
) -> Path:
    """Write one report on one run or several; the format is the name's: ``.html``, ``.md``, ``.csv`` or ``.json``.

    Args:
        runs: one or several of: a run, its folder, a folder that holds runs, a log file of another program.
        output: the file. An older report of that name is replaced.
        force: replace a file that is not a report, too.
        target: top-1 (of several labels: mAP), a fraction: a page on several runs says when each came to it.

    Returns:
        The path of the file.

    Raises:
        InputError: an unknown ending, not a run (RunError), or a file in the way.
        StorageError: it cannot be written.
    """
    path = Path(output)
    kind = kind_of(path)
    render = partial(page, target=target, folder=path.parent) if kind == ".html" else KINDS[kind]
    runs = [runs] if isinstance(runs, Run | str | Path) else runs
    if not isinstance(runs, Sequence) or not runs:
        raise InputError(
            f"runs is {'empty' if isinstance(runs, Sequence) else describe_type(runs)}; name a run, or several"
        )
    chosen = find_all(run.directory if isinstance(run, Run) else run for run in runs).runs
    write(path, render(accounts(chosen)), force=force)
    return path


def accounts(runs: Sequence[Run | ForeignRun]) -> list[Account]:
    """Read runs and give each a name of its own. Raises RunError where nothing was started in one of them."""
    named = zip(runs, names(runs), strict=True)
    return [Account.of(run, name) if isinstance(run, Run) else Account.of_log(run, name) for run, name in named]
