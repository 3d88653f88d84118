"""Decode any image file to upright 8-bit grey or RGB pixels.

What is read: JPEG, PNG, BMP, GIF, TIFF, WebP, PPM and AVIF, whatever the file's name says. The first frame counts.
docs/odd-images.md, which the tests make, has what becomes of each kind of file.

Cameras and scanners give 10, 12 or 14 bits, which stand in files of 16. How many they are is said by ``sBIT`` of a PNG,
by the bits a sample or the largest value of a TIFF, or by OME's ``SignificantBits``. Where nothing says so, the values
are taken for those of 16 bits: a guess by an image's own values would make dark ones bright. ``info["peak"]`` of a
decoded image is then its largest value, and whoever sees all images of a set can tell.

Four bands of a sensor are stored as CMYK too. Inks are meant where a TIFF has an ink set or a colour profile of CMYK,
or data of Photoshop; a JPEG of four colours has inks. ``info["lost"]`` words what is not used, by kind of finding.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import logging
import re
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import simplejpeg
from PIL import Image, PngImagePlugin

from steadytrain.data.arrays import Pixels
from steadytrain.data.images.file_types import Frame, frame_of, has_all_scans, why_damaged, why_no_image

MAX_PIXELS = 100_000_000

_FORMATS = ("JPEG", "PNG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "AVIF")
_ORIENTATION = 0x0112
_ORIENTED = ("exif", "Raw profile type exif", "xmp", "XML:com.adobe.xmp")  # where Pillow looks for it
_PNG_START = b"\x89PNG\r\n\x1a\n"
_PNG_TEXTS = (b"zTXt", b"iTXt", b"tEXt", b"iCCP")
MAX_DECODER_BYTES = 2**30
_DECODER_BYTES = {"WEBP": 16, "JPEG": 12, "MPO": 12}
"""Bytes that a pixel takes while it is decoded. WebP: two canvases, the frame and the image, 4 each. CMYK JPEG: 8 for
the coefficients of all its scans, 4 for the image. Other files take at most 10 (docs/odd-images.md has the table).
"""
STRIP_PIXELS = 4_000_000
"""Pixels of a larger image that are made plain at a time."""

_LOOK_FOR_BITS = 2**16  # bytes; sBIT stands before the palette and the pixels
_PHOTOMETRIC, _BANDS, _EXTRA, _INK_SET, _PHOTOSHOP, _PROFILE = 262, 277, 338, 332, 34377, 34675  # tags of TIFF
_DEEP = ("I", "I;16", "I;16L", "I;16B", "I;16N")
_PNG_HEAD = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
# Bits a channel, kind of colour, and the methods of compression, filtering and interlacing.
_PNG_MODES = {b"\x08\0\0\0\0": "L", b"\x08\2\0\0\0": "RGB"}
_HARMLESS_CHUNKS = {b"IHDR", b"gAMA", b"cHRM", b"sRGB", b"pHYs", b"tEXt", b"tIME", b"bKGD", b"sBIT"}
_read_chunk_head = struct.Struct(">I4s").unpack_from
_PPM_HEADER = re.compile(rb"P([56])\n([1-9]\d{0,8}) ([1-9]\d{0,8})\n255\n")
_LONGEST_PPM_HEADER = 32  # bytes, at least those of the longest header


class BadImageError(ValueError):
    """One image cannot be used; the message is the reason, in a few words."""


def read_header(data: bytes | memoryview) -> Image.Image:
    """Read the format, mode and size, and decode nothing.

    Raises:
        BadImageError: empty, no image, a damaged header, or too many pixels.
    """
    if not len(data):
        raise BadImageError("empty: 0 bytes")
    if bytes(data[:2]) in (b"II", b"MM"):
        _silence_tiff()
    try:
        image = Image.open(io.BytesIO(_without_long_texts(data)), formats=_FORMATS)
    except Image.DecompressionBombError as error:
        number = re.search(r"\d{9,}", str(error))
        raise BadImageError(_too_many(int(number[0]) if number else 2 * MAX_PIXELS)) from None
    except Exception as error:  # noqa: BLE001 - decoders of strangers' files raise whatever they like
        raise BadImageError(why_no_image(data, error)) from None
    width, height = image.size
    if width * height > MAX_PIXELS:
        raise BadImageError(_too_many(width * height))
    if image.format == "WEBP" or getattr(image, "layers", 0) == 4:
        most = MAX_DECODER_BYTES // _DECODER_BYTES[str(image.format)]
        if width * height > most:
            kind = "a WebP" if image.format == "WEBP" else "a CMYK JPEG"
            raise BadImageError(f"{kind} of {width * height:,} pixels, more than {most:,}: scale it down")
    key = image.info.get("transparency")
    if isinstance(key, tuple) and image.tile and "16" in str(image.tile[0][3]):  # of a PNG whose lower 8 bits go unread
        image.info["transparency"] = tuple(value >> 8 for value in key)
    tags = getattr(image, "tag_v2", {})
    # A DNG, or a TIFF whose first image is a smaller copy beside a camera's own data: a preview.
    if 50706 in tags or (tags.get(254) == 1 and 271 in tags and 330 in tags):
        raise BadImageError("a camera's raw file, which is not read here: convert it to JPEG or PNG")
    if (bits := _significant_bits(image, data)) is not None:
        image.info["bits"] = bits
    lost = {}
    if (depth := bits or _stored_bits(image, data)) > 8:
        lost["sixteen-bit"] = f"{depth} bits a channel, of which 8 are kept"
    if tags and (unused := _unused_bands(image, tags)):
        kept = tags[_BANDS] - unused
        lost["bands"] = f"{tags[_BANDS]} bands, of which the first {'is' if kept == 1 else f'{kept} are'} kept"
    image.info["lost"] = lost
    return image


def lost_in(data: bytes) -> Mapping[str, str]:
    """Return ``info["lost"]`` of an image file; nothing of one that cannot be read, and at once of most."""
    lost: Mapping[str, str] = {}
    if data[:2] != b"\xff\xd8" and (data[:8] != _PNG_START or data[24:25] == b"\x10"):
        with contextlib.suppress(BadImageError):
            lost = read_header(data).info.get("lost", {})
    return lost


def _unused_bands(image: Image.Image, tags: Any) -> int:
    """Count the last bands of a TIFF that are no colour or declared transparency; BadImageError where nothing tells."""
    profile = tags.get(_PROFILE, b"")
    is_for_print = _PHOTOSHOP in tags or (isinstance(profile, bytes) and profile[16:20] == b"CMYK")
    if image.mode == "CMYK" and not is_for_print and tags.get(_INK_SET) != 1:
        raise BadImageError(
            "four bands stored as CMYK, which are not read here unless an ink set of CMYK (tag 332) or a profile says"
            " that they are inks: convert it to RGB"
        )
    has_alpha = (tags.get(_EXTRA) or (0,))[0] in (1, 2)
    if image.mode in ("RGBA", "LA") and not has_alpha:
        image.info["opaque"] = True  # Pillow takes a band that is not declared for transparency
    num_colours = {0: 1, 1: 1, 3: 1, 5: 4}.get(tags.get(_PHOTOMETRIC), 3)
    return max(0, int(tags.get(_BANDS, 1)) - num_colours - has_alpha)


def _stored_bits(image: Image.Image, data: bytes | memoryview) -> int:
    """Return the bits a channel that an image file has; 8 where it has fewer, or cannot have more."""
    if image.format == "PNG":
        return int(data[24])
    if image.format == "TIFF":
        return int(max(getattr(image, "tag_v2", {}).get(258, (8,))))
    if image.format == "AVIF":
        found = re.search(rb"av1C..(.)", bytes(data[:_LOOK_FOR_BITS]), re.DOTALL)
        return 8 if found is None else {0x40: 10, 0x60: 12}.get(found[1][0] & 0x60, 8)
    is_ppm = image.format == "PPM" and image.mode != "1"
    words = re.sub(rb"#[^\n]*", b"", bytes(data[:200])).split()[3:4] if is_ppm else []  # the largest value
    return 16 if words and words[0].isdigit() and int(words[0]) > 255 else 8


def _significant_bits(image: Image.Image, data: bytes | memoryview) -> int | None:
    """Return how many bits a sample of a file of more than 8 has, where the file says so and they are fewer than 16."""
    bits: object = None
    if image.format == "PNG" and data[24] == 16:
        bits = _bits_of_png(bytes(data[:_LOOK_FOR_BITS]))
    elif image.format == "TIFF":
        tags = getattr(image, "tag_v2", {})
        written = re.search(r'SignificantBits="(\d+)"', str(tags.get(270, "")))
        largest = tags.get(281)
        largest = largest[0] if isinstance(largest, tuple) else largest
        if written is not None:
            bits = int(written[1])
        elif isinstance(largest, int) and largest & (largest + 1) == 0:  # all bits set, as of a range and of no image
            bits = largest.bit_length()
        else:
            bits = tags.get(258, (0,))[0]
    return bits if isinstance(bits, int) and 8 <= bits < 16 and _is_deep(image) else None


def _is_deep(image: Image.Image) -> bool:
    """Return whether a file that was opened, and not decoded, has more than 8 bits a sample."""
    tiles: Any = getattr(image, "tile", ())
    arguments = tiles[0][3] if tiles else ""
    return image.mode in _DEEP or ";16" in str(arguments if isinstance(arguments, str) else arguments[:1])


def _bits_of_png(start: bytes) -> int | None:
    """Return the bits of a PNG's chunk ``sBIT``, of the colour that has most."""
    at, num_colours = 8, 3 if start[25] in (2, 6) else 1
    while (kind := start[at + 4 : at + 8]) not in (b"", b"IDAT"):
        if kind == b"sBIT":
            return max(start[at + 8 : at + 8 + num_colours], default=0)
        at += 12 + int.from_bytes(start[at : at + 4], "big")
    return None


