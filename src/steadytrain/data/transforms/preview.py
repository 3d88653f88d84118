"""The cost of transforms, and a picture of the model's input."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from steadytrain.config.transforms import KINDS, Transform
from steadytrain.data.loader import Batch
from steadytrain.data.transforms.augment import Augmentation
from steadytrain.files import replacing
from steadytrain.format import percent

ROUNDS = 7
COLUMNS = 8
SHOWN_SIDE = 128  # pixels of a side that smaller images are enlarged to, by whole factors


@dataclass(frozen=True)
class TransformSpeed:
    """Time that a transform takes for a batch on a device (``cpu`` or ``cuda``): the median of a few, in seconds."""

    transform: str
    device: str
    seconds: float
    images_per_second: float


def every_transform() -> tuple[Transform, ...]:
    """Return each kind of transform with its usual values."""
    texts = (f"{name}:{kind.parameters[0].default:g}" if kind.is_needed else name for name, kind in KINDS.items())
    return tuple(map(Transform.parse, texts))


def measuring_device() -> torch.device:
    """Choose where transforms are measured: on the GPU, if there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def measure_transforms(augmentation: Augmentation, batch: Batch) -> list[TransformSpeed]:
    """Time each transform of an augmentation alone, and then all of them where there are several, but not every kind.

    It is done on the GPU, if there is one. Each takes its turn before any takes the next one, so that what disturbs
    the machine disturbs all of them.
    """
    device = measuring_device()
    images, labels = (torch.from_numpy(values).to(device) for values in (batch.images, batch.labels))
    transforms = augmentation.transforms
    variants = {str(transform): replace(augmentation, transforms=(transform,)) for transform in transforms}
    if 1 < len(transforms) < len(KINDS):
        variants["all of these"] = augmentation
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_number in range(ROUNDS + 1):
        for name, some in variants.items():
            began = time.perf_counter()
            some(images, labels, batch.positions + round_number * len(batch))
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if round_number:  # the first is warm-up
                seconds[name].append(time.perf_counter() - began)
    return [
        TransformSpeed(name, device.type, median(took), len(batch) / median(took)) for name, took in seconds.items()
    ]


def write_grid(path: Path, batch: Batch, augmentation: Augmentation | None, classes: Sequence[str]) -> None:
    """Write the images of a batch as the model will see them, with their labels, as a PNG file.

    Args:
        augmentation: its transforms; None: there are none.
        classes: names, in the order of the labels, or of the columns of their vectors; a label without one is shown
            as a number.

    Raises:
        StorageError: it cannot be written.
    """
    images, targets = torch.from_numpy(batch.images), torch.from_numpy(batch.labels)
    if augmentation is not None:
        images, targets = augmentation(images, targets, batch.positions)
    factor = max(1, SHOWN_SIDE // images.shape[1])
    shown = [_picture(image, factor) for image in images.numpy()]
    with replacing(path) as part:
        _draw_grid(shown, [caption(target, classes) for target in targets.numpy()]).save(part)


def _picture(image: NDArray[np.uint8], factor: int) -> Image.Image:
    picture = Image.fromarray(image[..., 0] if image.shape[2] == 1 else image)
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


def caption(target: NDArray[np.int64] | NDArray[np.float32], classes: Sequence[str]) -> str:
    """Format a label, or several or mixed ones with their shares.

    >>> caption(np.array(1), ["cat", "dog"]), caption(np.array([0.7, 0.3]), ["cat", "dog"])
    ('dog', 'cat 70 %, dog 30 %')
    >>> caption(np.array([0.0, 1.0]), ["wet", "old"]), caption(np.array([0.0, 0.0]), ["wet", "old"])
    ('old', 'no label')
    """
    shares = {int(target): 1.0} if target.ndim == 0 else dict(enumerate(target.tolist()))
    names = {number: classes[number] if number < len(classes) else str(number) for number in shares}
    words = [
        names[number] if share > 0.995 else f"{names[number]} {percent(share, 0)}"
        for number, share in shares.items()
        if share >= 0.005
    ]
    return ", ".join(words) or "no label"


def _draw_grid(shown: Sequence[Image.Image], captions: Sequence[str]) -> Image.Image:
    gap, line = 4, 14
    width, height = shown[0].width + gap, shown[0].height + gap + line
    rows = -(-len(shown) // COLUMNS)
    grid = Image.new("RGB", (width * min(COLUMNS, len(shown)) + gap, height * rows + gap), "white")
    draw = ImageDraw.Draw(grid)
    for number, (picture, caption) in enumerate(zip(shown, captions, strict=True)):
        row, column = divmod(number, COLUMNS)
        left, top = gap + column * width, gap + row * height
        grid.paste(picture, (left, top))
        while draw.textlength(caption) > picture.width and len(caption) > 1:
            caption = caption[:-1]
        draw.text((left, top + picture.height), caption, fill="black")
    return grid
