"""A net of eight layers that learns small colour photographs soon, in few passes over them.

What makes it quick is known from others, who measured it on CIFAR-10:

- a first layer that is not trained and whitens patches of 2x2 pixels: Page 2019, "How to Train Your ResNet"
  (myrtle.ai). He takes its filters from the data. Here they are those of natural images at large, which are almost the
  same everywhere: neighbouring pixels are alike and so are the three colours, so that sums and differences of both
  come close to the principal components of every set of photographs;
- convolutions that begin as the identity, pooling before normalisation, norms without a scale whose shifts learn at a
  rate of their own, a small factor on the logits: Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU"
  (arXiv:2404.00498), and the works that he names.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SHIFT_RATE = 64.0  # Jordan 2024, section 3.4
_STEEPEST = 5e-4  # added to each variance, as he does: what hardly varies would be noise, enlarged

# Standard deviations of what the filters look for in CIFAR-10's training images, at standard deviations of 1 of each
# colour. Rows: of brightness, of red against blue, of both against green; then the mean of the patch, the difference of
# its halves (the same in both directions), and that of its diagonals.
_FOUND = ((3.17, 0.61, 0.24), (0.90, 0.122, 0.040), (0.43, 0.068, 0.025))


class Quick8(nn.Module):
    """A fixed whitening layer, three groups of two 3x3 convolutions, a classifier on the largest value of each filter.

    A group pools its first convolution by 2x2. Norms and GELU follow every convolution.

    Args:
        num_classes: outputs.
        channels: of the images: 1 or 3, each with a mean of 0 and a standard deviation of 1.
        size: side of the images in pixels; any from 9 on, and the same weights serve every size.
        width: filters of the first group; the other two have four times as many. 64 in Jordan's net, for a GPU; 32
            has a quarter of the arithmetic, for a few cores.
    """

    def __init__(self, *, num_classes: int, channels: int, size: int | None = None, width: int = 64) -> None:
        super().__init__()
        if size is not None and size < 9:
            raise ValueError(f"quick8 needs images of at least 9 pixels, not {size}")
        if width < 1:
            raise ValueError(f"width is {width}; it must be 1 or more")
        self.whiten = _Whiten(channels)
        filters = (2 * 4 * channels, width, 4 * width, 4 * width)
        self.groups = nn.Sequential(*(_Group(*pair) for pair in pairwise(filters)))
        self.fc = nn.Linear(filters[-1], num_classes, bias=False)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Logits float[B, num_classes]."""
        x = self.groups(F.gelu(self.whiten(images_BCHW)))
        logits: Tensor = self.fc(x.amax(dim=(2, 3)))
        return logits / 9

    def lr_scales(self) -> Mapping[str, float]:
        """Parameters that learn at a rate of their own, by name, and how many times the rate of the others it is."""
        return {name: SHIFT_RATE for name, _ in self.named_parameters() if name.endswith(("norm1.bias", "norm2.bias"))}


class _Whiten(nn.Module):
    """Filters of 2x2 pixels whose outputs hardly depend on each other in photographs, and their opposites."""

    weight: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        if channels not in (1, 3):
            raise ValueError(f"quick8 takes images of 1 or 3 channels, not {channels}")
        found = _patch_filters(channels)
        self.register_buffer("weight", torch.cat((found, -found)))
        self.bias = nn.Parameter(torch.zeros(2 * len(found)))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return F.conv2d(images_BCHW, self.weight, self.bias)


class _Group(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _convolution(num_in, num_out), _norm(num_out)
        self.conv2, self.norm2 = _convolution(num_out, num_out), _norm(num_out)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        return F.gelu(self.norm2(self.conv2(x)))


def _convolution(num_in: int, num_out: int) -> nn.Conv2d:
    """3x3; the first filters begin as copies of what comes in."""
    made = nn.Conv2d(num_in, num_out, 3, padding=1, bias=False)
    nn.init.dirac_(made.weight.data[:num_in])
    return made


def _norm(num: int) -> nn.BatchNorm2d:
    """A batch norm with a shift and without a scale, which the next convolution has; its statistics forget soon."""
    made = nn.BatchNorm2d(num, momentum=0.4)
    made.register_parameter("weight", None)
    return made


def _patch_filters(channels: int) -> Tensor:
    """Float[4 * channels, channels, 2, 2]."""
    patches = torch.tensor([[[1.0, 1], [1, 1]], [[1, 1], [-1, -1]], [[1, -1], [1, -1]], [[1, -1], [-1, 1]]]) / 2
    colours = F.normalize(torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]])) if channels == 3 else torch.ones(1, 1)
    means, halves, diagonals = torch.tensor(_FOUND[: len(colours)]).T
    deviations = (torch.stack((means, halves, halves, diagonals), dim=1).square() + _STEEPEST).sqrt()
    filters = colours[:, None, :, None, None] * patches[None, :, None] / deviations[:, :, None, None, None]
    return filters.flatten(0, 1)
