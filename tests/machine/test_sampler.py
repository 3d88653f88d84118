"""What the machine did between two readings, and the thread that samples it beside a run."""

from __future__ import annotations

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.machine.recorded import H100
from tests.machine.test_nvml import HOST, Driver, _h100
from tests.machine.trees import tree

from steadytrain.events import DeviceStats, EventLog, MachineStats, Noticed, read
from steadytrain.machine.nvml import GpuSampler
from steadytrain.machine.process_tree import ProcessTree, parse_stat, read_stat
from steadytrain.machine.sampler import (
    Counters,
    LinuxCounters,
    PsutilCounters,
    busiest_between,
    pause,
    sampling,
    stats_between,
)

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
GROUPS = Path("/sys/fs/cgroup/cpu")


def _measured(do: Callable[[], object]) -> MachineStats:
    machine = LinuxCounters()
    before = machine.read()
    do()
    return stats_between(before, machine.read())


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

    sample = _measured(wait)
    assert sample.others is not None and sample.cpu is not None and sample.children is not None
    assert sample.others * sample.seconds >= 0.7
    assert sample.children * sample.seconds < 0.5
    assert sample.cpu >= sample.children


@linux
def test_another_process_that_burns_a_core_is_named(tmp_path: Path) -> None:
    pid_file, burn = tmp_path / "pid", "import time\nwhile time.process_time() < 60: pass"
    words = ["sh", "-c", '"$0" -c "$1" >/dev/null 2>&1 & echo $! > "$2"', sys.executable, burn, str(pid_file)]
    subprocess.run(words, check=True)  # its parent ends at once: it is nobody's child here
    pid = int(pid_file.read_text())
    try:
        machine = LinuxCounters()
        before = machine.read()
        time.sleep(2.0)
        after = machine.read()
    finally:
        os.kill(pid, signal.SIGKILL)
    stats = stats_between(before, after)
    (burner,) = busiest_between(before.others, {pid: after.others[pid]}, stats.seconds)
    assert burner["name"].startswith("python") and burner["user"] == tmp_path.owner()
    assert stats.others is not None and 0.1 < burner["cores"] <= stats.others + 0.1
    least = min(process["cores"] for process in stats.other_processes)  # the machine may have busier ones
    assert burner in stats.other_processes or (len(stats.other_processes) == 3 and least >= burner["cores"])


