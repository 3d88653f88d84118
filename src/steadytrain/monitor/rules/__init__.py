"""The causes that a verdict can name, each a pure function ``Evidence -> Cause | None``, a file a topic.

A cause is a model with numbers in it: what the fault costs now, and what the one change would leave of it. What the
evidence does not show is not guessed: then there is no cause, and the diagnosis lists what is not measurable.
"""

from __future__ import annotations

from collections.abc import Callable

from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.rules.cause import LEAST as LEAST
from steadytrain.monitor.rules.cause import Cause as Cause
from steadytrain.monitor.rules.gpu import shared, throttled, transfer
from steadytrain.monitor.rules.interruptions import (
    checkpoint,
    compilation,
    evaluation,
    logging,
    recompilation,
    restart,
    startup,
)
from steadytrain.monitor.rules.loader import augment, decode, epoch_gap, first_epoch, gather, storage, threads, waiting
from steadytrain.monitor.rules.processor import (
    affinity,
    allocator,
    memory,
    noisy_neighbour,
    oversubscription,
    quota,
    undersubscription,
)
from steadytrain.monitor.rules.ranks import communication, straggler
from steadytrain.monitor.rules.update import batch_size, launch, model_waits, optimizer, precision, sync

RULES: tuple[Callable[[Evidence], Cause | None], ...] = (
    *(storage, first_epoch, threads, decode, augment, gather, waiting, epoch_gap),
    *(affinity, quota, oversubscription, undersubscription, noisy_neighbour),
    *(memory, allocator),
    *(model_waits, launch, batch_size, precision, optimizer, sync),
    *(transfer, throttled, shared),
    *(communication, straggler),
    *(evaluation, checkpoint, logging),
    *(restart, startup, compilation, recompilation),
)
