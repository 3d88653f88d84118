"""From moments to figures: who trains, who feeds, what each of them does with its time, and what else is going on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from steadytrain.watch.foreign import calls
from steadytrain.watch.foreign.facts import GpuLoad, MachineLoad, Moment, ProcessLoad, ThreadLoad
from steadytrain.watch.foreign.rhythm import Rhythm, even, rhythm

_ACTIVE = 0.1
_MOVES = 0.02
_CHILD_MAIN = ("multiprocessing.spawn", "multiprocessing.forkserver", "multiprocessing-fork")
_WORKER_NAMES = ("pt_data_worker", "pt_main_worker")


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


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What the moments say together. Shares are of the time, processor time is in cores, bytes are per second.

    ``working``: share of the time in which what computes is at work: the ``gpus`` that are used; without any, the
    training process. ``trainer``: that process, or all of them together; ``main``: its main thread; ``helpers``: its
    other threads; ``workers``: the processes that it started to make batches. ``queued``: of the time in which threads
    could run, without a processor. ``runnable``: the trainer's threads that run or could. ``quiet_seconds``: nothing
    has moved for so long. ``busy_while_low`` and ``busy_while_high``: cores that workers and helpers use in either
    half of the rhythm.
    """

    seconds: float
    moments: int
    cpu: float
    machine: MachineLoad
    gpus: tuple[GpuLoad, ...]
    trainers: int
    trainer: Actor
    main: Actor
    helpers: tuple[Actor, ...]
    workers: tuple[Actor, ...]
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
    def feeders(self) -> tuple[Actor, ...]:
        """The workers, which make batches; without any, the threads beside the main one: some of them may."""
        return tuple(one for one in (self.workers or self.helpers) if one.active)


def seen(moments: Sequence[Moment]) -> Seen:
    """Figures of a watch that has at least one moment."""
    trainers, workers = _roles(moments)
    gpus = _gpus(moments)
    load = _gpu_load(moments, {gpu.index for gpu in gpus}) if gpus else [_at_work(one, trainers) for one in moments]
    beat = _rhythm(moments, load)
    feeding = [_feeding(one, trainers, workers) for one in moments]
    everything = [one for moment in moments for one in moment.processes]
    threads = [thread for one in everything for thread in one.threads]
    ran, queued = sum(one.cpu for one in threads), sum(one.queued or 0.0 for one in threads)
    last = moments[-1].processes
    return Seen(
        seconds=sum(one.seconds for one in moments),
        moments=len(moments),
        cpu=_mean(moments, lambda one: one.cpu),
        machine=_machine(moments),
        gpus=gpus,
        trainers=len(trainers),
        trainer=_process(moments, trainers, "the training process"),
        main=_thread(moments, {(pid, pid) for pid in trainers}, "main thread"),
        helpers=_helpers(moments, trainers),
        workers=tuple(_process(moments, {pid}, f"{name} {pid}") for pid, name in workers.items()),
        working=fmean(load),
        rhythm=beat,
        busy_while_low=_part(feeding, load, beat, high=False),
        busy_while_high=_part(feeding, load, beat, high=True),
        queued=queued / (ran + queued) if ran + queued > 0.01 * len(moments) else None,
        runnable=fmean(sum(_busy(t) for p in one.processes if p.pid in trainers for t in p.threads) for one in moments),
        disk_read_bytes=_rate(moments, lambda one: one.disk_read_bytes),
        read_bytes=_rate(moments, lambda one: one.read_bytes),
        major_faults=_rate(moments, lambda one: one.major_faults) or 0.0,
        swapped_bytes=sum(one.swapped_bytes or 0 for one in last),
        involuntary_switches=_rate(moments, lambda one: one.involuntary_switches) or 0.0,
        quiet_seconds=_quiet(moments),
        stopped=bool(last) and all(one.threads[0].state in "Tt" for one in last if one.threads),
        is_python=any("python" in (one.name + one.command) for one in last if one.pid in trainers),
        missing=moments[-1].missing,
    )


