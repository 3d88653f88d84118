"""Folders of small pictures, made on the spot: every file differs from every other."""

from __future__ import annotations

import io
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image


def picture(number: int, size: tuple[int, int] = (40, 30), mode: str = "RGB") -> Image.Image:
    """A smooth picture with some noise; ``size`` is width, height."""
    width, height = size
    random = np.random.default_rng(number)
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    waves = [np.sin(random.uniform(1, 9) * x + random.uniform(1, 9) * y + random.uniform(0, 6)) for _ in range(3)]
    pixels = 128 + 90 * np.stack(waves, axis=-1) + random.normal(0, 4, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


@cache
def _encoded(number: int, size: tuple[int, int], suffix: str) -> bytes:
    file = io.BytesIO()
    picture(number, size).save(file, Image.registered_extensions()[suffix])
    return file.getvalue()


def write_folder(
    root: Path, classes: Mapping[str, int], *, size: tuple[int, int] = (40, 30), suffix: str = ".png"
) -> Path:
    """``classes`` says how many pictures each class folder gets."""
    number = 0
    for name, count in classes.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for _ in range(count):
            (root / name / f"{number:04d}{suffix}").write_bytes(_encoded(number, size, suffix))
            number += 1
    return root
