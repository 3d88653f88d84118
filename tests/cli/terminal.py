"""A pseudo-terminal, and what a command sends to it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import termios
from collections.abc import Mapping, Sequence
from contextlib import suppress


def on_terminal(
    command: Sequence[str],
    columns: int,
    *,
    rows: int = 24,
    until: bytes | None = None,
    variables: Mapping[str, str] | None = None,
) -> tuple[int, str]:
    """Run a command on a terminal of that size: its exit code, and all that the terminal was sent.

    Args:
        until: Ctrl-C is typed once this is shown.
        variables: of its environment.
    """
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    env = {**inherited, "TERM": "xterm-256color", **(variables or {})}
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=env, start_new_session=True)
    os.close(child)
    sent, is_typed = b"", False
    with suppress(OSError):  # how Linux says that the other side has closed
        while part := os.read(parent, 65536):
            sent += part
            if until is not None and until in sent and not is_typed:
                is_typed = True
                process.send_signal(signal.SIGINT)
    os.close(parent)
    return process.wait(), sent.decode()


def unstyled(sent: str) -> str:
    """Leave out what steers the terminal."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", sent)
