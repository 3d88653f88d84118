"""Files replaced whole, through temporary ones that are new; locks: one holder alone, or several that share."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
import tempfile
import time
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from steadytrain import files
from steadytrain.data.sources.find import require_there
from steadytrain.errors import DataError, RunError
from steadytrain.files import (
    create,
    lock,
    lock_at_once,
    lock_surely,
    locked,
    other_spelling,
    read_text,
    replace_file,
    unlock,
)
from steadytrain.run import Run


def test_a_lock_is_one_holders_or_shared_and_falls_with_its_file(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with locked(path), path.open("rb") as other:
        assert not lock_at_once(other)
        assert not lock_at_once(other, shared=True)
    with locked(path, shared=True), path.open("rb") as other:
        assert lock_at_once(other, shared=True)
        assert not lock_at_once(other)
    with path.open("rb") as first, path.open("rb") as second:
        lock(first)
        assert not lock_at_once(second)
        unlock(first)
        assert lock_at_once(second)


@pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")
def test_a_file_of_which_a_file_server_has_a_lease_is_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text("{}")
    before = signal.signal(signal.SIGIO, lambda *_: None)  # by which the kernel asks for the lease

    def give_back() -> None:
        while fcntl.fcntl(file, fcntl.F_GETLEASE) == fcntl.F_WRLCK:
            time.sleep(0.01)
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)

    with path.open("r+") as file, ThreadPoolExecutor(1) as server:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        given = server.submit(give_back)
        assert read_text(path) == "{}"
        given.result(60)
    signal.signal(signal.SIGIO, before)


def _flock_of_nfs(file: Any, operation: int) -> None:
    """As Linux has it on NFS: an exclusive lock needs a file that is open for writing."""
    if operation & fcntl.LOCK_EX and fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    FLOCK(file, operation)


def _flock_without_locks(number: int) -> Callable[[Any, int], None]:
    def fail(file: Any, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    return fail


FLOCK = fcntl.flock


@pytest.mark.parametrize("error", ["ENOLCK", "EOPNOTSUPP", "ENOSYS"])
def test_where_a_file_system_has_no_locks_work_goes_on_and_nothing_is_taken_for_left(
    error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = tmp_path / ".report.html.abcdefgh.part"
    left.mkdir()
    monkeypatch.setattr(fcntl, "flock", _flock_without_locks(getattr(errno, error)))
    with locked(tmp_path / "lock"), (tmp_path / "lock").open("r+b") as other:
        assert lock_at_once(other) and lock_at_once(other, shared=True)
        assert not lock_surely(other), "another process may have it"
    replace_file(tmp_path / "report.html", "new")
    assert (tmp_path / "report.html").read_text() == "new"
    assert left.is_dir(), "its writer may be at work"
    monkeypatch.setattr(fcntl, "flock", _flock_without_locks(errno.EIO))
    with pytest.raises(OSError, match="Input/output error"), locked(tmp_path / "lock"):
        pass


def test_on_nfs_a_file_that_is_open_for_reading_alone_is_not_taken_for_unused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", _flock_of_nfs)
    (tmp_path / "data.rec").write_bytes(b"x")
    with (tmp_path / "data.rec").open("rb") as reader, (tmp_path / "data.rec").open("r+b") as other:
        assert not lock_surely(reader)
        assert lock_at_once(reader, shared=True)
        assert not lock_surely(other)
        unlock(reader)
        assert lock_surely(other)


def test_a_link_under_the_name_of_a_temporary_folder_is_not_written_through(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "report.html"
    victim.mkdir()
    (victim / "report.html").write_text("mine")
    link = tmp_path / ".report.html.abcdefgh.part"
    link.symlink_to(victim)
    replace_file(path, "new")
    assert ((victim / "report.html").read_text(), path.read_text(), path.is_symlink()) == ("mine", "new", False)
    assert sorted(each.name for each in tmp_path.iterdir()) == [link.name, "report.html", "victim"]


def test_a_file_is_made_new_and_a_lock_is_no_link(tmp_path: Path) -> None:
    victim, link = tmp_path / "victim", tmp_path / "link"
    victim.write_text("mine")
    link.symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"), locked(link):
        pass
    with create(link) as file:
        file.write(b"new")
    assert (victim.read_text(), link.read_text()) == ("mine", "new")


def test_the_next_writer_removes_what_a_killed_one_left_and_spares_one_at_work(tmp_path: Path) -> None:
    path, dead, other = tmp_path / "a.csv", tmp_path / ".a.csv.abcdefgh.part", tmp_path / ".b.csv.abcdefgh.part"
    at_work = tmp_path / ".a.csv.hgfedcba.part"
    for each in (dead, other, at_work):
        each.mkdir()
        (each / "a.csv").write_text("half")
    descriptor = os.open(at_work, os.O_RDONLY)
    try:
        assert lock_at_once(descriptor)
        replace_file(path, "whole")
    finally:
        os.close(descriptor)
    assert path.read_text() == "whole"
    assert not dead.exists()
    assert other.exists() and at_work.exists()


def test_a_writers_folder_is_gone_before_the_disk_is_asked_to_keep_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[list[str]] = []
    sync = files.sync

    def note(path: Path) -> None:
        kept.append([each.name for each in tmp_path.iterdir()])
        sync(path)

    monkeypatch.setattr(files, "sync", note)
    replace_file(tmp_path / "recipe.json", "{}")
    assert kept[-1] == ["recipe.json"], "after a power cut an empty folder would be beside it"

    def refuse(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(Path, "rmdir", refuse)
    replace_file(tmp_path / "recipe.json", "[]")
    assert (tmp_path / "recipe.json").read_text() == "[]"


def test_a_file_that_is_replaced_again_and_again_does_not_list_its_folder_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[object] = []
    scan = os.scandir

    def look(folder: Any) -> Any:
        listed.append(folder)
        return scan(folder)

    monkeypatch.setattr(time, "monotonic", lambda: 1e6)
    monkeypatch.setattr(os, "scandir", look)
    for number in range(5):
        replace_file(tmp_path / "status.json", str(number))
    assert listed.count(tmp_path) == 1
    (tmp_path / ".status.json.abcdefgh.part").mkdir()  # of a writer that was killed since
    monkeypatch.setattr(time, "monotonic", lambda: 1e6 + 60)
    replace_file(tmp_path / "status.json", "last")
    assert [each.name for each in tmp_path.iterdir()] == ["status.json"]


def test_a_writer_whose_new_folder_was_taken_for_a_left_one_makes_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[str] = []
    make = tempfile.mkdtemp

    def remove_first(**names: Any) -> str:
        folder: str = make(**names)
        if not taken:
            taken.append(folder)
            monkeypatch.setattr(files, "lock", lambda descriptor: Path(taken[0]).rmdir() if len(taken) == 1 else None)
        else:
            taken.append(folder)
        return folder

    monkeypatch.setattr(tempfile, "mkdtemp", remove_first)
    replace_file(tmp_path / "a.txt", "whole")
    assert len(taken) == 2 and (tmp_path / "a.txt").read_text() == "whole"
    assert [each.name for each in tmp_path.iterdir()] == ["a.txt"]


def test_a_name_in_another_spelling_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    Path("photos", "été").mkdir(parents=True)
    for name in ("~/photos", '"photos"', "'photos'", "photos\\" + "été", unicodedata.normalize("NFD", "photos/été")):
        with pytest.raises(DataError, match=r"Did you mean .*photos"):
            require_there(name)
        with pytest.raises(RunError, match=r"does not exist\. Did you mean .*photos"):
            Run.open(name)
    for name in ("~nobody/photos", "\\\\server\\photos", "C:\\photos", "''"):
        assert not other_spelling(name)
