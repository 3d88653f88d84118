"""Stacks of this process's threads: in a few words, or all of them in a file.

Nothing here reads a source file: the disk that they lie on may be the very one that does not answer.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import FrameType

from steadytrain.machine.process_tree import ProcessTree, read_stat, thread_ids
from steadytrain.machine.procfs import read

# Whoever holds a thread on purpose: it moves on when its user wants it to.
_DEBUGGERS = frozenset({"bdb", "pdb", "pydevd", "_pydevd_bundle", "debugpy"})
_STATES = {"R": "running", "S": "sleeping", "D": "waiting for a disk or a network file system", "T": "stopped"}


def frames(thread: int) -> Iterator[FrameType]:
    """Yield the Python frames of a thread, innermost first; none where it has ended.

    ``thread``: as ``threading.get_ident()`` has it.
    """
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def package(frame: FrameType) -> str:
    """Return the name of the module whose code it is."""
    return str(frame.f_globals.get("__name__", ""))


def is_debugged(thread: int) -> bool:
    """Return whether a debugger holds a thread."""
    return any(package(frame).partition(".")[0] in _DEBUGGERS for frame in frames(thread))


def where(thread: int) -> str:
    """Describe the innermost Python frame of a thread that is not in the standard library: function, file and line.

    As in ``read (steadytrain/data/recordio/reader.py:88)``.
    """
    stack = list(frames(thread))
    if not stack:
        return "no Python code"
    outside = (frame for frame in stack if package(frame).partition(".")[0] not in sys.stdlib_module_names)
    return word_frame(next(outside, stack[0]))


def word_frame(frame: FrameType) -> str:
    """Describe a frame: function, file and line."""
    parts = Path(frame.f_code.co_filename).parts
    near = next((at + 1 for at in range(len(parts) - 1, -1, -1) if parts[at] in ("site-packages", "src")), -2)
    return f"{frame.f_code.co_name} ({'/'.join(parts[near:])}:{frame.f_lineno})"


def busy(prefix: str) -> dict[str, str]:
    """Describe where each thread is whose name has this prefix, idle ones left out."""
    threads = sorted((thread.name, thread.ident or 0) for thread in threading.enumerate())
    places: dict[str, str] = {}
    for name, ident in threads:
        innermost = next(frames(ident), None) if name.startswith(prefix) else None
        if innermost is not None and package(innermost) not in ("threading", "queue", "selectors"):
            places[name] = f"is in {where(ident)}"
    return places


def dump(folder: Path, head: str, rank: int = 0) -> Path:
    """Write the stacks of all threads into a new file of a folder: ``stacks-1.txt`` and so on.

    First ``head``, then a line for each thread (its name, its number, what the kernel says of it, where it is) and for
    each child (what the kernel says of its threads), then the stacks as faulthandler writes them, which needs no
    thread to cooperate.
    """
    lines = [head, ""]
    for thread in sorted(threading.enumerate(), key=lambda thread: thread.name):
        ident, state = thread.ident or 0, _state(f"/proc/self/task/{thread.native_id}")
        lines.append(f"{thread.name}: thread {ident:#018x}, {state}, in {where(ident)}")
    lines += [f"{name}: threads: {states}" for name, states in children().items()]
    for number in count(1):
        path = folder / (f"stacks-{number}.txt" if rank == 0 else f"stacks-{rank}-{number}.txt")
        with suppress(FileExistsError), path.open("x", encoding="utf-8", errors="backslashreplace") as file:
            file.write("\n".join([*lines, "", ""]))
            file.flush()
            faulthandler.dump_traceback(file, all_threads=True)
            break
    return path


def children() -> dict[str, str]:
    """Count the states of the threads of each child of this process, by its name (``process 1234``)."""
    pids = sorted(ProcessTree(os.getpid()).stats().keys() - {os.getpid()})
    lines: dict[str, str] = {}
    for pid in pids:
        states = Counter(_state(f"/proc/{pid}/task/{tid}") for tid in thread_ids(pid))
        lines[f"process {pid}"] = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
    return lines


def _state(folder: str) -> str:
    """Return the kernel's state of the thread with this folder in /proc: ``sleeping (pipe_read)``."""
    stat = read_stat(folder)
    if stat is None:
        return "state unknown"
    words, waits = _STATES.get(stat.state, stat.state), read(f"{folder}/wchan")
    return words if waits in (None, "", "0") else f"{words} ({waits})"
