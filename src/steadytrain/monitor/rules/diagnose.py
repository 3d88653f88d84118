"""The verdict: what costs a run time without need, what to change, and what that saves.

The causes of :mod:`steadytrain.monitor.rules` are asked one by one and put in order: what costs more before what costs
less, what follows from another cause behind it, and last what every run has.

>>> causes = order([Cause(name="decode", share=0.4, sentence="", change="steady pack"),
...                 Cause(name="affinity", share=0.3, sentence="", change="taskset"),
...                 Cause(name="startup", share=0.5, sentence="", is_usual=True)])
>>> [(cause.name, cause.because) for cause in causes]
[('affinity', ''), ('decode', 'affinity'), ('startup', '')]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from steadytrain.events import Ceilings, ProbeProgress, StepMeasured
from steadytrain.format import count, duration, number, percent
from steadytrain.monitor.collectives import read_hangs
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.history_reader import read_history
from steadytrain.monitor.ledger import INPUT, PASSES, STEADY, Ledger
from steadytrain.monitor.rules import LEAST, Cause, find_causes, rules
from steadytrain.monitor.rules.cause import clip
from steadytrain.monitor.rules.host import EXPLAINED, slower_stretch
from steadytrain.monitor.rules.pace import mean_pace
from steadytrain.run import Run

MOST_SLOWED = 0.95  # share of the computing: what a cause took of it, at most
NEAR = 0.75  # share of its ceiling: a run that stays below it has something that holds it back
ROOT = 0.5  # a cause explains another one where it costs at least this part of what that one costs
NAMES = {
    "pressure.cpu": "waiting for the processors",
    "pressure.memory": "waiting for memory",
    "pressure.io": "waiting for the disks",
    "throttled_seconds": "a control group's quota",
    "steal": "cores that other virtual machines on the host take",
    "disk_read_bytes": "bytes read from disks",
    "disk_busy": "how busy the disks are",
    "system_share": "processor time of the kernel",
    "sm_active": "multiprocessors active",
    "tensor_active": "tensor cores active",
    "power_most_watts": "the highest power limit that may be set",
}
"""Samples that a system may not have, in words."""


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """The speed of a run, and the speed that it could have.

    Args:
        images_per_second: in the steady state, now.
        compute: the updates alone would do, on batches that are there; None where it is not known. Where it follows
            from the run, without what slowed the updates.
        feed: the data loader alone would make; None where it is not known.
        limit: what is slower of the two, ``compute`` or ``feed``.
        probed: whether the two were measured alone, or follow from the run itself.
        without: the cause that ``compute`` leaves out, the costliest that slowed the updates; empty where none did.
        mfu: model FLOPs utilisation: three forward passes for each image, over what the device can do; None where
            neither was measured.
    """

    images_per_second: float
    compute: float | None
    feed: float | None
    limit: Literal["compute", "feed"]
    probed: bool
    without: str = ""
    mfu: float | None = None

    @property
    def most(self) -> float:
        """Images per second that the slower of computing and feed allows."""
        return min(rate for rate in (self.compute, self.feed, float("inf")) if rate)

    @property
    def near(self) -> float:
        """Share of :attr:`most` that the run reaches, 0 to 1."""
        return clip(self.images_per_second / self.most)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """The verdict on a run: its causes, ledger and ceiling.

    Args:
        causes: the dominant one first; ``nothing`` stands there where there is none.
        ledger: where the seconds went.
        ceiling: how near it is to what it could be; None before the first updates.
        not_measurable: what could not be looked at on this machine, and so is in no cause.
        hangs: collectives that ranks waited in when the last attempt failed or stalled, and who was missing, in words.
    """

    causes: tuple[Cause, ...]
    ledger: Ledger
    ceiling: Ceiling | None
    not_measurable: tuple[str, ...]
    hangs: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return plain dictionaries, lists and numbers, ready for JSON."""
        ledger, ceiling = self.ledger, self.ceiling
        overall, steady = ledger.images_per_second, ledger.steady_images_per_second
        return {
            "ledger": {**asdict(ledger), "images_per_second": overall, "steady_images_per_second": steady},
            "causes": [asdict(cause) | {"evidence": list(cause.evidence)} for cause in self.causes],
            "ceiling": ceiling and asdict(ceiling) | {"most": ceiling.most, "near": ceiling.near},
            "not_measurable": list(self.not_measurable),
        } | ({"hangs": list(self.hangs)} if self.hangs else {})

    def __str__(self) -> str:
        """Describe the verdict in a few lines: the dominant cause, what to change, and the next two causes."""
        first, *more = self.causes
        lines = [first.sentence]
        if first.change:
            lines.append(f"change: {first.advice}")
        return "\n".join([*lines, *(f"then: {cause.sentence}" for cause in more[:2])])


