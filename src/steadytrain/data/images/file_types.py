"""Types of files, by their first bytes; reasons why bytes cannot be used as an image, in a few words, with the remedy.

>>> file_type = recognise(b"version https://git-lfs.github.com/spec/v1", 130)
>>> file_type.name, file_type.advice
('a Git LFS pointer, not the data', 'fetch the data with git lfs pull')
>>> why_no_image(b"\\0\\0\\0\\x18ftypheic" + bytes(60))
'a HEIC image, which is not read here: convert it to JPEG or PNG'
>>> why_no_image(b"\\xff\\xd8\\xff\\xc3\\0\\x0b\\x10\\0\\x20\\0\\x20\\1" + bytes(60))
'a lossless JPEG of 16 bits, which is not read here: convert it to PNG'
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from typing import Literal, NamedTuple

LOOK_AT = 4096
"""Bytes from the beginning of a file that are looked at."""

CUT_SHORT = "cut short"
UNKNOWN = "not an image of a known format"
NO_IMAGE = ", not an image"
PACK_IMAGES = "pack the images themselves: steady pack FOLDER OUT"  # instead of records of something else


class FileType(NamedTuple):
    """A type of file, advice to those who hoped for images, and whether packing takes such files."""

    name: str
    advice: str
    packs: bool = False


_UNPACK = "unpack it, and pack the folder of images"
_AS_IT_IS = "do not call it .rec, and pack it as it is: steady pack FILE OUT"
_WRITE_IMAGES = "write its images to a folder of classes with the tool it comes from, and pack that"
_TABLE = "save its table as CSV, and give that"
_WEIGHTS = "it holds a network's weights, not images: did you mean another file?"
_AGAIN = "fetch it again: what was saved is an error page, or a page that needs a login"
_AS_IMAGE = "put the images of each class into their own folder, and pack that"
_CONVERT = "convert it to JPEG or PNG"

_TYPES = tuple(
    (re.compile(pattern, re.DOTALL), FileType(name, advice, advice == _AS_IT_IS))
    for pattern, name, advice in (
        # packed as they are
        (rb".{257}ustar", "a tar archive", _AS_IT_IS),
        (rb"\x1f\x8b", "a gzip file", _AS_IT_IS),
        (rb"BZh", "a bzip2 file", _AS_IT_IS),
        (rb"\xfd7zXZ\0", "an xz file", _AS_IT_IS),
        (rb"\x28\xb5\x2f\xfd", "a zstd file", _AS_IT_IS),
        (rb"\0\0\x08\x03", "an idx-ubyte file of images (MNIST's form)", _AS_IT_IS),
        # images that are read; what is not, and is told from those by more bytes, stands before them
        (rb"\xff\xd8\xff", "a JPEG image", _AS_IMAGE),
        (rb"\x89PNG", "a PNG image", _AS_IMAGE),
        (rb"GIF8", "a GIF image", _AS_IMAGE),
        (rb".{8}WEBP", "a WebP image", _AS_IMAGE),
        (rb"BM", "a BMP image", _AS_IMAGE),
        (rb".{8}CR\x02\0", "a camera's raw file, which is not read here", _CONVERT),
        (rb"II\*\0|MM\0\*", "a TIFF image", _AS_IMAGE),
        (rb".{4}ftypavif", "an AVIF image", _AS_IMAGE),
        (rb"P5\n", "a PGM image", _AS_IMAGE),
        (rb"P6\n", "a PPM image", _AS_IMAGE),
        # a dozen that are not read, and that people take for data
        (rb".{4}ftyp(he[iv]|mif1)", "a HEIC image, which is not read here", _CONVERT),
        (rb"\0\0\0\x0cjP  |\xffO\xffQ", "a JPEG 2000 image, which is not read here", _CONVERT),
        (rb"\0\0\0\x0cJXL |\xff\x0a", "a JPEG XL image, which is not read here", _CONVERT),
        (rb".{128}DICM", "a DICOM image, which is not read here", _CONVERT),
        (rb".{4}ftyp", "an MP4 video", "write its frames as images"),
        (rb"%PDF", "a PDF document", "give images"),
        (rb"version https://git-lfs", "a Git LFS pointer, not the data", "fetch the data with git lfs pull"),
        (rb"7z\xbc\xaf\x27\x1c", "a 7z archive", _UNPACK),
        (rb"Rar!\x1a\x07", "a RAR archive", _UNPACK),
        (rb"\xd0\xcf\x11\xe0", "an Office document (Excel, Word)", _TABLE),
        (rb"\x89HDF\r\n\x1a\n", "an HDF5 file", _WRITE_IMAGES),
        (rb"PAR1", "a Parquet file", _WRITE_IMAGES),
        (rb"\x93NUMPY", "a NumPy array (.npy)", _WRITE_IMAGES),
        (
            rb"\x80[\x02\x04\x05]",
            "a Python pickle",
            "do not load it unless you trust it; write its images to a folder of classes",
        ),
        (struct.pack("<QQ", 0x112, 0), "MXNet arrays (.params, .nd)", _WEIGHTS),
    )
)
_IMAGES = frozenset(file_type.name for _, file_type in _TYPES if file_type.advice in (_AS_IMAGE, _CONVERT))


def recognise(start: bytes, size: int) -> FileType | None:
    """Recognise a file, or what stands where an image should; None for what is not known, and for a record file.

    Args:
        start: its first :data:`LOOK_AT` bytes, or all there are.
        size: of the whole, in bytes.
    """
    if not size:
        return FileType("empty: 0 bytes", "fetch or write it again")
    if start[:4] == b"\x0a\x23\xd7\xce":  # MXNet's RecordIO
        return None
    if start[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        first = start[30 : 30 + int.from_bytes(start[26:28], "little")]
        if first.endswith(b".npy"):
            return FileType("NumPy arrays (.npz)", _WRITE_IMAGES)
        if first.endswith((b"/data.pkl", b"/version", b".format_version")):
            return FileType("a PyTorch file (.pt, .pth)", _WEIGHTS)
        if first.startswith((b"[Content_Types].xml", b"_rels/", b"docProps/", b"xl/", b"mimetype")):
            return FileType("an Office document (Excel, Word)", _TABLE)
        return FileType("a zip archive", _AS_IT_IS, packs=True)
    for pattern, file_type in _TYPES:
        if pattern.match(start):
            return file_type
    if _begins_tfrecord(start, size):
        return FileType("a TFRecord file (TensorFlow's)", _WRITE_IMAGES)
    if not any(start):
        return FileType("zeros, nothing else", "fetch or write it again: the disk was full, or the copy was cut off")
    return _recognise_text(start)


def _begins_tfrecord(start: bytes, size: int) -> bool:
    """Return whether a file begins as a TFRecord: a length of 8 bytes, a checksum of 4, an Example or an image."""
    length = int.from_bytes(start[:8], "little")
    return 0 < length <= size - 16 and start[12:].startswith((b"\x0a", b"\xff\xd8\xff", b"\x89PNG"))


def _recognise_text(start: bytes) -> FileType | None:
    # By its beginning alone: a page may have been written over part of an image.
    if start[:64].lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return FileType("an HTML page", _AGAIN)
    try:
        text = start.decode("utf-8-sig", "strict" if len(start) < LOOK_AT else "ignore")
    except UnicodeDecodeError:
        return None
    if any(not c.isprintable() and c not in "\t\r\n" for c in text):
        return None
    head = text.lstrip().lower()
    if head.startswith("<svg") or (head.startswith("<?xml") and "<svg" in head):
        return FileType("an SVG drawing, which is not read here", _CONVERT)
    if head.startswith("<?xml"):
        return FileType("XML", _AGAIN)
    if head.startswith(("{", "[")):
        return FileType("JSON", "give the file that holds the images")
    fields = text.splitlines()[0].split("\t") if text.strip() else [""]
    if len(fields) == 2 and all(field.strip().isdigit() for field in fields):
        return FileType("the index (.idx) of a record file", "give the .rec beside it")
    if len(fields) >= 3 and fields[0].strip().isdigit():
        return FileType(
            "a list of images (.lst)", "call it NAME.lst, and pack it: steady pack NAME.lst OUT", packs=True
        )
    return FileType("text", "give the file that holds the images", packs=True)


def why_no_image(data: bytes | memoryview, error: Exception | None = None) -> str:
    """Return why the header of an image file could not be read; ``error``: of the decoder."""
    file_type = recognise(bytes(data[:LOOK_AT]), len(data))
    if file_type is None:
        return UNKNOWN
    name = file_type.name
    if "Git LFS" in name:
        return "a Git LFS pointer, not the image: fetch it with git lfs pull"
    if "not read here" in name:
        return f"{name}: {_CONVERT}"
    if name not in _IMAGES:
        return name if ":" in name or "nothing else" in name else f"{name}{NO_IMAGE}"
    if name == "a JPEG image":
        return _why_no_jpeg(data)
    if _ends_early(data):
        return CUT_SHORT
    if name == "a TIFF image" and (error is None or "cannot identify" in str(error)):
        return f"a TIFF of a kind that is not read here, or damaged: {_CONVERT}"
    return "damaged header" if error is None or "decoder object" in str(error) else why_damaged(error)


def _ends_early(data: bytes | memoryview) -> bool:
    """Return whether a WebP is shorter than it says, or the tables of a TIFF would lie beyond its end."""
    start = bytes(data[:8])
    if start[:4] == b"RIFF":
        return int.from_bytes(start[4:], "little") + 8 > len(data)
    orders: dict[bytes, Literal["little", "big"]] = {b"II*\0": "little", b"MM\0*": "big"}
    order = orders.get(start[:4])
    return order is not None and int.from_bytes(start[4:], order) >= len(data)


# What Pillow says, by versions past and present, and what it means.
_PILLOW_ERRORS = (
    (re.compile("truncated|not enough image data|end of file|EOF", re.IGNORECASE), CUT_SHORT),
    (re.compile("broken data stream|decoder error|unrecognized data|cannot load"), "damaged: it cannot be decoded"),
    (re.compile("broken PNG|bad header checksum|chunk"), "damaged: a chunk is broken"),
    # Its "cannot identify" names a buffer's address: noise, and different in every process.
    (re.compile("cannot identify"), "damaged header"),
)


def why_damaged(error: Exception) -> str:
    """Say in a few words what a decoder's error means for pixels that it could not decode."""
    text = str(error) or type(error).__name__
    return next((meaning for pattern, meaning in _PILLOW_ERRORS if pattern.search(text)), f"damaged: {text}")


FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_LOSSLESS = {0xC3, 0xC7, 0xCB, 0xCF}
_HIERARCHICAL = {0xC5, 0xC6, 0xC7, 0xCD, 0xCE, 0xCF}
SCAN, _END = 0xDA, 0xD9


class Frame(NamedTuple):
    """The frame header of a JPEG; ``kind`` is its marker's second byte, ``parts`` the number of colours."""

    kind: int
    bits: int
    height: int
    width: int
    parts: int


def frame_of(data: bytes | memoryview) -> Frame | None:
    """The frame header of a JPEG; None where there is none before the first scan."""
    for marker, at in markers(data):
        if marker in FRAMES and at + 10 <= len(data):
            height, width = int.from_bytes(data[at + 5 : at + 7], "big"), int.from_bytes(data[at + 7 : at + 9], "big")
            return Frame(marker, data[at + 4], height, width, data[at + 9])
    return None


def scan_of(data: bytes | memoryview) -> int:
    """Return the byte at which the first scan of a JPEG begins; the number of its bytes where there is none."""
    return next((at for marker, at in markers(data) if marker == SCAN), len(data))


def has_all_scans(data: bytes | memoryview) -> bool:
    """Return whether the scans of a JPEG together hold every coefficient of every colour, to its last bit.

    Those of a progressive one come one after the other: without the last it is a coarser picture, and no error.
    """
    frame, at = frame_of(data), scan_of(data)
    if frame is None:
        return False
    left_bits: dict[tuple[int, int], int] = {}
    data = bytes(data)
    while at + 10 <= len(data):
        if data[at + 1] == SCAN:
            end = at + 5 + 2 * data[at + 4]
            first, last, bits = data[end : end + 3].ljust(3, b"\xff")
            for colour in data[at + 5 : end : 2]:
                left_bits |= {(colour, place): bits & 15 for place in range(first, min(last, 63) + 1)}
        marker = _BEHIND_DATA.search(data, at + 2 + int.from_bytes(data[at + 2 : at + 4], "big"))
        at = len(data) if marker is None else marker.start()
    return len(left_bits) == 64 * frame.parts and not any(left_bits.values())


