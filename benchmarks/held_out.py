"""Is what a run says of its validation images true? Random labels with copies, and series of near copies.

**copies**: photographs with random labels, balanced over four classes, each there twice: the same bytes, a JPEG encoded
again, mirrored, resized, or cropped 2 % off. Nothing can be learned of one photograph about another, so that the 95 %
interval of top-1 that a run says has to hold 25 %. ``parted``: pairs of which one validates and one is trained on.

**series**: scenes of frames, each scene one photograph: ``still`` (brightness and blur change, 1 % of shift) or ``pan``
(a window of 70 % travels over it). Labels are of scenes: ``random``, or the photographs' own (``real``). The validation
images are compared with a test of other scenes; the unit is the scene, in every standard error. Held out by ``hash``
(nothing said), by ``folder`` and ``regex`` (``--group-by``), and one by one (``images``, as most tools do).

``said``: validation top-1 with its interval. ``z``: validation less test, over the standard error of the difference.

Contenders fit a classifier to features of MobileNetV2 (``probe``), fine-tune it (``finetune``, all defaults), or train
a small network from scratch (``train``). Sets: as of ``finetune_probe.py``. Each result is kept in ``--work`` and not
made again: the same command goes on. ``coverage`` is a simulation of the interval alone, without images.

usage: python benchmarks/held_out.py --work FOLDER [--data FOLDER] [--sets NAME[=FOLDER] ...] [--only NAME ...]
           [--draws 5] [--kept] [--save]
       FOLDER of the data holds clothing-10.tar and weights/mobilenetv2_100/
"""

from __future__ import annotations

import csv
import io
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageEnhance, ImageFilter, ImageOps

import machine
import steadytrain as st
from accuracy import GOOGLES
from finetune_probe import images_of
from steadytrain.events import top1_95
from steadytrain.intervals import wilson
from steadytrain.training.metrics import effective_n, standard_error

Random = np.random.Generator
SIDE, CLASSES = 128, 4
PHOTOGRAPHS, SCENES, TEST_SCENES, FRAMES = 100, 80, 40, 5
COPIES = ("bytes", "encoded", "mirrored", "resized", "cropped")
CASES = ("copies", "series", "coverage")
HELD = {
    "hash": {},
    "folder": {"data.group_by": "folder"},
    "regex": {"data.group_by": r"(scene\d+)-"},
    "images": {},
}
"""Settings by which validation images are held out; of ``images`` they are drawn here, one by one."""


def encoded(image: Image.Image, quality: int = 90) -> bytes:
    """Return a photograph as a JPEG file."""
    file = io.BytesIO()
    image.save(file, "JPEG", quality=quality)
    return file.getvalue()


