"""Rank and world size of this process, from the environment that its launcher set.

Understood are torchrun and anything else that sets ``RANK``, ``WORLD_SIZE`` and ``MASTER_ADDR``; Open MPI; MPICH and
Intel MPI; Slurm's srun; an Indexed Job of Kubernetes whose pods are told ``WORLD_SIZE`` and ``MASTER_ADDR``.

>>> world_from_environment({}).size
1
>>> world = world_from_environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
...                                 "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"})
>>> world.rank, world.size, world.local_rank, world.is_first, world.is_local_first
(3, 4, 1, False, False)
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from steadytrain.errors import InputError
from steadytrain.machine.facts import tasks_on

LOOPBACK = "127.0.0.1"
LAUNCHER = "STEADYTRAIN_LAUNCHER"
"""The variable by which :mod:`steadytrain.launch.node` says what has started it, beside torchrun's variables."""
_PORTS = range(20000, 30000)  # below those that systems give away by themselves
_LAUNCH = ("TORCHELASTIC_RUN_ID", "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")


@dataclass(frozen=True, kw_only=True)
class World:
    """Rank ``rank`` of ``size``; on its machine it is ``local_rank`` of ``local_size``.

    ``address`` and ``port`` of the first rank, where all of them meet; ``launcher``: what told so, in words.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = LOOPBACK
    port: int = 0
    launcher: str = ""

    @property
    def is_first(self) -> bool:
        """Return whether this rank writes the run's files and prints."""
        return self.rank == 0

    @property
    def is_local_first(self) -> bool:
        """Return whether this is the first rank of its machine."""
        return self.local_rank == 0


class _Variables(NamedTuple):
    """A launcher's variables of rank and size, of all and on one machine."""

    launcher: str
    rank: str
    size: str
    local_rank: str
    local_size: str


_LAUNCHERS = (
    _Variables("torchrun", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Variables("Kubernetes", "JOB_COMPLETION_INDEX", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    _Variables(
        "Open MPI",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    _Variables("MPI", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # Set by srun for each task, and not in the shell of a batch script, which is one process.
    _Variables("Slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
)


def world_from_environment(variables: Mapping[str, str]) -> World:
    """Read rank and size from environment variables; one process where they name none.

    Raises:
        InputError: it tells half of it, or what cannot be.
    """
    variables = {name: value for name, value in variables.items() if value}  # set to nothing is not set
    known = [names for names in _LAUNCHERS if names.size in variables and names.rank in variables]
    if known:
        # The innermost launcher started this process. But srun --mpi=pmi2 uses MPI's words besides its own, for all but
        # the ranks on one machine.
        is_slurms_pmi = known[0].launcher == "MPI" and known[0].local_rank not in variables
        return _world(known[-1] if is_slurms_pmi else known[0], variables)
    for name, other in [*((names.size, names.rank) for names in _LAUNCHERS), ("RANK", "WORLD_SIZE")]:
        if name in variables:
            raise InputError(
                f"{name} is {variables[name]}, and {other} is not set: set both (a launcher does), or neither to train"
                " with one process"
            )
    if "DMLC_ROLE" in variables:
        raise InputError(
            f"DMLC_ROLE is {variables['DMLC_ROLE']}: MXNet's tracker, which uses servers and workers, started"
            " this process: use steady launch instead, which accepts the tracker's -n, -H and --launcher"
        )
    return World()


def _world(names: _Variables, variables: Mapping[str, str]) -> World:
    launcher = (variables.get(LAUNCHER) if names is _LAUNCHERS[0] else None) or names.launcher
    rank, size = _number(variables, names.rank), _number(variables, names.size)
    if size < 1 or rank >= size:
        raise InputError(f"{launcher} says that this is rank {rank} of {size}: ranks are numbered from 0 to {size - 1}")
    if size == 1:
        return World(launcher=launcher)
    local_rank = _number(variables, names.local_rank) if names.local_rank in variables else 0
    local_size = 1
    if names.local_size in variables and launcher == "Slurm":
        node = _number(variables, "SLURM_NODEID") if "SLURM_NODEID" in variables else 0
        tasks = tasks_on(node, variables[names.local_size])
        if tasks is None:
            value = variables[names.local_size]
            raise InputError(f"{names.local_size} is {value!r}: it must be numbers of tasks, such as 2(x3),1")
        local_size = tasks
    elif names.local_size in variables:
        local_size = _number(variables, names.local_size)
    local_size = max(local_size, local_rank + 1)
    address = variables.get("MASTER_ADDR") or (LOOPBACK if local_size >= size else "")
    if not address and launcher == "Slurm":
        address = first_host(variables.get("SLURM_STEP_NODELIST", ""))
    if not address:
        raise InputError(
            f"{launcher} starts ranks on several machines, but MASTER_ADDR is not set: set it on all of them to the"
            " address of rank 0's machine (mpirun -x MASTER_ADDR=...), or use steady launch, which does"
        )
    if "MASTER_PORT" in variables:
        port = _number(variables, "MASTER_PORT")
        if not 1 <= port <= 65535:
            raise InputError(f"MASTER_PORT is {port}: a port is from 1 to 65535")
    else:  # one that all processes of a launch find alike, and those of another hardly ever
        launch = " ".join(variables.get(name, "") for name in _LAUNCH)
        port = _PORTS[zlib.crc32(launch.encode()) % len(_PORTS)]
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=min(local_size, size),
        address=address,
        port=port,
        launcher=launcher,
    )


def first_host(nodes: str) -> str:
    """Return the first of Slurm's list of hosts.

    >>> first_host("gpu[07-09,12],login"), first_host("a,b"), first_host("rack[1-2]-n[3-4]"), first_host("")
    ('gpu07', 'a', 'rack1-n3', '')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group()) if first else ""


def _number(variables: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"[0-9]+", variables[name]):
        raise InputError(f"{name} is {variables[name]!r}: it must be a whole number")
    return int(variables[name])
