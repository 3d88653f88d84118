"""The verdict on a run that has just ended."""

from __future__ import annotations

import sys

from steadytrain.cli.console import note
from steadytrain.cli.stream import Stream
from steadytrain.monitor import diagnose, read_history
from steadytrain.monitor.evidence import gather_evidence
from steadytrain.reports.verdict import verdict_brief, verdict_line
from steadytrain.run import Run


def print_verdict(run: Run) -> None:
    """Print the verdict on standard error: in words on a terminal, else as a line."""
    try:
        first = diagnose(gather_evidence(read_history(run, condensed=True))).causes[0]
    except Exception as error:  # noqa: BLE001 - whatever a log holds, the run is well, and its end is told next
        note(f"no verdict: {error}")
        return
    for line in verdict_brief(first) if Stream(sys.stderr).isatty() else [verdict_line(first)]:
        note(line)
