"""Child processes: started, fed, given a time limit, waited for together, and ended with all that they started.

Every child of this project is started by :func:`start`, or by :func:`start_module` where it runs a module of ours;
one that is this Python by the words of :func:`python`.
:func:`run_program` is for a program that is waited for, :class:`ForkServer` for children that answer requests, and
:func:`wait_together` for several that are one job.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import math
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from steadytrain.errors import FailedError, InputError, SteadyError
from steadytrain.machine import platform
from steadytrain.machine.platform import (
    IS_LINUX,
    KILL,
    fork,
    in_foreground,
    recv_fds,
    require_posix,
    send_fds,
    without_interrupts,
)
from steadytrain.machine.process import ASKED_TWICE_SECONDS, given_environment

if TYPE_CHECKING:  # a child that packs needs none of it
    from multiprocessing.connection import Connection

POLL_SECONDS = 0.05
GRACE_SECONDS = 5.0
"""Seconds in which a child that no longer answers may end by itself, which gives its return code."""
_PipeEnd = int | IO[bytes] | None
_PID = struct.Struct("<q")
_PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
# What a child runs first that is to end with its parent: between fork and exec, code of ours may wait for ever for a
# lock that a thread has. The program gets the signals and variables that it would have got: Python itself changes some.
_END_WITH = f"""
import contextlib, ctypes, os, signal, sys
_, parent, ignored, processors, *command = sys.argv
for number in (signal.SIGPIPE, signal.SIGXFSZ):
    signal.signal(number, signal.SIG_DFL)
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
for number in filter(None, ignored.split(",")):
    signal.signal(int(number), signal.SIG_IGN)
ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGTERM)
if os.getppid() != int(parent):
    os.kill(os.getpid(), signal.SIGTERM)
with open("/proc/self/environ", "rb") as given:
    if not any(entry.startswith(b"LC_CTYPE=") for entry in given.read().split(b"\\0")):
        os.environ.pop("LC_CTYPE", None)
if processors:
    with contextlib.suppress(OSError):  # a cpuset has just changed
        os.sched_setaffinity(0, [int(number) for number in processors.split(",")])
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
try:
    os.execvp(command[0], command)
except OSError as error:
    print(f"cannot start {{command[0]}}: {{error.strerror}}", file=sys.stderr)
    sys.exit({InputError.exit_code})
"""

# One thread each: the children themselves are the parallelism.
_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# glibc would map each photograph's pixels anew and give them back: of a child's time a quarter went to page faults.
_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(128 << 20)}


def python(*words: str) -> list[str]:
    """Return the command that runs this Python: what lies in the working folder is not imported in place of modules."""
    return [sys.executable, "-P", *words]


def start(
    command: Sequence[str],
    *,
    variables: Mapping[str, str] | None = None,
    refusal: type[SteadyError] = InputError,
    ends_with_us: bool = False,
    ignores: Sequence[int] = (),
    processors: Collection[int] = (),
    own_group: bool = False,
    inherits: Sequence[int] = (),
    stdin: _PipeEnd = None,
    stdout: _PipeEnd = None,
    stderr: _PipeEnd = None,
) -> subprocess.Popen[bytes]:
    """Start a program.

    Args:
        variables: its whole environment; None: this process's own.
        refusal: the error to raise where it cannot be started.
        ends_with_us: it gets SIGTERM, by which ranks save, when this process is gone. Linux only.
        ignores: signals that it ignores, where it ends with us.
        processors: those that it may run on, where it ends with us; empty: all of ours.
        own_group: it is the first of a process group, which hears no Ctrl-C of ours and is killed as one.
        inherits: files that stay open in the child, under the same numbers.
    """
    if stdout is None:  # what we wrote comes first
        sys.stdout.flush()
        sys.stderr.flush()
    quiet = False
    if ends_with_us and IS_LINUX and shutil.which(command[0], path=(variables or os.environ).get("PATH")):
        lists = [",".join(map(str, numbers)) for numbers in (ignores, processors)]
        command, quiet = [sys.executable, "-I", "-S", "-c", _END_WITH, str(os.getpid()), *lists, *command], True
    try:
        with without_interrupts() if quiet else nullcontext():  # until it is the program that was asked for
            return subprocess.Popen(
                command,
                env=variables,
                start_new_session=own_group,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0) if own_group else 0,
                pass_fds=inherits,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )
    except FileNotFoundError as error:
        raise refusal(f"cannot start {command[0]}: no such command or file") from error
    except (OSError, ValueError) as error:
        raise refusal(f"cannot start {command[0]}: {getattr(error, 'strerror', None) or error}") from error


@dataclass(frozen=True)
class FinishedProgram:
    """The result of a program: its return ``code``, negative for a signal, and what it wrote.

    ``is_late``: it was killed, as it was not done in time.
    """

    code: int
    output: str
    errors: str
    is_late: bool = False

    @property
    def last_line(self) -> str:
        """The last line of standard error that is not empty, without our command's name; empty if there is none."""
        lines = [line.strip() for line in self.errors.splitlines() if line.strip()]
        return lines[-1].removeprefix("steady: ") if lines else ""


