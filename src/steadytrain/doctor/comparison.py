"""Compare two documents of the doctor: what differs, and what of it matters for speed; as lines and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from fnmatch import fnmatchcase
from typing import Any

from steadytrain.config.plain import build, plain
from steadytrain.doctor.rules import SEVERITIES, MachineFinding
from steadytrain.doctor.text import VERSION, finding_lines, value_text
from steadytrain.errors import RecipeError
from steadytrain.format import wrap

KIND = "steadytrain doctor comparison"
MATTERS = (
    *("torch.state", "torch.sees_gpu", "torch.devices", "torch", "accelerators", "processor", "load", "memory"),
    *("places.cache", "decoders", "variables", "packages.timm"),
)
"""Beginnings of the keys of facts that change the speed, those that change it most first; differences come so."""
IGNORED = (
    *("system.host", "system.executable", "system.venv", "accelerators.on_bus", "accelerators.driver_by"),
    *("torch.gpu_error", "memory.available_bytes", "memory.group_used_bytes", "places.*.path"),
    *("memory.swap_used_bytes", "places.*.free_bytes", "places.shm.kind", "packages.*.wanted"),
    *(f"accelerators.gpus.*.{name}" for name in ("processes", "memory_used_bytes", "mhz", "uuid")),
    *(f"accelerators.gpus.*.{name}" for name in ("power_watts", "temperature")),
)
"""Facts that differ between any two machines, or between any two moments, and say nothing of speed."""
_GPUS = ("torch.devices", "accelerators.gpus")
_AMOUNTS = ("_bytes", "_watts", "mhz_max", "mhz_allowed", "usable", "quota", "allowed", "threads", "load_1")


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Compare two documents: kind, version, both origins, findings of one only, and the facts that differ.

    ``old``: the other machine's, or an older one.
    """
    before, after = dict(_facts(old)), dict(_facts(new))
    old_findings, new_findings = _findings(old), _findings(new)
    differences = []
    for key in dict.fromkeys((*after, *before)):
        values = before.get(key), after.get(key)
        if _is_same(key, *values) or any(fnmatchcase(key, pattern) for pattern in IGNORED):
            continue
        name = f"{key.rpartition('.')[0]}.name"
        if key.startswith(_GPUS) and key != name and not (name in before and name in after):
            continue  # of a GPU that only one of the two has the name is enough
        rank = next((rank for rank, part in enumerate(MATTERS) if f"{key}.".startswith(f"{part}.")), len(MATTERS))
        difference = {"key": key, "old": values[0], "new": values[1], "matters": rank < len(MATTERS)}
        differences.append((rank, difference))
    differences.sort(key=lambda pair: pair[0])
    return {
        "kind": KIND,
        "version": VERSION,
        "old": _origin(old),
        "new": _origin(new),
        "findings": {
            "only_old": [plain(finding) for rule, finding in old_findings.items() if rule not in new_findings],
            "only_new": [plain(finding) for rule, finding in new_findings.items() if rule not in old_findings],
        },
        "differences": [difference for _, difference in differences],
    }


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the facts of a document with dotted keys; a list of tables by its indices, any other list is a value."""
    rest = [(name, part) for name, part in document.items() if name not in ("kind", "version", "made", "findings")]
    while rest:
        key, value = rest.pop(0)
        if isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value):
            value = dict(enumerate(value))
        if isinstance(value, dict) and value:
            rest[:0] = [(f"{key}.{name}", inner) for name, inner in value.items()]
        else:
            yield key, None if value in ([], {}) else value


def _is_same(key: str, old: Any, new: Any) -> bool:
    """Return whether two values say the same: shares and loads always vary, and sizes and clocks a little."""
    if not (_is_number(old) and _is_number(new)):
        return bool(old == new)
    largest, difference = max(abs(old), abs(new)), abs(old - new)
    if key.endswith(("_share", "load_1")):
        return bool(largest < (1.0 if key.endswith("load_1") else 0.05) or difference <= 0.5 * largest)
    is_measured = key.endswith(("_bytes", "_watts", "mhz_max", "mhz_allowed"))
    return bool(difference <= 0.02 * largest if is_measured else old == new)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _findings(document: Mapping[str, Any]) -> dict[str, MachineFinding]:
    """Return a document's findings by rule, ignoring what is no finding."""
    entries, findings = document.get("findings"), {}
    for entry in entries if isinstance(entries, list) else []:
        with suppress(RecipeError):
            finding = build(MachineFinding, entry)
            if finding.severity in SEVERITIES:
                findings[finding.rule] = finding
    return findings


def _origin(document: Mapping[str, Any]) -> dict[str, str | None]:
    system, created = document.get("system"), document.get("made")
    host = system.get("host") if isinstance(system, dict) else None
    return {"host": host if isinstance(host, str) else None, "made": created if isinstance(created, str) else None}


def comparison_lines(comparison: Mapping[str, Any], *, width: int) -> list[str]:
    """Render the differences, old -> new, in ``width`` columns: findings, what matters for speed, the rest."""
    findings, differences, lines = comparison["findings"], comparison["differences"], []
    for side in ("old", "new"):
        origin = comparison[side]
        time = (origin["made"] or "at an unknown time").replace("+00:00", " UTC")
        lines.append(f"{side}: {origin['host'] or 'unknown'}, {time}")
    if not any(findings.values()) and not any(fact["matters"] for fact in differences):
        lines += ["", "no differences that are known to affect speed"]
    for side in ("new", "old"):
        only = [MachineFinding(**finding) for finding in findings[f"only_{side}"]]
        lines += ["", f"Found only in the {side}"] if only else []
        lines += [line for finding in only for line in finding_lines(finding, width)]
    for title, matters in (("Affects speed", True), ("Other differences", False)):
        changes = [_change(fact) for fact in differences if fact["matters"] is matters]
        lines += ["", title] if changes else []
        lines += [line for change in changes for line in wrap(change, width, "  ", "      ")]
    return lines


def _change(fact: Mapping[str, Any]) -> str:
    """Format a difference; of amounts also the ratio."""
    key, old, new, times = fact["key"], fact["old"], fact["new"], ""
    if key.endswith(_AMOUNTS) and _is_number(old) and _is_number(new) and old > 0 and new > 0:
        times = f" (x {new / old:.2g})"
    return f"{key}: {value_text(key, old)} -> {value_text(key, new)}{times}"
