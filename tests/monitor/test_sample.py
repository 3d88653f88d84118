"""The thread that samples the machine beside a run."""

from __future__ import annotations

import threading
from itertools import pairwise
from pathlib import Path

import pytest
from tests.monitor.test_gpu import Driver, _h100

from steadytrain.events import DeviceStats, EventLog, MachineStats, Noticed, read
from steadytrain.machine.gpu_sampler import Gpus
from steadytrain.machine.sampler import pause, sampling


def _no_gpus() -> None:
    return None


def test_a_short_run_is_sampled_once_and_the_thread_is_gone(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", attempt=3) as log, sampling(log, find_gpus=_no_gpus):
        assert "steady-sample" in {thread.name for thread in threading.enumerate()}
    assert "steady-sample" not in {thread.name for thread in threading.enumerate()}
    (told,) = read(tmp_path / "events.jsonl")
    assert isinstance(told, MachineStats)
    assert told.attempt == 3 and told.time > 0 and told.seconds > 0


def test_the_samples_cover_the_whole_time(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", attempt=1) as log, sampling(log, find_gpus=_no_gpus):
        threading.Event().wait(2.2)
    told = [event for event in read(tmp_path / "events.jsonl") if isinstance(event, MachineStats)]
    assert len(told) >= 2
    assert sum(event.seconds for event in told) > 2.0
    assert all(later.time - event.time == pytest.approx(later.seconds, abs=0.5) for event, later in pairwise(told))


def test_each_gpu_has_its_own_event(tmp_path: Path) -> None:
    driver = Driver(_h100(), _h100(UUID="GPU-bb"))
    log_path = tmp_path / "events.jsonl"
    with EventLog(log_path, attempt=1) as log, sampling(log, find_gpus=lambda: Gpus(driver, None)):
        pass
    assert [event.index for event in read(log_path) if isinstance(event, DeviceStats)] == [0, 1]
    assert driver.open == 0


def test_what_fails_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    def broken() -> None:
        raise RuntimeError("the driver is another one")

    done = False
    with EventLog(tmp_path / "events.jsonl", attempt=1) as log, sampling(log, find_gpus=broken):
        done = True
    (told,) = read(tmp_path / "events.jsonl")
    assert done and isinstance(told, Noticed) and "the driver is another one" in told.message


def test_a_body_that_raises_ends_the_thread_too(tmp_path: Path) -> None:
    with pytest.raises(KeyError), EventLog(tmp_path / "e.jsonl", 1) as log, sampling(log, find_gpus=_no_gpus):
        raise KeyError
    assert "steady-sample" not in {thread.name for thread in threading.enumerate()}


def test_a_long_run_is_sampled_less_often() -> None:
    assert (pause(0.0), pause(500.0), pause(1e6)) == (1.0, 5.0, 30.0)
