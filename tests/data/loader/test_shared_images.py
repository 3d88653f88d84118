"""Several processes of one machine keep one copy of the images: the same batches as ever, and nothing left behind."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.data.loader.pictures import Pictures, encode, everything, same, scene, small_pngs, write_records
from tests.data.loader.sharing import CUT
from tests.data.loader.test_image_cache import CUTS, LARGE, LARGE_CUTS, large, names

from steadytrain.data.loader import BadImage, Crop, ImageLoader
from steadytrain.data.recordio.reader import Records

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")
PROJECT = Path(__file__).parents[3]
IMAGES, PIXEL_BYTES = 600, 600 * 32 * 32 * 3


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """In place of /dev/shm, which others use, too; whatever happens in a test, it leaves nothing there."""
    folder = tmp_path_factory.mktemp("memory", numbered=True)
    monkeypatch.setenv("STEADYTRAIN_SHM", str(folder))
    yield folder
    gc.collect()
    assert left(folder) == []


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# -- two feeds of this process, which have files of their own: what they have in common is what two processes have


def two(source: Pictures, cut: Crop, *, stop: int = 140, **options: Any) -> list[ImageLoader]:
    values = {"batch_size": 7, "seed": 5, "stop": stop, "threads": 2, "launch": "two of a test", **options}
    return [ImageLoader(source, cut, **{**values, "shard": (i, 2)}) for i in range(2)]


def in_turn(feeds: list[ImageLoader]) -> tuple[Any, Any]:
    """Images and ids of the common stream, whose batches they make by turns."""
    batches = [batch for pair in zip(*feeds, strict=True) for batch in pair]
    return np.concatenate([batch.images for batch in batches]), np.concatenate([batch.ids for batch in batches])


@pytest.mark.parametrize("shape", [(16, 16), (24, 16)], ids=str)
@pytest.mark.parametrize("cut", CUTS, ids=names(CUTS))
def test_small_images_are_decoded_by_one_and_used_by_both(cut: Crop, shape: tuple[int, int]) -> None:
    source = small_pngs(35, height=shape[0], width=shape[1])
    feeds = two(source, cut)
    images, ids = in_turn(feeds)
    alone = everything(ImageLoader(source, cut, batch_size=7, seed=5, stop=140, keep_bytes=0))
    assert np.array_equal(images, alone[0]) and np.array_equal(ids, alone[1])
    each = 35 * shape[0] * shape[1] * cut.channels
    assert [(feed.stats().kept_bytes, feed.stats().shared_bytes) for feed in feeds] == [(each, each)] * 2
    assert sum(feed.stats().bytes for feed in feeds) < 1.5 * sum(map(len, source.images))


@pytest.mark.parametrize(
    ("name", "cut"),
    [  # one cut of each kind of image, each cut of some; all of all with the slow tests
        pytest.param(name, cut, id=f"{name}-{words}", marks=() if (row + column) % 3 == 0 else pytest.mark.slow)
        for row, name in enumerate(LARGE)
        for column, (cut, words) in enumerate(zip(LARGE_CUTS, names(LARGE_CUTS), strict=True))
    ],
)
def test_large_images_are_decoded_by_one_and_used_by_both(name: str, cut: Crop) -> None:
    feeds = two(large(name), cut, stop=280, keep_bytes=2**26)
    images, ids = in_turn(feeds)
    alone = everything(ImageLoader(large(name), cut, batch_size=7, seed=5, stop=280, keep_bytes=0))
    assert np.array_equal(images, alone[0]) and np.array_equal(ids, alone[1])
    assert all(feed._worker.cache.full and feed.stats().shared_bytes for feed in feeds)


def test_bad_images_are_replaced_alike_and_reported_to_both_ranks() -> None:
    images = list(small_pngs(35).images)
    images[3] = images[4] = b"nothing"
    faults = list[list[BadImage]]([[], []])
    feeds = two(Pictures(images), CUTS[0], stop=560)
    for feed, bad in zip(feeds, faults, strict=True):
        feed.on_bad = bad.append
    answers = in_turn(feeds)
    alone = everything(ImageLoader(Pictures(images), CUTS[0], batch_size=7, seed=5, stop=560, on_bad=lambda bad: None))
    assert np.array_equal(answers[0], alone[0]) and np.array_equal(answers[1], alone[1])
    assert [sorted((fault.id, fault.instead) for fault in bad) for bad in faults] == [[(3, 5), (4, 5)]] * 2


def test_rank_that_finds_all_images_cached_still_gets_bad_ones_reported() -> None:
    images = list(small_pngs(35).images)
    images[3] = images[4] = b"nothing"
    for feed in two(Pictures(images), CUTS[0], stop=560):
        faults = list[BadImage]()
        feed.on_bad = faults.append
        list(feed)
        assert sorted((fault.id, fault.instead) for fault in faults) == [(3, 5), (4, 5)]


@pytest.mark.parametrize(
    "options",
    [{"launch": "another"}, {"ids": np.arange(34)}, {"train": False, "shard": (0, 1), "stop": None}],
    ids=lambda options: next(iter(options)),
)
def test_feeds_that_differ_in_their_data_share_nothing(options: dict[str, Any]) -> None:
    one, _ = two(small_pngs(35), CUTS[0])
    list(one)
    other = ImageLoader(small_pngs(35), CUTS[0], **{"batch_size": 7, "stop": 140, "launch": "two of a test", **options})
    list(other)
    assert other.stats().bytes == sum(map(len, small_pngs(other.num_samples).images))
    changed = Pictures([*small_pngs(34).images, encode(scene(99, 16, 16))])
    feed = ImageLoader(changed, CUTS[0], batch_size=7, stop=140, launch="two of a test")
    list(feed)
    assert feed.stats().bytes == sum(map(len, changed.images))


def test_where_memory_is_small_each_keeps_its_own_and_says_so(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEADYTRAIN_SHM", str(small_disk))
    source = small_pngs(1500)
    feed = ImageLoader(source, CUTS[0], batch_size=7, seed=5, stop=2100, launch="a test")
    with pytest.warns(UserWarning, match=r"not shared .*1\.2 MB.*2 MB free.*its own copy"):
        shared = everything(feed)
    assert same(shared, everything(ImageLoader(source, CUTS[0], batch_size=7, seed=5, stop=2100)))
    assert feed.stats().shared_bytes == 0 and feed.stats().kept_bytes == 1500 * 768
    assert list(small_disk.iterdir()) == []


# -- processes


def start(data: Path, rank: int, world: int, *, place: str, waits: int = -1) -> subprocess.Popen[str]:
    values = {"WORLD_SIZE": world, "RANK": rank, "LOCAL_WORLD_SIZE": world, "LOCAL_RANK": rank}
    env = os.environ | {name: str(value) for name, value in values.items()} | {"MASTER_PORT": str(os.getpid())}
    call = f"from tests.data.loader.sharing import main; main({str(data)!r}, {place!r}, '45', '{waits}')"
    pipe = subprocess.PIPE
    return subprocess.Popen([sys.executable, "-c", call], cwd=PROJECT, env=env, stdin=pipe, stdout=pipe, text=True)


def said(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def had(process: subprocess.Popen[str], data: Path, rank: int) -> dict[str, Any]:
    """What a process that has taken all its batches told."""
    assert said(process) == "done\n"
    return told_by(data, rank)


def told_by(data: Path, rank: int) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(Path(f"{data}.{rank}.json").read_text())
    return document


def ended(process: subprocess.Popen[str]) -> subprocess.Popen[str]:
    process.communicate()
    return process


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharing") / "small.rec"
    write_records(path, small_pngs(IMAGES, height=32, width=32)).close()
    return path


def require_the_same(data: Path, answers: dict[int, dict[str, Any]], world: int) -> None:
    """What each process had is what it would have had alone."""
    with Records.open(data) as records:
        for rank, answer in answers.items():
            shard = (rank, world)
            alone = everything(
                ImageLoader(records, CUT, batch_size=40, seed=3, stop=40 * world * 45, shard=shard, launch="")
            )
            assert answer["ids"] == alone[1].tolist()
            assert np.array_equal(np.load(f"{data}.{rank}.npy"), alone[0])


@pytest.mark.parametrize("place", [pytest.param("threads", marks=pytest.mark.slow), "process"])
def test_three_processes_have_one_copy_and_the_batches_of_the_unshared_feed(data: Path, place: str) -> None:
    running = [start(data, rank, 3, place=place) for rank in range(3)]
    shares = {rank: had(child, data, rank) for rank, child in enumerate(running)}
    for process in running:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    in_memory = sum(int(said(child)) for child in running)
    assert [ended(child).returncode for child in running] == [0, 0, 0]
    # Whoever is far ahead of the others ends before they have decoded their part of the first pass.
    assert all(share["kept_bytes"] == share["shared_bytes"] > 0.7 * PIXEL_BYTES for share in shares.values())
    assert place == "process" or PIXEL_BYTES <= in_memory < 1.05 * PIXEL_BYTES
    require_the_same(data, shares, 3)


@pytest.mark.parametrize("place", [pytest.param("threads", marks=pytest.mark.slow), "process"])
def test_killed_process_disturbs_no_other_and_leaves_no_files(data: Path, place: str) -> None:
    running = [start(data, rank, 3, place=place, waits=2) for rank in range(3)]
    assert said(running[2]) == "waiting\n"
    running[2].send_signal(signal.SIGKILL)
    shares = {rank: had(running[rank], data, rank) for rank in range(2)}
    assert [ended(process).returncode for process in running] == [0, 0, -signal.SIGKILL]
    require_the_same(data, shares, 3)


@pytest.mark.slow
@pytest.mark.parametrize("place", [pytest.param("threads", marks=pytest.mark.slow), "process"])
def test_one_that_is_left_alone_works_and_takes_its_memory_with_it(data: Path, folder: Path, place: str) -> None:
    process = start(data, 1, 2, place=place)
    shared = had(process, data, 1)
    assert shared["shared_bytes"] and left(folder)  # the other may still come
    assert ended(process).returncode == 0
    require_the_same(data, {1: shared}, 2)


@pytest.mark.slow
def test_all_at_once_killed_leave_nothing_once_each_has_come(data: Path, folder: Path) -> None:
    running = [start(data, rank, 2, place="threads", waits=rank) for rank in range(2)]
    for process in running:
        assert said(process) == "waiting\n"
    while left(folder):  # a batch may be had before the last of them has come
        time.sleep(0.01)
    for process in running:
        process.kill()
        ended(process)


@pytest.mark.slow
def test_torchruns_processes_share_and_a_restart_with_fewer_begins_anew(data: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"from tests.data.loader.sharing import main; main({str(data)!r}, 'threads', '45', '-1')")
    for world in (3, 2):
        agent = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world), str(script)]
        env = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
        subprocess.run(
            [sys.executable, *agent], env=env, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True
        )
        results = [told_by(data, rank) for rank in range(world)]
        assert all(result["kept_bytes"] == result["shared_bytes"] > 0.7 * PIXEL_BYTES for result in results)
        assert [len(result["ids"]) for result in results] == [40 * 45] * world
