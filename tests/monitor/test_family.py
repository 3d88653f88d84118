"""What a process and its children did, by real children."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from steadytrain.machine.process_tree import Counted, ProcessTree

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

BURN = "import sys, time\nwhile time.process_time() < 0.4: pass\nprint('burnt', flush=True)\nsys.stdin.read()"


@contextmanager
def _burning(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A child that has used 0.4 s of processor time, and waits."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "burnt\n"
        yield child


def _read(family: ProcessTree) -> Counted:
    counted = family.read()
    assert counted is not None
    return counted


def test_a_child_counts_while_it_lives_and_when_it_has_ended() -> None:
    with closing(ProcessTree(os.getpid(), Path("/"))) as family:
        before = _read(family)
        with _burning(sys.executable, "-c", BURN) as child:
            during = _read(family)
            assert child.pid in family.pids
        after = _read(family)
    assert during.children_seconds - before.children_seconds >= 0.38
    assert during.seconds - before.seconds >= during.children_seconds - before.children_seconds - 0.001
    assert during.threads > before.threads
    assert during.memory_bytes > before.memory_bytes + 2**20
    assert after.children_seconds >= during.children_seconds
    assert child.pid not in family.pids


def test_a_child_of_a_child_counts_too() -> None:
    nested = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])"
    with closing(ProcessTree(os.getpid(), Path("/"))) as family:
        before = _read(family)
        there = family.pids  # what other tests keep: a process that ranks are forked from
        with _burning(sys.executable, "-c", nested) as child:
            during = _read(family)
            assert len(family.pids - {os.getpid(), child.pid} - there) == 1
    assert during.children_seconds - before.children_seconds >= 0.38


def test_a_child_counts_whose_number_is_lower_because_the_kernel_began_anew() -> None:
    try:
        Path("/proc/sys/kernel/ns_last_pid").write_text("300")
    except OSError as error:
        pytest.skip(f"the next process's number cannot be set: {error}")
    with _burning(sys.executable, "-c", BURN) as child, closing(ProcessTree(os.getpid(), Path("/"))) as family:
        if child.pid > os.getpid():
            pytest.skip("others took the low numbers")
        assert _read(family).children_seconds >= 0.38
        assert child.pid in family.pids


def test_what_a_child_reads_from_a_disk_counts(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(4 << 20))
    if os.major(path.stat().st_dev) == 0:
        pytest.skip("the folder for tests is not on a disk")
    read = (
        "import os, sys\n"
        "with open(sys.argv[1], 'rb') as file:\n"
        "    os.fsync(file.fileno())\n"
        "    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)\n"
        "    file.read()\n"
    )
    with closing(ProcessTree(os.getpid(), Path("/"))) as family:
        before = _read(family)
        with _burning(sys.executable, "-c", read + BURN, str(path)):
            during = _read(family)
        after = _read(family)
    if before.read_bytes is None or during.read_bytes is None or after.read_bytes is None:
        pytest.skip("this kernel does not count what a process reads")
    assert during.read_bytes - before.read_bytes >= 4 << 20
    assert after.read_bytes >= during.read_bytes


def test_a_process_that_is_not_there() -> None:
    with closing(ProcessTree(2**22 + 1, Path("/"))) as family:
        assert family.read() is None
