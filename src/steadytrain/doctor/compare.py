"""Two documents of the doctor: what differs, and what of it matters for speed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from steadytrain.doctor.finding import SEVERITIES, Finding, percent, size


@dataclass(frozen=True)
class Meaning:
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


# The first to fit counts, and they are told in this order.
MEANINGS = (
    Meaning("torch.state", "without torch nothing is trained"),
    Meaning("torch.sees_gpu", "trains on a GPU or on the CPU: the largest difference there can be"),
    Meaning("torch.devices.*.name", "another GPU: its own arithmetic and memory speed"),
    Meaning("torch.devices.*.failure", "a GPU that cannot compute"),
    Meaning("torch.devices.*.memory_bytes", "the largest batch that fits", 0.02),
    Meaning("accelerators.gpus.*.name", "another GPU: its own arithmetic and memory speed"),
    Meaning("torch.cuda", "another CUDA: other kernels"),
    Meaning("torch.rocm", "another ROCm: other kernels"),
    Meaning("torch.version", "other kernels and another scheduler: a few percent either way, sometimes more"),
    Meaning("torch.cudnn", "other convolutions"),
    Meaning("torch.allowed", "processors that are left once torch is loaded"),
    Meaning("accelerators.driver", "rarely more than a percent, unless it is too old"),
    Meaning("accelerators.gpus.*.mhz_max", "the clock under load", 0.02),
    Meaning("accelerators.gpus.*.memory_mhz_max", "the speed of its memory", 0.02),
    Meaning("accelerators.gpus.*.power_limit_watts", "the clock under load", 0.02),
    Meaning("accelerators.gpus.*.throttled_by", "why its clock is not higher"),
    Meaning("accelerators.gpus.*.pcie_width", "how fast batches reach it"),
    Meaning("accelerators.gpus.*.pcie_generation_max", "how fast batches reach it"),
    Meaning("accelerators.gpus.*.busy_share", "other work on it", 0.5, 0.1),
    Meaning("accelerators.gpus.*.mig", "a part of it, or all"),
    Meaning("processor.usable", "decoding, and training on a CPU, scale with it"),
    Meaning("processor.quota", "processor time is cut off above it"),
    Meaning("processor.model", "the speed of one core"),
    Meaning("processor.isa", "the width of vector code: decoding, and training on a CPU"),
    Meaning("processor.features", "bf16, int8 and matrix instructions: training on a CPU"),
    Meaning("torch.isa", "the width of torch's own vector code"),
    Meaning("torch.isa_extras", "bf16, int8 and matrix instructions: training on a CPU"),
    Meaning("processor.mhz_max", "the speed of one core", 0.02),
    Meaning("processor.mhz_allowed", "the speed of one core", 0.02),
    Meaning("processor.governor", "how fast the clock rises"),
    Meaning("processor.energy_preference", "how fast the clock rises"),
    Meaning("processor.smt", "two threads on a core are worth about 1.3 of one"),
    Meaning("processor.numa_nodes", "memory of another node is slower"),
    Meaning("torch.threads", "threads that compute on a CPU"),
    Meaning("load.throttled_share", "time lost to the quota", 0.5, 0.05),
    Meaning("load.steal_share", "time lost to other guests", 0.5, 0.05),
    Meaning("load.pressure_cpu_share", "other work on the processor", 0.5, 0.05),
    Meaning("load.pressure_io_share", "other work on the disk", 0.5, 0.05),
    Meaning("load.pressure_memory_share", "waiting for memory", 0.5, 0.05),
    Meaning("load.load_1", "other work on the processor", 0.5, 1.0),
    Meaning("memory.limit_bytes", "what fits, and what the kernel can keep of files", 0.02),
    Meaning("memory.total_bytes", "what fits, and what the kernel can keep of files", 0.02),
    Meaning("memory.huge_pages", "page faults of training on a CPU"),
    Meaning("allocator.preloaded", "the cost of large tensors on a CPU"),
    Meaning("allocator.libc", "the cost of large tensors on a CPU"),
    Meaning("places.cache.kind", "how fast images are read"),
    Meaning("places.cache.network", "how fast images are read"),
    Meaning("places.cache.rotational", "a disk that turns reads at random a hundred times slower"),
    Meaning("decoders.simplejpeg_error", "JPEGs cannot be read, or can"),
    Meaning("decoders.simplejpeg_simd", "JPEGs are decoded several times slower without"),
    Meaning("decoders.simplejpeg_turbo", "another decoder of JPEGs"),
    Meaning("decoders.pillow_turbo", "JPEGs that are left to Pillow"),
    Meaning("decoders.pillow_zlib_ng", "PNGs"),
    Meaning("decoders.jpeg", "how many photographs a core feeds"),
    Meaning("decoders.parts", "how many photographs a core feeds"),
    Meaning("decoders.parts_error", "how many photographs a core feeds"),
    Meaning("decoders.resizer", "the pace of scaling images down while packing"),
    Meaning("decoders.resizer_error", "the pace of scaling images down while packing"),
    Meaning("variables.*", "set for a reason, or left over"),
    Meaning("packages.timm.version", "a model's code may differ"),
    Meaning("packages.*.fits", "a version that is not supported"),
    Meaning("system.clock_source", "the cost of telling the time"),
)
_GPU = re.compile(r"(torch\.devices|accelerators\.gpus)\.\d+")
# What differs between any two machines, or between any two moments, and says nothing of speed.
_IGNORED = (
    *("kind", "version", "made", "findings", "system.host", "system.executable", "system.venv", "system.container_by"),
    *("system.clock_behind_seconds", "torch.folder", "load.load_5", "load.load_15", "processor.mhz", "torch.gpu_error"),
    *(
        "memory.available_bytes",
        "memory.group_used_bytes",
        "memory.swap_used_bytes",
        "places.*.path",
        "packages.*.wanted",
    ),
    *("places.*.free_bytes", "places.*.free_files", "places.shm.kind", "accelerators.driver_by"),
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
    """What differs between two documents, what matters for speed first.

    Args:
        old: the other machine's, or an older one.
        new: this machine's.
    """
    before, after = _flat(old), _flat(new)
    found = []
    for key in dict.fromkeys((*after, *before)):
        place, meaning = _meaning(key)
        one = Difference(key, before.get(key), after.get(key), meaning.says if meaning else "")
        if not _is_ignored(key) and not _is_same(one.old, one.new, meaning):
            found += [(place, told) for told in _of_one_gpu(one, before, after)]
    found.sort(key=lambda pair: pair[0])
    there, here = _findings(old), _findings(new)
    return Comparison(
        tuple(one for rule, one in here.items() if rule not in there),
        tuple(one for rule, one in there.items() if rule not in here),
        tuple(one for _, one in found),
    )


def said(key: str, value: Any) -> str:
    """A value in words, by the unit in its name.

    >>> said("memory.total_bytes", 16e9), said("load.steal_share", 0.12), said("torch.sees_gpu", True)
    ('16.0 GB', '12 %', 'yes')
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
    """How many times as much it is, for amounts of which more is more; else nothing.

    >>> ratio(Difference("processor.usable", 16, 2, ""))
    'x 0.12'
    """
    old, new = difference.old, difference.new
    if not (_is_number(old) and _is_number(new)) or old <= 0 or new <= 0:
        return ""
    amounts = ("_bytes", "_watts", "mhz_max", "mhz_allowed", "usable", "quota", "allowed", "threads", "load_1")
    return f"x {new / old:.2g}" if difference.key.endswith(amounts) else ""


