"""ResNet-50 inference: steadytrain's engines, MXNet 1.9.1, timm's and torchvision's defaults, in turns of one run.

Every contender is a process that stays: in each round all of them infer for some seconds, one after another, in an
order that rotates. Ratios are medians over rounds of ratios within a round. MXNet uses all cores
(``OMP_NUM_THREADS``), by a bound symbol with oneDNN's fused subgraphs (``mxnet_module``, as its benchmark_score.py has
it) and hybridized (``mxnet_gluon``); it is also there with its own choice of threads (``mxnet_default``) and without
oneDNN (``mxnet_plain``). Its ResNet-50 v1 halves images in 1x1 convolutions: 7 % less to compute than ours.

The machine may be busy: ``cpu_seconds`` of a pass, of all threads, and ratios of their medians stand beside those of
the clock. Threads of the peers that wait spin only briefly (``GOMP_SPINCOUNT``), as ours do, so that waiting counts
little.

Parity: with ``--data`` images and ``--weights`` (a folder with SqueezeNet 1.1 in MXNet's and in torch's form), outputs
of each engine of ours are compared with MXNet's for the same weights and images, and those of ResNet-50 with drawn
weights with torch's in fp32.

The bar: at batch 32 the best engine makes at least 2 times MXNet's images per second, at batch 1 MXNet's latency is at
least 1.5 times the best engine's; MXNet is the faster of ``mxnet_module`` and ``mxnet_gluon``.

usage: python benchmarks/infer_peers.py --mxnet-python PATH [--data IMAGES --weights FOLDER] [--rounds 5] [--save]
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import machine
from steadytrain.config.plain import plain
from steadytrain.data.packing.prepare import prepare
from steadytrain.export.engines import BenchTask, Worker
from steadytrain.export.formats import installed_versions
from steadytrain.export.speed import make_plan
from steadytrain.machine import facts
from steadytrain.machine.process import share_cores

HERE = Path(__file__).resolve().parent
BATCHES = (1, 32)
OURS = (
    *("eager fp32", "channels-last bf16", "compile fp32", "compile bf16"),
    *("onnxruntime fp32", "onnxruntime int8", "openvino fp32", "openvino bf16", "openvino int8"),
)
MXNET = ("mxnet_module", "mxnet_gluon")
SLOW = ("mxnet_plain",)
"""Who takes part in the first round only."""

IMAGES = 200

Turn = Callable[[int, float], dict[str, list[float]]]


def peer(command: list[str], stack: ExitStack, **variables: str | None) -> Turn:
    """Start a peer's program; what makes it take a turn. Raises SystemExit where it does not start."""
    environment = {
        name: value
        for name, value in (os.environ | {"GOMP_SPINCOUNT": "1000"} | variables).items()
        if value is not None
    }
    words = [*command, *map(str, BATCHES)]
    process = stack.enter_context(
        subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
    )
    stack.callback(process.kill)
    source, sink = process.stdout, process.stdin
    assert source is not None and sink is not None
    for line in source:
        if line == "ready\n":
            break
    else:
        raise SystemExit(f"{' '.join(words)} does not start")

    def turn(batch: int, seconds: float) -> dict[str, list[float]]:
        sink.write(f"{batch} {seconds}\n")
        sink.flush()
        times: dict[str, list[float]] = json.loads(source.readline())
        return times

    return turn


def ours(pairs: list[str], folder: str, stack: ExitStack) -> tuple[dict[str, Turn], dict[str, Any]]:
    """Open our engines on ResNet-50; what makes each take a turn, and what kept others out."""
    turns: dict[str, Turn] = {}
    errors: dict[str, Any] = {}
    prepare_network("resnet50", folder)
    for pair in pairs:
        worker = stack.enter_context(open_engine("resnet50", folder, pair))
        if worker.error:
            errors[pair] = worker.error
            continue

        def turn(batch: int, seconds: float, worker: Worker = worker) -> dict[str, list[float]]:
            worker.ask("begin", batch_size=batch)
            walls, processors = zip(*worker.ask("measure", seconds=seconds), strict=True)
            return {"seconds": list(walls), "cpu_seconds": list(processors)}

        turns[pair] = turn
    return turns, errors


def task_of(name: str, folder: str, records: str | None = None) -> BenchTask:
    return BenchTask(name, folder, make_plan(device="cpu", records=records, images=IMAGES))


def prepare_network(name: str, folder: str, records: str | None = None) -> None:
    """Write a network's weights, its samples and their outputs."""
    with Worker(task_of(name, folder, records)) as worker:
        worker.ask("prepare")
    if worker.error:
        raise SystemExit(worker.error)


def open_engine(name: str, folder: str, pair: str) -> Worker:
    """Open an engine with a network, its file written first; its ``error`` where that fails."""
    engine, numbers = pair.split()
    worker = Worker(task_of(name, folder)._replace(engine=engine, numbers=numbers))
    worker.ask("open")
    return worker


def parity_of(worker: Worker) -> Any:
    """Compare an engine's outputs with those that were prepared; an error where that fails."""
    parity = worker.ask("parity")
    return {"error": worker.error} if worker.error else plain(parity)


