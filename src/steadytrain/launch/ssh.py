"""Machines that ssh reaches: looked at, given the working directory, and each started with its ranks.

On each machine :mod:`steadytrain.launch.node` starts the ranks. Its standard input stays open as long as this side
lives: when it ends, in whatever way, the ranks there are stopped. Where machines may come and go, torchrun's agents
stand between, and meet at the first machine.
"""

from __future__ import annotations

import shlex
from pathlib import PurePosixPath

from steadytrain.errors import InputError
from steadytrain.launch.agent import ELASTIC, node, torchrun
from steadytrain.launch.checking import question
from steadytrain.launch.hosts import Host, Machine
from steadytrain.launch.job import Job
from steadytrain.launch.plan import Command, Plan, Stage

TAKES = frozenset({"hosts", "ranks", "least", "folder", "address", "port", "restarts", "grace_seconds", "ssh"})
SUBMITS = False
_ALWAYS = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15")
_HELD = ("--held", "--name")
_SOON = "last_call_timeout=5,keep_alive_interval=2,keep_alive_max_attempt=3"  # who is lost is missed after 6 s, not 15


def render(job: Job) -> Plan:
    """Check, copy, run: a command for each machine."""
    if not job.hosts:
        raise InputError("--on ssh needs the machines: --hosts FILE, a name a line")
    machines = job.machines
    if job.least and job.least > len(machines):
        raise InputError(f"--nodes {job.least}: and more, and {len(machines)} hosts are listed")
    stages = [Stage(what="check", commands=tuple(_check(job, one) for one in machines))]
    if job.ssh.sync:
        stages += [Stage(what="copy", commands=tuple(copy(job, one.host, job.ssh.tool) for one in machines))]
    may_fail = len(machines) - job.least if job.least else 0
    restarts = 0 if job.least else job.restarts  # torchrun's agents start anew by themselves
    runs = tuple(_run(job, one) for one in machines)
    stages += [Stage(what="run", commands=runs, may_fail=may_fail, restarts=restarts)]
    first = machines[0].host
    notes = [f"rank 0 runs on {first.name}, and keeps the run there, in {folder_there(job)}"]
    if left := len(job.hosts) - len(machines):
        notes += [f"{left} of {len(job.hosts)} hosts are not needed"]
    return Plan(stages=tuple(stages), notes=tuple(notes))


def copy(job: Job, host: Host, tool: str) -> Command:
    """Take in the files whose names (each followed by NUL) or tar archive come on standard input; delete nothing."""
    there = folder_there(job)
    if tool == "tar":
        return Command(argv=_ssh(job, host, f"exec tar -x -f - -C {shlex.quote(there)}"), label=host.name)
    shell = shlex.join(["ssh", *_ALWAYS, *_port(host), *job.ssh.options])
    place = f"{_who(host)}:{there.rstrip('/')}/"
    flags = ("-a", "--protect-args", "--from0", "--files-from=-", "-e", shell)
    return Command(argv=("rsync", *flags, f"{job.folder or '.'}/", place), label=host.name)


def folder_there(job: Job) -> str:
    """The working directory on the machines.

    >>> folder_there(Job(words=("train",), folder="/srv/cats"))
    '/srv/cats'
    >>> from steadytrain.launch.job import Ssh
    >>> folder_there(Job(words=("train",), ssh=Ssh(sync="~/cats/")))
    'cats'
    """
    if job.ssh.sync is None:
        return job.folder or "."
    return str(PurePosixPath(job.ssh.sync.removeprefix("~/")))


def _check(job: Job, machine: Machine) -> Command:
    first = job.machines[0] == machine
    asked = question(
        folder=folder_there(job),
        make=job.ssh.sync is not None,
        address=_address(job),
        port=job.meeting_port if first else None,
    )
    remote = f"exec {shlex.quote(job.python)} -"
    return Command(argv=_ssh(job, machine.host, remote), label=machine.host.name, stdin=asked)


def _run(job: Job, machine: Machine) -> Command:
    host, variables = machine.host, dict(job.env)
    if job.least:
        variables |= ELASTIC
        there = torchrun(job, *_HELD, host.name, procs=machine.procs, meeting=_meeting(job, machine))
    else:
        place = ("--first", str(machine.first), *_HELD, host.name)
        there = node(job, *place, procs=machine.procs, address=_address(job))
    remote = f"cd {shlex.quote(folder_there(job))} && exec {shlex.join((job.python, *there))}"
    return Command(argv=_ssh(job, host, remote), label=host.name, variables=variables, hands_over=True)


def _meeting(job: Job, machine: Machine) -> list[str]:
    """How torchrun's agents meet: only the first holds the store, and each goes by the name that others know it by."""
    nodes = len(job.machines)
    is_host = int(machine == job.machines[0])
    return [
        f"--nnodes={job.least or nodes}:{nodes}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={_address(job)}:{job.meeting_port}",
        f"--rdzv-id={job.name}",
        f"--rdzv-conf=is_host={is_host},{_SOON}",
        f"--local-addr={_address(job) if is_host else machine.host.name}",
    ]


def _address(job: Job) -> str:
    return job.address or job.machines[0].host.name


def _ssh(job: Job, host: Host, remote: str) -> tuple[str, ...]:
    return ("ssh", *_ALWAYS, *_port(host), *job.ssh.options, _who(host), remote)


def _port(host: Host) -> tuple[str, ...]:
    return ("-p", str(host.port)) if host.port else ()


def _who(host: Host) -> str:
    return f"{host.user}@{host.name}" if host.user else host.name