@linux
def test_another_process_that_writes_to_the_disk_is_named_with_its_bytes(tmp_path: Path) -> None:
    lines = (
        "import os, sys",
        "file = open(sys.argv[1], 'wb', 0)",
        "sys.stdin.readline()",
        "file.write(bytes(32 << 20))",
        "os.fsync(file)",
        "print('done', flush=True)",
        "sys.stdin.readline()",
    )
    words = [sys.executable, "-c", "\n".join(lines), str(tmp_path / "written")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as writer:
        assert writer.stdin is not None and writer.stdout is not None
        tree, pid = ProcessTree(os.getppid()), writer.pid
        before = tree.disk_bytes([pid])
        writer.stdin.write("\n")
        writer.stdin.flush()
        assert writer.stdout.readline() == "done\n"
        after, stat = tree.disk_bytes([pid]), read_stat(f"/proc/{pid}")
        writer.stdin.close()
    if after[pid] == before[pid]:
        pytest.skip("what is written here does not reach a disk")
    assert stat is not None
    (named,) = busiest_between({pid: stat}, {pid: stat}, seconds=2.0, disk_bytes=(before, after))
    assert named["pid"] == pid and named["disk_bytes"] == pytest.approx((32 << 20) / 2, rel=0.05)


@linux
def test_processes_on_the_disk_are_asked_for_while_a_disk_is_busy_and_not_else(tmp_path: Path) -> None:
    (tmp_path / "proc/7").mkdir(parents=True)
    (tmp_path / "proc/7/stat").write_text("7 (rsync) S 1 7 7 0 -1 4 9 0 3 0 150 50 0 0 20 0 2 0 1000 4096 10 0")
    machine = LinuxCounters(tmp_path)
    readings = []
    for busy_ms, written in ((0, 0), (10**9, 10**6), (2 * 10**9, 9 * 10**9), (2 * 10**9, 9 * 10**9)):
        (tmp_path / "proc/diskstats").write_text(f"254 0 vda 1 0 8 4 1 0 8 4 0 {busy_ms} 8 0 0 0 0 0 0\n")
        (tmp_path / "proc/7/io").write_text(f"rchar: 0\nread_bytes: 0\nwrite_bytes: {written}\n")
        readings.append(machine.read())
    idle, *busy, idle_again = readings
    assert [dict(counters.others_disk_bytes) for counters in busy] == [{7: 10**6}, {7: 9 * 10**9}]
    assert not idle.others_disk_bytes and not idle_again.others_disk_bytes
    (named,) = stats_between(*busy).other_processes
    assert named["name"] == "rsync" and (named["disk_bytes"] or 0) > 1e6


@linux
def test_a_process_that_began_between_two_readings_counts_from_its_beginning() -> None:
    shell = parse_stat("7 (sh) S 1 7 7 0 -1 4 9 0 3 0 150 50 0 0 20 0 2 0 1000 0 10 0")
    make = parse_stat("9 (make) S 1 7 7 0 -1 4 9 0 3 0 100 50 0 0 20 0 2 0 2000 0 10 0")
    assert shell is not None and make is not None
    (named,) = busiest_between({7: shell}, {7: shell, 9: make}, seconds=3.0)
    assert (named["pid"], named["name"], named["cores"]) == (9, "make", 0.5)
    assert busiest_between({}, {9: make}, seconds=3.0) == ()


@linux
def test_memory_touched_for_the_first_time_shows_as_faults() -> None:
    def touch() -> None:
        with mmap.mmap(-1, 16 << 20) as memory:
            memory.madvise(mmap.MADV_NOHUGEPAGE)
            memory[:: mmap.PAGESIZE] = bytes(len(memory) // mmap.PAGESIZE)

    sample = _measured(touch)
    assert sample.minor_faults is not None and sample.minor_faults * sample.seconds >= (16 << 20) // mmap.PAGESIZE - 8


@linux
def test_the_time_of_the_cores_adds_up() -> None:
    sample = _measured(lambda: sum(range(5_000_000)))
    assert sample.cores <= sample.machine_cores == os.cpu_count()
    assert None not in (sample.cpu, sample.idle, sample.others, sample.iowait, sample.steal)
    assert sample.idle is not None and 0 <= sample.idle <= sample.machine_cores * 1.2
    assert sample.system_share is not None and 0 <= sample.system_share <= 1
    assert sample.memory_bytes is not None and sample.memory_bytes > 2**20
    assert sample.threads is not None and sample.threads >= 1


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group (version 1) with a fiftieth of a processor: less than its share of the busiest machine."""
    path = GROUPS / f"steadytrain-test-{os.getpid()}"
    try:
        path.mkdir()
        (path / "cpu.cfs_quota_us").write_text("2000")
    except OSError:
        pytest.skip("no control groups of version 1 that may be written")
    yield path
    path.rmdir()


@linux
def test_a_quota_shows_as_time_withheld_also_where_it_came_later(group: Path) -> None:
    script = f"""
import json, time
from steadytrain.machine.sampler import LinuxCounters, stats_between
machine = LinuxCounters()
first = machine.read()
open({str(group / "cgroup.procs")!r}, "w").write("0")
second = machine.read()
until = time.process_time() + 0.01
while time.process_time() < until: pass
told = stats_between(second, machine.read())
print(json.dumps([first.cores, told.cores, told.throttled_seconds]))
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    before, cores, throttled = json.loads(process.stdout)
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
    machine = LinuxCounters(tree(root, V2))
    before = machine.read()
    tree(root, *later)
    after = machine.read()
    readings = (Counters(**{**vars(reading), "at": at}) for reading, at in ((before, 100.0), (after, 110.0)))
    return stats_between(*readings)


def test_control_groups_of_version_2(tmp_path: Path) -> None:
    sample = _ten_seconds(tmp_path, LATER)
    assert (sample.seconds, sample.cores) == (10.0, 1)
    assert sample.throttled_seconds == 2.5
    assert sample.pressure == {"cpu": 0.1}
    assert sample.memory_limit_bytes == 4_096_000
    assert sample.available_bytes == 4_096_000 - 2_500_000
    assert sample.swap_bytes == 2 * mmap.PAGESIZE / 10
    assert sample.network_bytes == 200.0
    assert sample.disk_busy == 0.1


def test_what_is_not_there_is_named_and_not_zero(tmp_path: Path) -> None:
    sample = _ten_seconds(tmp_path)
    assert (sample.cpu, sample.idle, sample.memory_bytes, sample.disk_read_bytes) == (None, None, None, None)
    assert {"cpu", "children", "idle", "others", "minor_faults", "memory_bytes", "pressure.io"} <= set(sample.missing)
    assert not {"throttled_seconds", "available_bytes", "swap_bytes", "pressure.cpu"} & set(sample.missing)
    assert sample.network_bytes == 0.0


def test_counters_that_went_back_count_as_nothing() -> None:
    def reading(at: float, cpu: float) -> Counters:
        return Counters(at=at, cores=1, machine_cores=1, totals={"cpu": cpu, "system": 0.0}, levels={})

    assert stats_between(reading(0, 9.0), reading(1, 5.0)).cpu == 0.0


def test_elsewhere_psutil_tells_the_same_of_what_it_knows() -> None:
    source = PsutilCounters()
    before = source.read()
    sum(range(3_000_000))
    sample = stats_between(before, source.read())
    assert sample.cpu is not None and sample.cpu > 0
    assert sample.idle is not None and sample.memory_bytes is not None and sample.memory_bytes > 2**20
    assert {"children", "throttled_seconds", "disk_read_bytes", "pressure.cpu"} <= set(sample.missing)


@linux
def test_other_ranks_of_the_run_are_told_apart_from_other_processes() -> None:
    """A process that is no child of this one, as ranks are not of each other."""
    spin = f"{sys.executable} -c 'while True: pass' > /dev/null & echo $!"
    rank = int(subprocess.run(["sh", "-c", spin], stdout=subprocess.PIPE, text=True, check=True).stdout)
    try:
        source = LinuxCounters(ranks=[rank])
        before = source.read()
        deadline = time.monotonic() + 30
        while stats_between(before, source.read()).ranks == 0 and time.monotonic() < deadline:
            time.sleep(0.1)
        stats = stats_between(before, source.read())
    finally:
        os.kill(rank, signal.SIGKILL)
    assert stats.ranks > 0 and stats.others is not None and "ranks" not in stats.missing


def test_a_short_run_is_sampled_once_and_the_thread_is_gone(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", attempt=3) as log, sampling(log):
        assert "steady-sample" in {thread.name for thread in threading.enumerate()}
    assert "steady-sample" not in {thread.name for thread in threading.enumerate()}
    (sample,) = read(tmp_path / "events.jsonl")
    assert isinstance(sample, MachineStats)
    assert sample.attempt == 3 and sample.time > 0 and sample.seconds > 0


def test_the_samples_cover_the_whole_time(tmp_path: Path) -> None:
    with EventLog(tmp_path / "events.jsonl", attempt=1) as log, sampling(log):
        threading.Event().wait(2.2)
    machine_stats = [event for event in read(tmp_path / "events.jsonl") if isinstance(event, MachineStats)]
    assert len(machine_stats) >= 2
    assert sum(event.seconds for event in machine_stats) > 2.0
    assert all(
        later.time - event.time == pytest.approx(later.seconds, abs=0.5) for event, later in pairwise(machine_stats)
    )


def test_each_gpu_has_its_own_event(tmp_path: Path) -> None:
    driver = Driver(_h100(), _h100(UUID="GPU-bb"))
    log_path, opened = tmp_path / "events.jsonl", partial(GpuSampler, nvml=driver)
    with EventLog(log_path, attempt=1) as log, sampling(log, gpus=["aa", "bb"], open_gpus=opened):
        pass
    assert [event.index for event in read(log_path) if isinstance(event, DeviceStats)] == [0, 1]
    assert driver.open == 0


def test_what_fails_is_told_once_and_the_run_goes_on(tmp_path: Path) -> None:
    def broken(uuids: Collection[str]) -> GpuSampler:
        raise RuntimeError("the driver is another one")

    done = False
    with EventLog(tmp_path / "events.jsonl", attempt=1) as log, sampling(log, gpus=["aa"], open_gpus=broken):
        done = True
    (sample,) = read(tmp_path / "events.jsonl")
    assert done and isinstance(sample, Noticed) and "the driver is another one" in sample.message


def test_a_body_that_raises_ends_the_thread_too(tmp_path: Path) -> None:
    with pytest.raises(KeyError), EventLog(tmp_path / "e.jsonl", 1) as log, sampling(log):
        raise KeyError
    assert "steady-sample" not in {thread.name for thread in threading.enumerate()}


def test_a_long_run_is_sampled_less_often() -> None:
    assert (pause(0.0), pause(500.0), pause(1e6)) == (1.0, 5.0, 30.0)


@linux
def test_ranks_of_the_run_are_no_strangers_on_its_gpus() -> None:
    """As on a machine with two GPUs, where the driver tells of the processes of both ranks."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as rank:
        machine = LinuxCounters(ranks=[rank.pid])
        machine.read()
        pids = machine.pids
        rank.communicate()
    tables = [
        {
            **H100,
            "UUID": f"GPU-{name}",
            "ComputeRunningProcesses": [SimpleNamespace(pid=pid, usedGpuMemory=30 << 30) for pid in running],
        }
        for name, running in (("a", [os.getpid()]), ("b", [rank.pid]), ("c", [os.getpid(), 77]))
    ]

    def read(*uuids: str) -> tuple[DeviceStats, ...]:
        return GpuSampler(uuids, Driver(*tables), root=HOST).read(pids)

    assert [(stats.index, stats.processes) for stats in read("a", "b")] == [(0, 0), (1, 0)]
    assert [(stats.index, stats.other_processes[0]["pid"]) for stats in read("c")] == [(2, 77)]
