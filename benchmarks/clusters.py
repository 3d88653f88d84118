"""What several ranks on one machine cost and survive: bytes read, memory of a save, a large set, hangs.

Ranks are forked from one process that has imported torch, train on the CPU over gloo with one thread each, and run the
command ``steady train`` as it is; what is measured or goes wrong is put in around it.

- ``read``: bytes read before the first update by 1 and by 8 ranks, at a first start and at the next run's, of records
  without a card of which a tenth is held out. ``counted``: by the files of records; ``system``: all that the processes
  read (modules of Python too).
- ``save``: a state of 2 GB in parts on 8 ranks (``parallel.shard``, AdamW), saved without any training: ``above``: how
  far the memory that each rank has in use, by glibc's own count, rises over what it was, as a share of a rank's part.
- ``large``: 8 ranks train six updates on ``--images`` records, the order of the first epoch included, beside 8 ranks
  that train on 100: CPU seconds until they ended, and the largest sum of their memory (PSS), looked at each second.
- ``lock``: one of 2 ranks keeps the interpreter's lock for 90 s in an update.
- ``hang``: NCCL, pretended, never opens on one of 2 ranks; the time until both have ended, and the message.
- ``abort``: one of 3 ranks fails in an update, and whatever closes the group hangs; the time until each has ended.
- ``close``: no rank fails, and whatever closes the group hangs.

usage: python benchmarks/clusters.py --work FOLDER [--only read save ...] [--images 100000000] [--save]
       ``large`` needs 90 bytes of disk and 12 of memory an image
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
import psutil
import torch
from PIL import Image
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import machine
import steadytrain.training
from steadytrain import cli
from steadytrain.__main__ import run as command
from steadytrain.cli import train as _train
from steadytrain.config import Data, Model, Recipe
from steadytrain.data.storage import local_files
from steadytrain.distributed import engine, sharding
from steadytrain.distributed.process_group import init_group
from steadytrain.distributed.world import world_from_environment
from steadytrain.launch.supervise import free_port, rank_variables
from steadytrain.training.loop import steps as _steps
from steadytrain.training.session import saver
from steadytrain.training.writer import Writer

IMPORTED = (steadytrain.training, cli, _train, _steps, sharding)  # before the ranks are forked
dist: Any = torch.distributed
files: Any = local_files
RANKS = 8
WIDTH, DEPTH = 4096, 10  # 168 million parameters: 2 GB with the two averages of AdamW
HELD_SECONDS = 90.0
COMMON = ("--device", "cpu", "--precision", "fp32", "--set", "data.size=16", "--set", "parallel.compute_threads=1")
Before = Callable[[int], None]


def small(num_classes: int, **options: Any) -> nn.Module:
    """Build a network that computes next to nothing."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, num_classes)
    )


def large(num_classes: int, **options: Any) -> nn.Module:
    """Build one of 168 million parameters."""
    layers: list[nn.Module] = [nn.AdaptiveAvgPool2d(8), nn.Flatten(), nn.Linear(192, WIDTH)]
    for _ in range(DEPTH):
        layers += [nn.ReLU(), nn.Linear(WIDTH, WIDTH)]
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(WIDTH, num_classes))


