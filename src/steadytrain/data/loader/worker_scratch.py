"""What a thread of the feed has for itself: memory to work in, and the encoded images that it has copied there."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np

from steadytrain.data.loader.decode import Scratch
from steadytrain.data.loader.gather import Canvas
from steadytrain.data.loader.jpeg import Pixels
from steadytrain.data.loader.sampler import Ints
from steadytrain.data.loader.times import Times
from steadytrain.data.packing.pixels import BadImageError
from steadytrain.errors import FeedError

READ_BYTES = 4 * 2**20  # encoded bytes that one thread reads at a time, unless one image has more


@dataclass(slots=True)
class WorkerScratch:
    """One thread's workspace."""

    times: Times = field(default_factory=Times)
    scratch: Scratch = field(default_factory=Scratch)
    canvas: Canvas = field(default_factory=Canvas)
    raw: Scratch = field(default_factory=partial(Scratch, 2 * READ_BYTES))
    record: int = -1  # what it is working at, for messages
    closed: threading.Event = field(default_factory=threading.Event)  # nobody wants what it makes any more

    def turn_to(self, record: int) -> None:
        """Work at this record next. Raises FeedError where the feed was closed: a piece need not be finished then."""
        self.record = record
        if self.closed.is_set():
            raise FeedError("the feed was closed")


class Raw(NamedTuple):
    """Encoded images, copied to a thread's memory one behind the other, at the offsets ``at`` (int64[n + 1])."""

    memory: Pixels
    at: Ints
    images: list[Pixels | BadImageError]


def copied(views: list[memoryview | BadImageError], size: int, desk: WorkerScratch, since: float) -> Raw:
    """Copy bytes to the thread's own memory, which were asked for since some time.

    numpy lets go of the interpreter's lock while it copies: a page that has to come from a disk stalls only this
    thread, and its seconds count as reading.
    """
    memory, ends, copies = desk.raw.take(size), [0], list[Pixels | BadImageError]()
    for view in views:
        start, end = ends[-1], ends[-1] + (0 if isinstance(view, BadImageError) else len(view))
        ends.append(end)
        if isinstance(view, BadImageError):
            copies.append(view)
            continue
        copies.append(memory[start:end])
        memory[start:end] = np.frombuffer(view, dtype=np.uint8)
    desk.times.bytes += size
    desk.times.read_seconds += time.perf_counter() - since
    return Raw(memory, np.array(ends), copies)
