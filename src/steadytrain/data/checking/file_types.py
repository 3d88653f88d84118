"""Files of other kinds, told by their first bytes: what they are, and where to go with them.

>>> told = recognise(b"version https://git-lfs.github.com/spec/v1", 130)
>>> told.name, told.advice
('a Git LFS pointer, not the data', 'fetch the data with git lfs pull')
>>> recognise(bytes(64), 64).name
'zeros, nothing else'
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import NamedTuple

from steadytrain.data.recordio.framing import MAGIC

LOOK_AT = 4096
"""How many bytes from the beginning are needed."""


class Foreign(NamedTuple):
    """What a file is, advice to those who hoped for images, and whether packing takes such files."""

    name: str
    advice: str
    packs: bool = False


_UNPACK = "unpack it, and pack the folder of images"
_AS_IT_IS = "do not call it .rec, and pack it as it is: steady pack FILE OUT"
_CONVERT = "write its images to a folder of classes with the tool it comes from, and pack that"
_WEIGHTS = "it holds a network's weights, not images: did you mean another file?"
_AGAIN = "fetch it again: what was saved is an error page, or a page that needs a login"
_AS_IMAGE = "put the images of each class into a folder of its own, and pack that"
_TO_JPEG = "convert it to JPEG or PNG"
_RAW = "a camera's raw file, which is not read here"

# What stands at the beginning (a byte offset, the bytes there), what that is, and what to do with it.
_MAGICS: tuple[tuple[int, bytes, str, str], ...] = (
    (0, b"version https://git-lfs", "a Git LFS pointer, not the data", "fetch the data with git lfs pull"),
    (257, b"ustar", "a tar archive", _AS_IT_IS),
    (0, b"\x1f\x8b", "a gzip file", _AS_IT_IS),
    (0, b"BZh", "a bzip2 file", _AS_IT_IS),
    (0, b"\xfd7zXZ\0", "an xz file", _AS_IT_IS),
    (0, b"\x28\xb5\x2f\xfd", "a zstd file", _AS_IT_IS),
    (0, b"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
    (0, b"Rar!\x1a\x07", "a RAR archive", _UNPACK),
    (0, b"\x89HDF\r\n\x1a\n", "an HDF5 file", _CONVERT),
    (0, b"PAR1", "a Parquet file", _CONVERT),
    (0, b"ARROW1", "an Arrow file", _CONVERT),
    (0, b"SQLite format 3\0", "an SQLite database", _CONVERT),
    (16, b"\xde\xc0\xef\xbe", "an LMDB database", _CONVERT),
    (0, b"\x93NUMPY", "a NumPy array (.npy)", _CONVERT),
    (0, struct.pack("<QQ", 0x112, 0), "MXNet arrays (.params, .nd)", _WEIGHTS),
    (0, b"\x80\x02", "a Python pickle", "do not load it unless you trust it; write its images to a folder of classes"),
    (0, b"\x80\x04", "a Python pickle", "do not load it unless you trust it; write its images to a folder of classes"),
    (0, b"\x80\x05", "a Python pickle", "do not load it unless you trust it; write its images to a folder of classes"),
    (0, b"\0\0\x08\x03", "an idx-ubyte file of images (MNIST's form)", _AS_IT_IS),
    (0, b"\0\0\x08\x01", "an idx-ubyte file of labels (MNIST's form)", _CONVERT),
    (0, b"MATLAB 5.0", "a MATLAB file", _CONVERT),
    (0, b"%PDF", "a PDF document", "give images"),
    (0, b"\x7fELF", "a program", "give images"),
    (0, b"MZ", "a program", "give images"),
    (0, b"\xff\xd8\xff", "a JPEG image", _AS_IMAGE),
    (0, b"\x89PNG", "a PNG image", _AS_IMAGE),
    (0, b"GIF8", "a GIF image", _AS_IMAGE),
    (8, b"WEBP", "a WebP image", _AS_IMAGE),
    (8, b"CR\x02\0", _RAW, _TO_JPEG),
    (4, b"ftypcrx", _RAW, _TO_JPEG),
    (0, b"FUJIFILMCCD-RAW", _RAW, _TO_JPEG),
    (0, b"IIRO", _RAW, _TO_JPEG),
    (0, b"IIRS", _RAW, _TO_JPEG),
    (0, b"MMOR", _RAW, _TO_JPEG),
    (0, b"IIU\0", _RAW, _TO_JPEG),
    (0, b"FOVb", _RAW, _TO_JPEG),
    (0, b"II*\0", "a TIFF image", _AS_IMAGE),
    (0, b"MM\0*", "a TIFF image", _AS_IMAGE),
    (0, b"BM", "a BMP image", _AS_IMAGE),
    (4, b"ftypavif", "an AVIF image", _AS_IMAGE),
    (0, b"P5\n", "a PGM image", _AS_IMAGE),
    (0, b"P6\n", "a PPM image", _AS_IMAGE),
    (4, b"ftyphei", "a HEIC image, which is not read here", _TO_JPEG),
    (4, b"ftyphev", "a HEIC image, which is not read here", _TO_JPEG),
    (4, b"ftypmif1", "a HEIF image, which is not read here", _TO_JPEG),
    (4, b"ftyp", "an MP4 video", "write its frames as images"),
    (0, b"\0\0\0\x0cjP  ", "a JPEG 2000 image, which is not read here", _TO_JPEG),
    (0, b"\xffO\xffQ", "a JPEG 2000 image, which is not read here", _TO_JPEG),
    (0, b"\0\0\0\x0cJXL ", "a JPEG XL image, which is not read here", _TO_JPEG),
    (0, b"\xff\x0a", "a JPEG XL image, which is not read here", _TO_JPEG),
    (0, b"%!PS", "a PostScript file, which is not read here", _TO_JPEG),
    (0, b"\xc5\xd0\xd3\xc6", "a PostScript file, which is not read here", _TO_JPEG),
    (0, b"8BPS", "a Photoshop file, which is not read here", _TO_JPEG),
    (0, b"\0\0\x01\0", "a Windows icon, which is not read here", _TO_JPEG),
    (128, b"DICM", "a DICOM image, which is not read here", _TO_JPEG),
)
_IMAGES = frozenset(name for _, _, name, advice in _MAGICS if advice in (_AS_IMAGE, _TO_JPEG))


def recognise(start: bytes, size: int) -> Foreign | None:
    """What a file is, or what stands where an image should.

    Args:
        start: its first :data:`LOOK_AT` bytes, or all there are.
        size: of the whole, in bytes.

    Returns:
        None for what is not known, and for a record file.
    """
    if not size:
        return Foreign("empty: 0 bytes", "fetch or write it again")
    if start[:4] == struct.pack("<I", MAGIC):
        return None
    if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _zip(start)
    for offset, magic, name, advice in _MAGICS:
        if start[offset : offset + len(magic)] == magic:
            return Foreign(name, advice, advice == _AS_IT_IS)
    if _is_tfrecord(start):
        return Foreign("a TFRecord file", _CONVERT)
    if not any(start):
        return Foreign("zeros, nothing else", "fetch or write it again: the disk was full, or the copy was cut off")
    return _text(start)


def is_image_name(name: str) -> bool:
    """Whether what was recognised is an image."""
    return name in _IMAGES


def raw_shape(size: int) -> tuple[int, int, int] | None:
    """Height, width and channels that so many bytes may be the bare pixels of: the square ones.

    >>> raw_shape(3072), raw_shape(784), raw_shape(1000)
    ((32, 32, 3), (28, 28, 1), None)
    """
    for channels in (3, 1):
        side = math.isqrt(size // channels)
        if side >= 8 and side * side * channels == size:
            return side, side, channels
    return None


def _zip(start: bytes) -> Foreign:
    length = int.from_bytes(start[26:28], "little")
    first = start[30 : 30 + length]
    if first.endswith(b".npy"):
        return Foreign("NumPy arrays (.npz)", _CONVERT)
    if first.endswith((b"/data.pkl", b"/version", b".format_version")):
        return Foreign("a PyTorch file (.pt, .pth)", _WEIGHTS)
    return Foreign("a zip archive", _AS_IT_IS, packs=True)


def _is_tfrecord(start: bytes) -> bool:
    """Whether a length is followed by its own masked CRC-32C, as TFRecord has it."""
    return len(start) >= 12 and masked_crc(start[:8]) == int.from_bytes(start[8:12], "little")


def masked_crc(data: bytes) -> int:
    """CRC-32C (Castagnoli; RFC 3720), rotated and shifted as TFRecord files hold it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _text(start: bytes) -> Foreign | None:
    # By its beginning alone: a page may have been written over part of an image.
    if start[:64].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return Foreign("an HTML page", _AGAIN)
    try:
        text = start.decode("utf-8-sig", "strict" if len(start) < LOOK_AT else "ignore")
    except UnicodeDecodeError:
        return _deflated(start)
    if any(not c.isprintable() and c not in "\t\r\n" for c in text):
        return _deflated(start)
    head = text.lstrip().lower()
    if head.startswith("<svg") or (head.startswith("<?xml") and "<svg" in head):
        return Foreign("an SVG drawing, which is not read here", _TO_JPEG)
    if head.startswith("<?xml"):
        return Foreign("an XML text", _AGAIN)
    if head.startswith(("{", "[")):
        return Foreign("a JSON text", "give the file that holds the images")
    return _table(text.splitlines()[0] if text.strip() else "")


def _table(line: str) -> Foreign:
    """What a text is by its first line."""
    fields = line.split("\t")
    if len(fields) == 2 and all(field.strip().isdigit() for field in fields):
        return Foreign("the index (.idx) of a record file", "give the .rec that it lies beside")
    if len(fields) >= 3 and fields[0].strip().isdigit():
        return Foreign("a list of images (.lst)", "call it NAME.lst, and pack it: steady pack NAME.lst OUT", packs=True)
    return Foreign("a text", "give the file that holds the images", packs=True)


def _deflated(start: bytes) -> Foreign | None:
    if start[:2] in (b"\x78\x01", b"\x78\x9c", b"\x78\xda"):
        try:
            zlib.decompressobj().decompress(start, 64)
        except zlib.error:
            return None
        return Foreign("zlib-compressed bytes", "decompress it first")
    return None
