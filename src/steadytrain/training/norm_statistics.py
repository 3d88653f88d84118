"""Before averaged weights are evaluated or exported, their batch norms take statistics of their own.

Running statistics are those of the weights that were trained, whose noise the average has not: under a high learning
rate they fit it badly. Averaged weights need a few batches of their own (Izmailov et al. 2018, "Averaging Weights Leads
to Wider Optima and Better Generalization", section 3.2); here these are the last ones before they are used.
"""

from __future__ import annotations

import math

import torch

from steadytrain.training.session import Session
from steadytrain.training.transfer import Loaded

BATCHES = 8
"""How many; each costs a forward pass."""


def refresh_norm_statistics(session: Session, batch: Loaded, lr: float) -> None:
    """One update, and if the average is about to be used, a step towards its own statistics."""
    state, left = session.state, updates_left(session)
    if state.ema is None:
        session.update(state, batch, lr)
        return
    state.ema.keeps_statistics = settles = left <= BATCHES and state.ema.has_statistics(state.module)
    session.update(state, batch, lr)
    if settles:
        with session.clock.within("evaluation"), torch.no_grad(), state.policy.autocast():
            images = state.policy.images(batch.images, session.input.mean, session.input.std)
            state.ema.settle(state.module, images, share=1 / (BATCHES + 1 - left))


def updates_left(session: Session) -> int:
    """Updates until the weights are evaluated, or exported at the end."""
    left = session.steps - session.state.cursor.step
    if session.val_feed is None:
        return left
    period = session.recipe.every.evaluate_epochs
    following = (math.floor(session.epoch / period + 1e-9) + 1) * period
    images = following * session.data.num_train - session.state.cursor.position
    return min(left, math.ceil(images / session.recipe.batch_size - 1e-9))
