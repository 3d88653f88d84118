"""Built-in small networks: the nets that the field's recipes and tables are written for.

Every factory takes ``num_classes`` (outputs), ``channels`` of the images (1 or 3) and ``size`` (their side in pixels),
all by keyword, and its own options after them; ``forward`` returns logits float[B, num_classes]. ``HEADS`` names the
module that holds the classifier, ``SIZES`` and ``CHANNELS`` the side and the channels of the images that a net is meant
for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MLP(nn.Module):
    """The perceptron of the field's MNIST recipes: flatten, two hidden layers with ReLU, and a linear classifier.

    Args:
        size: the first layer has ``channels * size**2`` inputs.
        hidden: units of the first hidden layer; the second has half as many.
    """

    def __init__(self, *, num_classes: int, channels: int, size: int, hidden: int = 128) -> None:
        super().__init__()
        if hidden < 2:
            raise ValueError(f"hidden is {hidden}; it must be 2 or more")
        self.hidden1 = nn.Linear(channels * size * size, hidden)
        self.hidden2 = nn.Linear(hidden, hidden // 2)
        self.fc = nn.Linear(hidden // 2, num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x = self.hidden1(images_BCHW.flatten(1)).relu()
        logits: Tensor = self.fc(self.hidden2(x).relu())
        return logits


class LeNet(nn.Module):
    """LeNet in the form that MXNet's recipes train (after LeCun et al. 1998, "Gradient-Based Learning ...").

    Two 5x5 convolutions (20 and 50 filters), each with tanh and 2x2 max-pooling; 500 hidden units; a classifier.

    Args:
        size: at least 16, so that something is left after the second pooling.
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
        # tanh is monotonic: after pooling it gives the same values from a quarter of the arithmetic.
        x = torch.tanh(F.max_pool2d(self.conv1(images_BCHW), 2))
        x = torch.tanh(F.max_pool2d(self.conv2(x), 2))
        logits: Tensor = self.fc(torch.tanh(self.hidden(x.flatten(1))))
        return logits


