"""The operating system, Python, what runs around them, and the clock."""

from __future__ import annotations

import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from steadytrain.doctor.facts import System
from steadytrain.machine.procfs import beside, read, table

# What a process in a container finds in the names of its control groups and in where its files are mounted from.
_GROUPS = (
    ("kubernetes", re.compile(r"/kubepods\b|kubepods[-.]|/kubelet/pods/")),
    ("podman", re.compile(r"libpod-|/overlay-containers/|/libpod/")),
    ("docker", re.compile(r"/docker/[0-9a-f]{12}|docker-[0-9a-f]{12}|/docker/containers/")),
    ("lxc", re.compile(r"/lxc/|lxc\.payload|/lxc\.monitor")),
)
_GUESTS = (
    "QEMU",
    "KVM",
    "VMware",
    "VirtualBox",
    "Xen",
    "Virtual Machine",
    "Google Compute Engine",
    "Bochs",
    "OpenStack",
)


def system(root: Path, variables: Mapping[str, str]) -> System:
    """The facts about the system.

    Args:
        root: where ``proc``, ``sys``, ``etc`` and ``run`` lie.
        variables: of the environment.
    """
    container, by = _container(root, variables)
    return System(
        host=platform.node() or None,
        system=platform.system() or None,
        kernel=read(root / "proc/sys/kernel/osrelease") or platform.release() or None,
        distribution=_distribution(root),
        hardware=_hardware(root),
        virtual=_virtual(root),
        container=container,
        container_by=by,
        python=platform.python_version(),
        executable=sys.executable or None,
        venv=sys.prefix if sys.prefix != sys.base_prefix else None,
        clock_source=read(root / "sys/devices/system/clocksource/clocksource0/current_clocksource"),
        clock_behind_seconds=_behind(Path(__file__).parent),
    )


def _distribution(root: Path) -> str | None:
    told = table(read(root / "etc/os-release"), "=").get("PRETTY_NAME")
    mac = platform.mac_ver()[0]
    return (told or "").strip("\"'") or (f"macOS {mac}" if mac else None)


def _hardware(root: Path) -> str | None:
    """The maker's name for the machine; a virtual one has its hypervisor's."""
    words = [read(root / "sys/class/dmi/id" / name) for name in ("sys_vendor", "product_name")]
    board = read(root / "proc/device-tree/model")
    return " ".join(word for word in words if word) or (board.rstrip("\0") if board else None)


def _virtual(root: Path) -> bool | None:
    """Whether a hypervisor runs this: by the processor's own flag where there is one (x86), else by the name."""
    flags = table((read(root / "proc/cpuinfo") or "").split("\n\n")[0]).get("flags")
    if flags is not None:
        return "hypervisor" in flags.split()
    hardware = _hardware(root)
    return None if hardware is None else any(guest in hardware for guest in _GUESTS)


def _container(root: Path, variables: Mapping[str, str]) -> tuple[str | None, str | None]:
    """Its kind and the evidence; ``none`` where there is no sign of one, None where nobody can know."""
    if not (root / "proc/self").exists():
        return None, None
    return next(_signs(root, variables), ("none", None))


def _signs(root: Path, variables: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Signs of a container, the surest and most telling first."""
    if "KUBERNETES_SERVICE_HOST" in variables:
        yield "kubernetes", "KUBERNETES_SERVICE_HOST"
    for name in ("APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"):
        if name in variables:
            yield "apptainer", name
    for kind, file in (("podman", "run/.containerenv"), ("docker", ".dockerenv"), ("apptainer", ".singularity.d")):
        if (root / file).exists():
            yield kind, f"/{file}"
    if told := read(root / "run/systemd/container"):
        yield told.split()[0], "/run/systemd/container"
    environment = table((read(root / "proc/1/environ") or "").replace("\0", "\n"), "=")
    if environment.get("container"):
        yield environment["container"], "/proc/1/environ"
    for file in ("proc/self/cgroup", "proc/1/cgroup", "proc/self/mountinfo"):
        text = read(root / file) or ""
        yield from ((kind, f"/{file}") for kind, pattern in _GROUPS if pattern.search(text))
    if "microsoft" in (read(root / "proc/sys/kernel/osrelease") or "").lower():
        yield "wsl", "/proc/sys/kernel/osrelease"


def _behind(folder: Path) -> float | None:
    """By how many seconds the clock is earlier than the newest file in a folder; 0 where it is not."""
    try:
        newest = max(path.stat().st_mtime for path in beside(folder, "*.py"))
    except (OSError, ValueError):
        return None
    return max(0.0, newest - time.time())
