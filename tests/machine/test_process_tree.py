"""Processes, their threads and their children, by real ones."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.machine.trees import tree

from steadytrain.machine.cgroups import allowed
from steadytrain.machine.process_tree import (
    ProcessTree,
    TreeStats,
    command_line,
    open_gpu_devices,
    parse_stat,
    read_schedstat,
    read_stat,
    system_call,
    thread_ids,
    waits_in,
)
from steadytrain.machine.procfs import TICKS

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")

BURN = "import sys, time\nwhile time.process_time() < 0.4: pass\nprint('burnt', flush=True)\nsys.stdin.read()"


@contextmanager
def _burning(*command: str) -> Iterator[subprocess.Popen[str]]:
    """A child that has used 0.4 s of processor time, and waits."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None and child.stdout.readline() == "burnt\n"
        yield child


def _read(family: ProcessTree) -> TreeStats:
    counted = family.read()
    assert counted is not None
    return counted


def test_a_child_counts_while_it_lives_and_when_it_has_ended() -> None:
    family = ProcessTree(os.getpid())
    before = _read(family)
    with _burning(sys.executable, "-c", BURN) as child:
        during = _read(family)
        assert child.pid in family.pids
    after = _read(family)
    assert during.children_seconds - before.children_seconds >= 0.38
    assert during.seconds - before.seconds >= during.children_seconds - before.children_seconds - 0.001
    assert during.num_threads > before.num_threads
    assert during.memory_bytes > before.memory_bytes + 2**20
    assert after.children_seconds >= during.children_seconds
    assert child.pid not in family.pids


def test_a_child_of_a_child_counts_too() -> None:
    nested = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {BURN!r}])"
    family = ProcessTree(os.getpid())
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
    with _burning(sys.executable, "-c", BURN) as child:
        family = ProcessTree(os.getpid())
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
    family = ProcessTree(os.getpid())
    before = _read(family)
    with _burning(sys.executable, "-c", read + BURN, str(path)):
        during = _read(family)
    after = _read(family)
    if before.disk_read_bytes is None or during.disk_read_bytes is None or after.disk_read_bytes is None:
        pytest.skip("this kernel does not count what a process reads")
    assert during.disk_read_bytes - before.disk_read_bytes >= 4 << 20
    assert after.disk_read_bytes >= during.disk_read_bytes


def test_a_process_that_is_not_there() -> None:
    family = ProcessTree(2**22 + 1)
    assert family.read() is None


def test_a_name_with_brackets_and_spaces_does_not_shift_the_fields() -> None:
    stat = parse_stat("7 (py (x) S 1) D 42 7 7 0 -1 4 9 0 3 0 150 50 0 0 20 0 2 0 1000 0 10 0 0")
    assert stat is not None
    assert (stat.name, stat.state, stat.parent, stat.major_faults) == ("py (x) S 1", "D", 42, 3)
    assert (stat.num_threads, stat.started, stat.pages) == (2, 1000, 10)
    assert stat.cpu_seconds == 200 / TICKS


def test_a_line_cut_short_is_no_process() -> None:
    assert parse_stat("7 (python) S 1 7") is None
    assert parse_stat("") is None


def test_this_process_knows_itself() -> None:
    me = os.getpid()
    stat = read_stat(f"/proc/{me}")
    assert stat is not None and stat.parent == os.getppid() and stat.pages > 256
    assert thread_ids(me)[0] == me and "python" in command_line(me)
    assert allowed(me) == allowed() == os.sched_getaffinity(0)


def test_what_is_gone_is_none_and_no_error() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = f"/proc/{gone.pid}"
    assert read_stat(folder) is None and read_schedstat(folder) is None
    assert thread_ids(gone.pid) == [] and command_line(gone.pid) == ""
    assert waits_in(gone.pid, gone.pid) is None and open_gpu_devices(gone.pid) is None
    assert allowed(gone.pid) == frozenset()


def test_a_thread_that_waits_for_a_pipe_says_so() -> None:
    code = "import sys; print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    with child, child.stdin:
        child.stdout.readline()
        for _ in range(200):
            if (place := waits_in(child.pid, child.pid)) == "read pipe":
                break
            threading.Event().wait(0.01)
    if place is None:
        pytest.skip("system calls of other processes are not readable here")
    assert place == "read pipe"


def test_calls_are_named_for_the_machine() -> None:
    assert system_call(202, "x86_64") == "futex" and system_call(202, "aarch64") == "accept"
    assert system_call(202, "sparc") == "system call 202"


def test_a_number_that_the_kernel_gives_again_is_another_process(tmp_path: Path) -> None:
    line = "7 (python) S 1 7 7 0 -1 4 9 0 3 0 150 50 0 0 20 0 2 0 {} 0 10 0"
    family = ProcessTree(7, tree(tmp_path, {"proc/7/stat": line.format(1000)}))
    assert _read(family).seconds == 200 / TICKS
    tree(tmp_path, {"proc/7/stat": line.format(2000)})
    assert family.read() is None
