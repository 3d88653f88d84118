"""The loader in a child process: the same batches, what becomes of the process, and the memory that both share."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from tests.data.loader.pictures import Pictures, everything, mixed_jpegs, same, small_pngs, write_records

from steadytrain.data.images import jpeg
from steadytrain.data.loader import BadImage, Crop, ImageLoader
from steadytrain.data.loader.batch import Batch
from steadytrain.data.loader.subprocess_loader import SharedBatches
from steadytrain.data.recordio.framing import pack_header
from steadytrain.data.recordio.reader import Records
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.errors import FeedError, StorageError, TooManyBadError

SMALL = Crop(kind="pad-crop", size=16, flip=True)
LARGE = Crop(kind="resized-crop", size=40, flip=True)
PROJECT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def pngs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Records]:
    with write_records(tmp_path_factory.mktemp("pngs") / "small.rec", small_pngs(30)) as records:
        yield records


@pytest.fixture(scope="module")
def jpegs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Records]:
    with write_records(tmp_path_factory.mktemp("jpegs") / "large.rec", mixed_jpegs(30)) as records:
        yield records


def child_of(feed: ImageLoader) -> psutil.Process:
    (child,) = feed._children
    return psutil.Process(child.pid)


def gone(process: psutil.Process, seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE and time.monotonic() < end:
        time.sleep(0.01)
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


# -- the same batches ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "cut"), [("pngs", SMALL), ("jpegs", LARGE)])
def test_a_process_gives_the_same_bytes_as_threads(kind: str, cut: Crop, request: pytest.FixtureRequest) -> None:
    source = request.getfixturevalue(kind)
    batches = everything(ImageLoader(source, cut, batch_size=20, stop=120, seed=3, threads=2))
    with ImageLoader(source, cut, batch_size=8, stop=120, seed=3, threads=3, place="process") as feed:
        assert same(batches, everything(feed))
        assert feed.stats().images == 120 and feed.keeps == (kind == "pngs")
    with ImageLoader(source, cut, batch_size=8, start=40, stop=120, seed=3, threads=1, place="process") as feed:
        assert same(batches, everything(feed), skip=40)


def test_evaluations_are_the_same_and_share_one_process(jpegs: Records) -> None:
    batches = everything(ImageLoader(jpegs, LARGE, batch_size=7, train=False, threads=2))
    with ImageLoader(jpegs, LARGE, batch_size=7, train=False, threads=2, place="process") as feed:
        runs, processes = [], set()
        for _ in range(3):
            runs.append(everything(feed))
            processes.add(child_of(feed).pid)
        assert all(same(batches, run) for run in runs) and len(processes) == 1


def test_record_files_are_opened_anew_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_records(tmp_path / "own.rec", mixed_jpegs(30)).close()
    with Records.open("own.rec") as records:
        monkeypatch.chdir("/")
        ids = np.array([4, 9, 2, 25])
        image_loader = ImageLoader(records, LARGE, batch_size=2, ids=ids, stop=12)
        with ImageLoader(records, LARGE, batch_size=2, ids=ids, stop=12, place="process") as there:
            assert same(everything(image_loader), everything(there))
            labels = [batch.labels for batch in there]
            assert all(np.array_equal(a, b.labels) for a, b in zip(labels, image_loader, strict=True))


def test_label_vectors_follow_the_ids(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "vectors.rec") as writer:
        for number, image in enumerate(small_pngs(6).images):
            writer.write(pack_header([number, 0.5 * number], id=number) + image, key=number)
    with Records.open(tmp_path / "vectors.rec") as records:
        for batch in ImageLoader(records, SMALL, batch_size=3, stop=12, place="process"):
            assert np.array_equal(batch.labels, np.stack((batch.ids, 0.5 * batch.ids), axis=1).astype(np.float32))


def test_two_iterations_at_once_are_two_processes(pngs: Records) -> None:
    with ImageLoader(pngs, SMALL, batch_size=10, train=False, threads=1, place="process") as feed:
        both = list(zip(feed, feed, strict=True))
        assert len(both) == 3 and all(np.array_equal(a.images, b.images) for a, b in both)
        assert len(feed._children) == 2


def test_an_abandoned_process_is_killed_and_the_error_raised(pngs: Records) -> None:
    feed, error = ImageLoader(pngs, SMALL, batch_size=10, threads=1, place="process"), FeedError("it hangs")
    batches = iter(feed)
    next(batches)
    assert list(feed.doing().values()) == ["producing batches"]
    feed.abandon(error)
    with pytest.raises(FeedError, match="it hangs"):
        for _ in batches:
            pass
    assert feed.doing() == {}


# -- memory -------------------------------------------------------------------------------------------------------


def test_batches_may_be_kept_also_when_the_process_is_gone(pngs: Records) -> None:
    with ImageLoader(pngs, SMALL, batch_size=10, stop=600, threads=2, place="process") as feed:
        kept = list(feed)
    del feed
    gc.collect()
    again = ImageLoader(pngs, SMALL, batch_size=10, stop=600, threads=2)
    assert all(np.array_equal(batch.images, other.images) for batch, other in zip(kept, again, strict=True))


def test_any_part_of_a_batch_may_be_kept(pngs: Records) -> None:
    with ImageLoader(pngs, SMALL, batch_size=10, stop=600, threads=2, place="process") as feed:
        parts = [
            (batch.labels, batch.ids[2:], batch.positions, torch.from_numpy(batch.images)[:, 1:]) for batch in feed
        ]
    for (labels, ids, positions, images), other in zip(
        parts, ImageLoader(pngs, SMALL, batch_size=10, stop=600), strict=True
    ):
        assert np.array_equal(labels, other.labels) and np.array_equal(ids, other.ids[2:])
        assert np.array_equal(positions, other.positions) and np.array_equal(images, other.images[:, 1:])


def test_cached_images_of_an_evaluation_survive_the_next(pngs: Records) -> None:
    with ImageLoader(pngs, SMALL, batch_size=8, train=False, threads=1, place="process") as feed:
        first = next(batches := iter(feed)), *batches
        copies = [batch.images.copy() for batch in first]
        for _ in range(20):
            assert sum(len(batch) for batch in feed) == 30
        assert all(np.array_equal(batch.images, copy) for batch, copy in zip(first, copies, strict=True))
        assert len(feed._children) == 1


def test_dropped_batches_give_their_memory_to_later_ones(pngs: Records) -> None:
    with ImageLoader(pngs, SMALL, batch_size=10, stop=3000, threads=2, place="process") as feed:
        addresses = {batch.images.ctypes.data for batch in feed}
        (child,) = feed._children
        assert len(addresses) <= child.slots.count


def test_no_more_is_made_ahead_than_there_is_room_for(jpegs: Records) -> None:
    with ImageLoader(jpegs, LARGE, batch_size=10, threads=2, place="process") as feed:
        batches = iter(feed)
        next(batches)
        (child,) = feed._children
        time.sleep(1.0)
        next(batches)
        assert feed.stats().images <= 10 * (child.depth + 1)


# -- bad images and errors ----------------------------------------------------------------------------------------


def test_bad_images_are_replaced_and_reported_as_by_threads(tmp_path: Path) -> None:
    images = mixed_jpegs(30).images
    damaged = write_records(tmp_path / "damaged.rec", Pictures([*images[:7], b"no image", *images[8:]]))
    faults: dict[str, list[BadImage]] = {"threads": [], "process": []}
    runs = []
    for place, bad in faults.items():
        with ImageLoader(damaged, LARGE, batch_size=10, stop=90, place=place, on_bad=bad.append) as feed:  # type: ignore[arg-type]
            runs.append(everything(feed))
    assert same(*runs) and faults["threads"] == faults["process"] and len(faults["process"]) == 1


@pytest.mark.parametrize("train", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_errors_have_the_same_type_and_words(train: bool, tmp_path: Path) -> None:
    broken = write_records(tmp_path / "broken.rec", Pictures([*mixed_jpegs(12).images, *[b"no image"] * 18]))
    words = []
    for place in ("threads", "process"):
        feed = ImageLoader(broken, LARGE, batch_size=5, stop=90 if train else None, train=train, threads=1, place=place)
        with feed, pytest.raises(TooManyBadError if train else FeedError) as caught:
            everything(feed)
        words.append((type(caught.value), str(caught.value)))
    assert words[0] == words[1]


def test_a_source_that_cannot_travel_is_refused_with_the_remedy() -> None:
    source = small_pngs(4)
    source.lock = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(FeedError, match=r"cannot be pickled.*use place='threads'"):
        iter(ImageLoader(source, SMALL, batch_size=2, place="process"))


def test_a_source_of_the_main_program_is_refused_with_the_remedy() -> None:
    program = """