def write_records(path: Path, images: int, pictures: Sequence[bytes]) -> Path:
    """Write records as im2rec does, without a card: ``pictures`` in turns, labels of 1,000 classes; with an index."""
    if path.exists():
        return path
    payload = max(len(picture) for picture in pictures)
    bodies = np.stack([np.frombuffer(picture.ljust(payload, b"\0"), np.uint8) for picture in pictures])
    names = [("magic", "<u4"), ("length", "<u4"), ("flag", "<u4"), ("label", "<f4"), ("id", "<u8"), ("id2", "<u8")]
    layout = np.dtype([*names, ("body", np.uint8, (payload + -payload % 4,))])
    draw, step, part = np.random.default_rng(0), max(1, 20_000_000 // layout.itemsize), path.with_suffix(".part")
    with part.open("wb") as records, path.with_suffix(".idx").open("w") as listing:
        for first in range(0, images, step):
            ids = np.arange(first, min(first + step, images))
            rows = np.zeros(len(ids), layout)
            rows["magic"], rows["length"], rows["id"] = 0xCED7230A, 24 + payload, ids
            rows["label"] = draw.integers(0, 1000, len(ids))
            rows["body"][:, :payload] = bodies[ids % len(bodies)]
            records.write(rows.tobytes())
            listing.write("".join(f"{i}\t{i * layout.itemsize}\n" for i in ids.tolist()))
    part.rename(path)
    return path


def picture(pixels: np.ndarray[Any, np.dtype[np.uint8]], kind: str, size: int = 0) -> bytes:
    """Encode a picture, padded to so many bytes."""
    file = BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue().ljust(size, b"\0")


def tiny(folder: Path, images: int) -> Path:
    """Write records of pictures of one pixel."""
    return write_records(folder / f"{images}.rec", images, [picture(np.full((1, 1), 9, np.uint8), "GIF")])


def fork(act: Callable[[int], int], ranks: int, out: Path) -> dict[int, int]:
    """Start so many ranks, by their processes: each calls ``act`` with its number, and ends with what that returns."""
    port, children = free_port(), {}
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            os.environ.update(rank_variables(rank, ranks, port) if ranks > 1 else {})
            output = os.open(f"{out}-{rank}.out", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
            torch.set_num_threads(1)
            sys.exit(act(rank))
        children[child] = rank
    return children


def steady(words: Sequence[str], before: Before = lambda rank: None) -> Callable[[int], int]:
    """Return the command ``steady`` as a rank; ``before`` is called first, with the rank's number."""

    def act(rank: int) -> int:
        sys.argv = ["steady", *words]
        before(rank)
        return command()

    return act


def wait(children: Mapping[int, int], limit: float, look: Callable[[], None] = lambda: None) -> list[dict[str, Any]]:
    """Return code, end and processor seconds of each rank; kill those that are there at the limit."""
    began, ended = time.monotonic(), dict[int, dict[str, Any]]()
    looked = began
    while len(ended) < len(children):
        now = time.monotonic()
        if now - looked >= 1:
            looked = now
            look()
        for child, rank in children.items():
            if rank in ended:
                continue
            if now - began > limit:
                os.kill(child, signal.SIGKILL)
            done, status, used = os.wait4(child, 0 if now - began > limit else os.WNOHANG)
            if done:
                code = os.waitstatus_to_exitcode(status)
                ended[rank] = {"code": code, "seconds": now - began, "cpu_seconds": used.ru_utime + used.ru_stime}
        time.sleep(0.02)
    return [ended[rank] for rank in range(len(children))]


def done(act: Callable[[int], int], ranks: int, out: Path, **options: Any) -> Any:
    """Run so many ranks to their end; end this script where one of them fails."""
    ended = wait(fork(act, ranks, out), 1200, **options)
    for rank, each in enumerate(ended):
        if each["code"]:
            raise SystemExit(f"rank {rank} of {out.name} ended with {each['code']}: {said(out, rank)[-2000:]}")
    return ended


def said(out: Path, rank: int) -> str:
    """Return what a rank printed."""
    return Path(f"{out}-{rank}.out").read_text(errors="replace")


def train(data: Path, run: Path, *words: str, model: str = "small", batch: int = 64, updates: int = 6) -> list[str]:
    """Return the words of a training; the run is begun anew."""
    shutil.rmtree(run, ignore_errors=True)
    counts = ["--batch-size", str(batch), "--set", f"budget.steps={updates}"]
    return ["train", str(data), "--run", str(run), "--model", f"clusters:{model}", *counts, *COMMON, *words]


def at_update(number: int, act: Callable[[], None]) -> None:
    """Call ``act`` before the optimizer makes this update, from 1."""
    updates = iter(range(1, 1_000_000))

    def hook(*_: object) -> None:
        if next(updates) == number:
            act()

    register_optimizer_step_pre_hook(hook)


def read(work: Path, images: int) -> dict[str, Any]:
    """Measure what is read before the first update."""
    draw = np.random.default_rng(0)
    pictures = [picture(draw.integers(0, 256, (16, 16, 3), np.uint8), "PNG", 97_500) for _ in range(2000)]
    data = write_records(work / "read.rec", len(pictures), pictures)
    result: dict[str, Any] = {"bytes": data.stat().st_size}
    for ranks in (1, RANKS):
        cache = work / f"read-cache-{ranks}"
        shutil.rmtree(cache, ignore_errors=True)

        def before(rank: int, ranks: int = ranks, cache: Path = cache) -> None:
            os.environ["STEADYTRAIN_CACHE"] = str(cache)
            pread, counted = files.pread, [0]

            def counting(number: int, size: int, offset: int) -> bytes:
                counted[0] += size
                data: bytes = pread(number, size, offset)
                return data

            def tell() -> None:
                time.sleep(5)  # until the loader has read as far ahead as it does, whatever the number of ranks
                figures = {"counted": counted[0], "system": psutil.Process().io_counters().read_chars - chars}
                (work / f"read-{ranks}-{rank}.json").write_text(json.dumps(figures))

            files.pread = counting
            chars = psutil.Process().io_counters().read_chars
            at_update(1, tell)

        for kind in ("first", "next"):
            words = train(data, work / "read-run", "--set", "data.holdout=0.1")
            done(steady(words, before), ranks, work / "read")
            parts = [json.loads((work / f"read-{ranks}-{rank}.json").read_text()) for rank in range(ranks)]
            result[f"{kind}_{ranks}"] = {key: sum(part[key] for part in parts) for key in parts[0]}
    return result


class _Counts(ctypes.Structure):
    """What glibc says of its memory (``mallinfo2``): its fifth number is in use in maps, its eighth in all else."""

    _fields_ = [(f"f{k}", ctypes.c_size_t) for k in range(10)]


def save(work: Path, images: int) -> dict[str, Any]:
    """Measure the memory of a save of a large state in parts."""
    library = ctypes.CDLL(None)
    library.mallinfo2.restype = _Counts

    def in_use() -> int:
        counts = library.mallinfo2()
        return int(counts.f4 + counts.f7)

    def act(rank: int) -> int:
        with init_group(world_from_environment(os.environ)) as group:
            sharded = sharding.ShardedEngine(torch.device("cpu"), group)
            with torch.device("meta" if rank else "cpu"):
                module = large(1000)
            sharded.shard(module)
            optimizer = torch.optim.AdamW(module.parameters())
            for value in module.parameters():
                averages = {name: torch.zeros_like(value) for name in ("exp_avg", "exp_avg_sq")}
                optimizer.state[value] = {"step": torch.tensor(1.0), **averages}
            state = {"model": module.state_dict(), "optimizer": optimizer.state_dict(), "about": {}}
            run = SimpleNamespace(
                checkpoints=work / "save-run",
                directory=work,
                recipe=Recipe(data=Data(train="-"), model=Model("resnet20")),
            )
            kept: Any = saver.Saver(run, Writer(torch.device("cpu")), None, (), 0.0, sharded)  # type: ignore[arg-type]
            kept.spent = list
            group.all_gather_json(None)
            before, most = in_use(), [0]

            def watch() -> None:
                while True:
                    most[0] = max(most[0], in_use())
                    time.sleep(0.002)

            threading.Thread(target=watch, daemon=True).start()
            began = time.perf_counter()
            kept.save(1, state, began)
            kept.wait()
            figures = {"before": before, "most": most[0], "seconds": time.perf_counter() - began}
            figures["bytes"] = sum(event.bytes for event in kept.written())
            (work / f"save-{rank}.json").write_text(json.dumps(figures))
        return 0

    shutil.rmtree(work / "save-run", ignore_errors=True)
    done(act, RANKS, work / "save")
    figures = [json.loads((work / f"save-{rank}.json").read_text()) for rank in range(RANKS)]
    part = figures[0]["bytes"] / RANKS
    shutil.rmtree(work / "save-run")
    return {
        "state_bytes": figures[0]["bytes"],
        "part_bytes": part,
        "above": [(each["most"] - each["before"]) / part for each in figures],
        "seconds": figures[0]["seconds"],
    }


def grown(work: Path, images: int) -> dict[str, Any]:
    """Measure a large set beside a small one."""
    result: dict[str, Any] = {"images": images}
    for name, number in (("none", 100), ("first", images), ("next", images)):
        data, most, cache = tiny(work, number), [0], work / "large-cache"
        if name == "first":
            shutil.rmtree(cache, ignore_errors=True)
        os.environ["STEADYTRAIN_CACHE"] = str(cache)

        def look(most: list[int] = most) -> None:
            total = 0
            for process in psutil.Process().children(recursive=True):
                with suppress(psutil.Error):
                    total += process.memory_full_info().pss
            most[0] = max(most[0], total)

        words = train(data, work / "large-run", "--val", str(tiny(work, 100)))
        began = time.monotonic()
        ended = done(steady(words), RANKS, work / "large", look=look)
        cpu = sum(each["cpu_seconds"] for each in ended)
        result[name] = {"cpu_seconds": cpu, "pss_bytes": most[0], "seconds": time.monotonic() - began}
    return result


def _hang(*_: object, **__: object) -> None:
    time.sleep(1e6)


def _fail() -> None:
    raise ValueError("no such kernel")


def faulty(work: Path, name: str, ranks: int, before: Before) -> dict[str, Any]:
    """Train by ranks of which some go wrong: when each ended, and the messages."""
    words = train(tiny(work, 100), work / f"{name}-run", "--val", str(tiny(work, 100)), batch=24, updates=12)
    ended = wait(fork(steady(words, before), ranks, work / name), 400)
    lines = {
        line for rank in range(ranks) for line in said(work / name, rank).splitlines() if line.startswith("steady:")
    }
    messages = [line.replace(str(work), "FOLDER").replace(platform.node(), "HOST") for line in sorted(lines)]
    return {"ranks": ended, "messages": messages}


def lock(work: Path, images: int) -> dict[str, Any]:
    """Keep the interpreter's lock on one rank."""

    def before(rank: int) -> None:
        if rank == 1:
            at_update(5, lambda: ctypes.PyDLL(None).sleep(int(HELD_SECONDS)))

    return faulty(work, "lock", 2, before)


def hang(work: Path, images: int) -> dict[str, Any]:
    """Let a backend never open on one rank."""

    def before(rank: int) -> None:
        def pretend(self: engine.Engine, device: torch.device, group: Any = None, **options: Any) -> None:
            begin(self, device, group, **options)
            new_group, dist.new_group = dist.new_group, _hang if rank else opened
            asked.append(new_group)
            group.new_group("nccl")

        def opened(**options: Any) -> Any:
            return asked[0](**options | {"backend": "gloo"})

        asked: list[Any] = []
        begin, engine.Engine.__init__ = engine.Engine.__init__, pretend  # type: ignore[method-assign]

    return faulty(work, "hang", 2, before)


def abort(work: Path, images: int) -> dict[str, Any]:
    """Let one rank fail where nothing can be closed."""

    def before(rank: int) -> None:
        dist.destroy_process_group = _hang
        if rank == 1:
            at_update(5, _fail)

    return faulty(work, "abort", 3, before)


def close(work: Path, images: int) -> dict[str, Any]:
    """Let a sound run end where nothing can be closed."""

    def before(rank: int) -> None:
        dist.destroy_process_group = _hang

    return faulty(work, "close", 2, before)


CASES = {"read": read, "save": save, "large": grown, "lock": lock, "hang": hang, "abort": abort, "close": close}


def _with_load(case: Callable[[Path, int], dict[str, Any]], work: Path, images: int) -> dict[str, Any]:
    return {"load": os.getloadavg()[0], **case(work, images)}


def main() -> None:
    options = machine.parser(__doc__, work="records, runs and results", choose=("--only", CASES))
    options.add_argument("--images", type=int, default=100_000_000, help="of the large set (100,000,000)")
    args = machine.parse_kept(options)
    result: dict[str, Any] = {}
    for name in args.only or CASES:
        machine.say(name)
        measure = partial(_with_load, CASES[name], args.work, args.images)
        result[name] = machine.kept(args.work / f"{name}.json", measure)
        machine.say(json.dumps(result[name])[:2000])
    machine.record("clusters", machine.rounded(result, 4), save=args.save)


if __name__ == "__main__":
    main()
