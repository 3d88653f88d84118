"""Predictions of ``steady scale`` for two ranks, against two real ranks over a cable shaped by ``tc``.

Two network namespaces are joined by a cable; in each of them a rank trains on a core of its own, by the engine of
``steady train``. Rounds alternate between an update without exchange and one with it, so that whatever else the machine
does meets both alike; of each update the slower rank counts, and of the rounds the median. The first gives the passes
that the model is given, the second what it has to predict. The prediction is made twice: from the figures that were
given to ``tc`` (latency: that of the unshaped cable), and from a link that was fitted to what ``steady
bandwidth`` measures over the same cable with another network.

Needs root on Linux (``ip``, ``tc``, ``taskset``). Nothing but the two namespaces of its own is touched.

usage: python benchmarks/scale_shaped.py [--seconds 6] [--beside WORDS] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import machine
from compression import cable, in_both, measured, shape
from steadytrain.config import Data, Model, Recipe
from steadytrain.tuning.scale import MachineCluster, MeasuredDevice, NetworkLink, even_gradients, fit_link, predict

RATES = ("", "100mbit", "300mbit", "1gbit")
"""The unshaped cable comes first: its latency is that of the others."""
BYTES_PER_SECOND = {"100mbit": 12.5e6, "300mbit": 37.5e6, "1gbit": 125e6}
BURST = "128kb"
"""What the cable lets through at once: a megabyte would hide all of a small network's gradients."""
NETS = (("resnet20", 32, 32, 10), ("timm/resnet50", 64, 8, 1000))
"""Name, side of the images, images of a rank, classes."""
FITTED_BY = "timm/mobilenetv3_large_100"
CORES = (0, 1)
WARM, LEAST_ROUNDS = 2, 4


def rank(request: Path, answer: Path) -> None:
    """Train as one of the ranks: alternate updates without and with exchange; the first writes all seconds."""
    import torch

    from steadytrain.distributed.process_group import init_group
    from steadytrain.distributed.world import world_from_environment
    from steadytrain.training.data import random_batch
    from steadytrain.training.profile.bench import set_up

    asked = json.loads(request.read_text(encoding="utf-8"))
    name, size, batch_size, classes = asked["net"]
    recipe = Recipe(data=Data(train="drawn"), model=Model(name), batch_size=2 * batch_size)
    recipe = recipe.with_({"parallel.device": "cpu", "parallel.compute_threads": 1})
    with init_group(world_from_environment(os.environ)) as group:
        trained = set_up(recipe, torch.device("cpu"), [], size=size, num_classes=classes, group=group)
        update, state, engine = trained.update, trained.state, trained.state.engine
        batch = random_batch(batch_size, update.image_shape, engine.device, num_classes=classes)

        def without() -> list[float]:
            ticks = [time.perf_counter()]
            with engine.micro_batch(last=False):
                loss, _ = update.forward(update.call, batch.images, batch.labels)
                ticks.append(time.perf_counter())
                engine.backward(loss, last=False)
            ticks.append(time.perf_counter())
            state.policy.step(state.optimizer)
            ticks.append(time.perf_counter())
            return [after - before for before, after in pairwise(ticks)]

        def together() -> float:
            began = time.perf_counter()
            update(state, batch, 0.0)
            return time.perf_counter() - began

        for _ in range(WARM):
            without()
            together()
        gradients = [4 * parameter.numel() for parameter in state.module.parameters() if parameter.requires_grad]
        rounds: list[list[float]] = []
        began, is_over = time.perf_counter(), False
        while not is_over:
            group.all_gather_json(None)  # both begin at once
            parts = without()
            group.all_gather_json(None)
            rounds.append([*parts, together()])
            passed = len(rounds) >= LEAST_ROUNDS and time.perf_counter() - began > asked["seconds"]
            is_over = all(group.all_gather_json(passed))
        every = group.all_gather_json(rounds)
        if group.world.is_first:
            answer.write_text(json.dumps({"rounds": every, "gradients": gradients}), encoding="utf-8")


