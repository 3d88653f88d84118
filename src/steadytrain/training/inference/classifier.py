"""The classifier that ends a network: the layer, what it is given for each image, and what it answers."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn

from steadytrain.errors import ModelError
from steadytrain.training.evaluation import logits_of
from steadytrain.training.inference.trained import Trained
from steadytrain.training.memory import PassLimit


def classifier_of(trained: Trained) -> nn.Module:
    """Find the linear layer, or 1x1 convolution, whose output is the network's, by a pass of random images.

    Raises:
        ModelError: there is none.
    """
    side, draw = trained.input.size or 224, torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, side, side, trained.input.channels), generator=draw, dtype=torch.uint8)
    outputs: dict[nn.Module, torch.Tensor] = {}
    with torch.no_grad(), ExitStack() as stack:
        for layer in trained.module.modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                hook = layer.register_forward_hook(lambda part, _, output: outputs.update({part: output.detach()}))
                stack.callback(hook.remove)
        limit = PassLimit("evaluation", on_halved=lambda halved: None, mode="fixed")
        logits = logits_of(trained.module, images, trained.policy, trained.input, limit)
    for layer, output in outputs.items():
        if output.numel() == logits.numel() and torch.equal(output.float().reshape_as(logits), logits):
            return layer
    raise ModelError(
        f"the classifier of {trained.title} is not one linear layer that ends the network: what its features are is not"
        " known"
    )


def features_and_logits(
    head: nn.Module, trained: Trained, images_BHWC: torch.Tensor, limit: PassLimit
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the classifier is given for each image, float32 [B, D], and what it answers, float32 [B, K]."""
    caught: list[torch.Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, inputs: caught.append(inputs[0].detach().float().flatten(1)))
    try:
        logits = logits_of(trained.module, images_BHWC, trained.policy, trained.input, limit)
    finally:
        hook.remove()
    return torch.cat(caught)[-len(logits) :], logits  # behind those of passes for which memory ran out


def num_features(head: nn.Module) -> int:
    """Return how many features a classifier takes."""
    assert isinstance(head.weight, torch.Tensor)
    return head.weight[0].numel()
