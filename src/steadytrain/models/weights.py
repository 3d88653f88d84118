"""Weights into a network: every key accounted for, the classifier fresh where it is for other classes."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn

from steadytrain.errors import ModelError
from steadytrain.models.heads import make_fresh, replaced, under
from steadytrain.models.made import FAULTS

_PREFIXES = ("module.", "_orig_mod.", "model.")
"""Left in the names by DistributedDataParallel, torch.compile and Lightning."""

_COUNTER = "n_averaged"
"""What torch's AveragedModel, which torchvision's reference scripts keep, adds to its network's names."""

_AUXILIARY = ("AuxLogits.", "aux1.", "aux2.")
"""Second classifiers of Inception and GoogLeNet, which only their training from scratch used."""

_SHOWN = 8


def load(module: nn.Module, state: Mapping[str, Tensor], *, head: tuple[str, ...], what: str) -> tuple[str, ...]:
    """Copy ``state`` into the network; its classifier stays fresh where the file's is for other classes.

    Args:
        module: whose parameters and buffers are overwritten, in place.
        state: tensors by name, from :func:`steadytrain.models.weights_file.read`.
        head: names of the classifier's modules.
        what: ``FILE`` and ``MODEL`` for messages.

    Returns:
        Notes for the user.

    Raises:
        ModelError: keys missing or not expected, or other shapes, the classifier's aside; all of them are listed.
    """
    wanted = module.state_dict()
    state, notes = _fit(in_own_names(module, state, head=head), wanted, head)
    if found := faults(state, wanted, head):
        raise ModelError(f"{what} do not fit: {'; '.join(found)}. Are they the weights of another model?")
    module.load_state_dict(state, strict=False)
    if any(under(key, head) and key not in state for key in wanted):
        make_fresh(module, head)
    return notes


def in_own_names(module: nn.Module, state: Mapping[str, Tensor], *, head: tuple[str, ...]) -> dict[str, Tensor]:
    """The same tensors under the network's own names.

    Wrappers' prefixes are taken off; foreign layouts, and position embeddings of images of another size, are converted
    by timm's own rules, if that makes all fit but the classifier.
    """
    wanted = module.state_dict()
    plain = without_prefixes(state, wanted)
    if not faults(_fit(plain, wanted, head)[0], wanted, head):
        return plain
    converted = _converted_by_timm(plain, module)
    return plain if faults(_fit(converted, wanted, head)[0], wanted, head) else converted


def faults(state: Mapping[str, Tensor], wanted: Mapping[str, Tensor], head: tuple[str, ...]) -> list[str]:
    """What keeps ``state`` from filling ``wanted``, the classifier aside: missing, unexpected, of another shape."""
    missing = [k for k in wanted if k not in state and not under(k, head) and not k.endswith("num_batches_tracked")]
    unexpected = [k for k in state if k not in wanted]
    reshaped = [
        f"{k} {tuple(v.shape)} instead of {tuple(wanted[k].shape)}"
        for k, v in state.items()
        if k in wanted and v.shape != wanted[k].shape
    ]
    told = {"missing": missing, "not expected": unexpected, "of another shape": reshaped}
    return [f"{len(keys)} {kind} ({_few(keys)})" for kind, keys in told.items() if keys]


def without_prefixes(state: Mapping[str, Tensor], wanted: Iterable[str]) -> dict[str, Tensor]:
    """The same tensors without a wrapper's prefix on every name, if more of ``wanted`` is found so.

    >>> list(without_prefixes({"n_averaged": None, "module._orig_mod.fc.bias": None}, ["fc.bias"]))
    ['fc.bias']
    """
    own = set(wanted)
    state = {name: value for name, value in state.items() if name in own or name != _COUNTER}
    wrappers = ["", *_PREFIXES, *("".join(pair) for pair in itertools.permutations(_PREFIXES, 2))]
    fitting = [wrapper for wrapper in wrappers if all(name.startswith(wrapper) for name in state)]
    best = max(fitting, key=lambda wrapper: sum(name.removeprefix(wrapper) in own for name in state))
    return {name.removeprefix(best): value for name, value in state.items()}


def _fit(
    state: dict[str, Tensor], wanted: Mapping[str, Tensor], head: tuple[str, ...]
) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    state, notes = _fit_channels(state, wanted)
    state, more = _fit_head(state, wanted, head)
    extra = [key for key in state if key.startswith(_AUXILIARY) and key not in wanted]
    left = ["its auxiliary classifiers are left out"] if extra else []
    return {key: value for key, value in state.items() if key not in extra}, (*notes, *more, *left)


def _fit_head(
    state: dict[str, Tensor], wanted: Mapping[str, Tensor], head: tuple[str, ...]
) -> tuple[dict[str, Tensor], list[str]]:
    own = [k for k in wanted if under(k, head)]
    if not own or all(k in state and state[k].shape == wanted[k].shape for k in own):
        return state, []
    told = next((state[k].shape[0] for k in own if k in state and state[k].ndim), None)
    return {k: v for k, v in state.items() if not under(k, head)}, [replaced(told, wanted[own[0]].shape[0])]


def _fit_channels(state: dict[str, Tensor], wanted: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Adapt the first convolution between grey and colour: what it gives for a grey image stays the same."""
    for key, value in state.items():
        own = wanted.get(key)
        if own is None or own.ndim != 4 or value.ndim != 4 or (value.shape[1], own.shape[1]) not in ((3, 1), (1, 3)):
            continue
        if (value.shape[0], *value.shape[2:]) == (own.shape[0], *own.shape[2:]):
            grey = own.shape[1] == 1
            adapted = value.sum(1, keepdim=True) if grey else value.expand(-1, 3, -1, -1) / 3
            return state | {key: adapted}, [f"{key} was adapted to {'grey' if grey else 'colour'} images"]
    return state, []


def _converted_by_timm(state: dict[str, Tensor], module: nn.Module) -> dict[str, Tensor]:
    """timm's own conversion of foreign layouts and resizing of position embeddings, where it has one."""
    convert = getattr(sys.modules.get(type(module).__module__), "checkpoint_filter_fn", None)
    if convert is None or not type(module).__module__.startswith("timm."):
        return state
    try:
        converted: Any = convert(dict(state), module)
    except FAULTS:
        return state  # not a layout that it knows: the keys tell the user more
    return dict(converted)


def _few(keys: list[str]) -> str:
    shown = ", ".join(keys[:_SHOWN])
    return shown + (f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else "")
