"""Plans are carried out: through a real sshd, with real ranks, and with schedulers that are there in name only."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.launch.sshd import Sshd, sshd  # noqa: F401

from steadytrain.cli import main
from steadytrain.launch import submit
from steadytrain.launch.plan import PlanStage

SHOW = """\
import json, os, sys
from steadytrain.distributed.world import world_from_environment
print(json.dumps({**vars(world_from_environment(os.environ)), "cwd": os.getcwd(), "token": os.environ.get("TOKEN")}))
"""
SAVES = """\
import os, signal, sys, time
def save(*_):
    os.write(2, b"saved\\n")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
print("pid", os.getpid(), file=sys.stderr, flush=True)
time.sleep(100)
"""
FAILS = SAVES.replace(
    "time.sleep(100)",
    """
if os.environ["RANK"] == "0":
    open("ready", "w").close()
    time.sleep(100)
while not os.path.exists("ready"):
    time.sleep(0.01)
sys.exit(7)
""",
)
AGAIN = """\
import os, pathlib, sys
count = pathlib.Path("count-" + os.environ["RANK"])
count.write_text(count.read_text() + "x" if count.exists() else "x")
sys.exit(1 if len(count.read_text()) < 3 and os.environ["RANK"] == "1" else 0)
"""


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with small programs in it."""
    folder = tmp_path / "my work"
    folder.mkdir()
    for name, program in (("show", SHOW), ("saves", SAVES), ("fails", FAILS), ("again", AGAIN)):
        (folder / f"{name}.py").write_text(program)
    (folder / "it's").mkdir()
    (folder / "it's" / "a note.txt").write_text("hello")
    (folder / ".env").write_text("TOKEN=1")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def over_ssh(sshd: Sshd, work: Path) -> list[str]:  # noqa: F811
    """The words for two machines, one rank each."""
    (work / "hosts").write_text("".join(f"{host}\n" for host in sshd.hosts))
    words = ["--hosts", "hosts", "--set", f"ssh.options={json.dumps(sshd.options)}"]
    return [*words, "--set", "address=127.0.0.1"]  # which the other "machine" is one with


def _launch(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", "steadytrain", "launch", *words]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, env=environment)


def _worlds(printed: str) -> list[dict[str, Any]]:
    documents = [json.loads(line[line.index("{") :]) for line in printed.splitlines() if "{" in line]
    return sorted(documents, key=lambda world: int(world["rank"]))


def test_two_machines_with_a_copy_of_the_work(over_ssh: Sequence[str], work: Path, tmp_path: Path) -> None:
    there = tmp_path / "their copy"
    words = ["--sync", str(there), "--env", "TOKEN", "--procs", "2", "--", "python", "show.py"]
    done = _launch(*over_ssh, *words, TOKEN="never shown")
    assert done.returncode == 0, done.stderr
    worlds = _worlds(done.stdout)
    assert [(world["rank"], world["size"], world["local_rank"]) for world in worlds] == [
        (0, 4, 0),
        (1, 4, 1),
        (2, 4, 0),
        (3, 4, 1),
    ]
    assert {(world["cwd"], world["token"], world["address"]) for world in worlds} == {
        (str(there), "never shown", "127.0.0.1")
    }
    assert (there / "it's" / "a note.txt").read_text() == "hello" and not (there / ".env").exists()
    assert "not copied, because they may hold secrets: .env" in done.stderr
    assert "never shown" not in done.stderr


@pytest.mark.parametrize("tool", ["rsync", pytest.param("tar", marks=pytest.mark.slow)])
def test_a_copy_deletes_nothing_there(tool: str, over_ssh: Sequence[str], tmp_path: Path) -> None:
    there = tmp_path / "there"
    (there / "runs").mkdir(parents=True)
    (there / "runs" / "old").write_text("kept")
    words = ["--sync", str(there), "--set", f"ssh.tool={tool}", "--exclude", "s*.py", "--", "python", "-c", "pass"]
    assert _launch(*over_ssh, *words).returncode == 0
    names = {str(path.relative_to(there)) for path in there.rglob("*") if path.is_file()}
    assert names == {"runs/old", "hosts", "again.py", "fails.py", "it's/a note.txt"}


@pytest.mark.slow
def test_after_a_failure_all_start_again(over_ssh: Sequence[str], work: Path) -> None:
    done = _launch(*over_ssh, "--set", "restarts=2", "--", "python", "again.py")
    assert done.returncode == 0, done.stderr
    assert (work / "count-1").read_text() == "xxx" and (work / "count-0").exists()
    assert "start 3 of 3" in done.stderr


def test_one_machine_that_fails_ends_the_others(over_ssh: Sequence[str]) -> None:
    done = _launch(*over_ssh, "--", "python", "fails.py")
    assert done.returncode == 7
    assert "[0 127.0.0.1] saved" in done.stderr and "127.0.0.2: ended with exit code 7" in done.stderr
    _gone(_pids(done.stderr))


@pytest.mark.parametrize(
    "how", [signal.SIGKILL, *(pytest.param(how, marks=pytest.mark.slow) for how in (signal.SIGINT, signal.SIGTERM))]
)
def test_however_it_ends_nothing_is_left_there(how: signal.Signals, over_ssh: Sequence[str]) -> None:
    command = [sys.executable, "-P", "-m", "steadytrain", "launch", *over_ssh, "--", "python", "saves.py"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        heard = ""
        while len(_pids(heard)) < 2:
            heard += (line := process.stderr.readline())
            assert line, heard
        process.send_signal(how)
        heard += process.stderr.read()
    assert process.returncode == (75 if how != signal.SIGKILL else -how), heard
    if how != signal.SIGKILL:
        assert heard.count("saved") == 2
    _gone(_pids(heard))


def test_ranks_here_do_not_outlive_a_killed_launch(work: Path) -> None:
    command = [sys.executable, "-P", "-m", "steadytrain", "launch", "--procs", "2", "--", "python", "saves.py"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        heard = "".join(process.stderr.readline() for _ in range(2))
        process.kill()
        process.wait()
        assert len(_pids(heard)) == 2
        _gone(_pids(heard))


def _pids(heard: str) -> list[int]:
    return [int(line.rpartition(" ")[2]) for line in heard.splitlines() if "] pid " in line]


def _gone(pids: Sequence[int]) -> None:
    end = time.monotonic() + 60
    while left := [pid for pid in pids if psutil.pid_exists(pid)]:
        assert time.monotonic() < end, f"left behind: {left}"
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "python=/nowhere/python"], "127.0.0.1: /nowhere/python cannot be started"),
        (["--set", "folder=/nowhere"], "127.0.0.1: the working directory does not exist there: --sync FOLDER"),
        (["--env", "NEVER_SET"], "--env NEVER_SET has no value"),
    ],
)
def test_what_is_missing_there_is_named(words: list[str], message: str, over_ssh: Sequence[str]) -> None:
    done = _launch(*over_ssh, *words, "--", "python", "show.py")
    assert done.returncode == 2 and message in done.stderr and "Traceback" not in done.stderr


