"""What was measured beside a run, gathered by phase: its first figures, the first pass over the data, what follows."""

from __future__ import annotations

from dataclasses import dataclass, field

from steadytrain.events import (
    Ceilings,
    Compiled,
    DeviceStats,
    Evaluated,
    Event,
    FeedPlaced,
    FeedStats,
    MachineStats,
    Saved,
    Stalled,
    StepMeasured,
)
from steadytrain.monitor.means import FeedSum, Mean

START, FIRST, LATER = range(3)
PHASES = (START, FIRST, LATER)
"""Before an attempt's feed and model are warm; in the first pass over the data; after it."""


@dataclass
class Gathered:
    """The samples of a run by phase, and the newest of what is measured once."""

    feeds: list[FeedSum] = field(default_factory=lambda: [FeedSum() for _ in PHASES])
    machines: list[Mean[MachineStats]] = field(default_factory=lambda: [Mean() for _ in PHASES])
    devices: dict[int, list[Mean[DeviceStats]]] = field(default_factory=dict)
    measured: StepMeasured | None = None
    ceilings: Ceilings | None = None
    compiled: Compiled | None = None
    placed: FeedPlaced | None = None
    evaluations: tuple[int, float] = (0, 0.0)
    checkpoints: tuple[int, float] = (0, 0.0)
    stalls: list[Stalled] = field(default_factory=list)
    _feed: FeedStats | None = None

    def begin(self) -> None:
        """An attempt begins, and with it a new feed."""
        self._feed = None
        self.compiled = None

    def take(self, event: Event, phase: int) -> None:
        """Absorb an event that belongs to a phase of the run."""
        match event:
            case FeedStats():
                self.feeds[phase if self._feed else START].add(self._feed, event)
                self._feed = event
            case MachineStats():
                self.machines[phase].add(event)
            case DeviceStats():
                self.devices.setdefault(event.index, [Mean() for _ in PHASES])[phase].add(event)
            case Evaluated():
                self.evaluations = _one_more(self.evaluations, event.seconds)
            case Saved():
                self.checkpoints = _one_more(self.checkpoints, event.seconds)
            case StepMeasured():
                self.measured = event
            case Ceilings():
                self.ceilings = event
            case Compiled():
                self.compiled = event
            case FeedPlaced():
                self.placed = event
            case Stalled():
                self.stalls.append(event)

    def feed(self, *phases: int) -> FeedStats | None:
        """Of the first of these phases that anything is known of."""
        return next((told for phase in phases if (told := self.feeds[phase].told())), None)

    def machine(self, *phases: int) -> MachineStats | None:
        """The same of the machine."""
        return next((told for phase in phases if (told := self.machines[phase].told())), None)

    def gpus(self, *phases: int) -> tuple[DeviceStats, ...]:
        """The same of each GPU."""
        found = (
            next((told for phase in phases if (told := means[phase].told())), None)
            for _, means in sorted(self.devices.items())
        )
        return tuple(told for told in found if told)


def _one_more(so_far: tuple[int, float], seconds: float) -> tuple[int, float]:
    return so_far[0] + 1, so_far[1] + max(0.0, seconds)
