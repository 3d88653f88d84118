"""What is said of processors, memory, folders and limits, by a fact a rule."""

from __future__ import annotations

import pytest

from steadytrain.doctor import Facts, Finding, findings
from steadytrain.doctor.facts import Limits, Load, Memory, Place, Processor, System

EIGHT = Processor(logical=8, allowed=8, usable=8)
GB = 10**9


def only(facts: Facts) -> Finding:
    """The one finding that there is."""
    (found,) = findings(facts)
    return found


def test_facts_of_which_none_is_known_say_nothing() -> None:
    assert findings(Facts()) == []
    assert findings(Facts(places={"cache": Place(path="/c"), "shm": Place(path="/dev/shm")})) == []


def test_a_quota_is_told_with_how_often_it_was_reached() -> None:
    cpu = Processor(logical=64, allowed=64, quota=3.5, usable=4)
    told = only(Facts(processor=cpu, load=Load(throttled_share=0.25)))
    assert (told.rule, told.severity) == ("quota", "warn")
    assert (
        told.what
        == "the control group's quota is 3.5 cores of the machine's 64, and was reached in 25 % of its periods"
    )
    assert only(Facts(processor=cpu)).severity == "note"


def test_a_quota_above_what_affinity_leaves_costs_nothing() -> None:
    assert only(Facts(processor=Processor(logical=8, allowed=2, quota=4.0, usable=2))).rule == "affinity"
    assert findings(Facts(processor=Processor(logical=8, allowed=8, quota=8.0, usable=8))) == []


@pytest.mark.parametrize(("load", "severity"), [(3.9, None), (5.0, "note"), (8.0, "warn"), (40.0, "warn")])
def test_load_counts_against_the_machines_cores(load: float, severity: str | None) -> None:
    found = findings(Facts(processor=EIGHT, load=Load(load_1=load, pressure_cpu_share=0.5)))
    assert [one.severity for one in found] == ([severity] if severity else [])


@pytest.mark.parametrize(
    ("load", "rule"),
    [
        (Load(steal_share=0.12), "steal"),
        (Load(pressure_memory_share=0.2), "pressure-memory"),
        (Load(pressure_io_share=0.6), "pressure-disk"),
    ],
)
def test_what_others_take_is_told(load: Load, rule: str) -> None:
    assert only(Facts(load=load)).rule == rule


@pytest.mark.parametrize(
    ("governor", "driver", "preference", "wrong"),
    [
        ("powersave", "acpi-cpufreq", None, True),
        ("powersave", "intel_pstate", "balance_performance", False),  # that driver's ordinary governor
        ("powersave", "amd-pstate-epp", "power", True),
        ("performance", "intel_pstate", "performance", False),
        ("schedutil", "acpi-cpufreq", None, False),
    ],
)
def test_a_saving_governor_is_told_apart_from_one_that_is_only_called_so(
    governor: str, driver: str, preference: str | None, wrong: bool
) -> None:
    cpu = Processor(governor=governor, frequency_driver=driver, energy_preference=preference)
    assert bool(findings(Facts(processor=cpu))) is wrong


def test_a_clock_that_is_held_down() -> None:
    assert only(Facts(processor=Processor(mhz_max=3900, mhz_allowed=2100))).rule == "clock-capped"
    assert findings(Facts(processor=Processor(mhz_max=3900, mhz_allowed=3900, mhz=800))) == []


def test_a_slow_and_a_wrong_clock() -> None:
    assert only(Facts(system=System(clock_source="hpet"))).rule == "clock-source"
    assert findings(Facts(system=System(clock_source="tsc", clock_behind_seconds=60.0))) == []
    told = only(Facts(system=System(clock_behind_seconds=400 * 86_400.0)))
    assert "400 days earlier" in told.what


def test_little_memory_is_told_by_whose_it_is() -> None:
    told = only(Facts(memory=Memory(total_bytes=64 * GB, limit_bytes=8 * GB, available_bytes=GB // 2)))
    assert told.what == "500.0 MB of the control group's limit (8.0 GB) is left"
    assert only(Facts(memory=Memory(total_bytes=64 * GB, available_bytes=3 * GB))).rule == "memory"
    assert findings(Facts(memory=Memory(total_bytes=2 * GB, available_bytes=GB * 3 // 2))) == []


def test_swap_costs_more_where_memory_is_waited_for() -> None:
    swapped = Memory(swap_total_bytes=8 * GB, swap_used_bytes=GB)
    assert only(Facts(memory=swapped)).severity == "note"
    assert only(Facts(memory=swapped, load=Load(pressure_memory_share=0.02))).severity == "warn"
    assert findings(Facts(memory=Memory(swap_total_bytes=8 * GB, swap_used_bytes=10**6))) == []


def test_a_run_that_vanished_has_an_explanation() -> None:
    told = only(Facts(memory=Memory(out_of_memory_kills=2)))
    assert told.what == "for want of memory the kernel ended 2 processes here"


@pytest.mark.parametrize(
    ("memory", "rule"),
    [
        (Memory(huge_pages="never"), "huge-pages"),
        (Memory(overcommit="never"), "overcommit"),
    ],
)
def test_settings_of_the_kernel(memory: Memory, rule: str) -> None:
    assert only(Facts(memory=memory)).rule == rule
    assert findings(Facts(memory=Memory(huge_pages="madvise", overcommit="heuristic"))) == []


def test_small_shared_memory_is_noted_and_it_is_said_that_it_does_not_matter_here() -> None:
    told = only(Facts(places={"shm": Place(path="/dev/shm", kind="tmpfs", total_bytes=67_108_864, writable=True)}))
    assert (told.rule, told.severity) == ("shm", "note")
    assert "steadytrain's feed does not use it" in told.why


def test_a_cache_on_a_network_costs_and_a_current_folder_there_is_noted() -> None:
    nfs = {"cache": Place(path="/c", kind="nfs4", network=True), "here": Place(path="/h", kind="nfs4", network=True)}
    assert [(one.rule, one.severity) for one in findings(Facts(places=nfs))] == [
        ("network.cache", "warn"),
        ("network.here", "note"),
    ]
    assert "STEADYTRAIN_CACHE" in findings(Facts(places=nfs))[0].remedy


@pytest.mark.parametrize(
    ("place", "rule"),
    [
        (Place(path="/c", writable=False), "not-writable.cache"),
        (Place(path="/c", writable=True, total_bytes=500 * GB, free_bytes=GB), "full.cache"),
        (Place(path="/c", writable=True, total_bytes=500 * GB, free_bytes=400 * GB, free_files=3), "full.cache"),
    ],
)
def test_a_cache_that_cannot_take_more(place: Place, rule: str) -> None:
    assert only(Facts(places={"cache": place})).rule == rule


def test_a_small_disk_with_room_is_not_called_full() -> None:
    small = Place(path="/tmp", writable=True, total_bytes=2 * GB, free_bytes=GB)
    assert findings(Facts(places={"temporary": small})) == []


def test_limits_that_are_easily_met() -> None:
    told = only(Facts(limits=Limits(open_files=256, open_files_most=10_240)))
    assert (told.rule, told.remedy) == ("open-files", "ulimit -n 10240")
    assert "hard limit" in only(Facts(limits=Limits(open_files=256, open_files_most=256))).remedy
    assert only(Facts(limits=Limits(open_files=20_000, address_space_bytes=8 << 30))).severity == "warn"
