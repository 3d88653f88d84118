"""The keys of the recipe as a reference: type, defaults and meaning, from the docstrings and the annotations alone.

>>> row = next(row for row in recipe_keys("optim") if row.key == "optim.lr")
>>> row.train, row.finetune, row.example
('0.1', '0.001', '--set optim.lr=0.1')
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from steadytrain.config.defaults import usual_recipe
from steadytrain.config.plain import leaves, type_words
from steadytrain.config.recipe import Recipe
from steadytrain.errors import RecipeError, did_you_mean

EXAMPLES: dict[str, Any] = {
    "data.train": "photos/",
    "data.val": "val.rec",
    "data.classes": "train.json",
    "data.size": 192,
    "data.grow_size": "128@0,160@6,192@12",
    "data.flip": True,
    "data.transforms": "randaugment:2,9,mixup:0.2",
    "data.crop": 0.95,
    "data.interpolation": "bicubic",
    "data.mean": [0.5, 0.5, 0.5],
    "data.std": [0.25, 0.25, 0.25],
    "data.root": "images/",
    "data.labels": "labels.csv",
    "data.path_column": "filename",
    "data.label_column": "diagnosis",
    "data.split_column": "fold",
    "model.weights": "resnet50.safetensors",
    "model.freeze": "conv_stem,blocks.0",
    "model.options.drop_rate": 0.1,
    "optim.options.batch_scale": 4,
    "optim.base_batch_size": 256,
    "optim.milestones": [30, 60, 80],
    "optim.warmup": "power:2",
    "optim.clip_norm": 1,
    "optim.ema": 0.999,
    "optim.swa": 0.75,
    "optim.grow_batch": "2@30,2@60",
    "budget.steps": 10000,
    "budget.patience": 3,
    "budget.minutes": 60,
    "parallel.threads": 4,
    "parallel.compute_threads": 8,
    "parallel.procs": "auto",
    "parallel.price": "p3.2xlarge@us-east-1",
    "every.save_steps": 500,
    "every.save_minutes": 10,
    "every.upload": "s3://bucket/runs/a",
    "every.notices": "auto",
    "every.skip": [120],
    "every.slower": [120],
}
"""Of keys whose default is nothing."""

WORKED_OUT = {
    "data.train": ("required", "required"),
    "model.name": (
        "timm/resnet50; resnet20 for images up to 64 pixels",
        "a small one whose weights are on this machine, else timm/mobilenetv3_large_100",
    ),
    "budget.epochs": ("90; 30 for images up to 64 pixels", "8"),
    "batch_size": (
        "128 on each GPU; at most a tenth of the images, but at least 2",
        "16 on each GPU; at most a tenth of the images, but at least 2",
    ),
    "optim.warmup_epochs": ("5; 0.5 for images up to 64 pixels; at most a quarter of the run", "0.5"),
    "optim.base_batch_size": ("256; 128 for images up to 64 pixels", "none"),
    "optim.weight_decay": ("5e-05; 0.0005 for images up to 64 pixels", "0.05"),
    "optim.label_smoothing": ("0.1; 0 for images up to 64 pixels", "0.1"),
    "precision.name": ("bf16 where the hardware computes in it, else fp32",) * 2,
}
"""Defaults that depend on the data or on the machine, of ``train`` and of ``finetune``."""


@dataclass(frozen=True)
class RecipeKey:
    """One key of the recipe, in words: its type, the defaults of ``train`` and ``finetune``, meaning and example."""

    key: str
    type: str
    train: str
    finetune: str
    meaning: str
    example: str


def recipe_keys(part: str = "") -> Iterator[RecipeKey]:
    """Yield every key of a part of the recipe, or of all of it.

    Raises:
        RecipeError: there is no such part.
    """
    parts = {name: hint for name, hint in get_type_hints(Recipe).items() if is_dataclass(hint)}
    if part and part not in parts:
        raise RecipeError(f"the recipe has no part {part!r}: it has {', '.join(parts)}.{did_you_mean(part, parts)}")
    train, finetune = (
        dict(leaves(usual_recipe("DATA", finetune=finetune, small=False).to_dict())) for finetune in (False, True)
    )
    for name, kind in parts.items():
        if part in ("", name):
            yield from _keys_of(kind, f"{name}.", train, finetune)
    if not part:
        yield from _keys_of(Recipe, "", train, finetune)


def _keys_of(kind: Any, prefix: str, train: dict[str, Any], finetune: dict[str, Any]) -> Iterator[RecipeKey]:
    meanings, hints = _meanings(kind), get_type_hints(kind)
    for field in fields(kind):
        key, hint = prefix + field.name, hints[field.name]
        if is_dataclass(hint) or not field.metadata.get("plain", True):
            continue
        usual = WORKED_OUT.get(key, (_words(train.get(key)), _words(finetune.get(key))))
        shown = next((example for example in EXAMPLES if example.startswith(f"{key}.")), key)
        value = EXAMPLES.get(shown, train.get(key))
        text = _words(value).replace(", ", ",")
        yield RecipeKey(key, type_words(hint), *usual, meanings[field.name], f"--set {shown}={text}")


def _meanings(kind: Any) -> dict[str, str]:
    """Read the arguments that a docstring explains."""
    text = inspect.getdoc(kind) or ""
    entries = re.findall(r"^    (\w+): (.*(?:\n        .*)*)", text.partition("Args:\n")[2], re.MULTILINE)
    plain = {name: " ".join(words.split()).replace("``", "") for name, words in entries}
    return {name: re.sub(r" See :meth:`\w+`.", "", words[:1].upper() + words[1:]) for name, words in plain.items()}


def _words(value: object) -> str:
    if value is None or value in ({}, [], ()):
        return "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        return f"[{', '.join(map(_words, value))}]"
    return value if isinstance(value, str) else json.dumps(value)
