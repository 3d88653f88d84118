"""A run read from another program's log, and its translation into our events.

What a log leaves out is NaN here and in the events: a log of accuracies alone has no loss.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from steadytrain.config import Budget, Data, Model, Recipe
from steadytrain.errors import RecipeError
from steadytrain.events import Accounted, Ended, EpochTrained, Evaluated, Event, Logged, Noticed, Started
from steadytrain.format import NONE, percent

MAX_EPOCH = 100_000
"""A line of a later epoch is not believed."""
MAX_STEPS_PER_EPOCH = 2**31
MAX_NOTICES = 20
NAN = math.nan


@dataclass
class LogEpoch:
    """The figures of one epoch in a log; epochs count from 0.

    ``train``, ``val`` and ``ema`` (validation of averaged weights): ``loss``, ``top1`` and ``top5`` (fractions) -> a
    value for each worker that wrote one; in MXNet's logs each metric by its own name, too (``nll-loss=``).
    ``seconds``: of training, one for each worker; ``rates``: images/s, as lines about the whole epoch state them,
    each of other workers. ``ended``, ``evaluated``: when training and validation were over,
    seconds since 1970.
    """

    number: int
    train: dict[str, list[float]] = field(default_factory=dict)
    val: dict[str, list[float]] = field(default_factory=dict)
    ema: dict[str, list[float]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    val_seconds: float = NAN
    ended: float = NAN
    evaluated: float = NAN
    lr: float = NAN

    def mean(self, part: str, name: str) -> float:
        """Return a figure's mean over the workers; NaN where none wrote it.

        >>> LogEpoch(0, val={"top1": [0.5, 0.75]}).mean("val", "top1")
        0.625
        """
        values = getattr(self, part).get(name)
        return fmean(values) if values else NAN

    @property
    def images_per_second(self) -> float:
        """The speed of all workers, as the log states it of the whole epoch; NaN where it does not."""
        return sum(self.rates) if self.rates else NAN

    @property
    def training_seconds(self) -> float:
        """The mean over the workers; NaN where it is not known."""
        return fmean(self.seconds) if self.seconds else NAN


class EpochTimes(NamedTuple):
    """The times when an epoch began, its training ended and its validation was over; ``seconds`` that training took."""

    began: float
    ended: float
    evaluated: float
    seconds: float


@dataclass(slots=True)
class LogPoint:
    """A log line within an epoch, after ``batch`` of its updates; rates are of all workers once a log is read."""

    epoch: int
    batch: float
    loss: float = NAN
    top1: float = NAN
    lr: float = NAN
    images_per_second: float = NAN
    wait_share: float = NAN
    time: float = NAN


@dataclass
class LogRun:
    """A run read from another program's log.

    ``format``: whose log; ``directory``: the file, with ``#2`` behind it for the second run in it. ``settings``: what
    the log says of the recipe, by our keys where we have the same, else by the program's own. ``steps_per_epoch``:
    updates in an epoch, where that is known exactly; ``batch_size``: images of an update of all workers together.
    ``num_images``: of an epoch, as MLPerf's logs state it, which begin with the first. ``num_epochs``: that were asked
    for. ``began``: seconds since 1970. ``ended_as``: how, as the log states it.
    """

    format: str
    directory: Path = Path()
    settings: dict[str, Any] = field(default_factory=dict)
    epochs: dict[int, LogEpoch] = field(default_factory=dict)
    points: list[LogPoint] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    num_workers: int = 1
    steps_per_epoch: float | None = None
    batch_size: int | None = None
    num_images: int | None = None
    num_epochs: int | None = None
    began: float = NAN
    ended_as: str = ""

    @property
    def title(self) -> str:
        """The program, and the number of workers.

        >>> LogRun("MXNet", num_workers=5).title
        'MXNet log of 5 workers'
        """
        return f"{self.format} log" + (f" of {self.num_workers} workers" if self.num_workers > 1 else "")

    @property
    def settled_steps(self) -> float:
        """Updates in an epoch: exactly, else as many as the log shows, else 1 for the whole epoch."""
        return self.steps_per_epoch or max((point.batch for point in self.points), default=0.0) or 1.0

    @property
    def is_complete(self) -> bool:
        """Return whether the log has all epochs that were asked for; if that is not known, a complete last epoch."""
        last = max(self.epochs)
        if self.ended_as == "success":
            return True
        if self.num_epochs:
            return last + 1 >= self.num_epochs and not self._is_partial(last)
        return not self._is_partial(last) and not self.ended_as

    @property
    def num_devices(self) -> int | None:
        """Devices of all workers, as the program's arguments name them (``gpus='0,1'``); None where they do not."""
        gpus, num, world = (self.settings.get(name) for name in ("gpus", "num_gpus", "world_size"))
        if isinstance(gpus, str) and re.fullmatch(r"\d+(,\d+)*", gpus):
            num = len(gpus.split(","))
        if not isinstance(num, int) or num < 1:
            return world if isinstance(world, int) and world > 0 else None
        batch, own = self.settings.get("global_batch_size"), self.settings.get("batch_size")  # of all, and of a process
        if isinstance(batch, int) and isinstance(own, int) and 0 < own <= batch and batch % own == 0:
            return num * batch // own
        return num * self.num_workers

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the epochs still take that were asked for, at the mean of those before; None if not known."""
        spans = self.spans()
        whole = [span.evaluated - span.began for number, span in spans.items() if not self._is_partial(number)]
        missing = (self.num_epochs or 0) - max(self.epochs) - 1 + self._is_partial(max(self.epochs))
        if self.is_complete or not whole or missing <= 0:
            return None
        begun = sum(span.evaluated - span.began for number, span in spans.items() if self._is_partial(number))
        return max(0.0, missing * fmean(whole) - begun)

    @property
    def ending(self) -> str:
        """The end of a log that is not complete, in words: within or after which epoch."""
        last = max(self.epochs)
        how = f"{self.ended_as or 'the log ends'} {'within' if self._is_partial(last) else 'after'}"
        return f"{how} epoch {last + 1}" + (f" of {self.num_epochs}" if self.num_epochs else "")

    @property
    def recipe(self) -> Recipe:
        """The few values of a recipe that folding the events needs; :attr:`settings` has what the log says of it."""
        epochs = float(max(max(self.epochs) + 1, self.num_epochs or 1))
        data, model = str(self.settings.get("data.train") or NONE), str(self.settings.get("model.name") or NONE)
        try:
            return Recipe(data=Data(train=data), model=Model(model), budget=Budget(epochs=epochs))
        except RecipeError:  # a name that ours cannot have
            return Recipe(data=Data(train=NONE), model=Model(NONE), budget=Budget(epochs=epochs))

    def epoch(self, number: int) -> LogEpoch:
        """Return the figures of an epoch, to be added to."""
        if number not in self.epochs:
            self.epochs[number] = LogEpoch(number)
        return self.epochs[number]

    def note_time(self, time: float) -> None:
        """Note the moment of a line, NaN if unknown: the run began with the first."""
        if math.isfinite(time):
            self.began = time if math.isnan(self.began) else min(self.began, time)

    def add_point(self, point: LogPoint) -> LogPoint:
        """Keep a log line."""
        self.epoch(point.epoch)
        self.points.append(point)
        return point

    def drop_from(self, number: int) -> None:
        """Forget an epoch and those after it: the training went on from a checkpoint before them."""
        self.epochs = {key: value for key, value in self.epochs.items() if key < number}
        self.points = [point for point in self.points if point.epoch < number]

    def take_over(self, other: LogRun) -> None:
        """Take what another program in the same file states of all devices and images: this one may be a worker's."""
        has_times, has_scores = math.isfinite(self.began), any(facts.val for facts in other.epochs.values())
        for number in {*self.epochs, *other.epochs}:
            facts, stated = self.epoch(number), other.epochs.get(number, LogEpoch(number))
            if has_scores:
                facts.val = {name: values for name, values in facts.val.items() if name.endswith("=")} | stated.val
            facts.seconds = facts.seconds or stated.seconds
            if not has_times:
                facts.ended, facts.evaluated = stated.ended, stated.evaluated
        self.began, self.settings = self.began if has_times else other.began, {**other.settings, **self.settings}
        self.batch_size = other.batch_size or self.batch_size
        self.steps_per_epoch = other.steps_per_epoch or self.steps_per_epoch
        self.num_images, self.ended_as = other.num_images, other.ended_as
        self.notices += other.notices

    def notice(self, message: str) -> None:
        """Keep a remark, once."""
        if message not in self.notices and len(self.notices) < MAX_NOTICES:
            self.notices.append(message)

    def spans(self) -> dict[int, EpochTimes]:
        """Return when each epoch began and ended: by the dates of lines, else by the durations that the log states."""
        spans: dict[int, EpochTimes] = {}
        times = (self.began, *(facts.ended for _, facts in sorted(self.epochs.items())))
        time = next((time for time in times if math.isfinite(time)), 0.0)
        newest = {point.epoch: point.time for point in self.points}
        before = -1 if self.num_images else min(self.epochs) - 1
        for number in sorted(self.epochs):
            facts, share, before = self.epochs[number], 1 / (number - before), number  # of those that have no figures
            seconds = facts.training_seconds
            ended = facts.ended if math.isfinite(facts.ended) else newest.get(number, NAN)
            end = ended if ended >= time else time + (seconds if seconds > 0 else 0.0)
            if math.isnan(seconds) and end > time:
                seconds = (end - time) * share
            validated = end + (facts.val_seconds if facts.val_seconds > 0 else 0.0)
            after = facts.evaluated if facts.evaluated >= end else validated
            spans[number] = EpochTimes(time, end, after, seconds)
            time = after
        return spans

    def events(self) -> Iterator[Event]:
        """Yield the run as events, oldest first; times are seconds since 1970, or since its start if not known."""
        spans, per_epoch, last = self.spans(), self.settled_steps, max(self.epochs)
        first = 0 if self.num_images else min(self.epochs)
        began, start, before = spans[min(self.epochs)].began, round(first * per_epoch), first - 1
        batch_size = self.batch_size if self.steps_per_epoch and self.batch_size else (self.num_images or 0) / per_epoch
        model = {
            key: self.settings[f"model.{key}"] for key in ("name", "parameters") if f"model.{key}" in self.settings
        }
        data: dict[str, Any] = {
            name: str(self.settings[f"data.{name}"]) for name in ("train", "val") if self.settings.get(f"data.{name}")
        }
        if self.steps_per_epoch and self.batch_size:
            data["num_train"] = round(self.steps_per_epoch * self.batch_size)
        yield Started(
            time=began,
            attempt=1,
            digest="",
            step=start,
            steps=math.ceil(max(last + 1, self.num_epochs or 0) * per_epoch),
            steps_per_epoch=per_epoch,
            batch_size=self.batch_size or 1,
            data=data,
            model=model,
            machine={"log": self.title},
        )
        by_epoch: dict[int, list[LogPoint]] = {}
        for point in self.points:
            by_epoch.setdefault(point.epoch, []).append(point)
        step, update, evaluation = start, 0.0, 0.0
        for number, span in spans.items():
            facts, points = self.epochs[number], by_epoch.get(number, [])
            is_partial = number == last and self._is_partial(number)
            newest = max((point.batch for point in points), default=0.0)
            share = min(1.0, newest / per_epoch) if is_partial else 1.0
            step = max(step + (number > first and share > 0), round((number + share) * per_epoch))
            yield from _logged(points, number, per_epoch, span)
            yield _trained(facts, points, step, round(round(share * per_epoch) * batch_size), span)
            yield from _evaluated(facts, step, span)
            if math.isfinite(span.seconds):  # epochs without figures lie between two with some
                update += min(span.ended - span.began, span.seconds * (number - before))
            before = number
            evaluation += span.evaluated - span.ended
            yield Accounted(
                time=span.evaluated,
                attempt=1,
                step=step,
                images=round((step - start) * batch_size),
                wall_seconds=span.evaluated - began,
                seconds={"update": update, "evaluation": evaluation},
            )
        end = spans[last].evaluated
        for message in self.remarks:
            yield Noticed(time=end, attempt=1, message=message, step=step)
        if self.is_complete:
            images = round((step - start) * batch_size)
            yield Ended(time=end, attempt=1, status="finished", step=step, seconds=end - began, images=images)

    def _is_partial(self, number: int) -> bool:
        """Return whether an epoch has log lines alone, and neither its means, its time nor a validation."""
        facts = self.epochs[number]
        return not (facts.train or facts.val or facts.ema or facts.seconds)

    @property
    def remarks(self) -> list[str]:
        """Remarks on the log."""
        if self.num_workers < 2:
            return [*self.notices]
        remarks = ["each figure is the mean of the workers, and images/s their sum"]
        scored = [facts for _, facts in sorted(self.epochs.items()) if len(facts.val.get("top1", ())) > 1]
        if scored:
            values = scored[-1].val["top1"]
            remarks.append(
                f"validation accuracy at epoch {scored[-1].number + 1}: the mean of the workers is"
                f" {percent(fmean(values), 1)}, that of the best {percent(max(values), 1)}, of the worst"
                f" {percent(min(values), 1)}"
            )
        return remarks + self.notices


