"""What is wrong with a machine: each rule, and all of them together."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.doctor import MachineFacts, MachineFinding, findings
from steadytrain.doctor import rules as rule_module
from steadytrain.doctor.facts import (
    Accelerators,
    Decoders,
    FolderFacts,
    Gpu,
    Load,
    Memory,
    Package,
    Processor,
    System,
    Torch,
    TorchDevice,
)
from steadytrain.doctor.rules import SEVERITIES, VARIABLES
from steadytrain.machine.facts import cores as usable_cores
from steadytrain.machine.nvml import GpuProcess
from steadytrain.training.device import default_compute_threads

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


def rules(facts: MachineFacts) -> list[str]:
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
    first = findings(MachineFacts(torch=torch, accelerators=gpus, system=system, variables=variables))[0]
    assert (first.rule, first.severity) == (rule, severity)
    assert first.why == "Training runs on the CPU, many times slower and without an error message."


def test_a_driver_too_old_says_which_is_needed_and_which_torch_would_do() -> None:
    first = findings(MachineFacts(torch=CUDA13, accelerators=machine("535.129.03"), system=HOST))[0]
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
    findings = rules(MachineFacts(torch=replace(CUDA13, cuda=cuda), accelerators=machine(driver), system=HOST))
    assert ("driver-too-old" in findings) is old


def test_a_gpu_that_torch_sees_is_fine_whatever_the_driver_is_called() -> None:
    """With NVIDIA's compatibility package an older driver does."""
    assert rules(MachineFacts(torch=SEEN, accelerators=machine("535.129.03"), system=HOST)) == []


def test_a_machine_without_a_gpu_trains_on_the_cpu_and_nothing_is_wrong() -> None:
    none = Accelerators(on_bus=("Intel",), device_files=0, driver_error="NVML Shared Library Not Found")
    for torch in (CPU, CUDA13):
        assert rules(MachineFacts(torch=torch, accelerators=none, system=HOST)) == []


def test_a_cpu_build_in_a_container_without_a_gpu_may_be_meant_so() -> None:
    first = findings(MachineFacts(torch=CPU, accelerators=machine(files=0), system=DOCKER))[0]
    assert (first.rule, first.severity) == ("torch-without-cuda", "warn")


def test_a_driver_that_was_updated_under_a_running_kernel() -> None:
    broken = Accelerators(driver="580.65.06", driver_error="Driver/library version mismatch", on_bus=("NVIDIA",))
    first = findings(MachineFacts(torch=CUDA13, accelerators=broken, system=HOST))[0]
    assert first.rule == "driver-mismatch" and "restart" in first.remedy


