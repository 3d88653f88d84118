"""Sum up a watch: who trains, who makes batches, what each of them does with its time, and what else goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median_low
from typing import Any

from steadytrain.machine.nvml import GpuLoad
from steadytrain.machine.process_tree import CALLS_ON_FILES, CALLS_ON_PATHS
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


@dataclass(frozen=True, kw_only=True)
class WatchSummary:
    """What the moments say together. Shares are of the time, processor time is in cores, bytes are per second.

    ``working``: share of the time in which what computes is at work: the ``gpus`` that are used; without any, the
    training process. ``trainer``: that process, or all of them together; ``main``: its main thread; ``helpers``: its
    other threads; ``workers``: the processes that it started to make batches, as many as there are at a time. They
    were started anew ``renewals`` times, and ``idle_after_renewals`` is the share of the time in which what computes
    waited right after that. ``queued``: of the time in which threads could run, without a processor. ``runnable``: the
    trainer's threads that run or could. ``quiet_seconds``: nothing has moved for so long. ``busy_while_low`` and
    ``busy_while_high``: cores that workers and helpers use in either half of the rhythm.
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
    busy_while_low: float | None
    busy_while_high: float | None
    queued: float | None
    runnable: float
    disk_read_bytes: float | None
    read_bytes: float | None
    major_faults: float
    swapped_bytes: int
    involuntary_switches: float
    quiet_seconds: float
    stopped: bool
    is_python: bool
    missing: tuple[str, ...]

    @property
    def feeders(self) -> tuple[Activity, ...]:
        """The workers, which make batches; without any, the threads beside the main one: some of them may."""
        return tuple(actor for actor in (self.workers or self.helpers) if actor.active)

    @property
    def idle(self) -> float:
        """Share of the time in which what computes does not work."""
        return max(0.0, 1.0 - self.working)

    @property
    def free_cores(self) -> float:
        """Cores that nobody uses and that the watched processes may use."""
        unused = (self.machine.idle or 0.0) + (self.machine.iowait or 0.0)
        return max(0.0, unused if self.machine.quota is None else min(unused, self.machine.quota - self.cpu))

    @property
    def is_full(self) -> bool:
        """Whether hardly a core is free."""
        return self.machine.idle is not None and self.free_cores <= max(0.1 * self.machine.cores, 0.15)

    @property
    def own_part(self) -> float:
        """The watched processes' part of the processor time that is used."""
        return self.cpu / max(1e-9, self.cpu + (self.machine.others or 0.0))


