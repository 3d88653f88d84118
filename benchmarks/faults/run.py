"""One run in processes of its own, forked from this one, which has torch loaded: trained as ``steady train`` does."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import counted
from faults.around import Surroundings, enter, surroundings
from faults.patches import PATCHES, at_first_batch
from steadytrain.launch.supervise import free_port, rank_variables
from steadytrain.machine import process
from steadytrain.machine.procfs import processor_seconds

LONGEST_SECONDS = 240.0


@dataclass(frozen=True, kw_only=True)
class Done:
    """A run that came to its end.

    Args:
        folder: the run's.
        wall_seconds: from the start of the process to its end, of both where it was killed and started again.
        counted_seconds: that were injected into its training thread.
        others: cores that were taken meanwhile by what is none of the benchmark: other processes and virtual machines.
    """

    folder: Path
    wall_seconds: float
    counted_seconds: float
    others: float


class RunFailedError(Exception):
    """The run did not end as it should; its output says why."""


def command(folder: Path, data: Path, model: str, settings: Mapping[str, Any]) -> list[str]:
    """Return the arguments of ``steady``."""
    words = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    return ["train", str(data), "--model", model, "--run", str(folder), *(x for word in words for x in ("--set", word))]


def run(
    argv: Sequence[str], folder: Path, *, patches: Mapping[str, Any], around: Mapping[str, Any], ranks: int = 1
) -> Done:
    """Train it by so many ranks, and again where it is killed. Raises RunFailedError."""
    kill_at = around.get("kill_at")
    began, foreign = time.perf_counter(), _foreign_seconds()
    with surroundings(dict(around), folder.parent) as outer:
        wall = _attempt(argv, folder, patches, outer, kill_at, ranks)
        if kill_at is not None:
            wall += _attempt(argv, folder, patches, outer, None, ranks)
    others = max(0.0, _foreign_seconds() - foreign) / (time.perf_counter() - began)
    counted = [json.loads(_counted(folder, rank).read_text()) for rank in range(ranks)]
    training = max(of_rank["training"] for of_rank in counted)
    return Done(folder=folder, wall_seconds=wall, counted_seconds=training, others=others)


def _foreign_seconds() -> float:
    """Return the seconds of the machine's processors that neither this process nor a child that has ended took."""
    mine = os.times()
    taken = sum(seconds.busy + seconds.steal for seconds in processor_seconds().values())
    return taken - (mine.user + mine.system + mine.children_user + mine.children_system)


def _attempt(
    argv: Sequence[str],
    folder: Path,
    patches: Mapping[str, Any],
    outer: Surroundings,
    kill_at: int | None,
    ranks: int,
) -> float:
    output = folder.with_suffix(".out")
    began = time.perf_counter()
    sys.stdout.flush()
    sys.stderr.flush()
    port, children = free_port(), []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            if ranks > 1:
                os.environ.update(rank_variables(rank, ranks, port))
            _child(argv, folder, patches, outer, output, rank)
        children.append(child)
    try:
        statuses = [_wait(child, folder, began, kill_at) for child in children]
    finally:
        for child in children:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child, signal.SIGKILL)  # what it may have left behind
    seconds = time.perf_counter() - began
    expected = 0 if kill_at is None else -signal.SIGKILL
    if any(os.waitstatus_to_exitcode(status) != expected for status in statuses):
        text = output.read_text(errors="replace") if output.exists() else ""
        raise RunFailedError(f"{' '.join(argv)} ended with {statuses} after {seconds:.0f} s: {text[-1500:]}")
    return seconds


def _wait(child: int, folder: Path, began: float, kill_at: int | None) -> int:
    """Wait for its end, or bring it about. On Ctrl-C it is killed as well."""
    try:
        while True:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return status
            late = time.perf_counter() - began > LONGEST_SECONDS
            if late or (kill_at is not None and _steps(folder) >= kill_at):
                break
            time.sleep(0.02)
    except BaseException:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        raise
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]


def _steps(folder: Path) -> int:
    events = folder / "events.jsonl"
    return events.read_bytes().count(b'"kind":"Step"') if events.exists() else 0


def _child(
    argv: Sequence[str], folder: Path, patches: Mapping[str, Any], outer: Surroundings, output: Path, rank: int
) -> None:
    """Run the command in the forked process; never return."""
    code = 70
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _join(outer.joins)
        if outer.network is not None:
            enter(outer.network)
        to = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(to, 1)
        os.dup2(to, 2)
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - the old ones take them for other files
        sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
        for name, value in patches.items():
            PATCHES[name](value)
        if outer.joins_late:
            at_first_batch(lambda: _join(outer.joins_late))
        _start_anew()
        from steadytrain.cli import main

        code = main(list(argv))
        _counted(folder, rank).write_text(json.dumps(counted.so_far()))
    except BaseException:  # noqa: BLE001 - the process's edge: its output tells
        with output.open("a") as file:
            traceback.print_exc(file=file)
    finally:
        _end(code)


def _start_anew() -> None:
    """Set the start of the process to the time of the fork."""
    process.share_cores()


def _join(groups: Sequence[Path]) -> None:
    for group in groups:
        group.write_text(str(os.getpid()))


def _end(code: int) -> None:
    with contextlib.suppress(Exception):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _counted(folder: Path, rank: int) -> Path:
    return folder.with_suffix(f".counted-{rank}.json")
