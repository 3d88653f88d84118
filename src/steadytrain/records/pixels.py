"""From the bytes of any image file to 8-bit grey or RGB pixels, upright, by one rule.

What is read: JPEG, PNG, BMP, GIF, TIFF, WebP, PPM and AVIF, whatever the file's name says. The first frame counts.

================================  ==========================================================================
found                             becomes
================================  ==========================================================================
grey or RGB of 8 bits             what it is
1 bit                             grey 0 or 255
16-bit grey, 32-bit integer grey  grey, divided by 257 and rounded; outside 0 to 65535 it is refused
16-bit RGB                        RGB, the upper 8 bits
palette                           RGB
transparency of any kind          laid over white; grey stays grey
CMYK, YCCK, YCbCr, Lab, HSV       RGB, colour profiles ignored
32-bit float                      refused: its range is not known
EXIF orientation 2 to 8           turned upright
more than 100 million pixels      refused, by the header, before anything is decoded
================================  ==========================================================================
"""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

MAX_PIXELS = 100_000_000

_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "AVIF")
_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_DEEP = ("I", "I;16", "I;16L", "I;16B", "I;16N")


class BadImageError(ValueError):
    """One image cannot be used; the message is the reason, in a few words."""


def read_header(data: bytes | memoryview) -> Image.Image:
    """Read the format, mode and size, and decode nothing.

    Raises:
        BadImageError: empty, no image, a damaged header, or too many pixels.
    """
    if not len(data):
        raise BadImageError("empty: 0 bytes")
    try:
        image = Image.open(io.BytesIO(data), formats=_FORMATS)
    except Image.DecompressionBombError:
        raise BadImageError(f"more than {MAX_PIXELS:,} pixels") from None
    except Exception as error:  # noqa: BLE001 - decoders of strangers' files raise whatever they like
        raise BadImageError(_what_else(bytes(data[:512]), error)) from None
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImageError(f"{width * height:,} pixels, more than {MAX_PIXELS:,}")
    return image


def load(image: Image.Image) -> Image.Image:
    """Decode what :func:`read_header` opened.

    Raises:
        BadImageError: damaged or cut short.
    """
    try:
        image.load()
    except Exception as error:  # noqa: BLE001 - decoders of strangers' files raise whatever they like
        raise BadImageError(_damage(error)) from None
    return image


def is_common_jpeg(data: bytes | memoryview) -> bool:
    """Whether a JPEG's frame is of the three kinds that every decoder reads: baseline, extended or progressive.

    Lossless and arithmetic-coded ones are left to Pillow: libjpeg-turbo's scaled decoding of a lossless one, by way
    of simplejpeg 1.9.0, ends the process with a segmentation fault.
    """
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return marker <= 0xC2
        # Any number of 0xFF may stand before a marker; every marker this early has a length.
        at += 1 if marker == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return False


def orientation(image: Image.Image) -> int:
    """EXIF orientation, 1 (upright) to 8; 1 where there is none or none that can be read."""
    if "exif" not in image.info and image.format != "TIFF":
        return 1
    try:
        told = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - damaged EXIF must not cost the image
        return 1
    return told if told in _TURNS else 1


def turn(image: Image.Image, orientation: int) -> Image.Image:
    """Bring an image of this EXIF orientation upright."""
    return image.transpose(_TURNS[orientation]) if orientation in _TURNS else image


def flatten(image: Image.Image) -> Image.Image:
    """Mode ``L`` or ``RGB`` of 8 bits, by the table above.

    Raises:
        BadImageError: values whose range is not known.

    >>> flatten(Image.new("RGBA", (1, 1), (255, 0, 0, 0))).getpixel((0, 0))
    (255, 255, 255)
    >>> flatten(Image.new("I;16", (1, 1), 65535)).getpixel((0, 0))
    255
    """
    mode = image.mode
    if mode in _DEEP:
        return _eight_bits(image)
    if mode == "F":
        raise BadImageError("32-bit float pixels: their range is not known")
    if "transparency" in image.info or mode.endswith(("A", "a")):
        colour = image.convert("RGBA")
        paper = Image.new("RGBA", colour.size, "white")
        return Image.alpha_composite(paper, colour).convert("L" if mode[0] in "L1" else "RGB")
    if mode in ("L", "RGB"):
        return image
    return image.convert("L" if mode == "1" else "RGB")


def decode(data: bytes | memoryview) -> Image.Image:
    """Any image file as an upright ``L`` or ``RGB`` image. Raises BadImageError."""
    image = load(read_header(data))
    return flatten(turn(image, orientation(image)))


def _eight_bits(image: Image.Image) -> Image.Image:
    values = np.asarray(image).astype(np.int64)
    if values.size and (values.min() < 0 or values.max() > 65535):
        raise BadImageError(f"grey values from {values.min()} to {values.max()}: only 0 to 65535 can be used")
    return Image.fromarray(((values + 128) // 257).astype(np.uint8))


def _what_else(start: bytes, error: Exception) -> str:
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "an HTML page, not an image"
    if text.startswith(b"version https://git-lfs"):
        return "a Git LFS pointer, not the image: fetch it with git lfs pull"
    if start.startswith((b"\xff\xd8\xff", b"\x89PNG", b"GIF8", b"BM", b"RIFF", b"II*\0", b"MM\0*")):
        return _damage(error)
    return "not an image of a known format"


def _damage(error: Exception) -> str:
    told = str(error) or type(error).__name__
    if "truncated" in told.lower():
        return "cut short"
    # Pillow's "cannot identify" names a buffer's address: noise, and different in every process.
    return "damaged header" if told.startswith("cannot identify") else f"damaged: {told}"
