"""``--device mps``: how it is chosen, and what it refuses. Nothing here computes on a Mac's GPU."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from steadytrain.config import Precision
from steadytrain.distributed.world import World
from steadytrain.errors import RecipeError
from steadytrain.training import default_recipe
from steadytrain.training.device import choose_device, prepare_device
from steadytrain.training.precision import Policy, exact

MPS = {"parallel.device": "mps", "model.name": "digits", "batch_size": 8, "budget.epochs": 2}


def test_where_there_is_no_mac_the_remedy_is_told() -> None:
    with pytest.raises(RecipeError, match="sees no GPU of a Mac: use --device auto or cpu"):
        choose_device("mps")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"precision.name": "bf16"}, "precision.name=bf16 (use fp32)"),
        ({"precision.compile": "default"}, "precision.compile"),
        ({"parallel.deterministic": True}, "parallel.deterministic"),
    ],
)
def test_what_a_mac_does_not_do_is_refused_by_name(
    changes: dict[str, Any], what: str, digits_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    recipe = default_recipe(digits_folder, {**MPS, **changes})
    with pytest.raises(RecipeError, match=re.escape(what)):
        prepare_device(recipe)


def test_several_ranks_are_refused_there(digits_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(RecipeError, match="several ranks"):
        prepare_device(default_recipe(digits_folder, MPS), World(rank=0, size=2))


def test_its_numbers_are_fp32_in_rows(digits_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    recipe = default_recipe(digits_folder, MPS)
    assert recipe.precision.name == "fp32" and prepare_device(recipe) == torch.device("mps", 0)
    assert not Policy(Precision("fp32"), torch.device("mps")).channels_last
    assert exact(torch.ones(2)).dtype == torch.float64
