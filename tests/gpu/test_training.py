"""The same code on a GPU: no hidden wait in the loop, the same order, resume. One call runs them: pytest -m gpu."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.data.loader.pictures import small_pngs

from steadytrain.config import Recipe
from steadytrain.data.loader import Batch, Crop, ImageLoader, ResidentBatch
from steadytrain.events import Ended, Evaluated, FeedStats, Logged, Started, Step
from steadytrain.run import Run
from steadytrain.training import steps, train
from steadytrain.training.data import load

pytestmark = pytest.mark.gpu


@pytest.fixture
def on_gpu(recipe: Recipe) -> Recipe:
    return recipe.with_({"parallel.device": "cuda"})


def test_steps_between_log_lines_never_wait_for_the_device(on_gpu: Recipe, tmp_path: Path) -> None:
    changed = on_gpu.with_({"every.log_steps": 1000, "optim.ema": 0.99, "optim.clip_norm": 1.0, "data.holdout": 0.0})
    for event in steps(Run.create(tmp_path / "run", changed)):
        if isinstance(event, Step) and event.step == 3:
            torch.cuda.set_sync_debug_mode("error")
        if isinstance(event, Step) and event.step == 17:
            torch.cuda.set_sync_debug_mode("default")


def test_a_gpu_sees_the_same_samples_and_learns_alike(recipe: Recipe, on_gpu: Recipe, tmp_path: Path) -> None:
    losses = {}
    for name, changed in (("cpu", recipe), ("gpu", on_gpu)):
        events = list(steps(Run.create(tmp_path / name, changed)))
        assert [e.n for e in events if isinstance(e, Evaluated)] == [80, 80]
        losses[name] = [e.loss for e in events if isinstance(e, Logged)]
    assert losses["gpu"] == pytest.approx(losses["cpu"], rel=0.05)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_stopped_run_goes_on(on_gpu: Recipe, tmp_path: Path, precision: str) -> None:
    run = Run.create(tmp_path / "run", on_gpu.with_({"precision.name": precision}))
    seen: list[Step] = []
    for event in steps(run, stop=lambda: "SIGTERM" if len(seen) == 7 else None):
        seen.extend([event] if isinstance(event, Step) else [])
    assert train(run).step == 20
    ended = [e.status for e in run.events() if isinstance(e, Ended)]
    assert ended == ["preempted", "finished"]


def test_memory_is_in_segments_that_grow_or_as_the_user_says(
    on_gpu: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def trained(name: str) -> tuple[str, set[bool]]:
        torch.cuda.empty_cache()
        run = Run.create(tmp_path / name, on_gpu.with_({"budget.epochs": None, "budget.steps": 4}))
        kinds: set[bool] = set()
        for event in steps(run):
            if isinstance(event, Step):
                kinds = {segment["is_expandable"] for segment in torch.cuda.memory_snapshot()}  # type: ignore[no-untyped-call]
        return next(event.machine["segments"] for event in run.events() if isinstance(event, Started)), kinds

    events, kinds = trained("grows")
    assert (events, True in kinds) == ("growing", True)
    os.environ.pop("PYTORCH_ALLOC_CONF")  # of the first run; what is undone at the end shall not put it back
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "expandable_segments:False")
    assert trained("asked")[0] == "PYTORCH_ALLOC_CONF"


def test_pinned_batches_arrive_as_they_were_sent() -> None:
    import numpy as np

    def batches() -> list[Batch]:
        draw = np.random.default_rng(0)
        return [
            Batch(
                draw.integers(0, 256, (32, 64, 64, 3), dtype=np.uint8),
                np.full(32, k),
                np.arange(32),
                np.arange(32) + 32 * k,
            )
            for k in range(20)
        ]

    sent = batches()
    device = torch.device("cuda", 0)
    for k, loaded in enumerate(load(batches(), device)):
        assert loaded.images.cpu().equal(torch.from_numpy(sent[k].images))
        assert loaded.labels.tolist() == [k] * 32


def test_images_that_fit_lie_on_the_gpu_and_its_batches_are_those_of_the_host() -> None:
    gpu = torch.device("cuda", 0)
    for cut in (Crop(kind="pad-crop", size=32, pad=4, flip=True), Crop(kind="none", size=32)):
        ours, theirs = (
            ImageLoader(small_pngs(200, height=32, width=32), cut, batch_size=64, stop=6400, pin=True, device=there)
            for there in (gpu, None)
        )
        for this, other in zip(load(ours, gpu), load(theirs, gpu), strict=True):
            assert this.images.device == gpu and this.images.equal(other.images) and this.labels.equal(other.labels)
        assert ours.stats().device_bytes == 200 * 32 * 32 * 3
        assert isinstance(list(ours)[-1], ResidentBatch)


def test_a_run_keeps_its_images_on_the_gpu_and_tells_it(on_gpu: Recipe, tmp_path: Path) -> None:
    feed_stats = [event for event in steps(Run.create(tmp_path / "run", on_gpu)) if isinstance(event, FeedStats)]
    assert feed_stats[-1].device_bytes == feed_stats[-1].kept_bytes == 320 * 8 * 8
