"""The terminal view of ``steady watch``: a run on the whole screen."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from steadytrain.cli.console import TerminalStream, bar_line, truncate
from steadytrain.format import clean, clock, duration, percent, rate, score_name, size, time_of_day
from steadytrain.monitor.series import COLUMNS
from steadytrain.reports.time_spent import BUCKETS_SHOWN
from steadytrain.reports.verdict import verdict_sentences
from steadytrain.reports.watch import RunSnapshot, Watch

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
LABEL_COLUMNS = 11
VALUE_COLUMNS = 24
COLOURS = {"waiting": "yellow", "running": "green", "finished": "green", "interrupted": "yellow", "failed": "red"}


@contextmanager
def screen(stream: TerminalStream) -> Iterator[Callable[[Watch, RunSnapshot], None]]:
    """Take over a terminal, and give it back as it was; yield what draws a run at one moment, at the size of then."""
    console = Console(file=cast("TextIO", stream), force_terminal=True, highlight=False)

    def show(watched: Watch, now: RunSnapshot) -> None:
        width, height = console.size
        ascii_only = console.options.ascii_only
        lines = RunDrawing(watched, now, width - 1, ascii_only).lines(height - 1)
        truncate(lines, width, ascii_only)
        live.update(Text("\n").join(lines), refresh=True)
        sys.stderr.flush()

    with Live(console=console, auto_refresh=False, screen=True, redirect_stdout=False) as live:
        yield show


class RunDrawing:
    """The blocks of the screen for one moment of a run, in lines of ``width`` columns."""

    def __init__(self, watched: Watch, now: RunSnapshot, width: int, ascii_only: bool) -> None:
        self.watched, self.now, self.width, self.ascii_only = watched, now, width, ascii_only

    def lines(self, height: int) -> list[Text]:
        """Return what fits into so many rows: where they are few, what matters less is left out."""
        head = list(self.head())
        blocks = [list(block) for block in (self.verdict(), self.curves(), self.ledger(), self.machine())]
        left, shown = height - len(head), set[int]()
        for index in (0, 2, 1, 3):  # what matters more is given its rows first
            if blocks[index] and len(blocks[index]) < left:
                shown.add(index)
                left -= len(blocks[index]) + 1
        return [*head, *(line for index in sorted(shown) for line in (Text(), *blocks[index]))]

    def head(self) -> Iterator[Text]:
        """Yield name, state, progress, cost and alarms."""
        now, width = self.now, self.width
        dot, between = ("*", " - ") if self.ascii_only else ("●", " · ")
        colour = COLOURS[now.signs.status]
        title = Text.assemble(
            (f"{dot} ", colour),
            (clean(now.run.name), "bold"),
            between + clean(now.model) + between,
            (clean(str(now.signs)), colour),
        )
        moment = time_of_day(now.moment)
        if title.cell_len + len(moment) + 2 <= width:
            title.append(" " * (width - title.cell_len - len(moment)) + moment, "bright_black")
        yield title
        if now.bar is not None:
            share, words = now.bar
            left = "" if now.remaining_seconds is None else f"  {clock(now.remaining_seconds)} left"
            yield bar_line(words, share, f"{share:4.0%}  {clock(now.seconds)}{left}", width, self.ascii_only)
        if now.cost is not None:
            yield Text(f"cost: {now.cost}")
        for alarm in now.alarms():
            yield from (Text(line, style="bold red") for line in textwrap.wrap(clean(alarm), width))
        if now.notice:
            lines = textwrap.wrap(f"notice: {clean(now.notice)}", width)[:3]
            yield from (Text(line, style="yellow") for line in lines)

    def verdict(self) -> Iterator[Text]:
        for index, sentence in enumerate(verdict_sentences(self.now.diagnosis) if self.now.diagnosis else ()):
            style = "bold" if not index else "cyan" if sentence.startswith("change: ") else ""
            lines = textwrap.wrap(sentence, self.width, subsequent_indent="  " * bool(index))
            yield from (Text(line, style=style) for line in lines)

    def curves(self) -> Iterator[Text]:
        now, rates = self.now, self.now.images_per_second
        if now.logged is not None:
            yield self.row("loss", f"{now.logged.loss:.4f} train", "train", 3)
            if not now.is_multi_label:
                yield self.row("train top-1", percent(now.logged.top1, 2), "train", 4)
        if now.last is not None:
            best = f", best {percent(now.best.value, 2)}" if now.best else ""
            name = score_name(now.is_multi_label)
            yield self.row(f"val {name}", f"{percent(now.last.value, 2)}{best}", "val", 4)
        if rates.overall is not None:
            newest = rate(rates.now if rates.now is not None else rates.steady)
            yield self.row("images/s", f"{newest}, overall {rate(rates.overall)}", "rate", 3, zero=True)

    def ledger(self) -> Iterator[Text]:
        """Yield where the time went: a bar of all buckets, and the largest with their figures, in columns."""
        ledger, width = self.now.ledger, self.width
        if ledger is None or ledger.wall_seconds <= 0:
            return
        names = [name for name in BUCKETS_SHOWN if ledger.share(name) >= 0.0005]
        letters = {name: BUCKETS_SHOWN[name].label[0] if self.ascii_only else "" for name in names}
        ends = [round(width * sum(ledger.share(name) for name in names[: k + 1])) for k in range(len(names))]
        bar = Text()
        for name, begin, end in zip(names, [0, *ends], ends, strict=False):
            bar.append((letters[name] or "█") * (end - begin), BUCKETS_SHOWN[name].colour)
        columns = max(1, min(3, width // 37))
        room = width // columns
        cells = []
        for name in sorted(names, key=lambda name: -ledger.seconds[name])[: 4 * columns]:
            label = self.now.label(name)[: room - 22]
            cell = Text.assemble((letters[name] or "■", BUCKETS_SHOWN[name].colour), f" {label}")
            figures = f"{percent(ledger.share(name), 1):>7} {duration(ledger.seconds[name]):>10}"
            cells.append(cell + Text(" " * max(1, room - 1 - cell.cell_len - len(figures)) + figures + " "))
        yield Text(f"where the time went: {duration(ledger.wall_seconds)}", style="bold")
        yield bar
        yield from (Text().join(cells[k : k + columns]) for k in range(0, len(cells), columns))

    def machine(self) -> Iterator[Text]:
        """Yield the feed's queue, cores, memory and GPUs."""
        feed, machine = self.now.feed, self.now.machine
        if feed is not None:
            value = f"{feed.ready:.1f} of {feed.depth:.0f} ready"
            yield self.row("feed", value, "feed", 1, zero=True, high=feed.depth)
        if machine is not None and machine.cpu is not None:
            value = f"{machine.cpu:.1f} of {machine.cores}, others {machine.others or 0:.1f}"
            column = COLUMNS["machine"].index("cpu")
            yield self.row("cores", value, "machine", column, zero=True, high=float(machine.cores))
        if machine is not None and machine.memory_bytes is not None:
            limit = machine.memory_limit_bytes
            value = size(machine.memory_bytes) + (f" of {size(limit)}" if limit else "")
            column = COLUMNS["machine"].index("memory")
            yield self.row("memory", value, "machine", column, zero=True, high=float(limit) if limit else None)
        for device in self.now.devices:
            value = "not measurable here" if device.utilisation is None else f"{percent(device.utilisation, 0)} busy"
            if device.memory_bytes is not None:
                value += f", {size(device.memory_bytes)}"
            yield self.row(f"GPU {device.index}", value, f"device-{device.index}", 1, zero=True, high=1.0)

    def row(
        self, label: str, value: str, series: str, column: int, *, zero: bool = False, high: float | None = None
    ) -> Text:
        """Draw a label, a figure, and what it was before as a line of blocks."""
        values = [point.row[column] for point in self.watched.history.points if point.series == series]
        known = [value for value in values if value is not None]
        room = self.width - LABEL_COLUMNS - VALUE_COLUMNS - 3
        blocks = ""
        if room >= 6 and len(known) > 1:
            low, high = 0.0 if zero else min(known), max(known) if high is None else high
            blocks = sparkline(values, room, low=low, high=high, ascii_only=self.ascii_only)
        return Text.assemble(
            (f"{label:{LABEL_COLUMNS}}  ", "bright_black"), f"{value:{VALUE_COLUMNS}} ", (blocks, "cyan")
        )


def sparkline(values: Sequence[float | None], columns: int, *, low: float, high: float, ascii_only: bool) -> str:
    """Draw values as a line of so many blocks, from ``low`` to ``high``; several that share a block are averaged.

    >>> sparkline([0.0, 0.5, None, 1.0], 4, low=0.0, high=1.0, ascii_only=False)
    '▁▅ █'
    """
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    columns = min(columns, len(values))
    cells = []
    for k in range(columns):
        part = values[k * len(values) // columns : (k + 1) * len(values) // columns]
        known = [value for value in part if value is not None]
        share = (sum(known) / len(known) - low) / (high - low) if known and high > low else 0.0
        cells.append(blocks[max(0, min(7, round(share * 7)))] if known else " ")
    return "".join(cells)
