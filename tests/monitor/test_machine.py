"""What the machine did between two readings: real effects, and a tree of a machine with control groups of version 2."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.doctor.trees import tree

from steadytrain.events import MachineStats
from steadytrain.machine.counters import Elsewhere, Machine, Reading, between

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
GROUPS = Path("/sys/fs/cgroup/cpu")


def _measured(do: Callable[[], object]) -> MachineStats:
    with closing(Machine()) as machine:
        before = machine.read()
        do()
        return between(before, machine.read())


@linux
def test_another_process_shows_as_others_and_not_as_ours(tmp_path: Path) -> None:
    done = tmp_path / "done"
    burn = f"import time\nwhile time.process_time() < 1: pass\nopen({str(done)!r}, 'w').close()"

    def wait() -> None:
        # Its parent ends at once: it is nobody's child here.
        words = ["sh", "-c", '"$0" -c "$1" >/dev/null 2>&1 &', sys.executable, burn]
        subprocess.run(words, check=True)
        while not done.exists():
            os.sched_yield()

    told = _measured(wait)
    assert told.others is not None and told.cpu is not None and told.children is not None
    assert told.others * told.seconds >= 0.7
    assert told.children * told.seconds < 0.5
    assert told.cpu >= told.children


@linux
def test_memory_touched_for_the_first_time_shows_as_faults() -> None:
    def touch() -> None:
        with mmap.mmap(-1, 16 << 20) as memory:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            memory[:: mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)

    told = _measured(touch)
    assert told.minor_faults is not None and told.minor_faults * told.seconds >= (16 << 20) // mmap.PAGESIZE - 8


@linux
def test_the_time_of_the_cores_adds_up() -> None:
    told = _measured(lambda: sum(range(5_000_000)))
    assert told.cores <= told.machine_cores == os.cpu_count()
    assert None not in (told.cpu, told.idle, told.others, told.iowait, told.steal)
    assert told.idle is not None and 0 <= told.idle <= told.machine_cores * 1.2
    assert told.system_share is not None and 0 <= told.system_share <= 1
    assert told.memory_bytes is not None and told.memory_bytes > 2**20
    assert told.threads is not None and told.threads >= 1


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group (version 1) with a fifth of a processor."""
    path = GROUPS / f"steadytrain-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / "cpu.cfs_quota_us").write_text("20000")
    except OSError:
        pytest.skip("no control groups of version 1 that may be written")
    yield path
    path.rmdir()


