"""The cost of each transform beside a step: CPU seconds of a batch, as a share of those of a ResNet-20 step, in turns.

A turn makes one step (fp32, batch 128, 32 x 32 pixels) and each transform once, with its usual values. Shares are of
the processor time of all threads, which other processes disturb less, and of the wall clock: the fastest of all turns.

usage: python benchmarks/augmentation.py [--turns 15] [--threads 2] [--only augmix ...] [--save]
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from torch.nn import functional

import machine
from steadytrain import models
from steadytrain.config import Model, Optim
from steadytrain.config.transforms import KINDS, Transform
from steadytrain.data.transforms import Augmentation
from steadytrain.optim import build

BATCH, SIDE, LIMIT = 128, 32, 0.1
NEEDED = {"rotate": "rotate:15", "shear": "shear:0.1", "color": "color:0.4", "grey": "grey:0.1"}


def step() -> Callable[[], object]:
    """Make an update of ResNet-20, to be called."""
    torch.manual_seed(0)
    net = models.build(Model("resnet20"), num_classes=10, channels=3, size=SIDE).module
    net.to(memory_format=torch.channels_last).train()
    groups = [{"params": list(net.parameters()), "weight_decay": 5e-4}]
    optimizer = build(Optim(), groups, lr=0.1, device=torch.device("cpu"))
    images = torch.randn(BATCH, 3, SIDE, SIDE).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(0, 10, (BATCH,))

    def update() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(net(images), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return update


def transform(text: str) -> Callable[[], object]:
    """Make a transform of a batch, to be called."""
    chosen = Augmentation((Transform.parse(text),), seed=0, fill=(0.5,) * 3, num_classes=10, group=BATCH)
    images = torch.randint(0, 256, (BATCH, SIDE, SIDE, 3), dtype=torch.uint8)
    labels, positions = torch.randint(0, 10, (BATCH,)), np.arange(BATCH)
    return lambda: chosen(images, labels, positions)


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="*", default=list(KINDS))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    works = {"step": step(), **{name: transform(NEEDED.get(name, name)) for name in arguments.only}}
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in works}
    for turn in range(arguments.turns + 2):  # two to warm up
        for name, work in works.items():
            processor, wall = time.process_time(), time.perf_counter()
            work()
            if turn > 1:
                spent[name].append((time.process_time() - processor, time.perf_counter() - wall))
    least = {name: [min(kind) for kind in zip(*seconds, strict=True)] for name, seconds in spent.items()}
    rows = {
        name: {
            "cpu_seconds": round(cpu, 6),
            "wall_seconds": round(wall, 6),
            "cpu_share": round(cpu / least["step"][0], 4),
            "wall_share": round(wall / least["step"][1], 4),
        }
        for name, (cpu, wall) in least.items()
    }
    above = [name for name, row in rows.items() if name != "step" and row["cpu_share"] > LIMIT]
    document = {"batch": BATCH, "side": SIDE, "threads": arguments.threads, "turns": arguments.turns, "limit": LIMIT}
    machine.record("augmentation", {**document, "rows": rows, "above_the_limit": above}, save=arguments.save)


if __name__ == "__main__":
    main()
