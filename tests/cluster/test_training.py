"""The same command under every launcher trains the same network, and what dies on the way costs time, not bits."""

from __future__ import annotations

import os
import re
import signal

import psutil
import pytest
from tests.cluster.machines import Hosts, Slurm, free_port, mpirun, outcome, run, started
from tests.cluster.trained import BATCH_SIZE, Training, wait_until

from steadytrain import events
from steadytrain.run import Run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

RANK_LOST = 4
PREEMPTED = 75


def _require_same(training: Training, reference: Training) -> None:
    training.require_each_once(ranks=2)
    assert training.weights() == reference.weights()


def _launcher(training: Training) -> str:
    return str(training.started()[0].machine["launcher"])


def _plain(hosts: Hosts, training: Training) -> list[list[str]]:
    """Commands for a rank on each host, told which by hand."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": hosts.addresses[0], "MASTER_PORT": "29500"}
    lines = [training.shell(**common, RANK=str(rank)) for rank in (0, 1)]
    return [hosts.ssh(rank + 1, line) for rank, line in enumerate(lines)]


def _pid(training: Training, rank: int) -> int:
    """The process of a rank, wherever it runs on this machine."""
    for process in psutil.process_iter():
        try:
            words, variables = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        own_rank = next(
            (variables[name] for name in ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID") if name in variables), None
        )
        if own_rank == str(rank) and str(training.run) in words and "torch.distributed.run" not in words:
            return process.pid
    raise AssertionError(f"no process of rank {rank} of {training.run}")


def test_mpirun(training: Training, reference: Training) -> None:
    run(mpirun("-n", "2", *training.command()), more=training.variables)
    _require_same(training, reference)
    assert _launcher(training) == "Open MPI"


def test_torchrun(training: Training, reference: Training) -> None:
    run(training.torchrun("--nproc-per-node=2", f"--master-port={free_port()}"), more=training.variables)
    _require_same(training, reference)
    assert _launcher(training) == "torchrun"


@pytest.mark.parametrize("nodes", [1, 2])
def test_srun(slurm: Slurm, training: Training, reference: Training, nodes: int) -> None:
    run(["srun", f"-N{nodes}", "-n2", *training.command()], more=slurm.variables | training.variables)
    _require_same(training, reference)
    assert _launcher(training) == "Slurm"


def test_ranks_on_two_hosts(two_hosts: Hosts, training: Training, reference: Training) -> None:
    with started(*_plain(two_hosts, training)) as both:
        first, second = (outcome(process) for process in both)
    _require_same(training, reference)
    assert "top1" in first
    warnings = r"\[W.*\[c10d\] The hostname of the client socket"  # torch's own, where addresses have no names
    assert not [line for line in second.splitlines() if not re.match(warnings, line)], "only rank 0 prints"


def test_nothing_need_be_shared_but_the_data(two_hosts: Hosts, training: Training, reference: Training) -> None:
    """A run folder that each host has for itself: rank 0's holds the run, the other's what that rank has to say."""
    local_training = Training(training.data, two_hosts.disk / "run", training.seen)
    with started(*_plain(two_hosts, local_training)) as both:
        for process in both:
            outcome(process)
    disks = [two_hosts.folder / f"disk{host}" / "run" for host in (1, 2)]
    assert Training(local_training.data, disks[0], local_training.seen).weights() == reference.weights()
    assert (disks[1] / "events-1.jsonl").exists()
    assert not (disks[1] / "model.safetensors").exists()


def test_a_killed_worker_of_torchrun_is_replaced(training: Training, reference: Training) -> None:
    training.pace(0.3)
    words = training.torchrun("--nproc-per-node=2", "--max-restarts=3", f"--master-port={free_port()}")
    with started(words, more=training.variables | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}) as [agent]:
        training.wait_for_step(5)
        os.kill(_pid(training, 1), signal.SIGKILL)
        training.pace(0)
        outcome(agent)
    assert training.weights() == reference.weights()
    before, after = (e.step for e in training.started())
    assert before == 0 and after >= 4


def test_a_killed_rank_of_mpirun_costs_the_same_command_again(training: Training, reference: Training) -> None:
    training.pace(0.3)
    with started(mpirun("-n", "2", *training.command()), more=training.variables) as [broken]:
        training.wait_for_step(5)
        os.kill(_pid(training, 1), signal.SIGKILL)
        outcome(broken, code=None)
    training.pace(0)
    run(mpirun("-n", "2", *training.command()), more=training.variables)
    assert training.weights() == reference.weights()


def test_a_host_without_power_is_named_and_one_machine_finishes_the_run(
    two_hosts: Hosts, training: Training, reference: Training
) -> None:
    training.pace(0.3)
    with started(*_plain(two_hosts, training)) as [first, _]:
        training.wait_for_step(5)
        two_hosts.power_cut(2)
        output = outcome(first, code=RANK_LOST)
    assert "rank 1" in output and "node2" in output
    training.pace(0)
    run(training.command("--procs", "2"), more=training.variables)
    assert training.weights() == reference.weights()


def test_a_host_without_network_is_named(two_hosts: Hosts, training: Training) -> None:
    training.pace(0.3)
    with started(*_plain(two_hosts, training)) as [first, _]:
        training.wait_for_step(5)
        two_hosts.link(2, up=False)
        output = outcome(first, code=RANK_LOST)
    assert "rank 1" in output and "node2" in output


def _elastic(hosts: Hosts, training: Training, host: int) -> list[str]:
    """The command of an agent of torchrun that goes on with one host where there are no two, and soon notices."""
    meeting = f"is_host={int(host == 1)},last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=3"
    options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=test"]
    options += [f"--rdzv-endpoint={hosts.addresses[0]}:29400", f"--rdzv-conf={meeting}"]
    words = training.torchrun(*options, f"--local-addr={hosts.addresses[host - 1]}")
    return hosts.ssh(host, training.shell(words, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"))


def test_a_run_whose_host_dies_goes_on_with_the_other_one(
    two_hosts: Hosts, training: Training, reference: Training
) -> None:
    """One rank makes the micro-batches of two: the same updates to the last bit."""
    training.pace(0.3)
    with started(*(_elastic(two_hosts, training, host) for host in (1, 2))) as [first, _]:
        training.wait_for_step(5)
        two_hosts.power_cut(2)
        training.pace(0)
        outcome(first)
    assert [(e.machine.get("ranks", 1), e.machine["micro_batches"]) for e in training.started()] == [(2, 2), (1, 2)]
    assert training.started()[1].step >= 4
    assert training.parameters() == reference.parameters()


def test_a_host_that_comes_later_takes_its_share(two_hosts: Hosts, training: Training) -> None:
    training.pace(1)
    with started(_elastic(two_hosts, training, 1)) as [first]:
        training.wait_for_step(3)
        with started(_elastic(two_hosts, training, 2)) as [second]:
            wait_until(lambda: len(training.started()) == 2, "the second host to join")
            training.pace(0)
            outcome(second)
        outcome(first)
    assert [e.machine.get("ranks", 1) for e in training.started()] == [1, 2]
    steps = [e for e in Run.open(training.run).events() if isinstance(e, events.Step)]
    assert {(e.step, e.position) for e in steps} == {(step, step * BATCH_SIZE) for step in range(1, 21)}
    assert training.seen_by(1)


BATCH = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=1 --cpus-per-task=1 --requeue --open-mode=append
trap 'kill -USR1 $ranks' USR1
srun --kill-on-bad-exit=0 {command} &
ranks=$!
while kill -0 $ranks 2>/dev/null; do wait $ranks; done  # a trapped signal ends a wait early
wait $ranks; code=$?
if [[ $code == 75 ]]; then scontrol requeue $SLURM_JOB_ID; fi
exit $code
"""


