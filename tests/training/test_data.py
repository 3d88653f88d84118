"""Batches on their device: copied there, or gathered from images that are there already, they are the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.data.loader.pictures import small_pngs

from steadytrain.config import Recipe
from steadytrain.data.loader import Crop, ImageLoader
from steadytrain.events import FeedStats
from steadytrain.run import Run
from steadytrain.training import build, steps
from steadytrain.training.data import load

HERE = torch.device("cpu")


def test_what_is_gathered_on_the_device_is_what_would_be_copied_to_it() -> None:
    source, cut = small_pngs(20), Crop(kind="pad-crop", size=16, pad=2, flip=True)
    feeds = [ImageLoader(source, cut, batch_size=8, stop=160, seed=1, device=there) for there in (HERE, None)]
    for ours, theirs in zip(*(load(feed, HERE) for feed in feeds), strict=True):
        assert ours.images.equal(theirs.images) and ours.labels.equal(theirs.labels)
    assert [feed.stats().device_bytes for feed in feeds] == [20 * 16 * 16 * 3, 0]


def test_a_run_whose_images_are_on_the_device_learns_the_same_and_tells_it(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Callable[[Path], bytes]
) -> None:
    values = {}
    for name, feed in (("host", ImageLoader), ("device", partial(ImageLoader, device=HERE))):
        # On a CPU a run names no device, since its batches are there already.
        monkeypatch.setattr(build, "ImageLoader", lambda *data, device, feed=feed, **options: feed(*data, **options))
        events = steps(Run.create(tmp_path / name, recipe))
        values[name] = [event for event in events if isinstance(event, FeedStats)][-1]
    assert weights(tmp_path / "device") == weights(tmp_path / "host")
    assert values["host"].kept_bytes == values["device"].kept_bytes == values["device"].device_bytes == 320 * 8 * 8
    assert values["host"].device_bytes == 0
