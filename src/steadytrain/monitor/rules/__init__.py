"""The causes that a verdict can name, found by pure functions ``Evidence -> Iterator[Cause]``, a file a topic.

A cause is a model with numbers in it: what the fault costs now, and what the one change would leave of it. What the
evidence does not show is not guessed: then there is no cause, and the diagnosis lists what is not measurable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.rules.cause import LEAST as LEAST
from steadytrain.monitor.rules.cause import LEAST_SECONDS
from steadytrain.monitor.rules.cause import Cause as Cause
from steadytrain.monitor.rules.devices import gpu, ranks
from steadytrain.monitor.rules.host import host_code, unexplained
from steadytrain.monitor.rules.interruptions import (
    add_disk_waits,
    checkpoints,
    compilation,
    evaluations,
    log_lines,
    lost_work,
    probe,
    starts,
    stops,
)
from steadytrain.monitor.rules.loader import epoch_gap, feed
from steadytrain.monitor.rules.processor import compute_threads, cores, memory
from steadytrain.monitor.rules.servers import servers
from steadytrain.monitor.rules.update import fixed_costs, growth, precision, sync

RULES: tuple[Callable[[Evidence], Iterator[Cause]], ...] = (
    *(feed, epoch_gap, cores, compute_threads, memory, host_code, growth, fixed_costs, precision, sync),
    *(gpu, ranks, servers, evaluations, checkpoints, log_lines, lost_work, stops, starts, probe, compilation),
)


def find_causes(evidence: Evidence) -> list[Cause]:
    """Return the causes that are worth a person's time, and those that would be on another device."""
    causes = add_disk_waits(evidence, [cause for rule in RULES for cause in rule(evidence)])
    causes = unexplained(evidence, causes)
    least = max(LEAST, LEAST_SECONDS / evidence.ledger.wall_seconds if evidence.ledger.wall_seconds > 0 else LEAST)
    return [cause for cause in causes if cause.share >= least or cause.name == "sync"]
