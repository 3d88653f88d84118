"""Training ResNet-50 from the command line: ``steady train`` against timm's and torchvision's own training scripts.

The same photographs, the same network, the same batch and one epoch, on the same machine, in turns, each at its own
defaults. Two figures for each: images over the seconds of the whole command (``command_images_per_second``: start-up,
preparing the data, training, one evaluation of a batch of images, saving; what a user waits for) and the steady rate
after the first ``--warm`` updates (``images_per_second``). The bar: 3 times both scripts.

What each is given, and nothing else:

- all: the images, the model's name, the batch, one epoch, and ``cpu`` as the device where there is no GPU, since both
  scripts take ``cuda`` unless they are given another device;
- ``timm``: the number of classes (it would train 1,000), and ``--log-interval 1``;
- ``torchvision``: ``--print-freq 1``;
- ``steadytrain``: a folder for the run. It is given the folders of images as the scripts are, and its cache is empty;
  ``steadytrain-packed`` starts from what ``steady pack`` has made in ``pack_seconds``.

Their lines for each update are how an update of theirs is timed: by when the line arrives, for both wait for the loss
of each update before it, whatever is printed. Ours is timed by its events. Workers, numbers, layout, augmentation are
each one's own: 4 worker processes of timm, 16 of torchvision. These make 32 batches ahead, so a run of fewer updates
shows torchvision's pace without most of its decoding: on a GPU let ``--warm`` exceed that.

On a GPU ours computes in bf16 unless told otherwise, theirs in fp32 whose convolutions are TF32. There, or if named,
``timm-amp`` and ``torchvision-amp`` are measured, which are given ``--amp`` too; ``steadytrain-tf32``, with
``--precision tf32``; and ``steadytrain-compiled``, with ``--compile``; both of these packed.

The scripts do not come with the packages. Have them at the versions that are installed (``pip list``), and give the
folders::

    git clone --depth 1 --branch v1.0.26 https://github.com/huggingface/pytorch-image-models
    git clone --depth 1 --branch v0.25.0 https://github.com/pytorch/vision

timm's script uses the package beside it, torchvision's the installed one.

usage: python benchmarks/train_command.py --timm FOLDER --torchvision FOLDER [--data FOLDER] [--rounds 3] [--save]
       FOLDER of the data holds imagenet-sample-200.tar; without it JPEGs of the same size are drawn
"""

from __future__ import annotations

import hashlib
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

import machine
from machine import STEADY, cpu_seconds
from peers.commands import lines
from peers.scale_contenders import ContenderError
from steadytrain.events import UPDATING, Accounted, Step
from steadytrain.machine import facts
from steadytrain.run import Run

ARCHIVE = "imagenet-sample-200.tar"
CLASSES = 8  # torchvision's script tells of the best 5
BAR = 3.0
COMPUTE = ("forward", "backward", "optimizer")
UPDATE = {
    "timm": re.compile(r"Train: (\d+) \[.*Data: ([\d.]+)"),
    "torchvision": re.compile(r"^Epoch: \[(\d+)\]\s+\[.*data: ([\d.]+)"),
}
"""The line of an update: its epoch, and the seconds that it waited for data."""


class Contender(NamedTuple):
    """Whose command it is, what it is given beyond the common, and whether the images were packed before."""

    whose: str
    more: tuple[str, ...] = ()
    packed: bool = False


CONTENDERS = {
    "steadytrain": Contender("steadytrain"),
    "steadytrain-packed": Contender("steadytrain", packed=True),
    "timm": Contender("timm"),
    "torchvision": Contender("torchvision"),
    "steadytrain-tf32": Contender("steadytrain", ("--precision", "tf32"), packed=True),
    "steadytrain-compiled": Contender("steadytrain", ("--compile",), packed=True),
    "timm-amp": Contender("timm", ("--amp",)),
    "torchvision-amp": Contender("torchvision", ("--amp",)),
}


