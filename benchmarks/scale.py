"""Training by one process and by two: steadytrain, bare DistributedDataParallel, MXNet 1.9.1's ``dist_sync``.

ResNet-20 on CIFAR-10 from its images, the same updates by all: batch size (over all processes), crops and mirroring,
SGD with momentum, weight decay of all but norms and biases, half a cosine. Contenders take turns, and each round begins
with another one:

- ``steadytrain``: ``steady train``, from packed images to the evaluation, with all that it writes; as one process that
  computes with all cores (``1``), and as two (``--procs 2``, ``2``); ``1_core``: as one that has one core, for a
  quarter of the updates, which says what a second core can give at most.
- ``ddp``: a bare script with two gloo ranks; the decoded images lie in its memory.
- ``mxnet``: Gluon's Trainer over a parameter server: two workers, a server and a scheduler; the same images in memory.

``images_per_second``: of whole updates, without the first five; ``gradient_bytes_per_second``: 32-bit gradients that a
process gives and gets, by the number of parameters; ``loopback_bytes_per_step``: what the machine really sent to
itself, all else that the command did included; ``top1``: of the held-out images after the last update, in each round
from another seed; ``seconds`` and ``cpu_seconds`` of the whole command. Ratios are of medians over the rounds.

``overhead``: what several ranks cost the host beside bare DistributedDataParallel: see ``engine_overhead.py``.

usage: python benchmarks/scale.py --data FOLDER [--rounds 5] [--steps 120] [--images 5120] [--mxnet-python PATH]
                                  [--work FOLDER] [--quick] [--save]
       FOLDER holds cifar10-png.tar.zst; the Python of MXNet 1.9.1 may be given as STEADYTRAIN_MXNET_PYTHON as well
"""

from __future__ import annotations

import argparse
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

import engine_overhead
import machine
from machine import in_turns, say
from peers.scale_contenders import ContenderError, Told, Work, ddp, measured, mxnet, steadytrain
from steadytrain.data.packing.pack import pack

RANKS = 2
BATCH = 128
ONE_CORE = 4  # the contender with one core makes a part of the updates
Contender = Callable[[Work, Path], Told]


def prepare(archive: Path, out: Path, num_train: int, num_val: int) -> str:
    """Pack and decode the first images of each class; return what their files' names begin with."""
    start = out / f"cifar-{num_train}-{num_val}"
    for part, split, images in (("train", "train", num_train), ("val", "test", num_val)):
        if not Path(f"{start}-{part}.npy").exists():
            folder = out / f"{start.name}-{part}"
            _unpack(archive, split, images // 10, folder)
            pack(folder, f"{start}-{part}", force=True)
            _decode(folder, f"{start}-{part}")
    return str(start)


def _unpack(archive: Path, split: str, images: int, out: Path) -> None:
    seen: Counter[str] = Counter()
    with machine.opened(archive) as tar:
        for member in tar:
            part, kind, name = ("", "", *Path(member.name).parts)[-3:]
            if member.isfile() and part == split and seen[kind] < images:
                seen[kind] += 1
                (out / kind).mkdir(parents=True, exist_ok=True)
                (out / kind / name).write_bytes(tar.extractfile(member).read())  # type: ignore[union-attr]


def _decode(folder: Path, out: str) -> None:
    classes = sorted(path.name for path in folder.iterdir())
    files = sorted(folder.glob("*/*"))
    np.save(f"{out}-labels.npy", np.array([classes.index(file.parent.name) for file in files]))
    np.save(f"{out}.npy", np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files]))


