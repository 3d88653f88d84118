"""Images kept in memory: the same bytes, within the budget, or not at all."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
from PIL import Image
from tests.data.loader.pictures import Pictures, encode, everything, mixed_jpegs, same, scene, small_pngs

from steadytrain.data.loader import BadImage, Crop, ImageLoader
from steadytrain.data.loader.image_cache import Kept, Store
from steadytrain.data.packing.pixels import BadImageError

CUTS = [
    Crop(kind="pad-crop", size=16, pad=3, flip=True),
    Crop(kind="pad-crop", size=16, pad=40),
    Crop(kind="pad-crop", size=12, pad=2, flip=True),
    Crop(kind="none", size=16, flip=True),
    Crop(kind="none", size=16),
    Crop(kind="none", size=14, crop=0.875, flip=True),
    Crop(kind="resized-crop", size=20, flip=True),
    Crop(kind="pad-crop", size=16, pad=3, flip=True, channels=1),
]


def names(cuts: Sequence[Crop]) -> list[str]:
    return [f"{cut.kind} {cut.size} {cut.pad} {cut.flip} {cut.channels}" for cut in cuts]


@pytest.mark.parametrize("shape", [(16, 16), (16, 21), (24, 16)], ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=names(CUTS))
def test_kept_images_give_the_same_bytes(cut: Crop, shape: tuple[int, int]) -> None:
    source = small_pngs(37, height=shape[0], width=shape[1])
    feeds = [
        ImageLoader(source, cut, batch_size=25, stop=100, seed=5, threads=2, keep_bytes=budget)
        for budget in (0, 10**9, 10**9)
    ]
    list(feeds[2])  # from now on everything of the third is in memory
    assert feeds[2]._filler.kept.full and feeds[0]._filler.kept.given_up
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


LARGE = {
    "JPEG of several sizes": Pictures([encode(scene(i, 150 + 9 * i, 260 - 7 * i), "JPEG") for i in range(14)]),
    "JPEG of one size": Pictures([encode(scene(i, 200, 240), "JPEG") for i in range(14)]),
    "PNG of several sizes": Pictures([encode(scene(i, 150 + 9 * i, 260 - 7 * i)) for i in range(14)]),
    "PNG larger than ever shrunk": Pictures([encode(scene(i, 400, 400)) for i in range(14)]),
    "small ones of several sizes": Pictures([encode(scene(i, 16, 16 + i % 2)) for i in range(14)]),
}
LARGE_CUTS = [
    Crop(kind="resized-crop", size=96, flip=True),
    Crop(kind="pad-crop", size=96, pad=4),
    Crop(kind="none", size=80, crop=0.875, channels=1),
]


@pytest.mark.parametrize("cut", LARGE_CUTS, ids=names(LARGE_CUTS))
@pytest.mark.parametrize("name", LARGE)
def test_large_images_are_kept_from_the_second_pass_on_and_give_the_same_bytes(name: str, cut: Crop) -> None:
    source = LARGE[name]
    decoded, kept = (
        ImageLoader(source, cut, batch_size=7, stop=70, seed=5, threads=3, keep_bytes=n) for n in (0, 10**9)
    )
    batches = iter(kept)
    first = [next(batches).images.copy() for _ in range(2)]
    rest = [batch.images for batch in batches]
    assert kept._filler.kept.full and 0 < kept.stats().kept_bytes <= 10**9
    again = everything(kept)
    assert np.array_equal(np.concatenate(first + rest), everything(decoded)[0])
    assert np.array_equal(again[0], everything(decoded)[0])


def test_bad_images_are_replaced_by_the_same_ones_where_the_rest_is_kept() -> None:
    images = list(LARGE["JPEG of several sizes"].images)
    images[3] = images[4] = b"nothing"
    images[9] = images[9][:300]
    runs = []
    for budget in (0, 10**9):
        bad: list[BadImage] = []
        feed = ImageLoader(Pictures(images), LARGE_CUTS[0], batch_size=7, stop=70, keep_bytes=budget, on_bad=bad.append)
        runs.append(everything(feed))
        assert sorted(one.id for one in bad) == [3, 4, 9]
    assert feed._filler.kept.full
    assert np.array_equal(runs[0][0], runs[1][0]) and np.array_equal(runs[0][1], runs[1][1])


def test_one_pass_keeps_nothing_large_and_a_second_evaluation_does() -> None:
    source = LARGE["JPEG of several sizes"]
    once = ImageLoader(source, LARGE_CUTS[0], batch_size=7, stop=14)
    list(once)
    feed = ImageLoader(source, LARGE_CUTS[0], batch_size=7, train=False)
    first = everything(feed)
    assert once._filler.kept.bytes == feed._filler.kept.bytes == 0
    second, read = everything(feed), feed.stats().bytes
    third = everything(feed)
    assert feed._filler.kept.full and feed.stats().bytes == read
    assert np.array_equal(first[0], second[0]) and np.array_equal(first[0], third[0])


def test_what_is_shrunk_while_it_is_decoded_is_not_kept() -> None:
    source = Pictures([encode(scene(i, 300 if i == 9 else 150, 300), "JPEG") for i in range(14)])
    cut = Crop(kind="pad-crop", size=70)
    feed = ImageLoader(source, cut, batch_size=7, stop=70, threads=2)
    images = everything(feed)[0]
    assert feed._filler.kept.given_up and feed._filler.kept.bytes == 0
    assert np.array_equal(images, everything(ImageLoader(source, cut, batch_size=7, stop=70, keep_bytes=0))[0])


def test_what_does_not_fit_is_not_kept_and_what_was_misjudged_is_dropped() -> None:
    source, cut = LARGE["JPEG of several sizes"], LARGE_CUTS[0]
    total = sum(scene.width * scene.height * 3 for scene in map(opened, source.images))
    feeds = [ImageLoader(source, cut, batch_size=7, stop=70, threads=2, keep_bytes=n) for n in (total, 2 * total, 0)]
    runs = [everything(feed)[0] for feed in feeds]
    assert feeds[0]._filler.kept.given_up and total <= feeds[1]._filler.kept.bytes <= 2 * total
    assert np.array_equal(runs[0], runs[2]) and np.array_equal(runs[1], runs[2])
    kept = Kept(4, 1000)
    kept.survey = lambda: np.array([[2, 2], [2, 3]])
    kept.try_any()
    assert kept.room_for((2, 2, 3))
    for sample, side in enumerate((9, 9, 9)):
        kept.put(sample, np.zeros((side, side, 3), np.uint8))
        kept.put(sample, np.zeros((side, side, 3), np.uint8))
    assert kept.given_up and kept.store is None and kept.bytes == 0


def opened(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data))


@pytest.mark.parametrize("source", [small_pngs(20), mixed_jpegs(20)], ids=["one size", "several"])
def test_a_budget_beyond_what_there_is_takes_no_more_than_the_images_need(source: Pictures) -> None:
    feed = ImageLoader(source, Crop(kind="resized-crop", size=64), batch_size=10, stop=60, keep_bytes=2**60)
    images = everything(feed)
    assert same(images, everything(ImageLoader(source, feed.cut, batch_size=10, stop=60, keep_bytes=0)))
    assert feed.keeps


def test_memory_that_is_not_given_keeps_nothing() -> None:
    kept = Kept(2**40, 2**62)
    assert not kept.room_for((100, 100, 3)) and kept.given_up


def test_the_budget_is_for_all_images_together() -> None:
    assert Kept(10, 10 * 768).room_for((16, 16, 3))
    assert not Kept(10, 10 * 768 - 1).room_for((16, 16, 3))
    assert Kept(10, 0).given_up


def test_only_the_used_records_take_room() -> None:
    feed = ImageLoader(small_pngs(40), CUTS[4], batch_size=4, ids=np.array([3, 30, 7]), train=False, threads=1)
    assert everything(feed)[1].tolist() == [3, 30, 7]
    store = feed._filler.kept.store
    assert isinstance(store, Store) and len(store.pixels) == 3


def test_a_sample_known_to_be_bad_is_not_tried_again() -> None:
    kept = Kept(4, 10**6)
    kept.room_for((2, 2, 3))
    kept.put(1, np.zeros((2, 2, 3), np.uint8))
    kept.replace(0, by=1)
    assert kept.has(1) and not kept.has(2)
    with pytest.raises(BadImageError):
        kept.has(0)
