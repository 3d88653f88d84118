"""What a forward pass keeps for the way back, call by call of the network's modules.

Autograd tells of each tensor that it keeps, and hooks tell which module is being called: so the memory of any network
is known by its parts, whatever it is made of, by one forward pass with a few images.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

Bytes = dict[int, int]
"""Of pieces of memory, by a number that names each."""


@dataclass(eq=False)
class Call:
    """One call of a module.

    Args:
        module, name: which.
        inputs: the memory of the tensors that it is given.
        begin, end: of all tensors that the pass keeps, in their order, those kept within it.
        calls: made within it, in their order.
        can_repeat: whether it can be done again later, with :func:`copied` arguments: its module is called once in a
            pass, and nothing overwrites what it is given.
    """

    module: nn.Module
    name: str
    inputs: Bytes
    begin: int
    end: int = 0
    calls: list[Call] = field(default_factory=list)
    can_repeat: bool = True


@dataclass(frozen=True)
class Activations:
    """Of a forward pass: the network's own call, and each tensor that is kept, as the memory it lies in."""

    root: Call
    kept: list[tuple[int, int]]

    def of(self, begin: int, end: int) -> Bytes:
        """The memory of the tensors kept between two places of their order."""
        return dict(self.kept[begin:end])


def activations(module: nn.Module, forward: Callable[[], object]) -> Activations:
    """Do ``forward``, which calls the module once, and tell what it keeps. Parameters and buffers are not counted."""
    with _Watch(module) as watch:
        forward()
    watch.settle()
    return Activations(watch.calls[0], watch.kept)


class _Watch(ExitStack):
    """While it is entered, sees calls and kept tensors; all of them stay alive, so that no memory is used twice."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.kept: list[tuple[int, int]] = []
        self._alive: list[Tensor] = []
        self._given: dict[Call, _Given] = {}
        self._open: list[Call] = []
        self._names = {part: name for name, part in module.named_modules()}
        self._constant = {_memory(one)[0] for one in (*module.parameters(), *module.buffers())}

    def __enter__(self) -> _Watch:
        super().__enter__()
        self.enter_context(torch.autograd.graph.saved_tensors_hooks(self._keep, lambda told: told))
        for part in self._names:
            self.callback(part.register_forward_pre_hook(self._begin, prepend=True, with_kwargs=True).remove)
            self.callback(part.register_forward_hook(self._end, with_kwargs=True).remove)
        return self

    def settle(self) -> None:
        """Say which calls can be done again, now that the pass is over."""
        times = Counter(call.module for call in self.calls)
        for call in self.calls:
            # What is written in TorchScript, or has a forward of its own already, is left as it is.
            own = isinstance(call.module, torch.jit.ScriptModule) or "forward" in vars(call.module)
            same = self._given[call].is_still_the_same()
            call.can_repeat = call.can_repeat and same and times[call.module] == 1 and not own

    def _keep(self, tensor: Tensor) -> None:
        key, nbytes = _memory(tensor)
        if key not in self._constant:
            self._alive.append(tensor.detach())
            self.kept.append((key, nbytes))

    def _begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = _Given(copied(args), kwargs)
        call = Call(module, self._names[module], dict(map(_memory, given.tensors)), len(self.kept))
        if self._open:
            self._open[-1].calls.append(call)
        self.calls.append(call)
        self._open.append(call)
        self._given[call] = given

    def _end(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        call = self._open.pop()
        call.end = len(self.kept)
        call.can_repeat = self._given[call].is_in(args, kwargs)


class _Given:
    """What a call is given, as it was then."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.tensors = list(_tensors((args, kwargs)))
        self._args = args
        self._kwargs = kwargs
        self._versions = [tensor._version for tensor in self.tensors]

    def is_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether these have the same tensors."""
        return list(map(id, _tensors((args, kwargs)))) == list(map(id, self.tensors))

    def is_still_the_same(self) -> bool:
        """Whether nothing has been written into the tensors, nor others into what holds them."""
        return self.is_in(self._args, self._kwargs) and [one._version for one in self.tensors] == self._versions


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same, but for lists and tables among them, which are copied: dense blocks add to theirs after each call."""
    return tuple(one.copy() if type(one) in (list, dict) else one for one in args)


def _memory(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _tensors(told: object) -> Iterator[Tensor]:
    """Those in lists, tuples and tables, however deep."""
    if isinstance(told, Tensor):
        yield told
    elif isinstance(told, Mapping):
        yield from _tensors(list(told.values()))
    elif isinstance(told, list | tuple):
        for one in told:
            yield from _tensors(one)
