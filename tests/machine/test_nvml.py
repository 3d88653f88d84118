"""GPUs as NVIDIA's library tells of them, by a stand-in of its answers; its names are the real library's."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.machine.recorded import GEFORCE, H100, Library
from tests.monitor.process_watch.series import averaged, square

from steadytrain.machine import nvml
from steadytrain.machine.nvml import (
    REASONS,
    Gpu,
    GpuProcess,
    GpuReader,
    GpuSampler,
    GpuWatcher,
    NoNvml,
    gpu_facts,
    open_gpus,
)
from steadytrain.monitor.process_watch.rhythm import rhythm

HOST = Path("/nowhere")  # a system whose process numbers are the driver's


def sampler(driver: Library) -> GpuSampler:
    """Sample all GPUs of a driver."""
    return GpuSampler([gpu.get("UUID", "") for gpu in driver.gpus], driver, variables={}, root=HOST)


def facts_of(library: Library) -> tuple[str, list[Gpu]]:
    """The driver's version and what is known of each GPU."""
    with open_gpus(library) as (driver, gpus):
        return driver, list(map(gpu_facts, gpus))


def test_what_cannot_be_told_is_none() -> None:
    reader = GpuReader(Library(GEFORCE), GEFORCE)
    assert reader.read("Temperature", 0) == 88
    assert reader.read("EccMode") is None
    assert reader.read_watts("PowerUsage") == 349.0 and reader.read_watts("TotalEnergyConsumption") is None
    assert reader.name() == "NVIDIA GeForce RTX 3090"


def test_a_release_of_the_library_without_a_function() -> None:
    assert GpuReader(Library, H100).read("Name") is None


def test_reasons_by_the_new_name_and_by_the_old() -> None:
    assert GpuReader(Library(H100), H100).throttle_reasons() == ("idle",)
    assert GpuReader(Library(GEFORCE), GEFORCE).throttle_reasons() == ("power limit", "heat")
    assert GpuReader(Library({}), {}).throttle_reasons() is None


def test_the_bits_are_the_librarys() -> None:
    real = pytest.importorskip("pynvml")
    assert REASONS[real.nvmlClocksEventReasonSwPowerCap] == "power limit"
    assert REASONS[real.nvmlClocksEventReasonHwThermalSlowdown] == "heat (hardware)"
    assert REASONS[real.nvmlClocksEventReasonHwPowerBrakeSlowdown] == "power brake"


def test_every_name_that_is_asked_exists_in_the_real_library() -> None:
    real = pytest.importorskip("pynvml")
    source = Path(nvml.__file__).read_text()
    names = set(re.findall(r"nvml\.((?:nvml|NVML_|c_nvml)\w+)", source))
    names |= {f"nvmlDeviceGet{name}" for name in re.findall(r'\bread(?:_watts)?\("(\w+)"', source)}
    names -= {"NVMLError", "nvmlDeviceGetCurrentClocksThrottleReasons"}  # the latter is gone from the newest releases
    assert len(names) > 40
    assert not {name for name in names if not hasattr(real, name)}
    asked = real.c_nvmlGpmMetricsGet_t()
    assert {"version", "numMetrics", "sample1", "sample2"} <= {name for name, _ in asked._fields_}
    assert len(asked.metrics) > 2 and asked.metrics[0].nvmlReturn == 0


def test_a_gpu_at_rest() -> None:
    driver, (gpu,) = facts_of(Library(H100))
    assert (driver, gpu.name, gpu.capability) == ("580.65.06", "NVIDIA H100 80GB HBM3", "9.0")
    assert (gpu.memory_bytes, gpu.busy_share) == (85_520_809_984, 0.0)
    assert (gpu.mhz, gpu.mhz_max) == (345, 1980)
    assert (gpu.power_watts, gpu.power_limit_watts, gpu.temperature) == (71.4, 700.0, 31)
    assert (gpu.throttled_by, gpu.processes) == (("idle",), ())
    assert (gpu.ecc_errors, gpu.mig, gpu.pcie_width_max) == (0, False, 16)


