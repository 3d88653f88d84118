"""Checkpoints and weights: when they are due, and what may be written at all."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from steadytrain.errors import DivergedError
from steadytrain.events import Saved
from steadytrain.training import checkpoints
from steadytrain.training.log_window import Laps, settled_loss
from steadytrain.training.session import Session


class Saves:
    """When a checkpoint is due by the recipe's steps or minutes, and the saving itself."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._time = time.monotonic()

    def due_by_steps(self) -> bool:
        """By the recipe's steps."""
        every, step = self._session.recipe.every, self._session.state.cursor.step
        return every.save_steps is not None and step % every.save_steps == 0

    def due(self) -> bool:
        """By time: of several ranks the first one's."""
        minutes = self._session.recipe.every.save_minutes
        return self._session.is_first and time.monotonic() - self._time >= minutes * 60

    def save(self) -> Iterator[Saved]:
        """The first rank writes what all have gathered."""
        session = self._session
        step = session.state.cursor.step
        place = session.run.checkpoints
        with session.clock.within("checkpoint"):
            state = session.checkpoint()
            if not session.is_first:
                return
            written = checkpoints.save(place, step, state, keep=session.recipe.every.keep)
        self._time = time.monotonic()
        name = str(written.path.relative_to(session.run.directory))
        yield Saved(step=step, path=name, bytes=written.bytes, seconds=written.seconds)


def save(session: Session, laps: Laps, saves: Saves) -> Iterator[Saved]:
    """A checkpoint of a state that can be trained on, or DivergedError."""
    require_number(settled_loss(session, laps), session)
    require_sound_weights(session)
    yield from saves.save()
    laps.restart()


def require_number(loss: float, session: Session) -> None:
    """Raises DivergedError for a loss that is none."""
    if not math.isfinite(loss):
        raise diverged(f"the loss is {loss}", session)


def require_sound_weights(session: Session) -> None:
    """Refuse to save what cannot be trained on: a loss tells of an update only when the next one is made."""
    with session.clock.within("checkpoint"):
        finite = torch.stack([parameter.isfinite().all() for parameter in session.state.module.parameters()])
        is_sound = bool(finite.all())
    if not is_sound:
        raise diverged("some weights are no numbers any more", session)


def diverged(what: str, session: Session) -> DivergedError:
    """What is no number any more, and what to do about it."""
    step, optim = session.state.cursor.step, session.recipe.optim
    lr = optim.scaled_lr(session.recipe.batch_size) * session.rate(step - 1)
    return DivergedError(
        f"{what} at step {step} (learning rate {lr:g}): lower the learning rate (--lr), warm up longer"
        " (--set optim.warmup_epochs=...) or clip (--set optim.clip_norm=1); what was saved before is intact"
    )


def export(session: Session, name: str) -> Path:
    """Write the weights that are evaluated (the average, if there is one) into the run's folder, as the first rank."""
    path = session.run.directory / name
    if session.is_first:
        with session.clock.within("checkpoint"):
            checkpoints.write_weights(path, session.evaluated_module.state_dict(), session.about())
    return path