def _submit(slurm: Slurm, training: Training, *options: str) -> int:
    script = training.run.with_name("job.sh")
    script.write_text(BATCH.format(command=training.shell().removeprefix("exec ")), encoding="utf-8")
    answer = slurm.tell(["sbatch", "--parsable", *options, "-o", str(training.run.with_name("log")), str(script)])
    return int(answer.split(";")[0])


def test_a_job_out_of_time_is_queued_again_and_goes_on(slurm: Slurm, training: Training, reference: Training) -> None:
    training.pace(6)
    # The signal comes up to half a minute early, as Slurm looks twice a minute.
    job = _submit(slurm, training, "--time=2", "--signal=B:USR1@30")
    wait_until(lambda: "preempted" in training.ended(), "the signal before the end", 180)
    training.pace(0)
    wait_until(lambda: slurm.state(job) in ("COMPLETED", "FAILED", "TIMEOUT"), f"job {job}", 180)
    log = training.run.with_name("log").read_text(encoding="utf-8")
    assert slurm.state(job) == "COMPLETED", log
    assert training.ended() == ["preempted", "finished"]
    assert training.weights() == reference.weights()


def test_a_cancelled_job_has_saved(slurm: Slurm, training: Training, reference: Training) -> None:
    training.pace(0.3)
    job = _submit(slurm, training)
    training.wait_for_step(3)
    slurm.tell(["scancel", str(job)])
    wait_until(lambda: slurm.state(job) == "CANCELLED", f"job {job}")
    assert training.ended() == ["preempted"]
    saved = training.step()
    training.pace(0)
    again = _submit(slurm, training)
    wait_until(lambda: slurm.state(again) in ("COMPLETED", "FAILED"), f"job {again}", 180)
    assert [e.step for e in training.started()] == [0, saved]
    assert training.weights() == reference.weights()
