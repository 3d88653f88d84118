"""Parts of a network that keep nothing of a forward pass but what they are given: the rest is computed again.

That is activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): less memory for
the time of some more forward passes. Which parts is chosen by what they are seen to keep, so it asks nothing of a
network: single modules, and stretches of those that stand in an ``nn.Sequential``. Those are computed again without
which the most memory at any time of the backward pass would be larger, and no others.

No bit of a run changes: what is random is drawn again as it was, and the second pass works on copies of the buffers as
they were before the first, so running statistics are updated once, and what depends on them is computed from the same.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from steadytrain.errors import ModelError
from steadytrain.models import Input
from steadytrain.training.build import image_shape
from steadytrain.training.data import drawn
from steadytrain.training.state import State, preserve_buffers, preserve_process
from steadytrain.training.step import Update

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


TRIED = 2
"""Images of the pass that is looked at."""
LIMITS = 60
FALLS = 0.95
"""Limits of memory that are tried: so many, each this share of the one before."""
WORTH = 0.1
"""Share of the memory that has to be saved."""
GIVEN_UP = 0.05
"""Share of what can be saved that is given up, to compute fewer parts again."""


@dataclass(frozen=True)
class Recomputed:
    """What was chosen.

    Args:
        parts: names of modules, of stretches of them with the last one's number (``layer1.0-2``).
        kept_bytes: of activations, an image: the most at any time.
        usual_bytes: the same with nothing computed again.
    """

    parts: tuple[str, ...]
    kept_bytes: float
    usual_bytes: float

    def __str__(self) -> str:
        """A line for the user."""
        which = self.parts[0] if len(self.parts) == 1 else f"{self.parts[0]} ... {self.parts[-1]}"
        some = f"{len(self.parts)} part{'s' * (len(self.parts) > 1)} ({which})"
        return f"{some}: {self.kept_bytes / 1e6:.3g} MB of activations an image instead of {self.usual_bytes / 1e6:.3g}"


def recompute_parts(update: Update, state: State, input: Input, name: str) -> Recomputed:
    """Have parts of the network, which is in training, computed again in each backward pass; say which.

    Args:
        update: as :func:`.build.update` makes it.
        state: of the run; no number of it changes.
        input: the images.
        name: of the network.

    Raises:
        ModelError: nothing can be saved, or what the network does cannot be repeated.
    """
    device = state.engine.device
    with preserve_process(device), preserve_buffers(state.module):
        batch = drawn(TRIED, image_shape(input), device)
        before = _other_generators()
        seen = activations(state.module, lambda: update.objective(state.module, batch.images, batch.labels))
        if _other_generators() != before:
            raise ModelError(
                f"parallel.recompute cannot be used with {name}: it draws from Python's or NumPy's random numbers,"
                " which are not drawn again as they were; draw from torch's, or leave it out"
            )
    parts = choose(seen)
    usual, most = peak(seen, ()), peak(seen, parts)
    if most > (1 - WORTH) * usual:
        raise ModelError(
            f"parallel.recompute saves nothing worth its time in {name}: no part of it keeps much more than what it is"
            f" given, so of {usual / TRIED / 1e6:.3g} MB of activations an image {most / TRIED / 1e6:.3g} would stay;"
            " leave it out, and lower --batch-size, or split each batch with --set optim.accumulate=..."
        )
    install(parts)
    return Recomputed(tuple(part.name for part in parts), most / TRIED, usual / TRIED)


def _other_generators() -> tuple[object, ...]:
    """Where the random generators stand that are not torch's."""
    numpy: Any = np.random.get_state(legacy=True)
    return random.getstate(), bytes(numpy[1]), *numpy[2:]


@dataclass(frozen=True, eq=False)
class Part:
    """What may be computed again: a call, or several in turn of those that ``within``, a sequence, makes."""

    calls: tuple[Call, ...]
    within: Call | None = None

    @property
    def begin(self) -> int:
        return self.calls[0].begin

    @property
    def end(self) -> int:
        return self.calls[-1].end

    @property
    def inputs(self) -> Bytes:
        return self.calls[0].inputs

    @property
    def name(self) -> str:
        first, last = self.calls[0].name, self.calls[-1].name
        return first if first == last else f"{first}-{last.rpartition('.')[2]}"


def choose(seen: Activations) -> list[Part]:
    """Parts that make the most memory at any time least, or nearly: as few as that takes, in their order."""
    usual = peak(seen, ())
    limits = (usual * FALLS**k for k in range(LIMITS))
    parts = min((_Way(seen, limit).parts() for limit in limits), key=lambda told: peak(seen, told))
    least = peak(seen, parts)
    limit = least + GIVEN_UP * (usual - least)
    for part in sorted(parts, key=lambda one: (sum(seen.of(one.begin, one.end).values()), -one.begin)):
        fewer = [one for one in parts if one is not part]
        if peak(seen, fewer) <= limit:
            parts = fewer
    return parts


def peak(seen: Activations, parts: Iterable[Part]) -> int:
    """The most bytes of activations at any time: as the forward pass ends, or as a part is computed again.

    What was kept later than a part is free again when the way back comes to it.
    """
    way, most = _Way(seen, 0.0), 0
    for part in parts:
        most = max(most, way.at(part))
        way.go_past(part)
    return max(most, way.at_the_end())


