"""The engine that is recommended for a link."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.tuning.engines import compare_engines, engines_document, engines_text, recommend
from steadytrain.tuning.scale import Gradient, MachineCluster, MeasuredDevice, NetworkLink, predict

RESNET18 = [[64, 3, 7, 7], *[[128, 128, 3, 3]] * 20, *[[512, 512, 3, 3]] * 3, [1000, 512]]
BYTES = 4 * sum(math.prod(shape) for shape in RESNET18)


def measured(latency: float, rate: float, *, ranks: int = 2, packing: float = 0.02) -> dict[str, Any]:
    """What ``steady bandwidth`` measures over such a link, where packing all gradients takes so long."""
    link = MachineCluster(between=NetworkLink(name="x", latency_seconds=latency, bytes_per_second=rate, source=""))
    whole = link.all_reduce_seconds(BYTES, ranks)
    seconds = {"buckets": whole, "fp16": packing + whole / 2, "bf16": packing + whole / 2}
    ways = [{"way": way, "seconds": value, "bytes": BYTES} for way, value in seconds.items()]
    return {"backend": "gloo", "latency_seconds": link.all_reduce_seconds(4, ranks), "ways": ways}


FAST, SLOW, FAR = measured(1e-5, 1e10), measured(1e-3, 1.25e8), measured(0.02, 12.5e6)


def test_a_fast_link_needs_no_other_engine() -> None:
    assert recommend(compare_engines(FAST, RESNET18, 2, 0.5)) == "ddp"


def test_a_link_that_the_backward_pass_hides_needs_no_other_engine() -> None:
    assert recommend(compare_engines(SLOW, RESNET18, 2, 5.0)) == "ddp"


def test_on_a_far_link_what_sends_least_and_seldom_is_fastest() -> None:
    speeds = compare_engines(FAR, RESNET18, 2, 0.05)
    by_time = sorted(speeds, key=lambda speed: speed["step_seconds"])
    assert {speed["engine"] for speed in by_time[:4]} == {
        *("one device alone", "async, 1 server", "ddp, powersgd of rank 2", "local, every 32 updates")
    }
    assert by_time[-1]["engine"] == "ddp" and by_time[-1]["step_seconds"] > 3
    assert speeds[-2]["exposed_seconds"] == pytest.approx((2 * 0.02 + BYTES / 12.5e6) / 32, rel=0.01)


@pytest.mark.parametrize("way", ["fp16", "bf16"])
def test_the_last_bucket_pays_a_latency_however_few_bytes_it_sends(way: str) -> None:
    speeds = {speed["engine"]: speed for speed in compare_engines(FAR, RESNET18, 2, 50.0)}
    assert speeds[f"ddp, {way}"]["exposed_seconds"] > FAR["latency_seconds"]


def test_where_the_link_brings_nothing_one_device_trains_alone() -> None:
    assert recommend(compare_engines(measured(1.0, 1e5), RESNET18, 2, 0.05)) == "one device alone"


def test_the_worker_beside_the_server_never_waits_for_a_link() -> None:
    for ranks in (2, 4):
        alone = compare_engines(measured(100.0, 1e3, ranks=ranks), RESNET18, ranks, 0.5)[
            -1
        ]  # hours for each push of the others
        assert alone["engine"] == "async, 1 server" and alone["step_seconds"] == pytest.approx(ranks * 0.5, rel=1e-3)
    assert compare_engines(FAST, RESNET18, 2, 0.5)[-1]["step_seconds"] == pytest.approx(0.5, rel=0.05)


def test_workers_share_the_servers_end_of_the_link() -> None:
    once = BYTES / 12.5e6
    for ranks in (16, 64):
        speed = compare_engines(measured(0.02, 12.5e6, ranks=ranks), RESNET18, ranks, 1e-3)[-1]
        others = 1 / speed["step_seconds"] - 1 / (ranks * 1e-3)
        assert others == pytest.approx(1 / once, rel=0.01)  # updates a second, however many push


def test_a_more_exact_engine_is_taken_where_it_is_nearly_as_fast() -> None:
    for seconds in (0.05, 0.5, 5.0, 50.0):
        speeds = compare_engines(FAR, RESNET18, 2, seconds)
        fastest, chosen = min(speed["step_seconds"] for speed in speeds), recommend(speeds)
        seconds_by_name = {speed["engine"]: speed["step_seconds"] for speed in speeds}
        assert seconds_by_name[chosen] <= 1.1 * fastest
        earlier = list(seconds_by_name)[: list(seconds_by_name).index(chosen)]
        assert all(seconds_by_name[name] > 1.1 * fastest for name in earlier)
    assert recommend(compare_engines(FAR, RESNET18, 2, 50.0)) == "ddp"


@given(st.floats(1e-5, 0.1), st.floats(1e6, 1e10), st.floats(0.01, 10))
def test_ddp_is_what_steady_scale_predicts(latency: float, rate: float, seconds: float) -> None:
    gradients = [4 * math.prod(shape) for shape in reversed(RESNET18)]
    device = MeasuredDevice(
        batch_size=8,
        forward_seconds=seconds / 3,
        backward_seconds=seconds * 2 / 3,
        update_seconds=0.0,
        gradients=tuple(Gradient(bytes=num, ready=(k + 1) / len(gradients)) for k, num in enumerate(gradients)),
    )
    link = NetworkLink(name="x", latency_seconds=latency, bytes_per_second=rate, source="")
    ours = compare_engines(measured(latency, rate), RESNET18, 2, seconds)[1]
    assert ours["step_seconds"] == pytest.approx(
        predict(device, 2, MachineCluster(between=link)).step_seconds, rel=1e-3
    )


def test_the_table_stars_the_recommended_and_says_what_it_costs() -> None:
    tables = engines_document({"backends": [FAR], "procs": 2}, RESNET18, None)
    text = engines_text(tables, 60)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 60 and lines[0].split()[-6:] == ["100.0", "ms", "1.00", "s", "10.0", "s"]
    starred = [line for line in lines[1:8] if "*" in line]
    assert starred and sum(line.count("*") for line in lines[1:8]) == 3
    words = " ".join(line.strip() for line in lines[8:])
    for table in tables:
        chosen = next(row for row in table["engines"] if row["engine"] == table["recommended"])
        assert chosen["accuracy"] in words and chosen["flags"] in words
    [table] = engines_document({"backends": [FAR], "procs": 2}, RESNET18, 2.0)
    assert table["step_seconds"] == 2.0 and table["recommended"] in {row["engine"] for row in table["engines"]}
