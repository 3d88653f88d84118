"""One update: forward, backward, optimizer, average. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from steadytrain.optim import set_lr
from steadytrain.training.clock import Clock
from steadytrain.training.loss import Forward, Objective
from steadytrain.training.rank_share import Share
from steadytrain.training.state import State
from steadytrain.training.transfer import Loaded

Work: TypeAlias = Callable[["Update", State, torch.Tensor, torch.Tensor], None]
"""What a device does for an update: of the update, the state, images uint8 [B, H, W, C] and labels int64 [B]."""


def by_operations(update: Update, state: State, images_BHWC: torch.Tensor, labels: torch.Tensor) -> None:
    """The work of an update, operation by operation: micro-batches, their gradients, the optimizer."""
    own = update.share.own
    parts = [(images_BHWC, labels)] if own == 1 else zip(images_BHWC.chunk(own), labels.chunk(own), strict=True)
    for k, (images, right) in enumerate(parts):
        last = k == own - 1
        with state.engine.micro_batch(last=last):
            _gradients(update, state, images, right, last=last)
    update.clock.to("optimizer")
    if update.clip_norm is not None:
        state.policy.unscale(state.optimizer)
        state.meters.add_norm(state.engine.clip(update.parameters, update.clip_norm))
    state.engine.step(lambda: state.policy.step(state.optimizer))


def _gradients(update: Update, state: State, images_BHWC: torch.Tensor, labels: torch.Tensor, *, last: bool) -> None:
    policy = state.policy
    update.clock.to("forward")
    loss, counts = update.forward(update.call, images_BHWC, labels)
    update.clock.to("backward")
    # The engine gives the mean over ranks: of these, each has its part of the micro-batches.
    parts = update.share.micro_batches / state.engine.world.size
    state.engine.backward(policy.scale(loss if parts == 1 else loss / parts), last=last)
    state.meters.add(counts)


@dataclass(frozen=True)
class Update:
    """What every update of a run has in common.

    Args:
        call: the engine's module, called on float images [B, C, H, W], giving logits [B, K].
        parameters: those that the optimizer updates.
        objective: what is made smaller.
        forward: computes it: itself, or code that was compiled from it.
        clip_norm: as in :class:`steadytrain.config.Optim`.
        share: of each batch, this rank's.
        clock: is told what an update is at.
        work: operation by operation, or by a graph of all of them.
    """

    call: nn.Module
    parameters: tuple[nn.Parameter, ...]
    objective: Objective
    forward: Forward
    clip_norm: float | None
    share: Share
    clock: Clock
    work: Work = by_operations

    def __call__(self, state: State, batch: Loaded, lr: float) -> None:
        """Train on one batch, or this rank's share of it, micro-batch by micro-batch."""
        set_lr(state.optimizer, lr)
        self.work(self, state, batch.images, batch.labels)
        if state.ema is not None:
            state.ema.update(state.module)
        self.clock.to("host")
        state.cursor.step += 1
        state.cursor.position += self.share.batch_size
        self.clock.updated(state.cursor.step, self.share.batch_size)