def photographs(folder: Path, rng: Random, n: int) -> list[tuple[Image.Image, str]]:
    """Draw photographs of a folder of classes, with their classes, evenly: the shorter side has :data:`SIDE` pixels."""
    by_class = {place.name: rng.permutation(sorted(place.iterdir())) for place in sorted(folder.iterdir())}
    names = sorted(by_class)
    drawn: list[tuple[Image.Image, str]] = []
    for number in range(n):
        name = names[number % len(names)]
        with Image.open(by_class[name][number // len(names) % len(by_class[name])]) as image:
            drawn.append((small(ImageOps.exif_transpose(image).convert("RGB"), SIDE), name))
    return drawn


def small(image: Image.Image, side: int) -> Image.Image:
    """Resize an image; the shorter side is ``side`` pixels then."""
    scale = side / min(image.size)
    return image.resize((max(side, round(image.width * scale)), max(side, round(image.height * scale))))


def copy_of(image: Image.Image, data: bytes, kind: str) -> bytes:
    """Return a copy of a photograph, of one of the kinds of :data:`COPIES`."""
    width, height = image.size
    altered = {
        "bytes": lambda: data,
        "encoded": lambda: encoded(image, 60),
        "mirrored": lambda: encoded(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)),
        "resized": lambda: encoded(small(image, SIDE * 3 // 4)),
        "cropped": lambda: encoded(image.crop((width // 50, height // 50, width, height))),
    }
    return altered[kind]()


def frames_of(image: Image.Image, motion: str, rng: Random) -> list[bytes]:
    """Return the frames of a scene."""
    share, far = (0.97, 0.01) if motion == "still" else (0.7, 0.3)
    begin, end = rng.uniform(0, far, (2, 2))
    frames = []
    for number in range(FRAMES):
        x, y = begin + (end - begin) * number / (FRAMES - 1)
        left, top = round(x * image.width), round(y * image.height)
        frame = image.crop((left, top, left + round(share * image.width), top + round(share * image.height)))
        frame = ImageEnhance.Brightness(frame).enhance(rng.uniform(0.85, 1.15))
        frames.append(encoded(frame.filter(ImageFilter.GaussianBlur(rng.uniform(0, 0.8)))))
    return frames


def write(path: Path, data: bytes) -> None:
    """Write a file, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def balanced(n: int, rng: Random) -> list[str]:
    """Return random labels of equally many images each."""
    return [f"c{number}" for number in rng.permutation(np.arange(n) % CLASSES)]


def learned(how: str, images: Path, changes: Mapping[str, Any], seed: int, turn: Path, weights: Path) -> st.Run:
    """Train as a contender does; return its run."""
    changes = {**changes, "seed": seed}
    if how == "train":
        changes |= {"model.name": "digits", "data.size": 48, "budget.epochs": 8}
        return st.train(st.Run.create(turn / "run", st.default_recipe(str(images), changes)), progress=False).run
    changes |= {"model.name": "timm/mobilenetv2_100", "model.weights": str(weights), "data.size": 96}
    for setting in GOOGLES:
        key, _, value = setting.partition("=")
        changes[key] = [0.5, 0.5, 0.5] if key.startswith("data.") else value
    if how == "probe":
        changes["model.train"] = "probe"
    return st.finetune(str(images), changes, run=turn / "run", progress=False).run


def rows_of(path: Path) -> tuple[list[str], NDArray[np.bool_]]:
    """Return the names of images without folders, and whether each is right, from a file of predictions."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return [row["file"].rpartition("/")[2] for row in rows], np.array([row["true"] == row["predicted"] for row in rows])


def said_by(run: st.Run) -> dict[str, Any]:
    """Return what a run says of its best weights on the validation images."""
    best = run.progress().best
    assert best is not None
    interval = top1_95(best)
    said = {"n": best.n, "top1": best.top1, "low": interval.low, "high": interval.high}
    return {**said, "effective_n": best.effective_n}


def copies(how: str, folder: Path, seed: int, turn: Path, weights: Path) -> dict[str, Any]:
    """Train on photographs with random labels, each there twice; return what is said, and the pairs that are parted."""
    shutil.rmtree(turn, ignore_errors=True)
    rng = np.random.default_rng(seed)
    drawn, labels = photographs(folder / "train", rng, PHOTOGRAPHS), balanced(PHOTOGRAPHS, rng)
    for number, ((image, _), label) in enumerate(zip(drawn, labels, strict=True)):
        data, kind = encoded(image), COPIES[number // CLASSES % len(COPIES)]
        write(turn / "images" / label / f"{number}-{kind}-0.jpg", data)
        write(turn / "images" / label / f"{number}-{kind}-1.jpg", copy_of(image, data, kind))
    run = learned(how, turn / "images", {}, seed, turn, weights)
    names, _ = rows_of(run.predictions)
    pairs = Counter(name.rpartition("-")[0] for name in names)
    parted = Counter(pair.partition("-")[2] for pair, n in pairs.items() if n == 1)
    said = said_by(run)
    holds = said["low"] <= 1 / CLASSES <= said["high"]
    shutil.rmtree(turn)
    return {"said": said, "holds_chance": holds, "parted": dict(parted)}


def series(
    how: str, motion: str, kind: str, held: str, folder: Path, seed: int, turn: Path, weights: Path
) -> dict[str, Any]:
    """Train on scenes, held out as ``held`` says; return what is said, and top-1 of a test of other scenes."""
    shutil.rmtree(turn, ignore_errors=True)
    rng = np.random.default_rng([seed, 1])
    inner = "{scene}/" if held == "folder" else ""
    for part, source, n in (("train", "train", SCENES), ("test", "test", TEST_SCENES)):
        drawn, random = photographs(folder / source, rng, n), balanced(n, rng)
        for number, (image, label) in enumerate(drawn):
            for k, data in enumerate(frames_of(image, motion, rng)):
                scene, of_class = f"scene{number}", label if kind == "real" else random[number]
                write(turn / part / of_class / inner.format(scene=scene) / f"{scene}-{k}.jpg", data)
    changes: dict[str, Any] = dict(HELD[held])
    if held == "images":
        files = sorted((turn / "train").rglob("*.jpg"))
        for number in rng.permutation(len(files))[: len(files) // 5]:
            write(turn / "val" / files[number].relative_to(turn / "train"), files[number].read_bytes())
            files[number].unlink()
        changes["data.val"] = str(turn / "val")
    run = learned(how, turn / "train", changes, seed, turn, weights)
    st.evaluate(run.directory, str(turn / "test"), per_image=turn / "test.csv", say=lambda line: None)
    document: dict[str, Any] = {"said": said_by(run)}
    tops, errors = [], []
    for part, path in (("validation", run.predictions), ("test", turn / "test.csv")):
        names, is_right = rows_of(path)
        scenes = np.unique([name.partition("-")[0] for name in names], return_inverse=True)[1]
        tops.append(float(is_right.mean()))
        errors.append(standard_error(is_right.astype(np.float64), scenes))
        interval = wilson(tops[-1], effective_n(is_right, scenes) or len(is_right))
        document[part] = {"top1": tops[-1], "scenes": int(scenes.max()) + 1, "interval_of_scenes": vars(interval)}
    said, error = document["said"], float(np.hypot(errors[0], errors[1]))
    document["z"] = (tops[0] - tops[1]) / error if error else None
    chance = 1 / CLASSES
    document["holds_chance"] = said["low"] <= chance <= said["high"] if kind == "random" else None
    shutil.rmtree(turn)
    return document


def coverage(draws: int = 800) -> list[dict[str, Any]]:
    """Return how often the interval holds the truth where images come in scenes of any size and likeness.

    ``likeness``: the intraclass correlation of right answers in a scene, whose shares are drawn from a beta
    distribution. ``of_images``: as if all images were independent.
    """
    rng, rows = np.random.default_rng(0), []
    for size, scenes in ((1, 200), (4, 20), (4, 50), (20, 20), (20, 50)):
        groups = np.repeat(np.arange(scenes), size)
        for likeness, p in product((0, 0.2, 0.5, 0.9) if size > 1 else (0,), (0.25, 0.5, 0.8, 0.93)):
            held = Counter[str]()
            for _ in range(draws):
                shares = np.full(scenes, p)
                if likeness:
                    shares = rng.beta(p * (1 / likeness - 1), (1 - p) * (1 / likeness - 1), scenes)
                is_right = rng.random(len(groups)) < shares[groups]
                worth = {"of_groups": effective_n(is_right, groups) or len(groups), "of_images": len(groups)}
                for name, n in worth.items():
                    interval = wilson(float(is_right.mean()), n)
                    held[name] += interval.low <= p <= interval.high
            shares_held = {name: n / draws for name, n in held.items()}
            rows.append({"size": size, "scenes": scenes, "likeness": likeness, "top1": p, **shares_held})
    return rows


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return over draws: mean top-1 said and tested, and how often intervals and differences hold."""
    document: dict[str, Any] = {"draws": len(rows), "said": float(np.mean([row["said"]["top1"] for row in rows]))}
    if rows[0].get("test"):
        document["test"] = float(np.mean([row["test"]["top1"] for row in rows]))
        document["z"] = [row["z"] for row in rows]
        document["within_two_errors"] = sum(row["z"] is not None and abs(row["z"]) <= 2 for row in rows)
    if rows[0]["holds_chance"] is not None:
        document["hold_chance"] = sum(row["holds_chance"] for row in rows)
    if "parted" in rows[0]:
        document["parted"] = dict(sum((Counter(row["parted"]) for row in rows), Counter()))
    return document


def planned() -> dict[str, Callable[[Path, int, Path, Path], dict[str, Any]]]:
    """Return what is measured of each set and draw, by name."""
    plan: dict[str, Callable[..., dict[str, Any]]] = {
        f"copies-{how}": partial(copies, how) for how in ("probe", "train", "finetune")
    }
    for kind, named in (("random", "folder"), ("real", "regex")):
        for motion, held in (("still", "hash"), ("pan", "hash"), ("pan", named), ("pan", "images")):
            plan[f"series-probe-{motion}-{kind}-{held}"] = partial(series, "probe", motion, kind, held)
    plan["series-finetune-pan-real-folder"] = partial(series, "finetune", "pan", "real", "folder")
    return plan


def main() -> None:
    """Measure every draw that has no kept result yet, and record all."""
    parser = machine.parser(
        __doc__,
        data="clothing-10.tar and weights/mobilenetv2_100/",
        work="images and finished results",
        choose=("--only", CASES),
    )
    parser.add_argument("--sets", nargs="+", default=["clothing"])
    parser.add_argument("--draws", type=int, default=5)
    parser.add_argument("--trainings", type=int, default=1, help="draws of series that are fine-tuned in full (1)")
    args = machine.parse_kept(parser)
    torch.set_num_threads(1)
    work = args.work
    (weights,) = (args.data / "weights" / "mobilenetv2_100").glob("*.safetensors")
    document: dict[str, Any] = {"photographs": PHOTOGRAPHS, "scenes": SCENES, "frames": FRAMES, "sets": {}}
    for chosen in args.sets:
        folder, name = images_of(chosen, args.data, work), chosen.partition("=")[0]
        results: dict[str, list[dict[str, Any]]] = {}
        for seed, (case, measure) in product(range(args.draws), planned().items()):
            file = work / "kept" / f"{name}-{case}-{seed}.json"
            is_short = "series-finetune" in case and seed >= args.trainings
            if file.exists() or (case.partition("-")[0] in args.only and not is_short):
                turn = partial(measure, folder, seed, work / "turn" / file.stem, weights.resolve())
                results.setdefault(case, []).append(machine.kept(file, turn))
                machine.say(f"{file.stem}: {results[case][-1]['said']}")
        document["sets"][name] = {case: {**summary(rows), "each": rows} for case, rows in results.items()}
    file = work / "kept" / "coverage.json"
    if file.exists() or "coverage" in args.only:
        document["coverage"] = machine.kept(file, coverage)
    machine.record("held_out", machine.rounded(document, 4), save=args.save)


if __name__ == "__main__":
    main()