from tests.data.loader.pictures import Pictures, small_pngs
from steadytrain.data.loader import Crop, ImageLoader
class Own(Pictures): pass
try:
    next(iter(ImageLoader(Own(small_pngs(4).images), Crop(kind="none", size=16), batch_size=2, place="process")))
except Exception as error:
    print(type(error).__name__, error)
"""
    output = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PROJECT
    ).stdout
    assert output.startswith("FeedError the loader process cannot open the data") and "use place='threads'" in output


def test_more_shared_memory_than_the_machine_has_is_refused_with_the_remedy(pngs: Records) -> None:
    with pytest.raises(FeedError, match="lower batch_size or depth"):
        iter(ImageLoader(pngs, SMALL, batch_size=2**34, place="process"))


# -- the process --------------------------------------------------------------------------------------------------


def test_a_file_that_is_cut_short_while_a_process_reads_it_is_an_error_that_says_so(tmp_path: Path) -> None:
    records = write_records(tmp_path / "a.rec", mixed_jpegs(30))
    with records, ImageLoader(records, LARGE, batch_size=8, place="process", keep_bytes=0) as feed:
        batches = iter(feed)
        next(batches)
        os.truncate(records.path, 0)
        # It is told when the next record is looked at; the process ends if it was being copied.
        with pytest.raises((StorageError, FeedError), match="was truncated"):
            for _ in range(99):
                next(batches)


def test_a_killed_process_is_an_error_that_names_the_signal(jpegs: Records) -> None:
    with ImageLoader(jpegs, LARGE, batch_size=10, threads=2, place="process") as feed:
        batches = iter(feed)
        next(batches)
        child_of(feed).kill()
        with pytest.raises(FeedError, match="killed by SIGKILL"):
            for _ in range(100):
                next(batches)


def test_only_the_parent_hears_signals(pngs: Records) -> None:
    with ImageLoader(pngs, SMALL, batch_size=10, threads=1, place="process") as feed:
        batches = iter(feed)
        next(batches)
        for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            os.kill(child_of(feed).pid, name)
        assert sum(len(next(batches)) for _ in range(200)) == 2000


@pytest.mark.parametrize("how", ["close", "drop"])
def test_the_process_ends_with_the_iteration(how: str, jpegs: Records) -> None:
    feed = ImageLoader(jpegs, LARGE, batch_size=10, threads=2, place="process")
    batches = iter(feed)
    next(batches)
    process = child_of(feed)
    if how == "close":
        feed.close()
        with pytest.raises(FeedError, match="closed while it was being read"):
            for _ in range(100):
                next(batches)
    else:
        del batches
        gc.collect()
    assert not process.is_running()
    with feed:
        assert len(next(iter(feed))) == 10


def test_closing_wakes_whoever_waits(jpegs: Records) -> None:
    feed = ImageLoader(jpegs, LARGE, batch_size=2000, threads=1, place="process")
    batches, errors = iter(feed), list[str]()
    child_of(feed).suspend()  # so that no batch comes

    def wait() -> None:
        try:
            next(batches)
        except FeedError as error:
            errors.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.3)
    feed.close()
    waiting.join(60)
    assert errors == ["the data loader was closed while it was being read: iterate over it again"]


def test_the_process_of_a_killed_parent_ends() -> None:
    program = """
