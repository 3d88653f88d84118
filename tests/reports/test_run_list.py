"""The runs of a folder, a row each: whatever lies there."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.reports.runs import Clock, course, finished, recipe, started, write

from steadytrain.cli import main
from steadytrain.cli.runs import _print_rows
from steadytrain.errors import InputError, RunError
from steadytrain.events import Failed
from steadytrain.reports.files import run_folders, runs_inside
from steadytrain.reports.run_list import RunRow, list_runs, parse_where, sort_rows, write_notes
from steadytrain.run import Run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: two finished ones, one of a sweep that was killed, one that failed, one never started."""
    folder = tmp_path_factory.mktemp("made") / "runs"
    folder.mkdir()
    finished(folder, "a", epochs=1)
    finished(folder, "b", lr=0.2, best=0.7, epochs=1)
    seed = Run.create(folder / "rates" / "lr=0.1" / "seed-0", recipe())
    write(seed, [started(), *course(0, 40, total=1055)], Clock())
    failed = Run.create(folder / "failed", recipe())
    write(failed, [started(), Failed(error="FeedError", message="the disk is gone", step=4)], Clock())
    (failed.checkpoints / "step-00000004").mkdir()
    (failed.checkpoints / "step-00000004" / "state.safetensors").write_bytes(b"0" * 5000)
    (failed.directory / "best.safetensors").write_bytes(b"1" * 7000)
    never = Run.create(folder / "never", recipe()).directory / "recipe.json"
    os.utime(never, (time.time() - 7200, time.time() - 7200))
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "runs")


def _rows(folder: Path) -> dict[str, RunRow]:
    return {row.name: row for row in list_runs(folder)}


def test_every_run_has_a_row_those_of_a_sweep_included(made: Path) -> None:
    rows = _rows(made)
    assert {name: row.status for name, row in rows.items()} == {
        "a": "finished",
        "b": "finished",
        "failed": "failed",
        "never": "waiting",
        "rates/lr=0.1/seed-0": "interrupted",
    }
    a = rows["a"]
    assert a.best and a.low and a.high and a.low < a.best < a.high and a.data == "cifar10-train.rec"
    assert "the disk is gone" in rows["failed"].why and rows["a"].recipe["optim.lr"] == 0.1


def test_a_damaged_or_odd_folder_is_a_row_that_says_so_and_hides_no_other(folder: Path) -> None:
    (folder / "a" / "recipe.json").write_text("{")
    (folder / "b" / "events.jsonl").unlink()
    os.mkfifo(folder / "b" / "events.jsonl")
    (folder / "failed" / "events.jsonl").write_text("no line of this is an event\n")
    checkpoint = folder / "rates" / "lr=0.1" / "seed-0" / "checkpoints" / "step-00000020"
    checkpoint.mkdir()
    os.mkfifo(checkpoint / "state.json")
    (folder / "never" / "notes.json").write_text("[" * 100_000)
    rows = _rows(folder)
    assert [rows[name].status for name in ("a", "b", "failed")] == ["damaged"] * 3
    assert "events.jsonl is no file" in rows["b"].why and rows["never"].status == "waiting"


def test_links_are_not_followed(folder: Path, tmp_path: Path) -> None:
    outside = finished(tmp_path, "outside", epochs=1).directory
    (folder / "link").symlink_to(outside)
    shutil.copytree(outside, folder / "inside")
    (folder / "inside" / "events.jsonl").unlink()
    (folder / "inside" / "events.jsonl").symlink_to(outside / "events.jsonl")
    (folder / "a" / "notes.json").symlink_to(outside / "recipe.json")
    rows = _rows(folder)
    assert "link" not in rows and rows["inside"].status == "damaged" and "is a link" in rows["inside"].why
    with pytest.raises(RunError, match=r"notes\.json is a link"):
        write_notes(folder / "a", add=["good"])
    assert json.loads((outside / "recipe.json").read_text())["batch_size"] == 128


