"""What came of a run, in figures: its scores, its rates, a row for each epoch."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from steadytrain.events import Evaluated, Logged, Started
from steadytrain.monitor import Ledger, RunHistory, read_history
from steadytrain.reports.status import Status, outcome
from steadytrain.run import Run

MOST_BYTES = 10_000_000
"""A log up to here is read with all its steps, in about a second; of a longer one the log lines tell the rates."""
Z95 = 1.959963984540054  # the standard normal's 97.5 % quantile


@dataclass(frozen=True)
class Interval:
    """From ``low`` to ``high``, both fractions."""

    low: float
    high: float


def wilson(fraction: float, n: int) -> Interval:
    """Return the 95 % confidence interval of a share of ``n`` independent trials.

    Stays within 0 and 1, and is right also for small ``n`` and for shares near 0 or 1, where the textbook
    normal interval is not (E. B. Wilson, Probable inference, the law of succession, and statistical inference,
    J. Am. Stat. Assoc. 22, 1927, 209-212).

    Args:
        fraction: the share seen, from 0 to 1.
        n: number of trials; with none, nothing is known and the interval is everything.

    >>> wilson(0.9, 100)
    Interval(low=0.8256343384950865, high=0.9447708629393249)
    >>> wilson(1.0, 0)
    Interval(low=0.0, high=1.0)
    """
    if n <= 0 or not 0 <= fraction <= 1:
        return Interval(0.0, 1.0)
    spread = Z95**2 / n
    middle = (fraction + spread / 2) / (1 + spread)
    half = Z95 / (1 + spread) * math.sqrt(fraction * (1 - fraction) / n + spread / (4 * n))
    return Interval(max(0.0, middle - half), min(1.0, middle + half))


@dataclass(frozen=True, kw_only=True)
class Score:
    """One evaluation; ``top1_95``: the 95 % confidence interval of ``top1`` over the ``n`` images."""

    step: int
    epoch: float
    n: int
    loss: float
    top1: float
    top1_95: Interval
    top5: float
    seconds: float
    weights: str

    @staticmethod
    def of(event: Evaluated) -> Score:
        """Return the score that an event holds."""
        values = {name: value for name, value in vars(event).items() if name in Score.__dataclass_fields__}
        return Score(**values, top1_95=wilson(event.top1, event.n))


def best_and_last(history: RunHistory) -> tuple[Score | None, Score | None]:
    """Return the evaluation with the highest top-1 (the first of equals), and the newest."""

    def rank(event: Evaluated) -> float:
        return event.top1 if math.isfinite(event.top1) else -1.0

    if not history.evaluated:
        return None, None
    return Score.of(max(history.evaluated, key=rank)), Score.of(history.evaluated[-1])


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in figures. Durations in seconds, accuracies as fractions, None where nothing was recorded.

    ``status`` with ``why``: for ``interrupted`` and ``failed`` what is known of the reason.
    ``best``: the evaluation with the highest top-1 (the first of equals); ``last``: the newest.
    ``seconds_per_epoch``: of training steps alone.
    ``images_per_second``: the median of the log lines (the steady state).
    ``images_per_second_overall``: images of the updates that count, repeated ones once, over ``seconds``.
    ``seconds``: wall time of all attempts, pauses between them left out. ``restarts``: attempts after the first;
    ``repeated_steps``: updates done again after them. ``wait_share``: of the steps' seconds, spent waiting for images.
    ``data_set``: tells the images that were trained and evaluated on apart from others, by their digests where known.
    ``not_finite``: log lines whose loss is no finite number. ``began``: seconds since 1970.
    """

    name: str
    directory: str
    digest: str
    model: str
    status: Status
    why: str
    steps_done: int
    steps: int
    epochs_done: float
    epochs: float
    best: Score | None
    last: Score | None
    train_loss: float | None
    train_top1: float | None
    seconds_per_epoch: float | None
    images_per_second: float | None
    images_per_second_overall: float | None
    wait_share: float | None
    seconds: float
    attempts: int
    restarts: int
    repeated_steps: int
    batch_size: int
    lr: float
    parameters: int | None
    num_train: int | None
    num_val: int | None
    num_classes: int | None
    data_set: str
    checkpoints: int
    not_finite: int
    began: float
    notices: tuple[str, ...] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)


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
    n: int | None = None
    seconds: float | None = None
    images_per_second: float | None = None


@dataclass(frozen=True)
class Account:
    """A run as reports show it."""

    run: Run
    history: RunHistory
    summary: Summary
    epochs: tuple[Epoch, ...]
    ledger: Ledger

    @staticmethod
    def of(run: Run, name: str | None = None) -> Account:
        """Read a run and call it ``name`` (None: as its folder). Raises RunError where nothing was started in it."""
        log = run.log_path()
        is_long = log.exists() and log.stat().st_size > MOST_BYTES
        history = read_history(run, condensed=is_long, all_ranks=False)
        ledger = history.ledger()
        summary = summarise_history(run, history, ledger)
        return Account(run, history, replace(summary, name=name or summary.name), epochs(history), ledger)


def summarise(run: Run) -> Summary:
    """Return a run in figures, also while it goes on.

    Raises:
        RunError: nothing was started in it yet.
    """
    return Account.of(run).summary