@dataclass(frozen=True, kw_only=True)
class Work:
    """The training that all contenders do.

    Args:
        folder: ``images/train`` and ``images/val`` lie here, and what is packed.
        checkouts: whose -> the folder that holds the script.
        device: ``cuda`` or ``cpu``.
        steps: updates of an epoch; the first ``warm`` of the last epoch are not timed.
    """

    folder: Path
    checkouts: Mapping[str, Path]
    device: str
    model: str = "resnet50"
    batch: int = 16
    steps: int = 10
    warm: int = 2
    epochs: int = 1

    @property
    def images(self) -> int:
        """That are trained on."""
        return self.batch * self.steps * self.epochs

    def command(self, who: Contender, turn: Path) -> list[str]:
        """Return the command that a user types; paths are absolute."""
        images = self.folder / "images"
        if who.whose == "steadytrain":
            stem = self.folder / "packed"
            parts = (images / "train", images / "val") if not who.packed else (f"{stem}-train.rec", f"{stem}-val.rec")
            words = [*STEADY, "train", str(parts[0]), "--val", str(parts[1]), "--model", f"timm/{self.model}"]
            words += ["--batch-size", str(self.batch), "--epochs", str(self.epochs), "--run", str(turn / "run")]
        else:
            words = [sys.executable, str(script(who.whose, self.checkouts[who.whose])), "--model", self.model]
            words += ["--batch-size", str(self.batch), "--epochs", str(self.epochs)]
            if who.whose == "timm":
                words += ["--data-dir", str(images), "--num-classes", str(CLASSES), "--log-interval", "1"]
            else:
                words += ["--data-path", str(images), "--print-freq", "1"]
        return [*words, *(("--device", "cpu") if self.device == "cpu" else ()), *who.more]


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One command: its wall and processor seconds, when the last epoch's updates were done, what each had waited.

    ``moments`` count from the command's start; ``shares``: of the steady seconds, by the ledger, for ours.
    """

    seconds: float
    cpu_seconds: float
    moments: Sequence[float]
    waits: Sequence[float]
    shares: Mapping[str, float] | None = None

    def told(self, step_seconds: float) -> dict[str, Any]:
        """Return the figures to record; ``updates``: seconds between them, in which a disturbance would be seen."""
        updates = [round(other - before, 4) for before, other in pairwise(self.moments)]
        return {"command_seconds": self.seconds, "step_seconds": step_seconds, "updates": updates}


def script(whose: str, checkout: Path) -> Path:
    """Return the training script in a checkout."""
    return checkout / ("train.py" if whose == "timm" else "references/classification/train.py")


def take_turn(work: Work, who: Contender, seconds: float) -> Turn:
    """Run one command to its end; raises ContenderError where it fails or takes longer."""
    with tempfile.TemporaryDirectory(dir=work.folder) as folder:
        turn = Path(folder)
        cpu, began = cpu_seconds(), time.time()
        printed = list(lines(work.command(who, turn), turn, seconds))
        spent, cpu = time.time() - began, cpu_seconds() - cpu
        if who.whose == "steadytrain":
            moments, waits, shares = _own(turn / "run", work)
        else:
            moments, waits, shares = *_by_lines(printed, UPDATE[who.whose], work.epochs - 1), None
    if len(moments) != work.steps:
        raise ContenderError(f"{len(moments)} updates were seen in the last epoch, not {work.steps}: {printed[-1][1]}")
    return Turn(
        seconds=spent, cpu_seconds=cpu, moments=[moment - began for moment in moments], waits=waits, shares=shares
    )


def _own(folder: Path, work: Work) -> tuple[list[float], list[float], dict[str, float]]:
    """Return, of our run, when its updates were done, what they waited, and where the steady seconds went."""
    events = list(Run.open(folder).events())
    steps = [event for event in events if isinstance(event, Step)][-work.steps :]
    seconds = [event for event in events if isinstance(event, Accounted)][-1].seconds
    steady = {name: seconds.get(name, 0.0) for name in (*UPDATING, "epoch_gap", "logging") if name != "warmup"}
    whole = sum(steady.values()) or 1.0
    shares = {name: value / whole for name, value in steady.items()}
    idle = 1.0 - sum(shares[name] for name in COMPUTE)
    return [step.time for step in steps], [step.wait_seconds for step in steps], {**shares, "idle": idle}


def _by_lines(
    lines: Sequence[tuple[float, str]], update: re.Pattern[str], epoch: int
) -> tuple[list[float], list[float]]:
    rows = [(moment, match) for moment, line in lines if (match := update.search(line)) and int(match[1]) == epoch]
    return [moment for moment, _ in rows], [float(figures[2]) for _, figures in rows]


def photographs(data: Path | None, folder: Path) -> list[Path]:
    """Return the sample, or draw JPEGs of its size where there is none."""
    folder.mkdir(parents=True)
    if data is not None and (data / ARCHIVE).exists():
        with tarfile.open(data / ARCHIVE) as tar:
            tar.extractall(folder, filter="data")
        return sorted(folder.rglob("*.JPEG"))
    draw = np.random.default_rng(0)
    for number in range(200):
        rough = Image.fromarray(draw.integers(0, 256, (12, 16, 3), dtype=np.uint8)).resize((500, 375))
        noisy = np.asarray(rough, np.int16) + draw.integers(-24, 25, (375, 500, 3))
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(folder / f"{number:03}.JPEG", quality=90)
    return sorted(folder.iterdir())


def prepare(work: Work, data: Path | None) -> dict[str, float]:
    """Lay out as many images as an epoch takes, and a batch to evaluate; pack them: the seconds of that."""
    source = photographs(data, work.folder / "source")
    for split, count in (("train", work.batch * work.steps), ("val", max(work.batch, CLASSES))):
        for number in range(count):
            place = work.folder / "images" / split / f"class{number % CLASSES}"
            place.mkdir(parents=True, exist_ok=True)
            (place / f"{number:06}.jpg").hardlink_to(source[number % len(source)])
    began = time.perf_counter()
    words = [*STEADY, "pack", str(work.folder / "images"), str(work.folder / "packed")]
    subprocess.run(words, check=True, stdout=sys.stderr)
    return {"pack_seconds": time.perf_counter() - began}


def compare(work: Work, names: Sequence[str], rounds: int, seconds: float) -> dict[str, Any]:
    """Run the contenders in turns; one that fails is listed with its reason, and has no more turns.

    Args:
        names: of :data:`CONTENDERS`.
        seconds: for all of it: a turn for which they will hardly suffice is not begun.
    """
    until = time.monotonic() + seconds
    taken: dict[str, list[Turn]] = {name: [] for name in names}
    lacking: dict[str, str] = {}
    for _, name in machine.in_turns(names, rounds):
        left, before = until - time.monotonic(), max((turn.seconds for turn in taken[name]), default=0.0)
        if name in lacking or left <= before:
            continue
        try:
            taken[name].append(take_turn(work, CONTENDERS[name], left))
            machine.say(f"{name}: {taken[name][-1].seconds:.1f} s")
        except ContenderError as error:
            lacking[name] = error.reason
            machine.say(f"{name}: {error}")
    lacking |= {name: "no time was left" for name in names if not taken[name] and name not in lacking}
    figures = {name: summary(work, turns) for name, turns in taken.items() if turns}
    return {"contenders": figures, "lacking": lacking, "times": ratios(figures)}


def summary(work: Work, turns: Sequence[Turn]) -> dict[str, Any]:
    """Return medians over the turns of one contender."""
    last = len(turns[0].moments) - 1
    steps = [(turn.moments[last] - turn.moments[work.warm - 1]) / (last + 1 - work.warm) for turn in turns]
    waits = [sum(turn.waits[work.warm :]) / (last + 1 - work.warm) for turn in turns]
    whole, step = median(turn.seconds for turn in turns), median(steps)
    document: dict[str, Any] = {
        "images_per_second": work.batch / step,
        "command_images_per_second": work.images / whole,
        "step_seconds": step,
        "wait_seconds_of_a_step": median(waits),
        "command_seconds": whole,
        "seconds_to_first_update": median(turn.moments[0] for turn in turns),
        "cpu_seconds": median(turn.cpu_seconds for turn in turns),
        "cores_busy": median(turn.cpu_seconds / turn.seconds for turn in turns),
        "rounds": [turn.told(each) for turn, each in zip(turns, steps, strict=True)],
    }
    if turns[-1].shares is not None:
        document["ledger"] = {name: round(share, 4) for name, share in turns[-1].shares.items()}
    return document


def ratios(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Return our rates over each script's, steady and as a whole command; and whether the bar is met against both."""
    rates = ("images_per_second", "command_images_per_second")
    ours = [name for name in figures if CONTENDERS[name].whose == "steadytrain"]
    theirs = [name for name in figures if name not in ours]
    times = {
        name: {peer: {rate: figures[name][rate] / figures[peer][rate] for rate in rates} for peer in theirs}
        for name in ours
    }
    met = {
        name: {rate: min(times[name][peer][rate] for peer in ("timm", "torchvision")) >= BAR for rate in rates}
        for name in ours
        if {"timm", "torchvision"} <= set(theirs)
    }
    return {"bar": BAR, "met": met, **times}


