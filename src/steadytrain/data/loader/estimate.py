"""Estimate ways of packing from a sample: bytes on disk, time to pack, images per second.

The sample is drawn evenly from all images. Each way of packing is applied to it in memory, and the feed's training crop
is measured on the outcome, one thread, in turns, so that what else the machine does falls on all ways alike. The bytes
of all images follow by regression on the bytes of the files, which are known for every one of them (W. G. Cochran,
Sampling Techniques, 3rd edition, 1977, section 7.3): exact for what is kept byte for byte, and closer than a mean where
large files stay large.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low
from typing import Any

import numpy as np

from steadytrain.data.arrays import Floats
from steadytrain.data.images import encode
from steadytrain.data.images.encode import PackedImage, PackSettings
from steadytrain.data.loader.crop import SMALL, Crop, packed_side
from steadytrain.data.loader.image_loader import ImageLoader
from steadytrain.data.packing.portions import pack_file
from steadytrain.data.recordio.framing import frame, pack_header
from steadytrain.data.sources.listing import Listing
from steadytrain.errors import DataError

SAMPLE_SIZE = 200
BATCH_SIZE = 32
ROUNDS = 3
_LOOKED_AT = 16


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Bytes, time and speed of one way of packing.

    Args:
        num_bytes: of the record files, all together.
        error: standard error of ``num_bytes``, from the sample's spread; 0 where every image was looked at.
        pack_seconds: processor seconds to pack all images.
        images_per_cpu_second: training crops, of one processor; None where nothing of the sample can be used.
        left_out: images of the sample that cannot be used.
        smallest, largest: bytes of the sample's records.
    """

    settings: PackSettings
    num_bytes: float
    error: float
    pack_seconds: float
    images_per_cpu_second: float | None
    left_out: int
    smallest: int
    largest: int


@dataclass(frozen=True, eq=False)
class Sample:
    """Some images of a source: where they lie, and float64[n] bytes of their files.

    Args:
        num_images, mean_size: images, and bytes of a file, of the whole source.
        label_width: labels of an image.
    """

    places: Sequence[Any]
    sizes: Floats
    num_images: int
    mean_size: float
    label_width: int


def draw_sample(listings: Sequence[Listing], *, most: int = SAMPLE_SIZE) -> Sample:
    """Draw up to ``most`` images from all splits of a source, without putting any back; the same each time."""
    lengths = [len(listing) for listing in listings]
    total = sum(lengths)
    drawn = np.sort(np.random.default_rng(0).choice(total, min(most, total), replace=False))
    places: list[Any] = []
    sizes: list[int] = []
    start = 0
    for listing, length in zip(listings, lengths, strict=True):
        for number in (drawn[(drawn >= start) & (drawn < start + length)] - start).tolist():
            places += listing.places(number, number + 1)
            sizes.append(max(0, int(listing.sizes[number])))
        start += length
    known = sum(float(np.maximum(listing.sizes, 0).sum()) for listing in listings)
    width = 1 if listings[0].labels.ndim == 1 else listings[0].labels.shape[1]
    return Sample(places, np.array(sizes, np.float64), total, known / total, width)


