"""Networks from a factory of the user's own or of any installed package: ``pkg.mod:factory``."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from steadytrain.config import Model
from steadytrain.errors import ModelError, did_you_mean
from steadytrain.models.heads import find_head
from steadytrain.models.inputs import Input
from steadytrain.models.made import Made, call

_CHANNELS = ("channels", "in_chans", "in_channels")
_SIZES = ("size", "img_size", "image_size")


def make(inner: str, model: Model, *, num_classes: int, channels: int, size: int | None) -> Made:
    """Call the factory with ``num_classes``, the recipe's options, and channels and size if it has such parameters.

    The code runs: who calls this has made sure that the user named the factory.

    Raises:
        ModelError: it cannot be imported, it refuses an option, or what it gives is no ``torch.nn.Module``.
    """
    if model.pretrained:
        raise ModelError(
            f"steadytrain does not know where {inner} keeps its weights: give --weights FILE, or"
            " --set model.pretrained=false and the factory's own option (--set model.options.NAME=VALUE)"
        )
    factory = _load(inner)
    takes = _parameters(factory)
    given: dict[str, Any] = {"num_classes": num_classes}
    given |= {name: channels for name in _CHANNELS if name in takes}
    given |= {name: size for name in _SIZES if name in takes and size is not None and name not in model.options}
    module: object = call(inner, factory, model.options, **given)
    if not isinstance(module, nn.Module):
        raise ModelError(f"{inner} gave a {type(module).__name__}; a model's factory gives a torch.nn.Module")
    return Made(module, find_head(module, num_classes), Input(channels=channels))


def _load(inner: str) -> Callable[..., nn.Module]:
    place, _, name = inner.partition(":")
    if "" not in sys.path and (here := str(Path.cwd())) not in sys.path:
        sys.path.append(here)  # a script's path is that of the script; last, so that nothing installed is hidden
    try:
        package = importlib.import_module(place)
    except ImportError as error:
        raise ModelError(f"cannot import {place} for {inner} ({error}): install it, or mend its name") from error
    factory = getattr(package, name, None)
    if not callable(factory):
        near = did_you_mean(name, [known for known in dir(package) if not known.startswith("_")])
        raise ModelError(f"{place} has no factory {name!r}.{near}")
    made: Callable[..., nn.Module] = factory
    return made


def _parameters(factory: Callable[..., Any]) -> set[str]:
    try:
        return set(inspect.signature(factory).parameters)
    except (TypeError, ValueError):  # made in C
        return set()
