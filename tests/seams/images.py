"""Images that are the same bytes everywhere: drawn by arithmetic, and stored without compression."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

NUM_CLASSES = 5


def png(pixels: NDArray[np.uint8]) -> bytes:
    """A PNG of uint8[H, W] or uint8[H, W, 3]; whichever zlib is here, its bytes are the same."""
    height, width = pixels.shape[:2]
    rows = b"".join(b"\0" + row.tobytes() for row in pixels)  # filter 0 before each row
    parts = [rows[at : at + 65535] for at in range(0, len(rows), 65535)]
    blocks = [
        struct.pack("<BHH", part is parts[-1], len(part), len(part) ^ 0xFFFF) + part for part in parts
    ]  # of deflate, stored
    data = b"\x78\x01" + b"".join(blocks) + struct.pack(">I", zlib.adler32(rows))
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if pixels.ndim == 3 else 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def mark(number: int, side: int = 8) -> NDArray[np.uint8]:
    """A small grey image, uint8[side, side], whose stripes tell its class: ``number % NUM_CLASSES``."""
    y, x = np.mgrid[:side, :side]
    stripes = (np.cos((x * (number % NUM_CLASSES) + y * (number % 3)) * (2 * np.pi / side)) > 0) * 120
    grain = (x * 37 + y * 91 + number * 53 + x * y * number) % 97
    pixels: NDArray[np.uint8] = (stripes + grain).astype(np.uint8)
    return pixels


def scene(number: int, height: int, width: int) -> NDArray[np.uint8]:
    """A colour image, uint8[height, width, 3], of slopes and edges."""
    y, x = np.mgrid[:height, :width]
    red = (x * 5 + y * (number % 7)) % 256
    green = (255 - y * 4 + (x // 8 + number) % 2 * 40) % 256
    blue = (x * y // (3 + number % 5)) % 256
    return np.stack([red, green, blue], axis=2).astype(np.uint8)


def write_marks(folder: Path, count: int) -> Path:
    """Small grey images, a folder for each class."""
    for number in range(count):
        place = folder / f"class{number % NUM_CLASSES}"
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{number:04d}.png").write_bytes(png(mark(number)))
    return folder


def write_photos(folder: Path, jpegs: Path, count: int = 12) -> Path:
    """Colour images of many sizes in three classes, and the JPEG files of a folder among them."""
    files = [
        (f"{number:02d}.png", png(scene(number, 30 + 7 * number % 40, 70 - 9 * number % 37))) for number in range(count)
    ]
    files += [(path.name, path.read_bytes()) for path in sorted(jpegs.glob("*.jpg"))]
    for number, (name, content) in enumerate(files):
        place = folder / ("ape", "bee", "cat")[number % 3]
        place.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(content)
    return folder
