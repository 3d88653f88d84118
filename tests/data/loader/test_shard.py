"""Shards: several processes that share one stream, or one evaluation, see every sample exactly once."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from tests.data.loader.pictures import everything, same, small_pngs

from steadytrain.data.loader import BlockShuffle, Crop, ImageLoader
from steadytrain.errors import InputError

CUT = Crop(kind="pad-crop", size=16, pad=2, flip=True)


@pytest.mark.parametrize("blocks", [None, BlockShuffle(size=3, window=2)])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_shards_take_turns_at_one_stream(count: int, blocks: BlockShuffle | None) -> None:
    source = small_pngs(23)
    whole = list(ImageLoader(source, CUT, batch_size=4, seed=3, stop=48, blocks=blocks))
    shards = [
        list(ImageLoader(source, CUT, batch_size=4, seed=3, stop=48, blocks=blocks, shard=(i, count)))
        for i in range(count)
    ]
    for number, batch in enumerate(whole):
        other = shards[number % count][number // count]
        assert np.array_equal(batch.images, other.images)
        assert np.array_equal(batch.positions, other.positions)


@pytest.mark.parametrize("blocks", [None, BlockShuffle(size=3, window=2)])
@pytest.mark.parametrize("cuts", [(0, 4, 8), (0, 2, 8), (0, 1, 5, 8)])
def test_unequal_shares_of_each_batch_make_the_whole(cuts: tuple[int, ...], blocks: BlockShuffle | None) -> None:
    source = small_pngs(23)
    whole = list(ImageLoader(source, CUT, batch_size=8, seed=3, start=8, stop=48, blocks=blocks))
    shares = [
        list(ImageLoader(source, CUT, batch_size=b - a, seed=3, start=8, stop=48, blocks=blocks, share=(a, 8)))
        for a, b in pairwise(cuts)
    ]
    for number, batch in enumerate(whole):
        parts = [share[number] for share in shares]
        assert np.array_equal(batch.images, np.concatenate([part.images for part in parts]))
        assert np.array_equal(batch.ids, np.concatenate([part.ids for part in parts]))
    assert {len(share) for share in shares} == {len(whole)}


@pytest.mark.parametrize("share", [(4, 4), (-1, 8), (0, 3)])
def test_a_share_that_does_not_lie_in_a_batch_is_refused(share: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="share"):
        ImageLoader(small_pngs(4), CUT, batch_size=4, share=share)


@pytest.mark.parametrize(("n", "count"), [(23, 2), (23, 4), (3, 4), (16, 2)])
def test_an_evaluation_in_shards_sees_each_sample_once(n: int, count: int) -> None:
    feeds = [ImageLoader(small_pngs(n), CUT, batch_size=4, train=False, shard=(i, count)) for i in range(count)]
    seen = [batch.ids for feed in feeds for batch in feed]
    assert sorted(np.concatenate(seen)) == list(range(n))
    assert [len(feed) for feed in feeds] == [len(list(feed)) for feed in feeds]


def test_a_shard_goes_on_where_it_stopped() -> None:
    source = small_pngs(23)
    feed = everything(ImageLoader(source, CUT, batch_size=4, seed=3, stop=48, shard=(1, 2)))
    rest = everything(ImageLoader(source, CUT, batch_size=4, seed=3, start=16, stop=48, shard=(1, 2)))
    assert same(feed, rest, skip=8)


@pytest.mark.parametrize("shard", [(2, 2), (-1, 2), (0, 0)])
def test_a_shard_that_is_none_of_them_is_refused(shard: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="from 0 to n - 1"):
        ImageLoader(small_pngs(4), CUT, batch_size=2, shard=shard)


def test_shards_of_unequal_length_are_refused_in_training() -> None:
    with pytest.raises(InputError, match=r"in each of 2 shards.*stop=16 would do"):
        ImageLoader(small_pngs(4), CUT, batch_size=4, stop=12, shard=(0, 2))