def test_several_gpus_are_counted_by_name() -> None:
    gpus = machine("580.65.06", A100, A100, Gpu(name="Quadro K620"))
    assert findings(MachineFacts(torch=CPU, accelerators=gpus))[0].what.startswith(
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
    first = findings(MachineFacts(torch=torch))[0]
    assert (first.rule, first.severity) == (rule, "bad")
    assert (torch.error or torch.torchvision_error or "") in first.what or torch.state == "missing"


def test_a_build_without_code_for_the_gpu_is_bad() -> None:
    blackwell = TorchDevice(
        name="NVIDIA GeForce RTX 5090", capability="12.0", memory_bytes=32 << 30, failure="no kernel"
    )
    old = replace(SEEN, devices=(blackwell,), built_for=("sm_80", "sm_90"))
    first = findings(MachineFacts(torch=old))[0]
    assert (first.rule, first.severity) == ("gpu-architecture.0", "bad")
    assert "sm_120" in first.what and "sm_80, sm_90" in first.why


def test_a_gpu_that_cannot_compute_is_bad() -> None:
    held = TorchDevice(
        name="A100", capability="8.0", memory_bytes=1, failure="CUDA error: device is busy or unavailable"
    )
    first = findings(MachineFacts(torch=replace(SEEN, devices=(held,))))[0]
    assert first.rule == "gpu-failing.0" and "busy or unavailable" in first.what


def test_a_gpu_in_use_names_who_uses_it() -> None:
    taken = Gpu(
        name=A100.name,
        busy_share=0.97,
        memory_bytes=80_000_000_000,
        memory_used_bytes=60_000_000_000,
        processes=(GpuProcess(pid=4242, name="python3", memory_bytes=1), GpuProcess(pid=7)),
    )
    (problem,) = findings(MachineFacts(torch=SEEN, accelerators=machine("580.1", A100, taken)))
    assert problem.rule == "gpu-busy.1"
    assert problem.what == (
        "GPU 1 (NVIDIA A100-SXM4-80GB) is in use: 97 % busy, 60.0 GB of 80.0 GB in use, python3 (4242), process (7)"
    )


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
    findings = rules(MachineFacts(torch=SEEN, accelerators=machine("580.1", slow)))
    assert findings == ["gpu-throttled.0", "gpu-power.0", "gpu-clock.0", "gpu-link.0"]


def test_a_gpu_at_rest_is_not_called_slow() -> None:
    idle = replace(A100, throttled_by=("idle",), mhz=210, mhz_max=1410, power_limit_watts=400, power_default_watts=400)
    assert rules(MachineFacts(torch=SEEN, accelerators=machine("580.1", idle))) == []


def test_gpus_that_cuda_hides_are_nobodys_trouble() -> None:
    users = (GpuProcess(pid=7),)
    hidden = replace(A100, index=0, visible=False, processes=users, throttled_by=("heat",), ecc_errors=1)
    assert rules(MachineFacts(torch=SEEN, accelerators=machine("580.1", hidden, replace(A100, index=1)))) == []
    shown = [replace(hidden, visible=True), replace(A100, index=1)]
    assert "gpu-busy.0" in rules(MachineFacts(torch=SEEN, accelerators=machine("580.1", *shown)))


@pytest.mark.parametrize(
    ("limit", "usual", "most", "remedy"),
    [
        (250, 400, 400, "nvidia-smi -i 0 -pl 400, unless it was set on purpose"),
        (250, 400, 300, "nvidia-smi -i 0 -pl 300, unless it was set on purpose"),
        (250, 400, 250, "ask who runs this machine: no higher limit may be set on it"),
    ],
)
def test_a_power_limit_is_advised_as_far_as_one_may_be_set(limit: int, usual: int, most: int, remedy: str) -> None:
    gpu = replace(A100, power_limit_watts=limit, power_default_watts=usual, power_most_watts=most)
    (finding,) = findings(MachineFacts(torch=SEEN, accelerators=machine("580.1", gpu)))
    assert (finding.rule, finding.remedy) == ("gpu-power.0", remedy)


def test_memory_errors_are_bad() -> None:
    problem = only(MachineFacts(torch=SEEN, accelerators=machine("580.1", replace(A100, ecc_errors=2))))
    assert (problem.rule, problem.severity) == ("gpu-memory-errors.0", "bad")


def test_gpus_of_others_are_noted() -> None:
    assert rules(MachineFacts(torch=CPU, accelerators=Accelerators(on_bus=("AMD",)))) == ["torch-without-rocm"]
    assert rules(MachineFacts(torch=replace(CPU, mps=True), accelerators=Accelerators())) == ["mps-unused"]


EIGHT = Processor(logical=8, allowed=8, usable=8)
GB = 10**9


def only(facts: MachineFacts) -> MachineFinding:
    """The one finding that there is."""
    (problem,) = findings(facts)
    return problem


def test_facts_of_which_none_is_known_say_nothing() -> None:
    assert findings(MachineFacts()) == []
    assert findings(MachineFacts(places={"cache": FolderFacts(path="/c"), "shm": FolderFacts(path="/dev/shm")})) == []


def test_a_quota_is_told_with_how_often_it_was_reached() -> None:
    cpu = Processor(logical=64, allowed=64, quota=3.5, usable=4)
    finding = only(MachineFacts(processor=cpu, load=Load(throttled_share=0.25)))
    assert (finding.rule, finding.severity) == ("quota", "warn")
    assert (
        finding.what
        == "the CPU quota (cgroup) is 3.5 cores of the machine's 64, and the process was throttled in 25 % of its "
        "periods"
    )
    assert only(MachineFacts(processor=cpu)).severity == "note"


def test_a_quota_above_what_affinity_leaves_costs_nothing() -> None:
    assert only(MachineFacts(processor=Processor(logical=8, allowed=2, quota=4.0, usable=2))).rule == "affinity"
    assert findings(MachineFacts(processor=Processor(logical=8, allowed=8, quota=8.0, usable=8))) == []


@pytest.mark.parametrize(("load", "severity"), [(3.9, None), (5.0, "note"), (8.0, "warn"), (40.0, "warn")])
def test_load_counts_against_the_machines_cores(load: float, severity: str | None) -> None:
    problems = findings(MachineFacts(processor=EIGHT, load=Load(load_1=load, pressure_cpu_share=0.5)))
    assert [problem.severity for problem in problems] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("load", "rule"),
    [
        (Load(steal_share=0.12), "steal"),
        (Load(pressure_memory_share=0.2), "pressure-memory"),
        (Load(pressure_io_share=0.6), "pressure-disk"),
    ],
)
def test_what_others_take_is_told(load: Load, rule: str) -> None:
    assert only(MachineFacts(load=load)).rule == rule


