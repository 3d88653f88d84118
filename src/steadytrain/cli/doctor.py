"""``steady doctor``: what this machine is, and what slows training down on it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from steadytrain.cli.console import note, print_json, status
from steadytrain.cli.options import Json
from steadytrain.format import clean

MAX_COLUMNS = 100
_COLOURS = {"bad": "1;31", "warn": "33", "note": "36"}


def doctor(*, against: Path | None = None, json: Json = False) -> int:
    """Check this machine: what slows training down or keeps it off the GPU, and what to do about it.

    Checks torch, its CUDA version and the driver, the GPUs, processors, memory, folders, decoders, settings and
    versions. It changes nothing. It takes some seconds, because it imports torch in a separate process. The exit code
    is 1 if a finding is bad.

    Args:
        against: A --json document of another machine, or an earlier one of this machine: print only the differences.

    Examples:
        steady doctor
        steady doctor --json > gpu7.json
        steady doctor --against gpu7.json
    """
    from steadytrain import doctor as examination

    other = None if against is None else examination.read(against)
    note("checking this machine")
    with status("measuring"):
        facts = examination.examine()
    findings = examination.findings(facts)
    width = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    document: dict[str, Any] = examination.document(facts, findings)
    if other is None:
        lines = examination.lines(facts, findings, width=width)
    else:
        document = examination.compare(other, document)
        lines = examination.comparison_lines(document, width=width)
    if json:
        print_json(document)
    else:
        is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM", "dumb") != "dumb"
        for line in map(clean, lines):
            print(_coloured(line) if is_coloured else line)
    return 1 if any(finding.severity == "bad" for finding in findings) else 0


def _coloured(line: str) -> str:
    """Colour a severity, and make headings bold: only they and the verdict begin at the margin."""
    first = line[:6].strip()
    if first in _COLOURS:
        return f"\033[{_COLOURS[first]}m{first}\033[0m{line[len(first) :]}"
    return f"\033[1m{line}\033[0m" if line and not line.startswith(" ") else line
