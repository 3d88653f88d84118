"""Commands of any maker, run to their end or until their time is up; nothing that they have started stays."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from peers.scale_contenders import ContenderError


def lines(words: Sequence[str], folder: Path, seconds: float) -> Iterator[tuple[float, str]]:
    """Yield a command's lines as they arrive. Raises ContenderError with its last ones where it fails."""
    variables = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    variables |= {"PYTHONUNBUFFERED": "1", "STEADYTRAIN_CACHE": str(folder / "cache")}
    last: list[str] = []
    with started(words, cwd=folder, env=variables, stderr=subprocess.STDOUT, errors="replace") as process:
        late = threading.Timer(seconds, lambda: os.killpg(process.pid, signal.SIGKILL))
        late.start()
        try:
            for line in process.stdout or ():
                last = [*last[-19:], line.rstrip()]
                yield time.time(), line
        finally:
            late.cancel()
        process.wait()
    if process.returncode == -signal.SIGKILL:
        raise ContenderError(f"it did not end within {seconds:.0f} s")
    if process.returncode:
        raise ContenderError("\n".join([f"it ended with {process.returncode}", *last]))


@contextmanager
def started(words: Sequence[str], **how: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a command whose output is read; kill what is left of it and of its children at the end."""
    with subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True, start_new_session=True, **how
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def asked(words: Sequence[str], folder: Path, seconds: float, *, may_fail: bool = False) -> str:
    """Return a command's standard output. Raises ContenderError where it fails, or is not done within these seconds."""
    with started(words, cwd=folder, stderr=subprocess.PIPE) as process:
        try:
            out, errors = process.communicate(timeout=max(0.0, seconds))
        except subprocess.TimeoutExpired:
            raise ContenderError(f"it was not done within {seconds:.0f} s") from None
    if process.returncode and not may_fail:
        raise ContenderError(f"it ended with {process.returncode}\n{(errors or out).strip()[-2000:]}")
    return out
