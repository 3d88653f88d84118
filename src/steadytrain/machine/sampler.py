"""A thread that writes now and then what the machine and its GPUs did meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress

from steadytrain.errors import SteadyError
from steadytrain.events import EventLog, Noticed
from steadytrain.machine.counters import Elsewhere, Machine, between, machine
from steadytrain.machine.gpu_sampler import Gpus

_GRACE_SECONDS = 10.0  # a driver that does not answer keeps no run from ending


@contextmanager
def sampling(
    log: EventLog, *, ranks: Iterable[int] = (), find_gpus: Callable[[], Gpus | None] = Gpus.found
) -> Iterator[None]:
    """Write ``MachineStats``, and ``DeviceStats`` of each GPU, while the body runs, and once more when it ends.

    After ``pause(t)`` seconds each, ``t`` seconds after the start: a day's run has some 3,000 of them. One takes up
    to a millisecond of processor time. What fails is told in the log, once, and never in the body.

    Args:
        log: where they are written, by a thread of their own.
        ranks: processes that train the same run on this machine.
        find_gpus: gives the GPUs to ask, or None.
    """
    ended = threading.Event()
    thread = threading.Thread(target=_sample, args=(log, ended, ranks, find_gpus), name="steady-sample", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_GRACE_SECONDS)


def pause(elapsed_seconds: float) -> float:
    """Seconds to the next sample: a hundredth of the time so far, from 1 s to 30 s.

    >>> pause(0), pause(600), pause(86400)
    (1.0, 6.0, 30.0)
    """
    return min(30.0, max(1.0, elapsed_seconds / 100))


def _sample(log: EventLog, ended: threading.Event, ranks: Iterable[int], find_gpus: Callable[[], Gpus | None]) -> None:
    """What the thread does."""
    try:
        gpus = find_gpus()
        with closing(machine(ranks)) as source:
            try:
                _write(log, ended, source, gpus)
            finally:
                if gpus is not None:
                    gpus.close()
    except SteadyError:
        return  # the log cannot be written: whoever trains meets that too
    except Exception as error:  # noqa: BLE001 - a thread's edge: no run ends because it cannot be watched
        with suppress(SteadyError):
            log.append(Noticed(message=f"the machine is not sampled any more: {error!r}", step=0))


def _write(log: EventLog, ended: threading.Event, source: Machine | Elsewhere, gpus: Gpus | None) -> None:
    began = time.perf_counter()
    before = source.read()
    is_last = False
    while not is_last:
        is_last = ended.wait(pause(time.perf_counter() - began))
        now = source.read()
        log.append(between(before, now))
        for stats in () if gpus is None else gpus.read(source.pids):
            log.append(stats)
        before = now
