"""All that an update changes: saved, loaded and stepped k times equals stepped k times, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from steadytrain.distributed.engine import Engine
from steadytrain.errors import RunError
from steadytrain.training.precision import Ema, Policy


@dataclass
class Cursor:
    """How far the run is: ``step`` updates done, ``position`` samples of the continuous stream consumed."""

    step: int = 0
    position: int = 0


class Meters:
    """Sums since the last log line, on the device: loss, right answers, images, gradient norm, updates."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.zeros(5, device=device)
        self._of_images = self.sums[:3]

    def add(self, counts: torch.Tensor) -> None:
        """Count one micro-batch: float32 [3], the sum of losses, right answers, images."""
        self._of_images += counts

    def add_norm(self, norm: torch.Tensor) -> None:
        """Count one update's gradient norm; one that is not finite made no update (fp16's scaling passed it over)."""
        finite = norm.isfinite()
        self.sums[3] += torch.where(finite, norm, 0.0)
        self.sums[4] += finite

    def load(self, saved: torch.Tensor, engine: Engine) -> None:
        """Take up what the ranks had counted, a row each: with fewer ranks now, some have the rows of several."""
        rows = saved.reshape(-1, len(self.sums))
        self.sums.copy_(rows[engine.world.rank :: engine.world.size].sum(0))

    def loss(self) -> float:
        """The sum of losses since the last log line; waits for the device."""
        return float(self.sums[0])

    def take(self, engine: Engine) -> tuple[float, float, float | None]:
        """Mean loss, top-1 and mean gradient norm since the last call, over all ranks; waits for the device."""
        loss, right, n, norm, updates = engine.sum(self.sums).tolist()
        self.sums.zero_()
        return loss / n, right / n, norm / updates if updates else None


@dataclass
class State:
    """The live objects of a run.

    ``best`` is the highest validation top-1 so far, ``evaluated`` the epoch of the last evaluation.
    """

    module: nn.Module
    optimizer: torch.optim.Optimizer
    policy: Policy
    engine: Engine
    ema: Ema | None
    meters: Meters
    cursor: Cursor
    best: float = -1.0
    evaluated: float = 0.0

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values for :mod:`steadytrain.training.checkpoints`."""
        return {
            "model": self.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "policy": self.policy.state_dict(),
            "engine": self.engine.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
            "meters": torch.stack(self.engine.all_gather(self.meters.sums)),
            "cursor": vars(self.cursor),
            "best": self.best,
            "evaluated": self.evaluated,
            "rng": _random_state(self.engine),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what :meth:`state_dict` gave.

        Raises:
            RunError: the state is of another model.
        """
        try:
            self.module.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
        except (RuntimeError, ValueError) as error:
            raise RunError(f"the checkpoint is of another model: {str(error).splitlines()[-1].strip()}") from error
        self.policy.load_state_dict(state["policy"])
        self.engine.load_state_dict(state["engine"])
        if self.ema is not None:
            self.ema.load_state_dict(state["ema"])
        self.meters.load(state["meters"], self.engine)
        self.cursor = Cursor(**state["cursor"])
        self.best, self.evaluated = state["best"], state["evaluated"]
        _restore_random_state(state["rng"], self.engine)


def _random_state(engine: Engine) -> dict[str, torch.Tensor]:
    # Dropout and the like draw from torch's generators; the samples' own randomness needs no state.
    drawn = {"cpu": torch.get_rng_state()}
    if engine.device.type == "cuda":
        drawn["cuda"] = torch.cuda.get_rng_state(engine.device)
    if engine.world.size == 1:
        return drawn
    return {name: torch.stack(engine.all_gather(own)) for name, own in drawn.items()}


def _restore_random_state(saved: Mapping[str, torch.Tensor], engine: Engine) -> None:
    """Each rank's own; one that was not there has what it began with."""
    rank, device = engine.world.rank, engine.device
    drawn = {name: states[None] if states.dim() == 1 else states for name, states in saved.items()}
    if rank < len(drawn["cpu"]):
        torch.set_rng_state(drawn["cpu"][rank].clone())
    if device.type == "cuda" and rank < len(drawn.get("cuda", ())):
        torch.cuda.set_rng_state(drawn["cuda"][rank].clone(), device)
