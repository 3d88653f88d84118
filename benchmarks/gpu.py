"""Everything that is to be measured on a machine with a GPU, by one command, without a network.

- ``tests``: the tests that need a GPU: how many passed, and the names of those that did not.
- ``resnet50``: updates of ResNet-50 on drawn images that are there, in each kind of numbers, by torch's kernels and by
  compiled code: images/s, the share of the peak that a matrix product reaches here (``of_peak``) and of the vendor's
  data sheet (``of_data_sheet``: the usual MFU); beside them what NVIDIA has published.
- ``command``: ResNet-50 from photographs by ``steady train``: images/s, and the ledger's shares (``idle``: what is
  neither forward pass, backward pass nor optimizer), against timm's and torchvision's scripts where their checkouts are
  given: ``train_command.py``.
- ``small``: networks that take less to compute than to launch: by torch's kernels, by compiled code, and both replayed
  as one graph; ``tuned``: the same in the other modes of compiled code.
- ``settings``: what ``--deterministic`` costs an update, and what segments of memory that grow cost and save
  (``reserved_bytes``: what torch has taken from the driver).
- ``cifar10``: minutes from the command to 94 % of CIFAR-10's test images: ``cifar10_minutes.py``, ours alone.

A part has so many seconds, by default those of :data:`PARTS`; what it has not measured by then is told as ``left_out``,
a part that fails as its ``error``, and the others go on. All together take up to an hour; where a command
may take ten minutes only, measure some at a time: ``--save`` keeps the parts of the same machine that the receipt has
already::

    python benchmarks/gpu.py --only tests settings --save
    python benchmarks/gpu.py --only resnet50 --save
    python benchmarks/gpu.py --only command --timm FOLDER --torchvision FOLDER --save
    python benchmarks/gpu.py --only small --save
    python benchmarks/gpu.py --only tuned --save
    python benchmarks/gpu.py --only cifar10 --data FOLDER --save

To install where nothing can be fetched: on a machine with a network, ``pip wheel --no-deps -w WHEELS .`` and ``pip
download --no-deps --only-binary=:all: --python-version 3.12 --platform manylinux_2_28_x86_64 -d WHEELS NAME ...``, the
names being those of pyproject.toml that the other machine lacks, of its tests pytest, pytest-timeout, pytest-xdist,
hypothesis, zstandard and scikit-learn among them; there ``pip install --no-index --no-deps --find-links WHEELS
steadytrain NAME ...``. torch has to be there, made for that GPU; compiled code wants a C compiler.

``--quick`` rehearses every part in a few small steps, on a CPU as well (``--device cpu --quick``): it proves that this
script works, its figures mean nothing, and it is never saved.

usage: python benchmarks/gpu.py [--only PART ...] [--data FOLDER] [--timm FOLDER] [--torchvision FOLDER]
                                [--seconds N] [--quick] [--device cpu] [--save [FILE]]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, get_args

import machine
import train_command
from accuracy import STEADY
from peers.commands import asked
from peers.scale_contenders import ContenderError
from steadytrain.config import CompileMode, Numbers
from steadytrain.machine import facts

PROJECT = Path(__file__).resolve().parents[1]
RECEIPT = machine.RESULTS / "gpu.json"

PUBLISHED = {
    "NVIDIA DeepLearningExamples, PyTorch ResNet-50 v1.5, one A100, AMP": 2470,
    "NVIDIA DeepLearningExamples, MXNet ResNet-50 v1.5, one A100": 3411,
    "MLPerf Training v4.0, Dell and NVIDIA, one of eight H100": 7140,
    "MLPerf Training v4.0, NVIDIA, one of eight H200": 7945,
}
"""Images/s of training ResNet-50 at 224 pixels from ImageNet's files, by these projects' pages and logs; of eight GPUs
the eighth part."""

DATA_SHEET = {
    "H100 80GB HBM3": {"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12},
    "H200": {"fp32": 66.9e12, "tf32": 494.7e12, "bf16": 989.4e12, "fp16": 989.4e12},
    "A100": {"fp32": 19.5e12, "tf32": 156e12, "bf16": 312e12, "fp16": 312e12},
}
"""A part of the GPU's name -> FLOP/s of dense products, by NVIDIA's data sheets (which print the sparse ones, twice
that, for tensor cores)."""

GRAPHS = ["none", "none+graph", "default", "default+graph"]
"""Ways to compute: a mode of compiled code, or none; and the whole update replayed as one graph of kernels."""

WAYS = ["usual", "deterministic", "fixed"]
"""``usual``: convolutions by the algorithm that cuDNN finds to be fastest when it tries all, segments of memory that
grow; ``fixed``: segments as torch has them by itself."""

SMALL = {"mlp": (28, 1), "lenet": (28, 1), "resnet20": (32, 3)}
"""Network -> pixels, channels."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a part is told; ``until``: by ``time.monotonic()``."""

    device: str
    quick: bool
    folder: Path
    data: Path | None
    checkouts: Mapping[str, Path]
    until: float

    @property
    def left(self) -> float:
        """Seconds that remain."""
        return self.until - time.monotonic()


