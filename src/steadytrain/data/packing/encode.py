"""One file's bytes in, the bytes to be stored out: checked, upright, resized, encoded.

An image stays **byte for byte** what it is when nothing has to change: an upright grey or RGB image of 8 bits a
channel, of one frame, without palette or transparency, that needs no resize and whose format is the one asked for.
Everything is decoded once all the same, so that nothing damaged is stored.
"""

from __future__ import annotations

import contextlib
import io
import struct
import zlib
from collections.abc import Generator, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from importlib import import_module
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image

from steadytrain.data.checking.file_types import frame_of, scan_of
from steadytrain.data.packing.images import (
    MAX_PIXELS,
    BadImageError,
    Counts,
    PixelCount,
    flatten,
    is_common,
    is_common_jpeg,
    load,
    orientation,
    read_header,
    turn,
)
from steadytrain.data.packing.resize import resize
from steadytrain.data.packing.worker_pool import do_all
from steadytrain.data.recordio.framing import MAX_PAYLOAD, Pixels, of_bare, to_bare
from steadytrain.data.sources.listing import Piece, read_file, read_piece
from steadytrain.errors import DataError, did_you_mean

Encoding = Literal["auto", "jpg", "png", "webp", "raw", "pass"]

SMALL_SIDE = 64
_ROOM = 4096  # bytes of a record kept free for its header and labels
_LONGEST = {"jpg": 65_500, "webp": 16_383}  # pixels a side, by libjpeg and by the format


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How images are stored.

    Args:
        shorter_side: larger images are scaled down to this many pixels on their shorter side (bicubic, antialiased);
            smaller ones are never enlarged. None keeps every size.
        quality: of a JPEG or WebP that is encoded here, 1 to 100 (4:2:0 chroma).
        encoding: ``auto``: PNG when both sides have at most 64 pixels in the end, else JPEG; ``jpg``, ``png`` or
            ``webp``: always that; ``raw``: bare pixels, as a PPM or PGM; ``pass``: every file's own bytes, checked and
            otherwise untouched (orientation included).
        grey: store one channel.
        restart: JPEGs that are encoded here get restart markers, at most so many times 16 pixels apart, so that a crop
            can be decoded without the rest (:mod:`steadytrain.data.packing.encode`); 0: none.
        mark_kept: JPEGs that need not change get them too. No pixel changes, but the bytes do; progressive ones stay as
            they are.

    Raises:
        DataError: a value out of range, or two that exclude each other.
    """

    shorter_side: int | None = None
    quality: int = 95
    encoding: Encoding = "auto"
    grey: bool = False
    restart: int = 4
    mark_kept: bool = False

    def __post_init__(self) -> None:
        if self.shorter_side is not None and not 1 <= self.shorter_side <= 10_000:
            raise DataError(f"--shorter-side is {self.shorter_side}; it must be from 1 to 10000 pixels")
        if not 1 <= self.quality <= 100:
            raise DataError(f"--quality is {self.quality}; it must be from 1 to 100")
        if not 0 <= self.restart <= 1000:
            raise DataError(f"--restart is {self.restart}; it must be from 0 (no markers) to 1000")
        if self.mark_kept:
            self._check_marks()
        if self.encoding not in get_args(Encoding):
            near = did_you_mean(str(self.encoding), get_args(Encoding))
            raise DataError(f"--encoding is {self.encoding!r}; it must be auto, jpg, png, webp, raw or pass.{near}")
        if self.encoding == "pass" and (self.shorter_side or self.grey):
            other = "--shorter-side" if self.shorter_side else "--grey"
            raise DataError(f"--encoding pass keeps every file's bytes, {other} would change them: drop one of the two")

    def _check_marks(self) -> None:
        if not self.restart or self.encoding == "pass":
            other = "--restart 0" if not self.restart else "--encoding pass"
            raise DataError(f"--mark-kept adds restart markers, and {other} adds none: drop one of the two")
        if native is None:
            raise DataError(
                "--mark-kept needs the native decoder, which was not built: install Rust (https://rustup.rs), then"
                " steadytrain again from its sources, or leave the option out"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a card keeps them."""
        return asdict(self)