def finish(process: subprocess.Popen[bytes], feed: str | None = None, seconds: float | None = None) -> FinishedProgram:
    """Feed a program that was started with pipes, and wait for its end; kill it if it is not done after ``seconds``."""
    is_late = False
    try:
        output, errors = process.communicate(None if feed is None else feed.encode(), timeout=seconds)
    except subprocess.TimeoutExpired:
        is_late = True
        kill_group(process)
        output, errors = process.communicate()
    stdout, stderr = ((text or b"").decode(errors="replace") for text in (output, errors))
    return FinishedProgram(process.returncode, stdout, stderr, is_late)


def run_program(
    command: Sequence[str], feed: str | None = None, seconds: float | None = None, **options: Any
) -> FinishedProgram:
    """Run a program to its end, or for so many seconds; ``options`` are those of :func:`start`."""
    pipe = subprocess.PIPE
    process = start(command, stdin=subprocess.DEVNULL if feed is None else pipe, stdout=pipe, stderr=pipe, **options)
    with kill_at_last([process]):
        return finish(process, feed, seconds)


def run_steady(words: Sequence[str]) -> FinishedProgram:
    """Run another command of ours to its end, in the environment that this one was given."""
    return run_program(python("-m", "steadytrain", *words), variables=given_environment())


def start_module(module: str, **options: Any) -> subprocess.Popen[bytes]:
    """Start a child that loads ``module`` and runs its ``main()``; it ignores Ctrl-C.

    ``options`` are those of :func:`start`; what it prints is to go to standard error.

    Raises:
        FailedError: no process can be started.
    """
    program = (
        f"import sys\nsys.path[:] = {sys.path!r}\n"
        f"from steadytrain.machine.children import run_module\nrun_module({module!r})\n"
    )
    command, variables = python("-c", program), {**_MEMORY, **os.environ, **_THREADS}
    # The child hears no Ctrl-C, not even as it begins: the parent does, and ends it.
    with without_interrupts():
        return start(command, variables=variables, refusal=FailedError, **options)


def run_module(module: str) -> None:
    """Run a child of :func:`start_module`: load the module and call its ``main()``."""
    # The parent hears of these, and ends its children: a job that is asked to end needs its batches until it has saved.
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    warnings.simplefilter("ignore")
    importlib.import_module(module).main()


class ChildEndedError(Exception):
    """A child that ended before it had answered; ``code``: its return code."""

    def __init__(self, code: int) -> None:
        super().__init__(cause_of_death(code))
        self.code = code


