"""Children are fed, given a time limit, and ended with what they started; the last line they wrote says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from steadytrain.errors import FailedError, InputError
from steadytrain.machine import children
from steadytrain.machine.children import ChildEndedError, ForkServer, run_program, start, wait_together
from steadytrain.machine.process import interrupted_once


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_program_gets_its_input_and_its_last_words_are_kept() -> None:
    code = "import sys; print(input()[::-1]); sys.stderr.write('first\\nsteady: no such file\\n\\n'); sys.exit(3)"
    ended = run_program(python(code), "abc\n", 60)
    assert (ended.code, ended.output.strip(), ended.last_line) == (3, "cba", "no such file")


def test_a_program_that_takes_too_long_is_killed_with_what_it_started(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    code = (
        "import subprocess, sys, time, pathlib\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid))\n"
        "print('begun', flush=True)\ntime.sleep(600)\n"
    )
    ended = run_program(python(code), seconds=4.0, own_group=True)  # enough for it to begin on a busy machine
    assert ended.is_late and ended.code == -signal.SIGKILL and ended.output == "begun\n"
    until, grandchild = time.monotonic() + 60, int(note.read_text())
    while Path(f"/proc/{grandchild}").exists() and _state(grandchild) != "Z":
        assert time.monotonic() < until, "what the program started is still there"
        time.sleep(0.02)


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0]
    except OSError:
        return "Z"


@pytest.mark.parametrize(("refusal", "code"), [(InputError, 2), (FailedError, 1)])
def test_a_program_that_is_not_there_is_refused_with_the_callers_error(
    refusal: type[InputError] | type[FailedError], code: int
) -> None:
    with pytest.raises(refusal, match="cannot start /nowhere/prog: no such command or file") as caught:
        start(["/nowhere/prog"], refusal=refusal)
    assert caught.value.exit_code == code


SERVER = """
import os, time
from steadytrain.machine.children import serve_forks
loaded = os.getpid()
def talk(connection):
    while True:
        try:
            word = connection.recv()
        except EOFError:
            return
        if word == "hang":
            time.sleep(600)
        if word == "die":
            os._exit(7)
        connection.send((word.upper(), loaded == os.getppid(), os.getpid()))
serve_forks(talk)
"""


def test_children_of_a_server_answer_side_by_side_and_one_that_dies_or_hangs_is_told() -> None:
    server = ForkServer(SERVER)
    try:
        first, second = server.fork(60), server.fork(60)
        answers = [child.ask(word, 60) for word in ("one", "two") for child in (first, second)]
        assert [answer[:2] for answer in answers] == [("ONE", True)] * 2 + [("TWO", True)] * 2
        assert len({answer[2] for answer in answers}) == 2, "a process each, which keeps its state"
        with pytest.raises(ChildEndedError, match=r"crashed \(code 7\)"):
            first.ask("die", 60)
        with pytest.raises(TimeoutError, match="not done in 0 s"):
            second.ask("hang", 0.1)
        assert (first.end(), second.end()) == (7, -signal.SIGKILL)
        third = server.fork(60)
        assert third.ask("three", 60)[0] == "THREE" and third.end() == 0
    finally:
        assert server.end() in (-signal.SIGKILL, 0), "killed, unless it has seen its end before"


def test_a_server_that_cannot_start_is_told() -> None:
    with pytest.raises(ChildEndedError) as caught:
        ForkServer("raise SystemExit(3)").fork(60)
    assert caught.value.code == 3


def test_a_process_that_is_asked_twice_to_end_cleans_up(tmp_path: Path) -> None:
    left = tmp_path / "left"
    left.touch()
    code = f"""
import pathlib, signal
from steadytrain.machine.process import interrupted_once
try:
    with interrupted_once() as received:
        try:
            signal.raise_signal(signal.SIGTERM)  # of whoever signals all of a group
        finally:
            for name in ("SIGTERM", "SIGINT", "SIGHUP"):  # of the parent
                signal.raise_signal(signal.Signals[name])
            pathlib.Path({str(left)!r}).unlink()
except KeyboardInterrupt:
    print(received[0])
"""
    assert run_program(python(code)).output.strip() == str(int(signal.SIGTERM)) and not left.exists()


@pytest.mark.parametrize("is_the_same", [True, False])
def test_processes_that_save_are_not_killed_by_the_same_request(
    is_the_same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(children, "ASKED_TWICE_SECONDS", 60 if is_the_same else 0)
    saves = "import signal, time; signal.signal(15, lambda *a: (time.sleep(0.3), exit(75))); print(1, flush=True)"
    child = start(python(f"{saves}\ntime.sleep(60)"), stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"1\n"
    requests = [signal.SIGTERM]

    def ask() -> None:
        child.terminate()
        requests.append(signal.SIGTERM)

    wait_together([child], requests, ask_to_end=ask, grace_seconds=60, kill_if_asked_twice=True)
    child.stdout.close()
    assert child.returncode == (75 if is_the_same else -signal.SIGKILL)


def test_a_signal_that_a_shell_has_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    try:
        with interrupted_once() as received:
            signal.raise_signal(signal.SIGUSR1)
        assert received == []
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has the parent's death signal")
def test_a_child_that_ends_with_us_begins_like_any_other() -> None:
    """Python stands between for a moment: it ignores SIGPIPE, and may add a variable for its own text."""
    command, variables = (
        ["sh", "-c", "env | sort; grep SigIgn /proc/self/status; echo $PPID"],
        {"PATH": os.environ["PATH"]},
    )
    plain, tied = (run_program(command, variables=variables, ends_with_us=ends).output for ends in (False, True))
    assert plain == tied and str(os.getpid()) in tied


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has the parent's death signal")
def test_a_child_whose_parent_is_gone_before_it_has_begun_ends() -> None:
    someone_else = str(os.getppid())
    done = run_program([sys.executable, "-I", "-S", "-c", children._END_WITH, someone_else, "", "sleep", "60"])
    assert done.code == -signal.SIGTERM


@pytest.mark.parametrize("ends", [False, True])
def test_a_command_that_is_not_there_is_named(ends: bool, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot start no-such-program: no such command or file"):
        start(["no-such-program"], ends_with_us=ends)
    (tmp_path / "plain").write_text("text", encoding="utf-8")
    with pytest.raises(InputError, match="plain: Permission denied"):
        start([str(tmp_path / "plain")], ends_with_us=ends)


@pytest.mark.skipif(sys.platform != "linux", reason="only there are signals ignored for it")
def test_a_child_ignores_the_signals_that_it_is_to_ignore() -> None:
    program = "import signal; print(signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN)"
    ended = run_program(python(program), ends_with_us=True, ignores=[signal.SIGUSR1])
    assert ended.output == "True\n"


@pytest.mark.skipif(sys.platform != "linux", reason="ends with its parent on Linux alone")
def test_a_child_that_hears_ctrl_c_as_it_begins_ends_by_it_without_a_traceback() -> None:
    for seconds in (0.0, 0.01, 0.02, 0.04):
        process = start(["sleep", "30"], ends_with_us=True, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[1] == b"" and process.returncode == -signal.SIGINT


@pytest.mark.skipif(sys.platform != "linux", reason="ends with its parent on Linux alone")
def test_a_child_has_its_processors_from_its_first_moment() -> None:
    [mine, *_] = os.sched_getaffinity(0)
    words = python("import os; print(*os.sched_getaffinity(0))")
    assert run_program(words, ends_with_us=True, processors=[mine]).output.split() == [str(mine)]
