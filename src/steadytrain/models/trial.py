"""Does a network take these images and give one value for each class? Asked before anything is trained."""

from __future__ import annotations

from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.parameter import is_lazy

from steadytrain.errors import ModelError, first_line
from steadytrain.models.made import FAULTS

LARGE, LARGE_SIDE = 100_000_000, 256
"""Parameters, and pixels above which shapes are told on ``meta``: torch imports seconds of its compiler for that."""


def try_forward(module: nn.Module, *, name: str, channels: int, size: int, num_classes: int) -> None:
    """Run two images of zeros through the network, as evaluation and as training do, and leave no trace in it.

    A :data:`LARGE` network, and large images, are run on the ``meta`` device: shapes without arithmetic, unless they
    depend on values.

    Raises:
        ModelError: images too small or of a wrong number of channels, or an output that is not [2, num_classes].
    """
    was_training = module.training
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            _require_logits(_evaluated(module.eval(), name, channels, size), name, num_classes, "")
            try:
                trained = _run(module.train(), channels, size)
            except FAULTS:
                return  # what two images are too few for, more may not be
            _require_logits(trained, name, num_classes, " in training")
    finally:
        module.train(was_training)


def _evaluated(module: nn.Module, name: str, channels: int, size: int) -> object:
    try:
        return _run(module, channels, size)
    except FAULTS as error:
        raise ModelError(
            f"{name} cannot take images of {size}x{size} pixels and {channels} channel{'s' * (channels > 1)}"
            f" ({first_line(error)}): choose another --size, or another model"
        ) from error


def _run(module: nn.Module, channels: int, size: int) -> object:
    """What it gives. Parameters that wait for their shapes get them; buffers are left alone."""
    parameters = {name: one for name, one in module.named_parameters() if not is_lazy(one)}
    if size > LARGE_SIDE or sum(one.numel() for one in parameters.values()) >= LARGE:
        with suppress(*FAULTS):
            return _called(module, parameters, "meta", channels, size)
    return _called(module, {}, "cpu", channels, size)


def _called(module: nn.Module, others: dict[str, nn.Parameter], device: str, channels: int, size: int) -> object:
    tensors = {name: one.to(device, copy=True) for name, one in (others | dict(module.named_buffers())).items()}
    return functional_call(module, tensors, (torch.zeros(2, channels, size, size, device=device),))


def _require_logits(given: object, name: str, num_classes: int, when: str) -> None:
    if isinstance(given, Tensor) and given.shape == (2, num_classes):
        return
    told = f"a tensor of shape {list(given.shape)}" if isinstance(given, Tensor) else f"a {type(given).__name__}"
    raise ModelError(
        f"{name} gives {told} for two images{when}; a classifier for {num_classes} classes gives [2, {num_classes}]:"
        f" set the option that makes it one (--set model.options.NAME=VALUE)"
    )
