"""Processes forked from one that has loaded torch, where loading it is not the fact: that takes a core two seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import IO

import pytest

from steadytrain.cli import main
from steadytrain.events import Event, EventLog, Step
from steadytrain.launch import supervise
from steadytrain.machine.children import die_with_parent

PROJECT = Path(__file__).parents[1]


def context() -> ForkServerContext:
    """What forks them, with all loaded that each would load anew."""
    forks = multiprocessing.get_context("forkserver")
    forks.set_forkserver_preload(["hypothesis.strategies", "pytest", "steadytrain.training", "torch._dynamo"])
    return forks


@contextmanager
def importable() -> Iterator[None]:
    """Processes that are started meanwhile find the modules of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(PROJECT)
        yield


def start(
    function: Callable[..., object],
    *arguments: object,
    output: Path | str = os.devnull,
    errors: Path | str = os.devnull,
    variables: Mapping[str, str] | None = None,
) -> ForkServerProcess:
    """Start ``function(*arguments)`` in a process of its own; its exit code is what is returned, None for 0.

    Args:
        function: of a module's top level, such as ``steadytrain.cli.main``, or :func:`steady`.
        output, errors: what its standard output and its standard error are written to.
        variables: of its environment, besides those of this process.
    """
    files = str(output), str(errors)
    process = context().Process(target=_call, args=(function, arguments, files, dict(variables or {})))
    with importable():
        process.start()
    return process


def _call(
    function: Callable[..., object], arguments: tuple[object, ...], files: tuple[str, str], variables: dict[str, str]
) -> None:
    os.environ.update(variables)
    for number, path in enumerate(files, 1):
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY), number)
    sys.exit(function(*arguments))  # type: ignore[arg-type]


def stand_at(gates: Mapping[int, Path], function: Callable[..., int], *arguments: object) -> int:
    """Call a function that trains; when an update of ``gates`` is in the log, the run stands until its file is there.

    So whoever waits for an update finds the run at it, however late it looks. A signal that comes meanwhile is heard.
    """
    append = EventLog.append

    def append_and_stand(log: EventLog, event: Event) -> Event:
        written = append(log, event)
        if isinstance(event, Step) and (gate := gates.get(event.step)) is not None:
            while not gate.exists():
                time.sleep(0.01)
        return written

    EventLog.append = append_and_stand  # type: ignore[method-assign, assignment]
    return function(*arguments)


def steady(words: list[str]) -> int:
    """``steady WORDS``, whose ranks (``--procs``) are forked from it; a process of :func:`start` calls it."""

    def start_rank(command: Sequence[str], variables: Mapping[str, str], errors: IO[bytes] | None) -> Rank:
        own = list(command[command.index("steadytrain") + 1 :]) if "steadytrain" in command else words
        if pid := os.fork():
            return Rank(pid)
        code = 1
        try:
            die_with_parent()
            for name in supervise.FORWARDED:
                signal.signal(getattr(signal, name), signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            os.environ.update(variables)
            if errors is not None:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                os.dup2(errors.fileno(), 2)
            code = main(own)
        except BaseException:  # noqa: BLE001 - the edge of the process
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    supervise.start_rank = start_rank  # type: ignore[assignment]
    return main(words)


class Rank:
    """A forked process, with what those who wait for ranks ask of a ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None and (status := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(status[1])
        return self.returncode

    def wait(self) -> int:
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)
