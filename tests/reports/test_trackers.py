"""Runs sent to tracking services: each value once, also after a kill; a service that fails stops no other."""

from __future__ import annotations

import json
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.reports.runs import Clock, course, finished, logged, recipe, started, write

from steadytrain.cli import main
from steadytrain.errors import FailedError, InputError
from steadytrain.events import Evaluated, Failed, Logged
from steadytrain.files import lock
from steadytrain.machine.children import run_program, run_steady
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


@pytest.mark.parametrize(
    "text", ['{"id": "x", "time": "soon", "step": 1}', '{"id": "x"}', "[1]", '{"a":' * 100_000], ids=len
)
def test_a_damaged_record_of_what_was_sent_counts_for_none(tmp_path: Path, text: str) -> None:
    run = finished(tmp_path, "a", epochs=1)
    (run.directory / "tracked-kept.json").write_text(text)
    send(run, "kept")
    assert (Kept.all[0].run.id, Kept.all[0].run.step, Kept.all[0].status) == ("", -1, "finished")


def test_a_service_that_fails_is_named_and_the_others_are_served(tmp_path: Path) -> None:
    run = finished(tmp_path, "a")
    with pytest.raises(FailedError, match="broken: no route to host"):
        send(run, "broken,kept")
    assert Kept.all[0].status == "finished"


def test_a_run_is_followed_over_the_pause_between_two_attempts_of_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "LOOK_SECONDS", 0.01)
    run, clock, ended = Run.create(tmp_path / "a", recipe()), Clock(), threading.Event()
    failed = Failed(error="DivergedError", message="the loss is nan", step=40)
    write(run, [started(), *course(0, 40, total=1055), failed], clock)
    sending = threading.Thread(target=send, args=(run, "kept"), kwargs={"follow": True, "ended": ended})
    sending.start()
    sending.join(0.3)  # the process that trains it looks for what was not finite
    clock.now += 60
    write(run, [started(20), *course(20, 60, total=1055)], clock, end=True)
    ended.set()
    sending.join(60)
    (kept,) = Kept.all
    assert [step for step, _ in kept.values["train/loss"]] == [20, 40, 40, 60] and kept.status == "finished"


def test_what_was_taken_before_a_service_failed_is_not_sent_again(tmp_path: Path) -> None:
    class Failing(Kept):
        def scalars(self, values: Mapping[str, float], step: int, seconds: float) -> None:
            if step > 400:
                raise ConnectionError("no route to host")
            super().scalars(values, step, seconds)

    run = finished(tmp_path, "a")
    trackers.TRACKERS["kept"] = ("json", Failing)
    with pytest.raises(FailedError, match="--to kept sends the rest"):
        send(run, "kept")
    trackers.TRACKERS["kept"] = ("json", Kept)
    send(run, "kept")
    steps = [step for kept in Kept.all for step, _ in kept.values["train/loss"]]
    assert steps == [event.step for event in run.events() if isinstance(event, Logged)]


def test_a_service_whose_package_is_broken_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("odd", "steadytrain.nowhere:Thing", trackers.GROUP)
    monkeypatch.setattr(trackers, "entry_points", lambda group: [point])
    with pytest.raises(
        InputError, match=r"steadytrain.nowhere:Thing cannot be loaded \(.*\): mend or remove its package"
    ):
        find_trackers("odd")["odd"]()


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


def test_a_link_is_neither_sent_nor_written_through(tmp_path: Path) -> None:
    run, secret = finished(tmp_path, "a", epochs=1), tmp_path / "secret"
    secret.write_text("mine")
    (run.directory / "best.safetensors").symlink_to(secret)
    (run.directory / "report.html").symlink_to(secret)
    send(run, "kept")
    assert Kept.all[0].files == [] and secret.read_text() == "mine"
    (run.directory / "tracked-broken.json").symlink_to(secret)
    with pytest.raises(FailedError, match=r"tracked-broken\.json is a link"):
        send(run, "broken")
    (run.directory / "kept").symlink_to(tmp_path)
    remedy = r"remove the link, make one elsewhere that leads here \(ln -s .*a/kept OTHER\)"
    with pytest.raises(FailedError, match=rf"a/kept is a link .*; {remedy}"):
        send(run, "kept")


def test_two_processes_do_not_send_a_run_to_the_same_service(tmp_path: Path) -> None:
    run = finished(tmp_path, "a", epochs=1)
    with (run.directory / "tracked-kept.json").open("wb") as file:
        lock(file)
        with pytest.raises(FailedError, match="another process is sending it there now"):
            send(run, "kept")
    assert not Kept.all


# Round trips with the services' own packages --------------------------------------------------------------------------


def _send(run: Run, service: str) -> None:
    """Send a run by the command, in a process of its own: these packages leave threads behind."""
    sent = run_steady(["report", str(run.directory), "--to", service])
    assert sent.code == 0, sent.errors


def _read(code: str, *words: str) -> Any:
    """What a program prints as JSON in its last line."""
    read = run_program([sys.executable, "-c", code, *words])
    assert read.code == 0, read.errors
    return json.loads(read.output.splitlines()[-1])


