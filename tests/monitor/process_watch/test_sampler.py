"""Real processes whose doings are known, watched from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from steadytrain.errors import InputError
from steadytrain.monitor.process_watch import Moment, ProcessLoad, Reading, Sampler, read
from steadytrain.monitor.process_watch.summary import Activity, WatchSummary, summarise

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc here")

BURN = "while True: pass"
READY = "print('ready', flush=True)\n"


@contextmanager
def running(code: str, *, before: list[str] | None = None, **more: str) -> Iterator[int]:
    """A Python program that has said that it is ready; it and all that it started is ended afterwards."""
    command = [*(before or []), sys.executable, "-c", textwrap.dedent(code)]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1", **more})
    assert child.stdout is not None
    try:
        with child.stdout:
            assert child.stdout.readline() == b"ready\n"
        yield child.pid
    finally:
        for value in [*_descendants(child.pid), psutil.Process(child.pid)]:
            with suppress(psutil.Error):
                value.kill()
        child.wait()


def _descendants(pid: int) -> list[psutil.Process]:
    with suppress(psutil.Error):
        return psutil.Process(pid).children(recursive=True)
    return []


def _longest_wait(actor: Activity) -> str:
    return max(actor.waits, key=lambda name: actor.waits[name], default="")


def watched(pid: int, seconds: float) -> list[Moment]:
    """Moments of so many seconds."""
    moments = []
    with Sampler(pid) as sampler:
        end = time.monotonic() + seconds
        while time.monotonic() < end and sampler.lives:
            time.sleep(sampler.pause)
            if (moment := sampler.look()) is not None:
                moments.append(moment)
    return moments


def test_a_process_that_burns_a_core_is_seen_to_want_one_all_the_time() -> None:
    with running(READY + BURN) as pid:
        summary = summarise(watched(pid, 3.0))
    assert summary.main.busy > 0.8 and summary.working > 0.8
    assert summary.rhythm is None and summary.quiet_seconds == 0 and not summary.stopped
    assert summary.trainer.disk < 0.2


ALTERNATE = """
    import time
    print('ready', flush=True)
    while True:
        if time.monotonic() % 1.0 >= 0.5:
            time.sleep(1.0 - time.monotonic() % 1.0)
"""
STUCK = "import threading\n" + READY + "lock = threading.Lock(); lock.acquire(); lock.acquire()"
READER = """
    import os
    print('ready', flush=True)
    file = os.open({!r}, os.O_RDONLY)
    while os.read(file, 1 << 16): pass