class Digits(nn.Module):
    """A four-layer convolutional net for very small images, such as scans of digits of 8x8 pixels.

    Two 3x3 convolutions, 2x2 max-pooling, two wider 3x3 convolutions, global average pooling, a classifier.

    Every convolution is followed by batch normalisation and ReLU.

    Args:
        size: any from 2 on, and the same weights serve every size.
        width: filters of the first two convolutions; the next two have twice as many.
    """

    def __init__(self, *, num_classes: int, channels: int, size: int | None = None, width: int = 32) -> None:
        super().__init__()
        self.features = nn.Sequential(
            *_conv_norm_relu(channels, width),
            *_conv_norm_relu(width, width),
            nn.MaxPool2d(2),
            *_conv_norm_relu(width, 2 * width),
            *_conv_norm_relu(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
        )
        self.fc = nn.Linear(2 * width, num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.features(images_BCHW).flatten(1))
        return logits


def _conv_norm_relu(num_in: int, num_out: int) -> tuple[nn.Module, ...]:
    return nn.Conv2d(num_in, num_out, 3, padding=1, bias=False), nn.BatchNorm2d(num_out), nn.ReLU(inplace=True)


class CifarResNet(nn.Module):
    """The CIFAR-10 residual networks of He et al. 2016, "Deep Residual Learning for Image Recognition", section 4.2.

    A 3x3 convolution, three stages of ``(depth - 2) / 6`` basic blocks (16, 32, 64 filters), and a classifier.

    The shortcuts are option A of the paper: no parameters; where a stage begins, every second pixel is taken and the
    new filters are padded with zeros. Parameters are named as in the weights that circulate for these nets
    (``conv1``, ``bn1``, ``layer1.0.conv1``, ..., ``linear``).

    Args:
        size: any from 1 on, and the same weights serve every size.
        depth: 6n + 2; the paper has 20, 32, 44, 56 and 110.
    """

    def __init__(self, *, num_classes: int, channels: int, size: int | None = None, depth: int = 20) -> None:
        super().__init__()
        if depth < 8 or depth % 6 != 2:
            raise ValueError(f"depth is {depth}; it must be 6n + 2, such as 20, 56 or 110")
        blocks = (depth - 2) // 6
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.layer1 = _stage(16, 16, blocks, stride=1)
        self.layer2 = _stage(16, 32, blocks, stride=2)
        self.layer3 = _stage(32, 64, blocks, stride=2)
        self.linear = nn.Linear(64, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):  # He et al. 2015, as the paper says
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x = F.relu(self.bn1(self.conv1(images_BCHW)), inplace=True)
        x = self.layer3(self.layer2(self.layer1(x)))
        logits: Tensor = self.linear(x.mean(dim=(2, 3)))
        return logits


class _BasicBlock(nn.Module):
    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(num_in, num_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(num_out)
        self.conv2 = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(num_out)
        self.stride = stride
        self.added = num_out - num_in

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        if self.added:  # half the new filters before the old ones, half after: as the circulating weights have it
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.added // 2, self.added // 2))
        return F.relu(y + x, inplace=True)


def _stage(num_in: int, num_out: int, blocks: int, *, stride: int) -> nn.Sequential:
    following = [_BasicBlock(num_out, num_out, 1) for _ in range(blocks - 1)]
    return nn.Sequential(_BasicBlock(num_in, num_out, stride), *following)


# Filters of each module: (1x1, 3x3) side by side, or (3x3,) of stride 2 beside a max-pooling of stride 2.
_INCEPTION_MODULES = ((32, 32), (32, 48), (80,), (112, 48), (96, 64), (80, 80), (48, 96), (96,), (176, 160), (176, 160))


class InceptionBN28(nn.Module):
    """Inception-BN for 28-pixel images: the net of MXNet's CIFAR-10 example and of its distributed-training tables.

    Batch normalisation after every convolution is from Ioffe & Szegedy 2015, "Batch Normalization: Accelerating Deep
    Network Training by Reducing Internal Covariate Shift"; the modules of two branches are the example's own.
    A 3x3 convolution of 96 filters, ten modules, global average pooling and a classifier of 336 inputs.

    Args:
        size: 28 in the example. Any from 4 on, and the same weights serve every size.
    """

    def __init__(self, *, num_classes: int, channels: int, size: int | None = None) -> None:
        super().__init__()
        self.conv1 = _ConvNormReLU(channels, 96, 3)
        modules: list[_TwoBranches | _Downsample] = []
        filters = 96
        for branches in _INCEPTION_MODULES:
            modules.append(_TwoBranches(filters, *branches) if len(branches) == 2 else _Downsample(filters, *branches))
            filters = modules[-1].num_out
        self.blocks = nn.Sequential(*modules)
        self.fc = nn.Linear(filters, num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x = self.blocks(self.conv1(images_BCHW))
        logits: Tensor = self.fc(x.mean(dim=(2, 3)))
        return logits


class _ConvNormReLU(nn.Module):
    def __init__(self, num_in: int, num_out: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        # No bias: the normalisation's shift takes its place.
        self.conv = nn.Conv2d(num_in, num_out, kernel, stride=stride, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(num_out)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_in", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x)), inplace=True)


class _TwoBranches(nn.Module):
    def __init__(self, num_in: int, num_1x1: int, num_3x3: int) -> None:
        super().__init__()
        self.conv1x1 = _ConvNormReLU(num_in, num_1x1, 1)
        self.conv3x3 = _ConvNormReLU(num_in, num_3x3, 3)
        self.num_out = num_1x1 + num_3x3

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv1x1(x), self.conv3x3(x)], dim=1)


class _Downsample(nn.Module):
    def __init__(self, num_in: int, num_3x3: int) -> None:
        super().__init__()
        self.conv3x3 = _ConvNormReLU(num_in, num_3x3, 3, stride=2)
        self.num_out = num_3x3 + num_in

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.conv3x3(x), F.max_pool2d(x, 3, stride=2, padding=1)], dim=1)


SHIFT_RATE = 64.0  # Jordan 2024, section 3.4
_WHITENING_EPS = 5e-4  # added to each variance, as he does: what hardly varies would be noise, enlarged

# Standard deviations of what the filters look for in CIFAR-10's training images, at standard deviations of 1 of each
# colour. Rows: of brightness, of red against blue, of both against green; then the mean of the patch, the difference of
# its halves (the same in both directions), and that of its diagonals.
_DEVIATIONS = ((3.17, 0.61, 0.24), (0.90, 0.122, 0.040), (0.43, 0.068, 0.025))


class Quick8(nn.Module):
    """Eight layers that learn small colour photographs in few passes over them.

    A fixed whitening layer, three groups of two 3x3 convolutions (the first of each followed by 2x2 pooling), norms and
    GELU after every convolution, and a classifier on the largest value of each filter. Sources:

    - a first layer that is not trained and whitens patches of 2x2 pixels: Page 2019, "How to Train Your ResNet"
      (myrtle.ai). He takes its filters from the data; here they are those of natural images at large, whose principal
      components are close to sums and differences of neighbouring pixels and of the three colours;
    - convolutions that begin as the identity, pooling before normalisation, norms without a scale whose shifts learn at
      a rate of their own, a small factor on the logits: Jordan 2024, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU"
      (arXiv:2404.00498), and the works that he names.

    Args:
        channels: 1 or 3, each with a mean of 0 and a standard deviation of 1.
        size: any from 9 on, and the same weights serve every size.
        width: filters of the first group; the other two have four times as many. 64 in Jordan's net, for a GPU; 32
            has a quarter of the arithmetic, for a few cores.
        width2: filters of the second group, if not ``4 * width``; ``width3`` likewise of the third.
        layers: convolutions of a group, 2 or 3; a third has a shortcut round itself and the second. Jordan's larger net
            has widths of 128, 384 and 512, and 3 of them.
    """

    def __init__(
        self,
        *,
        num_classes: int,
        channels: int,
        size: int | None = None,
        width: int = 64,
        width2: int | None = None,
        width3: int | None = None,
        layers: int = 2,
    ) -> None:
        super().__init__()
        if size is not None and size < 9:
            raise ValueError(f"quick8 needs images of at least 9 pixels, not {size}")
        widths = {"width": width, "width2": width2 or 4 * width, "width3": width3 or 4 * width}
        for name, value in widths.items():
            if value < 1:
                raise ValueError(f"{name} is {value}; it must be 1 or more")
        if layers not in (2, 3):
            raise ValueError(f"layers is {layers}; it must be 2 or 3")
        self.whiten = _Whiten(channels)
        filters = (2 * 4 * channels, *widths.values())
        self.groups = nn.Sequential(*(_QuickGroup(*pair, layers) for pair in pairwise(filters)))
        self.fc = nn.Linear(filters[-1], num_classes, bias=False)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        x = self.groups(F.gelu(self.whiten(images_BCHW)))
        logits: Tensor = self.fc(x.amax(dim=(2, 3)))
        return logits / 9

    def lr_scales(self) -> Mapping[str, float]:
        """Parameters that learn at a rate of their own, by name, and how many times the rate of the others it is."""
        shifts = ("norm1.bias", "norm2.bias", "norm3.bias")
        return {name: SHIFT_RATE for name, _ in self.named_parameters() if name.endswith(shifts)}


class _Whiten(nn.Module):
    """Filters of 2x2 pixels whose outputs hardly depend on each other in photographs, and their opposites."""

    weight: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        if channels not in (1, 3):
            raise ValueError(f"quick8 takes images of 1 or 3 channels, not {channels}")
        filters = _patch_filters(channels)
        self.register_buffer("weight", torch.cat((filters, -filters)))
        self.bias = nn.Parameter(torch.zeros(2 * len(filters)))

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return F.conv2d(images_BCHW, self.weight, self.bias)


class _QuickGroup(nn.Module):
    def __init__(self, num_in: int, num_out: int, layers: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = _dirac_conv(num_in, num_out), _quick_norm(num_out)
        self.conv2, self.norm2 = _dirac_conv(num_out, num_out), _quick_norm(num_out)
        self.conv3 = _dirac_conv(num_out, num_out) if layers == 3 else None
        self.norm3 = _quick_norm(num_out) if layers == 3 else None

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(F.max_pool2d(self.conv1(x), 2)))
        y = F.gelu(self.norm2(self.conv2(x)))
        if self.conv3 is None or self.norm3 is None:
            return y
        return F.gelu(self.norm3(self.conv3(y)) + x)


def _dirac_conv(num_in: int, num_out: int) -> nn.Conv2d:
    """3x3; the first filters begin as copies of what comes in."""
    layer = nn.Conv2d(num_in, num_out, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:num_in])
    return layer


