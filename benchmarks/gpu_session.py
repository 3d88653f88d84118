"""Everything that one GPU can prove of steadytrain in ten minutes, by one command, without a network.

Each step (``gpu_steps.py``) runs in a process of its own under its own time limit, and says whether it is as it should
be: the card itself, the sampler beside nvidia-smi, the tests marked ``gpu``, waits for the device in any part of an
update, updates beside a plain loop of torchvision's network, the ledger beside torch.profiler, the loader with 1 to 16
threads, verdicts of injected faults, a kill and the same bits, memory that runs out, compile modes, NCCL with a world
of one, small networks, inference. ONNX Runtime's TensorRT provider and several GPUs are left out.

``--only accuracy`` takes other steps (``gpu_accuracy.py``), for fifteen minutes: CIFAR-10 beside airbench94, ConvNeXt
and DINOv2 fine-tuned, compiled updates under NCCL, the loader's process beside a launch-bound network, FFCV.

The JSON is written after each step, so that whatever ends the session keeps what was measured; a table comes last.
``--device cpu --quick`` rehearses every step in a few small ones: it proves that the script works, its figures mean
nothing, and it is never saved. ``--device fake`` pretends a GPU (``tests/fake_cuda``), which computes nothing: steps
that need neither values nor times run as they would on one, and the others are left out by name.

usage: python benchmarks/gpu_session.py [--only STEP ...] [--data photos.tar] [--cifar FOLDER] [--weights FOLDER]
                                        [--seconds 570] [--quick] [--device cpu|fake] [-o FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import gpu_accuracy
import gpu_steps
import machine
from gpu_steps import PROJECT, WITHOUT_TIMES, WITHOUT_VALUES, Job

STEPS = {**gpu_steps.STEPS, **gpu_accuracy.STEPS}
INPUTS = ("data", "cifar", "weights")
RECEIPT = machine.RESULTS / "gpu_session.json"


def run_step(name: str, args: argparse.Namespace, folder: Path, seconds: float) -> dict[str, Any]:
    """Run a step in a process of its own; what it has noted counts where it fails or its time ends."""
    place = folder / name
    place.mkdir()
    out, began = place / "figures.json", time.monotonic()
    words = [sys.executable, __file__, "--one", name, "--device", args.device, "--folder", str(place)]
    words += ["--seconds", f"{seconds:.1f}", *(["--quick"] if args.quick else [])]
    for flag in INPUTS:
        words += [f"--{flag}", str(getattr(args, flag))] if getattr(args, flag) else []
    paths = [str(PROJECT / "src"), str(PROJECT / "benchmarks"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(paths),
        "STEADYTRAIN_CACHE": str(folder / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    with (place / "log.txt").open("w") as log:
        process = subprocess.Popen(
            words,
            cwd=PROJECT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(timeout=seconds + 5)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    figures: dict[str, Any] = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    if code != 0:
        said = (place / "log.txt").read_text(encoding="utf-8", errors="replace")[-1500:]
        figures |= {"passes": False, "error": f"not done within {seconds:.0f} s" if code is None else said}
    return figures | {"seconds": round(time.monotonic() - began, 1)}


def one(args: argparse.Namespace) -> None:
    """Measure one step in this process, and write its figures."""
    out = args.folder / "figures.json"
    job = Job(
        args.device, args.quick, args.folder, args.data, args.seconds, out, time.monotonic(), args.cifar, args.weights
    )
    if args.device != "fake":
        job.note(STEPS[args.one][0](job))
        return
    sys.path.insert(0, str(PROJECT))
    from tests.fake_cuda.device import fake_gpu

    with fake_gpu():
        job.note(STEPS[args.one][0](replace(job, device="cuda")))


def table(steps: Mapping[str, Mapping[str, Any]]) -> str:
    """Format the steps as a Markdown table: passed or not, seconds, and the figures that matter most."""
    lines = ["| step | passes | s | figures |", "|---|---|---|---|"]
    for name, figures in steps.items():
        answer = {True: "yes", False: "NO"}.get(figures.get("passes", False), "?")
        lines.append(f"| {name} | {answer} | {figures['seconds']:.0f} | {summary(figures)} |")
    return "\n".join(lines)


def summary(figures: Mapping[str, Any]) -> str:
    """Format the plain numbers of a step, and one of each row, in a few words."""
    shown = [f"{key} {short(value)}" for key, value in figures.items() if isinstance(value, bool | int | float)]
    shown = [text for text in shown if not text.startswith(("passes", "seconds"))]
    for name, row in {**figures.get("rows", {}), **figures.get("training", {}), **figures.get("threads", {})}.items():
        values = row if isinstance(row, Mapping) else {"": row}
        keys = ("over_plain", "off_by", "cause", "equal", "halved", "of_alone", "images_per_second", "top1", "error")
        found = [f"{key} {short(values[key])}" for key in keys if key in values]
        shown.append(f"{name}: {', '.join(found[:2]) or 'left out'}")
    shown += [
        f"{key}: {short(figures[key])}"
        for key in ("failed", "error", "wrong", "refused", "left_out")
        if figures.get(key)
    ]
    return "; ".join(shown).replace("|", "/").replace("\n", " ")


def short(value: Any) -> str:
    """Format a value in at most 160 characters."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= 160 else f"{text[:157]}..."


