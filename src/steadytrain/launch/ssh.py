"""Machines that ssh reaches: check them, copy the working directory, and start the ranks of each.

On each machine :mod:`steadytrain.launch.node` starts the ranks. Its standard input stays open as long as this side
lives: when it ends, in whatever way, the ranks there are stopped. Where machines may come and go, torchrun's agents
stand between, and meet at the first machine.
"""

from __future__ import annotations

import json
import posixpath
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from textwrap import dedent
from typing import Any, Literal

from steadytrain.config.plain import check_types
from steadytrain.errors import InputError
from steadytrain.launch.job import Host, Job, Machine, is_python, require, require_lines
from steadytrain.launch.plan import (
    ELASTIC,
    SAFE_PATH,
    Command,
    Launcher,
    Plan,
    PlanStage,
    node_command,
    torchrun_command,
)
from steadytrain.machine.children import FinishedProgram

_ALWAYS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
_HELD = ("--held", "--name")
_SOON = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"  # who is lost is missed after 6 s, not 15


@dataclass(frozen=True, kw_only=True)
class Ssh:
    """Options of ``--on ssh``.

    Args:
        sync: copy the working directory into this folder of each machine, and work there; a relative one starts from
            the home folder. None: the machines see the same working directory.
        exclude: names or paths, with ``*`` and ``?``, that are not copied, beside those that never are.
        options: options for ssh itself, such as ``["-F", "cluster.conf"]``.
        tool: ``rsync``, or ``tar`` through ssh, which is also taken where rsync is missing.
    """

    sync: str | None = None
    exclude: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    tool: Literal["rsync", "tar"] = "rsync"

    def __post_init__(self) -> None:
        check_types(self, "ssh")
        is_folder = self.sync is None or (bool(self.sync.strip()) and "://" not in self.sync)
        require(is_folder, "ssh.sync", self.sync, "a folder's name")
        require_lines("ssh", sync=self.sync)


def render(job: Job) -> Plan:
    """Render the stages check, copy and run, with a command for each machine."""
    ssh = job.options_of(Ssh)
    if not job.hosts:
        raise InputError("--on ssh needs the list of machines: --hosts FILE, one name per line")
    if ssh.sync and (outside := [path for path in job.inputs if posixpath.normpath(path).startswith("..")]):
        raise InputError(
            f"{' and '.join(outside)} is outside the working directory, and --sync copies nothing else: give a"
            " path that the machines have, or start from a folder above"
        )
    machines = job.machines
    if job.least and job.least > len(machines):
        raise InputError(f"--nodes needs at least {job.least} hosts, and {len(machines)} are listed")
    stages = [PlanStage(kind="check", commands=tuple(_check(job, machine) for machine in machines))]
    if ssh.sync:
        stages += [PlanStage(kind="copy", commands=tuple(copy(job, machine.host, ssh.tool) for machine in machines))]
    least = job.least or (1 if job.is_independent else len(machines))
    may_fail = len(machines) - least
    restarts = 0 if job.least else job.num_restarts  # torchrun's agents start anew by themselves
    runs = tuple(_run(job, machine) for machine in machines)
    stages += [PlanStage(kind="run", commands=runs, may_fail=may_fail, restarts=restarts)]
    folder, place = remote_folder(job), f"rank 0 runs on {machines[0].host.name}"
    notes = [f"{place}; paths of the command start from {folder} there"]
    if job.is_independent:
        notes = [f"{place}; all machines need the source and the output, in {folder}"]
    elif job.outputs:
        notes = [f"{place}, and writes the run there, to {posixpath.join(folder, job.outputs[0])}"]
    if left := len(job.hosts) - len(machines):
        notes += [f"{left} of {len(job.hosts)} hosts are not used"]
    return Plan(stages=tuple(stages), notes=tuple(notes))