def summarise(moments: Sequence[Moment]) -> WatchSummary:
    """Sum up a watch that has at least one moment."""
    trainers, workers = find_roles(moments)
    gpus = _gpus(moments)
    load = _gpu_load(moments, {gpu.index for gpu in gpus}) if gpus else [_working(one, trainers) for one in moments]
    interval = max(0.1, sum(moment.seconds for moment in moments) / len(moments))
    beat = rhythm(even([moment.at for moment in moments], load, interval), interval_seconds=interval)
    feeding = [_feeding(moment, trainers, workers) for moment in moments]
    low, high = ([], []) if beat is None else _split(feeding, [now >= beat.threshold for now in load])
    seconds = sum(moment.seconds for moment in moments)
    training = [(one, moment.seconds) for moment in moments for one in moment.processes if one.pid in trainers]
    mains = [process.threads[0] for process, _ in training if process.threads]
    fresh, places = find_restarts(moments, workers, _RENEWED_SECONDS), group_workers(moments, workers)
    threads = [thread for moment in moments for process in moment.processes for thread in process.threads]
    ran, queued = sum(thread.cpu for thread in threads), sum(thread.queued or 0.0 for thread in threads)
    last = moments[-1].processes
    return WatchSummary(
        seconds=seconds,
        moments=len(moments),
        cpu=sum(moment.cpu * moment.seconds for moment in moments) / max(1e-9, seconds),
        machine=_machine(moments),
        gpus=gpus,
        trainers=len(trainers),
        trainer=_process_actor(training, seconds, "the training process"),
        main=_thread_actor(mains, len(mains), "main thread"),
        helpers=_helpers(moments, trainers),
        workers=tuple(_process_actor(one, seconds, f"{one[-1][0].name} {one[-1][0].pid}") for one in places),
        renewals=len(workers) // len(places) - 1 if places else 0,
        idle_after_renewals=sum((1 - now) * new for now, new in zip(load, fresh, strict=True)) / len(load),
        working=fmean(load),
        rhythm=beat,
        busy_while_low=fmean(low) if low else None,
        busy_while_high=fmean(high) if high else None,
        queued=queued / (ran + queued) if ran + queued > 0.01 * len(moments) else None,
        runnable=fmean(sum(_busy(t) for p in one.processes if p.pid in trainers for t in p.threads) for one in moments),
        disk_read_bytes=_rate(moments, lambda process: process.disk_read_bytes),
        read_bytes=_rate(moments, lambda process: process.read_bytes),
        major_faults=_rate(moments, lambda process: process.major_faults) or 0.0,
        swapped_bytes=sum(process.swapped_bytes or 0 for process in last),
        involuntary_switches=_rate(moments, lambda process: process.involuntary_switches) or 0.0,
        quiet_seconds=_quiet_seconds(moments),
        stopped=bool(last) and all(process.threads[0].state in "Tt" for process in last if process.threads),
        is_python=any("python" in (process.name + process.command) for process in last if process.pid in trainers),
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
    workers = {pid for pid, process in newest.items() if _is_worker(process, newest)}
    ranks = _spawned_ranks(workers, newest, used)
    workers -= ranks
    heads = set()
    for worker in workers:  # it works for its parent, or for the one whose server that is
        parent = newest[worker].parent
        server = newest.get(parent)
        heads.add(server.parent if server is not None and _SERVER in server.command else parent)
    heads = ranks | (heads & newest.keys() - workers)
    rest = [pid for pid, process in newest.items() if pid not in workers and _SERVER not in process.command]
    if not rest:
        return set(newest), set()
    most = max(used[pid] for pid in rest)
    busy = {pid for pid in rest if used[pid] >= max(0.25 * most, 1e-9)}
    return heads or busy or {max(rest, key=lambda pid: newest[pid].memory_bytes or 0)}, workers


def _spawned_ranks(workers: set[int], newest: Mapping[int, ProcessLoad], used: Mapping[int, float]) -> set[int]:
    """Those of the spawned children that train."""
    spawned = {
        pid
        for pid in workers
        if any(word in newest[pid].command for word in _SPAWNED)
        and newest[pid].command != newest[newest[pid].parent].command  # forked by one that was spawned
    }
    if any(process.devices for process in newest.values()):
        return {pid for pid in spawned if newest[pid].devices}
    by_parent: dict[int, float] = {}
    for pid in spawned:
        by_parent[newest[pid].parent] = by_parent.get(newest[pid].parent, 0.0) + used[pid]
    return {pid for pid in spawned if used[newest[pid].parent] < _LEAST_OF_A_HEAD * by_parent[newest[pid].parent]}


def _is_worker(process: ProcessLoad, newest: Mapping[int, ProcessLoad]) -> bool:
    parent = newest.get(process.parent)
    if parent is None or any(other.parent == process.pid for other in newest.values()):
        return False
    if _SERVER in process.command and _SERVER not in parent.command:
        return False
    is_named = any(word in process.command for word in _SPAWNED) or process.name in _WORKER_NAMES
    return is_named or (bool(process.command) and process.command == parent.command)


def group_workers(moments: Sequence[Moment], workers: set[int]) -> list[list[tuple[ProcessLoad, float]]]:
    """Group the workers as many as there are at a time, though each epoch may start others.

    Each worker comes with the seconds of its look.
    """
    each = [
        sorted((one for one in moment.processes if one.pid in workers), key=lambda one: (one.parent, one.pid))
        for moment in moments
    ]
    num = median_low([len(present) for present in each if present] or [0])
    return [
        [(present[n], moment.seconds) for present, moment in zip(each, moments, strict=True) if n < len(present)]
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


def _process_actor(loads: Sequence[tuple[ProcessLoad, float]], seconds: float, label: str) -> Activity:
    """A process, or several as one: the processor time of all, busy as the busiest thread, asleep as the main ones.

    Args:
        loads: each with the seconds of its interval.
        seconds: of the whole watch.
        label: its name.
    """
    present = max(1e-9, sum(length for _, length in loads))
    busiest = sum(max(map(_busy, one.threads), default=0.0) * length for one, length in loads)
    disk = sum(any(map(_waits_for_disk, one.threads)) * length for one, length in loads)
    return Activity(
        label=label,
        cpu=sum(one.cpu * length for one, length in loads) / max(1e-9, seconds),
        busy=busiest / present,
        disk=disk / present,
        waits=_thread_actor([one.threads[0] for one, _ in loads if one.threads], len(loads), label).waits,
    )


def _thread_actor(loads: Sequence[ThreadLoad], looks: int, label: str) -> Activity:
    """A thread, or several as one, means over so many ``looks``: where one is not listed it slept."""
    num = max(1, looks)
    waits = Counter(load.waits_in for load in loads if load.waits_in)
    return Activity(
        label=label,
        cpu=sum(load.cpu for load in loads) / num,
        busy=sum(map(_busy, loads)) / num,
        disk=sum(map(_waits_for_disk, loads)) / num,
        waits={name: count / num for name, count in waits.most_common(5)},
    )


def _helpers(moments: Sequence[Moment], trainers: set[int]) -> tuple[Activity, ...]:
    """The training processes' threads beside the main ones."""
    loads: dict[tuple[int, int], list[ThreadLoad]] = {}
    for moment in moments:
        for process in moment.processes:
            if process.pid in trainers:
                for thread in process.threads[1:]:
                    loads.setdefault((process.pid, thread.tid), []).append(thread)
    return tuple(_thread_actor(one, len(moments), f"thread {one[-1].name} {tid}") for (_, tid), one in loads.items())


def _busy(thread: ThreadLoad) -> float:
    """Share of the interval on a processor or ready for one."""
    return min(1.0, thread.cpu + (thread.queued or 0.0))


def _waits_for_disk(thread: ThreadLoad) -> bool:
    """Whether a thread waits for a file or a disk, and not for a device, a pipe or another process."""
    call, _, file = thread.waits_in.partition(" ")
    if file.startswith("/dev/"):
        return False
    if thread.state == "D":
        return not file or file.startswith("/")
    return thread.state == "S" and (call in CALLS_ON_PATHS or (call in CALLS_ON_FILES and file[:1] == "/"))


def _gpus(moments: Sequence[Moment]) -> tuple[GpuLoad, ...]:
    """Means of the GPUs that the watched processes use, or may use where that cannot be told."""
    newest = {gpu.index: gpu for moment in moments for gpu in moment.gpus}
    loads: dict[int, list[GpuLoad]] = {}
    for moment in moments:
        for gpu in moment.gpus:
            if gpu.utilisation is not None:
                loads.setdefault(gpu.index, []).append(gpu)
    used = {index for index, known in loads.items() if any((one.utilisation or 0.0) > 0.05 for one in known)}
    ours = {index for index, gpu in newest.items() if gpu.ours}
    ours = ours or {index for index, gpu in newest.items() if gpu.ours is None and index in used}
    return tuple(
        replace(
            newest[index],
            utilisation=fmean(one.utilisation or 0.0 for one in loads[index]),
            power_watts=_mean(one.power_watts for one in loads[index]),
        )
        for index in sorted(ours & loads.keys())
    )


def _gpu_load(moments: Sequence[Moment], used: set[int]) -> list[float]:
    """Mean utilisation of the used GPUs at each moment; where one has no figure, the last one."""
    means, last = [], 0.0
    for moment in moments:
        now = _mean(gpu.utilisation for gpu in moment.gpus if gpu.index in used)
        last = last if now is None else now
        means.append(last)
    return means


def _working(moment: Moment, trainers: set[int]) -> float:
    """Whether the training process computes, from 0 to 1; waiting for a processor counts as well."""
    ours = [process for process in moment.processes if process.pid in trainers]
    each = [min(1.0, max([process.cpu, *map(_busy, process.threads)])) for process in ours]
    return fmean(each) if each else 0.0


def _feeding(moment: Moment, trainers: set[int], workers: set[int]) -> float:
    if workers:
        return sum(process.cpu for process in moment.processes if process.pid in workers)
    ours = [process for process in moment.processes if process.pid in trainers]
    return sum(thread.cpu for process in ours for thread in process.threads if thread.tid != process.pid)


def _split(values: Sequence[float], is_high: Sequence[bool]) -> tuple[list[float], list[float]]:
    pairs = list(zip(values, is_high, strict=True))
    return [value for value, high in pairs if not high], [value for value, high in pairs if high]


def _quiet_seconds(moments: Sequence[Moment]) -> float:
    """Seconds at the end in which no processor time was used, nothing was read and no GPU worked."""
    quiet = 0.0
    for moment in reversed(moments):
        moves = moment.cpu >= _MOVES or any((gpu.utilisation or 0.0) > 0.01 and gpu.ours for gpu in moment.gpus)
        if moves or any((process.disk_read_bytes or 0.0) > 0 for process in moment.processes):
            break
        quiet += moment.seconds
    return quiet


def _machine(moments: Sequence[Moment]) -> MachineLoad:
    """The machine at the last moment, with means of what is a share or a rate."""
    loads = [moment.machine for moment in moments]
    rates = ("idle", "iowait", "steal", "others", "throttled", "swap_in_bytes")
    means: dict[str, Any] = {name: _mean(getattr(load, name) for load in loads) for name in rates}
    names = sorted({name for load in loads for name in load.pressure})
    pressure = {name: _mean(load.pressure.get(name) for load in loads) or 0.0 for name in names}
    return replace(loads[-1], pressure=pressure, **means)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None


def _rate(moments: Sequence[Moment], value_of: Callable[[ProcessLoad], float | None]) -> float | None:
    """The mean over the watch of what all processes have together; None where no process tells."""
    known = [
        value * moment.seconds
        for moment in moments
        for process in moment.processes
        if (value := value_of(process)) is not None
    ]
    return sum(known) / max(1e-9, sum(moment.seconds for moment in moments)) if known else None
