"""A watched run on a terminal: the whole screen, redrawn as the run goes on; nothing of it is left when it closes."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from rich.console import Console
from rich.live import Live
from rich.text import Text

from steadytrain.cli.live import bar_line
from steadytrain.format import clean, clock, duration, percent, rate, size, time_of_day
from steadytrain.reports.charts import COLUMNS, Row
from steadytrain.reports.time_spent import BUCKETS_SHOWN
from steadytrain.reports.verdict import verdict_sentences
from steadytrain.reports.watch import Snapshot, Watch

if TYPE_CHECKING:
    from typing import IO

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
LABEL_COLUMNS = 11
VALUE_COLUMNS = 24
COLOURS = {"waiting": "yellow", "running": "green", "finished": "green", "interrupted": "yellow", "failed": "red"}


class Screen:
    """Takes over a terminal while it is open; its size may change at any time."""

    def __init__(self, stream: object) -> None:
        self._console = Console(file=cast("IO[str]", stream), force_terminal=True, highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, screen=True, redirect_stdout=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._live.stop()

    def show(self, watched: Watch, told: Snapshot) -> None:
        """Draw it anew."""
        width, height = self._console.size
        ascii_only = self._console.options.ascii_only
        drawn = lines(watched, told, width - 1, height - 1, ascii_only=ascii_only)
        for text in drawn:
            text.truncate(max(1, width - 1), overflow="crop" if ascii_only else "ellipsis")
        self._live.update(Text("\n").join(drawn), refresh=True)
        sys.stderr.flush()


def lines(watched: Watch, told: Snapshot, width: int, height: int, *, ascii_only: bool = False) -> list[Text]:
    """The screen's lines, for its size in columns and rows; where rows are few, what matters less is left out."""
    head = _head(told, width, ascii_only=ascii_only)
    verdict_block = _verdict(told, width)
    curves = _curves(watched, told, width, ascii_only=ascii_only)
    ledger = _ledger(told, width, ascii_only=ascii_only)
    beside = _beside(watched, told, width, ascii_only=ascii_only)
    left, shown = height - len(head), list[list[Text]]()
    for block in (verdict_block, ledger, curves, beside):  # what matters more is given its rows first
        if block and len(block) < left:
            shown.append(block)
            left -= len(block) + 1
    order = [block for block in (verdict_block, curves, ledger, beside) if block in shown]
    return [*head, *(line for block in order for line in (Text(), *block))]


