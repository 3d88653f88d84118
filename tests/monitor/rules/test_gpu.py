from __future__ import annotations

import pytest
from tests.monitor.rules.made import evidence, gpu, ledger, on_gpu

from steadytrain.monitor.rules.gpu import shared, throttled, transfer

DOWN = {"clock_hertz": 1.2e9, "clock_limit_hertz": 2.0e9}


def test_copies_that_the_gpu_waits_for_are_transfer() -> None:
    cause = transfer(on_gpu(ledger=ledger(transfer=20.0)))
    assert cause is not None and cause.share == pytest.approx(20 / 85)
    assert "1.0 GB a second" in cause.evidence[1]
    assert transfer(on_gpu(ledger=ledger(transfer=1.0))) is None


def test_a_clock_that_is_held_down_costs_in_proportion() -> None:
    cause = throttled(on_gpu(devices=(gpu(throttled=("power cap",), **DOWN),)))
    assert cause is not None and cause.share == pytest.approx(0.4) and "-pl WATTS" in cause.change
    cause = throttled(on_gpu(devices=(gpu(throttled=("thermal",), temperature=88.0, **DOWN),)))
    assert cause is not None and "air" in cause.change and "88 degrees" in cause.evidence


def test_a_low_clock_that_nothing_holds_down_is_no_cause() -> None:
    assert throttled(on_gpu(devices=(gpu(**DOWN),))) is None
    assert throttled(on_gpu(devices=(gpu(throttled=("power cap",)),))) is None, "the driver tells no clock"


def test_the_slowest_clock_is_named() -> None:
    two = (
        gpu(throttled=("power cap",), clock_hertz=1.9e9, clock_limit_hertz=2e9),
        gpu(index=1, throttled=("x",), **DOWN),
    )
    cause = throttled(on_gpu(devices=two))
    assert cause is not None and "GPU 1" in cause.sentence


def test_others_on_the_same_gpu_are_counted() -> None:
    cause = shared(on_gpu(devices=(gpu(processes=1),)))
    assert cause is not None and cause.share == pytest.approx(0.5) and "1 other process computes" in cause.sentence
    assert shared(on_gpu(devices=(gpu(processes=0),))) is None
    assert shared(evidence(devices=(gpu(processes=3),))) is None, "the run does not use it"
