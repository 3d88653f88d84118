"""Render facts and findings: as lines of text, and as one JSON document that can be read back."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from steadytrain.config.plain import parse_json, plain
from steadytrain.doctor.facts import MachineFacts
from steadytrain.doctor.rules import MachineFinding
from steadytrain.errors import InputError
from steadytrain.format import count, percent, size, wrap
from steadytrain.machine.gpus import count_names

DOCUMENT_KIND, VERSION = "steadytrain doctor", 1
TITLES = {
    "system": "Machine",
    "processor": "Processor",
    "load": "Load",
    "memory": "Memory",
    "places": "Folders",
    "accelerators": "GPUs",
    "torch": "torch",
    "decoders": "Decoders",
    "packages": "Packages",
    "variables": "Environment",
}
"""Headings of the parts of the facts, in the order in which they are shown."""
_REMEDY = "create one with: steady doctor --json > other.json"
_SINGULAR = {"gpus": "gpu", "devices": "device", "processes": "process"}
_LABEL = 22


def lines(facts: MachineFacts, findings: Sequence[MachineFinding], *, width: int) -> list[str]:
    """Render all of it in ``width`` columns: the verdict, the findings, the worst first, then the facts."""
    lines = wrap(verdict(facts, findings), width, "")
    lines += [""] if findings else []
    lines += [line for finding in findings for line in finding_lines(finding, width)]
    parts: Mapping[str, Any] = plain(facts)
    for part, title in TITLES.items():
        values = parts[part]
        rows = values.items() if part == "variables" else _versions(values) if part == "packages" else _rows(values)
        rows = [(label, text) for label, text in rows if text]
        lines += ["", title] if rows else []
        for label, text in rows:
            lines += wrap(text, width, f"  {label:<{_LABEL}}", " " * (_LABEL + 2))
    return lines


def _rows(part: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield a label and a text for each fact that is known, and for each table that it holds."""
    for name, value in part.items():
        label = name.replace("_", " ")
        if isinstance(value, dict):
            yield label, _joined(value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for number, table in enumerate(value):
                yield f"{_SINGULAR[name]} {number}", _joined(table)
        elif value not in (None, [], ""):
            yield label.removesuffix(" bytes").removesuffix(" share"), value_text(name, value)


def _joined(table: Mapping[str, Any]) -> str:
    return ", ".join(f"{label} {text}" for label, text in _rows(table))


def _versions(packages: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    for label, is_needed in (("needed", True), ("others", False)):
        chosen = {name: package for name, package in packages.items() if bool(package["wanted"]) is is_needed}
        if chosen:
            yield label, ", ".join(f"{name} {about['version'] or 'missing'}" for name, about in chosen.items())


def value_text(key: str, value: Any) -> str:
    """Format a value by the unit in its name.

    >>> value_text("memory.total_bytes", 16e9), value_text("load.steal_share", 0.12)
    ('16.0 GB', '12 %')
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    if isinstance(value, int | float):
        if key.endswith("_bytes"):
            return size(value)
        if key.endswith("_share"):
            return percent(value)
        return f"{value:,.0f}" if value >= 1e6 else f"{value:g}"
    return str(value)


def finding_lines(finding: MachineFinding, width: int) -> Iterator[str]:
    """Render a finding after its severity: what, why, and what to do."""
    indent = " " * 6
    yield from wrap(finding.what, width, f"{finding.severity:<6}", indent)
    yield from wrap(finding.why, width, indent)
    yield from wrap(finding.remedy, width, f"{indent}-> ", f"{indent}   ")


def verdict(facts: MachineFacts, findings: Sequence[MachineFinding]) -> str:
    """Describe what training would run on, and count the findings of each severity.

    >>> verdict(MachineFacts(), [])
    'the device that training would use is unknown: no problems found'
    """
    counts = Counter(finding.severity for finding in findings)
    problems = [f"{counts['bad']} bad"] if counts["bad"] else []
    problems += [count(counts["warn"], "warning")] if counts["warn"] else []
    notes = [count(counts["note"], "note")] if counts["note"] else []
    return f"{_runs_on(facts)}: {', '.join([*(problems or ['no problems found']), *notes])}"


def _runs_on(facts: MachineFacts) -> str:
    torch, usable = facts.torch, facts.processor.usable
    if torch.state is None:
        return "the device that training would use is unknown"
    if torch.state != "works":
        return f"cannot train, torch {'is ' * (torch.state in ('missing', 'broken'))}{torch.state}"
    if torch.sees_gpu:
        names = [gpu.name for gpu in torch.devices if gpu.failure is None]
        if not names:
            return "would train on a GPU that fails"
        return f"trains on {'one of ' * (len(names) > 1)}{count_names(names)}"
    return "trains on the CPU" if usable is None else f"trains on the CPU, {count(usable, 'core')}"


def document(facts: MachineFacts, findings: Iterable[MachineFinding]) -> dict[str, Any]:
    """Return kind, version, the time, the findings, and each part of the facts under its name."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    parts: dict[str, Any] = plain(facts)
    return {"kind": DOCUMENT_KIND, "version": VERSION, "made": created, "findings": [*map(plain, findings)], **parts}


def read(path: Path) -> dict[str, Any]:
    """Read a document from a file. Raises InputError: the file cannot be read, or is something else."""
    try:
        document = parse_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): {_REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a JSON document ({error}): {_REMEDY}") from error
    if not isinstance(document, dict) or document.get("kind") != DOCUMENT_KIND:
        raise InputError(f"{path} was not written by steady doctor, or is a comparison: {_REMEDY}")
    if document.get("version") != VERSION:
        raise InputError(f"{path} has version {document.get('version')!r}; this steadytrain reads {VERSION}: {_REMEDY}")
    return document
