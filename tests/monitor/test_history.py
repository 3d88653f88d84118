"""The book: whatever happens to a run, its seconds add up, and what was lost is what came after the checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.monitor.recorder import BATCH, NUM_TRAIN, RECIPE, Recorder
from tests.reports import runs
from tests.reports.runs import Clock, evaluated, logged, recipe, started, step, write

import steadytrain
from steadytrain.errors import RunError
from steadytrain.events import (
    Accounted,
    Ceilings,
    Event,
    Failed,
    Saved,
    Started,
    StepMeasured,
    from_json,
)
from steadytrain.monitor import goodput, ledger, read_history
from steadytrain.monitor.history import RunHistory
from steadytrain.monitor.ledger import BUCKETS, STEADY, Ledger
from steadytrain.run import Run

UPDATE = {"input": 0.03, "transfer": 0.01, "forward": 0.02, "backward": 0.04, "optimizer": 0.01, "host": 0.01}

seconds = st.floats(0, 100).map(lambda value: round(value, 3))
parts = st.sampled_from(["input", "transfer", "host", "forward", "backward", "optimizer", "communication", "epoch_gap"])
acts = st.one_of(
    st.tuples(st.just("update"), st.dictionaries(parts, seconds)),
    st.tuples(st.sampled_from(["evaluate", "save", "idle"]), seconds),
    st.tuples(st.just("account"), st.booleans()),
    st.tuples(st.just("feed"), st.tuples(seconds, seconds, seconds)),
    st.tuples(st.just("jump"), st.floats(-4000, 4000)),
    st.tuples(st.sampled_from(["kill", "stop"]), seconds),
)
calm = acts.filter(lambda act: act[0] != "jump")


def record(happenings: Iterable[tuple[str, object]], *, accounts: bool = True) -> Recorder:
    """A run that did these things."""
    run = Recorder(accounts=accounts)
    run.start()
    for name, value in happenings:
        match name, value:
            case "update", dict():
                run.update(**value)
            case "feed", (float() as read, float() as decode, float() as blocked):
                run.feed(read=read, decode=decode, blocked=blocked)
            case "account", bool():
                run.account(feed=value)
            case "jump", float():
                run.jump += value
            case "kill" | "stop", float():
                if name == "stop":
                    run.end()
                run.start(away=value)
            case (("evaluate" | "save" | "idle"), float()):
                getattr(run, name)(value)
    return run


def absorbed(events: Iterable[Event]) -> RunHistory:
    book = RunHistory(RECIPE)
    for event in events:
        book.take(event)
    return book


def ledger_of(run: Recorder) -> Ledger:
    return absorbed(run.events).ledger()


def trained(updates: int, *, every: int = 5, run: Recorder | None = None) -> Recorder:
    """A run of so many even updates, accounted for every few of them."""
    run = run or Recorder()
    if not run.walls:
        run.start()
    for index in range(updates):
        run.update(**UPDATE)
        run.feed(decode=0.05, read=0.01)
        if (index + 1) % every == 0:
            run.account()
    return run


@given(st.lists(acts), st.booleans())
def test_the_buckets_add_up_to_the_wall_clock_and_none_is_negative(
    happenings: list[tuple[str, object]], accounts: bool
) -> None:
    ledger = ledger_of(record(happenings, accounts=accounts))
    assert set(ledger.seconds) == set(BUCKETS)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_seconds)
    assert min(ledger.seconds.values()) >= -1e-9


@given(st.lists(calm))
def test_the_wall_time_is_that_of_all_attempts_and_pauses_are_away(happenings: list[tuple[str, object]]) -> None:
    run = record(happenings)
    run.account()
    ledger = ledger_of(run)
    assert ledger.wall_seconds <= sum(run.walls) + 1e-6  # what a killed attempt did without a word is away
    assert ledger.wall_seconds + ledger.away_seconds == pytest.approx(run.time - run.events[0].time + 2.0)


@given(st.lists(acts), st.booleans())
def test_looking_at_it_while_it_runs_changes_nothing(happenings: list[tuple[str, object]], accounts: bool) -> None:
    events = record(happenings, accounts=accounts).events
    looked = RunHistory(RECIPE)
    for event in events:
        looked.take(event)
        looked.ledger()
        looked.timeline(7)
        looked.evidence()
    assert looked.ledger() == absorbed(events).ledger()
    assert looked.evidence() == absorbed(events).evidence()
    assert looked.timeline() == absorbed(events).timeline()


@given(st.lists(acts), st.booleans())
def test_the_timeline_adds_up_to_the_ledger(happenings: list[tuple[str, object]], accounts: bool) -> None:
    book = absorbed(record(happenings, accounts=accounts).events)
    for bins in (None, 1, 10):
        slices = book.timeline(bins)
        assert sum(sum(piece.seconds.values()) for piece in slices) == pytest.approx(book.ledger().wall_seconds)
        assert all(min(piece.seconds.values()) >= 0 and piece.ended > piece.began for piece in slices)
        sums = {bucket: sum(piece.seconds.get(bucket, 0.0) for piece in slices) for bucket in BUCKETS}
        assert sums == pytest.approx(book.ledger().seconds, abs=1e-4)


@given(st.lists(calm), st.lists(calm), st.booleans(), st.booleans())
def test_lost_is_exactly_the_time_after_the_checkpoint_resumed_from(
    before: list[tuple[str, object]], after: list[tuple[str, object]], accounts: bool, tells: bool
) -> None:
    once = [act for act in (*before, ("save", 1.0), *after) if act[0] not in ("kill", "stop")]
    run = record([*once, ("update", UPDATE), ("account", tells)], accounts=accounts)
    step = max(run.saved)
    _, kept = run.saved[step]
    run.start(step=step)
    expected = run.walls[0] - kept
    assert ledger_of(run).seconds["lost"] == pytest.approx(expected, rel=1e-6, abs=1e-3)


def test_seconds_are_by_bucket_with_the_wait_split_by_work_of_the_feed() -> None:
    run = trained(100)
    run.evaluate(2.0)
    run.end()
    ledger = ledger_of(run)
    assert ledger.seconds["input_decode"] == pytest.approx(100 * 0.03 * 5 / 6)
    assert ledger.seconds["input_storage"] == pytest.approx(100 * 0.03 / 6)
    assert ledger.seconds["evaluation"] == pytest.approx(2.0)
    assert ledger.seconds["checkpoint"] == pytest.approx(0.1)
    assert ledger.seconds["backward"] == pytest.approx(100 * 0.04)
    assert ledger.seconds["warmup"] == pytest.approx(0.0)  # its first updates took as long as all others
    assert (ledger.steps, ledger.images) == (100, 1000)


def test_only_the_excess_of_the_first_updates_is_warm_up() -> None:
    run = Recorder()
    run.start()
    run.update(**UPDATE | {"forward": 5.0})
    ledger = ledger_of(trained(99, run=run))
    assert ledger.seconds["warmup"] == pytest.approx(5.0 - 0.02)
    assert ledger.seconds["forward"] == pytest.approx(100 * 0.02, rel=1e-3)


@pytest.mark.parametrize("workers", [1, 2, 8])
@pytest.mark.parametrize("later", [0, 1, 2, 10])
def test_the_steady_rate_is_images_over_the_seconds_of_their_updates_however_short_the_run(
    workers: int, later: int
) -> None:
    run = Recorder(workers=workers)
    run.start()
    run.update(**UPDATE | {"forward": 5.0})
    run.update(**UPDATE | {"forward": 3.0})
    for _ in range(later):
        run.update(**UPDATE)
    run.account()
    ledger = ledger_of(run)
    images = ledger.images if later else 0  # where nothing tells a usual update, the first two are all warm-up
    steady = sum(ledger.seconds[bucket] for bucket in STEADY)
    assert ledger.steady_images_per_second * steady == pytest.approx(images)
    assert ledger.steady_images_per_second == pytest.approx(workers * BATCH / sum(UPDATE.values()) if later else 0.0)


def test_the_wait_is_nothings_where_the_feeds_threads_were_mostly_blocked() -> None:
    run = Recorder()
    run.start()
    for _ in range(10):
        run.update(input=0.5, forward=0.1)
        run.feed(decode=0.1, blocked=0.9)
        run.account()
    assert ledger_of(run).seconds["input_other"] == pytest.approx(5.0)


def test_a_killed_attempt_is_made_up_from_its_steps_after_the_last_account() -> None:
    run = trained(103)  # accounted for 100
    run.idle(0.7)
    run.evaluate(3.0)
    ledger = ledger_of(run)
    assert ledger.wall_seconds == pytest.approx(run.wall)
    assert ledger.seconds["evaluation"] == pytest.approx(3.0)
    assert ledger.seconds["backward"] == pytest.approx(103 * 0.04, rel=0.01)
    assert ledger.seconds["other"] == pytest.approx(0.7)
    assert (ledger.steps, ledger.images) == (103, 1030)


def test_a_log_that_accounts_for_nothing_tells_waits_evaluations_and_checkpoints() -> None:
    run = Recorder(accounts=False)
    run.start(startup=0.0)
    run.evaluate(1.0)  # was due when the attempt began
    trained(100, run=run)
    run.idle(0.5)
    run.save(0.25)
    ledger = ledger_of(run)
    assert ledger.wall_seconds == pytest.approx(run.wall)
    assert {name: round(value, 6) for name, value in ledger.seconds.items() if value > 1e-9} == {
        "input_storage": 0.5,
        "input_decode": 2.5,
        "update": 9.0,
        "evaluation": 1.0,
        "checkpoint": 0.25,
        "other": 0.5,
    }


def test_the_end_of_an_old_log_tells_how_long_its_start_took() -> None:
    run = Recorder(accounts=False)
    run.start(startup=2.0)
    trained(10, run=run)
    run.end()
    ledger = ledger_of(run)
    assert ledger.seconds["startup"] == pytest.approx(2.0)
    assert ledger.wall_seconds == pytest.approx(run.wall)


@pytest.mark.parametrize("jump", [-3600.0, 3600.0])
def test_a_clock_that_was_set_moves_nothing_between_two_accounts(jump: float) -> None:
    run = trained(50)
    run.save(0.5)
    run.jump = jump
    trained(50, run=run)
    ledger = ledger_of(run)
    assert ledger.wall_seconds == pytest.approx(run.wall)
    assert ledger.seconds["other"] == pytest.approx(0.0)


def test_an_attempt_that_saved_nothing_is_lost_with_its_start() -> None:
    run = trained(20)
    first = run.wall
    run.start(away=60.0)
    trained(20, run=run)
    ledger = ledger_of(run)
    assert ledger.seconds["lost"] == pytest.approx(first)
    assert ledger.seconds["startup"] == pytest.approx(2.0)
    assert ledger.away_seconds == pytest.approx(60.0)
    assert ledger.steps == 20


def test_an_attempt_that_was_stopped_after_saving_has_lost_nothing() -> None:
    run = trained(20)
    run.end()
    run.idle(0.5)
    run.start(away=5.0)
    run.end()  # stopped again before its first update
    run.start(away=5.0)
    ledger = ledger_of(trained(20, run=run))
    assert ledger.seconds["lost"] == pytest.approx(run.walls[1])
    assert ledger.seconds["startup"] == pytest.approx(4.0)


def test_each_interruption_tells_what_it_cost_and_the_rest_is_goodput() -> None:
    run = trained(20)
    run.save(1.0)
    kept = run.wall
    trained(10, run=run)
    killed = run.wall
    run.start(away=60.0)
    trained(20, run=run)
    run.end()
    run.start(away=5.0)
    trained(30, run=run)
    history = RunHistory(RECIPE)
    for event in run.events:
        history.take(event)
    first, second = history.interruptions()
    assert (first.attempt, first.how, first.step) == (1, "killed", 30)
    assert (first.again_seconds, first.away_seconds) == pytest.approx((killed - kept, 60.0))
    assert (second.how, second.again_seconds) == ("interrupted", 0.0)
    assert second.away_seconds == pytest.approx(5.0)
    assert min(first.start_seconds, second.start_seconds) == pytest.approx(2.0)
    ledger, lost = history.ledger(), first.seconds + second.seconds
    assert goodput(history.interruptions(), ledger) == pytest.approx(1 - lost / (ledger.wall_seconds + 65.0))
    assert goodput((), ledger) == 1.0


def test_two_attempts_in_vain_are_both_lost() -> None:
    run = trained(20)
    run.save(1.0)
    kept = run.wall
    trained(10, run=run)
    first = run.wall
    run.start()
    trained(3, run=run)
    run.start()
    ledger = ledger_of(trained(30, run=run))
    assert ledger.seconds["lost"] == pytest.approx(first - kept + run.walls[1])
    assert ledger.steps == 50


def test_a_checkpoint_whose_word_was_torn_off_is_found_by_its_step() -> None:
    run = trained(20)
    run.start(step=15)
    assert ledger_of(run).seconds["lost"] == pytest.approx(5 * sum(UPDATE.values()))


def test_fixed_cost_of_a_step_is_host_time() -> None:
    book = absorbed(trained(100).events)
    measured = StepMeasured(
        attempt=1, time=0.0, step=3, batch_size=BATCH, other_batch_size=2, passes={"full": 0.03}, fixed_seconds=0.015
    )
    book.take(measured)
    seconds = book.ledger().seconds
    assert seconds["host"] == pytest.approx(100 * 0.01 + 100 * 0.03)
    assert seconds["forward"] == pytest.approx(100 * 0.02 / 2)
    assert seconds["backward"] == pytest.approx(100 * 0.04 / 2)


def test_late_measurement_is_known_and_adds_no_seconds() -> None:
    run = trained(100)
    book = absorbed(run.events)
    before, later = book.ledger(), run.time + 1e6
    ceilings = Ceilings(
        time=later,
        step=100,
        feed_images_per_second=5.0,
        compute_images_per_second=3.0,
        both_images_per_second=2.0,
        seconds=1.0,
    )
    book.take(ceilings)
    assert book.ledger() == before
    assert book.newest(Ceilings) == ceilings


def test_each_rank_has_a_ledger_of_its_own() -> None:
    first, other = trained(20), Recorder(rank=1)
    other.start()
    for _ in range(20):
        other.update(forward=0.1, communication=0.1)
    other.account()
    book = absorbed([*first.events, *other.events])
    assert book.ledger() == ledger_of(first)
    assert book.evidence().ranks[1].by_bucket["communication"] > 0.3
    assert set(book.evidence().ranks) == {0, 1}


def test_an_attempt_that_failed_before_it_started_changes_nothing_but_the_end() -> None:
    run = trained(20)
    book = absorbed(run.events)
    before = book.ledger()
    book.take(Failed(attempt=2, time=run.time + 500, error="DataError", message="gone"))
    assert book.ledger() == before
    assert isinstance(book.ended, Failed)


def test_before_anything_happened_the_ledger_is_empty() -> None:
    ledger = RunHistory(RECIPE).ledger()
    assert ledger.wall_seconds == 0
    assert ledger.images_per_second == ledger.steady_images_per_second == ledger.share("other") == 0


def test_buckets_of_a_later_version_are_other() -> None:
    run = trained(10)
    values = {"startup": 2.0, "dreaming": 3.0, "forward": 1.0, "input": -5.0}
    run.events.append(Accounted(step=10, images=100, wall_seconds=8.0, seconds=values, attempt=1, time=run.time))
    ledger = ledger_of(run)
    assert ledger.wall_seconds == pytest.approx(8.0)
    assert ledger.seconds["other"] == pytest.approx(3.0 + 2.0)


def test_timeline_shows_lost_work_and_its_time() -> None:
    run = trained(20)
    run.save(1.0)
    trained(10, run=run)
    run.start(away=60.0)
    slices = absorbed(trained(20, run=run).events).timeline()
    lost = [piece for piece in slices if "lost" in piece.seconds]
    assert [piece.attempt for piece in lost] == [1]
    assert lost[0].ended - lost[0].began == pytest.approx(10 * sum(UPDATE.values()))
    assert next(piece for piece in slices if piece.attempt == 2).began - lost[0].ended == pytest.approx(60.0)


def test_the_position_goes_on_where_the_attempt_began() -> None:
    run = trained(NUM_TRAIN // BATCH)
    run.save(0.1)
    run.start()
    book = absorbed(trained(5, run=run).events)
    assert book.position == NUM_TRAIN + 50
    assert isinstance(book.started, Started)
    assert book.started.step == NUM_TRAIN // BATCH


def written(folder: Path, events: Iterable[Event], rank: int = 0) -> Run:
    """A run's folder with these events, as an event log has them."""
    run = Run.create(folder, RECIPE)
    text = "".join(json.dumps(event.to_dict(), separators=(",", ":")) + "\n" for event in events)
    (folder / (f"events-{rank}.jsonl" if rank else "events.jsonl")).write_text(text)
    return run


