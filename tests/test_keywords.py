"""Keywords of Python: they are the command's flags and the transforms, and nothing is taken twice or unknown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import steadytrain as st
from steadytrain.cli.options import TrainingOptions
from steadytrain.config.keywords import FLAGS, RecipeKeywords, keyword_hint, keyword_values
from steadytrain.config.transforms import KINDS
from steadytrain.errors import RecipeError


def test_the_typed_keywords_are_the_flags_and_the_transforms() -> None:
    assert {*RecipeKeywords.__annotations__, "model"} == {*FLAGS, *KINDS}


@pytest.mark.parametrize(
    ("keywords", "typed"),
    [
        ({"epochs": 5, "lr": 1e-3, "batch_size": 32}, {"epochs": 5, "lr": 1e-3, "batch_size": 32}),
        ({"compile": True, "ema": 0.9}, {"compile": True, "ema": 0.9}),
        ({"weights": "a.pth", "label_column": "dx"}, {"weights": "a.pth", "label_column": ("dx",)}),
        ({"mixup": 0.2, "randaugment": (2, 9), "vflip": True}, {"transforms": "mixup:0.2,randaugment:2,9,vflip"}),
        ({"transforms": ["mixup:0.2"], "erase": 0.1}, {"transforms": "mixup:0.2,erase:0.1"}),
    ],
)
def test_keywords_set_what_the_flags_of_a_command_set(keywords: dict[str, Any], typed: dict[str, Any]) -> None:
    assert keyword_values(keywords, None, function="finetune") == TrainingOptions(flags=typed).changes


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("learning_rate", " Did you mean lr?"),
        ("wd", " Did you mean weight_decay?"),
        ("num_epochs", " Did you mean epochs?"),
        ("bs", " Did you mean batch_size?"),
        ("batchsize", " Did you mean batch_size or size?"),
        ("optim.lr", " Did you mean lr?"),
        ("clip_norm", " It has no flag: {'optim.clip_norm': VALUE} sets it."),
        (
            "callbacks",
            " Instead: st.finetune(DATA, on_event=FUNCTION) in Python sees each event, stops the run or sets its rate",
        ),
        ("progres", " Did you mean progress or procs?"),
    ],
)
def test_unknown_keywords_are_told_what_they_are_here(word: str, hint: str) -> None:
    assert keyword_hint(word, ["progress", "run"]).startswith(hint)
    with pytest.raises(RecipeError, match=f"finetune\\(\\) has no keyword {word}"):
        st.finetune("photos", **{word: 1})  # type: ignore[arg-type]


def test_one_setting_is_given_once() -> None:
    with pytest.raises(RecipeError, match=r"epochs= and 'budget\.epochs' of the mapping are the same setting"):
        st.default_recipe("photos", {"budget.epochs": 3}, epochs=3)
    with pytest.raises(RecipeError, match=r"mixup= and 'data\.transforms'"):
        st.finetune("photos", {"data.transforms": []}, mixup=0.2)
    with pytest.raises(RecipeError, match=r"model= and 'model\.name'"):
        st.train("photos", {"model.name": "resnet20"}, model="resnet20")


def test_what_only_a_command_does_is_refused() -> None:
    with pytest.raises(RecipeError, match="batch_size is 'auto', which the command measures"):
        st.finetune("photos", batch_size="auto")  # type: ignore[arg-type]
    with pytest.raises(RecipeError, match="--procs N"):
        st.train("photos", procs=2)


@pytest.mark.slow
def test_type_checkers_know_the_keywords(tmp_path: Path) -> None:
    lines = ["import steadytrain as st", "st.finetune(data='photos', epochs=5, lr=1e-3, mixup=0.2, val=[1])"]
    (tmp_path / "a.py").write_text("\n".join([*lines, "st.train('photos', epoch=5)", "st.steps('a', lr='1')"]))
    checked = subprocess.run([sys.executable, "-m", "mypy", "a.py"], cwd=tmp_path, capture_output=True, text=True)
    assert [line.split(":")[1] for line in checked.stdout.splitlines() if ": error:" in line] == ["3", "4"]
