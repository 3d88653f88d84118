"""Progressive resizing: which size images have is a function of the position, for every rank, attempt and batch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.data.loader.pictures import mixed_jpegs, small_pngs, write_records

from steadytrain.config import Recipe
from steadytrain.data.loader import BlockShuffle, Crop, ImageLoader
from steadytrain.errors import InputError, RecipeError
from steadytrain.events import Compiled, Step
from steadytrain.reports.schedule import forecast
from steadytrain.run import Run
from steadytrain.training import steps, train
from steadytrain.training.session.opening import open_session

Weights = Callable[[Path], bytes]
SIZES = [(0, 16), (24, 40), (48, 24)]
PICTURES = {"small": small_pngs(30), "photos": mixed_jpegs(30)}


def squares(loader: ImageLoader) -> list[tuple[int, bytes, int]]:
    """Position, pixels and record of every image."""
    sizes = []
    for batch in loader:
        assert batch.images.shape[1] == batch.images.shape[2]
        rows = zip(batch.positions.tolist(), batch.images, batch.ids.tolist(), strict=True)
        sizes += [(position, bytes([image.shape[0]]) + image.tobytes(), number) for position, image, number in rows]
    return sizes


@pytest.mark.parametrize("kind", ["resized-crop", "pad-crop", "none"])
@pytest.mark.parametrize("name", list(PICTURES))
def test_images_are_those_of_a_loader_of_their_size_whatever_is_in_flight(name: str, kind: Any) -> None:
    source, crop = PICTURES[name], Crop(kind=kind, size=32, flip=True)
    loaders = {"batch_size": 8, "seed": 3, "stop": 72}
    whole = squares(ImageLoader(source, crop, sizes=SIZES, threads=3, **loaders))  # type: ignore[arg-type]
    expected = []
    for (first, side), end in zip(SIZES, (24, 48, 72), strict=True):
        part = replace(crop, size=side)
        expected += squares(ImageLoader(source, part, batch_size=8, seed=3, start=first, stop=end, threads=1))
    assert whole == expected
    for start, batch_size, threads in ((16, 4, 1), (24, 8, 2), (40, 8, 5), (48, 12, 2)):  # resumed, in other batches
        rest = ImageLoader(
            source, crop, sizes=SIZES, batch_size=batch_size, seed=3, start=start, stop=72, threads=threads
        )
        assert squares(rest) == whole[start:]


def test_ranks_and_a_process_of_its_own_have_the_same_images(tmp_path: Path) -> None:
    source, crop = (
        write_records(tmp_path / "photos.rec", PICTURES["photos"]),
        Crop(kind="resized-crop", size=32, flip=True),
    )
    options: dict[str, Any] = {"sizes": SIZES, "seed": 3, "stop": 72, "blocks": BlockShuffle(size=3, window=2)}
    whole = squares(ImageLoader(source, crop, batch_size=8, **options))
    assert squares(ImageLoader(source, crop, batch_size=8, place="process", **options)) == whole
    kept = list(ImageLoader(source, crop, batch_size=8, place="process", **options))  # all of them at once
    assert [image.tobytes() for batch in kept for image in batch.images] == [square[1][1:] for square in whole]
    ranks = [squares(ImageLoader(source, crop, batch_size=4, share=(at, 8), **options)) for at in (0, 4)]
    assert sorted(ranks[0] + ranks[1]) == sorted(whole)


@pytest.mark.parametrize(
    ("sizes", "message"), [([(12, 32)], "position 12, where no batch"), ([(8, 0)], "sizes=0"), ([(-8, 8)], "sizes=-8")]
)
def test_a_size_within_a_batch_is_refused(sizes: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ImageLoader(PICTURES["small"], Crop(kind="none", size=8), batch_size=8, sizes=sizes)


@pytest.fixture
def growing(recipe: Recipe) -> Recipe:
    """320 images of 8 pixels, in 10 updates an epoch: 6 pixels at first, then 7 and 9; they are evaluated at 8."""
    return recipe.with_({"data.grow_size": ["6@0", "7@0.45", "9@1.2"], "budget.epochs": 2, "data.size": 8})


def _sizes(recipe: Recipe) -> list[tuple[int, int]]:
    return [(stage.position, stage.size) for stage in recipe.sizes(320, usual=8)]


def test_a_size_is_due_from_the_first_update_at_or_behind_its_epoch_on(growing: Recipe) -> None:
    assert _sizes(growing) == [(0, 6), (5 * 32, 7), (12 * 32, 9)]
    assert _sizes(growing.with_({"data.grow_size": ["7@1"]})) == [(0, 8), (320, 7)]
    larger = growing.with_({"optim.grow_batch": ["2@0.5"]})  # 5 updates of 32, then of 64
    assert _sizes(larger) == [(0, 6), (5 * 32, 7), (5 * 32 + 4 * 64, 9)]
    events = {moment.update: moment.event for moment in forecast(growing, 320).moments if moment.event}
    assert events[6] == "images of 7 pixels" and events[13] == "images of 9 pixels"


@pytest.mark.parametrize("updates", [5, *(pytest.param(updates, marks=pytest.mark.slow) for updates in (3, 14))])
def test_a_run_goes_on_with_the_same_bits_in_any_stage(
    growing: Recipe, tmp_path: Path, weights: Weights, updates: int
) -> None:
    growing = growing.with_({"data.transforms": ["erase:0.5", "mixup:0.2"], "optim.grow_batch": ["2@0.5"]})
    whole = Run.create(tmp_path / "whole", growing)
    train(whole)
    parts, seen = Run.create(tmp_path / "parts", growing), list[Step]()
    for event in steps(parts, stop=lambda: "SIGTERM" if len(seen) >= updates else None):
        if isinstance(event, Step):
            seen.append(event)
    train(parts)
    assert weights(whole.directory) == weights(parts.directory)
    plain = Run.create(tmp_path / "plain", growing.with_({"data.grow_size": []}))
    train(plain)
    assert weights(plain.directory) != weights(whole.directory)


def test_what_is_tried_and_measured_has_the_size_that_is_due(growing: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", growing)
    for event in steps(run, stop=lambda: "SIGTERM" if run.progress().position >= 7 * 32 else None):
        del event
    with run.log(0, attempt=9) as log, open_session(run, log, allow_import=False) as session:
        assert session.state.cursor.position == 7 * 32 and session.update.image_shape == (7, 7, 1)
        assert session.input.size == 8
        assert next(iter(session.feed)).images.shape == (32, 7, 7, 1)
        assert session.validation is not None and next(iter(session.validation.feed)).images.shape[1:] == (8, 8, 1)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ here: nothing can be compiled")
@pytest.mark.slow
def test_compiled_code_is_made_for_each_size(digits: Path, tmp_path: Path) -> None:
    words = ["--model", "digits", "--size", "8", "--grow-size", "6@0,7@0.3,9@0.6", "--batch-size", "32"]
    words += ["--device", "cpu", "--precision", "fp32", "--set", "data.pad=1", "--set", "budget.steps=8"]
    words += ["--set", "parallel.compute_threads=1"]
    for name, more in {"compiled": ["--compile"], "eager": []}.items():
        command = [sys.executable, "-m", "steadytrain", "train", str(digits), "--run", str(tmp_path / name)]
        subprocess.run([*command, *words, *more], check=True, capture_output=True, timeout=300)
    assert [event for event in Run.open(tmp_path / "compiled").events() if isinstance(event, Compiled)]
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("compiled", "eager"))
    for name, value in ours.items():
        torch.testing.assert_close(value, theirs[name], rtol=1e-3, atol=1e-4)


def test_a_network_of_one_size_is_refused_before_anything_is_trained(growing: Recipe, tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", growing.with_({"model.name": "mlp"}))
    with pytest.raises(RecipeError, match=r"data.grow_size=6@0,7@0.45,9@1.2 does not suit mlp: .*; leave it out"):
        train(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.grow_size": ["0@1"]}, "SIZE@EPOCH"),
        ({"data.grow_size": ["64@3", "96@3"]}, "rising epochs"),
        ({"data.grow_size": ["64"]}, "SIZE@EPOCH"),
        ({"data.grow_size": ["64@0"], "parallel.graph": True}, "one size of images"),
    ],
)
def test_what_cannot_be_is_refused(recipe: Recipe, changes: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        recipe.with_(changes)
    with pytest.raises(RecipeError, match="has 64@9, and the run of 2 epochs ends before that"):
        recipe.with_({"data.grow_size": ["64@9"], "budget.epochs": 2}).sizes(320, usual=8)