def eventful(*, accounts: bool = True) -> Recorder:
    """Two attempts, the first of them killed in the middle of its account."""
    run = Recorder(accounts=accounts)
    for _ in range(2):
        run.start(startup=1.0)
        for index in range(45):
            run.update(input=0.03, forward=0.02, backward=0.05)
            run.feed(decode=0.05)
            if index % 10 == 9:
                run.account()
            if index == 30:
                run.evaluate(0.4)
                run.save(0.2)
    return run


def test_torn_line_is_skipped_and_the_rest_is_read(tmp_path: Path) -> None:
    run = written(tmp_path / "run", eventful().events)
    whole = ledger(run)
    with (run.directory / "events.jsonl").open("a") as file:
        file.write('{"v":1,"kind":"Accounted","time":1')
    assert ledger(run) == whole
    assert read_history(run).ledger().wall_seconds == pytest.approx(whole.wall_seconds)


def test_a_line_that_is_no_json_is_passed_over(tmp_path: Path) -> None:
    run = written(tmp_path / "run", eventful().events)
    path = run.directory / "events.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:20], "@@@\n", "[1,2]\n", *lines[20:]]))
    assert from_json("@@@") is None
    assert ledger(run).wall_seconds > 0


def test_all_ranks_are_read_and_the_ledger_is_of_rank_0(tmp_path: Path) -> None:
    run = written(tmp_path / "run", eventful().events)
    other = Recorder(rank=1)
    other.start()
    other.update(communication=5.0)
    other.account()
    written(tmp_path / "run", other.events, rank=1)
    facts = read_history(run).evidence()
    assert set(facts.ranks) == {0, 1}
    assert facts.ranks[1].by_bucket["communication"] == pytest.approx(5 / 7)
    assert facts.ledger.seconds == pytest.approx(ledger(run).seconds)


