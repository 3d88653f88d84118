"""Findings and facts as lines: they fit, they say what is unknown, and the worst is on top."""

from __future__ import annotations

import pytest
from tests.doctor.recorded import GEFORCE, H100, Library
from tests.doctor.test_gpu_rules import CUDA13

from steadytrain.doctor import Facts, findings, told
from steadytrain.doctor.accelerators import accelerators
from steadytrain.doctor.facts import Decoders, Package, Place, Processor, System, Torch


def full() -> Facts:
    """A machine with all that can be told."""
    from pathlib import Path

    return Facts(
        system=System(host="gpu7", system="Linux", kernel="5.15.0-94-generic", container="none", python="3.12.4"),
        processor=Processor(model="Intel(R) Xeon(R) Gold 6230 CPU @ 2.10GHz", logical=80, usable=80, allowed=80),
        places={"cache": Place(path="/mnt/ein langer Pfad/cache", kind="nfs4", network=True, writable=True)},
        torch=CUDA13,
        accelerators=accelerators(Path("/nowhere"), Library(H100, GEFORCE, driver="535.129.03")),
        decoders=Decoders(simplejpeg_turbo="3.1.2", simplejpeg_simd=True, pillow_turbo="3.2.0", pillow_avif=False),
        packages={"torch": Package(version="2.15.0", wanted=">=2.10", fits=True), "triton": Package(version="3.9.0")},
        variables={"CUDA_VISIBLE_DEVICES": "0,1"},
    )


def text(facts: Facts, width: int = 80) -> str:
    return "\n".join(line.text for line in told(facts, findings(facts), width=width))


@pytest.mark.parametrize("width", [60, 80, 100])
def test_lines_fit_the_terminal(width: int) -> None:
    lines = text(full(), width).splitlines()
    assert not [line for line in lines if len(line) > width]
    assert not [line for line in lines if line != line.rstrip()]


def test_findings_come_first_and_the_gpu_that_is_not_used_on_top() -> None:
    verdict, empty, *first = text(full()).splitlines()
    assert (verdict, empty) == ("trains on the CPU, 80 cores: 1 bad, 4 warnings, 2 notes", "")
    assert first[0] == "bad   NVIDIA H100 80GB HBM3, NVIDIA GeForce RTX 3090 will not be used: driver"
    assert first[1] == "      535.129.03 is too old for torch's CUDA 13.2"
    assert first[2] == "      Training runs on the CPU, without an error and many times slower."
    assert first[3].startswith("      -> update the driver to 580 or newer")


def test_nothing_wrong_is_said() -> None:
    assert text(Facts()).splitlines()[0] == "what training would run on is unknown: nothing wrong found"


def test_what_is_not_known_is_called_unknown_or_left_out() -> None:
    shown = text(Facts(torch=Torch(state="missing", error="No module named 'torch'")))
    assert "  container     unknown" in shown and "  clock         unknown" in shown
    assert "None" not in shown and "state         missing, No module named 'torch'" in shown


def test_a_gpus_facts_and_who_is_on_it() -> None:
    shown = text(full())
    assert "  GPU 0         NVIDIA H100 80GB HBM3, compute capability 9.0" in shown
    assert "345 of 1980 MHz, memory 2619 of 2619 MHz, held by idle" in shown
    assert "/usr/bin/python3 (4242), 20.0 GB" in shown
    assert "PCIe 5 x16, 5 x16 at most" in shown and "ECC on, MIG off, persistence on" in shown


def test_numbers_stay_with_their_units() -> None:
    for width in range(40, 100):
        assert not [line for line in text(full(), width).splitlines() if line.strip() in ("GB", "MB", "%", "MHz", "W")]


def test_severities_and_headings_are_styled_and_nothing_else() -> None:
    facts = full()
    lines = told(facts, findings(facts), width=80)
    styled = {line.text[: line.styled] for line in lines if line.style}
    assert styled >= {"bad", "warn", "Machine", "GPUs", "Environment"}
    assert all(line.styled == 0 for line in lines if not line.style)
