"""The recipe of ``steady tune`` against the defaults of timm, torchvision and AutoGluon: images per second of training.

Four works, each of one network on the same images at the same size: CIFAR-10 (10,000 images as PNG, packed without loss
for us), and JPEGs of about 500 x 400 (1,000: 200 originals, five times each). Everybody loads, augments and trains
with one process on this machine:

- ``tuned``: what ``steady tune`` chose within ``--minutes`` (``tune_seconds``), ``usual``: the default recipe; both by
  ``steadytrain.steps``, as a run: with events, logging and checkpoints.
- ``timm``: the loader and the update of its training script, at the script's defaults: 4 workers that stay, prefetcher
  (bytes are normalised on the device), Pillow, batch 128, SGD with momentum, fp32, channels first.
- ``torchvision``: of its reference script: 16 workers, ``ImageFolder``, ToTensor and Normalize in the workers, pinned
  memory, batch 32, SGD with momentum. The plain preset, without automatic augmentation.
- ``autogluon``: AutoGluon is not installed; its settings by name (``configs/env/default.yaml``, ``data/default.yaml``):
  ``num_workers`` 2, ``per_gpu_batch_size`` 8, gradients of 16 such passes added up to ``batch_size`` 128, AdamW, fp32
  (its 16 bits are for GPUs). Its images are resized and cut from the centre; its TrivialAugment is left out.

Augmentation is ours where theirs can be that: a random resized crop (0.08 to 1 of the area) with bilinear interpolation
and a flip, timm without its colour jitter; on CIFAR-10 4 pixels of padding, a random crop and a flip. Theirs is drawn
by their own code. timm and torchvision wait for the loss of every update, as their scripts do.

Every turn is a process of its own: it trains for ``--warm`` seconds, in which queues fill up, and is timed for
``--seconds``. Before that a run of ours makes the updates after which it measures once what a step is made of (at most
a hundredth of a run's time, and these runs have a thousand epochs: it would fill the seconds that are timed). The
contenders take turns, ``--turns`` times. Ratios are medians over the turns. The bar: tuned is faster
than each. ``images_per_cpu_second`` counts the CPU time of a contender with its workers: it moves less where other
programs use the machine, but what waiting threads spin is in it.

usage: python benchmarks/tune_peers.py --work FOLDER [--data FOLDER] [--works NAME ...] [--minutes 1] [--save]
       FOLDER of the data holds cifar10-png.tar.zst, imagenet-sample-200.tar
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import psutil

import machine
from steadytrain.config import Recipe

WORKS = {
    "resnet20-cifar10": ("resnet20", "cifar10", 32),
    "quick8-cifar10": ("quick8", "cifar10", 32),
    "mobilenetv3-large": ("timm/mobilenetv3_small_100", "large", 160),
    "resnet18-large": ("timm/resnet18", "large", 128),
}
"""Name -> network, images, side in pixels."""

FOLDERS = {"cifar10": "few-cifar10", "large": "few-large"}
PEERS = ("timm", "torchvision", "autogluon")
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SETTINGS: dict[str, dict[str, Any]] = {
    "timm": {"workers": 4, "batch_size": 128, "accumulate": 1, "persistent_workers": True, "prefetcher": True},
    "torchvision": {"workers": 16, "batch_size": 32, "accumulate": 1, "pin_memory": True},
    "autogluon": {"workers": 2, "batch_size": 8, "accumulate": 16},
}


Rates = dict[str, float]


def timed(update: Callable[[], int], warm: float, seconds: float) -> Rates:
    """Return images per second, and per CPU second, of updates, which return how many they took, after some others."""
    end = time.perf_counter() + warm
    while time.perf_counter() < end:
        update()
    images, began, used = 0, time.perf_counter(), cpu_seconds()
    while (now := time.perf_counter()) < began + seconds:
        images += update()
    return {"images_per_second": images / (now - began), "images_per_cpu_second": images / (cpu_seconds() - used)}


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and all of its children, those that have ended included."""
    this = psutil.Process()
    total = sum(this.cpu_times()[:4])
    for child in this.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            total += sum(child.cpu_times()[:4])
    return total


