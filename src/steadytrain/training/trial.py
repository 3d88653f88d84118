"""Passes over drawn images before the first update: timed, part of no update, exchanged with nobody."""

from __future__ import annotations

import time

import torch

from steadytrain.training.objective import Forward
from steadytrain.training.peak import wait_for
from steadytrain.training.state import State
from steadytrain.training.step import Update
from steadytrain.training.transfer import Loaded

ROUNDS = 2


class Trial:
    """Forward and backward passes of a run's own network, which the caller puts back.

    Args:
        update: as :func:`.build.update` makes it.
        state: of the run.
        batch: what passes are made of: a micro-batch.
    """

    def __init__(self, update: Update, state: State, batch: Loaded) -> None:
        self.update, self.state, self.batch = update, state, batch

    def fastest(self, forward: Forward, *, rounds: int = ROUNDS) -> float:
        """Seconds of the fastest of some passes."""
        return min(self.seconds(forward) for _ in range(rounds))

    def seconds(self, forward: Forward) -> float:
        """Of one pass, until the device has done it."""
        state = self.state
        state.module.zero_grad(set_to_none=True)
        wait_for(state.engine.device)
        began = time.perf_counter()
        with state.engine.micro_batch(last=False):
            loss, _ = forward(self.update.call, self.batch.images, self.batch.labels)
            state.engine.backward(state.policy.scale(loss), last=False)
        wait_for(state.engine.device)
        return time.perf_counter() - began

    def seconds_forward(self) -> float:
        """Of the way forward alone, operation by operation, until the device has done it."""
        wait_for(self.state.engine.device)
        began = time.perf_counter()
        with torch.no_grad():
            self.update.objective(self.update.call, self.batch.images, self.batch.labels)
        wait_for(self.state.engine.device)
        return time.perf_counter() - began