_BEHIND_DATA = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]")  # neither a stuffed byte nor a restart marker


def markers(data: bytes | memoryview) -> Iterator[tuple[int, int]]:
    """The second bytes of a JPEG's markers, and where they stand, as far as its first scan or its end."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if marker != 0xFF:
            yield marker, at
        if marker in (SCAN, _END):
            return
        # Any number of 0xFF may stand before a marker; every marker this early has a length.
        at += 1 if marker == 0xFF else 2 + int.from_bytes(data[at + 2 : at + 4], "big")


def _why_no_jpeg(data: bytes | memoryview) -> str:
    frame = frame_of(data)
    if frame is None:
        has_scan_or_end = any(bytes((0xFF, marker)) in bytes(data) for marker in (SCAN, _END))
        return "damaged header" if has_scan_or_end else CUT_SHORT
    if frame.kind in _LOSSLESS:
        return f"a lossless JPEG of {frame.bits} bits, which is not read here: convert it to PNG"
    if frame.kind in _HIERARCHICAL:
        return f"a hierarchical JPEG, which is not read here: {_CONVERT}"
    if frame.bits == 12:
        return "a JPEG of 12 bits, which is not read here: convert it to 8 bits"
    if not frame.height or not frame.width:
        return f"damaged header: {frame.width} x {frame.height} pixels"
    return "damaged header"
