"""Inception-BN for 28-pixel images: the net of MXNet's CIFAR-10 example and of its distributed-training tables.

Batch normalisation after every convolution is from Ioffe & Szegedy 2015, "Batch Normalization: Accelerating Deep
Network Training by Reducing Internal Covariate Shift"; the small modules of two branches are the example's own.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

# Filters of each module: (1x1, 3x3) side by side, or (3x3,) of stride 2 beside a max-pooling of stride 2.
_MODULES = ((32, 32), (32, 48), (80,), (112, 48), (96, 64), (80, 80), (48, 96), (96,), (176, 160), (176, 160))


class InceptionBN28(nn.Module):
    """A 3x3 convolution of 96 filters, ten modules, global average pooling and a classifier of 336 inputs.

    Args:
        num_classes: outputs.
        channels: of the images.
        size: side of the images in pixels; 28 in the example. Any from 4 on, and the same weights serve every size.
    """

    def __init__(self, *, num_classes: int, channels: int, size: int | None = None) -> None:
        super().__init__()
        self.conv1 = _Conv(channels, 96, 3)
        modules: list[_Simple | _Downsample] = []
        filters = 96
        for told in _MODULES:
            modules.append(_Simple(filters, *told) if len(told) == 2 else _Downsample(filters, *told))
            filters = modules[-1].num_out
        self.blocks = nn.Sequential(*modules)
        self.fc = nn.Linear(filters, num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits float[B, num_classes]."""
        x = self.blocks(self.conv1(images_BCHW))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class _Conv(nn.Module):
    def __init__(self, num_in: int, num_out: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        # No bias: the normalisation's shift takes its place.
        self.conv = nn.Conv2d(num_in, num_out, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(num_out)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_in", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class _Simple(nn.Module):
    def __init__(self, num_in: int, num_1x1: int, num_3x3: int) -> None:
        super().__init__()
        self.conv1x1 = _Conv(num_in, num_1x1, 1)
        self.conv3x3 = _Conv(num_in, num_3x3, 3)
        self.num_out = num_1x1 + num_3x3

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv1x1(x), self.conv3x3(x)], dim=1)


class _Downsample(nn.Module):
    def __init__(self, num_in: int, num_3x3: int) -> None:
        super().__init__()
        self.conv3x3 = _Conv(num_in, num_3x3, 3, stride=2)
        self.num_out = num_3x3 + num_in

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv3x3(x), F.max_pool2d(x, 3, stride=2, padding=1)], dim=1)