def tests(setting: Setting) -> dict[str, Any]:
    """The tests marked ``gpu``, all of them; in a rehearsal, where they are skipped, one file."""
    report = setting.folder / "tests.xml"
    words = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", f"--junitxml={report}"]
    asked([*words, "tests/gpu" if setting.quick else "tests"], PROJECT, setting.left, may_fail=True)
    if not report.exists():
        raise ContenderError("pytest has left no report")
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    outcomes: dict[str, list[str]] = {"failed": [], "errors": [], "skipped": []}
    kinds = {"failure": "failed", "error": "errors", "skipped": "skipped"}
    for case in cases:
        for kind in {kinds[part.tag] for part in case if part.tag in kinds}:
            outcomes[kind].append(f"{case.get('classname')}::{case.get('name')}")
    passed = len(cases) - len({name for names in outcomes.values() for name in names})
    return {"collected": len(cases), "passed": passed, **outcomes}


def resnet50(setting: Setting) -> dict[str, Any]:
    """Updates on images that are there."""
    if setting.quick:
        each = [("fp32", "none"), ("bf16", "none")]
        return benched(setting, "resnet20", each, [4], size=32, channels=3, classes=10)
    numbers = [name for name in get_args(Numbers) if name != "pure-fp16"]
    each = [*product(numbers, ["none"]), ("bf16", "none+graph"), *product(numbers, ["default"])]
    rows = benched(setting, "timm/resnet50", each, [256], size=224, channels=3, classes=1000)
    return {**rows, "published_images_per_second": PUBLISHED}


def command(setting: Setting) -> dict[str, Any]:
    """The whole command, from photographs."""
    batch, steps, warm = (8, 3, 1) if setting.quick else (256, 80, 35)
    work = train_command.Work(
        folder=setting.folder / "command",
        checkouts=setting.checkouts,
        device=setting.device,
        model="resnet18" if setting.quick else "resnet50",
        batch=batch,
        steps=steps,
        warm=warm,
    )
    work.folder.mkdir()
    names = train_command.offered(setting.checkouts, setting.device)
    return train_command.measure(work, names, 1 if setting.quick else 3, data=setting.data, seconds=setting.left)


def small(setting: Setting) -> dict[str, Any]:
    """Networks that are bound by launching."""
    return by_ways(setting, ["none", "default"] if setting.device == "cpu" else GRAPHS)


def tuned(setting: Setting) -> dict[str, Any]:
    """The same in the modes that take long to compile, the longest last."""
    ways = ["none", *(mode for mode in get_args(CompileMode) if mode not in GRAPHS)]
    return by_ways(setting, ways[:2] if setting.quick else ways)


def by_ways(setting: Setting, ways: Sequence[str]) -> dict[str, Any]:
    """The small networks, one way after the other."""
    numbers, batches = ("fp32" if setting.device == "cpu" else "bf16"), [64] if setting.quick else [64, 128]
    networks = {"mlp": SMALL["mlp"]} if setting.quick else SMALL
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for way, (name, (size, channels)) in product(ways, networks.items()):
        measured = benched(setting, name, [(numbers, way)], batches, size=size, channels=channels, classes=10)
        rows, left_out = rows + measured["rows"], left_out + measured["left_out"]
    return {"rows": rows, "left_out": left_out, "times": gains(rows)}


