"""All rules together."""

from __future__ import annotations

import math
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from tests.doctor.test_gpu_rules import CPU, DOCKER, machine

from steadytrain.doctor import Facts, finding, findings
from steadytrain.doctor.facts import Accelerators, Gpu, Limits, Load, Memory, Package, Place, Processor, System, Torch
from steadytrain.doctor.finding import SEVERITIES

SIZES = st.one_of(st.none(), st.integers(0, 10**13))
SHARES = st.one_of(st.none(), st.floats(0, 1))
COUNTS = st.one_of(st.none(), st.integers(1, 1024))


def any_of(kind: type) -> st.SearchStrategy[Any]:
    """Facts of a kind; no kernel tells of infinity."""
    return st.from_type(kind).map(_finite)


def _finite(facts: Any) -> Any:
    odd = [f.name for f in fields(facts) if isinstance(v := getattr(facts, f.name), float) and not math.isfinite(v)]
    return replace(facts, **dict.fromkeys(odd))


FACTS = st.builds(
    Facts,
    system=any_of(System),
    processor=st.builds(
        Processor, logical=COUNTS, allowed=COUNTS, usable=COUNTS, quota=st.one_of(st.none(), st.floats(0.01, 99))
    ),
    load=st.builds(Load, load_1=st.one_of(st.none(), st.floats(0, 1e4)), steal_share=SHARES, throttled_share=SHARES),
    memory=st.builds(Memory, total_bytes=SIZES, available_bytes=SIZES, limit_bytes=SIZES, swap_used_bytes=SIZES),
    places=st.dictionaries(st.sampled_from(["here", "cache", "shm"]), any_of(Place)),
    limits=any_of(Limits),
    variables=st.dictionaries(st.sampled_from(["OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"]), st.text(max_size=4)),
    torch=st.builds(Torch, state=st.sampled_from([None, "works", "broken", "missing"]), threads=COUNTS, allowed=COUNTS),
    accelerators=st.builds(Accelerators, gpus=st.lists(any_of(Gpu), max_size=2).map(tuple), device_files=COUNTS),
    packages=st.dictionaries(st.sampled_from(["torch", "numpy"]), any_of(Package)),
)


@given(FACTS)
def test_every_finding_says_what_why_and_what_to_do_the_worst_first(facts: Facts) -> None:
    found = findings(facts)
    assert all(one.what and one.why and one.remedy for one in found)
    assert len({one.rule for one in found}) == len(found)
    places = [SEVERITIES.index(one.severity) for one in found]
    assert places == sorted(places)


def test_of_two_as_severe_the_gpu_comes_first() -> None:
    warned = findings(Facts(torch=CPU, accelerators=machine(files=0), system=DOCKER, load=Load(steal_share=0.5)))
    assert [one.rule for one in warned] == ["torch-without-cuda", "steal"]


def test_every_rule_is_on_the_page() -> None:
    sources = Path(finding.__file__).parent.glob("*_rules.py")
    names = {name for path in sources for name in re.findall(r'Finding\(\s*f?"([a-z-]+)', path.read_text())}
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text(encoding="utf-8")
    rows = [line.partition(" | ")[0] for line in page.splitlines() if line.startswith("| `")]
    told = {name for row in rows for name in re.findall(r"`([a-z-]+)`", row)}
    assert {name for name in names if name not in told and not name.endswith("-")} == set()
    assert {"variable", "missing", "pressure-memory", "pressure-disk"} <= told and len(names) > 45
