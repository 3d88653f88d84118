"""LeNet in the form that MXNet's recipes train (after LeCun et al. 1998, "Gradient-Based Learning ...")."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class LeNet(nn.Module):
    """Two 5x5 convolutions (20 and 50 filters), each with tanh and 2x2 max-pooling; 500 hidden units; a classifier.

    Args:
        num_classes: outputs.
        channels: of the images.
        size: side of the images in pixels; at least 16, so that something is left after the second pooling.
    """

    def __init__(self, *, num_classes: int, channels: int, size: int) -> None:
        super().__init__()
        if size < 16:
            raise ValueError(f"lenet needs images of at least 16 pixels, not {size}")
        side = ((size - 4) // 2 - 4) // 2
        self.conv1 = nn.Conv2d(channels, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.hidden = nn.Linear(50 * side * side, 500)
        self.fc = nn.Linear(500, num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits float[B, num_classes]."""
        # The largest value's tanh is the largest tanh, and asks for a quarter as many of them.
        x = torch.tanh(F.max_pool2d(self.conv1(images_BCHW), 2))
        x = torch.tanh(F.max_pool2d(self.conv2(x), 2))
        logits: Tensor = self.fc(torch.tanh(self.hidden(x.flatten(1))))
        return logits
