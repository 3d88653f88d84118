"""SIGKILL before file operations and at random instants of every phase: does the same command go on to the same bits?

Each trial is a command of its own on tiny images (:func:`jobs`). It is killed once, and given again until it ends well,
as a user or a scheduler would. Kinds of kill:

``before``   the process that is about to make the N-th change below the trial's folder (its run and its cache) kills
             itself instead; N is drawn evenly over the phases of the run without a kill
``torn``     the same in the middle of a write: half of it is done
``instant``  by another process, at an instant drawn from the whole length of the command

A row of the result is a kind of command and a phase: ``kills``; ``refused``, after which the same command did not go on
at once; ``unequal``, after which weights, average and optimizer (the newest checkpoint), best weights, predictions,
evaluations, means of epochs, the order of samples or packed bytes are not those of the run without a kill, bit for bit;
``left``, after which a file or a process was left behind in the end; updates made once more than without a kill, of
which a checkpoint every 5 updates allows 5 and those made while it is written. The bits of asynchronous workers and of
what ``tune`` measures depend on time: of those, only that they end well counts.

``--disk`` injects errors instead of kills at each kind of write: the disk is full, its quota is used up, it is
read-only, or an operation fails (EIO); and between two starts a file is cut in half, or a bit of it is flipped. The
command has to end well, or with one line, and the same command on the sound disk comes to the same bits.

It needs a C compiler and Linux. ``--save`` also writes the table in docs/laboratory.md.

usage: python benchmarks/kill_matrix.py [--kills 300] [--jobs train ...] [--phases step ...] [--seed 0]
           [--seconds 3600] [--at-once 2] [--disk] [--save]
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from PIL import Image

import machine
from steadytrain.events import EpochTrained, Evaluated, Event, Step, read
from steadytrain.launch.supervise import free_port, rank_variables

SOURCE = Path(__file__).with_name("file_faults.c")
DOCUMENT = Path(__file__).resolve().parents[1] / "docs" / "laboratory.md"
IMAGES, CLASSES, BATCH, SAVE_STEPS = 160, 4, 16, 5
TRAIN = ["--model", "digits", "--epochs", "3", "--batch-size", str(BATCH), "--lr", "0.05", "--device", "cpu"]
for _setting in ("parallel.compute_threads=1", f"every.save_steps={SAVE_STEPS}", "every.log_steps=3", "optim.ema=0.9"):
    TRAIN += ["--set", _setting]
TRAIN += ["--set", "data.pad=1", "--threads", "1"]
MOST_SECONDS = float(os.environ.get("KILLS_MOST_SECONDS", "240"))  # of a command; more on a busy machine
MOST_COMMANDS = 4
MOST_TRIALS = 1000
BUCKET = "kills"
PAGE = struct.Struct("iii4000s")

FILES = {  # a file of a run -> the phase in which it is written
    "checkpoints/.part": "checkpoint write",
    "checkpoints/step": "checkpoint write",
    "best.safetensors": "best weights",
    "predictions.csv": "best weights",
    "model.safetensors": "end",
}
EVENTS = {  # a line of the log -> the phase in which it is written; the others stand between start and end
    "Started": "start",
    "Resumed": "start",
    "Noticed": "start",
    "Step": "step",
    "Logged": "step",
    "EpochTrained": "epoch boundary",
    "Evaluated": "evaluation",
    "Saved": "checkpoint write",
    "Ended": "end",
}


@dataclass(frozen=True)
class Job:
    """A kind of command: ``words`` of a trial's folder, started ``ranks`` times (0: one process that is no rank).

    ``is_forked``: the process comes from one that has torch loaded. ``targets``: whom a kill at an instant hits: the
    command itself, a rank by its number, a server, or a run of a sweep. ``share``: of all kills. ``facts``: what has to
    be equal. ``phase``: of all its kills, where the file does not tell.
    """

    words: Callable[[Path], list[str]]
    facts: Callable[[Path], dict[str, Any]]
    share: int
    ranks: int = 0
    is_forked: bool = False
    targets: tuple[str, ...] = ("command",)
    phase: str | None = None
    instants: float = 0.3
    needs_store: bool = False


def digest(path: Path) -> str | None:
    """The sha256 of a file; None where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def run_facts(run: Path) -> dict[str, Any]:
    """What of a run has to be equal."""
    events = list(read(run / "events.jsonl"))
    saved = sorted((run / "checkpoints").glob("step-*"))
    evaluated = {event.step: [event.n, event.loss, event.top1] for event in events if isinstance(event, Evaluated)}
    epochs = {event.epoch: [event.n, event.loss, event.top1] for event in events if isinstance(event, EpochTrained)}
    return {
        "weights": digest(run / "model.safetensors"),
        "average and optimizer": digest(saved[-1] / "state.safetensors") if saved else None,
        "best weights": digest(run / "best.safetensors"),
        "predictions": digest(run / "predictions.csv"),
        "evaluations": evaluated,
        "means of epochs": epochs,
        "order of samples": order(events),
        "recipe": digest(run / "recipe.json"),
    }


def order(events: Iterable[Event]) -> dict[int, Any]:
    """The samples of each update, as it was made last, and whether each attempt began where an earlier one had been."""
    reached, last, attempt, is_whole = 0, 0, 0, True
    order = dict[int, Any]()
    for event in events:
        if isinstance(event, Step):
            began = event.position - event.n
            is_whole = is_whole and (began == last if event.attempt == attempt else began <= reached)
            attempt, last, reached = event.attempt, event.position, max(reached, event.position)
            order[event.step] = [event.position, event.n, event.lr]
    return order | {0: is_whole}