def diagnose(run: Evidence | Run | str | Path) -> Diagnosis:
    """Find what holds a run back; the run may still be going on. Raises RunError: nothing was started in it yet."""
    hangs: tuple[str, ...] = ()
    if isinstance(run, Evidence):
        evidence = run
    else:
        run = Run.open(run)
        evidence = read_history(run).evidence()
        hangs = () if run.progress().finished else tuple(read_hangs(run.directory))
    causes = order(find_causes(evidence))
    limits = ceiling(evidence, causes)
    if not any(cause.share >= LEAST and not cause.is_usual for cause in causes):
        causes = (_nothing(evidence, limits), *causes)
    if (stretches := slower_stretch(evidence)) is not None:  # no cause, but to be seen
        fast, slow = (duration(sum(part.seconds.values())) for part in stretches)
        figure = (
            f"updates take {slow} instead of {fast} up to step {stretches[1].step:,}, evenly in all their parts: the"
            " processor was slower (its clock, or other guests of this host)"
        )
        causes = (replace(causes[0], evidence=(*causes[0].evidence, figure)), *causes[1:])
    missing = tuple(_not_measurable(evidence))
    return Diagnosis(causes=causes, ledger=evidence.ledger, ceiling=limits, not_measurable=missing, hangs=hangs)


