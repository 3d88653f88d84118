"""Reading /proc, of this process and of children whose doings are known."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from steadytrain.monitor.process_watch import proc
from steadytrain.monitor.process_watch.calls import name

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")


def test_a_name_with_brackets_and_spaces_does_not_shift_the_fields() -> None:
    told = proc.parse_stat("7 (py (x) S 1) D 42 7 7 0 -1 4 9 0 3 0 150 50 0 0 20 0 2 0 1000 0 10 0 0")
    assert told is not None
    assert (told.name, told.state, told.parent, told.major_faults) == ("py (x) S 1", "D", 42, 3)
    assert (told.num_threads, told.started, told.memory_bytes) == (2, 1000, 10 * proc.PAGE_BYTES)
    assert told.cpu_seconds == 200 / proc.TICKS


def test_a_line_cut_short_is_no_process() -> None:
    assert proc.parse_stat("7 (python) S 1 7") is None
    assert proc.parse_stat("") is None


def test_this_process_knows_itself() -> None:
    me = os.getpid()
    told = proc.stat(f"/proc/{me}")
    assert told is not None and told.parent == os.getppid() and told.memory_bytes > 1 << 20
    assert proc.threads(me)[0] == me and "python" in proc.command(me)
    assert proc.parents()[me] == os.getppid()
    assert proc.allowed(me) == os.sched_getaffinity(0)


def test_what_is_gone_is_none_and_no_error() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    folder = f"/proc/{gone.pid}"
    assert proc.stat(folder) is None and proc.scheduled(folder) is None
    assert proc.threads(gone.pid) == [] and proc.command(gone.pid) == ""
    assert proc.waits_in(gone.pid, gone.pid) is None and proc.gpu_files(gone.pid) is None
    assert proc.allowed(gone.pid) is None


def test_a_thread_that_waits_for_a_pipe_says_so() -> None:
    code = "import sys; print(flush=True); sys.stdin.read()"
    child = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    with child, child.stdin:
        child.stdout.readline()
        for _ in range(200):
            if (told := proc.waits_in(child.pid, child.pid)) == "read pipe":
                break
            threading.Event().wait(0.01)
    if told is None:
        pytest.skip("system calls of other processes are not readable here")
    assert told == "read pipe"


def test_children_are_found_through_the_threads_that_started_them() -> None:
    child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    with child, child.stdin:
        told = proc.children(os.getpid(), proc.threads(os.getpid()))
    assert told is None or child.pid in told


def test_processors_and_tables() -> None:
    times = proc.processor_times()
    assert set(times) >= os.sched_getaffinity(0)
    assert all(busy >= 0 and idle >= 0 for busy, idle, _, _ in times.values())
    assert int(proc.table("/proc/meminfo")["MemTotal"].split()[0]) > 0
    assert set(proc.pressure()) <= {"cpu", "memory", "io"}


def test_calls_are_named_for_the_machine() -> None:
    assert name(202, "x86_64") == "futex" and name(202, "aarch64") == "accept"
    assert name(202, "sparc") == "system call 202"
