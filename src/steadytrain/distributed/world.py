"""Which of how many processes this one is: as whatever started it has told it by the environment.

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from steadytrain.errors import InputError

LOOPBACK = "127.0.0.1"
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
        """Whether it is the rank that writes what all have in common, and speaks."""
        return self.rank == 0

    @property
    def is_local_first(self) -> bool:
        """Whether it is the first of its machine."""
        return self.local_rank == 0


@dataclass(frozen=True)
class _Words:
    """What a launcher calls rank and size, of all and on one machine; any of several names counts."""

    launcher: str
    rank: tuple[str, ...]
    size: tuple[str, ...]
    local_rank: tuple[str, ...]
    local_size: tuple[str, ...]


_LAUNCHERS = (
    _Words("torchrun", ("RANK",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Words("Kubernetes", ("JOB_COMPLETION_INDEX",), ("WORLD_SIZE",), ("LOCAL_RANK",), ("LOCAL_WORLD_SIZE",)),
    _Words(
        "Open MPI",
        ("OMPI_COMM_WORLD_RANK",),
        ("OMPI_COMM_WORLD_SIZE",),
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        ("OMPI_COMM_WORLD_LOCAL_SIZE",),
    ),
    _Words("MPI", ("PMI_RANK",), ("PMI_SIZE",), ("MPI_LOCALRANKID",), ("MPI_LOCALNRANKS",)),
    # Set by srun for each task, and not in the shell of a batch script, which is one process.
    _Words(
        "Slurm",
        ("SLURM_PROCID",),
        ("SLURM_STEP_NUM_TASKS",),
        ("SLURM_LOCALID",),
        ("SLURM_STEP_TASKS_PER_NODE",),
    ),
)


def world_from_environment(variables: Mapping[str, str]) -> World:
    """The world that the environment tells of; alone where it tells of none.

    Raises:
        InputError: it tells half of it, or what cannot be.
    """
    telling = [words for words in _LAUNCHERS if _first(variables, words.size) and _first(variables, words.rank)]
    if telling:
        return _told(_innermost(telling, variables), variables)
    for name, other in [*((words.size[0], words.rank[0]) for words in _LAUNCHERS), ("RANK", "WORLD_SIZE")]:
        if variables.get(name):
            raise InputError(
                f"{name} is {variables[name]}, and {other} is not set: set both (a launcher does), or neither to train"
                " with one process"
            )
    if variables.get("DMLC_ROLE"):
        raise InputError(
            f"DMLC_ROLE is {variables['DMLC_ROLE']}: MXNet's tracker started this, which has servers and workers;"
            " start it with steady launch, which takes the tracker's -n, -H and --launcher"
        )
    return World()


def _innermost(telling: Sequence[_Words], variables: Mapping[str, str]) -> _Words:
    """The one that started this process, of several within each other."""
    slurms_own = telling[0].launcher == "MPI" and not _first(variables, telling[0].local_rank)
    # srun --mpi=pmi2 uses MPI's words besides its own, for all but the ranks on one machine
    return telling[-1] if slurms_own else telling[0]


def _told(words: _Words, variables: Mapping[str, str]) -> World:
    rank, size = _number(variables, words.rank), _number(variables, words.size)
    if size < 1 or rank >= size:
        raise InputError(f"{words.launcher} says that this is rank {rank} of {size}: ranks go from 0 to the number - 1")
    if size == 1:
        return World(launcher=words.launcher)
    known = _first(variables, words.local_rank) is not None
    local_rank = _number(variables, words.local_rank) if known else 0
    local_size = max(_local_size(words, variables), local_rank + 1)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=min(local_size, size),
        address=_address(words, variables, is_one_machine=local_size >= size),
        port=_port(variables),
        launcher=words.launcher,
    )


def _local_size(words: _Words, variables: Mapping[str, str]) -> int:
    told = _first(variables, words.local_size)
    if told is None:
        return 1
    if words.launcher != "Slurm":
        return _number(variables, words.local_size)
    node = _number(variables, ("SLURM_NODEID",)) if variables.get("SLURM_NODEID") else 0
    if (tasks := tasks_on(node, told)) is None:
        raise InputError(f"{words.local_size[0]} is {told!r}: it must be numbers of tasks, as in 2(x3),1")
    return tasks


def tasks_on(node: int, tasks: str) -> int | None:
    """How many tasks a node of a Slurm step has, by Slurm's list of all nodes; None where it is no such list.

    >>> tasks_on(2, "2(x3)"), tasks_on(1, "2,1"), tasks_on(0, "some")
    (2, 1, None)
    """
    counts: list[int] = []
    for part in tasks.split(","):
        if (read := re.fullmatch(r"([0-9]+)(?:\(x([0-9]+)\))?", part)) is None:
            return None
        counts += [int(read[1])] * int(read[2] or 1)
    return counts[min(node, len(counts) - 1)]


def _address(words: _Words, variables: Mapping[str, str], *, is_one_machine: bool) -> str:
    if told := variables.get("MASTER_ADDR"):
        return told
    if is_one_machine:
        return LOOPBACK
    if words.launcher == "Slurm" and (nodes := first_host(variables.get("SLURM_STEP_NODELIST", ""))):
        return nodes
    raise InputError(
        f"{words.launcher} starts ranks on several machines, and MASTER_ADDR is not set: set it to the address of rank"
        " 0's machine for all of them (mpirun -x MASTER_ADDR=...), or use steady launch, which does"
    )


def _port(variables: Mapping[str, str]) -> int:
    """Where it is not told, one that all processes of a launch find alike, and those of another hardly ever."""
    if variables.get("MASTER_PORT"):
        port = _number(variables, ("MASTER_PORT",))
        if not 1 <= port <= 65535:
            raise InputError(f"MASTER_PORT is {port}: ports go from 1 to 65535")
        return port
    launch = " ".join(variables.get(name, "") for name in _LAUNCH)
    return _PORTS[zlib.crc32(launch.encode()) % len(_PORTS)]


def first_host(nodes: str) -> str:
    """The first of Slurm's list of hosts.

    >>> first_host("gpu[07-09,12],login"), first_host("a,b"), first_host("rack[1-2]-n[3-4]"), first_host("")
    ('gpu07', 'a', 'rack1-n3', '')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first.group()) if first else ""


def _first(variables: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    return next((variables[name] for name in names if variables.get(name)), None)


def _number(variables: Mapping[str, str], names: tuple[str, ...]) -> int:
    name = next(name for name in names if variables.get(name))
    if not re.fullmatch(r"[0-9]+", variables[name]):
        raise InputError(f"{name} is {variables[name]!r}: it must be a whole number")
    return int(variables[name])