def origin(whose: str, checkout: Path) -> dict[str, str | None]:
    """Return the version of a script: its commit, if the folder is a checkout, and its digest."""
    asked = ["git", "-C", str(checkout), "describe", "--tags", "--always"]
    is_checkout = (checkout / ".git").exists() and shutil.which("git") is not None
    answer = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip() if is_checkout else ""
    return {"commit": answer or None, "sha256": hashlib.sha256(script(whose, checkout).read_bytes()).hexdigest()}


def measure(work: Work, names: Sequence[str], rounds: int, *, data: Path | None, seconds: float) -> dict[str, Any]:
    """Prepare the images and compare: one document."""
    began = time.monotonic()
    prepared = prepare(work, data)
    about = {name: getattr(work, name) for name in ("model", "device", "batch", "steps", "warm", "epochs")}
    scripts = {whose: origin(whose, folder) for whose, folder in work.checkouts.items()}
    images = "the sample" if data is not None and (data / ARCHIVE).exists() else "drawn"
    compared = compare(work, names, rounds, seconds - (time.monotonic() - began))
    return {**about, "images": images, "scripts": scripts, **prepared, **compared}


def offered(checkouts: Mapping[str, Path], device: str) -> list[str]:
    """Return the contenders that can run: scripts that are given; numbers of a GPU where there is one."""
    there = [name for name, who in CONTENDERS.items() if who.whose in {"steadytrain", *checkouts}]
    return [name for name in there if device == "cuda" or not CONTENDERS[name].more]


