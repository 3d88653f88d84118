"""The networks of the field's inference tables: torchvision's and timm's, and small built-ins for the others.

Weights are drawn: the speed of a network does not depend on them. Batch norms get the statistics of a batch, so that
activations keep the range that trained ones have (:func:`settle`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

InputKind = Literal["images", "tokens", "noise"]


@dataclass(frozen=True, kw_only=True)
class BenchNetwork:
    """A network and what it takes.

    Args:
        title: as tables call it.
        make: returns the network, its weights drawn from torch's global generator.
        shape: of one sample: channels, height and width, tokens, or length of the code.
        kind: what a sample is: an image, a row of token numbers, or a random code.
        most: samples at a time, at most; None: any number.
        comparable: whether two engines give outputs in the same order; if not, there is no parity.
        classes: whether the outputs are scores of classes.
        remark: what a reader of its figures should know, a line.
    """

    title: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...] = (3, 224, 224)
    kind: InputKind = "images"
    most: int | None = None
    comparable: bool = True
    classes: bool = True
    remark: str = ""

    def draw(self, num: int, seed: int = 0) -> Tensor:
        """Draw samples, the same for a seed: float32, or int64 token numbers."""
        generator = torch.Generator().manual_seed(seed)
        if self.kind == "tokens":
            return torch.randint(VOCABULARY, (num, *self.shape), generator=generator)
        return torch.randn((num, *self.shape), generator=generator)


VOCABULARY = 32_000
"""Of the sequence model, as many as in the system that it follows."""


class _Filters(NamedTuple):
    """Filters of the branches of a module; a pooling without ``projected`` filters passes its input on."""

    filters_1x1: int
    reduced: int
    filters_3x3: int
    reduced_double: int
    double: int
    projected: int
    pooling: str


_MODULES = (
    _Filters(64, 64, 64, 64, 96, 32, "avg"),
    _Filters(64, 64, 96, 64, 96, 64, "avg"),
    _Filters(0, 128, 160, 64, 96, 0, "max"),
    _Filters(224, 64, 96, 96, 128, 128, "avg"),
    _Filters(192, 96, 128, 96, 128, 128, "avg"),
    _Filters(160, 128, 160, 128, 160, 128, "avg"),
    _Filters(96, 128, 192, 160, 192, 128, "avg"),
    _Filters(0, 128, 192, 192, 256, 0, "max"),
    _Filters(352, 192, 320, 160, 224, 128, "avg"),
    _Filters(352, 192, 320, 192, 224, 128, "max"),
)


class InceptionBN(nn.Module):
    """Inception with batch normalisation, as MXNet's model zoo has it ("Inception-BN"), for images of 224 pixels.

    After Ioffe & Szegedy 2015, "Batch Normalization: Accelerating Deep Network Training by Reducing Internal Covariate
    Shift": GoogLeNet with two 3x3 convolutions for the 5x5, and strides instead of some poolings. 11.3 M parameters.
    """

    def __init__(self, num_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            _conv(3, 64, 7, stride=2),
            nn.MaxPool2d(3, 2, ceil_mode=True),
            _conv(64, 64, 1),
            _conv(64, 192, 3),
            nn.MaxPool2d(3, 2, ceil_mode=True),
        )
        blocks, filters = [], 192
        for filters_of in _MODULES:
            blocks.append(_Branches(filters, filters_of))
            filters = blocks[-1].num_out
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(filters, num_classes)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.blocks(self.stem(images_BCHW)).mean(dim=(2, 3)))
        return logits


def _conv(num_in: int, num_out: int, kernel: int, *, stride: int = 1) -> nn.Sequential:
    conv = nn.Conv2d(num_in, num_out, kernel, stride, kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(num_out), nn.ReLU())


class _Branches(nn.Module):
    """A module of Inception-BN; without 1x1 filters it halves the image."""

    def __init__(self, num_in: int, of: _Filters) -> None:
        super().__init__()
        stride = 1 if of.filters_1x1 else 2
        double = _conv(num_in, of.reduced_double, 1), _conv(of.reduced_double, of.double, 3)
        branches = [_conv(num_in, of.filters_1x1, 1)] if of.filters_1x1 else []
        single = _conv(num_in, of.reduced, 1), _conv(of.reduced, of.filters_3x3, 3, stride=stride)
        branches.append(nn.Sequential(*single))
        branches.append(nn.Sequential(*double, _conv(of.double, of.double, 3, stride=stride)))
        pooling: nn.Module = nn.AvgPool2d(3, stride, 1) if of.pooling == "avg" else nn.MaxPool2d(3, stride, 1)
        branches.append(nn.Sequential(pooling, *([_conv(num_in, of.projected, 1)] if of.projected else [])))
        self.branches = nn.ModuleList(branches)
        self.num_out = of.filters_1x1 + of.filters_3x3 + of.double + (of.projected or num_in)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class SequenceEncoder(nn.Module):
    """The encoder of a translation system: an embedding and eight LSTM layers, the first in both directions.

    After Wu et al. 2016, "Google's Neural Machine Translation System": residual connections from the third layer on.
    Takes token numbers int64[B, T]; returns float[B, T, width].
    """

    def __init__(self, width: int = 1024, layers: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.first = nn.LSTM(width, width, batch_first=True, bidirectional=True)
        self.second = nn.LSTM(2 * width, width, batch_first=True)
        self.rest = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers - 2))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x: Tensor = self.second(self.first(self.embed(tokens_BT))[0])[0]
        for layer in self.rest:
            x = x + layer(x)[0]
        return x


class Generator(nn.Module):
    """A DCGAN generator: a code of 100 numbers to an image of 3 x 64 x 64 in [-1, 1].

    After Radford et al. 2015, "Unsupervised Representation Learning with Deep Convolutional Generative Adversarial
    Networks", with the 64 to 512 filters of the usual example programs. Takes float[B, 100].
    """

    def __init__(self, filters: int = 64) -> None:
        super().__init__()
        widths = [100, *(filters * times for times in (8, 4, 2, 1)), 3]
        layers: list[nn.Module] = []
        for number, (num_in, num_out) in enumerate(pairwise(widths)):
            stride, padding = (1, 0) if number == 0 else (2, 1)
            layers.append(nn.ConvTranspose2d(num_in, num_out, 4, stride, padding, bias=False))
            layers += [nn.BatchNorm2d(num_out), nn.ReLU()] if number < len(widths) - 2 else [nn.Tanh()]
        self.layers = nn.Sequential(*layers)

    def forward(self, code_BN: Tensor) -> Tensor:
        image: Tensor = self.layers(code_BN[:, :, None, None])
        return image


class SingleShot(nn.Module):
    """The network of one of torchvision's SSD detectors: offsets of boxes and scores of classes, [B, boxes, 4 + K].

    The choice among overlapping boxes, which comes after the network, is left out.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        from torchvision.models import detection

        detector: Any = getattr(detection, name)(weights=None, weights_backbone=None)
        self.backbone, self.head = detector.backbone, detector.head

    def forward(self, images_BCHW: Tensor) -> Tensor:
        outputs = self.head(list(self.backbone(images_BCHW).values()))
        return torch.cat([outputs["bbox_regression"], outputs["cls_logits"]], 2)


