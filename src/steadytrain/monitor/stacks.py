"""Where the threads of this process are: in words, and whole, in a file.

Nothing here reads a source file: the disk that they lie on may be the very one that does not answer.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import FrameType

from steadytrain.machine.process_tree import ProcessTree, read_stat, thread_ids
from steadytrain.machine.procfs import read

# Whoever holds a thread on purpose: it moves on when its user wants it to.
_DEBUGGERS = frozenset({"bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy"})
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk or a network file system", "T": "stopped"}


def frames(thread: int) -> Iterator[FrameType]:
    """The Python frames of a thread, innermost first; none where it has ended.

    Args:
        thread: as ``threading.get_ident()`` has it.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def package(frame: FrameType) -> str:
    """The name of the module whose code it is."""
    return str(frame.f_globals.get("__name__", ""))


def is_debugged(thread: int) -> bool:
    """Whether a debugger holds it."""
    return any(package(frame).partition(".")[0] in _DEBUGGERS for frame in frames(thread))


def place(frame: FrameType) -> str:
    """Function, file and line: ``read (steadytrain/data/recordio/reader.py:88)``."""
    parts = Path(frame.f_code.co_filename).parts
    near = next((at + 1 for at in range(len(parts) - 1, -1, -1) if parts[at] in ("site-packages", "src")), None)
    shown = "/".join(parts[near:] if near is not None else parts[-2:])
    return f"{frame.f_code.co_name} ({shown}:{frame.f_lineno})"


def where(thread: int) -> str:
    """The innermost Python frame of a thread that is not in the standard library."""
    telling = _telling(thread)
    return "no Python code" if telling is None else place(telling)


def _telling(thread: int) -> FrameType | None:
    within = list(frames(thread))
    outside = (frame for frame in within if package(frame).partition(".")[0] not in sys.stdlib_module_names)
    return next(outside, within[0] if within else None)


def busy(prefix: str) -> dict[str, str]:
    """Threads whose names begin so, and where each is, in words; without those that wait for something to do."""
    threads = sorted((thread.name, thread.ident or 0) for thread in threading.enumerate())
    at_work = [(name, ident) for name, ident in threads if name.startswith(prefix) and not _waits(ident)]
    return {name: f"is in {where(ident)}" for name, ident in at_work}


def _waits(thread: int) -> bool:
    innermost = next(frames(thread), None)
    return innermost is None or package(innermost) in ("threading", "queue", "selectors")


def dump(folder: Path, head: str, rank: int = 0) -> Path:
    """Write the stacks of all threads into a new file of a folder: ``stacks-1.txt`` and so on.

    First ``head``, then a line for each thread (its name, its number, what the kernel says of it, where it is) and for
    each child (what the kernel says of its threads), then the stacks as faulthandler writes them, which needs no
    thread to cooperate.
    """
    number = 1
    while True:
        path = folder / (f"stacks-{number}.txt" if rank == 0 else f"stacks-{rank}-{number}.txt")
        try:
            with path.open("x", encoding="utf-8", errors="backslashreplace") as file:
                file.write(head + "\n\n" + "".join(f"{line}\n" for line in _threads()) + "\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            return path
        except FileExistsError:
            number += 1


def _threads() -> Iterator[str]:
    for thread in sorted(threading.enumerate(), key=lambda thread: thread.name):
        number = thread.ident or 0
        state = _state(f"/proc/self/task/{thread.native_id}")
        yield f"{thread.name}: thread {number:#018x}, {state}, in {where(number)}"
    yield from (f"{name}: threads: {states}" for name, states in children().items())


def children() -> dict[str, str]:
    """Say what the threads of each child of this process do, by its name (``process 1234``): how many of them what."""
    with closing(ProcessTree(os.getpid())) as tree:
        tree.read()
        pids = sorted(tree.pids - {os.getpid()})
    lines: dict[str, str] = {}
    for pid in pids:
        states = Counter(_state(f"/proc/{pid}/task/{tid}") for tid in thread_ids(pid))
        lines[f"process {pid}"] = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return lines


def _state(folder: str) -> str:
    """What the kernel says that a thread does, by its folder: ``sleeping (pipe_read)``."""
    stat = read_stat(folder)
    if stat is None:
        return "state unknown"
    words, waits = _STATES.get(stat.state, stat.state), read(f"{folder}/wchan")
    return words if waits in (None, "", "0") else f"{words} ({waits})"
