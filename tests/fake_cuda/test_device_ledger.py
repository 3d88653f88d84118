"""The ledger of a GPU's run beside the truth, and the verdict from it: on GPUs that are simulated in virtual time."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
from msgspec import structs
from tests.fake_cuda.device_clock import (
    CASES,
    RANKS,
    SMALL,
    Case,
    Part,
    Simulated,
    late_ranks,
    run,
    simulate,
    verdict,
)

from steadytrain.events import StepMeasured
from steadytrain.training import clock as clocks

TINY = replace(SMALL, forward=Part(12, 10e-6), backward=Part(16, 10e-6), optimizer=Part(1, 20e-6))


@pytest.fixture(scope="module")
def simulated() -> dict[str, Simulated]:
    """Runs that were simulated already, by name."""
    return {}


def once(simulated: dict[str, Simulated], name: str) -> Simulated:
    if name not in simulated:
        simulated[name] = run(name)
    return simulated[name]


@pytest.mark.parametrize("name", CASES)
def test_the_ledger_is_within_two_points_of_the_truth(simulated: dict[str, Simulated], name: str) -> None:
    case = once(simulated, name)
    assert case.off <= 0.02, {
        b: (round(case.true[b], 3), round(share, 3))
        for b, share in case.told.items()
        if abs(share - case.true[b]) > 0.01
    }


@pytest.mark.parametrize(
    "case",
    [
        replace(SMALL, exchange=0.002, ranks=2),
        replace(TINY, graph=True),
        replace(Case(copy=0.1), updates=60),
        replace(SMALL, log_steps=1, updates=150),
        replace(SMALL, feed=0.015, updates=150),
        Case(call=860e-6, updates=60),
        Case(accumulate=16, updates=12),
    ],
    ids=["small on ranks", "tiny graph", "slow copies", "logs each", "small, slow feed", "host as fast", "many passes"],
)
def test_so_it_is_where_several_things_hold_the_device_up(case: Case) -> None:
    others = simulate(case).arrivals if case.ranks > 1 else ()
    assert simulate(case, others).off <= 0.03


def test_a_start_that_the_host_is_given_costs_less_than_half_a_percent() -> None:
    for case in (SMALL, Case(call=860e-6)):
        with patch.object(clocks, "HOLD_EVERY", 30):
            held = simulate(replace(case, updates=90))
        with patch.object(clocks, "HOLD_AFTER", 10**9):
            alone = simulate(replace(case, updates=90))
        cost = (held.wall - alone.wall) / alone.wall * 30 / clocks.HOLD_EVERY
        assert held.held > 0 == alone.held and cost < 0.005


def test_a_run_whose_host_is_ahead_is_never_held(simulated: dict[str, Simulated]) -> None:
    assert all(once(simulated, name).held == 0 for name in ("one GPU", "exposed exchange", "cuda:3"))


def test_exchanges_that_nothing_hides_are_what_the_verdict_names(simulated: dict[str, Simulated]) -> None:
    first = once(simulated, "exposed exchange")
    second = replace(
        first, case=replace(RANKS, rank=1), events=[structs.replace(event, rank=1) for event in first.events]
    )
    cause = verdict(first, second).causes[0]
    assert cause.name == "communication" and cause.share == pytest.approx(first.true["communication"], abs=0.02)


def test_a_rank_that_comes_late_is_named_with_what_it_does() -> None:
    waits, late = late_ranks()
    cause = verdict(waits, late).causes[0]
    assert cause.name == "straggler" and "Rank 1 is slower" in cause.sentence
    lost = waits.true["communication"] - late.true["communication"]
    assert cause.share == pytest.approx(lost, abs=0.02)
    assert late.off <= 0.02


def slower(case: Case, times: float) -> Case:
    parts = [replace(part, seconds=times * part.seconds) for part in (case.forward, case.backward, case.optimizer)]
    slow = replace(case, forward=parts[0], backward=parts[1], optimizer=parts[2])
    return replace(slow, call=times * case.call, guards=times * case.guards, python=times * case.python)


@pytest.mark.parametrize(
    ("case", "change"),
    [
        (SMALL, "--graph"),
        (CASES["compiled"], "--graph"),
        (CASES["accumulated"], "--graph"),
        (replace(TINY, graph=True, python=1e-3), "--batch-size"),
    ],
    ids=["eager", "compiled", "accumulated", "graph"],
)
def test_a_run_that_is_bound_by_launches_is_told_so(case: Case, change: str) -> None:
    seen = simulate(replace(slower(case, 16), updates=100))
    cause = verdict(seen).causes[0]
    assert cause.name == "launch" and cause.change.startswith(change)
    beyond_warmup = seen.true["host"] - seen.history().ledger().share("warmup")
    assert cause.share == pytest.approx(beyond_warmup, abs=0.02)


def test_gaps_that_a_measured_pass_shows_as_well_are_counted_once(simulated: dict[str, Simulated]) -> None:
    seen = once(simulated, "host-bound eager")
    passes = {"full": 0.010, "other": 0.009}
    event = StepMeasured(step=20, batch_size=64, other_batch_size=16, passes=passes, fixed_seconds=0.007)
    measured = structs.replace(event, attempt=1, time=seen.events[-2].time)
    assert replace(seen, events=[*seen.events[:-1], measured, seen.events[-1]]).off <= 0.02


def test_a_run_that_the_device_bounds_has_no_launches_to_speak_of(simulated: dict[str, Simulated]) -> None:
    for name in ("one GPU", "graph"):
        assert {cause.name for cause in verdict(once(simulated, name)).causes} & {"launch", "batch_size"} == set()


def test_code_that_waits_for_the_device_in_each_part_leaves_the_gaps_where_they_are() -> None:
    seen = simulate(replace(SMALL, sync=4, updates=60))
    assert seen.told["forward"] + seen.told["backward"] > 0.5, "nothing is made up"
    assert not any("forward" in getattr(event, "launching_measured", ()) for event in seen.events)