def spark(values: Sequence[float | None], columns: int, *, low: float, high: float, ascii_only: bool = False) -> str:
    """Values as a line of so many blocks, from ``low`` to ``high``; several that share a block are averaged.

    >>> spark([0.0, 0.5, None, 1.0], 4, low=0.0, high=1.0)
    '▁▅ █'
    """
    blocks = ASCII_BLOCKS if ascii_only else BLOCKS
    columns = min(columns, len(values))
    told = []
    for k in range(columns):
        part = values[k * len(values) // columns : (k + 1) * len(values) // columns]
        known = [one for one in part if one is not None]
        share = (sum(known) / len(known) - low) / (high - low) if known and high > low else 0.0
        told.append(blocks[max(0, min(7, round(share * 7)))] if known else " ")
    return "".join(told)


def _head(told: Snapshot, width: int, *, ascii_only: bool) -> list[Text]:
    dot, between = ("*", " - ") if ascii_only else ("●", " · ")
    title = Text.assemble(
        (f"{dot} ", COLOURS[told.signs.status]),
        (clean(told.name), "bold"),
        between + clean(told.model) + between,
        (clean(str(told.signs)), COLOURS[told.signs.status]),
    )
    moment = time_of_day(told.moment)
    if title.cell_len + len(moment) + 2 <= width:
        title.append(" " * (width - title.cell_len - len(moment)) + moment, "bright_black")
    share = told.step / told.steps if told.steps else None
    left = "" if told.remaining_seconds is None else f"  {clock(told.remaining_seconds)} left"
    right = "" if share is None else f"{share:4.0%}  {clock(told.seconds)}{left}"
    made = [title]
    if told.steps:
        made.append(bar_line(f"epoch {told.epoch:.2f}/{told.epochs:.4g}", share, right, width, ascii_only))
    if told.cost is not None and told.steps:
        in_all = "" if told.cost.in_all is None else f", about {told.cost.in_all:,.2f} in all"
        made.append(Text(f"cost {told.cost.so_far:,.2f} so far{in_all}"))
    for alarm in told.alarms():
        made += [Text(line, style="bold red") for line in textwrap.wrap(clean(alarm), width)]
    if told.notice:
        made += [Text(line, style="yellow") for line in textwrap.wrap(f"notice: {clean(told.notice)}", width)[:3]]
    return made


def _curves(watched: Watch, told: Snapshot, width: int, *, ascii_only: bool) -> list[Text]:
    made: list[Text] = []
    if told.train_loss is not None:
        made.append(_row("loss", f"{told.train_loss:.4f} train", _column(watched, "train", 3), width, ascii_only))
        value = percent(told.train_top1, 2)
        made.append(_row("train top-1", value, _column(watched, "train", 4), width, ascii_only))
    if told.last is not None:
        best = f", best {percent(told.best.top1, 2)}" if told.best else ""
        value = f"{percent(told.last.top1, 2)}{best}"
        made.append(_row("val top-1", value, _column(watched, "val", 4), width, ascii_only))
    rates = told.images_per_second
    if rates.overall is not None:
        value = f"{rate(rates.now if rates.now is not None else rates.steady)}, overall {rate(rates.overall)}"
        made.append(_row("images/s", value, _column(watched, "rate", 3), width, ascii_only, zero=True))
    return made


def _ledger(told: Snapshot, width: int, *, ascii_only: bool) -> list[Text]:
    ledger = told.ledger
    if ledger is None or ledger.wall_seconds <= 0:
        return []
    held = [name for name in BUCKETS_SHOWN if ledger.share(name) >= 0.0005]
    bar, mark = Text(), "#" if ascii_only else "█"
    ends = [round(width * sum(ledger.share(one) for one in held[: k + 1])) for k in range(len(held))]
    for name, begin, end in zip(held, [0, *ends], ends, strict=False):
        bar.append((_letter(name) if ascii_only else mark) * (end - begin), BUCKETS_SHOWN[name].colour)
    columns = max(1, min(3, width // 37))
    across = width // columns
    largest = sorted(held, key=lambda name: -ledger.seconds[name])[: 4 * columns]
    cells = [_cell(told, name, across, "#" if ascii_only else "■", ascii_only) for name in largest]
    rows = [Text().join(cells[k : k + columns]) for k in range(0, len(cells), columns)]
    return [Text(f"where the time went: {duration(ledger.wall_seconds)}", style="bold"), bar, *rows]


def _cell(told: Snapshot, name: str, columns: int, mark: str, ascii_only: bool) -> Text:
    assert told.ledger is not None
    share, took = percent(told.ledger.share(name), 1), duration(told.ledger.seconds[name])
    label = told.label(name)[: columns - 22]
    text = Text.assemble((_letter(name) if ascii_only else mark, BUCKETS_SHOWN[name].colour), f" {label}")
    figures = f"{share:>7} {took:>10}"
    return text + Text(" " * max(1, columns - 1 - text.cell_len - len(figures)) + figures + " ")


def _letter(name: str) -> str:
    return BUCKETS_SHOWN[name].label[0]


def _beside(watched: Watch, told: Snapshot, width: int, *, ascii_only: bool) -> list[Text]:
    made: list[Text] = []
    if told.feed is not None:
        value = f"{told.feed.ready:.1f} of {told.feed.depth:.0f} ready"
        ready = _column(watched, "feed", 1)
        made.append(_row("feed", value, ready, width, ascii_only, zero=True, high=told.feed.depth))
    machine = told.machine
    if machine is not None and machine.cpu is not None:
        value = f"{machine.cpu:.1f} of {machine.cores}, others {machine.others or 0:.1f}"
        own = _column(watched, "machine", COLUMNS["machine"].index("cpu"))
        made.append(_row("cores", value, own, width, ascii_only, zero=True, high=float(machine.cores)))
    if machine is not None and machine.memory_bytes is not None:
        of = f" of {size(machine.memory_limit_bytes)}" if machine.memory_limit_bytes else ""
        own = _column(watched, "machine", COLUMNS["machine"].index("memory"))
        value = f"{size(machine.memory_bytes)}{of}"
        most = float(machine.memory_limit_bytes) if machine.memory_limit_bytes else None
        made.append(_row("memory", value, own, width, ascii_only, zero=True, high=most))
    for device in told.devices:
        value = "not measurable here" if device.utilisation is None else f"{percent(device.utilisation, 0)} busy"
        if device.memory_bytes is not None:
            value += f", {size(device.memory_bytes)}"
        used = _column(watched, f"device-{device.index}", 1)
        made.append(_row(f"GPU {device.index}", value, used, width, ascii_only, zero=True, high=1.0))
    return made


def _verdict(told: Snapshot, width: int) -> list[Text]:
    made: list[Text] = []
    for number, sentence in enumerate(verdict_sentences(told.diagnosis) if told.diagnosis else ()):
        style = "bold" if not number else "cyan" if sentence.startswith("change: ") else ""
        made += [
            Text(line, style=style) for line in textwrap.wrap(sentence, width, subsequent_indent="  " * bool(number))
        ]
    return made


def _row(
    label: str,
    value: str,
    values: Sequence[float | None],
    width: int,
    ascii_only: bool,
    *,
    zero: bool = False,
    high: float | None = None,
) -> Text:
    """A label, a figure and what it was before as a line of blocks."""
    room = width - LABEL_COLUMNS - VALUE_COLUMNS - 3
    known = [one for one in values if one is not None]
    drawn = ""
    if known and room >= 6 and len(known) > 1:
        top = max(known) if high is None else high
        drawn = spark(values, room, low=0.0 if zero else min(known), high=top, ascii_only=ascii_only)
    return Text.assemble((f"{label:{LABEL_COLUMNS}}  ", "bright_black"), f"{value:{VALUE_COLUMNS}} ", (drawn, "cyan"))


def _column(watched: Watch, series: str, column: int) -> list[float | None]:
    rows: Iterable[Row] = (point.row for point in watched.points if point.series == series)
    return [row[column] for row in rows]
