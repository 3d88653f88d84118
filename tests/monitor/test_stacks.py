"""Where threads are, in words and in a file."""

from __future__ import annotations

import bdb
import queue
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from steadytrain.monitor import stacks


@contextmanager
def _thread(name: str, work: Callable[[threading.Event, threading.Event], object]) -> Iterator[int]:
    """A thread that has set the first event, and ends when the second is set; its number."""
    there, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=work, args=(there, end), name=name)
    thread.start()
    there.wait()
    try:
        yield thread.ident or 0
    finally:
        end.set()
        thread.join()


def _spin(there: threading.Event, end: threading.Event) -> None:
    there.set()
    while not end._flag:  # type: ignore[attr-defined]  # asking by is_set() would be the standard library's code
        pass


def _wait_in_the_standard_library(there: threading.Event, end: threading.Event) -> None:
    there.set()
    end.wait()


def test_a_place_is_a_function_with_its_file_and_line() -> None:
    with _thread("steady-test", _spin) as number:
        assert stacks.where(number).startswith("_spin (monitor/test_stacks.py:")


def test_the_standard_library_is_left_out_of_the_words() -> None:
    with _thread("steady-test", _wait_in_the_standard_library) as number:
        assert stacks.where(number).startswith("_wait_in_the_standard_library (monitor/test_stacks.py:")
        assert [frame.f_code.co_name for frame in stacks.frames(number)][-1] == "_bootstrap"


def test_threads_that_wait_for_something_to_do_are_not_busy() -> None:
    idle = _wait_in_the_standard_library
    with _thread("feed-0", idle), _thread("feed-1", _spin), _thread("other-2", _spin):
        while list(states := stacks.busy("feed-")) != ["feed-1"]:
            pass  # until feed-0 has come to its wait
    assert states["feed-1"].startswith("is in _spin (")


def test_of_two_threads_of_one_name_the_busy_one_is_told() -> None:
    with _thread("feed-0", _wait_in_the_standard_library), _thread("feed-0", _spin):
        while "_spin" not in stacks.busy("feed-").get("feed-0", ""):
            pass
    with _thread("feed-0", _spin), _thread("feed-0", _wait_in_the_standard_library):
        while "_spin" not in stacks.busy("feed-").get("feed-0", ""):
            pass


def test_a_thread_that_has_ended_has_no_frames() -> None:
    with _thread("steady-test", _spin) as number:
        pass
    assert list(stacks.frames(number)) == []
    assert stacks.where(number) == "no Python code"


def test_a_debugger_that_holds_a_thread_is_seen() -> None:
    seen: queue.Queue[bool] = queue.Queue()

    class Debugger(bdb.Bdb):
        def user_line(self, frame: object) -> None:
            seen.put(stacks.is_debugged(threading.get_ident()))
            self.set_continue()

    before = sys.gettrace()
    Debugger().run("x = 1", {})
    sys.settrace(before)
    assert seen.get(timeout=60) is True
    assert not stacks.is_debugged(threading.get_ident())


def test_a_file_for_each_standstill_with_all_threads(tmp_path: Path) -> None:
    with _thread("feed-7", _wait_in_the_standard_library):
        first, second, third = (stacks.dump(tmp_path, "nothing moves", rank) for rank in (0, 0, 3))
    assert [path.name for path in (first, second, third)] == ["stacks-1.txt", "stacks-2.txt", "stacks-3-1.txt"]
    text = first.read_text()
    assert text.startswith("nothing moves\n\n")
    assert "feed-7: thread 0x" in text and "MainThread: thread 0x" in text
    assert "in _wait_in_the_standard_library\n" in text and "most recent call first" in text


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_what_the_kernel_says_of_threads_and_children(tmp_path: Path) -> None:
    with _thread("feed-7", _wait_in_the_standard_library), subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        lines = stacks.dump(tmp_path, "").read_text().splitlines()
        assert child.poll() is None
    (thread,) = (line for line in lines if line.startswith("feed-7: "))
    (process,) = (line for line in lines if line.startswith(f"process {child.pid}: threads: 1 "))
    assert "sleeping" in thread or "running" in thread
    assert "sleeping" in process or "running" in process or "disk" in process
