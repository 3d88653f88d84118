"""Carry out a plan: the one file of this unit that writes, connects and starts something here."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from steadytrain import __version__
from steadytrain.errors import FailedError, InputError, storage_error
from steadytrain.launch.checking import Answer, agree, judge
from steadytrain.launch.copying import Chosen, choose
from steadytrain.launch.endings import PREEMPTED, exit_code, is_mended_by_restart, verdict
from steadytrain.launch.job import Job
from steadytrain.launch.node import pass_on
from steadytrain.launch.plan import Command, Plan, Stage
from steadytrain.launch.ranks import die_with_parent
from steadytrain.launch.ssh import copy

_STOPS = ("SIGINT", "SIGTERM", "SIGHUP")
_AFTER_GRACE_SECONDS = 15.0  # for the other side to end what did not end by itself, and to say so

_Happened = queue.SimpleQueue[int | None]
Say = Callable[[str], None]


def write_files(plan: Plan, folder: Path) -> list[Path]:
    """Write the files of a plan; raises StorageError."""
    written = []
    for file in plan.files:
        path = folder / file.name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text, encoding="utf-8")
            path.chmod(file.mode)
        except OSError as error:
            raise storage_error(error, path) from error
        written.append(path)
    return written


def submit(job: Job, plan: Plan, folder: Path, say: Say) -> tuple[int, str]:
    """Write the files, run the stages.

    Args:
        folder: for the plan's files.
        say: takes a line that tells what is being done.

    Returns:
        The exit code, and what a scheduler answered.

    Raises:
        InputError: a machine, a program or a variable that is needed is not there.
        FailedError: copying failed, or a scheduler refused.
    """
    for stage in plan.stages:
        for command in stage.commands:
            _values(command)  # what is missing is told before anything is done
    write_files(plan, folder)
    code, answer = 0, ""
    for stage in plan.stages:
        commands = tuple(replace(one, argv=plan.placed(one.argv, folder)) for one in stage.commands)
        match stage.what:
            case "check":
                may_rsync = _check(job, commands, say)
            case "copy":
                _copy(job, commands, may_rsync, say)
            case "run":
                code = _run(replace(stage, commands=commands), job.grace_seconds, say)
            case "submit":
                answer = _hand_over(commands[0])
    return code, answer


def _check(job: Job, commands: Sequence[Command], say: Say) -> dict[str, bool]:
    """Ask all machines at once; whether each has rsync."""
    say(f"checking {_counted(len(commands), 'machine')}")
    asked = [_open(one, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for one in commands]
    answers = []
    with _killed_at_last(asked):
        for command, process in zip(commands, asked, strict=True):
            output, errors = process.communicate(command.stdin.encode())
            told = (output.decode(errors="replace"), errors.decode(errors="replace"))
            answers.append(Answer(host=command.label, code=process.returncode, output=told[0], errors=told[1]))
    facts = {one.host: judge(job, one, __version__, several=len(answers) > 1) for one in answers}
    agree(facts)
    ranks = {one.host.name: one.procs for one in job.machines}
    for host, seen in facts.items():
        has = _counted(seen["gpus"], "GPU") if seen["gpus"] else "no GPU"
        say(f"{host}: {_counted(ranks[host], 'rank')}, {has}, torch {seen['torch']}, Python {seen['python']}")
    return {host: seen["rsync"] for host, seen in facts.items()}


def _copy(job: Job, commands: Sequence[Command], may_rsync: Mapping[str, bool], say: Say) -> None:
    folder = Path(job.folder or ".")
    chosen = choose(folder, job.ssh.exclude)
    where = _counted(len(commands), "machine")
    say(f"copying {_counted(len(chosen.files), 'file')}, {chosen.bytes / 1e6:,.1f} MB, to {job.ssh.sync} on {where}")
    if chosen.secret:
        say(f"left out, because they may hold secrets: {', '.join(chosen.secret)}")
    hosts = [one.host for one in job.machines]
    for command, host in zip(commands, hosts, strict=True):
        by_tar = command.argv[0] == "rsync" and not (may_rsync.get(command.label) and _is_here("rsync"))
        _send(copy(job, host, "tar") if by_tar else command, folder, chosen)


def _is_here(program: str) -> bool:
    import shutil

    return shutil.which(program) is not None


def _send(command: Command, folder: Path, chosen: Chosen) -> None:
    process = _open(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None and process.stderr is not None
    errors: list[bytes] = []
    reader = threading.Thread(target=lambda pipe: errors.extend(pipe), args=(process.stderr,))
    with _killed_at_last([process]):
        reader.start()
        with suppress(BrokenPipeError), process.stdin as sink:
            if command.argv[0] == "rsync":
                sink.write("\0".join((*chosen.files, "")).encode(errors="surrogateescape"))
            else:
                _write_tar(sink, folder, chosen)
        process.wait()
        reader.join()
        process.stderr.close()
    if process.returncode:
        said = " ".join(b" ".join(errors).decode(errors="replace").split())
        raise FailedError(f"{command.label}: {command.argv[0]} ended with {process.returncode} ({said}): mend that")


def _write_tar(sink: IO[bytes], folder: Path, chosen: Chosen) -> None:
    with tarfile.open(fileobj=sink, mode="w|") as tar:
        for name in chosen.files:
            tar.add(folder / name, arcname=name, recursive=False)


def _run(stage: Stage, grace_seconds: float, say: Say) -> int:
    """Run the ranks, and again after a failure where the stage says so; the exit code."""
    for attempt in range(stage.restarts + 1):
        started = time.monotonic()
        code, asked = _run_once(stage, grace_seconds, say)
        if asked or not is_mended_by_restart(code) or attempt == stage.restarts:
            break
        spent = time.monotonic() - started
        say(f"ended with exit code {code} after {spent:.0f} s: start {attempt + 2} of {stage.restarts + 1}")
    return code


def _run_once(stage: Stage, grace_seconds: float, say: Say) -> tuple[int, bool]:
    """The exit code, and whether this process was asked to end."""
    happened: _Happened = queue.SimpleQueue()
    running: list[subprocess.Popen[bytes]] = []
    with _requests(happened) as asked, _killed_at_last(running):
        listeners = []
        for place, command in enumerate(stage.commands):
            running.append(_begin(command))
            listeners += _listeners(place, running[-1], happened)
        for thread in listeners:
            thread.start()
        ended = _wait(stage, running, happened, grace_seconds + _AFTER_GRACE_SECONDS, say)
        for thread in listeners:
            thread.join()
    codes = [code for _, code in ended]
    if stage.may_fail and codes.count(0) and not asked:
        codes = [code for code in codes if not code]  # machines were lost, and the others went on to the end
    code = verdict(codes)
    if asked and code != PREEMPTED:
        code = code and 128 + asked[0]
    return code, bool(asked)


def _begin(command: Command) -> subprocess.Popen[bytes]:
    if not command.hands_over:
        alone = command.stops_by != "SIGTERM"  # mpirun does not hear Ctrl-C itself; others share our terminal
        return _open(command, stdin=subprocess.DEVNULL if alone else None, start_new_session=alone)
    piped = subprocess.PIPE
    process = _open(command, stdin=piped, stdout=piped, stderr=piped, start_new_session=True)
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(_values(command)).encode() + b"\n")
        process.stdin.flush()
    return process


def _listeners(place: int, process: subprocess.Popen[bytes], happened: _Happened) -> list[threading.Thread]:
    def tell_end() -> None:
        process.wait()
        happened.put(place)

    pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
    # Each line bears its rank and machine already.
    heard = [(pass_on, (source, sink.buffer, b"")) for source, sink in pairs if source is not None]
    return [threading.Thread(target=tell_end), *(threading.Thread(target=do, args=args) for do, args in heard)]


def _wait(
    stage: Stage, running: Sequence[subprocess.Popen[bytes]], happened: _Happened, patience: float, say: Say
) -> list[tuple[int, int]]:
    """Wait for all; after a request, or more bad ends than may be, no longer than ``patience``. Places and codes."""
    ended: list[tuple[int, int]] = []
    end: float | None = None
    while len(ended) < len(running):
        try:
            place = happened.get(timeout=None if end is None else max(0.0, end - time.monotonic()))
        except queue.Empty:
            for one in running:
                one.kill()
            end = None
            continue
        if place is not None:
            ended.append((place, exit_code(running[place].returncode)))
            _say_end(stage.commands[place], ended[-1][1], say)
        elif end is not None:
            end = time.monotonic()  # asked again: at once
            continue
        is_bad = place is None or sum(code != 0 for _, code in ended) > stage.may_fail
        if end is None and is_bad and len(ended) < len(running):
            end = time.monotonic() + patience
            if place is None:
                say("asked to stop: the ranks save; once more ends them at once")
            _ask_to_end(stage.commands, running)
    return ended


def _say_end(command: Command, code: int, say: Say) -> None:
    if code == 255 and command.argv[0] == "ssh":
        say(f"{command.label}: the connection is lost")
    elif code and command.label:
        say(f"{command.label}: ended with exit code {code}")


def _ask_to_end(commands: Sequence[Command], running: Sequence[subprocess.Popen[bytes]]) -> None:
    for command, process in zip(commands, running, strict=True):
        if command.hands_over and process.stdin is not None:
            with suppress(OSError):
                process.stdin.close()
        elif process.poll() is None:
            process.send_signal(getattr(signal, command.stops_by))


def _hand_over(command: Command) -> str:
    """Give the job to a scheduler; what that says."""
    done = _open(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with _killed_at_last([done]):
        output, errors = done.communicate()
    if done.returncode:
        said = " ".join((errors or output).decode(errors="replace").split())
        raise FailedError(f"{command.argv[0]} refused the job (exit code {done.returncode}): {said}")
    return output.decode(errors="replace").strip()


def _values(command: Command) -> dict[str, str]:
    """The variables with their values. Raises InputError where one is to be taken from here and is not here."""
    told = {}
    for name, value in command.named():
        found = os.environ.get(name) if value is None else value
        if found is None:
            raise InputError(
                f"--env {name} has no value, and there is no such variable here: set it, or give NAME=VALUE"
            )
        told[name] = found
    return told


def _open(
    command: Command,
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    start_new_session: bool = False,
) -> subprocess.Popen[bytes]:
    variables = {} if command.hands_over else _values(command)
    try:
        return subprocess.Popen(
            command.argv,
            env={**os.environ, **variables},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            start_new_session=start_new_session,
            preexec_fn=die_with_parent,
        )
    except FileNotFoundError:
        raise InputError(f"there is no {command.argv[0]} here: install it, or take --dry-run to see the plan") from None
    except OSError as error:
        raise FailedError(f"cannot start {command.argv[0]} ({error.strerror})") from error


@contextmanager
def _killed_at_last(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """Whatever happens, none of them outlives this."""
    try:
        yield
    finally:
        for one in processes:
            if one.poll() is None:
                one.kill()
            one.wait()


@contextmanager
def _requests(happened: _Happened) -> Iterator[list[int]]:
    """Signals to end are taken for requests; the list holds those that came."""
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        asked.append(number)
        happened.put(None)

    is_main = threading.current_thread() is threading.main_thread()
    numbers = [getattr(signal, name) for name in _STOPS if hasattr(signal, name)] if is_main else []
    before = {number: signal.signal(number, ask) for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
