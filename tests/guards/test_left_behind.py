"""The checks in conftest.py catch what they are for: shown on tests that do it."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

PREAMBLE = """
import os, socket, subprocess, threading, time, urllib.request
import pytest
"""
LEAKS = {
    "thread a-thread": 'threading.Thread(target=time.sleep, args=(4,), daemon=True, name="a-thread").start()',
    r"child process \d+": 'subprocess.Popen(["sleep", "4"])',
    r"environment variable A_VARIABLE=1 \(was None\)": 'os.environ["A_VARIABLE"] = "1"',
    r"environment variable HOME=None \(was ": 'del os.environ["HOME"]',
    "working directory /": 'os.chdir("/")',
}
CLEAN = """
def test_clean(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("A_VARIABLE", "1")
    thread = threading.Thread(target=time.sleep, args=(0.2,))
    thread.start()
    subprocess.run(["true"], check=True)

def test_no_network():
    for attempt in (
        lambda: urllib.request.urlopen("http://example.com", timeout=5),
        lambda: socket.create_connection(("192.0.2.1", 80), timeout=5),
        lambda: socket.getaddrinfo("example.com", 80),
    ):
        with pytest.raises(OSError):
            attempt()

def test_this_machine_may_be_talked_to():
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
"""


def _outcome(folder: Path, body: str) -> str:
    """What pytest prints about tests in a folder of their own, under a copy of this project's conftest."""
    (folder / "conftest.py").write_text((TESTS / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "test_one.py").write_text(PREAMBLE + body, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    command += ["--basetemp", str(folder / "temp"), "-o", "addopts=", str(folder / "test_one.py")]
    return subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False).stdout


@pytest.mark.parametrize(("says", "line"), LEAKS.items(), ids=["thread", "child", "new", "gone", "folder"])
def test_what_a_test_leaves_behind_fails_it_by_name(tmp_path: Path, says: str, line: str) -> None:
    told = _outcome(tmp_path, f"def test_it():\n    {line}\n\ndef test_the_next():\n    pass\n")
    assert re.search(f"left behind: {says}", told), told
    assert "2 passed, 1 error" in told


def test_what_cleans_up_passes_and_nothing_reaches_a_network(tmp_path: Path) -> None:
    assert "3 passed" in _outcome(tmp_path, CLEAN)
