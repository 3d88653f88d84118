"""A range test for the learning rate (Smith 2017, "Cyclical Learning Rates", section 3.3).

A network of the recipe is trained on its images from its initial weights, while the rate rises by the same ratio at
each update. Smith reads two bounds off the curve: the rate where training begins to work, and the one where it slows
down or becomes ragged, the peak of his schedules, which is suggested here. The steepest descent lies between: it comes
when the weights are fitted, which pretrained ones soon are, long before a rate is too high. No run is touched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from statistics import fmean

import torch

from steadytrain.config import Recipe
from steadytrain.distributed.engine import Engine
from steadytrain.errors import FailedError
from steadytrain.models import first_epochs
from steadytrain.training import build
from steadytrain.training.compute.recompute import recompute_parts
from steadytrain.training.data import load, open_data
from steadytrain.training.device import prepare_device, set_up_machine
from steadytrain.training.session.session import set_phase
from steadytrain.training.state import preserve_process

LOWEST, HIGHEST = 1e-6, 10.0
"""Rates of the first update and of the last one."""

SETTLED = 10
"""Updates after which the running mean is taken as the loss of the initial weights."""

MARGIN = 0.1
"""The loss has diverged where its running mean is above that of the initial weights by so large a share of it, and by
as much as it had fallen. Networks with batch norms seldom come to a multiple of their lowest loss.
"""

DECAY = 0.9
"""The decay of that running mean, an update."""

WINDOW = 0.05
"""Half of the window of the smoothed loss, as a share of all updates; it looks to both sides, and so does not lag."""

REST = 0.02
"""The loss has slowed down where this share of the whole fall of its smoothed values is left."""

UNDER_DIVERGENCE = 10.0
"""The suggestion is at most the diverging rate divided by this."""


@dataclass(frozen=True)
class RateSearch:
    """The result of a range test.

    Args:
        rates: of each update.
        losses: of each update's batch, before it; the last one may be infinite.
        smoothed: their mean over the neighbouring updates.
        steepest: the rate at which the smoothed loss falls fastest per ratio of rates.
        slowed: the lowest rate by which the smoothed loss has fallen nearly as low as it gets (:data:`REST`).
        diverged: the rate at which training diverged; None: it did not.
        suggestion: ``slowed``, or a tenth of ``diverged`` where that is lower.
    """

    rates: Sequence[float]
    losses: Sequence[float]
    smoothed: Sequence[float]
    steepest: float
    slowed: float
    diverged: float | None
    suggestion: float


def find_rate(
    recipe: Recipe,
    *,
    updates: int = 300,
    allow_import: bool = False,
    say: Callable[[str], None] = lambda message: None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> RateSearch:
    """Train from the recipe's initial weights with rising rates, until it diverges or ``updates`` are done.

    The same recipe on the same machine gives the same answer.

    Args:
        recipe: its schedule is left out; batch, optimizer, augmentation and precision are used.
        updates: from the lowest rate to the highest.
        allow_import: import the recipe's ``pkg.mod:factory`` model.
        say: is called with each line for the user.
        progress: is called with the updates done, and their number.

    Raises:
        FailedError: the loss did not fall at any rate.
        SteadyError: what a run of the recipe would fail at.
    """
    recipe = recipe.with_({"optim.ema": None, "parallel.graph": False, "precision.compile": "none"})
    device = prepare_device(recipe)
    rates, losses = [LOWEST * (HIGHEST / LOWEST) ** (k / (updates - 1)) for k in range(updates)], []
    with preserve_process(device), closing(open_data(recipe.data, recipe.model, seed=recipe.seed, say=say)) as data:
        set_up_machine(recipe, device, None, say)
        torch.manual_seed(recipe.seed)
        built, input = build.model(recipe, data, allow_import=allow_import)
        state = build.state(recipe, built, Engine(device), num_train=data.num_train, input=input)
        input = build.training_input(recipe, input, data.num_train)
        if waiting := first_epochs(built, recipe.model.train, epochs=1.0):
            set_phase(recipe, built, waiting, 0.0)
        loss = build.loss(recipe, data, device, allow_import=allow_import)
        update = build.update(recipe, built, input, state, data=data, loss=loss, allow_import=allow_import or None)
        recompute_parts(recipe, update, state, say)
        threads = recipe.parallel.threads
        with build.training_feed(
            recipe, data, input, device, batch_size=recipe.batch_size, threads=threads, on_bad=lambda bad: say(str(bad))
        ) as feed:
            mean, start, lowest = 0.0, math.inf, math.inf
            for done, (rate, batch) in enumerate(zip(rates, load(feed, device), strict=False), 1):
                update(state, batch, rate)
                losses.append(state.meters.take(state.engine)[0])
                progress(done, updates)
                mean = DECAY * mean + (1 - DECAY) * losses[-1]
                running = mean / (1 - DECAY**done)
                lowest = min(lowest, running)
                start = running if done <= SETTLED else start
                if not math.isfinite(running) or running - start > max(MARGIN * start, start - lowest):
                    break
    return read_curve(rates[: len(losses)], losses, diverged=len(losses) < updates)


def read_curve(rates: Sequence[float], losses: Sequence[float], *, diverged: bool) -> RateSearch:
    """Find the rates where a curve falls fastest and where it slows down; ``diverged``: its last update did.

    Raises:
        FailedError: the loss did not fall at any rate.

    >>> rates = [10 ** (k / 10 - 4) for k in range(40)]
    >>> losses = [2 - 1 / (1 + (0.01 / rate) ** 2) for rate in rates]  # falls fastest near 0.01
    >>> found = read_curve(rates, losses, diverged=False)
    >>> 0.005 < found.steepest < 0.02 < found.suggestion < 0.1, found.diverged
    (True, None)
    """
    finite = [loss for loss in losses if math.isfinite(loss)]
    half = max(1, round(WINDOW * len(finite)))
    smoothed = [fmean(finite[max(0, k - half) : k + half + 1]) for k in range(len(finite))]
    end = min(range(len(smoothed)), key=smoothed.__getitem__, default=0)
    falls = {k: smoothed[k - half] - smoothed[k + half] for k in range(half, end - half + 1)}
    best = max(falls, key=falls.__getitem__, default=0)
    if not falls or falls[best] <= 0:
        raise FailedError(
            f"the loss did not fall at any rate from {rates[0]:.3g} to {rates[-1]:.3g} ({len(losses)} updates): the"
            " weights are as good as they get with these, or the labels cannot be learned; try more updates"
            " (--updates), or a larger batch"
        )
    top = rates[-1] if diverged else None
    enough = smoothed[end] + REST * (smoothed[0] - smoothed[end])
    slowed = next(rate for rate, loss in zip(rates, smoothed, strict=False) if loss <= enough)
    suggestion = slowed if top is None else min(slowed, top / UNDER_DIVERGENCE)
    return RateSearch(rates, losses, smoothed, rates[best], slowed, top, float(f"{suggestion:.2g}"))
