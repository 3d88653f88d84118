"""Passes over drawn images before the first update: timed, part of no update, exchanged with nobody."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from steadytrain.training.loss import Forward
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
        self.state.module.zero_grad(set_to_none=True)
        return self._timed(lambda: self._pass(forward))

    def seconds_forward(self) -> float:
        """Of the way forward alone, operation by operation, until the device has done it."""
        with torch.no_grad():
            return self._timed(lambda: self.update.objective(self.update.call, self.batch.images, self.batch.labels))

    def _pass(self, forward: Forward) -> None:
        state = self.state
        with state.engine.micro_batch(last=False):
            loss, _ = forward(self.update.call, self.batch.images, self.batch.labels)
            state.engine.backward(state.policy.scale(loss), last=False)

    def _timed(self, work: Callable[[], object]) -> float:
        device = self.state.engine.device
        wait_for(device)
        began = time.perf_counter()
        work()
        wait_for(device)
        return time.perf_counter() - began
