"""Memory that two processes share, and that is free again when nobody looks at it any more."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable

import numpy as np
import pytest
import torch

from steadytrain.data.loader.batch import Batch
from steadytrain.data.loader.shared_memory import Slots, fits
from steadytrain.errors import FeedError

SHAPE = (3, 5, 5, 3)


def test_two_maps_of_one_file_show_the_same_batches() -> None:
    slots = Slots(SHAPE, 4)
    other = Slots(SHAPE, 4, file=os.dup(slots.file))
    for number in range(4):
        slots.each[number].images[:] = number
        facts = np.arange(3) + 10 * number
        slots.put(number, Batch(slots.each[number].images, facts, facts + 100, facts + 200))
    for number, batch in enumerate(other.each):
        assert (batch.images == number).all() and batch.images.shape == SHAPE
        facts = np.stack((batch.labels, batch.ids - 100, batch.positions - 200))
        assert (facts == np.arange(3) + 10 * number).all()


def test_a_short_batch_and_one_whose_labels_are_vectors_are_put_down() -> None:
    slots = Slots(SHAPE, 1)
    slots.put(0, Batch(slots.each[0].images[:2], np.ones((2, 5), dtype=np.float32), np.array([4, 9]), np.arange(2)))
    assert slots.each[0].ids.tolist() == [4, 9, 0] and not slots.each[0].labels.any()
    assert fits(np.arange(3)) and not fits(np.ones((2, 5), dtype=np.float32))


HOLDS: dict[str, Callable[[Batch], object]] = {
    "the batch": lambda batch: batch,
    "the images": lambda batch: batch.images,
    "the labels": lambda batch: batch.labels,
    "the ids": lambda batch: batch.ids,
    "the positions": lambda batch: batch.positions[1:],
    "a view of a view": lambda batch: batch.images[1:].transpose(0, 3, 1, 2)[:, ::2],
    "a masked view": lambda batch: np.ma.asarray(batch.images)[1:],
    "a memoryview": lambda batch: batch.images.data,
    "a tensor": lambda batch: torch.from_numpy(batch.images),
    "a tensor's view": lambda batch: torch.from_numpy(batch.images).permute(0, 3, 1, 2)[:1],
    "a view by DLPack": lambda batch: np.from_dlpack(batch.images)[1:],
    "a tensor of labels": lambda batch: torch.from_numpy(batch.labels)[1:],
}


@pytest.mark.parametrize("what", HOLDS)
def test_a_slot_is_free_when_nothing_of_it_is_held(what: str) -> None:
    slots = Slots(SHAPE, 2)
    held = HOLDS[what](slots.each[1])
    assert slots.is_free(0) and not slots.is_free(1)
    del held
    gc.collect()
    assert slots.is_free(0) and slots.is_free(1)


def test_views_outlive_the_slots() -> None:
    slots = Slots(SHAPE, 2)
    slots.each[0].images[:] = 7
    images = slots.each[0].images
    file = slots.file
    del slots
    gc.collect()
    assert (images == 7).all()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_more_than_half_of_the_memory_is_refused() -> None:
    with pytest.raises(FeedError, match="more than half of this machine's"):
        Slots((2**40, 1, 1, 1), 2)


def test_without_memory_files_one_on_disk_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    slots = Slots(SHAPE, 2)
    slots.each[1].images[:] = 9
    assert (np.frombuffer(os.pread(slots.file, slots.bytes, slots.slot_bytes), np.uint8)[:100] == 9).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="page-locked memory can be had here")
def test_pinning_without_a_gpu_is_refused_with_the_remedy() -> None:
    with pytest.raises(FeedError, match="pin=False"):
        Slots(SHAPE, 2).pin()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_slots_are_pinned_for_torch_and_copy_right() -> None:
    slots = Slots((8, 64, 64, 3), 3)
    slots.pin()
    slots.each[2].images[:] = np.arange(8, dtype=np.uint8)[:, None, None, None]
    tensor = torch.from_numpy(slots.each[2].images)
    assert tensor.is_pinned()
    there = tensor.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    del slots
    gc.collect()
    assert tensor.is_pinned() and torch.equal(there.cpu(), tensor)