def gains(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Each network and batch: each way over torch's kernels one after another."""
    rates = {
        (f"{row['model']} {row['batch_size']}", row["way"]): row["images_per_second"]
        for row in rows
        if "error" not in row
    }
    figures: dict[str, dict[str, float]] = {}
    for (what, way), rate in rates.items():
        if way != "none" and (what, "none") in rates:
            figures.setdefault(what, {})[way] = rate / rates[what, "none"]
    return figures


def settings(setting: Setting) -> dict[str, Any]:
    """The same updates each way, in turns, each in a process of its own."""
    device, seconds = setting.device, 0.2 if setting.quick else 3.0
    large, numbers = ("timm/resnet50", 256, 224), "fp32" if device == "cpu" else "bf16"
    cases = [("resnet20", 8 if setting.quick else 128, 32), *(() if setting.quick else (large,))]
    document: dict[str, Any] = {}
    for name, batch, size in cases:
        rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for way in WAYS * (1 if setting.quick else 3):
            job = {"model": name, "batch_size": batch, "size": size, "seconds": seconds, "precision": numbers}
            words = [sys.executable, __file__, "--one", json.dumps(job | {"way": way, "device": device})]
            rounds[way].append(json.loads(asked(words, PROJECT, setting.left).splitlines()[-1]))
        middle = {
            way: {what: median(value[what] for value in values) for what in values[0]} for way, values in rounds.items()
        }
        usual = middle["usual"]["images_per_second"]
        document[name] = {
            "batch_size": batch,
            "precision": numbers,
            "middle": middle,
            "cost": {way: 1 - middle[way]["images_per_second"] / usual for way in WAYS},
            "rounds": rounds,
        }
    return document


def cifar10(setting: Setting) -> dict[str, Any]:
    """By the script that has the recipe; of its time, two minutes are for unpacking and packing."""
    if setting.data is None:
        raise ContenderError("give --data, the folder that holds cifar10-png.tar.zst")
    words = [sys.executable, str(PROJECT / "benchmarks" / "cifar10_minutes.py"), "--data", str(setting.data.resolve())]
    words += ["--work", str(setting.folder / "cifar10"), "--only", "quick"]
    limit = 0.2 if setting.quick else max(1.0, setting.left / 60 - 2)
    document = json.loads(asked([*words, "--limit", f"{limit:.2f}"], PROJECT, setting.left))
    return {name: value for name, value in document.items() if name not in ("benchmark", "machine")}


def one(job: Mapping[str, Any]) -> dict[str, float]:
    """Of a recipe's updates, measured in this process: images per second, and bytes taken from the driver."""
    if job["way"] == "fixed":
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:False"
    import torch

    from steadytrain.config import Data, Model, Recipe
    from steadytrain.training.profile.bench import measure

    recipe = Recipe(data=Data(train="drawn"), model=Model(job["model"]), batch_size=job["batch_size"]).with_(
        {
            "parallel.device": job["device"],
            "parallel.deterministic": job["way"] == "deterministic",
            "precision.name": job["precision"],
        }
    )
    classes = 1000 if job["size"] == 224 else 10
    rate = measure(recipe, size=job["size"], num_classes=classes, seconds=job["seconds"]).images_per_second
    taken = torch.cuda.max_memory_reserved() if job["device"] == "cuda" else 0
    return {"images_per_second": rate, "reserved_bytes": float(taken)}


class Part(NamedTuple):
    """What measures it, and how many seconds it has."""

    measure: Callable[[Setting], dict[str, Any]]
    seconds: float


PARTS = {
    "tests": Part(tests, 220),
    "resnet50": Part(resnet50, 500),
    "command": Part(command, 520),
    "small": Part(small, 500),
    "tuned": Part(tuned, 520),
    "settings": Part(settings, 380),
    "cifar10": Part(cifar10, 420),
}


def benched(
    setting: Setting,
    model: str,
    each: Sequence[tuple[str, str]],
    batches: Sequence[int],
    *,
    size: int,
    channels: int,
    classes: int,
) -> dict[str, Any]:
    """``steady bench train`` for numbers and ways: a row for each; what time did not suffice for is ``left_out``."""
    common = [*STEADY, "bench", "train", "--model", model, "--size", str(size), "--channels", str(channels)]
    common += ["--classes", str(classes), "--device", setting.device, "--seconds", "0.2" if setting.quick else "4"]
    rows: list[dict[str, Any]] = []
    left_out: list[str] = []
    for (numbers, way), batch in product(each, batches):
        asked_for = {"model": model, "precision": numbers, "way": way, "batch_size": batch}
        mode, _, graph = way.partition("+")
        words = ["--precision", numbers, "--compile", mode, "--batch-size", str(batch), "--json"]
        words += ["--graph", "yes"] if graph else []
        if setting.left < 10:
            left_out.append(" ".join(str(value) for value in asked_for.values()))
            continue
        try:
            row = json.loads(asked([*common, *words], PROJECT, setting.left))["rows"][0]
            rows.append(row | {"way": way, "of_data_sheet": of_data_sheet(row)})
        except ContenderError as error:
            rows.append(asked_for | {"error": error.reason})
        print(rows[-1].get("images_per_second", rows[-1].get("error")), *words, file=sys.stderr, flush=True)
    return {"rows": rows, "left_out": left_out}


def of_data_sheet(row: Mapping[str, Any]) -> float | None:
    """The share of the data sheet's FLOP/s; None for a GPU that is not listed."""
    names = [accelerator.name for accelerator in facts.accelerators()] if row["device"] != "cpu" else []
    peaks = [peaks for part, peaks in DATA_SHEET.items() if names and part in names[0]]
    if not peaks or row["flops_per_second"] is None:
        return None
    return float(row["flops_per_second"] / peaks[0][row["precision"].removeprefix("pure-")])


def measured(names: Sequence[str], args: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each part's document; one that fails has its ``error``."""
    checkouts = {name: Path(at).resolve() for name in train_command.UPDATE if (at := getattr(args, name)) is not None}
    for name in names:
        print(f"{name}:", file=sys.stderr, flush=True)
        began = time.monotonic()
        setting = Setting(
            device=args.device,
            quick=args.quick,
            folder=folder,
            data=args.data and Path(args.data),
            checkouts=checkouts,
            until=began + (args.seconds or PARTS[name].seconds),
        )
        try:
            measured = PARTS[name].measure(setting)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and the other parts are measured
            print(f"{name} failed: {error!r}", file=sys.stderr, flush=True)
            measured = {"error": error.reason if isinstance(error, ContenderError) else repr(error)}
        yield name, {**measured, "seconds": time.monotonic() - began, "date": machine.facts()["date"]}


def kept(receipt: Path) -> dict[str, Any]:
    """The parts that a receipt of this machine and this torch has already."""
    if not receipt.exists():
        return {}
    document, facts = json.loads(receipt.read_text(encoding="utf-8")), machine.facts()
    about = ("cpu", "cores", "accelerators")
    is_same = all(document["machine"][name] == facts[name] for name in about)
    is_same = is_same and document["machine"]["packages"]["torch"] == facts["packages"]["torch"]
    return dict(document["parts"]) if is_same else {}


def main() -> None:
    """Measure, print, perhaps save after each part."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended as well
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), metavar="PART")
    parser.add_argument("--data", type=Path, default=os.environ.get("STEADYTRAIN_TEST_DATA"))
    parser.add_argument("--timm", type=Path, help="a checkout of pytorch-image-models")
    parser.add_argument("--torchvision", type=Path, help="a checkout of vision")
    parser.add_argument("--seconds", type=float, help="that each part has, in place of its own")
    parser.add_argument("--quick", action="store_true", help="a rehearsal: a few small steps")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--save", type=Path, nargs="?", const=RECEIPT, help="write the receipt (results/gpu.json)")
    parser.add_argument("--one", type=json.loads, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(one(args.one)))
        return
    if args.device == "cuda" and not has_cuda():
        print("gpu.py: torch finds no CUDA device here; to rehearse: --device cpu --quick", file=sys.stderr)
        raise SystemExit(2)
    if args.device == "cpu" and not args.quick:
        parser.error("--device cpu is for a rehearsal: add --quick")
    if args.quick and args.save:
        parser.error("--quick is a rehearsal: it is not saved")
    parts = kept(args.save) if args.save else {}
    with tempfile.TemporaryDirectory() as folder:
        for name, figures in measured(args.only, args, Path(folder)):
            parts[name] = figures
            if args.save:  # what comes after may be ended by whoever started this
                document = {"benchmark": "gpu", "parts": parts, "machine": machine.facts()}
                args.save.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    rehearsal = {"rehearsal": f"a few small steps on {args.device}: the figures mean nothing"} if args.quick else {}
    machine.record("gpu", {**rehearsal, "parts": parts})
    raise SystemExit(1 if any("error" in parts[name] for name in args.only) else 0)


def has_cuda() -> bool:
    """Whether torch can compute on a GPU here."""
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    main()
