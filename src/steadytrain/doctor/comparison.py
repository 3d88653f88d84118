"""Compare two documents of the doctor: what differs, and what of it matters for speed; as lines and as JSON."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from steadytrain.config.plain import plain
from steadytrain.doctor.rules import SEVERITIES, Finding
from steadytrain.doctor.text import VERSION, Line, finding_lines, title_line, wrapped
from steadytrain.format import percent, size

KIND = "steadytrain doctor comparison"
MOST = 3  # differences in the line that tells what matters most


@dataclass(frozen=True)
class FactMeaning:
    """What it means that a fact differs.

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
    FactMeaning("torch.state", "without torch nothing is trained"),
    FactMeaning("torch.sees_gpu", "trains on a GPU or on the CPU: the largest difference there can be"),
    FactMeaning("torch.devices.*.name", "another GPU: its own arithmetic and memory speed"),
    FactMeaning("torch.devices.*.failure", "a GPU that cannot compute"),
    FactMeaning("torch.devices.*.memory_bytes", "the largest batch that fits", 0.02),
    FactMeaning("accelerators.gpus.*.name", "another GPU: its own arithmetic and memory speed"),
    FactMeaning("torch.cuda", "another CUDA: other kernels"),
    FactMeaning("torch.rocm", "another ROCm: other kernels"),
    FactMeaning("torch.version", "other kernels and another scheduler: a few percent either way, sometimes more"),
    FactMeaning("torch.cudnn", "other convolutions"),
    FactMeaning("torch.allowed", "processors that are left once torch is loaded"),
    FactMeaning("accelerators.driver", "rarely more than a percent, unless it is too old"),
    FactMeaning("accelerators.gpus.*.mhz_max", "the clock under load", 0.02),
    FactMeaning("accelerators.gpus.*.memory_mhz_max", "the speed of its memory", 0.02),
    FactMeaning("accelerators.gpus.*.power_limit_watts", "the clock under load", 0.02),
    FactMeaning("accelerators.gpus.*.throttled_by", "why its clock is not higher"),
    FactMeaning("accelerators.gpus.*.pcie_width", "how fast batches reach it"),
    FactMeaning("accelerators.gpus.*.pcie_generation_max", "how fast batches reach it"),
    FactMeaning("accelerators.gpus.*.busy_share", "other work on it", 0.5, 0.1),
    FactMeaning("accelerators.gpus.*.mig", "a part of it, or all"),
    FactMeaning("processor.usable", "decoding, and training on a CPU, scale with it"),
    FactMeaning("processor.quota", "processor time is cut off above it"),
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
    FactMeaning("load.steal_share", "time lost to other guests", 0.5, 0.05),
    FactMeaning("load.pressure_cpu_share", "other work on the processor", 0.5, 0.05),
    FactMeaning("load.pressure_io_share", "other work on the disk", 0.5, 0.05),
    FactMeaning("load.pressure_memory_share", "waiting for memory", 0.5, 0.05),
    FactMeaning("load.load_1", "other work on the processor", 0.5, 1.0),
    FactMeaning("memory.limit_bytes", "what fits, and what the kernel can keep of files", 0.02),
    FactMeaning("memory.total_bytes", "what fits, and what the kernel can keep of files", 0.02),
    FactMeaning("memory.huge_pages", "page faults of training on a CPU"),
    FactMeaning("allocator.preloaded", "the cost of large tensors on a CPU"),
    FactMeaning("allocator.libc", "the cost of large tensors on a CPU"),
    FactMeaning("places.cache.kind", "how fast images are read"),
    FactMeaning("places.cache.network", "how fast images are read"),
    FactMeaning("places.cache.rotational", "a disk that turns reads at random a hundred times slower"),
    FactMeaning("decoders.simplejpeg_error", "JPEGs cannot be read, or can"),
    FactMeaning("decoders.simplejpeg_simd", "JPEGs are decoded several times slower without"),
    FactMeaning("decoders.simplejpeg_turbo", "another decoder of JPEGs"),
    FactMeaning("decoders.pillow_turbo", "JPEGs that are left to Pillow"),
    FactMeaning("decoders.pillow_zlib_ng", "PNGs"),
    FactMeaning("decoders.jpeg", "how many photographs a core feeds"),
    FactMeaning("decoders.parts", "how many photographs a core feeds"),
    FactMeaning("decoders.parts_error", "how many photographs a core feeds"),
    FactMeaning("decoders.resizer", "the pace of scaling images down while packing"),
    FactMeaning("decoders.resizer_error", "the pace of scaling images down while packing"),
    FactMeaning("variables.*", "set for a reason, or left over"),
    FactMeaning("packages.timm.version", "a model's code may differ"),
    FactMeaning("packages.*.fits", "a version that is not supported"),
    FactMeaning("system.clock_source", "the cost of telling the time"),
)
_GPU = re.compile(r"(torch\.devices|accelerators\.gpus)\.\d+")
# What differs between any two machines, or between any two moments, and says nothing of speed.
_IGNORED = (
    *("kind", "version", "made", "findings", "system.host", "system.executable", "system.venv", "system.container_by"),
    *("system.clock_behind_seconds", "torch.folder", "load.load_5", "load.load_15", "processor.mhz", "torch.gpu_error"),
    *("memory.available_bytes", "memory.group_used_bytes", "memory.swap_used_bytes", "places.*.path"),
    *("packages.*.wanted", "places.*.free_bytes", "places.*.free_files", "places.shm.kind", "accelerators.driver_by"),
    *("accelerators.gpus.*.processes", "accelerators.gpus.*.memory_used_bytes", "accelerators.gpus.*.mhz"),
    *("accelerators.gpus.*.memory_mhz", "accelerators.gpus.*.power_watts", "accelerators.gpus.*.temperature"),
    *("accelerators.gpus.*.pcie_generation",),
)


