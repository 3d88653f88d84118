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

from steadytrain.data.storage import object_cache, pages, remote_file
from steadytrain.data.storage import store as store_module
from steadytrain.data.storage.object_cache import make_room, open_object, open_objects
from steadytrain.data.storage.remote_file import RemoteFile
from steadytrain.data.storage.store import MOST_REQUESTS
from steadytrain.errors import DataError, StorageError

MB = 2**20


@pytest.fixture(scope="module")
def content() -> bytes:
    return np.random.default_rng(0).bytes(12 * MB + 12_345)


@pytest.fixture
def opened(bucket: Bucket, content: bytes) -> Iterator[RemoteFile]:
    mirror = _open(bucket.put("photos.rec", content))
    yield mirror
    mirror.close()


def _open(uri: str) -> RemoteFile:
    return RemoteFile(open_object(uri))


def _fetch_all(mirror: RemoteFile) -> None:
    mirror.require(np.array([0]), np.array([len(mirror)]))


def _on_disk(mirror: RemoteFile) -> int:
    return mirror.file.stat().st_blocks * 512


def test_any_range_has_the_bytes_of_the_object(opened: RemoteFile, content: bytes) -> None:
    rng = np.random.default_rng(1)
    for start, end in rng.integers(0, len(content), (100, 2)).tolist():
        assert bytes(opened[start:end]) == content[start:end]
    assert len(opened) == len(content) and bytes(opened[len(content) - 3 :]) == content[-3:]
    _fetch_all(opened)
    assert bytes(opened[:]) == content


