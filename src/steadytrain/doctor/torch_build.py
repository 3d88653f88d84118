"""What torch is and what it finds here, asked of it in a process of its own."""

from __future__ import annotations

import re
from typing import Any

from steadytrain.doctor.child import Answer
from steadytrain.doctor.facts import Torch, TorchDevice

SECONDS = 120.0
"""For importing torch and torchvision and waking each GPU; a cold network file system needs a minute."""

QUESTION = """
import warnings
warnings.simplefilter("ignore")
try:
    import torch
except BaseException as error:
    missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
    told["error"] = f"{type(error).__name__}: {error}"
    told["state"] = "missing" if missing else "broken"
else:
    told["state"] = "works"
    ask("version", lambda: str(torch.__version__))
    ask("folder", lambda: os.path.dirname(torch.__file__))
    ask("cuda", lambda: torch.version.cuda)
    ask("rocm", lambda: torch.version.hip)
    ask("cudnn", lambda: torch.backends.cudnn.version())
    ask("nccl", lambda: torch.cuda.nccl.version() if torch.version.cuda else None)
    ask("built_for", lambda: torch._C._cuda_getArchFlags().split() if torch.version.cuda or torch.version.hip else [])
    ask("isa", lambda: torch.backends.cpu.get_cpu_capability())
    ask("mkl", lambda: torch.backends.mkl.is_available())
    ask("onednn", lambda: torch.backends.mkldnn.is_available())
    ask("openmp", lambda: torch.backends.openmp.is_available())
    ask("mps", lambda: torch.backends.mps.is_available())
    ask("threads", torch.get_num_threads)
    ask("interop_threads", torch.get_num_interop_threads)
    extras = [("bf16", "_is_avx512_bf16_supported"), ("vnni", "_is_vnni_supported"), ("amx", "_is_amx_tile_supported")]
    ask("isa_extras", lambda: [word for word, name in extras if getattr(torch.cpu, name, bool)()])
    ask("parallel", lambda: float((torch.ones(256, 256) @ torch.ones(256, 256)).sum()))
    ask("allowed", lambda: len(os.sched_getaffinity(0)))
    ask("sees_gpu", torch.cuda.is_available)
    if told.get("sees_gpu"):
        def look(index):
            about = torch.cuda.get_device_properties(index)
            found = {"name": about.name, "capability": f"{about.major}.{about.minor}"}
            found["memory_bytes"] = about.total_memory
            try:
                assert torch.ones(1, device=f"cuda:{index}").add(1).item() == 2
            except Exception as error:
                found["failure"] = f"{type(error).__name__}: {error}"
            return found
        ask("devices", lambda: [look(index) for index in range(torch.cuda.device_count())])
    elif told.get("cuda") or told.get("rocm"):
        ask("gpu_error", torch.cuda.init)
    def vision():
        import torchvision
        return str(torchvision.__version__)
    ask("torchvision", vision)
"""


def torch_build(answer: Answer) -> Torch:
    """The facts about torch, from its own answer to :data:`QUESTION`."""
    if answer.failure is not None:
        return Torch(state="hangs" if answer.hangs else "crashed", error=answer.failure)
    told, refused = answer.told, answer.told.get("refused", {})
    if told.get("state") != "works":
        return Torch(state=told.get("state", "broken"), error=_line(told.get("error")))
    names = ("version", "folder", "cuda", "rocm", "sees_gpu", "mps", "isa", "threads", "interop_threads", "allowed")
    more = ("mkl", "onednn", "openmp", "torchvision")
    return Torch(
        state="works",
        **{name: told.get(name) for name in (*names, *more)},
        cudnn=_cudnn(told.get("cudnn")),
        nccl=".".join(map(str, told["nccl"])) if told.get("nccl") else None,
        built_for=tuple(told.get("built_for") or ()),
        isa_extras=tuple(told.get("isa_extras") or ()),
        devices=tuple(_device(one) for one in told.get("devices") or ()),
        gpu_error=_line(refused.get("gpu_error") or refused.get("devices")),
        torchvision_error=_line(refused.get("torchvision")),
    )


def covers(built_for: tuple[str, ...], capability: str) -> bool:
    """Whether a build has code for a GPU: for its generation up to its step, or portable code that can be translated.

    By NVIDIA's rules of binary and PTX compatibility; code for ``sm_90a`` and its like runs on that one only.

    Args:
        built_for: such as ``sm_75`` and ``compute_90``.
        capability: the GPU's, such as ``8.6``.

    >>> covers(("sm_75", "sm_80"), "8.6"), covers(("sm_75", "sm_80"), "9.0"), covers(("compute_80",), "9.0")
    (True, False, True)
    """
    major, _, minor = capability.partition(".")
    device = (int(major), int(minor or 0))
    for kind, generation, step, only in re.findall(r"(sm|compute)_(\d+)(\d)([af]?)", " ".join(built_for)):
        code = (int(generation), int(step))
        if device == code or (not only and code <= device and (kind == "compute" or code[0] == device[0])):
            return True
    return False


def _device(told: dict[str, Any]) -> TorchDevice:
    return TorchDevice(**{**told, "failure": _line(told.get("failure"))})


def _cudnn(version: int | None) -> str | None:
    """``92600`` as ``9.26.0``; before cuDNN 9 the major version stood in the thousands."""
    if not version:
        return None
    unit = 10_000 if version >= 10_000 else 1_000
    return f"{version // unit}.{version % unit // 100}.{version % 100}"


def _line(text: str | None) -> str | None:
    """The first line that says something, of what may be long."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[0][:300] if lines else None