class Packed(NamedTuple):
    """An image ready to be stored; ``height`` and ``width`` are those of the upright picture."""

    data: bytes
    height: int
    width: int
    channels: int
    format: str
    kept: bool


def pack_file(place: str | Piece, settings: Settings, count: PixelCount | None = None) -> Packed | str:
    """Read one image; the reason, in a few words, where it cannot be used.

    Args:
        place: the path of an image file, or where an image lies inside a file.
        settings: how it is to be stored.
        count: takes the pixels in, before compression.
    """
    try:
        if isinstance(place, str):
            return pack_bytes(read_file(place), settings, count)
        data = read_piece(place)
        if place.pixels is not None:
            return pack_pixels(place.pixels.of(data), settings, count)
        return pack_bytes(data, settings, count)
    except BadImageError as error:
        return str(error)
    except MemoryError:
        return "too large for this machine's memory"


def pack_bytes(data: bytes, settings: Settings, count: PixelCount | None = None) -> Packed:
    """Check and encode one image; arguments as for :func:`pack_file`.

    Raises:
        BadImageError: says why it cannot be used.
    """
    found = _open_plain_jpeg(data, settings) or _open_plain_png(data, settings) or _open(data, settings)
    size = _fit(found.size, settings.shorter_side)
    stays = found.can_stay and size == found.size
    kept = stays or settings.encoding == "pass"
    if stays and settings.mark_kept and found.format == "jpg":
        data, before = add_restart_markers(data, most=settings.restart), data
        kept = data is before
    if stays and count is None:
        return _packed(data, (*found.size[::-1], found.channels), found.format, kept=kept)
    pixels = _reduced(_plain(found.decoded, settings.shorter_side), size, settings)
    if found.turned != 1:
        pixels = np.asarray(turn(Image.fromarray(pixels), found.turned))
    unchanged = stays or kept
    name = found.format if unchanged else _wanted(settings, size)
    packed = _packed(data if unchanged else _encode(pixels, name, settings), pixels.shape, name, kept=kept)
    if count is not None:
        count.add(pixels)
    return packed


def pack_pixels(pixels: Pixels, settings: Settings, count: PixelCount | None = None) -> Packed:
    """Encode bare pixels, uint8[H, W, 3] or uint8[H, W]; the rest as for :func:`pack_bytes`.

    Raises:
        BadImageError: says why they cannot be stored.
    """
    size = _fit((pixels.shape[1], pixels.shape[0]), settings.shorter_side)
    pixels = _reduced(pixels, size, settings)
    name = _wanted(settings, size)
    packed = _packed(_encode(pixels, name, settings), pixels.shape, name, kept=False)
    if count is not None:
        count.add(pixels)
    return packed


class _Opened(NamedTuple):
    """A decoded file: width and height as it lies, orientation, and whether its bytes are what is asked for."""

    decoded: Image.Image | Pixels
    size: tuple[int, int]
    channels: int
    format: str
    turned: int
    can_stay: bool


def _open(data: bytes, settings: Settings) -> _Opened:
    image = read_header(data)
    decoded, sound = decode_file(image, data, settings.shorter_side)
    turned = orientation(image)
    can_stay = sound and turned == 1 and _is_as_asked(image, data, settings)
    return _Opened(decoded, image.size, len(image.getbands()), _format(image), turned, can_stay)


def _open_plain_jpeg(data: bytes, settings: Settings) -> _Opened | None:
    """The same for the JPEG that most photographs are, without Pillow; None for any other, and for a damaged one."""
    frame = frame_of(data) if data[:2] == b"\xff\xd8" else None
    if frame is None or not is_common(frame) or frame.parts not in (1, 3) or _has_exif_or_adobe(data):
        return None
    size = frame.width, frame.height
    try:
        pixels = _decode_jpeg(data, size, frame.parts, settings.shorter_side)
    except ValueError:
        return None
    can_stay = settings.encoding in ("auto", "jpg") and not (settings.grey and frame.parts == 3)
    return _Opened(pixels, size, frame.parts, "jpg", 1, can_stay)


