"""Evaluations in the midst of training: when they are due, and what becomes of them."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator

import torch

from steadytrain.data.loader import Batch, ImageLoader
from steadytrain.errors import SteadyError
from steadytrain.events import Evaluated, Event
from steadytrain.training.clock import Clock
from steadytrain.training.evaluation import evaluate_module
from steadytrain.training.log_window import Laps, settled_loss
from steadytrain.training.saving import Saves, diverged, export, require_sound_weights
from steadytrain.training.session import Session


def maybe_evaluate(session: Session, stop: Callable[[], str | None], laps: Laps, saves: Saves) -> Iterator[Event]:
    """Evaluate, if it is time, and keep the best weights."""
    if session.val_feed is None or not is_due(session):
        return
    settled_loss(session, laps)
    yield from _evaluate(session, session.val_feed, stop, saves)
    laps.restart()


def _evaluate(session: Session, feed: ImageLoader, stop: Callable[[], str | None], saves: Saves) -> Iterator[Event]:
    state = session.state
    began = time.perf_counter()
    module, engine = session.evaluated_module, state.engine
    batches = _Until(feed, stop, session.clock)
    try:
        with session.clock.within("evaluation"):
            engine.broadcast_buffers(module)
            classes = len(session.data.classes)
            told = evaluate_module(module, batches, state.policy, session.input, classes, total_of=engine.sum)
            stopped = float(engine.sum(torch.tensor(float(batches.was_stopped), device=engine.device)))
    except Exception:
        # The updates are sound whatever became of the validation data; other ranks are not asked for their part.
        with contextlib.suppress(SteadyError):
            require_sound_weights(session)
            if engine.world.size == 1:
                yield from saves.save()
        raise
    if stopped:
        return
    state.evaluated = session.epoch
    yield Evaluated(
        step=state.cursor.step,
        epoch=session.epoch,
        n=told.n,
        loss=told.loss,
        top1=told.top1,
        top5=told.top5,
        seconds=time.perf_counter() - began,
        weights="model" if state.ema is None else "ema",
    )
    if told.top1 > state.best and math.isfinite(told.loss):
        state.best = told.top1
        export(session, "best.safetensors")
    if state.cursor.step == session.steps and not math.isfinite(told.loss):
        raise diverged(f"the loss on the validation images is {told.loss}", session)


def is_due(session: Session) -> bool:
    """Whether there is something to evaluate on, and it is time."""
    if session.val_feed is None:
        return False
    period, cursor = session.recipe.every.evaluate_epochs, session.state.cursor
    passed = _periods(session.epoch, period) > _periods(session.state.evaluated, period)
    return passed or (cursor.step == session.steps and session.state.evaluated < session.epoch)


def _periods(epoch: float, period: float) -> int:
    return math.floor(epoch / period + 1e-9)  # 0.3 / 0.1 is 2.9999999999999996


class _Until:
    """The batches of an evaluation, until somebody asks to stop."""

    def __init__(self, feed: ImageLoader, stop: Callable[[], str | None], clock: Clock) -> None:
        self._feed, self._stop, self._clock = feed, stop, clock
        self.was_stopped = False

    def __iter__(self) -> Iterator[Batch]:
        for batch in self._feed:
            self._clock.to(self._clock.bucket)  # whoever watches sees that it moves
            if self._stop():
                self.was_stopped = True
                return
            yield batch
