"""Evidence as a run would leave it, made up: a sound run of 1,000 updates, and whatever a test changes in it."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from steadytrain.config import Budget, Data, Every, Model, Optim, Precision, Recipe
from steadytrain.events import (
    Ceilings,
    Compiled,
    DeviceStats,
    FeedStats,
    MachineStats,
    Started,
    StepMeasured,
    ThreadStats,
)
from steadytrain.monitor import Cause, Evidence, Ledger
from steadytrain.monitor.evidence import RankShares, Stretch
from steadytrain.monitor.ledger import BUCKETS, empty
from steadytrain.monitor.rules import find_causes
from steadytrain.monitor.samples import UpdateTimes

UPDATES, BATCH, NUM_TRAIN = 1000, 128, 50_000
IMAGES = UPDATES * BATCH
MEASURED = {"measured": StepMeasured, "ceilings": Ceilings, "compiled": Compiled, "threads": ThreadStats}


def ledger(**seconds: float) -> Ledger:
    """100 s or so: forward and backward 60 s, optimizer 5 s, unless told otherwise; they add up by definition."""
    held = empty() | {"forward": 20.0, "backward": 40.0, "optimizer": 5.0} | seconds
    assert held.keys() == set(BUCKETS)
    return Ledger(wall_seconds=sum(held.values()), away_seconds=0.0, seconds=held, steps=UPDATES, images=IMAGES)


def recipe(**changes: Any) -> Recipe:
    """A usual one; ``optim__lr=0.2`` and the like change it."""
    recipe = Recipe(
        data=Data(train="photos.rec"),
        model=Model("resnet20"),
        optim=Optim(),
        precision=Precision(),
        budget=Budget(steps=UPDATES),
        every=Every(),
        batch_size=BATCH,
    )
    return recipe.with_({key.replace("__", "."): value for key, value in changes.items()})


def started(
    *,
    num_train: int = NUM_TRAIN,
    size: int = 224,
    startup: dict[str, float] | None = None,
    startup_waits: dict[str, float] | None = None,
    startup_disk_bytes: int | None = None,
    **machine: Any,
) -> Started:
    """On a CPU of two cores."""
    return Started(
        digest="0123456789ab",
        step=0,
        steps=UPDATES,
        steps_per_epoch=num_train / BATCH,
        batch_size=BATCH,
        data={"train": "photos.rec", "num_train": num_train, "num_val": 5000},
        model={"name": "resnet20", "parameters": 272_474, "trainable": 272_474, "size": size},
        machine={"device": "cpu", "cores": 2, "compute_threads": 2, "feed_threads": 1, "precision": "fp32"} | machine,
        startup=startup or {},
        startup_waits=startup_waits or {},
        startup_disk_bytes=startup_disk_bytes,
    )


def feed(
    *,
    seconds: float = 100.0,
    threads: int = 1,
    bytes_each: int = 20_000,
    asleep: float = 0.0,
    images: int = IMAGES,
    **busy: float,
) -> FeedStats:
    """What the threads did in ``seconds``: ``decode=40.0`` and so on, the rest blocked; ``asleep``: a share of busy."""
    stages = {name: busy.get(name, 0.0) for name in ("read", "decode", "augment", "batch")}
    total = sum(stages.values())
    return FeedStats(
        step=UPDATES,
        images=images,
        bytes=images * bytes_each,
        read_seconds=stages["read"],
        decode_seconds=stages["decode"],
        augment_seconds=stages["augment"],
        batch_seconds=stages["batch"],
        blocked_seconds=max(0.0, threads * seconds - total),
        cpu_seconds=total * (1 - asleep),
        threads=threads,
        asked=UPDATES,
        starved=UPDATES // 2,
    )


def machine(**changes: Any) -> MachineStats:
    """Two cores, of which the run uses one and a half."""
    usual: dict[str, Any] = {"seconds": 100.0, "cores": 2, "machine_cores": 2, "cpu": 1.5, "others": 0.0, "idle": 0.5}
    usual |= {"iowait": 0.0, "steal": 0.0, "throttled_seconds": 0.0, "involuntary_switches": 50.0}
    usual |= {"system_share": 0.03, "minor_faults": 500.0, "major_faults": 0.0, "disk_read_bytes": 0.0}
    usual |= {"memory_bytes": 10**9, "memory_limit_bytes": 16 * 10**9, "available_bytes": 12 * 10**9}
    usual |= {"pressure": {"cpu": 0.01, "io": 0.0, "memory": 0.0}, "swap_bytes": 0.0}
    return MachineStats(**usual | changes)


def gpu(**changes: Any) -> DeviceStats:
    """A GPU at work."""
    usual: dict[str, Any] = {"seconds": 100.0, "index": 0, "name": "H100", "utilisation": 0.95}
    return DeviceStats(**usual | {"memory_bytes": 10**10, "memory_total_bytes": 8 * 10**10} | changes)


def measured(*, full: float = 0.06, fixed: float = 0.002, batch_size: int = BATCH, **more: Any) -> StepMeasured:
    """Passes of a step."""
    passes = {"full": full, "other": (full - fixed) / 4 + fixed} | more.pop("passes", {})
    return StepMeasured(
        step=100, batch_size=batch_size, other_batch_size=batch_size // 4, passes=passes, fixed_seconds=fixed, **more
    )


def threads(
    *places: tuple[str, str, str, float],
    ran: float = 55.0,
    queued: float = 0.0,
    seconds: float = 65.0,
    compute: tuple[float, float] = (50.0, 0.0),
    loop: dict[str, dict[str, float]] | None = None,
    **changes: Any,
) -> ThreadStats:
    """Looks at the training thread of :func:`evidence`: bucket, what, place, seconds; the rest of 65 s computes."""
    rest = seconds - sum(spent for *_, spent in places)
    seen = [*places, ("backward", "computes", "", max(0.0, rest))]
    usual: dict[str, Any] = {"step": UPDATES, "seconds": 100.0, "looks": 1000, "cost_seconds": 0.1, "lock_seconds": 0.1}
    spent_in: dict[str, Any] = {"backward": {"seconds": seconds, "ran": ran, "queued": queued}}
    return ThreadStats(
        **usual | changes,
        loop=spent_in | (loop or {}),
        places=tuple({"bucket": b, "what": w, "place": p, "seconds": s} for b, w, p, s in seen),
        compute={"ran": compute[0], "queued": compute[1]},
    )


def evidence(**changes: Any) -> Evidence:
    """A sound run, with some of it changed: a field, one of the steady part's, or a newest event."""
    usual = Evidence(
        ledger=ledger(),
        started=started(),
        recipe=recipe(),
        position=IMAGES,
        steady=Stretch(feed=feed(decode=20.0), machine=machine()),
        updates=times(),
    )
    return changed(usual, **changes)


