"""A small real data set: scans of handwritten digits that scikit-learn's wheel carries."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from steadytrain.config import Budget, Data, Every, Model, Optim, Parallel, Recipe


def _write_digits(folder: Path, count: int, classes: int = 10) -> Path:
    """The first ``count`` scans of the first ``classes`` digits, as grey PNG files in a folder for each digit."""
    import numpy as np  # here, so that tests which need no digits start without it
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    chosen = [i for i in range(len(digits.target)) if digits.target[i] < classes][:count]
    for i in chosen:
        place = folder / str(digits.target[i])
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.round(digits.images[i] * (255 / 16)).astype(np.uint8)).save(place / f"{i:04d}.png")
    return folder


@pytest.fixture
def write_digits() -> Callable[[Path, int, int], Path]:
    """``write_digits(folder, count, classes)``: other choices of the same scans."""
    return _write_digits


@pytest.fixture(scope="session")
def digits_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 digits, a folder for each class."""
    return _write_digits(tmp_path_factory.mktemp("digits") / "images", 400)


@pytest.fixture(scope="session")
def digits(digits_folder: Path) -> Path:
    """The same, packed: ``digits.rec``."""
    from steadytrain.data.packing.pack import pack

    pack(digits_folder, digits_folder.parent / "digits")
    return digits_folder.parent / "digits.rec"


@pytest.fixture(scope="session")
def labelled_digits(digits_folder: Path) -> Path:
    """A table of the same images with several labels each, or none: whether the digit is even, round, above 4."""
    lines = ["path,labels"]
    for path in sorted(digits_folder.glob("*/*.png")):
        digit = int(path.parent.name)
        has = {"even": digit % 2 == 0, "large": digit > 4, "round": digit in (0, 6, 8, 9)}
        lines.append(f"{path.relative_to(digits_folder)},{';'.join(name for name, value in has.items() if value)}")
    table = digits_folder / "labels.csv"
    table.write_text("\n".join(lines) + "\n")
    return table


@pytest.fixture
def labels_recipe(recipe: Recipe, labelled_digits: Path) -> Recipe:
    """The recipe of ``recipe`` for images that may have several labels, for twice as long."""
    return recipe.with_({"data.train": str(labelled_digits), "budget.epochs": 4})


@pytest.fixture(scope="session")
def recipe(digits: Path) -> Recipe:
    """Twenty steps in a second: 320 images in batches of 32, validated twice."""
    return Recipe(
        data=Data(train=str(digits), holdout=0.2, pad=1),
        model=Model("digits"),
        optim=Optim("sgd", lr=0.05),
        budget=Budget(epochs=2),
        parallel=Parallel(device="cpu", threads=2, compute_threads=1),
        every=Every(log_steps=5),
        batch_size=32,
    )


@pytest.fixture(scope="session")
def trained_weights(recipe: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weights of a network that was trained on these digits for 4 epochs, to start others from."""
    from steadytrain.run import Run
    from steadytrain.training import train

    run = Run.create(tmp_path_factory.mktemp("start") / "run", recipe.with_({"budget.epochs": 4}))
    return train(run).run.weights


@pytest.fixture(scope="session")
def from_resnet20(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe from the weights of a ResNet-20 of these digits, which takes images of any size."""
    from steadytrain.run import Run
    from steadytrain.training import train

    recipe = Recipe(
        data=Data(train=str(digits), holdout=0.2, pad=1),
        model=Model("resnet20"),
        optim=Optim("sgd", lr=0.05),
        budget=Budget(epochs=1),
        parallel=Parallel(device="cpu", threads=1, compute_threads=1),
        batch_size=32,
    )
    run = Run.create(tmp_path_factory.mktemp("resnet20") / "run", recipe)
    return recipe.with_({"model.weights": str(train(run).run.weights)})


@pytest.fixture
def weights() -> Callable[[Path], bytes]:
    """The bytes of a run's final weights, header (which names the digest) left out."""

    def read(run: Path) -> bytes:
        content = (run / "model.safetensors").read_bytes()
        return content[8 + int.from_bytes(content[:8], "little") :]

    return read


@pytest.fixture
def write_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], Path]:
    """Write a module of the user's own where imports find it."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(name: str, text: str) -> Path:
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        return path

    return write