def copy(job: Job, host: Host, tool: str) -> Command:
    """Render the copy of files to a machine; deletes nothing there.

    Its standard input is the list of names, each followed by NUL (``rsync``), or the archive (``tar``).
    """
    folder = remote_folder(job)
    if tool == "tar":
        return Command(argv=_ssh(job, host, f"exec tar -x -f - -C {shlex.quote(folder)}"), label=host.name)
    shell = shlex.join(["ssh", *_ALWAYS, *_port(host), *job.options_of(Ssh).options])
    target = f"{_login(host)}:{folder.rstrip('/')}/"
    flags = ("-a", "--protect-args", "--from0", "--files-from=-", "-e", shell)
    return Command(argv=("rsync", *flags, f"{job.folder or '.'}/", target), label=host.name)


def remote_folder(job: Job) -> str:
    """Return the working directory on the machines.

    >>> remote_folder(Job(words=("train",), folder="/srv/cats"))
    '/srv/cats'
    >>> remote_folder(Job(words=("train",), options=(Ssh(sync="~/cats/"),)))
    'cats'
    """
    ssh = job.options_of(Ssh)
    if ssh.sync is None:
        return job.folder or "."
    return str(PurePosixPath(ssh.sync.removeprefix("~/")))


def _check(job: Job, machine: Machine) -> Command:
    ssh = job.options_of(Ssh)
    first = job.machines[0] == machine
    # Before anything is copied; names of many files are left to the command.
    plain = [path for path in job.inputs if not set(path) & set("{}*?,")]
    there = [path for path in plain if posixpath.isabs(path) or ssh.sync is None]
    program = check_program(
        folder=remote_folder(job),
        make=ssh.sync is not None,
        address=_address(job),
        port=job.meeting_port if first else None,
        paths=[posixpath.join(remote_folder(job), path) for path in there],
    )
    remote = f"exec {shlex.quote(job.python)} -"  # in the user's home; a Python without -P says its version
    return Command(argv=_ssh(job, machine.host, remote), label=machine.host.name, stdin=program)


def _run(job: Job, machine: Machine) -> Command:
    host, variables = machine.host, dict(job.env)
    if job.least and not job.is_independent:
        variables |= ELASTIC if is_python(job.words[0]) else {**ELASTIC, **SAFE_PATH}
        nodes, is_host = len(job.machines), machine == job.machines[0]
        meeting = [  # only the first agent holds the store, and each goes by the name that others know it by
            f"--nnodes={job.least}:{nodes}",
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={_address(job)}:{job.meeting_port}",
            f"--rdzv-id={job.name}",
            f"--rdzv-conf=is_host={int(is_host)},{_SOON}",
            f"--local-addr={_address(job) if is_host else host.name}",
        ]
        command = torchrun_command(job, *_HELD, host.name, procs=machine.procs, meeting=meeting)
    else:
        flags = ("--first", str(machine.first), *_HELD, host.name)
        command = node_command(job, *flags, procs=machine.procs, address=_address(job))
    remote = f"cd {shlex.quote(remote_folder(job))} && exec {shlex.join((job.python, *command))}"
    return Command(argv=_ssh(job, host, remote), label=host.name, variables=variables, hands_over=True)


def _address(job: Job) -> str:
    return job.address or job.machines[0].host.name


def _ssh(job: Job, host: Host, remote: str) -> tuple[str, ...]:
    return ("ssh", *_ALWAYS, *_port(host), *job.options_of(Ssh).options, _login(host), remote)


def _port(host: Host) -> tuple[str, ...]:
    return ("-p", str(host.port)) if host.port else ()


def _login(host: Host) -> str:
    return f"{host.user}@{host.name}" if host.user else host.name


_CHECK = dedent("""
    import gc, importlib, json, os, platform, shutil, socket
    gc.disable()  # torch is loaded in two thirds of the time
    facts = {"python": platform.python_version(), "machine": platform.node(), "rsync": bool(shutil.which("rsync"))}
    if required["make"]:
        os.makedirs(required["folder"], exist_ok=True)
    facts["folder"] = os.path.isdir(required["folder"])
    facts["missing"] = [path for path in required["paths"] if not os.path.exists(path)]
    for name in ("steadytrain", "torch"):
        try:
            facts[name] = importlib.import_module(name).__version__
        except Exception as error:
            facts[name], facts[name + "_error"] = None, f"{type(error).__name__}: {error}".splitlines()[0]
    if facts["torch"]:
        import torch
        facts["gpus"] = torch.cuda.device_count()
    try:
        facts["address"] = socket.gethostbyname(required["address"])
    except OSError as error:
        facts["address"] = None
    facts["busy"], facts["checks_port"] = False, bool(required["port"])
    if required["port"]:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", required["port"]))
            except OSError:
                facts["busy"] = True
    print("steadytrain check", json.dumps(facts), flush=True)
    os._exit(0)  # and taken down in none
""")


