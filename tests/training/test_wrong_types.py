"""An object where a name belongs is refused in one line with what to type; results print in one line."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import steadytrain as st

ARRAY: Any = np.zeros((4, 8, 8, 3), np.uint8)
TABLE: Any = type("DataFrame", (), {"to_csv": None})()


@pytest.mark.parametrize("use", [st.finetune, st.train, st.default_recipe, lambda data: st.pack(data, "out.rec")])
@pytest.mark.parametrize("data", [3, None, iter([])])
def test_what_is_no_data_is_refused_with_what_is(use: Callable[[Any], object], data: Any) -> None:
    with pytest.raises(
        st.SteadyError,
        match=r"the data are .*(; they must be|, and this takes) the name of a folder or a file(, or in mem|: save)",
    ):
        use(data)


@pytest.mark.parametrize("use", [st.train, st.evaluate, st.restore, st.diagnose, st.ledger, st.bill, st.calibrate])
def test_what_is_no_run_is_refused_with_what_is(use: Callable[[Any], object], tmp_path: Path) -> None:
    run = st.Run(tmp_path, None)  # type: ignore[arg-type]
    with pytest.raises(st.SteadyError, match=r"a SimpleNamespace is not a run: its \.run is"):
        use(SimpleNamespace(run=run))
    if use is not st.train:  # which takes data as well
        with pytest.raises(st.SteadyError, match="a DataFrame is not a run: name its folder"):
            use(TABLE)


def test_a_folder_that_is_no_run_is_taken_for_data(tmp_path: Path) -> None:
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    with pytest.raises(st.SteadyError, match=r"no recipe\.json; to train on images in it: st.finetune\(.*photos"):
        st.evaluate(tmp_path / "photos")
    with pytest.raises(st.SteadyError, match="photos"):
        st.train(tmp_path / "photos")
    with pytest.raises(st.SteadyError, match="runs/a does not exist"):
        st.train("runs/a")


def test_a_recipe_is_no_run_and_a_dict_is_no_recipe(tmp_path: Path) -> None:
    recipe = st.Recipe(data=st.Data(train="a.rec"), model=st.Model("mlp"), budget=st.Budget(epochs=1))
    with pytest.raises(st.SteadyError, match=r"a Recipe is not a run: st\.Run\.create"):
        st.train(recipe)
    wrong: Any = {"budget.epochs": 1}
    with pytest.raises(st.SteadyError, match="the recipe is a dict"):
        st.Run.create(tmp_path / "a", wrong)
    assert not (tmp_path / "a").exists()
    wrong = "budget.epochs=1"
    with pytest.raises(st.SteadyError, match=r"changes is 'budget.epochs=1'; it must be a table or nothing"):
        st.default_recipe(tmp_path, wrong)


def test_repeats_are_of_a_recipe_and_some_number(tmp_path: Path) -> None:
    recipe = st.Recipe(data=st.Data(train="a.rec"), model=st.Model("mlp"), budget=st.Budget(epochs=1))
    run: Any = st.Run.create(tmp_path / "a", recipe)
    with pytest.raises(st.SteadyError, match=r"the recipe is a Run; it must be a Recipe: its \.recipe is one"):
        st.repeat(run, run=tmp_path / "b")
    wrong: Any = "3"
    with pytest.raises(st.SteadyError, match="number is '3'; it must be a whole number"):
        st.repeat(recipe, wrong, run=tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_how_many_classes_are_predicted_is_a_whole_number() -> None:
    wrong: Any = "5"
    for top, said in ((wrong, "top is '5'; it must be a whole number or nothing"), (0, "top=0: it must be at least 1")):
        with pytest.raises(st.SteadyError, match=said):
            list(st.predict("run", "1.png", top=top))


@pytest.mark.parametrize("images", [3, None, {"a": 1}.items()])
def test_what_is_no_image_is_refused(images: Any) -> None:
    from steadytrain.training.inference.inference import Files

    with pytest.raises(st.SteadyError, match=r"an image is .*; it must be a PIL image, an array"):
        Files(images)


def test_best_and_last_are_the_weights_that_there_are(tmp_path: Path) -> None:
    wrong: Any = "bst"
    with pytest.raises(st.SteadyError, match=r"which is 'bst'; it must be 'best' or 'last'. Did you mean best"):
        st.restore(tmp_path, which=wrong)


def test_a_report_on_no_runs_is_refused(tmp_path: Path) -> None:
    wrong: list[Any] = [[], None]
    for runs in wrong:
        with pytest.raises(st.SteadyError, match="name a run, or several"):
            st.report(runs, tmp_path / "report.html")


def test_a_name_that_is_not_there_has_python_look_for_a_near_one() -> None:
    with pytest.raises(AttributeError) as caught:
        st.fine_tune  # noqa: B018
    assert (caught.value.name, caught.value.obj) == ("fine_tune", st)
    assert "st.finetune(" in (st.__doc__ or "")


def test_an_evaluation_prints_without_its_arrays() -> None:
    from steadytrain.training.evaluation import Evaluation

    found = Evaluation(n=1, loss=0.5, top1=1.0, top5=None, right=(1,), total=(1,), outputs=np.zeros((1, 4), np.float32))
    assert "array" not in repr(found)


@pytest.mark.parametrize(
    ("use", "arguments", "words"),
    [
        (st.pack, {"only": "ab"}, "only is 'ab'; it must be a list of strings"),
        (st.pack, {"exclude": Path("ab")}, "exclude is .*'ab'.*; it must be a list of strings"),
        (st.pack, {"out": None}, "out is None; it must be a string or a path"),
        (st.pack, {"seed": "one"}, "seed is 'one'; it must be a whole number"),
        (st.pack, {"seed": float("nan")}, "seed is nan; it must be a whole number"),
        (st.pack, {"grey": "no"}, "grey is 'no'; it must be true or false"),
        (st.pack, {"subsampling": "4:4:4"}, "subsampling is '4:4:4'; it must be '420' or '444'"),
        (st.pack, {"encoding": "jpeg"}, "encoding is 'jpeg'.*Did you mean jpg"),
        (st.pack, {"val_fraction": "0.1"}, "val_fraction is '0.1'; it must be a number or nothing"),
        (st.pack, {"label_column": 3}, "label_column is 3; it must be a string or a list of strings or nothing"),
        (st.pack, {"root": b"photos"}, "root is b'photos'; it must be a string or a path or nothing"),
        (st.evaluate, {"restrict": "no"}, "restrict is 'no'; it must be true or false"),
        (st.predict, {"images": "a.png", "threads": 1.5}, "threads is 1.5; it must be a whole number or nothing"),
        (st.train, {"progress": "no"}, "progress is 'no'; it must be true or false or nothing"),
        (st.report, {"output": "a.html", "target": "90 %"}, "target is '90 %'; it must be a number or nothing"),
        (st.export_model, {"output": "a.onnx", "numbers": "half"}, "numbers is 'half'; it must be 'fp32' or"),
        (st.Unpacked.open, {"split": "valid"}, "split is 'valid'; it must be 'train' or 'val' or 'test'"),
    ],
)
def test_an_argument_of_another_type_is_refused_by_name(
    use: Callable[..., object], arguments: dict[str, Any], words: str, tmp_path: Path
) -> None:
    arguments = {"out": tmp_path / "out"} | arguments if use is st.pack else arguments
    with pytest.raises(st.SteadyError, match=words):
        use(tmp_path, **arguments)
    assert not list(tmp_path.iterdir())


def test_numbers_and_lists_of_numpy_are_those_of_python(tmp_path: Path) -> None:
    for label in "abc":
        (tmp_path / "photos" / label).mkdir(parents=True)
        for number in range(4):
            Image.new("RGB", (8, 8), (10 * number, 0, 0)).save(tmp_path / "photos" / label / f"{number}.png")
    use: Any = st.pack
    both = np.array(["a", "c"])
    for number, only in enumerate((["a", "c"], ("a", "c"), {"a", "c"}, (name for name in "ac"), both)):
        (file,) = use(tmp_path / "photos", tmp_path / f"{number}", only=only, seed=np.int64(1), grey=np.bool_(True))
        assert file.card.classes == ("a", "c") and file.card.channels == 1
    wrong: dict[str, Any] = {"lr": np.float32(0.5), "nesterov": np.bool_(False), "betas": [np.float64(0.5), 0.9]}
    optim = st.Optim("adam", **wrong)
    wrong = {"batch_size": np.int64(8)}
    assert optim == st.Optim("adam", lr=0.5, nesterov=False, betas=(0.5, 0.9))
    assert all(type(value) in (float, bool) for value in (optim.lr, optim.nesterov, *optim.betas))
    data = st.Data(train="a", mean=np.array([0.25, 0.5, 0.25]), label_column=["a", "b"], pad=torch.tensor(2))  # type: ignore[arg-type]
    assert (data.mean, data.label_column, data.pad) == ((0.25, 0.5, 0.25), ("a", "b"), 2)
    recipe = st.Recipe(data=data, model=st.Model("mlp"), budget=st.Budget(epochs=1), batch_size=wrong["batch_size"])
    changed = recipe.with_({"optim.lr": np.float32(0.5), "data.mean": np.array([0.5])})
    assert (changed.optim.lr, changed.data.mean) == (0.5, (0.5,))
    assert st.Recipe.from_json(changed.to_json()) == changed


def test_what_is_public_can_be_sent_to_another_process() -> None:
    assert pickle.loads(pickle.dumps(st.pack)) is st.pack is st.pack
