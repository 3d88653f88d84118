"""What a feed and its process say to each other, through two pipes.

To the process: the number of an inherited file and of the slots in it, and a :class:`~steadytrain.feed.task.Task`, both
pickled; then single bytes. ``BEGIN`` (two int64 follow: start, and stop or -1) asks for the batches from a position on;
``RELEASE`` says that one was taken, so that another may be begun; ``WAKE`` that room is to be used as soon as there is
any; every other byte is the number of a slot whose memory is free again.

From the process: a :class:`Ticket` for each batch, in order, of which the images and ids lie in a slot; where there is
more to say (bad images, or the error that ended it all), that follows, pickled.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

RELEASE, BEGIN, WAKE = 255, 254, 253
MOST_SLOTS = 253
SPAN = struct.Struct("<qq")
TICKET = struct.Struct("<iii??xxqqqdddd")

READY, BATCH, BAD, ERROR = range(4)


class Ticket(NamedTuple):
    """A batch is in ``slot``; ``kind`` is what it is, or what follows in ``more`` bytes.

    ``is_steady``: all images are kept that are to be; ``is_shared``: for other processes, too; ``kept_bytes``: what
    they take. The rest is what the threads have done since the process began.
    """

    kind: int
    slot: int
    more: int
    is_steady: bool
    is_shared: bool
    kept_bytes: int
    images: int
    bytes: int
    read_seconds: float
    decode_seconds: float
    batch_seconds: float
    blocked_seconds: float
