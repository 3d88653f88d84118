"""Collect all facts about this machine: files of the system, packages, and what torch answers in its own process."""

from __future__ import annotations

import ctypes
import math
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from steadytrain.doctor import probes
from steadytrain.doctor.facts import (
    Accelerators,
    FolderFacts,
    Load,
    MachineFacts,
    Memory,
    Package,
    Processor,
    System,
)
from steadytrain.machine import cgroups, facts
from steadytrain.machine.nvml import read_driver
from steadytrain.machine.procfs import ROOT, parse_table, processor_seconds, read, read_counters, steal_share


def examine() -> MachineFacts:
    """Collect all facts, in a few seconds: most of them for importing torch in a process of its own."""
    root, environment = ROOT, os.environ
    # Before the probes start: their use of GPUs and processors must not be taken for the load of others.
    gpus, before, load_before = accelerators(root), processor_seconds(root), load(root)
    with probes.started(probes.TORCH) as torch, probes.started(probes.DECODERS) as decoders:
        found = MachineFacts(
            system=system(root, environment),
            processor=processor(root),
            memory=memory(root),
            places=places(root, environment),
            variables=variables(environment),
            accelerators=gpus,
            packages=packages(platform.python_version()),
            decoders=probes.decoders(probes.wait_answer(decoders)),
            torch=probes.torch_build(probes.wait_answer(torch)),
        )
    # The share that the hypervisor took while the probes ran.
    return replace(found, load=replace(load_before, steal_share=steal_share(before, processor_seconds(root))))


def _number(text: str | None) -> float | None:
    """Parse a finite number; None for anything else."""
    try:
        number = float(text or "")
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _megahertz(path: Path) -> float | None:
    kilohertz = _number(read(path))
    return None if kilohertz is None else kilohertz / 1000


# Signs of containers in the names of a process's control groups, and in the places that its files are mounted from.
_CONTAINERS = (
    ("kubernetes", re.compile(r"/kubepods\b|kubepods[-.]|/kubelet/pods/")),
    ("podman", re.compile(r"libpod-|/overlay-containers/|/libpod/")),
    ("docker", re.compile(r"/docker/[0-9a-f]{12}|docker-[0-9a-f]{12}|/docker/containers/")),
    ("lxc", re.compile(r"/lxc/|lxc\.payload|/lxc\.monitor")),
)


def system(root: Path, environment: Mapping[str, str]) -> System:
    """Collect the facts about the operating system, Python, and what runs around them."""
    container = next(_container_signs(root, environment), "none") if (root / "proc/self").exists() else None
    mac = platform.mac_ver()[0]
    distribution = (parse_table(read(root / "etc/os-release"), "=").get("PRETTY_NAME") or "").strip("\"'")
    board = read(root / "proc/device-tree/model")
    words = [read(root / "sys/class/dmi/id" / name) for name in ("sys_vendor", "product_name")]
    hardware = " ".join(word for word in words if word) or (board.rstrip("\0") if board else None)
    path = environment.get("PATH")
    return System(
        host=platform.node() or None,
        system=platform.system() or None,
        kernel=read(root / "proc/sys/kernel/osrelease") or platform.release() or None,
        distribution=distribution or (f"macOS {mac}" if mac else None),
        hardware=hardware,
        container=container,
        python=platform.python_version(),
        executable=sys.executable or None,
        venv=sys.prefix if sys.prefix != sys.base_prefix else None,
        compilers=tuple(
            language
            for language, names in (("C", "CC gcc clang cc"), ("C++", "CXX g++ clang++"))
            if any(shutil.which((environment.get(name, "").split() or [name])[0], path=path) for name in names.split())
        ),
    )


