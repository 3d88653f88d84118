"""Training steps of steadytrain against a bare PyTorch loop and, if its Python is given, Apache MXNet 1.9.1.

Two questions, answered from interleaved rounds of one run, of which the median counts:

- How much faster or slower is a step? ResNet-20 and Inception-BN-28-small at 32 pixels, batch 128; ResNet-50 at 224,
  batch 16; and, where calling the operations takes longer than what they compute, a perceptron and LeNet at 28, batch
  64. steadytrain runs its whole loop (feed from JPEG or PNG records, events, logging), by torch's kernels and by
  compiled code (``--compile``, without the time that compiling takes); the others step on one resident batch: a bare
  loop in PyTorch, and Gluon's, hybridized. Of two processors MXNet left to itself computes on one, as if two were the
  threads of a core: that is ``mxnet_default``; ``mxnet`` is told to use all (``OMP_NUM_THREADS``). Two plain scripts,
  with a DataLoader and the loss asked for at each step: ``script`` has float tensors in memory, shuffled; ``tutorial``,
  where images are small, has pictures in memory, as torchvision's FashionMNIST and CIFAR10 have, and makes a tensor of
  each when it is its turn (``ToTensor``), as PyTorch's first tutorial does.
- What does the loop itself cost? Its host time per step with a model that does nothing, less that of a bare
  loop on the same model, over the time of a real step. A part of it, which stands apart, is for the next batch: to wait
  for the loader, which has nothing else to run beside here, or to make it, where the loop does so itself.

``times_at_best`` is of each one's fastest round: what a disturbed machine does only adds.

``paired``, for the small cases: the same loop and the same bare loop (and ``script``) take turns of twenty steps in one
process, so that whatever disturbs the machine disturbs both. Microseconds of a step, with the network and with the
model that does nothing; ``over_bare`` is the median over the turns of ours over bare, and ``at_best`` that of the two
fastest turns. ``--paired`` measures nothing else. ``cpu`` is the same by CPU time of the loop, which is what counts
where other programs use the machine. With ``--before TREE``, another checkout takes turns with this one, a process
each, ``--rounds`` times: ``after_over_before`` is the ratio of their ``over_bare``.

usage: python benchmarks/train_step.py [--rounds 5] [--cases resnet20 ...] [--mxnet-python PATH] [--paired]
       [--before TREE] [--save]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

import machine
from steadytrain.machine import facts

HERE = Path(__file__).resolve().parent


class Case(NamedTuple):
    """A network, its batches and images, and as many steps as are worth a look."""

    model: str
    batch: int
    side: int
    channels: int
    steps: int


CASES = {
    "resnet20": Case("resnet20", 128, 32, 3, 12),
    "inception": Case("inception-bn-28-small", 128, 32, 3, 8),
    "resnet50": Case("timm/resnet50", 16, 224, 3, 8),
    "lenet": Case("lenet", 64, 28, 1, 200),
    "mlp": Case("mlp", 64, 28, 1, 2_000),
}
NOTHING = "train_step:Nothing"
WAYS: dict[str, dict[str, Any]] = {"ours": {}, "compiled": {"compile": "default"}}
PEERS = ("bare", "script", "tutorial", "mxnet", "mxnet_default")
OURS = ("steadytrain", "compiled")
QUIET = ("nothing_steadytrain", "nothing_bare")
PAIRED = ("lenet", "mlp")
TURN, TURNS, WARM_TURNS = 20, 150, 10


def nothing(num_classes: int, **options: Any) -> Any:
    """Build a model that does nothing: logits from one parameter, whatever the images."""
    import torch

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Parameter(torch.zeros(num_classes))

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return self.fc.expand(images.shape[0], -1)

    return Module()


def write_records(folder: Path, side: int, channels: int, count: int) -> Path:
    """Draw smooth random pictures in ten classes, and pack them: PNG up to 64 pixels, JPEG above."""
    from steadytrain.data.packing.pack import pack

    draw = np.random.default_rng(0)
    for i in range(count):
        place = folder / "images" / f"class{i % 10}"
        place.mkdir(parents=True, exist_ok=True)
        small = Image.fromarray(draw.integers(0, 256, (8, 8, 3), dtype=np.uint8)).convert(
            "L" if channels == 1 else "RGB"
        )
        full = side if side <= 64 else side * 8 // 7
        small.resize((full, full), Image.Resampling.BICUBIC).save(place / f"{i}.{'png' if side <= 64 else 'jpg'}")
    pack(folder / "images", folder / "records")
    return folder / "records.rec"


def ours(case: Case, records: str, way: str) -> Iterator[tuple[float, float]]:
    """Yield seconds and wait of each step of a real run, in a process that is set up as the command sets up its own."""
    from steadytrain.machine.process import share_cores, spin_where_alone

    share_cores()
    spin_where_alone()
    from steadytrain import Budget, Data, Every, Model, Optim, Precision, Recipe, Run
    from steadytrain.events import Step
    from steadytrain.training import steps as run_steps

    recipe = Recipe(
        data=Data(train=records, size=case.side, holdout=0.0),
        model=Model(case.model),
        optim=Optim("sgd", lr=0.01, nesterov=False, weight_decay=1e-4),
        precision=Precision(**WAYS[way]),
        budget=Budget(steps=case.steps),
        every=Every(log_steps=max(1, case.steps)),
        batch_size=case.batch,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = Run.create(Path(folder) / "run", recipe)
        for event in run_steps(run, allow_import=True):
            if isinstance(event, Step):
                yield event.seconds, event.wait_seconds


def paired(case: Case, records: str) -> dict[str, Any]:
    """Time a step of ours, bare and script in microseconds, by turns of some steps in one process."""
    steps = TURN * (TURNS + WARM_TURNS)
    contenders: dict[str, Iterator[Any]] = {
        "ours": ours(case._replace(steps=steps), records, "ours"),
        "bare": bare(case._replace(steps=steps)),
        "script": bare(case._replace(steps=steps), "tensors"),
    }
    turns: dict[str, list[float]] = {name: [] for name in contenders}
    cpu: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(TURNS + WARM_TURNS):
        for name, each in contenders.items():
            next(each)  # what the one before has left in the caches is not measured
            began, cpu_began = time.perf_counter(), time.thread_time()
            for _ in range(TURN - 1):
                next(each)
            cpu[name].append((time.thread_time() - cpu_began) / (TURN - 1) * 1e6)
            turns[name].append((time.perf_counter() - began) / (TURN - 1) * 1e6)
    contenders["ours"].close()  # type: ignore[attr-defined]
    return {**_of_turns(turns), "cpu": _of_turns(cpu)}


def _of_turns(turns: Mapping[str, list[float]]) -> dict[str, Any]:
    kept = {name: values[WARM_TURNS:] for name, values in turns.items()}
    figures: dict[str, Any] = {name: {"median": median(some), "best": min(some)} for name, some in kept.items()}
    for peer in ("bare", "script"):
        ratios = [a / b for a, b in zip(kept["ours"], kept[peer], strict=True)]
        figures[f"over_{peer}"] = {"median": median(ratios), "at_best": min(kept["ours"]) / min(kept[peer])}
    return figures


def bare(case: Case, loads: str = "") -> Iterator[float]:
    """Yield seconds of each step of the loop that everyone writes first: eager, NCHW, one resident batch.

    ``loads``: with a DataLoader over 100 batches of ``tensors`` or ``pictures`` in memory, and the loss asked for at
    each step.
    """
    import timm
    import torch

    from steadytrain import models
    from steadytrain.config import Model

    classes = 10
    if case.model == NOTHING:
        net = nothing(classes)
    elif case.model.startswith("timm/"):
        net = timm.create_model(case.model.removeprefix("timm/"), num_classes=classes)
    else:
        net = models.build(Model(case.model), num_classes=classes, channels=case.channels, size=case.side).module
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    images = torch.randint(0, 256, (case.batch, case.channels, case.side, case.side)).float().div(255)
    labels = torch.arange(case.batch) % classes
    batches = iter(lambda: (images, labels), None)
    if loads:
        many = images.repeat(100, 1, 1, 1), labels.repeat(100)
        data = torch.utils.data.TensorDataset(*many) if loads == "tensors" else pictures(*many)
        loader = torch.utils.data.DataLoader(data, batch_size=case.batch, shuffle=True)
        batches = (batch for _ in iter(int, 1) for batch in loader)
    for _ in range(case.steps):
        began = time.perf_counter()
        x, y = next(batches)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        if loads:
            loss.item()
        yield time.perf_counter() - began


def pictures(images: Any, labels: Any) -> Any:
    """Return a data set of float images [N, C, H, W] and labels as torchvision's small ones are.

    Its bytes are in memory; a sample is made a picture, and that a tensor, when it is asked for.
    """
    from torch.utils.data import Dataset
    from torchvision.transforms import ToTensor

    data = images.mul(255).byte().permute(0, 2, 3, 1).squeeze(3).numpy()
    targets, transform = labels.tolist(), ToTensor()

    class Pictures(Dataset[tuple[Any, int]]):
        def __len__(self) -> int:
            return len(targets)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return transform(Image.fromarray(data[index])), targets[index]

    return Pictures()


def before_and_after(words: list[str], tree: Path, rounds: int) -> dict[str, Any]:
    """Run this tree and another one in turns, some rounds each."""
    trees = {"before": tree, "after": HERE.parent}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    for _, name in machine.in_turns(trees, rounds):
        answers[name].append(say(words, trees[name]))
    ratios = {
        clock: median(
            _over_bare(after, clock) / _over_bare(before, clock)
            for before, after in zip(answers["before"], answers["after"], strict=True)
        )
        for clock in ("wall", "cpu")
    }
    return {"after_over_before": ratios, **answers}


def _over_bare(figures: dict[str, Any], clock: str) -> float:
    ratio: float = (figures if clock == "wall" else figures["cpu"])["over_bare"]["median"]
    return ratio


def say(words: list[str], tree: Path = HERE.parent) -> dict[str, Any]:
    """Run one contender in a process of its own, with the code of a tree; what it says."""
    path = os.pathsep.join((str(HERE), str(tree / "src")))
    environment = {**os.environ, "PYTHONPATH": path, "MXNET_SUBGRAPH_BACKEND": "NONE"}
    answer: dict[str, Any] = machine.ask(words, environment)
    return answer


def child(words: list[str]) -> tuple[float, float]:
    """Run one contender; means of the second half: seconds of a step, and for its batch."""
    answer = say(words)
    seconds, waits = answer["seconds"], answer.get("waits") or [0.0]
    return fmean(seconds[len(seconds) // 2 :]), fmean(waits[len(waits) // 2 :])


def mxnet_version(python: str | None) -> str | None:
    """Return the version of MXNet; None where there is none."""
    if python is None:
        return None
    asked = [python, "-c", "import mxnet; print(mxnet.__version__)"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()


def times(seconds: Mapping[str, float]) -> dict[str, dict[str, float]]:
    """Return how many times as fast as each peer ours is, in each way."""
    peers, owns = ([who for who in names if who in seconds] for names in (PEERS, OURS))
    return {ours: {peer: seconds[peer] / seconds[ours] for peer in peers} for ours in owns}


def compare(
    name: str, rounds: int, mxnet: str | None, folder: Path, *, is_paired: bool, before: Path | None = None
) -> dict[str, Any]:
    """Run every contender on one case, in turns."""
    case = CASES[name]
    is_small = case.side <= 64
    count = min(6400, case.batch * case.steps // 2) if is_small else 64  # what counts is after the first epoch
    records = str(write_records(folder / name, case.side, case.channels, count))
    mine, quiet = [sys.executable, str(HERE / "train_step.py"), "--one"], f"{name}-nothing"
    pairs: dict[str, Any] = {}
    if name in PAIRED:
        for kind, which in (("network", name), ("nothing", quiet)):
            words = [*mine, "paired", which, records]
            pairs[kind] = say(words) if before is None else before_and_after(words, before, rounds)
    if is_paired:
        return {**case._asdict(), "paired": pairs}
    commands = {
        "steadytrain": [*mine, "ours", name, records],
        "compiled": [*mine, "compiled", name, records],
        "bare": [*mine, "bare", name],
        "script": [*mine, "script", name],
        "nothing_steadytrain": [*mine, "ours", quiet, records],
        "nothing_bare": [*mine, "bare", quiet],
    }
    if is_small:
        commands["tutorial"] = [*mine, "tutorial", name]
    if mxnet:
        shape = [str(number) for number in (case.batch, case.side, case.channels, case.steps)]
        theirs = [mxnet, str(HERE / "peers/mxnet_step.py"), name, *shape]
        commands["mxnet"] = ["env", f"OMP_NUM_THREADS={facts.cores()}", *theirs]
        commands["mxnet_default"] = ["env", "-u", "OMP_NUM_THREADS", *theirs]
    taken: dict[str, list[float]] = {name: [] for name in commands}
    waited: list[float] = []
    for _, who in machine.in_turns(commands, rounds):
        seconds, waits = child(commands[who])
        taken[who].append(seconds)
        if who == "nothing_steadytrain":
            waited.append(waits)
    medians = {who: median(values) for who, values in taken.items()}
    overhead = medians["nothing_steadytrain"] - medians["nothing_bare"]
    return {
        **case._asdict(),
        "rounds": rounds,
        "seconds_per_step": medians,
        "images_per_second": {who: case.batch / seconds for who, seconds in medians.items() if who not in QUIET},
        "times": times(medians),
        "times_at_best": times({who: min(values) for who, values in taken.items()}),
        "loop_microseconds": overhead * 1e6,
        "of_them_for_the_next_batch": median(waited) * 1e6,
        "loop_share_of_step": overhead / medians["steadytrain"],
        "paired": pairs,
        "all_rounds": taken,
    }


def _one(kind: str, name: str, records: str = "") -> dict[str, Any]:
    name, _, quiet = name.partition("-")
    case = CASES[name]._replace(model=NOTHING, steps=200) if quiet else CASES[name]
    if kind == "paired":
        return paired(case, records)
    if kind in WAYS:
        seconds, waits = zip(*ours(case, records, kind), strict=True)
        return {"seconds": seconds, "waits": waits}
    return {"seconds": list(bare(case, {"script": "tensors", "tutorial": "pictures"}.get(kind, "")))}


def main() -> None:
    parser = machine.parser(__doc__, choose=("--cases", CASES), rounds=5, mxnet=True)
    parser.add_argument("--paired", action="store_true", help="only lenet and mlp, by turns in one process")
    parser.add_argument("--before", type=Path, help="another checkout, beside which --paired measures this one")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(_one(*arguments.one)))
        return
    with tempfile.TemporaryDirectory() as folder:
        cases = {
            name: compare(
                name,
                arguments.rounds,
                arguments.mxnet_python,
                Path(folder),
                is_paired=arguments.paired,
                before=arguments.before and arguments.before.resolve(),
            )
            for name in arguments.cases
            if name in PAIRED or not arguments.paired
        }
    if arguments.paired:
        name = "train_step_paired" if arguments.before is None else "train_step_before"
        machine.record(name, cases, save=arguments.save)
        return
    name = machine.of_cases("train_step", arguments.cases, CASES)
    machine.record(name, {"mxnet": mxnet_version(arguments.mxnet_python), **cases}, save=arguments.save)


Nothing = nothing

if __name__ == "__main__":
    main()
