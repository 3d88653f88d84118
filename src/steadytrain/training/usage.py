"""The parameters of a network that take part: some are never used, and some networks leave parts out now and then.

A process that is alone lets them be. Ranks wait for each other's gradient of every parameter, so they have to know
before the first update that some will not come.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import steadytrain
from steadytrain.errors import first_line
from steadytrain.format import count, few
from steadytrain.models.weights import NETWORK_ERRORS
from steadytrain.training.data import random_batch
from steadytrain.training.precision import Policy
from steadytrain.training.state import in_mode, preserve_buffers, preserve_process

IMAGES, PASSES = 2, 2
_READS = frozenset(f"aten::{name}" for name in ("_local_scalar_dense", "equal", "is_nonzero", "nonzero"))
"""Operations that tell the host a value, on which it may decide what to compute."""
_NOT_THE_NETWORKS = tuple(f"{Path(package.__file__).parent}/" for package in (torch, steadytrain))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Usage:
    """The use of a network's parameters, as passes of a few images show it.

    Args:
        unused: names of the parameters to which no pass brought a gradient.
        varies: why which parts are computed may change from pass to pass; empty: it does not.
    """

    unused: tuple[str, ...] = ()
    varies: str = ""

    @property
    def is_partial(self) -> bool:
        """Return whether some update may bring no gradient to some parameter."""
        return bool(self.unused or self.varies)

    def notes(self, module: nn.Module) -> Iterator[str]:
        """Say what is done about it, to parameters that are trained."""
        trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        if unused := [name for name in self.unused if name in trained]:
            verb = "gets no gradient and stays as it is" if len(unused) == 1 else "get no gradient and stay as they are"
            yield f"{count(len(unused), 'parameter')} {verb}: {few(unused)}"
        if self.varies:
            yield f"the network may leave out parts ({self.varies}): ranks agree on them in each update"


def find_usage(module: nn.Module, policy: Policy, shape: tuple[int, int, int]) -> Usage:
    """Find which parameters get no gradient in training, by passes that leave no trace in a prepared module.

    A network varies if two passes differ, if it draws from Python's or NumPy's random numbers, or if it looks at a
    tensor's value. What a network refuses, it will refuse in the first update, and is not told here.

    Args:
        shape: height, width and channels of the images.
    """
    unused: list[set[str]] = []
    reads = _Reads()
    with (
        preserve_process(policy.device),
        preserve_buffers(module),
        suppress(*NETWORK_ERRORS, MemoryError),
        in_mode(module, "training"),
    ):
        before = other_generators()
        images = policy.images(random_batch(IMAGES, shape, policy.device).images, None, None)
        for _ in range(PASSES):
            module.zero_grad(set_to_none=True)
            with reads, policy.autocast():
                logits = module(images)
            logits.float().sum().backward()
            parameters = module.named_parameters()
            unused.append({name for name, value in parameters if value.requires_grad and value.grad is None})
        draws = other_generators() != before
    if not unused:
        return Usage()
    varies = ""
    if reads.places:
        varies = f"it looks at a value in {few(list(reads.places))}"
    elif draws:
        varies = "it draws from Python's or NumPy's random numbers"
    elif any(names != unused[0] for names in unused):
        varies = "it has left out other ones each time"
    return Usage(tuple(name for name, _ in module.named_parameters() if all(name in some for some in unused)), varies)


def refusal_of_one_image(module: nn.Module, policy: Policy, shape: tuple[int, int, int]) -> str:
    """Return why a prepared network, in the mode that it is in, takes no pass of a single image; empty if it takes one.

    Args:
        shape: height, width and channels of the images.
    """
    entered: list[str] = []
    with ExitStack() as stack, torch.no_grad():
        stack.enter_context(preserve_process(policy.device))
        stack.enter_context(preserve_buffers(module))
        for name, part in module.named_modules():
            stack.callback(part.register_forward_pre_hook(lambda *_, name=name: entered.append(name)).remove)
        images = policy.images(random_batch(1, shape, policy.device).images, None, None)
        try:
            with policy.autocast():
                module(images)
        except NETWORK_ERRORS as error:
            return f"{entered[-1] or 'the network'}: {first_line(error)}"
    return ""


def other_generators() -> tuple[object, ...]:
    """Return the states of the random generators that are not torch's."""
    numpy: Any = np.random.get_state(legacy=True)
    return random.getstate(), bytes(numpy[1]), *numpy[2:]


class _Reads(TorchDispatchMode):
    """A mode that keeps the lines of the network that look at a tensor's value."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.places: dict[str, None] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as of training.profile.step_cost.Operations

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = func._schema.name
        if name in _READS and (place := network_line(sys._getframe().f_back, until=__file__)) is not None:
            self.places[place] = None
        return func(*args, **(kwargs or {}))


def network_line(frame: FrameType | None, *, until: str) -> str | None:
    """Return ``file:line`` of the innermost frame that is neither torch's nor ours; None where there is none.

    ``until``: the file whose code calls the network.
    """
    while frame is not None and frame.f_code.co_filename != until:
        file = frame.f_code.co_filename
        if not file.startswith((*_NOT_THE_NETWORKS, "<")):
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return None