def test_a_moved_folder_keeps_its_tags_and_notes_and_its_events(folder: Path, tmp_path: Path) -> None:
    events = (folder / "a" / "events.jsonl").read_bytes()
    assert main(["runs", str(folder / "a"), "--tag", "good,baseline", "--note", "before the new labels"]) == 0
    assert main(["runs", str(folder / "a"), "--untag", "good"]) == 0
    moved = folder.rename(tmp_path / "elsewhere")
    row = _rows(moved)["a"]
    assert (row.tags, row.note) == (("baseline",), "before the new labels")
    assert (moved / "a" / "events.jsonl").read_bytes() == events


def test_conditions_choose_and_fields_sort(made: Path) -> None:
    rows = list_runs(made)

    def names(where: str) -> set[str]:
        return {row.name for row in rows if parse_where(where)(row)}

    assert names("model=ResNet* top1>80%") == {"a"}
    assert names("lr >= 0.2") == names("optim.lr>=0.2 and top1 > 0") == {"b"}
    assert names("optim.lr>=0.2") == {"b"} and names("name=*LR=*") == {"rates/lr=0.1/seed-0"}
    assert names("status!=finished age<1d") == {"never"} and names("data='cifar10-train.rec' top1<=0.8") == {"b"}
    assert [row.name for row in sort_rows(rows, "top1")][:2] == ["a", "b"]
    assert [row.name for row in sort_rows(rows, "-top1")][:2] == ["b", "a"]
    assert next(row.name for row in sort_rows(rows, "age")) == "never"


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("top2>0.9", r"unknown field 'top2': name, status, .*, top1, .*optim\.lr\. Did you mean top1"),
        ("statsu=failed", "Did you mean status"),
        ("top1>high", "top1 is a number"),
        ("model>resnet", "model is text"),
        ("resnet50", "no condition: FIELD=VALUE"),
        ("note='open", "no condition: FIELD=VALUE"),
    ],
)
def test_a_condition_that_cannot_be_met_is_refused_with_what_can(where: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_where(where)


def test_the_table_and_the_document_say_the_same(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(made), "--where", "status=finished", "--sort", "top1", "--compare"]) == 0
    head, first, _ = capsys.readouterr().out.splitlines()[:3]
    assert head.split()[:2] == ["run", "status"] and head.endswith("optim.lr") and first.startswith("a ")
    assert main(["runs", str(made), "--sort", "top1", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert rows[0]["name"] == "a" and f"{100 * rows[0]['best']:.1f} %" in first
    assert main(["runs", str(made), "--where", "top1>2"]) == 0
    assert "none of 5 runs meets" in capsys.readouterr().err


def test_a_long_name_costs_the_interval_of_an_accuracy_and_not_the_accuracy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    row = RunRow(name="long-" * 12, directory="a", status="finished", best=0.775, low=0.672, high=0.853, epochs=2.0)
    _print_rows([row], with_settings=False)
    assert capsys.readouterr().out.splitlines()[1].split() == ["long-" * 12, "finished", "77.5", "%"]


def test_tags_for_all_runs_of_a_folder_must_be_asked_for(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(made), "--tag", "x"]) == 2
    assert "would change all 5 runs" in capsys.readouterr().err and not list(made.rglob("notes.json"))


def test_cleaning_up_asks_and_keeps_what_a_run_has_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", str(folder), "--clean"]) == 2  # there is no terminal to ask on
    said = capsys.readouterr()
    assert "12.0 kB" in said.out and "nothing was removed" in said.err and (folder / "never").exists()
    kept = finished(folder, "kept", epochs=1).directory
    assert main(["runs", str(folder), "--clean", "--yes"]) == 0
    assert sorted(path.name for path in (folder / "failed").iterdir()) == ["events.jsonl", "lock", "recipe.json"]
    assert not (folder / "never").exists() and (folder / "rates/lr=0.1/seed-0/checkpoints").exists()
    assert (kept / "checkpoints").exists() and _rows(folder)["failed"].status == "failed"


def test_a_run_that_failed_before_it_started_goes_whole_and_one_with_nothing_to_remove_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "runs"
    late = Run.create(folder / "late", recipe())
    write(late, [started(), Failed(error="FeedError", message="the disk is gone", step=4)], Clock())
    write(Run.create(folder / "early", recipe()), [Failed(error="ModelError", message="no such net")], Clock())
    assert {name: row.status for name, row in _rows(folder).items()} == {"late": "failed", "early": "failed"}
    assert main(["runs", str(folder), "--clean", "--yes"]) == 0
    assert "late (failed) has no weights: " in capsys.readouterr().err
    assert [path.name for path in folder.iterdir()] == ["late"]
    assert main(["runs", str(folder), "--clean"]) == 0
    assert "no run failed" not in capsys.readouterr().err
    write_notes(folder / "late", add=["keep"])
    assert main(["runs", str(folder), "--clean", "--yes", "--where", "status=failed"]) == 0
    assert "it has the tag keep" in capsys.readouterr().err


def test_cleaning_up_leaves_runs_in_use_kept_ones_links_and_what_is_no_run(folder: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("x")
    (folder / "a" / "mine").symlink_to(outside)
    (folder / "photos").mkdir()
    (folder / "b" / "recipe.json").write_text("{")
    write_notes(folder / "failed", add=["keep"])
    words = ["runs", str(folder), "--clean", "--yes", "--where"]
    with Run.open(folder / "rates" / "lr=0.1" / "seed-0").lock():
        assert main([*words, "status=*"]) == 0
    left = {path.name for path in folder.iterdir()}
    assert left == {"a", "b", "failed", "photos", "rates"} and (outside / "precious").read_text() == "x"
    assert (folder / "rates" / "lr=0.1" / "seed-0" / "recipe.json").exists()


def test_a_running_run_is_listed_as_it_goes_and_never_cleaned_up(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "a", recipe())
    here = replace(started(), machine={**started().machine, "host": platform.node()})
    with run.lock(), run.log() as log:
        for event in (here, *course(0, 40, total=1055)):
            log.append(event)
        (row,) = list_runs(tmp_path)
        assert row.status == "running" and row.epochs_done == pytest.approx(40 / 351.5625)
        assert main(["runs", str(tmp_path), "--clean", "--yes", "--where", "status=running"]) == 0
        for event in course(40, 60, total=1055):
            log.append(event)
        assert list_runs(tmp_path)[0].epochs_done == pytest.approx(60 / 351.5625)
    assert run.checkpoints.exists()


def test_the_list_and_the_report_find_the_same_runs(tmp_path: Path) -> None:
    """Those of a sweep, at any depth; the report follows a link to a run elsewhere, the list, which writes, none."""
    for name in ("a", "sweep/lr=0.1/seed-0", "sweep/lr=0.1/seed-1", ".trash/old"):
        Run.create(tmp_path / "runs" / name, recipe())
    elsewhere = Run.create(tmp_path / "elsewhere" / "b", recipe())
    (tmp_path / "runs" / "b").symlink_to(elsewhere.directory)
    (tmp_path / "runs" / "best").symlink_to("a")
    (tmp_path / "runs" / "sweep" / "best").symlink_to("../a")
    (tmp_path / "runs" / "sweep" / "up").symlink_to("..")
    found = ["a", "sweep/lr=0.1/seed-0", "sweep/lr=0.1/seed-1"]
    assert [str(path.relative_to(tmp_path / "runs")) for path in run_folders(tmp_path / "runs")] == found
    assert sorted(row.directory for row in list_runs(tmp_path / "runs")) == [str(tmp_path / "runs" / n) for n in found]
    read = [str(run.directory.relative_to(tmp_path / "runs")) for run in runs_inside(tmp_path / "runs")[0]]
    assert read == ["a", "b", *found[1:]]


def test_a_tag_needs_no_choice_where_there_is_one_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    finished(tmp_path / "runs", "a", epochs=1)
    assert main(["runs", str(tmp_path / "runs"), "--tag", "good"]) == 0
    assert list_runs(tmp_path / "runs")[0].tags == ("good",)
    Run.create(tmp_path / "runs" / "b", recipe())
    assert main(["runs", str(tmp_path / "runs"), "--tag", "bad"]) == 2
    assert "all 2 runs" in capsys.readouterr().err
