"""The verdict on a foreign process: which of the classic causes fit what was seen, and what could not be seen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steadytrain.monitor.process_watch import hindered, starved
from steadytrain.monitor.process_watch.cause import Cause as Cause
from steadytrain.monitor.process_watch.cause import works
from steadytrain.monitor.process_watch.facts import Moment
from steadytrain.monitor.process_watch.rhythm import Rhythm
from steadytrain.monitor.process_watch.seen import Seen, seen

LEAST_SECONDS = 2.0
_LEAST_SHARE = 0.03
_OUTSIDE = "loss, images per second and which line of code runs (from outside only the system's view is visible)"


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What was seen, the causes that fit, the likeliest first and never none, and what is not measurable here."""

    seen: Seen | None
    causes: tuple[Cause, ...]
    not_measurable: tuple[str, ...]

    @property
    def rhythm(self) -> Rhythm | None:
        """The oscillation, if there is one."""
        return None if self.seen is None else self.seen.rhythm


def read(moments: Sequence[Moment]) -> Reading:
    """Judge a watch.

    Args:
        moments: in the order of time; the whole watch or its last minute.
    """
    if sum(one.seconds for one in moments) < LEAST_SECONDS:
        short = Cause(name="unknown", share=0.0, sentence=f"watched for less than {LEAST_SECONDS:.0f} s: too short")
        return Reading(seen=None, causes=(short,), not_measurable=(_OUTSIDE,))
    told = seen(moments)
    found = [cause for rule in (*hindered.ALL, *starved.ALL) if (cause := rule(told)) is not None]
    found = [cause for cause in found if cause.share >= _LEAST_SHARE or cause.name in ("compute", "busy")]
    ended = [cause for cause in found if cause.name in ("stopped", "hung")]  # they explain all the rest
    ordered = sorted(ended or found, key=lambda cause: -round(cause.share, 2))
    return Reading(seen=told, causes=tuple(ordered) or (_busy(told),), not_measurable=(*told.missing, _OUTSIDE))


def _busy(told: Seen) -> Cause:
    sentence = f"{works(told)}, on {told.cpu:.1f} of {told.machine.cores} cores: busy, nothing obvious"
    return Cause(name="nothing", share=0.0, sentence=sentence)
