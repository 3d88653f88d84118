"""Look at an image: whether all of it can be decoded, what is odd about it, and which others are the same."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from steadytrain.data.arrays import Ints, Pixels
from steadytrain.data.images.decode import (
    BadImageError,
    decode_file,
    format_of,
    is_common_jpeg,
    orientation,
    read_header,
    to_pixels,
    turn,
)
from steadytrain.data.images.file_types import CUT_SHORT, NO_IMAGE, UNKNOWN, scan_of
from steadytrain.data.images.near import perceptual_hash
from steadytrain.machine.worker_pool import map_in_children

T = TypeVar("T")
Fingerprints = NDArray[np.uint8]  # [N, 16]; zeros for an image that was not looked at, or cannot be used
FINGERPRINT_BYTES = 16
LONGEST = 20  # times as long as wide
WIDE = 2  # times as long as wide: beyond that, a square shows less than half of an image
_TOO_LARGE = "too large for this machine's memory"
_BY_MODE = {
    "CMYK": "cmyk",
    "P": "palette",
    "PA": "palette",
    "1": "one-bit",
    "LAB": "other-colours",
    "HSV": "other-colours",
    "YCbCr": "other-colours",
}


def is_wide(sizes: Ints) -> bool:
    """Return whether images of these heights and widths, int64[n, 2], are mostly longer than :data:`WIDE` to one.

    One pixel is no matter: packing rounds.

    >>> is_wide(np.array([[100, 200], [200, 100], [100, 900]])), is_wide(np.array([[480, 120]]))
    (False, True)
    """
    return len(sizes) > 0 and bool(np.median((sizes.max(axis=1) - 1) / sizes.min(axis=1)) > WIDE)


class Look(NamedTuple):
    """The findings about one image.

    Args:
        fault: kind of finding that says why it cannot be used; empty for a sound image.
        fingerprint: of its pixels; see :func:`fingerprint`.
        format: ``jpg``, ``png``, ...; empty where it has none.
        width, height: in pixels, upright; 0 where they are not known.
        odd: kinds of finding, with a detail each.
        peak: the largest value of an image of 16 bits whose range is not known; -1 for any other.
        near: its perceptual hash, where that was asked for; see :mod:`~steadytrain.data.images.near`.
    """

    fault: str
    detail: str
    fingerprint: bytes = bytes(FINGERPRINT_BYTES)
    format: str = ""
    width: int = 0
    height: int = 0
    odd: tuple[tuple[str, str], ...] = ()
    near: bytes = bytes(FINGERPRINT_BYTES)
    peak: int = -1


def fingerprint(pixels: Image.Image | Pixels) -> bytes:
    """A hash that two images share only if their sizes and pixels are the same, whatever their files are.

    ``pixels``: upright, of 8 bits: uint8[H, W, 3] or uint8[H, W]. Grey that is stored as colour counts as grey.

    >>> grey = np.arange(12, dtype=np.uint8).reshape(3, 4)
    >>> fingerprint(grey) == fingerprint(np.stack([grey] * 3, axis=2)) != fingerprint(grey.reshape(4, 3))
    True
    """
    pixels = np.asarray(pixels)
    if pixels.ndim == 3 and all((part == part[..., :1]).all() for part in (pixels[:1], pixels)):  # most end at row one
        pixels = pixels[..., 0]
    digest = hashlib.sha256(repr(pixels.shape).encode())  # what processors have instructions for
    digest.update(np.ascontiguousarray(pixels).data)
    return digest.digest()[:FINGERPRINT_BYTES]


def look_at(data: bytes, *, near: bool = False) -> Look:
    """Decode an image as packing and the loader would, and say what was seen; ``near``: with its perceptual hash."""
    name = ""
    try:
        image = read_header(data)
        name = format_of(image)
        decoded, is_sound = decode_file(image, data)
    except BadImageError as error:
        return Look(*_fault(str(error), data), format=name)
    except MemoryError:
        return Look("unusable-image", _TOO_LARGE, format=name)
    turned = orientation(image)
    try:
        pixels = turn(to_pixels(decoded) if isinstance(decoded, Image.Image) else decoded, turned)
        peak = decoded.info.get("peak", -1) if isinstance(decoded, Image.Image) else -1
        odd, (width, height) = tuple(_odd_traits(image, data, is_sound=is_sound)), image.size
        del image, decoded  # as large again as the pixels
        digest, look = fingerprint(pixels), perceptual_hash(pixels) if near else bytes(FINGERPRINT_BYTES)
    except BadImageError as error:
        return Look("unusable-image", str(error), format=name)
    except MemoryError:
        return Look("unusable-image", _TOO_LARGE, format=name)
    width, height = (width, height) if turned < 5 else (height, width)
    return Look("", "", digest, name, width, height, odd, look, peak)


def _fault(reason: str, data: bytes) -> tuple[str, str]:
    """Kind and detail by the reason that packing gives; what the kind's title says already is left away."""
    if reason == CUT_SHORT:
        return "truncated-image", ""
    if reason.startswith("damaged"):
        return "damaged-image", reason
    if "not read here" in reason or "pixels, more than" in reason:
        return "unusable-image", reason
    if reason != UNKNOWN:
        return "no-image", reason.removesuffix(NO_IMAGE)
    return "no-image", f"{len(data):,} bytes of no known format"


