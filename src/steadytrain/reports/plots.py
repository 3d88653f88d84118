"""Line and dot charts as one SVG picture, or as a page around it: no script, no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from steadytrain.format import count, rate
from steadytrain.monitor.series import thin
from steadytrain.reports.charts import COLOURS, LAYOUTS, TEMPLATES
from steadytrain.reports.tables import MARK

WIDTH, HEIGHT = 860, 220
"""Pixels of one panel."""

LEFT, RIGHT, TOP, BOTTOM = 76, 20, 30, 40
"""Pixels around the curve of a panel: the labels of y, and those of x below."""

ROW, NAMES, LEGEND = 22, 170, 26
"""Pixels of a row of dots, of the names beside it, and of a line of the legend."""

FONT = "ui-sans-serif, system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
STYLE = (
    f"svg {{ background: #ffffff; font: 12px {FONT}; }} text {{ fill: #5f6671; }} .title {{ fill: #1b1d21;"
    " font-weight: 600; } .grid { stroke: #e2e4e8; } .mark { stroke: #d4691e; stroke-dasharray: 4 3; }"
    " .curve { fill: none; stroke-width: 1.8; stroke-linejoin: round; } .faint { opacity: .3; }"
    " @media (prefers-color-scheme: dark) { svg { background: #131518; } text { fill: #98a0ab; }"
    " .title { fill: #e4e6e9; } .grid { stroke: #2b2f35; } }"
)

SVG_CSS = "svg { max-width: 100%; height: auto; } h2 { margin-top: 28px; }"


@dataclass(frozen=True)
class Panel:
    """One chart: curves of y over a common x.

    Args:
        title: what y is.
        x: rising; of a logarithmic axis above 0.
        curves: each as long as x; the first is drawn faint if there are several.
        x_title: what x is.
        log_x: whether the x axis is logarithmic.
        from_zero: whether the y axis begins at 0.
        marks: values of x with a line and a word.
        ticks: values of x with their labels, instead of round ones.
    """

    title: str
    x: Sequence[float]
    curves: Sequence[Sequence[float]]
    x_title: str
    log_x: bool = False
    from_zero: bool = True
    marks: Sequence[tuple[float, str]] = ()
    ticks: Sequence[tuple[float, str]] = ()


@dataclass(frozen=True)
class Dots:
    """One chart of positive values on a logarithmic axis: a row for each name, a dot for each series.

    Args:
        title: what the values are.
        names: of the rows.
        series: by its name in the legend, a value for each row; None where there is none. Up to 32.
        x_title: the unit.
    """

    title: str
    names: Sequence[str]
    series: Mapping[str, Sequence[float | None]]
    x_title: str


def svg(panels: Sequence[Panel | Dots], *, title: str) -> str:
    """Draw panels below each other.

    >>> panel = Panel("rate", [0, 1, 2], [[0.0, 1.0, 0.5]], "update")
    >>> svg([panel], title="a schedule").count("<polyline")
    1
    """
    height = sum(map(_height, panels))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        f' role="img"><!-- {MARK} --><title>{escape(title)}</title><style>{STYLE}</style>'
    ]
    top = 0
    for number, panel in enumerate(panels):
        lines = _panel(panel, COLOURS[number]) if isinstance(panel, Panel) else _dots(panel)
        parts += [f'<g transform="translate(0 {top})">', *lines, "</g>"]
        top += _height(panel)
    return "\n".join([*parts, "</svg>", ""])


def page(panels: Sequence[Panel | Dots], *, title: str, lede: str) -> str:
    """Put the picture of :func:`svg` into an HTML page with a heading and a sentence, and dots' values into tables."""
    tables = "".join(_values(panel) for panel in panels if isinstance(panel, Dots))
    return html_page(f"{svg(panels, title=title)}{tables}", title=title, lede=lede, css=SVG_CSS)


