from __future__ import annotations

from typing import Any

import pytest
from tests.monitor.rules.made import evidence, find, ledger

from steadytrain.events import ServerStats


def stats(*seconds: float, updating: float = 0.001) -> ServerStats:
    """A hundred pushes, each with so many seconds of calls at each server."""
    servers: list[Any] = [
        {"seconds": 100 * each, "update_seconds": 100 * updating, "pushed_bytes": 1e8, "pulled_bytes": 1e8}
        for each in seconds
    ]
    return ServerStats(step=200, seconds=20.0, pushes=100, staleness=1.2, staleness_max=4, servers=servers)


@pytest.mark.parametrize("seconds", [(0.05,), (0.05, 0.04)], ids=["one", "two, as runs of before"])
def test_exchanges_that_nothing_hides_are_named_with_their_figures(seconds: tuple[float, ...]) -> None:
    cause = find("communication", evidence(ledger=ledger(communication=35.0), servers=stats(*seconds)))
    assert cause is not None and cause.share == pytest.approx(0.35) and "compress=bf16" in cause.change
    assert cause.evidence[0] == "a push and a pull take 50.0 ms, the update 1.0 ms of that"
    assert "5.0 pushes a second" in cause.evidence[1]
    assert "missed 1.2 updates on average, 4 at most" in cause.evidence[2]


def test_a_server_whose_updates_take_the_time_has_too_many_workers() -> None:
    cause = find("communication", evidence(ledger=ledger(communication=65.0), servers=stats(0.05, updating=0.04)))
    assert cause is not None and "fewer workers" in cause.change


def test_no_pushes_give_no_cause() -> None:
    server_stats = ServerStats(step=0, seconds=1.0, pushes=0, staleness=0.0, staleness_max=0)
    assert find("communication", evidence(ledger=ledger(communication=35.0), servers=server_stats)) is None
