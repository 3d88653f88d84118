"""Line charts as one SVG picture, or as a page around it: no script, no network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from steadytrain.monitor.series import thin
from steadytrain.reports.charts import COLOURS, TEMPLATES
from steadytrain.reports.tables import MARK

WIDTH, HEIGHT = 860, 220
"""Pixels of one panel."""

LEFT, RIGHT, TOP, BOTTOM = 76, 20, 30, 40
"""Pixels around the curve of a panel: the labels of y, and those of x below."""

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


def svg(panels: Sequence[Panel], *, title: str) -> str:
    """Draw panels below each other.

    >>> panel = Panel("rate", [0, 1, 2], [[0.0, 1.0, 0.5]], "update")
    >>> svg([panel], title="a schedule").count("<polyline")
    1
    """
    height = HEIGHT * len(panels)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}"'
        f' role="img"><!-- {MARK} --><title>{escape(title)}</title><style>{STYLE}</style>'
    ]
    for number, panel in enumerate(panels):
        lines = _panel(panel, COLOURS[number])
        parts += [f'<g transform="translate(0 {HEIGHT * number})">', *lines, "</g>"]
    return "\n".join([*parts, "</svg>", ""])


def page(panels: Sequence[Panel], *, title: str, lede: str) -> str:
    """Put the picture of :func:`svg` into an HTML page with a heading and a sentence."""
    return html_page(svg(panels, title=title), title=title, lede=lede, css=SVG_CSS)


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