def order(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Sort causes by cost, each after what explains it; unexplained time first, what every run has last.

    Unexplained time comes by its share where another cause takes more than twice as much.
    """
    causes = tuple(causes)
    most = max((cause.share for cause in causes if not cause.is_usual), default=0.0)

    def rank(cause: Cause) -> tuple[bool, bool, float]:
        is_first = cause.name == "unexplained" and cause.share >= (1 - EXPLAINED) / EXPLAINED * most
        return cause.is_usual, not is_first, -cause.share

    followers = {name: others for rule in rules() for name, others in rule.explains.items()}

    def explains(root: Cause, cause: Cause) -> bool:
        return cause.name in followers.get(root.name, ()) and root.share >= ROOT * cause.share

    ranked = sorted(causes, key=lambda cause: (rank(cause), cause.name))
    ordered, explained = list[Cause](), list[Cause]()
    for cause in ranked:  # a root follows from nothing itself; the costliest of several counts
        roots = (root for root in ranked if explains(root, cause) and not any(explains(o, root) for o in ranked))
        root = next(roots, None)
        if root is None:
            ordered.append(cause)
        else:
            explained.append(replace(cause, because=root.name))
    for cause in explained:
        place = [other.name for other in ordered].index(cause.because) + 1
        behind = (at for at in range(place, len(ordered)) if rank(ordered[at]) > rank(cause))
        ordered.insert(next(behind, len(ordered)), cause)
    return tuple(ordered)


def ceiling(evidence: Evidence, causes: Sequence[Cause] = ()) -> Ceiling | None:
    """Return how close a run is to its limits, measured by the probe or estimated from the run itself.

    Of an estimate, what updates do besides computing is left out, and what ``causes`` say that slowed them.
    """
    now, pace, measured = evidence.ledger.steady_images_per_second, mean_pace(evidence), evidence.newest(StepMeasured)
    probed, compute, feed, without = evidence.newest(Ceilings), 0.0, None, ""
    if probed is not None:
        compute, feed = probed.compute_images_per_second, probed.feed_images_per_second
        now = now or probed.both_images_per_second
    elif pace is None or pace.update <= 0:
        return None
    else:
        ledger = evidence.ledger
        computing, updating = ledger.share(*PASSES, "optimizer"), ledger.share(*STEADY) - ledger.share(*INPUT)
        slows = {name: what for rule in rules() for name, what in rule.slows.items()}
        slowed = max((c for c in causes if c.name in slows and c.share >= LEAST), key=_share, default=None)
        computing = computing or updating  # where nothing timed the parts of an update
        left = computing
        if slowed is not None:
            left, without = max(computing - slowed.share, (1 - MOST_SLOWED) * computing), slowed.name
        part = left / updating if computing > 0 and updating > 0 else 1.0
        compute = pace.batch_size / (pace.update * part)
        if pace.busy > 0 and slows.get(without) != "all":
            feed = pace.batch_size * pace.threads / pace.busy
    mfu = None
    if measured is not None and measured.forward_flops and measured.peak_flops:
        steady = evidence.ledger.steady_images_per_second
        mfu = clip(3 * measured.forward_flops * steady / measured.peak_flops)
    limit: Literal["compute", "feed"] = "feed" if feed is not None and feed < compute else "compute"
    return Ceiling(
        images_per_second=now,
        compute=compute,
        feed=feed,
        limit=limit,
        probed=probed is not None,
        without=without,
        mfu=mfu,
    )


def _share(cause: Cause) -> float:
    return cause.share


def _nothing(evidence: Evidence, limits: Ceiling | None) -> Cause:
    ledger = evidence.ledger
    if limits is None:
        probe = evidence.newest(ProbeProgress)
        words = f"No bottleneck found: {probe.words}." if probe else "No update was made, so there is no verdict."
        return Cause(name="nothing", share=0.0, sentence=words)
    limit = "computing alone" if limits.limit == "compute" else "the data loader alone"
    finding = "No bottleneck found" if limits.near >= NEAR else "Nothing that was measured holds it back"
    finding += "" if evidence.machine is not None else " in the log" if limits.near >= NEAR else ", by the log"
    sentence = (
        f"{finding}: {number(limits.images_per_second)} images/s in the steady state,"
        f" {'' if limits.near >= NEAR else 'only '}{percent(limits.near)} of what {limit} would reach."
    )
    how = "measured" if limits.probed else "estimated from the run"
    figures = [f"{number(ledger.images_per_second)} images/s overall, in {ledger.wall_seconds:,.1f} s"]
    for name, rate in (("computing", limits.compute), ("the data loader", limits.feed)):
        if rate is not None:
            figures.append(f"{name} alone: {number(rate)} images/s ({how})")
    if limits.mfu is not None:
        figures.append(f"the updates use {percent(limits.mfu)} of what the device can compute (MFU)")
    return Cause(name="nothing", share=0.0, sentence=sentence, evidence=tuple(figures))


def _not_measurable(evidence: Evidence) -> Iterator[str]:
    def called(name: str) -> str:
        return NAMES.get(name, name.replace("_", " ").replace(".", " "))

    if evidence.unreadable:
        yield f"{count(evidence.unreadable, 'line')} of the event log: damaged, and left out"
    machine = evidence.machine
    if machine is None:
        yield "the machine: the run recorded no samples of it"
    else:
        yield from (f"{called(name)}: this system does not report it" for name in machine.missing)
    if evidence.feed is None:
        yield "the data loader's stages: no figures from it yet"
    if evidence.newest(StepMeasured) is None and evidence.started.steps:
        yield "the parts of a step: this run measured no passes"
    if evidence.on_cpu:
        yield "GPU kernels, clock, memory and copies: this run used no GPU"
    elif not evidence.devices:
        yield "the GPU's use, clock, power, memory and other processes: no samples of them (steady doctor)"
    for device in evidence.devices:
        for name in device.missing:
            if name == "processes":
                what = "which processes on it are others': the driver does not list this run's, as in a container"
                yield f"GPU {device.index}: {what}"
            else:
                yield f"GPU {device.index}: {called(name)}: its driver does not report it"
    if len(evidence.ranks) < 2:
        yield "communication and late ranks: this run has a single process"
