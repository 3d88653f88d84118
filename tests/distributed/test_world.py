"""A process finds its world in what any launcher tells it, and half-told worlds are refused with the remedy.

The variables are those that the real launchers set (``cluster/test_worlds.py`` starts them).
"""

from __future__ import annotations

import pytest

from steadytrain.distributed.world import LAUNCHER, LOOPBACK, World, world_from_environment
from steadytrain.errors import InputError

TORCHRUN = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "none",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "PMIX_NAMESPACE": "1203437569",
    "PMIX_RANK": "1",
}
MPICH = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2", "PMI_FD": "6"}
# What sbatch and salloc set for the shell in the job, which is one process whatever the number of tasks.
BATCH = {
    "SLURM_JOB_ID": "12",
    "SLURM_NTASKS": "3",
    "SLURM_NPROCS": "3",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_NODEID": "0",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
    "SLURM_TASKS_PER_NODE": "2,1",
}
SRUN = BATCH | {
    "SLURM_PROCID": "2",
    "SLURM_NODEID": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1",
}
KUBERNETES = {"JOB_COMPLETION_INDEX": "2", "WORLD_SIZE": "4", "MASTER_ADDR": "train-0.train", "MASTER_PORT": "29500"}


def _place(world: World) -> tuple[int, int, int, int]:
    return world.rank, world.size, world.local_rank, world.local_size


@pytest.mark.parametrize(
    ("variables", "place", "address", "launcher"),
    [
        ({}, (0, 1, 0, 1), LOOPBACK, ""),
        (TORCHRUN, (3, 4, 1, 2), "10.0.0.1", "torchrun"),
        (OPEN_MPI, (1, 2, 1, 2), LOOPBACK, "Open MPI"),
        (MPICH, (1, 2, 1, 2), LOOPBACK, "MPI"),
        (SRUN, (2, 3, 0, 1), "gpu07", "Slurm"),
        (BATCH, (0, 1, 0, 1), LOOPBACK, ""),
        (KUBERNETES, (2, 4, 0, 1), "train-0.train", "Kubernetes"),
        (KUBERNETES | TORCHRUN | {LAUNCHER: "Kubernetes"}, (3, 4, 1, 2), "10.0.0.1", "Kubernetes"),
        (OPEN_MPI | {LAUNCHER: "steady launch"}, (1, 2, 1, 2), LOOPBACK, "Open MPI"),
    ],
    ids=["alone", "torchrun", "openmpi", "mpich", "srun", "sbatch", "kubernetes", "node", "mpi-in-node"],
)
def test_every_launcher_is_understood(
    variables: dict[str, str], place: tuple[int, int, int, int], address: str, launcher: str
) -> None:
    world = world_from_environment(variables)
    assert _place(world) == place
    assert (world.address, world.launcher) == (address, launcher)


def test_the_innermost_launcher_counts() -> None:
    """Whoever started this process last told it most: torchrun under srun, a program's own ranks under either."""
    assert world_from_environment(SRUN | TORCHRUN) == world_from_environment(TORCHRUN)
    assert world_from_environment(SRUN | OPEN_MPI).launcher == "Open MPI"
    assert world_from_environment(KUBERNETES | TORCHRUN).rank == 3
    # mpiexec of MPICH lets srun start one helper a machine: its ranks see the helper's variables as well.
    assert world_from_environment(SRUN | MPICH | {"MASTER_ADDR": "gpu07"}).launcher == "MPI"


def test_slurms_own_pmi_is_slurm() -> None:
    """``srun --mpi=pmi2`` tells rank and size in MPI's words as well, but not which GPU is whose."""
    variables = SRUN | {"PMI_RANK": "2", "PMI_SIZE": "3"}
    assert world_from_environment(variables) == world_from_environment(SRUN)


def test_a_world_of_one_has_no_meeting_place() -> None:
    alone = world_from_environment({"RANK": "0", "WORLD_SIZE": "1"})
    assert _place(alone) == _place(World())
    assert alone.is_first and alone.is_local_first
    assert world_from_environment({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}).size == 1


def test_all_ranks_of_a_launch_find_one_port_and_another_launch_another() -> None:
    ports = {
        job: {
            world_from_environment(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": rank, "PMIX_NAMESPACE": job}).port
            for rank in "01"
        }
        for job in ("1203437569", "1203437570")
    }
    first, second = ports.values()
    assert len(first) == len(second) == 1
    assert first != second
    again = world_from_environment(SRUN | {"SLURM_RESTART_COUNT": "1"})
    assert again.port != world_from_environment(SRUN).port, "a requeued job's ranks must not meet those of before"
    assert all(1024 < port < 32768 for port in (*first, *second, again.port))


def test_who_is_first() -> None:
    world = world_from_environment(TORCHRUN | {"RANK": "2", "LOCAL_RANK": "0"})
    assert world.is_local_first and not world.is_first
    assert world_from_environment(OPEN_MPI | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}).is_first


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"WORLD_SIZE": "4"}, r"WORLD_SIZE is 4, and RANK is not set: set both"),
        ({"RANK": "1"}, r"RANK is 1, and WORLD_SIZE is not set: set both"),
        (TORCHRUN | {"RANK": "4"}, r"torchrun says that this is rank 4 of 4: ranks are numbered from 0"),
        (TORCHRUN | {"WORLD_SIZE": "0", "RANK": "0"}, r"rank 0 of 0"),
        (TORCHRUN | {"RANK": "one"}, r"RANK is 'one': it must be a whole number"),
        (TORCHRUN | {"RANK": "-1"}, r"RANK is '-1': it must be a whole number"),
        (TORCHRUN | {"RANK": "2(x3)"}, r"RANK is '2\(x3\)': it must be a whole number"),
        (TORCHRUN | {"MASTER_PORT": "http"}, r"MASTER_PORT is 'http': it must be a whole number"),
        (TORCHRUN | {"MASTER_PORT": "70000"}, r"MASTER_PORT is 70000: a port is from 1 to 65535"),
        (TORCHRUN | {"MASTER_ADDR": ""}, r"torchrun starts ranks on several machines, but MASTER_ADDR is not set"),
        (OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "1", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}, r"mpirun -x MASTER_ADDR"),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, r"OMPI_COMM_WORLD_RANK is not set"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "many"}, r"SLURM_STEP_TASKS_PER_NODE is 'many'"),
        ({"DMLC_ROLE": "worker", "DMLC_NUM_WORKER": "2"}, r"DMLC_ROLE is worker.*steady launch"),
    ],
)
def test_what_cannot_be_is_refused_with_the_remedy(variables: dict[str, str], says: str) -> None:
    with pytest.raises(InputError, match=says) as raised:
        world_from_environment(variables)
    assert "\n" not in str(raised.value)


def test_variables_set_to_nothing_are_not_set() -> None:
    """As shells and manifests do: ``MASTER_PORT=`` for "whatever it was before"."""
    assert world_from_environment({"RANK": "", "WORLD_SIZE": "", "DMLC_ROLE": ""}) == World()
    assert world_from_environment(OPEN_MPI | {"MASTER_PORT": "", "MASTER_ADDR": ""}) == world_from_environment(OPEN_MPI)


def test_an_index_alone_is_a_task_of_its_own() -> None:
    """An Indexed Job of Kubernetes without WORLD_SIZE is many trainings, not one."""
    assert world_from_environment({"JOB_COMPLETION_INDEX": "3"}) == World()
