"""Groups of parameters: those that are trained, at which share of the learning rate, and those that are decayed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from steadytrain.config.phases import parse_train
from steadytrain.errors import ModelError, did_you_mean
from steadytrain.models.build import Built
from steadytrain.models.weights import NORMS, under


def parameter_groups(
    built: Built, *, train: str, decay: float, weight_decay: float, freeze: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Make groups for an optimizer: each trainable parameter in exactly one of them.

    Norms and biases (whatever their shape, and every other parameter of one dimension), and what the network itself
    names (timm's ``no_weight_decay``: position embeddings and the like), are not decayed. A network may have
    ``lr_scales()`` too: parameters' names, and how many times the rate of the others theirs is.

    Args:
        built: the network. Parameters that are never trained are set not to require gradients.
        train: as in :class:`steadytrain.config.Model`. For ``discriminative`` and ``gradual`` the rate is scaled by
            ``decay`` once for each layer above (Howard & Ruder 2018; layers as in BEiT, Bao et al. 2022). Layers are
            timm's where the network has a ``group_matcher``, else its top-level modules (those of ``features`` where it
            holds all the rest); the classifier is the top.
        decay: factor of ``discriminative``.
        weight_decay: of the parameters that are decayed.
        freeze: patterns of names of parameters or modules that are never trained.

    Returns:
        Dictionaries with ``params``, ``weight_decay``, ``lr_scale`` and ``name``; empty groups are left out.

    Raises:
        ModelError: the classifier is needed and not known; a pattern that matches nothing; or nothing is to be trained.
    """
    plan = parse_train(train)
    if not built.head and (not plan.trains_body or plan.has_phases):
        raise ModelError(
            f"the classifier of {built.name} is not known (no layer has as many outputs as there are classes):"
            f" train={train} cannot be used; use train=full"
        )
    frozen = _frozen_by_pattern(built, freeze)
    for name, parameter in built.module.named_parameters():
        if name in frozen or not (plan.trains_body or under(name, built.head)):
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in built.module.parameters()):
        none = f"{built.name} has no parameter that could be trained: give a network that has some"
        left = f"model.freeze={list(freeze)} leaves nothing of {built.name} to train: drop a pattern"
        raise ModelError(left if freeze else none)
    scales: dict[str, float] = {}
    if plan.main in ("discriminative", "gradual"):  # ``decay`` once for each layer above a parameter's
        layers = _layers(built)
        top = max(layers.values())
        scales = {name: 1.0 if under(name, built.head) else decay ** (top - at) for name, at in layers.items()}
    never_decayed: set[str] = set(_call_if_there(built.module, "no_weight_decay") or ())
    for name, part in built.module.named_modules():
        for key, _ in part.named_parameters(prefix=name, recurse=False):
            if isinstance(part, NORMS) or key.rpartition(".")[2] == "bias":
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


def lacks_statistics(module: nn.Module) -> bool:
    """Return whether a network has batch norms, all of them with the statistics that they are made with."""
    norms = [part for part in module.modules() if isinstance(part, _BatchNorm) and part.running_mean is not None]
    return bool(norms) and not any(
        not is_lazy(part.running_mean) and (bool(part.running_mean.any()) or bool((part.running_var != 1).any()))
        for part in norms
        if part.running_mean is not None and part.running_var is not None
    )


def set_train_mode(
    built: Built,
    train: str,
    *,
    batch_norm: Literal["train", "synchronous", "frozen"] = "train",
    freeze: Sequence[str] = (),
    waiting: Collection[str] = (),
) -> None:
    """Put the network into training mode.

    Args:
        built: the network.
        train: where only the classifier is trained, the body's batch norms keep their statistics.
        batch_norm: ``frozen``: all of them do. Their scales and shifts are trained all the same.
        freeze: as of :func:`parameter_groups`: batch norms all of whose parameters are frozen keep their statistics.
        waiting: names of parameters that are not trained yet, as of :func:`first_epochs`: likewise.
    """
    built.module.train()
    frozen = _frozen_by_pattern(built, freeze) | set(waiting)
    only_head = not parse_train(train).trains_body
    for name, part in built.module.named_modules():
        if not isinstance(part, _BatchNorm):
            continue
        names = [key for key, _ in part.named_parameters(prefix=name, recurse=False)]
        is_frozen = bool(names) and frozen.issuperset(names)
        if batch_norm == "frozen" or is_frozen or (only_head and not under(name, built.head)):
            part.eval()


def first_epochs(built: Built, train: str, *, epochs: float) -> dict[str, float]:
    """Return from which epoch on parameters are trained, for those that wait: a pure function of network and run.

    Args:
        built: the network after :func:`parameter_groups`.
        train: ``head:EPOCHS+...`` lets all but the classifier wait; ``gradual`` lets each layer wait for the one above
            (Howard & Ruder 2018, "Universal Language Model Fine-tuning for Text Classification").
        epochs: of the whole run.
    """
    plan = parse_train(train)
    body = [
        name
        for name, parameter in built.module.named_parameters()
        if parameter.requires_grad and not under(name, built.head)
    ]
    if plan.main != "gradual":
        return {name: plan.head_epochs for name in body if plan.head_epochs}
    layers = _layers(built, coarse=True)
    order = sorted({layers[name] for name in body}, reverse=True)
    pace = plan.gradual_epochs or max(0.0, epochs / 2 - plan.head_epochs) / max(1, len(order))
    return {name: plan.head_epochs + pace * (1 + order.index(layers[name])) for name in body}


def _frozen_by_pattern(built: Built, freeze: Sequence[str]) -> set[str]:
    """Names of the parameters that some pattern matches, or a module that holds them. Raises ModelError."""
    names = [name for name, _ in built.module.named_parameters()]
    frozen: set[str] = set()
    for pattern in freeze:
        matched = {
            name
            for name in names
            if any(fnmatchcase(name[:end], pattern) for end, sign in enumerate(f"{name}.") if sign == ".")
        }
        if not matched:
            tops = list(dict.fromkeys(name.partition(".")[0] for name in names))
            known = [name for name, _ in built.module.named_modules() if name]
            near = did_you_mean(pattern.rstrip("*."), known)
            raise ModelError(
                f"model.freeze has {pattern!r}, which matches no parameter of {built.name}.{near} Its top-level modules"
                f" with parameters: {', '.join(tops)}"
            )
        frozen |= matched
    return frozen


def _call_if_there(module: nn.Module, method: str) -> Any:
    """Call a network's own method; None where it has none."""
    function: Callable[[], Any] | None = getattr(module, method, None)
    return function() if callable(function) else None


def _layers(built: Built, *, coarse: bool = False) -> dict[str, int]:
    """The layer of each parameter, by its name, from the bottom up; ``coarse``: timm's stages, not its blocks."""
    module: Any = built.module
    if hasattr(module, "group_matcher"):
        from timm.models import group_parameters

        layers: dict[str, int] = group_parameters(module, module.group_matcher(coarse=coarse), reverse=True)
        return layers
    body = [name for name in _parts(module, "", built.head) if not under(name, built.head)]
    while len(body) == 1 and (inner := _parts(module.get_submodule(body[0]), f"{body[0]}.", ())):
        body = inner  # one module, such as ``features``, holds the whole body
    return {
        name: len(body)
        if under(name, built.head)
        else next((depth for depth, part in enumerate(body) if under(name, (part,))), 0)
        for name, _ in module.named_parameters()
    }


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
