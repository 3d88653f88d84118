"""Peak memory of packing: what the process that packs needs, for so many images and so many classes.

Small files are generated (PNG of 8 x 8 pixels, about 90 bytes), packed by ``steady pack`` as a folder and as a tar of
it, and the largest resident set of the main process is what Linux says at its end (VmHWM); that of its children is not
in it, they hold a few images each. ``bytes_per_image`` is what more images cost: the difference to the smallest
size, so that the interpreter and its libraries are not in it.

usage: python benchmarks/pack_memory.py [--images 10000 100000 1000000] [--classes 100] [--many-classes 10000]
       [--sources folder tar] [--at FOLDER] [--save]
       FOLDER takes the generated files, about 4 kB of disk each
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import machine

SCRIPT = """
import json, re, sys, time
from pathlib import Path
from steadytrain.data.packing.pack import pack
began = time.monotonic()
[(path, card)] = pack(sys.argv[1], sys.argv[2], workers=2)
print(json.dumps({
    "images": card.num_images,
    "classes": len(card.classes),
    "seconds": round(time.monotonic() - began, 1),
    "peak_bytes": 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]),
}))
"""


def generate(folder: Path, images: int, classes: int) -> Path:
    """Write small images into as many folders, with names of a usual length."""
    kinds = [_png(number) for number in range(64)]
    for label in range(classes):
        place = folder / f"class-{label:05}"
        place.mkdir(parents=True)
        for number in range(label, images, classes):
            (place / f"image_{number:08}.png").write_bytes(kinds[number % len(kinds)])
    return folder


def _png(number: int) -> bytes:
    file = io.BytesIO()
    pixels = np.full((8, 8, 3), [number * 4, 255 - number, number], np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def measure(source: Path, out: Path) -> dict[str, Any]:
    """Pack in a process of its own."""
    done = subprocess.run([sys.executable, "-c", SCRIPT, str(source), str(out)], capture_output=True, check=True)
    for path in out.parent.glob(f"{out.name}.*"):
        path.unlink()
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def run(at: Path, images: int, classes: int, sources: list[str]) -> list[dict[str, Any]]:
    """Measure all kinds of source for one size."""
    began = time.monotonic()
    folder = generate(at / f"{images}-{classes}", images, classes)
    machine.say(f"{images:,} images in {classes:,} classes generated in {time.monotonic() - began:.0f} s")
    places = {"folder": folder, "tar": folder.with_suffix(".tar")}
    if "tar" in sources:
        with tarfile.open(places["tar"], "w") as tar:
            tar.add(folder, "images")
    rows = [{"source": kind, **measure(places[kind], at / "out")} for kind in sources]
    shutil.rmtree(folder)
    places["tar"].unlink(missing_ok=True)
    for row in rows:
        machine.say(f"  {row['source']}: {row['peak_bytes'] / 1e6:.0f} MB, {row['seconds']} s")
    return rows


def main() -> None:
    """Measure what the command line asks for."""
    parser = machine.parser(__doc__)
    parser.add_argument("--images", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--classes", type=int, default=100)
    parser.add_argument("--many-classes", type=int, default=10_000)
    parser.add_argument("--sources", nargs="+", default=["folder", "tar"], choices=["folder", "tar"])
    parser.add_argument("--at", type=Path)
    asked = parser.parse_args()
    sizes = [(images, asked.classes) for images in sorted(asked.images)]
    with tempfile.TemporaryDirectory(dir=asked.at) as at:
        rows = [figures for images, classes in sizes for figures in run(Path(at), images, classes, asked.sources)]
        many = run(Path(at), min(max(asked.images), 100_000), asked.many_classes, asked.sources)
    least = {figures["source"]: figures for figures in reversed(rows)}
    for row in rows:
        more = row["images"] - least[row["source"]]["images"]
        row["bytes_per_image"] = (
            round((row["peak_bytes"] - least[row["source"]]["peak_bytes"]) / more) if more else None
        )
    machine.record("pack_memory", {"sizes": rows, "many_classes": many}, save=asked.save)


if __name__ == "__main__":
    main()
