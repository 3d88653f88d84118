"""Predict how fast eight GPUs are fed and trained, from what was measured on one.

Reads the document of ``gpu_session.py``, made on a machine with one GPU. Each figure of the answer stands under what it
is: ``measured``, ``simulated`` or ``predicted``; nothing here runs on a GPU.

``feed``: the loader of one rank, simulated in virtual time. A thread decodes and crops an image for so many
microseconds that any number of threads spend side by side, and works under the interpreter's lock for some more, in its
turn. The thread that launches an update wants the lock as well: 1,000 times, at the beginning of each update. One
thread's rate gives the sum of both, the rate of as many threads as are fastest the part under the lock; the rates of
the other numbers of threads are predicted, and stand beside those that were measured. What is not in it: that too many
threads pass the lock around in vain, that ranks share the memory's bandwidth, and that a disk may be slower.

``eight``: of eight ranks with so many threads each: images a second, beside those that eight GPUs train, and the cores
that decoding needs. ``originals`` are photographs of 110 kB that are not packed smaller: on one core the loader makes
0.36 times as many (``results/feed.json``).

``training``: images a second of 1 to 8 and of 40 GPUs, by ``steady scale`` (a device's batch stays): ResNet-50 at 224,
batch 256, bf16. The time of an update is that of the session, divided as its ledger says; the order in which gradients
are ready is that of a CPU. How much updates vary is not known of more than one GPU: what explains published tables is
taken (``results/scale_published.json``). GPUs of a machine are joined by NVLink 4, machines of eight by NDR.

``pieces``: in how many pieces ResNet-50, its preprocessing and its loss are compiled, counted on a CPU: one in a
process alone, more as one of several ranks, where torch cuts it to exchange gradients early. The rates of ``training``
are those of one piece: what the cuts cost on a GPU is not known.

usage: python benchmarks/eight_gpus.py [--session results/gpu_session.json] [--cores 112] [--save]
"""

from __future__ import annotations

import heapq
import json
import math
import random
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import machine

RESULTS = Path(__file__).resolve().parent / "results"
SECONDS, LAUNCHES, LAUNCH_LOCKED, LAUNCH_FREE = 2.0, 1000, 4e-6, 4e-6
GPUS, MACHINES = 8, 5
FIT_STEPS = 20
AHEAD = 4 * 256
"""Images of the batches that a loader makes ahead."""


def simulate(
    threads: int, free: float, locked: float, update: float | None = None, need: float = math.inf
) -> tuple[float, float]:
    """Run the loader of a rank in virtual time.

    Args:
        threads: of the loader.
        free, locked: mean seconds of an image, without and under the interpreter's lock.
        update: seconds from one update's first launch to the next one's; None: nothing is launched.
        need: images a second that are taken; the threads rest when :data:`AHEAD` are ready.

    Returns:
        Images a second, and the seconds that the launches of an update take.
    """
    draw = random.Random(0)
    # Whoever wants the lock, by when: a thread of the loader, or the launching one (-1).
    wanting = [(draw.random() * free, thread) for thread in range(threads)]
    heapq.heapify(wanting)
    if update is not None:
        heapq.heappush(wanting, (0.0, -1))
    at, images, left, began, spent = 0.0, 0, LAUNCHES, 0.0, list[float]()
    while at < SECONDS:
        since, who = heapq.heappop(wanting)
        at = max(at, since)
        if who >= 0:
            at += locked * draw.uniform(0.5, 1.5)
            images += 1
            begins = max(at, (images - AHEAD) / need)
            heapq.heappush(wanting, (begins + free * draw.uniform(0.5, 1.5), who))
            continue
        assert update is not None
        at += LAUNCH_LOCKED
        left -= 1
        if left:
            heapq.heappush(wanting, (at + LAUNCH_FREE, -1))
            continue
        spent.append(at - began)
        left, began = LAUNCHES, max(at, began + update)
        heapq.heappush(wanting, (began, -1))
    return images / at, sum(spent) / len(spent) if spent else 0.0


def fit(single: float, most: float, threads: int) -> tuple[float, float]:
    """Find the seconds of an image without and under the lock, from the rates of one thread and of so many."""
    low, high = 0.0, 1 / most
    for _ in range(FIT_STEPS):
        locked = (low + high) / 2
        low, high = (locked, high) if simulate(threads, 1 / single - locked, locked)[0] > most else (low, locked)
    return 1 / single - low, low


