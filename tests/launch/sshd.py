"""Machines for ssh, as far as programs can tell: sshd on addresses of the loopback, as the user who runs the tests.

No root, no network namespaces: they run wherever OpenSSH's server is installed. ``tests/cluster`` has better hosts.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ADDRESSES = ("127.0.0.1", "127.0.0.2")


@dataclass(frozen=True)
class Sshd:
    """Where they listen, and what ssh has to be told."""

    hosts: tuple[str, ...]
    options: tuple[str, ...]
    port: int


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    """Two sshd, gone with the module: other tests count their children."""
    program = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if program is None or shutil.which("ssh") is None:
        pytest.skip("OpenSSH's server is not installed (apt-get install openssh-server)")
    folder = tmp_path_factory.mktemp("sshd")
    port = _free_port()
    if os.geteuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)  # where root's sshd locks itself in
    for name in ("user", "host"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    key = " ".join((folder / "host.pub").read_text().split()[:2])
    (folder / "known_hosts").write_text("".join(f"[{address}]:{port} {key}\n" for address in ADDRESSES))
    _write_config(folder, port)
    started = [_start(program, folder, address, port) for address in ADDRESSES]
    try:
        for address in ADDRESSES:
            _wait_for(address, port)
        options = ("-F", str(folder / "ssh_config"))
        yield Sshd(hosts=tuple(f"{address}:{port}" for address in ADDRESSES), options=options, port=port)
    finally:
        for server in started:
            server.terminate()
            server.wait()


def _write_config(folder: Path, port: int) -> None:
    lines = ["Host *", f"User {getpass.getuser()}", f"IdentityFile {folder}/user", "IdentitiesOnly yes"]
    lines += [f"UserKnownHostsFile {folder}/known_hosts", "StrictHostKeyChecking yes", "LogLevel ERROR"]
    (folder / "ssh_config").write_text("\n".join([*lines, f"Port {port}", ""]))


def _start(program: str, folder: Path, address: str, port: int) -> subprocess.Popen[bytes]:
    lines = [f"ListenAddress {address}:{port}", f"HostKey {folder}/host", f"AuthorizedKeysFile {folder}/user.pub"]
    lines += ["PasswordAuthentication no", "KbdInteractiveAuthentication no", "UsePAM no", "StrictModes no"]
    lines += ["PidFile none", "UseDNS no", "PermitRootLogin prohibit-password", "MaxStartups 100", ""]
    config = folder / f"sshd-{address}.conf"
    config.write_text("\n".join(lines))
    log = str(folder / f"sshd-{address}.log")
    return subprocess.Popen([program, "-D", "-f", str(config), "-E", log], stdin=subprocess.DEVNULL)


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("", 0))
        return int(sock.getsockname()[1])


def _wait_for(address: str, port: int) -> None:
    end = time.monotonic() + 60
    while True:
        try:
            with socket.create_connection((address, port), timeout=5):
                return
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.05)
