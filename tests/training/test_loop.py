"""What a run yields, writes and leaves behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
import torch

from steadytrain.config import Recipe
from steadytrain.data.packing.pack import pack
from steadytrain.distributed.engine import Engine
from steadytrain.errors import DataError, DivergedError, FailedError, RecipeError
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
    ThreadStats,
)
from steadytrain.reports import summarise
from steadytrain.run import Run
from steadytrain.training import checkpoints, steps, train
from steadytrain.training.loop import updates as loop
from steadytrain.training.state import Meters

Weights = Callable[[Path], bytes]
E = TypeVar("E", bound=Event)


def _of(kind: type[E], events: list[Event]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def test_a_run_tells_its_whole_story_in_order(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    events = list(steps(run))
    written = list(run.events())
    assert events == [
        event for event in written if not isinstance(event, (MachineStats, ThreadStats))
    ]  # others write those
    assert {type(event) for event in written[-3:-1]} == {MachineStats, ThreadStats} and isinstance(written[-1], Ended)
    assert isinstance(events[0], Started)
    assert isinstance(events[-1], Ended) and events[-1].status == "finished"
    assert [e.step for e in _of(Step, events)] == list(range(1, 21))
    assert [e.position for e in _of(Step, events)] == [32 * k for k in range(1, 21)]
    assert [e.step for e in _of(Logged, events)] == [5, 10, 15, 20]
    assert [(e.step, e.n) for e in _of(Evaluated, events)] == [(10, 80), (20, 80)]
    assert events[-1].images == 640


def test_all_old_objects_are_searched_for_garbage_at_log_lines_alone(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loop, "LEAST_UNCOLLECTED", 5)
    before, updates, searched, kept = gc.get_threshold(), [0], list[int](), list[object]()

    def look(phase: str, about: dict[str, int]) -> None:
        if phase == "start" and about["generation"] == 2 and updates[0]:
            searched.append(updates[0])

    gc.callbacks.append(look)
    try:
        for event in steps(Run.create(tmp_path / "run", recipe)):
            updates[0] = event.step if isinstance(event, Step) else updates[0]
            kept.append([[event] for _ in range(2000)])  # by Python's own rule all are searched soon
            updates[0] = 0 if isinstance(event, Ended) else updates[0]
    finally:
        gc.callbacks.remove(look)
    assert searched == [5, 10, 15, 20]
    assert gc.get_threshold() == before


def test_training_learns(recipe: Recipe, tmp_path: Path) -> None:
    outcome = train(Run.create(tmp_path / "run", recipe.with_({"budget.epochs": 12})))
    assert outcome.evaluated is not None
    assert outcome.evaluated.top1 > 0.8
    assert outcome.evaluated.top5 is not None and outcome.evaluated.top5 > outcome.evaluated.top1


def test_the_first_event_says_what_bits_and_results_depend_on(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    train(run)
    started = next(e for e in run.events() if isinstance(e, Started))
    assert started.data["num_train"] == 320 and started.data["num_val"] == 80 and started.data["held_out"]
    assert started.data["classes"] == [str(k) for k in range(10)]
    assert started.machine["compute_threads"] == 1
    assert started.machine["torch"] == torch.__version__
    assert started.model["parameters"] > 1000
    assert started.steps == 20


def test_the_same_recipe_gives_the_same_bits(recipe: Recipe, tmp_path: Path, weights: Weights) -> None:
    for name in ("a", "b"):
        train(Run.create(tmp_path / name, recipe))
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_feed_threads_change_nothing(recipe: Recipe, tmp_path: Path, weights: Weights) -> None:
    for threads in (1, 5):
        train(Run.create(tmp_path / str(threads), recipe.with_({"parallel.threads": threads})))
    assert weights(tmp_path / "1") == weights(tmp_path / "5")


def test_another_seed_gives_other_bits(recipe: Recipe, tmp_path: Path, weights: Weights) -> None:
    for seed in (0, 1):
        train(Run.create(tmp_path / str(seed), recipe.with_(seed=seed)))
    assert weights(tmp_path / "0") != weights(tmp_path / "1")


def test_losses_do_not_depend_on_how_often_they_are_logged(recipe: Recipe, tmp_path: Path) -> None:
    often = _of(Logged, list(steps(Run.create(tmp_path / "a", recipe.with_({"every.log_steps": 1})))))
    rarely = _of(Logged, list(steps(Run.create(tmp_path / "b", recipe.with_({"every.log_steps": 10})))))
    assert sum(e.loss for e in often[:10]) / 10 == pytest.approx(rarely[0].loss, rel=1e-6)
    assert sum(e.top1 for e in often[:10]) / 10 == pytest.approx(rarely[0].top1)


@pytest.mark.parametrize("batch_size", [48, *(pytest.param(size, marks=pytest.mark.slow) for size in (32, 400))])
def test_an_epochs_means_are_those_of_its_own_updates_however_often_lines_are_logged(
    recipe: Recipe, tmp_path: Path, batch_size: int
) -> None:
    """320 images: of 48, some updates span two epochs, and belong to that of their first image; of 400, all do."""
    often = recipe.with_({"batch_size": batch_size, "budget.epochs": 2.5, "every.log_steps": 1})
    events = list(steps(Run.create(tmp_path / "often", often)))
    lines: dict[int, list[Logged]] = {}
    for line in _of(Logged, events):
        lines.setdefault((line.step - 1) * batch_size // 320 + 1, []).append(line)
    epochs = _of(EpochTrained, events)
    assert [(e.epoch, e.step, e.n) for e in epochs] == [
        (epoch, of_epoch[-1].step, len(of_epoch) * batch_size) for epoch, of_epoch in lines.items()
    ]
    for event, of_epoch in zip(epochs, lines.values(), strict=True):
        assert event.loss == pytest.approx(sum(line.loss for line in of_epoch) / len(of_epoch), rel=1e-6)
        assert event.top1 == pytest.approx(sum(line.top1 for line in of_epoch) / len(of_epoch))
    rarely = steps(Run.create(tmp_path / "rarely", often.with_({"every.log_steps": 1000})))
    same = [(e.epoch, e.step, e.n, e.loss, e.top1) for e in _of(EpochTrained, list(rarely))]
    assert same == [(e.epoch, e.step, e.n, e.loss, e.top1) for e in epochs]


def test_accumulated_parts_update_like_the_whole_batch(recipe: Recipe, tmp_path: Path) -> None:
    # lenet has no batch normalisation, so parts see what the whole sees; only the order of sums differs.
    values = {}
    for parts in (1, 4):
        changed = recipe.with_({"model.name": "mlp", "optim.accumulate": parts, "budget.epochs": 1})
        run = Run.create(tmp_path / str(parts), changed)
        train(run)
        values[parts] = checkpoints.read_weights(run.weights)[0]
    for name, tensor in values[1].items():
        torch.testing.assert_close(tensor, values[4][name], rtol=1e-4, atol=1e-5)


def test_the_learning_rate_follows_the_schedule_at_every_update(recipe: Recipe, tmp_path: Path) -> None:
    lrs = [e.lr for e in steps(Run.create(tmp_path / "run", recipe)) if isinstance(e, Step)]
    assert lrs[0] == pytest.approx(0.05)
    assert lrs == sorted(lrs, reverse=True)
    assert len(set(lrs)) == 20


def test_the_rate_grows_with_the_batch_from_the_stated_base(recipe: Recipe, tmp_path: Path) -> None:
    changed = recipe.with_({"optim.base_batch_size": 16, "optim.schedule": "constant"})
    first = next(e for e in steps(Run.create(tmp_path / "run", changed)) if isinstance(e, Step))
    assert first.lr == pytest.approx(0.05 * 32 / 16)


def test_clipping_bounds_the_update_and_logs_the_norm(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"optim.clip_norm": 1e-9, "optim.weight_decay": 0.0}))
    events = list(steps(run))
    norms = [e.grad_norm for e in _of(Logged, events)]
    assert all(norm is not None and norm > 1e-3 for norm in norms)
    assert _of(Logged, events)[0].loss == pytest.approx(_of(Logged, events)[-1].loss, rel=0.1)


def test_the_average_is_what_is_evaluated_and_exported(recipe: Recipe, tmp_path: Path, weights: Weights) -> None:
    plain, averaged = (Run.create(tmp_path / name, r) for name, r in
                       (("a", recipe), ("b", recipe.with_({"optim.ema": 0.9}))))  # fmt: skip
    train(plain)
    events = list(steps(averaged))
    assert {e.weights for e in _of(Evaluated, events)} == {"ema"}
    assert weights(plain.directory) != weights(averaged.directory)


@pytest.mark.parametrize("period", [0.1, 0.3])
def test_evaluations_come_at_the_first_update_of_each_period(recipe: Recipe, tmp_path: Path, period: float) -> None:
    events = steps(Run.create(tmp_path / "run", recipe.with_({"every.evaluate_epochs": period, "budget.epochs": 1})))
    every = round(10 * period)
    assert [e.step for e in events if isinstance(e, Evaluated)] == [*range(every, 10, every), 10]


def test_the_steady_rate_counts_every_second_but_those_of_evaluating_and_saving(recipe: Recipe, tmp_path: Path) -> None:
    events: list[Event] = []
    for event in steps(Run.create(tmp_path / "run", recipe.with_({"budget.epochs": 1}))):
        events.append(event)
        time.sleep(0.03 if isinstance(event, Step) else 0.2 if isinstance(event, Evaluated | Saved) else 0)
    seconds = [32 * 5 / e.images_per_second for e in _of(Logged, events)]
    assert min(seconds) > 5 * 0.03
    apart = 2 * 0.2 + sum(e.seconds for e in events if isinstance(e, Evaluated | Saved))
    assert sum(seconds) < events[-1].time - events[0].time - apart


def test_a_warm_up_longer_than_the_run_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    train(Run.create(tmp_path / "as-long", recipe.with_({"optim.warmup_epochs": 2.0})))
    with pytest.raises(
        RecipeError, match=r"warm-up of 2.1 epochs is longer than the run of 2: .*shorten it \(--warmup-epochs"
    ):
        train(Run.create(tmp_path / "longer", recipe.with_({"optim.warmup_epochs": 2.1})))


@pytest.mark.parametrize(("batch_size", "is_said"), [(32, False), (33, True)])
def test_a_batch_of_more_than_a_tenth_of_the_images_is_said(
    recipe: Recipe, tmp_path: Path, batch_size: int, is_said: bool
) -> None:
    run = Run.create(tmp_path / "run", recipe.with_(batch_size=batch_size))
    notices = [e.message for e in steps(run) if isinstance(e, Noticed)]
    wanted = "a batch of 33 is more than a tenth of the 320 training images, so the run has only 20 updates"
    assert any(message.startswith(wanted) for message in notices) is is_said


def test_the_gradient_norm_leaves_out_updates_that_the_loss_scaling_passed_over() -> None:
    device = torch.device("cpu")
    meters = Meters(device)
    for norm in (float("inf"), 3.0, float("nan"), 5.0):
        meters.add_norm(torch.tensor(norm))
    meters.add(torch.tensor([4.0, 4.0, 4.0]))
    assert meters.take(Engine(device)) == (1.0, 1.0, 4.0)


def test_torch_is_left_as_it_was(recipe: Recipe, tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    try:
        train(Run.create(tmp_path / "run", recipe))
        for _ in steps(Run.create(tmp_path / "early", recipe)):
            break
        assert torch.get_num_threads() == 3
        assert torch.get_rng_state().equal(state)
    finally:
        torch.set_num_threads(before)


def test_a_fraction_of_an_epoch_and_a_number_of_steps_are_fine(recipe: Recipe, tmp_path: Path) -> None:
    half = Run.create(tmp_path / "half", recipe.with_({"budget.epochs": 0.5}))
    three = Run.create(tmp_path / "three", recipe.with_({"budget.epochs": None, "budget.steps": 3}))
    assert train(half).step == 5
    assert train(three).step == 3


def test_the_last_update_counts_as_the_epochs_asked_for(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"budget.epochs": 2, "batch_size": 60}))
    happened = list(steps(run))
    assert [event.epoch for event in happened if isinstance(event, Evaluated)] == [pytest.approx(1.125), 2.0]
    assert [event.epoch for event in happened if isinstance(event, Logged)][-1] == 2.0
    assert next(event.steps for event in happened if isinstance(event, Started)) == 11  # 660 images, of 640
    summary = summarise(run)
    assert summary.progress.epochs == summary.progress.epoch == 2.0


def test_a_batch_larger_than_the_data_is_filled_from_the_next_epochs(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"batch_size": 500, "budget.epochs": 3}))
    events = list(steps(run))
    assert [e.n for e in _of(Step, events)] == [500, 500]


def test_an_interrupted_run_is_told_so_and_goes_on_from_its_newest_checkpoint(recipe: Recipe, tmp_path: Path) -> None:
    for name, at, why in (
        ("early", 3, "stopped by the user before anything was saved: the same command starts from the beginning"),
        ("later", 17, "stopped by the user, saved at step 10: the same command resumes it"),
    ):
        run, asked = Run.create(tmp_path / name, recipe), iter(range(100))

        def interrupt(asked: Iterator[int] = asked, at: int = at) -> None:
            if next(asked) == at:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            list(steps(run, stop=interrupt))
        assert (summarise(run).course.status, summarise(run).course.why) == ("interrupted", why)
        assert train(run).status == "finished"


def test_without_validation_the_run_ends_with_its_weights(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"data.holdout": 0.0}))
    assert train(run).evaluated is None
    assert run.weights.exists()


def test_a_finished_run_is_left_alone(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    first = train(run)
    before = (run.directory / "events.jsonl").read_bytes()
    assert list(steps(run)) == []
    assert train(run) == first
    assert (run.directory / "events.jsonl").read_bytes() == before


def test_the_best_weights_are_kept_beside_the_last(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe)
    events = list(steps(run))
    best = [event for event in _of(Evaluated, events) if event.is_best][-1]
    _, about = checkpoints.read_weights(run.directory / "best.safetensors")
    assert about["step"] == best.step
    assert about["classes"] == [str(k) for k in range(10)]


def test_folders_and_record_files_train_alike(
    recipe: Recipe, digits_folder: Path, tmp_path: Path, weights: Weights
) -> None:
    train(Run.create(tmp_path / "a", recipe))
    train(Run.create(tmp_path / "b", recipe.with_({"data.train": str(digits_folder)})))
    assert weights(tmp_path / "a") == weights(tmp_path / "b")


def test_validation_data_with_other_classes_are_refused(
    recipe: Recipe, tmp_path: Path, write_digits: Callable[[Path, int, int], Path]
) -> None:
    pack(write_digits(tmp_path / "three", 60, 3), tmp_path / "three")
    run = Run.create(tmp_path / "run", recipe.with_({"data.val": str(tmp_path / "three.rec")}))
    with pytest.raises(DataError, match=r"has other classes .*3, 4, .*--classes"):
        train(run)


def test_a_device_that_is_not_there_is_refused(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"parallel.device": "cuda:77"}))
    with pytest.raises(RecipeError, match=r"cuda:77.*sees \d+ GPUs.*--device cpu"):
        train(run)


def test_a_loss_that_is_no_number_ends_the_run_before_it_is_saved(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"optim.lr": 1e30, "every.save_steps": 1, "every.log_steps": 100}))
    with pytest.raises(DivergedError, match=r"the loss is (nan|inf) at step \d+ .*lower the learning rate"):
        train(run)
    assert all(torch.isfinite(t).all() for t in _newest_model(run).values())


def test_weights_that_are_no_numbers_are_not_saved(recipe: Recipe, tmp_path: Path) -> None:
    # The loss of an update is that of the weights before it.
    changed = recipe.with_({"optim.lr": 1e39, "budget.epochs": None, "budget.steps": 1, "data.holdout": 0.0})
    run = Run.create(tmp_path / "run", changed)
    with pytest.raises(DivergedError, match="some weights are NaN or infinite at step 1"):
        train(run)
    assert not list(run.checkpoints.iterdir()) and not run.weights.exists()


def test_a_run_whose_last_evaluation_gives_no_number_has_failed(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"optim.lr": 1e35, "budget.epochs": None, "budget.steps": 1}))
    with pytest.raises(DivergedError, match=r"the loss on the validation images is (nan|inf) at step 1"):
        train(run)
    assert run.finished() is None
    assert [path.name for path in run.directory.glob("*.safetensors")] == []


def test_what_ends_an_attempt_is_written_with_its_step(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"batch_size": 2**20, "data.size": 4096}))
    with pytest.raises(
        FailedError, match=r"the memory is not enough for batch_size=1048576 \(.*\): lower --batch-size"
    ):
        train(run)
    assert [(e.error, e.step) for e in run.events() if isinstance(e, Failed)] == [("FailedError", 0)]
    run = Run.create(tmp_path / "other", recipe.with_({"optim.lr": 1e30, "every.log_steps": 1}))
    with pytest.raises(DivergedError, match=r"at step (\d+)") as caught:
        train(run)
    (failed,) = [e for e in run.events() if isinstance(e, Failed)]
    assert failed.step > 0 and f"at step {failed.step} " in str(caught.value)


def test_an_evaluation_that_fails_does_not_cost_the_updates_before_it(recipe: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"every.save_minutes": 600}))
    with pytest.raises(OSError, match="the validation data are gone"):
        list(steps(run, stop=_gone_after(run, 10)))
    events = list(run.events())
    assert [event.step for event in _of(Saved, events)] == [10]
    assert isinstance(events[-1], Failed) and events[-1].step == 10
    train(run)
    assert [event.step for event in _of(Step, list(run.events()))][10:] == list(range(11, 21))


def _gone_after(run: Run, step: int) -> Callable[[], None]:
    """Raises when it is asked in the evaluation that follows a step."""
    asked = []

    def stop() -> None:
        done = [event.step for event in run.events() if isinstance(event, Step)]
        asked.append(done[-1] if done else 0)
        if asked.count(step) == 2:  # the first time it is the update that asks
            raise OSError("the validation data are gone")

    return stop


def _newest_model(run: Run) -> dict[str, torch.Tensor]:
    place = checkpoints.newest(run.checkpoints)
    return {} if place is None else checkpoints.load(place)["model"]


def test_precision_is_kept_out_of_the_way_of_evaluation(recipe: Recipe, tmp_path: Path) -> None:
    changed = replace(recipe, precision=replace(recipe.precision, name="bf16"))
    run = Run.create(tmp_path / "run", changed)
    assert train(run).evaluated is not None
    tensors, _ = checkpoints.read_weights(run.weights)
    assert all(t.dtype == torch.float32 for t in tensors.values() if t.is_floating_point())


_UNSEEN = """
import torch
from torch import nn

