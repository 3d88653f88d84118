"""Pictures far from square whose classes show at their ends: are they told apart, by fine-tuning and from scratch?

Sets, made here, of 60 images a class to train on and 40 to validate, and as many in ``test``:

- ``discs``: grainy pictures of 480 x 120, a coloured disc near the left or the right end (3 classes).
- ``spectrograms``: 600 x 120, one, two or three tones at once, in the first or the last sixth (3 classes).
- ``receipts``: 120 x 480, grey lines of print, a small logo at the head or the foot (3 classes).
- ``strips``: 80 x 640, stitched patterns, the class by the period of the last tenth at either end (3 classes).

``probe`` and ``finetune``: MobileNetV2 from Google's ImageNet weights, at 224 pixels; ``finetune-96``: at 96;
``probe-crop``: ``probe`` with ``--fit crop``, the contrast; ``train``: ResNet-20 from scratch at 64 pixels. All other
settings are defaults: no ``--fit``, no epochs. ``unseen``: the share of pixels that evaluation never sees, as the run
says it, and what a centre square leaves out (1 - short / long side; the weights see 0.875 of each of its sides).

Each result is kept in ``--work`` and not made again: the same command goes on.

usage: python benchmarks/wide.py --work FOLDER [--data FOLDER] [--sets NAME ...] [--only NAME ...] [--seeds 1]
           [--more KEY=VALUE ...] [--kept] [--save]
       FOLDER of the data holds weights/mobilenetv2_100/
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw

import machine
import steadytrain as st
from accuracy import GOOGLES

Random = np.random.Generator
PARTS = {"train": 60, "val": 40, "test": 40}
CONTENDERS: dict[str, dict[str, Any]] = {
    "probe": {"model.train": "probe"},
    "probe-crop": {"model.train": "probe", "data.fit": "crop"},
    "finetune": {},
    "finetune-96": {"data.size": 96},
    "train": {"data.size": 64},
}
NAMES = ("first", "second", "third")


def grain(size: tuple[int, int], rng: Random) -> Image.Image:
    """Return a picture of coarse random grain."""
    width, height = size
    pixels = rng.integers(90, 165, (height // 4, width // 4, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def disc(label: int, rng: Random) -> Image.Image:
    """Draw a disc of the class's colour near the left or right end."""
    image = grain((480, 120), rng)
    x, y, radius = int(rng.choice([30, 450])), int(rng.integers(35, 85)), 22
    colour = ((200, 30, 30), (30, 160, 30), (30, 30, 200))[label]
    ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
    return image


def spectrogram(label: int, rng: Random) -> Image.Image:
    """Draw noise over time, and in the first or last sixth so many tones at once as the class has."""
    width, height = 600, 120
    power = rng.normal(70, 18, (height, width)) + 25 * np.sin(np.arange(height) / 9)[:, None]
    at, long, lowest = int(rng.choice([4, 500])) + int(rng.integers(0, 6)), 90, rng.uniform(20, 60)
    for tone in range(label + 1):
        level = 150 * np.exp(-(((np.arange(height) - lowest - 18 * tone) / 4) ** 2))
        power[:, at : at + long] += level[:, None]
    return Image.fromarray(np.clip(power, 0, 255).astype(np.uint8)).convert("RGB")


def receipt(label: int, rng: Random) -> Image.Image:
    """Draw lines of print, and a logo of the class (disc, triangle, bars) at the head or the foot."""
    image = Image.fromarray(np.clip(rng.normal(235, 6, (480, 120)), 0, 255).astype(np.uint8)).convert("RGB")
    draw = ImageDraw.Draw(image)
    for y in range(62, 420, 9):
        x = 8
        while x < 100:
            long = int(rng.integers(3, 16))
            draw.rectangle((x, y, x + long, y + 4), fill=(int(rng.integers(40, 110)),) * 3)
            x += long + int(rng.integers(3, 10))
    left, top = int(rng.integers(10, 66)), int(rng.choice([8, 428])) + int(rng.integers(0, 4))
    box, ink = (left, top, left + 40, top + 40), (60, 60, 60)
    if label == 0:
        draw.ellipse(box, fill=ink)
    elif label == 1:
        draw.polygon([(left, top + 40), (left + 20, top), (left + 40, top + 40)], fill=ink)
    else:
        for x in range(left, left + 40, 10):
            draw.rectangle((x, top, x + 4, top + 40), fill=ink)
    return image


