"""Summary of a run in figures: its scores, its rates, a row for each epoch."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from statistics import fmean, median
from typing import Any

from steadytrain.config.plain import leaves, plain
from steadytrain.config.timeline import Timeline
from steadytrain.cost.bill import Bill, parts_of
from steadytrain.errors import InputError
from steadytrain.events import EpochTrained, Logged, ProbeProgress, Started, Tried
from steadytrain.intervals import Spread, spread
from steadytrain.monitor import Interruption, Ledger, RunHistory, goodput, read_history
from steadytrain.monitor.history import RunReach, RunScore, UnseenScore
from steadytrain.monitor.lines import MOST_EPOCHS
from steadytrain.monitor.samples import FIRST, LATER, START
from steadytrain.reports.logs import ForeignRun
from steadytrain.reports.status import Status, current_bill, outcome, signs
from steadytrain.run import REPEAT, Run

MOST_EPOCHS_A_LINE = 1_000
"""A log line of more is damaged: it would take longer to split than to train."""


@dataclass(frozen=True, kw_only=True)
class RunSetup:
    """The recipe, data and machine of a run; None where a log does not tell.

    ``repeats_digest``: of the recipe without its ``seed``. ``size``: pixels of an image's side. ``data_set``: tells the
    images that were trained and evaluated on apart from others, by their digests where known. ``device``: the name of
    its ``devices``. ``class_ratio``: images of the largest class, to train or validate on, for one of the smallest;
    None below ten.
    """

    digest: str
    seed: int | None
    repeats_digest: str
    model: str
    size: int | None
    batch_size: int | None
    lr: float | None
    parameters: int | None
    num_train: int | None
    num_val: int | None
    num_classes: int | None
    data_set: str
    machine: Mapping[str, Any]
    device: str
    devices: int | None
    class_ratio: float | None = None

    @property
    def batch_per_device(self) -> float | None:
        return self.batch_size / self.devices if self.batch_size and self.devices else None


@dataclass(frozen=True, kw_only=True)
class RunCourse:
    """Status and history of a run.

    ``status`` with ``why``: for ``interrupted`` and ``failed`` what is known of the reason.
    ``restarts``: attempts after the first; ``repeated_steps``: updates done again after them.
    ``interruptions``: what each restart cost; ``goodput``: the share of the time, pauses included, that they did not.
    ``began``: seconds since 1970.
    """

    status: Status
    why: str
    attempts: int
    restarts: int
    repeated_steps: int
    checkpoints: int
    began: float | None
    notices: tuple[str, ...]
    interruptions: tuple[Interruption, ...] = ()
    goodput: float | None = None


@dataclass(frozen=True, kw_only=True)
class RunQuality:
    """Scores and losses of a run. Accuracies are fractions, None where nothing was recorded.

    ``best``: the evaluation whose weights were kept as the best; ``last``: the newest.
    ``is_multi_label``: an image may have several labels; then ``train_top1`` are the images with every label right.
    ``test``: the score on test images, which no choice has seen.
    ``train_loss``, ``train_top1``: of the newest epoch, as in its row; of the newest log line while an epoch goes on.
    ``not_finite``: log lines whose loss is no finite number.
    """

    best: RunScore | None
    last: RunScore | None
    train_loss: float | None
    train_top1: float | None
    not_finite: int
    is_multi_label: bool
    test: UnseenScore | None = None


def device_use(history: RunHistory) -> dict[str, float] | None:
    """Return how much of the time GPUs computed: the mean of updates, least and most since the first log line."""
    means = [gpu.utilisation for gpu in history.samples.gpus(LATER, FIRST, START) if gpu.utilisation is not None]
    first = next((n for n, point in enumerate(history.points) if point.series == "train"), 0)
    rows = [point.row for point in history.points[first:] if point.series.startswith("device-")]
    seen = [row[1] for row in rows if row[1] is not None] or means
    return {"mean": fmean(means), "least": min(seen), "most": max(seen)} if means else None


@dataclass(frozen=True, kw_only=True)
class RunSpeed:
    """Rates and durations of a run. Durations in seconds, None where nothing was recorded.

    ``seconds_per_epoch``, ``median_seconds_per_epoch``: of training steps alone.
    ``images_per_second``: in the steady state, by the ledger; of another program's log the median of its epochs' own
    lines, else of all its lines.
    ``images_per_second_overall``: images of the updates that count, repeated ones once, over ``seconds``.
    ``wait_share``: of the steps' seconds, spent waiting for images.
    ``seconds``: wall time of all attempts, pauses between them left out.
    """

    seconds_per_epoch: float | None
    images_per_second: float | None
    images_per_second_overall: float | None
    wait_share: float | None
    seconds: float
    median_seconds_per_epoch: float | None = None
    device_use: Mapping[str, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in figures.

    ``cost``: what was paid so far, where a price is known. ``log``: which program's log it was read from; empty for a
    run of ours. ``probe``: how far the classifier's fit to features has come, where the run began with one.
    ``tried``: what a run within so many minutes has tried.
    """

    name: str
    directory: str
    setup: RunSetup
    course: RunCourse
    progress: RunReach
    quality: RunQuality
    speed: RunSpeed
    cost: Bill | None = None
    log: str = ""
    probe: ProbeProgress | None = None
    tried: tuple[Tried, ...] = ()

    @property
    def tells_steps(self) -> bool:
        """Return whether it is known how many updates the run has: a log may not say."""
        return not self.log or self.progress.steps > 0

    def to_dict(self) -> dict[str, Any]:
        """Return all figures in one flat table, as JSON has it."""
        progress = self.progress
        return {
            "name": self.name,
            "directory": self.directory,
            **plain(self.setup),
            **plain(self.course),
            "steps_done": progress.step if self.tells_steps else None,
            "steps": progress.steps if self.tells_steps else None,
            "epochs_done": progress.epoch,
            "epochs": progress.epochs,
            **plain(self.quality),
            **plain(self.speed),
            "cost": None if self.cost is None else self.cost.to_dict(),
            "log": self.log,
            "probe": plain(self.probe),
            "tried": plain(self.tried),
        }


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Runs of one recipe on the same images that differ only in their seed; figures are of the finished ones.

    ``name``: the folder that holds them, where ``--repeats`` made it, else their own names. ``runs``: their names.
    ``best_mean_ap``, ``last_mean_ap``: where an image may have several labels; top-1 is then exact match.
    """

    name: str
    runs: tuple[str, ...]
    seeds: tuple[int, ...]
    finished: int
    best_top1: Spread | None
    last_top1: Spread | None
    last_loss: Spread | None
    seconds: Spread | None
    best_mean_ap: Spread | None = None
    last_mean_ap: Spread | None = None

    @property
    def title(self) -> str:
        """Describe the runs that the figures are of.

        >>> group = Repeats(name="a", runs=("a/seed-0", "a/seed-1"), seeds=(0, 1), finished=1, best_top1=None,
        ...                 last_top1=None, last_loss=None, seconds=None)
        >>> group.title
        'a: 1 of 2 seeds'
        """
        of = "" if self.finished == len(self.runs) else f"{self.finished} of "
        return f"{self.name}: {of}{len(self.runs)} seeds"


def find_repeats(runs: Sequence[Summary], *, same_devices: bool = False) -> list[Repeats]:
    """Return each group of two or more runs that differ only in their seed, in the order of their first runs.

    Of several with one seed, which say nothing of chance, the first that finished is in the group.
    """
    groups: dict[tuple[object, ...], list[Summary]] = {}
    for run in runs:
        machine = (run.setup.device, run.setup.devices) if same_devices else ()
        groups.setdefault((run.setup.repeats_digest, run.setup.data_set, *machine), []).append(run)
    by_seed: list[list[Summary]] = []
    for group in groups.values():
        chosen: dict[int | None, Summary] = {}
        for run in sorted(group, key=lambda run: run.course.status != "finished"):
            chosen.setdefault(run.setup.seed, run)
        by_seed.append([run for run in group if chosen[run.setup.seed] is run])
    return [_repeats(group) for group in by_seed if len(group) > 1]


def _repeats(group: Sequence[Summary]) -> Repeats:
    folders = [Path(run.directory).resolve() for run in group]
    is_own = len({folder.parent for folder in folders}) == 1 and all(f.name.startswith(REPEAT) for f in folders)
    parent = group[0].name.rpartition("/")[0] or folders[0].parent.name
    done = [run for run in group if run.course.status == "finished"]
    best = [score for run in done if (score := run.quality.best)]
    last = [score for run in done if (score := run.quality.last)]
    return Repeats(
        name=parent if is_own else ", ".join(run.name for run in group),
        runs=tuple(run.name for run in group),
        seeds=tuple(run.setup.seed for run in group if run.setup.seed is not None),
        finished=len(done),
        best_top1=spread((score.top1 for score in best), are_shares=True),
        last_top1=spread((score.top1 for score in last), are_shares=True),
        last_loss=spread(score.loss for score in last if score.loss is not None),
        seconds=spread(run.speed.seconds for run in done),
        best_mean_ap=spread((score.mean_ap for score in best if score.mean_ap is not None), are_shares=True),
        last_mean_ap=spread((score.mean_ap for score in last if score.mean_ap is not None), are_shares=True),
    )


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """One epoch: means over its training steps, the evaluation that ended it (if any), and the seconds of its steps."""

    epoch: int
    step: int
    train_loss: float | None = None
    train_top1: float | None = None
    val_loss: float | None = None
    val_top1: float | None = None
    val_top5: float | None = None
    val_mean_ap: float | None = None
    n: int | None = None
    seconds: float | None = None
    images_per_second: float | None = None


@dataclass(frozen=True)
class Account:
    """A run as reports show it; ``settings``: its recipe by key, or what another program's log says of one."""

    run: Run
    history: RunHistory
    summary: Summary
    epochs: tuple[Epoch, ...]
    ledger: Ledger
    settings: Mapping[str, Any]

    @staticmethod
    def of(run: Run, name: str | None = None) -> Account:
        """Read a run and name it ``name`` (None: like its folder). Raises RunError if nothing was started in it."""
        history = read_history(run, all_ranks=False)
        ledger = history.ledger()
        summary = summarise_history(run, history, ledger)
        settings, rows = dict(leaves(run.recipe.to_dict())), epochs(history)
        speed = replace(summary.speed, median_seconds_per_epoch=median_known(row.seconds for row in rows))
        summary = replace(summary, name=name or summary.name, speed=speed)
        return Account(run, history, summary, rows, ledger, settings)

    @staticmethod
    def of_log(log: ForeignRun, name: str | None = None) -> Account:
        """Fold another program's log and name it ``name`` (None: like its file); what it leaves out is None."""
        run = Run(log.directory, log.recipe)
        history = RunHistory(run.recipe)
        for event in log.events():
            history.take(event)
        ledger = history.ledger()
        spans = log.spans()
        rows = tuple(_without_nan(replace(row, seconds=spans[row.epoch - 1].seconds)) for row in epochs(history))
        summary = summarise_history(run, history, ledger)
        seconds = [row.seconds for row in rows if row.seconds is not None]
        stated = [rate for facts in log.epochs.values() if math.isfinite(rate := facts.images_per_second)]
        rates = stated or [rate for line in history.logged if math.isfinite(rate := line.images_per_second)]
        waits = [line.wait_share for line in history.logged if math.isfinite(line.wait_share)]
        lr = log.settings.get("optim.lr")
        recipe = sorted((key, value) for key, value in log.settings.items() if "seed" not in key)  # with one: repeats
        best, last = summary.quality.best, summary.quality.last
        summary = replace(
            summary,
            name=name or run.name,
            setup=replace(
                summary.setup,
                seed=log.settings["seed"] if isinstance(log.settings.get("seed"), int) else None,
                repeats_digest=repr(recipe) if len(recipe) < len(log.settings) else f"log {log.directory}",
                batch_size=log.batch_size,
                lr=float(lr) if isinstance(lr, int | float) else None,
                devices=log.num_devices,
            ),
            course=replace(
                summary.course,
                status="finished" if log.is_complete else "failed" if log.ended_as else "interrupted",
                why="" if log.is_complete else log.ending,
                began=summary.course.began or None,
            ),
            progress=summary.progress if log.steps_per_epoch else replace(summary.progress, step=0, steps=0),
            quality=RunQuality(
                best=_known_score(best) if best and math.isfinite(best.top1) else None,
                last=_known_score(last),
                train_loss=rows[-1].train_loss if rows else None,
                train_top1=rows[-1].train_top1 if rows else None,
                not_finite=0,
                is_multi_label=summary.quality.is_multi_label,
            ),
            speed=RunSpeed(
                seconds_per_epoch=fmean(seconds) if seconds else None,
                images_per_second=median_known(rates) or summary.speed.images_per_second,
                images_per_second_overall=summary.speed.images_per_second_overall or None,
                wait_share=fmean(waits) if waits else None,
                seconds=ledger.wall_seconds or math.nan,
                median_seconds_per_epoch=median_known(seconds),
            ),
            cost=None,
            log=log.title,
        )
        return Account(run, history, summary, rows, ledger, log.settings)


