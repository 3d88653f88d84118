"""Known architectures: MXNet's arrays under the names of timm's or torchvision's network, where it is the same one.

Two networks are compared as graphs: every layer with weights gets a digest of its own form and of all that leads to it,
and layers of equal digests hold the same weights. A sum has no order, so that it does not matter which branch stands
first. What is found is proved: both networks are run on the same random images, and their outputs have to agree.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from steadytrain.errors import ModelError
from steadytrain.format import percent
from steadytrain.interop.mxnet.graph import Network
from steadytrain.interop.mxnet.trace import LEAVES, trace

TOLERANCE = 1e-4
"""Largest difference of outputs, as a share of their largest value, at which two networks are the same one."""
_NORM = nn.modules.batchnorm._BatchNorm


@dataclass(frozen=True)
class Known:
    """An architecture that MXNet's zoos have too: ``timm`` or ``torchvision``, its name there, and options."""

    source: str
    inner: str
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.source}/{self.inner}"

    def make(self, num_classes: int) -> nn.Module:
        """Build it, without weights."""
        if self.source == "timm":
            import timm

            create = timm.create_model
        else:
            import torchvision

            create = torchvision.models.get_model
        module: nn.Module = create(self.inner, num_classes=num_classes, **self.options)
        return module


KNOWN = {
    8: (Known("torchvision", "alexnet"),),
    26: (Known("torchvision", "squeezenet1_1"), Known("torchvision", "squeezenet1_0")),
    21: (Known("timm", "resnet18"),),
    37: (Known("timm", "resnet34"),),
    54: (Known("timm", "resnet50"), Known("timm", "resnext50_32x4d")),
    105: (Known("timm", "resnet101"), Known("timm", "resnext101_32x8d"), Known("timm", "resnext101_64x4d")),
    156: (Known("timm", "resnet152"),),
    11: (Known("torchvision", "vgg11"), Known("torchvision", "vgg11_bn")),
    13: (Known("torchvision", "vgg13"), Known("torchvision", "vgg13_bn")),
    16: (Known("torchvision", "vgg16"), Known("torchvision", "vgg16_bn")),
    19: (Known("torchvision", "vgg19"), Known("torchvision", "vgg19_bn")),
    28: (Known("timm", "mobilenetv1_100", {"act_layer": "relu"}),),
    95: (Known("timm", "inception_v3"),),
    121: (Known("timm", "densenet121"),),
    161: (Known("timm", "densenet161"),),
    169: (Known("timm", "densenet169"),),
    201: (Known("timm", "densenet201"),),
}
"""Number of convolutions and dense layers -> the architectures that have as many."""


@dataclass(frozen=True)
class Matched:
    """A known architecture with a checkpoint's weights: its state, the largest difference of outputs, as a share."""

    known: Known
    state: dict[str, Tensor]
    difference: float


def match_known(network: Network, state: Mapping[str, Tensor]) -> Matched | None:
    """Find the architecture of timm or torchvision that a network is, and rename its weights; None if it is none.

    Args:
        network: of a symbol.
        state: its weights, as of :meth:`Network.state`.
    """
    num_layers = sum(isinstance(part, nn.Conv2d | nn.Linear) for part in network.module.modules())
    for known in KNOWN.get(num_layers, ()):
        rng = torch.get_rng_state()
        module = known.make(network.num_outputs)
        torch.set_rng_state(rng)
        try:
            translated = translate(network, state, module, name=known.name)
        except ModelError:
            continue
        return Matched(known, *translated)
    return None


def translate(
    network: Network, state: Mapping[str, Tensor], module: nn.Module, *, name: str
) -> tuple[dict[str, Tensor], float]:
    """Name the weights of an MXNet network as another module's, which computes the same.

    Args:
        network: of a symbol.
        state: its weights.
        module: of the same architecture; it is left with them.
        name: of the module, for messages.

    Returns:
        The module's state, and the largest difference of outputs on random images, as a share of their largest value.

    Raises:
        ModelError: the module cannot be traced, is another architecture, or does not give the same outputs.
    """
    network.module.load_state_dict(dict(state), strict=False)
    ours, theirs = _Layers(network.module), _Layers(trace(module, name=name))
    translated = _translate(ours, theirs, name)
    state = module.state_dict()
    for key, value in translated.items():
        translated[key] = value.reshape(state[key].shape).clone()
    if missing := [key for key in state if key not in translated and not key.endswith("num_batches_tracked")]:
        raise ModelError(f"{name} has {len(missing)} parameters that the MXNet network lacks ({missing[0]}, ...)")
    module.load_state_dict(translated, strict=False)
    difference = _difference(network, module)
    if not difference <= TOLERANCE:
        raise ModelError(
            f"{name} has layers of the same shapes as the MXNet network and gives other outputs (by"
            f" {percent(difference, 1)} of the largest): it is another architecture, such as one with other"
            " strides"
        )
    return module.state_dict(), difference


