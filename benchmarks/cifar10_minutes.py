"""CIFAR-10 from the command line: minutes from the command to 70, 80 and 90 % of the test images, start-up included.

The 60,000 images lie in records as the PNG that they came in, byte for byte; packing is timed apart. Contenders train
one after another, and all 10,000 test images are classified after each epoch, without test-time augmentation:

- ``quick``: ``steady train`` with ``recipes/cifar10.toml``; on a GPU twice as wide, in 20 epochs of larger batches.
- ``resnet20``: ``steady train --model resnet20``, all else as it comes: 30 epochs.
- ``mxnet``: MXNet 1.9.1 with the settings of its ``train_cifar10.py``, ResNet-20, from the same records; on the CPU,
  told to use every core (left to itself it takes half of them).
- ``torch``: a plain PyTorch script: torchvision's transforms, a DataLoader of two processes, ResNet-20, 30 epochs. The
  images lie decoded in its memory, which is not counted.

``minutes`` of a target: until the line that says so was read; null is more than ``ran_minutes``, after which the
contender had ended, or ``--limit`` had ended it. ``told`` has all its evaluations; ``images_per_second`` is the median
of what it says while it trains. A contender is stopped when it has reached the highest target; on a GPU that is 94 %.

Each finished one is kept in ``--work`` and is not run again; one that was interrupted begins anew, since minutes
are what counts. So it can be done in pieces: ``--only quick``, then ``--only resnet20``, ...

usage: python benchmarks/cifar10_minutes.py --data FOLDER --work FOLDER [--limit MINUTES] [--only NAME ...] [--seed N]
                                            [--mxnet-python PATH] [--save]
       FOLDER of the data holds cifar10-png.tar.zst; the Python of MXNet 1.9.1 may be given as
       STEADYTRAIN_MXNET_PYTHON as well
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

import machine
from machine import STEADY, unpacked
from steadytrain.machine import facts

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "recipes" / "cifar10.toml"
EPOCHS = 30  # of the plain script, and what steadytrain's own default is
TARGETS = (0.7, 0.8, 0.9)
ON_GPU = (0.94,)
WIDER = ("--epochs", "20", "--batch-size", "1024", "--set", "model.options.width=64", "--set", "optim.ema=0.95")
SPEED = r"images_per_second\"?[=:] ?([\d.]+)"
EVALUATED = ("evaluated ", '{"epoch"')
FOUND = r"(epoch|top1)\"?[=:] ?([\d.]+)"
CONTENDERS = ("quick", "resnet20", "mxnet", "torch")
GRACE = 60.0  # seconds until one that was asked to end is killed


def prepared(data: Path, work: Path) -> tuple[Path, float]:
    """Pack the records and decode the plain script's images; return the start of their names, packing's seconds."""
    start, receipt = work / "cifar10", work / "packed.json"
    if not receipt.exists():
        folder = unpacked(data / "cifar10-png.tar.zst", work / "images")
        began = time.perf_counter()
        subprocess.run([*STEADY, "pack", str(folder), str(start), "--force"], check=True, stdout=sys.stderr)
        seconds = time.perf_counter() - began
        for part, split in (("train", "train"), ("val", "test")):
            _decode(folder / split, f"{start}-{part}")
        receipt.write_text(json.dumps({"seconds": seconds}), encoding="utf-8")
    return start, json.loads(receipt.read_text(encoding="utf-8"))["seconds"]


def _decode(folder: Path, out: str) -> None:
    classes = sorted(path.name for path in folder.iterdir())
    files = [(path, k) for k, name in enumerate(classes) for path in sorted((folder / name).iterdir())]
    np.save(f"{out}-labels.npy", np.array([k for _, k in files]))
    np.save(f"{out}.npy", np.stack([np.asarray(Image.open(path).convert("RGB")) for path, _ in files]))


def command(name: str, start: Path, run: Path, seed: int, *, python: str | None, on_gpu: bool) -> list[str]:
    """Return the command of a contender, as a user types it; ``python``: MXNet's."""
    train, val = f"{start}-train.rec", f"{start}-test.rec"
    ours = [*STEADY, "train", train, "--val", val, "--seed", str(seed), "--run", str(run)]
    every_core = ("env", f"OMP_NUM_THREADS={facts.cores()}")
    return {
        "quick": [*ours, "--recipe", str(RECIPE), *(WIDER if on_gpu else ())],
        "resnet20": [*ours, "--model", "resnet20", "--epochs", str(EPOCHS)],
        "mxnet": [*every_core, str(python), str(HERE / "peers" / "cifar_mxnet.py"), train, val],
        "torch": [sys.executable, str(HERE / "peers" / "cifar_torch.py"), str(start), str(EPOCHS), str(seed)],
    }[name]


