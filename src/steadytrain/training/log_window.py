"""Images and seconds between two log lines: the steady state, without what evaluations and checkpoints take."""

from __future__ import annotations

import time

from steadytrain.training.session import Session


class Laps:
    """Images, seconds of steps and seconds waited since the last log line; evaluating and saving do not count."""

    def __init__(self) -> None:
        self.images = 0
        self.seconds = self.waited = 0.0
        self.restart()

    def restart(self) -> None:
        """The next lap begins now."""
        self._began = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the lap began; the next one begins."""
        seconds = time.perf_counter() - self._began
        self.seconds += seconds
        self.restart()
        return seconds


def settled_loss(session: Session, laps: Laps) -> float:
    """The sum of losses since the last log line, when the device has done what the host had only asked for."""
    loss = session.state.meters.loss()
    laps.lap()  # or those steps would be counted with the evaluation or the saving that follows
    return loss