def _roles(moments: Sequence[Moment]) -> tuple[set[int], dict[int, str]]:
    """The processes that train, and the workers with their names.

    A worker is a child that runs its parent's program (forked), or that calls itself one; a process with workers
    trains. Without either, those that use a GPU or the most processor time.
    """
    newest = {one.pid: one for moment in moments for one in moment.processes}
    used: Counter[int] = Counter()
    for moment in moments:
        for one in moment.processes:
            used[one.pid] += one.cpu * moment.seconds  # type: ignore[assignment]
    workers = {pid: one.name for pid, one in newest.items() if _is_worker(one, newest)}
    heads = {newest[pid].parent for pid in workers} & set(newest) - set(workers)
    rest = [pid for pid in newest if pid not in workers]
    if not rest:
        return set(newest), {}
    most = max(used[pid] for pid in rest)
    busy = {pid for pid in rest if used[pid] >= max(0.25 * most, 1e-9)}
    by_memory = {max(rest, key=lambda pid: newest[pid].memory_bytes or 0)}
    return heads or busy or by_memory, workers


def _is_worker(one: ProcessLoad, newest: Mapping[int, ProcessLoad]) -> bool:
    parent = newest.get(one.parent)
    if parent is None or any(other.parent == one.pid for other in newest.values()):
        return False
    named = any(word in one.command for word in _CHILD_MAIN) or one.name in _WORKER_NAMES
    return named or (bool(one.command) and one.command == parent.command)


def _gpus(moments: Sequence[Moment]) -> tuple[GpuLoad, ...]:
    """Means of the GPUs that the watched processes use, or may use where that cannot be told."""
    newest = {gpu.index: gpu for moment in moments for gpu in moment.gpus}
    ours = [index for index, gpu in newest.items() if gpu.ours]
    maybe = [index for index, gpu in newest.items() if gpu.ours is None and _is_used(moments, index)]
    return tuple(_gpu(moments, newest[index]) for index in sorted(ours or maybe) if _of(moments, index))


def _is_used(moments: Sequence[Moment], index: int) -> bool:
    return any((one.utilisation or 0.0) > 0.05 for one in _of(moments, index))


def _of(moments: Sequence[Moment], index: int) -> list[GpuLoad]:
    return [one for moment in moments for one in moment.gpus if one.index == index and one.utilisation is not None]


def _gpu(moments: Sequence[Moment], newest: GpuLoad) -> GpuLoad:
    loads = _of(moments, newest.index)
    watts = [one.power_watts for one in loads if one.power_watts is not None]
    return GpuLoad(
        index=newest.index,
        name=newest.name,
        utilisation=fmean(one.utilisation or 0.0 for one in loads),
        memory_bytes=newest.memory_bytes,
        memory_total_bytes=newest.memory_total_bytes,
        power_watts=fmean(watts) if watts else None,
        power_limit_watts=newest.power_limit_watts,
        ours=newest.ours,
        others=newest.others,
    )


def _gpu_load(moments: Sequence[Moment], used: set[int]) -> list[float]:
    """Mean utilisation of the used GPUs at each moment; where one has no figure, the last one."""
    found, last = [], 0.0
    for moment in moments:
        told = [gpu.utilisation for gpu in moment.gpus if gpu.index in used and gpu.utilisation is not None]
        last = fmean(told) if told else last
        found.append(last)
    return found


def _busy(thread: ThreadLoad) -> float:
    return min(1.0, thread.cpu + (thread.queued or 0.0))


def _at_work(moment: Moment, trainers: set[int]) -> float:
    """Whether the training process computes, from 0 to 1; waiting for a processor counts as well."""
    ours = [one for one in moment.processes if one.pid in trainers]
    each = [min(1.0, max([one.cpu, *(_busy(thread) for thread in one.threads)])) for one in ours]
    return fmean(each) if each else 0.0


def _feeding(moment: Moment, trainers: set[int], workers: Mapping[int, str]) -> float:
    if workers:
        return sum(one.cpu for one in moment.processes if one.pid in workers)
    ours = [one for one in moment.processes if one.pid in trainers]
    return sum(thread.cpu for one in ours for thread in one.threads if thread.tid != one.pid)


def _rhythm(moments: Sequence[Moment], load: Sequence[float]) -> Rhythm | None:
    interval = max(0.1, sum(one.seconds for one in moments) / len(moments))
    return rhythm(even([one.at for one in moments], load, interval), interval_seconds=interval)


def _part(values: Sequence[float], load: Sequence[float], beat: Rhythm | None, *, high: bool) -> float | None:
    if beat is None:
        return None
    mine = [value for value, now in zip(values, load, strict=True) if (now >= beat.threshold) == high]
    return fmean(mine) if mine else None


