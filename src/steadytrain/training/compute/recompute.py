"""Parts of a network that keep only their inputs for the backward pass, and are computed again in it.

That is activation checkpointing (Chen et al. 2016, "Training Deep Nets with Sublinear Memory Cost"): less memory for
the time of some more forward passes. The parts are modules, and stretches of those that stand in an ``nn.Sequential``,
as large as a limit allows on what one of them keeps, with the limit that leaves the least; a forward pass with a few
images shows what each keeps.

No bit of a run changes: what is random is drawn again as it was, and the second pass works on copies of the buffers as
they were before the first, so running statistics are updated once, and what depends on them is computed from the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import checkpoint

from steadytrain.config import Recipe
from steadytrain.distributed.engine import Engine
from steadytrain.errors import ModelError
from steadytrain.training.data import random_batch
from steadytrain.training.state import State, buffers_of, preserve_buffers, preserve_process
from steadytrain.training.step import Update
from steadytrain.training.usage import other_generators

TRIED = 2
"""Images of the pass that is looked at."""
LIMITS, FALLS = 30, 0.8
"""Number of limits that are tried on what a part keeps, and each one's share of the one before."""
WORTH = 0.1
"""Share of the memory that has to be saved."""


@dataclass(frozen=True)
class Recomputed:
    """The choice of parts to recompute.

    ``parts``: names of modules, of stretches of them with the last one's number (``layer1.0-2``). ``kept_bytes``: of
    activations, an image: the most at any time. ``usual_bytes``: the same with nothing computed again.
    """

    parts: tuple[str, ...]
    kept_bytes: float
    usual_bytes: float

    def __str__(self) -> str:
        """A line for the user."""
        which = self.parts[0] if len(self.parts) == 1 else f"{self.parts[0]} ... {self.parts[-1]}"
        count = f"{len(self.parts)} part{'s' * (len(self.parts) > 1)} ({which})"
        return (
            f"{count}: {self.kept_bytes / 1e6:.3g} MB of activations an image instead of {self.usual_bytes / 1e6:.3g}"
        )


def recompute_parts(
    recipe: Recipe, update: Update, state: State, notice: Callable[[str], None] = lambda message: None
) -> Recomputed | None:
    """Have parts of the network, which is in training, computed again in each backward pass, if the recipe says so.

    No number of the state changes; ``notice`` is called with what was chosen.

    Raises:
        ModelError: nothing can be saved, or what the network does cannot be repeated.
    """
    if not recipe.parallel.recompute:
        return None
    name, device, engine = recipe.model.name, state.engine.device, state.engine
    settled = engine.settled(state.module) if engine.is_sharded else nullcontext()
    with preserve_process(device), preserve_buffers(state.module), settled:
        batch = random_batch(TRIED, update.image_shape, device, num_labels=update.objective.num_labels)
        before = other_generators()
        seen = _watch(state.module, lambda: update.objective(state.module, batch.images, batch.labels), engine)
        if other_generators() != before:
            raise ModelError(
                f"parallel.recompute cannot be used with {name}: it draws from Python's or NumPy's random numbers,"
                " which are not drawn again as they were; draw from torch's, or leave it out"
            )
    parts, usual = _choose(seen), _kept_bytes(seen, [])
    most = _kept_bytes(seen, parts)
    if most > (1 - WORTH) * usual:
        raise ModelError(
            f"parallel.recompute saves nothing worth its time in {name}: no part of it keeps much more than what it is"
            f" given, so of {usual / TRIED / 1e6:.3g} MB of activations an image {most / TRIED / 1e6:.3g} would stay;"
            " leave it out, and lower --batch-size, or split each batch with --set optim.accumulate=..."
        )
    _install(parts)
    recomputed = Recomputed(tuple(map(_name, parts)), most / TRIED, usual / TRIED)
    notice(f"recomputed in each backward pass: {recomputed}")
    return recomputed