def device_and_step(document: dict[str, Any], batch_size: int) -> tuple[MeasuredDevice, float, int]:
    """Return one device and the seconds of an update by both: the slower rank of each round, medians of rounds."""
    slower = [max(pair, key=lambda each: sum(each[:3])) for pair in zip(*document["rounds"], strict=True)]
    forward, backward, rest = (median(each[place] for each in slower) for place in range(3))
    whole = median(sum(each[:3]) for each in slower)
    times = whole / (forward + backward + rest)
    step = median(max(first[3], other[3]) for first, other in zip(*document["rounds"], strict=True))
    device = MeasuredDevice(
        batch_size=batch_size,
        forward_seconds=forward * times,
        backward_seconds=backward * times,
        update_seconds=rest * times,
        gradients=even_gradients(document["gradients"]),
    )
    return device, step, len(slower)


def row_of(
    net: tuple[str, int, int, int], rate: str, device: MeasuredDevice, link: dict[str, NetworkLink], step_seconds: float
) -> dict[str, Any]:
    """Return the measured rate beside the predicted ones."""
    images = 2 * device.batch_size
    row: dict[str, Any] = {
        "model": net[0],
        "rate": rate or "unshaped",
        "gradient_mb": round(sum(each.bytes for each in device.gradients) / 1e6, 2),
        "step_ms_of_one": round(1000 * device.step_seconds, 1),
        "images_per_second_of_one": round(device.batch_size / device.step_seconds, 2),
        "measured_step_ms": round(1000 * step_seconds, 1),
        "measured_images_per_second": round(images / step_seconds, 2),
        "measured_efficiency": round(device.step_seconds / step_seconds, 3),
    }
    for name, over in link.items():
        predicted = predict(device, 2, MachineCluster(between=over))
        row[f"predicted_by_{name}"] = {
            "images_per_second": round(predicted.images_per_second, 2),
            "step_ms": round(1000 * predicted.step_seconds, 1),
            "error": round(predicted.images_per_second * step_seconds / images - 1, 3),
            "limit": predicted.limit,
        }
    return row


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement")
    parser.add_argument("--beside", default="nothing", help="what else ran on the machine, in words")
    parser.add_argument("--rank", type=Path, nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank(*arguments.rank)
        return
    document: dict[str, Any] = {"beside": arguments.beside, "seconds": arguments.seconds}
    links: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    unshaped = 0.0
    with tempfile.TemporaryDirectory(prefix="steadytrain-shaped-") as temporary, cable() as ends:
        folder = Path(temporary)
        for rate in RATES:
            shape(ends, rate, BURST)
            (backend,) = measured(ends, FITTED_BY, 2.0)["backends"]
            link = {"fit": fit_link(backend, 2)}
            if rate:
                link["tc"] = NetworkLink(
                    name=rate,
                    latency_seconds=unshaped,
                    bytes_per_second=BYTES_PER_SECOND[rate],
                    source="as given to tc",
                )
            else:
                unshaped = link["fit"].latency_seconds
            links.append({"rate": rate or "unshaped", **{name: asdict(value) for name, value in link.items()}})
            machine.say(json.dumps(links[-1]))
            for net in NETS:
                asked, answer = folder / "request.json", folder / "answer.json"
                asked.write_text(json.dumps({"net": net, "seconds": arguments.seconds}), encoding="utf-8")
                in_both(ends, "scale_shaped", "--rank", str(asked), str(answer), cores=CORES)
                device, step, num = device_and_step(json.loads(answer.read_text(encoding="utf-8")), net[2])
                rows.append({**row_of(net, rate, device, link, step), "rounds": num})
                machine.say(json.dumps(rows[-1]))
    for name in ("fit", "tc"):
        errors = [abs(row[f"predicted_by_{name}"]["error"]) for row in rows if f"predicted_by_{name}" in row]
        document[f"median_error_by_{name}"] = round(median(errors), 3)
    document |= {"links": links, "rows": rows}
    machine.record("scale_shaped", document, save=arguments.save)


if __name__ == "__main__":
    main()
