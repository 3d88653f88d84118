"""``steady watch``: a run on a terminal of any width, in a log, as JSON; what it says of runs that do not go well."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.cli.terminal import on_terminal, unstyled
from tests.reports.measured_runs import Attempt, line, measured
from tests.reports.runs import logged, recipe, started

from steadytrain.cli import main
from steadytrain.cli.watch import screen_lines
from steadytrain.cost.prices import parse_price
from steadytrain.events import Event, Failed, Stalled
from steadytrain.reports.watch import Watch, snapshot
from steadytrain.run import Run

Captured = pytest.CaptureFixture[str]
STEADY = [sys.executable, "-m", "steadytrain", "watch"]


def write(folder: Path, events: Sequence[Event], *, every: float = 1.0, ago: float = 0.0) -> Run:
    """A run with these events, an interval apart, the last of them so long ago."""
    run = Run.create(folder, recipe())
    began = time.time() - ago - every * (len(events) - 1)
    lines = [line(event, began + every * i) for i, event in enumerate(events)]
    (run.directory / "events.jsonl").write_text("".join(lines), encoding="utf-8")
    return run


def half(folder: Path) -> Run:
    """A run of another machine that was heard of just now, in the middle of its training."""
    run = Run.create(folder, recipe())
    attempt = Attempt(0.0, gpus=1)
    rows = [(attempt.now, event) for event in attempt.events()]
    rows = rows[: len(rows) // 2]
    shift = time.time() - rows[-1][0]
    lines = [line(event, at + shift) for at, event in rows]
    (run.directory / "events.jsonl").write_text("".join(lines), encoding="utf-8")
    return run


def frames(sent: str) -> list[list[str]]:
    """The screens that were drawn, each as its lines, without colours."""
    drawn = sent.partition("\x1b[?1049h")[2].partition("\x1b[?1049l")[0]
    plain = [unstyled(frame).replace("\r", "") for frame in drawn.split("\x1b[H")]
    return [[row.rstrip() for row in screen.split("\n")] for screen in plain if screen.strip()]


def drawn(run: Run, columns: int, rows: int = 40) -> list[str]:
    """The lines of a screen of that size."""
    watched = Watch(run)
    watched.read()
    return screen_lines(snapshot(watched, price=parse_price("3.6")), columns, rows)


def test_a_terminal_shows_a_run_and_its_final_figures_stay(tmp_path: Path) -> None:
    half(tmp_path / "half")
    code, sent = on_terminal([*STEADY, str(tmp_path / "half"), "--price", "3.6"], 80, rows=40, until=b"GPU 0")
    assert code == 0, sent
    screen = frames(sent)[0]
    assert "half" in screen[0] and max(map(len, screen)) <= 80 and len(screen) <= 40
    assert "where the time went" in sent.partition("\x1b[?1049l")[2], "they stay when the screen is given back"
    assert "Traceback" not in sent


@pytest.mark.parametrize("columns", [60, 80, 130])
def test_a_screen_of_any_width_shows_all_of_a_run(tmp_path: Path, columns: int) -> None:
    screen = drawn(half(tmp_path / "half"), columns)
    text = "\n".join(screen)
    for what in ("half", "running on another-machine", "epoch 1.", "left", "cost", "loss", "best top-1", "images/s"):
        assert what in text, what
    for what in ("where the time went", "backward pass", "batches ready", "of 4", "cores", "GPU 0", "% busy"):
        assert what in text, what
    assert len(screen) <= 40 and max(map(len, screen)) <= columns


def test_a_low_terminal_keeps_the_verdict_and_drops_what_matters_less(tmp_path: Path) -> None:
    screen = drawn(half(tmp_path / "half"), 80, rows=16)
    assert len(screen) <= 16
    assert "epoch" in "\n".join(screen)
    assert "GPU 0" not in "\n".join(screen)


def test_elsewhere_there_are_lines_for_a_log(tmp_path: Path, capsys: Captured) -> None:
    run = half(tmp_path / "half")
    assert main(["watch", str(run.directory), "--seconds", "0.1"]) == 0
    out, err = capsys.readouterr()
    last = err.splitlines()[-1]
    assert re.fullmatch(r"(\w+=\S+ ?)+", last)
    assert {"status=running", "cpu", "ready", "steady", "eta_seconds", "cause"} <= {
        part if part.startswith("status") else part.partition("=")[0] for part in last.split()
    }
    assert out.startswith("half: resnet20, running on another-machine\n")


def test_json_is_one_document_with_the_ledger_and_the_verdict(tmp_path: Path, capsys: Captured) -> None:
    run = measured(tmp_path, steps=400)
    assert main(["watch", str(run.directory), "--json", "--price", "2"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert document["signs"]["status"] == "finished"
    assert document["step"] == document["steps"] == 400
    assert sum(document["ledger"]["seconds"].values()) == pytest.approx(document["ledger"]["wall_seconds"], rel=0.01)
    assert document["cost"]["so_far"] == pytest.approx(2 * document["seconds"] / 3600)
    assert document["causes"][0]["sentence"]
    assert err == ""


def test_a_run_that_is_over_is_told_at_once_and_the_watch_ends(tmp_path: Path, capsys: Captured) -> None:
    failed = Failed(error="StorageError", message="the disk is full", step=20)
    run = write(tmp_path / "failed", [started(), logged(20), failed], ago=500)
    assert main(["watch", str(run.directory)]) == 0
    assert "failed: StorageError at step 20: the disk is full" in capsys.readouterr().out
    killed = write(tmp_path / "killed", [started(), logged(20)], ago=500)
    assert main(["watch", str(killed.directory)]) == 0
    assert "interrupted: killed" in capsys.readouterr().out


def test_a_standstill_and_silence_are_told_loudly(tmp_path: Path, capsys: Captured) -> None:
    hung = "thread decode-1\x1b[2J waits in read"
    stalled = Stalled(step=20, what="feed", seconds=61.0, expected_seconds=0.3, culprit=hung, stacks="stacks.txt")
    run = write(tmp_path / "stalled", [started(), logged(20), stalled], ago=90)
    assert main(["watch", str(run.directory), "--seconds", "0.1"]) == 0
    out, err = capsys.readouterr()
    for text in (out, err):
        assert "thread decode-1?[2J waits in read" in text, "a message cannot steer the terminal"
    assert "no events since" in out
    assert "it is running on another-machine" in out
    assert " left" not in out, "nobody knows when it ends"


def test_a_run_that_has_not_begun_is_waited_for_and_followed_to_its_end(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "later", recipe())
    with subprocess.Popen([*STEADY, str(run.directory)], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as child:
        assert child.stderr is not None
        assert child.stderr.readline().startswith(b"status=waiting")
        measured(tmp_path, "later", steps=100)
        out, err = child.communicate(timeout=60)
    assert child.returncode == 0
    assert b"evaluated step=100" in err
    assert out.startswith(b"later: resnet20, finished")


def test_of_a_folder_the_newest_run_that_goes_on_is_watched(tmp_path: Path, capsys: Captured) -> None:
    measured(tmp_path, "over", steps=100)
    begun = replace(started(), machine={"host": platform.node()})
    held = write(tmp_path / "held", [replace(begun, startup={}), logged(20)], ago=0)
    with held.lock():
        assert main(["watch", str(tmp_path), "--seconds", "0"]) == 0
        assert capsys.readouterr().out.startswith(f"held: resnet20, running, process {os.getpid()}")
        half(tmp_path / "half")
        assert main(["watch", str(tmp_path), "--seconds", "0"]) == 0
        assert "also running" in capsys.readouterr().err
    assert main(["watch", str(tmp_path / "over"), "--seconds", "0"]) == 0
    assert capsys.readouterr().out.startswith("over: resnet20, finished")


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["runs/nothing-there"], "does not exist"),
        ([".", ".."], "watch shows one run at a time"),
        (["--pid", "1", "runs/a"], "accept only --seconds and --json"),
        (["--web", "--", "true"], "accept only --seconds and --json"),
        (["--seconds", "-1", "."], "--seconds is -1"),
        (["--price", "-1", "."], "--price is -1"),
    ],
)
def test_what_cannot_be_watched_is_told_in_a_line(
    words: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Captured,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["watch", *words]) == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert err.count("\n") == 1


def test_a_command_after_two_dashes_is_started_and_watched(capfd: Captured) -> None:
    code = main(["watch", "--", sys.executable, "-c", "print('its own output'); raise SystemExit(3)"])
    assert code == 3
    assert "its own output" in capfd.readouterr().out


def test_ctrl_c_ends_the_page_without_a_word_of_python(tmp_path: Path) -> None:
    run = measured(tmp_path, steps=100)
    words = [*STEADY, str(run.directory), "--web", "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        address = child.stdout.readline().strip()
        with urllib.request.urlopen(address + "events", timeout=60) as stream:  # a browser that looks on
            assert stream.readline().startswith(b"event: ")
            child.send_signal(signal.SIGINT)
            _, err = child.communicate(timeout=60)
    assert child.returncode == 0
    assert "Traceback" not in err
    assert "this machine only" in err
