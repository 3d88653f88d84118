"""Odd and hostile files made from little: patched headers, hand-made PNG and TIFF, things that are no files."""

from __future__ import annotations

import io
import os
import stat
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from tests.data.packing.pictures import picture

Make = Callable[[Path], object]

SIZE = (96, 80)
_TYPES = {1: "B", 3: "H", 4: "I"}
_LENGTHS = {1: 1, 2: 1, 3: 2, 4: 4}
Tags = dict[int, tuple[int, bytes | list[int]]]


def encoded(image: Image.Image | None = None, kind: str = "JPEG", **options: object) -> bytes:
    """A picture in a format of Pillow's."""
    file = io.BytesIO()
    (image or picture(1, SIZE)).save(file, kind, **options)
    return file.getvalue()


def image(kind: str = "JPEG", mode: str = "RGB", size: tuple[int, int] = SIZE, **options: object) -> Make:
    """A picture of some mode and size."""
    return bytes_of(encoded(picture(1, size, mode), kind, **options))


def frames(kind: str) -> Make:
    """Two frames, or two pages."""
    return bytes_of(encoded(kind=kind, save_all=True, append_images=[picture(2, SIZE)]))


def bytes_of(data: bytes) -> Make:
    """A file of these bytes."""
    return lambda path: path.write_bytes(data)


def node(kind: int) -> Make:
    """A pipe, a socket."""
    return lambda path: os.mknod(path, kind | stat.S_IRUSR)


def of_bits(bits: int, *, states: bool, colour: int = 0) -> bytes:
    """A PNG whose 16 bits hold values of fewer; ``states``: and says so."""
    grey = np.asarray(picture(1, SIZE, "RGB" if colour else "L")).astype(np.uint32) * (2**bits - 1) // 255
    stated = bytes([bits]) * (3 if colour else 1) if states else b""
    return png(*SIZE, bits=16, colour=colour, pixels=grey.astype(">u2").tobytes(), states=stated)


def turned_by(mark: str, orientation: int) -> bytes:
    """A picture whose orientation stands in XMP, or in the text that ImageMagick writes into a PNG."""
    xmp = (
        f'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="{orientation}"/></x:xmpmeta>'.encode()
    )
    if mark in ("JPEG", "WEBP"):
        return encoded(kind=mark, xmp=xmp)
    info = PngInfo()
    if mark == "PNG":
        info.add_itxt("XML:com.adobe.xmp", xmp.decode())
    else:
        exif = Image.Exif()
        exif[0x0112] = orientation
        data = b"Exif\0\0" + exif.tobytes().removeprefix(b"Exif\0\0")
        info.add_text("Raw profile type exif", f"\nexif\n{len(data):8}\n{data.hex()}\n", zip=mark == "zTXt")
    return encoded(kind="PNG", pnginfo=info)


def turned(orientation: int) -> Make:
    """A photograph whose EXIF says how the camera was held."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    return image(exif=exif)


def patched_jpeg(*, kind: int = 0xC0, bits: int = 8, height: int = SIZE[1], width: int = SIZE[0]) -> bytes:
    """A JPEG with another frame header."""
    data = encoded()
    at = data.index(b"\xff\xc0")
    head = struct.pack(">BBHBHH", 0xFF, kind, struct.unpack(">H", data[at + 2 : at + 4])[0], bits, height, width)
    return data[:at] + head + data[at + len(head) :]


def ycck() -> bytes:
    """A CMYK JPEG whose Adobe marker says that it holds YCCK."""
    data = encoded(picture(1, SIZE, "CMYK"))
    at = data.index(b"Adobe") + 11
    return data[:at] + b"\2" + data[at + 1 :]


def png(width: int, height: int, *, bits: int = 8, colour: int = 2, pixels: bytes = b"", states: bytes = b"") -> bytes:
    """A PNG by hand; ``pixels`` are rows without their filter bytes, ``states`` the bits of a sample as ``sBIT``."""
    rows = height and len(pixels) // height
    lines = b"".join(b"\0" + pixels[n * rows : (n + 1) * rows] for n in range(height if pixels else 0))
    parts = [
        (b"IHDR", struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)),
        *([(b"sBIT", states)] if states else []),
        (b"IDAT", zlib.compress(lines)),
        (b"IEND", b""),
    ]
    chunks = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def deep_png() -> bytes:
    """RGB of 16 bits."""
    values = np.asarray(picture(1, SIZE)).astype(">u2") * 257
    return png(*SIZE, bits=16, pixels=values.astype(">u2").tobytes())


def tiff(
    tags: Tags | None = None, *, bits: int = 8, pixels: bytes | None = None, size: tuple[int, int] = SIZE
) -> bytes:
    """A TIFF by hand: RGB in one strip, and further tags (number: type and values)."""
    data = np.asarray(picture(1, SIZE)).tobytes() if pixels is None else pixels
    all_tags: Tags = {
        256: (4, [size[0]]),
        257: (4, [size[1]]),
        258: (3, [bits] * 3),
        259: (3, [1]),
        262: (3, [2]),
        273: (4, [8]),
        277: (3, [3]),
        278: (4, [size[1]]),
        279: (4, [len(data)]),
        **(tags or {}),
    }
    at = 8 + len(data)
    beyond, entries, rest = at + 2 + 12 * len(all_tags) + 4, b"", b""
    for number, (kind, values) in sorted(all_tags.items()):
        value = values if isinstance(values, bytes) else struct.pack(f"<{len(values)}{_TYPES[kind]}", *values)
        entries += struct.pack("<HHI", number, kind, len(value) // _LENGTHS[kind])
        entries += value.ljust(4, b"\0") if len(value) <= 4 else struct.pack("<I", beyond + len(rest))
        rest += value + bytes(len(value) % 2) if len(value) > 4 else b""
    return b"II*\0" + struct.pack("<I", at) + data + struct.pack("<H", len(all_tags)) + entries + bytes(4) + rest


def banded(bands: int, *extra: int) -> bytes:
    """A TIFF of RGB and further bands of 8 bits, each 77; ``extra``: what they are declared to be, where they are."""
    pixels = np.full((SIZE[1], SIZE[0], bands), 77, np.uint8)
    pixels[..., :3] = np.asarray(picture(1, SIZE))
    tags: Tags = {258: (3, [8] * bands), 277: (3, [bands]), **({338: (3, list(extra))} if extra else {})}
    return tiff(tags, pixels=pixels.tobytes())


def deep_tiff() -> bytes:
    """RGB of 16 bits."""
    return tiff(bits=16, pixels=(np.asarray(picture(1, SIZE)).astype("<u2") * 257).astype("<u2").tobytes())


def negative_tiff() -> bytes:
    """Whole numbers of 32 bits, one of them below zero."""
    return encoded(Image.fromarray(np.full((80, 96), -1, np.int32)), "TIFF")


def profiled(kind: str) -> Make:
    """With a colour profile. What it says does not matter here."""
    return image(kind, icc_profile=b"Adobe RGB (1998)".ljust(560, b"\0"))


def webp_of(width: int, height: int) -> bytes:
    """A WebP whose canvas is said to be this large."""
    canvas = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    body = b"WEBPVP8X" + struct.pack("<II", 10, 0) + canvas + encoded(kind="WEBP")[12:]
    return b"RIFF" + struct.pack("<I", len(body)) + body


def overwritten(data: bytes, at: int, what: bytes) -> bytes:
    """``data`` with other bytes at a place."""
    return data[:at] + what + data[at + len(what) :]
