"""The verdict: what a run's time goes into without need, what to change, and what that saves.

The causes of :mod:`steadytrain.monitor.rules` are asked one by one and put in order: what costs more before what costs
less, what follows from another cause behind it, and last what every run has.

>>> from steadytrain.monitor.rules import Cause
>>> told = order([Cause(name="decode", share=0.4, sentence="", change="steady pack"),
...               Cause(name="affinity", share=0.3, sentence="", change="taskset"),
...               Cause(name="startup", share=0.5, sentence="", is_usual=True)])
>>> [(cause.name, cause.because) for cause in told]
[('affinity', ''), ('decode', 'affinity'), ('startup', '')]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.ledger import Ledger
from steadytrain.monitor.reading import evidence as evidence_of
from steadytrain.monitor.rules import RULES, Cause
from steadytrain.monitor.rules.cause import LEAST, percent, within
from steadytrain.monitor.rules.stretches import on_cpu, whole
from steadytrain.run import Run

_FEED = ("threads", "decode", "augment", "gather", "waiting", "epoch_gap")
_UPDATE = ("launch", "batch_size", "optimizer", "allocator")
EXPLAINS: dict[str, tuple[str, ...]] = {
    "affinity": (*_FEED, *_UPDATE, "noisy_neighbour", "evaluation", "straggler"),
    "quota": (*_FEED, *_UPDATE, "noisy_neighbour", "evaluation", "straggler"),
    "noisy_neighbour": (*_FEED, *_UPDATE, "evaluation"),
    "oversubscription": (*_FEED, *_UPDATE, "evaluation"),
    "memory": (*_FEED, *_UPDATE, "storage", "allocator", "evaluation"),
    "batch_size": ("launch", "optimizer", "logging"),
    "model_waits": ("launch", "batch_size", "sync"),
    "device_throttled": ("precision",),
    "storage": ("epoch_gap", "waiting"),
    "straggler": ("communication",),
}
"""A cause, and those that may be no more than what it does to the rest."""

ROOT = 0.5
"""A cause explains another one where it costs at least this part of what that one costs."""


@dataclass(frozen=True, kw_only=True)
class Ceiling:
    """How fast a run is, and how fast it could be.

    Args:
        images_per_second: in the steady state, now.
        compute: the updates alone would do, on batches that are there; None where it is not known.
        feed: the feed alone would make; None where it is not known.
        limit: what is slower of the two, ``compute`` or ``feed``.
        probed: whether the two were measured alone, or follow from what the run itself tells.
        mfu: model FLOPs utilisation: three forward passes for each image, over what the device can do; None where
            neither was measured.
    """

    images_per_second: float
    compute: float | None
    feed: float | None
    limit: Literal["compute", "feed"]
    probed: bool
    mfu: float | None = None

    @property
    def most(self) -> float:
        """Images per second that the slower of the two allows."""
        return min(one for one in (self.compute, self.feed, float("inf")) if one)

    @property
    def near(self) -> float:
        """How much of that the run reaches, 0 to 1."""
        return within(self.images_per_second / self.most)


@dataclass(frozen=True, kw_only=True)
class Diagnosis:
    """What was found out about a run.

    Args:
        causes: the dominant one first; ``nothing`` stands there where there is none.
        ledger: where the seconds went.
        ceiling: how near it is to what it could be; None before the first updates.
        not_measurable: what could not be looked at on this machine, and so is in no cause.
    """

    causes: tuple[Cause, ...]
    ledger: Ledger
    ceiling: Ceiling | None
    not_measurable: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain dictionaries, lists and numbers, ready for JSON."""
        ledger, ceiling = self.ledger, self.ceiling
        overall, steady = ledger.images_per_second, ledger.steady_images_per_second
        return {
            "ledger": {**asdict(ledger), "images_per_second": overall, "steady_images_per_second": steady},
            "causes": [asdict(cause) | {"evidence": list(cause.evidence)} for cause in self.causes],
            "ceiling": ceiling and asdict(ceiling) | {"most": ceiling.most, "near": ceiling.near},
            "not_measurable": list(self.not_measurable),
        }

    def __str__(self) -> str:
        """The verdict in a few lines."""
        first, *more = self.causes
        lines = [first.sentence]
        if first.change:
            lines.append(f"Change: {first.change} (saves {percent(first.saves)} of the time)")
        lines += [f"Then: {cause.sentence}" for cause in more[:2]]
        return "\n".join(lines)


def diagnose(told: Evidence | Run) -> Diagnosis:
    """Say what holds a run back, also while it goes on.

    Args:
        told: a run, or what is known of it.

    Raises:
        RunError: nothing was started in it yet.
    """
    evidence = evidence_of(told) if isinstance(told, Run) else told
    found = [cause for rule in RULES if (cause := rule(evidence)) is not None]
    standing = ceiling(evidence)
    causes = order(found)
    if not any(cause.share >= LEAST and not cause.is_usual for cause in causes):
        causes = (_nothing(evidence, standing), *causes)
    return Diagnosis(
        causes=causes,
        ledger=evidence.ledger,
        ceiling=standing,
        not_measurable=tuple(_not_measurable(evidence)),
    )


