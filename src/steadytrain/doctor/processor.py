"""The processor, how much of it this process may use, and what else wants it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

from steadytrain.doctor.facts import Load, Processor
from steadytrain.machine import facts
from steadytrain.machine.procfs import beside, counters, decimal, number, read, span, table

# The instructions beyond the basic ones for which torch and its libraries have code of their own, in the kernel's
# names. The last rows are ARM's.
_FEATURES = (
    *("avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)


def processor(root: Path) -> Processor:
    """The facts about the processor.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    blocks = _blocks(root)
    first = blocks[0] if blocks else {}
    features = set((first.get("flags") or first.get("Features") or "").split())
    sockets, physical = _topology(root, blocks)
    logical = len(blocks) or psutil.cpu_count()
    frequency = root / "sys/devices/system/cpu/cpu0/cpufreq"
    return Processor(
        model=facts.cpu_model(root) or None,
        architecture=platform.machine() or None,
        isa=facts.isa(root) or None,
        features=tuple(name for name in _FEATURES if name in features),
        sockets=sockets,
        physical=physical,
        logical=logical,
        smt=_smt(root, logical, physical),
        allowed=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        quota=facts.quota(root),
        usable=facts.cores(root),
        numa_nodes=span(read(root / "sys/devices/system/node/online")),
        mhz=_mhz(root, blocks),
        mhz_max=_megahertz(frequency / "cpuinfo_max_freq"),
        mhz_allowed=_megahertz(frequency / "scaling_max_freq"),
        governor=read(frequency / "scaling_governor"),
        frequency_driver=read(frequency / "scaling_driver"),
        energy_preference=read(frequency / "energy_performance_preference"),
    )


def _blocks(root: Path) -> list[dict[str, str]]:
    """``/proc/cpuinfo``, a table for each processor."""
    texts = (read(root / "proc/cpuinfo") or "").split("\n\n")
    return [told for text in texts if "processor" in (told := table(text))]


def _topology(root: Path, blocks: list[dict[str, str]]) -> tuple[int | None, int | None]:
    """Sockets and physical cores."""
    places = set()
    for folder in beside(root / "sys/devices/system/cpu", "cpu[0-9]*/topology"):
        places.add((number(folder / "physical_package_id"), number(folder / "core_id")))
    if not places:
        places = {(int(b["physical id"]), int(b["core id"])) for b in blocks if b.keys() >= {"physical id", "core id"}}
    if not places or any(None in place for place in places):
        return None, psutil.cpu_count(logical=False) if not blocks else None
    sockets = {package for package, _ in places}
    return None if -1 in sockets else len(sockets), len(places)


def _smt(root: Path, logical: int | None, physical: int | None) -> bool | None:
    active = read(root / "sys/devices/system/cpu/smt/active")
    if active in ("0", "1"):
        return active == "1"
    return None if logical is None or physical is None else logical > physical


def _mhz(root: Path, blocks: list[dict[str, str]]) -> float | None:
    """The clock now, over all processors; in a virtual machine often a constant."""
    files = beside(root / "sys/devices/system/cpu", "cpu[0-9]*/cpufreq/scaling_cur_freq")
    told = [_megahertz(file) for file in files] or [decimal(block.get("cpu MHz")) for block in blocks]
    known = [mhz for mhz in told if mhz is not None]
    return round(sum(known) / len(known), 1) if known else None


def _megahertz(path: Path) -> float | None:
    kilohertz = number(path)
    return None if kilohertz is None else kilohertz / 1000


def load(root: Path) -> Load:
    """The facts about the load, all but :func:`stolen`, which takes a while.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    loads = [decimal(word) for word in (read(root / "proc/loadavg") or "").split()[:3]]
    one, five, fifteen = loads if len(loads) == 3 else (None, None, None)
    return Load(
        load_1=one,
        load_5=five,
        load_15=fifteen,
        pressure_cpu_share=_pressure(root, "cpu"),
        pressure_memory_share=_pressure(root, "memory"),
        pressure_io_share=_pressure(root, "io"),
        throttled_share=_throttled(root),
    )


def ticks(root: Path) -> tuple[int, int] | None:
    """What the hypervisor withheld since the start, and all time, in ticks over all processors."""
    first = (read(root / "proc/stat") or "").split("\n")[0].split()
    if len(first) < 9 or first[0] != "cpu":
        return None
    # User, nice, system, idle, iowait, irq, softirq, steal; what follows (guests) is counted in user already.
    times = [int(word) for word in first[1:9]]
    return times[7], sum(times)


def stolen(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """The share that the hypervisor withheld between two answers of :func:`ticks`.

    >>> stolen((10, 1000), (60, 1200))
    0.25
    """
    if before is None or after is None or after[1] <= before[1]:
        return None
    return round((after[0] - before[0]) / (after[1] - before[1]), 4)


def _pressure(root: Path, what: str) -> float | None:
    """``some avg10=1.53 avg60=...`` as a share."""
    for line in (read(root / "proc/pressure" / what) or "").splitlines():
        kind, *values = line.split()
        average = decimal(dict(value.split("=", 1) for value in values if "=" in value).get("avg10"))
        if kind == "some" and average is not None:
            return round(average / 100, 4)
    return None


def _throttled(root: Path) -> float | None:
    """The share of its periods in which a control group had used up its quota; the worst of those around us."""
    shares = []
    for group in facts.groups(root, "cpu"):
        told = counters(group / "cpu.stat")
        if told.get("nr_periods"):
            shares.append(told.get("nr_throttled", 0) / told["nr_periods"])
    return round(max(shares), 4) if shares else None
