"""An optimizer that another package adds: one file; a recipe names it, a run is trained by it and resumes with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from tests.seams.images import write_marks
from tests.seams.product import steady

OPTIMIZER = """
import torch

from steadytrain.optim.optimizers import OptimizerKind


class Slowing(torch.optim.SGD):
    def __init__(self, groups, lr, momentum, divisor=2.0):
        super().__init__(groups, lr=lr / divisor, momentum=momentum)


KIND = OptimizerKind(Slowing, "coupled", ("momentum",))
"""


@pytest.fixture(autouse=True)
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with one file and one entry point."""
    about = tmp_path / "slowing-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: slowing\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[steadytrain.optimizers]\nslow = slowing:KIND\n")
    (tmp_path / "slowing.py").write_text(OPTIMIZER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "slowing", raising=False)
    monkeypatch.chdir(tmp_path)


def train(folder: Path, optimizer: str, *words: str, code: int = 0) -> str:
    """Train for one epoch by an optimizer; return what was said."""
    write_marks(folder / "photos", 40)
    kind = ["--optimizer", optimizer, "--lr", "0.01", "--epochs", "1", "--model", "mlp", "--threads", "1"]
    return steady("train", folder / "photos", *kind, "--run", folder / "run", *words, code=code).err


def test_an_optimizer_in_one_file_trains_a_run(tmp_path: Path) -> None:
    train(tmp_path, "slow", "--set", "optim.options.divisor=4")
    recipe = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert recipe["optim"]["name"] == "slow" and recipe["optim"]["options"] == {"divisor": 4}
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_its_name_and_its_options_are_checked_like_ours(tmp_path: Path) -> None:
    assert "Did you mean slow?" in train(tmp_path, "slov", code=2)
    error = train(tmp_path, "slow", "--set", "optim.options.divsor=4", code=2)
    assert "optim.options divsor=4 is refused" in error and "its options: divisor, momentum" in error


def test_an_optimizer_that_cannot_be_loaded_is_named_and_breaks_no_other(tmp_path: Path) -> None:
    (tmp_path / "slowing.py").write_text("import nothing_of_the_kind\n")
    error = train(tmp_path, "slow", code=2)
    assert "slowing:KIND cannot be loaded" in error and "Traceback" not in error
    train(tmp_path, "sgd")
