"""Clusters on this machine, for the tests marked ``cluster``: two hosts with sshd, and a Slurm on them.

Each is skipped, with the reason, where it cannot be; ``tests/cluster/run`` installs what they need.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

SCRIPTS = Path(__file__).parent
_NET_ADMIN = 1 << 12  # <linux/capability.h>

# An administrator's programs are not always on a user's path.
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


@dataclass(frozen=True)
class Hosts:
    """Two machines, as far as the programs on them can tell, told apart by 1 and 2."""

    folder: Path

    @property
    def addresses(self) -> list[str]:
        """Theirs, the first host's first."""
        return (self.folder / "hosts").read_text(encoding="ascii").split()

    @property
    def disk(self) -> Path:
        """A folder that each host has its own of; the rest of the disk they share."""
        return self.folder / "disk"

    @property
    def ssh_options(self) -> list[str]:
        """What ssh must be told to reach them."""
        return ["-F", str(self.folder / "ssh_config")]

    def ssh(self, host: int, command: str) -> list[str]:
        """The words that run a shell's command there; with the end of ssh it is killed (its terminal goes)."""
        return ["ssh", *self.ssh_options, "-tt", self.addresses[host - 1], command]

    def power_cut(self, host: int) -> None:
        """End everything on a host at once."""
        _script("two_hosts.sh", "kill", self.folder, str(host))

    def link(self, host: int, *, up: bool) -> None:
        """Take a host's network away, or give it back."""
        _script("two_hosts.sh", "mend" if up else "cut", self.folder, str(host))


@dataclass(frozen=True)
class Slurm:
    """A controller here and a node on each of two hosts."""

    hosts: Hosts

    @property
    def variables(self) -> dict[str, str]:
        """What leads srun, sbatch and the others to it."""
        return {"SLURM_CONF": str(self.hosts.folder / "slurm.conf")}

    def tell(self, command: Sequence[str]) -> str:
        """Run one of Slurm's commands and give what it printed."""
        return run(command, more=self.variables)

    def state(self, job: int) -> str:
        """``PENDING``, ``RUNNING``, ``COMPLETING``, ``COMPLETED``, ``FAILED``, ``CANCELLED``, ..."""
        answer = self.tell(["scontrol", "show", "job", str(job)])
        return dict(word.split("=", 1) for word in answer.split() if "=" in word)["JobState"]


@pytest.fixture
def two_hosts() -> Iterator[Hosts]:
    """Two hosts, up for one test."""
    _require_hosts()
    folder = _short_folder()
    try:
        _script("two_hosts.sh", "up", folder)
        yield Hosts(folder)
    finally:
        _script("two_hosts.sh", "down", folder)
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def slurm() -> Iterator[Slurm]:
    """A Slurm of two nodes, up for one test."""
    _require_hosts()
    _require("slurmctld", "slurmd", "srun", "munged")
    folder = _short_folder()
    try:
        _script("slurm.sh", "up", folder)
        yield Slurm(Hosts(folder))
    finally:
        _script("slurm.sh", "down", folder)
        shutil.rmtree(folder, ignore_errors=True)


def mpirun(*words: str) -> list[str]:
    """Open MPI's starter with what every test needs: as root, and ranks on any core."""
    _require("mpirun.openmpi")
    return ["mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *words]


def mpiexec(*words: str) -> list[str]:
    """MPICH's starter."""
    _require("mpiexec.hydra")
    return ["mpiexec.hydra", *words]


def torchrun(*words: str) -> list[str]:
    """torch's starter."""
    return [sys.executable, "-m", "torch.distributed.run", *words]


def free_port(address: str = "127.0.0.1") -> int:
    """A port that nobody uses just now."""
    with socket.create_server((address, 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def started(*commands: Sequence[str], more: Mapping[str, str] | None = None) -> Iterator[list[subprocess.Popen[str]]]:
    """Commands that are under way, whose output is kept; in the end nothing is left of them."""
    kept: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    begun: list[subprocess.Popen[str]] = []
    try:
        for command in commands:
            begun.append(subprocess.Popen(command, env={**os.environ, **(more or {})}, text=True, **kept))
        yield begun
    finally:
        for process in begun:
            _end(process)


def outcome(process: subprocess.Popen[str], *, code: int | None = 0, seconds: float = 240) -> str:
    """What a command printed, when it has ended; fails, with all it said, where it ends with another code.

    Args:
        one: of :func:`started`.
        code: that it must end with; None: any but 0.
        seconds: that it may take.
    """
    output, _ = process.communicate(timeout=seconds)
    is_right = process.returncode != 0 if code is None else process.returncode == code
    assert is_right, f"{process.args!r}: {process.returncode}\n{output}"
    return output


def run(command: Sequence[str], *, more: Mapping[str, str] | None = None) -> str:
    """What a command printed; fails, with all it said, where it fails."""
    with started(command, more=more) as [process]:
        return outcome(process)


def _end(process: subprocess.Popen[str]) -> None:
    """Kill it with all that it has started: mpirun, killed alone, leaves its ranks behind."""
    family: list[psutil.Process] = []
    with suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    process.kill()
    for child in family:
        with suppress(psutil.Error):
            child.kill()
    psutil.wait_procs(family, timeout=10)
    with process:
        pass


def _require_hosts() -> None:
    _require("ip", "ssh", "unshare", "sshd")
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("CapEff"))
    if os.geteuid() != 0 or not int(held.split()[1], 16) & _NET_ADMIN:
        pytest.skip("two hosts need root and CAP_NET_ADMIN, to make networks of their own")


def _require(*names: str) -> None:
    missing = [name for name in names if shutil.which(name, path=_PATH) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} is missing: tests/cluster/run installs it")


def _short_folder() -> Path:
    """For Unix sockets, whose paths have some 100 characters at most."""
    return Path(tempfile.mkdtemp(prefix="steady-", dir="/tmp"))


def _script(name: str, *words: str | Path) -> None:
    done = subprocess.run(
        [SCRIPTS / name, *words], capture_output=True, text=True, timeout=120, check=False, stdin=subprocess.DEVNULL
    )
    assert done.returncode == 0, f"{name} {words}: {done.stdout}{done.stderr}"
