"""SIGKILL at any moment, the same command again: the same final weights, to the last bit."""

from __future__ import annotations

import contextlib
import itertools
import os
import pty
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.forked import stand_at, start

from steadytrain import events
from steadytrain.cli import main
from steadytrain.config import Recipe, parts
from steadytrain.files import sync
from steadytrain.run import Run
from steadytrain.training import checkpoints, steps, train

SETTINGS = ["--model", "digits", "--epochs", "6", "--batch-size", "32", "--lr", "0.05", "--device", "cpu"]
SETTINGS += ["--set", "parallel.compute_threads=1", "--set", "every.save_steps=7", "--set", "every.log_steps=5"]
SETTINGS += ["--set", "optim.ema=0.99", "--set", "data.pad=1"]


def _words(digits: Path, run: Path) -> list[str]:
    return ["train", str(digits), "--run", str(run), *SETTINGS]


def _steps(run: Path) -> int:
    path = run / "events.jsonl"
    return max((e.step for e in events.read(path) if isinstance(e, events.Step)), default=0) if path.exists() else 0


def _signal_at(
    digits: Path,
    run: Path,
    step: int,
    number: signal.Signals,
    *,
    flush: int | None = None,
    until: Callable[[], bool] = lambda: True,
) -> int | None:
    """Train, and send a signal after this step; the exit code.

    Args:
        flush: its thread that writes stands still there, see :func:`_stand_at_flush`.
        until: the signal is sent when this holds as well.
    """
    gate, words = run.with_name(f"after-{step}"), _words(digits, run)
    train = (main, words) if flush is None else (_stand_at_flush, flush, words)
    child = start(stand_at, {step: gate}, *train)
    deadline = time.monotonic() + 120
    while not (_steps(run) >= step and until()) and child.is_alive() and time.monotonic() < deadline:
        time.sleep(0.02)  # more often, and reading the log would slow the run
    if child.is_alive() and child.pid is not None:
        os.kill(child.pid, number)
    gate.touch()
    child.join(60)
    return child.exitcode


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1, 7))
def test_killed_at_random_steps_the_final_weights_are_the_same(
    digits: Path, tmp_path: Path, weights: Callable[[Path], bytes], seed: int
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert main(_words(digits, whole)) == 0
    draw = random.Random(seed)
    for step in sorted(draw.sample(range(1, 65), 2)):
        _signal_at(digits, killed, step, signal.SIGKILL)
    _goes_on_to_the_same(whole, killed, weights)


def test_killed_and_then_terminated_the_final_weights_are_the_same(
    digits: Path, tmp_path: Path, weights: Callable[[Path], bytes]
) -> None:
    """A termination saves, and ends with 75."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(_words(digits, whole)) == 0
    assert _signal_at(digits, run, 10, signal.SIGKILL) == -signal.SIGKILL
    assert _signal_at(digits, run, 20, signal.SIGTERM) == 75
    [ended] = [e for e in Run.open(run).events() if isinstance(e, events.Ended)]
    assert ended.status == "preempted"
    _goes_on_to_the_same(whole, run, weights)
    started = [e for e in Run.open(run).events() if isinstance(e, events.Started)]
    assert started[-1].step == ended.step


def test_killed_while_a_thread_writes_the_checkpoint_before_is_used_and_the_final_weights_are_the_same(
    digits: Path, tmp_path: Path, weights: Callable[[Path], bytes]
) -> None:
    """Training goes on meanwhile; a checkpoint that has its name is whole, even where its folder is not flushed."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    assert main(_words(digits, whole)) == 0
    places = run / "checkpoints"
    assert _signal_at(digits, run, 18, signal.SIGKILL, flush=5) == -signal.SIGKILL
    assert _steps(run) == 18, "training stood still"
    assert checkpoints.saved(places) == [places / "step-00000007"]
    third = places / "step-00000021"
    assert _signal_at(digits, run, 25, signal.SIGKILL, flush=8, until=third.exists) == -signal.SIGKILL
    assert checkpoints.newest(places) == third
    _goes_on_to_the_same(whole, run, weights)
    assert [e.step for e in Run.open(run).events() if isinstance(e, events.Resumed)] == [7, 21]
    saved = [(e.attempt, e.step) for e in Run.open(run).events() if isinstance(e, events.Saved)]
    assert saved[:3] == [(1, 7), (2, 14), (3, 28)]


def _stand_at_flush(number: int, words: list[str]) -> int:
    """Train; the thread that writes stands still before it flushes something of a checkpoint for this time.

    A checkpoint has four flushes: of two files, of their folder, and of the folder of all after that has its name.
    """
    flush, flushes = sync, itertools.count(1)

    def stand(path: Path) -> None:
        if "checkpoints" in path.parts and next(flushes) == number:
            threading.Event().wait()
        flush(path)

    vars(checkpoints)["sync"] = stand
    return main(words)


@pytest.mark.slow
def test_a_run_whose_terminal_is_closed_saves_and_ends(digits: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    pid, terminal = pty.fork()
    if not pid:
        os.execv(sys.executable, [sys.executable, "-m", "steadytrain", *_words(digits, run), "--epochs", "2000"])
    reader = threading.Thread(target=_read_all, args=(terminal,), daemon=True)
    reader.start()
    deadline = time.monotonic() + 120
    while _steps(run) < 10 and time.monotonic() < deadline:
        time.sleep(0.05)
    os.close(terminal)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 75
    [ended] = [e for e in Run.open(run).events() if isinstance(e, events.Ended)]
    assert ended.status == "preempted"
    assert checkpoints.newest(Run.open(run).checkpoints) == run / "checkpoints" / f"step-{ended.step:08d}"


def _read_all(terminal: int) -> None:
    with contextlib.suppress(OSError):
        while os.read(terminal, 65536):
            pass


def _goes_on_to_the_same(whole: Path, run: Path, weights: Callable[[Path], bytes]) -> None:
    assert Run.open(run).finished() is None
    assert main(_words(Path(Run.open(run).recipe.data.train), run)) == 0
    assert weights(whole) == weights(run)
    seen = list(Run.open(run).events())
    assert {e.attempt for e in seen} == {1, 2, 3}
    last = {e.step: e.position for e in seen if isinstance(e, events.Step)}
    assert last == {e.step: e.position for e in Run.open(whole).events() if isinstance(e, events.Step)}


def test_a_damaged_newest_checkpoint_costs_steps_not_bits(
    recipe: Recipe, tmp_path: Path, weights: Callable[[Path], bytes]
) -> None:
    recipe = recipe.with_({"every.save_steps": 4})
    whole, harmed = Run.create(tmp_path / "whole", recipe), Run.create(tmp_path / "harmed", recipe)
    train(whole)
    train(harmed)
    (harmed.directory / "model.safetensors").unlink()
    log = harmed.directory / "events.jsonl"
    log.write_text("".join(line for line in log.read_text().splitlines(keepends=True) if '"Ended"' not in line))
    newest = sorted(harmed.checkpoints.iterdir())[-1] / "state.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    train(harmed)
    seen = list(harmed.events())
    noticed = [e for e in seen if isinstance(e, events.Noticed)]
    assert any("is damaged" in e.message and "step-00000020" in e.message for e in noticed)
    assert weights(whole.directory) == weights(harmed.directory)


@pytest.mark.parametrize(("share", "expected"), [(100.0, [10, 20, 30, 40]), (1e-9, [10, 40])])
def test_evaluations_are_saved_as_far_as_the_share_of_saving_allows_and_the_first_one_always(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float, expected: list[int]
) -> None:
    monkeypatch.setattr(parts, "SAVE_SHARE", share)
    run = Run.create(tmp_path / "run", recipe.with_({"budget.epochs": 4}))
    assert [e.step for e in steps(run) if isinstance(e, events.Saved)] == expected


@pytest.mark.parametrize(("last", "kept"), [pytest.param(14, 10, marks=pytest.mark.slow), (20, 10)])
def test_a_run_by_defaults_that_dies_goes_on_from_its_newest_evaluation(
    recipe: Recipe, tmp_path: Path, weights: Callable[[Path], bytes], last: int, kept: int
) -> None:
    recipe = recipe.with_({"budget.epochs": 3, "optim.ema": 0.9})
    whole, died = Run.create(tmp_path / "whole", recipe), Run.create(tmp_path / "died", recipe)
    train(whole)
    for event in steps(died):
        if isinstance(event, events.Step) and event.step == last:
            break
    train(died)
    assert [e.step for e in died.events() if isinstance(e, events.Resumed)] == [kept]
    assert weights(whole.directory) == weights(died.directory)
