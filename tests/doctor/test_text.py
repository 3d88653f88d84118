"""Findings and facts as text and as a document."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.doctor.test_rules import CUDA13
from tests.machine.recorded import GEFORCE, H100, Library

from steadytrain.doctor import MachineFacts, document, findings, lines, read
from steadytrain.doctor.collect import accelerators
from steadytrain.doctor.facts import Decoders, FolderFacts, Package, Processor, System, Torch, TorchDevice
from steadytrain.doctor.rules import Grade, MachineFinding
from steadytrain.doctor.text import verdict
from steadytrain.errors import InputError


def full() -> MachineFacts:
    """A machine with all that can be told."""
    return MachineFacts(
        system=System(host="gpu7", system="Linux", kernel="5.15.0-94-generic", container="none", python="3.12.4"),
        processor=Processor(model="Intel(R) Xeon(R) Gold 6230 CPU @ 2.10GHz", logical=80, usable=80, allowed=80),
        places={"cache": FolderFacts(path="/mnt/ein langer Pfad/cache", kind="nfs4", network=True, writable=True)},
        torch=CUDA13,
        accelerators=accelerators(Path("/nowhere"), Library(H100, GEFORCE, driver="535.129.03")),
        decoders=Decoders(pillow_turbo="3.2.0"),
        packages={"torch": Package(version="2.15.0", wanted=">=2.10", fits=True), "triton": Package(version="3.9.0")},
        variables={"CUDA_VISIBLE_DEVICES": "0,1"},
    )


def text(facts: MachineFacts, width: int = 80) -> str:
    return "\n".join(lines(facts, findings(facts), width=width))


@pytest.mark.parametrize("width", [60, 80, 100])
def test_lines_fit_the_terminal(width: int) -> None:
    lines = text(full(), width).splitlines()
    assert not [line for line in lines if len(line) > width]
    assert not [line for line in lines if line != line.rstrip()]


def test_findings_come_first_and_the_gpu_that_is_not_used_on_top() -> None:
    verdict, empty, *first = text(full()).splitlines()
    assert (verdict, empty) == ("trains on the CPU, 80 cores: 1 bad, 4 warnings, 1 note", "")
    assert first[0] == "bad   NVIDIA H100 80GB HBM3, NVIDIA GeForce RTX 3090 will not be used: driver"
    assert first[1] == "      535.129.03 is too old for torch's CUDA 13.2"
    assert first[2] == "      Training runs on the CPU, many times slower and without an error message."
    assert first[3].startswith("      -> update the driver to 580 or newer")


def test_nothing_wrong_is_said() -> None:
    assert text(MachineFacts()).splitlines()[0] == "the device that training would use is unknown: no problems found"


def test_what_is_not_known_is_left_out() -> None:
    shown = text(MachineFacts(torch=Torch(state="missing", error="No module named 'torch'")))
    assert "container" not in shown and "None" not in shown
    assert re.search(r"^  state +missing$", shown, re.MULTILINE)
    assert re.search(r"^  error +No module named 'torch'$", shown, re.MULTILINE)


def test_a_gpus_facts_and_who_is_on_it() -> None:
    shown = " ".join(text(full()).split())
    assert "gpu 0 name NVIDIA H100 80GB HBM3, index 0" in shown and "capability 9.0" in shown
    assert "mhz 345, mhz max 1980" in shown and "throttled by idle" in shown
    assert "process 0 pid 4242, name /usr/bin/python3, memory 20.0 GB" in shown
    assert "ecc errors 0, mig no, exclusive no" in shown


H100_SEEN = TorchDevice(name="NVIDIA H100 80GB HBM3", capability="9.0", memory_bytes=85_520_809_984)
LOST = TorchDevice(name="NVIDIA L4", capability="8.9", memory_bytes=0, failure="CUDA error: uncorrectable ECC error")


def _found(*severities: Grade) -> list[MachineFinding]:
    return [MachineFinding(f"rule.{number}", severity, "", "", "") for number, severity in enumerate(severities)]


@pytest.mark.parametrize(
    ("torch", "text"),
    [
        (Torch(state="works", sees_gpu=True, devices=(H100_SEEN,)), "trains on NVIDIA H100 80GB HBM3"),
        (
            Torch(state="works", sees_gpu=True, devices=(H100_SEEN, LOST, H100_SEEN)),
            "trains on one of 2 x NVIDIA H100 80GB HBM3",
        ),
        (Torch(state="works", sees_gpu=True, devices=(LOST,)), "would train on a GPU that fails"),
        (Torch(state="works", sees_gpu=False), "trains on the CPU, 1 core"),
        (Torch(state="missing"), "cannot train, torch is missing"),
        (Torch(state="broken"), "cannot train, torch is broken"),
        (Torch(state="crashed"), "cannot train, torch crashed"),
        (Torch(state="hangs"), "cannot train, torch hangs"),
        (Torch(), "the device that training would use is unknown"),
    ],
)
def test_what_training_would_run_on(torch: Torch, text: str) -> None:
    assert verdict(MachineFacts(torch=torch, processor=Processor(usable=1)), []) == f"{text}: no problems found"


def test_cores_that_nobody_could_count_are_not_told() -> None:
    assert verdict(MachineFacts(torch=Torch(state="works", sees_gpu=False)), []).startswith("trains on the CPU: ")


@pytest.mark.parametrize(
    ("severities", "text"),
    [
        (("note",), "no problems found, 1 note"),
        (("warn", "note", "note"), "1 warning, 2 notes"),
        (("bad", "bad", "warn", "warn"), "2 bad, 2 warnings"),
    ],
)
def test_findings_are_counted_and_a_note_is_nothing_wrong(severities: tuple[Grade, ...], text: str) -> None:
    assert verdict(MachineFacts(), _found(*severities)).endswith(f": {text}")


PARTS = ("system", "processor", "load", "memory", "places", "variables", "torch", "accelerators")


def test_the_keys_are_the_same_on_every_machine() -> None:
    empty, result = document(MachineFacts(), []), document(full(), findings(full()))
    assert list(result)[:4] == ["kind", "version", "made", "findings"]
    assert (result["kind"], result["version"]) == ("steadytrain doctor", 1)
    assert list(empty) == list(result) == ["kind", "version", "made", "findings", *PARTS, "decoders", "packages"]
    assert all(empty[part].keys() == result[part].keys() for part in ("system", "processor", "memory", "torch", "load"))
    assert list(result["findings"][0]) == ["rule", "severity", "what", "why", "remedy"]


def test_what_is_unknown_is_null_and_not_zero() -> None:
    result = document(MachineFacts(places={"cache": FolderFacts(path="/c")}), [])
    assert result["places"]["cache"]["free_bytes"] is None and result["processor"]["quota"] is None
    assert result["accelerators"]["on_bus"] is None


def test_a_document_comes_back_from_its_file(tmp_path: Path) -> None:
    result = document(full(), findings(full()))
    (tmp_path / "a.json").write_text(json.dumps(result))
    assert read(tmp_path / "a.json") == json.loads(json.dumps(result))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "is not a JSON document"),
        ("steady: nothing", "is not a JSON document"),
        ("[1, 2]", "was not written by steady doctor"),
        ('{"a": 1}', "was not written by steady doctor"),
        (
            '{"kind": "steadytrain doctor comparison", "version": 1}',
            "was not written by steady doctor, or is a comparison",
        ),
        ('{"kind": "steadytrain doctor", "version": 2}', "has version 2; this steadytrain reads 1"),
        ("[" * 100_000, "is not a JSON document"),
    ],
)
def test_another_file_is_refused_with_what_to_do(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "other.json").write_text(content)
    with pytest.raises(InputError) as refused:
        read(tmp_path / "other.json")
    message = str(refused.value)
    assert says in message and message.endswith("create one with: steady doctor --json > other.json")
    assert "\n" not in message


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"cannot read .*gone\.json \(No such file"):
        read(tmp_path / "gone.json")
    with pytest.raises(InputError, match="Is a directory"):
        read(tmp_path)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00nonsense")
    with pytest.raises(InputError, match="is not a JSON document"):
        read(tmp_path / "bytes.json")
