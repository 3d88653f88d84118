"""Ranks that a command starts for itself: real processes, which end well, badly, or by a signal."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from steadytrain.errors import InputError
from steadytrain.launch.supervise import keep_ranks


def program(text: str) -> list[str]:
    head = "import os, pathlib, signal, sys, time\nrank = int(os.environ['RANK'])\n"
    return [sys.executable, "-c", head + textwrap.dedent(text)]


def test_each_is_told_its_place_and_all_the_same_meeting(tmp_path: Path) -> None:
    process = program(f"""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        pathlib.Path({str(tmp_path)!r}, f"{{rank}}").write_text(" ".join(os.environ[name] for name in names))
    """)
    assert keep_ranks(process, 3) == 0
    words = [(tmp_path / str(rank)).read_text().split() for rank in range(3)]
    assert [word[:4] for word in words] == [[str(rank), "3", str(rank), "3"] for rank in range(3)]
    assert len({tuple(word[4:]) for word in words}) == 1 and words[0][4] == "127.0.0.1"


def test_only_the_first_rank_prints(capfd: pytest.CaptureFixture[str]) -> None:
    assert keep_ranks(program("print('rank', rank); print('error', rank, file=sys.stderr)"), 2) == 0
    out, err = capfd.readouterr()
    assert (out, err) == ("rank 0\n", "error 0\n")


def test_what_a_failing_rank_said_is_shown_and_its_code_is_the_answer() -> None:
    messages: list[str] = []
    process = program("""
        if rank == 1:
            print("its last words", file=sys.stderr)
            sys.exit(7)
    """)
    assert keep_ranks(process, 2, say=messages.append) == 7
    assert messages == ["rank 1: its last words"], "an error of its own is not cured by another start"


def test_a_killed_rank_of_independent_ones_is_told_and_costs_no_other() -> None:
    messages: list[str] = []
    process = program("""
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
    """)
    killed: list[int] = []
    assert keep_ranks(process, 3, independent=True, say=messages.append, on_killed=killed.append) == 0
    assert messages == ["rank 1 was killed by SIGKILL: the others do its work"] and killed == [1]
    messages.clear()
    assert keep_ranks(program("os.kill(os.getpid(), signal.SIGKILL)"), 2, independent=True, say=messages.append) == 137
    assert messages[-1].endswith("was killed by SIGKILL: no rank is left, run the same command again to continue")
    wrong = program("""
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        print("its last words", file=sys.stderr)
        sys.exit(2)
    """)
    messages.clear()
    assert keep_ranks(wrong, 2, independent=True, say=messages.append) == 2
    assert messages[-1] == "rank 1: its last words"


def test_a_killed_rank_brings_all_of_them_back(tmp_path: Path) -> None:
    messages: list[str] = []
    process = program(f"""
        starts = pathlib.Path({str(tmp_path)!r}, f"{{rank}}")
        with starts.open("a") as file:
            file.write("x")
        if rank == 1 and len(starts.read_text()) < 3:
            os.kill(os.getpid(), signal.SIGKILL)
        elif len(starts.read_text()) < 3:
            sys.exit(4)  # another rank was lost
    """)
    assert keep_ranks(process, 2, say=messages.append) == 0
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["xxx", "xxx"]
    assert messages == ["rank 1 was killed by SIGKILL: restarting all 2 ranks"] * 2


def test_ranks_that_lost_touch_start_again_though_all_of_them_live(tmp_path: Path) -> None:
    """As where one is stopped for a minute and then continued: each finds the other gone."""
    messages: list[str] = []
    process = program(f"""
        started = pathlib.Path({str(tmp_path)!r}, f"{{rank}}")
        if not started.exists():
            started.touch()
            sys.exit(4)
    """)
    assert keep_ranks(process, 2, say=messages.append) == 0
    assert messages == ["the ranks lost touch with each other, and none of them failed: restarting all 2 ranks"]


def test_one_that_is_killed_again_and_again_ends_the_command() -> None:
    messages: list[str] = []
    process = program("os.kill(os.getpid(), signal.SIGKILL) if rank else sys.exit(4)")
    assert keep_ranks(process, 2, restarts=1, say=messages.append) == 128 + signal.SIGKILL
    assert len(messages) == 1


def test_the_code_is_that_of_the_rank_that_failed_by_itself(tmp_path: Path) -> None:
    process = program(f"""
        failed = pathlib.Path({str(tmp_path)!r}, "failed")
        if rank == 1:
            failed.touch()
            sys.exit(1)
        while not failed.exists():
            time.sleep(0.01)
        time.sleep(0.2)
        sys.exit(4)  # another rank was lost
    """)
    assert keep_ranks(process, 2) == 1


def test_a_request_to_end_that_comes_between_two_starts_reaches_the_new_ranks(tmp_path: Path) -> None:
    def ask(message: str) -> None:
        os.kill(os.getpid(), signal.SIGTERM)

    process = program(f"""
        started = pathlib.Path({str(tmp_path)!r}, f"{{rank}}")
        if not started.exists():
            started.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    """)
    assert keep_ranks(process, 2, say=ask) == 128 + signal.SIGTERM


def test_a_command_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="cannot start no-such-command"):
        keep_ranks(["no-such-command"], 2)


KEEPER = """
import sys
from steadytrain.launch.supervise import keep_ranks
sys.exit(keep_ranks([sys.executable, "-c", sys.argv[1]], 2))
"""
WAITS = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
pathlib.Path(FOLDER, os.environ["RANK"]).touch()
time.sleep(60)
"""


def _kept(folder: Path, prefix: Sequence[str] = ()) -> subprocess.Popen[bytes]:
    text = WAITS.replace("FOLDER", repr(str(folder)))
    keeper = subprocess.Popen([*prefix, sys.executable, "-c", KEEPER, text], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    return keeper


def test_a_request_to_end_reaches_all_and_their_answer_counts(tmp_path: Path) -> None:
    keeper = _kept(tmp_path)
    keeper.terminate()
    assert keeper.wait(60) == 75


@pytest.mark.parametrize("is_ignored", [True, False])
def test_a_hangup_that_nohup_ignores_reaches_no_rank(tmp_path: Path, is_ignored: bool) -> None:
    keeper = _kept(tmp_path, ["nohup"] if is_ignored else [])
    keeper.send_signal(signal.SIGHUP)
    if is_ignored:
        time.sleep(1.0)
        assert keeper.poll() is None
        keeper.terminate()
    assert keeper.wait(60) == (75 if is_ignored else 128 + signal.SIGHUP)


def test_ranks_do_not_outlive_a_keeper_that_is_killed(tmp_path: Path) -> None:
    keeper = _kept(tmp_path)
    ranks = psutil.Process(keeper.pid).children()
    assert len(ranks) == 2
    os.kill(keeper.pid, signal.SIGKILL)
    keeper.wait(60)
    assert psutil.wait_procs(ranks, timeout=60)[1] == []
