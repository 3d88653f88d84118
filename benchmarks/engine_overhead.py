"""Host time of two ranks beside bare DistributedDataParallel, by processes that take turns.

A model that does nothing, but has as many parameter tensors as ResNet-20 or ResNet-50, is trained on one small resident
batch over gloo, by four programs: the whole loop of steadytrain as two ranks and as one process (events, ledger, watch
and signs of life included; the feed has nothing to do), and a bare loop with DistributedDataParallel, and without. One
thread computes, and all use torch's fused SGD.

- ``loop``: what steadytrain's two ranks take more of the first rank's processors than the bare script's.
- ``alone``: the same of one process each: what the loop costs whether there are other ranks or not.
- ``engine``: their difference: what the ranks are to blame for.

Microseconds of processor time a step, of the thread that trains (``training_thread``) and of the whole process
(``all_threads``, which counts); ``wall`` is recorded, and depends on what else runs. The figures are medians over the
rounds, each of four programs that followed each other. ``share_of_step``: of a real step, that of ResNet-20 at 32
pixels with a batch of 128 by bare DistributedDataParallel with two ranks, whatever the number of tensors; at most 1 %.

usage: python benchmarks/engine_overhead.py [--rounds 7] [--steps 2000] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import machine
import train_step
from peers.scale_contenders import Work, ddp
from steadytrain.launch.supervise import free_port, rank_variables

HERE = Path(__file__).resolve().parent
BAR = 0.01
WARM_STEPS = 200
REAL_STEPS = 12
BATCH = 8  # of each rank; nothing that is compared depends on it
TENSORS = {"resnet20": 59, "resnet50": 161}
SIDES = (("steadytrain", 2), ("ddp", 2), ("steadytrain", 1), ("ddp", 1))
KINDS = ("wall", "training_thread", "all_threads")
MODEL = "engine_overhead:Many"


def many(num_classes: int, tensors: int = 1, **options: Any) -> Any:
    """Build a model that does nothing with so many parameter tensors: logits from them, whatever the images."""
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Parameter(torch.zeros(num_classes))
            self.rest = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(16)) for _ in range(tensors - 1))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return (self.fc + torch.cat(list(self.rest)).sum()).expand(images.shape[0], -1)

    return Module()


def whole_loop(tensors: int, steps: int, records: str, folder: str) -> dict[str, float]:
    """Return seconds a step of a run of steadytrain, as the rank that the environment names."""
    from steadytrain.distributed.process_group import init_group
    from steadytrain.distributed.world import world_from_environment
    from steadytrain.events import Step
    from steadytrain.training import steps as run_steps

    world = world_from_environment(os.environ)
    marks = []
    with ExitStack() as stack:
        group = stack.enter_context(init_group(world)) if world.size > 1 else None
        _rest_the_feed(WARM_STEPS + steps)
        run = _run(tensors, steps, records, folder, world.size, group)
        for event in run_steps(run, allow_import=True, group=group):
            if isinstance(event, Step) and event.step in (WARM_STEPS, WARM_STEPS + steps):
                marks.append(_mark())
    return _between(marks, steps)


def _run(tensors: int, steps: int, records: str, folder: str, ranks: int, group: Any) -> Any:
    from steadytrain import Budget, Data, Every, Model, Optim, Parallel, Recipe, Run

    recipe = Recipe(
        data=Data(train=records, size=32, holdout=0.0),
        model=Model(MODEL, options={"tensors": tensors}),
        optim=Optim("sgd", lr=0.01, nesterov=False),
        budget=Budget(steps=WARM_STEPS + steps),
        every=Every(log_steps=100),
        parallel=Parallel(compute_threads=1),
        batch_size=BATCH * ranks,
    )
    if group is None:
        return Run.create(folder, recipe)
    return group.run_first_then_rest(lambda: Run.create(folder, recipe), is_first=group.world.is_first)


def _rest_the_feed(steps: int) -> None:
    """Let each update have the first batch again, and the run leave its step unmeasured."""
    from steadytrain.training.data import DeviceBatch
    from steadytrain.training.loop import updates as module
    from steadytrain.training.profile.step_cost import StepMeasuring

    loop: Any = module
    load = loop.load

    def resident(feed: Any, device: Any, clock: Any, **options: Any) -> Iterator[DeviceBatch]:
        first = next(load(feed, device, clock, **options))
        for _ in range(steps):
            clock.to("input")
            clock.to("host")
            yield DeviceBatch(first.images, first.labels, 0.0)

    loop.load = resident
    StepMeasuring.is_due = lambda self, seconds: False  # type: ignore[method-assign]


def bare_loop(tensors: int, steps: int) -> dict[str, float]:
    """Return seconds a step of a bare script, as the rank that the environment names."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import cross_entropy
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    net = model = many(10, tensors)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        model = DistributedDataParallel(net, broadcast_buffers=False, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-4, fused=True)
    images, labels = torch.zeros(BATCH, 32, 32, 3, dtype=torch.uint8), torch.arange(BATCH)
    mean, std = (torch.full((1, 3, 1, 1), value) for value in (120.0, 60.0))
    marks = []
    for step in range(1, WARM_STEPS + steps + 1):
        loss = cross_entropy(model((images.permute(0, 3, 1, 2).float() - mean) / std), labels)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            loss.item()
        if step in (WARM_STEPS, WARM_STEPS + steps):
            marks.append(_mark())
    if "RANK" in os.environ:
        dist.destroy_process_group()
    return _between(marks, steps)


