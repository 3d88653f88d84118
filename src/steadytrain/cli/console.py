"""Progress on the terminal while something runs, always on standard error.

On a terminal a few live lines (rich, a few drawings a second, on a thread of their own); anywhere else plain
``key=value`` lines that a log collector can take. A reader that goes away (``2>&1 | head``, a closed window) silences
the output and never ends the work. Rich is imported only where there is a terminal to draw on.

>>> with progress("packing", 200) as advance:
...     for done in range(1, 201):
...         advance(done)
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol, Self, TextIO, cast

from steadytrain.cli.render import describe_event, event_line, join_parts
from steadytrain.config.plain import finite
from steadytrain.events import Evaluated, Event, Logged, Noticed, ProbeProgress, Saved, Started, Step
from steadytrain.files import Closing
from steadytrain.format import clean, clock, count, epoch, fold, pairs, percent, rate

if TYPE_CHECKING:
    from types import TracebackType

    from rich.console import Console as RichConsole
    from rich.live import Live
    from rich.text import Text

DRAWS_PER_SECOND = 6
MIN_LEFT = 12
"""Columns that a narrow terminal keeps for what is shown before a bar."""
SLOW_FACTOR, RECENT_UPDATES = 3, 31
"""The time left takes a slow update for so many usual ones at most; and the updates that say what is usual."""
_STYLES = {"Started": "bold", "Ended": "bold", "Noticed": "yellow", "Halved": "yellow", "Failed": "red"}


class TerminalStream:
    """A text stream that never raises: what cannot be encoded is escaped, and a closed pipe swallows the rest."""

    def __init__(self, file: TextIO | None) -> None:
        self._file = file
        self.encoding = getattr(file, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Write now, or nothing if the reader is gone."""
        if self._file is not None:
            try:
                self._file.write(text)
            except UnicodeEncodeError:
                self.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            except (OSError, ValueError):
                self._give_up()
        return len(text)

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        if self._file is not None:
            try:
                self._file.flush()
            except (OSError, ValueError):
                self._give_up()

    def isatty(self) -> bool:
        """Return whether a live display is possible: on a terminal that can move its cursor and shows none already."""
        if self._file is None or os.environ.get("TERM", "") in ("", "dumb", "unknown"):
            return False
        try:
            return not hasattr(self._file, "rich_proxied_file") and self._file.isatty()
        except ValueError:  # closed
            return False

    def _give_up(self) -> None:
        # The interpreter flushes standard error once more when it exits and would turn its failure into exit code 120.
        if self._file is sys.__stderr__:
            with contextlib.suppress(OSError), open(os.devnull, "w") as nothing:  # noqa: PTH123
                os.dup2(nothing.fileno(), 2)
        self._file = None


def note(text: str) -> None:
    """Write one line on standard error, folded on a terminal; it appears above whatever is being drawn there."""
    _say(fold(text, shutil.get_terminal_size().columns if _terminal().isatty() else None))


def note_on_terminal(text: str) -> None:
    """Write one line on standard error where that is a terminal: somebody waits, and a log has no need of it."""
    if _terminal().isatty():
        note(text)


def _say(line: str) -> None:
    if feet := _feet[-1:]:  # another thread may close it meanwhile
        feet[0].write(line)
    else:
        stream = TerminalStream(sys.stderr)
        stream.write(f"{line}\n")
        stream.flush()


def confirmed(question: str) -> bool | None:
    """Ask a question on the terminal; True only for a yes, None where there is nobody to ask."""
    give_way()
    if not sys.stdin.isatty() or not sys.stderr.isatty():
        return None
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def print_text(text: str) -> None:
    """Print lines on standard output, with control characters replaced: they may hold names of files and classes."""
    give_way()
    print("\n".join(map(clean, text.split("\n"))), flush=True)


def print_pages(text: str) -> None:
    """Print lines; more of them than a terminal has through the pager (``PAGER``, else less), as git does."""
    give_way()
    if not TerminalStream(sys.stdout).isatty() or text.count("\n") < shutil.get_terminal_size().lines:
        print_text(text)
        return
    import pydoc

    os.environ.setdefault("LESS", "FRX")  # what fits is printed, the rest stays when it is left
    pydoc.pager("\n".join(map(clean, text.split("\n"))))


