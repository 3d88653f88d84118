"""The image loader as its users see it: which samples, when, and nothing left behind."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.data.loader.pictures import Pictures, encode, everything, mixed_jpegs, same, scene, small_pngs, write_records
from tests.data.storage.faults import PASSING, Faults

from steadytrain.data.loader import (
    Batch,
    BlockShuffle,
    Crop,
    ImageLoader,
    Placement,
    batch_worker,
    default_threads,
    image_loader,
)
from steadytrain.data.loader.batch_worker import MOST_BATCHES
from steadytrain.data.recordio.reader import Records
from steadytrain.errors import DataError, FeedError, InputError, StorageError

PROJECT = Path(__file__).parents[3]
SMALL = Crop(kind="pad-crop", size=16, flip=True)
LARGE = Crop(kind="resized-crop", size=40, flip=True)

JPEGS = mixed_jpegs(30)


def feed_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("feed-")]


# -- which samples ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("source", "cut"), [(small_pngs(30), SMALL), (JPEGS, LARGE)], ids=["small", "large"])
def test_the_stream_does_not_depend_on_threads_or_batch_size(source: Pictures, cut: Crop) -> None:
    runs = [
        everything(ImageLoader(source, cut, batch_size=size, stop=120, seed=3, threads=threads))
        for size, threads in [(20, 1), (8, 2), (60, 5)]
    ]
    assert all(same(runs[0], run) for run in runs[1:])
    assert runs[0][2].tolist() == list(range(120))


def test_each_epoch_holds_each_sample_once_and_batches_straddle_epochs() -> None:
    _, ids, _ = everything(ImageLoader(JPEGS, LARGE, batch_size=16, stop=96, threads=2))
    for epoch in range(3):
        assert sorted(ids[30 * epoch : 30 * (epoch + 1)]) == list(range(30))
    assert ids[:30].tolist() != ids[30:60].tolist()


@settings(max_examples=15, deadline=None)
@given(start=st.integers(0, 90), size=st.sampled_from([1, 3, 7]), seed=st.integers(0, 2**63 - 1))
def test_resuming_gives_the_tail_of_the_uninterrupted_stream(start: int, size: int, seed: int) -> None:
    source = small_pngs(13)
    stop = start + 6 * size
    whole = everything(ImageLoader(source, SMALL, batch_size=stop, stop=stop, seed=seed, threads=2))
    tail = everything(ImageLoader(source, SMALL, batch_size=size, start=start, stop=stop, seed=seed, threads=2))
    assert same(whole, tail, skip=start)


@pytest.mark.parametrize("blocks", [None, BlockShuffle(size=3, window=2)])
@pytest.mark.parametrize(("source", "cut"), [(small_pngs(30), SMALL), (JPEGS, LARGE)], ids=["small", "large"])
def test_repeats_show_each_image_in_a_row_with_other_cuts(
    source: Pictures, cut: Crop, blocks: BlockShuffle | None
) -> None:
    options: dict[str, Any] = {"stop": 90, "seed": 3, "repeats": 3, "blocks": blocks, "read_ahead": True}
    whole = images, ids, positions = everything(ImageLoader(source, cut, batch_size=30, threads=2, **options))
    plain = everything(ImageLoader(source, cut, batch_size=30, stop=90, seed=3, blocks=blocks))
    assert ids.tolist() == np.repeat(plain[1][:30], 3).tolist(), "the order without repeats, three times as slow"
    assert sorted(ids.tolist()) == sorted([*range(30)] * 3), "three epochs show each image three times"
    assert positions.tolist() == list(range(90))
    groups = images.reshape(30, 3, -1)
    differ = [any(not np.array_equal(group[0], other) for other in group[1:]) for group in groups]
    assert sum(differ) >= 28, "cropped and flipped anew"
    for size, start, threads in ((5, 45, 1), (9, 0, 3)):
        rest = everything(ImageLoader(source, cut, batch_size=size, start=start, threads=threads, **options))
        assert same(whole, rest, skip=start)


def test_seeds_give_other_orders_and_other_cuts() -> None:
    first, other = (everything(ImageLoader(JPEGS, LARGE, batch_size=30, stop=30, seed=seed)) for seed in (0, 1))
    assert first[1].tolist() != other[1].tolist()
    by_id = first[0][np.argsort(first[1])], other[0][np.argsort(other[1])]
    assert all(not np.array_equal(a, b) for a, b in zip(*by_id, strict=True))


@pytest.mark.parametrize("size", [1, 7, 30, 64])
def test_evaluation_sees_each_sample_once_in_order(size: int) -> None:
    feed = ImageLoader(JPEGS, LARGE, batch_size=size, train=False, threads=3)
    batches = list(feed)
    assert np.concatenate([batch.ids for batch in batches]).tolist() == list(range(30))
    assert sum(map(len, batches)) == 30 and len(batches) == len(feed) == -(-30 // size)
    assert all(len(batch.images) == len(batch) == size for batch in batches[:-1])


def test_a_feed_can_be_iterated_again_and_twice_at_once() -> None:
    feed = ImageLoader(JPEGS, LARGE, batch_size=10, train=False, threads=2)
    first = everything(feed)
    both = list(zip(feed, feed, strict=True))
    assert np.array_equal(first[0], np.concatenate([a.images for a, _ in both]))
    assert np.array_equal(first[0], np.concatenate([b.images for _, b in both]))


def test_a_split_is_used_as_given() -> None:
    ids = np.array([4, 9, 2, 25])
    assert everything(ImageLoader(JPEGS, LARGE, batch_size=3, ids=ids, train=False))[1].tolist() == [4, 9, 2, 25]
    seen = everything(ImageLoader(JPEGS, LARGE, batch_size=4, ids=ids, stop=12))[1].reshape(3, 4)
    assert all(sorted(epoch) == [2, 4, 9, 25] for epoch in seen.tolist())


def test_labels_follow_the_ids() -> None:
    vectors = np.arange(60, dtype=np.float32).reshape(30, 2)
    for labels in (np.arange(30) % 3, vectors):
        for batch in ImageLoader(Pictures(JPEGS.images, labels), LARGE, batch_size=10, stop=30):
            assert np.array_equal(batch.labels, labels[batch.ids]) and batch.labels.dtype == labels.dtype


def test_real_record_files(tmp_path: Path, data_folder: Path) -> None:
    with write_records(tmp_path / "own.rec", JPEGS) as records:
        batches = everything(ImageLoader(records, LARGE, batch_size=15, stop=60, seed=2))
        memory = everything(ImageLoader(JPEGS, LARGE, batch_size=15, stop=60, seed=2))
        assert same(batches, memory)
    with Records.open(data_folder / "mxnet-rec/im2rec/photos40.rec") as photos:
        images, ids, _ = everything(
            ImageLoader(photos, Crop(kind="none", size=96, crop=0.875), batch_size=16, train=False)
        )
        assert images.shape == (40, 96, 96, 3) and ids.tolist() == list(range(40))
        assert 20 < images.mean() < 235 and images.std() > 20


def test_a_stream_without_end_has_no_length() -> None:
    with pytest.raises(TypeError, match="without stop"):
        len(ImageLoader(JPEGS, LARGE, batch_size=10))
    assert len(ImageLoader(JPEGS, LARGE, batch_size=10, start=10, stop=70)) == 6


# -- memory, threads ----------------------------------------------------------------------------------------------


def test_batches_may_be_kept() -> None:
    kept = list(ImageLoader(small_pngs(30), SMALL, batch_size=10, stop=300, threads=2))
    copies = [batch.images.copy() for batch in ImageLoader(small_pngs(30), SMALL, batch_size=10, stop=300, threads=2)]
    assert all(np.array_equal(batch.images, copy) for batch, copy in zip(kept, copies, strict=True))


def test_dropped_batches_give_their_memory_to_later_ones() -> None:
    feed = ImageLoader(small_pngs(30), SMALL, batch_size=10, stop=1000, threads=2, depth=3)
    addresses = {batch.images.ctypes.data for batch in feed}
    assert len(addresses) <= MOST_BATCHES + 2 + 2


def test_between_two_evaluations_no_batch_takes_memory() -> None:
    feed = ImageLoader(JPEGS, LARGE, batch_size=4, train=False, threads=2)
    for _ in feed:
        pass
    assert len(feed._buffers._free) <= 1


def test_a_tensor_of_a_batch_stays_as_it_is() -> None:
    feed = ImageLoader(small_pngs(30), SMALL, batch_size=10, stop=500, threads=2)
    batches = iter(feed)
    tensor = torch.from_numpy(next(batches).images)
    copy = tensor.clone()
    for _ in batches:
        pass
    assert torch.equal(tensor, copy)


@pytest.mark.parametrize("how", ["break", "raise", "close", "drop"])
def test_threads_are_gone_soon(how: str) -> None:
    feed = ImageLoader(JPEGS, LARGE, batch_size=8, threads=4)
    batches = iter(feed)
    next(batches)
    assert len(feed_threads()) == 4
    since = time.monotonic()
    if how == "close":
        feed.close()
    elif how == "raise":
        with pytest.raises(RuntimeError, match="the consumer's own"), feed:
            for _ in feed:
                raise RuntimeError("the consumer's own")
    elif how == "break":
        for _ in batches:
            break
    del batches
    gc.collect()
    while feed_threads() and time.monotonic() < since + 60:
        time.sleep(0.005)
    assert feed_threads() == []


@pytest.mark.parametrize(("images", "keep_bytes"), [(JPEGS.images, 0), (small_pngs(30).images, None)])
def test_a_closed_feed_finishes_the_images_it_is_at_and_no_others(images: list[bytes], keep_bytes: int | None) -> None:
    class Slow(Pictures):
        asked = 0
        reading = threading.Semaphore(0)
        go_on = threading.Event()

        def image(self, number: int, /) -> bytes:
            self.asked += 1
            self.reading.release()
            assert self.go_on.wait(60)
            return super().image(number)

    source = Slow(images)
    feed = ImageLoader(source, LARGE, batch_size=120, threads=3, keep_bytes=keep_bytes, read_ahead=False)
    batches = iter(feed)
    source.reading.acquire()
    closing = threading.Thread(target=feed.close)
    closing.start()
    threading.Timer(0.3, source.go_on.set).start()  # the feed is being closed by then
    with pytest.raises(FeedError, match="closed"):
        next(batches)
    closing.join()
    assert source.asked <= 2 * 3 and feed_threads() == []


def test_a_closed_feed_tells_its_reader_and_can_be_iterated_again() -> None:
    feed = ImageLoader(JPEGS, LARGE, batch_size=8)
    batches = iter(feed)
    feed.close()
    with pytest.raises(FeedError, match="closed"):
        for _ in range(9):
            next(batches)
    with feed:
        assert isinstance(next(iter(feed)), Batch)


@pytest.mark.parametrize(
    "ending",
    ["pass", *(pytest.param(code, marks=pytest.mark.slow) for code in ("sys.exit(3)", "raise SystemExit(4)")), "1 / 0"],
)
def test_a_program_may_end_while_the_feed_runs(ending: str, tmp_path: Path) -> None:
    write_records(tmp_path / "a.rec", JPEGS).close()
    code = f"""
