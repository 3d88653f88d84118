"""Fine-tuning within so many minutes of processor time: is it ever below the probe or the default at any size?

Each contender trains MobileNetV2 from Google's ImageNet weights on ``train/`` of a set, chooses by ``validation/``, and
is asked for top-1 and loss on ``test/``, of which it knows nothing else:

- ``minutes-N``: ``steady finetune --budget-minutes N``. ``autogluon-N``: MultiModalPredictor with a time limit of as
  many minutes, the same weights, its own epochs (20) and the size of the weights.
- ``probe-S``, ``default-S``: ``--train probe``, and nothing said, on images of S pixels, for as long as they take.

Minutes are those of processor time (``peers/cpu_clock.py``) with one thread that computes, so that a busy machine
changes nothing; every contender has a cache of its own, and so computes features itself. ``below``: of each size, how
far minutes are below the better of probe and default, seed by seed, in points, and in standard errors of the test.

Sets: as of ``finetune_probe.py``, and folders of classes as ``NAME=FOLDER``. Each result is kept in ``--work`` and not
made again: the same command goes on where it was stopped.

usage: python benchmarks/finetune_minutes.py --work FOLDER [--data FOLDER] [--sets NAME[=FOLDER] ...] [--only NAME ...]
           [--seeds 3] [--envs FOLDER] [--save]
       FOLDER of the data holds clothing-10.tar, cifar10-png.tar.zst and weights/mobilenetv2_100/
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import machine
from accuracy import GOOGLES
from finetune_peers import PEERS
from finetune_probe import images_of
from machine import cpu_seconds
from peers import environments
from peers.commands import asked
from steadytrain.config.plain import plain
from steadytrain.reports import spread

MINUTES, SIZES = (3, 10), (96, 160, 224)
OURS = tuple(f"minutes-{n}" for n in MINUTES)
PLAIN = tuple(f"{how}-{size}" for how in ("probe", "default") for size in SIZES)
CONTENDERS = (*OURS, *PLAIN, *(f"autogluon-{n}" for n in MINUTES))
LIMIT = 8 * 3600.0
"""Seconds, by the wall clock, after which a contender is given up."""


def contend(name: str, images: Path, weights: Path, seed: int, turn: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Let a contender fine-tune in a fresh folder; return its figures on the test images, and what it used."""
    shutil.rmtree(turn, ignore_errors=True)
    turn.mkdir(parents=True)
    how, _, number = name.partition("-")
    clock = str(PEERS / "cpu_clock.py")
    one = ["env", "OMP_NUM_THREADS=1", f"STEADYTRAIN_CACHE={turn / 'cache'}"]
    before = cpu_seconds()
    if how == "autogluon":
        python = environments.make("autogluon", (args.envs or args.work / "envs").resolve(), {})
        words = [images, weights, 20, seed, SIZES[-1], turn, 60 * int(number)]
        script = str(PEERS / "finetune_autogluon.py")
        answer = asked([*one, str(python), clock, script, *map(str, words)], turn, LIMIT)
        values: dict[str, Any] = json.loads(answer.splitlines()[-1])
        values["n"] = sum(file.is_file() for file in (images / "test").rglob("*"))
    else:
        words = ["finetune", images / "train", "--val", images / "validation", "--run", turn / "run", "--seed", seed]
        words += ["--model", "timm/mobilenetv2_100", "--weights", weights, "--json"]
        words += [word for setting in GOOGLES for word in ("--set", setting)]
        words += ["--budget-minutes", number] if how == "minutes" else ["--size", number]
        words += ["--train", "probe"] if how == "probe" else []
        run = json.loads(asked([*one, sys.executable, clock, "steadytrain", *map(str, words)], turn, LIMIT))["runs"][0]
        used = cpu_seconds() - before
        answer = asked(
            [*one, *machine.STEADY, "evaluate", str(turn / "run"), str(images / "test"), "--json"], turn, LIMIT
        )
        values = {key: json.loads(answer)[key] for key in ("n", "top1", "loss")}
        values |= {"cpu_seconds": round(used, 1), "tried": run["tried"]}
    values.setdefault("cpu_seconds", round(cpu_seconds() - before, 1))
    shutil.rmtree(turn, ignore_errors=True)
    machine.say(f"{turn.name}: {values}")
    return values


def figures(results: dict[str, dict[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return the figures of each contender with their spread over seeds, and how far ours are below the best."""
    document: dict[str, Any] = {}
    for name, rows in results.items():
        tops = [row["top1"] for row in rows.values()]
        document[name] = {"seeds": list(rows), "top1": tops, "spread": plain(spread(tops, are_shares=True))}
        document[name] |= {key: [row.get(key) for row in rows.values()] for key in ("loss", "cpu_seconds", "tried")}
    for mine in document.keys() & set(OURS):
        rivals = {name: rows for name, rows in results.items() if name not in OURS}
        for name, rows in rivals.items():
            both = sorted(results[mine].keys() & rows.keys())
            lost = [rows[seed]["top1"] - results[mine][seed]["top1"] for seed in both]
            errors = [(t * (1 - t) / max(1, rows[s].get("n", 0))) ** 0.5 for s in both for t in [rows[s]["top1"]]]
            below = {"points": lost, "spread": plain(spread(lost))}
            below["standard_errors"] = [
                value / error if error else None for value, error in zip(lost, errors, strict=True)
            ]
            document[mine].setdefault("below", {})[name] = below
    return document


def main() -> None:
    """Measure every contender that has no kept result yet, and record all."""
    parser = machine.parser(
        __doc__,
        data="clothing-10.tar, cifar10-png.tar.zst and weights/mobilenetv2_100/",
        work="images and finished results",
        choose=("--only", CONTENDERS),
    )
    parser.add_argument("--sets", nargs="+", default=["clothing", "cifar"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--envs", type=Path, help="where the environments of peers are made")
    args = parser.parse_args()
    (weights,) = (args.data / "weights" / "mobilenetv2_100").glob("*.safetensors")
    work = args.work.resolve()
    document: dict[str, Any] = {"sets": {}, "unavailable": {}}
    for chosen in args.sets:
        images, name = images_of(chosen, args.data, work).resolve(), chosen.partition("=")[0]
        results: dict[str, dict[int, dict[str, Any]]] = {}
        for seed in range(args.seeds):
            for contender in CONTENDERS:
                file = work / "kept" / f"minutes-{name}-{contender}-{seed}.json"
                if not file.exists() and (contender not in args.only or contender in document["unavailable"]):
                    continue
                turn = partial(contend, contender, images, weights.resolve(), seed, work / "turn" / file.stem, args)
                try:
                    results.setdefault(contender, {})[seed] = machine.kept(file, turn)
                except environments.UnavailableError as error:
                    document["unavailable"][contender] = str(error)
        document["sets"][name] = figures(results)
    machine.record("finetune_minutes", document, save=args.save)


if __name__ == "__main__":
    main()
