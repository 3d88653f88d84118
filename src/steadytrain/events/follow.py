"""Reading an event log while another process writes it: each look gives the events that came since the last one.

>>> import pathlib, tempfile
>>> path = pathlib.Path(tempfile.mkdtemp()) / "events.jsonl"
>>> tail = Tail(path)
>>> [event.kind for event in tail.read()]
[]
>>> _ = path.write_text('{"v":1,"kind":"Noticed","message":"a"}\\n{"v":1,"kind":"Not')
>>> [event.kind for event in tail.read()]
['Noticed']
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from steadytrain.events import Event, from_json

CHUNK_BYTES = 1 << 20
HEAD_BYTES = 256


class Tail:
    """The end of a growing event log; it only reads.

    A torn last line waits for its other half; a line in the middle that is no JSON is passed over. A file that was
    replaced, or cut shorter than what was read of it, is read anew from its beginning: :attr:`generation` counts up,
    and whoever keeps what the events told drops it. Cutting off the torn last line alone, as a restart does, is no
    such thing.

    Args:
        path: the ``.jsonl`` file; it need not be there yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.generation = 0
        self.offset = 0  # after the last whole line that was read
        self.size = 0  # of the file when it was last looked at
        self._head = b""  # its first bytes: by them another file of the same name is known

    def read(self) -> Iterator[Event]:
        """The events since the last reading, oldest first; none where there is no file.

        Whoever stops in between goes on from the next chunk, not from the next event: take them all, or use
        :meth:`chunks`.
        """
        for chunk in self.chunks():
            yield from chunk

    def chunks(self) -> Iterator[list[Event]]:
        """The same in lists of some thousand, each taken in before the next is read."""
        try:
            with self.path.open("rb") as file:
                self._begin_anew_if_replaced(file)
                yield from self._lines(file)
        except FileNotFoundError:
            if self.offset:
                self._begin_anew()

    def _lines(self, file: BinaryIO) -> Iterator[list[Event]]:
        file.seek(self.offset)
        torn = b""
        while data := file.read(CHUNK_BYTES):
            whole, newline, rest = (torn + data).rpartition(b"\n")
            torn = rest
            if newline:
                if not self.offset:
                    self._head = (whole + newline)[:HEAD_BYTES]
                self.offset += len(whole) + 1
                yield [event for line in whole.split(b"\n") if (event := from_json(line)) is not None]

    def _begin_anew_if_replaced(self, file: BinaryIO) -> None:
        self.size = file.seek(0, 2)
        file.seek(0)
        if self.size < self.offset or file.read(len(self._head)) != self._head:
            self._begin_anew()

    def _begin_anew(self) -> None:
        self.generation += 1
        self.offset = 0
        self._head = b""