def order(causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """The same causes by what they cost, each behind what explains it, and last what every run has."""
    left = sorted(causes, key=lambda cause: (_rank(cause), cause.name))
    told: list[Cause] = []
    for cause in left:
        root = _root(cause, left)
        told.append(replace(cause, because=root.name) if root else cause)
    roots = [cause for cause in told if not cause.because]
    behind = [cause for cause in told if cause.because]
    for cause in behind:
        names = [one.name for one in roots]
        place = names.index(cause.because) + 1
        costly = next((at for at in range(place, len(roots)) if _rank(roots[at]) > _rank(cause)), len(roots))
        roots.insert(costly, cause)
    return tuple(roots)


def _rank(cause: Cause) -> tuple[bool, float]:
    return cause.is_usual, -cause.share


def _root(cause: Cause, others: Iterable[Cause]) -> Cause | None:
    """What a cause follows from, that follows from nothing itself; the costliest of several."""
    return next((one for one in others if _explains(one, cause) and not any(_explains(o, one) for o in others)), None)


def _explains(one: Cause, other: Cause) -> bool:
    return other.name in EXPLAINS.get(one.name, ()) and one.share >= ROOT * other.share


def ceiling(evidence: Evidence) -> Ceiling | None:
    """How near a run is to what it could do, measured by the probe or reckoned from the run itself."""
    now, pace = evidence.ledger.steady_images_per_second, whole(evidence)
    if evidence.ceilings is not None:
        compute, feed = evidence.ceilings.compute_images_per_second, evidence.ceilings.feed_images_per_second
        return Ceiling(
            images_per_second=now or evidence.ceilings.both_images_per_second,
            compute=compute,
            feed=feed,
            limit="compute" if compute <= feed else "feed",
            probed=True,
            mfu=_utilisation(evidence),
        )
    if pace is None or pace.update <= 0:
        return None
    compute = pace.batch_size / pace.update
    feed_alone = pace.batch_size * pace.threads / pace.busy if pace.busy > 0 else None
    limit: Literal["compute", "feed"] = "feed" if feed_alone is not None and feed_alone < compute else "compute"
    return Ceiling(
        images_per_second=now, compute=compute, feed=feed_alone, limit=limit, probed=False, mfu=_utilisation(evidence)
    )


def _utilisation(evidence: Evidence) -> float | None:
    measured = evidence.measured
    if measured is None or not measured.forward_flops or not measured.peak_flops:
        return None
    return within(3 * measured.forward_flops * evidence.ledger.steady_images_per_second / measured.peak_flops)


def _nothing(evidence: Evidence, standing: Ceiling | None) -> Cause:
    ledger = evidence.ledger
    if standing is None:
        return Cause(name="nothing", share=0.0, sentence="Nothing was trained yet: there is nothing to judge.")
    limit = "computing alone" if standing.limit == "compute" else "the feed alone"
    what = "Nothing" if evidence.machine is not None else "Nothing that it wrote down"
    sentence = (
        f"{what} holds it back: {standing.images_per_second:,.0f} images/s in the steady state,"
        f" {percent(standing.near)} of what {limit} would reach."
    )
    told = [f"{ledger.images_per_second:,.0f} images/s overall, in {ledger.wall_seconds:,.1f} s"]
    told += [
        f"{name} alone: {rate:,.0f} images/s ({'measured' if standing.probed else 'reckoned from the run'})"
        for name, rate in (("computing", standing.compute), ("the feed", standing.feed))
        if rate is not None
    ]
    if standing.mfu is not None:
        told.append(f"the updates use {percent(standing.mfu)} of what the device can compute (MFU)")
    return Cause(name="nothing", share=0.0, sentence=sentence, evidence=tuple(told))


NAMES = {
    "pressure.cpu": "pressure on the processors",
    "pressure.memory": "pressure on memory",
    "pressure.io": "pressure on the disks",
    "throttled_seconds": "a control group's quota",
    "steal": "what other guests of the host take",
    "disk_read_bytes": "bytes read from disks",
    "disk_busy": "how busy the disks are",
    "system_share": "processor time of the kernel",
    "sm_active": "multiprocessors active",
    "tensor_active": "tensor cores active",
}


def _not_measurable(evidence: Evidence) -> Iterator[str]:
    """What could not be looked at, in words."""
    machine = evidence.machine
    if machine is None:
        yield "the machine: nothing was sampled beside the run"
    else:
        yield from (f"{_called(name)}: this system does not tell" for name in machine.missing)
    if evidence.feed is None:
        yield "the feed's stages: it told nothing of itself yet"
    if evidence.measured is None:
        yield "what a step is made of: no passes were measured beside this run"
    if on_cpu(evidence):
        yield "a GPU's kernels, clock, memory and copies: this run had none"
    elif not evidence.devices:
        yield "the GPU: its driver tells nothing"
    for device in evidence.devices:
        yield from (f"GPU {device.index}: {_called(name)}: its driver does not tell" for name in device.missing)
    if len(evidence.ranks) < 2:
        yield "communication and late ranks: there is one process"


def _called(name: str) -> str:
    return NAMES.get(name, name.replace("_", " ").replace(".", " "))