def _mark() -> tuple[float, float, float]:
    return time.perf_counter(), time.thread_time(), time.process_time()


def _between(marks: list[tuple[float, float, float]], steps: int) -> dict[str, float]:
    return {kind: (after - before) / steps for kind, before, after in zip(KINDS, *marks, strict=True)}


def child(side: str, ranks: int, tensors: int, steps: int, records: Path) -> dict[str, float]:
    """Run a program of so many ranks; return what the first one prints."""
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    port = free_port()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        command = [sys.executable, str(HERE / "engine_overhead.py"), "--one", side, str(tensors), str(steps)]
        started = []
        for rank in range(ranks):
            variables = rank_variables(rank, ranks, port) if ranks > 1 else {}
            process = subprocess.Popen(
                [*command, str(records), f"{folder}/run"],
                env={**os.environ, "PYTHONPATH": path, **variables},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(process.kill)
            started.append(process)
        answers = [process.communicate(timeout=600) for process in started]
    if not answers[0][0].strip():  # what a rank does when it ends, after that, says nothing of its steps
        raise SystemExit(f"{side}, {ranks} ranks, failed:\n" + "\n".join(errors[-2000:] for _, errors in answers))
    told_back: dict[str, float] = json.loads(answers[0][0].splitlines()[-1])
    return told_back


def compare(tensors: int, rounds: int, steps: int, records: Path) -> dict[str, Any]:
    """Run all four in turns; return microseconds a step."""
    taken: dict[tuple[str, int], list[dict[str, float]]] = {side: [] for side in SIDES}
    for _, side in machine.in_turns(SIDES, rounds):
        taken[side].append(child(*side, tensors, steps, records))
    return {
        kind: _costs({side: [1e6 * turn[kind] for turn in turns] for side, turns in taken.items()}) for kind in KINDS
    }


def _costs(seconds: dict[tuple[str, int], list[float]]) -> dict[str, Any]:
    """Return medians of each program, and of the differences of those that followed each other."""
    ours, ddp_, alone, bare = seconds.values()
    loop = [a - b for a, b in zip(ours, ddp_, strict=True)]
    single = [a - b for a, b in zip(alone, bare, strict=True)]
    engine = [a - b for a, b in zip(loop, single, strict=True)]
    programs = {"_".join(map(str, side)): median(turns) for side, turns in seconds.items()}
    costs = {"loop": loop, "alone": single, "engine": engine}
    return programs | {name: {"median": median(of), "quartiles": machine.quartiles(of)} for name, of in costs.items()}


def real_seconds(folder: Path) -> float:
    """Time a step of ResNet-20 by two ranks of the bare script."""
    draw = np.random.default_rng(0)
    for part in ("train", "val"):
        np.save(folder / f"noise-{part}.npy", draw.integers(0, 256, (256, 32, 32, 3), dtype=np.uint8))
        np.save(folder / f"noise-{part}-labels.npy", np.arange(256) % 10)
    return ddp(Work(images=str(folder / "noise"), batch=128, steps=REAL_STEPS), folder, 2).step_seconds


def measure(rounds: int, steps: int, real: float | None = None) -> dict[str, Any]:
    """Measure everything; ``real``: seconds of a real step, if they are known."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        records = train_step.write_records(folder / "nothing", 32, 3, 256)
        real = real or real_seconds(folder)
        cases = {}
        for case, tensors in TENSORS.items():
            costs = compare(tensors, rounds, steps, records)
            shares = {what: costs["all_threads"][what]["median"] / 1e6 / real for what in ("loop", "alone", "engine")}
            document = {
                "tensors": tensors,
                "microseconds": costs,
                "share_of_step": shares,
                "met": shares["loop"] <= BAR,
            }
            cases[f"tensors of {case}"] = document
    return {"rounds": rounds, "steps": steps, "bar": BAR, "real_step_ms": 1e3 * real, **machine.rounded(cases)}


def main() -> None:
    """Measure, print, and save where the command line asks for it."""
    parser = machine.parser(__doc__, rounds=7)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--one", nargs=5, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        side, tensors, steps, records, folder = args.one
        numbers = int(tensors), int(steps)
        print(json.dumps(bare_loop(*numbers) if side == "ddp" else whole_loop(*numbers, records, folder)))
    else:
        machine.record("engine_overhead", measure(args.rounds, args.steps), save=args.save)


Many = many

if __name__ == "__main__":
    main()
