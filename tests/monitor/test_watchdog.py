"""A run that stands still is noticed, named and, where it stays so, ended: real hangs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from steadytrain.errors import StalledError
from steadytrain.events import Event, EventLog, Failed, Noticed, Stalled, read
from steadytrain.monitor.collectives import Hang, RankPosition
from steadytrain.monitor.watchdog import Watchdog

SCRIPT = Path(__file__).with_name("standstill.py")

pytestmark = pytest.mark.skipif(os.name != "posix", reason="pipes with names, and pause()")


@pytest.fixture
def start(digits: Path, tmp_path: Path) -> Callable[[str], subprocess.Popen[str]]:
    """``start("feed")``: the loop of ``standstill.py`` with that hang; its folder is ``tmp_path / "run"``."""
    (tmp_path / "digits.rec").symlink_to(digits)
    for beside in (".idx", ".json", ".card.json"):
        if digits.with_suffix(beside).exists():
            (tmp_path / f"digits{beside}").symlink_to(digits.with_suffix(beside))
    folder = tmp_path / "run"
    folder.mkdir()
    os.mkfifo(folder / "pipe")

    def begin(hang: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(SCRIPT), str(folder), hang]
        return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    return begin


def _told(folder: Path) -> list[Event]:
    log = folder / "run" / "events.jsonl"
    return list(read(log)) if log.exists() else []


def _ended(child: subprocess.Popen[str]) -> str:
    _, errors = child.communicate(timeout=60)
    return errors


@pytest.mark.slow
def test_a_feed_thread_that_hangs_is_named_and_the_run_ends_with_its_own_exit_code(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = start("feed")
    message = _ended(child)
    assert child.returncode == StalledError.exit_code == 3
    stalled, failed = _told(tmp_path)
    assert isinstance(stalled, Stalled) and stalled.what == "feed" and stalled.step == 7
    assert "the loop waits for a batch; feed-0 is in" in stalled.culprit
    assert "image (monitor/standstill.py:" in stalled.culprit
    assert stalled.seconds > 0.5
    assert isinstance(failed, Failed) and failed.error == "StalledError" and failed.step == 7
    written = (tmp_path / "run" / stalled.stacks).read_text()
    assert written.startswith("no progress for") and "feed-0: thread 0x" in written
    assert " in image" in written and "standstill.py" in written and " in updates" in written
    assert stalled.culprit in message and str(tmp_path / "run" / "stacks-1.txt") in message
    assert message.rstrip().endswith("it resumes from the last checkpoint")
    assert (tmp_path / "run" / "stacks-2.txt").exists()  # and where they were when it was ended


def test_a_standstill_that_ends_lets_the_run_finish(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = start("feed")
    while not any(isinstance(event, Stalled) for event in _told(tmp_path)) and child.poll() is None:
        time.sleep(0.01)
    assert child.poll() is None
    os.close(os.open(tmp_path / "run" / "pipe", os.O_WRONLY | os.O_NONBLOCK))
    message = _ended(child)
    assert child.returncode == 0
    stalled, noticed = _told(tmp_path)
    assert isinstance(stalled, Stalled) and isinstance(noticed, Noticed)
    assert noticed.message.startswith("training continues after") and "training continues" in message


def test_a_loop_stuck_in_native_code_is_ended_too(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = start("native")
    message = _ended(child)
    assert child.returncode == 3
    stalled = _told(tmp_path)[0]
    assert isinstance(stalled, Stalled) and stalled.what == "step"
    assert "the loop is at forward, in hang_in_forward (monitor/standstill.py:" in stalled.culprit
    assert "hang_in_forward" in message


@pytest.mark.slow
def test_a_hang_after_updates_that_all_took_less_than_a_look_is_noticed_as_soon(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = start("fast")
    _ended(child)
    assert child.returncode == 3
    stalled = _told(tmp_path)[0]
    assert isinstance(stalled, Stalled) and stalled.step == 51 and stalled.seconds < 50


def test_a_run_that_is_asked_to_stop_while_an_update_hangs_is_ended(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = start("asked")
    message = _ended(child)
    assert child.returncode == 3
    (failed,) = _told(tmp_path)
    assert isinstance(failed, Failed) and failed.message.startswith(
        "asked to stop by SIGTERM, but there was no progress"
    )
    assert failed.message in message and "hang_in_forward" in (tmp_path / "run" / "stacks-1.txt").read_text()


@pytest.mark.slow
def test_an_evaluation_that_tells_its_batches_is_watched_as_closely(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = start("evaluation")
    _ended(child)
    assert child.returncode == 3
    stalled = _told(tmp_path)[0]
    assert isinstance(stalled, Stalled) and stalled.seconds < 50
    assert "the loop is at evaluation, in hang_in_forward" in stalled.culprit


@pytest.mark.slow
def test_a_pass_that_measures_the_step_is_watched_as_closely_as_updates(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = start("measuring")
    _ended(child)
    assert child.returncode == 3
    stalled = _told(tmp_path)[0]
    assert isinstance(stalled, Stalled) and stalled.seconds < 50
    assert "the loop is at measuring, in hang_in_forward" in stalled.culprit


def test_a_loop_that_can_still_raise_does_and_no_stuck_thread_keeps_the_process(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = start("raises")
    message = _ended(child)
    assert child.returncode == 3
    assert not [event for event in _told(tmp_path) if isinstance(event, Failed)]  # that is for whoever caught it
    assert message.count("no progress for") == 2  # once as a notice, once as the error that was caught


@pytest.mark.slow
def test_slow_caller_is_reported_and_its_process_is_not_ended(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = start("caller")
    _ended(child)
    assert child.returncode == 0
    stalled = next(event for event in _told(tmp_path) if isinstance(event, Stalled))
    assert "the code that reads the run's events has not asked for the next event" in stalled.culprit
    assert "in caller (monitor/standstill.py:" in stalled.culprit


def test_native_code_that_keeps_the_lock_has_its_stacks_on_standard_error(
    start: Callable[[str], subprocess.Popen[str]],
) -> None:
    child = start("lock")
    message = _ended(child)
    assert "Timeout (" in message and " in hang_in_forward" in message


def test_a_run_that_moves_is_left_alone(start: Callable[[str], subprocess.Popen[str]], tmp_path: Path) -> None:
    child = start("none")
    assert _ended(child) == "" and child.returncode == 0
    assert _told(tmp_path) == []
    assert not list((tmp_path / "run").glob("stacks-*"))


def test_a_collective_that_all_ranks_have_begun_ends_the_run_long_before_other_stalls(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    child = start("exchange")
    message = _ended(child)  # any other stall would last 100 s
    assert child.returncode == StalledError.exit_code
    stalled = next(event for event in _told(tmp_path) if isinstance(event, Stalled))
    assert stalled.what == "rank"
    assert "nccl:all_reduce, number 7 of group 0, 9 values: rank 0, rank 1 have waited in it" in stalled.culprit
    assert "recorded" in message and "told others of a StalledError" in message
    assert "run the same command again" not in message  # another rank of the machine says so


def test_the_rank_that_the_others_wait_for_says_where_it_is(
    start: Callable[[str], subprocess.Popen[str]], tmp_path: Path
) -> None:
    message = _ended(start("late"))
    stalled = next(event for event in _told(tmp_path) if isinstance(event, Stalled))
    assert stalled.what == "step" and "the loop is at forward, in hang_in_forward (" in stalled.culprit
    assert "not begun by rank 0" in message and "run the same command again" in message


@pytest.mark.parametrize(("bucket", "is_known"), [("logging", False), ("startup", False), ("backward", True)])
def test_a_rank_that_may_be_late_makes_no_hang(tmp_path: Path, bucket: str, *, is_known: bool) -> None:
    with EventLog(tmp_path / "events.jsonl", attempt=1) as log:
        dog = Watchdog(SimpleNamespace(bucket="backward", since=0.0, step=9), log=log, folder=tmp_path)
        late, begun = (Hang(RankPosition(number=7), [0], missing, []) for missing in ([1], []))
        dog.ranks = lambda: {1: (f"{bucket} of update 10", 90.0)}
        dog.hang = lambda: late
        assert (dog._unexcused_hang() is late) == is_known
        dog.hang = lambda: begun
        assert dog._unexcused_hang() is begun
