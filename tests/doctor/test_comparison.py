"""Two documents: what differs, and what of it matters."""

from __future__ import annotations

import json
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import Any

import pytest
from tests.doctor.test_rules import SEEN, machine
from tests.doctor.test_text import full

from steadytrain.config.plain import leaves
from steadytrain.doctor import MachineFacts, compare, comparison_lines, document, findings
from steadytrain.doctor.comparison import IGNORED
from steadytrain.doctor.facts import Load, Package, Processor, System, Torch
from steadytrain.doctor.text import value_text

FAST = MachineFacts(
    system=System(host="gpu7", kernel="6.1.0", container="none"),
    processor=Processor(model="AMD EPYC 9554", logical=16, allowed=16, usable=16, isa="avx512"),
    load=Load(load_1=0.2, pressure_cpu_share=0.0),
    torch=SEEN,
    accelerators=machine(),
    packages={"rich": Package(version="14.0.0"), "timm": Package(version="1.0.31")},
)
SLOW = MachineFacts(
    system=System(host="gpu8", kernel="5.15.0", container="docker"),
    processor=Processor(model="AMD EPYC 9554", logical=16, allowed=16, quota=2.0, usable=2, isa="avx512"),
    load=Load(load_1=14.5, pressure_cpu_share=0.6),
    torch=Torch(state="works", version="2.15.0+cpu", sees_gpu=False),
    accelerators=machine(),
    packages={"rich": Package(version="15.0.0"), "timm": Package(version="1.0.31")},
)


def made(facts: MachineFacts) -> dict[str, Any]:
    """The document as another machine's file gives it."""
    read: dict[str, Any] = json.loads(json.dumps(document(facts, findings(facts))))
    return read


def text(old: MachineFacts, new: MachineFacts, width: int = 80) -> list[str]:
    return comparison_lines(compare(made(old), made(new)), width=width)


def test_a_machine_does_not_differ_from_itself() -> None:
    comparison = compare(made(full()), made(full()))
    assert (comparison["findings"], comparison["differences"]) == ({"only_old": [], "only_new": []}, [])
    assert "no differences that are known to affect speed" in text(full(), full())


def test_what_matters_comes_first() -> None:
    comparison = compare(made(FAST), made(SLOW))
    keys = [fact["key"] for fact in comparison["differences"]]
    assert keys[:2] == ["torch.sees_gpu", "torch.devices.0.name"]
    assert keys.index("processor.usable") < keys.index("load.load_1") < keys.index("system.kernel")
    matters = {fact["key"]: fact["matters"] for fact in comparison["differences"]}
    assert matters["torch.sees_gpu"] and not matters["system.kernel"] and not matters["packages.rich.version"]
    assert "processor.model" not in keys and "packages.timm.version" not in keys


def test_a_gpu_that_only_one_of_them_has_is_told_by_its_name_alone() -> None:
    keys = [difference["key"] for difference in compare(made(FAST), made(SLOW))["differences"]]
    assert [key for key in keys if key.startswith("torch.devices")] == ["torch.devices.0.name"]
    other = replace(SEEN, devices=(replace(SEEN.devices[0], name="NVIDIA H100 80GB HBM3"),))
    (fact,) = compare(made(FAST), made(replace(FAST, torch=other)))["differences"]
    assert (fact["key"], fact["new"]) == ("torch.devices.0.name", "NVIDIA H100 80GB HBM3")


def test_a_gpu_that_fails_on_one_of_them_is_told() -> None:
    failing = replace(SEEN, devices=(replace(SEEN.devices[0], failure="CUDA error: out of memory"),))
    (fact,) = compare(made(FAST), made(replace(FAST, torch=failing)))["differences"]
    assert (fact["key"], fact["old"], fact["new"]) == ("torch.devices.0.failure", None, "CUDA error: out of memory")


