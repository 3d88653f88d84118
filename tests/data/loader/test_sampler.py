"""Sample order and draws: pure, exact, and the published generator."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steadytrain.data.loader.rank_cache import LocalRanks, RankMemory
from steadytrain.data.loader.sampler import (
    BalancedOrder,
    BlockOrder,
    BlockShuffle,
    GlobalOrder,
    permutation,
    philox,
    uniforms,
)
from steadytrain.errors import InputError

# Random123's known answers for philox4x32 with 10 rounds: counter, key, output (lowest word first).
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]

seeds = st.integers(0, 2**63 - 1)


def shuffle(n: int, seed: int, epoch: int) -> np.ndarray:
    return permutation(n, seed, (epoch & 0xFFFFFFFF, epoch >> 32, 1))


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_philox_gives_the_published_answers(counter: str, key: str, answer: str) -> None:
    low, high = words(key)
    out = philox(np.array(words(counter), dtype=np.uint64)[:, None], low | high << 32)
    assert out[:, 0].tolist() == words(answer)


def test_many_counters_at_once_are_the_same_as_one_by_one() -> None:
    counter = np.random.default_rng(0).integers(0, 2**32, (4, 20_000), dtype=np.uint64)
    whole = philox(counter, 7)
    picked = [0, 8191, 8192, 19_999]
    assert np.array_equal(whole[:, picked], np.concatenate([philox(counter[:, [i]], 7) for i in picked], axis=1))


@given(seed=seeds, start=st.integers(0, 2**40), draws=st.integers(1, 9))
def test_draws_of_a_position_do_not_depend_on_what_is_asked_beside_it(seed: int, start: int, draws: int) -> None:
    positions = np.arange(start, start + 5)
    together = uniforms(seed, positions, 9)
    alone = np.concatenate([uniforms(seed, positions[i : i + 1], draws) for i in range(5)])
    assert np.array_equal(together[:, :draws], alone)


def test_draws_are_uniform_and_uncorrelated() -> None:
    numbers = uniforms(3, np.arange(100_000), 4)
    assert ((numbers >= 0) & (numbers < 1)).all()
    # Ten bins of 100,000 numbers: a standard deviation is 95; five of them is once in a million.
    for column in numbers.T:
        assert np.abs(np.histogram(column, bins=10, range=(0, 1))[0] - 10_000).max() < 475
    assert np.abs(np.corrcoef(numbers.T) - np.eye(4)).max() < 0.016
    assert abs(np.corrcoef(numbers[1:, 0], numbers[:-1, 0])[0, 1]) < 0.016


@given(n=st.integers(1, 300), seed=seeds, epoch=st.integers(0, 2**40))
def test_an_epoch_holds_each_sample_once(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(shuffle(n, seed, epoch)), np.arange(n))


def test_epochs_and_seeds_differ_and_every_place_is_likely() -> None:
    first = np.array([shuffle(10, seed, epoch) for seed in range(200) for epoch in range(50)])
    # Each sample at each of the ten places 1,000 times of 10,000; a standard deviation is 30.
    counts = np.array([np.bincount(first[:, place], minlength=10) for place in range(10)])
    assert np.abs(counts - 1000).max() < 160


@settings(deadline=None)
@given(
    n=st.integers(1, 60),
    seed=seeds,
    cuts=st.lists(st.integers(0, 400), min_size=2, max_size=6, unique=True).map(sorted),
)
def test_the_stream_is_the_same_however_it_is_cut_up(n: int, seed: int, cuts: list[int]) -> None:
    positions = np.arange(cuts[0], cuts[-1])
    whole = GlobalOrder(n, seed).ids(positions)
    parts = [GlobalOrder(n, seed).ids(np.arange(a, b)) for a, b in itertools.pairwise(cuts)]
    assert np.array_equal(whole, np.concatenate(parts))
    again = GlobalOrder(n, seed)
    backwards = [again.ids(np.arange(a, b)) for a, b in reversed(list(itertools.pairwise(cuts)))]
    assert np.array_equal(whole, np.concatenate(backwards[::-1]))


def test_a_batch_may_straddle_epochs() -> None:
    ids = GlobalOrder(10, 0).ids(np.arange(7, 33))
    assert sorted(ids[3:13]) == sorted(ids[13:23]) == list(range(10))


@pytest.mark.parametrize(
    "make",
    [lambda: GlobalOrder(5000, 9), lambda: BlockOrder(5000, 9, BlockShuffle(size=8, window=16))],
    ids=["global", "blocks"],
)
def test_threads_see_one_order(make: Callable[[], GlobalOrder | BlockOrder]) -> None:
    order, expected = make(), make().ids(np.arange(0, 40_000))
    seen: dict[int, np.ndarray] = {}

    def look(at: int) -> None:
        seen[at] = order.ids(np.arange(at, at + 5000))

    threads = [threading.Thread(target=look, args=(at,)) for at in range(0, 40_000, 5000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert np.array_equal(np.concatenate([seen[at] for at in sorted(seen)]), expected)


def test_the_order_is_pinned() -> None:
    """The order is part of what a recipe means: a change here changes every run's result."""
    assert shuffle(12, 2**40 + 5, 3).tolist() == GlobalOrder(12, 2**40 + 5).ids(np.arange(36, 48)).tolist()
    assert GlobalOrder(5, 1).ids(np.arange(10)).tolist() == [1, 0, 2, 4, 3, 3, 4, 0, 1, 2]
    assert uniforms(1, np.array([0, 1]), 1).tolist() == [[0.8902591727674007], [0.6719982686918229]]