def ours(recipe: Recipe, warm: float, seconds: float) -> Rates:
    """Return the rates of a run."""
    from steadytrain.machine.process import share_cores, spin_where_alone

    share_cores()  # as the command does, before torch is loaded
    spin_where_alone()
    import steadytrain as st
    from steadytrain.events import Step
    from steadytrain.training.profile.step_cost import LEAST_UPDATES

    changes = {"budget.epochs": 1000, "every.evaluate_epochs": 1000.0, "optim.warmup_epochs": 0.0}
    with tempfile.TemporaryDirectory() as folder:
        run = st.Run.create(Path(folder) / "run", recipe.with_(changes))
        events: Any = st.steps(run)  # a generator, whose end closes the run

        def update() -> int:
            while not isinstance(next(events), Step):
                pass
            return recipe.batch_size

        with closing(events):
            for _ in range(LEAST_UPDATES + 1):
                update()
            return timed(update, warm, seconds)


def theirs(name: str, work: str, folder: Path, warm: float, seconds: float) -> Rates:
    """Return the rates of a peer's loop, which is given our network."""
    import torch
    from torch import nn

    from steadytrain.config import Model
    from steadytrain.models.build import build

    model, images, size = WORKS[work]
    classes = len(list(folder.iterdir()))
    network = build(Model(model), num_classes=classes, channels=3, size=size).module
    settings, batches = SETTINGS[name], endless(loader_of(name, images, folder, size))
    optimizer: torch.optim.Optimizer
    if name == "autogluon":
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-4, weight_decay=1e-3)
    else:
        optimizer = torch.optim.SGD(network.parameters(), lr=1e-4, momentum=0.9, weight_decay=2e-5)
    loss_of = nn.CrossEntropyLoss()
    network.train()

    def update() -> int:
        taken = 0
        optimizer.zero_grad()
        for _ in range(settings["accumulate"]):
            inputs, labels = next(batches)
            loss = loss_of(network(inputs), labels) / settings["accumulate"]
            loss.backward()
            taken += len(labels)
        optimizer.step()
        loss.item()
        return taken

    return timed(update, warm, seconds)


def endless(loader: Any) -> Iterator[Any]:
    """Yield epoch after epoch; a loader whose workers do not stay starts them anew for each."""
    while True:
        yield from loader


def loader_of(name: str, images: str, folder: Path, size: int) -> Any:
    """Make a peer's loader with its defaults."""
    import torch
    from torchvision import transforms
    from torchvision.datasets import ImageFolder

    is_small = images == "cifar10"
    settings = SETTINGS[name]
    if name == "timm":
        from timm.data.dataset import ImageDataset
        from timm.data.loader import create_loader
        from timm.data.transforms import ToNumpy

        loader = create_loader(
            ImageDataset(str(folder)),  # type: ignore[no-untyped-call]
            (3, size, size),
            settings["batch_size"],
            is_training=True,
            color_jitter=0.0,
            interpolation="bilinear",
            num_workers=settings["workers"],
            device=torch.device("cpu"),
            use_prefetcher=settings["prefetcher"],
            persistent_workers=settings["persistent_workers"],
        )
        if is_small:
            steps = [transforms.RandomCrop(size, padding=4), transforms.RandomHorizontalFlip(), ToNumpy()]
            loader.dataset.transform = transforms.Compose(steps)
        return loader
    if name == "autogluon":
        random = [transforms.Resize(size), transforms.CenterCrop(size)]
    elif is_small:
        random = [transforms.RandomCrop(size, padding=4), transforms.RandomHorizontalFlip()]
    else:
        random = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    steps = [*random, transforms.ToTensor(), transforms.Normalize(MEAN, STD)]
    return torch.utils.data.DataLoader(
        ImageFolder(str(folder), transforms.Compose(steps)),
        batch_size=settings["batch_size"],
        shuffle=True,
        drop_last=True,
        num_workers=settings["workers"],
        pin_memory=settings.get("pin_memory", False),
    )


