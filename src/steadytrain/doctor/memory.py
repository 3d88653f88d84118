"""Memory: of the machine, of the control group, and who hands it out."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from pathlib import Path

import psutil

from steadytrain.doctor.facts import Allocator, Limits, Memory
from steadytrain.machine import facts
from steadytrain.machine.procfs import chosen, counters, number, read, table, whole

_OVERCOMMIT: dict[int | None, str] = {0: "heuristic", 1: "always", 2: "never"}
_ALLOCATORS = re.compile(r"/(lib(?:jemalloc|tcmalloc|mimalloc|hoard|tbbmalloc)[^/\s]*)$", re.MULTILINE)
_FOREIGN = re.compile(r"jemalloc|tcmalloc|mimalloc|hoard|tbbmalloc")


def memory(root: Path) -> Memory:
    """The facts about memory.

    Args:
        root: where ``proc`` and ``sys`` lie.
    """
    told = {name: _bytes(value) for name, value in table(read(root / "proc/meminfo")).items()}
    total, available = told.get("MemTotal"), told.get("MemAvailable")
    if total is None:
        now = psutil.virtual_memory()
        total, available = now.total, now.available
    limit, used = _group(root, total)
    if limit is not None and used is not None and available is not None:
        available = max(0, min(available, limit - used))
    swap, swap_free = told.get("SwapTotal"), told.get("SwapFree")
    huge = root / "sys/kernel/mm/transparent_hugepage"
    return Memory(
        total_bytes=total,
        available_bytes=available,
        limit_bytes=limit,
        group_used_bytes=used,
        swap_total_bytes=swap,
        swap_used_bytes=None if swap is None or swap_free is None else swap - swap_free,
        swappiness=number(root / "proc/sys/vm/swappiness"),
        overcommit=_OVERCOMMIT.get(number(root / "proc/sys/vm/overcommit_memory")),
        huge_pages=chosen(huge / "enabled"),
        huge_pages_defrag=chosen(huge / "defrag"),
        out_of_memory_kills=_kills(root),
    )


def _bytes(text: str) -> int | None:
    """``16 kB`` in bytes."""
    amount = whole(text.split()[0]) if text else None
    return None if amount is None else amount * (1024 if text.endswith("kB") else 1)


def _group(root: Path, total: int) -> tuple[int | None, int | None]:
    """The tightest limit of the control groups around this process below the machine's memory, and what is used of it.

    Of the pages of files the kernel can drop those that were not used lately: they are not counted, as elsewhere.
    """
    found: list[tuple[int, int | None]] = []
    for group in facts.groups(root, "memory"):
        for limit_file, used_file, droppable in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit, used = number(group / limit_file), number(group / used_file)
            if limit is not None and 0 < limit < total:
                idle = counters(group / "memory.stat").get(droppable, 0)
                found.append((limit, None if used is None else max(0, used - idle)))
    return min(found, default=(None, None), key=lambda pair: pair[0])


def _kills(root: Path) -> int | None:
    """How often the kernel ended a process of the control group for want of memory."""
    for group in facts.groups(root, "memory"):
        for file in ("memory.events", "memory.oom_control"):
            told = counters(group / file)
            if "oom_kill" in told:
                return told["oom_kill"]
    return None


def limits() -> Limits:
    """What ``ulimit`` tells."""
    try:
        import resource
    except ImportError:  # Windows
        return Limits()

    def of(name: str, which: int = 0) -> int | None:
        value = resource.getrlimit(getattr(resource, name))[which] if hasattr(resource, name) else -1
        return None if value in (-1, resource.RLIM_INFINITY) else value

    return Limits(
        open_files=of("RLIMIT_NOFILE"),
        open_files_most=of("RLIMIT_NOFILE", 1),
        processes=of("RLIMIT_NPROC"),
        address_space_bytes=of("RLIMIT_AS"),
    )


def allocator(root: Path, variables: Mapping[str, str]) -> Allocator:
    """Who hands out memory in this process and in those it starts."""
    name, version = platform.libc_ver()
    libc = f"{name} {version}".strip() or None
    maps = read(root / "proc/self/maps")
    preloaded = None if maps is None else tuple(dict.fromkeys(_ALLOCATORS.findall(maps)))
    asked = [Path(word).name for word in re.split(r"[:\s]+", variables.get("LD_PRELOAD", "")) if word]
    if missing := [f"{file} (not loaded)" for file in asked if _FOREIGN.search(file) and file not in (preloaded or ())]:
        preloaded = (*(preloaded or ()), *missing)
    return Allocator(libc=libc, preloaded=preloaded, by_steadytrain=_ours(name, preloaded))


def _ours(libc: str, preloaded: tuple[str, ...] | None) -> str:
    if preloaded:
        return "nothing: its settings are glibc's, and another allocator is loaded"
    if libc != "glibc":
        return "nothing: its settings are glibc's"
    return "training on a CPU keeps freed memory, on huge pages"
