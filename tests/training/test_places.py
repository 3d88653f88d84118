"""Records whose classes have no names: training, evaluation and packing take their labels for the same classes."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from steadytrain.config import Budget, Data, Model, Parallel, Recipe
from steadytrain.data.packing.pack import pack
from steadytrain.data.recordio.card import card_of
from steadytrain.data.recordio.framing import pack_header
from steadytrain.data.recordio.writer import RecordWriter
from steadytrain.errors import DataError
from steadytrain.events import Evaluated
from steadytrain.run import Run
from steadytrain.training import evaluate, restore, train
from steadytrain.training.data import DataSets, open_data
from steadytrain.training.inference.inference import open_evaluation_data

NUMBERS = [str(number) for number in range(12)]
SORTED = sorted(NUMBERS)
"""0, 1, 10, 11, 2, ...: the order of folders, in which im2rec numbers them."""


def grey(name: str) -> bytes:
    """An image whose brightness says its class."""
    file = io.BytesIO()
    Image.new("L", (8, 8), 20 * int(name) + 10).save(file, "PNG")
    return file.getvalue()


def folder(path: Path, names: list[str]) -> Path:
    for name in names:
        (path / name).mkdir(parents=True)
        (path / name / "1.png").write_bytes(grey(name))
        (path / name / "2.png").write_bytes(grey(name))
    return path


def records(path: Path, *, named: bool = False, names: list[str] = SORTED) -> Path:
    """What im2rec makes of two images of each class; its list beside it if the classes are to be ``named``."""
    rows = [(number, name) for number, name in enumerate(names) for _ in range(2)]
    with RecordWriter(path) as writer:
        for id_, (number, name) in enumerate(rows):
            writer.write(pack_header(number, id=id_) + grey(name), id_)
    if named:
        lines = [f"{id_}\t{number}.000000\t{name}/1.png\n" for id_, (number, name) in enumerate(rows)]
        path.with_suffix(".lst").write_text("".join(lines))
    return path


def recipe_for(training: Path, val: Path | None = None, **data: object) -> Recipe:
    values = Data(train=training, val=val, holdout=0, flip=False, size=8, **data)  # type: ignore[arg-type]
    run: dict[str, Any] = {"model": Model("mlp"), "budget": Budget(steps=1), "parallel": Parallel(device="cpu")}
    return Recipe(data=values, **run, batch_size=8)


def sets(training: Path, val: Path, said: list[str] | None = None, **data: object) -> DataSets:
    return open_data(recipe_for(training, val, **data).data, seed=0, say=(said if said is not None else []).append)


def require_right(opened: DataSets) -> None:
    """The class of each validation image, by the model's list, is the one that its brightness says; and close it."""
    assert opened.val is not None
    names = [opened.classes[int(label)] for label in opened.val.labels]
    images = [Image.open(io.BytesIO(bytes(opened.val.image(number)))) for number in range(len(opened.val))]
    opened.close()
    assert names == [str((round(float(np.asarray(image.convert("L")).mean())) - 10) // 20) for image in images]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("kind", ["records", "named records", "folder", "table", "table of some"])
def test_validation_data_of_every_kind_have_the_classes_of_a_folder(tmp_path: Path, kind: str) -> None:
    training, val = folder(tmp_path / "train", NUMBERS), tmp_path / "val.rec"
    if "records" in kind:
        records(val, named="named" in kind)
    else:
        val = folder(tmp_path / "val", NUMBERS)
    if "table" in kind:
        names = NUMBERS if kind == "table" else NUMBERS[5:]
        (tmp_path / "val.csv").write_text("path,label\n" + "".join(f"val/{name}/1.png,{name}\n" for name in names))
        val = tmp_path / "val.csv"
    opened = sets(training, val)
    require_right(opened)


@pytest.mark.parametrize("kind", ["named records", "folder", "table"])
def test_validation_data_follow_the_names_that_a_list_beside_the_training_records_has(
    tmp_path: Path, kind: str
) -> None:
    training, val = records(tmp_path / "train.rec", named=True), folder(tmp_path / "val", NUMBERS)
    if kind == "table":
        (tmp_path / "val.csv").write_text("path,label\n" + "".join(f"val/{name}/1.png,{name}\n" for name in NUMBERS))
        val = tmp_path / "val.csv"
    val = records(tmp_path / "val.rec", named=True) if "records" in kind else val
    opened = sets(training, val)
    assert opened.classes == tuple(SORTED) and not opened.is_unnamed
    require_right(opened)


def test_named_records_of_another_order_are_refused(tmp_path: Path) -> None:
    training = folder(tmp_path / "train", NUMBERS)
    val = records(tmp_path / "val.rec", named=True, names=NUMBERS)  # 0, 1, 2: not as folders are sorted
    with pytest.raises(
        DataError, match=r"different class lists \(the same names in another order\): pack .* --classes"
    ):
        sets(training, val)
    pack(training, tmp_path / "card")
    [packed] = pack(val, tmp_path / "again", classes=tmp_path / "card.json")
    assert packed.card.classes == tuple(SORTED)
    opened = sets(training, packed.path)
    require_right(opened)


def test_places_are_said(tmp_path: Path) -> None:
    said: list[str] = []
    sets(folder(tmp_path / "train", NUMBERS), records(tmp_path / "val.rec"), said).close()
    assert any("names no classes: its labels are places in the class list of the training data (0 is 0, 1 is 1, 2 is 10" in line for line in said)  # fmt: skip  # noqa: E501


def test_a_folder_is_taken_in_its_order_where_the_training_records_name_nothing(tmp_path: Path) -> None:
    said: list[str] = []
    training = records(tmp_path / "train.rec")
    opened = sets(training, folder(tmp_path / "val", NUMBERS), said)
    assert opened.is_unnamed and opened.val is not None
    assert opened.val.labels.tolist() == opened.train.labels.tolist()
    assert any("the training data names no classes: those of" in line and "2 is 10" in line for line in said)
    opened.close()
    (tmp_path / "all.csv").write_text("path,label\n" + "".join(f"val/{name}/1.png,{name}\n" for name in NUMBERS))
    sets(training, tmp_path / "all.csv", said).close()
    assert any("are taken for its labels (10 is label 10" in line for line in said)
    with pytest.raises(DataError, match=r"has 12 of them, not 2 \(0, 11\): put the \.lst that im2rec made beside"):
        sets(training, folder(tmp_path / "some", ["0", "11"]))
    (tmp_path / "val.csv").write_text("path,label\nval/3/1.png,3\nval/7/1.png,7\n")
    with_values = sets(training, tmp_path / "val.csv")
    assert with_values.val is not None and with_values.val.labels.tolist() == [3, 7]
    with_values.close()


def test_a_card_names_the_classes_of_training_records(tmp_path: Path) -> None:
    pack(folder(tmp_path / "images", NUMBERS), tmp_path / "card")
    card = tmp_path / "card.json"
    opened = sets(records(tmp_path / "train.rec"), folder(tmp_path / "val", NUMBERS), classes=str(card))
    assert opened.classes == tuple(SORTED) and not opened.is_unnamed
    require_right(opened)


@pytest.mark.parametrize("training", ["folder", "records", "named records"])
def test_training_and_evaluation_agree_on_every_kind_of_data(tmp_path: Path, training: str) -> None:
    """The same model and images, whatever holds them: the same classes, so the same figures."""
    source = folder(tmp_path / "train", NUMBERS)
    if training != "folder":
        source = records(tmp_path / "train.rec", named=training == "named records")
    bare = records(tmp_path / "bare.rec")
    run = Run.create(tmp_path / "run", recipe_for(source, bare))
    train(run)
    [evaluated] = [event for event in run.events() if isinstance(event, Evaluated)]
    trained = restore(run)
    assert trained.is_unnamed == (training == "records")
    wanted = None
    for data in (bare, records(tmp_path / "named.rec", named=True), folder(tmp_path / "val", NUMBERS)):
        said: list[str] = []
        opened = open_evaluation_data(trained, data, say=said.append)
        labels = opened.records.labels.astype(np.int64)
        outputs = (labels if opened.outputs is None else opened.outputs[labels]).tolist()
        opened.records.close()
        wanted = wanted or outputs
        assert outputs == wanted, data
        result = evaluate(trained, data, say=said.append)
        assert (result.n, result.top1) == (evaluated.n, evaluated.top1), data


def test_records_without_names_are_places_of_a_model_and_this_is_said(tmp_path: Path) -> None:
    run = Run.create(tmp_path / "run", recipe_for(folder(tmp_path / "train", NUMBERS)))
    train(run)
    trained, said = restore(run), list[str]()
    opened = open_evaluation_data(trained, records(tmp_path / "val.rec"), say=said.append)
    assert opened.outputs is not None and opened.outputs.tolist() == list(range(12))
    assert opened.matched == {"number": 12}
    assert any("its labels are places in the class list of the model" in line for line in said)
    opened.records.close()
    with pytest.raises(DataError, match="has label 11, and mlp has 11 classes"):
        open_evaluation_data(replace(trained, classes=trained.classes[:11]), tmp_path / "val.rec", say=said.append)


def test_packing_unnamed_records_with_a_card_keeps_their_places(tmp_path: Path) -> None:
    pack(folder(tmp_path / "images", NUMBERS), tmp_path / "card")
    [packed] = pack(records(tmp_path / "a.rec"), tmp_path / "b", classes=tmp_path / "card.json")
    card = card_of(packed.path)
    assert card is not None and card.classes == tuple(SORTED)
    assert json.loads(packed.path.with_suffix(".json").read_text())["counts"] == [2] * 12
    opened = sets(tmp_path / "card.rec", packed.path)
    require_right(opened)


@pytest.mark.parametrize("packed", [False, True])
def test_labels_of_a_validation_table_are_in_the_column_of_the_training_tables(tmp_path: Path, packed: bool) -> None:
    folder(tmp_path / "images", ["0", "1", "2"])
    rows = [f"images/{name}/1.png" for name in "012"]
    (tmp_path / "train.csv").write_text("image,breed\n" + "".join(f"{path},{path[7]}\n" for path in rows))
    (tmp_path / "val.csv").write_text(
        "image,label,breed\n" + "".join(f"{path},{2 - int(path[7])},{path[7]}\n" for path in rows)
    )
    (tmp_path / "patients.csv").write_text("image,patient\n" + "".join(f"{path},{2 - int(path[7])}\n" for path in rows))
    training = tmp_path / "train.csv"
    if packed:
        [(training, _)] = pack(training, tmp_path / "out")
    require_right(sets(training, tmp_path / "val.csv"))
    with pytest.raises(
        DataError, match=r"patients\.csv: no column 'breed', which holds the labels of the training set"
    ):
        sets(training, tmp_path / "patients.csv")


def test_a_packed_list_of_one_class_is_not_trained_on(tmp_path: Path) -> None:
    folder(tmp_path / "images", ["0"])
    (tmp_path / "a.lst").write_text("0\t1\timages/0/1.png\n1\t1\timages/0/2.png\n")
    [(packed, _)] = pack(tmp_path / "a.lst", tmp_path / "out")
    for source in (packed, tmp_path / "a.lst"):
        with pytest.raises(DataError, match=rf"{source.name} has images of 1 class \(1\): a classifier needs at least"):
            open_data(recipe_for(source).data, seed=0)
