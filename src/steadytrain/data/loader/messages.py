"""What a feed and its process say to each other, through two pipes and on a board in the memory that they share.

To the process: the number of an inherited file and of the slots in it, and a ``Task``, both
pickled; then single bytes. ``BEGIN`` (two int64 follow: start, and stop or -1) asks for the batches from a position on;
``RELEASE`` says that one was taken, so that another may be begun; ``WAKE`` that room is to be used as soon as there is
any; every other byte is the number of a slot whose memory is free again.

From the process: an entry on the ``Board`` for each batch, in order: a kind, and the slot
that the batch lies in. Messages go through the pipe, pickled, each behind its length: first of all ``None``, or the
error that kept the process from starting; then what belongs to entries of another kind than ``BATCH``, and empty ones,
which only wake whoever waits for an entry.

The images of a slot are written anew only after a note that they are free: the pipe keeps the two in order.
"""

from __future__ import annotations

import struct

RELEASE, BEGIN, WAKE = 255, 254, 253
MOST_SLOTS = 253
SPAN = struct.Struct("<qq")
LENGTH = struct.Struct("<i")

# BAD: bad images were met in making it, and are told of. ERROR: no batch, and no further one: what is raised.
BATCH, BAD, ERROR = range(3)


def entry(kind: int, slot: int) -> int:
    """As it stands on the board."""
    return kind << 8 | slot


def meaning(entry: int) -> tuple[int, int]:
    """The kind and the slot."""
    return entry >> 8, entry & 255


def message(told: bytes = b"") -> bytes:
    """As it goes through the pipe."""
    return LENGTH.pack(len(told)) + told