def _resumed(folder: Path, name: str, service: str, send: Callable[[Run, str], None] = _send) -> Run:
    """A run that was sent while it trained, was stopped, and went on to its end; it has best weights."""
    run, clock = Run.create(folder / name, recipe(epochs=1)), Clock()
    (run.directory / "best.safetensors").write_bytes(b"weights")
    write(run, [started(steps=352), *course(0, 200, total=352)], clock)
    send(run, service)
    clock.now += 60
    write(run, [started(200, steps=352), *course(200, 352, total=352)], clock, end=True)
    send(Run.open(run.directory), service)
    return run


def _curve(run: Run) -> list[list[float]]:
    return [[event.step, event.loss] for event in run.events() if isinstance(event, Logged)]


def _score(run: Run) -> list[list[float]]:
    return [[event.step, event.top1] for event in run.events() if isinstance(event, Evaluated)]


def test_tensorboard_reads_both_parts_of_a_resumed_run(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = _resumed(tmp_path, "a", "tensorboard", send)
    read = reader.EventAccumulator(str(run.directory / "tensorboard"))
    read.Reload()
    for name, expected in (("train/loss", _curve(run)), ("val/top1", _score(run))):
        assert [[point.step, pytest.approx(point.value)] for point in read.Scalars(name)] == expected
    assert {"recipe", "verdict"} <= {*read.Tags()["tensors"]}


MLFLOW = """
import json, mlflow, sys
(run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
client, id = mlflow.MlflowClient(), run.info.run_id
curves = [[[p.step, p.value] for p in client.get_metric_history(id, name)] for name in ("train/loss", "val/top1")]
files = [entry.path for entry in client.list_artifacts(id)]
weights = open(client.download_artifacts(id, "best.safetensors"), "rb").read().decode()
print(json.dumps([run.info.status, run.info.run_name, run.data.params, curves, files, weights]))
"""


@pytest.mark.peer
def test_mlflow_reads_one_run_with_curves_recipe_verdict_report_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("mlflow", "sqlalchemy"):
        _require(package)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    run = _resumed(tmp_path, "a", "mlflow")
    status, name, settings, (curve, score), files, weights = _read(MLFLOW)
    assert (status, name, sorted(curve), score) == ("FINISHED", "a", _curve(run), _score(run))
    assert (settings["model.name"], settings["optim.lr"]) == ("resnet20", "0.1")
    assert {*files} == {"best.safetensors", "recipe.txt", "report.html", "verdict.txt"} and weights == "weights"


def _require(package: str) -> None:
    if find_spec(package) is None:
        pytest.skip(f"needs the package {package}")


def _records(path: Path) -> Iterator[bytes]:
    """Yield the records of an offline run of Weights & Biases: LevelDB's log format, behind seven bytes.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    data, at, record = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield record
            record = b""


@pytest.mark.peer
def test_weights_and_biases_wrote_offline_what_was_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proto = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    monkeypatch.setenv("WANDB_MODE", "offline")
    run = _resumed(tmp_path, "a", "wandb")
    rows, config, summary, ids = list[dict[str, Any]](), dict[str, Any](), set[str](), set[str]()
    folders = sorted((run.directory / "wandb").glob("offline-run-*"))
    for path in [path for folder in folders for path in folder.glob("*.wandb")]:
        for data in _records(path):
            record = proto.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = record.history.item
                rows.append({"".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items})
            elif kind == "run":
                ids.add(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "summary":
                summary |= {item.key for item in record.summary.update}
    assert [[row["update"], row["train/loss"]] for row in rows if "train/loss" in row] == _curve(run)
    assert [[row["update"], row["val/top1"]] for row in rows if "val/top1" in row] == _score(run)
    assert len(ids) == 1 and config["optim.lr"] == 0.1 and {"recipe", "verdict"} <= summary
    kept = {path.name for folder in folders for path in (folder / "files").iterdir()}
    assert {"best.safetensors", "report.html"} <= kept


TRACKIO = """
import json, sys
from trackio.sqlite_storage import SQLiteStorage as storage
project, (name,) = sys.argv[1], storage.get_runs(sys.argv[1])
files = [file["name"] for file in storage.list_artifacts(project)]
print(json.dumps([name, storage.get_logs(project, name), storage.get_run_config(project, name), files]))
"""


@pytest.mark.peer
def test_trackio_reads_one_run_with_curves_recipe_verdict_and_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _require("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    run = _resumed(tmp_path, "a", "trackio")
    name, rows, settings, files = _read(TRACKIO, tmp_path.name)
    assert name == "a" and settings["optim.lr"] == 0.1 and {*files} == {"a-best", "a-report"}
    assert [[row["step"], row["train/loss"]] for row in rows if "train/loss" in row] == _curve(run)
    assert [[row["step"], row["val/top1"]] for row in rows if "val/top1" in row] == _score(run)
    assert {"recipe", "verdict"} <= {name for row in rows for name in row}