def test_a_run_in_which_nothing_was_started_has_no_ledger(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", RECIPE)
    for ask in (ledger, read_history):
        with pytest.raises(RunError, match="has no events yet"):
            ask(run)


def test_the_ledger_is_public(tmp_path: Path) -> None:
    run = written(tmp_path / "run", eventful().events)
    assert steadytrain.ledger(run) == ledger(run)


def new(folder: Path) -> Run:
    return Run.create(folder / "run", recipe())


def test_figures_of_steps_that_a_restart_repeats_are_those_of_the_newest_attempt(tmp_path: Path) -> None:
    run, clock = new(tmp_path), Clock()
    write(run, [started(), *map(step, range(1, 41)), logged(20, loss=2.0), logged(40, loss=9.0)], clock)
    write(run, [started(30), *map(step, range(31, 61)), logged(40, loss=1.5), logged(60, loss=1.0)], clock)
    history = read_history(run)
    assert [(line.step, line.loss) for line in history.logged] == [(20, 2.0), (40, 1.5), (60, 1.0)]
    assert history.repeated_steps == 10
    assert history.step == 60


def test_an_evaluation_of_lost_weights_does_not_count(tmp_path: Path) -> None:
    run, clock = new(tmp_path), Clock()
    write(run, [started(), *map(step, range(1, 41)), evaluated(40, 0.99)], clock)
    write(run, [started(30), *map(step, range(31, 41)), evaluated(40, 0.6)], clock)
    assert [score.top1 for score in read_history(run).evaluated] == [0.6]


def test_time_and_images_of_lost_steps_count_and_pauses_do_not(tmp_path: Path) -> None:
    run, clock = new(tmp_path), Clock()
    write(run, [started(), *(step(i, seconds=1.0) for i in range(1, 41))], clock)
    clock.now += 86_400
    write(run, [started(30), *(step(i, seconds=1.0) for i in range(31, 61)), logged(60)], clock)
    history = read_history(run)
    assert history.ledger().wall_seconds == pytest.approx(40 + 30)
    assert history.images == (40 + 30) * runs.BATCH
    assert history.elapsed(history.logged[-1].time) == history.elapsed() == pytest.approx(70)


def test_a_torn_line_and_unknown_kinds_are_passed_over(tmp_path: Path) -> None:
    run, clock = new(tmp_path), Clock()
    write(run, [started(), step(1), logged(1)], clock)
    with (run.directory / "events.jsonl").open("a") as file:
        file.write('{"v":9,"kind":"Weather","time":1,"attempt":1,"rank":0,"sun":true}\n')
        file.write('{"v":1,"kind":"Logged","time":1,"attempt":1,"rank":0,"step":2,"epoch":null,"loss":null,"top1":0,')
        file.write('"lr":0.1,"images_per_second":1,"wait_share":0}\nnonsense\n{"v":1,"kind":"Step","st')
    assert [line.step for line in read_history(run).logged] == [1]


def test_a_run_without_events_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="has no events yet"):
        read_history(new(tmp_path))


def test_a_run_that_failed_before_it_started_says_why(tmp_path: Path) -> None:
    run = new(tmp_path)
    write(run, [Failed(error="ModelError", message="no model resnet2O")], Clock())
    with pytest.raises(RunError, match="never started: ModelError: no model resnet2O"):
        read_history(run)


def test_checkpoints_of_every_attempt_are_counted(tmp_path: Path) -> None:
    run, clock = new(tmp_path), Clock()
    for first in (0, 10):
        saved = Saved(step=first + 10, path="checkpoints/x", bytes=1, seconds=0.1)
        write(run, [started(first), *map(step, range(first + 1, first + 11)), saved], clock)
    assert [event.step for event in read_history(run).saved] == [10, 20]