def _flat(told: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys and values; a list of tables by its numbers, any other list is a value."""
    if isinstance(told, dict):
        pairs: list[tuple[str, Any]] = [(str(name), value) for name, value in told.items()]
    elif isinstance(told, list) and told and all(isinstance(one, dict) for one in told):
        pairs = [(str(number), value) for number, value in enumerate(told)]
    else:
        return {prefix: None if told in ([], {}) else told}
    flat: dict[str, Any] = {}
    for name, value in pairs:
        flat |= _flat(value, f"{prefix}.{name}" if prefix else name)
    return flat


def _meaning(key: str) -> tuple[int, Meaning | None]:
    fitting = ((place, one) for place, one in enumerate(MEANINGS) if _fits(key, one.key))
    return next(fitting, (len(MEANINGS), None))


def _of_one_gpu(one: Difference, before: Mapping[str, Any], after: Mapping[str, Any]) -> Iterator[Difference]:
    """A GPU that only one of the two has is told by its name, and not by all that it is."""
    gpu = _GPU.match(one.key)
    name = f"{gpu[0]}.name" if gpu else ""
    if not gpu or (name in before and name in after):
        yield one
    elif one.key == name:
        yield replace(one, meaning="a GPU that only one of them has")


def _is_ignored(key: str) -> bool:
    return any(_fits(key, pattern) for pattern in _IGNORED) or key.startswith(("findings.", "accelerators.on_bus"))


def _fits(key: str, pattern: str) -> bool:
    return re.fullmatch(re.escape(pattern).replace(r"\*", r"[^.]+"), key) is not None


def _is_same(old: Any, new: Any, meaning: Meaning | None) -> bool:
    if not (_is_number(old) and _is_number(new)) or meaning is None or not meaning.least:
        return bool(old == new)
    largest = max(abs(old), abs(new))
    return bool(largest < meaning.small or abs(old - new) <= meaning.least * largest)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _findings(told: Mapping[str, Any]) -> dict[str, Finding]:
    """A document's findings by rule; what is none is passed over."""
    return {one.rule: one for entry in _entries(told.get("findings")) for one in _finding(entry)}


def _entries(told: Any) -> list[Any]:
    return told if isinstance(told, list) else []


def _finding(entry: Any) -> Iterator[Finding]:
    names = ("rule", "severity", "what", "why", "remedy")
    whole = isinstance(entry, dict) and all(isinstance(entry.get(name), str) for name in names)
    if whole and entry["severity"] in SEVERITIES:
        yield Finding(**{name: entry[name] for name in names})
