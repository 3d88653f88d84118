"""Cost and gain of recomputing activations: ``steady bench train`` with and without, in rounds that take turns.

Of each network: the bytes that its updates need in a process of their own (the most that the process ever had), images
per second, of which the median of the rounds counts, and the bytes of activations an image that autograd keeps at the
end of a forward pass, counted. For ResNet-50 also timm's own ``set_grad_checkpointing``, in the same loop. ``counted``:
how often an update's batch norms have updated their running statistics.

usage: python benchmarks/recompute.py [--rounds 2] [--cases resnet20 ...] [--save]
"""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import machine

HERE = Path(__file__).resolve().parent
CLASSES = 10


class Case(NamedTuple):
    """A network, its batches and its images."""

    model: str
    batch: int
    side: int
    timms: bool = False


CASES = {
    "resnet20": Case("resnet20", 128, 32),
    "resnet50": Case("timm/resnet50", 16, 224, timms=True),
}


def resnet50_by_timm(num_classes: int, **options: Any) -> Any:
    """Build ResNet-50 that recomputes activations by timm's own means."""
    import timm

    net: Any = timm.create_model("resnet50", num_classes=num_classes)
    net.set_grad_checkpointing()
    return net


def ways(case: Case) -> dict[str, list[str]]:
    """Return what is compared: name -> flags."""
    values = {"usual": ["--model", case.model], "recompute": ["--model", case.model, "--recompute", "yes"]}
    return values | ({"timm": ["--model", "recompute:resnet50_by_timm"]} if case.timms else {})


def row(case: Case, flags: list[str]) -> dict[str, Any]:
    """Run the command; return its figures."""
    command = [*machine.STEADY, "bench", "train", *flags, "--batch-size", str(case.batch)]
    command += ["--size", str(case.side), "--classes", str(CLASSES), "--device", "cpu", "--seconds", "3", "--json"]
    done = subprocess.run(command, cwd=HERE, stdout=subprocess.PIPE, check=True, text=True)
    document: dict[str, Any] = json.loads(done.stdout)["rows"][0]
    return document


def kept(case: Case, way: str) -> dict[str, Any]:
    """Count bytes of activations an image, and how often one update updates running statistics."""
    import torch

    from steadytrain import models
    from steadytrain.config import Recipe
    from steadytrain.distributed.engine import Engine
    from steadytrain.training import build
    from steadytrain.training.compute.recompute import recompute_parts
    from steadytrain.training.data import random_batch

    name = "recompute:resnet50_by_timm" if way == "timm" else case.model
    parallel = {"recompute": way == "recompute"}
    recipe = Recipe.from_dict({"data": {"train": "-"}, "model": {"name": name}, "parallel": parallel, "batch_size": 2})
    built = models.build(recipe.model, num_classes=CLASSES, channels=3, size=case.side, allow_import=True)
    changed = replace(built.input, size=case.side, channels=3, mean=(0.5,) * 3, std=(0.25,) * 3)
    state = build.state(recipe, built, Engine(torch.device("cpu")))
    update = build.update(recipe, built, changed, state)
    recomputed = recompute_parts(recipe, update, state)
    parts = [] if recomputed is None else list(recomputed.parts)
    batch = random_batch(2, update.image_shape, torch.device("cpu"))
    constant = {value.data_ptr() for value in (*state.module.parameters(), *state.module.buffers())}
    seen: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in constant:
            seen[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        update.objective(state.module, batch.images, batch.labels)
    before = _counted(state.module)
    before = _counted(state.module)
    update(state, batch, 0.0)
    each = sum(value.nbytes() for value in seen.values()) / 2
    return {
        "activation_bytes": each,
        "counted": _counted(state.module) - before,
        "parts": parts,
    }


def _counted(module: Any) -> int:
    """Return how often the network's batch norms have seen a batch: those that did so most often."""
    return max(int(count) for name, count in module.named_buffers() if name.endswith("num_batches_tracked"))


def compare(case: Case, rounds: int) -> dict[str, Any]:
    """Measure all ways of one network."""
    each = ways(case)
    taken: dict[str, list[dict[str, Any]]] = {way: [] for way in each}
    for _, way in machine.in_turns(each, rounds):
        taken[way].append(row(case, each[way]))
    counts = {"kept": {way: kept(case, way) for way in each}}
    if not rounds:
        return case._asdict() | counts
    rates = {way: median(row["images_per_second"] for row in rows) for way, rows in taken.items()}
    return {
        **case._asdict(),
        "images_per_second": rates,
        "of_usual": {way: rate / rates["usual"] for way, rate in rates.items()},
        "process_bytes": {way: median(row["memory_bytes"] for row in rows) for way, rows in taken.items()},
        **counts,
        "all_rounds": {way: [row["images_per_second"] for row in rows] for way, rows in taken.items()},
    }


def main() -> None:
    parser = machine.parser(__doc__, choose=("--cases", CASES), rounds=2)
    arguments = parser.parse_args()
    cases = {name: compare(CASES[name], arguments.rounds) for name in arguments.cases}
    name = machine.of_cases("recompute", arguments.cases, CASES)
    machine.record(name, {"rounds": arguments.rounds, **cases}, save=arguments.save)


if __name__ == "__main__":
    main()
