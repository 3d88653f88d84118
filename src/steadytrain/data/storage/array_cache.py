"""Arrays that follow from files, made once a machine: they lie in the cache, and all processes map them.

Of several processes that need an array at once, one makes it while the others wait for its lock, which falls however
that process ends. Where the cache cannot be written, each makes its own.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.errors import StorageError, storage_errors
from steadytrain.files import locked, replacing
from steadytrain.machine.facts import require_cache_folder

UNUSED_SECONDS = 30 * 86400
"""Arrays that nobody has mapped for so long are removed."""

_VERSION = 1  # of how arrays are made of files: another one leaves those of before unread
_LEAST_MAPPED = 2**20  # bytes; a smaller array is read, since a mapped one keeps its file open


def file_state(file: Path | int) -> tuple[int, ...] | None:
    """Return size, times and inode of a file, by its path or number, which change with it; None: there is none."""
    try:
        status = os.stat(file)  # noqa: PTH116 - or by its number
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


class ArrayCache:
    """The arrays of one state of a file, by name. Threads and processes may share them.

    Args:
        name: that the arrays have in the cache, for people.
        state: returns what tells this file, in this state, from any other, by its ``repr``. Where the answer is another
            one after an array was made, that is not kept.
    """

    def __init__(self, name: str, state: Callable[[], object]) -> None:
        self.fault = ""
        """Reason why arrays cannot be kept, as far as that was tried; empty: they can."""
        self.state, self._state = repr(state()), state
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", name)[-40:]
        self._stem = stem + "-" + hashlib.sha256(f"{_VERSION} {self.state}".encode()).hexdigest()[:24]

    def get(self, name: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Map or read an array, made first where it is not there. What ``make`` raises is raised, and nothing kept."""
        with ExitStack() as stack:
            try:
                folder = require_cache_folder() / "records"
                with storage_errors(folder):
                    file = folder / f"{self._stem}.{name}.npy"
                    if (array := _map(file)) is not None:
                        return array
                    folder.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(locked(folder / f".{file.name}.lock"))
                    if (array := _map(file)) is not None:  # another process has made it meanwhile
                        return array
            except StorageError as error:
                self.fault = str(error)
                stack.close()
                return make()
            array = make()
            if repr(self._state()) != self.state:  # it was replaced while it was read
                return array
            try:
                with storage_errors(folder):
                    with replacing(file) as part:
                        np.save(part, array)
                    _remove_unused(folder)
                    mapped = _map(file)
            except StorageError as error:
                self.fault, mapped = str(error), None
            return array if mapped is None else mapped


@cache
def _remove_unused(folder: Path) -> None:
    """Remove, once a process, what nobody has used for long; of earlier states, too: a process may have mapped them."""
    for file in folder.iterdir():
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > UNUSED_SECONDS:
                file.unlink()


def _map(file: Path) -> NDArray[Any] | None:
    """Map an array, or read a small one; None where there is none. Raises OSError: the system cannot."""
    try:
        is_large = file.stat().st_size > _LEAST_MAPPED
        array: NDArray[Any] = np.load(file, mmap_mode="r" if is_large else None).view(np.ndarray)
    except (FileNotFoundError, ValueError, EOFError):  # the last ones: it is damaged
        return None
    array.setflags(write=False)
    with suppress(OSError):  # a cache that is there to be read only
        os.utime(file)
    return array
