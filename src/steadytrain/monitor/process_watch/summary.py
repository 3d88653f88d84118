"""Summary of a watch: which processes train, which make batches, how each spends its time, and what else runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median_low
from typing import Any

from steadytrain.machine.nvml import GpuLoad
from steadytrain.monitor.process_watch.moments import MachineLoad, Moment, ProcessLoad, ThreadLoad
from steadytrain.monitor.process_watch.rhythm import Rhythm, even, rhythm

_ACTIVE = 0.1
_MOVES = 0.02
_RENEWED_SECONDS = 1.5
_SPAWNED = ("multiprocessing.spawn", "multiprocessing-fork")
_SERVER = "multiprocessing.forkserver"  # starts workers for its parent: neither trains nor feeds
_LEAST_OF_A_HEAD = 0.02
_WORKER_NAMES = ("pt_data_worker", "pt_main_worker")


@dataclass(frozen=True, kw_only=True)
class Activity:
    """A process or a thread over the whole watch; shares of its time.

    ``cpu``: on a processor (in cores); ``busy``: on one, or ready for one; ``disk``: waiting for a file or a disk.
    ``waits``: what it sleeps in -> share of the time.
    """

    label: str
    cpu: float
    busy: float
    disk: float
    waits: Mapping[str, float]

    @property
    def active(self) -> bool:
        """Return whether it does anything worth mentioning."""
        return self.busy + self.disk >= _ACTIVE


@dataclass(frozen=True, kw_only=True)
class WatchSummary:
    """Means over a watch. Shares are of the time, processor time is in cores, bytes are per second.

    ``working``: share of the time in which what computes is at work: the ``gpus`` that are used; without any, the
    training process. ``trainer``: that process, or all of them together; ``main``: its main thread; ``helpers``: its
    other threads; ``workers``: the processes that it started to make batches, as many as there are at a time. They
    were started anew ``renewals`` times, and ``idle_after_renewals`` is the share of the time in which what computes
    waited right after that. ``queued``: of the time in which threads could run, without a processor. ``runnable``: the
    trainer's threads that run or could. ``quiet_seconds``: nothing has moved for so long.
    """

    seconds: float
    moments: int
    cpu: float
    machine: MachineLoad
    gpus: tuple[GpuLoad, ...]
    trainers: int
    trainer: Activity
    main: Activity
    helpers: tuple[Activity, ...]
    workers: tuple[Activity, ...]
    renewals: int
    idle_after_renewals: float
    working: float
    rhythm: Rhythm | None
    queued: float | None
    runnable: float
    disk_read_bytes: float | None
    swapped_bytes: int
    quiet_seconds: float
    stopped: bool
    missing: tuple[str, ...]

    @property
    def feeders(self) -> tuple[Activity, ...]:
        """The workers, which make batches; without any, the threads beside the main one, some of which may."""
        return tuple(actor for actor in (self.workers or self.helpers) if actor.active)

    @property
    def idle(self) -> float:
        """Share of the time in which what computes does not work."""
        return max(0.0, 1.0 - self.working)

    @property
    def free_cores(self) -> float:
        """Idle cores that the watched processes may use."""
        unused = (self.machine.idle or 0.0) + (self.machine.iowait or 0.0)
        return max(0.0, unused if self.machine.quota is None else min(unused, self.machine.quota - self.cpu))

    @property
    def is_full(self) -> bool:
        """Return whether hardly a core is free."""
        return self.machine.idle is not None and self.free_cores <= max(0.1 * self.machine.cores, 0.15)

    @property
    def own_part(self) -> float:
        """The watched processes' part of the processor time that is used."""
        return self.cpu / max(1e-9, self.cpu + (self.machine.others or 0.0))


