"""Networks of MXNet's scripts and models of its zoo, by the names that they have here."""

from __future__ import annotations

from steadytrain.errors import InputError, did_you_mean

_GOOGLENET = ("--set", "model.options.aux_logits=false", "--set", "model.options.init_weights=true")
MODEL_OPTIONS = {"torchvision.models:googlenet": _GOOGLENET}


def find_model(name: str, layers: int | None, side: int) -> tuple[str, str]:
    """Return the model that an old network's name means for images of so many pixels, and what differs.

    >>> find_model("resnet", 20, 28)[0], find_model("resnext", 101, 224)[0], find_model("inception-v3", None, 299)[0]
    ('resnet20', 'timm/resnext101_32x4d', 'timm/inception_v3')
    """
    if name in _NETWORKS:
        return _NETWORKS[name]
    if name == "inception-bn":
        small = ("inception-bn-28-small", "")
        return (
            small if side <= 32 else ("torchvision.models:googlenet", "the same blocks with batch norms; the nearest")
        )
    if name not in FAMILIES:
        near = did_you_mean(name, [*_NETWORKS, *FAMILIES, "inception-bn"])
        raise InputError(f"--network is {name!r}, which MXNet's scripts do not have either.{near}")
    if layers is None:
        raise InputError(f"--network {name} needs --num-layers, such as {max(FAMILIES[name])}")
    if name.startswith("resnet") and side <= 32:
        if not 8 <= layers < 164 or layers % 6 != 2:
            raise InputError(f"--num-layers is {layers}; for {side} pixels it is 6n + 2 below 164, such as 20")
        why = "the published form, with activations after the sums" if name == "resnet" else ""
        return f"resnet{layers if layers in (20, 32, 44, 56, 110) else 20}", why
    if layers not in FAMILIES[name]:
        depths = ", ".join(map(str, sorted(FAMILIES[name])))
        raise InputError(f"--num-layers is {layers}; of {name} there are {depths}")
    return FAMILIES[name][layers], ""


_V1 = {n: f"timm/resnet{n}" for n in (18, 34, 50, 101, 152, 200)}
FAMILIES: dict[str, dict[int, str]] = {
    "resnet": {n: f"timm/resnetv2_{n}" for n in (18, 34, 50, 101, 152)},
    **dict.fromkeys(("resnet-v1", "resnetv1"), _V1),
    "resnext": {50: "timm/resnext50_32x4d", 101: "timm/resnext101_32x4d"},
    "vgg": {n: f"timm/vgg{n}" for n in (11, 13, 16, 19)},
}
_NETWORKS = {
    "mlp": ("mlp", ""), "lenet": ("lenet", ""), "googlenet": ("torchvision.models:googlenet", "with batch norms"),
    "alexnet": ("torchvision.models:alexnet", "Krizhevsky 2014, one tower"), "inception-v3": ("timm/inception_v3", ""),
    "inception-v4": ("timm/inception_v4", ""), "inception-resnet-v2": ("timm/inception_resnet_v2", ""),
    "mobilenet": ("timm/mobilenetv1_100", ""), "mobilenetv2": ("timm/mobilenetv2_100", ""),
}  # fmt: skip
PUBLISHED = {
    "imagenet1k-inception-bn": "timm/inception_v3",
    **{f"imagenet1k-resnet-{n}": f"timm/resnet{n}" for n in (18, 34, 50, 101, 152)},
    "imagenet1k-resnext-50": "timm/resnext50_32x4d",
    "imagenet1k-resnext-101": "timm/resnext101_32x4d",
    "imagenet1k-resnext-101-64x4d": "timm/resnext101_64x4d",
    **dict.fromkeys(("imagenet11k-resnet-152", "imagenet11k-place365ch-resnet-152"), "timm/resnetv2_101x1_bit"),
    "imagenet11k-place365ch-resnet-50": "timm/resnetv2_50x1_bit",
}
"""Name in MXNet's zoo -> pretrained weights that are published today."""


def find_published(name: str, file: str) -> tuple[str, str]:
    """Return the model that stands for one of MXNet's zoo whose ``file`` is not here, and what differs."""
    model = PUBLISHED[name]
    other = _OTHERS.get(model, "the same network")
    return model, f"{file} is not here; these weights are published today: {other}"


_OTHERS = {
    "timm/inception_v3": "another network of the family, also of ImageNet-1k, made for 299 pixels",
    **{f"timm/resnet{n}": "of the same depth and data, v1 for v2" for n in (18, 34, 50, 101, 152)},
    **{f"timm/resnetv2_{n}x1_bit": f"a ResNet-{n} v2 of ImageNet-21k and then ImageNet-1k" for n in (50, 101)},
}
"""Model -> what it is, where it is not the network whose place it takes."""
