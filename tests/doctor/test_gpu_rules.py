"""What is said of torch and GPUs. Above all: a GPU that training would silently not use is the first thing told."""

from __future__ import annotations

from dataclasses import replace

import pytest

from steadytrain.doctor import Facts, findings
from steadytrain.doctor.facts import Accelerators, Gpu, GpuProcess, System, Torch, TorchDevice

CUDA13 = Torch(
    state="works",
    version="2.15.0+cu132",
    cuda="13.2",
    built_for=("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"),
    sees_gpu=False,
    gpu_error="RuntimeError: The NVIDIA driver on your system is too old (found version 12020).",
)
CPU = Torch(state="works", version="2.15.0+cpu", sees_gpu=False)
A100 = Gpu(name="NVIDIA A100-SXM4-80GB", capability="8.0")
SEEN = replace(
    CUDA13, sees_gpu=True, devices=(TorchDevice(name=A100.name, capability="8.0", memory_bytes=85_000_000_000),)
)
HOST = System(container="none")
DOCKER = System(container="docker")


def machine(
    driver: str | None = "580.65.06", *gpus: Gpu, bus: tuple[str, ...] = ("NVIDIA",), files: int = 1
) -> Accelerators:
    return Accelerators(driver=driver, gpus=gpus or ((A100,) if driver else ()), on_bus=bus, device_files=files)


def rules(facts: Facts) -> list[str]:
    return [finding.rule for finding in findings(facts)]


UNUSED = {
    "a CPU build": (CPU, machine(), HOST, {}, "torch-without-cuda", "bad"),
    "a ROCm build": (replace(CPU, rocm="7.1"), machine(), HOST, {}, "torch-without-cuda", "bad"),
    "an old driver": (CUDA13, machine("535.129.03"), HOST, {}, "driver-too-old", "bad"),
    "no driver": (CUDA13, machine(None, files=0), HOST, {}, "driver-missing", "bad"),
    "no GPU given to a container": (CUDA13, machine(files=0), DOCKER, {}, "gpu-not-in-container", "warn"),
    "hidden": (CUDA13, machine(), HOST, {"CUDA_VISIBLE_DEVICES": "-1"}, "gpu-hidden", "warn"),
    "an unknown cause": (CUDA13, machine(), HOST, {}, "gpu-not-seen", "bad"),
}


@pytest.mark.parametrize("case", UNUSED)
def test_a_gpu_that_will_not_be_used_is_the_first_thing_told(case: str) -> None:
    torch, gpus, system, variables, rule, severity = UNUSED[case]
    first = findings(Facts(torch=torch, accelerators=gpus, system=system, variables=variables))[0]
    assert (first.rule, first.severity) == (rule, severity)
    assert first.why == "Training runs on the CPU, without an error and many times slower."


def test_a_driver_too_old_says_which_is_needed_and_which_torch_would_do() -> None:
    first = findings(Facts(torch=CUDA13, accelerators=machine("535.129.03"), system=HOST))[0]
    assert first.what == "NVIDIA A100-SXM4-80GB will not be used: driver 535.129.03 is too old for torch's CUDA 13.2"
    assert first.remedy.startswith("update the driver to 580 or newer, or install a build of torch for CUDA 12 ")


@pytest.mark.parametrize(
    ("cuda", "driver", "old"),
    [
        ("13.0", "580.65.06", False),
        ("13.2", "575.57.08", True),
        ("12.8", "525.60.13", False),
        ("12.1", "525.53", True),
        ("11.8", "450.80.02", False),
        ("11.8", "450.51.06", True),
        ("14.0", "580.65.06", False),  # nothing is known of it: torch's own words are told
    ],
)
def test_the_oldest_driver_of_each_major_version(cuda: str, driver: str, old: bool) -> None:
    told = rules(Facts(torch=replace(CUDA13, cuda=cuda), accelerators=machine(driver), system=HOST))
    assert ("driver-too-old" in told) is old


def test_a_gpu_that_torch_sees_is_fine_whatever_the_driver_is_called() -> None:
    """With NVIDIA's compatibility package an older driver does."""
    assert rules(Facts(torch=SEEN, accelerators=machine("535.129.03"), system=HOST)) == []


def test_a_machine_without_a_gpu_trains_on_the_cpu_and_nothing_is_wrong() -> None:
    none = Accelerators(on_bus=("Intel",), device_files=0, driver_error="NVML Shared Library Not Found")
    for torch in (CPU, CUDA13):
        assert rules(Facts(torch=torch, accelerators=none, system=HOST)) == []


def test_a_cpu_build_in_a_container_without_a_gpu_may_be_meant_so() -> None:
    first = findings(Facts(torch=CPU, accelerators=machine(files=0), system=DOCKER))[0]
    assert (first.rule, first.severity) == ("torch-without-cuda", "warn")


