"""The order by blocks: exact, pure, local within a window, and mixed as well as its page says."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadytrain.data.loader.block_shuffle import BlockOrder, BlockShuffle
from steadytrain.errors import InputError

seeds = st.integers(0, 2**63 - 1)
divisions = st.builds(BlockShuffle, size=st.integers(1, 40), window=st.integers(1, 12))


@given(n=st.integers(1, 300), seed=seeds, blocks=divisions, epoch=st.integers(0, 2**40))
def test_an_epoch_holds_each_sample_once(n: int, seed: int, blocks: BlockShuffle, epoch: int) -> None:
    ids = BlockOrder(n, seed, blocks).ids(np.arange(epoch * n, (epoch + 1) * n))
    assert np.array_equal(np.sort(ids), np.arange(n))


@given(n=st.integers(1, 200), seed=seeds, blocks=divisions, data=st.data())
def test_any_position_can_be_asked_for_at_any_time(
    n: int, seed: int, blocks: BlockShuffle, data: st.DataObject
) -> None:
    whole = BlockOrder(n, seed, blocks).ids(np.arange(4 * n))
    asked = np.array(data.draw(st.lists(st.integers(0, 4 * n - 1), min_size=1, max_size=30)))
    order = BlockOrder(n, seed, blocks)
    one_by_one = [int(order.ids(np.array([at]))[0]) for at in asked]
    assert one_by_one == order.ids(asked).tolist() == whole[asked].tolist()


@given(n=st.integers(1, 2000), seed=seeds, blocks=divisions)
def test_a_window_reads_few_blocks(n: int, seed: int, blocks: BlockShuffle) -> None:
    order = BlockOrder(n, seed, blocks)
    ids = order.ids(np.arange(n))
    for first in range(0, n, order.window):
        # Where the data's short last block stands, a window may reach into one block more at either end.
        assert len(np.unique(ids[first : first + order.window] // blocks.size)) <= blocks.window + 2


def test_the_rest_of_an_epoch_is_the_same_after_a_restart_anywhere() -> None:
    whole = BlockOrder(1000, 3, BlockShuffle(size=16, window=4)).ids(np.arange(3000))
    for start in (0, 1, 63, 64, 65, 999, 1000, 1717):
        assert np.array_equal(
            BlockOrder(1000, 3, BlockShuffle(size=16, window=4)).ids(np.arange(start, 3000)), whole[start:]
        )


def test_epochs_seeds_and_the_places_of_blocks_differ() -> None:
    blocks = BlockShuffle(size=4, window=3)
    streams = {tuple(BlockOrder(96, seed, blocks).ids(np.arange(96)).tolist()) for seed in range(50)}
    epochs = BlockOrder(96, 0, blocks).ids(np.arange(96 * 50)).reshape(50, 96)
    assert len(streams) == 50
    assert len({tuple(epoch) for epoch in epochs.tolist()}) == 50
    # Each of 24 blocks comes first about as often: 4,000 epochs, 167 times each, a standard deviation is 12.6.
    firsts = BlockOrder(96, 1, BlockShuffle(size=4, window=1)).ids(np.arange(4000) * 96) // 4
    assert np.abs(np.bincount(firsts, minlength=24) - 4000 / 24).max() < 65


def test_samples_are_mixed_as_the_page_says() -> None:
    n, blocks = 100_000, BlockShuffle(size=50, window=40)
    ids = BlockOrder(n, 0, blocks).ids(np.arange(n))
    together = np.mean(ids[1:] // blocks.size == ids[:-1] // blocks.size)
    assert together == pytest.approx((blocks.size - 1) / (blocks.size * blocks.window - 1), rel=0.1)
    apart = np.abs(np.diff(ids))[ids[1:] // blocks.size != ids[:-1] // blocks.size]
    assert np.mean(apart) == pytest.approx(n / 3, rel=0.05)


def test_one_window_over_all_is_a_shuffle_of_all() -> None:
    order = BlockOrder(500, 2, BlockShuffle(size=10, window=50))
    first = order.ids(np.arange(500 * 200)).reshape(200, 500)[:, 0]
    assert len(np.unique(first)) > 140  # of 200 draws of 500, 165 differ on average


def test_the_order_is_pinned() -> None:
    """The order is part of what a recipe means: a change here changes every run's result."""
    order = BlockOrder(10, seed=1, blocks=BlockShuffle(size=2, window=2))
    assert order.ids(np.arange(20)).tolist() == [3, 0, 2, 1, 4, 5, 7, 6, 8, 9, 2, 7, 6, 3, 4, 5, 9, 8, 0, 1]


@pytest.mark.parametrize("wrong", [{"size": 0}, {"window": -1}])
def test_a_number_below_one_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match="1 is the least"):
        BlockShuffle(**wrong)


@given(n=st.integers(1, 300), blocks=divisions, position=st.integers(0, 1000))
def test_bounds_are_those_of_the_window(n: int, blocks: BlockShuffle, position: int) -> None:
    order = BlockOrder(n, 0, blocks)
    first, end = order.bounds(position)
    assert first <= position < end <= first + order.window
    assert order.bounds(first) == order.bounds(end - 1) == (first, end)
    assert first // n == (end - 1) // n
    assert end % n == 0 or end - first == order.window