def _odd_traits(image: Image.Image, data: bytes, *, is_sound: bool) -> Iterator[tuple[str, str]]:
    """The traits that packing has a rule for."""
    mode, format = image.mode, format_of(image)
    if kind := _BY_MODE.get(mode):
        yield kind, ""
    yield from image.info.get("lost", {}).items()
    if "transparency" in image.info or (mode.endswith(("A", "a")) and "opaque" not in image.info):
        yield "transparency", ""
    with suppress(Exception):  # decoders of strangers' files raise whatever they like
        if getattr(image, "is_animated", False):
            yield "frames", ""
    if format == "jpg" and not is_common_jpeg(data):
        yield "rare-jpeg", ""
    elif format == "jpg" and mode in ("L", "RGB") and not is_sound:
        yield "odd-jpeg", "" if data.find(b"\xff\xd9", scan_of(data)) >= 0 else "its last two bytes are missing"
    if (turned := orientation(image)) != 1:
        yield "orientation", f"orientation {turned}"
    if max(image.size) > LONGEST * min(image.size):
        yield "long", f"{image.size[0]} x {image.size[1]}"


def look_in_children(
    portions: Iterable[Sequence[T]], look: Callable[[Sequence[T]], list[Look]], *, workers: int
) -> Iterator[list[Look]]:
    """Look at portions of images in child processes, in order; a crash of a decoder costs one image."""

    def on_crash(_: object, ending: str) -> list[Look]:
        return [Look("damaged-image", f"the decoder crashed ({ending})")]

    with closing(map_in_children(portions, look, on_crash, workers=workers)) as answers:
        yield from answers


def duplicates(prints: Fingerprints) -> Iterator[list[int]]:
    """Numbers of the images that are the same, group by group; each group rises, and so do the groups' first ones.

    >>> prints = np.frombuffer(b"".join(bytes([n]) * 16 for n in (1, 2, 1, 3, 0, 1, 0)), np.uint8).reshape(-1, 16)
    >>> list(duplicates(prints))
    [[0, 2, 5]]
    """
    rows = np.flatnonzero(prints.any(axis=1))
    words = np.ascontiguousarray(prints[rows]).view(np.uint64)  # of digests as two words each, too
    order = np.lexsort((words[:, 1], words[:, 0]))
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = (words[order][1:] != words[order][:-1]).any(axis=1)
    starts = np.flatnonzero(is_first)
    sizes = np.diff(np.append(starts, len(order)))
    several = np.flatnonzero(sizes > 1)
    for group in several[np.argsort(order[starts[several]], kind="stable")].tolist():
        yield rows[order[starts[group] : starts[group] + sizes[group]]].tolist()