def _has_exif_or_adobe(data: bytes) -> bool:
    """Whether such a segment may stand before the first scan."""
    header = scan_of(data)
    return data.find(b"Exif\0", 0, header) >= 0 or data.find(b"Adobe", 0, header) >= 0


def _open_plain_png(data: bytes, settings: Settings) -> _Opened | None:
    """The same for a PNG of 8 bits that nothing is odd about."""
    pixels = plain_png(data, most=MAX_PIXELS)
    if pixels is None:
        return None
    size, channels = (pixels.shape[1], pixels.shape[0]), 1 if pixels.ndim == 2 else 3
    factor = _factor(size, settings.shorter_side)
    decoded = Image.fromarray(pixels) if factor > 1 else pixels
    can_stay = _wanted(settings, size) == "png" and not (settings.grey and channels == 3)
    return _Opened(decoded, size, channels, "png", 1, can_stay)


def _factor(size: tuple[int, int], shorter_side: int | None) -> int:
    """The whole number by which an image is averaged down before it is resized: at least twice what is wanted stays."""
    return min(size) // (2 * shorter_side) if shorter_side else 1


def _plain(decoded: Image.Image | Pixels, shorter_side: int | None) -> Pixels:
    """Grey or RGB of 8 bits; far larger ones already averaged down by a whole factor, as a JPEG's decoder does it."""
    if not isinstance(decoded, Image.Image):
        return decoded
    image = flatten(decoded)
    factor = _factor(image.size, shorter_side)
    return np.asarray(image.reduce(factor) if factor > 1 else image)


def _reduced(pixels: Pixels, size: tuple[int, int], settings: Settings) -> Pixels:
    """Grey where that is asked for, and of this size."""
    if settings.grey and pixels.ndim == 3:
        pixels = np.asarray(Image.fromarray(pixels).convert("L"))
    return resize(pixels, size)


def _packed(data: bytes, shape: tuple[int, ...], name: str, *, kept: bool) -> Packed:
    if len(data) > MAX_PAYLOAD - _ROOM:
        raise BadImageError(f"{len(data):,} bytes are more than a record can hold")
    return Packed(data, shape[0], shape[1], 3 if shape[2:] == (3,) else 1, name, kept)


def decode_file(image: Image.Image, data: bytes, shorter_side: int | None = None) -> tuple[Image.Image | Pixels, bool]:
    """Pixels as they lie in the file, perhaps scaled down by a JPEG's own transform; and whether nothing was amiss.

    Args:
        image: what :func:`~steadytrain.data.packing.images.read_header` made of ``data``.
        data: the file's bytes.
        shorter_side: that it will be scaled down to, in pixels; None: every pixel is wanted.

    Raises:
        BadImageError: damaged or cut short.
    """
    if _format(image) != "jpg":
        return load(image), True
    if image.mode not in ("L", "RGB") or not is_common_jpeg(data):
        return load(image), False
    try:
        return _decode_jpeg(data, image.size, 1 if image.mode == "L" else 3, shorter_side), True
    except ValueError as error:
        told = str(error).lower()
        if "premature end of jpeg file" in told:
            raise BadImageError("cut short") from None
        if "premature end" in told:
            raise BadImageError("damaged: image data is missing") from None
    # What else libjpeg complains of (stray bytes, odd markers) costs no pixels where Pillow can read it.
    return load(image), False


def _decode_jpeg(data: bytes, size: tuple[int, int], channels: int, shorter_side: int | None) -> Pixels:
    """Raises ValueError for anything that libjpeg complains of."""
    height, width = _least(size, shorter_side)
    space = "GRAY" if channels == 1 else "RGB"
    pixels: Pixels = simplejpeg.decode_jpeg(data, space, min_height=height, min_width=width)
    return pixels[..., 0] if channels == 1 else pixels


