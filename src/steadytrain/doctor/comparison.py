"""Compare two documents of the doctor: what differs, and what of it matters for speed; as lines and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from steadytrain.config.plain import build, plain
from steadytrain.doctor.rules import SEVERITIES, MachineFinding
from steadytrain.doctor.text import VERSION, finding_lines, value_text, wrapped
from steadytrain.errors import RecipeError

KIND = "steadytrain doctor comparison"
MOST = 3  # differences in the line that tells what matters most
GPUS = ("torch.devices", "accelerators.gpus")
MATTERS = (
    *("torch.state", "torch.sees_gpu", "torch.devices.*.name", "torch.devices.*.failure"),
    *("torch.devices.*.memory_bytes", "accelerators.gpus.*.name", "torch.cuda", "torch.rocm", "torch.version"),
    *("torch.cudnn", "torch.allowed", "accelerators.driver", "accelerators.gpus.*.mhz_max"),
    *("accelerators.gpus.*.memory_mhz_max", "accelerators.gpus.*.power_limit_watts"),
    *("accelerators.gpus.*.throttled_by", "accelerators.gpus.*.pcie_width", "accelerators.gpus.*.pcie_generation_max"),
    *("accelerators.gpus.*.busy_share", "accelerators.gpus.*.mig", "processor.usable", "processor.quota"),
    *("processor.model", "processor.isa", "processor.features", "torch.isa", "torch.isa_extras", "processor.mhz_max"),
    *("processor.mhz_allowed", "processor.governor", "processor.energy_preference", "processor.smt"),
    *("processor.numa_nodes", "torch.threads", "load.throttled_share", "load.steal_share", "load.pressure_*_share"),
    *("load.load_1", "memory.limit_bytes", "memory.total_bytes", "memory.huge_pages", "allocator.preloaded"),
    *("allocator.libc", "places.cache.kind", "places.cache.network", "places.cache.rotational"),
    *("decoders.simplejpeg_*", "decoders.pillow_turbo", "decoders.pillow_zlib_ng", "decoders.jpeg", "decoders.parts"),
    *("decoders.parts_error", "decoders.resizer", "decoders.resizer_error", "variables.*", "packages.timm.version"),
    *("packages.*.fits", "system.clock_source"),
)
"""Facts that change the speed, those that change it most first; differences come in this order."""
IGNORED = (
    *("system.host", "system.executable", "system.venv", "system.container_by", "accelerators.on_bus"),
    *("system.clock_behind_seconds", "torch.folder", "load.load_5", "load.load_15", "processor.mhz", "torch.gpu_error"),
    *("memory.available_bytes", "memory.group_used_bytes", "memory.swap_used_bytes", "places.*.path"),
    *("packages.*.wanted", "places.*.free_bytes", "places.*.free_files", "places.shm.kind", "accelerators.driver_by"),
    *("accelerators.gpus.*.processes", "accelerators.gpus.*.memory_used_bytes", "accelerators.gpus.*.mhz"),
    *("accelerators.gpus.*.memory_mhz", "accelerators.gpus.*.power_watts", "accelerators.gpus.*.temperature"),
    *("accelerators.gpus.*.pcie_generation", "accelerators.gpus.*.uuid"),
)
"""Facts that differ between any two machines, or between any two moments, and say nothing of speed."""
_AMOUNTS = ("_bytes", "_watts", "mhz_max", "mhz_allowed", "usable", "quota", "allowed", "threads", "load_1")


@dataclass(frozen=True)
class Difference:
    """A fact that differs; ``matters``: for speed."""

    key: str
    old: Any
    new: Any
    matters: bool


@dataclass(frozen=True)
class MachineComparison:
    """All differences: findings of one document only, and facts.

    ``old`` and ``new`` say which two were compared: ``host``, and when each was ``made``.
    """

    old: Mapping[str, str | None]
    new: Mapping[str, str | None]
    only_new: tuple[MachineFinding, ...]
    only_old: tuple[MachineFinding, ...]
    facts: tuple[Difference, ...]


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> MachineComparison:
    """Compare two documents, what matters for speed first.

    Args:
        old: the other machine's, or an older one.
        new: this machine's.
    """
    (before, old_findings), (after, new_findings) = (
        (dict(_facts(document)), _findings(document)) for document in (old, new)
    )
    differences = []
    for key in dict.fromkeys((*after, *before)):
        values = before.get(key), after.get(key)
        if _is_same(key, *values) or any(fnmatchcase(key, pattern) for pattern in IGNORED):
            continue
        if key.startswith(GPUS) and not key.endswith(".name"):
            name = f"{key.rpartition('.')[0]}.name"
            if not (name in before and name in after):
                continue  # of a GPU that only one of the two has the name is enough
        rank = next((rank for rank, pattern in enumerate(MATTERS) if fnmatchcase(key, pattern)), len(MATTERS))
        differences.append((rank, Difference(key, *values, matters=rank < len(MATTERS))))
    differences.sort(key=lambda pair: pair[0])
    return MachineComparison(
        old=_origin(old),
        new=_origin(new),
        only_new=tuple(finding for rule, finding in new_findings.items() if rule not in old_findings),
        only_old=tuple(finding for rule, finding in old_findings.items() if rule not in new_findings),
        facts=tuple(difference for _, difference in differences),
    )


def _facts(document: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the facts of a document with dotted keys; a list of tables by its indices, any other list is a value."""
    about = ("kind", "version", "made", "findings")
    rest = [(name, part) for name, part in document.items() if name not in about]
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
    entries = document.get("findings")
    findings = {}
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


