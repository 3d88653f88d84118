"""Images per second of packing a folder into records, beside MXNet's im2rec and what else writes packed sets.

Three works, each contender a process of its own from its start to the finished files, in turns:

- ``photos``: 1,165 photographs of about 400 x 533: shorter side 256, JPEG of quality 95, encoded anew. im2rec scales by
  two taps (OpenCV's bilinear), the others by an antialiased bicubic;
- ``cifar10``: 50,000 PNG of 32 x 32, stored byte for byte. steadytrain also decodes each of them, to leave out what is
  damaged and to know mean and deviation; the others copy bytes and look into none;
- ``cifar10-recoded``: the same images, decoded and encoded as JPEG of quality 95.

Contenders: ``im2rec`` (MXNet 1.9.1, with 1 and with as many processes as there are cores; its list is made before the
clock starts), ``webdataset`` (its ShardWriter, one process, Pillow), ``litdata`` (``optimize`` with as many workers as
there are cores, Pillow), ``streaming`` (MosaicML's MDSWriter, one process, Pillow).

A command's time holds its start; importing MXNet takes a second. So the CPU seconds of each command stand beside
its wall clock, and what the start takes of them (the same command with the first 7 images of each class), and
``images_per_cpu_second`` is of all that comes after. CPU seconds hardly change with what else the machine does.

Who takes more than twice as long as steadytrain in the first round is not measured again.

usage: python benchmarks/pack.py --data FOLDER [--mxnet-python PATH] [--peers-python PATH] [--rounds 2] [--save]
       FOLDER holds clothing-10.tar and cifar10-png.tar.zst; PATHs are Pythons of environments that hold the peers
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import machine
from steadytrain.machine import facts

HERE = Path(__file__).resolve().parent
Command = Callable[[Path, Path], list[str]]
Spent = dict[str, float]
FIRST = 7  # images of each class that a start is measured with


def unpack(data: Path, to: Path) -> dict[str, Path]:
    """Unpack the images as files, one folder for each class."""
    with machine.opened(data / "clothing-10.tar") as archive:
        archive.extractall(to / "clothing", filter="data")
    photos = to / "photos"
    for split in sorted(path for path in (to / "clothing").rglob("train") if path.is_dir())[0].parent.iterdir():
        for folder in split.iterdir() if split.is_dir() else ():
            for file in folder.iterdir():
                place = photos / folder.name / f"{split.name}-{file.name}"
                place.parent.mkdir(parents=True, exist_ok=True)
                file.rename(place)
    with machine.opened(data / "cifar10-png.tar.zst") as archive:
        archive.extractall(to / "cifar", filter="data")
    train = next(path for path in sorted((to / "cifar").rglob("train")) if path.is_dir())
    return {"photos": photos, "cifar10": train, "cifar10-recoded": train}


def ours(work: str) -> Command:
    """Return ``steady pack`` with the settings of a work."""
    options = {
        "photos": ["--shorter-side", "256", "--encoding", "jpg"],
        "cifar10": ["--encoding", "pass"],
        "cifar10-recoded": ["--encoding", "jpg"],
    }[work]
    return lambda source, out: [*(*machine.STEADY, "pack", str(source), str(out / "set"), "--quality", "95", *options)]


def im2rec(python: str, work: str, processes: int) -> Command:
    """Return the command of MXNet's tool; the list must be there."""
    options = {
        "photos": ["--resize", "256", "--quality", "95"],
        "cifar10": ["--pass-through"],
        "cifar10-recoded": ["--quality", "95"],
    }[work]
    return lambda source, out: [
        *(python, "-m", "mxnet.tools.im2rec", str(out / "set"), str(source)),
        *("--num-thread", str(processes), *options),
    ]


def peer(python: str, name: str, work: str) -> Command:
    """Return the command of one of the writers in ``peers/packers.py``."""
    how = {"photos": "256", "cifar10": "bytes", "cifar10-recoded": "whole"}[work]
    return lambda source, out: [python, str(HERE / "peers" / "packers.py"), name, how, str(source), str(out)]


def contenders(args: argparse.Namespace, work: str, cores: int) -> dict[str, Command]:
    """Return the contenders of a work."""
    contenders = {"steadytrain": ours(work)}
    if args.mxnet_python:
        contenders["im2rec, 1 process"] = im2rec(args.mxnet_python, work, 1)
        contenders[f"im2rec, {cores} processes"] = im2rec(args.mxnet_python, work, cores)
    if args.peers_python:
        contenders |= {name: peer(args.peers_python, name, work) for name in ("webdataset", "litdata", "streaming")}
    return contenders


