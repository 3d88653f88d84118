"""Images on a device: the same bytes from a gather there, where they fit, and otherwise as before.

torch's CPU is a device like any other here: the images are copied to it, and batches gathered there, by the same code.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.loader.pictures import Pictures, encode, everything, same, scene, small_pngs, write_records
from tests.data.loader.test_kept import CUTS, LARGE, LARGE_CUTS, names

from steadytrain.data.loader import BadImage, Batch, Crop, ImageLoader, ResidentBatch
from steadytrain.data.loader.dataset import ImageLoaderDataset, tensors
from steadytrain.data.loader.device_cache import Resident
from steadytrain.data.loader.gather import spots
from steadytrain.data.loader.image_cache import Kept

HERE = torch.device("cpu")
CUT = CUTS[0]
MOVED = [cut for cut in CUTS if cut.kind != "resized-crop"]


def taken(feed: ImageLoader) -> tuple[list[Batch], int]:
    """All batches, and how many of the last of them are gathered on the device."""
    batches = list(feed)
    there = [isinstance(batch, ResidentBatch) for batch in batches]
    assert there == sorted(there), "once there, always there"
    return batches, sum(there)


def images_of(batch: Batch) -> Any:
    return batch.gather().numpy() if isinstance(batch, ResidentBatch) else batch.images


@pytest.mark.parametrize("shape", [(16, 16), (16, 21), (24, 16)], ids=str)
@pytest.mark.parametrize("cut", MOVED, ids=names(MOVED))
def test_a_gather_on_the_device_gives_the_same_bytes(cut: Crop, shape: tuple[int, int]) -> None:
    source = small_pngs(37, height=shape[0], width=shape[1])
    there = ImageLoader(source, cut, batch_size=25, stop=600, seed=5, threads=2, device=HERE)
    batches, count = taken(there)
    images, ids, positions = everything(ImageLoader(source, cut, batch_size=25, stop=600, seed=5, keep_bytes=0))
    shifts = cut.only_shifts(*shape)
    assert (count > 4) == shifts and there.stats().device_bytes == (37 * shape[0] * shape[1] * cut.channels) * shifts
    assert np.array_equal(np.concatenate([images_of(batch) for batch in batches]), images)
    assert np.array_equal(np.concatenate([batch.images for batch in batches]), images)
    assert np.array_equal(np.concatenate([batch.ids for batch in batches]), ids)
    assert np.array_equal(np.concatenate([batch.positions for batch in batches]), positions)
    assert all(np.array_equal(batch.labels, source.labels[batch.ids]) for batch in batches)


def test_a_stream_goes_on_where_another_stopped() -> None:
    whole = everything(ImageLoader(small_pngs(20), CUT, batch_size=4, stop=120, seed=2))
    feed = ImageLoader(small_pngs(20), CUT, batch_size=4, start=40, stop=120, seed=2, device=HERE)
    assert same(whole, everything(feed), skip=40)
    assert same(whole, everything(feed), skip=40) and feed.stats().device_bytes


def test_a_second_evaluation_takes_its_images_from_the_device_and_counts_exactly() -> None:
    feed = ImageLoader(small_pngs(23), CUTS[4], batch_size=10, train=False, device=HERE)
    first, again = taken(feed), taken(feed)
    last, count = taken(feed)
    assert count == 3 and [len(batch) for batch in last] == [10, 10, 3]
    assert [batch.ids.tolist() for batch in last] == [batch.ids.tolist() for batch in first[0]]
    for batches in (again[0], last):
        assert all(np.array_equal(images_of(a), b.images) for a, b in zip(batches, first[0], strict=True))


def test_bad_images_are_replaced_there_too() -> None:
    images = list(small_pngs(20).images)
    images[3] = images[4] = b"nothing"
    runs, told = list[list[Batch]](), list[list[int]]()
    for device in (None, HERE):
        bad: list[BadImage] = []
        feed = ImageLoader(Pictures(images), CUT, batch_size=5, stop=200, device=device, on_bad=bad.append)
        runs.append(list(feed))
        told.append(sorted(one.id for one in bad))
    assert told == [[3, 4], [3, 4]] and isinstance(runs[1][-1], ResidentBatch)
    for host, there in zip(*runs, strict=True):
        assert np.array_equal(host.ids, there.ids) and np.array_equal(host.images, images_of(there))


def test_a_loop_of_ones_own_gets_tensors_on_the_device() -> None:
    ours, theirs = (
        ImageLoaderDataset(small_pngs(20), CUT, batch_size=4, steps=30, device=there, threads=1)
        for there in (HERE, None)
    )
    with_device = list(ours)
    for (images, labels), (others, other_labels) in zip(with_device, theirs, strict=True):
        assert images.equal(others) and labels.equal(other_labels)
        assert images.is_contiguous(memory_format=torch.channels_last)
    assert ours._feed.stats().device_bytes
    for made in (ours, theirs):
        made.close()


def test_tensors_of_a_kept_batch_stay_as_they_are() -> None:
    feed = ImageLoader(small_pngs(10), CUT, batch_size=5, stop=100, device=HERE)
    held = [tensors(batch)[0] for batch in feed]
    assert torch.cat(held).permute(0, 2, 3, 1).numpy().tobytes() == everything(feed)[0].tobytes()


def kept_of(feed: ImageLoader) -> Kept:
    list(feed)
    assert feed._filler.kept.full
    return feed._filler.kept


def test_what_does_not_fit_stays_on_the_host() -> None:
    kept = kept_of(ImageLoader(small_pngs(10), CUT, batch_size=5, stop=20))
    for budget, bytes_there in ((7679, 0), (7680, 7680)):
        resident = Resident(HERE, CUT, budget_bytes=budget)
        store = resident.wants(kept)
        assert store is not None and resident.wants(kept) is None and not resident.is_settled
        resident.load(store)
        assert resident.bytes == bytes_there and (resident.store is not None) == (bytes_there > 0)
        assert resident.is_settled


@pytest.mark.parametrize("name", LARGE)
def test_images_that_are_resized_or_of_several_sizes_stay_on_the_host(name: str) -> None:
    feed = ImageLoader(LARGE[name], LARGE_CUTS[0], batch_size=7, stop=70, device=HERE)
    kept = kept_of(feed)
    assert feed.stats().device_bytes == 0 and Resident(HERE, LARGE_CUTS[0]).wants(kept) is None
    assert feed.is_steady()


def test_large_images_that_are_only_moved_go_there_after_their_second_pass() -> None:
    source, cut = Pictures([encode(scene(i, 200, 240), "JPEG") for i in range(14)]), Crop(kind="pad-crop", size=200)
    batches, count = taken(ImageLoader(source, cut, batch_size=7, stop=140, seed=3, device=HERE))
    others = list(ImageLoader(source, cut, batch_size=7, stop=140, seed=3, keep_bytes=0))
    assert 4 < count < 17
    assert all(np.array_equal(images_of(a), b.images) for a, b in zip(batches, others, strict=True))


@pytest.mark.parametrize("options", [{"keep_bytes": 0}, {"place": "process"}], ids=str)
def test_where_nothing_is_kept_here_nothing_goes_there(options: dict[str, Any], tmp_path: Path) -> None:
    with (
        write_records(tmp_path / "small.rec", small_pngs(10)) as records,
        ImageLoader(records, CUT, batch_size=5, stop=100, device=HERE, **options) as feed,
    ):
        assert taken(feed)[1] == 0 and feed.stats().device_bytes == 0


def test_only_numbers_cross_with_a_batch() -> None:
    resident = Resident(HERE, CUT)
    store = resident.wants(kept_of(ImageLoader(small_pngs(10), CUT, batch_size=5, stop=20)))
    assert store is not None
    resident.load(store)
    store.pixels[:] = 0  # the host's copy is not looked at
    where = spots(CUT, 16, 16, np.arange(8), np.full((8, 3), 0.5))
    assert resident.gather(where).any() and resident._sent(where).nbytes == 8 * 4 * 8


def test_what_several_processes_keep_together_goes_to_the_device_of_each() -> None:
    source, given = small_pngs(35), dict[str, Any](batch_size=7, seed=5, stop=1400)
    feeds = [ImageLoader(source, CUT, **given, shard=(i, 2), launch="a test", device=HERE) for i in range(2)]
    batches = [batch for pair in zip(*feeds, strict=True) for batch in pair]
    images, ids, _ = everything(ImageLoader(source, CUT, **given, keep_bytes=0))
    assert np.array_equal(np.concatenate([images_of(batch) for batch in batches]), images)
    assert np.array_equal(np.concatenate([batch.ids for batch in batches]), ids)
    assert all(feed.stats().device_bytes == feed.stats().shared_bytes == 35 * 768 for feed in feeds)
