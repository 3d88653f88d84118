"""MPI: ``mpirun`` starts the ranks; it is used for nothing else, and steadytrain makes no MPI calls.

Ranks are not bound to cores: Open MPI would bind two ranks to the same core where it takes one machine for two.
Variables go by name, with their values in mpirun's own environment, so no value stands on a command line.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal

from steadytrain.config.plain import check_types
from steadytrain.errors import InputError
from steadytrain.launch.job import Host, Job, require_lines
from steadytrain.launch.plan import Command, Launcher, Plan, PlanStage, rank_command
from steadytrain.launch.ssh import Ssh


@dataclass(frozen=True, kw_only=True)
class Mpi:
    """Options of ``--on mpi``.

    Args:
        kind: whose MPI it is: their options differ. Intel's takes those of MPICH.
        program: the command that starts the ranks; None: ``mpirun`` or ``mpiexec``.
        options: further options for it.
    """

    kind: Literal["openmpi", "mpich"] = "openmpi"
    program: str | None = None
    options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        check_types(self, "mpi")
        require_lines("mpi", program=self.program)


def render(job: Job) -> Plan:
    """Render one ``mpirun``, stopped by SIGUSR1, by which its ranks save; SIGTERM would leave them two seconds."""
    mpi = job.options_of(Mpi)
    if job.hosts:
        hosts = [(machine.host, machine.procs) for machine in job.machines]
    else:
        nodes, procs = job.shape
        if nodes != 1:
            raise InputError(
                f"--on mpi with --nodes {nodes} needs the list of machines: --hosts FILE, one name per line"
            )
        hosts = [(Host(name="localhost"), procs)]
    ports = {host.port for host, _ in hosts}
    if len(ports) > 1 or {host.user for host, _ in hosts} != {None}:
        raise InputError(
            "mpirun accepts one port for all machines and no user: put other ports and users into ~/.ssh/config"
        )
    ssh = [*(("-p", str(port)) if (port := ports.pop()) else ()), *job.options_of(Ssh).options]
    address = job.address or hosts[0][0].name
    variables: dict[str, str | None] = dict(job.env)
    variables |= {"MASTER_ADDR": "127.0.0.1" if address == "localhost" else address}
    variables |= {"MASTER_PORT": str(job.meeting_port)}
    names = sorted(variables)
    spread = [",".join(f"{host.name}:{procs}" for host, procs in hosts), "-n", str(sum(procs for _, procs in hosts))]
    if mpi.kind == "openmpi":
        words = [mpi.program or "mpirun", "--bind-to", "none", "--host", *spread]
        words += ["--mca", "plm_rsh_agent", shlex.join(["ssh", *ssh])] if ssh else []
        words += ["--wdir", job.folder] if job.folder else []
        words += [word for name in names for word in ("-x", name)]
    elif ssh:
        raise InputError("MPICH's mpiexec accepts no ssh options: put ports and users into ~/.ssh/config")
    else:
        words = [mpi.program or "mpiexec", "-bind-to", "none", "-hosts", *spread]
        words += ["-wdir", job.folder] if job.folder else []
        words += ["-genvlist", ",".join(names)]
    argv = (*words, *mpi.options, job.python, *rank_command(job))
    run = Command(argv=argv, variables=variables, stops_by="SIGUSR1")
    return Plan(stages=(PlanStage(kind="run", commands=(run,), restarts=job.num_restarts),))


LAUNCHER = Launcher(
    render=render,
    takes=frozenset({"hosts", "ranks", "folder", "address", "port", "restarts", "keep", "grace_seconds"}),
    options=(Mpi, Ssh),
    names=("mpirun", "mpiexec", "openmpi"),
)