def _difference(network: Network, module: nn.Module) -> float:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(2, network.channels, network.size, network.size, generator=generator)
    modes = network.module.training, module.training
    with torch.no_grad():
        ours, theirs = network.module.eval()(images), module.eval()(images)
    network.module.train(modes[0])
    module.train(modes[1])
    if ours.shape != theirs.shape:
        return float("inf")
    return float((ours - theirs).abs().max() / ours.abs().max().clamp(min=1e-12))


class _Layers:
    """The layers with weights of a traced module: digest -> their names, in the order of calls."""

    def __init__(self, traced: fx.GraphModule) -> None:
        self.modules = dict(traced.named_modules())
        self.by_digest: dict[str, list[str]] = {}
        self.norm_after: dict[str, str] = {}
        digests: dict[fx.Node, tuple[str, ...]] = {}  # of several values that are joined, each one's
        layer_of: dict[fx.Node, str] = {}
        for node in traced.graph.nodes:
            inputs = node.all_input_nodes
            per_input = [digests[value] for value in inputs if value in digests]
            below = [digest for digests_of_value in per_input for digest in digests_of_value]
            target = str(node.target)
            part = self.modules.get(target) if node.op == "call_module" else None
            if part is not None and isinstance(part, LEAVES):
                digest = _digest(_form(part), *below)
                digests[node] = (digest,)
                self.by_digest.setdefault(digest, []).append(target)
                if isinstance(part, _NORM) and inputs and inputs[0] in layer_of:
                    self.norm_after[layer_of[inputs[0]]] = target
                layer_of[node] = target
                continue
            words = type(part).__name__ if part is not None else getattr(node.target, "__name__", target)
            words = words.lower()
            # A pooling to a fixed size above 1 changes nothing at the usual size of images.
            keeps_size = "adaptive" in words and node.args[1] not in (1, (1, 1))
            if node.op == "placeholder":
                digests[node] = ("images",)
            elif len(per_input) > 1 and "cat" in words:
                digests[node] = tuple(below)
            elif len(per_input) > 1:
                digests[node] = (_digest("add", *sorted(_digest(*parts) for parts in per_input)),)
            elif below and (words in ("mean", "amax") or ("pool" in words and not keeps_size)):
                digests[node] = tuple(_digest("pool", digest) for digest in below)
            elif per_input:
                digests[node] = per_input[0]


def _form(part: nn.Module) -> str:
    """Return the form of a layer's weights, the same for a dense layer and a convolution over its whole input."""
    if isinstance(part, nn.Conv2d):
        window = (part.stride, part.groups, part.dilation) if max(part.stride) > 1 or part.groups > 1 else ()
        return f"weights {part.weight.shape[0]} {part.weight[0].numel()} {window}"
    if isinstance(part, nn.Linear):
        return f"weights {part.out_features} {part.in_features} ()"
    if isinstance(part, _NORM):
        return f"norm {part.num_features} {part.eps:.3g}"
    return type(part).__name__


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _translate(ours: _Layers, theirs: _Layers, name: str) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    shifted: list[tuple[str, Tensor]] = []
    places: dict[str, str] = {}
    for digest, targets in theirs.by_digest.items():
        sources = ours.by_digest.get(digest, [])
        if len(sources) != len(targets):
            raise ModelError(
                f"the MXNet network is another one than {name}: it has {len(sources)} layers where that has"
                f" {len(targets)} ({targets[0]})"
            )
        places |= dict(zip(sources, targets, strict=True))
    if len(places) != sum(map(len, ours.by_digest.values())):
        raise ModelError(f"the MXNet network has layers that {name} lacks")
    for source, target in places.items():
        from_part, to_part = ours.modules[source], theirs.modules[target]
        values = dict(from_part.named_parameters(recurse=False)) | dict(from_part.named_buffers(recurse=False))
        expected = dict(to_part.named_parameters(recurse=False)) | dict(to_part.named_buffers(recurse=False))
        for key, value in expected.items():
            if key in values:
                state[f"{target}.{key}"] = values[key].detach()
            elif key == "bias":
                state[f"{target}.bias"] = torch.zeros_like(value)
        if "bias" in values and "bias" not in expected:
            shifted.append((source, values["bias"].detach()))
    for source, bias in shifted:  # what a norm follows needs no bias: its mean takes it in
        norm = ours.norm_after.get(source)
        if norm is None:
            raise ModelError(f"{source} of the MXNet network has a bias, and {places[source]} of {name} none")
        key = f"{places[norm]}.running_mean"
        state[key] = state[key] - bias
    return state
