"""Images per second of the feed, beside every loader on the CPU that could be had, on the same files in one run.

Works: ``originals`` (ImageNet originals of about 110 kB), ``packed`` (those at 256 pixels, quality 95) and ``cifar10``.
``train`` is RandomResizedCrop(224), antialiased bilinear, and a flip (CIFAR-10: 4 pixels of padding, a crop of 32, a
flip); ``evaluate`` is the shorter side to 256 and the centre of 224. Batches are bytes, 64 images (CIFAR-10: 128).
Photographs are decoded anew each time, by us as well: it stands for a set that no memory holds. CIFAR-10 is kept.

Every contender is a process of its own, pinned to one core, or two, with the interpreter of its own environment
(``peers/environments.py`` makes them); it comes with a few settings (``peers/feed_peers.py``), and the fastest of them
takes part. They take turns of ``--seconds``; who has none is stopped. A turn begins with the batches that lie ready,
which do not count. Figures are medians over the rounds.

- ``images_per_cpu_second``: CPU time of a process and all its children; other work on the machine hardly shows there.
- ``psnr_db``: of its evaluation against Pillow's: all decoded, antialiased bilinear, the same square.
- ``pss_bytes``: memory of the process and its children, ``file_bytes`` of it pages of mapped files (code, and our
  records), which the system takes back when it needs them.
- ``first_batch_seconds``: from making the loader to its first batch; ``start_seconds``: with interpreter and imports.
- ``steadytrain``: with libjpeg-turbo; ``with native``: with the native decoder, where it was built; ``marked``:
  moreover of originals to whose JPEGs packing has added restart markers, which what peers read has not. Packed ones
  have them for everybody, as packing writes them.
- ``processes``: ours as processes of one core each, at the same time; what the threads of one process reach of that.
- ``memory``: ours after 1, 10 and 50 epochs of 200 images, and with 1, 2, 4 and 8 threads.

usage: python benchmarks/feed.py --data FOLDER [--rounds 5] [--seconds 3] [--works ...] [--peers ...] [--save]
       FOLDER holds imagenet-sample-200.tar and cifar10-png.tar.zst
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import machine
from machine import say
from peers import environments, feed_works
from peers.environments import UnavailableError
from peers.feed_contenders import Contender, ContenderError, together
from peers.feed_peers import OURS, OURS_ALONE, OURS_MARKED, PEERS, Peer, Setting
from peers.feed_works import Work
from steadytrain.data.images import jpeg

EPOCHS = (1, 10, 50)
FEW = 200  # images of an epoch whose memory is looked at
THREADS = (1, 2, 4, 8)
US = "steadytrain"
WITH, MARKED = f"{US} with native", f"{US}, marked"
Told = dict[str, Any]


class Field:
    """Everybody who takes part in one work on so many cores.

    Args:
        work, phase, cores: what is done.
        pythons: peer -> its interpreter.
        seconds: of a turn.
    """

    def __init__(self, work: Work, phase: str, cores: int, pythons: dict[str, Path], seconds: float) -> None:
        self.work = work
        self.phase = phase
        self.cpus = sorted(os.sched_getaffinity(0))[:cores]
        self.seconds = seconds
        self.auditions: dict[str, list[Told]] = {}
        self.failed: dict[str, str] = {}
        ours = {US: OURS_ALONE}
        if jpeg.parts is not None and not work.is_small:
            ours |= {WITH: OURS} | ({MARKED: OURS_MARKED} if work.marked else {})
        self._members = {name: (peer, Path(sys.executable)) for name, peer in ours.items()}
        self._members |= {name: (PEERS[name], at) for name, at in pythons.items() if work.name in PEERS[name].works}

    def audition(self) -> None:
        """Try every setting of everybody, one process at a time: its speed, its memory, its start."""
        for name, (peer, python) in self._members.items():
            for setting in peer.settings(len(self.cpus)):
                try:
                    with self._contender(peer, python, setting, self.cpus) as contender:
                        alone = contender.alone(self.seconds / 2)
                except ContenderError as error:
                    self._fail(name, setting, error)
                else:
                    self.auditions.setdefault(name, []).append(alone)
                    say(f"  {name} {setting}: {alone['images_per_second']:,.0f} images/s")

    def measure(self, rounds: int, scratch: Path) -> Told:
        """Measure the best setting of each contender in turns; return all figures, and our ratios."""
        with ExitStack() as stack:
            entered = self._enter(stack)
            alone = [stack.enter_context(self._ours_on(cpu)) for cpu in self.cpus if len(self.cpus) > 1]
            speeds = []
            for number in range(rounds):
                say(f"  round {number + 1} of {rounds}")
                for name in list(entered):
                    self._turn(name, entered)
                if alone:
                    speeds.append(together(alone, self.seconds))
            figures = {name: self._told(name, contender, scratch) for name, contender in entered.items()}
        ratios = over_best(figures) | (beside_processes(figures.get(WITH, figures[US]), speeds) if speeds else {})
        return {"contenders": figures, "failed": self.failed, "ratios": ratios}

    def _turn(self, name: str, entered: dict[str, Contender]) -> None:
        try:
            entered[name].turn(self.seconds)
        except ContenderError as error:
            self._fail(name, entered.pop(name).setting, error)

    def _enter(self, stack: ExitStack) -> dict[str, Contender]:
        entered = {}
        for name, auditions in self.auditions.items():
            setting = best(auditions)["setting"]
            try:
                entered[name] = stack.enter_context(self._contender(*self._members[name], setting, self.cpus))
            except ContenderError as error:
                self._fail(name, setting, error)
        return entered

    def _ours_on(self, cpu: int) -> Contender:
        return self._contender(OURS, Path(sys.executable), {"threads": 1}, [cpu])

    def _contender(self, peer: Peer, python: Path, setting: Setting, cpus: list[int]) -> Contender:
        kept = self.work.num_images + 1000 if not peer.environment and self.work.is_small else 0
        return Contender(peer, python, self.work, self.phase, setting, cpus, kept)

    def _told(self, name: str, contender: Contender, scratch: Path) -> Told:
        tried = self.auditions[name]
        alone = {key: value for key, value in best(tried).items() if key not in ("setting", "images_per_second")}
        others = [{**audition["setting"], "images_per_second": audition["images_per_second"]} for audition in tried]
        pixels = {"psnr_db": contender.psnr(scratch / "looked.npy")} if self.phase == "evaluate" else {}
        return {"setting": contender.setting, **contender.figures(), **alone, **pixels, "tried": others}

    def _fail(self, name: str, setting: Setting, error: ContenderError) -> None:
        self.failed[f"{name} {setting}"] = str(error)
        say(f"  {name} {setting}: {error}")


def best(auditions: list[Told]) -> Told:
    """Return the fastest setting."""
    return max(auditions, key=lambda audition: float(audition["images_per_second"]))


def beside_processes(ours: Told, speeds: list[float]) -> Told:
    """Return the rate of threads over that of as many processes of one thread each, at the same time."""
    reached = median(speeds)
    ratio = round(ours["images_per_second"] / reached, 3)
    return {"processes": {"images_per_second": round(reached, 1), "threads_over_them": ratio}}


def over_best(contenders: dict[str, Told]) -> Told:
    """Return our rate over the best of the others, by wall clock and by CPU time."""
    ours = [name for name in contenders if name.startswith(US)]
    outcome: Told = {}
    for key in ("images_per_second", "images_per_cpu_second"):
        others = {name: figures[key] for name, figures in contenders.items() if name not in ours}
        if others:
            best = max(others, key=lambda name: others[name])
            outcome[key] = {"best": best, **{name: round(contenders[name][key] / others[best], 2) for name in ours}}
    return outcome


def compare(work: Work, phase: str, cores: int, pythons: dict[str, Path], args: argparse.Namespace) -> Told:
    """Measure all contenders in turns."""
    say(f"{work.name}, {phase}, {cores} cores")
    field = Field(work, phase, cores, pythons, args.seconds)
    field.audition()
    if US not in field.auditions:
        raise SystemExit(f"steadytrain itself fails: {field.failed}")
    with tempfile.TemporaryDirectory() as scratch:
        return field.measure(args.rounds, Path(scratch))


def memory(work: Work, seconds: float) -> Told:
    """Measure our memory after some epochs of few images, and with more and more threads."""
    say(f"{work.name}, memory")
    cpus, python = sorted(os.sched_getaffinity(0)), Path(sys.executable)
    epochs, done = {}, 0
    with Contender(OURS, python, work, "train", {"threads": 2, "images": FEW}, cpus) as contender:
        for epoch in EPOCHS:
            contender.ask("take", (epoch - done) * FEW)
            epochs[epoch], done = contender.memory(), epoch
    threads = {}
    for num in THREADS:
        with Contender(OURS, python, work, "train", {"threads": num}, cpus) as contender:
            contender.ask("turn", seconds)
            threads[num] = contender.memory()
    kept_bytes = [threads[num]["pss_bytes"] - threads[num]["file_bytes"] for num in (THREADS[0], THREADS[-1])]
    each = round((kept_bytes[1] - kept_bytes[0]) / (THREADS[-1] - THREADS[0]))
    return {"after_epochs": epochs, "with_threads": threads, "bytes_per_thread": each}


def table(works: Told) -> str:
    """Format the figures: images per second (per CPU second), decibels, memory, seconds to the first batch."""
    lines = []
    for work, phases in works.items():
        for phase, by_cores in phases.items():
            for cores, of_cores in by_cores.items():
                lines.append(f"{work}, {phase}, {cores}")
                lines += [_row(name, figures) for name, figures in of_cores["contenders"].items()]
                lines += [f"  {name}: {ratio}" for name, ratio in of_cores["ratios"].items()]
    return "\n".join(lines)


def _row(name: str, figures: Told) -> str:
    speed = f"{figures['images_per_second']:>10,.0f} ({figures['images_per_cpu_second']:>9,.0f})"
    psnr = f"{figures['psnr_db']:.1f} dB" if "psnr_db" in figures else ""
    return (
        f"  {name:33} {speed} {psnr:>8} {figures['pss_bytes'] / 2**20:6.0f} MiB {figures['first_batch_seconds']:6.2f} s"
    )


def interpreters(names: list[str], folder: Path, python38: str | None) -> tuple[dict[str, Path], dict[str, str]]:
    """Return each peer's Python, and why others have none."""
    pythons, missing = {}, {}
    for name in names:
        environment = PEERS[name].environment
        try:
            pythons[name] = environments.make(environment, folder, {"3.8": python38} if python38 else {})
        except UnavailableError as error:
            missing[name] = str(error)
            say(f"{name} cannot be had: {error}")
    return pythons, missing


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = machine.parser(
        __doc__,
        data="imagenet-sample-200.tar and cifar10-png.tar.zst",
        choose=("--works", feed_works.ARCHIVES),
        rounds=5,
    )
    parser.add_argument("--envs", type=Path, default=Path.home() / ".cache" / "steadytrain-peers")
    parser.add_argument("--python38", default=os.environ.get("STEADYTRAIN_MXNET_PYTHON"), help="for MXNet 1.9.1")
    parser.add_argument("--phases", nargs="+", default=["train", "evaluate"], choices=["train", "evaluate"])
    parser.add_argument("--cores", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--peers", nargs="*", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--no-memory", action="store_true", help="leave out epochs and threads")
    return parser.parse_args()


def main() -> None:
    """Make environments and files, measure, record."""
    args = arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    pythons, missing = interpreters(args.peers, args.envs, args.python38)
    works: Told = {}
    held: Told = {}
    for name in args.works:
        with tempfile.TemporaryDirectory(prefix="feed-benchmark-") as scratch:
            work = feed_works.make(name, args.data, Path(scratch))
            for phase in (phase for phase in work.phases if phase in args.phases):
                by_cores = works.setdefault(name, {}).setdefault(phase, {})
                for cores in args.cores:
                    by_cores[f"{cores} cores"] = compared = compare(work, phase, cores, pythons, args)
                    say(table({name: {phase: {f"{cores} cores": compared}}}))
            if not (args.no_memory or work.is_small):
                held[name] = memory(work, args.seconds)
    packages = {name: list(environment.packages) for name, environment in environments.ENVIRONMENTS.items()}
    measured = {"works": works, "memory": held, "not_to_be_had": missing, "environments": packages}
    machine.record("feed", {"rounds": args.rounds, "seconds": args.seconds, **measured}, save=args.save)


if __name__ == "__main__":
    main()