# -- by blocks ------------------------------------------------------------------------------------------------------


divisions = st.builds(BlockShuffle, size=st.integers(1, 40), window=st.integers(1, 12))


@given(n=st.integers(1, 300), seed=seeds, blocks=divisions, epoch=st.integers(0, 2**40))
def test_an_epoch_by_blocks_holds_each_sample_once(n: int, seed: int, blocks: BlockShuffle, epoch: int) -> None:
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


def test_the_order_by_blocks_is_pinned() -> None:
    """The order is part of what a recipe means: a change here changes every run's result."""
    order = BlockOrder(10, seed=1, blocks=BlockShuffle(size=2, window=2))
    assert order.ids(np.arange(20)).tolist() == [3, 0, 2, 1, 4, 5, 7, 6, 8, 9, 2, 7, 6, 3, 4, 5, 9, 8, 0, 1]


@pytest.mark.parametrize("wrong", [{"size": 0}, {"window": -1}])
def test_a_number_below_one_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(InputError, match="1 or more"):
        BlockShuffle(**wrong)


@given(n=st.integers(1, 300), blocks=divisions, position=st.integers(0, 1000))
def test_bounds_are_those_of_the_window(n: int, blocks: BlockShuffle, position: int) -> None:
    order = BlockOrder(n, 0, blocks)
    first, end = order.bounds(position)
    assert first <= position < end <= first + order.window
    assert order.bounds(first) == order.bounds(end - 1) == (first, end)
    assert first // n == (end - 1) // n
    assert end % n == 0 or end - first == order.window


@given(seed=seeds, sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6), epoch=st.integers(0, 2**33))
def test_a_balanced_epoch_has_every_class_equally_often(seed: int, sizes: list[int], epoch: int) -> None:
    labels = np.repeat(np.arange(len(sizes)) * 2, sizes)  # some classes have no samples
    n = len(labels)
    ids = BalancedOrder(labels, seed).ids(np.arange(epoch * n, (epoch + 1) * n))
    per_class = np.bincount(labels[ids], minlength=2 * len(sizes))[::2]
    assert per_class.max() - per_class.min() <= 1
    for label in np.unique(labels[ids]):
        uses = np.bincount(ids, minlength=n)[labels == label]
        assert uses.max() - uses.min() <= 1


def test_over_as_many_epochs_as_classes_no_class_is_ahead() -> None:
    labels = np.repeat([0, 1, 2], [50, 5, 3])
    ids = BalancedOrder(labels, 1).ids(np.arange(3 * 58))
    assert np.bincount(labels[ids]).tolist() == [58, 58, 58]


def test_a_balanced_order_is_the_same_from_any_position_on() -> None:
    labels = np.repeat([0, 1, 2], [50, 5, 3])
    whole = BalancedOrder(labels, 7).ids(np.arange(200))
    again = BalancedOrder(labels, 7)
    assert np.array_equal(np.concatenate([again.ids(np.arange(at, at + 8)) for at in range(96, 200, 8)]), whole[96:])
    assert not np.array_equal(whole[:58], whole[58:116])


