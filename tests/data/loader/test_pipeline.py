"""Threads and their queue: in order, bounded, and gone when nobody wants their work."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from steadytrain.data.loader.pipeline import BatchJob, BatchStream, RequestCounts, StageTimes
from steadytrain.errors import FeedError


@dataclass
class Bench:
    """A thread's workspace."""

    times: StageTimes = field(default_factory=StageTimes)
    closed: threading.Event = field(default_factory=threading.Event)


def several(number: int, count: int, work: Callable[[int], None] = lambda number: None) -> BatchJob[Bench, int]:
    return BatchJob([lambda bench: work(number)] * 3, lambda: list(range(number, number + count)), count=count)


def job(number: int, room: int, work: Callable[[int], None] = lambda number: None) -> BatchJob[Bench, int]:
    return several(number, 1, work)


def napping(number: int, room: int) -> BatchJob[Bench, None]:
    return BatchJob([lambda bench: time.sleep(0.05)], lambda: [None])


def stream(
    begin: Callable[[int, int], BatchJob[Bench, int]], *, total: int | None = None, threads: int = 3, depth: int = 4
) -> BatchStream[Bench, int]:
    return BatchStream(begin, Bench, total=total, threads=threads, depth=depth, times=StageTimes())


def feed_threads() -> int:
    return sum(thread.name.startswith("feed-") for thread in threading.enumerate())


def eventually(fact: Callable[[], bool]) -> bool:
    end = time.monotonic() + 60
    while not fact() and time.monotonic() < end:
        time.sleep(0.005)
    return fact()


def test_results_come_in_order_whoever_is_faster() -> None:
    slow_first = partial(job, work=lambda number: time.sleep(0.01 * (3 - number % 4)))
    assert list(stream(slow_first, total=20)) == list(range(20))


def test_no_job_has_no_result_and_one_thread_is_enough() -> None:
    assert list(stream(job, total=0)) == []
    assert list(stream(job, total=50, threads=1, depth=1)) == list(range(50))


def test_no_more_than_depth_jobs_are_begun_ahead() -> None:
    begun: list[int] = []

    def begin(number: int, room: int) -> BatchJob[Bench, int]:
        begun.append(number)
        return job(number, room)

    ahead = stream(begin, depth=3)
    assert eventually(lambda: len(begun) == 3)
    for taken in range(1, 30):
        next(ahead)
        assert len(begun) <= taken + 3
    time.sleep(0.05)
    assert len(begun) <= 29 + 3
    ahead.close()


def test_thread_that_cannot_start_is_an_error_and_not_awaited() -> None:
    def no_room() -> Bench:
        raise MemoryError("no room to work in")

    failing = BatchStream(job, no_room, total=None, threads=2, depth=4, times=StageTimes())
    with pytest.raises(MemoryError, match="no room to work in"):
        next(failing)