@dataclass(frozen=True)
class Difference:
    """A fact that differs; ``meaning`` is empty where it says nothing of speed."""

    key: str
    old: Any
    new: Any
    meaning: str


@dataclass(frozen=True)
class Comparison:
    """All that differs: findings that are only here, that are only there, and facts."""

    only_new: tuple[Finding, ...]
    only_old: tuple[Finding, ...]
    facts: tuple[Difference, ...]


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> Comparison:
    """Compare two documents, what matters for speed first.

    Args:
        old: the other machine's, or an older one.
        new: this machine's.
    """
    before, after = _flatten(old), _flatten(new)
    differences = []
    for key in dict.fromkeys((*after, *before)):
        rank, meaning = next(
            ((rank, meaning) for rank, meaning in enumerate(MEANINGS) if _fits(key, meaning.key)), (len(MEANINGS), None)
        )
        difference = Difference(key, before.get(key), after.get(key), meaning.says if meaning else "")
        if not _is_ignored(key) and not _is_same(difference.old, difference.new, meaning):
            differences += [(rank, one) for one in _of_one_gpu(difference, before, after)]
    differences.sort(key=lambda pair: pair[0])
    old_findings, new_findings = _findings(old), _findings(new)
    return Comparison(
        tuple(finding for rule, finding in new_findings.items() if rule not in old_findings),
        tuple(finding for rule, finding in old_findings.items() if rule not in new_findings),
        tuple(difference for _, difference in differences),
    )


def value_in_words(key: str, value: Any) -> str:
    """Word a value by the unit in its name.

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


def ratio(difference: Difference) -> str:
    """Say how many times as much it is, for amounts of which more is more; else nothing.

    >>> ratio(Difference("processor.usable", 16, 2, ""))
    'x 0.12'
    """
    old, new = difference.old, difference.new
    if not (_is_number(old) and _is_number(new)) or old <= 0 or new <= 0:
        return ""
    amounts = ("_bytes", "_watts", "mhz_max", "mhz_allowed", "usable", "quota", "allowed", "threads", "load_1")
    return f"x {new / old:.2g}" if difference.key.endswith(amounts) else ""


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and values; a list of tables by its numbers, any other list is a value."""
    if isinstance(value, dict):
        pairs: list[tuple[str, Any]] = [(str(name), inner) for name, inner in value.items()]
    elif isinstance(value, list) and value and all(isinstance(inner, dict) for inner in value):
        pairs = [(str(number), inner) for number, inner in enumerate(value)]
    else:
        return {prefix: None if value in ([], {}) else value}
    flat: dict[str, Any] = {}
    for name, inner in pairs:
        flat |= _flatten(inner, f"{prefix}.{name}" if prefix else name)
    return flat


def _of_one_gpu(difference: Difference, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Difference]:
    """A GPU that only one of the two has is told by its name, and not by all that it is."""
    gpu = _GPU.match(difference.key)
    name = f"{gpu[0]}.name" if gpu else ""
    if not gpu or (name in before and name in after):
        yield difference
    elif difference.key == name:
        yield replace(difference, meaning="a GPU that only one of them has")


