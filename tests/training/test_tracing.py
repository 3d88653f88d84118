"""``--profile N``: a trace of N updates in the steady state, which changes nothing of the run."""

from __future__ import annotations

import gzip
import json
import re
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steadytrain.config import Every, Parallel, Recipe
from steadytrain.events import Logged, Noticed
from steadytrain.reports.page import page
from steadytrain.reports.summary import Account
from steadytrain.run import Run
from steadytrain.training import train
from steadytrain.training.loop import updates
from steadytrain.training.loop.updates import _trace_updates


def trained(recipe: Recipe, folder: Path, **changes: object) -> Run:
    return train(Run.create(folder, recipe.with_({f"every.{key}": value for key, value in changes.items()}))).run


def updates_in(trace: Path) -> int:
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    return sum(event.get("name", "").startswith("Optimizer.step") and event.get("ph") == "X" for event in events)


def test_a_trace_of_some_updates_leaves_the_run_as_it_was(recipe: Recipe, tmp_path: Path) -> None:
    plain, traced = trained(recipe, tmp_path / "plain"), trained(recipe, tmp_path / "traced", profile=4)
    [trace] = (tmp_path / "traced" / "profile").iterdir()
    assert trace.name == "rank-0.json.gz" and updates_in(trace) == 4
    assert not (tmp_path / "plain" / "profile").exists()
    assert (plain.directory / "model.safetensors").read_bytes() == (traced.directory / "model.safetensors").read_bytes()
    losses = [[event.loss for event in run.events() if isinstance(event, Logged)] for run in (plain, traced)]
    assert losses[0] == losses[1] and plain.recipe.digest == traced.recipe.digest
    [notice] = [e for e in traced.events() if isinstance(e, Noticed) and "traced" in e.message]
    words = r"4 updates are traced in \S+profile: [\d.]+ ms each, [\d.]+ ms before, and [\d.]+ s to write"
    assert re.fullmatch(words, notice.message) and notice.step > 10, "after the warm-up"
    assert "rank-0.json.gz" in page([Account.of(traced)])


def test_a_run_that_ends_before_is_traced_to_its_end(recipe: Recipe, tmp_path: Path) -> None:
    trained(recipe.with_({"budget.epochs": None, "budget.steps": 6}), tmp_path / "run", profile=50)
    assert updates_in(tmp_path / "run" / "profile" / "rank-0.json.gz") == 5


def _session(folder: Path, *, is_first: bool, device: str = "cpu", **every: Any) -> Any:
    engine = SimpleNamespace(device=torch.device(device), world=SimpleNamespace(rank=0 if is_first else 1))
    notices: list[str] = []
    return SimpleNamespace(
        recipe=SimpleNamespace(every=Every(profile=2, **every), parallel=Parallel()),
        timeline=SimpleNamespace(steps=100),
        state=SimpleNamespace(cursor=SimpleNamespace(step=0), engine=engine),
        run=SimpleNamespace(directory=folder),
        clock=SimpleNamespace(within=lambda bucket: nullcontext()),
        laps=SimpleNamespace(restart=lambda: None),
        is_first=is_first,
        notice=notices.append,
        notices=notices,
    )


@pytest.mark.parametrize(
    ("ranks", "names"), [("first", ["rank-0.json.gz"]), ("all", ["rank-0.json.gz", "rank-1.json.gz"])]
)
def test_other_ranks_are_traced_where_that_is_asked_for(tmp_path: Path, ranks: str, names: list[str]) -> None:
    traces = [_trace_updates(_session(tmp_path, is_first=first, profile_ranks=ranks)) for first in (True, False)]
    for trace in traces:
        next(trace)
    for trace in traces:  # each in a process of its own, at about the same time
        for _ in range(updates.TRACED_AFTER + 2):
            trace.send(0.01)
        trace.send(None)
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == names


def test_a_trace_is_taken_once_a_run(tmp_path: Path) -> None:
    (tmp_path / "profile").mkdir()
    for notices in (["2 updates are traced in"], ["rank-0.json.gz is there already, so no updates are traced: remove"]):
        trace = _trace_updates(session := _session(tmp_path, is_first=True))
        next(trace)
        for _ in range(50):
            trace.send(0.01)
        assert len(session.notices) == 1 and notices[0] in session.notices[0]
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank-0.json.gz"]


def test_an_error_in_a_traced_update_ends_the_trace(tmp_path: Path) -> None:
    trace = _trace_updates(_session(tmp_path, is_first=True))
    next(trace)
    for _ in range(updates.TRACED_AFTER):
        trace.send(0.01)
    trace.close()
    with torch.profiler.profile():  # would be refused
        torch.ones(2).sum()
    assert not (tmp_path / "profile").exists()


def test_on_a_gpu_its_memory_is_recorded_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a pretended one."""
    calls: list[Any] = []
    memory: Any = torch.cuda.memory
    monkeypatch.setattr(memory, "_record_memory_history", lambda *args, **named: calls.append(named))

    def dump(path: str) -> None:
        calls.append("dump")
        Path(path).touch()

    monkeypatch.setattr(memory, "_dump_snapshot", dump)
    session = _session(tmp_path, is_first=True, device="cuda:0")
    trace = _trace_updates(session)
    next(trace)
    for _ in range(updates.TRACED_AFTER + 2):
        trace.send(0.01)
    assert calls == [{"max_entries": 100_000}, "dump", {"enabled": None}]
    assert (tmp_path / "profile" / "rank-0-memory.pickle").exists() and len(session.notices) == 1