def uploaded_facts(run: Path) -> dict[str, Any]:
    """The same of a run that is kept in a store, and whether what is there is what is here."""
    facts = run_facts(run) | {"the same in the store": _in_store(run)}
    del facts["recipe"]  # it names the place
    return facts


def _in_store(run: Path) -> bool:
    from obstore.store import S3Store

    store = S3Store(BUCKET, client_options={"allow_http": True})
    prefix = f"{run.parent.name}/"
    there = {meta["path"]: meta["size"] for chunk in store.list(prefix) for meta in chunk}
    here = {f"{prefix}{path.relative_to(run)}": path.stat().st_size for path in run.rglob("*") if path.is_file()}
    return all(there.get(name) == size for name, size in here.items() if not name.endswith(("/lock", ".jsonl")))


@contextlib.contextmanager
def object_store(log: Path) -> Iterator[None]:
    """An S3 server on this machine with a bucket, to which the environment leads."""
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    with log.open("wb") as stream:
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], stdout=stream, stderr=stream
        )
    os.environ |= {"AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "kills", "AWS_SECRET_ACCESS_KEY": "kills"}
    os.environ["AWS_REGION"] = "us-east-1"
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(f"{address}/{BUCKET}", method="PUT"), timeout=30).close()
                break
            time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait()


def asynchronous_facts(run: Path) -> dict[str, Any]:
    """That the run came to its end: which worker makes an update, and with what, depends on the time."""
    steps = [event for path in run.glob("events*.jsonl") for event in read(path) if isinstance(event, Step)]
    return {"updates": max((event.step for event in steps), default=0), "weights": (run / "model.safetensors").exists()}


