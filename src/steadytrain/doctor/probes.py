"""Probe torch and the image decoders, each in a separate process.

An import that hangs or crashes ends that process and not this one: a wheel for another processor ends it by a signal.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

from steadytrain.doctor.facts import Decoders, Torch, TorchDevice
from steadytrain.machine.children import ending, finish, kill_at_last, python, start

SECONDS = 120.0
"""Seconds for importing torch and torchvision and waking each GPU; a cold network file system needs a minute."""

# What a library prints as it is imported must not get into the answer: it goes to standard error, and the answer to
# what was standard output. The process ends at once after it, without the libraries' own tidying up.
_FRAME = """
import json, os, sys
out = os.dup(1)
os.dup2(2, 1)
values = {{}}
def ask(name, function):
    try:
        values[name] = function()
    except Exception as error:
        values.setdefault("refused", {{}})[name] = f"{{type(error).__name__}}: {{error}}"
{code}
text = json.dumps(values, default=str).encode()
while text:
    text = text[os.write(out, text):]
os._exit(0)
"""

TORCH = """
import warnings
warnings.simplefilter("ignore")
try:
    import torch
except BaseException as error:
    missing = isinstance(error, ModuleNotFoundError) and error.name == "torch"
    values["error"] = f"{type(error).__name__}: {error}"
    values["state"] = "missing" if missing else "broken"
else:
    values["state"] = "works"
    ask("version", lambda: str(torch.__version__))
    ask("cuda", lambda: torch.version.cuda)
    ask("rocm", lambda: torch.version.hip)
    ask("cudnn", lambda: torch.backends.cudnn.version())
    ask("nccl", lambda: torch.cuda.nccl.version() if torch.version.cuda else None)
    ask("built_for", lambda: torch._C._cuda_getArchFlags().split() if torch.version.cuda or torch.version.hip else [])
    ask("isa", lambda: torch.backends.cpu.get_cpu_capability())
    ask("mps", lambda: torch.backends.mps.is_available())
    ask("threads", torch.get_num_threads)
    extras = [("bf16", "_is_avx512_bf16_supported"), ("vnni", "_is_vnni_supported"), ("amx", "_is_amx_tile_supported")]
    ask("isa_extras", lambda: [word for word, name in extras if getattr(torch.cpu, name, bool)()])
    ask("parallel", lambda: float((torch.ones(256, 256) @ torch.ones(256, 256)).sum()))
    ask("allowed", lambda: len(os.sched_getaffinity(0)))
    ask("sees_gpu", torch.cuda.is_available)
    if values.get("sees_gpu"):
        def look(index):
            about = torch.cuda.get_device_properties(index)
            device = {"name": about.name, "capability": f"{about.major}.{about.minor}"}
            device["memory_bytes"] = about.total_memory
            try:
                assert torch.ones(1, device=f"cuda:{index}").add(1).item() == 2
            except Exception as error:
                device["failure"] = f"{type(error).__name__}: {error}"
            return device
        ask("devices", lambda: [look(index) for index in range(torch.cuda.device_count())])
    elif values.get("cuda") or values.get("rocm"):
        ask("gpu_error", torch.cuda.init)
    def vision():
        import torchvision
        return str(torchvision.__version__)
    ask("torchvision", vision)
"""

DECODERS = """
import warnings
from importlib import metadata
warnings.simplefilter("ignore")
def simplejpeg():
    import simplejpeg
    return {}
def pillow():
    from PIL import features
    return {"pillow_turbo": features.version("libjpeg_turbo") if features.check("libjpeg_turbo") else "no"}
def resizer():
    try:
        import cykooz_resizer
    except ModuleNotFoundError:
        return {"resizer": "no"}
    return {"resizer": metadata.version("cykooz-resizer")}
def parts():
    try:
        from steadytrain import native
    except ModuleNotFoundError:
        return {"parts": "no"}
    return {"parts": str(native.VERSION), "jpeg": "native"} if native.DECODES else {"parts": "idle"}
for function in (simplejpeg, pillow, resizer, parts):
    ask(function.__name__, function)
"""


@dataclass(frozen=True)
class ProbeAnswer:
    """The values that a process returned; ``failure``: why it returned none; ``hangs``: it did not finish in time."""

    values: dict[str, Any]
    failure: str | None = None
    hangs: bool = False


@contextmanager
def started(code: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run ``code`` in a process, and end it if it is still running afterwards.

    ``code``: Python, at the outermost level, which fills ``values`` (by ``ask(name, function)`` where it may fail).
    """
    command, pipe = python("-c", _FRAME.format(code=code)), subprocess.PIPE
    process = start(command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe)
    with process, kill_at_last([process]):
        yield process


def wait_answer(process: subprocess.Popen[bytes], seconds: float = SECONDS) -> ProbeAnswer:
    """Wait for the answer of a process, ``seconds`` at most."""
    ended = finish(process, seconds=seconds)
    if ended.is_late:
        return ProbeAnswer({}, f"no answer within {seconds:g} s", hangs=True)
    if ended.code == 0 and ended.output:
        return ProbeAnswer(json.loads(ended.output))
    how = f"killed by {ending(ended.code)}" if ended.code < 0 else f"exited with code {ended.code}"
    return ProbeAnswer({}, f"{how}: {ended.last_line or 'no message'}")


def torch_build(answer: ProbeAnswer) -> Torch:
    """Return the facts about torch from its answer to :data:`TORCH`."""
    if answer.failure is not None:
        return Torch(state="hangs" if answer.hangs else "crashed", error=answer.failure)
    names, refused = [field.name for field in fields(Torch)], answer.values.get("refused", {})
    values: dict[str, Any] = {"state": "broken"} | {n: answer.values[n] for n in names if n in answer.values}
    if cudnn := values.get("cudnn"):  # 92600 is 9.26.0; before cuDNN 9 the major version stood in the thousands
        unit = 10_000 if cudnn >= 10_000 else 1_000
        values["cudnn"] = f"{cudnn // unit}.{cudnn % unit // 100}.{cudnn % 100}"
    values["nccl"] = ".".join(map(str, values.get("nccl") or ())) or None
    for name in ("built_for", "isa_extras"):
        values[name] = tuple(values.get(name) or ())
    devices = [{**device, "failure": _line(device.get("failure"))} for device in values.get("devices") or ()]
    values["devices"] = tuple(TorchDevice(**device) for device in devices)
    values["error"] = _line(values.get("error"))
    values["gpu_error"] = _line(refused.get("gpu_error") or refused.get("devices"))
    values["torchvision_error"] = _line(refused.get("torchvision"))
    return Torch(**values)


def _line(text: str | None) -> str | None:
    """Return the first line that is not empty, cut if it is long."""
    lines = [line.strip() for line in (text or "").splitlines() if line.strip()]
    return lines[0][:300] if lines else None


def decoders(answer: ProbeAnswer) -> Decoders:
    """Return the facts about decoders from the answer to :data:`DECODERS`."""
    if answer.failure is not None:
        return Decoders(simplejpeg_error=answer.failure, pillow_error=answer.failure)
    refused = answer.values.get("refused", {})
    values: dict[str, Any] = {"jpeg": "simplejpeg"} if "simplejpeg" in answer.values else {}
    for name in ("simplejpeg", "pillow", "resizer", "parts"):
        values |= {f"{name}_error": refused.get(name)} | answer.values.get(name, {})
    return Decoders(**values)
