"""What looks at this very process see: real threads, real sleeps, real work."""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from pathlib import Path

import pytest

from steadytrain.events import EventLog, ThreadStats, read
from steadytrain.machine import platform
from steadytrain.monitor import threads
from steadytrain.monitor.threads import LoopWatch, calls_others, foreign_frame, looking

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
FUEL = bytes(1 << 22)


class Loop:
    """A loop that is where it is told to be."""

    bucket, step, since = "forward", 7, 0.0


def nap(seconds: float) -> None:
    """Code of a user's that sleeps."""
    time.sleep(seconds)


def digest(seconds: float) -> None:
    """Code of a user's that computes without Python's lock."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        hashlib.sha256(FUEL)


def spin(ended: threading.Event) -> None:
    """Code of a user's that keeps Python's lock."""
    while not ended.is_set():
        sum(range(1000))


def watched(folder: Path, *does: object) -> ThreadStats:
    """Look at this thread while it does these things, and return what was written last."""
    with EventLog(folder / "events.jsonl", attempt=1) as log:
        with looking(log, Loop()) as watch:
            watch.attach(Loop())
            for do in does:
                do()  # type: ignore[operator]
        return [event for event in read(log.path) if isinstance(event, ThreadStats)][-1]


@pytest.fixture
def many_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks as often as on an idle machine: on a busy one each costs more, and so there are fewer."""
    monkeypatch.setattr(threads, "COST", 1.0)


def seconds_of(stats: ThreadStats, what: str, place: str) -> float:
    return sum(
        float(seen["seconds"]) for seen in stats.places if seen["what"] == what and seen["place"].startswith(place)
    )


@pytest.mark.usefixtures("many_looks")
def test_sleep_and_work_are_separated_by_file_and_line(tmp_path: Path) -> None:
    stats = watched(tmp_path, lambda: nap(0.6), lambda: digest(0.4))
    (place,) = {seen["place"] for seen in stats.places if seen["what"] == "sleeps"}
    assert place.endswith(f"test_threads.py:{nap.__code__.co_firstlineno + 2})")
    assert seconds_of(stats, "sleeps", "nap (") >= 0.4
    assert seconds_of(stats, "runs", "digest (") + seconds_of(stats, "python", "digest (") >= 0.2
    assert seconds_of(stats, "sleeps", "digest") == 0
    forward = stats.loop["forward"]
    assert 0.3 <= forward["ran"] <= forward["seconds"] - 0.5, "it ran while it worked, not while it slept"
    assert stats.step == 7 and stats.looks > 10


@pytest.mark.usefixtures("many_looks")
def test_another_thread_that_runs_python_code_is_named_with_its_place(tmp_path: Path) -> None:
    ended = threading.Event()
    thread = threading.Thread(target=spin, args=(ended,), name="reporter")
    thread.start()
    try:
        stats = watched(tmp_path, lambda: nap(3.0))
    finally:
        ended.set()
        thread.join()
    (other,) = stats.others
    assert other["name"] == "reporter" and other["place"].startswith("spin (") and other["ran"] > 0.1
    assert stats.lock_seconds > 0, "each look had to wait for the lock that it keeps"


def test_nothing_is_written_before_a_loop_is_attached(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", attempt=1) as log:
        with looking(log, Loop()):
            nap(0.1)
        assert not list(read(log.path))


def test_looking_takes_less_than_a_hundredth_of_a_core(tmp_path: Path) -> None:
    stats = watched(tmp_path, lambda: nap(1.5))
    assert 0 < stats.cost_seconds < 0.01 * stats.seconds


def test_who_calls_torch_is_not_at_work_himself() -> None:
    import torch

    seen: list[str] = []

    class Inner(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frame = sys._getframe()
            assert frame.f_back is not None
            seen.extend("none" if at is None else at.f_code.co_name for at in map(foreign_frame, (frame, frame.f_back)))
            assert not calls_others(frame), "an operator between tensors names no other package"
            return x + x

    torch.nn.Sequential(Inner())(torch.ones(1))
    assert seen == ["forward", "none"], "its own frame, and torch's, which called it"


def test_a_watch_that_has_not_begun_tells_nothing() -> None:
    stats = LoopWatch(Loop()).stats()
    assert stats.seconds == 0 and not stats.places and stats.compute is None


def late_look(monkeypatch: pytest.MonkeyPatch, wakes: int) -> ThreadStats:
    """One look that comes 0.6 s late, after so many wakes of the thread that looks."""
    watch = LoopWatch(Loop())
    watch.begin()
    began, before, times = time.perf_counter(), platform.usage("THREAD", "ru_nvcsw"), watch._own_files.times()
    time.sleep(0.62)
    monkeypatch.setattr(watch._own_files, "times", lambda: times)  # not queued for a processor, busy as this one may be
    monkeypatch.setattr("steadytrain.monitor.threads.usage", lambda who, name: before + wakes)
    watch.look(0.02, began)
    watch.close()
    return watch.stats()


def test_a_pause_in_which_no_thread_woke_was_a_stop_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = late_look(monkeypatch, wakes=1)
    assert 0.5 <= stats.loop["forward"]["stopped"] <= stats.seconds
    assert stats.loop["forward"]["seconds"] == pytest.approx(stats.seconds - stats.loop["forward"]["stopped"], abs=0.01)
    assert stats.lock_seconds == 0.0 and sum(place["seconds"] for place in stats.places) < 0.3


def test_a_wait_for_pythons_lock_is_no_stop_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    stats = late_look(monkeypatch, wakes=120)  # it asks for the lock every 5 ms
    assert "stopped" not in stats.loop["forward"] and stats.lock_seconds > 0.3
