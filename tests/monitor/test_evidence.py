"""What a verdict is found from, gathered from events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace
from tests.monitor.recorder import BATCH, NUM_TRAIN, RECIPE, Recorder

from steadytrain.errors import RunError
from steadytrain.events import (
    UPDATING,
    Accounted,
    Ceilings,
    Ended,
    Event,
    FeedPlaced,
    MachineStats,
    Stalled,
    StepMeasured,
    ThreadStats,
)
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.history import RunHistory
from steadytrain.monitor.ledger import INPUT, STEADY

EPOCH = NUM_TRAIN // BATCH


def history_of(run: Recorder, *more: Event) -> RunHistory:
    history = RunHistory(RECIPE)
    for event in (*run.events, *(replace(event, attempt=1, time=run.time) for event in more)):
        history.take(event)
    return history


def gathered(run: Recorder, *more: Event) -> Evidence:
    return history_of(run, *more).evidence()


def two_epochs() -> Recorder:
    """Storage is slow in the first pass, nothing in the second; the wait in the first is three times as long."""
    run = Recorder()
    run.start()
    for index in range(2 * EPOCH):
        first = index < EPOCH
        run.update(input=0.3 if first else 0.1, forward=0.1, backward=0.2)
        run.feed(read=0.2 if first else 0.0, decode=0.05)
        run.account()
    return run


def test_first_pass_over_the_data_is_separated_from_later_ones() -> None:
    facts = gathered(two_epochs())
    assert facts.first.shares is not None
    assert facts.steady.shares is not None
    assert set(facts.first.shares) == set(facts.steady.shares) == set(STEADY)
    assert sum(facts.first.shares.values()) == pytest.approx(1.0)
    assert facts.first.shares["input_storage"] == pytest.approx(0.8 * 0.3 / 0.6, abs=0.02)
    assert facts.steady.shares["input_storage"] == pytest.approx(0.0)
    assert facts.steady.shares["input_decode"] == pytest.approx(0.1 / 0.4, abs=0.01)
    assert facts.first_part == pytest.approx(0.6, abs=0.01)


def test_a_run_that_has_not_come_beyond_its_first_pass_has_no_later_one() -> None:
    run = Recorder()
    run.start()
    for _ in range(EPOCH):
        run.update(forward=0.1)
        run.account()
    facts = gathered(run)
    assert facts.first.shares is None
    assert facts.steady.shares is None
    assert facts.position == NUM_TRAIN


def test_feed_has_separate_figures_of_the_steady_part_and_the_first_pass() -> None:
    facts = gathered(two_epochs())
    assert facts.feed is not None
    assert facts.first.feed is not None
    assert facts.feed.read_seconds == pytest.approx(0.0, abs=0.21)
    assert facts.first.feed.read_seconds == pytest.approx(0.2 * EPOCH, rel=0.15)
    assert facts.feed.images == pytest.approx(NUM_TRAIN, rel=0.1)


def test_what_threads_made_before_the_loop_made_batches_itself_is_theirs() -> None:
    run = Recorder()
    run.start()
    for index in range(2 * EPOCH):
        run.update(input=0.1, forward=0.1)
        run.feed(read=0.1)
        run.account(feed=False)
        run.events.append(replace(run.stats(run.step * BATCH), by_loop=index >= EPOCH, time=run.time, attempt=1))
    facts = gathered(run)
    assert facts.first.feed is not None and not facts.first.feed.by_loop
    assert facts.feed is not None and facts.feed.by_loop


def test_machine_figures_are_of_the_steady_part_only() -> None:
    run = Recorder()
    run.start()
    busy, calm = (MachineStats(seconds=1.0, cores=2, machine_cores=2, cpu=cpu, attempt=1) for cpu in (2.0, 1.0))
    run.events.append(replace(busy, time=run.time))
    for _ in range(5):
        run.update(forward=1.0)
        run.events.append(replace(calm, time=run.time) if run.step > 2 else replace(busy, time=run.time))
    facts = gathered(run)
    assert facts.machine is not None
    assert (facts.machine.cpu, facts.machine.seconds) == (1.0, 3.0)


def test_run_of_one_second_has_the_machine_figures_there_are() -> None:
    run = Recorder()
    run.start()
    facts = gathered(run, MachineStats(seconds=1.0, cores=2, machine_cores=2, cpu=2.0))
    assert facts.machine is not None
    assert facts.machine.cpu == 2.0


def test_updates_have_parts_and_percentiles_without_the_first() -> None:
    run = Recorder()
    run.start()
    for index in range(102):
        slow = 1.0 if index in (1, 50) else 0.0
        run.update(input=0.1, forward=0.1 + slow, backward=0.2)
        run.account()
    facts = gathered(run)
    assert facts.updates.seconds == pytest.approx((0.4, 0.4, 0.4))
    assert facts.updates.waits == pytest.approx((0.1, 0.1, 0.1))
    assert facts.mean_seconds(*INPUT) == pytest.approx(0.1)
    assert facts.mean_seconds("backward") == pytest.approx(0.2)
    assert max(facts.updates.slowest, key=lambda step: facts.updates.slowest[step]) == 51


def test_evaluations_and_checkpoints_are_counted() -> None:
    run = two_epochs()
    run.evaluate(2.0)
    run.evaluate(4.0)
    run.save(0.5)
    facts = gathered(run)
    assert facts.evaluations == (2, 6.0)
    assert facts.checkpoints == (1, 0.5)


def test_newest_single_measurement_counts_and_every_stall_counts() -> None:
    old = Ceilings(
        step=1,
        feed_images_per_second=1.0,
        compute_images_per_second=2.0,
        both_images_per_second=1.0,
        seconds=1.0,
    )
    new = replace(old, feed_images_per_second=9.0)
    placed = FeedPlaced(step=1, place="process", reason="shorter")
    measured = StepMeasured(step=1, batch_size=10, other_batch_size=2, passes={}, fixed_seconds=0.0)
    stall = Stalled(step=1, what="feed", seconds=9.0, expected_seconds=0.1, culprit="thread 2", stacks="stacks.txt")
    history = history_of(two_epochs(), old, new, placed, measured, stall, stall)
    evidence = history.evidence()
    assert evidence.newest(Ceilings) == replace(new, attempt=1, time=history.last_time)
    assert evidence.newest(StepMeasured) and evidence.newest(FeedPlaced)
    assert len(history.stalls) == 2


def test_evidence_says_how_the_newest_attempt_ended_and_that_one_was_killed() -> None:
    run = two_epochs()
    run.end()
    assert isinstance(history_of(run).ended, Ended)
    run.start()
    assert history_of(run).ended is None
    facts = gathered(run)
    assert facts.attempts == 2
    assert facts.started.step == 2 * EPOCH


def test_before_a_run_began_there_is_no_evidence() -> None:
    with pytest.raises(RunError, match="has not started yet"):
        RunHistory(RECIPE).evidence()


def test_cores_are_in_use_during_updates_whatever_else_a_run_waits_for() -> None:
    # Half of its time the run waits for a disk between updates: of two cores 1.8 are busy in them, 0.9 on the average.
    run = Recorder()
    run.start()
    for _ in range(50):
        run.update(forward=0.1, backward=0.2)
    run.save(15.0)
    run.account()
    sample = MachineStats(seconds=30.0, cores=2, machine_cores=2, cpu=0.9, idle=1.1, others=0.0)
    untold = gathered(run, sample).machine
    assert untold is not None and untold.cpu == 0.9, "a log that does not tell"
    for number, event in enumerate(run.events):
        if isinstance(event, Accounted):
            updating = sum(event.seconds.get(bucket, 0.0) for bucket in UPDATING)
            run.events[number] = replace(event, update_cpu_seconds=1.8 * updating)
    machine = gathered(run, sample).machine
    assert machine is not None and machine.cpu == pytest.approx(1.8) and machine.idle == pytest.approx(0.2)
    elsewhere = gathered(run, FeedPlaced(step=1, place="process", reason="it was faster"), sample).machine
    assert elsewhere is not None and elsewhere.cpu == 0.9, "a feed in a process of its own computes too"


def stopped(**seconds: float) -> ThreadStats:
    """Looks that found the process stopped, by bucket."""
    loop: Any = {bucket: {"seconds": 1.0, "stopped": value} for bucket, value in seconds.items()}
    return ThreadStats(step=1, seconds=1.0, looks=9, cost_seconds=0.0, lock_seconds=0.0, loop=loop)


def test_seconds_in_which_the_process_was_stopped_are_no_work_of_its_updates() -> None:
    run = two_epochs()
    evidence, sound = gathered(run, stopped(forward=2.0, input=0.5)), gathered(run)
    assert evidence.stopped == 2.5 and sound.stopped == 0.0
    assert evidence.ledger.seconds["forward"] < sound.ledger.seconds["forward"] - 1.99
    parts = ("warmup", "forward", "backward")
    worked = [sum(each.ledger.seconds[name] for name in parts) for each in (evidence, sound)]
    assert worked[0] == pytest.approx(worked[1] - 2.0)
    assert evidence.ledger.share(*INPUT) < sound.ledger.share(*INPUT)
    assert evidence.ledger.seconds["other"] == pytest.approx(sound.ledger.seconds["other"] + 2.5)
    assert sum(evidence.ledger.seconds.values()) == pytest.approx(sound.ledger.wall_seconds)


def test_a_stop_that_was_found_in_the_next_part_of_an_update_is_none_of_its_work_either() -> None:
    run = two_epochs()
    sound = gathered(run)
    length = sound.ledger.seconds["optimizer"] + 1.0  # more than that part has: the look came late
    evidence = gathered(run, stopped(optimizer=length))
    assert evidence.ledger.seconds["other"] == pytest.approx(sound.ledger.seconds["other"] + length)
    assert evidence.ledger.seconds["optimizer"] == pytest.approx(sound.ledger.seconds["optimizer"])


def growing(updates: int, forward: Callable[[int], float]) -> Evidence:
    """A run whose forward passes take as long as told, accounted for every five updates."""
    run = Recorder()
    run.start()
    for number in range(updates):
        run.update(forward=forward(number), backward=0.2)
        if number % 5 == 4:
            run.account()
    return gathered(run)


def test_the_parts_of_updates_are_known_by_stretches_of_an_attempt() -> None:
    parts = growing(100, lambda number: 0.1 + 0.01 * number).parts
    assert [part.step for part in parts] == [35, 50, 70, 85, 100]
    assert sum(part.images for part in parts) == 80 * BATCH, "the first pass is left out: most comes after it"
    forward = [part.seconds["forward"] for part in parts]
    assert forward == sorted(forward) and forward[0] == pytest.approx(0.1 + 0.01 * 27)
    assert all(part.seconds["backward"] == pytest.approx(0.2) for part in parts)
    assert growing(20, lambda number: 0.1).parts == (), "too short to be divided"


def test_cores_that_change_divide_an_attempt() -> None:
    run = Recorder()
    run.start()
    events = []
    for cores, seconds in ((2, 0.1), (2, 0.1), (1, 0.2)):
        for _ in range(10):
            run.update(forward=seconds)
        run.account()
        events.append(MachineStats(seconds=1.0, cores=cores, machine_cores=2, time=run.time, attempt=1))
    history = RunHistory(RECIPE)
    for event in sorted([*run.events, *events], key=lambda event: event.time):
        history.take(event)
    whole, less = history.evidence().grants
    assert (whole.cores, less.cores) == (2, 1) and whole.amount == 2.0 and whole.images + less.images == 30 * BATCH


def test_cores_that_are_fewer_by_the_first_sample_divide_an_attempt() -> None:
    run = Recorder()
    run.start()
    run.events[0] = replace(run.events[0], machine={"cores": 2})
    for _ in range(20):
        run.update(forward=0.1)
    run.account()
    history = RunHistory(RECIPE)
    sample = MachineStats(seconds=1.0, cores=1, machine_cores=2, time=run.time - 1.0, attempt=1)
    for event in sorted([*run.events, sample], key=lambda event: event.time):
        history.take(event)
    before, after = history.evidence().grants
    assert (before.cores, after.cores) == (2, 1) and min(before.images, after.images) > 0


def test_updates_are_told_apart_by_whether_other_processes_were_at_work() -> None:
    run = Recorder()
    run.start()
    events = []
    for others, seconds in ((0.0, 0.1), (1.1, 0.2), (0.1, 0.1)):
        for _ in range(10):
            run.update(forward=seconds)
        run.account()
        events.append(MachineStats(seconds=1.0, cores=2, machine_cores=2, others=others, time=run.time, attempt=1))
    history = RunHistory(RECIPE)
    for event in sorted([*run.events, *events], key=lambda event: event.time):
        history.take(event)
    company = history.evidence().company
    assert company.alone[0] + company.beside[0] == 30 * BATCH and company.beside[0] == 10 * BATCH
    assert company.beside[1] == pytest.approx(2.0) and company.alone[1] == pytest.approx(1.8), "two are warm-up"
