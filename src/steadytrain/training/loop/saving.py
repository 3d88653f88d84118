"""Save checkpoints and weights after an update, and only what can be trained on."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

import torch
from torch import nn

from steadytrain.events import Saved
from steadytrain.training.inference.prior import weighting
from steadytrain.training.session.session import Session


def save(session: Session) -> None:
    """Have a checkpoint written of a state that can be trained on; all ranks gather it, the first one writes.

    Raises:
        DivergedError: loss or weights are not finite: a loss tells of an update only when the next one is made.
    """
    session.saver.is_hurried = False
    engine = session.state.engine
    if not engine.takes_part:
        return
    loss = settled_loss(session)
    require_finite(session, float(engine.sum(torch.tensor(loss, device=engine.device))))
    began = time.perf_counter()
    require_finite_weights(session)
    write_checkpoint(session, began)
    session.laps.restart()


def write_checkpoint(session: Session, began: float) -> None:
    """Have a checkpoint written, whatever the weights are; training pauses for it since ``began``."""
    state, recipe = session.state, session.recipe
    with session.clock.within("checkpoint"):
        if (step := state.engine.collect()) is not None:
            state.cursor.step, state.cursor.position = step, step * recipe.batch_size
        about = {"digest": session.run.recipe.digest, "model": session.built.name, "machine": session.started.machine}
        about |= {name: session.data.about()[name] for name in ("train_digest", "val_digest")}
        saved = state.state_dict() | {"about": about}
        if session.is_first or state.engine.is_sharded:
            session.saver.save(state.cursor.step, saved, began)


def written(session: Session) -> Iterator[Saved]:
    """Yield an event for each checkpoint that is on the disk since the last call. Raises what writing has raised."""
    for saved in session.saver.written():
        session.laps.lap()
        yield saved
        session.laps.restart()  # what its reader does is no part of an update


def finish_writing(session: Session) -> Iterator[Saved]:
    """Wait until all is written; events and errors as of :func:`written`."""
    with session.clock.within("checkpoint"):
        session.saver.wait()
    yield from written(session)


def export(session: Session, name: str) -> None:
    """Have the weights that are evaluated written into the run's folder, with what their users need."""
    built, data, recipe = session.built, session.data, session.recipe
    if not (session.is_first or session.state.engine.is_sharded):
        return
    about = {
        "model": {"name": built.name, "options": dict(recipe.model.options)},
        "classes": list(data.classes),
        "class_counts": data.class_counts.tolist(),
        "multi_label": data.num_labels is not None,
        "input": vars(session.input),
        "licence": built.licence,
        "digest": session.run.recipe.digest,
        "step": session.state.cursor.step,
    }
    if built.symbol:
        about["symbol"] = built.symbol
    if data.is_unnamed:
        about["unnamed"] = True
    if weighted := weighting(recipe, session.state.cursor.step):
        about["weighting"] = weighted
    with session.clock.within("checkpoint"):
        session.saver.export(name, session.evaluated_module.state_dict(), about)


def settled_loss(session: Session) -> float:
    """Return the sum of losses since the last log line, when the device has done what the host had asked for."""
    loss = session.state.meters.loss()
    session.laps.lap()  # or those steps would be counted with the evaluation or the saving that follows
    return loss


def require_finite(session: Session, loss: float) -> None:
    """Raise DivergedError for a loss that is not finite: one of all ranks, which raise together."""
    if not math.isfinite(loss):
        raise session.diverged(f"the loss is {loss}")


def require_finite_weights(session: Session, module: nn.Module | None = None) -> None:
    """Raise DivergedError on all ranks for weights of any that are not finite, of the network or of ``module``."""
    with session.clock.within("checkpoint"), torch.no_grad():
        engine, parameters = session.state.engine, (module or session.state.module).parameters()
        values = [engine.own_values(parameter) for parameter in parameters]
        # A sum is finite only where all values are. It takes a tenth of the time; of large ones it overflows.
        is_finite = bool(torch.stack([value.sum().isfinite() for value in values]).all()) or all(
            bool(value.isfinite().all()) for value in values
        )
        num_bad = float(engine.sum(torch.tensor(float(not is_finite), device=engine.device)))
    if num_bad:
        raise session.diverged("some weights are NaN or infinite")
