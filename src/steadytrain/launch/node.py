"""The ranks of one machine: started, heard, and ended together.

``python -m steadytrain.launch.node --size 4 --procs 2 --first 2 --address gpu1 --port 29500 -- -m steadytrain train``

Each rank is this interpreter with the words after the dashes, told by its environment which rank it is. Rank 0's
standard output is passed on as it is; every other line goes out behind ``[rank machine]``. Where a rank ends badly, or
this process is told to end, the others get SIGTERM, by which they save, and SIGKILL after the grace. With ``--held``
the first line of standard input holds further variables, as JSON, and its end is a request to end.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from steadytrain.launch.endings import exit_code, verdict
from steadytrain.launch.ranks import die_with_parent, variables

_STOPS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")

_Happened = queue.SimpleQueue[int | None]  # the place of a process that ended; None: a request to end


def main(argv: Sequence[str] | None = None) -> int:
    """Run the ranks; the exit code of all of them."""
    told = _parsed(argv)
    given = dict(os.environ)
    if told.held:
        given |= json.loads(_line() or b"{}")
    happened: _Happened = queue.SimpleQueue()
    with _requests(happened):
        first = told.first if told.node is None else told.node * told.procs
        mine = [None] if told.alone else range(first, first + told.procs)
        ranks = [_start(told, given, rank, first) for rank in mine]
        heard = [thread for rank, one in zip(mine, ranks, strict=True) for thread in _listeners(told.name, rank, one)]
        heard += [threading.Thread(target=_tell_end, args=(place, one, happened)) for place, one in enumerate(ranks)]
        for thread in heard:
            thread.start()
        if told.held:
            threading.Thread(target=_tell_silence, args=(happened,), daemon=True).start()
        codes = _end_together(ranks, happened, told.grace)
        for thread in heard:
            thread.join()
    return verdict(codes)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="steadytrain.launch.node", description="Start the ranks of one machine.")
    parser.add_argument("--size", type=int, default=1, help="ranks in all")
    parser.add_argument("--procs", type=int, default=1, help="ranks here")
    parser.add_argument("--first", type=int, default=0, help="the lowest rank here")
    parser.add_argument("--node", type=int, help="in its place, of machines with as many ranks each: which one this is")
    parser.add_argument("--address", default="127.0.0.1", help="of rank 0's machine")
    parser.add_argument("--port", type=int, default=29500, help="where the ranks meet")
    parser.add_argument("--name", default=platform.node(), help="of this machine, in front of lines")
    parser.add_argument("--grace", type=float, default=60.0, help="seconds for ranks that are asked to end")
    parser.add_argument(
        "--held", action="store_true", help="variables from standard input, whose end is a request to end"
    )
    parser.add_argument("--alone", action="store_true", help="one process, which starts the ranks itself")
    parser.add_argument("program", nargs="+", help="what follows the interpreter")
    return parser.parse_args(argv)


def _start(told: argparse.Namespace, given: Mapping[str, str], rank: int | None, first: int) -> subprocess.Popen[bytes]:
    ours: Mapping[str, str] = {}
    if rank is not None:
        ours = variables(rank, told.size, told.port, first=first, here=told.procs, address=told.address)
    return subprocess.Popen(
        [sys.executable, *told.program],
        env={**given, **ours},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=die_with_parent,
    )


def _listeners(name: str, rank: int | None, process: subprocess.Popen[bytes]) -> list[threading.Thread]:
    before = b"[%s] " % (name if rank is None else f"{rank} {name}").encode()
    assert process.stdout is not None and process.stderr is not None
    # torchrun's agent has rank 0's output among that of others; what comes from it is passed on as it is.
    plain = b"" if not rank else before
    return [
        threading.Thread(target=pass_on, args=(process.stdout, sys.stdout.buffer, plain)),
        threading.Thread(target=pass_on, args=(process.stderr, sys.stderr.buffer, before)),
    ]


def pass_on(source: IO[bytes], sink: IO[bytes], before: bytes) -> None:
    """Copy whole lines, each behind ``before``, as they come. A reader that is gone stops nobody."""
    with source:
        for line in source:
            with suppress(OSError, ValueError):
                sink.write(before + line if line.endswith(b"\n") else before + line + b"\n")
                sink.flush()


def _tell_end(place: int, process: subprocess.Popen[bytes], happened: _Happened) -> None:
    process.wait()
    happened.put(place)


def _line() -> bytes:
    """Of standard input; nothing follows it. Read without a buffer, which a thread that waits would hold at the end."""
    told = b""
    while not told.endswith(b"\n") and (part := os.read(0, 1 << 16)):
        told += part
    return told


def _tell_silence(happened: _Happened) -> None:
    with suppress(OSError):
        while os.read(0, 1 << 16):
            pass
    happened.put(None)


@contextmanager
def _requests(happened: _Happened) -> Iterator[None]:
    """A signal to end is taken for a request, not for the end."""
    numbers = [getattr(signal, name) for name in _STOPS if hasattr(signal, name)]
    before = {number: signal.signal(number, lambda *_: happened.put(None)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end_together(ranks: Sequence[subprocess.Popen[bytes]], happened: _Happened, grace: float) -> list[int]:
    """Wait for all; once one ends badly, or a request comes, no longer than ``grace``. Their codes, as they ended."""
    codes: list[int] = []
    end: float | None = None
    while len(codes) < len(ranks):
        try:
            place = happened.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
        except queue.Empty:
            for one in ranks:
                one.kill()
            end = None  # nothing outlives SIGKILL for long
            continue
        if place is not None:
            codes.append(exit_code(ranks[place].returncode))
        if end is None and (place is None or codes[-1]) and len(codes) < len(ranks):
            end = time.monotonic() + grace
            for one in ranks:
                one.terminate()
    return codes


if __name__ == "__main__":
    sys.exit(main())