def _is_ignored(key: str) -> bool:
    return any(_fits(key, pattern) for pattern in _IGNORED) or key.startswith(("findings.", "accelerators.on_bus"))


def _fits(key: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), key) is not None


def _is_same(old: Any, new: Any, meaning: FactMeaning | None) -> bool:
    if not (_is_number(old) and _is_number(new)) or meaning is None or not meaning.least:
        return bool(old == new)
    largest = max(abs(old), abs(new))
    return bool(largest < meaning.small or abs(old - new) <= meaning.least * largest)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _findings(document: Mapping[str, Any]) -> dict[str, Finding]:
    """A document's findings by rule; what is none is passed over."""
    names = ("rule", "severity", "what", "why", "remedy")
    entries = document.get("findings")
    findings = {}
    for entry in entries if isinstance(entries, list) else []:
        is_whole = isinstance(entry, dict) and all(isinstance(entry.get(name), str) for name in names)
        if is_whole and entry["severity"] in SEVERITIES:
            findings[entry["rule"]] = Finding(**{name: entry[name] for name in names})
    return findings


def comparison_document(old: Mapping[str, Any], new: Mapping[str, Any], comparison: Comparison) -> dict[str, Any]:
    """Return kind, version, which two, the findings of one only, and the facts that differ, what matters first."""
    return {
        "kind": KIND,
        "version": VERSION,
        "old": _origin(old),
        "new": _origin(new),
        "findings": {"only_old": plain(comparison.only_old), "only_new": plain(comparison.only_new)},
        "differences": [{**plain(fact), "matters": bool(fact.meaning)} for fact in comparison.facts],
    }


def comparison_lines(
    old: Mapping[str, Any], new: Mapping[str, Any], comparison: Comparison, *, width: int
) -> list[Line]:
    """Render what differs, old -> new: what matters most, findings, what matters for speed and what it means, the rest.

    Args:
        old: the other document.
        new: this machine's.
        comparison: of the two.
        width: columns.
    """
    matters = [fact for fact in comparison.facts if fact.meaning]
    lines = []
    for word, document in (("old:", old), ("new:", new)):
        origin = _origin(document)
        time = (origin["made"] or "at an unknown time").replace("+00:00", " UTC")
        lines.append(Line(f"{word} {origin['host'] or 'unknown'}, {time}"))
    if not matters and not comparison.only_new and not comparison.only_old:
        lines += [Line(), Line("nothing differs that is known to matter for speed")]
    lines += _section("Matters most", [wrapped(text, width - 6) for text in _most(comparison)])
    for title, findings in (("new", comparison.only_new), ("old", comparison.only_old)):
        if findings:
            lines += title_line(f"Found only in the {title}")
            lines += [line for finding in findings for line in finding_lines(finding, width)]
    rest = [fact for fact in comparison.facts if not fact.meaning]
    for title, facts in (("Matters for speed", matters), ("Other differences", rest)):
        lines += _section(title, [[*wrapped(_change(f), width - 6), *wrapped(f.meaning, width - 6)] for f in facts])
    return lines


def _section(title: str, entries: list[list[str]]) -> Iterator[Line]:
    """A heading and its entries, of whose lines all but the first are set in."""
    if entries:
        yield from title_line(title)
    for texts in entries:
        yield from (Line(f"{' ' * (6 if number else 2)}{text}") for number, text in enumerate(texts))


def _most(comparison: Comparison) -> list[str]:
    """What is likeliest to say why one of the two is slower: what is bad with one, the first fact of each part."""
    sides = (("new", comparison.only_new), ("old", comparison.only_old))
    bad = [f"{side}: {one.what}" for side, findings in sides for one in findings if one.severity == "bad"]
    parts: dict[str, Difference] = {}
    for fact in comparison.facts:
        if fact.meaning:
            parts.setdefault(fact.key.partition(".")[0], fact)
    return [*bad[:1], *map(_change, parts.values())][:MOST]


def _change(fact: Difference) -> str:
    times = ratio(fact)
    words = f"{value_in_words(fact.key, fact.old)} -> {value_in_words(fact.key, fact.new)}"
    return f"{fact.key}: {words}{f' ({times})' if times else ''}"


def _origin(document: Mapping[str, Any]) -> dict[str, str | None]:
    system, made = document.get("system"), document.get("made")
    host = system.get("host") if isinstance(system, dict) else None
    return {"host": host if isinstance(host, str) else None, "made": made if isinstance(made, str) else None}