import sys
from steadytrain.data.loader import Crop, ImageLoader
from steadytrain.data.recordio.reader import Records
feed = ImageLoader(Records.open(sys.argv[1]), Crop(kind="resized-crop", size=224), batch_size=64, threads=4)
batches = iter(feed)
next(batches)
{ending}
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "a.rec")], capture_output=True, text=True)
    expected = {"pass": 0, "sys.exit(3)": 3, "raise SystemExit(4)": 4, "1 / 0": 1}
    assert done.returncode == expected[ending], done.stderr
    assert ("ZeroDivisionError" in done.stderr) if ending == "1 / 0" else done.stderr == ""


DROPPED = """
import numpy as np
from steadytrain.data.loader import Crop, ImageLoader
from steadytrain.data.images.encode import to_ppm

class Large:
    labels = np.arange(50)
    image = staticmethod(lambda number: data)
    __len__ = lambda self: 50

data = to_ppm(np.zeros((3000, 3000, 3), np.uint8))
cut = Crop(kind="resized-crop", size=224, area=(0.9, 1))
for batch in ImageLoader(Large(), cut, batch_size=1, threads=4, keep_bytes=0):
    break
"""


@pytest.mark.parametrize("attempt", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_program_may_end_just_after_a_loop_was_left(attempt: int) -> None:
    # Threads of a dropped iteration are then still in native code, about four times in six when nobody waits for them.
    done = subprocess.run([sys.executable, "-c", DROPPED], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


FORK = """
import os, sys, warnings
from steadytrain.errors import FeedError
from steadytrain.data.loader import Crop, ImageLoader
from steadytrain.data.recordio.reader import Records
warnings.simplefilter("ignore")  # newer Pythons advise against forking a process that has threads
feed = ImageLoader(Records.open(sys.argv[1]), Crop(kind="none", size=8), batch_size=8, threads=2)
batches = iter(feed)
next(batches)
if os.fork() == 0:
    try:
        for _ in range(9):
            next(batches)
    except FeedError as error:
        feed.close()
        print(error, len(next(iter(feed))), flush=True)
    os._exit(0)
os.wait()
feed.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_forked_process_must_iterate_anew(tmp_path: Path) -> None:
    write_records(tmp_path / "a.rec", JPEGS).close()
    command = [sys.executable, "-c", FORK, str(tmp_path / "a.rec")]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (
        process.stdout
        == "the iteration started in the process that this one was forked from: iterate over the loader again in"
        " this process 8\n"
    )


FORK_AT_WORK = """
import os, warnings
from steadytrain.data.loader import Crop, ImageLoader
from tests.data.loader.pictures import small_pngs
warnings.simplefilter("ignore")
feed = ImageLoader(small_pngs(3000), Crop(kind="none", size=16), batch_size=16, threads=4, depth=2)
batches = iter(feed)
for _ in range(8):
    next(batches)
    if os.fork() == 0:
        again = iter(feed)
        for _ in range(40):
            next(again)
        os._exit(0)
for _ in range(8):
    os.wait()
feed.close()
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_a_process_forked_while_the_threads_are_at_work_can_iterate_anew() -> None:
    subprocess.run([sys.executable, "-c", FORK_AT_WORK], check=True, timeout=60, cwd=PROJECT)


def test_memory_is_flat_over_many_epochs() -> None:
    source = mixed_jpegs(40)
    process = psutil.Process()
    shared = set(Path("/dev/shm").iterdir())

    def epochs(n: int) -> int:
        with ImageLoader(source, LARGE, batch_size=20, stop=40 * n, threads=2) as feed:
            for _ in feed:
                pass
        gc.collect()
        return int(process.memory_info().rss)

    before = epochs(10)
    assert epochs(60) - before < 4 * 2**20, "one leaked batch an epoch would be 11 MiB"
    deadline = time.monotonic() + 60
    while (left := set(Path("/dev/shm").iterdir()) - shared) and time.monotonic() < deadline:
        time.sleep(0.1)  # those of tests beside this one go
    assert not left


def test_times_tell_what_the_threads_did() -> None:
    feed = ImageLoader(JPEGS, LARGE, batch_size=10, stop=60, threads=2, keep_bytes=0)
    list(feed)
    times = feed.stats()
    assert times.images == 60 and times.bytes == 2 * sum(map(len, JPEGS.images)) and times.threads == 2
    assert times.decode_seconds > 0 < times.batch_seconds and times.read_seconds > 0


# -- what goes wrong ----------------------------------------------------------------------------------------------


def test_a_thread_that_cannot_go_on_names_the_record() -> None:
    class Broken(Pictures):
        def image(self, number: int, /) -> bytes:
            if number == 7:
                raise RuntimeError("the disk said no")
            return super().image(number)

    with pytest.raises(FeedError, match="record 7: RuntimeError: the disk said no"):
        list(ImageLoader(Broken(JPEGS.images), LARGE, batch_size=5, train=False, threads=2))


@pytest.mark.usefixtures("faults")
@pytest.mark.parametrize("keep_bytes", [0, None])
@pytest.mark.parametrize("count", [3, 99])
@pytest.mark.parametrize("number", [*PASSING, None], ids=str)
def test_no_other_image_stands_in_for_one_that_the_system_could_not_read(
    number: int | None, count: int, keep_bytes: int | None
) -> None:
    class Failing(Pictures):
        left = count

        def image(self, number_of_image: int, /) -> bytes:
            if number_of_image == 7 and self.left:
                self.left -= 1
                raise TimeoutError("timed out") if number is None else OSError(number, os.strerror(number))
            return super().image(number_of_image)

    met: list[Any] = []
    source = small_pngs(30)
    options: dict[str, Any] = {"batch_size": 10, "stop": 60, "threads": 1, "keep_bytes": keep_bytes}
    loader = ImageLoader(Failing(source.images), SMALL, on_bad=met.append, **options)
    if count == 99:
        with pytest.raises(StorageError, match=r"cannot read record 7: .*the same command resumes"):
            list(loader)
    else:
        assert same(everything(loader), everything(ImageLoader(source, SMALL, **options)))
    assert not met


def test_a_run_ends_where_its_records_cannot_be_read_and_goes_on_when_they_can(tmp_path: Path, faults: Faults) -> None:
    path = tmp_path / "a.rec"
    with write_records(path, small_pngs(30)) as records:

        def batches(start: int = 0) -> Iterator[Batch]:
            options: dict[str, Any] = {"batch_size": 10, "start": start, "stop": 60, "keep_bytes": 0, "depth": 1}
            return iter(ImageLoader(records, SMALL, threads=1, **options))

        whole = [batch.images.copy() for batch in batches()]
        stream = batches()
        first = next(stream).images.copy()
        faults.fail(path, errno.EIO, 999)
        with pytest.raises(StorageError, match=r"a\.rec: .*\(EIO, 5\)"):
            list(stream)
        faults.fail(path, errno.EIO, 0)
        assert np.array_equal(np.stack([first, *(batch.images for batch in batches(10))]), np.stack(whole))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0: it must be at least 1"),
        ({"batch_size": 8, "depth": 0}, "depth=0"),
        ({"batch_size": 8, "threads": 0}, "threads=0"),
        ({"batch_size": 8, "start": -8}, "start=-8"),
        ({"batch_size": 8, "repeats": 0}, "repeats=0"),
        ({"batch_size": 8, "stop": 20}, "use stop=24"),
        ({"batch_size": 8, "start": 16, "stop": 8}, "use stop=16"),
        ({"batch_size": 8, "ids": np.array([], int)}, "at least one number"),
        ({"batch_size": 8, "ids": np.array([0, 30])}, "from 0 to 30; valid ids are 0 to 29"),
        ({"batch_size": 8, "ids": np.arange(30) > 9}, r"type bool.*np.flatnonzero"),
        ({"batch_size": 8, "ids": np.array([0.5])}, "type float64"),
        ({"batch_size": 1.5}, "batch_size is 1.5; it must be a whole number"),
        ({"batch_size": 8, "seed": -1}, "seed=-1: it must be at least 0"),
        ({"batch_size": 8, "seed": 2**63}, "a number of at most 9,223,372,036,854,775,807"),
        ({"batch_size": 8, "shard": (2, 2)}, "i from 0 to n - 1"),
        ({"batch_size": 8, "place": "thread"}, "Did you mean threads?"),
    ],
)
def test_what_cannot_be_is_refused_with_the_limit(options: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ImageLoader(JPEGS, LARGE, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("labels", [np.arange(29), np.arange(30, dtype=np.uint8), np.ones((30, 2)), list(range(30))])
def test_labels_of_another_kind_or_number_are_refused(labels: Any) -> None:
    with pytest.raises(DataError, match=r"the labels are .*; they must be a numpy array, int64\[30\]"):
        ImageLoader(Pictures(JPEGS.images, labels), LARGE, batch_size=8)


def test_data_without_images_is_refused() -> None:
    with pytest.raises(DataError, match="no images"):
        ImageLoader(Pictures([]), LARGE, batch_size=1)


def test_threads_are_chosen_for_what_runs_beside_them() -> None:
    assert 1 <= default_threads(pin=False) <= default_threads(pin=True) <= (os.cpu_count() or 1)
    assert ImageLoader(JPEGS, LARGE, batch_size=4).task.num_threads == default_threads(pin=False)


def test_a_large_and_a_tiny_image_go_together() -> None:
    source = Pictures([encode(scene(0, 2000, 1500), "JPEG"), encode(scene(1, 1, 1)), encode(scene(2, 3, 500))])
    images, _, _ = everything(ImageLoader(source, LARGE, batch_size=3, stop=30))
    assert images.shape == (30, 40, 40, 3)


# -- several small batches in one go --------------------------------------------------------------------------------


SMALL_CUTS = [
    Crop(kind="pad-crop", size=16, pad=2, flip=True),
    Crop(kind="none", size=16, flip=False),
    Crop(kind="pad-crop", size=12, flip=False),
]


@pytest.mark.parametrize("cut", SMALL_CUTS, ids=["pad", "none", "crop"])
@pytest.mark.parametrize(
    "more",
    [{}, {"shard": (1, 3), "stop": 900}, {"share": (3, 17), "stop": 850}, {"blocks": BlockShuffle(size=4, window=3)}],
    ids=["stream", "shard", "share", "blocks"],
)
def test_they_are_the_same_as_one_by_one(cut: Crop, more: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    data, options = small_pngs(40), {"batch_size": 10, "seed": 3, "stop": 900} | more
    together = everything(ImageLoader(data, cut, threads=2, **options))
    with monkeypatch.context() as patched:
        patched.setattr(batch_worker, "MOST_BATCHES", 1)
        assert same(together, everything(ImageLoader(data, cut, threads=2, **options))), "kept"
    assert same(together, everything(ImageLoader(data, cut, threads=2, keep_bytes=0, **options))), "decoded each time"


def test_an_evaluation_has_its_short_last_batch() -> None:
    feed = ImageLoader(small_pngs(43), SMALL_CUTS[0], batch_size=10, train=False, threads=2)
    first, second = everything(feed), everything(feed)
    assert same(first, second) and [len(batch) for batch in feed] == [10, 10, 10, 10, 3]


def test_when_all_images_are_kept_the_threads_end_and_only_small_batches_are_made_together() -> None:
    small = ImageLoader(small_pngs(40), SMALL_CUTS[0], batch_size=10, threads=2)
    batches = iter(small)
    for _ in range(1000):  # on a busy machine the threads have begun some more of them
        next(batches)
        if small.stats().by_loop:
            break
    for _ in range(20):
        next(batches)
    starved = small.stats().starved
    for _ in range(20):
        next(batches)
    for thread in [thread for thread in threading.enumerate() if thread.name.startswith("feed-")]:
        thread.join(60.0)
        assert not thread.is_alive()
    stats = small.stats()
    assert stats.by_loop and stats.depth == MOST_BATCHES
    assert stats.starved == starved, "what is made when it is wanted is ready"
    assert small._worker.batches_per_job(10) == MOST_BATCHES
    assert small._worker.batches_per_job(2**20) == 1
    del batches
    gc.collect()
    assert small.stats().by_loop, "also after the last batch"
    small.close()


def test_batches_on_a_device_are_made_together_as_well() -> None:
    data = small_pngs(40)
    options: dict[str, Any] = {"batch_size": 10, "seed": 3, "stop": 900}
    on_device = ImageLoader(data, SMALL_CUTS[0], threads=2, device=torch.device("cpu"), **options)
    usual = ImageLoader(data, SMALL_CUTS[0], threads=2, keep_bytes=0, **options)
    assert same(everything(on_device), everything(usual))
    assert on_device._worker.batches_per_job(2**20) == MOST_BATCHES and on_device.stats().device_bytes > 0


def test_a_damaged_image_is_replaced_in_every_pass() -> None:
    data = small_pngs(40)
    data.images[7] = b"no image"
    document: dict[str, Any] = {"batch_size": 10, "seed": 3, "stop": 400, "on_bad": lambda bad: None}
    together = everything(ImageLoader(data, SMALL_CUTS[0], threads=1, **document))
    assert same(together, everything(ImageLoader(data, SMALL_CUTS[0], threads=1, keep_bytes=0, **document)))
    assert 7 not in np.unique(together[1])


# -- shards ---------------------------------------------------------------------------------------------------------


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


class Queue:
    """Tells numbers of batches a few at a time, the last ones only to who waits; notes what was delivered."""

    def __init__(self, *numbers: list[int]) -> None:
        self.told, self.seen = list(numbers), list[int]()

    def next_batches(self) -> list[int]:
        return self.told.pop(0) if len(self.told) > 2 else []

    def wait_for_batch(self) -> list[int]:
        return self.told.pop(0) if self.told else []

    def delivered(self, batch: int) -> None:
        self.seen.append(batch)


@pytest.mark.parametrize("keep_bytes", [0, None])
@pytest.mark.parametrize("sizes", [([3, 0], [5], [4, 1], [2]), ([0],), ([5], [], [0, 1], [4]), ()])
def test_batches_that_a_queue_names_are_those_of_the_stream(
    sizes: tuple[list[int], ...], keep_bytes: int | None
) -> None:
    source = small_pngs(23)
    whole = list(ImageLoader(source, CUT, batch_size=8, seed=3, stop=48))
    queue = Queue(*sizes)
    with ImageLoader(source, CUT, batch_size=8, seed=3, stop=48, queue=queue, keep_bytes=keep_bytes) as loader:
        batches = list(loader)
    assert queue.seen == [number for numbers in sizes for number in numbers]
    for number, batch in zip(queue.seen, batches, strict=True):
        assert np.array_equal(batch.images, whole[number].images)
        assert np.array_equal(batch.positions, whole[number].positions)
    assert not feed_threads()


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
def test_shard_number_out_of_range_is_refused(shard: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="from 0 to n - 1"):
        ImageLoader(small_pngs(4), CUT, batch_size=2, shard=shard)


def test_shards_of_unequal_length_are_refused_in_training() -> None:
    with pytest.raises(InputError, match=r"in each of 2 shards.*use stop=16"):
        ImageLoader(small_pngs(4), CUT, batch_size=4, stop=12, shard=(0, 2))


# -- where the threads live -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "options"),
    [
        ("process", {}),
        ("process", {"stop": 4 * 1_000}),
        ("threads", {"stop": 4 * 999}),
        ("threads", {"train": False}),
        ("threads", {"pin": False}),
        ("process", {"crop": Crop(kind="resized-crop", size=224)}),
        ("process", {"crop": Crop(kind="resized-crop", size=512), "threads": 2}),
        ("threads", {"crop": Crop(kind="resized-crop", size=512), "threads": 1}),
        ("threads", {"crop": Crop(kind="resized-crop", size=224), "pin": False}),
        ("threads", {"crop": SMALL, "device": torch.device("cpu")}),
        ("process", {"crop": SMALL, "device": torch.device("cpu"), "keep_bytes": 1000}),
    ],
    ids=str,
)
def test_auto_chooses_a_process_on_a_gpu_where_threads_would_slow_down_launching(
    place: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("steadytrain.machine.facts.cores", lambda: 2)
    given: dict[str, Any] = {"crop": LARGE, "batch_size": 4, "pin": True, "place": "auto"} | options
    assert ImageLoader(small_pngs(30), **given).choose_place().place == place
    monkeypatch.setattr("steadytrain.machine.facts.cores", lambda: 1)
    assert ImageLoader(small_pngs(30), **given).choose_place().place == "threads"


def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_loader, "LEAST_BATCHES", 1)
    monkeypatch.setattr(ImageLoader, "choose_place", lambda loader: Placement("process", "a test"))


def test_auto_decides_once_before_the_first_batch_and_changes_no_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _always(monkeypatch)
    placements: list[Placement] = []
    with write_records(tmp_path / "a.rec", small_pngs(30)) as records:
        expected = everything(ImageLoader(records, SMALL, batch_size=8, stop=80, seed=3))
        with ImageLoader(
            records, SMALL, batch_size=8, stop=80, seed=3, place="auto", on_placed=placements.append
        ) as loader:
            for _ in range(2):
                assert same(expected, everything(loader))
            assert loader.place == "process" and len(loader._children) == 1
    assert placements == [Placement("process", "a test")]


def test_auto_stays_with_threads_where_a_process_cannot_have_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    _always(monkeypatch)
    placements: list[Placement] = []
    source = small_pngs(30)
    source.cannot = lambda: None  # type: ignore[attr-defined]
    with ImageLoader(source, SMALL, batch_size=4, stop=80, place="auto", on_placed=placements.append) as loader:
        assert len(list(loader)) == 20
    assert placements[0].place == "threads" and "cannot be pickled" in placements[0].reason


def test_short_streams_and_evaluations_report_no_placement() -> None:
    placements: list[Placement] = []
    options: dict[str, Any] = {"batch_size": 4, "place": "auto", "on_placed": placements.append}
    list(ImageLoader(small_pngs(30), SMALL, stop=400, **options))
    list(ImageLoader(small_pngs(30), SMALL, train=False, **options))
    assert placements == []


@pytest.mark.parametrize("keep_bytes", [0, None])
def test_alternating_flips_mirror_in_odd_epochs_what_even_ones_left_alone(keep_bytes: int | None) -> None:
    """Epoch by epoch, from images that are decoded each time and from kept ones, which are made several at a time."""
    pictures, crop = small_pngs(24), Crop(kind="pad-crop", size=16, pad=0, flip="alternating")
    with ImageLoader(pictures, replace(crop, flip=False), batch_size=24, stop=24) as plain:
        images, ids, _ = everything(plain)
    as_they_are = dict(zip(ids.tolist(), images, strict=True))
    with ImageLoader(pictures, crop, batch_size=6, seed=3, stop=96, keep_bytes=keep_bytes, threads=2) as feed:
        images, ids, positions = everything(feed)
    flipped: list[dict[int, bool]] = [{} for _ in range(4)]
    for image, sample, epoch in zip(images, ids.tolist(), (positions // 24).tolist(), strict=True):
        flipped[epoch][sample] = bool((image == as_they_are[sample][:, ::-1]).all())
        assert flipped[epoch][sample] or (image == as_they_are[sample]).all()
    assert flipped[0] == flipped[2] and flipped[1] == flipped[3]
    assert all(flipped[0][sample] != flipped[1][sample] for sample in range(24))
    assert 4 < sum(flipped[0].values()) < 20


def test_ranks_share_the_cores_and_no_gpu_gets_more_threads_than_help(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadytrain.machine.facts.cores", lambda: 112)
    assert [default_threads(pin=True, sharing=ranks) for ranks in (1, 8, 16, 128)] == [10, 10, 7, 1]
    assert [default_threads(pin=False, sharing=ranks) for ranks in (1, 8, 112)] == [56, 7, 1]
