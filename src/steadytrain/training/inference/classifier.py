"""The classifier that ends a network: the layer, what it is given for each image, and what it answers."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import nn

from steadytrain.errors import ModelError
from steadytrain.training.inference.trained import Trained
from steadytrain.training.memory import PassLimit


def classifier_of(trained: Trained) -> nn.Module:
    """Find the linear layer that ends a network, by a pass of random images. Raises ModelError."""
    side, channels = trained.input.size, trained.input.channels
    draw = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (2, side or 224, side or 224, channels), generator=draw, dtype=torch.uint8)
    with torch.no_grad():
        return find_classifier(trained, images.to(trained.policy.device))


def _forward(trained: Trained, images_BHWC: torch.Tensor) -> torch.Tensor:
    with trained.policy.autocast():
        logits: torch.Tensor = trained.module(trained.policy.images(images_BHWC, trained.input.mean, trained.input.std))
    return logits


def find_classifier(trained: Trained, images_BHWC: torch.Tensor) -> nn.Module:
    """Return the linear layer, or 1x1 convolution, whose output is the network's. Raises ModelError."""
    outputs: dict[nn.Module, torch.Tensor] = {}
    parts = trained.module.modules()
    layers: list[nn.Module] = [part for part in parts if isinstance(part, nn.Linear | nn.Conv2d)]
    with ExitStack() as stack:
        for layer in layers:
            hook = layer.register_forward_hook(lambda part, _, output: outputs.update({part: output.detach()}))
            stack.callback(hook.remove)
        logits = _forward(trained, images_BHWC)
    for layer, output in outputs.items():
        if output.numel() == logits.numel() and torch.equal(output.reshape_as(logits), logits):
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

    def forward(at_once: int) -> tuple[torch.Tensor, torch.Tensor]:
        caught.clear()
        parts = images_BHWC.tensor_split(-(-len(images_BHWC) // at_once))
        logits = torch.cat([_forward(trained, part).float() for part in parts])
        return torch.cat(caught), logits

    try:
        return limit.fit(forward, len(images_BHWC))
    finally:
        hook.remove()
