from __future__ import annotations

import pytest
from tests.monitor.rules.made import evidence, machine, on_gpu, recipe

from steadytrain.monitor.rules.memory import allocator, memory


def test_pages_that_come_back_from_a_disk_are_memory_that_is_short() -> None:
    cause = memory(evidence(machine=machine(major_faults=1500.0, swap_bytes=6e6)))
    assert cause is not None and cause.share == pytest.approx(0.3)
    assert "1,500 pages a second" in cause.evidence[0]


def test_major_faults_of_mapped_files_are_no_want_of_memory() -> None:
    assert memory(evidence(machine=machine(major_faults=1500.0))) is None


def test_pressure_counts_where_it_is_more() -> None:
    cause = memory(evidence(machine=machine(pressure={"memory": 0.4})))
    assert cause is not None and cause.share == pytest.approx(0.4)
    assert memory(evidence(machine=machine(pressure={"memory": 0.02}))) is None


def test_a_run_that_fills_its_own_limit_is_told_to_split_its_batches() -> None:
    full = machine(pressure={"memory": 0.4}, memory_bytes=9 * 10**9, memory_limit_bytes=10**10, available_bytes=10**8)
    cause = memory(evidence(machine=full))
    assert cause is not None and cause.change == "--set optim.accumulate=2"
    cause = memory(evidence(machine=full, recipe=recipe(batch_size=25)))
    assert cause is not None and "end what else" in cause.change


def test_page_faults_by_the_thousand_and_a_busy_kernel_are_the_allocators() -> None:
    thrashing = machine(minor_faults=150_000.0, system_share=0.34)
    cause = allocator(evidence(machine=thrashing))
    assert cause is not None and cause.share == pytest.approx(0.3, abs=0.01)
    assert "150,000 page faults a second" in cause.evidence
    assert allocator(on_gpu(machine=thrashing)) is None


@pytest.mark.parametrize("changes", [{"minor_faults": 150_000.0}, {"system_share": 0.3}], ids=["cheap", "few"])
def test_one_sign_of_the_allocator_is_not_enough(changes: dict[str, float]) -> None:
    assert allocator(evidence(machine=machine(**changes))) is None
