"""The first line of all: what training would run on here, and how much is wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from steadytrain.doctor.facts import Facts
from steadytrain.doctor.finding import Finding, some


def verdict(facts: Facts, found: Sequence[Finding]) -> str:
    """What training would run on, and how many findings there are of each severity.

    >>> verdict(Facts(), [])
    'what training would run on is unknown: nothing wrong found'
    """
    return f"{_runs_on(facts)}: {_counted(found)}"


def _runs_on(facts: Facts) -> str:
    torch, cpu = facts.torch, facts.processor
    if torch.state is None:
        return "what training would run on is unknown"
    if torch.state != "works":
        return f"cannot train, torch {'is ' * (torch.state in ('missing', 'broken'))}{torch.state}"
    if torch.sees_gpu:
        names = Counter(gpu.name for gpu in torch.devices if gpu.failure is None)
        told = ", ".join(name if count == 1 else f"{count} x {name}" for name, count in names.items())
        return f"trains on {'one of ' * (names.total() > 1)}{told}" if told else "would train on a GPU that fails"
    return "trains on the CPU" if cpu.usable is None else f"trains on the CPU, {some(cpu.usable, 'core')}"


def _counted(found: Sequence[Finding]) -> str:
    counts = Counter(one.severity for one in found)
    bad = [f"{counts['bad']} bad"] if counts["bad"] else []
    warnings = [some(counts["warn"], "warning")] if counts["warn"] else []
    notes = [some(counts["note"], "note")] if counts["note"] else []
    return ", ".join([*([*bad, *warnings] or ["nothing wrong found"]), *notes])