def check_program(*, folder: str, make: bool, address: str, port: int | None, paths: Sequence[str] = ()) -> str:
    """Return the program that a machine runs to report its Python, torch, folder and port.

    Args:
        folder: that has to exist; ``make``: create it.
        address: name of the first machine, which has to be resolved.
        port: that has to be free; None: not checked.
        paths: that have to exist.
    """
    required = {"folder": folder, "make": make, "address": address, "port": port, "paths": list(paths)}
    return f"required = {required!r}\n{_CHECK}"


def judge(job: Job, host: str, answer: FinishedProgram, version: str, *, several: bool) -> dict[str, Any]:
    """Return the facts of a machine that can run the job.

    Args:
        answer: of :func:`check_program`, as it ended on the machine.
        version: of steadytrain on this machine.
        several: whether other machines have to reach the first.

    Raises:
        InputError: the machine cannot run it; the message names the machine, the error and the remedy.
    """
    line = next((line for line in answer.output.splitlines() if line.startswith("steadytrain check ")), None)
    facts: dict[str, Any] = json.loads(line.removeprefix("steadytrain check ")) if line and not answer.code else {}
    errors = " ".join(answer.errors.split()) or "no answer"
    python = f"{job.python} ({facts.get('python')})"
    if answer.code == 255:
        wrong = f"ssh cannot log in ({errors}): try ssh {host} by hand; it needs a key that asks for no passphrase"
    elif answer.code in (126, 127):
        wrong = (
            f"{job.python} cannot be started ({errors}): set the interpreter on that machine, --set"
            " python=/path/to/python"
        )
    elif not facts:
        wrong = f"{job.python} could not check the machine (exit code {answer.code}): {errors}"
    elif facts["steadytrain"] is None:
        error = facts["steadytrain_error"]
        wrong = f"{python} has no steadytrain ({error}): install {version} there, or --set python=..."
    elif facts["steadytrain"] != version:
        wrong = f"steadytrain is {facts['steadytrain']} there and {version} here: install the same on both"
    elif facts["torch"] is None:
        wrong = f"{python} cannot load torch ({facts['torch_error']}): fix that, or --set python=..."
    elif not facts["folder"]:
        wrong = "the working directory does not exist there: --sync FOLDER copies it, or --set folder=PATH sets another"
    elif facts.get("missing"):
        remedy = "" if job.options_of(Ssh).sync else ", --sync FOLDER copies the working directory,"
        wrong = f"{' and '.join(facts['missing'])} does not exist there: copy it there{remedy} or name its path there"
    elif facts["address"] is None:
        wrong = "it cannot resolve the first machine's name: set its address, --set address=10.0.0.1"
    elif several and job.address is None and facts["address"].startswith("127.") and facts["checks_port"]:
        wrong = (
            f"its name resolves to {facts['address']} there, which other machines cannot reach: set an address that"
            " they can reach, --set address=10.0.0.1"
        )
    elif facts["busy"]:
        wrong = f"port {job.meeting_port} is in use, perhaps by this job: stop it, or --set port=N"
    else:
        return facts
    raise InputError(f"{host}: {wrong}")


def require_same_torch(facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse machines with different versions of torch, whose ranks may be incompatible. Raises InputError."""
    versions = {fact["torch"]: host for host, fact in facts.items()}
    if len(versions) > 1:
        (first, host), (other, other_host), *_ = versions.items()
        raise InputError(f"torch is {first} on {host} and {other} on {other_host}: install the same on all machines")


LAUNCHER = Launcher(
    render=render,
    takes=frozenset({"hosts", "ranks", "least", "folder", "address", "port", "restarts", "keep", "grace_seconds"}),
    options=(Ssh,),
)