def print_json(document: Any) -> None:
    """Print one JSON document on standard output; what is no finite number is null there."""
    give_way()
    print(json.dumps(finite(document), indent=2, allow_nan=False))


_feet: list[Foot] = []
"""Those that are open: the last one is drawn, and when it is closed the one before it comes back."""
_feet_lock = threading.RLock()  # held while one opens or closes; what is written takes none


class Foot(Closing):
    """Lines at the foot of a terminal, redrawn by a thread until it is closed; then they are gone.

    While it is open, what others write to ``sys.stderr`` (and to ``sys.stdout`` where that is a terminal too) appears
    above it. Whoever supplies the facts pays for an attribute, never for a drawing.

    Args:
        stream: the terminal.
        lines: ``lines(width, ascii_only)`` gives the lines now, for a width in columns and for whether the terminal's
            encoding has no box-drawing characters; called on the drawing thread only.
    """

    def __init__(self, stream: TerminalStream, lines: Callable[[int, bool], list[Text]]) -> None:
        self.stream, self._lines = stream, lines
        self._console = _make_console(stream)
        self._hidden = threading.Event()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        with _feet_lock:
            if _feet:
                _feet[-1]._hide()
            _feet.append(self)
            try:
                self._show()
            except BaseException:  # Ctrl-C, say
                self.close()
                raise
        return self

    def close(self) -> None:
        """Take the lines away; once more does nothing."""
        with _feet_lock:
            if self not in _feet:
                return
            is_drawn = self is _feet[-1]
            _feet.remove(self)
            if is_drawn:
                self._hide()
                if _feet:
                    _feet[-1]._show()

    def _show(self) -> None:
        from rich.live import Live

        self._live = Live(
            console=self._console,
            auto_refresh=False,  # rich's own refreshing thread is never joined
            transient=True,
            redirect_stdout=sys.stdout.isatty(),
        )
        self._hidden.clear()
        with self._console:
            self._live.start()
        self._thread = threading.Thread(target=self._draw, name="steady-foot", daemon=True)
        self._thread.start()

    def _hide(self) -> None:
        self._hidden.set()
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()
        if self._live is not None:
            with self._console:
                self._live.stop()

    def write(self, text: str) -> None:
        """Print lines above the foot as they are: a path that is longer than the terminal stays whole."""
        from rich.text import Text

        self._console.print(Text(text), soft_wrap=True)

    def print(self, parts: Iterable[str], style: str) -> None:
        """Print parts of a text above the foot, where they stay, in as few lines as hold them."""
        from rich.text import Text

        for line in join_parts(parts, self._console.width - 1):
            self._console.print(Text(line, style=style))

    def _draw(self) -> None:
        from rich.text import Text

        live = self._live
        assert live is not None
        while not self._hidden.wait(1 / DRAWS_PER_SECOND):
            width, ascii_only = self._console.width, self._console.options.ascii_only
            lines = self._lines(width, ascii_only)
            truncate(lines, width, ascii_only)
            with self._console:
                live.update(Text("\n").join(lines), refresh=True)


def _make_console(stream: TerminalStream) -> RichConsole:
    """Make rich's console of a terminal, on which one thread writes at a time: rich has no order of their lines."""
    from rich.console import Console as RichConsole

    class OrderedConsole(RichConsole):
        def __enter__(self) -> RichConsole:
            turn.acquire()
            return super().__enter__()

        def __exit__(self, kind: Any, error: Any, at: Any) -> None:
            try:
                super().__exit__(kind, error, at)
            finally:
                turn.release()

    turn = threading.RLock()
    return OrderedConsole(file=cast("TextIO", stream), force_terminal=True, highlight=False, soft_wrap=False)


def truncate(lines: list[Text], width: int, ascii_only: bool) -> None:
    """Cut lines to one column less than the terminal has, so that none of them wraps."""
    for text in lines:
        text.truncate(max(1, width - 1), overflow="crop" if ascii_only else "ellipsis")