def measure_sides(sampled: Sample) -> tuple[int, int]:
    """Measure the median shorter side and the longest side of some images as they are, in pixels; 0 if none is good."""
    some = sampled.places[:: max(1, len(sampled.places) // _LOOKED_AT)]
    images = [image for image in (pack_file(place, PackSettings()) for place in some) if isinstance(image, PackedImage)]
    return (
        median_low([min(image.height, image.width) for image in images] or [0]),
        max((max(image.height, image.width) for image in images), default=0),
    )


def alternatives(requested: PackSettings, *, shorter: int, largest: int) -> list[PackSettings]:
    """List the settings worth comparing: the requested ones first, then one thing changed at a time.

    Args:
        shorter, largest: sides of the images, as :func:`measure_sides` returns them.
    """
    if largest <= SMALL:
        near = [replace(requested, encoding=encoding) for encoding in ("auto", "jpg")]
        near.append(replace(requested, encoding="raw", subsampling="420"))
    else:
        base = requested if requested.shorter_side else replace(requested, shorter_side=packed_side(None))
        if requested.encoding == "pass":
            base = replace(base, encoding="auto")
        has_chroma = base.stores_jpegs and not base.grey
        near = [
            *(replace(base, shorter_side=side) for side in (256, 384) if side < shorter),
            replace(base, quality=85),
            replace(base, restart=0 if base.restart else 4, mark_kept=False),
            *([replace(requested, shorter_side=None)] if requested.shorter_side else []),
            *([replace(base, subsampling="444" if base.subsampling == "420" else "420")] if has_chroma else []),
            replace(base, encoding="raw", mark_kept=False, subsampling="420"),
        ]
        if encode.native is not None and requested.restart and requested.stores_jpegs:
            near.append(replace(requested, shorter_side=None, mark_kept=True))
    return list(dict.fromkeys([requested, *near]))


def estimate(
    sampled: Sample,
    choices: Sequence[PackSettings],
    crop: Crop,
    *,
    seconds: float = 1.0,
    progress: Callable[[int, int], object] = lambda *_: None,
) -> list[Estimate]:
    """Try ways of packing on a sample.

    Args:
        choices: the ways.
        crop: what the feed does with the images afterwards.
        seconds: to measure the feed for, of each way.
        progress: called with the number of steps done and of all.

    Raises:
        DataError: none of the images can be used.
    """
    steps = len(choices) * (1 + ROUNDS)
    header = pack_header([0.0] * sampled.label_width if sampled.label_width > 1 else 0.0, id=0)
    estimates: list[Estimate] = []
    sources: list[_PackedImages] = []
    reason = ""
    for settings in choices:
        progress(len(estimates), steps)
        began = time.process_time()
        results = [pack_file(place, settings) for place in sampled.places]
        seconds_each = (time.process_time() - began) / len(results)
        reason = reason or next((result for result in results if isinstance(result, str)), "")
        sizes = [len(frame(header + image.data)) if isinstance(image, PackedImage) else 0 for image in results]
        num_bytes, error = regress(np.array(sizes, np.float64), sampled.sizes, sampled.mean_size, sampled.num_images)
        used = [size for size in sizes if size]
        sources.append(_PackedImages([image.data for image in results if isinstance(image, PackedImage)]))
        estimates.append(
            Estimate(
                settings=settings,
                num_bytes=num_bytes,
                error=error,
                pack_seconds=seconds_each * sampled.num_images,
                images_per_cpu_second=None,
                left_out=len(sizes) - len(used),
                smallest=min(used, default=0),
                largest=max(used, default=0),
            )
        )
    if not any(map(len, sources)):
        raise DataError(f"none of {len(sampled.places)} images can be used ({reason}): steady check says more")
    rates: list[list[float]] = [[] for _ in sources]
    for turn in range(ROUNDS):
        for place, images in enumerate(sources):
            progress(len(choices) * (1 + turn) + place, steps)
            if len(images):
                rates[place].append(_measure_rate(images, crop, seconds / ROUNDS))
    progress(steps, steps)
    medians = [median(values) if values else None for values in rates]
    return [replace(way, images_per_cpu_second=rate) for way, rate in zip(estimates, medians, strict=True)]


class _PackedImages:
    """A sample packed in memory, as a source for the feed."""

    def __init__(self, images: list[bytes]) -> None:
        self._images = images
        self.labels = np.zeros(len(images), np.int64)

    def __len__(self) -> int:
        return len(self._images)

    def image(self, number: int, /) -> bytes:
        return self._images[number]


def _measure_rate(source: _PackedImages, crop: Crop, seconds: float) -> float:
    """Measure the images of one processor second, of one thread."""
    with ImageLoader(source, crop, batch_size=min(BATCH_SIZE, len(source)), threads=1, depth=1, keep_bytes=0) as feed:
        batches = iter(feed)
        next(batches)
        images, began, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() - began < seconds:
            images += len(next(batches))
        return images / (time.process_time() - cpu)


def regress(values: Floats, known: Floats, mean_known: float, total: int) -> tuple[float, float]:
    """Estimate the sum of a value over all members of a population from a sample; return it and its standard error.

    Args:
        values: float64[n], of the sample's members.
        known: float64[n], another value of them ...
        mean_known: ... whose mean over the whole population is known.
        total: members of the population.

    >>> regress(np.array([2.0, 4.0, 6.0]), np.array([1.0, 2.0, 3.0]), 2.5, 10)
    (50.0, 0.0)
    """
    n, from_mean = len(values), known - known.mean()
    spread = float((from_mean**2).sum())
    slope = float((from_mean * (values - values.mean())).sum()) / spread if spread else 0.0
    mean = float(values.mean()) + slope * (mean_known - float(known.mean()))
    left = values - values.mean() - slope * from_mean
    variance = float((left**2).sum()) / max(1, n - 2) / n * (1 - n / total)
    return mean * total, math.sqrt(max(0.0, variance)) * total
