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
from steadytrain.machine.children import LineServer, run_program, start


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
    ended = run_program(python(code), seconds=1.0, own_group=True)
    assert ended.is_late and ended.code == -signal.SIGKILL and ended.output == "begun\n"
    until, grandchild = time.monotonic() + 10, int(note.read_text())
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


def test_a_server_answers_lines_until_it_dies_or_is_late() -> None:
    code = (
        "import os, sys, time\n"
        "print('ready', flush=True)\n"
        "for line in sys.stdin:\n"
        "    time.sleep(600) if line == 'hang\\n' else os._exit(7) if line == 'die\\n' else None\n"
        "    print(line.strip().upper(), flush=True)\n"
    )
    server = LineServer(code, dict(os.environ))
    assert server.ask(None, 60) == ("ready\n", False)
    assert server.ask("two words", 60) == ("TWO WORDS\n", False)
    assert server.ask("hang", 0.2) == ("", True)
    assert server.end() == -signal.SIGKILL
    server = LineServer(code, dict(os.environ))
    assert server.ask("die", 60)[0] == "ready\n"
    assert server.ask(None, 60) == ("", False)
    assert server.end(5) == 7


def test_a_call_in_a_fork_returns_its_text_or_how_the_child_died() -> None:
    code = (
        "import os\nfrom steadytrain.machine.children import call_in_fork\n"
        "print(call_in_fork(lambda: 'ab'), call_in_fork(lambda: os.kill(os.getpid(), 9)))"
    )
    assert subprocess.run(python(code), capture_output=True, text=True, check=True).stdout == "ab -9\n"