def test_a_machine_that_cannot_be_reached_is_named(work: Path, sshd: Sshd) -> None:  # noqa: F811
    (work / "hosts").write_text(f"127.0.0.3:{sshd.port}\n")
    done = _launch("--hosts", "hosts", "--", "python", "show.py")
    assert done.returncode == 2 and "127.0.0.3: ssh cannot log in" in done.stderr


def test_this_machine(work: Path) -> None:
    done = _launch("--procs", "2", "--", "python", "show.py")
    assert [(world["rank"], world["size"]) for world in _worlds(done.stdout)] == [(0, 2), (1, 2)]
    done = _launch("--procs", "2", "--env", "GREETING=a b", "--", "python", "fails.py")
    assert done.returncode == 7


def _stand_in(folder: Path, name: str, program: str) -> str:
    """A scheduler's command in name only, first on the path."""
    path = folder / "bin" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{program}\n")
    path.chmod(0o755)
    return f"{path.parent}{os.pathsep}{os.environ['PATH']}"


def test_a_scheduler_gets_the_file(work: Path) -> None:
    path = _stand_in(work, "sbatch", 'head -n 1 "$2" >&2; echo 12')
    done = _launch("--on", "slurm", "--json", "-o", "out", "--", "train", "a.rec", PATH=path)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert (document["answer"], document["files"]) == ("12", ["out/steadytrain.sbatch"])
    assert (work / "out" / "steadytrain.sbatch").stat().st_mode & 0o111


def test_a_scheduler_that_refuses_is_quoted(work: Path) -> None:
    path = _stand_in(work, "kubectl", "echo forbidden >&2; exit 1")
    done = _launch("--on", "kubernetes", "--set", "image=a", "--", "bandwidth", PATH=path)
    assert done.returncode == 1 and "kubectl rejected the job (exit code 1): forbidden" in done.stderr


def test_a_scheduler_that_is_not_there(work: Path) -> None:
    done = _launch("--on", "mpi", "--", "bandwidth", PATH="/nowhere")
    assert done.returncode == 2 and "mpirun is not installed here" in done.stderr


def _kept(monkeypatch: pytest.MonkeyPatch, ends: list[tuple[int, bool]], *, keep: bool) -> tuple[int, list[str], int]:
    """The exit code of a stage whose starts end so (exit code; this process was asked), its words, and its starts."""
    said: list[str] = []
    left = list(ends)
    monkeypatch.setattr(submit, "_run_once", lambda *_: left.pop(0))
    monkeypatch.setattr(submit, "_FIRST_PAUSE", 0.0)
    code = submit._run(PlanStage(kind="run", commands=(), restarts=1), 1.0, said.append, keep=keep)
    return code, said, len(ends) - len(left)


def test_a_kept_job_starts_again_whenever_it_has_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    code, said, starts = _kept(monkeypatch, [(75, False), (75, False), (0, False)], keep=True)
    assert (code, starts) == (0, 3)
    assert said == ["saved and stopped after 0 s: started again in 0 s (--keep)"] * 2
    assert _kept(monkeypatch, [(75, False)], keep=False) == (75, [], 1)


def test_a_kept_job_ends_where_its_user_ends_it_or_it_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _kept(monkeypatch, [(75, True)], keep=True) == (75, [], 1)
    assert _kept(monkeypatch, [(75, False), (2, False)], keep=True)[::2] == (2, 2)
    # Failures count as before, whatever lies between.
    assert _kept(monkeypatch, [(1, False), (75, False), (1, False)], keep=True)[::2] == (1, 3)


def test_until_and_keep_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--keep", "--dry-run", "--", "train", "a.rec", "--until", "2"]) == 2
    assert "--until 2 ends with exit code 75, after which --keep starts again: leave one out" in capsys.readouterr().err


@pytest.mark.parametrize(("keep", "line"), [((), "75) again=$asked"), (("--keep",), "75) again=yes")])
def test_slurm_queues_a_kept_job_again(keep: Sequence[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "--on", "slurm", *keep, "--dry-run", "--", "train", "a.rec", "--run", "r"]) == 0
    assert line in capsys.readouterr().out