"""


@dataclass(frozen=True)
class Waiting:
    """Moments of processes that mostly wait, watched at the same time; what one of them reads."""

    pipe: Path
    alternating: list[Moment]
    stuck: list[Moment]
    reading: list[Moment]
    stopped: list[Moment]


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Waiting:
    pipe = tmp_path_factory.mktemp("pipe") / "slow.tar"
    os.mkfifo(pipe)
    watches = ((ALTERNATE, 9.0), (STUCK, 3.0), (READER.format(str(pipe)), 3.0), (READY + BURN, 2.5))
    with ExitStack() as stack:
        pids = [stack.enter_context(running(code)) for code, _ in watches]
        writer = os.open(pipe, os.O_WRONLY)
        stack.callback(os.close, writer)
        os.write(writer, bytes(1 << 16))
        psutil.Process(pids[3]).suspend()
        pool = stack.enter_context(ThreadPoolExecutor())
        return Waiting(pipe, *pool.map(watched, pids, [seconds for _, seconds in watches]))


def test_the_period_and_the_duty_of_work_and_sleep_are_measured(waiting: Waiting) -> None:
    summary = summarise(waiting.alternating)
    for _ in range(3):  # neighbours may have had its core
        if summary.rhythm is None:
            with running(ALTERNATE) as pid:
                summary = summarise(watched(pid, 9.0))
    assert summary.rhythm is not None
    assert summary.rhythm.period_seconds == pytest.approx(1.0, rel=0.1)
    assert summary.rhythm.duty == pytest.approx(0.5, abs=0.15)
    assert 0.3 < summary.working < 0.75


def test_sleeping_threads_are_counted_by_what_they_wait_for(waiting: Waiting) -> None:
    summary = summarise(waiting.stuck)
    assert summary.quiet_seconds > 2 and summary.working < 0.05
    if not summary.missing:
        assert _longest_wait(summary.main) == "futex"


def test_waiting_for_a_slow_file_is_storage_and_the_file_is_named(waiting: Waiting) -> None:
    reading = read(waiting.reading)
    if reading.seen is not None and reading.seen.missing:
        pytest.skip("system calls of other processes are not readable here")
    assert reading.causes[0].name == "storage"
    assert f"waits most often in read {waiting.pipe}" in reading.causes[0].evidence


def test_stopped_process_is_reported_as_stopped(waiting: Waiting) -> None:
    assert read(waiting.stopped).causes[0].name == "stopped"


@pytest.mark.slow
def test_reads_from_disk_are_distinguished_from_cached_reads(tmp_path: Path) -> None:
    file = tmp_path / "images.bin"
    with file.open("wb") as out:
        out.write(os.urandom(8 << 20))
        os.fsync(out.fileno())
    reader = f"""
        import os, sys, time
        file = os.open({str(file)!r}, os.O_RDONLY)
        print('ready', flush=True)
        while True:
            if sys.argv[1:]: os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.pread(file, 1 << 20, 0)
            time.sleep(0.02)
    """
    with running(reader) as pid:
        cached = summarise(watched(pid, 1.5))
    with running(reader.replace("sys.argv[1:]", "True")) as pid:
        dropped = summarise(watched(pid, 1.5))
    if not dropped.disk_read_bytes:
        pytest.skip(f"{tmp_path} lies on no disk, or /proc/PID/io is not readable")
    assert dropped.disk_read_bytes > 1e6 > (cached.disk_read_bytes or 0.0)


def test_a_shell_and_children_of_children_belong_to_it_also_when_their_parent_is_gone() -> None:
    orphans = """
        import subprocess, sys
        inner = "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'while 1: pass']); time.sleep(1)"
        child = subprocess.Popen([sys.executable, "-c", inner])
        print("ready", flush=True)
        child.wait()
        import time
        time.sleep(60)
    """
    with running(orphans) as pid:
        pids, last = list[int](), tuple[ProcessLoad, ...]()
        with Sampler(pid) as sampler:
            end = time.monotonic() + 60
            while len(pids) < 3 or len(last) != 2:
                assert time.monotonic() < end and sampler.lives, pids
                time.sleep(sampler.pause)
                last = () if (moment := sampler.look()) is None else moment.processes
                pids += [process.pid for process in last if process.pid not in pids]
        burner = max(last, key=lambda process: process.cpu).pid
        psutil.Process(burner).kill()
    assert len(pids) == 3
    assert {process.pid for process in last} == {pid, burner} and burner != pid


def test_ended_process_is_not_alive() -> None:
    with running(READY + "import time; time.sleep(60)") as pid, Sampler(pid) as sampler:
        assert sampler.lives
        psutil.Process(pid).terminate()
        end = time.monotonic() + 60
        while sampler.lives and time.monotonic() < end:
            time.sleep(sampler.pause)
            sampler.look()
        assert not sampler.lives and sampler.look() is None


def test_numbers_of_no_process_are_refused_with_a_remedy() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    with pytest.raises(InputError, match=f"there is no process {gone.pid}"):
        Sampler(gone.pid)
    zombie = subprocess.Popen([sys.executable, "-c", ""])
    while psutil.Process(zombie.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    with pytest.raises(InputError, match="has already ended"):
        Sampler(zombie.pid)
    zombie.wait()


def test_watching_pauses_longer_the_more_there_is_to_look_at() -> None:
    crowd = "import threading\n[threading.Thread(target=threading.Event().wait).start() for _ in range(400)]\n" + READY
    with running(READY + BURN) as few, running(crowd) as many, Sampler(few) as sampler, Sampler(many) as other:
        for _ in range(5):
            sampler.look(), other.look()
        assert sampler.pause < other.pause


@contextmanager
def control_group(controller: str, file: str, limit: str) -> Iterator[Path]:
    """A control group of version 1 with a limit; skips the test where there can be none."""
    group = Path("/sys/fs/cgroup") / controller / f"steadytrain-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError:
        pytest.skip("control groups of version 1 are not here, or not writable")
    try:
        try:
            (group / file).write_text(limit)
        except OSError:
            pytest.skip(f"{controller} has no {file} here")
        yield group
    finally:
        end = time.monotonic() + 60
        while group.exists() and time.monotonic() < end:
            with suppress(OSError):
                group.rmdir()
            time.sleep(0.05)


@pytest.mark.slow
def test_a_slow_disk_is_storage_and_the_threads_state_says_so(tmp_path: Path) -> None:
    file = tmp_path / "images.bin"
    with file.open("wb") as out:
        out.write(os.urandom(32 << 20))
        os.fsync(out.fileno())
    disk = file.stat().st_dev
    reader = f"""
        import os
        file, at = os.open({str(file)!r}, os.O_RDONLY), 0
        print('ready', flush=True)
        while True:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            at += len(os.pread(file, 1 << 19, at % (31 << 20)))
    """
    limit = f"{os.major(disk)}:{os.minor(disk)} 2000000"
    with control_group("blkio", "blkio.throttle.read_bps_device", limit) as group, running(reader) as pid:
        (group / "cgroup.procs").write_text(str(pid))
        time.sleep(0.5)
        reading = read(watched(pid, 4.0))
    if reading.seen is not None and not reading.seen.disk_read_bytes:
        pytest.skip(f"{tmp_path} lies on no disk, or /proc/PID/io is not readable")
    first = reading.causes[0]
    assert first.name == "storage" and "its main thread waits for storage" in first.sentence
    assert reading.seen is not None and reading.seen.main.disk > 0.5


@pytest.mark.slow
def test_a_quota_is_named_with_its_size() -> None:
    with control_group("cpu", "cpu.cfs_quota_us", "20000") as group, running(READY + BURN) as pid:
        (group / "cgroup.procs").write_text(str(pid))
        time.sleep(0.5)
        reading = read(watched(pid, 4.0))
    first = reading.causes[0]
    assert first.name == "quota" and "a quota of 0.2 cores" in first.sentence
    assert reading.seen is not None and reading.seen.cpu < 0.5 and reading.seen.machine.cores == 1


LOADER = """
    import sys, time, torch
    from torch.utils.data import DataLoader, Dataset

    class Images(Dataset):
        def __len__(self): return 10**6
        def __getitem__(self, at):
            {item}
            return torch.zeros(3, 8, 8)

    if __name__ == "__main__":
        torch.set_num_threads(1)
        weights = torch.rand(256, 256)
        for number, batch in enumerate(DataLoader(Images(), batch_size=8, num_workers=2)):
            if number == 2: print("ready", flush=True)
            end = time.thread_time() + {step}
            while time.thread_time() < end: weights @ weights
