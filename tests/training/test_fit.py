"""How images that are not square become square: decided by the images, kept by the run, followed by all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import steadytrain as st
from steadytrain.cli import main
from steadytrain.events import Noticed, Started, Step

CLASSES = {"red": (220, 30, 30), "green": (30, 220, 30), "blue": (30, 30, 220)}
CHANGES = {"model.name": "mlp", "data.size": 16, "budget.epochs": 15, "parallel.device": "cpu", "batch_size": 8}
CHANGES |= {"precision.name": "fp32", "parallel.threads": 1}


def write_images(folder: Path, *, width: int, height: int, count: int = 10, seed: int = 0) -> Path:
    """Grey images whose class shows in a tenth of their longer side, at one of both ends."""
    rng = np.random.default_rng(seed)
    for name, colour in CLASSES.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = rng.integers(90, 160, (height, width, 3), dtype=np.uint8)
            turned = pixels if width >= height else pixels.transpose(1, 0, 2)
            end = max(turned.shape[1] // 10, 1)
            turned[:, slice(None, end) if number % 2 else slice(-end, None)] = colour
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


def begun(run: st.Run) -> Started:
    return next(event for event in run.events() if isinstance(event, Started))


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("size", [{"width": 160, "height": 32}, {"width": 24, "height": 96}], ids=str)
def test_long_images_are_seen_whole_and_all_that_follows_does_the_same(size: dict[str, int]) -> None:
    train = write_images(Path("train"), **size)
    write_images(Path("val"), **size, seed=1)
    changes = {**CHANGES, "data.val": "val", "data.augment": "none"}
    recipe = st.default_recipe(train, changes)
    assert recipe.data.fit is None, "the choice is left to the images"
    outcome = st.train(st.Run.create("run", recipe))
    about = begun(outcome.run)
    assert (about.model["input"]["fit"], about.model["input"]["crop"], about.model["unseen"]) == ("squash", 1.0, 0)
    assert st.evaluate(outcome.run).top1 == 1
    trained = st.restore(outcome.run, device="cpu")
    st.export_model(trained, "model.safetensors")
    st.export_model(trained, "model.onnx")
    files = sorted(Path("val").rglob("*.png"))
    for place in ("run", "model.safetensors", "model.onnx"):
        answers = [answer.classes[0] for answer in st.predict(place, files)]
        assert answers == [file.parent.name for file in files], place
    cropped = st.train(st.Run.create("cropped", recipe.with_({"data.fit": "crop"})))
    unseen = 1 - min(size.values()) / max(size.values())
    assert st.evaluate(cropped.run).top1 < 0.7 and begun(cropped.run).model["unseen"] == pytest.approx(unseen, abs=0.01)


def test_padded_images_are_seen_whole_and_keep_their_proportions() -> None:
    train = write_images(Path("train"), width=160, height=32)
    changes = {**CHANGES, "data.fit": "pad", "data.size": 32, "data.augment": "none", "data.holdout": 0.3}
    outcome = st.train(st.Run.create("run", st.default_recipe(train, changes)))
    assert begun(outcome.run).model["input"]["fit"] == "pad" and st.evaluate(outcome.run).top1 == 1


@pytest.mark.parametrize("size", [(64, 64), (120, 80), (160, 80), (80, 160)], ids=str)
def test_ordinary_photographs_are_cropped_by_a_recipe_of_the_same_digest(size: tuple[int, int]) -> None:
    train = write_images(Path("train"), width=size[0], height=size[1], count=4)
    recipe = st.default_recipe(train, {**CHANGES, "budget.epochs": 1, "data.size": 72})
    about = begun(st.train(st.Run.create("run", recipe)).run).model
    share = (63 / 72) ** 2 * min(size) / max(size)
    assert about["input"]["fit"] == "crop" and about["unseen"] == pytest.approx(1 - share, abs=0.02)
    stored = json.loads(Path("run", "recipe.json").read_text())
    assert stored["data"].pop("fit") is None
    assert st.Recipe.from_dict(stored).digest == recipe.digest, "as that of a version without the key"
    assert recipe.with_({"data.fit": "squash"}).digest != recipe.digest


def test_a_run_that_began_before_images_were_squashed_goes_on_with_crops() -> None:
    recipe = st.default_recipe(write_images(Path("train"), width=160, height=32), {**CHANGES, "every.save_steps": 3})
    run = st.Run.create("run", recipe)
    events: Any = st.steps(run)
    next(event for event in events if isinstance(event, Step) and event.step == 7)
    events.close()
    text = run.log_path().read_text()
    old = text.replace(',"fit":"squash"', "").replace('"crop":1.0', '"crop":0.875')
    assert old != text
    run.log_path().write_text(old)
    resumed = list(st.steps(run))
    assert any("as when this run began" in event.message for event in resumed if isinstance(event, Noticed))
    values = next(event for event in resumed if isinstance(event, Started)).model["input"]
    assert (values["fit"], values["crop"]) == ("crop", 0.875)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ([], "evaluated: whole image, squashed, as most are longer than 2:1 (--fit pad keeps"),
        (["--fit", "pad"], "evaluated: whole image, padded"),
        (["--letterbox"], "evaluated: whole image, padded"),
        (["--crop-mode", "center"], "evaluated: centre, 80 % of the pixels are never seen"),
        (
            ["--set", "data.crop=0.5"],
            "evaluated: centre, 0.5 of each side, squashed, 75 % never seen",
        ),
    ],
)
def test_the_head_says_what_is_never_seen(options: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_images(Path("train"), width=160, height=32)
    assert main(["train", "train", "--model", "mlp", "--size", "16", "--explain", "--device", "cpu", *options]) == 0
    assert words in " ".join(capsys.readouterr().out.split())


def test_the_head_names_the_remedy_where_more_than_half_is_never_seen(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model", "mlp", "--size", "72", "--explain", "--device", "cpu"]
    for width, has_remedy in ((120, False), (150, True)):
        write_images(Path(f"photos{width}"), width=width, height=80, count=4)
        assert main(["train", f"photos{width}", *words]) == 0
        head = " ".join(capsys.readouterr().out.split())
        assert " never seen" in head
        assert ("are never seen; --fit squash or --fit pad shows all" in head) == has_remedy


def test_a_few_long_images_do_not_change_the_fit_of_the_others() -> None:
    train = write_images(Path("train"), width=90, height=80, count=6)
    write_images(Path("long"), width=400, height=80, count=2)
    for number, file in enumerate(sorted(Path("long").rglob("*.png"))):
        file.rename(train / file.parent.name / f"long{number}.png")
    recipe = st.default_recipe(train, {**CHANGES, "budget.epochs": 1})
    values: dict[str, Any] = dict(begun(st.train(st.Run.create("run", recipe)).run).model)
    assert values["input"]["fit"] == "crop" and values["unseen"] > 0.2
