"""The copy of an object on disk: the same bytes, bounded, shared, and right after a kill, a change or a full disk."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.store import Bucket, FaultProxy

from steadytrain.data.storage import object_cache
from steadytrain.data.storage import store as store_module
from steadytrain.data.storage.object_cache import Mirror, make_room, mirror_of, open_object, open_objects
from steadytrain.errors import DataError, StorageError

MB = 2**20


@pytest.fixture(scope="module")
def content() -> bytes:
    return np.random.default_rng(0).bytes(12 * MB + 12_345)


@pytest.fixture
def opened(bucket: Bucket, content: bytes) -> Iterator[Mirror]:
    mirror = _open(bucket.put("photos.rec", content))
    yield mirror
    mirror.close()


def _open(uri: str) -> Mirror:
    mirror = mirror_of(open_object(uri))
    assert mirror is not None
    return mirror


def _on_disk(mirror: Mirror) -> int:
    return mirror.file.stat().st_blocks * 512


def test_any_range_has_the_bytes_of_the_object(opened: Mirror, content: bytes) -> None:
    rng = np.random.default_rng(1)
    for start, end in rng.integers(0, len(content), (300, 2)).tolist():
        assert bytes(opened[start:end]) == content[start:end]
    assert len(opened) == len(content) and bytes(opened[len(content) - 3 :]) == content[-3:]
    assert bytes(opened.whole()) == content


def test_near_ranges_are_one_request_and_nothing_is_fetched_twice(opened: Mirror, content: bytes) -> None:
    starts = np.arange(0, len(content), 100_000)
    opened.require(starts, starts + 1000)
    first = opened.traffic()
    assert first.requests == -(-int(starts[-1] + 1000) // object_cache.REQUEST_BYTES)
    opened.require(starts, starts + 5000)
    assert opened.traffic() == first


def test_only_what_is_read_is_fetched_where_ranges_are_far_apart(opened: Mirror) -> None:
    starts = np.array([0, 3, 7]) * MB + 5
    opened.require(starts, starts + 100)
    assert opened.traffic().bytes == 3 * object_cache.PAGE_BYTES == _on_disk(opened)


def test_what_was_asked_for_ahead_comes_without_anybody_waiting(opened: Mirror, content: bytes) -> None:
    opened.ask(np.array([0]), np.array([len(content)]))
    until = time.monotonic() + 20
    while not opened.present.all():
        assert time.monotonic() < until
        time.sleep(0.01)
    requests = opened.traffic().requests
    assert bytes(opened[:]) == content and opened.traffic().requests == requests


def test_another_process_reads_what_this_one_fetched(opened: Mirror, content: bytes) -> None:
    assert bytes(opened[: 5 * MB]) == content[: 5 * MB]
    code = (
        "import sys, hashlib; from pathlib import Path; from steadytrain.data.storage.object_cache import Mirror\n"
        f"mirror = Mirror(Path(sys.argv[1])); print(hashlib.sha256(mirror[:{5 * MB}]).hexdigest()); mirror.close()"
    )
    requests = opened.traffic().requests
    command = [sys.executable, "-c", code, str(opened.file)]
    environment = {**os.environ, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}  # nobody there: nothing can be fetched
    told = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert told.strip() == hashlib.sha256(content[: 5 * MB]).hexdigest()
    assert opened.traffic().requests == requests


def test_a_kill_while_fetching_leaves_nothing_wrong(bucket: Bucket, content: bytes) -> None:
    uri = bucket.put("photos.rec", content)
    file = open_object(uri)
    code = (
        "import sys, numpy as np; from pathlib import Path; from steadytrain.data.storage.object_cache import Mirror\n"
        "mirror = Mirror(Path(sys.argv[1])); print('go', flush=True)\n"
        "for at in np.random.default_rng(2).permutation(len(mirror) // 50_000): mirror[at * 50_000 : at * 50_000 + 9]"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    until = time.monotonic() + 20
    mirror = Mirror(file)
    while mirror.present.sum() < 20 and time.monotonic() < until:
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert mirror.present.sum() >= 20
    assert bytes(mirror[:]) == content
    mirror.close()


def test_readers_never_see_a_page_that_is_being_removed(opened: Mirror, content: bytes) -> None:
    ended = threading.Event()
    wrong: list[int] = []

    def look(seed: int) -> None:
        for start in np.random.default_rng(seed).integers(0, len(content) - 200_000, 150).tolist():
            if bytes(opened[start : start + 200_000]) != content[start : start + 200_000]:
                wrong.append(start)

    def remove() -> None:
        rng, other = np.random.default_rng(9), Mirror(opened.file)  # as another process would
        while not ended.is_set():
            other.drop(rng.permutation(len(other.present))[:100])
            time.sleep(0.005)
        other.close()

    remover = threading.Thread(target=remove)
    readers = [threading.Thread(target=look, args=(seed,)) for seed in range(3)]
    for thread in (remover, *readers):
        thread.start()
    for thread in readers:
        thread.join()
    ended.set()
    remover.join()
    assert not wrong and opened.traffic().bytes > len(content)


def test_the_cache_stays_below_its_limit_and_forgets_what_was_used_least_recently(
    bucket: Bucket, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_cache, "LEAST_LIMIT", MB)
    monkeypatch.setenv("STEADYTRAIN_OBJECT_BYTES", "8M")
    ticks = iter(range(1, 1_000_000))
    monkeypatch.setattr(object_cache, "_now", lambda: next(ticks))
    mirror, page = _open(bucket.put("photos.rec", content)), object_cache.PAGE_BYTES
    assert not mirror.stays
    most = 0
    for number in range(len(mirror.present) - 1):
        mirror[number * page : number * page + 10]
        mirror[:10]  # always in use
        most = max(most, _on_disk(mirror))
    assert most <= 8_000_000 + mirror.limit // 32 + object_cache.THREADS * page
    assert mirror.present[0] and not mirror.present[1:50].any() and mirror.present[-50:-1].all()
    assert bytes(mirror[:]) == content
    mirror.close()


def test_objects_that_nobody_uses_go_first(bucket: Bucket, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    old, used = (_open(bucket.put(f"{name}.rec", content[:MB] + name.encode())) for name in ("old", "used"))
    old.whole().release()
    used.whole().release()
    old.close()
    objects = old.file.parent.parent
    os.utime(old.file.parent, (0, 0))
    make_room(objects, 3 * MB // 2)
    assert not old.file.exists() and used.present.all()
    used.close()


def test_a_changed_object_is_told_and_a_new_opening_reads_the_new_one(bucket: Bucket, content: bytes) -> None:
    mirror = _open(bucket.put("photos.rec", content))
    assert bytes(mirror[:100]) == content[:100]
    bucket.put("photos.rec", content[::-1])
    with pytest.raises(StorageError, match=r"photos\.rec has changed since it was opened"):
        mirror[8 * MB : 8 * MB + 10]
    assert bytes(mirror[:100]) == content[:100]
    mirror.close()
    new = _open(bucket.uri("photos.rec"))
    assert bytes(new[:]) == content[::-1]
    new.close()


def test_pages_are_not_trusted_after_the_machine_went_down(
    bucket: Bucket, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = bucket.put("photos.rec", content)
    mirror = _open(uri)
    mirror.whole().release()
    mirror.close()
    with mirror.file.open("r+b") as file:  # what a file system may leave after a power cut
        file.write(bytes(MB))
    monkeypatch.setattr(object_cache, "_boot", lambda: "another")
    again = _open(uri)
    assert not again.present.any() and bytes(again[:]) == content
    again.close()
    assert mirror.file.exists()  # another machine may use it
    os.utime(mirror.file.parent, (0, 0))
    _open(uri).close()
    assert not mirror.file.exists()


def test_a_full_disk_is_told(bucket: Bucket, content: bytes, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(small_disk))
    mirror = _open(bucket.put("photos.rec", content))
    with pytest.raises(StorageError, match=f"the disk is full at {re.escape(str(small_disk))}"):
        mirror.whole()
    mirror.close()


def test_a_limit_that_is_no_number_of_bytes_is_refused(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = bucket.put("photos.rec", b"x" * 1000)
    for text in ("much", "10M", "-5"):
        monkeypatch.setenv("STEADYTRAIN_OBJECT_BYTES", text)
        with pytest.raises(DataError, match=f"STEADYTRAIN_OBJECT_BYTES is {text}: give a number of bytes"):
            open_object(uri)


def test_faults_are_counted_over_all_processes(
    opened: Mirror, fault_proxy: FaultProxy, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "SILENCE_SECONDS", 0.4)
    fault_proxy.faults = [503, "reset", "cut", "stall"]
    other = Mirror(opened.file)
    assert bytes(other[:]) == content
    other.close()
    assert opened.traffic().faults == {"slow down": 1, "lost connection": 1, "cut short": 1, "timeout": 1}


def test_braces_and_wildcards_name_several_objects(bucket: Bucket) -> None:
    for name in ("a-1.rec", "a-2.rec", "a-3.rec", "b.rec"):
        bucket.put(f"sets/{name}", name.encode())
    for pattern, names in {
        "sets/a-*.rec": "a-1 a-2 a-3",
        "sets/a-{3..2}.rec": "a-3 a-2",
        "sets/{b,a-1}.rec": "b a-1",
    }.items():
        assert [file.stem for file in open_objects(bucket.uri(pattern))] == names.split()