def main() -> None:
    """Measure, print, and save where the command line asks for it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended as well
    parser = machine.parser(
        __doc__, data="imagenet-sample-200.tar; drawn pictures without it", needs_data=False, rounds=3
    )
    parser.add_argument("--timm", type=Path, help="a checkout of pytorch-image-models")
    parser.add_argument("--torchvision", type=Path, help="a checkout of vision")
    parser.add_argument("--model", default="resnet50", help="a name that all three have")
    parser.add_argument("--only", nargs="+", choices=list(CONTENDERS), help="these contenders (default: all there are)")
    parser.add_argument("--batch", type=int, help="images of an update (default: 256 on a GPU, else 16)")
    parser.add_argument("--steps", type=int, help="updates of an epoch (default: 80 on a GPU, else 10)")
    parser.add_argument("--warm", type=int, help="of them, not timed (default: 35 on a GPU, else 2)")
    parser.add_argument("--epochs", type=int, default=1, help="only the last one is timed")
    parser.add_argument(
        "--seconds", type=float, default=1e6, help="of all of it; fewer rounds where they do not suffice"
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if facts.accelerators() else "cpu")
    args = parser.parse_args()
    checkouts = {name: Path(folder).resolve() for name in UPDATE if (folder := getattr(args, name)) is not None}
    for whose, folder in checkouts.items():
        if not script(whose, folder).exists():
            parser.error(f"--{whose} {folder}: there is no {script(whose, folder).relative_to(folder)} in it")
    names = args.only or offered(checkouts, args.device)
    if missing := {CONTENDERS[name].whose for name in names} - {"steadytrain", *checkouts}:
        parser.error(f"give the checkout: {' '.join(f'--{name} FOLDER' for name in sorted(missing))}")
    batch, steps, warm = (256, 80, 35) if args.device == "cuda" else (16, 10, 2)
    steps, warm = args.steps or steps, warm if args.warm is None else args.warm
    if not 1 <= warm < steps:
        parser.error(f"--warm is {warm}; it must be from 1 to {steps - 1}, one less than --steps")
    if (args.batch or batch) * steps < CLASSES:
        parser.error(f"--batch {args.batch} and --steps {steps} make an epoch of fewer than {CLASSES} images")
    with tempfile.TemporaryDirectory() as folder:
        work = Work(
            folder=Path(folder),
            checkouts=checkouts,
            device=args.device,
            model=args.model,
            batch=args.batch or batch,
            steps=steps,
            warm=warm,
            epochs=args.epochs,
        )
        measured = measure(work, names, args.rounds, data=args.data, seconds=args.seconds)
    machine.record("train_command", measured, save=args.save)


if __name__ == "__main__":
    main()