def test_findings_that_only_one_of_them_has_are_told() -> None:
    comparison = compare(made(FAST), made(SLOW))
    assert [finding["rule"] for finding in comparison["findings"]["only_new"]] == [
        "torch-without-cuda",
        "load",
        "quota",
    ]
    assert [finding["rule"] for finding in compare(made(SLOW), made(FAST))["findings"]["only_old"]] == [
        "torch-without-cuda",
        "load",
        "quota",
    ]


def test_the_lines_read_from_old_to_new() -> None:
    lines = text(FAST, SLOW)
    assert lines[0].startswith("old: gpu7, ") and lines[1].startswith("new: gpu8, ")
    assert "  processor.usable: 16 -> 2 (x 0.12)" in lines[lines.index("Affects speed") :]
    assert "  torch.sees_gpu: yes -> no" in lines
    assert "  processor.quota: - -> 2" in lines
    assert lines.index("Found only in the new") < lines.index("Affects speed") < lines.index("Other differences")


@pytest.mark.parametrize("width", [60, 80])
def test_the_lines_fit(width: int) -> None:
    assert not [line for line in text(FAST, full(), width) + text(SLOW, FAST, width) if len(line) > width]


def test_noise_is_no_difference() -> None:
    def at(load: float, pressure: float, mhz: float) -> MachineFacts:
        measured = Load(load_1=load, pressure_cpu_share=pressure)
        return replace(FAST, load=measured, processor=replace(FAST.processor, mhz_max=mhz))

    assert compare(made(at(0.1, 0.01, 3500)), made(at(0.7, 0.04, 3510)))["differences"] == []
    assert [fact["key"] for fact in compare(made(at(0.1, 0.01, 3500)), made(at(9.0, 0.4, 2000)))["differences"]] == [
        "processor.mhz_max",
        "load.load_1",
        "load.pressure_cpu_share",
    ]


def test_what_only_one_document_knows_is_a_difference_and_no_error() -> None:
    older = made(FAST)
    del older["decoders"], older["load"]
    older["processor"]["microcode"] = "0xabc"
    keys = [fact["key"] for fact in compare(older, made(FAST))["differences"]]
    assert "load.load_1" in keys and "processor.microcode" in keys


def test_a_document_that_was_edited_by_hand_is_no_error() -> None:
    odd = {
        "kind": "steadytrain doctor",
        "version": 1,
        "made": 7,
        "system": [],
        "findings": [3, {"rule": "x"}],
        "torch": 1,
    }
    comparison = compare(odd, made(FAST))
    assert comparison["findings"]["only_old"] == []
    assert comparison_lines(comparison, width=80)[0] == "old: unknown, at an unknown time"


def test_as_a_document() -> None:
    document = json.loads(json.dumps(compare(made(FAST), made(SLOW))))
    assert (document["kind"], document["version"]) == ("steadytrain doctor comparison", 1)
    assert (document["old"]["host"], document["new"]["host"]) == ("gpu7", "gpu8")
    assert document["findings"]["only_new"][0]["rule"] == "torch-without-cuda"
    first = document["differences"][0]
    assert (first["key"], first["old"], first["new"], first["matters"]) == ("torch.sees_gpu", True, False, True)
    assert document["differences"][-1]["matters"] is False


def test_every_pattern_is_of_a_fact_that_there_is() -> None:
    there = set(dict(leaves(made(full()))))
    there |= {"packages.timm.version"} | {f"torch.devices.0.{name}" for name in made(FAST)["torch"]["devices"][0]}
    there |= {f"accelerators.gpus.0.{name}" for name in made(full())["accelerators"]["gpus"][0]}
    patterns = [pattern for pattern in IGNORED if pattern != "places.shm.kind"]
    assert not [pattern for pattern in patterns if not any(fnmatchcase(name, pattern) for name in there)]


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("memory.limit_bytes", None, "-"),
        ("processor.features", ["avx", "avx2"], "avx avx2"),
        ("accelerators.gpus.0.throttled_by", [], "none"),
        ("load.load_1", 14.5, "14.5"),
    ],
)
def test_values_in_words(key: str, value: object, words: str) -> None:
    assert value_text(key, value) == words
