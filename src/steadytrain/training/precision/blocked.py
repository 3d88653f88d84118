"""Training passes in oneDNN's own layout: blocks of channels, as a CPU's vectors take them.

Convolutions on a CPU are oneDNN's. Some of them, the gradients of weights above all, are faster where eight or sixteen
channels of a pixel lie side by side, then its neighbours' (``nChw8c``, ``nChw16c``: oneDNN's developer guide,
"Understanding Memory Formats"), and so are its batch norms. Torch has tensors of that kind (``Tensor.to_mkldnn``), with
gradients, for a part of its operations. So a network is traced (:mod:`torch.fx`), operations that have such a form are
given such tensors, and conversions stand where the two kinds meet. Parameters, buffers and names stay as they are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from steadytrain.errors import ModelError, first_line

MOST_CONVERSIONS = 0.75
"""For each convolution in blocks: with more of them, nothing was gained wherever it was measured."""

_PLAIN = (nn.ReLU, nn.Identity)
_MODULES = (*_PLAIN, nn.MaxPool2d, nn.AvgPool2d)
_POOLS = (functional.max_pool2d, functional.avg_pool2d)
_RELUS = (torch.relu, functional.relu, "relu", "relu_")
_SUMS = (operator.add, torch.add, "add", "add_")


def use_blocks(module: nn.Module, name: str, *, channels_last: bool) -> None:
    """Have a network that is in training compute its training passes so; in evaluation mode it computes as before.

    What it does in Python, beside its modules, is traced once and done so each time: whoever calls this has to see that
    both ways give the same.

    Args:
        module: on a CPU, in fp32, whose parts stay in the modes that they are in, while it trains.
        name: for the user.
        channels_last: how images lie elsewhere, and so where an operation has no such form: what is drawn for their
            values (dropout's) is drawn in their order in memory.

    Raises:
        ModelError: it cannot be traced, or too few of its operations have such a form to gain anything.
    """
    if _has_own_forward(module):
        raise refused(name, "its forward is not that of its class")
    try:
        graph = _Tracer().trace(module)
    except Exception as error:  # whatever a network does with what only stands for a tensor
        raise refused(name, f"its operations depend on what it is given ({first_line(error)})") from error
    modules = dict(module.named_modules())
    if (late := _overwritten(graph, modules)) is not None:
        raise refused(name, f"it reads {late} after it was overwritten")
    blocked, conversions = _convert(graph, modules, _elsewhere(channels_last=channels_last))
    if not blocked or conversions > MOST_CONVERSIONS * blocked:
        told = f"{conversions} conversions for {blocked} convolution{'s' * (blocked != 1)}"
        raise refused(name, f"too few of its operations have a form for blocks of channels ({told})")
    vars(module)["forward"] = _Forward(module, fx.GraphModule(module, graph))


def refused(name: str, why: str) -> ModelError:
    """What is raised of a network of that name."""
    return ModelError(f"precision.blocked cannot be used with {name}: {why}; leave it out")


class _Forward:
    """A network's forward: in training the traced one, whose parts are the network's own."""

    def __init__(self, module: nn.Module, traced: fx.GraphModule) -> None:
        self.module = module
        self.traced = traced

    def __call__(self, images: Tensor) -> Any:
        return self.traced.forward(images) if self.module.training else type(self.module).forward(self.module, images)


class _Tracer(fx.Tracer):
    """Looks into modules that have parts; batch norms are whole, since they count as they are called."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        is_whole = isinstance(m, _BatchNorm) or _has_own_forward(m) or not any(True for _ in m.children())
        return is_whole or super().is_leaf_module(m, module_qualified_name)


def _elsewhere(*, channels_last: bool) -> Callable[[Tensor], Tensor]:
    """What takes images out of blocks."""
    layout = torch.channels_last if channels_last else torch.contiguous_format

    def dense(images: Tensor) -> Tensor:
        return images.to_dense().contiguous(memory_format=layout)

    return dense


def _convert(graph: fx.Graph, modules: dict[str, nn.Module], dense: Callable[[Tensor], Tensor]) -> tuple[int, int]:
    """Put conversions in, each before what first needs it; returns how many convolutions take blocks, and how many."""
    in_blocks: set[fx.Node] = set()
    converted: dict[tuple[fx.Node, bool], fx.Node] = {}
    convolutions = 0
    for node in list(graph.nodes):
        begins = _begins(node, modules)
        # A bias that is added would have to be repeated for each pixel, which blocks cannot be: both must be in them.
        goes_on = all(one in in_blocks or (one, True) in converted for one in node.all_input_nodes)
        takes = begins or (_goes_on(node, modules) and goes_on)
        convolutions += begins
        if takes:
            in_blocks.add(node)
        for one in node.all_input_nodes:
            if (one in in_blocks) is takes:
                continue
            if (one, takes) not in converted:
                with graph.inserting_before(node):
                    converted[one, takes] = graph.call_function(Tensor.to_mkldnn if takes else dense, (one,))
            node.replace_input_with(one, converted[one, takes])
    return convolutions, len(converted)


def _module(node: fx.Node, modules: dict[str, nn.Module]) -> nn.Module | None:
    return modules[str(node.target)] if node.op == "call_module" else None


def _has_own_forward(module: nn.Module) -> bool:
    """Whether it does something else than its class says."""
    return "forward" in vars(module)


def _begins(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether it is a convolution that takes blocks, worth a conversion."""
    module = _module(node, modules)
    if type(module) is not nn.Conv2d or _has_own_forward(module):
        return False
    return module.padding_mode == "zeros" and not isinstance(module.padding, str)


def _goes_on(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    """Whether it takes blocks as well as anything else."""
    module = _module(node, modules)
    if module is not None:
        return _takes(module) and not _has_own_forward(module)
    if node.op not in ("call_function", "call_method"):
        return False
    if node.target in _SUMS:
        return len(node.args) == len(node.all_input_nodes) == 2 and not node.kwargs
    if node.target in _POOLS:  # a stride that is left to them is refused for such tensors
        stride = node.args[2] if len(node.args) > 2 else node.kwargs.get("stride")
        return bool(stride) and not node.kwargs.get("return_indices")
    return node.target in _RELUS


def _takes(module: nn.Module) -> bool:
    if not isinstance(module, _BatchNorm):
        return type(module) in _MODULES and not getattr(module, "return_indices", False)
    is_timms = type(module).__name__ == "BatchNormAct2d" and all(type(one) in _PLAIN for one in module.children())
    is_known = type(module) is nn.BatchNorm2d or is_timms
    return is_known and module.training and module.affine and module.track_running_stats


def _overwritten(graph: fx.Graph, modules: dict[str, nn.Module]) -> fx.Node | None:
    """What is read after an operation has overwritten it: in the other layout it would be as it was before."""
    places = {node: place for place, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if _overwrites(node, modules):
            first: fx.Node = node.all_input_nodes[0]
            if any(places[reader] > places[node] for reader in first.users):
                return first
    return None


def _overwrites(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    module = _module(node, modules)
    if module is not None:
        return bool(getattr(module, "inplace", False))
    if node.op not in ("call_function", "call_method") or not node.all_input_nodes:
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_named = name.endswith("_") and not name.endswith("__")
    return is_named or bool(node.kwargs.get("inplace"))
