"""The plan of a run: a recipe on this machine and with these data, before anything is trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch

from steadytrain.config import Recipe
from steadytrain.distributed.engine import Engine
from steadytrain.distributed.world import World
from steadytrain.events import Started
from steadytrain.training import build
from steadytrain.training.compute.recompute import Recomputed, recompute_parts
from steadytrain.training.data import open_data
from steadytrain.training.device import prepare_device, set_up_machine
from steadytrain.training.precision import DTYPES
from steadytrain.training.remarks import remarks
from steadytrain.training.state import preserve_process
from steadytrain.training.step import images_per_rank, share_of


@dataclass(frozen=True, kw_only=True)
class Explained:
    """The network that would be trained, and how it is stored.

    Args:
        parameters, trained: how many there are, and how many the optimizer updates.
        size, channels, classes: of an image, and of the network's outputs.
        num_train, num_val: images.
        device: as it calls itself.
        images_per_rank: of a batch, in the order of the ranks.
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
    stored: Mapping[str, int]
    masters: int
    recomputed: Recomputed | None
    notes: Sequence[str]
    started: Started


def explain(recipe: Recipe, *, ranks: int = 1, allow_import: bool = False) -> Explained:
    """Make what a run with this recipe would be made of.

    Args:
        recipe: of the run.
        ranks: that share a batch.
        allow_import: a file may name code.

    Raises:
        SteadyError: what the run itself would fail at.
    """
    notes: list[str] = []
    device = prepare_device(recipe)
    opened = open_data(recipe.data, recipe.model, seed=recipe.seed, say=notes.append)
    with preserve_process(device), closing(opened) as data:
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


def _short(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", **{dtype: name for name, dtype in DTYPES.items()}}.get(dtype, str(dtype))