"""


def _loader(item: str, step: float, seconds: float) -> tuple[WatchSummary, Reading]:
    with running(LOADER.format(item=item, step=step)) as pid:
        moments = watched(pid, seconds)
    return summarise(moments), read(moments)


@pytest.mark.slow
def test_a_loader_with_workers_that_sleep_makes_the_training_wait_for_them() -> None:
    moment, reading = _loader("time.sleep(0.04)", 0.02, 6.0)
    assert len(moment.workers) == 2 and moment.trainers == 1
    if not moment.missing:
        assert {_longest_wait(worker) for worker in moment.workers} == {"clock_nanosleep"}
    # On a machine whose cores others take, what waits for the workers cannot be told from what waits for a core.
    assert {cause.name for cause in reading.causes} & {"waiting", "noisy_neighbour"}
    if (moment.machine.others or 0.0) < 0.5:
        assert "2 worker processes that sleep as well" in " ".join(cause.sentence for cause in reading.causes)


@pytest.mark.slow
def test_a_loader_with_workers_that_burn_makes_the_training_wait_for_their_work() -> None:
    burn = "end = time.thread_time() + 0.03\n            while time.thread_time() < end: pass"
    moment, reading = _loader(burn, 0.01, 6.0)
    assert len(moment.workers) == 2 and all(worker.busy > 0.7 for worker in moment.workers)
    assert {cause.name for cause in reading.causes} & {"decode", "threads", "noisy_neighbour"}
    assert "waiting" not in {cause.name for cause in reading.causes}


@pytest.mark.slow
def test_a_loader_that_keeps_up_leaves_the_training_computing() -> None:
    moment, reading = _loader("pass", 0.2, 6.0)
    assert moment.working > 0.8 and all(worker.busy < moment.main.busy for worker in moment.workers)
    assert not {cause.name for cause in reading.causes} & {"waiting", "decode", "threads", "storage"}


MXNET = """
    import time
    import mxnet as mx
    from mxnet import autograd, gluon, nd

    class Images(gluon.data.Dataset):
        def __len__(self): return 10**6
        def __getitem__(self, at):
            time.sleep(0.04)
            return nd.zeros((3, 32, 32)).asnumpy(), 0

    net = gluon.nn.Sequential()
    net.add(gluon.nn.Conv2D(32, 3, activation="relu"), gluon.nn.Dense(10))
    net.initialize()
    trainer = gluon.Trainer(net.collect_params(), "sgd")
    loss = gluon.loss.SoftmaxCrossEntropyLoss()
    for number, (x, y) in enumerate(gluon.data.DataLoader(Images(), batch_size=8, num_workers=2)):
        if number == 2: print("ready", flush=True)
        x, y = x.as_in_context(mx.cpu()).copy(), y.as_in_context(mx.cpu())
        with autograd.record():
            told = loss(net(x), y)
        told.backward()
        trainer.step(8)
        told.asnumpy()
"""


@pytest.mark.peer
def test_mxnet_with_slow_workers_waits_for_them(mxnet_python: str) -> None:
    command = [mxnet_python, "-c", textwrap.dedent(MXNET)]
    settings = {**os.environ, "MXNET_SUBGRAPH_BACKEND": "NONE", "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=settings)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"ready\n"
        reading = read(watched(child.pid, 6.0))
    finally:
        for value in [*_descendants(child.pid), psutil.Process(child.pid)]:
            value.kill()
        child.wait()
        child.stdout.close()
    assert reading.seen is not None and len(reading.seen.workers) == 2
    assert {cause.name for cause in reading.causes} & {"waiting", "noisy_neighbour"}
