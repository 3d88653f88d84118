"""The log lines of a run of any length: those to draw, and what they tell of the updates between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

import msgspec

from steadytrain.config.batches import Batches
from steadytrain.events import Logged

MAX_LINES = 8192
"""Lines, and stretches between them, up to which each is kept."""

RECENT_LINES = 1024
"""The newest lines, which are kept whatever comes: a restart may take some of them back."""

MOST_EPOCHS = 100_000
"""Epochs that a report has rows of."""

_drawn = attrgetter("loss", "top1", "images_per_second", "wait_share")


class LogSpan(msgspec.Struct, frozen=True):
    """A stretch of ``steps`` after ``first``, up to ``step``: their images, seconds, and the means of its log lines."""

    first: int
    step: int
    steps: int
    images: float
    seconds: float
    loss: float
    top1: float
    wait_share: float

    def join(self, later: LogSpan) -> LogSpan:
        """Return this stretch with the one that follows it."""
        steps, seconds = self.steps + later.steps, self.seconds + later.seconds
        return LogSpan(
            self.first,
            later.step,
            steps,
            self.images + later.images,
            seconds,
            (self.loss * self.steps + later.loss * later.steps) / steps,
            (self.top1 * self.steps + later.top1 * later.steps) / steps,
            (self.wait_share * self.seconds + later.wait_share * later.seconds) / seconds,
        )


@dataclass
class LogLines:
    """The log lines that count: a restart takes back those after the step it goes on from.

    Of more than :data:`MAX_LINES`, only the extremes of each stretch stay in ``kept``: lines with the least and the
    greatest loss, accuracy, rate and wait, and the first whose loss is not finite. ``spans`` are the stretches between
    lines, those without a rate left out; of many, neighbours of one epoch are joined.
    """

    kept: list[Logged] = field(default_factory=list)
    spans: list[LogSpan] = field(default_factory=list)
    _bad: list[int] = field(default_factory=list)  # lines up to it whose loss is not finite
    _width: int = 1  # updates of a stretch of which the extremes are kept
    _most_spans: int = MAX_LINES

    @property
    def not_finite(self) -> int:
        """Lines whose loss is no finite number."""
        return self._bad[-1] if self._bad else 0

    def add(self, line: Logged, batches: Batches | None, epoch_of: Callable[[int], int] | None) -> None:
        """Add the newest line.

        Args:
            line: of the run's newest attempt.
            batches: images of each update; None: not known.
            epoch_of: the number of an update's epoch; None: keep every line, and join no stretches.
        """
        first = self.kept[-1].step if self.kept else 0
        steps, rate = line.step - first, line.images_per_second
        if steps > 0 and math.isfinite(rate) and rate > 0:
            images = float(batches.position(line.step) - batches.position(first)) if batches else 0.0
            self.spans.append(
                LogSpan(first, line.step, steps, images, images / rate, line.loss, line.top1, line.wait_share)
            )
        self._bad.append(self.not_finite + (not math.isfinite(line.loss)))
        self.kept.append(line)
        if epoch_of is not None and len(self.kept) > MAX_LINES:
            self._thin()
        if epoch_of is not None and len(self.spans) > self._most_spans:
            self._join(epoch_of)

    def take_back(self, step: int) -> None:
        """Forget the lines after a step."""
        self._keep([index for index, line in enumerate(self.kept) if line.step <= step])
        self.spans = [span for span in self.spans if span.step <= step]

    def _keep(self, chosen: Sequence[int]) -> None:
        self.kept = [self.kept[index] for index in chosen]
        self._bad = [self._bad[index] for index in chosen]

    def _thin(self) -> None:
        """Keep the extremes of each stretch of the older lines; stretches are of as many updates."""
        while len(self.kept) > MAX_LINES // 2 + RECENT_LINES:
            self._width *= 2
            chosen, end = set[int](), len(self.kept) - RECENT_LINES
            for _, stretch in groupby(range(end), lambda index: self.kept[index].step // self._width):
                chosen |= self._extremes(list(stretch))
            self._keep([*sorted(chosen), *range(end, len(self.kept))])

    def _extremes(self, stretch: Sequence[int]) -> set[int]:
        chosen = set[int]()
        for column in zip(*(_drawn(self.kept[i]) for i in stretch), strict=True):
            known = [(value, i) for value, i in zip(column, stretch, strict=True) if math.isfinite(value)]
            if known:
                chosen |= {min(known)[1], max(known)[1]}
        bad = next((i for i in stretch if not math.isfinite(self.kept[i].loss)), None)
        return chosen if bad is None else chosen | {bad}

    def _join(self, epoch_of: Callable[[int], int]) -> None:
        """Join older neighbours of one epoch, or beyond those reported, to a 2048th of all updates at most."""
        most = self.spans[-1].step / (MAX_LINES // 4)
        joined, epoch = list[LogSpan](), 0  # the epoch in which the newest of them begins
        for span in self.spans[:-RECENT_LINES]:
            before = joined[-1] if joined else None
            if before is not None and before.step == span.first and before.steps + span.steps <= most:
                epoch = epoch or epoch_of(before.first + 1)
                if epoch > MOST_EPOCHS or epoch == epoch_of(span.step):
                    joined[-1] = before.join(span)
                    continue
            joined.append(span)
            epoch = 0
        self.spans = joined + self.spans[-RECENT_LINES:]
        self._most_spans = max(MAX_LINES, 2 * len(self.spans))
