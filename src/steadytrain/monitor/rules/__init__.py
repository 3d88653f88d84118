"""The causes that a verdict can name, found by pure functions ``Evidence -> Iterator[Cause]``, a file a topic.

A cause is a model with numbers in it: what the fault costs now, and what the one change would leave of it. What the
evidence does not show is not guessed: then there is no cause, and the diagnosis lists what is not measurable. A rule is
one :class:`VerdictRule` in the ``RULES`` of its file; other packages add theirs by entry points of :data:`GROUP`.
"""

from __future__ import annotations

import warnings
from functools import cache
from importlib.metadata import entry_points

from steadytrain.config.factories import load_entry_point
from steadytrain.errors import InputError
from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.rules import devices, host, interruptions, loader, processor, servers, update
from steadytrain.monitor.rules.cause import LEAST as LEAST
from steadytrain.monitor.rules.cause import LEAST_SECONDS
from steadytrain.monitor.rules.cause import Cause as Cause
from steadytrain.monitor.rules.cause import VerdictRule as VerdictRule

GROUP = "steadytrain.rules"
TOPICS = (loader, processor, host, update, devices, servers, interruptions)


@cache
def rules() -> tuple[VerdictRule, ...]:
    """Return all rules: ours, and those of other packages. One that cannot be used is left out, with a warning."""
    others = list[VerdictRule]()
    for point in entry_points(group=GROUP):
        try:
            others.append(load_entry_point(point, VerdictRule))
        except InputError as error:
            warnings.warn(f"the rule {error}", stacklevel=2)
    return (*(rule for topic in TOPICS for rule in topic.RULES), *others)


def find_causes(evidence: Evidence) -> list[Cause]:
    """Return the causes that are worth a person's time, and those that would be on another device."""
    causes = interruptions.add_disk_waits(evidence, [cause for rule in rules() for cause in rule.find(evidence)])
    causes = host.unexplained(evidence, causes)
    least = max(LEAST, LEAST_SECONDS / evidence.ledger.wall_seconds if evidence.ledger.wall_seconds > 0 else LEAST)
    return [cause for cause in causes if cause.share >= least or cause.name == "sync"]
