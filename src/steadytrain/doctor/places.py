"""The folders that training reads from and writes to, and the file systems they are on."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from steadytrain.doctor.facts import Place
from steadytrain.machine.procfs import read
from steadytrain.machine.user_cache import cache_folder, user_cache

# Names of the kernel for file systems whose data lie on another machine. Those of FUSE by what is behind them.
_NETWORK = {
    *("nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "wekafs"),
    *("panfs", "pvfs2", "orangefs", "ocfs2", "gfs2", "coda", "ncpfs", "davfs", "juicefs", "quobyte", "vastnfs"),
}
_NETWORK_FUSE = re.compile(
    r"fuse\.(sshfs|s3fs|gcsfuse|rclone|glusterfs|ceph|goofys|mount-s3|mountpoint-s3|blobfuse2?|juicefs|davfs2|dbfs"
    r"|moosefs|mfs|seaweedfs|cvmfs2|geesefs|s3backer|afs|weka\S*|hdfs\S*|alluxio\S*|quobyte\S*)"
)


@dataclass(frozen=True)
class Mount:
    """A line of ``/proc/self/mountinfo``: where, which file system, and the device's number."""

    point: str
    kind: str
    device: str


def places(root: Path, variables: Mapping[str, str]) -> dict[str, Place]:
    """The facts about the folders, by what they are for: ``here``, ``cache``, ``weights``, ``temporary``, ``shm``.

    Args:
        root: where ``proc`` and ``sys`` lie.
        variables: of the environment.
    """
    shm = root / "dev/shm"
    folders = {
        "here": _here(),
        "cache": cache_folder(variables),
        "weights": _weights_folder(variables),
        "temporary": Path(tempfile.gettempdir()),
        "shm": shm if shm.is_dir() else None,
    }
    mounts = _mounts(root)
    return {name: _place(folder, mounts, root) for name, folder in folders.items() if folder is not None}


def _here() -> Path | None:
    try:
        return Path.cwd()
    except OSError:  # it was removed
        return None


def _weights_folder(variables: Mapping[str, str]) -> Path | None:
    """Where the hub's client keeps pretrained weights."""
    told, home, user = variables.get("HF_HUB_CACHE"), variables.get("HF_HOME"), user_cache(variables)
    return Path(told) if told else Path(home) / "hub" if home else user and user / "huggingface/hub"


def _place(folder: Path, mounts: list[Mount], root: Path) -> Place:
    try:
        there = next(path for path in (folder.resolve(), *folder.resolve().parents) if path.exists())
        room = os.statvfs(there) if hasattr(os, "statvfs") else None
    except (OSError, StopIteration):
        return Place(path=str(folder))
    mount = _mount_of(there, mounts)
    return Place(
        path=str(folder),
        kind=mount.kind if mount else None,
        network=is_network(mount.kind) if mount else None,
        rotational=_rotational(root, mount.device) if mount else None,
        writable=os.access(there, os.W_OK),
        total_bytes=room.f_blocks * room.f_frsize if room and room.f_blocks else None,
        free_bytes=room.f_bavail * room.f_frsize if room and room.f_blocks else None,
        free_files=room.f_favail if room and room.f_files else None,
    )


def is_network(kind: str) -> bool:
    """Whether a file system's data lie on another machine, by the kernel's name for it.

    >>> is_network("nfs4"), is_network("fuse.s3fs"), is_network("ext4"), is_network("overlay")
    (True, True, False, False)
    """
    return kind in _NETWORK or _NETWORK_FUSE.match(kind) is not None


def _mounts(root: Path) -> list[Mount]:
    """What is mounted, in the order in which it was: of two on one place the later one counts."""
    found = []
    for line in (read(root / "proc/self/mountinfo") or "").splitlines():
        first, _, last = line.partition(" - ")
        words, more = first.split(), last.split()
        if len(words) >= 5 and more:
            point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[4])
            found.append(Mount(point, more[0], words[2]))
    return found


def _mount_of(path: Path, mounts: list[Mount]) -> Mount | None:
    around = [mount for mount in mounts if path.is_relative_to(mount.point)]
    return max(reversed(around), key=lambda mount: len(Path(mount.point).parts), default=None)


def _rotational(root: Path, device: str) -> bool | None:
    """Whether the disk turns; a partition asks the disk that it is on, and a virtual disk does not know."""
    block = root / "sys/dev/block" / device
    if block.resolve().name.startswith(("vd", "xvd")):
        return None
    told = read(block / "queue/rotational") or read(block / "../queue/rotational")
    return told == "1" if told in ("0", "1") else None
