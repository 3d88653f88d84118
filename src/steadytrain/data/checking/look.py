"""Look at one encoded image: whether all of it can be decoded, what is odd about it, and its fingerprint."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from PIL import Image

from steadytrain.data.checking.faults import CUT_SHORT
from steadytrain.data.checking.file_types import raw_shape
from steadytrain.data.packing.encode import decode_file
from steadytrain.data.packing.pixels import BadImageError, flatten, is_common_jpeg, orientation, read_header

FINGERPRINT_BYTES = 16
LONGEST = 20  # times as long as wide
UNKNOWN = "not an image of a known format"  # so says packing

_BY_MODE = {
    "CMYK": "cmyk",
    "P": "palette",
    "PA": "palette",
    "1": "one-bit",
    "I": "sixteen-bit",
    "LAB": "other-colours",
    "HSV": "other-colours",
    "YCbCr": "other-colours",
}


class Look(NamedTuple):
    """What was seen.

    Args:
        fault: kind of finding that says why it cannot be used; empty for a sound image.
        detail: of the fault.
        fingerprint: BLAKE2b of its bytes.
        format: ``jpg``, ``png``, ...; empty where it has none.
        width, height: in pixels, upright; 0 where they are not known.
        odd: kinds of finding, with a detail each.
    """

    fault: str
    detail: str
    fingerprint: bytes
    format: str = ""
    width: int = 0
    height: int = 0
    odd: tuple[tuple[str, str], ...] = ()


def fingerprint(data: bytes | memoryview) -> bytes:
    """What two images share only if their bytes are the same."""
    return hashlib.blake2b(data, digest_size=FINGERPRINT_BYTES).digest()


def look_at(data: bytes) -> Look:
    """Decode an image as packing and the feed would, and say what was seen."""
    told = fingerprint(data)
    try:
        image = read_header(data)
    except BadImageError as error:
        return Look(*_fault(str(error), data), told)
    name = _format(image)
    try:
        decoded, is_sound = decode_file(image, data)
    except BadImageError as error:
        return Look(*_fault(str(error), data), told, name)
    except MemoryError:
        return Look("unusable-image", "too large for this machine's memory", told, name)
    try:
        if isinstance(decoded, Image.Image) and decoded.mode not in ("L", "RGB"):
            flatten(decoded)
    except BadImageError as error:
        return Look("unusable-image", str(error), told, name)
    width, height = image.size if orientation(image) < 5 else image.size[::-1]
    return Look("", "", told, name, width, height, tuple(_odd(image, data, is_sound=is_sound)))


def _fault(reason: str, data: bytes) -> tuple[str, str]:
    """Kind and detail by the reason that packing gives; what the kind's title says already is left away."""
    if reason == CUT_SHORT:
        return "truncated-image", ""
    if reason.startswith("damaged"):
        return "damaged-image", reason
    if "not read here" in reason or "pixels, more than" in reason:
        return "unusable-image", reason
    if reason != UNKNOWN:
        return "no-image", reason.removesuffix(", not an image")
    shape = raw_shape(len(data))
    bare = f", perhaps bare pixels of {' x '.join(map(str, shape))}" if shape else ""
    return "no-image", f"{len(data):,} bytes of no known format{bare}"


def _format(image: Image.Image) -> str:
    name = (image.format or "").lower()
    return "jpg" if name in ("jpeg", "mpo") else name


def _odd(image: Image.Image, data: bytes, *, is_sound: bool) -> list[tuple[str, str]]:
    """The traits that packing has a rule for."""
    odd: list[tuple[str, str]] = []
    mode, format = image.mode, _format(image)
    if kind := _BY_MODE.get(mode):
        odd.append((kind, ""))
    if mode.startswith("I;16") or (format == "png" and data[24] == 16 and mode != "I"):
        odd.append(("sixteen-bit", ""))
    if "transparency" in image.info or mode.endswith(("A", "a")):
        odd.append(("transparency", ""))
    if _has_frames(image):
        odd.append(("frames", ""))
    rare = format == "jpg" and not is_common_jpeg(data)
    if rare:
        odd.append(("rare-jpeg", ""))
    if format == "jpg" and mode in ("L", "RGB") and not rare and not is_sound:
        odd.append(("odd-jpeg", ""))
    if (turned := orientation(image)) != 1:
        odd.append(("orientation", f"orientation {turned}"))
    if max(image.size) > LONGEST * min(image.size):
        odd.append(("long", f"{image.size[0]} x {image.size[1]}"))
    return odd


def _has_frames(image: Image.Image) -> bool:
    try:
        return bool(getattr(image, "is_animated", False))
    except Exception:  # noqa: BLE001 - decoders of strangers' files raise whatever they like
        return False