def median_known(values: Iterable[float | None]) -> float | None:
    """Return the median of those that are known; None where none is."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return median(known) if known else None


@dataclass(frozen=True)
class Reached:
    """The first evaluation that reached an accuracy: its epoch, the run's seconds until then, and the cost."""

    epoch: float
    seconds: float
    cost: float | None


def reached(history: RunHistory, target: float, bill: Bill | None) -> Reached | None:
    """Return when a run first reached an accuracy (top-1; of several labels, mAP), a fraction; None if it never did."""
    first = next((event for event in history.evaluated if event.score >= target), None)
    if first is None:
        return None
    return Reached(first.epoch, history.elapsed(first.time), None if bill is None else bill.until(first.time))


def all_reached(accounts: Iterable[Account], target: float | None) -> list[Reached]:
    """Return when those runs that reached an accuracy first did."""
    if target is None:
        return []
    hits = (reached(account.history, target, account.summary.cost) for account in accounts)
    return [hit for hit in hits if hit is not None]


def summarise(run: Run) -> Summary:
    """Summarise a run; it may still be going on. Raises RunError: nothing was started in it yet."""
    return Account.of(run).summary


def summarise_history(run: Run, history: RunHistory, ledger: Ledger) -> Summary:
    """Summarise a run from its history and its ledger."""
    started, recipe = history.started, run.recipe
    assert started is not None
    now = time.time()
    seen = signs(run, history, now)
    status, why = outcome(run, history)
    cost: Bill | None = None
    with suppress(InputError):  # a price that cannot be used
        cost = current_bill(run, history, seen, now)
    interruptions = history.interruptions()
    spans = history.lines.spans
    step_seconds = sum(span.seconds for span in spans)
    means: list[Logged | EpochTrained] = [*history.logged[-1:], *history.trained.values()]
    newest = max(means, key=lambda event: (event.step, isinstance(event, EpochTrained)), default=None)
    classes = started.data.get("classes")

    def int_or_none(value: object) -> int | None:
        return value if isinstance(value, int) else None

    return Summary(
        name=run.name,
        directory=str(run.directory),
        setup=RunSetup(
            digest=started.digest,
            seed=recipe.seed,
            repeats_digest=recipe.with_(seed=0).digest,
            model=str(started.model.get("name") or recipe.model.name),
            size=int_or_none(started.model.get("size")) or recipe.data.size,
            batch_size=started.batch_size,
            lr=Timeline(recipe, 0).peak,
            parameters=int_or_none(started.model.get("parameters")),
            num_train=int_or_none(started.data.get("num_train")),
            num_val=int_or_none(started.data.get("num_val")),
            num_classes=len(classes) if isinstance(classes, list) else None,
            data_set=data_set(started),
            machine=dict(started.machine),
            device=", ".join(dict.fromkeys(gpu.name for gpu in history.devices.values()))
            or str(started.machine.get("device", "")),
            devices=parts_of(history)[-1].devices,
            class_ratio=started.data.get("class_ratio"),
        ),
        course=RunCourse(
            status=status,
            why=why,
            attempts=len(history.attempts),
            restarts=len(interruptions),
            repeated_steps=history.repeated_steps,
            checkpoints=len(history.saved),
            began=history.attempts[0].began,
            notices=tuple(str(event.message) for event in history.noticed),
            interruptions=interruptions,
            goodput=goodput(interruptions, ledger),
        ),
        progress=history.progress,
        quality=RunQuality(
            best=history.best,
            last=history.last,
            train_loss=newest.loss if newest else None,
            train_top1=newest.top1 if newest else None,
            not_finite=history.lines.not_finite,
            is_multi_label=history.is_multi_label,
            test=history.test,
        ),
        speed=RunSpeed(
            seconds_per_epoch=step_seconds / history.epoch(sum(span.steps for span in spans)) if step_seconds else None,
            images_per_second=ledger.steady_images_per_second or None,
            images_per_second_overall=ledger.images_per_second or None,
            wait_share=sum(s.seconds * s.wait_share for s in spans) / step_seconds if step_seconds else None,
            seconds=ledger.wall_seconds,
            device_use=device_use(history),
        ),
        cost=cost,
        probe=history.newest(ProbeProgress),
        tried=tuple(history.tried),
    )


