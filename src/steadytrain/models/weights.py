"""Weights: reading a file of them without running anything that is in it, and loading them into a network.

A ``.safetensors`` file holds tensors alone. A ``.pth`` file is a pickle, which can run code: it is read by torch's
restricted reader (``weights_only=True``) and refused where that does not suffice. Loading accounts for every key; the
classifier stays fresh where the file's is for other classes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from steadytrain.config.plain import check_types
from steadytrain.errors import ModelError, first_line
from steadytrain.interop.mxnet.files import PREFIX, require_content

NETWORK_ERRORS = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError, ArithmeticError)
"""Errors that networks and their constructors raise for options, images and weights that they cannot take."""


@dataclass(frozen=True, kw_only=True)
class Input:
    """The preprocessing that a model's weights were trained for; None where nothing says so.

    Args:
        size: side of the square images in pixels.
        mean, std: of each channel, of values in [0, 1].
        crop: evaluation takes the centre ``crop`` share of the shorter side.
        interpolation: ``bilinear`` or ``bicubic``.
        channels: 1 (grey) or 3 (RGB).
    """

    size: int | None = None
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    crop: float | None = None
    interpolation: str | None = None
    channels: int = 3

    def __post_init__(self) -> None:
        check_types(self, "input")

    def filled(self, size: int, mean: tuple[float, ...], std: tuple[float, ...]) -> Input:
        """A copy without None: these values, a crop of 0.875 and bilinear interpolation where nothing was said.

        >>> Input(size=160, channels=1).filled(224, (0.5,), (0.25,)).size
        160
        """
        return replace(
            self,
            size=self.size or size,
            mean=self.mean or mean,
            std=self.std or std,
            crop=self.crop or 0.875,
            interpolation=self.interpolation or "bilinear",
        )

    def with_channels(self, channels: int) -> Input:
        """A copy for images of another number of channels: a grey image gets the mean of the colours' values.

        >>> Input(mean=(0.4, 0.5, 0.6), std=(0.2, 0.2, 0.2)).with_channels(1).mean
        (0.5,)
        """
        if channels == self.channels:
            return self
        mean, std = (values and (sum(values) / len(values),) * channels for values in (self.mean, self.std))
        return replace(self, mean=mean, std=std, channels=channels)


def find_head(module: nn.Module, num_classes: int) -> tuple[str, ...]:
    """Find the last linear layer or convolution that has ``num_classes`` outputs; empty if there is none."""
    names = [
        name
        for name, part in module.named_modules()
        if name
        and (
            (isinstance(part, nn.Linear) and part.out_features == num_classes)
            or (isinstance(part, nn.Conv2d) and part.out_channels == num_classes)
        )
    ]
    return tuple(names[-1:])


@torch.no_grad()
def reset_head(module: nn.Module, head: tuple[str, ...]) -> None:
    """Draw a classifier that begins almost without an opinion: weights of standard deviation 0.01, biases 0.

    What networks draw for themselves can be meant for training from scratch: timm's MobileNetV2 begins with weights up
    to 0.3 for ten classes, hence a loss of 7 where chance has 2.3, and the first updates tear the body apart (40 % on
    a thousand photographs after six epochs instead of 80 %). Not zero, because some classifiers end in a ReLU.
    """
    for name in head:
        part = module.get_submodule(name)
        if isinstance(part, nn.Linear | nn.Conv2d):
            part.weight.normal_(std=0.01)
            if part.bias is not None:
                part.bias.zero_()


def head_note(before: int | None, now: int) -> str:
    """Return a note on a classifier that was not loaded; ``before`` is None or 0 if there was none."""
    if before:
        return f"the classifier of {before:,} classes was replaced by a fresh one for {now:,}"
    return f"no classifier in it: a fresh one for {now:,}"


def under(name: str, prefixes: Iterable[str]) -> bool:
    """Return whether a parameter or module of this name belongs to one of the modules ``prefixes``.

    >>> under("fc.weight", ["fc"]), under("fc2.weight", ["fc"])
    (True, False)
    """
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


_PREFIXES = ("module.", "_orig_mod.", "model.")
"""Left in the names by DistributedDataParallel, torch.compile and Lightning."""

_COUNTER = "n_averaged"
"""The buffer that torch's AveragedModel, used by torchvision's reference scripts, adds."""

_AUXILIARY = ("AuxLogits.", "aux1.", "aux2.")
"""Second classifiers of Inception and GoogLeNet, which only their training from scratch used."""

_SHOWN = 8


def load_weights(
    module: nn.Module, state: Mapping[str, Tensor], *, head: tuple[str, ...], what: str
) -> tuple[str, ...]:
    """Copy ``state`` into the network; its classifier stays fresh where the file's is for other classes.

    Args:
        module: whose parameters and buffers are overwritten, in place.
        state: tensors by name, from :func:`read_weights`.
        head: names of the classifier's modules.
        what: ``FILE`` and ``MODEL`` for messages.

    Returns:
        Notes for the user.

    Raises:
        ModelError: keys missing or not expected, or other shapes, the classifier's aside; all of them are listed.
    """
    target = module.state_dict()
    state, notes = _fit(rename_to_match(module, state, head=head), target, head)
    if wrong := mismatches(state, target, head):
        raise ModelError(f"{what} do not fit: {'; '.join(wrong)}. Are they the weights of another model?")
    module.load_state_dict(state, strict=False)
    if any(under(key, head) and key not in state for key in target):
        reset_head(module, head)
    return tuple(notes)


def rename_to_match(module: nn.Module, state: Mapping[str, Tensor], *, head: tuple[str, ...]) -> dict[str, Tensor]:
    """Name the tensors as the network does.

    Wrappers' prefixes are taken off; foreign layouts, and position embeddings of images of another size, are converted
    by timm's own rules, if that makes all fit but the classifier.
    """
    target = module.state_dict()
    plain = without_prefixes(state, target)
    convert: Any = getattr(sys.modules.get(type(module).__module__), "checkpoint_filter_fn", None)
    if convert is None or not type(module).__module__.startswith("timm."):
        return plain
    if not mismatches(_fit(plain, target, head)[0], target, head):
        return plain
    try:
        converted = dict(convert(dict(plain), module))
    except NETWORK_ERRORS:
        return plain  # not a layout that it knows: the keys tell the user more
    return plain if mismatches(_fit(converted, target, head)[0], target, head) else converted


def mismatches(state: Mapping[str, Tensor], target: Mapping[str, Tensor], head: tuple[str, ...]) -> list[str]:
    """List what keeps ``state`` from filling ``target``, except the classifier."""
    missing = [k for k in target if k not in state and not under(k, head) and not k.endswith("num_batches_tracked")]
    unexpected = [k for k in state if k not in target]
    reshaped = [
        f"{k} {tuple(v.shape)} instead of {tuple(target[k].shape)}"
        for k, v in state.items()
        if k in target and v.shape != target[k].shape
    ]
    lines = []
    for kind, keys in {"missing": missing, "not expected": unexpected, "of another shape": reshaped}.items():
        more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
        lines += [f"{len(keys)} {kind} ({', '.join(keys[:_SHOWN])}{more})"] if keys else []
    return lines


def without_prefixes(state: Mapping[str, Tensor], wanted: Iterable[str]) -> dict[str, Tensor]:
    """Take a wrapper's prefix off every name, if more of ``wanted`` is found so.

    >>> list(without_prefixes({"n_averaged": None, "module._orig_mod.fc.bias": None}, ["fc.bias"]))
    ['fc.bias']
    """
    names = set(wanted)
    state = {name: value for name, value in state.items() if name in names or name != _COUNTER}
    wrappers = ["", *_PREFIXES, *("".join(pair) for pair in itertools.permutations(_PREFIXES, 2))]
    fitting = [wrapper for wrapper in wrappers if all(name.startswith(wrapper) for name in state)]
    best = max(fitting, key=lambda wrapper: sum(name.removeprefix(wrapper) in names for name in state))
    return {name.removeprefix(best): value for name, value in state.items()}


def _fit(
    state: Mapping[str, Tensor], target_state: Mapping[str, Tensor], head: tuple[str, ...]
) -> tuple[dict[str, Tensor], list[str]]:
    """Adapt what may differ, with a note of each: the first convolution's channels, and classifiers."""
    state, notes = dict(state), []
    for key, value in state.items():
        target = target_state.get(key)
        if target is None or target.ndim != 4 or value.ndim != 4:
            continue
        is_kernel_same = (value.shape[0], value.shape[2:]) == (target.shape[0], target.shape[2:])
        if is_kernel_same and (value.shape[1], target.shape[1]) in ((3, 1), (1, 3)):
            # What the convolution gives for a grey image stays the same.
            grey = target.shape[1] == 1
            state[key] = value.sum(1, keepdim=True) if grey else value.expand(-1, 3, -1, -1) / 3
            notes.append(f"{key} was adapted to {'grey' if grey else 'colour'} images")
            break
    keys = [key for key in target_state if under(key, head)]
    if any(key not in state or state[key].shape != target_state[key].shape for key in keys):
        before = next((state[key].shape[0] for key in keys if key in state and state[key].ndim), None)
        notes.append(head_note(before, target_state[keys[0]].shape[0]))
        state = {key: value for key, value in state.items() if not under(key, head)}
    auxiliary = [key for key in state if key.startswith(_AUXILIARY) and key not in target_state]
    if auxiliary:
        notes.append("its auxiliary classifiers are left out")
        state = {key: value for key, value in state.items() if key not in auxiliary}
    return state, notes


