"""``steady launch`` on clusters of this machine: two hosts with nothing but a disk in common, mpirun, and a Slurm."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.cluster.machines import Hosts, Slurm
from tests.data.packing.pictures import write_folder
from tests.store import Bucket, FaultProxy

from steadytrain.data.packing.pack import pack

pytestmark = pytest.mark.cluster

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
SHOW = """\
import json, os, platform
from steadytrain.distributed.world import world_from_environment
world = vars(world_from_environment(os.environ))
print(json.dumps({**world, "host": platform.node(), "token": os.environ.get("TOKEN")}), flush=True)
"""
# The first start of rank 0 runs until it is asked to save; the second ends well.
SAVES = """\
import os, signal, sys, time
def save(*_):
    os.write(1, b"saved\\n")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
signal.signal(signal.SIGUSR1, save)
print("start", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
if int(os.environ.get("SLURM_RESTART_COUNT", "0")) == 0:
    time.sleep(300)
"""


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Path]:
    """A working directory that all hosts see."""
    (tmp_path / "show.py").write_text(SHOW)
    (tmp_path / "saves.py").write_text(SAVES)
    yield tmp_path


def _launch(work: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-m", "steadytrain", "launch", *words],
        env={**os.environ, **variables},
        cwd=work,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def _worlds(printed: str) -> list[dict[str, Any]]:
    """What the ranks printed, by rank; MPICH lets their lines run into each other."""
    documents = [json.loads(word) for word in re.findall(r"\{[^{}]*\}", printed)]
    return sorted(documents, key=lambda world: int(world["rank"]))


def _over(hosts: Hosts, work: Path, slots: int = 1) -> list[str]:
    (work / "hosts").write_text("".join(f"{address} slots={slots}\n" for address in hosts.addresses))
    return ["--hosts", "hosts", "--set", f"ssh.options={json.dumps(hosts.ssh_options)}"]


@pytest.mark.parametrize("tool", ["rsync", "tar"])
def test_ssh_on_two_hosts_with_disks_of_their_own(tool: str, two_hosts: Hosts, work: Path) -> None:
    there = two_hosts.disk / "my work"
    words = [*_over(two_hosts, work, 2), "--sync", str(there), "--set", f"ssh.tool={tool}", "--env", "TOKEN"]
    done = _launch(work, *words, "--", "python", "show.py", TOKEN="never shown")
    assert done.returncode == 0, done.stderr
    worlds = _worlds(done.stdout)
    assert [(world["rank"], world["local_rank"], world["host"]) for world in worlds] == [
        (0, 0, "node1"),
        (1, 1, "node1"),
        (2, 0, "node2"),
        (3, 1, "node2"),
    ]
    assert {(world["address"], world["token"]) for world in worlds} == {(two_hosts.addresses[0], "never shown")}


def test_elastic_agents_of_torchrun_meet_on_two_hosts(two_hosts: Hosts, work: Path) -> None:
    done = _launch(work, *_over(two_hosts, work), "--nodes", "2:2", "--", "python", "show.py")
    assert done.returncode == 0, done.stderr
    assert {(world["rank"], world["size"]) for world in _worlds(done.stdout)} == {(0, 2), (1, 2)}


def test_a_host_that_loses_its_power_ends_the_rest(two_hosts: Hosts, work: Path) -> None:
    command = [sys.executable, "-P", "-m", "steadytrain", "launch", *_over(two_hosts, work), "--", "python", "saves.py"]
    with subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        heard = "".join(process.stdout.readline() for _ in range(2))
        assert heard.count("start") == 2
        two_hosts.power_cut(2)
        rest, errors = process.communicate(timeout=150)
    assert process.returncode == 255, errors
    assert "saved" in rest and f"{two_hosts.addresses[1]}: connection lost" in errors


def test_mpirun_has_its_ranks_save_at_ctrl_c(work: Path) -> None:
    command = [sys.executable, "-P", "-m", "steadytrain", "launch", *_words_of("openmpi"), "--procs", "2"]
    with subprocess.Popen(
        [*command, "--", "python", "saves.py"],
        cwd=work,
        env={**os.environ, **AS_ROOT},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        heard = "".join(process.stdout.readline() for _ in range(2))
        assert heard.count("start") == 2
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest.count("saved")) == (75, 2), errors


@pytest.mark.parametrize("kind", ["openmpi", "mpich"])
def test_mpi_on_this_machine(kind: str, work: Path) -> None:
    words = [*_words_of(kind), "--procs", "2", "--env", "TOKEN", "--", "python", "show.py"]
    done = _launch(work, *words, TOKEN="never shown", **AS_ROOT)
    assert done.returncode == 0, done.stderr
    worlds = _worlds(done.stdout)
    assert [(world["rank"], world["size"], world["local_rank"]) for world in worlds] == [(0, 2, 0), (1, 2, 1)]
    assert {world["token"] for world in worlds} == {"never shown"}


def test_mpi_on_two_hosts(two_hosts: Hosts, work: Path) -> None:
    words = [*_words_of("openmpi"), *_over(two_hosts, work), "--", "python", "show.py"]
    done = _launch(work, *words, **AS_ROOT)
    assert done.returncode == 0, done.stderr
    assert [(world["rank"], world["host"]) for world in _worlds(done.stdout)] == [(0, "node1"), (1, "node2")]


@pytest.fixture
def far_bucket(two_hosts: Hosts, bucket: Bucket, tmp_path: Path) -> Iterator[list[str]]:
    """Options for launch by which two hosts reach a bucket, which holds photographs and answers slowly for each."""
    for path in sorted(write_folder(tmp_path / "photos", {"cat": 50, "dog": 50}, suffix=".jpg").rglob("*.jpg")):
        bucket.put(f"raw/{path.relative_to(tmp_path / 'photos').as_posix()}", path)
    proxy = FaultProxy(bucket.address, (two_hosts.folder / "gateway").read_text(encoding="ascii").strip())
    proxy.matches, proxy.delay_seconds = ".jpg", 0.5
    values = {"AWS_ENDPOINT_URL": proxy.address, "STEADYTRAIN_CACHE": str(two_hosts.disk / "cache")}
    words = [f"{name}={value}" for name, value in values.items()]
    words += [name for name in os.environ if (name.startswith("AWS_") and name not in values) or name == "PYTHONPATH"]
    yield [word for each in words for word in ("--env", each)]
    proxy.close()


def _start_packing(hosts: Hosts, work: Path, bucket: Bucket, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", "-m", "steadytrain", "launch", *words, *_over(hosts, work)]
    command += ["--", "pack", bucket.uri("raw/"), bucket.uri("sets/x"), "--shards", "12"]
    return subprocess.Popen(
        command,
        cwd=work,
        env={**os.environ, **AS_ROOT},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _wait_until_both_pack(bucket: Bucket, process: subprocess.Popen[str]) -> None:
    """Wait until each host has packed a shard: of two processes, each packs every second one."""

    def packed() -> set[int]:
        cards = [re.search(r"x-(\d{5})-of-00012\.json$", name) for name in bucket.names()]
        return {int(card[1]) % 2 for card in cards if card}

    _until(lambda: packed() == {0, 1} or process.poll() is not None)
    assert process.poll() is None, process.communicate()[1]


def _require_files_of_one_process(bucket: Bucket, folder: Path) -> None:
    pack(bucket.uri("raw/"), folder / "x", shards=12)
    for path in folder.iterdir():
        assert bucket.get(f"sets/{path.name}") == path.read_bytes(), path.name
    assert not [name for name in bucket.names() if ".x.plan/" in name]


def test_two_hosts_pack_a_bucket_and_one_does_the_work_of_the_other_which_loses_its_power(
    two_hosts: Hosts, bucket: Bucket, far_bucket: list[str], work: Path
) -> None:
    with _start_packing(two_hosts, work, bucket, *far_bucket, "--set", "restarts=0") as process:
        _wait_until_both_pack(bucket, process)
        two_hosts.power_cut(2)
        errors = process.communicate(timeout=150)[1]
    assert process.returncode == 0 and f"{two_hosts.addresses[1]}: connection lost" in errors, errors
    _require_files_of_one_process(bucket, work / "one")


def test_mpirun_packs_a_bucket_on_two_hosts_and_starts_again_after_a_kill(
    two_hosts: Hosts, bucket: Bucket, far_bucket: list[str], work: Path
) -> None:
    with _start_packing(two_hosts, work, bucket, *_words_of("openmpi"), *far_bucket) as process:
        _wait_until_both_pack(bucket, process)
        [victim] = [other for other in psutil.process_iter() if _is_packing_rank(other, 1, bucket)]
        victim.kill()
        printed, errors = process.communicate(timeout=150)
    assert process.returncode == 0 and f"ended with exit code {128 + signal.SIGKILL}" in errors, errors
    assert "of 12 shards are packed already" in errors, errors
    assert "x-{00000..00011}-of-00012.rec: 100 images" in printed
    _require_files_of_one_process(bucket, work / "one")


def _is_packing_rank(process: psutil.Process, rank: int, bucket: Bucket) -> bool:
    try:
        is_ours = bucket.uri("sets/x") in process.cmdline()
        return is_ours and process.environ().get("OMPI_COMM_WORLD_RANK") == str(rank)
    except psutil.Error:
        return False


def _words_of(kind: str) -> list[str]:
    """Debian can have both, by these names."""
    program = {"openmpi": "mpirun.openmpi", "mpich": "mpiexec.hydra"}[kind]
    if shutil.which(program) is None:
        pytest.skip(f"{program} is missing: tests/cluster/run installs it")
    return ["--on", "mpi", "--set", f"mpi.kind={kind}", "--set", f"mpi.program={program}"]


def _log_of(slurm: Slurm, work: Path, *words: str) -> tuple[int, Path]:
    done = _launch(work, "--on", "slurm", "--nodes", "2", *words, SLURM_CONF=slurm.variables["SLURM_CONF"])
    assert done.returncode == 0, done.stderr
    number = int(done.stdout)
    return number, work / f"steadytrain-{number}.log"


def _until(holds: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.2)


def _said(log: Path) -> str:
    return log.read_text() if log.exists() else ""


def test_slurm_starts_a_rank_on_each_node(slurm: Slurm, work: Path) -> None:
    number, log = _log_of(slurm, work, "--procs", "2", "--", "python", "show.py")
    _until(lambda: slurm.state(number) in ("COMPLETED", "FAILED"))
    worlds = _worlds(log.read_text())
    assert [(world["rank"], world["size"], world["local_rank"]) for world in worlds] == [
        (0, 4, 0),
        (1, 4, 1),
        (2, 4, 0),
        (3, 4, 1),
    ]


def test_slurm_has_ranks_save_before_the_time_is_up_and_goes_on_later(slurm: Slurm, work: Path) -> None:
    words = ["--set", "minutes=1", "--set", "slurm.signal_seconds=30", "--", "python", "saves.py"]
    number, log = _log_of(slurm, work, *words)
    _until(lambda: slurm.state(number) in ("COMPLETED", "FAILED"), seconds=180)
    text = log.read_text()
    assert re.findall(r"start \d|saved", text) == ["start 0"] * 2 + ["saved"] * 2 + ["start 1"] * 2


def test_slurm_lets_a_cancelled_job_save_and_does_not_start_it_again(slurm: Slurm, work: Path) -> None:
    number, log = _log_of(slurm, work, "--", "python", "saves.py")
    _until(lambda: _said(log).count("start 0") == 2)
    slurm.tell(["scancel", str(number)])
    _until(lambda: slurm.state(number) == "CANCELLED")
    _until(lambda: _said(log).count("saved") == 2, seconds=10)
    time.sleep(5)
    assert slurm.state(number) == "CANCELLED"


def test_slurm_starts_again_after_a_failure_as_often_as_it_is_told(slurm: Slurm, work: Path) -> None:
    (work / "fails.py").write_text(
        "import os, sys; print('start', os.environ.get('SLURM_RESTART_COUNT', '0')); sys.exit(1)"
    )
    number, log = _log_of(slurm, work, "--set", "restarts=1", "--", "python", "fails.py")
    _until(lambda: slurm.state(number) == "FAILED", seconds=180)
    assert set(re.findall(r"start \d", log.read_text())) == {"start 0", "start 1"}


def test_the_script_passes_slurms_own_check(slurm: Slurm, work: Path) -> None:
    _launch(work, "--on", "slurm", "--nodes", "2", "-o", "out", "--dry-run", "--", "train", "a.rec")
    _check(slurm, ["sbatch", "--test-only", str(work / "out" / "steadytrain.sbatch")])


def _check(slurm: Slurm, command: Sequence[str]) -> None:
    done = subprocess.run(command, env=slurm.variables, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0 and "to start at" in done.stderr, done.stderr
