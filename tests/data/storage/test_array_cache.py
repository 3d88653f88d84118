"""Arrays that follow from a file: made once a machine, mapped by all, and never those of another state of the file."""

from __future__ import annotations

import errno
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from tests import forked

from steadytrain.data.storage import array_cache
from steadytrain.data.storage.array_cache import UNUSED_SECONDS, ArrayCache, file_state


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "data.rec"
    path.write_bytes(b"one state")
    return path


def _open(source: Path) -> ArrayCache:
    return ArrayCache(source.stem, lambda: (source, file_state(source)))


def _make(source: Path, made: Path, seconds: float) -> int:
    """Get an array, which takes some time to make; each making is a file of its own."""

    def make() -> np.ndarray:
        (made / str(os.getpid())).touch()
        time.sleep(seconds)
        return np.arange(5)

    return 0 if _open(source).get("numbers", make).tolist() == [0, 1, 2, 3, 4] else 1


def _never() -> np.ndarray:
    raise AssertionError("it is kept")


def test_an_array_is_made_once_and_mapped_from_then_on(source: Path) -> None:
    made = _open(source).get("numbers", lambda: np.arange(2**18))
    mapped = _open(source).get("numbers", _never)
    assert np.array_equal(made, mapped) and type(mapped) is np.ndarray
    assert isinstance(mapped.base, np.memmap) and not mapped.flags.writeable
    assert _open(source).get("none", lambda: np.empty(0, np.int64)).shape == (0,)


def test_small_arrays_keep_no_file_open(source: Path) -> None:
    opened = _open(source)
    before = len(list(Path("/proc/self/fd").iterdir()))
    kept = [opened.get(str(number), lambda: np.arange(5)) for number in range(20) for _ in range(2)]
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert all(array.tolist() == [0, 1, 2, 3, 4] and not array.flags.writeable for array in kept)


def test_arrays_that_were_made_otherwise_are_not_taken(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _open(source).get("numbers", lambda: np.arange(5))
    monkeypatch.setattr(array_cache, "_VERSION", 2)
    assert len(_open(source).get("numbers", lambda: np.arange(3))) == 3


@pytest.mark.parametrize("number", [1, 2, 3])
def test_where_the_cache_cannot_be_mapped_it_is_made_and_said(
    source: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """A file system without mmap, or out of memory for it: before the lock, behind it, and after the array was kept."""
    load, calls = array_cache._map, list[Path]()

    def fail(file: Path) -> np.ndarray | None:
        calls.append(file)
        if len(calls) == number:
            raise OSError(errno.ENODEV, os.strerror(errno.ENODEV))
        return load(file)

    monkeypatch.setattr(array_cache, "_map", fail)
    opened = _open(source)
    assert opened.get("numbers", lambda: np.arange(5)).tolist() == [0, 1, 2, 3, 4]
    assert os.strerror(errno.ENODEV) in opened.fault and len(calls) == number


def test_of_processes_that_start_at_once_one_makes_it(source: Path, tmp_path: Path, cache: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    variables = {"STEADYTRAIN_CACHE": str(cache)}
    started = [forked.start(_make, source, made, 0.3, variables=variables) for _ in range(3)]
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [0, 0, 0] and len(list(made.iterdir())) == 1


def test_one_that_is_killed_keeps_nobody_waiting(source: Path, tmp_path: Path, cache: Path) -> None:
    made = tmp_path / "made"
    made.mkdir()
    process = forked.start(_make, source, made, 600.0, variables={"STEADYTRAIN_CACHE": str(cache)})
    while not list(made.iterdir()):
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert _make(source, made, 0.0) == 0


@pytest.mark.parametrize("change", ["size", "time", "inode"])
def test_a_file_that_has_changed_is_read_anew(source: Path, change: str) -> None:
    _open(source).get("numbers", lambda: np.arange(5))
    status = source.stat()
    if change == "inode":
        other = source.with_name("other")
        other.write_bytes(source.read_bytes())
        other.replace(source)
    else:
        source.write_bytes(b"more bytes" if change == "size" else b"TWO STATE")
    if change != "time":
        os.utime(source, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert _open(source).get("numbers", lambda: np.arange(3)).tolist() == [0, 1, 2]


def test_what_was_made_while_the_file_was_replaced_is_not_kept(source: Path) -> None:
    def make() -> np.ndarray:
        source.write_bytes(b"another state")
        return np.arange(5)

    opened = _open(source)
    assert len(opened.get("numbers", make)) == 5
    assert len(_open(source).get("numbers", lambda: np.arange(3))) == 3


def test_where_the_cache_cannot_be_written_it_is_made_each_time(source: Path, cache: Path) -> None:
    cache.write_text("no folder")
    opened = _open(source)
    assert [len(opened.get("numbers", lambda n=n: np.arange(n))) for n in (1, 2)] == [1, 2]  # type: ignore[misc]
    assert str(cache) in opened.fault


def test_an_error_is_kept_from_nobody(source: Path) -> None:
    def fail() -> np.ndarray:
        raise ValueError("damaged")

    for _ in range(2):
        with pytest.raises(ValueError, match="damaged"):
            _open(source).get("numbers", fail)


def test_what_nobody_uses_for_long_is_removed(source: Path, cache: Path) -> None:
    other = source.with_name("gone.rec")
    other.write_bytes(b"x")
    for name in ("old", "used"):
        _open(other).get(name, lambda: np.arange(5))
    long_ago = time.time() - UNUSED_SECONDS - 60
    for file in (cache / "records").glob("gone-*.npy"):
        os.utime(file, (long_ago, long_ago))
    _open(other).get("used", _never)
    array_cache._remove_unused.cache_clear()  # as in another process
    _open(source).get("numbers", lambda: np.arange(5))
    assert [file.name.rsplit(".", 2)[1] for file in sorted((cache / "records").glob("gone-*.npy"))] == ["used"]
