"""A run is sent to trackers while it trains, by processes of their own: whatever these do, the training goes on."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.reports.runs import Clock, course, started, write
from tests.reports.runs import recipe as usual

from steadytrain.cli import main
from steadytrain.errors import DivergedError
from steadytrain.run import Run
from steadytrain.training.loop import steps as loop
from steadytrain.training.loop import tracking as module
from steadytrain.training.loop.tracking import tracking
from steadytrain.tuning.sweep_trainers import resume_command

SERVICES = """
import json, os, time

class Kept:
    def __init__(self, run):
        self.id, self.path = run.id or "kept-1", run.folder.parent / "kept.jsonl"
        self.tell(begun=[run.id, run.step])
    def tell(self, **what):
        with self.path.open("a") as file:
            file.write(json.dumps(what) + "\\n")
    def scalars(self, values, step, seconds):
        self.tell(step=step)
    def text(self, name, text):
        print("what a service prints is seen by nobody")
        self.tell(text=name)
    def file(self, path):
        self.tell(file=path.name)
    def close(self, status):
        self.tell(status=status)

def hang(run):
    (run.folder.parent / "hanging").touch()
    time.sleep(600)

def leave(run):
    if os.fork() == 0:
        time.sleep(600)
    os._exit(0)

def fail(run):
    raise ConnectionError("no route to host")
"""
POINTS = """[steadytrain.trackers]
kept = our_services:Kept
hanging = our_services:hang
leaving = our_services:leave
failing = our_services:fail
"""


@pytest.fixture
def _services(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "packages"
    (folder / "our_services-1.dist-info").mkdir(parents=True)
    (folder / "our_services-1.dist-info" / "entry_points.txt").write_text(POINTS)
    (folder / "our_services-1.dist-info" / "METADATA").write_text("Name: our-services\nVersion: 1\n")
    (folder / "our_services.py").write_text(SERVICES)
    monkeypatch.syspath_prepend(folder)


def _told(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "kept.jsonl").read_text().splitlines()]


@pytest.mark.usefixtures("_services")
def test_a_service_that_fails_is_named_once_and_another_gets_everything(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "a", usual().with_({"every.track": "failing,kept"}))
    with tracking(run, is_first=True) as begin:
        begin()
        write(run, [started(), *course(0, 40, total=1055)], Clock(), end=True)
    told = _told(tmp_path)
    assert [line["step"] for line in told if "step" in line] == [20, 40]
    assert {"text": "recipe"} in told and {"file": "report.html"} in told and told[-1] == {"status": "finished"}
    said = capfd.readouterr()
    (line,) = [line for line in said.err.splitlines() if "no route to host" in line]
    assert "failing: no route to host" in line and f"steady report {run.directory} --to failing sends the rest" in line
    assert "seen by nobody" not in said.out + said.err


@pytest.mark.usefixtures("_services")
def test_a_service_that_hangs_is_given_up_when_the_training_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "END_SECONDS", 0.0)
    run = Run.create(tmp_path / "a", usual().with_({"every.track": "hanging"}))
    with tracking(run, is_first=True) as begin:
        begin()
        while not (tmp_path / "hanging").exists():
            time.sleep(0.02)
    assert "hanging had not taken everything when the wait was over" in capfd.readouterr().err


@pytest.mark.usefixtures("_services")
def test_what_a_service_leaves_behind_ends_with_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "END_SECONDS", 2.0)
    run = Run.create(tmp_path / "a", usual().with_({"every.track": "leaving"}))
    with tracking(run, is_first=True) as begin:
        begin()
        time.sleep(1)


@pytest.mark.usefixtures("_services")
def test_a_resumed_run_goes_on_with_the_curves_that_it_began(tmp_path: Path) -> None:
    run, clock = Run.create(tmp_path / "a", usual()), Clock()
    write(run, [started(), *course(0, 40, total=1055)], clock)
    assert main(["report", str(run.directory), "--to", "kept"]) == 0
    clock.now += 60
    write(run, [started(20), *course(20, 60, total=1055)], clock)
    assert main(["report", str(run.directory), "--to", "kept"]) == 0
    told = _told(tmp_path)
    assert [line["begun"] for line in told if "begun" in line] == [["", -1], ["kept-1", 40]]
    assert [line["step"] for line in told if "step" in line] == [20, 40, 40, 60]


def test_the_attempts_of_a_run_are_sent_by_one_process_that_is_waited_for_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    did = list[str]()
    follower = SimpleNamespace(name="kept", end=lambda: did.append("ended"), wait=lambda until: True, kill=lambda: None)

    def begin(run: Run, name: str) -> SimpleNamespace:
        did.append(f"begun {name}")
        return follower

    monkeypatch.setattr(module, "_Follower", begin)
    run = Run.create(tmp_path / "a", usual().with_({"every.track": "kept"}))

    def attempts(run: Run, *, on_locked: Callable[[], None], **_: object) -> Iterator[None]:
        did.append("attempt")
        on_locked()
        yield
        if did.count("attempt") < 3:
            raise DivergedError("the loss is nan")

    monkeypatch.setattr(loop, "attempts", attempts)
    monkeypatch.setattr(loop, "_remedied", lambda run, *_: run)
    list(loop.run_steps(run, explains=True))
    assert did == ["attempt", "begun kept", "attempt", "attempt", "ended"]


def test_only_the_first_rank_sends_and_never_because_a_file_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = list[str]()
    monkeypatch.setattr(module, "_Follower", lambda run, name: begun.append(name))
    run = Run.create(tmp_path / "a", usual().with_({"every.track": "tensorboard"}))
    with tracking(run, is_first=False) as begin:
        begin()
    with tracking(Run.open(run.directory), is_first=True) as begin:
        begin()
    assert begun == []
    assert "not sent to tensorboard: a file asks for it (every.track)" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train", "photos"], ["resume", "{run}"], ["sweep", "{recipe}", "photos"]])
def test_a_misspelt_service_is_refused_before_anything_is_read(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "a", usual()).directory
    named = [word.format(run=run, recipe=run / "recipe.json") for word in words]
    assert main([*named, "--track", "mlflwo"]) == 2
    assert "Did you mean mlflow?" in capsys.readouterr().err


def test_the_runs_of_a_sweep_are_sent_where_its_command_says(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", usual().with_({"every.track": "tensorboard"}))
    assert resume_command(run, ["every.track"], None)[2:] == ["--set", 'every.track="tensorboard"']