def test_a_driver_that_was_updated_under_a_running_kernel() -> None:
    broken = Accelerators(driver="580.65.06", driver_error="Driver/library version mismatch", on_bus=("NVIDIA",))
    first = findings(Facts(torch=CUDA13, accelerators=broken, system=HOST))[0]
    assert first.rule == "driver-mismatch" and "restart" in first.remedy


def test_several_gpus_are_counted_by_name() -> None:
    gpus = machine("580.65.06", A100, A100, Gpu(name="Quadro K620"))
    assert findings(Facts(torch=CPU, accelerators=gpus))[0].what.startswith(
        "2 x NVIDIA A100-SXM4-80GB, Quadro K620 will"
    )


@pytest.mark.parametrize(
    ("torch", "rule"),
    [
        (Torch(state="missing", error="ModuleNotFoundError: No module named 'torch'"), "torch-missing"),
        (Torch(state="broken", error="ImportError: libcudart.so.13"), "torch-broken"),
        (Torch(state="crashed", error="ended by SIGILL: without a word"), "torch-broken"),
        (Torch(state="hangs", error="no answer within 120 s"), "torch-hangs"),
        (
            replace(SEEN, torchvision_error="RuntimeError: operator torchvision::nms does not exist"),
            "torchvision-broken",
        ),
    ],
)
def test_a_torch_that_cannot_be_used_is_bad(torch: Torch, rule: str) -> None:
    first = findings(Facts(torch=torch))[0]
    assert (first.rule, first.severity) == (rule, "bad")
    assert (torch.error or torch.torchvision_error or "") in first.what or torch.state == "missing"


def test_a_build_without_code_for_the_gpu_is_bad() -> None:
    blackwell = TorchDevice(
        name="NVIDIA GeForce RTX 5090", capability="12.0", memory_bytes=32 << 30, failure="no kernel"
    )
    old = replace(SEEN, devices=(blackwell,), built_for=("sm_80", "sm_90"))
    first = findings(Facts(torch=old))[0]
    assert (first.rule, first.severity) == ("gpu-architecture.0", "bad")
    assert "sm_120" in first.what and "sm_80, sm_90" in first.why


def test_a_gpu_that_cannot_compute_is_bad() -> None:
    held = TorchDevice(
        name="A100", capability="8.0", memory_bytes=1, failure="CUDA error: device is busy or unavailable"
    )
    first = findings(Facts(torch=replace(SEEN, devices=(held,))))[0]
    assert first.rule == "gpu-failing.0" and "busy or unavailable" in first.what


def test_a_gpu_in_use_names_who_uses_it() -> None:
    taken = Gpu(
        name="A100",
        busy_share=0.97,
        memory_bytes=80_000_000_000,
        memory_used_bytes=60_000_000_000,
        processes=(GpuProcess(pid=4242, name="python3", memory_bytes=1), GpuProcess(pid=7)),
    )
    (told,) = findings(Facts(torch=SEEN, accelerators=machine("580.1", A100, taken)))
    assert told.rule == "gpu-busy.1"
    assert told.what == "GPU 1 (A100) is in use: 97 % busy, 60.0 GB of 80.0 GB taken, python3 (4242), process (7)"


def test_what_holds_a_gpu_back() -> None:
    slow = Gpu(
        name="A100",
        throttled_by=("heat", "set clocks", "idle"),
        temperature=91,
        mhz=765,
        mhz_max=1410,
        power_limit_watts=250,
        power_default_watts=400,
        pcie_width=4,
        pcie_width_max=16,
    )
    told = rules(Facts(torch=SEEN, accelerators=machine("580.1", slow)))
    assert told == ["gpu-throttled.0", "gpu-power.0", "gpu-clock.0", "gpu-link.0"]


def test_a_gpu_at_rest_is_not_called_slow() -> None:
    idle = replace(A100, throttled_by=("idle",), mhz=210, mhz_max=1410, power_limit_watts=400, power_default_watts=400)
    assert rules(Facts(torch=SEEN, accelerators=machine("580.1", idle))) == []


def test_memory_errors_are_bad_and_parts_are_noted() -> None:
    told = findings(Facts(torch=SEEN, accelerators=machine("580.1", replace(A100, ecc_errors=2, mig=True))))
    assert [(one.rule, one.severity) for one in told] == [("gpu-memory-errors.0", "bad"), ("gpu-parts.0", "note")]


def test_gpus_of_others_are_noted() -> None:
    assert rules(Facts(torch=CPU, accelerators=Accelerators(on_bus=("AMD",)))) == ["torch-without-rocm"]
    assert rules(Facts(torch=replace(CPU, mps=True), accelerators=Accelerators())) == ["mps-unused"]
