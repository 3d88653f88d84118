"""GPUs beside a run, by a stand-in for NVIDIA's library: there is no GPU where these tests run.

Its structures are the real library's where that is installed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.doctor.recorded import GEFORCE, H100, Library

from steadytrain.machine import gpu_sampler
from steadytrain.machine.gpu_sampler import Gpus


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
    table = _h100(samples=[(1, 99), (2, 99)], gpm={2: 10.0, 5: 4.0})
    gpus = Gpus(Driver(table), None)
    table["samples"] += [(3, 80), (4, 90)]
    table["gpm"] = {2: 70.0, 5: 34.0}
    table["TotalEnergyConsumption"] += 35_000
    table["ClockInfo"] = {1: 1410, 2: 2619}
    table["CurrentClocksEventReasons"] = 0x4
    (told,) = gpus.read({os.getpid()})
    assert (told.index, told.name) == (0, "NVIDIA H100 80GB HBM3")
    assert (told.utilisation, told.sm_active, told.tensor_active) == (0.85, 0.6, 0.3)
    assert told.energy_joules == 35.0
    assert told.power_watts == pytest.approx(35.0 / told.seconds, rel=0.05)
    assert (told.clock_hertz, told.clock_limit_hertz, told.temperature) == (1.41e9, 1.98e9, 31)
    assert told.throttled == ("power limit",)
    assert told.memory_total_bytes == 85_520_809_984
    assert told.missing == ()


def test_what_an_older_gpu_does_not_tell_is_named_and_not_zero() -> None:
    gpus = Gpus(Driver(GEFORCE), None)
    (told,) = gpus.read({4242})
    assert {"sm_active", "tensor_active", "energy_joules"} <= set(told.missing)
    assert (told.sm_active, told.energy_joules) == (None, None)
    assert (told.utilisation, told.power_watts) == (0.97, 349.0)  # of the moment: it has no samples, no energy counter
    assert told.processes == 1


def test_a_gpu_at_rest_is_not_held_down() -> None:
    (told,) = Gpus(Driver(_h100()), None).read(set())
    assert told.throttled == () and "throttled" not in told.missing
    assert told.utilisation == 0.0


def test_a_gpu_that_says_nothing() -> None:
    (told,) = Gpus(Driver({"Name": "GRID"}), None).read(set())
    assert {"utilisation", "memory_bytes", "power_watts", "throttled", "processes"} <= set(told.missing)


def test_only_the_gpus_that_cuda_shows_are_read() -> None:
    driver = Driver(_h100(UUID="GPU-aa"), _h100(UUID=b"GPU-bb"), _h100(UUID="GPU-cc"))

    def shown(visible: str | None) -> list[int]:
        return [told.index for told in Gpus(driver, visible).read(set())]

    assert shown(None) == [0, 1, 2]
    assert shown("2,0") == [2, 0]
    assert shown("GPU-bb") == [1]
    assert shown("1,7,0") == [1]  # as CUDA does it
    assert shown("") == shown("-1") == []


def test_the_library_and_its_memory_are_given_back() -> None:
    driver = Driver(_h100(gpm={2: 0.0, 5: 0.0}))
    gpus = Gpus(driver, None)
    assert (driver.open, driver.allocated) == (1, 2)
    gpus.close()
    assert (driver.open, driver.allocated) == (0, 0)


def test_a_counter_that_began_anew_is_not_told() -> None:
    table = _h100()
    gpus = Gpus(Driver(table), None)
    table["TotalEnergyConsumption"] = 10
    (told,) = gpus.read(set())
    assert told.energy_joules is None and "energy_joules" in told.missing
    assert told.power_watts == 71.4


def test_every_name_that_is_asked_exists_in_the_real_library() -> None:
    real = pytest.importorskip("pynvml")
    source = Path(gpu_sampler.__file__).read_text()
    names = set(re.findall(r"nvml\.((?:nvml|NVML_|c_nvml)\w+)", source))
    names |= {f"nvmlDeviceGet{name}" for name in re.findall(r'\bread\("(\w+)"', source)}
    assert len(names) > 15
    assert not {name for name in names - {"NVMLError"} if not hasattr(real, name)}
    asked = real.c_nvmlGpmMetricsGet_t()
    assert {"version", "numMetrics", "sample1", "sample2"} <= {name for name, _ in asked._fields_}
    assert len(asked.metrics) > 2 and asked.metrics[0].nvmlReturn == 0