def packed_facts(folder: Path) -> dict[str, Any]:
    """The bytes of all that was packed."""
    return {path.name: digest(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def sweep_facts(folder: Path) -> dict[str, Any]:
    """The facts of each of its runs."""
    runs = sorted(path.parent for path in folder.rglob("recipe.json"))
    return {f"{run.relative_to(folder)} {name}": fact for run in runs for name, fact in run_facts(run).items()}


def tuned_facts(folder: Path) -> dict[str, Any]:
    """That there is a recipe; what it says depends on what was measured."""
    return {"recipe": (folder / "tuned.toml").exists()}


def jobs(data: Path) -> dict[str, Job]:
    """All kinds of commands, on the data of a folder."""
    records, images, recipe = str(data / "tiny.rec"), str(data / "images"), str(data / "sweep.toml")

    def trained(folder: Path) -> str:
        """The run that was trained for all, or the damaged copy that a trial has of it."""
        return str(folder / "run" if (folder / "run").exists() else data / "trained" / "out")

    train = functools.partial(_train, records)

    def two(folder: Path) -> list[str]:
        return [*train(folder), "--set", "data.holdout=0.2"]

    asynchronous = ["--engine", "async", "--workers", "2"]
    return {
        "train": Job(train, run_facts, 130, is_forked=True),
        "train, two ranks": Job(two, run_facts, 40, ranks=2, is_forked=True, targets=("rank 0", "rank 1")),
        "train --procs 2": Job(
            lambda folder: [*two(folder), "--procs", "2"],
            run_facts,
            10,
            targets=("rank 0", "rank 1", "command"),
            instants=0.7,
        ),
        "train --engine async": Job(
            lambda folder: [*train(folder), *asynchronous],
            asynchronous_facts,
            5,
            targets=("server", "rank 0", "rank 1", "command"),
            instants=0.7,
            phase="servers and workers",
        ),
        "train FOLDER": Job(functools.partial(_train, images), run_facts, 22, is_forked=True),
        "train, uploaded": Job(
            lambda folder: [*train(folder), "--set", f"every.upload=s3://{BUCKET}/{folder.name}"],
            uploaded_facts,
            26,
            is_forked=True,
            phase="upload",
            needs_store=True,
        ),
        "pack": Job(lambda folder: ["pack", images, str(folder / "out" / "tiny")], packed_facts, 40, phase="packing"),
        "pack --procs 2": Job(
            lambda folder: ["pack", images, str(folder / "out" / "tiny"), "--procs", "2", "--shards", "2"],
            packed_facts,
            20,
            phase="packing",
            targets=("command", "child"),
        ),
        "sweep": Job(
            lambda folder: ["sweep", recipe, records, "--over", "optim.lr=0.05,0.1", "--run", str(folder / "out")],
            sweep_facts,
            4,
            phase="sweep",
            targets=("command", "child"),
        ),
        "tune": Job(
            lambda folder: [
                *("tune", records, "--model", "digits", "--minutes", "1", "--device", "cpu"),
                *("-o", str(folder / "out" / "tuned.toml")),
            ],
            tuned_facts,
            3,
            phase="tune",
            targets=("command", "child"),
        ),
        # Of the disk's faults alone:
        "check --index": Job(
            lambda folder: ["check", str(_copied(data, folder, "tiny.rec")), "--index", "--force"],
            packed_facts,
            0,
            phase="check",
        ),
        "report": Job(
            lambda folder: ["report", trained(folder), "-o", str(folder / "out" / "r.html")],
            named_facts,
            0,
            is_forked=True,
            phase="report",
        ),
        "predict": Job(
            lambda folder: ["predict", trained(folder), images, "--csv", str(folder / "out" / "p.csv")],
            packed_facts,
            0,
            is_forked=True,
            phase="predict",
        ),
        "export": Job(
            lambda folder: ["export", trained(folder), "-o", str(folder / "out" / "w.safetensors")],
            named_facts,
            0,
            is_forked=True,
            phase="export",
        ),
    }


def killed_jobs() -> list[str]:
    """The kinds of commands that are killed."""
    return [name for name, job in jobs(Path()).items() if job.share]


def named_facts(folder: Path) -> dict[str, Any]:
    """What was made, by name: it holds times."""
    return dict.fromkeys(packed_facts(folder), True)


def _copied(data: Path, folder: Path, name: str) -> Path:
    for path in data.glob("tiny.*"):
        if not (folder / "out" / path.name).exists():
            shutil.copy(path, folder / "out" / path.name)
    return folder / "out" / name


def _train(data: str, folder: Path) -> list[str]:
    return ["train", data, "--run", str(folder / "out"), *TRAIN]


WRITES = {  # a kind of write -> the command that does it, and what its paths have in common
    "lock": ("train", "/out/lock"),
    "recipe": ("train", "recipe.json"),
    "events": ("train", "events.jsonl"),
    "checkpoint": ("train", "/checkpoints/"),
    "best weights": ("train", "best.safetensors"),
    "last weights": ("train", "model.safetensors"),
    "predictions": ("train", "predictions.csv"),
    "cache of kernels": ("train", "/cache/"),
    "packed cache": ("train FOLDER", "/cache/packed"),
    "records": ("pack", ".rec"),
    "index": ("pack", ".idx"),
    "card": ("pack", ".json"),
    "list": ("pack", ".lst"),
    "index written again": ("check --index", ".idx"),
    "report page": ("report", "/out/"),
    "predictions of images": ("predict", "/out/"),
    "export": ("export", "/out/"),
    "tuned recipe": ("tune", "tuned.toml"),
    "runs of a sweep": ("sweep", "/out/"),
    "sweep table": ("sweep", "sweep.json"),
    "sweep page": ("sweep", "report.html"),
    "everything": ("train", "/"),
}
AFTERWARDS = ("sweep table", "sweep page")
"""Written when the runs are over, which they are already when it is tried."""
ERRORS = ("ENOSPC", "EDQUOT", "EROFS", "EIO")
PLACES = (0, 0.5, 1)  # the first, the middle and the last operation
HARMS = ("torn", "flipped bit", "empty")
DAMAGES = ("damage", "damage read")
READS = {  # a command -> the files of a finished run, or of its own before, that are damaged when it is given
    "report": ("events.jsonl", "recipe.json", "predictions.csv", "best.safetensors"),
    "export": ("events.jsonl", "recipe.json", "predictions.csv", "best.safetensors"),
    "predict": ("recipe.json", "best.safetensors"),
    "sweep": ("sweep.json", "report.html", "*/*/events.jsonl", "*/*/recipe.json", "*/*/best.safetensors"),
}


def write_data(folder: Path) -> None:
    """Small grey images in a folder for each class, the same as records, and a recipe to sweep."""
    draw = np.random.default_rng(0)
    prototypes = draw.integers(0, 256, (CLASSES, 8, 8))
    for number in range(IMAGES):
        place = folder / "images" / "abcd"[number % CLASSES]
        place.mkdir(parents=True, exist_ok=True)
        pixels = np.clip(prototypes[number % CLASSES] + draw.normal(0, 60, (8, 8)), 0, 255)
        Image.fromarray(pixels.astype(np.uint8)).save(place / f"{number:03}.png")
    subprocess.run(
        [sys.executable, "-m", "steadytrain", "pack", str(folder / "images"), str(folder / "tiny")],
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    (folder / "sweep.toml").write_text(
        'batch_size = 16\n[data]\npad = 1\n[model]\nname = "digits"\n[budget]\nepochs = 2\n[optim]\nema = 0.9\n'
        '[parallel]\ndevice = "cpu"\ncompute_threads = 1\nthreads = 1\n[every]\nsave_steps = 5\nlog_steps = 3\n'
    )


class Counting:
    """The page that a command's processes share with this one: how many operations there were, which met a fault."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.write_bytes(bytes(PAGE.size))

    def read(self) -> tuple[int, int, int, str]:
        """How many operations; how many met the fault; the process of the first that did; what it was about to do."""
        count, met, process, text = PAGE.unpack(self.path.read_bytes())
        return count, met, process, text.partition(b"\0")[0].decode(errors="replace")


class Command:
    """A command under way: one process, or several ranks."""

    def __init__(self, job: Job, folder: Path, errors: Path, variables: Mapping[str, str]) -> None:
        port, count = free_port(), max(1, job.ranks)
        words = job.words(folder)
        self.errors = errors
        self.processes: list[Any] = []
        for rank in range(count):
            ours = dict(variables) | (dict(rank_variables(rank, count, port)) if job.ranks else {})
            self.processes.append(_fork(words, errors, ours) if job.is_forked else _execute(words, errors, ours))

    def code(self) -> int | None:
        """0 where all ended with it, else that of the first that did not; None while one goes on."""
        codes = [p.exitcode if hasattr(p, "exitcode") else p.poll() for p in self.processes]
        return None if None in codes else next((code for code in codes if code), 0)

    def wait(self, seconds: float) -> int | None:
        """The exit code; None where it goes on after so many seconds, and then it is ended."""
        until = time.monotonic() + seconds
        while (code := self.code()) is None and time.monotonic() < until:
            time.sleep(0.02)
        if code is None:
            for process in self.family():
                with contextlib.suppress(psutil.Error):
                    process.kill()
        for process in self.processes:
            process.join() if hasattr(process, "join") else process.wait()
        return code

    def family(self) -> list[psutil.Process]:
        """Its processes and all that they have started."""
        found = list[psutil.Process]()
        for process in self.processes:
            with contextlib.suppress(psutil.Error):
                parent = psutil.Process(process.pid)
                found += [parent, *parent.children(recursive=True)]
        return found

    def kill(self, target: str) -> bool:
        """Kill one of them; False where it is not there."""
        if target.startswith("rank") and hasattr(self.processes[0], "exitcode"):
            pid = self.processes[int(target[-1])].pid
            found = [process for process in self.family() if process.pid == pid]
        else:
            found = [process for process in self.family() if _is_target(process, target, self.processes[0].pid)]
        for process in found[:1]:
            with contextlib.suppress(psutil.Error):
                process.kill()
                return True
        return False


def _is_target(process: psutil.Process, target: str, pid: int) -> bool:
    with contextlib.suppress(psutil.Error):
        if target == "command":
            return bool(process.pid == pid)
        if target == "server":
            return "ServerActor" in " ".join(process.cmdline())
        if target == "child":
            return bool(process.ppid() == pid)
        return bool(process.environ().get("RANK") == target[-1] and "steadytrain" in " ".join(process.cmdline()))
    return False


_STARTING = threading.Lock()


def _fork(words: Sequence[str], errors: Path, variables: Mapping[str, str]) -> Any:
    """Start a command in a process that has torch loaded already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["steadytrain.cli", "steadytrain.training"])
    process = context.Process(target=_call, args=(list(words), str(errors), dict(variables)))
    with _STARTING:
        process.start()
    return process


def _call(words: list[str], errors: str, variables: dict[str, str]) -> None:
    from steadytrain.cli import main as steady

    os.environ.update(variables)
    for number, path in ((1, os.devnull), (2, errors)):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND), number)
    sys.exit(steady(words))