def feed(session: dict[str, Any], cores: int) -> dict[str, Any]:
    """Simulate the loader of one rank, and of eight."""
    step = session["steps"]["feed"]
    rates = {int(threads): row["images_per_second"] for threads, row in step["threads"].items()}
    fastest = int(step["fastest_threads"])
    free, locked = fit(rates[1], rates[fastest], fastest)
    updates = session["steps"]["updates"]["rows"]
    batch = session["steps"]["updates"]["batch_size"]
    needs = {name: row["images_per_second"] for name, row in updates.items() if "images_per_second" in row}
    threads = min(10, cores // GPUS)
    crops = json.loads((RESULTS / "feed.json").read_text(encoding="utf-8"))
    slower = _rate(crops, "packed") / _rate(crops, "originals")
    eight = {}
    for work, times in (("packed", 1.0), ("originals", slower)):
        for name, need in needs.items():
            per_image = (free + locked) * times - locked
            rate, _ = simulate(threads, per_image, locked, batch / need)
            _, launching = simulate(threads, per_image, locked, batch / need, need)
            _, alone = simulate(0, per_image, locked, batch / need)
            eight[f"{work}, {name}"] = {
                "measured": {"images_per_second_that_one_gpu_trains": need},
                "predicted": {
                    "images_per_second_that_8_gpus_need_at_most": GPUS * need,
                    "cores_that_decode": GPUS * need * (per_image + locked),
                },
                "simulated": {
                    "images_per_second_of_8_loaders": GPUS * rate,
                    "launching_takes_of_an_update": launching * need / batch,
                    "without_a_loader": alone * need / batch,
                },
            }
    return {
        "measured": {"images_per_second_by_threads": rates},
        "fitted": {"microseconds_side_by_side": free * 1e6, "microseconds_under_the_lock": locked * 1e6},
        "simulated": {"images_per_second_by_threads": {n: simulate(n, free, locked)[0] for n in rates}},
        "eight": {"cores": cores, "threads_of_a_rank": threads, **eight},
    }


def _rate(document: dict[str, Any], work: str) -> float:
    """Find the rate of the loader with its own decoder on one core, for training crops, in ``results/feed.json``."""
    contenders = document["works"][work]["train"]["1 cores"]["contenders"]
    rate: float = contenders["steadytrain with steadytrain-jpeg"]["images_per_second"]
    return rate


def training(session: dict[str, Any], loader: float) -> dict[str, Any]:
    """Ask ``steady scale`` for 1 to 8 GPUs of one machine, and for five such machines."""
    steps = session["steps"]
    ledger = steps["ledger"]["rows"]["images wait"]["ledger"]
    busy = sum(ledger[part] for part in ("forward", "backward", "optimizer"))
    published = json.loads((RESULTS / "scale_published.json").read_text(encoding="utf-8"))
    spread = published["spreads"]["practice"]
    base = _scale("--model", "timm/resnet50", "--batch-size", "4", "--seconds", "4", "--devices", "1", "--link", "ndr")
    answer: dict[str, Any] = {"spread": spread}
    batch = steps["updates"]["batch_size"]
    for name, row in steps["updates"]["rows"].items():
        if name == "graph" or "images_per_second" not in row:
            continue  # a graph is of one process
        seconds = batch / row["images_per_second"]
        device = base["one"] | {
            "device": "cuda",
            "batch_size": batch,
            "precision": "bf16",
            **{
                key: seconds * ledger[part] / busy
                for key, part in (
                    ("forward_seconds", "forward"),
                    ("backward_seconds", "backward"),
                    ("update_seconds", "optimizer"),
                )
            },
        }
        document = {"one": device, "fitted": None, "epochs": None}
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "one.json"
            file.write_text(json.dumps(document), encoding="utf-8")
            common = ["--measured", str(file), "--loader-rate", str(loader), "--spread", str(spread)]
            within = _scale(*common, "--devices", str(GPUS), "--link", "nvlink4")
            links = ["--link", "ndr", "--local-link", "nvlink4", "--per-machine", str(GPUS)]
            between = _scale(*common, "--devices", str(GPUS * MACHINES), *links)
        rows = {row["devices"]: row for row in between["weak"]} | {row["devices"]: row for row in within["weak"]}
        answer[name] = {
            "measured": {"1": row["images_per_second"]},
            "predicted": {
                str(devices): {key: rows[devices][key] for key in ("images_per_second", "efficiency", "limit")}
                for devices in sorted(rows)
            },
        }
    return answer


def pieces() -> dict[str, int]:
    """Count what the compiler is given: for a process alone, and for one of several ranks (a group of one does)."""
    import timm
    import torch

    from steadytrain.distributed.engine import Engine
    from steadytrain.distributed.process_group import init_group
    from steadytrain.distributed.world import World
    from steadytrain.launch.supervise import free_port

    def objective(network: Any, images: Any, labels: Any) -> Any:
        return torch.nn.functional.cross_entropy(network((images.float() / 255 - 0.5) / 0.25), labels)

    def count(group: Any) -> int:
        given = list[Any]()

        def keep(code: Any, inputs: Any) -> Any:
            given.append(code)
            return code

        torch.compiler.reset()
        images, labels = torch.zeros(2, 3, 64, 64, dtype=torch.uint8), torch.zeros(2, dtype=torch.long)
        network = Engine(torch.device("cpu"), group).prepare(timm.create_model("resnet50"))
        compiled = torch.compile(objective, backend=keep)
        (compiled(network, images, labels) if group is None else network(images, labels, by=compiled)).backward()
        return len(given)

    with init_group(World(port=free_port())) as group:
        return {"a process alone": count(None), "one of several ranks": count(group)}


def _scale(*words: str) -> dict[str, Any]:
    command = [*machine.STEADY, "scale", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def main() -> None:
    parser = machine.parser(__doc__)
    parser.add_argument("--session", type=Path, default=RESULTS / "gpu_session.json")
    parser.add_argument("--cores", type=int, default=112, help="of the machine with eight GPUs")
    args = parser.parse_args()
    session = json.loads(args.session.read_text(encoding="utf-8"))
    fed = feed(session, args.cores)
    loader = min(row["simulated"]["images_per_second_of_8_loaders"] for row in list(fed["eight"].values())[2:])
    about = {"gpu": session["machine"]["accelerators"], "measured_on": session["machine"]["date"]}
    trained = training(session, loader) | {"pieces": pieces()}
    machine.record("eight_gpus", about | {"feed": fed, "training": trained}, save=args.save)


if __name__ == "__main__":
    main()