def summarise(moments: Sequence[Moment]) -> WatchSummary:
    """Sum up a watch that has at least one moment."""
    trainers, workers = find_roles(moments)
    seconds, last = sum(moment.seconds for moment in moments), moments[-1].processes
    training = [(load, look.seconds) for look in moments for load in look.processes if load.pid in trainers]
    helpers: dict[int, list[tuple[ThreadLoad, float]]] = {}
    for process, length in training:
        for thread in process.threads[1:]:
            helpers.setdefault(thread.tid, []).append((thread, length))

    gpus = _used_gpus(moments)
    used, load = {gpu.index for gpu in gpus}, list[float]()  # what computes, at each moment
    for moment in moments:
        if gpus:
            now = _mean(gpu.utilisation for gpu in moment.gpus if gpu.index in used)
            load.append(now if now is not None else load[-1] if load else 0.0)
        else:  # waiting for a processor counts as computing
            trains = (process for process in moment.processes if process.pid in trainers)
            load.append(_mean(min(1.0, max(process.cpu, process.busy)) for process in trains) or 0.0)
    interval = max(0.1, seconds / len(moments))
    beat = rhythm(even([moment.at for moment in moments], load, interval), interval_seconds=interval)
    fresh, places = find_restarts(moments, workers, _RENEWED_SECONDS), group_workers(moments, workers)
    threads = [thread for moment in moments for process in moment.processes for thread in process.threads]
    ran, queued = sum(thread.cpu for thread in threads), sum(thread.queued or 0.0 for thread in threads)
    return WatchSummary(
        seconds=seconds,
        moments=len(moments),
        cpu=sum(moment.cpu * moment.seconds for moment in moments) / max(1e-9, seconds),
        machine=_mean_machine(moments),
        gpus=gpus,
        trainers=len(trainers),
        trainer=_activity("the training process", training, cpu_seconds=seconds),
        main=_activity(
            "main thread", [(process.threads[0], length) for process, length in training if process.threads]
        ),
        helpers=tuple(
            _activity(f"thread {loads[-1][0].name} {tid}", loads, seconds=seconds) for tid, loads in helpers.items()
        ),
        workers=tuple(
            _activity(f"{loads[-1][0].name} {loads[-1][0].pid}", loads, cpu_seconds=seconds) for loads in places
        ),
        renewals=len(workers) // len(places) - 1 if places else 0,
        idle_after_renewals=sum((1 - now) * new for now, new in zip(load, fresh, strict=True)) / len(load),
        working=fmean(load),
        rhythm=beat,
        queued=queued / (ran + queued) if ran + queued > 0.01 * len(moments) else None,
        runnable=sum(thread.busy for process, _ in training for thread in process.threads) / len(moments),
        disk_read_bytes=_rate(moments, lambda process: process.disk_read_bytes),
        swapped_bytes=sum(process.swapped_bytes or 0 for process in last),
        quiet_seconds=_quiet_seconds(moments),
        stopped=bool(last) and all(process.threads[0].state in "Tt" for process in last if process.threads),
        missing=moments[-1].missing,
    )


def find_roles(moments: Sequence[Moment]) -> tuple[set[int], set[int]]:
    """Find the processes that train, and the workers, by number.

    A worker is a child that runs its parent's program (forked), or that calls itself one, and has no children; a
    process with workers trains. Spawned children train themselves where they hold a GPU, or where nobody does and
    their parent only waits for them. Without workers, those train that use the most processor time.
    """
    newest = {process.pid: process for moment in moments for process in moment.processes}
    used: dict[int, float] = dict.fromkeys(newest, 0.0)
    for moment in moments:
        for process in moment.processes:
            used[process.pid] += process.cpu * moment.seconds
    workers, spawned, parents = set[int](), set[int](), {process.parent for process in newest.values()}
    for pid, process in newest.items():
        parent = newest.get(process.parent)
        if parent is None or pid in parents or (_SERVER in process.command and _SERVER not in parent.command):
            continue
        is_spawned = any(word in process.command for word in _SPAWNED)
        is_forked = bool(process.command) and process.command == parent.command
        if is_spawned or is_forked or process.name in _WORKER_NAMES:
            workers.add(pid)
        if is_spawned and not is_forked:
            spawned.add(pid)
    if any(process.devices for process in newest.values()):
        ranks = {pid for pid in spawned if newest[pid].devices}
    else:
        children = {
            pid: sum(used[other] for other in spawned if newest[other].parent == newest[pid].parent) for pid in spawned
        }
        ranks = {pid for pid in spawned if used[newest[pid].parent] < _LEAST_OF_A_HEAD * children[pid]}
    workers -= ranks
    heads = set(ranks)
    for worker in workers:  # it works for its parent, or for the one whose server that is
        parent = newest[newest[worker].parent]
        heads.add(parent.parent if _SERVER in parent.command else parent.pid)
    heads = ranks | (heads & newest.keys() - workers)
    candidates = [pid for pid, process in newest.items() if pid not in workers and _SERVER not in process.command]
    if not candidates:
        return set(newest), set()
    most = max(used[pid] for pid in candidates)
    busy = {pid for pid in candidates if used[pid] >= max(0.25 * most, 1e-9)}
    return heads or busy or {max(candidates, key=lambda pid: newest[pid].memory_bytes or 0)}, workers


