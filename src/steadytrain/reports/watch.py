"""Follow a run: its events as they come, and its figures at one moment. It only reads.

>>> import tempfile
>>> from steadytrain.config import Budget, Data, Model, Recipe
>>> recipe = Recipe(data=Data(train="a.rec"), model=Model("mlp"), budget=Budget(epochs=1))
>>> watch = Watch(Run.create(tempfile.mkdtemp() + "/a", recipe))
>>> watch.read(), watch.signs.status
(False, 'waiting')
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from steadytrain.config.plain import finite, plain
from steadytrain.cost.bill import Bill
from steadytrain.cost.prices import Price
from steadytrain.errors import InputError
from steadytrain.events import DeviceStats, Logged, MachineStats, ProbeProgress, Stalled, Started
from steadytrain.format import duration, epoch, percent, size, time_of_day
from steadytrain.monitor import Diagnosis, Ledger, RunHistory, diagnose
from steadytrain.monitor.history import RunReach, RunScore, UnseenScore
from steadytrain.monitor.history_reader import LogHistory
from steadytrain.monitor.series import six_digits
from steadytrain.reports.status import Signs, current_bill, signs, time_left
from steadytrain.reports.time_spent import BUCKETS_SHOWN
from steadytrain.run import Run

NOW_SECONDS = 10.0
KEPT_BACK = ("run", "started", "logged", "progress", "diagnosis")
"""Fields of a snapshot of which JSON has the figures, and not the whole."""


class Watch:
    """Follow a run's event logs, and hold what is shown of it.

    ``run``: it may go on, be over, or not have begun.

    Attributes:
        history: what its events add up to; its ``points`` are those of the live charts.
        generation: counts up where the points before no longer hold: the log was replaced, a restart took steps back,
            or there were too many.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._logs = {0: LogHistory(run)}
        self._before = 0  # generations of histories that are gone
        self._history = self.history
        self._verdict: tuple[tuple[int, int], Diagnosis] | None = None

    @property
    def history(self) -> RunHistory:
        """The run's history, as far as it was read."""
        return self._logs[0].history

    @property
    def generation(self) -> int:
        """The number of times that all points were replaced."""
        if self._history is not self.history:
            self._before += self._history.redrawn + 1
            self._history = self.history
        return self._before + self.history.redrawn

    def read(self) -> bool:
        """Read the new events; return whether there were any."""
        return sum(1 for _ in self.read_in_parts()) > 0

    def read_in_parts(self) -> Iterator[float]:
        """Read the new events in parts and yield the share of the log read after each: a long run takes seconds."""
        for rank in self.run.ranks():
            yield from self._logs.setdefault(rank, LogHistory(self.run, rank)).read_in_parts()
        self.history.join([log.history for rank, log in self._logs.items() if rank])

    @property
    def signs(self) -> Signs:
        """The run's signs of life, now."""
        return signs(self.run, self.history, time.time())

    @property
    def images_per_second(self) -> float | None:
        """The speed over the last seconds of updates, by the clock; None where there were none."""
        recent = self.history.recent
        if len(recent) < 2:
            return None
        last = recent[-1]
        first = next(step for step in recent if step.time >= last.time - NOW_SECONDS and step.attempt == last.attempt)
        spent = last.time - first.time
        return (last.position - first.position) / spent if spent > 0 else None

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The verdict on what is known, made again when there are new facts; None before the run began."""
        if self.history.started is None:
            return None
        facts = (self.generation, self.history.num_facts)
        if self._verdict is None or self._verdict[0] != facts:
            self._verdict = (facts, diagnose(self.history.evidence()))
        return self._verdict[1]


@dataclass(frozen=True, kw_only=True)
class WatchRates:
    """Images per second: of the last seconds, in the steady state, and overall (of all wall time)."""

    now: float | None = None
    steady: float | None = None
    overall: float | None = None


@dataclass(frozen=True, kw_only=True)
class FeedQueue:
    """The feed's recent state: batches ready when one was asked for, of how many, and the share that found none."""

    ready: float
    depth: float
    starved: float