def _least(size: tuple[int, int], shorter_side: int | None) -> tuple[int, int]:
    """Height and width to ask a JPEG decoder for: the full ones, or a half, a quarter or an eighth of them.

    The other fractions are slower than no scaling at all. What is left is at least twice ``shorter_side``: closer to
    it the decoder's own scaling would be seen (as Pillow's ``reducing_gap=2``).
    """
    factor = next(f for f in (8, 4, 2, 1) if f <= max(_factor(size, shorter_side), 1))
    return -(-size[1] // factor), -(-size[0] // factor)


def _fit(size: tuple[int, int], shorter_side: int | None) -> tuple[int, int]:
    """Scale a width and a height down until the shorter one is ``shorter_side``.

    >>> _fit((400, 533), 256), _fit((100, 50), 256), _fit((10000, 3), 2)
    ((256, 341), (100, 50), (6667, 2))
    """
    if shorter_side is None or min(size) <= shorter_side:
        return size
    width, height = (max(1, round(side * shorter_side / min(size))) for side in size)
    return width, height


def _format(image: Image.Image) -> str:
    name = (image.format or "").lower()
    return "jpg" if name in ("jpeg", "mpo") else name


def _wanted(settings: Settings, size: tuple[int, int]) -> str:
    if settings.encoding in ("auto", "pass"):
        return "png" if max(size) <= SMALL_SIDE else "jpg"
    return "ppm" if settings.encoding == "raw" else settings.encoding


def _is_as_asked(image: Image.Image, data: bytes, settings: Settings) -> bool:
    """Whether a file's own bytes are what would be asked for, its size and orientation apart."""
    if image.mode not in ("L", "RGB") or (settings.grey and image.mode != "L"):
        return False
    name = _format(image)
    if name == "jpg":
        return settings.encoding in ("auto", "jpg")
    if name != _wanted(settings, image.size) or "transparency" in image.info:
        return False
    if name == "png":
        # Bytes 24 and 25: bits a channel, and grey (0) or RGB (2). Pillow calls a 16-bit RGB one "RGB" too.
        return data[24] == 8 and data[25] in (0, 2) and not getattr(image, "is_animated", False)
    return of_bare(data) is not None if name == "ppm" else not getattr(image, "is_animated", False)


def _encode(pixels: Pixels, name: str, settings: Settings) -> bytes:
    if name == "ppm":
        return to_bare(pixels)
    if name in _LONGEST and max(pixels.shape[:2]) > _LONGEST[name]:
        told = f"{pixels.shape[1]:,} x {pixels.shape[0]:,} pixels, and {'a JPEG' if name == 'jpg' else 'a WebP'} holds"
        raise BadImageError(f"{told} at most {_LONGEST[name]:,} a side: give --encoding png, or a --shorter-side")
    if name == "jpg":
        return encode_jpeg(pixels, settings.quality, most=settings.restart)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, name, quality=settings.quality)
    return file.getvalue()


_START = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
# Bits a channel, kind of colour, and the methods of compression, filtering and interlacing.
_MODES = {b"\x08\0\0\0\0": "L", b"\x08\2\0\0\0": "RGB"}
_HARMLESS = {b"IHDR", b"gAMA", b"cHRM", b"sRGB", b"pHYs", b"tEXt", b"tIME", b"bKGD", b"sBIT"}
_head = struct.Struct(">I4s").unpack_from
_sum = struct.Struct(">I").unpack_from


def plain_png(data: bytes, *, most: int) -> Pixels | None:
    """uint8[H, W] or uint8[H, W, 3]; None for anything that is not a sound, plain PNG of at most ``most`` pixels.

    >>> plain_png(b"\\x89PNG\\r\\n", most=100) is None
    True
    """
    mode = _MODES.get(data[24:29])
    if mode is None or data[:16] != _START:
        return None
    width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
    packed = _image_data(data) if 0 < width * height <= most else None
    if packed is None:
        return None
    try:
        image = Image.frombytes(mode, (width, height), packed, "zip", mode, 0)
    except ValueError:
        return None
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    return np.frombuffer(image.tobytes(), np.uint8).reshape(shape)


