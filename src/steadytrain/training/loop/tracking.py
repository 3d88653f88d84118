"""Send a run to tracking services while it trains, by a process for each: none of them can stop it or slow it down."""

from __future__ import annotations

import json
import shlex
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

from steadytrain.config.parts import Every
from steadytrain.errors import SteadyError
from steadytrain.format import print_note
from steadytrain.machine.children import cause_of_death, kill_group, start_module
from steadytrain.run import Run

END_SECONDS = 60.0
"""Seconds that a service may take, once the training has ended, for its last values, the report and the best weights.
"""
QUIET_SECONDS = 3.0
"""Seconds after which a message says what is waited for."""
PREEMPTED_SECONDS = 5.0
"""Seconds that a service may take where the machine is about to go."""
LEFT_SECONDS = 5.0
"""Seconds for which the output of killed processes is read on: one that left their group may hold it open for ever."""


@contextmanager
def tracking(run: Run, *, is_first: bool) -> Iterator[Callable[[], None]]:
    """Yield what begins to send a run to the services of ``every.track``, of the first rank; at the end wait for them.

    Only its first call does something: a run may take several attempts. What fails is printed once, in a line, and ends
    only the sending.
    """
    every = run.recipe.every
    names = _names(every) if is_first else []
    followers = list[_Follower]()

    def begin() -> None:
        if names and "track" in every.from_file:
            print_note(
                f"not sent to {every.track}: a file asks for it (every.track), and this command does not; to send it"
                f" there, add --track {every.track}"
            )
        else:
            followers.extend(_Follower(run, name) for name in names)
        names.clear()

    try:
        yield begin
    finally:
        for follower in followers:
            follower.end()
        ended = run.progress().ended if followers else None
        seconds = PREEMPTED_SECONDS if ended is not None and ended.status == "preempted" else END_SECONDS
        until = time.monotonic() + seconds
        with ExitStack() as stack:
            for follower in followers:
                stack.callback(follower.kill)
            quiet = min(until, time.monotonic() + QUIET_SECONDS)
            if waiting := [follower.name for follower in followers if not follower.wait(quiet)]:
                print_note(f"sending the rest to {', '.join(waiting)}, for at most {seconds:.0f} s")
            for follower in followers:
                follower.wait(until)


def _names(every: Every) -> list[str]:
    return [name.strip() for name in (every.track or "").split(",") if name.strip()]


class _Follower:
    """The process that sends a run to one service.

    Attributes:
        name: of the service.
    """

    def __init__(self, run: Run, name: str) -> None:
        self.name = name
        self._run, self._is_killed = run, False
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = start_module(
                "steadytrain.reports.trackers", stdin=subprocess.PIPE, stdout=subprocess.PIPE, own_group=True
            )
        except SteadyError as error:
            self._say(str(error))
            return
        self._write(json.dumps({"run": str(run.directory.resolve()), "name": name}))
        self._thread = threading.Thread(target=self._listen, name=f"track-{name}", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        """Wait for the end of the process, and print what it says of a failure."""
        assert self._process is not None and self._process.stdout is not None
        with self._process.stdout as lines:
            message = lines.read().decode("utf-8", "replace").strip()
        code = self._process.wait()
        if self._is_killed:
            message = f"{self.name} had not taken everything when the wait was over"
        elif code and not message:
            message = f"{self.name}: {cause_of_death(code)}"
        if message:
            self._say(message)

    def _say(self, problem: str) -> None:
        again = f"steady report {shlex.quote(str(self._run.directory))} --to {self.name} sends the rest"
        print_note(f"tracking: {problem}" + ("" if "sends the rest" in problem else f"; {again}"))

    def _write(self, line: str) -> None:
        assert self._process is not None and self._process.stdin is not None
        with suppress(OSError):  # it has failed already
            self._process.stdin.write(f"{line}\n".encode())
            self._process.stdin.flush()

    def end(self) -> None:
        """Say that the training has ended."""
        if self._process is not None:
            self._write("")

    def wait(self, until: float) -> bool:
        """Wait for the process to finish, until a moment of the monotonic clock; return whether it has."""
        if self._process is None:
            return True
        self._thread.join(max(0.0, until - time.monotonic()))
        return not self._thread.is_alive()

    def kill(self) -> None:
        """End the process, with all that it started, if it has not finished."""
        if self._process is not None:
            if self._thread.is_alive():  # the process, or one that it started and left with its output open
                self._is_killed = self._process.poll() is None
                kill_group(self._process)
            self._thread.join(LEFT_SECONDS)
            if self._process.stdin is not None:
                with suppress(OSError):
                    self._process.stdin.close()
