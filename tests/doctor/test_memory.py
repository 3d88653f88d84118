"""Memory, its limits, and who hands it out."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from tests.doctor.trees import DOCKER, POD, SERVER, tree

from steadytrain.doctor.memory import allocator, limits, memory


def test_memory_swap_and_huge_pages_of_a_machine(tmp_path: Path) -> None:
    told = memory(tree(tmp_path, SERVER))
    assert (told.total_bytes, told.available_bytes) == (197_616_000 * 1024, 180_000_000 * 1024)
    assert (told.swap_total_bytes, told.swap_used_bytes) == (8_388_604 * 1024, 388_604 * 1024)
    assert (told.huge_pages, told.huge_pages_defrag, told.overcommit) == ("never", "madvise", "heuristic")
    assert (told.limit_bytes, told.group_used_bytes, told.out_of_memory_kills) == (None, None, None)


@pytest.mark.parametrize(
    ("files", "limit", "used", "kills"),
    [(DOCKER, 8 << 30, 5_500_000_000, 2), (POD, 4 << 30, 3_000_000_000, 3)],
)
def test_a_control_group_leaves_its_limit_less_what_cannot_be_dropped(
    tmp_path: Path, files: dict[str, str], limit: int, used: int, kills: int
) -> None:
    told = memory(tree(tmp_path, SERVER, files))
    assert (told.limit_bytes, told.group_used_bytes, told.available_bytes) == (limit, used, limit - used)
    assert told.out_of_memory_kills == kills


def test_a_limit_above_the_machines_memory_is_none(tmp_path: Path) -> None:
    no_limit = {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"}
    assert memory(tree(tmp_path, SERVER, POD, no_limit)).limit_bytes is None


def test_without_proc_what_is_not_known_is_none(tmp_path: Path) -> None:
    told = memory(tmp_path)
    assert told.total_bytes == psutil.virtual_memory().total and told.available_bytes
    assert (told.swap_used_bytes, told.huge_pages, told.overcommit) == (None, None, None)


def test_limits_are_this_processs_own() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, {hard}));"
        "resource.setrlimit(resource.RLIMIT_AS, (1 << 33, 1 << 33));"
        "from steadytrain.doctor.memory import limits; told = limits();"
        "print(told.open_files, told.address_space_bytes)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).split() == ["64", str(1 << 33)]
    assert limits().open_files == (None if soft == resource.RLIM_INFINITY else soft)


def test_glibc_is_named_and_what_steadytrain_sets(tmp_path: Path) -> None:
    maps = {"proc/self/maps": "7f0 r-xp 0 fe:00 1 /usr/lib/x86_64-linux-gnu/libc.so.6"}
    told = allocator(tree(tmp_path, maps), {})
    assert told.preloaded == ()
    if (told.libc or "").startswith("glibc"):
        assert told.by_steadytrain == "training on a CPU keeps freed memory, on huge pages"


def test_another_allocator_is_seen_in_the_process_and_not_only_in_the_variable(tmp_path: Path) -> None:
    path = "/usr/lib/x86_64-linux-gnu/libjemalloc.so.2"
    maps = {"proc/self/maps": f"7f0 r-xp 0 fe:00 1 {path}\n7f1 rw-p 0 fe:00 1 {path}"}
    told = allocator(tree(tmp_path / "a", maps), {"LD_PRELOAD": path})
    assert told.preloaded == ("libjemalloc.so.2",)
    assert "nothing" in (told.by_steadytrain or "")
    absent = allocator(tree(tmp_path / "b", {"proc/self/maps": ""}), {"LD_PRELOAD": f"{path}:/lib/libother.so"})
    assert absent.preloaded == ("libjemalloc.so.2 (not loaded)",)
