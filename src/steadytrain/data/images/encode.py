"""Encode one image file's bytes as they are stored: checked, upright, resized.

An image stays **byte for byte** what it is when nothing has to change: an upright grey or RGB image of 8 bits a
channel, of one frame, without palette or transparency, that needs no resize and whose format is the one asked for.
Everything is decoded once all the same, so that nothing damaged is stored.

JPEGs get restart markers: after every few MCUs ("minimum coded units", 8 or 16 pixels a side) the coder starts anew and
leaves a marker (ITU-T T.81, 1992, section E.1.4). Every decoder reads such files; the native one leaves out the
intervals that a crop does not show, columns as well as rows.
"""

from __future__ import annotations

import io
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import simplejpeg
from PIL import Image

from steadytrain.data.arrays import Pixels
from steadytrain.data.images.decode import (
    MAX_PIXELS,
    BadImageError,
    decode_file,
    decode_jpeg,
    format_of,
    from_ppm,
    is_common,
    orientation,
    plain_png,
    read_header,
    reduction,
    to_pixels,
    turn,
)
from steadytrain.data.images.file_types import frame_of, scan_of
from steadytrain.data.images.near import begin_hashes
from steadytrain.data.images.resize import resize
from steadytrain.data.images.statistics import PixelCount
from steadytrain.errors import DataError, did_you_mean

native: Any = None
with suppress(ImportError):
    native = import_module("steadytrain.native")

Encoding = Literal["auto", "jpg", "png", "webp", "raw", "pass"]
Subsampling = Literal["420", "444"]

SMALL_SIDE = 64
MOST_BYTES = 2**29 - 1 - 4096  # bytes of an encoded image: what a record can hold, less its header and labels
_LONGEST_SIDE = {"jpg": 65_500, "webp": 16_383}  # pixels, by libjpeg and by the format

_RESTART_UNIT = 16  # pixels, that ``Settings.restart`` counts
_MCU_WIDTH = {"Gray": 8, "444": 8, "440": 8, "422": 16, "420": 16, "411": 32}  # pixels, by chroma


