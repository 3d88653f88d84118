"""The models that have a name, and what is known of each without building it or asking a network."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any, Literal
from urllib.parse import urlparse

from steadytrain.errors import ModelError, did_you_mean
from steadytrain.models.nets import BUILTINS, CHANNELS, SIZES

Weights = Literal["at hand", "hub", "none"]

_CLASSES = 10  # of MNIST and CIFAR-10, which the built-in nets are meant for


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One model of the catalogue.

    Args:
        name: as ``--model`` takes it: ``resnet20``, ``timm/resnet50``, ``timm/resnet50.a1_in1k``.
        height, width: of the images that its weights were trained for (or that the net is meant for), in pixels.
        channels: of these images.
        num_classes: of these weights' classifier; 0 where they have none.
        weights: ``at hand`` on this machine, to be fetched from the ``hub``, or ``none``.
        tag: which of the model's weights are meant (a name without a tag means its default ones); empty without any.
        licence: of these weights, ``unknown`` where they do not say it; empty without any.
    """

    name: str
    height: int
    width: int
    channels: int
    num_classes: int
    weights: Weights = "none"
    tag: str = ""
    licence: str = ""


def catalogue(pattern: str = "", *, tags: bool = False) -> list[Entry]:
    """All models whose name matches, built-in nets first, then timm's in natural order.

    Args:
        pattern: a piece of a name, or a glob (``*``, ``?``, ``[...]``) for the whole of it, with or without ``timm/``;
            capitals do not matter; empty: everything.
        tags: list weights (``timm/resnet50.a1_in1k``) instead of architectures; a pattern with a dot does it too.

    Raises:
        ModelError: nothing matches; with the nearest names.
    """
    import timm.models

    tags = tags or "." in pattern
    of_timm = timm.models.list_pretrained() if tags else timm.models.list_models()
    names = [*(() if tags else BUILTINS), *(f"timm/{name}" for name in of_timm)]
    found = [name for name in names if matches(name, pattern)]
    if not found:
        near = _near(pattern, [name.removeprefix("timm/") for name in names]) or " Without a pattern all are listed."
        raise ModelError(f"no {'weights match' if tags else 'model matches'} {pattern!r}.{near}")
    return [_of_timm(name) if name.startswith("timm/") else _built_in(name) for name in found]


def matches(name: str, pattern: str) -> bool:
    """Whether a full name is meant by a piece of it or by a glob.

    >>> matches("timm/resnet50", "net5"), matches("timm/resnet50", "net5*"), matches("timm/resnet50", "timm/RES*")
    (True, False, True)
    """
    name, pattern = name.casefold(), pattern.casefold()
    if any(mark in pattern for mark in "*?["):
        return fnmatchcase(name, pattern) or fnmatchcase(name.removeprefix("timm/"), pattern)
    return pattern in name


def _near(pattern: str, names: Sequence[str]) -> str:
    """A hint: names that begin so, written with other separators; else the nearest ones, and beginnings of names."""
    plain = re.sub(r"[*?\[\]]", "", pattern.casefold()).removeprefix("timm/")
    if "." in plain:
        return did_you_mean(plain, names)
    architectures = list(dict.fromkeys(name.partition(".")[0] for name in names))
    letters = _letters(plain)
    begin_so = [name for name in architectures if letters and _letters(name).startswith(letters)]
    if begin_so:  # the shortest: what is longer is a variant of it
        return f" Did you mean {' or '.join(sorted(begin_so, key=len)[:3])}?"
    return did_you_mean(plain, dict.fromkeys([*architectures, *(re.split(r"[\d_]", name)[0] for name in names)]))


def _letters(name: str) -> str:
    """A name without what people write it differently with.

    >>> _letters("mobilenet-v3 large") == _letters("mobilenetv3_large")
    True
    """
    return re.sub(r"[^0-9a-z]", "", name)


def _built_in(name: str) -> Entry:
    side = SIZES[name]
    return Entry(name=name, height=side, width=side, channels=CHANNELS[name], num_classes=_CLASSES)


def _of_timm(name: str) -> Entry:
    import timm.models

    config: Any = timm.models.get_pretrained_cfg(name.removeprefix("timm/")) or timm.models.PretrainedCfg()
    channels, height, width = map(int, config.input_size)
    has_weights = bool(config.has_weights)
    return Entry(
        name=name,
        height=height,
        width=width,
        channels=channels,
        num_classes=int(config.num_classes),
        weights=_weights(config) if has_weights else "none",
        tag=(config.tag or "") if has_weights else "",
        licence=(config.license or "unknown") if has_weights else "",
    )


def _weights(config: Any) -> Weights:
    """Where weights are: in the cache of the hub's client, in that of torch's hub, or still to be fetched."""
    import torch.hub
    from huggingface_hub import try_to_load_from_cache

    if config.hf_hub_id:
        files = (config.hf_hub_filename,) if config.hf_hub_filename else ("model.safetensors", "pytorch_model.bin")
        there = any(isinstance(try_to_load_from_cache(config.hf_hub_id, file), str) for file in files)
    elif config.file:
        there = Path(config.file).is_file()
    else:
        name = PurePosixPath(urlparse(config.url).path).name
        there = Path(torch.hub.get_dir(), "checkpoints", name).is_file()
    return "at hand" if there else "hub"
