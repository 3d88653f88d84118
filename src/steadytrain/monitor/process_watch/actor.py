"""What a process or a thread does with its time, over a whole watch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steadytrain.monitor.process_watch import calls
from steadytrain.monitor.process_watch.facts import ProcessLoad, ThreadLoad

_ACTIVE = 0.1


@dataclass(frozen=True, kw_only=True)
class Actor:
    """A process or a thread over the whole watch; shares of its time.

    ``cpu``: on a processor (in cores); ``busy``: on one, or ready for one; ``disk``: waiting for a file or a disk.
    ``waits``: what it sleeps in -> share of the looks.
    """

    label: str
    cpu: float
    busy: float
    disk: float
    waits: Mapping[str, float]

    @property
    def active(self) -> bool:
        """Whether it does anything worth a word."""
        return self.busy + self.disk >= _ACTIVE

    @property
    def waits_most(self) -> str:
        """The system call, and its file, that it sleeps in most."""
        return max(self.waits, key=lambda name: self.waits[name], default="")


def of_process(loads: Sequence[tuple[ProcessLoad, float]], seconds: float, label: str) -> Actor:
    """A process, or several as one: the processor time of all, busy as the busiest thread, asleep as the main ones.

    Args:
        loads: each with the seconds of its interval.
        seconds: of the whole watch.
        label: its name.
    """
    there = max(1e-9, sum(length for _, length in loads))
    busiest = sum(max(map(busy, one.threads), default=0.0) * length for one, length in loads)
    disk = sum(any(map(waits_for_disk, one.threads)) * length for one, length in loads)
    return Actor(
        label=label,
        cpu=sum(one.cpu * length for one, length in loads) / max(1e-9, seconds),
        busy=busiest / there,
        disk=disk / there,
        waits=of_thread([one.threads[0] for one, _ in loads if one.threads], len(loads), label).waits,
    )


def of_thread(loads: Sequence[ThreadLoad], looks: int, label: str) -> Actor:
    """A thread, or several as one, means over so many ``looks``: where one is not listed it slept."""
    num = max(1, looks)
    waits = Counter(one.waits_in for one in loads if one.waits_in)
    return Actor(
        label=label,
        cpu=sum(one.cpu for one in loads) / num,
        busy=sum(map(busy, loads)) / num,
        disk=sum(map(waits_for_disk, loads)) / num,
        waits={name: count / num for name, count in waits.most_common(5)},
    )


def busy(thread: ThreadLoad) -> float:
    """Share of the interval on a processor or ready for one."""
    return min(1.0, thread.cpu + (thread.queued or 0.0))


def waits_for_disk(thread: ThreadLoad) -> bool:
    """Whether a thread waits for a file or a disk, and not for a device, a pipe or another process."""
    called, _, file = thread.waits_in.partition(" ")
    if file.startswith("/dev/"):
        return False
    if thread.state == "D":
        return not file or file.startswith("/")
    return thread.state == "S" and (called in calls.FILES_BY_NAME or (called in calls.ON_A_FILE and file[:1] == "/"))