class RegionDetector(nn.Module):
    """torchvision's Faster R-CNN (ResNet-50, feature pyramid) as a whole; returns all boxes of the batch, [N, 4]."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        from torchvision.models.detection import fasterrcnn_resnet50_fpn

        sides = {"min_size": min(shape[1:]), "max_size": max(shape[1:])}
        self.detector: Any = fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None, **sides)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        return torch.cat([boxes["boxes"] for boxes in self.detector(list(images_BCHW))])


def _timm(name: str) -> nn.Module:
    import timm

    module: nn.Module = timm.create_model(name)
    return module


def _torchvision(name: str) -> nn.Module:
    import torchvision

    module: nn.Module = getattr(torchvision.models, name)(weights=None)
    return module


_INCEPTION, _REGIONS = (3, 299, 299), (3, 600, 800)
"""Shapes of images."""
_WITHOUT_CHOICE = "the network alone, without the choice among overlapping boxes"

NETWORKS: dict[str, BenchNetwork] = {
    "alexnet": BenchNetwork(title="AlexNet", make=partial(_torchvision, "alexnet")),
    "vgg16": BenchNetwork(title="VGG-16", make=partial(_torchvision, "vgg16")),
    "vgg19": BenchNetwork(title="VGG-19", make=partial(_torchvision, "vgg19")),
    "inception-bn": BenchNetwork(title="Inception-BN", make=InceptionBN),
    "inception-v3": BenchNetwork(title="Inception v3", make=partial(_timm, "inception_v3"), shape=_INCEPTION),
    "inception-v4": BenchNetwork(title="Inception v4", make=partial(_timm, "inception_v4"), shape=_INCEPTION),
    "inception-resnet-v2": BenchNetwork(
        title="Inception-ResNet v2", make=partial(_timm, "inception_resnet_v2"), shape=_INCEPTION
    ),
    "resnet50": BenchNetwork(title="ResNet-50", make=partial(_timm, "resnet50")),
    "resnet50-v2": BenchNetwork(title="ResNet-50 v2", make=partial(_timm, "resnetv2_50")),
    "resnet101": BenchNetwork(title="ResNet-101", make=partial(_timm, "resnet101")),
    "resnet152": BenchNetwork(title="ResNet-152", make=partial(_timm, "resnet152")),
    "squeezenet": BenchNetwork(title="SqueezeNet 1.1", make=partial(_torchvision, "squeezenet1_1")),
    "mobilenet": BenchNetwork(title="MobileNet v1", make=partial(_timm, "mobilenetv1_100")),
    "mobilenet-v2": BenchNetwork(title="MobileNet v2", make=partial(_timm, "mobilenetv2_100")),
    "densenet121": BenchNetwork(title="DenseNet-121", make=partial(_timm, "densenet121")),
    "ssd-vgg16": BenchNetwork(
        title="SSD, VGG-16",
        make=partial(SingleShot, "ssd300_vgg16"),
        shape=(3, 300, 300),
        classes=False,
        remark=_WITHOUT_CHOICE,
    ),
    "ssd-mobilenet": BenchNetwork(
        title="SSDlite, MobileNet v3",
        make=partial(SingleShot, "ssdlite320_mobilenet_v3_large"),
        shape=(3, 320, 320),
        classes=False,
        remark=_WITHOUT_CHOICE,
    ),
    "faster-rcnn": BenchNetwork(
        title="Faster R-CNN",
        make=partial(RegionDetector, _REGIONS),
        shape=_REGIONS,
        most=1,
        comparable=False,
        classes=False,
        remark="ResNet-50 with a feature pyramid, the whole detector; an image at a time",
    ),
    "gnmt": BenchNetwork(
        title="GNMT-like encoder",
        make=SequenceEncoder,
        shape=(25,),
        kind="tokens",
        classes=False,
        remark="eight LSTM layers of 1,024; a sample is a sentence of 25 tokens",
    ),
    "dcgan": BenchNetwork(
        title="DCGAN generator",
        make=Generator,
        shape=(100,),
        kind="noise",
        classes=False,
        remark="a sample is an image of 3 x 64 x 64 that is drawn",
    ),
}
"""By the name that the command line takes, in the order of the table."""

_RESIDUAL_GAIN = 0.2
"""Scale of a batch norm that begins at 0, as one of a residual branch does: near that of trained networks."""


def settle(module: nn.Module, samples: Tensor) -> None:
    """Give batch norms the statistics of these samples; changes the network, which is left in evaluation mode.

    Drawn weights with the norms' initial statistics let activations grow from layer to layer until they overflow half
    precision, and branches whose norm begins at 0 would compute nothing.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    >>> settle(net, torch.randn(4096, 4) * 100)
    >>> 0.9 < net(torch.randn(4096, 4) * 100).std().item() < 1.1
    True
    """
    module.eval()
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if not norms:
        return
    momenta = [norm.momentum for norm in norms]
    with torch.no_grad():
        for norm in norms:
            norm.train()
            norm.momentum = 1.0
            if norm.affine and not norm.weight.any():
                norm.weight.fill_(_RESIDUAL_GAIN)
        module(samples)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum
        norm.eval()