class _Way:
    """The way through a forward pass, with what is kept so far."""

    def __init__(self, seen: Activations, limit: float) -> None:
        self._seen = seen
        self._limit = limit
        self._alive: Bytes = {}
        self._total = 0
        self._place = 0
        self._parts: list[Part] = []

    def parts(self) -> list[Part]:
        """The largest ones that, computed again, need no more than the limit with all that is kept by then."""
        self._go_through(self._seen.root)
        return self._parts

    def at(self, part: Part) -> int:
        """Bytes while the next part is computed again."""
        told = self._seen.of(self._place, part.end)
        told.update(part.inputs)
        return self._total + sum(nbytes for key, nbytes in told.items() if key not in self._alive)

    def at_the_end(self) -> int:
        """Bytes as the forward pass ends, with no other part."""
        self._keep(self._seen.of(self._place, len(self._seen.kept)))
        return self._total

    def go_past(self, part: Part) -> None:
        self._keep(self._seen.of(self._place, part.begin))
        self._keep(part.inputs)
        self._place = part.end
        self._parts.append(part)

    def _keep(self, told: Bytes) -> None:
        for key, nbytes in told.items():
            if key not in self._alive:
                self._alive[key] = nbytes
                self._total += nbytes

    def _fits(self, *calls: Call) -> bool:
        return calls[0].can_repeat and self.at(Part(calls)) <= self._limit

    def _go_through(self, call: Call) -> None:
        if self._fits(call):
            self.go_past(Part((call,)))
        elif not _is_sequence(call):
            for inner in call.calls:
                self._go_through(inner)
        else:
            self._go_along(call)

    def _go_along(self, sequence: Call) -> None:
        stretch: tuple[Call, ...] = ()
        for few in _pieces(sequence):
            if stretch and not self._fits(*stretch, *few):
                self.go_past(Part(stretch, sequence))
                stretch = ()
            if stretch or self._fits(*few):
                stretch += few
            else:
                for inner in few:
                    self._go_through(inner)
        if stretch:
            self.go_past(Part(stretch, sequence))


def _is_sequence(call: Call) -> bool:
    module = call.module
    return (
        isinstance(module, nn.Sequential)
        and type(module).forward is nn.Sequential.forward
        and "forward" not in vars(module)
        and [inner.module for inner in call.calls] == list(module)
    )


def _pieces(call: Call) -> Iterator[tuple[Call, ...]]:
    """The calls in a sequence, each with those after it that overwrite what they are given, such as in-place ReLUs."""
    piece: tuple[Call, ...] = ()
    for inner in call.calls:
        if piece and inner.can_repeat:
            yield piece
            piece = ()
        piece += (inner,)
    if piece:
        yield piece


def install(parts: Sequence[Part]) -> None:
    """Give the modules of these parts a forward that keeps nothing. Parameters, buffers and names stay."""
    sequences: dict[nn.Module, list[Part]] = {}
    for part in parts:
        if part.within is None:
            [call] = part.calls
            vars(call.module)["forward"] = _Again(partial(_own_forward, call.module), (call.module,))
        else:
            sequences.setdefault(part.within.module, []).append(part)
    for module, own in sequences.items():
        starts = {part.calls[0].module: part for part in own}
        inside = {call.module for part in own for call in part.calls}
        told: list[Callable[[Any], Any]] = []
        for one in module.children():
            if one in starts:
                stretch = tuple(call.module for call in starts[one].calls)
                told.append(_Again(_InTurn(stretch), stretch))
            elif one not in inside:
                told.append(one)
        vars(module)["forward"] = _InTurn(told)


def _own_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """As its class has it, which may have become another one since (as that of synchronised norms does)."""
    return type(module).forward(module, *args, **kwargs)


class _InTurn:
    """The forward of a sequence."""

    def __init__(self, steps: Sequence[Callable[[Any], Any]]) -> None:
        self.steps = steps

    def __call__(self, input: Any) -> Any:
        for step in self.steps:
            input = step(input)
        return input


class _Again:
    """A forward that keeps what it is given, and is done again for the rest."""

    def __init__(self, forward: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        self.forward = forward
        self.modules = modules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward = partial(self.forward, **kwargs) if kwargs else self.forward
        args = copied(args)
        if not torch.is_grad_enabled():
            return forward(*args)
        if torch.compiler.is_compiling():  # a compiler sees what is written twice, and takes no contexts
            return checkpoint(forward, *args, use_reentrant=False)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=self._contexts)

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """Around the first pass, nothing; around the second, the buffers as they are now, which are dropped then."""
        found = [(part, name, one) for top in self.modules for part in top.modules() for name, one in _buffers(part)]
        return nullcontext(), _with_buffers([(part, name, one.detach().clone()) for part, name, one in found])


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    return module.named_buffers(recurse=False)


@contextmanager
def _with_buffers(others: Sequence[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    own = [(module, name, getattr(module, name)) for module, name, _ in others]
    for module, name, other in others:
        setattr(module, name, other)
    try:
        yield
    finally:
        for module, name, one in own:
            setattr(module, name, one)
