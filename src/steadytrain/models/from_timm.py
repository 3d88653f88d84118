"""Networks, weights and input configurations from timm."""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from steadytrain.config import Model
from steadytrain.errors import ModelError, first_line
from steadytrain.models.heads import find_head, make_fresh, replaced
from steadytrain.models.inputs import Input
from steadytrain.models.licences import remark
from steadytrain.models.made import Made, call


def make(inner: str, model: Model, *, num_classes: int, channels: int, size: int | None) -> Made:
    """Build timm's network ``inner`` for ``num_classes``, with the hub's weights if the recipe asks for them.

    ``size`` is passed on only to networks whose parameters depend on it (their configuration says so).

    Raises:
        ModelError: an option that the network refuses, no weights on the hub, or no way to reach it.
    """
    import timm

    name = f"timm/{inner}"
    config: Any = timm.models.get_pretrained_cfg(inner) or timm.models.PretrainedCfg()
    given: dict[str, Any] = {"num_classes": num_classes, "in_chans": channels}
    if size is not None and config.fixed_input_size and "img_size" not in model.options:
        given["img_size"] = size
    if model.pretrained:
        given |= {"pretrained": True, "pretrained_cfg_overlay": _source(name, config)}
    module = _create(name, config, lambda: call(name, timm.create_model, model.options, model_name=inner, **given))
    made = Made(
        module, head_of(module, config) or find_head(module, num_classes), input_of(config).with_channels(channels)
    )
    return _noted(made, config, num_classes) if model.pretrained else made


def input_of(config: Any) -> Input:
    """What a pretrained configuration says of its images."""
    known = config.interpolation if config.interpolation in ("bilinear", "bicubic") else None
    return Input(
        size=int(config.input_size[-1]),
        mean=tuple(float(v) for v in config.mean),
        std=tuple(float(v) for v in config.std),
        crop=float(config.crop_pct),
        interpolation=known,
        channels=int(config.input_size[0]),
    )


def head_of(module: nn.Module, config: Any) -> tuple[str, ...]:
    """Names of the classifier's modules."""
    told = config.classifier or ()
    names = (told,) if isinstance(told, str) else tuple(told)
    parts = dict(module.named_modules())
    return tuple(name for name in names if name in parts)


def _create(name: str, config: Any, create: Callable[[], nn.Module]) -> nn.Module:
    try:
        return create()
    except OSError as error:
        raise _unreachable(name, error) from error
    except SafetensorError as error:
        raise ModelError(
            f"the weights of {name} were fetched, and are damaged ({first_line(error)}): delete {_cache(config)} and"
            " run the same command again"
        ) from error
    except Exception as error:
        if not type(error).__module__.startswith("httpx"):  # what the hub's client lets through of its transport
            raise
        raise _unreachable(name, error) from error


def _cache(config: Any) -> Path:
    """Where the hub's client keeps a model's files."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE, "models--" + str(config.hf_hub_id).replace("/", "--"))


def _noted(made: Made, config: Any, num_classes: int) -> Made:
    licence = config.license or "unknown"
    notes = [told for told in (remark(licence),) if told]
    if num_classes != config.num_classes:
        make_fresh(made.module, made.head)
        notes.append(replaced(config.num_classes, num_classes))
    tag = f".{config.tag}" if config.tag else ""
    return replace(made, licence=licence, notes=tuple(notes), weights=f"timm/{config.architecture}{tag}")


def _source(name: str, config: Any) -> dict[str, str]:
    """Where to take the weights from: a file fetched earlier if there is one, so that no network is needed."""
    from huggingface_hub import try_to_load_from_cache

    if not config.has_weights:
        raise ModelError(
            f"timm has no weights for {name}: train it from scratch (steady train), or give --weights FILE"
        )
    files = (config.hf_hub_filename,) if config.hf_hub_filename else ("model.safetensors", "pytorch_model.bin")
    for file in files if config.hf_hub_id and not config.custom_load else ():
        path = try_to_load_from_cache(config.hf_hub_id, file)
        if isinstance(path, str):
            return {"file": path}
    if config.hf_hub_id:
        _require_hub(name)
    return {}


def _require_hub(name: str) -> None:
    # The hub's own client tries for three quarters of a minute before it gives up.
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise _unreachable(name, "HF_HUB_OFFLINE is set")
    try:
        with urllib.request.urlopen(urllib.request.Request(constants.ENDPOINT, method="HEAD"), timeout=10):
            pass
    except urllib.error.HTTPError:
        pass  # it answers, if only with an error
    except OSError as error:
        raise _unreachable(name, error) from error


def _unreachable(name: str, why: object) -> ModelError:
    reason = getattr(why, "reason", why)
    told = first_line(reason) if isinstance(reason, BaseException) else reason
    return ModelError(
        f"cannot fetch the weights of {name} ({told}): connect to a network once, or give a file that you have:"
        " --weights FILE"
    )
