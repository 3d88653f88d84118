"""A run that was stopped goes on as if it had not been, and refuses to go on as something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

from steadytrain.config import Recipe
from steadytrain.data.packing.pack import pack
from steadytrain.errors import RunError
from steadytrain.events import (
    Ended,
    EpochTrained,
    Evaluated,
    Event,
    Failed,
    Logged,
    MachineStats,
    Noticed,
    Saved,
    Started,
    Step,
)
from steadytrain.events import log as event_log
from steadytrain.monitor import diagnose
from steadytrain.reports import summarise
from steadytrain.run import Run
from steadytrain.training import checkpoints, steps, train

Weights = Callable[[Path], bytes]
E = TypeVar("E", bound=Event)


def _of(kind: type[E], events: list[Event]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def _stop_after(run: Run, count: int) -> list[Event]:
    """Train until a request to stop is seen after ``count`` steps."""
    events: list[Event] = []
    for event in steps(
        run, stop=lambda: "SIGTERM" if _of(Step, events)[-1:] and _of(Step, events)[-1].step >= count else None
    ):
        events.append(event)
    assert isinstance(events[-1], Ended) and events[-1].status == "preempted"
    return events


def test_a_run_goes_on_saying_that_the_attempt_before_was_killed_and_what_memory_it_had(
    recipe: Recipe, tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run", recipe)
    for event in steps(run):
        if isinstance(event, Step) and event.step == 12:
            break
    with run.log(0, attempt=1) as log:
        log.append(
            MachineStats(seconds=1, cores=2, machine_cores=2, memory_bytes=39 * 10**8, memory_limit_bytes=4 * 10**9)
        )
    (run.directory / "lock").write_text("4194304")  # a process that there is none of
    memory = "it last used 3.9 GB of memory, of a limit of 4.0 GB: it probably ran out of memory; lower --batch-size"
    assert memory in summarise(run).course.why
    notices = [event.message for event in _of(Noticed, list(steps(run)))]
    assert f"the attempt before (attempt 1) was killed, or the machine went down; {memory}" in notices
    assert not any(
        "was killed" in event.message for event in run.events() if isinstance(event, Noticed) and event.attempt == 1
    )


def test_damaged_lines_of_the_log_are_counted_when_the_run_goes_on_and_in_its_verdict(
    recipe: Recipe, tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run", recipe)
    _stop_after(run, 7)
    lines = run.log_path().read_bytes().splitlines(keepends=True)
    run.log_path().write_bytes(b"".join([*lines[:4], b"\x00\x17garbage\n", b'{"v":1,"kin\n', *lines[4:]]))
    [notice] = [event.message for event in _of(Noticed, list(steps(run))) if "could not be read" in event.message]
    assert notice.startswith("2 lines of ")
    assert "2 lines of the event log: damaged, and left out" in diagnose(run).not_measurable


def test_a_request_to_stop_saves_and_the_rest_gives_the_same_bits(
    recipe: Recipe, tmp_path: Path, weights: Weights
) -> None:
    whole, parts = Run.create(tmp_path / "whole", recipe), Run.create(tmp_path / "parts", recipe)
    train(whole)
    first = _stop_after(parts, 7)
    assert _of(Saved, first)[-1].step == 7
    rest = list(steps(parts))
    assert [e.step for e in _of(Step, rest)] == list(range(8, 21))
    assert _of(Started, rest)[0].step == 7 and rest[0].attempt == 2
    assert weights(whole.directory) == weights(parts.directory)


@pytest.mark.slow
def test_the_order_by_blocks_goes_on_too_and_trains_something_else(
    recipe: Recipe, tmp_path: Path, weights: Weights
) -> None:
    blocks = recipe.with_({"data.order": "blocks"})
    runs = [Run.create(tmp_path / name, changed) for name, changed in (("a", blocks), ("b", blocks), ("c", recipe))]
    train(runs[0])
    _stop_after(runs[1], 7)
    train(runs[1])
    train(runs[2])
    first, second, other = (weights(run.directory) for run in runs)
    assert first == second != other


@pytest.mark.slow
def test_repeated_augmentation_goes_on_with_the_same_bits(recipe: Recipe, tmp_path: Path, weights: Weights) -> None:
    recipe = recipe.with_({"data.repeats": 3, "data.transforms": ["erase:0.5", "mixup:0.2"]})
    whole, parts = Run.create(tmp_path / "whole", recipe), Run.create(tmp_path / "parts", recipe)
    train(whole)
    _stop_after(parts, 7)
    train(parts)
    assert weights(whole.directory) == weights(parts.directory)


@pytest.mark.slow
def test_16_bit_parameters_and_their_average_go_on_with_the_same_bits(
    recipe: Recipe, tmp_path: Path, weights: Weights
) -> None:
    recipe = recipe.with_({"precision.name": "pure-bf16", "optim.ema": 0.9, "optim.clip_norm": 1.0})
    whole, parts = Run.create(tmp_path / "whole", recipe), Run.create(tmp_path / "parts", recipe)
    train(whole)
    _stop_after(parts, 7)
    train(parts)
    assert weights(whole.directory) == weights(parts.directory)


def test_evaluations_and_log_lines_are_the_same_after_a_stop(recipe: Recipe, tmp_path: Path) -> None:
    whole, parts = Run.create(tmp_path / "whole", recipe), Run.create(tmp_path / "parts", recipe)
    expected = list(steps(whole))
    happened = [*_stop_after(parts, 7), *steps(parts)]
    plain = [[(e.step, e.loss, e.top1) for e in _of(Logged, events)] for events in (expected, happened)]
    assert plain[0] == plain[1]
    scores = [[(e.step, e.n, e.loss, e.top1) for e in _of(Evaluated, events)] for events in (expected, happened)]
    assert scores[0] == scores[1]
    epochs = [
        [(e.epoch, e.step, e.n, e.loss, e.top1) for e in _of(EpochTrained, events)] for events in (expected, happened)
    ]
    assert epochs[1][0][:3] == (1, 7, 7 * 32)  # as far as it came
    assert epochs[1][1:] == epochs[0] and [e[:3] for e in epochs[0]] == [(1, 10, 320), (2, 20, 320)]


def test_a_stop_in_the_middle_of_an_evaluation_repeats_it_later(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    events: list[Event] = []
    asked = 0

    def stop() -> str | None:
        nonlocal asked
        at_ten = bool(_of(Step, events)) and _of(Step, events)[-1].step == 10
        asked += at_ten
        return "SIGTERM" if at_ten else None

    events.extend(event for event in _collect(steps(run, stop=stop), events))
    assert not _of(Evaluated, events)
    rest = list(steps(run))
    assert [e.step for e in _of(Evaluated, rest)] == [10, 20]


def test_a_run_stopped_in_its_last_evaluation_again_and_again_is_not_finished_without_it(
    recipe: Recipe, tmp_path: Path
) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"every.evaluate_epochs": 9}))
    for attempt in (1, 2):
        events: list[Event] = []
        _collect(steps(run, stop=lambda happened=events: "SIGTERM" if _at(happened) == 20 else None), events)  # type: ignore[misc]
        assert isinstance(events[-1], Ended) and (events[-1].attempt, events[-1].status) == (attempt, "preempted")
    assert [e.step for e in steps(run) if isinstance(e, Evaluated)] == [20]


def _at(events: list[Event]) -> int:
    return max((e.step for e in events if isinstance(e, Started | Step)), default=0)


def _collect(events: object, seen: list[Event]) -> list[Event]:
    for event in events:  # type: ignore[attr-defined]
        seen.append(event)
    return []


def test_a_loop_that_is_left_early_leaves_no_thread_and_can_be_taken_up(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    for event in steps(run):
        if isinstance(event, Step) and event.step == 3:
            break
    assert train(run).step == 20


def test_data_that_changed_since_the_run_began_are_refused(recipe: Recipe, tmp_path: Path) -> None:
    copy = tmp_path / "data.rec"
    for suffix in (".rec", ".idx", ".json"):
        copy.with_suffix(suffix).write_bytes(Path(recipe.data.train).with_suffix(suffix).read_bytes())
    run = Run.create(tmp_path / "run", recipe.with_({"data.train": str(copy)}))
    _stop_after(run, 4)
    card = copy.with_suffix(".json")
    digest = next(e for e in run.events() if isinstance(e, Started)).data["train_digest"]
    edited = json.loads(card.read_text().replace(digest, "0" * len(digest)))
    del edited["checksum"]
    card.write_text(json.dumps(edited))
    images = next(e for e in run.events() if isinstance(e, Started)).data["num_train"]
    with pytest.raises(RunError) as caught:
        train(run)
    counts = f"({images} training images, were {images}; digest 000000000000, was {digest[:12]})"
    assert str(caught.value).startswith(f"{copy} has changed since this run was started {counts}: choose another --run")


def test_validation_data_may_change_since_no_weight_depends_on_them(
    recipe: Recipe, tmp_path: Path, write_digits: Callable[[Path, int, int], Path], weights: Weights
) -> None:
    changed = recipe.with_({"data.val": str(tmp_path / "val.rec")})
    whole, parts = Run.create(tmp_path / "whole", changed), Run.create(tmp_path / "parts", changed)
    pack(write_digits(tmp_path / "first", 60, 10), tmp_path / "val")
    train(whole)
    _stop_after(parts, 15)
    pack(write_digits(tmp_path / "second", 90, 10), tmp_path / "val", force=True)
    events = list(steps(parts))
    assert any("the validation data have changed" in e.message for e in _of(Noticed, events))
    assert [e.n for e in _of(Evaluated, events)] == [90]
    assert checkpoints.read_weights(parts.directory / "best.safetensors")[1]["step"] == events[-2].step  # type: ignore[attr-defined]
    assert weights(whole.directory) == weights(parts.directory)


@pytest.mark.parametrize("harm", ["flipped bit", "empty"])
def test_damaged_best_weights_are_said_and_chosen_again(
    harm: str, recipe: Recipe, tmp_path: Path, write_digits: Callable[[Path, int, int], Path]
) -> None:
    pack(write_digits(tmp_path / "val-images", 60, 10), tmp_path / "val")
    run = Run.create(tmp_path / "run", recipe.with_({"data.val": str(tmp_path / "val.rec")}))
    best = run.directory / "best.safetensors"
    _stop_after(run, 15)
    content = bytearray(best.read_bytes())
    content[len(content) // 2] ^= 1
    best.write_bytes(b"" if harm == "empty" else content)
    notices = [event.message for event in _of(Noticed, list(steps(run)))]
    [notice] = [notice for notice in notices if "chosen again" in notice]
    assert str(best) in notice
    assert checkpoints.read_weights(best)[1]["step"] > 0


def test_a_checkpoint_of_another_run_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "one", recipe)
    _stop_after(run, 4)
    two = Run.create(tmp_path / "two", recipe.with_({"model.name": "mlp"}))
    (run.checkpoints / "step-00000004").rename(two.checkpoints / "step-00000004")
    with pytest.raises(RunError, match=r"belongs to a run of another recipe .*model digits"):
        train(two)
    assert any(isinstance(e, Failed) for e in two.events())


def test_a_resumed_run_reads_its_log_once_before_its_first_step(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run.create(tmp_path / "run", recipe)
    _stop_after(run, 7)
    num_lines = len(run.log_path().read_bytes().splitlines())
    parsed: list[bytes] = []
    parse = event_log._parse

    def count(lines: bytes) -> list[Event]:
        parsed.extend(lines.splitlines())
        return parse(lines)

    monkeypatch.setattr(event_log, "_parse", count)
    again = Run.create(run.directory, recipe)
    assert again.finished() is None and again.progress().started is not None
    first = next(event for event in steps(again) if isinstance(event, Step))
    assert first.step == 8
    before_step = [line for line in parsed if b'"attempt":1' in line]
    assert 0 < len(before_step) <= num_lines


def test_a_run_goes_on_with_the_preprocessing_that_it_began_with(recipe: Recipe, tmp_path: Path) -> None:
    """As one that began under a name of a model that means other mean values by now."""
    run = Run.create(tmp_path / "run", recipe)
    [begun] = _of(Started, _stop_after(run, 7))
    own = begun.model["input"]
    mean = [0.5] * len(own["mean"])
    text = run.log_path().read_text()
    kept = text.replace(json.dumps(own["mean"], separators=(",", ":")), json.dumps(mean, separators=(",", ":")))
    assert kept != text
    run.log_path().write_text(kept)
    events = list(steps(run))
    [notice] = [event.message for event in _of(Noticed, events) if "prepared" in event.message]
    shown = " ".join(f"{value:g}" for value in own["mean"])
    assert f"as when this run began (mean {' '.join(['0.5'] * len(mean))}, not {shown})" in notice
    assert _of(Started, events)[0].model["input"] == {**own, "mean": mean}
