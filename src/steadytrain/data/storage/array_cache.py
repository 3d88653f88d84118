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
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from steadytrain.errors import StorageError
from steadytrain.files import locked, replacing
from steadytrain.machine.facts import require_cache_folder

UNUSED_SECONDS = 30 * 86400
"""Arrays that nobody has mapped for so long are removed."""


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
        path: of the file: arrays of its earlier states are removed.
        state: returns what tells this state from any other, by its ``repr``. Where the answer is another one after an
            array was made, that is not kept.
    """

    def __init__(self, path: Path, state: Callable[[], object]) -> None:
        self.fault = ""
        """Why arrays cannot be kept, as far as that was tried; empty: they can."""
        self._state, self._before = state, repr(state())
        stem = re.sub(r"[^A-Za-z0-9._-]+", "_", path.stem)[-40:]
        self._family = f"{stem}-{hashlib.sha256(str(path.absolute()).encode()).hexdigest()[:12]}"
        self._key = hashlib.sha256(self._before.encode()).hexdigest()[:16]

    def get(self, name: str, make: Callable[[], NDArray[Any]]) -> NDArray[Any]:
        """Map an array; make it first where it is not there. What ``make`` raises is raised, and nothing kept."""
        with ExitStack() as stack:
            try:
                folder = require_cache_folder() / "records"
                file = folder / f"{self._family}-{self._key}.{name}.npy"
                if (array := _map(file)) is not None:
                    return array
                folder.mkdir(parents=True, exist_ok=True)
                stack.enter_context(locked(folder / f".{self._family}.{name}.lock"))
            except (OSError, StorageError) as error:
                self.fault = str(error)
                return make()
            if (array := _map(file)) is not None:  # another process has made it meanwhile
                return array
            array = make()
            if repr(self._state()) != self._before:  # it was replaced while it was read
                return array
            try:
                with replacing(file) as part:
                    np.save(part, array)
                self._remove_others(file, name)
            except (OSError, StorageError) as error:
                self.fault = str(error)
            mapped = _map(file)
            return array if mapped is None else mapped

    def _remove_others(self, file: Path, name: str) -> None:
        """Remove this array of earlier states, and whatever nobody uses any more."""
        for other in file.parent.iterdir():
            is_earlier = other.name.startswith(f"{self._family}-") and other.name.endswith(f".{name}.npy")
            with suppress(OSError):
                if other != file and (is_earlier or time.time() - other.stat().st_mtime > UNUSED_SECONDS):
                    other.unlink()


def _map(file: Path) -> NDArray[Any] | None:
    """Map an array; None where there is none."""
    try:
        array: NDArray[Any] = np.load(file, mmap_mode="r").view(np.ndarray)
    except (FileNotFoundError, ValueError):
        return None
    with suppress(OSError):  # a cache that is there to be read only
        os.utime(file)
    return array