def bar_line(left: str, share: float | None, right: str, width: int, ascii_only: bool) -> Text:
    """Draw ``left``, a bar in what room there is (up to 40 columns; none for an unknown ``share``), and ``right``.

    Of a long ``left``, as with a path in it, the end is cut off, so that ``right`` is seen.
    """
    from rich.text import Text

    if len(left) > (most := max(MIN_LEFT, width - len(right) - 3)):
        left = f"{left[: most - 3]}..."
    room = min(40, width - len(left) - len(right) - 5)
    parts = [Text(left, style="bold"), Text(right)]
    if share is not None and room >= 5:
        filled = round(max(0.0, min(1.0, share)) * room)
        full, empty = ("#", "-") if ascii_only else ("━", "━")
        parts.insert(1, Text.assemble((full * filled, "green"), (empty * (room - filled), "bright_black")))
    return Text("  ").join(parts)


def is_waiting() -> bool:
    """Return whether anything is shown at the foot of the terminal."""
    return bool(_feet)


def give_way() -> None:
    """Take away what is shown at the foot of the terminal: a result, a question or an error needs it."""
    with _feet_lock:
        while _feet:
            _feet[0].close()


def _terminal() -> TerminalStream:
    """Return standard error, behind what is shown there."""
    return feet[0].stream if (feet := _feet[-1:]) else TerminalStream(sys.stderr)


@contextlib.contextmanager
def status(text: str) -> Iterator[None]:
    """Show on a terminal, and nowhere else, what is waited for and since when, until it is over.

    It comes back after the next display, and gives way to a result, a question and a training for good.
    """
    stream, began = _terminal(), time.monotonic()
    if not stream.isatty():
        yield
        return

    def lines(width: int, ascii_only: bool) -> list[Text]:
        seconds = time.monotonic() - began
        line = bar_line(clean(text), None, clock(seconds) if seconds >= 2 else "", width, ascii_only)
        line.stylize("not bold bright_black")
        return [line]

    with Foot(stream, lines):
        yield


class ReportProgress(Protocol):
    """A callback for progress: ``done`` so far, and ``total`` where it is only now known."""

    def __call__(self, done: int, total: int | None = None) -> None: ...


@contextlib.contextmanager
def progress(what: str, total: int, *, unit: str = "images", every_seconds: float = 5.0) -> Iterator[ReportProgress]:
    """Show how far something is: a bar with rate and ETA, or a line every ``every_seconds`` where there is no terminal.

    Args:
        what: the work, such as ``packing``.
        total: how much there is to do; 0 where nobody knows yet.
        unit: what is counted.
        every_seconds: pause between two plain lines; shorter work gets one line at its end.

    Yields:
        ``advance(done)`` or ``advance(done, total)``: ``done`` is how much is done **so far**, not how much since the
        last call. It may be called from any thread, as often as you like (about a microsecond), and out of order: the
        largest counts.
    """
    stream, count = _terminal(), _Count(what, total, unit)
    if stream.isatty():
        with Foot(stream, lambda width, ascii_only: [count.bar(width, ascii_only)]):
            yield count.advance
        things = unit.removesuffix("s") if count.done == 1 else unit
        ended = f"{clean(what)}: {count.done:,} {things} in {count.seconds:.1f} s ({rate(count.rate)} {unit}/s)"
    else:
        last = count.began

        def advance(done: int, total: int | None = None) -> None:
            nonlocal last
            count.advance(done, total)
            if time.monotonic() - last >= every_seconds:
                last = time.monotonic()
                _say(count.line())

        yield advance
        ended = count.line(ended=True)
    if count.done or count.total:  # what there was none of is not told
        _say(ended)


@contextlib.contextmanager
def progress_once_known(what: str, *, unit: str = "images", resumes: bool = False) -> Iterator[ReportProgress]:
    """Show progress from the first report on, so that nothing is shown where nothing turns out to be done.

    Args:
        what: the work, as in :func:`progress`.
        unit: what is counted.
        resumes: several pieces of work follow each other, each with its own total, and a piece may have been partly
            done before, which says nothing of the pace: each gets progress of its own, counted from where it begins.
    """
    with contextlib.ExitStack() as stack:
        shown: list[ReportProgress] = []
        before, began = (0, 0), 0

        def advance(done: int, total: int | None = None) -> None:
            nonlocal before, began
            total = total or 0
            if not shown or (resumes and (done < before[0] or total != before[1])):
                began = done if resumes else 0
                shown[:] = [stack.enter_context(progress(what, total - began, unit=unit))]
            before = (done, total)
            shown[0](done - began, total - began)
            if resumes and done >= total:
                stack.close()

        yield advance


