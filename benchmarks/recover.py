"""Kills at random instants of a run of two ranks: how soon it trains again, what it repeats, and what comes of it.

A run of ResNet-20 on small images is made once without a fault, and then again and again, each time with one kill at an
instant drawn from its whole length, the start and the evaluations included: SIGKILL of one rank, SIGKILL of the process
that keeps the ranks, or SIGTERM to it. Where the command ends otherwise than with 0 it is given again, as a user or a
scheduler would. By ``steady train --procs 2``, and by ``torchrun`` starting the same command.

- ``seconds_until_training``: from the kill to the end of the first update after it; ``seconds_until_caught_up``: to the
  first that had not been made before. Where ranks are killed before they have made any, the first does not count.
- ``images_repeated``: trained on once more than without a kill; a checkpoint is due every ``save_steps`` updates.
- ``lost``: kills after which the run did not come to its end, or positions of the stream were passed over.
- ``weights_equal``: kills after which the weights, running statistics included, and the last evaluation are those of
  the run without a fault, bit for bit.

``--saving`` measures instead what a checkpoint costs training, of ResNet-50 with momentum, in one process. From the
events of a run: ``pause`` of the loop, ``until_on_disk``, ``processor`` of the thread that writes, and ``slowed``, what
the updates meanwhile took more than the others. In turn with it, of a network and an optimizer of the same kind, and
while that run stands: ``in_loop``, the same file written by the loop itself, as steadytrain did until 2026-11; and
``script``, ``torch.save`` alone, which waits for no disk.

usage: python benchmarks/recover.py [--kills 10] [--steps 360] [--starters steady torchrun] [--quick] [--save]
       python benchmarks/recover.py --saving [--quick] [--save]
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import psutil
import timm
import torch
from safetensors.torch import load_file, save_file

import machine
import train_step
from machine import say
from steadytrain.config import Budget, Data, Every, Model, Optim, Recipe
from steadytrain.events import Evaluated, Resumed, Saved, Started, Step
from steadytrain.files import sync
from steadytrain.run import Run
from steadytrain.training import steps as run_steps
from steadytrain.training.checkpoints import split

RANKS = 2
BATCH = 32
IMAGES = 1200
SAVE_STEPS = 20
STARTERS = ("steady", "torchrun")
TARGETS = ("rank 0 KILL", "rank 1 KILL", "keeper KILL", "keeper TERM")
SAVING_STEPS, SAVES = 12, 9  # updates between two checkpoints; how many, of which the first two do not count
MOST_SECONDS = 600.0
MOST_COMMANDS = 60  # a rank that still ends holds the run for a while
PAUSE = 1.0


@dataclass(frozen=True)
class Bench:
    """The common part of all runs: the command that starts them, and the images."""

    starter: str
    records: Path
    steps: int

    def command(self, run: Path) -> list[str]:
        """Return the command, the same for the first start and for every later one."""
        train = ["train", str(self.records), "--model", "resnet20", "--run", str(run), "--batch-size", str(BATCH)]
        settings = {"budget.steps": self.steps, "every.save_steps": SAVE_STEPS, "optim.warmup_epochs": 0}
        for key, value in settings.items():
            train += ["--set", f"{key}={value}"]
        if self.starter == "steady":
            return [*machine.STEADY, *train, "--procs", str(RANKS)]
        launch = ["--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=3"]
        # After two dashes: torchrun would take --run for the beginning of its own --run-path.
        return [sys.executable, "-m", "torch.distributed.run", *launch, "-m", "--", "steadytrain", *train]

    @contextmanager
    def started(self, run: Path) -> Iterator[subprocess.Popen[bytes]]:
        """Run the command, and end it at the end; ranks that have lost their keeper may still run then."""
        environment = {
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "TMPDIR": str(run.parent),
        }  # torchrun leaves its logs there
        with (run.parent / f"{run.name}.log").open("ab") as log:
            process = subprocess.Popen(
                self.command(run), env=os.environ | environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
            try:
                yield process
            finally:
                process.kill()
                process.wait()


@dataclass
class Kill:
    """One run with one kill: of what, when (by the clock), and the exit codes of all commands it took."""

    target: str
    time: float = 0.0
    seconds_in: float = 0.0
    codes: list[int] = field(default_factory=list)


def ranks(keeper: int) -> dict[int, psutil.Process]:
    """Return the processes of the ranks that a process has started, by rank."""
    values = {}
    try:
        for process in psutil.Process(keeper).children():
            with_rank = process.environ().get("RANK")
            if with_rank is not None:
                values[int(with_rank)] = process
    except psutil.Error:  # one of them is ending
        pass
    return values


def strike(kill: Kill, keeper: subprocess.Popen[bytes]) -> None:
    """Kill the target as soon as it is there."""
    who, how = kill.target.rsplit(" ", 1)
    number = getattr(signal, f"SIG{how}")
    if who == "keeper":
        kill.time = time.time()
        keeper.send_signal(number)
        return
    rank = int(who.split()[1])
    while keeper.poll() is None:
        value = ranks(keeper.pid).get(rank)
        if value is not None:
            kill.time = time.time()
            value.send_signal(number)
            return
        time.sleep(0.02)


def go_on(bench: Bench, run: Path, kill: Kill, after: float) -> None:
    """Start the run, kill something after so many seconds, and give the command again until it is done."""
    end, family = time.monotonic() + MOST_SECONDS, set[psutil.Process]()
    try:
        while (not kill.codes or kill.codes[-1]) and len(kill.codes) < MOST_COMMANDS and time.monotonic() < end:
            with bench.started(run) as process:
                watch(process, kill, after, end, family)
                if process.poll() is not None:
                    kill.codes.append(process.returncode)
            time.sleep(PAUSE if kill.codes and kill.codes[-1] else 0)
    finally:
        for member in family:
            if member.is_running():
                member.kill()


def watch(process: subprocess.Popen[bytes], kill: Kill, after: float, end: float, family: set[psutil.Process]) -> None:
    """Wait until the command has ended or the time is over; make the kill in between, if it is due."""
    began, looked = time.monotonic(), 0.0
    while process.poll() is None and (now := time.monotonic()) < end:
        if now - looked > 1:
            family.update(ranks(process.pid).values())
            looked = now
        if not kill.time and now - began >= after:
            strike(kill, process)
            kill.seconds_in = time.monotonic() - began
        time.sleep(0.02)


def judged(bench: Bench, run: Path, kill: Kill, sound: Path) -> dict[str, Any]:
    """Return the outcome, by the run's own events and weights."""
    events = list(Run.open(run).events()) if (run / "recipe.json").exists() else []
    done = Run.open(run).finished() is not None if events else False
    steps = [event for event in events if isinstance(event, Step)]
    before = [event for event in steps if event.time <= kill.time]
    attempt = max((event.attempt for event in events if event.time <= kill.time), default=0)
    later = any(isinstance(event, Started) and event.attempt > attempt for event in events)
    after = [event for event in steps if event.time > kill.time and (event.attempt > attempt or not later)]
    reached = max((event.position for event in steps if event.attempt <= attempt), default=0) if later else 0
    caught_up = [event for event in after if event.position > reached]
    repeated = [event.images_repeated for event in events if isinstance(event, Resumed)]
    return {
        "target": kill.target,
        "seconds_in": kill.seconds_in,
        "at_step": before[-1].step if before else 0,
        "exit_codes": kill.codes,
        "attempts": max((event.attempt for event in events), default=0),
        "seconds_until_training": after[0].time - kill.time if before and after else None,
        "seconds_until_caught_up": caught_up[0].time - kill.time if before and caught_up else None,
        "images_repeated": sum(event.n for event in steps) - bench.steps * BATCH,
        "images_repeated_by_its_events": sum(repeated),
        "is_lost": not done or not is_whole(steps, bench.steps * BATCH),
        "weights_equal": done and is_same(run, sound),
    }


