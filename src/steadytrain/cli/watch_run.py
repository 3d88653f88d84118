"""Watching a run from a terminal, or from a log: read what came, show it, until the run is over."""

from __future__ import annotations

import contextlib
import json as json_module
import shutil
import sys
import time
from contextlib import AbstractContextManager
from typing import Protocol

from steadytrain.cli.console import note
from steadytrain.cli.stream import Stream
from steadytrain.cli.watch_text import closing, state_line
from steadytrain.events import Evaluated
from steadytrain.format import clean, pairs, time_of_day
from steadytrain.reports.watch import Snapshot, Watch, snapshot
from steadytrain.run import Run

LOOK_SECONDS = 1.0
LINE_SECONDS = 10.0


class View(AbstractContextManager["View"], Protocol):
    """Something that shows a run again and again."""

    def show(self, watched: Watch, told: Snapshot) -> None: ...


def watch_run(run: Run, *, price: float | None = None, seconds: float | None = None, json: bool = False) -> int:
    """Show a run until it is over, ``seconds`` have passed, or Ctrl-C; then its figures on standard output."""
    watched = Watch(run)
    began = time.monotonic()
    _read_first(watched)
    told = snapshot(watched, price=price)
    if not (told.signs.over or seconds == 0):
        with contextlib.suppress(KeyboardInterrupt), _view(Stream(sys.stderr), quiet=json) as view:
            view.show(watched, told)
            while not told.signs.over and (seconds is None or time.monotonic() - began < seconds):
                time.sleep(LOOK_SECONDS if seconds is None else min(LOOK_SECONDS, max(0.05, seconds)))
                watched.read()
                told = snapshot(watched, price=price)
                view.show(watched, told)
    if json:
        print(json_module.dumps(told.to_dict(), indent=2, allow_nan=False))
    else:
        print("\n".join(closing(told, shutil.get_terminal_size().columns)))
    sys.stdout.flush()
    return 0


def _read_first(watched: Watch) -> None:
    """A long run's log takes a while to be read: then the user is told how far it is."""
    began = time.monotonic()
    for share in watched.read_in_parts():
        if time.monotonic() - began > 2.0:
            began = time.monotonic()
            note(f"reading the events: {share:.0%}")


def _view(stream: Stream, *, quiet: bool) -> View:
    if stream.isatty() and not quiet:
        from steadytrain.cli.watch_view import Screen

        return Screen(stream)
    return Lines(stream, quiet=quiet)


class Lines:
    """A ``key=value`` line every ten seconds, and one for each thing that happens in between."""

    def __init__(self, stream: Stream, *, quiet: bool = False) -> None:
        self._stream = stream
        self._quiet = quiet
        self._last = -float("inf")
        self._told: set[str] | None = None

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to put away."""

    def show(self, watched: Watch, told: Snapshot) -> None:
        """Write what is new."""
        if self._quiet:
            return
        if self._told is None:  # what was evaluated before the watch began is no news
            self._told = set(_evaluations(watched))
        news = [line for line in (*_evaluations(watched), *_alarms(told)) if line not in self._told]
        self._told.update(news)
        if time.monotonic() - self._last >= LINE_SECONDS or told.signs.over:
            self._last = time.monotonic()
            news.append(state_line(told))
        if news:
            self._stream.write("\n".join(news) + "\n")
            self._stream.flush()


def _evaluations(watched: Watch) -> list[str]:
    return [_evaluated(event) for event in watched.history.evaluated[-50:]]


def _evaluated(event: Evaluated) -> str:
    told = {"step": event.step, "epoch": f"{event.epoch:.2f}", "top1": f"{event.top1:.4f}", "loss": f"{event.loss:.4f}"}
    return "evaluated " + pairs(told)


def _alarms(told: Snapshot) -> list[str]:
    """What is told once, though its figures go on changing."""
    lines = [f"notice: {clean(told.notice)}"] if told.notice else []
    if told.stalled is not None:
        lines.append(f"stalled: {clean(told.stalled.what)}: {clean(told.stalled.culprit)}")
    if told.signs.silent:
        lines.append(f"silent: no sign of life since {time_of_day(told.signs.last)}")
    return lines
