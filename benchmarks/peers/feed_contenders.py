"""The driver's side of a contender: its process, its turns, and what they cost.

Contenders take turns: all are made first, and each is stopped as soon as it has answered (SIGSTOP to it and to all it
started), so that it makes nothing in the time of others: its next turn begins with queues as empty as this one ended.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from peers import feed_works
from peers.feed_peers import Peer, Setting
from peers.feed_works import Work

HERE = Path(__file__).resolve().parent
QUIET = {"MXNET_SUBGRAPH_BACKEND": "NONE", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
PR_SET_PDEATHSIG = 1  # of prctl(2)
MOST_ANSWER_SECONDS = 300.0
MOST_FILLED_SECONDS = 5.0  # that a contender may take to fill its queues


class ContenderError(Exception):
    """A contender that gives no answer; its text is its last words."""


@dataclass
class Contender:
    """A running process that makes batches on the given processors, and what it did in its turns.

    Args:
        peer, python, work, phase: what runs, by which interpreter, on what.
        setting: one of the peer's.
        cpus: processors that it is pinned to.
        kept: images that it takes first of all, where it then keeps them.
    """

    peer: Peer
    python: Path
    work: Work
    phase: str
    setting: Setting
    cpus: list[int]
    kept: int = 0
    images_per_second: list[float] = field(default_factory=list)
    images_per_cpu_second: list[float] = field(default_factory=list)

    def __enter__(self) -> Contender:
        job = self.work.job(self.phase, len(self.cpus), self.setting)
        began = time.perf_counter()
        self._said = tempfile.TemporaryFile()
        self._process = subprocess.Popen(
            [str(self.python), str(HERE / self.peer.script), json.dumps(job)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            bufsize=1,
            env={**os.environ, **QUIET, "OMP_NUM_THREADS": str(len(self.cpus))},
            start_new_session=True,
            preexec_fn=partial(_begin, self.cpus),
        )
        try:
            self.first = self.answer()
        except BaseException:
            self.close()
            raise
        self.first["start_seconds"] = time.perf_counter() - began
        self.stop()
        if self.kept:
            self.first["first_pass_images_per_second"] = _speed(self.ask("take", self.kept))
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End it and all it started; twice is fine."""
        if self._said.closed:
            return
        for end in (signal.SIGKILL, signal.SIGCONT):
            self._signal(end)
        self._process.communicate()
        self._said.close()

    def ask(self, verb: str, value: object) -> dict[str, Any]:
        """Let it do something and stop it again."""
        self.send(verb, value)
        answer = self.answer()
        self.stop()
        return answer

    def turn(self, seconds: float) -> None:
        """Take a turn that counts."""
        answer = self.ask("turn", seconds)
        self.images_per_second.append(answer["images"] / answer["seconds"])
        self.images_per_cpu_second.append(answer["images"] / answer["cpu_seconds"])

    def alone(self, seconds: float) -> dict[str, Any]:
        """Measure without other contenders: speed in passing, memory, start."""
        speed = _speed(self.ask("turn", seconds))
        return {
            "setting": self.setting,
            "images_per_second": speed,
            **self.memory(),
            **{name: round(value, 3) for name, value in self.first.items() if isinstance(value, float)},
        }

    def send(self, verb: str, value: object) -> None:
        """Let it go on, with something to do."""
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        try:
            print(verb, value, file=self._process.stdin, flush=True)
        except BrokenPipeError as error:
            raise ContenderError(self._last_words()) from error

    def stop(self) -> None:
        """Stop its processes until it is asked again."""
        self._signal(signal.SIGSTOP)

    def psnr(self, path: Path) -> float:
        """Return how near its evaluation comes to Pillow's, in decibels."""
        self.ask("look", path)
        return round(feed_works.psnr(np.load(path), self.work), 1)

    def memory(self) -> dict[str, int]:
        """Return memory of it and all it started, shared pages counted once, queues full; and how much are files."""
        self._fill()
        held = [_held(process.pid) for process in self._processes()]
        return {
            key: sum(process[name] for process in held)
            for key, name in (("pss_bytes", "Pss"), ("file_bytes", "Pss_File"))
        }

    def figures(self) -> dict[str, Any]:
        """Return medians over the rounds, and the rounds."""
        return {
            "images_per_second": round(median(self.images_per_second), 1),
            "images_per_cpu_second": round(median(self.images_per_cpu_second), 1),
            "rounds": [round(rate, 1) for rate in self.images_per_second],
        }

    def answer(self) -> dict[str, Any]:
        """Read its next answer."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], MOST_ANSWER_SECONDS)[0]:
            raise ContenderError(f"no answer within {MOST_ANSWER_SECONDS:.0f} seconds")
        line = self._process.stdout.readline()
        if not line:
            raise ContenderError(self._last_words())
        document: dict[str, Any] = json.loads(line)
        return document

    def _last_words(self) -> str:
        self._said.seek(0)
        lines = [line.strip() for line in self._said.read().decode(errors="replace").splitlines() if line.strip()]
        return lines[-1] if lines else f"it ended with {self._process.wait()}"

    def _signal(self, number: signal.Signals) -> None:
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return

    def _fill(self) -> None:
        """Let it make batches until it has nowhere to put them."""
        self._signal(signal.SIGCONT)
        until = time.perf_counter() + MOST_FILLED_SECONDS
        before, busy = -1.0, self._cpu_seconds()
        while busy - before > 0.01 and time.perf_counter() < until:
            time.sleep(0.2)
            before, busy = busy, self._cpu_seconds()
        self.stop()

    def _processes(self) -> list[psutil.Process]:
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _cpu_seconds(self) -> float:
        times = (process.cpu_times() for process in self._processes())
        return sum(time.user + time.system for time in times)


def together(contenders: Sequence[Contender], seconds: float) -> float:
    """Take a turn with several at the same time: images per second of all of them."""
    for contender in contenders:
        contender.send("turn", seconds)
    answers = [entry.answer() for entry in contenders]
    for contender in contenders:
        contender.stop()
    return float(sum(answer["images"] / answer["seconds"] for answer in answers))


def _speed(document: dict[str, Any]) -> float:
    return float(round(document["images"] / document["seconds"], 1))


def _begin(cpus: Sequence[int]) -> None:
    """Set, in the child before its program, its processors and its end with ours, since a stopped one would stay."""
    os.sched_setaffinity(0, cpus)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _held(pid: int) -> Counter[str]:
    """Read the fields of /proc/PID/smaps_rollup in bytes; zeros where the process has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    except OSError:
        return Counter()
    return Counter({name: 1024 * int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)})
