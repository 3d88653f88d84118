"""GPUs by whoever tells of them: the library, the kernel, the tool, or the bus alone."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.doctor.recorded import H100, Library
from tests.doctor.trees import NVIDIA, OPEN_MODULE, SERVER, tree

from steadytrain.doctor.accelerators import accelerators


def refusing(why: str = "NVML Shared Library Not Found") -> Library:
    return Library(refuses=why)


def test_the_library_is_asked_first(tmp_path: Path) -> None:
    told = accelerators(tree(tmp_path, SERVER, NVIDIA), Library(H100, H100))
    assert (told.driver, told.driver_by, len(told.gpus)) == ("580.65.06", "nvml", 2)
    assert (told.on_bus, told.device_files) == (("NVIDIA",), 1)


def test_without_the_library_the_kernels_module_tells(tmp_path: Path) -> None:
    told = accelerators(tree(tmp_path, NVIDIA), refusing())
    assert (told.driver, told.driver_by) == ("470.57.02", "proc")
    assert [gpu.name for gpu in told.gpus] == ["Tesla V100-SXM2-32GB"]
    assert told.driver_error == "NVML Shared Library Not Found"


def test_the_open_kernel_module_writes_its_version_elsewhere_in_the_line(tmp_path: Path) -> None:
    assert accelerators(tree(tmp_path, NVIDIA, OPEN_MODULE), refusing()).driver == "580.65.06"


def test_else_nvidia_smi_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What it prints for this query, on a machine with two GPUs of which one is old.
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()
    tool.write_text(
        "#!/bin/sh\necho 'NVIDIA GeForce RTX 3090, 535.129.03, 8.6, 24576, 310'\n"
        "echo 'Quadro K620, 535.129.03, 5.0, 2048, [N/A]'\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tool.parent), prepend=":")
    told = accelerators(tmp_path, refusing())
    assert (told.driver, told.driver_by) == ("535.129.03", "nvidia-smi")
    assert [(gpu.capability, gpu.memory_bytes) for gpu in told.gpus] == [("8.6", 24576 << 20), ("5.0", 2048 << 20)]
    assert [gpu.memory_used_bytes for gpu in told.gpus] == [310 << 20, None]


def test_a_tool_that_fails_tells_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert accelerators(tmp_path, refusing()).driver is None


def test_a_gpu_without_any_driver_is_seen_on_the_bus(tmp_path: Path) -> None:
    bus = {name: text for name, text in NVIDIA.items() if name.startswith("sys/bus")}
    amd = {"sys/bus/pci/devices/0000:83:00.0/vendor": "0x1002", "sys/bus/pci/devices/0000:83:00.0/class": "0x120000"}
    told = accelerators(tree(tmp_path, bus, amd), refusing())
    assert (told.driver, told.gpus, told.on_bus) == (None, (), ("NVIDIA", "AMD"))


def test_no_bus_and_no_device_files_to_look_at_is_unknown(tmp_path: Path) -> None:
    told = accelerators(tmp_path, refusing())
    assert (told.on_bus, told.device_files) == (None, None)
