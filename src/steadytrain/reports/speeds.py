"""A page with one figure: images per second over batch sizes, a line for each way to compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steadytrain.reports.curves import style
from steadytrain.reports.format import LAYOUTS


def speeds_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """One HTML document that needs no network, drawn by the plotly.js in it.

    Args:
        rows: as ``steady bench train --json`` tells them; those with an ``error`` are left out.
    """
    from plotly.graph_objects import Figure, Scatter

    measured = [row for row in rows if "error" not in row]
    tells_threads = len({row["threads"] for row in measured}) > 1
    lines: dict[str, dict[int, float]] = {}
    for row in measured:
        code = "" if row["compile"] == "none" else f" compiled ({row['compile']})"
        threads = f" {row['threads']} thread{'s' * (row['threads'] != 1)}" if tells_threads else ""
        again = (" as one graph" if row["graph"] else "") + (" recomputed" if row["recompute"] else "")
        name = f"{row['precision']} {LAYOUTS[row['layout']]}{code}{again}{threads}"
        lines.setdefault(name, {})[row["batch_size"]] = row["images_per_second"]
    first = measured[0] if measured else {}
    figure = Figure()
    for number, (name, points) in enumerate(lines.items()):
        look = style(number)
        x = sorted(points)
        figure.add_trace(
            Scatter(
                x=x,
                y=[points[batch] for batch in x],
                name=name,
                mode="lines+markers",
                line={"color": look["colour"], "dash": look["dash"]},
            )
        )
    figure.update_layout(
        title=f"{first.get('model', '')} on {first.get('device', '')}: training, drawn images",
        template="plotly_white",
        xaxis={"title": "batch size", "type": "log", "tickvals": sorted({x for line in lines.values() for x in line})},
        yaxis={"title": "images per second", "rangemode": "tozero"},
        showlegend=True,
    )
    return str(figure.to_html(include_plotlyjs=True, full_html=True))
