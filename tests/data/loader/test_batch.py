"""Batches and their memory; images that cannot be decoded: replaced by a rule in training, refused in evaluation."""

from __future__ import annotations

import gc
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.data.loader.pictures import Pictures, everything, mixed_jpegs, same, small_pngs, write_records

from steadytrain.data.loader import BadImage, Crop, ImageLoader
from steadytrain.data.loader.batch import Batch, BufferPool
from steadytrain.errors import FeedError, TooManyBadError


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_a_dropped_buffer_is_handed_out_again() -> None:
    buffers = BufferPool((2, 4, 4, 3), keep=4)
    first = buffers.take()
    where = address(first)
    del first
    assert address(buffers.take()) == where


def test_a_view_keeps_its_buffer() -> None:
    buffers = BufferPool((2, 4, 4, 3), keep=4)
    view = buffers.take()[1:, ::2].reshape(-1)[3:]
    view[:] = 7
    others = [buffers.take() for _ in range(4)]
    for other in others:
        other[:] = 0
    assert (view == 7).all()


def test_a_tensor_keeps_its_buffer_until_it_dies() -> None:
    buffers = BufferPool((2, 4, 4, 3), keep=4)
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
    buffers = BufferPool((2, 4, 4, 3), keep=3)
    held = [buffers.take() for _ in range(10)]
    del held
    assert len(buffers._free) == 3


def test_buffers_outlive_their_pool() -> None:
    taken = BufferPool((2, 4, 4, 3), keep=1).take()
    gc.collect()
    taken[:] = 5
    assert (taken == 5).all()


def test_a_batch_knows_its_length() -> None:
    ids = np.arange(3)
    assert len(Batch(np.zeros((3, 2, 2, 1), np.uint8), ids, ids, ids)) == 3


@pytest.mark.skipif(torch.cuda.is_available(), reason="page-locked memory can be had here")
def test_pinned_memory_without_a_gpu_is_refused_with_the_remedy() -> None:
    with pytest.raises(FeedError, match="pin=False"):
        BufferPool((2, 4, 4, 3), keep=1, pinned=True).take()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_memory_is_pinned_for_torch() -> None:
    assert torch.from_numpy(BufferPool((2, 4, 4, 3), keep=1, pinned=True).take()).is_pinned()


# -- bad images -----------------------------------------------------------------------------------------------------


SMALL = Crop(kind="pad-crop", size=16, flip=True)
LARGE = Crop(kind="resized-crop", size=40, flip=True)

JPEGS = mixed_jpegs(30)
BOTH = pytest.mark.parametrize(("source", "cut"), [(small_pngs(30), SMALL), (JPEGS, LARGE)], ids=["small", "large"])


def with_bad(source: Pictures, bad: list[int]) -> Pictures:
    return Pictures([image[: len(image) // 2] if i in bad else image for i, image in enumerate(source.images)])


@BOTH
def test_a_bad_image_is_replaced_by_the_next_good_one_and_named_once(source: Pictures, cut: Crop) -> None:
    met: list[BadImage] = []
    feed = ImageLoader(with_bad(source, [3, 4, 29]), cut, batch_size=10, stop=90, seed=1, threads=2, on_bad=met.append)
    images, ids, _ = everything(feed)
    good, expected, _ = everything(ImageLoader(source, cut, batch_size=10, stop=90, seed=1))
    instead = {3: 5, 4: 5, 29: 0}
    assert ids.tolist() == [instead.get(i, i) for i in expected.tolist()]
    untouched = ids == expected
    assert np.array_equal(images[untouched], good[untouched])
    assert {(bad.id, bad.instead) for bad in met} == set(instead.items()) and len(met) == 3


def test_replacing_does_not_depend_on_what_came_before() -> None:
    source = with_bad(JPEGS, [3, 4, 29])
    ignore: list[BadImage] = []
    whole = everything(ImageLoader(source, LARGE, batch_size=30, stop=90, on_bad=ignore.append))
    tail = everything(ImageLoader(source, LARGE, batch_size=10, start=50, stop=90, on_bad=ignore.append))
    assert same(whole, tail, skip=50)


def test_bad_image_is_a_warning_without_a_callback() -> None:
    with pytest.warns(UserWarning, match=r"record 3 cannot be decoded .*; using record 4 instead"):
        list(ImageLoader(with_bad(JPEGS, [3]), LARGE, batch_size=30, stop=30))


@BOTH
def test_batch_is_not_lost_if_the_callback_for_bad_images_raises(source: Pictures, cut: Crop) -> None:
    def refuse(bad: BadImage) -> None:
        raise RuntimeError(f"record {bad.id}")

    batches = iter(ImageLoader(with_bad(source, [3]), cut, batch_size=30, on_bad=refuse))
    with pytest.raises(RuntimeError, match="record 3"):
        next(batches)
    assert next(batches).positions[0] == 0


@BOTH
def test_bad_image_of_a_dropped_batch_is_named_in_the_next_iteration(source: Pictures, cut: Crop) -> None:
    met: list[BadImage] = []
    order = everything(ImageLoader(source, cut, batch_size=10, stop=30, seed=1))[1]
    bad = int(order[15])
    feed = ImageLoader(with_bad(source, [bad]), cut, batch_size=10, stop=30, seed=1, threads=1, on_bad=met.append)
    batches = iter(feed)
    next(batches)
    while feed.stats().blocked_seconds == 0 and feed.stats().images < 30:
        time.sleep(0.001)  # until the second batch was made as well
    del batches
    assert met == []
    list(feed)
    assert [fault.id for fault in met] == [bad]


@BOTH
def test_evaluation_refuses_a_bad_image_by_name(source: Pictures, cut: Crop) -> None:
    feed = ImageLoader(with_bad(source, [17]), cut, batch_size=8, train=False, threads=2)
    batches = iter(feed)
    assert [next(batches).ids[0] for _ in range(2)] == [0, 8]
    with pytest.raises(FeedError, match=r"record 17 cannot be decoded .*steady pack"):
        next(batches)


def test_too_many_bad_images_end_it() -> None:
    with pytest.raises(TooManyBadError, match="more than 5 of 30 images cannot be decoded"):
        list(ImageLoader(with_bad(JPEGS, list(range(10, 20))), LARGE, batch_size=30, stop=90, on_bad=lambda bad: None))


def test_nothing_that_can_be_decoded_ends_it() -> None:
    with pytest.raises(FeedError, match="none of the 3 images"):
        list(ImageLoader(Pictures([b"no", b"not", b"never"]), LARGE, batch_size=3, stop=3))


def test_a_damaged_record_is_a_bad_image(tmp_path: Path) -> None:
    with write_records(tmp_path / "a.rec", JPEGS) as records:
        assert len(records.labels) == 30
        offset = int((tmp_path / "a.idx").read_text().splitlines()[5].split("\t")[1])
        with records.path.open("r+b") as file:  # after the file was opened, as a failing disk would
            file.seek(offset)
            file.write(b"oops")
        met: list[BadImage] = []
        list(ImageLoader(records, LARGE, batch_size=30, stop=30, on_bad=met.append))
    assert [bad.id for bad in met] == [5] and "damaged" in met[0].reason
