"""Compare two documents of the doctor: what differs, and what of it matters for speed; as lines and as JSON."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from steadytrain.config.plain import build, plain
from steadytrain.doctor.rules import SEVERITIES, MachineFinding
from steadytrain.doctor.text import VERSION, TextLine, finding_lines, title_line, wrapped
from steadytrain.errors import RecipeError
from steadytrain.format import percent, size

KIND = "steadytrain doctor comparison"
MOST = 3  # differences in the line that tells what matters most


@dataclass(frozen=True)
class FactMeaning:
    """The meaning of a difference in a fact.

    Args:
        key: of the fact, dotted; ``*`` stands for one part.
        says: what it means for speed.
        least: a change of numbers of at most this share of the larger one is no difference.
        small: nor is any between two numbers below this.
    """

    key: str
    says: str
    least: float = 0.0
    small: float = 0.0


# The first to fit counts, and differences come in this order.
MEANINGS = (
    FactMeaning("torch.state", "training needs torch"),
    FactMeaning("torch.sees_gpu", "trains on a GPU or on the CPU: the largest possible difference"),
    FactMeaning("torch.devices.*.name", "another GPU: its own arithmetic and memory speed"),
    FactMeaning("torch.devices.*.failure", "a GPU that cannot compute"),
    FactMeaning("torch.devices.*.memory_bytes", "the largest batch that fits", 0.02),
    FactMeaning("accelerators.gpus.*.name", "another GPU: its own arithmetic and memory speed"),
    FactMeaning("torch.cuda", "another CUDA version: other kernels"),
    FactMeaning("torch.rocm", "another ROCm version: other kernels"),
    FactMeaning("torch.version", "other kernels and another scheduler: a few percent either way, sometimes more"),
    FactMeaning("torch.cudnn", "other convolutions"),
    FactMeaning("torch.allowed", "processors left after torch is loaded"),
    FactMeaning("accelerators.driver", "rarely more than 1 %, unless it is too old"),
    FactMeaning("accelerators.gpus.*.mhz_max", "the clock under load", 0.02),
    FactMeaning("accelerators.gpus.*.memory_mhz_max", "the speed of its memory", 0.02),
    FactMeaning("accelerators.gpus.*.power_limit_watts", "the clock under load", 0.02),
    FactMeaning("accelerators.gpus.*.throttled_by", "what limits its clock"),
    FactMeaning("accelerators.gpus.*.pcie_width", "how fast batches reach it"),
    FactMeaning("accelerators.gpus.*.pcie_generation_max", "how fast batches reach it"),
    FactMeaning("accelerators.gpus.*.busy_share", "other processes on it", 0.5, 0.1),
    FactMeaning("accelerators.gpus.*.mig", "the whole GPU or a part of it"),
    FactMeaning("processor.usable", "decoding, and training on a CPU, scale with it"),
    FactMeaning("processor.quota", "limits CPU time"),
    FactMeaning("processor.model", "the speed of one core"),
    FactMeaning("processor.isa", "the width of vector code: decoding, and training on a CPU"),
    FactMeaning("processor.features", "bf16, int8 and matrix instructions: training on a CPU"),
    FactMeaning("torch.isa", "the width of torch's own vector code"),
    FactMeaning("torch.isa_extras", "bf16, int8 and matrix instructions: training on a CPU"),
    FactMeaning("processor.mhz_max", "the speed of one core", 0.02),
    FactMeaning("processor.mhz_allowed", "the speed of one core", 0.02),
    FactMeaning("processor.governor", "how fast the clock rises"),
    FactMeaning("processor.energy_preference", "how fast the clock rises"),
    FactMeaning("processor.smt", "two threads on a core are worth about 1.3 of one"),
    FactMeaning("processor.numa_nodes", "memory of another node is slower"),
    FactMeaning("torch.threads", "threads that compute on a CPU"),
    FactMeaning("load.throttled_share", "time lost to the quota", 0.5, 0.05),
    FactMeaning("load.steal_share", "time lost to other virtual machines", 0.5, 0.05),
    FactMeaning("load.pressure_cpu_share", "other work on the processor", 0.5, 0.05),
    FactMeaning("load.pressure_io_share", "other work on the disk", 0.5, 0.05),
    FactMeaning("load.pressure_memory_share", "waiting for memory", 0.5, 0.05),
    FactMeaning("load.load_1", "other work on the processor", 0.5, 1.0),
    FactMeaning("memory.limit_bytes", "what fits, and how much of the files the kernel can cache", 0.02),
    FactMeaning("memory.total_bytes", "what fits, and how much of the files the kernel can cache", 0.02),
    FactMeaning("memory.huge_pages", "page faults of training on a CPU"),
    FactMeaning("allocator.preloaded", "the cost of large tensors on a CPU"),
    FactMeaning("allocator.libc", "the cost of large tensors on a CPU"),
    FactMeaning("places.cache.kind", "how fast images are read"),
    FactMeaning("places.cache.network", "how fast images are read"),
    FactMeaning("places.cache.rotational", "a spinning disk reads in random order a hundred times slower"),
    FactMeaning("decoders.simplejpeg_error", "whether JPEGs can be read"),
    FactMeaning("decoders.simplejpeg_simd", "without it JPEG decoding is several times slower"),
    FactMeaning("decoders.simplejpeg_turbo", "another JPEG decoder"),
    FactMeaning("decoders.pillow_turbo", "JPEGs that Pillow decodes"),
    FactMeaning("decoders.pillow_zlib_ng", "PNGs"),
    FactMeaning("decoders.jpeg", "how many photographs a core decodes"),
    FactMeaning("decoders.parts", "how many photographs a core decodes"),
    FactMeaning("decoders.parts_error", "how many photographs a core decodes"),
    FactMeaning("decoders.resizer", "the speed of resizing images while packing"),
    FactMeaning("decoders.resizer_error", "the speed of resizing images while packing"),
    FactMeaning("variables.*", "set on purpose, or left over"),
    FactMeaning("packages.timm.version", "the model's code may differ"),
    FactMeaning("packages.*.fits", "an unsupported version"),
    FactMeaning("system.clock_source", "the cost of reading the clock"),
)
_GPU = re.compile(r"(torch\.devices|accelerators\.gpus)\.\d+")
# What differs between any two machines, or between any two moments, and says nothing of speed.
_IGNORED = (
    *("system.host", "system.executable", "system.venv", "system.container_by", "accelerators.on_bus"),
    *("system.clock_behind_seconds", "torch.folder", "load.load_5", "load.load_15", "processor.mhz", "torch.gpu_error"),
    *("memory.available_bytes", "memory.group_used_bytes", "memory.swap_used_bytes", "places.*.path"),
    *("packages.*.wanted", "places.*.free_bytes", "places.*.free_files", "places.shm.kind", "accelerators.driver_by"),
    *("accelerators.gpus.*.processes", "accelerators.gpus.*.memory_used_bytes", "accelerators.gpus.*.mhz"),
    *("accelerators.gpus.*.memory_mhz", "accelerators.gpus.*.power_watts", "accelerators.gpus.*.temperature"),
    *("accelerators.gpus.*.pcie_generation", "accelerators.gpus.*.uuid"),
)


@dataclass(frozen=True)
class Difference:
    """A fact that differs; ``meaning`` is empty where it says nothing of speed."""

    key: str
    old: Any
    new: Any
    meaning: str


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
    before, after = (
        _flatten({name: part for name, part in document.items() if name not in ("kind", "version", "made", "findings")})
        for document in (old, new)
    )
    differences = []
    for key in dict.fromkeys((*after, *before)):
        rank, meaning = next(
            ((rank, meaning) for rank, meaning in enumerate(MEANINGS) if _fits(key, meaning.key)), (len(MEANINGS), None)
        )
        difference = Difference(key, before.get(key), after.get(key), meaning.says if meaning else "")
        if any(_fits(key, pattern) for pattern in _IGNORED) or _is_same(difference.old, difference.new, meaning):
            continue
        gpu = _GPU.match(key)
        if gpu and not all(f"{gpu[0]}.name" in values for values in (before, after)):
            if key != f"{gpu[0]}.name":
                continue  # of a GPU that only one of the two has the name is enough
            difference = replace(difference, meaning="a GPU that only one of the machines has")
        differences.append((rank, difference))
    differences.sort(key=lambda pair: pair[0])
    old_findings, new_findings = _findings(old), _findings(new)
    return MachineComparison(
        old=_origin(old),
        new=_origin(new),
        only_new=tuple(finding for rule, finding in new_findings.items() if rule not in old_findings),
        only_old=tuple(finding for rule, finding in old_findings.items() if rule not in new_findings),
        facts=tuple(difference for _, difference in differences),
    )


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten to dotted keys and values; a list of tables by its indices, any other list is a value."""
    if isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {prefix: None if value == [] else value}
    if not value:
        return {prefix: None}
    flat: dict[str, Any] = {}
    for name, inner in value.items():
        flat |= _flatten(inner, f"{prefix}.{name}" if prefix else str(name))
    return flat


