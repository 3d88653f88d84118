"""Runs sent to tracking services: each value once, also after a kill; a service that fails stops no other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.reports.runs import Clock, course, finished, logged, recipe, started, write

from steadytrain.cli import main
from steadytrain.errors import FailedError, InputError
from steadytrain.events import Logged
from steadytrain.reports import trackers
from steadytrain.reports.trackers import TrackedRun, find_trackers, send
from steadytrain.run import Run


class Kept:
    """A service that keeps what it is sent, in memory."""

    all: list[Kept]

    def __init__(self, run: TrackedRun) -> None:
        self.run, self.id = run, run.id or "kept-1"
        self.values: dict[str, list[tuple[int, float]]] = {}
        self.texts: dict[str, str] = {}
        self.files: list[str] = []
        self.status = ""
        self.all.append(self)

    def scalars(self, values: Mapping[str, float], step: int, seconds: float) -> None:
        for name, value in values.items():
            self.values.setdefault(name, []).append((step, value))

    def text(self, name: str, text: str) -> None:
        self.texts[name] = text

    def file(self, path: Path) -> None:
        self.files.append(path.name)

    def close(self, status: str) -> None:
        self.status = status


def _broken(run: TrackedRun) -> Kept:
    raise ConnectionError("no route to host")


@pytest.fixture(autouse=True)
def _services(monkeypatch: pytest.MonkeyPatch) -> None:
    Kept.all = []
    monkeypatch.setitem(trackers.TRACKERS, "kept", ("json", Kept))
    monkeypatch.setitem(trackers.TRACKERS, "broken", ("json", _broken))


def test_a_finished_run_is_sent_with_its_curves_recipe_verdict_and_report(tmp_path: Path) -> None:
    run = finished(tmp_path, "a")
    assert main(["report", str(run.directory), "--to", "kept"]) == 0
    (kept,) = Kept.all
    logged = [event for event in run.events() if isinstance(event, Logged)]
    assert kept.values["train/loss"] == [(event.step, event.loss) for event in logged]
    assert kept.values["lr"] == [(event.step, event.lr) for event in logged]
    assert kept.run.recipe["optim.lr"] == run.recipe.optim.lr and '"optim"' in kept.texts["recipe"]
    assert "verdict" in kept.texts and kept.files[0] == "report.html" and kept.status == "finished"


def test_what_was_sent_is_not_sent_again_and_the_rest_goes_on_under_the_same_id(tmp_path: Path) -> None:
    run, clock = Run.create(tmp_path / "a", recipe()), Clock()
    write(run, [started(), *course(0, 800, total=1055)], clock)
    send(run, "kept")
    last = max(step for step, _ in Kept.all[0].values["train/loss"])
    clock.now += 60
    write(run, [started(last), logged(last + 20, loss=0.25)], clock)
    send(Run.open(run.directory), "kept")
    assert Kept.all[1].values["train/loss"] == [(last + 20, 0.25)]
    assert (Kept.all[1].run.id, Kept.all[1].run.step) == ("kept-1", last)


def test_a_service_that_fails_is_named_and_the_others_are_served(tmp_path: Path) -> None:
    run = finished(tmp_path, "a")
    with pytest.raises(FailedError, match="broken: no route to host"):
        send(run, "broken,kept")
    assert Kept.all[0].status == "finished"


def test_an_unknown_or_missing_service_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"unknown tracker 'tensorbord': .* Did you mean tensorboard"):
        find_trackers("tensorbord")
    trackers.TRACKERS["missing"] = ("no_such_package", Kept)
    try:
        with pytest.raises(InputError, match="pip install no_such_package"):
            send(finished(tmp_path, "a"), "kept,missing")
        assert not Kept.all
    finally:
        del trackers.TRACKERS["missing"]


def test_tensorboard_reads_what_was_sent(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = finished(tmp_path, "a")
    send(run, "tensorboard")
    read = reader.EventAccumulator(str(run.directory / "tensorboard"))
    read.Reload()
    logged = [event for event in run.events() if isinstance(event, Logged)]
    values = [(point.step, point.value) for point in read.Scalars("train/loss")]
    assert values == [(event.step, pytest.approx(event.loss)) for event in logged]
    assert {"recipe", "verdict"} <= {*read.Tags()["tensors"]}


@pytest.mark.peer
def test_mlflow_reads_what_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    run = finished(tmp_path, "a")
    send(run, "mlflow")
    (found,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    history = mlflow.MlflowClient().get_metric_history(found.info.run_id, "train/loss")
    logged = [event for event in run.events() if isinstance(event, Logged)]
    assert [(point.step, point.value) for point in history] == [(event.step, event.loss) for event in logged]
    assert found.info.status == "FINISHED" and found.data.params["model.name"] == "resnet20"