def _container_signs(root: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the kinds of container that there are signs of, the surest first; a Kubernetes pod is a container, too."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        yield "kubernetes"
    if environment.keys() & {"APPTAINER_CONTAINER", "SINGULARITY_CONTAINER"}:
        yield "apptainer"
    for kind, file in (("podman", "run/.containerenv"), ("docker", ".dockerenv"), ("apptainer", ".singularity.d")):
        if (root / file).exists():
            yield kind
    if manager := read(root / "run/systemd/container"):
        yield manager.split()[0]
    for file in ("proc/self/cgroup", "proc/1/cgroup", "proc/self/mountinfo"):
        text = read(root / file) or ""
        yield from (kind for kind, pattern in _CONTAINERS if pattern.search(text))


# Instruction sets, by the kernel's names, that torch and its libraries have code for; the last row is ARM's.
_FEATURES = (
    *("avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
    *("asimd", "asimdhp", "asimddp", "i8mm", "bf16", "sve", "sve2"),
)


def processor(root: Path) -> Processor:
    """Collect the facts about the processor."""
    cpuinfo = map(parse_table, (read(root / "proc/cpuinfo") or "").split("\n\n"))
    blocks = [table for table in cpuinfo if "processor" in table]
    frequency, features = root / "sys/devices/system/cpu/cpu0/cpufreq", facts.cpu_features(root)
    return Processor(
        model=facts.cpu_model(root) or None,
        architecture=platform.machine() or None,
        isa=facts.isa(root) or None,
        features=tuple(name for name in _FEATURES if name in features),
        physical=psutil.cpu_count(logical=False),
        logical=len(blocks) or psutil.cpu_count(),
        allowed=len(cgroups.allowed()) if hasattr(os, "sched_getaffinity") else None,
        quota=cgroups.quota(root),
        usable=cgroups.cores(root),
        numa_nodes=len(list((root / "sys/devices/system/node").glob("node[0-9]*"))) or None,
        mhz_max=_megahertz(frequency / "cpuinfo_max_freq"),
        mhz_allowed=_megahertz(frequency / "scaling_max_freq"),
        governor=read(frequency / "scaling_governor"),
        frequency_driver=read(frequency / "scaling_driver"),
        energy_preference=read(frequency / "energy_performance_preference"),
    )


def load(root: Path) -> Load:
    """Collect the facts about the load, except ``steal_share``, which takes two readings some time apart."""

    def pressure(name: str) -> float | None:
        """Return the share of the last 10 s in which some task waited: 0.0153 for ``some avg10=1.53 avg60=...``."""
        match = re.search(r"^some .*\bavg10=([\d.]+)", read(root / "proc/pressure" / name) or "", re.MULTILINE)
        percent = _number(match[1]) if match else None
        return None if percent is None else round(percent / 100, 4)

    loads = [_number(word) for word in (read(root / "proc/loadavg") or "").split()[:3]]
    periods = cgroups.throttled_periods(root)
    return Load(
        load_1=loads[0] if len(loads) == 3 else None,
        pressure_cpu_share=pressure("cpu"),
        pressure_memory_share=pressure("memory"),
        pressure_io_share=pressure("io"),
        throttled_share=None if periods is None else round(periods[0] / periods[1], 4),
    )


def memory(root: Path) -> Memory:
    """Collect the facts about memory, of the machine and of the control group."""
    meminfo = read_counters(root / "proc/meminfo")
    total, available = meminfo.get("MemTotal"), meminfo.get("MemAvailable")
    if total is None:
        machine = psutil.virtual_memory()
        total, available = machine.total, machine.available
    limit, used = cgroups.memory_limit(root), None
    if limit is not None and limit.num_bytes >= total:
        limit = None
    if limit is not None and limit.left_bytes is not None:
        used = max(0, limit.num_bytes - limit.left_bytes)
        available = None if available is None else max(0, min(available, limit.num_bytes - used))
    swap, swap_free = meminfo.get("SwapTotal"), meminfo.get("SwapFree")
    # The setting stands in brackets: ``always [madvise] never``.
    huge_pages = re.search(r"\[(\S+)\]", read(root / "sys/kernel/mm/transparent_hugepage/enabled") or "")
    return Memory(
        total_bytes=total,
        available_bytes=available,
        limit_bytes=None if limit is None else limit.num_bytes,
        group_used_bytes=used,
        swap_total_bytes=swap,
        swap_used_bytes=None if swap is None or swap_free is None else swap - swap_free,
        huge_pages=huge_pages and huge_pages[1],
        out_of_memory_kills=cgroups.out_of_memory_kills(root),
    )


# The kernel's names for file systems whose data lie on another machine; those over FUSE are named by their program.
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "wekafs"),
    *("panfs", "pvfs2", "orangefs", "ocfs2", "gfs2", "coda", "ncpfs", "davfs", "juicefs", "quobyte", "vastnfs"),
}
_NETWORK_FUSE = re.compile(
    r"fuse\.(sshfs|s3fs|gcsfuse|rclone|glusterfs|ceph|goofys|mount-s3|mountpoint-s3|blobfuse2?|juicefs|davfs2|dbfs"
    r"|moosefs|mfs|seaweedfs|cvmfs2|geesefs|s3backer|afs|weka\S*|hdfs\S*|alluxio\S*|quobyte\S*)"
)
_Mount = tuple[str, str]  # where, and which file system


