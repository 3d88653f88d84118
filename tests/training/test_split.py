"""What is held out: groups whole, kept in the run, the same after a resume; images that were trained on are counted."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

import steadytrain as st
from steadytrain import events
from steadytrain.cli import main
from steadytrain.config import Budget, Data, Every, Model, Parallel, Recipe
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.reader import Records
from steadytrain.data.sources.select import split_by_fraction
from steadytrain.errors import DataError
from steadytrain.events import Evaluated, Saved, top1_95
from steadytrain.intervals import wilson
from steadytrain.training import split as splits
from steadytrain.training.data import open_data
from steadytrain.training.split import choose_split, count_trained_on


def write_pairs(folder: Path, scenes: int = 20, side: int = 64) -> Path:
    """Pictures of two classes, each there twice: as PNG and as JPEG, in a folder for each pair."""
    for number in range(scenes):
        place = folder / ("cat", "dog")[number % 2] / f"pair-{number}"
        place.mkdir(parents=True, exist_ok=True)
        small = np.random.default_rng(number).integers(0, 255, (9, 9, 3), dtype=np.uint8)
        image = Image.fromarray(small).resize((side, side), Image.Resampling.BICUBIC)
        image.save(place / f"n{number:02}-a.png")
        image.save(place / f"n{number:02}-b.jpg", quality=60)
    return folder


def recipe(data: Path, **values: object) -> Recipe:
    recipe = Recipe(
        data=Data(train=str(data)),
        model=Model("mlp", options={"hidden": 8}),
        budget=Budget(epochs=4),
        every=Every(evaluate_epochs=1, save_steps=1),
        parallel=Parallel(device="cpu", threads=1),
        batch_size=8,
    )
    return recipe.with_({"data.size": 16, **values})


def stop_after(run: st.Run, step: int) -> None:
    for event in st.steps(run):
        if isinstance(event, Saved) and event.step >= step - 1:
            break


def pairs_of(records: Records, ids: NDArray[np.int64] | None) -> set[str]:
    names = list(records.names())
    return {Path(names[row]).name[:3] for row in (range(len(names)) if ids is None else ids)}


def test_near_copies_are_on_one_side_and_the_line_says_how_many_groups_there_are(tmp_path: Path) -> None:
    said: list[str] = []
    data = Data(train=str(write_pairs(tmp_path / "images")))
    with open_data(data, seed=0, say=said.append).train as train:
        sets = open_data(data, seed=0)
        assert not pairs_of(train, sets.train_ids) & pairs_of(train, sets.val_ids)
        assert sets.groups is not None and len(np.unique(sets.groups)) == 20
        assert sets.num_val == 8  # a fifth of few images
        other = open_data(data, seed=1)
        assert not np.array_equal(other.val_ids, sets.val_ids)  # type: ignore[arg-type]
    words = "40 images are 20 groups of copies and near copies; each group stays together."
    assert any(line.startswith(words) for line in said)
    assert any("8 of 40 images (20 % of each class, by whole groups) are held out" in line for line in said)


def test_folds_of_records_without_hashes_know_copies_beside_validation_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack(write_pairs(tmp_path / "images"), tmp_path / "a")
    pack(write_pairs(tmp_path / "other", 4), tmp_path / "val")
    (tmp_path / "a.hashes").unlink()
    monkeypatch.setattr(splits, "_MOST_BYTES", 1)  # more than is hashed for a remark alone
    sets = open_data(Data(train=str(tmp_path / "a.rec"), val=str(tmp_path / "val.rec")), seed=0)
    assert sets.train.hashes is None and sets.groups is not None and len(np.unique(sets.groups)) == 20


def test_what_the_user_groups_is_known_of_every_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for part in ("train", "val", "test"):
        images = write_pairs(tmp_path / part, side=24)  # too small for near copies to be told
        names = sorted(path.relative_to(images) for path in images.glob("*/*/*"))
        rows = [f"{name},{name.parts[0]},{name.name[:3]}" for name in names if part != "test" or "cat" in name.parts]
        (images / "table.csv").write_text("\n".join(["path,label,patient", *rows]))
    data = {part: str(tmp_path / part / "table.csv") for part in ("val", "test")}
    options = {"data.group_by": "patient", "budget.epochs": 1, **{f"data.{part}": data[part] for part in data}}
    run = st.Run.create(tmp_path / "run", recipe(tmp_path / "train" / "table.csv", **options))
    sets = open_data(run.data, seed=0)
    groups = sets.groups, sets.val_groups, sets.test_groups
    assert [part is not None and len(np.unique(part)) for part in groups] == [20, 20, 10]
    sets.close()
    st.train(run)
    worth = [event.effective_n for event in run.events() if isinstance(event, Evaluated | events.Tested)]
    assert worth[0] is not None and worth[1] is not None and worth[0] < 40 and worth[1] < 20
    main(["evaluate", str(run.directory), data["test"], "--json"])
    assert json.loads(capsys.readouterr().out)["effective_n"] == pytest.approx(worth[1])


def test_where_a_part_lacks_what_the_user_groups_by_its_copies_are_known(tmp_path: Path) -> None:
    images = write_pairs(tmp_path / "images")
    rows = [f"{path.relative_to(images)},{path.parts[-3]},{path.name[:3]}" for path in sorted(images.glob("*/*/*"))]
    (images / "table.csv").write_text("\n".join(["path,label,patient", *rows]))
    pack(images, tmp_path / "packed")
    for other in (write_pairs(tmp_path / "val", 10), tmp_path / "packed.rec"):
        sets = open_data(Data(train=str(images / "table.csv"), val=str(other), group_by="patient"), seed=0)
        assert sets.val_groups is not None and len(np.unique(sets.val_groups)) == len(sets.val_groups) // 2
        sets.close()


@pytest.mark.parametrize("group_by", ["folder", r"/n(\d)", "patient"])
def test_what_the_user_groups_is_on_one_side(tmp_path: Path, group_by: str) -> None:
    images = write_pairs(tmp_path / "images", side=24)  # too small for near copies to be told
    source = images
    if group_by == "patient":
        names = sorted(path.relative_to(images) for path in images.glob("*/*/*"))
        rows = [f"{name},{name.parts[0]},{name.name[:3]}" for name in names]
        source = images / "table.csv"
        source.write_text("\n".join(["path,label,patient", *rows]))
    sets = open_data(
        Data(train=str(source), group_by=group_by, label_column=("label",) if source != images else ()), seed=0
    )
    assert not pairs_of(sets.train, sets.train_ids) & pairs_of(sets.train, sets.val_ids)


def test_folders_of_the_same_names_in_each_class_are_groups_where_the_user_says_so(tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    for number in range(30):
        place = tmp_path / "pets" / ("cat", "dog")[number % 2] / f"patient-{number // 2 % 5}" / f"{number}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 255, (64, 64, 3), np.uint8)).save(place)
    with pytest.raises(DataError, match=r"series\) in each class: steady train \S+ --group-by folder"):
        open_data(Data(train=str(tmp_path / "pets")), seed=0)
    said: list[str] = []
    data = open_data(Data(train=str(tmp_path / "pets"), group_by="folder", holdout=0.1), seed=0, say=said.append)
    share = "6 of 30 images (10 % of each class was wanted, whole groups come to 20 %) are held out"
    assert any(share in line for line in said)
    assert data.classes == ("cat", "dog") and data.groups is not None and len(np.unique(data.groups)) == 5
    assert data.train_ids is not None and data.val_ids is not None
    assert not {*data.groups[data.train_ids]} & {*data.groups[data.val_ids]}
    data.close()
    files = pack(tmp_path / "pets", tmp_path / "out", group="folder", val_fraction=0.2)
    names = [{Path(name).parent.name for name in Records.open(file.path).names()} for file in files]
    assert len(names) == 2 and not names[0] & names[1]


def test_a_run_keeps_its_split_whatever_the_rule_is_by_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = write_pairs(tmp_path / "images")
    whole = st.train(st.Run.create(tmp_path / "whole", recipe(images)), progress=False)
    run = st.Run.create(tmp_path / "stopped", recipe(images))
    stop_after(run, 5)
    kept = np.load(run.split)["val_ids"]
    monkeypatch.setattr(splits, "group_images", lambda *_, **__: None)  # another rule
    st.train(st.Run.create(tmp_path / "stopped", recipe(images)), progress=False)
    assert whole.run.weights.read_bytes() == run.weights.read_bytes()
    sets = open_data(run.data, seed=0, run=run)
    assert np.array_equal(sets.val_ids, kept)  # type: ignore[arg-type]
    whole_file = run.split.read_bytes()
    for damaged in (whole_file[:100] + b"\xff" * 9 + whole_file[109:], whole_file[:-30], b"", None):
        run.split.unlink() if damaged is None else run.split.write_bytes(damaged)
        with pytest.raises(DataError, match=r"split.npz is missing or damaged, and other images would be held out now"):
            open_data(run.data, seed=0, run=run)


def test_a_run_of_before_keeps_the_split_by_class_alone(tmp_path: Path) -> None:
    images = write_pairs(tmp_path / "images")
    run = st.Run.create(tmp_path / "run", recipe(images, **{"data.holdout": 0.1}))
    stop_after(run, 2)
    run.split.unlink()
    log = run.directory / "events.jsonl"
    log.write_text("".join(line.replace('"split":', '"other":') for line in log.read_text().splitlines(True)))
    run = st.Run.create(run.directory, recipe(images))  # the same command, whose default was a tenth
    assert run.recipe.data.holdout == 0.1
    with Records.open(open_data(run.data, seed=0).train.path) as train:
        old = split_by_fraction(train.labels, fraction=0.1, seed=0)[1]
        assert np.array_equal(choose_split(train, run.data, seed=0, run=run).val_ids, old)
    assert not run.split.exists()


def test_images_that_were_trained_on_are_counted(tmp_path: Path) -> None:
    images = write_pairs(tmp_path / "images")
    run = st.Run.create(tmp_path / "run", recipe(images))
    st.train(run, progress=False)
    pack(images, tmp_path / "other", quality=70, shorter_side=40)  # packed anew, by other settings
    with Records.open(tmp_path / "other.rec") as records:
        assert count_trained_on(run.directory, records) == 32
    with Records.open(open_data(run.data, seed=0).train.path) as records:
        assert count_trained_on(run.directory, records) == 32
        assert count_trained_on(tmp_path, records) is None


@pytest.mark.parametrize("kind", ["folder", "rec", "rec without hashes"])
def test_validation_images_that_are_training_images_are_said(tmp_path: Path, kind: str) -> None:
    images, said = write_pairs(tmp_path / "images"), list[str]()
    val = write_pairs(tmp_path / "val", scenes=2)
    shutil.copy(images / "cat" / "pair-4" / "n04-a.png", val / "cat" / "new.png")
    if kind != "folder":
        for name in ("images", "val"):
            pack(tmp_path / name, tmp_path / f"{name}-packed")
            if "without" in kind:
                (tmp_path / f"{name}-packed.hashes").unlink()
        images, val = tmp_path / "images-packed.rec", tmp_path / "val-packed.rec"
    open_data(Data(train=str(images), val=str(val)), seed=0, say=said.append)
    assert any(line.startswith("5 of 5 validation images are training images") for line in said)


def test_a_tenth_is_held_out_of_many_images_and_a_fifth_of_few() -> None:
    assert [Data(train="x").share_held_out(n) for n in (999, 1000)] == [0.2, 0.1]
    assert Data(train="x", holdout=0.3).share_held_out(10) == 0.3


def test_intervals_are_of_groups_in_validation_test_and_evaluate(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for part in ("train", "test"):
        write_pairs(tmp_path / "images" / part)
    run = st.Run.create(tmp_path / "run", recipe(tmp_path / "images"))
    st.train(run)
    found = [event for event in run.events() if isinstance(event, Evaluated | events.Tested)]
    assert [event.n for event in found] == [8] * 4 + [40]
    for event in found:
        assert event.effective_n is not None and event.effective_n <= event.n * 0.7
        assert top1_95(event) == wilson(event.top1, event.effective_n)
    best, tested = run.progress().best, run.progress().tested
    assert best is not None and tested is not None and tested.effective_n is not None
    for words, worth in (([], best.effective_n), ([str(tmp_path / "images" / "test")], tested.effective_n)):
        main(["evaluate", str(run.directory), *words, "--json"])
        assert json.loads(capsys.readouterr().out)["effective_n"] == pytest.approx(worth)
    main(["evaluate", str(run.directory), str(tmp_path / "images" / "test")])
    assert f"40 images in groups, worth {tested.effective_n:.0f} independent ones" in capsys.readouterr().out


def test_images_without_copies_have_the_interval_of_as_many(tmp_path: Path) -> None:
    write_pairs(tmp_path / "images", side=24)  # too small for near copies to be told
    run = st.Run.create(tmp_path / "run", recipe(tmp_path / "images", **{"budget.epochs": 1}))
    st.train(run)
    best = run.progress().best
    assert best is not None and best.effective_n is None and top1_95(best) == wilson(best.top1, 8)
