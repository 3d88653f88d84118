"""Look at images: whether all of each can be decoded, what is odd about it, which are the same, how full classes are.

Both kinds of check, of record files and of sources, look at their images by way of this.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from steadytrain.data.checking.file_types import CUT_SHORT, NO_IMAGE, UNKNOWN, scan_of
from steadytrain.data.checking.findings import Findings, few_to_measure
from steadytrain.data.checking.near import Alike, Hashes, find_alike, perceptual_hash
from steadytrain.data.packing.encode import decode_file
from steadytrain.data.packing.images import (
    BadImageError,
    DeepImages,
    format_of,
    is_common_jpeg,
    orientation,
    read_header,
    to_pixels,
    turn,
)
from steadytrain.data.packing.worker_pool import map_in_children
from steadytrain.data.recordio.framing import Pixels
from steadytrain.data.sources.listing import Piece, read_file, read_piece

Item = TypeVar("Item")
Fingerprints = NDArray[np.uint8]  # [N, 16]; zeros for an image that was not looked at, or cannot be used

FINGERPRINT_BYTES = 16
LONGEST = 20  # times as long as wide
SMALL = 10  # images of a class
UNEVEN = 10  # times as many images in the largest class as in the smallest

_TOO_LARGE = "too large for this machine's memory"
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
    """What was seen of one image.

    Args:
        fault: kind of finding that says why it cannot be used; empty for a sound image.
        detail: of the fault.
        fingerprint: of its pixels; see :func:`fingerprint`.
        format: ``jpg``, ``png``, ...; empty where it has none.
        width, height: in pixels, upright; 0 where they are not known.
        odd: kinds of finding, with a detail each.
        peak: the largest value of an image of 16 bits whose range is not known; -1 for any other.
        near: its perceptual hash, where that was asked for; see :mod:`~steadytrain.data.checking.near`.
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

    Args:
        pixels: upright, of 8 bits: uint8[H, W, 3] or uint8[H, W]. Grey that is stored as colour counts as grey.

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
    shape = raw_shape(len(data))
    bare = f", perhaps bare pixels of {' x '.join(map(str, shape))}" if shape else ""
    return "no-image", f"{len(data):,} bytes of no known format{bare}"


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


def _odd_traits(image: Image.Image, data: bytes, *, is_sound: bool) -> Iterator[tuple[str, str]]:
    """The traits that packing has a rule for."""
    mode, format = image.mode, format_of(image)
    if kind := _BY_MODE.get(mode):
        yield kind, ""
    if mode.startswith("I;16") or (format == "png" and data[24] == 16 and mode != "I"):
        yield "sixteen-bit", ""
    if "transparency" in image.info or mode.endswith(("A", "a")):
        yield "transparency", ""
    try:
        if getattr(image, "is_animated", False):
            yield "frames", ""
    except Exception:  # noqa: BLE001 - decoders of strangers' files raise whatever they like
        pass
    if format == "jpg" and not is_common_jpeg(data):
        yield "rare-jpeg", ""
    elif format == "jpg" and mode in ("L", "RGB") and not is_sound:
        yield "odd-jpeg", "" if data.find(b"\xff\xd9", scan_of(data)) >= 0 else "its last two bytes are missing"
    if (turned := orientation(image)) != 1:
        yield "orientation", f"orientation {turned}"
    if max(image.size) > LONGEST * min(image.size):
        yield "long", f"{image.size[0]} x {image.size[1]}"


def look_at_files(places: Sequence[str | Piece], *, near: bool = False) -> list[Look]:
    """Read and decode some images; ``near``: with their perceptual hashes."""
    looks = []
    for place in places:
        try:
            data = read_file(place) if isinstance(place, str) else read_piece(place)
        except BadImageError as error:
            looks.append(Look("unreadable", str(error)))
            continue
        if isinstance(place, Piece) and place.pixels is not None:
            pixels = place.pixels.of(data)
            look = perceptual_hash(pixels) if near else bytes(FINGERPRINT_BYTES)
            looks.append(Look("", "", fingerprint(pixels), "raw", place.pixels.width, place.pixels.height, near=look))
        else:
            looks.append(look_at(data, near=near))
    return looks


def look_in_children(
    portions: Iterable[Sequence[Item]], look: Callable[[Sequence[Item]], list[Look]], *, workers: int
) -> Iterator[list[Look]]:
    """Look at portions of images in child processes, in order; a crash of a decoder costs one image."""

    def on_crash(_: object, ending: str) -> list[Look]:
        return [Look("damaged-image", f"the decoder crashed ({ending})")]

    with closing(map_in_children(portions, look, on_crash, workers=workers)) as answers:
        yield from answers