def main() -> None:
    """Run the steps, write after each, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    choices, usual = [*STEPS, "accuracy"], list(gpu_steps.STEPS)
    parser.add_argument("--only", nargs="+", choices=choices, default=usual, metavar="STEP")
    parser.add_argument("--data", type=Path, help="a .tar of photographs; else pictures are drawn")
    parser.add_argument("--cifar", type=Path, help="a folder with cifar10-train.rec and cifar10-test.rec")
    parser.add_argument("--weights", type=Path, help="a folder of NETWORK*.safetensors to fine-tune; else random ones")
    parser.add_argument("--seconds", type=float, default=570.0, help="that all steps have together")
    parser.add_argument("--quick", action="store_true", help="a rehearsal: a few small steps")
    parser.add_argument("--device", choices=["cuda", "cpu", "fake"], default="cuda")
    parser.add_argument("-o", "--output", type=Path, help=f"the JSON (default: {RECEIPT.relative_to(PROJECT)})")
    parser.add_argument("--one", choices=list(STEPS), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name in INPUTS:
        setattr(args, name, getattr(args, name) and getattr(args, name).resolve())
    args.only = [step for name in args.only for step in (gpu_accuracy.STEPS if name == "accuracy" else [name])]
    if args.one:
        one(args)
        return
    if args.device == "cpu" and not args.quick:
        parser.error("--device cpu is for a rehearsal: add --quick")
    is_rehearsal = args.quick or args.device != "cuda"
    output = args.output or (None if is_rehearsal else RECEIPT)
    steps: dict[str, dict[str, Any]] = {}
    end, writing = time.monotonic() + args.seconds, threading.Lock()
    with tempfile.TemporaryDirectory() as folder:

        def taken(name: str) -> None:
            left = end - time.monotonic()
            if args.device == "fake" and name not in WITHOUT_VALUES:
                steps[name] = {"passes": True, "left_out": "a pretended GPU computes nothing", "seconds": 0.0}
                return
            if left < 10:
                steps[name] = {"passes": False, "error": "left out: no time", "seconds": 0.0}
                return
            print(f"{name} ...", file=sys.stderr, flush=True)
            limit = left - 5 if args.device == "fake" else min(STEPS[name][1], left - 5)
            figures = run_step(name, args, Path(folder), limit)
            with writing:
                steps[name] = figures
                print(table({name: figures}).splitlines()[-1], file=sys.stderr, flush=True)
                if output is not None:
                    rehearsal = {"rehearsal": True} if is_rehearsal else {}
                    document = {"benchmark": "gpu_session", **rehearsal, "steps": steps, "machine": machine.facts()}
                    output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

        together = [name for name in args.only if name in WITHOUT_TIMES] if args.device == "cuda" else []
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(taken, together))
        for name in args.only:
            if name not in together:
                taken(name)
    print(table(steps))
    raise SystemExit(0 if all(step.get("passes") for step in steps.values()) else 1)


if __name__ == "__main__":
    main()
