"""Parameters in 16 bits, and their fp32 twins, which the optimizer updates.

Micikevicius et al. 2018, "Mixed Precision Training", section 3.1; ``multi_precision`` in MXNet's optimizers. An update
of a 16-bit number by less than a 256th (bf16) or a 2048th part of it would be lost; the twin keeps it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase


def store(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same module, with all floating-point parameters and buffers in ``dtype``, but for those of batch norms.

    Their statistics are sums over many values, and their kernels take fp32 ones beside 16-bit images.

    >>> net = store(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), torch.bfloat16)
    >>> net[0].weight.dtype, net[1].weight.dtype, net[1].running_mean.dtype
    (torch.bfloat16, torch.float32, torch.float32)
    """
    for part in module.modules():
        if isinstance(part, _NormBase):
            continue
        for parameter in part.parameters(recurse=False):
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                part._buffers[name] = buffer.to(dtype)
    return module


class Masters:
    """The fp32 twins of those parameters that are kept in 16 bits.

    Others are their own twins. Nothing here waits for the device.
    """

    def __init__(self) -> None:
        self._twins: dict[nn.Parameter, nn.Parameter] = {}

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """The tensor to optimize in place of a parameter, which has the same memory format."""
        if parameter.dtype not in (torch.float16, torch.bfloat16):
            return parameter
        if parameter not in self._twins:
            self._twins[parameter] = nn.Parameter(parameter.detach().float())
        return self._twins[parameter]

    @torch.no_grad()
    def take_gradients(self) -> None:
        """Move each parameter's gradient to its twin."""
        stored, twins = [], []
        for parameter, twin in self._twins.items():
            if parameter.grad is None:
                continue  # moved already, or it took no part
            if twin.grad is None:
                twin.grad = torch.empty_like(twin)
            stored.append(parameter.grad)
            twins.append(twin.grad)
            parameter.grad = None
        if stored:
            torch._foreach_copy_(twins, stored)

    @torch.no_grad()
    def give_weights(self) -> None:
        """Round the twins, once they are updated."""
        if self._twins:
            torch._foreach_copy_(list(self._twins), list(self._twins.values()))

    def state_dict(self) -> dict[str, Any]:
        """The twins, in the order in which they were asked for."""
        return {str(number): twin.detach() for number, twin in enumerate(self._twins.values())}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave; the parameters' own values come with the network's."""
        for number, twin in enumerate(self._twins.values()):
            twin.copy_(state[str(number)])