def summarise_history(run: Run, history: RunHistory, ledger: Ledger) -> Summary:
    """Return a run in figures, from what happened in it and where its time went."""
    started, recipe = history.started, run.recipe
    assert started is not None
    status, why = outcome(run, history)
    spans = list(log_spans(history))
    step_seconds = sum(span.seconds for span in spans)
    best, last = best_and_last(history)
    newest = history.logged[-1] if history.logged else None
    rates = [line.images_per_second for line in history.logged if math.isfinite(line.images_per_second)]
    classes = started.data.get("classes")

    def whole(value: object) -> int | None:
        return value if isinstance(value, int) else None

    return Summary(
        name=run.name,
        directory=str(run.directory),
        digest=started.digest,
        model=str(started.model.get("name") or recipe.model.name),
        status=status,
        why=why,
        steps_done=history.step,
        steps=started.steps,
        epochs_done=history.epoch(history.step),
        epochs=history.epoch(started.steps),
        best=best,
        last=last,
        train_loss=newest.loss if newest else None,
        train_top1=newest.top1 if newest else None,
        seconds_per_epoch=step_seconds / history.epoch(sum(span.steps for span in spans)) if step_seconds else None,
        images_per_second=median(rates) if rates else ledger.steady_images_per_second or None,
        images_per_second_overall=ledger.images_per_second if ledger.wall_seconds > 0 else None,
        wait_share=sum(s.seconds * s.line.wait_share for s in spans) / step_seconds if step_seconds else None,
        seconds=ledger.wall_seconds,
        attempts=len(history.attempts),
        restarts=len(history.attempts) - 1,
        repeated_steps=history.repeated_steps,
        batch_size=started.batch_size,
        lr=recipe.optim.scaled_lr(recipe.batch_size),
        parameters=whole(started.model.get("parameters")),
        num_train=whole(started.data.get("num_train")),
        num_val=whole(started.data.get("num_val")),
        num_classes=len(classes) if isinstance(classes, list) else None,
        data_set=data_set(started),
        checkpoints=len(history.saved),
        not_finite=sum(not math.isfinite(line.loss) for line in history.logged),
        began=history.attempts[0].began,
        notices=tuple(str(event.message) for event in history.noticed),
        machine=dict(started.machine),
    )


def data_set(started: Started) -> str:
    """Tell data sets apart: by what was read where that is known, else by what they are called."""
    data = started.data
    names = [data.get(f"{part}_digest") or data.get(part) for part in ("train", "val")]
    return json.dumps([*names, data.get("num_train"), data.get("num_val")], default=str)


@dataclass(frozen=True)
class LogSpan:
    """A log line with the steps after ``first`` that it stands for, and the seconds that they took."""

    line: Logged
    first: int
    steps: int
    seconds: float


def log_spans(history: RunHistory) -> Iterator[LogSpan]:
    """Yield the log lines with the steps that they stand for, oldest first; those without a rate left out."""
    # A step's own seconds are those of the host, which on a GPU only asks for the work; a log line has waited for it.
    first, batch_size = 0, history.attempts[-1].batch_size
    for line in history.logged:
        steps, rate = line.step - first, line.images_per_second
        if steps > 0 and math.isfinite(rate) and rate > 0:
            yield LogSpan(line, first, steps, steps * batch_size / rate)
        first = line.step


def epochs(history: RunHistory) -> tuple[Epoch, ...]:
    """Return a row for each epoch of which anything is known, the last one perhaps in part.

    A step, and the evaluation after it, belongs to the epoch of its first image. Runs of versions that did not average
    over epochs have means of the log lines, each of which counts towards the epochs of its steps by their number; in
    others only an epoch at hand has, and of the lines that lie in it.
    """
    length = history.started.steps_per_epoch if history.started else 0.0
    if length <= 0 or not history.step:
        return ()

    def epoch_of(step: int) -> int:  # from 1
        return 1 + max(0, math.floor((step - 1) / length + 1e-9))

    rows: dict[int, dict[str, Any]] = {index: {} for index in range(1, epoch_of(history.step) + 1)}
    sums: dict[int, list[float]] = {}
    is_averaged = bool(history.trained)
    for span in log_spans(history):
        if is_averaged and epoch_of(span.first + 1) != epoch_of(span.line.step):
            continue
        for index in range(epoch_of(span.first + 1), epoch_of(span.line.step) + 1):
            last = min(span.line.step, math.ceil(index * length))
            weight = last - max(span.first, math.ceil((index - 1) * length))
            if weight > 0:
                values = (1.0, span.line.loss, span.line.top1, span.seconds / span.steps)
                so_far = sums.get(index, [0.0] * len(values))
                sums[index] = [total + weight * value for total, value in zip(so_far, values, strict=True)]
    for index, (steps, loss, top1, seconds) in sums.items():
        rate = steps * history.attempts[-1].batch_size / seconds
        row = {"train_loss": loss / steps, "train_top1": top1 / steps, "seconds": seconds, "images_per_second": rate}
        rows.setdefault(index, {}).update(row)
    for means in history.trained.values():
        rate = means.images_per_second
        row = {"train_loss": means.loss, "train_top1": means.top1, "images_per_second": rate}
        rows.setdefault(means.epoch, {}).update(row, seconds=means.n / rate if rate > 0 else None)
    for score in history.evaluated:
        row = {"val_loss": score.loss, "val_top1": score.top1, "val_top5": score.top5, "n": score.n}
        rows.setdefault(epoch_of(score.step), {}).update(row)
    if is_averaged:  # of epochs that a larger batch skips nothing is known
        rows = {index: row for index, row in rows.items() if row or index == epoch_of(history.step)}
    ends = {index: min(history.step, math.ceil(index * length)) for index in rows}
    return tuple(Epoch(epoch=index, step=ends[index], **rows[index]) for index in sorted(rows))
