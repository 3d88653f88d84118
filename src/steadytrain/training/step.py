"""One update: forward, backward, optimizer, average. Nothing here waits for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from steadytrain.optim import set_lr
from steadytrain.training.clock import Clock
from steadytrain.training.objective import Forward, Objective
from steadytrain.training.share import Share
from steadytrain.training.state import State
from steadytrain.training.transfer import Loaded


@dataclass(frozen=True)
class Update:
    """What every update of a run has in common.

    Args:
        call: the engine's module, called on float images [B, C, H, W], giving logits [B, K].
        parameters: those that the optimizer updates.
        objective: what is made smaller.
        forward: computes it: itself, or code that was compiled from it.
        clip_norm: as in :class:`steadytrain.recipe.Optim`.
        share: of each batch, this rank's.
        clock: is told what an update is at.
    """

    call: nn.Module
    parameters: tuple[nn.Parameter, ...]
    objective: Objective
    forward: Forward
    clip_norm: float | None
    share: Share
    clock: Clock

    def __call__(self, state: State, batch: Loaded, lr: float) -> None:
        """Train on one batch, or this rank's share of it, micro-batch by micro-batch."""
        set_lr(state.optimizer, lr)
        own = self.share.own
        images = batch.images.chunk(own)
        labels = batch.labels.chunk(own)
        for k in range(own):
            last = k == own - 1
            with state.engine.micro_batch(last=last):
                self._gradients(state, images[k], labels[k], last=last)
        self.clock.to("optimizer")
        if self.clip_norm is not None:
            state.policy.unscale(state.optimizer)
            state.meters.add_norm(state.engine.clip(self.parameters, self.clip_norm))
        state.engine.step(lambda: state.policy.step(state.optimizer))
        if state.ema is not None:
            state.ema.update(state.module)
        self.clock.to("host")
        state.cursor.step += 1
        state.cursor.position += self.share.batch_size
        self.clock.updated(state.cursor.step, self.share.batch_size)

    def _gradients(self, state: State, images_BHWC: torch.Tensor, labels: torch.Tensor, *, last: bool) -> None:
        policy = state.policy
        self.clock.to("forward")
        loss, counts = self.forward(self.call, images_BHWC, labels)
        self.clock.to("backward")
        # The engine gives the mean over ranks: of these, each has its part of the micro-batches.
        parts = self.share.micro_batches / state.engine.world.size
        state.engine.backward(policy.scale(loss / parts), last=last)
        state.meters.add(counts)
