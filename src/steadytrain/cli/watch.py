"""``steady watch``: a run, or any training process, as it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from steadytrain.run import Run

RUNS = Path("runs")


def watch(
    *target: Annotated[
        str,
        Parameter(
            show=True,
            help="The run's folder, or a folder of runs: the newest that goes on (default: runs). "
            "After -- a command to start and watch instead.",
        ),
    ],
    web: Annotated[
        bool, Parameter(negative="", show_default=False, help="Show it in a browser: prints the page's address.")
    ] = False,
    port: Annotated[
        int | None,
        Parameter(help="Port of the page, on this machine alone (default: 8321, or a free one if that is taken)."),
    ] = None,
    price: Annotated[float | None, Parameter(help="Of an hour of the machine, in any money: shows the cost.")] = None,
    seconds: Annotated[float | None, Parameter(help="Stop watching after so many seconds; 0: one look.")] = None,
    pid: Annotated[int | None, Parameter(help="Watch this process instead, whatever it trains with.")] = None,
    json: Annotated[
        bool, Parameter(negative="", show_default=False, help="At the end print the figures as one JSON document.")
    ] = False,
) -> int:
    """Watch a run: curves, images/s, where the time goes, queues, processors, GPUs, the verdict, the time left.

    It only reads: a run that goes on, that is over, that has not begun, or a copy of its folder. It ends with the run;
    Ctrl-C ends it at any time, and never the run. On a terminal it is redrawn every second, elsewhere there is a
    key=value line now and then. With --web it is a page for the browsers of this machine, which stays until Ctrl-C.

    With --pid, or a command after --, it watches any process, and says what holds that back.

    Examples
    --------
    steady watch runs/a
    steady watch runs/a --web
    steady watch --pid 4711
    steady watch -- python train.py --epochs 90
    """
    from steadytrain.errors import InputError

    runs, command = _apart(target)
    if pid is not None or command:
        if runs or web or port is not None or price is not None:
            raise InputError("--pid and a command after -- stand alone: with them give only --seconds and --json")
        from steadytrain.cli.foreign import watch_foreign

        return watch_foreign(pid=pid, command=command, seconds=seconds, json=json)
    if seconds is not None and seconds < 0:
        raise InputError(f"--seconds is {seconds:g}; it must be 0 or more")
    if price is not None and price < 0:
        raise InputError(f"--price is {price:g}; it must be 0 or more")
    run = _run(runs)
    if web or port is not None:
        from steadytrain.cli.watch_page import watch_page

        return watch_page(run, port=port, price=price, seconds=seconds)
    from steadytrain.cli.watch_run import watch_run

    return watch_run(run, price=price, seconds=seconds, json=json)


def _apart(target: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What was named before the two dashes, and the command after them."""
    if "--" not in target:
        return target, ()
    at = target.index("--")
    return target[:at], target[at + 1 :]


def _run(runs: tuple[str, ...]) -> Run:
    from steadytrain.cli.console import note
    from steadytrain.errors import InputError
    from steadytrain.reports.files import pick

    if len(runs) > 1:
        raise InputError(f"one run is watched at a time, here are {len(runs)} (a command stands after --)")
    if not runs and not RUNS.is_dir():
        raise InputError("name the run's folder: steady watch runs/NAME")
    picked = pick(runs[0] if runs else RUNS)
    if picked.others:
        names = ", ".join(str(run.directory) for run in picked.others)
        note(f"watching {picked.run.directory}; going on as well, to be named: {names}")
    return picked.run