def strip(label: int, rng: Random) -> Image.Image:
    """Draw a woven strip; the last tenth at one end has stripes of the class's period, the rest of any."""
    image = grain((80, 640), rng)
    draw = ImageDraw.Draw(image)
    top = int(rng.choice([0, 576]))
    shift = int(rng.integers(0, 16))
    for y in range(top - shift, top + 64, (8, 16, 32)[label]):
        draw.rectangle((0, max(top, y), 80, max(top, min(top + 63, y + (8, 16, 32)[label] // 2))), fill=(40, 40, 90))
    return image


SETS: dict[str, Callable[[int, Random], Image.Image]] = {
    "discs": disc,
    "spectrograms": spectrogram,
    "receipts": receipt,
    "strips": strip,
}


def drawn(name: str, folder: Path) -> Path:
    """Draw a set, unless that was done before."""
    if not folder.exists():
        part = folder.with_name(f".{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        rng = np.random.default_rng(0)
        for (split, n), (label, of_class) in product(PARTS.items(), enumerate(NAMES)):
            (part / split / of_class).mkdir(parents=True)
            for number in range(n):
                SETS[name](label, rng).save(part / split / of_class / f"{number}.jpg", quality=92)
        part.rename(folder)
    return folder


def contend(how: str, images: Path, weights: Path, seed: int, turn: Path, more: Mapping[str, str]) -> dict[str, Any]:
    """Train with defaults; return top-1 on the validation and the test images, and what is never seen."""
    shutil.rmtree(turn, ignore_errors=True)
    changes: dict[str, Any] = {**CONTENDERS[how], "data.val": str(images / "val"), "seed": seed, **more}
    before = sum(os.times()[:2])
    if how == "train":
        recipe = st.default_recipe(str(images / "train"), {"model.name": "resnet20", **changes})
        run = st.train(st.Run.create(turn, recipe), progress=False).run
    else:
        google = dict(setting.split("=", 1) for setting in GOOGLES)
        changes |= {k: [0.5, 0.5, 0.5] if k.startswith("data.") else v for k, v in google.items()}
        changes |= {"model.name": "timm/mobilenetv2_100", "model.weights": str(weights)}
        run = st.finetune(str(images / "train"), changes, run=turn, progress=False).run
    progress = run.progress()
    assert progress.best is not None and progress.started is not None
    told = st.evaluate(run.directory, str(images / "test"), say=lambda line: None)
    with Image.open(next((images / "val").glob("*/*"))) as image:
        short, long = sorted(image.size)
    values = {
        "validation": progress.best.top1,
        "test": told.top1,
        "n": told.n,
        "epochs": run.recipe.budget.epochs,
        "fit": run.recipe.data.fit or progress.started.model["input"].get("fit"),
        "unseen": {"said": progress.started.model["unseen"], "outside_square": 1 - short / long},
        "cpu_seconds": round(sum(os.times()[:2]) - before, 1),
    }
    shutil.rmtree(turn)
    return values


def main() -> None:
    """Measure what has no kept result yet, and record all."""
    parser = machine.parser(
        __doc__, data="weights/mobilenetv2_100/", work="images and finished results", choose=("--only", CONTENDERS)
    )
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--more", nargs="+", default=[], metavar="KEY=VALUE", help="settings that are no defaults")
    args = machine.parse_kept(parser)
    torch.set_num_threads(1)
    work = args.work
    (weights,) = (args.data / "weights" / "mobilenetv2_100").glob("*.safetensors")
    more = dict(setting.split("=", 1) for setting in args.more)
    document: dict[str, Any] = {"parts": PARTS, "more": more, "sets": {}}
    for name, how, seed in product(args.sets, CONTENDERS, range(args.seeds)):
        file = work / "kept" / ("-".join(["wide", name, how, str(seed), *args.more]).replace("/", "_") + ".json")
        if file.exists() or how in args.only:
            images = drawn(name, work / "wide" / name)
            turn = partial(contend, how, images, weights.resolve(), seed, work / "turn" / file.stem, more)
            values = machine.kept(file, turn)
            machine.say(f"{file.stem}: {values}")
            document["sets"].setdefault(name, {}).setdefault(how, []).append(values)
    machine.record("wide", machine.rounded(document, 4), save=args.save)


if __name__ == "__main__":
    main()