@linux
def test_a_quota_shows_as_time_withheld_also_where_it_came_later(group: Path) -> None:
    script = f"""
import json, time
from steadytrain.machine.counters import Machine, between
machine = Machine()
first = machine.read()
open({str(group / "cgroup.procs")!r}, "w").write("0")
second = machine.read()
until = time.process_time() + 0.3
while time.process_time() < until: pass
told = between(second, machine.read())
print(json.dumps([first.cores, told.cores, told.throttled_seconds]))
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    before, cores, throttled = json.loads(told.stdout)
    assert cores == 1 <= before
    assert throttled > 0.1


V2 = {
    "proc/self/cgroup": "0::/jobs/one",
    "proc/meminfo": "MemTotal: 8000 kB\nMemAvailable: 5000 kB",
    "proc/vmstat": "pswpin 10\npswpout 20\npswpin_x 3",
    "proc/net/dev": "Inter-| x\n face | y\n    lo: 9 0 0 0 0 0 0 0 9 0\n  eth0: 1000 1 0 0 0 0 0 0 500 1",
    "proc/diskstats": "254 0 vda 1 2 3 4 5 6 7 8 0 1000 11\n7 0 loop0 1 1 1 1 1 1 1 1 0 77 1",
    "proc/pressure/cpu": "some avg10=0 avg60=0 avg300=0 total=0",
    "sys/fs/cgroup/jobs/one/cgroup.type": "domain",
    "sys/fs/cgroup/jobs/one/cpu.stat": "usage_usec 5\nnr_periods 1\nnr_throttled 1\nthrottled_usec 1000000",
    "sys/fs/cgroup/jobs/one/cpu.max": "100000 100000",
    "sys/fs/cgroup/jobs/one/cpu.pressure": "some avg10=0 avg60=0 avg300=0 total=5000000\nfull avg10=0 total=1",
    "sys/fs/cgroup/jobs/one/memory.max": "4096000",
    "sys/fs/cgroup/jobs/one/memory.current": "3000000",
    "sys/fs/cgroup/jobs/one/memory.stat": "anon 5\ninactive_file 500000",
    "sys/fs/cgroup/jobs/memory.max": "max",
    "sys/fs/cgroup/jobs/cpu.stat": "usage_usec 5\nnr_throttled 0\nthrottled_usec 0",
}
LATER = {
    "proc/vmstat": "pswpin 11\npswpout 21",
    "proc/net/dev": "Inter-| x\n face | y\n    lo: 99 0 0 0 0 0 0 0 99 0\n  eth0: 2000 1 0 0 0 0 0 0 1500 1",
    "proc/diskstats": "254 0 vda 1 2 3 4 5 6 7 8 0 2000 11\n7 0 loop0 1 1 1 1 1 1 1 1 0 99999 1",
    "sys/fs/cgroup/jobs/one/cpu.stat": "usage_usec 5\nnr_periods 9\nnr_throttled 5\nthrottled_usec 3500000",
    "sys/fs/cgroup/jobs/one/cpu.pressure": "some avg10=0 avg60=0 avg300=0 total=6000000\nfull avg10=0 total=1",
}


def _ten_seconds(root: Path, *later: dict[str, str]) -> MachineStats:
    with closing(Machine(tree(root, V2))) as machine:
        before = machine.read()
        tree(root, *later)
        after = machine.read()
    readings = (Reading(**{**vars(reading), "at": at}) for reading, at in ((before, 100.0), (after, 110.0)))
    return between(*readings)


def test_control_groups_of_version_2(tmp_path: Path) -> None:
    told = _ten_seconds(tmp_path, LATER)
    assert (told.seconds, told.cores) == (10.0, 1)
    assert told.throttled_seconds == 2.5
    assert told.pressure == {"cpu": 0.1}
    assert told.memory_limit_bytes == 4_096_000
    assert told.available_bytes == 4_096_000 - 2_500_000
    assert told.swap_bytes == 2 * mmap.PAGESIZE / 10
    assert told.network_bytes == 200.0
    assert told.disk_busy == 0.1


def test_what_is_not_there_is_named_and_not_zero(tmp_path: Path) -> None:
    told = _ten_seconds(tmp_path)
    assert (told.cpu, told.idle, told.memory_bytes, told.disk_read_bytes) == (None, None, None, None)
    assert {"cpu", "children", "idle", "others", "minor_faults", "memory_bytes", "pressure.io"} <= set(told.missing)
    assert not {"throttled_seconds", "available_bytes", "swap_bytes", "pressure.cpu"} & set(told.missing)
    assert told.network_bytes == 0.0


def test_counters_that_went_back_count_as_nothing() -> None:
    def reading(at: float, cpu: float) -> Reading:
        return Reading(at=at, cores=1, machine_cores=1, totals={"cpu": cpu, "system": 0.0}, levels={})

    assert between(reading(0, 9.0), reading(1, 5.0)).cpu == 0.0


def test_elsewhere_psutil_tells_the_same_of_what_it_knows() -> None:
    source = Elsewhere()
    before = source.read()
    sum(range(3_000_000))
    told = between(before, source.read())
    assert told.cpu is not None and told.cpu > 0
    assert told.idle is not None and told.memory_bytes is not None and told.memory_bytes > 2**20
    assert {"children", "throttled_seconds", "disk_read_bytes", "pressure.cpu"} <= set(told.missing)
    source.close()


@linux
def test_other_ranks_of_the_run_are_told_apart_from_other_processes() -> None:
    """A process that is no child of this one, as ranks are not of each other."""
    spin = f"{sys.executable} -c 'while True: pass' > /dev/null & echo $!"
    rank = int(subprocess.run(["sh", "-c", spin], stdout=subprocess.PIPE, text=True, check=True).stdout)
    try:
        with closing(Machine(ranks=[rank])) as source:
            before = source.read()
            deadline = time.monotonic() + 30
            while between(before, source.read()).ranks == 0 and time.monotonic() < deadline:
                time.sleep(0.1)
            stats = between(before, source.read())
    finally:
        os.kill(rank, signal.SIGKILL)
    assert stats.ranks > 0 and stats.others is not None and "ranks" not in stats.missing
