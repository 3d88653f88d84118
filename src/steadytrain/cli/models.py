"""``steady models``."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

from steadytrain.cli.console import note, print_json, print_pages, progress_once_known, status
from steadytrain.cli.options import Json
from steadytrain.errors import InputError
from steadytrain.format import text_table

if TYPE_CHECKING:
    from steadytrain.models.counts import ModelCounts
    from steadytrain.models.registry import Entry

MAX_COUNTED = 60  # networks that are counted unasked: half a minute on one core
LICENCE_COLUMNS = 18  # columns that a licence has on a terminal
MARKS = {"non-commercial": "!", "unknown": "?", "own": "?"}


def models(
    pattern: str | None = None,
    /,
    *,
    weights: bool = False,
    sort: Literal["name", "parameters", "flops"] = "name",
    all: Annotated[
        bool, Parameter(help=f"Count all matching models, not at most {MAX_COUNTED}; counts are cached.")
    ] = False,
    json: Json = False,
) -> None:
    """List the available models: parameters, multiply-adds, input size, licence, and where their weights are.

    A pattern with a dot, such as `resnet50.`, lists the pretrained weights of the matching models. No network is used.

    GMACs are billions (10^9) of multiply-adds in the forward pass of one image of that size, counted on the network as
    in torchvision's tables: convolutions, linear layers and matrix multiplications, including those of attention.
    Floating-point operations (FLOPs) are twice as many.

    Args:
        pattern: Part of a name, or a glob such as `'timm/vit*'` (default: all models).
        weights: List pretrained weights, by their tags, instead of architectures.
        sort: The sort key; the smallest first.

    Examples:
        steady models mobilenet
        steady models 'timm/vit_small*' --sort flops
        steady models resnet50. --json
    """
    with status("reading the list of models"):
        from steadytrain.models.counts import counts
        from steadytrain.models.registry import catalogue

        pattern = None if pattern in ("list", "ls", "all") else pattern  # as other tools have it
        entries = catalogue(pattern or "", tags=weights)
    with progress_once_known("counting", unit="models") as advance:
        counted = counts(entries, most=None if all else MAX_COUNTED, progress=advance)
    if counted is None and sort != "name":
        raise InputError(
            f"--sort {sort} needs all {len(entries):,} matching models to be counted, more than {MAX_COUNTED}: narrow"
            " the pattern, or add --all"
        )
    rows = [_row(entry, counted) for entry in entries]
    if sort != "name":  # by name they are sorted already; what is not known comes last
        rows.sort(key=lambda row: (row[sort] is None, row[sort] or 0))
    if json:
        print_json({"pattern": pattern, "counted": counted is not None, "n": len(rows), "models": rows})
        return
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print_pages(_table(rows, counted is not None, columns))
    for remark in _legend(rows, counted is not None):
        note(remark)


def _row(entry: Entry, counted: Mapping[str, ModelCounts] | None) -> dict[str, Any]:
    """Return a model as JSON has it."""
    from steadytrain.models.registry import licence_kind

    result = counted[entry.name] if counted is not None else None
    parameters, macs = (result.parameters, result.macs) if result else (None, None)
    restriction = licence_kind(entry.licence) if entry.licence else "free"
    return {
        **vars(entry),
        "restriction": None if restriction == "free" else restriction,
        "parameters": parameters,
        "macs": macs,
        "flops": None if macs is None else 2 * macs,
        "error": result.error if result else None,
    }


def _table(rows: Sequence[Mapping[str, Any]], counted: bool, columns: int | None) -> str:
    """Lay out a line for each model, or two where ``columns`` are few."""
    marked = any(row["restriction"] for row in rows)
    heads = [*(("parameters", "GMACs") if counted else ()), "input", "weights", "  " * marked + "licence"]
    cells = []
    for row in rows:
        figures = []
        if counted:
            parameters, macs = row["parameters"], row["macs"]
            figures.append("-" if parameters is None else f"{parameters / 1e6:,.2f} M")
            figures.append("-" if macs is None else f"{macs / 1e9:,.2f}" if macs >= 1e8 else f"{macs / 1e9:.2g}")
        size = str(row["width"]) if row["width"] == row["height"] else f"{row['height']}x{row['width']}"
        mark = f"{MARKS.get(row['restriction'], ' ')} " if marked else ""
        licence = row["licence"] or "-"
        shown = (
            licence if columns is None or len(licence) <= LICENCE_COLUMNS else f"{licence[: LICENCE_COLUMNS - 3]}..."
        )
        cells.append([*figures, size, row["weights"], mark + shown])
    lines = [["model", *heads], *([row["name"], *figures] for row, figures in zip(rows, cells, strict=True))]
    right = range(1, len(heads) - 1)
    table = text_table(lines, right=right)
    if columns is None or max(map(len, table.splitlines())) <= columns:
        return table
    figures = text_table([["", *line[1:]] for line in lines], right=right).splitlines()
    return "\n".join(f"{line[0]}\n{row}" for line, row in zip(lines, figures, strict=True))


def _legend(rows: Sequence[Mapping[str, Any]], counted: bool) -> Iterator[str]:
    """Yield what the table's reader should know: only what concerns these rows."""
    marks = {MARKS.get(row["restriction"]) for row in rows}
    if "!" in marks:
        yield "! non-commercial: these weights may not be used in products or services"
    if "?" in marks:
        yield "? unknown or custom licence: read it before you use these weights or what you train from them"
    if not counted:
        yield (
            f"{len(rows):,} models; parameters and GMACs are counted for up to {MAX_COUNTED}: narrow the pattern"
            " (steady models 'timm/vit_small*'), or add --all"
        )
    elif any(row["error"] for row in rows):
        yield "- could not be counted: --json shows the reason"