class ForkServer:
    """A process that has loaded what takes long; it forks children that start at once and with empty memory.

    ``program``: Python that loads it and calls :func:`serve_forks`. Nobody sees what it prints.

    Raises:
        FailedError: no process can be started.
    """

    def __init__(self, program: str, variables: Mapping[str, str] | None = None) -> None:
        require_posix("measuring in a process of its own")
        self._control, theirs = socket.socketpair()
        path = f"import sys\nsys.path[:] = {sys.path!r}\n"
        with theirs:
            self._process = start(
                python("-c", path + program, str(theirs.fileno())),
                variables=variables,
                refusal=FailedError,
                own_group=True,  # Ctrl-C is for us, and we end them all
                inherits=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )

    def fork(self, limit_seconds: float, needs: Sequence[str] = ()) -> Forked:
        """Start a child, as soon as the server is ready; ``needs``: modules that it loads before, if they are there.

        Raises:
            ChildEndedError: the server is dead, or was not ready in time.
        """
        from multiprocessing import Pipe

        pair: Any = Pipe()  # of another class on Windows
        ours, theirs = pair
        message = json.dumps({"path": sys.path, "folder": str(Path.cwd()), "needs": needs}).encode()
        with theirs, suppress(OSError):
            send_fds(self._control, [message], [theirs.fileno()])
        if (pid := self.reply(limit_seconds)) is None:
            ours.close()
            raise ChildEndedError(self.end(GRACE_SECONDS))
        return Forked(self, ours, pid)

    def wait(self, pid: int, grace_seconds: float) -> int:
        """Wait for the end of a child, which is killed after the grace; return its return code."""
        with suppress(OSError):
            self._control.sendall(_PID.pack(pid))
        if (code := self.reply(grace_seconds)) is None and self._process.poll() is None:
            os.kill(pid, KILL)
            code = self.reply(None)
        return self.end(GRACE_SECONDS) if code is None else code

    def reply(self, limit_seconds: float | None) -> int | None:
        """Read a number that the server sends; None where none comes."""
        with suppress(OSError):
            self._control.settimeout(limit_seconds)
            if data := self._control.recv(_PID.size):
                number: int = _PID.unpack(data)[0]
                return number
        return None

    def end(self, grace_seconds: float = 0.0) -> int:
        """Kill the server and its children, unless it ends within the grace; return its return code."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(grace_seconds)
        kill_group(self._process)
        return self._process.wait()


class Forked:
    """A child of a :class:`ForkServer`."""

    def __init__(self, server: ForkServer, connection: Connection, pid: int) -> None:
        self._server, self._connection, self._pid = server, connection, pid
        self._code: int | None = None
        self._is_busy = False

    def send(self, request: Any) -> None:
        """Send a request to a child that waits for one."""
        self._is_busy = True
        with suppress(OSError):  # a dead one has no answer
            self._connection.send(request)

    def receive(self, limit_seconds: float) -> Any:
        """Return the answer.

        Raises:
            ChildEndedError: the child died.
            TimeoutError: the answer took too long; the child is killed.
        """
        try:
            if self._connection.poll(limit_seconds):
                answer = self._connection.recv()
                self._is_busy = False
                return answer
        except (EOFError, OSError):
            self._is_busy = False
            raise ChildEndedError(self.end()) from None
        self.end()
        raise TimeoutError(f"not done in {limit_seconds:.0f} s")

    def ask(self, request: Any, limit_seconds: float) -> Any:
        """Send a request; return the answer, as :meth:`receive` does."""
        self.send(request)
        return self.receive(limit_seconds)

    def end(self) -> int:
        """End the child, which goes by itself unless it is busy; return its return code."""
        if self._code is None:
            self._connection.close()
            self._code = self._server.wait(self._pid, 0.0 if self._is_busy else GRACE_SECONDS)
        return self._code


def serve_forks(talk: Callable[[Connection], object]) -> None:
    """Be the server of a :class:`ForkServer`; each child calls ``talk`` with its connection to the caller."""
    from multiprocessing.connection import Connection

    die_with_parent()
    control = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, files, _, _ = recv_fds(control, 1 << 20, 1)
        if not message:
            return
        if files:
            request = json.loads(message)
            for name in request["needs"]:
                with suppress(ImportError):
                    importlib.import_module(name)
            if not (number := fork()):
                try:
                    control.close()
                    die_with_parent()
                    with suppress(OSError):  # if memory runs out, the system is to end this process, not its parent
                        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
                    sys.path[:] = request["path"]
                    os.chdir(request["folder"])
                    talk(Connection(files[0]))
                finally:
                    os._exit(1 if sys.exc_info()[0] else 0)
            os.close(files[0])
        else:
            number = os.waitstatus_to_exitcode(os.waitpid(_PID.unpack(message)[0], 0)[1])
        control.sendall(_PID.pack(number))


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started with ``own_group``, and those that it started; any other one alone."""
    try:
        platform.kill_group(process.pid, KILL)
    except OSError:  # no group of its own, or none left
        process.kill()


def exit_code(returned: int) -> int:
    """Turn a process's return code into a shell's: 128 and the signal's number where one ended it.

    >>> exit_code(-9), exit_code(3)
    (137, 3)
    """
    return 128 - returned if returned < 0 else returned


