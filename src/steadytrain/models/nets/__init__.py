"""Built-in small networks: the nets that the field's recipes and tables are written for.

Every factory takes ``num_classes``, ``channels`` (1 or 3) and ``size`` (side of the images in pixels), all by
keyword, and its own options after them. ``HEADS`` names the module that holds the classifier, ``SIZES`` and
``CHANNELS`` the side and the channels of the images that a net is meant for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from steadytrain.models.nets.cifar_resnet import CifarResNet
from steadytrain.models.nets.digits import Digits
from steadytrain.models.nets.inception_bn import InceptionBN28
from steadytrain.models.nets.lenet import LeNet
from steadytrain.models.nets.mlp import MLP
from steadytrain.models.nets.quick import Quick8

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
