"""Seconds of a device that works while the host goes on: read late, given to one bucket each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.training import clock as clocks
from steadytrain.training.clock import DeviceClock, Span, attribute


class Time:
    """A clock that stands still but where the host or the device is told to take time."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    process_time = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += max(0.0, seconds)


time = Time()


@pytest.fixture(autouse=True)
def _virtual_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "time", time)


def host(*parts: tuple[str, float]) -> list[Span]:
    """Spans one behind the other from 0 on, by their lengths."""
    spans, at = [], 0.0
    for bucket, seconds in parts:
        spans.append(Span(bucket, at, at + seconds))
        at += seconds
    return spans


def test_a_wait_that_the_device_worked_through_costs_nothing() -> None:
    seconds = attribute([Span("forward", 0, 2), Span("backward", 2, 9)], host(("forward", 1), ("input", 8)), 0, 9)
    assert seconds == {"forward": 2, "backward": 7}


def test_the_devices_idle_time_goes_to_what_the_host_was_at() -> None:
    did = host(("forward", 1), ("logging", 2), ("input", 5), ("host", 1), ("forward", 1))
    seconds = attribute([Span("forward", 0, 2), Span("forward", 9, 10)], did, 0, 10)
    assert seconds == {"forward": 3, "logging": 1, "input": 5, "host": 1}


def test_the_host_that_asks_for_a_copy_takes_the_time_itself() -> None:
    did = host(("forward", 1), ("transfer", 2), ("host", 1), ("forward", 1))
    assert attribute([Span("forward", 0, 1), Span("forward", 4, 5)], did, 0, 5) == {"forward": 2, "host": 3}


lengths = st.lists(st.tuples(st.sampled_from(["input", "host", "forward"]), st.floats(0, 3)), min_size=1, max_size=9)


@given(lengths, lengths, st.floats(0, 5))
def test_each_second_is_in_one_bucket(
    did: list[tuple[str, float]], worked: list[tuple[str, float]], off: float
) -> None:
    spans = host(*did)
    end = spans[-1].ended
    device = [Span("backward", s.began + off, s.ended + off) for s in host(*worked) if s.bucket == "forward"]
    spent = attribute(device, spans, 0.0, end)
    assert sum(spent.values()) == pytest.approx(end) and all(seconds >= 0 for seconds in spent.values())


@dataclass
class Device:
    """Passes a mark when it has done the work that was asked for before."""

    busy_until: float = 0.0
    marks: list[Mark] = field(default_factory=list)

    def work(self, seconds: float) -> None:
        self.busy_until = max(self.busy_until, time.perf_counter()) + seconds

    def mark(self) -> Mark:
        return Mark(max(self.busy_until, time.perf_counter()))


@dataclass
class Mark:
    at: float

    def query(self) -> bool:
        return time.perf_counter() >= self.at

    def synchronize(self) -> None:
        time.sleep(max(0.0, self.at - time.perf_counter()))

    def elapsed_time(self, end: Mark) -> float:
        return 1000 * (end.at - self.at)


def updates(clock: DeviceClock, device: Device, count: int, *, wait: float, work: float) -> Iterator[int]:
    """A loop whose host only asks, and whose device works."""
    for number in range(count):
        clock.to("input")
        time.sleep(wait)
        for bucket in ("forward", "backward", "optimizer"):
            clock.to(bucket)
            device.work(work)
        clock.to("host")
        yield number


def test_a_late_batch_is_exposed_only_where_the_device_had_nothing_to_do() -> None:
    device = Device()
    clock = DeviceClock(time.perf_counter(), device.mark)
    for _ in updates(clock, device, 6, wait=0.004, work=0.01):
        pass
    clock.settle()
    seconds = clock.seconds()
    # The first wait of 4 ms found an idle device; the five others were hidden behind 30 ms of work each.
    assert sum(seconds.get(bucket, 0.0) for bucket in ("forward", "backward", "optimizer")) >= 0.17
    assert seconds["input"] < 0.02
    assert sum(seconds.values()) == pytest.approx(clock.accounted_seconds())


def test_what_is_told_before_the_device_is_done_adds_up_as_well() -> None:
    device = Device()
    clock = DeviceClock(time.perf_counter(), device.mark)
    for number in updates(clock, device, 8, wait=0.001, work=0.003):
        if number == 1:
            clock.warmed_up()
        assert sum(clock.seconds().values()) == pytest.approx(clock.accounted_seconds(), abs=1e-9)
    clock.settle()
    seconds = clock.seconds()
    assert sum(seconds.values()) == pytest.approx(clock.accounted_seconds())
    assert seconds["warmup"] == pytest.approx(0.018, abs=1e-3) and seconds["forward"] == pytest.approx(0.018, abs=1e-3)


def test_the_wait_for_the_first_batch_can_be_moved_before_the_device_is_done() -> None:
    device = Device()
    clock = DeviceClock(time.perf_counter(), device.mark)
    clock.to("input")
    time.sleep(0.01)
    clock.to("host")
    clock.move("input", "startup")
    clock.to("input")
    time.sleep(0.02)
    clock.to("host")
    clock.move("input", "epoch_gap", 0.015)
    seconds = clock.seconds()
    assert seconds["startup"] >= 0.01 and seconds["epoch_gap"] == pytest.approx(0.015) and seconds["input"] >= 0.005