class Unseen(torch.autograd.Function):  # a weight that no image shows, and whose gradient nobody set
    @staticmethod
    def forward(ctx, weight):
        return torch.zeros(())

    @staticmethod
    def backward(ctx, slope):
        return torch.full((1,), float("nan"))

class Net(nn.Module):
    def __init__(self, channels, classes):
        super().__init__()
        self.unseen, self.head = nn.Parameter(torch.zeros(1)), nn.Linear(channels * 64, classes)

    def forward(self, images):
        return self.head(images.flatten(1)) + Unseen.apply(self.unseen)

def make(num_classes, channels=3):
    return Net(channels, num_classes)
"""


@pytest.mark.parametrize("numbers", ["fp32", "bf16"])
def test_weights_that_no_image_shows_are_looked_at_before_the_best_are_kept(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: str
) -> None:
    (tmp_path / "unseen_net.py").write_text(_UNSEEN)
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = {"model.name": "unseen_net:make", "data.size": 8, "precision.name": numbers, "optim.ema": None}
    run = Run.create(tmp_path / "run", recipe.with_(changes))
    remedy = r"\(fp32, learning rate \S+\): lower" if numbers == "fp32" else r"\(bf16, .*\): compute in fp32 \(--prec"
    with pytest.raises(DivergedError, match=rf"some weights are NaN or infinite at step 10 {remedy}"):
        train(run)
    assert next(event.loss for event in run.events() if isinstance(event, Evaluated)) < 10  # which says nothing
    assert not list(run.directory.glob("*.safetensors"))
