"""A GPU that cannot be used is refused in one line, with what there is and what to do."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steadytrain.config import Data, Model, Recipe
from steadytrain.distributed.world import World
from steadytrain.errors import RecipeError
from steadytrain.machine.nvml import Driver, Gpu, GpuProcess
from steadytrain.training import device
from steadytrain.training.device import (
    ALONE,
    choose_device,
    gpus_of_ranks,
    sampled_gpus,
    set_up_machine,
    stay_near_gpu,
)

H100 = Gpu(name="NVIDIA H100", uuid="GPU-aa")
EIGHT = tuple(replace(H100, index=index, uuid=f"GPU-{index}") for index in range(8))
ONE_OF_EIGHT = tuple(replace(gpu, visible=gpu.index == 3) for gpu in EIGHT)


def machine(monkeypatch: pytest.MonkeyPatch, seen: int, driver: Driver, **variables: str) -> None:
    """A machine with this driver, of whose GPUs torch sees so many."""

    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nPlease update it")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch, "__version__", "2.14.1")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(device, "read_driver", lambda: driver)


def refused(name: str, world: World = ALONE) -> str:
    with pytest.raises(RecipeError) as caught:
        choose_device(name, world)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("seen", "gpus", "variables", "ends"),
    [
        (2, EIGHT[:2], {}, "sees 2 GPUs (2 x NVIDIA H100): use cuda:0 to cuda:1, or --device cpu"),
        (
            1,
            ONE_OF_EIGHT,
            {"CUDA_VISIBLE_DEVICES": "3"},
            "sees 1 GPU (NVIDIA H100): CUDA_VISIBLE_DEVICES=3 hides 7 of this machine: use cuda:0, or --device cpu",
        ),
        (
            1,
            (replace(H100, mig=True),),
            {},
            "sees 1 GPU (NVIDIA H100): of a partitioned GPU (MIG), CUDA shows a process one slice: use cuda:0,"
            " or --device cpu",
        ),
        (2, (), {}, "sees 2 GPUs: use cuda:0 to cuda:1, or --device cpu"),  # NVML tells nothing
    ],
    ids=["absent", "hidden", "slice", "no NVML"],
)
def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch, seen: int, gpus: tuple[Gpu, ...], variables: dict[str, str], ends: str
) -> None:
    machine(monkeypatch, seen, Driver(version="580.65.06", gpus=gpus), **variables)
    assert refused("cuda:5") == f"parallel.device is 'cuda:5' but torch 2.14.1 {ends}"


@pytest.mark.parametrize(
    ("driver", "variables", "says"),
    [
        (Driver(version="535.129.03", gpus=EIGHT), {}, "driver 535.129.03 is too old for torch's CUDA 13.0"),
        (Driver(version="580.1", gpus=EIGHT, error="NVML/RM version mismatch"), {}, "restart the machine"),
        (Driver(error="NVML Shared Library Not Found"), {}, "no NVIDIA driver is loaded"),
        (Driver(error="NVML Shared Library Not Found"), {"CUDA_VISIBLE_DEVICES": ""}, "no NVIDIA driver is loaded"),
        (
            Driver(version="580.1", gpus=tuple(replace(gpu, visible=False) for gpu in EIGHT)),
            {"CUDA_VISIBLE_DEVICES": "9"},
            "CUDA_VISIBLE_DEVICES='9' hides every GPU: unset CUDA_VISIBLE_DEVICES",
        ),
    ],
    ids=["old driver", "another version", "no driver", "no driver and hidden", "hidden"],
)
def test_where_torch_sees_no_gpu_the_cause_is_told(
    monkeypatch: pytest.MonkeyPatch, driver: Driver, variables: dict[str, str], says: str
) -> None:
    machine(monkeypatch, 0, driver, **variables)
    monkeypatch.setattr(device, "has_device_files", lambda: True)
    message = refused("cuda")
    assert "sees 0 GPUs: " in message and says in message and message.endswith("or use --device cpu")


def test_a_container_without_the_hosts_gpus_says_how_to_give_them(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 0, Driver(version="580.1", told_by="proc", gpus=EIGHT))
    monkeypatch.setattr(device, "has_device_files", lambda: False)
    assert "8 x NVIDIA H100 of the host is not available in this container: start it with its GPUs" in refused("cuda")


def test_a_build_of_torch_for_cpus_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 0, Driver(version="580.1", gpus=EIGHT))
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "torch 2.14.1 is built for the CPU only: install a build of torch for CUDA 13" in refused("cuda:1")


def gpu(monkeypatch: pytest.MonkeyPatch, major: int, minor: int, error: str = "") -> torch.device:
    """A GPU of this compute capability, on which a first tensor fails with this error."""

    def zeros(*shape: int, device: torch.device) -> None:
        if error:
            raise RuntimeError(error)

    about = SimpleNamespace(name="Tesla", major=major, minor=minor, uuid="aa")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda of: about)
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_75", "sm_80", "sm_90", "compute_90"])
    monkeypatch.setattr(torch, "zeros", zeros)
    return torch.device("cuda", 0)


@pytest.mark.parametrize(("major", "minor"), [(7, 5), (8, 6), (9, 0), (12, 0)])
def test_a_gpu_that_torch_has_code_for_is_taken(monkeypatch: pytest.MonkeyPatch, major: int, minor: int) -> None:
    machine(monkeypatch, 1, Driver())
    assert device.require_usable(gpu(monkeypatch, major, minor)) == torch.device("cuda:0")


def test_a_gpu_too_old_for_torch_is_refused_before_anything_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, 1, Driver())
    with pytest.raises(RecipeError, match=r"compute capability 3\.7, and torch 2\.14\.1 is built for sm_75.* sm_37"):
        device.require_usable(gpu(monkeypatch, 3, 7))


BUSY = "CUDA error: CUDA-capable device(s) is/are busy or unavailable\nCUDA kernel errors might be reported later"


@pytest.mark.parametrize(
    ("exclusive", "says"),
    [
        (
            True,
            "Tesla) is in exclusive-process mode, in use by python3 (pid 42): use another (--device cuda:N), or",
        ),
        (False, "Tesla) cannot be used, in use by python3 (pid 42): CUDA error: CUDA-capable device(s) is/are busy or"),
    ],
)
def test_a_gpu_that_takes_no_process_says_who_has_it(
    monkeypatch: pytest.MonkeyPatch, exclusive: bool, says: str
) -> None:
    users = (GpuProcess(pid=42, name="/usr/bin/python3"),)
    machine(monkeypatch, 1, Driver(gpus=(replace(H100, index=4, exclusive=exclusive, processes=users),)))
    with pytest.raises(RecipeError) as caught:
        device.require_usable(gpu(monkeypatch, 9, 0, BUSY))
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert ("nvidia-smi -i 4 -c DEFAULT" in str(caught.value)) == exclusive


def test_training_on_the_cpu_beside_gpus_that_torch_cannot_use_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def notices(driver: Driver, name: str = "auto", **variables: str) -> list[str]:
        machine(monkeypatch, 0, driver, **variables)
        monkeypatch.setattr(device, "has_device_files", lambda: True)
        messages: list[str] = []
        recipe = Recipe(data=Data(train="a"), model=Model("resnet20")).with_({"parallel.device": name})
        set_up_machine(recipe, torch.device("cpu"), None, messages.append)
        return messages

    old: dict[str, Any] = {"version": "535.1", "gpus": EIGHT[:1]}
    (message,) = notices(Driver(**old))
    assert message.startswith("trains on the CPU, as torch sees no GPU: driver 535.1 is too old") and "580" in message
    assert notices(Driver(**old), "cpu") == [] and notices(Driver()) == []
    hidden = Driver(version="580.1", gpus=(replace(H100, visible=False),))
    assert notices(hidden, CUDA_VISIBLE_DEVICES="") == [], "as it was asked for"


def group(rank: int, gpus: list[str], hosts: list[str]) -> Any:
    """Ranks on these machines, each of which sees its GPU."""
    return SimpleNamespace(
        world=World(rank=rank, size=len(gpus)),
        hosts=hosts,
        require_same=lambda difference, value: None,
        all_gather_json=lambda value: [{"index": k, "uuid": gpu} for k, gpu in enumerate(gpus)],
    )


def test_the_first_rank_of_each_machine_samples_the_gpus_of_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    used = gpu(monkeypatch, 9, 0)
    ranks = [group(rank, ["aa", "bb", "cc", "dd"], ["one", "one", "two", "two"]) for rank in range(4)]
    everywhere = [gpus_of_ranks(of, used) for of in ranks]
    assert all(
        gpus == [{"index": k, "uuid": uuid} for k, uuid in enumerate(("aa", "bb", "cc", "dd"))] for gpus in everywhere
    )
    sampled = [sampled_gpus(of, gpus) for of, gpus in zip(ranks, everywhere, strict=True)]
    assert sampled == [("aa", "bb"), (), ("cc", "dd"), ()]
    assert sampled_gpus(None, gpus_of_ranks(None, used)) == ("aa",)
    assert gpus_of_ranks(ranks[0], torch.device("cpu")) == [] and sampled_gpus(ranks[0], []) == ()


def test_two_ranks_on_one_gpu_are_refused_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match=r"ranks 0 and 1 on one have the same GPU \(aa\)"):
        gpus_of_ranks(group(1, ["aa", "aa"], ["one", "one"]), gpu(monkeypatch, 9, 0))


NODES = {0: frozenset(range(4)), 1: frozenset(range(4, 8))}
PLACES = [f"0000:{bus:02x}:00.0" for bus in (23, 101, 202, 227)]


def near_its_gpu(
    monkeypatch: pytest.MonkeyPatch,
    rank: int,
    allowed: list[frozenset[int]],
    quota: float | None = None,
    *,
    is_refused: bool = False,
) -> tuple[int, list[set[int]], list[str]]:
    """Of a rank beside pretended GPUs, two at each of two nodes: ranks on its cores, affinities set, what was said.

    ``allowed``: the processors of each rank of the machine.
    """
    properties = SimpleNamespace(pci_domain_id=0, pci_bus_id=[23, 101, 202, 227][rank], pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    affinities: list[set[int]] = []

    def set_affinity(pid: int, processors: set[int]) -> None:
        if is_refused:
            raise PermissionError
        affinities.append(set(processors))

    monkeypatch.setattr(os, "sched_setaffinity", set_affinity)
    monkeypatch.setattr("steadytrain.machine.cgroups.allowed", lambda: allowed[rank])
    monkeypatch.setattr("steadytrain.machine.cgroups.quota", lambda: quota)

    def near(devices: list[str], processors: frozenset[int], root: Path = Path("/")) -> list[frozenset[int]]:
        return [NODES[PLACES.index(device) // 2] & processors for device in devices]

    monkeypatch.setattr("steadytrain.machine.cgroups.near_processors", near)
    ranks = [["one", sorted(processors), place] for processors, place in zip(allowed, PLACES, strict=True)]
    of: Any = SimpleNamespace(
        world=World(rank=rank, size=4), hosts=["one"] * 4, sharing=4, all_gather_json=lambda value: ranks
    )
    messages: list[str] = []
    with ExitStack() as stack:
        sharing = stay_near_gpu(of, torch.device("cuda", rank), stack, messages.append)
    assert stay_near_gpu(of, torch.device("cpu"), stack, messages.append) == 4
    return sharing, affinities, messages


@pytest.mark.parametrize("rank", [0, 3])
def test_ranks_stay_near_their_gpus_for_the_run_and_share_what_is_there(
    monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    everything = frozenset(range(8))
    sharing, affinities, messages = near_its_gpu(monkeypatch, rank, [everything] * 4)
    assert sharing == 2 and affinities == [NODES[rank // 2], everything], "and then it is as it was"
    assert messages == [f"rank {rank} stays on the 4 of 8 processors that are near its GPU"]


def test_a_rank_whose_processors_cannot_be_set_trains_on_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    sharing, affinities, messages = near_its_gpu(monkeypatch, 0, [frozenset(range(8))] * 4, is_refused=True)
    assert (sharing, affinities, messages) == (4, [], [])


def test_a_quota_is_shared_by_all_ranks_wherever_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert near_its_gpu(monkeypatch, 0, [frozenset(range(8))] * 4, quota=4.0)[0] == 4


def test_ranks_with_other_processors_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Slurm gives each task its own."""
    sharing, affinities, _ = near_its_gpu(monkeypatch, 0, [frozenset({2 * rank, 2 * rank + 1}) for rank in range(4)])
    assert (sharing, affinities) == (1, [])