def comparison_document(comparison: MachineComparison) -> dict[str, Any]:
    """Return the comparison as a document: kind, version, both origins, findings of one only, facts that differ."""
    return {
        "kind": KIND,
        "version": VERSION,
        "old": comparison.old,
        "new": comparison.new,
        "findings": {"only_old": plain(comparison.only_old), "only_new": plain(comparison.only_new)},
        "differences": plain(comparison.facts),
    }


def comparison_lines(comparison: MachineComparison, *, width: int) -> list[str]:
    """Render the differences, old -> new: the most important, findings, what matters for speed, the rest.

    Args:
        comparison: of two documents.
        width: columns.
    """
    sides = (("new", comparison.only_new), ("old", comparison.only_old))
    matters = [fact for fact in comparison.facts if fact.matters]
    lines = []
    for word, origin in (("old:", comparison.old), ("new:", comparison.new)):
        time = (origin["made"] or "at an unknown time").replace("+00:00", " UTC")
        lines.append(f"{word} {origin['host'] or 'unknown'}, {time}")
    if not matters and not comparison.only_new and not comparison.only_old:
        lines += ["", "no differences that are known to affect speed"]

    def section(title: str, texts: list[str]) -> None:
        """Add a heading and texts."""
        lines.extend(["", title] if texts else [])
        for text in texts:
            first, *continued = wrapped(text, width - 6)
            lines.extend([f"  {first}", *(f"{'':6}{line}" for line in continued)])

    # What is likeliest to say why one of the two is slower: what is bad with one, and the first fact of each part.
    bad = [f"{side}: {f.what}" for side, findings in sides for f in findings if f.severity == "bad"]
    first_of_part: dict[str, Difference] = {}
    for fact in matters:
        first_of_part.setdefault(fact.key.partition(".")[0], fact)
    section("Matters most", [*bad[:1], *map(_change, first_of_part.values())][:MOST])
    for side, findings in sides:
        lines += ["", f"Found only in the {side}"] if findings else []
        lines += [line for finding in findings for line in finding_lines(finding, width)]
    section("Affects speed", [_change(fact) for fact in matters])
    section("Other differences", [_change(fact) for fact in comparison.facts if not fact.matters])
    return lines


def _change(fact: Difference) -> str:
    """Format a difference; of amounts also the ratio."""
    old, new, times = fact.old, fact.new, ""
    if fact.key.endswith(_AMOUNTS) and _is_number(old) and _is_number(new) and old > 0 and new > 0:
        times = f" (x {new / old:.2g})"
    return f"{fact.key}: {value_text(fact.key, old)} -> {value_text(fact.key, new)}{times}"
