"""Memory that processes have in common: found by its name, never trusted when it was left, and left by nobody."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tests.data.loader.pictures import small_pngs

from steadytrain.data.loader import Crop, ImageLoader
from steadytrain.data.loader.rank_cache import LocalRanks, RankMemory, find_local_ranks, remove_left_files

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")
FIRST, SECOND = (LocalRanks("a launch", 2, rank) for rank in range(2))
MB = 2**20


@pytest.fixture(autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In place of /dev/shm, which other programs use, too."""
    folder = tmp_path_factory.mktemp("memory", numbered=True)
    monkeypatch.setenv("STEADYTRAIN_SHM", str(folder))
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


TORCHRUN = {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "29500", "WORLD_SIZE": "8", "GROUP_RANK": "0"}


def test_a_launch_is_known_by_what_started_it() -> None:
    local_ranks = find_local_ranks(None, TORCHRUN)
    assert local_ranks is not None and (local_ranks.count, local_ranks.rank) == (4, 1)
    mpi = {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0", "PMIX_NAMESPACE": "prterun-1"}
    assert find_local_ranks(None, mpi) == LocalRanks("PMIX_NAMESPACE=prterun-1", 2, 0)
    mpich = {"MPI_LOCALNRANKS": "2", "MPI_LOCALRANKID": "1", "MASTER_ADDR": "node-7"}
    assert find_local_ranks(None, mpich) == LocalRanks("MASTER_ADDR=node-7", 2, 1)
    srun = {"SLURM_STEP_TASKS_PER_NODE": "8(x2)", "SLURM_LOCALID": "3", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    assert find_local_ranks(None, srun) == LocalRanks("SLURM_JOB_ID=7 SLURM_STEP_ID=0", 8, 3)
    assert find_local_ranks(None, srun | {"SLURM_STEP_TASKS_PER_NODE": "2,1"}) is None
    uneven = srun | {"SLURM_STEP_TASKS_PER_NODE": "4(x2),8", "SLURM_NODEID": "2"}
    assert find_local_ranks(None, uneven) == LocalRanks("SLURM_JOB_ID=7 SLURM_STEP_ID=0", 8, 3)
    assert find_local_ranks(None, uneven | {"SLURM_NODEID": "1"}) == LocalRanks("SLURM_JOB_ID=7 SLURM_STEP_ID=0", 4, 3)
    assert find_local_ranks("mine", TORCHRUN) == LocalRanks("mine", 4, 1)
    assert find_local_ranks("mine", {}) == LocalRanks("mine")


@pytest.mark.parametrize(
    ("launch", "variables"),
    [
        (None, {}),
        (None, TORCHRUN | {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}),
        (None, TORCHRUN | {"LOCAL_RANK": "4"}),
        (None, TORCHRUN | {"LOCAL_WORLD_SIZE": "all"}),
        (None, {"LOCAL_WORLD_SIZE": "4", "LOCAL_RANK": "1"}),
        ("", TORCHRUN),
    ],
    ids=str,
)
def test_who_is_alone_shares_nothing(launch: str | None, variables: dict[str, str]) -> None:
    assert find_local_ranks(launch, variables) is None


@pytest.mark.parametrize("changed", ["MASTER_PORT", "TORCHELASTIC_RESTART_COUNT", "WORLD_SIZE", "GROUP_RANK"])
def test_another_launch_restart_or_agent_has_memory_of_its_own(changed: str) -> None:
    local_ranks, other = find_local_ranks(None, TORCHRUN), find_local_ranks(None, TORCHRUN | {changed: "3"})
    assert local_ranks is not None and other is not None
    rank_memory = RankMemory(local_ranks, "images", MB)
    rank_memory.memory[:] = 1
    assert not RankMemory(other, "images", MB).memory.any()


def test_all_have_one_memory_which_loses_its_name_when_all_have_come(folder: Path) -> None:
    first = RankMemory(FIRST, "images", MB)
    assert not first.memory.any() and len(names(folder)) == 1
    second = RankMemory(SECOND, "images", MB)
    assert names(folder) == []
    first.memory[7] = 3
    assert second.memory[7] == 3 and len(second.memory) == MB
    del first
    second.memory[8] = 4
    later = RankMemory(FIRST, "images", MB)  # the data were read once more: that is a new beginning
    assert not later.memory.any()


@pytest.mark.parametrize(
    "other", [(FIRST, "others", MB), (FIRST, "images", 2 * MB), (LocalRanks("a launch", 3, 0), "images", MB)], ids=str
)
def test_what_differs_in_anything_is_another_memory(other: tuple[LocalRanks, str, int]) -> None:
    rank_memory = RankMemory(FIRST, "images", MB)
    rank_memory.memory[:] = 1
    assert not RankMemory(*other).memory.any()


def test_the_last_to_leave_removes_what_not_all_came_to(folder: Path) -> None:
    three = [RankMemory(LocalRanks("a launch", 4, rank), "images", MB) for rank in range(3)]
    unknown = RankMemory(LocalRanks("another"), "images", MB)
    for number in range(3):
        assert len(names(folder)) == 2
        three[number]._end()
    assert len(names(folder)) == 1
    del unknown
    assert names(folder) == []


LEFT = """
import os, signal
from steadytrain.data.loader import rank_cache as ranks
common = ranks.RankMemory(ranks.LocalRanks("a launch", 2, 0), "images", 2**20)
common.memory[:] = 1
os.kill(os.getpid(), signal.SIGKILL)
"""


def leave_one(folder: Path) -> None:
    ended = subprocess.run([sys.executable, "-c", LEFT], check=False)
    assert ended.returncode == -signal.SIGKILL and len(names(folder)) == 1


def test_what_a_killed_process_left_is_neither_trusted_nor_kept(folder: Path) -> None:
    leave_one(folder)
    common = RankMemory(SECOND, "images", MB)
    assert not common.memory.any() and len(names(folder)) == 1
    del common
    leave_one(folder)
    del_me = RankMemory(LocalRanks("another launch", 2, 0), "images", MB)
    assert len(names(folder)) == 1, "the next to come removes it, whatever its own launch"
    remove_left_files()
    assert len(names(folder)) == 1, "one that is used stays"
    del del_me
    assert names(folder) == []


def test_a_loader_that_shares_nothing_removes_what_killed_ranks_left_and_leaves_what_others_have(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    common = RankMemory(FIRST, "images", MB)
    in_use = names(folder)
    (folder / f"steadytrain-{os.getuid()}-{32 * '0'}").touch()
    with ImageLoader(small_pngs(3), Crop(kind="none", size=8), batch_size=2):
        assert names(folder) == in_use
    (folder / f"steadytrain-{os.getuid()}-{32 * '1'}").touch()

    def refuse(file: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", refuse)  # as where nobody can know whether it is in use
    remove_left_files()
    assert len(names(folder)) == 2
    del common


def test_a_forked_process_that_ends_takes_nothing_away(folder: Path) -> None:
    common = RankMemory(FIRST, "images", MB)
    if not (child := os.fork()):
        common._end()
        os._exit(0)
    os.waitpid(child, 0)
    assert len(names(folder)) == 1
    common.memory[0] = 1
    assert RankMemory(SECOND, "images", MB).memory[0] == 1


def test_where_there_is_no_room_nobody_is_killed_and_nothing_stays(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEADYTRAIN_SHM", str(small_disk))
    with pytest.raises(OSError, match=f"Errno {errno.ENOSPC}.* has 2 MB free, of which at most half is used"):
        RankMemory(FIRST, "images", 3 * MB // 2)
    assert names(small_disk) == []
    fits = RankMemory(FIRST, "images", MB // 2)
    (small_disk / "other").write_bytes(bytes(MB))
    fits.memory[:] = 1  # all of it was reserved
    second = RankMemory(SECOND, "images", MB // 2)
    assert second.memory.all()


def test_the_file_of_another_user_or_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    common = RankMemory(FIRST, "images", MB)
    (name,) = names(folder)
    del common
    (folder / name).symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_bytes(b"precious")
    with pytest.raises(OSError):
        RankMemory(FIRST, "images", MB)
    assert (tmp_path / "precious").read_bytes() == b"precious"
    (folder / name).unlink()
    (folder / name).write_bytes(b"somebody else's")
    if os.getuid() == 0:
        os.chown(folder / name, 12345, 12345)
        with pytest.raises(PermissionError):
            RankMemory(FIRST, "images", MB)


def test_one_at_a_time_is_in_the_place_for_one() -> None:
    first, second = RankMemory(FIRST, "images", MB), RankMemory(SECOND, "images", MB)
    order: list[str] = []

    def enter() -> None:
        with second.alone():
            order.append("second")

    with first.alone():
        thread = threading.Thread(target=enter)
        thread.start()
        thread.join(0.1)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_where_the_system_has_no_locks_of_open_files_nothing_is_shared(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = fcntl.fcntl

    def refuse(file: int, command: int, argument: bytes = b"") -> bytes | int:
        if command == fcntl.F_OFD_SETLKW:
            raise OSError(errno.EINVAL, "Invalid argument")
        return lock(file, command, argument)

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(OSError, match="Invalid argument"):
        RankMemory(FIRST, "images", MB)
    assert not names(folder)
