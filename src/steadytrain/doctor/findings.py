"""All rules, and what they say of a machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from steadytrain.doctor import gpu_rules, machine_rules, software_rules
from steadytrain.doctor.facts import Facts
from steadytrain.doctor.finding import SEVERITIES, Finding

Rule = Callable[[Facts], Iterator[Finding]]

RULES: tuple[Rule, ...] = (
    gpu_rules.gpu_unused,
    gpu_rules.torch_loads,
    gpu_rules.gpu_fails,
    gpu_rules.gpu_taken,
    gpu_rules.gpu_slowed,
    gpu_rules.gpu_state,
    gpu_rules.other_gpus,
    software_rules.pinned,
    software_rules.decoders,
    software_rules.versions,
    machine_rules.busy,
    machine_rules.fewer_cores,
    software_rules.threads,
    software_rules.set_variables,
    machine_rules.memory_short,
    machine_rules.folders,
    machine_rules.clocks,
    software_rules.allocator,
    software_rules.vector_code,
    machine_rules.memory_settings,
    machine_rules.limits,
)
"""Each is a pure function of the facts; within a severity its findings stand in this order."""


def findings(facts: Facts) -> list[Finding]:
    """What is wrong or worth knowing, the worst first."""
    found = [finding for rule in RULES for finding in rule(facts)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))