def _known_score(score: RunScore | None) -> RunScore | None:
    """Replace a loss that a log leaves out by None."""
    return score if score is None or not math.isnan(score.loss or 0.0) else replace(score, loss=None)


def _without_nan(row: Epoch) -> Epoch:
    """Replace what is not a number by None."""
    values = {f.name: getattr(row, f.name) for f in fields(row)}
    unknown: dict[str, Any] = {name: None for name, v in values.items() if isinstance(v, float) and math.isnan(v)}
    return replace(row, **unknown)


def data_set(started: Started) -> str:
    """Return an identity of the data: a digest of what was read if that is known, else the names."""
    data = started.data
    names = [data.get(f"{part}_digest") or data.get(part) for part in ("train", "val")]
    return json.dumps([*names, data.get("num_train"), data.get("num_val")], default=str)


def epochs(history: RunHistory) -> tuple[Epoch, ...]:
    """Return a row for each epoch with any figures; the last one may be partial.

    A step, and the evaluation after it, belongs to the epoch of its first image. Runs of versions that did not average
    over epochs have means of the log lines, each of which counts towards the epochs of its steps by their number; in
    others only an epoch at hand has, and of the lines that lie in it.
    """
    length = history.started.steps_per_epoch if history.started else 0.0
    if history.started is None or length <= 0 or not history.step:
        return ()
    batches = history.started.batches

    epoch_of = history.epoch_of

    @cache
    def updates(epochs: int) -> int:
        return math.ceil(batches.updates(epochs * length))

    last_epoch = min(epoch_of(history.step), MOST_EPOCHS)  # a damaged number of updates must not fill the memory
    rows: dict[int, dict[str, Any]] = {index: {} for index in range(1, last_epoch + 1)}
    sums: dict[int, list[float]] = {}
    is_averaged = bool(history.trained)
    for span in history.lines.spans:
        begin, end = epoch_of(span.first + 1), epoch_of(span.step) + 1
        if is_averaged and end - begin > 1:
            continue
        for index in range(begin, min(end, last_epoch + 1) if end - begin <= MOST_EPOCHS_A_LINE else begin):
            last = min(span.step, updates(index))
            weight = last - max(span.first, updates(index - 1))
            if weight > 0:
                per_step = span.images / span.steps, span.seconds / span.steps
                means_of = (1.0, span.loss, span.top1, *per_step)
                so_far = sums.get(index, [0.0] * len(means_of))
                sums[index] = [total + weight * value for total, value in zip(so_far, means_of, strict=True)]
    for index, (steps, loss, top1, images, seconds) in sums.items():
        rate = images / seconds if seconds > 0 else math.nan
        row = {"train_loss": loss / steps, "train_top1": top1 / steps, "seconds": seconds, "images_per_second": rate}
        rows.setdefault(index, {}).update(row)
    for means in history.trained.values():
        rate = means.images_per_second
        row = {"train_loss": means.loss, "train_top1": means.top1, "images_per_second": rate}
        rows.setdefault(means.epoch, {}).update(row, seconds=means.n / rate if rate > 0 and means.n else None)
    for score in history.evaluated:
        values = {"val_loss": score.loss, "val_top1": score.top1, "val_top5": score.top5, "val_mean_ap": score.mean_ap}
        rows.setdefault(epoch_of(score.step), {}).update(values, n=score.n)
    if is_averaged:  # of epochs that a larger batch skips nothing is known
        rows = {index: row for index, row in rows.items() if row or index == epoch_of(history.step)}
    ends = {index: min(history.step, updates(index)) for index in rows}
    return tuple(Epoch(epoch=index, step=ends[index], **rows[index]) for index in sorted(rows))