@pytest.mark.parametrize(
    ("governor", "driver", "preference", "wrong"),
    [
        ("powersave", "acpi-cpufreq", None, True),
        ("powersave", "intel_pstate", "balance_performance", False),  # that driver's ordinary governor
        ("powersave", "amd-pstate-epp", "power", True),
        ("performance", "intel_pstate", "performance", False),
        ("schedutil", "acpi-cpufreq", None, False),
    ],
)
def test_a_saving_governor_is_told_apart_from_one_that_is_only_called_so(
    governor: str, driver: str, preference: str | None, wrong: bool
) -> None:
    cpu = Processor(governor=governor, frequency_driver=driver, energy_preference=preference)
    assert bool(findings(MachineFacts(processor=cpu))) is wrong


def test_a_clock_that_is_held_down() -> None:
    assert only(MachineFacts(processor=Processor(mhz_max=3900, mhz_allowed=2100))).rule == "clock-capped"
    assert findings(MachineFacts(processor=Processor(mhz_max=3900, mhz_allowed=3900))) == []


def test_little_memory_is_told_by_whose_it_is() -> None:
    finding = only(MachineFacts(memory=Memory(total_bytes=64 * GB, limit_bytes=8 * GB, available_bytes=GB // 2)))
    assert finding.what == "500.0 MB of the control group's limit (8.0 GB) is available"
    assert only(MachineFacts(memory=Memory(total_bytes=64 * GB, available_bytes=3 * GB))).rule == "memory"
    assert findings(MachineFacts(memory=Memory(total_bytes=2 * GB, available_bytes=GB * 3 // 2))) == []


def test_swap_costs_more_where_memory_is_waited_for() -> None:
    swapped = Memory(swap_total_bytes=8 * GB, swap_used_bytes=GB)
    assert only(MachineFacts(memory=swapped)).severity == "note"
    assert only(MachineFacts(memory=swapped, load=Load(pressure_memory_share=0.02))).severity == "warn"
    assert findings(MachineFacts(memory=Memory(swap_total_bytes=8 * GB, swap_used_bytes=10**6))) == []


def test_a_run_that_vanished_has_an_explanation() -> None:
    finding = only(MachineFacts(memory=Memory(out_of_memory_kills=2)))
    assert finding.what == "the kernel killed 2 processes here because memory ran out"


def test_huge_pages_that_are_switched_off() -> None:
    assert only(MachineFacts(memory=Memory(huge_pages="never"))).rule == "huge-pages"
    assert findings(MachineFacts(memory=Memory(huge_pages="madvise"))) == []


def test_small_shared_memory_is_noted_and_it_is_said_that_it_does_not_matter_here() -> None:
    finding = only(
        MachineFacts(places={"shm": FolderFacts(path="/dev/shm", kind="tmpfs", total_bytes=67_108_864, writable=True)})
    )
    assert (finding.rule, finding.severity) == ("shm", "note")
    assert "data loader does not need it" in finding.why


def test_a_cache_on_a_network_costs_and_a_current_folder_there_is_noted() -> None:
    nfs = {
        "cache": FolderFacts(path="/c", kind="nfs4", network=True),
        "here": FolderFacts(path="/h", kind="nfs4", network=True),
    }
    assert [(finding.rule, finding.severity) for finding in findings(MachineFacts(places=nfs))] == [
        ("network.cache", "warn"),
        ("network.here", "note"),
    ]
    assert "STEADYTRAIN_CACHE" in findings(MachineFacts(places=nfs))[0].remedy


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        (FolderFacts(path="/c", writable=False), "not-writable.cache"),
        (FolderFacts(path="/c", writable=True, total_bytes=500 * GB, free_bytes=GB), "full.cache"),
    ],
)
def test_a_cache_that_cannot_take_more(place: FolderFacts, rule: str) -> None:
    assert only(MachineFacts(places={"cache": place})).rule == rule


def test_a_small_disk_with_room_is_not_called_full() -> None:
    small = FolderFacts(path="/tmp", writable=True, total_bytes=2 * GB, free_bytes=GB)
    assert findings(MachineFacts(places={"temporary": small})) == []


FOUR = Processor(logical=4, allowed=4, usable=4)


def test_pinning_is_bad_by_what_is_left_and_not_by_the_variable() -> None:
    pinned = {"OMP_PROC_BIND": "true"}
    finding = only(MachineFacts(processor=FOUR, torch=Torch(allowed=1), variables=pinned))
    assert (finding.severity, finding.what) == (
        "bad",
        "after loading torch this process may use 1 core of 4 (OMP_PROC_BIND=true)",
    )
    assert finding.remedy == "unset OMP_PROC_BIND"
    assert findings(MachineFacts(processor=FOUR, torch=Torch(allowed=4), variables=pinned)) == []


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_a_thread_that_is_started_after_torch_inherits_the_pinning() -> None:
    """What the rule says, seen: with GNU's OpenMP, which torch's own wheels for Linux carry."""
    code = (
        "import os, threading, torch\n(torch.ones(256, 256) @ torch.ones(256, 256)).sum()\n"
        "told = []\nthread = threading.Thread(target=lambda: told.append(len(os.sched_getaffinity(0))))\n"
        "thread.start(); thread.join(); print(len(os.sched_getaffinity(0)), *told)"
    )
    environment = {**os.environ, "OMP_PROC_BIND": "true", "OMP_NUM_THREADS": "2"}
    words = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment).split()
    assert words[0] == words[1] and int(words[0]) < len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("value", "torch", "severity"),
    [
        ("1", 1, "warn"),
        ("3", 3, "warn"),
        ("64", 64, "warn"),
        ("8,2", 8, "warn"),
        ("many", 4, None),
        ("4", 4, None),
        (None, 64, "warn"),  # a quota, of which torch does not know
        (None, 4, None),
    ],
)
def test_threads_beside_cores(value: str | None, torch: int, severity: str | None) -> None:
    variables = {} if value is None else {"OMP_NUM_THREADS": value}
    problems = findings(MachineFacts(processor=FOUR, torch=Torch(threads=torch), variables=variables))
    assert [problem.severity for problem in problems] == ([severity] if severity else [])


def test_few_threads_matter_little_beside_a_gpu() -> None:
    facts = MachineFacts(processor=FOUR, torch=Torch(threads=1, sees_gpu=True), variables={"OMP_NUM_THREADS": "1"})
    assert (only(facts).severity, only(facts).what) == ("note", "OMP_NUM_THREADS=1 limits computing to 1 of 4 cores")


def test_what_is_said_of_training_and_threads_is_so(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = usable_cores()
    for value, threads in (("1", 1), (str(cores + 5), cores), ("many", cores), ("0", cores)):
        monkeypatch.setenv("OMP_NUM_THREADS", value)
        assert default_compute_threads() == threads


def test_one_thread_on_one_core_is_as_it_should_be() -> None:
    processor = Processor(logical=1, allowed=1, usable=1)
    assert findings(MachineFacts(processor=processor, torch=Torch(threads=1), variables={"OMP_NUM_THREADS": "1"})) == []


@pytest.mark.parametrize(
    ("name", "value", "is_found"),
    [
        ("CUDA_LAUNCH_BLOCKING", "1", True),
        ("CUDA_LAUNCH_BLOCKING", "0", False),
        ("NVIDIA_TF32_OVERRIDE", "0", True),
        ("NVIDIA_TF32_OVERRIDE", "1", False),
        ("OMP_WAIT_POLICY", "ACTIVE", True),
        ("OMP_WAIT_POLICY", "PASSIVE", False),
        ("JSIMD_FORCENONE", "1", True),
        ("PYTHONMALLOC", "malloc_debug", True),
        ("PYTHONMALLOC", "malloc", False),
        ("PYTHONTRACEMALLOC", "0", False),
        ("ATEN_CPU_CAPABILITY", "default", True),
    ],
)
def test_variables_cost_by_their_value(name: str, value: str, is_found: bool) -> None:
    assert [finding.rule for finding in findings(MachineFacts(variables={name: value}))] == (
        [f"variable.{name}"] if is_found else []
    )


def test_an_empty_variable_costs_nothing() -> None:
    assert findings(MachineFacts(variables={name: "" for name, *_ in VARIABLES})) == []


@pytest.mark.parametrize(
    ("decoders", "rules"),
    [
        (Decoders(simplejpeg_error="ImportError: no"), ["simplejpeg"]),
        (Decoders(simplejpeg_error="ended by SIGILL", pillow_error="ended by SIGILL"), ["simplejpeg"]),
        (Decoders(pillow_error="ImportError: no"), ["pillow"]),
        (Decoders(pillow_turbo="3.1.2"), []),
        (Decoders(resizer="no"), ["resizer"]),
        (Decoders(resizer_error="ImportError: no"), ["resizer"]),
        (Decoders(resizer="4.0.1"), []),
        (Decoders(parts="no"), []),  # on a processor that is not known
        (Decoders(parts_error="OSError: no"), ["parts"]),
        (Decoders(parts="5"), []),
    ],
)
def test_decoders(decoders: Decoders, rules: list[str]) -> None:
    assert [finding.rule for finding in findings(MachineFacts(decoders=decoders))] == rules


@pytest.mark.parametrize(("isa", "rules"), [("avx2", ["parts"]), ("avx512", ["parts"]), ("sse4.2", [])])
def test_parts_of_jpegs_are_missed_where_the_processor_could_decode_them(isa: str, rules: list[str]) -> None:
    facts = MachineFacts(processor=Processor(isa=isa), decoders=Decoders(parts="no"))
    assert [finding.rule for finding in findings(facts) if finding.rule == "parts"] == rules


def test_versions_out_of_range_and_missing_packages() -> None:
    packages = {
        "steadytrain": Package(version=None),  # run from its source
        "torch": Package(version="2.4.0", wanted=">=2.10", fits=False),
        "python": Package(version="3.10.1", wanted=">=3.11", fits=False),
        "safetensors": Package(version=None, wanted=">=0.5"),
        "numpy": Package(version="2.4.6", wanted=">=1.26", fits=True),
        "triton": Package(version="3.9.0"),
    }
    by_rule = {finding.rule: finding for finding in findings(MachineFacts(packages=packages))}
    assert list(by_rule) == ["missing.safetensors", "version.torch", "version.python"]
    assert by_rule["version.torch"].what == "torch 2.4.0 is outside >=2.10"
    assert by_rule["missing.safetensors"].remedy == "pip install 'safetensors>=0.5'"


SIZES = st.one_of(st.none(), st.integers(0, 10**13))
SHARES = st.one_of(st.none(), st.floats(0, 1))
COUNTS = st.one_of(st.none(), st.integers(1, 1024))


def any_of(kind: type) -> st.SearchStrategy[Any]:
    """Facts of a kind; no kernel tells of infinity."""
    return st.from_type(kind).map(_finite)


def _finite(facts: Any) -> Any:
    odd = [f.name for f in fields(facts) if isinstance(v := getattr(facts, f.name), float) and not math.isfinite(v)]
    return replace(facts, **dict.fromkeys(odd))


FACTS = st.builds(
    MachineFacts,
    system=any_of(System),
    processor=st.builds(
        Processor, logical=COUNTS, allowed=COUNTS, usable=COUNTS, quota=st.one_of(st.none(), st.floats(0.01, 99))
    ),
    load=st.builds(Load, load_1=st.one_of(st.none(), st.floats(0, 1e4)), steal_share=SHARES, throttled_share=SHARES),
    memory=st.builds(Memory, total_bytes=SIZES, available_bytes=SIZES, limit_bytes=SIZES, swap_used_bytes=SIZES),
    places=st.dictionaries(st.sampled_from(["here", "cache", "shm"]), any_of(FolderFacts)),
    variables=st.dictionaries(st.sampled_from(["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"]), st.text(max_size=4)),
    torch=st.builds(Torch, state=st.sampled_from([None, "works", "broken", "missing"]), threads=COUNTS, allowed=COUNTS),
    accelerators=st.builds(
        Accelerators,
        gpus=st.lists(any_of(Gpu).map(lambda gpu: replace(gpu, index=None)), max_size=2).map(tuple),
        device_files=COUNTS,
    ),
    packages=st.dictionaries(st.sampled_from(["torch", "numpy"]), any_of(Package)),
)


@given(FACTS)
def test_every_finding_says_what_why_and_what_to_do_the_worst_first(facts: MachineFacts) -> None:
    problems = findings(facts)
    assert all(problem.what and problem.why and problem.remedy for problem in problems)
    assert len({problem.rule for problem in problems}) == len(problems)
    places = [SEVERITIES.index(problem.severity) for problem in problems]
    assert places == sorted(places)


def test_of_two_as_severe_the_gpu_comes_first() -> None:
    warned = findings(MachineFacts(torch=CPU, accelerators=machine(files=0), system=DOCKER, load=Load(steal_share=0.5)))
    assert [finding.rule for finding in warned] == ["torch-without-cuda", "steal"]


def test_every_rule_is_on_the_page() -> None:
    names = set(re.findall(r'\b(?:bad|warn|note)\(\s*f?"([a-z-]+)', Path(rule_module.__file__).read_text()))
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    rows = [line.partition(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    words = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)}
    assert {name for name in names if name not in words and not name.endswith("-")} == set()
    assert {"variable", "missing", "pressure-memory", "pressure-disk"} <= words and len(names) > 30


@pytest.mark.parametrize(
    ("torch", "compilers", "severity", "what"),
    [
        (SEEN, (), "warn", "no C compiler: --compile will not work here"),
        (SEEN, ("C++",), "warn", "no C compiler: --compile will not work here"),
        (SEEN, ("C",), None, ""),
        (CPU, ("C",), "note", "no C++ compiler: --compile will not work here"),
        (CPU, ("C", "C++"), None, ""),
        (CPU, None, None, ""),
    ],
)
def test_a_compiler_that_compiled_code_needs_is_missed(
    torch: Torch, compilers: tuple[str, ...] | None, severity: str | None, what: str
) -> None:
    facts = MachineFacts(torch=torch, system=replace(HOST, compilers=compilers))
    seen = [finding for finding in findings(facts) if finding.rule == "no-compiler"]
    assert [(finding.severity, finding.what) for finding in seen] == ([(severity, what)] if severity else [])


def test_fast_adapters_without_their_library_are_told() -> None:
    without = Accelerators(infiniband=("mlx5_0", "mlx5_1"), ibverbs=False, device_files=1)
    [finding] = findings(MachineFacts(accelerators=without))
    assert (finding.rule, finding.severity) == ("no-ibverbs", "warn")
    assert finding.what == "no libibverbs beside mlx5_0, mlx5_1 (InfiniBand, RoCE or EFA)"
    assert "libibverbs1 librdmacm1 ibverbs-providers" in finding.remedy
    assert findings(MachineFacts(accelerators=replace(without, ibverbs=True))) == []
    assert findings(MachineFacts(accelerators=replace(without, device_files=0))) == [], "nothing there uses NCCL"
