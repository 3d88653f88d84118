"""GPUs as NVIDIA's library tells of them: a stand-in of its answers, and where it is installed, its real names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.doctor.recorded import GEFORCE, H100, Library

from steadytrain.doctor import nvml
from steadytrain.doctor.facts import GpuProcess
from steadytrain.doctor.nvml import Unusable, gpus


def test_a_gpu_at_rest() -> None:
    driver, (gpu,) = gpus(Library(H100))
    assert (driver, gpu.name, gpu.capability) == ("580.65.06", "NVIDIA H100 80GB HBM3", "9.0")
    assert (gpu.memory_bytes, gpu.memory_used_bytes, gpu.busy_share) == (85_520_809_984, 620_809_984, 0.0)
    assert (gpu.mhz, gpu.mhz_max, gpu.memory_mhz_max) == (345, 1980, 2619)
    assert (gpu.power_watts, gpu.power_limit_watts, gpu.temperature) == (71.4, 700.0, 31)
    assert (gpu.throttled_by, gpu.processes) == (("idle",), ())
    assert (gpu.ecc, gpu.ecc_errors, gpu.mig, gpu.persistence) == (True, 0, False, True)
    assert (gpu.pcie_generation, gpu.pcie_width_max) == (5, 16)


def test_a_gpu_in_use_and_an_older_driver() -> None:
    driver, (gpu,) = gpus(Library(GEFORCE, driver=b"470.57.02"))
    assert (driver, gpu.name) == ("470.57.02", "NVIDIA GeForce RTX 3090")
    assert gpu.processes == (
        GpuProcess(pid=4242, name="/usr/bin/python3", memory_bytes=20_000_000_000),
        GpuProcess(pid=77, name=None, memory_bytes=None),
    )
    assert gpu.throttled_by == ("power limit", "heat")


def test_what_a_gpu_does_not_support_is_unknown_and_not_zero() -> None:
    _, (gpu,) = gpus(Library(GEFORCE))
    assert (gpu.ecc, gpu.ecc_errors, gpu.mig, gpu.pcie_generation) == (None, None, None, None)
    _, (bare,) = gpus(Library({"Name": "GRID"}))
    assert (bare.memory_bytes, bare.busy_share, bare.processes, bare.throttled_by) == (None, None, None, None)


def test_the_library_is_closed_again_also_after_a_failure() -> None:
    library = Library(H100)
    gpus(library)
    assert library.open == 0
    with pytest.raises(Unusable, match="Driver Not Loaded"):
        gpus(Library(refuses="Driver Not Loaded"))


def test_every_name_that_is_asked_exists_in_the_real_library() -> None:
    real = pytest.importorskip("pynvml")
    source = Path(nvml.__file__).read_text()
    functions = set(re.findall(r"nvml\.(nvml\w+)\(", source))
    functions |= {f"nvmlDeviceGet{name}" for name in re.findall(r'\bread\("(\w+)"', source)}
    constants = set(re.findall(r"nvml\.(NVML_\w+)", source))
    assert len(functions) > 20 and constants
    assert not {name for name in functions | constants if not hasattr(real, name)}
