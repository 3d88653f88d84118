"""The memory of batches: reused when nothing refers to it any more, and not before."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch

from steadytrain.data.loader.batch import Batch, Buffers
from steadytrain.errors import FeedError


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_a_dropped_buffer_is_handed_out_again() -> None:
    buffers = Buffers((2, 4, 4, 3), keep=4)
    first = buffers.take()
    where = address(first)
    del first
    assert address(buffers.take()) == where


def test_a_view_keeps_its_buffer() -> None:
    buffers = Buffers((2, 4, 4, 3), keep=4)
    view = buffers.take()[1:, ::2].reshape(-1)[3:]
    view[:] = 7
    others = [buffers.take() for _ in range(4)]
    for other in others:
        other[:] = 0
    assert (view == 7).all()


def test_a_tensor_keeps_its_buffer_until_it_dies() -> None:
    buffers = Buffers((2, 4, 4, 3), keep=4)
    tensor = torch.from_numpy(buffers.take())
    where = tensor.data_ptr()
    assert address(buffers.take()) != where
    view = tensor.permute(0, 3, 1, 2)
    del tensor
    gc.collect()
    assert all(address(b) != where for b in [buffers.take() for _ in range(3)])
    del view
    gc.collect()
    assert where in [address(b) for b in [buffers.take() for _ in range(3)]]


def test_no_more_than_keep_unused_buffers_stay() -> None:
    buffers = Buffers((2, 4, 4, 3), keep=3)
    held = [buffers.take() for _ in range(10)]
    del held
    assert len(buffers._free) == 3


def test_buffers_outlive_their_pool() -> None:
    taken = Buffers((2, 4, 4, 3), keep=1).take()
    gc.collect()
    taken[:] = 5
    assert (taken == 5).all()


def test_a_batch_knows_its_length() -> None:
    ids = np.arange(3)
    assert len(Batch(np.zeros((3, 2, 2, 1), np.uint8), ids, ids, ids)) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="page-locked memory can be had here")
def test_pinned_memory_without_a_gpu_is_refused_with_the_remedy() -> None:
    with pytest.raises(FeedError, match="pin=False"):
        Buffers((2, 4, 4, 3), keep=1, pinned=True).take()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_is_pinned_for_torch() -> None:
    assert torch.from_numpy(Buffers((2, 4, 4, 3), keep=1, pinned=True).take()).is_pinned()
