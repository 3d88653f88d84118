"""Each second of an attempt is in one bucket, and the waits are sorted by what made them."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path

import pytest
from tests.training.test_device_clock import Time

from steadytrain.config import Recipe
from steadytrain.errors import DivergedError
from steadytrain.events import BUCKETS, Accounted, Ended, Failed, FeedStats, Step
from steadytrain.run import Run
from steadytrain.training import clock as clocks
from steadytrain.training import steps
from steadytrain.training.clock import Clock, Waits


def test_seconds_go_to_the_bucket_that_is_open() -> None:
    clock = Clock(time.perf_counter() - 5)
    clock.to("input")
    time.sleep(0.02)
    with clock.within("logging"):
        time.sleep(0.01)
    clock.to("forward")
    seconds = clock.seconds()
    assert seconds["startup"] >= 5 and seconds["input"] >= 0.02 and seconds["logging"] >= 0.01
    assert sum(seconds.values()) == pytest.approx(clock.accounted_seconds(), abs=1e-9)


def test_processor_time_counts_of_updates_and_of_all_threads_alone() -> None:
    def burn(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    clock = Clock(time.perf_counter())
    burn(0.2)
    before = time.process_time()
    clock.to("input")
    time.sleep(0.05)
    clock.to("forward")
    thread = threading.Thread(target=burn, args=(0.1,))
    thread.start()
    burn(0.1)
    thread.join()
    clock.to("evaluation")
    spent = time.process_time() - before
    burn(0.2)
    first = clock.account().update_cpu_seconds
    assert first is not None and 0.2 <= first <= spent
    clock.to("backward")
    burn(0.1)
    then = clock.account().update_cpu_seconds
    burn(0.1)
    last = clock.account().update_cpu_seconds
    assert then is not None and last is not None and first + 0.1 <= then and then + 0.1 <= last


def test_what_ranks_wait_for_a_late_one_now_and_then_is_not_the_exchange(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "time", time := Time())
    clock = Clock(time.perf_counter())
    for update, wait in enumerate([0.2, 0.01, 0.05, 0.01, 0.04, 0.01, 0.06], 1):
        clock.to("communication")
        time.sleep(wait)
        clock.to("host")
        clock.updated(update, 32)
    event = clock.account()
    assert (event.step, event.images) == (7, 224)
    # The first one is warm-up; of the others, all would take as long as the quick ones.
    assert event.exchange_seconds is not None and 6 * 0.0099 <= event.exchange_seconds < 6 * 0.03
    assert event.seconds["communication"] == pytest.approx(0.38)
    assert clock.account().exchange_seconds == event.exchange_seconds
    assert Clock(time.perf_counter()).account().exchange_seconds is None


def test_a_clock_is_put_back_also_where_something_fails() -> None:
    clock = Clock(time.perf_counter())
    with pytest.raises(KeyError), clock.within("evaluation"):
        raise KeyError
    assert clock.bucket == "startup" and "evaluation" in clock.seconds()


def test_what_an_epochs_first_batch_takes_beyond_the_others_is_its_gap() -> None:
    clock = Clock(time.perf_counter())
    waits = Waits(clock, num_train=100)
    spent = {"input": 0.0}

    def wait(seconds: float, position: int) -> None:
        clock.to("input")
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass
        clock.to("host")
        waits.sort(seconds, position, 20)
        spent["input"] += seconds

    wait(0.03, 0)
    for position in (20, 40, 60, 80):
        wait(0.005, position)
    wait(0.045, 100)
    seconds = clock.seconds()
    assert seconds["epoch_gap"] == pytest.approx(0.04, abs=1e-6)
    assert seconds["input"] >= 0.055


def test_accounts_come_less_and_less_often() -> None:
    now = time.perf_counter()
    young, old = Clock(now - 1.1), Clock(now - 5000)
    young.to("host")
    old.to("host")
    assert young.is_due() and old.is_due()
    old.account()
    old.to("host")
    assert not old.is_due()
    old._accounted -= 10
    assert not old.is_due()  # thirty seconds apart by now
    old._accounted -= 25
    assert old.is_due()


def test_a_runs_seconds_add_up_to_its_wall_time(recipe: Recipe, tmp_path: Path) -> None:
    events = list(steps(Run.create(tmp_path / "run", recipe), began=time.perf_counter() - 3))
    last = [event for event in events if isinstance(event, Accounted)][-1]
    [ended] = [event for event in events if isinstance(event, Ended)]
    assert set(last.seconds) <= set(BUCKETS) and last.seconds["startup"] >= 3
    assert sum(last.seconds.values()) == pytest.approx(last.wall_seconds)
    assert ended.seconds - (ended.time - last.time) - 0.1 < last.wall_seconds <= ended.seconds
    assert last.images == ended.images and last.step == ended.step
    assert last.warmup_images == 2 * recipe.batch_size
    assert {"startup", "warmup", "forward", "backward", "optimizer", "evaluation", "checkpoint"} <= set(last.seconds)
    assert isinstance(events[events.index(last) + 1], FeedStats)


def test_a_run_that_fails_tells_where_its_seconds_went(recipe: Recipe, tmp_path: Path) -> None:
    diverging = dataclasses.replace(recipe, optim=dataclasses.replace(recipe.optim, lr=1e30))
    run = Run.create(tmp_path / "diverging", diverging)
    with pytest.raises(DivergedError):
        list(steps(run))
    account, failed = [event for event in run.events() if isinstance(event, (Accounted, Failed))][-2:]
    assert isinstance(account, Accounted) and isinstance(failed, Failed)
    assert sum(account.seconds.values()) == pytest.approx(account.wall_seconds)


def test_whoever_looks_at_the_events_pays_for_it(recipe: Recipe, tmp_path: Path) -> None:
    for event in steps(Run.create(tmp_path / "run", recipe)):
        if isinstance(event, Step):
            time.sleep(0.01)
        if isinstance(event, Accounted):
            last = event
    assert last.seconds["logging"] >= 0.2