def test_memory_that_the_driver_keeps_for_itself_is_not_in_use() -> None:
    _, (gpu, older) = facts_of(Library(H100, GEFORCE))
    assert gpu.memory_used_bytes == 71_159_552  # what nvidia-smi shows: 550 MB are the driver's own
    assert older.memory_used_bytes == 20_447_170_048  # which does not tell them apart


def test_a_gpu_in_use_and_an_older_driver() -> None:
    driver, (gpu,) = facts_of(Library(GEFORCE, driver="470.57.02"))
    assert (driver, gpu.name) == ("470.57.02", "NVIDIA GeForce RTX 3090")
    assert gpu.processes == (
        GpuProcess(pid=4242, name="/usr/bin/python3", memory_bytes=20_000_000_000),
        GpuProcess(pid=77, name=None, memory_bytes=None),
    )
    assert gpu.throttled_by == ("power limit", "heat")


class LatinNames(Library):
    """Names of processes that are not UTF-8, which the real library decodes as such."""

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        return b"/opt/entra\xeenement".decode()


def test_a_process_name_that_is_not_utf_8_is_no_error() -> None:
    _, (gpu,) = facts_of(LatinNames(GEFORCE))
    assert gpu.processes is not None and {process.name for process in gpu.processes} == {"/opt/entra\ufffdnement"}


def test_what_a_gpu_does_not_support_is_unknown_and_not_zero() -> None:
    _, (gpu,) = facts_of(Library(GEFORCE))
    assert (gpu.ecc_errors, gpu.mig) == (None, None)
    _, (bare,) = facts_of(Library({"Name": "GRID"}))
    assert (bare.memory_bytes, bare.busy_share, bare.processes, bare.throttled_by) == (None, None, None, None)


def test_the_library_is_closed_again_also_after_a_failure() -> None:
    library = Library(H100)
    facts_of(library)
    assert library.open == 0
    with pytest.raises(NoNvml, match="Driver Not Loaded"):
        facts_of(Library(refuses="Driver Not Loaded"))


class Driver(Library):
    """A library with a driver's samples of the utilisation, and with GPM where a GPU's table has ``gpm``."""

    NVML_GPU_UTILIZATION_SAMPLES = 1
    NVML_GPM_METRICS_GET_VERSION, NVML_GPM_METRIC_SM_UTIL, NVML_GPM_METRIC_ANY_TENSOR_UTIL = 1, 2, 5

    def __init__(self, *gpus: dict[str, Any]) -> None:
        super().__init__(*gpus)
        self.allocated = 0

    def nvmlDeviceGetSamples(self, of: dict[str, Any], kind: int, since: int) -> tuple[int, list[Any]]:
        samples = [(at, value) for at, value in of.get("samples", []) if at > since]
        if not samples:
            raise self.NVMLError("Not Found")
        return 1, [SimpleNamespace(timeStamp=at, sampleValue=SimpleNamespace(uiVal=value)) for at, value in samples]

    def nvmlGpmQueryDeviceSupport(self, of: dict[str, Any]) -> Any:
        return SimpleNamespace(isSupportedDevice="gpm" in of)

    def nvmlGpmSampleAlloc(self) -> Any:
        self.allocated += 1
        return SimpleNamespace(counts={})

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.allocated -= 1

    def nvmlGpmSampleGet(self, of: dict[str, Any], sample: Any) -> Any:
        sample.counts = dict(of["gpm"])
        return sample

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace() for _ in range(8)])

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        for metric in asked.metrics[: asked.numMetrics]:
            newer, older = asked.sample2.counts, asked.sample1.counts
            metric.nvmlReturn = 0 if metric.metricId in newer else 3
            metric.value = newer.get(metric.metricId, 0.0) - older.get(metric.metricId, 0.0)


def _h100(**more: Any) -> dict[str, Any]:
    return {**H100, "UUID": "GPU-aa", "TotalEnergyConsumption": 5_000_000, **more}


