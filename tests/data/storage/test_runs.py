"""A run kept in a store: resumed on another machine bit for bit, never seen by halves, never mixed with another."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.store import Bucket, FaultProxy

from steadytrain.cli import main
from steadytrain.config import Recipe
from steadytrain.data.storage import store as store_module
from steadytrain.data.storage.runs import MANIFEST, FolderUpload, fetch_folder, newest_step, read_manifest
from steadytrain.errors import DataError, RecipeError, RunError, StorageError
from steadytrain.events import Noticed, Saved
from steadytrain.run import Run
from steadytrain.training import checkpoints, steps, train

Weights = Callable[[Path], bytes]


@pytest.fixture
def kept(recipe: Recipe, bucket: Bucket) -> Recipe:
    """The recipe, kept at ``runs/a`` of the bucket, with a checkpoint each second update."""
    return recipe.with_({"every.upload": bucket.uri("runs/a"), "every.save_steps": 2})


def _steady(folder: Path, *args: str) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    log = (folder / "log").open("wb")
    with log:
        return subprocess.Popen([sys.executable, "-m", "steadytrain", *args], cwd=folder, stdout=log, stderr=log)


def test_a_run_that_was_left_goes_on_elsewhere_with_the_same_weights(
    kept: Recipe, recipe: Recipe, tmp_path: Path, weights: Weights
) -> None:
    train(Run.create(tmp_path / "whole", recipe))
    for event in steps(Run.create(tmp_path / "one", kept)):
        if isinstance(event, Saved) and event.step == 8:
            break
    manifest = fetch_folder(str(kept.every.upload), tmp_path / "two")
    left = tmp_path / "one" / "checkpoints" / f"step-{newest_step(manifest.files):08d}"
    assert newest_step(manifest.files) >= 8 and left == max((tmp_path / "one" / "checkpoints").iterdir())
    train(tmp_path / "two")
    assert weights(tmp_path / "two") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_uri_on_another_machine_with_the_same_weights(
    bucket: Bucket, digits: Path, recipe: Recipe, tmp_path: Path, weights: Weights
) -> None:
    data = bucket.put_records(digits.parent, "digits")
    whole = recipe.with_({"data.train": data, "budget.epochs": 6})
    train(Run.create(tmp_path / "whole", whole))
    (tmp_path / "recipe.json").write_text(whole.to_json())
    uri = bucket.uri("runs/a")
    save = ["--set", "every.save_steps=2"]
    first = _steady(tmp_path / "one", "train", "--recipe", str(tmp_path / "recipe.json"), data, "--run", uri, *save)
    until = time.monotonic() + 60
    while not any(name.startswith("checkpoints/") for name in read_manifest(uri).files):
        assert first.poll() is None and time.monotonic() < until, (tmp_path / "one" / "log").read_text()
        time.sleep(0.02)
    first.send_signal(signal.SIGKILL)
    first.wait()
    assert _steady(tmp_path / "two", "resume", uri).wait() == 0, (tmp_path / "two" / "log").read_text()
    log = (tmp_path / "two" / "log").read_text()
    assert f"fetching the run at {uri} into runs/a" in log and "resumed" in log
    assert weights(tmp_path / "two" / "runs" / "a") == weights(tmp_path / "whole")
    fetch_folder(uri, tmp_path / "three")
    assert weights(tmp_path / "three") == weights(tmp_path / "whole") and Run.open(tmp_path / "three").finished()


def test_a_reader_never_sees_half_a_checkpoint_and_old_ones_are_removed(
    kept: Recipe, bucket: Bucket, tmp_path: Path
) -> None:
    uri, ended, fetched, saves = bucket.uri("runs/a"), threading.Event(), list[str](), 0
    problems: list[BaseException] = []

    def read() -> None:
        number = 0
        while not ended.is_set():
            number += 1
            try:
                if not any("checkpoints/" in name for name in read_manifest(uri).files):
                    continue
                folder = tmp_path / f"fetched-{number}"
                manifest = fetch_folder(uri, folder)
                newest = checkpoints.newest(
                    folder / "checkpoints", lambda damage: problems.append(RuntimeError(damage))
                )
                assert newest is not None and checkpoints.load(newest)
                assert all((folder / name).stat().st_size == file.bytes for name, file in manifest.files.items())
                fetched.append(newest.name)
            except BaseException as error:  # noqa: BLE001 - for the main thread
                problems.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        for event in steps(Run.create(tmp_path / "run", kept)):
            if isinstance(event, Saved):
                saves, deadline = saves + 1, time.monotonic() + 60
                while len(set(fetched)) < min(3, saves - 1) and not problems and time.monotonic() < deadline:
                    time.sleep(0.01)  # those before are read while this one is sent and older ones are removed
    finally:
        ended.set()
        reader.join()
    assert not problems and len(set(fetched)) >= 3
    local = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    names = {name.split("/")[1] for name in read_manifest(uri).files if name.startswith("checkpoints/")}
    assert names == local
    for name in fetched:  # none but those are left in the bucket
        if name not in local:
            with pytest.raises(FileNotFoundError):
                bucket.get(f"runs/a/checkpoints/{name}/state.json")


@pytest.mark.slow
def test_a_store_that_is_away_costs_uploads_and_not_the_run(
    kept: Recipe, fault_proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: Weights
) -> None:
    monkeypatch.setattr(store_module, "PATIENCE_SECONDS", 0.2)
    fault_proxy.matches = "checkpoints"
    run = Run.create(tmp_path / "run", kept)
    lines: list[str] = []
    for event in steps(run):
        if isinstance(event, Saved):
            if event.step == 4:
                fault_proxy.faults = [503] * 1000
            if event.step == 14:
                fault_proxy.faults = []
            time.sleep(0.5)
        if isinstance(event, Noticed):
            lines.append(event.message)
    messages = [event.message for event in run.events() if isinstance(event, Noticed)]
    assert any(text.startswith("not uploaded: ") and "slow down" in text for text in messages)
    assert any(text.startswith("uploaded to ") for text in messages)
    fetch_folder(str(kept.every.upload), tmp_path / "fetched")
    assert weights(tmp_path / "fetched") == weights(tmp_path / "run")


def test_failed_uploads_are_named_at_the_end(
    kept: Recipe, fault_proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "PATIENCE_SECONDS", 0.2)
    fault_proxy.matches = "model.safetensors"
    fault_proxy.faults = [503] * 1000
    run = Run.create(tmp_path / "run", kept)
    with pytest.raises(StorageError, match=r"run is complete, but not all of it at s3://.*: slow down"):
        train(run)
    assert run.finished()


def test_a_run_is_not_uploaded_over_another_or_a_later_one(kept: Recipe, tmp_path: Path) -> None:
    uri = str(kept.every.upload)
    for _ in steps(Run.create(tmp_path / "run", kept)):
        pass
    with pytest.raises(RunError, match=r"is a run of another recipe \(seed: 0 -> 9\): choose another URI"):
        train(Run.create(tmp_path / "other", kept.with_(seed=9)))
    with pytest.raises(RunError, match=rf"the run at {uri} has come to step 20, .* to step 0: .*steady resume {uri}"):
        train(Run.create(tmp_path / "again", kept))


def test_two_uploads_to_the_same_place_are_reported(bucket: Bucket, tmp_path: Path) -> None:
    uploads = []
    for name in ("one", "three"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.json").write_text(name)
        uploads.append(FolderUpload(tmp_path / name, bucket.uri("runs/a"), lambda message: None))
    uploads[0].close()
    with pytest.raises(StorageError, match="was written by another process meanwhile"):
        uploads[1].close()


def test_names_that_lead_out_of_the_folder_are_refused(bucket: Bucket, tmp_path: Path) -> None:
    bucket.put(
        "runs/a/" + MANIFEST,
        json.dumps({"kind": "steadytrain.uploaded", "files": {"../x": {"bytes": 1, "key": "x", "etag": ""}}}).encode(),
    )
    with pytest.raises(DataError, match=r"names \.\./x, a place outside of the folder"):
        fetch_folder(bucket.uri("runs/a"), tmp_path / "run")
    bucket.put("runs/a/" + MANIFEST, b"<html>")
    with pytest.raises(DataError, match="is damaged, or was not written by steadytrain"):
        fetch_folder(bucket.uri("runs/a"), tmp_path / "run")


def test_path_without_a_run_is_an_error(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["resume", bucket.uri("runs/none")]) == 2
    assert f"there is no run at {bucket.uri('runs/none')}" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["data.train", "data.val", "every.upload"])
def test_a_recipe_takes_no_secrets(recipe: Recipe, key: str) -> None:
    for uri in ("s3://me:s3cr3t@bucket/x", "https://host/x.rec?X-Amz-Signature=s3cr3t"):
        with pytest.raises(RecipeError, match="credentials in the environment") as caught:
            recipe.with_({key: uri})
        assert "s3cr3t" not in str(caught.value)


def test_a_run_from_elsewhere_uploads_nothing_unless_this_command_asks_for_it(
    kept: Recipe, bucket: Bucket, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uri = str(kept.every.upload)
    for event in steps(Run.create("a", kept.with_({"every.upload": None}))):
        if isinstance(event, Saved):
            break
    (tmp_path / "a" / "recipe.json").write_text(kept.to_json())
    assert main(["resume", "a", "--until", "1"]) == 75
    assert f"not uploaded to {uri}: a file asks for it (every.upload)" in capsys.readouterr().err
    assert not read_manifest(uri).files
    assert train("a").status == "finished" and not read_manifest(uri).files, "nor from Python"
    notices = [event.message for event in Run.open("a").events() if isinstance(event, Noticed)]
    assert sum(message.startswith(f"not uploaded to {uri}") for message in notices) == 2
    shutil.rmtree("a")
    assert main(["train", str(kept.data.train), "--recipe", str(_written(kept, tmp_path)), "--run", "b"]) == 0
    assert "not uploaded to" in capsys.readouterr().err and not read_manifest(uri).files, "nor from a recipe file"


def test_a_run_says_where_it_is_kept_as_well_and_leaves_links_out(
    kept: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    uri, (secret, folder) = str(kept.every.upload), (tmp_path / "secret", tmp_path / "private")
    secret.write_text("mine")
    folder.mkdir()
    (folder / "key").write_text("mine")
    run = Run.create("a", kept.with_({"every.upload": None}))
    (run.directory / "notes.txt").symlink_to(secret)
    (run.directory / "best.safetensors.bak").symlink_to(secret)
    (run.directory / "more").symlink_to(folder)
    assert main(["resume", "a", "--set", f"every.upload={uri}"]) == 0
    assert f"also kept at {uri}: uploaded after each checkpoint" in capsys.readouterr().err
    files = read_manifest(uri).files
    assert {"recipe.json", "model.safetensors"} <= files.keys()
    assert not [name for name in files if name.startswith(("notes", "best.safetensors.bak", "more"))]
    notices = [event.message for event in run.events() if isinstance(event, Noticed)]
    for name in ("notes.txt", "best.safetensors.bak", "more"):
        assert sum(f"a/{name} is a link to {tmp_path}" in message for message in notices) == 1, notices
    Run.create("other", kept.with_({"every.upload": None, "seed": 9}))
    assert main(["resume", "other", "--set", f"every.upload={uri}"]) == 2
    assert "also kept at" not in capsys.readouterr().err, "the address of another run"


def _written(recipe: Recipe, folder: Path) -> Path:
    path = folder / "recipe.json"
    path.write_text(recipe.to_json())
    return path
