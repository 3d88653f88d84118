"""Small sources of images for the tests of the feed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from steadytrain.data.loader import ImageLoader
from steadytrain.data.recordio.framing import pack_header
from steadytrain.data.recordio.reader import Records
from steadytrain.data.recordio.writer import RecordWriter

Run = tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]


class Pictures:
    """Encoded images in memory: all that a feed needs of its source."""

    def __init__(self, images: Sequence[bytes], labels: NDArray[np.int64] | NDArray[np.float32] | None = None) -> None:
        self.images = list(images)
        self.labels = np.arange(len(images)) if labels is None else labels

    def __len__(self) -> int:
        return len(self.images)

    def image(self, number: int, /) -> bytes:
        return self.images[number]


def scene(seed: int, height: int, width: int, *, mode: str = "RGB") -> Image.Image:
    """A picture with broad shapes and some grain, like a photograph and unlike noise."""
    rng = np.random.default_rng(seed)
    broad = Image.fromarray(rng.integers(0, 256, (5, 7, 3), dtype=np.uint8)).resize((width, height), 3)
    grain = rng.normal(0, 4, (height, width, 3))
    return Image.fromarray((np.asarray(broad) + grain).clip(0, 255).astype(np.uint8)).convert(mode)


def encode(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@cache
def _small_png(seed: int, height: int, width: int, mode: str) -> bytes:
    return encode(scene(seed, height, width, mode=mode))


def small_pngs(n: int, *, height: int = 16, width: int = 16, mode: str = "RGB") -> Pictures:
    return Pictures([_small_png(i, height, width, mode) for i in range(n)])


@cache
def _mixed_jpeg(seed: int) -> bytes:
    return encode(scene(seed, 60 + 17 * seed % 90, 50 + 29 * seed % 110), "JPEG", quality=92)


def mixed_jpegs(n: int) -> Pictures:
    """Of many sizes and both orientations."""
    return Pictures([_mixed_jpeg(i) for i in range(n)])


def everything(feed: ImageLoader) -> Run:
    """All images, ids and positions of one iteration."""
    batches = list(feed)
    return (
        np.concatenate([batch.images for batch in batches]),
        np.concatenate([batch.ids for batch in batches]),
        np.concatenate([batch.positions for batch in batches]),
    )


def same(run: Run, other: Run, *, skip: int = 0) -> bool:
    """Whether two iterations are the same, the first of them from ``skip`` on."""
    return all(np.array_equal(run[part][skip:], other[part]) for part in (0, 1, 2))


def write_records(path: Path, source: Pictures) -> Records:
    """A record file of these images."""
    with RecordWriter(path) as writer:
        for number in range(len(source)):
            writer.write(pack_header(float(number % 4), id=number) + source.image(number), key=number)
    return Records.open(path)