def places(root: Path, environment: Mapping[str, str], *others: str) -> dict[str, FolderFacts]:
    """Collect the facts about the folders that training uses, by their purpose.

    Purposes are ``here``, ``cache``, ``weights`` (the cache of the hub's client), ``temporary`` and ``shm``. ``others``
    are further paths, each under its own name.
    """
    hub, home, user = environment.get("HF_HUB_CACHE"), environment.get("HF_HOME"), facts.user_cache(environment)
    try:
        current = Path.cwd()
    except OSError:  # it was removed
        current = None
    folders = {
        "here": current,
        "cache": facts.cache_folder(environment),
        "weights": Path(hub) if hub else Path(home) / "hub" if home else user and user / "huggingface/hub",
        "temporary": Path(tempfile.gettempdir()),
        "shm": root / "dev/shm" if (root / "dev/shm").is_dir() else None,
        **{path: Path(path) for path in others},
    }
    mounts: list[_Mount] = []  # in the order of mounting: of two at one place the later one counts
    for line in (read(root / "proc/self/mountinfo") or "").splitlines():
        first, _, last = line.partition(" - ")
        words, more = first.split(), last.split()
        if len(words) >= 5 and more:
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[4])
            mounts.append((point, more[0]))
    return {name: _place(folder, mounts, root) for name, folder in folders.items() if folder is not None}


def _place(folder: Path, mounts: list[_Mount], root: Path) -> FolderFacts:
    try:
        existing = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
        room = os.statvfs(existing) if hasattr(os, "statvfs") else None
    except (OSError, StopIteration):
        return FolderFacts(path=str(folder))
    around = [mount for mount in mounts if existing.is_relative_to(mount[0])]
    kind = max(reversed(around), key=lambda mount: len(Path(mount[0]).parts), default=("", None))[1]
    return FolderFacts(
        path=str(folder),
        kind=kind,
        network=None if kind is None else is_network(kind),
        writable=os.access(existing, os.W_OK),
        total_bytes=room.f_blocks * room.f_frsize if room and room.f_blocks else None,
        free_bytes=room.f_bavail * room.f_frsize if room and room.f_blocks else None,
    )


def is_network(kind: str) -> bool:
    """Return whether a file system is a network one, by the kernel's name for it.

    >>> is_network("nfs4"), is_network("fuse.s3fs"), is_network("ext4"), is_network("overlay")
    (True, True, False, False)
    """
    return kind in _NETWORK or _NETWORK_FUSE.match(kind) is not None