def changed(facts: Evidence, **changes: Any) -> Evidence:
    """The same facts but for these; see :func:`evidence`."""
    steady = {name: changes.pop(name) for name in ("shares", "feed", "machine") if name in changes}
    known = {field.name: changes.pop(field.name) for field in fields(Evidence) if field.name in changes}
    events: dict[Any, Any] = {**facts.events, **{MEASURED[name]: event for name, event in changes.items()}}
    usual: dict[str, Any] = {
        "steady": replace(facts.steady, **steady),
        "events": {kind: event for kind, event in events.items() if event},
    }
    return replace(facts, **usual | known)


def times(**changes: Any) -> UpdateTimes:
    """How long updates take."""
    return replace(UpdateTimes(seconds=(0.06, 0.065, 0.07)), **changes)


def rank(exchanging: float | None = None, images: int = 0, **by_bucket: float) -> RankShares:
    """A rank that spends its time as told, the rest in forward passes."""
    rest = {"forward": 1 - sum(by_bucket.values())}
    return RankShares(by_bucket=rest | by_bucket, exchanging=exchanging, images=images)


def on_gpu(**changes: Any) -> Evidence:
    """The same on a GPU."""
    return evidence(**{"started": started(device="H100"), "devices": (gpu(),)} | changes)


def find(name: str, evidence: Evidence) -> Cause | None:
    """The cause of this name, if the evidence shows it."""
    return next((cause for cause in find_causes(evidence) if cause.name == name), None)
