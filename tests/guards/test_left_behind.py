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
# What pytest says of the leak, and the line that leaks.
LEAKS = {
    "thread": (
        "thread a-thread",
        'threading.Thread(target=time.sleep, args=(8,), daemon=True, name="a-thread").start()',
    ),
    "child": (r"child process \d+", 'subprocess.Popen(["sleep", "8"])'),
    "new": (r"environment variable A_VARIABLE=1 \(was None\)", 'os.environ["A_VARIABLE"] = "1"'),
    "gone": (r"environment variable HOME=None \(was ", 'del os.environ["HOME"]'),
    "folder": ("working directory /", 'os.chdir("/")'),
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
    conftest = (
        (TESTS / "conftest.py").read_text(encoding="utf-8").replace("GRACE_SECONDS = 60.0", "GRACE_SECONDS = 0.7")
    )
    (folder / "conftest.py").write_text(conftest, encoding="utf-8")
    (folder / "test_one.py").write_text(PREAMBLE + body, encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    command += ["--basetemp", str(folder / "temp"), "-o", "addopts=", str(folder / "test_one.py")]
    return subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False).stdout


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What pytest prints about one test for each leak, and those that leave nothing behind."""
    leaking = "".join(f"def test_{name}():\n    {line}\n\n" for name, (_, line) in LEAKS.items())
    return _outcome(tmp_path_factory.mktemp("leaks"), leaking + CLEAN)


@pytest.mark.parametrize("name", LEAKS)
def test_what_a_test_leaves_behind_fails_it_by_name(outcome: str, name: str) -> None:
    assert re.search(f"ERROR at teardown of test_{name} _+\nleft behind: {LEAKS[name][0]}", outcome), outcome


def test_what_cleans_up_passes_and_nothing_reaches_a_network(outcome: str) -> None:
    assert f"{len(LEAKS) + 3} passed, {len(LEAKS)} errors" in outcome
