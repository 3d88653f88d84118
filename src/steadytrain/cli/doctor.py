"""``steady doctor``: what this machine is, and what slows training down on it."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from steadytrain.cli.console import note, print_json
from steadytrain.cli.options import Json
from steadytrain.format import clean

MAX_COLUMNS = 100
_COLOURS = {"bold": "1", "bold red": "1;31", "yellow": "33", "cyan": "36"}


def doctor(
    *,
    against: Path | None = None,
    json: Json = False,
) -> int:
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
    note("checking this machine (loading torch takes some seconds)")
    facts = examination.examine()
    findings = examination.findings(facts)
    width = min(shutil.get_terminal_size().columns, MAX_COLUMNS)
    document: dict[str, Any] = examination.document(facts, findings)
    if other is None:
        lines = examination.lines(facts, findings, width=width)
    else:
        comparison = examination.compare(other, document)
        lines = examination.comparison_lines(comparison, width=width)
        document = examination.comparison_document(comparison)
    if json:
        print_json(document)
    else:
        is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM", "dumb") != "dumb"
        for line in lines:
            text = clean(line.text)
            if is_coloured and line.style:
                text = f"\033[{_COLOURS[line.style]}m{text[: line.styled]}\033[0m{text[line.styled :]}"
            print(text)
    return 1 if any(finding.severity == "bad" for finding in findings) else 0