class _Count:
    """A count of what is ``done`` of ``total``, with the time since it began."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self.what, self.total, self.unit = clean(what), total, unit
        self.began = time.monotonic()
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
    def eta(self) -> float | None:
        return (self.total - self.done) / self.rate if self.done and self.total else None

    def bar(self, width: int, ascii_only: bool) -> Text:
        if not self.done and not self.total:  # nothing has come yet
            return bar_line(self.what, None, "", width, ascii_only)
        share = self.done / self.total if self.total else None
        progress = f"{self.done:,}" if share is None else f"{percent(share, 0):>5}"
        pace = f"  {rate(self.rate)} {self.unit}/s" if self.done else ""
        left = "" if self.eta is None else f"  {clock(self.eta)} left"
        return bar_line(self.what, share, f"{progress}{pace}{left}", width, ascii_only)

    def line(self, *, ended: bool = False) -> str:
        values: dict[str, object] = {"done": self.done, "total": self.total or self.done}
        values[f"{self.unit.replace(' ', '_')}_per_second"] = f"{self.rate:.1f}"
        if ended:
            values["seconds"] = f"{self.seconds:.2f}"
        elif self.eta is not None:
            values["eta_seconds"] = f"{self.eta:.0f}"
        return f"{self.what}: {pairs(values)}"


class Console:
    """Shows the events of a training run as they come; use it as a context manager.

    On a terminal: a bar and the newest figures, redrawn a few times a second by a thread; evaluations and
    notices are printed above and stay. Elsewhere: a ``key=value`` line an event; a ``Logged`` that comes too soon after
    another is held back, and written if something else follows it. A :class:`Step` costs an assignment.

    Args:
        best: the best evaluation before, of a resumed run.
        epochs: how many the recipe asks for; None: it asks for updates.
        stream: where to; standard error by default.
        every_seconds: of the plain lines for ``Logged``, at most one in this many seconds (0: all of them).
    """

    def __init__(
        self,
        *,
        best: Evaluated | None = None,
        epochs: float | None = None,
        stream: TextIO | None = None,
        every_seconds: float = 1.0,
    ) -> None:
        # The newest facts: written by the training thread, read by the drawing one; each is one reference.
        self._started: Started | None = None
        self._first: Step | None = None
        self._step: Step | None = None
        self._logged: Logged | None = None
        self._saved: Saved | None = None
        self._probe: ProbeProgress | None = None
        self._best, self._epochs = best, epochs
        self._seconds: deque[float] = deque(maxlen=RECENT_UPDATES)
        self._excess = 0.0
        self._every_seconds = every_seconds
        give_way()  # what is shown stands for sys.stderr meanwhile, and is no terminal
        self._stream = TerminalStream(stream or sys.stderr)
        self._foot: Foot | None = None
        self._last_line = -float("inf")
        self._held: str | None = None
        self._early: list[str] | None = []  # notices before the first update; None after it

    def __enter__(self) -> Self:
        self._foot = Foot(self._stream, self._lines).__enter__() if self._stream.isatty() else None
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._foot is not None:
            self._print_early(all=error is not None)
            self._foot.close()
            self._foot = None
        self._write(None)

    @property
    def is_live(self) -> bool:
        """Return whether this is a terminal, which has room for what a person needs at the moment."""
        return self._foot is not None

    def _print_early(self, *, all: bool = False) -> None:
        """Print how many notices came before the first update, which the report has; ``all``: the notices."""
        if self._early and self._foot is not None:
            for line in self._early if all else [f"{count(len(self._early), 'notice')}: the report lists them"]:
                self._foot.print([line], _STYLES["Noticed"])
        self._early = None

    def show(self, event: Event) -> None:
        """Take one event in. Never raises for want of a reader."""
        if type(event) is Step:
            if self._first is not None:
                self._seconds.append(event.seconds)
                self._excess += max(0.0, event.seconds - SLOW_FACTOR * median(self._seconds))
            self._step = event
            self._first = self._first or event  # the warm-up is in it
            if self._early is not None:
                self._print_early()
            return
        best = False
        match event:
            case Started():
                self._started, self._first, self._step, self._probe = event, None, None, None
                self._excess = 0.0
                self._seconds.clear()
            case Logged():
                self._logged = event
            case Saved():
                self._saved = event
            case ProbeProgress():
                self._probe = event
            case Evaluated():
                best = event.replaces(self._best)
                self._best = event if best else self._best
        if self._foot is not None:
            style = _STYLES.get(event.kind, "green" if best else "")
            classes = self._started.data.get("classes") if self._started else None
            words = describe_event(event, best=best, best_before=self._best, num_classes=classes and len(classes))
            if isinstance(event, Noticed) and self._early is not None and not event.is_warning:
                self._early += words
            else:
                self._foot.print(words, style)
        elif (line := event_line(event, best=best, is_multi_label=self._is_multi_label)) is not None:
            is_partial = isinstance(event, ProbeProgress) and event.images < event.total
            every_seconds = self._every_seconds * (5 if is_partial else 1)
            if not (is_partial or isinstance(event, Logged)):
                self._write(line)
            elif time.monotonic() - self._last_line >= every_seconds:
                self._held, self._last_line = None, time.monotonic()
                self._write(line)
            else:
                self._held = None if is_partial else line

    @property
    def _is_multi_label(self) -> bool:
        return self._started is not None and self._started.data.get("multi_label") is True

    def _seconds_left(self) -> float | None:
        """Seconds to the end, at the pace of the updates after the first; None while there are none.

        The pace is the mean of a batch of the first size, evaluations and checkpoints included, but an update counts as
        :data:`SLOW_FACTOR` times the median of the newest :data:`RECENT_UPDATES` at most. Within an update the seconds
        count down, by the pace at most, however long it takes.
        """
        started, first, step = self._started, self._first, self._step
        if started is None or first is None or step is None or step.step <= first.step:
            return None
        batches = started.batches
        trained = batches.progress(step.step)
        pace = max(0.0, step.time - first.time - self._excess) / (trained - batches.progress(first.step))
        left = pace * (batches.first - trained) - min(pace, max(0.0, time.time() - step.time))
        return max(0.0, left)  # after the last update there is an evaluation, which takes its time

    def _write(self, line: str | None) -> None:
        lines = [text for text in (self._held, line) if text]
        self._held = None
        if lines:
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()

    def _lines(self, width: int, ascii_only: bool) -> list[Text]:
        """Draw the bar and the newest figures."""
        from rich.text import Text

        started, logged, probe = self._started, self._logged, self._probe
        if started is None or (probe is None and not started.steps):
            return [Text("starting", style="bright_black")]
        if probe is not None and self._step is None and (probe.fit_seconds is None or not started.steps):
            return [bar_line("probe", *probe.bar, width, ascii_only)]
        step = self._step.step if self._step else started.step
        seconds = self._seconds_left()
        left = "" if seconds is None else f"{clock(seconds)} left"
        share = started.batches.progress(step) / started.batches.first if started.steps else 0.0
        epochs = self._epochs or (started.steps / started.steps_per_epoch if started.steps_per_epoch > 0 else 0.0)
        passes = epochs * share
        top = bar_line(
            f"epoch {passes:.2f}/{epoch(epochs)}", share, f"{percent(share, 0):>5}  {left}", width, ascii_only
        )
        parts = [f"step {step:,}/{started.steps:,}"]
        if logged is not None:
            right = "exact match" if self._is_multi_label else "top-1"
            parts += [f"loss {logged.loss:.4f}", f"train {right} {percent(logged.top1, 1)}", f"lr {logged.lr:.3g}"]
            parts += [f"{rate(logged.images_per_second)} images/s", f"wait {percent(logged.wait_share, 1)}"]
        if self._saved is not None:
            parts.append(f"saved {self._saved.step:,}")
        if started.price is not None:
            from steadytrain.cost.bill import make_bill, part_of

            spent, lasted = started.price.get("spent"), max(0.0, time.time() - started.began)
            before = float(spent) if isinstance(spent, int | float) else 0.0
            parts.append(str(make_bill([part_of(started, seconds=lasted)], left=seconds, spent=before)))
        return [top, *(Text(line) for line in join_parts(parts, width - 1))]
