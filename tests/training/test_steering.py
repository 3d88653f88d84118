"""A program's decisions by events are the run's own: resumed without the program, it gives the same weights."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import forked

import steadytrain as st
from steadytrain.cli import main
from steadytrain.events import Evaluated, Event, Logged, Steered, Step

SETTINGS: dict[str, Any] = {"model": "resnet20", "epochs": 4, "device": "cpu", "batch_size": 8, "precision": "fp32"}
KILLED = """
import os, signal
import steadytrain as st
from steadytrain.events import Saved, Step

def decide(event):
    if isinstance(event, Step) and event.step == 7:
        return st.SetRate(0.25, "as planned")
    if isinstance(event, Step) and event.step == 11:
        os.kill(os.getpid(), signal.SIGKILL)

st.train("runs/killed", on_event=decide)
"""


@pytest.fixture(autouse=True)
def _photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))


def recipe() -> st.Recipe:
    random = np.random.default_rng(0)
    images = random.integers(0, 255, (40, 16, 16, 3), dtype=np.uint8)
    return st.default_recipe((images, [0, 1] * 20), {"every.save_steps": 5}, **SETTINGS)


def weights(run: st.Run) -> str:
    return hashlib.sha256(run.weights.read_bytes()).hexdigest()


def decisions(run: st.Run) -> list[Steered]:
    return [event for event in run.events() if isinstance(event, Steered)]


def test_a_rate_that_a_killed_program_set_is_that_of_the_resumed_run() -> None:
    once = st.Run.create("runs/once", recipe())
    st.train(once, on_event=lambda event: st.SetRate(0.25) if isinstance(event, Step) and event.step == 7 else None)
    killed = st.Run.create("runs/killed", recipe())
    process = subprocess.run([sys.executable, "-c", KILLED], env=os.environ, capture_output=True, check=False)
    assert process.returncode == -signal.SIGKILL
    assert main(["resume", "runs/killed"]) == 0
    plain = st.train(st.Run.create("runs/plain", recipe())).run
    assert weights(once) == weights(killed) != weights(plain)
    (steered,) = decisions(killed)
    assert (steered.step, steered.what, steered.times, steered.why) == (8, "rate", 0.25, "as planned")
    rates = {event.step: event.lr for event in killed.events() if isinstance(event, Step)}
    usual = {event.step: event.lr for event in plain.events() if isinstance(event, Step)}
    assert {step: rates[step] / usual[step] for step in rates} == {s: 0.25 if s > 7 else 1.0 for s in usual}


def ended_by(kind: str, step: int = 6) -> Callable[[Event], st.Stop | st.SetRate | None]:
    """Half of the rate from update 4 on, and an end at the first event of a kind of this update or a later one."""

    def decide(event: Event) -> st.Stop | st.SetRate | None:
        if isinstance(event, Step) and event.step == 3:
            return st.SetRate(0.5)
        return st.Stop("enough") if event.kind == kind and getattr(event, "step", 0) >= step else None

    return decide


def train_and_be_killed(folder: str, kind: str) -> None:
    """Train with a program that is killed at the event after its last decision."""
    decide, answers = ended_by(kind), list[object]()

    def on_event(event: Event) -> st.Stop | st.SetRate | None:
        if any(isinstance(answer, st.Stop) for answer in answers):
            os.kill(os.getpid(), signal.SIGKILL)
        answers.append(answer := decide(event))
        return answer

    st.train(folder, on_event=on_event)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("Step", {"data.transforms": ["mixup:0.2"]}),
        ("Logged", {"every.log_steps": 6, "optim.schedule": "one-cycle", "optim.warmup_epochs": 0}),
        ("Evaluated", {"optim.ema": 0.9}),
        ("Saved", {"every.best": "loss"}),
    ],
)
def test_a_run_that_a_killed_program_ended_ends_there_without_it(
    tmp_path: Path, kind: str, changes: dict[str, object]
) -> None:
    chosen = recipe().with_(changes)
    once, killed = (st.Run.create(tmp_path / name, chosen) for name in ("once", "killed"))
    variables = {"STEADYTRAIN_CACHE": os.environ["STEADYTRAIN_CACHE"]}
    process = forked.start(train_and_be_killed, str(killed.directory), kind, variables=variables)
    process.join(120)
    assert process.exitcode == -signal.SIGKILL and killed.finished() is None
    last = decisions(killed)[-1].step - 1  # of a checkpoint, that depends on the disk
    ended = st.train(once, on_event=ended_by("Step", last))
    resumed = st.train(killed.directory)
    assert (resumed.status, resumed.step) == (ended.status, ended.step) and 6 <= ended.step < 16
    assert resumed.evaluated is not None and resumed.evaluated.step == resumed.step
    assert weights(once) == weights(killed)
    best = [(run.directory / "best.safetensors").read_bytes() for run in (once, killed)]
    assert best[0] == best[1]
    told = [[(event.step, event.times) for event in decisions(run)] for run in (once, killed)]
    assert told[0] == told[1] == [(4, 0.5), (ended.step + 1, 0.0)]


def test_the_outcome_of_a_steered_run_has_the_network_that_the_code_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = "nn.Sequential(nn.Flatten(), nn.Linear(768, num_classes))"
    Path("own_net.py").write_text(f"from torch import nn\n\n\ndef make(num_classes):\n    return {made}\n")
    monkeypatch.syspath_prepend(tmp_path)
    images = np.random.default_rng(0).integers(0, 255, (40, 16, 16, 3), dtype=np.uint8)
    chosen = {**SETTINGS, "model": "own_net:make", "epochs": 1}
    result = st.train((images, [0, 1] * 20), run="runs/a", on_event=lambda event: st.SetRate(0.5), **chosen)
    assert result.run.recipe.every.rates == ((1, 0.5),)
    assert st.restore(result.run).name == "own_net:make"


@pytest.mark.parametrize(("kind", "last"), [(Step, 4), (Logged, 5), (Evaluated, 4)])
def test_a_run_stops_where_it_is_told_evaluated_and_whole(kind: type[Event], last: int) -> None:
    def decide(event: Event) -> st.Stop | None:
        return st.Stop("good enough") if isinstance(event, kind) and event.step >= 4 else None  # type: ignore[attr-defined]

    result = st.train(st.Run.create("runs/a", recipe().with_({"every.log_steps": 5})), on_event=decide)
    assert (result.status, result.run.weights.exists()) == ("finished", True)
    assert result.step == last
    assert result.evaluated is not None and result.evaluated.step == result.step
    assert [event.why for event in decisions(result.run)] == ["good enough"]
    again = st.train("runs/a")
    assert again.step == result.step


def test_a_stop_is_heard_after_a_rate_of_the_same_update() -> None:
    def decide(event: Event) -> st.Stop | st.SetRate | None:
        if isinstance(event, Step) and event.step == 4:
            return st.SetRate(np.float32(0.5))  # type: ignore[arg-type]
        return st.Stop(5) if isinstance(event, Logged) and event.step == 4 else None  # type: ignore[arg-type]

    result = st.train(st.Run.create("runs/a", recipe().with_({"every.log_steps": 4})), on_event=decide)
    assert (result.status, result.step) == ("finished", 4)
    assert [(event.what, event.step, event.why) for event in decisions(result.run)] == [
        ("rate", 5, ""),
        ("stop", 5, "5"),
    ]
    assert st.train("runs/a").step == 4


def test_of_two_rates_for_one_update_the_later_one_counts() -> None:
    def decide(event: Event) -> st.SetRate | None:
        if isinstance(event, Step) and event.step == 4:
            return st.SetRate(0.5)
        return st.SetRate(0.25) if isinstance(event, Evaluated) and event.step == 4 else None

    run = st.train(st.Run.create("runs/a", recipe()), on_event=decide).run
    assert run.recipe.every.rates == ((5, 0.5), (5, 0.25))
    assert [(event.step, event.times) for event in decisions(run)] == [(5, 0.5), (5, 0.25)]
    rates = {event.step: event.lr for event in run.events() if isinstance(event, Step)}
    assert 0.2 < rates[5] / rates[4] <= 0.25


def test_a_rate_that_is_set_already_is_no_decision() -> None:
    result = st.train(st.Run.create("runs/a", recipe()), on_event=lambda event: st.SetRate(0.5))
    assert len(decisions(result.run)) == 1


def test_what_the_run_has_decided_is_not_decided_again() -> None:
    run = st.Run.create("runs/a", recipe().with_({"every.rates": ((9, 0.5),)}))
    st.train(run, on_event=lambda event: st.SetRate(0.1) if isinstance(event, Step) and event.step == 3 else None)
    assert st.Run.open("runs/a").recipe.every.rates == ((9, 0.5),)


@pytest.mark.parametrize("answer", ["stop", 0.5, True, st.SetRate(0.0), st.SetRate(float("nan"))])
def test_what_is_no_decision_is_refused(answer: Any) -> None:
    with pytest.raises(st.SteadyError, match=r"on_event returned an? .*; it must be st.Stop|times=.* above 0"):
        st.train(st.Run.create("runs/a", recipe()), on_event=lambda event: answer)
