"""Render facts and findings: as lines for a terminal or a file, and as one JSON document that can be read back."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from steadytrain.config.plain import parse_json, plain
from steadytrain.doctor.facts import MachineFacts
from steadytrain.doctor.rules import MachineFinding
from steadytrain.errors import InputError
from steadytrain.format import count, percent, size

DOCUMENT_KIND, VERSION = "steadytrain doctor", 1
_REMEDY = "create one with: steady doctor --json > other.json"
UNKNOWN = "unknown"
STYLES = {"bad": "bold red", "warn": "yellow", "note": "cyan"}
LABEL = 14

_TIE = "\N{NO-BREAK SPACE}"
_UNIT = re.compile(r"(?<=\d) (?=([kMGT]?B|%|MHz|W|s)\b|%)")

FactRow = tuple[str, str | None]


@dataclass(frozen=True)
class TextLine:
    """One line; its first ``styled`` characters are shown in ``style`` where colours are."""

    text: str = ""
    style: str = ""
    styled: int = 0


def lines(facts: MachineFacts, findings: Sequence[MachineFinding], *, width: int) -> list[TextLine]:
    """Render all of it in ``width`` columns: the verdict, the findings, the worst first, then the facts."""
    lines = [TextLine(text, "bold", len(text)) for text in wrapped(verdict(facts, findings), width)]
    lines += [TextLine()] if findings else []
    lines += [line for finding in findings for line in finding_lines(finding, width)]
    for title, group in _GROUPS.items():
        rows = [(label, value) for label, value in group(facts) if value]
        lines += title_line(title) if rows else []
        for label, value in rows:
            first, *continued = wrapped(value, width - LABEL - 2) or [""]
            lines.append(TextLine(f"  {label:<{LABEL - 1}} {first}".rstrip()))
            lines += [TextLine(" " * (LABEL + 2) + text) for text in continued]
    return lines


def finding_lines(finding: MachineFinding, width: int) -> Iterator[TextLine]:
    """Render a finding after its severity: what, why, and what to do."""
    indent, mark = " " * 6, finding.severity
    for number, text in enumerate(wrapped(finding.what, width - 6)):
        yield TextLine(f"{mark:<6}{text}", STYLES[mark], len(mark)) if number == 0 else TextLine(indent + text)
    for text in wrapped(finding.why, width - 6):
        yield TextLine(indent + text)
    for number, text in enumerate(wrapped(finding.remedy, width - 9)):
        yield TextLine(f"{indent}{'-> ' if number == 0 else '   '}{text}")


def title_line(title: str) -> list[TextLine]:
    """Render a heading, with an empty line before it."""
    return [TextLine(), TextLine(title, "bold", len(title))]


def wrapped(text: str, width: int) -> list[str]:
    """Wrap to at most ``width`` columns; paths are not broken, nor numbers from their units."""
    tied = _UNIT.sub(_TIE, text)
    lines = textwrap.wrap(tied, max(width, 20), break_long_words=False, break_on_hyphens=False)
    return [line.replace(_TIE, " ") for line in lines]


def _machine(facts: MachineFacts) -> Iterator[FactRow]:
    of = facts.system
    yield "host", of.host
    yield "system", _joined(of.distribution, f"{of.system or ''} {of.kernel or ''}".strip())
    kind = {True: "virtual", False: "not virtual", None: None}[of.virtual]
    yield "hardware", _joined(of.hardware, kind) or UNKNOWN
    yield "container", f"{of.container or UNKNOWN}{f' ({of.container_by})' if of.container_by else ''}"
    yield "python", _joined(of.python, of.venv or "no virtual environment")
    yield "clock", of.clock_source
    limits = facts.limits
    yield "open files", f"{limits.open_files}, {limits.open_files_most or 'any'} at most" if limits.open_files else None


def _processor(facts: MachineFacts) -> Iterator[FactRow]:
    of, load = facts.processor, facts.load
    yield "model", _joined(of.model or UNKNOWN, of.architecture)
    yield "instructions", " ".join(of.features) or of.isa
    quota = "no quota" if of.quota is None else f"a quota of {count(of.quota, 'core')}"
    affinity = None if of.allowed is None else f"{of.allowed} by affinity"
    yield "usable cores", f"{of.usable or UNKNOWN} ({_joined(affinity, quota)})"
    smt = {True: "SMT on", False: "SMT off", None: None}[of.smt]
    counts = ((of.logical, "logical core"), (of.physical, "physical core"), (of.sockets, "socket"))
    parts = [count(num, noun) for num, noun in counts if num is not None]
    yield "there are", _joined(*parts, smt, None if of.numa_nodes is None else count(of.numa_nodes, "NUMA node"))
    clock = None if of.mhz is None else f"{of.mhz:.0f} MHz now"
    most = None if of.mhz_max is None else f"{of.mhz_max:.0f} at most"
    governor = of.governor and f"governor {of.governor}{f' ({of.frequency_driver})' if of.frequency_driver else ''}"
    yield "clock", _joined(clock, most, governor) or UNKNOWN
    loads = [f"{value:.1f}" for value in (load.load_1, load.load_5, load.load_15) if value is not None]
    yield "load", f"{' '.join(loads)} (1, 5, 15 minutes)" if loads else None
    shares = (
        ("a core", load.pressure_cpu_share),
        ("memory", load.pressure_memory_share),
        ("disk", load.pressure_io_share),
    )
    waits = _joined(*(f"{percent(share)} for {resource}" for resource, share in shares if share is not None))
    yield "waiting", f"{waits} (last 10 s)" if waits else None
    yield "withheld", None if load.steal_share is None else f"{percent(load.steal_share)} by the hypervisor"


def _memory(facts: MachineFacts) -> Iterator[FactRow]:
    of = facts.memory
    limit = "no limit below it" if of.limit_bytes is None else f"limit {size(of.limit_bytes)} by a control group"
    yield "memory", _joined(_of(of.available_bytes, of.total_bytes, "available"), limit)
    swap = None if of.swap_total_bytes is None else "none"
    yield "swap", _of(of.swap_used_bytes, of.swap_total_bytes, "used") if of.swap_total_bytes else swap
    defrag = of.huge_pages_defrag and f"defragmented: {of.huge_pages_defrag}"
    yield "huge pages", _joined(of.huge_pages, defrag) or UNKNOWN
    yield "overcommit", of.overcommit
    loaded = ", ".join(facts.allocator.preloaded or ())
    yield "allocator", _joined(loaded or None, facts.allocator.libc or UNKNOWN)
    yield "steadytrain", facts.allocator.by_steadytrain


def _folders(facts: MachineFacts) -> Iterator[FactRow]:
    for name, place in facts.places.items():
        kind = place.kind and f"{place.kind} (network)" if place.network else place.kind
        writable = "not writable" if place.writable is False else None
        free = _of(place.free_bytes, place.total_bytes, "free")
        yield "/dev/shm" if name == "shm" else name, f"{_joined(kind or UNKNOWN, free, writable)}: {place.path}"


def _gpus(facts: MachineFacts) -> Iterator[FactRow]:
    of = facts.accelerators
    none = "none" if not of.gpus else None
    bus = ", ".join(of.on_bus or ())
    yield "found", f"on the bus only: {bus}" if none and bus else none
    yield "driver", f"{of.driver} (reported by {of.driver_by})" if of.driver else None
    for index, gpu in of.numbered:
        hidden = None if gpu.visible else "hidden by CUDA_VISIBLE_DEVICES"
        capability = gpu.capability and f"compute capability {gpu.capability}"
        yield f"GPU {index}", _joined(gpu.name, capability, hidden)
        busy = None if gpu.busy_share is None else f"{percent(gpu.busy_share)} busy"
        yield "", _joined(_of(gpu.memory_used_bytes, gpu.memory_bytes, "used"), busy)
        for process in gpu.processes or ():
            memory = process.memory_bytes and size(process.memory_bytes)
            yield "", _joined(f"{process.name or 'process'} ({process.pid})", memory)
        clock = None if gpu.mhz is None else f"{gpu.mhz} of {gpu.mhz_max or UNKNOWN} MHz"
        memory = gpu.memory_mhz and f"memory {gpu.memory_mhz} of {gpu.memory_mhz_max or UNKNOWN} MHz"
        throttling = f"limited by {', '.join(gpu.throttled_by)}" if gpu.throttled_by else None
        yield "", _joined(clock, memory, throttling)
        watts = None if gpu.power_limit_watts is None else f"limit {gpu.power_limit_watts:.0f} W"
        default = gpu.power_default_watts and f"default {gpu.power_default_watts:.0f} W"
        yield "", _joined(watts, default, None if gpu.temperature is None else f"{gpu.temperature} degrees")
        link = gpu.pcie_width and f"PCIe {gpu.pcie_generation or '?'} x{gpu.pcie_width}"
        most = gpu.pcie_width_max and f"{gpu.pcie_generation_max or '?'} x{gpu.pcie_width_max} at most"
        yield "", _joined(link, most)
        switches = (("ECC", gpu.ecc), ("MIG", gpu.mig), ("persistence", gpu.persistence))
        yield "", _joined(*(f"{name} {'on' if value else 'off'}" for name, value in switches if value is not None))


def _torch(facts: MachineFacts) -> Iterator[FactRow]:
    of = facts.torch
    if of.state != "works":
        yield "state", _joined(of.state or UNKNOWN, of.error)
        return
    build = f"CUDA {of.cuda}" if of.cuda else f"ROCm {of.rocm}" if of.rocm else "CPU only"
    yield "version", _joined(of.version, build, of.cudnn and f"cuDNN {of.cudnn}", of.nccl and f"NCCL {of.nccl}")
    yield "built for", " ".join(of.built_for)
    yield "sees", _joined(*(f"{device.name} ({device.capability})" for device in of.devices)) or "no GPU"
    libraries = [
        name for name, available in (("oneDNN", of.onednn), ("MKL", of.mkl), ("OpenMP", of.openmp)) if available
    ]
    extras = [*of.isa_extras, *libraries]
    yield "on the CPU", _joined(of.isa, *extras)
    inter = None if of.interop_threads is None else f"{of.interop_threads} between operations"
    yield "threads", _joined(None if of.threads is None else str(of.threads), inter)
    yield "torchvision", of.torchvision or (of.torchvision_error and f"broken: {of.torchvision_error}")
    yield "folder", of.folder


def _decoders(facts: MachineFacts) -> Iterator[FactRow]:
    of = facts.decoders
    simd = {True: "vector code", False: "no vector code", None: None}[of.simplejpeg_simd]
    jpeg = f"simplejpeg, libjpeg-turbo {of.simplejpeg_turbo or UNKNOWN}"
    jpeg = f"broken: {of.simplejpeg_error}" if of.simplejpeg_error else _joined(jpeg, simd)
    states = {None: jpeg, "no": f"{jpeg}; no native decoder", "idle": f"{jpeg}; native decoder idle: no AVX2"}
    state = states.get(of.parts, f"native decoder (version {of.parts}, AVX2); other JPEGs: {jpeg}")
    yield "JPEG", f"{jpeg}; the native decoder is broken: {of.parts_error}" if of.parts_error else state
    turbo = "no libjpeg-turbo" if of.pillow_turbo == "no" else f"libjpeg-turbo {of.pillow_turbo or UNKNOWN}"
    switches = (("zlib-ng", of.pillow_zlib_ng), ("WebP", of.pillow_webp), ("AVIF", of.pillow_avif))
    more = (*switches, ("JPEG 2000", of.pillow_jpeg2000))
    parts = [name if available else f"no {name}" for name, available in more if available is not None]
    yield "all else", f"broken: {of.pillow_error}" if of.pillow_error else _joined("Pillow", turbo, *parts)
    scaling = "numpy" if of.resizer == "no" else f"cykooz-resizer {of.resizer or UNKNOWN}"
    yield "scaling", f"numpy (cykooz-resizer is broken: {of.resizer_error})" if of.resizer_error else scaling


def _packages(facts: MachineFacts) -> Iterator[FactRow]:
    for label, is_needed in (("needed", True), ("others", False)):
        chosen = {name: package for name, package in facts.packages.items() if bool(package.wanted) is is_needed}
        yield label, _joined(*(f"{name}{_TIE}{package.version or 'missing'}" for name, package in chosen.items()))


_GROUPS: dict[str, Callable[[MachineFacts], Iterable[FactRow]]] = {
    "Machine": _machine,
    "Processor": _processor,
    "Memory": _memory,
    "Folders": _folders,
    "GPUs": _gpus,
    "torch": _torch,
    "Decoders": _decoders,
    "Packages": _packages,
    "Environment": lambda facts: facts.variables.items(),
}


def _of(amount: int | None, total: int | None, word: str) -> str | None:
    return None if amount is None or total is None else f"{size(amount)} of {size(total)} {word}"


def _joined(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part)


def verdict(facts: MachineFacts, findings: Sequence[MachineFinding]) -> str:
    """Describe what training would run on, and count the findings of each severity.

    >>> verdict(MachineFacts(), [])
    'the device that training would use is unknown: no problems found'
    """
    counts = Counter(finding.severity for finding in findings)
    bad = [f"{counts['bad']} bad"] if counts["bad"] else []
    warnings = [count(counts["warn"], "warning")] if counts["warn"] else []
    notes = [count(counts["note"], "note")] if counts["note"] else []
    return f"{_runs_on(facts)}: {', '.join([*([*bad, *warnings] or ['no problems found']), *notes])}"


def _runs_on(facts: MachineFacts) -> str:
    torch, usable = facts.torch, facts.processor.usable
    if torch.state is None:
        return "the device that training would use is unknown"
    if torch.state != "works":
        return f"cannot train, torch {'is ' * (torch.state in ('missing', 'broken'))}{torch.state}"
    if torch.sees_gpu:
        names = Counter(gpu.name for gpu in torch.devices if gpu.failure is None)
        listed = ", ".join(name if num == 1 else f"{num} x {name}" for name, num in names.items())
        return f"trains on {'one of ' * (names.total() > 1)}{listed}" if listed else "would train on a GPU that fails"
    return "trains on the CPU" if usable is None else f"trains on the CPU, {count(usable, 'core')}"


def document(facts: MachineFacts, findings: Iterable[MachineFinding]) -> dict[str, Any]:
    """Return kind, version, the time, the findings, and each part of the facts under its name."""
    created = datetime.now(UTC).isoformat(timespec="seconds")
    parts: dict[str, Any] = plain(facts)
    return {"kind": DOCUMENT_KIND, "version": VERSION, "made": created, "findings": [*map(plain, findings)], **parts}


def read(path: Path) -> dict[str, Any]:
    """Read a document from a file.

    Raises:
        InputError: the file cannot be read, or is something else.
    """
    try:
        document = parse_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"cannot read {path} ({error.strerror}): {_REMEDY}") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not a JSON document ({error}): {_REMEDY}") from error
    kind = document.get("kind") if isinstance(document, dict) else None
    if not isinstance(document, dict) or kind != DOCUMENT_KIND:
        what = (
            f"has kind {kind!r}, not {DOCUMENT_KIND!r}" if isinstance(kind, str) else "was not written by steady doctor"
        )
        raise InputError(f"{path} {what}: {_REMEDY}")
    if document.get("version") != VERSION:
        raise InputError(f"{path} has version {document.get('version')!r}; this steadytrain reads {VERSION}: {_REMEDY}")
    return document