@functools.cache
def _silence_tiff() -> None:
    """Stop Pillow, and the libtiff inside it, from printing to standard error; their errors reach us as exceptions."""
    logging.getLogger("PIL.TiffImagePlugin").addHandler(logging.NullHandler())
    place = Path(PIL.__file__).parent
    for path in (*place.parent.glob("pillow.libs/libtiff*"), *place.glob(".dylibs/libtiff*")):
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(str(path))
            for name in ("TIFFSetWarningHandler", "TIFFSetErrorHandler"):
                set_handler = getattr(library, name)
                set_handler.argtypes, set_handler.restype = [ctypes.c_void_p], ctypes.c_void_p
                set_handler(None)


def _without_long_texts(data: bytes | memoryview) -> bytes | memoryview:
    """Return an image file without the texts and profiles of a PNG that Pillow would refuse to inflate.

    Nothing here reads them but an orientation, which takes a few bytes.
    """
    if bytes(data[:8]) != _PNG_START:
        return data
    data = bytes(data)
    if not any(kind in data for kind in _PNG_TEXTS):
        return data
    kept, at, room = [data[:8]], 8, PngImagePlugin.MAX_TEXT_MEMORY
    while at + 12 <= len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] in _PNG_TEXTS:
            size = _inflated_size(memoryview(data)[at + 8 : end - 4])
            room -= size
            is_left_out = size > PngImagePlugin.MAX_TEXT_CHUNK or room < 0
        else:
            is_left_out = False
        if not is_left_out:
            kept.append(data[at:end])
        at = end
    return b"".join(kept) + data[at:]