def speeds_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """Draw images per second at each batch size, a dot for each way to compute.

    Args:
        rows: as ``steady bench train --json`` prints them; those with an ``error`` are left out.
    """
    measured = [row for row in rows if "error" not in row]
    several_threads = len({row["threads"] for row in measured}) > 1
    speeds: dict[str, dict[int, float]] = {}
    for row in measured:
        code = "" if row["compile"] == "none" else f" compiled ({row['compile']})"
        threads = f" {count(row['threads'], 'thread')}" if several_threads else ""
        how = (" as one graph" if row["graph"] else "") + (" recomputed" if row["recompute"] else "")
        name = f"{row['precision']} {LAYOUTS[row['layout']]}{code}{how}{threads}"
        speeds.setdefault(name, {})[row["batch_size"]] = row["images_per_second"]
    sizes = sorted({row["batch_size"] for row in measured})
    series = {name: [by_size.get(size) for size in sizes] for name, by_size in speeds.items()}
    dots = Dots("Training (right is better)", [f"batches of {size:,}" for size in sizes], series, "images per second")
    first = measured[0] if measured else {}
    title = f"{first.get('model', '')} on {first.get('device', '')}"
    return page([dots], title=title, lede="training, drawn images")


def html_page(body: str, *, title: str, lede: str, css: str = "") -> str:
    """Put HTML below a heading and a sentence, in the look of all pages; ``css`` is added to theirs."""
    css = f"{(TEMPLATES / 'page.css').read_text(encoding='utf-8')} {css}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><!-- {MARK} -->'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)}</title>'
        f"<style>{css}</style></head>\n"
        f'<body><main><header><h1>{escape(title)}</h1><p class="lede">{escape(lede)}</p></header>\n<section>'
        f"{body}</section></main></body></html>\n"
    )