_PICKLES = (".pth", ".th", ".pt", ".bin", ".ckpt", ".tar")

_INNER = ("state_dict_ema", "model_ema", "ema", "state_dict", "model_state_dict", "model")
"""Keys under which training scripts keep the weights, those of an average first: they are what was evaluated."""


@dataclass(frozen=True)
class WeightsFile:
    """The contents of a file: ``tensors`` on the CPU, by name; the key of the average if it is one; and what a file of
    steadytrain's own says beside them: the input that they were trained for (None elsewhere), the licence of the
    weights that they come from (``unknown`` elsewhere), their model's name (empty elsewhere), and of a network of
    MXNet its symbol JSON."""

    tensors: dict[str, Tensor]
    averaged: str | None = None
    input: Input | None = None
    licence: str = "unknown"
    model: str = ""
    symbol: str = ""


def read_weights(path: Path) -> WeightsFile:
    """Read ``.safetensors``, or a pickle of tensors as training scripts write it.

    Raises:
        ModelError: no such file, not a weights file, damaged, or one that would run code.
    """
    if path.is_dir():
        raise ModelError(f"{path} is a folder: name a file in it, such as {path / 'model.safetensors'}")
    if not path.is_file():
        raise ModelError(f"there is no weights file {path}: check --weights")
    require_content(path)
    if path.suffix == ".safetensors":
        return _read_safetensors(path)
    if path.suffix in _PICKLES:
        return _read_pickle(path)
    if path.suffix == ".params":  # what its arrays are called follows from the symbol beside it
        return WeightsFile({}, model=f"{PREFIX}{path}")
    raise ModelError(f"{path} is no weights file that is known: it must end in .safetensors, .pth, .th, .pt or .params")


