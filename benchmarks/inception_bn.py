"""Inception-BN, for ``steady bench infer inception_bn:inception_bn`` with this folder on the PYTHONPATH."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_MODULES = (
    (64, 64, 64, 64, 96, 32),
    (64, 64, 96, 64, 96, 64),
    (0, 128, 160, 64, 96, 0),
    (224, 64, 96, 96, 128, 128),
    (192, 96, 128, 96, 128, 128),
    (160, 128, 160, 128, 160, 128),
    (96, 128, 192, 160, 192, 128),
    (0, 128, 192, 192, 256, 0),
    (352, 192, 320, 160, 224, 128),
    (352, 192, 320, 192, 224, 128),
)
"""Filters of each module of Inception-BN: 1x1; 3x3 and before them 1x1; two 3x3 and before them 1x1; of the pooling."""


def inception_bn(num_classes: int = 1000, **_: object) -> nn.Module:
    """Build Inception with batch normalisation, as MXNet's model zoo has it ("Inception-BN"), for images of 224 pixels.

    After Ioffe & Szegedy 2015, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate
    Shift": GoogLeNet with two 3x3 convolutions for the 5x5, and strides instead of some poolings. 11.3 M parameters.
    """
    layers: list[nn.Module] = [_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, ceil_mode=True), _conv(64, 64, 1)]
    layers += [_conv(64, 192, 3), nn.MaxPool2d(3, 2, ceil_mode=True)]
    width = 192
    for filters in _MODULES:
        is_averaged = filters[0] > 0 and filters is not _MODULES[-1]
        layers.append(_Branches(width, *filters, pool=nn.AvgPool2d if is_averaged else nn.MaxPool2d))
        width = filters[0] + filters[2] + filters[4] + (filters[5] or width)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, num_classes))


def _conv(num_in: int, num_out: int, kernel: int, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(num_in, num_out, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(num_out), nn.ReLU())


class _Branches(nn.Module):
    """A module of Inception-BN; without 1x1 filters it halves the image, and passes the pooled input on."""

    def __init__(self, width: int, single: int, a: int, triple: int, b: int, double: int, projected: int, pool: type):
        super().__init__()
        stride = 1 if single else 2
        branches = [nn.Sequential(_conv(width, a, 1), _conv(a, triple, 3, stride))]
        branches += [nn.Sequential(_conv(width, b, 1), _conv(b, double, 3), _conv(double, double, 3, stride))]
        branches += [nn.Sequential(pool(3, stride, 1), *([_conv(width, projected, 1)] if projected else []))]
        self.branches = nn.ModuleList([*([_conv(width, single, 1)] if single else []), *branches])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)
