"""Cost and gain of 4:2:0 and 4:4:4 chroma in packs: bytes and PSNR.

Four sets, at 256 pixels on the shorter side and quality 95, with restart markers: 200 original photographs of ImageNet,
1,165 photographs of clothing, which were JPEGs of 4:2:0 before, and 80 drawings in strong colours (text, lines, discs,
rectangles) that are made here, half of them with antialiased edges. PSNR and SSIM are medians over the images, against
the pixels that were encoded; SSIM is of windows of 8 x 8 (Z. Wang et al., Image quality assessment, 2004), the mean of
Cb and Cr.

usage: python benchmarks/chroma.py --data FOLDER [--save]
       FOLDER holds imagenet-sample-200.tar and clothing-10.tar
"""

from __future__ import annotations

import random
import tarfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

import machine
from steadytrain.data.images.decode import from_ppm
from steadytrain.data.images.encode import (
    PackSettings,
    encode_jpeg,
    pack_bytes,
)

Pixels = NDArray[np.uint8]
QUALITY = 95
COLOURS = ("red", "blue", "lime", "magenta", "gold", "cyan", "white", "black", "orange")
DRAWINGS = 40


def photographs(archive: Path) -> Iterator[Pixels]:
    """Yield the images of a tar, as packing resizes them."""
    with tarfile.open(archive) as tar:
        for member in tar:
            if member.isfile() and member.name.lower().endswith((".jpg", ".jpeg")):
                file = tar.extractfile(member)
                assert file is not None
                pixels = from_ppm(pack_bytes(file.read(), PackSettings(shorter_side=256, encoding="raw")).data)
                if pixels is not None and pixels.ndim == 3:
                    yield pixels


def drawing(seed: int, *, scale: int) -> Pixels:
    """Draw thirty objects in strong colours on another one, 320 x 256 pixels; ``scale`` 2: with antialiased edges."""
    draw, (width, height) = random.Random(seed), (320 * scale, 256 * scale)
    background = draw.choice(COLOURS)
    image = Image.new("RGB", (width, height), background)
    pen = ImageDraw.Draw(image)
    for _ in range(30):
        colour = draw.choice([name for name in COLOURS if name != background])
        x, y = draw.randrange(width), draw.randrange(height)
        side, thickness = draw.randrange(5, 60) * scale, draw.randint(1, 3) * scale
        if seed % 4 == 0:
            pen.text((x, y), "Exit 12", fill=colour, font=ImageFont.load_default(draw.choice([12, 16, 24]) * scale))
        elif seed % 4 == 1:
            pen.line([(x, y), (draw.randrange(width), draw.randrange(height))], fill=colour, width=thickness)
        elif seed % 4 == 2:
            pen.ellipse([x, y, x + side, y + side], fill=colour, outline=draw.choice(COLOURS), width=thickness)
        else:
            pen.rectangle([x, y, x + side, y + side // 2], fill=colour)
    return np.asarray(image if scale == 1 else image.resize((320, 256), Image.Resampling.LANCZOS))


def chroma(pixels: Pixels) -> NDArray[np.float64]:
    """Return Cb and Cr, float64[2, H, W]."""
    return np.moveaxis(np.asarray(Image.fromarray(pixels).convert("YCbCr")), 2, 0)[1:].astype(np.float64)


def psnr(ours: NDArray[Any], theirs: NDArray[Any]) -> float:
    """Return the peak signal-to-noise ratio in decibels; 100 where nothing differs."""
    error = float(((ours.astype(np.float64) - theirs) ** 2).mean())
    return 10 * np.log10(255**2 / error) if error else 100.0


def ssim(ours: NDArray[np.float64], theirs: NDArray[np.float64], side: int = 8) -> float:
    """Return the structural similarity of float64[2, H, W], by windows side by side."""
    height, width = (size // side * side for size in ours.shape[1:])

    def windows(values: NDArray[np.float64]) -> NDArray[np.float64]:
        cut = values[:, :height, :width].reshape(2, height // side, side, width // side, side)
        return cut.swapaxes(2, 3).reshape(-1, side * side)

    x, y = windows(ours), windows(theirs)
    mean_x, mean_y = x.mean(axis=1), y.mean(axis=1)
    covariance = (x * y).mean(axis=1) - mean_x * mean_y
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    luminance = (2 * mean_x * mean_y + c1) / (mean_x**2 + mean_y**2 + c1)
    return float((luminance * (2 * covariance + c2) / (x.var(axis=1) + y.var(axis=1) + c2)).mean())


def measure(images: list[Pixels]) -> dict[str, Any]:
    """Encode a set in each way."""
    ways: dict[str, Any] = {}
    for way in ("420", "444"):
        encoded = [encode_jpeg(pixels, QUALITY, most=4, subsampling=way) for pixels in images]
        plain = [encode_jpeg(pixels, QUALITY, most=0, subsampling=way) for pixels in images]
        decoded = [simplejpeg.decode_jpeg(data) for data in encoded]
        pairs = [(chroma(ours), chroma(pixels)) for ours, pixels in zip(decoded, images, strict=True)]
        ways[way] = {
            "kilobytes_each": round(sum(map(len, encoded)) / len(images) / 1000, 2),
            "restart_markers": round(sum(map(len, encoded)) / sum(map(len, plain)) - 1, 4),
            "psnr": round(median(map(psnr, decoded, images)), 2),
            "chroma_psnr": round(median(psnr(*pair) for pair in pairs), 2),
            "chroma_ssim": round(median(ssim(*pair) for pair in pairs), 4),
        }
    return {"images": len(images), **ways}


def main() -> None:
    """Measure, print, and save where the command line asks for it."""
    parser = machine.parser(__doc__, data="imagenet-sample-200.tar and clothing-10.tar")
    args = parser.parse_args()
    sets = {
        "photographs, ImageNet": list(photographs(args.data / "imagenet-sample-200.tar")),
        "photographs, clothing": list(photographs(args.data / "clothing-10.tar")),
        "drawings": [drawing(seed, scale=1) for seed in range(DRAWINGS)],
        "drawings, antialiased": [drawing(seed, scale=2) for seed in range(DRAWINGS)],
    }
    measured = {name: measure(images) for name, images in sets.items()}
    machine.record("chroma", {"sets": measured}, save=args.save)


if __name__ == "__main__":
    main()
