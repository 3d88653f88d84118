"""Collect looks at images: what is odd about them, how full classes are.

Both kinds of check, of record files and of sources, go by this.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from steadytrain.config.defaults import MUCH_UNSEEN, usual_crop
from steadytrain.data.checking.findings import Findings
from steadytrain.data.images.look import FINGERPRINT_BYTES, Fingerprints, Look, is_wide
from steadytrain.data.images.near import Hashes
from steadytrain.data.images.statistics import DARK, DeepImages
from steadytrain.format import percent

SMALL = 10  # images of a class
MOST_DARK = 1000  # images of 16 bits that are named: in most sets with any, all are
UNEVEN = 10  # times as many images in the largest class as in the smallest


class ImageTally:
    """Looks at images, collected. Columns are bytes, not objects: a million images take tens of megabytes."""

    def __init__(self, findings: Findings) -> None:
        self.findings = findings
        self.formats: Counter[str] = Counter()
        self.width: tuple[int, int] | None = None
        self.height: tuple[int, int] | None = None
        self._prints = bytearray()
        self._hashes = bytearray()
        self._deep = DeepImages()
        self._dark: list[dict[str, Any]] = []
        self._sizes = array("i")

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
            self._sizes.extend((look.height, look.width))
        for kind, detail in look.odd:
            self.findings.add(kind, detail, **place)
        self._deep.add(look.peak)
        if 0 < look.peak < DARK and len(self._dark) < MOST_DARK:
            self._dark.append(place)

    def add_depth(self) -> None:
        """Add that images of 16 bits use few of them, when all have been seen, and which alone are dark."""
        if remark := self._deep.remark():
            self.findings.add("few-levels", remark)
        for place in self._dark if self._deep.is_mixed else ():
            self.findings.add("few-levels", f"no value above {DARK - 1:,}", **place)

    def add_shape(self) -> list[str]:
        """Say, when all have been seen, how much of the images evaluation never sees; add where that is much."""
        if not self._sizes:
            return []
        sizes = np.frombuffer(self._sizes, np.int32).reshape(-1, 2).astype(np.int64)
        crop = usual_crop(int(sizes.max()))
        unseen = 1 - crop**2 * float((sizes.min(axis=1) / sizes.max(axis=1)).mean())
        part = "" if crop == 1 else f", {crop:g} of the shorter side"
        fact = f"{percent(unseen)} of the pixels are never seen where evaluation takes the centre{part}"
        if is_wide(sizes):
            self.findings.add("wide", f"--fit crop would never see {percent(unseen)} of the pixels in evaluation")
        elif unseen > MUCH_UNSEEN:
            self.findings.add("cropped", f"{percent(unseen)} of their pixels, which evaluation never sees")
        return [fact]


def check_classes(
    classes: Sequence[str], counts: Sequence[int], findings: Findings, *, required: bool = True, split: str = ""
) -> None:
    """Add what is notable about the numbers of images of classes.

    ``required``: whether packing refuses a class without an image.
    """
    where = f" in {split}" if split else ""
    for name, count in zip(classes, counts, strict=True):
        if count == 0 and required:
            findings.add("empty-class", where.strip(), name=name)
        elif count == 1:
            findings.add("single-image", where.strip(), name=name)
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
