"""Folders and the file systems they are on."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.doctor.trees import tree

from steadytrain.data.packing.prepare import prepare
from steadytrain.doctor.places import is_network, places
from steadytrain.machine.user_cache import cache_folder


def mounted(root: Path, *lines: str) -> Path:
    """A root whose process has these mounts."""
    return tree(root, {"proc/self/mountinfo": "\n".join(("1 0 254:0 / / rw - ext4 /dev/root rw", *lines))})


def test_a_folder_belongs_to_the_deepest_mount_around_it(tmp_path: Path) -> None:
    data = tmp_path / "with space" / "data"
    data.mkdir(parents=True)
    point = str(data.parent).replace(" ", "\\040")
    root = mounted(tmp_path / "root", f"9 1 0:44 / {point} rw,relatime shared:7 - nfs4 server:/export rw,vers=4.2")
    told = places(root, {"STEADYTRAIN_CACHE": str(data)})
    assert (told["cache"].kind, told["cache"].network) == ("nfs4", True)
    assert (told["here"].kind, told["here"].network) == ("ext4", False)


def test_of_two_mounts_on_one_place_the_later_counts(tmp_path: Path) -> None:
    point = tmp_path.resolve()
    root = mounted(tmp_path / "root", f"8 1 0:44 / {point} rw - nfs a:/b rw", f"9 1 0:45 / {point} rw - tmpfs none rw")
    assert places(root, {"STEADYTRAIN_CACHE": str(tmp_path)})["cache"].kind == "tmpfs"


def test_a_folder_that_does_not_exist_yet_is_judged_by_the_one_above(tmp_path: Path) -> None:
    told = places(mounted(tmp_path / "root"), {"STEADYTRAIN_CACHE": str(tmp_path / "not" / "yet")})["cache"]
    room = os.statvfs(tmp_path)
    assert told.path == str(tmp_path / "not" / "yet") and told.writable
    assert told.total_bytes == room.f_blocks * room.f_frsize
    assert not (tmp_path / "not").exists()


def test_a_disk_that_turns_is_told_by_the_disk_of_the_partition(tmp_path: Path) -> None:
    root = tree(mounted(tmp_path / "root"), {"sys/devices/sda/queue/rotational": "1", "sys/devices/sda/sda1/size": "9"})
    link = root / "sys/dev/block/254:0"
    link.parent.mkdir(parents=True)
    link.symlink_to(root / "sys/devices/sda/sda1")
    assert places(root, {"STEADYTRAIN_CACHE": str(tmp_path)})["cache"].rotational is True


def test_a_disk_that_takes_nothing_is_not_writable(read_only_disk: Path) -> None:
    told = places(Path("/"), {"STEADYTRAIN_CACHE": str(read_only_disk / "cache")})["cache"]
    assert (told.writable, told.kind, told.network) == (False, "tmpfs", False)


def test_the_room_of_a_small_disk(small_disk: Path) -> None:
    assert places(Path("/"), {"HF_HUB_CACHE": str(small_disk)})["weights"].total_bytes == 2 << 20


def test_a_current_folder_that_was_removed_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert "here" not in places(Path("/"), {})


def test_the_cache_is_where_packing_puts_it(digits_folder: Path, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("STEADYTRAIN_CACHE")
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        prepared = prepare(digits_folder)
        assert prepared.train.is_relative_to(cache_folder(os.environ) or "none")


@pytest.mark.parametrize("kind", ["nfs", "cifs", "smb3", "lustre", "ceph", "9p", "fuse.sshfs", "fuse.gcsfuse"])
def test_network_file_systems_are_known_by_name(kind: str) -> None:
    assert is_network(kind)


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs", "zfs", "overlay", "tmpfs", "fuseblk", "fuse.ntfs-3g", "apfs"])
def test_local_ones_are_not_taken_for_them(kind: str) -> None:
    assert not is_network(kind)