def _execute(words: Sequence[str], errors: Path, variables: Mapping[str, str]) -> subprocess.Popen[bytes]:
    with errors.open("ab") as stream:
        return subprocess.Popen(
            [sys.executable, "-m", "steadytrain", *words],
            env=os.environ | dict(variables),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stream,
        )


@dataclass(frozen=True)
class Sound:
    """A command without a fault: what it made, its operations with their phases, files, and seconds."""

    facts: dict[str, Any]
    operations: list[str]
    files: set[str]
    seconds: float
    logged_seconds: float


@dataclass(frozen=True)
class Kill:
    """One that is planned: its kind, the number of the operation, or the target and when, as a share of the length.

    ``is_logged``: of the time since the first event, which is a small part of a short run.
    """

    kind: str
    operation: int = 0
    target: str = ""
    rank: str = ""
    share: float = 0.0
    is_logged: bool = False


def phase_of(operation: str, job: Job) -> str:
    """The phase of a run in which an operation is done.

    >>> phase_of('write /out/events.jsonl {"v":1,"kind":"Evaluated","ti', Job(_train, run_facts, 1))
    'evaluation'
    """
    if job.phase is not None:
        return job.phase
    if match := re.search(r'"kind":"(\w+)"', operation):
        return EVENTS.get(match[1], "step")
    if operation.startswith("rename") and "/checkpoints/" in operation:
        return "checkpoint rename"
    if "/packed" in operation:
        return "packing"
    return next((phase for name, phase in FILES.items() if name in operation), "start")


def phase_at(run: Path, job: Job) -> str:
    """The phase at an instant, by the newest event in the log."""
    if job.phase is not None:
        return job.phase
    newest = max((event for event in read(run / "events.jsonl")), key=lambda event: event.time, default=None)
    return "start" if newest is None else EVENTS.get(newest.kind, "step")