@pytest.mark.parametrize("n", [1, 16383, 16385, 40_001])
def test_the_order_of_many_is_that_of_their_keys(n: int) -> None:
    counter = np.zeros((4, (n + 1) // 2), np.uint64)
    counter[0], counter[3] = np.arange(counter.shape[1]), 1
    numbers = philox(counter, 9)
    keys = np.concatenate([numbers[0] << np.uint64(32) | numbers[1], numbers[2] << np.uint64(32) | numbers[3]])[:n]
    low = (1 << max(n - 1, 1).bit_length()) - 1
    keyed = [(int(key) & ~low) | number for number, key in enumerate(keys.tolist())]
    assert shuffle(n, 9, 0).tolist() == [key & low for key in sorted(keyed)]


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Any set counts as large, and the memory of ranks is a folder; return that."""
    monkeypatch.setenv("STEADYTRAIN_SHM", str(tmp_path))
    monkeypatch.setattr(GlobalOrder, "LARGE", 1)
    return tmp_path


def memory_of(rank: int) -> Callable[[str, int], RankMemory]:
    return lambda what, size: RankMemory(LocalRanks("a launch", 2, rank), what, size)


def wait_for_background() -> None:
    for thread in threading.enumerate():
        if thread.name == "order":
            thread.join()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")
@pytest.mark.parametrize("kind", ["global", "balanced"])
def test_ranks_of_a_machine_make_an_order_once_and_it_is_that_of_one_process(
    large: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    made: list[int] = []
    labels = np.random.default_rng(0).integers(0, 3, 50)

    def order(share: Callable[[str, int], RankMemory] | None) -> GlobalOrder:
        return GlobalOrder(50, 4, share, 100) if kind == "global" else BalancedOrder(labels, 4, share, 100)

    alone = order(None).ids(np.arange(100))
    wait_for_background()
    make_epoch = GlobalOrder._make_epoch

    def counting(order: GlobalOrder, epoch: int) -> np.ndarray:
        made.append(epoch)
        return make_epoch(order, epoch)

    monkeypatch.setattr(GlobalOrder, "_make_epoch", counting)
    ranks = [order(memory_of(rank)) for rank in (0, 1)]
    for rank in ranks:
        assert np.array_equal(rank.ids(np.arange(100)), alone)
    wait_for_background()
    assert sorted(made) == [0, 1]
    assert not list(large.iterdir())  # no name is left once both have it


def test_where_memory_cannot_be_shared_each_makes_its_own(large: Path) -> None:
    def refuse(what: str, size: int) -> RankMemory:
        raise OSError("no room")

    assert GlobalOrder(50, 4, refuse).ids(np.arange(25)).tolist() == shuffle(50, 4, 0)[:25].tolist()
    wait_for_background()


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")
def test_where_the_system_has_no_such_locks_each_makes_its_own(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: int, command: int, request: bytes) -> bytes:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr("fcntl.fcntl", refuse)
    assert GlobalOrder(50, 4, memory_of(0)).ids(np.arange(24)).tolist() == shuffle(50, 4, 0)[:24].tolist()


def test_memory_that_is_short_in_the_background_is_told_where_the_order_is_needed(
    large: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_epoch = GlobalOrder._make_epoch

    def short(order: GlobalOrder, epoch: int) -> np.ndarray:
        if epoch == 1:
            raise MemoryError
        return make_epoch(order, epoch)

    monkeypatch.setattr(GlobalOrder, "_make_epoch", short)
    monkeypatch.setattr(threading, "excepthook", lambda told: pytest.fail(f"a thread raised {told.exc_type}"))
    order = GlobalOrder(50, 4)
    order.ids(np.arange(25))
    wait_for_background()
    with pytest.raises(MemoryError):
        order.ids(np.arange(50, 60))


def test_the_next_order_is_made_from_the_middle_of_an_epoch_on_and_none_behind_the_end(large: Path) -> None:
    order = GlobalOrder(50, 4, stop=100)
    order.ids(np.arange(25))
    wait_for_background()
    assert list(order._epochs) == [0]
    order.ids(np.arange(20, 30))
    wait_for_background()
    assert list(order._epochs) == [0, 1]
    order.ids(np.arange(80, 100))
    wait_for_background()
    assert list(order._epochs) == [0, 1]
