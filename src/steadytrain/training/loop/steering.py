"""Decisions of a caller's function about a run that trains: to end it, or to change its learning rate.

A decision is kept by the run, not by the caller. It is written to the recipe (``every.rates``), with the number of the
first update that it holds for, before that update is made; and to the log, as a :class:`Steered` event. So the run
continues alike after an interruption, with or without the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from steadytrain.errors import InputError, describe_type
from steadytrain.events import Event, EventLog, Steered
from steadytrain.run import Run
from steadytrain.training.session.session import Session


@dataclass(frozen=True)
class Stop:
    """The decision to end a run now, with a last evaluation, as at its planned end; ``why``: for its log."""

    why: str = ""


@dataclass(frozen=True)
class SetRate:
    """The decision to train at ``times`` the schedule's learning rate from the next update on; 1: as planned."""

    times: float
    why: str = ""


OnEvent = Callable[[Event], Stop | SetRate | None]
"""A caller's function. It gets each event after it was written, except its own decisions and the end of the run."""


def steered(session: Session) -> Session:
    """Return the session with the rates that have been decided on so far."""
    recipe, rates = session.timeline.recipe, session.ending.rates
    if rates == recipe.every.rates:
        return session
    recipe = replace(recipe, every=replace(recipe.every, rates=rates))
    return replace(session, timeline=replace(session.timeline, recipe=recipe))


def decide(session: Session, log: EventLog, on_event: OnEvent, event: Event) -> Iterator[Event]:
    """Ask a caller's function about an event; write down what it decides, and yield that as an event.

    Where a resumed run makes updates again, its answer is ignored: the recipe has those decisions. Raises InputError
    for an answer that is no decision.
    """
    answer = on_event(event)
    if answer is None:
        return
    if not isinstance(answer, Stop | SetRate):
        raise InputError(f"on_event returned {describe_type(answer)}; it must be st.Stop, st.SetRate or None")
    is_stop, ending = isinstance(answer, Stop), session.ending
    times: Any = getattr(answer, "times", 0.0)  # a stop is written as a factor of 0
    times = times.item() if hasattr(times, "item") else times  # of NumPy or torch
    if not is_stop and not (isinstance(times, int | float) and 0 < times < math.inf):
        raise InputError(f"st.SetRate has times={times!r}; it must be a number above 0")
    # A stop may come too late for the last evaluation, with which a run ends: one more update is made then.
    first = session.state.cursor.step + 1 + (is_stop and ending.is_settled)
    last, factor = ending.rates[-1] if ending.rates else (0, 1.0)
    decision = first, float(times)
    is_decided = first < last or (first == last and (not factor or decision in ending.rates))  # the last one counts
    if session.is_done or times == factor or is_decided:
        return
    ending.rates = (*ending.rates, decision)
    Run.create(session.run.directory, session.run.recipe.with_({"every.rates": ending.rates}))
    if is_stop:
        ending.last_step = first - 1
    yield log.append(Steered(step=first, what="stop" if is_stop else "rate", times=float(times), why=str(answer.why)))
