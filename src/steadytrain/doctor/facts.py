"""Facts about a machine: frozen data, ready for JSON.

``None`` stands for what could not be found out, never a zero or an empty text; an empty tuple or table says that
there is none. Sizes are in bytes, clocks in MHz, power in watts, temperatures in degrees Celsius, and what is called
a share lies between 0 and 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from steadytrain.machine.gpus import count_names
from steadytrain.machine.nvml import Gpu as Gpu


@dataclass(frozen=True, kw_only=True)
class System:
    """The operating system, Python, ``compilers`` (``C``), and the ``container`` around them: ``docker``, ``none``."""

    host: str | None = None
    system: str | None = None
    kernel: str | None = None
    distribution: str | None = None
    hardware: str | None = None
    container: str | None = None
    python: str | None = None
    executable: str | None = None
    venv: str | None = None
    compilers: tuple[str, ...] | None = None


@dataclass(frozen=True, kw_only=True)
class Processor:
    """The processor, and how much of it this process may use.

    ``logical`` counts what the machine has switched on, ``allowed`` what affinity leaves, ``quota`` (in processors,
    fractions kept) what the control groups grant, and ``usable`` is what steadytrain plans with. ``features`` are the
    vector and matrix instructions that torch has code for.
    """

    model: str | None = None
    architecture: str | None = None
    isa: str | None = None
    features: tuple[str, ...] = ()
    physical: int | None = None
    logical: int | None = None
    allowed: int | None = None
    quota: float | None = None
    usable: int | None = None
    numa_nodes: int | None = None
    mhz_max: float | None = None
    mhz_allowed: float | None = None
    governor: str | None = None
    frequency_driver: str | None = None
    energy_preference: str | None = None


@dataclass(frozen=True, kw_only=True)
class Load:
    """The load of this machine now.

    Pressure is the share of the last ten seconds in which something waited for processor, memory or disk;
    ``steal_share`` what the hypervisor withheld while this was being asked; ``throttled_share`` in how many of its
    periods the control group ran out of its quota.
    """

    load_1: float | None = None
    pressure_cpu_share: float | None = None
    pressure_memory_share: float | None = None
    pressure_io_share: float | None = None
    steal_share: float | None = None
    throttled_share: float | None = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory, of the machine and of the control group; ``group_used_bytes`` without what the kernel can drop."""

    total_bytes: int | None = None
    available_bytes: int | None = None
    limit_bytes: int | None = None
    group_used_bytes: int | None = None
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None
    huge_pages: str | None = None
    out_of_memory_kills: int | None = None


@dataclass(frozen=True, kw_only=True)
class FolderFacts:
    """A folder and the file system it is on. A folder that does not exist yet is judged by the nearest one above."""

    path: str
    kind: str | None = None
    network: bool | None = None
    writable: bool | None = None
    total_bytes: int | None = None
    free_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class TorchDevice:
    """A GPU as torch sees it; ``failure``: the error when adding two numbers on it."""

    name: str
    capability: str
    memory_bytes: int
    failure: str | None = None


@dataclass(frozen=True, kw_only=True)
class Torch:
    """The build of torch and what it finds here, found out in a separate process.

    ``state`` is ``works``, ``missing``, ``broken`` (the import fails), ``crashed`` (it ended the process) or ``hangs``
    (it gave no answer in time). ``built_for`` are the architectures that the build has code for; ``allowed`` the
    processors that are left to a process once torch is loaded.
    """

    state: str | None = None
    error: str | None = None
    version: str | None = None
    cuda: str | None = None
    rocm: str | None = None
    cudnn: str | None = None
    nccl: str | None = None
    built_for: tuple[str, ...] = ()
    sees_gpu: bool | None = None
    devices: tuple[TorchDevice, ...] = ()
    gpu_error: str | None = None
    mps: bool | None = None
    isa: str | None = None
    isa_extras: tuple[str, ...] = ()
    threads: int | None = None
    allowed: int | None = None
    torchvision: str | None = None
    torchvision_error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Accelerators:
    """The GPUs of this machine, whether torch can use them or not.

    ``driver`` is NVIDIA's, ``driver_by`` who told it (``nvml`` or ``proc``), ``driver_error`` why NVML
    did not answer. ``on_bus`` are the GPUs on the PCI bus by vendor, with or without a driver; ``device_files``
    counts ``/dev/nvidia0`` and so on. ``infiniband`` are adapters for it, for RoCE and EFA; ``ibverbs``: their
    library can be loaded.
    """

    driver: str | None = None
    driver_by: str | None = None
    driver_error: str | None = None
    gpus: tuple[Gpu, ...] = ()
    on_bus: tuple[str, ...] | None = None
    device_files: int | None = None
    infiniband: tuple[str, ...] = ()
    ibverbs: bool | None = None

    @property
    def visible(self) -> tuple[tuple[int, Gpu], ...]:
        """The GPUs that CUDA shows to this process, with their numbers, as nvidia-smi counts."""
        return tuple((at if gpu.index is None else gpu.index, gpu) for at, gpu in enumerate(self.gpus) if gpu.visible)

    @property
    def names(self) -> str:
        """The NVIDIA GPUs by name and number, such as ``2 x NVIDIA A100``; empty where there are none."""
        names = [gpu.name for gpu in self.gpus] or ["NVIDIA GPU"] * (self.on_bus or ()).count("NVIDIA")
        return count_names(names)


@dataclass(frozen=True, kw_only=True)
class Decoders:
    """Image decoders: simplejpeg for common JPEGs, Pillow for all else; and what scales images when packing.

    An ``error`` says why it cannot be loaded. ``pillow_turbo`` is the version of libjpeg-turbo inside (``no`` where it
    is another libjpeg). ``resizer`` is the version of cykooz-resizer, or ``no`` where numpy scales in its place.
    ``parts`` is the version of the native decoder, which decodes no more of a JPEG than is seen, ``no`` where it was
    not built, or ``idle`` where this processor lacks what it needs (AVX2). ``jpeg`` is what decodes common JPEGs here:
    ``native`` or ``simplejpeg``.
    """

    jpeg: str | None = None
    simplejpeg_error: str | None = None
    pillow_error: str | None = None
    pillow_turbo: str | None = None
    resizer: str | None = None
    resizer_error: str | None = None
    parts: str | None = None
    parts_error: str | None = None


@dataclass(frozen=True, kw_only=True)
class Package:
    """An installed package; ``wanted``: the range that other packages require, ``fits``: whether it lies within."""

    version: str | None
    wanted: str | None = None
    fits: bool | None = None


@dataclass(frozen=True, kw_only=True)
class MachineFacts:
    """Facts of a machine: ``places`` by purpose; ``variables`` of the environment that change speed or results."""

    system: System = System()
    processor: Processor = Processor()
    load: Load = Load()
    memory: Memory = Memory()
    places: dict[str, FolderFacts] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    torch: Torch = Torch()
    accelerators: Accelerators = Accelerators()
    decoders: Decoders = Decoders()
    packages: dict[str, Package] = field(default_factory=dict)