def test_a_busy_gpu_by_what_its_counters_did_since_the_last_reading() -> None:
    # Before the run the driver had seen another job; that is not ours.
    table = _h100(samples=[(1, 99), (2, 99)], gpm={2: 10.0, 5: 4.0}, **_used_by(os.getpid()))
    gpus = sampler(Driver(table))
    table["samples"] += [(3, 80), (4, 90)]
    table["gpm"] = {2: 70.0, 5: 34.0}
    table["TotalEnergyConsumption"] += 35_000
    table["ClockInfo"] = {1: 1410, 2: 2619}
    table["CurrentClocksEventReasons"] = 0x4
    (sample,) = gpus.read({os.getpid()})
    assert (sample.index, sample.name) == (0, "NVIDIA H100 80GB HBM3")
    assert (sample.utilisation, sample.sm_active, sample.tensor_active) == (0.85, 0.6, 0.3)
    assert sample.energy_joules == 35.0
    assert sample.power_watts == pytest.approx(35.0 / sample.seconds, rel=0.05)
    assert (sample.clock_hertz, sample.clock_limit_hertz, sample.temperature) == (1.41e9, 1.98e9, 31)
    assert sample.throttled == ("power limit",)
    assert sample.memory_total_bytes == 85_520_809_984
    assert sample.missing == ()


def test_what_an_older_gpu_does_not_tell_is_named_and_not_zero() -> None:
    gpus = sampler(Driver(GEFORCE))
    (sample,) = gpus.read({4242})
    assert {"sm_active", "tensor_active", "energy_joules"} <= set(sample.missing)
    assert (sample.sm_active, sample.energy_joules) == (None, None)
    assert (sample.utilisation, sample.power_watts) == (
        0.97,
        349.0,
    )  # of the moment: it has no samples, no energy counter
    assert sample.processes == 1
    (other,) = sample.other_processes
    assert (other["pid"], other["memory_bytes"]) == (77, None)


def test_other_processes_on_a_gpu_are_named_with_their_memory() -> None:
    (sample,) = sampler(Driver(GEFORCE)).read({77})
    (other,) = sample.other_processes
    assert (other["pid"], other["name"], other["memory_bytes"]) == (4242, "python3", 20_000_000_000)


def test_a_gpu_at_rest_is_not_held_down() -> None:
    (sample,) = sampler(Driver(_h100())).read(set())
    assert sample.throttled == () and "throttled" not in sample.missing
    assert sample.utilisation == 0.0


def test_a_gpu_that_says_nothing() -> None:
    (sample,) = sampler(Driver({"Name": "GRID"})).read(set())
    assert {"utilisation", "memory_bytes", "power_watts", "throttled", "processes"} <= set(sample.missing)


def test_only_the_gpus_of_the_run_are_read() -> None:
    driver = Driver(_h100(UUID="GPU-aa"), _h100(UUID="GPU-bb"), _h100(UUID="GPU-cc"))

    def read(*uuids: str, **variables: str) -> list[int]:
        return [load.index for load in GpuSampler(uuids, driver, variables=variables, root=HOST).read(set())]

    assert read("cc", "GPU-aa") == [0, 2]  # torch leaves the beginning out
    assert read("bb", CUDA_VISIBLE_DEVICES="0") == [1]
    assert read("unknown", CUDA_VISIBLE_DEVICES="2") == [2], "a GPU under another name: CUDA shows no other"
    with pytest.raises(NoNvml, match="does not know unknown"):
        read("unknown")
    assert driver.open == 4 - 1, "what was refused is closed again"


def test_the_library_and_its_memory_are_given_back() -> None:
    driver = Driver(_h100(gpm={2: 0.0, 5: 0.0}))
    gpus = sampler(driver)
    assert (driver.open, driver.allocated) == (1, 2)
    gpus.close()
    assert (driver.open, driver.allocated) == (0, 0)


def test_a_counter_that_began_anew_is_not_told() -> None:
    table = _h100()
    gpus = sampler(Driver(table))
    table["TotalEnergyConsumption"] = 10
    (sample,) = gpus.read(set())
    assert sample.energy_joules is None and "energy_joules" in sample.missing
    assert sample.power_watts == 71.4


def _used_by(*pids: int) -> dict[str, Any]:
    return {"ComputeRunningProcesses": [SimpleNamespace(pid=pid, usedGpuMemory=None) for pid in pids]}