_VARIABLES = (
    *("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "NUMEXPR_", "ONEDNN_", "DNNL_", "ATEN_", "JSIMD_", "MALLOC_"),
    *("TORCH_", "TORCHINDUCTOR_", "PYTORCH_", "CUDA_", "CUDNN_", "CUBLAS_", "NVIDIA_", "NCCL_", "HIP_", "ROCR_"),
    "STEADYTRAIN_",
)
_MORE_VARIABLES = {
    *("GLIBC_TUNABLES", "LD_PRELOAD", "LD_LIBRARY_PATH", "TMPDIR", "XDG_CACHE_HOME"),
    *("HF_HOME", "HF_HUB_CACHE", "HF_HUB_OFFLINE", "PYTHONPATH", "PYTHONMALLOC", "PYTHONDEVMODE", "PYTHONTRACEMALLOC"),
    *("PYTHONOPTIMIZE", "PYTHON_GIL"),
}
_SECRET = re.compile(r"TOKEN|SECRET|PASSW|KEY|CREDENTIAL")


def variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Select the variables that change speed or results, by name; none that could hold a secret.

    >>> variables({"OMP_NUM_THREADS": "4", "HOME": "/tmp", "TORCH_TOKEN": "x"})
    {'OMP_NUM_THREADS': '4'}
    """
    return {
        name: environment[name]
        for name in sorted(environment)
        if (name in _MORE_VARIABLES or name.startswith(_VARIABLES)) and not _SECRET.search(name)
    }


_OURS = "steadytrain"
# Packages whose requirements are checked: ours, and the two libraries that must fit torch.
_REQUIRING = (_OURS, "torchvision", "timm")
_OPTIONAL = ("nvidia-ml-py", "huggingface_hub", "triton", "scikit-learn")


def packages(python: str) -> dict[str, Package]:
    """Collect the facts about packages, by name, from their metadata; Python itself is one of them.

    ``python``: its version.
    """
    required = wanted_versions(lambda name: _metadata(metadata.requires, name))
    known = {name: package(_metadata(metadata.version, name), versions) for name, versions in required.items()}
    optional = {name: _metadata(metadata.version, name) for name in _OPTIONAL if name not in known}
    known |= {name: Package(version=version) for name, version in optional.items() if version}
    ours = _metadata(metadata.metadata, _OURS)
    supported = ours.get("Requires-Python") if ours else None
    return {_OURS: Package(version=_metadata(metadata.version, _OURS)), "python": package(python, supported), **known}


def _metadata(function: Callable[[str], Any], name: str) -> Any:
    try:
        return function(name)
    except metadata.PackageNotFoundError:
        return None


def wanted_versions(requires: Callable[[str], list[str] | None]) -> dict[str, str]:
    """Join the version ranges of each package that steadytrain needs; a requirement with a marker does not count.

    ``requires``: gives a package's requirements as its metadata writes them; None where it is not installed.

    >>> asked = {"steadytrain": ["torch>=2.10", 'pytest>=8; extra == "test"'], "torchvision": ["torch==2.15.0"]}
    >>> wanted_versions(asked.get)
    {'torch': '>=2.10,==2.15.0'}
    """
    wanted: dict[str, list[str]] = {}
    for requiring in _REQUIRING:
        for requirement in map(Requirement, requires(requiring) or []):
            name, versions = canonicalize_name(requirement.name), str(requirement.specifier)
            if requirement.marker is None and (requiring == _OURS or name in wanted):
                wanted.setdefault(name, []).extend([versions] if versions and versions not in wanted[name] else [])
    return {name: ",".join(parts) for name, parts in wanted.items()}


def package(version: str | None, wanted: str | None) -> Package:
    """Compare an installed version with the range it should lie in; a pre-release is earlier than its release."""
    fits = None
    with suppress(InvalidVersion):  # of a development build of Python, say
        fits = SpecifierSet(wanted).contains(Version(version), prereleases=True) if version and wanted else None
    return Package(version=version, wanted=wanted or None, fits=fits)


_VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}
# PCI classes: a display controller (VGA, 3D, other), a processing accelerator.
_CLASSES = ("0x0300", "0x0302", "0x0380", "0x1200")


def accelerators(root: Path, nvml: Any = None, variables: Mapping[str, str] = os.environ) -> Accelerators:
    """Collect the facts about GPUs, from NVIDIA's library, else from its kernel module, and about fast networks.

    Args:
        root: where ``proc``, ``sys`` and ``dev`` lie.
        nvml: the module ``pynvml``; None: the installed one, if there is one.
    """
    adapters, ibverbs = sorted(folder.name for folder in (root / "sys/class/infiniband").glob("*")), False
    with suppress(OSError):
        ibverbs = bool(adapters and ctypes.CDLL("libibverbs.so.1"))
    driver = read_driver(root, nvml, variables)
    bus, devices = root / "sys/bus/pci", root / "dev"
    vendors = [
        _VENDORS.get(read(folder / "vendor") or "")
        for folder in sorted(bus.glob("devices/*"))
        if (read(folder / "class") or "").startswith(_CLASSES)
    ]
    return Accelerators(
        driver=driver.version,
        driver_by=driver.told_by,
        driver_error=driver.error,
        gpus=driver.gpus,
        on_bus=tuple(vendor for vendor in vendors if vendor) if bus.is_dir() else None,
        device_files=len(list(devices.glob("nvidia[0-9]*"))) if devices.is_dir() else None,
        infiniband=tuple(adapters),
        ibverbs=ibverbs if adapters else None,
    )
