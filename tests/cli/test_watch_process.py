"""``steady watch --pid`` and ``steady watch -- COMMAND`` as their users meet them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from tests.monitor.process_watch.series import Part, Scene, averaged, square

from steadytrain.cli.watch_process import process_line, process_verdict, watch_process
from steadytrain.errors import InputError
from steadytrain.monitor.process_watch import read

OURS = "import sys; from steadytrain.cli.watch_process import watch_process; sys.exit(watch_process({}))"
SLEEP = "import time; print('ready', flush=True); time.sleep(60)"
SCENE = Scene(gpu=averaged(square(1.8, 0.6), 0.2), main=Part(cpu=0.1, asleep_in="poll"), workers=[Part(cpu=0.98)] * 8)


def _python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(_python(code), capture_output=True, text=True, check=False)


@contextmanager
def _asleep() -> Iterator[int]:
    child = subprocess.Popen(_python(SLEEP), stdout=subprocess.PIPE)
    assert child.stdout is not None
    with child, child.stdout:
        child.stdout.readline()
        yield child.pid
        child.kill()


COMMANDS = {
    "fails": "import sys, time; print('epoch 1'); print('warning', file=sys.stderr); time.sleep(3); sys.exit(5)",
    "works": "import time; print('epoch 1', flush=True); time.sleep(3)",
    "goes on": "import time; time.sleep(5); print('done', flush=True)",
}
BECOMES_NOBODY = "import os, pynvml; os.setgid(65534); os.setuid(65534); os.chdir('/'); "


@dataclass(frozen=True)
class Watches:
    """Watches that were made at the same time, since all that they do is to wait, by their names."""

    pid: int
    told: dict[str, subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def watches() -> Iterator[Watches]:
    """Of three commands, and of a process that sleeps and still does: by its own user, and by another one."""
    commands = {name: _python(code) for name, code in COMMANDS.items()}
    with _asleep() as pid, ThreadPoolExecutor() as pool:
        calls = {
            "fails": OURS.format(f"command={commands['fails']!r}"),
            "works": OURS.format(f"command={commands['works']!r}, json=True"),
            "goes on": OURS.format(f"command={commands['goes on']!r}, seconds=3, json=True"),
            "process": OURS.format(f"pid={pid}, seconds=3"),
        }
        if os.getuid() == 0:
            code = OURS.format(f"pid={pid}, seconds=3, json=True")
            calls["another user"] = code.replace("sys.exit", BECOMES_NOBODY + "sys.exit")
        yield Watches(pid, dict(zip(calls, pool.map(_run, calls.values()), strict=True)))


def test_a_command_keeps_its_output_and_its_exit_code_and_the_verdict_goes_beside(watches: Watches) -> None:
    process = watches.told["fails"]
    assert (process.returncode, process.stdout) == (5, "epoch 1\n")
    assert process.stderr.startswith("warning\n") and "ended with exit code 5" in process.stderr
    assert "\nwaiting (" in process.stderr and "not measurable here: " in process.stderr


def test_the_document_has_standard_output_to_itself(watches: Watches) -> None:
    process = watches.told["works"]
    document = json.loads(process.stdout)
    assert process.stderr == "epoch 1\n" and process.returncode == 0
    assert document["exit_code"] == 0 and document["causes"][0]["name"] == "waiting"
    assert document["rhythm"] is None and document["seen"]["working"] < 0.2
    assert set(document) == {
        *("process", "state", "exit_code", "seconds", "causes", "rhythm", "seconds_by_cause", "seen", "not_measurable")
    }


def test_a_process_is_watched_for_so_many_seconds_and_goes_on(watches: Watches) -> None:
    process = watches.told["process"]
    assert process.returncode == 0 and os.path.exists(f"/proc/{watches.pid}")  # noqa: PTH110
    assert f"process {watches.pid} (" in process.stdout and "still running" in process.stdout
    assert "Ctrl-C stops watching, not the process" in process.stderr


def test_a_command_that_a_signal_ended_has_the_exit_code_that_a_shell_gives_it() -> None:
    process = _run(OURS.format(f"command={_python('import os; os.kill(os.getpid(), 9)')!r}"))
    assert process.returncode == 137 and "ended with exit code 137" in process.stderr


def test_a_command_goes_on_after_its_verdict(watches: Watches) -> None:
    process = watches.told["goes on"]
    assert json.loads(process.stdout)["state"] == "still running" and process.stderr == "done\n"


def test_a_command_that_cannot_be_looked_at_has_one_verdict(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(pid: int) -> None:
        raise InputError(f"there is no process {pid}")

    monkeypatch.setattr("steadytrain.cli.watch_process.Sampler", refuse)
    assert watch_process(command=_python("import time; time.sleep(0.3)"), json=True) == 0
    assert json.loads(capfd.readouterr().out)["state"] == "ended with exit code 0"


def test_ctrl_c_ends_the_watch_with_a_verdict_and_leaves_the_process() -> None:
    with _asleep() as pid:
        ours = subprocess.Popen(
            _python(OURS.format(f"pid={pid}")), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert ours.stderr is not None
        with ours:
            ours.stderr.readline()
            time.sleep(3)
            ours.send_signal(signal.SIGINT)
            out, err = ours.communicate()
        assert os.path.exists(f"/proc/{pid}")  # noqa: PTH110
    assert ours.returncode == 0 and "still running" in out and "Traceback" not in err


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({}, "use either --pid N or a command"),
        ({"pid": 1, "command": ["true"]}, "use either --pid N or a command"),
        ({"pid": 0}, "there is no process 0"),
        ({"pid": 1, "seconds": 0.0}, "--seconds is 0"),
        ({"pid": 2**22 + 5}, "there is no process"),
        ({"command": ["no-such-program-here"]}, "no such command or file"),
    ],
)
def test_what_cannot_be_watched_is_said_in_one_line(values: dict[str, object], why: str) -> None:
    with pytest.raises(InputError, match=why) as caught:
        watch_process(**values)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_another_users_process_is_watched_as_far_as_that_user_may(watches: Watches) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can become somebody else")
    process = watches.told["another user"]
    assert process.returncode == 0, process.stderr
    missing = " ".join(json.loads(process.stdout)["not_measurable"])
    assert "what is read from disk" in missing and "which GPUs the process uses" in missing
    assert "what sleeping threads wait for" in missing


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_verdict_fits_its_columns(width: int) -> None:
    verdict = process_verdict(
        read(SCENE.moments()), "7 (python train.py)", 30.0, "still running", {"decode": 28, "storage": 2}, width
    )
    assert max(map(len, verdict)) <= width
    text = " ".join(" ".join(verdict).split())
    assert (
        "decode (40 % of the time): the GPU works 60 % of each 1.8 s period; meanwhile 8 worker processes burn" in text
    )
    assert "over the whole watch: decode 0:28, storage 0:02" in text


def test_a_line_has_the_figures_of_the_moment() -> None:
    line = process_line(30.0, read(SCENE.moments()))
    assert line.startswith("watch seconds=30 cause=decode working=0.60 gpu0=0.60 cpu=7.91 cores=8 ")
    assert "period_seconds=1.8" in line and "duty=0.6" in line
    assert process_line(0.5, read([])) == "watch seconds=0 cause=unknown"