def measured(words: Sequence[str], targets: Sequence[float], limit_seconds: float, log: Path) -> dict[str, Any]:
    """Run it until it ends, reaches the highest target, or the limit has passed; ``log``: a copy of what it says.

    Raises:
        RuntimeError: it ended with an error.
    """
    rows: list[dict[str, float]] = []
    speeds: list[float] = []
    began = time.perf_counter()
    with log.open("w", encoding="utf-8") as copy, started(words) as process:
        timer = threading.Timer(limit_seconds, process.terminate)
        timer.daemon = True
        timer.start()
        assert process.stdout is not None
        for line in process.stdout:
            copy.write(line)
            speeds += [float(speed) for speed in re.findall(SPEED, line)]
            if line.startswith(EVALUATED):
                values = {name: float(value) for name, value in re.findall(FOUND, line)}
                rows.append({"minutes": round((time.perf_counter() - began) / 60, 3), **values})
                machine.say(rows[-1])
            if rows and rows[-1]["top1"] >= max(targets):
                break
        else:
            cut_off = time.perf_counter() - began >= limit_seconds
            if process.wait() and not cut_off:
                raise RuntimeError(f"{' '.join(words)} ended with {process.returncode}: see {log}")
        timer.cancel()
    return {
        "minutes": {f"{target:.0%}": reached(rows, target) for target in targets},
        "ran_minutes": round((time.perf_counter() - began) / 60, 2),
        "limit_minutes": limit_seconds / 60,
        "best": max((row["top1"] for row in rows), default=None),
        "images_per_second": median(speeds) if speeds else None,
        "told": rows,
    }


def reached(rows: Sequence[dict[str, float]], target: float) -> float | None:
    """Return the minutes until the first evaluation of at least so much."""
    return next((row["minutes"] for row in rows if row["top1"] >= target), None)


@contextmanager
def started(words: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a command whose output can be read line by line; end it at the end, and all that it has started."""
    process = subprocess.Popen(
        words,
        env={**os.environ, "MXNET_SUBGRAPH_BACKEND": "NONE", "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        yield process
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=GRACE)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # it, or processes that it has left behind
        process.wait()


def main() -> None:
    """Run every contender that has no kept result yet, and record all."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended as well
    parser = machine.parser(
        __doc__,
        data="cifar10-png.tar.zst",
        work="records, logs and finished results",
        choose=("--only", CONTENDERS),
        mxnet=True,
    )
    parser.add_argument("--limit", type=float, default=300.0, help="minutes of each contender, at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if "mxnet" in args.only and args.mxnet_python is None:
        parser.error("give --mxnet-python, the Python of MXNet 1.9.1, or --only the others")
    start, packing = prepared(args.data, args.work)
    on_gpu = bool(facts.accelerators())
    targets = (*TARGETS, *ON_GPU) if on_gpu else TARGETS

    def turn(name: str, log: Path) -> dict[str, Any]:
        run = args.work / f"run-{name}-{args.seed}"
        shutil.rmtree(run, ignore_errors=True)
        words = command(name, start, run, args.seed, python=args.mxnet_python, on_gpu=on_gpu)
        machine.say(" ".join(words))
        return measured(words, targets, args.limit * 60, log)

    files = {name: args.work / f"{name}-{args.seed}.json" for name in CONTENDERS}
    figures = {
        name: machine.kept(file, partial(turn, name, file.with_suffix(".log")))
        for name, file in files.items()
        if name in args.only or file.exists()
    }
    document = {"seed": args.seed, "packing_seconds": packing, "recipe": tomllib.loads(RECIPE.read_text("utf-8"))}
    machine.record("cifar10_minutes", {**document, "contenders": figures}, save=args.save)


if __name__ == "__main__":
    main()
