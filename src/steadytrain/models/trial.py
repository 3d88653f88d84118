"""Does a network take these images and give one value for each class? Asked before anything is trained."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.func import functional_call

from steadytrain.errors import ModelError, first_line
from steadytrain.models.made import FAULTS


def try_forward(module: nn.Module, *, name: str, channels: int, size: int, num_classes: int) -> None:
    """Run two images through the network, at first on the ``meta`` device: shapes only, no arithmetic.

    A network that cannot be run so (its shapes depend on values) is run on the CPU on two images of zeros. Training
    mode is tried on ``meta`` alone, since on the CPU it would change the running statistics.

    Raises:
        ModelError: images too small or of a wrong number of channels, or an output that is not [2, num_classes].
    """
    was_training = module.training
    try:
        with torch.no_grad():
            _require_logits(_evaluated(module.eval(), name, channels, size), name, num_classes, "")
            try:
                trained = _on_meta(module.train(), channels, size)
            except FAULTS:
                return  # cannot be told without arithmetic
            _require_logits(trained, name, num_classes, " in training")
    finally:
        module.train(was_training)


def _evaluated(module: nn.Module, name: str, channels: int, size: int) -> object:
    try:
        return _on_meta(module, channels, size)
    except FAULTS:
        pass
    try:
        return module(torch.zeros(2, channels, size, size))
    except FAULTS as error:
        raise ModelError(
            f"{name} cannot take images of {size}x{size} pixels and {channels} channel{'s' * (channels > 1)}"
            f" ({first_line(error)}): choose another --size, or another model"
        ) from error


def _on_meta(module: nn.Module, channels: int, size: int) -> object:
    tensors = {name: torch.empty_like(t, device="meta") for name, t in module.named_parameters()}
    tensors |= {name: torch.empty_like(t, device="meta") for name, t in module.named_buffers()}
    return functional_call(module, tensors, (torch.empty(2, channels, size, size, device="meta"),))


def _require_logits(given: object, name: str, num_classes: int, when: str) -> None:
    if isinstance(given, Tensor) and given.shape == (2, num_classes):
        return
    told = f"a tensor of shape {list(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
    raise ModelError(
        f"{name} gives {told} for two images{when}; a classifier for {num_classes} classes gives [2, {num_classes}]:"
        f" set the option that makes it one (--set model.options.NAME=VALUE)"
    )