def test_a_look_tells_the_mean_of_the_drivers_samples_since_the_one_before() -> None:
    table = {**H100, "samples": [(1, 90), (2, 10)], **_used_by(7)}
    gpus = GpuWatcher(Driver(table))
    assert gpus.read({7}, set())[0].utilisation == 0.10
    assert gpus.read({7}, set())[0].utilisation == 0.10  # nothing new
    table["samples"] += [(3, 40), (4, 60)]
    load = gpus.read({7}, set())[0]
    assert load.utilisation == 0.50
    assert (load.name, load.power_watts, load.power_limit_watts) == ("NVIDIA H100 80GB HBM3", 71.4, 700.0)
    assert (load.memory_bytes, load.memory_total_bytes) == (71_159_552, 85_520_809_984)
    gpus.close()


def test_a_driver_without_samples_gives_its_newest_figure() -> None:
    assert GpuWatcher(Driver(GEFORCE)).read({4242}, set())[0].utilisation == 0.97


def test_the_rhythm_of_a_recorded_utilisation_is_found() -> None:
    swing = averaged(square(1.8, 0.6), 0.17)  # what a driver samples each sixth of a second
    table: dict[str, Any] = {**H100, "samples": [], **_used_by(7)}
    gpus, values, sent = GpuWatcher(Driver(table)), [], 0
    for look in range(1, 200):
        while sent * 167 < look * 100:
            table["samples"].append((sent * 167_000 + 1, round(100 * swing(sent * 0.167))))
            sent += 1
        values.append(gpus.read({7}, set())[0].utilisation or 0.0)
    pattern = rhythm(values, interval_seconds=0.1)
    assert pattern is not None and pattern.period_seconds == pytest.approx(1.8, rel=0.1)
    assert pattern.duty == pytest.approx(0.6, abs=0.1)


@pytest.mark.parametrize(
    ("users", "devices", "ours"),
    [
        ({7, 9}, {"nvidia0"}, True),
        ({9}, set(), False),  # its file is not open: somebody else's
        ({4711}, {"nvidia0"}, True),  # a container: the driver counts in the machine's numbers
        (set(), {"nvidia0"}, None),
        ({9}, None, None),
    ],
)
def test_whose_gpu_it_is(users: set[int], devices: set[str] | None, ours: bool | None) -> None:
    load = GpuWatcher(Driver({**H100, "MinorNumber": 0, **_used_by(*users)})).read({7}, devices)[0]
    assert load.ours == ours


def test_a_gpu_that_tells_nothing_is_no_error() -> None:
    load = GpuWatcher(Driver({})).read({7}, None)[0]
    assert (load.name, load.utilisation, load.power_watts, load.ours) == ("NVIDIA GPU", None, None, None)


def test_no_driver_is_told_in_its_own_words() -> None:
    library = Driver()
    library.refuses = "Driver Not Loaded"
    gpus = GpuWatcher(library)
    assert gpus.missing == "Driver Not Loaded" and gpus.read({7}, set()) == ()
    gpus.close()


def test_the_library_is_let_go() -> None:
    library = Driver(H100)
    GpuWatcher(library).close()
    assert library.open == 0


def test_the_counters_of_a_slice_are_asked_of_its_whole_gpu() -> None:
    class Sliced(Driver):
        """A driver that counts for a slice (MIG) by the whole GPU's handle and the slice's number."""

        def nvmlGpmQueryDeviceSupport(self, of: dict[str, Any]) -> Any:
            return SimpleNamespace(isSupportedDevice="counted" in of)

        def nvmlGpmMigSampleGet(self, of: dict[str, Any], instance: int, sample: Any) -> None:
            sample.counts = dict(of["counted"][instance])

    whole: dict[str, Any] = _h100(MigMode=(1, 1), MaxMigDeviceCount=1, counted={5: {2: 10.0, 5: 0.0}})
    part = {"Name": "NVIDIA H100 MIG 1g.10gb", "UUID": "MIG-cc", "GpuInstanceId": 5, "ComputeInstanceId": 0}
    library = Sliced(whole)
    library.nvmlDeviceGetMigDeviceHandleByIndex = lambda of, number: part  # type: ignore[attr-defined]
    gpus = GpuSampler(("MIG-cc",), library, variables={}, root=HOST)
    whole["counted"][5] = {2: 60.0, 5: 25.0}
    (sample,) = gpus.read(set())
    assert (sample.name, sample.sm_active, sample.tensor_active) == ("NVIDIA H100 MIG 1g.10gb", 0.5, 0.25)
