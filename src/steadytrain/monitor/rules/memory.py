"""Memory that is short, and memory that is fetched from the system anew for each step."""

from __future__ import annotations

from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.ledger import PASSES
from steadytrain.monitor.rules.cause import LEAST, Cause, percent, size, within
from steadytrain.monitor.rules.stretches import on_cpu

MAJOR_FAULT_SECONDS = 200e-6
"""What a page that comes back from a fast disk costs whoever waits for it, at least."""

FULL = 0.92
"""Of what a process may have: above this the kernel takes pages away to give others."""

USUAL_KERNEL = 0.04
"""Of the processor time of training on a CPU that the kernel takes where nothing is wrong."""

MINOR_FAULTS = 20_000
"""A second: fewer do not matter."""


def memory(evidence: Evidence) -> Cause | None:
    """Pages are taken away and come back from the disk."""
    machine = evidence.machine
    if machine is None:
        return None
    by_pressure = machine.pressure.get("memory", 0.0)
    is_full = (machine.available_bytes or 0) < (1 - FULL) * (machine.memory_limit_bytes or 0)
    is_short = by_pressure >= LEAST / 3 or bool(machine.swap_bytes) or is_full
    by_faults = (machine.major_faults or 0.0) * MAJOR_FAULT_SECONDS if is_short else 0.0  # else files are mapped
    share = within(max(by_pressure, by_faults))
    if share < LEAST:
        return None
    told = []
    if machine.major_faults is not None:
        told.append(f"{machine.major_faults:,.0f} pages a second come back from a disk")
    if by_pressure:
        told.append(f"something waits for memory {percent(by_pressure)} of the time (pressure)")
    most = machine.memory_limit_bytes
    if machine.memory_bytes is not None:
        of = f" of {size(most)} that it may have" if most else ""
        told.append(f"the run has {size(machine.memory_bytes)}{of}")
    if machine.available_bytes is not None:
        told.append(f"{size(machine.available_bytes)} are left")
    sentence = f"Memory is short: {percent(share)} of the time goes into fetching back what was moved out of it."
    return Cause(
        name="memory", share=share, sentence=sentence, evidence=tuple(told), change=_relief(evidence), saves=share
    )


def allocator(evidence: Evidence) -> Cause | None:
    """Each step asks the system for memory that the step before gave back: page faults by the thousand."""
    machine = evidence.machine
    if machine is None or not on_cpu(evidence) or machine.system_share is None:
        return None
    faults = machine.minor_faults or 0.0
    kernel = max(0.0, machine.system_share - USUAL_KERNEL)
    share = within(evidence.ledger.share(*PASSES, "optimizer") * kernel)
    if faults < MINOR_FAULTS or share < LEAST:
        return None
    sentence = (
        f"{percent(share)} of the time the kernel hands out memory that was given back just before: the allocator does"
        " not keep what is freed."
    )
    told = (
        f"{faults:,.0f} page faults a second",
        f"{percent(machine.system_share)} of the run's processor time is the kernel's",
    )
    change = "start it without LD_PRELOAD and without variables MALLOC_* and GLIBC_TUNABLES (steady doctor names them)"
    return Cause(name="allocator", share=share, sentence=sentence, evidence=told, change=change, saves=share)


def _relief(evidence: Evidence) -> str:
    """Less memory for the run where it is the run that fills it, else for others."""
    machine = evidence.machine
    assert machine is not None
    most = machine.memory_limit_bytes or 0
    fills = bool(most) and (machine.memory_bytes or 0) >= 0.5 * most
    accumulate = 2 * evidence.recipe.optim.accumulate
    if fills and evidence.recipe.batch_size % accumulate == 0:
        return f"--set optim.accumulate={accumulate}"
    return "end what else fills the memory (top, sorted by RES), or raise the limit"
