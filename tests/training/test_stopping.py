"""A run that is to stop saves first: because a notice came, on any rank, also while it evaluates."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch.distributed as dist
from tests.machine.clouds import Clouds, fake_clouds

from steadytrain.config import Recipe
from steadytrain.distributed import heartbeat
from steadytrain.distributed.heartbeat import Heartbeat
from steadytrain.distributed.process_group import Group
from steadytrain.distributed.world import World
from steadytrain.events import Ended, Evaluated, Event, Noticed, Saved, Step
from steadytrain.machine import notices
from steadytrain.machine.notices import MachineNotice, NoticeWatch
from steadytrain.run import Run
from steadytrain.training import steps
from steadytrain.training.loop.stopping import Stopping
from steadytrain.training.session.saver import Saver


@pytest.fixture(autouse=True)
def _asks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "POLL_SECONDS", 0.01)


def _asking() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "steady-notices"]


def _until(holds: Callable[[], object]) -> None:
    until = time.monotonic() + 60
    while not holds() and time.monotonic() < until:
        time.sleep(0.005)
    assert holds()


def _were_asked(clouds: Clouds, often: int) -> bool:
    return len(clouds.asked) > often


def _heard(events: Iterator[Event], at: int, announce: Callable[[], object]) -> list[Event]:
    """Take all events; after an update, a notice comes and is heard before the next."""
    taken = []
    for event in events:
        taken.append(event)
        if isinstance(event, Step) and event.step == at:
            announce()
            _until(lambda: not _asking())  # it has nothing more to ask then
    return taken


def _words(events: list[Event]) -> list[str]:
    return [
        event.message for event in events if isinstance(event, Noticed) and "no validation data" not in event.message
    ]


def test_after_a_notice_the_run_saves_and_the_same_command_ends_it_with_the_same_bits(
    recipe: Recipe, tmp_path: Path, weights: Callable[[Path], bytes]
) -> None:
    list(steps(Run.create(tmp_path / "whole", recipe)))
    file = tmp_path / "notice"
    run = Run.create(tmp_path / "a", recipe.with_({"every.notices": f"file:{file}"}))
    events = _heard(steps(run), 4, lambda: file.write_text("60"))
    (ended,) = [event for event in events if isinstance(event, Ended)]
    assert (ended.status, ended.step) == ("preempted", 4)
    assert [event.step for event in events if isinstance(event, Saved)] == [4]
    words = _words(events)
    assert words[0] == f"notices: the file {file} is asked every 0 s whether this machine is taken away"
    assert words[1].startswith(f"{file}: this machine is to be given up in ")
    assert words[1].endswith("saving and stopping (how long a checkpoint takes is not known yet)")
    assert run.progress().ended is not None and not _asking()
    list(steps(run))  # the file is still there, and older than this attempt
    assert weights(run.directory) == weights(tmp_path / "whole")


def test_a_cloud_that_may_take_the_machine_costs_a_checkpoint_and_no_stop(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_clouds() as clouds:
        monkeypatch.setenv(notices.METADATA, clouds.address)
        run = Run.create(tmp_path / "a", recipe.with_({"every.notices": "aws", "every.evaluate_epochs": 9}))
        saved: list[int] = []
        for event in steps(run):
            if isinstance(event, Step) and event.step == 3:
                clouds.rebalance = {"noticeTime": "2026-11-26T12:00:00Z"}
                enough = len(clouds.asked) + 6
                _until(partial(_were_asked, clouds, enough))  # what was answered is taken in
            if isinstance(event, Saved):
                saved.append(event.step)
        assert saved[0] == 3 and saved[-1] == 20


def test_a_file_does_not_make_a_run_ask(recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Run.create(tmp_path / "a", recipe.with_({"every.notices": "aws"}))
    with fake_clouds() as clouds:
        monkeypatch.setenv(notices.METADATA, clouds.address)
        words = _words(list(steps(Run.open(tmp_path / "a"))))
        assert clouds.asked == []
    assert words[0] == (
        "not asked for notices: a file asks for it (every.notices=aws), and this command does not; to ask, add"
        " --notices aws"
    )


def test_an_evaluation_ends_at_a_notice_and_is_made_after_it(recipe: Recipe, tmp_path: Path) -> None:
    file = tmp_path / "notice"
    run = Run.create(tmp_path / "a", recipe.with_({"every.notices": f"file:{file}", "data.holdout": 0.5}))
    # 200 images, 7 updates an epoch: the evaluation comes after the seventh.
    events = _heard(steps(run), 7, lambda: file.write_text(""))
    assert not [event for event in events if isinstance(event, Evaluated)]
    assert isinstance(events[-1], Ended) and (events[-1].status, events[-1].step) == ("preempted", 7)
    file.unlink()
    assert next(event for event in steps(run) if isinstance(event, Evaluated)).step == 7


def test_a_notice_on_one_rank_ends_what_the_others_do_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others may be in an evaluation, where no collective tells them: heartbeats do."""
    monkeypatch.setattr(heartbeat, "BEAT", 0.02)
    store = dist.HashStore()  # type: ignore[attr-defined]
    ranks = [Heartbeat(store, World(rank=rank, size=2), ("one", "two")) for rank in range(2)]
    try:
        first, second = (_stopping(rank, notice) for rank, notice in zip(ranks, (None, GOES), strict=True))
        assert first() is None
        assert second() == "NOTICE"
        _until(first)
        assert first() == "NOTICE" and second.words() == ""
        assert first.words() == (
            "rank 1 on two was asked to stop by NOTICE: aws: this machine is terminated now: saving and stopping (a"
            " checkpoint takes 1.00 s: it may not be whole in time, and the newest whole one counts)"
        )
    finally:
        for beating in ranks:
            beating.close()


GOES = MachineNotice(id="a", what="aws: this machine is terminated", deadline=0.0)


def _stopping(beating: Heartbeat, notice: MachineNotice | None) -> Stopping:
    saver = cast("Saver", SimpleNamespace(seconds=1.0))
    watch = NoticeWatch(lambda text: None, lambda: 1.0)
    watch.notice = notice
    return Stopping(saver, lambda: None, cast("Group", SimpleNamespace(heartbeat=beating)), watch)