def _fits(key: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), key) is not None


def _is_same(old: Any, new: Any, meaning: FactMeaning | None) -> bool:
    if not (_is_number(old) and _is_number(new)) or meaning is None or not meaning.least:
        return bool(old == new)
    largest = max(abs(old), abs(new))
    return bool(largest < meaning.small or abs(old - new) <= meaning.least * largest)


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
        "differences": [{**plain(fact), "matters": bool(fact.meaning)} for fact in comparison.facts],
    }


def comparison_lines(comparison: MachineComparison, *, width: int) -> list[TextLine]:
    """Render the differences, old -> new: the most important, findings, what matters for speed and why, the rest.

    Args:
        comparison: of two documents.
        width: columns.
    """
    sides = (("new", comparison.only_new), ("old", comparison.only_old))
    matters = [fact for fact in comparison.facts if fact.meaning]
    minor = [fact for fact in comparison.facts if not fact.meaning]
    lines = []
    for word, origin in (("old:", comparison.old), ("new:", comparison.new)):
        time = (origin["made"] or "at an unknown time").replace("+00:00", " UTC")
        lines.append(TextLine(f"{word} {origin['host'] or 'unknown'}, {time}"))
    if not matters and not comparison.only_new and not comparison.only_old:
        lines += [TextLine(), TextLine("no differences that are known to affect speed")]

    def section(title: str, entries: list[list[str]]) -> None:
        """Add a heading and entries, of whose texts all but the first are set in, as all their other lines are."""
        if entries:
            lines.extend(title_line(title))
        for texts in entries:
            wrapped_lines = [line for text in texts for line in wrapped(text, width - 6)]
            lines.extend(TextLine(f"{' ' * (6 if number else 2)}{text}") for number, text in enumerate(wrapped_lines))

    # What is likeliest to say why one of the two is slower: what is bad with one, and the first fact of each part.
    bad = [f"{side}: {f.what}" for side, findings in sides for f in findings if f.severity == "bad"]
    first_of_part: dict[str, Difference] = {}
    for fact in matters:
        first_of_part.setdefault(fact.key.partition(".")[0], fact)
    section("Matters most", [[text] for text in [*bad[:1], *map(_change, first_of_part.values())][:MOST]])
    for side, findings in sides:
        if findings:
            lines += title_line(f"Found only in the {side}")
            lines += [line for finding in findings for line in finding_lines(finding, width)]
    section("Affects speed", [[_change(fact), fact.meaning] for fact in matters])
    section("Other differences", [[_change(fact)] for fact in minor])
    return lines


def _change(fact: Difference) -> str:
    """Format a difference; of amounts also the ratio."""
    old, new, times = fact.old, fact.new, ""
    amounts = ("_bytes", "_watts", "mhz_max", "mhz_allowed", "usable", "quota", "allowed", "threads", "load_1")
    if fact.key.endswith(amounts) and _is_number(old) and _is_number(new) and old > 0 and new > 0:
        times = f" (x {new / old:.2g})"
    return f"{fact.key}: {value_in_words(fact.key, old)} -> {value_in_words(fact.key, new)}{times}"


def value_in_words(key: str, value: Any) -> str:
    """Format a value by the unit in its name.

    >>> value_in_words("memory.total_bytes", 16e9), value_in_words("load.steal_share", 0.12)
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
        return percent(value) if key.endswith("_share") else f"{value:g}"
    return str(value)