def _logged(points: list[LogPoint], number: int, per_epoch: float, span: EpochTimes) -> Iterator[Event]:
    latest = span.began
    for point in points:
        share = min(1.0, point.batch / per_epoch)
        time = point.time if math.isfinite(point.time) else span.began + share * (span.ended - span.began)
        latest = max(latest, min(time, span.ended) if span.ended > span.began else time)
        yield Logged(
            time=latest,
            attempt=1,
            step=max(1, round(number * per_epoch + min(point.batch, per_epoch))),
            epoch=number + share,
            **{name: getattr(point, name) for name in ("loss", "top1", "lr", "images_per_second", "wait_share")},
        )


def _trained(facts: LogEpoch, points: list[LogPoint], step: int, n: int, span: EpochTimes) -> Event:
    """Return an epoch's training means, as logged, or else the means of its log lines."""
    rate = _mean_of(facts.images_per_second, [point.images_per_second for point in points])
    return EpochTrained(
        time=span.ended,
        attempt=1,
        step=step,
        epoch=facts.number + 1,
        n=n,
        loss=_mean_of(facts.mean("train", "loss"), [point.loss for point in points]),
        top1=_mean_of(facts.mean("train", "top1"), [point.top1 for point in points]),
        images_per_second=n / span.seconds if math.isnan(rate) and n and span.seconds > 0 else rate,
    )


def _evaluated(facts: LogEpoch, step: int, span: EpochTimes) -> Iterator[Event]:
    for weights, part in (("model", "val"), ("ema", "ema")):
        if getattr(facts, part):
            top5 = facts.mean(part, "top5")
            yield Evaluated(
                time=span.evaluated,
                attempt=1,
                step=step,
                epoch=facts.number + 1,
                n=0,
                loss=facts.mean(part, "loss"),
                top1=facts.mean(part, "top1"),
                top5=top5 if math.isfinite(top5) else None,
                seconds=span.evaluated - span.ended if weights == "model" or not facts.val else 0.0,
                weights=weights,
            )


def _mean_of(value: float, others: list[float]) -> float:
    """Return the value or, where it is not known, the mean of others that are."""
    known = [other for other in others if math.isfinite(other)]
    return value if math.isfinite(value) or not known else fmean(known)
