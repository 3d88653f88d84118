"""All causes, one table."""

from __future__ import annotations

from collections.abc import Callable

from steadytrain.monitor.evidence import Evidence
from steadytrain.monitor.rules.beside import checkpoint, evaluation, logging
from steadytrain.monitor.rules.cause import Cause
from steadytrain.monitor.rules.devices import shared, throttled, transfer
from steadytrain.monitor.rules.feed import augment, decode, epoch_gap, gather, threads, waiting
from steadytrain.monitor.rules.memory import allocator, memory
from steadytrain.monitor.rules.processor import affinity, noisy_neighbour, oversubscription, quota, undersubscription
from steadytrain.monitor.rules.ranks import communication, straggler
from steadytrain.monitor.rules.restarts import compilation, recompilation, restart, startup
from steadytrain.monitor.rules.storage import first_epoch, storage
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
