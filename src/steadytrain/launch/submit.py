"""Carry out a plan: the only file of the package that writes files, connects to machines and starts programs."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from steadytrain import __version__
from steadytrain.errors import FailedError, InputError, storage_errors
from steadytrain.format import Say, count
from steadytrain.launch.job import Job
from steadytrain.launch.plan import Command, Plan, PlanStage
from steadytrain.launch.ssh import Ssh, copy, judge, require_same_torch
from steadytrain.launch.supervise import PREEMPTED, job_exit_code, may_restart
from steadytrain.machine.children import exit_code, finish, kill_at_last, start, start_copying, wait_together
from steadytrain.machine.platform import require_posix
from steadytrain.machine.process import take_signals

_FIRST_PAUSE, _LONGEST_PAUSE, _SHORT_SECONDS = 5.0, 300.0, 60.0
"""Seconds before a kept job starts again, and at most, doubled after each start that came to less than the third."""
_AFTER_GRACE_SECONDS = 15.0  # seconds for the other side to end what did not end by itself, and to say so


def write_files(plan: Plan, folder: Path) -> list[Path]:
    """Write the files of a plan; raises StorageError."""
    written = []
    for file in plan.files:
        path = folder / file.name
        with storage_errors(path):
            folder.mkdir(parents=True, exist_ok=True)
            path.write_text(file.text, encoding="utf-8")
            path.chmod(file.mode)
        written.append(path)
    return written


def submit(job: Job, plan: Plan, folder: Path, say: Say) -> tuple[int, str]:
    """Write the files of a plan and run its stages.

    Args:
        folder: for the plan's files.
        say: is called with a line about each stage.

    Returns:
        The exit code, and what a scheduler printed.

    Raises:
        InputError: a machine, a program or a variable is missing.
        FailedError: copying failed, or a scheduler refused the job.
    """
    require_posix("steady launch without --dry-run")
    for stage in plan.stages:
        for command in stage.commands:
            _values(command)  # a missing variable is an error before anything is done
    write_files(plan, folder)
    code, answer = 0, ""
    for stage in plan.stages:
        commands = tuple(replace(command, argv=plan.with_paths(command.argv, folder)) for command in stage.commands)
        match stage.kind:
            case "check":
                may_rsync = _check(job, commands, say)
            case "copy":
                _copy(job, commands, may_rsync, say)
            case "run":
                code = _run(replace(stage, commands=commands), job.grace_seconds, say, keep=job.keep)
            case "submit":
                answer = _hand_over(commands[0])
    return code, answer


def _check(job: Job, commands: Sequence[Command], say: Say) -> dict[str, bool]:
    """Ask all machines at once; return whether each has rsync."""
    say(f"checking {count(len(commands), 'machine')}")
    pipe = subprocess.PIPE
    processes = [_open(command, stdin=pipe, stdout=pipe, stderr=pipe) for command in commands]
    facts = {}
    with kill_at_last(processes):
        for command, process in zip(commands, processes, strict=True):
            answer = finish(process, command.stdin)
            facts[command.label] = judge(job, command.label, answer, __version__, several=len(commands) > 1)
    require_same_torch(facts)
    ranks = {machine.host.name: machine.procs for machine in job.machines}
    for host, fact in facts.items():
        gpus = count(fact["gpus"], "GPU") if fact["gpus"] else "no GPU"
        say(f"{host}: {count(ranks[host], 'rank')}, {gpus}, torch {fact['torch']}, Python {fact['python']}")
    return {host: fact["rsync"] for host, fact in facts.items()}


def _copy(job: Job, commands: Sequence[Command], may_rsync: Mapping[str, bool], say: Say) -> None:
    folder = Path(job.folder or ".")
    options = job.options_of(Ssh)
    chosen = choose(folder, options.exclude)
    machines = count(len(commands), "machine")
    say(f"copying {count(len(chosen.files), 'file')}, {chosen.bytes / 1e6:,.1f} MB, to {options.sync} on {machines}")
    if chosen.secret:
        say(f"not copied, because they may hold secrets: {', '.join(chosen.secret)}")
    for command, machine in zip(commands, job.machines, strict=True):
        by_tar = command.argv[0] == "rsync" and not (may_rsync.get(command.label) and shutil.which("rsync"))
        _send(copy(job, machine.host, "tar") if by_tar else command, folder, chosen)


def _send(command: Command, folder: Path, chosen: Chosen) -> None:
    """Write the names of the files to rsync, or their archive to tar."""
    process = _open(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin is not None and process.stderr is not None
    errors: list[bytes] = []
    reader = threading.Thread(target=lambda pipe: errors.extend(pipe), args=(process.stderr,))
    with kill_at_last([process]):
        reader.start()
        with suppress(BrokenPipeError), process.stdin as sink:
            if command.argv[0] == "rsync":
                sink.write("\0".join((*chosen.files, "")).encode(errors="surrogateescape"))
            else:
                with tarfile.open(fileobj=sink, mode="w|") as tar:
                    for name in chosen.files:
                        tar.add(folder / name, arcname=name, recursive=False)
        process.wait()
        reader.join()
        process.stderr.close()
    if process.returncode:
        message = " ".join(b" ".join(errors).decode(errors="replace").split())
        raise FailedError(
            f"{command.label}: {command.argv[0]} exited with code {process.returncode} ({message}): fix that"
        )


def _run(stage: PlanStage, grace_seconds: float, say: Say, *, keep: bool) -> int:
    """Run the ranks, up to ``stage.restarts`` times again after a failure; return the exit code.

    ``keep``: and again whenever they have saved because they were asked to stop, but not if this process was asked.
    """
    failures = short = 0
    while True:
        began = time.monotonic()
        code, is_asked = _run_once(stage, grace_seconds, say)
        seconds = time.monotonic() - began
        if keep and code == PREEMPTED and not is_asked:
            short = short + 1 if seconds < _SHORT_SECONDS else 0
            pause = min(_FIRST_PAUSE * 2**short, _LONGEST_PAUSE)  # what has stopped them may still be there
            say(f"saved and stopped after {seconds:.0f} s: started again in {pause:.0f} s (--keep)")
            time.sleep(pause)
            continue
        if is_asked or not may_restart(code) or failures == stage.restarts:
            return code
        failures += 1
        say(f"ended with exit code {code} after {seconds:.0f} s: start {failures + 1} of {stage.restarts + 1}")


def _run_once(stage: PlanStage, grace_seconds: float, say: Say) -> tuple[int, bool]:
    """Run the commands of a stage; return the exit code, and whether this process was asked to end."""
    running: list[subprocess.Popen[bytes]] = []
    copying: list[threading.Thread] = []

    def ask_to_end() -> None:
        if received:
            say("stopping: the ranks save first; a second signal stops them at once")
        for command, process in zip(stage.commands, running, strict=True):
            if command.hands_over and process.stdin is not None:
                with suppress(OSError):
                    process.stdin.close()
            elif process.poll() is None:
                process.send_signal(getattr(signal, command.stops_by))

    def say_end(index: int) -> None:
        command, code = stage.commands[index], exit_code(running[index].returncode)
        if code == 255 and command.argv[0] == "ssh":
            say(f"{command.label}: connection lost")
        elif code and command.label:
            say(f"{command.label}: ended with exit code {code}")

    with take_signals(("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")) as received, kill_at_last(running):
        for command in stage.commands:
            running.append(process := _begin(command))
            for pipe, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
                if pipe is not None:  # each line bears its rank and machine already
                    copying.append(start_copying(pipe, sink.buffer))
        in_order = wait_together(
            running,
            received,
            ask_to_end=ask_to_end,
            grace_seconds=grace_seconds + _AFTER_GRACE_SECONDS,
            may_fail=stage.may_fail,
            kill_if_asked_twice=True,
            on_end=say_end,
        )
        for thread in copying:
            thread.join()
    codes = [exit_code(running[index].returncode) for index in in_order]
    if stage.may_fail and codes.count(0) and not received:
        codes = [code for code in codes if not code]  # machines were lost, and the others went on to the end
    code = job_exit_code(codes)
    if received and code != PREEMPTED:
        code = code and 128 + received[0]
    return code, bool(received)


def _begin(command: Command) -> subprocess.Popen[bytes]:
    if not command.hands_over:
        alone = command.stops_by != "SIGTERM"  # mpirun does not hear Ctrl-C itself; others share our terminal
        return _open(command, stdin=subprocess.DEVNULL if alone else None, own_group=alone)
    pipe = subprocess.PIPE
    process = _open(command, stdin=pipe, stdout=pipe, stderr=pipe, own_group=True)
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.write(json.dumps(_values(command)).encode() + b"\n")
        process.stdin.flush()
    return process


def _hand_over(command: Command) -> str:
    """Give the job to a scheduler; return what it prints."""
    process = _open(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with kill_at_last([process]):
        ended = finish(process)
    if ended.code:
        message = " ".join((ended.errors or ended.output).split())
        raise FailedError(f"{command.argv[0]} rejected the job (exit code {ended.code}): {message}")
    return ended.output.strip()


def _values(command: Command) -> dict[str, str]:
    """Return the variables of a command with their values. Raises InputError if one is not set on this machine."""
    values = {}
    for name, template in sorted(command.variables.items()):
        value = os.environ.get(name) if template is None else template
        if value is None:
            raise InputError(f"--env {name} has no value, and the variable is not set here: set it, or use NAME=VALUE")
        values[name] = value
    return values


def _open(command: Command, **streams: Any) -> subprocess.Popen[bytes]:
    variables = os.environ | ({} if command.hands_over else _values(command))
    if shutil.which(command.argv[0]) is None:
        raise InputError(f"{command.argv[0]} is not installed here: install it, or use --dry-run to see the plan")
    return start(command.argv, variables=variables, refusal=FailedError, ends_with_us=True, **streams)


NEVER = (
    *(".git", ".hg", ".svn", "runs", "launch", "__pycache__", "*.pyc", ".venv", "venv", "node_modules", ".tox"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".ipynb_checkpoints", ".DS_Store"),
)
"""Names that are not copied: version control, results of runs, environments and caches."""

SECRET = (
    *(".env", ".env.*", "*.pem", "*.key", "*.p12", "*.pfx", "*.kdbx", "id_*", ".ssh", ".aws", ".azure", ".gnupg"),
    *(".kube", ".docker", ".netrc", "_netrc", ".pypirc", ".npmrc", ".git-credentials", ".htpasswd", "kaggle.json"),
    *("credentials", "credentials.*", "*credentials.json", "secrets", "secrets.*", "*.tfstate"),
)
"""Names that are not copied, and are listed for the user: what usually holds keys or passwords."""

_HEAD_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """Files to copy, by their paths in the folder; their bytes; files and folders left out because they are secret."""

    files: tuple[str, ...]
    bytes: int
    secret: tuple[str, ...]


def choose(folder: Path, exclude: Sequence[str] = ()) -> Chosen:
    """Choose the files below a folder that go to other machines.

    Links stay links; sockets, devices and pipes are left out.

    ``exclude``: names, or paths in the folder, with ``*`` and ``?``.
    """
    files: list[str] = []
    secret: list[str] = []
    sizes: list[int] = []

    def matches(path: str, patterns: Sequence[str]) -> bool:
        bare = [pattern.rstrip("/").removeprefix("./") for pattern in patterns]
        name = path.rpartition("/")[2]
        return any(fnmatchcase(name, pattern) or fnmatchcase(path, pattern) for pattern in bare)

    def look_into(inside: str) -> None:
        with os.scandir(folder / inside) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        for entry in entries:
            path = f"{inside}{entry.name}"
            if matches(path, (*NEVER, *exclude)):
                continue
            if matches(path, SECRET) or _is_key(entry):
                secret.append(path)
            elif entry.is_dir(follow_symlinks=False):
                look_into(f"{path}/")
            elif entry.is_symlink() or entry.is_file():
                files.append(path)
                sizes.append(entry.stat(follow_symlinks=False).st_size)

    look_into("")
    return Chosen(files=tuple(files), bytes=sum(sizes), secret=tuple(secret))


def _is_key(entry: os.DirEntry[str]) -> bool:
    """Return whether a file begins like a private key."""
    if entry.is_symlink() or not entry.is_file():
        return False
    try:
        with Path(entry).open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return False  # copying it will report the error
    return head.startswith(b"-----BEGIN ") and b"PRIVATE KEY-----" in head