def test_a_failure_comes_in_its_turn_after_all_before_it() -> None:
    def work(number: int) -> None:
        if number == 3:
            raise FeedError("the fourth fails")

    failing = stream(partial(job, work=work))
    assert [next(failing) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(FeedError, match="the fourth fails"):
        next(failing)
    assert feed_threads() == 0


def test_a_stream_that_failed_is_freed_at_once() -> None:
    """Without the garbage collector: the error's traceback must not keep it, and what its caller has."""

    def fail(number: int) -> None:
        raise ValueError("no")

    failing = stream(partial(job, work=fail))
    alive = weakref.ref(failing)
    gc.disable()
    try:
        with pytest.raises(ValueError, match="no"):
            next(failing)
        del failing
        assert eventually(lambda: alive() is None)
    finally:
        gc.enable()


def test_a_job_that_cannot_begin_or_finish_fails_as_well() -> None:
    def begin(number: int, room: int) -> BatchJob[Bench, int]:
        raise MemoryError("no room")

    with pytest.raises(MemoryError):
        next(stream(begin))

    def finish() -> list[int]:
        raise ValueError("no end")

    with pytest.raises(ValueError, match="no end"):
        next(stream(lambda number, room: BatchJob([lambda bench: None], finish)))


def test_close_ends_the_threads_and_tells_a_reader() -> None:
    endless = stream(job)
    next(endless)
    endless.close()
    endless.close()
    assert feed_threads() == 0
    with pytest.raises(FeedError, match="closed"):
        for _ in range(10):
            next(endless)


def test_dropping_the_owner_ends_the_threads() -> None:
    class Owner:
        pass

    endless, owner = stream(job), Owner()
    endless.end_with(owner)
    next(endless)
    assert feed_threads() == 3
    del owner, endless
    gc.collect()
    assert eventually(lambda: feed_threads() == 0)


def test_ctrl_c_while_the_threads_are_started_leaves_none_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    start = threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        start(thread)
        if feed_threads() == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(threading.Thread, "start", interrupted_start)
    with pytest.raises(KeyboardInterrupt):
        stream(job)
    assert not feed_threads()


def test_unclosed_stream_does_not_keep_its_process_alive() -> None:
    """Its threads wait for room when the process exits, and somebody still has the stream."""
    code = (
        "from tests.data.loader.test_pipeline import *\n"
        "kept = stream(job)\n"
        "assert eventually(lambda: len(kept._done) == 4)\n"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=60, check=False)
    assert done.returncode == 0


def test_threads_end_with_the_stream() -> None:
    assert list(stream(job, total=5)) == [0, 1, 2, 3, 4]
    assert feed_threads() == 0


def test_results_left_in_the_queue_are_freed() -> None:
    class Thing:
        alive = 0

        def __init__(self) -> None:
            Thing.alive += 1

        def __del__(self) -> None:
            Thing.alive -= 1

    def begin(number: int, room: int) -> BatchJob[Bench, Thing]:
        return BatchJob([lambda bench: None], lambda: [Thing()])

    things = BatchStream(begin, Bench, total=None, threads=2, depth=4, times=StageTimes())
    next(things)
    assert eventually(lambda: Thing.alive >= 3)
    things.close()
    assert Thing.alive == 0


def test_times_of_all_threads_add_up() -> None:
    def work(bench: Bench) -> None:
        bench.times.images += 2
        bench.times.decode_seconds += 0.5

    times = StageTimes()

    def begin(number: int, room: int) -> BatchJob[Bench, None]:
        return BatchJob([work] * 3, lambda: [None])

    list(BatchStream(begin, Bench, total=10, threads=3, depth=2, times=times))
    assert (times.images, times.decode_seconds) == (60, 15.0)


def test_processor_time_is_separated_from_sleep() -> None:
    def burn(bench: Bench) -> None:
        end = time.thread_time() + 0.02
        while time.thread_time() < end:
            pass

    burning, sleeping = StageTimes(), StageTimes()
    list(
        BatchStream(
            lambda number, room: BatchJob([burn], lambda: [None]), Bench, total=3, threads=1, depth=2, times=burning
        )
    )
    list(BatchStream(napping, Bench, total=1, threads=1, depth=2, times=sleeping))
    assert burning.cpu_seconds >= 0.06 and sleeping.cpu_seconds < 0.05


def test_whoever_takes_results_is_seen_to_starve_or_to_find_them_ready() -> None:
    asked = RequestCounts()
    list(BatchStream(napping, Bench, total=1, threads=1, depth=2, times=StageTimes(), requests=asked))
    assert (asked.requests, asked.starved, asked.ready) == (1, 1, 0)
    full = BatchStream(job, Bench, total=8, threads=1, depth=4, times=StageTimes(), requests=asked)
    assert eventually(lambda: len(full._done) == 4)
    next(full)
    assert (asked.requests, asked.starved, asked.ready) == (2, 1, 4)
    full.close()


def test_what_a_thread_is_at_can_be_asked() -> None:
    may_end, at = threading.Event(), threading.Event()

    def wait(bench: Bench) -> None:
        at.set()
        may_end.wait(60)

    stream = BatchStream(
        lambda number, room: BatchJob([wait], lambda: [None]), Bench, total=None, threads=1, depth=1, times=StageTimes()
    )
    at.wait(60)
    [(name, bench, since)] = stream.doing()
    assert name == "feed-0" and isinstance(bench, Bench) and since <= time.perf_counter()
    may_end.set()
    next(stream)
    stream.close()
    assert stream.doing() == []


def test_waiting_for_room_counts_as_blocked() -> None:
    times = StageTimes()
    ahead = BatchStream(job, Bench, total=None, threads=1, depth=1, times=times)
    for _ in range(3):
        next(ahead)
        time.sleep(0.1)
    ahead.close()
    assert times.blocked_seconds > 0.03


def test_work_sees_that_its_stream_was_closed() -> None:
    def wait(bench: Bench) -> None:
        assert bench.closed.wait(60)

    stream = BatchStream(
        lambda number, room: BatchJob([wait], lambda: [None]), Bench, total=None, threads=3, depth=4, times=StageTimes()
    )
    stream.close()
    with pytest.raises(FeedError, match="closed"):
        next(stream)


def test_an_abandoned_stream_raises_and_waits_for_no_thread_that_hangs() -> None:
    may_end, error = threading.Event(), FeedError("it hangs")

    def hang(bench: Bench) -> None:
        may_end.wait(30)

    hanging = BatchStream(
        lambda number, room: BatchJob([hang], lambda: [None]), Bench, total=None, threads=2, depth=2, times=StageTimes()
    )
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("feed-")]
    threading.Timer(0.05, hanging.abandon, [error]).start()
    with pytest.raises(FeedError) as caught:
        next(hanging)
    assert caught.value is error
    hanging.close()
    assert all(thread.is_alive() for thread in threads)
    may_end.set()
    for thread in threads:
        thread.join()