class ImageTally:
    """What has been seen of images so far. Columns are bytes, not objects: a million images take tens of megabytes."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.formats: Counter[str] = Counter()
        self.width: tuple[int, int] | None = None
        self.height: tuple[int, int] | None = None
        self._prints = bytearray()
        self._hashes = bytearray()
        self._deep = DeepImages()

    @property
    def prints(self) -> Fingerprints:
        """uint8[N, 16], up to the last sound image."""
        return np.frombuffer(bytes(self._prints), np.uint8).reshape(-1, FINGERPRINT_BYTES)

    @property
    def hashes(self) -> Hashes:
        """uint64[N, 2], perceptual hashes up to the last sound image."""
        return np.frombuffer(bytes(self._hashes), np.uint64).reshape(-1, 2)

    def add(self, look: Look, number: int, **place: Any) -> None:
        """Take in image ``number``, of rising ones; ``place`` says in findings where it lies."""
        if look.fault:
            self.findings.add(look.fault, look.detail, **place)
            return
        self._prints += bytes(FINGERPRINT_BYTES * number - len(self._prints)) + look.fingerprint
        self._hashes += bytes(FINGERPRINT_BYTES * number - len(self._hashes)) + look.near
        if look.format:
            self.formats[look.format] += 1
            (low, high), (least, most) = self.width or (look.width,) * 2, self.height or (look.height,) * 2
            self.width = min(low, look.width), max(high, look.width)
            self.height = min(least, look.height), max(most, look.height)
        for kind, detail in look.odd:
            self.findings.add(kind, detail, **place)
        self._deep.add(look.peak)

    def add_depth(self) -> None:
        """Add that images of 16 bits use few of them, when all have been seen."""
        if remark := self._deep.remark():
            self.findings.add("few-levels", remark)


def duplicates(prints: Fingerprints) -> Iterator[list[int]]:
    """Numbers of the images that are the same, group by group; each group rises, and so do the groups' first ones.

    >>> prints = np.frombuffer(b"".join(bytes([n]) * 16 for n in (1, 2, 1, 3, 0, 1, 0)), np.uint8).reshape(-1, 16)
    >>> list(duplicates(prints))
    [[0, 2, 5]]
    """
    rows = np.flatnonzero(prints.any(axis=1))
    words = np.ascontiguousarray(prints[rows]).view(np.uint64)
    order = np.lexsort((words[:, 1], words[:, 0]))
    is_first = np.ones(len(rows), np.bool_)
    is_first[1:] = (words[order][1:] != words[order][:-1]).any(axis=1)
    starts = np.flatnonzero(is_first)
    sizes = np.diff(np.append(starts, len(order)))
    several = np.flatnonzero(sizes > 1)
    for group in several[np.argsort(order[starts[several]], kind="stable")].tolist():
        yield rows[order[starts[group] : starts[group] + sizes[group]]].tolist()


def shared(ours: Fingerprints, theirs: Fingerprints) -> list[tuple[int, int]]:
    """Numbers of images that are in both sets: for each of ``theirs`` the first of ``ours``, in the order of theirs.

    >>> prints = np.frombuffer(b"".join(bytes([n]) * 16 for n in (1, 2, 1, 3, 1)), np.uint8).reshape(-1, 16)
    >>> shared(prints[:2], prints[2:])
    [(0, 0), (0, 2)]
    """
    n = len(ours)
    pairs = [
        (group[0], number - n)
        for group in duplicates(np.concatenate([ours, theirs]))
        if group[0] < n
        for number in group
        if number >= n
    ]
    return sorted(pairs, key=lambda pair: pair[1])


def alike(
    prints: Fingerprints, hashes: Hashes, other_prints: Fingerprints | None = None, other_hashes: Hashes | None = None
) -> list[Alike]:
    """Images that look like an earlier one, or like one of another set, and are not the same as that.

    Nothing where no perceptual hashes were made.
    """
    pairs = find_alike(hashes, other_hashes)
    others = prints if other_prints is None else other_prints
    return [pair for pair in pairs if (prints[pair.row] != others[pair.like]).any()]


def check_classes(
    classes: Sequence[str],
    counts: Sequence[int],
    findings: Findings,
    *,
    required: bool = True,
    split: str = "",
    num_held_out: int = 0,
) -> None:
    """Add what is notable about the numbers of images of classes.

    Args:
        required: whether packing refuses a class without an image.
        split: that they are counted in, for messages.
        num_held_out: images that training would hold out of these; 0 where that is not known.
    """
    where = f" in {split}" if split else ""
    for name, count in zip(classes, counts, strict=True):
        if count == 0 and required:
            findings.add("empty-class", where.strip(), name=name)
        elif count == 1:
            few = few_to_measure(num_held_out)
            held_out = f"of {sum(counts)} images {num_held_out} would be held out ({few})" if few else ""
            findings.add("single-image", held_out or where.strip(), name=name)
        elif 0 < count < SMALL:
            findings.add("small-class", f"{count} images{where}", name=name)
    filled = sorted((count, name) for name, count in zip(classes, counts, strict=True) if count)
    if len(filled) == 1:
        findings.add("one-class", where.strip(), name=filled[0][1])
    if filled and filled[-1][0] >= UNEVEN * filled[0][0]:
        (least, small), (most, large) = filled[0], filled[-1]
        findings.add(
            "imbalance", f"{large} has {most:,} images, {small} {least:,}: {most / least:,.0f} times as many{where}"
        )