def _inflated_size(chunk: memoryview) -> int:
    """Return the bytes of a chunk of text, or of a profile, once inflated, or a little more than Pillow would take."""
    most = PngImagePlugin.MAX_TEXT_CHUNK + 1
    for at in range(min(len(chunk), 300)):  # keyword, language and translation come first; deflated bytes begin by 0x78
        if chunk[at] == 0x78:
            # Not all that follows: zlib copies what it does not take, and as much as this is enough for the answer.
            with contextlib.suppress(zlib.error):
                return at + len(zlib.decompressobj().decompress(chunk[at : at + most + 2**16], most))
    return len(chunk)


def format_of(image: Image.Image) -> str:
    """Return ``jpg``, ``png`` and so on."""
    name = (image.format or "").lower()
    return "jpg" if name in ("jpeg", "mpo") else name


def load(image: Image.Image) -> Image.Image:
    """Decode what :func:`read_header` opened. Raises BadImageError: damaged or cut short."""
    is_deep = _is_deep(image)
    lower = _lower_bytes_of(image) if is_deep and "bits" in image.info else None
    try:
        image.load()
        if lower is not None:
            lower.load()
    except Exception as error:  # noqa: BLE001 - decoders of strangers' files raise whatever they like
        raise BadImageError(why_damaged(error)) from None
    if not is_deep:
        return image
    if lower is not None:
        return _scaled(image, lower)
    bits, largest = image.info.pop("bits", None), _largest_value(image)
    if bits is None or image.mode not in _DEEP:
        image.info["peak"] = largest
    elif largest < 2**bits:  # else they are the upper bits, as the PNG specification asks for
        image.info["range"] = 2**bits - 1
    return image


