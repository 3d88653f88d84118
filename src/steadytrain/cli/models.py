"""``steady models``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter

if TYPE_CHECKING:
    from steadytrain.models.counts import Counts
    from steadytrain.models.registry import Entry

MOST = 60  # networks that are counted unasked: half a minute on one core
LICENCE = 18  # columns that a licence may have before names give way
MARKS = {"non-commercial": "!", "unknown": "?", "own": "?"}
SHORT = 16  # columns: names that have fewer get lines of their own


def models(
    pattern: Annotated[
        str | None, Parameter(help="A piece of a name, or a glob such as `'timm/vit*'`; without one all are listed.")
    ] = None,
    /,
    *,
    weights: Annotated[
        bool, Parameter(help="List pretrained weights, by their tags, instead of architectures.", negative="")
    ] = False,
    sort: Annotated[Literal["name", "parameters", "flops"], Parameter(help="What by; the smallest first.")] = "name",
    all: Annotated[
        bool, Parameter(help=f"Count all that match, not {MOST} at most; what is counted is remembered.", negative="")
    ] = False,
    json: Annotated[bool, Parameter(help="Print one JSON document.", negative="")] = False,
) -> None:
    """The models that can be named: parameters, multiply-adds, input size, licence, and where their weights are.

    A pattern with a dot, such as `resnet50.`, lists the pretrained weights of what it matches. No network is used.

    GMACs are thousands of millions of multiply-adds in the forward pass of one image of that size, counted on the
    network itself as torchvision's tables count them: convolutions, linear layers and matrix products, those of
    attention among them. Floating-point operations (FLOPs) are twice as many.

    Examples
    --------
    steady models mobilenet
    steady models 'timm/vit_small*' --sort flops
    steady models resnet50. --json
    """
    import json as json_module
    import textwrap

    from steadytrain.cli.console import note
    from steadytrain.errors import InputError

    with _status("reading the list of models"):
        from steadytrain.models.registry import catalogue

        entries = catalogue(pattern or "", tags=weights)
    counted = _counted(entries, None if all else MOST)
    if counted is None and sort != "name":
        raise InputError(
            f"--sort {sort} needs all {len(entries):,} that match to be counted, and {MOST} are at most: narrow the"
            " pattern, or add --all"
        )
    rows = _sorted([_row(entry, counted) for entry in entries], sort)
    if json:
        document = {"pattern": pattern, "counted": counted is not None, "n": len(rows), "models": rows}
        print(json_module.dumps(document, indent=2))
        return
    columns = _columns()
    print(_table(rows, counted is not None, columns), flush=True)
    for told in _legend(rows, counted is not None):
        for line in textwrap.wrap(told, columns or len(told)):
            note(line)


def _counted(entries: Sequence[Entry], most: int | None) -> Mapping[str, Counts] | None:
    """The counts, with progress while networks are built; None if there would be too many."""
    from steadytrain.cli.console import Advance, progress
    from steadytrain.models.counts import counts

    with contextlib.ExitStack() as stack:
        shown: list[Advance] = []

        def advance(done: int, total: int) -> None:
            if not shown:
                shown.append(stack.enter_context(progress("counting", total, unit="models")))
            shown[0](done)

        return counts(entries, most=most, progress=advance)


def _row(entry: Entry, counted: Mapping[str, Counts] | None) -> dict[str, Any]:
    """A model as JSON has it."""
    from steadytrain.models.registry import licence_kind

    told = counted[entry.name] if counted is not None else None
    parameters, macs = (told.parameters, told.macs) if told else (None, None)
    restriction = licence_kind(entry.licence) if entry.licence else "free"
    return {
        **vars(entry),
        "restriction": None if restriction == "free" else restriction,
        "parameters": parameters,
        "macs": macs,
        "flops": None if macs is None else 2 * macs,
        "error": told.error if told else None,
    }


def _sorted(rows: list[dict[str, Any]], sort: str) -> list[dict[str, Any]]:
    """Smallest first, unknown last; by name they are already."""
    if sort == "name":
        return rows
    return sorted(rows, key=lambda row: (row[sort] is None, row[sort] or 0))


def _table(rows: Sequence[Mapping[str, Any]], counted: bool, columns: int | None) -> str:
    """A line for each model. Where ``columns`` are few, a long name gets a line of its own, a long licence is cut."""
    marked = any(row["restriction"] for row in rows)
    heads = [*(("parameters", "GMACs") if counted else ()), "input", "weights", "  " * marked + "licence"]
    cells = [_cells(row, counted, marked) for row in rows]
    widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
    longest = max(len(row["name"]) for row in rows)
    left = (columns or 9999) - sum(widths[:-1]) - 2 * len(widths) - min(widths[-1], LICENCE)
    first = min(longest, left) if left >= min(longest, SHORT) else 2
    if columns is not None:
        widths[-1] = max(columns - first - sum(widths[:-1]) - 2 * len(widths), SHORT)

    def line(name: str, told: Sequence[str]) -> str:
        *numbers, weights, licence = told
        aligned = [cell.rjust(width) for cell, width in zip(numbers, widths, strict=False)]
        aligned += [weights.ljust(widths[-2]), _cut(licence, widths[-1])]
        above = f"{name}\n" if len(name) > first else ""
        return above + "  ".join([("" if above else name).ljust(first), *aligned]).rstrip()

    return "\n".join([line("model", heads), *(line(row["name"], cell) for row, cell in zip(rows, cells, strict=True))])


def _cells(row: Mapping[str, Any], counted: bool, marked: bool) -> list[str]:
    size = str(row["width"]) if row["width"] == row["height"] else f"{row['height']}x{row['width']}"
    numbers = [_millions(row["parameters"]), _thousand_millions(row["macs"])] if counted else []
    return [*numbers, size, row["weights"], f"{_mark(row) + ' ' if marked else ''}{row['licence'] or '-'}"]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _millions(number: int | None) -> str:
    return "-" if number is None else f"{number / 1e6:,.2f} M"


def _thousand_millions(number: int | None) -> str:
    if number is None:
        return "-"
    return f"{number / 1e9:,.2f}" if number >= 1e8 else f"{number / 1e9:.2g}"


def _mark(row: Mapping[str, Any]) -> str:
    return MARKS.get(row["restriction"], " ")


def _legend(rows: Sequence[Mapping[str, Any]], counted: bool) -> Iterator[str]:
    """What the table's reader should know: only what concerns these rows."""
    marks = {_mark(row) for row in rows}
    if "!" in marks:
        yield "! non-commercial: these weights may not be used in products or services"
    if "?" in marks:
        yield "? unknown, or a licence of its own: read it before you use what you make of these weights"
    if not counted:
        yield (
            f"{len(rows):,} models; parameters and GMACs are counted for up to {MOST}: narrow the pattern"
            " (steady models 'timm/vit_small*'), or add --all"
        )
    elif any(row["error"] for row in rows):
        yield "- could not be counted: --json says why"


def _columns() -> int | None:
    """Columns of the terminal that the table goes to; None where it goes to no terminal."""
    import shutil

    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


@contextlib.contextmanager
def _status(text: str) -> Iterator[None]:
    """Say on a terminal, and nowhere else, what is waited for; gone when it is over."""
    from steadytrain.cli.stream import Stream

    stream = Stream(sys.stderr)
    if not stream.isatty():
        yield
        return
    from rich.text import Text

    from steadytrain.cli.live import Foot

    with Foot(stream, lambda width, ascii_only: [Text(text, style="bright_black")]):
        yield
