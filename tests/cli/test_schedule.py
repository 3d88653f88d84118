"""``steady schedule``: what a recipe will do, from a file, a run, data or a number of images."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from steadytrain.cli import main
from steadytrain.config import Recipe
from steadytrain.errors import InputError
from steadytrain.events import Step
from steadytrain.reports.plots import Panel, svg
from steadytrain.run import Run
from steadytrain.training import train

SVG = "{http://www.w3.org/2000/svg}"


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["schedule", *words, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_it_shows_the_rates_and_momenta_that_a_run_had(
    recipe: Recipe, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Run.create(tmp_path / "run", recipe.with_({"optim.schedule": "one-cycle:1.5,to=0.1 linear"}))
    train(run)
    capsys.readouterr()
    document = shown(capsys, str(run.directory))
    assert document["num_train"] == 320 and document["steps"] == 20
    trained = [event.lr for event in run.events() if isinstance(event, Step)]
    assert [moment["lr"] for moment in document["moments"]] == trained
    assert [moment["momentum"] for moment in document["moments"]][4] == pytest.approx(0.85, abs=0.002)
    assert document["moments"][15]["event"] == "linear begins"


def test_data_a_recipe_file_and_a_number_of_images_show_the_same(
    recipe: Recipe, digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--batch-size", "32", "--schedule", "step", "--set", "optim.milestones=[2,3]", "--epochs", "4"]
    flags += ["--size", "8", "--holdout", "0.2"]
    file = tmp_path / "recipe.json"
    file.write_text(recipe.with_({"optim.schedule": "step", "optim.milestones": [2, 3], "budget.epochs": 4}).to_json())
    from_data = shown(capsys, str(digits), *flags)
    from_number = shown(capsys, "--num-train", "320", *flags)
    from_file = shown(capsys, str(file))
    rates = [
        [moment["lr"] / document["peak"] for moment in document["moments"]]
        for document in (from_data, from_number, shown(capsys, str(file), "--warmup-epochs", "0.5"))
    ]
    assert from_data == from_number and rates[0] == pytest.approx(rates[2])
    assert from_file["words"] == "no warm-up, x 0.1 at epochs 2, 3"
    assert [row["update"] for row in from_file["moments"] if row["event"] == "x 0.1"] == [21, 31]


@pytest.mark.parametrize("suffix", ["svg", "html"])
def test_a_picture_has_the_curves_and_needs_no_network(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"plot.{suffix}"
    words = ["schedule", "--num-train", "50000", "--schedule", "cosine:80,to=0.1 constant", "-o", str(file)]
    assert main(words) == 0
    assert main(words) == 0  # it replaces its own
    output = capsys.readouterr().out
    assert re.search(r"85 +33,205 +0\.005 +0\.9 +128 +## +constant begins", output)
    text = file.read_text()
    picture = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    assert [title.text for title in picture.iter(f"{SVG}text") if title.get("class") == "title"] == [
        "learning rate",
        "momentum",
        "images an update",
    ]
    assert len(list(picture.iter(f"{SVG}polyline"))) == 3
    assert not re.findall(r'(?:src|href)="', text) and "<script" not in text
    file.write_text("mine")
    assert main(words) == 2 and "add --force to replace it" in capsys.readouterr().err


def test_a_curve_is_drawn_where_its_values_are() -> None:
    panel = Panel("loss", [1e-4, 1e-2, 1.0], [[3.0, 1.0, float("nan")]], "rate", log_x=True, from_zero=False)
    drawn = ElementTree.fromstring(svg([panel], title="x"))
    [line] = drawn.iter(f"{SVG}polyline")
    points = [tuple(map(float, point.split(","))) for point in line.get("points", "").split()]
    assert points == [(76, 30), (458, 180)]  # from the left above to the middle below; what is not finite is left out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--num-train", "100", "-o", "plot.png"], "plot.png ends in .png; a plot ends in .svg or .html"),
        ([], "name the data, or how many images there are to train on: --num-train 50000"),
        (["--num-train", "0"], "--num-train is 0; it must be 1 or more"),
        (["--num-train", "1000", "--schedule", "cosine:80 constant:15", "--epochs", "9"], "shorten a stage, or train"),
        (["--num-train", "1000", "--schedule", "cosin"], "Did you mean cosine?"),
        (["--num-train", "1000", "--t-mult", "2"], "--schedule restarts,every=10,times=2"),
    ],
)
def test_what_cannot_be_shown_says_why(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schedule", *words]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_a_rate_is_found_for_the_network_of_the_weights(
    recipe: Recipe, digits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = train(Run.create(tmp_path / "run", recipe))
    asked: list[Recipe] = []

    def find_rate(recipe: Recipe, **options: Any) -> None:
        asked.append(recipe)
        raise InputError("no need to train")

    monkeypatch.setattr("steadytrain.training.profile.rate_finder.find_rate", find_rate)
    main(["schedule", "--find-lr", str(digits), "--weights", str(result.run.weights), "--size", "8"])
    assert [found.model.name for found in asked] == [recipe.model.name]


def test_it_needs_no_torch_where_the_number_of_images_is_known(tmp_path: Path) -> None:
    line = (
        "import sys; sys.modules['torch'] = None; from steadytrain.cli import main;"
        f" sys.exit(main(['schedule', '--num-train', '50000', '-o', {str(tmp_path / 'plot.svg')!r}]))"
    )
    assert subprocess.run([sys.executable, "-c", line], capture_output=True, check=False).returncode == 0


def test_large_values_beside_an_axis_have_their_thousands_separated() -> None:
    picture = svg(
        [Panel("rate", [1, 2], [[0.0, 50_000.0]], "devices"), Panel("lr", [1, 2], [[0, 0.25]], "x")], title="t"
    )
    assert ">50,000</text>" in picture and ">50000</text>" not in picture and ">0.05</text>" in picture
