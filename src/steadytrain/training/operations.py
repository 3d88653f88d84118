"""What a network asks of torch: how many operations, how many multiplications, and where it waits for a value."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import steadytrain

_OURS = tuple(f"{Path(package.__file__).parent}/" for package in (torch, steadytrain))  # type: ignore[arg-type]
_SCALAR = "aten::_local_scalar_dense"
_BY_VALUE = frozenset(
    f"aten::{name}" for name in ("nonzero", "masked_select", "equal", "_unique2", "unique_dim", "unique_consecutive")
)
"""Their answer's size, or the answer itself, is only known when a device has computed it."""


class Operations(TorchDispatchMode):
    """While it is entered, sees every operation of this thread and of the backward passes that it begins.

    Attributes:
        count: operations, as the host calls them.
        flops: floating-point operations of convolutions and matrix products, as
            :mod:`torch.utils.flop_counter` counts them, while ``counts_flops``.
        waits: where the host waits for a value, ``file:line`` -> how often: the innermost line that is neither torch's
            nor ours. A scalar (``.item()``, ``float()``, ``if tensor:``) counts on every device, also where it is there
            already, since on another device it would not be; a copy to the host and a size that depends on values count
            where the tensor is on another device.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry  # brings Triton with it, which no start should wait for

        self._flops_of = flop_registry
        self.count = 0
        self.flops = 0
        self.counts_flops = True
        self.waits: dict[str, int] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # what is looked at is never compiled: torch need not import its compiler to leave this out

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self.count += 1
        if self.counts_flops and func._overloadpacket in self._flops_of:
            self.flops += self._flops_of[func._overloadpacket](*args, **kwargs, out_val=out)
        if _waits(func, args, out):
            place = _place(sys._getframe().f_back)
            if place is not None:
                self.waits[place] = self.waits.get(place, 0) + 1
        return out


def _waits(func: Any, args: Sequence[Any], out: Any) -> bool:
    """Whether the host has to wait for this operation's values."""
    name = func._schema.name
    if name == _SCALAR:
        return True
    if not args or not isinstance(args[0], torch.Tensor) or args[0].device.type in ("cpu", "meta"):
        return False
    if name == "aten::_to_copy":
        return isinstance(out, torch.Tensor) and out.device.type == "cpu"
    return name in _BY_VALUE or (name == "aten::index" and any(_is_mask(one) for one in args[1]))


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _place(frame: FrameType | None) -> str | None:
    """``file:line`` of the innermost frame that is neither torch's nor ours; None where the network has none."""
    while frame is not None:
        file = frame.f_code.co_filename
        if file == _CALLER:
            return None
        if not file.startswith((*_OURS, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None


_CALLER = str(Path(__file__).with_name("passes.py"))
"""From here outwards no frame is the network's."""
