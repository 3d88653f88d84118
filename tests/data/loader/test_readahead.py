"""Reading ahead: every byte is asked for before it is needed, once, in runs; and no batch changes by it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from tests.data.loader.pictures import everything, mixed_jpegs, same, write_records

from steadytrain.data.arrays import Ints
from steadytrain.data.loader import BlockShuffle, Crop, ImageLoader, readahead
from steadytrain.data.loader.readahead import Readahead
from steadytrain.data.loader.sampler import BlockOrder, GlobalOrder
from steadytrain.data.recordio.reader import Extents, Records
from steadytrain.machine import facts

Stretches = list[tuple[str, int, int]]


class Disk:
    """Images of 1,000 bytes each, one behind the other."""

    stays = True

    def __init__(self, asked: Stretches) -> None:
        self.expect = asked.extend

    def fill(self, needed: int) -> None:
        pass

    def extents(self, numbers: Ints) -> Extents:
        return Extents(["disk"], np.zeros(len(numbers), np.int64), numbers * 1000, np.full(len(numbers), 1000))

    def settle(self, numbers: Ints) -> None:
        self.settled = numbers.tolist()

    def scatter(self) -> None:
        pass


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Stretches:
    """What is asked for, instead of reading it; stretches of 100 images, no gaps joined."""
    stretches: Stretches = []
    monkeypatch.setattr(Records, "expect", lambda self, some: stretches.extend(some))
    monkeypatch.setattr(readahead, "AHEAD_BYTES", 100_000)
    monkeypatch.setattr(readahead, "GAP_BYTES", 0)
    return stretches


def images(stretches: Stretches) -> list[int]:
    return [at // 1000 for _, first, end in stretches for at in range(first, end, 1000)]


@pytest.mark.parametrize("blocks", [None, BlockShuffle(size=10, window=6)])
def test_what_a_batch_needs_was_asked_for_before_it_was_begun(asked: Stretches, blocks: BlockShuffle | None) -> None:
    order = GlobalOrder(1000, 5) if blocks is None else BlockOrder(1000, 5, blocks)
    readahead = Readahead(Disk(asked), np.arange(1000), order, stop=None, select_own=lambda positions: positions)
    for first in range(40, 1040, 20):
        before = set(images(asked))
        readahead.reach(first, first + 20)
        needed = set(order.ids(np.arange(first, first + 20)).tolist())
        assert needed <= (set(images(asked)) if first == 40 else before)


def test_data_that_fit_into_memory_are_asked_for_once(asked: Stretches) -> None:
    readahead = Readahead(
        Disk(asked), np.arange(1000), GlobalOrder(1000, 5), stop=None, select_own=lambda positions: positions
    )
    for first in range(0, 3000, 20):
        readahead.reach(first, first + 20)
    assert sorted(images(asked)) == list(range(1000))


def test_larger_data_are_asked_for_in_every_epoch(asked: Stretches, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "memory_bytes", lambda: 1_000_000)
    readahead = Readahead(
        Disk(asked), np.arange(1000), GlobalOrder(1000, 5), stop=3000, select_own=lambda positions: positions
    )
    for first in range(0, 3000, 20):
        readahead.reach(first, first + 20)
    assert sorted(images(asked)) == sorted(list(range(1000)) * 3)


def test_blocks_are_read_in_long_runs_and_little_is_on_its_way(asked: Stretches) -> None:
    order = BlockOrder(1200, 5, BlockShuffle(size=20, window=6))
    readahead = Readahead(Disk(asked), np.arange(1200), order, stop=None, select_own=lambda positions: positions)
    for first in range(0, 1200, 20):
        readahead.reach(first, first + 20)
        # Never more than a window ahead of the one that is read.
        assert len(images(asked)) <= min(1200, (first // 120 + 1) * 120 + 120)
    lengths = [(end - first) // 1000 for _, first, end in asked]
    assert sorted(images(asked)) == list(range(1200))
    assert np.mean(lengths) >= 20


def test_each_shard_asks_for_its_own(asked: Stretches, tmp_path: Path) -> None:
    with write_records(tmp_path / "a.rec", mixed_jpegs(30)) as records:
        places = records.extents(np.arange(30))
        for shard in range(3):
            asked.clear()
            feed = ImageLoader(
                records, Crop(kind="none", size=32), batch_size=2, stop=30, shard=(shard, 3), threads=1, keep_bytes=0
            )
            seen = everything(feed)[1]
            wanted = sum(int(size) for size in places.size[seen])
            assert sum(end - first for _, first, end in asked) == wanted


@pytest.mark.parametrize("train", [True, False])
def test_batches_are_the_same_with_and_without(tmp_path: Path, train: bool) -> None:
    cut = Crop(kind="resized-crop", size=32, flip=True)
    with write_records(tmp_path / "a.rec", mixed_jpegs(30)) as records:
        runs = [
            everything(ImageLoader(records, cut, batch_size=10, stop=30, train=train, threads=2, read_ahead=on))
            for on in (True, False)
        ]
    assert same(*runs)


def test_a_source_that_has_gone_is_not_the_concern_of_reading_ahead(tmp_path: Path) -> None:
    records = write_records(tmp_path / "a.rec", mixed_jpegs(10))
    (tmp_path / "a.rec").rename(tmp_path / "b.rec")
    os.mkfifo(tmp_path / "a.rec")
    with records, ImageLoader(records, Crop(kind="none", size=32), batch_size=10, train=False) as feed:
        assert len(next(iter(feed))) == 10
    assert isinstance(records, Records)


def test_pages_needed_now_are_requested_again_for_large_data(asked: Stretches, monkeypatch: pytest.MonkeyPatch) -> None:
    small = Readahead(Disk(asked), np.arange(1000), None, stop=None, select_own=lambda positions: positions)
    small.again(np.arange(3))
    assert not asked
    monkeypatch.setattr(facts, "memory_bytes", lambda: 1_000_000)
    large = Readahead(Disk(asked), np.arange(5, 1000), None, stop=None, select_own=lambda positions: positions)
    large.again(np.array([0, 1, 7]))
    assert images(asked) == [5, 6, 12]