def _quick_norm(num: int) -> nn.BatchNorm2d:
    """A batch norm with a shift and without a scale, which the next convolution has; its statistics forget soon."""
    layer = nn.BatchNorm2d(num, momentum=0.4)
    layer.register_parameter("weight", None)
    return layer


def _patch_filters(channels: int) -> Tensor:
    """Float[4 * channels, channels, 2, 2]."""
    patches = torch.tensor([[[1.0, 1], [1, 1]], [[1, 1], [-1, -1]], [[1, -1], [1, -1]], [[1, -1], [-1, 1]]]) / 2
    colours = F.normalize(torch.tensor([[1.0, 1, 1], [1, 0, -1], [1, -2, 1]])) if channels == 3 else torch.ones(1, 1)
    means, halves, diagonals = torch.tensor(_DEVIATIONS[: len(colours)]).T
    deviations = (torch.stack((means, halves, halves, diagonals), dim=1).square() + _WHITENING_EPS).sqrt()
    filters = colours[:, None, :, None, None] * patches[None, :, None] / deviations[:, :, None, None, None]
    return filters.flatten(0, 1)


BUILTINS: dict[str, Callable[..., nn.Module]] = {
    "digits": Digits,
    "inception-bn-28-small": InceptionBN28,
    "lenet": LeNet,
    "mlp": MLP,
    "quick8": Quick8,
    "resnet20": partial(CifarResNet, depth=20),
    "resnet32": partial(CifarResNet, depth=32),
    "resnet44": partial(CifarResNet, depth=44),
    "resnet56": partial(CifarResNet, depth=56),
    "resnet110": partial(CifarResNet, depth=110),
}

HEADS: dict[str, str] = {name: "linear" if name.startswith("resnet") else "fc" for name in BUILTINS}

SIZES: dict[str, int] = {name: 28 if name in ("inception-bn-28-small", "lenet", "mlp") else 32 for name in BUILTINS}

CHANNELS: dict[str, int] = {name: 1 if name in ("digits", "lenet", "mlp") else 3 for name in BUILTINS}
