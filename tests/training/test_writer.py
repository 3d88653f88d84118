"""What is saved is of the update at which it was asked for, whatever training does while a thread writes it."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from steadytrain.config import Recipe
from steadytrain.errors import StorageError
from steadytrain.events import Ended, Event, Failed, Saved, Step
from steadytrain.run import Run
from steadytrain.training import checkpoints, steps, train
from steadytrain.training.writer import Writer

CPU = torch.device("cpu")


@contextmanager
def opened() -> Iterator[Writer[Any]]:
    writer: Writer[Any] = Writer(CPU)
    try:
        yield writer
    finally:
        writer.close()


def test_copies_stay_as_they_were_and_their_memory_is_used_again() -> None:
    weights = {"w": torch.ones(4), "n": torch.tensor(3), "part": torch.arange(8.0)[2:4]}
    with opened() as writer:
        first = writer.stage("weights", weights)
        weights["w"].zero_()
        weights["n"].add_(1)
        assert first["w"].tolist() == [1.0] * 4 and first["n"].item() == 3
        again, other = writer.stage("weights", weights), writer.stage("checkpoint", weights)
        assert again["w"].data_ptr() == first["w"].data_ptr() != other["w"].data_ptr()
        larger = writer.stage("weights", {"w": torch.ones(400)})
    assert larger["w"].sum() == 400 and other["w"].sum() == 0


def test_the_next_of_a_kind_waits_until_the_memory_of_the_one_before_is_free() -> None:
    seen: list[float] = []
    go = threading.Event()
    with opened() as writer:
        copy = writer.stage("weights", {"w": torch.ones(1)})["w"]
        writer.submit("weights", lambda: seen.extend([copy.item()] if go.wait(60) else []))
        assert writer.is_writing("weights") and not writer.is_writing("checkpoint")
        threading.Timer(0.05, go.set).start()
        writer.stage("weights", {"w": torch.full((1,), 2.0)})
        assert seen == [1.0] and not writer.is_writing("weights")


def test_files_are_written_in_their_order_and_none_after_an_error() -> None:
    written: list[str] = []

    def full() -> None:
        raise StorageError("the disk is full")

    with opened() as writer:
        writer.submit("weights", lambda: written.append("best"))
        writer.submit("checkpoint", full)
        writer.submit("weights", lambda: written.append("last"))
        writer.wait()
        with pytest.raises(StorageError, match="the disk is full"):
            list(writer.results())
        assert not list(writer.results()), "it is raised once"
        with pytest.raises(StorageError, match="the disk is full"):
            writer.stage("weights", {})
    assert written == ["best"]


def test_training_goes_on_while_a_checkpoint_is_written_and_the_files_are_the_same(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"every.save_steps": 5, "every.keep": 9, "optim.ema": 0.9, "optim.name": "adamw", "optim.lr": 0.01}
    usual, slow = (Run.create(tmp_path / name, recipe.with_(changes)) for name in ("usual", "slow"))
    train(usual)
    go_on = _hold_back_checkpoints(monkeypatch)
    order: list[tuple[str, int]] = []
    for event in steps(slow):
        if isinstance(event, Step | Saved):
            order.append((event.kind, event.step))
        if isinstance(event, Step) and event.step in (9, 14, 19):
            go_on.release()  # an update before the next checkpoint, which waits for this one
    saved = [event for event in slow.events() if isinstance(event, Saved)]
    assert [event.step for event in saved] == [5, 10, 15, 20]
    assert order.index(("Saved", 5)) > order.index(("Step", 9))
    assert all(0 < event.pause < event.seconds for event in saved)
    for place in checkpoints.saved(usual.checkpoints):
        theirs = slow.checkpoints / place.name / "state.safetensors"
        assert (place / "state.safetensors").read_bytes() == theirs.read_bytes()
        assert _cursor(place) == _cursor(theirs.parent)


def _hold_back_checkpoints(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Let each checkpoint be written only when the semaphore is released for it; the last one at once."""
    go_on, save, calls = threading.Semaphore(0), checkpoints.save, itertools.count(1)

    def wait(*arguments: Any, **options: Any) -> checkpoints.Written:
        if next(calls) < 4:
            assert go_on.acquire(timeout=60), "the loop did not go on"
        return save(*arguments, **options)

    monkeypatch.setattr(checkpoints, "save", wait)
    return go_on


def _cursor(place: Path) -> Any:
    state = checkpoints.load(place)
    return [state[name] for name in ("cursor", "best", "evaluated", "plateau", "misses")]


@pytest.mark.parametrize("number", [2, 4])
def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_what_was_saved_before(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The fourth is the last: the error comes at the end of the run."""
    fail_at = _fail_at(number, checkpoints.save)
    monkeypatch.setattr(checkpoints, "save", fail_at)
    run = Run.create(tmp_path / "run", recipe.with_({"every.save_steps": 5}))
    with pytest.raises(StorageError, match="No space left"):
        train(run)
    events: list[Event] = list(run.events())
    before = 5 * (number - 1)
    assert [event.step for event in events if isinstance(event, Saved)][-1] == before
    assert [event.error for event in events if isinstance(event, Failed)] == ["StorageError"]
    assert not [event for event in events if isinstance(event, Ended)] and not run.weights.exists()
    assert checkpoints.newest(run.checkpoints) == run.checkpoints / f"step-{before:08d}"


def _fail_at(number: int, save: Callable[..., checkpoints.Written]) -> Callable[..., checkpoints.Written]:
    calls = itertools.count(1)

    def maybe_fail(*arguments: Any, **options: Any) -> checkpoints.Written:
        if next(calls) == number:
            raise StorageError("cannot write: No space left on device")
        return save(*arguments, **options)

    return maybe_fail


def test_a_run_that_is_left_writes_first_what_it_was_asked_for(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = _hold_back_checkpoints(monkeypatch)
    run = Run.create(tmp_path / "run", recipe.with_({"every.save_steps": 5}))
    events = steps(run)
    next(event for event in events if isinstance(event, Step) and event.step == 7)
    assert checkpoints.saved(run.checkpoints) == []
    threading.Timer(0.05, go_on.release).start()
    events.close()  # type: ignore[attr-defined]
    assert checkpoints.newest(run.checkpoints) == run.checkpoints / "step-00000005"
