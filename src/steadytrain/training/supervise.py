"""One run as users start it: signals become requests to save, and every event is shown."""

from __future__ import annotations

from collections.abc import Callable

from steadytrain.events import Ended, Event
from steadytrain.machine.process import stop_requests
from steadytrain.run import Run
from steadytrain.training import Group, steps

EXIT_CODES = {"finished": 0, "interrupted": 130, "preempted": 75}


def supervise(
    run: Run,
    show: Callable[[Event], None],
    *,
    allow_import: bool = False,
    began: float | None = None,
    probe: bool = False,
    group: Group | None = None,
) -> int:
    """Train a run to its end or to the first request to stop; returns the exit code.

    SIGINT saves and ends with 130 (before the first step there is nothing to save, and it ends at once), SIGTERM and
    SIGUSR1 save and end with 75: the same command goes on from there.

    Args:
        run: as made by :meth:`Run.create`.
        show: called with each event, in order.
        allow_import: whether the recipe's ``pkg.mod:factory`` model may be imported.
        began: when the work on it began, by ``time.perf_counter()``; None: now.
        probe: measure first how fast the feed, the updates and both can be.
        group: the ranks that train it together; None: this process is alone.

    Raises:
        SteadyError: what went wrong, after it was written to the run.
    """
    status = "finished"
    with stop_requests() as stop:
        stop.saves = False  # while data and model are opened
        told = steps(run, stop=lambda: stop.signal, allow_import=allow_import, began=began, probe=probe, group=group)
        for event in told:
            stop.saves = True
            show(event)
            if isinstance(event, Ended):
                status = event.status
    return EXIT_CODES[status]