def test_near_ranges_are_one_request_and_nothing_is_fetched_twice(opened: RemoteFile, content: bytes) -> None:
    starts = np.arange(0, len(content), 100_000)
    opened.require(starts, starts + 1000)
    first = opened.disk.traffic()
    assert first.requests == -(-int(starts[-1] + 1000) // remote_file.REQUEST_BYTES)
    opened.require(starts, starts + 5000)
    assert opened.disk.traffic() == first


def test_only_what_is_read_is_fetched_where_ranges_are_far_apart(opened: RemoteFile) -> None:
    starts = np.array([0, 3, 7]) * MB + 5
    opened.require(starts, starts + 100)
    assert opened.disk.traffic().bytes == 3 * pages.PAGE_BYTES == _on_disk(opened)


def test_each_page_comes_once_whatever_the_order(opened: RemoteFile, content: bytes) -> None:
    starts = np.random.default_rng(2).permutation(np.arange(0, len(content) - 50_000, 150_000))
    for first in range(0, len(starts), 4):
        window = np.sort(starts[first : first + 4])
        opened.expect(window, window + 50_000)
        for start in window.tolist():
            assert bytes(opened[start : start + 50_000]) == content[start : start + 50_000]
    opened.require(np.array([0]), np.array([len(content)]))
    assert opened.disk.traffic().bytes == len(content)


def test_prefetched_ranges_arrive_without_a_wait(opened: RemoteFile, content: bytes) -> None:
    opened.expect(np.array([0]), np.array([len(content)]))
    until = time.monotonic() + 60
    while not opened.disk.present.all():
        assert time.monotonic() < until
        time.sleep(0.01)
    requests = opened.disk.traffic().requests
    assert bytes(opened[:]) == content and opened.disk.traffic().requests == requests


def test_another_process_reads_what_this_one_fetched(opened: RemoteFile, content: bytes) -> None:
    assert bytes(opened[: 5 * MB]) == content[: 5 * MB]
    code = (
        "import sys, hashlib; from pathlib import Path; from steadytrain.data.storage.remote_file import RemoteFile\n"
        f"mirror = RemoteFile(Path(sys.argv[1])); print(hashlib.sha256(mirror[:{5 * MB}]).hexdigest()); mirror.close()"
    )
    requests = opened.disk.traffic().requests
    command = [sys.executable, "-c", code, str(opened.file)]
    environment = {**os.environ, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}  # nobody there: nothing can be fetched
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert output.strip() == hashlib.sha256(content[: 5 * MB]).hexdigest()
    assert opened.disk.traffic().requests == requests


def test_a_kill_while_fetching_leaves_nothing_wrong(bucket: Bucket, content: bytes) -> None:
    uri = bucket.put("photos.rec", content)
    file = open_object(uri)
    code = (
        "import sys, numpy as np; from pathlib import Path\n"
        "from steadytrain.data.storage.remote_file import RemoteFile\n"
        "mirror = RemoteFile(Path(sys.argv[1])); print('go', flush=True)\n"
        "for at in np.random.default_rng(2).permutation(len(mirror) // 50_000): mirror[at * 50_000 : at * 50_000 + 9]"
    )
    child = subprocess.Popen([sys.executable, "-c", code, str(file)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline()
    until = time.monotonic() + 60
    mirror = RemoteFile(file)
    while mirror.disk.present.sum() < 20 and time.monotonic() < until:
        time.sleep(0.001)
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert mirror.disk.present.sum() >= 20
    assert bytes(mirror[:]) == content
    mirror.close()


def test_readers_never_see_a_page_that_is_being_removed(opened: RemoteFile, content: bytes) -> None:
    ended = threading.Event()
    wrong: list[int] = []

    def look(seed: int) -> None:
        until = time.monotonic() + 60
        rng = np.random.default_rng(seed)
        # Until pages that were removed have been fetched again.
        while opened.disk.traffic().bytes <= len(content) and time.monotonic() < until:
            start = int(rng.integers(0, len(content) - 200_000))
            if bytes(opened[start : start + 200_000]) != content[start : start + 200_000]:
                wrong.append(start)

    def remove() -> None:
        rng, other = np.random.default_rng(9), RemoteFile(opened.file)  # as another process would
        while not ended.is_set():
            other.disk.drop(rng.permutation(len(other.disk.present))[:100])
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
    assert not wrong and opened.disk.traffic().bytes > len(content)


def test_the_cache_stays_below_its_limit(bucket: Bucket, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_cache, "LEAST_LIMIT", MB)
    monkeypatch.setenv("STEADYTRAIN_OBJECT_BYTES", "4M")
    content = content[: 6 * MB + 12_345]
    mirror, page = _open(bucket.put("photos.rec", content)), pages.PAGE_BYTES
    assert not mirror.stays
    most = 0
    for number in range(len(mirror.disk.present) - 1):
        assert bytes(mirror[number * page : number * page + 10]) == content[number * page : number * page + 10]
        most = max(most, _on_disk(mirror))
    assert 3 * MB < most <= 4_000_000 + mirror.limit // 32 + MOST_REQUESTS * page
    assert bytes(mirror[:]) == content
    mirror.close()


def test_unused_objects_are_removed_first(bucket: Bucket, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    old, used = (_open(bucket.put(f"{name}.rec", content[:MB] + name.encode())) for name in ("old", "used"))
    _fetch_all(old)
    _fetch_all(used)
    old.close()
    objects = old.file.parent.parent
    os.utime(old.file.parent, (0, 0))
    make_room(objects, 3 * MB // 2)
    assert not old.file.exists() and used.disk.present.all()
    used.close()


def test_opening_many_objects_one_by_one_does_not_look_at_all_of_them_each_time(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[Path] = []
    used_bytes = object_cache.used_bytes

    def counted(folder: Path) -> int:
        sizes.append(folder)
        return used_bytes(folder)

    monkeypatch.setattr(object_cache, "used_bytes", counted)
    for number in range(40):
        open_objects(bucket.put(f"{number}.tar", b"x" * 1000))
    assert len(sizes) < 3 * 40


def test_object_that_is_kept_is_not_removed_until_its_user_ends(opened: RemoteFile, content: bytes) -> None:
    _fetch_all(opened)
    code = (
        "import sys; from pathlib import Path; from steadytrain.files import locked\n"
        "with locked(Path(sys.argv[1]), shared=True): print(flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(pages.origin_path(opened.file))]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdin is not None and child.stdout.readline()
    objects, disk = opened.file.parent.parent, opened.disk
    make_room(objects, MB)
    disk.drop(np.arange(len(disk.present)))
    assert disk.present.all() and disk.copy(0, len(content)) == content
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    make_room(objects, MB)
    assert disk.present.sum() * disk.page_bytes <= MB


def test_a_reader_that_waits_comes_before_what_is_fetched_ahead(
    opened: RemoteFile, fault_proxy: FaultProxy, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_file, "MOST_REQUESTS", 1)
    monkeypatch.setattr(remote_file, "REQUEST_BYTES", MB)
    fault_proxy.delay_seconds = 0.1
    other = RemoteFile(opened.file)
    other.expect(np.array([0]), np.array([len(content)]))
    assert bytes(other[11 * MB :]) == content[11 * MB :]
    ranges = [int(header[6:].split("-")[0]) for _, header in fault_proxy.requests]
    assert ranges.index(11 * MB) <= 2 and other.disk.present.sum() < 6 * MB // other.disk.page_bytes
    other.close()


def test_many_objects_share_the_requests_of_a_process(bucket: Bucket, content: bytes) -> None:
    mirrors = [_open(bucket.put(f"{number}.rec", content[: 3 * MB] + bytes([number]))) for number in range(12)]
    starts = np.arange(0, 3 * MB, MB)
    for mirror in mirrors:
        mirror.expect(starts, starts + 10)
    threads = [thread for thread in threading.enumerate() if thread.name == "storage"]
    assert len(threads) <= MOST_REQUESTS < len(mirrors) * len(starts)
    for number, mirror in enumerate(mirrors):
        assert bytes(mirror[:]) == content[: 3 * MB] + bytes([number])
        mirror.close()


def test_changed_object_is_an_error_and_reopening_reads_the_new_version(bucket: Bucket, content: bytes) -> None:
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
    _fetch_all(mirror)
    mirror.close()
    with mirror.file.open("r+b") as file:  # what a file system may leave after a power cut
        file.write(bytes(MB))
    monkeypatch.setattr(object_cache, "_boot", lambda: "another")
    again = _open(uri)
    assert not again.disk.present.any() and bytes(again[:]) == content
    again.close()
    assert mirror.file.exists()  # another machine may use it
    os.utime(mirror.file.parent, (0, 0))
    _open(uri).close()
    assert not mirror.file.exists()


def test_full_disk_is_error(bucket: Bucket, content: bytes, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(small_disk))
    mirror = _open(bucket.put("photos.rec", content))
    with pytest.raises(StorageError, match=f"the disk is full at {re.escape(str(small_disk))}"):
        _fetch_all(mirror)
    mirror.close()


def test_a_limit_that_is_no_number_of_bytes_is_refused(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = bucket.put("photos.rec", b"x" * 1000)
    for text in ("much", "10M", "-5"):
        monkeypatch.setenv("STEADYTRAIN_OBJECT_BYTES", text)
        with pytest.raises(DataError, match=f"STEADYTRAIN_OBJECT_BYTES is {text}: give a number of bytes"):
            open_objects(uri)


def test_faults_that_pass_are_survived(
    opened: RemoteFile, fault_proxy: FaultProxy, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "SILENCE_SECONDS", 0.4)
    fault_proxy.faults = [503, "reset", "cut", "stall"]
    assert bytes(opened[:]) == content and not fault_proxy.faults


def test_braces_and_wildcards_name_several_objects(bucket: Bucket) -> None:
    for name in ("a-1.rec", "a-2.rec", "a-3.rec", "b.rec"):
        bucket.put(f"sets/{name}", name.encode())
    for pattern, names in {
        "sets/a-*.rec": "a-1 a-2 a-3",
        "sets/a-{3..2}.rec": "a-3 a-2",
        "sets/{b,a-1}.rec": "b a-1",
    }.items():
        assert [file.stem for file in open_objects(bucket.uri(pattern))] == names.split()