def compare_outputs(pairs: list[str], data: str, weights: Path, mxnet: str) -> dict[str, Any]:
    """Compare our engines with MXNet on SqueezeNet 1.1: the same weights, the same images."""
    records = str(prepare(data, only="val").only("val"))
    name = f"squeezenet={next(weights.glob('*.pth'))}"
    symbol, params = next(weights.glob("*-symbol.json")), next(weights.glob("*.params"))
    document: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        prepare_network(name, folder, records)
        path = Path(folder)
        stored = torch.load(path / "reference.pt", weights_only=True)
        np.save(path / "images.npy", stored["samples"].numpy())
        words = [mxnet, str(HERE / "peers/infer_mxnet.py"), "outputs", str(symbol), str(params)]
        words += [str(path / "images.npy"), str(path / "outputs.npy")]
        subprocess.run(words, check=True, env={**os.environ, "OMP_NUM_THREADS": str(facts.cores())})
        stored["outputs"] = torch.from_numpy(np.load(path / "outputs.npy"))
        torch.save(stored, path / "reference.pt")
        for pair in pairs:
            with open_engine(name, folder, pair) as worker:
                document[pair] = parity_of(worker)
    return document


def summarise(rounds: dict[int, dict[str, list[dict[str, float]]]]) -> dict[str, Any]:
    """Return figures of each contender, and the ratios of MXNet's faster way to each: of medians within a round.

    ``times_mxnet_at_best`` is of each one's fastest pass of all rounds: what a disturbed machine does only adds.
    """
    document: dict[str, Any] = {}
    for batch, of_all in rounds.items():
        medians = {name: median(turn["seconds"] for turn in turns) for name, turns in of_all.items()}
        best = {name: min(turn["best"] for turn in turns) for name, turns in of_all.items()}
        cpu = {name: median(turn["cpu_seconds"] for turn in turns) for name, turns in of_all.items()}
        document[f"batch {batch}"] = row = {
            "images_per_second": {name: batch / seconds for name, seconds in medians.items()},
            "milliseconds": {name: 1000 * seconds for name, seconds in medians.items()},
            "milliseconds_at_best": {name: 1000 * seconds for name, seconds in best.items()},
            "cpu_milliseconds": {name: 1000 * seconds for name, seconds in cpu.items()},
            "rounds": of_all,
        }
        if peers := [name for name in MXNET if name in medians]:
            mxnet = min(peers, key=lambda name: medians[name])
            row["mxnet"] = mxnet
            peer_seconds = [turn["seconds"] for turn in of_all[mxnet]]
            row["times_mxnet"] = {
                name: median(theirs / turn["seconds"] for turn, theirs in zip(turns, peer_seconds, strict=False))
                for name, turns in of_all.items()
            }
            row["times_mxnet_at_best"] = {name: min(best[peer] for peer in peers) / best[name] for name in best}
            row["times_mxnet_in_cpu_time"] = {name: min(cpu[peer] for peer in peers) / cpu[name] for name in cpu}
    return document


def main() -> None:
    parser = machine.parser(__doc__, rounds=5, mxnet=True)
    parser.add_argument("--data", help="images on which outputs are compared: a folder, an archive, a .rec file")
    parser.add_argument("--weights", type=Path, help="SqueezeNet 1.1: *.pth, *-symbol.json and *.params")
    parser.add_argument("--engines", nargs="+", default=list(OURS), help="such as 'openvino bf16'")
    parser.add_argument("--seconds", type=float, default=4.0, help="of a contender in a round")
    asked = parser.parse_args()
    share_cores()
    cores, script = str(facts.cores()), str(HERE / "peers/infer_mxnet.py")
    with_mxnet: dict[str, Any] = {}
    if asked.mxnet_python and asked.data and asked.weights:
        with_mxnet = compare_outputs(asked.engines, asked.data, asked.weights, asked.mxnet_python)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        turns, errors = ours(asked.engines, folder, stack)
        for kind in ("timm", "torchvision"):
            turns[kind] = peer([sys.executable, str(HERE / "peers/infer_torch.py"), kind], stack)
        if asked.mxnet_python:
            mxnet = [asked.mxnet_python, script]
            turns["mxnet_module"] = peer([*mxnet, "module"], stack, OMP_NUM_THREADS=cores)
            turns["mxnet_gluon"] = peer([*mxnet, "gluon"], stack, OMP_NUM_THREADS=cores)
            turns["mxnet_default"] = peer([*mxnet, "module"], stack, OMP_NUM_THREADS=None)
            plain = {"OMP_NUM_THREADS": cores, "MXNET_MKLDNN_ENABLED": "0", "MXNET_SUBGRAPH_BACKEND": "NONE"}
            turns["mxnet_plain"] = peer([*mxnet, "module"], stack, **plain)
        rounds: dict[int, dict[str, list[dict[str, float]]]] = {
            batch: {name: [] for name in turns} for batch in BATCHES
        }
        for number, name in machine.in_turns(turns, asked.rounds):
            for batch in BATCHES if not number or name not in SLOW else ():
                times = turns[name](batch, asked.seconds)
                figures = {kind: median(values) for kind, values in times.items()}
                rounds[batch][name].append({**figures, "best": min(times["seconds"])})
            machine.say(f"round {number + 1} of {asked.rounds}: {name}")
        parity: dict[str, Any] = {}
        for pair in asked.engines:
            if pair in turns:
                with open_engine("resnet50", folder, pair) as worker:
                    parity[pair] = parity_of(worker)
    document = {
        "rounds": asked.rounds,
        "seconds": asked.seconds,
        **summarise(rounds),
        "not_measured": errors,
        "parity_with_torch_fp32": parity,
        "parity_with_mxnet": with_mxnet,
        "engine_packages": installed_versions(("torch", "torchvision", "timm", "onnxruntime", "openvino")),
    }
    machine.record("infer", document, save=asked.save)


if __name__ == "__main__":
    main()
