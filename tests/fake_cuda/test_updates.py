"""Updates of real runs on a pretended GPU: none waits for it, in whatever way a recipe trains."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from PIL import Image
from tests.fake_cuda.device import FakeGpu, Fault, fake_gpu

from steadytrain.config import Budget, Data, Every, Model, Optim, Parallel, Recipe
from steadytrain.data.loader import Crop
from steadytrain.data.loader.image_cache import DeviceCache, Shifts
from steadytrain.data.packing.pack import pack
from steadytrain.events import Event, Step
from steadytrain.optim import kinds
from steadytrain.run import Run
from steadytrain.training import steps
from steadytrain.training.state import Count, Meters

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: tests/gpu says the same of it")

IMAGES, BATCH = 96, 16  # six updates an epoch
WATCHED = (1, 3)
"""The updates between which faults are looked for: the first one makes what later ones find."""

ALL_TRANSFORMS = ["vflip", "rotate:10", "shear:0.1", "color:0.4,0.4,0.4,0.1", "grey:0.5", "erase:0.5"]
TRANSFORMS = (*ALL_TRANSFORMS, "randaugment:2,9", "trivialaugment", "autoaugment", "augmix", "mixup:0.2", "cutmix:1")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "pure-bf16", "pure-fp16")
EVERYTHING: dict[str, Any] = {
    "data.transforms": ["randaugment:2,9", "erase", "mixup:0.2", "cutmix:1"],
    "optim.ema": 0.99,
    "optim.clip_norm": 1.0,
    "optim.accumulate": 2,
}

CASES: dict[str, dict[str, Any]] = {
    **{f"{name}": {"optim.name": name} for name in kinds()},
    **{f"{name} bf16 cuda:3": {"optim.name": name, "precision.name": "bf16"} for name in ("adamw", "nadam", "sgld")},
    **{f"{name} fp16": {"optim.name": name, "precision.name": "fp16"} for name in ("sgd", "nag", "adam", "adamw")},
    **{f"sgd {name}": {"precision.name": name} for name in PRECISIONS[1:] if name != "fp16"},
    **{f"adamw {name}": {"optim.name": "adamw", "precision.name": name} for name in ("pure-bf16", "pure-fp16")},
    "lamb": {"optim.name": "timm/lamb", "precision.name": "bf16"},
    "lars": {"optim.name": "timm/lars"},
    "lbsgd lars": {"optim.name": "lbsgd", "optim.options": {"warmup_strategy": "lars", "batch_scale": 2}},
    "foreach": {"optim.options": {"foreach": True}},
    **{name: {"data.transforms": [name]} for name in TRANSFORMS},
    "mixup and cutmix": {"data.transforms": ["mixup:0.2", "cutmix:1"], "precision.name": "bf16"},
    "all transforms cuda:3": {"data.transforms": ALL_TRANSFORMS},
    **{f"everything {name} cuda:3": {**EVERYTHING, "precision.name": name} for name in ("fp32", "fp16", "pure-bf16")},
    "ema": {"optim.ema": 0.99},
    "ema of pure bf16": {"optim.ema": 0.99, "precision.name": "pure-bf16"},
    "swa": {"optim.swa": 0.1},
    "swa fp16 clip": {"optim.swa": 0.1, "optim.clip_norm": 1.0, "precision.name": "fp16"},
    "clip": {"optim.clip_norm": 1.0},
    "accumulate": {"optim.accumulate": 4},
    "accumulate fp16": {"optim.accumulate": 2, "precision.name": "fp16"},
    "recompute": {"parallel.recompute": True},
    "recompute bf16 accumulate": {"parallel.recompute": True, "precision.name": "bf16", "optim.accumulate": 2},
    "class weights": {"optim.class_weights": "balanced"},
    "class weights mixup": {"optim.class_weights": "balanced", "data.transforms": ["mixup:0.2"]},
    "label smoothing": {"optim.label_smoothing": 0.1},
    "focal": {"optim.loss": "focal:2"},
    "binary of mixed classes": {"optim.loss": "binary", "data.transforms": ["cutmix:1"]},
    "several labels": {"data.labels": "several"},
    "several labels weighted": {"data.labels": "several", "optim.class_weights": "balanced", "precision.name": "bf16"},
    "several labels mixed": {"data.labels": "several", "data.transforms": ["mixup:0.2"]},
    "frozen batch norms": {"model.batch_norm": "frozen"},
    "head": {"model.train": "head"},
    "head, then all": {"model.train": "head:0.33+full", "optim.clip_norm": 1.0, "optim.ema": 0.99},
    "gradual": {"model.train": "gradual:0.25", "optim.name": "adamw"},
    "discriminative": {"model.train": "discriminative", "model.batch_norm": "frozen", "precision.name": "bf16"},
    "momentum that moves": {"optim.schedule": "one-cycle"},
    "batch that grows": {"optim.grow_batch": ["2@0.33"]},
    "images that grow": {"data.grow_size": ["8@0", "12@0.33"]},
    "channels first": {"precision.channels_last": False},
    "deterministic": {"parallel.deterministic": True},
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small images of noise in four classes: ``photos.rec``; and beside it a table of several labels for each."""
    folder, draw = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    lines = ["path,labels"]
    for k in range(IMAGES):
        path = folder / "images" / f"class{k % 4}" / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (12, 12, 3), dtype=np.uint8)).save(path)
        lines.append(f"{path.relative_to(folder / 'images')},{'red;blue' if k % 3 else 'green'}")
    (folder / "images" / "labels.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    pack(folder / "images", folder / "photos")
    return folder


def recipe_of(photos: Path, index: int, changes: Mapping[str, Any]) -> Recipe:
    is_several = changes.get("data.labels") == "several"
    rate = 0.01 if changes.get("optim.name", "sgd") in ("sgd", "nag", "lbsgd") else 1e-4
    return Recipe(
        data=Data(train=str(photos / ("images/labels.csv" if is_several else "photos.rec")), holdout=0.0, pad=1),
        model=Model("digits", options={"width": 4}),
        optim=Optim(lr=rate),
        budget=Budget(steps=10),
        parallel=Parallel(device=f"cuda:{index}", threads=1, compute_threads=1),
        every=Every(log_steps=1000),
        batch_size=BATCH,
    ).with_({key: value for key, value in changes.items() if key != "data.labels"})


def faults_of(recipe: Recipe, run: Path, index: int = 0) -> list[Fault]:
    """Train on a pretended GPU; return what its host met between two updates."""
    made, (first, last) = 0, WATCHED
    with fake_gpu(index) as gpu, closing(cast("Generator[Event]", steps(Run.create(run, recipe)))) as events:
        for event in events:
            made = event.step if isinstance(event, Step) else made
            gpu.is_watching = first <= made < last
            if made == last:
                return gpu.faults
    raise AssertionError(f"the run ended at update {made}")


REPEATED = {
    *("everything fp32 cuda:3", "adamw bf16 cuda:3", "adamw pure-bf16", "accumulate fp16", "several labels mixed"),
    *("recompute bf16 accumulate", "class weights mixup", "mixup and cutmix", "sgd fp16"),
    *("nadam bf16 cuda:3", "sgld bf16 cuda:3", "nag fp16", "adam fp16", "sgd tf32", "sgd bf16", "sgd pure-fp16"),
    *("autoaugment", "trivialaugment"),  # other draws of randaugment's operations
    *(name for name in TRANSFORMS if name in ALL_TRANSFORMS or name in EVERYTHING["data.transforms"]),
}
"""Cases whose operations others have as well, together with more: with the slow tests."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in REPEATED else ()) for name in CASES]
)
def test_updates_do_not_wait_for_the_gpu(name: str, photos: Path, tmp_path: Path) -> None:
    index = 3 if name.endswith("cuda:3") else 0
    faults = faults_of(recipe_of(photos, index, CASES[name]), tmp_path / "run", index)
    assert not faults, "\n".join(map(str, faults))


def test_batches_of_images_that_lie_on_the_gpu_do_not_wait_for_it() -> None:
    with fake_gpu(3) as gpu:
        cache = DeviceCache(gpu.device, Crop(kind="pad-crop", size=12, pad=1, flip=True))
        cache._images = torch.empty(IMAGES, 12, 12, 3, dtype=torch.uint8, device=gpu.device)
        gpu.is_watching = True
        where = np.zeros(BATCH, np.int64)
        images = cache.gather(Shifts(where, where, where, where > 0))
    assert images.shape == (BATCH, 12, 12, 3) and images.device == gpu.device and gpu.faults == []


@pytest.mark.parametrize("optimizer", ["rmsprop", "lbsgd"])
def test_fp16_waits_once_an_update_where_the_optimizer_is_not_fused(
    optimizer: str, photos: Path, tmp_path: Path
) -> None:
    recipe = recipe_of(photos, 0, {"optim.name": optimizer, "precision.name": "fp16"})
    faults = faults_of(recipe, tmp_path / "run")
    assert len(faults) == WATCHED[1] - WATCHED[0]
    assert all(what.startswith("a wait: ") and "precision.py" in place for what, place in faults), faults


def _wait(counts: torch.Tensor) -> None:
    counts.sum().item()


def _copy(counts: torch.Tensor) -> None:
    torch.ones(3).to(counts.device, non_blocking=True)


def _blocking_copy(counts: torch.Tensor) -> None:
    torch.tensor([1.0, 2.0], device=counts.device)


def _read_all(counts: torch.Tensor) -> None:
    counts.cpu()


def _values_decide_a_shape(counts: torch.Tensor) -> None:
    counts[counts > 0]


def _event(counts: torch.Tensor) -> None:
    torch.cuda.Event(enable_timing=True).record()  # type: ignore[no-untyped-call]


def _event_elsewhere(counts: torch.Tensor) -> None:
    other = torch.device("cuda", counts.device.index - 1)
    torch.cuda.Event().record(torch.cuda.current_stream(other))  # type: ignore[no-untyped-call]


def _mix(counts: torch.Tensor) -> None:
    counts += torch.ones(3, device=torch.device("cuda", counts.device.index - 1))


def _mix_with_the_host(counts: torch.Tensor) -> None:
    counts += torch.ones(3)


def _synchronize(counts: torch.Tensor) -> None:
    torch.cuda.synchronize(counts.device)


PLANTS: dict[Callable[[torch.Tensor], None], str] = {
    _wait: "a wait: _local_scalar_dense of float32[]",
    _copy: "a pageable copy of float32[3]",
    _blocking_copy: "a blocking copy of float32[2]",
    _read_all: "a blocking copy of float32[3] on cuda:3 to cpu",
    _values_decide_a_shape: "a wait: nonzero of bool[3]",
    _event: "an event without a stream",
    _event_elsewhere: "an event in a stream of cuda:2",
    _mix: "several devices: aten::add_ of tensors on cuda:2 and cuda:3",
    _mix_with_the_host: "several devices: aten::add_ of tensors on cpu and cuda:3",
    _synchronize: "a wait: torch.cuda.synchronize",
}


def test_each_planted_fault_is_found_where_it_stands(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = Meters.add_later
    found, plant_in = dict[str, Fault](), list[FakeGpu]()

    def plant_and_add(
        meters: Meters, loss: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, count: Count
    ) -> None:
        add(meters, loss, logits, labels, count)
        for fault in PLANTS:
            gpu, seen = plant_in[0], len(plant_in[0].faults)
            with suppress(RuntimeError):  # torch refuses some of them, too
                fault(loss.float().expand(3).clone())
            found[fault.__name__] = gpu.faults[seen] if len(gpu.faults) > seen else Fault("nothing", "")

    monkeypatch.setattr(Meters, "add_later", plant_and_add)
    run = Run.create(tmp_path / "run", recipe_of(photos, 3, {}))
    with fake_gpu(3) as gpu, closing(cast("Generator[Event]", steps(run))) as events:
        plant_in.append(gpu)
        for event in events:
            gpu.is_watching = True
            if isinstance(event, Step):
                break
    for fault, what in PLANTS.items():
        assert found[fault.__name__].what.startswith(what), fault.__name__
        number = fault.__code__.co_firstlineno
        assert found[fault.__name__].place in {f"{__file__}:{number + k}" for k in (1, 2)}
