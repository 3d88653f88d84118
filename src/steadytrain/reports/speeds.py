"""A page with one figure: images per second over batch sizes, a line for each way to compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from steadytrain.reports.curves import style


def speeds_page(rows: Sequence[Mapping[str, Any]]) -> str:
    """One HTML document that needs no network, drawn by the plotly.js in it.

    Args:
        rows: as ``steady bench train --json`` tells them; those with an ``error`` are left out.
    """
    from plotly.graph_objects import Figure, Scatter

    lines: dict[str, dict[int, float]] = {}
    for row in rows:
        if "error" not in row:
            layout = "NHWC" if row["channels_last"] else "NCHW"
            name = f"{row['precision']} {layout}" + (
                "" if row["compile"] == "none" else f" compiled ({row['compile']})"
            )
            lines.setdefault(name, {})[row["batch_size"]] = row["images_per_second"]
    first = next((row for row in rows if "error" not in row), {})
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
