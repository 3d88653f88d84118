"""All causes, one table."""

from __future__ import annotations

from collections.abc import Callable

from steadytrain.watch.causes.beside import checkpoint, evaluation, logging
from steadytrain.watch.causes.cause import Cause
from steadytrain.watch.causes.devices import shared, throttled, transfer
from steadytrain.watch.causes.feed import augment, decode, epoch_gap, gather, threads, waiting
from steadytrain.watch.causes.memory import allocator, memory
from steadytrain.watch.causes.processor import affinity, noisy_neighbour, oversubscription, quota, undersubscription
from steadytrain.watch.causes.ranks import communication, straggler
from steadytrain.watch.causes.restarts import compilation, recompilation, restart, startup
from steadytrain.watch.causes.storage import first_epoch, storage
from steadytrain.watch.causes.update import batch_size, launch, model_waits, optimizer, precision, sync
from steadytrain.watch.evidence import Evidence

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
