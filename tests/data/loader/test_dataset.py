"""A PyTorch loop of one's own: tensors without copies, epochs without seams, ranks without repeats."""

from __future__ import annotations

import copy
import gc
import importlib.util
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.data.loader.pictures import Pictures, small_pngs
from tests.forked import start
from torch.utils.data import DataLoader, IterableDataset

from steadytrain.data.loader import Crop, ImageLoader
from steadytrain.data.loader.dataset import ImageLoaderDataset, tensors
from steadytrain.errors import FeedError, InputError
from steadytrain.launch.supervise import free_port

PROJECT = Path(__file__).parents[3]
CUT = Crop(kind="pad-crop", size=16, pad=2, flip=True)
from_dlpack: Any = vars(torch)["from_dlpack"]  # what the type checker has not been told of
Pairs = list[tuple[torch.Tensor, torch.Tensor]]


def dataset(n: int = 22, **options: Any) -> ImageLoaderDataset:
    return ImageLoaderDataset(small_pngs(n), CUT, **{"batch_size": 4, "seed": 3, "threads": 2, **options})


def same(some: Pairs, others: Pairs) -> bool:
    pairs = zip(some, others, strict=True)
    return all(torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in pairs)


def test_tensors_are_the_batch_itself() -> None:
    batch = next(iter(ImageLoader(small_pngs(8), CUT, batch_size=4)))
    images, labels = tensors(batch)
    assert images.shape == (4, 3, 16, 16) and images.dtype == torch.uint8 and labels.dtype == torch.int64
    assert images.data_ptr() == batch.images.ctypes.data
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert from_dlpack(batch.images).data_ptr() == batch.images.ctypes.data


def test_memory_is_not_reused_while_a_tensor_is_held() -> None:
    batches = iter(ImageLoader(small_pngs(40), CUT, batch_size=4, depth=1))
    batch = next(batches)
    held, copy = from_dlpack(batch.images), batch.images.copy()
    del batch
    gc.collect()
    for _ in range(30):
        next(batches)
    assert np.array_equal(held.numpy(), copy)


def test_a_loader_gives_the_feeds_batches_epoch_after_epoch() -> None:
    loader = DataLoader(dataset(), batch_size=None)
    taken: Pairs = [pair for _ in range(3) for pair in loader]
    whole = [tensors(batch) for batch in ImageLoader(small_pngs(22), CUT, batch_size=4, seed=3, stop=18 * 4)]
    assert len(loader) == 6
    assert same(taken, whole)


def test_a_loop_that_is_left_goes_on_and_so_does_a_saved_state() -> None:
    whole = list(dataset(steps=9))
    data_set = dataset(steps=5)
    first: Pairs = []
    for pair in data_set:
        first.append(pair)
        if len(first) == 2:
            break
    again = dataset(steps=7)
    list(again)
    again.load_state_dict(data_set.state_dict())
    assert data_set.state_dict() == {"position": 8}
    assert same(first + list(again), whole)
    data_set.close()
    assert same(first + list(data_set), whole[:7])


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_a_loop_that_is_interrupted_goes_on(error: type[BaseException]) -> None:
    class Failing(Pictures):
        raises = False

        def image(self, number: int, /) -> bytes:
            if self.raises:
                self.raises = False
                raise error
            return super().image(number)

    source = Failing(small_pngs(22).images)
    data_set = ImageLoaderDataset(source, CUT, batch_size=4, seed=3, threads=1, depth=1, keep_bytes=0, steps=9)
    taken: Pairs = []
    with pytest.raises(error if error is KeyboardInterrupt else FeedError):
        for pair in data_set:
            taken.append(pair)
            if len(taken) == 3:
                source.raises = True
    rest = iter(data_set)
    assert same(taken + [next(rest) for _ in range(9 - len(taken))], list(dataset(steps=9)))


def test_an_evaluation_takes_each_image_once_every_time() -> None:
    data_set = dataset(train=False)
    for _ in range(2):
        labels = torch.cat([labels for _, labels in DataLoader(data_set, batch_size=None)])
        assert labels.tolist() == list(range(22))
    assert len(data_set) == 6


def test_an_evaluation_may_begin_later() -> None:
    data_set = dataset(train=False, start=9)
    for _ in range(2):
        assert torch.cat([labels for _, labels in data_set]).tolist() == list(range(9, 22))


