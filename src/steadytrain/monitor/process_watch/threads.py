"""What the threads of one process did between two looks."""

from __future__ import annotations

from dataclasses import dataclass

from steadytrain.monitor.process_watch import proc
from steadytrain.monitor.process_watch.facts import ThreadLoad


@dataclass(frozen=True)
class Counted:
    """A thread's counters at a look, all since it began.

    ``queued``: seconds ready for a processor before it got one, ``turns``: how often it got one; None where the kernel
    does not tell. ``ahead``: seconds of the queue that were told already and that ``queued`` will hold later.
    """

    name: str
    state: str
    ran: float
    queued: float | None
    turns: int | None
    ahead: float = 0.0


def queued_seconds(before: Counted, now: Counted, seconds: float) -> tuple[float, float]:
    """How long a thread was ready for a processor without one, and what of that the kernel has yet to count.

    The kernel counts a wait when it ends. A thread that could run at both looks and got no processor in between has
    been waiting all the time that it did not run.

    >>> ready = Counted("python", "R", 1.0, 2.0, 10)
    >>> queued_seconds(ready, ready, 0.1)
    (0.1, 0.1)
    >>> queued_seconds(Counted("python", "R", 1.0, 2.0, 10, ahead=0.1), Counted("python", "R", 1.05, 2.125, 11), 0.1)
    (0.025, 0.0)
    """
    if now.queued is None or before.queued is None:
        return 0.0, 0.0
    counted = max(0.0, now.queued - before.queued)
    told = min(before.ahead, counted)
    if before.state == now.state == "R" and now.turns == before.turns:
        waited = max(0.0, seconds - (now.ran - before.ran))
        return round(waited, 9), before.ahead + waited
    return round(counted - told, 9), 0.0


class Threads:
    """The threads of one process; ``missing``: what of them is not readable here."""

    def __init__(self) -> None:
        self.missing: dict[str, None] = {}
        self._known: dict[int, Counted] = {}

    def look(self, pid: int, seconds: float, *, every: bool) -> list[ThreadLoad]:
        """All threads, the main one first.

        Args:
            pid: the process.
            seconds: since the last look.
            every: look closely also at those that did nothing.
        """
        tids = proc.threads(pid)
        for gone in self._known.keys() - set(tids):
            del self._known[gone]
        return [load for tid in tids if (load := self._thread(pid, tid, seconds, every)) is not None]

    def _thread(self, pid: int, tid: int, seconds: float, every: bool) -> ThreadLoad | None:
        folder, before = f"/proc/{pid}/task/{tid}", self._known.get(tid)
        scheduled = proc.scheduled(folder)
        # Most threads of a training process sleep all the time: of those one file is read, not three.
        moved = before is None or scheduled is None or scheduled[0] > before.ran or before.state in "RD"
        if before is not None and not (moved or every or tid == pid):
            return ThreadLoad(tid=tid, name=before.name, cpu=0.0, queued=0.0, state=before.state)
        told = proc.stat(folder)
        if told is None:
            return None
        if scheduled is None and proc.scheduled(folder) is None and proc.stat(folder) is not None:
            self.missing["how long threads wait for a processor (/proc/PID/schedstat is not there)"] = None
        now = Counted(told.name, told.state, *(scheduled or (told.cpu_seconds, None, None)))
        queued, ahead = (0.0, 0.0) if before is None else queued_seconds(before, now, seconds)
        self._known[tid] = Counted(now.name, now.state, now.ran, now.queued, now.turns, ahead)
        asleep = now.state == "D" or (now.state == "S" and (moved or tid == pid))
        return ThreadLoad(
            tid=tid,
            name=now.name,
            cpu=0.0 if before is None else max(0.0, now.ran - before.ran) / seconds,
            queued=None if now.queued is None else min(1.0, queued / seconds),
            state=now.state,
            waits_in=self._waits(pid, tid) if asleep else "",
        )

    def _waits(self, pid: int, tid: int) -> str:
        told = proc.waits_in(pid, tid)
        if told is None:
            self.missing["what sleeping threads wait in (/proc/PID/syscall is not readable by this user)"] = None
        return told or ""
