"""A file of weights, read without ever running anything that is in it.

A ``.safetensors`` file holds tensors alone. A ``.pth`` file is a pickle, which can run code: it is read by torch's
restricted reader (``weights_only=True``) and refused where that does not suffice.
"""

from __future__ import annotations

import argparse
import json
import pickle
import re
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from steadytrain.errors import ModelError, first_line
from steadytrain.models.inputs import Input
from steadytrain.models.made import FAULTS

PICKLES = (".pth", ".th", ".pt", ".bin", ".ckpt", ".tar")

_INNER = ("state_dict_ema", "model_ema", "ema", "state_dict", "model_state_dict", "model")
"""Keys under which training scripts keep the weights, those of an average first: they are what was evaluated."""


@dataclass(frozen=True)
class File:
    """What a file holds: ``tensors`` on the CPU, by name; the key of the average if it is one; and what a file of
    steadytrain's own says beside them: the input that they were trained for (None elsewhere), and the licence of
    the weights that they come from (``unknown`` elsewhere)."""

    tensors: dict[str, Tensor]
    averaged: str | None = None
    input: Input | None = None
    licence: str = "unknown"


def read(path: Path) -> File:
    """Read ``.safetensors``, or a pickle of tensors as training scripts write it.

    Raises:
        ModelError: no such file, not a weights file, damaged, or one that would run code.
    """
    if path.is_dir():
        raise ModelError(f"{path} is a folder: name a file in it, such as {path / 'model.safetensors'}")
    if not path.is_file():
        raise ModelError(f"there is no weights file {path}: check --weights")
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in PICKLES:
        return _unwrap(_read_pickle(path), path)
    raise ModelError(f"{path} is no weights file that is known: it must end in .safetensors, .pth, .th or .pt")


def _read_safetensors(path: Path) -> File:
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("steadytrain", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        told = about if isinstance(about, Mapping) else {}
        return File(tensors, None, _input(told.get("input")), str(told.get("licence", "unknown")))
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged or no weights file ({error}): fetch it again") from error


def _input(told: Any) -> Input | None:
    """Raises RecipeError where a value is of another type."""
    if not isinstance(told, Mapping):
        return None
    values = ((f.name, told[f.name]) for f in fields(Input) if f.name in told)
    known: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in values}
    return Input(**known)


def _read_pickle(path: Path) -> object:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm's checkpoints hold their arguments so
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if asked := re.search(r"GLOBAL (\S+)", str(error)):
            raise ModelError(
                f"{path} holds more than weights ({asked[1]}), and reading that can run code hidden in it: where you"
                " trust it, save its state_dict alone (safetensors.torch.save_file) and give that file"
            ) from error
        raise ModelError(f"{path} is damaged or no weights file: fetch it again") from error
    except (*FAULTS, OSError, EOFError, MemoryError, struct.error, zipfile.BadZipFile) as error:
        raise ModelError(f"{path} is damaged or no weights file ({first_line(error)}): fetch it again") from error


def _unwrap(told: object, path: Path) -> File:
    if isinstance(told, Mapping):
        for key in _INNER:
            if tensors := _tensors(told.get(key)):
                return File(tensors, key if "ema" in key else None)
        if tensors := _tensors(told):
            return File(tensors)
    raise ModelError(f"{path} holds no weights: a table of names and tensors is expected")


def _tensors(told: object) -> dict[str, Tensor]:
    if not isinstance(told, Mapping):
        return {}
    return {str(k): v for k, v in told.items() if isinstance(v, Tensor)}
