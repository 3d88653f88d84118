"""The native JPEG decoder: decode and resize parts of JPEG files, add restart markers without decoding.

A shared library (its Rust sources are in ``native/``) that installing steadytrain compiles where cargo is found. Where
it is missing, importing this module raises ModuleNotFoundError, and libjpeg-turbo does its work, with the same bytes.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import warnings
from pathlib import Path
from typing import Any, NamedTuple

VERSION = 6
"""The version of the library's functions as they are called here."""

_SPARE_BYTES = 4096  # bytes left free for segments that are added
MOST_ROOM = 32 * 2**20
"""Bytes that each thread works in, at most."""
_NO_ROOM = -3  # restart's answer where its output is too small
_RESIZE = struct.Struct("=8I2dI")
_MOST_PIXELS = 0xFFFF  # across or down, that a JPEG can have
_BEYOND = 96  # pixels around a part that are decoded with it, at most, and what is read behind them


class _Scratch(threading.local):
    """Buffers of each thread; those that hold files and pixels grow with them."""

    def __init__(self) -> None:
        self.work = ctypes.create_string_buffer(_library.steadytrain_workspace())
        self.tables = ctypes.create_string_buffer(_library.steadytrain_tables() if DECODES else 0)
        self.resizing = ctypes.create_string_buffer(_RESIZE.size + 8)
        self.out = self.clean = self.memory = self.pixels = ctypes.create_string_buffer(0)

    def fit(self, **sizes: int) -> None:
        """Enlarge the named buffers to the given numbers of bytes, where they are smaller."""
        for name, size in sizes.items():
            if len(getattr(self, name)) < size:
                spacious = max(size, min(size + size // 4, MOST_ROOM))
                setattr(self, name, ctypes.create_string_buffer(spacious))


def restart(data: bytes, interval: int) -> bytes | None:
    """Put a restart marker after every ``interval`` MCUs of a JPEG. May be called from several threads at once.

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
    scratch, result = _scratch, _NO_ROOM
    # A marker takes two bytes and fills up one. Differences from zero may take a few more.
    room = len(data) + len(data) // 2 + _SPARE_BYTES
    for size in (room, 8 * room):
        if result == _NO_ROOM:
            scratch.fit(clean=len(data) + 16, out=size)
            places = scratch.out, len(scratch.out), scratch.clean, scratch.work
            result = _library.steadytrain_restart(data, len(data), interval, *places)
    return ctypes.string_at(scratch.out, result) if result > 0 else None


def room_to_decode(width: Any, height: Any) -> Any:
    """Bytes that decoding a part of this size works in. Numbers, or arrays of numbers."""
    return 3 * (width + _BEYOND) * (height + _BEYOND)


def room_to_resize(high: Any, wide: Any, resized: Any, count: Any) -> Any:
    """Bytes that resizing works in. Numbers, or arrays of numbers.

    Args:
        high, wide: pixels that there are.
        resized: height and width that they become, together.
        count: columns of those that are wanted.
    """
    return (high + 2) * (3 * count + 64) + 3 * wide + 208 * resized + 8192


def decode(
    out: int,
    stride: int,
    data: int,
    size: int,
    part: tuple[int, int, int, int],
    *,
    channels: int = 3,
) -> bool:
    """Decode a part of a JPEG into memory. May be called from several threads at once; none waits for another.

    The pixels are those of libjpeg-turbo (``islow`` and fancy upsampling, its defaults), to the last bit. The file is
    read as far as the part needs it: what is damaged elsewhere is not noticed, but its end must be there.

    Args:
        out: address of the part's first pixel; its rows are ``stride`` bytes apart.
        stride: at least the part's width times ``channels``.
        data: address of the file's bytes.
        size: how many they are.
        part: left, top, right and bottom, in pixels.
        channels: 3 (RGB) or 1 (grey).

    Returns:
        Whether it was done. It is not, and what ``out`` points to is undefined, where :data:`DECODES` is false, for
        what is no sound baseline JPEG of one scan, grey or YCbCr (chroma sampled as luma, or half as often across, or
        half as often across and down), and for parts of more than some ten million pixels.
    """
    left, top, right, bottom = part
    width, height = right - left, bottom - top
    room = room_to_decode(width, height)
    is_possible = min(left, top) >= 0 and min(width, height) >= 1 and max(right, bottom) <= _MOST_PIXELS
    if not DECODES or room > MOST_ROOM or not is_possible:
        return False
    scratch = _scratch
    scratch.fit(clean=size + 16, memory=room)
    box = left, top, width, height, channels
    result: int = _library.steadytrain_decode(
        data, size, *box, out, stride, scratch.clean, scratch.memory, room, scratch.tables
    )
    return result == 0


class Axis(NamedTuple):
    """One direction of a resizing.

    Args:
        input: pixels that there are.
        output: pixels that they become.
        first, num: of those, the ones that are wanted.
        scale: pixels of the input for one of the output.
    """

    input: int
    output: int
    first: int
    num: int
    scale: float


def resize(
    out: int,
    stride: int,
    source: int,
    source_stride: int,
    down: Axis,
    across: Axis,
    *,
    cubic: bool = False,
) -> bool:
    """Resize RGB bytes, antialiased. May be called from several threads at once; none waits for another.

    To the last bit what torch's ``interpolate(..., antialias=True)`` makes of bytes on such a processor, which is
    Pillow's algorithm: across, then down, weights of 16 bits.

    Args:
        out: address of the first pixel of what is wanted; its rows are ``stride`` bytes apart.
        stride: in bytes.
        source: address of the first pixel; rows are ``source_stride`` bytes apart.
        source_stride: in bytes.
        down, across: the two directions.
        cubic: bicubic; else bilinear.

    Returns:
        Whether it was done. It is not, and what ``out`` points to is undefined, where :data:`DECODES` is false, for
        fewer than four pixels across, for more than 16 that count for one, and where it would take much memory.
    """
    if not DECODES:
        return False
    room = room_to_resize(down.input, across.input, down.output + across.output, across.num)
    if room > MOST_ROOM:
        return False
    scratch = _scratch
    scratch.fit(memory=room)
    _RESIZE.pack_into(scratch.resizing, 0, *down[:4], *across[:4], down.scale, across.scale, cubic)
    result: int = _library.steadytrain_resize(
        source, source_stride, out, stride, scratch.resizing, scratch.memory, room
    )
    return result == 0


def cut(
    out: int,
    side: int,
    data: int,
    size: int,
    squares: int,
    count: int,
    done: int,
    *,
    cubic: bool,
    rooms: tuple[int, int, int],
) -> float:
    """Make squares of several JPEGs: what :func:`decode` and :func:`resize` make of each, without Python in between.

    May be called from several threads at once; none waits for another.

    Args:
        out: address of uint8[count, side, side, 3].
        side: of a square, in pixels.
        data: address of the files' bytes, one behind the other.
        size: how many they are.
        squares: address of int64[count, 15]: where a file begins in ``data``, and its size; left, top, right and
            bottom of the pixels that count; those of the box that is resized; height and width that it becomes; row
            and column of that where the square begins; 1 where it is mirrored. Where the box keeps its size, the pixels
            that count are the square.
        count: how many.
        done: address of uint8[count]: set to 1 where the square was made, to 0 where it was not and is undefined.
        cubic: bicubic; else bilinear.
        rooms: bytes of the largest file; bytes of the largest box, three for each pixel; bytes to work in.

    Returns:
        The share of the time that went into decoding; the rest went into resizing and mirroring.
    """
    if not DECODES:
        ctypes.memset(done, 0, count)
        return 1.0
    file, pixels, room = rooms
    scratch = _scratch
    scratch.fit(clean=file + 16, memory=room, pixels=pixels)
    sizes = (ctypes.c_size_t * 3)(len(scratch.clean), len(scratch.pixels), len(scratch.memory))
    places = scratch.clean, scratch.pixels, scratch.memory, sizes, scratch.tables, done
    share: float = _library.steadytrain_cut(data, size, squares, count, out, side * side * 3, side, cubic, *places)
    return share


def _load() -> Any:
    path = Path(__file__).with_name("library.so")
    if not path.exists():
        raise ModuleNotFoundError("steadytrain was installed without its native decoder")
    again = "install steadytrain again"
    try:
        library: Any = ctypes.CDLL(str(path))
    except OSError as error:
        raise ImportError(f"cannot load {path}: {error}; {again}") from error
    if (version := library.steadytrain_version()) != VERSION:
        # Who falls back to libjpeg-turbo must not do so in silence: it is an editable install whose sources went on.
        message = f"{path} has functions of version {version}, not {VERSION}: {again}"
        warnings.warn(message, RuntimeWarning, stacklevel=2)
        raise ImportError(message)
    library.steadytrain_workspace.restype = ctypes.c_size_t
    library.steadytrain_restart.restype = ctypes.c_ssize_t
    pointer, size = ctypes.c_char_p, ctypes.c_size_t
    library.steadytrain_restart.argtypes = [pointer, size, ctypes.c_uint32, pointer, size, pointer, pointer]
    if library.steadytrain_decodes():
        library.steadytrain_tables.restype = ctypes.c_size_t
        library.steadytrain_resize.restype = ctypes.c_ssize_t
        number, place = ctypes.c_uint32, ctypes.c_void_p
        library.steadytrain_resize.argtypes = [place, size, place, size, pointer, pointer, size]
        places = (place, size, place, size, place, size, size, number)
        library.steadytrain_cut.restype = ctypes.c_double
        library.steadytrain_cut.argtypes = [*places, pointer, pointer, pointer, place, pointer, place]
        library.steadytrain_decode.restype = ctypes.c_ssize_t
        sizes = (number,) * 5
        library.steadytrain_decode.argtypes = [place, size, *sizes, place, size, pointer, pointer, size, pointer]
    return library


_library = _load()
DECODES: bool = _library.steadytrain_decodes() == 1
"""True where :func:`decode` and :func:`resize` can be used: they need a processor with AVX2."""
_scratch = _Scratch()
