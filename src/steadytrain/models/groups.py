"""Which parameters are trained, at which share of the learning rate, and which of them are decayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase

from steadytrain.errors import ModelError
from steadytrain.models.build import Built
from steadytrain.models.weights import under

_NORMS = (_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)

Train = Literal["full", "head", "discriminative"]


def parameter_groups(built: Built, *, train: Train, decay: float, weight_decay: float) -> list[dict[str, Any]]:
    """Make groups for an optimizer: each trainable parameter in exactly one of them.

    Norms and biases (whatever their shape, and every other parameter of one dimension), and what the network itself
    names (timm's ``no_weight_decay``: position embeddings and the like), are not decayed. A network may have
    ``lr_scales()`` too: parameters' names, and how many times the rate of the others theirs is.

    Args:
        built: the network. In mode ``head`` its body's parameters are set not to require gradients.
        train: ``full`` (one rate), ``head`` (the classifier alone), or ``discriminative``: the rate is scaled by
            ``decay`` once for each layer above (Howard & Ruder 2018; layers as in BEiT, Bao et al. 2022). Layers are
            timm's where the network has a ``group_matcher``, else its top-level modules (those of ``features`` where it
            holds all the rest); the classifier is the top.
        decay: factor of ``discriminative``.
        weight_decay: of the parameters that are decayed.

    Returns:
        Dictionaries with ``params``, ``weight_decay``, ``lr_scale`` and ``name``; empty groups are left out.

    Raises:
        ModelError: mode ``head`` for a network whose classifier is not known.
    """
    if train == "head":
        if not built.head:
            raise ModelError(
                f"the classifier of {built.name} is not known (no layer has as many outputs as there are classes):"
                " train=head cannot be used; use train=full"
            )
        for name, parameter in built.module.named_parameters():
            if not under(name, built.head):
                parameter.requires_grad_(False)
    scales = _layer_scales(built, decay) if train == "discriminative" else {}
    never_decayed: set[str] = set(_call_if_there(built.module, "no_weight_decay") or ())
    for name, part in built.module.named_modules():
        for key, _ in part.named_parameters(prefix=name, recurse=False):
            if isinstance(part, _NORMS) or key.rpartition(".")[2] == "bias":
                never_decayed.add(key)
    lr_scales = _call_if_there(built.module, "lr_scales") or {}
    groups: dict[tuple[float, bool], dict[str, Any]] = {}
    for name, parameter in built.module.named_parameters():
        if not parameter.requires_grad:
            continue
        scale = scales.get(name, 1.0) * lr_scales.get(name, 1.0)
        decays = parameter.ndim > 1 and name not in never_decayed
        group = groups.setdefault(
            (scale, decays),
            {
                "params": [],
                "weight_decay": weight_decay if decays else 0.0,
                "lr_scale": scale,
                "name": f"rate x {scale:.3g}, {'decayed' if decays else 'not decayed'}",
            },
        )
        group["params"].append(parameter)
    return list(groups.values())


def set_train_mode(
    built: Built, train: Train, *, batch_norm: Literal["train", "synchronous", "frozen"] = "train"
) -> None:
    """Put the network into training mode.

    Args:
        built: the network.
        train: in mode ``head`` the frozen body's batch norms keep their statistics.
        batch_norm: ``frozen``: all of them do. Their scales and shifts are trained all the same.
    """
    built.module.train()
    for name, part in built.module.named_modules():
        frozen = batch_norm == "frozen" or (train == "head" and not under(name, built.head))
        if frozen and isinstance(part, _BatchNorm):
            part.eval()


def _call_if_there(module: nn.Module, method: str) -> Any:
    """Call a network's own method; None where it has none."""
    function: Callable[[], Any] | None = getattr(module, method, None)
    return function() if callable(function) else None


def _layer_scales(built: Built, decay: float) -> dict[str, float]:
    """The factor of the learning rate of each parameter, by its name: ``decay`` once for each layer above it."""
    module: Any = built.module
    if hasattr(module, "group_matcher"):
        from timm.models import group_parameters

        layers: dict[str, int] = group_parameters(module, module.group_matcher(coarse=False), reverse=True)
    else:
        body = [name for name in _parts(module, "", built.head) if not under(name, built.head)]
        while len(body) == 1 and (inner := _parts(module.get_submodule(body[0]), f"{body[0]}.", ())):
            body = inner  # one module, such as ``features``, holds the whole body
        layers = {
            name: len(body)
            if under(name, built.head)
            else next((depth for depth, part in enumerate(body) if under(name, (part,))), 0)
            for name, _ in module.named_parameters()
        }
    top = max(layers.values())
    return {name: 1.0 if under(name, built.head) else decay ** (top - layer) for name, layer in layers.items()}


def _parts(module: nn.Module, prefix: str, head: tuple[str, ...]) -> list[str]:
    """Names of the modules with parameters, in order; one that holds the classifier among others is opened up."""
    names: list[str] = []
    for child, part in module.named_children():
        name = f"{prefix}{child}"
        if any(inner.startswith(f"{name}.") for inner in head):
            names += _parts(part, f"{name}.", head)
        elif any(True for _ in part.parameters()):
            names.append(name)
    return names
