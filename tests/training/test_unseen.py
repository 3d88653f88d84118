"""Test images are evaluated once, at the end of a run, by its best weights; nothing is chosen by them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.data.packing.pictures import write_folder

import steadytrain as st
from steadytrain import events
from steadytrain.cli import main
from steadytrain.config import Data, Recipe
from steadytrain.data.sources.select import split_by_fraction
from steadytrain.errors import DataError
from steadytrain.events import Ended, Evaluated, Noticed, Saved, Started
from steadytrain.run import Run
from steadytrain.training import steps
from steadytrain.training.data import open_data

CLASSES = {"cat": 10, "dog": 10}
FAST = {"model.name": "mlp", "model.options": {"hidden": 4}, "batch_size": 8, "budget.epochs": 3, "data.holdout": 0.2}
FAST |= {"parallel.device": "cpu", "parallel.compute_threads": 1, "precision.name": "fp32", "optim.lr": 0.05}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """``train`` and ``test`` of two classes."""
    return write_folder(tmp_path / "photos", {f"{split}/{name}": 10 for split in ("train", "test") for name in CLASSES})


def _recipe(data: Path, **changes: Any) -> Recipe:
    return st.default_recipe(data, {**FAST, **changes})


def _tested(run: Path) -> list[events.Tested]:
    return [event for event in events.read(run / "events.jsonl") if isinstance(event, events.Tested)]


def _until(run: Run, kind: type[events.Event], is_it: Callable[[Any], bool] = lambda event: True) -> None:
    """Train until an event, and leave the run there, as a kill does."""
    training = steps(run)
    assert any(isinstance(event, kind) and is_it(event) for event in training)
    training.close()  # type: ignore[attr-defined]


def test_a_part_of_the_training_images_validates_and_the_test_images_are_evaluated_once(photos: Path) -> None:
    run = Run.create(photos.parent / "run", _recipe(photos))
    outcome = st.train(run)
    log = list(run.events())
    [started] = [event for event in log if isinstance(event, Started)]
    assert {name: started.data[name] for name in ("num_train", "num_val", "num_test", "held_out")} == {
        "num_train": 16,
        "num_val": 4,
        "num_test": 20,
        "held_out": True,
    }
    assert {event.n for event in log if isinstance(event, Evaluated)} == {4}
    [tested] = [event for event in log if isinstance(event, events.Tested)]
    assert isinstance(log[-1], Ended) and log.index(tested) > max(n for n, e in enumerate(log) if isinstance(e, Saved))
    best = run.progress().best
    assert best is not None and (tested.step, tested.n, tested.before) == (best.step, 20, 0)
    same = st.evaluate(run, photos / "test", say=lambda line: None)  # by best.safetensors
    assert (same.top1, same.n) == (tested.top1, 20) and same.loss == pytest.approx(tested.loss, rel=1e-6)
    assert outcome.tested == tested and tested.macro_recall == same.macro.recall


def test_without_validation_the_last_weights_are_tested(photos: Path) -> None:
    run = Run.create(photos.parent / "run", _recipe(photos, **{"data.holdout": 0}))
    outcome = st.train(run)
    assert outcome.tested is not None and outcome.tested.step == outcome.step
    assert st.evaluate(run, photos / "test", say=lambda line: None).top1 == outcome.tested.top1


def test_a_probe_is_tested(photos: Path) -> None:
    head = {"model.train": "probe", "budget.epochs": 0, "model.name": "resnet20", "model.options": {}}
    outcome = st.train(Run.create(photos.parent / "run", _recipe(photos, **head)))
    assert outcome.tested is not None and (outcome.tested.step, outcome.tested.n) == (0, 20)


def test_validation_of_its_own_stays_and_test_images_that_validate_are_no_test(photos: Path) -> None:
    with_val = photos.parent / "three"
    for split, count in (("train", 10), ("val", 6), ("test", 4)):
        write_folder(with_val / split, dict.fromkeys(CLASSES, count))
    three = open_data(Data(train=str(with_val)), seed=0)
    assert (three.num_train, three.num_val, three.num_test, three.held_out) == (20, 12, 8, False)
    messages: list[str] = []
    told = open_data(Data(train=str(photos), val=str(photos / "test")), seed=0, say=messages.append)
    assert (told.num_train, told.num_val, told.num_test) == (20, 20, 0)
    assert not any("test image" in line for line in messages)
    both = Data(train=str(photos / "train"), val=str(photos / "test"), test=str(photos / "test"))
    open_data(both, seed=0, say=messages.append).close()
    assert any("has the validation images, by which weights are chosen: no test is made" in line for line in messages)
    for data in (three, told):
        data.close()


def test_a_test_set_is_given_by_hand_or_found_beside_its_records(
    photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = open_data(Data(train=str(photos / "train"), test=str(photos / "test")), seed=0)
    assert (given.num_train, given.num_val, given.num_test) == (16, 4, 20)
    given.close()
    st.pack(photos, "x")
    recipe = st.default_recipe("x-train.rec", FAST)
    assert (recipe.data.val, recipe.data.test) == (None, "x-test.rec")
    write_folder(tmp_path / "others", {"cat": 3, "elk": 3})
    with pytest.raises(DataError, match="others"):
        open_data(Data(train=str(photos / "train"), test="others"), seed=0)
    both = open_data(Data(train="x-{train,test}.rec"), seed=0)
    assert (both.num_train, both.num_test, both.held_out) == (16, 20, True)
    both.close()


def test_test_images_that_are_training_or_validation_images_are_said(photos: Path, tmp_path: Path) -> None:
    others = write_folder(tmp_path / "others", {f"{n}/{name}": 10 for n in range(3) for name in CLASSES})  # 2: new
    mine = (others / "2").rename(tmp_path / "mine")
    (photos / "test").rename(photos / "val")
    shutil.copy(next((photos / "train" / "cat").iterdir()), mine / "cat" / "copy.png")
    shutil.copy(next((photos / "val" / "dog").iterdir()), mine / "dog" / "copy.png")
    run = Run.create(tmp_path / "run", _recipe(photos, **{"data.test": str(mine)}))
    outcome = st.train(run)
    notices = [event.message for event in events.read(run.directory / "events.jsonl") if isinstance(event, Noticed)]
    assert any(line.startswith("2 of 22 test images are training or validation images") for line in notices)
    assert outcome.tested is not None
    assert (outcome.tested.num_seen, "2 of whose 22 images" in outcome.tested.seen) == (2, True)


def test_no_digest_depends_on_the_test_images(photos: Path) -> None:
    recipe = _recipe(photos)
    assert recipe.with_({"data.test": "elsewhere"}).digest == recipe.digest
    Run.create(photos.parent / "run", recipe)
    Run.create(photos.parent / "run", recipe.with_({"data.test": str(photos / "test")}))


def test_an_attempt_that_was_killed_before_the_test_makes_it_and_one_killed_after_does_not_again(photos: Path) -> None:
    run = Run.create(photos.parent / "run", _recipe(photos))
    last = 6
    _until(run, Saved, lambda event: event.step == last)
    assert not _tested(run.directory)
    _until(Run.open(run.directory), events.Tested)
    [tested] = _tested(run.directory)
    assert Run.open(run.directory).finished() is None
    assert st.train(run.directory).status == "finished"
    assert _tested(run.directory) == [tested]
    assert st.train(run.directory).tested == tested  # a finished run is left as it is


def test_a_second_end_is_tested_again_and_says_so(photos: Path) -> None:
    """The checkpoints are gone, so that the run is trained again; its other data are tested again."""
    run = Run.create(photos.parent / "run", _recipe(photos))
    _until(run, events.Tested)
    write_folder(photos.parent / "later", {"elk": 20, "cat": 5, "dog": 5}, size=(30, 40))
    shutil.rmtree(photos.parent / "later" / "elk")
    Run.create(run.directory, run.recipe.with_({"data.test": str(photos.parent / "later")}))
    second = st.train(run.directory).tested
    assert second is not None and (second.n, second.before) == (10, 1)
    assert second.seen == "evaluated 2 times in this run"


def test_whoever_stops_the_test_finds_the_run_unfinished(photos: Path) -> None:
    run = Run.create(photos.parent / "run", _recipe(photos))
    asked = iter(range(10**6))
    seen: list[events.Event] = []

    def stop() -> str | None:
        is_over = any(isinstance(event, Saved) and event.step == 6 for event in seen)
        return "SIGTERM" if is_over and next(asked) >= 0 else None

    for event in steps(run, stop=stop):
        seen.append(event)
    assert isinstance(seen[-1], Ended) and seen[-1].status == "preempted" and not _tested(run.directory)
    assert st.train(run.directory).tested is not None


def test_a_run_that_began_with_its_test_images_as_validation_keeps_them(photos: Path) -> None:
    """As runs of 0.2 did: 20 to train on, the 20 test images to validate with."""
    recipe = _recipe(photos)
    old = recipe.with_({"data.val": str(photos / "test")})
    run = Run.create(photos.parent / "run", old)
    _until(run, Evaluated)
    log = run.directory / "events.jsonl"
    Run.create(photos.parent / "new", recipe)
    (run.directory / "recipe.json").write_text(recipe.to_json())
    log.write_text(log.read_text().replace(old.digest, recipe.digest))
    for rest in run.checkpoints.glob("step-*/*.json"):
        rest.write_text(rest.read_text().replace(old.digest, recipe.digest))
    outcome = st.train(run.directory)
    assert outcome.status == "finished" and outcome.evaluated is not None
    assert (outcome.evaluated.n, outcome.tested) == (20, None)
    starts = [event for event in events.read(log) if isinstance(event, Started)]
    assert [(e.data["num_train"], e.data["num_val"], e.data["held_out"]) for e in starts] == [(20, 20, False)] * 2
    notices = [event.message for event in events.read(log) if isinstance(event, Noticed)]
    assert any("validate, as when this run began" in line for line in notices)
    assert st.evaluate(run.directory).n == 20


def test_the_time_for_the_test_is_reserved(photos: Path) -> None:
    from steadytrain.training.session.opening import open_session

    run = Run.create(photos.parent / "run", _recipe(photos))
    with run.lock(), run.log() as log, open_session(run, log, allow_import=None) as session:
        assert session.validation is not None
        assert session.closing_seconds == 0
        session.validation.seconds = 2.0  # of 4 images
        assert session.closing_seconds == pytest.approx(2.0 + 20 * 0.5)


def test_ranks_evaluate_their_part_of_the_test_images(photos: Path, tmp_path: Path) -> None:
    run = tmp_path / "ranks"
    words = [str(photos), "--model", "mlp", "--epochs", "2", "--batch-size", "8", "--lr", "0.05", "--holdout", "0.2"]
    words += ["--device", "cpu", "--precision", "fp32", "--set", "parallel.compute_threads=1", "--run", str(run)]
    command = [sys.executable, "-m", "steadytrain", "train", *words, "--procs", "2", "--set", "parallel.shard=true"]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    [tested] = _tested(run)
    assert tested.n == 20
    same = st.evaluate(run, photos / "test", say=lambda line: None)
    assert same.top1 == tested.top1 and same.loss == pytest.approx(tested.loss, rel=1e-5)


def test_it_has_a_line_in_the_terminal_the_list_of_runs_and_the_report(
    photos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    run = Run.create("runs/a", _recipe(photos))
    st.train(run, progress=True)
    tested = run.progress().tested
    assert tested is not None
    err = capsys.readouterr().err
    score = f"{100 * tested.top1:.1f} %"
    assert f"test, which no choice has seen: top-1 {score} (" in err
    assert main(["report", "runs/a", "-o", "a.html", "--json"]) == 0
    [document] = json.loads(capsys.readouterr().out)["runs"]
    assert (document["test"]["n"], document["test"]["top1"]) == (20, tested.top1)
    assert document["test"]["seen"] == "which no choice has seen"
    page = Path("a.html").read_text()
    assert "Test, which no choice has seen" in page and "test top-1" in page
    assert main(["watch", "runs/a"]) == 0
    assert f"test, which no choice has seen: {score} (" in capsys.readouterr().out
    assert main(["runs", "runs", "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["runs"]
    assert row["test"] == tested.top1 and row["test_low"] < tested.top1 <= row["test_high"]
    assert main(["runs", "runs"]) == 0
    assert "test" in capsys.readouterr().out.splitlines()[0].split()
    for suffix in ("md", "json"):
        assert main(["report", "runs/a", "-o", f"a.{suffix}"]) == 0
    assert f"{score} (" in Path("a.md").read_text() and "which no choice has seen" in Path("a.md").read_text()
    capsys.readouterr()


def test_the_split_of_the_training_images_is_that_of_a_folder_without_splits(photos: Path) -> None:
    data = open_data(Data(train=str(photos)), seed=3)
    alone = open_data(Data(train=str(photos / "train")), seed=3)
    expected = split_by_fraction(data.train.labels, fraction=0.2, seed=3)[1]
    assert data.val_ids is not None and alone.val_ids is not None
    assert data.val_ids.tolist() == alone.val_ids.tolist() == expected.tolist()
    for opened in (data, alone):
        opened.close()


def test_macro_recall_stands_beside_top1_where_classes_differ_tenfold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for split in ("train", "test"):
        write_folder(tmp_path / "uneven" / split, {"cat": 60, "dog": 5})
    st.train(Run.create("runs/a", _recipe(tmp_path / "uneven")))
    assert main(["report", "runs/a", "-o", "a.html", "--json"]) == 0
    [document] = json.loads(capsys.readouterr().out)["runs"]
    assert document["class_ratio"] == 12
    recall = st.evaluate("runs/a", say=lambda line: None).macro.recall
    assert document["best"]["macro_recall"] == recall and document["test"]["macro_recall"] is not None
    page = Path("a.html").read_text()
    assert "Macro recall" in page and "best macro recall" in page
    assert "a perfectly calibrated model shows" in page
    assert main(["runs", "runs"]) == 0
    assert "macro recall" in capsys.readouterr().out.splitlines()[0]
    assert main(["train", "--run", "runs/a"]) == 0
    out = capsys.readouterr().out
    assert all(f"{when} macro recall" in out for when in ("best", "last", "test"))
    assert main(["evaluate", "runs/a", "uneven/test"]) == 0
    out = capsys.readouterr().out
    assert "recall " in out and "(macro: the mean over classes, of sizes that differ 12-fold)" in out
    assert "a perfectly calibrated model shows " in out and " on 65 images" in out
    assert max(map(len, out.splitlines()[1:])) <= 82, out
    assert main(["evaluate", "runs/a", "uneven/test", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["class_ratio"] == 12 and 0 < figures["ece_by_chance"] < figures["ece_by_chance_high"]
