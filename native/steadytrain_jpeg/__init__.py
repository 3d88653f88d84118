"""Restart markers for JPEG files, without decoding them: every pixel stays what it is.

>>> restart(b"no JPEG", 4) is None
True
"""

from __future__ import annotations

import ctypes
import sys
import threading
from pathlib import Path
from typing import Any

__all__ = ["restart"]
__version__ = "0.1.0"

_NAME = {"win32": "steadytrain_jpeg.dll", "darwin": "libsteadytrain_jpeg.dylib"}
_FUNCTIONS = 1  # the version of those that are called here
_ROOM = 4096  # bytes for segments that are added


class _Desk(threading.local):
    """What each thread works with."""

    def __init__(self) -> None:
        self.work = ctypes.create_string_buffer(_library.steadytrain_jpeg_workspace())
        self.out = self.clean = ctypes.create_string_buffer(0)

    def fit(self, size: int, room: int) -> None:
        """Have so many bytes to read and to write."""
        if len(self.clean) < size + 16:
            self.clean = ctypes.create_string_buffer(size + size // 4 + 16)
        if len(self.out) < room:
            self.out = ctypes.create_string_buffer(room + room // 4)


def restart(data: bytes, interval: int) -> bytes | None:
    """The same JPEG with a restart marker after every ``interval`` MCUs. May be called from several threads at once.

    Args:
        data: a baseline JPEG (Huffman coded, sequential, 8 bits) of one scan, grey or of three colours.
        interval: 1 to 65535 MCUs. Markers that ``data`` has are replaced.

    Returns:
        A file that decodes to the same pixels, all other segments included; None for a JPEG of another kind, and for
        one that is damaged.

    Raises:
        ValueError: ``interval`` is out of range.
    """
    if not 1 <= interval <= 0xFFFF:
        raise ValueError(f"interval is {interval}; it must be from 1 to 65535")
    # A marker takes two bytes and fills up one. Differences from zero may take a few more.
    room = len(data) + len(data) // 2 + _ROOM
    made = _restart(data, interval, room)
    if made == _NO_ROOM:
        made = _restart(data, interval, 8 * room)
    return ctypes.string_at(_desk.out, made) if made > 0 else None


_NO_ROOM = -3


def _restart(data: bytes, interval: int, room: int) -> int:
    _desk.fit(len(data), room)
    made: int = _library.steadytrain_jpeg_restart(
        data, len(data), interval, _desk.out, len(_desk.out), _desk.clean, _desk.work
    )
    return made


def _load() -> Any:
    path = Path(__file__).with_name(_NAME.get(sys.platform, "libsteadytrain_jpeg.so"))
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"cannot load {path}: {error}") from error
    if (found := library.steadytrain_jpeg_version()) != _FUNCTIONS:
        raise ImportError(f"{path} has functions of version {found}, not {_FUNCTIONS}: install steadytrain-jpeg anew")
    library.steadytrain_jpeg_workspace.restype = ctypes.c_size_t
    library.steadytrain_jpeg_restart.restype = ctypes.c_ssize_t
    pointer, size = ctypes.c_char_p, ctypes.c_size_t
    library.steadytrain_jpeg_restart.argtypes = [pointer, size, ctypes.c_uint32, pointer, size, pointer, pointer]
    return library


_library = _load()
_desk = _Desk()
