"""``steady watch RUN --web``: a page for the browsers of this machine."""

from __future__ import annotations

from steadytrain.cli.console import note
from steadytrain.reports.live import listening, serve
from steadytrain.run import Run


def watch_page(run: Run, *, port: int | None = None, price: float | None = None, seconds: float | None = None) -> int:
    """Serve the page of a run until Ctrl-C, or for ``seconds``; its address is one line on standard output.

    Raises:
        InputError: the port cannot be had.
    """
    with listening(port) as listener:
        number = listener.getsockname()[1]
        print(f"http://127.0.0.1:{number}/", flush=True)
        note(f"watching {run.directory}; the page is for this machine alone and stays until Ctrl-C")
        serve(run, listener, price=price, seconds=seconds)
    return 0