def wait_together(
    processes: Sequence[subprocess.Popen[bytes]],
    requests: Sequence[int] = (),
    *,
    ask_to_end: Callable[[], None],
    grace_seconds: float,
    lenience_seconds: float = 0.0,
    may_fail: int = 0,
    may_be_killed: int = 0,
    kill_if_asked_twice: bool = False,
    on_end: Callable[[int], None] = lambda place: None,
) -> list[int]:
    """Wait until all processes have ended; where one ends badly, or a request comes, the others are made to end.

    Args:
        requests: to end, such as :func:`.process.take_signals` yields; what is appended while this waits counts.
        ask_to_end: called once, to ask those that still run.
        grace_seconds: after they were asked; then they are killed.
        lenience_seconds: after a bad end, for the others to end by themselves before they are asked.
        may_fail: so many bad ends change nothing.
        may_be_killed: nor do so many ends by a signal.
        kill_if_asked_twice: a second request, later than ``ASKED_TWICE_SECONDS``, ends the grace.
        on_end: called with each place.

    Returns:
        Places in the order in which the processes ended.
    """
    ended: list[int] = []
    ask_at = kill_at = math.inf
    num_requests = 0  # when the processes were asked
    while True:
        for place, process in enumerate(processes):
            if place not in ended and process.poll() is not None:
                ended.append(place)
                on_end(place)
        if len(ended) == len(processes):
            return ended
        now, codes = time.monotonic(), [processes[place].returncode for place in ended]
        num_killed, num_bad = sum(code < 0 for code in codes), sum(code != 0 for code in codes)
        if requests:
            ask_at = min(ask_at, now)
        elif num_bad - min(num_killed, may_be_killed) > may_fail:
            ask_at = min(ask_at, now + lenience_seconds)
        if kill_at == math.inf and now >= ask_at:
            kill_at, num_requests = now + grace_seconds, len(requests)
            ask_to_end()
        elif now < min(kill_at, ask_at + ASKED_TWICE_SECONDS):  # the same request, by another way
            num_requests = len(requests)
        elif now >= kill_at or (kill_if_asked_twice and len(requests) > num_requests):
            for process in processes:
                process.kill()
        time.sleep(POLL_SECONDS)


@contextmanager
def kill_at_last(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Let none of the processes outlive the block, whatever happens."""
    try:
        yield
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def start_copying(source: IO[bytes], sink: IO[bytes], prefix: bytes = b"") -> threading.Thread:
    """Start a thread that copies whole lines, each behind ``prefix``. A reader that is gone stops nobody."""

    def copy() -> None:
        with source:
            for line in source:
                with suppress(OSError, ValueError):
                    sink.write(prefix + line if line.endswith(b"\n") else prefix + line + b"\n")
                    sink.flush()

    thread = threading.Thread(target=copy)
    thread.start()
    return thread


def die_with_parent() -> None:
    """Have the system send this child SIGTERM, by which ranks save, when its parent is gone. Linux only."""
    if IS_LINUX:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def ending(code: int) -> str:
    """Word how a process ended, from its return code.

    >>> ending(-11), ending(3)
    ('SIGSEGV', 'exit code 3')
    """
    try:
        return signal.Signals(-code).name
    except ValueError:  # no signal, or one without a name
        return f"exit code {code}" if code >= 0 else f"signal {-code}"


def cause_of_death(code: int) -> str:
    """Word why a process that did not finish its work ended.

    >>> cause_of_death(-9), cause_of_death(-11), cause_of_death(3)
    ('killed by the system: not enough memory', 'the process crashed (SIGSEGV)', 'the process crashed (code 3)')
    """
    if code == -9:
        return "killed by the system: not enough memory"
    return f"the process crashed ({ending(code).removeprefix('exit ')})"


def send(processes: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    """Send a signal to the processes that still run."""
    for process in list(processes):
        process.send_signal(number)


def forward(processes: Iterable[subprocess.Popen[bytes]], number: int) -> None:
    """Pass a signal on that came here. A terminal has sent Ctrl-C to all of them already; ``kill -INT`` has not."""
    if number != signal.SIGINT or not in_foreground():
        send(processes, number)
