"""``steady doctor``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from collections.abc import Iterable

    from steadytrain.doctor import Line

MOST_COLUMNS = 100
_COLOURS = {"bold": "1", "bold red": "1;31", "yellow": "33", "cyan": "36"}


def doctor(
    *,
    against: Annotated[
        Path | None, Parameter(help="A document of another machine, or of this one earlier: print only what differs.")
    ] = None,
    json: Annotated[bool, Parameter(help="Print one JSON document.", negative="", show_default=False)] = False,
) -> int:
    """What this machine is, what slows training here or keeps it off the GPU, and what to do about it.

    Looks at torch and its CUDA beside the driver, the GPUs, processors, memory, folders, decoders, settings and
    versions. It changes nothing, and takes some seconds, for importing torch in a process of its own. The exit code
    is 1 where something is bad.

    Examples
    --------
    steady doctor
    steady doctor --json > gpu7.json
    steady doctor --against gpu7.json
    """
    import json as json_module
    import shutil
    from typing import Any

    from steadytrain import doctor as of
    from steadytrain.cli.console import note

    other = None if against is None else of.read(against)
    note("looking at this machine: some seconds, for torch")
    facts = of.examine()
    found = of.findings(facts)
    width = min(shutil.get_terminal_size().columns, MOST_COLUMNS)
    told: dict[str, Any] = of.document(facts, found)
    if other is None:
        lines = of.lines(facts, found, width=width)
    else:
        compared = of.compare(other, told)
        lines = of.comparison_lines(other, told, compared, width=width)
        told = of.comparison_document(other, told, compared)
    if json:
        print(json_module.dumps(told, indent=2))
    else:
        _print(lines)
    return 1 if any(one.severity == "bad" for one in found) else 0


def _print(lines: Iterable[Line]) -> None:
    """Lines on standard output, with colours where that is a terminal that wants them."""
    import os
    import sys

    from steadytrain.cli.lines import clean

    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM", "dumb") != "dumb"
    for line in lines:
        text = clean(line.text)
        if coloured and line.style:
            text = f"\033[{_COLOURS[line.style]}m{text[: line.styled]}\033[0m{text[line.styled :]}"
        print(text)
