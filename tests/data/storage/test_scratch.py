"""A scratch folder is this process's own, and nothing is left of it, however the process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from steadytrain.data.storage.scratch import scratch_beside, temporary_scratch
from steadytrain.errors import StorageError

HOLD = """
import sys
from pathlib import Path
from steadytrain.data.storage.scratch import scratch_beside
with scratch_beside(Path(sys.argv[1])) as own:
    (own / "big").write_bytes(b"x")
    print(own, flush=True)
    sys.stdin.read()
"""


def _hold(path: Path) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, StorageError])
def test_it_goes_with_all_that_is_in_it(tmp_path: Path, error: type[BaseException] | None) -> None:
    place = tmp_path / "new" / "deep" / "out.rec"
    try:
        with scratch_beside(place) as scratch:
            (scratch / "inner").mkdir()
            (scratch / "inner" / "file").write_text("x")
            if error is not None:
                raise error
    except (KeyboardInterrupt, StorageError):
        pass
    assert not list(tmp_path.iterdir())


def test_folders_that_something_came_into_stay(tmp_path: Path) -> None:
    with scratch_beside(tmp_path / "new" / "out.rec"):
        (tmp_path / "new" / "out.rec").write_text("x")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out.rec"]


def test_leftovers_of_a_kill_are_removed_and_folders_in_use_stay(tmp_path: Path) -> None:
    killed, left = _hold(tmp_path / "a[1].rec")
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    alive, used = _hold(tmp_path / "a[1].rec")
    assert not left.exists()
    with scratch_beside(tmp_path / "a[1].rec") as scratch:
        assert sorted(tmp_path.iterdir()) == sorted([scratch, used])
    alive.communicate()
    assert not list(tmp_path.iterdir())


def test_temporary_files_of_a_killed_command_go_with_the_next_and_those_in_use_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / ".steadytrain.scratch-left"
    left.mkdir()
    with temporary_scratch() as first, temporary_scratch() as second:
        assert sorted(tmp_path.iterdir()) == sorted([first, second])
    assert not list(tmp_path.iterdir())


def test_files_of_other_users_and_plain_files_stay(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / ".a.scratch-pipe")  # which would wait for a writer
    (mine := tmp_path / "mine").mkdir()
    (mine / "file").touch()
    (tmp_path / ".a.scratch-link").symlink_to(mine)
    if os.geteuid() == 0:
        (other := tmp_path / ".a.scratch-other").mkdir(mode=0o777)
        os.chown(other, 12345, 12345)
    before = sorted(tmp_path.rglob("*"))
    with scratch_beside(tmp_path / "a.rec"):
        pass
    assert sorted(tmp_path.rglob("*")) == before


def test_one_that_another_process_removes_before_it_is_locked_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = tempfile.mkdtemp
    paths: list[Path] = []

    def make_slowly(**options: Any) -> str:
        paths.append(Path(make(**options)))
        if len(paths) == 1:  # another process begins just now, and removes what nobody has locked
            subprocess.run([sys.executable, "-c", HOLD, str(tmp_path / "a.rec")], stdin=subprocess.DEVNULL, check=True)
        return str(paths[-1])

    monkeypatch.setattr(tempfile, "mkdtemp", make_slowly)
    with scratch_beside(tmp_path / "a.rec") as scratch:
        assert not paths[0].exists() and paths[1:] == [scratch] == list(tmp_path.iterdir())
    assert not list(tmp_path.iterdir())


def test_folder_that_cannot_be_written_is_an_error() -> None:
    with pytest.raises(StorageError, match=r"/proc/nowhere/a\.rec"), scratch_beside(Path("/proc/nowhere/a.rec")):
        pass
