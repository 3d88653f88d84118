"""A stand-in for the module ``pynvml``, since there is no GPU where these tests run.

Its answers have the shapes, units and codes of NVIDIA's library as its reference gives them; a GPU is a table of what
it answers, and what is not in the table raises ``NVMLError``, as for a GPU that does not support it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

H100: dict[str, Any] = {
    "Name": "NVIDIA H100 80GB HBM3",
    "CudaComputeCapability": (9, 0),
    "MemoryInfo": SimpleNamespace(total=85_520_809_984, free=84_900_000_000, used=620_809_984),
    "MemoryInfo_v2": SimpleNamespace(total=85_520_809_984, free=84_900_000_000, used=71_159_552, reserved=549_650_432),
    "UtilizationRates": SimpleNamespace(gpu=0, memory=0),
    "ComputeRunningProcesses": [],
    "ClockInfo": {1: 345, 2: 2619},
    "MaxClockInfo": {1: 1980, 2: 2619},
    "PowerUsage": 71_400,
    "EnforcedPowerLimit": 700_000,
    "PowerManagementDefaultLimit": 700_000,
    "PowerManagementLimitConstraints": (200_000, 700_000),
    "ComputeMode": 0,
    "Temperature": {0: 31},
    "CurrentClocksEventReasons": 0x1,
    "EccMode": (1, 1),
    "TotalEccErrors": {(1, 0): 0},
    "MigMode": (0, 0),
    "PersistenceMode": 1,
    "CurrPcieLinkGeneration": 5,
    "MaxPcieLinkGeneration": 5,
    "CurrPcieLinkWidth": 16,
    "MaxPcieLinkWidth": 16,
}
# A desktop's card under an older driver: no ECC, no MIG, the older name for reasons.
GEFORCE: dict[str, Any] = {
    "Name": "NVIDIA GeForce RTX 3090",
    "CudaComputeCapability": (8, 6),
    "MemoryInfo": SimpleNamespace(total=25_447_170_048, free=5_000_000_000, used=20_447_170_048),
    "UtilizationRates": SimpleNamespace(gpu=97, memory=60),
    "ComputeRunningProcesses": [
        SimpleNamespace(pid=4242, usedGpuMemory=20_000_000_000),
        SimpleNamespace(pid=77, usedGpuMemory=None),
    ],
    "ClockInfo": {1: 1200, 2: 9501},
    "MaxClockInfo": {1: 2100, 2: 9751},
    "PowerUsage": 349_000,
    "EnforcedPowerLimit": 280_000,
    "PowerManagementDefaultLimit": 350_000,
    "Temperature": {0: 88},
    "CurrentClocksThrottleReasons": 0x4 | 0x20,
    "PersistenceMode": 0,
    "CurrPcieLinkWidth": 4,
    "MaxPcieLinkWidth": 16,
}


class Library:
    """What the module offers: one function for each thing to be asked."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM = 1, 2
    NVML_TEMPERATURE_GPU = 0
    NVML_COMPUTEMODE_EXCLUSIVE_PROCESS = 3
    nvmlMemory_v2 = 40 | 2 << 24
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    class NVMLError(Exception):
        """As in the library: its text is what went wrong."""

    def __init__(self, *gpus: dict[str, Any], driver: str = "580.65.06", refuses: str = "") -> None:
        self.gpus, self.driver, self.refuses = gpus, driver, refuses
        self.open = 0

    def nvmlInit(self) -> None:
        if self.refuses:
            raise self.NVMLError(self.refuses)
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlSystemGetDriverVersion(self) -> str:
        return self.driver

    def nvmlSystemGetProcessName(self, pid: int) -> str:
        if pid != 4242:
            raise self.NVMLError("Not Found")
        return "/usr/bin/python3"

    def nvmlDeviceGetCount(self) -> int:
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> dict[str, Any]:
        return self.gpus[index]

    def nvmlDeviceGetMemoryInfo(self, gpu: dict[str, Any], version: int | None = None) -> Any:
        if (name := "MemoryInfo" if version is None else "MemoryInfo_v2") not in gpu:
            raise self.NVMLError("Function Not Found")
        return gpu[name]

    def __getattr__(self, name: str) -> Any:
        asked = name.removeprefix("nvmlDeviceGet")
        if asked == name:
            raise AttributeError(name)

        def answer(gpu: dict[str, Any], *more: int) -> Any:
            if asked not in gpu:
                raise self.NVMLError("Not Supported")
            return gpu[asked][more if len(more) > 1 else more[0]] if more else gpu[asked]

        return answer