def _values(dots: Dots) -> str:
    """Write the values of a chart of dots as a table: a row for each name, a column for each series."""
    heads = "".join(f"<th>{escape(name)}</th>" for name in dots.series)
    rows = "".join(
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{rate(series[row])}</td>' for series in dots.series.values())}</tr>"
        for row, name in enumerate(dots.names)
    )
    return (
        f'<h2>{escape(dots.title)}</h2><div class="scroll"><table class="numbers"><thead><tr>'
        f"<th>{escape(dots.x_title)}</th>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about ``count`` round values from ``low`` to ``high``.

    >>> round_ticks(0, 0.1), round_ticks(0, 11)
    ([0.0, 0.02, 0.04, 0.06, 0.08, 0.1], [0.0, 2.0, 4.0, 6.0, 8.0, 10.0])
    """
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * min((1, 2, 5, 10), key=lambda factor: abs(factor * power - rough))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{k * step:.12g}") for k in range(first, last + 1)]


def _panel(panel: Panel, colour: str) -> list[str]:
    values = [y for curve in panel.curves for y in curve if math.isfinite(y)]
    low, high = (min([*values, 0.0]) if panel.from_zero else min(values)), max(values)
    if high <= low:
        low, high = low - abs(low or 1) / 10, high + abs(high or 1) / 10
    first, last = panel.x[0], panel.x[-1]
    across, down = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x_of(x: float) -> float:
        share = math.log(x / first) / math.log(last / first) if panel.log_x else (x - first) / ((last - first) or 1)
        return round(LEFT + across * share, 2)

    def y_of(y: float) -> float:
        return round(TOP + down * (1 - (min(max(y, low), high) - low) / (high - low)), 2)

    bottom = TOP + down
    lines = [f'<text class="title" x="{LEFT}" y="18">{escape(panel.title)}</text>']
    for y in round_ticks(low, high):
        lines.append(f'<line class="grid" x1="{LEFT}" x2="{LEFT + across}" y1="{y_of(y)}" y2="{y_of(y)}"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{y_of(y) + 4}" text-anchor="end">{y:,.12g}</text>')
    decades = range(math.ceil(math.log10(first)), math.floor(math.log10(last)) + 1) if panel.log_x else ()
    usual = [(10.0**k, f"{10.0**k:g}") for k in decades] or [(x, f"{x:,g}") for x in round_ticks(first, last, 8)]
    for x, label in panel.ticks or usual:
        lines.append(f'<line class="grid" x1="{x_of(x)}" x2="{x_of(x)}" y1="{bottom}" y2="{bottom + 5}"/>')
        lines.append(f'<text x="{x_of(x)}" y="{bottom + 18}" text-anchor="middle">{escape(label)}</text>')
    lines.append(f'<text x="{LEFT + across}" y="{bottom + 34}" text-anchor="end">{escape(panel.x_title)}</text>')
    for number, curve in enumerate(panel.curves):
        indices = thin([y if math.isfinite(y) else None for y in curve], 1600)
        points = " ".join(f"{x_of(panel.x[i])},{y_of(curve[i])}" for i in indices if math.isfinite(curve[i]))
        faint = " faint" if len(panel.curves) > 1 and not number else ""
        lines.append(f'<polyline class="curve{faint}" stroke="{colour}" points="{points}"/>')
    for x, word in panel.marks:
        lines.append(f'<line class="mark" x1="{x_of(x)}" x2="{x_of(x)}" y1="{TOP}" y2="{bottom}"/>')
        is_right = x_of(x) + 7 * len(word) > LEFT + across  # the word stands on the side that has room
        side = f'x="{x_of(x) - 4}" text-anchor="end"' if is_right else f'x="{x_of(x) + 4}"'
        lines.append(f'<text {side} y="{bottom - 6}">{escape(word)}</text>')
    return lines


def _height(panel: Panel | Dots) -> int:
    if isinstance(panel, Panel):
        return HEIGHT
    return TOP + LEGEND * len(_legend(panel)) + ROW * len(panel.names) + BOTTOM


def _legend(dots: Dots) -> list[list[tuple[int, str, int]]]:
    """Place the names of series in lines: number, name and x of each."""
    lines: list[list[tuple[int, str, int]]] = [[]]
    x = NAMES
    for number, name in enumerate(dots.series):
        width = 30 + 7 * len(name)
        if x + width > WIDTH and lines[-1]:
            lines.append([])
            x = NAMES
        lines[-1].append((number, name, x))
        x += width
    return lines


def _mark(number: int, x: float, y: float) -> str:
    """Draw a dot of a series: its shape tells it from the next ones, colour and shape from up to 31 others."""
    colour, size, shape = COLOURS[number % len(COLOURS)], 4.5, (number + number // len(COLOURS)) % 4
    if shape == 0:
        return f'<circle fill="{colour}" cx="{x}" cy="{y}" r="{size}"/>'
    corners = {
        1: ((-1, -1), (1, -1), (1, 1), (-1, 1)),
        2: ((0, -1.3), (1.3, 0), (0, 1.3), (-1.3, 0)),
        3: ((0, -1.2), (1.2, 1), (-1.2, 1)),
    }[shape]
    points = " ".join(f"{round(x + size * dx, 2)},{round(y + size * dy, 2)}" for dx, dy in corners)
    return f'<polygon fill="{colour}" points="{points}"/>'


def _dots(dots: Dots) -> list[str]:
    values = [value for row in dots.series.values() for value in row if value]
    low, high = (min(values), max(values)) if values else (1.0, 10.0)
    low, high = low / 1.15, high * 1.15
    across, legend = WIDTH - NAMES - RIGHT, _legend(dots)
    top = TOP + LEGEND * len(legend)
    bottom = top + ROW * len(dots.names)

    def x_of(value: float) -> float:
        return round(NAMES + across * math.log(value / low) / math.log(high / low), 2)

    lines = [f'<text class="title" x="{NAMES}" y="18">{escape(dots.title)}</text>']
    for line, entries in enumerate(legend):
        baseline = TOP + LEGEND * line + 12
        for number, name, left in entries:
            mark = _mark(number, left + 6, baseline - 4)
            lines.append(f'{mark}<text x="{left + 16}" y="{baseline}">{escape(name)}</text>')
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if high / low < 1000 else (1,)
    for tick in (step * 10.0**decade for decade in decades for step in steps):
        if low <= tick <= high:
            x = x_of(tick)
            lines.append(f'<line class="grid" x1="{x}" x2="{x}" y1="{top}" y2="{bottom + 5}"/>')
            lines.append(f'<text x="{x}" y="{bottom + 18}" text-anchor="middle">{tick:,g}</text>')
    lines.append(f'<text x="{NAMES + across}" y="{bottom + 34}" text-anchor="end">{escape(dots.x_title)}</text>')
    for row, name in enumerate(dots.names):
        y = top + ROW * row + ROW / 2
        lines.append(f'<line class="grid" x1="{NAMES}" x2="{NAMES + across}" y1="{y}" y2="{y}"/>')
        lines.append(f'<text x="{NAMES - 10}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        for number, series in enumerate(dots.series.values()):
            if value := series[row]:
                lines.append(_mark(number, x_of(value), y))
    return lines
