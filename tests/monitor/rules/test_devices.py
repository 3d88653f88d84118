from __future__ import annotations

from dataclasses import replace

import pytest
from tests.monitor.rules.made import evidence, find, gpu, ledger, on_gpu, rank

from steadytrain.monitor.evidence import RankShares

DOWN = {"clock_hertz": 1.2e9, "clock_limit_hertz": 2.0e9}


def test_copies_that_the_gpu_waits_for_are_transfer() -> None:
    cause = find("transfer", on_gpu(ledger=ledger(transfer=20.0)))
    assert cause is not None and cause.share == pytest.approx(20 / 85)
    assert "1.0 GB per second" in cause.evidence[1]
    assert find("transfer", on_gpu(ledger=ledger(transfer=1.0))) is None


def test_a_clock_that_is_held_down_costs_in_proportion() -> None:
    capped = gpu(throttled=("power limit",), power_watts=249.0, power_limit_watts=250.0, power_most_watts=400.0, **DOWN)
    cause = find("device_throttled", on_gpu(devices=(capped,)))
    assert cause is not None and cause.share == cause.saves == pytest.approx(0.4)
    assert "-i 0 -pl 400" in cause.change and "249 of 250 W" in cause.evidence
    cause = find("device_throttled", on_gpu(devices=(gpu(throttled=("heat",), temperature=88.0, **DOWN),)))
    assert cause is not None and "cooling" in cause.change and "88 degrees" in cause.evidence
    assert find("device_throttled", evidence(devices=(capped,))) is None, "the run does not use it"


def test_no_power_limit_is_advised_beyond_what_the_gpu_takes() -> None:
    at_most = {"power_watts": 699.0, "power_limit_watts": 700.0, "power_most_watts": 700.0, **DOWN}
    cause = find("device_throttled", on_gpu(devices=(gpu(throttled=("power limit",), **at_most),)))
    assert cause is not None and (cause.change, cause.saves) == ("", 0.0)
    assert "699 of 700 W, the highest limit that it takes" in cause.evidence
    unknown = gpu(throttled=("power limit",), power_watts=699.0, power_limit_watts=700.0, **DOWN)
    cause = find("device_throttled", on_gpu(devices=(unknown,)))
    assert cause is not None and "-pl" not in cause.change


@pytest.mark.parametrize(
    ("reasons", "advice"),
    [
        (("heat (hardware)", "power limit"), "cooling"),
        (("power brake",), "power supply"),
        (("set clocks",), "nvidia-smi -i 0 -rgc"),
        (("sync boost",), ""),
    ],
)
def test_each_reason_of_a_low_clock_has_its_own_remedy(reasons: tuple[str, ...], advice: str) -> None:
    cause = find("device_throttled", on_gpu(devices=(gpu(throttled=reasons, **DOWN),)))
    assert cause is not None and advice in cause.change and "-pl" not in cause.change


def test_a_low_clock_that_nothing_holds_down_is_no_cause() -> None:
    assert find("device_throttled", on_gpu(devices=(gpu(**DOWN),))) is None
    assert find("device_throttled", on_gpu(devices=(gpu(throttled=("power limit",)),))) is None, (
        "the driver tells no clock"
    )


def test_the_slowest_clock_is_named() -> None:
    two = (
        gpu(throttled=("power limit",), clock_hertz=1.9e9, clock_limit_hertz=2e9),
        gpu(index=1, throttled=("x",), **DOWN),
    )
    cause = find("device_throttled", on_gpu(devices=two))
    assert cause is not None and "GPU 1" in cause.sentence


def test_others_on_the_same_gpu_are_counted() -> None:
    cause = find("device_shared", on_gpu(devices=(gpu(processes=1),)))
    assert cause is not None and cause.share == pytest.approx(0.5) and "1 other process runs" in cause.sentence
    assert find("device_shared", on_gpu(devices=(gpu(processes=0),))) is None
    assert find("device_shared", evidence(devices=(gpu(processes=3),))) is None, "the run does not use it"


def test_all_ranks_that_wait_alike_are_communication_bound() -> None:
    facts = on_gpu(ledger=ledger(communication=20.0), ranks={n: rank(communication=0.24) for n in range(4)})
    cause = find("communication", facts)
    assert cause is not None and cause.share == pytest.approx(0.24) and cause.saves == pytest.approx(0.12)
    assert find("straggler", facts) is None


def test_one_rank_that_never_waits_is_the_straggler_and_is_named_with_what_it_does() -> None:
    ranks = {n: rank(communication=0.4) for n in range(4)} | {2: rank(communication=0.02, input_decode=0.38)}
    facts = on_gpu(ledger=ledger(communication=40.0), ranks=ranks)
    cause = find("straggler", facts)
    assert cause is not None and "Rank 2" in cause.sentence and cause.share == pytest.approx(0.38)
    assert "input decode" in cause.evidence[1]
    assert find("communication", facts) is None, "what the others wait is the straggler's"


def test_ranks_that_are_late_by_turns_are_not_the_exchanges_fault() -> None:
    by_turns = {n: rank(0.02 + 0.01 * n, communication=0.2) for n in range(2)}
    facts = on_gpu(ledger=ledger(communication=20.0), ranks=by_turns)
    assert find("communication", facts) is None and find("straggler", facts) is None
    at_once = {n: rank(0.17 + 0.03 * n, communication=0.2) for n in range(2)}
    slow = on_gpu(ledger=ledger(communication=20.0), ranks=at_once)
    cause = find("communication", slow)
    assert cause is not None and cause.share == pytest.approx(0.17)


def test_a_rank_with_more_images_is_not_called_slow() -> None:
    def of(*images: int) -> dict[int, RankShares]:
        first = rank(images=images[0], communication=0.6, forward=0.1, backward=0.2)
        return {0: first, 1: rank(images=images[1], communication=0.02, forward=0.9)}

    cause = find("straggler", on_gpu(ranks=of(1000, 3000)))
    assert cause is not None and cause.name == "straggler" and "Rank 1 has 3.0 times as many images" in cause.sentence
    assert cause.share == pytest.approx(0.9 - 2 * 0.3), "with two shares each, as fast as both compute at once"
    even = find("straggler", on_gpu(ranks=of(2000, 2010)))
    assert even is not None and even.share == pytest.approx(0.58)


def test_one_process_has_neither() -> None:
    assert find("straggler", evidence(ranks={0: rank(communication=0.0)})) is None
    assert find("communication", evidence()) is None


def test_a_late_rank_whose_process_was_stopped_says_so() -> None:
    late = replace(rank(communication=0.02, other=0.4), stopped=0.4)
    cause = find("straggler", evidence(ranks={0: rank(communication=0.4), 1: late}))
    assert cause is not None and "Rank 1 is slower" in cause.sentence
    assert cause.evidence[1] == "its process was stopped 40 % of the time (SIGSTOP, a frozen container or machine)"
