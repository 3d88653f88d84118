"""What mpirun, mpiexec, srun, sbatch and torchrun really tell their ranks is understood, on one host and on two."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.cluster.machines import Hosts, Slurm, free_port, mpiexec, mpirun, outcome, run, started, torchrun

pytestmark = pytest.mark.cluster

SHOW = [sys.executable, str(Path(__file__).parent / "show_world.py")]
TWO_OF_ONE_MACHINE = [(0, 2, 0, 2), (1, 2, 1, 2)]
ONE_OF_EACH_MACHINE = [(0, 2, 0, 1), (1, 2, 0, 1)]


def _worlds(printed: str) -> list[dict[str, Any]]:
    """What the ranks printed among what else was, by rank."""
    documents = [json.loads(line[line.index("{") :]) for line in printed.splitlines() if '"rank":' in line]
    return sorted(documents, key=lambda world: int(world["rank"]))


def _places(worlds: list[dict[str, Any]]) -> list[tuple[int, ...]]:
    return [tuple(world[name] for name in ("rank", "size", "local_rank", "local_size")) for world in worlds]


def _only(worlds: list[dict[str, Any]], name: str) -> Any:
    """What all of them tell alike."""
    (value,) = {world[name] for world in worlds}
    return value


def _rank_by_slurm(slurm: Slurm, *words: str) -> list[dict[str, Any]]:
    return _worlds(slurm.tell(["srun", *words, *SHOW]))


def test_mpirun() -> None:
    command = mpirun("-n", "2", *SHOW)
    with started(command, command) as both:
        first, second = (_worlds(outcome(process)) for process in both)
    for worlds in (first, second):
        assert _places(worlds) == TWO_OF_ONE_MACHINE
        assert (_only(worlds, "launcher"), _only(worlds, "address")) == ("Open MPI", "127.0.0.1")
    assert _only(first, "port") != _only(second, "port"), "two at once must not meet"


def test_mpirun_over_two_hosts(two_hosts: Hosts, tmp_path: Path) -> None:
    agent = " ".join(["ssh", *two_hosts.ssh_options])
    spread = ["--mca", "plm_rsh_agent", agent, "--host", ",".join(f"{a}:1" for a in two_hosts.addresses), "-n", "2"]
    (refused,) = {world["error"] for world in _worlds(run(mpirun(*spread, *SHOW)))}
    assert refused.startswith("Open MPI starts ranks on several machines, but MASTER_ADDR is not set")
    worlds = _worlds(run(mpirun(*spread, "-x", f"MASTER_ADDR={two_hosts.addresses[0]}", *SHOW)))
    assert _places(worlds) == ONE_OF_EACH_MACHINE
    assert [world["host"] for world in worlds] == ["node1", "node2"]
    assert _only(worlds, "address") == two_hosts.addresses[0]
    assert _only(worlds, "port")


def test_mpiexec_of_mpich() -> None:
    worlds = _worlds(run(mpiexec("-n", "2", *SHOW)))
    assert _places(worlds) == TWO_OF_ONE_MACHINE
    assert _only(worlds, "launcher") == "MPI"


def test_srun(slurm: Slurm) -> None:
    worlds = _rank_by_slurm(slurm, "-N1", "-n2")
    assert _places(worlds) == TWO_OF_ONE_MACHINE
    assert (_only(worlds, "launcher"), _only(worlds, "address")) == ("Slurm", "127.0.0.1")
    alone = _rank_by_slurm(slurm, "-N1", "-n1")
    assert _places(alone) == [(0, 1, 0, 1)]


@pytest.mark.parametrize("interface", ["none", "pmi2"])
def test_srun_over_two_nodes(slurm: Slurm, interface: str) -> None:
    """With Slurm's own PMI the ranks are told in MPI's words as well, and find the same."""
    worlds = _rank_by_slurm(slurm, "-N2", "-n3", "-m", "block", f"--mpi={interface}")
    assert _places(worlds) == [(0, 3, 0, 2), (1, 3, 1, 2), (2, 3, 0, 1)]
    assert [world["host"] for world in worlds] == ["node1", "node1", "node2"]
    assert (_only(worlds, "launcher"), _only(worlds, "address")) == ("Slurm", "node1")
    assert _only(worlds, "port")


def test_sbatch(slurm: Slurm, tmp_path: Path) -> None:
    """The shell of a batch script is one process; a step on some of its nodes meets on the first of those."""
    script, log = tmp_path / "job.sh", tmp_path / "log"
    show = " ".join(SHOW)
    script.write_text(f"#!/bin/sh\n{show}\nsrun -N1 -n1 --exclude=node1 {show}\nsrun {show}\n")
    slurm.tell(["sbatch", "--wait", "-N2", "-n2", "-o", str(log), str(script)])
    shell, torchrun, *both = (json.loads(line) for line in log.read_text().splitlines() if line.startswith("{"))
    assert (_places([shell]), shell["launcher"]) == ([(0, 1, 0, 1)], "")
    assert (_places([torchrun]), torchrun["host"]) == ([(0, 1, 0, 1)], "node2")
    both.sort(key=lambda world: world["rank"])
    assert _places(both) == ONE_OF_EACH_MACHINE
    assert _only(both, "address") == "node1"


def test_torchrun(tmp_path: Path) -> None:
    words = ["--nproc-per-node=2", "--master-port", str(free_port()), *SHOW[1:]]
    worlds = _worlds(run(torchrun(*words), more={"TMPDIR": str(tmp_path)}))
    assert _places(worlds) == TWO_OF_ONE_MACHINE
    assert _only(worlds, "launcher") == "torchrun"


@pytest.mark.parametrize("meeting", ["static", "c10d"])
def test_torchrun_over_two_hosts(two_hosts: Hosts, tmp_path: Path, meeting: str) -> None:
    commands = [two_hosts.ssh(host, _agent(two_hosts, host, meeting, tmp_path)) for host in (1, 2)]
    with started(*commands) as both:
        worlds = _worlds("\n".join(outcome(process) for process in both))
    assert _places(worlds) == ONE_OF_EACH_MACHINE
    assert _only(worlds, "launcher") == "torchrun"
    assert {world["host"] for world in worlds} == {"node1", "node2"}


def _agent(hosts: Hosts, host: int, meeting: str, scratch: Path) -> str:
    """The agent's command on one of two hosts."""
    first, address = hosts.addresses[0], hosts.addresses[host - 1]
    how: Mapping[str, list[str]] = {
        "static": [f"--node-rank={host - 1}", f"--master-addr={first}", "--master-port=29500"],
        "c10d": [
            "--rdzv-backend=c10d",
            f"--rdzv-endpoint={first}:29400",
            "--rdzv-id=test",
            f"--local-addr={address}",
            f"--rdzv-conf=is_host={int(host == 1)}",
        ],
    }
    words = torchrun("--nnodes=2", "--nproc-per-node=1", *how[meeting], *SHOW[1:])
    return shlex.join(["exec", "env", f"TMPDIR={scratch}", *words])