class Matrix:
    """The trials of all jobs in one folder."""

    def __init__(self, folder: Path, slowdown: float) -> None:
        self.folder = folder
        self.slowdown = slowdown  # of a command by those beside it
        write_data(folder / "data")
        self.jobs = jobs(folder / "data")

    def variables(self, job: Job, folder: Path) -> dict[str, str]:
        """Of each command of a trial."""
        return {
            "STEADYTRAIN_CACHE": str(folder / "cache"),
            "TMPDIR": str(self.folder / "tmp"),
            "TORCH_CPP_LOG_LEVEL": "ERROR",
            **{name: value for name, value in os.environ.items() if name.startswith("AWS_")},
        }

    @functools.cache  # noqa: B019 - there is one matrix
    def sound(self, name: str) -> Sound:
        """Run a job without a fault."""
        job, folder = self.jobs[name], self.new_folder(name, "sound")
        counting, trace = Counting(_beside(folder, ".count")), _beside(folder, ".trace")
        counted = {"FAULT_COUNTER": str(counting.path), "FAULT_FOLDER": f"{folder}/", "FAULT_TRACE": str(trace)}
        began = time.monotonic()
        command = Command(job, folder, _beside(folder, ".err"), self.variables(job, folder) | counted)
        if (code := command.wait(MOST_SECONDS)) != 0:
            text = _beside(folder, ".err").read_text(errors="replace")
            raise SystemExit(f"{name} without a fault ended with {code}:\n{text[-3000:]}")
        seconds = time.monotonic() - began
        text = trace.read_text(errors="replace") if trace.exists() else ""
        operations = text.removesuffix("\n").split("\n") if text else []  # what is written has other ends of lines
        files = _files(folder / "out")
        say(f"{name}: {seconds:.1f} s, {len(operations)} operations")
        times = [event.time for event in read(folder / "out" / "events.jsonl")]
        logged = times[-1] - times[0] if times else 0.0
        return Sound(job.facts(folder / "out"), operations, files, seconds, logged)

    def new_folder(self, name: str, number: object) -> Path:
        folder = self.folder / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.{number}"
        (folder / "out").parent.mkdir()
        if name in ("pack", "pack --procs 2", "tune", "check --index", "report", "predict", "export"):
            (folder / "out").mkdir()
        return folder

    def trial(self, name: str, sound: Sound, kill: Kill, number: int) -> dict[str, Any] | None:
        """One kill, and what came of it; None where the command was over before."""
        job, folder = self.jobs[name], self.new_folder(name, number)
        counting, variables = Counting(_beside(folder, ".count")), self.variables(job, folder)
        faults = {"FAULT_COUNTER": str(counting.path), "FAULT_FOLDER": f"{folder}/"}
        if kill.operation:
            faults |= {"FAULT_AT": str(kill.operation), "FAULT_KIND": "torn" if kill.kind == "torn" else "kill"}
            faults |= {"FAULT_RANK": kill.rank} if kill.rank else {}
        command = Command(job, folder, _beside(folder, ".0.err"), variables | faults)
        phase = ""
        if kill.kind == "instant":
            seconds = sound.seconds
            if kill.is_logged:
                seconds = sound.logged_seconds
                while command.code() is None and not _has_log(folder / "out"):
                    time.sleep(0.01)
            time.sleep(kill.share * seconds * self.slowdown)
            is_struck = command.kill(kill.target)
            phase = phase_at(folder / "out", job)
        codes = [command.wait(MOST_SECONDS)]
        ended = time.monotonic()
        if kill.operation:
            _, met, _, text = counting.read()
            is_struck, phase = bool(met), phase_of(text, job)
        if kill.kind == "instant" and codes[0] == 0 and (job.is_forked or kill.target == "command"):
            is_struck = False  # it had just ended
        if not is_struck:
            say(f"{name} {number}: too late: {kill}, {codes}, {counting.read()}")
            shutil.rmtree(folder)
            return None
        while codes[-1] != 0 and len(codes) < MOST_COMMANDS:
            codes.append(Command(job, folder, _beside(folder, f".{len(codes)}.err"), variables).wait(MOST_SECONDS))
        facts = job.facts(folder / "out") if codes[-1] == 0 else {}
        left = _left_files(folder / "out", sound, job) if codes[-1] == 0 else []
        row = {
            "job": name,
            "number": number,
            "phase": phase,
            "kind": kill.kind,
            "target": kill.target or (f"rank {kill.rank}" if kill.rank else "whoever writes"),
            "operation": counting.read()[3][:160],
            "exit_codes": codes,
            "is_refused": len(codes) > 2 or codes[-1] != 0,
            "unequal": sorted(
                key for key in sound.facts.keys() | facts.keys() if facts.get(key) != sound.facts.get(key)
            ),
            "updates_repeated": _repeated(folder / "out"),
        }
        row["left"] = [*left, *left_processes(counting.path, ended)]
        is_bad = row["is_refused"] or row["unequal"] or row["left"]
        say(f"{name} {number}: {json.dumps(row)}" if is_bad else f"{name} {number}: {kill.kind}, {phase}: {codes}")
        if is_bad:
            for path in sorted(folder.parent.glob(f"{folder.name}.*.err")):
                say(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-6:]))
        else:
            shutil.rmtree(folder)
        return row


