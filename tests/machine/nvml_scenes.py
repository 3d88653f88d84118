"""Samples of machines that the stand-in ``nvml.c`` makes up, through ``pynvml`` and the loader: one JSON document.

``python -m tests.machine.nvml_scenes FOLDER PID...``: the processes are the other ranks of the run on this machine.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from steadytrain.events import EventLog
from steadytrain.machine.facts import accelerators
from steadytrain.machine.gpus import visible_gpus
from steadytrain.machine.nvml import GpuWatcher, load_nvml, read_driver
from steadytrain.machine.sampler import sampling

STRANGER, NOBODY = 1, 4_000_000  # a process that runs everywhere, and numbers that no process has here


def uuid(gpu: int) -> str:
    """The UUID as torch tells it."""
    return f"{gpu:08x}-0000-4000-8000-000000000000"


@contextmanager
def machine(**variables: str) -> Iterator[None]:
    """Have the library tell of another machine."""
    os.environ |= variables
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def samples(file: Path, gpus: list[str], ranks: list[int], **variables: str) -> list[dict[str, Any]]:
    """The events of a run that ends at once, but for those of the machine."""
    with machine(**variables), EventLog(file, attempt=1) as log, sampling(log, ranks=ranks, gpus=gpus):
        pass
    events = [json.loads(line) for line in file.read_text().splitlines()]
    return [event for event in events if event["kind"] != "MachineStats"]


def shown(**variables: str) -> list[str]:
    """The UUIDs of the GPUs that CUDA shows."""
    with machine(**variables):
        nvml, gpus = load_nvml()
        uuids = [gpu.names[0] for gpu in visible_gpus(gpus)]
        assert len(accelerators()) == len(uuids)
        nvml.nvmlShutdown()
    return uuids


def main(folder: Path, ranks: list[int]) -> None:
    """Print what each scene shows."""
    pids = [os.getpid(), *ranks]
    of_ranks = ",".join(f"{gpu}:{pid}" for gpu, pid in enumerate(pids))
    half, slice_uuid = ",".join(of_ranks.split(",")[:4]), "00000000-0000-5000-8000-000000000001"
    eight = [uuid(gpu) for gpu in range(8)]

    def scene(name: str, gpus: list[str], **variables: str) -> list[dict[str, Any]]:
        return samples(folder / f"{name}.jsonl", gpus, ranks, **variables)

    with machine(CUDA_VISIBLE_DEVICES="1,7", NVML_PIDS=of_ranks):
        facts = asdict(read_driver())
    document: dict[str, Any] = {
        "facts": facts,
        "ranks": scene("ranks", eight, NVML_PIDS=of_ranks),
        "stranger": scene("stranger", eight[:4], NVML_PIDS=f"{half},2:{STRANGER}"),
        "elsewhere": scene("elsewhere", eight[:4], NVML_PIDS=f"{half},6:{STRANGER}"),
        "container": scene("container", eight[:2], NVML_PIDS=f"0:{NOBODY},1:{NOBODY + 1},1:{NOBODY + 2}"),
        "denied": scene("denied", eight[:1], NVML_DENY="PowerUsage,TotalEnergyConsumption,Samples,UtilizationRates"),
        "hidden": scene("hidden", eight[:1], NVML_DENY="ComputeRunningProcesses_v3,ComputeRunningProcesses_v2"),
        "lost": scene("lost", eight[:4], NVML_LOST="2", NVML_PIDS=half),
        "slice": scene("slice", [slice_uuid], NVML_MIG="0", NVML_PIDS=f"101:{pids[0]},100:{STRANGER}"),
        "mismatch": scene("mismatch", eight, NVML_INIT="18"),
        "cpu": scene("cpu", [], NVML_PIDS=of_ranks),
        "shown": {
            "all": shown(),
            "two": shown(CUDA_VISIBLE_DEVICES="5,2"),
            "none": shown(CUDA_VISIBLE_DEVICES=""),
            "sliced": shown(NVML_MIG="0"),
            "beside": shown(NVML_MIG="0", CUDA_VISIBLE_DEVICES="3,4"),
            "named": shown(NVML_MIG="0", CUDA_VISIBLE_DEVICES=f"MIG-{slice_uuid}"),
            "older name": shown(NVML_MIG="0", CUDA_VISIBLE_DEVICES=f"MIG-GPU-{uuid(0)}/2/0"),
        },
    }
    with machine(NVML_PIDS=f"0:{pids[0]},0:{STRANGER},3:{STRANGER}"):
        watcher = GpuWatcher()
        loads = watcher.read({pids[0]}, {"nvidia0"})
        document["watched"] = [load.ours for load in loads[:4]]
        watcher.close()
    document["open"] = ctypes.CDLL("libnvidia-ml.so.1").fakeOpen()
    print(json.dumps(document))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(word) for word in sys.argv[2:]])