def _process(moments: Sequence[Moment], pids: set[int], label: str) -> Actor:
    """Some processes as one: the processor time of all, the state of their main threads, busy as the busiest thread."""
    mains = _thread(moments, {(pid, pid) for pid in pids}, label)
    alive = [(one, moment.seconds) for moment in moments for one in moment.processes if one.pid in pids]
    seconds = sum(moment.seconds for moment in moments)
    there = max(1e-9, sum(length for _, length in alive))
    busiest = sum(max((_busy(thread) for thread in one.threads), default=0.0) * length for one, length in alive)
    disk = sum(any(waits_for_disk(thread) for thread in one.threads) * length for one, length in alive)
    return Actor(
        label=label,
        cpu=sum(one.cpu * length for one, length in alive) / seconds,
        busy=busiest / there,
        disk=disk / there,
        waits=mains.waits,
    )


def _thread(moments: Sequence[Moment], which: set[tuple[int, int]], label: str) -> Actor:
    """Some threads, by process and number, as one: means over all of them."""
    loads = [
        thread
        for moment in moments
        for one in moment.processes
        for thread in one.threads
        if (one.pid, thread.tid) in which
    ]
    waits = Counter(thread.waits_in for thread in loads if thread.waits_in)
    num = max(1, len(loads))
    return Actor(
        label=label,
        cpu=sum(thread.cpu for thread in loads) / num,
        busy=sum(_busy(thread) for thread in loads) / num,
        disk=sum(map(waits_for_disk, loads)) / num,
        waits={name: count / num for name, count in waits.most_common(5)},
    )


def _helpers(moments: Sequence[Moment], trainers: set[int]) -> tuple[Actor, ...]:
    """The training processes' threads beside the main ones; a moment that does not list one had it asleep."""
    loads: dict[tuple[int, int], list[ThreadLoad]] = {}
    for moment in moments:
        for one in moment.processes:
            if one.pid in trainers:
                for thread in one.threads[1:]:
                    loads.setdefault((one.pid, thread.tid), []).append(thread)
    num = len(moments)
    return tuple(
        Actor(
            label=f"thread {found[-1].name} {tid}",
            cpu=sum(one.cpu for one in found) / num,
            busy=sum(map(_busy, found)) / num,
            disk=sum(map(waits_for_disk, found)) / num,
            waits={name: n / num for name, n in Counter(one.waits_in for one in found if one.waits_in).items()},
        )
        for (_, tid), found in loads.items()
    )


def waits_for_disk(thread: ThreadLoad) -> bool:
    """Whether a thread waits for a file or a disk, and not for a device, a pipe or another process."""
    called, _, file = thread.waits_in.partition(" ")
    if file.startswith("/dev/"):
        return False
    if thread.state == "D":
        return not file or file.startswith("/")
    return thread.state == "S" and (called in calls.FILES_BY_NAME or (called in calls.ON_A_FILE and file[:1] == "/"))


def _quiet(moments: Sequence[Moment]) -> float:
    """Seconds at the end in which no processor time was used, nothing was read and no GPU worked."""
    found = 0.0
    for moment in reversed(moments):
        moves = moment.cpu >= _MOVES or any((gpu.utilisation or 0.0) > 0.01 and gpu.ours for gpu in moment.gpus)
        if moves or any((one.disk_read_bytes or 0.0) > 0 for one in moment.processes):
            break
        found += moment.seconds
    return found


def _machine(moments: Sequence[Moment]) -> MachineLoad:
    loads, last = [one.machine for one in moments], moments[-1].machine

    def mean(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    names = {name for load in loads for name in load.pressure}
    return MachineLoad(
        cores=last.cores,
        processors=last.processors,
        quota=last.quota,
        idle=mean(load.idle for load in loads),
        iowait=mean(load.iowait for load in loads),
        steal=mean(load.steal for load in loads),
        others=mean(load.others for load in loads),
        throttled=mean(load.throttled for load in loads),
        pressure={name: mean(load.pressure.get(name) for load in loads) or 0.0 for name in sorted(names)},
        swap_in_bytes=mean(load.swap_in_bytes for load in loads),
        available_bytes=last.available_bytes,
        memory_bytes=last.memory_bytes,
    )


def _mean(moments: Sequence[Moment], of: Callable[[Moment], float]) -> float:
    return sum(of(one) * one.seconds for one in moments) / max(1e-9, sum(one.seconds for one in moments))


def _rate(moments: Sequence[Moment], of: Callable[[ProcessLoad], float | None]) -> float | None:
    """The mean over the watch of what all processes have together; None where no process tells."""
    known = [
        (value, moment.seconds) for moment in moments for one in moment.processes if (value := of(one)) is not None
    ]
    total = sum(moment.seconds for moment in moments)
    return sum(value * seconds for value, seconds in known) / max(1e-9, total) if known else None