def test_jobs_with_several_results_are_done_by_any_consumer() -> None:
    together, at = [1], list[tuple[int, int, str]]()

    def begin(number: int, room: int) -> BatchJob[Bench, int]:
        count = min(together[0], room, 50 - number)

        def work(number: int) -> None:
            at.append((number, count, threading.current_thread().name))

        return several(number, count, work)

    ahead = BatchStream(begin, Bench, total=50, threads=2, depth=4, times=StageTimes())
    first = [next(ahead) for _ in range(20)]
    together[0] = 8
    assert first + list(ahead) == list(range(50))
    local = threading.current_thread().name
    by_threads = {number for number, _, name in at if name != local}
    assert by_threads and by_threads.isdisjoint({number for number, _, name in at if name == local})
    begun = sorted({(number, count) for number, count, name in at if name == local})
    assert all(number + count == following for (number, count), (following, _) in pairwise(begun))
    assert {count for _, count in begun[1:-1]} <= {8} and sum(begun[-1]) == 50
    assert ahead.is_made_by_consumer and ahead.depth == 8
    assert feed_threads() == 0


def test_a_held_stream_makes_room_only_when_it_is_released() -> None:
    held = BatchStream(job, Bench, total=None, threads=2, depth=4, times=StageTimes(), holds=True)
    assert [next(held) for _ in range(4)] == [0, 1, 2, 3]
    time.sleep(0.02)
    assert held._begun == 4
    held.release(4)
    assert next(held) == 4
    held.close()


def test_a_held_stream_has_no_more_made_by_whoever_takes_than_there_is_room_for() -> None:
    rooms: list[int] = []

    def begin(number: int, room: int) -> BatchJob[Bench, int]:
        rooms.append(room)
        return several(number, min(room, 8))

    held = BatchStream(begin, Bench, total=None, threads=1, depth=4, times=StageTimes(), holds=True)
    assert [next(held) for _ in range(4)] == [0, 1, 2, 3]
    threading.Timer(0.05, held.release, [3]).start()
    assert next(held) == 4
    assert rooms == [4, 3] and held.depth == 4
    held.close()


def test_what_fails_where_results_are_made_by_whoever_takes_them_raises_there() -> None:
    def begin(number: int, room: int) -> BatchJob[Bench, int]:
        if number >= 8:
            raise FeedError("the third job fails")
        return several(number, min(room, 4))

    failing = BatchStream(begin, Bench, total=None, threads=1, depth=4, times=StageTimes())
    assert [next(failing) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(FeedError, match="the third job fails"):
        for _ in range(100):
            next(failing)
    assert feed_threads() == 0
