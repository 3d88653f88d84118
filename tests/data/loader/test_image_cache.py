"""Kept images, on the host and on a device: the same bytes, within the budget, or not at all.

torch's CPU is a device like any other here: the images are copied to it, and batches gathered there, by the same code.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from PIL import Image
from tests.data.loader.pictures import Pictures, encode, everything, mixed_jpegs, same, scene, small_pngs, write_records

from steadytrain.data.images.decode import BadImageError
from steadytrain.data.loader import BadImage, Batch, Crop, ImageLoader, ResidentBatch
from steadytrain.data.loader.dataset import ImageLoaderDataset, tensors
from steadytrain.data.loader.image_cache import DeviceCache, ImageCache, shifts_of

CUTS = [
    Crop(kind="pad-crop", size=16, pad=3, flip=True),
    Crop(kind="pad-crop", size=16, pad=40),
    Crop(kind="pad-crop", size=12, pad=2, flip=True),
    Crop(kind="none", size=16, flip=True),
    Crop(kind="none", size=16),
    Crop(kind="none", size=14, crop=0.875, flip=True),
    Crop(kind="resized-crop", size=20, flip=True),
    Crop(kind="pad-crop", size=16, pad=3, flip=True, channels=1),
    Crop(kind="pad-crop", size=16, pad=3, flip=True, fit="squash"),
    Crop(kind="pad-crop", size=16, pad=3, flip=True, fit="pad", fill=(9, 99, 199)),
    Crop(kind="none", size=16, fit="pad", fill=(9, 99, 199)),
    Crop(kind="resized-crop", size=20, flip=True, fit="pad", fill=(9, 99, 199)),
]


def names(cuts: Sequence[Crop]) -> list[str]:
    return [f"{cut.kind} {cut.size} {cut.pad} {cut.flip} {cut.channels} {cut.fit}" for cut in cuts]


@pytest.mark.parametrize("shape", [(16, 16), (16, 21), (24, 16)], ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=names(CUTS))
def test_kept_images_give_the_same_bytes(cut: Crop, shape: tuple[int, int]) -> None:
    source = small_pngs(37, height=shape[0], width=shape[1])
    feeds = [
        ImageLoader(source, cut, batch_size=25, stop=100, seed=5, threads=2, keep_bytes=budget)
        for budget in (0, 10**9, 10**9)
    ]
    list(feeds[2])  # from now on everything of the third is in memory
    assert feeds[2]._worker.cache.full and feeds[0]._worker.cache.given_up
    images = [everything(feed)[0] for feed in feeds]
    assert np.array_equal(images[0], images[1])
    assert np.array_equal(images[0], images[2])


@pytest.mark.parametrize("kind", ["resized-crop", "pad-crop", "none"])
def test_kept_jpegs_far_larger_than_the_square_give_the_same_bytes(
    kind: Literal["resized-crop", "pad-crop", "none"],
) -> None:
    source = Pictures([encode(scene(i, 128, 120), "JPEG") for i in range(10)])
    cut = Crop(kind=kind, size=16)
    decoded, kept = (everything(ImageLoader(source, cut, batch_size=10, stop=40, keep_bytes=n)) for n in (0, 10**9))
    assert np.array_equal(decoded[0], kept[0])


def test_nothing_is_read_twice() -> None:
    source = small_pngs(20)
    feed = ImageLoader(source, CUTS[0], batch_size=10, stop=100, threads=1)
    list(feed)
    assert feed.stats().bytes == sum(map(len, source.images))
    assert feed.stats().images == 100


def test_evaluation_keeps_and_counts_exactly() -> None:
    feed = ImageLoader(small_pngs(23), CUTS[4], batch_size=10, train=False, threads=2)
    first, second = everything(feed), everything(feed)
    assert np.array_equal(first[0], second[0]) and first[1].tolist() == list(range(23))


LARGE: dict[str, Callable[[int], bytes]] = {
    "JPEG of several sizes": lambda i: encode(scene(i, 150 + 9 * i, 260 - 7 * i), "JPEG"),
    "JPEG of one size": lambda i: encode(scene(i, 200, 240), "JPEG"),
    "PNG of several sizes": lambda i: encode(scene(i, 150 + 9 * i, 260 - 7 * i)),
    "PNG larger than ever shrunk": lambda i: encode(scene(i, 400, 400)),
    "small ones of several sizes": lambda i: encode(scene(i, 16, 16 + i % 2)),
}


@cache
def large(name: str) -> Pictures:
    return Pictures([LARGE[name](i) for i in range(14)])


LARGE_CUTS = [
    Crop(kind="resized-crop", size=96, flip=True),
    Crop(kind="pad-crop", size=96, pad=4),
    Crop(kind="none", size=80, crop=0.875, channels=1),
    Crop(kind="resized-crop", size=96, fit="squash"),
    Crop(kind="none", size=96, fit="pad"),
]


@pytest.mark.parametrize(
    ("name", "cut"),
    [  # two cuts of each kind of image; all with the slow tests
        pytest.param(name, cut, id=f"{name}-{words}", marks=pytest.mark.slow if (row + column) % 3 == 0 else ())
        for row, name in enumerate(LARGE)
        for column, (cut, words) in enumerate(zip(LARGE_CUTS, names(LARGE_CUTS), strict=True))
    ],
)
def test_large_images_are_kept_from_the_second_pass_on_and_give_the_same_bytes(name: str, cut: Crop) -> None:
    source = large(name)
    decoded, kept = (
        ImageLoader(source, cut, batch_size=7, stop=70, seed=5, threads=3, keep_bytes=n) for n in (0, 10**9)
    )
    batches = iter(kept)
    first = [next(batches).images.copy() for _ in range(2)]
    rest = [batch.images for batch in batches]
    assert kept._worker.cache.full and 0 < kept.stats().kept_bytes <= 10**9
    again = everything(kept)
    assert np.array_equal(np.concatenate(first + rest), everything(decoded)[0])
    assert np.array_equal(again[0], everything(decoded)[0])


def test_bad_images_are_replaced_by_the_same_ones_where_the_rest_is_kept() -> None:
    images = list(large("JPEG of several sizes").images)
    images[3] = images[4] = b"nothing"
    images[9] = images[9][:300]
    runs = []
    for budget in (0, 10**9):
        bad: list[BadImage] = []
        feed = ImageLoader(Pictures(images), LARGE_CUTS[0], batch_size=7, stop=70, keep_bytes=budget, on_bad=bad.append)
        runs.append(everything(feed))
        assert sorted(fault.id for fault in bad) == [3, 4, 9]
    assert feed._worker.cache.full
    assert np.array_equal(runs[0][0], runs[1][0]) and np.array_equal(runs[0][1], runs[1][1])


def test_one_pass_keeps_nothing_large_and_a_second_evaluation_does() -> None:
    source = large("JPEG of several sizes")
    once = ImageLoader(source, LARGE_CUTS[0], batch_size=7, stop=14)
    list(once)
    feed = ImageLoader(source, LARGE_CUTS[0], batch_size=7, train=False)
    first = everything(feed)
    assert once._worker.cache.bytes == feed._worker.cache.bytes == 0
    second, read = everything(feed), feed.stats().bytes
    third = everything(feed)
    assert feed._worker.cache.full and feed.stats().bytes == read
    assert np.array_equal(first[0], second[0]) and np.array_equal(first[0], third[0])


def test_images_shrunk_while_decoding_are_not_cached() -> None:
    source = Pictures([encode(scene(i, 300 if i == 9 else 150, 300), "JPEG") for i in range(14)])
    cut = Crop(kind="pad-crop", size=70)
    feed = ImageLoader(source, cut, batch_size=7, stop=70, threads=2)
    images = everything(feed)[0]
    assert feed._worker.cache.given_up and feed._worker.cache.bytes == 0
    assert np.array_equal(images, everything(ImageLoader(source, cut, batch_size=7, stop=70, keep_bytes=0))[0])


def test_images_that_do_not_fit_are_not_cached_and_misjudged_ones_are_dropped() -> None:
    source, cut = large("JPEG of several sizes"), LARGE_CUTS[0]
    total = sum(scene.width * scene.height * 3 for scene in map(opened, source.images))
    feeds = [ImageLoader(source, cut, batch_size=7, stop=70, threads=2, keep_bytes=n) for n in (total, 2 * total, 0)]
    runs = [everything(feed)[0] for feed in feeds]
    assert feeds[0]._worker.cache.given_up and total <= feeds[1]._worker.cache.bytes <= 2 * total
    assert np.array_equal(runs[0], runs[2]) and np.array_equal(runs[1], runs[2])
    kept = ImageCache(4, 1000)
    kept.survey = lambda: np.array([[2, 2], [2, 3]])
    kept.keep_any_size()
    assert kept.room_for((2, 2, 3))
    for sample, side in enumerate((9, 9, 9)):
        kept.put(sample, np.zeros((side, side, 3), np.uint8))
        kept.put(sample, np.zeros((side, side, 3), np.uint8))
    assert kept.given_up and kept.images is None and kept.bytes == 0


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize("source", [small_pngs(20), mixed_jpegs(20)], ids=["one size", "several"])
def test_a_budget_beyond_what_there_is_takes_no_more_than_the_images_need(source: Pictures) -> None:
    feed = ImageLoader(source, Crop(kind="resized-crop", size=64), batch_size=10, stop=60, keep_bytes=2**60)
    images = everything(feed)
    assert same(images, everything(ImageLoader(source, feed.task.largest_crop, batch_size=10, stop=60, keep_bytes=0)))
    assert feed.keeps


def test_memory_that_is_not_given_keeps_nothing() -> None:
    kept = ImageCache(2**40, 2**62)
    assert not kept.room_for((100, 100, 3)) and kept.given_up


def test_the_budget_is_for_all_images_together() -> None:
    assert ImageCache(10, 10 * 768).room_for((16, 16, 3))
    assert not ImageCache(10, 10 * 768 - 1).room_for((16, 16, 3))
    assert ImageCache(10, 0).given_up


def test_only_the_used_records_take_room() -> None:
    feed = ImageLoader(small_pngs(40), CUTS[4], batch_size=4, ids=np.array([3, 30, 7]), train=False, threads=1)
    assert everything(feed)[1].tolist() == [3, 30, 7]
    store = feed._worker.cache.images
    assert store is not None and store.pixels is not None and len(store.pixels) == 3


def test_a_sample_known_to_be_bad_is_not_tried_again() -> None:
    kept = ImageCache(4, 10**6)
    kept.room_for((2, 2, 3))
    kept.put(1, np.zeros((2, 2, 3), np.uint8))
    kept.replace(0, by=1)
    assert kept.has(1) and not kept.has(2)
    with pytest.raises(BadImageError):
        kept.has(0)


# -- on the device --------------------------------------------------------------------------------------------------


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
    runs, faults = list[list[Batch]](), list[list[int]]()
    for device in (None, HERE):
        bad: list[BadImage] = []
        feed = ImageLoader(Pictures(images), CUT, batch_size=5, stop=200, device=device, on_bad=bad.append)
        runs.append(list(feed))
        faults.append(sorted(fault.id for fault in bad))
    assert faults == [[3, 4], [3, 4]] and isinstance(runs[1][-1], ResidentBatch)
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
    assert ours._loader.stats().device_bytes
    for value in (ours, theirs):
        value.close()


def test_tensors_of_a_kept_batch_stay_as_they_are() -> None:
    feed = ImageLoader(small_pngs(10), CUT, batch_size=5, stop=100, device=HERE)
    held = [tensors(batch)[0] for batch in feed]
    assert torch.cat(held).permute(0, 2, 3, 1).numpy().tobytes() == everything(feed)[0].tobytes()


def kept_of(feed: ImageLoader) -> ImageCache:
    list(feed)
    assert feed._worker.cache.full
    return feed._worker.cache


def test_what_does_not_fit_stays_on_the_host() -> None:
    kept = kept_of(ImageLoader(small_pngs(10), CUT, batch_size=5, stop=20))
    for budget, bytes_there in ((7679, 0), (7680, 7680)):
        resident = DeviceCache(HERE, CUT, budget_bytes=budget)
        assert not resident.is_settled
        resident.load(kept)
        assert resident.bytes == bytes_there and (resident.source is not None) == (bytes_there > 0)
        assert resident.is_settled


@pytest.mark.parametrize("name", LARGE)
def test_images_that_are_resized_or_of_several_sizes_stay_on_the_host(name: str) -> None:
    feed = ImageLoader(large(name), LARGE_CUTS[0], batch_size=7, stop=70, device=HERE)
    kept = kept_of(feed)
    resident = DeviceCache(HERE, LARGE_CUTS[0])
    resident.load(kept)
    assert feed.stats().device_bytes == resident.bytes == 0
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


def test_a_gather_on_the_device_needs_nothing_of_the_host() -> None:
    resident = DeviceCache(HERE, CUT)
    resident.load(kept_of(ImageLoader(small_pngs(10), CUT, batch_size=5, stop=20)))
    assert resident.source is not None
    resident.source[:] = 0  # the host's copy is not looked at
    where = shifts_of(CUT, 16, 16, np.arange(8), np.full((8, 3), 0.5))
    assert resident.gather(where).any()


def test_what_several_processes_keep_together_goes_to_the_device_of_each() -> None:
    source, options = small_pngs(35), dict[str, Any](batch_size=7, seed=5, stop=1400)
    feeds = [ImageLoader(source, CUT, **options, shard=(i, 2), launch="a test", device=HERE) for i in range(2)]
    batches = [batch for pair in zip(*feeds, strict=True) for batch in pair]
    images, ids, _ = everything(ImageLoader(source, CUT, **options, keep_bytes=0))
    assert np.array_equal(np.concatenate([images_of(batch) for batch in batches]), images)
    assert np.array_equal(np.concatenate([batch.ids for batch in batches]), ids)
    assert all(feed.stats().device_bytes == feed.stats().shared_bytes == 35 * 768 for feed in feeds)
