"""The plan of a run: a recipe on this machine and with these data, before anything is trained."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from steadytrain.config import Recipe
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.world import World
from steadytrain.events import Started
from steadytrain.training import build
from steadytrain.training.compute.recompute import Recomputed, recompute_parts
from steadytrain.training.data import open_data, random_batch
from steadytrain.training.device import prepare_device, set_up_machine
from steadytrain.training.precision import DTYPES
from steadytrain.training.remarks import remarks
from steadytrain.training.state import preserve_process
from steadytrain.training.step import images_per_rank, share_of

_MOVES = frozenset(
    f"aten::{name}"
    for name in (
        *("_to_copy", "copy_", "clone", "detach", "view", "_unsafe_view", "permute", "t", "transpose", "expand"),
        *("unsqueeze", "squeeze", "slice", "select", "split", "cat", "stack", "full_like", "empty_like", "zeros_like"),
    )
)
"""Operations that compute nothing, whose number format does not matter."""

TRIED = 2
"""Images of the forward pass that is looked at."""


@dataclass(frozen=True, kw_only=True)
class Explained:
    """The network that would be trained, and its number formats.

    Args:
        parameters, trained: how many there are, and how many the optimizer updates.
        size, channels, classes: of an image, and of the network's outputs.
        num_train, num_val: images.
        device: as it calls itself.
        images_per_rank: of a batch, in the order of the ranks.
        operations: numbers (``bf16``) -> operation (``convolution``) -> how often a forward pass does it so.
        conversions: from one kind of numbers to another in a forward pass.
        stored: numbers -> parameters and running statistics that are kept so.
        masters: parameters that the optimizer updates by an fp32 twin.
        recomputed: what is computed again in the backward pass; None: nothing.
        notes: for the user.
        started: the first event that the run would have.
    """

    digest: str
    model: str
    parameters: int
    trained: int
    size: int
    channels: int
    classes: int
    num_train: int
    num_val: int
    steps: int
    steps_per_epoch: float
    device: str
    images_per_rank: Sequence[int]
    operations: Mapping[str, Mapping[str, int]]
    conversions: int
    stored: Mapping[str, int]
    masters: int
    recomputed: Recomputed | None
    notes: Sequence[str]
    started: Started


def explain(recipe: Recipe, *, ranks: int = 1, allow_import: bool = False) -> Explained:
    """Make what a run with this recipe would be made of, and send two images through its network.

    Args:
        recipe: of the run.
        ranks: that share a batch.
        allow_import: a file may name code.

    Raises:
        SteadyError: what the run itself would fail at.
    """
    notes: list[str] = []
    device = prepare_device(recipe)
    with preserve_process(device), closing(open_data(recipe.data, seed=recipe.seed, say=notes.append)) as data:
        build.require_schedule(recipe, data.num_train)
        machine = set_up_machine(recipe, device, None, notes.append)
        share = share_of(World(size=ranks), recipe.batch_size, recipe.optim.accumulate)
        shares = images_per_rank(share, ranks)
        machine |= {"ranks": ranks, "images_per_rank": shares} if ranks > 1 else {}
        torch.manual_seed(recipe.seed)
        built, input = build.model(recipe, data, allow_import=allow_import)
        state = build.state(recipe, built, Engine(device), input=input)
        update = build.update(recipe, built, input, state, num_labels=data.num_labels)
        recomputed = recompute_parts(recipe, update, state)
        batch = random_batch(TRIED, update.image_shape, device, num_labels=update.objective.num_labels)
        seen = _Numbers()
        with torch.no_grad():
            update.objective(state.module, batch.images, batch.labels)  # what is made at the first call is not of each
            with seen:
                update.objective(state.module, batch.images, batch.labels)
        started = build.started(recipe, data, built, input, machine)
        parameters, stored = list(state.module.parameters()), Counter[str]()
        for tensor in (*parameters, *state.module.buffers()):
            if tensor.is_floating_point():
                stored[_short(tensor.dtype)] += tensor.numel()
        return Explained(
            digest=recipe.digest,
            model=built.name,
            parameters=sum(p.numel() for p in parameters),
            trained=sum(p.numel() for p in parameters if p.requires_grad),
            size=update.image_shape[0],
            channels=update.image_shape[2],
            classes=len(data.classes),
            num_train=data.num_train,
            num_val=data.num_val,
            steps=started.steps,
            steps_per_epoch=started.steps_per_epoch,
            device=machine["device"],
            images_per_rank=shares,
            operations=seen.operations,
            conversions=seen.conversions,
            stored=stored,
            masters=sum(p.numel() for p in parameters if p.requires_grad and state.policy.master(p) is not p),
            recomputed=recomputed,
            notes=(
                *notes,
                *built.notes,
                *state.policy.notes,
                *remarks(recipe, built, input, data, parts=share.micro_batches),
            ),
            started=started,
        )


class _Numbers(TorchDispatchMode):
    """A mode that counts in which numbers operations compute: those of the first floating tensor they take."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self.conversions = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        first = next((arg for arg in args if isinstance(arg, torch.Tensor) and arg.is_floating_point()), None)
        name = func._schema.name
        if first is not None and name == "aten::_to_copy" and out.dtype != first.dtype and out.is_floating_point():
            self.conversions += 1
        elif first is not None and name not in _MOVES:
            self.operations[_short(first.dtype)][name.partition("::")[2].strip("_")] += 1
        return out


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", **{dtype: name for name, dtype in DTYPES.items()}}.get(dtype, str(dtype))