import os, time
from tests.data.loader.pictures import small_pngs
from steadytrain.data.loader import Crop, ImageLoader
feed = ImageLoader(small_pngs(30), Crop(kind="none", size=16), batch_size=2, place="process")
next(iter(feed)), (batches := iter(feed)), next(batches)
(child,) = [child for child in feed._children]
print(child.pid, flush=True)
if os.fork() == 0:
    os.setsid()
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=PROJECT) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        forked = [one for one in psutil.Process(parent.pid).children() if one.pid != child.pid]
        parent.kill()
        assert gone(child)
        for process in forked:
            process.kill()


def test_forked_process_gets_an_error_and_leaves_the_child_alone(pngs: Records) -> None:
    feed = ImageLoader(pngs, SMALL, batch_size=10, threads=1, place="process")
    batches = iter(feed)
    next(batches)
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        try:
            next(batches)
        except FeedError as error:
            del batches
            feed.close()
            os._exit(0 if "forked" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    assert sum(len(next(batches)) for _ in range(100)) == 1000
    feed.close()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_process_that_is_ready_has_loaded_what_it_needs(jpegs: Records) -> None:
    with ImageLoader(jpegs, LARGE, batch_size=10, threads=1, place="process") as feed:
        batches = iter(feed)
        (child,) = feed._children
        child.wait()
        loaded = Path(f"/proc/{child.pid}/maps").read_text()
        if jpeg.parts is not None:
            assert "steadytrain/native/library.so" in loaded and "libtorch" not in loaded
        elif torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512"):
            assert "libtorch" in loaded
        assert len(next(batches)) == 10


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_small_images_need_no_torch_there(pngs: Records) -> None:
    with ImageLoader(pngs, SMALL, batch_size=10, threads=1, place="process") as feed:
        batches = iter(feed)
        next(batches)
        assert "libtorch" not in Path(f"/proc/{child_of(feed).pid}/maps").read_text()


# -- memory that both share -----------------------------------------------------------------------------------------


SHAPE = (3, 5, 5, 3)


def test_two_maps_of_one_file_show_the_same() -> None:
    slots = SharedBatches(SHAPE, 4)
    other = SharedBatches(SHAPE, 4, file=os.dup(slots.file))
    for number in range(4):
        batch = slots.batch(number)
        batch.images[:], batch.labels[:], batch.ids[:], batch.positions[:] = number, 10, 20, 30
        assert slots.slot_of(batch.images) == number
    slots.done[:] = np.arange(len(slots.done))
    for number in range(4):
        batch = other.batch(number)
        assert (batch.images == number).all() and batch.images.shape == SHAPE
        assert np.stack((batch.labels, batch.ids, batch.positions)).tolist() == [[10] * 3, [20] * 3, [30] * 3]
    assert (other.done == np.arange(len(other.done))).all()


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
    slots, free = SharedBatches(SHAPE, 2), list[int]()
    held = HOLDS[what](slots.lend(1, free.append))
    gc.collect()
    assert free == []
    del held
    gc.collect()
    assert free == [1]


def test_views_outlive_the_slots() -> None:
    slots = SharedBatches(SHAPE, 2)
    images, file = slots.lend(0, print).images, slots.file
    images[:] = 7
    del slots
    gc.collect()
    assert (images == 7).all()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)


