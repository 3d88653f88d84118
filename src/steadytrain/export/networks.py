"""The networks that are measured: image classifiers by names, with drawn weights or a file's, and their images."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from steadytrain import models
from steadytrain.config import Model, Precision
from steadytrain.data.recordio.reader import Records
from steadytrain.errors import ModelError, did_you_mean
from steadytrain.models.class_names import match_classes
from steadytrain.models.exported import is_exported
from steadytrain.training.build import DEFAULT_MEAN, DEFAULT_STD
from steadytrain.training.data import open_records
from steadytrain.training.inference.inference import Files
from steadytrain.training.inference.trained import Trained, restore
from steadytrain.training.precision import Policy

NETWORKS: dict[str, tuple[str, str]] = {
    "alexnet": ("AlexNet", "torchvision/alexnet"),
    "vgg16": ("VGG-16", "torchvision/vgg16"),
    "vgg19": ("VGG-19", "torchvision/vgg19"),
    "inception-v3": ("Inception v3", "timm/inception_v3"),
    "inception-v4": ("Inception v4", "timm/inception_v4"),
    "inception-resnet-v2": ("Inception-ResNet v2", "timm/inception_resnet_v2"),
    "resnet50": ("ResNet-50", "timm/resnet50"),
    "resnet50-v2": ("ResNet-50 v2", "timm/resnetv2_50"),
    "resnet101": ("ResNet-101", "timm/resnet101"),
    "resnet152": ("ResNet-152", "timm/resnet152"),
    "squeezenet": ("SqueezeNet 1.1", "torchvision/squeezenet1_1"),
    "mobilenet": ("MobileNet v1", "timm/mobilenetv1_100"),
    "mobilenet-v2": ("MobileNet v2", "timm/mobilenetv2_100"),
    "densenet121": ("DenseNet-121", "timm/densenet121"),
}
"""Title and model by the name that the command line takes, in the order of the table."""

GONE = {
    **dict.fromkeys(
        ("ssd-vgg16", "ssd-mobilenet", "faster-rcnn", "gnmt", "dcgan"),
        "it is no image classifier, and those alone are measured",
    ),
    "inception-bn": "a network of timm or torchvision it is not: name its factory, as inception_bn:inception_bn in the"
    " folder benchmarks of the sources",
}
"""Networks that the table once had, with what became of them."""


def is_pretrained(name: str) -> bool:
    """Return whether a name asks for pretrained weights of timm, which may have to be fetched.

    >>> is_pretrained("timm/resnet18.a1_in1k"), is_pretrained("timm/resnet18"), is_pretrained("resnet50")
    (True, False, False)
    """
    return name.startswith("timm/") and "." in name and "=" not in name and not Path(name).exists()


def load_network(name: str) -> Trained:
    """Build the network that a user named, in fp32 on the CPU; where ``path`` is empty its weights are drawn.

    Args:
        name: of :data:`NETWORKS`; ``timm/NAME`` (with a tag: its pretrained weights), a built-in, ``pkg.mod:factory``;
            a run or a weights file; or ``NAME=FILE``, a network with the weights of a file.

    Raises:
        SteadyError: there is no such network, or its weights do not fit.

    >>> load_network("mlp").input.size
    28
    """
    torch.manual_seed(0)
    network, _, file = name.partition("=")
    _, model = NETWORKS.get(network, ("", network))
    if file or Path(name).exists() or is_pretrained(name):
        if is_exported(file or name):
            raise ModelError(f"{file or name} runs on the engine that it is for alone: name the run or the weights")
        return restore(file or name, model=model if file else None, device="cpu", precision="fp32")
    if "/" in model and ":" not in model and not model.startswith(("timm/", "torchvision/")):
        raise ModelError("there is no such file or folder: name a run, a weights file or a network (steady models)")
    try:
        built = models.build(Model(model), num_classes=1000, channels=3, size=None, allow_import=True)
    except ModelError as error:
        hint = "" if "Did you mean" in str(error) else did_you_mean(name, NETWORKS)
        raise ModelError(f"{error}{hint}") from error
    input = built.input.filled(224, DEFAULT_MEAN, DEFAULT_STD)
    return Trained(built.module.eval(), Policy(Precision("fp32"), torch.device("cpu")), input, (), built.name, Path())


def real_samples(network: Trained, data: str, most: int) -> tuple[Tensor, Tensor]:
    """Read images as the network wants them, spread over a record file or a folder, and the outputs right for them.

    Returns:
        float32 [N, C, H, W], normalised; int64 [N], -1 where the network has no such class, or where it is not known.
    """
    with open_records(Path(data)) if data.endswith(".rec") else Files(data) as source:
        ids = np.unique(np.linspace(0, len(source) - 1, min(most, len(source))).astype(np.int64))
        with network.feed(source, ids=ids, batch_size=len(ids), threads=None) as loader:
            batch = next(iter(loader))
        images = network.policy.images(torch.from_numpy(batch.images), network.input.mean, network.input.std)
        labels = np.full(len(ids), -1)
        if isinstance(source, Records) and network.classes and not network.is_multi_label and batch.labels.ndim == 1:
            matches = match_classes(source.class_list, network.classes, synsets=network.synsets)
            labels = np.array([-1 if match.output is None else match.output for match in matches])[batch.labels]
    return images.contiguous(), torch.from_numpy(labels)