def _use_workers() -> None:
    warnings.simplefilter("ignore")  # newer Pythons advise against forking a process that has threads
    data_set = ImageLoaderDataset(small_pngs(8), Crop(kind="none", size=16), batch_size=4)
    for way in ("fork", "spawn"):
        try:
            next(iter(DataLoader(data_set, batch_size=None, num_workers=1, multiprocessing_context=way)))
        except InputError as error:
            print(error)


def test_workers_are_refused_with_the_remedy(tmp_path: Path) -> None:
    process = start(_use_workers, output=tmp_path / "out", errors=tmp_path / "err")
    process.join(60)
    assert process.exitcode == 0, (tmp_path / "err").read_text()
    assert (tmp_path / "out").read_text().count("use DataLoader(dataset, batch_size=None, num_workers=0)") == 2


def test_no_steps_are_refused() -> None:
    with pytest.raises(InputError, match="steps=0"):
        dataset(steps=0)


def test_stop_is_refused_where_steps_set_the_end() -> None:
    with pytest.raises(InputError, match=r"stop=16: .* steps"):
        dataset(stop=16)


def test_a_copy_is_refused_with_the_remedy() -> None:
    with pytest.raises(InputError, match="create another dataset"):
        copy.copy(dataset())


def rank(number: int, folder: str) -> None:
    """One process of two."""
    early = dataset(24)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=number, world_size=2)
    with pytest.raises(InputError, match=f"this is process {number} of 2"):
        next(iter(early))
    data_set = dataset(24)
    labels = torch.cat([labels for _, labels in data_set])
    evaluated = torch.cat([labels for _, labels in dataset(21, train=False)])
    torch.save({"train": labels, "val": evaluated, "position": data_set.position}, f"{folder}/{number}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.timeout(120)
def test_two_processes_see_each_sample_once(tmp_path: Path) -> None:
    processes = [start(rank, number, str(tmp_path)) for number in range(2)]
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, 0]
    loads = [torch.load(tmp_path / f"{number}.pt", weights_only=True) for number in range(2)]
    assert [load["position"] for load in loads] == [24, 24]
    for part, n in (("train", 24), ("val", 21)):
        assert sorted(torch.cat([one[part] for one in loads]).tolist()) == list(range(n))


class DataLoaderDispatcher(DataLoader[Any]):
    """Reads on one process and gives each process every second batch, as accelerate's does."""

    def __iter__(self) -> Any:
        yield from list(super().__iter__())[::2]


class IterableDatasetShard(IterableDataset[Any]):
    """Gives each process every second item, as accelerate's and transformers' do."""

    def __init__(self, whole: ImageLoaderDataset) -> None:
        self.whole = whole

    def __iter__(self) -> Any:
        for number, item in enumerate(self.whole):
            if number % 2:
                yield item


class OwnLoader(DataLoader[Any]):
    """A loader of one's own that divides nothing."""


def test_a_share_that_would_be_divided_once_more_is_refused_with_the_remedy() -> None:
    share = dataset(24, shard=(0, 2))
    for loader in (DataLoaderDispatcher(share, batch_size=None), IterableDatasetShard(share)):
        with pytest.raises(InputError, match=r"process 0's share of 2 already.*never be seen: pass shard=\(0, 1\)"):
            next(iter(loader))
    assert len(list(OwnLoader(share, batch_size=None))) == 3
    whole = dataset(24, shard=(0, 1))  # the divider's processes see all of it together
    assert len(list(DataLoaderDispatcher(whole, batch_size=None))) == 3


PREPARED = """
import sys
from accelerate import Accelerator
from torch.utils.data import DataLoader
from tests.data.loader.test_dataset import dataset

accelerator = Accelerator(cpu=True)
options = {"shard": (0, 1)} if sys.argv[1] == "whole" else {}
loader = accelerator.prepare(DataLoader(dataset(24, **options), batch_size=None))
print("labels", [label for _, labels in loader for label in labels.tolist()])
"""


@pytest.mark.peer
@pytest.mark.timeout(120)
def test_accelerate_shows_all_images_or_is_refused() -> None:
    if importlib.util.find_spec("accelerate") is None:
        pytest.skip("accelerate is not installed")

    def outputs(words: str) -> list[str]:
        variables = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        ranks = [
            subprocess.Popen(
                [sys.executable, "-c", PREPARED, words],
                cwd=PROJECT,
                env={**variables, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        return [rank.communicate(timeout=100)[0] for rank in ranks]

    labels = [json.loads(output.rpartition("labels ")[2]) for output in outputs("whole")]
    assert sorted(labels[0] + labels[1]) == list(range(24)) and len(labels[0]) == len(labels[1])
    assert "accelerate's DataLoaderDispatcher divides batches among processes" in outputs("share")[0]