def group_workers(moments: Sequence[Moment], workers: set[int]) -> list[list[tuple[ProcessLoad, float]]]:
    """Group workers by their place in the pool, since each epoch may start new ones.

    Each worker comes with the seconds of its look.
    """
    workers_at = [
        sorted((load for load in moment.processes if load.pid in workers), key=lambda load: (load.parent, load.pid))
        for moment in moments
    ]
    num = median_low([len(present) for present in workers_at if present] or [0])
    return [
        [(present[n], moment.seconds) for present, moment in zip(workers_at, moments, strict=True) if n < len(present)]
        for n in range(num)
    ]


def find_restarts(moments: Sequence[Moment], workers: set[int], within_seconds: float) -> list[bool]:
    """Find for each moment whether workers were started anew at most so many seconds before."""
    known: set[int] = set()
    fresh, last = [], -within_seconds
    for moment in moments:
        present = {process.pid for process in moment.processes if process.pid in workers}
        if known and present - known:
            last = moment.at
        known |= present
        fresh.append(moment.at - last < within_seconds)
    return fresh


def _activity(
    label: str,
    loads: Sequence[tuple[ProcessLoad | ThreadLoad, float]],
    *,
    seconds: float | None = None,
    cpu_seconds: float | None = None,
) -> Activity:
    """Sum up a process or a thread, or several as one, from loads with the seconds of their looks.

    Args:
        seconds: of all looks, where it slept in those that are not listed; None: those listed are all.
        cpu_seconds: what the processor time is a share of, where that is not the same.
    """
    seconds = max(1e-9, sum(length for _, length in loads) if seconds is None else seconds)
    waits: dict[str, float] = {}
    for load, length in loads:
        if load.waits_in:
            waits[load.waits_in] = waits.get(load.waits_in, 0.0) + length / seconds
    return Activity(
        label=label,
        cpu=sum(load.cpu * length for load, length in loads) / (cpu_seconds or seconds),
        busy=sum(load.busy * length for load, length in loads) / seconds,
        disk=sum(load.waits_for_disk * length for load, length in loads) / seconds,
        waits=dict(sorted(waits.items(), key=lambda pair: -pair[1])[:5]),
    )


def _used_gpus(moments: Sequence[Moment]) -> tuple[GpuLoad, ...]:
    """Return means of the GPUs that the watched processes use, or may use where that cannot be told."""
    newest = {gpu.index: gpu for moment in moments for gpu in moment.gpus}
    loads: dict[int, list[GpuLoad]] = {}
    for gpu in (gpu for moment in moments for gpu in moment.gpus if gpu.utilisation is not None):
        loads.setdefault(gpu.index, []).append(gpu)
    used = {index for index, known in loads.items() if any((gpu.utilisation or 0.0) > 0.05 for gpu in known)}
    ours = {index for index, gpu in newest.items() if gpu.ours}
    ours = ours or {index for index, gpu in newest.items() if gpu.ours is None and index in used}
    return tuple(
        replace(
            newest[index],
            utilisation=_mean(gpu.utilisation for gpu in loads[index]),
            power_watts=_mean(gpu.power_watts for gpu in loads[index]),
        )
        for index in sorted(ours & loads.keys())
    )


def _quiet_seconds(moments: Sequence[Moment]) -> float:
    """Return the seconds at the end in which no processor time was used, nothing was read and no GPU worked."""
    quiet = 0.0
    for moment in reversed(moments):
        moves = moment.cpu >= _MOVES or any((gpu.utilisation or 0.0) > 0.01 and gpu.ours for gpu in moment.gpus)
        if moves or any((process.disk_read_bytes or 0.0) > 0 for process in moment.processes):
            break
        quiet += moment.seconds
    return quiet


def _mean_machine(moments: Sequence[Moment]) -> MachineLoad:
    """Return the machine at the last moment, with means of what is a share or a rate."""
    loads = [moment.machine for moment in moments]
    rates = ("idle", "iowait", "others", "throttled", "swap_in_bytes")
    means: dict[str, Any] = {name: _mean(getattr(load, name) for load in loads) for name in rates}
    names = sorted({name for load in loads for name in load.pressure})
    pressure = {name: _mean(load.pressure.get(name) for load in loads) or 0.0 for name in names}
    return replace(loads[-1], pressure=pressure, **means)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _rate(moments: Sequence[Moment], value_of: Callable[[ProcessLoad], float | None]) -> float | None:
    """Return the mean over the watch of what all processes have together; None where no process tells."""
    pairs = [(value_of(process), moment.seconds) for moment in moments for process in moment.processes]
    known = [value * seconds for value, seconds in pairs if value is not None]
    return sum(known) / max(1e-9, sum(moment.seconds for moment in moments)) if known else None
