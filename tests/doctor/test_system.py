"""The system and what runs around it, by evidence."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import pytest
from tests.doctor.trees import ARM, DOCKER, POD, SERVER, tree

from steadytrain.doctor.system import system


def test_a_machine_without_a_container(tmp_path: Path) -> None:
    told = system(tree(tmp_path, SERVER), {})
    assert (told.container, told.container_by, told.virtual) == ("none", None, False)
    assert (told.distribution, told.kernel) == ("Ubuntu 22.04.4 LTS", "5.15.0-94-generic")
    assert (told.hardware, told.clock_source) == ("Dell Inc. PowerEdge R740", "hpet")


OVERLAY = "722 565 0:59 / / rw,relatime master:1 - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w"
HOSTNAME = "738 722 8:1 /var/lib/{0}/hostname /etc/hostname rw,relatime - ext4 /dev/sda1 rw"


@pytest.mark.parametrize(
    ("files", "variables", "kind", "by"),
    [
        (DOCKER, {}, "docker", "/.dockerenv"),
        (DOCKER, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "kubernetes", "KUBERNETES_SERVICE_HOST"),
        (POD, {}, "kubernetes", "/proc/self/cgroup"),
        ({"run/.containerenv": 'engine="podman-4.9.3"'}, {}, "podman", "/run/.containerenv"),
        ({"run/systemd/container": "lxc"}, {}, "lxc", "/run/systemd/container"),
        ({"proc/1/environ": "PATH=/bin\0container=lxc\0TERM=linux"}, {}, "lxc", "/proc/1/environ"),
        ({}, {"APPTAINER_CONTAINER": "/images/a.sif"}, "apptainer", "APPTAINER_CONTAINER"),
        (
            {"proc/self/mountinfo": f"{OVERLAY}\n{HOSTNAME.format('docker/containers/4f1c')}"},
            {},
            "docker",
            "/proc/self/mountinfo",
        ),
        (
            {"proc/sys/kernel/osrelease": "5.15.153.1-microsoft-standard-WSL2"},
            {},
            "wsl",
            "/proc/sys/kernel/osrelease",
        ),
    ],
)
def test_a_container_is_named_with_its_evidence(
    tmp_path: Path, files: dict[str, str], variables: dict[str, str], kind: str, by: str
) -> None:
    told = system(tree(tmp_path, SERVER, files), variables)
    assert (told.container, told.container_by) == (kind, by)


def test_a_docker_host_is_no_container(tmp_path: Path) -> None:
    services = {"proc/self/cgroup": "0::/system.slice/docker.service", "proc/1/cgroup": "0::/init.scope"}
    assert system(tree(tmp_path, SERVER, services), {}).container == "none"


def test_where_nothing_can_be_read_nothing_is_claimed(tmp_path: Path) -> None:
    told = system(tmp_path, {})
    assert (told.container, told.virtual, told.hardware, told.clock_source) == (None, None, None, None)


def test_a_virtual_machine_by_its_processor_or_by_its_maker(tmp_path: Path) -> None:
    flags = {"proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu sse2 hypervisor"}
    assert system(tree(tmp_path / "x86", SERVER, flags), {}).virtual is True
    assert system(tree(tmp_path / "arm", ARM, {"sys/class/dmi/id/sys_vendor": "QEMU"}), {}).virtual is True


def test_this_python_and_its_environment() -> None:
    told = system(Path("/"), os.environ)
    assert (told.python, told.executable) == (platform.python_version(), sys.executable)
    assert told.venv == (sys.prefix if sys.prefix != sys.base_prefix else None)


def test_a_clock_behind_the_files_that_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert system(Path("/"), {}).clock_behind_seconds == 0
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 100 * 365 * 86_400)
    assert (system(Path("/"), {}).clock_behind_seconds or 0) > 365 * 86_400