def contenders(python: str | None) -> tuple[dict[str, Contender], dict[str, str]]:
    """Return the contenders; and those that cannot take part, with the reason."""
    one_core = {min(os.sched_getaffinity(0))}

    def on_one_core(work: Work, folder: Path) -> Told:
        return steadytrain(replace(work, steps=max(2 * work.warm, work.steps // ONE_CORE)), folder, 1, one_core)

    contenders: dict[str, Contender] = {
        "steadytrain_2": partial(steadytrain, procs=RANKS),
        "ddp_2": partial(ddp, ranks=RANKS),
        "steadytrain_1": partial(steadytrain, procs=1),
        "steadytrain_1_core": on_one_core,
    }
    skipped = {}
    if len(os.sched_getaffinity(0)) < RANKS:
        skipped["steadytrain_1_core"] = "this machine has one core"
        del contenders["steadytrain_1_core"]
    why = lack(python)
    if python is None or why:
        skipped["mxnet_2"] = why
    else:
        contenders["mxnet_2"] = partial(mxnet, ranks=RANKS, python=python)
    return contenders, skipped


def lack(python: str | None) -> str:
    """Return why MXNet cannot take part; empty where it can."""
    if python is None:
        return "no Python with MXNet 1.9.1: give --mxnet-python, or set STEADYTRAIN_MXNET_PYTHON"
    asked = [python, "-c", "import mxnet; assert mxnet.__version__ == '1.9.1', mxnet.__version__"]
    try:
        answer = subprocess.run(asked, capture_output=True, text=True, check=False)
    except OSError as error:
        return f"its Python cannot be started: {error.strerror}"
    return "" if not answer.returncode else f"its Python has no MXNet 1.9.1: {answer.stderr.splitlines()[-1]}"


def rounds_of(who: Mapping[str, Contender], work: Work, rounds: int) -> tuple[dict[str, list[Told]], dict[str, str]]:
    """Give all of them their turns; return the results, and who failed, with the reason."""
    taken: dict[str, list[Told]] = {name: [] for name in who}
    failed: dict[str, str] = {}
    for number, name in in_turns(who, rounds):
        if name in failed:
            continue
        try:
            taken[name].append(measured(partial(who[name], replace(work, seed=number))))
        except ContenderError as error:
            failed[name] = f"round {number + 1}: {error.reason}"
            say(f"round {number + 1}  {name}: FAILED {error}")
            continue
        newest = taken[name][-1]
        rate = work.batch / newest.step_seconds
        say(f"round {number + 1}  {name:18} {rate:6.1f} images/s, {newest.right} right, {newest.seconds:.0f} s")
    return taken, failed


def summary(turns: list[Told], work: Work, steps: int, num_val: int, processes: int) -> dict[str, Any]:
    """Return medians over the turns of a contender."""
    step = median(turn.step_seconds for turn in turns)
    parameters = turns[0].parameters
    top1 = [turn.right / num_val for turn in turns]
    return {
        "processes": processes,
        "samples": steps * work.batch,
        "images_per_second": work.batch / step,
        "step_ms": 1e3 * step,
        "parameters": parameters,
        "gradient_bytes_per_second": 8 * parameters / step if processes > 1 else 0,
        "loopback_bytes_per_step": median(turn.loopback_bytes for turn in turns) / steps,
        "top1": median(top1),
        "seconds": median(turn.seconds for turn in turns),
        "cpu_seconds": median(turn.cpu_seconds for turn in turns),
        "all_rounds": {
            "images_per_second": [work.batch / turn.step_seconds for turn in turns],
            "top1": top1,
        },
    }


def ratios(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return ratios of images per second."""
    pairs = {
        "steadytrain_2_over_ddp_2": ("steadytrain_2", "ddp_2"),
        "steadytrain_2_over_mxnet_2": ("steadytrain_2", "mxnet_2"),
        "steadytrain_2_over_steadytrain_1": ("steadytrain_2", "steadytrain_1"),
        "steadytrain_2_over_steadytrain_1_core": ("steadytrain_2", "steadytrain_1_core"),
    }
    rate = {name: row["images_per_second"] for name, row in figures.items()}
    return {name: rate[a] / rate[b] for name, (a, b) in pairs.items() if a in rate and b in rate}


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Measure everything."""
    who, skipped = contenders(args.mxnet_python)
    images = prepare(args.data / "cifar10-png.tar.zst", folder, args.images, args.val)
    work = Work(images=images, batch=BATCH, steps=args.steps)
    turns, failed = rounds_of(who, work, args.rounds)
    values = {}
    for name, of_one in turns.items():
        steps = max(2 * work.warm, work.steps // ONE_CORE) if name.endswith("1_core") else work.steps
        if of_one:
            values[name] = summary(of_one, work, steps, args.val, RANKS if name.endswith("_2") else 1)
    real = values["ddp_2"]["step_ms"] / 1e3 if "ddp_2" in values else None
    return {
        "rounds": args.rounds,
        "batch": work.batch,
        "train_images": args.images,
        "val_images": args.val,
        "contenders": machine.rounded(values, 4),
        "ratios": machine.rounded(ratios(values), 4),
        "skipped": skipped,
        "failed": failed,
        "overhead": engine_overhead.measure(
            1 if args.quick else args.overhead_rounds, 200 if args.quick else args.overhead_steps, real
        ),
    }


def arguments(doc: str | None, *, rounds: int, steps: int, images: int) -> argparse.ArgumentParser:
    """Return the parser of this benchmark and of its kin, with their own defaults."""
    parser = machine.parser(doc, data="cifar10-png.tar.zst", rounds=rounds, mxnet=True)
    parser.add_argument("--steps", type=int, default=steps, help=f"updates of {BATCH} images")
    parser.add_argument("--images", type=int, default=images, help="to train on, of 50,000")
    parser.add_argument("--val", type=int, default=2000, help="to evaluate on, of 10,000")
    parser.add_argument("--work", type=Path, help="where the images are kept, packed and decoded (default: nowhere)")
    parser.add_argument("--quick", action="store_true", help="one short round: shows that it works, and nothing else")
    return parser


def measure_and_record(
    name: str, args: argparse.Namespace, measure: Callable[[argparse.Namespace, Path], dict[str, Any]]
) -> None:
    """Measure as the command line says, print, and save where it asks for that."""
    if args.quick:
        args.rounds, args.steps, args.images, args.val = 1, 40, 2560, 500
    with tempfile.TemporaryDirectory() as temporary:
        folder = args.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        machine.record(name, measure(args, folder.resolve()), save=args.save)


def main() -> None:
    """Measure, print, and save where the command line asks for it."""
    parser = arguments(__doc__, rounds=5, steps=120, images=5120)
    parser.add_argument("--overhead-rounds", type=int, default=7)
    parser.add_argument("--overhead-steps", type=int, default=2000)
    measure_and_record("scale", parser.parse_args(), measure)


if __name__ == "__main__":
    main()