def _read_safetensors(path: Path) -> WeightsFile:
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {}).get("steadytrain", "{}"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = about if isinstance(about, Mapping) else {}
        plain, input = about.get("input"), None
        if isinstance(plain, Mapping):
            known = plain.keys() & {field.name for field in fields(Input)}
            values: dict[str, Any] = {name: plain[name] for name in known}
            values |= {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
            input = Input(**values)
        model = about.get("model")
        name = model.get("name") if isinstance(model, Mapping) else None
        licence, symbol = str(about.get("licence", "unknown")), str(about.get("symbol", ""))
        return WeightsFile(tensors, None, input, licence, str(name or ""), symbol)
    except (SafetensorError, OSError, ValueError) as error:
        raise ModelError(f"{path} is damaged or no weights file ({error}): fetch it again") from error


def _read_pickle(path: Path) -> WeightsFile:
    try:
        with torch.serialization.safe_globals([argparse.Namespace]):  # timm's checkpoints hold their arguments so
            content: object = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if name := re.search(r"GLOBAL (\S+)", str(error)):
            raise ModelError(
                f"{path} holds more than weights ({name[1]}), and reading that can run code hidden in it: where you"
                " trust it, save its state_dict alone (safetensors.torch.save_file) and give that file"
            ) from error
        raise ModelError(f"{path} is damaged or no weights file: fetch it again") from error
    except (*NETWORK_ERRORS, OSError, EOFError, MemoryError, struct.error, zipfile.BadZipFile) as error:
        raise ModelError(f"{path} is damaged or no weights file ({first_line(error)}): fetch it again") from error
    table = content if isinstance(content, Mapping) else {}
    for key, inner in [*((key, table.get(key)) for key in _INNER), ("", table)]:
        if isinstance(inner, Mapping):
            tensors = {str(name): value for name, value in inner.items() if isinstance(value, Tensor)}
            if tensors:
                return WeightsFile(tensors, key if "ema" in key else None)
    raise ModelError(f"{path} holds no weights: a table of names and tensors is expected")
