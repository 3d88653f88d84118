"""``steady doctor``."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from steadytrain.cli.console import note, print_json
from steadytrain.cli.options import Json
from steadytrain.format import clean

if TYPE_CHECKING:
    from collections.abc import Iterable

    from steadytrain.doctor import Line

MAX_COLUMNS = 100
_COLOURS = {"bold": "1", "bold red": "1;31", "yellow": "33", "cyan": "36"}


def doctor(
    *,
    against: Path | None = None,
    json: Json = False,
) -> int:
    """What this machine is, what slows training here or keeps it off the GPU, and what to do about it.

    Looks at torch and its CUDA beside the driver, the GPUs, processors, memory, folders, decoders, settings and
    versions. It changes nothing, and takes some seconds, for importing torch in a process of its own. The exit code
    is 1 where something is bad.

    Args:
        against: A document of another machine, or of this one earlier: print only what differs.

    Examples:
        steady doctor
        steady doctor --json > gpu7.json
        steady doctor --against gpu7.json
    """
    from steadytrain import doctor as examination

    other = None if against is None else examination.read(against)
    note("looking at this machine: some seconds, for torch")
    facts = examination.examine()
    findings = examination.findings(facts)
    width = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    document: dict[str, Any] = examination.document(facts, findings)
    if other is None:
        lines = examination.lines(facts, findings, width=width)
    else:
        comparison = examination.compare(other, document)
        lines = examination.comparison_lines(other, document, comparison, width=width)
        document = examination.comparison_document(other, document, comparison)
    if json:
        print_json(document)
    else:
        _print(lines)
    return 1 if any(finding.severity == "bad" for finding in findings) else 0


def _print(lines: Iterable[Line]) -> None:
    """Print lines, with colours where standard output is a terminal that wants them."""
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM", "dumb") != "dumb"
    for line in lines:
        text = clean(line.text)
        if coloured and line.style:
            text = f"\033[{_COLOURS[line.style]}m{text[: line.styled]}\033[0m{text[line.styled :]}"
        print(text)
