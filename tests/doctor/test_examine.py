"""All facts together: whatever the kernel's files hold or lack, the doctor ends with facts and never with an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.doctor.trees import ARM, DOCKER, NVIDIA, POD, SERVER, tree

from steadytrain.doctor import findings, told
from steadytrain.doctor.accelerators import accelerators
from steadytrain.doctor.facts import Facts
from steadytrain.doctor.memory import allocator, memory
from steadytrain.doctor.places import places
from steadytrain.doctor.processor import load, processor, stolen, ticks
from steadytrain.doctor.system import system

MACHINES: dict[str, Mapping[str, str]] = {
    "docker": {**SERVER, **DOCKER},
    "pod": {**SERVER, **POD},
    "arm": ARM,
    "nvidia": {**SERVER, **NVIDIA},
}
JUNK = (None, "", "max", "abc def", "-1", "0", ":", "some avg10=")


def facts_of(root: Path) -> Facts:
    """What can be known of a machine from its files alone."""
    return Facts(
        system=system(root, {}),
        processor=processor(root),
        load=load(root),
        memory=memory(root),
        places=places(root, {}),
        allocator=allocator(root, {}),
        accelerators=accelerators(root),
    )


def damage(path: Path, text: str | None) -> None:
    """Replace what a file of the kernel says; None: the file is not there."""
    path.unlink(missing_ok=True)
    if text is not None:
        path.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name", MACHINES)
def test_no_file_of_the_kernel_can_break_it(tmp_path: Path, name: str) -> None:
    files = {file: text for file, text in MACHINES[name].items() if not any(f"cpu{n}/" in file for n in range(2, 8))}
    root = tree(tmp_path, dict(MACHINES[name]))
    for file, text in files.items():
        for junk in JUNK:
            damage(root / file, junk)
            facts = facts_of(root)
            assert told(facts, findings(facts), width=60)
            stolen(ticks(root), ticks(root))
        tree(root, {file: text})


def test_of_an_empty_machine_nothing_is_claimed(tmp_path: Path) -> None:
    facts = facts_of(tmp_path)
    assert (facts.processor.quota, facts.memory.limit_bytes, facts.load.load_1) == (None, None, None)
    assert (facts.system.container, facts.system.virtual) == (None, None)
    assert not [finding for finding in findings(facts) if finding.severity == "bad"]
    lines = [line.text for line in told(facts, findings(facts), width=80)]
    assert "  container     unknown" in lines