def _largest_value(image: Image.Image) -> int:
    """Return the largest value of a decoded image of 16 bits; where the upper 8 were kept, the most that it can be."""
    if image.mode not in _DEEP:
        bands = image.getextrema()[: 1 if image.mode in ("LA", "La") else 3]
        return max(256 * int(high) + 255 for _, high in bands)  # type: ignore[misc]
    width, height = image.size
    step, largest = max(1, STRIP_PIXELS // width), 0
    for top in range(0, height, step):
        strip = np.asarray(image.crop((0, top, width, min(top + step, height))))
        largest = max(largest, int(strip.max(initial=0)))
    return largest


def _lower_bytes_of(image: Image.Image) -> Image.Image | None:
    """Open a PNG of colours of 16 bits again, to decode what Pillow leaves out; None for any other."""
    if image.mode not in ("RGB", "RGBA") or image.format != "PNG" or "transparency" in image.info:
        return None
    file: Any = getattr(image, "fp", None)
    lower = Image.open(io.BytesIO(file.getvalue()), formats=("PNG",))
    lower.tile = [tile._replace(args=f"{image.mode};16L") for tile in lower.tile]
    return lower


def _scaled(image: Image.Image, lower: Image.Image) -> Image.Image:
    """Scale colours of 16 bits, of which the upper and the lower ones are given, from the range that the file says."""
    most = 2 ** image.info.pop("bits") - 1
    if _largest_value(image) > most | 255:
        return image
    values = np.asarray(image).astype(np.int32) * 256 + np.asarray(lower)
    if values[..., :3].max(initial=0) > most:
        return image
    scaled = np.minimum((values * 255 + most // 2) // most, 255).astype(np.uint8)
    if scaled.shape[2] == 4 and values[..., 3].max() > most:  # how opaque it is stands in the upper bits
        scaled[..., 3] = np.asarray(image)[..., 3]
    result = Image.fromarray(scaled)
    result.format, result.info = image.format, image.info
    return result


def is_common_jpeg(data: bytes | memoryview) -> bool:
    """Return whether a JPEG's frame is of the three kinds that every decoder reads: baseline, extended or progressive.

    Lossless and arithmetic-coded ones are left to Pillow: libjpeg-turbo's scaled decoding of a lossless one, by way
    of simplejpeg 1.9.0, ends the process with a segmentation fault.
    """
    frame = frame_of(data)
    return frame is not None and frame.kind <= 0xC2


def is_common(frame: Frame) -> bool:
    """Return whether a JPEG of this frame can be decoded: of a common kind, 8 bits, and no more pixels than allowed."""
    return frame.kind <= 0xC2 and frame.bits == 8 and 0 < frame.width * frame.height <= MAX_PIXELS


def complete_jpeg(data: bytes | memoryview) -> bytes | None:
    """Return a JPEG with the two bytes that mark its end, where it lacks those and no pixel; else None.

    It is decoded for that, so that nothing is taken for whole of which coded data are missing.
    """
    frame = frame_of(data)
    if frame is None or not is_common(frame) or not has_all_scans(data):
        return None
    whole = bytes(data) + b"\xff\xd9"
    try:
        simplejpeg.decode_jpeg(whole, "GRAY" if frame.parts == 1 else "RGB")
    except (ValueError, KeyError):
        return None
    return whole


def orientation(image: Image.Image) -> int:
    """Return the orientation, 1 (upright) to 8; 1 where there is none or none that can be read.

    By EXIF, also where ImageMagick has put it into a text of a PNG; where that has none, by XMP.
    """
    if image.info.keys().isdisjoint(_ORIENTED) and image.format != "TIFF":
        return 1
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - damaged EXIF must not cost the image
        return 1
    return value if value in range(2, 9) else 1


def turn(pixels: Pixels, orientation: int) -> Pixels:
    """Bring pixels of this EXIF orientation upright: uint8[H, W] or uint8[H, W, 3]."""
    if orientation in (5, 6, 7, 8):
        pixels = pixels.swapaxes(0, 1)
    rows = slice(None, None, -1 if orientation in (3, 4, 7, 8) else 1)
    columns = slice(None, None, -1 if orientation in (2, 3, 6, 7) else 1)
    return np.ascontiguousarray(pixels[rows, columns])


def flatten(image: Image.Image) -> Image.Image:
    """Convert to mode ``L`` or ``RGB`` of 8 bits.

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
    if image.info.get("opaque"):
        return image.convert(mode[:-1])
    if "transparency" in image.info or mode.endswith(("A", "a")):
        colour = image.convert("RGBA")
        paper = Image.new("RGBA", colour.size, "white")
        return Image.alpha_composite(paper, colour).convert("L" if mode[0] in "L1" else "RGB")
    if mode in ("L", "RGB"):
        return image
    try:
        return image.convert("L" if mode == "1" else "RGB")
    except ValueError:
        raise BadImageError(f"{mode} pixels, which are not read here: convert it to RGB") from None


def to_pixels(image: Image.Image, *, factor: int = 1) -> Pixels:
    """Return the pixels of :func:`flatten`, averaged down by a whole factor: uint8[H, W, 3] or uint8[H, W].

    A strip at a time: Pillow would hold several copies of a large image, of four bytes a pixel each.

    Raises:
        BadImageError: values whose range is not known.

    >>> to_pixels(Image.new("RGBA", (5, 4)), factor=2).shape
    (2, 3, 3)
    """
    if image.mode == "I":
        _check_range(*image.getextrema())
    width, height = image.size
    rows = max(1, STRIP_PIXELS // (width * factor)) * factor
    if rows >= height:
        return _to_pixels(image, factor)
    first = _to_pixels(image.crop((0, 0, width, rows)), factor)
    pixels = np.empty((-(-height // factor), *first.shape[1:]), np.uint8)
    pixels[: len(first)] = first
    for top in range(rows, height, rows):
        strip = _to_pixels(image.crop((0, top, width, min(top + rows, height))), factor)
        pixels[top // factor : top // factor + len(strip)] = strip
    return pixels


def _to_pixels(image: Image.Image, factor: int) -> Pixels:
    flat = flatten(image)
    return np.asarray(flat.reduce(factor) if factor > 1 else flat)


def decode(data: bytes | memoryview) -> Image.Image:
    """Decode any image file to an upright ``L`` or ``RGB`` image. Raises BadImageError."""
    image = read_header(data)
    return Image.fromarray(turn(to_pixels(load(image)), orientation(image)))


def _too_many(num_pixels: int) -> str:
    return f"{num_pixels:,} pixels, more than {MAX_PIXELS:,}"


def _eight_bits(image: Image.Image) -> Image.Image:
    values, transparent = np.asarray(image), image.info.get("transparency")
    if values.size:
        _check_range(values.min(), values.max())
    most = image.info.get("range", 65535)
    # Of 32 bits, signed: less than 255 * 257 + 129, and less than 2**15 * 255.
    grey = (
        (values.astype(np.int32) + 128) // 257 if most == 65535 else (values.astype(np.int32) * 255 + most // 2) // most
    )
    return Image.fromarray(np.where(values == transparent, 255, grey).astype(np.uint8))


def _check_range(least: float, largest: float) -> None:
    if least < 0 or largest > 65535:
        raise BadImageError(f"grey values from {int(least)} to {int(largest)}: only 0 to 65535 can be used")


def decode_file(image: Image.Image, data: bytes, shorter_side: int | None = None) -> tuple[Image.Image | Pixels, bool]:
    """Return pixels as they lie in the file, perhaps scaled down by a JPEG's own transform, and whether it is sound.

    Args:
        image: what :func:`read_header` made of ``data``.
        shorter_side: that it will be scaled down to, in pixels; None: every pixel is wanted.

    Raises:
        BadImageError: damaged or cut short.
    """
    if format_of(image) != "jpg":
        return load(image), True
    if image.mode not in ("L", "RGB") or not is_common_jpeg(data):
        return load(image), False
    try:
        return decode_jpeg(data, image.size, 1 if image.mode == "L" else 3, shorter_side), True
    except ValueError as error:
        complaint = str(error).lower()
        if "premature end of jpeg file" in complaint:
            if (whole := complete_jpeg(data)) is None:
                raise BadImageError("cut short") from None
            return decode_jpeg(whole, image.size, 1 if image.mode == "L" else 3, shorter_side), False
        if "premature end" in complaint:
            raise BadImageError("damaged: image data is missing") from None
    # What else libjpeg complains of (stray bytes, odd markers) costs no pixels where Pillow can read it.
    return load(image), False


def decode_jpeg(data: bytes, size: tuple[int, int], channels: int, shorter_side: int | None) -> Pixels:
    """Decode to the full size, or to a half, a quarter or an eighth; raise ValueError for anything libjpeg dislikes.

    The other fractions are slower than no scaling at all.
    """
    factor = next(f for f in (8, 4, 2, 1) if f <= max(reduction(size, shorter_side), 1))
    width, height = (-(-side // factor) for side in size)
    space = "GRAY" if channels == 1 else "RGB"
    pixels: Pixels = simplejpeg.decode_jpeg(data, space, min_height=height, min_width=width)
    return pixels[..., 0] if channels == 1 else pixels


def reduction(size: tuple[int, int], shorter_side: int | None) -> int:
    """Return the whole factor to average an image down by before it is resized.

    At least twice ``shorter_side`` is left: closer to it the decoder's own scaling would be seen (as Pillow's
    ``reducing_gap=2``).
    """
    return min(size) // (2 * shorter_side) if shorter_side else 1


def plain_png(data: bytes, *, most: int) -> Pixels | None:
    """Decode a plain PNG with a third of the interpreter's work that Pillow's reader of files costs.

    Small images are mostly that work. Plain is a PNG of 8 bits a channel, grey or RGB, not interlaced, whose chunks are
    all sound and hold nothing that would change a pixel. Pillow's decoder still does the decoding.

    Returns:
        uint8[H, W] or uint8[H, W, 3]; None for anything that is not a sound, plain PNG of at most ``most`` pixels.

    >>> plain_png(b"\\x89PNG\\r\\n", most=100) is None
    True
    """
    mode = _PNG_MODES.get(data[24:29])
    if mode is None or data[:16] != _PNG_HEAD:
        return None
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    compressed = _image_data(data) if 0 < width * height <= most else None
    if compressed is None:
        return None
    try:
        image = Image.frombytes(mode, (width, height), compressed, "zip", mode, 0)
    except ValueError:
        return None
    if width * height > STRIP_PIXELS:  # joining all bytes would take twice their memory
        return to_pixels(image)
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return np.frombuffer(image.tobytes(), np.uint8).reshape(shape)


def _image_data(data: bytes) -> bytes | None:
    """Join the IDAT chunks; None where a chunk is damaged, or might change a pixel."""
    at = 8
    parts: list[bytes] = []
    while at + 12 <= len(data):
        size, kind = _read_chunk_head(data, at)
        end = at + 8 + size
        if end + 4 > len(data) or zlib.crc32(data[at + 4 : end]) != int.from_bytes(data[end : end + 4], "big"):
            return None
        if kind == b"IEND":
            return parts[0] if len(parts) == 1 else b"".join(parts)
        if kind == b"tEXt" and data.startswith((b"Raw profile type", b"XML:"), at + 8):
            return None  # it may be turned
        if kind == b"IDAT":
            parts.append(data[at + 8 : end])
        elif kind not in _HARMLESS_CHUNKS:
            return None
        at = end + 4
    return None


def from_ppm(data: Any) -> Pixels | None:
    """Return the pixels that :func:`to_ppm` wrote, uint8[H, W, 3] or uint8[H, W], not copied; None for anything else.

    Only the form that is written here is read here: one space, no comment, 255 as the largest value. Any other PPM is
    left to a decoder of images.
    """
    head = _PPM_HEADER.match(bytes(data[:_LONGEST_PPM_HEADER]))
    if head is None:
        return None
    width, height = int(head[2]), int(head[3])
    shape = (height, width, 3) if head[1] == b"6" else (height, width)
    if len(data) != head.end() + width * height * (3 if len(shape) == 3 else 1):
        return None
    return np.frombuffer(data, np.uint8, offset=head.end()).reshape(shape)
