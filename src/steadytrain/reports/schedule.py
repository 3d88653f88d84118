"""Forecast of a recipe's schedule: learning rate, momentum and batch size of each update."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from steadytrain.config import Recipe
from steadytrain.config.batches import Batches
from steadytrain.config.laws import law_of
from steadytrain.config.schedules import usual_momentum, words
from steadytrain.config.timeline import Timeline
from steadytrain.format import count, text_table
from steadytrain.reports.plots import Panel, round_ticks

MOST_UPDATES = 20_000
"""Updates whose rate is computed; of longer runs equally spaced ones."""

BAR = 16
"""Columns of the bar beside a rate."""


@dataclass(frozen=True)
class ScheduleMoment:
    """One update of a planned run: its number from 1 on, the epochs done before it, and what happens there, if that is
    worth a word.
    """

    update: int
    epoch: float
    lr: float
    momentum: float | None
    batch_size: int
    event: str = ""


@dataclass(frozen=True)
class Forecast:
    """A schedule over a run.

    Args:
        num_train: images to train on.
        steps: updates in the run.
        steps_per_epoch: updates in an epoch, as long as the batch has its first size.
        peak: the highest learning rate.
        words: the schedule in words.
        moments: updates in rising order, all of them or equally spaced ones, and every one with an event.
        batches: the images of each update.
    """

    num_train: int
    steps: int
    steps_per_epoch: float
    peak: float
    words: str
    moments: Sequence[ScheduleMoment]
    batches: Batches


def forecast(recipe: Recipe, num_train: int) -> Forecast:
    """Compute the schedule of a recipe for so many training images; rates that depend on evaluations do not fall.

    Raises:
        RecipeError: the schedule does not fit the run.

    >>> from steadytrain.config import Budget, Data, Model, Optim
    >>> recipe = Recipe(data=Data(train="x"), model=Model("x"), optim=Optim(lr=0.2), budget=Budget(epochs=2))
    >>> [round(moment.lr, 4) for moment in forecast(recipe, 512).moments]
    [0.2, 0.1924, 0.1707, 0.1383, 0.1, 0.0617, 0.0293, 0.0076]
    """
    timeline, optim, still = Timeline(recipe, num_train), recipe.optim, usual_momentum(recipe.optim)
    batches, steps, per_epoch = timeline.batches, timeline.steps, timeline.steps_per_epoch
    events = {0: "the warm-up begins"} if optim.warmup_epochs else {}
    for span in timeline.spans:
        events[math.ceil(batches.updates(span.begin))] = f"{span.stage.law} begins"
        if law_of(span.stage).at_milestones:
            at: Iterable[float] = span.stage.updates or [epoch * per_epoch for epoch in optim.milestones]
            drops = [math.ceil(batches.updates(step)) for step in at if step >= span.begin]
            events |= dict.fromkeys(drops, f"x {span.number('factor'):g}")
    for stage in batches.stages[1:]:
        before = f"{events[stage.update]}, " if stage.update in events else ""
        events[stage.update] = f"{before}batches of {stage.images:,}"
    for position, size in recipe.sizes(num_train, usual=0):
        update = round(batches.step(position))
        if size:
            before = f"{events[update]}, " if update in events else ""
            events[update] = f"{before}images of {size} pixels"
    events[steps - 1] = "the last update"
    chosen = {*range(0, steps, max(1, steps // MOST_UPDATES)), *(step for step in events if step < steps)}
    moments = [
        ScheduleMoment(
            update=step + 1,
            epoch=batches.progress(step) / per_epoch,
            lr=timeline.lr(step),
            momentum=timeline.momentum(step) if timeline.moves_momentum else still,
            batch_size=batches.size(step),
            event=events.get(step, ""),
        )
        for step in sorted(chosen)
    ]
    return Forecast(num_train, steps, per_epoch, timeline.peak, words(optim, timeline.peak), moments, batches)


def lines(forecast: Forecast, rows: int = 16) -> list[str]:
    """Format a forecast as a table: every update with an event, and about so many others."""
    every = max(1, len(forecast.moments) // rows)
    named = [k for k, moment in enumerate(forecast.moments) if moment.event]
    shown = [
        moment
        for k, moment in enumerate(forecast.moments)
        if moment.event or (k % every == 0 and all(abs(k - other) > every / 4 for other in named))
    ]
    has_momentum = any(moment.momentum is not None for moment in shown)
    highest = max(moment.lr for moment in shown)
    heads = ("epoch", "update", "rate", *(("momentum",) if has_momentum else ()), "images", "", "")
    table = [heads]
    for moment in shown:
        momentum = ("" if moment.momentum is None else f"{moment.momentum:.3g}",) if has_momentum else ()
        bar = "#" * round(BAR * moment.lr / highest)
        cells = (f"{moment.epoch:.4g}", f"{moment.update:,}", f"{moment.lr:.4g}", *momentum, f"{moment.batch_size:,}")
        table.append((*cells, bar, moment.event))
    at_first = " at first" if forecast.batches.is_growing else ""
    return [
        f"{count(forecast.steps, 'update')}, {forecast.steps_per_epoch:,.1f} an epoch{at_first} of"
        f" {count(forecast.num_train, 'image')}; rate {forecast.peak:.4g}, {forecast.words}",
        *text_table(table, right=range(len(heads) - 2)).splitlines(),
    ]


def panels(forecast: Forecast) -> list[Panel]:
    """Make the charts of a forecast: rate and momentum (where there is one) over epochs, images over updates."""
    moments = forecast.moments
    x = [moment.update for moment in moments]
    marks = [(moment.update, moment.event) for moment in moments if moment.event and moment.update > 1][:-1]
    batches, per_epoch = forecast.batches, forecast.steps_per_epoch
    epochs = round_ticks(0, batches.first / per_epoch, 8)
    ticks = [(max(x[0], min(x[-1], batches.updates(epoch * per_epoch))), f"{epoch:g}") for epoch in epochs]
    charts = [Panel("learning rate", x, [[moment.lr for moment in moments]], "epoch", marks=marks, ticks=ticks)]
    if moments[0].momentum is not None:
        momenta = [moment.momentum or 0.0 for moment in moments]
        charts.append(Panel("momentum", x, [momenta], "epoch", from_zero=False, ticks=ticks))
    title = f"update ({per_epoch:,.1f} an epoch{' at first' if batches.is_growing else ''})"
    return [*charts, Panel("images an update", x, [[moment.batch_size for moment in moments]], title)]


def rate_panels(
    rates: Sequence[float], losses: Sequence[float], smoothed: Sequence[float], suggestion: float
) -> list[Panel]:
    """Make the chart of a search for a rate: the loss of each update, faint, and its smoothed curve.

    What lies far above the first losses is cut off: beside a diverging loss no fall could be seen.
    """
    top = smoothed[0] + 0.5 * (smoothed[0] - min(smoothed))
    curves = [[min(loss, top) for loss in curve] for curve in (losses[: len(smoothed)], smoothed)]
    marks = [(suggestion, f"{suggestion:g}")]
    return [Panel("loss", rates[: len(smoothed)], curves, "learning rate", log_x=True, from_zero=False, marks=marks)]
