"""Asking a question in a process of its own, so that an import that hangs or crashes ends that one and not this."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# What a library prints as it is imported must not get into the answer: it goes to standard error, and the answer to
# what was standard output. The process ends at once after it, without the libraries' own tidying up.
_FRAME = """
import json, os, sys
out = os.dup(1)
os.dup2(2, 1)
told = {{}}
def ask(name, function):
    try:
        told[name] = function()
    except Exception as error:
        told.setdefault("refused", {{}})[name] = f"{{type(error).__name__}}: {{error}}"
{code}
text = json.dumps(told, default=str).encode()
while text:
    text = text[os.write(out, text):]
os._exit(0)
"""


@dataclass(frozen=True)
class Answer:
    """What was told; ``failure`` says why nothing was, ``hangs`` that there was no answer in time."""

    told: dict[str, Any]
    failure: str | None = None
    hangs: bool = False


class Child:
    """A process at work on a question."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def answer(self, seconds: float) -> Answer:
        """Wait for the answer, ``seconds`` at most."""
        try:
            out, err = self._process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            return Answer({}, f"no answer within {seconds:g} s", hangs=True)
        if self._process.returncode == 0 and out:
            return Answer(json.loads(out))
        last = err.strip().splitlines()[-1:] or ["without a word"]
        return Answer({}, f"{_ending(self._process.returncode)}: {last[0]}")

    def close(self) -> None:
        """End the process if it is still there."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()


@contextmanager
def asked(code: str, *, python: str = sys.executable) -> Iterator[Child]:
    """Start a process on ``code``, which fills ``told`` (by ``ask(name, function)`` where it may fail).

    Args:
        code: Python, at the outermost level.
        python: the interpreter.
    """
    process = subprocess.Popen(
        [python, "-P", "-c", _FRAME.format(code=code)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    child = Child(process)
    try:
        yield child
    finally:
        child.close()


def _ending(code: int) -> str:
    """An exit status in words.

    >>> _ending(-11), _ending(1)
    ('ended by SIGSEGV', 'ended with 1')
    """
    try:
        return f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
    except ValueError:
        return f"ended by signal {-code}"