def is_whole(steps: Sequence[Step], images: int) -> bool:
    """Return whether each attempt began where an earlier one had been, and the last ended at the end."""
    reached, last, attempt = 0, 0, 0
    for event in steps:
        began = event.position - event.n
        if began != last if event.attempt == attempt else began > reached:
            return False
        attempt, last, reached = event.attempt, event.position, max(reached, event.position)
    return reached == images


def is_same(run: Path, sound: Path) -> bool:
    """Return whether two runs have the same weights and the same last evaluation, bit for bit."""
    ours, theirs = (load_file(place / "model.safetensors") for place in (run, sound))
    if ours.keys() != theirs.keys() or _last(run) != _last(sound):
        return False
    return all(torch.equal(_bytes(value), _bytes(theirs[name])) for name, value in ours.items())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _last(run: Path) -> tuple[float, float]:
    evaluated = [event for event in Run.open(run).events() if isinstance(event, Evaluated)][-1]
    return evaluated.loss, evaluated.top1


def measure(bench: Bench, kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Make the run without a fault, and then those with one."""
    sound = folder / "sound"
    began = time.monotonic()
    with bench.started(sound) as process:
        code = process.wait()
    seconds = time.monotonic() - began
    if code:
        raise SystemExit(f"the run without a fault ended with {code}:\n{_log(sound)}")
    say(f"{bench.starter}: without a fault {seconds:.1f} s")
    draw, rows = random.Random(f"{seed} {bench.starter}"), []
    targets = [TARGETS[number % len(TARGETS)] for number in range(kills)]
    draw.shuffle(targets)
    for number, target in enumerate(targets):
        run, kill = folder / f"run-{number}", Kill(target)
        go_on(bench, run, kill, draw.uniform(0.05, 0.95) * seconds)
        rows.append(judged(bench, run, kill, sound))
        say(f"{bench.starter}: {rows[-1]}")
        if rows[-1]["is_lost"] or not rows[-1]["weights_equal"]:
            say(_log(run))
    return {"seconds_without_a_fault": seconds, **summary(rows), "kills": rows}


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the figures of all kills, and of each kind."""
    return {
        "lost": f"{sum(row['is_lost'] for row in rows)} of {len(rows)}",
        "weights_equal": f"{sum(row['weights_equal'] for row in rows)} of {len(rows)}",
        **{name: _spread([row[name] for row in rows]) for name in SPREADS},
        "seconds_until_training_by_target": {
            target: _spread([row["seconds_until_training"] for row in rows if row["target"] == target])
            for target in TARGETS
            if any(row["target"] == target for row in rows)
        },
    }


SPREADS = ("seconds_until_training", "seconds_until_caught_up", "images_repeated")


def _spread(values: Sequence[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    return {"n": len(known), "median": median(known), "most": max(known)} if known else None


def _log(run: Path) -> str:
    return "\n".join((run.parent / f"{run.name}.log").read_text(errors="replace").splitlines()[-30:])


def saving(records: Path, folder: Path, saves: int) -> dict[str, Any]:
    """Measure the seconds of a checkpoint, by who writes it."""
    recipe = Recipe(
        data=Data(train=str(records), size=64, holdout=0.0),
        model=Model("timm/resnet50"),
        optim=Optim("sgd", lr=0.01),
        budget=Budget(steps=SAVING_STEPS * saves),
        every=Every(save_steps=SAVING_STEPS, log_steps=SAVING_STEPS),
        batch_size=8,
    )
    module = timm.create_model("resnet50", num_classes=10)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, momentum=0.9)
    for parameter in module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    seconds: dict[str, list[float]] = {"in_loop": [], "script": []}
    saved: list[Saved] = []
    updates: list[tuple[float, Step]] = []
    for event in run_steps(Run.create(folder / "run", recipe)):
        if isinstance(event, Step):
            updates.append((event.time - event.seconds, event))
        if isinstance(event, Saved):
            saved.append(event)
            seconds["in_loop"].append(_in_loop(module, optimizer, folder / "in-loop"))
            began = time.perf_counter()
            torch.save({"model": module.state_dict(), "optimizer": optimizer.state_dict()}, folder / "script.pt")
            seconds["script"].append(time.perf_counter() - began)
            say(f"pause {event.pause:.3f} of {event.seconds:.3f} s, in the loop {seconds['in_loop'][-1]:.3f}")
    spans = [(event.began + event.pause, event.began + event.seconds) for event in saved]
    slow = [any(began < end and begins < began + step.seconds for begins, end in spans) for began, step in updates]
    usual = median(step.seconds for (_, step), is_slow in zip(updates, slow, strict=True) if not is_slow)
    excess = sum(step.seconds - usual for (_, step), is_slow in zip(updates, slow, strict=True) if is_slow)
    seconds |= {
        "pause": [event.pause for event in saved],
        "until_on_disk": [event.seconds for event in saved],
        "processor": [event.cpu_seconds or 0.0 for event in saved],
    }
    return {
        "bytes": saved[-1].bytes,
        "saves": len(saved) - 2,
        "seconds_per_update": usual,
        "slowed": excess / len(saved),
        **{
            name: {"median": median(values[2:]), "mean": fmean(values[2:]), "most": max(values[2:])}
            for name, values in seconds.items()
        },
    }


def _in_loop(module: torch.nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> float:
    """Write weights and momentum as the loop did until 2026-11: looked at, copied, written, flushed, read again."""
    began = time.perf_counter()
    assert bool(torch.stack([parameter.isfinite().all() for parameter in module.parameters()]).all())
    _, tensors = split({"model": module.state_dict(), "optimizer": optimizer.state_dict()})
    path.unlink(missing_ok=True)
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, path)
    with path.open("rb") as file:
        hashlib.file_digest(file, "sha256")
    sync(path)
    sync(path.parent)
    return time.perf_counter() - began


def main() -> None:
    """Measure, print, and save where the command line asks for it."""
    parser = machine.parser(__doc__, choose=("--starters", STARTERS))
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=360, help=f"updates of {BATCH} images")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed, and when")
    parser.add_argument("--saving", action="store_true", help="only what a checkpoint costs training")
    parser.add_argument("--quick", action="store_true", help="four kills of a shorter run: shows that it works")
    args = parser.parse_args()
    if args.quick:
        args.kills, args.steps = len(TARGETS), 100
    if args.saving:
        with tempfile.TemporaryDirectory() as name:
            records = train_step.write_records(Path(name), 64, 3, 200)
            figures = saving(records, Path(name), 3 if args.quick else SAVES)
        machine.record("recover_saving", machine.rounded(figures), save=args.save)
        return
    values = {}
    with tempfile.TemporaryDirectory() as name:
        records = train_step.write_records(Path(name), 32, 3, IMAGES)
        for starter in args.starters:
            folder = Path(name) / starter
            folder.mkdir()
            values[starter] = measure(Bench(starter, records, args.steps), args.kills, args.seed, folder)
    figures = {"batch": BATCH, "steps": args.steps, "save_steps": SAVE_STEPS, "seed": args.seed}
    machine.record("recover", figures | machine.rounded(values), save=args.save)


if __name__ == "__main__":
    main()
