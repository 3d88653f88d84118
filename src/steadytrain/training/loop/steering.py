"""What a caller decides by a run's events: to end it, or to change its rate.

A decision is no state of the caller's: it is written to the run's recipe (``every.rates``) with the update that it is
for, before that update is made, and as an event. Whoever resumes the run does the same, with or without the function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

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
"""Is called with each event of the run but the last, and those of its decisions, after it was written."""


def steered(session: Session) -> Session:
    """Return a session whose rates are those that were decided on up to here."""
    recipe, rates = session.timeline.recipe, session.ending.rates
    if rates == recipe.every.rates:
        return session
    recipe = replace(recipe, every=replace(recipe.every, rates=rates))
    return replace(session, timeline=replace(session.timeline, recipe=recipe))


def decide(session: Session, log: EventLog, on_event: OnEvent, event: Event) -> Iterator[Event]:
    """Ask a caller about an event, and write down what is decided.

    What it says where the run has decided already, before it was interrupted, is not heard.

    Raises:
        InputError: it returned something else than a decision.
    """
    answer, ending, step = on_event(event), session.ending, session.state.cursor.step
    if answer is None:
        return
    is_stop, times = isinstance(answer, Stop), getattr(answer, "times", 0.0)
    if not isinstance(answer, Stop | SetRate):
        raise InputError(f"on_event returned {describe_type(answer)}; it must be st.Stop, st.SetRate or None")
    times = times.item() if hasattr(times, "item") else times  # of NumPy or torch
    if not is_stop and not (isinstance(times, int | float) and 0 < times < math.inf):
        raise InputError(f"st.SetRate has times={times!r}; it must be a number above 0")
    first = step + 1 + (is_stop and ending.is_settled)  # an update's last evaluation may be past
    last, factor = ending.rates[-1] if ending.rates else (0, 1.0)
    if session.is_done or times == factor or (first, is_stop) <= (last, not factor):  # a stop goes over a rate
        return
    ending.rates = (*ending.rates, (first, float(times)))
    Run.create(session.run.directory, session.run.recipe.with_({"every.rates": ending.rates}))
    if is_stop:
        ending.last_step = first - 1
    yield log.append(Steered(step=first, what="stop" if is_stop else "rate", times=float(times), why=str(answer.why)))
