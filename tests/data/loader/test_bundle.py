"""Several small batches in one go are the batches that are made one by one."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.loader.pictures import everything, same, small_pngs

from steadytrain.data.loader import BlockShuffle, Crop, ImageLoader, bundle

CUTS = [
    Crop(kind="pad-crop", size=16, pad=2, flip=True),
    Crop(kind="none", size=16, flip=False),
    Crop(kind="pad-crop", size=12, flip=False),
]


@pytest.mark.parametrize("cut", CUTS, ids=["pad", "none", "crop"])
@pytest.mark.parametrize(
    "more",
    [{}, {"shard": (1, 3), "stop": 900}, {"share": (3, 17), "stop": 850}, {"blocks": BlockShuffle(size=4, window=3)}],
    ids=["stream", "shard", "share", "blocks"],
)
def test_they_are_the_same_as_one_by_one(cut: Crop, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    data, given = small_pngs(40), {"batch_size": 10, "seed": 3, "stop": 900} | more
    together = everything(ImageLoader(data, cut, threads=2, **given))
    with monkeypatch.context() as patched:
        patched.setattr(bundle, "MOST", 1)
        assert same(together, everything(ImageLoader(data, cut, threads=2, **given))), "kept"
    assert same(together, everything(ImageLoader(data, cut, threads=2, keep_bytes=0, **given))), "decoded each time"


def test_an_evaluation_has_its_short_last_batch() -> None:
    feed = ImageLoader(small_pngs(43), CUTS[0], batch_size=10, train=False, threads=2)
    first, second = everything(feed), everything(feed)
    assert same(first, second) and [len(batch) for batch in feed] == [10, 10, 10, 10, 3]


def test_when_all_images_are_kept_the_threads_end_and_only_small_batches_are_made_together() -> None:
    small = ImageLoader(small_pngs(40), CUTS[0], batch_size=10, threads=2)
    batches = iter(small)
    for _ in range(20):
        next(batches)
    starved = small.stats().starved
    for _ in range(20):
        next(batches)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("feed-")]
    told = small.stats()
    assert told.by_loop and told.depth == bundle.MOST
    assert told.starved == starved, "what is made when it is wanted is ready"
    assert small._filler.together(10) == bundle.MOST
    assert small._filler.together(2**20) == 1
    small.close()


def test_batches_on_a_device_are_made_together_as_well() -> None:
    data = small_pngs(40)
    given: dict[str, Any] = {"batch_size": 10, "seed": 3, "stop": 900}
    on_device = ImageLoader(data, CUTS[0], threads=2, device=torch.device("cpu"), **given)
    usual = ImageLoader(data, CUTS[0], threads=2, keep_bytes=0, **given)
    assert same(everything(on_device), everything(usual))
    assert on_device._filler.together(2**20) == bundle.MOST and on_device.stats().device_bytes > 0


def test_a_damaged_image_is_replaced_in_every_pass() -> None:
    data = small_pngs(40)
    data.images[7] = b"no image"
    given: dict[str, Any] = {"batch_size": 10, "seed": 3, "stop": 400, "on_bad": lambda bad: None}
    together = everything(ImageLoader(data, CUTS[0], threads=1, **given))
    assert same(together, everything(ImageLoader(data, CUTS[0], threads=1, keep_bytes=0, **given)))
    assert 7 not in np.unique(together[1])
