"""A watched run at one moment, in figures: what the terminal shows, what ``--json`` prints, what the page says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steadytrain.config.plain import plain
from steadytrain.events import DeviceStats, MachineStats, Stalled
from steadytrain.monitor.diagnose import Diagnosis
from steadytrain.monitor.ledger import Ledger
from steadytrain.reports import points
from steadytrain.reports.figures import Score
from steadytrain.reports.history import History
from steadytrain.reports.liveness import Signs
from steadytrain.reports.tables import finite
from steadytrain.reports.watched import Watched


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Images per second: of the last seconds, in the steady state, and overall (of all wall time)."""

    now: float | None
    steady: float | None
    overall: float | None


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Money, in the unit of ``per_hour``; ``in_all``: when the run ends, None where that is not known."""

    per_hour: float
    so_far: float
    in_all: float | None


@dataclass(frozen=True, kw_only=True)
class Feed:
    """What the feed did lately: batches ready when one was asked for, of how many, and the share that found none."""

    ready: float
    depth: float
    starved: float


@dataclass(frozen=True, kw_only=True)
class Now:
    """One moment of a run. Durations in seconds, accuracies as fractions, None where nothing was told (yet).

    ``moment``: when, seconds since 1970. ``seconds``: of the run's own wall time; ``remaining_seconds``: with the
    evaluations and checkpoints to come. ``stalled``: while nothing moves. ``notice``: the newest warning.
    """

    moment: float
    name: str
    directory: str
    model: str
    signs: Signs
    step: int = 0
    steps: int = 0
    epoch: float = 0.0
    epochs: float = 0.0
    attempts: int = 0
    batch_size: int | None = None
    train_loss: float | None = None
    train_top1: float | None = None
    lr: float | None = None
    best: Score | None = None
    last: Score | None = None
    images_per_second: Rates = Rates(now=None, steady=None, overall=None)
    seconds: float = 0.0
    remaining_seconds: float | None = None
    cost: Cost | None = None
    ledger: Ledger | None = None
    feed: Feed | None = None
    machine: MachineStats | None = None
    devices: tuple[DeviceStats, ...] = ()
    host: Mapping[str, Any] | None = None
    diagnosis: Diagnosis | None = None
    stalled: Stalled | None = None
    notice: str = ""


def now(watched: Watched, *, price: float | None = None) -> Now:
    """The run at this moment.

    Args:
        watched: with what was read of it.
        price: of an hour of the machine, in any money; None: nothing is said of cost.
    """
    told, signs, seconds = watched.told, watched.signs, watched.seconds
    left = watched.remaining
    begun = _begun(watched) if told.history.attempts else {}
    return Now(
        moment=time.time(),
        name=watched.run.name,
        directory=str(watched.run.directory),
        signs=signs,
        seconds=seconds,
        remaining_seconds=left,
        cost=None if price is None else _cost(price, seconds, left),
        **({"model": watched.run.recipe.model.name} | begun),
    )


def to_dict(told: Now) -> dict[str, Any]:
    """As JSON has it: the fields, and instead of ``diagnosis`` its ``causes``, ``ceiling`` and ``not_measurable``."""
    given = plain(told)
    if told.diagnosis:
        given |= told.diagnosis.to_dict()
    del given["diagnosis"]
    return {"format": "steadytrain-watch", "version": 1, **finite(given)}


def _begun(watched: Watched) -> dict[str, Any]:
    told = watched.told
    history, started = told.history, told.history.started
    ledger = told.book.ledger()
    logged = history.logged[-1] if history.logged else None
    return {
        "model": str(started.model.get("name") or watched.run.recipe.model.name),
        "step": history.step,
        "steps": started.steps,
        "epoch": history.epoch(history.step),
        "epochs": history.epoch(started.steps),
        "attempts": len(history.attempts),
        "batch_size": started.batch_size,
        "train_loss": logged.loss if logged else None,
        "train_top1": logged.top1 if logged else None,
        "lr": logged.lr if logged else None,
        **_scores(history),
        "images_per_second": Rates(
            now=watched.images_per_second if watched.signs.status == "running" else None,
            steady=ledger.steady_images_per_second or None,
            overall=ledger.images_per_second or None,
        ),
        "ledger": ledger,
        "feed": _feed(watched),
        "machine": told.machine,
        "devices": tuple(told.devices[index] for index in sorted(told.devices)),
        "host": started.machine,
        "diagnosis": watched.diagnosis,
        "stalled": told.stalled,
        "notice": told.noticed.message if told.noticed else "",
    }


def _scores(history: History) -> dict[str, Score | None]:
    scores = [Score.of(event) for event in history.evaluated]
    sound = [score for score in scores if score.top1 == score.top1]
    return {"best": max(sound, key=lambda one: one.top1, default=None), "last": scores[-1] if scores else None}


def _feed(watched: Watched) -> Feed | None:
    point = watched.told.newest.get("feed")
    if point is None:
        return None
    told = dict(zip(points.FEED, point.row, strict=True))
    return Feed(ready=told["ready"] or 0.0, depth=told["depth"] or 0, starved=told["starved"] or 0.0)


def _cost(price: float, seconds: float, left: float | None) -> Cost:
    in_all = None if left is None else price * (seconds + left) / 3600
    return Cost(per_hour=price, so_far=price * seconds / 3600, in_all=in_all)
