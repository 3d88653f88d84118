"""From moments to figures: who trains, who feeds, what each of them does with its time, and what else is going on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from steadytrain.monitor.process_watch.actor import Actor, busy, of_process, of_thread
from steadytrain.monitor.process_watch.facts import GpuLoad, MachineLoad, Moment, ProcessLoad, ThreadLoad
from steadytrain.monitor.process_watch.rhythm import Rhythm, even, rhythm
from steadytrain.monitor.process_watch.roles import crew, renewed, roles

_MOVES = 0.02
_RENEWED_SECONDS = 1.5


@dataclass(frozen=True, kw_only=True)
class Seen:
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
    trainer: Actor
    main: Actor
    helpers: tuple[Actor, ...]
    workers: tuple[Actor, ...]
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
    def feeders(self) -> tuple[Actor, ...]:
        """The workers, which make batches; without any, the threads beside the main one: some of them may."""
        return tuple(one for one in (self.workers or self.helpers) if one.active)


def seen(moments: Sequence[Moment]) -> Seen:
    """Figures of a watch that has at least one moment."""
    trainers, workers = roles(moments)
    gpus = _gpus(moments)
    load = _gpu_load(moments, {gpu.index for gpu in gpus}) if gpus else [_at_work(one, trainers) for one in moments]
    beat = _rhythm(moments, load)
    feeding = [_feeding(one, trainers, workers) for one in moments]
    seconds = sum(one.seconds for one in moments)
    everything = [one for moment in moments for one in moment.processes]
    training = [(one, moment.seconds) for moment in moments for one in moment.processes if one.pid in trainers]
    mains = [one.threads[0] for one, _ in training if one.threads]
    fresh, places = renewed(moments, workers, _RENEWED_SECONDS), crew(moments, workers)
    threads = [thread for one in everything for thread in one.threads]
    ran, queued = sum(one.cpu for one in threads), sum(one.queued or 0.0 for one in threads)
    last = moments[-1].processes
    return Seen(
        seconds=seconds,
        moments=len(moments),
        cpu=_mean(moments, lambda one: one.cpu),
        machine=_machine(moments),
        gpus=gpus,
        trainers=len(trainers),
        trainer=of_process(training, seconds, "the training process"),
        main=of_thread(mains, len(mains), "main thread"),
        helpers=_helpers(moments, trainers),
        workers=tuple(of_process(one, seconds, f"{one[-1][0].name} {one[-1][0].pid}") for one in places),
        renewals=len(workers) // len(places) - 1 if places else 0,
        idle_after_renewals=sum((1 - now) * new for now, new in zip(load, fresh, strict=True)) / len(load),
        working=fmean(load),
        rhythm=beat,
        busy_while_low=_part(feeding, load, beat, high=False),
        busy_while_high=_part(feeding, load, beat, high=True),
        queued=queued / (ran + queued) if ran + queued > 0.01 * len(moments) else None,
        runnable=fmean(sum(busy(t) for p in one.processes if p.pid in trainers for t in p.threads) for one in moments),
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


def _at_work(moment: Moment, trainers: set[int]) -> float:
    """Whether the training process computes, from 0 to 1; waiting for a processor counts as well."""
    ours = [one for one in moment.processes if one.pid in trainers]
    each = [min(1.0, max([one.cpu, *(busy(thread) for thread in one.threads)])) for one in ours]
    return fmean(each) if each else 0.0


def _feeding(moment: Moment, trainers: set[int], workers: set[int]) -> float:
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


def _helpers(moments: Sequence[Moment], trainers: set[int]) -> tuple[Actor, ...]:
    """The training processes' threads beside the main ones."""
    loads: dict[tuple[int, int], list[ThreadLoad]] = {}
    for moment in moments:
        for one in moment.processes:
            if one.pid in trainers:
                for thread in one.threads[1:]:
                    loads.setdefault((one.pid, thread.tid), []).append(thread)
    return tuple(of_thread(found, len(moments), f"thread {found[-1].name} {tid}") for (_, tid), found in loads.items())


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
