from __future__ import annotations

import pytest
from tests.monitor.rules.made import evidence, ledger, on_gpu

from steadytrain.monitor.rules.ranks import communication, straggler


def rank(communication: float, **more: float) -> dict[str, float]:
    return {"communication": communication, "forward": 1 - communication - sum(more.values())} | more


def test_all_ranks_that_wait_alike_are_communication_bound() -> None:
    told = on_gpu(ledger=ledger(communication=20.0), ranks={n: rank(0.24) for n in range(4)})
    cause = communication(told)
    assert cause is not None and cause.share == pytest.approx(0.24) and cause.saves == pytest.approx(0.12)
    assert straggler(told) is None


def test_one_rank_that_never_waits_is_the_straggler_and_is_named_with_what_it_does() -> None:
    ranks = {n: rank(0.4) for n in range(4)} | {2: rank(0.02, input_decode=0.38)}
    told = on_gpu(ledger=ledger(communication=40.0), ranks=ranks)
    cause = straggler(told)
    assert cause is not None and "Rank 2" in cause.sentence and cause.share == pytest.approx(0.38)
    assert "input decode" in cause.evidence[1]
    assert communication(told) is None, "what the others wait is the straggler's"


def test_ranks_that_are_late_by_turns_are_not_the_exchanges_fault() -> None:
    told = on_gpu(
        ledger=ledger(communication=20.0), ranks={n: rank(0.2) for n in range(2)}, exchanging={0: 0.02, 1: 0.03}
    )
    assert communication(told) is None and straggler(told) is None
    slow = on_gpu(
        ledger=ledger(communication=20.0), ranks={n: rank(0.2) for n in range(2)}, exchanging={0: 0.17, 1: 0.2}
    )
    cause = communication(slow)
    assert cause is not None and cause.share == pytest.approx(0.17)


def test_a_rank_with_more_images_is_not_called_slow() -> None:
    ranks = {0: {"communication": 0.6, "forward": 0.1, "backward": 0.2}, 1: {"communication": 0.02, "forward": 0.9}}
    cause = straggler(on_gpu(ranks=ranks, fed={0: 1000, 1: 3000}))
    assert cause is not None and cause.name == "straggler" and "Rank 1 has 3.0 times as many images" in cause.sentence
    assert cause.share == pytest.approx(0.9 - 2 * 0.3), "with two shares each, as fast as both compute at once"
    even = straggler(on_gpu(ranks=ranks, fed={0: 2000, 1: 2010}))
    assert even is not None and even.share == pytest.approx(0.58)


def test_one_process_has_neither() -> None:
    assert straggler(evidence(ranks={0: rank(0.0)})) is None and communication(evidence()) is None
