"""``steady launch`` trains the network that ``steady train --procs 2`` does, wherever it runs and however it stops."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

import psutil
import pytest
from tests.cluster.machines import Hosts, Slurm, outcome, run, started
from tests.cluster.trained import EPOCHS, Training, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
PREEMPTED = 75


def _command(training: Training, *words: str) -> list[str]:
    values = [word for name, value in training.variables.items() for word in ("--env", f"{name}={value}")]
    launch = [sys.executable, "-P", "-m", "steadytrain", "launch", *words, *values]
    return [*launch, "--", *training.command()[3:]]


def _over(hosts: Hosts, training: Training) -> list[str]:
    path = training.run.parent / "hosts"
    path.write_text("".join(f"{address}\n" for address in hosts.addresses))
    return ["--hosts", str(path), "--set", f"ssh.options={json.dumps(hosts.ssh_options)}"]


ASYNC = ["--engine", "async"]


def _train_asynchronously(training: Training, command: Sequence[str], more: Mapping[str, str]) -> None:
    """Train by two workers: each image is seen once an epoch, by one of them, and both see some."""
    images = training.images()

    def seen_by(rank: int) -> list[str]:
        return [image for batch in training.seen_by(rank) for image in batch if image in images]

    training.pace(5)  # one worker alone would need 100 s, in which the other one starts as well
    with started(command, more=more) as [process]:
        wait_until(lambda: bool(seen_by(0) and seen_by(1)) or process.poll() is not None, "both workers' batches")
        training.pace(0)
        output = outcome(process)
    assert seen_by(0) and seen_by(1), output
    assert training.ended() == ["finished"] and training.step() == 5 * EPOCHS
    assert Counter(seen_by(0) + seen_by(1)) == dict.fromkeys(images, EPOCHS)


@contextmanager
def _nothing_of_ray_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a job has started of Ray, known by the job's password, ends with it on all machines."""
    password = secrets.token_hex(32)
    monkeypatch.setenv("RAY_AUTH_TOKEN", password)

    def running() -> list[str]:
        names = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("RAY_AUTH_TOKEN") == password:
                    names.append(process.name())
        return names

    yield
    wait_until(lambda: not running(), "the end of Ray's processes", 60)


@pytest.mark.parametrize("words", [[], ["--on", "mpi", "--set", "mpi.program=mpirun.openmpi"]], ids=["local", "mpi"])
def test_asynchronous_workers_on_this_machine(
    words: Sequence[str], training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _nothing_of_ray_left(monkeypatch):
        command = [*_command(training, *words, "--procs", "2"), *ASYNC]
        _train_asynchronously(training, command, {**training.variables, **AS_ROOT})


def test_asynchronous_workers_over_ssh(two_hosts: Hosts, training: Training, monkeypatch: pytest.MonkeyPatch) -> None:
    with _nothing_of_ray_left(monkeypatch):
        _train_asynchronously(training, [*_command(training, *_over(two_hosts, training)), *ASYNC], {})
    hosts = {str(place).partition(",")[0] for place in training.started()[0].machine["servers"]}
    assert hosts == {"node1"}, "the server is on the first machine"


def test_asynchronous_workers_over_ssh_stopped_and_gone_on_with(
    two_hosts: Hosts, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.pace(0.3)
    command = [*_command(training, *_over(two_hosts, training), "--set", "grace_seconds=120"), *ASYNC]
    with _nothing_of_ray_left(monkeypatch):
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            training.wait_for_step(4)
            process.send_signal(signal.SIGINT)
            output, _ = process.communicate(timeout=200)
        assert process.returncode == PREEMPTED, output
    assert training.ended() == ["preempted"], output
    training.pace(0)
    run(command)
    assert training.ended() == ["preempted", "finished"]


def test_asynchronous_workers_over_ssh_end_with_the_command_that_started_them(
    two_hosts: Hosts, training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    training.pace(0.3)
    command = [*_command(training, *_over(two_hosts, training)), *ASYNC]
    with _nothing_of_ray_left(monkeypatch), subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        training.wait_for_step(4)
        process.kill()


@pytest.mark.parametrize("words", [[], ["--on", "mpi", "--set", "mpi.program=mpirun.openmpi"]], ids=["local", "mpi"])
def test_on_this_machine(words: Sequence[str], training: Training, reference: Training) -> None:
    run(_command(training, *words, "--procs", "2"), more={**training.variables, **AS_ROOT})
    training.require_each_once(ranks=2)
    assert training.weights() == reference.weights()


def test_over_ssh_stopped_and_gone_on_with(two_hosts: Hosts, training: Training, reference: Training) -> None:
    training.pace(0.3)
    command = _command(training, *_over(two_hosts, training), "--set", "grace_seconds=120")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        training.wait_for_step(4)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=200)
    assert process.returncode == PREEMPTED, output
    assert training.ended() == ["preempted"]
    training.pace(0)
    child = run(command)
    assert training.weights() == reference.weights(), child


def test_over_ssh_a_lost_machine_ends_the_run_and_it_goes_on_later(
    two_hosts: Hosts, training: Training, reference: Training
) -> None:
    training.pace(0.3)
    command = _command(training, *_over(two_hosts, training))
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        training.wait_for_step(4)
        two_hosts.power_cut(2)
        output, _ = process.communicate(timeout=200)
    assert process.returncode not in (0, PREEMPTED), output
    assert f"{two_hosts.addresses[1]}: connection lost" in output
    training.pace(0)
    run(training.command("--procs", "2"), more=training.variables)
    assert training.weights() == reference.weights(), output


def test_machines_may_go_where_fewer_are_enough(two_hosts: Hosts, training: Training) -> None:
    training.pace(0.3)
    command = _command(training, *_over(two_hosts, training), "--nodes", "1:2", "--set", "restarts=3")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        training.wait_for_step(4)
        two_hosts.power_cut(2)
        training.pace(0)
        output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output
    assert training.ended()[-1] == "finished", output


def _run_past_its_time(slurm: Slurm, training: Training, *more: str, minutes: int = 1) -> None:
    """Submit a job whose time is up before its training, and wait until it has been requeued and has ended.

    On a busy machine the time may be up more than once.
    """
    training.pace(2 if minutes == 1 else 10)
    words = ["--on", "slurm", "--nodes", "2", "--set", f"minutes={minutes}", "--set", "slurm.signal_seconds=15"]
    words += ["--set", f"folder={training.run.parent}", "-o", str(training.run.parent / "out")]
    done = subprocess.run(
        [*_command(training, *words), *more],
        env={**os.environ, **training.variables, "SLURM_CONF": slurm.variables["SLURM_CONF"]},
        capture_output=True,
        text=True,
        check=True,
    )
    number = int(done.stdout)
    wait_until(lambda: training.step() > 0, "its first step", 180)
    wait_until(lambda: "preempted" in training.ended(), "its time to be up", 180)
    training.pace(0)
    wait_until(lambda: slurm.state(number) in ("COMPLETED", "FAILED"), "its end", 180)
    log = (training.run.parent / f"steadytrain-{number}.log").read_text()
    assert slurm.state(number) == "COMPLETED", log
    *before, last = training.ended()
    assert ({*before}, last) == ({"preempted"}, "finished"), log


def test_on_slurm_the_time_limit_costs_no_bit(slurm: Slurm, training: Training, reference: Training) -> None:
    _run_past_its_time(slurm, training)
    assert training.weights() == reference.weights()


def test_asynchronous_workers_on_slurm_save_at_the_time_limit(slurm: Slurm, training: Training) -> None:
    _run_past_its_time(slurm, training, *ASYNC, minutes=2)
