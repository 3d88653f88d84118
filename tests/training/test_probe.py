"""The ceilings of a run, measured beside it: it goes on, and ends, as if nobody had looked."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from steadytrain.config import Recipe
from steadytrain.errors import InputError, RunError
from steadytrain.events import Ceilings, Event, FeedPlaced, Noticed, Started, StepMeasured
from steadytrain.monitor import ledger, read_history
from steadytrain.run import Run
from steadytrain.training import steps, train
from steadytrain.training.profile import probe
from steadytrain.training.profile.probe import probe_run

Weights = Callable[[Path], bytes]
SECONDS = 0.3


def _files(folder: Path) -> dict[str, str]:
    """Every file of a folder, by its content and its time."""
    return {
        str(path.relative_to(folder)): f"{hashlib.sha256(path.read_bytes()).hexdigest()} {path.stat().st_mtime_ns}"
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def _kinds(events: list[Event]) -> list[str]:
    return [event.kind for event in events]


def test_a_finished_run_is_probed_and_only_its_events_grow(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    train(run)
    before, events, seconds = _files(run.directory), list(run.events()), ledger(run).wall_seconds
    log = run.directory / "events.jsonl"
    content = log.read_bytes()
    probed = probe_run(run, seconds=SECONDS)
    after = _files(run.directory)
    assert {name for name in after if after[name] != before.get(name)} == {"events.jsonl"}
    assert log.read_bytes().startswith(content)
    assert list(run.events())[: len(events)] == events
    assert _kinds(list(run.events())[len(events) :]) == ["Ceilings", "StepMeasured"]
    assert probed.ceilings.feed_images_per_second > 0
    assert probed.ceilings.compute_images_per_second > 0
    assert probed.ceilings.both_images_per_second > 0
    assert probed.ceilings.step == 20
    finished = run.finished()
    assert finished is not None and finished.step == 20
    assert ledger(run).wall_seconds == seconds
    known = read_history(run).evidence()
    assert known.newest(Ceilings) and known.newest(StepMeasured) and known.attempts == 1


def test_an_interrupted_run_that_was_probed_ends_with_the_same_weights(
    recipe: Recipe, tmp_path: Path, weights: Weights
) -> None:
    whole, probed = Run.create(tmp_path / "whole", recipe), Run.create(tmp_path / "probed", recipe)
    train(whole)
    taken: list[Event] = []
    for event in steps(probed, stop=lambda: "SIGTERM" if _kinds(taken).count("Step") == 7 else None):
        taken.append(event)
    assert probe_run(probed, seconds=SECONDS).ceilings.step == 7
    train(probed)
    assert weights(whole.directory) == weights(probed.directory)
    assert {event.attempt for event in probed.events() if isinstance(event, Started)} == {1, 2}


DRAWING = """
import torch

class Net(torch.nn.Sequential):
    def __init__(self, outputs):
        super().__init__(torch.nn.BatchNorm2d(1), torch.nn.Flatten(), torch.nn.Dropout(), torch.nn.Linear(64, outputs))

def make(num_classes, **told):
    return Net(num_classes)
"""


def test_a_probe_at_the_start_of_training_changes_no_bit_of_weights_averages_and_draws(
    recipe: Recipe, tmp_path: Path, weights: Weights, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(probe, "SECONDS", SECONDS)
    (tmp_path / "probe_drawing.py").write_text(DRAWING)
    recipe = recipe.with_({"model.name": "probe_drawing:make", "optim.name": "adamw", "optim.ema": 0.9})
    whole, probed = Run.create(tmp_path / "whole", recipe), Run.create(tmp_path / "probed", recipe)
    list(steps(whole, allow_import=True))
    events = list(steps(probed, allow_import=True, probe=True))
    assert _kinds(events)[:4] == ["Started", "Noticed", "Ceilings", "StepMeasured"]
    assert weights(whole.directory) == weights(probed.directory)
    states = [sorted(run.checkpoints.iterdir())[-1] / "state.safetensors" for run in (whole, probed)]
    assert states[0].read_bytes() == states[1].read_bytes()


def test_a_probe_that_fails_does_not_keep_a_run_from_training(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    held = DRAWING.replace(
        "return Net(num_classes)", "net = Net(num_classes)\n    net.lock = threading.Lock()\n    return net"
    )
    (tmp_path / "probe_alone.py").write_text(f"import threading\n{held}")  # what holds a lock cannot be copied
    run = Run.create(tmp_path / "run", recipe.with_({"model.name": "probe_alone:make"}))
    events = list(steps(run, allow_import=True, probe=True))
    assert run.finished() is not None
    assert any("training continues without" in event.message for event in events if isinstance(event, Noticed))


def test_a_run_that_has_not_begun_can_be_probed(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    assert probe_run(run, seconds=SECONDS).ceilings.step == 0
    assert run.progress().started is None and run.finished() is None
    train(run)
    assert [event.attempt for event in run.events() if isinstance(event, Started)] == [1]


def test_a_feed_that_lived_in_a_process_of_its_own_is_measured_there(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    train(run)
    with run.log() as log:
        log.append(FeedPlaced(step=20, place="process", reason="a process costs the loop less"))
    assert probe_run(run, seconds=SECONDS).ceilings.feed_images_per_second > 0


def test_damaged_checkpoints_do_not_matter(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    train(run)
    for path in run.checkpoints.rglob("*"):
        if path.is_file():
            path.write_bytes(b"")
    assert probe_run(run, seconds=SECONDS).ceilings.compute_images_per_second > 0


def test_a_run_that_is_being_trained_is_left_alone_unless_forced(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    heard: list[str] = []
    with run.lock():
        with pytest.raises(RunError, match=r"is being trained by process \d+: a probe would slow it down.*--force"):
            probe_run(run, seconds=SECONDS)
        before = _files(run.directory)
        probe_run(run, seconds=SECONDS, force=True, say=heard.append)
        assert _files(run.directory) == before
    assert "being trained meanwhile" in heard[-1]


def test_a_folder_that_cannot_be_written_is_probed_all_the_same(recipe: Recipe, small_disk: Path) -> None:
    run = Run.create(small_disk / "run", recipe)
    with suppress(OSError), (small_disk / "full").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    heard: list[str] = []
    probe_run(run, seconds=SECONDS, say=heard.append)
    assert "not written into the events" in heard[-1]


def test_what_was_trained_on_another_machine_is_told_but_not_written(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    train(run)
    log = run.directory / "events.jsonl"
    log.write_text(log.read_text().replace('"cores":', '"cores":9'))
    heard: list[str] = []
    before = _files(run.directory)
    probe_run(run, seconds=SECONDS, say=heard.append)
    assert _files(run.directory) == before
    assert "trained elsewhere (cores was 9" in heard[-1]


def test_a_time_that_cannot_be_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="seconds is 0"):
        probe_run(Run.create(tmp_path / "run", recipe), seconds=0)
