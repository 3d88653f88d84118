"""What is chosen, given what was measured: nothing here looks at a clock."""

from __future__ import annotations

import itertools
import random

from steadytrain.data.loader.choice import BATCHES, BLOCKS, Gauge, judge, stay, worth_trying

DEPTH = 4


def measured(cost: float, *, wait: float = 0.0, step: float = 0.5e-3, noise: float = 0.0, seed: int = 0) -> Gauge:
    """A loop whose steps take ``cost`` longer while the feed works, on a machine where some steps are interrupted."""
    gauge, draw = Gauge(DEPTH), random.Random(seed)
    while not gauge.done:
        works = not gauge.holds
        own = step * (1 + cost * works) + (draw.random() < noise) * 4e-3
        gauge.add(own=own, called=step * wait * works)
    return gauge


def test_the_cost_is_what_was_put_in() -> None:
    gauge = measured(0.12, wait=0.03)
    assert all(abs(cost - 0.15) < 1e-9 for cost in gauge.costs()) and len(gauge.costs()) == BLOCKS
    assert all(abs(cost - 0.12) < 1e-9 for cost in gauge.taken())
    assert abs(gauge.batch_seconds - 0.5e-3) < 1e-12
    assert gauge.batches == BLOCKS * 4 * BATCHES


def test_a_feed_is_held_for_as_many_batches_as_are_ready() -> None:
    gauge, held = Gauge(DEPTH), list[int]()
    for _ in range(8 * DEPTH):
        held.append(gauge.holds)
        gauge.add(own=1.0, called=0.0)
    assert [(holds, len(list(run))) for holds, run in itertools.groupby(held)] == [(True, 4), (False, 12)] * 2


def test_interruptions_by_other_programs_choose_nothing() -> None:
    for seed in range(40):
        assert worth_trying(measured(0.0, noise=0.05, seed=seed)) is not None
        assert worth_trying(measured(0.30, noise=0.02, seed=seed)) is None


def test_a_process_is_tried_only_where_threads_cost_a_fast_loop_its_own_time() -> None:
    assert worth_trying(measured(0.12)) is None
    assert worth_trying(measured(0.03)) == "threads do not clearly cost the loop more than 5%"
    assert worth_trying(measured(0.01, wait=2.0)) == "the loop waits for batches; it is not slowed down itself"
    assert worth_trying(measured(0.01, wait=2.0), made_here=True) is None
    assert worth_trying(measured(0.12, step=0.1)) == "a batch takes the loop 100 ms"


def test_a_process_stays_where_it_costs_less_waiting_included() -> None:
    threads = measured(0.15)
    better = judge(threads, measured(0.02))
    assert (better.place, round(better.threads_cost or 0, 2), round(better.process_cost or 0, 2)) == (
        "process",
        0.15,
        0.02,
    )
    assert judge(threads, measured(0.15)).place == "threads"
    assert judge(threads, measured(0.02, wait=0.5)).place == "threads"


def test_staying_tells_what_was_measured() -> None:
    assert stay("no").threads_cost is None
    told = stay("no", measured(0.03))
    assert (told.place, round(told.threads_cost or 0, 2), told.process_cost) == ("threads", 0.03, None)
