"""Where a feed's process puts down which batches are ready, and the training process looks without asking the system.

In shared memory, of which only the process writes: entries, of which the newest ``places`` stand there; how many there
have been (``made``); and what its threads have done. Of the other side there is a single flag: that it waits for an
entry, and wants a message by the pipe.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import fields

from steadytrain.data.loader.times import Times

_MADE, _WAITED_FOR, _ENTRIES = 0, 1, 2
_COUNTS = tuple(count.name for count in fields(Times))
_DID = struct.Struct(f"{3 + len(_COUNTS)}d")


class Board:
    """One side's view.

    Args:
        memory: of both, :func:`board_bytes` of it, zeros at first.
        places: for entries: at least as many as can be made and not yet read.
    """

    def __init__(self, memory: memoryview, places: int) -> None:
        split = 8 * (_ENTRIES + places)
        self._words = memory[:split].cast("q")
        self._did = memory[split:]
        self._places = places
        self._lock = threading.Lock()

    @property
    def made(self) -> int:
        """Entries that there have been: those up to there, and all that they speak of, can be read after this."""
        made = self._words[_MADE]
        self._fence()
        return made

    def __getitem__(self, number: int) -> int:
        return self._words[_ENTRIES + number % self._places]

    def put(self, entry: int) -> bool:
        """Add one; whether the other side waits for it, which it is then to be told."""
        made = self._words[_MADE]
        self._words[_ENTRIES + made % self._places] = entry
        self._fence()
        self._words[_MADE] = made + 1
        self._fence()
        waited_for = self._words[_WAITED_FOR] != 0
        if waited_for:
            self._words[_WAITED_FOR] = 0
        return waited_for

    def ask(self, number: int) -> bool:
        """Ask to be told of entry ``number``; False: it is there already."""
        self._words[_WAITED_FOR] = 1
        self._fence()
        return self._words[_MADE] <= number

    def did(self, times: Times) -> tuple[bool, bool, int]:
        """Bring the times up to date; whether all images are kept that are to be, for others, too, and their bytes."""
        is_steady, is_shared, kept_bytes, *counts = _DID.unpack_from(self._did)
        for name, count in zip(_COUNTS, counts, strict=True):
            setattr(times, name, count)
        times.images, times.bytes = int(times.images), int(times.bytes)
        return bool(is_steady), bool(is_shared), int(kept_bytes)

    def tell(self, times: Times, is_steady: bool, is_shared: bool, kept_bytes: int) -> None:
        """Put down what :meth:`did` is to say."""
        _DID.pack_into(self._did, 0, is_steady, is_shared, kept_bytes, *map(times.__getattribute__, _COUNTS))

    def _fence(self) -> None:
        # What a thread writes and reads reaches another core in another order on some processors (ARM), and a later
        # read may overtake a write on all of them. To give back a lock keeps all before it before it, to take one all
        # after it after it, and a lock is not taken before it was given back: nothing passes the two together.
        with self._lock:
            pass
        with self._lock:
            pass


def board_bytes(places: int) -> int:
    """Of memory that a board takes."""
    return 8 * (_ENTRIES + places) + _DID.size
