"""Errors of the system that a test orders: the next reads of a file fail, or give a part of it."""

from __future__ import annotations

import builtins
import errno
import io
import os
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from steadytrain.data.storage import local_files

PASSING = (errno.ESTALE, errno.EIO, errno.EINTR, errno.EAGAIN, errno.ETIMEDOUT)


class _BadEntries:
    """The entries of a folder, of none of which the system can say whether it is a folder."""

    def __init__(self, entries: Any, number: int) -> None:
        self.entries, self.number = entries, number

    def __enter__(self) -> Iterator[_BadEntry]:
        return (_BadEntry(entry.name, entry.path, self.number) for entry in self.entries)

    def __exit__(self, *_: object) -> None:
        self.entries.close()


@dataclass
class _BadEntry:
    name: str
    path: str
    number: int

    def is_dir(self) -> bool:
        raise OSError(self.number, os.strerror(self.number))


class Faults:
    """Orders errors of this process's reads of files, whether by ``open`` or by ``os.pread``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._orders: dict[str, deque[Callable[[Any], Any]]] = {}
        self._scans: dict[str, deque[int]] = {}
        opened, pread, scandir = builtins.open, os.pread, os.scandir

        def open_(file: Any, *args: Any, **options: Any) -> Any:
            if (order := self._next(str(file))) is None:
                return opened(file, *args, **options)
            return order(opened(file, *args, **options))

        def pread_(file: int, size: int, offset: int) -> bytes:
            order = self._next(str(Path(f"/proc/self/fd/{file}").readlink()))
            return pread(file, size, offset) if order is None else bytes(order(None) or b"")

        def scandir_(path: Any) -> Any:
            entries = scandir(path)
            if orders := self._scans.get(str(path)):
                return _BadEntries(entries, orders.popleft())
            return entries

        monkeypatch.setattr(builtins, "open", open_)
        monkeypatch.setattr(io, "open", open_)  # of pathlib
        monkeypatch.setattr("steadytrain.data.storage.local_files.pread", pread_)
        monkeypatch.setattr(os, "scandir", scandir_)

    def fail(self, path: Path, number: int, count: int) -> None:
        """Let so many reads of a file fail with an error of this number."""

        def order(file: Any) -> Any:
            if file is not None:
                file.close()
            raise OSError(number, os.strerror(number), str(path))

        self._orders[str(path)] = deque([order] * count)

    def fail_once_open(self, path: Path, number: int, count: int) -> None:
        """Let a file be opened, and so many reads of it fail."""
        self.fail(path, number, count)
        self._orders[str(path)].appendleft(lambda file: file)

    def fail_reads(self, path: Path, number: int, count: int) -> None:
        """Let a file be opened so many times and not be read."""

        class Unread:
            def __init__(self, file: Any) -> None:
                self.seek, self.close = file.seek, file.close

            def read(self, size: int = -1) -> bytes:
                raise OSError(number, os.strerror(number))

        self._orders[str(path)] = deque([Unread] * count)

    def give_part(self, path: Path, count: int) -> None:
        """Let so many reads of a file give half of it."""

        class Part:
            def __init__(self, file: Any) -> None:
                self.file, self.seek, self.fileno = file, file.seek, file.fileno

            def __enter__(self) -> Part:
                return self

            def __exit__(self, *_: object) -> None:
                self.file.close()

            def read(self, size: int = -1) -> bytes | None:
                data = self.file.read(size)
                self.seek(0, os.SEEK_END)
                return bytes(data[: len(data) // 2])

        self._orders[str(path)] = deque([Part] * count)

    def fail_scan(self, folder: Path, number: int, count: int) -> None:
        """Let so many listings of a folder not say what is a folder in it."""
        self._scans[str(folder)] = deque([number] * count)

    @property
    def waiting(self) -> bool:
        """Whether an error that was ordered has not come yet."""
        return any(self._orders.values()) or any(self._scans.values())

    def _next(self, path: str) -> Callable[[Any], Any] | None:
        orders = self._orders.get(path)
        return orders.popleft() if orders else None


@pytest.fixture
def faults(monkeypatch: pytest.MonkeyPatch) -> Faults:
    """Errors to order; nothing waits between two tries."""
    monkeypatch.setattr(local_files, "PAUSES_SECONDS", (0.0,) * len(local_files.PAUSES_SECONDS))
    return Faults(monkeypatch)
