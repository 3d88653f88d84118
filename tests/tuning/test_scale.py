"""The prediction in cases whose answer is known in closed form."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.errors import InputError
from steadytrain.tuning.scale import (
    LINKS,
    Gradient,
    MachineCluster,
    MeasuredDevice,
    NetworkLink,
    ScalePrediction,
    advise,
    buckets,
    expected_maximum,
    exposed_seconds,
    fit_link,
    parse_link,
    predict,
)

EVEN = tuple(Gradient(bytes=1_000_000, ready=(k + 1) / 100) for k in range(100))
DEVICE = MeasuredDevice(batch_size=64, forward_seconds=0.1, backward_seconds=0.2, update_seconds=0.02, gradients=EVEN)


def link(latency_seconds: float, bytes_per_second: float) -> NetworkLink:
    return NetworkLink(name="x", latency_seconds=latency_seconds, bytes_per_second=bytes_per_second, source="a test")


def on(latency_seconds: float, bytes_per_second: float) -> MachineCluster:
    return MachineCluster(between=link(latency_seconds, bytes_per_second))


@pytest.mark.parametrize("n", [1, 2, 7, 512])
def test_over_an_infinite_link_n_devices_do_n_times_the_work(n: int) -> None:
    result = predict(DEVICE, n, on(0.0, math.inf))
    assert result.images_per_second == pytest.approx(n * 64 / 0.32)
    assert result.efficiency == pytest.approx(1.0) and result.limit == "compute" and result.exposed_seconds == 0


def test_a_slow_link_hides_the_backward_pass_but_for_its_first_bucket() -> None:
    result = predict(DEVICE, 2, on(0.0, 1e6))
    first = 0.02 * 0.2  # of two gradients, over 1 MiB
    assert result.step_seconds == pytest.approx(0.1 + first + 100 + 0.02, rel=1e-9)


def test_a_fast_link_leaves_only_the_last_bucket_exposed() -> None:
    rate = 50e9
    last = buckets(EVEN)[-1]
    result = predict(DEVICE, 2, on(0.0, rate))
    assert result.exposed_seconds == pytest.approx(last.bytes / rate)


def test_where_only_latency_counts_it_grows_with_the_ring() -> None:
    small = MeasuredDevice(
        batch_size=64,
        forward_seconds=0.1,
        backward_seconds=0.2,
        update_seconds=0.0,
        gradients=(Gradient(bytes=4, ready=1.0),),
    )
    for n in (2, 5, 33):
        result = predict(small, n, on(0.01, math.inf))
        assert result.step_seconds == pytest.approx(0.3 + 2 * (n - 1) * 0.01)
        assert result.limit == "latency" and result.losses["network"] == 0


@given(st.integers(2, 64), st.floats(1e3, 1e9), st.floats(1e6, 1e11))
def test_a_ring_moves_the_least_bytes_that_an_all_reduce_must(n: int, size: float, rate: float) -> None:
    assert on(0.0, rate).all_reduce_seconds(size, n) == pytest.approx(2 * (n - 1) / n * size / rate)


def test_machines_exchange_what_is_left_after_their_own_devices_have() -> None:
    two_links = MachineCluster(between=link(0.001, 1e9), per_machine=8, within=link(0.00001, 10e9))
    within = 2 * 7 * (0.00001 + 80e6 / 8 / 10e9)
    assert two_links.all_reduce_seconds(80e6, 8) == pytest.approx(within)
    assert two_links.all_reduce_seconds(80e6, 32) == pytest.approx(within + 2 * 3 * (0.001 + 80e6 / 4 / 1e9))
    assert two_links.shape(12) == (2, 8) and two_links.shape(3) == (1, 3)


@given(st.lists(st.tuples(st.integers(1, 10**7), st.floats(0, 1)), max_size=40), st.floats(0, 1e7))
def test_buckets_lose_no_byte_and_wait_for_their_last_gradient(sizes: list[tuple[int, float]], most: float) -> None:
    gradients = [Gradient(bytes=num, ready=ready) for num, ready in sorted(sizes, key=lambda pair: pair[1])]
    joined = buckets(gradients, first_bytes=most, most_bytes=most)
    assert sum(row.bytes for row in joined) == sum(row.bytes for row in gradients)
    assert [row.ready for row in joined] == sorted(row.ready for row in joined)
    assert not joined or joined[-1].ready == gradients[-1].ready


def test_overlap_never_makes_an_update_longer_nor_shorter_than_its_exchange() -> None:
    for rate in (1e7, 1e8, 1e9, 1e10):
        result = predict(DEVICE, 8, on(1e-4, rate))
        assert max(0.32, result.exchange_seconds) <= result.step_seconds <= 0.32 + result.exchange_seconds


def test_nothing_to_exchange_exposes_nothing() -> None:
    assert exposed_seconds([], 1.0, lambda num: 1.0) == 0.0


def test_a_loader_caps_each_machine() -> None:
    machines = MachineCluster(between=link(0.0, math.inf), per_machine=4, within=link(0.0, math.inf))
    result = [predict(DEVICE, n, machines, loader_images_per_second=500) for n in (1, 2, 4, 8)]
    assert [round(row.images_per_second) for row in result] == [200, 400, 500, 1000]
    assert [row.limit for row in result] == ["compute", "compute", "input", "input"]


def test_a_link_is_fitted_exactly_to_what_follows_the_law() -> None:
    truth = on(0.0003, 2e8)
    for n in (2, 3, 16):
        way = {"way": "buckets", "bytes": 10**8, "seconds": truth.all_reduce_seconds(1e8, n)}
        link = fit_link({"backend": "gloo", "latency_seconds": truth.all_reduce_seconds(4, n), "ways": [way]}, n)
        assert link.latency_seconds == pytest.approx(0.0003) and link.bytes_per_second == pytest.approx(2e8)


def test_named_links_are_no_faster_than_their_wires() -> None:
    wires = {"1GbE": 125e6, "10GbE": 1.25e9, "25GbE": 3.125e9, "40GbE": 5e9, "100GbE": 12.5e9, "pcie3": 15.754e9}
    wires |= {
        "edr": 12.5e9,
        "hdr": 25e9,
        "ndr": 50e9,
        "pcie4": 31.508e9,
        "nvlink1": 80e9,
        "nvlink2": 150e9,
        "nvlink3": 300e9,
        "nvlink4": 450e9,
    }
    assert all(LINKS[name].bytes_per_second <= rate for name, rate in wires.items())
    assert {*wires, "nvlink"} == {*LINKS} and all(row.source for row in LINKS.values())


@pytest.mark.parametrize(
    ("text", "latency", "rate"),
    [
        ("0.1 ms,10 Gbit/s", 1e-4, 1.25e9),
        ("50us, 100Mbit", 5e-5, 12.5e6),
        ("5 ms, 1.5 GB/s", 5e-3, 1.5e9),
        ("10gbe", LINKS["10GbE"].latency_seconds, LINKS["10GbE"].bytes_per_second),
    ],
)
def test_a_link_is_a_name_or_two_figures(text: str, latency: float, rate: float) -> None:
    result = parse_link(text)
    assert result.latency_seconds == pytest.approx(latency) and result.bytes_per_second == pytest.approx(rate)


@pytest.mark.parametrize("text", ["", "token-ring", "10 Gbit/s", "0.1 ms,0 Gbit/s", "1.2.3 ms,1 GB/s"])
def test_another_link_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(InputError, match="1GbE"):
        parse_link(text)


def predictions(most: int, cluster: MachineCluster, **value: object) -> list[ScalePrediction]:
    return [predict(DEVICE, n, cluster, **value) for n in range(1, most + 1)]  # type: ignore[arg-type]


def test_where_nothing_is_lost_all_devices_are_recommended() -> None:
    result = advise(predictions(16, on(0.0, math.inf)))
    assert (result.devices, result.fastest, result.worse_from) == (16, 16, None) and len(result.words) == 1


def test_one_device_more_than_a_machine_holds_can_be_worse() -> None:
    two_links = MachineCluster(between=link(0.01, 1e8), per_machine=8, within=link(0.0, math.inf))
    result = advise(predictions(12, two_links))
    assert (result.devices, result.fastest, result.worse_from) == (8, 8, 9)
    assert result.words[1].startswith("more is worse: 1,600 images/s with 8, ")
    assert "limit: network" in result.words[1]


def test_a_second_machine_may_pay_only_when_it_is_full() -> None:
    two_links = MachineCluster(between=link(0.0, 0.4e9), per_machine=8, within=link(0.0, math.inf))
    result = advise(predictions(16, two_links), least_efficiency=0.5)
    assert result.fastest == 16 and result.worse_from is None


def test_all_devices_wait_for_the_slowest() -> None:
    uneven = replace(DEVICE, spread=0.05)
    result = predict(uneven, 8, on(0.0, math.inf))
    assert result.step_seconds == pytest.approx(0.32 * (1 + 0.05 * expected_maximum(8)))
    assert result.limit == "slowest" and predict(uneven, 1, on(0.0, math.inf)).step_seconds == pytest.approx(0.32)


@pytest.mark.parametrize(("n", "exact"), [(2, 0.5642), (3, 0.8463), (5, 1.1630), (10, 1.5388), (100, 2.5076)])
def test_the_expected_maximum_is_that_of_order_statistics(n: int, exact: float) -> None:
    assert expected_maximum(n) == pytest.approx(exact, rel=0.05)


def test_the_recommended_number_is_the_largest_that_is_efficient_enough() -> None:
    result = predictions(64, on(1e-3, 1e9))
    chosen = advise(result, least_efficiency=0.5).devices
    assert result[chosen - 1].efficiency >= 0.5
    assert all(row.efficiency < 0.5 for row in result[chosen:])
    assert advise(result, least_efficiency=1.0).devices == 1
