"""Every ``--json`` document: its keys, the types of what was measured, and the values of all that was not."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from tests import forked
from tests.seams.frozen import Frozen, shape, types
from tests.seams.images import write_marks, write_photos
from tests.seams.product import steady, steady_process

import steadytrain as st

TRAIN = ["--model", "mlp", "--set", "model.options.hidden=8", "--epochs", 2, "--batch-size", 16, "--lr", 0.05]
TRAIN += ["--device", "cpu", "--threads", 1, "--precision", "fp32", "--set", "parallel.compute_threads=1"]
TRAIN += ["--set", "data.holdout=0.2", "--set", "every.save_steps=5", "--set", "every.log_steps=2"]

# What a clock, a machine or rounding decides, by the names of keys.
MEASURED = {
    "away_seconds",
    "began",
    "best",
    "causes",
    "ceiling",
    "cost",
    "feed",
    "host",
    "images_per_cpu_second",
    "images_per_second",
    "images_per_second_overall",
    "last",
    "loss",
    "machine",
    "moment",
    "not_measurable",
    "notice",
    "notices",
    "pack_seconds",
    "per_class",
    "probability",
    "right",
    "seconds",
    "seconds_per_epoch",
    "median_seconds_per_epoch",
    "shares",
    "steady_images_per_second",
    "top1",
    "top1_95",
    "top1_high",
    "top1_low",
    "top5",
    "train_loss",
    "train_top1",
    "val_loss",
    "val_top1",
    "val_top5",
    "wait_share",
    "wall_seconds",
}
# Which parts of it there are depends on the machine, or on the moment, as well.
OPEN = {
    "devices",
    "pressure",
    "process",
    "threads_seconds",
    "seconds_by_cause",
    "rhythm",
    "seen",
    "startup_waits",
    "packages",
    "variables",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, golden: Path) -> Path:
    """A folder with marks/, photos/, marks.rec, and ``run``, trained on it, with what that printed: train.json."""
    root = tmp_path_factory.mktemp("documents")
    write_marks(root / "marks", 80)
    write_photos(root / "photos", golden / "images")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        st.pack("marks", "marks")
        (root / "train.json").write_text(steady("train", "marks.rec", "--run", "run", *TRAIN, "--json").out)
    return root


@pytest.fixture(autouse=True)
def _inside(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setenv("COLUMNS", "100")


def document(*words: object, code: int | None = 0) -> Any:
    return steady(*words, "--json", code=code).document


def measured(value: Any, *more: str) -> Any:
    """The shape of a document in which these keys, and the usual ones, are measured."""
    return shape(value, loose=MEASURED | set(more), open_keys=OPEN)


def test_pack(frozen: Frozen) -> None:
    frozen("documents/pack", document("pack", "marks", "split", "--val-fraction", 0.25))


def test_check_of_records_and_of_a_folder(frozen: Frozen) -> None:
    frozen("documents/check", measured(document("check", "marks.rec")))
    frozen("documents/check folder", measured(document("check", "photos")))
    content = Path("marks.rec").read_bytes()
    Path("torn.rec").write_bytes(content[:-30])
    frozen("documents/check torn", measured(document("check", "torn.rec", code=1)))


def test_train_evaluate_and_predict(frozen: Frozen) -> None:
    frozen("documents/train", measured(json.loads(Path("train.json").read_text())))
    result = document("evaluate", "run", "--device", "cpu", "--threads", 1)
    scores = ("precision", "recall", "f1", "macro_precision", "macro_recall", "macro_f1", "ece", "confidence")
    frozen("documents/evaluate", measured(result, *scores, "calibration"))
    result = document("predict", "run", "marks/class0/0000.png", "gone.png", "--device", "cpu", code=1)
    frozen("documents/predict", measured(result, "classes"))


def test_the_fields_of_events(frozen: Frozen) -> None:
    """Whatever the kinds are called; MachineStats and the like come when their time has come, and at the end."""
    lines = [json.loads(line) for line in Path("run/events.jsonl").read_text().splitlines()]
    fields = {line["kind"]: sorted(line.keys()) for line in lines}
    frozen("documents/events", sorted(fields.values()))
    (started,) = [line for line in lines if "steps_per_epoch" in line]
    del started["kind"]
    frozen("documents/events started", measured(started, "time", "startup", "startup_disk_bytes"))


def test_report_diagnose_and_watch(frozen: Frozen) -> None:
    frozen("documents/report", measured(document("report", "run")))
    frozen("documents/diagnose", measured(document("diagnose", "run")))
    result = document("watch", "run", "--price", 3.6, "--seconds", 0)
    frozen("documents/watch", measured(result))


def test_watch_of_a_foreign_command(frozen: Frozen) -> None:
    script = "import time; end = time.time() + 1.5\nwhile time.time() < end: sum(range(1000))"
    document = steady_process("watch", "--json", "--", sys.executable, "-c", script).document
    frozen("documents/watch --", types(document, OPEN | {"causes", "not_measurable"}))


def test_models(frozen: Frozen) -> None:
    frozen("documents/models", document("models", "digits"))
    frozen("documents/models --weights", document("models", "resnet18.tv_in1k", "--weights"))


def test_feed(frozen: Frozen) -> None:
    result = document("feed", "photos", "--size", 24, "--batch-size", 8, "--threads", 1, "--seconds", 0.3)
    frozen("documents/feed", types(result))


def test_bench(frozen: Frozen) -> None:
    words = ["--model", "mlp", "--size", 8, "--channels", 1, "--classes", 5, "--device", "cpu", "--threads", 1]
    result = document("bench", "train", *words, "--seconds", 0.05, "--batch-size", 8)
    frozen("documents/bench", types(result))
    (row,) = result["rows"]
    frozen("documents/bench row", [row[key] for key in ("model", "batch_size", "precision", "layout", "compile")])


def test_bandwidth(frozen: Frozen, tmp_path: Path) -> None:
    """Two real ranks, of which the first prints the document."""
    words = ["bandwidth", "--model", "resnet20", "--procs", "2", "--seconds", "0.1", "--backend", "gloo", "--json"]
    child = forked.start(forked.steady, words, output=tmp_path / "out", errors=tmp_path / "err")
    child.join(120)
    assert child.exitcode == 0, (tmp_path / "err").read_text()
    document = json.loads((tmp_path / "out").read_text())
    frozen("documents/bandwidth", types(document))
    assert (document["model"], document["procs"], len(document["hosts"])) == ("resnet20", 2, 1)
    (gloo,) = document["backends"]
    assert gloo["backend"] == "gloo" and gloo["latency_seconds"] > 0
    ways = {way["way"]: way for way in gloo["ways"]}
    assert list(ways) == ["tensors", "buckets", "fp16", "bf16"]
    assert ways["tensors"]["exchanges"] == document["tensors"] > ways["buckets"]["exchanges"]
    for way in ways.values():
        assert way["bytes"] == 4 * document["parameters"] and way["rounds"] >= 3
        # MXNet's figure: 2 (n - 1) / n of the bytes; for two ranks that is the bytes themselves
        assert way["gigabytes_per_second"] == pytest.approx(way["bytes"] / way["seconds"] / 1e9)
        assert way["bytes_per_second"] == pytest.approx(2 * way["bytes"] / way["seconds"])
    assert "done=4 total=4" in (tmp_path / "err").read_text()


def test_doctor_and_its_comparison(frozen: Frozen, tmp_path: Path) -> None:
    result = document("doctor", code=None)
    frozen("documents/doctor", types(result, OPEN))
    frozen("documents/doctor package", types(result["packages"]["torch"]))
    Path("other.json").write_text(json.dumps(result))
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart is missing')\n")
    folders = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    compared = steady_process("doctor", "--against", "other.json", "--json", code=1, PYTHONPATH=folders).document
    frozen("documents/doctor --against", types(compared, OPEN))
    assert compared["findings"]["only_new"][0]["rule"] == "torch-broken"