def turn(who: str, name: str, recipe: dict[str, Any] | None, folder: Path, args: argparse.Namespace) -> Rates:
    """Measure the rates of one contender, in a process of its own."""
    request = {"who": who, "work": name, "recipe": recipe, "folder": str(folder)}
    request |= {"warm": args.warm, "seconds": args.seconds}
    rates: Rates = machine.ask([sys.executable, __file__, "--turn", json.dumps(request)])
    return rates


def answer(request: dict[str, Any]) -> Rates:
    """Take a turn."""
    if request["recipe"] is not None:
        return ours(Recipe.from_dict(request["recipe"]), request["warm"], request["seconds"])
    return theirs(request["who"], request["work"], Path(request["folder"]), request["warm"], request["seconds"])


def compare(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one work."""
    import steadytrain as st
    from steadytrain.tuning.probes import Prober
    from steadytrain.tuning.tune import tune
    from tune import data_of

    model, images, size = WORKS[name]
    rec = data_of(images, args.data, args.work)
    usual = st.default_recipe(rec, {"model.name": model, "parallel.device": "cpu", "data.size": size})
    os.environ["STEADYTRAIN_CACHE"] = str(args.work / f"cache-{name}-{time.time_ns()}")  # nothing was measured before
    began = time.perf_counter()
    with Prober() as prober:
        tuned = tune(usual, prober=prober, seconds=60 * args.minutes, began=began)
    tune_seconds = time.perf_counter() - began
    contenders: dict[str, dict[str, Any] | None] = {"tuned": tuned.recipe.to_dict(), "usual": usual.to_dict()}
    contenders |= dict.fromkeys(PEERS)
    turns = []
    for number in range(args.turns):
        rates = {who: turn(who, name, recipe, args.work / FOLDERS[images], args) for who, recipe in contenders.items()}
        turns.append(rates)
        shown = ", ".join(f"{who} {value['images_per_second']:,.0f}" for who, value in rates.items())
        machine.say(f"{name}, turn {number + 1}: {shown} images/s")
    return {
        "model": model,
        "images": images,
        "size": size,
        "chosen": {choice.key: choice.value for choice in tuned.choices},
        "tune_seconds": tune_seconds,
        "turns": turns,
        **{
            f"tuned_over_in_{key}": {
                who: median(rates["tuned"][key] / rates[who][key] for rates in turns)
                for who in contenders
                if who != "tuned"
            }
            for key in ("images_per_second", "images_per_cpu_second")
        },
    }


def main() -> None:
    """Compare, and record; or take one turn."""
    parser = machine.parser(
        __doc__,
        data="cifar10-png.tar.zst and imagenet-sample-200.tar",
        needs_data=False,
        choose=("--works", WORKS),
    )
    parser.add_argument("--work", type=Path)
    parser.add_argument("--minutes", type=float, default=1.0, help="of tuning")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--warm", type=float, default=8.0)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--turn", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.turn:
        print(json.dumps(answer(json.loads(args.turn))))
        return
    if args.work is None or args.data is None:
        parser.error("--work FOLDER and --data FOLDER say where to work and where the images are")
    args.work.mkdir(parents=True, exist_ok=True)
    works: dict[str, Any] = {}
    for name in args.works:
        works[name] = machine.kept(args.work / f"peers-{name}.json", partial(compare, name, args))
    ratios = [figures["tuned_over_in_images_per_second"] for figures in works.values()]
    least = {who: min(ratio[who] for ratio in ratios) for who in ("usual", *PEERS)}
    document = {"minutes": args.minutes, "settings": SETTINGS, "least_tuned_over": least, "works": works}
    machine.record(machine.of_cases("tune_peers", args.works, WORKS), document, save=args.save)


if __name__ == "__main__":
    main()
