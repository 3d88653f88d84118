"""Training steps of steadytrain against a bare PyTorch loop and, if its Python is given, Apache MXNet 1.9.1.

Two questions, answered from interleaved rounds of one run:

- How much faster or slower is a step (ResNet-20 at 32 pixels, batch 128; ResNet-50 at 224, batch 16)? steadytrain
  runs its whole loop (feed from JPEG or PNG records, events, logging); the others step on one resident batch.
- What does the loop itself cost? Its host time per step with a model that does nothing, less that of a bare
  loop on the same model, over the time of a real step.

usage: python benchmarks/train_step.py [--rounds 5] [--steps 8] [--mxnet-python PATH] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from PIL import Image

import machine

HERE = Path(__file__).resolve().parent
CASES = {"resnet20": ("resnet20", 128, 32), "resnet50": ("timm/resnet50", 16, 224)}
NOTHING = "train_step:Nothing"


def nothing(num_classes: int, **told: Any) -> Any:
    """A model that does nothing: logits from one parameter, whatever the images."""
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Parameter(torch.zeros(num_classes))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.fc.expand(images.shape[0], -1)

    return Module()


def write_records(folder: Path, side: int, count: int) -> Path:
    """Smooth random pictures in ten classes, packed: PNG up to 64 pixels, JPEG above."""
    from steadytrain.records import pack

    draw = np.random.default_rng(0)
    for i in range(count):
        place = folder / "images" / f"class{i % 10}"
        place.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        full = side if side <= 64 else side * 8 // 7
        small.resize((full, full), Image.Resampling.BICUBIC).save(place / f"{i}.{'png' if side <= 64 else 'jpg'}")
    pack(folder / "images", folder / "records")
    return folder / "records.rec"


def ours(model: str, batch: int, side: int, steps: int, records: str) -> list[float]:
    """Seconds of each step of a real run."""
    from steadytrain import Budget, Data, Every, Model, Optim, Recipe, Run
    from steadytrain.events import Step
    from steadytrain.training import steps as run_steps

    recipe = Recipe(
        data=Data(train=records, size=side, holdout=0.0),
        model=Model(model),
        optim=Optim("sgd", lr=0.01, nesterov=False, weight_decay=1e-4),
        budget=Budget(steps=steps),
        every=Every(log_steps=max(1, steps)),
        batch_size=batch,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder) / "run", recipe)
        return [event.seconds for event in run_steps(run, allow_import=True) if isinstance(event, Step)]


def bare(model: str, batch: int, side: int, steps: int) -> list[float]:
    """Seconds of each step of the loop that everyone writes first: eager, NCHW, one resident batch."""
    import timm
    import torch

    from steadytrain import models
    from steadytrain.recipe import Model

    classes = 10
    if model == NOTHING:
        net = nothing(classes)
    elif model.startswith("timm/"):
        net = timm.create_model(model.removeprefix("timm/"), num_classes=classes)
    else:
        net = models.build(Model(model), num_classes=classes, channels=3, size=side).module
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    images = torch.randint(0, 256, (batch, 3, side, side)).float().div(255)
    labels = torch.arange(batch) % classes
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
    return seconds


def child(arguments: list[str], python: str = sys.executable) -> list[float]:
    """Run one contender in a process of its own; its seconds, warm-up left out."""
    environment = {**os.environ, "PYTHONPATH": str(HERE), "MXNET_SUBGRAPH_BACKEND": "NONE"}
    done = subprocess.run([python, *arguments], capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
    seconds: list[float] = json.loads(done.stdout.splitlines()[-1])["seconds"]
    return seconds[max(2, len(seconds) // 4) :]


def mxnet_version(python: str | None) -> str | None:
    """What the peer says it is; None where there is none."""
    if python is None:
        return None
    asked = [python, "-c", "import mxnet; print(mxnet.__version__)"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def compare(case: str, rounds: int, steps: int, mxnet: str | None, folder: Path) -> dict[str, Any]:
    """Interleaved rounds of every contender on one case."""
    model, batch, side = CASES[case]
    records = write_records(folder / case, side, max(2 * batch, 64))
    mine = [str(HERE / "train_step.py"), "--one"]
    shape = [str(batch), str(side), str(steps)]
    noop_steps = [str(batch), str(side), "200"]
    told: dict[str, list[float]] = {}
    for _ in range(rounds):
        told.setdefault("steadytrain", []).append(median(child([*mine, "ours", model, *shape, str(records)])))
        told.setdefault("bare", []).append(median(child([*mine, "bare", model, *shape])))
        told.setdefault("nothing_steadytrain", []).append(
            median(child([*mine, "ours", NOTHING, *noop_steps, str(records)]))
        )
        told.setdefault("nothing_bare", []).append(median(child([*mine, "bare", NOTHING, *noop_steps])))
        if mxnet:
            told.setdefault("mxnet", []).append(median(child([str(HERE / "peers/mxnet_step.py"), case, *shape], mxnet)))
    medians = {name: median(values) for name, values in told.items()}
    overhead = medians["nothing_steadytrain"] - medians["nothing_bare"]
    return {
        "batch": batch,
        "side": side,
        "rounds": rounds,
        "seconds_per_step": medians,
        "images_per_second": {name: batch / s for name, s in medians.items() if not name.startswith("nothing")},
        "times_bare": medians["bare"] / medians["steadytrain"],
        "times_mxnet": medians["mxnet"] / medians["steadytrain"] if mxnet else None,
        "loop_microseconds": overhead * 1e6,
        "loop_share_of_step": overhead / medians["steadytrain"],
        "all_rounds": told,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--mxnet-python", default=os.environ.get("STEADYTRAIN_MXNET_PYTHON"))
    parser.add_argument("--save", action="store_true", help="also write benchmarks/results/train_step.json")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    told = parser.parse_args()
    if told.one:
        kind, model, *numbers = told.one
        batch, side, steps = map(int, numbers[:3])
        seconds = ours(model, batch, side, steps, numbers[3]) if kind == "ours" else bare(model, batch, side, steps)
        print(json.dumps({"seconds": seconds}))
        return
    with tempfile.TemporaryDirectory() as folder:
        cases = {case: compare(case, told.rounds, told.steps, told.mxnet_python, Path(folder)) for case in told.cases}
    machine.record("train_step", {"mxnet": mxnet_version(told.mxnet_python), **cases}, save=told.save)


Nothing = nothing

if __name__ == "__main__":
    main()