def run(command: Command, source: Path, prepared: Path | None) -> Spent:
    """Run one command; return its wall and CPU seconds (children included), and the bytes that it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        if prepared is not None:
            shutil.copy(prepared, out / "set.lst")
        quiet = {**os.environ, "MXNET_SUBGRAPH_BACKEND": "NONE", "PYTHONWARNINGS": "ignore"}
        before, began = machine.cpu_seconds(), time.perf_counter()
        done = subprocess.run(command(source, out), env=quiet, capture_output=True, text=True)
        seconds, cpu = time.perf_counter() - began, machine.cpu_seconds() - before
        if done.returncode:
            raise SystemExit(f"{' '.join(command(source, out))}\n{done.stderr[-2000:]}")
        return {"seconds": seconds, "cpu_seconds": cpu, "bytes": sum(f.stat().st_size for f in out.rglob("*"))}


def im2rec_list(python: str, source: Path, to: Path) -> Path:
    """Make the list that im2rec packs, by im2rec."""
    command = [python, "-m", "mxnet.tools.im2rec", "--list", "--recursive", "--no-shuffle", str(to), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return to.with_suffix(".lst")


def first_of_each(source: Path, to: Path) -> Path:
    """Link the first images of each class: enough for every contender to start all it has."""
    for folder in sorted(path for path in source.iterdir() if path.is_dir()):
        (to / folder.name).mkdir(parents=True)
        for file in sorted(folder.iterdir())[:FIRST]:
            (to / folder.name / file.name).symlink_to(file)
    return to


def measure(args: argparse.Namespace, work: str, source: Path, scratch: Path) -> dict[str, Any]:
    """Measure all contenders of one work, in turns."""
    field = contenders(args, work, facts.cores())
    few = first_of_each(source, scratch / f"{work}-few")
    lists = {}
    if args.mxnet_python:
        lists = {
            setting: im2rec_list(args.mxnet_python, setting, scratch / f"{work}-{setting.name}")
            for setting in (source, few)
        }
    starts = {
        name: run(command, few, lists.get(few) if name[:6] == "im2rec" else None) for name, command in field.items()
    }
    rounds: dict[str, list[Spent]] = {name: [] for name in field}
    count = num_files(source)
    for _ in range(args.rounds):
        for name, command in field.items():
            if is_far_behind(rounds[name], rounds["steadytrain"]):
                continue
            rounds[name].append(run(command, source, lists.get(source) if name[:6] == "im2rec" else None))
            machine.say(f"{work}: {name}: {count / rounds[name][-1]['seconds']:,.0f} images/s")
    summaries = {name: summary(count, num_files(few), starts[name], results) for name, results in rounds.items()}
    peers = {name: summary for name, summary in summaries.items() if name != "steadytrain"}
    ratios = {
        key: ratio(summaries["steadytrain"], peers, key) for key in ("images_per_second", "images_per_cpu_second")
    }
    return {"images": count, "contenders": summaries, "steadytrain_over_best": ratios}


def is_far_behind(theirs: list[Spent], ours: list[Spent]) -> bool:
    """Return whether one measurement is enough of a contender that takes more than twice as long."""
    return bool(theirs) and theirs[0]["seconds"] > 2 * ours[0]["seconds"]


def num_files(folder: Path) -> int:
    """Count the files in a folder of classes."""
    return sum(1 for path in folder.rglob("*") if path.is_file())


def ratio(ours: dict[str, Any], peers: dict[str, dict[str, Any]], key: str) -> float | None:
    """Return our rate over the best of the others."""
    best = max((peer[key] for peer in peers.values()), default=None)
    return None if best is None else round(ours[key] / best, 2)


def summary(count: int, few: int, start: Spent, rounds: list[Spent]) -> dict[str, Any]:
    """Return medians over the rounds."""
    seconds, cpu_seconds = (median(turn[key] for turn in rounds) for key in ("seconds", "cpu_seconds"))
    return {
        "images_per_second": round(count / seconds, 1),
        "seconds": [round(turn["seconds"], 2) for turn in rounds],
        "cpu_seconds": [round(turn["cpu_seconds"], 2) for turn in rounds],
        "start_cpu_seconds": round(start["cpu_seconds"], 2),
        "images_per_cpu_second": round((count - few) / (cpu_seconds - start["cpu_seconds"]), 1),
        "bytes": rounds[-1]["bytes"],
    }


def main() -> None:
    """Measure, print, and save where the command line asks for it."""
    parser = machine.parser(__doc__, data="clothing-10.tar and cifar10-png.tar.zst", rounds=2, mxnet=True)
    parser.add_argument("--peers-python")
    parser.add_argument("--works", nargs="+", default=["photos", "cifar10", "cifar10-recoded"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sources = unpack(args.data, Path(folder))
        works = {work: measure(args, work, sources[work], Path(folder)) for work in args.works}
    machine.record("pack", {"works": works, "bar": 1.5}, save=args.save)


if __name__ == "__main__":
    main()
