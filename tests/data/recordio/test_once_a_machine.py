"""What a start reads of large record files is read once a machine: offsets, headers, digest, and a few images."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from steadytrain.data.images.encode import to_ppm
from steadytrain.data.recordio.framing import pack_header
from steadytrain.data.recordio.reader import Records
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.data.storage.local_files import LocalFile
from steadytrain.training.data import open_records

SIDE, N = 120, 40
Facts = dict[str, Any]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _write(path: Path, *, first: int = 0, labels: int = 1, seed: int = 0) -> Path:
    draw = np.random.default_rng(seed)
    with RecordWriter(path, force=True) as writer:
        for i in range(N):
            label = i % 3 if labels == 1 else (np.arange(labels) == i % labels).astype(np.float32)
            payload = to_ppm(draw.integers(0, 255, (SIDE, SIDE, 3), np.uint8))
            writer.write(pack_header(label, id=first + i) + payload, key=i)
    return path


def _facts(path: Path | str) -> Facts:
    """What a start asks for."""
    with open_records(Path(path)) as records:
        facts: Facts = {name: getattr(records, name) for name in ("digest", "classes", "channels", "largest_side")}
        for name in ("labels", "record_ids", "label_counts", "sampled_sizes"):
            facts[name] = getattr(records, name).tolist()
        extents = records.extents(np.arange(len(records)))
        return facts | {"images": [bytes(records.image(i)) for i in (0, N - 1)], "sizes": extents.size.tolist()}


@pytest.fixture
def count_bytes(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """Count the bytes that are read of record files."""
    read, digest, counted = LocalFile.read, LocalFile.digest, [0]

    def counting_read(file: LocalFile, start: int, end: int) -> memoryview:
        counted[0] += end - start
        return read(file, start, end)

    def counting_digest(file: LocalFile) -> str:
        counted[0] += len(file)
        return digest(file)

    monkeypatch.setattr(LocalFile, "read", counting_read)
    monkeypatch.setattr(LocalFile, "digest", counting_digest)
    return lambda: counted[0]


@pytest.mark.parametrize("has_index", [True, False])
@pytest.mark.parametrize("labels", [1, 4])
def test_a_second_process_reads_no_more_than_its_checks(
    tmp_path: Path, count_bytes: Callable[[], int], labels: int, has_index: bool
) -> None:
    path = _write(tmp_path / "data.rec", labels=labels)
    if not has_index:
        path.with_suffix(".idx").unlink()
    first, after_first = _facts(path), count_bytes()
    assert first["digest"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert _facts(path) == first
    images = 2 * (path.stat().st_size // N)  # which the test itself asks for
    assert after_first > path.stat().st_size
    assert count_bytes() - after_first - images < 2000


def test_what_is_kept_is_what_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "data.rec")
    path.with_suffix(".lst").write_text("".join(f"{i}\t{i % 3}\t{'abc'[i % 3]}/{i}.ppm\n" for i in range(N)))
    _facts(path)
    kept = _facts(path)
    assert kept["classes"] == ("a", "b", "c") and kept["label_counts"] == [14, 13, 13]
    monkeypatch.setattr("steadytrain.data.recordio.reader._LEAST_KEPT", 2**40)
    assert _facts(path) == kept


def test_several_files_are_kept_as_one_set(tmp_path: Path, count_bytes: Callable[[], int]) -> None:
    for i in range(2):
        _write(tmp_path / f"data-{i:05}-of-00002.rec", first=i * N, seed=i)
    place = tmp_path / "data-*.rec"
    first, after_first = _facts(place), count_bytes()
    assert _facts(place) == first and first["record_ids"] == list(range(2 * N))
    assert count_bytes() - after_first < 2 * 3 * SIDE**2 + 5000
    _write(tmp_path / "data-00001-of-00002.rec", first=7 * N, seed=3)
    changed = _facts(place)
    assert changed["record_ids"][N] == 7 * N and changed["digest"] != first["digest"]


def test_many_small_files_are_kept_as_one_array_of_each_kind(
    tmp_path: Path, cache: Path, count_bytes: Callable[[], int]
) -> None:
    for i in range(6):
        path = _write(tmp_path / f"data-{i:05}-of-00006.rec", first=i * N, seed=i)
        path.with_suffix(".lst").write_text("".join(f"{j}\t{j % 3}\t{j}.ppm\n" for j in range(N)))
    place = tmp_path / "data-*.rec"
    first, after_first = _facts(place), count_bytes()
    names = [file.name.split(".")[1] for file in (cache / "records").glob("*.npy")]
    assert len(names) == len(set(names)) and {"digest", "images", "list", "labels", "ids"} <= set(names)
    assert _facts(place) == first and count_bytes() - after_first < 2 * 3 * SIDE**2 + 6 * 1000


def test_a_file_that_has_changed_has_another_digest_though_its_size_and_time_are_the_same(tmp_path: Path) -> None:
    path = _write(tmp_path / "data.rec")
    before, status = _facts(path), path.stat()
    _write(path, seed=1)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    after = _facts(path)
    assert path.stat().st_size == status.st_size and after["digest"] != before["digest"]
    assert after["digest"] == hashlib.sha256(path.read_bytes()).hexdigest()


def test_labels_of_a_large_set_are_mapped_and_not_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("steadytrain.data.storage.array_cache._LEAST_MAPPED", 0)
    path = _write(tmp_path / "data.rec")
    for _ in range(2):
        with Records.open(path) as records:
            assert isinstance(records.labels.base, np.memmap)


def test_a_cache_that_cannot_be_written_is_said_once_and_the_files_are_read(tmp_path: Path, cache: Path) -> None:
    cache.write_text("no folder")
    for i in range(2):
        _write(tmp_path / f"data-{i:05}-of-00002.rec", first=i * N, seed=i)
    said: list[str] = []
    with open_records(tmp_path / "data-*.rec", said.append) as records:
        assert records.labels.tolist() == [i % 3 for i in range(N)] * 2
    assert len(said) == 1 and "each process reads anew at each start" in said[0] and str(cache) in said[0]
    assert said[0].endswith("set STEADYTRAIN_CACHE to a folder with room")


def test_a_cache_that_is_full_when_the_labels_come_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save = np.save

    def full(file: Path, array: np.ndarray) -> None:
        if ".labels." in file.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        save(file, array)

    monkeypatch.setattr(np, "save", full)
    for i in range(2):
        _write(tmp_path / f"data-{i:05}-of-00002.rec", first=i * N, seed=i)
    said: list[str] = []
    open_records(tmp_path / "data-*.rec", said.append).close()
    assert len(said) == 1 and "the disk is full" in said[0]


def test_small_files_leave_nothing_in_the_cache(tmp_path: Path, cache: Path) -> None:
    with RecordWriter(tmp_path / "small.rec") as writer:
        writer.write(pack_header(0, id=0) + to_ppm(np.zeros((4, 4, 3), np.uint8)), key=0)
    with Records.open(tmp_path / "small.rec") as records:
        assert records.labels.tolist() == [0] and records.digest
    assert not cache.exists()
