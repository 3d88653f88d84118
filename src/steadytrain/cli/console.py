"""What a person sees while something runs, always on standard error.

On a terminal a few live lines (rich, a few drawings a second, on a thread of their own); anywhere else plain
``key=value`` lines that a log collector can take. A reader that goes away (``2>&1 | head``, a closed window) silences
the output and never ends the work.

>>> with progress("packing", 200) as advance:
...     for done in range(1, 201):
...         advance(done)
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

from steadytrain.cli.lines import clean, clock, line, pairs, words, wrap
from steadytrain.cli.stream import Stream, Writable
from steadytrain.events import Evaluated, Event, Logged, Saved, Started, Step

if TYPE_CHECKING:
    from types import TracebackType

    from rich.text import Text

    from steadytrain.cli.live import Foot


class Advance(Protocol):
    """How work tells how far it is: ``done`` so far, and ``total`` where it is only now known."""

    def __call__(self, done: int, total: int | None = None) -> None: ...


def note(text: str) -> None:
    """One line on standard error; appears above whatever is being drawn there."""
    stream = Stream(sys.stderr)
    stream.write(clean(text) + "\n")
    stream.flush()


@contextlib.contextmanager
def progress(what: str, total: int, *, unit: str = "images", every_seconds: float = 5.0) -> Iterator[Advance]:
    """Show how far something is: a bar with rate and ETA, or a line every ``every_seconds`` where there is no terminal.

    Args:
        what: the work, such as ``packing``.
        total: how much there is to do; 0 where nobody knows yet.
        unit: what is counted.
        every_seconds: pause between two plain lines; work that is shorter is told in one line at its end.

    Yields:
        ``advance(done)`` or ``advance(done, total)``: ``done`` is how much is done **so far**, not how much since the
        last call. It may be called from any thread, as often as you like (about a microsecond), and out of order: the
        largest counts.
    """
    stream = Stream(sys.stderr)
    count = _Count(what, total, unit, time.monotonic())
    if stream.isatty():
        from steadytrain.cli.live import Foot, bar_line

        def lines(width: int, ascii_only: bool) -> list[Text]:
            share = count.share if count.total else None
            return [bar_line(clean(what), share, count.right(), width, ascii_only)]

        with Foot(stream, lines):
            yield count.advance
        ended = f"{clean(what)}: {count.done:,} {unit} in {count.seconds:.1f} s ({count.rate:,.0f} {unit}/s)"
    else:
        last = count.began

        def advance(done: int, total: int | None = None) -> None:
            nonlocal last
            count.advance(done, total)
            if time.monotonic() - last >= every_seconds:
                last = time.monotonic()
                stream.write(count.plain() + "\n")

        yield advance
        ended = count.plain(ended=True)
    stream.write(ended + "\n")
    stream.flush()


class _Count:
    """How much of ``total`` is done, since when."""

    def __init__(self, what: str, total: int, unit: str, began: float) -> None:
        self.what, self.total, self.unit, self.began = what, total, unit, began
        self.done = 0

    def advance(self, done: int, total: int | None = None) -> None:
        if done > self.done:
            self.done = done
        if total is not None:
            self.total = total

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    @property
    def rate(self) -> float:
        return self.done / max(self.seconds, 1e-9)

    @property
    def share(self) -> float:
        return self.done / self.total if self.total else 0.0

    @property
    def eta(self) -> float | None:
        return (self.total - self.done) / self.rate if self.done and self.total else None

    def right(self) -> str:
        """What stands right of the bar."""
        done = f"{self.share:4.0%}" if self.total else f"{self.done:,}"
        left = "" if self.eta is None else f"  {clock(self.eta)} left"
        return f"{done}  {self.rate:,.0f} {self.unit}/s{left}"

    def plain(self, *, ended: bool = False) -> str:
        """One ``key=value`` line."""
        told: dict[str, object] = {"done": self.done, "total": self.total or self.done}
        told[f"{self.unit.replace(' ', '_')}_per_second"] = f"{self.rate:.1f}"
        if ended:
            told["seconds"] = f"{self.seconds:.2f}"
        elif self.eta is not None:
            told["eta_seconds"] = f"{self.eta:.0f}"
        return f"{clean(self.what)}: {pairs(told)}"


@dataclass
class _Now:
    """The newest facts of a run. Written by the training thread, read by the drawing one: each is one reference."""

    since: float
    started: Started | None = None
    step: Step | None = None
    logged: Logged | None = None
    saved: Saved | None = None
    best: Evaluated | None = None

    def is_best(self, event: Evaluated) -> bool:
        """Take an evaluation in; whether it is the best so far."""
        better = event.top1 > (self.best.top1 if self.best else -1.0)  # never true of a NaN
        if better:
            self.best = event
        return better


class Console:
    """Shows the events of a training run as they come; use it as a context manager.

    On a terminal: a bar and the newest figures, redrawn a few times a second by a thread; evaluations and
    notices are printed above and stay. Elsewhere: a ``key=value`` line an event. A :class:`Step` costs an assignment.

    Args:
        best: the best evaluation before, of a resumed run.
        stream: where to; standard error by default.
        every_seconds: of the plain lines for ``Logged``, at most one in this many seconds (0: all of them).
    """

    def __init__(
        self, *, best: Evaluated | None = None, stream: Writable | None = None, every_seconds: float = 1.0
    ) -> None:
        self._now = _Now(since=time.monotonic(), best=best)
        self._given = stream
        self._every_seconds = every_seconds
        self._view: _Lines | _Terminal | None = None

    def __enter__(self) -> Self:
        stream = Stream(self._given or sys.stderr)
        self._view = _Terminal(stream, self._now) if stream.isatty() else _Lines(stream, self._every_seconds)
        self._view.open()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._view is not None:
            self._view.close()
            self._view = None

    def show(self, event: Event) -> None:
        """Take one event in. Never raises for want of a reader."""
        if type(event) is Step:
            self._now.step = event
            return
        best = isinstance(event, Evaluated) and self._now.is_best(event)
        match event:
            case Started():
                self._now.started, self._now.since, self._now.step = event, time.monotonic(), None
            case Logged():
                self._now.logged = event
            case Saved():
                self._now.saved = event
        if self._view is not None:
            self._view.show(event, best=best)


class _Lines:
    """Plain lines. A ``Logged`` that came too soon is held back, and told if something else follows it."""

    def __init__(self, stream: Stream, every_seconds: float) -> None:
        self._stream = stream
        self._every_seconds = every_seconds
        self._last = -float("inf")
        self._held: str | None = None

    def open(self) -> None:
        """Nothing to set up."""

    def close(self) -> None:
        self._write(None)

    def show(self, event: Event, *, best: bool) -> None:
        text = line(event, best=best)
        if text is None:
            return
        if not isinstance(event, Logged):
            self._write(text)
        elif time.monotonic() - self._last >= self._every_seconds:
            self._held = None
            self._last = time.monotonic()
            self._write(text)
        else:
            self._held = text

    def _write(self, text: str | None) -> None:
        told = [part for part in (self._held, text) if part]
        self._held = None
        if told:
            self._stream.write("\n".join(told) + "\n")
            self._stream.flush()


_STYLES = {"Started": "bold", "Ended": "bold", "Noticed": "yellow", "Failed": "red"}


class _Terminal:
    """The live view: what stays is printed above, the rest is drawn from :class:`_Now` by the foot's thread."""

    def __init__(self, stream: Stream, now: _Now) -> None:
        from steadytrain.cli.live import Foot

        self._now = now
        self._foot: Foot = Foot(stream, self._lines)

    def open(self) -> None:
        self._foot.__enter__()

    def close(self) -> None:
        self._foot.__exit__(None, None, None)

    def show(self, event: Event, *, best: bool) -> None:
        for text in wrap(words(event, best=best, so_far=self._now.best), self._foot.width - 1):
            self._foot.print(text, _STYLES.get(event.kind, "green" if best else ""))

    def _lines(self, width: int, ascii_only: bool) -> list[Text]:
        from rich.text import Text

        from steadytrain.cli.live import bar_line

        now = self._now
        if now.started is None:
            return [Text("starting", style="bright_black")]
        started, done = now.started, now.step.step if now.step else now.started.step
        share = done / started.steps if started.steps else 0.0
        spent = time.monotonic() - now.since
        left = spent / max(done - started.step, 1) * (started.steps - done) if done > started.step else None
        right = f"{share:4.0%}  " + ("" if left is None else f"{clock(left)} left")
        title = f"epoch {_epoch(done, started):.2f}/{_epoch(started.steps, started):.4g}"
        top = bar_line(title, share, right, width, ascii_only)
        return [top, *(Text(text) for text in wrap(_figures(now, done), width - 1))]


def _epoch(step: int, started: Started) -> float:
    return step / started.steps_per_epoch if started.steps_per_epoch > 0 else 0.0


def _figures(now: _Now, done: int) -> list[str]:
    steps = now.started.steps if now.started else 0
    parts = [f"step {done:,}/{steps:,}"]
    if (logged := now.logged) is not None:
        parts += [f"loss {logged.loss:.4f}", f"train top1 {logged.top1:.3f}", f"lr {logged.lr:.3g}"]
        parts += [f"{logged.images_per_second:,.0f} images/s", f"wait {logged.wait_share:.1%}"]
    if now.saved is not None:
        parts.append(f"saved {now.saved.step:,}")
    return parts
