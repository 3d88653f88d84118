"""Points of the charts of a watched run: differences of what is cumulative, shares, gaps for what is not known."""

from __future__ import annotations

from dataclasses import replace

from tests.reports.runs import evaluated, logged

from steadytrain.events import DeviceStats, FeedStats, MachineStats
from steadytrain.monitor.slices import Slice
from steadytrain.reports import points
from steadytrain.reports.stacked import stacked


def feed(asked: int, starved: int, ready: float, attempt: int = 1) -> FeedStats:
    busy = {"read_seconds": 0.0, "decode_seconds": 0.0, "batch_seconds": 0.0, "blocked_seconds": 0.0}
    sizes = {"step": asked, "images": asked, "bytes": 0, "threads": 2, "depth": 4, "attempt": attempt}
    return FeedStats(**sizes, **busy, asked=asked, starved=starved, ready=ready)  # type: ignore[arg-type]


def test_the_feed_is_told_between_two_words_of_it() -> None:
    first, second = feed(100, 10, 3.0), feed(200, 60, 2.0)
    point = points.fed(second, first, 12.0)
    assert point is not None
    assert dict(zip(points.FEED, point.row, strict=True)) == {"seconds": 12.0, "ready": 1.0, "depth": 4, "starved": 0.5}
    assert points.fed(second, second, 12.0) is None, "nothing was asked for since"
    anew = points.fed(feed(50, 5, 1.5, attempt=2), second, 13.0)
    assert anew is not None
    assert anew.row[1:] == (1.5, 4, 0.1), "a restart counts anew"


def test_what_is_not_known_or_not_finite_is_a_gap() -> None:
    machine = points.machine(MachineStats(seconds=1.0, cores=2, machine_cores=2, pressure={"cpu": 0.5}), 3.0)
    told = dict(zip(points.MACHINE, machine.row, strict=True))
    assert (told["cpu"], told["cores"], told["pressure_cpu"], told["pressure_io"]) == (None, 2, 0.5, None)
    assert points.trained(logged(20, loss=float("nan")), 1.0).row[3] is None
    device = points.device(DeviceStats(seconds=1.0, index=3, name="x", memory_bytes=5, memory_total_bytes=10), 1.0)
    assert device.series == "device-3"
    assert dict(zip(points.DEVICE, device.row, strict=True))["memory"] == 0.5


def test_an_evaluation_carries_its_confidence_interval() -> None:
    row = dict(zip(points.VAL, points.evaluated(replace(evaluated(20), top1=0.9, n=100), 1.0).row, strict=True))
    assert (row["low"], row["high"]) == (0.825634, 0.944771)


def test_the_stack_over_time_has_the_edges_of_its_slices_and_adds_up() -> None:
    slices = [
        Slice(began=100.0, ended=104.0, attempt=1, seconds={"startup": 3.0, "forward": 1.0}),
        Slice(began=900.0, ended=902.0, attempt=2, seconds={"input_decode": 0.5, "forward": 1.5}),
    ]
    told = stacked(slices)
    assert told["edges"] == [0.0, 4.0, 6.0], "the pause between attempts is not in it"
    assert [one["name"] for one in told["buckets"]] == ["forward", "input_decode", "startup"]
    assert [sum(one["shares"][k] for one in told["buckets"]) for k in range(2)] == [1.0, 1.0]
    assert stacked([]) == {"edges": [0.0], "buckets": []}
