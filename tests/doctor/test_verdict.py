"""The first line: what training would run on, and how much is wrong."""

from __future__ import annotations

import pytest

from steadytrain.doctor.facts import Facts, Processor, Torch, TorchDevice
from steadytrain.doctor.finding import Finding, Severity
from steadytrain.doctor.verdict import verdict

H100 = TorchDevice(name="NVIDIA H100 80GB HBM3", capability="9.0", memory_bytes=85_520_809_984)
LOST = TorchDevice(name="NVIDIA L4", capability="8.9", memory_bytes=0, failure="CUDA error: uncorrectable ECC error")


def _found(*severities: Severity) -> list[Finding]:
    return [Finding(f"rule.{number}", severity, "", "", "") for number, severity in enumerate(severities)]


@pytest.mark.parametrize(
    ("torch", "told"),
    [
        (Torch(state="works", sees_gpu=True, devices=(H100,)), "trains on NVIDIA H100 80GB HBM3"),
        (Torch(state="works", sees_gpu=True, devices=(H100, LOST, H100)), "trains on one of 2 x NVIDIA H100 80GB HBM3"),
        (Torch(state="works", sees_gpu=True, devices=(LOST,)), "would train on a GPU that fails"),
        (Torch(state="works", sees_gpu=False), "trains on the CPU, 1 core"),
        (Torch(state="missing"), "cannot train, torch is missing"),
        (Torch(state="broken"), "cannot train, torch is broken"),
        (Torch(state="crashed"), "cannot train, torch crashed"),
        (Torch(state="hangs"), "cannot train, torch hangs"),
        (Torch(), "what training would run on is unknown"),
    ],
)
def test_what_training_would_run_on(torch: Torch, told: str) -> None:
    assert verdict(Facts(torch=torch, processor=Processor(usable=1)), []) == f"{told}: nothing wrong found"


def test_cores_that_nobody_could_count_are_not_told() -> None:
    assert verdict(Facts(torch=Torch(state="works", sees_gpu=False)), []).startswith("trains on the CPU: ")


@pytest.mark.parametrize(
    ("severities", "told"),
    [
        (("note",), "nothing wrong found, 1 note"),
        (("warn", "note", "note"), "1 warning, 2 notes"),
        (("bad", "bad", "warn", "warn"), "2 bad, 2 warnings"),
    ],
)
def test_findings_are_counted_and_a_note_is_nothing_wrong(severities: tuple[Severity, ...], told: str) -> None:
    assert verdict(Facts(), _found(*severities)).endswith(f": {told}")