@dataclass(frozen=True, kw_only=True)
class RunSnapshot:
    """One moment of a run. Durations in seconds, accuracies as fractions, None where nothing was recorded (yet).

    ``moment``: when, seconds since 1970. ``seconds``: of the run's own wall time; ``remaining_seconds``: with the
    evaluations and checkpoints to come. ``logged``, ``machine``, ``devices``, ``probe``: the newest of their kind.
    ``stalled``: while nothing moves. ``notice``: the newest warning.
    """

    moment: float
    run: Run
    signs: Signs
    started: Started | None = None
    logged: Logged | None = None
    attempts: int = 0
    progress: RunReach = field(default_factory=RunReach)
    probe: ProbeProgress | None = None
    best: RunScore | None = None
    last: RunScore | None = None
    test: UnseenScore | None = None
    images_per_second: WatchRates = WatchRates()
    seconds: float = 0.0
    remaining_seconds: float | None = None
    cost: Bill | None = None
    ledger: Ledger | None = None
    feed: FeedQueue | None = None
    machine: MachineStats | None = None
    devices: tuple[DeviceStats, ...] = ()
    diagnosis: Diagnosis | None = None
    stalled: Stalled | None = None
    notice: str = ""

    @property
    def model(self) -> str:
        """The network's name."""
        return str((self.started and self.started.model.get("name")) or self.run.recipe.model.name)

    @property
    def bar(self) -> tuple[float, str] | None:
        """The share that is done of a probe, until an update was made, or of the updates, and what that is in words."""
        progress, probe = self.progress, self.probe
        if probe is not None and not progress.step and (probe.fit_seconds is None or not progress.steps):
            return probe.bar if self.signs.status == "running" else (probe.bar[0], probe.words)
        words = f"epoch {progress.epoch:.2f} of {epoch(progress.epochs)}"
        return (progress.share, words) if progress.steps else None

    @property
    def is_multi_label(self) -> bool:
        """Return whether an image may have several labels."""
        return self.started is not None and self.started.is_multi_label

    @property
    def resources(self) -> dict[str, str]:
        """What the run uses, in words: ``batches ready``, ``cores``, ``memory``, and each GPU that is measured."""
        words, feed, machine = dict[str, str](), self.feed, self.machine
        if feed is not None:
            words["batches ready"] = f"{feed.ready:.1f} of {feed.depth:.0f}"
        if machine is not None and machine.cpu is not None:
            ranks = f", other ranks {machine.ranks:.1f}" if machine.ranks else ""
            others = "" if machine.others is None else f", others {machine.others:.1f}"
            words["cores"] = f"{machine.cpu:.1f} of {machine.cores}{ranks}{others}"
        if machine is not None and machine.memory_bytes is not None:
            limit = f" of {size(machine.memory_limit_bytes)}" if machine.memory_limit_bytes else ""
            words["memory"] = size(machine.memory_bytes) + limit
        for device in self.devices:
            parts = [] if device.utilisation is None else [f"{percent(device.utilisation, 0)} busy"]
            parts += [] if device.memory_bytes is None else [size(device.memory_bytes)]
            parts += [] if device.power_watts is None else [f"{device.power_watts:.0f} W"]
            parts += [f"clock throttled: {', '.join(device.throttled)}"] if device.throttled else []
            words[f"GPU {device.index}"] = ", ".join(parts)
        return words

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON has it: instead of ``diagnosis`` its ``causes``, ``ceiling`` and ``not_measurable``."""
        started, logged = self.started, self.logged
        of_events = {
            "model": self.model,
            "batch_size": started.batch_size if started else None,
            "host": started.machine if started else None,
            "is_multi_label": self.is_multi_label,
            "train_loss": logged.loss if logged else None,
            "train_top1": logged.top1 if logged else None,
            "lr": logged.lr if logged else None,
            "cost": None if self.cost is None else self.cost.to_dict(),
        }
        shown = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in (*KEPT_BACK, *of_events)}
        names = {"name": self.run.name, "directory": str(self.run.directory)}
        document = plain({**names, **shown, **plain(self.progress), **of_events})
        if self.diagnosis:
            document |= self.diagnosis.to_dict()
        return {"format": "steadytrain-watch", "version": 1, **finite(document)}

    def alarms(self) -> Iterator[str]:
        """Yield alarms, a line each: no progress, no sign of life, a failure; often none."""
        seen, stalled = self.signs, self.stalled
        if stalled is not None and seen.status == "running":
            usual = f"usually {duration(stalled.expected_seconds)}"
            yield f"stalled: no progress of {stalled.what} for {duration(stalled.seconds)} ({usual}): {stalled.culprit}"
        if seen.silent:
            who = f"process {seen.process} is alive" if seen.process else f"it is running on {seen.host}"
            ago = duration(self.moment - seen.last)
            yield f"no events since {time_of_day(seen.last)} ({ago} ago): {who}"
        if seen.status in ("failed", "interrupted"):
            yield f"{seen.status}: {seen.why}"

    def label(self, bucket: str) -> str:
        """Return the name of a bucket of the ledger; of a run that goes on the newest seconds are pending."""
        label = BUCKETS_SHOWN[bucket].label
        return f"{label}, pending" if bucket == "other" and self.signs.status == "running" else label


def snapshot(watch: Watch, *, price: Price | None = None) -> RunSnapshot:
    """Return the run at this moment.

    ``price``: of an hour of each machine; None: what the run recorded, if anything.
    """
    run, history, seen, now = watch.run, watch.history, watch.signs, time.time()
    is_running = seen.status == "running"
    seconds, left = history.elapsed(now if is_running else None), time_left(history, seen, now)
    cost: Bill | None = None
    with suppress(InputError):  # a price that cannot be used
        cost = current_bill(run, history, seen, now, price=price)
    if history.started is None:
        return RunSnapshot(moment=now, run=run, signs=seen, seconds=seconds, cost=cost)
    ledger, best = history.ledger(), history.best
    newest = next((point.row for point in reversed(history.points) if point.series == "feed"), ())
    queue = [six_digits(value) or 0.0 for value in newest]
    return RunSnapshot(
        moment=now,
        run=run,
        signs=seen,
        started=history.started,
        logged=history.logged[-1] if history.logged else None,
        attempts=len(history.attempts),
        progress=history.progress,
        probe=history.newest(ProbeProgress),
        best=best if best is not None and best.value == best.value else None,
        last=history.last,
        test=history.test,
        images_per_second=WatchRates(
            now=watch.images_per_second if is_running else None,
            steady=ledger.steady_images_per_second or None,
            overall=ledger.images_per_second or None,
        ),
        seconds=seconds if is_running else ledger.wall_seconds,
        remaining_seconds=left,
        cost=cost,
        ledger=ledger,
        feed=FeedQueue(ready=queue[1], depth=queue[2], starved=queue[3]) if queue else None,
        machine=history.newest(MachineStats),
        devices=tuple(history.devices[index] for index in sorted(history.devices)),
        diagnosis=watch.diagnosis,
        stalled=history.stalled,
        notice=history.noticed[-1].message if history.noticed else "",
    )