@dataclass(frozen=True, kw_only=True)
class PackSettings:
    """The form in which images are stored.

    Args:
        shorter_side: larger images are scaled down to this many pixels on their shorter side (bicubic, antialiased);
            smaller ones are never enlarged. None keeps every size.
        quality: of a JPEG or WebP that is encoded here, 1 to 100.
        encoding: ``auto``: PNG when both sides have at most 64 pixels in the end, else JPEG; ``jpg``, ``png`` or
            ``webp``: always that; ``raw``: bare pixels, as a PPM or PGM; ``pass``: every file's own bytes, checked and
            otherwise untouched (orientation included).
        grey: store one channel.
        restart: JPEGs that are encoded here get restart markers, at most so many times 16 pixels apart, so that a crop
            can be decoded without the rest; 0: none.
        mark_kept: JPEGs that need not change get them too. No pixel changes, but the bytes do; progressive ones stay as
            they are.
        subsampling: chroma of a JPEG that is encoded here: ``420``, half the resolution in each direction; ``444``, all
            of it.

    Raises:
        DataError: a value out of range, or two that exclude each other.
    """

    shorter_side: int | None = None
    quality: int = 95
    encoding: Encoding = "auto"
    grey: bool = False
    restart: int = 4
    mark_kept: bool = False
    subsampling: Subsampling = "420"

    def __post_init__(self) -> None:
        if self.shorter_side is not None and not 1 <= self.shorter_side <= 10_000:
            raise DataError(f"--shorter-side is {self.shorter_side}; it must be from 1 to 10000 pixels")
        if not 1 <= self.quality <= 100:
            raise DataError(f"--quality is {self.quality}; it must be from 1 to 100")
        if not 0 <= self.restart <= 1000:
            raise DataError(f"--restart is {self.restart}; it must be from 0 (no markers) to 1000")
        if self.mark_kept and (not self.restart or self.encoding == "pass"):
            other = "--restart 0" if not self.restart else "--encoding pass"
            raise DataError(f"--mark-kept adds restart markers, and {other} adds none: drop one of the two")
        if self.mark_kept and native is None:
            raise DataError(
                "--mark-kept needs the native decoder, which was not built: install Rust (https://rustup.rs), then"
                " steadytrain again from its sources, or leave the option out"
            )
        if self.encoding not in get_args(Encoding):
            near = did_you_mean(str(self.encoding), get_args(Encoding))
            raise DataError(f"--encoding is {self.encoding!r}; it must be auto, jpg, png, webp, raw or pass.{near}")
        if self.encoding == "pass" and (self.shorter_side or self.grey):
            other = "--shorter-side" if self.shorter_side else "--grey"
            raise DataError(f"--encoding pass keeps every file's bytes, {other} would change them: drop one of the two")
        if self.subsampling not in get_args(Subsampling):
            raise DataError(f"--subsampling is {self.subsampling!r}; it must be 420 or 444")
        if self.subsampling != "420" and (self.grey or not self.stores_jpegs):
            other = "--grey" if self.grey else f"--encoding {self.encoding}"
            raise DataError(
                f"--subsampling {self.subsampling} is for colour JPEGs, and {other} stores none: drop one of the two"
            )

    @property
    def stores_jpegs(self) -> bool:
        """Return whether images may be encoded as JPEGs."""
        return self.encoding in ("auto", "jpg")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, as a card keeps them.

        ``subsampling`` is left out where it is the default: caches of earlier versions, named by these values, stay.

        >>> "subsampling" in PackSettings().to_dict(), PackSettings(subsampling="444").to_dict()["subsampling"]
        (False, '444')
        """
        values = asdict(self)
        if self.subsampling == "420":
            del values["subsampling"]
        return values


class PackedImage(NamedTuple):
    """An image ready to be stored; ``height`` and ``width`` are those of the upright picture.

    ``peak``: the largest value of 16 bits whose range is not known, else -1; ``lost``: what is not kept, in words.
    ``hashes``: as of :func:`~steadytrain.data.images.near.end_hashes`, or what these are made of; empty: none.
    """

    data: bytes
    height: int
    width: int
    channels: int
    format: str
    kept: bool
    peak: int = -1
    hashes: bytes = b""
    lost: tuple[str, ...] = ()


def pack_bytes(data: bytes, settings: PackSettings, count: PixelCount | None = None) -> PackedImage:
    """Check and encode one image; arguments as for :func:`pack_file`.

    Raises:
        BadImageError: says why it cannot be used.
    """
    image = _open_plain_jpeg(data, settings) or _open_plain_png(data, settings) or _open(data, settings)
    size = _fit(image.size, settings.shorter_side)
    stays = image.can_stay and size == image.size
    kept, source = stays or settings.encoding == "pass", data
    if stays and settings.mark_kept and image.format == "jpg":
        original, data = data, add_restart_markers(data, most=settings.restart)
        kept = data is original
    if stays and count is None:
        packed = _packed(data, (*image.size[::-1], image.channels), image.format, kept=kept)
        return packed._replace(hashes=begin_hashes(np.asarray(image.decoded), stored=data, source=source))
    pixels, peak = image.decoded, -1
    lost: tuple[str, ...] = ()
    if isinstance(pixels, Image.Image):
        peak, lost = pixels.info.get("peak", -1), tuple(pixels.info.get("lost", {}).values())
    if isinstance(pixels, Image.Image):  # average down by a whole factor first, as a JPEG's decoder does
        pixels = to_pixels(pixels, factor=max(1, reduction(pixels.size, settings.shorter_side)))
    image = image._replace(decoded=pixels)  # what Pillow holds of a large image is as large again
    pixels = turn(_resize(pixels, size, settings), image.orientation)
    if stays or kept:
        packed = _packed(data, pixels.shape, image.format, kept=kept)
    else:
        packed = _encode(pixels, _target_format(settings, size), settings)
    if count is not None:
        count.add(pixels)
    return packed._replace(peak=peak, lost=lost, hashes=begin_hashes(pixels, stored=packed.data, source=source))


def pack_pixels(pixels: Pixels, settings: PackSettings, count: PixelCount | None = None) -> PackedImage:
    """Encode bare pixels, uint8[H, W, 3] or uint8[H, W]; the rest as for :func:`pack_bytes`.

    Raises:
        BadImageError: says why they cannot be stored.
    """
    size = _fit((pixels.shape[1], pixels.shape[0]), settings.shorter_side)
    pixels = _resize(pixels, size, settings)
    packed = _encode(pixels, _target_format(settings, size), settings)
    if count is not None:
        count.add(pixels)
    return packed._replace(hashes=begin_hashes(pixels, stored=packed.data))


class _Opened(NamedTuple):
    """A decoded file: ``size`` is width and height as it lies; ``can_stay``: its bytes are what is asked for."""

    decoded: Image.Image | Pixels
    size: tuple[int, int]
    channels: int
    format: str
    orientation: int
    can_stay: bool


def _open(data: bytes, settings: PackSettings) -> _Opened:
    image = read_header(data)
    decoded, is_sound = decode_file(image, data, settings.shorter_side)
    name, turned = format_of(image), orientation(image)
    can_stay = is_sound and turned == 1 and (image.mode == "L" or (image.mode == "RGB" and not settings.grey))
    if name == "jpg":
        can_stay = can_stay and settings.stores_jpegs
    elif name != _target_format(settings, image.size) or "transparency" in image.info:
        can_stay = False
    elif name == "ppm":
        can_stay = can_stay and from_ppm(data) is not None
    else:
        can_stay = can_stay and not getattr(image, "is_animated", False)
        if name == "png":
            # Bytes 24 and 25: bits a channel, and grey (0) or RGB (2). Pillow calls a 16-bit RGB one "RGB" too.
            can_stay = can_stay and data[24] == 8 and data[25] in (0, 2)
    return _Opened(decoded, image.size, len(image.getbands()), name, turned, can_stay)


def _open_plain_jpeg(data: bytes, settings: PackSettings) -> _Opened | None:
    """Open the JPEG that most photographs are without Pillow; None for any other, and for a damaged one."""
    frame = frame_of(data) if data[:2] == b"\xff\xd8" else None
    if frame is None or not is_common(frame) or frame.parts not in (1, 3):
        return None
    header = scan_of(data)
    if any(data.find(mark, 0, header) >= 0 for mark in (b"Exif\0", b"tiff:Orientation", b"Adobe")):
        return None  # it may be turned, or of other colours
    size = frame.width, frame.height
    try:
        pixels = decode_jpeg(data, size, frame.parts, settings.shorter_side)
    except ValueError:
        return None
    can_stay = settings.stores_jpegs and not (settings.grey and frame.parts == 3)
    return _Opened(pixels, size, frame.parts, "jpg", 1, can_stay)


def _open_plain_png(data: bytes, settings: PackSettings) -> _Opened | None:
    """Open the PNG that most small images are; None for any other, and for a damaged one."""
    pixels = plain_png(data, most=MAX_PIXELS)
    if pixels is None:
        return None
    size, channels = (pixels.shape[1], pixels.shape[0]), 1 if pixels.ndim == 2 else 3
    decoded = Image.fromarray(pixels) if reduction(size, settings.shorter_side) > 1 else pixels
    can_stay = _target_format(settings, size) == "png" and not (settings.grey and channels == 3)
    return _Opened(decoded, size, channels, "png", 1, can_stay)


def _resize(pixels: Pixels, size: tuple[int, int], settings: PackSettings) -> Pixels:
    if settings.grey and pixels.ndim == 3:
        pixels = np.asarray(Image.fromarray(pixels).convert("L"))
    return resize(pixels, size)


def _fit(size: tuple[int, int], shorter_side: int | None) -> tuple[int, int]:
    """Scale a width and a height down until the shorter one is ``shorter_side``.

    >>> _fit((400, 533), 256), _fit((100, 50), 256), _fit((10000, 3), 2)
    ((256, 341), (100, 50), (6667, 2))
    """
    if shorter_side is None or min(size) <= shorter_side:
        return size
    width, height = (max(1, round(side * shorter_side / min(size))) for side in size)
    return width, height


def _target_format(settings: PackSettings, size: tuple[int, int]) -> str:
    if settings.encoding in ("auto", "pass"):
        return "png" if max(size) <= SMALL_SIDE else "jpg"
    return "ppm" if settings.encoding == "raw" else settings.encoding


def _encode(pixels: Pixels, name: str, settings: PackSettings) -> PackedImage:
    height, width = pixels.shape[:2]
    if name in _LONGEST_SIDE and max(height, width) > _LONGEST_SIDE[name]:
        raise BadImageError(
            f"{width:,} x {height:,} pixels, and {'a JPEG' if name == 'jpg' else 'a WebP'} holds at most"
            f" {_LONGEST_SIDE[name]:,} a side: give --encoding png, or a --shorter-side"
        )
    if name == "ppm":
        data = to_ppm(pixels)
    elif name == "jpg":
        data = encode_jpeg(pixels, settings.quality, most=settings.restart, subsampling=settings.subsampling)
    else:
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, name, quality=settings.quality)
        data = file.getvalue()
    return _packed(data, pixels.shape, name, kept=False)


def _packed(data: bytes, shape: tuple[int, ...], name: str, *, kept: bool) -> PackedImage:
    if len(data) > MOST_BYTES:
        raise BadImageError(f"{len(data):,} bytes are more than a record can hold")
    return PackedImage(data, shape[0], shape[1], 3 if shape[2:] == (3,) else 1, name, kept)


def encode_jpeg(pixels: Pixels, quality: int, *, most: int, subsampling: Subsampling = "420") -> bytes:
    """Encode a baseline JPEG.

    Args:
        pixels: uint8[H, W, 3] or uint8[H, W].
        quality: 1 to 100.
        most: as for :func:`restart_interval`; 0: no markers.
        subsampling: as for ``PackSettings``; of no consequence for grey.
    """
    is_full = pixels.ndim == 3 and subsampling == "444"
    options: dict[str, Any] = {"quality": quality, "subsampling": "4:4:4" if is_full else "4:2:0"}
    if most and is_full:
        # Not a divisor of the row: 341 pixels are 43 MCUs of 8, and a marker after each of them makes files 5 % larger,
        # after every eighth 1.2 %. Crops are decoded as fast, to within a tenth.
        options["restart_marker_blocks"] = most * _RESTART_UNIT // _MCU_WIDTH["444"]
    elif most:
        mcu = _MCU_WIDTH["Gray" if pixels.ndim == 2 else "420"]
        options["restart_marker_blocks"] = restart_interval(pixels.shape[1], mcu, most=most)
    file = io.BytesIO()
    # By Pillow: simplejpeg 1.9.0 has no markers, and its transform is the fast one, whatever option it gets: 2.5 dB
    # less at quality 95, and files as large.
    Image.fromarray(pixels).save(file, "JPEG", **options)
    return file.getvalue()


def add_restart_markers(data: bytes, *, most: int) -> bytes:
    """Add restart markers to a sound JPEG without decoding it; return the same bytes where that cannot be done."""
    assert native is not None
    try:
        _, width, _, chroma = simplejpeg.decode_jpeg_header(data)
    except KeyError:  # chroma of a form that it has no name for, as 4:4:1
        return data
    if chroma not in _MCU_WIDTH:
        return data
    marked: bytes | None = native.restart(data, restart_interval(width, _MCU_WIDTH[chroma], most=most))
    return data if marked is None else marked


@lru_cache(maxsize=1024)
def restart_interval(width: int, mcu: int, *, most: int) -> int:
    """Return the MCUs from one marker to the next: the largest divisor of a row up to ``most`` times 16 pixels.

    Args:
        width, mcu: of the image and of an MCU, in pixels.
        most: 1 or more.

    >>> [restart_interval(width, mcu, most=4) for width, mcu in ((341, 16), (384, 16), (272, 16), (384, 8))]
    [2, 4, 1, 8]
    """
    across = -(-width // mcu)
    return next(each for each in range(max(1, most * _RESTART_UNIT // mcu), 0, -1) if across % each == 0)


def to_ppm(pixels: Pixels) -> bytes:
    """Write uint8[H, W, 3] as a PPM (P6), or uint8[H, W] as a PGM (P5), which other programs read as well.

    >>> data = to_ppm(np.zeros((2, 3, 3), np.uint8))
    >>> data[:11], len(data), from_ppm(data).shape
    (b'P6\\n3 2\\n255\\n', 29, (2, 3, 3))
    """
    kind = 6 if pixels.ndim == 3 else 5
    return b"P%d\n%d %d\n255\n" % (kind, pixels.shape[1], pixels.shape[0]) + pixels.tobytes()
