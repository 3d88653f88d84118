"""A training run whose data do not come: noticed, named, ended with its own exit code, and taken up again."""

from __future__ import annotations

import os
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
from tests.forked import start

from steadytrain.cli import main
from steadytrain.config import Recipe
from steadytrain.data.recordio.reader import Records
from steadytrain.errors import StalledError
from steadytrain.events import Ended, Failed, Noticed, Stalled, Step
from steadytrain.monitor.watchdog import StallLimits, Watchdog
from steadytrain.run import Run
from steadytrain.training import train
from steadytrain.training.data import data_sets
from steadytrain.training.loop import attempt
from steadytrain.training.session import opening

pytestmark = pytest.mark.skipif(os.name != "posix", reason="pipes with names")

SETTINGS = ["--model", "digits", "--epochs", "4", "--batch-size", "32", "--lr", "0.05", "--device", "cpu"]
SETTINGS += ["--set", "parallel.compute_threads=1", "--threads", "1", "--set", "every.save_steps=2"]


def _steady(where: str, pipe: Path, words: list[str]) -> int:
    """``steady`` with short limits; at the start, or from the 200th image on, reading waits for a pipe."""
    read, asked = Records.image, list[int]()

    def image_of_a_disk_that_hangs(self: Records, number: int) -> Any:
        asked.append(number)
        if where == "image" and len(asked) == 200 and pipe.exists():
            pipe.read_bytes()
        return read(self, number)

    def open_on_a_disk_that_hangs(*arguments: Any, **options: Any) -> Any:
        if where == "start":
            pipe.read_bytes()
        return data_sets(*arguments, **options)

    def patience(end: float, slow: float = 60) -> StallLimits:
        return StallLimits(update=60 if where == "start" else 1, slow=min(slow, 60), end=end, grace=2, look=0.05)

    patch = pytest.MonkeyPatch()  # of a process of its own
    patch.setattr(Records, "image", image_of_a_disk_that_hangs)
    patch.setattr(opening, "data_sets", open_on_a_disk_that_hangs)
    patch.setattr(attempt, "StallLimits", patience)
    patch.setattr(attempt, "START_SECONDS", 3 if where == "start" else 60)
    return main(words)


def _train(digits: Path, run: Path, pipe: Path, stall_minutes: float, where: str = "image") -> ForkServerProcess:
    words = ["train", str(digits), "--run", str(run), *SETTINGS, "--set", f"every.stall_minutes={stall_minutes}"]
    return start(_steady, where, pipe, words, errors=run.with_suffix(".err"))


def _end_of(child: ForkServerProcess, run: Path) -> tuple[int | None, str]:
    """The exit code, and what was said until then."""
    child.join(100)
    return child.exitcode, run.with_suffix(".err").read_text()


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    """Reading it waits until somebody has opened it to write."""
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


def test_a_run_whose_data_do_not_come_ends_with_3_and_goes_on_when_they_do(
    digits: Path, tmp_path: Path, pipe: Path
) -> None:
    code, errors = _end_of(_train(digits, tmp_path / "run", pipe, 0.02), tmp_path / "run")
    assert code == StalledError.exit_code == 3
    run = Run.open(tmp_path / "run")
    events = list(run.events())
    (stalled,) = (event for event in events if isinstance(event, Stalled))
    (failed,) = (event for event in events if isinstance(event, Failed))
    assert stalled.what == "feed" and "the loop waits for a batch; feed-0 working on record" in stalled.culprit
    assert "in image_of_a_disk_that_hangs" in stalled.culprit
    assert "in image_of_a_disk_that_hangs\n" in (run.directory / stalled.stacks).read_text()
    assert failed.error == "StalledError" and failed.message in errors
    assert "Traceback" not in errors
    pipe.unlink()
    assert _end_of(_train(digits, tmp_path / "run", pipe, 5), tmp_path / "run")[0] == 0
    ended, last = Run.open(tmp_path / "run").finished(), [e for e in run.events() if isinstance(e, Step)][-1]
    assert isinstance(ended, Ended) and ended.attempt == 2 and last.step == ended.step


def _let_go_when_told(child: ForkServerProcess, run: Path, pipe: Path) -> str:
    """Open the pipe once the standstill is in the log; what the child said until its end."""
    log = run / "events.jsonl"
    while child.is_alive() and not (log.exists() and '"Stalled"' in log.read_text()):
        time.sleep(0.02)
    with pipe.open("r+b", buffering=0):  # open at both ends: whoever reads has something to wait for until it is closed
        time.sleep(0.1)
    code, errors = _end_of(child, run)
    assert code == 0
    return errors


def test_a_start_that_takes_long_is_told_of_and_never_ended(digits: Path, tmp_path: Path, pipe: Path) -> None:
    child = _train(digits, tmp_path / "run", pipe, 0.0001, where="start")
    output = _let_go_when_told(child, tmp_path / "run", pipe)
    assert "the loop is at startup, in open_on_a_disk_that_hangs" in output
    assert Run.open(tmp_path / "run").finished()


@pytest.mark.slow
def test_a_run_whose_data_come_late_goes_on(digits: Path, tmp_path: Path, pipe: Path) -> None:
    child = _train(digits, tmp_path / "run", pipe, 5)
    output = _let_go_when_told(child, tmp_path / "run", pipe)
    assert "no progress for" in output and "training continues" in output
    events = list(Run.open(tmp_path / "run").events())
    assert any(isinstance(event, Noticed) and event.message.startswith("training continues") for event in events)
    assert isinstance(events[-1], Ended)


def test_ranks_in_an_exchange_have_a_third_of_the_minutes_and_old_records_go(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[StallLimits] = []

    def watchdog(*args: Any, patience: StallLimits, **rest: Any) -> Watchdog:
        limits.append(patience)
        return Watchdog(*args, patience=patience, **rest)

    monkeypatch.setattr(attempt, "Watchdog", watchdog)
    for minutes in (0, 15, 60):
        changes = {"every.stall_minutes": minutes, "budget.epochs": None, "budget.steps": 1}
        run = Run.create(tmp_path / str(minutes), recipe.with_(changes))
        for name in ("collectives-1.json", "traceback-1.txt", "torch-collectives-1"):
            (run.directory / name).touch()  # of ranks that hung, before one process goes on
        train(run)
        assert not [path for pattern in ("*collectives-*", "traceback-*") for path in run.directory.glob(pattern)]
    assert [(limit.end, limit.exchange) for limit in limits[1::2]] == [(None, 300), (900, 300), (3600, 1200)]
