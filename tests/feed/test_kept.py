"""Images kept in memory: the same bytes, within the budget, or not at all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import pytest
from tests.feed.pictures import Pictures, encode, everything, scene, small_pngs

from steadytrain.feed import Cut, Feed
from steadytrain.feed.kept import Kept
from steadytrain.records.pixels import BadImageError

CUTS = [
    Cut(kind="pad-crop", size=16, pad=3, flip=True),
    Cut(kind="pad-crop", size=16, pad=40),
    Cut(kind="pad-crop", size=12, pad=2, flip=True),
    Cut(kind="none", size=16, flip=True),
    Cut(kind="none", size=16),
    Cut(kind="none", size=14, crop=0.875, flip=True),
    Cut(kind="resized-crop", size=20, flip=True),
    Cut(kind="pad-crop", size=16, pad=3, flip=True, channels=1),
]


def names(cuts: Sequence[Cut]) -> list[str]:
    return [f"{cut.kind} {cut.size} {cut.pad} {cut.flip} {cut.channels}" for cut in cuts]


@pytest.mark.parametrize("shape", [(16, 16), (16, 21), (24, 16)], ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=names(CUTS))
def test_kept_images_give_the_same_bytes(cut: Cut, shape: tuple[int, int]) -> None:
    source = small_pngs(37, height=shape[0], width=shape[1])
    feeds = [
        Feed(source, cut, batch_size=25, stop=100, seed=5, threads=2, keep_bytes=budget) for budget in (0, 10**9, 10**9)
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
    cut = Cut(kind=kind, size=16)
    decoded, kept = (everything(Feed(source, cut, batch_size=10, stop=40, keep_bytes=n)) for n in (0, 10**9))
    assert np.array_equal(decoded[0], kept[0])


def test_nothing_is_read_twice() -> None:
    source = small_pngs(20)
    feed = Feed(source, CUTS[0], batch_size=10, stop=100, threads=1)
    list(feed)
    assert feed.stats().bytes == sum(map(len, source.images))
    assert feed.stats().images == 100


def test_evaluation_keeps_and_counts_exactly() -> None:
    feed = Feed(small_pngs(23), CUTS[4], batch_size=10, train=False, threads=2)
    first, second = everything(feed), everything(feed)
    assert np.array_equal(first[0], second[0]) and first[1].tolist() == list(range(23))


def test_images_of_several_sizes_or_large_ones_are_not_kept() -> None:
    several = Pictures([encode(scene(i, 16, 16 + i % 2)) for i in range(10)])
    large = small_pngs(3, height=129, width=10)
    for source in (several, large):
        feed = Feed(source, Cut(kind="none", size=16), batch_size=5, stop=20, threads=2)
        list(feed)
        assert feed._filler.kept.given_up and feed._filler.kept.store is None


def test_the_budget_is_for_all_images_together() -> None:
    assert Kept(10, 10 * 768).room_for((16, 16, 3))
    assert not Kept(10, 10 * 768 - 1).room_for((16, 16, 3))
    assert Kept(10, 0).given_up


def test_only_the_used_records_take_room() -> None:
    feed = Feed(small_pngs(40), CUTS[4], batch_size=4, ids=np.array([3, 30, 7]), train=False, threads=1)
    assert everything(feed)[1].tolist() == [3, 30, 7]
    store = feed._filler.kept.store
    assert store is not None and len(store.pixels) == 3


def test_a_sample_known_to_be_bad_is_not_tried_again() -> None:
    kept = Kept(4, 10**6)
    kept.room_for((2, 2, 3))
    kept.put(1, np.zeros((2, 2, 3), np.uint8))
    kept.replace(0, by=1)
    assert kept.has(1) and not kept.has(2)
    with pytest.raises(BadImageError):
        kept.has(0)