def _image_data(data: bytes) -> bytes | None:
    """What the IDAT chunks hold together; None where a chunk is damaged, or might change a pixel."""
    at = 8
    parts: list[bytes] = []
    while at + 12 <= len(data):
        size, kind = _head(data, at)
        end = at + 8 + size
        if end + 4 > len(data) or zlib.crc32(data[at + 4 : end]) != _sum(data, end)[0]:
            return None
        if kind == b"IEND":
            return parts[0] if len(parts) == 1 else b"".join(parts)
        if kind == b"IDAT":
            parts.append(data[at + 8 : end])
        elif kind not in _HARMLESS:
            return None
        at = end + 4
    return None


Task = Sequence[tuple[str | Piece, bool]]
"""Images to be encoded, files or pieces of files, each with whether its pixels are counted."""


@dataclass(frozen=True, slots=True)
class Done:
    """For each image of a task what to store, or why not; and the counts of the pixels to be counted."""

    results: tuple[Packed | str, ...]
    counts: Counts


def encode(task: Task, settings: Settings) -> Done:
    """Do one task, here."""
    count = PixelCount()
    results = tuple(pack_file(place, settings, count if counted else None) for place, counted in task)
    return Done(results, count.totals())


def encode_all(tasks: Iterable[Task], settings: Settings, *, workers: int) -> Generator[Done]:
    """Do tasks in order, in this process (``workers`` 0 or 1) or in that many children.

    Whatever their number, results come in the order of the tasks; a task on which a child died comes in parts. A file
    on which two children have died is given up, with the reason. Close the iterator to end it early.

    Raises:
        FailedError: no child could be started.
    """
    yield from do_all(tasks, partial(encode, settings=settings), _died, workers=workers if workers > 1 else 0)


def _died(_: tuple[str | Piece, bool], ending: str) -> Done:
    return Done((f"the decoder died of it ({ending})",), PixelCount().totals())


native: Any = None
with contextlib.suppress(ImportError):
    native = import_module("steadytrain.native")

_UNIT = 16  # pixels, that ``most`` counts
_MCU = {"Gray": 8, "444": 8, "440": 8, "422": 16, "420": 16, "411": 32}  # pixels across, by chroma


@lru_cache(maxsize=1024)
def restart_interval(width: int, mcu: int, *, most: int) -> int:
    """MCUs from one marker to the next: the largest divisor of a row that is no wider than ``most`` times 16 pixels.

    Args:
        width: of the image, in pixels.
        mcu: width of an MCU, in pixels.
        most: 1 or more.
    """
    across = -(-width // mcu)
    return next(each for each in range(max(1, most * _UNIT // mcu), 0, -1) if across % each == 0)


def encode_jpeg(pixels: NDArray[np.uint8], quality: int, *, most: int) -> bytes:
    """A baseline JPEG, of 4:2:0 chroma where there is colour.

    Args:
        pixels: uint8[H, W, 3] or uint8[H, W].
        quality: 1 to 100.
        most: as for :func:`interval`; 0: no markers.
    """
    told: dict[str, Any] = {"quality": quality, "subsampling": "4:2:0"}
    if most:
        mcu = _MCU["Gray" if pixels.ndim == 2 else "420"]
        told["restart_marker_blocks"] = restart_interval(pixels.shape[1], mcu, most=most)
    file = io.BytesIO()
    # By Pillow: simplejpeg 1.9.0 has no markers, and its transform is the fast one, whatever it is told: 2.5 dB less at
    # quality 95, and files as large.
    Image.fromarray(pixels).save(file, "JPEG", **told)
    return file.getvalue()


def add_restart_markers(data: bytes, *, most: int) -> bytes:
    """Add markers to a JPEG without decoding it; where that cannot be, the same bytes.

    Args:
        data: a sound JPEG.
        most: as for :func:`interval`.
    """
    assert native is not None
    _, width, _, chroma = simplejpeg.decode_jpeg_header(data)
    marked: bytes | None = (
        native.restart(data, restart_interval(width, _MCU[chroma], most=most)) if chroma in _MCU else None
    )
    return data if marked is None else marked
