"""When a run measures what its steps are made of: once in an attempt, where that costs next to nothing."""

from __future__ import annotations

from collections.abc import Iterator

from steadytrain.events import Event
from steadytrain.machine import facts
from steadytrain.training.clock import WARM_UP
from steadytrain.training.passes import FEW, SHARE, cost_estimate, measure_step
from steadytrain.training.session import Session
from steadytrain.training.transfer import Loaded

LEAST_UPDATES = 20
SHORT_SECONDS, LEAST_RUN_SECONDS = 0.6, 15.0
"""What may be spent in any case on a run that has so many seconds of updates."""


SUSPECT_SHARE = 0.05
"""Of the updates of a run that is set up in a way which often costs several times as much."""


def is_cheap(step_seconds: float, updates_left: int, *, batch_size: int = 128, is_suspect: bool = False) -> bool:
    """Whether measuring costs little beside the updates that are still to come.

    >>> is_cheap(0.01, 200_000), is_cheap(0.01, 2_000), is_cheap(0.01, 100), is_cheap(1.0, 300)
    (True, True, False, False)
    >>> is_cheap(0.01, 100, is_suspect=True), is_cheap(1.0, 300, is_suspect=True)
    (False, True)
    """
    seconds, cost = step_seconds * updates_left, cost_estimate(step_seconds, batch_size)
    if cost <= SHARE * seconds or (is_suspect and cost <= SUSPECT_SHARE * seconds):
        return True
    return cost <= SHORT_SECONDS and seconds >= LEAST_RUN_SECONDS


def is_suspect(session: Session) -> bool:
    """Whether a run is set up in a way that often costs much: what it costs here is then worth measuring.

    On a CPU: 16-bit numbers, more compute threads than cores, batches of a few images.
    """
    recipe = session.recipe
    if session.state.engine.device.type != "cpu":
        return False
    threads = session.machine["compute_threads"]
    return recipe.precision.name != "fp32" or threads > facts.cores() or recipe.batch_size < FEW


class Measuring:
    """Waits for the moment.

    Args:
        session: of the run.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._updates, self._seconds = 0, 0.0
        # Batch norms that wait for those of other ranks are measured by none alone.
        recipe = session.recipe
        waits = session.state.engine.world.size > 1 and recipe.model.batch_norm == "synchronous"
        # Passes ask for operations one by one: of a graph's seconds they would tell what it does not take.
        self._is_open = not (waits or recipe.parallel.graph)

    def is_due(self, seconds: float) -> bool:
        """Whether it has come, after an update that took so long; at most once."""
        if not self._is_open:
            return False
        self._updates += 1
        self._seconds += seconds if self._updates > WARM_UP else 0.0
        if self._updates < LEAST_UPDATES:
            return False
        self._is_open = False
        left = self._session.steps - self._session.state.cursor.step
        typical = self._seconds / (self._updates - WARM_UP)
        batch_size = self._session.recipe.batch_size
        return is_cheap(typical, left, batch_size=batch_size, is_suspect=is_suspect(self._session))

    def measure(self, batch: Loaded) -> Iterator[Event]:
        """A ``StepMeasured``, by a batch that an update was made of."""
        with self._session.clock.within("measuring"):
            measured = measure_step(self._session, batch)
        if measured is not None:
            yield measured
