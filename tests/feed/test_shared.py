"""Memory that two processes share, and that goes back when nobody looks at it any more."""

from __future__ import annotations

import gc
import os
from collections import deque

import numpy as np
import pytest
import torch

from steadytrain.errors import FeedError
from steadytrain.feed.shared import Slots

SHAPE = (3, 5, 5, 3)


def test_two_maps_of_one_file_show_the_same_bytes() -> None:
    slots = Slots(SHAPE, 4)
    other = Slots(SHAPE, 4, file=os.dup(slots.file))
    for number in range(4):
        slots.images[number][:] = number
        slots.ids[number][:] = 100 + number
    for number in range(4):
        assert (other.images[number] == number).all() and other.images[number].shape == SHAPE
        assert other.ids[number].tolist() == [100 + number] * 3


def test_a_lent_slot_comes_back_with_the_last_view_of_it() -> None:
    slots, returned = Slots(SHAPE, 2), deque[int]()
    images = slots.lend(1, returned)
    view = images[1:, ::2]
    tensor = torch.from_numpy(images)
    del images, view
    assert not returned
    del tensor
    gc.collect()
    assert list(returned) == [1]


def test_views_outlive_the_slots() -> None:
    slots = Slots(SHAPE, 2)
    slots.images[0][:] = 7
    images = slots.lend(0, deque())
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
    slots.images[1][:] = 9
    assert (np.frombuffer(os.pread(slots.file, slots.bytes, slots.slot_bytes), np.uint8)[:100] == 9).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="page-locked memory can be had here")
def test_pinning_without_a_gpu_is_refused_with_the_remedy() -> None:
    with pytest.raises(FeedError, match="pin=False"):
        Slots(SHAPE, 2).pin()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_slots_are_pinned_for_torch_and_copy_right() -> None:
    slots, returned = Slots((8, 64, 64, 3), 3), deque[int]()
    slots.pin()
    slots.images[2][:] = np.arange(8, dtype=np.uint8)[:, None, None, None]
    tensor = torch.from_numpy(slots.lend(2, returned))
    assert tensor.is_pinned()
    there = tensor.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), tensor)
    del tensor, slots
    gc.collect()
    assert list(returned) == [2]
