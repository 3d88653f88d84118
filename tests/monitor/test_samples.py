"""Many samples as one: sums are sums, means are weighted by time, what nobody tells is not zero."""

from __future__ import annotations

from typing import Any

import pytest

from steadytrain.events import DeviceStats, FeedStats, MachineStats, Step
from steadytrain.monitor.samples import (
    LATER,
    MAX_SLOWEST,
    MAX_STEPS,
    Mean,
    RunSamples,
    StepTimes,
    feed_difference,
    feed_sum,
)


def machine(seconds: float, **value: object) -> MachineStats:
    return MachineStats(seconds=seconds, cores=2, machine_cores=4, **value)  # type: ignore[arg-type]


def feed(images: int, **value: object) -> FeedStats:
    return FeedStats(
        step=images // 10,
        images=images,
        bytes=100 * images,
        read_seconds=0.0,
        decode_seconds=images / 100,
        batch_seconds=0.0,
        blocked_seconds=0.0,
        threads=2,
        **value,  # type: ignore[arg-type]
    )


def update(step: int, seconds: float, wait: float = 0.0) -> Step:
    return Step(step=step, position=step, n=1, seconds=seconds, wait_seconds=wait, lr=0.1)


def averaged(*samples: MachineStats) -> MachineStats:
    mean: Mean[MachineStats] = Mean()
    for sample in samples:
        mean.add(sample)
    averages = mean.result()
    assert averages is not None
    return averages


def test_other_processes_are_the_busiest_on_cores_and_the_busiest_on_disks() -> None:
    mean: Mean[MachineStats] = Mean()
    burners: list[Any] = [{"pid": pid, "name": "burner", "user": "ann", "cores": 1.0 / pid} for pid in range(1, 6)]
    backup: Any = {"pid": 9, "name": "rsync", "user": "root", "cores": 0.0, "disk_bytes": 60e6}
    mean.add(MachineStats(seconds=1.0, cores=2, machine_cores=2, other_processes=(*burners, backup)))
    mean.add(MachineStats(seconds=2.0, cores=2, machine_cores=2))
    result = mean.result()
    assert result is not None
    assert [process["pid"] for process in result.other_processes] == [1, 2, 3, 9]
    assert result.other_processes[-1]["disk_bytes"] == 20e6


def test_a_long_sample_weighs_more_than_a_short_one() -> None:
    mean = averaged(machine(1.0, cpu=2.0, idle=0.0), machine(3.0, cpu=1.0))
    assert mean.seconds == 4.0
    assert mean.cpu == 1.25
    assert mean.idle == 0.0, "told by the first alone"
    assert mean.iowait is None, "told by none"


def test_levels_are_extremes_and_amounts_are_sums() -> None:
    mean = averaged(
        machine(1.0, memory_bytes=5, available_bytes=9, throttled_seconds=0.2, threads=3),
        machine(1.0, memory_bytes=4, available_bytes=7, throttled_seconds=0.3, threads=2),
    )
    assert (mean.memory_bytes, mean.available_bytes, mean.threads) == (5, 7, 3)
    assert mean.throttled_seconds == pytest.approx(0.5)


def test_pressure_is_averaged_by_what_is_pressed_and_missing_sources_are_named_once() -> None:
    mean = averaged(
        machine(1.0, pressure={"cpu": 1.0}, missing=["disk"]),
        machine(1.0, pressure={"cpu": 0.0, "io": 0.5}, missing=["disk", "steal"]),
    )
    assert mean.pressure == {"cpu": 0.5, "io": 0.5}
    assert tuple(mean.missing) == ("disk", "steal")


def test_a_gpu_keeps_its_name_and_every_reason_of_its_throttling() -> None:
    mean: Mean[DeviceStats] = Mean()
    assert mean.result() is None
    mean.add(DeviceStats(seconds=1.0, index=1, name="H100", utilisation=1.0, energy_joules=300.0, throttled=["power"]))
    mean.add(DeviceStats(seconds=1.0, index=1, name="H100", utilisation=0.5, energy_joules=200.0, throttled=["heat"]))
    averages = mean.result()
    assert averages is not None
    assert (averages.index, averages.name, averages.utilisation, averages.energy_joules) == (1, "H100", 0.75, 500.0)
    assert tuple(averages.throttled) == ("power", "heat")


def test_resumed_run_is_not_judged_by_its_former_gpu() -> None:
    samples = RunSamples()
    samples.take(DeviceStats(seconds=1.0, index=0, name="H100", processes=1), LATER)
    samples.begin_attempt()
    assert [device.index for device in samples.gpus(LATER)] == [0], "no newer one is known yet"
    samples.take(DeviceStats(seconds=1.0, index=3, name="H100", processes=0), LATER)
    assert [(device.index, device.processes) for device in samples.gpus(LATER)] == [(3, 0)]


def test_difference_of_two_feed_events_is_the_work_between_them() -> None:
    before = feed(100, asked=10, starved=1, cpu_seconds=1.0)
    after = feed(300, asked=30, starved=5, cpu_seconds=2.5)
    difference = feed_difference(before, after)
    assert (difference.images, difference.asked, difference.starved, difference.cpu_seconds) == (200, 20, 4, 1.5)


def test_feed_stats_of_a_new_loader_start_from_zero() -> None:
    assert feed_difference(feed(300), feed(100)) == feed(100)


def test_stretches_add_up() -> None:
    first = feed_sum(None, feed(100, asked=10))
    more = feed_difference(feed(200, asked=20), feed(300, asked=40, cpu_seconds=1.0))
    total = feed_sum(first, more)
    assert (total.images, total.asked, total.cpu_seconds) == (200, 30, None)
    assert total.decode_seconds == pytest.approx(2.0)


def test_percentiles_of_a_long_run_are_those_of_all_its_updates() -> None:
    times = StepTimes()
    for step in range(10 * MAX_STEPS):
        times.add(update(step, seconds=(step * 7919 % 1000) / 1000))
    assert times.result().seconds == pytest.approx((0.05, 0.5, 0.95), abs=0.02)
    assert times.result().waits == (0.0, 0.0, 0.0)


def test_the_slowest_updates_are_all_found_in_their_order() -> None:
    times = StepTimes()
    for step in range(1, 5001):
        times.add(update(step, seconds=2.0 if step % 250 == 0 else 0.1))
    slow = {step: seconds for step, seconds in times.result().slowest.items() if seconds > 1}
    assert list(slow) == list(range(250, 5001, 250))
    assert len(times.result().slowest) == MAX_SLOWEST


def test_nothing_has_percentiles_of_zero() -> None:
    times = StepTimes()
    assert times.result().seconds == (0.0, 0.0, 0.0)
    times.add(update(1, seconds=3.0, wait=1.0))
    assert times.result().seconds == (3.0, 3.0, 3.0) and times.result().fast == 2.0