@dataclass(eq=False)
class _Call:
    """One call of a module: ``begin`` to ``end`` of all tensors that the pass keeps are kept within it.

    ``parameters``: where its own lie meanwhile, if they are gathered for it.
    """

    module: nn.Module
    name: str
    parent: _Call | None
    begin: int
    tensors: list[Tensor]
    versions: list[int]
    end: int = 0
    parameters: set[int] = field(default_factory=set)
    calls: list[_Call] = field(default_factory=list)
    can_repeat: bool = False


_Part: TypeAlias = tuple[_Call, ...]
"""A call, or several consecutive calls of a sequence."""


class _Seen(NamedTuple):
    """A forward pass: the network's own call, and address and bytes of each tensor that is kept, in order."""

    root: _Call
    kept: list[tuple[int, int]]


def _name(part: _Part) -> str:
    first, last = part[0].name, part[-1].name
    return first if first == last else f"{first}-{last.rpartition('.')[2]}"


def _tensors(arguments: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)]


def _memory(tensor: Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    return storage.data_ptr(), storage.nbytes()


def _watch(module: nn.Module, forward: Callable[[], object], engine: Engine) -> _Seen:
    """Run ``forward``, which calls the module once; see its calls and what it keeps, but for parameters and buffers."""
    names = {part: name for name, part in module.named_modules()}
    constant = {_memory(engine.own_values(tensor))[0] for tensor in (*module.parameters(), *module.buffers())}
    kept: list[tuple[int, int]] = []
    alive: list[Tensor] = []  # so that no memory is used twice
    calls: list[_Call] = []
    stack: list[_Call] = []

    def keep(tensor: Tensor) -> None:
        is_gathered = engine.is_sharded and any(_memory(tensor)[0] in call.parameters for call in stack)
        if _memory(tensor)[0] not in constant and not is_gathered:
            alive.append(tensor.detach())
            kept.append(_memory(tensor))

    def begin(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tensors, parent = _tensors((args, kwargs)), stack[-1] if stack else None
        call = _Call(part, names[part], parent, len(kept), tensors, [tensor._version for tensor in tensors])
        if engine.is_sharded:  # they are whole now, in memory that others get after the call
            call.parameters = {_memory(parameter)[0] for parameter in part.parameters(recurse=False)}
        if parent is not None:
            parent.calls.append(call)
        calls.append(call)
        stack.append(call)

    def end(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: object) -> None:
        call = stack.pop()
        call.end = len(kept)
        # Of a list that was given, it may have changed the members.
        call.can_repeat = list(map(id, _tensors((args, kwargs)))) == list(map(id, call.tensors))

    with ExitStack() as hooks:
        hooks.enter_context(torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor))
        for part in names:
            hooks.callback(
                part.register_forward_pre_hook(begin, prepend=not engine.is_sharded, with_kwargs=True).remove
            )
            hooks.callback(part.register_forward_hook(end, with_kwargs=True).remove)
        forward()
    times = Counter(call.module for call in calls)
    for call in calls:
        # What is written in TorchScript, has a forward of its own already, or is called twice, is left as it is; and so
        # is what was given tensors into which something was written later.
        has_own = isinstance(call.module, torch.jit.ScriptModule) or "forward" in vars(call.module)
        is_unchanged = [tensor._version for tensor in call.tensors] == call.versions
        call.can_repeat = call.can_repeat and is_unchanged and times[call.module] == 1 and not has_own
    return _Seen(calls[0], kept)


def _choose(seen: _Seen) -> list[_Part]:
    """Choose the parts that leave the least, without those that save nothing."""
    usual = _kept_bytes(seen, [])
    limits = (usual * FALLS**number for number in range(LIMITS))
    parts = min((_largest_parts(seen, limit) for limit in limits), key=partial(_kept_bytes, seen))
    for part in parts:
        fewer = [other for other in parts if other is not part]
        if _kept_bytes(seen, fewer) <= _kept_bytes(seen, parts):
            parts = fewer
    return parts


def _largest_parts(seen: _Seen, limit: float) -> list[_Part]:
    """Return the largest parts, in order, that can be repeated and keep no more than ``limit`` bytes each."""
    parts: list[_Part] = []

    def fits(*calls: _Call) -> bool:
        return calls[0].can_repeat and sum(_within(seen, calls).values()) <= limit

    def visit(call: _Call) -> None:
        if fits(call):
            parts.append((call,))
            return
        is_sequence = type(call.module).forward is nn.Sequential.forward and "forward" not in vars(call.module)
        can_join = is_sequence and [inner.module for inner in call.calls] == list(call.module.children())
        is_open = False  # the last part may be joined by what follows it in this sequence
        for inner in call.calls:
            # What overwrites what it is given, such as an in-place ReLU, goes with what is before it.
            if is_open and can_join and fits(*parts[-1], inner):
                parts[-1] += (inner,)
            elif is_open := fits(inner):
                parts.append((inner,))
            else:
                visit(inner)

    visit(seen.root)
    return parts


def _within(seen: _Seen, part: _Part) -> dict[int, int]:
    """Return the memory that a part keeps: bytes by address."""
    return dict(seen.kept[part[0].begin : part[-1].end])


def _kept_bytes(seen: _Seen, parts: Sequence[_Part]) -> int:
    """Return the most that is kept at any time: as the forward pass ends, or while a part is computed again.

    What was kept after a part is free by then.
    """
    kept: dict[int, int] = {}
    most = place = 0
    for part in parts:
        kept |= dict(seen.kept[place : part[0].begin]) | dict(map(_memory, part[0].tensors))
        most = max(most, sum((kept | _within(seen, part)).values()))
        place = part[-1].end
    return max(most, sum((kept | dict(seen.kept[place:])).values()))


def _install(parts: Sequence[_Part]) -> None:
    """Give the modules of these parts a forward that keeps nothing. Parameters, buffers and names stay."""
    stretches: dict[nn.Module, dict[nn.Module, list[nn.Module]]] = {}
    for part in parts:
        modules, parent = [call.module for call in part], part[0].parent
        if len(part) == 1:
            vars(modules[0])["forward"] = _Recomputing(partial(_class_forward, modules[0]), modules)
        else:
            assert parent is not None
            stretches.setdefault(parent.module, {})[modules[0]] = modules
    for sequence, by_first in stretches.items():
        inside = {module for modules in by_first.values() for module in modules}
        steps = [
            _Recomputing(partial(_in_turn, by_first[child]), by_first[child]) if child in by_first else child
            for child in sequence.children()
            if child in by_first or child not in inside
        ]
        vars(sequence)["forward"] = partial(_in_turn, steps)


def _class_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Compute by the class, which may have become another one since (as that of synchronised norms does)."""
    return type(module).forward(module, *args, **kwargs)


def _in_turn(steps: Sequence[Callable[[Any], Any]], input: Any) -> Any:
    """Compute a sequence."""
    for step in steps:
        input = step(input)
    return input


class _Recomputing:
    """A forward that keeps its arguments, and is computed again for the rest. Copies of a network have copies of it."""

    def __init__(self, forward: Callable[..., Any], modules: Sequence[nn.Module]) -> None:
        self.forward, self.modules = forward, modules

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        args, kwargs = tree_map(lambda leaf: leaf, (args, kwargs))  # dense blocks add to their list after each call
        forward = partial(self.forward, **kwargs) if kwargs else self.forward
        if torch.compiler.is_compiling():  # a compiler sees what is written twice, and takes no contexts
            return checkpoint(forward, *args, use_reentrant=False)
        # The second pass works on the buffers as they are now, which are dropped then.
        buffers = [(part, name, buffer.detach().clone()) for part, name, buffer in buffers_of(*self.modules)]
        return checkpoint(
            forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), _with_buffers(buffers))
        )


@contextmanager
def _with_buffers(others: Sequence[tuple[nn.Module, str, Tensor]]) -> Iterator[None]:
    before = [(module, name, getattr(module, name)) for module, name, _ in others]
    for module, name, other in others:
        setattr(module, name, other)
    try:
        yield
    finally:
        for module, name, buffer in before:
            setattr(module, name, buffer)