def _damage(path: Path, harm: str) -> None:
    """Cut a file in half, flip a bit in its middle, or empty it."""
    content = bytearray(path.read_bytes())
    if harm == "flipped bit":
        content[len(content) // 2] ^= 16
    path.write_bytes(content[: {"torn": len(content) // 2, "empty": 0}.get(harm, len(content))])


def outcome_of(codes: Sequence[int | None], text: str, unequal: Sequence[str]) -> str:
    """What came of a fault, in words; those of ``BROKEN`` break a promise.

    >>> outcome_of([0], "", []), outcome_of([1, 0], "steady: the disk is full", []), outcome_of([0], "", ["weights"])
    ('goes on', 'one line, then the same', 'unequal')
    """
    lines = [line for line in text.splitlines() if line.startswith("steady: ")]
    if "Traceback" in text or codes[0] is None or codes[0] < 0:
        return "crashed"
    if codes[0] and len(lines) != 1:
        return f"{len(lines)} lines"
    if codes[-1]:
        return "one line" if len(codes) == 1 else "refused"
    if unequal:
        return "unequal"
    return "goes on" if len(codes) == 1 else "one line, then the same"


BROKEN = ("crashed", "unequal", "refused", "0 lines", "2 lines", "3 lines")


class Disk:
    """Faults of the disk in the trials of a matrix."""

    def __init__(self, matrix: Matrix) -> None:
        self._matrix = matrix

    def fault(self, what: str, error: str, place: float, number: int) -> dict[str, Any] | None:
        """One error at a kind of write, from an operation on; None where that kind has none of this error."""
        matrix, (name, part) = self._matrix, WRITES[what]
        job, sound, folder = matrix.jobs[name], matrix.sound(name), matrix.new_folder(name, f"d{number}")
        operations = [operation for operation in sound.operations if part in operation.split(" ")[1]]
        if what in AFTERWARDS:
            shutil.copytree(matrix.folder / "sweep.sound" / "out", folder / "out", symlinks=True)
        counting, variables = Counting(_beside(folder, ".count")), matrix.variables(job, folder)
        at = 1 + round(place * (len(operations) - 1))
        faults = {"FAULT_COUNTER": str(counting.path), "FAULT_FOLDER": f"{folder}/", "FAULT_NAME": part}
        faults |= {"FAULT_AT": str(at), "FAULT_KIND": str(getattr(errno, error))}
        faults |= {} if error == "EIO" else {"FAULT_LAST": "1000000000"}
        codes = [Command(job, folder, _beside(folder, ".0.err"), variables | faults).wait(MOST_SECONDS)]
        text = _beside(folder, ".0.err").read_text(errors="replace")
        if not counting.read()[1]:
            return None
        return self._row(
            job,
            folder,
            sound,
            codes,
            text,
            {"write": what, "fault": error, "place": place, "at": f"{at} of {len(operations)}"},
        )

    def _row(
        self, job: Job, folder: Path, sound: Sound, codes: list[int | None], text: str, about: dict[str, Any]
    ) -> dict[str, Any]:
        if codes[0] and "at" in about:
            command = Command(job, folder, _beside(folder, ".1.err"), self._matrix.variables(job, folder))
            codes.append(command.wait(MOST_SECONDS))
        facts = job.facts(folder / "out") if codes[-1] == 0 else {}
        unequal = _differences(facts, sound.facts) if codes[-1] == 0 else []
        lines = [line for line in text.splitlines() if line.startswith("steady: ")]
        row = {**about, "exit_codes": codes, "outcome": outcome_of(codes, text, unequal), "unequal": unequal}
        row["line"] = lines[0].replace(str(folder), "") if lines and codes[0] else ""
        say(json.dumps(row))
        if row["outcome"] in BROKEN:
            for path in sorted(folder.parent.glob(f"{folder.name}.*.err")):
                say(f"--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-9:]))
        return row

    def damages(self, done: Collection[tuple[str, str, float | None]]) -> Iterator[Callable[[], dict[str, Any]]]:
        """For each file that a killed run has, and each harm: a trial, unless it is done."""
        matrix, name = self._matrix, "train FOLDER"
        job, sound, killed = matrix.jobs[name], matrix.sound(name), matrix.new_folder(name, "killed")
        counting = Counting(_beside(killed, ".count"))
        saved = [n for n, line in enumerate(sound.operations, 1) if "checkpoints/.part" in line and "rename" in line]
        faults = {"FAULT_COUNTER": str(counting.path), "FAULT_FOLDER": f"{killed}/", "FAULT_KIND": "kill"}
        faults |= {"FAULT_AT": str(saved[3])}
        Command(job, killed, _beside(killed, ".err"), matrix.variables(job, killed) | faults).wait(MOST_SECONDS)
        files = [path.relative_to(killed) for path in killed.rglob("*") if path.is_file() and path.stat().st_size > 1]
        for file in sorted(files, reverse=True):
            for harm in HARMS:
                if (_kind_of(file), harm, None) not in done:
                    yield functools.partial(self._damaged, job, sound, killed, file, harm)

    def read_damages(self, done: Collection[tuple[str, str, float | None]]) -> Iterator[Callable[[], dict[str, Any]]]:
        """For each command that reads what another has written, each file and each harm: a trial, unless it is done."""
        for name, patterns in READS.items():
            for pattern, harm in itertools.product(patterns, HARMS):
                if (f"{name}, {pattern}", harm, None) not in done:
                    yield functools.partial(self._read_damaged, name, pattern, harm)

    def _read_damaged(self, name: str, pattern: str, harm: str) -> dict[str, Any]:
        matrix, job = self._matrix, self._matrix.jobs[name]
        sound, folder = matrix.sound(name), matrix.new_folder(name, f"{pattern.lstrip('*/')}.{harm}")
        whole = matrix.folder / "sweep.sound" / "out" if name == "sweep" else matrix.folder / "data" / "trained" / "out"
        place = folder / ("out" if name == "sweep" else "run")
        shutil.copytree(whole, place, symlinks=True)
        _damage(min(place.glob(pattern)), harm)
        errors = _beside(folder, ".0.err")
        code = Command(job, folder, errors, matrix.variables(job, folder)).wait(MOST_SECONDS)
        about = {"write": f"{name}, {pattern}", "fault": harm}
        return self._row(job, folder, sound, [code], errors.read_text(errors="replace"), about)

    def _damaged(self, job: Job, sound: Sound, killed: Path, file: Path, harm: str) -> dict[str, Any]:
        kept = killed.with_name(f"{killed.name}.kept")
        with _STARTING:  # the paths in its files are of this folder
            if not kept.exists():
                shutil.copytree(killed, kept, symlinks=True)
            shutil.rmtree(killed)
            shutil.copytree(kept, killed, symlinks=True)
            _damage(killed / file, harm)
        errors = _beside(killed, ".0.err")
        errors.write_bytes(b"")
        codes = [Command(job, killed, errors, self._matrix.variables(job, killed)).wait(MOST_SECONDS)]
        return self._row(
            job, killed, sound, codes, errors.read_text(errors="replace"), {"write": _kind_of(file), "fault": harm}
        )


def _kind_of(file: Path | str) -> str:
    """A file's name without what differs from run to run."""
    return re.sub(r"\d{8}|[0-9a-f]{8,}", "...", str(file))


def read_rows(path: Path | None) -> list[dict[str, Any]]:
    """The rows of earlier commands; none where no file is given, or it is not there."""
    return [] if path is None or not path.exists() else [json.loads(line) for line in path.read_text().splitlines()]


def add_rows(path: Path | None, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Append rows to the file, if one is given, and return them."""
    if path is not None:
        with path.open("a") as file:
            file.writelines(f"{json.dumps(row)}\n" for row in rows)
    return rows


def left_processes(counter: Path, ended: float) -> list[str]:
    """Processes of a trial that still run half a minute after the killed command has ended; they are ended."""
    while processes := list(_of_trial(counter)):
        if time.monotonic() - ended > 30:
            break
        time.sleep(0.2)
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return [f"process {name}" for name in sorted({process.name() for process in processes if process.is_running()})]


def _of_trial(counter: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("FAULT_COUNTER") == str(counter):
                yield process


def _differences(facts: Mapping[str, Any], sound: Mapping[str, Any]) -> list[str]:
    return sorted(key for key in sound.keys() | facts.keys() if facts.get(key) != sound.get(key))


def _has_log(run: Path) -> bool:
    path = run / "events.jsonl"
    return path.exists() and path.stat().st_size > 0


def _beside(folder: Path, suffix: str) -> Path:
    return folder.with_name(folder.name + suffix)


def _files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _left_files(folder: Path, sound: Sound, job: Job) -> list[str]:
    """Files that a sound command does not leave; of asynchronous workers, which updates are saved depends on time."""
    files = _files(folder)
    if job.facts is not asynchronous_facts:
        return sorted(files - sound.files)
    return sorted({*map(_kind_of, files)} - {*map(_kind_of, sound.files)})


def _repeated(run: Path) -> int | None:
    """Updates made once more than without a kill; None of what makes none."""
    steps = [event for event in read(run / "events.jsonl") if isinstance(event, Step)]
    return len(steps) - len({event.step for event in steps}) if steps else None


def plan(job: Job, sound: Sound, draw: random.Random, phases: Sequence[str]) -> Iterator[Kill]:
    """One kill after another; some of them may come too late."""
    by_phase = dict[str, list[int]]()
    for number, operation in enumerate(sound.operations, 1):
        if not phases or phase_of(operation, job) in phases:
            by_phase.setdefault(phase_of(operation, job), []).append(number)
    for number in itertools.count():
        target = job.targets[number % len(job.targets)]
        if not by_phase or draw.random() < job.instants:
            is_logged = sound.logged_seconds > 0 and draw.random() < 0.6
            yield Kill("instant", target=target, share=draw.uniform(0.02, 0.98), is_logged=is_logged)
            continue
        place = draw.choice(by_phase[list(by_phase)[number % len(by_phase)]])
        is_write = sound.operations[place - 1].startswith("write")
        kind = "torn" if is_write and draw.random() < 0.4 else "before"
        others = sum("events-1.jsonl" in line for line in sound.operations)
        if target == "rank 1" and others:  # rank 0 makes almost all operations: the other's count from its own first
            yield Kill(kind, draw.randint(1, others), rank="1")
        else:
            yield Kill(kind, place)


def table(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a job and a phase."""
    keys = dict.fromkeys((row["job"], row["phase"]) for row in rows)
    summary = []
    for job, phase in keys:
        of_key = [row for row in rows if (row["job"], row["phase"]) == (job, phase)]
        repeated = [row["updates_repeated"] for row in of_key if row["updates_repeated"] is not None]
        summary.append(
            {
                "job": job,
                "phase": phase,
                "kills": len(of_key),
                "kinds": dict(Counter(row["kind"] for row in of_key)),
                "refused": sum(row["is_refused"] for row in of_key),
                "unequal": sum(bool(row["unequal"]) for row in of_key),
                "left": sum(bool(row["left"]) for row in of_key),
                "updates_repeated": {"median": median(repeated), "most": max(repeated)} if repeated else None,
            }
        )
    return summary


SHORT = {"goes on": "on", "one line, then the same": "line", "one line": "line"}


def kills_table(document: Mapping[str, Any]) -> list[str]:
    """The lines of the table of kills."""
    lines = ["| command | phase | kills | torn, at an instant | refused | unequal | left behind | updates made again |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    total = Counter[str]()
    for row in document["table"]:
        repeated, kinds = row["updates_repeated"], row["kinds"]
        again = f"{repeated['median']:g}, at most {repeated['most']}" if repeated else "-"
        counts = {name: row[name] for name in ("kills", "refused", "unequal", "left")}
        total.update(counts)
        lines += [
            f"| `{row['job']}` | {row['phase']} | {row['kills']} | {kinds.get('torn', 0)}, {kinds.get('instant', 0)}"
            f" | {row['refused']} | {row['unequal']} | {row['left']} | {again} |"
        ]
    sums = " | ".join(f"**{total[name]}**" for name in ("refused", "unequal", "left"))
    return [*lines, f"| **all** | | **{total['kills']}** | | {sums} | |"]


def disk_table(document: Mapping[str, Any]) -> list[str]:
    """The lines of the tables of the disk's errors, and of damage between two starts."""
    lines = list[str]()
    for heads in (ERRORS, HARMS):
        rows = {what: row for what, row in document["table"].items() if row.keys() & set(heads)}
        lines += [f"| {'kind of write' if heads is ERRORS else 'file'} | {' | '.join(heads)} |"]
        lines += ["|---" * (1 + len(heads)) + "|"]
        for what, row in rows.items():
            cells = [
                ", ".join(f"{n} {SHORT.get(name, name)}" for name, n in row.get(head, {}).items()) for head in heads
            ]
            lines += [f"| {what} | {' | '.join(cell or '-' for cell in cells)} |"]
        lines += [""]
    return lines[:-1]


def write_tables() -> None:
    """Put the tables of the saved results into docs/laboratory.md, between their marks."""
    text = DOCUMENT.read_text(encoding="utf-8")
    for name, lines_of in (("kill_matrix", kills_table), ("disk_faults", disk_table)):
        path = machine.RESULTS / f"{name}.json"
        if path.exists():
            lines = "\n".join(lines_of(json.loads(path.read_text(encoding="utf-8"))))
            before, mark, rest = text.partition(f"<!-- {name} -->\n")
            _, end, after = rest.partition(f"<!-- end of {name} -->")
            assert mark and end, f"{DOCUMENT} has no marks of {name}"
            text = f"{before}{mark}\n{lines}\n\n{end}{after}"
    DOCUMENT.write_text(text, encoding="utf-8")


def say(line: str) -> None:
    """Progress."""
    print(line, file=sys.stderr, flush=True)


def compiled(folder: Path) -> Path:
    """The library that injects faults, loaded by all processes that are started from here."""
    library = folder / "file_faults.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl", "-pthread"], check=True)
    return library


def disk(matrix: Matrix, args: argparse.Namespace) -> int:
    """Inject the disk's faults, record; return 1 where a promise was broken."""
    (matrix.folder / "data" / "trained").mkdir()
    command = Command(matrix.jobs["train"], matrix.folder / "data" / "trained", matrix.folder / "trained.err", {})
    assert command.wait(MOST_SECONDS) == 0
    disk, rows = Disk(matrix), read_rows(args.rows)
    done = {(row["write"], row["fault"], row.get("place")) for row in rows}
    writes = [what for what in WRITES if what in args.writes]
    faults = [(what, error, place) for what in writes for error in ERRORS for place in PLACES]
    faults = [fault for fault in faults if fault not in done]
    with ThreadPoolExecutor(args.at_once) as pool:
        for what in dict.fromkeys(what for what, *_ in faults):
            matrix.sound(WRITES[what][0])
            trials = [
                pool.submit(disk.fault, *fault, number) for number, fault in enumerate(faults) if fault[0] == what
            ]
            rows += add_rows(args.rows, [row for trial in trials if (row := trial.result()) is not None])
    damages = {"damage": disk.damages, "damage read": disk.read_damages}
    for trial in itertools.chain(*(damages[name](done) for name in args.writes if name in damages)):
        rows += add_rows(args.rows, [trial()])
    return record_disk(rows, args)


def record_disk(rows: Sequence[Mapping[str, Any]], args: argparse.Namespace) -> int:
    """Record the outcomes of the disk's faults; return 1 where a promise was broken."""
    summary = dict[str, dict[str, dict[str, int]]]()
    for row in rows:
        outcomes = summary.setdefault(row["write"], {}).setdefault(row["fault"], {})
        outcomes[row["outcome"]] = outcomes.get(row["outcome"], 0) + 1
    name = machine.of_cases("disk_faults", args.writes, [*WRITES, *DAMAGES])
    machine.record(name, {"faults": len(rows), "table": summary, "rows": rows}, save=args.save)
    if args.save:
        write_tables()
    return int(any(row["outcome"] in BROKEN for row in rows))


def main() -> int:
    """Kill, compare, record; return 1 where a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=300)
    parser.add_argument("--jobs", nargs="+", help="default: all")
    parser.add_argument("--phases", nargs="+", default=[], help="of kills before an operation; default: all")
    parser.add_argument("--seed", type=int, default=0, help="of what is killed, and when")
    parser.add_argument("--seconds", type=float, default=7200, help="no kill begins later")
    parser.add_argument("--at-once", type=int, default=2, help="trials at a time")
    parser.add_argument(
        "--rows", type=Path, help="a file that gets each row at once, and whose rows are not made again"
    )
    parser.add_argument("--disk", action="store_true", help="faults of the disk instead of kills")
    parser.add_argument("--writes", nargs="+", default=[*WRITES, *DAMAGES], help="of --disk; default: all")
    parser.add_argument("--table", action="store_true", help="only write the tables of the saved results")
    parser.add_argument("--save", action="store_true")
    args = parser.parse_args()
    if args.table:
        write_tables()
        return 0
    if args.seconds <= 0:  # of earlier commands alone
        rows = read_rows(args.rows)
        return record_disk(rows, args) if args.disk else record_kills(rows, args.jobs or killed_jobs(), args)
    os.environ |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    end, rows = time.monotonic() + args.seconds, read_rows(args.rows)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kills-")))
        (folder / "tmp").mkdir()
        os.environ["LD_PRELOAD"] = str(compiled(folder))
        matrix = Matrix(folder, max(1.0, args.at_once / 2))
        _fork(["--version"], folder / "warm.err", {}).join()  # loads what the others have
        if args.disk:
            return disk(matrix, args)
        chosen = args.jobs or killed_jobs()
        shares = sum(matrix.jobs[name].share for name in chosen)
        if any(matrix.jobs[name].needs_store for name in chosen):
            stack.enter_context(object_store(folder / "store.log"))
        for name in chosen:
            job, draw = matrix.jobs[name], random.Random(f"{args.seed} {name}")
            left = max(1, round(args.kills * job.share / shares)) - sum(row["job"] == name for row in rows)
            if left <= 0 or time.monotonic() > end:
                continue
            sound = matrix.sound(name)
            done_before = {row["number"] for row in rows if row["job"] == name}
            drawn = itertools.islice(enumerate(plan(job, sound, draw, args.phases)), MOST_TRIALS)
            planned = (item for item in drawn if item[0] not in done_before)
            with ThreadPoolExecutor(args.at_once) as pool:
                while batch := list(itertools.islice(planned, min(args.at_once, left))):
                    if time.monotonic() > end:
                        break
                    trials = [pool.submit(matrix.trial, name, sound, kill, number) for number, kill in batch]
                    done = [row for trial in trials if (row := trial.result()) is not None]
                    left -= len(done)
                    rows += add_rows(args.rows, done)
    return record_kills(rows, chosen, args)


def record_kills(rows: Sequence[Mapping[str, Any]], chosen: Sequence[str], args: argparse.Namespace) -> int:
    """Record what came of the kills; return 1 where a promise was broken."""
    document = {"seed": args.seed, "save_steps": SAVE_STEPS, "kills": len(rows), "table": table(rows), "rows": rows}
    machine.record(machine.of_cases("kill_matrix", chosen, killed_jobs()), document, save=args.save)
    if args.save:
        write_tables()
    return int(any(row["is_refused"] or row["unequal"] or row["left"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