def test_more_than_half_of_the_memory_is_refused() -> None:
    with pytest.raises(FeedError, match="more than half of the machine's"):
        SharedBatches((2**40, 1, 1, 1), 2)


def test_without_memory_files_one_on_disk_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create", raising=False)
    slots = SharedBatches(SHAPE, 2)
    slots.batch(1).images[:] = 9
    assert (np.frombuffer(os.pread(slots.file, slots.bytes, slots.slot_bytes), np.uint8)[:100] == 9).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="page-locked memory can be had here")
def test_pinning_without_a_gpu_is_refused_with_the_remedy() -> None:
    with pytest.raises(FeedError, match="pin=False"):
        SharedBatches(SHAPE, 2).pin()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_pinned_slots_are_pinned_for_torch_and_copy_right() -> None:
    slots = SharedBatches((8, 64, 64, 3), 3)
    slots.pin()
    slots.batch(2).images[:] = np.arange(8, dtype=np.uint8)[:, None, None, None]
    tensor = torch.from_numpy(slots.batch(2).images)
    assert tensor.is_pinned()
    there = tensor.to("cuda", non_blocking=True)
    torch.cuda.synchronize()
    del slots
    gc.collect()
    assert tensor.is_pinned() and torch.equal(there.cpu(), tensor)
